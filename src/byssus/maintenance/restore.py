"""Restores: copy a backup into an empty database. The backup does not change.

An interrupted restore leaves a mark in the database, and continues when it is run again.
"""

from __future__ import annotations

import os
import time
from typing import cast

from byssus.accounts.rows import RestoreResult
from byssus.errors import InputError
from byssus.maintenance.backup import (
    Counts,
    Meter,
    OnProgress,
    checked_name,
    opened,
    refuse_changed,
    refuse_damaged,
    refuse_unfinished,
    stoppable,
)
from byssus.maintenance.copy import Progress, copy_into
from byssus.queries.moving import copying
from byssus.store import opening
from byssus.store.database import Store
from byssus.store.operations import Runner
from byssus.store.sqlite.file import checked_path

_NAMED = ("threads", "users", "tasks", "prices")  # what people know of a database


async def restore(store: Runner, path: str | os.PathLike[str], *, progress: OnProgress | None = None) -> RestoreResult:
    """Restore a backup into this database, which must be empty, and verify it.

    An interrupted restore continues when it is run again. `progress` is called as in `backup`.
    """
    source = checked_source(path)
    began = time.monotonic()

    def work(meter: Meter) -> RestoreResult:
        result = _restored(store.base, source, meter)
        meter.end()
        seconds = round(time.monotonic() - began, 3)
        return cast("RestoreResult", {"path": source, **result, "seconds": seconds})

    return await stoppable(store, work, progress)


def checked_source(path: object) -> str:
    """Where a backup is, if there is a file."""
    name = checked_name(path)
    if not opening.exists(name):
        raise InputError(f"there is no backup at {name!r}; check where it is")
    return checked_path(name)


def _restored(store: Store, source: str, meter: Meter) -> Counts:
    meter.of(4)
    steps = {"comparing": 1, "copying": 2, "verifying": 3}
    if os.stat(source).st_size == 0:  # noqa: PTH116
        raise InputError(f"{source!r} is empty, and no backup; check where the backup is")
    with opened(source, read_only=True) as file:
        if file is store:
            raise InputError(f"{source!r} is the database itself; open a new one to restore it there")
        refuse_unfinished(file)
        _refuse_unless_empty(store, file.name)
        refuse_damaged(file, source)
        mark = file.read_now(copying.backup_mark)
        if mark is not None:
            refuse_changed(file.read_now, mark, source, lambda done, total: meter.report(0, done, total))

        def report(progress: Progress) -> None:
            meter.report(steps[progress.step], progress.done, progress.total)

        copied = copy_into(file, store, report)
    return {
        "rows": {table.name: table.rows for table in copied.tables},
        "written": sum(table.written for table in copied.tables),
        "taken_at": None if mark is None else mark.taken_at,
        "verified": True,
        "sha256": copied.sha256,
    }


def _refuse_unless_empty(store: Store, source: str) -> None:
    mark = store.read_now(copying.last_mark)
    if mark is not None and mark.finished_at is None:
        if mark.source != source:
            raise InputError(
                f"{store.name} is an unfinished copy of {mark.source}, and not of {source}; restore into a new file or "
                "schema"
            )
        return
    counts = {name: count for name, count in store.read_now(copying.counts).items() if count}
    if counts:
        named = [(counts[name], name) for name in _NAMED if name in counts]
        what = ", ".join(f"{n} {name if n != 1 else name[:-1]}" for n, name in named) or "data of another program"
        raise InputError(
            f"{store.name} is not empty (it holds {what}); a backup is restored into an empty database: name a new "
            "file, or another schema"
        )
