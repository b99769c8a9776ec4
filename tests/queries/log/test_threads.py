"""The queries of threads and their log, on a raw store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byssus.errors import LeaseLost, ThreadBusy, ThreadMoved
from byssus.queries.log import listing, threads
from byssus.queries.log.leases import Claim, Lease, Unleased
from byssus.queries.log.listing import ListedRow
from byssus.queries.log.threads import MessageRow, Position, ThreadRow
from byssus.store.database import Store, Tx
from byssus.values.thread_key import ThreadKey
from tests.support.quick import examples


def rows(*bodies: str) -> list[MessageRow]:
    return [MessageRow(f"id of {body}", "user", body) for body in bodies]


def found(store: Store, thread_id: str) -> ThreadRow:
    row = store.read_now(threads.find, ThreadKey("", thread_id))
    assert row is not None
    return row


def place(position: Position) -> tuple[int, int]:
    """The end of a thread and how often it was written."""
    return position.head, position.version


def kept(row: ThreadRow) -> tuple[int, int, str]:
    return row.head, row.version, row.extra


def read(store: Store, thread_id: str, *, page: int = 100) -> list[tuple[int, str]]:
    """The thread, read in pages of this size."""
    row = found(store, thread_id)
    seen: list[tuple[int, str]] = []
    while chunk := store.read_now(
        threads.page, row.branch, after=seen[-1][0] if seen else 0, upto=row.head, limit=page
    ):
        assert len(chunk) <= page
        seen += chunk
    return seen


def everything(store: Store) -> list[list[tuple[object, ...]]]:
    """All rows of all tables, to see that nothing was written."""

    def query(tx: Tx) -> list[list[tuple[object, ...]]]:
        tables = ("threads", "branches", "segments", "messages", "tool_calls", "inbox", "partials", "pieces")
        return [sorted(tx.all(f"SELECT * FROM {table}"), key=repr) for table in tables]  # the names are ours

    return store.read_now(query)


# --- a thread's row ---------------------------------------------------------------------------------------------------


def untouched(store: Store) -> dict[str, int]:
    """Set the counts by which followers notice a change back to zero, and return what they were."""

    def query(tx: Tx) -> dict[str, int]:
        counts = tx.all("SELECT namespace, touched FROM threads")
        tx.run("UPDATE threads SET touched = 0")
        return dict(counts)

    return store.write_now(query)


def test_taking_a_row_returns_the_columns_that_were_asked_for_and_changes_nothing_but_a_count(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("a", "b"))
    store.write_now(threads.append, ThreadKey("other", "t"), rows("a"))
    untouched(store)
    before = everything(store)
    row = found(store, "t")
    assert store.write_now(threads.take, ThreadKey("", "t")) == (row.key,)
    assert store.write_now(threads.take, ThreadKey("", "t"), "head, branch, key") == (2, row.branch, row.key)
    assert store.write_now(threads.take, ThreadKey("other", "t"), "head") == (1,)
    assert untouched(store) == {"": 2, "other": 1}
    assert everything(store) == before


def test_taking_makes_no_thread_unless_it_is_asked_to(store: Store) -> None:
    assert store.write_now(threads.take, ThreadKey("", "t")) is None
    assert store.read_now(threads.find, ThreadKey("", "t")) is None
    made = store.write_now(threads.take_or_make, ThreadKey("", "t"), "key, head")
    assert made == (found(store, "t").key, 0)
    assert store.write_now(threads.take_or_make, ThreadKey("", "t"), "key, head") == made


def test_taking_with_a_lease_renews_it(store: Store) -> None:
    epoch = store.write_now(threads.append, ThreadKey("", "t"), rows("a"), by=Claim("me", "run", 30)).epoch
    until = store.write_now(threads.take, ThreadKey("", "t"), "lease_until")
    assert until is not None
    renewed = store.write_now(threads.take, ThreadKey("", "t"), "lease_until", by=Lease(epoch, 90))
    assert renewed is not None
    assert renewed > until
    before = everything(store)
    with pytest.raises(LeaseLost):
        store.write_now(threads.take, ThreadKey("", "t"), by=Lease(epoch - 1, 90))
    with pytest.raises(ThreadBusy):
        store.write_now(threads.take, ThreadKey("", "t"), by=Unleased())
    assert everything(store) == before
    assert store.write_now(threads.take, ThreadKey("", "no such"), by=Lease(epoch, 90)) is None


# --- append -----------------------------------------------------------------------------------------------------------


def test_an_append_says_where_the_thread_stands(store: Store) -> None:
    first = store.write_now(threads.append, ThreadKey("", "t"), rows("a", "b"))
    branch = found(store, "t").branch
    assert first == Position(head=2, version=1, branch=branch)
    assert store.write_now(threads.append, ThreadKey("", "t"), rows("c")) == Position(head=3, version=2, branch=branch)
    assert store.write_now(threads.append, ThreadKey("", "t"), [], reserve=2) == Position(
        head=5, version=3, branch=branch
    )
    other = store.write_now(threads.append, ThreadKey("", "u"), rows("a"))
    assert place(other) == (1, 1)
    assert other.branch == found(store, "u").branch != branch
    assert kept(found(store, "t")) == (5, 3, "{}")
    assert read(store, "t") == [(1, "a"), (2, "b"), (3, "c")]


def test_every_write_moves_the_version_by_one(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("a"), reserve=2)
    assert store.write_now(threads.fill, ThreadKey("", "t"), [(2, rows("b")[0])]).version == 2
    assert store.write_now(threads.save_extra, ThreadKey("", "t"), '{"x":1}').version == 3
    assert store.write_now(threads.fill, ThreadKey("", "t"), [(3, rows("c")[0])]).version == 4
    assert store.write_now(threads.append, ThreadKey("", "t"), rows("d")).version == 5
    assert found(store, "t").version == 5


def test_an_expected_version_lets_the_write_through(store: Store) -> None:
    position = store.write_now(threads.append, ThreadKey("", "t"), rows("a"), expect=0)
    position = store.write_now(threads.append, ThreadKey("", "t"), rows("b"), expect=position.version)
    position = store.write_now(threads.save_extra, ThreadKey("", "t"), '{"x":1}', expect=position.version)
    assert place(store.write_now(threads.append, ThreadKey("", "t"), rows("c"), expect=position.version)) == (3, 4)
    assert place(store.write_now(threads.append, ThreadKey("", "t"), rows("d"), expect=threads.ANY)) == (4, 5)


@pytest.mark.parametrize("expect", [0, 1, 3, 100])
def test_another_version_than_expected_is_thread_moved_and_nothing_is_written(store: Store, expect: int) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("a"))
    store.write_now(threads.append, ThreadKey("", "t"), rows("b"))
    before = everything(store)
    with pytest.raises(ThreadMoved, match="'t'"):
        store.write_now(threads.append, ThreadKey("", "t"), rows("c"), expect=expect, reserve=3)
    with pytest.raises(ThreadMoved, match="'t'"):
        store.write_now(threads.save_extra, ThreadKey("", "t"), '{"x":1}', expect=expect)
    assert everything(store) == before


def test_a_thread_that_should_exist_and_does_not_is_not_made(store: Store) -> None:
    with pytest.raises(ThreadMoved, match="'gone'"):
        store.write_now(threads.append, ThreadKey("", "gone"), rows("c"), expect=4)
    with pytest.raises(ThreadMoved, match="'gone'"):
        store.write_now(threads.save_extra, ThreadKey("", "gone"), "{}", expect=4)
    assert not any(everything(store))


# --- reserve and fill -------------------------------------------------------------------------------------------------


def test_results_that_are_filled_in_any_order_read_in_the_order_of_their_places(store: Store) -> None:
    position = store.write_now(threads.append, ThreadKey("", "t"), rows("reply"), reserve=3)
    assert place(position) == (4, 1)
    for seq in (4, 2, 3):
        assert store.write_now(threads.fill, ThreadKey("", "t"), [(seq, rows(f"result {seq}")[0])]).head == 4
    store.write_now(threads.append, ThreadKey("", "t"), rows("next"))
    assert [body for _, body in read(store, "t")] == ["reply", "result 2", "result 3", "result 4", "next"]


def test_a_place_that_stays_empty_is_skipped(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("reply"), reserve=2)
    store.write_now(threads.append, ThreadKey("", "t"), rows("next"))
    assert read(store, "t") == [(1, "reply"), (4, "next")]
    store.write_now(threads.fill, ThreadKey("", "t"), [(3, rows("late")[0])])
    assert read(store, "t") == [(1, "reply"), (3, "late"), (4, "next")]


def test_several_places_are_filled_at_once(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("reply"), reserve=3)
    a, b = rows("a", "b")
    assert place(store.write_now(threads.fill, ThreadKey("", "t"), [(4, a), (2, b)])) == (4, 2)
    assert read(store, "t") == [(1, "reply"), (2, "b"), (4, "a")]


def test_a_place_behind_the_end_moves_the_head_so_that_nothing_is_written_over_it(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("reply"))
    assert place(store.write_now(threads.fill, ThreadKey("", "t"), [(3, rows("result")[0])])) == (3, 2)
    assert place(store.write_now(threads.append, ThreadKey("", "t"), rows("next"))) == (4, 3)
    assert read(store, "t") == [(1, "reply"), (3, "result"), (4, "next")]


def test_a_taken_place_is_thread_moved_and_nothing_is_written(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("reply"), reserve=2)
    store.write_now(threads.fill, ThreadKey("", "t"), [(2, rows("first")[0])])
    before = everything(store)
    for places in ([(2, rows("second")[0])], [(3, rows("fine")[0]), (2, rows("second")[0])], [(1, rows("no")[0])]):
        with pytest.raises(ThreadMoved, match="'t'"):
            store.write_now(threads.fill, ThreadKey("", "t"), places)
    twice = [(3, rows("x")[0]), (3, rows("y")[0])]
    with pytest.raises(ThreadMoved, match="'t'"):
        store.write_now(threads.fill, ThreadKey("", "t"), twice)
    assert everything(store) == before


def test_filling_into_a_thread_that_is_gone_is_thread_moved(store: Store) -> None:
    with pytest.raises(ThreadMoved, match="'gone'"):
        store.write_now(threads.fill, ThreadKey("", "gone"), [(1, rows("x")[0])])
    assert not any(everything(store))


def test_a_namespace_keeps_threads_of_one_id_apart(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "main"), rows("plain"))
    store.write_now(threads.append, ThreadKey("anna", "main"), rows("anna's"))
    store.write_now(threads.append, ThreadKey("anna", "main"), rows("more"), expect=1, reserve=1)
    store.write_now(threads.fill, ThreadKey("anna", "main"), [(3, rows("filled")[0])])
    store.write_now(threads.save_extra, ThreadKey("anna", "main"), '{"a":1}')
    assert kept(found(store, "main")) == (1, 1, "{}")
    anna = store.read_now(threads.find, ThreadKey("anna", "main"))
    assert anna is not None
    assert kept(anna) == (3, 4, '{"a":1}')
    bodies = store.read_now(threads.page, anna.branch, after=0, upto=anna.head, limit=9)
    assert bodies == [(1, "anna's"), (2, "more"), (3, "filled")]
    assert len(store.read_now(listing.page, limit=9)) == 1
    assert store.read_now(listing.one, ThreadKey("bert", "main")) is None


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 3, 6, 7, 8, 100])
def test_pages_of_any_size_give_the_whole_thread_once(store: Store, page: int) -> None:
    for body in "abcdefg":
        store.write_now(threads.append, ThreadKey("", "t"), rows(body), reserve=1)
    assert "".join(body for _, body in read(store, "t", page=page)) == "abcdefg"


def test_a_page_has_no_message_outside_its_bounds(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows(*"abcdef"))
    branch = found(store, "t").branch

    def bounds(after: int, upto: int, limit: int = 100) -> str:
        return "".join(body for _, body in store.read_now(threads.page, branch, after=after, upto=upto, limit=limit))

    assert bounds(0, 6) == "abcdef"
    assert bounds(2, 4) == "cd"
    assert bounds(0, 6, limit=2) == "ab"
    assert bounds(0, 0) == ""
    assert bounds(6, 6) == ""
    assert bounds(3, 2) == ""
    assert bounds(0, 2**62) == "abcdef"
    assert bounds(0, 6, limit=0) == ""
    assert store.read_now(threads.page, branch + 1000, after=0, upto=6, limit=9) == []


def fork(tx: Tx, thread_id: str, segments: Sequence[tuple[int | None, int, int]], head: int) -> int:
    """A thread whose branch reads these pieces, as (source, after, upto); a source of None is the branch itself."""
    thread = tx.one(
        "INSERT INTO threads (namespace, id, branch, head, version, message_count, extra, created_at, updated_at)"
        " VALUES ('', :id, 0, :head, 1, 0, '{}', :now, :now) RETURNING key",
        id=thread_id,
        head=head,
        now=tx.now(),
    )
    assert thread is not None
    branch = tx.one("INSERT INTO branches (thread) VALUES (:thread) RETURNING key", thread=thread[0])
    assert branch is not None
    key: int = branch[0]
    tx.run("UPDATE threads SET branch = :branch WHERE key = :key", branch=key, key=thread[0])
    tx.many(
        "INSERT INTO segments (branch, source, after_seq, upto_seq) VALUES (:branch, :source, :after, :upto)",
        [
            {"branch": key, "source": key if source is None else source, "after": after, "upto": upto}
            for source, after, upto in reversed(segments)  # the order of the rows says nothing
        ],
    )
    return key


@pytest.mark.parametrize("page", [1, 2, 3, 4, 5, 100])
def test_a_branch_is_read_through_all_its_pieces_in_order(store: Store, page: int) -> None:
    store.write_now(threads.append, ThreadKey("", "trunk"), rows(*"abcdef"))
    trunk = found(store, "trunk").branch
    # A fork of the trunk after c, and a fork of that fork after its second message: flat, three pieces.
    first = store.write_now(fork, "first", [(trunk, 0, 3), (None, 3, 2**62)], head=3)
    store.write_now(threads.append, ThreadKey("", "first"), rows(*"XYZ"))
    store.write_now(fork, "second", [(trunk, 0, 3), (first, 3, 5), (None, 5, 2**62)], head=5)
    store.write_now(threads.append, ThreadKey("", "second"), rows("1"), reserve=2)
    store.write_now(threads.fill, ThreadKey("", "second"), [(8, rows("3")[0])])
    store.write_now(threads.append, ThreadKey("", "trunk"), rows("g"))
    assert read(store, "trunk", page=page) == list(enumerate("abcdefg", 1))
    assert read(store, "first", page=page) == list(enumerate("abcXYZ", 1))
    assert read(store, "second", page=page) == [*enumerate("abcXY1", 1), (8, "3")]
    store.write_now(threads.fill, ThreadKey("", "second"), [(7, rows("2")[0])])
    assert read(store, "second", page=page) == list(enumerate("abcXY123", 1))


def test_a_fork_has_places_of_its_own_where_the_trunk_has_taken_them(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "trunk"), rows(*"abcd"))
    store.write_now(fork, "fork", [(found(store, "trunk").branch, 0, 2), (None, 2, 2**62)], head=2)
    store.write_now(threads.append, ThreadKey("", "fork"), rows("reply"), reserve=1)
    store.write_now(threads.fill, ThreadKey("", "fork"), [(4, rows("result")[0])])
    assert [body for _, body in read(store, "fork")] == ["a", "b", "reply", "result"]
    assert [body for _, body in read(store, "trunk")] == ["a", "b", "c", "d"]


def test_fifty_pieces_are_read_like_one(store: Store) -> None:
    pieces: list[tuple[int | None, int, int]] = []
    for i in range(50):
        store.write_now(threads.append, ThreadKey("", f"source {i}"), rows(*(f"{i}.{seq}" for seq in range(1, 101))))
        pieces.append((found(store, f"source {i}").branch, 2 * i, 2 * i + 2))
    store.write_now(fork, "patchwork", pieces, head=100)
    expected = [(seq, f"{(seq - 1) // 2}.{seq}") for seq in range(1, 101)]
    assert read(store, "patchwork") == expected
    assert read(store, "patchwork", page=7) == expected


# --- the list ---------------------------------------------------------------------------------------------------------


def test_the_list_counts_messages_and_not_places(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("a", "b"), reserve=5)
    store.write_now(threads.fill, ThreadKey("", "t"), [(3, rows("c")[0])])
    info = store.read_now(listing.one, ThreadKey("", "t"))
    assert info is not None
    assert info.message_count == 3
    assert store.read_now(listing.page, limit=5) == [info]


def test_threads_of_the_same_moment_are_paged_without_gaps_or_repeats(store: Store) -> None:
    ids = [f"t{i:02}" for i in range(20)]

    def at_once(tx: Tx) -> None:
        for thread_id in ids:
            threads.append(tx, ThreadKey("", thread_id), rows("x"))
        tx.run("UPDATE threads SET updated_at = '2026-01-01T00:00:00.000000Z'")

    store.write_now(at_once)
    seen: list[ListedRow] = []
    while page := store.read_now(listing.page, limit=3, before=(seen[-1].updated_at, seen[-1].id) if seen else None):
        seen += page
    assert [info.id for info in seen] == ids[::-1]


def test_times_are_utc_text_with_microseconds(store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), rows("x"))
    info = store.read_now(listing.one, ThreadKey("", "t"))
    assert info is not None
    for time in (info.created_at, info.updated_at):
        assert len(time) == len("2026-01-01T00:00:00.000000Z")
        assert (time[4], time[10], time[19], time[-1]) == ("-", "T", ".", "Z")


# --- against a model --------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What a thread should be: a dict of places, and two counters."""

    places: dict[int, str] = field(default_factory=dict)
    head: int = 0
    version: int = 0
    extra: str = "{}"

    def append(self, bodies: list[str], reserve: int) -> tuple[int, int]:
        for body in bodies:
            self.head += 1
            self.places[self.head] = body
        self.head += reserve
        self.version += 1
        return self.head, self.version

    def version_off_by(self, off: int | None) -> int:
        """What a writer may expect that is so many writes off: one that is behind, or ahead; None does not care."""
        if off is None:
            return threads.ANY
        return self.version + off if self.version + off >= 0 else 1

    def fill(self, seq: int, body: str) -> tuple[int, int]:
        self.places[seq] = body
        self.head = max(self.head, seq)
        self.version += 1
        return self.head, self.version


