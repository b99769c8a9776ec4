"""What the log says about the end of a run."""

from __future__ import annotations

import asyncio
import logging

from byssus.errors import REFUSALS
from byssus.queries.log.runs import RequestTaken
from byssus.values.shown import raised_at, reason

_log = logging.getLogger("byssus.agent")


def report(run_id: str, thread_id: str | None, stop_reason: str, error: BaseException | None) -> None:
    """Log how a run ended. What the caller gets raised before anything ran is no failure of a run."""
    run = named(run_id, thread_id)
    if error is None or isinstance(error, asyncio.CancelledError):
        _log.info("%s ended: %s", run, stop_reason)
    elif isinstance(error, REFUSALS):  # raised to the caller before anything ran
        _log.info("%s did not begin: %s", run, reason(error))
    elif isinstance(error, RequestTaken):
        _log.debug("%s joins the one that has its key", run)
    else:
        _log.warning("%s failed: %s%s", run, reason(error), raised_at(error))
        _log.debug("%s failed", run, exc_info=error)


def named(run_id: str, thread_id: str | None) -> str:
    """A run as the log names it. An agent without a checkpointer has no thread."""
    return f"run {run_id}" if thread_id is None else f"run {run_id} on thread {thread_id!r}"
