-- Tasks are run by workers: see 0018_tasks.postgres.sql, which has the same tables with all comments. SQLite cannot make
-- a column optional, so the table is made again.

CREATE TABLE new_tasks (
  key           {key},
  id            TEXT NOT NULL UNIQUE,
  thread        BIGINT REFERENCES threads (key) ON DELETE CASCADE,
  type          TEXT NOT NULL,
  status        TEXT NOT NULL,
  priority      BIGINT NOT NULL,
  payload       TEXT NOT NULL,
  result        TEXT,
  max_retries   BIGINT NOT NULL,
  retry_count   BIGINT NOT NULL,
  created_at    TEXT NOT NULL,
  updated_at    TEXT NOT NULL,
  started_at    TEXT,
  completed_at  TEXT,
  owner         TEXT NOT NULL DEFAULT '',
  error         TEXT,
  run_at        TEXT,
  deadline      TEXT,
  unique_key    TEXT,
  parent        TEXT,
  progress      DOUBLE PRECISION,
  progress_note TEXT,
  waits_for     TEXT,
  asked         TEXT,
  schedule      TEXT,
  lease_owner   TEXT,
  lease_until   TEXT,
  lease_epoch   BIGINT NOT NULL DEFAULT 0
);

INSERT INTO new_tasks (key, id, thread, owner, type, status, priority, payload, result, max_retries, retry_count,
  created_at, updated_at, started_at, completed_at)
  SELECT key, id, thread, COALESCE((SELECT t.owner FROM threads t WHERE t.key = tasks.thread), ''), type, status,
  priority, payload, result, max_retries, retry_count, created_at, updated_at, started_at, completed_at FROM tasks;

DROP TABLE tasks;
ALTER TABLE new_tasks RENAME TO tasks;

CREATE INDEX tasks_thread ON tasks (thread, key);
CREATE INDEX tasks_owner ON tasks (owner, key) WHERE owner <> '';
-- The three states of a task that waits, and those that run: what a worker looks for is found without a scan.
CREATE INDEX tasks_ready ON tasks (type, priority DESC, owner, key)
  WHERE status = 'pending' AND run_at IS NULL AND waits_for IS NULL;
CREATE INDEX tasks_due ON tasks (run_at) WHERE status = 'pending' AND run_at IS NOT NULL;
CREATE INDEX tasks_deadline ON tasks (deadline) WHERE status IN ('pending', 'paused') AND deadline IS NOT NULL;
CREATE INDEX tasks_running ON tasks (type, owner) WHERE status = 'running';

-- What a handler has done of its task: calls, sleeps and events.
CREATE TABLE task_steps (
  key        {key},
  task       BIGINT NOT NULL REFERENCES tasks (key) ON DELETE CASCADE,
  name       TEXT NOT NULL,
  kind       TEXT NOT NULL,            -- call, sleep, wait
  status     TEXT NOT NULL,            -- started, done, failed, waiting
  recovery   TEXT,                     -- of a call: never, retry, check, ask
  attempts   BIGINT NOT NULL,
  result     TEXT,                     -- JSON
  error      TEXT,                     -- JSON
  until      TEXT,                     -- when a sleep is over, or a wait has taken too long
  started_at TEXT NOT NULL,
  ended_at   TEXT,
  UNIQUE (task, kind, name)
);

-- Types of tasks that are limited: who claims one locks its row. How many may start now, and when that was counted.
CREATE TABLE task_rates (
  type      TEXT PRIMARY KEY,
  tokens    DOUBLE PRECISION NOT NULL,
  filled_at TEXT NOT NULL
);

-- What makes tasks at given times.
CREATE TABLE schedules (
  key         {key},
  id          TEXT NOT NULL UNIQUE,
  thread      BIGINT REFERENCES threads (key) ON DELETE CASCADE,
  owner       TEXT NOT NULL DEFAULT '',
  type        TEXT NOT NULL,
  payload     TEXT NOT NULL,           -- JSON
  priority    BIGINT NOT NULL,
  max_retries BIGINT NOT NULL,
  cron        TEXT,
  every       DOUBLE PRECISION,        -- seconds
  zone        TEXT NOT NULL,
  missed      TEXT NOT NULL,           -- skip, one, all
  status      TEXT NOT NULL,           -- active, paused
  next_at     TEXT,
  last_at     TEXT,
  created_at  TEXT NOT NULL,
  updated_at  TEXT NOT NULL
);

CREATE INDEX schedules_next ON schedules (next_at) WHERE status = 'active';
CREATE INDEX schedules_thread ON schedules (thread);
CREATE INDEX schedules_owner ON schedules (owner) WHERE owner <> '';
