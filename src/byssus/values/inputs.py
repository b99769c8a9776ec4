"""What callers pass, checked where it arrives: an error names the thing, the value and what would do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from byssus.errors import InputError
from byssus.values.thread_key import LONGEST_ID, ThreadKey

ThreadId: TypeAlias = str | ThreadKey  # a thread as callers name it: an id alone is one in the empty namespace


_KEPT_OF_LONG_ID = 200  # characters
_SHORT_ID = LONGEST_ID // 4  # characters, which have four bytes at most


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Any = _Unchanged()  # the default of an option that leaves a value as it is


def checked_thread(thread: ThreadId, what: str = "a thread id") -> ThreadKey:
    """The key of a thread that is named by its id, or by namespace and id."""
    if not isinstance(thread, ThreadKey):
        return ThreadKey("", checked_id(thread, what))
    if thread.namespace:
        checked_id(thread.namespace, "a namespace")
    if thread.namespace.startswith("\x7f"):
        raise InputError(f"a namespace cannot begin with the control character DEL, got {thread.namespace!r:.80}")
    checked_id(thread.id, what)
    return thread


def id_of(thread: ThreadId | None) -> str | None:
    """The id alone; None for no thread."""
    return thread.id if isinstance(thread, ThreadKey) else thread


def checked_new_thread(thread: ThreadId, what: str = "a thread id") -> ThreadKey:
    """The key of a thread that may not exist yet."""
    key = checked_thread(thread, what)
    if len(key.namespace) + len(key.id) > _SHORT_ID:  # most are not: an append passes here
        refuse_long_id(key.namespace, "a namespace")
        refuse_long_id(key.id, what)
    return key


def checked_new_id(name: str, what: str = "a thread id") -> str:
    """An id that something gets now. Those that an older version took may be longer: they are only looked up."""
    return refuse_long_id(checked_id(name, what), what)


def refuse_long_id(name: str, what: str) -> str:
    if is_long_id(name):
        raise InputError(
            f"{what} can have {LONGEST_ID:,} bytes of UTF-8 at most, got {len(name.encode()):,}: {name[:60]!r}..."
        )
    return name


def is_long_id(name: str) -> bool:
    return len(name) > _SHORT_ID and len(name.encode("utf-8", "surrogatepass")) > LONGEST_ID


def column_id(name: str) -> str:
    """An id that was chosen outside, for example by a model, as a column takes it; the body keeps the original.

    One that is too long ends with a hash of all of it instead, so that it stays the same and another one stays another.
    """
    text = column_text(name)
    if not is_long_id(text):
        return text
    return f"{text[:_KEPT_OF_LONG_ID]}#{hashlib.sha256(text.encode()).hexdigest()}"


def checked_id(name: str, what: str = "a thread id") -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"{what} must be a string with at least one character, got {name!r:.80}")
    if not fits_column(name):
        raise InputError(f"{what} cannot contain NUL or lone surrogates, got {name!r:.80}")
    return name


def readable_id(name: str, what: str) -> str | None:
    """An id that is only looked up; None if it is text that no id can be."""
    if not isinstance(name, str):
        raise InputError(f"{what} must be a string, got {name!r:.80}")
    return name if name and fits_column(name) else None


def checked_text(what: str, value: object) -> str:
    """Text that every database takes in a column."""
    if not isinstance(value, str):
        raise InputError(f"{what} must be a string, got {value!r:.80}")
    if not fits_column(value):
        raise InputError(f"{what} cannot contain NUL or lone surrogates, got {value!r:.80}")
    return value


def checked_choice(name: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r:.80}")
    return value


def checked_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise InputError(f"{name} must be a number from 0 up (and below 2**53), got {value!r:.80}")
    return value


def checked_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**53:
        raise InputError(f"{name} must be a number from 1 up (and below 2**53), got {value!r:.80}")
    return value


def checked_wait(seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise InputError(f"wait must be a number of seconds from 0 up, got {seconds!r:.80}")
    return seconds


def column_text(text: str) -> str:
    """Text that any database takes in a column; the body keeps the original."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def fits_column(text: str) -> bool:
    """Whether any database takes the text in a column as it is."""
    return "\0" not in text and (text.isascii() or not _has_surrogates(text))


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
