"""OpenAI, and every server that speaks its chat completions: Azure, DeepSeek, Qwen, Ollama, vLLM and others.

- The SDK is imported at the first use, on a thread. A missing package or key raises in `stream()`; a server on another
  `base_url` may need no key.
- Outward strict: what goes out is valid whatever the history holds. Results follow their calls, ids are short, images
  of results go into a user message (a tool may answer with text only), and nothing is sent that the service refuses.
- Inward lenient: servers leave out ids, indexes, usage or the end of a stream, and the SDK hides the difference between
  `[DONE]` and a stream that just stops. So frames are read here, from the SDK's response.
- OpenAI's own rules hold for its hosts and Azure's: `max_completion_tokens`, `developer`. Other servers get what all of
  them know: `max_tokens`, `system`. Recent models refuse reasoning next to tools on this interface, so it is left out.
- Thinking goes back only to the server that it came from, in the same field: DeepSeek and models behind vLLM need it.
- Every failure is a typed `ProviderError` that never shows the key. The run retries, so the SDK does not.
- Connections are kept for the next call, within one event loop. Closing or cancelling a stream closes its connection.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import asdict, replace

from byssus.errors import (
    AuthenticationFailed,
    ContentRefused,
    ContextTooLong,
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
    ToolResultMessage,
    Usage,
    UserMessage,
    dumps,
    image_type,
    plausible_tokens,
)
from byssus.providers import wire
from byssus.providers.base import Model, Request
from byssus.providers.openai_models import O_SERIES, Service, effort, generation
from byssus.providers.reply import parse_tool_call
from byssus.signals import Signal
from byssus.values import clock

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_KEY_HINT = "set OPENAI_API_KEY or pass OpenAIProvider(api_key=...)"
_LONGEST_ID = 40
_LONGEST_NAME = 64
_THOUGHTS = ("reasoning_content", "reasoning")  # the fields in which servers send thinking; OpenAI sends none


class OpenAIProvider:
    """Asks OpenAI or a compatible server. `client` is your own client of the SDK (Azure, a proxy) as it is."""

    name = "openai"
    structured_output = True

    def __init__(
        self, api_key: str | None = None, base_url: str | None = None, client: AsyncOpenAI | None = None
    ) -> None:
        self._api_key = wire.given(api_key)
        self._base_url = base_url
        self._client = client
        self._clients = wire.Clients(partial(_new_client, self._api_key, base_url))

    def __repr__(self) -> str:
        return wire.shown(self, self._base_url, self._client)

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:  # noqa: ARG002
        """Send the request and yield the reply as stream events."""
        service = self._service()
        replies = (message for message in request.messages if isinstance(message, AssistantMessage))
        used = {call.id for reply in replies for call in reply.tool_calls}
        return self._stream(request.model, service, _body(request, service), used)

    def check(self) -> None:
        """Raise if the package or the key is missing, before anything is sent."""
        self._service()

    def _service(self) -> Service:
        if self._client is not None:
            return _service_of(self._client)
        if importlib.util.find_spec("openai") is None:
            raise MissingExtra("OpenAIProvider", "openai")
        service = _service_at(_address(self._base_url))
        _key(self._api_key, service)
        return service

    async def aclose(self) -> None:
        """Close the connections of the running event loop; a client of your own stays open."""
        await self._clients.aclose()

    async def _stream(
        self, model: Model, service: Service, body: dict[str, Any], used: set[str]
    ) -> AsyncIterator[StreamEvent]:
        client = self._client or await self._clients.get()
        import openai  # noqa: PLC0415

        failures: tuple[type[Exception], ...] = (openai.OpenAIError, *wire.transport_errors())
        ask = client.chat.completions.with_streaming_response.create
        try:
            # What the SDK's signature does not know, and what it may change, goes past it.
            async with ask(
                model=body.pop("model"), messages=body.pop("messages"), stream=True, extra_body=body
            ) as response:
                reading = _Reading(model, service, client, used)
                async with aclosing(_read(response.iter_bytes(), reading)) as events:
                    async for event in events:
                        yield event
        except failures as error:
            raise _failure(error, client, model) from error


def _new_client(api_key: str | None, base_url: str | None) -> AsyncOpenAI:
    import openai  # noqa: PLC0415

    address = _address(base_url)
    return openai.AsyncOpenAI(
        api_key=_key(api_key, _service_at(address)),
        base_url=address,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(limits=wire.limits()),
    )


def _address(base_url: str | None) -> str:
    return base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"


def _key(api_key: str | None, service: Service) -> str:
    key = wire.sendable(os.environ.get("OPENAI_API_KEY") if api_key is None else api_key, _KEY_HINT)
    if key is None and service.own:
        raise AuthenticationFailed(f"there is no API key for OpenAI; {_KEY_HINT}")
    return key or "no-key"  # the SDK wants one, also for a server that does not


def _service_of(client: AsyncOpenAI) -> Service:
    import openai  # noqa: PLC0415

    host, own = _service_at(str(client.base_url))
    return Service(host, own or isinstance(client, openai.AsyncAzureOpenAI))


def _service_at(address: str) -> Service:
    host = urlsplit(address).hostname or ""
    ours = ("api.openai.com", "openai.azure.com", "cognitiveservices.azure.com")
    return Service(host, own=f".{host}".endswith(tuple(f".{name}" for name in ours)))


# --- the request ------------------------------------------------------------------------------------------------------


def _body(request: Request, service: Service) -> dict[str, Any]:
    model, reasons = request.model, generation(request.model.id) >= O_SERIES
    body = {
        "model": model.id,
        "messages": _turns(request.messages, service, model),
        "stream_options": {"include_usage": True},
        **effort(model, service, with_tools=bool(request.tools)),
    }
    if request.system_prompt.strip():
        role = "developer" if reasons and service.own else "system"
        body["messages"].insert(0, {"role": role, "content": request.system_prompt})
    if request.tools:
        body["tools"] = [{"type": "function", "function": asdict(tool)} for tool in request.tools]
    if request.output is not None:
        # Not strict: that mode knows only a part of JSON schema, and the reply is checked in any case.
        schema = {"name": "reply", "schema": request.output, "strict": False}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if model.max_tokens is not None:
        body["max_completion_tokens" if service.own or reasons else "max_tokens"] = model.max_tokens
    if model.temperature is not None and not reasons:  # models that reason take no other than their own
        body["temperature"] = model.temperature
    cleaned: dict[str, Any] = wire.clean(body)
    return cleaned


def _turns(messages: Sequence[Message], service: Service, model: Model) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    ids = wire.CallIds(_LONGEST_ID)
    for message in messages:
        match message:
            case UserMessage():
                _say(turns, _visible(message.content))
            case AssistantMessage():
                _reply(turns, _spoken(message, ids, service, model))
            case ToolResultMessage():
                _answer(turns, message, ids)
    return [_plain(turn) if turn["role"] == "user" else turn for turn in turns]


def _say(turns: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    """User messages. Adjacent ones are joined: not every model's template takes two in a row."""
    if turns and turns[-1]["role"] == "user":
        turns[-1]["content"] += parts
    elif parts:
        turns.append({"role": "user", "content": parts})


