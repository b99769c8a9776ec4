-- A rewind closes the open calls of a thread, and a fork asks its questions again. Neither may read the ledger of a long
-- thread for that: these indexes hold only the calls that are open, and only those that a person was asked about.
CREATE INDEX tool_calls_open ON tool_calls (thread) WHERE status IN ('waiting', 'answered', 'started');
CREATE INDEX tool_calls_asked ON tool_calls (branch, reply) WHERE status IN ('waiting', 'answered', 'left');
