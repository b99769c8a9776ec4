"""Replacing and removing single messages, on a raw store."""

from __future__ import annotations

import pytest

from byssus.errors import NotFound
from byssus.queries.log import editing, messages, threads
from byssus.queries.log.threads import MessageRow
from byssus.store.database import Store
from byssus.values.thread_key import ThreadKey

T = ThreadKey("", "t")


def bodies(store: Store) -> list[tuple[int, str]]:
    found = store.read_now(messages.history, T, 99)
    assert found is not None
    return [(message.seq, message.body) for message in found]


def test_a_message_is_replaced_in_its_place_or_removed(store: Store) -> None:
    store.write_now(threads.append, T, [MessageRow(name, "user", name) for name in ("a", "b", "c")])
    store.write_now(editing.replace, T, "b", MessageRow("b", "user", "new"))
    assert bodies(store) == [(1, "a"), (2, "new"), (3, "c")]
    store.write_now(editing.replace, T, "a", None)
    assert bodies(store) == [(2, "new"), (3, "c")]


def test_an_unknown_thread_or_message_is_named_and_nothing_is_written(store: Store) -> None:
    with pytest.raises(NotFound, match="there is no thread 't'"):
        store.write_now(editing.replace, T, "a", None)
    store.write_now(threads.append, T, [MessageRow("a", "user", "a")])
    with pytest.raises(NotFound, match="thread 't' has no message 'b'"):
        store.write_now(editing.replace, T, "b", None)
    thread = store.read_now(threads.find, T)
    assert thread is not None
    assert thread.version == 1
