"""Modules that are imported with their first use: by the caller, and never inside a transaction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import byssus
from byssus.store.lazy import LazyModule
from byssus.store.operations import awaited
from byssus.values import clock
from tests.support.databases import Database

SOURCE = str(Path(byssus.__file__).parents[1])
LAZY = {f"byssus.{name}" for name in ("maintenance.backup", "maintenance.check", "maintenance.export", "search.search")}

# Records the worker that imports each module of byssus, while everything is used.
PROGRAM = """
import json, sys, threading
from pathlib import Path

class Recorder:
    imported = {}

    def find_spec(self, name, path=None, target=None):
        if name.startswith("byssus"):
            self.imported[name] = threading.current_thread().name

sys.meta_path.insert(0, Recorder())

from tests.support.surfaces import use_all

use_all(sys.argv[1], Path(sys.argv[2]))
print(json.dumps(Recorder.imported))
"""


@pytest.mark.processes
def test_no_worker_of_a_store_imports_a_module(database: Database, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, database.place, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, str(Path(__file__).parents[2])])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported: dict[str, str] = json.loads(done.stdout)
    assert imported.keys() >= LAZY
    inside = {name: worker for name, worker in imported.items() if worker.startswith(("byssus-write", "byssus-read"))}
    assert inside == {}


def test_what_a_lazy_module_gives_is_the_real_thing() -> None:
    module = LazyModule("byssus.values.clock")
    assert module.now is clock.now
    assert LazyModule("byssus.errors").__doc__ != byssus.errors.__doc__  # its own: nothing is imported for that
    assert repr(module) == "LazyModule('byssus.values.clock')"


def test_a_late_operation_is_found_with_its_first_use() -> None:
    found = []

    async def operation(store: object, number: int) -> int:
        """What it promises."""
        return number

    def find():  # type: ignore[no-untyped-def]
        found.append(operation)
        return operation

    class Surface:
        store = None
        double = awaited.late(find)

    assert found == []
    assert Surface.double.__doc__ == "What it promises."
    assert Surface.double.__name__ == "double"
    assert found == [operation]
