"""What a person sees first of a thread: its last messages, what was interrupted, and who else drives it."""

from __future__ import annotations

import asyncio

from byssus.checkpointer import CaughtUp, MessageAdded, RunEnded, Thread
from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.session import Conversation, seen_in
from byssus.cli.ids import free_fork_id
from byssus.cli.subcommand import count
from byssus.messages import AssistantMessage, UserMessage
from byssus.providers.history import interrupted
from byssus.values.following.cursors import Cursor, thread_mark

_SHOWN = 8  # messages of the past
_LOOK = 100  # messages among which is the question of an interrupted run


async def open_thread(session: Conversation) -> None:
    """Show the end of the thread, and settle what is open in it."""
    thread_id, cp, view = session.thread_id, session.cp, session.view
    thread, state = await cp.load(thread_id, last=_SHOWN), await cp.state(thread_id)
    info = await cp.info(thread_id)
    _greet(session, thread, "" if info is None else info.title)
    for message in thread.messages if thread is not None else ():
        view.show_message(message)
    view.calls.end_all()
    if thread is None:
        return
    session.seen = seen_in(thread)
    if state == "running":
        await _driven(session, thread)
    elif state == "interrupted":
        await _resume(session, thread)
    elif state == "waiting":
        session.spawn_run(session.settle())
    elif state == "quarantined":
        view.fail(
            f"this thread is quarantined, because its run has ended its process several times; find out why, then: "
            f"byssus resume {thread_id} --lift"
        )


def _greet(session: Conversation, thread: Thread | None, title: str) -> None:
    name = session.thread_id
    if thread is None:
        session.view.lines("note", f"Thread {name}: new. /help lists commands and keys.")
        return
    shown = len(thread.messages)
    past = f"Thread {name}: {count(thread.message_count, 'message')} so far"
    if title and title != name:
        past += f" ({title})"
    session.view.lines("note", past + (f"; these are the last {shown}." if thread.has_earlier else "."))


# --- interrupted ------------------------------------------------------------------------------------------------------


async def _resume(session: Conversation, thread: Thread) -> None:
    session.spawn_run(_offer(session, thread))


async def _offer(session: Conversation, thread: Thread) -> None:
    """Say what was interrupted, show the half answer, and offer to finish it."""
    view, cp = session.view, session.cp
    open_calls = [each for each in await cp.tool_calls(session.thread_id) if each.status == "started"]
    view.calls.know_attempts({each.call_id: each.attempts for each in open_calls})
    if thread.partial is not None:
        view.show_message(interrupted(thread.partial))
    lines = ["The last run on this thread was interrupted."]
    if not any(isinstance(message, UserMessage) for message in thread.messages):
        lines += await _question(session)
    lines += [f"It was running {each.tool_name}; whether that took effect is unknown." for each in open_calls]
    view.lines("ask", *lines)
    answer = await session.board.ask("resume? [Y/n]", lambda drawer: [])  # noqa: ARG005
    word = None if answer is None else answer.strip().lower()
    if word in ("", "y", "yes"):
        await session.resume()
        return
    view.note("(left as it is: your next message goes on from there, /retry finishes it)")
    if answer is not None and word not in ("n", "no"):
        session.give_back(answer)


async def _question(session: Conversation) -> list[str]:
    """The question of the run, if it stands further up than what is shown."""
    thread = await session.cp.load(session.thread_id, last=_LOOK)
    asked = [m.text for m in thread.messages if isinstance(m, UserMessage)] if thread is not None else []
    return [f"The question: {asked[-1].strip()}"] if asked else []


# --- driven by another process ----------------------------------------------------------------------------------------


async def found_busy(session: Conversation) -> None:
    """Another process drives a thread that is shown already."""
    if (thread := await session.cp.load(session.thread_id, last=1)) is not None:
        await _driven(session, thread)


async def _driven(session: Conversation, thread: Thread) -> None:
    session.view.lines("ask", f"This thread is being driven by {await _driver(session)}.")
    word = await _what_then(session)
    if word is None:
        return
    if word == "f":
        new = await session.cp.fork(session.thread_id, new_id=await free_fork_id(session.cp, session.thread_id))
        session.view.note(f"(a copy: {new})")
        await session.open(new)
    else:
        session.watching = asyncio.create_task(_watch(session, thread, is_shown=word != "l"))


async def _what_then(session: Conversation) -> str | None:
    """What to do about the other process: w, l, f or None. A text that is none of these stays in the line."""
    typed = ""

    def choices(drawer: Drawer) -> list[Line]:
        wrong = drawer.text(f"{typed.strip()!r:.40} is no answer here:", "bad") if typed else []
        known = "w watch it (what you type reaches it), l wait for its end, f fork, Esc nothing"
        return [*wrong, *drawer.text(known, "faint")]

    while (answer := await session.board.ask("watch?", choices, typed)) is not None:
        word = answer.strip().lower()
        if word in ("", "w", "watch", "l", "wait", "f", "fork"):
            return {"": "w", "wait": "l"}.get(word, word[:1])
        typed = answer
    session.give_back(typed)
    return None


async def _driver(session: Conversation) -> str:
    """The host and the process that drive the thread."""
    for run in await session.cp.runs(session.thread_id, 1):
        if attempts := await session.cp.run_attempts(run.id):
            return attempts[-1].owner.partition(" ")[0]
    return "another process"


async def _watch(session: Conversation, thread: Thread, *, is_shown: bool) -> None:
    """Follow the run of another process to its end, and take the thread over then."""
    view = session.view
    watching = "(watching; Enter says something to that run, Ctrl-C looks away)"
    view.note(watching if is_shown else "(waiting for its end; Ctrl-C stops waiting)")
    mark = thread_mark("", session.thread_id, thread.made[1])
    after = str(Cursor(mark, thread.position.branch, session.seen.cut(thread.position.head)))
    ended = False
    try:
        async for item in session.cp.follow(session.thread_id, after):
            if is_shown:
                view.follow(item)
                if isinstance(item, MessageAdded):
                    session.seen = session.seen.with_seq(item.seq, is_reply=isinstance(item.message, AssistantMessage))
            is_over = isinstance(item, RunEnded) or (isinstance(item, CaughtUp) and item.run_id is None)
            if is_over:
                ended = True
                break
    except asyncio.CancelledError:
        view.note("(not watching any more; the run goes on)")
    finally:
        view.end()
        session.watching = None
    if ended:
        view.note("(that run has ended)")
        session.spawn(after_run(session))


async def after_run(session: Conversation) -> None:
    """A run of another process is over: what it has left."""
    await session.look()
    await session.show_news()  # all of it, if the run was not watched
    if await session.cp.state(session.thread_id) == "waiting":
        session.spawn_run(session.settle())
