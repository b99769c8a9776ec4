"""AgentScope's ReActAgent with our memories: what it remembers is in the database, and not in a process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from agentscope.memory import InMemoryMemory, MemoryBase
from agentscope.session import JSONSession
from pydantic import BaseModel

from tests.adapters.agentscope import acting
from tests.adapters.agentscope.acting import LONG, SUMMARY, Scripted, asked, calls, says
from tests.support import forked
from tests.support.databases import Database

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
HINT = "Structured output is required"
# What takes long to import, once for all processes that ask.
IMPORTED = [f"agentscope.{part}" for part in ("agent", "formatter", "memory", "message", "model", "token", "tool")]


class Weight(BaseModel):
    kilos: float


def remembers(prompt: str) -> None:
    """It has the summary instead of what it stands for, and all that came later."""
    assert SUMMARY["task_overview"] in prompt
    assert prompt.count("Here is a summary of your previous work") == 1
    for old in (LONG[:40], "Noted."):
        assert old not in prompt
    for new in ("How heavy is she?", "Mimi weighs 4.2 kg", "Four kilos."):
        assert new in prompt


async def texts(memory: Any, **chosen: Any) -> list[str | None]:
    return [message.get_text_content() for message in await memory.get_memory(prepend_summary=False, **chosen)]


async def invoked(memory: Any) -> list[bool]:
    """Which messages know the call of the model that they came from."""
    return [bool(message.invocation_id) for message in await memory.get_memory()]


def test_our_memories_are_memories_of_agentscope(database: Database) -> None:
    memory = acting.memory_at(database.place)
    assert isinstance(memory, MemoryBase)
    assert memory  # `memory or InMemoryMemory()` takes it, empty as it is


def test_a_turn_that_compresses_goes_as_with_upstream(database: Database) -> None:
    async def main() -> None:
        upstream, ours = InMemoryMemory(), acting.memory_at(database.place)
        expected = await acting.weighing(upstream)
        assert await acting.weighing(ours) == expected
        for chosen in ({}, {"mark": "compressed"}, {"exclude_mark": "compressed"}, {"mark": "hint"}):
            assert await texts(ours, **chosen) == await texts(upstream, **chosen)
        assert await texts(ours, mark="compressed") == [LONG, "Noted."]
        _, called, result, _ = await ours.get_memory(exclude_mark="compressed", prepend_summary=False)
        assert called.content == calls("weigh", animal="Mimi")
        assert await invoked(ours) == await invoked(upstream)
        assert result.content[0]["output"] == says("Mimi weighs 4.2 kg")
        await ours.close()

    asyncio.run(main())


def test_another_process_remembers(database: Database) -> None:
    async def main() -> None:
        await acting.weighing(acting.memory_at(database.place))  # nobody closes it

    asyncio.run(main())
    remembers(_asked_elsewhere(database.place)[0])
    remembers(_asked_elsewhere(database.place)[0])


def test_hints_reach_the_model_once_and_stay_away(database: Database) -> None:
    async def main() -> None:
        memory = acting.memory_at(database.place)
        model = Scripted(says("Let me see."), calls("generate_response", kilos=4.2), says("Four kilos."))
        reply = await acting.agent(model, memory)(asked("How heavy?"), structured_model=Weight)
        assert reply.metadata == {"kilos": 4.2}
        assert [HINT in prompt for prompt in model.prompts] == [False, True, False]
        assert ["Now generate a text" in prompt for prompt in model.prompts] == [False, False, True]
        assert await texts(memory, mark="hint") == []
        assert not any("system-hint" in str(text) for text in await texts(memory))
        await memory.close()

    asyncio.run(main())
    assert "system-hint" not in _asked_elsewhere(database.place)[0]


def test_a_saved_session_leads_back_to_its_memory(database: Database, tmp_path: Path) -> None:
    """Also from a memory that was made for another place of the same kind."""

    async def main() -> None:
        session = JSONSession(str(tmp_path / "sessions"))
        memory = acting.memory_at(database.place)
        await acting.weighing(memory)
        saved = acting.agent(Scripted(), memory)
        await session.save_session_state("cat", friday=saved)
        await memory.close()

        model, again = Scripted(says("Mimi.")), type(memory)(_elsewhere(database, tmp_path))
        loaded = acting.agent(model, again)
        loaded.name = "Saturday"
        await session.load_session_state("cat", friday=loaded)
        assert loaded.name == "Friday"
        await loaded(asked("Who was that?"))
        remembers(model.prompts[0])
        await again.close()

    asyncio.run(main())
    assert "Who was that?" in _asked_elsewhere(database.place)[0]


def test_a_session_holds_no_messages(database: Database, tmp_path: Path) -> None:
    async def main() -> None:
        memory = acting.memory_at(database.place)
        await acting.weighing(memory)
        await JSONSession(str(tmp_path)).save_session_state("cat", friday=acting.agent(Scripted(), memory))
        await memory.close()

    asyncio.run(main())
    written = (tmp_path / "cat.json").read_text("utf-8")
    assert "Mimi weighs" not in written
    assert set(json.loads(written)["friday"]["memory"]) >= {"user_id", "session_id", "_compressed_summary"}


def test_a_session_of_upstream_moves_into_a_database(database: Database, tmp_path: Path) -> None:
    async def main() -> None:
        session = JSONSession(str(tmp_path))
        before = InMemoryMemory()
        await acting.weighing(before)
        await session.save_session_state("cat", friday=acting.agent(Scripted(), before))

        memory, model = acting.memory_at(database.place), Scripted(says("Mimi."))
        await memory.add(asked("this is replaced"), marks="compressed")
        friday = acting.agent(model, memory)
        await session.load_session_state("cat", friday=friday)
        await friday(asked("Who was that?"))
        remembers(model.prompts[0])
        assert await texts(memory, mark="compressed") == [LONG, "Noted."]
        old = [message.to_dict() for message in await before.get_memory(prepend_summary=False)]
        assert [message.to_dict() for message in (await memory.get_memory(prepend_summary=False))[: len(old)]] == old
        await memory.close()

    asyncio.run(main())
    remembers(_asked_elsewhere(database.place)[0])


def _asked_elsewhere(place: str) -> list[str]:
    """The prompts of an agent in another process."""
    command = ["-m", "tests.adapters.agentscope.acting", place]
    done = forked.run(command, env=os.environ, cwd=ROOT, imports=IMPORTED, timeout=100)
    assert done.returncode == 0, done.stderr
    prompts: list[str] = json.loads(done.stdout)
    return prompts


def _elsewhere(database: Database, directory: Path) -> str:
    """A place with nothing in it."""
    return str(directory / "other.db") if database.system == "sqlite" else f"{database.place}_other"
