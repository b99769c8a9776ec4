"""Single messages of a thread, on a raw store."""

from __future__ import annotations

from byssus.queries.log import messages, threads
from byssus.queries.log.threads import MessageRow
from byssus.store.database import Store
from byssus.values.thread_key import ThreadKey

T = ThreadKey("", "t")


def said(store: Store, *names: str) -> None:
    rows = [MessageRow(name, "user", f'"{name}"', 1) for name in names]
    store.write_now(threads.append, T, rows)


def test_the_history_is_the_newest_messages_in_the_order_of_the_log(store: Store) -> None:
    said(store, "a", "b", "c")
    for limit, names in ((0, []), (2, ["b", "c"]), (9, ["a", "b", "c"])):
        found = store.read_now(messages.history, T, limit)
        assert found is not None
        assert [message.id for message in found] == names
    assert store.read_now(messages.history, ThreadKey("other", "t"), 9) is None


def test_a_message_is_found_by_its_id_as_it_is_stored(store: Store) -> None:
    said(store, "a", "b")
    found = store.read_now(messages.find, T, "b")
    assert found is not None
    assert found[:5] == (2, "b", "user", '"b"', 1)
    assert store.read_now(messages.find, T, "c") is None
    assert store.read_now(messages.find, ThreadKey("other", "t"), "b") is None


def test_of_several_messages_with_one_id_the_last_one_is_found(store: Store) -> None:
    said(store, "a", "b", "a", "c")
    found = store.read_now(messages.find, T, "a")
    assert found is not None
    assert found.seq == 3
