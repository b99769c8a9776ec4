"""`byssus threads|show`: the conversations in a database, and the messages of one."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from byssus.checkpointer import Checkpointer, Thread, ThreadInfo
from byssus.cli import database, terminal
from byssus.cli.subcommand import number
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
    ToolResultMessage,
    dumps,
    to_value,
)
from byssus.providers.history import interrupted


def add_to(commands: Any) -> None:
    _add_threads(commands)
    _add_show(commands)


# --- threads ----------------------------------------------------------------------------------------------------------


def _add_threads(commands: Any) -> None:
    parser = commands.add_parser(
        "threads",
        help="list the threads",
        description="`byssus threads`: the conversations in a database, the last one first.",
    )
    parser.add_argument("--limit", type=number, default=50, metavar="N", help="at most N of them (default: 50)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    database.add_option(parser)
    parser.set_defaults(run=_list)


def _list(args: argparse.Namespace) -> int:
    listed = asyncio.run(_listed(database.existing_checkpointer_of(args), args.limit))
    if args.json:
        terminal.print_json([info._asdict() for info in listed])
    elif listed:
        _print_table(listed)
        if len(listed) == args.limit:
            terminal.remark(f"(the last {args.limit}; --limit N shows more)\n")
    else:
        print("There are no threads yet; 'byssus chat' starts one.")
    return 0


async def _listed(checkpointer: Checkpointer, limit: int) -> list[ThreadInfo]:
    async with checkpointer:
        return await checkpointer.threads(limit=limit)


def _print_table(listed: list[ThreadInfo]) -> None:
    rows = [("THREAD", "MESSAGES", "LAST WRITTEN (UTC)")]
    rows += [(terminal.line(info.id), str(info.message_count), info.updated_at[:19]) for info in listed]
    width = max(len(name) for name, _, _ in rows)
    for name, messages, written in rows:
        print(f"{name:{width}}  {messages:>8}  {terminal.line(written)}")


# --- show -------------------------------------------------------------------------------------------------------------


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="show the messages of a thread",
        description="`byssus show THREAD`: what was said in a conversation.",
    )
    parser.add_argument("thread", metavar="THREAD", help="the thread's id; 'byssus threads' lists them")
    parser.add_argument(
        "--json", action="store_true", help="as JSON: id, messages, extra and what has arrived of a reply"
    )
    parser.add_argument("--follow", action="store_true", help="go on with what is added, until Ctrl-C")
    database.add_option(parser)
    parser.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    checkpointer = database.existing_checkpointer_of(args)
    if args.follow:
        asyncio.run(_follow(checkpointer, args.thread, as_json=args.json))
    thread = asyncio.run(_load(checkpointer, args.thread))
    if thread is None:
        raise InputError(f"there is no thread {args.thread!r} in {checkpointer.name}; 'byssus threads' lists them")
    if args.json:
        messages = [to_value(message) for message in thread.messages]
        partial = to_value(thread.partial) if thread.partial else None
        terminal.print_json({"id": args.thread, "messages": messages, "extra": thread.extra, "partial": partial})
        return 0
    unfinished = [interrupted(thread.partial)] if thread.partial else []
    for message in [*thread.messages, *unfinished]:
        _print_message(message)
    return 0


async def _follow(checkpointer: Checkpointer, thread_id: str, *, as_json: bool) -> None:
    """Show each message as it is stored; as JSON, one a line."""
    async with checkpointer:
        async for message in checkpointer.watch(thread_id):
            if as_json:
                print(terminal.json_line(dumps(to_value(message))))
            else:
                _print_message(message)
            terminal.flush()


def _print_message(message: Message) -> None:
    print(terminal.line(_headline(message)))
    print(terminal.clean(_body(message).replace("\r\n", "\n")), end="\n\n")


async def _load(checkpointer: Checkpointer, thread_id: str) -> Thread | None:
    async with checkpointer:
        return await checkpointer.load(thread_id)


def _headline(message: Message) -> str:
    words = [message.role]
    if isinstance(message, ToolResultMessage):
        words.append(message.tool_name + (" (failed)" if message.is_error else ""))
    if not isinstance(message, Note) and message.created_at:
        words.append(message.created_at[:19])
    if isinstance(message, AssistantMessage) and message.stop_reason not in ("stop", "tool_use"):
        words.append(message.stop_reason + (f": {message.error.message}" if message.error else ""))
    return "-- " + ", ".join(words)


def _body(message: Message) -> str:
    if isinstance(message, Note):
        return message.text or dumps(message.body)
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
            return f"[calls {block.name} with {block.malformed or dumps(block.arguments)}]"
        case _:
            return dumps(block.data)
