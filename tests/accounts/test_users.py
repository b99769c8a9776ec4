"""Users of AgentStorage: made, changed, found by what they prefer, and deleted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from byssus.errors import InputError, NotFound, ThreadBusy
from byssus.messages import MAX_DEPTH
from byssus.queries.accounts import sessions, users
from byssus.queries.log import threads
from byssus.storage import AgentStorage, UserRow
from byssus.values.thread_key import ThreadKey
from tests.support.accounts import drive, known, nested
from tests.support.cases import case
from tests.support.databases import Database

SQL = "'); DROP TABLE users; --"
KEYS = {
    "id",
    "name",
    "email",
    "quota_total",
    "quota_used",
    "preferences",
    "preferences_json",
    "created_at",
    "updated_at",
}


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


def names(users: list[UserRow]) -> list[str]:
    return [user["name"] for user in users]


# --- making and reading -----------------------------------------------------------------------------------------------


def test_a_user_comes_back_with_all_their_keys(storage: AgentStorage) -> None:
    made = storage.create_user("ann", "ann@example.org", 500, preferences={"theme": "dark", "ui": {"size": 2}})
    assert made.keys() == KEYS
    assert (made["name"], made["email"], made["quota_total"], made["quota_used"]) == ("ann", "ann@example.org", 500, 0)
    assert made["preferences"] == {"theme": "dark", "ui": {"size": 2}}
    assert made["preferences_json"] == '{"theme": "dark", "ui": {"size": 2}}'
    assert made["created_at"] == made["updated_at"]
    assert storage.get_user(made["id"]) == made


def test_a_user_is_made_from_a_name_alone(storage: AgentStorage) -> None:
    made = storage.create_user("ann")
    assert (made["email"], made["quota_total"], made["preferences"]) == ("", 100_000, {})


def test_users_of_the_same_name_have_ids_of_their_own(storage: AgentStorage) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: storage.create_user("ann")["id"], range(100)))
    assert len(set(made)) == 100


def test_an_id_that_is_taken_is_refused_and_its_user_stays(storage: AgentStorage) -> None:
    first = storage.create_user("ann", user_id="u", preferences={"a": 1})
    with pytest.raises(InputError, match="there is a user 'u' already"):
        storage.create_user("bob", user_id="u", preferences={"b": 2})
    assert storage.get_user("u") == first
    assert storage.find_users({"b": 2}) == []


def test_users_are_listed_in_the_order_of_their_making(storage: AgentStorage) -> None:
    made = [storage.create_user(f"user {n}", user_id=f"{9 - n}")["name"] for n in range(10)]
    assert names(storage.list_users()) == made
    assert names(storage.list_users(3, 4)) == made[4:7]
    assert storage.list_users(limit=0) == storage.list_users(10, 10) == []


@pytest.mark.parametrize("user_id", ["nobody", "", "\0", "\ud800", "x" * 10_000, SQL])
def test_reading_a_user_who_does_not_exist_answers_none(storage: AgentStorage, user_id: str) -> None:
    storage.create_user("ann")
    assert storage.get_user(user_id) is None
    assert storage.list_user_sessions(user_id) is None
    assert storage.get_usage_stats(user_id) is None
    assert storage.check_quota(user_id) is False
    assert len(storage.list_users()) == 1


@pytest.mark.parametrize("user_id", ["nobody", SQL])
def test_writing_to_a_user_who_does_not_exist_raises_and_makes_nobody(storage: AgentStorage, user_id: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: storage.update_user(user_id, name="ann"),
        lambda: storage.delete_user(user_id),
        lambda: storage.delete_user(user_id, sessions="delete"),
        lambda: storage.delete_user(user_id, sessions="keep"),
        lambda: storage.consume_quota(user_id, 1),
        lambda: storage.create_session(user_id),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="there is no user"):
            call()
    assert storage.list_users() == []


@pytest.mark.parametrize(
    "text", ["", "安娜", "O'Brien", SQL, "\N{PILE OF POO}", "x" * 10_000, "安" * 10_000, "\n\t%_\\"]
)
def test_any_text_is_a_name_an_email_and_a_preference(storage: AgentStorage, text: str) -> None:
    made = storage.create_user(text, text, preferences={text: text, "in": {text: [text]}})
    assert storage.get_user(made["id"]) == made
    assert (made["name"], made["email"], made["preferences"]) == (text, text, {text: text, "in": {text: [text]}})
    assert storage.find_users({text: text}) == storage.find_users({"in": {text: [text]}}) == [made]


NO_USERS: list[tuple[dict[str, Any], str]] = [
    ({"name": None}, "name must be a string"),
    ({"name": 5}, "name must be a string"),
    ({"name": "a\0b"}, "NUL"),
    ({"name": "a\ud800"}, "lone surrogates"),
    ({"email": None}, "email must be a string"),
    ({"email": "a\ud800"}, "lone surrogates"),
    ({"quota_total": -1}, "quota_total must be a number from 0 up"),
    ({"quota_total": 1.5}, "quota_total must be a number from 0 up"),
    ({"quota_total": True}, "quota_total must be a number from 0 up"),
    ({"quota_total": "5"}, "quota_total must be a number from 0 up"),
    ({"quota_total": 2**70}, "quota_total must be a number from 0 up"),
    ({"preferences": []}, "preferences must be a dict"),
    ({"preferences": "{}"}, "preferences must be a dict"),
    ({"preferences": 0}, "preferences must be a dict"),
    ({"preferences": {"a": frozenset()}}, r"preferences\['a'\] cannot be stored as JSON"),
    ({"preferences": {"a": {"b": {1, 2}}}}, r"preferences\['a'\] cannot be stored as JSON"),
    ({"preferences": {"a": b"bytes"}}, r"preferences\['a'\] cannot be stored as JSON"),
    ({"preferences": {1: 2}}, "the key 1 is no string"),
    ({"preferences": {"a": {None: 2}}}, "the key None is no string"),
    ({"preferences": nested(MAX_DEPTH + 2)}, "nested deeper"),
    ({"preferences": nested(5_000)}, "nested deeper"),
]


def test_what_no_user_can_be_is_refused_and_nothing_is_written(storage: AgentStorage) -> None:
    kept = storage.create_user("ann", "ann@example.org", 7, user_id="ann", preferences={"theme": "dark"})
    for given, why in NO_USERS:
        with case(given):
            with pytest.raises(InputError, match=why):
                storage.create_user(**{"name": "bob", **given})
            with pytest.raises(InputError, match=why):
                storage.update_user("ann", **given)
            if "preferences" in given:
                with pytest.raises(InputError, match=why):
                    storage.find_users(given["preferences"])
            assert storage.list_users() == storage.find_users({"theme": "dark"}) == [kept]


@pytest.mark.parametrize("user_id", ["", "\0", "a\ud800", None, 5])
def test_an_id_that_nobody_can_have_is_refused_by_writes(storage: AgentStorage, user_id: Any) -> None:
    writes: list[Callable[[], object]] = [
        lambda: storage.update_user(user_id, name="x"),
        lambda: storage.delete_user(user_id),
        lambda: storage.consume_quota(user_id, 1),
    ]
    if user_id is not None:  # then one is made, or the session is nobody's
        writes += [lambda: storage.create_user("x", user_id=user_id), lambda: storage.create_session(user_id)]
    for write in writes:
        with pytest.raises(InputError, match="a user id"):
            write()
    assert storage.list_users() == []


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", 2**70, None])
def test_a_limit_and_an_offset_are_numbers_from_zero_up(storage: AgentStorage, number: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: storage.list_users(number),
        lambda: storage.list_users(1, number),
        lambda: storage.find_users({}, number),
        lambda: storage.find_users({}, 1, number),
        lambda: storage.list_user_sessions("nobody", number),
        lambda: storage.list_user_sessions("nobody", 1, number),
    ]
    for call in calls:
        with pytest.raises(InputError, match="must be a number from 0 up"):
            call()


# --- changing ---------------------------------------------------------------------------------------------------------


def test_an_update_changes_what_is_passed_and_nothing_else(storage: AgentStorage) -> None:
    made = storage.create_user("ann", "a@b", 5, preferences={"a": 1})
    changed = storage.update_user(made["id"], name="Ann", quota_total=None)
    assert changed == {**made, "name": "Ann", "quota_total": None, "updated_at": changed["updated_at"]}
    assert changed["updated_at"] >= made["updated_at"]
    assert storage.get_user(made["id"]) == changed


def test_preferences_are_replaced_as_a_whole_also_where_users_are_found_by_them(storage: AgentStorage) -> None:
    user = storage.create_user("ann", preferences={"a": 1, "b": {"c": 2}})["id"]
    storage.update_user(user, preferences={"a": 2, "b": {"d": 2}})
    assert storage.find_users({"a": 1}) == storage.find_users({"b": {"c": 2}}) == []
    assert names(storage.find_users({"a": 2, "b": {"d": 2}})) == ["ann"]
    storage.update_user(user, preferences={})
    assert storage.find_users({"a": 2}) == []
    assert storage.find_users({}) == storage.list_users()


def test_used_tokens_can_be_set_back_for_a_new_period(storage: AgentStorage) -> None:
    user = storage.create_user("ann", quota_total=10)["id"]
    assert storage.consume_quota(user, 10)
    assert not storage.check_quota(user, 1)
    assert storage.update_user(user, quota_used=0)["quota_used"] == 0
    assert storage.check_quota(user, 10)


def test_updates_from_many_threads_leave_one_whole_user(storage: AgentStorage) -> None:
    user = storage.create_user("ann")["id"]
    begin = threading.Barrier(8)

    def change(n: int) -> None:
        begin.wait()
        for _ in range(5):
            storage.update_user(user, name=f"name {n}", preferences={"n": n, f"only {n}": True})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(8)))
    found = storage.get_user(user)
    assert found is not None
    n = found["preferences"]["n"]
    assert (found["name"], found["preferences"]) == (f"name {n}", {"n": n, f"only {n}": True})
    assert [len(storage.find_users({"n": m})) for m in range(8)] == [int(m == n) for m in range(8)]
    assert [len(storage.find_users({f"only {m}": True})) for m in range(8)] == [int(m == n) for m in range(8)]


# --- finding by preferences -------------------------------------------------------------------------------------------


def test_users_are_found_by_all_that_is_asked_for_whatever_else_they_prefer(storage: AgentStorage) -> None:
    storage.create_user("ann", preferences={"theme": "dark", "ui": {"size": 2, "font": "mono"}, "tags": ["a", "b"]})
    storage.create_user("bob", preferences={"theme": "dark", "ui": {"size": 3}})
    storage.create_user("cleo", preferences={"theme": "light", "ui": "plain"})
    storage.create_user("dan")
    assert names(storage.find_users({"theme": "dark"})) == ["ann", "bob"]
    assert names(storage.find_users(preferences={"theme": "dark", "ui": {"size": 2}})) == ["ann"]
    assert names(storage.find_users({"tags": ["a", "b"]})) == ["ann"]
    assert names(storage.find_users({"tags": ["b", "a"]})) == names(storage.find_users({"tags": ["a"]})) == []
    assert names(storage.find_users({"ui": "plain"})) == ["cleo"]
    assert names(storage.find_users({"nothing": None})) == []
    assert names(storage.find_users({"theme": "dark"}, 1, 1)) == ["bob"]
    assert storage.find_users() == storage.list_users()
    assert storage.find_users({"theme": "dark"}, limit=0) == []


@pytest.mark.parametrize(
    ("stored", "found_by", "not_by"),
    [
        (1, [1, 1.0], [True, "1", [1], 1.5]),
        (1.0, [1, 1.0], [True, "1"]),
        (True, [True], [1, 1.0, "true"]),
        (0, [0, 0.0, -0.0], [False, None, "", []]),
        (False, [False], [0, None]),
        (None, [None], [0, False, "", "null"]),
        ("", [""], [None, 0]),
        ([1, True], [[1, True], [1.0, True]], [[1, 1], [True, True]]),
        ([{"a": 1}], [[{"a": 1.0}]], [[{"a": True}], {"a": 1}]),
        ([{"a": 1, "b": 2}], [[{"b": 2, "a": 1}]], [[{"a": 1}]]),
        ({}, [{}], [None, [], ""]),
        (2**70, [2**70, float(2**70)], [2**70 + 1, 2**69]),
        (0.1, [0.1], [0.1 + 1e-17 + 1e-16, "0.1"]),
        ("Ä", ["Ä"], ["ä", "A", "A\u0308"]),
        ("x" * 500 + "a", ["x" * 500 + "a"], ["x" * 500 + "b", "x" * 500]),
        ("dark' OR '1'='1", ["dark' OR '1'='1"], ["dark"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_values_are_compared_as_json_compares_them(
    storage: AgentStorage, stored: Any, found_by: list[Any], not_by: list[Any]
) -> None:
    storage.create_user("ann", preferences={"k": stored, "deep": {"k": stored}})
    for value in found_by:
        assert names(storage.find_users({"k": value})) == ["ann"], value
        assert names(storage.find_users({"deep": {"k": value}})) == ["ann"], value
    for value in not_by:
        assert storage.find_users({"k": value}) == [], value


def test_names_of_preferences_are_never_confused(storage: AgentStorage) -> None:
    storage.create_user("dot", preferences={"a.b": 1})
    storage.create_user("nested", preferences={"a": {"b": 1}})
    storage.create_user("empty", preferences={"": {"": 1}})
    storage.create_user("quoted", preferences={'a","b': 1})
    storage.create_user("long", preferences={"x" * 10_000: 1})
    storage.create_user("longer", preferences={"x" * 10_001: 1})
    assert names(storage.find_users({"a.b": 1})) == ["dot"]
    assert names(storage.find_users({"a": {"b": 1}})) == ["nested"]
    assert names(storage.find_users({"": {"": 1}})) == ["empty"]
    assert names(storage.find_users({'a","b': 1})) == ["quoted"]
    assert names(storage.find_users({"x" * 10_000: 1})) == ["long"]


def test_preferences_hold_what_text_columns_cannot(storage: AgentStorage) -> None:
    odd = {"nul\0": "\0", "half\ud800": "\ud800", "big": 10**60}
    made = storage.create_user("ann", preferences=odd)
    assert made["preferences"] == odd
    assert storage.find_users(odd) == [made]


def test_preferences_as_deep_as_json_goes_are_stored_and_found(storage: AgentStorage) -> None:
    made = storage.create_user("ann", preferences=nested(MAX_DEPTH))
    assert storage.find_users(nested(MAX_DEPTH)) == [made]


def test_users_are_found_by_many_preferences_at_once(storage: AgentStorage) -> None:
    many = {f"k{n}": n for n in range(1_000)}
    storage.create_user("ann", preferences=many)
    storage.create_user("bob", preferences={**many, "k500": "other"})
    assert names(storage.find_users(many)) == ["ann"]
    with pytest.raises(InputError, match="at most 1000 preferences"):
        storage.find_users({**many, "more": 1})


# --- deleting ---------------------------------------------------------------------------------------------------------


def test_a_deleted_user_is_gone_for_every_question(storage: AgentStorage) -> None:
    user = storage.create_user("ann", preferences={"a": 1})["id"]
    assert storage.delete_user(user) == 0
    assert storage.get_user(user) is None
    assert storage.find_users({"a": 1}) == storage.list_users() == []
    assert not storage.check_quota(user)
    with pytest.raises(NotFound):
        storage.delete_user(user)


def test_a_user_with_sessions_is_only_deleted_by_who_says_what_becomes_of_them(storage: AgentStorage) -> None:
    user = storage.create_user("ann")["id"]
    session = storage.create_session(user)["id"]
    with pytest.raises(InputError, match=r"has 1 session\(s\); pass sessions="):
        storage.delete_user(user)
    with pytest.raises(InputError, match="sessions must be 'keep' or 'delete'"):
        storage.delete_user(user, sessions="drop")  # type: ignore[arg-type]
    assert storage.get_user(user) is not None
    assert storage.get_session(session) is not None


def test_sessions_that_are_kept_belong_to_nobody(storage: AgentStorage) -> None:
    user, other = storage.create_user("ann")["id"], storage.create_user("bob")["id"]
    kept = [storage.create_session(user)["id"] for _ in range(2)]
    theirs = storage.create_session(other)
    storage.save_message(kept[0], "user", "hi")
    assert storage.delete_user(user, sessions="keep") == 2
    for session in kept:
        found = storage.get_session(session)
        assert found is not None
        assert found["user_id"] is None
    assert [row["content"] for row in storage.get_conversation_history(kept[0]) or ()] == ["hi"]
    assert storage.get_session(theirs["id"]) == theirs


def test_sessions_that_are_deleted_take_all_that_belongs_to_them(storage: AgentStorage) -> None:
    user, other = storage.create_user("ann")["id"], storage.create_user("bob")["id"]
    gone = storage.create_session(user)["id"]
    theirs = storage.create_session(other)
    storage.save_message(gone, "user", "hi")
    task, call = storage.create_task(gone, "t", {})["id"], storage.log_tool_call(gone, "t", {}, {}, 1)
    assert storage.delete_user(user, sessions="delete") == 1
    assert storage.get_session(gone) is None
    assert storage.get_conversation_history(gone) is None
    assert storage.get_task(task) is None
    assert storage.get_tool_call(call) is None
    assert storage.get_session(theirs["id"]) == theirs


def test_a_user_of_the_same_id_inherits_nothing(storage: AgentStorage) -> None:
    storage.create_user("ann", user_id="u", preferences={"a": 1})
    session = storage.create_session("u")["id"]
    storage.save_message(session, "assistant", "hi", token_count=5)
    storage.log_tool_call(session, "look", {}, {}, 1)
    assert storage.consume_quota("u", 5)
    storage.delete_user("u", sessions="delete")
    again = storage.create_user("ann", user_id="u")
    stats = storage.get_usage_stats("u")
    assert stats is not None
    assert (again["quota_used"], again["preferences"]) == (0, {})
    assert (stats["total_tokens"], stats["total_messages"], stats["tool_usage"]) == (0, 0, [])
    assert (storage.find_users({"a": 1}), storage.list_user_sessions("u")) == ([], [])


def test_a_session_that_somebody_drives_keeps_its_user(storage: AgentStorage) -> None:
    user = storage.create_user("ann")["id"]
    session = storage.create_session(user)["id"]
    drive(storage, session)
    with pytest.raises(ThreadBusy):
        storage.delete_user(user, sessions="delete")
    assert storage.get_user(user) is not None
    assert storage.get_session(session) is not None


def test_sessions_that_are_made_while_their_user_is_deleted_never_have_an_owner_who_is_gone(
    storage: AgentStorage,
) -> None:
    user = storage.create_user("ann")["id"]
    begin = threading.Barrier(5)
    made: list[str] = []

    def make(_: int) -> None:
        begin.wait()
        try:
            while True:
                made.append(storage.create_session(user)["id"])
        except NotFound:
            return

    def delete() -> None:
        begin.wait()
        while True:
            try:
                storage.delete_user(user)
            except NotFound:
                return
            except InputError:
                storage.delete_user(user, sessions="keep")

    with ThreadPoolExecutor(5) as pool:
        makers = [pool.submit(make, n) for n in range(4)]
        pool.submit(delete).result()
        for maker in makers:
            maker.result()
    assert storage.get_user(user) is None
    assert [session for session in made if known(storage.get_session(session))["user_id"]] == []


def test_a_thread_that_gets_an_owner_in_the_commit_that_removes_them_has_none(storage: AgentStorage) -> None:
    store = storage.store
    for round_ in range(10):
        writes: list[Future[Any]] = []
        user = f"user {round_}"
        storage.create_user("ann", user_id=user)
        for n in range(8):  # all of them wait at once, so many of them share a transaction, in the order of their names
            name = f"a {round_} {n}"
            writes.append(store.submit(sessions.create, ThreadKey("", f"{name} made"), user, "", None, "{}"))
            writes.append(store.submit(threads.append, ThreadKey("", f"{name} begun"), [], owner=user))
            writes.append(store.submit(threads.set_owner, ThreadKey("", f"{name} given"), user))
            if n == 3:
                writes.append(store.submit(users.disown_and_remove, user, disown=True))
        for write in writes:
            with contextlib.suppress(NotFound):
                write.result()
    owned = store.read_now(lambda tx: tx.all("SELECT id FROM threads WHERE owner IS NOT NULL"))
    assert (owned, storage.list_users()) == ([], [])
