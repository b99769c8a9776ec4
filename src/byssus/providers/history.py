"""Histories that every model accepts.

Providers refuse a conversation in which a tool call has no result or a result no call, and then refuse it for ever. A
crash, an abort, a fork or a window may leave one like that, so every request passes through `valid_history`.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from byssus.messages import (
    AssistantMessage,
    Block,
    Failure,
    ImageContent,
    Message,
    ModelMessage,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    UserMessage,
)

UNKNOWN_OUTCOME = (
    "The outcome of this call is unknown: it was interrupted, and may or may not have taken effect. "
    "Check before you try it again."
)
_MANY = 1_000
_LINE = 80  # characters of a summary
_OMITTED = "(The beginning of this conversation is left out.)"
_GO_ON = "(Go on.)"


def valid_history(messages: Sequence[Message]) -> list[ModelMessage]:
    """The same conversation in a form that every model takes.

    - Notes, empty messages and results without a call are left out.
    - Each call is followed by its result, in call order, wherever that stood; a missing one says that the outcome is
      unknown.
    - Each call has an id that no other has: of calls that share one, in one reply or in several, and of those without
      any, the later ones get another, and so do their results. It depends on what stands before it and on nothing else,
      so a conversation that grows keeps its beginning, and a service finds that in its cache.
    - A reply that broke off keeps its text; at the very end it is left out, so that the model tries again.
    - The first message is a user's.
    """
    return ValidHistory().of(messages)


class ValidHistory:
    """`valid_history` of a conversation that grows: a turn costs what it added, not what the thread holds.

    Everything before the last user message is settled and stays as it is, provided that each of its calls has its
    result by then. That part is made valid once.
    """

    def __init__(self, longest_result: int | None = None) -> None:
        self._longest_result = longest_result
        self._source: Sequence[Message] = ()
        self._settled = 0  # so many messages of the source are dealt with
        self._last: Message | None = None  # the last one of them
        self._valid: list[ModelMessage] = []
        self._ids = _CallIds()  # of what is settled

    def renewed(self) -> ValidHistory:
        """One with the same limit, for another conversation."""
        return ValidHistory(self._longest_result)

    def of(self, messages: Sequence[Message]) -> list[ModelMessage]:
        if not self._is_as_it_was(messages):
            self._settled, self._last, self._valid, self._ids = 0, None, [], _CallIds()
        self._source = messages
        self._settle(messages)
        rest: list[ModelMessage] = [message for message in messages[self._settled :] if not isinstance(message, Note)]
        valid = self._valid + self._made_valid(rest, _CallIds(self._ids))[0]
        while valid and isinstance(last := valid[-1], AssistantMessage) and last.failed:
            valid.pop()
        if valid and not isinstance(valid[0], UserMessage):
            valid.insert(0, UserMessage(_OMITTED))
        return valid

    def _is_as_it_was(self, messages: Sequence[Message]) -> bool:
        """Whether these are the messages that were settled, one by one: a hook may have made a list of its own."""
        known = self._settled
        if messages is self._source:
            return known == 0 or (len(messages) >= known and messages[known - 1] is self._last)
        return known <= len(messages) and all(map(operator.is_, self._source[:known], messages))

    def is_far_behind(self, messages: Sequence[Message]) -> bool:
        """Whether making them valid takes so long that it should not be done on an event loop."""
        return len(messages) - self._settled > _MANY

    def _settle(self, messages: Sequence[Message]) -> None:
        for boundary in range(len(messages) - 1, self._settled, -1):
            if isinstance(messages[boundary], UserMessage):
                break
        else:
            return
        chunk = [m for m in messages[self._settled : boundary] if not isinstance(m, Note)]
        ids = _CallIds(self._ids)
        valid, whole = self._made_valid(chunk, ids)
        if whole:
            self._valid += valid
            self._ids.add(ids)
            self._settled, self._last = boundary, messages[boundary - 1]

    def _made_valid(self, history: Sequence[ModelMessage], ids: _CallIds) -> tuple[list[ModelMessage], bool]:
        """The history with each call before its result; and whether all the results were there."""
        results = _Results(history)
        valid: list[ModelMessage] = []
        for position, message in enumerate(history):
            if isinstance(message, UserMessage):
                if any(_has_content(block) for block in message.content):
                    valid.append(message)
            elif isinstance(message, AssistantMessage) and (reply := _presentable(message)):
                found = [results.of(call, position) for call in reply.tool_calls]
                reply, found = ids.made_distinct(reply, found)
                valid.append(reply)
                valid.extend(_shortened(result, self._longest_result) for result in found)
        return valid, results.complete


class _CallIds:
    """The ids of the calls in a history, each used once. What is added to a copy is not in the original."""

    def __init__(self, before: _CallIds | None = None) -> None:
        self._before = before
        self._used: set[str] = set()
        self._times: dict[str, int] = {}  # how often an id that was used already came again

    def add(self, later: _CallIds) -> None:
        """Take over what a copy of this one has in addition."""
        self._used |= later._used
        self._times |= later._times

    def made_distinct(
        self, reply: AssistantMessage, results: list[ToolResultMessage]
    ) -> tuple[AssistantMessage, list[ToolResultMessage]]:
        """A reply with its results, in call order, in which no id is one that was used before."""
        given = [call.id for call in reply.tool_calls]
        ids = [self._next(call_id) for call_id in given]
        if ids == given:
            return reply, results
        rest = iter(ids)
        content = [
            msgspec.structs.replace(block, id=next(rest)) if isinstance(block, ToolCall) else block
            for block in reply.content
        ]
        renamed = [msgspec.structs.replace(each, tool_call_id=name) for each, name in zip(results, ids, strict=True)]
        return msgspec.structs.replace(reply, content=content), renamed

    def _next(self, call_id: str) -> str:
        ours, times = call_id, self._times_of(call_id)
        while not ours or self._is_used(ours):
            times += 1
            ours = f"{call_id or 'call'}_{times}"
        self._used.add(ours)
        self._times[call_id] = times
        return ours

    def _is_used(self, call_id: str) -> bool:
        return call_id in self._used or (self._before is not None and self._before._is_used(call_id))

    def _times_of(self, call_id: str) -> int:
        found = self._times.get(call_id)
        return found if found is not None else 1 if self._before is None else self._before._times_of(call_id)


def with_replies(seen: Sequence[Message], messages: Sequence[Message]) -> Sequence[Message]:
    """What a hook left of the messages; if that begins with results, from the reply on that asked for them.

    A window that is smaller than a reply's calls would otherwise leave nothing that can be sent.
    """
    if not seen or not isinstance(first := seen[0], ToolResultMessage):
        return seen
    for end in range(len(messages) - 1, -1, -1):
        if messages[end] is first:
            break
    else:
        return seen
    for start in range(end, -1, -1):
        if isinstance(messages[start], AssistantMessage):
            return [*messages[start:end], *seen]
    return seen


def answerable(seen: list[Message]) -> list[Message]:
    """What hooks left of the messages, ending with something to answer: services refuse a reply as the last message."""
    if not seen or (isinstance(last := seen[-1], UserMessage) and any(map(_has_content, last.content))):
        return seen
    history = valid_history(seen)
    return [*seen, UserMessage(_GO_ON)] if history and isinstance(history[-1], AssistantMessage) else seen


def open_calls(messages: Sequence[Message]) -> dict[int, ToolCall]:
    """The calls of the last reply that have no result, by their index in it."""
    behind: list[str] = []
    for message in reversed(messages):
        if isinstance(message, ToolResultMessage):
            behind.append(message.tool_call_id)
        elif isinstance(message, AssistantMessage):
            left = [(i, call) for i, call in enumerate(message.tool_calls) if not _taken(call.id, behind)]
            return dict(left[behind.count("") :])  # a result that names no call is that of the first one without
    return {}


def _taken(call_id: str, results: list[str]) -> bool:
    """Whether there is a result for the call, which is then used up: one reply may use an id twice."""
    if call_id not in results:
        return False
    results.remove(call_id)
    return True


def last_reply(messages: Sequence[Message]) -> AssistantMessage | None:
    return next((message for message in reversed(messages) if isinstance(message, AssistantMessage)), None)


def last_reply_id(messages: Sequence[Message]) -> str | None:
    reply = last_reply(messages)
    return None if reply is None else reply.id


def one_line(reply: AssistantMessage | None) -> str:
    """A reply in one line."""
    if reply is None:
        return ""
    text = " ".join(reply.text.split())
    if not text and reply.tool_calls:
        text = f"called {', '.join(call.name for call in reply.tool_calls)}"
    return text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."


def interrupted(partial: AssistantMessage) -> AssistantMessage:
    """What had arrived of a reply when its process died, as it joins the history."""
    failure = Failure("Interrupted", "its run was interrupted while it was arriving")
    return msgspec.structs.replace(partial, stop_reason="aborted", error=failure)


def unknown_outcome(call: ToolCall) -> ToolResultMessage:
    """The result of a call that may or may not have run."""
    return ToolResultMessage(call.id, call.name, UNKNOWN_OUTCOME, is_error=True)


def can_continue(messages: Sequence[Message]) -> bool:
    """Whether a model has something to answer: the history ends with a user, a result, or a reply that broke off."""
    return bool(continues(messages))


def continues(messages: Sequence[Message]) -> bool | None:
    """The same of the end of a history; None if that depends on what is before these messages."""
    for message in reversed(messages):  # no need to look at all of a long thread
        if isinstance(message, UserMessage):
            if any(_has_content(block) for block in message.content):
                return True
        elif (
            isinstance(message, AssistantMessage)
            and (reply := _presentable(message))
            and (reply.tool_calls or not reply.failed)
        ):
            return bool(reply.tool_calls)
    return None


_NOTHING: deque[tuple[int, ToolResultMessage]] = deque()


class _Results:
    """The results of a history, each to be given to one call."""

    def __init__(self, history: Iterable[ModelMessage]) -> None:
        self._by_call: dict[str, deque[tuple[int, ToolResultMessage]]] = {}
        self._calls: dict[str, deque[int]] = {}
        self._replies: list[int] = []  # those that call tools
        self.complete = True
        for position, message in enumerate(history):
            if isinstance(message, ToolResultMessage):
                self._by_call.setdefault(message.tool_call_id, deque()).append((position, message))
            elif isinstance(message, AssistantMessage):
                if message.tool_calls:
                    self._replies.append(position)
                for call in message.tool_calls:
                    self._calls.setdefault(call.id, deque()).append(position)

    def of(self, call: ToolCall, position: int) -> ToolResultMessage:
        """The first result behind the call and before the next call with the same id (some services reuse ids).

        Calls are asked for in their order, so what lies behind is done with.
        """
        waiting, calls = self._by_call.get(call.id, _NOTHING), self._calls[call.id]
        while calls and calls[0] <= position:
            calls.popleft()
        while waiting and waiting[0][0] < position:
            waiting.popleft()
        if waiting and (not calls or waiting[0][0] < calls[0]):
            return waiting.popleft()[1]
        return self._nameless(call, position) or self._missing(call)

    def _missing(self, call: ToolCall) -> ToolResultMessage:
        self.complete = False
        return unknown_outcome(call)

    def _nameless(self, call: ToolCall, position: int) -> ToolResultMessage | None:
        """A result that names no call, as an application may save it: that of the first call which has none."""
        waiting = self._by_call.get("", _NOTHING)
        while waiting and waiting[0][0] < position:
            waiting.popleft()
        following = bisect.bisect_right(self._replies, position)
        end = self._replies[following] if following < len(self._replies) else math.inf
        if not waiting or waiting[0][0] > end:
            return None
        return msgspec.structs.replace(waiting.popleft()[1], tool_call_id=call.id, tool_name=call.name)


def _shortened(result: ToolResultMessage, longest: int | None) -> ToolResultMessage:
    """The result as a model sees it: of a very long text the beginning and the end, and a note between them."""
    if longest is None or sum(len(block.text) for block in result.content if type(block) is TextContent) <= longest:
        return result
    text, half = result.text, longest // 2
    note = f"\n[... {len(text) - 2 * half:,} of {len(text):,} characters are left out here ...]\n"
    others = [block for block in result.content if type(block) is not TextContent]
    content = [TextContent(text[:half] + note + text[len(text) - half :]), *others]
    return msgspec.structs.replace(result, content=content)


def _presentable(reply: AssistantMessage) -> AssistantMessage | None:
    """The reply as a model may see it. One that broke off loses what its service would not recognise."""
    kept = [block for block in reply.content if _is_sendable(block, broken=reply.failed)]
    if not kept or all(isinstance(block, ThinkingContent) for block in kept):
        return None
    return reply if len(kept) == len(reply.content) else msgspec.structs.replace(reply, content=kept)


def _has_content(block: Block) -> bool:
    """Whether a user's block is an image, or text that is not blank."""
    return isinstance(block, ImageContent) or (isinstance(block, TextContent) and bool(block.text.strip()))


def _is_sendable(block: Block, *, broken: bool) -> bool:
    if isinstance(block, ThinkingContent):
        return not broken or bool(block.signature or block.redacted)
    if isinstance(block, UnknownBlock):
        return False
    return not isinstance(block, TextContent) or bool(block.text.strip())
