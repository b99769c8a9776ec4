"""Finds the function of a command: each is named as its command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from byssus.cli.chat.live.actions import about, change, threads, versions
from byssus.cli.chat.live.session import Conversation
from byssus.cli.chat.live.typed.commands import COMMANDS, Typed

Action = Callable[[Conversation, str], Awaitable[None]]


def _action(name: str) -> Action:
    for group in (threads, versions, about, change):
        if (found := getattr(group, f"do_{name}", None)) is not None:
            action: Action = found
            return action
    raise AssertionError(f"the command /{name} has no function")


ACTIONS = {command.name: _action(command.name) for command in COMMANDS}


async def command(session: Conversation, typed: Typed) -> None:
    """Do what was typed."""
    await ACTIONS[typed.command.name](session, typed.argument)
