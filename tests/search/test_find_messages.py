"""Messages by the tool that they call: whoever wrote them, indexed or not."""

from __future__ import annotations

import pytest

from byssus import Agent, Model, ToolCall
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.providers.scripted import ScriptedProvider
from tests.support.checkpointers import with_cp
from tests.support.databases import Database


def look_up(what: str) -> str:
    return f"{what}: found"


async def fill(cp: Checkpointer) -> None:
    """One call of an agent, one as an application writes it, one as OpenAI does, and words that only sound so."""
    await cp.create_user("Ann", user_id="ann")
    await cp.create_session("ann", session_id="s")
    script = ScriptedProvider([[ToolCall("c1", "look_up", {"what": "x"})], "done"])
    await Agent(provider=script, model=Model("m"), tools=[look_up], checkpointer=cp, thread_id="agent").prompt("go")
    await cp.save_message("s", "assistant", "I look.", tool_calls=[{"name": "look_up", "arguments": {"what": "y"}}])
    function = {"name": "look_up", "arguments": '{"what": "z"}'}
    await cp.save_message("s", "assistant", None, tool_calls=[{"id": "o", "type": "function", "function": function}])
    await cp.save_message("s", "user", 'look_up "tool_calls" look up')
    await cp.save_message("s", "assistant", "no", tool_calls=[{"name": "look", "arguments": {"name": "look_up"}}])


@pytest.mark.parametrize("indexed", [False, True])
def test_messages_are_found_by_the_tool_that_they_call_the_newest_first(database: Database, indexed: bool) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        if indexed:
            await cp.reindex()
        found = await cp.find_messages("look_up")
        assert [row["session_id"] for row in found] == ["s", "s", "agent"]
        assert [row["role"] for row in found] == ["assistant"] * 3
        assert (found[0]["tool_calls"] or [])[0]["function"]["name"] == "look_up"
        assert found[1]["content"] == "I look."
        assert found[2]["tool_calls"] == [{"id": "c1", "name": "look_up", "arguments": {"what": "x"}}]
        assert [row["id"] for row in await cp.find_messages("look_up", limit=1, offset=1)] == [found[1]["id"]]
        assert [row["id"] for row in await cp.find_messages("look_up", user_id="ann")] == [r["id"] for r in found[:2]]
        assert [row["id"] for row in await cp.find_messages("look_up", session_id="agent")] == [found[2]["id"]]
        assert await cp.find_messages("look_up", since="2100-01-01") == []
        assert await cp.find_messages("lookup") == []

    with_cp(database, use)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_message_that_was_deleted_is_not_found_any_more(database: Database, indexed: bool) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        if indexed:
            await cp.index()
        (newest, *others) = await cp.find_messages("look_up")
        await cp.delete_message("s", newest["id"])
        assert await cp.find_messages("look_up") == others
        await cp.delete_session("s")
        assert await cp.find_messages("look_up") == others[1:]

    with_cp(database, use)


def test_names_that_would_end_a_token_are_found_as_they_are(database: Database) -> None:
    names = ["a b", "工具", "x'y", 'q"r', "mcp__server/tool", "%", "-a", "n" * 5_000]

    async def use(cp: Checkpointer) -> None:
        await cp.create_session(None, session_id="s")
        for name in names:
            await cp.save_message("s", "assistant", name, tool_calls=[{"name": name, "arguments": {}}])
        await cp.reindex()
        for name in names:
            assert [row["content"] for row in await cp.find_messages(name)] == [name]

    with_cp(database, use)


def test_a_tool_without_a_name_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for name in ("", None, 5):
            with pytest.raises(InputError, match="a tool's name must be"):
                await cp.find_messages(name)  # type: ignore[arg-type]

    with_cp(database, use)
