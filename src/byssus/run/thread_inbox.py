"""The inbox of a stored thread: any process may queue a message, and the run that drives the thread takes it.

A message leaves the inbox and joins the history in one commit, so it is delivered exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib

from byssus.errors import KeyReused, ThreadBusy, ThreadInactive, ThreadMoved
from byssus.messages import UserMessage, decode
from byssus.queries.log import inbox as queries
from byssus.queries.log import threads
from byssus.queries.log.threads import Position
from byssus.run.driven_thread import Change, Claimed, DrivenThread
from byssus.signals import turn_into_abort
from byssus.threads import inbox as operations
from byssus.threads.inbox import Modes, Receipt, Waiting


class ThreadInbox:
    """The messages that were queued for the runs of a thread."""

    def __init__(self, thread: DrivenThread, modes: Modes) -> None:
        self._thread = thread
        self._modes = modes
        self._sent: list[Receipt] = []  # messages of this agent that may not be committed yet

    @property
    def is_sending(self) -> bool:
        """Whether a message of this agent may not be committed yet, so that the store does not know it."""
        return bool(self._sent)

    def send(self, kind: str, message: UserMessage, /) -> Receipt:
        receipt = operations.send(self._thread.store, self._thread.key, kind, message)
        self._sent.append(receipt)
        self._thread.mail = max(self._thread.mail, 2 if kind == queries.STEER else 1)
        return receipt

    async def waiting(self) -> list[Waiting]:
        return await operations.inbox(self._thread.store, self._thread.key)

    async def withdraw(self, message_id: str, /) -> bool:
        return await operations.withdraw(self._thread.store, self._thread.key, message_id)

    def has_mail(self, *, stopping: bool) -> bool:
        return self._thread.mail > (0 if stopping else 1)

    async def take(self, *, stopping: bool) -> list[UserMessage]:
        thread = self._thread
        sent, self._sent, thread.mail = self._sent, [], 0
        for receipt in sent:
            with contextlib.suppress(KeyReused):  # raised for its sender: nothing was queued
                await receipt
        if thread.held is not None:
            return await self._take(None, stopping=stopping)
        assert thread.driver is not None
        with thread.claiming(thread.driver) as claimed:  # the run has given its lease back: it goes on if it can
            try:
                return await self._take(claimed, stopping=stopping)
            except (ThreadBusy, ThreadInactive, ThreadMoved):  # the next run of another process takes them
                return []

    async def _take(self, claimed: Claimed | None, *, stopping: bool) -> list[UserMessage]:
        thread, taken = self._thread, list[UserMessage]()

        def note(outcome: tuple[Position | None, list[str]]) -> None:
            position, bodies = outcome
            taken.extend(decode(body) for body in bodies)  # type: ignore[misc]
            if position is not None:
                thread.apply(position, Change(taken, claimed=claimed))

        by = thread.lease() if claimed is None else claimed.claim
        expect = threads.ANY if claimed is None or thread.position is None else thread.position.version
        limits = self._modes.limits(stopping=stopping)
        write = thread.submit(queries.take, by=by, expect=expect, limits=limits)
        try:
            await thread.stale_until(write, note)
        except asyncio.CancelledError:
            if not taken:
                raise
            assert thread.driver is not None
            turn_into_abort(thread.driver.signal)  # they have left the inbox: this run has to answer them
        return taken
