"""Erasure: what was erased is nowhere any more, and nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from byssus import AssistantMessage, Usage, UserMessage
from byssus.checkpointer import (
    Checkpoint,
    Checkpointer,
    CheckpointMetadata,
    SQLiteCheckpointer,
    Thread,
    checkpointer_for,
    keep_last,
)
from byssus.errors import InputError
from byssus.messages import dumps
from byssus.queries.log import memories
from byssus.queries.log.threads import MessageRow
from byssus.queries.moving.tables import TABLES
from byssus.queries.versions import deleting
from byssus.store.database import Store, Tx
from byssus.values.thread_key import ThreadKey
from tests.support import forked
from tests.support.accounts import known
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import texts, with_cp, with_users
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, Slow, agent_on, die, expire
from tests.support.marks import mark, marked, summarize


def needle() -> str:
    return f"needle-{secrets.token_hex(12)}"


def traces(directory: Path, word: str) -> dict[str, int]:
    """The files of a database in which a word is found, and how often."""
    found = {file.name: file.read_bytes().count(word.encode()) for file in directory.iterdir() if file.is_file()}
    return {name: count for name, count in found.items() if count}


def rows_with(store: Store, word: str) -> dict[str, int]:
    """The tables in which a word is found, and in how many rows."""

    def query(tx: Tx) -> dict[str, int]:
        names = [*(table.name for table in TABLES), "reservations"]
        return {name: sum(word in repr(row) for row in tx.all(f"SELECT * FROM {name}")) for name in names}

    return {name: count for name, count in store.read_now(query).items() if count}


async def fill(cp: Checkpointer, word: str, thread_id: str = "t") -> None:
    """A thread with the word in all that a thread can hold; some of it changed and deleted before."""
    asking = Deleting()
    agent = agent_on(cp, [f"reply {word}", [delete(word, f"call-{word}")]], thread_id, tools=[asking.tool])
    agent.state.extra[word] = word
    await agent.prompt(f"{word} {'x' * 5_000}")
    await agent.checkpoint(tags=[word], summary=word, state={word: word})
    await agent.prompt(f"delete {word}")  # asks a person
    for number in range(40):
        await cp.append(thread_id, {"role": "user", "content": f"{number} {word} {'y' * number * 100}"})
        await cp.save_extra(thread_id, {"n": number, "word": word * number})
    await mark(cp, thread_id, [1, 2], word, f"mark {word}")
    await summarize(cp, thread_id, f"what was said: {word}")
    await cp.put(Checkpoint(CheckpointMetadata(thread_id, f"put-{word}", step=9, parent_checkpoint_id=word), [word]))
    await cp.rewind(thread_id, to=1)
    await cp.steer(thread_id, f"steer {word}")
    await cp.delete_before(thread_id, 1)
    await mark(cp, thread_id, [1], f"later {word}")
    await summarize(cp, thread_id, f"said later: {word}")
    await fill_session(cp, word, thread_id)
    task = await cp.create_task(thread_id, word, {word: word})
    await cp.store.write(add_steps_and_schedule, word, "", task["id"], thread_id)


async def fill_session(cp: Checkpointer, word: str, thread_id: str) -> None:
    """What an application keeps in a session: each with the word, and some of it changed."""
    for text in (f"old {word}", word):
        await cp.update_session(thread_id, title=text, metadata={text: [text]}, model=text)
    usage = Usage(input=3, output=4)
    await cp.append(thread_id, AssistantMessage(word, model=word, usage=usage))
    for number in range(3):
        task = await cp.create_task(thread_id, word, {word: word})
        await cp.update_task_status(task["id"], "failed", f"old {word}")
        await cp.update_task_status(task["id"], "completed", [word])
        call = await cp.log_tool_call(thread_id, word, {word: number}, [word], 7.0, False, word, word)
        await cp.update_tool_call(call, output_data={word: word})


async def fill_user(cp: Checkpointer, word: str) -> str:
    """A user of whom each column holds the word, with threads, some of them deleted."""
    user = f"user-{word}"
    preferences = {word: {"nested": word, "long": word * 50}}
    await cp.create_user(word, f"{word}@example.org", user_id=user, preferences={"old": word})
    await cp.update_user(user, name=f"{word} {word}", preferences=preferences)
    await cp.create_session(user, word, session_id=f"session-{word}", metadata={word: word})
    await fill_session(cp, word, f"session-{word}")
    await cp.create_session(user, word, session_id=f"deleted-{word}")
    await fill_session(cp, word, f"deleted-{word}")
    await cp.delete_thread(f"deleted-{word}")
    await fill_memory(cp, word, user)
    task = await cp.create_task(None, word, {word: word}, user_id=user, unique_key=word)
    await cp.store.write(add_steps_and_schedule, word, user, task["id"])
    slow = Slow()
    agent = agent_on(cp, [CALL_SLOW], f"run-{word}", tools=[slow.tool], user_id=user)
    run = asyncio.create_task(agent.prompt(word))
    await slow.begun.wait()  # a run that dies leaves the tokens that it had set aside
    await cp.store.write(set_aside, user)
    await die(cp, agent, run)
    return user


async def fill_memory(cp: Checkpointer, word: str, user: str) -> None:
    """A memory of a user, all of it with the word, some of it deleted and marked anew."""
    messages = [MessageRow(f"{n}-{word}", "user", dumps({"content": word}), 1) for n in range(9)]
    await cp.store.write(memories.add, ThreadKey(user, f"memory-{word}"), messages, [word, f"mark {word}"])
    await cp.store.write(memories.delete, ThreadKey(user, f"memory-{word}"), {f"3-{word}"})
    for old, new in ((word, f"new {word}"), (f"mark {word}", None)):
        await cp.store.write(memories.update_marks, ThreadKey(user, f"memory-{word}"), new, old, None)
    for text in (f"old {word}", word):
        await cp.store.write(memories.summarize, ThreadKey(user, f"memory-{word}"), dumps(text))


def add_steps_and_schedule(tx: Tx, word: str, user: str, task: str, thread: str | None = None) -> None:
    tx.run(
        "INSERT INTO task_steps (task, name, kind, status, attempts, result, started_at)"
        " SELECT key, :word, 'call', 'done', 1, :result, :now FROM tasks WHERE id = :task",
        word=word,
        result=dumps(word),
        task=task,
        now=tx.now(),
    )
    tx.run(
        "INSERT INTO schedules (id, thread, owner, type, payload, priority, max_retries, zone, missed, status,"
        " created_at, updated_at) VALUES (:id, (SELECT key FROM threads WHERE id = :thread), :user, :word, :payload,"
        " 0, 0, 'UTC', 'one', 'active', :now, :now)",
        id=f"{thread} {word}",
        thread=thread or "",
        word=word,
        user=user,
        payload=dumps(word),
        now=tx.now(),
    )


def set_aside(tx: Tx, user: str) -> None:
    tx.run(
        "INSERT INTO reservations (thread, owner, tokens, epoch) SELECT key, owner, 5, lease_epoch FROM threads"
        " WHERE owner = :user AND run IS NOT NULL ON CONFLICT (thread) DO NOTHING",
        user=user,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "database"
    made.mkdir()
    return made


def test_no_row_of_any_table_holds_anything_of_an_erased_thread(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await cp.append("other", [UserMessage(f"kept {number}") for number in range(50)])
        await fill(cp, word, f"thread-{word}")
        held = {"threads", "messages", "checkpoints", "tool_calls", "inbox", "tasks", "usage", "tool_usage"}
        held |= {"marks", "branches", "task_steps", "schedules"}
        assert held <= rows_with(cp.store, word).keys()
        erased = await cp.erase_thread(f"thread-{word}")
        assert erased.threads == 1
        assert erased.messages > 40
        assert erased.checkpoints >= 3
        assert erased.is_gone
        assert rows_with(cp.store, word) == {}
        assert await cp.load(f"thread-{word}") is None
        assert await texts(cp, "other") == [f"kept {number}" for number in range(50)]

    with_cp(database, use)


def test_no_byte_of_an_erased_thread_is_left_in_the_files(directory: Path) -> None:
    word = needle()

    async def main() -> None:
        async with SQLiteCheckpointer(directory / "x.db") as cp:
            await cp.append("other", UserMessage("kept"))
            await fill(cp, word)
            assert traces(directory, word)
            erased = await cp.erase_thread("t")
            assert erased.is_gone
            assert "Backups" in erased.note
            assert traces(directory, word) == {}
        assert traces(directory, word) == {}
        async with SQLiteCheckpointer(directory / "x.db") as cp:
            assert await texts(cp, "other") == ["kept"]

    asyncio.run(main())


def test_what_was_only_deleted_before_goes_with_the_next_erasure(directory: Path) -> None:
    """Deleting leaves bytes in free pages; they are not there any more after an erasure."""
    word = needle()

    async def main() -> None:
        async with SQLiteCheckpointer(directory / "x.db") as cp:
            await fill(cp, word)
            await cp.delete_thread("t")
            assert traces(directory, word)
            await cp.append("other", UserMessage("to be erased"))
            await cp.erase_thread("other")
            assert traces(directory, word) == {}

    asyncio.run(main())


READ = """
    import apsw, sys
    connection = apsw.Connection(sys.argv[1])
    connection.execute("BEGIN")
    connection.execute("SELECT COUNT(*) FROM messages").fetchall()
    print("reading", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Somebody who looks at the database as it is now: a process of its own, because a scan drops its own locks."""
    command = [sys.executable, "-c", textwrap.dedent(READ), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        yield
        process.stdin.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.05)


@pytest.mark.processes
def test_what_a_reader_still_keeps_is_told_and_gone_after_it_ends(directory: Path) -> None:
    word = needle()

    async def main() -> None:
        async with SQLiteCheckpointer(directory / "x.db") as cp:
            await fill(cp, word)
            with reading(directory / "x.db"):
                erased = await cp.erase_thread("t")
                assert not erased.is_gone
                assert "A reader of an older state" in erased.note
                assert traces(directory, word)
                assert await cp.load("t") is None
            await until(lambda: not traces(directory, word))

    asyncio.run(main())


@pytest.mark.processes
def test_the_next_one_to_open_the_database_finishes_what_a_reader_has_kept(directory: Path) -> None:
    word = needle()

    async def main() -> None:
        async with reading_of_another_process(directory / "x.db", word):
            pass
        async with SQLiteCheckpointer(directory / "x.db"):
            await until(lambda: not traces(directory, word))

    asyncio.run(main())


@contextlib.asynccontextmanager
async def reading_of_another_process(path: Path, word: str) -> AsyncIterator[None]:
    """An erasure, and a process that ends while somebody reads what was there before."""
    async with SQLiteCheckpointer(path) as cp:
        await fill(cp, word)
    with reading(path):
        async with SQLiteCheckpointer(path) as cp:
            assert not (await cp.erase_thread("t")).is_gone
        # Not by this process: its store still tries to finish the erasure, and would lose its locks with the scan.
        found = subprocess.run(["grep", "-rqF", word, str(path.parent)], check=False)
        assert found.returncode == 0
        yield


# --- forks ------------------------------------------------------------------------------------------------------------


async def family(cp: Checkpointer, word: str) -> None:
    """A thread whose first message is shared with two forks, of which one has a fork itself."""
    await cp.append("t", [UserMessage(f"shared {word}"), UserMessage(f"unshared {word}")])
    await cp.fork("t", at=1, new_id="fork")
    await cp.append("fork", UserMessage(f"own {word}"))
    await cp.fork("fork", new_id="grandchild")
    await cp.append("grandchild", UserMessage(f"deep {word}"))


def test_whoever_erases_a_thread_with_forks_must_say_what_becomes_of_them(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await family(cp, "word")
        with pytest.raises(InputError, match=r"with 2 fork.*'fork', 'grandchild'.*forks='keep'.*'erase'"):
            await cp.erase_thread("t")
        with pytest.raises(InputError, match="forks must be 'keep' or 'erase', got 'both'"):
            await cp.erase_thread("t", forks="both")  # type: ignore[arg-type]
        assert await texts(cp, "t") == ["shared word", "unshared word"]

    with_cp(database, use)


def test_forks_that_are_kept_have_the_past_that_they_share_and_nothing_more(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await family(cp, word)
        erased = await cp.erase_thread("t", forks="keep")
        assert (erased.threads, erased.kept) == (1, ["fork", "grandchild"])
        assert "2 fork(s) keep" in erased.note
        assert await texts(cp, "fork") == [f"shared {word}", f"own {word}"]
        assert await texts(cp, "grandchild") == [f"shared {word}", f"own {word}", f"deep {word}"]
        assert rows_with(cp.store, f"unshared {word}") == {}
        await cp.erase_thread("fork", forks="keep")
        assert await texts(cp, "grandchild") == [f"shared {word}", f"own {word}", f"deep {word}"]
        await cp.erase_thread("grandchild")
        assert rows_with(cp.store, word) == {}

    with_cp(database, use)


def test_forks_that_are_kept_have_marks_and_a_summary_of_their_own(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await cp.put(Checkpoint(CheckpointMetadata("t", "c", step=1), [UserMessage("1"), UserMessage("2")]))
        await mark(cp, "t", [1, 2], "shared")
        await summarize(cp, "t", "shared")
        await cp.append("t", UserMessage("3"))
        await cp.fork("t", new_id="fork")
        await mark(cp, "fork", [2], "of the fork")
        await mark(cp, "t", [1, 3], word)
        await summarize(cp, "t", word)
        await cp.rewind("t", 2)
        await mark(cp, "t", [2], word)
        await cp.erase_thread("t", forks="keep")
        assert rows_with(cp.store, word) == {}
        assert await marked(cp, "fork") == ('"shared"', {1: ["shared"], 2: ["shared", "of the fork"]})
        assert await texts(cp, "fork") == ["1", "2", "3"]
        await cp.rewind("fork", "c")
        assert await texts(cp, "fork") == ["1", "2"]
        assert await marked(cp, "fork") == ('"shared"', {1: ["shared"], 2: ["shared", "of the fork"]})
        await cp.erase_thread("fork")
        assert rows_with(cp.store, "shared") == {}

    with_cp(database, use)


def test_forks_that_are_erased_too_are_gone_with_theirs(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await family(cp, word)
        assert (await cp.erase_thread("t", forks="erase")).threads == 3
        assert rows_with(cp.store, word) == {}
        assert await cp.threads() == []

    with_cp(database, use)


def test_erasing_a_fork_leaves_the_thread_that_it_was_forked_from(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await family(cp, "word")
        await cp.erase_thread("fork", forks="erase")
        assert await texts(cp, "t") == ["shared word", "unshared word"]
        assert [info.id for info in await cp.threads()] == ["t"]

    with_cp(database, use)


# --- users ------------------------------------------------------------------------------------------------------------


def test_no_row_of_any_table_holds_anything_of_an_erased_user(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await with_users(cp, "somebody")
        await agent_on(cp, ["kept"], "c", user_id="somebody").prompt("hi")
        user = await fill_user(cp, word)
        held = {"users", "preferences", "threads", "tasks", "tool_calls", "usage", "tool_usage", "reservations"}
        held |= {"marks", "branches"}
        assert held <= rows_with(cp.store, word).keys()
        await expire(cp)
        erased = await cp.erase_user(user)
        assert (erased.threads, erased.is_gone) == (3, True)
        assert rows_with(cp.store, word) == {}
        assert await cp.get_user(user) is None
        assert [each["id"] for each in await cp.list_users()] == ["somebody"]
        assert await texts(cp, "c") == ["hi", "kept"]
        assert known(await cp.get_usage_stats("somebody"))["total_messages"] == 2

    with_cp(database, use)


def test_no_byte_of_an_erased_user_is_left_in_the_files(directory: Path) -> None:
    word, other = needle(), needle()

    async def main() -> None:
        async with SQLiteCheckpointer(directory / "x.db") as cp:
            user = await fill_user(cp, word)
            await expire(cp)
            assert traces(directory, word)
            assert (await cp.erase_user(user)).is_gone
            assert traces(directory, word) == {}
            await cp.create_user(other, user_id="no threads", preferences={other: other})
            assert traces(directory, other)
            erased = await cp.erase_user("no threads")
            assert (erased.threads, erased.is_gone) == (0, True)
            assert "Backups" in erased.note
            assert traces(directory, other) == {}

    asyncio.run(main())


def test_a_deleted_thread_leaves_its_owner_what_was_spent_and_nothing_of_what_was_said(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await with_users(cp, "ann")
        await fill(cp, word)
        await cp.set_user("t", "ann")
        before = await cp.get_usage_stats("ann")
        assert before is not None
        await cp.fork("t", new_id="fork")
        await cp.delete_thread("t")
        assert await cp.list_tasks() == []
        assert await cp.list_tool_calls() == []
        await cp.delete_thread("fork")
        assert set(rows_with(cp.store, word)) == {"usage", "tool_usage"}  # models and tools, by their names
        after = await cp.get_usage_stats("ann")
        assert after is not None
        for name in ("total_tokens", "total_messages", "total_cost"):
            assert after[name] == before[name]

    with_cp(database, use)


def test_a_thread_with_thousands_of_tasks_and_logged_calls_goes_piece_by_piece(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting, "CHUNK", 3)

    async def use(cp: Checkpointer) -> None:
        await cp.create_session(None, session_id="t")
        for number in range(8):
            await cp.create_task("t", "type", number)
            await cp.log_tool_call("t", "look", {}, {}, 1.0)
        assert await cp.delete_thread("t") == 0
        assert [await cp.list_tasks(), await cp.list_tool_calls(), await cp.threads()] == [[], [], []]

    with_cp(database, use)


def test_what_was_logged_survives_a_prune_of_the_branch_that_it_was_logged_on(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("one"), UserMessage("two")])
        await cp.log_tool_call("t", "look", {}, {}, 1.0)
        await cp.rewind("t", to=1)
        await cp.log_tool_call("t", "look", {}, {}, 2.0)
        await cp.put(Checkpoint(CheckpointMetadata("t", "c", 9), (await cp.load("t") or Thread([], {})).messages))
        await cp.prune("t", keep_last(1))
        assert [call["elapsed_ms"] for call in await cp.list_tool_calls("t") or ()] == [2.0, 1.0]
        await cp.delete_thread("t")
        assert await cp.list_tool_calls() == []

    with_cp(database, use)


def test_all_threads_of_a_user_go_and_no_others(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        word = needle()
        await with_users(cp, f"user-{word}", "somebody")
        for name in ("a", "b"):
            await agent_on(cp, [word], name, user_id=f"user-{word}").prompt(word)
        await agent_on(cp, ["kept"], "c", user_id="somebody").prompt("hi")
        await agent_on(cp, ["kept"], "d").prompt("hi")
        erased = await cp.erase_user(f"user-{word}")
        assert erased.threads == 2
        assert rows_with(cp.store, word) == {}
        assert {info.id for info in await cp.threads()} == {"c", "d"}

    with_cp(database, use)


def test_forks_that_others_own_are_theirs_to_keep_and_the_own_ones_go_anyway(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        await agent_on(cp, ["reply"], "t", user_id="ann").prompt("hi")
        await cp.fork("t", new_id="mine")
        await cp.fork("t", new_id="theirs", user_id="bob")
        with pytest.raises(InputError, match=r"user 'ann' shares its past with 1 fork.*'theirs' of 'bob'"):
            await cp.erase_user("ann")
        assert await cp.get_user("ann") is not None
        erased = await cp.erase_user("ann", forks="keep")
        assert await cp.get_user("ann") is None
        assert (erased.threads, erased.kept) == (2, ["theirs"])
        assert [info.id for info in await cp.threads()] == ["theirs"]
        assert await texts(cp, "theirs") == ["hi", "reply"]
        assert (await cp.erase_user("bob")).threads == 1
        assert await cp.threads() == []

    with_cp(database, use)


def test_erasing_what_is_not_there_answers_so(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for erased in (await cp.erase_thread("nobody"), await cp.erase_user("nobody")):
            assert (erased.threads, erased.checkpoints, erased.messages, erased.is_gone) == (0, 0, 0, True)
        with pytest.raises(InputError, match="a user id must be"):
            await cp.erase_user("")

    with_cp(database, use)


def test_on_postgres_the_answer_says_what_vacuum_and_backups_still_hold(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hi"))
        note = (await cp.erase_thread("t")).note
        assert "ackups" in note
        assert ("VACUUM" in note) == (database.system == "postgresql")

    with_cp(database, use)


# --- interrupted ------------------------------------------------------------------------------------------------------

ERASE_AND_DIE = """
    import asyncio, os, signal, sys
    from byssus.checkpointer import checkpointer_for
    from byssus.queries.versions import deleting

    deleting.CHUNK = 7

    async def main(place, word, boundary):
        left = int(boundary)
        def die(_):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        async with checkpointer_for(place) as cp:
            cp.store.boundary = die
            await cp.erase_thread("t", forks="keep")

    asyncio.run(main(*sys.argv[1:]))
"""


def erase_and_die(place: str, word: str, boundary: int) -> bool:
    """Erase in a process that is killed at a boundary; False if it came to its end before that."""
    done = forked.run(["-c", textwrap.dedent(ERASE_AND_DIE), place, word, str(boundary)])
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


async def after(place: str, look: Callable[[Checkpointer], Awaitable[None]]) -> None:
    async with checkpointer_for(place) as cp:
        await look(cp)


@pytest.mark.processes
def test_an_erasure_that_was_killed_anywhere_is_finished_by_the_next_one(database: Database) -> None:
    """Until the first commit nothing has happened; after it, the thread does not exist, and its fork is whole."""
    word, boundary, was_killed = needle(), 1, True

    async def prepare(cp: Checkpointer) -> None:
        await cp.append("other", UserMessage("to be erased next"))
        if await cp.load("t") is None:
            await fill(cp, word)
            await cp.fork("t", at=1, new_id="fork")

    async def look(cp: Checkpointer) -> None:
        if await cp.load("t") is None:
            assert len(await texts(cp, "fork")) == 1
            await cp.erase_thread("fork")
            await cp.erase_thread("other")
            assert rows_with(cp.store, word) == {}

    while was_killed:
        asyncio.run(after(database.place, prepare))
        was_killed = erase_and_die(database.place, word, boundary)
        asyncio.run(after(database.place, look))
        boundary += 3
    assert boundary > 20


OPEN_AND_CLOSE = """
    import asyncio, sys
    from byssus.checkpointer import checkpointer_for

    async def main(place):
        async with checkpointer_for(place):
            pass

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.processes
def test_a_process_that_lives_for_a_moment_leaves_no_byte_of_an_erasure_that_was_killed(directory: Path) -> None:
    for boundary in (2, 8, 14):
        word, place = needle(), directory / f"x{boundary}.db"
        asyncio.run(after(str(place), lambda cp, word=word: fill(cp, word)))  # type: ignore[misc]
        assert erase_and_die(str(place), word, boundary)
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(OPEN_AND_CLOSE), str(place)]
        subprocess.run(command, check=True, timeout=60)
        assert traces(directory, word) == {}


@pytest.mark.processes
def test_a_process_does_not_stay_for_somebody_who_still_reads(directory: Path) -> None:
    word, place = needle(), directory / "x.db"

    async def main() -> None:
        async with reading_of_another_process(place, word):
            command = [sys.executable, "-W", "error", "-c", textwrap.dedent(OPEN_AND_CLOSE), str(place)]
            subprocess.run(command, check=True, timeout=60)
            assert traces(directory, word)

    asyncio.run(main())
