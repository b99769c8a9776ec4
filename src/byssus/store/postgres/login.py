"""Why a login failed: the SQLSTATE that the server gave, which libpq keeps to itself.

When a connection cannot be made, libpq passes on a text in the server's language and no code. It does write the code
into its trace of the protocol, so the attempt is repeated with a trace into memory. That is done for failures at once,
never for a server that does not answer, and only on Linux, where psycopg has traces; elsewhere the error stays.
"""

from __future__ import annotations

import os
import re
import selectors
import time

import psycopg
from psycopg import errors, pq

Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # which takes no file of its own

_SECONDS = 5.0
_REMEMBERED = 10.0
_last: tuple[float, tuple[str, str], str | None] = (0.0, ("", ""), None)  # when, for which failure, and its code
_CODE = re.compile(rb'^B\t\d+\tErrorResponse\t.*? C "([0-9A-Z]{5})"', re.MULTILINE)
_EVENTS = {pq.PollingStatus.READING: selectors.EVENT_READ, pq.PollingStatus.WRITING: selectors.EVENT_WRITE}


def explained(error: psycopg.OperationalError, conninfo: str) -> psycopg.Error:
    """The error with which connecting failed, as the class that the server's code has for it."""
    if error.sqlstate is not None or isinstance(error, errors.ConnectionTimeout):
        return error
    if error.pgconn is not None and error.pgconn.needs_password:  # then libpq did not even try
        return errors.InvalidPassword(str(error))
    code = _remembered_code(conninfo, str(error))
    try:
        return error if code is None else errors.lookup(code)(str(error))
    except KeyError:
        return error


def _remembered_code(conninfo: str, text: str) -> str | None:
    """The code, asked for once in a while: a server that is away is tried often, and each trace costs some memory."""
    asked = (conninfo, text)
    global _last  # noqa: PLW0603 - one for the process is enough
    then, about, code = _last
    if about != asked or time.monotonic() - then > _REMEMBERED:
        code = _code(conninfo)
        _last = (time.monotonic(), asked, code)
    return code


def _code(conninfo: str) -> str | None:
    """The code of the last refusal in another attempt to log in; None if the server had nothing to say."""
    if not hasattr(os, "memfd_create"):
        return None
    # In memory, and gone when it is closed: the trace holds what was sent to prove the password.
    with os.fdopen(os.memfd_create("byssus-login"), "rb") as trace:
        connection, written = pq.PGconn.connect_start(conninfo.encode()), os.dup(trace.fileno())
        try:
            connection.trace(written)
            connection.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
            _log_in(connection)
            connection.untrace()
        finally:
            connection.finish()
            os.close(written)  # psycopg leaves it open
        trace.seek(0)
        codes: list[bytes] = _CODE.findall(trace.read())
    return codes[-1].decode() if codes else None


def _log_in(connection: pq.abc.PGconn) -> None:
    """To the end of it, good or bad, or until it has taken too long."""
    deadline = time.monotonic() + _SECONDS
    while (status := connection.connect_poll()) in _EVENTS:
        with Selector() as selector:
            selector.register(connection.socket, _EVENTS[pq.PollingStatus(status)])
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return
