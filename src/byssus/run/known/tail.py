"""The end of a thread, for an agent that does not hold the whole of it.

A tail is the last messages of a thread, and as many before them as a run needs to decide what it would decide with the
whole thread:

- It does not begin with the result of a tool call whose reply is not in it.
- The last reply is in it if that reply has tool calls, because open ones are settled first.
- Something in it tells whether a model has anything to answer. Notes and failed replies do not.

So the log that a run writes does not depend on how much of it was loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.messages import AssistantMessage, Message, ToolResultMessage, decode
from byssus.providers import history
from byssus.queries.log import threads
from byssus.store.database import Store, Tx
from byssus.threads.thread import Thread, load
from byssus.values.thread_key import ThreadKey


class Tail(NamedTuple):
    """The end of a thread as it was loaded, and its last reply if that is before it: one without tool calls."""

    thread: Thread
    reply: AssistantMessage | None = None


async def load_tail(store: Store, thread_key: ThreadKey, wanted: int) -> Tail | None:
    """The last messages of a thread: as many as are wanted, and what else a run needs."""
    while True:
        thread = await load(store, thread_key, last=wanted)
        if thread is None or not thread.has_earlier or _suffices(thread.messages):
            return None if thread is None else Tail(thread)
        tail = await store.read(_with_beginning, thread_key, thread)
        if tail is not None:
            return tail


def _suffices(messages: Sequence[Message]) -> bool:
    return not _spoken_before(messages) and history.last_reply(messages) is not None


def _spoken_before(messages: Sequence[Message]) -> list[str]:
    """The roles of which the last message before these is needed too; none if the messages begin well."""
    if isinstance(messages[0], ToolResultMessage):
        return ["assistant"]
    return ["assistant", "user"] if history.continues(messages) is None else []


def _with_beginning(tx: Tx, thread_key: ThreadKey, thread: Thread) -> Tail | None:
    """The tail with what it needs before its first message; None if the thread has changed its branch since."""
    row = threads.find(tx, thread_key)
    if row is None or row.branch != thread.position.branch:
        return None
    while (roles := _spoken_before(thread.messages)) and (spoken := _last(tx, thread, thread.seqs[0], roles)):
        thread = _from(tx, thread, spoken[0])
    reply = None
    if history.last_reply(thread.messages) is None:
        seq, reply = _last_reply(tx, thread)
        if reply is not None and reply.tool_calls:
            thread, reply = _from(tx, thread, seq), None
    has_earlier = bool(threads.page_before(tx, row.branch, before=thread.seqs[0], limit=1))
    return Tail(thread._replace(has_earlier=has_earlier), reply)


def _last(tx: Tx, thread: Thread, before: int, roles: Sequence[str]) -> tuple[int, str] | None:
    return threads.last_spoken(tx, thread.position.branch, before=before, roles=roles)


def _last_reply(tx: Tx, thread: Thread) -> tuple[int, AssistantMessage | None]:
    """The last reply before a tail, and its seq. What only calls itself one is a note, and passed over."""
    before = thread.seqs[0]
    while (spoken := _last(tx, thread, before, ["assistant"])) is not None:
        before, message = spoken[0], decode(spoken[1])
        if isinstance(message, AssistantMessage):
            return before, message
    return 0, None


def _from(tx: Tx, thread: Thread, seq: int) -> Thread:
    """The tail with all messages from a seq on."""
    page = threads.page(tx, thread.position.branch, after=seq - 1, upto=thread.seqs[0] - 1, limit=threads.END)
    messages = [*(decode(body) for _, body in page), *thread.messages]
    return thread._replace(messages=messages, seqs=[*(seq for seq, _ in page), *thread.seqs])
