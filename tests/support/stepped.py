"""Handlers and an agent whose steps and tools tell when they run, for workers that are killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from byssus import Agent, Model, ToolCall, tool
from byssus.messages import ToolResultMessage
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.worker import StepUnknown, TaskContext, ThreadContext

STEPS = ("first", "once", "last", "plain")
ONCE = ("once", "pay")  # steps and tools that may not run twice, whatever happens


def handlers(note: Callable[[str, str], object]) -> dict[str, Any]:
    """Handlers of the types `steps` and `plain`; `note` gets the id of the task, and what to note."""

    def act(task: str, name: str) -> str:
        note(task, f"ran {name}")
        return f"{name} is done"

    async def steps(ctx: TaskContext, payload: Any) -> Any:
        found = [await ctx.step("first", act, ctx.id, "first", recovery="retry")]
        note(ctx.id, "knows first")
        try:
            found.append(await ctx.step("once", act, ctx.id, "once"))
        except StepUnknown:
            found.append("unknown")
        note(ctx.id, "knows once")
        await ctx.sleep(hours=1)
        found.append(await ctx.wait_for("approval"))
        found.append(await ctx.step("last", act, ctx.id, "last", recovery="retry"))
        note(ctx.id, "knows last")
        return found

    def plain(ctx: ThreadContext, payload: Any) -> Any:
        found = ctx.step("plain", act, ctx.id, "plain", recovery="retry")
        note(ctx.id, "knows plain")
        return found

    return {"steps": steps, "plain": plain}


def app(note: Callable[[str, str], object]) -> Callable[[str, str | None], Agent]:
    """A factory of agents that pay, look and say that all is done; `note` gets the id of the thread."""

    def support(thread_id: str, user_id: str | None) -> Agent:
        @tool
        def pay() -> str:
            note(thread_id, "ran pay")
            return "paid"

        @tool(recovery="retry", max_attempts=None)
        def look() -> str:
            note(thread_id, "ran look")
            return "seen"

        return Agent(provider=ScriptedProvider([_answer] * 9), model=Model("m"), tools=[pay, look])

    return support


def _answer(request: Request) -> Step:
    """What the model says depends on the conversation alone, so each process goes on with it in the same way."""
    results = sum(isinstance(message, ToolResultMessage) for message in request.messages)
    return ([ToolCall("c1", "pay")], [ToolCall("c2", "look")], "all is done")[results]


def flaw(noted: Sequence[str]) -> str | None:
    """What was done twice, by all that was noted of one task or thread, in order."""
    for name in ONCE:
        if noted.count(f"ran {name}") > 1:
            return f"{name!r} ran twice"
    for name in STEPS:
        if f"knows {name}" in noted and f"ran {name}" in noted[noted.index(f"knows {name}") :]:
            return f"step {name!r} ran again after its result was known"
    return None


def problem(task_type: str, status: str, result: Any) -> str | None:
    """What is wrong with how a task has ended."""
    if status != "completed":
        return f"it is {status}"
    if task_type == "steps":
        first, once, *others = result
        is_right = [first, *others] == ["first is done", "approved", "last is done"]
        return None if is_right and once in ("once is done", "unknown") else f"its result is {result}"
    expected, found = ("plain is done", result) if task_type == "plain" else ("all is done", result["text"])
    return None if found == expected else f"its result is {result}"
