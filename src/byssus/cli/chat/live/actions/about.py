"""Commands that show something: /help /tokens /tools /memory /inbox /export, and /quit."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.session import WHEN, Conversation
from byssus.cli.chat.live.typed import commands, keys
from byssus.cli.chat.live.typed.attachments import typed_in
from byssus.cli.screen import pages, table, terminal
from byssus.cli.subcommand import count
from byssus.errors import InputError
from byssus.memory.stored import entries
from byssus.messages import Message, dumps, to_value

if TYPE_CHECKING:
    from byssus.storage import UsageStats


async def do_help(session: Conversation, argument: str) -> None:
    rows = commands.help_lines(argument)
    about_keys = () if argument else keys.HELP
    session.screen.show(lambda drawer: [[], *_two_columns(drawer, rows), *_keys(drawer, about_keys)])


def _keys(drawer: Drawer, rows: tuple[tuple[str, str], ...]) -> list[Line]:
    return [[], *_two_columns(drawer, list(rows))] if rows else []


def _two_columns(drawer: Drawer, rows: list[tuple[str, str]]) -> list[Line]:
    """Names on the left and texts on the right; below each other where it is narrow."""
    broad = max((table.width(name) for name, _ in rows), default=0)
    if drawer.width < broad + 30:
        return [
            line for name, text in rows for line in (drawer.line(("tool", name)), *drawer.text(text, "faint", indent=2))
        ]
    found: list[Line] = []
    for name, text in rows:
        first, *others = drawer.text(text, "faint", indent=broad + 2) or [[]]
        head = drawer.line(("tool", name), ("", " " * (broad + 2 - table.width(name))))
        found += [[*head, *_behind(first, broad + 2)], *others]
    return found


def _behind(line: Line, columns: int) -> Line:
    """A line without the spaces that indent it."""
    left, found = columns, []
    for segment in line:
        cut = min(left, len(segment.text))
        left -= cut
        found.append(segment._replace(text=segment.text[cut:]))
    return found


async def do_tokens(session: Conversation, argument: str) -> None:  # noqa: ARG001
    stats = await session.cp.get_session_usage(session.thread_id)
    if stats is None:
        session.view.note("Nothing was said in this thread yet.")
        return
    rows = [("thread", f"{_tokens(stats)} in {stats['total_messages']:,} messages, cost {stats['total_cost']:.4f}")]
    rows += [(str(row["model"]), _by_model(row)) for row in stats["by_model"]]
    rows += [(tool["tool_name"], _by_tool(tool)) for tool in stats["tool_usage"]]
    session.screen.show(lambda drawer: [[], *_two_columns(drawer, rows)])


def _tokens(stats: UsageStats) -> str:
    return f"{stats['total_tokens']:,} tokens"


def _by_model(row: Mapping[str, Any]) -> str:
    parts = f"{row['input_tokens']:,} in, {row['output_tokens']:,} out"
    return f"{row['tokens']:,} tokens ({parts}), cost {row['cost']:.4f}"


def _by_tool(tool: Mapping[str, Any]) -> str:
    latency = "" if tool["p50"] is None else f", median {tool['p50']:,.0f} ms"
    return f"{tool['call_count']} calls, {tool['failures']} failed{latency}"


async def do_tools(session: Conversation, argument: str) -> None:  # noqa: ARG001
    agent = await session.ready()
    rows = []
    for each in agent.tools:
        notes = [f"recovery {each.recovery}"] + (["asks for approval"] if each.approval is not None else [])
        description = each.spec.description.strip().split("\n", 1)[0]
        rows.append((each.name, f"{description} ({', '.join(notes)})"))
    if rows:
        session.screen.show(lambda drawer: [[], *_two_columns(drawer, rows)])
    else:
        session.view.note("The model has no tools here; --tools and --app bring some.")


async def do_memory(session: Conversation, argument: str) -> None:  # noqa: ARG001
    found = await entries(session.cp.store, None, session.thread_id)
    summary, content = found if found is not None else ("", [])
    marked = [(message, marks) for message, marks in content if marks]
    lines = [f"summary: {summary}"] if summary else []
    for message, marks in marked:
        text = message.content if isinstance(message.content, str) else terminal.as_json(message.content)
        lines.append(f"#{' #'.join(marks)}  {message.role}: {' '.join(text.split())[:200]}")
    session.view.lines("note", *(lines or ["Nothing is marked in this thread, and it has no summary; /mark LABEL."]))


async def do_inbox(session: Conversation, argument: str) -> None:
    await session.look()
    if not argument:
        waiting = [f"{n}  {WHEN[each.kind]}: {typed_in(each.message)}" for n, each in enumerate(session.waiting, 1)]
        session.view.lines("note", *(waiting or ["No message waits."]))
        if waiting:
            session.view.note("(/inbox N withdraws one)")
        return
    if not session.waiting:
        raise InputError("no message waits, so there is none to withdraw")
    if not argument.isdecimal() or not 1 <= int(argument) <= len(session.waiting):
        raise InputError(
            f"/inbox takes the number of a message that waits (1 to {len(session.waiting)}), got {argument!r}"
        )
    chosen = session.waiting[int(argument) - 1]
    if await session.cp.withdraw(session.thread_id, chosen):
        session.view.note(f"(withdrawn: {typed_in(chosen.message)[:60]})")
    else:
        session.view.note("(too late: the run has taken it)")
    await session.look()


async def do_later(session: Conversation, argument: str) -> None:
    if session.is_running:
        session.say(argument, later=True)
    else:
        raise InputError("no answer is arriving; just type the message")


async def do_export(session: Conversation, argument: str) -> None:
    thread = await session.cp.load(session.thread_id)
    if thread is None:
        raise InputError("this thread has no messages yet")
    await asyncio.to_thread(_write, argument, session.thread_id, thread.messages)
    session.view.note(f"({count(len(thread.messages), 'message')} written to {argument})")


def _write(name: str, thread_id: str, messages: Sequence[Message]) -> None:
    path = Path(name).expanduser()
    when = functools.partial(terminal.when, utc=False)
    writers = {".md": pages.markdown, ".html": pages.html_page}
    kind = path.suffix.lower()
    if kind in writers:
        pieces: Iterator[str] = writers[kind](thread_id, messages, when)
    elif kind == ".json":
        pieces = iter([dumps({"id": thread_id, "messages": [to_value(message) for message in messages]}) + "\n"])
    else:
        raise InputError(f"{name!r} says by its end what to write: .md, .html or .json")
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        raise InputError(f"{name!r} is there already; choose another name") from None
    with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as text:
        text.writelines(pieces)


async def do_quit(session: Conversation, argument: str) -> None:  # noqa: ARG001
    session.leave()
