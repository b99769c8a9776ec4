"""Real processes, killed with SIGKILL: what they acknowledged is there, and the next process goes on.

Nothing here waits for a time to pass: the child says where it stands and stands still there, or is killed in full run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from byssus import Agent, AssistantMessage, Model
from byssus.checkpointer import Checkpointer, Thread, ToolCallRecord
from byssus.errors import NothingToResume
from byssus.messages import Message, ToolResultMessage, decode
from byssus.providers.history import UNKNOWN_OUTCOME, valid_history
from byssus.providers.scripted import ScriptedProvider
from tests.crash import databases
from tests.crash.place import Place
from tests.support import forked
from tests.support.histories import flaws

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


class Child:
    """A child process and what it has said so far."""

    def __init__(self, scene: str, place: Place) -> None:
        self.said: list[dict[str, Any]] = []
        self._place = place
        command = ["-W", "error", "-m", "tests.crash.child", scene, str(place)]
        self._process = forked.Process(command, env=os.environ, cwd=ROOT, stdout=forked.PIPE)

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
        if self._process.stdout is None or self._process.stdout.closed:
            return
        self._process.kill()
        rest = self._rest()
        self.said += [json.loads(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        databases.settled(self._place)

    def finish(self) -> None:
        rest = self._rest()
        assert (self._process.returncode, rest) == (0, "")

    def _rest(self) -> str:
        """All that it says until its end. `communicate` does not see what `readline` has read ahead."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            rest = output.read()
        self._process.wait(60)
        return rest


@contextlib.contextmanager
def child(scene: str, place: Place) -> Iterator[Child]:
    started = Child(scene, place)
    try:
        yield started
    finally:
        started.kill()


def look(place: Place, ask: Callable[[Checkpointer], Awaitable[T]]) -> T:
    async def main() -> T:
        async with place.checkpointer() as cp:
            return await ask(cp)

    return asyncio.run(main())


def load(place: Place) -> Thread:
    thread = look(place, lambda cp: cp.load("t"))
    assert thread is not None
    return thread


def unfinished(place: Place) -> list[str]:
    return [info.id for info in look(place, lambda cp: cp.unfinished())]


def state(place: Place) -> str:
    return look(place, lambda cp: cp.state("t"))


def waiting(place: Place) -> list[str]:
    return [item.message.text for item in look(place, lambda cp: cp.inbox("t"))]


def ledger(place: Place) -> list[ToolCallRecord]:
    return look(place, lambda cp: cp.tool_calls("t"))


def statuses(place: Place) -> dict[str, str]:
    return {record.call_id: record.status for record in ledger(place)}


def ids(messages: list[Message]) -> list[str]:
    return [message.id for message in messages]  # type: ignore[union-attr,misc]


def brief(messages: list[Message]) -> list[str]:
    return [f"{message.role}: {'unknown' if message.text == UNKNOWN_OUTCOME else message.text}" for message in messages]


def diary(place: Place) -> list[str]:
    return place.diary.read_text().split() if place.diary.exists() else []


def resume(place: Place, *, calls: int = 1, runs: Sequence[str] = ()) -> dict[str, Any]:
    """A new process resumes the thread and prompts once more; what it has to say about it.

    It asks the model so many times before it prompts, and runs these tools and no others.
    """
    before = diary(place)
    assert unfinished(place) == ["t"]
    with child(f"resume,{calls}", place) as next_one:
        next_one.read("resumed")
        next_one.finish()
    told = next_one.said[-1]
    for request in told["sent"]:
        assert flaws([decode(body) for body in request]) == []
    assert diary(place) == [*before, *runs], "a tool ran again, or did not run"
    stored = ids(load(place).messages)
    assert set(next_one.acknowledged()) <= set(stored)
    assert (unfinished(place), waiting(place), state(place)) == ([], [], "idle")
    return told


def sent(told: dict[str, Any], call: int = 0) -> list[str]:
    return brief([decode(body) for body in told["sent"][call]])


# --- in mid-stream ----------------------------------------------------------------------------------------------------


