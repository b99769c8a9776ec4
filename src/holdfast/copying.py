"""Copy one database into another: everything, resumable, and verified.

A copy compares both databases page by page, makes the pages of the target that differ equal to the source's, and
compares again, until a comparison of everything finds no difference. So there is no state to keep: a copy that was
killed goes on by skipping what is there, and what the source wrote meanwhile is one more difference.

- The target is empty, or an unfinished copy of the same source. A finished copy is a database that somebody may work
  with: it is compared and never written to.
- Success means that the last comparison, which changes nothing, found every page equal. A page that was equal before
  the comparison began and is still equal was so when it began: the target is the source as it was at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.errors import InputError, StoreError
from holdfast.store import copying, places, sharing
from holdfast.store.copying import TABLES, Digest, Key, Mark, Table
from holdfast.store.database import Row, Store
from holdfast.store.sqlite_file import MEMORY

_PASSES = 5  # how often the pages that differ are written before the source counts as too busy


class Progress(NamedTuple):
    """Where a copy is. `done` and `total` are rows of this step; `skipped` were there already."""

    step: str  # comparing, copying or verifying
    table: str
    done: int
    total: int
    skipped: int


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


class _Comparison:
    """What a comparison of everything has found."""

    def __init__(self, total: int) -> None:
        self.total = total  # rows in the source, when it began
        self.equal = 0  # rows in pages that are equal
        self.digests = [Digest(table) for table in TABLES]  # of the source
        self.differences: list[_Difference] = []


def copy(source: str, target: str, hear: Callable[[Progress], object] = lambda _: None) -> Copied:
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
            return _Copy(origin, goal, hear).run()


@contextmanager
def _opened(place: str, *, create: bool) -> Iterator[Store]:
    """The database at a place. A file that must be there already is not made."""
    if place == MEMORY:
        raise InputError(f"{MEMORY} ends with this process; name a file")
    if not (create or places.exists(place)):
        raise InputError(f"there is no database at {places.name(place)}; check where it is")
    store = places.open_store(place)
    try:
        yield store
    finally:
        sharing.release(store)


class _Copy:
    def __init__(self, source: Store, target: Store, hear: Callable[[Progress], object]) -> None:
        self._source = source
        self._target = target
        self._hear = hear
        self._written = dict.fromkeys((table.name for table in TABLES), 0)

    def run(self) -> Copied:
        mark = self._begun()
        if mark.finished_at is not None:
            return self._only_verify(mark.finished_at)
        found = self._compare("comparing")
        for _ in range(_PASSES):
            if found.differences:
                self._mirror(mark, found)
                found = self._compare("verifying")
        if found.differences:
            raise StoreError(
                f"{self._target.name} still differs from {self._source.name} after {_PASSES} passes "
                f"({self._told(found)}): one of them is being written to; stop what writes there, then run the same "
                "copy again to go on"
            )
        return self._finish(found)

    def _only_verify(self, finished_at: str) -> Copied:
        found = self._compare("verifying")
        if found.differences:
            raise InputError(
                f"{self._target.name} is a copy of {self._source.name} that was finished at {finished_at}, and by now "
                f"they differ ({self._told(found)}); a finished copy is not written to: name an empty database"
            )
        return self._copied(found, was_finished=True)

    def _begun(self) -> Mark:
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

    def _finish(self, found: _Comparison) -> Copied:
        self._target.keys_given([table.name for table in TABLES if table.key == ("key",)])
        copied = self._copied(found, was_finished=False)
        self._target.write_now(copying.finish, copied.sha256)
        return copied

    def _copied(self, found: _Comparison, *, was_finished: bool) -> Copied:
        tables = [
            CopiedTable(table.name, digest.rows, self._written[table.name], digest.value())
            for table, digest in zip(TABLES, found.digests, strict=True)
        ]
        whole = copying.combined(table.sha256 for table in tables)
        return Copied(self._source.name, self._target.name, tables, whole, was_finished)

    # --- comparing ----------------------------------------------------------------------------------------------------

    def _compare(self, step: str) -> _Comparison:
        """Read both databases from end to end. It writes nothing."""
        found = _Comparison(sum(self._source.read_now(copying.count, table) for table in TABLES))
        for table, digest in zip(TABLES, found.digests, strict=True):
            for _ in self._compare_table(table, digest, found):
                self._hear(Progress(step, table.name, sum(each.rows for each in found.digests), found.total, 0))
        return found

    def _compare_table(self, table: Table, digest: Digest, found: _Comparison) -> Iterator[None]:
        """Page by page, and byte by byte. Where the target comes to its end, the rest is one difference."""
        after = table.start
        while after != table.end:
            rows, upto = self._source.read_now(copying.page, table, after, table.end)
            there = self._target.read_now(copying.between, table, after, upto, len(rows) + 1)
            lines = copying.encoded(rows)
            digest.add(len(rows), lines)
            if lines == copying.encoded(there):
                found.equal += len(rows)
            elif not there and not self._target.read_now(copying.between, table, after, table.end, 1):
                found.differences.append(_Difference(table, after, table.end, needs_room=False))
                return
            else:
                found.differences.append(_Difference(table, after, upto, copying.needs_room(table, rows, there)))
            yield
            after = upto

    def _told(self, found: _Comparison) -> str:
        """The first difference, for a person."""
        table, after, upto, _ = found.differences[0]
        ours, theirs = (store.read_now(copying.count, table) for store in (self._source, self._target))
        first = "the beginning" if after == table.start else f"{_joined(table.key)} {_joined(after)}"
        last = "the end" if upto == table.end else _joined(upto)
        return f"table {table.name}: {ours} rows in the source, {theirs} in the target; between {first} and {last}"

    # --- writing ------------------------------------------------------------------------------------------------------

    def _mirror(self, mark: Mark, found: _Comparison) -> None:
        """Make the pages that differ equal. Rows go before their parents do, and come after them."""
        for difference in reversed(found.differences):
            if difference.needs_room:
                for page in self._pages(difference):
                    self._target.write_now(copying.make_room, mark.key, *page)
        done = 0
        for difference in found.differences:
            for page in self._pages(difference):
                name = page.table.name
                self._written[name] += self._target.write_now(copying.put, mark.key, *page)
                done += len(page.rows)
                self._hear(Progress("copying", name, done, max(done, found.total - found.equal), found.equal))

    def _pages(self, difference: _Difference) -> Iterator[_Page]:
        """The source's pages in a range that differs, as they are now."""
        table, after, last, _ = difference
        while after != last:
            rows, upto = self._source.read_now(copying.page, table, after, last)
            yield _Page(table, after, upto, rows)
            after = upto


def _joined(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
