"""A transaction on Postgres: statements as the server takes them, in as few round trips as possible.

- What `run` and `many` send needs no answer and is held back until something is asked, or until the end; then all of
  it goes out in one breath. So nothing is under way on the server between two questions, and a process that stops there
  loses its transaction to the server's time limit instead of holding its locks.
- What one job of a group sends so is not needed by one on another thread: it may wait for the end of the group. There,
  rows for the same table become one INSERT.
- What the jobs of a group ask first is asked for all of them at once (`foresee`). A query may be repeated, so its first
  question is found by running it until it asks. So a group of any size costs the round trips of one append.
- A time is not fetched but used: the server puts its own clock in.
"""

from __future__ import annotations

import contextlib
import re
import selectors
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import psycopg

from byssus.errors import StoreError
from byssus.store.database import Dialect, Row
from byssus.store.jobs import Job
from byssus.store.postgres.login import Selector
from byssus.store.postgres.server import Connection, tables

_ROWS = 8  # in one INSERT; psycopg remembers how to send a statement of up to 50 parameters
_CLOCK = "to_char(({}) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
_PARAMETER = re.compile(r"(?<!:):([a-z_]\w*)")
_TABLE = re.compile(rf"\b(FROM|JOIN|INTO|UPDATE) ({'|'.join(tables())})\b")
_CONTROL = re.compile(r"\s*(BEGIN|START|COMMIT|END|ROLLBACK|ABORT|SAVEPOINT|RELEASE|PREPARE)\b", re.IGNORECASE)
_INSERT = re.compile(r"(INSERT INTO \w+ \([^()]+\) VALUES )(\([^()]+\))")

DIALECT = Dialect("postgresql", skip_locked="FOR UPDATE SKIP LOCKED")


class Moment(NamedTuple):
    """The time at which the transaction began, or so many seconds after the one at which it is used."""

    seconds: float


_NOW = Moment(0.0)
_Statement = tuple[str, dict[str, Any]]
_Question = _Statement | None  # None: there is none, or something else comes before it


class _Asks(BaseException):
    """What a query that is only tried out asks first."""

    def __init__(self, question: _Question) -> None:
        self.question = question


class _Trial:
    """A transaction that shows what a query asks first, and does nothing."""

    dialect = DIALECT

    def one(self, statement: str, /, **params: Any) -> Row | None:
        raise _Asks((statement, params))

    def all(self, statement: str, /, **params: Any) -> list[Row]:
        raise _Asks((statement, params))

    def run(self, statement: str, /, **params: Any) -> None:  # noqa: ARG002
        raise _Asks(None)

    def many(self, statement: str, rows: Sequence[dict[str, Any]], /) -> None:  # noqa: ARG002
        raise _Asks(None)

    def now(self) -> Moment:
        return _NOW

    def after(self, seconds: float, /) -> Moment:
        return Moment(seconds)


def _first_question(job: Job[Any]) -> _Question:
    try:
        job.call(_Trial())
    except _Asks as asks:
        return asks.question
    except BaseException:  # noqa: BLE001 - it will raise it again when it is run
        return None
    return None


