"""Durable steps inside a handler: `ctx.step`, `ctx.sleep` and `ctx.wait_for`.

- A handler begins again from its start after a crash, a retry, a sleep or a wait. Its steps are found by their names,
  and those that have finished answer from the database. The second use of a name in one run is `name#2`, and so on.
- A step that was started and has no end may have run. Its recovery policy decides, as for a tool.
- A handler that has to wait is unwound by `Suspended`. Then its task is given back, and no retry is counted. It waits
  for nothing while a step of it runs, so no step is cut off by a wait beside it.
- A step's function may call `ctx.step`, but it can neither sleep nor wait: it would be cut off itself.

This is an operation of both kinds of handlers (see store/operations.py): it awaits its runner and its step alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, get_args

from byssus.errors import ByssusError, InputError, StoreBusy, StoreFull, StoreUnreachable
from byssus.queries.tasks import steps
from byssus.queries.tasks.steps import (
    ASK,
    CALL,
    DONE,
    FAILED,
    SLEEP,
    STARTED,
    WAIT,
    WAITING,
    StepName,
    StepRow,
    TaskLost,
    nth,
)
from byssus.store.bell import Bell
from byssus.store.database import Tx
from byssus.store.operations import Runner
from byssus.tasks.steps import checked_event
from byssus.threads.encoding import encode_strictly
from byssus.tools import Done, NotDone, Unknown
from byssus.tools.execution import in_thread, is_async
from byssus.values.decisions import Recovery
from byssus.values.inputs import checked_new_id
from byssus.worker.outcomes import NoRetry, Suspended, TaskStopped, error_json

P = ParamSpec("P")
T = TypeVar("T")
Perform: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]

_RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)
_SHORT = 1.0  # seconds: a shorter sleep is just slept
_LONGEST = 1e9  # seconds
_UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # between two tries to record what a step came to
_log = logging.getLogger("byssus.worker")
_current: ContextVar[str | None] = ContextVar("byssus_step", default=None)


class StepUnknown(ByssusError, NoRetry):
    """A step was started and has no end, so it may have run, and its recovery policy forbids to run it again.

    The task fails with it at once. Once a person has answered for the step, `retry_task` goes on from there.
    """

    def __init__(self, task_id: str, step: str) -> None:
        super().__init__(
            f"step {step!r} of task {task_id!r} was interrupted: it may or may not have taken effect. To run it again: "
            f"send_event({task_id!r}, 'step:{step}', 'retry'), or {{'result': ...}} if you know its result, and then "
            f"retry_task({task_id!r}); recovery='retry', 'check' or 'ask' of the step decides that without an error"
        )
        self.task_id = task_id
        self.step = step


class StepResultInvalid(ByssusError, NoRetry):
    """What a step has returned cannot be stored: it is no JSON, or too large. The task fails at once."""


class Suspension(NamedTuple):
    """How the task of a handler that was unwound is given back: a query, and its arguments."""

    query: Callable[..., object]
    args: tuple[Any, ...]


class SteppedAttempt(Protocol):
    """The attempt at a task whose steps these are."""

    suspension: Suspension | None

    @property
    def epoch(self) -> int: ...
    @property
    def must_stop(self) -> bool:
        """Whether the handler is to stop at its next pause point."""

    def lose(self) -> None:
        """The task has another worker now."""


class Steps:
    """The steps of one attempt. `perform` calls the function of a step, where it belongs."""

    def __init__(
        self, task_id: str, attempt: SteppedAttempt, runner: Runner, perform: Perform, *, max_result: int
    ) -> None:
        self._task_id = task_id
        self._attempt = attempt
        self._runner = runner
        self._perform = perform
        self._max_result = max_result
        self._used: set[StepName] = set()
        self._uses: dict[tuple[str, str], int] = {}  # the last number of each name
        self._stored: dict[StepName, StepRow] | None = None  # as this attempt has found them
        self._waits: list[StepName] = []
        self._busy = 0  # steps that run, and waits that are being recorded
        self._bells: list[Bell] = []  # of waits that have to let these end
        self._changing = threading.Lock()  # a plain handler may use several OS threads

    def suspend(self, query: Callable[..., object], *args: Any) -> NoReturn:
        """Unwind the handler. The query gives the task back, once that has been done."""
        self._attempt.suspension = Suspension(query, args)
        raise Suspended

    # --- calls --------------------------------------------------------------------------------------------------------

    async def step(
        self,
        name: str,
        call: Callable[[], Any],
        recovery: Recovery = "never",
        check: Callable[[], Any] | None = None,
    ) -> Any:
        """Call the function, or return what it returned before."""
        policy = _checked_policy(name, recovery, check)
        step = self._use(CALL, checked_new_id(name, "the name of a step"))
        self._stop_here()
        with self._working():
            row = await self._begun(step, policy, check)
            if row is None:
                return await self._called(step.name, call)
        if row.status == WAITING:
            await self._suspend_for(step)
        return json.loads(row.result or "null")

    async def _begun(self, step: StepName, policy: str, check: Callable[[], Any] | None) -> StepRow | None:
        """Record that a step starts. If it is not to be called: the step, which is done or waits for a person."""
        known = await self._known(step)
        if known is not None and known.status == DONE:
            return known
        found = await self._write(steps.start, step.name, policy, again=policy == "retry")
        if found is None or found.status != STARTED:
            return found
        answer = Unknown() if check is None else await self._checked(step.name, check)
        if isinstance(answer, Unknown):
            raise StepUnknown(self._task_id, step.name)
        if isinstance(answer, NotDone):
            return await self._write(steps.start, step.name, policy, again=True)
        result = self._encoded(step.name, answer.result)
        await self._recorded(step.name, result=result)
        return found._replace(status=DONE, result=result)

    async def _checked(self, name: str, check: Callable[[], Any]) -> Done | NotDone | Unknown:
        answer = await self._run(name, check)
        if not isinstance(answer, Done | NotDone | Unknown):
            raise InputError(
                f"the check of step {name!r} must return Done(result), NotDone() or Unknown(), got {answer!r:.80}"
            )
        return answer

    async def _called(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            result = self._encoded(name, await self._run(name, call))
        except asyncio.CancelledError as error:
            if _is_cancelled():  # it may or may not have run
                raise
            await self._recorded(name, error=error_json(error))  # raised by the function: it was not cancelled
            raise
        except Exception as error:
            await self._recorded(name, error=error_json(error))
            raise
        await self._recorded(name, result=result)
        return json.loads(result)

    async def _run(self, name: str, function: Callable[[], Any]) -> Any:
        token = _current.set(name)
        try:
            return await self._perform(function)
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the worker
            raise RuntimeError(f"step {name!r} raised {type(error).__name__}: {error}") from error
        finally:
            _current.reset(token)

    def _encoded(self, name: str, value: Any) -> str:
        """The result of a step as it is stored. The step has run: if that cannot be stored, it is not called again."""
        try:
            text = encode_strictly(f"the result of step {name!r}", value)
        except InputError as error:
            raise StepResultInvalid(str(error)) from error
        if len(text) > self._max_result:
            raise StepResultInvalid(
                f"the result of step {name!r} has {len(text):,} characters of JSON, and may have "
                f"{self._max_result:,}; store it elsewhere and return where it is, or pass max_result= to the worker"
            )
        return text

    async def _recorded(self, name: str, *, result: str | None = None, error: str | None = None) -> None:
        """Record how a step ended, also if the database is away for a while: it must not run again."""
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._write(steps.finish, name, result=result, error=error)
            except (StoreBusy, StoreFull, StoreUnreachable) as failure:
                _log.warning(
                    "task %r: step %r has ended, and could not be recorded yet: %s",
                    *(self._task_id, name, type(failure).__name__),
                )
                await self._runner.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                return

    # --- waits --------------------------------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        """Return when the time is over."""
        _checked_seconds("a sleep", seconds)
        if seconds >= _SHORT:
            await self._waited(self._use(SLEEP, "sleep"), seconds)
            return
        self._stop_here()
        await self._runner.sleep(seconds)
        self._stop_here()

    async def wait_for(self, name: str, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - it outlives the process
        """Return the value of an event, or raise TimeoutError."""
        if timeout is not None:
            _checked_seconds("timeout", timeout)
        step = self._use(WAIT, checked_event(name))
        if name.startswith(ASK):
            raise InputError(f"events named {ASK}... answer for steps, so no wait can be for {name!r:.80}")
        row = await self._waited(step, timeout)
        if row.status == FAILED:
            raise TimeoutError(f"event {step.name!r} of task {self._task_id!r} did not come in time")
        return json.loads(row.result or "null")

    async def _waited(self, step: StepName, seconds: float | None) -> StepRow:
        """The row of a wait that is over. One that is not suspends the handler."""
        if (inside := _current.get()) is not None:
            raise InputError(
                f"step {inside!r} of task {self._task_id!r} cannot sleep or wait itself; call ctx.sleep() and "
                "ctx.wait_for() between two steps"
            )
        self._stop_here()
        with self._working():
            row = await self._known(step)
            if row is None or row.status == WAITING:
                row = await self._write(steps.wait, step, seconds)
        if row.status == WAITING:
            await self._suspend_for(step)
        return row

    async def _suspend_for(self, step: StepName) -> NoReturn:
        """Unwind the handler, as soon as none of its steps runs."""
        bell = Bell()
        self._bells.append(bell)
        self._waits.append(step)
        while self._busy:
            await self._runner.until(bell)
        self.suspend(steps.suspend, self._task_id, self._attempt.epoch, tuple(self._waits))

    # --- both ---------------------------------------------------------------------------------------------------------

    def _use(self, kind: str, name: str) -> StepName:
        """The step that this use of a name stands for."""
        with self._changing:
            number = self._uses.get((kind, name), 0) + 1
            while (step := StepName(kind, nth(name, number))) in self._used:
                number += 1
            self._uses[kind, name] = number
            self._used.add(step)
        return step

    def _stop_here(self) -> None:
        """Every step and wait is a pause point."""
        if self._attempt.suspension is not None:
            raise Suspended
        if self._attempt.must_stop:
            raise TaskStopped

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._changing:
            self._busy += 1
        try:
            yield
        finally:
            with self._changing:
                self._busy -= 1
            for bell in self._bells:
                bell.ring()

    async def _known(self, step: StepName) -> StepRow | None:
        """The step as this attempt has found it. All are read at the first one."""
        if self._stored is None:
            rows = await self._runner.read(steps.of_task, self._task_id)
            if self._stored is None:
                self._stored = {StepName(row.kind, row.name): row for row in rows}
        return self._stored.pop(step, None)  # it is asked for once, and may be large

    async def _write(self, query: Callable[Concatenate[Tx, str, int, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._runner.write(query, self._task_id, self._attempt.epoch, *args, **kwargs)
        except TaskLost as error:
            self._attempt.lose()
            raise TaskStopped from error


def current() -> str | None:
    """The name of the step that runs here."""
    return _current.get()


async def perform_beside(function: Callable[[], Any]) -> Any:
    """Call the function of a step of an async handler: on the event loop, or if it is plain on an OS thread."""
    if is_async(function):
        return await function()
    result = await in_thread(function)
    return await result if hasattr(type(result), "__await__") else result


async def perform_here(function: Callable[[], Any]) -> Any:
    """Call the function of a step of a plain handler: here; an async one on an event loop of its own."""
    result = function()
    return asyncio.run(_awaited(result)) if hasattr(type(result), "__await__") else result


async def _awaited(result: Awaitable[T]) -> T:
    return await result


def bound(function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function with its arguments."""
    return None if function is None else partial(function, *args, **kwargs)


def seconds_of(**parts: object) -> float:
    """A time in days, hours, minutes and seconds, in seconds."""
    total = 0.0
    for name, value in parts.items():
        _checked_seconds(f"{name}=", value)
        total += _UNITS[name] * float(value)  # type: ignore[arg-type]
    return total


def _is_cancelled() -> bool:
    """Whether the task that is running here was cancelled, and not something within it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is None or task.cancelling() > 0


def _checked_policy(name: str, recovery: object, check: object) -> str:
    if recovery not in _RECOVERIES:
        raise InputError(f"step {name!r:.80}: recovery must be one of {', '.join(_RECOVERIES)}; got {recovery!r:.80}")
    if check is None and recovery == "check":
        raise InputError(f"step {name!r:.80}: recovery='check' needs a function: check=...")
    return "check" if check is not None and recovery == "never" else str(recovery)


def _checked_seconds(what: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _LONGEST:
        raise InputError(f"{what} must be a number from 0 up (and below a billion), got {seconds!r:.80}")
