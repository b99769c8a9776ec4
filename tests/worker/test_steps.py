"""Durable steps inside a handler: what finished answers from the database, and what may have run follows its policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from byssus.errors import InputError
from byssus.store.database import Store
from byssus.store.operations import Blocking, to_the_end
from byssus.tools import Done, NotDone, Unknown
from byssus.worker.outcomes import STOPPED, Failed, Suspended, TaskStopped, outcome_of_error
from byssus.worker.steps import StepResultInvalid, Steps, StepUnknown, current, perform_here
from tests.support.agents import within
from tests.support.databases import SQLiteFile
from tests.support.leases import until
from tests.support.locks import foreign_lock
from tests.support.steps import Held


@pytest.fixture
def task(store: Store) -> Held:
    return Held(store)


class Counted:
    """A function that counts its calls, and fails as often as it is told to."""

    def __init__(self, *failures: BaseException, result: Any = "result") -> None:
        self.calls = 0
        self._failures = list(failures)
        self._result = result

    def __call__(self) -> Any:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return self._result


async def interrupted(task: Held, name: str = "fetch", **options: Any) -> None:
    """A run whose worker dies inside a step."""
    begun = asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    run = asyncio.create_task(task.run().step(name, hang, **options))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


def test_a_step_runs_once_and_answers_from_the_database_afterwards(task: Held) -> None:
    async def main() -> None:
        fetch = Counted(result={"pages": (1, 2)})
        for _ in range(3):
            assert await task.run().step("fetch", fetch) == {"pages": [1, 2]}  # as JSON has it, also the first time
        assert fetch.calls == 1

    within(main())


def test_steps_may_be_async_or_plain_and_plain_ones_do_not_block_the_loop(task: Held) -> None:
    async def main() -> None:
        steps, home = task.run(), threading.get_ident()

        async def double(number: int, *, by: int = 2) -> int:
            return number * by

        assert await steps.step("async", partial(double, 2, by=3)) == 6
        assert await steps.step("late", lambda: double(4)) == 8
        assert await steps.step("plain", threading.get_ident) != home
        assert await steps.step("nothing", lambda: None) is None

    within(main())


def test_a_name_that_is_used_again_is_another_step(task: Held) -> None:
    async def main() -> None:
        for _ in range(2):
            steps = task.run()
            assert [await steps.step("page", Counted(result=n)) for n in range(3)] == [0, 1, 2]
            assert await steps.step("page#2", Counted(result="own")) == "own"
        assert [step["name"] for step in task.steps()] == ["page", "page#2", "page#3", "page#2#2"]

    within(main())


def test_a_step_that_failed_raises_and_runs_again_on_a_retry(task: Held) -> None:
    async def main() -> None:
        fetch = Counted(OSError("the disk is away"))
        with pytest.raises(OSError, match="the disk is away"):
            await task.run().step("fetch", fetch)
        error = task.steps()[0]["error"]
        assert error is not None
        assert (error["type"], error["message"]) == ("OSError", "the disk is away")
        assert "raise self._failures.pop(0)" in error["trace"]
        assert await task.run().step("fetch", fetch) == "result"
        assert fetch.calls == 2

    within(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_step_that_wants_to_end_the_program_has_failed(task: Held, error: BaseException) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=f"step 'fetch' raised {type(error).__name__}"):
            await task.run().step("fetch", Counted(error))
        assert task.story() == ["call fetch: failed"]

    within(main())


def test_a_step_that_cancels_itself_has_failed(task: Held) -> None:
    async def main() -> None:
        async def cancels_itself() -> None:
            raise asyncio.CancelledError("within")

        with pytest.raises(asyncio.CancelledError):
            await task.run().step("fetch", cancels_itself)
        assert task.story() == ["call fetch: failed"]

    within(main())


# --- steps that may have run ------------------------------------------------------------------------------------------


def test_a_step_that_may_have_run_does_not_run_again_by_default(task: Held) -> None:
    async def main() -> None:
        await interrupted(task)
        fetch = Counted()
        for _ in range(2):
            with pytest.raises(
                StepUnknown, match=r"step 'fetch' of task .* may or may not have taken effect"
            ) as raised:
                await task.run().step("fetch", fetch)
            assert raised.value.step == "fetch"
        task.set(status="failed")
        task.send("step:fetch", {"result": "as a person says"})
        assert await task.run().step("fetch", fetch) == "as a person says"
        assert fetch.calls == 0

    within(main())


def test_a_step_that_may_be_retried_runs_again_and_knows_its_name(task: Held) -> None:
    async def main() -> None:
        keys = []

        async def fetch(steps: Steps, begun: asyncio.Event | None = None) -> str:
            keys.append(current())
            if begun is not None:
                begun.set()
                await asyncio.Event().wait()
            return "fetched"

        begun, first = asyncio.Event(), task.run()
        run = asyncio.create_task(first.step("fetch", partial(fetch, first, begun), "retry"))
        await begun.wait()
        run.cancel()
        await asyncio.wait({run})
        again = task.run()
        assert await again.step("fetch", partial(fetch, again), "retry") == "fetched"
        assert (keys, current()) == (["fetch", "fetch"], None)
        assert task.steps()[0]["attempts"] == 2

    within(main())


@pytest.mark.parametrize(
    ("answer", "result", "calls"),
    [(Done({"id": 7}), {"id": 7}, 0), (NotDone(), "result", 1), (Unknown(), None, 0)],
)
def test_a_check_decides_about_a_step_that_may_have_run(task: Held, answer: Any, result: Any, calls: int) -> None:
    async def main() -> None:
        fetch, check = Counted(), Counted(result=answer)
        await interrupted(task, check=check)
        assert check.calls == 0
        if isinstance(answer, Unknown):
            with pytest.raises(StepUnknown):
                await task.run().step("fetch", fetch, check=check)
        else:
            for _ in range(2):
                assert await task.run().step("fetch", fetch, "check", check) == result
        assert (fetch.calls, check.calls) == (calls, 1)

    within(main())


def test_a_check_that_fails_leaves_the_step_as_it_is(task: Held) -> None:
    async def main() -> None:
        await interrupted(task)
        with pytest.raises(OSError, match="away"):
            await task.run().step("fetch", Counted(), check=Counted(OSError("away")))
        with pytest.raises(InputError, match=r"the check of step 'fetch' must return Done\(result\).* got 'yes'"):
            await task.run().step("fetch", Counted(), check=Counted(result="yes"))
        assert await task.run().step("fetch", Counted(), check=Counted(result=Done(1))) == 1

    within(main())


def test_a_person_is_asked_about_a_step_that_may_have_run(task: Held) -> None:
    async def main() -> None:
        await interrupted(task, recovery="ask")
        fetch = Counted()
        for _ in range(2):
            await suspended(task, lambda steps: steps.step("fetch", fetch, "ask"))
            assert task.facts().waits_for == "step:fetch"
        task.send("step:fetch", "retry")
        assert await task.run().step("fetch", fetch, "ask") == "result"
        assert fetch.calls == 1

    within(main())


# --- sleeps and waits -------------------------------------------------------------------------------------------------


async def suspended(task: Held, handler: Callable[[Steps], Coroutine[Any, Any, Any]]) -> None:
    """A run whose handler is unwound, and whose task is given back."""
    steps = task.run()
    with pytest.raises(Suspended):
        await handler(steps)
    assert task.give_back(steps).status == "pending"


def test_a_handler_that_sleeps_and_waits_begins_again_and_skips_what_it_has_done(task: Held) -> None:
    async def main() -> None:
        fetch = Counted()

        async def handler(steps: Steps) -> Any:
            await steps.step("fetch", fetch)
            await steps.sleep(3600)
            await steps.sleep(7200)
            return await steps.wait_for("approval")

        for sleeps in (1, 2):
            await suspended(task, handler)
            assert len(task.steps()) == 1 + sleeps
            assert (task.facts().waits_for, task.facts().run_at) == (None, task.steps()[-1]["until"])
            task.pass_time()
        await suspended(task, handler)
        assert task.facts().waits_for == "approval"
        task.send("approval", "yes")
        assert await handler(task.run()) == "yes"
        assert await handler(task.run()) == "yes"
        assert fetch.calls == 1
        assert task.facts().retry_count == 0

    within(main())


def test_a_short_sleep_is_just_slept(task: Held) -> None:
    async def main() -> None:
        await task.run().sleep(0.001)
        assert task.steps() == []

    within(main())


def test_a_wait_with_a_time_limit_raises_for_good_when_it_is_over(task: Held) -> None:
    async def main() -> None:
        async def handler(steps: Steps) -> Any:
            try:
                return await steps.wait_for("approval", timeout=60)
            except TimeoutError as error:
                return str(error)

        await suspended(task, handler)
        task.pass_time()
        for _ in range(2):
            assert await handler(task.run()) == f"event 'approval' of task {task.id!r} did not come in time"
            task.send("approval", "late")

    within(main())


def test_a_wait_does_not_cut_off_a_step_beside_it(task: Held) -> None:
    async def main() -> None:
        begun, let_go = asyncio.Event(), asyncio.Event()
        fetched = 0

        async def fetch() -> str:
            nonlocal fetched
            fetched += 1
            begun.set()
            await let_go.wait()
            return "fetched"

        async def handler(steps: Steps) -> Any:
            return await asyncio.gather(steps.wait_for("a"), steps.step("fetch", fetch), steps.wait_for("b", 60))

        running = asyncio.create_task(suspended(task, handler))
        await begun.wait()
        while len(task.steps()) < 3:
            await asyncio.sleep(0)
        let_go.set()
        await running
        assert sorted(task.story()) == ["call fetch: done", "wait a: waiting", "wait b: waiting"]
        task.send("b", 2)
        await suspended(task, handler)
        task.send("a", 1)
        assert await handler(task.run()) == [1, "fetched", 2]
        assert fetched == 1

    within(main())


def test_a_handler_that_catches_its_suspension_gets_no_further(task: Held) -> None:
    async def main() -> None:
        fetch = Counted()

        async def handler(steps: Steps) -> Any:
            try:
                await steps.sleep(3600)
            except BaseException:
                await steps.step("fetch", fetch)

        await suspended(task, handler)
        assert fetch.calls == 0

    within(main())


def test_a_step_cannot_sleep_or_wait_itself_but_has_steps(task: Held) -> None:
    async def main() -> None:
        steps = task.run()
        inner = Counted(result=1)
        assert await steps.step("outer", partial(steps.step, "inner", inner)) == 1
        for wait in (partial(steps.sleep, 60), partial(steps.wait_for, "a")):
            with pytest.raises(InputError, match=r"step 'outer#.' of task .* cannot sleep or wait itself"):
                await steps.step("outer", wait)

    within(main())


# --- leases, pauses and bad input -------------------------------------------------------------------------------------


def test_a_worker_that_has_lost_the_task_starts_no_step_and_stores_no_result(task: Held) -> None:
    async def main() -> None:
        steps, fetch = task.run(), Counted()
        task.take()
        with pytest.raises(TaskStopped):
            await steps.step("fetch", fetch)
        assert (fetch.calls, steps.is_lost) == (0, True)
        late = task.run()

        async def slow() -> str:
            task.take()
            return "late"

        with pytest.raises(TaskStopped):
            await late.step("fetch", slow)
        assert late.is_lost
        assert task.story() == ["call fetch: started"]

    within(main())


def test_a_result_is_recorded_when_the_database_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, calls = SQLiteFile(tmp_path), []

    async def main() -> None:
        async with file.checkpointer(busy_timeout=0.05) as cp:
            task = Held(cp.store)
            with foreign_lock(file) as lock:

                async def fetch() -> str:
                    calls.append("fetch")
                    lock.take()
                    return "fetched"

                step = asyncio.create_task(task.run().step("fetch", fetch))
                await until(lambda: "step 'fetch' has ended, and could not be recorded yet: StoreBusy" in caplog.text)
                lock.release()
                assert await step == "fetched"
            assert task.story() == ["call fetch: done"]

    within(main())
    assert calls == ["fetch"]


def test_each_step_is_a_pause_point(task: Held) -> None:
    async def main() -> None:
        steps, fetch = task.run(), Counted()
        steps.must_stop = True
        for use in (
            lambda: steps.step("fetch", fetch),
            lambda: steps.sleep(0),
            lambda: steps.sleep(60),
            lambda: steps.wait_for("a"),
        ):
            with pytest.raises(TaskStopped):
                await use()
        assert (fetch.calls, task.steps()) == (0, [])

    within(main())


def test_a_plain_handler_has_steps_that_block(task: Held) -> None:
    fetch, home, seen = Counted(), threading.get_ident(), []

    def handler() -> Any:
        steps = task.run(Blocking(task.store), perform_here)
        to_the_end(steps.step("where", lambda: seen.append(threading.get_ident())))

        async def late() -> Any:
            return fetch()

        found = to_the_end(steps.step("fetch", late))
        try:
            to_the_end(steps.sleep(3600))
            return found, to_the_end(steps.wait_for("approval"))
        except Suspended:
            task.give_back(steps)
            raise

    for wake in (task.pass_time, lambda: task.send("approval", 1)):
        with pytest.raises(Suspended):
            handler()
        wake()
    assert handler() == ("result", 1)
    assert (fetch.calls, seen) == (1, [home])


def test_a_result_that_cannot_be_stored_fails_the_step(task: Held) -> None:
    async def main() -> None:
        for result, problem in (
            (object(), "the result of step 'fetch' cannot be stored as JSON"),
            (float("nan"), "holds NaN"),
            ("x" * 2000, "the result of step 'fetch' has 2,002 characters of JSON, and may have 1,000"),
        ):
            with pytest.raises(StepResultInvalid, match=problem):
                await task.run().step("fetch", Counted(result=result))
            assert task.story() == ["call fetch: failed"]

    within(main())


def test_what_a_task_group_raises_counts_as_what_is_in_it() -> None:
    assert outcome_of_error(BaseExceptionGroup("", [OSError(), TaskStopped()])) == STOPPED
    unknown = outcome_of_error(ExceptionGroup("", [ExceptionGroup("", [StepUnknown("t", "fetch")])]))
    assert isinstance(unknown, Failed)
    assert not unknown.may_retry
    passing = outcome_of_error(ExceptionGroup("", [OSError()]))
    assert isinstance(passing, Failed)
    assert passing.may_retry


def test_bad_calls_are_refused(task: Held) -> None:
    async def main() -> None:
        steps, fetch = task.run(), Counted()
        refused: list[tuple[Any, str]] = [
            (lambda: steps.step("", fetch), "the name of a step"),
            (lambda: steps.step("x" * 3000, fetch), "the name of a step"),
            (lambda: steps.step("fetch", fetch, "always"), "recovery must be one of never, retry, check, ask"),  # type: ignore[arg-type]
            (lambda: steps.step("fetch", fetch, "check"), "recovery='check' needs a function"),
            (lambda: steps.sleep(-1), "a sleep must be a number from 0 up"),
            (lambda: steps.sleep(float("nan")), "a sleep must be a number from 0 up"),
            (lambda: steps.wait_for("a#2"), "the name of an event"),
            (lambda: steps.wait_for("step:fetch"), "answer for steps, so no wait can be for 'step:fetch'"),
            (lambda: steps.wait_for("a", timeout=float("inf")), "timeout must be a number from 0 up"),
        ]
        for use, problem in refused:
            with pytest.raises(InputError, match=problem):
                await use()
        assert (fetch.calls, task.steps()) == (0, [])

    within(main())
