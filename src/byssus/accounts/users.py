"""Users and their quotas: operations for both APIs (see store/operations.py).

Arguments and results are plain dicts. A read of an unknown id returns None; a write raises `NotFound`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, cast

from byssus.accounts.rows import UserRow
from byssus.errors import InputError
from byssus.messages import dumps
from byssus.queries.accounts import quotas, users
from byssus.queries.accounts.users import Leaf, User
from byssus.store.operations import Runner
from byssus.threads import retention
from byssus.threads.encoding import encode_strictly, readable_json
from byssus.values import clock
from byssus.values.inputs import UNCHANGED, checked_count, checked_id, checked_new_id, checked_text, readable_id

Sessions: TypeAlias = Literal["keep", "delete"]

_LONG_VALUE = 200  # longest value that is compared as it is; a longer one is compared by its hash
_MOST_ASKED = 1_000  # preferences in one search: databases limit the number of parameters


async def create_user(
    store: Runner,
    name: str,
    email: str = "",
    quota_total: int | None = 100_000,
    *,
    user_id: str | None = None,
    preferences: dict[str, Any] | None = None,
) -> UserRow:
    """Create a user with a quota of tokens (None: no limit). `user_id` sets your own id."""
    wanted = {} if preferences is None else preferences
    given = _checked(name=name, email=email, quota_total=quota_total, preferences=wanted)
    key = clock.new_id() if user_id is None else checked_new_id(user_id, "a user id")
    found = leaves(wanted)
    total, text = given["quota_total"], given["preferences"]
    return as_dict(await store.write(users.create, key, given["name"], given["email"], total, text, found))


async def get_user(store: Runner, user_id: str) -> UserRow | None:
    """Return the user, or None if the id is unknown."""
    name = readable_id(user_id, "a user id")
    user = None if name is None else await store.read(users.get, name)
    return None if user is None else as_dict(user)


async def list_users(store: Runner, limit: int = 100, offset: int = 0) -> list[UserRow]:
    """Return all users, oldest first."""
    return await find_users(store, {}, limit, offset)


async def find_users(
    store: Runner, preferences: dict[str, Any] | None = None, limit: int = 100, offset: int = 0
) -> list[UserRow]:
    """Return the users whose preferences include all of these, oldest first.

    `{"theme": "dark"}` finds all users with that theme, whatever their other preferences; `{"ui": {"theme": "dark"}}`
    matches a nested value. Values other than dicts must be equal.
    """
    asked = {} if preferences is None else preferences
    _checked(preferences=asked)
    wanted = leaves(asked)
    if len(wanted) > _MOST_ASKED:
        raise InputError(f"find_users takes at most {_MOST_ASKED} preferences, got {len(wanted):,}")
    limit, offset = checked_count("limit", limit), checked_count("offset", offset)
    return [as_dict(user) for user in await store.read(users.find, wanted, limit=limit, offset=offset)]


async def update_user(
    store: Runner,
    user_id: str,
    *,
    name: str = UNCHANGED,
    email: str = UNCHANGED,
    quota_total: int | None = UNCHANGED,
    quota_used: int = UNCHANGED,
    preferences: dict[str, Any] = UNCHANGED,
) -> UserRow:
    """Change the given fields. Preferences are replaced as a whole; `quota_used=0` starts a new period."""
    given: dict[str, Any] = {"name": name, "email": email, "quota_total": quota_total, "quota_used": quota_used}
    given = {key: value for key, value in (given | {"preferences": preferences}).items() if value is not UNCHANGED}
    changes = _checked(**given)
    found = leaves(preferences) if "preferences" in given else None
    return as_dict(await store.write(users.update, checked_id(user_id, "a user id"), changes, found))


async def delete_user(store: Runner, user_id: str, *, sessions: Sessions | None = None) -> int:
    """Delete a user; returns how many sessions the user had.

    If the user has sessions, `sessions` is required: "delete" deletes them too, "keep" keeps them without a user. To
    remove every byte of a user from the files, use `erase_user` of the checkpointer.
    """
    if sessions not in (None, "keep", "delete"):
        raise InputError(f"sessions must be 'keep' or 'delete', got {sessions!r:.80}")
    name = checked_id(user_id, "a user id")
    had = 0
    # The user is removed in the transaction that finds no session left: one may be created while others are deleted.
    while left := await store.write(users.disown_and_remove, name, disown=sessions == "keep"):
        had += len(left)
        if sessions == "keep":
            break
        if sessions is None:
            raise InputError(
                f"user {user_id!r} has {had} session(s); pass sessions='delete' to delete them too, or "
                "sessions='keep' to keep them without a user"
            )
        for thread in left:
            await retention.delete_thread(store, thread)
    return had


async def check_quota(store: Runner, user_id: str, required_tokens: int = 0) -> bool:
    """Return whether the user has this many tokens left. Tokens reserved by running model calls are not left."""
    required = checked_count("required_tokens", required_tokens)
    name = readable_id(user_id, "a user id")
    left = None if name is None else await store.read(quotas.left, name)
    return left is not None and left.suffices(required)


async def consume_quota(store: Runner, user_id: str, tokens: int) -> bool:
    """Spend tokens of the user's quota. If fewer are left, return False and spend nothing."""
    name, spent = checked_id(user_id, "a user id"), checked_count("tokens", tokens)
    done = await store.write(quotas.consume, name, spent)
    if done is None:
        raise quotas.unknown(user_id)
    return done


def as_dict(user: User) -> UserRow:
    preferences = json.loads(user.preferences)
    shown = {**user._asdict(), "preferences": preferences, "preferences_json": readable_json(preferences)}
    return cast("UserRow", shown)


def leaves(preferences: dict[str, Any]) -> list[Leaf]:
    """Return the leaf values of nested preferences, each with its path, in the form in which they are compared."""
    return [(_short(dumps(path)), _comparable(value)) for path, value in _ends(preferences, [])]


def _ends(value: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    if isinstance(value, dict) and (value or path):
        for name, item in value.items():
            yield from _ends(item, [*path, name]) if isinstance(item, dict) and item else [([*path, name], item)]


def _comparable(value: Any) -> str:
    return _short(json.dumps(_plain_numbers(value), sort_keys=True))


def _short(text: str) -> str:
    return text if len(text) <= _LONG_VALUE else f"#{hashlib.sha256(text.encode()).hexdigest()}"


def _plain_numbers(value: Any) -> Any:
    """Convert 1.0 to 1 at every depth; True stays True."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    return {key: _plain_numbers(item) for key, item in value.items()} if isinstance(value, dict) else value


def _checked(**given: Any) -> dict[str, Any]:
    """Validate the given columns and encode them for the store."""
    for column in ("name", "email"):
        if column in given:
            checked_text(f"a user's {column}", given[column])
    for column in ("quota_total", "quota_used"):
        if column in given and not (column == "quota_total" and given[column] is None):
            checked_count(column, given[column])
    if "preferences" in given:
        if not isinstance(given["preferences"], dict):
            raise InputError(f"preferences must be a dict, got {given['preferences']!r:.80}")
        given["preferences"] = encode_strictly("preferences", given["preferences"])
    return given
