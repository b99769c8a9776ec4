-- Questions to people: who answered, with which arguments, how many people must approve, and until when.

-- `arguments` stays what the model asked for; `edited` is what a person approved instead, and what the tool gets.
ALTER TABLE tool_calls ADD COLUMN answered_by TEXT;                     -- NULL: the caller did not say, or nobody did
ALTER TABLE tool_calls ADD COLUMN answered_at TEXT;
ALTER TABLE tool_calls ADD COLUMN answered_from TEXT;                   -- where the answer came from: cli, web, expiry
ALTER TABLE tool_calls ADD COLUMN edited TEXT;                          -- JSON
ALTER TABLE tool_calls ADD COLUMN approvers BIGINT NOT NULL DEFAULT 1;  -- so many different people must approve
ALTER TABLE tool_calls ADD COLUMN expires_at TEXT;                      -- from then on `fallback` is the answer
ALTER TABLE tool_calls ADD COLUMN fallback TEXT;                        -- JSON, as `answer`

-- The approvals of a call that needs more than one. A new question about the call begins without any.
CREATE TABLE approvals (
  key      {key},
  call     BIGINT NOT NULL REFERENCES tool_calls (key) ON DELETE CASCADE,
  person   TEXT NOT NULL,
  given_at TEXT NOT NULL,
  source   TEXT,
  UNIQUE (call, person)
);
