"""What checkpoints cost while a thread grows: bytes and time, against whole histories in plain SQL; lists and forks.

`--database postgres` does the same there. `--only turns` (or agent, put, lists, threads, forks, tails) does a part.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.growth_peers import Database, database, payload, rows, text, turn
from bench.measure import alternate, report
from byssus import Agent, Model
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata
from byssus.messages import AssistantMessage, UserMessage
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log.threads import UNLEASED, MessageRow
from byssus.queries.versions import putting
from byssus.queries.versions.checkpoints import NewCheckpointRow
from byssus.store.database import Tx
from byssus.threads.encoding import message_row
from byssus.values import clock
from byssus.values.thread_key import ThreadKey

TURNS = 800
EDGE = 50  # so many turns are the start, and the end
MANY_CHECKPOINTS = 10_000
MANY_THREADS = 100_000
LONG = 100_000
DEPTH = 50
FORKED = 2_000  # messages of the deepest fork
TAILS = 400
NOISE = 1.15


class Bench:
    def __init__(self, where: Database, runner: asyncio.Runner) -> None:
        self.where = where
        self.run = runner.run
        self._open: dict[str, Checkpointer] = {}

    def open(self, name: str) -> Checkpointer:
        self._open[name] = self.run(self.where.new(name).open())
        return self._open[name]

    def close(self, name: str) -> int:
        """How many bytes it has left on the disk."""
        self.run(self._open.pop(name).close())
        return self.where.size(name)

    def timed(self, times: int, work: Callable[[], Awaitable[object]]) -> float:
        """Seconds for one of them: the median."""

        async def go() -> float:
            taken = []
            for _ in range(times):
                started = time.perf_counter()
                await work()
                taken.append(time.perf_counter() - started)
            return statistics.median(taken)

        return self.run(go())

    def compared(self, *works: Callable[[], Awaitable[object]]) -> list[float]:
        """The same for several, in turns."""
        return alternate(9, *(functools.partial(self.timed, 50, work) for work in works))


def _both(one: float, other: float) -> str:
    return f"{one * 1e6:,.0f} us, {other * 1e6:,.0f} us"


# --- turns ------------------------------------------------------------------------------------------------------------


def turns(bench: Bench) -> None:
    """800 turns, and each is put with all messages so far; the same with whole histories."""
    conversation = [message for _ in range(TURNS) for message in turn()]
    cp = bench.open("turns")
    size = payload(conversation)

    async def ours() -> list[float]:
        return [await _seconds(cp.put(_checkpoint("t", n, conversation[: 2 * n]))) for n in range(1, TURNS + 1)]

    taken = bench.run(ours())
    total = bench.close("turns")
    whole_put = bench.where.whole_history()
    whole = []
    for n in range(1, TURNS + 1):
        started = time.perf_counter()
        whole_put(n, conversation[: 2 * n])
        whole.append(time.perf_counter() - started)
    whole_total = bench.where.whole_size()
    report(
        f"{TURNS} turns put: bytes on disk against payload",
        f"{total / 1e6:.1f} MB, whole {whole_total / 1e6:.0f} MB",
        total / size,
        2,
        at_least=False,
    )
    print(f"  (whole histories: {whole_total / size:.0f} x the payload of {size / 1e6:.2f} MB)")
    print(f"  put of the whole list, first turns {_first(taken)}, last {_last(taken)}; sum {sum(taken):.1f} s")
    print(f"  whole histories:       first turns {_first(whole)}, last {_last(whole)}; sum {sum(whole):.1f} s")


def _checkpoint(thread: str, step: int, messages: Sequence[Any]) -> Checkpoint:
    parent = f"c{step - 1}" if step > 1 else None
    return Checkpoint(
        CheckpointMetadata(thread, f"c{step}", step, parent, summary="a turn"), list(messages), {"step": step}
    )


async def _seconds(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def _first(taken: list[float]) -> str:
    return _milliseconds(taken[:EDGE])


def _last(taken: list[float]) -> str:
    return _milliseconds(taken[-EDGE:])


def _milliseconds(taken: list[float]) -> str:
    return f"{statistics.median(taken) * 1e3:.2f} ms"


def agent(bench: Bench) -> None:
    """Turns that append, with a checkpoint in the commit of the reply: as the agent's own, and by the agent."""
    _turns_of(bench, "pointer", "append and point", _pointing)
    _turns_of(bench, "agent", "agent with checkpoints", _prompting("turn"))
    _turns_of(bench, "bare", "agent without", _prompting(None))


