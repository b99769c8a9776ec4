-- Each write transaction also records which schema its process knows, and which one it found. A process that a migration
-- has left behind is refused here, by the database, and not by a statement of its own that would cost time.
ALTER TABLE writers ADD COLUMN known BIGINT;
ALTER TABLE writers ADD COLUMN version BIGINT;
ALTER TABLE writers ADD CONSTRAINT writers_know_the_schema CHECK (known >= version);
