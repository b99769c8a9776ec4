"""A handler in a process of its own: for work that keeps a core busy, and that can be killed.

The process is spawned for one task and imports the handler's module. Both sides talk in lines of JSON: the payload and
requests to stop go to the process, progress and the outcome come back. When the worker's process ends, however it ends,
the pipe is closed and the child ends too.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from byssus.errors import ByssusError, InputError
from byssus.values.inputs import checked_text
from byssus.worker.context import Attempt, ThreadContext, checked_progress
from byssus.worker.outcomes import (
    STOPPED,
    Failed,
    Outcome,
    ProcessFailed,
    Returned,
    Stopped,
    TaskStopped,
    error_json,
    outcome_of_error,
    outcome_of_value,
)


class ProcessAttempt:
    """The handler's process, as its worker sees it. An OS thread of the worker listens to it."""

    def __init__(self, function: Callable[..., Any], running: Attempt, context: ThreadContext, max_result: int) -> None:
        self._function = function
        self._running = running
        self._context = context
        self._max_result = max_result
        self._process: multiprocessing.process.BaseProcess | None = None
        self._is_killed = False

    def start(self, ended: Callable[[Outcome], object]) -> None:
        threading.Thread(target=self._run, args=(ended,), name="byssus-process", daemon=True).start()

    def kill(self) -> None:
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def _run(self, ended: Callable[[Outcome], object]) -> None:
        try:
            outcome = self._served()
        except BaseException as error:  # noqa: BLE001 - it travels to the task
            outcome = outcome_of_error(error)
        ended(outcome)

    def _served(self) -> Outcome:
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe()
        facts = {name: getattr(self._context, name) for name in _FACTS}
        self._process = process = spawning.Process(
            target=_main,
            args=(theirs, self._function, facts, self._running.task.payload, self._max_result),
            daemon=True,
        )
        try:
            process.start()
        except Exception as error:
            raise InputError(
                f"the handler {self._function!r:.80} cannot run in a process: {error}; process=True needs a function "
                "at the top of a module that can be imported"
            ) from error
        finally:
            theirs.close()
        forget = self._running.signal.on_abort(lambda: _send(ours, {"stop": True}))
        if self._is_killed:
            process.kill()
        try:
            outcome = self._listen(ours)
        finally:
            forget()
            ours.close()
            process.join()
        if outcome is not None:
            return outcome
        if self._is_killed:
            return STOPPED
        return Failed(error_json(ProcessFailed(f"the process of the handler ended with the code {process.exitcode}")))

    def _listen(self, ours: Connection) -> Outcome | None:
        """Take what the process sends, until its outcome comes; None if it ends without one."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                said = json.loads(ours.recv_bytes())
                if "progress" in said:
                    with contextlib.suppress(TaskStopped):  # the signal tells the process
                        self._context.progress(*said["progress"])
                elif "returned" in said:
                    return Returned(said["returned"])
                elif "failed" in said:
                    return Failed(*said["failed"])
                elif "stopped" in said:
                    return STOPPED
        return None


_FACTS = ("id", "type", "session_id", "user_id", "parent_id", "attempt", "max_retries")


class ProcessContext:
    """The task of a handler with `process=True`: progress and pause points. Steps are not available there."""

    id: str
    type: str
    session_id: str | None
    user_id: str | None
    parent_id: str | None
    attempt: int
    max_retries: int

    def __init__(self, connection: Connection, facts: dict[str, Any]) -> None:
        self.cancelled = False
        self._connection = connection
        self.__dict__.update(facts)

    def idempotency_key(self, name: str = "") -> str:
        """A key for other services that stays the same in each attempt at this task."""
        return f"{self.id}:{checked_text('name', name)}" if name else self.id

    def checkpoint(self) -> None:
        """A pause point: raises `TaskStopped` if the task is to stop."""
        if self.cancelled:
            raise TaskStopped

    def progress(self, fraction: float, note: str | None = None) -> None:
        """Store how far the task is, from 0 to 1, with a note. A pause point."""
        amount = checked_progress(fraction, note)
        self.checkpoint()
        _send(self._connection, {"progress": amount})

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("step", "sleep", "wait_for", "checkpointer"):
            raise ByssusError(f"ctx.{name} is not available with process=True; use a plain or an async handler")
        raise AttributeError(name)


def _main(connection: Connection, function: Callable[..., Any], facts: dict[str, Any], payload: str, most: int) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which tells us
    context = ProcessContext(connection, facts)
    threading.Thread(target=_obey, args=(connection, context), daemon=True).start()
    pid = os.getpid()
    try:
        outcome = outcome_of_value(function(context, json.loads(payload)), most)
    except BaseException as error:  # noqa: BLE001 - it travels to the worker
        outcome = outcome_of_error(error)
    if os.getpid() == pid:
        _send(connection, _as_dict(outcome))
    os._exit(0)  # whatever the handler has left behind


def _obey(connection: Connection, context: ProcessContext) -> None:
    try:
        while True:
            connection.recv_bytes()
            context.cancelled = True
    except (EOFError, OSError):
        os._exit(1)  # the worker's process has ended


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Returned(result):
            return {"returned": result}
        case Failed():
            return {"failed": list(outcome)}
        case _:
            assert isinstance(outcome, Stopped)
            return {"stopped": True}


def _send(connection: Connection, said: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other side is gone, which is noticed elsewhere
        connection.send_bytes(json.dumps(said).encode())
