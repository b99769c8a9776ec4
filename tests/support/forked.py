"""Programs in processes of their own, through the server that forks them: see fork_server.py."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

_ROOT = Path(__file__).parents[2]
PIPE = subprocess.PIPE


class Process:
    """As `subprocess.Popen` of a Python in UTF-8 mode, with these arguments; its streams are text.

    What takes long to import, the server can import once for many programs that use it. With `has_terminal`, the
    standard input is a terminal, which the program then owns.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] = os.environ,
        cwd: Path = _ROOT,
        imports: Sequence[str] = (),
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        has_terminal: bool = False,
    ) -> None:
        self.args = [*arguments]
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        asked = {
            "arguments": self.args,
            "environment": dict(env),
            "directory": str(cwd),
            "imports": [*imports],
            "has_terminal": has_terminal,
        }
        with contextlib.ExitStack() as ends:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.callback(theirs.close)
            given = [0, 1, 2, theirs.fileno()]
            for place, (name, wish) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
                if wish == PIPE:
                    reads, writes = os.pipe()
                    given[place], kept = (writes, reads) if place else (reads, writes)
                    ends.callback(os.close, given[place])
                    newline = None if place else "\n"
                    vars(self)[name] = open(kept, "r" if place else "w", encoding="utf-8", newline=newline)  # noqa: SIM115
                elif wish is not None:
                    given[place] = wish
            socket.send_fds(_server().socket, [json.dumps(asked).encode()], given)
        self._told, self._waiting = ours, threading.Lock()
        self.pid = int(ours.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        with self._waiting:
            return self._end(timeout)

    def poll(self) -> int | None:
        if self._waiting.acquire(blocking=False):  # otherwise another thread waits, and will know it first
            try:
                return self._end(0)
            except BlockingIOError:
                pass
            finally:
                self._waiting.release()
        return self.returncode

    def _end(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                while (told := self._told.recv(100)) == b"stopped":
                    pass
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self.returncode = int(told)
            self._told.close()
        return self.returncode

    def stop(self) -> None:
        """Stop it, and wait until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        with self._waiting:
            self._told.settimeout(60)
            assert self._told.recv(100) == b"stopped"

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, input: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Tell it something, and hear the rest of what it says. It is killed if that takes too long."""
        with ThreadPoolExecutor(3) as streams:
            if self.stdin is not None:
                streams.submit(_write, self.stdin, input)
            said, complained = (streams.submit(_read, stream) for stream in (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()
                raise
            return said.result(), complained.result()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        """As that of Popen: its streams are closed, and it is waited for."""
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


class Started(NamedTuple):
    """A command that runs: its process, and a socket that tells when it stops or with which code it has ended."""

    process: int
    answer: socket.socket


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    streams: tuple[int, int, int],
    has_terminal: bool = False,
) -> Started:
    """Start the command `byssus` with these standard streams, which are closed here; its terminal may be the first."""
    asked = {
        "arguments": ["-m", "byssus", *arguments],
        "environment": dict(env),
        "directory": str(cwd),
        "imports": [],
        "has_terminal": has_terminal,
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        socket.send_fds(_server().socket, [json.dumps(asked).encode()], [*streams, theirs.fileno()])
        theirs.close()
        return Started(int(ours.recv(100)), ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        for stream in {*streams}:
            os.close(stream)


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path = _ROOT,
    imports: Sequence[str] = (),
    input: str = "",
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a Python in UTF-8 mode with these arguments, with captured output."""
    process = Process(arguments, env=env, cwd=cwd, imports=imports, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    output, errors = process.communicate(input, timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), output, errors)


def _write(stream: IO[str], text: str) -> None:
    with contextlib.suppress(BrokenPipeError), stream:
        stream.write(text)


def _read(stream: IO[str] | None) -> str:
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read()


class _Server(NamedTuple):
    socket: socket.socket
    process: subprocess.Popen[bytes]  # which would warn that it still runs, if it were dropped


@functools.cache
def _server() -> _Server:
    """One for each process that runs tests. It ends when this one does: then its socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
        cwd=_ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return _Server(ours, process)
