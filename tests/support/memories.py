"""Memories of every kind for a test, and what is in them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from byssus.memory import InMemoryMemory, MemoryBase, Msg, PostgresMemory, SQLiteMemory
from byssus.memory.stored import StoredMemory
from tests.support import forked
from tests.support.databases import DATABASES, Database

T = TypeVar("T")

KINDS = ("in_memory", *DATABASES)


def stored(database: Database, user_id: str | None = None, session_id: str | None = None, **options: Any) -> Any:
    """A new memory on a database, not open yet. A second one stands for another process."""
    kind: Any = SQLiteMemory if database.system == "sqlite" else PostgresMemory
    return kind(database.place, user_id, session_id, **options)


class Driven:
    """A memory without the awaits: each of its methods, run to the end."""

    def __init__(self, memory: MemoryBase, runner: asyncio.Runner) -> None:
        self.memory, self._runner = memory, runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.memory, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            return self._runner.run(answer) if inspect.iscoroutine(answer) else answer

        return call if callable(method) else method

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(doing)

    @property
    def is_stored(self) -> bool:
        return isinstance(self.memory, StoredMemory)

    def again(self) -> Driven:
        """The same memory as somebody else sees it who comes later: closed, and opened anew if it lasts."""
        if isinstance(self.memory, StoredMemory):
            self._runner.run(self.memory.close())
            self.memory = _like(self.memory)
        return self


def _like(memory: StoredMemory) -> StoredMemory:
    kind: Any = type(memory)
    made: StoredMemory = kind(memory.name, memory.user_id, memory.session_id)
    return made


@contextlib.contextmanager
def makers(kind: str, directory: Path) -> Iterator[Callable[[], Driven]]:
    """What makes fresh memories of a kind. Those that last are sessions of one database, as they are in real life."""
    with contextlib.ExitStack() as ends:
        runner = ends.enter_context(asyncio.Runner())
        if kind == "in_memory":
            yield lambda: Driven(InMemoryMemory(), runner)
            return
        database = DATABASES[kind](directory)
        ends.callback(database.drop)
        ends.enter_context(database.store())  # held open, so that to open a memory again costs little
        numbers = itertools.count()
        yield lambda: Driven(stored(database, "ann's", f"trip/{next(numbers)}"), runner)


def msg(text: str | list[Any], name: str | None = None, **options: Any) -> Msg:
    """A message with this text, and with this id if it matters."""
    made = Msg("ann", text, options.pop("role", "user"), **options)
    made.id = made.id if name is None else name
    return made


def msgs(*names: str) -> list[Msg]:
    """Messages of which their ids are all that matters."""
    return [msg(f"text of {name}", name) for name in names]


def ids(found: Sequence[Any]) -> list[str]:
    return [message.id for message in found]


def texts(found: Sequence[Any]) -> list[Any]:
    return [message.content for message in found]


def snapshot(memory: Driven, marks: Sequence[str]) -> Any:
    """All that can be told of a memory."""
    everything = memory.get_memory(prepend_summary=False)
    assert memory.size() == len(everything)
    by_mark = {mark: ids(memory.get_memory(mark, prepend_summary=False)) for mark in marks}
    without = {mark: ids(memory.get_memory(None, mark, prepend_summary=False)) for mark in marks}
    shown = texts(memory.get_memory(mark="no such mark"))  # the summary alone
    return [message.to_dict() for message in everything], by_mark, without, memory.compressed_summary(), shown


def kept(database: Database, session_id: str | None = "s", user_id: str | None = "ann") -> list[Any]:
    """What somebody finds who comes later."""

    async def main() -> list[Any]:
        async with stored(database, user_id, session_id) as memory:
            return texts(await memory.get_memory())

    return asyncio.run(main())


# --- other processes --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
_PREFACE = """
import asyncio, os, signal, sys
from byssus.memory import Msg, PostgresMemory, SQLiteMemory

def memory(session):
    return (PostgresMemory if "://" in sys.argv[1] else SQLiteMemory)(sys.argv[1], "ann", session)

def msg(text, name, marks=None):
    made = Msg("ann", text, "user")
    made.id = name
    return made

def say(text):
    os.write(1, f"{text}\\n".encode())

def ready():
    say("ready")
    sys.stdin.readline()

"""


def child(database: Database, program: str, *args: object) -> forked.Process:
    """A process with a program that has `memory(session)`, `msg`, `say` and `ready` for its use."""
    command = ["-W", "error", "-c", _PREFACE + textwrap.dedent(program), database.place, *map(str, args)]
    pipe = forked.PIPE
    return forked.Process(command, env=os.environ, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)


def outcome(process: forked.Process) -> tuple[int, str, str]:
    """How a process ended, and what it said and complained of."""
    said, complaints = process.communicate(timeout=60)
    return process.wait(), said, complaints


@contextlib.contextmanager
def children(database: Database, program: str, count: int) -> Iterator[list[forked.Process]]:
    """Several of them, numbered; all are ready, and each begins when it is told. None outlives the test."""
    made = [child(database, program, number) for number in range(count)]
    try:
        for process in made:
            hear(process, "ready")
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate()


def hear(process: forked.Process, expected: str | None = None) -> str:
    """The next line that it says."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if expected not in (None, line):
        process.kill()
        raise AssertionError((line, process.communicate()[1]))
    return line


def tell(*processes: forked.Process) -> None:
    """Let them begin."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def released() -> None:
    """Wait until all that was let go of by the collector is closed."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "byssus-release":
            thread.join()


TOLD = [
    Msg("ann", "how is it?", "user"),
    Msg(
        "bot",
        [
            {"type": "text", "text": "let me look"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1]}},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
        ],
        "assistant",
    ),
    Msg("system", [{"type": "tool_result", "id": "c1", "name": "look", "output": "seen one"}], "system"),
    Msg(
        "system",
        [{"type": "tool_result", "id": "c2", "name": "look", "output": [{"type": "text", "text": "seen two"}]}],
        "system",
    ),
    Msg("system", "be brief", "system"),
    Msg("bot", "all is well", "assistant"),
]
