r"""Our memories against AgentScope's own InMemoryMemory: the same calls, and the same answers after each of them.

After each call, all that can be read is compared: every message with all of its fields, as JSON, so that 1 and 1.0 and
the order of keys count, too. Several sequences run at once on one database, under names that are alike. How often a
message has a mark can only be seen by taking marks away, so each sequence ends with that.

To run more than `make test` does:
  PYTHONPATH=.venv/agentscope .venv/bin/python -m tests.adapters.agentscope.differential \
    --database sqlite --sequences 5000
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentscope.memory import InMemoryMemory
from agentscope.message import Msg

from tests.adapters.agentscope.sequences import BESIDE, LENGTH, REOPEN, SPOIL, Call, Sequence
from tests.support import postgres

# Makes a memory object for a user and a session; a second one for the same two works on the same data.
Opener = Callable[[str | None, str | None], Any]

AT_ONCE = 8
_FIELDS = ("id", "name", "role", "content", "metadata", "timestamp", "invocation_id")


class Difference(AssertionError):
    """A memory answered otherwise than upstream. The message tells all that led to it, and how to see it again."""


@contextmanager
def sqlite_files(directory: Path) -> Iterator[Opener]:
    from byssus.adapters.agentscope import SQLiteMemory  # noqa: PLC0415 - the oracle works without

    def opener(user: str | None, session: str | None) -> Any:
        return SQLiteMemory(str(directory / "memory.db"), user, session, durability="normal")

    yield opener


@contextmanager
def postgres_schema() -> Iterator[Opener]:
    from byssus.adapters.agentscope import PostgresMemory  # noqa: PLC0415

    server = postgres.server_for_tests()
    place = server.fresh_schema()
    try:
        yield lambda user, session: PostgresMemory(place.dsn, user, session, schema=place.name)
    finally:
        server.drop(place)


async def compare(opener: Opener, *, seed: int, sequences: int, first: int = 0, length: int = LENGTH) -> int:
    """Run sequences until one of them finds a difference, which is raised. Returns how many calls were compared."""
    calls = 0
    for start in range(first, first + sequences, AT_ONCE):
        indexes = range(start, min(start + AT_ONCE, first + sequences))
        done = await asyncio.gather(
            *(_Run(opener, seed, index, length).compare() for index in indexes), return_exceptions=True
        )
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
            calls += outcome
    return calls


def names(index: int) -> tuple[str | None, str | None]:
    """A user and a session. Neighbours share one of the two, or are the same if both are joined."""
    group, place = divmod(index, AT_ONCE)
    user, session = f"u{group}", f"s{group}"
    return [
        (None, session),
        (user, session),
        (user, "main"),
        (f"{user}-main", "main"),
        (user, "main-main"),
        (f"{user}:{session}", "x"),
        (user, f"{session}:x"),
        (session, user),
    ][place]


class _Run:
    """One sequence, on upstream's memory and on one of ours. More than one object may stand for ours."""

    def __init__(self, opener: Opener, seed: int, index: int, length: int) -> None:
        self._opener, self._names = opener, names(index)
        self._seed, self._index = seed, index
        self._random = random.Random(f"choices of {seed}/{index}")
        self._sequence = Sequence(seed, index, length)
        self._oracle = InMemoryMemory()
        self._open = [opener(*self._names)]
        self._made: list[str] = []

    async def compare(self) -> int:
        try:
            for call in self._sequence.calls:
                self._made.append(str(call))
                await self._step(call)
                await self._compare_reads(every_pair=False)
            await self._compare_reads(every_pair=True)
            await self._drain()
        except Difference:
            raise
        except Exception as error:
            raise self._difference(f"raised {error!r}", "nothing of the kind") from error
        finally:
            for memory in self._open:
                await _close(memory)
        return len(self._made)

    async def _step(self, call: Call) -> None:
        if call.method == REOPEN:
            await _close(self._open.pop(0))
            self._open.append(self._opener(*self._names))
        elif call.method == BESIDE:
            self._open.append(self._opener(*self._names))
        elif call.method == SPOIL:
            for message in await self._ours.get_memory():
                _spoil(message)
        else:
            await self._compare_call(call)

    @property
    def _ours(self) -> Any:
        return self._random.choice(self._open)

    async def _compare_reads(self, *, every_pair: bool) -> None:
        marks = self._sequence.marks
        pairs = [(one, other) for one in marks for other in marks]
        reads: list[dict[str, Any]] = [{}]
        for mark in marks:
            reads += [{"mark": mark, "prepend_summary": False}, {"exclude_mark": mark, "prepend_summary": False}]
        for mark, other in pairs if every_pair else [self._random.choice(pairs)]:
            reads.append({"mark": mark, "exclude_mark": other})
        await self._compare_call(Call("size"))
        for kwargs in reads:
            await self._compare_call(Call("get_memory", (), kwargs))

    async def _drain(self) -> None:
        """Take all marks away, one of each message at a time."""
        for mark in [*self._sequence.marks, "spoilt"]:
            await self._compare_call(Call("get_memory", (mark,)))
            while await self._compare_call(Call("update_messages_mark", (None, mark))) != "0":
                await self._compare_call(Call("get_memory", (mark,)))

    async def _compare_call(self, call: Call) -> Any:
        summary = bool(self._oracle._compressed_summary) and call.kwargs.get("prepend_summary", True)
        expected = await _made(call, self._oracle, summary)
        got = await _made(call, self._ours, summary)
        if got != expected:
            raise self._difference(f"{call} {got[0]} {_shown(got[1])}", f"{expected[0]} {_shown(expected[1])}")
        return expected[1]

    def _difference(self, found: str, expected: str) -> Difference:
        user, session = self._names
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(self._made, 1))
        return Difference(
            f"sequence {self._index} of seed {self._seed} (user {user!r}, session {session!r}):\n{steps}\n"
            f"{found}\nupstream: {expected}\n"
            "again: PYTHONPATH=.venv/agentscope .venv/bin/python -m tests.adapters.agentscope.differential"
            f" --seed {self._seed} --only {self._index} --database ..."
        )


