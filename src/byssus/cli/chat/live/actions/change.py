"""Commands that change how it goes on: /model /system /theme /mark /approve."""

from __future__ import annotations

from byssus.cli.chat.agents import check_tools
from byssus.cli.chat.live.drawn.drawing import THEMES
from byssus.cli.chat.live.session import Conversation
from byssus.errors import InputError
from byssus.memory.stored import mark
from byssus.providers.named import provider_of


async def do_model(session: Conversation, argument: str) -> None:
    agent = await session.ready()
    if not argument:
        session.view.lines("note", *(f"{'model' if n == 0 else 'fallback'}: {m}" for n, m in enumerate(agent.models)))
        return
    if session.source.plain is None:
        raise InputError("the app chooses its model itself; start the chat without --app to choose one")
    provider, model = provider_of(argument)
    if (check := getattr(provider, "check", None)) is not None:
        check()
    check_tools(provider, session.source.tools)
    session.source = session.source._replace(plain=(provider, model))
    session.renew()
    agent = await session.ready()
    session.view.note(f"(from now on {agent.models[0]} answers)")


async def do_system(session: Conversation, argument: str) -> None:
    if not argument:
        agent = await session.ready()
        session.view.lines("note", f"system prompt: {agent.system_prompt or '(none)'}")
        return
    if session.source.plain is None:
        raise InputError("the app has its own system prompt; start the chat without --app to choose one")
    session.source = session.source._replace(system_prompt=argument)
    session.renew()
    session.view.note("(the system prompt is another one from now on; it is not stored)")


async def do_theme(session: Conversation, argument: str) -> None:
    if argument not in THEMES:
        raise InputError(f"there is no theme {argument!r}; choose one of {', '.join(THEMES)}")
    session.screen.theme = argument
    session.screen.repaint()


async def do_mark(session: Conversation, argument: str) -> None:
    thread = await session.cp.load(session.thread_id, last=1)
    last = thread.messages[-1] if thread is not None and thread.messages else None
    message_id = getattr(last, "id", None)
    if message_id is None:
        raise InputError("this thread has no message to mark yet")
    await mark(session.cp.store, None, session.thread_id, argument, [message_id])
    session.view.note(f"(the last message is marked {argument!r})")


async def do_approve(session: Conversation, argument: str) -> None:  # noqa: ARG001
    if not await session.cp.pending(session.thread_id):
        session.view.note("No call waits for an answer.")
        return
    session.spawn_run(session.settle())
