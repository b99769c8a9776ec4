"""Runs on a Postgres that goes away again and again, over a wire that breaks; and what must be true of them at the end.

    python -m tests.crash.postgres_chaos --minutes 5 --seed 7      scene after scene, until the time is over
    python -m tests.crash.postgres_chaos --seed 7 --scene 3        one of those scenes again

Many threads are prompted, steered and appended to at once, from this process and from others, of which some are killed.
Whatever was acknowledged is written into a diary; what happens next depends on how much that is, and never on a time.
When all is over, what was interrupted is resumed, and the database is held against the diary. The scenes
with a failover are here, too. Prints its seed and stops at the first violation.
"""

# ruff: noqa: T201 - it talks to whoever runs it

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from byssus import Agent, AssistantMessage, Model, ToolCall, ToolContext, ToolResultMessage, UserMessage
from byssus.checkpointer import Checkpointer, PostgresCheckpointer
from byssus.errors import LeaseLost, StoreUnreachable
from byssus.events import Event, MessageEnd, ToolExecutionEnd
from byssus.messages import Message, stamped
from byssus.providers.base import Request
from byssus.providers.history import valid_history
from byssus.providers.scripted import Reply, ScriptedProvider
from byssus.store.database import Row, Tx
from byssus.tools import Tool
from byssus.values.decisions import Recovery
from tests.crash.cutter import Cutter, schema_on
from tests.support import postgres
from tests.support.histories import flaws

ROUNDS = 2  # of tool calls for each thing that is said
_MANY = 10_000  # steps of a script: each looks at the history, so it does not matter how many there are
_ROOT = Path(__file__).parents[2]

Note = Callable[[str, str, str], None]  # what happened, in which thread, to what


class Plan(NamedTuple):
    """How much goes on at once."""

    threads: int = 200  # with an agent each
    prompts: int = 1  # in each of them
    shared: int = 2  # threads that this process and the others prompt, all at once
    writers: int = 4  # threads that are only appended to
    appends: int = 25
    spoken: float = 0.3  # how many of the threads are spoken to meanwhile
    processes: int = 1  # others, which see it through
    killed: int = 1  # others, which do not
    their_threads: int = 10
    patience: float = 100  # seconds after which something hangs


# --- what really happened ---------------------------------------------------------------------------------------------


