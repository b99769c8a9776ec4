"""Ready-made middleware: which messages of a thread the model gets, and what is hidden from it. The database keeps all.

Windows keep whole turns where they can. If a turn must be cut, the user's question of that turn is kept. The request is
made valid afterwards, whatever the windows leave out.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from byssus.errors import ContextTooLong, InputError, ProviderError
from byssus.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    ModelMessage,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    Usage,
    UserMessage,
    dumps,
    encode,
)
from byssus.middleware import HookContext, Middleware
from byssus.providers.base import Model, Provider, Request
from byssus.providers.history import valid_history
from byssus.providers.model_call import ModelCall, Patience, Route
from byssus.signals import Signal
from byssus.values.inputs import fits_column
from byssus.values.marks import MarkedMessages

_log = logging.getLogger("byssus.middleware")

_MARKS = 1_000  # in one ExcludeMarked
_IMAGE_TOKENS = 1_500
_MESSAGE_TOKENS = 4  # tokens of the frame around a message
_FEW = 64  # messages that a window looks at first
_QUESTION = 16  # messages: among so many there usually is a user's question


INSTRUCTION = (
    "Summarize the conversation that you are given, for an assistant who will carry it on without seeing it: what "
    "was asked, what was done, found and decided, names, numbers and open points. If there is a summary of what "
    "came before, merge it into yours. Write plain text, no preamble."
)


class SlidingWindow(Middleware):
    """Send the last n messages; if these begin in the middle of a turn, also send the user's question of that turn."""

    _changes_in_place = False
    asks_for_earlier = True

    def __init__(self, n: int) -> None:
        self._n = _checked(n, "SlidingWindow needs at least one message")

    async def transform_context(
        self,
        messages: list[Message],
        *,
        signal: Signal | None = None,  # noqa: ARG002
        context: HookContext | None = None,
    ) -> list[Message]:
        """Keep the last messages, and the question that they answer."""
        history = await _end_of(messages, context, lambda history: len(history) >= self._n, at_least=self._n)
        start = max(0, len(history) - self._n)
        while start > 0 and isinstance(history[start], ToolResultMessage):  # keep a call and its results together
            start -= 1
        return [*_question(history, start), *history[start:]]


class TokenBudget(Middleware):
    """Send as many of the last turns as fit into about n tokens, and always the last one."""

    _changes_in_place = False
    asks_for_earlier = True

    def __init__(self, n: int) -> None:
        self._n = _checked(n, "TokenBudget needs a number of tokens above 0")

    async def transform_context(
        self,
        messages: list[Message],
        *,
        signal: Signal | None = None,  # noqa: ARG002
        context: HookContext | None = None,
    ) -> list[Message]:
        """Keep the last turns that fit into the budget."""
        history = await _end_of(messages, context, lambda history: _tokens(history) > self._n)
        room, start = self._n, len(history)
        for turn in reversed(_turns(history)):
            room -= _tokens(history[turn.start : turn.stop])
            if room < 0 and start < len(history):
                break
            start = turn.start
        return list(history[start:])


