"""The bridge: one function for code with an event loop and without, and an AgentStorage wherever it is used."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pydoc
import threading
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent
from byssus.checkpointer import Checkpointer
from byssus.errors import ByssusError, InputError, StoreNotOpen
from byssus.storage import AgentStorage
from byssus.store.database import Store
from byssus.store.operations import Blocking, Runner, _Method, awaited, blocking, to_the_end
from byssus.store.sqlite.store import SQLiteStore
from tests.support import forked
from tests.support.databases import Database

ROOT = Path(__file__).parents[2]
OPERATIONS = sorted(name for name, item in vars(AgentStorage).items() if isinstance(item, blocking))


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


def run_child(code: str, *args: str) -> str:
    """What a process says that runs this and ends well, without a warning."""
    done = forked.run(["-W", "error", "-c", code, *args])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def wait_for_releases() -> None:
    for thread in threading.enumerate():
        if thread.name == "byssus-release":
            thread.join()


# --- what editors and people see --------------------------------------------------------------------------------------


def parameters(method: Any) -> dict[str, Any]:
    return {name: item.default for name, item in inspect.signature(method).parameters.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("create_user", [("name", ...), ("email", ""), ("quota_total", 100_000)]),
        ("create_session", [("user_id", ...), ("title", "新对话"), ("model", "gpt-4o-mini")]),
        (
            "save_message",
            [
                ("session_id", ...),
                ("role", ...),
                ("content", ...),
                ("tool_calls", None),
                ("tool_call_id", None),
                ("token_count", 0),
            ],
        ),
        (
            "log_tool_call",
            [
                ("session_id", ...),
                ("tool_name", ...),
                ("input_data", ...),
                ("output_data", ...),
                ("elapsed_ms", ...),
                ("success", True),
                ("error_message", None),
                ("message_id", None),
            ],
        ),
        ("create_task", [("session_id", ...), ("task_type", ...), ("payload", ...), ("priority", 0)]),
        ("update_task_status", [("task_id", ...), ("status", ...), ("result", None)]),
        ("check_quota", [("user_id", ...), ("required_tokens", 0)]),
        ("consume_quota", [("user_id", ...), ("tokens", ...)]),
        ("get_usage_stats", [("user_id", ...), ("days", 7)]),
        ("get_conversation_history", [("session_id", ...), ("max_messages", 50)]),
    ],
)
def test_parameters_have_the_names_order_and_defaults_that_were_promised(
    name: str, expected: list[tuple[str, Any]]
) -> None:
    found = inspect.signature(getattr(AgentStorage, name)).parameters.values()
    positional = [item for item in found if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    given = [(item.name, ... if item.default is inspect.Parameter.empty else item.default) for item in positional]
    assert given == [("self", ...), *expected]


def test_a_method_shows_the_same_parameters_on_the_class_and_on_an_object(storage: AgentStorage) -> None:
    for name in OPERATIONS:
        on_class = parameters(getattr(AgentStorage, name))
        assert on_class.pop("self") is inspect.Parameter.empty
        assert parameters(getattr(storage, name)) == on_class


def test_both_surfaces_have_the_same_operations_with_the_same_parameters() -> None:
    assert sorted(name for name, item in vars(Checkpointer).items() if isinstance(item, awaited)) == OPERATIONS
    for name in OPERATIONS:
        ours, theirs = getattr(AgentStorage, name), getattr(Checkpointer, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.iscoroutinefunction(theirs)
        assert not inspect.iscoroutinefunction(ours)


def test_the_types_in_the_signatures_of_a_checkpointer_and_an_agent_can_be_resolved() -> None:
    operations = [item._find() for item in vars(Checkpointer).values() if isinstance(item, _Method)]
    assert len(operations) > 75
    methods = [item for kind in (Agent, Checkpointer) for item in vars(kind).values() if inspect.isfunction(item)]
    for function in [*operations, *methods]:
        assert typing.get_type_hints(function)


@pytest.mark.parametrize("surface", [AgentStorage, Checkpointer])
def test_help_calls_an_operation_by_the_name_that_it_is_called_by(surface: type) -> None:
    methods = {name for name, item in vars(surface).items() if isinstance(item, _Method)}
    assert {name for name in methods if getattr(surface, name).__name__ != name} == set()
    assert pydoc.plain(pydoc.render_doc(surface.threads)).splitlines()[2].removeprefix("async ").startswith("threads(")  # type: ignore[attr-defined]


def test_help_shows_the_parameters_what_comes_back_and_what_it_is_for() -> None:
    text = pydoc.plain(pydoc.render_doc(AgentStorage.create_user))
    told = "".join(text.split())  # newer versions of Python show one parameter a line
    assert "create_user(self,name:'str',email:'str'='',quota_total:'int|None'=100000" in told
    assert "-> 'UserRow'" in text
    assert "Create a user with a quota of tokens" in text
    assert "store" not in inspect.signature(AgentStorage.create_user).parameters
    assert all(getattr(AgentStorage, name).__doc__ for name in OPERATIONS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_without_await_is_warned_of_by_its_name(database: Database) -> None:
    with (
        database.checkpointer() as cp,
        pytest.warns(RuntimeWarning, match=r"'Checkpointer\.pending' was never awaited"),
    ):
        cp.pending()  # type: ignore[unused-coroutine]


def test_an_argument_that_there_is_not_is_an_error_that_names_the_method(storage: AgentStorage) -> None:
    with pytest.raises(TypeError, match="create_user"):
        storage.create_user()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"create_user.*nickname"):
        storage.create_user("ann", nickname="a")  # type: ignore[call-arg]
    assert storage.list_users() == []


# --- the bridge itself ------------------------------------------------------------------------------------------------


def test_an_operation_that_waits_for_something_else_is_refused(store: Store) -> None:
    async def waits(runner: Runner) -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="awaits something else than its store"):
        to_the_end(waits(Blocking(store)))


def test_what_an_operation_raises_is_raised(store: Store) -> None:
    async def fails(runner: Runner) -> None:
        await runner.aside(lambda: 1)
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        to_the_end(fails(Blocking(store)))


def test_an_operation_reads_writes_and_works_aside_in_turn(store: Store) -> None:
    async def works(runner: Runner) -> list[Any]:
        made = await runner.aside(lambda: 1)
        read = await runner.read(lambda tx: tx.one("SELECT 2"))
        written = await runner.write(lambda tx: tx.one("SELECT 3"))
        return [made, read, written, runner.base is store, runner.name == store.name]

    assert to_the_end(works(Blocking(store))) == [1, (2,), (3,), True, True]


# --- with and without event loops -------------------------------------------------------------------------------------


def test_a_storage_works_inside_a_running_event_loop(storage: AgentStorage) -> None:
    async def main() -> list[str]:
        user = storage.create_user("ann")["id"]
        session = storage.create_session(user)["id"]
        storage.save_message(session, "user", "hi")
        return [row["content"] for row in storage.get_conversation_history(session) or ()]

    assert asyncio.run(main()) == ["hi"]


def test_a_storage_works_from_several_event_loops_and_threads_at_once(storage: AgentStorage) -> None:
    session = storage.create_session(None)["id"]
    begin = threading.Barrier(6)

    async def say(n: int) -> None:
        for m in range(5):
            storage.save_message(session, "user", f"{n}-{m}")
            await asyncio.sleep(0)

    def loop(n: int) -> None:
        begin.wait()
        asyncio.run(say(n))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(loop, range(6)))
    assert len(storage.get_conversation_history(session, 1_000) or ()) == 30


def test_a_checkpointer_and_a_storage_see_the_same(database: Database, storage: AgentStorage) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            user = storage.create_user("ann")
            assert await cp.get_user(user["id"]) == user
            session = await cp.create_session(user["id"], "a trip")
            assert storage.get_session(session["id"]) == session
            name = await cp.save_message(session["id"], "user", "hi")
            assert storage.get_message(session["id"], name) == await cp.get_message(session["id"], name)
            assert await cp.consume_quota(user["id"], 100_000)
            assert not storage.check_quota(user["id"], 1)
            assert await cp.get_usage_stats(user["id"]) == storage.get_usage_stats(user["id"])

    asyncio.run(main())


def test_a_query_may_not_use_the_storage(storage: AgentStorage) -> None:
    with pytest.raises(ByssusError, match="a query called the store"):
        storage.store.write_now(lambda tx: storage.create_user("ann"))
    assert storage.list_users() == []


# --- opening and closing ----------------------------------------------------------------------------------------------


def test_without_an_argument_it_is_agent_store_db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with AgentStorage() as storage:
        storage.create_user("ann")
    assert (tmp_path / "agent_store.db").exists()
    with AgentStorage(Path("agent_store.db")) as again:
        assert [user["name"] for user in again.list_users()] == ["ann"]


def test_a_storage_works_without_with(database: Database) -> None:
    storage = AgentStorage(database.place)
    user = storage.create_user("ann")["id"]
    storage.close()
    storage = AgentStorage(database.place)
    found = storage.get_user(user)
    storage.close()
    storage.close()
    assert found is not None


def test_every_method_of_a_closed_storage_says_that_it_is_closed(database: Database) -> None:
    with AgentStorage(database.place) as storage:
        method = storage.list_users
    for name in OPERATIONS:
        required = [item for item in parameters(getattr(storage, name)).values() if item is inspect.Parameter.empty]
        with pytest.raises(StoreNotOpen, match="was closed; make a new one"):
            getattr(storage, name)(*["x"] * len(required))
    with pytest.raises(StoreNotOpen):
        method()


def test_one_storage_that_is_closed_leaves_the_others_open(database: Database) -> None:
    one, two = AgentStorage(database.place), AgentStorage(database.place)
    one.create_user("ann")
    one.close()
    assert len(two.list_users()) == 1
    two.close()


def test_a_storage_that_nobody_holds_any_more_lets_go_of_its_database(database: Database) -> None:
    storage = AgentStorage(database.place)
    store = storage.store
    assert store.users == 1
    del storage
    gc.collect()
    wait_for_releases()
    assert store.users == 0
    with AgentStorage(database.place) as again:
        assert again.store is not store
        assert again.list_users() == []


def test_a_storage_may_be_collected_while_another_one_is_opened(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Box:
        me: Box
        storage: AgentStorage

    box = Box()
    box.me, box.storage = box, AgentStorage(database.place)
    store = box.storage.store
    del box  # only the collector finds it
    real = SQLiteStore.__init__

    def make(self: SQLiteStore, *args: Any, **options: Any) -> None:
        gc.collect()  # it may run at any allocation
        real(self, *args, **options)

    monkeypatch.setattr(SQLiteStore, "__init__", make)
    with AgentStorage(tmp_path / "another.db") as another:
        wait_for_releases()
        assert (store.users, another.list_users()) == (0, [])


def test_a_place_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ByssusError):
        AgentStorage(tmp_path)  # a directory
    with pytest.raises(InputError):
        AgentStorage(tmp_path / "x.db", durability="sometimes")  # type: ignore[arg-type]
    gc.collect()


@pytest.mark.processes
def test_a_process_that_never_closes_its_storage_ends_well_and_everything_is_stored(
    database: Database, storage: AgentStorage
) -> None:
    session = storage.create_session(None)["id"]
    code = """
