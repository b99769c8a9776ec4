"""A process that has imported the command `byssus`, and forks for each run of it, which saves the start of a Python.

What it forks is the command in a process of its own: with its own id, environment, directory, standard streams, exit
code and end. Only the imports are shared, and nothing of byssus is open when it forks. Tests of how the command starts
begin with a new Python (tests/cli/test_cli.py, chat/test_chat.py, screen/test_terminal.py).

On a terminal, the process that waits for the command does what a shell does: it owns the terminal, tells when the
command has stopped itself, and brings it back to the foreground.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import termios
import threading
import time
from typing import Any

from byssus.cli.commands import COMMANDS

_LOADED = (
    *("byssus.cli", "byssus.storage", "byssus.memory", "byssus.store.postgres.store"),
    *{command.module for command in COMMANDS.values()},
)


def main(server: socket.socket) -> int:
    for name in _LOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads must not fork"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the commands
    while True:
        data, streams, _, _ = socket.recv_fds(server, 1_000_000, 4)
        if not data:
            return 0
        if os.fork() == 0:
            server.close()
            return _attend(json.loads(data), streams)
        for stream in streams:
            os.close(stream)


def _attend(asked: dict[str, Any], streams: list[int]) -> int:
    """Wait for the command, and tell its id and its exit code; or be the command, and return its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, answer = streams
    terminal = os.dup(standard[0]) if asked["has_terminal"] else None
    if terminal is not None:
        _own(terminal)
    command = os.fork()
    if command == 0:
        os.close(answer)
        if terminal is not None:
            _come_to_the_foreground(terminal)
        return _run(asked, standard)
    for stream in standard:
        os.close(stream)
    signal.signal(signal.SIGHUP, lambda *_: _send(command, signal.SIGHUP))  # as shells do
    with socket.socket(fileno=answer) as told, contextlib.suppress(OSError):  # the test may have given up
        told.send(str(command).encode())
        while os.WIFSTOPPED(status := os.waitpid(command, os.WUNTRACED)[1]):
            _bring_back(command, terminal, told)
        told.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _own(terminal: int) -> None:
    """Be the first process of a session, whose terminal it is."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or a change of the foreground would stop it


def _come_to_the_foreground(terminal: int) -> None:
    """Be a job: the processes that get the signals of the keys."""
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpid())
    os.close(terminal)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)


def _bring_back(command: int, terminal: int | None, told: socket.socket) -> None:
    """Tell that the command has stopped, and continue it in the foreground when asked to."""
    if terminal is not None:
        os.tcsetpgrp(terminal, os.getpid())
    told.send(b"stopped")
    if not told.recv(100):
        _send(command, signal.SIGKILL)
    if terminal is not None:
        os.tcsetpgrp(terminal, command)
    _send(command, signal.SIGCONT)


def _send(command: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(command, signal_number)


def _run(asked: dict[str, Any], standard: list[int]) -> int:
    for place, stream in enumerate(standard):
        os.dup2(stream, place)
        os.close(stream)
    _open_streams()
    os.environ.clear()
    os.environ.update(asked["environment"])
    time.tzset()
    os.chdir(asked["directory"])
    sys.path[0] = asked["directory"]  # as `python -m` does it
    sys.argv = ["byssus", *asked["arguments"]]
    code: int = importlib.import_module("byssus.cli").main()
    return code


def _open_streams() -> None:
    """As Python opens them in UTF-8 mode: the old ones know what their files could do, and not that they are pipes."""
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        mode = "w" if place else "r"
        stream = open(place, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        code = main(given)
    sys.exit(code)