async def _made(call: Call, memory: Any, summary: bool) -> tuple[str, str | list[str]]:
    """What a call came to; `summary` says whether a list of messages starts with one."""
    args, kwargs = copy.deepcopy(call.args), copy.deepcopy(call.kwargs)
    passed = ((message for message in args[0]), *args[1:]) if call.once else args
    try:
        answer = await getattr(memory, call.method)(*passed, **kwargs)
    except TypeError:
        return "raised", "TypeError"
    except AttributeError:  # what upstream raises for something that is no message; ours says which type it wants
        return "raised", "TypeError" if call.method == "add" else "AttributeError"
    if call.method == "add" and repr((args, kwargs)) != repr((call.args, call.kwargs)):
        return "changed its arguments to", repr((args, kwargs))
    if call.spoil:
        _spoil([args, kwargs])
    return "gave", _plain(answer, summary) if call.method == "get_memory" else repr(answer)


def _plain(messages: list[Msg], summary: bool) -> list[str]:
    """Messages so that they can be compared. A summary has an id and a time of its own each time."""
    assert type(messages) is list, messages
    assert all(type(message) is Msg for message in messages), messages
    known = {message.id for message in messages[1:]}
    return [
        json.dumps([getattr(message, name) for name in _FIELDS])
        if number or not summary
        else json.dumps([message.name, message.role, message.content, len(message.id), message.id in known])
        for number, message in enumerate(messages)
    ]


def _shown(outcome: str | list[str]) -> str:
    return outcome if isinstance(outcome, str) else "[" + "".join(f"\n    {message}" for message in outcome) + "]"


def _spoil(value: Any) -> None:
    """Change whatever can be changed."""
    if isinstance(value, Msg):
        for part in (value.content, value.metadata):
            _spoil(part)
        value.name, value.role, value.id, value.content = "spoilt", "system", "spoilt", "spoilt"
    elif isinstance(value, dict):
        for part in list(value.values()):
            _spoil(part)
        value["spoilt"] = True
    elif isinstance(value, list | tuple):
        for part in value:
            _spoil(part)
        if isinstance(value, list):
            value.append("spoilt")


async def _close(memory: Any) -> None:
    if hasattr(memory, "close"):
        await memory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare our memories with AgentScope's InMemoryMemory.")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--sequences", type=int, default=5000)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, metavar="INDEX", help="run this sequence alone")
    given = parser.parse_args()
    sequences, first = (given.sequences, 0) if given.only is None else (1, given.only)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="byssus-") as directory:
        opened = sqlite_files(Path(directory)) if given.database == "sqlite" else postgres_schema()
        with opened as opener:
            try:
                calls = asyncio.run(
                    compare(opener, seed=given.seed, sequences=sequences, first=first, length=given.length)
                )
            except Difference as difference:
                sys.exit(str(difference))
    took = time.monotonic() - began
    sys.stdout.write(
        f"{given.database}, seed {given.seed}: {sequences} sequences, {calls} calls, no difference, {took:.0f} s\n"
    )


if __name__ == "__main__":
    main()
