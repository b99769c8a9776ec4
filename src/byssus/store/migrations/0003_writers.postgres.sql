-- The last transaction of each writing connection. When the answer to a COMMIT is lost, this row says what became of it,
-- on whichever server is the primary by then; taking the row waits for a transaction that is still under way.
CREATE TABLE writers (
  id         TEXT PRIMARY KEY,
  last       BIGINT NOT NULL,
  written_at TIMESTAMPTZ NOT NULL
);
