"""`byssus resume [THREAD]`: finish the runs that a crash, a power cut or a deployment has interrupted."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from byssus.checkpointer import Checkpointer
from byssus.cli import agents, database, terminal
from byssus.cli.agents import AgentSource
from byssus.cli.ids import known_thread
from byssus.cli.subcommand import add
from byssus.cli.words import in_words
from byssus.errors import ByssusError, InputError
from byssus.values.results import RunResult

_MOST = 60  # characters of an answer


def add_to(commands: Any) -> None:
    more = (
        "Without THREAD, all interrupted threads are finished, most recently updated first, one line each. A tool that "
        "ran is not run again. The exit code is 1 if one of them failed; the others are finished all the same."
    )
    parser = add(commands, "resume", _run, "finish what was interrupted", more)
    parser.add_argument(
        "thread", metavar="THREAD", nargs="?", help="only this thread, also after an answer or a failure"
    )
    parser.add_argument("--lift", action="store_true", help="lift the quarantine of THREAD first")
    agents.add_options(parser)


def _run(args: argparse.Namespace) -> int:
    if args.lift and args.thread is None:
        raise InputError("--lift needs the thread: byssus resume THREAD --lift; 'byssus threads' shows which ones")
    checkpointer = database.existing_checkpointer_of(args)
    return asyncio.run(_resume(agents.source_of(args), checkpointer, args.thread, lift=args.lift))


async def _resume(source: AgentSource, checkpointer: Checkpointer, thread_id: str | None, *, lift: bool) -> int:
    async with checkpointer as cp:
        threads = await _interrupted(cp) if thread_id is None else [await known_thread(cp, thread_id)]
        if lift and not await cp.lift_quarantine(threads[0]):
            terminal.remark(f"Thread {threads[0]!r} is not quarantined.\n")
        if not threads:
            terminal.remark("No run was interrupted.\n")
        for each in await cp.quarantined() if thread_id is None else []:
            how = f"'byssus resume {each.thread_id} --lift' resumes it"
            terminal.remark(f"Thread {each.thread_id!r} is quarantined and left alone; {how}.\n")
        finished = [await _is_finished(source, cp, thread) for thread in threads]
        return 0 if all(finished) else 1


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
