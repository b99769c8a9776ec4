"""Runs as several processes see them: agents on one thread, leases that somebody else holds, crashes without a kill.

A second checkpointer stands for another process. What only real processes can show is in `tests/crash`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import pytest

from byssus import Agent, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import StoreFull
from byssus.events import StreamDone, StreamEvent, StreamStart, TextDelta, TextEnd, TextStart
from byssus.messages import Message, stamped
from byssus.providers.base import Provider, Request
from byssus.providers.scripted import Step
from byssus.queries.log import threads
from byssus.queries.log.leases import Claim, Lease
from byssus.signals import Signal
from byssus.store import owners
from byssus.store.database import Row, Store, Tx
from byssus.store.owners import Presence
from byssus.store.postgres.tx import PostgresTx
from byssus.threads.encoding import message_row
from byssus.tools import Tool
from byssus.values import clock
from byssus.values.thread_key import ThreadKey
from tests.support.agents import make
from tests.support.databases import Database

T = TypeVar("T")

PAST = "2000-01-01T00:00:00.000000Z"
FAR_AWAY = "far-away:17 proof=00000000000000000000000000000000 boot=? seconds=30 lease=theirs"


def with_two(database: Database, use: Callable[[Checkpointer, Checkpointer], Awaitable[None]]) -> None:
    """Two open checkpointers. What hangs is a failed test and not a hung suite; a busy disk may take its time."""

    async def main() -> None:
        async with asyncio.timeout(90), database.checkpointer() as cp, database.checkpointer() as other:
            await use(cp, other)

    asyncio.run(main())


def agent_on(
    cp: Checkpointer, script: Iterable[Step] | Provider = (), thread_id: str = "t", /, **options: Any
) -> Agent:
    return make(script, checkpointer=cp, thread_id=thread_id, **options)


async def until(ask: Callable[[], Any]) -> Any:
    """What the question is answered with, as soon as that is something. The test's own time limit ends the wait."""
    while True:
        answer = ask()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        await asyncio.sleep(0.005)


LOOK = [ToolCall("c1", "look")]
CALL_SLOW = [ToolCall("c1", "slow")]


@tool
def look() -> str:
    return "seen"


class Slow:
    """A tool that says when it runs, and goes on when it is let go."""

    def __init__(self, name: str = "slow", **options: Any) -> None:
        self.begun = asyncio.Event()
        self.let_go = asyncio.Event()
        self.runs = 0
        self.tool: Tool[..., Any] = Tool(self._run, name=name, **options)

    async def _run(self) -> str:
        self.runs += 1
        self.begun.set()
        await self.let_go.wait()
        return "slow is done"


class Streaming:
    """A scene that says some words, waits, and says the rest."""

    def __init__(self, *words: str, then: Exception | None = None) -> None:
        self.let_go = asyncio.Event()
        self._words = words
        self._then = then

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        yield TextStart(0)
        for word in self._words:
            yield TextDelta(0, word)
        await self.let_go.wait()
        if self._then is not None:
            raise self._then
        yield TextDelta(0, "end")
        yield TextEnd(0)
        yield StreamDone()

    async def is_saved(self, cp: Checkpointer) -> bool:
        return await partial(cp) == "".join(self._words)


# --- leases -----------------------------------------------------------------------------------------------------------


class LeaseRow(NamedTuple):
    owner: str | None
    epoch: int
    until: str | None
    run: str | None


FREE = (None, None, None)


async def lease_of(cp: Checkpointer, thread_id: str = "t") -> LeaseRow:
    def look(tx: Tx) -> Row | None:
        sql = "SELECT lease_owner, lease_epoch, lease_until, run FROM threads WHERE id = :id"
        return tx.one(sql, id=thread_id)

    row = await cp.store.read(look)
    assert row is not None
    return LeaseRow(*row)


async def is_free(cp: Checkpointer, thread_id: str = "t") -> bool:
    """Whether nobody drives the thread, and no run of it has not ended."""
    lease = await lease_of(cp, thread_id)
    return (lease.owner, lease.until, lease.run) == FREE


async def unfinished(cp: Checkpointer) -> list[str]:
    return [info.id for info in await cp.unfinished()]


