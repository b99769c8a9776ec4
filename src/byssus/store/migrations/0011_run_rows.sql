-- Runs as rows: each run with its beginning, its end and its cause, and each attempt of a process to drive it.

-- `threads.run` names the run that has not ended; its row has no `ended_at`. A run that is resumed, handed over or goes on
-- with a person's answer keeps its row and gets one more attempt. The rows are written in the transactions that a run
-- makes anyway: its claim for the lease, and the write that gives the lease back.
CREATE TABLE runs (
  key            {key},
  thread         BIGINT NOT NULL REFERENCES threads (key) ON DELETE CASCADE,
  id             TEXT NOT NULL,
  branch         BIGINT,               -- where it writes; NULL when that branch was removed. Not a reference: it would need
                                       -- an index that every run pays for
  first_seq      BIGINT NOT NULL,      -- of its first message
  last_seq       BIGINT,               -- the head when the lease was given back last
  began_at       TEXT NOT NULL,
  ended_at       TEXT,
  stop_reason    TEXT,                 -- also 'waiting', without an end: a person must answer first
  error          TEXT,                 -- the kind and the message of what it ended with
  cause          TEXT NOT NULL,        -- prompt or resume
  started_by     TEXT,                 -- the user that the agent works for
  request_key    TEXT,                 -- set by the commit that stores the prompt, so a key never stands without it
  request_digest TEXT,                 -- of the prompt: a key that comes with another prompt is refused
  attempts       BIGINT NOT NULL,
  retries        BIGINT NOT NULL,      -- model calls that were repeated after a passing failure
  UNIQUE (id, thread)
);

CREATE INDEX runs_thread ON runs (thread, key);
CREATE INDEX runs_requested ON runs (thread, request_key) WHERE request_key IS NOT NULL;

-- An attempt is what one process did of a run, under one lease. Without an end it goes on, or its process died: the claim
-- that takes the thread over says so ('lost').
CREATE TABLE run_attempts (
  run      BIGINT NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
  number   BIGINT NOT NULL,
  owner    TEXT NOT NULL,              -- where it ran: host and pid
  epoch    BIGINT NOT NULL,            -- of its lease
  began_at TEXT NOT NULL,
  ended_at TEXT,
  outcome  TEXT,                       -- ended, waiting, interrupted, handed over, lost
  PRIMARY KEY (run, number)
);