def _reply(turns: list[dict[str, Any]], reply: dict[str, Any]) -> None:
    last = turns[-1] if turns else {}
    if not reply["content"] and "tool_calls" not in reply:
        return
    if last.get("role") == "assistant" and "tool_calls" not in last:
        last.update(reply, content="\n\n".join(filter(None, [last["content"], reply["content"]])))
    else:
        turns.append(reply)


def _answer(turns: list[dict[str, Any]], message: ToolResultMessage, ids: wire.CallIds) -> None:
    """A result follows its call or another result; user messages and images in between come after it."""
    parts = _visible(message.content)
    images = [part for part in parts if part["type"] == "image_url"]
    text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
    text = text or ("(the images follow)" if images else "(no output)")
    result = {
        "role": "tool",
        "tool_call_id": ids.of_result(message.tool_call_id),
        "content": f"Error: {text}" if message.is_error else text,
    }
    has_text = len(turns) > 1 and turns[-1]["role"] == "user" and turns[-2]["role"] != "user"
    turns.insert(len(turns) - has_text, result)
    if images:
        _say(turns, [{"type": "text", "text": f"The images that {message.tool_name or 'the tool'} returned:"}, *images])


def _visible(content: Sequence[Block]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for block in content:
        if isinstance(block, TextContent) and block.text.strip():
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageContent):
            parts.append(_image(block))
    return parts


