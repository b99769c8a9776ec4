"""The text of a reply while it arrives: from memory in the same process, from what was saved in another one."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from byssus import Middleware, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import HookFailed, InputError, LeaseLost, StoreBusy
from byssus.events import (
    MessageUpdate,
    TextDelta,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import AssistantMessage, TextContent, ThinkingContent
from byssus.queries.following import rows as following
from byssus.queries.log import threads
from byssus.threads.following import arriving, hub, news
from byssus.threads.following.arriving import PartialWriter
from byssus.threads.thread import partial_of
from byssus.values.following.growth import Growth
from byssus.values.following.items import CaughtUp, InboxPut, Lagged, MessageAdded, ReplyDelta, ReplyReset
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted, make
from tests.support.checkpointers import loaded, with_cp
from tests.support.databases import Database
from tests.support.following import Client, Following, Told, told
from tests.support.leases import agent_on, die, look, until

T = ThreadKey("", "t")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers read what was saved, as in another process."""
    monkeypatch.setattr(arriving, "beside", lambda _store, _key, publish: publish)


# --- in the same process ----------------------------------------------------------------------------------------------


def test_a_follower_sees_each_word_as_it_arrives_and_then_the_message(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene, follower = Told(), Following(cp)
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=None).prompt("go"))
        for count, word in enumerate(["one", " two", " 汉字"], 1):
            scene.say(word)
            await follower.until(lambda count=count: len(follower.of(ReplyDelta)) >= count)  # type: ignore[misc]
        late = Following(cp)
        await late.until(lambda: late.client.text == "one two 汉字")
        scene.end()
        (reply,) = [m for m in (await run).messages if isinstance(m, AssistantMessage)]
        await follower.until_texts("go", "one two 汉字")
        deltas = [(item.offset, item.delta) for item in follower.of(ReplyDelta)]
        assert deltas == [(0, "one"), (3, " two"), (7, " 汉字")]
        assert {item.reply for item in follower.of(ReplyDelta)} == {reply.id}
        assert follower.of(ReplyReset) == []
        await late.until_texts("go", "one two 汉字")
        assert hub.of(cp.store).live == {}
        await follower.stop()
        await late.stop()

    with_cp(database, use)


def test_thinking_and_the_arguments_of_calls_arrive_too(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene, follower, done = Told(), Following(cp), Told()
        run = asyncio.create_task(agent_on(cp, Acted(scene, done), tools=[look]).prompt("go"))
        scene.say(ThinkingStart(0), ThinkingDelta(0, "hm"), ThinkingEnd(0, "signed"), TextDelta(1, "so"))
        scene.say(ToolCallStart(2, "c1", "look"), ToolCallDelta(2, "{"), ToolCallDelta(2, "}"))
        scene.say(ToolCallEnd(2, ToolCall("c1", "look")), ToolCallStart(3, "c2", "look"))
        scene.say(ToolCallEnd(3, ToolCall("c2", "look")))
        await follower.until(lambda: "".join(item.delta for item in follower.of(ReplyDelta)).endswith("{}{}"))
        deltas = follower.of(ReplyDelta)
        assert {(item.block, item.kind, item.call_id, item.tool_name) for item in deltas} == {
            (0, "thinking", None, None),
            (1, "text", None, None),
            (2, "arguments", "c1", "look"),
            (3, "arguments", "c2", "look"),
        }
        scene.end()
        done.say("done")
        done.end()
        await run
        await follower.until(lambda: "done" in follower.client.texts)
        assert follower.of(ReplyReset) == []
        await follower.stop()

    with_cp(database, use)


def test_a_cursor_inside_a_reply_continues_there(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene, follower = Told(), Following(cp)
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=0.005).prompt("go"))
        scene.say("one", " two", " three")
        await follower.until(lambda: follower.client.text == "one two three")
        cuts = [Client().see(follower.items[:count]) for count in range(len(follower.items) + 1)]
        for client in cuts:
            other = Following(cp, after=client.cursor)
            await other.until(lambda other=other, client=client: _joined(client, other).text == "one two three")  # type: ignore[misc]
            await other.stop()
        scene.say(" four")
        scene.end()
        await run
        for client in cuts:
            items = await told(cp, after=client.cursor)
            assert not any(isinstance(item, ReplyReset) for item in items)
            assert client.see(items).log == (await loaded(cp, "t")).messages
        await follower.stop()

    def _joined(client: Client, other: Following) -> Client:
        joined = Client()
        joined.messages, joined.arriving, joined.reply = {**client.messages}, {**client.arriving}, client.reply
        return joined.see(other.items)

    with_cp(database, use)


