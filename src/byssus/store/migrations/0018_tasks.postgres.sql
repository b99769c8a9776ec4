-- Tasks are run by workers. A task belongs to a thread, to a user, or to neither.

ALTER TABLE tasks ALTER COLUMN thread DROP NOT NULL;
ALTER TABLE tasks ADD COLUMN owner TEXT NOT NULL DEFAULT '';   -- the user; of a thread's task, the owner of the thread
ALTER TABLE tasks ADD COLUMN error TEXT;                       -- JSON: type, message and trace
ALTER TABLE tasks ADD COLUMN run_at TEXT;                      -- not before; NULL: it may start now
ALTER TABLE tasks ADD COLUMN deadline TEXT;
ALTER TABLE tasks ADD COLUMN unique_key TEXT;                  -- the id is made of it, which makes it unique
ALTER TABLE tasks ADD COLUMN parent TEXT;                      -- the id of the parent task; not a reference
ALTER TABLE tasks ADD COLUMN progress DOUBLE PRECISION;
ALTER TABLE tasks ADD COLUMN progress_note TEXT;
ALTER TABLE tasks ADD COLUMN waits_for TEXT;                   -- the event that it waits for
ALTER TABLE tasks ADD COLUMN asked TEXT;                       -- what its worker is asked to do: pause or cancel
ALTER TABLE tasks ADD COLUMN schedule TEXT;                    -- the id of the schedule that made it
-- The worker that runs it. A running task without `lease_until` is run by a program that sets its status itself.
ALTER TABLE tasks ADD COLUMN lease_owner TEXT;
ALTER TABLE tasks ADD COLUMN lease_until TEXT;
ALTER TABLE tasks ADD COLUMN lease_epoch BIGINT NOT NULL DEFAULT 0;

-- An index takes about 2,700 bytes, and no handler has such a name.
UPDATE tasks SET type = left(type, 250) WHERE octet_length(type) > 1000;
UPDATE tasks SET owner = COALESCE((SELECT t.owner FROM threads t WHERE t.key = tasks.thread), '');
DROP INDEX tasks_thread;

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
