"""Copy one database into another: everything, resumable, and verified.

A copy compares both databases page by page, makes the pages of the target that differ equal to the source's, and
compares again, until a comparison of everything finds no difference. So there is no state to keep: a copy that was
killed goes on by skipping what is there, and what the source wrote meanwhile is one more difference.

- The target is empty, or an unfinished copy of the same source. A finished copy may be in use: it is
  compared and never written to.
- Success means that the last comparison, which changes nothing, found every page equal. A page that was equal before
  the comparison began and is still equal was so when it began: the target is the source as it was at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from byssus.errors import InputError, StoreError
from byssus.queries.moving import checks, copying
from byssus.queries.moving.copying import CopyRow, Digest
from byssus.queries.moving.tables import TABLES, Key, Table
from byssus.store import opening, sharing
from byssus.store.database import Row, Store
from byssus.store.sqlite.file import MEMORY
from byssus.values.thread_key import LONGEST_ID

T = TypeVar("T")

PASSES = 5  # how often the pages that differ are written before the source counts as too busy


class Progress(NamedTuple):
    """Where a copy is. `done` and `total` are rows of this step; `skipped` were there already."""

    step: str  # comparing, copying or verifying
    table: str
    done: int
    total: int
    skipped: int


OnProgress: TypeAlias = Callable[[Progress], object]


class CopiedTable(NamedTuple):
    name: str
    rows: int
    written: int  # how many of them this copy added or changed; the others were there already
    sha256: str


class Copied(NamedTuple):
    """A copy that was verified: both databases hold these rows."""

    source: str
    target: str
    tables: list[CopiedTable]
    sha256: str  # of all tables
    was_finished: bool  # the target was a finished copy already: it was compared, and nothing was written


class _Difference(NamedTuple):
    table: Table
    after: Key
    upto: Key
    needs_room: bool


class _Page(NamedTuple):
    table: Table
    after: Key
    upto: Key
    rows: list[Row]


class Comparison:
    """What a comparison of everything has found."""

    def __init__(self, total: int) -> None:
        self.total = total  # rows in the source, when it began
        self.equal = 0  # rows in pages that are equal
        self.digests = [Digest(table) for table in TABLES]  # of the source
        self.differences: list[_Difference] = []

    @property
    def sha256(self) -> str:
        """Of all rows of the source."""
        return copying.combined(digest.value() for digest in self.digests)


def copy(source: str, target: str, progress: OnProgress = lambda _: None) -> Copied:
    """Copy all that is in `source` into `target`, or go on with a copy that was interrupted.

    Each is the path of a SQLite file or the DSN of a Postgres database.
    """
    with _opened(source, create=False) as origin:
        mark = origin.read_now(copying.last_mark)
        if mark is not None and mark.finished_at is None:
            raise InputError(
                f"{origin.name} is itself an unfinished copy of {mark.source}; finish that one first: run it again"
            )
        with _opened(target, create=True) as goal:
            if goal is origin:
                raise InputError(f"{origin.name} cannot be copied into itself; name another database as the target")
            return copy_into(origin, goal, progress)


def copy_into(source: Store, target: Store, progress: OnProgress) -> Copied:
    """The same, of databases that are open."""
    return _Copy(source, target, progress).run()


@contextmanager
def _opened(place: str, *, create: bool) -> Iterator[Store]:
    """The database at a place. A file that must be there already is not made."""
    if place == MEMORY:
        raise InputError(f"{MEMORY} ends with this process; name a file")
    if not (create or opening.exists(place)):
        raise InputError(f"there is no database at {opening.name(place)}; check where it is")
    store = opening.open(place)
    try:
        yield store
    finally:
        sharing.release(store)


class RunQuery(Protocol):
    """What runs a query: a method of a store, or a transaction that goes on."""

    def __call__(self, query: Callable[..., T], /, *args: object) -> T: ...


class Mirror:
    """Makes a target equal to a source, in one transaction or in several."""

    def __init__(self, source: RunQuery, target: RunQuery, write: RunQuery, progress: OnProgress) -> None:
        self._source = source
        self._target = target
        self._write = write
        self._progress = progress
        self.written = dict.fromkeys((table.name for table in TABLES), 0)
        self.removed = 0  # rows that the target had, and the source has not

    def compare(self, step: str) -> Comparison:
        """Read both databases from end to end. It writes nothing."""
        found = Comparison(sum(self._source(copying.count, table) for table in TABLES))
        for table, digest in zip(TABLES, found.digests, strict=True):
            for _ in self._compare_table(table, digest, found):
                self._progress(Progress(step, table.name, sum(each.rows for each in found.digests), found.total, 0))
        return found

    def _compare_table(self, table: Table, digest: Digest, found: Comparison) -> Iterator[None]:
        """Page by page, and byte by byte. Where the target comes to its end, the rest is one difference."""
        after = table.start
        while after != table.end:
            rows, upto = self._source(copying.page, table, after, table.end)
            there = self._target(copying.between, table, after, upto, len(rows) + 1)
            lines = copying.encoded(rows)
            digest.add(len(rows), lines)
            if lines == copying.encoded(there):
                found.equal += len(rows)
            elif not there and not self._target(copying.between, table, after, table.end, 1):
                found.differences.append(_Difference(table, after, table.end, needs_room=False))
                return
            else:
                found.differences.append(_Difference(table, after, upto, copying.needs_room(table, rows, there)))
            yield
            after = upto

    def describe(self, found: Comparison) -> str:
        """The first difference, for a person."""
        table, after, upto, _ = found.differences[0]
        ours, theirs = (ask(copying.count, table) for ask in (self._source, self._target))
        first = "the beginning" if after == table.start else f"{_joined(table.key)} {_joined(after)}"
        last = "the end" if upto == table.end else _joined(upto)
        return f"table {table.name}: {ours} rows in the source, {theirs} in the target; between {first} and {last}"

    def write(self, mark: int, found: Comparison) -> None:
        """Make the pages that differ equal. Rows go before their parents do, and come after them."""
        for difference in reversed(found.differences):
            if difference.needs_room:
                for page in self._pages(difference):
                    self.removed += self._write(copying.make_room, mark, *page)
        done = 0
        for difference in found.differences:
            for page in self._pages(difference):
                name = page.table.name
                self.written[name] += self._put(mark, page)
                done += len(page.rows)
                self._progress(Progress("copying", name, done, max(done, found.total - found.equal), found.equal))

    def _put(self, mark: int, page: _Page) -> int:
        try:
            return self._write(copying.put, mark, *page)
        except InputError as error:
            raise self._explained(error) from error

    def _explained(self, error: InputError) -> InputError:
        """Name the ids that the target does not take, if it is for them that it refuses a row."""
        found = self._source(checks.long_ids)[:5]
        if not found:
            return error
        some = ", ".join(
            f"{table}.{column} {begins[:40]!r}... ({size:,} bytes)" for table, column, begins, size in found
        )
        return InputError(
            f"the target takes no ids of more than {LONGEST_ID:,} bytes, and the source has some: {some}; "
            "'byssus check' on the source lists them: fork a thread under a shorter id and delete the other, then run "
            "the same copy again"
        )

    def _pages(self, difference: _Difference) -> Iterator[_Page]:
        """The source's pages in a range that differs, as they are now."""
        table, after, last, _ = difference
        while after != last:
            rows, upto = self._source(copying.page, table, after, last)
            yield _Page(table, after, upto, rows)
            after = upto

    def copied(self, source: str, target: str, found: Comparison, *, was_finished: bool) -> Copied:
        tables = [
            CopiedTable(table.name, digest.rows, self.written[table.name], digest.value())
            for table, digest in zip(TABLES, found.digests, strict=True)
        ]
        return Copied(source, target, tables, found.sha256, was_finished)


