"""`byssus schedules`: what makes tasks at given times."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from byssus.checkpointer import Checkpointer
from byssus.cli.ids import known_thread, known_user
from byssus.cli.screen import terminal
from byssus.cli.screen.table import print_table
from byssus.cli.subcommand import add, number, with_thread, work_on
from byssus.cli.work.verbs import Verbs, add_verbs, chosen_verb, json_of, words_for

if TYPE_CHECKING:
    from byssus.storage import ScheduleRow

_VERBS: Verbs = {
    "list": {"user", "limit", "json"},
    "create": {"cron", "every", "zone", "missed", "thread", "user", "priority", "max_retries", "json"},
    "pause": {"json"},
    "resume": {"json"},
    "delete": set(),
}
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def add_to(commands: Any) -> None:
    more = (
        "'list' is what happens without a verb. 'create ID TYPE [PAYLOAD]' takes JSON, and --cron or --every; a "
        "schedule that has this id is changed. 'pause', 'resume' and 'delete' take an id."
    )
    parser = add(commands, "schedules", _run, more, json=True)
    add_verbs(parser, _VERBS)
    parser.add_argument("--limit", type=number, metavar="N", help="list: at most N of them (default: 100)")
    parser.add_argument("--user", metavar="ID", help="list: only schedules of this user; create: the tasks' user")
    parser.add_argument("--cron", metavar="FIELDS", help="create: minute, hour, day, month and weekday: '0 9 * * 1-5'")
    parser.add_argument(
        "--every", metavar="TIME", type=_seconds, help="create: seconds, or a number such as 30m, 6h, 1d"
    )
    parser.add_argument("--zone", metavar="ZONE", help="create: the time zone of --cron, as Europe/Oslo (default: UTC)")
    parser.add_argument(
        "--missed", choices=["skip", "one", "all"], help="create: what becomes of missed ticks (default: one task)"
    )
    parser.add_argument("--thread", metavar="ID", help="create: the thread that the tasks belong to")
    parser.add_argument("--priority", type=int, metavar="N", help="create: higher ones run first (default: 0)")
    parser.add_argument("--max-retries", type=int, metavar="N", help="create: how often a task is tried again")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 90, 30m, 6h or 1d, got {text!r}")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _run(args: argparse.Namespace) -> int:
    verb, words = chosen_verb(args, _VERBS)
    if verb == "list":
        words_for(args, verb, words)
        return _list(args)
    if verb == "create":
        name, task_type, payload = words_for(args, verb, words, "ID", "TYPE", "[PAYLOAD]")
        return _create(args, str(name), str(task_type), {} if payload is None else json_of("the payload", payload))
    (name,) = words_for(args, verb, words, "ID")
    return _move(args, verb, str(name))


def _list(args: argparse.Namespace) -> int:
    limit = args.limit or 100

    async def find(cp: Checkpointer) -> list[ScheduleRow]:
        user = None if args.user is None else await known_user(cp, args.user)
        return await cp.schedules(limit, user_id=user)

    schedules = work_on(args, find)
    if args.json:
        terminal.print_json([with_thread(each) for each in schedules])
    elif schedules:
        _print(schedules, args.utc)
        if len(schedules) == limit:
            terminal.remark(f"(the first {limit}; --limit N shows more)\n")
    else:
        print("There are no such schedules." if args.user else "There are no schedules; 'create' adds one.")
    return 0


def _print(schedules: Sequence[ScheduleRow], utc: bool) -> None:
    rows = [
        (
            each["id"],
            each["type"],
            _rule(each),
            each["missed"],
            each["status"],
            "" if each["next_at"] is None else terminal.when(each["next_at"], utc),
            "" if each["last_at"] is None else terminal.when(each["last_at"], utc),
            each["session_id"] or each["user_id"] or "",
        )
        for each in schedules
    ]
    heads = ("SCHEDULE", "TYPE", "TICKS", "MISSED", "STATUS", "NEXT", "LAST", "FOR")
    print_table(heads, rows, whole=[5, 6])


def _rule(schedule: ScheduleRow) -> str:
    if schedule["cron"] is not None:
        return f"{schedule['cron']} {schedule['zone']}"
    every = schedule["every"] or 0.0
    unit = next((unit for unit in ("d", "h", "m") if every % _UNITS[unit] == 0), "s")
    return f"every {every / _UNITS[unit]:g}{unit}"


def _create(args: argparse.Namespace, name: str, task_type: str, payload: Any) -> int:
    async def create(cp: Checkpointer) -> ScheduleRow:
        return await cp.create_schedule(
            name,
            task_type,
            payload,
            cron=args.cron,
            every=args.every,
            zone=args.zone or "UTC",
            missed=args.missed or "one",
            session_id=None if args.thread is None else await known_thread(cp, args.thread),
            user_id=None if args.user is None else await known_user(cp, args.user),
            priority=args.priority or 0,
            max_retries=3 if args.max_retries is None else args.max_retries,
        )

    return _tell(args, work_on(args, create, creates=True))


def _move(args: argparse.Namespace, verb: str, name: str) -> int:
    if verb == "delete":
        work_on(args, lambda cp: cp.delete_schedule(name))
        return 0
    return _tell(args, work_on(args, lambda cp: (cp.pause_schedule if verb == "pause" else cp.resume_schedule)(name)))


def _tell(args: argparse.Namespace, schedule: ScheduleRow) -> int:
    if args.json:
        terminal.print_json(with_thread(schedule))
    else:
        _print([schedule], args.utc)
    return 0
