"""What is said as a run ends, is cancelled or fails: it is heard once, by this run or the next, or told to be lost."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from byssus import Middleware, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import StoreFull
from byssus.events import Event, TurnEnd
from byssus.messages import stamped
from byssus.providers.base import Request
from byssus.queries.log import inbox, threads
from byssus.queries.log.leases import Claim
from byssus.store.database import Store, Tx
from byssus.threads.encoding import message_row
from byssus.threads.inbox import Receipt
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Heard, check_whole
from tests.support.checkpointers import texts
from tests.support.databases import Database
from tests.support.leases import (
    FAR_AWAY,
    LOOK,
    agent_on,
    claim,
    everything,
    expire,
    is_free,
    look,
    until,
    waiting,
    with_two,
)

# --- at the end of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("middleware", [[], [Middleware()]], ids=["plain", "with middleware"])
@pytest.mark.parametrize("sender", ["agent", "other"])
def test_a_follow_up_at_the_end_of_a_run_is_heard_by_it_or_by_the_next_and_only_once(
    database: Database, sender: str, middleware: list[Middleware]
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        chance = random.Random(2)
        agent = agent_on(cp, ["ok"] * 200, middleware=middleware)
        for i in range(30):
            running = asyncio.create_task(agent.prompt(f"prompt {i}"))
            await asyncio.sleep(chance.random() * 0.012)
            receipt = agent.follow_up(f"follow {i}") if sender == "agent" else other.follow_up("t", f"follow {i}")
            await asyncio.gather(running, receipt)
            left = await waiting(other)
            assert left in ([], [f"follow_up: follow {i}"])
            if left:
                assert await is_free(cp)
                await agent.resume()
        lines = await texts(cp, "t")
        assert [line for line in lines if line != "ok"] == [
            line for i in range(30) for line in (f"prompt {i}", f"follow {i}")
        ]
        assert await waiting(cp) == []

    with_two(database, use)


def test_follow_ups_of_many_senders_to_runs_that_come_and_go_are_all_heard_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agents = [agent_on(opener, ["ok"] * 400, wait=30) for opener in (cp, other)]
        over = asyncio.Event()

        async def talk(number: int) -> None:
            chance = random.Random(number)
            for i in range(25):
                await asyncio.sleep(chance.random() * 0.004)
                sender: Any = [cp.follow_up, other.follow_up, cp.steer, other.steer][number]
                await sender("t", f"{number} {i}")

        async def drive(number: int) -> None:
            while not over.is_set():
                await agents[number].prompt("go")

        drivers = [asyncio.create_task(drive(number)) for number in range(2)]
        await asyncio.gather(*(talk(number) for number in range(4)))
        over.set()
        await asyncio.gather(*drivers)
        await agents[0].prompt("and the rest")
        assert await waiting(cp) == []
        said = [text for text in await texts(cp, "t") if text[0].isdigit()]
        for number in range(4):  # each sender is heard in order
            assert [s for s in said if s.startswith(f"{number} ")] == [f"{number} {i}" for i in range(25)]
        assert len(said) == 100
        assert await is_free(cp)

    with_two(database, use)


def test_a_listener_may_follow_up_on_the_last_turn_of_a_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, ["a", "b"])
        said: list[Receipt] = []

        def listen(event: Event) -> None:
            if isinstance(event, TurnEnd) and not said:
                said.append(agent.follow_up("one more"))

        agent.subscribe(listen)
        assert (await agent.prompt("go")).text == "b"
        assert await texts(other, "t") == ["go", "a", "one more", "b"]
        assert await is_free(cp)

    with_two(database, use)


def test_when_somebody_else_drives_already_a_late_follow_up_is_theirs(database: Database) -> None:
    """The run has ended and given its thread back; another one begins before the follow-up is taken."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        def begin(tx: Tx) -> None:
            theirs = [message_row(stamped(UserMessage("theirs")))]
            threads.append(tx, ThreadKey("", "t"), theirs, by=Claim(FAR_AWAY, "their-run", 30))

        def listen(event: Event) -> None:
            if isinstance(event, TurnEnd):
                cp.store.write_now(begin)
                agent.follow_up("late")

        agent = agent_on(cp, ["a"])
        agent.subscribe(listen)
        result = await agent.prompt("go")
        assert (result.text, result.stop_reason) == ("a", "stop")
        assert await waiting(other) == ["follow_up: late"]
        await expire(cp)
        await agent_on(other, ["b", "c"]).prompt("hi")
        assert await texts(cp, "t") == ["go", "a", "theirs", "hi", "b", "late", "c"]

    with_two(database, use)


