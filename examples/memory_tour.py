"""A tour of the memories: marks, compression, a restart, and an agent that sees what the marks leave.

`python memory_tour.py [DATABASE]`. It needs no key: the model's replies are written down. DATABASE is the path of a
file (default: a new one).
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from byssus import Agent, ExcludeMarked, Model
from byssus.checkpointer import SQLiteCheckpointer
from byssus.memory import Msg, SQLiteMemory, compress
from byssus.testing import ScriptedProvider


async def first_process(path: str) -> dict[str, Any]:
    memory = SQLiteMemory(path, session_id="trip")
    for number in range(1, 7):
        await memory.add(Msg("ann", f"Question {number} about Beijing?", "user"))
        await memory.add(Msg("friend", f"Answer {number}.", "assistant"))
    await memory.add(Msg("system", "Be brief.", "system"), marks="hint")
    print(f"{await memory.size()} messages, {len(await memory.get_memory(mark='hint'))} of them a hint")
    print(f"removed: {await memory.delete_by_mark('hint')}")

    def model(text: str) -> str:  # any function that gets a text and returns one; or a Model, and a provider
        return f"Ann asked {text.count('Question')} questions about Beijing."

    print(f"summary: {await compress(memory, model, keep=4)}")
    return memory.state_dict()  # where the data are, and not the data


async def second_process(path: str, state: dict[str, Any]) -> None:
    memory = SQLiteMemory()
    memory.load_state_dict(state)
    seen = await memory.get_memory(exclude_mark="compressed")
    print(f"after a restart: {seen[0].content} ... {seen[-1].content}")
    print(f"found: {[message.content for message in await memory.search('beijing 2')]}")

    provider = ScriptedProvider(["Six."])
    async with SQLiteCheckpointer(path) as cp:  # a memory is a thread: an agent goes on with it
        agent = Agent(
            provider=provider,
            model=Model(id="scripted"),
            checkpointer=cp,
            thread_id="trip",
            middleware=[ExcludeMarked("compressed")],
        )
        result = await agent.prompt("How many were that?")
    print(f"the model saw {len(provider.requests[0].messages)} messages and said: {result.text}")
    print(f"the thread keeps {await memory.size()}")


def main(path: str) -> None:
    state = asyncio.run(first_process(path))
    asyncio.run(second_process(path, state))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder) / "memory.db"))
