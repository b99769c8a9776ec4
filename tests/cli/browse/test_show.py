"""`byssus show THREAD --follow`, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys

import pytest

from byssus import (
    AssistantMessage,
    ImageContent,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UserMessage,
)
from byssus.cli import main
from tests.support.commands import Here, command_here
from tests.support.databases import Database
from tests.support.screens import screen_of

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["text", "json"])
def test_messages_are_shown_as_they_are_stored_until_it_is_interrupted(
    database: Database, option: tuple[str, ...]
) -> None:
    async def say(text: str) -> None:
        async with database.checkpointer() as cp:
            await cp.append("t", UserMessage(text))

    asyncio.run(say("before"))
    with subprocess.Popen(
        [sys.executable, "-m", "byssus", "show", "t", "--follow", "--db", database.place, *option],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None and following.stderr is not None
        shown = [following.stdout.readline() for _ in range(1 if option else 3)]
        asyncio.run(say("after"))
        shown += [following.stdout.readline() for _ in range(1 if option else 3)]
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 130
        assert following.stderr.read() == ""
    if option:
        assert [json.loads(line)["content"][0]["text"] for line in shown] == ["before", "after"]
    else:
        assert [line.strip() for line in shown][1::3] == ["before", "after"]


# --- pages ------------------------------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script>" onload="x & \x9b2J\u202e ```\n</pre></body>'


@pytest.fixture
def shown(database: Database, capsys: pytest.CaptureFixture[str]) -> Here:
    async def fill() -> None:
        async with database.checkpointer() as cp:
            await cp.append(
                f"t{HOSTILE}",
                [
                    UserMessage([TextContent(HOSTILE), ImageContent(data='"><script>', mime_type=HOSTILE)]),
                    AssistantMessage(
                        [ThinkingContent(HOSTILE), ToolCall("1", HOSTILE, {HOSTILE: HOSTILE})], "tool_use"
                    ),
                    ToolResultMessage("1", HOSTILE, HOSTILE),
                    AssistantMessage("```python\nnever closed"),
                    {"role": HOSTILE, "content": HOSTILE},
                ],
            )

    asyncio.run(fill())
    return command_here(capsys, database.place)


def test_nothing_that_was_said_becomes_html(shown: Here) -> None:
    page = shown("show", "t", "--html").stdout
    names = set(re.findall(r"<(/?\w+)", page))
    assert not names & {"script", "/script"}
    assert page.count("</body>") == page.count("<body>") == 1
    assert page.count("<article") == 5
    assert "&lt;script&gt;" in page
    assert not re.search("[\x80-\x9f\u202a-\u202e]", page)
    assert "http" not in page.replace("http-equiv", "")


def test_markdown_fences_what_tools_say_and_closes_what_was_left_open(shown: Here) -> None:
    page = shown("show", "t", "--markdown").stdout
    assert page.startswith("# t\\<script\\>")
    shown_text = HOSTILE.translate({0x9B: "\\x9b", 0x202E: "\\u202e"})
    assert f"````\n{shown_text}\n````" in page
    assert "```python\nnever closed\n```\n" in page
    assert shown("export", "t", "--format", "markdown").stdout == page


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_page_is_right_on_an_output_of_any_encoding(
    shown: Here, database: Database, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """The page says that it is UTF-8: what the output cannot write so is a character reference."""
    asyncio.run(_append(database, "page", UserMessage("café 天气")))
    screen = screen_of(monkeypatch, encoding=encoding)
    assert main(["show", "page", "--html", "--no-pager", "--db", database.place]) == 0
    assert "caf&#233; &#22825;&#27668;" in screen.text


async def _append(database: Database, thread: str, message: UserMessage) -> None:
    async with database.checkpointer() as cp:
        await cp.append(thread, message)


def test_only_the_last_messages_are_shown(shown: Here) -> None:
    assert shown("show", "t", "--last", 2).stdout.count("-- ") == 2
    told = json.loads(shown("show", "t", "--last", 1, "--json").stdout)
    assert (len(told["messages"]), told["state"]) == (1, "idle")
