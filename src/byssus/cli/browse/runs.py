"""`byssus runs|run|unfinished|pending|answer|inbox|steer|follow-up|withdraw|abort`: runs, seen from outside.

Each works on the database alone, so the run may go on in any process, or in none.
"""

from __future__ import annotations

import argparse
import getpass
import json
import shlex
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec

from byssus.checkpointer import Checkpointer
from byssus.cli import database
from byssus.cli.ids import chosen, known_user, whole_id
from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, add_thread, number, work_on
from byssus.cli.words import options_for
from byssus.errors import InputError
from byssus.threads.inbox import Waiting
from byssus.values.decisions import Answer, Approve, Deny, Pending
from byssus.values.results import RunAttempt, RunInfo, RunStep, ToolResult

T = TypeVar("T")


def add_to(commands: Any) -> None:
    parser = add(commands, "runs", _runs, "Newest first.", json=True)
    parser.add_argument("thread", metavar="THREAD", nargs="?", help="only those of this thread")
    parser.add_argument("--limit", type=number, default=50, metavar="N", help="at most N of them (default: 50)")
    more = "Its attempts, messages, model calls with tokens and time, tool calls, and how it ended."
    parser = add(commands, "run", _run, more, json=True)
    parser.add_argument("id", metavar="ID", help="the run's id; 'byssus runs' lists them")
    add(commands, "unfinished", _unfinished, json=True)
    parser = add(commands, "pending", _pending, json=True)
    parser.add_argument("thread", metavar="THREAD", nargs="?", help="only those of this thread")
    parser.add_argument("--user", metavar="ID", help="only those of this user's threads")
    parser.add_argument("--limit", type=number, metavar="N", help="at most N of them, those that wait longest")
    parser = _add_for_thread(commands, "answer", _answer)
    parser.add_argument("call", metavar="CALL", help="the call's id; 'byssus pending' lists them")
    parser.add_argument(
        "answer", choices=["approve", "deny", "result"], help="run it, do not run it, or give its result yourself"
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", help="why it is denied, or the call's result")
    parser.add_argument("--arguments", metavar="JSON", help="approve the call with these arguments instead of its own")
    parser.add_argument("--by", metavar="NAME", help="who answers (default: your login name)")
    _add_for_thread(commands, "inbox", _inbox, json=True)
    for name in ("steer", "follow-up"):
        parser = _add_for_thread(commands, name, _send)
        parser.add_argument("text", metavar="TEXT")
        parser.set_defaults(kind=name)
    parser = _add_for_thread(commands, "withdraw", _withdraw)
    parser.add_argument("message", metavar="ID", help="the message's id; 'byssus inbox' lists them")
    _add_for_thread(commands, "abort", _abort)


def _add_for_thread(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, json: bool = False
) -> argparse.ArgumentParser:
    parser = add(commands, name, run, json=json)
    add_thread(parser)
    return parser


def _with(args: argparse.Namespace, work: Callable[[Checkpointer], Awaitable[T]]) -> T:
    """Do something with the database, and with a thread only if there is such a thread."""
    thread: str | None = getattr(args, "thread", None)
    return work_on(args, work, *([] if thread is None else [thread]))


def _runs(args: argparse.Namespace) -> int:
    listed = _with(args, lambda cp: cp.runs(args.thread, args.limit))
    if args.json:
        terminal.print_json([msgspec.to_builtins(run) for run in listed])
    elif listed:
        rows = [
            (run.id, run.thread_id, run.state, _ending(run), str(run.attempts), terminal.when(run.began_at, args.utc))
            for run in listed
        ]
        print_table(("RUN", "THREAD", "STATE", "STOPPED BY", "ATTEMPTS", "BEGAN"), rows, right=[4], whole=[5])
        if len(listed) == args.limit:
            terminal.remark(f"(the last {args.limit}; --limit N shows more)\n")
    else:
        terminal.remark("There are no runs yet; 'byssus ask' starts one.\n")
    return 0


def _ending(run: RunInfo) -> str:
    reason = run.stop_reason or ""
    return reason if run.error is None else f"{reason} ({run.error.partition(':')[0]})".strip()


def _run(args: argparse.Namespace) -> int:
    async def look(cp: Checkpointer) -> tuple[RunInfo, list[RunAttempt], list[RunStep]]:
        run_id = await whole_id(cp, "run", args.id)
        run = await cp.run(run_id)
        if run is None:
            raise InputError(f"there is no run {args.id!r} in {cp.name}; 'byssus runs' lists them")
        return run, await cp.run_attempts(run_id), await cp.timeline(run_id)

    run, attempts, steps = _with(args, look)
    if args.json:
        about = msgspec.to_builtins({"run": run, "attempts": attempts, "timeline": steps})
        terminal.print_json(about)
        return 0
    facts = {
        "thread": run.thread_id,
        "state": run.state,
        "cause": run.cause,
        "user": run.started_by,
        "key": run.request_key,
        "error": run.error,
    }
    print(terminal.line(f"run {run.id}"))
    for name, value in facts.items():
        if value is not None:
            print(terminal.line(f"{name + ':':<8} {value}"))
    print()
    for step in steps:
        print(terminal.line(f"{terminal.when(step.at, args.utc)}  {step.text}"))
    return 0


def _unfinished(args: argparse.Namespace) -> int:
    listed = _with(args, lambda cp: cp.unfinished())
    if args.json:
        terminal.print_json([info._asdict() for info in listed])
        return 0
    if listed:
        rows = [(info.id, info.title, terminal.when(info.updated_at, args.utc)) for info in listed]
        print_table(("THREAD", "TITLE", "UPDATED"), rows, whole=[2])
        terminal.remark("(to finish them: byssus resume)\n")
    else:
        terminal.remark("No run was interrupted.\n")
    return 0


def _pending(args: argparse.Namespace) -> int:
    async def listed_in(cp: Checkpointer) -> list[Pending]:
        user = None if args.user is None else await known_user(cp, args.user)
        return await cp.pending(args.thread, user=user, limit=args.limit)

    listed = _with(args, listed_in)
    if args.json:
        terminal.print_json([msgspec.to_builtins(call) for call in listed])
        return 0
    for call in listed:
        what = f"{call.tool_name} with {terminal.as_json(call.arguments)}"
        question, *details = call.question.splitlines() or [""]
        more = "  ".join(filter(None, (question, *_terms(call))))
        print(terminal.line(f"{call.thread_id}  {call.call_id}  {call.reason}: {what}  {more}".rstrip()))
        for each in details:  # such as the difference that a write makes
            print(f"    {terminal.line(each)}".rstrip())
    if not listed:
        terminal.remark("Nothing waits for a person.\n")
    return 0


def _terms(call: Pending) -> Iterator[str]:
    """How many people must approve a call, and until when."""
    if call.approvers > 1:
        names = "".join(f", {approval.by}" for approval in call.approvals)
        yield f"({len(call.approvals)} of {call.approvers} approvals{names})"
    if call.expires_at is not None:
        yield f"(expires {call.expires_at[:19]} UTC: {call.default})"


def _answer(args: argparse.Namespace) -> int:
    answer: Answer = args.answer
    if args.arguments is not None:
        if args.answer != "approve":
            raise InputError(f"--arguments goes with 'approve', not with {args.answer!r}")
        answer = Approve(_object(args.arguments))
    if args.answer == "deny" and args.text:
        answer = Deny(args.text)
    elif args.answer == "result":
        if args.text is None:
            raise InputError("what is the result? byssus answer THREAD CALL result TEXT")
        answer = ToolResult(args.text)
    elif args.answer == "approve" and args.text is not None:
        raise InputError(f"'approve' takes no text, got {args.text!r}; to give the call's result, say 'result'")

    waiting: dict[str, str] = {}  # tools, by the ids of their calls

    async def record(cp: Checkpointer) -> bool:
        pending = await cp.pending(args.thread)
        waiting.update({call.call_id: call.tool_name for call in pending})
        call_id = chosen(args.call, [*waiting], "calls")
        asking = [call.thread_id for call in pending if call.call_id == call_id]  # the thread, or a child of it
        thread_id = asking[0] if asking and args.thread not in asking else args.thread
        return await cp.answer(thread_id, call_id, answer, by=args.by or _login_name(), source="cli")

    if _with(args, record):
        more = "" if database.config_of(args).app.value else f" {options_for(waiting.values())}"
        terminal.remark(f"Recorded. To continue the run: byssus resume {shlex.quote(args.thread)}{more}\n")
    else:
        terminal.remark("Recorded. The call needs more approvals: 'byssus pending' shows how many it has.\n")
    return 0


def _login_name() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"--arguments must be a JSON object, for example '{{\"amount\": 5}}': {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"--arguments must be a JSON object with all arguments, got {text:.80}")
    return value


def _inbox(args: argparse.Namespace) -> int:
    listed: list[Waiting] = _with(args, lambda cp: cp.inbox(args.thread))
    if args.json:
        terminal.print_json(
            [
                {"id": item.id, "kind": item.kind, "text": item.message.text, "created_at": item.created_at}
                for item in listed
            ]
        )
        return 0
    for item in listed:
        print(terminal.line(f"{item.id}  {item.kind}: {item.message.text}"))
    if not listed:
        terminal.remark("No messages are queued.\n")
    return 0


def _send(args: argparse.Namespace) -> int:
    if not args.text.strip():
        raise InputError(f"there is no message; write one: byssus {args.kind} {shlex.quote(args.thread)} TEXT")

    async def send(cp: Checkpointer) -> str:
        receipt = await (cp.steer if args.kind == "steer" else cp.follow_up)(args.thread, args.text)
        return receipt.id

    print(_with(args, send))
    return 0


def _withdraw(args: argparse.Namespace) -> int:
    async def withdraw(cp: Checkpointer) -> bool:
        waiting = [item.id for item in await cp.inbox(args.thread)]
        return await cp.withdraw(args.thread, chosen(args.message, waiting, "messages"))

    if not _with(args, withdraw):
        raise InputError(
            f"message {args.message!r} is not queued in thread {args.thread!r}: it was delivered or never sent; "
            f"'byssus inbox {shlex.quote(args.thread)}' lists the queue"
        )
    return 0


def _abort(args: argparse.Namespace) -> int:
    if not _with(args, lambda cp: cp.abort(args.thread)):
        raise InputError(
            f"thread {args.thread!r} has no run in progress; 'byssus threads --state running' lists those that have"
        )
    return 0
