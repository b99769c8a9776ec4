"""Ids: one limit for all of them, the same on every database, and checked before anything is written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, Model, UserMessage
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, SQLiteCheckpointer
from byssus.errors import InputError
from byssus.maintenance.copy import copy
from byssus.memory import Msg, SQLiteMemory
from byssus.providers.scripted import ScriptedProvider
from byssus.store.database import Tx
from byssus.values.inputs import column_id, is_long_id
from byssus.values.thread_key import LONGEST_ID, ThreadKey
from tests.support.approvals import Deleting, delete, results
from tests.support.checkpointers import with_cp
from tests.support.databases import Database, PostgresSchema

# Of four bytes each and in no order: nothing that a database could compress.
_NOISE = random.Random(25)
LONGEST = "".join(chr(_NOISE.randrange(0x20000, 0x2A000)) for _ in range(LONGEST_ID // 4))
TOO_LONG = f"{LONGEST}!"
VERY_LONG = "".join(chr(_NOISE.randrange(0x20000, 0x2A000)) for _ in range(5_000))
TOLD = r"can have 1,000 bytes of UTF-8 at most, got 1,001"

Making = Callable[[Checkpointer, str], Awaitable[Any]]


def checkpoint(thread_id: str, checkpoint_id: str = "c", parent: str | None = None) -> Checkpoint:
    return Checkpoint(CheckpointMetadata(thread_id, checkpoint_id, 1, parent), [UserMessage("hi")])


async def imported(cp: Checkpointer, name: str) -> None:
    lines = [line async for line in cp.export_thread("there")]
    await cp.import_from(lines, as_id=name)


async def prompted(cp: Checkpointer, name: str) -> None:
    provider = ScriptedProvider(["hello"])
    await Agent(provider=provider, model=Model("m"), checkpointer=cp, thread_id=name).prompt("hi")


MAKING: dict[str, Making] = {
    "append": lambda cp, name: cp.append(name, UserMessage("hi")),
    "append in a namespace": lambda cp, name: cp.append(ThreadKey(name, name), UserMessage("hi")),
    "save_extra": lambda cp, name: cp.save_extra(name, {"a": 1}),
    "put": lambda cp, name: cp.put(checkpoint(name, name)),
    "put a checkpoint": lambda cp, name: cp.put(checkpoint("there", name)),
    "put a parent": lambda cp, name: cp.put(checkpoint("there", "c", name)),
    "fork": lambda cp, name: cp.fork("there", new_id=name),
    "create_user": lambda cp, name: cp.create_user("Ann", "a@b", user_id=name),
    "create_session": lambda cp, name: cp.create_session(None, session_id=name),
    "import": imported,
    "prompt": prompted,
}


@pytest.mark.parametrize("making", MAKING)
def test_an_id_of_the_longest_kind_is_taken_and_one_byte_more_is_refused_before_anything_is_written(
    database: Database, making: str
) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("there", UserMessage("hi"))
        before = await cp.store.read(contents)
        with pytest.raises(InputError, match=TOLD) as caught:
            await MAKING[making](cp, TOO_LONG)
        assert len(str(caught.value)) < 400
        assert await cp.store.read(contents) == before
        await MAKING[making](cp, LONGEST)
        assert await cp.store.read(contents) != before

    with_cp(database, use)


def contents(tx: Tx) -> list[Any]:
    tables = ("threads", "messages", "checkpoints", "users", "inbox", "branches")
    return [tx.one(f"SELECT COUNT(*), MAX(key) FROM {table}") for table in tables] + tx.all("SELECT extra FROM threads")


def test_a_steered_message_for_a_thread_with_too_long_an_id_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match=TOLD):
            cp.steer(TOO_LONG, "hi")
        await cp.steer(LONGEST, "hi")

    with_cp(database, use)


def test_a_user_and_a_session_with_the_longest_ids_fit_into_every_index(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_user("Ann", "a@b", user_id=LONGEST)
        await cp.create_session(LONGEST, session_id=LONGEST[::-1])
        model = "".join(chr(_NOISE.randrange(0x20000, 0x2A000)) for _ in range(300))
        await cp.append(LONGEST[::-1], AssistantMessage("hello", model=model))
        await cp.log_tool_call(LONGEST[::-1], model, {}, {}, 1.0)
        found = await cp.list_user_sessions(LONGEST)
        assert found is not None
        assert [session["id"] for session in found] == [LONGEST[::-1]]
        await cp.delete_thread(LONGEST[::-1])  # its usage passes to its owner

    with_cp(database, use)


def test_what_a_model_or_a_service_has_named_too_long_is_kept_under_a_shorter_id(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        provider = ScriptedProvider([[delete("a", VERY_LONG), delete("b", f"{VERY_LONG}!")], "done"])
        agent = Agent(provider=provider, model=Model("m"), tools=[deleting.tool], checkpointer=cp, thread_id="t")
        assert (await agent.prompt("go")).stop_reason == "waiting"
        one, other = await cp.pending("t")
        assert one.call_id != other.call_id
        await cp.answer("t", VERY_LONG, "approve")  # by the id that the model gave, or by the one that is kept
        await cp.answer("t", other.call_id, "approve")
        await agent.resume()
        assert deleting.deleted == ["a", "b"]
        assert [result.tool_call_id for result in await results(cp)] == [VERY_LONG, f"{VERY_LONG}!"]
        message = UserMessage("named by its service", id=VERY_LONG)
        await cp.append("t", message)
        receipt = await cp.steer("t", UserMessage("later", id=f"{VERY_LONG}?"))
        assert await cp.withdraw("t", receipt)
        loaded = await cp.load("t")
        assert loaded is not None
        assert loaded.messages[-1] == message

    with_cp(database, use)


def test_a_shortened_id_stays_the_same_and_another_one_stays_another() -> None:
    short = column_id(VERY_LONG)
    assert column_id(short) == short
    assert not is_long_id(short)
    assert column_id(f"{VERY_LONG}!") != short
    assert column_id("a\ud800" * 2_000).isprintable()
    assert column_id(LONGEST) == LONGEST


def test_a_memory_takes_ids_of_the_same_length(tmp_path: Path) -> None:
    async def main() -> None:
        for arguments in ((TOO_LONG, None), (None, TOO_LONG)):
            with pytest.raises(InputError, match=TOLD):
                SQLiteMemory(tmp_path / "m.db", *arguments)
        memory = SQLiteMemory(tmp_path / "m.db", LONGEST, LONGEST)
        message = Msg("ann", "hi", "user")
        message.id = TOO_LONG
        with pytest.raises(InputError, match=TOLD):
            await memory.add(message)
        message.id = LONGEST
        await memory.add(message)
        assert await memory.size() == 1
        await memory.close()

    asyncio.run(main())


# --- databases from before there was a limit --------------------------------------------------------------------------


def lengthen(tx: Tx) -> None:
    tx.run("UPDATE threads SET id = :long WHERE id = 'old'", long=VERY_LONG)


@pytest.mark.processes
def test_a_longer_id_from_before_can_be_read_and_replaced_and_is_named_where_it_cannot_go(tmp_path: Path) -> None:
    path, target = tmp_path / "old.db", PostgresSchema(tmp_path)

    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("old", UserMessage("hi"))
            await cp.store.write(lengthen)
            assert await cp.load(VERY_LONG) is not None
            with pytest.raises(InputError, match="can have 1,000 bytes"):
                await cp.append(VERY_LONG, UserMessage("more"))
            found = await cp.check()
            assert [problem["what"] for problem in found["problems"]] == ["id"]
            assert VERY_LONG[:40] in found["problems"][0]["detail"]
            lines = [line async for line in cp.export_thread(VERY_LONG)]
            with pytest.raises(InputError, match=r"an id can have 1,000 bytes.*got 20,000"):
                await cp.import_from(lines)
            with pytest.raises(InputError, match=r"threads\.id .*20,000 bytes.*byssus check"):
                await asyncio.to_thread(copy, str(path), target.place)
            await cp.fork(VERY_LONG, new_id="new")
            await cp.delete_thread(VERY_LONG)
            assert (await cp.check())["ok"]
        await asyncio.to_thread(copy, str(path), target.place)

    try:
        asyncio.run(main())
    finally:
        target.drop()
