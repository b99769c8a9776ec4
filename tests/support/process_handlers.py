"""A handler for processes, which import this module: so it imports little."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from byssus.errors import ByssusError
from byssus.worker import ProcessContext


def work(ctx: ProcessContext, payload: Any) -> Any:
    """What the payload says."""
    if payload == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if payload == "exit":
        raise SystemExit(5)
    if payload in ("obey", "hang"):
        ctx.progress(0.5, "begun")
    while payload == "obey":
        ctx.checkpoint()
        time.sleep(0.001)
    if payload == "hang":
        time.sleep(600)
    return [_step(ctx), os.getpid(), ctx.id, ctx.attempt, ctx.idempotency_key("x")]


def _step(ctx: Any) -> str:
    try:
        ctx.step("a", print)
    except ByssusError as error:
        return str(error)
    return "it is there"
