"""Imports of exports that somebody has changed, into a database in which others live.

Such a file is refused, and says where; or it is imported, and then the database is sound, nobody else's threads and no
user have changed, and no tool runs because of it.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from byssus import Agent, Model, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import AnswerNeeded, InputError, NothingToResume, QuotaExceeded, ThreadInactive
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool
from byssus.values.thread_key import ThreadKey
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import expect, judge
from tests.crash.stage.mutations import mutated
from tests.support.exports import fill

_IMPORTS = 40  # in a round
_WHERE = re.compile(r"\bline \d+|\bthread\b|\buser\b|\bas_id\b|\bempty\b")


def imports(chance: random.Random, directory: Path, place: Place) -> None:
    """Exports are mutated and imported as they come from strangers."""
    source = Place(str(directory / "source"))
    Path(source.directory).mkdir()
    seed = chance.random()

    async def act(line: Line) -> None:
        own = random.Random(seed)
        exports = await _exports(source)
        async with place.checkpointer() as cp:
            before = await _settle(cp)
            for number in range(_IMPORTS):
                lines = mutated(own.choice(exports), own.choice(exports), own)
                Path(directory / "last.jsonl").write_bytes(b"\n".join(_bytes(each) for each in lines))
                with line.trying(f"import {number}"):
                    await _import(cp, lines, own)
                expect(await _others(cp) == before, "an import has changed what is somebody else's", number)
                if number % 10 == 9:
                    problems = (await cp.check())["problems"]
                    expect(not problems, "check is not content after an import", number, problems[:3])

    with Actor("importer", act) as importer:
        importer.finish()
    refused = importer.lines("refused")
    expect(all(each["kind"] == "InputError" for each in refused), "refused with another error", refused)
    vague = [each["text"] for each in refused if not _WHERE.search(each["text"])]
    expect(not vague, "a refusal does not say where", vague[:3])
    judge(place, {"kept": ["mine"]})


def _bytes(line: str | bytes) -> bytes:
    return line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")


async def _exports(source: Place) -> list[list[str]]:
    async with source.checkpointer() as cp:
        names = await fill(cp)
        exports = [[line async for line in cp.export_thread(name)] for name in names]
        return [*exports, [line async for line in cp.export_user("alice")]]


async def _settle(cp: Checkpointer) -> Any:
    """Somebody lives here, with threads, a session, a memory and a quota."""
    await cp.create_user("Victim", user_id="victim", quota_total=1_000)
    await cp.append("kept", UserMessage("mine"))
    await cp.create_session("victim", session_id="victims-session")
    await cp.save_message("victims-session", "user", "private")
    await cp.append(ThreadKey("victim", "memory"), UserMessage("remembered"))
    return await _others(cp)


async def _others(cp: Checkpointer) -> Any:
    """All that is somebody's: users with their quotas, their sessions, their memories, and a thread of nobody."""
    users = await cp.list_users()
    owned = [await cp.list_user_sessions(user["id"]) for user in users]
    memories = await cp.store.read(lambda tx: tx.all("SELECT namespace, id FROM threads WHERE namespace <> ''"))
    kept = [await cp.load(thread) for thread in ("kept", "victims-session", ThreadKey("victim", "memory"))]
    return (
        users,
        owned,
        sorted(memories),
        [thread and [repr(message) for message in thread.messages] for thread in kept],
    )


async def _import(cp: Checkpointer, lines: list[str | bytes], chance: random.Random) -> None:
    """Import it under a name of its own, where that is possible, and use it as its finder would."""
    as_id = chance.choice([None, f"imported-{chance.random()}"])
    try:
        names = await cp.import_from(lines, as_id)
    except InputError:
        if as_id is None:
            raise
        names = await cp.import_from(lines)  # there may be several threads in it
    ran: Counter[str] = Counter()
    for name in names:
        await _use(cp, name, _tools(lines, ran), chance)
    expect(not ran, "an import has run a tool", dict(ran))
    for name in names:
        await cp.delete_thread(name)


def _tools(lines: list[str | bytes], ran: Counter[str]) -> list[Tool[..., Any]]:
    """All tools that the file speaks of; each of them counts its runs."""
    names: set[str] = set()
    for line in lines:
        found = re.findall(rb'"name":\s*"(\w{1,60})"', _bytes(line))
        names.update(name.decode("ascii", "ignore") for name in found)

    def made(name: str) -> Tool[..., Any]:
        def act(path: str = "", n: int = 0, number: int = 0) -> str:
            ran[name] += 1
            return "ran"

        return Tool(act, name=name, recovery="retry")

    return [made(name) for name in sorted(names) if name]


async def _use(cp: Checkpointer, name: str, tools: list[Tool[..., Any]], chance: random.Random) -> None:
    await cp.load(name)
    provider = ScriptedProvider(itertools.repeat("fine", 20))
    agent = Agent(provider=provider, model=Model("m"), tools=tools, checkpointer=cp, thread_id=name)
    try:
        await (agent.resume() if chance.random() < 0.5 else agent.prompt("what is this?"))
    except (AnswerNeeded, NothingToResume, QuotaExceeded, ThreadInactive):
        return
