-- Runs: who drives a thread, which tool calls it has begun, and what waits for it.

-- A run holds its thread's lease. The epoch grows with each lease, so that a process which slept through the end of its
-- own cannot write any more. `run` stays behind when a process dies: that is how an interrupted run is found.
ALTER TABLE threads ADD COLUMN lease_owner TEXT;                        -- NULL while nobody drives the thread
ALTER TABLE threads ADD COLUMN lease_epoch BIGINT NOT NULL DEFAULT 0;
ALTER TABLE threads ADD COLUMN lease_until TEXT;                        -- by the database's clock
ALTER TABLE threads ADD COLUMN lease_abort BIGINT NOT NULL DEFAULT 0;   -- the epoch that was asked to stop
ALTER TABLE threads ADD COLUMN run TEXT;                                -- the run that has begun and not ended
ALTER TABLE threads ADD COLUMN unledgered BIGINT NOT NULL DEFAULT 0;    -- up to this seq, calls may have run unrecorded

UPDATE threads SET unledgered = head;

CREATE INDEX threads_unfinished ON threads (key) WHERE run IS NOT NULL;

-- The ledger: one row a tool call, written before the tool runs. A call of a reply without a row was never started.
CREATE TABLE tool_calls (
  key             {key},
  thread          BIGINT NOT NULL REFERENCES threads (key) ON DELETE CASCADE,
  branch          BIGINT NOT NULL REFERENCES branches (key),
  reply           BIGINT NOT NULL,     -- the seq of the reply that asks for it
  place           BIGINT NOT NULL,     -- which of the reply's calls it is
  call_id         TEXT NOT NULL,       -- as the model named it
  name            TEXT NOT NULL,
  arguments       TEXT NOT NULL,       -- JSON, as the tool gets them
  recovery        TEXT NOT NULL,       -- the tool's policy: never, retry, check, ask
  idempotency_key TEXT NOT NULL,
  run             TEXT NOT NULL,       -- the run that wrote the row last
  status          TEXT NOT NULL,       -- waiting, answered, started; or how it ended: done, failed, unknown, denied, aborted
  reason          TEXT,                -- what a person is asked for: approval or recovery
  question        TEXT,
  answer          TEXT,                -- JSON: what the person said
  attempts        BIGINT NOT NULL,     -- how often it was started
  asked_at        TEXT,
  started_at      TEXT,
  ended_at        TEXT,
  UNIQUE (branch, reply, place)
);

CREATE INDEX tool_calls_waiting ON tool_calls (thread) WHERE status = 'waiting';

-- What was said to a run and not heard yet. Taking a message and adding it to the log is one transaction.
CREATE TABLE inbox (
  key        {key},
  thread     BIGINT NOT NULL REFERENCES threads (key) ON DELETE CASCADE,
  kind       TEXT NOT NULL,            -- steer or follow_up
  id         TEXT NOT NULL,
  role       TEXT NOT NULL,
  body       TEXT NOT NULL,
  created_at TEXT NOT NULL
);

CREATE INDEX inbox_waiting ON inbox (thread, key);

-- The part of a reply that has arrived so far, saved now and then. Gone as soon as the reply itself is stored.
CREATE TABLE partials (
  thread   BIGINT PRIMARY KEY REFERENCES threads (key) ON DELETE CASCADE,
  body     TEXT NOT NULL,
  saved_at TEXT NOT NULL
);
