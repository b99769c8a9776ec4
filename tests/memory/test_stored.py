"""Memories as programs use them: whose they are, how they live and die, and what agents see of them."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from byssus import ExcludeMarked, Model, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    InputError,
    StoreNotOpen,
    StoreUnreachable,
    StoreUnusable,
    ThreadBusy,
)
from byssus.memory import PostgresMemory, SQLiteMemory
from byssus.messages import AssistantMessage, TextContent, ToolResultMessage
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage
from byssus.store.database import Store
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.leases import CALL_SLOW, LOOK, Slow, agent_on, brief, look
from tests.support.memories import TOLD, Driven, child, ids, kept, msg, msgs, outcome, released, stored, texts

MODEL = Model("m")


# --- users and sessions -----------------------------------------------------------------------------------------------


PAIRS = [
    (None, None),
    (None, "s"),
    (None, "None"),
    ("None", None),
    ("None", "default"),
    ("a-b", "c"),
    ("a", "b-c"),
    ("a", "b"),
    ("A", "b"),
    ("a:b", "c"),
    ("a", "b:c"),
    ("ann", "s"),
    ("bob", "s"),
    ("ann", "S"),
    ("a%", "s"),
    ("a' OR 1=1 --", "s"),
    ("用户", "会话"),
    ("x" * 300, "y" * 300),
]
PLACES = [pair for pair in PAIRS if pair != ("None", "default")]  # which is the one without a session


def test_users_and_sessions_are_worlds_of_their_own(database: Database) -> None:
    async def main() -> None:
        memories = [stored(database, *pair) for pair in PLACES]
        for number, memory in enumerate(memories):
            await memory.add([msg(f"word {number}", "same id"), msg("both", f"{number}")], "m")
            await memory.update_compressed_summary(f"summary {number}")
        for number, memory in enumerate(memories):
            assert texts(await memory.get_memory("m")) == [f"summary {number}", f"word {number}", "both"]
            assert ids(await memory.search("word")) == ["same id"]
            assert texts(await memory.search("both")) == ["both"]
            assert await memory.size() == 2
        await memories[2].clear()
        assert await memories[3].delete(["same id"]) == 1
        assert await memories[5].delete_by_mark("m") == 2
        assert await memories[6].update_messages_mark("n", "m") == 2
        memories[7].load_state_dict({"content": []})
        sizes = [await memory.size() for memory in memories]
        assert sizes == [{2: 0, 3: 1, 5: 0, 7: 0}.get(number, 2) for number in range(len(PLACES))]
        assert [len(await memory.get_memory("n", prepend_summary=False)) for memory in memories] == [
            2 if number == 6 else 0 for number in range(len(PLACES))
        ]
        for memory in memories:
            await memory.close()

    asyncio.run(main())


def test_who_names_no_session_has_the_default_one(database: Database) -> None:
    async def main() -> None:
        async with stored(database, "ann") as memory, stored(database, "ann", "default") as same:
            await memory.add(msgs("1"))
            assert ids(await same.get_memory()) == ["1"]
            assert (memory.user_id, memory.session_id) == ("ann", None)

    asyncio.run(main())


@pytest.mark.parametrize("bad", ["", "a\0", "\ud800", 5, b"a"])
def test_a_user_or_session_that_cannot_be_stored_is_refused(database: Database, bad: Any) -> None:
    with pytest.raises(InputError):
        stored(database, bad)
    with pytest.raises(InputError):
        stored(database, None, bad)


def test_the_wrong_kind_of_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for a DSN, use PostgresMemory"):
        SQLiteMemory("postgresql://localhost/x")
    for bad in ("", 5, None):
        with pytest.raises(InputError):
            SQLiteMemory(bad)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        PostgresMemory(str(tmp_path / "memory.db"))
    options: list[dict[str, Any]] = [{"wait": -1}, {"durability": "some"}]
    for wrong in options:
        with pytest.raises(InputError):
            SQLiteMemory(tmp_path / "memory.db", **wrong)


# --- opening and closing ----------------------------------------------------------------------------------------------


def test_many_memories_share_one_store_and_work_at_once(database: Database) -> None:
    async def main(store: Store) -> None:
        memories = [stored(database, "ann", f"s{n % 5}") for n in range(20)]
        assert store.users == 1  # nothing is opened before it is used
        await asyncio.gather(
            *(memory.add(msgs(f"{n}-{i}"), "m") for n, memory in enumerate(memories) for i in range(10))
        )
        assert store.users == 21
        for n in range(5):
            found = ids(await memories[n].get_memory("m"))
            assert sorted(found) == sorted(f"{each}-{i}" for each in range(n, 20, 5) for i in range(10))
        for number, memory in enumerate(memories):
            await memory.close()
            await memory.close()
            assert store.users == 20 - number

    with database.store() as store:
        asyncio.run(main(store))


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open yet"])
def test_what_is_added_at_once_is_stored_in_the_order_of_the_calls(database: Database, is_open: bool) -> None:
    names = [f"{n}" for n in range(10)]

    async def main() -> None:
        memories = [stored(database, "ann", f"s{n}") for n in range(20)]
        for memory in memories if is_open else ():
            await memory.open()
        await asyncio.gather(*(memory.add(msgs(name)) for memory in memories for name in names))
        assert [ids(await memory.get_memory()) for memory in memories] == [names] * 20
        for memory in memories:
            await memory.close()

    with database.store():
        asyncio.run(main())


def test_first_calls_at_once_open_the_database_once(database: Database) -> None:
    async def main() -> None:
        memory, other = stored(database, "ann", "s"), stored(database, "ann", "t")
        await asyncio.gather(
            memory.add(msgs("1")), memory.get_memory(), memory.size(), other.add(msgs("1")), memory.search("x")
        )
        with database.store() as store:
            assert store.users == 3
        assert (await memory.size(), await other.size()) == (1, 1)
        await memory.close()
        await other.close()

    asyncio.run(main())


def test_a_memory_that_was_closed_says_what_to_do(database: Database) -> None:
    async def main() -> None:
        with database.store() as store:
            async with stored(database, "ann", "s") as memory:
                assert store.users == 2
                await memory.add(msgs("1"), "m")
            assert store.users == 1
            calls: list[Callable[[], Any]] = [
                lambda: memory.add(msgs("2")),
                memory.get_memory,
                memory.size,
                memory.clear,
                lambda: memory.delete(["1"]),
                lambda: memory.delete_by_mark("m"),
                lambda: memory.update_messages_mark("n"),
                lambda: memory.update_compressed_summary("so far"),
                lambda: memory.mark_compressed(["1"], "so far"),
                memory.compressed_summary,
                lambda: memory.search("word"),
            ]
            for call in calls:
                with pytest.raises(StoreNotOpen, match=r"was closed; await memory\.open\(\) first"):
                    await call()
            assert await memory.open() is memory
            assert ids(await memory.get_memory("m")) == ["1"]
            await memory.close()
            async with memory:
                assert await memory.size() == 1
            assert store.users == 1

    asyncio.run(main())


def test_a_memory_that_is_closed_while_its_first_call_opens_it_is_closed(database: Database) -> None:
    async def main(store: Store) -> None:
        for rounds in range(5):
            memory = stored(database, "ann", f"s{rounds}")
            adding = asyncio.create_task(memory.add(msgs("1"), "m"))
            for _ in range(rounds):
                await asyncio.sleep(0)
            await memory.close()
            failure = (await asyncio.gather(adding, return_exceptions=True))[0]
            assert failure is None or isinstance(failure, StoreNotOpen)
            with pytest.raises(StoreNotOpen):
                await memory.size()
            assert store.users == 1
            async with memory:  # what was answered is stored, and what was refused is not
                assert ids(await memory.get_memory("m")) == (["1"] if failure is None else [])

    with database.store() as store:
        asyncio.run(main(store))


def test_a_memory_that_nobody_has_any_more_lets_go_of_its_store(database: Database) -> None:
    with database.store() as store:
        memory = stored(database, "ann", "s")
        asyncio.run(memory.add(msgs("1")))
        assert store.users == 2
        del memory
        released()
        assert store.users == 1
        assert kept(database) == ["text of 1"]


def test_a_memory_works_in_one_event_loop_after_the_other(database: Database) -> None:
    memory = stored(database, "ann", "s")
    asyncio.run(memory.add(msgs("1"), "m"))
    asyncio.run(memory.add(msgs("2")))
    assert ids(asyncio.run(memory.get_memory())) == ["1", "2"]
    assert ids(asyncio.run(memory.search("text"))) == ["2", "1"]
    asyncio.run(memory.close())


def test_a_state_may_be_loaded_between_two_event_loops(database: Database) -> None:
    memory = stored(database, "ann", "s")

    async def sizes() -> list[int]:
        return list(await asyncio.gather(*(memory.size() for _ in range(3))))

    for names in (["1"], ["1", "2"], []):
        memory.load_state_dict({"content": [message.to_dict() for message in msgs(*names)]})
        assert asyncio.run(sizes()) == [len(names)] * 3
    asyncio.run(memory.close())


def test_a_memory_works_in_several_threads_at_once(database: Database) -> None:
    memory = stored(database, "ann", "s")

    def work(number: int) -> None:
        async def main() -> None:
            for n in range(10):
                await memory.add(msgs(f"{number}-{n}"), "m")

        asyncio.run(main())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    found = ids(asyncio.run(memory.get_memory("m")))
    for number in range(4):
        assert [name for name in found if name.startswith(f"{number}-")] == [f"{number}-{n}" for n in range(10)]
    assert len(found) == 40
    asyncio.run(memory.close())


@pytest.mark.processes
def test_a_program_that_never_closes_ends_well_and_has_stored_everything(database: Database) -> None:
    program = """
    ours = memory("s")
    asyncio.run(ours.add([msg("a", "1"), msg("b", "2")], ["x", "y"]))

    async def main():
        await ours.update_compressed_summary("so far")
        await memory("t").add(msg("c", "3"))

    asyncio.run(main())
    say("end")
    """
    assert outcome(child(database, program)) == (0, "end\n", "")
    assert kept(database) == ["so far", "a", "b"]
    assert kept(database, "t") == ["c"]


@pytest.mark.processes
def test_what_was_answered_is_stored_though_the_process_is_killed_right_after(database: Database) -> None:
    program = """
    async def main():
        await memory("s").add([msg("a", "1"), msg("b", "2")], ["x", "y"])
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
    """
    assert outcome(child(database, program)) == (-signal.SIGKILL, "", "")

    async def main() -> None:
        async with stored(database, "ann", "s") as memory:
            assert ids(await memory.get_memory("x")) == ids(await memory.get_memory("y")) == ["1", "2"]

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize("closes", [True, False], ids=["closed by the child", "left open"])
def test_a_forked_child_goes_on_with_its_parents_memory(database: Database, closes: bool) -> None:
    program = """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, for a fork beside threads
    ours = memory("s")
    asyncio.run(ours.add(msg("parent", "1")))
    pid = os.fork()
    if pid == 0:
        asyncio.run(ours.add(msg("child", "2"), "m"))
        assert asyncio.run(ours.size()) == 2
        if sys.argv[2] == "True":
            asyncio.run(ours.close())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    asyncio.run(ours.add(msg("parent again", "3")))
    say(os.waitstatus_to_exitcode(status))
    """
    assert outcome(child(database, program, closes)) == (0, "0\n", "")
    assert kept(database) == ["parent", "child", "parent again"]


def test_a_memory_without_a_file_lives_as_long_as_it_is_open() -> None:
    async def main() -> None:
        memory, other = SQLiteMemory(":memory:"), SQLiteMemory(":memory:")
        await memory.add(msgs("1"), "m")
        assert (ids(await memory.get_memory("m")), await other.size()) == (["1"], 0)
        assert memory.state_dict()["db_path"] == ":memory:"
        await memory.close()
        await memory.open()
        assert await memory.size() == 0
        await memory.close()
        await other.close()

    asyncio.run(main())


def test_the_directory_of_a_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "memory.db"

    async def main() -> None:
        async with SQLiteMemory(path) as memory:
            await memory.add(msgs("1"))

    asyncio.run(main())
    assert path.exists()


def test_what_is_no_database_of_ours_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    text, foreign = tmp_path / "notes.txt", tmp_path / "theirs.db"
    text.write_text("dear diary, " * 100)
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE messages (id TEXT)")
    connection.close()
    before = {path: path.read_bytes() for path in (text, foreign)}

    async def main() -> None:
        for path, what in (
            (tmp_path, "is a directory"),
            (text, "is not a SQLite database"),
            (foreign, "another program's"),
        ):
            memory = SQLiteMemory(path)
            for _ in range(2):
                with pytest.raises(StoreUnusable, match=what) as caught:
                    await memory.add(msgs("1"))
                assert repr(str(path)) in str(caught.value)

    asyncio.run(main())
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "theirs.db"]


def test_a_server_that_is_not_there_is_told_without_the_password() -> None:
    memory = PostgresMemory("postgresql://ann:s3cret@127.0.0.1:1/nothing?connect_timeout=2")
    with pytest.raises(StoreUnreachable) as caught:
        asyncio.run(memory.add(msgs("1")))
    assert "s3cret" not in f"{caught.value} {memory!r} {memory.name}"


# --- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open yet"])
def test_an_add_that_is_cancelled_is_stored_with_its_marks_or_not_at_all(database: Database, is_open: bool) -> None:
    async def main() -> None:
        for rounds in range(8):
            memory = stored(database, "ann", f"s{rounds}")
            if is_open:
                await memory.open()
            adding = asyncio.create_task(memory.add(msgs("1", "2", "3"), ["a", "b"]))
            for _ in range(rounds):
                await asyncio.sleep(0)
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
            found = ids(await memory.get_memory())
            assert found in ([], ["1", "2", "3"])
            assert ids(await memory.get_memory("a")) == ids(await memory.get_memory("b")) == found
            await memory.add(msgs("4"), "a")
            assert ids(await memory.get_memory("a")) == [*found, "4"]
            await memory.close()

    asyncio.run(main())


# --- a memory is a thread ---------------------------------------------------------------------------------------------


def test_what_an_agent_writes_can_be_read_as_a_memory(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, [[TextContent("let me look"), *LOOK], "all is well"], tools=[look]).prompt("how is it?")
        async with stored(database, None, "t") as memory:
            asked, called, result, answer = await memory.get_memory()
            assert (asked.role, asked.name, asked.content) == ("user", "user", "how is it?")
            call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
            assert (called.role, called.content) == ("assistant", [{"type": "text", "text": "let me look"}, call])
            assert called.get_content_blocks("tool_use") == [call]
            expected = {"type": "tool_result", "id": "c1", "name": "look", "output": "seen"}
            assert (result.role, result.content) == ("system", [expected])
            assert (answer.role, answer.content) == ("assistant", "all is well")
            thread = await cp.load("t")
            assert thread is not None
            assert ids([asked, called, result, answer]) == [m.id for m in thread.messages]  # type: ignore[union-attr]
            assert ids(await memory.search("well")) == [answer.id]
            assert await memory.size() == 4

    with_cp(database, use)


def test_what_is_marked_is_not_sent_to_the_model_and_the_summary_stands_for_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        provider = ScriptedProvider([LOOK, "one", "two", "three", "four"])
        agent = agent_on(cp, provider, tools=[look], middleware=[ExcludeMarked("compressed", "hint")])
        await agent.prompt("first")
        await agent.prompt("second")
        async with stored(database, None, "t") as memory:
            said = await memory.get_memory()
            await memory.mark_compressed(ids(said)[:4], "they spoke of the first")
            await memory.update_messages_mark("other", msg_ids=ids(said)[4:5])
            await agent.prompt("third")
            sent = brief(provider.requests[-1].messages)
            assert "they spoke of the first" in sent[0]
            assert sent[1:] == ["user: second", "assistant: two", "user: third"]
            await memory.update_messages_mark("hint", msg_ids=ids(said)[4:])
            await memory.update_compressed_summary("")
            await agent.prompt("fourth")
            assert brief(provider.requests[-1].messages) == ["user: third", "assistant: three", "user: fourth"]
            assert await memory.size() == 10
        provider.assert_done()

    with_cp(database, use)


def test_half_of_a_call_that_is_marked_leaves_a_request_that_a_model_can_answer(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        provider = ScriptedProvider([LOOK, "one", "two", "three"])
        agent = agent_on(cp, provider, tools=[look], middleware=[ExcludeMarked("m")])
        await agent.prompt("first")
        async with stored(database, None, "t") as memory:
            _, called, result, _ = ids(await memory.get_memory())
            for name in (called, result):
                await memory.update_messages_mark(None, "m")
                await memory.update_messages_mark("m", msg_ids=[name])
                await agent.prompt("go on")
                assert flaws(provider.requests[-1].messages) == []
                assert "user: first" in brief(provider.requests[-1].messages)

    with_cp(database, use)


def test_while_an_agent_runs_its_thread_can_be_marked_but_not_changed(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        provider = ScriptedProvider(["one", CALL_SLOW, "done"])
        agent = agent_on(cp, provider, tools=[slow.tool], middleware=[ExcludeMarked("compressed")])
        await agent.prompt("first")
        running = asyncio.create_task(agent.prompt("second"))
        await slow.begun.wait()
        async with stored(database, None, "t") as memory, stored(database, None, "t", wait=60) as patient:
            said = ids(await memory.get_memory())
            await memory.update_messages_mark("m")
            calls: list[Callable[[], Any]] = [
                lambda: memory.add(msgs("1")),
                lambda: memory.delete(said[:1]),
                lambda: memory.delete_by_mark("m"),
                memory.clear,
            ]
            for call in calls:
                with pytest.raises(ThreadBusy):
                    await call()
            assert ids(await memory.get_memory("m")) == said
            assert await memory.delete(["no such"]) == await memory.delete_by_mark("no such") == 0
            waiting = asyncio.create_task(patient.add(msgs("later"), "m"))
            assert await memory.mark_compressed(said[:2], "so far") == 2
            assert await memory.update_messages_mark("n", "m") == len(said)
            slow.let_go.set()
            assert (await running).text == "done"
            await waiting
            assert texts(await memory.get_memory("m", prepend_summary=False)) == ["text of later"]
            assert ids(await memory.get_memory())[-1] == "later"
        sent = brief(provider.requests[-1].messages)
        assert "so far" in sent[0]
        assert sent[1] == "user: second"
        assert flaws(provider.requests[-1].messages) == []

    with_cp(database, use)


def test_an_agent_continues_what_a_memory_holds(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async with stored(database, None, "t") as memory:
            await memory.add(TOLD)
            provider = ScriptedProvider(["and still is"])
            assert (await agent_on(cp, provider).prompt("still?")).text == "and still is"
            sent = provider.requests[0].messages
            assert flaws(sent) == []
            calls = next(m for m in sent if isinstance(m, AssistantMessage))
            assert calls.tool_calls == [ToolCall("c1", "look", {"at": [1]}), ToolCall("c2", "look", {})]
            results = [(m.tool_call_id, m.text) for m in sent if isinstance(m, ToolResultMessage)]
            assert results == [("c1", "seen one"), ("c2", "seen two")]
            spoken = [line for line in brief(sent) if line.startswith(("user", "assistant"))]
            assert spoken == ["user: how is it?", "assistant: let me look", "assistant: all is well", "user: still?"]
            found = await memory.get_memory()
            assert [message.to_dict() for message in found[: len(TOLD)]] == [message.to_dict() for message in TOLD]
            assert texts(found)[-2:] == ["still?", "and still is"]
            assert await memory.delete(ids(found)[-2:]) == 2  # what the agent has said is known by its ids, too
            await memory.add(found)
            assert texts(await memory.get_memory())[-2:] == ["still?", "and still is"]

    with_cp(database, use)


def test_a_fork_takes_marks_and_summary_along_and_goes_its_own_way(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async with stored(database, None, "t") as memory, stored(database, None, "f") as fork:
            await memory.add(msgs("1", "2", "3"), "m")
            await memory.update_compressed_summary("so far")
            await cp.fork("t", 2, new_id="f")
            assert texts(await fork.get_memory("m")) == ["so far", "text of 1", "text of 2"]
            assert await fork.delete(["1"]) == 1
            assert await memory.update_messages_mark("n", "m", ["2"]) == 1
            await fork.add(msgs("3", "4"))
            await fork.update_compressed_summary("another")
            assert texts(await fork.get_memory("m")) == ["another", "text of 2"]
            assert ids(await fork.get_memory(prepend_summary=False)) == ["2", "3", "4"]
            assert ids(await memory.get_memory("m", prepend_summary=False)) == ["1", "3"]
            await memory.clear()
            assert ids(await fork.get_memory(prepend_summary=False)) == ["2", "3", "4"]

    with_cp(database, use)


def test_an_application_and_a_memory_without_a_user_see_the_same_session(database: Database) -> None:
    async def use(storage: AgentStorage) -> None:
        async with stored(database, None, "t") as memory, stored(database, "ann", "t") as other:
            await memory.add(msg("of the memory", "1"))
            await other.add(msg("of ann's memory", "2"))
            name = storage.save_message("t", "assistant", "of the application")
            found = storage.get_conversation_history("t")
            assert found is not None
            assert [(row["id"], row["role"], row["content"]) for row in found] == [
                ("1", "user", "of the memory"),
                (name, "assistant", "of the application"),
            ]
            assert [(m.id, m.role, m.content) for m in await memory.get_memory()] == [
                ("1", "user", "of the memory"),
                (name, "assistant", "of the application"),
            ]
            assert await memory.update_messages_mark("m", msg_ids=[name]) == 1
            assert await memory.delete_by_mark("m") == 1
            assert storage.get_message("t", name) is None
            assert texts(await other.get_memory()) == ["of ann's memory"]

    with AgentStorage(database.place) as storage:
        storage.create_session(None, session_id="t")
        asyncio.run(use(storage))


# --- searching --------------------------------------------------------------------------------------------------------


def found(memory: Driven, query: str, limit: int = 10) -> list[str]:
    return ids(memory.search(query, limit))


def test_words_of_any_script_are_found_and_signs_stand_for_themselves(memory: Driven) -> None:
    said = {
        "zh": "北京的天气怎么样",
        "zh2": "上海的天气",
        "pct": "we are at 100% now",
        "no pct": "we are at 1000 now",
        "under": "call get_weather soon",
        "no under": "call getXweather soon",
        "quote": 'he said "let it be" and left',
        "apostrophe": "it's O'Brien",
        "back": "C:\\new\\table",
        "lines": "first line\nsecond line",
    }
    memory.add([msg(text, name) for name, text in said.items()])
    expected = {
        "天气": ["zh2", "zh"],
        "北京": ["zh"],
        "天 怎么样": ["zh"],
        "京天": [],
        "100%": ["pct"],
        "get_weather": ["under"],
        '"let it be"': ["quote"],
        '"it let be"': [],
        "O'Brien": ["apostrophe"],
        "new\\table": ["back"],
        "SECOND first": ["lines"],
        "getxweather": ["no under"],
        "no such word": [],
    }
    assert {query: found(memory, query) for query in expected} == expected


@pytest.mark.parametrize("query", ["", " ", "%", "_", "'", '"', "-x", 5, None])
def test_a_search_for_nothing_is_refused(memory: Driven, query: Any) -> None:
    with pytest.raises(InputError):
        memory.search(query)


def test_the_newest_come_first_and_no_more_than_were_asked_for(memory: Driven) -> None:
    memory.add([msg("same word", f"{n}", timestamp=f"{3000 - n}") for n in range(15)])
    assert found(memory, "word") == [f"{n}" for n in range(14, 4, -1)]
    assert found(memory, "word", 2) == ["14", "13"]
    assert found(memory, "word", 100) == [f"{n}" for n in range(14, -1, -1)]
    assert found(memory, "word", 0) == []
    for bad in (-1, True, "3", 1.0, None, 10_001):
        with pytest.raises(InputError):
            memory.search("word", bad)


def test_what_is_gone_is_not_found(memory: Driven) -> None:
    memory.add(msgs("1", "2", "3"), "m")
    assert found(memory, "text") == ["3", "2", "1"]
    memory.delete(["2"])
    assert found(memory, "text") == ["3", "1"]
    memory.update_messages_mark(None, "m", ["1"])
    memory.delete_by_mark("m")
    assert found(memory, "text") == ["1"]
    memory.load_state_dict({"content": [msg("another text", "4").to_dict()]})
    assert found(memory, "text") == ["4"]
    memory.clear()
    assert found(memory, "text") == []


def test_only_what_was_said_is_searched(memory: Driven) -> None:
    memory.add(
        [
            msg([{"type": "text", "text": "hello"}], "1", metadata={"secret": "hidden"}, timestamp="monday"),
            msg([{"type": "text", "text": "hello again"}], "2", role="assistant", invocation_id="run"),
            msg([{"type": "tool_result", "id": "call", "name": "x", "output": "hello too"}], "3", role="system"),
            msg("hello there", "4", role="system"),
        ]
    )
    assert found(memory, "hello") == ["4", "3", "2", "1"]
    names = ("type", "text", "content", "role", "user", "system", "assistant", "metadata", "secret", "hidden")
    for word in (*names, "timestamp", "monday", "ann", "run", "call", "tool_result"):
        assert found(memory, word) == [], word


def test_a_search_gives_whole_messages(memory: Driven) -> None:
    said = msg([{"type": "text", "text": "hello"}], "1", metadata={"k": 1}, timestamp="then", invocation_id="i")
    memory.add(said)
    memory.update_compressed_summary("hello so far")
    assert [message.to_dict() for message in memory.search("hello")] == [said.to_dict()]


def test_a_message_of_an_agent_is_found_and_one_of_another_thread_is_not(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("a needle", id="1")])
        await cp.append("u", [UserMessage("a needle", id="2")])
        async with stored(database, None, "t") as memory, stored(database, "ann", "t") as other:
            await other.add(msg("a needle", "3"))
            assert ids(await memory.search("needle")) == ["1"]
            assert ids(await other.search("needle")) == ["3"]

    with_cp(database, use)