class Diary:
    """All that was acknowledged, by thread; and which tools ran. Anybody may write into it, from any thread."""

    def __init__(self) -> None:
        self.count = 0  # of what was acknowledged
        self.tried: dict[str, Counter[str]] = defaultdict(Counter)  # texts
        self.said: dict[str, list[str]] = defaultdict(list)  # texts that are stored
        self.answered: dict[str, list[str]] = defaultdict(list)  # prompts that have returned
        self.given_up: set[str] = set()  # prompts whose run ended with its lease
        self.stored: dict[str, list[str]] = defaultdict(list)  # ids of messages, in their order
        self.settled: dict[str, list[str]] = defaultdict(list)  # ids of results
        self.runs: Counter[str] = Counter()  # by idempotency key
        self.ended: dict[str, int] = {}  # how often a tool had run when its end was told
        self._over = False
        self._changed = threading.Condition()

    def note(self, what: str, thread: str, value: str) -> None:
        with self._changed:
            match what:
                case "tried":
                    self.tried[thread][value] += 1
                    return
                case "ran":
                    self.runs[value] += 1
                    return
                case "ended":
                    self.ended[value] = self.runs[value]
                    return
                case "given up":
                    self.given_up.add(value)
                    return
                case _:
                    acknowledged: dict[str, list[str]] = getattr(self, what)
                    acknowledged[thread].append(value)
            self.count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        """Wait until so much was acknowledged; False if nothing more will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self.count >= count)
            return not self._over

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


# --- what goes on -----------------------------------------------------------------------------------------------------


class Cast:
    """The agents of one process, their model and their tools."""

    def __init__(self, cp: Checkpointer, note: Note, chance: random.Random) -> None:
        self.cp, self.note, self.chance = cp, note, chance
        self.flaws: list[str] = []  # of histories that a model was sent

    def agent(self, thread: str) -> Agent:
        made = Agent(
            provider=ScriptedProvider([self._reply] * _MANY),
            model=Model("m"),
            tools=[self._tool(thread, "never"), self._tool(thread, "retry")],
            tool_mode=self.chance.choice(["parallel", "sequential"]),
            checkpointer=self.cp,
            thread_id=thread,
            wait=100,
        )
        made.subscribe(lambda event: self._hear(thread, event))
        return made

    def _reply(self, request: Request) -> Reply:
        """Ask for tools some times after each thing that was said, then answer: the history alone says what is due."""
        self.flaws += flaws(request.messages)
        user, asked = "", 0
        for message in request.messages:
            if isinstance(message, UserMessage):
                user, asked = message.text, 0
            elif isinstance(message, AssistantMessage):
                asked += bool(message.tool_calls)
        if asked == ROUNDS:
            return f"answer to {user}"
        return [ToolCall(f"{user}/{asked}/{name}", name, {}) for name in ("never", "retry")]

    def _tool(self, thread: str, policy: Recovery) -> Tool[..., Any]:
        async def act(context: ToolContext) -> str:
            self.note("ran", thread, context.idempotency_key)
            await asyncio.sleep(self.chance.choice([0, 0.01, 0.05]))  # its work
            return f"did {context.idempotency_key}"

        return Tool(act, name=policy, recovery=policy)

    def _hear(self, thread: str, event: Event) -> None:
        if isinstance(event, MessageEnd) and event.stored:
            self.note("stored", thread, str(getattr(event.message, "id", None)))
        elif isinstance(event, ToolExecutionEnd) and event.stored:
            self.note("settled", thread, str(event.result.id))
            if event.result.text.startswith("did "):
                self.note("ended", thread, event.result.text.removeprefix("did "))

    async def prompt(self, thread: str, *texts: str) -> None:
        agent = self.agent(thread)
        for text in texts:
            self.note("tried", thread, text)
            try:
                result = await agent.prompt(text)
            except (LeaseLost, StoreUnreachable):  # the database was away for too long: somebody resumes it
                self.note("given up", thread, text)
                return
            assert result.stop_reason == "stop", (thread, result)
            self.note("answered", thread, text)

    async def append(self, thread: str, count: int) -> None:
        for number in range(count):
            texts = [f"{thread}:a{number}.{part}" for part in range(self.chance.choice([1, 1, 3]))]
            for text in texts:
                self.note("tried", thread, text)
            await self.cp.append(thread, [stamped(UserMessage(text)) for text in texts])
            for text in texts:
                self.note("said", thread, text)

    async def speak(self, thread: str, text: str) -> None:
        self.note("tried", thread, text)
        await self.chance.choice([self.cp.steer, self.cp.follow_up])(thread, text)
        self.note("said", thread, text)

    async def wind_up(self, threads: list[str]) -> None:
        """Resume what was interrupted, and let all be heard that was said, until nothing is left."""
        numbers = iter(range(_MANY))
        while True:
            open_runs = [info.id for info in await self.cp.unfinished()]
            await asyncio.gather(*(self.agent(thread).resume() for thread in open_runs))
            unheard = [thread for thread in threads if await self.cp.inbox(thread)]
            if not open_runs and not unheard:
                return
            await asyncio.gather(*(self.prompt(thread, f"{thread}:p-end{next(numbers)}") for thread in unheard))


async def act(cast: Cast, name: str, own: int, plan: Plan) -> None:
    """What one process does: prompt threads of its own, and those that it shares with others."""
    async with asyncio.TaskGroup() as group:
        for number in range(own):
            thread = f"{name}-{number}"
            group.create_task(cast.prompt(thread, *(f"{thread}:p{n}" for n in range(plan.prompts))))
        for number in range(plan.shared):
            group.create_task(cast.prompt(f"shared-{number}", *(f"shared-{number}:p-{name}-{n}" for n in range(3))))


# --- other processes --------------------------------------------------------------------------------------------------


class Other:
    """A process with a store of its own. What it notes comes to the same diary."""

    def __init__(self, name: str, place: postgres.Schema, plan: Plan, note: Note) -> None:
        self.name, self.acknowledged = name, 0
        self._note = note
        self._opened = threading.Event()
        self._changed = threading.Condition()
        self.is_over = False
        arguments = [name, place.dsn, place.name, json.dumps(plan)]
        command = [sys.executable, "-W", "error", "-m", "tests.crash.postgres_chaos", "--process", *arguments]
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `finish`
        pipe, complaints = subprocess.PIPE, self._complaints
        self.process = subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=complaints, text=True)
        self._reader = threading.Thread(target=self._read, name=f"reads {name}")
        self._reader.start()

    def begin(self) -> None:
        """Let it go on from where it has opened the database."""
        assert self.process.stdin is not None
        self._opened.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def kill_after(self, count: int) -> None:
        """Kill it when so much of what it does was acknowledged."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.acknowledged >= count)
        self.process.kill()

    def finish(self) -> str:
        """Wait for its end. Returns what went wrong with it."""
        if self._complaints.closed:
            return ""
        self._reader.join()
        code = self.process.wait()
        self._complaints.seek(0)
        complaints = self._complaints.read()
        for pipe in (self.process.stdin, self.process.stdout, self._complaints):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        return f"{self.name} ended with {code}: {complaints}" if code or complaints else ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                break  # it was killed in the middle
            what, thread, value = json.loads(line)
            if what == "open":
                self._opened.set()
                continue
            self._note(what, thread, value)
            with self._changed:
                self.acknowledged += 1
                self._changed.notify_all()
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
        self._opened.set()


