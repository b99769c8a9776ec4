"""Lists of threads: the state of each, which all that shows one agrees about, and the title."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from byssus import AssistantMessage, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer, ThreadInfo
from byssus.errors import InputError, LeaseLost, NotFound, ProviderError
from byssus.storage import AgentStorage
from byssus.store.database import Tx
from byssus.threads import listing
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted
from tests.support.checkpointers import loaded, with_cp
from tests.support.databases import Database
from tests.support.leases import (
    CALL_SLOW,
    FAR_AWAY,
    DatabaseClock,
    Slow,
    Streaming,
    agent_on,
    changed,
    claim,
    dead_owner,
    die,
    expire,
    live_owner,
    unfinished,
    until,
    with_two,
)

# --- states -----------------------------------------------------------------------------------------------------------


async def state(cp: Checkpointer, thread_id: str = "t") -> str:
    """The state of a thread. All that tells of it must agree."""
    found = await cp.state(thread_id)
    info = await cp.info(thread_id)
    assert info is not None
    assert info.state == found
    assert [listed.state for listed in await cp.threads() if listed.id == thread_id] == [found]
    assert (thread_id in await unfinished(cp)) == (found == "interrupted")
    assert bool(await cp.pending(thread_id)) == (found == "waiting")
    return found


def test_a_thread_without_a_run_is_idle(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        assert await cp.state("nothing was ever stored here") == "idle"
        await cp.append("written", UserMessage("x"))
        await agent_on(cp, ["ok"], "finished").prompt("go")
        await agent_on(cp, [ProviderError("no")], "failed", max_retries=0).prompt("go")
        await cp.steer("steered", "hello")
        for name in ("written", "finished", "failed", "steered"):
            assert await state(other, name) == "idle"

    with_two(database, use)


def test_a_run_that_streams_in_another_process_is_running_and_interrupted_when_that_has_died(
    database: Database,
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        scene = Streaming("half ", "an ", "answer")
        agent = agent_on(cp, Acted(scene), save_partial=0.001)
        run = asyncio.create_task(agent.prompt("go"))
        await until(lambda: scene.is_saved(other))
        assert (await state(cp), await state(other)) == ("running", "running")
        await die(cp, agent, run)
        assert await state(other) == "interrupted"
        assert (await agent_on(other, ["ok"]).resume()).text == "ok"
        assert (await state(cp), await state(other)) == ("idle", "idle")

    with_two(database, use)


def test_a_question_waits_until_it_is_answered_and_then_for_its_run(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ask = Slow(approval=True)
        calls = [ToolCall("c1", "slow"), ToolCall("c2", "slow")]
        await agent_on(cp, [calls], tools=[ask.tool]).prompt("go")
        assert await state(other) == "waiting"
        await other.answer("t", "c1", "approve")
        assert await state(other) == "waiting"
        await other.answer("t", "c2", "approve")
        assert await state(other) == "interrupted"  # it was answered, and nobody went on
        run = asyncio.create_task(agent_on(cp, ["ok"], tools=[ask.tool]).resume())
        await until(lambda: ask.begun.is_set() or run.done())
        assert await state(other) == "running"
        ask.let_go.set()
        await run
        assert await state(other) == "idle"

    with_two(database, use)


def test_while_a_run_goes_on_its_question_does_not_make_the_thread_wait(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        ask, slow = Slow("ask", approval=True), Slow()
        calls = [ToolCall("c1", "ask"), ToolCall("c2", "slow")]
        run = asyncio.create_task(agent_on(cp, [calls], tools=[ask.tool, slow.tool]).prompt("go"))
        await slow.begun.wait()
        await until(lambda: other.pending("t"))
        assert await other.state("t") == "running"
        slow.let_go.set()
        await run
        assert await state(other) == "waiting"

    with_two(database, use)


def test_a_lease_of_another_machine_is_running_until_it_runs_out(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "go")
        assert await state(other) == "running"
        await expire(cp)
        assert await state(other) == "interrupted"

    with_two(database, use)


def test_a_lease_of_this_machine_is_running_while_its_process_lives(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with live_owner(cp) as lives:
            await claim(cp, lives, "go", thread_id="lives")
            await claim(cp, dead_owner(cp), "go", thread_id="died")
            assert await state(other, "lives") == "running"
            assert await state(other, "died") == "interrupted"
        await expire(cp)
        assert await state(other, "lives") == "interrupted"

    with_two(database, use)


def test_a_session_that_no_run_may_take_up_is_not_interrupted(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, dead_owner(cp), "go")
        for stop in (cp.pause_session, cp.cancel_session):
            await stop("t")
            assert await state(other) == "idle"
        await cp.resume_session("t")
        assert await state(other) == "interrupted"

    with_two(database, use)


def test_when_the_clock_jumps_ahead_a_run_has_lost_its_thread(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        time_is.off = timedelta(hours=1)
        assert await state(other) == "interrupted"  # as its next write shows
        await agent_on(other, ["mine"], tools=[slow.tool]).resume()
        assert await state(other) == "idle"
        slow.let_go.set()
        with pytest.raises(LeaseLost):
            await run

    with_two(database, use)


def test_when_the_clock_went_back_a_lease_that_nobody_renews_ends_in_its_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        time_is = DatabaseClock(monkeypatch)
        await claim(cp, changed(FAR_AWAY, seconds=0.2), "theirs")
        time_is.off = -timedelta(days=1)  # until tomorrow, says the row
        assert await other.state("t") == "running"

        async def is_interrupted() -> bool:
            return await other.state("t") == "interrupted"

        await until(is_interrupted)

    with_two(database, use)


def test_the_state_of_a_thread_in_a_namespace(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, FAR_AWAY, "go", thread_id="main")
        assert await other.state(ThreadKey("ann", "main")) == "idle"
        assert await other.state(ThreadKey("", "main")) == "running"
        with pytest.raises(InputError, match="a thread id must be a string"):
            await other.state("")

    with_two(database, use)


def test_the_storage_tells_the_state_too(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await claim(cp, dead_owner(cp), "go")

    with_two(database, use)
    with AgentStorage(database.place) as storage:
        assert storage.state("t") == "interrupted"
        assert storage.state("another") == "idle"


# --- titles -----------------------------------------------------------------------------------------------------------


async def listed(cp: Checkpointer, thread_id: str = "t") -> ThreadInfo:
    """A thread as a list shows it, which must be what is told of it alone."""
    (found,) = [info for info in await cp.threads() if info.id == thread_id]
    assert await cp.info(thread_id) == found
    return found


def test_a_thread_has_the_title_that_was_set_and_else_its_first_words(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        await cp.append("t", [AssistantMessage("Welcome!"), UserMessage("Where is\n\n Oslo?"), UserMessage("Rome?")])
        assert (await listed(cp))[-3:-1] == ("Where is Oslo?", "Where is Oslo?")
        await cp.set_title("t", "  去奥斯陆 🧳 ")
        assert (await listed(other))[-3:-1] == ("去奥斯陆 🧳", "Where is Oslo?")
        for automatic in (None, "", " \n"):
            await cp.set_title("t", "x")
            await cp.set_title("t", automatic)
            assert (await listed(other)).title == "Where is Oslo?"

    with_two(database, use)


def test_a_title_changes_nothing_else_and_may_be_set_while_a_run_goes_on(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "ok"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        before, version = await listed(other), (await loaded(other, "t")).position.version
        await other.set_title("t", "Slow things")
        after = await listed(other)
        assert after == before._replace(title="Slow things")
        assert (await loaded(other, "t")).position.version == version
        slow.let_go.set()
        assert (await run).text == "ok"
        assert (await listed(other)).title == "Slow things"

    with_two(database, use)


@pytest.mark.parametrize(
    ("thread_id", "title", "told"),
    [
        ("nobody", "x", r"there is no thread 'nobody'; threads\(\) lists them"),
        ("t", "a\0b", "title cannot contain NUL or lone surrogates"),
        ("t", "\ud800", "title cannot contain NUL or lone surrogates"),
        ("t", 7, "title must be a string, got 7"),
        ("t", "x" * 501, "title can have 500 characters at most, got 501: 'xxx"),
        ("", "x", "a thread id must be a string"),
    ],
)
def test_a_title_that_cannot_be_set_is_refused(database: Database, thread_id: str, title: str, told: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hello"))
        with pytest.raises(NotFound if thread_id == "nobody" else InputError, match=told):
            await cp.set_title(thread_id, title)
        assert [info.title for info in await cp.threads()] == ["hello"]

    with_cp(database, use)


WORDS = "word " * 30
OPENINGS: list[tuple[object, str]] = [
    (UserMessage(WORDS), "word " * 11 + "word"),
    (UserMessage("天气" * 100), "天气" * 30),
    (UserMessage("x " * 1_000_000), ("x " * 30).strip()),
    (UserMessage('"quoted" \\ é' + " more" * 2_000), '"quoted" \\ é' + " more" * 9),
    (UserMessage("a\0b \ud800 c"), "a\\0b \\ud800 c"),
    (UserMessage(""), ""),
    ({"role": "user", "content": [{"type": "image", "data": "QUJD" * 5_000, "mime_type": "image/png"}]}, ""),
    ({"role": "user", "content": "from a dict"}, "from a dict"),
    ({"role": "user", "content": None}, ""),
    (AssistantMessage("nobody asked"), ""),
    ({"role": "note", "text": "user"}, ""),
]


@pytest.mark.parametrize(("message", "words"), OPENINGS, ids=range(len(OPENINGS)))
def test_first_words_come_from_whatever_a_user_has_said(database: Database, message: object, words: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", message)  # type: ignore[arg-type]
        assert (await listed(cp)).first_words == words

    with_cp(database, use)


def test_a_message_that_is_no_json_spoils_no_list(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for number, body in enumerate(['{"text": "cut \\u00', "", "nonsense"]):
            await cp.append(f"t{number}", UserMessage("x"))
            await cp.store.write(_set_body, f"t{number}", body)
        assert [info.first_words for info in await cp.threads()] == ["", "", "cut"]

    with_cp(database, use)


def _set_body(tx: Tx, thread_id: str, body: str) -> None:
    tx.run(
        "UPDATE messages SET body = :body WHERE branch = (SELECT branch FROM threads WHERE id = :id)",
        body=body,
        id=thread_id,
    )


def test_a_fork_begins_with_the_first_words_of_its_origin(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [AssistantMessage("Hi!")] * 4)
        await cp.fork("t", new_id="before")
        await cp.append("t", [UserMessage("first"), UserMessage("second")])
        await cp.fork("t", new_id="after")
        await cp.append("before", UserMessage("another"))
        await cp.append("after", UserMessage("third"))
        assert [(await listed(cp, name)).first_words for name in ("t", "before", "after")] == [
            "first",
            "another",
            "first",
        ]

    with_cp(database, use)


def test_the_storage_sets_a_title_and_a_session_has_it(database: Database) -> None:
    with AgentStorage(database.place) as storage:
        storage.create_user("Ann", user_id="ann")
        session = storage.create_session("ann", "Weather")["id"]
        assert [info.title for info in storage.threads()] == ["Weather"]
        storage.set_title(session, "Climate")
        found = storage.get_session(session)
        assert found is not None
        assert found["title"] == "Climate"


# --- filters ----------------------------------------------------------------------------------------------------------


async def ids(cp: Checkpointer, **filters: Any) -> list[str]:
    return [info.id for info in await cp.threads(**filters)]


def test_a_list_of_one_user_in_pages(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for name in ("ann", "bob"):
            await cp.create_user(name, user_id=name)
        for number in range(6):
            await cp.append(f"t{number}", UserMessage("x"))
            await cp.set_user(f"t{number}", ("ann", "bob", None)[number % 3])
        assert await ids(cp, user_id="ann") == ["t3", "t0"]
        assert await ids(cp, user_id="bob", limit=1) == ["t4"]
        assert await ids(cp, user_id="bob", limit=1, before="t4") == ["t1"]
        assert await ids(cp, user_id="bob", before="t1") == []
        assert await ids(cp, user_id="nobody") == []

    with_cp(database, use)


def test_a_list_of_the_threads_in_a_state(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        with live_owner(cp) as lives:
            await claim(cp, lives, "go", thread_id="lives")
            await claim(cp, FAR_AWAY, "go", thread_id="away")
            await claim(cp, dead_owner(cp), "go", thread_id="died")
            await claim(cp, dead_owner(cp), "go", thread_id="paused")
            await cp.pause_session("paused")
            ask = Slow(approval=True)
            await agent_on(cp, [[ToolCall("c1", "slow")]], "asks", tools=[ask.tool]).prompt("go")
            await cp.append("idle", UserMessage("x"))
            assert await ids(other, state="running") == ["away", "lives"]
            assert await ids(other, state="waiting") == ["asks"]
            assert await ids(other, state="interrupted") == ["died"]
            assert await ids(other, state="idle") == ["idle", "paused"]
            assert await ids(other, state="idle", limit=1, before="idle") == ["paused"]

    with_two(database, use)


def test_a_list_by_a_part_of_the_title_or_the_first_words(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for name, words in (("a", "STRASSE in Köln"), ("b", "上海的天气"), ("c", "100% sure")):
            await cp.append(name, UserMessage(words))
        await cp.set_title("b", "Wetter in KÖLN")
        assert await ids(cp, title="straße") == ["a"]
        assert await ids(cp, title=" köln ") == ["b", "a"]
        assert await ids(cp, title="天气") == ["b"]
        assert await ids(cp, title="0%") == ["c"]
        assert await ids(cp, title="_") == await ids(cp, title="\ud800") == []

    with_cp(database, use)


def test_pages_are_read_until_enough_threads_are_found(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PAGE", 3)

    async def use(cp: Checkpointer) -> None:
        for number in range(12):
            await cp.append(f"t{number:02}", UserMessage("rare" if number % 5 == 0 else "common"))
        assert await ids(cp, title="rare") == ["t10", "t05", "t00"]
        assert await ids(cp, title="rare", state="idle", limit=2) == ["t10", "t05"]
        assert await ids(cp, title="rare", limit=1, before="t10") == ["t05"]
        assert await ids(cp, title="rare", limit=0) == []
        assert len(await ids(cp, title="common", limit=7)) == 7

    with_cp(database, use)


@pytest.mark.parametrize(
    ("filters", "told"),
    [
        ({"user_id": ""}, "user_id must be a string with at least one character, got ''"),
        ({"user_id": 7}, "user_id must be a string"),
        ({"user_id": "a\0"}, "user_id cannot contain NUL"),
        (
            {"state": "busy"},
            "state must be one of 'running', 'waiting', 'quarantined', 'interrupted', 'idle'; got 'busy'",
        ),
        ({"state": ["idle"]}, "state must be one of"),
        ({"title": " "}, "title must be a part of a title, a string that is not blank; got ' '"),
        ({"title": 7}, "title must be a part of a title"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused(database: Database, filters: dict[str, Any], told: str) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match=told):
            await cp.threads(**filters)

    with_cp(database, use)


def test_the_storage_filters_too(database: Database) -> None:
    with AgentStorage(database.place) as storage:
        storage.create_user("Ann", user_id="ann")
        storage.create_session("ann", "Weather")
        storage.create_session("ann", "Climate")
        assert [info.title for info in storage.threads(user_id="ann", state="idle", title="wea")] == ["Weather"]