# --- failures ---------------------------------------------------------------------------------------------------------


def break_sends(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    def fail(tx: Tx) -> None:
        raise StoreFull("no room left")

    real = store.submit

    def submit(query: Any, /, *args: Any, **kwargs: Any) -> Any:
        return real(fail) if query is inbox.send else real(query, *args, **kwargs)

    monkeypatch.setattr(store, "submit", submit)


def test_a_message_that_could_not_be_stored_is_told_to_whoever_waits(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        break_sends(monkeypatch, cp.store)
        receipt = cp.steer("t", "the text is nobody's business")
        with pytest.raises(StoreFull):
            await receipt
        with pytest.raises(StoreFull):
            await asyncio.to_thread(receipt.wait)
        assert receipt.done
        assert "StoreFull" in caplog.text
        assert "business" not in caplog.text
        assert await cp.load("t") is None

    with_two(database, use)


@pytest.mark.parametrize("kind", ["steer", "follow_up"])
def test_a_run_fails_on_a_message_of_its_own_agent_that_could_not_be_stored(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with monkeypatch.context() as broken:

            def answer(request: Request) -> list[ToolCall]:
                break_sends(broken, cp.store)
                getattr(agent, kind)("lost")
                return LOOK

            agent = agent_on(cp, [answer, "ok", "and on"], tools=[look])
            heard = Heard(agent)
            with pytest.raises(StoreFull):
                await agent.prompt("go")
            check_whole(heard)
        assert await is_free(cp)
        assert (await texts(cp, "t"))[:3] == ["go", "", "seen"]
        assert "lost" not in await texts(cp, "t")
        assert await waiting(other) == []
        await agent.prompt("go on")  # it was told once
        assert (await texts(cp, "t"))[-2] == "go on"

    with_two(database, use)


def test_a_prompt_that_is_cancelled_while_it_hears_something_loses_nothing(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for i in range(40):
            thread_id = f"t{i}"
            agent = agent_on(cp, ["a", "b", "c"], thread_id)
            for text in ("one", "two"):
                await other.follow_up(thread_id, text)
            run = asyncio.create_task(agent.prompt("go"))
            await asyncio.sleep(i * 0.0004)
            run.cancel()
            await asyncio.wait([run])
            thread = await other.load(thread_id)
            said = [message.text for message in thread.messages] if thread else []
            left = [item.message.text for item in await other.inbox(thread_id)]
            heard = [text for text in said if text in ("one", "two")]
            assert heard + left == ["one", "two"]
            await agent_on(other, ["x", "y", "z"], thread_id).prompt("again")
            assert await waiting(cp, thread_id) == []
            assert await is_free(cp, thread_id)

    with_two(database, use)


def test_a_receipt_whose_waiter_was_cancelled_is_stored_all_the_same(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def wait_for(receipt: Receipt) -> None:
            await receipt

        for i in range(20):
            task = asyncio.create_task(wait_for(cp.follow_up("t", str(i))))
            for _ in range(i % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert await until(lambda: _count(other, 20))
        assert await waiting(other) == [f"follow_up: {i}" for i in range(20)]

    with_two(database, use)


async def _count(cp: Checkpointer, wanted: int) -> bool:
    return len(await cp.inbox("t")) == wanted


def test_senders_on_many_threads_are_all_heard(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, ["ok"] * 2, follow_up_mode="all")

        def send(number: int) -> None:
            for i in range(20):
                agent.follow_up(f"{number} {i}")

        workers = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            await asyncio.to_thread(worker.join)
        await agent.prompt("go")
        said = (await texts(other, "t"))[2:-1]
        assert len(said) == 160
        for number in range(8):
            assert [s for s in said if s.startswith(f"{number} ")] == [f"{number} {i}" for i in range(20)]

    with_two(database, use)


def test_to_take_from_an_empty_inbox_writes_nothing(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        lease = await claim(cp)
        before = await cp.store.read(everything)
        taken = await cp.store.write(
            inbox.take, ThreadKey("", "t"), by=lease, expect=-1, limits={"steer": 1, "follow_up": 1}
        )
        assert taken == (None, [])
        assert await cp.store.read(everything) == before

    with_two(database, use)