def test_a_follower_that_does_not_read_is_told_that_it_lagged_and_misses_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "_MOST_UNREAD", 1_000)

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("before"))
        items = cp.follow("t")
        seen = [await anext(items), await anext(items)]
        scene = Told()
        run = asyncio.create_task(agent_on(cp, Acted(scene)).prompt("go"))
        scene.say(*["x" * 100] * 50)
        await until(lambda: (live := hub.of(cp.store).live.get(T)) and sum(live.growth.offsets.values()) == 5_000)
        while not isinstance(seen[-1], ReplyDelta):
            seen.append(await anext(items))
        assert any(isinstance(item, Lagged) for item in seen)
        scene.end()
        await run
        await cp.append("t", [UserMessage(f"{number}") for number in range(100)])
        while not (isinstance(seen[-1], MessageAdded) and seen[-1].message.text == "99"):
            seen.append(await anext(items))
        assert Client().see(seen).log == (await loaded(cp, "t")).messages
        assert sum(isinstance(item, Lagged) for item in seen) == 2
        await items.aclose()

    with_cp(database, use)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_follower_that_stops_reading_holds_little_of_a_long_reply(
    database: Database, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "elsewhere":
        monkeypatch.setattr(arriving, "beside", lambda _store, _key, publish: publish)

    async def use(cp: Checkpointer) -> None:
        scene, watcher = Told(), Following(cp)
        saves = None if where == "here" else 0.005  # a save under way would count as held
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=saves).prompt("go"))
        for count in range(1, 41):
            scene.say("x" * 50_000)
            await watcher.until(lambda count=count: len(watcher.client.text) == count * 50_000)  # type: ignore[misc]
        await watcher.stop()
        items = cp.follow("t", after=watcher.items[0].cursor)
        assert await _held(items, ReplyDelta) < MOST_HELD
        scene.end()
        await run
        await items.aclose()

    with_cp(database, use)


def test_a_follower_that_stops_reading_holds_little_of_a_long_log(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("x" * 50_000) for _ in range(40)])
        items = cp.follow("t")
        assert await _held(items, MessageAdded) < MOST_HELD
        await items.aclose()

    with_cp(database, use)


def test_a_follower_that_stops_reading_holds_little_of_what_is_queued(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await asyncio.gather(*(cp.steer("t", UserMessage("x" * 50_000, id=f"{n:02}")) for n in range(20)))
        items = cp.follow("t")
        assert await _held(items, InboxPut) < MOST_HELD
        rest: list[Any] = []
        while not rest or not isinstance(rest[-1], CaughtUp):
            rest.append(await anext(items))
        await items.aclose()
        assert sorted(item.message_id for item in rest[:-1] if isinstance(item, InboxPut)) == sorted(rest[-1].inbox[1:])
        assert len(rest) == 20

    with_cp(database, use)


MOST_HELD = 256_000  # bytes


async def _held(items: AsyncIterator[Any], kind: type[Any]) -> int:
    """The bytes that Python holds because somebody has read one item of a kind, and then no more."""
    tracemalloc.start()
    try:
        while not isinstance(await anext(items), kind):
            pass
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_reply_that_a_hook_shortens_is_reset(database: Database) -> None:
    class Shorter(Middleware):
        async def after_model_response(self, message: AssistantMessage, **_: Any) -> AssistantMessage:
            return AssistantMessage("no")

    async def use(cp: Checkpointer) -> None:
        scene, follower = Told(), Following(cp)
        run = asyncio.create_task(agent_on(cp, Acted(scene), middleware=[Shorter()]).prompt("go"))
        scene.say("secret")
        await follower.until(lambda: follower.client.text == "secret")
        scene.end()
        await run
        await follower.until_texts("go", "no")
        assert len(follower.of(ReplyReset)) == 1
        await follower.stop()

    with_cp(database, use)


def test_a_reply_that_a_hook_refuses_is_reset_and_does_not_come_again(database: Database) -> None:
    class Refusing(Middleware):
        async def after_model_response(self, message: AssistantMessage, **_: Any) -> AssistantMessage:
            raise ValueError("no")

    async def use(cp: Checkpointer) -> None:
        scene, follower = Told(), Following(cp)
        run = asyncio.create_task(agent_on(cp, Acted(scene), middleware=[Refusing()]).prompt("go"))
        scene.say("secret")
        await follower.until(lambda: follower.client.text == "secret")
        scene.end()
        with pytest.raises(HookFailed):
            await run
        await follower.until_type("run_ended")
        await cp.append("t", UserMessage("later"))
        await follower.until_texts("go", "later")
        story = [item.type for item in await follower.stop() if item.type in ("reply_delta", "reset", "run_ended")]
        assert story == ["reply_delta", "reset", "run_ended"]

    with_cp(database, use)


# --- from another process ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("far")
def test_what_was_saved_is_shown_and_the_rest_before_the_message(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene, follower = Told(), Following(cp)
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=0.005).prompt("go"))
        for text in ("one", "one two", "one two three"):
            scene.say(text[len(follower.client.text) :])
            await follower.until(lambda text=text: follower.client.text == text)  # type: ignore[misc]
        scene.say(" four")
        scene.end()
        await run
        await follower.until_texts("go", "one two three four")
        assert "".join(item.delta for item in follower.of(ReplyDelta)) == "one two three four"
        assert follower.of(ReplyReset) == []
        await follower.stop()

    with_cp(database, use)


