"""A process proves that it lives by a file that it keeps locked: real ones are killed, stopped and forked."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from byssus.store import owners
from byssus.store.owners import Presence
from tests.support import processes
from tests.support.databases import Database

# Drives a thread until it is killed, with a tool that may be run twice if it must be.
DRIVE = """
    from byssus import Agent, Model, ToolCall, tool
    from byssus.checkpointer import checkpointer_for
    from byssus.testing import ScriptedProvider

    @tool(recovery="retry")
    async def slow() -> str:
        {before}
        print("runs", os.getpid(), flush=True)
        await asyncio.sleep(600)

    async def main():
        async with checkpointer_for(sys.argv[1]) as cp:
            provider = ScriptedProvider([[ToolCall("1", "slow")]])
            agent = Agent(provider=provider, model=Model(id="m"), tools=[slow], checkpointer=cp, thread_id="t")
            await agent.prompt("go")

    asyncio.run(main())
"""

# Says what it knows of interrupted threads, line by line, where /proc shows nobody else, as with hidepid=2.
LOOK = """
    import builtins
    from byssus.checkpointer import checkpointer_for

    real = builtins.open
    def hidden(path, *args, **kwargs):
        if str(path).startswith("/proc/") and path.split("/")[2] not in ("sys", "self", str(os.getpid())):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *args, **kwargs)
    builtins.open = hidden

    async def main():
        async with checkpointer_for(sys.argv[1]) as cp:
            for line in sys.stdin:
                print(*[thread.id for thread in await cp.unfinished()], flush=True)

    asyncio.run(main())