class Summarize(Middleware):
    """Replace old messages by a summary when the conversation exceeds about `above` tokens.

    The last `keep` messages stay as they are, and more if they begin in the middle of a turn. The agent's own model (or
    `model`, of `provider`) writes the summary. It is stored in the thread's extra under `key`, and survives a restart.
    It
    is rewritten when new messages amount to a good part of `above`, not with every turn.

    If the summary cannot be written, the model gets the conversation as it is, and the next turn tries again.
    """

    _changes_in_place = False
    asks_for_earlier = True

    INSTRUCTION: ClassVar[str] = INSTRUCTION

    def __init__(
        self,
        above: int = 50_000,
        keep: int = 10,
        *,
        provider: Provider | None = None,
        model: Model | None = None,
        key: str = "summary",
    ) -> None:
        self._above = _checked(above, "Summarize needs above, a number of tokens, to be 1 or more")
        self._keep = _checked(keep, "Summarize needs keep, a number of messages, to be 1 or more")
        if provider is not None and model is None:
            raise InputError(f"Summarize with its own provider ({provider.name!r}) also needs a model of it: model=...")
        self._provider = provider
        self._model = model
        self._key = key

    async def transform_context(
        self, messages: list[Message], *, signal: Signal | None = None, context: HookContext | None = None
    ) -> list[Message]:
        """Put a summary in place of the older messages, once they are too many."""
        assert context is not None
        summary = self._summary_in(context.extra)
        messages, before = await summary.with_earlier(messages, context)
        covered = summary.reach(messages, before)
        seen = summary.in_place_of(messages, covered)
        if _tokens(seen) <= self._above or (start := self._cut(messages, covered)) is None:
            return seen
        known = summary.text if covered else ""
        text = await self._write(known, messages[covered:start], context, signal or Signal())
        if not text:
            return seen
        summary = _Summary(text, _mark(messages[start - 1]), before + start)
        context.extra[self._key] = msgspec.to_builtins(summary)
        return summary.in_place_of(messages, start)

    def _summary_in(self, extra: dict[str, Any]) -> _Summary:
        try:
            return msgspec.convert(extra.get(self._key) or {}, _Summary)
        except msgspec.ValidationError as error:
            raise InputError(
                f"extra[{self._key!r}] does not hold a summary ({error}); pass another key: Summarize(key=...)"
            ) from error

    def _cut(self, messages: Sequence[Message], covered: int) -> int | None:
        """Return the index of the first message to keep: at a turn, or else at a reply. None if there is too little to
        cut.
        """
        for kind in (UserMessage, AssistantMessage):
            for start in range(len(messages) - self._keep, covered, -1):
                if isinstance(messages[start], kind):
                    if 4 * _tokens(messages[covered:start]) >= self._above:
                        return start
                    break
        return None

    async def _write(self, before: str, old: Sequence[Message], context: HookContext, signal: Signal) -> str | None:
        """Return a summary that covers `before` and these messages; None if the model could not write one."""
        provider, model = self._provider or context.provider, self._model or context.model
        if provider is None or model is None:
            raise InputError("Summarize needs a provider and a model")

        async def ask(before: str, old: Sequence[Message]) -> str:
            shown = old if context.as_sent is None else await context.as_sent(old)
            return await summarized(provider, model, transcript(before, shown), signal, spend=context.spend)

        try:
            return await by_parts(ask, before, old)
        except ProviderError as error:
            why = type(error).__name__  # not its text, which may quote a message
            _log.warning("%s; there is no new summary, and the conversation is sent as it is", why)
            return None


async def summarized(
    provider: Provider,
    model: Model,
    text: str,
    signal: Signal,
    *,
    instruction: str = INSTRUCTION,
    spend: Callable[[Usage], None] | None = None,
) -> str:
    """Return a model's summary of a transcript; empty if the model was interrupted. Raises the model's failure."""
    request = Request(model, [UserMessage(text)], instruction)
    patience = Patience(retries=0, idle=300.0, grace=1.0)  # no retries: the next turn tries again
    call = ModelCall([Route(provider, model)], request, patience, signal, lambda event, signal: None)  # noqa: ARG005
    reply = await call.answer()
    if spend is not None:
        spend(reply.usage)
    if call.error is not None:
        raise call.error
    return "" if reply.failed else reply.text.strip()


async def by_parts(ask: Callable[[str, Sequence[Message]], Awaitable[str]], before: str, old: Sequence[Message]) -> str:
    """Return a summary that covers `before` and these messages; in several steps if the model
    cannot take them at once.
    """
    try:
        return await ask(before, old)
    except ContextTooLong:
        if len(old) == 1:
            raise
    half = len(old) // 2
    first = await by_parts(ask, before, old[:half])
    return await by_parts(ask, first, old[half:]) if first else ""


def transcript(before: str, messages: Sequence[Message]) -> str:
    """Return a conversation as text, so that a model neither answers it nor calls its tools."""
    parts = [f"Summary of what came before:\n{before}"] if before else []
    conversation = "\n\n".join(line for message in valid_history(messages) for line in _transcript_lines(message))
    return "\n\n".join([*parts, f"The conversation:\n{conversation}"])


def _in_place(summary: str) -> UserMessage:
    """Return the message that replaces the messages that are left out."""
    return UserMessage(f"Summary of the conversation so far:\n{summary}")


