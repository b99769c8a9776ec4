"""A tool that runs shell commands.

A command is a process group of its own without a terminal and without input. It ends as a group: when its time is over,
when the run is aborted, and when the shell itself ends, so that nothing of it is left running. Of the environment it
sees a list of variables. It may still do all that your user may do, which is why a person approves each one.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from byssus.errors import InputError
from byssus.tools import Tool, ToolContext, tool
from byssus.tools.execution import in_thread
from byssus.tools.ready.folder import Folder, Where
from byssus.values.decisions import Ask, Deny
from byssus.values.results import ToolResult

PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE")
_FIXED = {"TERM": "dumb", "NO_COLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
_HEAD, _TAIL = 8_000, 24_000  # bytes of the output that are kept
_LONGEST = 3_600  # seconds
_LOOK, _BETWEEN, _MOST_SHOWN = 0.05, 0.1, 4_000  # seconds between looks and updates, characters of an update
_GRACE, _ABORTED = 2.0, 0.5  # seconds between SIGTERM and SIGKILL; less in an abort, after which the program may end
_DRAIN = 0.5  # seconds for what is left in the pipe


def shell(
    folder: str | os.PathLike[str] = ".", *, env: Mapping[str, str] | None = None, seconds: int = 120
) -> list[Tool[..., Any]]:
    """Return the tool `shell`, which runs commands in a folder; a person approves each one.

    `env` adds variables to those of `PASSED_ON`. A command may take `seconds`, unless the model asks for another time.
    If the process dies during a command, a person is asked whether it runs again.
    """
    runner = _Shell(Folder(folder), dict(env or {}), seconds)
    return [tool(name="shell", recovery="ask", approval=runner.asked, sequential=True)(runner.run)]


class _Shell:
    def __init__(self, folder: Folder, env: dict[str, str], seconds: int) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int) or not 1 <= seconds <= _LONGEST:
            raise InputError(f"seconds must be a number from 1 to {_LONGEST:,}, got {seconds!r:.80}")
        self._folder = folder
        self._env = env
        self._seconds = seconds

    def asked(self, context: ToolContext) -> Ask | Deny:
        """Show a person where the command would run, too."""
        try:
            self._folder.bind(context.arguments)
        except InputError as error:
            return Deny(str(error))
        return Ask("Run this command?")

    async def run(
        self,
        command: Annotated[str, "for /bin/sh"],
        context: ToolContext,
        seconds: Annotated[int | None, "how long it may take; the default is enough for most"] = None,
        folder: Where = "",
    ) -> ToolResult:
        """Run a shell command. There is no input and no terminal, and nothing goes on in the background afterwards."""
        self._folder.check(folder)
        if not command.strip() or "\0" in command:
            raise InputError(f"a command must be text without NUL characters, got {command!r:.80}")
        limit = self._seconds if seconds is None else seconds
        if not 1 <= limit <= _LONGEST:
            raise InputError(f"seconds must be from 1 to {_LONGEST:,}, got {limit}")
        running = _Command(command, self._folder.path, {**_passed_on(), **self._env}, limit, context)
        work = asyncio.ensure_future(in_thread(running.run))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may come after a cancellation
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            running.is_stopped = True
            await asyncio.wait({work}, timeout=_ABORTED + 2 * _DRAIN)
            raise


def _passed_on() -> dict[str, str]:
    return {"PATH": os.defpath, **{name: os.environ[name] for name in PASSED_ON if name in os.environ}, **_FIXED}


class _Command:
    """One command, run by an OS thread that stays with it to the end."""

    def __init__(self, command: str, folder: str, env: dict[str, str], seconds: int, context: ToolContext) -> None:
        self.is_stopped = False
        self._command, self._folder, self._env = command, folder, env
        self._seconds = seconds
        self._context = context
        self._output = _Output(context)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - a person has approved it
            ["/bin/sh", "-c", self._command],
            cwd=self._folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )

    def run(self) -> ToolResult:
        began = time.monotonic()
        with self._start() as process:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            try:
                is_late = self._wait(process, began + self._seconds)
            finally:
                _kill(process, signal.SIGKILL)  # what is left of its group
            self._drain(process)
        return self._result(process.returncode, time.monotonic() - began, is_late=is_late)

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Read what it prints until it has ended, and end it when it is time to; whether it was too late."""
        killed_at: float | None = None
        is_late = False
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout or -1, selectors.EVENT_READ)
            while not _has_ended(process):
                if self._output.is_closed:  # and it goes on
                    time.sleep(_LOOK)
                elif ready.select(_LOOK):
                    self._output.read(process)
                self._output.report()  # what came too soon after the last update
                now = time.monotonic()
                is_late = is_late or (now > deadline and killed_at is None)
                if killed_at is None and (is_late or self.is_stopped or self._context.signal.aborted):
                    killed_at = now
                    _kill(process, signal.SIGTERM)
                elif killed_at is not None and now > killed_at + (_GRACE if is_late else _ABORTED):
                    _kill(process, signal.SIGKILL)
        return is_late

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        """Read what is left. A process that has left the group may hold the pipe open for ever."""
        deadline = time.monotonic() + _DRAIN
        while time.monotonic() < deadline and self._output.read(process):
            pass
        process.wait()
        self._output.report(last=True)

    def _result(self, code: int, took: float, *, is_late: bool) -> ToolResult:
        text = self._output.text()
        if is_late:
            ending = f"[killed after {self._seconds} s: it may have taken effect in part]"
        elif code < 0:
            ending = f"[killed by signal {-code}: {(signal.strsignal(-code) or 'unknown').lower()}]"
        else:
            ending = f"[exit code {code}]"
        about = {"exit_code": code, "seconds": round(took, 3), "timed_out": is_late, "bytes": self._output.count}
        parts = [text.rstrip("\n"), ending] if text.strip() else [ending]
        return ToolResult("\n".join(parts), details=about, is_error=is_late or code != 0)


class _Output:
    """What a command prints: its head and its tail, and progress while it runs."""

    def __init__(self, context: ToolContext) -> None:
        self.count = 0
        self.is_closed = False
        self._head, self._tail = bytearray(), bytearray()
        self._context = context
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fresh = ""
        self._reported_at = float("-inf")

    def read(self, process: subprocess.Popen[bytes]) -> bool:
        """Read what is there; False if there is nothing, now or ever again."""
        assert process.stdout is not None
        data = process.stdout.read(65536)
        self.is_closed = data == b""
        if not data:
            return False
        self.count += len(data)
        room = _HEAD - len(self._head)
        self._head += data[: max(room, 0)]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > 2 * _TAIL:
            del self._tail[:-_TAIL]
        self._fresh = f"{self._fresh}{self._decoder.decode(data)}"[-_MOST_SHOWN:]
        self.report()
        return True

    def report(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._fresh and (last or now > self._reported_at + _BETWEEN):
            self._context.update(self._fresh)
            self._fresh, self._reported_at = "", now

    def text(self) -> str:
        left_out = self.count - len(self._head) - len(self._tail[-_TAIL:])
        tail = bytes(self._tail[-_TAIL:])
        if not left_out:
            return _readable(bytes(self._head) + tail)
        return f"{_readable(bytes(self._head))}\n[... {left_out:,} bytes left out ...]\n{_readable(tail)}"


def _readable(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the shell has ended. It stays a zombie, so that its group's number is not given to another one."""
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def _kill(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
