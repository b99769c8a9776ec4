"""`byssus show THREAD --follow`, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from byssus import UserMessage
from tests.support.databases import Database

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
