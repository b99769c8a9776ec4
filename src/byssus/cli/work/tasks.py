"""`byssus tasks`: the tasks of all threads or of one, what happened to a task, and the moves that a person makes."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from byssus.checkpointer import Checkpointer
from byssus.cli.ids import known_thread, known_user, whole_id
from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, number, with_thread, work_on
from byssus.cli.words import in_words
from byssus.cli.work.verbs import Verbs, add_verbs, chosen_verb, json_of, words_for
from byssus.errors import InputError, NotFound

if TYPE_CHECKING:
    from byssus.storage import TaskRow, TaskStepRow

_BAR_WIDTH = 10
_VERBS: Verbs = {
    "list": {"status", "type", "user", "limit", "json"},
    "show": {"json"},
    "create": {"thread", "user", "priority", "max_retries", "at", "deadline", "key", "message", "json"},
    "send": set(),
    **{move: {"json"} for move in ("pause", "resume", "cancel", "retry")},
}


def add_to(commands: Any) -> None:
    more = (
        "'list [THREAD]' is what happens without a verb, highest priority first. 'show ID' prints all of a task, with "
        "its steps and the trace of its error. 'create TYPE [PAYLOAD]' and 'send ID EVENT [VALUE]' take JSON; an event "
        "is what a task may wait for. 'pause', 'resume', 'cancel' and 'retry' take the ids of tasks; a running task is "
        "asked to stop, in whatever process it runs."
    )
    parser = add(commands, "tasks", _run, more, json=True)
    add_verbs(parser, _VERBS)
    parser.add_argument("--status", metavar="STATUS", help="list: only pending, running, paused, failed ... tasks")
    parser.add_argument("--type", metavar="TYPE", help="list: only tasks of this type")
    parser.add_argument("--user", metavar="ID", help="list: only tasks of this user; create: the task's user")
    parser.add_argument("--limit", type=number, metavar="N", help="list: at most N of them (default: 100)")
    parser.add_argument("--thread", metavar="ID", help="create: the thread that the task belongs to")
    parser.add_argument("--priority", type=int, metavar="N", help="create: higher ones run first (default: 0)")
    parser.add_argument("--max-retries", type=int, metavar="N", help="create: how often it is tried again (default: 3)")
    parser.add_argument("--at", metavar="TIME", help="create: not before this time, as 2026-01-31T08:00:00Z")
    parser.add_argument("--deadline", metavar="TIME", help="create: it fails if it has not ended by then")
    parser.add_argument("--key", metavar="KEY", help="create: a task that has this key already is not made again")
    parser.add_argument("--message", metavar="TEXT", help="create: append this message to the thread with it")


def _run(args: argparse.Namespace) -> int:
    verb, words = chosen_verb(args, _VERBS)
    if verb == "list":
        return _list(args, *words)
    if verb == "show":
        (typed,) = words_for(args, verb, words, "ID")
        return _show(args, str(typed))
    if verb == "create":
        task_type, payload = words_for(args, verb, words, "TYPE", "[PAYLOAD]")
        return _create(args, str(task_type), {} if payload is None else json_of("the payload", payload))
    if verb == "send":
        typed, event, value = words_for(args, verb, words, "ID", "EVENT", "[VALUE]")
        return _send(args, str(typed), str(event), value)
    if not words:
        words_for(args, verb, words, "ID")
    return _move(args, verb, words)


# --- list -------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace, typed: str | None = None) -> int:
    limit = args.limit or 100

    async def find(cp: Checkpointer) -> list[TaskRow]:
        thread = None if typed is None else await known_thread(cp, typed)
        user = None if args.user is None else await known_user(cp, args.user)
        return await cp.list_tasks(thread, args.status, limit, user_id=user, task_type=args.type) or []

    tasks = work_on(args, find)
    if args.json:
        terminal.print_json([with_thread(task) for task in tasks])
    elif tasks:
        print_table(
            ("TASK", "THREAD", "TYPE", "STATUS", "PRIORITY", "UPDATED", "NOTE"),
            [_row(task, args.utc) for task in tasks],
            right=[4],
            whole=[5],
        )
        if len(tasks) == limit:
            terminal.remark(f"(the first {limit}; --limit N shows more)\n")
    else:
        is_part = typed or args.status or args.type or args.user
        print("There are no such tasks." if is_part else "There are no tasks; 'byssus tasks create' adds one.")
    return 0


def _row(task: TaskRow, utc: bool) -> tuple[str, ...]:
    updated = terminal.when(task["updated_at"], utc)
    thread, priority = task["session_id"] or "", str(task["priority"])
    return task["id"], thread, task["type"], task["status"], priority, updated, note(task, utc)


def note(task: Mapping[str, Any], utc: bool) -> str:
    """What is worth knowing of a task besides its status, in a few words."""
    if task["status"] in ("failed", "pending") and task["error"] is not None:
        tries = f"try {task['retry_count'] + 1}: " if task["status"] == "pending" else ""
        return terminal.line(f"{tries}{task['error']['type']}: {task['error']['message']}")
    if task["asked"] is not None:
        return f"asked to {task['asked']}"
    if task["waits_for"] is not None:
        return terminal.line(f"waits for {task['waits_for']}")
    if task["status"] == "pending" and task["run_at"] is not None:
        return f"not before {terminal.when(task['run_at'], utc)}"
    return progress(task) if task["status"] in ("running", "paused", "pending") else ""


def progress(task: Mapping[str, Any], columns: int = _BAR_WIDTH) -> str:
    """The progress of a task as a bar; empty if it has told none."""
    share = task["progress"]
    bar = "" if share is None else f"[{'#' * round(share * columns):{columns}}] {share:4.0%} "
    return terminal.line(f"{bar}{task['progress_note'] or ''}").rstrip()


# --- show -------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace, typed: str) -> int:
    async def look(cp: Checkpointer) -> tuple[TaskRow, list[TaskStepRow]]:
        task = await _known_task(cp, typed)
        return task, await cp.task_steps(task["id"])

    task, steps = work_on(args, look)
    if args.json:
        terminal.print_json({**with_thread(task), "steps": steps})
        return 0
    print(terminal.line(f"task {task['id']}"))
    for name, value in _facts(task, args.utc):
        print(terminal.line(f"{name + ':':<10} {value}"))
    if task["error"] is not None:
        print()
        for line in task["error"]["trace"].splitlines():
            print(terminal.line(line))
    if steps:
        print()
        print_table(
            ("STEP", "KIND", "STATUS", "TRIES", "BEGAN", "ENDED", "RESULT"),
            [_step(step, args.utc) for step in steps],
            right=[3],
            whole=[4, 5],
        )
    return 0


def _facts(task: TaskRow, utc: bool) -> Iterator[tuple[str, object]]:
    """What is known of a task, but for its steps and its trace."""
    facts: dict[str, object] = {
        "type": task["type"],
        "status": task["status"] + (f" (asked to {task['asked']})" if task["asked"] else ""),
        "thread": task["session_id"],
        "user": task["user_id"],
        "parent": task["parent_id"],
        "schedule": task["schedule"],
        "key": task["unique_key"],
        "priority": task["priority"],
        "retries": f"{task['retry_count']} of {task['max_retries']}",
        "worker": task["worker"],
        "waits for": task["waits_for"],
        "progress": progress(task) or None,
    }
    times = {
        "created": "created_at",
        "run at": "run_at",
        "deadline": "deadline",
        "started": "started_at",
        "ended": "completed_at",
    }
    row: Mapping[str, Any] = task
    facts |= {name: terminal.when(row[key], utc) for name, key in times.items() if row[key] is not None}
    facts["payload"] = terminal.as_json(task["payload"])
    facts["result"] = None if task["result"] is None else terminal.as_json(task["result"])
    if task["error"] is not None:
        facts["error"] = f"{task['error']['type']}: {task['error']['message']}"
    return ((name, value) for name, value in facts.items() if value is not None)


def _step(step: Mapping[str, Any], utc: bool) -> tuple[str, ...]:
    ended = "" if step["ended_at"] is None else terminal.when(step["ended_at"], utc)
    if step["error"] is not None:
        told = f"{step['error']['type']}: {step['error']['message']}"
    elif step["status"] == "waiting" and step["until"] is not None:
        told = f"until {terminal.when(step['until'], utc)}"
    else:
        told = "" if step["result"] is None else terminal.as_json(step["result"])
    began = terminal.when(step["started_at"], utc)
    return step["name"], step["kind"], step["status"], str(step["attempts"]), began, ended, told


async def _known_task(cp: Checkpointer, typed: str) -> TaskRow:
    task = await cp.get_task(await whole_id(cp, "task", typed))
    if task is None:
        raise NotFound(f"there is no task {typed!r} in {cp.name}; 'byssus tasks' lists them")
    return task


# --- create and move --------------------------------------------------------------------------------------------------


def _create(args: argparse.Namespace, task_type: str, payload: Any) -> int:
    async def create(cp: Checkpointer) -> TaskRow:
        return await cp.create_task(
            None if args.thread is None else await known_thread(cp, args.thread),
            task_type,
            payload,
            args.priority or 0,
            max_retries=3 if args.max_retries is None else args.max_retries,
            run_at=args.at,
            deadline=args.deadline,
            unique_key=args.key,
            user_id=None if args.user is None else await known_user(cp, args.user),
            message=args.message,
        )

    _tell([work_on(args, create, creates=True)], args)
    return 0


def _move(args: argparse.Namespace, verb: str, words: Sequence[str]) -> int:
    """Move each of these tasks. One that cannot be moved keeps none of the others."""
    failed: list[Exception] = []

    async def move(cp: Checkpointer) -> list[TaskRow]:
        moves: dict[str, Callable[[str], Awaitable[TaskRow]]] = {
            "pause": cp.pause_task,
            "resume": cp.resume_task,
            "cancel": cp.cancel_task,
            "retry": cp.retry_task,
        }
        moved = []
        for each in [(await _known_task(cp, word))["id"] for word in words]:
            try:
                moved.append(await moves[verb](each))
            except InputError as error:
                failed.append(error)
        return moved

    _tell(work_on(args, move), args)
    for error in failed:
        terminal.complain(in_words(error))
    return 1 if failed else 0


def _send(args: argparse.Namespace, typed: str, event: str, value: str | None) -> int:
    async def send(cp: Checkpointer) -> bool:
        task = await _known_task(cp, typed)
        return await cp.send_event(task["id"], event, None if value is None else json_of("the event's value", value))

    if not work_on(args, send):
        terminal.remark("Recorded. The task does not wait for it yet: its next wait for it ends at once.\n")
    return 0


def _tell(tasks: Sequence[TaskRow], args: argparse.Namespace) -> None:
    """The id and the status of each."""
    if args.json:
        terminal.print_json([with_thread(task) for task in tasks])
        return
    for task in tasks:
        asked = f", asked to {task['asked']}" if task["asked"] else ""
        print(terminal.line(f"{task['id']}  {task['status']}{asked}"))
