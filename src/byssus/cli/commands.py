"""The commands, in the order of `byssus --help`: the module that holds each, and what it does in a line.

A start of the command imports the module of the command that was typed, and no other: all of them together take longer
than most commands. So the lines stand here, and the options in the modules. A module declares them in `add_to`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Collection
from typing import Any, NamedTuple

_MODULES = {
    "chat.chat": {"chat": "talk to a model, in a thread that is kept"},
    "chat.ask": {"ask": "ask one question and print the answer"},
    "chat.resume": {"resume": "finish what was interrupted"},
    "browse.threads": {"threads": "list the threads", "rename": "set the title of a thread"},
    "browse.users": {"users": "list the users and their quotas"},
    "work.tasks": {"tasks": "list, show, create, pause, resume, cancel or retry tasks"},
    "work.worker": {"worker": "run tasks, until it is ended"},
    "work.schedules": {"schedules": "list or change what makes tasks at given times"},
    "browse.show": {"show": "show the messages of a thread"},
    "browse.memory": {"memory": "show a memory, each message with its marks"},
    "browse.runs": {
        "runs": "list the runs of a thread, or of all threads",
        "run": "show what happened in a run, step by step",
        "unfinished": "list the threads whose run was interrupted",
        "pending": "list the tool calls that wait for a person",
        "answer": "answer a tool call that waits for a person",
        "inbox": "list the queued messages of a thread",
        "steer": "queue a message for a thread's run: delivered before its next turn",
        "follow-up": "queue a message for a thread's run: delivered when it would otherwise stop",
        "withdraw": "remove a queued message",
        "abort": "stop the current run of a thread, in any process",
    },
    "watch.watch": {"watch": "watch the live runs of a database, and answer their questions"},
    "browse.checkpoints": {
        "checkpoints": "list the checkpoints of a thread, latest first",
        "tree": "draw a thread with its checkpoints, forks and child threads",
        "fork": "create a thread that shares the history of another",
        "rewind": "move a thread back to an earlier point",
        "diff": "show where two threads differ",
    },
    "admin.retention": {
        "prune": "remove old checkpoints, and messages that only they refer to",
        "delete": "delete a thread with its messages and checkpoints",
        "erase": "remove every byte of a thread, or of all threads of a user",
    },
    "admin.transfer": {
        "export": "write a thread, or all threads of a user, as JSON lines",
        "import": "import a file that 'byssus export' has written",
    },
    "admin.maintenance": {
        "copy": "copy a database into another",
        "backup": "back up a database into a new SQLite file",
        "restore": "restore a backup into a new database",
        "check": "verify a database",
    },
    "browse.search": {"search": "find what was said, and what tools did"},
    "browse.usage": {"usage": "show the usage: messages, tokens and cost"},
    "admin.completion": {"completion": "print a script that completes words in a shell"},
    "admin.doctor": {
        "doctor": "show what is installed and configured, and check it",
        "where": "show the database in use, and how it was chosen",
    },
}


class Command(NamedTuple):
    """A command: the module that holds it, and what it does."""

    module: str
    help: str


COMMANDS = {
    name: Command(f"{__package__}.{module}", does) for module, held in _MODULES.items() for name, does in held.items()
}


def add_commands(parser: argparse.ArgumentParser, typed: Collection[str] | None = None) -> None:
    """Declare all commands. Only those that were `typed` get their options; without `typed`, all of them do."""
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", dest="command")
    needed = {each.module for name, each in COMMANDS.items() if typed is None or name in typed}
    for name, command in COMMANDS.items():
        if command.module not in needed:
            commands.add_parser(name, help=command.help)
        elif name not in commands.choices:
            importlib.import_module(command.module).add_to(commands)
