"""Sessions of AgentStorage and what is said in them; agents and applications write to the same log."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from byssus import AssistantMessage, ToolCall, ToolResultMessage, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, NotFound, ThreadBusy
from byssus.messages import MAX_DEPTH, Usage
from byssus.providers.history import UNKNOWN_OUTCOME
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage, HistoryRow, SessionRow, SessionStatus
from byssus.values import clock
from tests.support.accounts import drive, nested
from tests.support.cases import case
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.leases import Slow, agent_on, brief, look
from tests.support.tool_calls import Acting, act

SQL = "'); DROP TABLE threads; --"
KEYS = {
    "id",
    "user_id",
    "title",
    "status",
    "model",
    "total_tokens",
    "total_cost",
    "message_count",
    "metadata",
    "metadata_json",
    "created_at",
    "updated_at",
}
ROW = {"id", "role", "content", "tool_calls", "tool_calls_json", "tool_call_id", "token_count", "created_at"}


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


@pytest.fixture
def session(storage: AgentStorage) -> str:
    storage.create_user("ann", user_id="ann")
    made: str = storage.create_session("ann", session_id="t")["id"]
    return made


def got(storage: AgentStorage, session_id: str) -> SessionRow:
    found = storage.get_session(session_id)
    assert found is not None
    return found


def history(storage: AgentStorage, session_id: str = "t", limit: int = 10_000) -> list[HistoryRow]:
    found = storage.get_conversation_history(session_id, limit)
    assert found is not None
    return found


def contents(storage: AgentStorage, session_id: str = "t") -> list[Any]:
    return [row["content"] for row in history(storage, session_id)]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_comes_back_with_all_its_keys(storage: AgentStorage) -> None:
    user = storage.create_user("ann")["id"]
    made = storage.create_session(user, "a trip", "gpt-5", metadata={"a": [1, None]})
    assert made.keys() == KEYS
    assert (made["user_id"], made["title"], made["model"], made["status"]) == (user, "a trip", "gpt-5", "active")
    assert (made["total_tokens"], made["total_cost"], made["message_count"]) == (0, 0.0, 0)
    assert (made["metadata"], made["metadata_json"]) == ({"a": [1, None]}, '{"a": [1, null]}')
    assert storage.get_session(made["id"]) == made


def test_a_session_is_made_from_a_user_alone(storage: AgentStorage) -> None:
    made = storage.create_session(storage.create_user("ann")["id"])
    assert (made["title"], made["model"], made["metadata"]) == ("新对话", "gpt-4o-mini", {})


def test_a_session_may_be_nobodys(storage: AgentStorage) -> None:
    assert storage.create_session(None, model=None)["user_id"] is None


def test_an_id_that_is_taken_is_refused_and_its_session_stays(storage: AgentStorage, session: str) -> None:
    storage.save_message(session, "user", "hi")
    before = got(storage, session)
    with pytest.raises(InputError, match="there is a session 't' already"):
        storage.create_session(None, "other", session_id=session)
    assert got(storage, session) == before


def test_sessions_are_listed_by_their_last_write_the_newest_first(storage: AgentStorage) -> None:
    user, other = storage.create_user("ann")["id"], storage.create_user("bob")["id"]
    made = [storage.create_session(user, f"{n}")["id"] for n in range(5)]
    storage.create_session(other)
    storage.save_message(made[2], "user", "hi")
    storage.pause_session(made[0])

    def listed(*page: int, status: SessionStatus | None = None) -> list[int]:
        found = storage.list_user_sessions(user, *page, status=status)
        assert found is not None
        return [made.index(row["id"]) for row in found]

    assert listed() == [0, 2, 4, 3, 1]
    assert listed(2, 1) == [2, 4]
    assert listed(0) == listed(5, 5) == []
    assert listed(status="paused") == [0]
    assert listed(status="completed") == []


@pytest.mark.parametrize("name", ["nothing", "", "\0", "\ud800", SQL, "x" * 10_000])
def test_reading_a_session_that_does_not_exist_answers_none(storage: AgentStorage, session: str, name: str) -> None:
    assert storage.get_session(name) is None
    assert storage.get_conversation_history(name) is None
    assert storage.get_message(name, "m") is None
    assert storage.get_message(session, name) is None
    assert storage.list_tasks(name) is None
    assert storage.list_tool_calls(name) is None
    assert storage.get_session_usage(name) is None
    assert got(storage, session)["message_count"] == 0


@pytest.mark.parametrize("name", ["nothing", SQL])
def test_writing_to_a_session_that_does_not_exist_raises_and_makes_none(storage: AgentStorage, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: storage.update_session(name, title="x"),
        lambda: storage.pause_session(name),
        lambda: storage.resume_session(name),
        lambda: storage.complete_session(name),
        lambda: storage.cancel_session(name),
        lambda: storage.delete_session(name),
        lambda: storage.save_message(name, "user", "hi"),
        lambda: storage.update_message(name, "m", "hi"),
        lambda: storage.delete_message(name, "m"),
        lambda: storage.log_tool_call(name, "look", {}, {}, 1),
        lambda: storage.create_task(name, "t", {}),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="there is no session"):
            call()
    assert storage.get_session(name) is None


def test_an_update_changes_what_is_passed_and_nothing_else(storage: AgentStorage, session: str) -> None:
    before = got(storage, session)
    bob = storage.create_user("bob")["id"]
    changed = storage.update_session(session, title="", model=None, metadata={"a": 1}, user_id=bob)
    assert changed == {
        **before,
        "title": "",
        "model": None,
        "metadata": {"a": 1},
        "metadata_json": '{"a": 1}',
        "user_id": bob,
        "updated_at": changed["updated_at"],
    }
    assert storage.list_user_sessions("ann") == []
    assert storage.update_session(session, user_id=None)["user_id"] is None


def test_a_session_is_not_given_to_a_user_who_does_not_exist(storage: AgentStorage, session: str) -> None:
    with pytest.raises(NotFound, match="there is no user 'nobody'"):
        storage.update_session(session, user_id="nobody", title="changed")
    found = got(storage, session)
    assert (found["user_id"], found["title"]) == ("ann", "新对话")


def test_the_status_says_what_was_last_asked_for(storage: AgentStorage, session: str) -> None:
    assert storage.pause_session(session)["status"] == "paused"
    assert storage.resume_session(session)["status"] == "active"
    assert storage.complete_session(session)["status"] == "completed"
    assert storage.cancel_session(session)["status"] == "cancelled"
    assert storage.update_session(session, status="active")["status"] == "active"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"title": None}, "title must be a string"),
        ({"title": "a\0"}, "NUL"),
        ({"title": "\ud800"}, "lone surrogates"),
        ({"model": 5}, "model must be a string"),
        ({"model": "\0"}, "NUL"),
        ({"status": "gone"}, "status must be one of 'active', 'paused', 'completed', 'cancelled'"),
        ({"status": "ACTIVE"}, "status must be one of"),
        ({"status": None}, "status must be one of"),
        ({"status": ["active"]}, "status must be one of"),
        ({"status": SQL}, "status must be one of"),
        ({"metadata": []}, "metadata must be a dict"),
        ({"metadata": ""}, "metadata must be a dict"),
        ({"metadata": {"a": {1}}}, r"metadata\['a'\] cannot be stored as JSON"),
        ({"metadata": {1: 1}}, "the key 1 is no string"),
        pytest.param({"metadata": nested(MAX_DEPTH + 2)}, "nested deeper", id="deep"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_session_can_be_is_refused_and_nothing_is_written(
    storage: AgentStorage, session: str, given: dict[str, Any], why: str
) -> None:
    before = got(storage, session)
    with pytest.raises(InputError, match=why):
        storage.update_session(session, **given)
    if "status" in given:
        if given["status"] is not None:
            with pytest.raises(InputError, match=why):
                storage.list_user_sessions("ann", status=given["status"])
    else:
        with pytest.raises(InputError, match=why):
            storage.create_session("ann", **given)
    assert storage.list_user_sessions("ann") == [before]


@pytest.mark.parametrize("text", ["", "标题", SQL, "x" * 10_000, "题" * 10_000])
def test_any_text_is_a_title_a_model_and_metadata(storage: AgentStorage, text: str) -> None:
    made = storage.create_session(None, text, text, metadata={text: text})
    storage.save_message(made["id"], "assistant", text, token_count=3)
    found = got(storage, made["id"])
    assert (found["title"], found["model"], found["metadata"]) == (text, text, {text: text})
    assert (found["total_tokens"], contents(storage, made["id"])) == (3, [text])


def test_a_deleted_session_is_gone_with_all_that_belongs_to_it(storage: AgentStorage, session: str) -> None:
    storage.save_message(session, "user", "hi")
    task, call = storage.create_task(session, "t", {})["id"], storage.log_tool_call(session, "look", {}, {}, 1)
    storage.delete_session(session)
    assert storage.get_session(session) is None
    assert storage.get_conversation_history(session) is None
    assert (storage.get_task(task), storage.get_tool_call(call)) == (None, None)
    assert (storage.list_tasks(), storage.list_tool_calls(), storage.list_user_sessions("ann")) == ([], [], [])
    again = storage.create_session("ann", session_id=session)
    assert (again["message_count"], again["total_tokens"], contents(storage)) == (0, 0, [])


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_come_back_as_they_were_saved(storage: AgentStorage, session: str) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}]
    ids = [
        storage.save_message(session, "system", "be brief"),
        storage.save_message(session, "user", "北京的天气怎么样?", token_count=7),
        storage.save_message(session, "assistant", None, calls, None, 12),
        storage.save_message(session, "tool", '{"sky": "blue"}', None, "c1"),
        storage.save_message(session, "assistant", [{"type": "text", "text": "blue"}]),
    ]
    rows = history(storage)
    assert [row["id"] for row in rows] == ids
    assert all(row.keys() == ROW for row in rows)
    assert [row["role"] for row in rows] == ["system", "user", "assistant", "tool", "assistant"]
    assert contents(storage) == [
        "be brief",
        "北京的天气怎么样?",
        None,
        '{"sky": "blue"}',
        [{"type": "text", "text": "blue"}],
    ]
    assert [row["token_count"] for row in rows] == [0, 7, 12, 0, 0]
    assert [row["tool_call_id"] for row in rows] == [None, None, None, "c1", None]
    assert [row["tool_calls"] for row in rows] == [None, None, calls, None, None]
    assert json.loads(rows[2]["tool_calls_json"] or "") == calls
    assert rows[1]["tool_calls_json"] is None
    assert [storage.get_message(session, name) for name in ids] == rows
    found = got(storage, session)
    assert (found["message_count"], found["total_tokens"]) == (5, 19)


def test_history_is_the_newest_messages_the_oldest_of_them_first(storage: AgentStorage, session: str) -> None:
    for n in range(60):
        storage.save_message(session, "user", f"{n}")
    default = storage.get_conversation_history(session)
    assert default is not None
    assert [row["content"] for row in default] == [f"{n}" for n in range(10, 60)]
    assert [row["content"] for row in history(storage, limit=2)] == ["58", "59"]
    assert history(storage, limit=0) == []
    assert len(history(storage, limit=1_000)) == 60


def test_a_saved_message_does_not_touch_the_quota(storage: AgentStorage, session: str) -> None:
    storage.save_message(session, "assistant", "hi", token_count=500)
    user = storage.get_user("ann")
    assert user is not None
    assert user["quota_used"] == 0


NO_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "robot"}, "role must be one of 'user', 'assistant', 'system', 'tool'"),
    ({"role": ""}, "role must be one of"),
    ({"role": None}, "role must be one of"),
    ({"role": SQL}, "role must be one of"),
    ({"content": None}, "content must be a string"),
    ({"content": 5}, "content must be a string"),
    ({"content": {"type": "text"}}, "content must be a string"),
    ({"content": [{1, 2}]}, "cannot be stored as JSON"),
    ({"content": [{"a": b""}]}, "cannot be stored as JSON"),
    ({"content": [{1: 2}]}, "cannot be stored as JSON"),
    ({"tool_calls": "look"}, "tool_calls must be a list"),
    ({"tool_calls": {"name": "look"}}, "tool_calls must be a list"),
    ({"tool_calls": [{"name": {1}}]}, "cannot be stored as JSON"),
    ({"tool_call_id": 5}, "tool_call_id must be a string"),
    ({"token_count": -1}, "token_count must be a number from 0 up"),
    ({"token_count": 1.5}, "token_count must be a number from 0 up"),
    ({"token_count": True}, "token_count must be a number from 0 up"),
    ({"token_count": 2**70}, "token_count must be a number from 0 up"),
    ({"usage": {"input": 5}}, r"usage must be a dict of .* and cost, for a message of the role 'assistant'"),
    ({"role": "assistant", "usage": {"inputs": 5}}, "usage must be a dict of"),
    ({"role": "assistant", "usage": {"input": -5}}, r"usage\['input'\] must be a number from 0 up"),
    ({"role": "assistant", "usage": {"cost": -1}}, r"usage\['cost'\] must be a number from 0 up"),
    ({"role": "assistant", "usage": {"cost": float("nan")}}, r"usage\['cost'\] must be a number from 0 up"),
    ({"content": [nested(MAX_DEPTH + 2)]}, "nested deeper"),
]


def test_what_no_message_can_be_is_refused_and_nothing_is_written(storage: AgentStorage, session: str) -> None:
    before = got(storage, session)
    for given, why in NO_MESSAGES:
        with case(given):
            with pytest.raises(InputError, match=why):
                storage.save_message(**{"session_id": session, "role": "user", "content": "hi", **given})
            assert (history(storage), got(storage, session)) == ([], before)
            stats = storage.get_usage_stats("ann")
            assert stats is not None
            assert stats["total_messages"] == 0


@pytest.mark.parametrize("text", ["", "\0", "\ud800", "a\0b\udfff", SQL, "🙂" * 100, "\u2028\r\n"])
def test_any_text_is_content(storage: AgentStorage, session: str, text: str) -> None:
    message = storage.save_message(session, "user", text)
    storage.save_message(session, "assistant", text, [{"name": "look", "arguments": {"a": text}}])
    rows = history(storage)
    assert (rows[0]["content"], rows[1]["content"]) == (text, text)
    assert rows[1]["tool_calls"] == [{"name": "look", "arguments": {"a": text}}]
    assert storage.update_message(session, message, text + text)["content"] == text + text
    assert contents(storage)[0] == text + text


@pytest.mark.large
def test_a_message_of_twenty_megabytes_is_stored_whole(storage: AgentStorage, session: str) -> None:
    text = "文字 and words\n" * (20 * 1024 * 1024 // 15)
    storage.save_message(session, "user", text)
    assert contents(storage) == [text]


def test_a_hundred_threads_on_one_storage_lose_no_message(storage: AgentStorage, session: str) -> None:
    begin = threading.Barrier(100)

    def save(n: int) -> list[str]:
        begin.wait()
        return [storage.save_message(session, "user", f"{n}-{m}", token_count=1) for m in range(3)]

    with ThreadPoolExecutor(100) as pool:
        saved = list(pool.map(save, range(100)))
    rows = history(storage)
    assert sorted(row["id"] for row in rows) == sorted(name for names in saved for name in names)
    order = {row["id"]: place for place, row in enumerate(rows)}
    assert all([order[name] for name in names] == sorted(order[name] for name in names) for names in saved)
    found = got(storage, session)
    assert (found["message_count"], found["total_tokens"]) == (300, 300)


def test_order_is_the_order_of_writing_also_when_the_clock_stands_still_or_goes_back(
    storage: AgentStorage, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, moment in enumerate(("12:00:05", "12:00:05", "12:00:01", "11:59:59")):
        monkeypatch.setattr(clock, "now", lambda moment=moment: f"2026-01-01T{moment}.000000Z")
        storage.save_message(session, "user", f"{n}")
        storage.create_task(session, "t", n)
        storage.log_tool_call(session, "look", n, None, 1)
    assert contents(storage) == ["0", "1", "2", "3"]
    assert [task["payload"] for task in storage.list_tasks(session) or ()] == [0, 1, 2, 3]
    assert [call["input_data"] for call in storage.list_tool_calls(session) or ()] == [3, 2, 1, 0]


# --- editing ----------------------------------------------------------------------------------------------------------


def test_an_edit_changes_what_is_said_and_nothing_else(storage: AgentStorage, session: str) -> None:
    names = [storage.save_message(session, "user", f"{n}", token_count=n) for n in range(3)]
    before = history(storage)
    changed = storage.update_message(session, names[1], "edited")
    assert changed == {**before[1], "content": "edited"}
    assert history(storage) == [before[0], changed, before[2]]
    found = got(storage, session)
    assert (found["message_count"], found["total_tokens"]) == (3, 3)


def test_a_deleted_message_is_gone_and_what_it_cost_stays_counted(storage: AgentStorage, session: str) -> None:
    names = [storage.save_message(session, "user", f"{n}", token_count=5) for n in range(3)]
    storage.delete_message(session, names[1])
    assert contents(storage) == ["0", "2"]
    assert storage.get_message(session, names[1]) is None
    found = got(storage, session)
    assert (found["message_count"], found["total_tokens"]) == (2, 15)
    storage.save_message(session, "user", "3")
    assert contents(storage) == ["0", "2", "3"]


def test_a_message_that_is_not_there_is_neither_edited_nor_deleted(storage: AgentStorage, session: str) -> None:
    other = storage.create_session(None)["id"]
    theirs = storage.save_message(other, "user", "theirs")
    gone = storage.save_message(session, "user", "gone")
    storage.delete_message(session, gone)
    for name in ("nothing", theirs, gone, SQL):
        with pytest.raises(NotFound, match="has no message"):
            storage.update_message(session, name, "edited")
        with pytest.raises(NotFound, match="has no message"):
            storage.delete_message(session, name)
    assert contents(storage, other) == ["theirs"]
    assert got(storage, session)["message_count"] == 0


@pytest.mark.parametrize("content", [None, 5, {"a": 1}, [{1, 2}]])
def test_an_edit_that_no_message_can_hold_is_refused(storage: AgentStorage, session: str, content: Any) -> None:
    name = storage.save_message(session, "user", "hi")
    with pytest.raises(InputError, match=r"content must be|cannot be stored"):
        storage.update_message(session, name, content)
    assert contents(storage) == ["hi"]


def test_a_fork_keeps_what_its_origin_edits_and_deletes(database: Database, storage: AgentStorage) -> None:
    storage.create_session(None, session_id="t")
    names = [storage.save_message("t", "user", f"{n}") for n in range(4)]

    async def use(cp: Checkpointer) -> None:
        await cp.fork("t", new_id="fork")
        await cp.update_message("t", names[0], "edited")
        await cp.delete_message("t", names[2])
        assert await texts(cp, "t") == ["edited", "1", "3"]
        assert await texts(cp, "fork") == ["0", "1", "2", "3"]
        await cp.update_message("fork", names[1], "other")
        await cp.delete_message("fork", names[3])
        await cp.save_message("t", "user", "4")
        await cp.save_message("fork", "user", "5")

    with_cp(database, use)
    assert contents(storage) == ["edited", "1", "3", "4"]
    assert contents(storage, "fork") == ["0", "other", "2", "5"]
    assert (got(storage, "t")["message_count"], got(storage, "fork")["message_count"]) == (4, 4)


def test_a_checkpoint_keeps_what_is_edited_and_deleted_behind_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_session(None, session_id="t")
        names = [await cp.save_message("t", "user", f"{n}") for n in range(3)]
        agent = agent_on(cp, ["hello"])
        await agent.prompt("go")
        checkpoint = await agent.checkpoint()
        await cp.update_message("t", names[0], "edited")
        await cp.delete_message("t", names[1])
        assert await texts(cp, "t") == ["edited", "2", "go", "hello"]
        kept = await cp.get(checkpoint, "t")
        assert kept is not None
        assert [m["content"] if isinstance(m, dict) else m.text for m in kept.messages] == [
            "0",
            "1",
            "2",
            "go",
            "hello",
        ]
        await cp.rewind("t", checkpoint)
        assert await texts(cp, "t") == ["0", "1", "2", "go", "hello"]

    with_cp(database, use)


def test_an_edit_in_the_middle_of_a_run_is_refused(storage: AgentStorage, session: str) -> None:
    name = storage.save_message(session, "user", "hi")
    drive(storage, session)
    for write in (
        lambda: storage.save_message(session, "user", "more"),
        lambda: storage.update_message(session, name, "edited"),
        lambda: storage.delete_message(session, name),
        lambda: storage.delete_session(session),
    ):
        with pytest.raises(ThreadBusy):
            write()
    assert contents(storage) == ["hi"]
    # What does not belong to the conversation can be written all the same.
    storage.log_tool_call(session, "look", {}, {}, 1)
    storage.create_task(session, "t", {})
    assert storage.update_session(session, title="other")["title"] == "other"


def test_edits_of_an_agents_messages_are_what_its_model_sees_next(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello", "again"])
        await agent.prompt("hi")
        user, reply = (await loaded(cp, "t")).messages
        assert isinstance(user, UserMessage)
        assert isinstance(reply, AssistantMessage)
        assert user.id
        assert reply.id
        await cp.update_message("t", user.id, "good day")
        await cp.update_message("t", reply.id, [{"type": "text", "text": "good evening"}])
        with ScriptedProvider(["fine"]) as provider:
            await agent_on(cp, provider).prompt("how are you?")
        assert brief(provider.requests[0].messages) == [
            "user: good day",
            "assistant: good evening",
            "user: how are you?",
        ]
        await agent.prompt("and you?")  # the agent that was there all the time sees it too
        assert brief(agent.state.messages)[:2] == ["user: good day", "assistant: good evening"]

    with_cp(database, use)


def test_an_edit_of_a_reply_keeps_its_tool_calls(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, [[ToolCall("c1", "look")], "done"], tools=[look])
        await agent.prompt("go")
        reply = (await loaded(cp, "t")).messages[1]
        assert isinstance(reply, AssistantMessage)
        assert reply.id
        row = await cp.update_message("t", reply.id, "let me see")
        assert (row["content"], [call["id"] for call in row["tool_calls"] or []]) == ("let me see", ["c1"])
        messages = (await loaded(cp, "t")).messages
        assert flaws(list(messages)) == []
        assert brief(messages) == ["user: go", "assistant: let me see", "tool_result: seen", "assistant: done"]

    with_cp(database, use)


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "with a fork"])
def test_a_tool_whose_result_was_deleted_never_runs_again(database: Database, is_shared: bool) -> None:
    async def use(cp: Checkpointer) -> None:
        acting = Acting()
        hanging = Slow()
        agent = agent_on(
            cp, [[act(1), ToolCall("c2", "slow")]], tools=[acting.tool, hanging.tool], tool_mode="parallel"
        )
        run = asyncio.create_task(agent.prompt("go"))
        await hanging.begun.wait()
        agent.abort()
        await run
        if is_shared:
            await cp.fork("t", new_id="fork")
        messages = (await loaded(cp, "t")).messages
        result = next(m for m in messages if isinstance(m, ToolResultMessage) and m.tool_call_id == "c1")
        assert (result.text, len(acting.runs)) == ("did 1", 1)
        assert result.id
        await cp.delete_message("t", result.id)
        with ScriptedProvider(["done"]) as provider:
            await agent_on(cp, provider, tools=[acting.tool, hanging.tool]).prompt("go on")
        assert len(acting.runs) == 1
        sent = provider.requests[0].messages
        assert flaws(list(sent)) == []
        assert next(m.text for m in sent if isinstance(m, ToolResultMessage)) == UNKNOWN_OUTCOME
        if is_shared:
            assert "did 1" in await texts(cp, "fork")

    with_cp(database, use)


# --- agents and sessions ----------------------------------------------------------------------------------------------


def test_what_an_agent_writes_appears_in_its_session(database: Database, storage: AgentStorage, session: str) -> None:
    script = [
        AssistantMessage([ToolCall("c1", "look")], "tool_use", Usage(100, 20, 5, 1, cost=0.25)),
        AssistantMessage("blue", usage=Usage(200, 10, cost=0.5)),
    ]

    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, script, tools=[look]).prompt("what colour?")

    with_cp(database, use)
    rows = history(storage)
    assert [(row["role"], row["content"]) for row in rows] == [
        ("user", "what colour?"),
        ("assistant", ""),
        ("tool", "seen"),
        ("assistant", "blue"),
    ]
    assert rows[1]["tool_calls"] == [{"id": "c1", "name": "look", "arguments": {}}]
    assert rows[2]["tool_call_id"] == "c1"
    assert [row["token_count"] for row in rows] == [0, 126, 0, 210]
    found = got(storage, session)
    assert (found["total_tokens"], found["total_cost"], found["message_count"]) == (336, 0.75, 4)
    (call,) = storage.list_tool_calls(session) or []
    assert (call["tool_name"], call["input_data"], call["output_data"], call["success"]) == ("look", {}, "seen", True)
    assert (call["message_id"], call["call_id"]) == (rows[1]["id"], "c1")
    assert (call["elapsed_ms"] or 0) >= 0


def test_a_thread_of_an_agent_is_a_session_without_more_ado(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["hello"], "new").prompt("hi")

    with_cp(database, use)
    found = got(storage, "new")
    assert (found["user_id"], found["title"], found["status"], found["message_count"]) == (None, "", "active", 2)
    assert contents(storage, "new") == ["hi", "hello"]


def test_an_agent_continues_a_session_that_an_application_has_begun(
    database: Database, storage: AgentStorage, session: str
) -> None:
    storage.save_message(session, "system", "be brief")
    storage.save_message(session, "user", "what is the weather?")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "n": 1}'}}
    storage.save_message(session, "assistant", None, [call])
    storage.save_message(session, "tool", "sunny", tool_call_id="c1")
    storage.save_message(session, "assistant", [{"type": "text", "text": "It is sunny."}], token_count=9)

    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider(["Tomorrow too."]) as provider:
            await agent_on(cp, provider, user_id="ann").prompt("and tomorrow?")
        sent = provider.requests[0].messages
        assert flaws(list(sent)) == []
        assert brief(sent) == [
            "user: what is the weather?",
            "assistant: ",
            "tool_result: sunny",
            "assistant: It is sunny.",
            "user: and tomorrow?",
        ]
        assert isinstance(sent[1], AssistantMessage)
        assert sent[1].tool_calls == [ToolCall("c1", "weather", {"city": "Paris", "n": 1})]
        assert isinstance(sent[2], ToolResultMessage)
        assert sent[2].tool_call_id == "c1"

    with_cp(database, use)
    assert contents(storage)[-2:] == ["and tomorrow?", "Tomorrow too."]
    assert history(storage)[2]["tool_calls"] == [call]


def test_a_call_that_an_application_saved_without_its_result_is_never_run(
    database: Database, storage: AgentStorage, session: str
) -> None:
    acting = Acting()
    storage.save_message(session, "user", "go")
    storage.save_message(session, "assistant", "", [{"name": "act", "arguments": {"n": 1}}, {"id": "x", "name": "act"}])

    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider(["done"]) as provider:
            await agent_on(cp, provider, tools=[acting.tool]).resume()
        sent = provider.requests[0].messages
        assert flaws(list(sent)) == []
        reply = sent[1]
        assert isinstance(reply, AssistantMessage)
        assert [call.name for call in reply.tool_calls] == ["act", "act"]
        assert all(call.id for call in reply.tool_calls)
        assert [m.text for m in sent[2:]] == [UNKNOWN_OUTCOME] * 2

    with_cp(database, use)
    assert acting.runs == []


@pytest.mark.parametrize(
    "calls",
    [
        [{}, {"name": 5}, {"function": None}, {"function": {"name": "look", "arguments": "no json"}}],
        [{"id": "c", "function": {"name": "look", "arguments": "[1]"}}],
        [{"id": 5, "name": "look", "arguments": {"a": 1}}],
        [{"id": "c", "name": "look"}, {"id": "c", "name": "look"}],
    ],
    ids=["no calls", "a list", "a number as id", "an id twice"],
)
def test_whatever_an_application_saves_as_calls_the_model_gets_a_valid_history(
    database: Database, storage: AgentStorage, session: str, calls: list[Any]
) -> None:
    storage.save_message(session, "user", "go")
    storage.save_message(session, "assistant", "let me see", calls)
    storage.save_message(session, "tool", "seen", tool_call_id="c")
    storage.save_message(session, "tool", "of nobody", tool_call_id="nobody")
    storage.save_message(session, "tool", "without an id")

    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider(["done"]) as provider:
            await agent_on(cp, provider, tools=[look]).prompt("and?")
        assert flaws(list(provider.requests[0].messages)) == []

    with_cp(database, use)
    assert history(storage)[1]["tool_calls"] == calls


@pytest.mark.parametrize("calls", [["look"], [None], [{"name": "look"}, 5], {"name": "look"}, "look"])
def test_calls_that_are_no_dicts_are_refused(storage: AgentStorage, calls: Any) -> None:
    session = storage.create_session(None)["id"]
    with pytest.raises(InputError, match="tool_calls must be a list of dicts"):
        storage.save_message(session, "assistant", "x", tool_calls=calls)
    assert storage.get_conversation_history(session) == []


def test_tokens_are_not_said_twice(storage: AgentStorage) -> None:
    session = storage.create_session(None)["id"]
    with pytest.raises(InputError, match="give the same count twice"):
        storage.save_message(session, "assistant", "x", token_count=5, usage={"output": 5})
    assert storage.get_conversation_history(session) == []
