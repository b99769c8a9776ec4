-- The index for search: tokens only, and no text. It is filled behind the writers, up to a watermark.

-- A text with more tokens than a tsvector holds has several parts. `words.py` says what the tokens are.
CREATE TABLE message_words (
  message BIGINT NOT NULL REFERENCES messages (key) ON DELETE CASCADE,
  part    BIGINT NOT NULL,
  words   TSVECTOR NOT NULL,
  PRIMARY KEY (message, part)
);

CREATE TABLE call_words (
  call  BIGINT NOT NULL REFERENCES tool_calls (key) ON DELETE CASCADE,
  part  BIGINT NOT NULL,
  words TSVECTOR NOT NULL,
  PRIMARY KEY (call, part)
);

CREATE INDEX message_words_found ON message_words USING gin (words);
CREATE INDEX call_words_found ON call_words USING gin (words);

-- How far the index has come. All this is about this database, and never copied.
CREATE TABLE indexing (
  kind        TEXT PRIMARY KEY,        -- message or call
  upto        BIGINT NOT NULL,         -- all rows up to this key are indexed
  epoch       BIGINT NOT NULL,         -- grows when the index is emptied
  tokenizer   BIGINT NOT NULL,         -- the version of the tokens
  horizon     BIGINT NOT NULL,         -- when all transactions before this one have ended, ...
  horizon_key BIGINT NOT NULL          -- ... no row up to this key can appear any more
);

INSERT INTO indexing (kind, upto, epoch, tokenizer, horizon, horizon_key)
  VALUES ('message', 0, 0, 0, 0, 0), ('call', 0, 0, 0, 0, 0);

-- Calls below the watermark whose text has changed. The ticket is another one after each change.
CREATE TABLE changed_calls (
  call   BIGINT PRIMARY KEY REFERENCES tool_calls (key) ON DELETE CASCADE,
  ticket BIGINT NOT NULL
);

CREATE FUNCTION note_changed_call() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  INSERT INTO changed_calls (call, ticket) VALUES (NEW.key, CAST(random() * 9007199254740991 AS BIGINT))
    ON CONFLICT (call) DO UPDATE SET ticket = excluded.ticket;
  RETURN NULL;
END $$;

CREATE TRIGGER calls_change AFTER UPDATE OF arguments, output, error ON tool_calls FOR EACH ROW
  WHEN (OLD.arguments IS DISTINCT FROM NEW.arguments OR OLD.output IS DISTINCT FROM NEW.output
    OR OLD.error IS DISTINCT FROM NEW.error)
  EXECUTE FUNCTION note_changed_call();