def _image(block: ImageContent) -> dict[str, Any]:
    kind = image_type(block)
    if kind is None:  # refused once, it would be refused with every later request
        return {"type": "text", "text": wire.NO_IMAGE}
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{block.data}"}}


def _plain(turn: dict[str, Any]) -> dict[str, Any]:
    """Text alone is sent as a string: some servers know nothing else."""
    parts = turn["content"]
    if any(part["type"] != "text" for part in parts):
        return turn
    return {**turn, "content": "\n\n".join(part["text"] for part in parts)}


def _spoken(message: AssistantMessage, ids: wire.CallIds, service: Service, model: Model) -> dict[str, Any]:
    texts = [block.text for block in message.content if isinstance(block, TextContent) and block.text.strip()]
    calls = [
        {
            "id": ids.of_call(call.id),
            "type": "function",
            "function": {
                "name": wire.tool_name(call.name, _LONGEST_NAME),
                "arguments": json.dumps(wire.clean(call.arguments), ensure_ascii=False, separators=(",", ":")),
            },
        }
        for call in message.tool_calls
    ]
    reply: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts) or None, **_thoughts(message, service)}
    if calls:
        reply["tool_calls"] = calls
    if not service.own and "deepseek" in f"{service.host}/{model.id}".lower():
        reply.setdefault("reasoning_content", "")  # it refuses a history in which a reply lacks the field
    return reply


def _signature(field: str, service: Service) -> str | None:
    return None if service.own else f"{field}@{service.host}"


def _thoughts(message: AssistantMessage, service: Service) -> dict[str, str]:
    """The thinking, if it came from this server. Another server may reject the field or its signature."""
    thoughts: dict[str, str] = {}
    for field in _THOUGHTS:
        signature = _signature(field, service)
        texts = [b.thinking for b in message.content if isinstance(b, ThinkingContent) and b.signature == signature]
        if signature and texts:
            thoughts[field] = "\n".join(texts)
    return thoughts


# --- the stream -------------------------------------------------------------------------------------------------------


async def _read(pieces: AsyncIterator[bytes], reading: _Reading) -> AsyncGenerator[StreamEvent, None]:
    try:
        async with aclosing(wire.frames(pieces)) as frames:
            async for data in frames:
                if data == b"[DONE]":
                    reading.ended = True
                    break
                for event in reading.take(json.loads(data)):
                    yield event
        for event in reading.finish():
            yield event
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise wire.garbled(reading.host, reading.model.id, error) from error
    await wire.drain(pieces)


class _Call(Struct):
    """A tool call that is arriving. No event is published before its name is known."""

    index: int
    id: str
    theirs: str  # the id that the service gave it
    name: str | None = None
    parts: list[str] = []

    @property
    def is_whole(self) -> bool:
        return bool(self.parts) and parse_tool_call("", "", "".join(self.parts)).malformed is None