@pytest.mark.usefixtures("far")
def test_a_watched_reply_is_saved_more_often(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene = Told()
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=3_600).prompt("go"))
        scene.say("one")
        follower = Following(cp)
        await follower.until(lambda: follower.client.text == "one")
        assert await cp.store.read(following.is_watched, T)
        scene.end()
        await run
        await follower.stop()

    with_cp(database, use)


@pytest.mark.usefixtures("far")
def test_a_reply_that_died_with_its_process_is_reset_and_what_was_saved_of_one_is_kept(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene, follower = Told(), Following(cp)
        agent = agent_on(cp, Acted(scene), save_partial=0.005)
        run = asyncio.create_task(agent.prompt("go"))
        scene.say("one")
        await follower.until(lambda: follower.client.text == "one")
        further = Client().see(follower.items)  # it has seen more than was saved
        assert further.cursor is not None
        further.cursor = further.cursor.replace("0t3", "0t9")
        further.arriving = {0: "one crash"}
        await die(cp, agent, run)
        await agent_on(cp, ["again"]).resume()
        await follower.until_texts("go", "one", "again")
        assert follower.of(ReplyReset) == []
        items = await told(cp, after=further.cursor)
        assert [item.type for item in items if item.type in ("reset", "message")][:2] == ["reset", "message"]
        assert further.see(items).log == (await loaded(cp, "t")).messages
        await follower.stop()

    with_cp(database, use)


# --- saving -----------------------------------------------------------------------------------------------------------


def test_each_word_is_saved_once(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene = Told()
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=0.005).prompt("go"))
        scene.say(ThinkingStart(0), ThinkingDelta(0, "hm"), ThinkingEnd(0, "signed"))
        whole = ""
        for number in range(10):
            word = f"word {number} "
            whole += word
            scene.say(TextDelta(1, word))
            await until(lambda whole=whole: _saved_text(cp, whole))  # type: ignore[misc]
        partial = (await loaded(cp, "t")).partial
        assert partial is not None
        assert partial.content == [ThinkingContent("hm", "signed"), TextContent(whole)]
        rows = await cp.store.read(lambda tx: tx.all("SELECT body FROM pieces"))
        assert sum(body.count("word") for (body,) in rows) == 10
        scene.end()
        await run
        assert await cp.store.read(lambda tx: tx.all("SELECT body FROM pieces")) == []

    async def _saved_text(cp: Checkpointer, text: str) -> bool:
        thread = await cp.load("t")
        return thread is not None and thread.partial is not None and thread.partial.text == text

    with_cp(database, use)


