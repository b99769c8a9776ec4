"""A lease has an end: whoever slept through it cannot write any more, and whoever is gone is not waited for."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import pytest

from byssus import AssistantMessage, Middleware, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    LeaseLost,
    StoreError,
    ThreadBusy,
    ThreadMoved,
)
from byssus.events import AgentEnd, MessageEnd, TurnEnd
from byssus.messages import encode, stamped
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import inbox, leases, threads, tool_calls
from byssus.queries.log.answers import Question
from byssus.queries.log.leases import Claim, Held, Lease
from byssus.queries.log.threads import MessageRow
from byssus.queries.log.tool_calls import Start
from byssus.store import owners
from byssus.store.database import Tx
from byssus.threads.encoding import message_row
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted, Hanging, Heard, check_whole, history, sent
from tests.support.checkpointers import loaded, texts
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    FAR_AWAY,
    LOOK,
    DatabaseClock,
    Slow,
    agent_on,
    changed,
    claim,
    dead_owner,
    everything,
    expire,
    is_free,
    lease_of,
    live_owner,
    look,
    take_over,
    until,
    with_two,
)

# --- a lease that is lost ---------------------------------------------------------------------------------------------


ROW = MessageRow("m-1", "user", encode(UserMessage("too late")))
START = Start(2, 0, "c1", "look", "{}", "never", "key", "run")
WRITES: dict[str, Callable[[Tx, Lease], object]] = {
    "append": lambda tx, lease: threads.append(tx, ThreadKey("", "t"), [ROW], by=lease),
    "append and release": lambda tx, lease: threads.append(
        tx, ThreadKey("", "t"), [ROW], by=lease, release=Release.END
    ),
    "append and pause": lambda tx, lease: threads.append(tx, ThreadKey("", "t"), [], by=lease, release=Release.PAUSE),
    "release if silent": lambda tx, lease: threads.append(
        tx, ThreadKey("", "t"), [], by=lease, release=Release.END_IF_INBOX_EMPTY
    ),
    "append and reserve": lambda tx, lease: threads.append(
        tx, ThreadKey("", "t"), [ROW], by=lease, reserve=3, extra='{"x":1}'
    ),
    "save_extra": lambda tx, lease: threads.save_extra(tx, ThreadKey("", "t"), '{"x":1}', by=lease),
    "fill": lambda tx, lease: threads.fill(tx, ThreadKey("", "t"), [(3, ROW)], by=lease),
    "save_partial": lambda tx, lease: threads.save_partial(tx, ThreadKey("", "t"), "{}", by=lease),
    "distrust": lambda tx, lease: threads.distrust(tx, ThreadKey("", "t"), 99, by=lease),
    "start": lambda tx, lease: tool_calls.start(tx, ThreadKey("", "t"), START, by=lease),
    "ask": lambda tx, lease: tool_calls.ask(tx, ThreadKey("", "t"), START, Question("approval", "?"), by=lease),
    "finish": lambda tx, lease: tool_calls.finish(tx, ThreadKey("", "t"), 2, [(0, 3, ROW, "done", None)], by=lease),
    "finish_behind": lambda tx, lease: tool_calls.finish_behind(
        tx, ThreadKey("", "t"), 2, [(0, ROW, "done", None)], by=lease
    ),
    "take": lambda tx, lease: inbox.take(tx, ThreadKey("", "t"), by=lease, expect=threads.ANY, limits={"steer": 9}),
}


async def a_lease(cp: Checkpointer) -> Lease:
    """A run that has a reply with a started call, a place for its result, a part of a reply, and mail."""
    lease = await claim(cp, FAR_AWAY, "go")
    reply = message_row(stamped(AssistantMessage([ToolCall("c1", "look")], "tool_use")))
    await cp.store.write(threads.append, ThreadKey("", "t"), [reply], by=lease, reserve=1)
    await cp.store.write(tool_calls.start, ThreadKey("", "t"), START, by=lease)
    await cp.store.write(threads.save_partial, ThreadKey("", "t"), encode(AssistantMessage("Hel")), by=lease)
    await cp.steer("t", "left")
    return lease


async def lose(cp: Checkpointer, how: str) -> None:
    if how == "expired":
        await expire(cp)
    elif how == "taken over":
        await take_over(cp)
    elif how == "taken over and given back":
        lease = await take_over(cp)
        await cp.store.write(threads.append, ThreadKey("", "t"), [], by=lease, release=Release.END)
    else:
        await cp.store.write(lambda tx: tx.run("DELETE FROM inbox"))
        await cp.store.write(lambda tx: tx.run("DELETE FROM tool_calls"))
        await cp.store.write(lambda tx: tx.run("DELETE FROM partials"))
        await cp.store.write(lambda tx: tx.run("UPDATE threads SET id = 'renamed'"))


@pytest.mark.parametrize("how", ["expired", "taken over", "taken over and given back"])
@pytest.mark.parametrize("write", WRITES)
def test_a_lost_lease_cannot_write_anything(database: Database, write: str, how: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        lease = await a_lease(cp)
        await lose(other, how)
        before = await cp.store.read(everything)
        with pytest.raises(LeaseLost, match="'t'"):
            await cp.store.write(WRITES[write], lease)
        assert await cp.store.read(everything) == before

    with_two(database, use)


@pytest.mark.parametrize("write", WRITES)
def test_a_lease_that_is_held_writes_and_is_renewed(database: Database, write: str) -> None:
    """The other side of the test before: what is refused there is refused because of the lease."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        lease = await a_lease(cp)
        before = await lease_of(cp)
        await cp.store.write(WRITES[write], lease)
        after = await lease_of(cp)
        assert after.epoch == before.epoch
        if write in ("append and release", "append and pause"):
            assert after.until is None
        else:
            assert after.until is not None
            assert before.until is not None
            assert after.until > before.until

    with_two(database, use)