import sys
from byssus.storage import AgentStorage
storage = AgentStorage(sys.argv[1])
for n in range(20):
    storage.save_message(sys.argv[2], "user", str(n))
print("done")
"""
    assert run_child(code, database.place, session) == "done\n"
    assert [row["content"] for row in storage.get_conversation_history(session) or ()] == [str(n) for n in range(20)]


@pytest.mark.processes
def test_two_processes_spend_one_quota_and_write_one_session(database: Database, storage: AgentStorage) -> None:
    user = storage.create_user("ann", quota_total=100)["id"]
    session = storage.create_session(user)["id"]
    code = """
import sys
from byssus.storage import AgentStorage
with AgentStorage(sys.argv[1]) as storage:
    print("ready", flush=True)
    sys.stdin.readline()
    spent = 0
    for n in range(40):
        spent += 3 if storage.consume_quota(sys.argv[2], 3) else 0
        storage.save_message(sys.argv[3], "user", str(n))
    print(spent)
"""
    command, pipe = ["-W", "error", "-c", code, database.place, user, session], forked.PIPE
    children = [forked.Process(command, stdin=pipe, stdout=pipe) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:  # both are open: now they race
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        spent = [int(child.communicate(timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    found = storage.get_user(user)
    assert found is not None
    assert sum(spent) == found["quota_used"] == 99
    rows = [row["content"] for row in storage.get_conversation_history(session, 1_000) or ()]
    assert sorted(rows, key=int) == sorted([str(n) for n in range(40)] * 2, key=int)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_that_drops_its_parents_storage_harms_nobody(database: Database) -> None:
    code = """
import gc, os, sys
from byssus.errors import StoreError
from byssus.storage import AgentStorage
storage = AgentStorage(sys.argv[1])
storage.create_user("parent")
child = os.fork()
if child == 0:
    try:
        storage.create_user("inherited")
    except StoreError:
        pass
    else:
        os._exit(3)
    del storage
    gc.collect()
    with AgentStorage(sys.argv[1]) as own:
        own.create_user("child")
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
print([user["name"] for user in storage.list_users()])
storage.create_user("parent again")
"""
    assert run_child(code, database.place) == "['parent', 'child']\n"
