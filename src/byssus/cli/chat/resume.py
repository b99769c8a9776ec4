"""`byssus resume [THREAD]`: finish the runs that a crash, a power cut or a deployment has interrupted."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from typing import Any

from byssus import AssistantMessage, ToolCall, ToolResultMessage
from byssus.checkpointer import Checkpointer
from byssus.cli import database, ending
from byssus.cli.chat import agents
from byssus.cli.chat.agents import AgentSource, NoModel
from byssus.cli.ids import known_thread
from byssus.cli.screen import terminal
from byssus.cli.subcommand import add
from byssus.cli.words import in_words, options_for
from byssus.errors import ByssusError, InputError, MissingExtra
from byssus.values.results import RunResult

_MOST = 60  # characters of an answer
_LOOK = 100  # messages, among which are the open calls of a thread


def add_to(commands: Any) -> None:
    more = (
        "Without THREAD, all interrupted threads are finished, most recently updated first, one line each. A tool that "
        "ran is not run again. The exit code is 1 if one of them failed; the others are finished all the same."
    )
    parser = add(commands, "resume", _run, more)
    parser.add_argument(
        "thread", metavar="THREAD", nargs="?", help="only this thread, also after an answer or a failure"
    )
    parser.add_argument("--lift", action="store_true", help="lift the quarantine of THREAD first")
    agents.add_options(parser)


def _run(args: argparse.Namespace) -> int:
    if args.lift and args.thread is None:
        raise InputError("--lift needs the thread: byssus resume THREAD --lift; 'byssus threads' shows which ones")
    cp = database.existing_checkpointer_of(args)
    runner = ending.closed_last(asyncio.Runner())
    runner.run(cp.open())
    try:
        threads = runner.run(_threads(cp, args.thread, lift=args.lift))
        if not threads:  # and no model or app is needed to say so
            terminal.remark("No run was interrupted.\n")
            return 0
        source = _source(args, runner, cp, threads)  # outside the event loop: an app may run one while it loads
        finished = [runner.run(_is_finished(source, cp, thread)) for thread in threads]
    finally:
        runner.run(cp.close())
    return 0 if all(finished) else 1


async def _threads(cp: Checkpointer, thread_id: str | None, *, lift: bool) -> list[str]:
    """The threads to resume. Those in quarantine are named and left out, unless one is lifted."""
    if thread_id is not None:
        known = await known_thread(cp, thread_id)
        if lift and not await cp.lift_quarantine(known):
            terminal.remark(f"Thread {known!r} is not quarantined.\n")
        return [known]
    for each in await cp.quarantined():
        how = f"'byssus resume {each.thread_id} --lift' resumes it"
        terminal.remark(f"Thread {each.thread_id!r} is quarantined and left alone; {how}.\n")
    return await _interrupted(cp)


def _source(args: argparse.Namespace, runner: asyncio.Runner, cp: Checkpointer, threads: list[str]) -> AgentSource:
    """Where the agents come from. Without a model, an app is the way out for a thread that needs its tools."""
    try:
        return agents.source_of(args)
    except (MissingExtra, NoModel) as error:
        for thread_id in threads:
            if tools := runner.run(_open_tools(cp, thread_id)):
                named = ", ".join(map(repr, tools))
                raise InputError(
                    f"thread {thread_id!r} has open calls of {named}, which this agent does not have; add them: byssus "
                    f"resume {shlex.quote(thread_id)} {options_for(tools)}"
                ) from error
        raise


async def _open_tools(cp: Checkpointer, thread_id: str) -> list[str]:
    """The tools whose calls in the last reply have no result yet."""
    thread = await cp.load(thread_id, last=_LOOK)
    calls: dict[str, str] = {}
    for message in thread.messages if thread else ():
        if isinstance(message, AssistantMessage):
            calls = {block.id: block.name for block in message.content if isinstance(block, ToolCall)}
        elif isinstance(message, ToolResultMessage):
            calls.pop(message.tool_call_id, None)
    return sorted(set(calls.values()))


async def _interrupted(cp: Checkpointer) -> list[str]:
    listed = sorted(await cp.unfinished(), key=lambda info: info.updated_at, reverse=True)
    return [info.id for info in listed]


async def _is_finished(source: AgentSource, cp: Checkpointer, thread_id: str) -> bool:
    """Resume one thread and print its line; False if it failed."""
    try:
        agent = await source.agent(cp, thread_id)
        result = await agent.resume()
        result.raise_for_error()
    except ByssusError as error:
        _complain(thread_id, in_words(error, thread_id))
        return False
    print(terminal.line(f"{thread_id}  {_outcome(result)}"), flush=True)
    return result.stop_reason != "aborted"


def _complain(thread_id: str, error: Exception) -> None:
    """One line that names the thread; most errors do so themselves."""
    terminal.complain(error if repr(thread_id) in str(error) else InputError(f"thread {thread_id!r}: {error}"))


def _outcome(result: RunResult[Any]) -> str:
    if result.stop_reason == "waiting":
        return "waits for a person: byssus pending lists the questions"
    if result.stop_reason in ("stop", "stopped"):
        text = " ".join(result.text.split())
        return f"finished  {text[:_MOST]}{'...' * (len(text) > _MOST)}".rstrip()
    return f"ended: {result.stop_reason}"
