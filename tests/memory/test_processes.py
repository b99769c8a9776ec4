"""Several real processes with one memory, some of which are killed: nothing is lost, doubled, or there by half."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

import pytest

from byssus.memory import Msg
from tests.support.databases import Database
from tests.support.memories import children, hear, ids, msgs, outcome, stored, tell

pytestmark = pytest.mark.processes

ADD_MANY = """
async def main():
    ours = memory("s")
    await ours.size()
    ready()
    for n in range(100):
        await ours.add(msg(f"text {n}", f"{sys.argv[2]}-{n}"), f"of {sys.argv[2]}")

asyncio.run(main())
"""
ADD_THE_SAME = """
async def main():
    ours = memory("s")
    await ours.size()
    ready()
    for n in range(40):
        await ours.add([msg(sys.argv[2], f"{n}"), msg(sys.argv[2], f"also {n}")], ["seen", "seen"])

asyncio.run(main())
"""
ADD_BATCHES = """
async def main():
    ours = memory(sys.argv[2])
    await ours.size()
    ready()
    n = 0
    while True:
        await ours.add([msg("x" * 500, f"{n}-{place}") for place in range(50)], [f"batch {n}", "m"])
        say(n)
        n += 1

asyncio.run(main())
"""
COMPRESS = """
async def main():
    ours = memory("s")
    await ours.size()
    ready()
    for n in range(60):
        assert await ours.mark_compressed([f"{n}"], f"{n + 1}", expected=str(n) if n else "") == 1
    say("done")

asyncio.run(main())
"""


def everything(
    database: Database, mark: str | None = None, session_id: str = "s", exclude: str | None = None
) -> list[Msg]:
    async def main() -> list[Msg]:
        async with stored(database, "ann", session_id) as memory:
            found: list[Msg] = await memory.get_memory(mark, exclude)
            return found

    return asyncio.run(main())


def test_what_several_processes_add_is_all_there_once_in_each_ones_order_and_without_a_gap(database: Database) -> None:
    with children(database, ADD_MANY, 4) as processes:
        tell(*processes)
        assert [outcome(process) for process in processes] == [(0, "", "")] * 4
    found = ids(everything(database))
    assert Counter(found) == Counter(f"{number}-{n}" for number in range(4) for n in range(100))
    for number in range(4):
        own = [f"{number}-{n}" for n in range(100)]
        assert [name for name in found if name in set(own)] == own
        assert ids(everything(database, f"of {number}")) == own
    with database.store() as store:
        seqs = store.read_now(lambda tx: tx.all("SELECT seq FROM messages ORDER BY seq"))
    assert [seq for (seq,) in seqs] == list(range(1, 401))


def test_the_same_id_from_several_processes_is_stored_once_with_the_marks_of_the_first(database: Database) -> None:
    with children(database, ADD_THE_SAME, 4) as processes:
        tell(*processes)
        assert [outcome(process) for process in processes] == [(0, "", "")] * 4
    found = everything(database)
    assert ids(found) == [name for n in range(40) for name in (f"{n}", f"also {n}")]
    for one, other in zip(found[::2], found[1::2], strict=True):  # a call is whole, whoever came first
        assert one.content == other.content

    async def main() -> list[int]:
        async with stored(database, "ann", "s") as memory:
            return [await memory.update_messages_mark(None, "seen") for _ in range(3)]

    assert asyncio.run(main()) == [80, 80, 0]


def test_of_processes_that_are_killed_in_the_middle_each_batch_is_whole_or_absent(database: Database) -> None:
    chance = random.Random(7)
    with children(database, ADD_BATCHES, 6) as processes:
        for number, process in enumerate(processes):
            tell(process)
            hear(process, "0")
            time.sleep(chance.random() * 0.03)  # somewhere in the middle, wherever that is
            os.kill(process.pid, signal.SIGKILL)
            code, said, _ = outcome(process)
            assert code == -signal.SIGKILL
            answered = 1 + len(said.split("\n")[:-1])
            check_batches(database, f"{number}", answered)


def check_batches(database: Database, session_id: str, answered: int) -> None:
    """What was answered is there, and at most one batch more; each of them whole, with all its marks.

    A server may still commit that one while we look, so that each look must hold by itself.
    """
    found = ids(everything(database, session_id=session_id))
    batches = len(found) // 50
    assert batches in (answered, answered + 1)
    assert found == [f"{n}-{place}" for n in range(batches) for place in range(50)]
    assert everything(database, session_id=session_id, exclude="m") == []
    for n in range(batches):
        assert ids(everything(database, f"batch {n}", session_id)) == [f"{n}-{place}" for place in range(50)]


def test_a_reader_never_sees_marks_without_the_summary_that_stands_for_them(database: Database) -> None:
    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            await memory.add(msgs(*map(str, range(60))))
            with children(database, COMPRESS, 1) as (process,):
                tell(process)
                seen: set[int] = set()
                while len(left := await memory.get_memory(exclude_mark="compressed")) > 1 or not seen:
                    told = int(left[0].content) if left and left[0].content.isdigit() else 0
                    names = ids(left)[1:] if told else ids(left)
                    assert names == [str(n) for n in range(told, 60)]
                    seen.add(told)
                    assert process.poll() in (None, 0)
                hear(process, "done")
                assert outcome(process) == (0, "", "")
            assert left[0].content == "60"

    asyncio.run(main())
