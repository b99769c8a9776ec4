"""Checkpoints, forks and rewinds, seen and made from the command line."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from pathlib import Path

import pytest

from byssus import UserMessage
from byssus.checkpointer import Checkpoint, CheckpointMetadata
from byssus.cli import main
from tests.support.checkpointers import fill_trip
from tests.support.commands import Command, Here, command, command_here
from tests.support.databases import Database

pytestmark = pytest.mark.processes


@pytest.fixture
def byssus(tmp_path: Path, database: Database) -> Command:
    return command(tmp_path, database.place)


@pytest.fixture
def trip(database: Database) -> Database:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await fill_trip(cp)

    asyncio.run(main())
    return database


def texts(database: Database, thread_id: str) -> list[str]:
    async def main() -> list[str]:
        async with database.checkpointer() as cp:
            thread = await cp.load(thread_id)
            return [message.text for message in thread.messages] if thread else []

    return asyncio.run(main())


def test_checkpoints_are_listed_with_the_latest_first(byssus: Command, trip: Database) -> None:
    head, *rows = byssus("checkpoints", "trip").stdout.splitlines()
    assert head.split() == ["STEP", "MESSAGE", "CHECKPOINT", "MADE", "TAGS", "SUMMARY"]
    assert [row.split()[:3] for row in rows] == [["3", "6", "c3"], ["2", "4", "c2"], ["1", "2", "c1"]]
    assert re.search(r"\d\d:\d\d:\d\dZ", byssus("checkpoints", "trip", "--utc").stdout)
    assert rows[1].endswith("plan, agreed  step 2")
    assert rows[1].index("plan") == head.index("TAGS")
    last = byssus("checkpoints", "trip", "--limit", "1")
    assert "c3" in last.stdout
    assert "c2" not in last.stdout
    assert last.stderr == "(the latest 1; --limit N shows more)\n"


def test_a_script_gets_checkpoints_as_json(byssus: Command, trip: Database) -> None:
    listed = json.loads(byssus("checkpoints", "trip", "--json").stdout)
    assert [each["checkpoint_id"] for each in listed] == ["c3", "c2", "c1"]
    made = listed[1].pop("created_at")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", made)
    assert listed[1] == {
        "thread_id": "trip",
        "checkpoint_id": "c2",
        "step": 2,
        "parent_checkpoint_id": None,
        "tags": ["plan", "agreed"],
        "summary": "step 2",
        "seq": 4,
    }


def test_a_thread_without_checkpoints_says_so(byssus: Command, database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.append("plain", UserMessage("hi"))

    asyncio.run(main())
    assert byssus("checkpoints", "plain").stdout == "Thread plain has no checkpoints.\n"
    assert json.loads(byssus("checkpoints", "plain", "--json").stdout) == []


@pytest.mark.parametrize(
    ("point", "length"), [([], 6), (["--at", "c2"], 4), (["--at", "step:1"], 2), (["--at", "seq:3"], 3)]
)
def test_a_fork_begins_where_it_is_told(byssus: Command, trip: Database, point: list[str], length: int) -> None:
    assert byssus("fork", "trip", *point, "--as", "other").stdout == "other\n"
    assert texts(trip, "other") == [f"message {number}" for number in range(1, length + 1)]
    assert len(texts(trip, "trip")) == 6


def test_a_fork_without_a_name_gets_one_that_is_printed_alone(byssus: Command, trip: Database) -> None:
    new = byssus("fork", "trip").stdout.removesuffix("\n")
    assert re.fullmatch(r"[0-9a-f]{32}", new)
    assert texts(trip, new) == texts(trip, "trip")


def test_a_rewind_says_how_to_undo_it(byssus: Command, trip: Database) -> None:
    done = byssus("rewind", "trip", "step:1").stdout
    assert done == "Thread trip has 2 messages now.\nTo undo this: byssus rewind trip c3\n"
    assert len(texts(trip, "trip")) == 2
    assert [each["checkpoint_id"] for each in json.loads(byssus("checkpoints", "trip", "--json").stdout)] == ["c1"]
    assert byssus("rewind", "trip", "c3").stdout.startswith("Thread trip has 6 messages now.\n")
    assert len(texts(trip, "trip")) == 6


def test_a_tree_shows_checkpoints_forks_and_what_was_left(byssus: Command, trip: Database) -> None:
    byssus("fork", "trip", "--at", "c2", "--as", "other")
    byssus("fork", "other", "--as", "third")
    byssus("rewind", "trip", "c2")
    assert byssus("tree", "trip").stdout.splitlines() == [
        "trip (4 messages)",
        "├── step 1 · message 2 · c1  step 1",
        "├── step 2 · message 4 · c2  [plan, agreed]  step 2",
        "├── message 4 · left behind",
        "│   └── step 3 · message 6 · c3  step 3",
        "└── message 4 · fork other (4 messages)",
        "    └── message 4 · fork third (4 messages)",
    ]
    flat = json.loads(byssus("tree", "trip", "--json").stdout)
    assert [(node["thread_id"], node["forked_from"], node["forked_at"]) for node in flat] == [
        ("trip", None, None),
        ("other", "trip", 4),
        ("third", "other", 4),
    ]
    assert [each["checkpoint_id"] for each in flat[0]["checkpoints"]] == ["c1", "c2"]
    assert [each["checkpoint_id"] for each in flat[0]["left"]] == ["c3"]
    assert [each["seq"] for each in (*flat[0]["checkpoints"], *flat[0]["left"])] == [2, 4, 6]
    assert flat[0]["left_branches"] == [{"parted_at": 4, "within": None, "checkpoints": ["c3"], "forks": []}]
    assert flat[1]["message_count"] == 4


@pytest.fixture
def here(trip: Database, capsys: pytest.CaptureFixture[str]) -> Here:
    return command_here(capsys, trip.place)


def test_forks_are_drawn_at_the_message_where_they_part(here: Here) -> None:
    here("fork", "trip", "--at", "seq:3", "--as", "early")
    here("fork", "trip", "--at", "seq:5", "--as", "late")
    here("fork", "trip", "--at", "seq:1", "--as", "first")
    here("fork", "trip", "--at", "seq:3", "--as", "early too")
    here("rewind", "trip", "step:2")
    here("fork", "early", "--as", "of early")
    assert here("tree", "trip").stdout.splitlines() == [
        "trip (4 messages)",
        "├── message 1 · fork first (1 message)",
        "├── step 1 · message 2 · c1  step 1",
        "├── message 3 · fork early (3 messages)",
        "│   └── message 3 · fork of early (3 messages)",
        "├── message 3 · fork early too (3 messages)",
        "├── step 2 · message 4 · c2  [plan, agreed]  step 2",
        "└── message 4 · left behind",
        "    ├── message 5 · fork late (5 messages)",
        "    └── step 3 · message 6 · c3  step 3",
    ]


def test_a_left_branch_of_a_left_branch_hangs_there(here: Here, trip: Database) -> None:
    async def go_on() -> None:
        async with trip.checkpointer() as cp:
            await cp.append("trip", UserMessage("another way"))

    here("rewind", "trip", "c2")
    asyncio.run(go_on())
    here("rewind", "trip", "c1")
    lines = here("tree", "trip").stdout.splitlines()
    assert [re.sub("[0-9a-f]{32}.*", "ID", each) for each in lines] == [
        "trip (2 messages)",
        "├── step 1 · message 2 · c1  step 1",
        "└── message 2 · left behind",
        "    ├── step 2 · message 4 · c2  [plan, agreed]  step 2",
        "    ├── message 4 · left behind",
        "    │   └── step 3 · message 6 · c3  step 3",
        "    └── step 3 · message 5 · ID",
    ]


def test_a_terminal_without_utf_8_gets_a_tree_in_ascii(here: Here, trip: Database) -> None:
    here("rewind", "trip", "c2")
    here("fork", "trip", "--as", "北京")
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", ascii_only)
        assert main(["tree", "trip", "--db", trip.place]) == 0
    ascii_only.seek(0)
    assert ascii_only.read().splitlines() == [
        "trip (4 messages)",
        "|-- step 1 - message 2 - c1  step 1",
        "|-- step 2 - message 4 - c2  [plan, agreed]  step 2",
        "|-- message 4 - left behind",
        "|   `-- step 3 - message 6 - c3  step 3",
        "`-- message 4 - fork \\u5317\\u4eac (4 messages)",
    ]


def test_a_difference_says_where_two_threads_part(byssus: Command, trip: Database) -> None:
    byssus("fork", "trip", "--at", "seq:5", "--as", "other")
    assert byssus("diff", "trip", "other").stdout == (
        "trip and other share 5 messages, up to seq:5.\n"
        "  trip goes on with 1 message\n"
        "  other goes on with 0 messages\n"
    )
    assert byssus("diff", "trip", "trip").stdout == "trip and trip are the same: 6 messages.\n"
    assert json.loads(byssus("diff", "other", "trip", "--json").stdout) == {
        "seq": 5,
        "shared": 5,
        "only_a": 0,
        "only_b": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["checkpoints", "nobody"], "there is no thread 'nobody'"),
        (["tree", "nobody"], "there is no thread 'nobody'"),
        (["fork", "nobody"], "there is no thread 'nobody'"),
        (["rewind", "nobody", "c1"], "there is no thread 'nobody'"),
        (["diff", "trip", "nobody"], "there is no thread 'nobody'"),
        (["fork", "trip", "--at", "c9"], "has no checkpoint 'c9'; 'byssus tree' names them"),
        (["rewind", "trip", "3"], "has no checkpoint '3'; 'byssus tree' names them, and step:N or seq:N will do"),
        (["rewind", "trip", "step:9"], "has no checkpoint of step 9"),
        (["rewind", "trip", "seq:7"], "has no seq 7: its head is 6"),
        (["fork", "trip", "--as", "trip"], "there is already a thread 'trip'"),
        (["fork", "trip", "--as", ""], "a thread id must be a string with at least one character"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_why(
    byssus: Command, trip: Database, arguments: list[str], complaint: str
) -> None:
    done = byssus(*arguments, code=1)
    assert complaint in done.stderr
    assert re.fullmatch(r"byssus: [^\n]+\n", done.stderr)
    assert done.stdout == ""


def test_a_step_that_two_checkpoints_have_is_asked_about(byssus: Command, trip: Database) -> None:
    async def main() -> None:
        async with trip.checkpointer() as cp:
            await cp.put(Checkpoint(CheckpointMetadata("trip", "again", step=2)))

    asyncio.run(main())
    assert "has 2 checkpoints of step 2" in byssus("rewind", "trip", "step:2", code=1).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoints"],
        ["checkpoints", "trip", "--limit", "0"],
        ["rewind", "trip"],
        ["rewind", "trip", "seq:x"],
        ["diff", "trip"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(byssus: Command, arguments: list[str]) -> None:
    assert byssus(*arguments, code=2).stderr.startswith("usage: byssus")


def test_text_from_elsewhere_cannot_drive_the_terminal(byssus: Command, database: Database) -> None:
    evil = "a\x1b[2J\nb\u202e"

    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.put(Checkpoint(CheckpointMetadata(evil, evil, tags=[evil], summary=evil)))
            await cp.fork(evil, new_id=f"{evil}2")
            await cp.append(f"{evil}2", UserMessage("hi"))
            await cp.put(Checkpoint(CheckpointMetadata(f"{evil}2", "left", step=1), [{"x": 1}]))

    asyncio.run(main())
    outputs = [
        byssus("checkpoints", evil).stdout,
        byssus("tree", evil).stdout,
        byssus("fork", evil, "--as", f"{evil}3").stdout,
        byssus("rewind", f"{evil}2", evil).stdout,
        byssus("diff", evil, f"{evil}2").stdout,
        byssus("rewind", evil, "nowhere", code=1).stderr,
    ]
    for output in outputs:
        assert output
        assert not re.search(r"[^\n -~─-╿·]", output), output
    assert len(outputs[0].splitlines()) == 2
    assert len(outputs[1].splitlines()) == 6
