"""A query does nothing but SQL: whatever else a surface needs is done before its transaction begins, or after it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import byssus
from byssus import UserMessage
from byssus.store.database import Store, Tx
from byssus.store.jobs import Job
from byssus.threads.encoding import message_row
from tests.support.databases import Database
from tests.support.surfaces import use_all

ROOT = str(Path(byssus.__file__).parent) + "/"
MAY_CALL = ("queries/", "store/", "errors.py", "values/clock.py")

OF_ANOTHER = {"sqlite": "queries/search/tsvector.py", "postgresql": "queries/search/fts5.py"}


class Watch:
    """Looks at each Python call while a query runs, and notes those that lead out of the SQL."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.found: set[str] = set()

    def look(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, callee = place(frame.f_back), place(frame)
        if caller is None or callee is None:
            return
        self.called.add(callee)
        writes = threading.current_thread().name.startswith("byssus-write")
        is_the_query = caller.startswith("store/jobs.py")  # which may lie elsewhere, as long as it only calls others
        if (writes or caller.startswith("queries/")) and not is_the_query and not callee.startswith(MAY_CALL):
            self.found.add(f"{caller} calls {callee}")


def place(frame: FrameType) -> str | None:
    """The file of byssus and the function that a frame is in; None elsewhere."""
    code = frame.f_code
    return f"{code.co_filename.removeprefix(ROOT)} {code.co_name}" if code.co_filename.startswith(ROOT) else None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, call = Watch(), Job.call

    def watched(job: Job[Any], tx: object) -> Any:
        sys.setprofile(watch.look)
        try:
            return call(job, tx)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Job, "call", watched)
    return watch


def test_a_query_does_nothing_but_sql(database: Database, tmp_path: Path, watch: Watch) -> None:
    use_all(database.place, tmp_path)
    assert sorted(watch.found) == []
    files = {f"queries/{file.relative_to(ROOT + 'queries')}" for file in Path(ROOT, "queries").rglob("[a-z]*.py")}
    files -= {OF_ANOTHER[database.system]}
    assert sorted(files - {name.split()[0] for name in watch.called}) == [], "no query of these files was run"


def test_a_query_that_does_something_else_is_seen(store: Store, watch: Watch) -> None:
    def query(tx: Tx) -> str:
        tx.one("SELECT 1")
        return message_row(UserMessage("encoded inside the transaction")).body

    store.write_now(query)
    assert "threads/encoding.py message_row calls messages.py encode" in watch.found
    watch.found.clear()
    body = message_row(UserMessage("encoded before it")).body
    store.write_now(lambda tx: tx.one("SELECT :body", body=body))
    assert watch.found == set()
