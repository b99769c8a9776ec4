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
    if error is None or isinstance(error, asyncio.CancelledError):
        _log.info("run %s on thread %r ended: %s", run_id, thread_id, stop_reason)
    elif isinstance(error, REFUSALS):  # raised to the caller before anything ran
        _log.info("run %s on thread %r did not begin: %s", run_id, thread_id, reason(error))
    elif isinstance(error, RequestTaken):
        _log.debug("run %s on thread %r joins the one that has its key", run_id, thread_id)
    else:
        _log.warning("run %s on thread %r failed: %s%s", run_id, thread_id, reason(error), raised_at(error))
        _log.debug("run %s on thread %r failed", run_id, thread_id, exc_info=error)
