-- Memories: threads whose messages bear marks, and are found by their ids.

-- A label on a message. It belongs to the branch that the message is read along: a fork begins with the marks of what it
-- shares, and after that each side has its own. The order of the keys is the order of a message's marks, and the same
-- mark may be there twice.
CREATE TABLE marks (
  key     {key},
  branch  BIGINT NOT NULL REFERENCES branches (key) ON DELETE CASCADE,
  message BIGINT NOT NULL REFERENCES messages (key) ON DELETE CASCADE,
  mark    TEXT NOT NULL
);

CREATE INDEX marks_named ON marks (branch, mark, message);
CREATE INDEX marks_message ON marks (message, branch);

-- What stands for messages that were left out. As the marks, it belongs to the branch.
ALTER TABLE branches ADD COLUMN summary TEXT NOT NULL DEFAULT '';

-- Messages of applications are found by their ids. Those of agents are not in here: they are never asked for, and an
-- append shall not pay for it. (The first characters only: an id may be longer than what an index takes.)
CREATE INDEX messages_named ON messages (branch, substr(id, 1, 64)) WHERE plain = 1;

-- 1: all messages of the thread are in that index, because nobody but a memory has written them.
ALTER TABLE threads ADD COLUMN named SMALLINT NOT NULL DEFAULT 0;