def be_other(name: str, dsn: str, schema: str, plan: Plan) -> None:
    def say(what: str, thread: str, value: str) -> None:
        os.write(1, json.dumps([what, thread, value]).encode() + b"\n")

    async def main() -> None:
        async with PostgresCheckpointer(dsn, schema=schema) as cp:
            say("open", "", "")
            await asyncio.to_thread(sys.stdin.readline)
            cast = Cast(cp, say, random.Random(name))
            shares = plan._replace(shared=0) if name.startswith("killed") else plan
            await act(cast, name, plan.their_threads, shares)
            assert cast.flaws == []

    asyncio.run(main())


@contextlib.contextmanager
def others(place: postgres.Schema, plan: Plan, note: Note) -> Iterator[list[Other]]:
    names = [f"other{n}" for n in range(plan.processes)] + [f"killed{n}" for n in range(plan.killed)]
    running = [Other(name, place, plan, note) for name in names]
    try:
        yield running
    finally:
        for other in running:
            other.process.kill()
            other.finish()


# --- a scene ----------------------------------------------------------------------------------------------------------


def play(place: postgres.Schema, plan: Plan, seed: object, disturb: Callable[[Diary], None]) -> tuple[Diary, list[str]]:
    """Let it all happen while something disturbs it, from a thread of its own. Returns what is wrong in the end."""
    return asyncio.run(_play(place, plan, random.Random(f"{seed}"), disturb))


async def _play(
    place: postgres.Schema, plan: Plan, chance: random.Random, disturb: Callable[[Diary], None]
) -> tuple[Diary, list[str]]:
    diary = Diary()
    async with asyncio.timeout(plan.patience), PostgresCheckpointer(place.dsn, schema=place.name) as cp:
        cast = Cast(cp, diary.note, chance)
        with others(place, plan, diary.note) as running:
            disturbing = asyncio.create_task(asyncio.to_thread(disturb, diary))
            try:
                wrong = await _act_all(cast, plan, running)
            finally:
                diary.end()
                await disturbing
        await cast.wind_up(list(diary.tried))
        wrong += cast.flaws + await judge(cp, diary)
    return diary, wrong


