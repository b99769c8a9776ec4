"""A tool that a person must approve. The question survives a restart: run it, leave it, run it again.

python examples/approval.py            # ask the agent to do something dangerous
python examples/approval.py approve    # and allow it, the next day, in another process (or: deny)
"""

import asyncio
import sys

from byssus import Agent, Model, ToolCall, tool
from byssus.checkpointer import SQLiteCheckpointer
from byssus.providers.base import Request
from byssus.testing import ScriptedProvider


@tool(approval=True)
def delete_account(user: str) -> str:
    """Delete a user's account."""
    return f"the account of {user} is deleted"


def script(request: Request) -> str | list[ToolCall]:
    """A stand-in for a model: calls the tool, and then reports what came of it."""
    last = request.messages[-1]
    if last.role == "tool_result":
        return f"I was told: {last.text}"
    return [ToolCall("call-1", "delete_account", {"user": "eve"})]


async def main(answer: str | None = None) -> None:
    async with SQLiteCheckpointer("approval.db") as cp:
        agent = Agent(
            provider=ScriptedProvider([script] * 2),
            model=Model(id="scripted"),
            tools=[delete_account],
            checkpointer=cp,
            thread_id="admin",
        )
        await agent.load()
        for call in agent.pending:
            if answer:
                await agent.answer(call.call_id, "approve" if answer == "approve" else "deny")
        if answer:
            result = await agent.resume()
        elif agent.pending:
            print("Still waiting; say approve or deny.")
            return
        else:
            result = await agent.prompt("Delete Eve's account.")
        print(result.stop_reason, "-", result.text or [f"{c.tool_name} {c.arguments}" for c in agent.pending])


asyncio.run(main(*sys.argv[1:2]))