def test_a_lease_on_a_thread_that_is_gone_writes_nothing(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        lease = await a_lease(cp)
        await lose(other, "gone")
        before = await cp.store.read(everything)
        for name in ("fill", "save_partial", "distrust", "start", "ask", "finish"):
            with pytest.raises((LeaseLost, ThreadMoved)):
                await cp.store.write(WRITES[name], lease)
            assert await cp.store.read(everything) == before, name

    with_two(database, use)


@pytest.mark.parametrize("how", ["expired", "taken over", "taken over and given back"])
def test_a_lost_lease_is_not_renewed(database: Database, how: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        lease = await a_lease(cp)
        held = Held("t", "", lease.epoch, lease.seconds)
        assert await cp.store.write(leases.renew, [held]) == []
        await lose(other, how)
        before = await cp.store.read(everything)
        assert await cp.store.write(leases.renew, [held]) == [held]
        assert await cp.store.read(everything) == before

    with_two(database, use)


@pytest.mark.parametrize("where", ["tool", "stream", "hook"])
def test_a_run_whose_thread_was_taken_over_ends_with_lease_lost_and_the_thread_is_the_others(
    database: Database, where: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        begun, let_go = asyncio.Event(), asyncio.Event()

        async def stand_still() -> None:
            begun.set()
            await let_go.wait()

        async def answer(request: Request) -> Any:
            if where == "stream":
                await stand_still()
            return LOOK

        @tool(name="look")
        async def look_slowly() -> str:
            if where == "tool":
                await stand_still()
            return "seen"

        class Hook(Middleware):
            async def should_stop_after_turn(self, *_: object, **__: object) -> bool:
                if where == "hook":
                    await stand_still()
                return False

        agent = agent_on(cp, [answer, "ok"], tools=[look_slowly], middleware=[Hook()])
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await begun.wait()
        before = await history(cp, "t")
        theirs = await take_over(other, "mine now")
        let_go.set()
        with pytest.raises(LeaseLost, match=r"resume\(\)"):
            await run
        check_whole(heard)
        assert [type(event) for event in heard[-2:]] == [TurnEnd, AgentEnd]
        assert all(event.stored for event in heard.of(MessageEnd)[:-1])
        assert await history(cp, "t") == [*before, "user: mine now"]
        assert (await lease_of(cp)).epoch == theirs.epoch
        with pytest.raises(ThreadBusy, match="far-away"):
            await agent.prompt("still there?")
        await expire(cp)
        provider = ScriptedProvider(["on we go"])
        assert (await agent_on(other, provider, tools=[look]).resume()).text == "on we go"
        assert await is_free(cp)
        assert await other.unfinished() == []

    with_two(database, use)


def test_a_run_that_does_nothing_learns_by_itself_that_its_thread_was_taken_over(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        cp.lease_seconds = 0.3
        hanging = Hanging("Hel")
        agent = agent_on(cp, Acted(hanging))
        heard = Heard(agent)
        run = asyncio.create_task(agent.prompt("go"))
        await hanging.begun.wait()
        await take_over(other, "mine now")
        with pytest.raises(LeaseLost):
            await run
        check_whole(heard)
        assert hanging.closed
        assert await history(cp, "t") == ["user: go", "user: mine now"]

    with_two(database, use)


def test_an_agent_that_lost_its_lease_goes_on_when_the_thread_is_free(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        provider = ScriptedProvider([CALL_SLOW, "on we go", "and on"])
        agent = agent_on(cp, provider, tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await take_over(other, "in between")
        slow.let_go.set()
        with pytest.raises(LeaseLost):
            await run
        await expire(cp)
        assert (await agent.resume()).text == "on we go"
        assert (await agent.prompt("more")).text == "and on"
        assert "user: in between" in sent(provider)
        assert slow.runs == 1
        assert (await history(cp, "t"))[-3:] == ["assistant: on we go", "user: more", "assistant: and on"]

    with_two(database, use)


def test_a_call_that_was_cut_off_by_the_loss_of_the_lease_is_recovered_by_its_policy_in_the_same_agent_too(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        cp.lease_seconds = 0.3
        slow = Slow(recovery="retry")
        agent = agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await take_over(other)
        with pytest.raises(LeaseLost):
            await run
        await expire(cp)
        slow.let_go.set()
        cp.lease_seconds = 10.0
        await agent.resume()
        assert slow.runs == 2
        assert (await history(cp, "t"))[2] == "tool_result: slow is done"

    with_two(database, use)


# --- the keeper -------------------------------------------------------------------------------------------------------


def test_a_blocked_event_loop_does_not_cost_a_run_its_lease(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        cp.lease_seconds = 1.0

        @tool
        async def block() -> str:
            first = await lease_of(other)
            time.sleep(1.5 * cp.lease_seconds)  # the event loop stands still for longer than the lease lasts
            second = await lease_of(other)
            assert first.until is not None
            assert second.until is not None
            assert (second.owner, second.epoch) == (first.owner, first.epoch)
            assert second.until > first.until
            with pytest.raises(ThreadBusy):
                await other.append("t", UserMessage("no"))
            return "blocked"

        assert (await agent_on(cp, [[ToolCall("c1", "block")], "ok"], tools=[block]).prompt("go")).text == "ok"
        assert await history(cp, "t") == ["user: go", "assistant: ", "tool_result: blocked", "assistant: ok"]

    with_two(database, use)


def test_leases_of_many_runs_are_kept_at_once(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        cp.lease_seconds = 2.0  # a machine that stands still for longer loses them with good reason
        slow = Slow()
        ids = [f"t{i}" for i in range(20)]
        runs = [
            asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], thread_id, tools=[slow.tool]).prompt("go"))
            for thread_id in ids
        ]
        await until(lambda: slow.runs == 20)
        for _ in range(5):  # each is renewed several times
            before = [(await lease_of(other, thread_id)).until for thread_id in ids]
            for thread_id, since in zip(ids, before, strict=True):
                await until(functools.partial(_is_renewed, other, thread_id, since))
        slow.let_go.set()
        assert [(await run).text for run in runs] == ["ok"] * 20
        assert [(await lease_of(other, thread_id)).epoch for thread_id in ids] == [1] * 20

    with_two(database, use)


async def _is_renewed(cp: Checkpointer, thread_id: str, since: str | None) -> bool:
    lease = await lease_of(cp, thread_id)
    return lease.until is not None and since is not None and lease.until > since


@pytest.mark.parametrize("failure", [StoreError("no"), OSError("no")], ids=["StoreError", "OSError"])
def test_the_keeper_outlives_a_failure_of_the_store(
    database: Database, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        cp.lease_seconds = 0.4
        failed = 0
        version = cp.store.version

        def fail_at_first() -> Hashable:
            nonlocal failed
            failed += 1
            if failed == 1:
                raise failure
            return version()

        monkeypatch.setattr(cp.store, "version", fail_at_first)
        hanging = Hanging("Hel")
        run = asyncio.create_task(agent_on(cp, Acted(hanging)).prompt("go"))
        await hanging.begun.wait()
        await until(lambda: failed)
        before = await lease_of(cp)
        async with asyncio.timeout(2):
            await until(lambda: _is_renewed(cp, "t", before.until))
        assert await other.abort("t")
        assert (await run).stop_reason == "aborted"

    with_two(database, use)


# --- whose lease it is ------------------------------------------------------------------------------------------------


ANOTHER_BOOT = "00000000-0000-0000-0000-000000000000"
GONE: dict[str, Callable[[Checkpointer], str]] = {
    "a process that has ended": dead_owner,
    "a process of another user that has ended": lambda cp: changed(dead_owner(cp), boot="?"),
    "a lease of this process that no run has": lambda cp: cp.store.presence.name("forgotten", 30),
}
ALIVE: dict[str, Callable[[Checkpointer], str]] = {
    "another machine": lambda cp: FAR_AWAY,
    "a machine that was cloned from this one": lambda cp: changed(dead_owner(cp), proof="0" * 32),
    "a boot that is not known": lambda cp: changed(FAR_AWAY, boot="?"),
    "an owner of an earlier version": lambda cp: f"h:1 pid=1 start=1 boot={owners._boot()} namespace=pid:[1] lease=x",
    "garbage": lambda cp: "who knows",
    "nothing": lambda cp: "",
}


@pytest.mark.parametrize("way", ["prompt", "resume", "append", "save_extra"])
@pytest.mark.parametrize("owner", GONE)
def test_the_thread_of_an_owner_that_is_gone_is_taken_over_at_once(database: Database, owner: str, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        lease = await claim(cp, GONE[owner](cp), "theirs")
        await _write(other, way)
        thread = await loaded(cp, "t")
        after = await lease_of(cp)
        if way in ("prompt", "resume"):
            assert thread.messages[-1].text == "fine"
            assert await is_free(cp)
            assert after.epoch == lease.epoch + 1
            with pytest.raises(LeaseLost):
                await cp.store.write(threads.append, ThreadKey("", "t"), [ROW], by=lease)
        else:  # a visitor leaves the interrupted run to be taken up
            assert (thread.messages[-1].text, thread.extra) == (
                ("visitor", {}) if way == "append" else ("theirs", {"x": 1})
            )
            assert [info.id for info in await other.unfinished()] == ["t"]

    with_two(database, use)


async def _write(cp: Checkpointer, way: str) -> None:
    if way == "prompt":
        await agent_on(cp, ["fine"]).prompt("hi")
    elif way == "resume":
        await agent_on(cp, ["fine"]).resume()
    elif way == "append":
        await cp.append("t", UserMessage("visitor"))
    else:
        await cp.save_extra("t", {"x": 1})


@pytest.mark.parametrize("way", ["prompt", "resume", "append", "save_extra"])
@pytest.mark.parametrize("owner", ALIVE)
def test_the_thread_of_an_owner_that_may_live_is_free_when_the_lease_has_run_out_and_not_before(
    database: Database, owner: str, way: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, ALIVE[owner](cp), "theirs")
        before = await cp.store.read(everything)
        with pytest.raises(ThreadBusy):
            await _write(other, way)
        assert await cp.store.read(everything) == before
        assert await other.unfinished() == []
        await expire(cp)
        assert [info.id for info in await other.unfinished()] == ["t"]
        await _write(other, way)
        assert await cp.store.read(everything) != before

    with_two(database, use)


@pytest.mark.parametrize("way", ["prompt", "resume", "append", "save_extra"])
def test_the_thread_of_a_process_that_lives_is_not_taken_over(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with live_owner(cp) as owner:
            await claim(cp, owner, "theirs")
            with pytest.raises(ThreadBusy):
                await _write(other, way)
            assert await other.unfinished() == []
        with pytest.raises(ThreadBusy):  # it has ended in good order, and its file with it: nothing is known
            await _write(other, way)

    with_two(database, use)


def test_a_sqlite_file_is_on_one_machine_so_the_owner_of_another_boot_is_gone(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, changed(FAR_AWAY, boot=ANOTHER_BOOT), "theirs")
        if database.system == "sqlite":
            assert [info.id for info in await other.unfinished()] == ["t"]
            await _write(other, "resume")
        else:  # a server has clients on many machines
            with pytest.raises(ThreadBusy):
                await _write(other, "resume")

    with_two(database, use)


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_when_the_clock_jumps_ahead_whoever_takes_over_is_the_only_one_to_write(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        time_is.off = timedelta(hours=1)
        assert (await agent_on(other, ["mine"], tools=[slow.tool]).resume()).text == "mine"
        slow.let_go.set()
        with pytest.raises(LeaseLost):
            await first
        lines = await history(cp, "t")
        assert lines[-1] == "assistant: mine"
        assert "unknown" in lines[2]
        assert len(lines) == 4

    with_two(database, use)


def test_when_the_clock_goes_back_a_run_goes_on_and_nobody_gets_in_between(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        slow = Slow()
        first = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        time_is.off = -timedelta(days=1)
        for _ in range(2):
            with pytest.raises(ThreadBusy):
                await agent_on(other).resume()
        slow.let_go.set()
        assert (await first).text == "ok"
        assert await is_free(cp)
        assert (await agent_on(other, ["fine"]).prompt("hi")).text == "fine"
        assert await texts(cp, "t") == ["go", "", "slow is done", "ok", "hi", "fine"]

    with_two(database, use)


@pytest.mark.parametrize("way", ["unfinished", "wait", "again"])
def test_when_the_clock_went_back_a_lease_that_is_not_renewed_lasts_no_longer_than_it_should(
    database: Database, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        await claim(cp, changed(FAR_AWAY, seconds=0.5), "theirs")
        time_is.off = -timedelta(days=1)  # until tomorrow, says the row
        assert await other.unfinished() == []
        if way == "unfinished":  # a service that looks again
            await until(other.unfinished)
        elif way == "again":
            await until(functools.partial(_is_accepted, other))
        else:
            assert (await agent_on(other, ["fine"], wait=60).resume()).text == "fine"

    with_two(database, use)


async def _is_accepted(cp: Checkpointer) -> bool:
    try:
        await agent_on(cp, ["fine"]).resume()
    except ThreadBusy:
        return False
    return True


def test_when_the_clock_went_back_a_lease_that_is_renewed_is_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        lease = await claim(cp, changed(FAR_AWAY, seconds=0.5), "theirs")
        time_is.off = -timedelta(days=1)
        held = Held("t", "", lease.epoch, 0.5)
        since = time.monotonic()
        while time.monotonic() - since < 1.2:
            assert await other.unfinished() == []
            assert await cp.store.write(leases.renew, [held]) == []

    with_two(database, use)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_clock_does_only_the_newest_lease_writes(
    database: Database, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Writers that claim, write, renew and release in any order, by a clock that jumps: the log knows one at a time."""

    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        chance = random.Random(seed)
        held: dict[int, Lease] = {}
        newest = 0
        for step in range(80):
            writer = chance.randrange(4)
            opener = (cp, other)[writer % 2]
            row = MessageRow(f"m{step}", "user", encode(UserMessage(str(held[writer].epoch if writer in held else 0))))
            action = chance.choice(["claim", "write", "write", "renew", "release", "jump"])
            try:
                if action == "jump":
                    time_is.off += timedelta(seconds=chance.choice([-100, -31, -5, 5, 31, 100]))
                elif action == "claim":
                    by = Claim(f"{FAR_AWAY}{writer}", "run", 30)
                    position = await opener.store.write(threads.append, ThreadKey("", "t"), [], by=by)
                    assert position.epoch == newest + 1
                    newest = position.epoch
                    held[writer] = Lease(position.epoch, 30)
                elif writer in held:
                    lease = held[writer]
                    if action == "renew":
                        lost = await opener.store.write(leases.renew, [Held("t", "", lease.epoch, 30)])
                        assert lost or lease.epoch == newest
                        continue
                    release = Release.END if action == "release" else None
                    await opener.store.write(threads.append, ThreadKey("", "t"), [row], by=lease, release=release)
                    assert lease.epoch == newest
            except (ThreadBusy, LeaseLost):
                pass
        written = [int(text) for text in await texts(cp, "t")]
        assert written == sorted(written)
        assert written

    with_two(database, use)
