"""A process that does everything at once is killed again and again; the next one goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from byssus import UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.errors import AnswerNeeded, InputError, NotFound, NothingToResume, ThreadBusy
from tests.crash import databases
from tests.crash.place import Place
from tests.crash.stage import runs
from tests.crash.stage.actors import Actor, Line, apart
from tests.crash.stage.judge import Found, acknowledged, expect, judge, judge_order

_USER, _TOKENS = "alice", 10**9


class Life:
    """What one process does. Its name makes all that it writes its own."""

    def __init__(self, line: Line, cp: Checkpointer, place: Place, name: str, seed: float) -> None:
        self.line, self.cp, self.place, self.name = line, cp, place, name
        self.chance = random.Random(seed)
        self.numbers = itertools.count()

    async def all_at_once(self) -> None:
        await asyncio.gather(*(self._again_and_again(act) for act in self._acts()))

    def _acts(self) -> list[Callable[[], Awaitable[object]]]:
        acts: list[Callable[[], Awaitable[object]]] = [self.append, self.append, self.prompt, self.prompt]
        return [*acts, self.put, self.fork, self.session, self.spend, self.queue, self.find, self.move, self.save]

    async def _again_and_again(self, act: Callable[[], Awaitable[object]]) -> None:
        for _ in range(10_000):
            with self.line.trying(act.__name__), contextlib.suppress(ThreadBusy, NotFound):
                await act()
            await asyncio.sleep(0)

    def _text(self) -> str:
        return f"{self.name}-{next(self.numbers)}"

    async def append(self) -> None:
        texts = [self._text() for _ in range(self.chance.choice([1, 1, 5]))]
        thread = f"appended-{self.chance.randrange(3)}"
        await self.cp.append(thread, [UserMessage(text) for text in texts])
        for text in texts:
            self.line.say("stored", thread=thread, text=text)

    async def prompt(self) -> None:
        thread = f"run-{self.name}-{self.chance.randrange(4)}"
        calls, recovery = self.chance.choice([1, 3]), self.chance.choice(["never", "retry"])
        agent = runs.agent(self.line, self.cp, self.place, thread, calls=calls, recovery=recovery)
        await agent.prompt(self._text())

    async def put(self) -> None:
        name = self._text()
        about = CheckpointMetadata("put", name, step=next(self.numbers))
        await self.cp.put(Checkpoint(about, [UserMessage(name)], {"name": name}))
        self.line.say("put", name=name)

    async def fork(self) -> None:
        name = self._text()
        await self.cp.fork("appended-0", new_id=f"fork-{name}")
        if self.chance.random() < 0.5:
            await self.cp.append(f"fork-{name}", UserMessage(name))
            self.line.say("stored", thread=f"fork-{name}", text=name)
        if self.chance.random() < 0.3:
            await self.cp.rewind(f"fork-{name}", 0)
            self.line.say("rewound", thread=f"fork-{name}")

    async def session(self) -> None:
        name = self._text()
        await self.cp.create_session(_USER, session_id=f"session-{name}")
        await self.cp.save_message(f"session-{name}", "user", name)
        self.line.say("stored", thread=f"session-{name}", text=name)
        await self.cp.create_task(f"session-{name}", "kind", {"n": 1})

    async def spend(self) -> None:
        if await self.cp.consume_quota(_USER, 1):
            self.line.say("spent")

    async def queue(self) -> None:
        name = self._text()
        await self.cp.steer("queued", name)
        self.line.say("queued", text=name)

    async def find(self) -> None:
        await self.cp.search(self.name)
        await self.cp.index()

    async def move(self) -> None:
        """Out and in again under another name."""
        lines = [line async for line in self.cp.export_thread("appended-1")]
        name = f"imported-{self._text()}"
        await self.cp.import_from(lines, as_id=name)
        await self.cp.delete_thread(name)

    async def save(self) -> None:
        await self.cp.save_extra("appended-2", {"name": self._text()})


def everything(chance: random.Random, directory: Path, place: Place) -> None:
    """A process appends, prompts, forks, searches, imports and more at once, and is killed with SIGKILL."""

    async def begin() -> None:
        async with place.checkpointer() as cp:
            await cp.create_user("Alice", user_id=_USER, quota_total=_TOKENS)
            for number in range(3):
                await cp.append(f"appended-{number}", UserMessage("begun"))

    apart(begin)
    lives = []
    for number in range(chance.randint(1, 3)):
        lives.append(_live(chance, place, f"life{number}"))
        databases.settled(place)
    ended = apart(lambda: _take_up(place))
    told = acknowledged(lives)
    for thread in {line["thread"] for life in lives for line in life.lines("rewound")}:
        told.pop(thread, None)
    found = judge(place, told)
    judge_order(found, {thread: texts for thread, texts in told.items() if thread.startswith("run-")})
    _judge_rest(lives, ended, found)
    runs.judge_tools(place)


def _live(chance: random.Random, place: Place, name: str) -> Actor:
    async def live(line: Line) -> None:
        async with place.checkpointer() as cp:
            await Life(line, cp, place, name, seed).all_at_once()

    seed, count = chance.random(), chance.choice([1, 30, 100, 300])
    with Actor(name, live) as actor:
        for _ in range(count):
            actor.hear("stored", "put", "spent", "queued", "done")
        actor.listen_for(chance.choice([0, 0, 0.01, 0.1]))
        actor.kill()
    return actor


async def _take_up(place: Place) -> dict[str, object]:
    """As a service does when it starts: resume what was interrupted. Then look at the rest."""

    class Quiet(Line):
        def say(self, what: str, **more: object) -> None:
            assert what != "odd", more

    async with place.checkpointer() as cp:
        for info in await cp.unfinished():
            with contextlib.suppress(NothingToResume, AnswerNeeded):
                await runs.agent(Quiet(0, 0), cp, place, info.id, recovery="retry").resume()
        left = [info.id for info in await cp.unfinished()]
        user = await cp.get_user(_USER)
        assert user is not None
        puts = {about.checkpoint_id for about in await _checkpoints(cp)}
        queued = [waiting.message.text for waiting in await cp.inbox("queued")]
        return {"left": left, "spent": user["quota_used"], "puts": puts, "queued": queued}


async def _checkpoints(cp: Checkpointer) -> list[CheckpointMetadata]:
    try:
        return await cp.list_checkpoints("put", limit=10**6)
    except InputError:
        return []


def _judge_rest(lives: list[Actor], ended: dict[str, object], found: Found) -> None:
    puts, queued, spent, left = (ended[name] for name in ("puts", "queued", "spent", "left"))
    assert isinstance(puts, set)
    assert isinstance(queued, list)
    assert isinstance(spent, int)
    lost = [line["name"] for life in lives for line in life.lines("put") if line["name"] not in puts]
    expect(not lost, "checkpoints are lost", lost[:5])
    said = [line["text"] for life in lives for line in life.lines("queued")]
    expect([text for text in queued if text in set(said)] == said, "what was queued is lost, or in disorder")
    acked = sum(len(life.lines("spent")) for life in lives)
    expect(acked <= spent <= acked + len(lives), f"{acked} tokens were spent, and {spent} are counted")
    expect(left == [], "runs are left that nobody can finish", left)
