"""The disk fails under a run, at each of its writes and syncs in turn, and is mended afterwards.

The run ends with an error that names the file, or does not notice at all. Whatever it was told is there, the agent
does not go on from a history that the disk does not have, no tool runs twice, and once the disk is mended both this
agent and another one go on.

For SQLite only: it is in our process, and so is its disk. A Postgres that fails is tried in test_postgres_chaos.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self

import apsw
import pytest

from byssus import Agent, ToolCall, ToolContext, tool
from byssus.checkpointer import SQLiteCheckpointer, Thread
from byssus.errors import NothingToResume, StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreUnusable
from byssus.events import AgentEnd, MessageEnd, ToolExecutionEnd
from byssus.messages import Message, ToolResultMessage, UserMessage
from byssus.providers.history import valid_history
from byssus.providers.scripted import ScriptedProvider
from tests.crash.faults import (
    BROKEN,
    FULL,
    LASTING,
    READ_ONLY,
    STALE,
    Fault,
    failing_reads,
    failing_syncs,
    failing_writes,
)
from tests.support.agents import Heard, check_whole, make, within
from tests.support.databases import made_file
from tests.support.histories import flaws

CALLS = [ToolCall("c1", "small"), ToolCall("c2", "big"), ToolCall("c3", "noting")]
BIG = "b" * 9_000


def ids(messages: list[Message]) -> list[str]:
    return [str(getattr(message, "id", None)) for message in messages]


async def load(cp: SQLiteCheckpointer) -> Thread:
    thread = await cp.load("t")
    assert thread is not None
    return thread


def check_database(path: Path) -> None:
    connection = apsw.Connection(str(path))
    assert connection.pragma("integrity_check") == "ok"
    assert list(connection.execute("PRAGMA foreign_key_check")) == []
    connection.close()


class Story:
    """One run with parallel tools, and what became of it."""

    def __init__(self, cp: SQLiteCheckpointer, path: Path) -> None:
        self.ran: Counter[str] = Counter()
        self.error: StoreError | None = None
        self._cp = cp
        self._path = path
        self._agent, self._provider = self._new_agent()
        self._heard = Heard(self._agent)
        self._replies: Iterator[Any] = iter(["hello", CALLS, "done"])

    def _new_agent(self) -> tuple[Agent, ScriptedProvider]:
        @tool
        async def small() -> str:
            self.ran["c1"] += 1
            return "small"

        @tool
        def big() -> str:
            self.ran["c2"] += 1
            return BIG

        @tool
        async def noting(context: ToolContext) -> str:
            self.ran["c3"] += 1
            context.extra["noted"] = True
            return "noted"

        provider = ScriptedProvider([lambda _: next(self._replies)] * 5)
        return make(provider, tools=[small, big, noting], checkpointer=self._cp, thread_id="t"), provider

    def move_to(self, cp: SQLiteCheckpointer) -> Self:
        """Whoever goes on finds the thread there."""
        self._cp = cp
        return self

    async def begin(self) -> None:
        await self._agent.prompt("hi")

    async def go(self) -> None:
        """The run under which the disk fails."""
        try:
            result = await self._agent.prompt("go")
            assert (result.stop_reason, result.text) == ("stop", "done")
        except StoreError as error:
            self.error = error

    def told(self) -> list[str]:
        """The ids of all that was told to be on the disk."""
        messages = [event.message for event in self._heard.of(MessageEnd) if event.stored]
        results = [event.result for event in self._heard.of(ToolExecutionEnd) if event.stored]
        return ids([*messages, *results])

    async def check(self, kind: type[StoreError]) -> None:
        """What must hold while the disk may still be broken."""
        check_whole(self._heard)
        end = self._heard.of(AgentEnd)[-1]
        if self.error is None:
            assert (end.stop_reason, end.error) == ("stop", None)
        else:
            assert isinstance(self.error, kind), repr(self.error)
            assert str(self._path) in str(self.error)
            assert self._agent.state.error is self.error
            assert end.stop_reason == "error"
            assert end.error is not None
            assert end.error.kind == type(self.error).__name__
        there = ids((await load(self._cp)).messages)
        assert len(set(there)) == len(there)
        assert set(self.told()) <= set(there)
        known = ids(self._agent.state.messages)
        assert [i for i in there if i in set(known)] == known, "the agent knows what the disk does not have"

    async def go_on(self, *, fresh: bool, resume: bool) -> None:
        """The disk is mended: this agent, or another one, takes the thread up."""
        agent, provider = self._new_agent() if fresh else (self._agent, self._provider)
        asked = len(provider.requests)
        self._replies = iter(["better", "and better"])
        before = (await load(self._cp)).messages
        heard = Heard(agent)
        try:
            result = await (agent.resume() if resume else agent.prompt("again"))
        except NothingToResume:
            assert resume
            assert before[-1].text in ("hello", "done")  # before anything of the run was stored, and behind its end
            result = await agent.prompt("again")
        if resume and len(provider.requests) == asked:  # the last reply was stored late: the run had only to be ended
            result = await agent.prompt("again")
        assert (result.stop_reason, result.text) == ("stop", "better")
        await agent.prompt("once more")
        check_whole(heard)
        for request in provider.requests[asked:]:
            assert flaws(request.messages) == []
        self._check_results(provider.requests[asked].messages, fresh=fresh)
        after = (await load(self._cp)).messages
        assert ids(agent.state.messages) == ids(after)
        assert len(set(ids(after))) == len(after)
        assert set(ids(before)) | set(self.told()) <= set(ids(after))
        assert max(self.ran.values(), default=0) <= 1, "a tool ran again"

    def _check_results(self, messages: Sequence[Message], *, fresh: bool) -> None:
        """A result that was stored is what the model sees; and this agent has not forgotten the others either."""
        real = {"c1": "small", "c2": BIG, "c3": "noted"}
        stored = {event.tool_call_id for event in self._heard.of(ToolExecutionEnd) if event.stored}
        for message in messages:
            if isinstance(message, ToolResultMessage):
                call = message.tool_call_id
                if call in stored or (self.ran[call] and not fresh):
                    assert message.text == real[call]


# --- under a run ------------------------------------------------------------------------------------------------------


class Failing(NamedTuple):
    """A way in which a disk fails, and what a user is told."""

    context: Callable[[], AbstractContextManager[Fault]]
    kind: type[StoreError]


FAILING_WRITES = {
    "full": Failing(lambda: failing_writes(FULL), StoreFull),
    "broken": Failing(lambda: failing_writes(BROKEN), StoreError),
    "read-only": Failing(lambda: failing_writes(READ_ONLY), StoreError),  # SQLite: an I/O error, of an open file
}
SYNCS = Failing(failing_syncs, StoreError)

# A full disk is met at each write; the other two, which take the same ways to other errors, at each third one.
# Not an even number: who goes on, and how, depends on the number of the write.
STEPS = {"full": 1, "broken": 3, "read-only": 3}


async def play(path: Path, fault: Fault, kind: type[StoreError], at: int, times: float) -> str:
    """One run with a fault at its n-th write or sync. How it went."""
    async with SQLiteCheckpointer(path) as cp:
        story = Story(cp, path)
        await story.begin()
        fault.arm(at, times)
        await story.go()
        await story.check(kind)
        fault.heal()
        if not fault.struck:
            assert story.error is None
            return "over"
        await story.check(kind)
        await story.go_on(fresh=at % 2 == 0, resume=at // 2 % 2 == 0)
    check_database(path)
    return "noticed" if story.error else "unnoticed"


def at_every_number(directory: Path, failing: Failing, times: float, *, step: int = 1) -> Counter[str]:
    """Let each of the writes or syncs of a run fail in turn, or each n-th, until the run has no more of them."""
    outcomes: Counter[str] = Counter()
    made = made_file()
    with failing.context() as fault:
        for at in range(1, 1_000, step):
            path = directory / f"{at}.db"
            path.write_bytes(made)
            outcome = within(play(path, fault, failing.kind, at, times))
            if outcome == "over":
                break
            outcomes[outcome] += 1
    return outcomes


@pytest.mark.parametrize("failing", FAILING_WRITES)
def test_writes_that_fail_until_they_are_mended_end_the_run_and_nothing_more(tmp_path: Path, failing: str) -> None:
    outcomes = at_every_number(tmp_path, FAILING_WRITES[failing], LASTING, step=STEPS[failing])
    assert outcomes["noticed"] > 30 / STEPS[failing]
    assert outcomes["unnoticed"] <= 1  # of the last write: no commit of the run comes after it


@pytest.mark.parametrize("failing", FAILING_WRITES)
def test_a_single_write_that_fails_costs_nothing_that_was_told(tmp_path: Path, failing: str) -> None:
    outcomes = at_every_number(tmp_path, FAILING_WRITES[failing], 1, step=STEPS[failing])
    assert outcomes.total() > 30 / STEPS[failing]


def test_syncs_that_fail_until_they_are_mended_end_the_run_and_nothing_more(tmp_path: Path) -> None:
    outcomes = at_every_number(tmp_path, SYNCS, LASTING)
    assert outcomes["noticed"] >= 4
    assert outcomes["unnoticed"] == 0


def test_a_single_sync_that_fails_is_made_good_without_a_word(tmp_path: Path) -> None:
    """The writes run once more: SQLite writes all of the frames again, so the second sync can be believed."""
    outcomes = at_every_number(tmp_path, SYNCS, 1)
    assert outcomes["unnoticed"] >= 4
    assert outcomes["noticed"] == 0


@pytest.mark.parametrize("failing", ["full", "syncs"])
def test_a_failure_that_passes_while_the_run_goes_on_costs_nothing_that_was_told(tmp_path: Path, failing: str) -> None:
    """It outlasts the second try of one write, and the next write is fine."""
    outcomes = at_every_number(tmp_path, SYNCS if failing == "syncs" else FAILING_WRITES[failing], 2)
    assert outcomes["noticed"] >= 4


# --- under a crowd ----------------------------------------------------------------------------------------------------


async def append_at_once(cp: SQLiteCheckpointer, number: int) -> tuple[list[str], list[BaseException]]:
    """Many appends that end up in one commit. What was confirmed, and the errors of the rest."""
    messages = [UserMessage("x" * (i % 3 * 3_000 + 10), id=f"m{i}") for i in range(number)]
    outcomes = await asyncio.gather(*(cp.append("t", message) for message in messages), return_exceptions=True)
    confirmed = [str(message.id) for message, outcome in zip(messages, outcomes, strict=True) if outcome is None]
    return confirmed, [outcome for outcome in outcomes if outcome is not None]


@pytest.mark.parametrize("times", [1, 2, LASTING], ids=["once", "twice", "lasting"])
@pytest.mark.parametrize("failing", ["full", "syncs"])
def test_of_many_writes_exactly_those_that_were_confirmed_are_there(tmp_path: Path, failing: str, times: float) -> None:
    way = SYNCS if failing == "syncs" else FAILING_WRITES[failing]

    async def main(fault: Fault, path: Path, at: int) -> bool:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage("first", id="first"))
            fault.arm(at, times)
            confirmed, errors = await append_at_once(cp, 8)
            fault.heal()
            assert all(isinstance(error, way.kind) and str(path) in str(error) for error in errors), errors
            assert ids((await load(cp)).messages) == ["first", *confirmed]
            await cp.append("t", UserMessage("last", id="last"))
        async with SQLiteCheckpointer(path) as cp:
            assert ids((await load(cp)).messages) == ["first", *confirmed, "last"]
        check_database(path)
        return bool(fault.struck)

    with way.context() as fault:
        at = 1
        while within(main(fault, tmp_path / f"{at}.db", at)):
            at += 1
    assert at > (1 if failing == "syncs" else 10)


# --- opening and closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [*FAILING_WRITES, "syncs"])
def test_a_file_that_could_not_be_made_says_so_and_can_be_made_later(tmp_path: Path, failing: str) -> None:
    """Each seventh write in turn is the first that fails: some of each step of a migration; and each sync."""
    way = SYNCS if failing == "syncs" else FAILING_WRITES[failing]

    async def main(fault: Fault, path: Path, at: int) -> bool:
        fault.arm(at, 1 if failing == "syncs" else LASTING)
        cp = SQLiteCheckpointer(path)
        try:
            await cp.open()
        except StoreError as error:
            assert isinstance(error, way.kind), repr(error)
            assert str(path) in str(error)
        else:
            fault.heal()
            await cp.close()
            return False
        fault.heal()
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage("a"))
        check_database(path)
        return True

    with way.context() as fault:
        at = 1
        while within(main(fault, tmp_path / f"{at}.db", at)):
            at += 1 if failing == "syncs" else 7
    assert at > (3 if failing == "syncs" else 70)


@pytest.mark.parametrize("failing", FAILING_WRITES)
def test_closing_on_a_disk_that_fails_is_quiet_and_loses_nothing(tmp_path: Path, failing: str) -> None:
    path = tmp_path / "x.db"

    async def main(fault: Fault) -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", [UserMessage("a", id="a"), UserMessage("b", id="b")])
            fault.arm(1)
        assert fault.struck, "there was nothing to fold into the file"
        fault.heal()
        async with SQLiteCheckpointer(path) as cp:
            assert ids((await load(cp)).messages) == ["a", "b"]

    with FAILING_WRITES[failing].context() as fault:
        within(main(fault))
    check_database(path)


@pytest.mark.parametrize("left", ["closed", "crashed"])
@pytest.mark.parametrize(
    ("failing", "kinds", "text"),
    [
        ("full", StoreFull, "no room left"),
        ("broken", StoreError, "the disk failed"),
        ("read-only", (StoreReadOnly, StoreUnusable), "check that the path|cannot be written"),
    ],
)
def test_a_file_on_a_disk_that_cannot_be_written_says_so_by_name(
    tmp_path: Path, failing: str, kinds: type[StoreError], text: str, left: str
) -> None:
    path, copy = tmp_path / "x.db", tmp_path / "copy.db"

    async def main(fault: Fault) -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage("a", id="a"))
            if left == "crashed":
                crash(path, copy)
        if left == "closed":
            crash(path, copy)
        fault.arm(0)
        with pytest.raises(kinds, match=r"copy\.db") as failure:
            async with SQLiteCheckpointer(copy) as cp:
                await cp.append("t", UserMessage("b"))
        assert re.search(text, str(failure.value)), failure.value
        fault.heal()
        async with SQLiteCheckpointer(copy) as cp:
            assert ids((await load(cp)).messages) == ["a"]

    with FAILING_WRITES[failing].context() as fault:
        within(main(fault))
    check_database(copy)


def crash(path: Path, copy: Path) -> None:
    """The files as another machine would find them: without the shared memory of those who have them open."""
    for suffix in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")


# --- reads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [BROKEN, STALE], ids=["broken", "stale"])
def test_reads_that_fail_are_told_by_name_and_the_next_ones_are_fine(tmp_path: Path, code: int) -> None:
    path = tmp_path / "x.db"

    async def main(fault: Fault) -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage(BIG, id="a"))
        async with SQLiteCheckpointer(path) as cp:
            await cp.threads()
            agent = make(["ok"], checkpointer=cp, thread_id="t")
            fault.arm(0)
            for number in range(40):  # by whichever of the readers
                with pytest.raises(StoreError, match=r"x\.db") as failure:
                    await (agent.prompt("hi") if number % 2 else load(cp))
                assert "rollback" not in str(failure.value)
            fault.heal()
            assert (await agent.prompt("hi")).text == "ok"
            assert ids((await load(cp)).messages)[0] == "a"

    with failing_reads(code) as fault:
        within(main(fault))


def test_a_text_that_the_disk_has_damaged_is_told_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def main() -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage("unharmed"))
        content = path.read_bytes()
        assert content.count(b"unharmed") == 1
        path.write_bytes(content.replace(b"unharmed", b"unh\xffrmed"))
        async with SQLiteCheckpointer(path) as cp:
            with pytest.raises(StoreCorrupt, match=r"x\.db"):
                await load(cp)

    within(main())


# --- what a failed sync leaves behind ---------------------------------------------------------------------------------


def test_sqlite_undoes_a_commit_whose_sync_failed_and_goes_on(tmp_path: Path) -> None:
    """A fact about SQLite that the retry of a group stands on."""
    with failing_syncs() as fault:
        connection = apsw.Connection(str(tmp_path / "x.db"))
        connection.pragma("journal_mode", "wal")
        connection.execute("CREATE TABLE t (a)")
        connection.execute("BEGIN IMMEDIATE; INSERT INTO t VALUES (1)")
        fault.arm(1, 1)
        with pytest.raises(apsw.IOError) as failure:
            connection.execute("COMMIT")
        assert getattr(failure.value, "extendedresult", None) == apsw.SQLITE_IOERR_FSYNC
        assert not connection.in_transaction
        assert connection.execute("SELECT count(*) FROM t").fetchall() == [(0,)]
        connection.execute("INSERT INTO t VALUES (2)")
        assert connection.execute("SELECT a FROM t").fetchall() == [(2,)]
        connection.close()


def test_what_a_failed_sync_left_behind_can_come_back_in_a_crash_until_the_next_commit(tmp_path: Path) -> None:
    """Nobody sees it, but its frames are in the WAL, and whoever recovers that takes them for a commit. So after a
    crash an error may turn out to have been a success; a confirmation never turns out to have been none."""
    path = tmp_path / "x.db"

    async def found(name: str) -> list[str]:
        crash(path, tmp_path / name)
        async with SQLiteCheckpointer(tmp_path / name) as cp:
            return ids((await load(cp)).messages)

    async def main(fault: Fault) -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage("a", id="a"))
            fault.arm(1)
            with pytest.raises(StoreError):
                await cp.append("t", UserMessage("b", id="b"))
            fault.heal()
            assert ids((await load(cp)).messages) == ["a"]
            assert await found("crashed.db") == ["a", "b"]
            await cp.append("t", UserMessage("c", id="c"))
            assert await found("later.db") == ["a", "c"]
        assert await found("closed.db") == ["a", "c"]

    with failing_syncs() as fault:
        within(main(fault))


def test_a_crash_while_syncs_fail_loses_nothing_that_was_told_and_no_tool_runs_again(tmp_path: Path) -> None:
    async def main(fault: Fault, path: Path, copy: Path, at: int) -> bool:
        async with SQLiteCheckpointer(path) as cp:
            story = Story(cp, path)
            await story.begin()
            fault.arm(at)
            await story.go()
            crash(path, copy)
            fault.heal()
        async with SQLiteCheckpointer(copy) as cp:
            there = (await load(cp)).messages
            assert set(story.told()) <= set(ids(there))
            assert flaws(valid_history(there)) == []
            await story.move_to(cp).go_on(fresh=True, resume=at % 2 == 0)
        check_database(copy)
        return bool(fault.struck)

    with failing_syncs() as fault:
        at = 1
        while within(main(fault, tmp_path / f"{at}.db", tmp_path / f"{at}-copy.db", at)):
            at += 1
    assert at > 4


def test_a_checkpoint_of_another_program_that_fails_to_sync_is_not_ours_to_notice(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    def fold() -> None:
        connection = apsw.Connection(str(path))
        connection.pragma("user_version")  # a connection that has read nothing does not know that there is a WAL
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            connection.close()

    async def main(fault: Fault, at: int) -> None:
        async with SQLiteCheckpointer(path) as cp:
            await cp.append("t", UserMessage("x" * 9_000, id=f"before-{at}"))
            fault.arm(at, 1)
            with pytest.raises(apsw.IOError):
                fold()
            await cp.append("t", UserMessage("x" * 9_000, id=f"behind-{at}"))
            copy = tmp_path / f"copy-{at}.db"
            crash(path, copy)
            async with SQLiteCheckpointer(copy) as other:
                assert ids((await load(other)).messages) == ids((await load(cp)).messages)
            fold()
            assert ids((await load(cp)).messages)[-2:] == [f"before-{at}", f"behind-{at}"]

    with failing_syncs() as fault:
        for at in (1, 2):  # of the WAL, and of the file
            within(main(fault, at))
    check_database(path)
