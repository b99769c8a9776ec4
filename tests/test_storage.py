"""AgentStorage offers what a checkpointer offers, without an event loop; and threads may lie in a namespace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from byssus import Agent, Model, ThreadKey, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.errors import InputError, ThreadBusy
from byssus.memory import PostgresMemory, SQLiteMemory
from byssus.queries.log import threads
from byssus.queries.log.leases import Claim
from byssus.storage import AgentStorage
from byssus.testing import ScriptedProvider
from tests.support.databases import Database
from tests.support.leases import FAR_AWAY

# The life cycle is each surface's own, and agents are awaited.
ONLY_ASYNC = {"close", "lease_seconds", "name", "open", "store", "supervise"}


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_each_operation_of_a_checkpointer_has_its_synchronous_twin() -> None:
    assert public(Checkpointer) - ONLY_ASYNC == public(AgentStorage) - {"close", "store"}


def test_threads_checkpoints_and_forks_work_without_an_event_loop(storage: AgentStorage) -> None:
    storage.append("trip", [UserMessage("hello"), {"role": "note", "text": "x"}])
    storage.save_extra("trip", {"plan": "A"})
    thread = storage.load("trip")
    assert thread is not None
    assert (len(thread.messages), thread.extra) == (2, {"plan": "A"})
    name = storage.put(Checkpoint(CheckpointMetadata("trip", "c1", step=1), thread.messages, {"state": 1}))
    assert name == "c1"
    latest = storage.get_latest("trip")
    assert latest is not None
    assert latest.state == {"state": 1}
    storage.append("trip", UserMessage("more"))
    fork = storage.fork("trip", "c1", new_id="other")
    assert storage.diff("trip", fork).shared == 2
    storage.rewind("trip", "c1")
    tree = storage.tree("trip")
    assert tree is not None
    assert [each.thread_id for each in tree.forks] == ["other"]
    assert {info.id for info in storage.threads()} == {"trip", "other"}
    assert storage.delete_thread("other") == 1
    assert storage.info("other") is None


def test_a_thread_is_exported_and_imported_without_an_event_loop(storage: AgentStorage) -> None:
    storage.append("trip", [UserMessage(f"message {number}") for number in range(3)])
    lines = list(storage.export_thread("trip"))
    assert storage.import_from(lines, "copy") == ["copy"]
    copy, trip = storage.load("copy"), storage.load("trip")
    assert copy is not None
    assert trip is not None
    assert copy.messages == trip.messages
    storage.create_user("Ann", user_id="ann")
    assert storage.import_from(lines, "hers", user_id="ann") == ["hers"]
    assert [session["id"] for session in storage.list_user_sessions("ann") or ()] == ["hers"]
    storage.delete_thread("trip")
    assert storage.import_from(lines, trusted=True) == ["trip"]
    assert list(storage.export_thread("trip")) == lines
    first = next(iter(storage.export_thread("trip")))  # and the rest is not wanted
    assert first == lines[0]


def test_the_inbox_is_on_disk_when_the_call_returns(storage: AgentStorage) -> None:
    receipt = storage.steer("trip", "slowly")
    storage.follow_up("trip", "and then?")
    assert receipt.done
    assert [(item.kind, item.message.text) for item in storage.inbox("trip")] == [
        ("steer", "slowly"),
        ("follow_up", "and then?"),
    ]
    assert storage.withdraw("trip", receipt)
    assert not storage.withdraw("trip", receipt)


def test_a_question_is_answered_without_an_event_loop(database: Database, storage: AgentStorage) -> None:
    paid = []

    @tool(approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    async def run(*steps: object, resume: bool = False) -> str:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(steps)  # type: ignore[arg-type]
            agent = Agent(provider=provider, model=Model("m"), tools=[pay], checkpointer=cp, thread_id="t")
            return (await agent.resume() if resume else await agent.prompt("Pay 5.")).stop_reason

    assert asyncio.run(run([ToolCall("c1", "pay", {"amount": 5})])) == "waiting"
    (question,) = storage.pending("t")
    assert (question.call_id, question.arguments) == ("c1", {"amount": 5})
    storage.answer("t", "c1", "approve")
    assert asyncio.run(run("done", resume=True)) == "stop"
    assert paid == [5]
    assert [record.status for record in storage.tool_calls("t")] == ["done"]


def test_watching_gives_each_message_once(storage: AgentStorage) -> None:
    storage.append("trip", UserMessage("one"))
    watching = storage.watch("trip")
    assert next(watching).text == "one"
    later = threading.Timer(0.05, storage.append, ("trip", UserMessage("two")))
    later.start()
    assert next(watching).text == "two"
    later.join()


def test_a_call_waits_for_a_run_without_an_event_loop(storage: AgentStorage) -> None:
    def drive(seconds: float) -> None:
        claim = Claim(FAR_AWAY, "their-run", seconds)
        storage.store.write_now(threads.append, ThreadKey("", "s"), [], by=claim)

    storage.create_session(None, "a session", session_id="s")
    drive(30)
    with pytest.raises(ThreadBusy):
        storage.save_message("s", "user", "hello")
    other = threading.Thread(target=storage.save_message, args=("s", "user", "hello"), kwargs={"wait": 30})
    other.start()
    storage.store.write_now(lambda tx: tx.run("UPDATE threads SET lease_until = :now", now=tx.now()))
    other.join()
    assert [row["content"] for row in storage.get_conversation_history("s") or ()] == ["hello"]


# --- namespaces -------------------------------------------------------------------------------------------------------


def test_an_agent_drives_a_thread_of_a_namespace_and_of_a_users_memory(database: Database) -> None:
    ann, bob = ThreadKey("ann", "main"), ThreadKey("bob", "main")

    async def use() -> None:
        async with database.checkpointer() as cp:
            for key in (ann, bob):
                provider = ScriptedProvider([f"hello {key.namespace}"])
                agent = Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id=key)
                assert agent.thread_id == "main"
                await agent.prompt("hi")
            again = Agent(provider=ScriptedProvider(["yes"]), model=Model("m"), checkpointer=cp, thread_id=ann)
            await again.prompt("again")
            loaded = await cp.load(ann)
            assert loaded is not None
            assert [message.text for message in loaded.messages] == ["hi", "hello ann", "again", "yes"]
            assert await cp.load("main") is None
            assert await cp.threads() == []
        kind = SQLiteMemory if database.system == "sqlite" else PostgresMemory
        async with kind(database.place, user_id="ann", session_id="main") as memory:
            assert [message.get_text_content() for message in await memory.get_memory()] == [
                "hi",
                "hello ann",
                "again",
                "yes",
            ]

    asyncio.run(use())


@pytest.mark.parametrize("key", [ThreadKey("\x7ftrash", "t"), ThreadKey("a\0", "t"), ThreadKey("ann", ""), 5, ""])
def test_a_key_that_no_thread_can_have_is_refused_by_name(storage: AgentStorage, key: object) -> None:
    with pytest.raises(InputError, match=r"namespace|thread id"):
        storage.append(key, UserMessage("x"))  # type: ignore[arg-type]
    assert storage.threads() == []
