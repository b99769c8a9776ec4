"""The rows of durable steps: who may write them, what a wait does to its task, and which event answers which wait."""

from __future__ import annotations

from typing import Any

import pytest

from byssus.errors import InputError, NotFound
from byssus.queries.tasks import steps
from byssus.queries.tasks.steps import CALL, SLEEP, WAIT, StepName, TaskLost
from byssus.store.database import Store
from byssus.store.operations import Blocking, to_the_end
from byssus.tasks.steps import send_event, task_steps
from tests.support.steps import PAST, Held

APPROVAL = StepName(WAIT, "approval")


@pytest.fixture
def task(store: Store) -> Held:
    return Held(store)


def start(task: Held, name: str = "fetch", recovery: str = "never", **options: Any) -> str | None:
    """The status of a step that was not started; None if it was."""
    found = task.store.write_now(steps.start, task.id, task.epoch, name, recovery, **options)
    return None if found is None else found.status


def finish(task: Held, name: str = "fetch", **how: Any) -> None:
    task.store.write_now(steps.finish, task.id, task.epoch, name, **how)


def wait(task: Held, step: StepName = APPROVAL, seconds: float | None = None) -> tuple[str, str | None]:
    row = task.store.write_now(steps.wait, task.id, task.epoch, step, seconds)
    return row.status, row.result


def test_a_step_that_is_done_is_not_started_again(task: Held) -> None:
    assert start(task) is None
    finish(task, result='{"pages":[1]}')
    task.take()
    assert start(task) == "done"
    (step,) = task.steps()
    assert (step["kind"], step["name"], step["status"], step["attempts"]) == ("call", "fetch", "done", 1)
    assert (step["result"], step["error"], step["recovery"]) == ({"pages": [1]}, None, "never")
    assert step["ended_at"] is not None
    assert step["ended_at"] >= step["started_at"]


def test_a_step_without_an_end_is_started_again_only_on_request(task: Held) -> None:
    assert start(task) is None
    task.take()
    assert start(task) == "started"
    assert start(task, again=True) is None
    assert [step["attempts"] for step in task.steps()] == [2]


def test_a_step_that_failed_is_started_again(task: Held) -> None:
    start(task)
    finish(task, error='{"type":"OSError","message":"no","trace":""}')
    assert task.steps()[0]["error"] == {"type": "OSError", "message": "no", "trace": ""}
    assert start(task) is None
    (step,) = task.steps()
    assert (step["status"], step["attempts"], step["error"]) == ("started", 2, None)


def test_only_the_worker_that_holds_the_task_writes_steps(task: Held) -> None:
    start(task)
    task.epoch -= 1
    for write in (lambda: start(task, "b"), lambda: finish(task, result="1"), lambda: wait(task)):
        with pytest.raises(TaskLost, match=f"lost task '{task.id}'"):
            write()
    with pytest.raises(TaskLost):
        task.suspend()
    assert task.story() == ["call fetch: started"]


def test_a_lease_that_has_run_out_counts_until_the_task_is_taken_from_the_worker(task: Held) -> None:
    start(task)
    task.set(lease_until=PAST)
    finish(task, result="1")
    for change in ({"status": "pending"}, {"status": "running", "lease_until": None}):
        task.set(**change)
        with pytest.raises(TaskLost):
            finish(task, result="2")
    assert [step["result"] for step in task.steps()] == [1]


def test_a_task_that_sleeps_is_given_back_until_then_without_a_retry(task: Held) -> None:
    sleep = StepName(SLEEP, "sleep")
    assert wait(task, sleep, 3600) == ("waiting", None)
    facts = task.suspend(sleep)
    assert (facts.status, facts.waits_for, facts.lease_until, facts.retry_count) == ("pending", None, None, 0)
    assert facts.run_at == task.steps()[0]["until"]
    task.take()
    task.pass_time()
    assert wait(task, sleep, 3600) == ("done", None)


def test_an_event_lets_a_task_go_on_that_waits(task: Held) -> None:
    assert wait(task) == ("waiting", None)
    facts = task.suspend(APPROVAL)
    assert (facts.status, facts.waits_for, facts.run_at) == ("pending", "approval", None)
    assert task.send("other") is False
    assert task.facts().waits_for == "approval"
    assert task.send("approval", {"by": "ada"}) is True
    assert task.facts().waits_for is None
    task.take()
    assert wait(task) == ("done", '{"by":"ada"}')


def test_an_event_that_comes_before_its_wait_is_kept(task: Held) -> None:
    assert task.send("approval", 1) is False
    assert wait(task) == ("done", "1")


