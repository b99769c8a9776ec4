"""What is said to a run, from wherever: it is on disk when it is acknowledged, and is heard once and in order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from byssus import Limits, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, KeyReused, NothingToResume
from byssus.events import MessageEnd
from byssus.messages import ImageContent, TextContent
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import inbox, threads
from byssus.queries.log.leases import Lease
from byssus.threads.inbox import Receipt
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted, Hanging, Heard, check_whole, history, make, saying, sent
from tests.support.cases import case
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    LOOK,
    Slow,
    agent_on,
    claim,
    dead_owner,
    die,
    is_free,
    look,
    waiting,
    with_two,
)

# --- sending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["steer", "follow_up"])
@pytest.mark.parametrize("sender", ["agent", "checkpointer"])
def test_a_message_that_was_acknowledged_is_in_the_inbox_for_everybody(
    database: Database, sender: str, kind: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp)
        send = getattr(agent, kind) if sender == "agent" else lambda text: getattr(cp, kind)("t", text)
        receipt = send("hello")
        assert isinstance(receipt, Receipt)
        assert await receipt is receipt
        assert receipt.done
        assert receipt.id in repr(receipt)
        (item,) = await other.inbox("t")
        assert (item.id, item.kind, item.message) == (receipt.id, kind, receipt.message)
        assert (item.message.text, item.message.id) == ("hello", receipt.id)
        assert item.created_at
        assert await agent.inbox() == [item]
        assert await receipt is receipt  # and as often as one likes

    with_two(database, use)


def test_an_inbox_is_heard_in_the_order_in_which_was_spoken_though_nobody_waited(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp)
        expected, receipts = [], []
        for i in range(100):
            kind = ("steer", "follow_up")[i % 2]
            receipts.append(getattr(agent, kind)(str(i)) if i % 3 else getattr(other, kind)("t", str(i)))
            expected.append(f"{kind}: {i}")
        await receipts[-1]  # the last one is stored behind all others
        assert await waiting(other) == expected

    with_two(database, use)


def test_inboxes_of_threads_do_not_mix(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.steer("a", "to a")
        await cp.follow_up("b", "to b")
        assert await waiting(other, "a") == ["steer: to a"]
        assert await waiting(other, "b") == ["follow_up: to b"]
        assert await waiting(other, "nobody") == []
        await agent_on(other, ["1", "2"], "a").prompt("go")
        assert await waiting(other, "b") == ["follow_up: to b"]

    with_two(database, use)


def test_a_thread_without_an_event_loop_can_send_and_wait(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp)
        receipts: list[Receipt] = []

        def work() -> None:
            receipts.append(agent.steer("from a thread").wait())
            receipts.append(other.follow_up("t", "and another").wait(timeout=10))
            receipts.append(receipts[0].wait())

        await asyncio.to_thread(work)
        assert [receipt.done for receipt in receipts] == [True] * 3
        assert await waiting(cp) == ["steer: from a thread", "follow_up: and another"]

    with_two(database, use)


SAYS_NOTHING: list[Any] = [
    "",
    " \n",
    None,
    5,
    b"x",
    [],
    ["x", "y"],
    UserMessage(""),
    UserMessage([]),
    UserMessage([ImageContent("no image")]),
]


@pytest.mark.parametrize("kind", ["steer", "follow_up"])
def test_what_says_nothing_cannot_be_sent(database: Database, kind: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for message in SAYS_NOTHING:
            for sender, arguments in ((cp, ("t", message)), (agent_on(cp), (message,))):
                with case(message, sender), pytest.raises(InputError, match=kind):
                    getattr(sender, kind)(*arguments)
        assert await other.load("t") is None

    with_two(database, use)


@pytest.mark.parametrize("thread_id", ["", None, 5, "a\0b", "\ud800"], ids=ascii)
def test_what_names_no_thread_is_an_input_error(database: Database, thread_id: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with pytest.raises(InputError, match="thread id"):
            cp.steer(thread_id, "x")
        with pytest.raises(InputError, match="thread id"):
            cp.follow_up(thread_id, "x")
        with pytest.raises(InputError, match="thread id"):
            await cp.inbox(thread_id)
        with pytest.raises(InputError, match="thread id"):
            await cp.withdraw(thread_id, "x")

    with_two(database, use)


NASTY = ["a\0b", "\ud800 alone", "汉字 🪸", "'; DROP TABLE inbox; --", '{"role":"user"}', "a\u2028b", "x" * 5_000_000]


def test_any_text_is_heard_as_it_was_said(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for text in NASTY:
            await other.follow_up("t", text)
        assert [item.message.text for item in await cp.inbox("t")] == NASTY
        provider = ScriptedProvider(["ok"] * 2)
        await agent_on(cp, provider, follow_up_mode="all").prompt("go")
        assert [message.text for message in provider.requests[-1].messages[2:]] == NASTY
        assert (await texts(other, "t"))[2:-1] == NASTY

    with_two(database, use)


def test_a_message_keeps_its_id_its_time_and_all_its_blocks(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        png = ImageContent("iVBORw0KGgo=")
        said = UserMessage([TextContent("look: "), png], id="mine\0", created_at="2026-01-01")
        receipt = await other.steer("t", said)
        assert receipt.message == said
        await agent_on(cp, ["a", "b"]).prompt("go")
        assert (await loaded(cp, "t")).messages[2] == said

    with_two(database, use)


# --- hearing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("follow_up_mode", ["one-at-a-time", "all"])
@pytest.mark.parametrize("steering_mode", ["one-at-a-time", "all"])
def test_steering_is_heard_before_following_up_one_at_a_time_or_all_at_once(
    database: Database, steering_mode: str, follow_up_mode: str
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for number in "12":
            await other.follow_up("t", f"follow {number}")
            await other.steer("t", f"steer {number}")
        groups = [["steer 1", "steer 2"]] if steering_mode == "all" else [["steer 1"], ["steer 2"]]
        groups += [["follow 1", "follow 2"]] if follow_up_mode == "all" else [["follow 1"], ["follow 2"]]
        script = ["ok"] * (1 + len(groups))
        with ScriptedProvider(script) as provider:
            agent = agent_on(cp, provider, steering_mode=steering_mode, follow_up_mode=follow_up_mode)
            heard = Heard(agent)
            await agent.prompt("go")
        lines = ["user: go", "assistant: ok"]
        for group in groups:
            lines += [*(f"user: {text}" for text in group), "assistant: ok"]
        assert await history(other, "t") == lines
        check_whole(heard)
        assert [f"{event.message.role}: {event.message.text}" for event in heard.of(MessageEnd)] == lines
        assert await waiting(other) == []

    with_two(database, use)


def test_another_process_steers_a_run_before_its_next_turn(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        provider = ScriptedProvider([CALL_SLOW, "ok", "then that"])
        run = asyncio.create_task(agent_on(cp, provider, tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        await other.follow_up("t", "and then?")
        await other.steer("t", "look left")
        slow.let_go.set()
        assert (await run).text == "then that"
        assert sent(provider, 1)[-1] == "user: look left"
        assert sent(provider, 2)[-2:] == ["assistant: ok", "user: and then?"]
        assert await waiting(cp) == []
        assert await is_free(cp)

    with_two(database, use)


def test_another_process_speaks_to_a_run_that_streams_its_last_reply(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def answer(request: Request) -> str:
            await other.follow_up("t", "one more")
            return "first"

        with ScriptedProvider([answer, "second"]) as provider:
            assert (await agent_on(cp, provider).prompt("go")).text == "second"
        assert await history(cp, "t") == ["user: go", "assistant: first", "user: one more", "assistant: second"]
        assert await is_free(cp)

    with_two(database, use)


@pytest.mark.parametrize("way", ["prompt", "resume"])
@pytest.mark.parametrize("kind", ["steer", "follow_up"])
def test_what_is_said_to_an_idle_thread_is_heard_by_its_next_run(database: Database, kind: str, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        provider = ScriptedProvider(["a", "b", "c"])
        agent = agent_on(cp, provider)
        await agent.prompt("go")
        await getattr(other, kind)("t", "psst")
        if way == "prompt":
            await agent.prompt("more")
            assert sent(provider)[-4:] == ["assistant: a", "user: more", "assistant: b", "user: psst"]
        else:
            await agent.resume()
            assert sent(provider) == ["user: go", "assistant: a", "user: psst"]
        assert await waiting(other) == []
        with pytest.raises(NothingToResume):
            await agent.resume()

    with_two(database, use)


@pytest.mark.parametrize("left", ["a question", "a user's message"])
def test_steering_that_waits_is_heard_before_a_resumed_run_asks_the_model(database: Database, left: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        asking = Slow(approval=True)
        asking.let_go.set()
        if left == "a question":
            await agent_on(cp, [CALL_SLOW], tools=[asking.tool]).prompt("go")
            await other.answer("t", "c1", "approve")
        else:
            await claim(cp, dead_owner(cp), "go")
        await other.steer("t", "careful")
        provider = ScriptedProvider(["ok", "and on"])
        await agent_on(other, provider, tools=[asking.tool]).resume()
        assert sent(provider, 0)[-1] == "user: careful"

    with_two(database, use)


@pytest.mark.parametrize("way", ["prompt", "resume"])
def test_a_thread_that_does_not_exist_can_be_spoken_to(database: Database, way: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await other.steer("t", "first of all")
        assert (await loaded(cp, "t")).messages == []
        agent = agent_on(cp, ["a", "b"])
        await (agent.resume() if way == "resume" else agent.prompt("go"))
        expected = ["first of all", "a"] if way == "resume" else ["go", "a", "first of all", "b"]
        assert await texts(other, "t") == expected

    with_two(database, use)


def test_a_run_that_breaks_off_leaves_the_inbox_as_it_is(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        hanging = Hanging("Hel")
        agent = agent_on(cp, Acted(hanging))
        run = asyncio.create_task(agent.prompt("go"))
        await hanging.begun.wait()
        await other.steer("t", "not heard")
        agent.follow_up("nor this")
        agent.abort()
        await run
        assert await waiting(cp) == ["steer: not heard", "follow_up: nor this"]
        provider = ScriptedProvider([[ToolCall("c1", "look")], "ok"])
        await agent_on(other, provider, tools=[look], limits=Limits(turns=1)).prompt("again")
        assert await waiting(cp) == ["steer: not heard", "follow_up: nor this"]

    with_two(database, use)


def test_a_limit_leaves_what_was_not_heard_in_the_inbox(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for i in range(10):
            other.follow_up("t", str(i))
        result = await agent_on(cp, ["ok"] * 4, limits=Limits(turns=4)).prompt("go")
        assert result.stop_reason == "turn_limit"
        assert await waiting(other) == [f"follow_up: {i}" for i in range(3, 10)]
        await agent_on(other, ["ok"] * 8).prompt("go on")
        said = [text for text in await texts(cp, "t") if text.isdigit()]
        assert said == [str(i) for i in range(10)]
        assert await waiting(cp) == []

    with_two(database, use)


def test_a_thousand_follow_ups_are_heard_once_and_in_order(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp, ["ok"] * 2, follow_up_mode="all")
        receipts = [(agent.follow_up(str(i)) if i % 2 else other.follow_up("t", str(i))) for i in range(1_000)]
        result = await agent.prompt("go")
        assert [message.text for message in result.messages[2:-1]] == [str(i) for i in range(1_000)]
        assert (await texts(other, "t"))[2:-1] == [str(i) for i in range(1_000)]
        assert await waiting(other) == []
        assert all(receipt.done for receipt in receipts)

    with_two(database, use)


@pytest.mark.parametrize("kind", ["steer", "follow_up"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_message_with_an_id_of_its_own_is_queued_once(database: Database, kind: str, is_stored: bool) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        provider = ScriptedProvider(["1", "2", "3"])
        options = {"checkpointer": cp, "thread_id": "t"} if is_stored else {}
        agent = make(provider, follow_up_mode="all", steering_mode="all", **options)
        places: list[Any] = [agent]
        if is_stored:
            places += [cp_of("t", each) for each in (cp, other)]

        async def send(text: str) -> None:
            await asyncio.gather(*(getattr(place, kind)(UserMessage(text, id="m1")) for place in places * 2))

        await send("hi")
        assert [item.id for item in await agent.inbox()] == ["m1"]
        with pytest.raises(KeyReused, match=r"key 'm1' of thread .* is the id of another message"):
            await send("ho")
        assert await agent.withdraw("m1")
        await send("again")  # it is neither queued nor in the thread
        await agent.prompt("go")
        await send("again")  # it was delivered
        assert await agent.inbox() == []
        rejected = getattr(agent, kind)(UserMessage("ho", id="m1"))
        await agent.prompt("on")  # which does not fail for it
        with pytest.raises(KeyReused):
            await rejected
        heard = [message.text for message in agent.state.messages if isinstance(message, UserMessage)]
        assert heard == ["go", "again", "on"]

    with_two(database, use)


def cp_of(thread_id: str, cp: Checkpointer) -> Any:
    """A checkpointer, as a sender to one thread."""
    return SimpleNamespace(steer=partial(cp.steer, thread_id), follow_up=partial(cp.follow_up, thread_id))


def test_a_message_that_a_rewind_has_removed_can_be_queued_again(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        first = agent_on(cp, ["ok"])
        await first.prompt("go")
        point = await first.checkpoint()
        await cp.append("t", UserMessage("hi", id="m1"))
        await cp.steer("t", UserMessage("hi", id="m1"))
        assert await waiting(cp) == []
        await cp.rewind("t", point)
        await cp.steer("t", UserMessage("hi", id="m1"))
        assert await waiting(cp) == ["steer: hi"]

    with_cp(database, use)


def test_what_a_crashed_run_had_heard_is_not_heard_again_and_the_rest_is(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        for text in ("one", "two"):
            await other.follow_up("t", text)
        hanging = Hanging("Hel")
        agent = agent_on(cp, Acted(saying("hi"), hanging), save_partial=None)
        run = asyncio.create_task(agent.prompt("go"))
        await hanging.begun.wait()  # it has heard "one"
        await die(cp, agent, run)
        assert await waiting(other) == ["follow_up: two"]
        await agent_on(other, ["a", "b"]).resume()
        assert await texts(other, "t") == ["go", "hi", "one", "a", "two", "b"]

    with_two(database, use)


def test_a_run_of_somebody_who_is_gone_leaves_its_mail_to_the_next_one(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, dead_owner(cp), "go")
        await other.steer("t", "are you there?")
        provider = ScriptedProvider(["a", "b"])
        await agent_on(other, provider).resume()
        assert [text for text in await texts(cp, "t") if text not in "ab"] == ["go", "are you there?"]

    with_two(database, use)


# --- withdrawing ------------------------------------------------------------------------------------------------------


def test_what_was_not_heard_yet_can_be_withdrawn_by_whoever_knows_it(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        agent = agent_on(cp)
        receipts = [agent.follow_up(str(i)) for i in range(6)]
        await receipts[-1]
        items = await other.inbox("t")
        assert await agent.withdraw(receipts[0])
        assert await agent.withdraw(receipts[1].id)
        assert await agent.withdraw(items[2])
        assert await other.withdraw("t", receipts[3])
        assert await other.withdraw("t", items[4])
        assert await waiting(cp) == ["follow_up: 5"]
        assert not await agent.withdraw(receipts[0])
        assert not await other.withdraw("t", receipts[0].id)
        assert not await other.withdraw("another thread", receipts[5])
        assert not await other.withdraw("t", "unknown")
        assert await waiting(cp) == ["follow_up: 5"]
        assert await other.load("another thread") is None

    with_two(database, use)


@pytest.mark.parametrize("what", [None, 5, b"x", object()])
def test_what_is_no_message_cannot_be_withdrawn(database: Database, what: Any) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with pytest.raises(InputError, match=r"withdraw\(\)"):
            await cp.withdraw("t", what)
        with pytest.raises(InputError, match=r"withdraw\(\)"):
            await agent_on(cp).withdraw(what)

    with_two(database, use)


@pytest.mark.parametrize("kind", ["steer", "follow_up"])
def test_what_was_heard_cannot_be_withdrawn(database: Database, kind: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        receipt = await getattr(other, kind)("t", "said")
        await agent_on(cp, ["a", "b"]).prompt("go")
        assert not await other.withdraw("t", receipt)
        assert "said" in await texts(cp, "t")

    with_two(database, use)


@pytest.mark.parametrize("sender", ["agent", "checkpointer"])
def test_a_run_whose_mail_was_withdrawn_just_ends(database: Database, sender: str) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def answer(request: Request) -> str:
            receipt = agent.follow_up("no") if sender == "agent" else other.follow_up("t", "no")
            assert await other.withdraw("t", await receipt)
            return "ok"

        agent = agent_on(cp, [answer])
        heard = Heard(agent)
        result = await agent.prompt("go")
        assert (result.text, result.stop_reason) == ("ok", "stop")
        check_whole(heard)
        assert await is_free(cp)

    with_two(database, use)


def test_a_run_whose_mail_was_withdrawn_still_reads_its_reply_as_what_was_asked_for(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        async def answer(request: Request) -> str:
            assert await agent.withdraw(await agent.follow_up("no"))
            return '{"value": 17}'

        agent = agent_on(cp, [answer])
        result = await agent.prompt("how many?", output=int)
        assert (result.output, result.error) == (17, None)

    with_two(database, use)


def test_a_message_is_withdrawn_or_heard_and_never_both_or_neither(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        chance = random.Random(1)
        outcomes: Counter[bool] = Counter()
        for i in range(40):
            thread_id = f"t{i}"
            agent = agent_on(cp, [LOOK, "ok", "ok"], thread_id, tools=[look])
            receipt = await other.steer(thread_id, "maybe")

            async def take_back(pause: float, thread_id: str = thread_id, receipt: Receipt = receipt) -> bool:
                await asyncio.sleep(pause)
                return await other.withdraw(thread_id, receipt)

            _, withdrawn = await asyncio.gather(agent.prompt("go"), take_back(chance.random() * 0.012))
            assert (await texts(cp, thread_id)).count("maybe") == (0 if withdrawn else 1)
            assert await waiting(cp, thread_id) == []
            outcomes[withdrawn] += 1
        assert sum(outcomes.values()) == 40

    with_two(database, use)


def test_a_run_that_slept_does_not_make_a_deleted_thread_anew(database: Database) -> None:
    async def use(cp: Checkpointer, _: Checkpointer) -> None:
        limits = {"steer": 1}
        taken = await cp.store.write(
            inbox.take, ThreadKey("", "gone"), by=Lease(1, 30.0), expect=threads.ANY, limits=limits
        )
        assert taken == (None, [])
        assert await cp.threads() == []

    with_two(database, use)