class PostgresTx:
    """The transactions of one connection, one after the other."""

    dialect = DIALECT

    def __init__(self, connection: Connection, schema: str) -> None:
        # For good: leaving the mode sends the server a word after the answer, upon which it forgets its time limit.
        self._mode = connection.pipeline()
        self._pipeline = self._mode.__enter__()
        self._schema = schema
        # Two cursors: results that are not read must not be taken for the one that is.
        self._asking = connection.cursor()
        self._silent = connection.cursor()
        self._held_back: list[_Statement] = []  # what the next question depends on
        self._late: list[list[_Statement]] = []  # what only the end depends on, by thread
        self._rider: _Statement | None = None  # what goes with the first question
        self._foreseen: dict[Job[Any], tuple[_Statement, psycopg.Cursor[Row]]] = {}
        self._answer: tuple[_Statement, psycopg.Cursor[Row]] | None = None
        self._cursors: list[psycopg.Cursor[Row]] = []
        self._connection = connection
        self._selector = Selector()
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        self.is_answered = False  # whether the server has answered to anything

    def close(self) -> None:
        """Before the connection is closed, or when it is lost."""
        self._selector.close()
        with contextlib.suppress(psycopg.Error):
            self._mode.__exit__(None, None, None)

    def begin(self, *statements: str) -> None:
        self._held_back = [(statement, {}) for statement in statements]
        self._late = []
        self._rider = None
        self._foreseen, self._answer = {}, None
        self.is_answered = False

    def run_along(self, statement: str, /, **params: Any) -> None:
        """As `run`, as part of the first question: one statement less to send."""
        self._rider = (statement, params)

    def foresee(self, jobs: Sequence[Job[Any]]) -> None:
        """Ask at once what these jobs, each on a thread of its own, will ask first."""
        questions = [(job, question) for job in jobs if (question := _first_question(job))]
        if len(questions) < 2:
            return
        self._send_held_back()
        while len(self._cursors) < len(questions):
            self._cursors.append(self._connection.cursor())
        for (job, question), cursor in zip(questions, self._cursors, strict=False):
            self._execute(cursor, *question)
            self._foreseen[job] = (question, cursor)
        self._sync()
        self.is_answered = True

    def turn_to(self, job: Job[Any]) -> None:
        """What follows is this job's."""
        self._answer = self._foreseen.pop(job, None)

    def one(self, statement: str, /, **params: Any) -> Row | None:
        return self._ask(statement, params).fetchone()

    def all(self, statement: str, /, **params: Any) -> list[Row]:
        return self._ask(statement, params).fetchall()

    def run(self, statement: str, /, **params: Any) -> None:
        _check(statement)
        self._held_back.append((statement, params))

    def many(self, statement: str, rows: Sequence[dict[str, Any]], /) -> None:
        _check(statement)
        self._held_back += [(statement, row) for row in rows]

    def now(self) -> Moment:
        return _NOW

    def after(self, seconds: float, /) -> Moment:
        return Moment(seconds)

    def leave_thread(self) -> None:
        """The next statements are for another thread, and do not depend on those queued so far."""
        if self.is_answered:
            self._late.append(self._held_back)
            self._held_back = []

    def flush(self, *last: str) -> None:
        """Send the queued statements and read their results, together with statements that a query may not use."""
        first = [] if self._rider is None else [self._rider]
        # The first statement of each thread, then the second of each: adjacent ones can become one statement.
        late = [statement for same in zip_longest(*self._late) for statement in same if statement is not None]
        statements = [*late, *self._held_back, *first, *((statement, {}) for statement in last)]
        self._late, self._held_back, self._rider = [], [], None
        if statements:
            self._send(statements)
            self._sync()
            self.is_answered = True

    def undo(self, statement: str) -> None:
        """Drop the queued statements that were not sent, and roll back."""
        self._held_back = []
        with contextlib.suppress(psycopg.Error):  # what has failed is known; the rest of it is of no interest
            self._sync()
        self.flush(statement)

    @property
    def outcome(self) -> str | None:
        """The server's answer to the last statement."""
        return self._silent.statusmessage

    def _ask(self, statement: str, params: dict[str, Any]) -> psycopg.Cursor[Row]:
        if self._answer is not None:
            (question, cursor), self._answer = self._answer, None
            if question != (statement, params):
                raise StoreError(f"a query asks something else when it is repeated: {statement!r:.80}")
            return cursor
        self._send_held_back()
        self._execute(self._asking, statement, params)
        self._sync()
        self.is_answered = True
        return self._asking

    def _execute(self, cursor: psycopg.Cursor[Row], statement: str, params: dict[str, Any]) -> None:
        _check(statement)
        if self._rider is not None:
            (rider, more), self._rider = self._rider, None
            statement, params = f"WITH rider AS ({rider}) {statement}", {**params, **more}
        cursor.execute(_translated(statement, self._schema, _moments(params)), params)

    def _sync(self) -> None:
        """Wait for the answers. All must be on its way first: psycopg would wait with half a message in its hands."""
        server, is_sent = self._connection.pgconn, False
        while not is_sent:
            unsent = server.flush()
            events = self._selector.select(self._connection.silence)
            if not events:
                self._connection.give_up()
            for _, ready in events:
                if ready & selectors.EVENT_READ:
                    server.consume_input()  # else the server might wait for us, too
                is_sent = not unsent and bool(ready & selectors.EVENT_WRITE)  # there is room for the Sync itself
        self._pipeline.sync()

    def _send_held_back(self) -> None:
        statements, self._held_back = self._held_back, []
        self._send(statements)

    def _send(self, statements: list[_Statement]) -> None:
        for statement, params in _gathered(statements):
            prepare = None if params else False  # a few words are not worth it
            self._silent.execute(
                _translated(statement, self._schema, _moments(params)), params or None, prepare=prepare
            )


@lru_cache(maxsize=2_000)
def _check(statement: str) -> None:
    """A query is part of a transaction that others may share."""
    if _CONTROL.match(statement):
        raise StoreError(f"a query does not end its transaction: {statement!r:.80}")


def _moments(params: dict[str, Any]) -> tuple[tuple[str, Moment], ...]:
    return tuple((name, value) for name, value in params.items() if type(value) is Moment)


@lru_cache(maxsize=2_000)
def _translated(statement: str, schema: str, moments: tuple[tuple[str, Moment], ...]) -> bytes:
    """A statement as psycopg takes it: tables by their full names, times as the server's clock."""
    times = {name: _clock(moment.seconds) for name, moment in moments}
    statement = _TABLE.sub(rf'\1 "{schema}".\2', statement.replace("%", "%%"))
    return _PARAMETER.sub(lambda match: times.get(match[1]) or f"%({match[1]})s", statement).encode()


def _clock(seconds: float) -> str:
    # A lease counts from the moment at which it is taken: the transaction may have waited for the thread's row.
    return _CLOCK.format(f"clock_timestamp() + interval '{seconds:.6f} s'" if seconds else "transaction_timestamp()")


def _gathered(statements: list[_Statement]) -> Iterator[_Statement]:
    """The same statements, with neighbours that insert into the same table as one."""
    for statement, same in groupby(statements, key=lambda one: one[0]):
        rows = [params for _, params in same]
        if len(rows) == 1 or not _INSERT.fullmatch(statement):
            yield from ((statement, params) for params in rows)
            continue
        while rows:
            size = 1 << min(len(rows), _ROWS).bit_length() - 1  # few sizes: each is a statement of its own
            some, rows = rows[:size], rows[size:]
            params = {f"{name}_{row}": value for row, each in enumerate(some) for name, value in each.items()}
            yield (_of_rows(statement, size), params) if size > 1 else (statement, some[0])


@lru_cache(maxsize=1_000)
def _of_rows(statement: str, count: int) -> str:
    match = _INSERT.fullmatch(statement)
    assert match is not None
    rows = (_PARAMETER.sub(rf":\1_{row}", match[2]) for row in range(count))
    return match[1] + ", ".join(rows)