async def claim(
    cp: Checkpointer, owner: str = FAR_AWAY, *said: Message | str, thread_id: str = "t", dead_epoch: int = -1
) -> Lease:
    """Begin a run as another process would, with these messages."""
    messages = [stamped(UserMessage(item)) if isinstance(item, str) else item for item in said]
    position = await cp.store.write(
        threads.append,
        ThreadKey("", thread_id),
        [message_row(message) for message in messages],
        by=Claim(owner, "their-run", 30, dead_epoch),
    )
    return Lease(position.epoch, 30)


async def take_over(cp: Checkpointer, *said: str) -> Lease:
    """Another process takes the thread, as if the lease had run out."""
    return await claim(cp, FAR_AWAY, *said, dead_epoch=(await lease_of(cp)).epoch)


async def expire(cp: Checkpointer) -> None:
    """All leases run out."""

    def change(tx: Tx) -> None:
        tx.run("UPDATE threads SET lease_until = :past WHERE lease_until IS NOT NULL", past=PAST)

    await cp.store.write(change)


async def die(cp: Checkpointer, agent: Agent, run: asyncio.Task[Any] | None = None) -> None:
    """The agent's run cannot write any more, and its owner is a process that is gone: what a crash leaves behind."""
    gone = dead_owner(cp)

    def change(tx: Tx) -> None:
        tx.run(
            "UPDATE threads SET lease_owner = :gone, lease_epoch = lease_epoch + 1 WHERE lease_until IS NOT NULL",
            gone=gone,
        )

    await cp.store.write(change)
    agent.abort()
    with contextlib.suppress(Exception):
        if run is not None:
            await run
    await agent.wait_for_idle()


def dead_owner(cp: Checkpointer) -> str:
    """The name of a process of this machine that has ended without a word."""
    gone = _another_process(cp)
    name = gone.name("theirs", 30)
    owners._proofs.discard(owners._parts(name)["proof"])
    gone.leave(has_leases=True)
    return name


@contextlib.contextmanager
def live_owner(cp: Checkpointer) -> Iterator[str]:
    """The name of another process of this machine, which lives."""
    lives = _another_process(cp)
    name = lives.name("theirs", 30)
    owners._proofs.discard(owners._parts(name)["proof"])
    yield name
    lives.leave(has_leases=False)


def _another_process(cp: Checkpointer) -> Presence:
    return Presence(cp.store.presence.stem)


def changed(name: str, **parts: object) -> str:
    """The name of an owner with other parts."""
    for key, value in parts.items():
        name = re.sub(rf" {key}=\S+", f" {key}={value}", name)
    return name


class DatabaseClock:
    """The time of any database, and how far it is off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off = timedelta()
        real, later = clock.now, PostgresTx.after
        monkeypatch.setattr(clock, "now", lambda: self._shifted(real()))
        monkeypatch.setattr(PostgresTx, "now", lambda tx: later(tx, self.off.total_seconds()))
        monkeypatch.setattr(PostgresTx, "after", lambda tx, seconds: later(tx, self.off.total_seconds() + seconds))

    def _shifted(self, now: str) -> str:
        return (datetime.fromisoformat(now) + self.off).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- failing disks ----------------------------------------------------------------------------------------------------


def break_writes(monkeypatch: pytest.MonkeyPatch, store: Store, which: Callable[[Any, dict[str, Any]], bool]) -> None:
    """From now on these writes find no room on the disk."""

    def fail(tx: Tx) -> None:
        raise StoreFull("no room left")

    real = store.write

    def write(query: Any, /, *args: Any, **kwargs: Any) -> Any:
        return real(fail) if which(query, kwargs) else real(query, *args, **kwargs)

    monkeypatch.setattr(store, "write", write)


def break_query(monkeypatch: pytest.MonkeyPatch, store: Store, query: Any) -> None:
    break_writes(monkeypatch, store, lambda asked, _: asked is query)


# --- what is stored ---------------------------------------------------------------------------------------------------

_TABLES = ("threads", "messages", "tool_calls", "inbox", "partials", "pieces")


def everything(tx: Tx) -> list[list[Row]]:
    """Each row of each table that a run writes."""
    return [tx.all(f"SELECT * FROM {table} ORDER BY 1") for table in _TABLES]


async def partial(cp: Checkpointer) -> str | None:
    thread = await cp.load("t")
    return None if thread is None or thread.partial is None else thread.partial.text


async def waiting(cp: Checkpointer, thread_id: str = "t") -> list[str]:
    return [f"{item.kind}: {item.message.text}" for item in await cp.inbox(thread_id)]


def brief(messages: Sequence[Message]) -> list[str]:
    return [f"{message.role}: {message.text}" for message in messages]
