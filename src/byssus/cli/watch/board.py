"""All live runs of a database, and the tasks that run, kept up to date.

Once a second a look finds the threads that run or wait for a person. Each of them is followed from the beginning of its
run, through the hub of the process: what happens there is known at once, without a look of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from byssus.checkpointer import Checkpointer, RunInfo, ThreadInfo
from byssus.cli.watch.watched import Watched
from byssus.errors import ByssusError, CursorUnknown
from byssus.values.decisions import Pending
from byssus.values.following.cursors import Cursor, Seen, thread_mark

if TYPE_CHECKING:
    from byssus.storage import TaskRow

_LOOK = 1.0  # seconds between two looks at the whole database
_SHOWN_AFTER = 20.0  # seconds for which a run stays on the screen when it is over
_MOST = 50  # runs, most recently updated first
_MOST_TASKS = 200
_LIVE = ("running", "waiting")
_TELLING = ("run_began", "run_ended", "call_waiting", "call_answered")  # items after which a look is due


class Board:
    """The runs of a database, or those of one thread."""

    def __init__(self, checkpointer: Checkpointer, thread_id: str | None = None) -> None:
        self.runs: dict[str, Watched] = {}  # by thread, the one that began first comes first
        self.tasks: list[TaskRow] = []  # those that run, highest priority first
        self.error = ""  # why the last look has failed
        self.on_change: Callable[[], object] = lambda: None
        self._cp = checkpointer
        self._thread_id = thread_id
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._is_due = asyncio.Event()

    async def keep(self) -> None:
        """Keep it up to date until this is cancelled."""
        try:
            while True:
                await self.look()
                self._is_due.clear()
                try:
                    async with asyncio.timeout(_LOOK):
                        await self._is_due.wait()
                except TimeoutError:
                    continue
        finally:
            await self.close()

    async def close(self) -> None:
        for task in self._followers.values():
            task.cancel()
        await asyncio.gather(*self._followers.values(), return_exceptions=True)
        self._followers.clear()

    async def look(self) -> None:
        """Look once at the whole database. A failure is shown, and the next look may be better."""
        try:
            await self._look()
            self.error = ""
        except ByssusError as error:
            self.error = str(error)
        self.on_change()

    async def settled(self) -> None:
        """Look once, and wait until all that was stored of the runs is known."""
        known = asyncio.Event()
        self.on_change = known.set
        await self._look()
        while not all(run.is_caught_up for run in self.runs.values()):
            known.clear()
            await known.wait()

    def look_soon(self) -> None:
        """Something was changed here: do not wait for the next look."""
        self._is_due.set()

    async def _look(self) -> None:
        pending = await self._cp.pending(self._thread_id)
        waiting: dict[str, list[Pending]] = {}
        for call in pending:
            waiting.setdefault(call.thread_id, []).append(call)
        found = await self._threads(list(waiting))
        for info in found:
            await self._take(info)
        self.runs = dict(sorted(self.runs.items(), key=lambda item: (item[1].began_at, item[0])))
        live = {info.id for info in found}
        for thread_id, run in list(self.runs.items()):
            run.waiting = waiting.get(thread_id, [])
            if thread_id not in live:
                await self._leave(run)
        self.tasks = await self._cp.list_tasks(self._thread_id, "running", _MOST_TASKS) or []

    async def _threads(self, waiting: list[str]) -> list[ThreadInfo]:
        """The threads to show: those that run, and those that wait for a person."""
        if self._thread_id is not None:
            info = await self._cp.info(self._thread_id)
            return [] if info is None else [info]
        found = await self._cp.threads(_MOST, state="running")
        names = {info.id for info in found}
        for thread_id in waiting[: _MOST - len(found)]:
            if thread_id not in names and (info := await self._cp.info(thread_id)) is not None:
                names.add(thread_id)
                found.append(info)
        return found

    async def _take(self, info: ThreadInfo) -> None:
        """Show a thread, and follow its last run."""
        known = self.runs.get(info.id)
        if known is None or known.is_over:
            run = next(iter(await self._cp.runs(info.id, 1)), None)
            if known is None or _id(known.run) != _id(run):
                self._drop(info.id)
                known = self.runs[info.id] = Watched(info, run)
                if run is not None:
                    self._followers[info.id] = asyncio.create_task(self._follow(known, run))
        known.info, known.state = info, info.state
        known.left_at = None

    async def _leave(self, run: Watched) -> None:
        """A run that is over stays for a while. It may go on and end between two looks, so each look asks its state."""
        now = time.monotonic()
        run.left_at = now if run.left_at is None else run.left_at
        if now > run.left_at + _SHOWN_AFTER:
            self._drop(run.thread_id)
            return
        info = await self._cp.info(run.thread_id)
        run.state = "deleted" if info is None else info.state

    def _drop(self, thread_id: str) -> None:
        self.runs.pop(thread_id, None)
        if (task := self._followers.pop(thread_id, None)) is not None:
            task.cancel()

    async def _follow(self, watched: Watched, run: RunInfo) -> None:
        try:
            async with aclosing(self._cp.follow(run.thread_id, _cursor(watched.info, run))) as items:
                async for item in items:
                    watched.add(item)
                    if watched.is_caught_up and item.type in _TELLING:
                        self._is_due.set()
                    self.on_change()
        except CursorUnknown:  # the thread was rewound or deleted: the next look tells
            watched.is_caught_up = True
        except ByssusError as error:
            self.error, watched.is_caught_up = str(error), True
        self.on_change()


def _cursor(info: ThreadInfo, run: RunInfo) -> str | None:
    """Just before the run: what was said before it is not read, however long the thread is."""
    if run.branch is None:
        return None
    return str(Cursor(thread_mark("", info.id, info.created_at), run.branch, Seen(max(run.first_seq - 1, 0))))


def _id(run: RunInfo | None) -> str | None:
    return None if run is None else run.id
