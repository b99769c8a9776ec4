"""A follower that is cut anywhere, any number of times, in any of three processes, sees the log, runs and the title.

Between its parts, threads are rewound, forked and deleted, and replies arrive, end or die with their process.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from byssus import Agent, AssistantMessage, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import CursorUnknown
from byssus.queries.following import rows as following
from byssus.queries.log import branches, threads
from byssus.store.database import Tx
from byssus.threads.encoding import message_row
from byssus.values.following.items import FollowItem, item_from_json
from byssus.values.thread_key import ThreadKey
from tests.support import processes
from tests.support.agents import Acted
from tests.support.approvals import Deleting, delete
from tests.support.databases import Database
from tests.support.following import Client, Told, told
from tests.support.leases import agent_on, die, expire, until
from tests.support.processes import Child

T = TypeVar("T")
EXAMPLES = int(os.environ.get("BYSSUS_EXAMPLES", "8"))
names = st.sampled_from(["t", "u"])
whichever = st.integers(0, 2)  # 0: the one in which everything happens
parts = st.none() | st.integers(0, 30)  # how many items a follower reads; None: until it has caught up

FOLLOW = """
from contextlib import aclosing
from byssus.checkpointer import checkpointer_for

async def part(cp, name, after, count):
    items = []
    async with aclosing(cp.follow(name, after=after)) as following:
        async for item in following:
            if len(items) == count:
                break
            items.append(item.to_json())
            if item.type == "caught_up":
                break
    return items

async def main():
    async with checkpointer_for(sys.argv[1]) as cp:
        for line in sys.stdin:
            try:
                print(json.dumps(await part(cp, *json.loads(line))), flush=True)
            except CursorUnknown:
                print("null", flush=True)

