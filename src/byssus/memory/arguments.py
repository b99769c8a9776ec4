"""Validation of the arguments of a memory's methods, the same for every memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from byssus.errors import InputError, NoMessage, WrongType
from byssus.memory.msg import ROLES, Msg, values_of
from byssus.queries.log.marks import MAX_MARK
from byssus.values.inputs import checked_text, fits_column, refuse_long_id

MAX_MARKS = 1_000  # in one call


class Item(NamedTuple):
    """A message and its marks, as a state holds them."""

    message: Msg
    marks: list[str]


def messages(given: Any) -> list[Any]:
    """Return the messages as a list: from one message, or from an iterable of messages."""
    if _is_message(given):
        return [given]
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise _no_message(given)
    found = list(given)
    for item in found:
        if not _is_message(item):
            raise _no_message(item)
    return found


def _is_message(value: Any) -> bool:
    try:
        values_of(value)
    except AttributeError:
        return False
    return True


def _no_message(value: object) -> NoMessage:
    lacking = next((name for name in ("id", "name", "role", "content") if not hasattr(value, name)), "timestamp")
    return NoMessage(
        f"a memory holds messages, and {value!r:.80} is none: {type(value).__name__!r} object has no attribute "
        f"{lacking!r}; use Msg(name, content, role)"
    )


def checked_values(message: Any) -> dict[str, Any]:
    """Return the fields of a message, after checking that they can be stored and read back unchanged."""
    values = values_of(message)
    for name, kinds in _KINDS.items():
        if not isinstance(values.get(name), kinds):
            raise WrongType(
                f"a message's {name} must be {_TYPES[name]}, got {type(values[name])}: {values[name]!r:.80}"
            )
    if values["role"] not in ROLES:
        raise InputError(f"a message's role must be one of {', '.join(map(repr, ROLES))}; got {values['role']!r:.80}")
    refuse_long_id(checked_text("a message's id", values["id"]), "a message's id")
    return values


_KINDS: dict[str, Any] = {
    "id": str,
    "name": str | None,
    "role": str,
    "content": str | list,
    "metadata": dict | None,
    "timestamp": str | None,
    "invocation_id": str | None,
}
_TYPES = {
    "id": "a string",
    "name": "a string or None",
    "role": "a string",
    "content": "a string or a list of blocks",
    "metadata": "a dict or None",
    "timestamp": "a string or None",
    "invocation_id": "a string or None",
}


def marks_to_add(marks: Any) -> list[str]:
    if marks is None:
        return []
    given = [marks] if isinstance(marks, str) else marks
    if not isinstance(given, list) or not all(isinstance(mark, str) for mark in given):
        raise WrongType(f"The mark should be a string, a list of strings, or None, but got {type(marks)}.")
    return _checked(given)


def mark_to_add(mark: Any) -> str:
    if not isinstance(mark, str):
        raise WrongType(f"The mark should be a string, but got {type(mark)}: {mark!r:.80}.")
    return _checked([mark])[0]


def wanted(name: str, mark: Any) -> list[str] | None:
    """Return the marks, of which a message must have at least one; None if no filter was passed."""
    if mark is None:
        return None
    given = [mark] if isinstance(mark, str) else mark
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise WrongType(f"The {name} should be a string, a list of strings, or None, but got {type(mark)}.")
    return _possible(given)


def marks_to_delete(mark: Any) -> list[str]:
    given = [mark] if isinstance(mark, str) else mark
    if not isinstance(given, Iterable) or isinstance(given, bytes | dict):
        raise WrongType(f"The mark should be a string or a list of strings, but got {type(mark)}.")
    found = list(given)
    if not all(isinstance(each, str) for each in found):
        raise WrongType(
            f"The mark should be a string or a list of strings, but got {type(mark)} with elements of types "
            f"{[type(each) for each in found]}."
        )
    return _possible(found)


class MarkChange(NamedTuple):
    """A change of marks. It applies to messages with the old mark, if that is given, and with these ids, if they are
    given.
    """

    new: str | None
    old: str | None
    ids: set[str] | None


def change(new_mark: Any, old_mark: Any, msg_ids: Any) -> MarkChange | None:
    """Return the change to make; None if it cannot apply to any message."""
    for name, mark in (("new_mark", new_mark), ("old_mark", old_mark)):
        if not isinstance(mark, str | None):
            raise WrongType(f"The {name!r} should be a string or None, but got {type(mark)}: {mark!r:.80}.")
    new = None if new_mark is None else mark_to_add(new_mark)
    olds = None if old_mark is None else _possible([old_mark])
    chosen = None if msg_ids is None else ids("msg_ids", msg_ids)
    if olds == [] or chosen == set():
        return None
    return MarkChange(new, olds[0] if olds else None, chosen)


def ids(name: str, given: Any) -> set[str]:
    """Return the ids without duplicates. Values that cannot be a message's id are dropped."""
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise WrongType(f"The {name!r} should be a list of strings, but got {type(given)}.")
    found = list(given)
    for each in found:
        if not isinstance(each, str):
            hint = "; pass message.id" if _is_message(each) else ""
            raise WrongType(f"The {name!r} should be a list of strings, but there is {each!r:.80} among them{hint}.")
    return {str.__str__(each) for each in found if fits_column(each)}


def summary(given: Any) -> str:
    if not isinstance(given, str):
        raise WrongType(f"The summary should be a string, but got {type(given)}; an empty one removes it.")
    return str.__str__(given)


def state(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise WrongType(f"a state must be a dict, as returned by state_dict(); got {given!r:.80}")
    return given


def items(content: Any) -> list[Item]:
    """Return the messages of a state. In newer states each message has its marks; in older ones it has none."""
    if not isinstance(content, list | tuple):
        raise InputError(f"the 'content' of a state must be a list, got {content!r:.80}")
    return [_item(item) for item in content]


def _item(item: Any) -> Item:
    if isinstance(item, dict):
        return Item(Msg.from_dict(item), [])
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise InputError(
            f"an item of a state's 'content' must be a message, or a list of a message and its marks; got {item!r:.80}"
        )
    return Item(Msg.from_dict(item[0]), marks_to_add(item[1]))


def _checked(marks: list[str]) -> list[str]:
    """Return the marks, after checking that they can be stored."""
    _refuse_too_many(marks)
    return [_checked_mark(mark) for mark in marks]


def _possible(marks: list[str]) -> list[str]:
    """Return the marks that can be stored at all, without duplicates."""
    _refuse_too_many(marks)
    given = (str.__str__(mark) for mark in marks)
    return list(dict.fromkeys(mark for mark in given if len(mark) <= MAX_MARK and fits_column(mark)))


def _refuse_too_many(marks: list[str]) -> None:
    if len(marks) > MAX_MARKS:
        raise InputError(f"a call can name {MAX_MARKS:,} marks at most, got {len(marks):,}")


def _checked_mark(mark: str) -> str:
    text = str.__str__(mark)  # the value of an enum
    if len(text) > MAX_MARK:
        raise InputError(f"a mark can have {MAX_MARK} characters at most, got {len(text):,}: {text[:60]!r}...")
    return checked_text("a mark", text)
