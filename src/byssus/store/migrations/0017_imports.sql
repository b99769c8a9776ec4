-- A thread that is imported brings the time of its creation along, but not the keys of its rows. Where the thread was before,
-- SQLite may give it the keys that others of its rows had. So what identifies a thread here is when it came here.
ALTER TABLE threads ADD COLUMN imported_at TEXT;   -- NULL: it was made here