asyncio.run(main())
"""


class Followed(RuleBasedStateMachine):
    """Two threads, and a client of each that reads a part of what a follower is told whenever it is its turn."""

    def __init__(self, cp: Checkpointer, runner: asyncio.Runner, others: list[Child]) -> None:
        super().__init__()
        self.cp, self.runner, self.others = cp, runner, others
        self.clients = {"t": Client(), "u": Client()}
        self.number = 0

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(doing)

    @initialize()
    def begin(self) -> None:
        for name in self.clients:
            self.run(self.cp.delete_thread(name))

    def _new(self) -> str:
        self.number += 1
        return f"{self.number}"

    async def _head(self, name: str) -> int:
        row = await self.cp.store.read(threads.find, ThreadKey("", name))
        return 0 if row is None else row.head

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(name=names, count=st.integers(1, 40))
    def append(self, name: str, count: int) -> None:
        self.run(self.cp.append(name, [UserMessage(self._new()) for _ in range(count)]))

    @rule(name=names)
    def talk(self, name: str) -> None:
        """A run; the one that an answered question had stopped is given up for it."""
        self._prompt(name, [self._new()], checkpoint_every="turn")

    @rule(name=names, answered=st.booleans())
    def give_up(self, name: str, *, answered: bool) -> None:
        """A run asks a person, the client sees that, and another run begins or the thread is rewound."""
        self.ask(name)
        self._read(name, 0, None)
        if answered:
            self.answer(name)
            self.talk(name)
        elif self.run(self._head(name)):
            self.rewind(name, self.number, then=True)

    @rule(name=names)
    def ask(self, name: str) -> None:
        self._prompt(name, [[delete(self._new())]])

    def _prompt(self, name: str, script: list[Any], **options: Any) -> None:
        if not self.run(self.cp.pending(name)):
            self.run(agent_on(self.cp, script, name, tools=[Deleting().tool], **options).prompt(self._new()))

    @rule(name=names)
    def answer(self, name: str) -> None:
        for call in self.run(self.cp.pending(name)):
            self.run(self.cp.answer(name, call.call_id, "deny"))

    @rule(name=names, calls=st.integers(1, 3))
    def leave_slots(self, name: str, calls: int) -> None:
        """A reply whose tool results are not there yet; one of them comes, and not the first."""
        row = message_row(AssistantMessage(self._new()))
        place = ThreadKey("", name)
        position = self.cp.store.write_now(threads.append, place, [row], reserve=calls)
        result = message_row(UserMessage(self._new()))
        self.cp.store.write_now(threads.fill, place, [(position.head, result)])

    @rule(name=names, at=st.integers(0, 60), then=st.booleans())
    def rewind(self, name: str, at: int, *, then: bool) -> None:
        """To any place; perhaps another run begins there."""
        head = self.run(self._head(name))
        if head:
            self.run(self.cp.rewind(name, to=at % (head + 1)))
            if then:
                self.talk(name)

    @rule(at=st.integers(0, 60))
    def fork(self, at: int) -> None:
        head = self.run(self._head("t"))
        if head:
            self.run(self.cp.delete_thread("u"))
            self.run(self.cp.fork("t", at=at % (head + 1), new_id="u"))

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.run(self.cp.delete_thread(name))

    @rule(name=names, title=st.text(max_size=3))
    def set_title(self, name: str, title: str) -> None:
        if self.run(self._head(name)):
            self.run(self.cp.set_title(name, title))

    @rule(name=names, looks=st.lists(st.tuples(whichever, parts), min_size=1, max_size=3), ends=st.booleans())
    def arrive(self, name: str, looks: list[tuple[int, int | None]], ends: bool) -> None:
        """A reply arrives, while the client reads parts of it in any process; it ends, or dies with its process."""
        if self.run(self.cp.pending(name)):
            return
        scene = Told()
        agent = agent_on(self.cp, Acted(scene), name, save_partial=0.005, tools=[Deleting().tool])
        run = self.run(self._prompted(agent, self._new()))
        for number, (process, count) in enumerate(looks):
            scene.say(f"{number} said ")
            self.run(until(lambda number=number: self._is_saved(name, f"{number} said ")))  # type: ignore[misc]
            self._read(name, process, count)
        scene.end()
        self.run(finished(run) if ends else self._died(agent, run))

    async def _died(self, agent: Agent, run: asyncio.Task[Any]) -> None:
        await die(self.cp, agent, run)
        await expire(self.cp)

    async def _prompted(self, agent: Agent, text: str) -> asyncio.Task[Any]:
        return asyncio.create_task(agent.prompt(text))

    async def _is_saved(self, name: str, text: str) -> bool:
        thread = await self.cp.load(name)
        return thread is not None and thread.partial is not None and thread.partial.text.endswith(text)

    # --- the clients --------------------------------------------------------------------------------------------------

    @rule(name=names, process=whichever, count=parts)
    def read_a_part(self, name: str, process: int, count: int | None) -> None:
        self._read(name, process, count)

    def _read(self, name: str, process: int, count: int | None) -> None:
        if not self.run(self._head(name)):
            self.clients[name] = Client()  # there is nothing to follow: a new client begins
            return
        client = self.clients[name]
        items = self._items(name, client.cursor, process, count)
        if items is None:  # the thread was deleted, or what was read was removed: begin anew
            self.clients[name] = Client()
            self._read(name, process, count)
        else:
            client.see(items)

    def _items(self, name: str, after: str | None, process: int, count: int | None) -> list[FollowItem] | None:
        if process:
            items = json.loads(self.others[process - 1].ask(json.dumps([name, after, count])))
            return None if items is None else [item_from_json(item) for item in items]
        try:
            return self.run(told(self.cp, name, after=after))[:count]
        except CursorUnknown:
            return None

    @rule(name=names, process=whichever)
    def catch_up(self, name: str, process: int) -> None:
        self._read(name, process, None)
        thread = self.run(self.cp.load(name))
        assert self.clients[name].log == ([] if thread is None else thread.messages)
        if thread is not None:
            title, runs = self.cp.store.read_now(_beside, ThreadKey("", name))
            assert self.clients[name].title == title
            assert {run: self.clients[name].runs[run] for run in runs} == runs

    @invariant()
    def nothing_came_twice(self) -> None:
        assert [client.twice for client in self.clients.values()] == [[], []]


def _beside(tx: Tx, thread_key: ThreadKey) -> tuple[str, dict[str, str | None]]:
    """The title of a thread, and why its runs stopped that no rewind has left."""
    row = following.find(tx, thread_key)
    assert row is not None
    segments = branches.segments_of(tx, row.branch)
    rows = tx.all("SELECT id, branch, first_seq, stop_reason FROM runs WHERE thread = :thread", thread=row.key)
    return row.title, {name: why for name, at, seq, why in rows if any(each.has(at, seq) for each in segments)}


async def finished(run: asyncio.Task[Any]) -> None:
    await run


@pytest.mark.large
@pytest.mark.processes
def test_a_follower_that_is_cut_anywhere_in_any_process_sees_the_log(database: Database) -> None:
    with (
        asyncio.Runner() as runner,
        processes.started(FOLLOW, database.place) as one,
        processes.started(FOLLOW, database.place) as two,
    ):
        cp = runner.run(database.checkpointer().open())
        try:
            run_state_machine_as_test(
                lambda: Followed(cp, runner, [one, two]),  # type: ignore[arg-type]
                settings=settings(
                    max_examples=EXAMPLES,
                    stateful_step_count=15,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    database=None,
                ),
            )
        finally:
            runner.run(cp.close())
