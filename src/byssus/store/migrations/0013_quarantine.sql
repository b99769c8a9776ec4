-- Threads whose run has ended its process again and again are left alone until a person lifts the quarantine.

ALTER TABLE threads ADD COLUMN quarantined_at TEXT;
ALTER TABLE threads ADD COLUMN lifted_at TEXT;   -- attempts of a run that began before do not count any more

CREATE INDEX threads_quarantined ON threads (quarantined_at) WHERE quarantined_at IS NOT NULL;
