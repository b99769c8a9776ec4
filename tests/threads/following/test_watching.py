"""Following a thread: each message once, in order, whoever writes it."""

from __future__ import annotations

import asyncio
import textwrap
from contextlib import aclosing
from typing import Any

import pytest

from byssus import ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, StoreNotOpen
from byssus.messages import Message
from tests.support import forked
from tests.support.checkpointers import texts, with_cp
from tests.support.databases import Database
from tests.support.leases import agent_on

WRITE = """
    import asyncio, sys
    from byssus import UserMessage
    from byssus.checkpointer import checkpointer_for

    async def main():
        async with checkpointer_for(sys.argv[1]) as cp:
            for line in sys.stdin:
                await cp.append("t", UserMessage(line.strip()))

    asyncio.run(main())
"""


class Following:
    """A task that follows a thread and keeps what it hears."""

    def __init__(self, cp: Checkpointer, thread_id: str = "t") -> None:
        self.heard: list[Message] = []
        self._changed = asyncio.Event()
        self._watching = cp.watch(thread_id)
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for message in self._watching:
            self.heard.append(message)
            self._changed.set()

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(20):
            while len(self.heard) < count:
                await self._changed.wait()
                self._changed.clear()
        return [message.text for message in self.heard]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def test_it_begins_with_what_is_there_and_goes_on_with_what_is_added(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("one"), UserMessage("two")])
        following = Following(cp)
        assert await following.until(2) == ["one", "two"]
        await cp.append("t", UserMessage("three"))
        assert await following.until(3) == ["one", "two", "three"]
        await following.stop()

    with_cp(database, use)


@pytest.mark.processes
def test_what_another_process_writes_is_heard(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        with forked.Process(["-c", textwrap.dedent(WRITE), database.place], stdin=forked.PIPE) as writer:
            assert writer.stdin is not None
            for number in range(3):
                writer.stdin.write(f"{number}\n")
                writer.stdin.flush()
                assert await following.until(number + 1) == [str(n) for n in range(number + 1)]
            writer.stdin.close()
        assert writer.returncode == 0
        await following.stop()

    with_cp(database, use)


def test_results_of_parallel_tools_are_heard_once_whichever_ends_first(database: Database) -> None:
    let_go = asyncio.Event()

    @tool
    async def slow() -> str:
        await let_go.wait()
        return "slow"

    @tool
    async def quick() -> str:
        return "quick"

    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        script: list[Any] = [[ToolCall("1", "slow"), ToolCall("2", "quick")], "done", "bye"]
        agent = agent_on(cp, script, tools=[slow, quick])
        run = asyncio.create_task(agent.prompt("go"))
        assert (await following.until(3))[2] == "quick"
        let_go.set()
        assert (await run).text == "done"
        await agent.prompt("more")
        assert await following.until(7) == ["go", "", "quick", "slow", "done", "more", "bye"]
        assert sorted(await following.until(7)) == sorted(await texts(cp, "t"))
        await following.stop()

    with_cp(database, use)


def test_a_long_thread_is_heard_whole_and_in_order(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        said = [f"{number}" for number in range(2_500)]
        await cp.append("t", [UserMessage(text) for text in said])
        following = Following(cp)
        assert await following.until(2_500) == said
        await following.stop()

    with_cp(database, use)


def test_other_threads_are_not_heard(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        following = Following(cp)
        await cp.append("another", UserMessage("no"))
        await cp.append("t", UserMessage("yes"))
        assert await following.until(1) == ["yes"]
        await following.stop()

    with_cp(database, use)


def test_breaking_out_of_the_loop_ends_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("one"))
        async with aclosing(cp.watch("t")) as watching:
            async for message in watching:
                assert message.text == "one"
                break

    with_cp(database, use)


def test_it_ends_with_an_error_when_the_checkpointer_is_closed(database: Database) -> None:
    async def main() -> None:
        cp = await database.checkpointer().open()
        watching = cp.watch("t")
        waiting = asyncio.ensure_future(anext(watching))
        await cp.append("other", UserMessage("x"))
        await cp.close()
        with pytest.raises(StoreNotOpen):
            await waiting

    asyncio.run(main())


def test_a_thread_id_that_is_none_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="thread id"):
            cp.watch("")

    with_cp(database, use)


def test_after_a_rewind_what_is_said_from_there_on_is_heard(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(text) for text in ("a", "b", "c")])
        following = Following(cp)
        await following.until(3)
        await cp.rewind("t", to=1)
        await cp.append("t", [UserMessage(text) for text in ("d", "e", "f")])
        assert await following.until(6) == ["a", "b", "c", "d", "e", "f"]
        await cp.rewind("t", to=2)
        await cp.append("t", UserMessage("g"))
        assert await following.until(7) == ["a", "b", "c", "d", "e", "f", "g"]
        await following.stop()

    with_cp(database, use)


def test_a_thread_that_is_made_anew_is_heard_from_its_beginning(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("a"), UserMessage("b")])
        following = Following(cp)
        await following.until(2)
        await cp.delete_thread("t")
        await cp.append("t", UserMessage("c"))
        assert await following.until(3) == ["a", "b", "c"]
        await following.stop()

    with_cp(database, use)