# What a query is given is text that any database takes: JSON, in which a NUL is an escape, and ids without one.
_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=3)
_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("append"),
            st.lists(_TEXT, max_size=4),
            st.integers(0, 3),
            st.sampled_from([None, 0, 1, -1]),
        ),
        st.tuples(st.just("fill"), st.integers(1, 30), _TEXT),
        st.tuples(st.just("extra"), st.sampled_from(["{}", '{"a":1}', "[]"]), st.sampled_from([None, 0, 1, -1])),
    ),
    max_size=15,
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS, page=st.integers(1, 8))
def test_any_sequence_of_writes_gives_what_a_plain_dict_gives(
    store: Store, steps: list[tuple[str, ...]], page: int
) -> None:
    thread_id = f"example {len(store.read_now(listing.page, limit=10**6))}"
    model = Model()
    for step in steps:
        _apply(store, thread_id, model, step)
    row = store.read_now(threads.find, ThreadKey("", thread_id))
    if model.version == 0:
        assert row is None
        store.write_now(threads.append, ThreadKey("", thread_id), [])  # so that the next example has an id of its own
        return
    assert row is not None
    assert kept(row) == (model.head, model.version, model.extra)
    assert read(store, thread_id, page=page) == sorted(model.places.items())
    info = store.read_now(listing.one, ThreadKey("", thread_id))
    assert info is not None
    assert info.message_count == len(model.places)


