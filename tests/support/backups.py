"""A store that is written to while it is copied or checked, and all of its rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow
from byssus.queries.moving import copying as queries
from byssus.queries.moving.tables import TABLES
from byssus.store import opening, sharing
from byssus.store.database import Row, Store, Tx
from byssus.values.thread_key import ThreadKey


@contextlib.contextmanager
def opened(place: str | Path) -> Iterator[Store]:
    store = opening.open(str(place))
    try:
        yield store
    finally:
        sharing.release(store)


def say(store: Store, thread_id: str, *texts: str) -> None:
    body = '{{"role":"user","content":[{{"type":"text","text":"{}"}}]}}'
    store.write_now(
        threads.append, ThreadKey("", thread_id), [MessageRow(text, "user", body.format(text)) for text in texts]
    )


def rows_in(store: Store) -> dict[str, list[Row]]:
    """All that a backup carries."""

    def look(tx: Tx) -> dict[str, list[Row]]:
        return {table.name: queries.between(tx, table, table.start, table.end) for table in TABLES}

    return store.read_now(look)


class Writers:
    """Four threads that append numbered messages, each to two threads of the log in one transaction, or to one."""

    def __init__(self, store: Store, *, to_both: bool = True) -> None:
        self._store = store
        self._to_both = to_both
        self._changed = threading.Condition()
        self._counts = [0] * 4
        self._over = False
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(4)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        self.let_write()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()

    def _write(self, number: int) -> None:
        def both(tx: Tx, count: int) -> None:
            text = str(count)
            for side in "ab":
                threads.append(tx, ThreadKey("", f"{number}{side}"), [MessageRow(text, "user", f'"{text}"', 1)])

        while not self._over:
            count = self._counts[number] + 1
            if self._to_both:
                self._store.write_now(both, count)
            else:
                self._store.write_now(
                    threads.append, ThreadKey("", f"{number}a"), [MessageRow(str(count), "user", f'"{count}"', 1)]
                )
            with self._changed:
                self._counts[number] += 1
                self._changed.notify_all()

    def let_write(self, *_: object) -> None:
        """Wait until each of them has written something new."""
        with self._changed:
            before = list(self._counts)
            self._changed.wait_for(lambda: all(now > then for now, then in zip(self._counts, before, strict=True)))