def test_killed_in_mid_stream_the_next_process_asks_again(place: Place) -> None:
    with child("streaming,0", place) as first:
        first.read("streaming")
        assert (unfinished(place), state(place)) == ([], "running")  # it lives
        first.kill()
        assert state(place) == "interrupted"
        assert databases.damage(place) == []
        thread = load(place)
        assert ids(thread.messages) == first.acknowledged()
        assert brief(thread.messages) == ["user: one", "assistant: hello", "user: two"]
        assert thread.extra == {"kept": 1}
        assert thread.partial is None
    told = resume(place)
    assert told["text"] == "on we go"
    assert sent(told) == ["user: one", "assistant: hello", "user: two"]
    assert told["extra"] == {"kept": 1}


def test_killed_in_mid_stream_what_had_arrived_and_was_saved_is_kept(place: Place) -> None:
    with child("streaming,0.001", place) as first:
        first.read("saved")
        first.kill()
        assert databases.damage(place) == []
        thread = load(place)
        assert brief(thread.messages) == ["user: one", "assistant: hello", "user: two"]
        assert thread.partial is not None
        assert thread.partial.text == "Hel"
    told = resume(place)
    assert told["text"] == "on we go"
    thread = load(place)
    assert thread.partial is None
    assert brief(thread.messages) == [
        "user: one",
        "assistant: hello",
        "user: two",
        "assistant: Hel",
        "assistant: on we go",
        "user: and now?",
        "assistant: and on",
    ]
    broken = thread.messages[3]
    assert isinstance(broken, AssistantMessage)
    assert broken.failed


# --- under running tools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["slow", "slow_async"])
@pytest.mark.parametrize("order", ["first", "last"])
def test_killed_under_parallel_tools_the_finished_one_is_kept_and_none_runs_again(
    place: Place, slow: str, order: str
) -> None:
    names = [slow, "fast"] if order == "first" else ["fast", slow]
    with child(f"tools,parallel,{','.join(names)}", place) as first:
        first.read("slow began", "tool_end")
        first.kill()
        assert databases.damage(place) == []
        thread = load(place)
        assert {*first.acknowledged()} == {*ids(thread.messages)}
        assert brief(thread.messages) == ["user: go", "assistant: ", "tool_result: fast is done"]
        assert sorted(diary(place)) == ["fast", slow]
        assert sorted(statuses(place).values()) == ["done", "started"]
    told = resume(place)
    results = ["tool_result: unknown", "tool_result: fast is done"]
    expected = ["user: go", "assistant: ", *(results if order == "first" else results[::-1])]
    assert sent(told) == expected
    assert brief(load(place).messages) == [
        *expected,
        "assistant: on we go",
        "user: and now?",
        "assistant: and on",
    ]
    assert sorted(statuses(place).values()) == ["done", "unknown"]


def test_killed_under_sequential_tools_only_the_one_that_was_never_started_is_run(place: Place) -> None:
    with child("tools,sequential,fast,slow,fast", place) as first:
        first.read("slow began")
        first.kill()
        assert databases.damage(place) == []
        assert brief(load(place).messages) == ["user: go", "assistant: ", "tool_result: fast is done"]
        assert diary(place) == ["fast", "slow"]
        assert statuses(place) == {"c1": "done", "c2": "started"}
    told = resume(place, runs=["fast"])
    assert sent(told) == [
        "user: go",
        "assistant: ",
        "tool_result: fast is done",
        "tool_result: unknown",
        "tool_result: fast is done",
    ]
    assert statuses(place) == {"c1": "done", "c2": "unknown", "c3": "done"}
    assert [record.attempts for record in ledger(place)] == [1, 1, 1]


def test_killed_under_many_tools_every_result_that_was_told_is_kept(place: Place) -> None:
    names = ["fast", "slow"] * 8
    with child(f"tools,parallel,{','.join(names)}", place) as first:
        ended = began = 0
        while ended < 8 or began < 8:
            what = first.read_one()["what"]
            ended += what == "tool_end"
            began += what == "slow began"
        first.kill()
        results = [m for m in load(place).messages if isinstance(m, ToolResultMessage)]
        assert [m.tool_call_id for m in results] == [f"c{number}" for number in range(1, 16, 2)]
    told = resume(place)
    assert sent(told)[2:] == ["tool_result: fast is done", "tool_result: unknown"] * 8


