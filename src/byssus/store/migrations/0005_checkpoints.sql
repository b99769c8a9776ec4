-- Checkpoints, forks and rewinds: pointers into the log.

-- Whether the writer gave JSON of their own (1) or one of our messages (0): each gets back what they gave.
ALTER TABLE messages ADD COLUMN plain SMALLINT NOT NULL DEFAULT 0;

-- A thread shows the checkpoints of its line. A line begins with the thread, with a fork and with a rewind, and is known
-- by the branch that was made for it. (A put whose messages diverge makes a branch, and stays on the line.)
ALTER TABLE threads ADD COLUMN line BIGINT NOT NULL DEFAULT 0;
ALTER TABLE threads ADD COLUMN latest BIGINT;        -- the line's checkpoint with the highest step
ALTER TABLE threads ADD COLUMN latest_at TEXT;       -- when that was made: lists are in this order
ALTER TABLE threads ADD COLUMN origin BIGINT;        -- the thread that it was forked from, and up to which seq
ALTER TABLE threads ADD COLUMN origin_seq BIGINT;
ALTER TABLE threads ADD COLUMN owner TEXT;           -- the user whose thread it is
ALTER TABLE threads ADD COLUMN ttl TEXT;             -- JSON: what is kept of its checkpoints, by itself

UPDATE threads SET line = branch;

CREATE INDEX threads_checkpointed ON threads (namespace, latest_at, id) WHERE latest IS NOT NULL;
CREATE INDEX threads_forked ON threads (origin) WHERE origin IS NOT NULL;
CREATE INDEX threads_owned ON threads (owner) WHERE owner IS NOT NULL;

-- A named position in a thread, with a state of its own. What it reads is the branch up to the seq. The row never
-- changes: putting an id again makes a new row, because a fork may still show the old one.
CREATE TABLE checkpoints (
  key           {key},
  line          BIGINT NOT NULL REFERENCES branches (key),
  id            TEXT NOT NULL,
  step          BIGINT NOT NULL,
  version       BIGINT NOT NULL,       -- the thread's, after the write that made it: the order among equal steps
  parent        TEXT,                  -- the id of another one, which need not exist
  branch        BIGINT NOT NULL REFERENCES branches (key),
  seq           BIGINT NOT NULL,
  message_count BIGINT NOT NULL,
  about         TEXT NOT NULL,         -- JSON: tags and summary, for lists
  body          TEXT NOT NULL,         -- JSON: state, tools_result and next_node
  extra         TEXT NOT NULL,         -- JSON: the thread's extra at that time, for forks and rewinds
  created_at    TEXT NOT NULL
);

CREATE INDEX checkpoints_named ON checkpoints (id, line);
CREATE INDEX checkpoints_steps ON checkpoints (line, step, version);
CREATE INDEX checkpoints_read ON checkpoints (branch, seq);
CREATE INDEX checkpoints_children ON checkpoints (line, parent) WHERE parent IS NOT NULL;

-- What a line shows of the lines before it: of `source`, the checkpoints up to (step, version) that were there when the
-- fork or the rewind was made. The list is flat, as segments are.
CREATE TABLE inherited (
  line    BIGINT NOT NULL REFERENCES branches (key) ON DELETE CASCADE,
  source  BIGINT NOT NULL REFERENCES branches (key),
  step    BIGINT NOT NULL,
  version BIGINT NOT NULL,
  as_of   BIGINT NOT NULL,             -- the version of the source's thread at that time
  PRIMARY KEY (line, source)
);

CREATE INDEX inherited_from ON inherited (source);

-- What a line does not show, because it was deleted there. A checkpoint that no line shows is removed.
CREATE TABLE hidden (
  line       BIGINT NOT NULL REFERENCES branches (key) ON DELETE CASCADE,
  checkpoint BIGINT NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
  PRIMARY KEY (line, checkpoint)
);

CREATE INDEX hidden_checkpoint ON hidden (checkpoint);

-- A thread that is made under the name of a deleted one begins with a version and an epoch that no one can remember: who
-- slept through both must not take it for the thread that they know. One row.
CREATE TABLE floors (
  key   BIGINT PRIMARY KEY,
  value BIGINT NOT NULL
);

-- An erasure whose bytes are not yet known to be gone from the files. It names nobody.
CREATE TABLE erasures (
  key         {key},
  began_at    TEXT NOT NULL,
  finished_at TEXT
);

-- Threads are deleted now, and what belongs to them is found through these.
CREATE INDEX branches_thread ON branches (thread);
CREATE INDEX segments_source ON segments (source);
CREATE INDEX tool_calls_thread ON tool_calls (thread, key);
