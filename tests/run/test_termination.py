"""SIGTERM: real processes, told to end by a real signal at a moment that they announce themselves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.agents import can_go_on, history
from tests.support.databases import Database

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FAILED_RUN = re.compile(r"run \w+ on thread 't' failed: (HookFailed|ProviderError): ")
KILLED = -signal.SIGTERM  # by the signal itself, as without us


class Program:
    """A scene of termination_child.py under way; most of those about whose signal it is store nothing."""

    def __init__(self, scene: str, database: Database | None) -> None:
        place = [database.place] if database else []
        self.process = forked.Process(
            ["-W", "error", "-m", "tests.run.termination_child", scene, *place],
            stdin=forked.PIPE,
            stdout=forked.PIPE,
            stderr=forked.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )

    def read_until(self, line: str) -> None:
        assert self.process.stdout is not None
        for said in self.process.stdout:
            if said.strip() == line:
                return
        raise AssertionError(f"it ended without {line!r}: {self.process.communicate()}")

    def end(self) -> tuple[int, list[str]]:
        """The exit code, and what it said since it was last read. It complained of nothing but runs that failed."""
        output, complaints = self.process.communicate(timeout=60)
        assert [line for line in complaints.splitlines() if not FAILED_RUN.match(line)] == []
        return self.process.wait(), output.splitlines()


def ended(scene: str, database: Database | None, *signals: signal.Signals) -> tuple[int, list[str]]:
    """Run a scene, send it the signals when it is ready, and see it to its end."""
    program = Program(scene, database)
    try:
        if signals:
            program.read_until("ready")
        for number in signals:
            program.process.send_signal(number)
        return program.end()
    finally:
        program.process.kill()
        program.process.communicate()


def stored(database: Database, thread_id: str = "t") -> list[str]:
    async def main() -> list[str]:
        async with database.checkpointer() as cp:
            lines = await history(cp, thread_id)
            await can_go_on(cp, thread_id)
            return lines

    return asyncio.run(main())


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_sigterm_ends_a_run_in_good_order_and_the_program_with_143(database: Database) -> None:
    code, said = ended("prompt", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: Hel"]


def test_sigterm_ends_a_resumed_run_too(database: Database) -> None:
    code, said = ended("resume", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: ", "assistant: Hel"]


def test_sigterm_ends_a_stream_and_cancels_its_consumer(database: Database) -> None:
    code, said = ended("stream", database, signal.SIGTERM)
    assert (code, said[-4:]) == (143, ["CancelledError", "whole aborted", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: Hel"]


@pytest.mark.parametrize("scene", ["busy_stream", "background"])
def test_sigterm_ends_a_program_that_is_occupied_elsewhere(database: Database, scene: str) -> None:
    code, said = ended(scene, database, signal.SIGTERM)
    assert (code, said) == (143, ["CancelledError", "whole aborted", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: Hel"]


@pytest.mark.parametrize("scene", ["closing_stream", "dropped_stream"])
def test_sigterm_is_not_lost_on_a_stream_that_was_left(database: Database, scene: str) -> None:
    code, said = ended(scene, database)
    assert (code, said[-3:]) == (143, ["whole aborted", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: Hel"]


def test_sigterm_is_not_lost_on_a_run_that_is_just_over(database: Database) -> None:
    code, said = ended("at_the_very_end", database)
    assert (code, said) == (143, ["SystemExit 143", "whole stop", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: Hello."]


@pytest.mark.parametrize("scene", ["aborted_already", "cancelled_already"])
def test_sigterm_is_not_lost_on_a_run_that_ends_for_another_reason(database: Database, scene: str) -> None:
    code, said = ended(scene, database)
    assert (code, said[-4:]) == (143, ["SystemExit 143", "whole aborted", "closed", "atexit"])
    assert stored(database) == ["user: hi", "assistant: Hel"]


@pytest.mark.parametrize("scene", ["two", "two_in_a_group", "a_prompt_and_a_stream"])
def test_sigterm_ends_all_runs_in_good_order(database: Database, scene: str) -> None:
    code, said = ended(scene, database, signal.SIGTERM)
    assert (code, said[-4:]) == (143, ["whole aborted", "whole aborted", "closed", "atexit"])
    assert stored(database, "t") == stored(database, "u") == ["user: hi", "assistant: Hel"]


def test_sigterm_lets_no_run_end_the_program_before_the_others_are_over(database: Database) -> None:
    code, said = ended("main_and_background", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", *["whole aborted"] * 3, "closed", "atexit"])
    assert stored(database, "t") == stored(database, "v") == ["user: hi", "assistant: Hel"]
    assert stored(database, "u")[-1] == "tool_result: in order"


def test_sigterm_ends_however_many_runs_in_good_order() -> None:
    code, said = ended("many", None, signal.SIGTERM)
    assert (code, said[-51:]) == (143, [*["whole aborted"] * 50, "atexit"])


def test_sigterm_lets_an_agent_end_whose_tool_is_another_agent(database: Database) -> None:
    code, said = ended("nested", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "whole aborted", "closed", "atexit"])
    assert stored(database, "u") == ["user: deeper", "assistant: Hel"]
    assert [line.split(":")[0] for line in stored(database)] == ["user", "assistant", "tool_result"]


def test_sigterm_does_not_wait_for_a_tool_that_does_not_listen(database: Database) -> None:
    code, said = ended("stuck_tool", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "closed", "atexit"])
    assert "may or may not" in stored(database)[-1]


def test_a_second_sigterm_does_not_disturb_the_end(database: Database) -> None:
    program = Program("slow_tool", database)
    try:
        program.read_until("ready")
        program.process.send_signal(signal.SIGTERM)
        program.read_until("stopping: terminated")
        program.process.send_signal(signal.SIGTERM)
        assert program.process.stdin is not None
        program.process.stdin.write("\n")
        code, said = program.end()
    finally:
        program.process.kill()
        program.process.communicate()
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "closed", "atexit"])
    assert stored(database)[-1] == "tool_result: in order"


def test_a_run_that_fails_on_its_way_out_ends_the_program_too(database: Database) -> None:
    code, said = ended("failing", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "closed", "atexit"])


def test_sigterm_ends_a_run_on_a_loop_of_ones_own() -> None:
    code, said = ended("loop_of_ones_own", None, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "atexit"])


# --- whose signal it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", ["own_handler", "own_handler_of_the_loop"])
def test_a_programs_own_handler_is_left_alone(scene: str) -> None:
    assert ended(scene, None, signal.SIGTERM) == (0, ["own handler", "whole aborted", "atexit"])


def test_a_handler_that_a_program_sets_in_mid_run_is_left_alone_too() -> None:
    said = ["own handler", "whole aborted", "own handler", "atexit"]
    assert ended("own_handler_in_mid_run", None, signal.SIGTERM) == (0, said)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    assert ended("ignored", None) == (0, ["ready", "whole aborted", "atexit"])


@pytest.mark.parametrize(
    "scene", ["afterwards", "ours_put_back_by_a_program", "left_in_a_loop_that_stands_still"], ids=str
)
def test_without_a_run_sigterm_does_what_it_always_did(scene: str) -> None:
    assert ended(scene, None, signal.SIGTERM) == (KILLED, [])


@pytest.mark.parametrize("scene", ["other_thread", "other_thread_alone_at_last"])
def test_a_run_in_another_thread_leaves_sigterm_as_it_is(scene: str) -> None:
    assert ended(scene, None, signal.SIGTERM) == (KILLED, [])


def test_runs_in_other_threads_end_together_with_those_in_the_main_one(database: Database) -> None:
    code, said = ended("both_threads", database, signal.SIGTERM)
    assert (code, said) == (143, ["SystemExit 143", "whole aborted", "closed", "atexit"])
    assert stored(database, "t") == stored(database, "u") == ["user: hi", "assistant: Hel"]


def test_a_child_that_was_forked_during_a_run_is_ended_as_ever() -> None:
    assert ended("forked", None) == (0, [f"ok {int(signal.SIGTERM)}", "atexit"])


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", ["prompt", "stream"])
def test_ctrl_c_is_a_keyboard_interrupt_as_ever(database: Database, scene: str) -> None:
    program = Program(scene, database)
    try:
        program.read_until("ready")
        program.process.send_signal(signal.SIGINT)
        output, complaints = program.process.communicate(timeout=60)
    finally:
        program.process.kill()
        program.process.communicate()
    assert complaints.splitlines()[-1] == "KeyboardInterrupt"
    assert program.process.returncode == -signal.SIGINT
    assert output.splitlines()[-4:] == ["CancelledError", "whole aborted", "closed", "atexit"]
    assert stored(database) == ["user: hi", "assistant: Hel"]
