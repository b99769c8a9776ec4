"""Queued messages for a run: steering messages for its next turn, follow-ups for when it would stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

from byssus.errors import InputError, KeyReused
from byssus.messages import UserMessage, decode, stamped
from byssus.queries.log import inbox as queue
from byssus.queries.log.inbox import FOLLOW_UP, STEER
from byssus.queries.log.threads import MessageRow
from byssus.store.database import Store, Tx
from byssus.store.operations import Runner
from byssus.threads.encoding import message_row
from byssus.values.inputs import ThreadId, checked_new_thread, checked_thread, column_id
from byssus.values.prompts import Prompt, single
from byssus.values.shown import reason
from byssus.values.thread_key import ThreadKey

_MODES = {"one-at-a-time": 1, "all": 2**31}
_log = logging.getLogger("byssus")


class Modes(NamedTuple):
    """How many messages of each kind a run takes at once."""

    steering: int
    follow_up: int

    def limits(self, *, stopping: bool) -> dict[str, int]:
        """The kinds that may be taken now, in this order: follow-ups only when the run would stop."""
        steering = {STEER: self.steering}
        return {**steering, FOLLOW_UP: self.follow_up} if stopping else steering


def modes(steering_mode: str, follow_up_mode: str) -> Modes:
    for name, mode in (("steering_mode", steering_mode), ("follow_up_mode", follow_up_mode)):
        if mode not in _MODES:
            raise InputError(f"{name} must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
    return Modes(_MODES[steering_mode], _MODES[follow_up_mode])


class Waiting(NamedTuple):
    """A queued message. `kind` is "steer" or "follow_up"."""

    id: str
    kind: str
    message: UserMessage
    created_at: str


class Receipt:
    """The receipt of a queued message: `await` it to wait for the commit; pass `id` to `withdraw()`."""

    def __init__(self, message: UserMessage, write: Future[None] | None = None) -> None:
        assert message.id is not None
        self.id = message.id
        self.message = message
        self._write = write
        if write is not None:
            write.add_done_callback(_report)

    @property
    def done(self) -> bool:
        """Whether the write has ended: the message was stored, or that failed."""
        return self._write is None or self._write.done()

    def __await__(self) -> Generator[Any, None, Receipt]:
        if self._write is not None:
            yield from asyncio.shield(asyncio.wrap_future(self._write)).__await__()
        return self

    def wait(self, timeout: float | None = None) -> Receipt:
        """Block until the commit, in code without an event loop."""
        if self._write is not None:
            self._write.result(timeout)
        return self

    def __repr__(self) -> str:
        return f"Receipt({self.id!r}, {'done' if self.done else 'under way'})"


def steer(store: Store, thread_id: ThreadId, message: Prompt) -> Receipt:
    """Queue a message for the run that drives the thread, in any process: it is delivered before the next turn.

    Without a run, it waits for the next one; a thread that does not exist is created. Await the receipt to wait for the
    commit. A message with an id of its own is queued once, even if it is sent again.
    """
    return send(store, thread_id, STEER, single(message, "steer"))


def follow_up(store: Store, thread_id: ThreadId, message: Prompt) -> Receipt:
    """Queue a message that is delivered when the run would stop. Await the receipt to wait for the commit.

    A thread that does not exist is created. A message with an id of its own is queued once, even if it is sent again.
    """
    return send(store, thread_id, FOLLOW_UP, single(message, "follow_up"))


def send(store: Store, thread_id: ThreadId, kind: str, message: UserMessage) -> Receipt:
    """Submit the message, after all earlier ones, without waiting.

    A message with an id of its own is queued once. The id of another message raises `KeyReused` from the receipt.
    """
    sent, thread_key = stamped(message), checked_new_thread(thread_id)
    query = queue.send if message.id is None else _send_once
    return Receipt(sent, store.submit(query, thread_key, kind, message_row(sent)))


def _send_once(tx: Tx, thread_key: ThreadKey, kind: str, message: MessageRow) -> None:
    known = queue.known(tx, thread_key, message.id)
    if known is None:
        queue.send(tx, thread_key, kind, message)
    elif not is_same(decode(known), decode(message.body)):
        raise KeyReused(thread_key.id, message.id, None)


def is_same(one: object, other: object) -> bool:
    """Whether two messages of a user have the same content."""
    return isinstance(one, UserMessage) and isinstance(other, UserMessage) and one.content == other.content


async def inbox(store: Runner, thread_id: ThreadId) -> list[Waiting]:
    """The queued messages that were not delivered yet, in order."""
    rows = await store.read(queue.waiting, checked_thread(thread_id))
    return [Waiting(row.id, row.kind, decode(row.body), row.created_at) for row in rows]  # type: ignore[arg-type]


async def withdraw(store: Runner, thread_id: ThreadId, message: str | Receipt | Waiting) -> bool:
    """Remove a queued message; False if it was already delivered."""
    return await store.write(queue.withdraw, checked_thread(thread_id), column_id(id_of(message)))


def id_of(message: object) -> str:
    """The id of a queued message, from its id or its receipt."""
    message_id = message if isinstance(message, str) else getattr(message, "id", None)
    if not isinstance(message_id, str):
        raise InputError(f"withdraw() takes the id of a message, or what steer() returned; got {message!r:.80}")
    return message_id


def _report(write: Future[None]) -> None:
    """Log a lost message: the sender may never await its receipt."""
    if (error := write.exception()) is not None:
        _log.error("a message could not be put into the inbox: %s", reason(error))
