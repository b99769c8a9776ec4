"""A process that is killed at any of its write boundaries breaks no promise; and the judge of that is not blind.

The stories are told by a process of its own, which forks: it must not have threads, and the one of pytest may.

On SQLite there is a story for each boundary of the parallel variation, and for each fifth one of the sequential one.
On Postgres, where the same queries make the same commits, there is one for each ninth, and the two variations begin
at different ones. Such a story is before a commit and after one in turn; `python -m tests.crash.stories --every` takes
all.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from tests.crash import databases
from tests.crash.boundaries import STORY, Kill, Plan
from tests.crash.boundary_judge import CHECKS, violations
from tests.crash.boundary_scene import Variation
from tests.crash.place import Place

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell that another process is gone"),
    pytest.mark.timeout(600),  # a minute, on a machine that has nothing else to do
]
_ROOT = Path(__file__).parents[2]
# Odd, so that it is before a commit and after one in turn.
_STEPS = {("sqlite", True): 1, ("sqlite", False): 5, ("postgres", True): 9, ("postgres", False): 9}  # is it parallel


def stories(kind: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-m", "tests.crash.stories", "--database", kind, *arguments]
    environment = databases.environment(kind)
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize("kind", databases.KINDS)
@pytest.mark.parametrize(
    ("variation", "first"),
    [
        (Variation(), 1),
        (
            Variation(
                "sequential",
                half_done="unknown",
                recovery="deny",
                answers_by="checkpointer",
                has_hooks=True,
                checkpoint_every="turn",
            ),
            4,
        ),
    ],
    ids=["parallel", "sequential"],
)
def test_killed_at_any_write_boundary_the_next_process_keeps_every_promise(
    tmp_path: Path, variation: Variation, first: int, kind: str
) -> None:
    step = _STEPS[kind, variation == Variation()]
    which = ["--first", str(first if kind == "postgres" else 1), "--step", str(step)]
    said = stories(kind, "--every", *which, "--variation", as_json(variation), "--directory", str(tmp_path / "stories"))
    found = re.match(rf"{kind}: (\d+) of (\d+) boundaries, (\d+) not reached, 0 with a violation", said)
    assert found is not None, said
    tried, boundaries, missed = map(int, found.groups())
    assert boundaries > 80, "the scene has become too short to tell much"
    assert missed <= tried / 10, "too few of the processes came to the boundary that they should be killed at"


@pytest.mark.parametrize("kind", databases.KINDS)
def test_killed_again_and_again_in_recovery_every_promise_is_kept(tmp_path: Path, kind: str) -> None:
    said = stories(kind, "--kills", "20", "--seed", "1", "--jobs", "1", "--directory", str(tmp_path / "stories"))
    assert said.startswith("seed 1, ")
    assert "all well" in said


# --- the judge --------------------------------------------------------------------------------------------------------


class Files:
    """What a story has left, to be falsified."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def end(self, table: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
        """Change the rows of a table at the end."""
        self._story(lambda story: change(story["tables"][table]))

    def replace(self, old: str, new: str) -> None:
        """Change the stored messages."""
        self.end("messages", lambda rows: [row.update(body=row["body"].replace(old, new)) for row in rows])

    def diary(self, change: Callable[[list[dict[str, Any]]], object]) -> None:
        path = Place(str(self.directory)).diary
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        change(entries)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def lives(self, change: Callable[[list[dict[str, Any]]], object]) -> None:
        self._story(lambda story: change(story["lives"]))

    def _story(self, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.directory / STORY
        story = json.loads(path.read_text())
        change(story)
        path.write_text(json.dumps(story))

    def said(self, what: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change each line of this kind that a process said."""
        self.lives(lambda lives: [change(line) for life in lives for line in life["said"] if line["what"] == what])


def _forget_steering(files: Files) -> None:
    """As if all that was said had been there from the beginning, and models had been sent only the last of it."""
    files.said("receipt", lambda line: line.update(at=1))
    files.said("request", lambda line: line.update(ids=line["ids"][-1:]))


def _steers(row: dict[str, Any]) -> bool:
    return "steer of" in row["body"]


Falsify: TypeAlias = Callable[[Files], None]

FALSIFIED: list[tuple[str, Falsify]] = [
    (
        "every_process_dies_by_its_kill_or_comes_to_its_end",
        lambda files: files.lives(lambda lives: lives[-1].update(exit=70)),
    ),
    ("the_database_is_sound", lambda files: files.end("threads", lambda rows: rows[0].update(message_count=1))),
    (
        "a_checkpoint_holds_what_was_said_up_to_it_and_each_follows_the_one_before",
        lambda files: files.end("checkpoints", lambda rows: rows[0].update(message_count=1)),
    ),
    ("a_turn_that_has_ended_has_its_checkpoint", lambda files: files.end("checkpoints", lambda rows: rows.pop())),
    ("at_the_end_nothing_is_left_open", lambda files: files.end("threads", lambda rows: rows[0].update(run="r"))),
    (
        "a_run_is_one_row_with_one_attempt_for_each_process_that_drove_it",
        lambda files: files.end("run_attempts", lambda rows: rows.pop()),
    ),
    (
        "an_interrupted_run_is_listed_and_no_other",
        lambda files: files.said("found", lambda line: line.update(unfinished=["t"])),
    ),
    (
        "a_rival_is_refused_while_the_thread_is_driven",
        lambda files: files.lives(
            lambda lives: [line.update(owner="?") for each in lives for n in each["neighbours"] for line in n["said"]]
        ),
    ),
    (
        "nothing_acknowledged_is_lost",
        lambda files: files.end("messages", lambda rows: rows.pop()),
    ),
    (
        "what_others_wrote_beside_the_run_is_kept",
        lambda files: files.said("request", lambda line: line.update(what="noise", id="lost", error="None")),
    ),
    (
        "every_look_sees_what_the_one_before_saw",
        lambda files: files.replace("that is it", "that was it"),
    ),
    ("every_history_is_valid", lambda files: files.said("request", lambda line: line.update(flaws=["bad"]))),
    (
        "no_step_of_the_story_is_told_twice",
        lambda files: files.replace('"stage":1', '"stage":0'),
    ),
    (
        "what_was_said_is_heard_once_and_in_order",
        lambda files: files.end(
            "messages", lambda rows: rows.extend([{**row, "seq": row["seq"] + 1000} for row in rows if _steers(row)])
        ),
    ),
    ("steering_is_heard_before_the_next_turn", _forget_steering),
    (
        "the_part_of_a_reply_that_was_saved_is_kept_once",
        lambda files: files.replace('"aborted"', '"stop"'),
    ),
    (
        "what_tools_wrote_to_extra_is_stored_when_a_run_ends",
        lambda files: files.end("threads", lambda rows: rows[0].update(extra="{}")),
    ),
    ("the_ledger_agrees_with_the_history", lambda files: files.end("tool_calls", lambda rows: rows.pop())),
    (
        "a_call_has_one_key_and_a_key_one_call",
        lambda files: files.diary(lambda diary: diary[0].update(key=diary[-1]["key"])),
    ),
    (
        "a_finished_tool_never_runs_again",
        lambda files: files.diary(lambda diary: diary.append({**diary[0], "at": 2**60})),
    ),
    (
        "a_tool_runs_as_often_as_its_policy_allows",
        lambda files: files.said("answering", lambda line: line.update(at=2**60)),
    ),
    (
        "a_result_tells_the_truth",
        lambda files: files.diary(lambda diary: diary.remove(next(e for e in diary if e["what"] == "end"))),
    ),
    (
        "tools_of_a_sequential_reply_do_not_overlap",
        lambda files: files.diary(
            lambda diary: [e.update(at=e["at"] + 10**12) for e in diary if e["what"] == "end" and e["name"] == "step"]
        ),
    ),
]


@pytest.fixture(scope="module", params=databases.KINDS)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A story in which a reply was interrupted and a rival refused, and all is well."""
    directory = tmp_path_factory.mktemp("story")
    plan = Plan(Variation(checkpoint_every="turn"), kills=[Kill("boundary", 6)], database=request.param)
    stories(request.param, "--plan", as_json(plan), "--keep", "--directory", str(directory))
    return directory / "again-0"


def test_the_judge_has_nothing_against_a_story_that_went_well(story: Path) -> None:
    assert violations(story) == []


@pytest.mark.parametrize(("promise", "falsify"), FALSIFIED, ids=[name for name, _ in FALSIFIED])
def test_the_judge_sees_a_promise_that_was_broken(story: Path, tmp_path: Path, promise: str, falsify: Falsify) -> None:
    shutil.copytree(story, tmp_path / "story")
    falsify(Files(tmp_path / "story"))
    assert promise in {violation.split(":")[0] for violation in violations(tmp_path / "story")}


def test_every_promise_of_the_judge_is_tried() -> None:
    assert {name for name, _ in FALSIFIED} == {check.__name__ for check in CHECKS}
