"""`byssus show`: the messages of a thread, on the screen, as JSON, or as a page."""

from __future__ import annotations

import argparse
import asyncio
import functools
from typing import Any

import msgspec

from byssus.checkpointer import Checkpointer, MessageAdded, ReplyDelta, Thread, ThreadInfo, ThreadState
from byssus.cli import database, ids
from byssus.cli.screen import pages, terminal
from byssus.cli.subcommand import add, add_thread, number, work_on
from byssus.errors import InputError
from byssus.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    dumps,
    to_value,
)
from byssus.providers.history import interrupted

_STATES: dict[ThreadState, str] = {
    "running": "A run is in progress; --follow shows new messages.",
    "waiting": "A tool call waits for a person: 'byssus pending' lists it.",
    "interrupted": "The run of this thread was interrupted: 'byssus resume' finishes it.",
    "quarantined": "This thread is quarantined, because its run ended its process; 'byssus resume THREAD --lift'.",
}


def add_to(commands: Any) -> None:
    more = "The JSON has id, messages, extra, state, children, and partial: what has arrived of an incomplete reply."
    parser = add(commands, "show", _show, more)
    add_thread(parser)
    parser.add_argument("--last", type=number, metavar="N", help="only the last N messages")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as a Markdown page")
    form.add_argument("--html", action="store_true", help="as an HTML page in one file, which loads nothing")
    parser.add_argument("--follow", action="store_true", help="show new messages as they are added, until Ctrl-C")


def _show(args: argparse.Namespace) -> int:
    if args.follow:
        return _follow(args)

    async def load(cp: Checkpointer) -> tuple[Thread | None, ThreadState, list[ThreadInfo]]:
        thread = await cp.load(args.thread, last=args.last)
        return thread, await cp.state(args.thread), await cp.children(args.thread)

    thread, state, children = work_on(args, load, args.thread)
    if thread is None:  # deleted a moment ago
        raise InputError(f"there is no thread {args.thread!r} any more")
    messages = thread.messages
    if args.json:
        _print_json(args.thread, thread, state, children)
        return 0
    if thread.partial:
        is_arriving = state == "running"
        messages = [*messages, _arriving(thread.partial) if is_arriving else interrupted(thread.partial)]
    when = functools.partial(terminal.when, utc=args.utc)
    if args.markdown or args.html:
        page = pages.markdown if args.markdown else pages.html_page
        for piece in page(args.thread, messages, when):
            print(terminal.html_piece(piece) if args.html else piece, end="")
        return 0
    for message in messages:
        _print_message(message, when)
    _print_remarks(children, state)
    return 0


def _print_remarks(children: list[ThreadInfo], state: ThreadState) -> None:
    for child in children:
        print(terminal.line(f"(child thread {child.id}: {child.first_words})"))
    if state != "idle":
        print(f"({_STATES[state]})")


def _arriving(partial: AssistantMessage) -> AssistantMessage:
    return msgspec.structs.replace(partial, stop_reason="still arriving")


def _print_json(thread_id: str, thread: Thread, state: ThreadState, children: list[ThreadInfo]) -> None:
    partial = to_value(thread.partial) if thread.partial else None
    if isinstance(partial, dict) and state == "running":
        partial["stop_reason"] = None  # it has not stopped
    messages = [to_value(message) for message in thread.messages]
    terminal.print_json(
        {
            "id": thread_id,
            "messages": messages,
            "extra": thread.extra,
            "partial": partial,
            "state": state,
            "children": [child.id for child in children],
        }
    )


def _print_message(message: Message, when: pages.When) -> None:
    print(terminal.styled(f"-- {pages.headline(message, when)}", "bold"))
    print(terminal.clean(_body(message).replace("\r\n", "\n")), end="\n\n")


def _body(message: Message) -> str:
    if isinstance(message, Note):
        return message.text or terminal.as_json(message.body)
    return "\n".join(_shown(block) for block in message.content)


def _shown(block: Block) -> str:
    match block:
        case TextContent():
            return block.text
        case ThinkingContent():
            return f"[thinking] {block.thinking or '(not readable)'}"
        case ImageContent():
            return f"[image, {block.mime_type}]"
        case ToolCall():
            return f"[calls {block.name} with {block.malformed or terminal.as_json(block.arguments)}]"
        case _:
            return terminal.as_json(block.data)


# --- following --------------------------------------------------------------------------------------------------------


def _follow(args: argparse.Namespace) -> int:
    if args.markdown or args.html or args.last:
        raise InputError("--follow shows messages as they come; it takes --json, and neither --last nor a page")
    asyncio.run(_print_what_comes(database.existing_checkpointer_of(args), args))
    return 0


async def _print_what_comes(checkpointer: Checkpointer, args: argparse.Namespace) -> None:
    """Show each message as it is stored; as JSON, one a line. A thread that is not there yet is waited for.

    On a terminal, the text of a reply is shown as it arrives, and the reply itself when it is stored.
    """
    is_live = terminal.is_screen() and not args.json
    is_arriving = False
    async with checkpointer as cp:
        async for item in cp.follow(await ids.whole_id(cp, "thread", args.thread)):
            if is_arriving and not isinstance(item, ReplyDelta):
                is_arriving = False
                print(end="\n\n")
            if isinstance(item, ReplyDelta) and item.kind == "text" and is_live:
                if not is_arriving:
                    is_arriving = True
                    print(terminal.styled("-- assistant, arriving", "dim"))
                print(terminal.clean(item.delta), end="")
            elif isinstance(item, MessageAdded) and args.json:
                print(terminal.json_line(dumps(to_value(item.message))))
            elif isinstance(item, MessageAdded):
                _print_message(item.message, functools.partial(terminal.when, utc=args.utc))
            terminal.flush()
