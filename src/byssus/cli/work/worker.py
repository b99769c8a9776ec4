"""`byssus worker`: run the tasks of a database, with the handlers of a program or the agents of an app."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

from byssus import apps
from byssus.checkpointer import checkpointer_for
from byssus.cli import database
from byssus.cli.screen import terminal
from byssus.cli.subcommand import add, count, number
from byssus.config import Config
from byssus.errors import AppFailed, InputError
from byssus.worker import Worker

_EXAMPLE = "byssus worker --app shop.jobs:worker"


def add_to(commands: Any) -> None:
    more = (
        "It runs until Ctrl-C or SIGTERM: then it takes no more tasks, and those that run have a while to end before "
        "they are handed back. Start as many workers as you like. An app that makes agents runs tasks of the type "
        "'agent' in the database that --db names; a Worker of your program knows its own database."
    )
    parser = add(commands, "worker", _run, more)
    parser.add_argument("--app", metavar="MODULE:NAME", help="a Worker of your program, or an app that makes agents")
    parser.add_argument("--agent", metavar="NAME", help="which agent of the app, if it has several")
    parser.add_argument("--concurrency", type=number, metavar="N", help="for an app: tasks at a time (default: 8)")
    parser.add_argument("--until-idle", action="store_true", help="end when no task is ready any more")


def _run(args: argparse.Namespace) -> int:
    worker = _worker(args, database.config_of(args))  # outside the event loop: an app may run one while it loads
    return asyncio.run(_work(worker, args))


def _worker(args: argparse.Namespace, config: Config) -> Worker:
    if not config.app.value:
        raise InputError(f"which tasks can it run? name a Worker or an app: {_EXAMPLE}")
    origin = f"app in {config.app.origin}" if config.app.layer == "file" else config.app.origin
    found = apps.load_object(config.app.value, folder=config.folder, origin=origin)
    if not isinstance(found, Worker):
        # Of several agents, the payload of a task names one.
        app = found if isinstance(found, Mapping) and not config.agent.value else apps.load(config)
        return Worker(database.checkpointer_of(args), concurrency=args.concurrency or 8, app=app)
    for option in ("agent", "concurrency"):
        if getattr(args, option) is not None:
            raise InputError(f"{config.app.value} is a Worker, which knows its own {option}; leave out --{option}")
    _check_database(found, config)
    return found


def _check_database(worker: Worker, config: Config) -> None:
    """Refuse a database that was typed and is another one than the worker's."""
    own = worker.checkpointer.name
    if config.database.layer == "flag" and (typed := checkpointer_for(str(config.database.value)).name) != own:
        raise AppFailed(f"the worker of app {config.app.value!r} works on {own}, not on {typed}; leave out --db")


async def _work(worker: Worker, args: argparse.Namespace) -> int:
    known = worker.knows()
    kinds = f"{count(len(known), 'type')} of tasks ({', '.join(known)})" if known else "no type of tasks"
    terminal.remark(f"This worker knows {kinds} and works on {worker.checkpointer.name}.\n")
    await (worker.drained() if args.until_idle else worker.run())
    return 0
