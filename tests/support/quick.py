"""Which tests `--quick` runs: all that start no process, which leaves out Postgres and whatever is killed.

Those that are marked as `large` are left out, too, and properties are tried on fewer examples.

A test that starts one says so with the marker `processes`, and for those on Postgres it is clear anyway. Nobody has to
remember the marker: a test that starts a process without it fails, in each run.
"""

from __future__ import annotations

import platform
import sys

import pytest

_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn"})
_ON_POSTGRES = frozenset({"where", "admin", "opposite"})  # the fixtures in which there always is one

_running: pytest.Item | None = None
_is_quick = False


def begin() -> None:
    """Say that this run is a quick one; before the tests are imported."""
    global _is_quick  # noqa: PLW0603 - decorators ask for it
    _is_quick = True


def examples(count: int) -> int:
    """How many examples Hypothesis tries: all of them, or a tenth in a quick run."""
    return max(10, count // 10) if _is_quick else count


def leaves_out(item: pytest.Item) -> bool:
    return starts_processes(item) or item.get_closest_marker("large") is not None


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test may start processes; the server of those on Postgres is one."""
    if "crash" in item.path.parts or item.get_closest_marker("processes") is not None:
        return True
    if not isinstance(item, pytest.Function):
        return False
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    has_postgres = any(isinstance(value, str) and value == "postgres" for value in parameters)
    return has_postgres or not _ON_POSTGRES.isdisjoint(item.fixturenames)


def watch(item: pytest.Item | None) -> None:
    """Name the test that runs from now on."""
    global _running  # noqa: PLW0603 - the hook below is of the whole process
    _running = item


def _refuse_unmarked(event: str, args: tuple[object, ...]) -> None:
    if event in _STARTS and _running is not None and not starts_processes(_running):
        pytest.fail(f"{_running.nodeid} starts a process ({event}): mark it with @pytest.mark.processes")


platform.processor()  # the SDKs of model services ask for it; it is asked of a program once, and remembered
sys.addaudithook(_refuse_unmarked)
