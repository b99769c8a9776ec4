-- Threads, the branches that they are read along, and the log of messages.

-- A thread is a conversation. What is outside the code is (namespace, id); inside it is the integer key.
CREATE TABLE threads (
  key           {key},
  namespace     TEXT NOT NULL,
  id            TEXT NOT NULL,
  branch        BIGINT NOT NULL,       -- the branch that is read and written now
  head          BIGINT NOT NULL,       -- the last seq that was given out on it, reserved ones included
  version       BIGINT NOT NULL,       -- grows by one with each write, so that a writer notices another one
  message_count BIGINT NOT NULL,
  extra         TEXT NOT NULL,         -- JSON: the state that belongs to the thread
  created_at    TEXT NOT NULL,
  updated_at    TEXT NOT NULL,
  UNIQUE (namespace, id)
);

-- Listing the newest of a hundred thousand threads reads only those that it shows.
CREATE INDEX threads_recent ON threads (namespace, updated_at, id);

-- A branch is one line of a thread's history. A plain thread has one.
CREATE TABLE branches (
  key    {key},
  thread BIGINT NOT NULL REFERENCES threads (key) ON DELETE CASCADE
);

-- A branch is read as these pieces of the log: of branch `source`, the messages after one seq and up to another. The
-- list is flat, whatever was forked from what, so depth costs nothing. A plain thread has one piece: all of its own.
CREATE TABLE segments (
  branch    BIGINT NOT NULL REFERENCES branches (key) ON DELETE CASCADE,
  source    BIGINT NOT NULL REFERENCES branches (key),
  after_seq BIGINT NOT NULL,
  upto_seq  BIGINT NOT NULL,
  PRIMARY KEY (branch, after_seq)
);

-- The log. Order is seq and never a time. A message is stored once; forks and checkpoints point here.
-- An integer key (and not the pair) is the row's address: rows of a kilobyte stay out of the index.
CREATE TABLE messages (
  key        {key},
  branch     BIGINT NOT NULL REFERENCES branches (key),
  seq        BIGINT NOT NULL,
  id         TEXT NOT NULL,            -- as its writer named it; two messages may carry the same
  role       TEXT NOT NULL,
  body       TEXT NOT NULL,            -- JSON, exactly as its writer gave it
  created_at TEXT NOT NULL,
  UNIQUE (branch, seq)
);
