"""Cases that need nothing of their own are tried one after the other in one test: a failure says which one it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(*values: object) -> Iterator[None]:
    """What fails in here names these values."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the case: {', '.join(f'{value!r:.200}' for value in values)}")
        raise
