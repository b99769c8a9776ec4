"""Claude, through Anthropic's SDK: a request out, its raw stream translated event by event.

- The SDK is imported at the first use, on a thread: it takes a second. A missing package or key raises in `stream()`.
- What goes out is valid for the service whatever the history holds: roles alternate, results come before text, call
  ids have its alphabet, and nothing is sent that it refuses (empty text, unsigned or foreign thinking, NaN, lone
  surrogates).
- Every failure is a typed `ProviderError` that never shows the key. The run retries, so the SDK does not.
- Connections are kept for the next call, within one event loop. Closing or cancelling a stream closes its connection.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace

from byssus.errors import (
    AuthenticationFailed,
    ContentRefused,
    ContextTooLong,
    InputError,
    InvalidRequest,
    MissingExtra,
    Overloaded,
    ProviderError,
    RateLimited,
)
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
from byssus.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    ReplyStop,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
    dumps,
    image_type,
)
from byssus.providers import wire
from byssus.providers.base import Model, Request
from byssus.providers.reply import parse_tool_call
from byssus.providers.wire import CallIds
from byssus.signals import Signal

if TYPE_CHECKING:
    from anthropic import APIStatusError, AsyncAnthropic, AsyncAnthropicBedrock, AsyncAnthropicVertex

    Client: TypeAlias = AsyncAnthropic | AsyncAnthropicBedrock | AsyncAnthropicVertex

_NAME = "anthropic"
_KEY_HINT = "set ANTHROPIC_API_KEY or pass AnthropicProvider(api_key=...)"
_MAX_TOKENS = 32_000  # the service wants a number; each current model accepts this one
_BUDGETS = {"low": 2_048, "medium": 8_192, "high": 16_384, "xhigh": 24_000, "max": 24_000}
_STOPS: dict[str, ReplyStop] = {
    "tool_use": "tool_use",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
_as, _clean = wire.checked, wire.clean
_CACHED = {"type": "ephemeral"}
_LONGEST_ID = 64
_LONGEST_NAME = 128
_COUNTS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class AnthropicProvider:
    """Asks Claude. `client` is your own client of the SDK (Bedrock, Vertex, a proxy) and keeps its own settings.

    With `cache` (the default) requests carry marks for the service's prompt cache.
    """

    name = _NAME
    structured_output = True

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        client: Client | None = None,
        *,
        cache: bool = True,
    ) -> None:
        self._cache = cache
        self._api_key = wire.given(api_key)
        self._client = client
        self._base_url = base_url
        self._new_client = partial(_new_client, self._api_key, base_url)
        self._clients = wire.Clients(self._new_client)
        self._checked = client is not None

    def __repr__(self) -> str:
        return wire.shown(self, self._base_url, self._client)

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:  # noqa: ARG002
        """Send the request and yield the reply as stream events."""
        self.check()
        body = _body(request)
        return self._stream(request.model, _marked(body) if self._cache else body)

    async def aclose(self) -> None:
        """Close the connections of the running event loop; a client of your own stays open."""
        await self._clients.aclose()

    def check(self) -> None:
        """Raise if the package or the key is missing, before anything is sent."""
        if self._checked:
            return
        if importlib.util.find_spec("anthropic") is None:
            raise MissingExtra("AnthropicProvider", "anthropic")
        environment = os.environ.get("ANTHROPIC_API_KEY") or os.environ.get("ANTHROPIC_AUTH_TOKEN")
        if not (environment if self._api_key is None else self._api_key):
            self._new_client()  # the SDK knows more ways in, a profile for one; without any, this raises
        self._checked = True

    async def _stream(self, model: Model, body: dict[str, Any]) -> AsyncIterator[StreamEvent]:
        client = self._client or await self._clients.get()
        import anthropic  # noqa: PLC0415

        failures: tuple[type[Exception], ...] = (anthropic.AnthropicError, *wire.transport_errors())
        try:
            async with (
                await client.messages.create(**body, stream=True) as raw,
                aclosing(_read(raw, model, _host(client))) as events,
            ):
                async for event in events:
                    yield event
        except failures as error:
            raise _failure(error, client, model) from error


def _new_client(api_key: str | None, base_url: str | None) -> AsyncAnthropic:
    import anthropic  # noqa: PLC0415

    try:
        client = anthropic.AsyncAnthropic(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(limits=wire.limits()),
        )
    except anthropic.AnthropicError as error:
        raise AuthenticationFailed(f"the SDK found no usable credentials: {error}; {_KEY_HINT}") from error
    client.api_key = wire.sendable(client.api_key, _KEY_HINT)
    client.auth_token = wire.sendable(client.auth_token, _KEY_HINT)
    if not (client.api_key or client.auth_token or client.credentials):
        raise AuthenticationFailed(f"there is no API key for Anthropic; {_KEY_HINT}")
    return client


# --- the request ------------------------------------------------------------------------------------------------------


def _body(request: Request) -> dict[str, Any]:
    model = request.model
    body = {"model": model.id, "messages": _turns(request.messages), **_effort(model)}
    if request.output is not None:
        body["output_config"] = {
            **body.get("output_config", {}),
            "format": {"type": "json_schema", "schema": request.output},
        }
    if request.system_prompt.strip():
        body["system"] = request.system_prompt
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in request.tools
        ]
    thinks = body.get("thinking", {"type": "disabled"})["type"] != "disabled"
    if model.temperature is not None and not thinks and _generation(model.id) < (4, 7):
        body["extra_body"] = {"temperature": model.temperature}  # later models refuse it, so the SDK has no argument
    cleaned: dict[str, Any] = _clean(body)
    return cleaned


def _marked(body: dict[str, Any]) -> dict[str, Any]:
    """The body with cache markers for the service: the tools, the system prompt, and the conversation.

    An agent sends the same beginning again and again; read from the cache it costs a tenth.
    """
    if tools := body.get("tools"):
        tools[-1]["cache_control"] = _CACHED
    if system := body.get("system"):
        body["system"] = [{"type": "text", "text": system, "cache_control": _CACHED}]
    for turn in reversed(body["messages"]):
        if turn["role"] == "user":
            turn["content"][-1]["cache_control"] = _CACHED
            break
    return body


def _effort(model: Model) -> dict[str, Any]:
    """How long to think and to write: one matter, since thinking is paid from `max_tokens`."""
    limit, reasoning = model.max_tokens or _MAX_TOKENS, model.reasoning
    if reasoning is None:
        return {"max_tokens": limit}
    if reasoning == 0:
        return {"max_tokens": limit, "thinking": {"type": "disabled"}}
    if isinstance(reasoning, int):
        limit = model.max_tokens or max(_MAX_TOKENS, reasoning + 8_000)
        return {"max_tokens": limit, "thinking": {"type": "enabled", "budget_tokens": reasoning}}
    if reasoning not in _BUDGETS:
        raise InputError(f"reasoning={reasoning!r} is unknown; use one of {', '.join(_BUDGETS)}, or a number of tokens")
    if _generation(model.id) >= (4, 6):  # these take no budgets, and show what they think only when asked
        thinking = {"type": "adaptive", "display": "summarized"}
        return {"max_tokens": limit, "thinking": thinking, "output_config": {"effort": reasoning}}
    budget = max(1_024, min(_BUDGETS[reasoning], limit * 3 // 4))
    return {"max_tokens": limit, "thinking": {"type": "enabled", "budget_tokens": budget}}


def _generation(model_id: str) -> tuple[int, int]:
    """(4, 5) for claude-haiku-4-5-20251001. A Claude without a number is new; another model behaves like an old one."""
    found = re.search(r"claude-(?:[a-z]+-)?(\d)(?:[-.](\d{1,2})(?!\d))?", model_id)
    if found is None:
        return (99, 0) if "claude" in model_id else (0, 0)
    return int(found[1]), int(found[2] or 0)


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    ids = CallIds(_LONGEST_ID)
    for message in messages:
        role, blocks = _turn(message, ids)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    for turn in turns:
        turn["content"].sort(key=lambda block: block["type"] != "tool_result")  # a stable sort: results first
    return turns


def _turn(message: Message, ids: CallIds) -> tuple[str, list[dict[str, Any]]]:
    match message:
        case UserMessage():
            return "user", _visible(message.content)
        case ToolResultMessage():
            return "user", _result(message, ids)
        case AssistantMessage():
            return "assistant", _spoken(message, ids)
        case _:
            return "note", []


def _visible(content: Sequence[Block]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for block in content:
        if isinstance(block, TextContent) and block.text.strip():
            blocks.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageContent):
            blocks.append(_image(block))
    return blocks


def _image(block: ImageContent) -> dict[str, Any]:
    kind = image_type(block)
    if kind is None:  # refused once, it would be refused with every later request
        return {"type": "text", "text": wire.NO_IMAGE}
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": block.data}}


def _result(message: ToolResultMessage, ids: CallIds) -> list[dict[str, Any]]:
    inside, beside = _visible(message.content), []
    if message.is_error:  # an error may hold nothing but text, so its images go next to it
        beside = [block for block in inside if block["type"] == "image"]
        inside = [block for block in inside if block["type"] == "text"]
    result = {
        "type": "tool_result",
        "tool_use_id": ids.of_result(message.tool_call_id),
        "content": inside or [{"type": "text", "text": "(no output)"}],
    }
    return [{**result, "is_error": True} if message.is_error else result, *beside]


def _spoken(message: AssistantMessage, ids: CallIds) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, TextContent) and block.text.strip():
            blocks.append({"type": "text", "text": block.text})
        elif isinstance(block, ToolCall):
            name = wire.tool_name(block.name, _LONGEST_NAME)
            blocks.append(
                {"type": "tool_use", "id": ids.of_call(block.id), "name": name, "input": block.arguments},
            )
        elif isinstance(block, ThinkingContent) and message.provider in (None, _NAME):
            blocks += _thought(block)
    while blocks and "thinking" in blocks[-1]["type"]:  # a reply that broke off while thinking: refused as a last block
        blocks.pop()
    return blocks


def _thought(block: ThinkingContent) -> list[dict[str, Any]]:
    if block.redacted:
        return [{"type": "redacted_thinking", "data": block.redacted}]
    if block.signature:
        return [{"type": "thinking", "thinking": block.thinking, "signature": block.signature}]
    return []


def _call_id(call_id: str) -> str:
    return wire.call_id(call_id, _LONGEST_ID)


# --- the stream -------------------------------------------------------------------------------------------------------


async def _read(raw: AsyncIterator[Any], model: Model, host: str) -> AsyncGenerator[StreamEvent, None]:
    reading = _Reading(model, host)
    try:
        async for item in raw:
            for event in reading.take(item):
                yield event
            if reading.done:
                await wire.drain(raw)
                return
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # the SDK hands out what it got, unchecked
        raise wire.garbled(host, model.id, error) from error
    raise wire.cut_short(host, model.id)


class _Reading:
    """Translates one stream. Its items are `Any`: the SDK gives them types, but does not check them."""

    def __init__(self, model: Model, host: str) -> None:
        self.done = False
        self._model = model
        self._host = host
        self._open: dict[int, tuple[Any, list[str]]] = {}
        self._usage: dict[str, Any] = {}
        self._stop: ReplyStop = "stop"

    def take(self, item: Any) -> Iterator[StreamEvent]:
        match item.type:
            case "content_block_delta":
                yield from self._delta(item.index, item.delta)
            case "content_block_start":
                yield from self._start(item.index, item.content_block)
            case "content_block_stop":
                yield from self._end(item.index)
            case "message_start":
                self._count(item.message.usage)
                yield StreamStart(item.message.model, self._spent())
            case "message_delta":
                self._count(item.usage)
                self._finish(item.delta)
            case "message_stop":
                self.done = True
                yield StreamDone(self._stop, self._spent())

    def _start(self, index: int, block: Any) -> Iterator[StreamEvent]:
        self._open[_as(int, index)] = (block, [])
        match block.type:
            case "text":
                yield TextStart(index)
                if block.text:
                    yield TextDelta(index, _as(str, block.text))
            case "thinking":
                yield ThinkingStart(index)
                if block.thinking:
                    yield ThinkingDelta(index, _as(str, block.thinking))
            case "redacted_thinking":
                yield ThinkingStart(index)
            case "tool_use":
                yield ToolCallStart(index, _as(str, block.id), _as(str, block.name))

    def _delta(self, index: int, delta: Any) -> Iterator[StreamEvent]:
        block, parts = self._open[index]
        match delta.type:
            case "text_delta":
                yield TextDelta(index, _as(str, delta.text))
            case "thinking_delta":
                yield ThinkingDelta(index, _as(str, delta.thinking))
            case "signature_delta":
                parts.append(delta.signature)
            case "input_json_delta" if block.type == "tool_use" and delta.partial_json:
                parts.append(_as(str, delta.partial_json))
                yield ToolCallDelta(index, delta.partial_json)

    def _end(self, index: int) -> Iterator[StreamEvent]:
        block, parts = self._open.pop(index)
        text = "".join(parts)
        match block.type:
            case "text":
                yield TextEnd(index)
            case "thinking":
                yield ThinkingEnd(index, text or getattr(block, "signature", None) or None)
            case "redacted_thinking":
                yield ThinkingEnd(index, redacted=_as(str, block.data))
            case "tool_use":
                yield ToolCallEnd(index, parse_tool_call(block.id, block.name, text or dumps(block.input or {})))

    def _finish(self, delta: Any) -> None:
        if delta.stop_reason == "refusal":
            why = getattr(delta.stop_details, "explanation", None) or "no reason given"
            raise ContentRefused(f"{self._model.id!r} at {self._host} declined to answer: {why}; ask differently")
        self._stop = _STOPS.get(delta.stop_reason, "stop")

    def _count(self, usage: Any) -> None:
        """Counts are cumulative: what a later event leaves out stands as it was."""
        for name in _COUNTS:
            if (number := getattr(usage, name, None)) is not None:
                self._usage[name] = number

    def _spent(self) -> Usage:
        usage = Usage(*(self._usage.get(name, 0) for name in _COUNTS))
        return replace(usage, cost=self._model.cost(usage))


# --- failures ---------------------------------------------------------------------------------------------------------

_KINDS: dict[object, type[ProviderError]] = {
    **dict.fromkeys(["authentication_error", "permission_error", "billing_error", 401, 402, 403], AuthenticationFailed),
    **dict.fromkeys(["overloaded_error", "timeout_error", "api_error", 408, 409], Overloaded),
    **dict.fromkeys(["rate_limit_error", 429], RateLimited),
    **dict.fromkeys(["request_too_large", 413], ContextTooLong),
    "not_found_error": InvalidRequest,
}
_WORDS: dict[str, type[ProviderError]] = {
    "prompt is too long": ContextTooLong,
    "input is too long": ContextTooLong,  # Bedrock
    "exceed context limit": ContextTooLong,  # older models, when prompt and max_tokens together are too much
    "content filtering policy": ContentRefused,
}


def _failure(error: Exception, client: Client, model: Model) -> ProviderError:
    import anthropic  # noqa: PLC0415
    import httpx2  # noqa: PLC0415

    if isinstance(error, anthropic.APIStatusError):
        return _rejection(error, client, model)
    if isinstance(error, anthropic.CredentialsError):
        return AuthenticationFailed(f"the SDK could not load its credentials: {error}; {_KEY_HINT}")
    if isinstance(error, anthropic.APITimeoutError | httpx2.TimeoutException):
        return wire.too_slow(_host(client), model.id, "AsyncAnthropic")
    cause = error.__cause__ or error
    return wire.unreachable(_host(client), model.id, wire.redacted(f"{type(cause).__name__}: {cause}", client))


def _rejection(error: APIStatusError, client: Client, model: Model) -> ProviderError:
    # An error inside a stream has the status of the stream, which began well.
    status = f"{error.status_code} " if error.status_code >= 400 else ""
    why = wire.redacted(f"{status}{error.type or 'error'}: {_message(error)}", client)
    wait = wire.retry_after(error.response.headers)
    return wire.refusal(_kind(error), _host(client), model.id, why, hint=_KEY_HINT, wait=wait)


def _message(error: APIStatusError) -> str:
    """The service's own words. SDKs before 2.7 have no `api_message`."""
    body: Any = error.body
    inner = body.get("error") if isinstance(body, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    return str(message or error.message)


def _kind(error: APIStatusError) -> type[ProviderError]:
    """Known by type (the only sign inside a stream), else by status; by its words where 400 means many things."""
    kind = _KINDS.get(str(error.type)) or _KINDS.get(error.status_code)
    if kind is not None:
        return kind
    if error.type != "invalid_request_error" and not 400 <= error.status_code < 500:
        return Overloaded
    words = _message(error).lower()
    return next((kind for phrase, kind in _WORDS.items() if phrase in words), InvalidRequest)


def _host(client: Client) -> str:
    return client.base_url.netloc.decode()  # without what a URL may hold before its "@"
