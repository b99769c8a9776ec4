"""The durable steps of a task, and the events that it waits for: operations for both APIs (see store/operations.py).

The steps are written by the worker that runs the task (`worker/steps.py`).
"""

from __future__ import annotations

from typing import Any

from byssus.errors import InputError
from byssus.queries.tasks import steps
from byssus.queries.tasks.steps import ASK
from byssus.store.operations import Runner
from byssus.tasks.rows import TaskStepRow, step_row
from byssus.threads.encoding import encode_strictly
from byssus.values.inputs import checked_id, checked_new_id, readable_id


async def task_steps(store: Runner, task_id: str) -> list[TaskStepRow]:
    """Return the durable steps of a task, in the order in which they began. An unknown task has none."""
    name = readable_id(task_id, "a task id")
    rows = [] if name is None else await store.read(steps.of_task, name)
    return [step_row(row) for row in rows]


async def send_event(store: Runner, task_id: str, name: str, value: Any = None) -> bool:
    """Send an event to a task: `ctx.wait_for(name)` returns its value, and a task that waits goes on.

    Returns False if the task does not wait for it yet. The event is kept then, and the next wait for it returns at
    once. Several events of one name answer several waits, in order.

    The event `step:<name>` answers for a step that may have run: "retry" runs it again, and `{"result": value}` is its
    result.
    """
    task = checked_id(task_id, "a task id")
    event = checked_event(name)
    text = encode_strictly(f"the value of event {name!r}", value)
    if not event.startswith(ASK):
        return await store.write(steps.send, task, event, text)
    await store.write(steps.answer, task, event.removeprefix(ASK), _checked_answer(event, value))
    return True


def checked_event(name: object) -> str:
    """The name of an event. The second one of a name is stored as `name#2`, so no name may look like that."""
    if not isinstance(name, str) or ("#" in name and not name.startswith(ASK)):
        raise InputError(f"the name of an event must be a string without '#', got {name!r:.80}")
    return checked_new_id(name, "the name of an event")


def _checked_answer(event: str, value: object) -> str | None:
    """The result of a step, by the answer of a person; None to run it again."""
    if isinstance(value, dict) and value.keys() == {"result"}:
        return encode_strictly("result", value["result"])
    if value != "retry":
        raise InputError(
            f"the value of event {event!r} must be 'retry' (run the step again) or {{'result': ...}} (its result), got "
            f"{value!r:.80}"
        )
    return None