"""


def drive(before: str = "pass") -> str:
    return DRIVE.format(before=before)


@pytest.mark.processes
def test_an_owner_that_proc_hides_is_alive_until_it_is_killed(database: Database) -> None:
    with (
        processes.started(drive(), database.place, exit_code=-signal.SIGKILL, fresh=True) as driver,
        processes.started(LOOK, database.place) as looker,
    ):
        pid = int(driver.hear().split()[1])
        assert looker.ask() == ""
        os.kill(pid, signal.SIGSTOP)
        assert looker.ask() == ""
        os.kill(pid, signal.SIGKILL)  # at once, and while nobody has buried it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert looker.ask() == "t"


@pytest.mark.processes
def test_an_owner_that_was_killed_is_gone_though_its_forked_child_lives(database: Database) -> None:
    fork = """if os.fork() == 0:
            import time
            time.sleep(30 if os.getppid() else 0)
            os._exit(0)"""
    with processes.started(drive(fork), database.place, exit_code=-signal.SIGKILL, fresh=True) as driver:
        pid = int(driver.hear().split()[1])
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with processes.started(LOOK, database.place) as looker:
            assert looker.ask() == "t"


@pytest.fixture
def stem(tmp_path: Path) -> Iterator[str]:
    known = set(owners._proofs)
    yield str(tmp_path / "chat.db-owner-")
    owners._proofs.intersection_update(known)


def proof(name: str) -> str:
    found = re.search(r" proof=(\S+)", name)
    assert found is not None
    return found[1]


def test_the_file_is_made_for_the_first_lease_and_removed_with_the_last(stem: str, tmp_path: Path) -> None:
    presence, other = Presence(stem), Presence(stem)
    assert os.listdir(tmp_path) == []
    name = presence.name("a", 30)
    assert proof(presence.name("b", 30)) == proof(name)
    assert os.listdir(tmp_path) == [f"chat.db-owner-{proof(name)}"]
    assert not other.has_ended(name)
    presence.leave(has_leases=False)
    assert os.listdir(tmp_path) == []
    assert not other.has_ended(name)  # nothing is known


def test_a_process_that_leaves_with_a_lease_is_known_to_have_ended(stem: str) -> None:
    presence = Presence(stem)
    name = presence.name("a", 30)
    presence.leave(has_leases=True)
    assert Presence(stem).has_ended(name)
    assert Presence(stem).has_ended(name)  # however often it is asked


def test_the_files_of_processes_that_were_killed_are_removed_when_no_lease_can_name_them(
    stem: str, tmp_path: Path
) -> None:
    lives, ended = Presence(stem), Presence(stem)
    alive, gone = lives.name("a", 30), ended.name("b", 30)
    ended.leave(has_leases=True)
    file = tmp_path / f"chat.db-owner-{proof(gone)}"
    os.utime(file, (0, 0))  # the process had begun long ago, and was killed just now
    third = Presence(stem)
    third.name("c", 30)
    assert third.has_ended(gone)
    third.leave(has_leases=False)
    os.utime(file, (0, 0))  # an hour goes by
    fourth = Presence(stem)
    fourth.name("d", 30)
    assert not file.exists()
    assert not fourth.has_ended(alive)
    fourth.leave(has_leases=False)
    lives.leave(has_leases=False)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_the_file_may_be_read_by_whoever_may_read_the_database(stem: str, tmp_path: Path, mode: int) -> None:
    database = tmp_path / "chat.db"
    database.touch()
    database.chmod(mode)
    presence = Presence(stem, like=str(database))
    made = tmp_path / f"chat.db-owner-{proof(presence.name('a', 30))}"
    assert stat.S_IMODE(made.stat().st_mode) == mode
    presence.leave(has_leases=False)


def test_the_file_belongs_to_whom_the_database_belongs_to_also_if_root_makes_it(stem: str, tmp_path: Path) -> None:
    database = tmp_path / "chat.db"
    database.touch()
    if os.geteuid() == 0:  # else both are ours
        os.chown(database, 65534, 65534)
    presence = Presence(stem, like=str(database))
    made = (tmp_path / f"chat.db-owner-{proof(presence.name('a', 30))}").stat()
    assert (made.st_uid, made.st_gid) == (database.stat().st_uid, database.stat().st_gid)
    presence.leave(has_leases=False)


@pytest.mark.parametrize("where", ["missing/chat.db-owner-", None], ids=ascii)
def test_where_no_file_can_be_made_a_process_still_knows_its_own_leases(tmp_path: Path, where: str | None) -> None:
    at = None if where is None else str(tmp_path / where)
    presence = Presence(at)
    name = presence.name("a", 30)
    assert owners.token_of(name) == "a"
    assert not Presence(at).has_ended(name)
    presence.leave(has_leases=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "host:1",
        "host:1 proof=",
        "host:1 proof=../../../etc/passwd",
        f"host:1 proof={'0' * 31}",
        f"host:1 proof={'0' * 32}\n",
        "host:1 proof=?",
        "host:1 =",
        "host:1 a=b c",
        "\0 proof=\0",
        "host:1 seconds=x boot=?",
    ],
    ids=ascii,
)
def test_of_an_owner_that_cannot_be_read_nobody_knows_that_it_is_gone(text: str, stem: str) -> None:
    assert Presence(stem, one_machine=True).has_ended(text) is False
    assert owners.token_of(text) is None
    assert owners.seconds_of(text) is None


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_is_no_file_of_ours_proves_nothing(stem: str, tmp_path: Path, kind: str) -> None:
    name = f"host:1 proof={'a' * 32} boot=? seconds=30 lease=x"
    path = Path(stem + "a" * 32)
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "other").touch()
        path.symlink_to(tmp_path / "other")
    else:
        os.mkfifo(path)
    assert not Presence(stem).has_ended(name)
    presence = Presence(stem)
    presence.name("a", 30)  # and they are not tidied away
    assert path.exists()
    presence.leave(has_leases=False)


def test_a_file_is_locked_also_if_another_process_just_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(_: Presence, __: int) -> None:  # between its making and its lock, as one that tidies up does
        (path,) = tmp_path.iterdir()
        other = os.open(path, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.1, os.close, [other]).start()

    monkeypatch.setattr(Presence, "_make_like", looked_at)
    presence = Presence(str(tmp_path / "x.db-owner-"))
    owner = presence.name("lease", 30)
    assert len(list(tmp_path.iterdir())) == 1
    assert not presence.has_ended(owner)
    presence.leave(has_leases=False)