def _apply(store: Store, thread_id: str, model: Model, step: tuple[object, ...]) -> None:
    match step:
        case ("append", list(bodies), int(reserve), None | int() as off):
            expect = model.version_off_by(off)
            if off:
                with pytest.raises(ThreadMoved):
                    store.write_now(
                        threads.append, ThreadKey("", thread_id), rows(*bodies), expect=expect, reserve=reserve
                    )
            else:
                got = store.write_now(
                    threads.append, ThreadKey("", thread_id), rows(*bodies), expect=expect, reserve=reserve
                )
                assert place(got) == model.append(bodies, reserve)
        case ("fill", int(seq), str(body)):
            if seq in model.places or model.version == 0:
                with pytest.raises(ThreadMoved):
                    store.write_now(threads.fill, ThreadKey("", thread_id), [(seq, rows(body)[0])])
            else:
                got = store.write_now(threads.fill, ThreadKey("", thread_id), [(seq, rows(body)[0])])
                assert place(got) == model.fill(seq, body)
        case ("extra", str(extra), None | int() as off):
            expect = model.version_off_by(off)
            if off:
                with pytest.raises(ThreadMoved):
                    store.write_now(threads.save_extra, ThreadKey("", thread_id), extra, expect=expect)
            else:
                store.write_now(threads.save_extra, ThreadKey("", thread_id), extra, expect=expect)
                model.version += 1
                model.extra = extra
        case _:
            raise AssertionError(step)
