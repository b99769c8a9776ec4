"""Usage: what was said and spent, by user, session, model, tool and day, and prices as data."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byssus import AssistantMessage, Model
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError, NotFound
from byssus.messages import Usage
from byssus.storage import AgentStorage, UsageStats
from byssus.store.database import Tx
from byssus.values import clock
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import agent_on

SQL = "'); DROP TABLE usage; --"
TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        opened.create_user("ann", user_id="ann")
        yield opened


def stats(storage: AgentStorage, user: str | None = "ann", days: int = 7) -> UsageStats:
    found = storage.get_usage_stats(user, days)
    assert found is not None
    return found


def age(storage: AgentStorage, days: int) -> None:
    """All that was counted up to now, and all that was written, happened so many days ago."""
    seconds = -86_400.0 * days

    def change(tx: Tx) -> None:
        for table in ("usage", "tool_usage"):
            tx.run(f"UPDATE {table} SET day = substr(:then, 1, 10)", then=tx.after(seconds))
        tx.run("UPDATE threads SET updated_at = :then", then=tx.after(seconds))

    storage.store.write_now(change)


def test_a_user_who_did_nothing_has_statistics_of_nothing(storage: AgentStorage) -> None:
    found = stats(storage)
    assert {name: found[name] for name in ("period_days", "session_count", "total_tokens", "total_messages")} == {
        "period_days": 7,
        "session_count": 0,
        "total_tokens": 0,
        "total_messages": 0,
    }
    assert (found["total_cost"], found["tool_usage"], found["by_day"]) == (0, [], [])
    assert (found["by_model"], found["by_session"]) == ([], [])


def test_statistics_are_the_sum_of_what_was_saved(storage: AgentStorage) -> None:
    one, two = storage.create_session("ann", model="m1")["id"], storage.create_session("ann", model="m2")["id"]
    storage.save_message(one, "user", "hi", token_count=3)
    storage.save_message(one, "assistant", "hello", token_count=7)
    full = {"input": 10, "output": 20, "cache_read": 30, "cache_write": 40, "cost": 0.5}
    storage.save_message(two, "assistant", "well", usage=full)
    storage.save_message(two, "system", "note")
    found = stats(storage)
    assert (found["session_count"], found["total_tokens"], found["total_messages"]) == (2, 110, 4)
    assert [dict(found)[name] for name in TOKENS] == [13, 27, 30, 40]
    assert found["total_cost"] == 0.5
    assert {row["model"]: (row["tokens"], row["messages"]) for row in found["by_model"]} == {
        "m1": (10, 2),
        "m2": (100, 1),
    }
    assert [(row["session_id"], row["tokens"], row["messages"], row["cost"]) for row in found["by_session"]] == [
        (two, 100, 2, 0.5),
        (one, 10, 2, 0.0),
    ]
    (day,) = found["by_day"]
    assert (day["tokens"], day["messages"], day["cost"]) == (110, 4, 0.5)
    assert [(s["total_tokens"], s["total_cost"]) for s in storage.list_user_sessions("ann") or ()] == [
        (100, 0.5),
        (10, 0),
    ]


def test_each_user_sees_their_own_and_nobody_sees_all(storage: AgentStorage) -> None:
    storage.create_user("bob", user_id="bob")
    for user, tokens in (("ann", 1), ("bob", 10), (None, 100)):
        session = storage.create_session(user)["id"]
        storage.save_message(session, "assistant", "x", token_count=tokens)
        storage.log_tool_call(session, "look", {}, {}, 1)
    assert [stats(storage, user)["total_tokens"] for user in ("ann", "bob", None)] == [1, 10, 111]
    assert [stats(storage, user)["tool_usage"][0]["call_count"] for user in ("ann", "bob", None)] == [1, 1, 3]
    assert [stats(storage, user)["session_count"] for user in ("ann", "bob", None)] == [1, 1, 3]


def test_a_period_has_what_happened_in_it_and_not_what_its_sessions_had_before(storage: AgentStorage) -> None:
    session = storage.create_session("ann", model="m")["id"]
    idle = storage.create_session("ann", model="m")["id"]
    for name in (session, idle):
        storage.save_message(name, "assistant", "old", token_count=1_000)
        storage.log_tool_call(name, "look", {}, {}, 5, False)
    age(storage, 7)
    storage.save_message(session, "assistant", "new", token_count=5)
    storage.log_tool_call(session, "look", {}, {}, 5)
    found = stats(storage)
    assert (found["session_count"], found["total_tokens"], found["total_messages"]) == (1, 5, 1)
    assert [(row["call_count"], row["failures"]) for row in found["tool_usage"]] == [(1, 0)]
    assert [row["session_id"] for row in found["by_session"]] == [session]
    found = stats(storage, days=8)
    assert (found["session_count"], found["total_tokens"], found["total_messages"]) == (2, 2_005, 3)
    assert len(found["by_day"]) == 2
    assert stats(storage, days=1)["total_tokens"] == 5
    usage = storage.get_session_usage(session)
    assert usage is not None
    assert (usage["total_tokens"], usage["session_count"]) == (1_005, 1)


def test_the_usage_of_a_session_is_by_default_that_since_it_began(storage: AgentStorage) -> None:
    session = storage.create_session("ann", model="m")
    storage.save_message(session["id"], "assistant", "old", token_count=1_000)
    usage = storage.get_session_usage(session["id"])
    assert usage is not None
    assert (usage["since"], usage["period_days"]) == (session["created_at"][:10], 1)
    age(storage, 7)  # as of a session that was imported: its usage is older than its row
    storage.save_message(session["id"], "assistant", "new", token_count=5)
    usage, short = storage.get_session_usage(session["id"]), storage.get_session_usage(session["id"], 7)
    assert usage is not None
    assert short is not None
    assert (usage["since"], usage["period_days"]) == (usage["by_day"][0]["day"], 8)
    assert (usage["total_tokens"], short["total_tokens"], short["period_days"]) == (1_005, 5, 7)


@pytest.mark.parametrize("days", [0, -1, 1.5, True, "7", 2**70])
def test_a_period_is_a_number_of_days(storage: AgentStorage, days: Any) -> None:
    session = storage.create_session(None)["id"]
    with pytest.raises(InputError, match="days must be a whole number from 1"):
        storage.get_usage_stats("ann", days)
    with pytest.raises(InputError, match="days must be a whole number from 1"):
        storage.get_session_usage(session, days)


def test_what_was_spent_stays_when_messages_and_sessions_are_deleted(storage: AgentStorage) -> None:
    session = storage.create_session("ann", model="m")["id"]
    names = [storage.save_message(session, "assistant", "x", token_count=5) for _ in range(2)]
    storage.log_tool_call(session, "look", {}, {}, 5)
    before = stats(storage)
    storage.delete_message(session, names[0])
    storage.update_message(session, names[1], "edited")
    assert {**stats(storage), "since": None} == {**before, "since": None}
    storage.delete_session(session)
    after = stats(storage)
    assert (after["total_tokens"], after["total_messages"], after["by_model"]) == (10, 2, before["by_model"])
    assert after["tool_usage"] == before["tool_usage"]
    assert [row["session_id"] for row in after["by_session"]] == [None]


# --- tools ------------------------------------------------------------------------------------------------------------


def test_tools_have_counts_averages_percentiles_and_failure_rates(storage: AgentStorage) -> None:
    session = storage.create_session("ann")["id"]
    for n in range(100):
        storage.log_tool_call(session, "look", {}, {}, n + 1, n % 4 != 0)
    storage.log_tool_call(session, "hear", {}, {}, 10)
    look, hear = stats(storage)["tool_usage"]
    assert (look["tool_name"], look["call_count"], look["failures"], look["failure_rate"]) == ("look", 100, 25, 0.25)
    assert look["avg_latency"] == pytest.approx(50.5)
    for name, exact in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert dict(look)[name] == pytest.approx(exact, rel=0.025), name
    assert (hear["tool_name"], hear["call_count"], hear["failures"], hear["failure_rate"]) == ("hear", 1, 0, 0)
    assert hear["p50"] == hear["p99"] == pytest.approx(10, rel=0.025)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(times=st.lists(st.floats(0, 1e7), min_size=1, max_size=20))
def test_percentiles_are_right_within_their_bound(storage: AgentStorage, times: list[float]) -> None:
    session = storage.create_session("ann")["id"]
    for elapsed in times:
        storage.log_tool_call(session, "look", {}, {}, elapsed)
    found = storage.get_session_usage(session)
    assert found is not None
    (row,) = found["tool_usage"]
    assert row["avg_latency"] == pytest.approx(sum(times) / len(times))
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        exact = sorted(times)[max(0, -int(-part * len(times) // 1) - 1)]
        assert dict(row)[name] == pytest.approx(exact, rel=0.026, abs=0.05), name


def test_a_sum_of_costs_does_not_depend_on_the_order_of_adding(storage: AgentStorage) -> None:
    costs = [0.1, 0.2, 0.3, 0.7, 0.1, 0.1]
    # Not `sum`, which loses nothing since Python 3.12.
    assert functools.reduce(operator.add, costs) != functools.reduce(operator.add, reversed(costs))
    for cost in costs:
        session = storage.create_session("ann", model="m")["id"]
        storage.save_message(session, "assistant", "hello", usage={"output": 1, "cost": cost})
    found = stats(storage)
    assert [found["total_cost"], found["by_day"][0]["cost"], found["by_model"][0]["cost"]] == [1.5, 1.5, 1.5]


# --- prices -----------------------------------------------------------------------------------------------------------


def test_prices_are_data_that_count_from_when_they_are_set(storage: AgentStorage) -> None:
    session = storage.create_session("ann", model="m")["id"]
    usage = {"input": 1_000_000, "output": 500_000, "cache_read": 2_000_000, "cache_write": 100_000}
    storage.save_message(session, "assistant", "before", usage=usage)
    storage.set_price("m", input=1.0, output=4.0, cache_read=0.1, cache_write=10)
    assert storage.get_prices() == {"m": {"input": 1.0, "output": 4.0, "cache_read": 0.1, "cache_write": 10.0}}
    storage.save_message(session, "assistant", "priced", usage=usage)
    assert stats(storage)["total_cost"] == pytest.approx(4.2)
    storage.save_message(session, "assistant", "knows its cost", usage={**usage, "cost": 1.5})
    assert stats(storage)["total_cost"] == pytest.approx(5.7)
    storage.set_price("m", input=2)
    storage.save_message(session, "assistant", "dearer", usage={"input": 500_000})
    storage.delete_price("m")
    storage.save_message(session, "assistant", "for nothing", usage=usage)
    found = storage.get_session(session)
    assert found is not None
    assert found["total_cost"] == stats(storage)["total_cost"] == pytest.approx(6.7)
    assert storage.get_prices() == {}


def test_an_agents_replies_are_priced_too(database: Database, storage: AgentStorage) -> None:
    storage.set_price("gpt", input=1, output=2)

    async def use(cp: Checkpointer) -> None:
        reply = AssistantMessage("hi", usage=Usage(1_000_000, 1_000_000))
        await agent_on(cp, [reply], model=Model("gpt"), user_id="ann").prompt("hi")

    with_cp(database, use)
    found = stats(storage)
    assert found["total_cost"] == pytest.approx(3)
    assert found["total_tokens"] == 2_000_000
    assert [(row["model"], row["tokens"]) for row in found["by_model"]] == [("gpt", 2_000_000)]
    session = storage.get_session("t")
    assert session is not None
    assert (session["model"], session["user_id"]) == ("gpt", "ann")


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf"), True, "1", None, 10**400])
def test_a_price_is_a_number_from_zero_up(storage: AgentStorage, price: Any) -> None:
    with pytest.raises(InputError, match="must be a number from 0 up"):
        storage.set_price("m", input=price)
    assert storage.get_prices() == {}


@pytest.mark.parametrize("model", ["", None, 5, "\0", "\ud800"])
def test_a_price_is_of_a_model_with_a_name(storage: AgentStorage, model: Any) -> None:
    with pytest.raises(InputError, match="model's name"):
        storage.set_price(model, input=1)
    with pytest.raises(InputError, match="model's name"):
        storage.delete_price(model)


def test_a_price_that_was_not_set_cannot_be_deleted(storage: AgentStorage) -> None:
    storage.set_price("m", input=1)
    for model in ("other", SQL):
        with pytest.raises(NotFound, match="no price is set"):
            storage.delete_price(model)
    assert list(storage.get_prices()) == ["m"]


def test_a_very_long_model_is_priced_and_counted_by_its_beginning(storage: AgentStorage) -> None:
    name = "型" * 10_000
    storage.set_price(name, output=1_000_000)
    session = storage.create_session("ann", model=name)["id"]
    storage.save_message(session, "assistant", "x", token_count=2)
    found = stats(storage)
    assert (found["total_cost"], [row["model"] for row in found["by_model"]]) == (2, [name[:200]])


def test_days_are_counted_when_the_clock_goes_back(storage: AgentStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    session = storage.create_session("ann")["id"]
    storage.save_message(session, "user", "x", token_count=1)
    monkeypatch.setattr(clock, "now", lambda: "2020-02-29T23:59:59.999999Z")
    storage.save_message(session, "user", "y", token_count=2)
    found = storage.get_session_usage(session)
    assert found is not None
    assert sum(row["tokens"] for row in found["by_day"]) == found["total_tokens"] == 3


# --- all together -----------------------------------------------------------------------------------------------------

_SAVE = st.tuples(
    st.just("save"), st.integers(0, 2), st.sampled_from(["user", "assistant", "tool", "system"]), st.integers(0, 1_000)
)
_LOG = st.tuples(st.just("log"), st.integers(0, 2), st.sampled_from(["look", "hear"]), st.booleans())
_REMOVE = st.tuples(st.sampled_from(["delete", "edit"]), st.integers(0, 2), st.integers(0, 9), st.none())
_DROP = st.tuples(st.just("drop"), st.integers(0, 2), st.none(), st.none())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_SAVE | _LOG | _REMOVE | _DROP, max_size=25))
def test_statistics_agree_with_a_model_whatever_is_saved_edited_and_deleted(
    storage: AgentStorage, steps: list[tuple[Any, ...]]
) -> None:
    user = storage.create_user("somebody", quota_total=1)["id"]
    sessions: list[str] = [storage.create_session(user)["id"] for _ in range(3)]
    saved: dict[str, list[str]] = {name: [] for name in sessions}
    tokens = messages = calls = failures = 0
    alive: dict[str, int] = dict.fromkeys(sessions, 0)
    for what, place, item, number in steps:
        session = sessions[place]
        if what == "save":
            saved[session].append(storage.save_message(session, item, "x", token_count=number))
            tokens, messages, alive[session] = tokens + number, messages + 1, alive[session] + number
        elif what == "log":
            storage.log_tool_call(session, item, {}, {}, 1, number)
            calls, failures = calls + 1, failures + (not number)
        elif what == "edit" and item < len(saved[session]):
            storage.update_message(session, saved[session][item], "edited")
        elif what == "delete" and item < len(saved[session]):
            storage.delete_message(session, saved[session].pop(item))
        elif what == "drop":
            storage.delete_session(session)
            sessions[place] = storage.create_session(user)["id"]
            saved[sessions[place]] = []
            alive[sessions[place]] = 0
    found = stats(storage, user)
    assert (found["total_tokens"], found["total_messages"], found["session_count"]) == (tokens, messages, 3)
    assert sum(row["tokens"] for row in found["by_session"]) == tokens
    assert sum(row["call_count"] for row in found["tool_usage"]) == calls
    assert sum(row["failures"] for row in found["tool_usage"]) == failures
    for name in sessions:
        session_row = storage.get_session(name)
        assert session_row is not None
        assert (session_row["total_tokens"], session_row["message_count"]) == (alive[name], len(saved[name]))
        assert [row["id"] for row in storage.get_conversation_history(name) or ()] == saved[name]
    owner = storage.get_user(user)
    assert owner is not None
    assert owner["quota_used"] == 0
