"""Checkpoints as values: times, what is kept, and drawings."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from byssus.checkpointer import (
    Checkpoint,
    CheckpointBackend,
    CheckpointMetadata,
    LeftBranch,
    Retention,
    SQLiteCheckpointer,
    Tree,
    keep_age,
    keep_last,
    keep_tagged,
)
from byssus.errors import InputError
from byssus.values import clock


def tree(name: str, *forks: Tree, at: int | None = None, steps: int = 0, left: int = 0) -> Tree:
    made = [CheckpointMetadata(name, f"c{step}", step, summary="said") for step in range(steps + left)]
    branches = (LeftBranch(1, None, made[steps:], []),) if left else ()
    return Tree(name, 7, None, at, made[:steps], made[steps:], list(forks), branches)


def test_a_checkpoint_without_a_time_is_of_now_in_utc() -> None:
    before = clock.now()
    assert before <= CheckpointMetadata("t").created_at <= clock.now()


def test_each_has_an_id_of_its_own_and_nothing_of_another() -> None:
    one, other = CheckpointMetadata("t"), CheckpointMetadata("t")
    assert one.checkpoint_id != other.checkpoint_id
    one.tags.append("x")
    assert other.tags == []
    assert Checkpoint(one).messages is not Checkpoint(other).messages


@pytest.mark.parametrize(
    "given",
    [
        datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime(2026, 1, 2, 5, 4, 5, 6, timezone(timedelta(hours=2))),
        "2026-01-02T03:04:05.000006Z",
        "2026-01-02T05:04:05.000006+02:00",
    ],
)
def test_a_time_of_any_zone_is_the_same_in_utc(given: Any) -> None:
    assert CheckpointMetadata("t", created_at=given).created_at == "2026-01-02T03:04:05.000006Z"


@pytest.mark.parametrize("given", ["yesterday", 17, None, datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))])
def test_what_is_no_time_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InputError, match="created_at"):
        CheckpointMetadata("t", created_at=given)


def test_a_checkpointer_is_a_checkpoint_backend() -> None:
    backend: CheckpointBackend = SQLiteCheckpointer("never opened.db")  # as types say
    assert isinstance(backend, CheckpointBackend)
    assert not isinstance(object(), CheckpointBackend)


def test_what_either_of_two_keeps_stays() -> None:
    assert keep_last(3) | keep_age(days=2) | keep_tagged("a") | keep_last(5) | keep_tagged("b") == Retention(
        5, 172_800.0, frozenset({"a", "b"})
    )


@pytest.mark.parametrize(
    ("make", "given"),
    [
        *((keep_last, count) for count in (0, -1, True, "3", 2**60)),
        *((keep_age, days) for days in (0, -1, float("nan"), float("inf"), "1")),
        *((keep_tagged, tag) for tag in (1, ["a"])),
    ],
)
def test_what_cannot_be_kept_is_refused(make: Any, given: Any) -> None:
    with pytest.raises(InputError, match=make.__name__):
        make(given)
    with pytest.raises(InputError, match="keep_tagged"):
        keep_tagged()


def test_a_tree_is_drawn_with_what_was_left_and_with_its_forks() -> None:
    drawn = str(tree("t", tree("a", tree("b", at=2, steps=1), at=1), tree("c", at=3), steps=1, left=1))
    assert drawn == "\n".join(
        [
            "t (7 messages)",
            "├── step 0 · c0  said",
            "├── message 1 · left behind",
            "│   └── step 1 · c1  said",
            "├── message 1 · fork a (7 messages)",
            "│   └── message 2 · fork b (7 messages)",
            "│       └── step 0 · c0  said",
            "└── message 3 · fork c (7 messages)",
        ]
    )


def test_a_tree_of_any_depth_is_drawn() -> None:
    deep = tree("last", at=1)
    for number in range(3_000):
        deep = tree(str(number), deep, at=1)
    assert len(str(deep).splitlines()) == 3_001
