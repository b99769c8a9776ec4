"""Modules that are imported when a name of them is first used, so that a start does not pay for them.

    if TYPE_CHECKING:
        from byssus.maintenance import export
    else:
        export = LazyModule("byssus.maintenance.export")

    lines = export.export_thread(store, thread)       # imports the module first

`export.export_thread` is the function itself, not a stand-in. So a query that is passed to a store has been imported
before it is submitted, and no import runs inside a transaction. Use it for the few modules whose import can be
measured in a start (`bench/start.py`); import all others at the top of the file.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module by its full name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)

    def __repr__(self) -> str:
        return f"LazyModule({self._name!r})"