Turns = Callable[[Checkpointer, str], Callable[[], Awaitable[object]]]


def _turns_of(bench: Bench, name: str, what: str, turns_of: Turns) -> None:
    cp = bench.open(name)
    long = turns_of(cp, "long")
    bench.timed(TURNS - EDGE, long)

    def at_start() -> float:
        fresh = turns_of(cp, f"short-{clock.new_id()}")
        bench.timed(5, fresh)  # the first one makes the thread
        return bench.timed(EDGE, fresh)

    early, end = alternate(7, at_start, lambda: bench.timed(EDGE, long))
    report(f"{what}: turn {TURNS} against turn 1", _both(end, early), end / early, NOISE, at_least=False)
    bench.close(name)
    cp = bench.open(f"{name}_size")
    bench.timed(TURNS, turns_of(cp, "t"))
    size = bench.run(_read(cp, _body_bytes))
    total = bench.close(f"{name}_size")
    report(f"{what}: bytes against payload", f"{total / 1e6:.1f} MB", total / size, 2, at_least=False)


def _body_bytes(tx: Tx) -> int:
    row = tx.one("SELECT SUM(LENGTH(body)) FROM messages")
    assert row is not None
    return int(row[0])


def _pointing(cp: Checkpointer, thread: str) -> Callable[[], Awaitable[object]]:
    """The two commits of a prompt, without an agent around them."""

    async def one() -> None:
        await cp.append(thread, UserMessage(text(1000)))
        await cp.store.write(_reply, thread, message_row(AssistantMessage(text(1000))), _new(clock.new_id()))

    return one


def _reply(tx: Tx, thread: str, message: MessageRow, new: NewCheckpointRow) -> None:
    putting.append(tx, ThreadKey("", thread), [message], new=new, by=UNLEASED)


def _new(name: str) -> NewCheckpointRow:
    return NewCheckpointRow(name, 0, None, '{"tags":[],"summary":"a turn"}', "{}")


def _prompting(every: str | None) -> Turns:
    def turns_of(cp: Checkpointer, thread: str) -> Callable[[], Awaitable[object]]:
        provider = ScriptedProvider([text(1000)] * (TURNS * 2))
        options: dict[str, Any] = {"checkpoint_every": every}
        one = Agent(provider=provider, model=Model("scripted"), checkpointer=cp, thread_id=thread, **options)
        return lambda: one.prompt(text(1000))

    return turns_of


def put(bench: Bench) -> None:
    """A put whose messages the thread has already, against reading them and comparing what is given with them."""
    plain = [message for _ in range(TURNS) for message in turn()]
    _put(bench, "plain", plain, plain)
    typed = [(UserMessage if m["role"] == "user" else AssistantMessage)(m["content"]) for m in plain]
    _put(bench, "typed", typed, plain)


def _put(bench: Bench, name: str, messages: Sequence[Any], values: Sequence[Any]) -> None:
    cp = bench.open(name)
    steps = itertools.count(1)
    bench.run(cp.put(_checkpoint("t", next(steps), messages)))
    read = bench.where.bodies(name)

    def raw() -> float:
        started = time.perf_counter()
        same = [json.dumps(m, separators=(",", ":")) == body for m, body in zip(values, read(), strict=True)]
        taken = time.perf_counter() - started
        assert len(same) == len(values)
        return taken

    base, taken, short = alternate(
        9,
        raw,
        lambda: bench.timed(3, lambda: cp.put(_checkpoint("t", next(steps), messages))),
        lambda: bench.timed(3, lambda: cp.put(_checkpoint("u", next(steps), messages[:2]))),
    )
    figure = f"{taken * 1e3:.1f} ms, raw {base * 1e3:.1f} ms"
    report(f"put of {len(messages):,} known messages, {name}", figure, taken / base, 2, at_least=False)
    print(f"  (of 2 messages: {short * 1e3:.2f} ms)")
    bench.close(name)


