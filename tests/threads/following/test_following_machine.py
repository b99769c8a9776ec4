"""A follower that is cut anywhere, any number of times, with rewinds, forks and deletions between: it sees the log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from byssus import AssistantMessage, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import CursorUnknown
from byssus.queries.log import threads
from byssus.threads.encoding import message_row
from byssus.values.thread_key import ThreadKey
from tests.support.databases import Database
from tests.support.following import Client, told
from tests.support.leases import agent_on

T = TypeVar("T")
EXAMPLES = int(os.environ.get("BYSSUS_EXAMPLES", "12"))
names = st.sampled_from(["t", "u"])


class Followed(RuleBasedStateMachine):
    """Two threads, and a client of each that reads a part of what a follower is told whenever it is its turn."""

    def __init__(self, cp: Checkpointer, runner: asyncio.Runner) -> None:
        super().__init__()
        self.cp, self.runner = cp, runner
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
        self.run(agent_on(self.cp, [self._new()], name, checkpoint_every="turn").prompt(self._new()))

    @rule(name=names, calls=st.integers(1, 3))
    def leave_slots(self, name: str, calls: int) -> None:
        """A reply whose tool results are not there yet; one of them comes, and not the first."""
        row = message_row(AssistantMessage(self._new()))
        place = ThreadKey("", name)
        position = self.cp.store.write_now(threads.append, place, [row], reserve=calls)
        result = message_row(UserMessage(self._new()))
        self.cp.store.write_now(threads.fill, place, [(position.head, result)])

    @rule(name=names, at=st.integers(0, 60))
    def rewind(self, name: str, at: int) -> None:
        head = self.run(self._head(name))
        if head:
            self.run(self.cp.rewind(name, to=at % (head + 1)))

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

    # --- the clients --------------------------------------------------------------------------------------------------

    @rule(name=names, count=st.integers(0, 30))
    def read_a_part(self, name: str, count: int) -> None:
        self._read(name, count)

    def _read(self, name: str, count: int | None) -> None:
        if not self.run(self._head(name)):
            self.clients[name] = Client()  # there is nothing to follow: a new client begins
            return
        client = self.clients[name]
        try:
            client.see(self.run(told(self.cp, name, after=client.cursor))[:count])
        except CursorUnknown:  # the thread was deleted, or what was read was removed: begin anew
            self.clients[name] = Client()
            self._read(name, count)

    @rule(name=names)
    def catch_up(self, name: str) -> None:
        self._read(name, None)
        thread = self.run(self.cp.load(name))
        assert self.clients[name].log == ([] if thread is None else thread.messages)

    @invariant()
    def nothing_came_twice(self) -> None:
        assert [client.twice for client in self.clients.values()] == [[], []]


@pytest.mark.large
def test_a_follower_that_is_cut_anywhere_sees_the_log(database: Database) -> None:
    with asyncio.Runner() as runner:
        cp = runner.run(database.checkpointer().open())
        try:
            run_state_machine_as_test(
                lambda: Followed(cp, runner),  # type: ignore[arg-type]
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
