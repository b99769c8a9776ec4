"""`byssus ask "one question"`: one prompt, one answer on stdout and nothing else.

What is piped in belongs to the prompt: `git diff | byssus ask "Review this."` is one call. The question and its answer
are kept in a thread as everything is: a new one, or the one that `--thread` names.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from typing import Any

from byssus import Agent
from byssus.checkpointer import Checkpointer
from byssus.cli import database, ending
from byssus.cli.chat import agents
from byssus.cli.chat.agents import AgentSource
from byssus.cli.screen import terminal
from byssus.cli.subcommand import add
from byssus.cli.words import in_words
from byssus.errors import ByssusError, InputError
from byssus.events import Event, MessageUpdate, TextDelta
from byssus.values import clock
from byssus.values.results import RunResult

_ID_LENGTH = 12


def add_to(commands: Any) -> None:
    more = "Text that is piped in is part of the question. The exit code is 1 if there was no answer."
    parser = add(commands, "ask", _run, more)
    parser.add_argument(
        "question", metavar="QUESTION", nargs="?", default="", help="the question, or what to do with the piped text"
    )
    parser.add_argument("--thread", metavar="THREAD", help="go on with this thread (default: a new one)")
    agents.add_options(parser)


def _run(args: argparse.Namespace) -> int:
    prompt = _prompt(args.question)
    source = agents.source_of(args)
    checkpointer = database.checkpointer_of(args)
    thread_id = args.thread or f"ask-{clock.new_id()[:_ID_LENGTH]}"
    try:
        result = ending.closed_last(asyncio.Runner()).run(_ask(source, checkpointer, thread_id, prompt))
    except ByssusError as error:
        raise in_words(error, thread_id) from error
    if sys.stderr is not None and sys.stderr.isatty() and args.thread is None:
        terminal.remark(f"(to go on: byssus chat {thread_id})\n")
    return _code(result, thread_id)


def _prompt(question: str) -> str:
    """The question and what was piped in, as one text."""
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    piped = terminal.read_all() if is_piped else ""
    parts = [part for part in (question.strip(), piped.rstrip("\n")) if part.strip()]
    if not parts:
        raise InputError("there is no question; write one: byssus ask 'What is this?', or pipe text: byssus ask < FILE")
    return "\n\n".join(parts)


async def _ask(source: AgentSource, checkpointer: Checkpointer, thread_id: str, prompt: str) -> RunResult[Any]:
    async with checkpointer as cp:
        agent = await source.agent(cp, thread_id)
        if await cp.state(thread_id) == "interrupted":
            terminal.remark(agents.interrupted(thread_id))
        if sys.stdout.isatty():
            return await _shown(agent, prompt)
        result = await agent.prompt(prompt, raise_errors=False)
        if result.text:
            terminal.write(f"{result.text.rstrip()}\n")
        return result


async def _shown(agent: Agent, prompt: str) -> RunResult[Any]:
    """The answer as it arrives, for a person who waits for it."""

    def hear(event: Event) -> None:
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta):
            terminal.write(event.stream_event.delta)

    agent.subscribe(hear)
    result = await agent.prompt(prompt, raise_errors=False)
    terminal.write("\n")
    return result


def _code(result: RunResult[Any], thread_id: str) -> int:
    if result.stop_reason == "waiting":
        terminal.remark(f"A tool call waits for a person: byssus pending {shlex.quote(thread_id)}\n")
        return 1
    result.raise_for_error()
    if result.stop_reason not in ("stop", "stopped"):
        terminal.remark(f"[cut off: {result.stop_reason}]\n")
    return 1 if result.stop_reason == "aborted" else 0