# --- right behind an acknowledgement ----------------------------------------------------------------------------------

STORY = [  # with "more" in the inbox from the beginning
    "user: go",
    "assistant: ",
    "tool_result: fast is done",
    "tool_result: fast is done",
    "assistant: done",
    "user: more",
    "assistant: and more",
]


class Rest(NamedTuple):
    """What the next process makes of a story that was cut: what it says, and which tools it runs."""

    story: list[str]
    runs: list[str]


_ANSWERED_TWICE = ["assistant: on we go", "user: more", "assistant: and on"]
REST = {
    1: Rest([*STORY[:1], *_ANSWERED_TWICE], []),
    2: Rest([*STORY[:4], *_ANSWERED_TWICE], ["fast", "fast"]),  # the calls were never started
    3: Rest([*STORY[:4], *_ANSWERED_TWICE], []),
    4: Rest([*STORY[:4], *_ANSWERED_TWICE], []),
    5: Rest([*STORY[:6], "assistant: on we go"], []),
    6: Rest([*STORY[:6], "assistant: on we go"], []),
    7: Rest(STORY, []),
}


@pytest.mark.parametrize("number", REST)
def test_killed_right_behind_a_message_end_the_message_is_there_and_the_follow_up_is_heard_once(
    place: Place, number: int
) -> None:
    story, runs = REST[number]
    with child(f"stopping,{number}", place) as first:
        first.read("stopped")
        seen_alive = ids(load(place).messages)  # by this process, while the other one has the file open
        assert unfinished(place) == []
        first.kill()
        assert databases.damage(place) == []
        thread = load(place)
        assert ids(thread.messages) == seen_alive
        told = [said["id"] for said in first.said if said["what"] == "message_end"]
        assert len(told) == number
        assert set(first.acknowledged()) <= set(seen_alive)
        assert brief(thread.messages)[:number] == STORY[:number]
        assert flaws(valid_history(thread.messages)) == []
        assert waiting(place) == ([] if "user: more" in brief(thread.messages) else ["more"])
    if number == len(STORY):  # the run has come to its end: there is nothing to resume behind its answer
        assert unfinished(place) == []
        with pytest.raises(NothingToResume):
            look(place, lambda cp: idle_agent(cp).resume())
        assert brief(load(place).messages) == story
        return
    calls = len([line for line in story[number:] if line.startswith("assistant: ") and line != "assistant: "])
    answer = "assistant: and further" if calls == 2 else "assistant: and on"
    resume(place, calls=calls, runs=runs)
    assert brief(load(place).messages) == [*story, "user: and now?", answer]


def idle_agent(cp: Checkpointer) -> Agent:
    return Agent(provider=ScriptedProvider([]), model=Model("m"), checkpointer=cp, thread_id="t")


# --- in full run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [1, 2, 3, 5, 8, 13, 34, 89, 233])
def test_killed_in_full_run_nothing_that_was_told_is_lost(place: Place, lines: int) -> None:
    with child("talking", place) as first:
        for _ in range(lines):
            first.read_one()
        first.kill()
        assert databases.damage(place) == []
        thread = load(place)
        assert set(first.acknowledged()) <= set(ids(thread.messages))
        assert flaws(valid_history(thread.messages)) == []
        told = [said["id"] for said in first.said if said["what"] == "message_end"]
        assert ids(thread.messages)[: len(told)] == told
        results = [m for m in thread.messages if isinstance(m, ToolResultMessage)]
        calls = ledger(place)
        assert len(results) <= len(diary(place)) <= len(calls)  # no tool runs before its start is on disk
        assert [call.status for call in calls].count("done") == len(results)
        assert {call.status for call in calls} <= {"done", "started"}