# --- lists ------------------------------------------------------------------------------------------------------------


def lists(bench: Bench) -> None:
    """The checkpoints of a thread with many, and of one with few."""
    cp = bench.open("lists")
    lengths = (("few", 100), ("many", MANY_CHECKPOINTS))
    for name, count in lengths:
        for start in range(0, count, 500):
            bench.run(_written(cp, _steps, name, min(500, count - start)))
    bench.where.settle("lists")
    for what, limit in (("list_checkpoints(limit=100)", 100), ("the metadata of the latest", 1)):
        many, few = bench.compared(
            functools.partial(cp.list_checkpoints, "many", limit), functools.partial(cp.list_checkpoints, "few", limit)
        )
        report(f"{what} of {MANY_CHECKPOINTS:,} against 100", _both(many, few), many / few, NOISE, at_least=False)
    early = {name: bench.run(cp.list_checkpoints(name, 1, count - 5))[0].checkpoint_id for name, count in lengths}
    many, few = bench.compared(*(functools.partial(cp.get, early[name], name) for name in ("many", "few")))
    figure = _both(many, few)
    report(f"get of the fifth of {MANY_CHECKPOINTS:,} against 100", figure, many / few, NOISE, at_least=False)
    forked = [bench.timed(9, functools.partial(cp.fork, name, at=50)) for name in ("many", "few")]
    print(f"  (a fork at seq 50 of them: {_both(*forked)})")
    bench.close("lists")


async def _written(cp: Checkpointer, query: Callable[..., Any], *args: Any) -> None:
    await cp.store.write(query, *args)


def _steps(tx: Tx, thread: str, count: int) -> None:
    for _ in range(count):
        _reply(tx, thread, MessageRow("x", "user", '{"role":"user"}'), _new(clock.new_id()))


def many_threads(bench: Bench) -> None:
    """50 of many threads, and 50 of few."""
    few, many = bench.open("few"), bench.open("many")
    for cp, count in ((few, 1_000), (many, MANY_THREADS)):
        for start in range(0, count, 500):
            bench.run(_written(cp, _thread_each, start, 500))
    bench.where.settle("few")
    bench.where.settle("many")
    for what, queries in (
        ("list_threads(50)", (many.list_threads, few.list_threads)),
        ("threads(50)", (many.threads, few.threads)),
    ):
        long, short = bench.compared(*(functools.partial(query, 50) for query in queries))
        report(f"{what} of {MANY_THREADS:,} against 1,000", _both(long, short), long / short, 2, at_least=False)
    bench.close("few")
    bench.close("many")


def _thread_each(tx: Tx, start: int, count: int) -> None:
    for n in range(start, start + count):
        _steps(tx, f"t{n}", 1)


# --- forks ------------------------------------------------------------------------------------------------------------


def forks(bench: Bench) -> None:
    """A fork of a fork of a fork, against a plain thread with as many messages; and what a fork writes."""
    cp = bench.open("forks")
    each = FORKED // DEPTH

    async def grow() -> None:
        await cp.append("plain", _messages(FORKED))
        for _ in range(DEPTH - 1):
            await cp.store.write(_point, "plain")
        await cp.append("f1", _messages(each))
        for depth in range(2, DEPTH + 1):
            await cp.store.write(_point, f"f{depth - 1}")
            await cp.fork(f"f{depth - 1}", new_id=f"f{depth}")
            await cp.append(f"f{depth}", _messages(each))

    bench.run(grow())
    bench.where.settle("forks")
    deepest = f"f{DEPTH}"

    async def load(name: str) -> None:
        thread = await cp.load(name)
        assert thread is not None
        assert len(thread.messages) == FORKED

    plain, deep = alternate(
        15, lambda: bench.timed(3, lambda: load("plain")), lambda: bench.timed(3, lambda: load(deepest))
    )
    figure = f"{deep * 1e3:.1f} ms, plain {plain * 1e3:.1f} ms"
    report(f"load of {FORKED:,} messages at depth {DEPTH}", figure, deep / plain, 2, at_least=False)
    for what, work in (
        ("list_checkpoints", cp.list_checkpoints),
        ("put", lambda name: cp.put(Checkpoint(CheckpointMetadata(name, step=2 * DEPTH)))),
        ("append", lambda name: cp.append(name, UserMessage("x"))),
    ):
        deep, plain = bench.compared(functools.partial(work, deepest), functools.partial(work, "plain"))
        print(f"  ({what} there: {_both(deep, plain)}, {deep / plain:.1f} x)")
    _forks_of_length(bench, cp)
    bench.close("forks")


