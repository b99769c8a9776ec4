"""A process that has imported byssus, and forks for each run of a program, which saves the start of a Python.

What it forks is a Python in a process of its own: with its own id, environment, directory, standard streams, exit code
and end. Only the imports are shared, and nothing of byssus is open when it forks. It knows three command lines:
`[-W error] -m module ...`, `[-W error] -c program ...` and `[-W error] file ...`. Tests of how the command, a module
or an interpreter starts begin with a new Python (tests/cli/test_cli.py, chat/test_chat.py, screen/test_terminal.py).

On a terminal, the process that waits for the program does what a shell does: it owns the terminal, tells when the
program has stopped itself, and brings it back to the foreground.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import termios
import threading
import time
import types
import warnings
from collections.abc import Iterable
from typing import Any

from byssus.cli.commands import COMMANDS

_LOADED = (
    "byssus.cli",
    *{command.module for command in COMMANDS.values()},
    "byssus.storage",
    "byssus.memory",
    "byssus.checkpointer",
    "byssus.store.postgres.store",
    "byssus.providers.anthropic",
    "byssus.providers.scripted",
)


def main(server: socket.socket) -> int:
    _load(_LOADED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the programs
    while True:
        data, streams, _, _ = socket.recv_fds(server, 1_000_000, 4)
        if not data:
            return 0
        asked = json.loads(data)
        _load(asked["imports"])
        if os.fork() == 0:
            server.close()
            return _attend(asked, streams)
        for stream in streams:
            os.close(stream)


def _load(names: Iterable[str]) -> None:
    if all(name in sys.modules for name in names):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names:
            importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads must not fork"
    gc.freeze()


def _attend(asked: dict[str, Any], streams: list[int]) -> int:
    """Wait for the program, and tell its id and its exit code; or be the program, and return its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, answer = streams
    terminal = os.dup(standard[0]) if asked["has_terminal"] else None
    if terminal is not None:
        _own(terminal)
    program = os.fork()
    if program == 0:
        os.close(answer)
        if terminal is not None:
            _come_to_the_foreground(terminal)
        return _run(asked, standard)
    for stream in standard:
        os.close(stream)
    if terminal is not None:
        signal.signal(signal.SIGHUP, lambda *_: _send(program, signal.SIGHUP))  # as shells do
    with socket.socket(fileno=answer) as told, contextlib.suppress(OSError):  # the test may have given up
        told.send(str(program).encode())
        while os.WIFSTOPPED(status := os.waitpid(program, os.WUNTRACED)[1]):
            if terminal is None:
                told.send(b"stopped")
            else:
                _bring_back(program, terminal, told)
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


def _bring_back(program: int, terminal: int | None, told: socket.socket) -> None:
    """Tell that the program has stopped, and continue it in the foreground when asked to."""
    if terminal is not None:
        os.tcsetpgrp(terminal, os.getpid())
    told.send(b"stopped")
    if not told.recv(100):
        _send(program, signal.SIGKILL)
    if terminal is not None:
        os.tcsetpgrp(terminal, program)
    _send(program, signal.SIGCONT)


def _send(program: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal_number)


def _run(asked: dict[str, Any], standard: list[int]) -> int:
    for place, stream in enumerate(standard):
        os.dup2(stream, place)
        os.close(stream)
    _open_streams()
    os.environ.clear()
    os.environ.update(asked["environment"])
    time.tzset()
    os.chdir(asked["directory"])
    sys.path[:1] = [asked["directory"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this module and its packages, which the program has not imported
    return _python(asked["arguments"])


def _python(arguments: list[str]) -> int:
    """What `python` does with these arguments."""
    if arguments[:2] == ["-W", "error"]:
        arguments = arguments[2:]
        warnings.simplefilter("error")
    elif os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if arguments[1] == "byssus":
            code: int = importlib.import_module("byssus.cli").main()
            return code
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        return _execute(arguments[1], "<string>")
    sys.argv = [*arguments]
    sys.path[0] = os.path.dirname(arguments[0])
    with open(arguments[0], encoding="utf-8") as file:
        text = file.read()
    return _execute(text, arguments[0])


def _execute(text: str, name: str) -> int:
    """As the module `__main__`, and without what this one has imported."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins)
    if name != "<string>":
        vars(module).update(__file__=name)
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
    return 0


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
