"""A local HTTP server that speaks a model service's wire protocol, so that providers are tested over real sockets.

The server knows no dialect. It plays `Reply` values, one for each request: a status, headers, the frames of a body and
the way in which it ends. A dialect is a class that makes replies; another service is another such class.

It is as strict as the scripted provider: a request that nobody scripted and a reply that nobody fetched are errors.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

from byssus.messages import ThinkingContent, ToolCall


@dataclass(frozen=True)
class Reply:
    """One answer. `end` says what comes after the frames: a proper end, a cut connection, or nothing at all."""

    frames: Sequence[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    end: str = "close"

    def cut(self, after: int) -> Reply:
        """The same answer, whose connection breaks after some frames."""
        return replace(self, frames=self.frames[:after], end="cut")

    def stall(self, after: int) -> Reply:
        """The same answer, which falls silent after some frames and waits for the client to hang up."""
        return replace(self, frames=self.frames[:after], end="stall")

    def then(self, *frames: bytes, after: int) -> Reply:
        """The same answer, with these frames instead of what follows the first ones."""
        return replace(self, frames=[*self.frames[:after], *frames])


@dataclass(frozen=True)
class Received:
    """A request as it came over the wire."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Step: TypeAlias = Reply | Callable[[dict[str, Any]], Reply]


class Server:
    """Serves the steps in order on a free port of 127.0.0.1, until its `with` ends."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.requests: list[Received] = []
        self.hung_up = threading.Event()  # a client left in the middle of a reply
        self.left = threading.Event()  # a client closed its connection, after a reply or in the middle of it
        self._steps = list(steps)
        self._lock = threading.Lock()
        self._complaints: list[str] = []
        self._tcp = _Listener(self)
        self._thread = threading.Thread(target=self._tcp.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._tcp.server_address[1]}"

    @property
    def body(self) -> dict[str, Any]:
        """The body of the only request."""
        (request,) = self.requests
        return request.body

    @property
    def connections(self) -> int:
        """How many connections clients have made."""
        return self._tcp.accepted

    def script(self, *steps: Step) -> None:
        """Add steps."""
        self._steps += steps

    def answer(self, request: Received) -> Reply:
        with self._lock:
            position = len(self.requests)
            self.requests.append(request)
            if position < len(self._steps):
                step = self._steps[position]
                return step(request.body) if callable(step) else step
            self._complaints.append(f"request {position + 1} was not scripted: {str(request.body)[:200]}")
        return Reply([b'{"error": "not scripted"}'], 500, {"content-type": "application/json"})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tcp.shutdown()
        self._thread.join()
        self._tcp.hang_up()
        self._tcp.server_close()
        if error is None:
            assert not self._complaints, self._complaints
            assert len(self.requests) == len(self._steps), f"{len(self.requests)} of {len(self._steps)} replies used"


class Anthropic:
    """Anthropic's Messages API: makes replies as the service would."""

    @classmethod
    def answer(
        cls,
        *content: str | ThinkingContent | ToolCall,
        stop_reason: str | None = None,
        model: str = "claude-test",
        usage: dict[str, int] | None = None,
        final_usage: dict[str, int] | None = None,
        stop_details: dict[str, Any] | None = None,
    ) -> Reply:
        """A whole reply: strings are text, streamed word by word."""
        called = any(isinstance(block, ToolCall) for block in content)
        message: dict[str, Any] = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage or {"input_tokens": 10, "output_tokens": 1},
        }
        delta = {
            "stop_reason": stop_reason or ("tool_use" if called else "end_turn"),
            "stop_sequence": None,
            "stop_details": stop_details,
        }
        frames = [cls.event("message_start", message=message), cls.event("ping")]
        for index, block in enumerate(content):
            frames += cls.block(index, block)
        frames.append(cls.event("message_delta", delta=delta, usage=final_usage or {"output_tokens": 5}))
        frames.append(cls.event("message_stop"))
        return Reply(frames)

    @classmethod
    def block(cls, index: int, block: str | ThinkingContent | ToolCall) -> list[bytes]:
        match block:
            case str():
                start: dict[str, Any] = {"type": "text", "text": ""}
                deltas = [{"type": "text_delta", "text": piece} for piece in _pieces(block)]
            case ThinkingContent() if block.redacted is not None:
                start, deltas = {"type": "redacted_thinking", "data": block.redacted}, []
            case ThinkingContent():
                start = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(block.thinking)]
                deltas.append({"type": "signature_delta", "signature": block.signature or ""})
            case ToolCall():
                text = json.dumps(block.arguments) if block.malformed is None else block.malformed
                start = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
                pieces = ["", *(text[at : at + 5] for at in range(0, len(text), 5))]
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        return [
            cls.event("content_block_start", index=index, content_block=start),
            *(cls.event("content_block_delta", index=index, delta=delta) for delta in deltas),
            cls.event("content_block_stop", index=index),
        ]

    @classmethod
    def event(cls, kind: str, **data: Any) -> bytes:
        return _frame(kind, json.dumps({"type": kind, **data}))

    @classmethod
    def error_event(cls, kind: str, message: str) -> bytes:
        return cls.event("error", error={"type": kind, "message": message})

    @classmethod
    def error(cls, status: int, kind: str, message: str, **headers: str) -> Reply:
        """A refusal with a status. Header names are written with underscores."""
        body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Reply([json.dumps(body).encode()], status, {"content-type": "application/json", **named})


