"""A follower of a thread for tests: what it has seen, and what a client makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from byssus.checkpointer import Checkpointer
from byssus.events import StreamDone, StreamEvent, StreamStart, TextDelta
from byssus.messages import Message
from byssus.providers.base import Request
from byssus.signals import Signal
from byssus.values.following.items import (
    FollowItem,
    MessageAdded,
    ReplyDelta,
    ReplyReset,
    RunBegan,
    RunEnded,
    ThreadDeleted,
    ThreadRewound,
    TitleChanged,
)

T = TypeVar("T")


class Client:
    """What a client shows: the messages by their seq, the text of a reply that is arriving, runs, and the title."""

    def __init__(self) -> None:
        self.messages: dict[int, Message] = {}
        self.runs: dict[str, str | None] = {}  # why each stopped
        self.title = ""
        self.arriving: dict[int, str] = {}  # by block
        self.reply: str | None = None
        self.cursor: str | None = None
        self.twice: list[int] = []  # seqs that came twice

    def see(self, items: Iterable[FollowItem]) -> Client:
        for item in items:
            self._see(item)
            self.cursor = None if isinstance(item, ThreadDeleted) else item.cursor
        return self

    def _see(self, item: FollowItem) -> None:
        match item:
            case MessageAdded():
                if item.seq in self.messages:
                    self.twice.append(item.seq)
                self.messages[item.seq] = item.message
                if getattr(item.message, "id", None) == self.reply:
                    self._forget_reply()
            case ThreadRewound():
                self.messages = {seq: message for seq, message in self.messages.items() if seq <= item.seq}
                self._forget_reply()
            case ThreadDeleted():
                self.messages, self.runs, self.title = {}, {}, ""
                self._forget_reply()
            case RunBegan():
                self.runs[item.run_id] = None
            case RunEnded():
                assert item.run_id in self.runs, "a run ended that had not begun"
                self.runs[item.run_id] = item.stop_reason
            case TitleChanged():
                self.title = item.title
            case ReplyReset():
                self._forget_reply()
            case ReplyDelta():
                if item.reply != self.reply:
                    self._forget_reply()
                self.reply = item.reply
                known = self.arriving.get(item.block, "")
                assert len(known) == item.offset, f"block {item.block} is at {len(known)}, and a delta is for {item}"
                self.arriving[item.block] = known + item.delta

    def _forget_reply(self) -> None:
        self.reply, self.arriving = None, {}

    @property
    def log(self) -> list[Message]:
        return [message for _, message in sorted(self.messages.items())]

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.log]

    @property
    def text(self) -> str:
        """The text that has arrived of a reply."""
        return "".join(text for _, text in sorted(self.arriving.items()))


class Following:
    """A task that follows a thread and keeps what it is told."""

    def __init__(self, cp: Checkpointer, thread_id: str = "t", after: str | None = None) -> None:
        self.items: list[FollowItem] = []
        self._changed = asyncio.Event()
        self._following = cp.follow(thread_id, after=after)
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for item in self._following:
            self.items.append(item)
            self._changed.set()

    def of(self, kind: type[T]) -> list[T]:
        return [item for item in self.items if isinstance(item, kind)]

    @property
    def client(self) -> Client:
        return Client().see(self.items)

    @property
    def types(self) -> list[str]:
        return [item.type for item in self.items]

    async def until(self, is_enough: Callable[[], Any]) -> None:
        """Wait until enough was told; raises what following raised."""
        async with asyncio.timeout(30):
            while not is_enough():
                if self._task.done():
                    self._task.result()
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                self._changed.clear()

    async def until_texts(self, *texts: str) -> None:
        await self.until(lambda: self.client.texts == list(texts))

    async def until_type(self, kind: str, count: int = 1) -> None:
        await self.until(lambda: self.types.count(kind) >= count)

    async def stop(self) -> list[FollowItem]:
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.items


async def told(cp: Checkpointer, thread_id: str = "t", after: str | None = None) -> list[FollowItem]:
    """What a follower is told until it has caught up."""
    following = Following(cp, thread_id, after)
    await following.until_type("caught_up")
    return await following.stop()


class Told:
    """A scene that sends what it is told to, until it is told to end."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[StreamEvent | None] = asyncio.Queue()

    def say(self, *events: StreamEvent | str) -> None:
        for event in events:
            self._events.put_nowait(TextDelta(0, event) if isinstance(event, str) else event)

    def end(self) -> None:
        self._events.put_nowait(None)

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart("m-1")
        while (event := await self._events.get()) is not None:
            yield event
        yield StreamDone()