class _Reading:
    """Translates one stream, chunk by chunk. Nothing in a chunk can be relied on."""

    def __init__(self, model: Model, service: Service, client: AsyncOpenAI, used: set[str]) -> None:
        self.model = model
        self.host = client.base_url.netloc.decode()
        self.ended = False  # the service sent [DONE]
        self._service = service
        self._client = client
        self._started = False
        self._stop: str | None = None
        self._refusal: list[str] = []
        self._usage = Usage()
        self._blocks = 0
        self._open: tuple[str, int] | None = None  # the text or the thoughts that are arriving, and their index
        self._calls: list[_Call] = []
        self._used = used  # ids of calls, also of earlier replies: an answer to one of them must not reach another
        self._by_index: dict[int, _Call] = {}

    def take(self, chunk: Any) -> Iterator[StreamEvent]:
        wire.checked(dict, chunk)
        if error := chunk.get("error"):
            raise _refusal(error, self._client, self.model)
        if not self._started:
            self._started = True
            yield StreamStart(wire.checked(str, chunk.get("model") or "") or None)
        self._count(chunk.get("usage"))
        for choice in chunk.get("choices") or ():
            self._count(choice.get("usage"))
            yield from self._delta(choice.get("delta") or {})
            self._finish(choice.get("finish_reason"))

    def finish(self) -> Iterator[StreamEvent]:
        if not (self._started and (self.ended or self._stop)):
            raise wire.cut_short(self.host, self.model.id)
        yield from self._close()
        if self._refusal:
            raise self._declined("".join(self._refusal))
        for call in self._calls:
            if call.name is None:
                yield from self._begin(call, "")
            yield ToolCallEnd(call.index, parse_tool_call(call.id, call.name or "", "".join(call.parts)))
        stop: ReplyStop = "tool_use" if self._calls else "stop"
        usage = replace(self._usage, cost=self.model.cost(self._usage))
        yield StreamDone("length" if self._stop == "length" else stop, usage)

    def _delta(self, delta: dict[str, Any]) -> Iterator[StreamEvent]:
        field = next((field for field in _THOUGHTS if delta.get(field)), None)
        if field is not None:  # a server that fills both says the same in both
            yield from self._switch(field, ThinkingStart)
            yield ThinkingDelta(self._blocks - 1, wire.checked(str, delta[field]))
        if text := delta.get("content"):
            yield from self._switch("content", TextStart)
            yield TextDelta(self._blocks - 1, wire.checked(str, text))
        if refusal := delta.get("refusal"):
            self._refusal.append(wire.checked(str, refusal))
        for piece in delta.get("tool_calls") or ():
            yield from self._close()
            yield from self._piece(piece, piece.get("function") or {})

    def _switch(self, field: str, start: type[TextStart | ThinkingStart]) -> Iterator[StreamEvent]:
        """Continue the open block of text or thinking, or begin a new one."""
        if self._open is None or self._open[0] != field:
            yield from self._close()
            self._open = (field, self._next_index())
            yield start(self._open[1])

    def _close(self) -> Iterator[StreamEvent]:
        if self._open is not None:
            field, index = self._open
            self._open = None
            yield TextEnd(index) if field == "content" else ThinkingEnd(index, _signature(field, self._service))

    def _piece(self, piece: dict[str, Any], function: dict[str, Any]) -> Iterator[StreamEvent]:
        name, arguments = function.get("name"), function.get("arguments") or ""
        if not isinstance(arguments, str):
            arguments = dumps(arguments)
        call = self._call(piece, name, arguments)
        if name and call.name is None:
            yield from self._begin(call, wire.checked(str, name))
        if arguments:
            call.parts.append(arguments)
            if call.name is not None:
                yield ToolCallDelta(call.index, arguments)

    def _begin(self, call: _Call, name: str) -> Iterator[StreamEvent]:
        call.name = name
        yield ToolCallStart(call.index, call.id, name)
        for part in call.parts:
            yield ToolCallDelta(call.index, part)

    def _call(self, piece: dict[str, Any], name: str | None, arguments: str) -> _Call:
        """The call that a piece belongs to: by its index, without one by its id, without that the last one.

        But some servers give all calls the same index or id. So a piece with a name begins another call if its id or
        name is another, or if the one before was whole already.
        """
        index, call_id = piece.get("index"), wire.checked(str, piece.get("id") or "")
        if index is not None:
            call = self._by_index.get(wire.checked(int, index))
        elif call_id:
            call = next((call for call in self._calls if call.theirs == call_id), None)
        else:
            call = self._calls[-1] if self._calls and not name else None
        if call is not None and call.name is not None and name:
            another = bool(call_id and call_id != call.theirs) or name != call.name
            call = None if another or (arguments and call.is_whole) else call
        if call is None:
            fresh = call_id and call_id not in self._used
            self._used.add(call_id)
            call = _Call(self._next_index(), call_id if fresh else f"call_{clock.new_id()}", call_id)
            self._calls.append(call)
            if index is not None:
                self._by_index[index] = call
        return call

    def _next_index(self) -> int:
        self._blocks += 1
        return self._blocks - 1

    def _finish(self, reason: Any) -> None:
        if reason is None or reason == "":
            return
        self._stop = wire.checked(str, reason)
        if reason == "content_filter":
            raise self._declined("its content filter stopped the reply")
        if reason in ("error", "insufficient_system_resource"):  # OpenRouter, DeepSeek
            raise wire.refusal(Overloaded, self.host, self.model.id, f"the reply ended with {reason}", hint=_KEY_HINT)

    def _declined(self, why: str) -> ProviderError:
        text = wire.redacted(why, self._client)
        return wire.refusal(ContentRefused, self.host, self.model.id, text, hint=_KEY_HINT)

    def _count(self, usage: Any) -> None:
        """Some servers count in each chunk, most in the last one: the latest count stands."""
        if not usage:
            return
        details = usage.get("prompt_tokens_details") or {}
        read = details.get("cached_tokens") or usage.get("prompt_cache_hit_tokens") or 0
        written = details.get("cache_write_tokens") or 0
        fresh = usage.get("prompt_tokens") or 0
        if (whole := plausible_tokens(fresh)) == fresh:  # else it is passed on, and logged where it is counted
            fresh = max(0, whole - plausible_tokens(read) - plausible_tokens(written))
        self._usage = Usage(fresh, usage.get("completion_tokens") or 0, read, written)


