"""What the screen of `byssus watch` shows, in any size."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from byssus import AssistantMessage, Pending, TextContent, ToolResultMessage, Usage, UserMessage
from byssus.checkpointer import CallEnded, CallStarted, MessageAdded, ReplyDelta, ReplyReset, ThreadInfo
from byssus.cli.screen.table import width
from byssus.cli.watch.rows import Row, followed, overview, question, reading
from byssus.cli.watch.watched import Watched
from byssus.messages import stamped
from byssus.storage import TaskRow


def watched(name: str = "trip") -> Watched:
    return Watched(ThreadInfo(name, 1, "", "", None, "running", "A trip", ""), None)


def asks(text: str = "", **arguments: str) -> Pending:
    return Pending("trip", "c1", "write_file", dict(arguments), "approval", text, "2026-01-01")


def text(rows: list[Row]) -> str:
    return "\n".join("".join(part for _, part in row) for row in rows)


def delta(piece: str, kind: str = "text") -> ReplyDelta:
    return ReplyDelta("c", "r", 0, kind, 0, piece)


def task(kind: str, **values: Any) -> TaskRow:
    row = dict.fromkeys(TaskRow.__annotations__)
    return cast("TaskRow", {**row, "type": kind, "session_id": "trip", "status": "running", **values})


@pytest.mark.parametrize("columns", [1, 7, 40, 80, 200])
@pytest.mark.parametrize("lines", [1, 3, 10, 50])
def test_the_rows_fit_every_screen(columns: int, lines: int) -> None:
    runs = [watched(f"thread {number} 中文 🙂") for number in range(60)]
    for run in runs:
        run.add(MessageAdded("c", UserMessage("An question, 一个很长的问题。" * 40), 1))
        run.add(delta("x" * 500))
        run.waiting = [asks("Change it?\n@@ -1 +1 @@\n-old\n+new", path="a.txt")]
    tasks = [task(f"任务 {number}", progress=number / 30, progress_note="抓取了\x1b[2J" * 9) for number in range(30)]
    for rows in (
        overview(runs, runs[-1].thread_id, "a note", columns, lines),
        overview(runs, runs[-1].thread_id, "a note", columns, lines, tasks),
        followed(runs[0], "t", 3, "a note", columns, lines),
        followed(None, "t", 0, "", columns, lines),
    ):
        assert len(rows) == lines
        if columns > 20:
            assert max(width("".join(part for _, part in row)) for row in rows) <= columns
    if lines == 50 and columns == 200:
        assert "thread 59" in text(overview(runs, runs[-1].thread_id, "", columns, lines))


def test_a_question_shows_the_difference_in_colours_or_the_arguments() -> None:
    rows = question([asks("Change it?\n@@ -1 +1 @@\n-old\n+new\x1b[2J", content="new")], 40)
    assert [row[0] for row in rows[1:]] == [
        ("asks", "approval of write_file: Change it?"),
        ("dim", "@@ -1 +1 @@"),
        ("removed", "-old"),
        ("added", "+new\\x1b[2J"),
    ]
    assert text(question([asks("Sure?", path="a\nb"), asks()], 40)).splitlines()[1:] == [
        "approval of write_file: Sure? (1 more",
        "wait)",
        "path: a",
        "b",
    ]


def test_a_long_question_says_that_there_is_more_and_is_shown_whole() -> None:
    run = watched()
    run.waiting = [asks("Change it?\n" + "\n".join(f"+{number}" for number in range(100)))]
    assert "... 93 more rows; v shows all" in text(overview([run], "trip", "", 80, 20))
    assert "... 93 more rows; v shows all" in text(followed(run, "trip", 0, "", 80, 20))
    first, last = reading(run.waiting, 0, "", 80, 20), reading(run.waiting, 1_000, "", 80, 20)
    assert "Change it?" in text(first[0])
    assert "+99" in text(last[0])
    assert (first[1], last[1]) == (0, 84)


def test_what_a_run_does_is_told_in_a_few_words() -> None:
    run = watched()
    said = []
    for item in (
        delta("hm", "thinking"),
        delta("Hello\nthere"),
        ReplyReset("c"),
        MessageAdded("c", AssistantMessage([TextContent("Hello.")]), 2),
        CallStarted("c", "c1", "look", {}, 2),
        CallStarted("c", "c2", "pay", {}, 2),
        CallEnded("c", "c1", "look", 2, "failed"),
        CallEnded("c", "c2", "pay", 2, "done"),
        MessageAdded("c", ToolResultMessage("c2", "pay", "paid"), 3),
    ):
        run.add(item)
        said.append(run.doing)
    assert said == [
        "thinks",
        "writes: Hello there",
        "thinks",
        "thinks",
        "runs look",
        "runs look, pay",
        "runs pay",
        "thinks",
        "waits for the model",
    ]
    assert "look: failed" in text(followed(run, "trip", 0, "", 80, 20))


def test_tokens_are_those_of_the_last_minute_and_an_estimate_of_what_arrives() -> None:
    run, now = watched(), time.monotonic()
    run.add(MessageAdded("c", stamped(AssistantMessage([TextContent("a")], usage=Usage(input=90, output=10))), 1))
    old = AssistantMessage([TextContent("a")], usage=Usage(input=5), created_at="2020-01-01T00:00:00+00:00")
    run.add(MessageAdded("c", old, 2))
    run.add(delta("x" * 40))
    assert run.tokens_a_minute(now) == 110
    assert run.tokens_a_minute(now + 120) == 10


def test_tasks_that_run_are_drawn_with_a_bar_below_the_runs() -> None:
    tasks = [
        task("fetch", progress=0.5, progress_note="half", user_id="ann"),
        task("clean", session_id=None, user_id="ann", started_at="2026-01-01T00:00:00.000000Z"),
        task("slow", asked="cancel"),
    ]
    shown = text(overview([], None, "", 80, 20, tasks)).splitlines()
    assert shown[0].startswith("0 live runs, 0 questions waiting, 3 running tasks")
    drawn = [line.split() for line in shown[-6:-2]]
    assert drawn[0] == ["TASK", "THREAD", "PROGRESS"]
    assert drawn[1] == ["fetch", "trip", "[##########", "]", "50%", "half"]
    assert drawn[2][:3] == ["clean", "ann", "since"]
    assert drawn[3] == ["slow", "trip", "asked", "to", "cancel"]
    assert "... 8 more tasks run" in text(overview([], None, "", 80, 12, [task("t")] * 10))
    assert [row.split()[0] for row in text(overview([], None, "", 40, 12, tasks)).splitlines() if "[#####" in row] == [
        "fetch"
    ]