async def _act_all(cast: Cast, plan: Plan, running: list[Other]) -> list[str]:
    for other in running:
        await asyncio.to_thread(other.begin)
    async with asyncio.TaskGroup() as group:
        group.create_task(act(cast, "own", plan.threads, plan))
        for number in range(plan.writers):
            group.create_task(cast.append(f"written-{number}", plan.appends))
        names = [f"own-{n}" for n in range(plan.threads)]
        names += [f"{other.name}-{n}" for other in running for n in range(plan.their_threads)]
        for thread in cast.chance.sample(names, int(len(names) * plan.spoken)):
            group.create_task(cast.speak(thread, f"{thread}:s"))
        for other in running:
            if other.name.startswith("killed"):
                count = cast.chance.randrange(10, 20 * plan.their_threads)
                group.create_task(asyncio.to_thread(other.kill_after, count))
    ended = [await asyncio.to_thread(other.finish) for other in running]
    return [wrong for wrong in ended if wrong and not wrong.startswith("killed")]


# --- the judgement ----------------------------------------------------------------------------------------------------


async def judge(cp: Checkpointer, diary: Diary) -> list[str]:
    """All that is in the database and should not be, or the other way round."""
    wrong = []
    for thread in diary.tried:
        loaded = await cp.load(thread)
        messages = loaded.messages if loaded else []
        wrong += [f"{thread}: {what}" for what in _judge_messages(diary, thread, messages)]
        wrong += [f"{thread}: {what}" for what in await _judge_tools(cp, diary, thread, messages)]
        if waiting := await cp.inbox(thread):
            wrong.append(f"{thread}: {waiting} was never heard")
    if left := await cp.unfinished():
        wrong.append(f"not finished: {left}")
    return wrong + [f"rows that do not fit: {row}" for row in await cp.store.read(_odd_rows)]


def _judge_messages(diary: Diary, thread: str, messages: list[Message]) -> Iterator[str]:
    ids = [str(getattr(message, "id", None)) for message in messages]
    there = Counter(message.text for message in messages if isinstance(message, UserMessage))
    yield from (f"the id {twice} is there {n} times" for twice, n in Counter(ids).items() if n > 1)
    yield from (f"{text!r} is there {n} times" for text, n in there.items() if n > diary.tried[thread][text])
    yield from (f"{text!r} was acknowledged, and is lost" for text in diary.said[thread] if not there[text])
    known = set(diary.stored[thread])
    if [i for i in ids if i in known] != diary.stored[thread]:
        yield f"acknowledged in this order: {diary.stored[thread]}; there is {ids}"
    yield from (f"the result {i} was acknowledged, and is lost" for i in {*diary.settled[thread]} - {*ids})
    answers = Counter(message.text for message in messages if isinstance(message, AssistantMessage))
    for text in diary.answered[thread]:
        if there[text] != 1 or answers[f"answer to {text}"] > 1:
            yield f"{text!r} is there {there[text]} times, answered {answers[f'answer to {text}']} times"
    if thread.startswith("written-"):
        if [message.text for message in messages] != diary.said[thread]:
            yield f"appended were {diary.said[thread]}, there is {[message.text for message in messages]}"
        return
    yield from flaws(valid_history(messages))
    yield from _judge_runs(messages, diary.given_up)


def _judge_runs(messages: list[Message], given_up: set[str]) -> Iterator[str]:
    """Each thing that was said has its run to itself: nobody's calls or prompts get in between."""
    starts = [position for position, message in enumerate(messages) if isinstance(message, UserMessage)]
    for start, end in itertools.pairwise([*starts, len(messages)]):
        text, run = messages[start].text, messages[start + 1 : end]
        calls = [call.id for message in run if isinstance(message, AssistantMessage) for call in message.tool_calls]
        due = [f"{text}/{n}/{name}" for n in range(ROUNDS) for name in ("never", "retry")]
        if calls != due[: len(calls)]:
            yield f"after {text!r} these tools were called: {calls}"
        # Somebody spoke into it, or prompted before it was resumed.
        is_cut_short = end < len(messages) and (":p" not in messages[end].text or text in given_up)
        if not is_cut_short and (calls != due or run[-1].text != f"answer to {text}"):
            yield f"the run of {text!r} has no end: {[message.text for message in run]}"


