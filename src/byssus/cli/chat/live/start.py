"""Opens the chat that draws, and ends it: the database, the signals, and what stands in the terminal before it."""

from __future__ import annotations

import argparse
import asyncio
import signal

from byssus.cli import database, ending
from byssus.cli.chat import plain
from byssus.cli.chat.agents import AgentSource
from byssus.cli.chat.live.actions import do
from byssus.cli.chat.live.opening import found_busy, open_thread
from byssus.cli.chat.live.printed import to_transcript
from byssus.cli.chat.live.session import Conversation
from byssus.cli.screen import signals, terminal

_HUNG_UP = 128 + signal.SIGHUP  # as a shell reports it


def run(args: argparse.Namespace, source: AgentSource) -> int:
    """Talk until a person leaves."""
    checkpointer = database.checkpointer_of(args)

    async def main() -> int:
        async with checkpointer as cp:
            session = Conversation(args, source, cp)
            session.command = lambda typed: do.command(session, typed)
            session.opened = lambda: open_thread(session)
            session.found_busy = lambda: found_busy(session)
            if source.is_local:
                session.view.lines(
                    "note",
                    "A small embedded model is speaking: it needs no key and no network, and its answers are weak.",
                    f"For a real one: {plain.switch(args)}",
                )
            _end_with(session)
            with to_transcript(session.view.printed):
                return await session.talk()

    with terminal.keys_to_ourselves():
        code = ending.closed_last(asyncio.Runner()).run(main())
    if code == _HUNG_UP:
        signals.outlive_terminal()
        terminal.abandon_output()  # else Python reports the lost output at exit
    return code


def _end_with(session: Conversation) -> None:
    """SIGTERM and a lost terminal end the chat in good order: the run is stopped, and what was streamed is kept."""

    def leave(number: int) -> None:
        if number == signal.SIGHUP:
            session.screen.lose_terminal()
        session.leave(128 + number)

    signals.on_end(leave)