def test_after_a_save_that_failed_the_whole_is_saved_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = threads.add_piece, [StoreBusy("not now")]

    def add_piece(*args: Any, **kwargs: Any) -> None:
        if failures:
            raise failures.pop()
        real(*args, **kwargs)

    monkeypatch.setattr(threads, "add_piece", add_piece)

    async def use(cp: Checkpointer) -> None:
        scene = Told()
        run = asyncio.create_task(agent_on(cp, Acted(scene), save_partial=0.005).prompt("go"))
        scene.say("one")
        await until(lambda: _is(cp, "one"))
        scene.say(" two")
        await until(lambda: not failures)
        scene.say(" three")
        await until(lambda: _is(cp, "one two three"))
        scene.say(" four")
        await until(lambda: _is(cp, "one two three four"))
        assert failures == []
        scene.end()
        await run

    async def _is(cp: Checkpointer, text: str) -> bool:
        thread = await cp.load("t")
        return thread is not None and thread.partial is not None and thread.partial.text == text

    with_cp(database, use)


def test_without_a_lease_nothing_is_saved_and_the_writer_says_so(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        growth, writer = Growth(), PartialWriter(cp.store, T, lambda: None, "r1", "now")
        assert writer.save(growth, lambda: AssistantMessage("")) is None
        growth.add(TextDelta(0, "one"))
        write = writer.save(growth, lambda: AssistantMessage(""))
        assert write is not None  # None would let a strict stream publish it
        with pytest.raises(LeaseLost):
            write.result()

    with_cp(database, use)


# --- strict -----------------------------------------------------------------------------------------------------------


def test_strict_publishes_nothing_that_is_not_committed(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        scene = Told()
        agent = agent_on(cp, Acted(scene), stream_durability="strict", save_partial=None)
        shown: list[str] = []
        unsaved: list[str] = []

        def hear(event: Any) -> None:
            if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
                shown.append(event.stream_event.delta)
                saved = cp.store.read_now(_saved)
                if "".join(shown) not in saved:
                    unsaved.append(event.stream_event.delta)

        agent.subscribe(hear)
        follower = Following(cp)
        run = asyncio.create_task(agent.prompt("go"))
        for number in range(5):
            scene.say(f"{number} a", " b")
            await until(lambda number=number: "".join(shown).endswith(f"{number} a b"))  # type: ignore[misc]
        await follower.until(lambda: follower.client.text == "".join(shown))
        scene.say("the end")
        scene.end()
        result = await run
        assert "".join(shown) == result.text
        assert unsaved == []
        await follower.until_texts("go", result.text)
        assert follower.of(ReplyReset) == []
        await follower.stop()

    def _saved(tx: Any) -> str:
        row = threads.find(tx, T)
        assert row is not None
        partial = partial_of(tx, row)
        return partial.text if partial is not None else ""

    with_cp(database, use)


def test_strict_goes_on_after_a_save_that_failed_and_publishes_each_word_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = threads.save_partial, [StoreBusy("not now"), StoreBusy("not yet")]

    def save_partial(*args: Any, **kwargs: Any) -> None:
        if failures:
            raise failures.pop()
        real(*args, **kwargs)

    monkeypatch.setattr(threads, "save_partial", save_partial)

    async def use(cp: Checkpointer) -> None:
        scene, shown = Told(), list[str]()
        agent = agent_on(cp, Acted(scene), stream_durability="strict")
        agent.subscribe(_texts_into(shown))
        run = asyncio.create_task(agent.prompt("go"))
        scene.say("one", " two")
        await until(lambda: "".join(shown) == "one two")
        scene.say(" three")
        scene.end()
        assert (await run).text == "one two three"
        assert "".join(shown) == "one two three"
        assert failures == []

    with_cp(database, use)


def _texts_into(shown: list[str]) -> Callable[[Any], None]:
    def hear(event: Any) -> None:
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
            shown.append(event.stream_event.delta)

    return hear


def test_strict_streams_and_aborts_end_as_others_do(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello there"], stream_durability="strict")
        texts = list[str]()
        agent.subscribe(_texts_into(texts))
        assert [event async for event in agent.stream("go")][-1].type == "agent_end"
        assert "".join(texts) == "hello there"
        scene, shown = Told(), list[str]()
        agent = agent_on(cp, Acted(scene), stream_durability="strict")
        agent.subscribe(_texts_into(shown))
        run = asyncio.create_task(agent.prompt("more"))
        scene.say("half")
        await until(lambda: shown)
        agent.abort()
        result = await run
        assert (result.stop_reason, result.text) == ("aborted", "half")

    with_cp(database, use)


def test_strict_needs_a_database_and_a_known_word() -> None:
    with pytest.raises(InputError, match="without a checkpointer"):
        make([], stream_durability="strict")
    with pytest.raises(InputError, match="stream_durability must be"):
        make([], stream_durability="very")
