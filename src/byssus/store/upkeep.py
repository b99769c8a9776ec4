"""What a database can do for its upkeep, besides running queries. What it says here fits one that can do nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Upkeep:
    """The part of a store that backups, checks and erasures use. All of it blocks."""

    has_files = False  # whether this process can scrub the database's files
    remains = ""  # where erased data may still be, as a sentence for people

    def scrub(self, *, rewrite: bool = True) -> bool:  # noqa: ARG002
        """Rewrite the files so that they hold nothing that was deleted; False while a reader keeps old pages there.

        Without `rewrite`, only check whether that reader is gone.
        """
        return True

    def pages_to(
        self,
        path: str,  # noqa: ARG002
        look: Callable[[Any], T],  # noqa: ARG002
        progress: Callable[[int, int], object],  # noqa: ARG002
    ) -> T | None:
        """Copy the database page by page, as of one moment, into an empty file; returns what a query sees then.

        The pages still hold what was deleted. `progress` is called with the pages copied so far and their total. None:
        this database has no pages to copy.
        """
        return None

    def overwrite_deleted(self) -> None:
        """From now on, overwrite what is deleted or changed, where it was."""

    def integrity(self) -> list[str]:
        """What is wrong below the rows, in pages and indexes. Reads everything."""
        return []

    def keys_given(self, tables: Sequence[str]) -> None:
        """Rows with keys of their own were added to these tables: let the keys that the database gives start above."""
