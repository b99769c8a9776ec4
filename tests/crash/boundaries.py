"""SIGKILL at a write boundary: a process plays the scene and is killed, the next one goes on, and so forth to the end.

A plan says how the scene is varied and where each process in turn is killed; the process after the last kill
comes to its end. What they said and did stays in the directory, and the judge reads it there.

Postgres commits on several threads at once, so the n-th boundary of one run is not quite the n-th of the next one. And
it goes on with what a dead process had sent: the next process is born when the server has let go of that one.

Processes are forked from one that has imported everything, opened nothing and started no thread: each is as real as one
that was started afresh, and costs some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tests.crash import databases
from tests.crash.boundary_scene import Scene, Variation, Voice, look
from tests.crash.place import Place

STORY = "story.json"
_SILENCE = 60  # seconds after which a process that says nothing is taken for stuck; one by one: machines freeze, too


class Kill(Struct, frozen=True):
    """Where a process dies: at its n-th `boundary`, after n lines that were `heard`, or n ms `after` its birth."""

    how: str
    number: int


class Plan(Struct, frozen=True):
    """A story to be told. A dead process may stay a zombie for as long as the story lasts."""

    variation: Variation = Variation()
    kills: list[Kill] = []
    neighbour_dies_at: int | None = None  # a boundary
    keeps_zombies: bool = False
    database: str = "sqlite"


class Life(Struct):
    """A process: what it said, and how it ended (as `waitstatus_to_exitcode` tells it)."""

    pid: int
    said: list[dict[str, Any]]
    kill: Kill | None = None
    exit: int | None = None
    stood_still: bool = False
    neighbours: list[Life] = []

    @property
    def was_killed(self) -> bool:
        return self.exit == -signal.SIGKILL and not self.stood_still


class Story(Struct):
    """What happened, and the database at the end: the rows of the thread, and what is wrong with the whole."""

    plan: Plan
    lives: list[Life]
    tables: dict[str, list[dict[str, Any]]] = {}
    damage: list[str] = []

    @property
    def kills(self) -> int:
        return sum(life.was_killed for life in self.lives)


def tell(plan: Plan, directory: Path) -> Story:
    """Let the processes of a plan live one after the other. The story is left in the directory, beside their files."""
    directory.mkdir(parents=True, exist_ok=True)
    story = Story(plan, [])
    with databases.made(plan.database, directory) as place:
        _live_all(story, place)
        story.tables, story.damage = databases.asked(place, look), databases.damage(place)
    (directory / STORY).write_bytes(msgspec.json.encode(story))
    return story


def _live_all(story: Story, place: Place) -> None:
    plan = story.plan
    zombies: list[Life] = []
    for kill in itertools.chain(plan.kills, itertools.repeat(None)):
        life = _Family(plan, place, kill).live()
        story.lives.append(life)
        if plan.keeps_zombies:
            zombies.append(life)
        else:
            _bury(life)
        databases.settled(place)
        # A neighbour for whom nobody waited may have spoken after all was done.
        is_over = plan.variation.is_patient or not life.neighbours or life.exit != 0
        if not life.was_killed and is_over:
            break
    for life in zombies:
        _bury(life)


def _bury(life: Life) -> None:
    os.waitpid(life.pid, 0)


def read(directory: Path) -> Story:
    return msgspec.json.decode((directory / STORY).read_bytes(), type=Story)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """What is alive now is not looked at by the collectors of the children, which would copy it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- processes --------------------------------------------------------------------------------------------------------


