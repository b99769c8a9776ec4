"""The power fails: whatever was told is there, the database is sound, and its next user goes on.

The short form of `python -m tests.crash.torture power`. The scenes run in processes of their own, once for this file;
the outages are made from what they wrote. A check that cannot fail is worth nothing, so the same outages are also tried
on disks that lie, and there they are noticed.

For SQLite only, as its VFS is where the disk is made up; what a Postgres keeps in an outage is its own promise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.outage import Finding, by_kind, outages, points_of, record
from tests.crash.power import Deleted, Disk, Entry, Log, Made, Synced, SyncFailed, Told, Truncated, Wrote

SEED = 1


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return record("crowd", tmp_path_factory.mktemp("crowd"), SEED)


def some_points(log: Log, number: int) -> list[int]:
    rng = random.Random(SEED)
    return sorted(rng.sample(points_of(log, rng, 20), number))


# --- byssus on an honest disk ---------------------------------------------------------------------------------------


def test_nothing_that_was_told_is_lost_wherever_the_power_fails(crowd: Log, tmp_path: Path) -> None:
    points = points_of(crowd, random.Random(SEED), 60)
    assert outages(crowd, points, tmp_path, SEED) == []


def test_the_crowd_does_all_that_endangers_a_database(crowd: Log) -> None:
    names = {entry.file: entry.name for entry in crowd if isinstance(entry, Made)}
    folded = [entry for entry in crowd if isinstance(entry, Synced) and names[entry.file] == "x.db"]
    begun = [e for e in crowd if isinstance(e, Wrote) and names[e.file] == "x.db-wal" and e.offset == 0]
    assert len(folded) > 3, "the WAL was folded into the file in between"
    assert len(begun) > 3, "the WAL was begun again in between"
    assert sum(isinstance(entry, Deleted) and entry.name == "x.db-wal" for entry in crowd) > 1
    assert {entry.source for entry in crowd if isinstance(entry, Told)} == {"a", "b", "c", "agent-1", "agent-2", "late"}


def test_nothing_is_lost_when_the_power_fails_while_a_full_wal_is_folded_into_the_file(tmp_path: Path) -> None:
    log = record("heavy", tmp_path / "scene", SEED)
    names = {entry.file: entry.name for entry in log if isinstance(entry, Made)}
    in_file = [i for i, entry in enumerate(log) if isinstance(entry, Wrote) and names[entry.file] == "x.db"]
    folded = [i for i, entry in enumerate(log) if isinstance(entry, Synced) and names[entry.file] == "x.db"]
    assert len(folded) >= 3, "when the file was made, by itself when the WAL was full, and at the end"
    begun = next(i for i, e in enumerate(log) if i > folded[1] and isinstance(e, Wrote) and e.offset == 0)
    told = next(i for i, entry in enumerate(log) if i > begun and isinstance(entry, Told) and entry.kind == "done")
    first = next(i for i in in_file if i > folded[0])
    points = [(first + folded[1]) // 2, folded[1], folded[1] + 1, begun + 1, begun + 2, (begun + told) // 2, told + 1]
    assert outages(log, sorted(points), tmp_path, SEED) == []


def test_nothing_told_after_a_failed_sync_depends_on_what_the_kernel_has_dropped(tmp_path: Path) -> None:
    log = record("failing", tmp_path / "scene", SEED)
    assert sum(isinstance(entry, SyncFailed) for entry in log) > 10
    assert outages(log, some_points(log, 80), tmp_path, SEED) == []


def test_normal_durability_may_lose_the_last_moments_but_never_damages(tmp_path: Path) -> None:
    log = record("crowd", tmp_path / "scene", SEED, "normal")
    found = outages(log, some_points(log, 50), tmp_path, SEED)
    assert set(by_kind(found)) == {"lost"}


# --- the check can fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lies_about", "kind"),
    [(("x.db", "-wal", "-journal", "/"), "lost"), (("-wal",), "lost"), (("x.db",), "damaged"), (("/",), "lost")],
    ids=["everything", "the WAL", "the file", "the directory"],
)
def test_a_disk_that_lies_is_noticed(crowd: Log, tmp_path: Path, lies_about: tuple[str, ...], kind: str) -> None:
    found = outages(crowd, some_points(crowd, 50), tmp_path, SEED, lies_about=lies_about)
    assert kind in by_kind(found)


def test_a_message_that_is_told_too_early_is_noticed(crowd: Log, tmp_path: Path) -> None:
    """A store that answers before it has synced."""
    early: Log = []
    waiting: list[Entry] = []
    for entry in reversed(crowd):
        if isinstance(entry, Told) and entry.kind in ("done", "message", "result"):
            waiting.append(entry)
            continue
        early.append(entry)
        if isinstance(entry, Synced):
            early += waiting
            waiting = []
    early += waiting
    early.reverse()
    found = outages(early, some_points(early, 50), tmp_path, SEED)
    assert by_kind(found).keys() == {"lost"}


# --- the disk of the tests --------------------------------------------------------------------------------------------


def images(*entries: Entry, lies_about: tuple[str, ...] = (), number: int = 200) -> Iterator[dict[str, bytes]]:
    disk = Disk(lies_about)
    for entry in entries:
        disk.play(entry)
    return (disk.outage(random.Random(seed)) for seed in range(number))


MADE: Log = [Made(1, "f"), Wrote(1, 0, b"a" * 1024), Synced(1, directory_synced=True)]


def test_what_was_synced_is_in_every_image() -> None:
    assert {image["f"] for image in images(*MADE)} == {b"a" * 1024}


def test_what_was_not_synced_may_be_there_or_not_or_in_part() -> None:
    seen = {image["f"] for image in images(*MADE, Wrote(1, 512, b"b" * 1024))}
    assert b"a" * 1024 in seen
    assert b"a" * 512 + b"b" * 1024 in seen
    assert b"a" * 1024 + b"b" * 512 in seen, "the second sector without the first"
    assert any(content.count(b"b") % 512 for content in seen), "torn"
    assert all(content.startswith(b"a" * 512) for content in seen), "what nobody has written to is as it was"


def test_a_truncation_that_was_not_synced_may_be_undone() -> None:
    assert {image["f"] for image in images(*MADE, Truncated(1, 0)) if not any(image["f"])} >= {b""}
    assert {image["f"] for image in images(*MADE, Truncated(1, 0))} >= {b"a" * 1024}


def test_a_new_file_is_there_for_certain_when_its_directory_was_synced() -> None:
    made: Log = [Made(1, "f"), Wrote(1, 0, b"a"), Synced(1, directory_synced=False)]
    assert {tuple(image) for image in images(*made)} == {(), ("f",)}
    assert {tuple(image) for image in images(*made, Synced(1, directory_synced=True))} == {("f",)}


def test_a_deleted_file_may_come_back_until_its_directory_was_synced() -> None:
    again: Log = [*MADE, Deleted("f", directory_synced=False), Made(2, "f"), Wrote(2, 0, b"b")]
    assert {image.get("f", b"")[:1] for image in images(*again)} >= {b"", b"a", b"b"}
    gone = images(*MADE, Deleted("f", directory_synced=True))
    assert {tuple(image) for image in gone} == {()}


def test_a_failed_sync_is_not_made_good_by_the_next_but_by_writing_again() -> None:
    failed: Log = [*MADE, Wrote(1, 0, b"b" * 512), SyncFailed(1), Synced(1, directory_synced=False)]
    assert {image["f"][:1] for image in images(*failed)} == {b"a", b"b"}
    repaired = images(*failed, Wrote(1, 600, b"c"), Synced(1, directory_synced=False))
    assert {image["f"][:1] for image in repaired} == {b"b"}, "the page is written as a whole"


def test_findings_are_counted_by_kind() -> None:
    assert by_kind([Finding("lost", 1, ""), Finding("lost", 2, ""), Finding("garbled", 1, "")]) == {
        "lost": 2,
        "garbled": 1,
    }
