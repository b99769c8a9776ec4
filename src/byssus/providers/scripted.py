"""A provider with scripted replies, for tests, examples and benchmarks.

It is a real provider: it streams, fails and calls tools as the others do. It is strict in both directions: a call that
is not in the script is an error, and so is a step that was not used at the end.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec

from byssus.errors import InputError
from byssus.events import (
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import AssistantMessage, Block, TextContent, ThinkingContent, ToolCall, dumps
from byssus.providers.base import Request
from byssus.signals import Signal

Reply: TypeAlias = str | list[Any] | AssistantMessage | BaseException
Step: TypeAlias = Reply | Callable[[Request], Any]

_WORDS = re.compile(r"\s*\S+\s*|\s+")


class ScriptError(AssertionError):
    """The program and its script disagree."""


class ScriptedProvider:
    """Plays the steps in order, one for each call. Text is streamed word by word.

    `pace` is a pause in seconds before each piece of a reply. With `repeat`, the script begins again after its last
    step.
    """

    name = "scripted"

    def __init__(self, steps: Iterable[Step] = (), *, pace: float = 0.0, repeat: bool = False) -> None:
        if isinstance(pace, bool) or not isinstance(pace, int | float) or not 0 <= pace < 1e6:
            raise InputError(f"pace must be a number of seconds from 0 up, got {pace!r:.80}")
        self._steps: list[Step] = list(steps)
        self._pace = pace
        self._repeat = repeat
        self.requests: list[Request] = []

    def __repr__(self) -> str:
        return f"ScriptedProvider({self._used} of {len(self._steps)} steps used)"

    @property
    def _used(self) -> int:
        return min(len(self.requests), len(self._steps))

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:  # noqa: ARG002
        """Yield the next step of the script as stream events."""
        position = len(self.requests)
        if position >= len(self._steps) and not (self._repeat and self._steps):
            last = request.messages[-1].text if request.messages else ""
            raise ScriptError(
                f"model call {position + 1} was not scripted (the script has {len(self._steps)} steps); "
                f"its last message was {last[:80]!r}"
            )
        # The loop goes on using its list, so what was sent is remembered as it was.
        request = msgspec.structs.replace(request, messages=list(request.messages))
        self.requests.append(request)
        return self._play(self._steps[position % len(self._steps)], request)

    def assert_done(self) -> None:
        """Raise `ScriptError` if steps of the script were not used."""
        unused = len(self._steps) - self._used
        if unused > 0:
            raise ScriptError(f"{unused} of {len(self._steps)} scripted steps were never used")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.assert_done()

    async def _play(self, step: Step, request: Request) -> AsyncIterator[StreamEvent]:
        reply = step(request) if callable(step) else step
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, BaseException):
            raise reply
        message = reply if isinstance(reply, AssistantMessage) else AssistantMessage(reply)
        yield StreamStart(message.model)
        for index, block in enumerate(message.content):
            for event in _events(index, block):
                if self._pace and isinstance(event, TextDelta | ThinkingDelta | ToolCallDelta):
                    await asyncio.sleep(self._pace)
                yield event
        yield StreamDone(message.stop_reason, message.usage)


def _events(index: int, block: Block) -> Iterable[StreamEvent]:
    match block:
        case TextContent():
            yield TextStart(index)
            for word in _WORDS.findall(block.text):
                yield TextDelta(index, word)
            yield TextEnd(index)
        case ThinkingContent():
            yield ThinkingStart(index)
            yield ThinkingDelta(index, block.thinking)
            yield ThinkingEnd(index, block.signature, block.redacted)
        case ToolCall():
            yield ToolCallStart(index, block.id, block.name)
            yield ToolCallDelta(index, block.malformed or dumps(block.arguments))
            yield ToolCallEnd(index, block)
        case _:
            raise ScriptError(f"a scripted reply cannot contain {block!r:.80}")
