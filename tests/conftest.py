"""Databases as fixtures, and `--quick`. What takes `database` runs once for each kind, and knows none of them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from byssus.store.database import Store
from tests.support import postgres, quick
from tests.support.databases import DATABASES, Database
from tests.support.postgres import Schema
from tests.support.ramdisk import ramdisk
from tests.support.stores import Admin

if (memory := ramdisk()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)  # where pytest makes `tmp_path`

# A shell that starts the tests in the background ignores Ctrl-C for them, and so would each program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, however slow the machine is. HYPOTHESIS_PROFILE=default looks for new ones.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("tests"), max_examples=10)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))

# AgentScope needs another mcp than we do: tests/adapters/test_agentscope.py runs these in processes that have it.
collect_ignore = [] if importlib.util.find_spec("agentscope") else ["adapters/agentscope"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="no process, so no Postgres; nothing large; fewer examples")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        hypothesis.settings.load_profile("quick")
        quick.begin()


def pytest_collection(session: pytest.Session) -> None:
    """Each worker begins with another part of the tests, so that they do not all compile the same files at once."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    left_out = [session.config.rootpath / "tests" / name for name in collect_ignore]
    files = [
        file
        for file in sorted(session.config.rootpath.glob("tests/**/test_*.py"))
        if not any(file.is_relative_to(folder) for folder in left_out)
    ]
    first = len(files) * int(worker.removeprefix("gw")) // workers
    for file in files[first : first + len(files) // workers + 1]:
        with contextlib.suppress(Exception):  # pytest imports it again, and reports that
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if quick.leaves_out(item)])
        items[:] = [item for item in items if not quick.leaves_out(item)]


def pytest_collection_finish() -> None:
    """What was imported for all the tests stays: no garbage collection has to look through it."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    quick.watch(item)
    try:
        return (yield)
    finally:
        quick.watch(None)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    made = DATABASES[request.param](tmp_path)
    yield made
    made.drop()


@pytest.fixture(params=DATABASES)
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """One that nobody has opened yet: there is no file, and no table."""
    made = DATABASES[request.param](tmp_path, is_made=False)
    yield made
    made.drop()


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with database.store() as opened:
        yield opened


@pytest.fixture
def where() -> Iterator[Schema]:
    """A place on a Postgres server, for what is true of Postgres alone."""
    made = postgres.server_for_tests().fresh_schema()
    yield made
    postgres.server_for_tests().drop(made)


@pytest.fixture
def admin(where: Schema) -> Iterator[Admin]:
    made = Admin(where.dsn)
    yield made
    made.close()
