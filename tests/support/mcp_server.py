"""An MCP server for the tests, in a process of its own: `python mcp_server.py stdio|http`.

With http it prints the port that it listens on.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

server = MCPServer("demo")


class Place(BaseModel):
    city: str
    days: int = 1


@server.tool()
def pid() -> int:
    """The id of this process."""
    return os.getpid()


@server.tool()
def forecast(place: Place) -> dict[str, Any]:
    """The weather to come."""
    return {"city": place.city, "days": place.days, "sunny": True}


@server.tool(name="files.read")
def read(path: str) -> str:
    return f"the content of {path}"


@server.tool()
def echo(value: Any) -> str:
    return repr(value)


@server.tool(structured_output=False)
def long(size: int) -> str:
    return "x" * size


@server.tool()
def fail() -> str:
    raise ToolError("the disk is on fire")


@server.tool()
def picture() -> Image:
    return Image(data=PIXEL, format="png")


@server.tool(structured_output=False)
def nothing() -> list[Any]:
    return []


@server.tool(structured_output=False)
def mixture() -> list[Any]:
    return [
        TextContent(text="first"),
        EmbeddedResource(resource=TextResourceContents(uri="note://1", mime_type="text/plain", text="a note")),
        EmbeddedResource(
            resource=BlobResourceContents(uri="img://1", mime_type="image/png", blob=base64.b64encode(PIXEL).decode())
        ),
        EmbeddedResource(resource=BlobResourceContents(uri="doc://1", mime_type="application/pdf", blob="JVBERg==")),
        AudioContent(data="UklGRg==", mime_type="audio/wav"),
        ResourceLink(name="manual", uri="https://example.com/manual", description="how to"),
        ImageContent(data=base64.b64encode(PIXEL).decode(), mime_type="image/png"),
    ]


@server.tool()
async def count(to: int, ctx: Context) -> str:
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"at {number}")
    return f"counted to {to}"


@server.tool()
async def wait(ctx: Context, told: str = "") -> str:
    """Never ends by itself. When it is cancelled, it says so in the named pipe `told`."""
    try:
        await ctx.report_progress(0, None, "waiting")
        await anyio.sleep_forever()
    finally:
        if told:
            Path(told).write_text("cancelled", "utf-8")
    return "unreachable"


@server.tool()
def idempotency_key(ctx: Context) -> str:
    return str((ctx.request_context.meta or {}).get("byssus/idempotencyKey"))


@server.tool()
def environment(name: str) -> str:
    return f"{os.environ.get(name)} in {Path.cwd().name}"


@server.tool()
def header(name: str, ctx: Context) -> str:
    return str((ctx.headers or {}).get(name))


@server.tool()
def die() -> str:
    sys.stderr.write("I am slain\n")
    sys.stderr.flush()
    os._exit(3)


def serve_http() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    anyio.run(uvicorn.Server(config).serve, [listener])


def main(mode: str) -> None:
    if mode == "stdio":
        server.run("stdio")
    else:
        serve_http()


if __name__ == "__main__":
    main(sys.argv[1])
