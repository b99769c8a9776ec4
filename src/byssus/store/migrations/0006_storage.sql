-- What applications keep beside the log: users and their quotas, sessions, tasks, the log of tools, and what it all cost.

-- A thread is a session to those who say so.
ALTER TABLE threads ADD COLUMN title TEXT NOT NULL DEFAULT '';
ALTER TABLE threads ADD COLUMN status TEXT NOT NULL DEFAULT 'active';   -- active, paused, completed, cancelled
ALTER TABLE threads ADD COLUMN model TEXT;
ALTER TABLE threads ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}';     -- JSON

DROP INDEX threads_owned;
CREATE INDEX threads_owned ON threads (owner, updated_at, id) WHERE owner IS NOT NULL;

CREATE TABLE users (
  key         {key},
  id          TEXT NOT NULL UNIQUE,
  name        TEXT NOT NULL,
  email       TEXT NOT NULL,
  quota_total BIGINT,                  -- in tokens; NULL: no limit
  quota_used  BIGINT NOT NULL,
  preferences TEXT NOT NULL,           -- JSON
  created_at  TEXT NOT NULL,
  updated_at  TEXT NOT NULL
);

-- Threads had owners before there were users.
INSERT INTO users (id, name, email, quota_used, preferences, created_at, updated_at)
  SELECT owner, owner, '', 0, '{}', MIN(created_at), MIN(created_at) FROM threads WHERE owner IS NOT NULL
  GROUP BY owner ORDER BY MIN(key);

-- The leaves of the users' preferences, so that users are found by them.
CREATE TABLE preferences (
  key   {key},
  owner BIGINT NOT NULL REFERENCES users (key) ON DELETE CASCADE,
  path  TEXT NOT NULL,                 -- JSON: the names that lead there
  value TEXT NOT NULL                  -- JSON, or a hash of it where it is long
);

CREATE INDEX preferences_value ON preferences (path, value, owner);
CREATE INDEX preferences_owner ON preferences (owner);

-- Tokens that a run has set aside for the model call that it is making. It counts while the thread's lease of that epoch
-- lives: a process that dies needs nobody to give it back.
CREATE TABLE reservations (
  thread BIGINT PRIMARY KEY REFERENCES threads (key) ON DELETE CASCADE,
  owner  TEXT NOT NULL,
  tokens BIGINT NOT NULL,
  epoch  BIGINT NOT NULL
);

CREATE INDEX reservations_owner ON reservations (owner);

-- The ledger is also the log of tools: rows that an application wrote have reply 0.
ALTER TABLE tool_calls ADD COLUMN output TEXT;                  -- JSON; NULL where the result is a message
ALTER TABLE tool_calls ADD COLUMN error TEXT;
ALTER TABLE tool_calls ADD COLUMN elapsed_ms DOUBLE PRECISION;
ALTER TABLE tool_calls ADD COLUMN message TEXT;                 -- the id of the message that it belongs to

CREATE INDEX tool_calls_named ON tool_calls (idempotency_key);

CREATE TABLE tasks (
  key          {key},
  id           TEXT NOT NULL UNIQUE,
  thread       BIGINT NOT NULL REFERENCES threads (key) ON DELETE CASCADE,
  type         TEXT NOT NULL,
  status       TEXT NOT NULL,          -- pending, running, paused, completed, failed, cancelled
  priority     BIGINT NOT NULL,
  payload      TEXT NOT NULL,          -- JSON
  result       TEXT,                   -- JSON
  max_retries  BIGINT NOT NULL,
  retry_count  BIGINT NOT NULL,
  created_at   TEXT NOT NULL,
  updated_at   TEXT NOT NULL,
  started_at   TEXT,
  completed_at TEXT
);

CREATE INDEX tasks_thread ON tasks (thread, key);

-- What was said and spent, by thread, day and model; counted by the transaction that writes the message. What happened
-- has happened: deleting messages changes nothing here. The rows of a deleted thread pass to its owner (thread 0).
CREATE TABLE usage (
  key         {key},
  thread      BIGINT NOT NULL,
  owner       TEXT NOT NULL,           -- '' while the thread exists: it has an owner of its own
  day         TEXT NOT NULL,           -- UTC
  model       TEXT NOT NULL,           -- '' for what no model said
  messages    BIGINT NOT NULL,
  tokens      BIGINT NOT NULL,         -- all of them
  input       BIGINT NOT NULL,
  output      BIGINT NOT NULL,
  cache_read  BIGINT NOT NULL,
  cache_write BIGINT NOT NULL,
  cost        DOUBLE PRECISION NOT NULL,  -- as the messages say
  priced      DOUBLE PRECISION NOT NULL,  -- by the prices that were set when a message came without its cost
  UNIQUE (thread, owner, day, model)
);

-- Calls by thread, day, tool and how long they took. A bucket ends 5 % behind the one before: see usage.py.
CREATE TABLE tool_usage (
  key      {key},
  thread   BIGINT NOT NULL,
  owner    TEXT NOT NULL,
  day      TEXT NOT NULL,
  name     TEXT NOT NULL,
  bucket   BIGINT NOT NULL,            -- -1: nobody knows how long
  calls    BIGINT NOT NULL,
  failures BIGINT NOT NULL,
  total_ms DOUBLE PRECISION NOT NULL,
  UNIQUE (thread, owner, day, name, bucket)
);

-- What was spent by deleted threads is found by its owner.
CREATE INDEX usage_owner ON usage (owner, day) WHERE thread = 0;
CREATE INDEX tool_usage_owner ON tool_usage (owner, day) WHERE thread = 0;

-- 1: some of its messages were removed, or came from elsewhere: the usage of its thread cannot be counted again.
ALTER TABLE branches ADD COLUMN uncounted SMALLINT NOT NULL DEFAULT 0;

-- What a million tokens of a model cost.
CREATE TABLE prices (
  key         {key},
  model       TEXT NOT NULL UNIQUE,
  input       DOUBLE PRECISION NOT NULL,
  output      DOUBLE PRECISION NOT NULL,
  cache_read  DOUBLE PRECISION NOT NULL,
  cache_write DOUBLE PRECISION NOT NULL
);

-- Which database this is: a backup knows whose backup it is. One row, which is never copied.
CREATE TABLE identity (
  key BIGINT PRIMARY KEY,
  id  TEXT NOT NULL
);

INSERT INTO identity (key, id) VALUES (1, CAST(random() AS VARCHAR) || ' ' || CAST(random() AS VARCHAR));

-- That this database is a backup, and what it held when it was taken. One row, which is never copied.
CREATE TABLE backups (
  key      BIGINT PRIMARY KEY,
  database TEXT NOT NULL,              -- the identity of the database that it is a backup of
  source   TEXT NOT NULL,              -- where that was, without any password
  taken_at TEXT NOT NULL,
  shape    TEXT NOT NULL,              -- a hash over the names of the tables and columns that the other one is over
  sha256   TEXT NOT NULL               -- of all rows: while it is the same, nobody has worked with the backup
);
