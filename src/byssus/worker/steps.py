"""Durable steps inside a handler: `ctx.step`, `ctx.sleep` and `ctx.wait_for`.

- A handler begins again from its start after a crash, a retry, a sleep or a wait. Its steps are found by their names,
  and those that have finished answer from the database. The second use of a name in one run is `name#2`, and so on.
- A step that was started and has no end may have run. Its recovery policy decides, as for a tool.
- A handler that has to wait is unwound by `Suspended`, and its task is given back without a retry counted. It waits
  for nothing while a step of it runs, so no step is cut off by a wait beside it.
- A step's function may call `ctx.step`, but it can neither sleep nor wait: it would be cut off itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, get_args

from byssus.errors import InputError, StepUnknown, StoreBusy, StoreFull, StoreUnreachable
from byssus.messages import checked_dumps
from byssus.queries.tasks import steps
from byssus.queries.tasks.steps import CALL, DONE, FAILED, SLEEP, STARTED, WAIT, WAITING, StepName, StepRow, nth
from byssus.store.database import Store, Tx
from byssus.tasks.steps import checked_event
from byssus.threads.encoding import encode_strictly
from byssus.tools import Done, NotDone, Unknown
from byssus.tools.execution import in_thread, is_async
from byssus.values.decisions import Recovery
from byssus.values.inputs import checked_new_id

P = ParamSpec("P")
T = TypeVar("T")

_RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)
_SHORT = 1.0  # seconds: a shorter sleep is just slept
_LONGEST = 1e9  # seconds
_LONGEST_TRACE = 20_000  # characters, of the end
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # between two tries to record what a step came to
_log = logging.getLogger("byssus.worker")
_current: ContextVar[str | None] = ContextVar("byssus_step", default=None)


class Suspended(BaseException):
    """Unwinds a handler whose task is given back until a wait is over. No `except Exception` catches it."""


class Steps:
    """The steps of one run of a handler. `pause_point` raises if the run has to stop here."""

    def __init__(
        self, store: Store, task_id: str, epoch: int, pause_point: Callable[[], object], *, max_result: int
    ) -> None:
        self._store = store
        self._task_id = task_id
        self._epoch = epoch
        self._pause_point = pause_point
        self._max_result = max_result
        self._used: set[StepName] = set()
        self._stored: dict[StepName, StepRow] | None = None  # as this run has found them
        self._loading = asyncio.Lock()
        self._waits: list[StepName] = []
        self._busy = 0  # steps that run, and waits that are being recorded
        self._idle = asyncio.Event()
        self.is_suspended = False
        self._give_back: Callable[[], Awaitable[object]] = lambda: self._write(steps.suspend, self._waits)

    def suspend(self, give_back: Callable[[], Awaitable[object]]) -> NoReturn:
        """Unwind the handler. `give_back` says for how long its task is given back."""
        self._give_back = give_back
        self.is_suspended = True
        raise Suspended

    async def give_back(self) -> None:
        """Give the task of a suspended handler back, once the handler has been unwound."""
        await self._give_back()

    def idempotency_key(self, name: str | None = None) -> str:
        """The key of a step, the same for each attempt: of the one that runs now, or of the one that is named."""
        step = _current.get() if name is None else name
        if step is None:
            raise InputError("no step is running here; name one: ctx.idempotency_key('fetch')")
        return f"task:{self._task_id}:{step}"

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
            current = asyncio.current_task()
            if current is None or current.cancelling():  # it may or may not have run
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
            if is_async(function):
                return await function()
            result = await in_thread(function)
            return await result if hasattr(type(result), "__await__") else result
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the worker
            raise RuntimeError(f"step {name!r} raised {type(error).__name__}: {error}") from error
        finally:
            _current.reset(token)

    def _encoded(self, name: str, value: Any) -> str:
        text = encode_strictly(f"the result of step {name!r}", value)
        if len(text) > self._max_result:
            raise InputError(
                f"the result of step {name!r} has {len(text):,} characters as JSON, and at most {self._max_result:,} "
                "are stored; keep it elsewhere, and return where it is"
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
                await self._store.sleep(pause)
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
        await asyncio.sleep(seconds)
        self._stop_here()

    async def wait_for(self, name: str, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - it outlives the process
        """Return the value of an event, or raise TimeoutError."""
        if timeout is not None:
            _checked_seconds("timeout", timeout)
        step = self._use(WAIT, checked_event(name))
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

    async def _suspend_for(self, step: StepName) -> None:
        """Unwind the handler, as soon as none of its steps runs."""
        self._waits.append(step)
        while self._busy:
            self._idle.clear()
            await self._idle.wait()
        self.is_suspended = True
        raise Suspended

    # --- both ---------------------------------------------------------------------------------------------------------

    def _use(self, kind: str, name: str) -> StepName:
        """The step that this use of a name stands for."""
        number = 1
        while (step := StepName(kind, nth(name, number))) in self._used:
            number += 1
        self._used.add(step)
        return step

    def _stop_here(self) -> None:
        if self.is_suspended:
            raise Suspended
        self._pause_point()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def _known(self, step: StepName) -> StepRow | None:
        """The step as this run has found it. All are read at the first one."""
        async with self._loading:
            if self._stored is None:
                rows = await self._store.read(steps.of_task, self._task_id)
                self._stored = {StepName(row.kind, row.name): row for row in rows}
        return self._stored.pop(step, None)  # it is asked for once, and may be large

    async def _write(self, query: Callable[Concatenate[Tx, str, int, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._store.write(query, self._task_id, self._epoch, *args, **kwargs)


def error_json(error: BaseException) -> str:
    """An error as it is stored: its type, its message, and where it was raised."""
    trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACE:]
    fields = {"type": type(error).__name__, "message": str(error), "trace": trace}
    return checked_dumps({name: text.encode("utf-8", "backslashreplace").decode() for name, text in fields.items()})


def _checked_policy(name: str, recovery: object, check: object) -> str:
    if recovery not in _RECOVERIES:
        raise InputError(f"step {name!r:.80}: recovery must be one of {', '.join(_RECOVERIES)}; got {recovery!r:.80}")
    if check is None and recovery == "check":
        raise InputError(f"step {name!r:.80}: recovery='check' needs a function: check=...")
    return "check" if check is not None and recovery == "never" else str(recovery)


def _checked_seconds(what: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _LONGEST:
        raise InputError(f"{what} must be a number of seconds from 0 up (and below a billion), got {seconds!r:.80}")
