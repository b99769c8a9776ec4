"""Ready-made task types that need an app: `agent`, `summarize` and `title`.

    worker = Worker("chat.db", app="shop.agents:support")
    await cp.create_task("trip", "agent", {"prompt": "Find a hotel"})
    await cp.create_task("trip", "summarize", {})
    await cp.create_task("trip", "title", {})

Summaries and titles are written by the models of the app's agent, in an agent of their own: without its tools, and
without a word in the thread. With an app that is a dict of factories, the payload names one: `{"agent": "support"}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from byssus import apps
from byssus.agent import Agent
from byssus.apps import App, Factory
from byssus.messages import Message
from byssus.middleware.windows import INSTRUCTION, by_parts, transcript
from byssus.worker import agent_tasks
from byssus.worker.context import TaskContext
from byssus.worker.handlers import Handler
from byssus.worker.outcomes import NoRetry

AppSource: TypeAlias = App | Factory | Mapping[str, Factory] | str

_TITLE = (
    "Write a title for the conversation that you are given: at most six words, in the language of the conversation. "
    "Answer with the title alone, without quotes."
)
_TITLED = 8_000  # characters of a conversation: its beginning says what it is about
_LONGEST_TITLE = 200  # characters


def handlers(app: AppSource) -> dict[str, Handler]:
    """The handlers of the ready-made types. The app is looked up by the first task that needs it."""

    async def agent(ctx: TaskContext, payload: Any) -> Any:
        """Run the agent of the task's thread."""
        options = _options(payload, "prompt", "agent")
        if "prompt" not in options:
            raise NoRetry("the payload of an agent task must be {'prompt': ...}, and may have 'agent'")
        return await agent_tasks.prompt(ctx, _app(app, options), options["prompt"])

    async def summarize(ctx: TaskContext, payload: Any) -> Any:
        """Summarize the task's thread; the result has the summary as `text`."""
        options = _options(payload, "instruction", "agent")
        instruction = options.get("instruction", INSTRUCTION)
        maker, messages = await _agent(ctx, _app(app, options)), await _messages(ctx)

        async def ask(before: str, old: Sequence[Message]) -> str:
            return await _written(ctx, maker, instruction, transcript(before, old))

        return {"text": await by_parts(ask, "", messages)}

    async def title(ctx: TaskContext, payload: Any) -> Any:
        """Give the task's thread a title; the result has it as `text`."""
        maker, messages = await _agent(ctx, _app(app, _options(payload, "agent"))), await _messages(ctx)
        text = await _written(ctx, maker, _TITLE, transcript("", messages)[:_TITLED])
        chosen = next((line for line in text.splitlines() if line.strip()), "").strip(" \t\"'*#")[:_LONGEST_TITLE]
        if not chosen:
            raise NoRetry(f"the model wrote no title: {text!r:.80}")
        await ctx.checkpointer.set_title(agent_tasks.session_of(ctx), chosen)
        return {"text": chosen}

    return {
        name: Handler(function, "async")
        for name, function in (("agent", agent), ("summarize", summarize), ("title", title))
    }


def _options(payload: Any, *known: str) -> dict[str, Any]:
    options = {} if payload is None else payload
    if not isinstance(options, dict) or not options.keys() <= {*known} or not isinstance(options.get("agent", ""), str):
        raise NoRetry(f"the payload may have the keys {', '.join(map(repr, known))}; got {payload!r:.80}")
    return options


def _app(app: AppSource, options: dict[str, Any]) -> App:
    return apps.app_of(app, options.get("agent"))


async def _agent(ctx: TaskContext, app: App) -> Agent:
    return await app.agent(ctx.checkpointer, agent_tasks.session_of(ctx), ctx.user_id)


async def _messages(ctx: TaskContext) -> list[Message]:
    thread = await ctx.checkpointer.load(agent_tasks.session_of(ctx))
    if thread is None or not thread.messages:
        raise NoRetry(f"session {ctx.session_id!r} has no messages yet")
    return thread.messages


async def _written(ctx: TaskContext, maker: Agent, instruction: str, text: str) -> str:
    """What the first model that answers makes of a text. It is asked again after a crash: nothing is lost by that."""
    written: str = await ctx.step("write", _write, maker, instruction, text, recovery="retry")
    return written


async def _write(maker: Agent, instruction: str, text: str) -> str:
    for provider, model in maker._setup.routes:
        result = await Agent(provider=provider, model=model, system_prompt=instruction).prompt(text)
        if result.error is None:
            break
    result.raise_for_error()
    return result.text.strip()
