"""MCP servers as tools.

    async with mcp_tools(command=["python", "server.py"]) as tools:
        agent = Agent(..., tools=[*tools, my_own_tool])

- Each server has one session, and each command one process, while the context is open. The session lives in its own
  task, because its resources must be closed by the task that opened them; tools call it from their tasks.
- A call that is cancelled, aborted or timed out is also cancelled on the server, without waiting for it.
- If a server fails, the model gets an error result. A server that cannot be opened raises `McpServerFailed`.
- The list of tools is read once, when the server is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from byssus.errors import InputError, McpServerFailed, MissingExtra
from byssus.messages import Block, ImageContent, TextContent, ToolCall
from byssus.providers.base import ToolSpec
from byssus.providers.wire import clean
from byssus.signals import Signal, until_done
from byssus.tools import Tool, ToolContext, ToolResult, arguments_in
from byssus.tools.details import error_text
from byssus.tools.mcp_process import ErrorOutput

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as Offer

_MOST_PAGES = 1_000  # of a list of tools: a list that never ends is an error
_LARGEST_EVENT = 256 * 1024 * 1024  # bytes; the SDK's limit of one megabyte is too small for a photo
_PARTING = 10.0  # seconds for a session to end cleanly
_SIGN_OF_LIFE = 5.0  # seconds to find out whether a server is alive
_CLOSED = -32000  # the SDK's code for a lost connection
_LONGEST_NAME = 64


@contextlib.asynccontextmanager
async def mcp_tools(
    *,
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    client: Client | None = None,
    prefix: str = "",
    only: Iterable[str] | None = None,
    timeout: float | None = 300.0,  # noqa: ASYNC109 - of the calls, not of this one
    start_timeout: float = 60.0,
    sequential: bool = False,
) -> AsyncIterator[list[Tool[..., Any]]]:
    """Open the tools of one MCP server: of a `command` that speaks over standard input and output, or of a `url`.

    A command gets PATH, HOME and similar variables, and those in `env`; its error output goes to the logger
    `byssus.mcp`. For other options of the SDK, pass your own `mcp.Client`, not yet opened, as `client`.

    `prefix` is added before each tool's name, to keep the tools of two servers apart; `only` selects tools by the
    server's names. `timeout` (seconds, or None) applies to each call, `start_timeout` to the start of the server. With
    `sequential`, a call never runs in parallel with another one.
    """
    errors = ErrorOutput()
    make, label = _source(command, env, cwd, url, headers, client, errors)
    await asyncio.to_thread(_load_sdk)  # slow
    server = _Server(make, label, errors)
    await server.open(start_timeout)
    try:
        offers = _named(server, prefix, only)
        yield [_McpTool(server, offer, name, timeout, sequential=sequential) for name, offer in offers.items()]
    finally:
        await server.close()


# --- where a server is ------------------------------------------------------------------------------------------------


def _source(
    command: Sequence[str] | None,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    url: str | None,
    headers: Mapping[str, str] | None,
    client: Client | None,
    errors: ErrorOutput,
) -> tuple[Callable[[], Client], str]:
    """Return a function that creates the client, and a label for the server."""
    if [command, url, client].count(None) != 2:
        raise InputError("mcp_tools() takes exactly one of command=[...], url='http://...' and client=Client(...)")
    if client is not None:
        return (lambda: client), "of your client"
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"mcp_tools() takes a url that begins with http:// or https://, got {url!r}")
        place = parts.netloc.rpartition("@")[2] + parts.path  # without user and query, which may hold a key
        return functools.partial(_http_client, url, dict(headers or {})), f"at {place}"
    if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
        raise InputError(f"mcp_tools() takes a command as a list, like ['python', 'server.py']; got {command!r}")
    folder = None if cwd is None else Path(cwd)
    return functools.partial(_stdio_client, list(command), dict(env or {}), folder, errors), f"`{shlex.join(command)}`"


def _load_sdk() -> None:
    try:
        import mcp  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingExtra("mcp_tools()", "mcp") from error


def _stdio_client(command: list[str], env: dict[str, str], cwd: Path | None, errors: ErrorOutput) -> Client:
    from mcp import Client, StdioServerParameters, stdio_client  # noqa: PLC0415

    parameters = StdioServerParameters(command=command[0], args=command[1:], env=env, cwd=cwd)
    return Client(stdio_client(parameters, errlog=errors.open()))


def _http_client(url: str, headers: dict[str, str]) -> Client:
    from mcp import Client  # noqa: PLC0415

    return Client(_http_transport(url, headers))


def _http_transport(url: str, headers: dict[str, str]) -> Transport:
    import httpx2  # noqa: PLC0415
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

    @contextlib.asynccontextmanager
    async def connect() -> AsyncGenerator[Any, None]:
        # Each call has its own timeout.
        patience = httpx2.Timeout(30, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=patience) as http,
            streamable_http_client(url, http_client=http, max_sse_event_size=_LARGEST_EVENT) as streams,
        ):
            yield streams

    return connect()


# --- a session --------------------------------------------------------------------------------------------------------


class _Server:
    """One session with one server, and its running calls."""

    def __init__(self, make: Callable[[], Client], label: str, errors: ErrorOutput) -> None:
        import anyio  # noqa: PLC0415

        self.label = label
        self.offers: list[Offer] = []
        self.errors = errors
        self._make = make
        self._client: Client | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._gone: str | None = None
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        # Not Task.cancel(): the SDK shields the end of its process against a scope, but not against that.
        self._scope = anyio.CancelScope()
        self._session: asyncio.Task[None] | None = None

    async def open(self, seconds: float) -> None:
        """Start the session, or raise the reason why it cannot start."""
        self._session = asyncio.create_task(self._hold(), name="byssus-mcp")
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ready, self._session}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._scope.cancel()
            await self.close()
            raise
        finally:
            ready.cancel()
        if not self._ready.is_set():
            reason = (
                self._reason_of_end() or f"did not answer within {seconds:g} s; start_timeout=... lets it take longer"
            )
            self._scope.cancel()
            await self.close()
            raise McpServerFailed(f"the MCP server {self.label} {reason}{await self.errors.last_words()}")

    async def _hold(self) -> None:
        """The task of the session. It closes everything that it opens."""
        with self._scope:
            try:
                async with self._make() as client:
                    self.errors.started()
                    self.offers = await _offers(client)
                    if client.server_info is not None and client.server_info.name:
                        self.label = repr(client.server_info.name)
                    self._client = client
                    self._ready.set()
                    await self._closing.wait()
            finally:
                self.errors.started()

    async def close(self) -> None:
        """End the session cleanly, or by force after a while. Returns when nothing of it is left."""
        assert self._session is not None
        self._closing.set()
        self._gone = self._gone or "it was closed"
        for call in self._calls:
            call.cancel()
        patience = self._loop.call_later(_PARTING, self._scope.cancel)
        cancelled = await until_done(self._session, on_cancel=self._scope.cancel)
        patience.cancel()
        self._reason_of_end()
        if cancelled is not None:
            raise cancelled

    async def call(self, name: str, arguments: dict[str, Any], context: ToolContext) -> CallToolResult:
        """Call a tool from any task of the event loop. If the caller is cancelled, it does not wait; the server is
        notified.
        """
        assert self._session is not None
        self._check()
        task = asyncio.create_task(self._ask(name, arguments, context))
        self._calls.add(task)
        task.add_done_callback(self._settled)
        try:
            await asyncio.wait({task, self._session}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if not task.done() or task.cancelled():
            raise self._lost("ended")
        if (error := task.exception()) is None:
            return task.result()
        if getattr(error, "code", None) != _CLOSED:
            raise error
        await self._look()
        raise self._lost("went away")

    async def _ask(self, name: str, arguments: dict[str, Any], context: ToolContext) -> CallToolResult:
        assert self._client is not None

        async def report(progress: float, total: float | None, message: str | None) -> None:
            update = {"progress": progress, "total": total, "message": message}
            context.update({key: value for key, value in update.items() if value is not None})

        meta: Any = {"byssus/idempotencyKey": context.idempotency_key} if context.idempotency_key else None
        return await self._client.call_tool(name, arguments, progress_callback=report, meta=meta)

    def _check(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise McpServerFailed(f"the MCP server {self.label} was opened in another event loop; open it in this one")
        if reason := self._gone or self._reason_of_end():
            raise McpServerFailed(
                f"the MCP server {self.label} is gone ({reason}): this call was not made; later calls fail too until "
                "the program opens the server again"
            )

    def _lost(self, how: str) -> McpServerFailed:
        return McpServerFailed(
            f"the MCP server {self.label} {how} during this call, which may or may not have taken effect"
        )

    async def _look(self) -> None:
        """Find out whether the server is gone, or only the answer of one call was lost."""
        assert self._client is not None
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE):
                await self._client.list_tools(cache_mode="bypass")
        except TimeoutError:
            return  # busy: unknown
        except Exception as error:  # noqa: BLE001 - whatever it is, the next call would meet it too
            closed = getattr(error, "code", None) == _CLOSED
            self._gone = self._reason_of_end() or ("its connection is closed" if closed else error_text(error))

    def _reason_of_end(self) -> str | None:
        """Return why the session has ended; None if it has not."""
        if self._session is None or not self._session.done():
            return None
        error = None if self._session.cancelled() else self._session.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError) and self._client is None:
            return f"could not be started: {error_text(error)}; check the command, cwd and env"
        if getattr(error, "code", None) == _CLOSED:
            return "ended before it was ready"
        return "ended" if error is None else f"failed: {error_text(error)}"

    def _settled(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # a cancelled caller will not retrieve it


async def _offers(client: Client) -> list[Offer]:
    """Return all tools of the server, page by page."""
    page = await client.list_tools()
    found = list(page.tools)
    for _ in range(_MOST_PAGES):
        if page.next_cursor is None:
            return found
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    raise McpServerFailed(f"its list of tools does not end: {len(found)} so far")


def _named(server: _Server, prefix: str, only: Iterable[str] | None) -> dict[str, Offer]:
    """Return the selected tools, by the names that the model will use."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{0,32}", prefix):
        raise InputError(f"prefix must be at most 32 letters, digits, _ or -, got {prefix!r}")
    offered = {offer.name: offer for offer in server.offers}
    if isinstance(only, str):
        raise InputError(f"only must be a list of names, like [{only!r}]")
    wanted = list(offered) if only is None else list(only)
    if unknown := [name for name in wanted if name not in offered]:
        raise InputError(
            f"the MCP server {server.label} has no tool {unknown[0]!r}; it has {', '.join(offered) or 'none'}"
        )
    named: dict[str, Offer] = {}
    for theirs in wanted:
        ours = _callable(prefix + theirs)
        if ours in named:
            raise InputError(
                f"the tools {named[ours].name!r} and {theirs!r} of the MCP server {server.label} would both be named "
                f"{ours!r} for a model; take one of them: only=[...]"
            )
        named[ours] = offered[theirs]
    return named