def _forks_of_length(bench: Bench, cp: Checkpointer) -> None:
    async def fill() -> None:
        await cp.append("short", _messages(10))
        for _ in range(LONG // 1_000):
            await cp.append("long", _messages(1_000))

    bench.run(fill())
    written, middle = [], []
    for name, count in (("short", 10), ("long", LONG)):
        before = bench.run(_read(cp, rows))
        bench.run(cp.fork(name))
        written.append(bench.run(_read(cp, rows)) - before)
        middle.append(bench.timed(9, functools.partial(cp.fork, name, at=count // 2)))
    figure = f"{written[1]} rows, {written[0]} rows"
    report(f"rows of a fork at {LONG:,} messages, at 10", figure, written[1] / written[0], 1, at_least=False)
    long, short = bench.compared(functools.partial(cp.fork, "long"), functools.partial(cp.fork, "short"))
    report(f"a fork at {LONG:,} messages against one at 10", _both(long, short), long / short, NOISE, at_least=False)
    print(f"  (at a seq in the middle: {_both(middle[1], middle[0])})")


def _messages(count: int) -> list[UserMessage]:
    return [UserMessage(text(300)) for _ in range(count)]


async def _read(cp: Checkpointer, query: Callable[..., Any]) -> Any:
    return await cp.store.read(query)


def _point(tx: Tx, thread: str) -> None:
    putting.append(tx, ThreadKey("", thread), [], new=_new(clock.new_id()), by=UNLEASED)


# --- an ephemeral last message ----------------------------------------------------------------------------------------


def tails(bench: Bench) -> None:
    """Each put replaces the last message of the one before, and adds one: every one of them diverges."""
    cp = bench.open("tails")
    kept = [{"role": "user", "content": text(1024)} for _ in range(TAILS)]
    gone = [{"role": "system", "content": text(1024)} for _ in range(TAILS)]

    async def grow() -> list[float]:
        return [await _seconds(cp.put(_checkpoint("t", n, [*kept[:n], gone[n - 1]]))) for n in range(1, TAILS + 1)]

    taken = bench.run(grow())
    segments = bench.run(_read(cp, _segments))
    read = bench.timed(9, lambda: cp.get(f"c{TAILS}", "t"))
    total = bench.close("tails")
    size = payload(kept) + payload(gone)
    print(f"  {TAILS} puts, each with another last message: {segments:,} segments ({segments / TAILS:.1f} a put);")
    print(f"  first {_first(taken)}, last {_last(taken)}; get of the last {read * 1e3:.2f} ms")
    report("ephemeral last message: bytes against payload", f"{total / 1e6:.1f} MB", total / size, 2, at_least=False)


def _segments(tx: Tx) -> int:
    row = tx.one("SELECT COUNT(*) FROM segments")
    assert row is not None
    return int(row[0])


PARTS = {
    "turns": turns,
    "agent": agent,
    "put": put,
    "lists": lists,
    "threads": many_threads,
    "forks": forks,
    "tails": tails,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    with database(args.database) as where, asyncio.Runner() as runner:
        for name, part in PARTS.items():
            if args.only in (None, name):
                part(Bench(where, runner))


if __name__ == "__main__":
    main()
