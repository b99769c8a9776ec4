-- Copies that were made into this database from another one.

-- The row is committed before the first row is copied, and closed when both databases were found equal. Until then what
-- is here is a part of a copy, and belongs to the copy. These rows are about this database and are never copied.
CREATE TABLE copies (
  key         {key},
  source      TEXT NOT NULL,           -- where it comes from, without any password
  began_at    TEXT NOT NULL,
  written_at  TEXT NOT NULL,           -- set with each page, so that nobody goes on writing when the copy was closed
  finished_at TEXT,                    -- NULL while it is not known to be whole
  sha256      TEXT                     -- of all that was copied, when it was finished
);
