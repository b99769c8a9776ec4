"""Take the power from a recorded scene at many points, open what is left, and say what is wrong with it."""

from __future__ import annotations

import asyncio
import pickle
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import apsw

from byssus import Agent, Model
from byssus.checkpointer import SQLiteCheckpointer, Thread
from byssus.errors import ByssusError
from byssus.messages import Message, UserMessage
from byssus.providers.history import valid_history
from byssus.providers.scripted import ScriptedProvider
from tests.crash.power import Disk, Log, Synced, SyncFailed, Told, write_image
from tests.crash.power_scenes import DATABASE, SHARED, is_whole, quick, slow
from tests.support.histories import flaws

_ROOT = Path(__file__).parents[2]


class Finding(NamedTuple):
    """`kind` is damaged (no sound database), lost (told to somebody, and not there) or garbled (there, but wrong)."""

    kind: str
    point: int
    what: str


def record(scene: str, directory: Path, seed: int, durability: str = "full") -> Log:
    """Play a scene in a process of its own, which is gone when this returns."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "error", "-m", "tests.crash.power_scenes"]
    subprocess.run([*command, scene, str(directory), str(seed), durability], cwd=_ROOT, check=True, timeout=100)
    log: Log = pickle.loads((directory / "log").read_bytes())
    return log


def points_of(log: Log, rng: random.Random, more: int) -> list[int]:
    """Before and after each sync, where most hangs in the air and least, and some points in between."""
    syncs = [position for position, entry in enumerate(log) if isinstance(entry, Synced | SyncFailed)]
    around = {point for position in syncs for point in (position, position + 1)}
    return sorted(around | {rng.randrange(len(log) + 1) for _ in range(more)})


def outages(
    log: Log, points: Iterable[int], directory: Path, seed: object, *, images: int = 1, lies_about: Sequence[str] = ()
) -> list[Finding]:
    """Let the power fail at each of the points, which are in order, `images` times. The first image that is found wrong
    is kept in the directory."""
    findings: list[Finding] = []
    disk, played = Disk(lies_about), 0
    for point in points:
        for entry in log[played:point]:
            disk.play(entry)
        played = point
        for number in range(images):
            place = directory / f"{point}-{number}"
            write_image(disk.outage(random.Random(f"{seed} {point} {number}")), place)
            found = [Finding(kind, point, what) for kind, what in examine(place / DATABASE, log[:point])]
            if findings or not found:
                shutil.rmtree(place)
            findings += found
    return findings


def by_kind(findings: Iterable[Finding]) -> dict[str, int]:
    return dict(Counter(finding.kind for finding in findings))


# --- what is left -----------------------------------------------------------------------------------------------------


def examine(path: Path, log: Log) -> list[tuple[str, str]]:
    """Open a database as its next user does. What is wrong with it, given all that had happened?"""
    told = [entry for entry in log if isinstance(entry, Told)]
    try:
        return asyncio.run(_examine(path, told))
    except (ByssusError, apsw.Error, UnicodeDecodeError) as error:
        return [("damaged", repr(error))]


async def _examine(path: Path, told: list[Told]) -> list[tuple[str, str]]:
    async with SQLiteCheckpointer(path) as cp:
        if flaw := _damage(path):
            return [("damaged", flaw)]
        threads = {name: await cp.load(name) for name in sorted({entry.thread for entry in told})}
        stored = {name: thread.messages if thread else [] for name, thread in threads.items()}
        found = _check_sources(stored, told) + _check_agents(threads, told)
        for name, messages in stored.items():
            if wrong := flaws(valid_history(messages)):
                found.append(("garbled", f"{name}: {wrong}"))
            elif not found and (name == SHARED or name.startswith("agent")):
                await _go_on(cp, name, found)
    return found


def _damage(path: Path) -> str | None:
    connection = apsw.Connection(str(path))
    try:
        if (answer := connection.pragma("integrity_check")) != "ok":
            return str(answer)
        dangling = list(connection.execute("PRAGMA foreign_key_check"))
        return f"foreign keys: {dangling}" if dangling else None
    finally:
        connection.close()


def _id(message: Message) -> str:
    return str(getattr(message, "id", None))


def _check_sources(stored: dict[str, list[Message]], told: list[Told]) -> list[tuple[str, str]]:
    """Who appends waits for each answer: what is there of it is all that was confirmed, and perhaps the next batch."""
    found = []
    confirmed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    open_batches: dict[str, list[list[tuple[str, str]]]] = defaultdict(list)
    for entry in told:
        batch = [(entry.thread, message_id) for message_id in entry.ids]
        if entry.kind == "began":
            open_batches[entry.source].append(batch)
        elif entry.kind == "done":
            confirmed[entry.source] += batch
            open_batches[entry.source].clear()
    for source, attempts in open_batches.items():
        for thread in (source, SHARED):
            there = [_id(m) for m in stored.get(thread, []) if _id(m).split("-")[0] == source]
            due, *possible = (
                [i for where, i in confirmed[source] + batch if where == thread] for batch in ([], *attempts)
            )
            if there[: len(due)] != due:
                kind = "lost" if set(due) - set(there) else "garbled"
                found.append((kind, f"{source} was told of {due} in {thread!r}, there is {there}"))
            elif there != due and there not in possible:
                found.append(("garbled", f"{source} wrote {possible} to {thread!r}, there is {there}"))
    written = [m for messages in stored.values() for m in messages if isinstance(m, UserMessage) and ":" in m.text]
    torn = [_id(message) for message in written if not is_whole(_id(message), message.text)]
    return [*found, ("garbled", f"the texts of {torn} are not what was written")] if torn else found


def _check_agents(threads: dict[str, Thread | None], told: list[Told]) -> list[tuple[str, str]]:
    found = []
    for name in {entry.source for entry in told if entry.kind in ("message", "result")}:
        thread = threads[name]
        there = [_id(message) for message in thread.messages] if thread else []
        messages = [i for entry in told if (entry.kind, entry.source) == ("message", name) for i in entry.ids]
        results = [i for entry in told if (entry.kind, entry.source) == ("result", name) for i in entry.ids]
        if missing := {*messages, *results} - set(there):
            found.append(("lost", f"{name} was told of {sorted(missing)}"))
        elif [i for i in there if i in set(messages)] != messages:
            found.append(("garbled", f"{name} was told of {messages} in this order, there is {there}"))
        if len(set(there)) < len(there):
            found.append(("garbled", f"{name} holds a message twice: {there}"))
    return found


async def _go_on(cp: SQLiteCheckpointer, thread: str, found: list[tuple[str, str]]) -> None:
    """The next user of the thread: it is not in anybody's way, and the model gets a valid history."""
    provider = ScriptedProvider(["here"])
    agent = Agent(provider=provider, model=Model("m"), tools=[quick, slow], checkpointer=cp, thread_id=thread)
    result = await agent.prompt("and now?")
    if result.text != "here":
        found.append(("garbled", f"{thread}: {result.error!r}"))
    if wrong := flaws(provider.requests[0].messages):
        found.append(("garbled", f"{thread}: {wrong} was sent to the model"))