async def _judge_tools(cp: Checkpointer, diary: Diary, thread: str, messages: list[Message]) -> list[str]:
    records = {record.idempotency_key: record for record in await cp.tool_calls(thread)}
    wrong = [f"{record} has no end" for record in records.values() if record.ended_at is None]
    for key, record in records.items():
        runs, most = diary.runs[key], 1 if record.recovery == "never" else record.attempts
        if runs > most:
            wrong.append(f"a tool with the policy {record.recovery} ran {runs} times: {record}")
        if diary.ended.get(key, runs) != runs:
            wrong.append(f"a tool ran again after its end: {record}")
        if record.status == "done" and runs == 0:
            wrong.append(f"a tool is said to have run, and did not: {record}")
    results = Counter(message.text for message in messages if isinstance(message, ToolResultMessage))
    did = {text: n for text, n in results.items() if text.startswith("did ")}
    wrong += [f"{text!r} is there {n} times" for text, n in did.items() if n > 1]
    return wrong + [f"{text!r} was done by nobody" for text in did if text.removeprefix("did ") not in records]


def _odd_rows(tx: Tx) -> list[Row]:
    """Threads whose count, head or versions do not fit their messages; runs and leases that nobody has any more."""
    return tx.all(
        "SELECT * FROM (SELECT id, message_count, head, version, lease_owner, run,"
        " (SELECT count(*) FROM messages WHERE messages.branch = threads.branch) AS held,"
        " (SELECT max(seq) FROM messages WHERE messages.branch = threads.branch) AS last FROM threads) AS found"
        " WHERE message_count <> held OR last > head OR version < 1 OR lease_owner IS NOT NULL OR run IS NOT NULL"
    )


# --- disturbances -----------------------------------------------------------------------------------------------------


def cutting(cutter: Cutter) -> Callable[[Diary], None]:
    """Let the wire break as soon as all have opened the database."""

    def begin(diary: Diary) -> None:
        cutter.is_sharp = diary.wait_for(1)

    return begin


class Restarts:
    """Restarts the server each time when something more was acknowledged; how long the first word after that took."""

    def __init__(self, server: postgres.Server, chance: random.Random, every: int) -> None:
        self._server, self._chance, self._every = server, chance, every
        self.count = 0
        self.seconds: list[float] = []  # from the server's start to the next acknowledgement

    def __call__(self, diary: Diary) -> None:
        while diary.wait_for(diary.count + self._chance.randrange(1, 2 * self._every)):
            if self._chance.random() < 0.2:
                self._server.kill()
            else:
                self._server.stop("immediate")
            self._server.start()
            up, before = time.monotonic(), diary.count
            self.count += 1
            if diary.wait_for(before + 1):
                self.seconds.append(time.monotonic() - up)


class Failover:
    """Kills the primary when so much was acknowledged, and promotes its standby."""

    def __init__(self, primary: postgres.Server, standby: postgres.Server, after: int) -> None:
        self._primary, self._standby, self._after = primary, standby, after
        self.before = 0  # what the old primary has acknowledged

    def __call__(self, diary: Diary) -> None:
        if diary.wait_for(self._after):
            self._primary.kill()
            self.before = diary.count
            self._standby.promote()


# --- the long form ----------------------------------------------------------------------------------------------------


