"""`byssus memory`: which memories there are, and what is marked in one of them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from byssus.cli.screen import terminal
from byssus.cli.subcommand import add, count, number, work_on
from byssus.errors import InputError
from byssus.memory.msg import Msg
from byssus.memory.stored import entries, list_memories


def add_to(commands: Any) -> None:
    more = "Without SESSION, lists all memories, and threads of agents that have marks."
    parser = add(commands, "memory", _memory, more, json=True)
    parser.add_argument("session", metavar="SESSION", nargs="?", help="the session's id")
    parser.add_argument("--user", metavar="ID", help="the user's id (default with SESSION: none)")
    parser.add_argument("--limit", type=number, default=100, metavar="N", help="list at most N (default: 100)")


def _memory(args: argparse.Namespace) -> int:
    return _list(args) if args.session is None else _show(args)


def _list(args: argparse.Namespace) -> int:
    found = work_on(args, lambda cp: list_memories(cp.store, args.user, args.limit))
    if args.json:
        terminal.print_json(found)
        return 0
    for each in found:
        whose = f"{each['session_id']} of {each['user_id']}" if each["user_id"] is not None else each["session_id"]
        size = f"{count(each['messages'], 'message')}, {each['marked']:,} marked"
        print(terminal.line(f"{whose}  {terminal.when(each['updated_at'], args.utc)}  {size}"))
    if not found:
        whose = "There are no memories" if args.user is None else f"User {args.user!r} has no memories"
        terminal.remark(f"{whose}; 'byssus threads' lists the threads.\n")
    elif len(found) == args.limit:
        terminal.remark(f"(the first {args.limit}; --limit N shows more)\n")
    return 0


def _show(args: argparse.Namespace) -> int:
    found = work_on(args, lambda cp: entries(cp.store, args.user, args.session))
    if found is None:
        of_whom = "without a user (--user ID names one)" if args.user is None else f"of user {args.user!r}"
        raise InputError(f"there is no memory {args.session!r} {of_whom}; 'byssus memory' lists those that there are")
    summary, content = found
    if args.json:
        values = [{**message.to_dict(), "marks": marks} for message, marks in content]
        terminal.print_json({"summary": summary, "messages": values})
        return 0
    if summary:
        print(f"-- summary\n{terminal.clean(summary)}\n")
    for message, marks in content:
        who = message.role if message.name in (None, message.role) else f"{message.name} ({message.role})"
        head = ", ".join([who, message.timestamp or "", *(f"#{mark}" for mark in marks)])
        print(terminal.line(f"-- {head}"))
        print(terminal.clean(_text(message)), end="\n\n")
    return 0


def _text(message: Msg) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(map(_shown, message.content))


def _shown(block: Any) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    return json.dumps(block, ensure_ascii=False)
