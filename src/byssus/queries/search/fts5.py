"""The index for search on SQLite: FTS5, with a row's key as its rowid.

Nothing behind the watermark is indexed, and a batch is written if nothing was deleted since it was read: a deleted
row's key may be given to another one. See `engines.py` for what each function promises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from byssus.queries.search.kinds import KINDS, SCOPE, Batch, IndexedTable, IndexEntry, Kind
from byssus.store.database import Tx

T = TypeVar("T")


def key_column(kind: str) -> str:  # noqa: ARG001 - as of any table of FTS5
    return "rowid"


def among(keys: Sequence[int]) -> tuple[str, Any]:
    return "IN (SELECT value FROM json_each(:keys))", json.dumps(list(keys))


def not_indexed(kind: str) -> str:  # noqa: ARG001
    return "r.key > :upto"


def expression(chains: Sequence[Sequence[str]], scope_keys: Sequence[int] | None) -> str:
    wanted = [f'"{" ".join(chain)}"' for chain in chains]
    either = " OR ".join(f'"{SCOPE}{key}"' for key in scope_keys or ())
    return " AND ".join([*wanted, f"({either})"] if either else wanted)


def indexed(
    tx: Tx,  # noqa: ARG001 - one statement finds and filters
    kind: str,
    expression: str,
    *,
    before: int,  # noqa: ARG001 - the statement has it
    limit: int,  # noqa: ARG001
    select: Callable[[IndexedTable], T],
) -> T:
    about = KINDS[kind]
    condition = f"w.{about.tokens} MATCH :query AND w.rowid < :before AND r.key = w.rowid"
    # CROSS: in this order, or FTS5 would be asked row by row
    return select(
        IndexedTable(f"{about.tokens} w CROSS JOIN {about.table} r", condition, {"query": expression}, "w.rowid")
    )


def shown(thread: Callable[[str], str]) -> tuple[str, list[str]]:
    return "CROSS JOIN threads t", [f"t.key = ({thread('t.key')})"]


def hold(tx: Tx, batch: Batch) -> bool:
    held = tx.one(
        "UPDATE indexing SET upto = :upto WHERE kind = :kind AND epoch = :epoch AND tokenizer = :tokenizer"
        " AND upto = :known RETURNING kind",
        kind=batch.kind,
        upto=batch.upto,
        known=batch.state.upto,
        epoch=batch.state.epoch,
        tokenizer=batch.state.tokenizer,
    )
    return held is not None


def add(tx: Tx, kind: str, entries: Sequence[IndexEntry]) -> None:
    tx.many(
        f"INSERT OR REPLACE INTO {KINDS[kind].tokens} (rowid, words) VALUES (:key, :words)",
        [
            {"key": entry.key, "words": " ".join([*entry.sequence, *entry.singles, f"{SCOPE}{entry.scope_key}"])}
            for entry in entries
        ],
    )


def clear(tx: Tx, about: Kind) -> None:
    tx.run(f"INSERT INTO {about.tokens} ({about.tokens}) VALUES ('delete-all')")
