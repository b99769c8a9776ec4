-- Following: which threads have changed, which are watched from other processes, and a reply as it arrives.

ALTER TABLE threads ADD COLUMN touched BIGINT NOT NULL DEFAULT 0;   -- counts the changes that `version` does not count
ALTER TABLE threads ADD COLUMN watched_until TEXT;                  -- until then, somebody watches from another process

-- What has arrived of a reply since `partials` was written. The whole again with each save would fill the WAL with copies.
CREATE TABLE pieces (
  thread BIGINT NOT NULL REFERENCES partials (thread) ON DELETE CASCADE,
  number BIGINT NOT NULL,              -- from 1, without gaps
  body   TEXT NOT NULL,                -- JSON
  PRIMARY KEY (thread, number)
);
