"""Random puts, appends, forks, rewinds, prunes and deletions: a database and a plain model agree after each."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.messages import UserMessage
from byssus.queries.log import threads
from byssus.store.database import Tx
from byssus.threads.encoding import message_row
from byssus.values.checkpoints import Checkpoint, CheckpointMetadata, Tree, keep_last, keep_tagged
from byssus.values.thread_key import ThreadKey
from tests.support.checkpoints import UNREACHABLE, Log, Model, Saved, Thread, Value, count, spoken, text_of, values
from tests.support.databases import Database

T = TypeVar("T")

EXAMPLES = int(os.environ.get("BYSSUS_EXAMPLES", "8"))
TABLES = ("hidden", "inherited", "checkpoints", "tool_calls", "messages", "segments", "branches", "threads")
any_number = st.integers(0, 40)
any_values = st.lists(st.sampled_from([value for text in "ab" for value in spoken(text)]), max_size=3)
any_tags = st.lists(st.sampled_from(["keep", "other"]), max_size=1)
any_place = st.sampled_from(["head", "checkpoint", "seq"])


class Versions(RuleBasedStateMachine):
    """One database beside the model. What a rule does to either, the invariants compare."""

    def __init__(self, cp: Checkpointer, runner: asyncio.Runner) -> None:
        super().__init__()
        self.cp, self.runner = cp, runner
        self.model = Model()
        self.numbers = itertools.count(1)

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(doing)

    def some_thread(self, number: int) -> str:
        return sorted(self.model.threads)[number % len(self.model.threads)]

    def some_point(self, name: str, kind: str, number: int) -> str | int | None:
        thread = self.model.threads[name]
        if kind == "seq":
            return number % (len(thread.log) + 1)
        names = sorted({saved.id for saved in thread.shown()})
        return names[number % len(names)] if kind == "checkpoint" and names else None

    # --- writing ------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """What a failed example has left would be taken for a failure of the next one."""
        self.cp.store.write_now(_clear)

    @rule(name=st.sampled_from(["t", "u"]), said=any_values)
    def append(self, name: str, said: list[Value]) -> None:
        if said:
            self.run(self.cp.append(name, said))
            self.model.append(name, said)

    @rule(name=st.sampled_from(["t", "u"]), number=any_number, keep=any_number, said=any_values, tags=any_tags)
    def put_anywhere(self, name: str, number: int, keep: int, said: list[Value], tags: list[str]) -> None:
        self._put(name, f"c{number % 4}", keep % 7, keep, said, tags)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, number=any_number, step=st.integers(0, 6), keep=any_number, said=any_values, tags=any_tags)
    def put(self, which: int, number: int, step: int, keep: int, said: list[Value], tags: list[str]) -> None:
        self._put(self.some_thread(which), f"c{number % 6}", step, keep, said, tags)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, said=any_values, tags=any_tags)
    def put_next(self, which: int, said: list[Value], tags: list[str]) -> None:
        name = self.some_thread(which)
        steps = [saved.step for saved in self.model.threads[name].line]
        self._put(name, f"n{next(self.numbers)}", max(steps, default=0) + 1, 40, said, tags)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, times=st.integers(2, 12))
    def revise(self, which: int, times: int) -> None:
        """Go on by a message each time, with a last one that is different each time."""
        name = self.some_thread(which)
        for number in range(times):
            thread = self.model.threads[name]
            keep = max(len(values(thread.log)) - (number > 0), 0)
            said: list[Value] = [UserMessage(f"word {number}"), UserMessage(f"draft {number}")]
            self._put(name, "draft", max((saved.step for saved in thread.line), default=0), keep, said, [])

    def _put(self, name: str, checkpoint_id: str, step: int, keep: int, said: list[Value], tags: list[str]) -> None:
        there = values(self.model.thread(name).log)
        given, state = [*there[:keep], *said], {"n": next(self.numbers)}
        about = CheckpointMetadata(name, checkpoint_id, step, tags=tags)
        assert self.run(self.cp.put(Checkpoint(about, given, state))) == checkpoint_id
        left = self.model.put(name, given, id=checkpoint_id, step=step, state=state, tags=tags)
        if left:
            self._find_left(name, left, checkpoint_id)

    def _find_left(self, name: str, log: Log, put: str) -> None:
        """What a put has left is in the tree: under the name that it had, or under a new one."""
        thread = self.model.threads[name]
        known = {saved.id for saved in thread.shown()}
        new = [about for about in self._tree(name).left if about.checkpoint_id not in known]
        if new:
            (about,) = new
            line = [saved for saved in thread.lines[-1] if saved.id != put]
            thread.lines.insert(-1, line)
            self._learn(thread, line, log, about, thread.extra)
        else:
            assert any(values(saved.log) == values(log) for saved in thread.shown()), "what was left is gone"

    def _learn(
        self, thread: Thread, line: list[Saved], log: Log, about: CheckpointMetadata, extra: dict[str, Any]
    ) -> None:
        assert about.tags == ["left"]
        name, step = about.checkpoint_id, about.step
        self.model.save(thread, line, log, id=name, step=step, state={}, tags=["left"], extra=extra)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, reserve=st.integers(1, 2), said=any_values)
    def reply(self, which: int, reserve: int, said: list[Value]) -> None:
        name = self.some_thread(which)
        asking = list(spoken("ask"))[2]
        self.cp.store.write_now(threads.append, ThreadKey("", name), [message_row(asking)], reserve=reserve)
        self.model.append(name, [asking], reserve)

    @precondition(lambda self: any(thread.open_places() for thread in self.model.threads.values()))
    @rule(which=any_number, number=any_number)
    def fill(self, which: int, number: int) -> None:
        waiting = sorted(name for name, thread in self.model.threads.items() if thread.open_places())
        name = waiting[which % len(waiting)]
        places = self.model.threads[name].open_places()
        seq, result = places[number % len(places)], UserMessage(f"result {next(self.numbers)}")
        self.cp.store.write_now(threads.fill, ThreadKey("", name), [(seq, message_row(result))])
        self.model.fill(name, seq, result)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number)
    def save_extra(self, which: int) -> None:
        name, extra = self.some_thread(which), {"extra": next(self.numbers)}
        self.run(self.cp.save_extra(name, extra))
        self.model.threads[name].extra = extra

    # --- going elsewhere ----------------------------------------------------------------------------------------------

    @precondition(lambda self: 0 < len(self.model.threads) < 6)
    @rule(which=any_number, kind=any_place, number=any_number)
    def fork(self, which: int, kind: str, number: int) -> None:
        name, new = self.some_thread(which), f"fork {next(self.numbers)}"
        at = self.some_point(name, kind, number)
        assert self.run(self.cp.fork(name, at, new_id=new)) == new
        self.model.fork(name, new, at)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, kind=any_place, number=any_number)
    def rewind(self, which: int, kind: str, number: int) -> None:
        name = self.some_thread(which)
        to = self.some_point(name, kind, number)
        if to is None:
            return
        thread = self.model.threads[name]
        log, extra, line = thread.log, thread.extra, thread.line
        stood = self.run(self.cp.rewind(name, to))
        known = None if stood is None else thread.find(stood)
        self.model.rewind(name, to)
        if stood is None:
            assert not log
        elif known is not None:
            assert (values(known[1].log), known[1].extra) == (values(log), extra)
        else:
            (about,) = (about for about in self._tree(name).left if about.checkpoint_id == stood)
            self._learn(thread, line, log, about, extra)

    # --- removing -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, last=st.integers(1, 3), tags=any_tags)
    def prune(self, which: int, last: int, tags: list[str]) -> None:
        name = self.some_thread(which)
        before = self._count("messages")
        removed = self.run(self.cp.prune(name, keep_last(last) | (keep_tagged(*tags) if tags else keep_last(1))))
        assert sorted(removed.checkpoints) == sorted(self.model.prune(name, last, tags))
        assert removed.messages == before - self._count("messages")

    @precondition(lambda self: self.model.threads)
    @rule()
    def prune_all(self) -> None:
        for name in self.model.threads:
            assert self.run(self.cp.prune(name, keep_last(1_000) | keep_tagged("left", "keep", "other"))) is not None
            self.model.prune(name, 1_000, ["left", "keep", "other"])
        assert self.cp.store.read_now(lambda tx: tx.all(UNREACHABLE)) == []

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number, step=st.integers(0, 7))
    def delete_before(self, which: int, step: int) -> None:
        name = self.some_thread(which)
        assert self.run(self.cp.delete_before(name, step)) == self.model.delete_before(name, step)

    @precondition(lambda self: self.model.threads)
    @rule(which=any_number)
    def delete_thread(self, which: int) -> None:
        name = self.some_thread(which)
        assert self.run(self.cp.delete_thread(name)) == self.model.delete(name)

    def teardown(self) -> None:
        """When all threads are deleted, nothing is left of them."""
        for name in list(self.model.threads):
            self.delete_thread(0)
            assert self.run(self.cp.load(name)) is None or name in self.model.threads
        assert {table: self._count(table) for table in TABLES} == dict.fromkeys(TABLES, 0)

    # --- looking ------------------------------------------------------------------------------------------------------

    @invariant()
    def both_agree(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        everyone = self.model.threads
        names = sorted({saved.id for thread in everyone.values() for saved in thread.shown()})
        await asyncio.gather(
            self._compare_lists(),
            *(self._compare_thread(name, thread) for name, thread in everyone.items()),
            *(self._compare_checkpoint(name, thread, each) for name, thread in everyone.items() for each in names),
            *(self._compare_name(each) for each in names),
        )

    async def _compare_lists(self) -> None:
        everyone = self.model.threads
        listed = await self.cp.list_threads()
        latest = {name: thread.listed()[0].id for name, thread in everyone.items() if thread.line}
        assert {about.thread_id: about.checkpoint_id for about in listed} == latest
        assert [about.created_at for about in listed] == sorted((a.created_at for a in listed), reverse=True)
        assert {info.id for info in await self.cp.threads()} == set(everyone)

    async def _compare_thread(self, name: str, thread: Thread) -> None:
        loaded, info, listed, some, tree, latest = await asyncio.gather(
            self.cp.load(name),
            self.cp.info(name),
            self.cp.list_checkpoints(name),
            self.cp.list_checkpoints(name, 2, 1),
            self.cp.tree(name),
            self.cp.get_latest(name),
        )
        assert loaded is not None
        assert info is not None
        assert tree is not None
        assert [message.text for message in loaded.messages] == [text_of(value) for value in values(thread.log)]
        assert (loaded.extra, info.message_count) == (thread.extra, len(loaded.messages))
        expected = thread.listed()
        assert [(a.checkpoint_id, a.step, a.tags) for a in listed] == [(s.id, s.step, s.tags) for s in expected]
        assert some == listed[1:3]
        _assert_is(latest, expected[0] if expected else None)
        in_tree = {(about.checkpoint_id, about.step) for about in (*tree.checkpoints, *tree.left)}
        made_here = {(saved.id, saved.step) for saved in thread.shown() if saved.home is thread}
        assert made_here <= in_tree <= {(saved.id, saved.step) for saved in thread.shown()}

    async def _compare_checkpoint(self, name: str, thread: Thread, checkpoint_id: str) -> None:
        found = thread.find(checkpoint_id)
        _assert_is(await self.cp.get(checkpoint_id, name), found[1] if found else None)

    async def _compare_name(self, checkpoint_id: str) -> None:
        homes = self.model.named(checkpoint_id)
        if len(homes) > 1:
            with pytest.raises(InputError, match="more than one thread"):
                await self.cp.get(checkpoint_id)
        else:
            (home,) = homes
            found = await self.cp.get(checkpoint_id)
            assert found is not None
            assert found.metadata.thread_id == home

    def _tree(self, name: str) -> Tree:
        tree = self.run(self.cp.tree(name))
        assert tree is not None
        return tree

    def _count(self, table: str) -> int:
        return self.cp.store.read_now(count(table))


def _assert_is(found: Checkpoint | None, saved: Saved | None) -> None:
    if saved is None:
        assert found is None
        return
    assert found is not None
    assert (found.metadata.checkpoint_id, found.metadata.step, found.state) == (saved.id, saved.step, saved.state)
    assert found.messages == values(saved.log)


def _clear(tx: Tx) -> None:
    for table in TABLES:
        tx.run(f"DELETE FROM {table}")


@pytest.mark.large
@pytest.mark.timeout(600)  # half a minute; what fails is made small first, and that takes longer
def test_a_database_and_the_model_agree_whatever_is_done(database: Database) -> None:
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    with asyncio.Runner() as runner:
        cp = database.checkpointer(durability="normal")
        runner.run(cp.open())

        class Here(Versions):
            def __init__(self) -> None:
                super().__init__(cp, runner)

        try:
            run_state_machine_as_test(Here, settings=limits)
        finally:
            runner.run(cp.close())
