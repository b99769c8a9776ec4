"""Each surface of byssus used once, so that a test can look at what its queries do.

A surface is imported when its turn comes: what one imports at its top, another may import late.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byssus import Agent, Limits, Model, ToolCall, UserMessage, tool
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, checkpointer_for
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.threads.prefixes import starting_with

if TYPE_CHECKING:
    from byssus.storage import AgentStorage

MODEL = Model("m")


def use_all(place: str, folder: Path) -> None:
    """Use all surfaces of the database at a path or a DSN; the folder is for files."""
    asyncio.run(_use_coroutines(place, folder))
    from byssus.storage import AgentStorage  # noqa: PLC0415

    with AgentStorage(place) as storage:
        _use_storage(storage, folder)


async def _use_coroutines(place: str, folder: Path) -> None:
    async with checkpointer_for(place) as cp:
        await _use_threads(cp)
        await _use_checkpoints(cp)
        await _use_agents(cp)
        await _use_tasks(cp)
        await _use_transfer(cp)
        await _use_deletion(cp)
    await _use_memory(place, folder)


async def _use_threads(cp: Checkpointer) -> None:
    await cp.append("trip", [UserMessage("hello"), {"role": "note", "text": "anything"}])
    await cp.save_extra("trip", {"plan": "agreed"})
    await cp.fork("trip")
    await cp.set_ttl("trip", 30)
    assert await cp.list_threads() == []
    assert await cp.load("trip")
    assert await cp.info("trip")
    await cp.set_title("trip", "To Oslo")
    assert await cp.threads()
    assert await starting_with(cp.store, "thread", "tr", 5)
    receipt = cp.steer("trip", "stop there")
    await receipt
    await cp.follow_up("trip", "go on")
    assert await cp.inbox("trip")
    await cp.withdraw("trip", receipt)
    await cp.abort("trip")
    assert await cp.unfinished() == []
    watching = cp.watch("trip")
    await anext(watching)
    await watching.aclose()


async def _use_tasks(cp: Checkpointer) -> None:
    from byssus.worker import Limit, TaskContext, Worker  # noqa: PLC0415

    async def work(ctx: TaskContext, payload: str) -> str:
        await ctx.progress(0.5, "half")
        return f"{await ctx.step('echo', str, payload)}{await ctx.wait_for('more')}"

    await cp.create_session(None, session_id="tasks")
    made = await cp.create_task("tasks", "work", "hi", unique_key="once", message="Do it, please")
    await cp.create_task(None, "unknown", None, run_at="2020-01-01", deadline="2020-01-02")
    await cp.pause_task(made["id"])
    await cp.resume_task(made["id"])
    await cp.send_event(made["id"], "more", "!")
    await Worker(cp, {"work": work}, limits={"work": Limit(concurrency=2, rate="9/second")}).drained()
    assert [task["status"] for task in await cp.list_tasks("tasks") or []] == ["completed"]
    assert [line async for line in cp.export_thread("tasks")]
    await cp.delete_task(made["id"])
    await _use_agent_tasks(cp)


async def _use_agent_tasks(cp: Checkpointer) -> None:
    from byssus.worker import Worker  # noqa: PLC0415

    @tool(approval=True)
    def pay() -> str:
        return "paid"

    def app(thread_id: str, user_id: str | None) -> Agent:
        return Agent(provider=ScriptedProvider(scripts.pop(0)), model=MODEL, tools=[pay])

    scripts: list[list[Step]] = [[[ToolCall("c1", "pay", {})]], ["done"]]
    worker = Worker(cp, app=app)
    task = await cp.create_task("tasks", "agent", {"prompt": "go"})
    await worker.drained()
    await cp.answer("tasks", "c1", "approve")
    await worker.drained()
    assert [row["status"] for row in await cp.list_tasks("tasks") or []] == ["completed"]
    await cp.delete_task(task["id"])


async def _use_checkpoints(cp: Checkpointer) -> None:
    first = Checkpoint(CheckpointMetadata("versions", "one"), messages=[{"role": "user", "content": "hi"}])
    await cp.put(first)
    await cp.put(first.next(messages=[*first.messages, {"role": "assistant", "content": "hello"}]))
    assert await cp.get("one")
    assert await cp.get_latest("versions")
    assert await cp.list_threads()
    assert await cp.list_checkpoints("versions")
    await cp.fork("versions", "one", new_id="fork")
    await cp.rewind("versions", "one")
    assert await cp.tree("versions")
    await cp.diff("versions", "fork")
    await cp.delete_before("versions", 1)
    await cp.prune()


async def _use_agents(cp: Checkpointer) -> None:
    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    @tool(approval=True)
    async def delete() -> str:
        """Delete."""
        return "gone"

    await cp.create_user("bob", user_id="bob")
    steps: list[Step] = [[ToolCall("a", "look", {})], "done", [ToolCall("b", "delete", {})], "deleted"]
    options: dict[str, Any] = {"tools": [look, delete], "checkpoint_every": "turn", "limits": Limits(turns=5)}
    agent = Agent(
        provider=ScriptedProvider(steps), model=MODEL, checkpointer=cp, thread_id="run", user_id="bob", **options
    )
    await agent.prompt("look around")
    await agent.prompt("tidy up")
    assert await cp.pending()
    await cp.answer("run", "b", "approve")
    assert (await agent.resume()).text == "deleted"
    assert await cp.tool_calls("run")


async def _use_transfer(cp: Checkpointer) -> None:
    lines = [line async for line in cp.export_thread("run")]
    assert await cp.import_from(lines, as_id="imported")
    assert [line async for line in cp.export_user("bob")]


async def _use_deletion(cp: Checkpointer) -> None:
    await cp.delete_thread("fork")
    await cp.erase_thread("versions", forks="erase")
    await cp.erase_user("bob", forks="erase")


async def _use_memory(place: str, folder: Path) -> None:
    from byssus.memory import Msg, PostgresMemory, SQLiteMemory  # noqa: PLC0415

    async with PostgresMemory(place) if "://" in place else SQLiteMemory(folder / "memory.db") as memory:
        said = [Msg("user", "你好", "user"), Msg("user", "be brief", "user")]
        await memory.add(said, marks="hint")
        assert await memory.get_memory("hint")
        assert await memory.search("brief")
        await memory.update_messages_mark("old", old_mark="hint")
        await memory.update_compressed_summary("a greeting")
        await memory.delete([said[0].id])
        await memory.delete_by_mark("old")
        assert await memory.size() == 0
        await memory.clear()


def _use_storage(storage: AgentStorage, folder: Path) -> None:
    user = storage.create_user("ann", preferences={"theme": "dark"})
    storage.update_user(user["id"], email="ann@example.org")
    assert storage.find_users({"theme": "dark"})
    assert storage.consume_quota(user["id"], 10)
    session = storage.create_session(user["id"], "a trip")
    message = storage.save_message(session["id"], "assistant", "to Beijing", token_count=3)
    storage.update_message(session["id"], message, "to Nanjing")
    assert storage.get_conversation_history(session["id"])
    call = storage.log_tool_call(session["id"], "look", {"at": 1}, {"seen": 2}, 1.5)
    storage.update_tool_call(call, output_data={"seen": 3})
    task = storage.create_task(session["id"], "plan", {"days": 3})
    storage.update_task_status(task["id"], "completed", {"plan": "agreed"})
    storage.set_price("gpt-4o-mini", input=1.0)
    assert storage.get_usage_stats(user["id"])
    assert storage.search("nanjing")
    assert storage.search("nanjing", order="relevance")
    storage.find_messages("look")
    storage.reindex()
    storage.delete_message(session["id"], message)
    assert storage.check()["ok"]
    storage.recount()
    storage.repair()
    storage.backup(folder / "backup.db")
    with type(storage)(folder / "restored.db") as restored:
        restored.restore(folder / "backup.db")
    storage.delete_user(user["id"], sessions="delete")
