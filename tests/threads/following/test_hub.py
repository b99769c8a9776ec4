"""One hub for all followers of a process: who is rung, and when it rests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import StoreBusy
from byssus.queries.log import threads
from byssus.store.jobs import NO_THREAD, thread_digest
from byssus.threads.encoding import message_row
from byssus.threads.following import hub
from byssus.values.thread_key import ThreadKey
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.following import Following
from tests.support.leases import until

T, U = ThreadKey("", "t"), ThreadKey("", "u")


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker of a hub can be started, as where the system has no more threads."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "byssus-hub":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_commit_rings_for_its_thread_and_for_no_other(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        center = hub.Hub(cp.store)
        bell, other = center.attach(T), center.attach(U)
        waiting = asyncio.ensure_future(other.wait())
        center.committed({T})
        await asyncio.wait_for(bell.wait(), 20)
        assert not waiting.done()
        center.committed({U})
        await asyncio.wait_for(waiting, 20)
        center.detach(T, bell)
        center.detach(U, other)

    with_cp(database, use)


def test_what_others_commit_is_found_by_one_look_for_all(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        followers = [Following(cp, f"t{number}") for number in range(20)]
        await asyncio.sleep(0)
        cp.store.on_commit = None  # as if another process did it
        for number in range(20):
            await cp.store.write(threads.append, ThreadKey("", f"t{number}"), [message_row(UserMessage("x"))])
        cp.store.on_commit = None
        center = hub.of(cp.store)
        await asyncio.to_thread(center._look)
        for follower in followers:
            await follower.until_texts("x")
            await follower.stop()
        assert not center._bells
        assert not center._digests

    with_cp(database, use)


def test_there_is_one_worker_and_it_rests_when_nobody_follows(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_LINGER", 0.05)

    def workers() -> int:
        return sum(thread.name == "byssus-hub" for thread in threading.enumerate())

    async def use(cp: Checkpointer) -> None:
        followers = [Following(cp, f"t{number}") for number in range(20)]
        await until(lambda: workers() == 1)
        for follower in followers:
            await follower.stop()
        await until(lambda: workers() == 0)
        again = Following(cp)
        await cp.append("t", UserMessage("x"))
        await again.until_texts("x")
        await again.stop()

    with_cp(database, use)


def test_a_look_that_fails_is_tried_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_AWAY", 0.01)

    async def use(cp: Checkpointer) -> None:
        failures: list[Exception] = [OSError(24, "too many open files"), StoreBusy("not now")]
        heard = cp.store.changed_elsewhere

        def hear() -> set[str] | None:
            if failures:
                raise failures.pop()
            return heard()

        monkeypatch.setattr(cp.store, "changed_elsewhere", hear)
        following = Following(cp)
        await until(lambda: not failures)
        cp.store.on_commit = None  # as if another process did it
        await cp.store.write(threads.append, T, [message_row(UserMessage("x"))])
        await following.until_texts("x")
        await following.stop()

    with_cp(database, use)


def test_a_commit_that_names_no_thread_rings_for_those_that_it_has_changed(database: Database, no_worker: None) -> None:
    async def use(cp: Checkpointer) -> None:
        names = [ThreadKey("", name) for name in ("changed", "same", "gone", "missing")]
        for name in names[:3]:
            await cp.append(name, UserMessage("x"))
        center = hub.Hub(cp.store)
        bells = {name.id: center.attach(name) for name in names}
        center._look()
        for bell in bells.values():
            await asyncio.wait_for(bell.wait(), 20)  # each is rung once by the first look
        cp.store.on_commit = None  # as if no commit said which thread it is about
        await cp.append("changed", UserMessage("y"))
        await cp.delete_thread("gone")
        center.committed({NO_THREAD})
        assert center._is_due
        center._look()
        assert {name for name, bell in bells.items() if bell._is_rung} == {"changed", "gone"}

    with_cp(database, use)


def test_without_a_worker_followers_hear_of_this_process_and_the_next_one_starts_it(
    database: Database, monkeypatch: pytest.MonkeyPatch, no_worker: None
) -> None:
    async def use(cp: Checkpointer) -> None:
        center = hub.Hub(cp.store)
        first = center.attach(T)
        monkeypatch.undo()
        assert not center._is_awake
        center.committed({T})
        await asyncio.wait_for(first.wait(), 20)
        second = center.attach(U)
        assert center._is_awake
        center.detach(T, first)
        center.detach(U, second)

    with_cp(database, use)


def test_a_thread_has_a_short_name_for_word_between_processes() -> None:
    assert len({thread_digest(key) for key in (T, U, ThreadKey("t", ""), ThreadKey("", "\ud800"))}) == 4
    assert {len(thread_digest(key)) for key in (T, U)} == {8}