# --- failures ---------------------------------------------------------------------------------------------------------

_CODES: dict[str, type[ProviderError]] = {
    **dict.fromkeys(["invalid_api_key", "insufficient_quota", "billing_hard_limit_reached"], AuthenticationFailed),
    **dict.fromkeys(["context_length_exceeded", "exceed_context_size_error"], ContextTooLong),
    **dict.fromkeys(["content_filter", "content_policy_violation", "data_inspection_failed"], ContentRefused),
}
_WORDS: dict[str, type[ProviderError]] = {
    "context length": ContextTooLong,  # vLLM, DeepSeek, LM Studio
    "context size": ContextTooLong,  # llama.cpp
    "context window": ContextTooLong,
    "range of input length": ContextTooLong,  # Qwen
    "request too large": ContextTooLong,  # more than a minute's allowance in one request
    "content management policy": ContentRefused,  # Azure
    "inappropriate content": ContentRefused,  # Qwen
    "content exists risk": ContentRefused,  # DeepSeek
}
_KINDS: dict[object, type[ProviderError]] = {
    **dict.fromkeys(["authentication_error", "permission_error", 401, 402, 403], AuthenticationFailed),
    **dict.fromkeys(["rate_limit_exceeded", "rate_limit_error", 429], RateLimited),
    **dict.fromkeys(["server_error", "overloaded_error", 408, 409], Overloaded),
    **dict.fromkeys(["invalid_request_error", "model_not_found"], InvalidRequest),
    413: ContextTooLong,
}


def _failure(error: Exception, client: AsyncOpenAI, model: Model) -> ProviderError:
    import httpx2  # noqa: PLC0415
    import openai  # noqa: PLC0415

    host = client.base_url.netloc.decode()  # without what a URL may hold before its "@"
    if isinstance(error, openai.APIStatusError):
        wait = wire.retry_after(error.response.headers)
        return _refusal(error.body or error.message, client, model, error.status_code, wait)
    if isinstance(error, openai.APITimeoutError | httpx2.TimeoutException):
        return wire.too_slow(host, model.id, "AsyncOpenAI")
    cause = error.__cause__ or error
    return wire.unreachable(host, model.id, wire.redacted(f"{type(cause).__name__}: {cause}", client))


def _refusal(
    body: Any, client: AsyncOpenAI, model: Model, status: int | None = None, wait: float | None = None
) -> ProviderError:
    """An error of the service, with a status or in the middle of a stream, as a `ProviderError`."""
    fields: dict[str, Any] = body if isinstance(body, dict) else {"message": body}
    code, kind = str(fields.get("code") or ""), str(fields.get("type") or "")
    message = str(fields.get("message") or fields.get("detail") or body)
    if status is None and code.isdigit():
        status = int(code)
    if status == 404:
        message += " (is there such a model, and does base_url end in /v1?)"
    names = [str(status or ""), code if code != str(status) else "", kind if kind != code else ""]
    why = wire.redacted(f"{' '.join(filter(None, names)) or 'error'}: {message}", client)
    error, host = _kind(code, kind, message, status), client.base_url.netloc.decode()
    return wire.refusal(error, host, model.id, why, hint=_KEY_HINT, wait=wait)


def _kind(code: str, kind: str, message: str, status: int | None) -> type[ProviderError]:
    """Known by its code, else by its words (servers have few codes), else by its type and its status."""
    spoken = (known for phrase, known in _WORDS.items() if phrase in message.lower())
    known = _CODES.get(code) or _CODES.get(kind) or next(spoken, None)
    known = known or _KINDS.get(status) or _KINDS.get(code) or _KINDS.get(kind)
    return known or (InvalidRequest if status is not None and 400 <= status < 500 else Overloaded)
