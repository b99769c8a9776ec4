"""AgentScope's own agent with a model that says what a test tells it to, and a tool.

As a program, it is another process that asks an agent about what an earlier one was told, and prints the prompts:
  python -m tests.adapters.agentscope.acting PLACE
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock, ToolUseBlock
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.token import CharTokenCounter
from agentscope.tool import Toolkit, ToolResponse

LONG = "The cat is called Mimi. " + "She sleeps a lot. " * 60
SUMMARY = {
    "task_overview": "Look after Mimi the cat",
    "current_state": "her name is known",
    "important_discoveries": "she sleeps",
    "next_steps": "weigh her",
    "context_to_preserve": "be gentle",
}


class Scripted(ChatModelBase):  # type: ignore[misc]
    """A list of blocks is an answer, and a dict is a summary. Each prompt is kept."""

    def __init__(self, *steps: list[Any] | dict[str, str]) -> None:
        super().__init__("scripted", stream=False)
        self._steps = list(steps)
        self.prompts: list[str] = []

    async def __call__(self, prompt: Any, *, structured_model: Any = None, **_: Any) -> ChatResponse:
        assert self._steps, f"nobody scripted an answer to {prompt}"
        step = self._steps.pop(0)
        assert isinstance(step, dict) == (structured_model is not None), f"{step} is no answer to {prompt}"
        self.prompts.append(json.dumps(prompt, ensure_ascii=False))
        return ChatResponse(content=[], metadata=step) if isinstance(step, dict) else ChatResponse(content=step)

    def is_done(self) -> bool:
        return not self._steps


def says(text: str) -> list[Any]:
    return [TextBlock(type="text", text=text)]


def calls(name: str, **arguments: Any) -> list[Any]:
    return [ToolUseBlock(type="tool_use", id=f"call-{name}", name=name, input=arguments)]


async def weigh(animal: str) -> ToolResponse:
    """Weigh an animal.

    Args:
        animal (str): which one
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"{animal} weighs 4.2 kg")])


def agent(model: Scripted, memory: Any) -> Any:
    """It compresses what is older than the last message when that gets as long as `LONG`."""
    toolkit = Toolkit()
    toolkit.register_tool_function(weigh)
    compression = ReActAgent.CompressionConfig(
        enable=True, agent_token_counter=CharTokenCounter(), trigger_threshold=len(LONG), keep_recent=1
    )
    made = ReActAgent(
        name="Friday",
        sys_prompt="You look after a cat.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=memory,
        compression_config=compression,
    )
    made.set_console_output_enabled(False)
    assert made.memory is memory
    return made


def asked(text: str) -> Msg:
    return Msg("user", text, "user")


async def weighing(memory: Any) -> list[str]:
    """Two turns: the first is long, and compressed by the second, which calls the tool. Returns the prompts."""
    model = Scripted(says("Noted."), SUMMARY, calls("weigh", animal="Mimi"), says("Four kilos."))
    friday = agent(model, memory)
    await friday(asked(LONG))
    reply = await friday(asked("How heavy is she?"))
    assert reply.get_text_content() == "Four kilos."
    assert model.is_done()
    return model.prompts


async def asking(friday_memory: Any) -> list[str]:
    """One turn of an agent that knows only what is in its memory. Returns the prompts."""
    model = Scripted(says("Mimi."))
    await agent(model, friday_memory)(asked("Who was that?"))
    assert model.is_done()
    return model.prompts


def memory_at(place: str) -> Any:
    from byssus.adapters.agentscope import PostgresMemory, SQLiteMemory  # noqa: PLC0415

    kind = PostgresMemory if place.startswith("postgresql:") else SQLiteMemory
    return kind(place, user_id="ann", session_id="cat")


async def main(place: str) -> None:
    memory = memory_at(place)
    prompts = await asking(memory)
    await memory.close()
    sys.stdout.write(json.dumps(prompts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
