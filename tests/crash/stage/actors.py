"""The processes of a scene: forked from one that has opened nothing and started no thread, heard line by line.

    with Actor("writer", lambda line: write(line, place)) as writer:
        writer.hear("open")
        writer.kill()

An actor says lines of JSON, each in one write: what was read has happened. It does what it reads in turn. The scene
itself never opens a database: who wants to look at one does so in an actor as well (see `apart`), so that each look is
that of a new process, and so that there is never a thread where a process is forked.

What is no `ByssusError` breaks a promise, wherever it comes from: see `Line.trying`. So does silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from byssus.errors import ByssusError

T = TypeVar("T")

SILENCE = 45.0  # seconds after which somebody who owes a word hangs; what is promised are a few, on an idle machine
_FAILED = ("raw", "odd", "failed")  # what no actor may ever say


class Broken(AssertionError):
    """A promise that was not kept."""


class Line:
    """What an actor has in its hands: a voice and an ear."""

    def __init__(self, speaks: int, listens: int) -> None:
        self._speaks, self._listens = speaks, listens
        self._lock = threading.Lock()

    def say(self, what: str, **more: Any) -> None:
        data = json.dumps({"what": what, **more}).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._speaks, data) :]

    def told(self) -> str:
        """The next line; empty when nobody will say anything more."""
        read = b""
        while not read.endswith(b"\n") and (byte := os.read(self._listens, 1)):
            read += byte
        return read.decode().strip()

    async def told_soon(self) -> str:
        return await asyncio.to_thread(self.told)

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Say how it ends: "done", or "refused" with the error. Any error that is not ours is said as "raw"."""
        try:
            yield
        except ByssusError as error:
            self.say("refused", of=what, kind=type(error).__name__, text=str(error), flaw=_flaw(error))
        except Exception:
            self.say("raw", of=what, trace=traceback.format_exc())
        else:
            self.say("done", of=what)


def _flaw(error: ByssusError) -> str:
    """Why the text of an error helps nobody; empty if it does."""
    text = str(error)
    if len(text.split()) < 4:
        return f"an error without a sentence: {error!r}"
    return f"an error that speaks of the driver: {text}" if "apsw." in text or "psycopg." in text else ""


class Actor:
    """A process of a scene, as the scene sees it."""

    def __init__(self, name: str, act: Callable[[Line], object]) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self._hears, speaks = os.pipe()
        listens, self._tells = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(act, speaks, listens)
        os.close(speaks)
        os.close(listens)
        self._rest = b""
        self._code: int | None = None
        self._taken = 0  # how much of what was said `hear` has given out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    # --- speaking and hearing -----------------------------------------------------------------------------------------

    def tell(self, line: str = "") -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, which whoever listens to it will notice
            os.write(self._tells, f"{line}\n".encode())

    def hear(self, *whats: str, silence: float = SILENCE) -> dict[str, Any]:
        """The next line of one of these kinds."""
        while True:
            while self._taken < len(self.said):
                self._taken += 1
                if self.said[self._taken - 1]["what"] in whats:
                    return self.said[self._taken - 1]
            if not self.listen(silence):
                raise Broken(
                    f"{self.name} ended before it said any of {whats}; the last that it said: {self.said[-3:]}"
                )

    def ask(self, line: str, *whats: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear(*whats)

    def listen(self, silence: float = SILENCE) -> bool:
        """Read what it says; False if it says nothing more."""
        if not select.select([self._hears], [], [], silence)[0]:
            raise Broken(f"{self.name} hangs: {silence:g} s without a word; the last that it said: {self.said[-3:]}")
        read = os.read(self._hears, 1 << 20)
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(read)

    def listen_for(self, seconds: float) -> None:
        """Read all that it says for some time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and select.select([self._hears], [], [], left)[0]:
            if not self.listen():
                return

    def finish(self) -> Self:
        """Hear it to its end, which is a good one."""
        while self.listen():
            continue
        if code := self._end():
            raise Broken(f"{self.name} ended with {code}; the last that it said: {self.said[-3:]}")
        return self

    def lines(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.said if line["what"] == what]

    def _take(self, line: dict[str, Any]) -> None:
        self.said.append(line)
        if line["what"] in _FAILED or line.get("flaw"):
            raise Broken(f"{self.name}: {line.get('flaw') or line.get('trace') or line}")

    # --- signals ------------------------------------------------------------------------------------------------------

    def stand_still(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, if it lives. What it had said before is heard."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(Broken):
                while self.listen():
                    continue
            self._end()

    def _end(self) -> int:
        if self._code is None:
            os.close(self._hears)
            os.close(self._tells)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _become(act: Callable[[Line], object], speaks: int, listens: int) -> None:
    """In the child: do the part, and end without a look at what the parent has on its stack."""
    code = 70
    line = Line(speaks, listens)
    try:
        first, last = sorted((speaks, listens))
        os.closerange(3, first)
        os.closerange(first + 1, last)
        os.closerange(last + 1, 4096)
        gc.freeze()
        threading.excepthook = lambda failed: line.say("odd", problem=f"in a thread: {failed.exc_value!r}")
        sys.unraisablehook = lambda failed: line.say("odd", problem=f"unraisable: {failed.exc_value!r}")
        found = act(line)
        if isinstance(found, Coroutine):
            asyncio.run(found)
        code = 0
    except BaseException:
        line.say("failed", trace=traceback.format_exc())
    finally:
        os._exit(code)


def apart(function: Callable[[], Coroutine[Any, Any, T]], silence: float = SILENCE) -> T:
    """What it returns in a process of its own."""

    def act(line: Line) -> None:
        line.say("result", data=pickle.dumps(asyncio.run(function())).hex())

    with Actor(getattr(function, "__name__", "somebody"), act) as actor:
        result: T = pickle.loads(bytes.fromhex(actor.hear("result", silence=silence)["data"]))
        actor.finish()
    return result