class _Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A summary as it is stored: the last message that it covers, and the number of messages that it covers."""

    text: str = ""
    upto: str = ""
    count: int = 0

    async def with_earlier(self, messages: list[Message], context: HookContext) -> tuple[list[Message], int]:
        """Return the messages that it does not cover, with some before them, and how many the thread has before those.

        If the last message that it covers is not where it was (the thread was rewound), these are all messages.
        """
        before = context.earlier_count
        while before and context.earlier is not None:
            if self.text and self.count <= before:
                missing = before - self.count + _QUESTION
            elif not self._is_at(messages, before):
                missing = before
            elif any(isinstance(message, UserMessage) for message in messages[: self.count - before + 1]):
                break
            else:
                missing = max(len(messages), _QUESTION)
            page = await context.earlier(missing)
            messages, before = [*page, *messages], before - len(page) if page else 0
        return messages, before

    def _is_at(self, messages: Sequence[Message], before: int) -> bool:
        place = self.count - before
        return bool(self.text) and 0 < place <= len(messages) and _mark(messages[place - 1]) == self.upto

    def reach(self, messages: Sequence[Message], before: int = 0) -> int:
        """Return how many of these messages it covers; 0 if the last one is not among them (the thread was rewound)."""
        if not self.text:
            return 0
        if self._is_at(messages, before):
            return self.count - before
        return next((i for i, message in enumerate(messages, 1) if _mark(message) == self.upto), 0)

    def in_place_of(self, messages: Sequence[Message], covered: int) -> list[Message]:
        if not covered:
            return list(messages)
        return [_in_place(self.text), *_question(messages, covered), *messages[covered:]]


class ExcludeMarked(Middleware):
    """Leave out messages of the thread that have at least one of these marks.

    The thread's summary replaces them, if there is one and it is wanted. Marks and the summary are set through a memory
    of
    the same thread (see `byssus.memory`), also during a run.
    """

    _changes_in_place = False

    def __init__(self, *marks: str, prepend_summary: bool = True) -> None:
        if not 1 <= len(marks) <= _MARKS or not all(isinstance(mark, str) for mark in marks):
            raise InputError(f"ExcludeMarked needs 1 to {_MARKS:,} marks, each a string; got {marks!r:.80}")
        # Marks that cannot be stored cannot match.
        self._marks = tuple(text for mark in marks if fits_column(text := str.__str__(mark)))
        self._prepends = prepend_summary

    async def transform_context(
        self,
        messages: list[Message],
        *,
        signal: Signal | None = None,  # noqa: ARG002
        context: HookContext | None = None,
    ) -> list[Message]:
        """Leave out the marked messages; the summary of a memory stands in for them."""
        if context is None or context.marked is None:
            return messages
        found = await context.marked(self._marks) if self._marks else MarkedMessages()
        seen = found.without(messages)
        if self._prepends and found.summary:
            return [_in_place(found.summary), *seen]
        if all(isinstance(message, Note) for message in seen):  # everything is marked: send the last question
            return next(([message] for message in reversed(messages) if isinstance(message, UserMessage)), seen)
        return seen


class Redact(Middleware):
    """Hide text that matches a pattern: in tool results before they are stored, and in everything sent to a model.

    Messages of users and models are stored unchanged. Thinking that its service has signed is sent back unchanged.
    """

    _changes_in_place = False

    def __init__(self, *patterns: str | re.Pattern[str], replacement: str = "[redacted]") -> None:
        if not patterns:
            raise InputError("Redact needs at least one pattern (a regular expression)")
        self._patterns = [_compiled(pattern) for pattern in patterns]
        self._replacement = replacement

    async def after_tool_call(
        self,
        call: ToolCall,  # noqa: ARG002
        result: ToolResultMessage,
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> ToolResultMessage:
        """Redact a tool result before it is stored."""
        hidden: ToolResultMessage = self._message(result)
        return hidden

    async def convert_to_llm(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        """Redact what is sent to the model."""
        return [message if isinstance(message, Note) else self._message(message) for message in messages]

    async def transform_system_prompt(self, system_prompt: str, *, signal: Signal | None = None) -> str:  # noqa: ARG002
        """Redact the system prompt."""
        return self._text(system_prompt)

    def _message(self, message: Any) -> Any:
        changes: dict[str, Any] = {"content": [self._block(block) for block in message.content]}
        if isinstance(message, ToolResultMessage):
            changes["details"] = self._value(message.details)
        return msgspec.structs.replace(message, **changes)

    def _block(self, block: Block) -> Block:
        if isinstance(block, TextContent):
            return msgspec.structs.replace(block, text=self._text(block.text))
        if isinstance(block, ToolCall):
            malformed = None if block.malformed is None else self._text(block.malformed)
            return msgspec.structs.replace(block, arguments=self._value(block.arguments), malformed=malformed)
        if isinstance(block, ThinkingContent) and not block.signature:  # a changed signed block would be rejected
            return msgspec.structs.replace(block, thinking=self._text(block.thinking))
        return UnknownBlock(self._value(block.data)) if isinstance(block, UnknownBlock) else block

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._value(key): self._value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):  # a card number may be a number
            return self._text(text) if (text := str(value)) != self._text(text) else value
        return value

    def _text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(lambda _: self._replacement, text)
        return text


def estimate_tokens(message: Message) -> int:
    """Estimate the tokens of a message: one per four letters of English, or per Chinese character."""
    if isinstance(message, Note):
        return 0
    return _MESSAGE_TOKENS + sum(_block_tokens(block) for block in message.content)


def _tokens(messages: Iterable[Message]) -> int:
    return sum(map(estimate_tokens, messages))


def _block_tokens(block: Block) -> int:
    match block:
        case ImageContent():
            return _IMAGE_TOKENS
        case TextContent():
            return estimate_text(block.text)
        case ThinkingContent():
            return estimate_text(block.thinking) + estimate_text(block.redacted or "")
        case ToolCall():
            return estimate_text(block.name + (block.malformed or dumps(block.arguments)))
        case _:
            return 0


def estimate_text(text: str) -> int:
    """Estimate the tokens of a text by its UTF-8 bytes: 0.25 for a letter, 1 for a Chinese
    character, 1.4 for an emoji.
    """
    beyond_ascii = 0 if text.isascii() else len(text.encode("utf-8", "surrogatepass")) - len(text)
    return (2 * len(text) + 3 * beyond_ascii + 7) // 8


async def _end_of(
    messages: list[Message],
    context: HookContext | None,
    suffices: Callable[[Sequence[Message]], bool],
    *,
    at_least: int = _FEW,
) -> list[ModelMessage]:
    """Return the end of a conversation, made valid: from a user's message on, and as long as it must be to suffice.

    A long thread is looked at from its end, and messages that are not loaded are loaded if they are needed.
    """
    size, is_all = at_least, context is None or context.earlier is None or not context.earlier_count
    while True:
        start = _last_question(messages, len(messages) - size)
        if start is not None and suffices(history := valid_history(messages[start:])):
            return history
        if size < len(messages):
            size *= 2
        elif is_all:
            return valid_history(messages)
        else:
            assert context is not None
            assert context.earlier is not None
            size *= 2
            page = await context.earlier(size)
            messages, is_all = [*page, *messages], not page


def _last_question(messages: Sequence[Message], upto: int) -> int | None:
    """Return the place of the last user's message at or before a place that says something."""
    for place in range(min(upto, len(messages) - 1), -1, -1):
        if isinstance(message := messages[place], UserMessage) and valid_history([message]):
            return place
    return None


