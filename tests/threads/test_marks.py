"""Marks and summaries belong to what a thread reads: they follow it everywhere, and nobody else's come along."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, keep_last
from byssus.maintenance.export import export_thread, export_user
from byssus.memory import InMemoryMemory, Msg
from byssus.memory.stored import StoredMemory
from byssus.queries.log import threads
from byssus.queries.log.threads import END
from byssus.queries.versions import checkpoints
from byssus.store.database import Tx
from byssus.values.thread_key import ThreadKey
from tests.support.checkpointers import loaded, texts
from tests.support.databases import Database
from tests.support.marks import marked, memory_on, stray

Use = Callable[[Checkpointer, StoredMemory], Awaitable[None]]


def with_memory(database: Database, use: Use) -> None:
    """A checkpointer, and the memory that its thread `t` is."""

    async def main() -> None:
        async with database.checkpointer() as cp, memory_on(database.place, "t") as memory:
            await use(cp, memory)
            await whole(cp)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def beside(database: Database, thread_id: str) -> AsyncIterator[StoredMemory]:
    async with memory_on(database.place, thread_id) as memory:
        yield memory


def msgs(*names: str) -> list[Msg]:
    made = [Msg("user", f"text {name}", "user") for name in names]
    for message, name in zip(made, names, strict=True):
        message.id = name
    return made


async def filled(memory: StoredMemory, size: int = 5) -> None:
    """Messages 1 to `size`; the odd ones are marked, and there is a summary."""
    for n in range(1, size + 1):
        await memory.add(msgs(str(n)), ["odd", "b", "a", "b"] if n % 2 else None)
    await memory.update_compressed_summary("in short")


async def ids(memory: StoredMemory, mark: str | None = None) -> list[str]:
    return [message.id for message in await memory.get_memory(mark, prepend_summary=False)]


async def whole(cp: Checkpointer) -> None:
    """Everything that is counted is right, and no mark is where it should not be."""
    found = await cp.check()
    assert found["problems"] == []
    for info in await cp.threads():
        assert info.message_count == len(await texts(cp, info.id)), info.id


async def bodies(cp: Checkpointer, thread_id: str = "t") -> list[object]:
    """The messages of a thread, just as they were given."""

    def query(tx: Tx) -> list[object]:
        thread = checkpoints.thread_state(tx, ThreadKey("", thread_id))
        assert thread is not None
        return [
            json.loads(body) for _, body, _ in threads.page_as_given(tx, thread.branch, after=0, upto=END, limit=999)
        ]

    return await cp.store.read(query)


def checkpoint(name: str, step: int, messages: list[object]) -> Checkpoint:
    return Checkpoint(CheckpointMetadata("t", name, step=step), messages)


ODD = ["odd", "b", "a", "b"]
ALL = ('"in short"', {1: ODD, 3: ODD, 5: ODD})


# --- forks and rewinds ------------------------------------------------------------------------------------------------


def test_a_fork_begins_with_the_marks_and_the_summary_and_has_its_own_from_then_on(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await cp.fork("t", new_id="fork")
        assert await marked(cp, "fork") == await marked(cp, "t") == ALL
        async with beside(database, "fork") as fork:
            await fork.update_messages_mark("of the fork", "odd", ["1"])
            await fork.update_compressed_summary("the fork's")
            await fork.add(msgs("6"), "new")
            assert await marked(cp, "t") == ALL
            await memory.update_messages_mark(None, "b")
            await memory.update_messages_mark("of the origin")
            await memory.update_compressed_summary("")
            assert await ids(fork, "of the origin") == []
            assert await ids(fork, "of the fork") == ["1"]
            assert await ids(fork, "odd") == ["3", "5"]
            assert await fork.compressed_summary() == "the fork's"
            assert (await marked(cp, "fork"))[1][1] == ["b", "a", "b", "of the fork"]
            assert (await marked(cp, "t"))[1] == {
                1: ["odd", "a", "b", "of the origin"],
                2: ["of the origin"],
                3: ["odd", "a", "b", "of the origin"],
                4: ["of the origin"],
                5: ["odd", "a", "b", "of the origin"],
            }

    with_memory(database, use)


@pytest.mark.parametrize("seq", [0, 1, 2, 3, 5])
def test_a_fork_and_a_rewind_take_the_marks_up_to_where_they_part(database: Database, seq: int) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await cp.fork("t", seq, new_id="fork")
        expected = {n: ODD for n in (1, 3, 5) if n <= seq}
        assert await marked(cp, "fork") == ('"in short"', expected)
        name = await cp.rewind("t", seq)
        assert await marked(cp, "t") == ('"in short"', expected)
        await memory.add(msgs("new"))  # takes the place of another one, and none of its marks
        assert await marked(cp, "t") == ('"in short"', expected)
        assert await ids(memory, "odd") == [str(n) for n in expected]
        await memory.update_messages_mark(None, "odd")
        await cp.rewind("t", name)  # back where it was
        assert await marked(cp, "t") == ALL

    with_memory(database, use)


def test_what_the_origin_marks_after_the_fork_is_not_the_forks_to_see(database: Database) -> None:
    """Not even where the fork goes back to a checkpoint that both show."""

    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await memory.add(msgs("1", "2", "3"), "early")
        await cp.put(checkpoint("c", 1, await bodies(cp)))
        await memory.add(msgs("4"), "early")
        await cp.fork("t", new_id="fork")
        await memory.update_messages_mark("secret")
        await memory.update_compressed_summary("secret")
        async with beside(database, "fork") as fork:
            await fork.update_messages_mark("own", msg_ids=["2", "4"])
            await fork.update_compressed_summary("mine")
        await cp.rewind("fork", "c")
        await cp.fork("fork", "c", new_id="grandchild")
        for name in ("fork", "grandchild"):
            assert await marked(cp, name) == ('"mine"', {1: ["early"], 2: ["early", "own"], 3: ["early"]})
        await cp.fork("t", "c", new_id="sibling")
        assert await marked(cp, "sibling") == ('"secret"', {n: ["early", "secret"] for n in (1, 2, 3)})
        lines = [line async for line in export_thread(cp.store, "fork")]
        assert not any("secret" in line for line in lines)
        assert any('"own"' in line for line in lines)

    with_memory(database, use)


def test_a_fork_from_before_a_memory_was_cleared_finds_messages_that_an_agent_has_written(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await cp.append("t", [UserMessage("one"), UserMessage("two")])
        await cp.put(checkpoint("c", 1, [*(await loaded(cp, "t")).messages]))
        before = await ids(memory)
        await memory.clear()
        await memory.add(msgs("1"))
        await cp.fork("t", "c", new_id="fork")
        async with beside(database, "fork") as fork:
            assert await ids(fork) == before
            assert await fork.delete(before[:1]) == 1
            assert await texts(cp, "fork") == ["two"]
        await cp.rewind("t", "c")
        assert await memory.delete(before[1:]) == 1
        assert await texts(cp, "t") == ["one"]

    with_memory(database, use)


# --- checkpoints that somebody puts -----------------------------------------------------------------------------------


def test_a_list_that_goes_another_way_keeps_the_marks_of_what_it_keeps(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        told = await bodies(cp)
        await cp.put(checkpoint("a", 1, [*told[:3], {"role": "user", "content": "other"}]))
        assert await marked(cp, "t") == ('"in short"', {1: ODD, 3: ODD})
        assert await ids(memory, "odd") == ["1", "3"]
        await cp.put(checkpoint("b", 2, [*told[:3], {"role": "user", "content": "other"}, told[4]]))
        assert await marked(cp, "t") == ('"in short"', {1: ODD, 3: ODD})  # it says the same, and is another message

    with_memory(database, use)


def test_a_last_message_that_is_replaced_again_and_again_leaves_the_other_marks(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        told = await bodies(cp)
        for step in range(1, 15):
            await cp.put(checkpoint(f"c{step}", step, [*told, {"role": "user", "content": f"state {step}"}]))
            await memory.update_messages_mark(f"at {step}", None if step == 1 else f"at {step - 1}", ["2"])
            told.append({"role": "user", "content": f"step {step}"})
        worn = (await marked(cp, "t"))[1]
        assert {seq: marks for seq, marks in worn.items() if marks == ODD} == {1: ODD, 3: ODD, 5: ODD}
        assert worn[2] == ["at 14"]
        assert len(worn) == 4
        for step in (1, 7, 14):  # what was left has the marks of then
            await cp.fork("t", f"c{step}", new_id=f"fork {step}")
            assert (await marked(cp, f"fork {step}"))[1] == {**worn, 2: [f"at {step}"]}

    with_memory(database, use)


# --- messages that are changed and deleted ----------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [None, "fork", "checkpoint"])
def test_a_message_that_is_edited_keeps_its_marks(database: Database, shared: str | None) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await share(cp, shared)
        await cp.update_message("t", "3", content="edited")
        assert await marked(cp, "t") == ALL
        assert [message.content for message in await memory.get_memory("odd", prepend_summary=False)] == [
            "text 1",
            "edited",
            "text 5",
        ]
        assert await ids(memory, "odd") == ["1", "3", "5"]
        await cp.update_message("t", "3", content="again")
        assert await marked(cp, "t") == ALL
        await shows_all(cp, shared)

    with_memory(database, use)


async def share(cp: Checkpointer, how: str | None) -> None:
    if how == "fork":
        await cp.fork("t", new_id="fork")
    elif how == "checkpoint":
        before = await marked(cp, "t")
        await cp.put(checkpoint("c", 1, await bodies(cp)))
        assert await marked(cp, "t") == before


async def shows_all(cp: Checkpointer, how: str | None, size: int = 5) -> None:
    """Whoever else reads the messages of `t` has them all, with their marks."""
    if how is None:
        return
    if how == "checkpoint":
        await cp.fork("t", "c", new_id="fork")
    assert await texts(cp, "fork") == [f"text {n}" for n in range(1, size + 1)]
    told, worn = await marked(cp, "fork")
    assert (told, worn) == ('"in short"', dict.fromkeys(range(1, size + 1, 2), ODD))


@pytest.mark.parametrize("shared", [None, "fork", "checkpoint"])
def test_a_message_that_is_deleted_takes_its_marks_along_and_stays_where_others_read_it(
    database: Database, shared: str | None
) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await share(cp, shared)
        assert await memory.delete(["3", "4", "no such"]) == 2
        assert await ids(memory) == ["1", "2", "5"]
        assert await marked(cp, "t") == ('"in short"', {1: ODD, 5: ODD})
        assert await memory.size() == 3
        assert await memory.delete_by_mark(["odd", "other"]) == 2
        assert await marked(cp, "t") == ('"in short"', {})
        await memory.add(msgs("3"))
        assert await ids(memory) == ["2", "3"]
        assert await ids(memory, "odd") == []
        await whole(cp)
        await shows_all(cp, shared)

    with_memory(database, use)


@pytest.mark.parametrize("shared", [None, "fork", "checkpoint"])
def test_a_memory_that_is_cleared_is_empty_and_others_have_what_they_share(
    database: Database, shared: str | None
) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await share(cp, shared)
        await memory.clear()
        assert await marked(cp, "t") == ('"in short"', {})
        assert (await ids(memory), await memory.size()) == ([], 0)
        await memory.add(msgs("1", "2"))
        assert await ids(memory, "odd") == []
        assert await ids(memory) == ["1", "2"]
        await whole(cp)
        await shows_all(cp, shared)
        if shared is None:
            assert await stray(cp) == []

    with_memory(database, use)


@pytest.mark.parametrize("shared", [None, "fork", "checkpoint"])
def test_of_many_messages_that_are_deleted_none_is_missed_and_none_too_many(
    database: Database, shared: str | None
) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        names = [str(n) for n in range(1, 101)]
        for n in range(0, 100, 2):
            await memory.add(msgs(names[n]), ODD)
            await memory.add(msgs(names[n + 1]))
        await memory.update_compressed_summary("in short")
        await share(cp, shared)
        for doomed in (names[10:20], names[15:40:3], names[50:52], names[99:]):
            await memory.delete(doomed)
            names = [name for name in names if name not in doomed]
            assert await ids(memory) == names
            assert await ids(memory, "odd") == [name for name in names if int(name) % 2]
            assert await memory.size() == len(names)
        assert await memory.delete_by_mark("a") == len([name for name in names if int(name) % 2])
        assert await ids(memory) == [name for name in names if int(name) % 2 == 0]
        await whole(cp)
        await shows_all(cp, shared, 100)

    with_memory(database, use)


def test_deletions_from_a_shared_memory_do_not_copy_its_marks_each_time(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        names = [str(n) for n in range(1, 41)]
        await memory.add(msgs(*names), "m")
        await cp.fork("t", new_id="fork")
        for name in names[:30]:
            await memory.delete([name])
        assert await count(cp, "marks") == 40 + 10
        assert await count(cp, "segments") < 40
        for name in names[30:]:
            await cp.update_message("t", name, content="edited")
        assert await count(cp, "marks") == 40 + 10
        assert await stray(cp) == []

    with_memory(database, use)


# --- what comes back --------------------------------------------------------------------------------------------------


def test_a_users_memory_that_was_exported_and_erased_comes_back_and_goes_on(database: Database) -> None:
    async def use(cp: Checkpointer, _: StoredMemory) -> None:
        async with memory_on(database.place, "main", "ann") as memory:
            await filled(memory)
            await memory.delete(["2", "4"])
            before = await marked(cp, "main", "ann")
            lines = [line async for line in export_user(cp.store, "ann")]
            await cp.erase_user("ann")
            assert (await memory.size(), await memory.compressed_summary()) == (0, "")
            await cp.import_from(lines, trusted=True)
            assert await marked(cp, "main", "ann") == before
            assert [line async for line in export_user(cp.store, "ann")] == lines
            assert await is_named(cp, "main", "ann")
            await memory.add(msgs("1", "6"), "new")  # of which it has the first
            assert await ids(memory) == ["1", "3", "5", "6"]
            assert await memory.delete(["3", "6"]) == 2
        await cp.append("t", [UserMessage("one"), UserMessage("two")])
        await cp.import_from([line async for line in export_thread(cp.store, "t")], as_id="copy")
        assert not await is_named(cp, "copy", "")
        async with beside(database, "copy") as memory:
            assert await memory.delete((await ids(memory))[:1]) == 1

    with_memory(database, use)


async def is_named(cp: Checkpointer, thread_id: str, namespace: str) -> bool:
    """Whether messages are found by their ids through an index."""

    def query(tx: Tx) -> bool:
        where = "id = :id AND namespace = :namespace AND named = 1"
        return tx.one(f"SELECT 1 FROM threads WHERE {where}", id=thread_id, namespace=namespace) is not None

    return await cp.store.read(query)


# --- what goes --------------------------------------------------------------------------------------------------------


def test_a_prune_takes_marks_along_with_their_messages(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await cp.rewind("t", 2)
        await memory.add(msgs("new"))
        assert await marked(cp, "t") == ('"in short"', {1: ODD})
        assert (await cp.prune("t", keep_last(1))).messages == 3
        assert await marked(cp, "t") == ('"in short"', {1: ODD})
        assert await stray(cp) == []
        assert await count(cp, "marks") == len(ODD)
        await memory.add(msgs("4", "5"))  # rows that may get the keys of those that went
        assert await marked(cp, "t") == ('"in short"', {1: ODD})

    with_memory(database, use)


def test_what_a_thread_has_left_keeps_no_marks_when_it_goes(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await cp.fork("t", new_id="fork")
        for n in range(1, 6):  # each on another branch, because the fork reads it
            await memory.delete([str(n)])
        await cp.delete_thread("fork")
        await cp.prune("t", keep_last(1))
        assert await count(cp, "marks") == 0
        assert await stray(cp) == []
        assert (await marked(cp, "t"))[0] == '"in short"'

    with_memory(database, use)


async def count(cp: Checkpointer, table: str) -> int:
    def query(tx: Tx) -> int:
        row = tx.one(f"SELECT COUNT(*) FROM {table}")
        assert row is not None
        return int(row[0])

    return await cp.store.read(query)


def test_a_deleted_thread_leaves_no_mark_and_no_summary(database: Database) -> None:
    async def use(cp: Checkpointer, memory: StoredMemory) -> None:
        await filled(memory)
        await cp.fork("t", 3, new_id="fork")
        await cp.rewind("t", 2)
        await cp.delete_thread("t")
        assert await marked(cp, "fork") == ('"in short"', {1: ODD, 3: ODD})
        assert await count(cp, "marks") == 2 * len(ODD)
        await cp.delete_thread("fork")
        assert await count(cp, "marks") == await count(cp, "branches") == 0
        await memory.add(msgs("1", "2", "3"))
        assert await marked(cp, "t") == ("", {})

    with_memory(database, use)


@pytest.mark.large
def test_a_check_beside_memories_that_are_written_to_finds_nothing_wrong(database: Database) -> None:
    async def busy(cp: Checkpointer, name: str) -> None:
        async with beside(database, name) as memory:
            for turn in range(12):
                await memory.add(msgs(*(f"{turn}-{n}" for n in range(4))), ["m", "n"])
                await cp.fork(name, new_id=f"fork {turn} of {name}")
                await memory.delete([f"{turn}-1"])
                await memory.update_messages_mark("n", "m")
                await cp.rewind(name, 2)
                await memory.delete_by_mark("n")
                await cp.prune(name, keep_last(1))
                await memory.clear()
                await cp.delete_thread(f"fork {turn} of {name}")

    async def main() -> None:
        async with database.checkpointer() as cp:
            writers = asyncio.gather(busy(cp, "t"), busy(cp, "u"))
            while not writers.done():
                found = await cp.check(deep=False)
                assert found["problems"] == []
            await writers
            await whole(cp)

    asyncio.run(main())


# --- all of it at random ----------------------------------------------------------------------------------------------


class Beside:
    """A thread as it should be, in a list of this process; and the memory that it is."""

    def __init__(self, database: Database, name: str, state: dict[str, Any] | None = None) -> None:
        self.name = name
        self.stored = memory_on(database.place, name)
        self.model = InMemoryMemory()
        self.model.load_state_dict(state or {"content": []})

    async def both(self, method: str, *args: Any) -> None:
        ours, theirs = [await getattr(each, method)(*args) for each in (self.stored, self.model)]
        assert ours == theirs

    def keep(self, count: int) -> None:
        state = self.model.state_dict()
        self.model.load_state_dict({**state, "content": state["content"][:count]})

    async def agrees(self, cp: Checkpointer) -> None:
        told, worn = await marked(cp, self.name, all_of_them=True)
        state = self.model.state_dict()
        assert list(worn.values()) == [marks for _, marks in state["content"]]
        assert (json.loads(told) if told else "") == state["_compressed_summary"]
        for mark in (None, "a", "b"):
            ours, theirs = [await each.get_memory(mark) for each in (self.stored, self.model)]
            assert [message.content for message in ours] == [message.content for message in theirs]
        assert await self.stored.size() == await self.model.size()


async def remember(one: Beside, chance: random.Random, number: int) -> None:
    """Something that a memory does."""
    there = [message.id for message in await one.model.get_memory(prepend_summary=False)]
    some = chance.sample(there, chance.randrange(min(3, len(there)) + 1))
    match chance.choice(("add", "add", "add", "mark", "mark", "delete", "delete", "delete_by_mark", "clear", "sum up")):
        case "add":
            new = msgs(*(f"{number}-{n}" for n in range(chance.randrange(1, 4))))
            await one.both("add", new, chance.choice([None, "a", ["b", "a", "b"]]))
        case "mark":
            marks = chance.choice([("a", None), ("b", "a"), (None, "b"), ("c", "b")])
            await one.both("update_messages_mark", *marks, chance.choice([None, some]))
        case "delete":
            await one.both("delete", some)
        case "delete_by_mark" if number % 3 == 0:
            await one.both("delete_by_mark", "c")
        case "clear" if number % 4 == 0:
            await one.both("clear")
        case "sum up":
            await one.both("update_compressed_summary", f"summary {number}")


async def move(
    cp: Checkpointer, database: Database, everyone: list[Beside], one: Beside, chance: random.Random, number: int
) -> None:
    """Something that happens to a thread."""
    seqs = sorted((await marked(cp, one.name, all_of_them=True))[1])
    count = chance.randrange(len(seqs) + 1)
    seq = seqs[count - 1] if count else 0
    match chance.choice(("fork", "rewind", "put", "edit", "edit", "prune", "delete")):
        case "fork" if len(everyone) < 5:
            await cp.fork(one.name, seq, new_id=f"fork {number}")
            everyone.append(Beside(database, f"fork {number}", one.model.state_dict()))
            everyone[-1].keep(count)
        case "rewind":
            await cp.rewind(one.name, seq)
            one.keep(count)
        case "put":
            (new,) = msgs(f"{number}")
            given = [*(await bodies(cp, one.name))[:count], new.to_dict()]
            await cp.put(Checkpoint(CheckpointMetadata(one.name, f"c{number}", step=number), given))
            one.keep(count)
            await one.model.add(new)
        case "edit" if count:
            state = one.model.state_dict()
            message = state["content"][count - 1][0]
            message["content"] = f"edited {number}"
            await cp.update_message(one.name, message["id"], content=message["content"])
            one.model.load_state_dict(state)
        case "prune":
            await cp.prune(one.name, keep_last(1))
        case "delete" if len(everyone) > 2:
            everyone.remove(one)
            await cp.delete_thread(one.name)
            await one.stored.close()


@pytest.mark.large
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_done_to_threads_each_has_the_marks_that_it_should(database: Database, seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        async with database.checkpointer() as cp:
            everyone = [Beside(database, "t")]
            await everyone[0].both("add", msgs("1", "2", "3"), ["a", "b"])
            for number in range(10, 70):
                one = chance.choice(everyone)
                if chance.random() < 0.6:
                    await remember(one, chance, number)
                else:
                    await move(cp, database, everyone, one, chance, number)
                for each in everyone:
                    await each.agrees(cp)
            await whole(cp)
            for each in everyone:
                await cp.delete_thread(each.name)
                await each.stored.close()
            assert await count(cp, "marks") == await count(cp, "branches") == 0

    asyncio.run(main())
