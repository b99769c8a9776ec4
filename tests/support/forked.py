"""Runs of the command `byssus` in processes of their own, through the server that forks them: see fork_server.py."""

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]


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
    """Start the command with these standard streams, which are closed here; `has_terminal`: its own is the first."""
    asked = {
        "arguments": [*arguments],
        "environment": dict(env),
        "directory": str(cwd),
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
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, input: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured output in UTF-8."""
    (stdin, said), (heard, stdout), (complained, stderr) = os.pipe(), os.pipe(), os.pipe()
    with ThreadPoolExecutor(3) as streams:
        started = start(arguments, env=env, cwd=cwd, streams=(stdin, stdout, stderr))
        with started.answer as answer:
            streams.submit(_write, said, input)
            output, errors = streams.submit(_read, heard), streams.submit(_read, complained)
            answer.settimeout(timeout)
            try:
                code = int(answer.recv(100))
            except TimeoutError:
                os.kill(started.process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(["byssus", *arguments], timeout) from None
        return subprocess.CompletedProcess(["byssus", *arguments], code, output.result(), errors.result())


def _write(stream: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError), open(stream, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _read(stream: int) -> str:
    with open(stream, encoding="utf-8") as file:
        return file.read()


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