def _turns(messages: Sequence[Message]) -> list[range]:
    """Return the positions of each turn: from one user message to the next."""
    starts = [i for i, message in enumerate(messages) if isinstance(message, UserMessage)]
    starts = starts if starts[:1] == [0] else [0, *starts]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(messages)], strict=True)]


def _question(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the user's question if the messages from `start` on begin in the middle of a turn."""
    first = next((message for message in messages[start:] if not isinstance(message, Note)), None)
    if isinstance(first, UserMessage):
        return []
    return next(([message] for message in reversed(messages[:start]) if isinstance(message, UserMessage)), [])


_LONGEST = 4_000  # characters of one message that go into a summary


def _transcript_lines(message: Message) -> Iterable[str]:
    """Return a message as lines of a transcript."""
    text = message.text
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    if isinstance(message, ToolResultMessage):
        yield f"[{'error' if message.is_error else 'result'} of {message.tool_name}] {text}"
        return
    if text.strip():
        yield f"[{message.role}] {text}"
    for block in [] if isinstance(message, Note) else message.content:
        if isinstance(block, ToolCall):
            yield f"[call of {block.name}] {(block.malformed or dumps(block.arguments))[:_LONGEST]}"
        elif isinstance(block, ImageContent):
            yield f"[an image from the {message.role}]"


def _mark(message: Message) -> str:
    """Return the id of a message, or a digest if another program stored it without one."""
    known = None if isinstance(message, Note) else message.id
    return known or hashlib.sha256(encode(message).encode()).hexdigest()


def _checked(number: int, wanted: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"{wanted}, got {number!r}")
    return number


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
        nothing = compiled.search("")
    except (re.error, TypeError) as error:
        raise InputError(f"Redact cannot use the pattern {pattern!r}: {error}") from error
    if nothing:
        raise InputError(f"Redact cannot use the pattern {pattern!r}: it matches the empty text, and so everywhere")
    return compiled
