"""How a run releases its thread's lease."""

from __future__ import annotations

import enum


class Release(enum.Enum):
    """What happens to the lease, and to the run, together with a write."""

    END = "end"  # the run has ended
    END_IF_INBOX_EMPTY = "end_if_inbox_empty"  # it has ended, unless a message waits for it: then it keeps the lease
    PAUSE = "pause"  # the run waits for a person, or was interrupted: the next run on the thread continues it
