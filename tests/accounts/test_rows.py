"""The dicts that applications get are what their types say: the same keys, and values of those types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from pydantic import TypeAdapter
from typing_extensions import is_typeddict

from byssus import AssistantMessage, ToolCall, Usage, UserMessage, storage
from byssus.accounts import rows
from byssus.messages import Note
from byssus.storage import AgentStorage
from tests.support.accounts import known
from tests.support.databases import Database

KINDS = {name: kind for name, kind in vars(rows).items() if is_typeddict(kind)}


def check(row: Any, kind: Any) -> None:
    """Fail unless the dict, and each dict in it that has a type, has exactly the keys of its type."""
    assert msgspec.convert(row, kind) == row
    for name, field in get_type_hints(kind).items():
        inner = get_args(field)[0] if get_origin(field) is list else field
        for each in row[name] if inner is not field else [row[name]]:
            if is_typeddict(inner):
                check(each, inner)
    assert row.keys() == get_type_hints(kind).keys()


@pytest.fixture
def told(database: Database, tmp_path: Path) -> dict[str, list[Any]]:
    """Rows of every kind: with values in their optional fields, and without."""
    with AgentStorage(database.place) as store:
        users = [store.create_user("ann", user_id="ann", preferences={"a": 1}), store.create_user("bob", "", None)]
        sessions = [store.create_session("ann", session_id="t", metadata={"k": []}), store.create_session(None)]
        call = {"id": "c1", "name": "look", "arguments": {}}
        store.save_message("t", "user", "the needle", token_count=3)
        store.save_message("t", "assistant", None, tool_calls=[call], usage={"input": 1, "output": 2, "cost": 0.5})
        store.save_message("t", "tool", [{"type": "text", "text": "seen"}], tool_call_id="c1")
        reply = AssistantMessage([ToolCall("c2", "look", {})], usage=Usage(1, 2, 3, 4, 0.5), model="gpt")
        store.append("t", [UserMessage("the needle"), reply, Note({"role": "memo", "content": "the needle"})])
        logged = store.log_tool_call("t", "look", {"at": "the needle"}, None, 12.5)
        store.log_tool_call("t", "look", {}, {"seen": 1}, 1, success=False, error_message="no", message_id="m")
        tasks = [store.create_task("t", "sum", {"of": [1]}), store.create_task("t", "sum", None, 1)]
        tasks.append(store.update_task_status(tasks[0]["id"], "completed", {"is": 1}))
        assert store.send_event(tasks[1]["id"], "approval", {"by": "ann"}) is False
        store.set_price("gpt", input=1, output=2.5)
        schedules = [store.create_schedule("a", "sum", {"of": [1]}, every=60, session_id="t")]
        schedules.append(store.create_schedule("b", "sum", cron="0 9 * * *", zone="Europe/Oslo", user_id="ann"))
        schedules.append(store.pause_schedule("b"))
        stats = [store.get_usage_stats("ann"), store.get_session_usage("t"), store.get_usage_stats(users[1]["id"])]
        backup = store.backup(tmp_path / "spare.db")
        orders = [store.search("needle"), store.search("needle", order="relevance")]
        found: dict[str, list[Any]] = {
            "UserRow": [*users, *store.list_users(), store.get_user("ann"), store.update_user("ann", email="a@b")],
            "SessionRow": [*sessions, *known(store.list_user_sessions("ann")), store.pause_session("t")],
            "HistoryRow": known(store.get_conversation_history("t")),
            "FoundMessage": store.find_messages("look"),
            "TaskRow": [*tasks, *known(store.list_tasks("t"))],
            "TaskStepRow": store.task_steps(tasks[1]["id"]),
            "ToolLogRow": [*known(store.list_tool_calls("t")), store.get_tool_call(logged)],
            "ScheduleRow": schedules,
            "SearchHit": [hit for hits in orders for hit in hits],
            "UsageStats": stats,
            "PriceRow": list(store.get_prices().values()),
            "CheckResult": [store.check(), store.recount()],
            "RepairResult": [store.repair()],
            "BackupResult": [backup],
        }
    with AgentStorage(tmp_path / "restored.db") as other:
        restored: list[Any] = [other.restore(tmp_path / "spare.db")]
    return {**found, "RestoreResult": restored}


def test_every_row_is_what_its_type_says(told: dict[str, list[Any]]) -> None:
    for name, some in told.items():
        assert some, name
        for row in some:
            check(row, KINDS[name])
    inside = {"TaskError", "DayUsage", "ModelUsage", "SessionUsage", "ToolUsage", "UsageCounts", "ProblemRow"}
    assert KINDS.keys() == told.keys() | inside, "a row of each kind belongs here"
    full = told["UsageStats"][0]
    assert all(full[name] for name in ("by_day", "by_model", "by_session", "tool_usage"))


def test_a_problem_is_what_its_type_says(database: Database) -> None:
    with AgentStorage(database.place) as store:
        store.create_session(None, session_id="t")
        store.save_message("t", "user", "hi")
        store.store.write_now(lambda tx: tx.run("UPDATE threads SET message_count = 7"))
        found = store.check()
        assert found["problems"]
        check(found, rows.CheckResult)
        check(store.repair(), rows.RepairResult)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_a_service_can_declare_a_row_as_its_response(kind: Any) -> None:
    assert TypeAdapter(kind).json_schema()["properties"]


def test_all_types_of_rows_can_be_imported_beside_the_storage() -> None:
    assert {name for name in KINDS if getattr(storage, name, None) is not KINDS[name]} == set()
    assert set(storage.__all__) >= KINDS.keys()
