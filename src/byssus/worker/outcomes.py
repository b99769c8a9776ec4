"""How an attempt at a task ends, and the exceptions by which a handler says so."""

from __future__ import annotations

import json
import traceback
from typing import Any, Final, NamedTuple, TypeAlias

from byssus.errors import ByssusError, InputError
from byssus.threads.encoding import encode_strictly

MAX_RESULT = 10_000_000  # characters of JSON
_LONGEST_TRACE = 20_000  # characters, counted from the end
_LONGEST_MESSAGE = 10_000


class Retry(Exception):
    """Raised by a handler: try the task again, `after` so many seconds. It counts as a retry."""

    def __init__(self, message: str = "the handler asked for a retry", *, after: float | None = None) -> None:
        super().__init__(message)
        if after is not None and (
            isinstance(after, bool) or not isinstance(after, int | float) or not 0 <= after < 1e9
        ):
            raise InputError(f"after must be a number of seconds from 0 up, got {after!r:.80}")
        self.after = after


class NoRetry(Exception):
    """Raised by a handler, or a base class of its exceptions: the task fails at once, without retries."""


class TaskStopped(BaseException):
    """Raised at a pause point of a handler whose task is to stop. Let it pass; it is no `Exception`."""


class Suspended(BaseException):
    """Unwinds a handler that sleeps or waits; its task is given back then. Let it pass; it is no `Exception`."""


class UnknownTaskType(ByssusError):
    """A worker has no handler for the type of a task."""


class ResultTooLarge(ByssusError):
    """A handler has returned more than `max_result` characters of JSON."""


class DeadlineMissed(ByssusError):
    """A task did not end before its deadline."""


class WorkerDied(ByssusError):
    """The process of a worker ended, or stood still, while it ran a task."""


class HandlerStuck(ByssusError):
    """An async handler has blocked its event loop."""


class HandlerStopped(ByssusError):
    """A handler has raised `TaskStopped` of its own accord."""


class ProcessFailed(ByssusError):
    """The process of a handler ended without a result."""


class Returned(NamedTuple):
    """The handler has returned: the result as JSON."""

    result: str


class Failed(NamedTuple):
    """The handler has failed. `retry_after` is None for the usual backoff."""

    error: str
    may_retry: bool = True
    retry_after: float | None = None


class Stopped(NamedTuple):
    """The handler has stopped, because it was asked to or had to be stopped."""


class GivenBack(NamedTuple):
    """The task is given back: it sleeps, or waits for an event."""


Outcome: TypeAlias = Returned | Failed | Stopped | GivenBack
STOPPED: Final = Stopped()


def outcome_of_value(value: Any, max_result: int) -> Outcome:
    """What a handler's return value comes to. One that cannot be stored is not tried again: the work was done."""
    try:
        text = encode_strictly("the result of the handler", value)
        if len(text) > max_result:
            raise ResultTooLarge(
                f"the result has {len(text):,} characters of JSON, and may have {max_result:,}; store it elsewhere and "
                "return where it is, or pass max_result= to the worker"
            )
    except ByssusError as error:
        return Failed(error_json(error), may_retry=False)
    return Returned(text)


def outcome_of_error(error: BaseException) -> Outcome:
    """What an exception of a handler comes to."""
    if _is(error, TaskStopped):
        return STOPPED
    if _is(error, Suspended):
        return GivenBack()
    return Failed(
        error_json(error),
        may_retry=not _is(error, NoRetry),
        retry_after=error.after if isinstance(error, Retry) else None,
    )


def _is(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an exception is of this kind, or a task group has raised one that is."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(kind) is not None
    return isinstance(error, kind)


def error_json(error: BaseException) -> str:
    """An exception as a task keeps it."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - an exception of a program may be anything
        message = "<its message cannot be read>"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001
        trace = ""
    return json.dumps(
        {
            "type": type(error).__qualname__,
            "message": message[:_LONGEST_MESSAGE],
            "trace": trace[-_LONGEST_TRACE:],
        }
    )
