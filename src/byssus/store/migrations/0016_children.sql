-- Child threads: the call of a tool that is an agent runs on a thread of its own, below the thread that made the call.

ALTER TABLE threads ADD COLUMN parent BIGINT;       -- the thread whose run made the call; not a reference, as `origin`
ALTER TABLE threads ADD COLUMN parent_call TEXT;    -- the idempotency key of the call, by which a resume finds the child

CREATE INDEX threads_below ON threads (parent, parent_call) WHERE parent IS NOT NULL;
