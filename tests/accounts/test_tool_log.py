"""The log of tools: what applications log, and what agents do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from byssus import ToolCall, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, NotFound
from byssus.messages import MAX_DEPTH
from byssus.storage import AgentStorage, ToolLogRow
from tests.support.accounts import nested
from tests.support.cases import case
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, look
from tests.support.tool_calls import Acting, act

SQL = "'); DROP TABLE tool_calls; --"
KEYS = {
    "id",
    "session_id",
    "tool_name",
    "input_data",
    "output_data",
    "elapsed_ms",
    "success",
    "error_message",
    "message_id",
    "call_id",
    "status",
    "created_at",
}


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


@pytest.fixture
def session(storage: AgentStorage) -> str:
    made: str = storage.create_session(None, session_id="t")["id"]
    return made


def listed(storage: AgentStorage, *args: Any, **options: Any) -> list[ToolLogRow]:
    found = storage.list_tool_calls(*args, **options)
    assert found is not None
    return found


def got(storage: AgentStorage, call_id: str) -> ToolLogRow:
    found = storage.get_tool_call(call_id)
    assert found is not None
    return found


def test_a_call_comes_back_with_all_its_keys(storage: AgentStorage, session: str) -> None:
    message = storage.save_message(session, "assistant", "let me see")
    name = storage.log_tool_call(session, "look", {"at": "sky"}, ["blue"], 12.5, True, None, message)
    call = got(storage, name)
    assert call.keys() == KEYS
    assert (call["session_id"], call["tool_name"], call["input_data"]) == (session, "look", {"at": "sky"})
    assert (call["output_data"], call["elapsed_ms"], call["message_id"]) == (["blue"], 12.5, message)
    assert (call["success"], call["error_message"], call["status"]) == (True, None, "done")
    assert listed(storage, session) == [call]


def test_a_failure_is_logged_with_its_message(storage: AgentStorage, session: str) -> None:
    call = got(storage, storage.log_tool_call(session, "look", {}, None, 3, False, "no light"))
    assert (call["success"], call["error_message"], call["output_data"]) == (False, "no light", None)


def test_calls_are_listed_the_newest_first_and_can_be_chosen(storage: AgentStorage, session: str) -> None:
    other = storage.create_session(None)["id"]
    for n in range(6):
        storage.log_tool_call(other if n == 5 else session, "look" if n % 2 else "hear", n, n, 1, n != 3)

    def inputs(*args: Any, **options: Any) -> list[int]:
        return [call["input_data"] for call in listed(storage, *args, **options)]

    assert inputs(session) == [4, 3, 2, 1, 0]
    assert inputs() == [5, 4, 3, 2, 1, 0]
    assert inputs(session, 2, 1) == [3, 2]
    assert inputs(session, 0) == inputs(session, offset=9) == []
    assert inputs(session, tool_name="look") == [3, 1]
    assert inputs(session, success=False) == inputs(success=False, tool_name="look") == [3]
    assert inputs(session, success=True) == [4, 2, 1, 0]
    assert inputs(session, tool_name=SQL) == []


def test_calls_that_many_threads_log_at_once_are_all_there(storage: AgentStorage, session: str) -> None:
    begin = threading.Barrier(20)

    def log(n: int) -> list[str]:
        begin.wait()
        return [storage.log_tool_call(session, "look", [n, m], None, 1) for m in range(5)]

    with ThreadPoolExecutor(20) as pool:
        names = [name for made in pool.map(log, range(20)) for name in made]
    found = listed(storage, session, 1_000)
    assert len(set(names)) == 100
    assert {call["id"] for call in found} == set(names)
    stats = storage.get_usage_stats(None)
    assert stats is not None
    assert [(row["tool_name"], row["call_count"]) for row in stats["tool_usage"]] == [("look", 100)]


NO_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"tool_name": ""}, "at least one character"),
    ({"tool_name": None}, "at least one character"),
    ({"tool_name": 5}, "name must be a string"),
    ({"tool_name": "a\ud800"}, "lone surrogates"),
    ({"input_data": {1, 2}}, "input_data cannot be stored as JSON"),
    ({"input_data": {1: 2}}, "the key 1 is no string"),
    ({"output_data": {"a": b""}}, r"output_data\['a'\] cannot be stored as JSON"),
    ({"elapsed_ms": -1}, "elapsed_ms must be a number"),
    ({"elapsed_ms": float("nan")}, "elapsed_ms must be a number"),
    ({"elapsed_ms": float("inf")}, "elapsed_ms must be a number"),
    ({"elapsed_ms": "5"}, "elapsed_ms must be a number"),
    ({"elapsed_ms": None}, "elapsed_ms must be a number"),
    ({"elapsed_ms": True}, "elapsed_ms must be a number"),
    ({"error_message": 5}, "error_message must be a string"),
    ({"message_id": 5}, "message_id must be a string"),
    ({"message_id": "\0"}, "NUL"),
    ({"input_data": nested(MAX_DEPTH + 2)}, "nested deeper"),
]


def test_what_no_call_can_be_is_refused_and_nothing_is_written(storage: AgentStorage, session: str) -> None:
    usual = {"session_id": session, "tool_name": "look", "input_data": {}, "output_data": {}, "elapsed_ms": 1}
    for given, why in NO_CALLS:
        with case(given):
            with pytest.raises(InputError, match=why):
                storage.log_tool_call(**{**usual, **given})
            assert listed(storage) == []
            stats = storage.get_usage_stats(None)
            assert stats is not None
            assert stats["tool_usage"] == []


@pytest.mark.parametrize("elapsed", [0, 0.0, 1e-9, 0.05, 1, 10**400, 1e300])
def test_any_time_from_zero_up_is_a_time(storage: AgentStorage, session: str, elapsed: float) -> None:
    call = got(storage, storage.log_tool_call(session, "look", {}, {}, elapsed))
    assert call["elapsed_ms"] == min(elapsed, 1e12)


@pytest.mark.parametrize("text", ["", "天气", SQL, "a\0\ud800", "x" * 100_000])
def test_any_json_is_input_and_output(storage: AgentStorage, session: str, text: str) -> None:
    call = got(storage, storage.log_tool_call(session, "look", {text: text}, [text, 2**70], 1))
    assert (call["input_data"], call["output_data"]) == ({text: text}, [text, 2**70])


@pytest.mark.parametrize("name", ["天气", SQL, "x" * 10_000, "具" * 10_000])
def test_any_text_is_a_tools_name(storage: AgentStorage, session: str, name: str) -> None:
    storage.log_tool_call(session, name, {}, {}, 1)
    assert [call["tool_name"] for call in listed(storage, tool_name=name)] == [name]
    stats = storage.get_session_usage(session)
    assert stats is not None
    assert [row["tool_name"] for row in stats["tool_usage"]] == [name[:200]]


def test_an_update_changes_what_is_passed_and_nothing_else(storage: AgentStorage, session: str) -> None:
    name = storage.log_tool_call(session, "look", {"a": 1}, {"b": 2}, 5, False, "no")
    before = got(storage, name)
    changed = storage.update_tool_call(name, output_data=None, error_message=None)
    assert changed == {**before, "output_data": None, "error_message": None}
    assert storage.update_tool_call(name, input_data=[1])["input_data"] == [1]
    assert listed(storage) == [got(storage, name)]
    for wrong in ({"input_data": {1}}, {"output_data": {1: 1}}, {"error_message": 5}):
        with pytest.raises(InputError):
            storage.update_tool_call(name, **wrong)
    assert got(storage, name)["input_data"] == [1]


def test_a_deleted_call_leaves_the_log_and_stays_counted(storage: AgentStorage, session: str) -> None:
    name, other = (storage.log_tool_call(session, "look", n, {}, 5) for n in range(2))
    storage.delete_tool_call(name)
    assert storage.get_tool_call(name) is None
    assert [call["id"] for call in listed(storage, session)] == [other]
    stats = storage.get_session_usage(session)
    assert stats is not None
    assert stats["tool_usage"][0]["call_count"] == 2
    third = storage.log_tool_call(session, "look", 2, {}, 5)
    assert [call["id"] for call in listed(storage, session)] == [third, other]


@pytest.mark.parametrize("name", ["nothing", SQL])
def test_a_call_that_is_not_in_the_log_is_neither_changed_nor_deleted(
    storage: AgentStorage, session: str, name: str
) -> None:
    storage.log_tool_call(session, "look", {}, {}, 1)
    with pytest.raises(NotFound, match="there is no such call"):
        storage.update_tool_call(name, output_data=1)
    with pytest.raises(NotFound, match="there is no such call"):
        storage.delete_tool_call(name)
    assert storage.get_tool_call(name) is None
    assert len(listed(storage)) == 1


# --- what agents do ---------------------------------------------------------------------------------------------------


@tool
def fail() -> str:
    raise ValueError("it broke")


def test_what_an_agents_tools_did_is_in_the_log(database: Database, storage: AgentStorage) -> None:
    calls = [ToolCall("c1", "look"), ToolCall("c2", "fail"), ToolCall("c3", "missing")]

    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, [calls, "done"], tools=[look, fail], tool_mode="sequential").prompt("go")

    with_cp(database, use)
    found = {call["call_id"]: call for call in listed(storage, "t")}
    assert (found["c1"]["success"], found["c1"]["output_data"], found["c1"]["error_message"]) == (True, "seen", None)
    assert found["c2"]["success"] is False
    assert "it broke" in (found["c2"]["error_message"] or "")
    assert all((found[name]["elapsed_ms"] or 0) >= 0 for name in ("c1", "c2"))
    assert {call["call_id"] for call in listed(storage, "t", success=True)} == {"c1"}
    stats = storage.get_session_usage("t")
    assert stats is not None
    tools = {row["tool_name"]: (row["call_count"], row["failures"]) for row in stats["tool_usage"]}
    assert (tools["look"], tools["fail"]) == ((1, 0), (1, 1))


def test_a_call_that_is_under_way_is_in_the_log_and_cannot_be_deleted(
    database: Database, storage: AgentStorage
) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        run = asyncio.create_task(agent_on(cp, [CALL_SLOW, "done"], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        (call,) = await cp.list_tool_calls("t") or []
        assert (call["status"], call["success"], call["output_data"]) == ("started", False, None)
        with pytest.raises(NotFound):
            await cp.delete_tool_call(call["id"])
        slow.let_go.set()
        await run
        done = await cp.get_tool_call(call["id"])
        assert done is not None
        assert (done["status"], done["success"], done["output_data"]) == ("done", True, "slow is done")

    with_cp(database, use)


def test_what_an_agents_tool_did_is_history_and_cannot_be_changed(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, [[ToolCall("c1", "look")], "done"], tools=[look]).prompt("go")

    with_cp(database, use)
    (call,) = listed(storage, "t")
    with pytest.raises(NotFound):
        storage.update_tool_call(call["id"], output_data="nothing")
    assert got(storage, call["id"]) == call


def test_the_result_of_a_call_that_an_application_saved_is_in_the_log(
    database: Database, storage: AgentStorage, session: str
) -> None:
    storage.save_message(session, "user", "go")
    storage.save_message(session, "assistant", "", [{"id": "c1", "name": "act", "arguments": {"n": 1}}])

    async def use(cp: Checkpointer) -> None:
        acting = Acting(recovery="retry")
        await agent_on(cp, [[act(2)], "done"], tools=[acting.tool]).resume()
        assert [n for n, _ in acting.runs] == [1, 2]

    with_cp(database, use)
    found = {call["call_id"]: call for call in listed(storage, session)}
    assert {name: call["output_data"] for name, call in found.items()} == {"c1": "did 1", "c2": "did 2"}
