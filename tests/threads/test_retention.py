"""What is kept and what is removed: prunes, times to live, deletions; and that nobody loses what they still need."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from byssus.checkpointer import (
    Checkpoint,
    Checkpointer,
    CheckpointMetadata,
    Pruned,
    Retention,
    keep_age,
    keep_last,
    keep_tagged,
)
from byssus.errors import InputError, NotFound, ThreadBusy
from byssus.messages import UserMessage
from byssus.queries.versions import deleting
from byssus.values.thread_key import ThreadKey
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.checkpoints import UNREACHABLE, all_rows, count, ids, left, put, said
from tests.support.databases import Database
from tests.support.leases import claim, with_two

WORDS = [UserMessage(text) for text in "abcdef"]


async def tell(cp: Checkpointer, thread_id: str = "t", upto: int = 6) -> None:
    """A thread with a checkpoint behind each message: of a day each, the last one a day ago; every second is tagged."""
    for step in range(1, upto + 1):
        made = datetime.now(UTC) - timedelta(days=upto + 1 - step)
        tags = ["even"] if step % 2 == 0 else ["odd", "plain"]
        about = CheckpointMetadata(thread_id, f"c{step}", step, created_at=made, tags=tags)
        await cp.put(Checkpoint(about, list(WORDS[:step])))


async def aside(cp: Checkpointer, name: str, length: int, **about: Any) -> None:
    """A checkpoint of many messages that nothing else leads to."""
    await put(cp, "t", name, 0, [UserMessage(f"{name} {number}") for number in range(length)], **about)


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (keep_last(1), ["c6"]),
        (keep_last(4), ["c6", "c5", "c4", "c3"]),
        (keep_last(100), ["c6", "c5", "c4", "c3", "c2", "c1"]),
        (keep_age(3.5), ["c6", "c5", "c4"]),
        (keep_age(0.5), []),
        (keep_age(100), ["c6", "c5", "c4", "c3", "c2", "c1"]),
        (keep_tagged("even"), ["c6", "c4", "c2"]),
        (keep_tagged("plain", "unused"), ["c5", "c3", "c1"]),
        (keep_tagged("eve"), []),
        (keep_last(1) | keep_tagged("odd"), ["c6", "c5", "c3", "c1"]),
        (keep_last(1) | keep_age(2.5) | keep_tagged("even"), ["c6", "c5", "c4", "c2"]),
        (keep_last(1) | keep_last(2) | keep_tagged("even") | keep_tagged("odd"), ["c6", "c5", "c4", "c3", "c2", "c1"]),
    ],
)
def test_what_any_of_the_policies_keeps_stays_and_the_rest_goes(
    database: Database, keep: Retention, kept: list[str]
) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        removed = await cp.prune("t", keep)
        assert await ids(cp, "t") == kept
        assert sorted([*removed.checkpoints, *kept]) == ["c1", "c2", "c3", "c4", "c5", "c6"]
        assert removed.messages == 0
        assert await texts(cp, "t") == list("abcdef")
        for name in kept:
            assert len(await said(cp, "t", name)) == int(name[1])
        latest = await cp.get_latest("t")
        assert [latest.metadata.checkpoint_id] == kept[:1] if latest else kept == []
        assert [about.checkpoint_id for about in await cp.list_threads()] == kept[:1]
        assert await cp.prune("t", keep) == Pruned([], 0)

    with_cp(database, check)


def test_a_prune_removes_the_messages_that_nothing_leads_to_any_more_and_says_how_many(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await aside(cp, "draft", 3)
        await aside(cp, "kept", 2, tags=["even"])
        await cp.rewind("t", "c2")
        await put(cp, "t", "d3", 3, [*WORDS[:2], UserMessage("d")], tags=["even"])
        assert await cp.store.read(count("messages")) == 6 + 3 + 2 + 1
        assert await cp.prune("t", keep_last(1)) == Pruned(["c1", "c2", "c3", "c4", "c5", "c6", "draft", "kept"], 4 + 5)
        assert await cp.store.read(count("messages")) == 3
        assert (await texts(cp, "t"), await said(cp, "t", "d3")) == (["a", "b", "d"], ["a", "b", "d"])

    with_cp(database, check)


def test_what_a_rewind_has_left_is_none_of_the_last_ones(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.rewind("t", "c4")
        assert sorted((await cp.prune("t", keep_last(3))).checkpoints) == ["c1", "c5", "c6"]
        assert (await ids(cp, "t"), await left(cp, "t")) == (["c4", "c3", "c2"], [])
        assert await cp.store.read(count("messages")) == 4

    with_cp(database, check)


def test_what_is_left_stays_if_a_policy_keeps_it(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.rewind("t", "c4")
        await cp.prune("t", keep_tagged("even"))
        assert (await ids(cp, "t"), await left(cp, "t")) == (["c4", "c2"], ["c6"])
        await cp.rewind("t", "c6")
        assert (await texts(cp, "t"), await ids(cp, "t")) == (list("abcdef"), ["c6", "c4", "c2"])

    with_cp(database, check)


def test_a_prune_never_removes_what_a_fork_still_needs(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await aside(cp, "aside", 3)
        await cp.fork("t", "c5", new_id="f")
        await cp.fork("t", "aside", new_id="g")
        await cp.rewind("t", "c1")
        await cp.prune("t", keep_last(1))
        assert await ids(cp, "t") == ["c1"]
        assert (await texts(cp, "f"), await ids(cp, "f")) == (list("abcde"), ["c5", "c4", "c3", "c2", "c1", "aside"])
        assert await said(cp, "f", "aside") == await texts(cp, "g") == ["aside 0", "aside 1", "aside 2"]
        assert await said(cp, "f", "c4") == list("abcd")
        await cp.prune("f", keep_last(1))
        assert await ids(cp, "f") == ["c5"]
        assert await texts(cp, "g") == ["aside 0", "aside 1", "aside 2"]
        assert await cp.store.read(lambda tx: tx.all(UNREACHABLE)) == []
        assert await cp.store.read(count("messages")) == 5 + 3

    with_cp(database, check)


def test_a_thread_that_somebody_drives_is_pruned(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await claim(cp)
        assert len((await cp.prune("t", keep_last(2))).checkpoints) == 4
        assert await cp.delete_before("t", 6) == 1
        with pytest.raises(ThreadBusy, match="'t'"):
            await cp.delete_thread("t")
        assert (await ids(cp, "t"), await texts(cp, "t")) == (["c6"], list("abcdef"))

    with_cp(database, check)


def test_a_prune_of_an_unknown_thread_removes_nothing(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        assert await cp.prune("unknown", keep_last(1)) == Pruned([], 0)
        assert await cp.prune() == Pruned([], 0)

    with_cp(database, check)


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "1", None, 2**53])
def test_so_many_of_the_last_must_be_a_number_from_1_up(count: Any) -> None:
    with pytest.raises(InputError, match="keep_last takes a number from 1 up"):
        keep_last(count)


@pytest.mark.parametrize("days", [0, -1, True, "1", None, float("nan"), float("inf"), 40_000])
def test_an_age_must_be_a_number_of_days(days: Any) -> None:
    with pytest.raises(InputError, match="keep_age takes a number of days"):
        keep_age(days)


@pytest.mark.parametrize("tags", [(), (1,), (None,), (["a"],)])
def test_tags_to_keep_must_be_strings(tags: Any) -> None:
    with pytest.raises(InputError, match="keep_tagged takes one or more tags"):
        keep_tagged(*tags)


@pytest.mark.parametrize("keep", [None, Retention(), 5, "all"])
def test_a_prune_must_know_what_to_keep(database: Database, keep: Any) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        with pytest.raises(InputError, match="needs a policy"):
            await cp.prune("t", keep)
        with pytest.raises(InputError):
            await cp.prune("", keep_last(1))
        assert len(await ids(cp, "t")) == 6

    with_cp(database, check)


# --- a time to live ---------------------------------------------------------------------------------------------------


def test_a_thread_with_a_time_to_live_is_pruned_when_prune_is_called(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp, "t")
        await tell(cp, "u")
        await tell(cp, "v")
        await cp.set_ttl("t", 2.5)
        await cp.set_ttl("u", 0.5, keep=keep_tagged("odd"))
        assert await cp.prune() == Pruned(["c1", "c2", "c3", "c4", "c2", "c4"], 0)
        assert await ids(cp, "t") == ["c6", "c5"]
        assert await ids(cp, "u") == ["c6", "c5", "c3", "c1"]  # the latest always stays
        assert len(await ids(cp, "v")) == 6
        await cp.set_ttl("t", None)
        await cp.set_ttl("u", 0.5)
        assert await cp.prune() == Pruned(["c1", "c3", "c5"], 0)
        assert await ids(cp, "t") == ["c6", "c5"]

    with_cp(database, check)


def test_each_put_prunes_a_thread_with_a_time_to_live(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.set_ttl("t", 2.5)
        await put(cp, "t", "c7", 7, [UserMessage("elsewhere")])
        assert await ids(cp, "t") == ["c7", "c6", "c5"]

    with_cp(database, check)


def test_a_time_to_live_that_makes_no_sense_is_refused(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        with pytest.raises(NotFound, match="no thread 'unknown'"):
            await cp.set_ttl("unknown", 1)
        for days, keep in ((0, None), (-1, None), ("1", None), (1, 7), (1, Retention())):
            with pytest.raises(InputError):
                await cp.set_ttl("t", days, keep)  # type: ignore[arg-type]
        assert await cp.prune() == Pruned([], 0)

    with_cp(database, check)


# --- deletions --------------------------------------------------------------------------------------------------------


def test_checkpoints_below_a_step_are_deleted_and_the_messages_stay(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        assert await cp.delete_before("t", before_step=5) == 4
        assert await cp.delete_before("t", before_step=5) == 0
        assert (await ids(cp, "t"), await texts(cp, "t")) == (["c6", "c5"], list("abcdef"))
        assert await cp.get("c1", "t") is None
        assert await cp.delete_before("t", 2**53 - 1) == 2
        assert (await cp.get_latest("t"), await cp.list_threads()) == (None, [])

    with_cp(database, check)


def test_those_that_a_rewind_has_left_are_deleted_as_well(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.rewind("t", "c3")
        assert await cp.delete_before("t", 6) == 5
        assert (await ids(cp, "t"), await left(cp, "t")) == ([], ["c6"])
        assert await cp.delete_thread("t") == 1

    with_cp(database, check)


def test_a_deleted_thread_leaves_nothing_and_its_name_is_free(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await cp.rewind("t", "c3")
        await put(cp, "t", "d4", 4, [*WORDS[:3], UserMessage("another way")])
        await cp.append("other", WORDS[0])
        assert await cp.delete_thread("t") == 7
        assert await cp.load("t") is None
        assert (await cp.get("c1"), await cp.list_threads()) == (None, [])
        assert [info.id for info in await cp.threads()] == ["other"]
        await put(cp, "t", "c1", 1, [UserMessage("anew")])
        assert (await texts(cp, "t"), await ids(cp, "t")) == (["anew"], ["c1"])
        assert await cp.delete_thread("t") == 1
        assert await cp.delete_thread("other") == 0
        for table in ("threads", "branches", "segments", "messages", "checkpoints", "inherited", "hidden"):
            assert await cp.store.read(count(table)) == 0, table

    with_cp(database, check)


# --- others at the same time, and interruptions -----------------------------------------------------------------------


def test_two_that_remove_the_same_at_once_do_not_stumble_over_each_other(database: Database) -> None:
    async def check(cp: Checkpointer, other: Checkpointer) -> None:
        await tell(cp)
        await other.load("t")
        pruned = await asyncio.gather(*(each.prune("t", keep_last(2)) for each in (cp, other, cp, other)))
        assert all(set(each.checkpoints) <= {"c1", "c2", "c3", "c4"} for each in pruned)
        await asyncio.gather(*(each.delete_before("t", 6) for each in (cp, other, cp, other)))
        assert await ids(cp, "t") == ["c6"]
        counts = await asyncio.gather(*(each.delete_thread("t") for each in (cp, other, cp, other)))
        assert sorted(counts) == [0, 0, 0, 1]

    with_two(database, check)


def test_what_both_sides_of_a_fork_remove_at_once_is_gone(database: Database) -> None:
    async def check(cp: Checkpointer, other: Checkpointer) -> None:
        for number in range(12):
            thread, fork = f"t{number}", f"f{number}"
            await tell(cp, thread)
            await cp.fork(thread, new_id=fork)
            await other.load(fork)
            await asyncio.gather(cp.delete_before(thread, 9), other.delete_before(fork, 9))
            assert await cp.store.read(count("checkpoints")) == 0

    with_two(database, check)


def test_a_checkpoint_that_was_put_again_after_a_prune_had_chosen_it_stays(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await put(cp, "t", "latest", 2, WORDS[:1])
        await put(cp, "t", "old", 1, WORDS[:1])
        chosen = await cp.store.read(deleting.doomed, ThreadKey("", "t"), last=1, seconds=0.0, tags=())
        await put(cp, "t", "old", 3, WORDS[:2], tags=["precious"])
        await cp.store.write(deleting.drop, ThreadKey("", "t"), [key for key, _ in chosen])
        assert await ids(cp, "t") == ["old", "latest"]

    with_cp(database, check)


def test_a_prune_beside_puts_and_reads_harms_neither(database: Database) -> None:
    async def check(cp: Checkpointer, other: Checkpointer) -> None:
        await tell(cp)
        await other.load("t")

        async def write() -> None:
            for step in range(7, 19):
                await put(other, "t", f"c{step}", step, [*WORDS, UserMessage(str(step))])

        async def read() -> None:
            for _ in range(20):
                found = await other.get_latest("t")
                assert found is not None
                assert found.messages[:6] == WORDS
                assert (await loaded(other, "t")).messages[:6] == WORDS

        async def prune() -> None:
            for _ in range(12):
                await cp.prune("t", keep_last(1))

        await asyncio.gather(write(), read(), prune())
        await cp.prune("t", keep_last(1))
        assert (await ids(cp, "t"), await texts(cp, "t")) == (["c18"], [*"abcdef", "18"])
        assert await cp.store.read(count("messages")) == 7

    with_two(database, check)


def test_a_prune_that_was_interrupted_is_harmless_and_the_next_one_goes_on(database: Database) -> None:
    length = deleting.CHUNK + 100

    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await aside(cp, "aside", length)
        await aside(cp, "other", 3)
        chosen = await cp.store.read(deleting.doomed, ThreadKey("", "t"), last=2, seconds=0.0, tags=())
        keys = [key for key, name in chosen if name == "aside"]
        step = await cp.store.write(deleting.drop, ThreadKey("", "t"), keys)
        assert (step.messages, bool(step.left)) == (deleting.CHUNK, True)  # and here the process dies
        assert await cp.get("aside", "t") is None
        assert (await texts(cp, "t"), await said(cp, "t", "c3")) == (list("abcdef"), list("abc"))
        assert await said(cp, "t", "other") == ["other 0", "other 1", "other 2"]
        removed = await cp.prune("t", keep_last(2))
        assert sorted(removed.checkpoints) == ["c1", "c2", "c3", "c4", "other"]
        assert removed.messages == 100 + 3
        assert await cp.store.read(count("messages")) == 6

    with_cp(database, check)


def test_a_deletion_that_was_interrupted_is_one_all_the_same(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        await tell(cp)
        await aside(cp, "aside", deleting.CHUNK + 100)
        await cp.fork("t", "c2", new_id="f")
        assert await cp.store.write(deleting.discard, ThreadKey("", "t")) == 7  # and here the process dies
        assert await cp.load("t") is None
        assert ([info.id for info in await cp.threads()], await cp.get("c6")) == (["f"], None)
        assert (await texts(cp, "f"), await ids(cp, "f")) == (["a", "b"], ["c2", "c1", "aside"])
        await put(cp, "t", "c1", 1, [UserMessage("anew")])
        await cp.store.write(deleting.empty_trash)  # and here the next one
        assert (await texts(cp, "f"), await said(cp, "f", "c1")) == (["a", "b"], ["a"])
        assert len(await said(cp, "f", "aside")) == deleting.CHUNK + 100
        assert await cp.delete_thread("f") == 3  # whoever deletes next goes on
        assert await cp.store.read(count("messages")) == 1
        before = await cp.store.read(all_rows)
        assert await cp.delete_thread("nobody") == 0
        assert await cp.store.read(all_rows) == before
        assert await texts(cp, "t") == ["anew"]

    with_cp(database, check)


def test_prunes_beside_puts_that_replace_their_last_message_lose_nothing(database: Database) -> None:
    async def check(cp: Checkpointer) -> None:
        said: list[Any] = []

        async def write() -> None:
            for number in range(40):
                said.append(f"said {number}")
                about = CheckpointMetadata("t", f"c{number}", number)
                await cp.put(Checkpoint(about, [*said, f"how things stand at {number}"]))

        async def prune(writing: asyncio.Task[None]) -> None:
            while not writing.done():
                await cp.prune("t", keep_last(2))

        writing = asyncio.create_task(write())
        await asyncio.gather(writing, prune(writing), prune(writing))
        latest = await cp.get_latest("t")
        assert latest is not None
        assert latest.messages == [*said, "how things stand at 39"]
        await cp.prune("t", keep_last(1))
        loaded_thread = await loaded(cp, "t")
        assert len(loaded_thread.messages) == 41

    with_cp(database, check)
