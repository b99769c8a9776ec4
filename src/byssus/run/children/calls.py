"""One call of a tool that is an agent: its child thread is begun or resumed, and what comes of it is the call's result.

- The child's prompt has a request key, so that it happens once: a call that is run again, after a crash, a hand-over or
  an answer, joins the run that the first attempt began, resumes it, or reads its result.
- The child's run follows the parent's: it is aborted, or handed over, when the parent's is.
- A child that waits for a person, or is handed over, leaves the call open. The next run of the parent goes on with it.
- A failure of the child is a result that the parent's model reads. A failure of the database, a lost lease or a missing
  tool ends the parent's run instead, with the call still open: the child may well go on after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from byssus import tools
from byssus.errors import (
    LeaseLost,
    StoreError,
    ThreadBusy,
    ThreadInactive,
    ThreadMoved,
    ThreadQuarantined,
    ToolMissing,
)
from byssus.events import AgentEnd, Event
from byssus.messages import ToolCall
from byssus.run.children.tool import Above, AgentTool, Below, MadeAgent
from byssus.run.journal import ChildHome, Ledger
from byssus.run.settings import Setup
from byssus.signals import wait_all
from byssus.store.keeper import LOST
from byssus.tools import Outcome
from byssus.tools.details import error_text
from byssus.values.results import RunResult, ToolResult

KEY = "call"  # the request key of a child's prompt: a child is of one call

_LATE = 5.0  # seconds that an aborted child has, besides the time that it waits for its tools
_LEAVES_OPEN = (LeaseLost, StoreError, ThreadBusy, ThreadInactive, ThreadMoved, ThreadQuarantined, ToolMissing)
_TOO_DEEP = "This call was not started: it is {} threads deep already, and limits.depth is {}."
_TOO_MANY = "This call was not started: the run has begun {} child threads already, which is its limits.children."
_LEFT = "This call goes on in another process."
_ENDINGS = {
    "aborted": "was aborted before it had finished",
    "interrupted": "was left before it had finished",
    "turn_limit": "stopped at its limit of turns before it had finished",
    "token_limit": "stopped at its limit of tokens before it had finished",
    "cost_limit": "stopped at its limit of cost before it had finished",
    "time_limit": "stopped at its limit of time before it had finished",
    "quota_limit": "stopped, because the user's quota is exhausted",
}


class Open(NamedTuple):
    """The call has no result yet: its child waits for a person, or was left to another process."""

    text: str
    is_left: bool = False


class Caller(NamedTuple):
    """What a call has of the run that makes it."""

    setup: Setup
    ledger: Ledger
    above: Above
    update: Callable[[Any], None]  # publishes progress


async def run(tool: AgentTool, call: ToolCall, key: str, caller: Caller) -> Outcome | Open:
    """Run a call to its end, or until it waits."""
    limits, depth = caller.setup.limits, caller.setup.depth
    if (problem := tool.problem_with(call)) is not None:
        return Outcome(tools.failure(call, f"Invalid arguments: {problem}"))
    if limits.depth is not None and depth >= limits.depth:
        return Outcome(tools.failure(call, _TOO_DEEP.format(depth, limits.depth)))
    home = await caller.ledger.child_of(key, tool.name, limits.children)
    if home is None:
        return Outcome(tools.failure(call, _TOO_MANY.format(limits.children)))
    child: MadeAgent = home.child or _made(tool, home, caller)
    child.lead(caller.above)
    thread_id = None if home.thread is None else home.thread.id
    forget = child.agent.subscribe(_progress(thread_id, caller.update))
    try:
        done = await _done(tool, call, child, caller, is_stored=home.thread is not None)
    finally:
        forget()
    if isinstance(done, RunResult):
        done = _read(done, call, caller, thread_id)
    if home.thread is None:
        caller.ledger.keep_child(key, child if isinstance(done, Open) else None)
    return done


def _made(tool: AgentTool, home: ChildHome, caller: Caller) -> MadeAgent:
    setup = caller.setup
    place = (home.database, home.thread, setup.user_id, setup.depth + 1, setup.limits.depth, setup.patience.is_strict)
    return tool.make(Below(*place))


async def _done(
    tool: AgentTool, call: ToolCall, child: MadeAgent, caller: Caller, *, is_stored: bool
) -> RunResult[Any] | Outcome | Open:
    signal, loop = caller.above.signal, asyncio.get_running_loop()
    task = asyncio.create_task(_asked(tool, str(call.arguments.get("task", "")), child, is_stored=is_stored))

    def stop() -> None:
        """An aborted run ends by itself. What does not end, or only waits for a run of another process, is left."""
        grace = caller.setup.patience.grace + (_LATE if child.agent.state.is_streaming else 0)
        loop.call_later(grace, task.cancel)

    forget = signal.on_abort(lambda: loop.call_soon_threadsafe(stop))
    try:
        await wait_all({task}, signal)
    finally:
        forget()
    if task.cancelled():
        return _stopped(call, caller)
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception) or isinstance(error, _LEAVES_OPEN):
        raise error
    return Outcome(tools.failure(call, f"The agent failed: {error_text(error)}"))


async def _asked(tool: AgentTool, task: str, child: MadeAgent, *, is_stored: bool) -> RunResult[Any]:
    if is_stored:
        return await child.agent.prompt(task, output=tool.output, key=KEY)
    if child.journal.history.messages:
        return await child.agent.resume(output=tool.output)
    return await child.agent.prompt(task, output=tool.output)


def _stopped(call: ToolCall, caller: Caller, details: Any = None) -> Outcome | Open:
    """The parent's run was stopped, and the child's run with it."""
    if caller.above.handing.is_late or caller.above.signal.reason == LOST:
        return Open(_LEFT, is_left=True)
    result = ToolResult(tools.aborted(call).text, details, is_error=True)
    return tools.outcome(call, result)._replace(status="aborted")


def _read(result: RunResult[Any], call: ToolCall, caller: Caller, thread_id: str | None) -> Outcome | Open:
    """What the end of a child's run is to the call."""
    ending = result.stop_reason
    details = {"thread_id": thread_id, "run_id": result.run_id, "stop_reason": ending}
    if ending == "handed_over":
        return Open(_LEFT, is_left=True)
    if ending == "waiting":
        return Open("This call waits for a person" + (f" on thread {thread_id!r}." if thread_id else "."))
    if caller.above.signal.aborted and ending != "stop":
        return _stopped(call, caller, details)
    answer = f" It said: {result.text}" if result.text else ""
    if result.error is not None:
        text = f"The agent failed: {type(result.error).__name__}: {result.error}{answer}"
        return tools.outcome(call, ToolResult(text, details, is_error=True))
    if ending in _ENDINGS:
        return tools.outcome(call, ToolResult(f"The agent {_ENDINGS[ending]}.{answer}", details, is_error=True))
    value = result.text if result.output is None else result.output
    return tools.outcome(call, ToolResult(value, details))


def _progress(thread_id: str | None, update: Callable[[Any], None]) -> Callable[[Event], None]:
    """Publishes the child's events as progress of the call. The last one comes without the messages again."""

    def publish(event: Event) -> None:
        if isinstance(event, AgentEnd):
            event = msgspec.structs.replace(event, messages=[])
        update({"thread_id": thread_id, "event": event.to_value()})

    return publish
