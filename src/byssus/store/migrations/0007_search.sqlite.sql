-- The index for search: tokens only, and no text. It is filled behind the writers, up to a watermark.

-- A row's rowid is the key of the message, or of the tool call. `words.py` says what the tokens are.
CREATE VIRTUAL TABLE message_words USING fts5 (words, content = '', contentless_delete = 1, tokenize = 'ascii');
CREATE VIRTUAL TABLE call_words USING fts5 (words, content = '', contentless_delete = 1, tokenize = 'ascii');

-- How far the index has come. All this is about this database, and never copied.
CREATE TABLE indexing (
  kind        TEXT PRIMARY KEY,        -- message or call
  upto        BIGINT NOT NULL,         -- all rows up to this key are indexed
  epoch       BIGINT NOT NULL,         -- grows when what was read may not be there any more: on reset, and on deletion
  tokenizer   BIGINT NOT NULL,         -- the version of the tokens
  horizon     BIGINT NOT NULL,         -- Postgres: when all transactions before this one have ended, ...
  horizon_key BIGINT NOT NULL          -- ... no row up to this key can appear any more
);

INSERT INTO indexing (kind, upto, epoch, tokenizer, horizon, horizon_key)
  VALUES ('message', 0, 0, 0, 0, 0), ('call', 0, 0, 0, 0, 0);

-- Calls below the watermark whose text has changed. The ticket is another one after each change.
CREATE TABLE changed_calls (
  call   BIGINT PRIMARY KEY REFERENCES tool_calls (key) ON DELETE CASCADE,
  ticket BIGINT NOT NULL
);

-- SQLite gives the highest key again when its row was deleted: the watermark must not stand above it.
CREATE TRIGGER messages_leave_the_index AFTER DELETE ON messages BEGIN
  DELETE FROM message_words WHERE rowid = OLD.key;
  UPDATE indexing SET epoch = epoch + 1, upto = MIN(upto, COALESCE((SELECT MAX(key) FROM messages), 0))
    WHERE kind = 'message';
END;

CREATE TRIGGER calls_leave_the_index AFTER DELETE ON tool_calls BEGIN
  DELETE FROM call_words WHERE rowid = OLD.key;
  UPDATE indexing SET epoch = epoch + 1, upto = MIN(upto, COALESCE((SELECT MAX(key) FROM tool_calls), 0))
    WHERE kind = 'call';
END;

CREATE TRIGGER calls_change AFTER UPDATE OF arguments, output, error ON tool_calls
  WHEN OLD.arguments IS NOT NEW.arguments OR OLD.output IS NOT NEW.output OR OLD.error IS NOT NEW.error BEGIN
  INSERT INTO changed_calls (call, ticket) VALUES (NEW.key, random())
    ON CONFLICT (call) DO UPDATE SET ticket = excluded.ticket;
END;