def chaos(server: postgres.Server, plan: Plan, seed: object, every: int) -> tuple[str, list[str]]:
    """A scene with restarts and a wire that breaks. Returns what there is to tell, and what is wrong."""
    chance = random.Random(f"disturbing {seed}")
    began = time.monotonic()
    restarts = Restarts(server, chance, every)
    # A group of writes is hundreds of packets: were each in danger, none would ever come through.
    anywhere, at_commits = chance.choice([(0.0, 0.0), (0.0005, 0.01), (0.001, 0.05), (0.002, 0.02)])
    with Cutter(server.port, chance, anywhere, at_commits) as cutter:

        def disturb(diary: Diary) -> None:
            cutting(cutter)(diary)
            restarts(diary)

        diary, wrong = play(schema_on(server, cutter.port), plan, seed, disturb)
    slowest = max(restarts.seconds, default=0)
    told = (
        f"{restarts.count} restarts (first word after {slowest:.2f} s at most), {cutter.cuts} cuts, "
        f"{cutter.lost_answers} lost answers to COMMIT, {diary.count} acknowledged, "
        f"{len(diary.given_up)} runs given up, {time.monotonic() - began:.1f} s"
    )
    return told, wrong


def failover(plan: Plan, seed: object, after: int, **settings: str) -> tuple[str, list[str]]:
    """A scene in which the primary dies and its synchronous standby takes over."""
    began = time.monotonic()
    with postgres.running(**settings) as primary, primary.standby() as standby:
        disturbance = Failover(primary, standby, after)
        diary, wrong = play(schema_on(primary, standby.port, primary.port), plan, seed, disturbance)
        wrong += [] if disturbance.before else ["there was no failover"]
    told = (
        f"failover after {disturbance.before} of {diary.count} acknowledged, {len(diary.given_up)} runs given up, "
        f"{time.monotonic() - began:.1f} s"
    )
    return told, wrong


def drawn(seed: int, number: int) -> tuple[str, Plan, int]:
    """A scene, and how much is acknowledged between two disturbances: the same for the same seed and number."""
    chance = random.Random(f"{seed} {number}")
    plan = Plan(
        threads=chance.choice([50, 200, 400]),
        prompts=chance.choice([1, 2, 4]),
        shared=chance.choice([0, 2, 5]),
        appends=chance.choice([10, 50, 200]),
        spoken=chance.choice([0, 0.3, 1.0]),
        processes=chance.choice([0, 1, 2]),
        killed=chance.choice([0, 1, 2]),
        patience=300,
    )
    kind = chance.choice(["restarts", "restarts", "restarts", "failover"])
    if kind == "failover":
        return kind, plan, chance.randrange(1, plan.threads * plan.prompts * 5)
    return kind, plan, plan.threads * plan.prompts * chance.choice([1, 3])


def tell(server: postgres.Server, seed: int, number: int) -> list[str]:
    kind, plan, every = drawn(seed, number)
    print(f"seed {seed}, scene {number}: {kind}, {every}, {plan}", flush=True)
    name = f"{seed} {number}"
    try:
        if kind == "restarts":
            told, wrong = chaos(server, plan, name, every)
        else:
            told, wrong = failover(plan, name, every, fsync="on")
    except Exception:
        told, wrong = "it broke off", [traceback.format_exc()]
    print(f"  {told}: {'a promise was broken' if wrong else 'all well'}", flush=True)
    for what in wrong[:20]:
        print(f"  {what[:2000]}")
    return wrong


def main() -> int:
    options = _options()
    for name in ("psycopg", "byssus"):  # they warn of each lost connection, and of each write that took long
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if options.process:
        name, dsn, schema, plan = options.process
        be_other(name, dsn, schema, Plan(*json.loads(plan)))
        return 0
    deadline = time.monotonic() + options.minutes * 60
    with postgres.running() as server:
        if options.scene is not None:
            return 1 if tell(server, options.seed, options.scene) else 0
        for number in itertools.count():
            if time.monotonic() > deadline:
                print(f"seed {options.seed}: {number} scenes, all well")
                return 0
            if tell(server, options.seed, number):
                print(f"again: python -m tests.crash.postgres_chaos --seed {options.seed} --scene {number}")
                return 1
    return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.postgres_chaos")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--scene", type=int, help="the number of a scene of the seed")
    parser.add_argument("--process", nargs=4, help="be another process of a scene (for itself)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
