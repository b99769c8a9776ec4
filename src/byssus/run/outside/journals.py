"""The journal that an agent's options ask for: in a thread of a store, or in memory."""

from __future__ import annotations

from typing import Protocol

from byssus.run import settings
from byssus.run.journal import Journal
from byssus.run.memory_journal import memory_journal
from byssus.run.settings import Setup
from byssus.run.thread_journal import thread_journal
from byssus.store.operations import HasStore
from byssus.threads.forks import At, checked_at
from byssus.threads.inbox import Modes
from byssus.values.inputs import ThreadId, checked_new_thread


class Leasing(HasStore, Protocol):
    """A checkpointer, as a run needs it."""

    @property
    def lease_seconds(self) -> float: ...


def journal_for(
    checkpointer: Leasing | None,
    thread_id: ThreadId | None,
    setup: Setup,
    modes: Modes,
    wait: float,
    at: At | None,
) -> Journal:
    """The journal of an agent; `at` is the point that its thread is forked from."""
    if not settings.is_stored(checkpointer, thread_id, at):
        return memory_journal(modes)
    assert checkpointer is not None
    assert thread_id is not None
    thread_key, origin = checked_new_thread(thread_id), None
    if at is not None and setup.thread_id is not None:
        origin, thread_key = (thread_key, checked_at(at, "at")), thread_key._replace(id=setup.thread_id)
    return thread_journal(
        checkpointer,
        thread_key,
        checkpointer.lease_seconds,
        modes,
        wait,
        user_id=setup.user_id,
        origin=origin,
        last=setup.last,
    )
