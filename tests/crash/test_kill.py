"""Real processes, killed with SIGKILL: what they acknowledged is there, and the next process goes on.

Nothing here waits for a time to pass: the child says where it stands and stands still there, or is killed in full run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from holdfast.checkpointer import SQLiteCheckpointer, Thread
from holdfast.messages import Message, ToolResultMessage, decode
from holdfast.recovery import UNKNOWN_OUTCOME, valid_history
from tests.test_recovery import flaws

CHILD = Path(__file__).with_name("child.py")


class Child:
    """A child process and what it has said so far."""

    def __init__(self, scene: str, directory: Path) -> None:
        self.said: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(CHILD), scene, str(directory / "x.db"), str(directory / "diary")],
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, *whats: str) -> None:
        """Read until all of these were said, in whatever order."""
        missing = set(whats)
        while missing:
            missing.discard(self.read_one()["what"])

    def read_one(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended too early, with {self._process.wait()}; it said {self.said}"
        self.said.append(json.loads(line))
        return self.said[-1]

    def acknowledged(self) -> list[str]:
        return [said["id"] for said in self.said if "id" in said]

    def kill(self) -> None:
        """Kill it, and take note of what it had still managed to say."""
        if self._process.returncode is not None:
            return
        self._process.kill()
        rest, _ = self._process.communicate()
        self.said += [json.loads(line) for line in (rest or "").splitlines(keepends=True) if line.endswith("\n")]

    def finish(self) -> None:
        rest, _ = self._process.communicate(timeout=60)
        assert (self._process.returncode, rest) == (0, "")


@contextlib.contextmanager
def child(scene: str, directory: Path) -> Iterator[Child]:
    started = Child(scene, directory)
    try:
        yield started
    finally:
        started.kill()


def load(directory: Path) -> Thread:
    async def main() -> Thread:
        async with SQLiteCheckpointer(directory / "x.db") as cp:
            thread = await cp.load("t")
            assert thread is not None
            return thread

    return asyncio.run(main())


def ids(messages: list[Message]) -> list[str]:
    return [message.id for message in messages]  # type: ignore[union-attr,misc]


def brief(messages: list[Message]) -> list[str]:
    return [f"{message.role}: {'unknown' if message.text == UNKNOWN_OUTCOME else message.text}" for message in messages]


def diary(directory: Path) -> list[str]:
    path = directory / "diary"
    return path.read_text().split() if path.exists() else []


def check_database(directory: Path) -> None:
    connection = apsw.Connection(str(directory / "x.db"))
    assert connection.pragma("integrity_check") == "ok"
    assert list(connection.execute("PRAGMA foreign_key_check")) == []
    connection.close()


def resume(directory: Path) -> dict[str, Any]:
    """A new process resumes the thread and prompts once more; what it has to say about it."""
    before = diary(directory)
    with child("resume", directory) as next_one:
        next_one.read("resumed")
        next_one.finish()
    told = next_one.said[-1]
    for request in told["sent"]:
        assert flaws([decode(body) for body in request]) == []
    assert diary(directory) == before, "a tool ran again"
    stored = ids(load(directory).messages)
    assert set(next_one.acknowledged()) <= set(stored)
    return told


def sent(told: dict[str, Any], call: int = 0) -> list[str]:
    return brief([decode(body) for body in told["sent"][call]])


# --- in mid-stream ----------------------------------------------------------------------------------------------------


def test_killed_in_mid_stream_the_next_process_asks_again(tmp_path: Path) -> None:
    with child("streaming", tmp_path) as first:
        first.read("streaming")
        first.kill()
        check_database(tmp_path)
        thread = load(tmp_path)
        assert ids(thread.messages) == first.acknowledged()
        assert brief(thread.messages) == ["user: one", "assistant: hello", "user: two"]
        assert thread.extra == {"kept": 1}
    told = resume(tmp_path)
    assert told["text"] == "on we go"
    assert sent(told) == ["user: one", "assistant: hello", "user: two"]
    assert told["extra"] == {"kept": 1}


# --- under running tools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["slow", "slow_async"])
@pytest.mark.parametrize("order", ["first", "last"])
def test_killed_under_parallel_tools_the_finished_one_is_kept_and_none_runs_again(
    tmp_path: Path, slow: str, order: str
) -> None:
    names = [slow, "fast"] if order == "first" else ["fast", slow]
    with child(f"tools,parallel,{','.join(names)}", tmp_path) as first:
        first.read("slow began", "tool_end")
        first.kill()
        check_database(tmp_path)
        thread = load(tmp_path)
        assert {*first.acknowledged()} == {*ids(thread.messages)}
        assert brief(thread.messages) == ["user: go", "assistant: ", "tool_result: fast is done"]
        assert sorted(diary(tmp_path)) == ["fast", slow]
    told = resume(tmp_path)
    results = ["tool_result: unknown", "tool_result: fast is done"]
    expected = ["user: go", "assistant: ", *(results if order == "first" else results[::-1])]
    assert sent(told) == expected
    assert brief(load(tmp_path).messages) == [
        *expected,
        "assistant: on we go",
        "user: and now?",
        "assistant: and on",
    ]


def test_killed_under_sequential_tools_the_finished_one_is_kept_and_none_runs_again(tmp_path: Path) -> None:
    with child("tools,sequential,fast,slow,fast", tmp_path) as first:
        first.read("slow began")
        first.kill()
        check_database(tmp_path)
        assert brief(load(tmp_path).messages) == ["user: go", "assistant: ", "tool_result: fast is done"]
        assert diary(tmp_path) == ["fast", "slow"]
    told = resume(tmp_path)
    assert sent(told) == [
        "user: go",
        "assistant: ",
        "tool_result: fast is done",
        "tool_result: unknown",
        "tool_result: unknown",
    ]


def test_killed_under_many_tools_every_result_that_was_told_is_kept(tmp_path: Path) -> None:
    names = ["fast", "slow"] * 8
    with child(f"tools,parallel,{','.join(names)}", tmp_path) as first:
        ended = 0
        while ended < 8:
            ended += first.read_one()["what"] == "tool_end"
        first.kill()
        results = [m for m in load(tmp_path).messages if isinstance(m, ToolResultMessage)]
        assert [m.tool_call_id for m in results] == [f"c{number}" for number in range(1, 16, 2)]
    told = resume(tmp_path)
    assert len(sent(told)) == 18


# --- right behind an acknowledgement ----------------------------------------------------------------------------------

STORY = [
    "user: go",
    "assistant: ",
    "tool_result: fast is done",
    "tool_result: fast is done",
    "assistant: done",
    "user: more",
    "assistant: and more",
]


@pytest.mark.parametrize("number", range(1, len(STORY) + 1))
def test_killed_right_behind_a_message_end_the_message_is_there(tmp_path: Path, number: int) -> None:
    with child(f"stopping,{number}", tmp_path) as first:
        first.read("stopped")
        seen_alive = ids(load(tmp_path).messages)  # by this process, while the other one has the file open
        first.kill()
        check_database(tmp_path)
        thread = load(tmp_path)
        assert ids(thread.messages) == seen_alive
        told = [said["id"] for said in first.said if said["what"] == "message_end"]
        assert len(told) == number
        assert set(first.acknowledged()) <= set(seen_alive)
        assert brief(thread.messages)[:number] == STORY[:number]
        assert flaws(valid_history(thread.messages)) == []
    if STORY[number - 1].startswith("assistant: ") and STORY[number - 1] != "assistant: ":
        return  # there is nothing to resume behind an answer
    assert resume(tmp_path)["text"] == "on we go"


# --- in full run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [1, 2, 3, 5, 8, 13, 34, 89, 233])
def test_killed_in_full_run_nothing_that_was_told_is_lost(tmp_path: Path, lines: int) -> None:
    with child("talking", tmp_path) as first:
        for _ in range(lines):
            first.read_one()
        first.kill()
        check_database(tmp_path)
        thread = load(tmp_path)
        assert set(first.acknowledged()) <= set(ids(thread.messages))
        assert flaws(valid_history(thread.messages)) == []
        told = [said["id"] for said in first.said if said["what"] == "message_end"]
        assert ids(thread.messages)[: len(told)] == told
        results = [m for m in thread.messages if isinstance(m, ToolResultMessage)]
        assert len(results) <= len(diary(tmp_path))
