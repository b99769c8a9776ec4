"""Several real processes on one database: nothing is lost, nothing gets in between, and who slept too long is out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, Model, tool
from byssus.checkpointer import Thread
from byssus.messages import Message
from byssus.providers.history import UNKNOWN_OUTCOME, valid_history
from byssus.providers.scripted import ScriptedProvider
from byssus.values.results import RunInfo
from tests.crash import databases
from tests.crash.place import Place
from tests.support import forked
from tests.support.histories import flaws
from tests.support.processes import SLOW

ROOT = Path(__file__).parents[2]
LEASE_LOST = re.compile(r"run \w+ on thread '\w+' failed: LeaseLost: |.* of thread '\w+' came too late: ")


class Process:
    """A child that is open and waits for its first line; what it has said so far; and what it has complained of."""

    def __init__(self, scene: str, name: str, place: Place, lease_seconds: float) -> None:
        self.said: list[dict[str, Any]] = []
        self.stopped = False
        told = [scene, name, str(place), str(lease_seconds)]
        command = ["-W", "error", "-m", "tests.crash.processes_child", *told]
        pipe = forked.PIPE
        self.process = forked.Process(command, env=os.environ, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)

    def read(self, what: str) -> dict[str, Any]:
        """Read until this was said."""
        assert self.process.stdout is not None
        while not self.said or self.said[-1]["what"] != what:
            line = self.process.stdout.readline()
            assert line, f"it ended too early: {self.said[-3:]}, {self._complaints()}"
            self.said.append(json.loads(line))
            assert self.said[-1]["what"] != "failed", (self.said[-1], self._complaints())
        return self.said[-1]

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.stopped = True
        self.process.stop()

    def go_on(self) -> None:
        self.stopped = False
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """Hear the rest; it ended well and complained of nothing but the loss of its lease, and of a slow disk."""
        process = self.process
        assert process.stdin and process.stdout and process.stderr
        with process.stdin, process.stdout, process.stderr:
            process.stdin.close()
            # Not `communicate`, which does not see what `readline` has read ahead.
            rest, complaints = process.stdout.read(), process.stderr.read()
        process.wait(60)
        self.said += [json.loads(line) for line in rest.splitlines()]
        others = [line for line in complaints.splitlines() if not LEASE_LOST.match(line) and not SLOW.search(line)]
        assert (self.process.returncode, others) == (0, []), (self.said[-3:], complaints)
        assert self.said[-1] == {"what": "closed"}

    def all(self, what: str) -> list[dict[str, Any]]:
        return [said for said in self.said if said["what"] == what]

    def acknowledged(self) -> set[str]:
        return {said["id"] for said in self.all("message")}

    def _complaints(self) -> str:
        self.process.kill()
        return self.process.communicate()[1] or ""


@contextlib.contextmanager
def processes(place: Place, *scenes: str, lease_seconds: float = 30.0) -> Iterator[list[Process]]:
    """Children with these scenes, all of them open."""
    children = [Process(scene, f"p{number}", place, lease_seconds) for number, scene in enumerate(scenes)]
    try:
        for child in children:
            child.read("open")
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
                with contextlib.suppress(BrokenPipeError):  # nobody reads any more what was told
                    pipe.close()  # type: ignore[union-attr]


def load(place: Place, thread_id: str) -> Thread:
    async def main() -> Thread:
        async with place.checkpointer() as cp:
            thread = await cp.load(thread_id)
            assert thread is not None
            return thread

    return asyncio.run(main())


@tool
def note(text: str) -> str:
    """As in the children: a call of theirs may still be open."""
    return f"noted {text}"


def take_up(place: Place) -> list[str]:
    """Resume what nobody has taken up; returns which threads that were."""

    async def main() -> list[str]:
        async with place.checkpointer() as cp:
            ids = [info.id for info in await cp.unfinished()]
            for thread_id in ids:
                provider = ScriptedProvider(["on we go"])
                agent = Agent(provider=provider, model=Model("m"), tools=[note], checkpointer=cp, thread_id=thread_id)
                await agent.resume()
            assert await cp.unfinished() == []
            return ids

    return asyncio.run(main())


def lines(messages: list[Message]) -> list[str]:
    return [f"{message.role}: {'unknown' if message.text == UNKNOWN_OUTCOME else message.text}" for message in messages]


def run_of(prompt: str) -> list[str]:
    """What a run adds that nobody disturbs."""
    return [
        f"user: {prompt}",
        "assistant: ",
        f"tool_result: noted {prompt}",
        f"tool_result: noted {prompt}",
        f"assistant: answer to {prompt}",
    ]


# --- many at once -----------------------------------------------------------------------------------------------------


def test_eight_processes_that_prompt_one_thread_lose_nothing_and_do_not_get_in_between(place: Place) -> None:
    with processes(place, *["prompting,8,t"] * 8) as children:
        for child in children:
            child.tell()
        for child in children:
            child.finish()
    thread = load(place, "t")
    seen = lines(thread.messages)
    prompts = [line.removeprefix("user: ") for line in seen[::5]]
    assert sorted(prompts) == sorted(f"p{child}-t-{number}" for child in range(8) for number in range(8))
    assert seen == [line for prompt in prompts for line in run_of(prompt)]
    for number, child in enumerate(children):
        assert child.all("lost") == []
        answered = {said["prompt"]: said["text"] for said in child.all("answered")}
        assert answered == {f"p{number}-t-{i}": f"answer to p{number}-t-{i}" for i in range(8)}
        assert child.acknowledged() <= {message.id for message in thread.messages}  # type: ignore[union-attr]
        own = [prompt for prompt in prompts if prompt.startswith(f"p{number}-")]
        assert own == sorted(own)
    assert take_up(place) == []
    assert databases.damage(place) == []


def test_eight_processes_on_many_threads_do_not_disturb_each_other(place: Place) -> None:
    scenes = [
        f"prompting,2,shared-a,shared-b,{','.join(f'own{child}-{number}' for number in range(5))}" for child in range(8)
    ]
    with processes(place, *scenes) as children:
        for child in children:
            child.tell()
        for child in children:
            child.finish()
    for number in range(8):
        for own in range(5):
            seen = lines(load(place, f"own{number}-{own}").messages)
            expected = [f"p{number}-own{number}-{own}-{i}" for i in range(2)]
            assert seen == [line for prompt in expected for line in run_of(prompt)]
    for shared in ("shared-a", "shared-b"):
        seen = lines(load(place, shared).messages)
        prompts = [line.removeprefix("user: ") for line in seen[::5]]
        assert sorted(prompts) == sorted(f"p{child}-{shared}-{number}" for child in range(8) for number in range(2))
        assert seen == [line for prompt in prompts for line in run_of(prompt)]
    assert databases.damage(place) == []


# --- zombies ----------------------------------------------------------------------------------------------------------


def take_over(place: Place, *, lease_seconds: float) -> list[str]:
    """Prompt the thread as soon as nobody drives it any more; what it holds then."""

    async def main() -> list[str]:
        async with place.checkpointer(lease_seconds=lease_seconds) as cp:
            agent = Agent(
                provider=ScriptedProvider(["theirs"]), model=Model("m"), checkpointer=cp, thread_id="t", wait=30
            )
            assert (await agent.prompt("now me")).text == "theirs"
            return lines(agent.state.messages)

    return asyncio.run(main())


@pytest.mark.parametrize("where", ["tool", "stream"])
def test_a_process_that_slept_through_its_lease_cannot_write_and_says_so(place: Place, where: str) -> None:
    with processes(place, where, lease_seconds=1.0) as (child,):
        child.tell()
        child.read("standing")
        if where == "stream":
            _wait_for_partial(place)
        child.stop()
        after = take_over(place, lease_seconds=1.0)
        child.tell()  # what it waits for is there when it wakes up
        child.go_on()
        assert "lost the lease on thread 't'" in child.read("lost")["text"]
        child.finish()
    begun = (
        ["user: mine", "assistant: ", "tool_result: unknown"] if where == "tool" else ["user: mine", "assistant: half "]
    )
    assert after == [*begun, "user: now me", "assistant: theirs"]
    thread = load(place, "t")
    assert lines(thread.messages) == after
    assert thread.partial is None
    assert child.acknowledged() <= {message.id for message in thread.messages}  # type: ignore[union-attr]
    assert databases.damage(place) == []


def _wait_for_partial(place: Place) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), place.checkpointer() as cp:
            while (thread := await cp.load("t")) is None or thread.partial is None:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_on_postgres_a_process_that_fell_asleep_in_a_transaction_does_not_hold_the_others_up_for_ever(
    tmp_path: Path,
) -> None:
    """The server ends a session that is silent in a transaction. SQLite has no server who could do that."""
    with databases.made("postgres", tmp_path) as place, processes(place, "commit", lease_seconds=1.0) as (child,):
        child.tell()
        child.read("standing")
        child.stop()
        assert take_over(place, lease_seconds=30.0) == ["user: mine", "user: now me", "assistant: theirs"]
        child.tell()
        child.go_on()
        assert "lost the lease on thread 't'" in child.read("lost")["text"]
        child.read("closed")
        assert lines(load(place, "t").messages) == ["user: mine", "user: now me", "assistant: theirs"]


def test_a_process_that_slept_for_less_than_its_lease_goes_on(place: Place) -> None:
    with processes(place, "tool", lease_seconds=30.0) as (child,):
        child.tell()
        child.read("standing")
        child.stop()
        child.tell()
        child.go_on()
        child.read("standing")  # the model asks for the tool again, and again ...
        child.process.kill()
        child.process.communicate()
    assert child.all("lost") == []


def test_processes_that_fall_asleep_again_and_again_never_write_over_each_other(place: Place) -> None:
    chance = random.Random(5)
    with processes(place, *["prompting,40,t"] * 3, lease_seconds=0.5) as children:
        readers = [threading.Thread(target=child.finish) for child in children]
        for child in children:
            child.tell()
        for reader in readers:
            reader.start()
        while any(reader.is_alive() for reader in readers):
            child = chance.choice(children)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if child.process.poll() is None:
                    child.process.send_signal(signal.SIGSTOP)
                    time.sleep(0.8 if chance.random() < 0.4 else 0.05)
                    child.process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        for reader in readers:
            reader.join()
    assert take_up(place) in ([], ["t"])  # the last one may have lost its lease, and nobody came after it
    thread = load(place, "t")
    stored = {message.id for message in thread.messages}  # type: ignore[union-attr]
    for child in children:
        assert child.said[-1] == {"what": "closed"}
        assert child.acknowledged() <= stored
        assert len(child.all("answered")) + len(child.all("lost")) == 40
    seen = lines(thread.messages)
    for child in children:
        for said in child.all("answered"):  # whoever was answered was not disturbed
            start = seen.index(f"user: {said['prompt']}")
            assert seen[start : start + 5] == run_of(said["prompt"])
    assert flaws(valid_history(thread.messages)) == []
    assert databases.damage(place) == []


# --- a prompt that is sent twice --------------------------------------------------------------------------------------


def paid_once(place: Place, children: list[Process]) -> RunInfo:
    """All who came to an answer came to the same one, and the prompt happened once."""
    answers = [said for child in children for said in child.all("answered")]
    ((text, stop_reason),) = {(said["text"], said["stop_reason"]) for said in answers}
    assert (text.startswith("answer to "), stop_reason) == (True, "stop")  # a call that was started is not run again

    async def main() -> RunInfo:
        async with place.checkpointer() as cp:
            (run,) = await cp.runs("t")
            assert {said["run"] for said in answers} == {run.id}
            assert (run.request_key, run.state, run.stop_reason) == ("order-17", "ended", "stop")
            attempts = await cp.run_attempts(run.id)
            assert [attempt.number for attempt in attempts] == list(range(1, run.attempts + 1))
            assert [attempt.outcome for attempt in attempts] == ["lost"] * (run.attempts - 1) + ["ended"]
            return run

    run = asyncio.run(main())
    said = [line for line in lines(load(place, "t").messages) if not line.startswith("tool_result")]
    assert (said[0], said[-1], said.count("user: pay")) == ("user: pay", f"assistant: {text}", 1)
    assert databases.damage(place) == []
    return run


def test_eight_processes_that_send_one_key_at_the_same_moment_make_one_run(place: Place) -> None:
    with processes(place, *["keyed,never,0"] * 8) as children:
        for child in children:
            child.tell()
        for child in children:
            child.finish()
    assert len([said for child in children for said in child.all("answered")]) == 8
    assert paid_once(place, children).attempts == 1
    assert lines(load(place, "t").messages) == run_of("pay")


@pytest.mark.large
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("where", ["before commit", "after commit"])
def test_a_key_is_sent_again_by_two_after_a_kill_at_any_commit_and_the_prompt_happens_once(
    place: Place, where: str, number: int
) -> None:
    with processes(place, f"keyed,{where},{number}", "keyed,never,0", "keyed,never,0") as children:
        first, *others = children
        first.tell()
        assert first.process.wait(timeout=60) == -signal.SIGKILL
        for child in others:
            child.tell()
        for child in others:
            child.finish()
    assert paid_once(place, others).attempts <= 2  # one if the kill came before the first commit or after the last