class _Process:
    """A forked process with a pipe in each direction."""

    def __init__(self, act: Callable[[Voice, int], None]) -> None:
        self.hears, speaks = os.pipe()
        listens, self.tells = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become(act, speaks, listens)
        os.close(speaks)
        os.close(listens)
        self.life = Life(pid, [])
        self._rest = b""

    def hear(self) -> list[dict[str, Any]] | None:
        """The next lines; None when there will be no more. Half a line does not count: it was not told to anybody."""
        read = os.read(self.hears, 1 << 20)
        if not read:
            return None
        *lines, self._rest = (self._rest + read).split(b"\n")
        said = [msgspec.json.decode(line) for line in lines]
        self.life.said += said
        return said

    def kill(self) -> None:
        os.kill(self.life.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for its end; it stays to be buried."""
        os.close(self.hears)
        os.close(self.tells)
        ended = os.waitid(os.P_PID, self.life.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self.life.exit = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _become(act: Callable[[Voice, int], None], speaks: int, listens: int) -> None:
    """In the child: do the part, and end without a look at what the parent has on its stack."""
    code = 70
    voice = Voice(speaks)
    try:
        first, last = sorted((speaks, listens))
        os.closerange(3, first)
        os.closerange(first + 1, last)
        os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
        threading.excepthook = lambda failed: voice.say("odd", problem=f"in a thread: {failed.exc_value!r}")
        sys.unraisablehook = lambda failed: voice.say("odd", problem=f"unraisable: {failed.exc_value!r}")
        act(voice, listens)
        code = 0
    except BaseException:
        voice.say("failed", trace=traceback.format_exc())
    finally:
        os._exit(code)


class _Family:
    """The process that plays, and the neighbours that it calls for."""

    def __init__(self, plan: Plan, place: Place, kill: Kill | None) -> None:
        self._plan = plan
        self._place = place
        self._kill = kill
        self._selector = selectors.DefaultSelector()
        self._neighbours: list[_Process] = []
        self._main = self._fork(self._play)
        self._main.life.kill = kill
        after = kill.number / 1000 if kill is not None and kill.how == "after" else None
        self._dies_at = None if after is None else time.monotonic() + after

    def _fork(self, act: Callable[[Voice, int], None]) -> _Process:
        process = _Process(act)
        self._selector.register(process.hears, selectors.EVENT_READ, process)
        return process

    def _scene(self, voice: Voice, ears: int, dies_at: int | None) -> Scene:
        return Scene(self._place, self._plan.variation, voice, ears, dies_at)

    def _play(self, voice: Voice, ears: int) -> None:
        kill = self._kill
        dies_at = kill.number if kill is not None and kill.how == "boundary" else None
        asyncio.run(_watched(self._scene(voice, ears, dies_at).play, voice), debug=False)

    def _interrupt(self, voice: Voice, ears: int) -> None:
        # Only where `ring` waits and nothing else is written is it sure that the other process still lives and drives.
        is_quiet = self._plan.variation.is_patient and not self._plan.variation.is_noisy
        is_rival = is_quiet and (self._kill is None or self._kill.how == "boundary")
        scene = self._scene(voice, ears, self._plan.neighbour_dies_at)
        asyncio.run(_watched(lambda: scene.interrupt(is_rival=is_rival), voice), debug=False)

    def live(self) -> Life:
        with self._selector:
            silence = 0
            while self._selector.get_map():
                ready = self._selector.select(self._patience())
                silence = 0 if ready else silence + 1
                if self._dies_at is not None and time.monotonic() >= self._dies_at:
                    self._kill_now()
                elif silence >= _SILENCE:
                    self._lose_patience()
                for key, _ in ready:
                    self._attend(key.data)
        self._main.life.neighbours = [neighbour.life for neighbour in self._neighbours]
        return self._main.life

    def _patience(self) -> float:
        return 1.0 if self._dies_at is None else min(1.0, max(0.0, self._dies_at - time.monotonic()))

    def _kill_now(self) -> None:
        self._dies_at = None
        if self._main.life.exit is None:
            self._main.kill()

    def _lose_patience(self) -> None:
        for key in self._selector.get_map().values():
            process: _Process = key.data
            process.life.stood_still = True
            process.kill()

    def _attend(self, process: _Process) -> None:
        said = process.hear()
        if said is None:
            self._selector.unregister(process.hears)
            process.end()
            if process is not self._main:
                _bury(process.life)
                if self._plan.variation.is_patient:
                    self._release()
            return
        if process is self._main:
            self._react(said)

    def _react(self, said: list[dict[str, Any]]) -> None:
        for line in said:
            if line["what"] == "ring":
                if not self._plan.variation.is_patient:
                    self._release()
                self._neighbours.append(self._fork(self._interrupt))
        kill, heard = self._kill, len(self._main.life.said)
        if kill is not None and kill.how == "heard" and heard - len(said) < kill.number <= heard:
            self._main.kill()

    def _release(self) -> None:
        """Let `ring` go on, if it still waits."""
        if self._main.life.exit is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._main.tells, b".")


async def _watched(act: Callable[[], Any], voice: Voice) -> None:
    """What only the event loop hears of is said too."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: voice.say("odd", problem=f"in the loop: {context}"))
    await act()