class _Copy:
    def __init__(self, source: Store, target: Store, progress: OnProgress) -> None:
        self._source = source
        self._target = target
        self._mirror = Mirror(source.read_now, target.read_now, target.write_now, progress)

    def run(self) -> Copied:
        mark = self._begun()
        if mark.finished_at is not None:
            return self._only_verify(mark.finished_at)
        found = self._mirror.compare("comparing")
        for _ in range(PASSES):
            if found.differences:
                self._mirror.write(mark.key, found)
                found = self._mirror.compare("verifying")
        if found.differences:
            raise StoreError(
                f"{self._target.name} still differs from {self._source.name} after {PASSES} passes "
                f"({self._mirror.describe(found)}): one of them is being written to; stop what writes there, then run "
                "the same copy again to go on"
            )
        return self._finish(found)

    def _only_verify(self, finished_at: str) -> Copied:
        found = self._mirror.compare("verifying")
        if found.differences:
            raise InputError(
                f"{self._target.name} is a copy of {self._source.name} that was finished at {finished_at}, and by now "
                f"they differ ({self._mirror.describe(found)}); a finished copy is not written to: name an empty "
                "database"
            )
        return self._copied(found, was_finished=True)

    def _begun(self) -> CopyRow:
        mark = self._target.write_now(copying.begin, self._source.name)
        if mark is None:
            raise InputError(
                f"{self._target.name} holds data that no copy brought there; name an empty database as the target"
            )
        if mark.source != self._source.name:
            state = "a finished" if mark.finished_at else "an unfinished"
            raise InputError(
                f"{self._target.name} is {state} copy of {mark.source}, and not of {self._source.name}; "
                "name an empty database as the target"
            )
        return mark

    def _finish(self, found: Comparison) -> Copied:
        self._target.keys_given([table.name for table in TABLES if table.key == ("key",)])
        copied = self._copied(found, was_finished=False)
        self._target.write_now(copying.finish, copied.sha256)
        return copied

    def _copied(self, found: Comparison, *, was_finished: bool) -> Copied:
        return self._mirror.copied(self._source.name, self._target.name, found, was_finished=was_finished)


def _joined(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