def _callable(name: str) -> str:
    """Return the name in the alphabet and length that models accept."""
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


# --- a tool -----------------------------------------------------------------------------------------------------------


class _McpTool(Tool[..., Any]):
    """A tool of a server. The server validates its arguments."""

    def __init__(self, server: _Server, offer: Offer, name: str, timeout: float | None, *, sequential: bool) -> None:
        self._server = server
        self._theirs = offer.name
        spec = ToolSpec(name, offer.description or offer.title or "", {"type": "object", **offer.input_schema})
        self._setup(self._call, spec, timeout, sequential=sequential)

    async def _call(self, **arguments: Any) -> ToolResult:
        """Call the tool directly from a program."""
        return await self._run(arguments, ToolContext("", self.name, Signal()))

    def _read(self, call: ToolCall) -> dict[str, Any]:
        return arguments_in(call)

    async def _run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        try:
            # Cleaned, because a value that is not strict JSON would break the connection, not only this call.
            return _result(await self._server.call(self._theirs, clean(arguments), context))
        except McpServerFailed as error:
            output = await self._server.errors.lines()
            text = str(error)
            return ToolResult(
                f"{text[0].upper()}{text[1:]}.", {"error_output": output} if output else None, is_error=True
            )


def _result(answer: CallToolResult) -> ToolResult:
    """Convert the answer of a server. Content that a model cannot be shown goes into the details."""
    structured = answer.structured_content
    blocks = [_block(block) for block in answer.content]
    kept = [
        theirs.model_dump(mode="json", by_alias=True, exclude_none=True)
        for theirs, ours in zip(answer.content, blocks, strict=True)
        if _is_binary(theirs) and not isinstance(ours, ImageContent)
    ]
    content: Any = [block for block in blocks if not isinstance(block, TextContent) or block.text]
    details = {"structured": structured, "attachments": kept} if kept else structured
    return ToolResult(content or structured, details, bool(answer.is_error))


def _is_binary(block: ContentBlock) -> bool:
    return block.type == "audio" or (block.type == "resource" and hasattr(block.resource, "blob"))


def _block(block: ContentBlock) -> Block:
    match block.type:
        case "text":
            return TextContent(block.text)
        case "image":
            return ImageContent(block.data, block.mime_type)
        case "audio":
            return TextContent(f"[audio, {block.mime_type}: kept in the details]")
        case "resource_link":
            about = f": {block.description}" if block.description else ""
            return TextContent(f"[{block.name}, {block.uri}{about}]")
        case "resource":
            return _resource(block.resource)


def _resource(resource: Any) -> Block:
    kind = resource.mime_type or "of an unknown type"
    if hasattr(resource, "text"):
        return TextContent(f"[{resource.uri}]\n{resource.text}")
    if kind.startswith("image/"):
        return ImageContent(resource.blob, kind)
    return TextContent(f"[{resource.uri}, {kind}: kept in the details]")