class OpenAI:
    """OpenAI's chat completions: makes replies as the service would, and as others who speak its protocol do."""

    DONE = b"data: [DONE]\n\n"
    USAGE: ClassVar = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}

    @classmethod
    def answer(
        cls,
        *content: str | ThinkingContent | ToolCall,
        finish_reason: str | None = None,
        model: str = "gpt-test",
        usage: dict[str, Any] | None = None,
    ) -> Reply:
        """A whole reply: strings are text, streamed word by word; thinking is told as `reasoning_content`."""
        called = [block for block in content if isinstance(block, ToolCall)]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if not called else None, "refusal": None}]
        for block in content:
            match block:
                case str():
                    deltas += ({"content": piece} for piece in _pieces(block))
                case ThinkingContent():
                    deltas += ({"reasoning_content": piece, "content": None} for piece in _pieces(block.thinking))
                case ToolCall():
                    deltas += cls.call(block, called.index(block))
        frames = [cls.chunk(delta, model=model) for delta in deltas]
        frames.append(cls.chunk({}, finish_reason or ("tool_calls" if called else "stop"), model=model))
        return Reply([*frames, cls.event(choices=[], model=model, usage=usage or cls.USAGE), cls.DONE])

    @classmethod
    def call(cls, call: ToolCall, index: int) -> list[dict[str, Any]]:
        """The deltas of a tool call: its id and name first, then its arguments piece by piece."""
        text = json.dumps(call.arguments) if call.malformed is None else call.malformed
        first = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
        return [{"tool_calls": [piece]} for piece in (first, *rest)]

    @classmethod
    def raw(cls, *deltas: dict[str, Any], finish_reason: str | None = "stop", end: bytes = DONE) -> Reply:
        """A reply of these deltas, as a server that keeps to nothing else might send it."""
        frames = [cls.chunk(delta) for delta in deltas]
        return Reply([*frames, *([cls.chunk({}, finish_reason)] if finish_reason else []), *([end] if end else [])])

    @classmethod
    def chunk(cls, delta: Any, finish_reason: str | None = None, **more: Any) -> bytes:
        return cls.event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more)

    @classmethod
    def event(cls, **data: Any) -> bytes:
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "usage": None, **data}
        return f"data: {json.dumps(chunk)}\n\n".encode()

    @classmethod
    def error(cls, status: int, code: str | int | None, message: str, kind: str | None = None, **headers: str) -> Reply:
        """A refusal with a status. Header names are written with underscores."""
        body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Reply([json.dumps(body).encode()], status, {"content-type": "application/json", **named})


def _frame(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode()


def _pieces(text: str) -> list[str]:
    words = text.split(" ")
    return [*(f"{word} " for word in words[:-1]), words[-1]]


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 128
    daemon_threads = False  # so that closing joins the handlers: nothing outlives its test

    def __init__(self, owner: Server) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner
        self.accepted = 0
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.accepted += 1
        self._connections.add(request)
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        """End the connections that clients keep open."""
        for connection in self._connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.server.owner.answer(Received(self.path, headers, json.loads(body)))
        try:
            self._play(reply)
        except OSError:
            self.server.owner.hung_up.set()
            self.close_connection = True

    def finish(self) -> None:
        super().finish()
        self.server.owner.left.set()

    def _play(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in {**reply.headers, "transfer-encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        for frame in reply.frames:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
        if reply.end == "close":
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True
        if reply.end == "stall" and not self.rfile.read(1):
            self.server.owner.hung_up.set()

    def log_message(self, format: str, *args: Any) -> None:
        pass
