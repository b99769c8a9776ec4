"""Seeing what happens: OpenTelemetry spans of runs, turns, model calls, tool calls and commits.

    from byssus import telemetry

    telemetry.enable()  # for the whole process, with the tracer provider that the program has set

- Names and attributes are those of the OpenTelemetry GenAI conventions; what they have no word for is `byssus.*`.
- Nothing is imported and nothing is measured before `enable()`: until then each operation meets one `Span` that does
  nothing, and a delta of a stream does not even meet that.
- Content (messages, arguments, results, and the texts of errors, which may quote them) is recorded only with
  `capture_content=True`.
- Messages are known here by their shape and not by their class: the store, which knows no messages, is traced too.

The logs under `byssus` need no switch. There is no NullHandler: in a program that has not set up `logging`, warnings
and errors reach stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from byssus.errors import InputError, MissingExtra
from byssus.signals import Aborted

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["disable", "enable", "is_enabled"]

E = TypeVar("E")

_log = logging.getLogger("byssus.telemetry")

_conversation: ContextVar[str | None] = ContextVar("byssus_conversation", default=None)


def enable(tracer_provider: TracerProvider | None = None, *, capture_content: bool = False) -> None:
    """Trace everything in this process from now on; the global tracer provider is used if none is given.

    For the whole process and not for an agent, because the store is shared by all agents, and because that is how
    OpenTelemetry's own instrumentations are switched on.
    """
    global _tracing  # noqa: PLW0603 - one switch for the process
    _tracing = _Tracing(tracer_provider, capture_content)


def disable() -> None:
    """Start no more spans. Those that are open still end."""
    global _tracing  # noqa: PLW0603
    _tracing = None


def is_enabled() -> bool:
    """Whether spans are recorded."""
    return _tracing is not None


# --- what is traced ---------------------------------------------------------------------------------------------------


def run(run_id: str, thread_id: str | None, provider: str, model: str) -> Span:
    """A run of an agent. What happens in its context belongs to the same conversation."""
    if _tracing is None:
        return _OFF
    _conversation.set(thread_id)
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "byssus.run.id": run_id,
    }
    return _LiveSpan(_tracing, "invoke_agent", attributes)


def turn(number: int) -> Span:
    """A turn: one model call and its tools."""
    if _tracing is None:
        return _OFF
    return _LiveSpan(_tracing, "turn", {"byssus.turn.number": number})


def chat(provider: str, model: Any, request: Any) -> Span:
    """The calls to one model, including retries after transient failures."""
    if _tracing is None:
        return _OFF
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model.id,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": model.max_tokens,
        "gen_ai.request.temperature": model.temperature,
        "gen_ai.output.type": "json" if request.output else None,
    }
    span = _LiveSpan(_tracing, f"chat {model.id}", attributes, client=True)
    span.capture("gen_ai.system_instructions", lambda: _instructions(request.system_prompt))
    span.capture("gen_ai.input.messages", lambda: [_described(message) for message in request.messages])
    return span


def tool(call: Any) -> Span:
    """A tool call, with the hooks around it."""
    if _tracing is None:
        return _OFF
    name = _printable(call.name)
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": _printable(call.id),
    }
    span = _LiveSpan(_tracing, f"execute_tool {name}", attributes)
    span.capture("gen_ai.tool.call.arguments", lambda: call.arguments)
    return span


def commit(query: Callable[..., Any], system: str) -> Span:
    """A write, from its submission until its caller learns of the commit.

    A child of whatever waits for it: the group commit itself serves many callers, and would belong to none of them.
    """
    if _tracing is None:
        return _OFF
    name = f"{query.__module__.rpartition('.')[2]}.{getattr(query, '__name__', 'query')}"
    attributes = {"db.system.name": system, "db.operation.name": name}
    return _LiveSpan(_tracing, f"commit {name}", attributes, client=True)


# --- spans ------------------------------------------------------------------------------------------------------------


class Span:
    """An operation as the code around it sees it. This one is for a process without telemetry, and does nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The end: of an exception, a cancellation is an abort and everything else a failure."""

    def failed(self, kind: str, text: str = "") -> None:
        """Mark the span as failed; `kind` is the reason in one word. The first reason stays."""

    def aborted(self) -> None:
        """Mark the span as aborted, which is not a failure."""

    def ended_with(self, reply: Any) -> None:
        """Record the last reply, which may be a failure."""

    def ran(self, result: Any) -> None:
        """Record the outcome of a run."""

    def answered(self, reply: Any) -> None:
        """Record the outcome of a model call."""

    def retrying(self, error: Exception, attempt: int, pause: float) -> None:
        """Record that the model call will be retried."""

    def timed(self, stream: AsyncIterator[E]) -> AsyncIterator[E]:
        """The same stream; records the time to its first event."""
        return stream

    def returned(self, result: Any) -> None:
        """Record the outcome of a tool call."""

    def committed(self, writes: int, error: BaseException | None = None) -> None:
        """Record the outcome of a write, and how many writes shared its commit."""

    def end(self) -> None:
        """End a span that is not used with `with`."""


_OFF = Span()


class _Tracing:
    """What `enable()` found: OpenTelemetry itself, a tracer, and what may be recorded."""

    def __init__(self, tracer_provider: TracerProvider | None, capture_content: bool) -> None:
        try:
            from opentelemetry import context, trace  # noqa: PLC0415 - an extra, and slow to import
        except ImportError as error:
            raise MissingExtra("telemetry", "otel") from error
        if tracer_provider is not None and not callable(getattr(tracer_provider, "get_tracer", None)):
            raise InputError(
                f"tracer_provider must be an OpenTelemetry TracerProvider, or None; got {tracer_provider!r}"
            )
        self.attach, self.detach = context.attach, context.detach
        self.trace = trace
        self.start = trace.get_tracer("byssus", tracer_provider=tracer_provider).start_span
        self.capture_content = capture_content


_tracing: _Tracing | None = None


class _LiveSpan(Span):
    __slots__ = ("_failed", "_span", "_token", "_tracing")

    def __init__(self, tracing: _Tracing, name: str, attributes: dict[str, Any], *, client: bool = False) -> None:
        kinds = tracing.trace.SpanKind
        known = {key: value for key, value in attributes.items() if value is not None}
        if (conversation := _conversation.get()) is not None:
            known["gen_ai.conversation.id"] = conversation
        self._tracing = tracing
        self._span = tracing.start(name, kind=kinds.CLIENT if client else kinds.INTERNAL, attributes=known)
        self._failed = False

    def __enter__(self) -> Self:
        self._token = self._tracing.attach(self._tracing.trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracing.detach(self._token)
        if error is not None:
            self._raised(error)
        self.end()

    def end(self) -> None:
        self._span.end()

    def capture(self, key: str, content: Callable[[], Any]) -> None:
        """Record the content of messages, if enabled."""
        if not self._tracing.capture_content or not self._span.is_recording():
            return
        try:
            self._span.set_attribute(key, _json(content()))
        except Exception:  # noqa: BLE001 - looking on must not break what is looked at
            _log.debug("%s could not be recorded", key, exc_info=True)

    def failed(self, kind: str, text: str = "") -> None:
        if self._failed:
            return
        self._failed = True
        description = _printable(text) if text and self._tracing.capture_content else None
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._tracing.trace.StatusCode.ERROR, description)

    def aborted(self) -> None:
        self._failed = True  # whatever follows from the abort is no failure either
        self._span.set_attribute("byssus.aborted", True)

    def ended_with(self, reply: Any) -> None:
        if reply.stop_reason == "aborted":
            self.aborted()
        elif reply.error is not None:
            self.failed(reply.error.kind, reply.error.message)

    def ran(self, result: Any) -> None:
        about = {"byssus.run.id": result.run_id, "byssus.run.stop_reason": result.stop_reason}
        self._span.set_attributes({**_used(result.usage), **about})
        if result.stop_reason == "aborted":
            self.aborted()
        elif result.error is not None:
            self._raised(result.error)

    def answered(self, reply: Any) -> None:
        finish = "tool_call" if reply.stop_reason == "tool_use" else reply.stop_reason
        self._span.set_attributes({**_used(reply.usage), "gen_ai.response.finish_reasons": [finish]})
        if reply.model is not None:
            self._span.set_attribute("gen_ai.response.model", _printable(reply.model))
        self.capture("gen_ai.output.messages", lambda: [{**_described(reply), "finish_reason": finish}])
        self.ended_with(reply)

    def retrying(self, error: Exception, attempt: int, pause: float) -> None:
        attributes: dict[str, Any] = {
            "error.type": type(error).__name__,
            "byssus.retry.attempt": attempt,
            "byssus.retry.pause": pause,
        }
        self._span.add_event("byssus.retry", attributes)

    async def timed(self, stream: AsyncIterator[E]) -> AsyncIterator[E]:
        asked, waiting = time.perf_counter(), True
        try:
            async for event in stream:
                if waiting:
                    waiting = False
                    self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.perf_counter() - asked)
                yield event
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()

    def returned(self, result: Any) -> None:
        self.capture("gen_ai.tool.call.result", lambda: result.text)
        if result.is_error:
            self.failed("tool_error", result.text)

    def committed(self, writes: int, error: BaseException | None = None) -> None:
        self._span.set_attribute("byssus.commit.writes", writes)
        if error is not None:
            self._raised(error)

    def _raised(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit | Aborted):
            self.aborted()
        else:
            self.failed(type(error).__name__, str(error))


# --- values as the conventions write them -----------------------------------------------------------------------------


def _used(usage: Any) -> dict[str, Any]:
    """Tokens; to the conventions, what a cache gave or took is a part of the input."""
    return {
        "gen_ai.usage.input_tokens": usage.input + usage.cache_read + usage.cache_write,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write,
        "byssus.usage.cost": usage.cost,
    }


def _instructions(system_prompt: str) -> list[dict[str, Any]]:
    return [{"type": "text", "content": system_prompt}] if system_prompt else []


def _described(message: Any) -> dict[str, Any]:
    parts = [part for block in message.content if (part := _part(block)) is not None]
    if message.role != "tool_result":
        return {"role": message.role, "parts": parts}
    response = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.text}
    return {"role": "tool", "parts": [response, *_without_text(parts)]}


def _part(block: Any) -> dict[str, Any] | None:
    match block.type:
        case "text":
            return {"type": "text", "content": block.text}
        case "thinking":
            return {"type": "reasoning", "content": block.thinking}
        case "tool_call":
            return {
                "type": "tool_call",
                "id": block.id,
                "name": block.name,
                "arguments": block.malformed or block.arguments,
            }
        case "image":  # without its bytes: an attribute should not hold megabytes
            return {"type": "image", "mime_type": block.mime_type}
    return None


def _without_text(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for part in parts if part["type"] != "text"]


def _json(value: Any) -> str:
    if isinstance(value, str):
        return _printable(value)
    return json.dumps(value, default=repr)


def _printable(text: str) -> str:
    """Text that any exporter can send: a lone surrogate from a model would lose the whole batch."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