def test_an_event_that_comes_before_the_task_is_given_back_lets_it_go_on_at_once(task: Held) -> None:
    wait(task)
    assert task.send("approval") is True
    facts = task.suspend(APPROVAL)
    assert (facts.status, facts.waits_for, facts.run_at) == ("pending", None, None)


def test_events_of_one_name_answer_the_waits_in_order(task: Held) -> None:
    assert [task.send("approval", number) for number in (1, 2)] == [False, False]
    second, third = StepName(WAIT, "approval#2"), StepName(WAIT, "approval#3")
    assert [wait(task, step) for step in (APPROVAL, second)] == [("done", "1"), ("done", "2")]
    assert wait(task, third) == ("waiting", None)
    assert task.send("approval", 3) is True
    assert wait(task, third) == ("done", "3")


def test_a_wait_that_took_too_long_has_failed_for_good(task: Held) -> None:
    wait(task, seconds=3600)
    facts = task.suspend(APPROVAL)
    assert facts.waits_for == "approval"
    assert facts.run_at is not None
    task.take()
    task.pass_time()
    assert task.send("approval", "late") is False  # kept for the next wait
    assert wait(task, seconds=3600) == ("failed", None)
    assert wait(task, StepName(WAIT, "approval#2")) == ("done", '"late"')


def test_of_several_waits_the_first_that_is_over_lets_the_task_go_on(task: Held) -> None:
    sleep, other = StepName(SLEEP, "sleep"), StepName(WAIT, "other")
    wait(task, sleep, 3600)
    wait(task)
    wait(task, other, 60)
    facts = task.suspend(sleep, APPROVAL, other)
    assert (facts.waits_for, facts.run_at) == ("approval", task.steps()[2]["until"])
    task.send("other")
    assert (task.facts().waits_for, task.facts().run_at) == (None, None)


@pytest.mark.parametrize(("asked", "status"), [("pause", "paused"), ("cancel", "cancelled")])
def test_a_pause_or_cancellation_that_was_asked_for_takes_effect_at_the_wait(
    task: Held, asked: str, status: str
) -> None:
    task.set(asked=asked)
    wait(task)
    assert task.suspend(APPROVAL).status == status


def test_an_event_reaches_a_paused_task(task: Held) -> None:
    task.set(asked="pause")
    wait(task)
    assert task.suspend(APPROVAL).waits_for == "approval"
    task.send("approval")
    assert task.facts()[:2] == ("paused", None)


@pytest.mark.parametrize(("value", "then"), [("retry", "failed"), ({"result": [1]}, "done")])
def test_a_person_answers_for_a_step_that_may_have_run(task: Held, value: Any, then: str) -> None:
    start(task, recovery="ask")
    task.take()
    assert start(task, recovery="ask") == "waiting"
    assert start(task, recovery="ask") == "waiting"
    assert task.suspend(StepName(CALL, "fetch")).waits_for == "step:fetch"
    assert task.send("step:fetch", value) is True
    assert task.facts().waits_for is None
    assert task.story() == [f"call fetch: {then}"]
    task.take()
    assert start(task, recovery="ask") == (None if then == "failed" else "done")


def test_a_step_is_answered_for_after_its_task_has_failed_and_not_while_it_runs(task: Held) -> None:
    start(task)
    with pytest.raises(InputError, match=r"step 'fetch' of task .* needs no answer: it is running now"):
        task.send("step:fetch", "retry")
    task.set(status="failed")
    assert task.send("step:fetch", {"result": 1}) is True
    for name, why in (("fetch", "it is done"), ("other", "it is unknown")):
        with pytest.raises(InputError, match=why):
            task.send(f"step:{name}", "retry")


def test_bad_events_are_refused(task: Held) -> None:
    for name in ("", "a#2", "a\0", 1, "x" * 3000):
        with pytest.raises(InputError, match="the name of an event"):
            task.send(name)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the value of event 'approval'\['when'\] cannot be stored as JSON"):
        task.send("approval", {"when": object()})
    with pytest.raises(InputError, match=r"must be 'retry' .* got 'perhaps'"):
        task.send("step:fetch", "perhaps")
    with pytest.raises(NotFound, match="there is no task 'unknown'"):
        to_the_end(send_event(Blocking(task.store), "unknown", "approval"))
    task.set(status="completed")
    with pytest.raises(InputError, match="is completed, and waits for no event"):
        task.send("approval")
    assert task.steps() == to_the_end(task_steps(Blocking(task.store), "unknown")) == []


def test_a_step_an_event_and_a_sleep_may_have_one_name(task: Held) -> None:
    sleep = StepName(SLEEP, "sleep")
    start(task, "sleep")
    task.send("sleep", 1)
    wait(task, sleep, 3600)
    assert task.story() == ["call sleep: started", "wait sleep: done", "sleep sleep: waiting"]
