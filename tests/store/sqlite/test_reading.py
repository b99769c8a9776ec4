"""Reads of a SQLite file that are stopped: by their callers, and by a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from byssus.store import sharing
from byssus.store.sqlite import store as sqlite
from byssus.store.sqlite.store import SQLiteStore
from tests.support.stores import PATIENCE, LongRead

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # forks on purpose
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    store = sqlite.open_store(tmp_path / "chat.db")
    yield store
    sharing.release(store)


def fork_in_time() -> None:
    """Fork a child that ends at once. The test fails if that does not return."""
    forked: Future[int] = Future()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        forked.set_result(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    threading.Thread(target=fork, daemon=True).start()
    assert forked.result(PATIENCE) == 0


def test_a_fork_interrupts_long_reads_and_they_run_again(store: SQLiteStore) -> None:
    reads = [LongRead(long_runs=1) for _ in range(4)]
    outcomes = [store.submit_read(read.query) for read in reads]
    assert all(read.begun.acquire(timeout=PATIENCE) for read in reads)
    fork_in_time()
    assert [outcome.result(PATIENCE) for outcome in outcomes] == ["done"] * 4
    assert [read.runs for read in reads] == [2] * 4


def test_a_read_that_many_forks_have_interrupted_is_waited_for(store: SQLiteStore) -> None:
    """Or a program that forks all the time would never get its answer."""
    read, gate = LongRead(long_runs=sqlite._REPEATS), threading.Event()

    def query(tx: object) -> str:
        answer = read.query(tx)  # type: ignore[arg-type]
        assert gate.wait(PATIENCE)
        return answer

    outcome = store.submit_read(query)
    for _ in range(sqlite._REPEATS):
        assert read.begun.acquire(timeout=PATIENCE)
        fork_in_time()
    assert read.begun.acquire(timeout=PATIENCE)
    threading.Timer(0.2, gate.set).start()
    fork_in_time()
    assert outcome.result(PATIENCE) == "done"
    assert read.runs == sqlite._REPEATS + 1


def test_what_a_fork_interrupts_between_two_statements_runs_again(store: SQLiteStore) -> None:
    begun, runs = threading.Event(), []

    def query(tx: object) -> int:
        runs.append(1)
        begun.set()
        while len(runs) == 1:
            tx.one("SELECT 1")  # type: ignore[attr-defined]
        return len(runs)

    outcome = store.submit_read(query)
    assert begun.wait(PATIENCE)
    fork_in_time()
    assert outcome.result(PATIENCE) == 2
