-- The backups that were taken of this database. An erasure names them, because they still hold what it removed.

-- These rows are about this database and are never copied; a backup has none.
CREATE TABLE known_backups (
  key      {key},
  host     TEXT NOT NULL,              -- the machine that took it
  path     TEXT NOT NULL,              -- of the file, on that machine
  device   TEXT NOT NULL,              -- of its directory: on another one, its disk may just not be mounted
  taken_at TEXT NOT NULL,
  UNIQUE (host, path)
);
