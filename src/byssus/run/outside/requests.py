"""A prompt that is sent twice happens once.

A request key is recorded in the commit that stores its prompt, so no key is without its prompt, and the prompt of a key
is not stored twice. Sending the key again joins that run:

    it goes on in this agent     wait for it
    it goes on elsewhere         wait until its end is on disk; if its process dies meanwhile, resume it
    it was interrupted           resume it
    it waits for a person        return what it came to so far
    it has ended                 return its result, read from the log

A message that its caller gave an id of its own is found by that id in the same way, as long as it is in the thread. It
may have come there another way: queued for a run, or appended. Then it counts while it is among the last messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from byssus import errors
from byssus.errors import (
    AgentBusy,
    ByssusError,
    InputError,
    KeyReused,
    NothingToResume,
    OutputInvalid,
    ThreadBusy,
    ThreadMoved,
)
from byssus.events import AgentEnd, AgentStart, MessageEnd, MessageStart
from byssus.messages import AssistantMessage, Failure, UserMessage, decode, encode
from byssus.queries.log import runs
from byssus.queries.log.runs import Requested, RequestKey, RequestTaken, RunRow
from byssus.signals import Signal
from byssus.store.database import Store
from byssus.stream import Backlog
from byssus.threads import approvals
from byssus.threads.runs import records
from byssus.threads.waiting import lease_is_dead
from byssus.values.inputs import checked_new_id
from byssus.values.output import Output
from byssus.values.results import RunResult, usage_of
from byssus.values.thread_key import ThreadKey

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25


class StartsRun(Protocol):
    """Starts a run of the agent: with a prompt, or without one to resume."""

    def __call__(self, *, resumes: bool) -> Awaitable[RunResult[Any]]: ...


def request_of(prompts: Sequence[UserMessage], key: str | None, *, is_stored: bool) -> RequestKey | None:
    """What identifies a prompt: the key, or the id that its caller gave to the message. None: nothing does."""
    if key is None:
        named = [prompt.id for prompt in prompts if prompt.id is not None]
        if not named or not is_stored:
            return None
        return RequestKey(named[0], _digest(prompts), is_message=True)
    name = checked_new_id(key, "key")
    if not is_stored:
        raise InputError(f"key={name!r:.80} needs a checkpointer; pass checkpointer=... and thread_id=... to the Agent")
    return RequestKey(name, _digest(prompts))


def refuse_key(key: str | None) -> None:
    """A key belongs to a prompt."""
    if key is not None:
        raise InputError(f"key={key!r:.80} needs a message; without one, resume() continues whatever run there is")


def _digest(prompts: Sequence[UserMessage]) -> str:
    contents = [encode(msgspec.structs.replace(prompt, id=None, created_at=None)) for prompt in prompts]
    return hashlib.sha256("\n".join(contents).encode("utf-8", "surrogatepass")).hexdigest()


def _digest_of(found: Requested) -> str | None:
    if found.body is None:
        return found.run.request_digest if found.run is not None else None
    message = decode(found.body)
    return _digest([message]) if isinstance(message, UserMessage) else None


class Once:
    """A request of an agent on its thread. `going` is the task of the agent's own run that has this key, if any."""

    def __init__(
        self,
        store: Store,
        thread_key: ThreadKey,
        request: RequestKey,
        start: StartsRun,
        going: Callable[[RequestKey], asyncio.Task[RunResult[Any]] | None],
    ) -> None:
        self._store = store
        self._thread_key = thread_key
        self._request = request
        self._start = start
        self._going = going

    async def result(self, output: Output[Any] | None, backlog: Backlog[Any] | None) -> RunResult[Any]:
        """Begin the run, or join the one that the key began."""
        joined = await self._begun()
        if joined is None:
            joined = await self._joined()
            if joined is None:  # it was begun or resumed here after all, and its listeners got its events
                return await self.result(output, backlog)
            replayed = _with_output(joined, output)
            _replay(replayed, self._thread_key.id, backlog)
            return replayed
        return joined

    async def _begun(self) -> RunResult[Any] | None:
        """Run the prompt, or what is left of its run; None if that run goes on elsewhere, or needs nothing."""
        found = await self._found()
        if found is not None and found.run is not None and not await self._is_left(found.run):
            return None
        if self._going(self._request) is not None:
            return None
        try:
            return await self._start(resumes=found is not None)
        except (RequestTaken, ThreadBusy, ThreadMoved, AgentBusy, NothingToResume):
            # Another caller was faster, with this key or with another prompt: its run decides.
            again = await self._found()
            if self._going(self._request) is None and (again is None or again == found):
                raise
            return None

    async def _joined(self) -> RunResult[Any] | None:
        """Wait for the run that has the key, and read its result; None if this agent has to run it."""
        pause = _FIRST_PAUSE
        while True:
            if (task := self._going(self._request)) is not None:
                with contextlib.suppress(RequestTaken, ThreadBusy):
                    return await asyncio.shield(task)
                return None
            found = await self._found()
            row = None if found is None else found.run
            if row is None or await self._is_left(row):
                return None
            if row.ended_at is not None or not self._is_driven(row):
                return await result_of(self._store, row)
            await self._store.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _found(self) -> Requested | None:
        found = await self._store.read(runs.of_request, self._thread_key, self._request)
        if found is not None and _digest_of(found) != self._request.digest:
            raise KeyReused(self._thread_key.id, self._request.key, None if found.run is None else found.run.id)
        return found

    def _is_driven(self, row: RunRow) -> bool:
        return row.owner is not None and not lease_is_dead(self._store, row.owner, row.until)

    async def _is_left(self, row: RunRow) -> bool:
        """Whether no process drives the run, and it can go on: it was interrupted, or a person has answered."""
        if row.ended_at is not None or self._is_driven(row):
            return False
        return row.stop_reason != "waiting" or not await approvals.pending(self._store, self._thread_key)


async def result_of(store: Store, row: RunRow) -> RunResult[Any]:
    """The result of a run, from the log."""
    messages = await records.messages(store, row)
    replies = [message for message in messages if isinstance(message, AssistantMessage)]
    reason: Any = row.stop_reason or "interrupted"
    text = replies[-1].text if replies else ""
    return RunResult(row.id, text, messages, reason, usage_of(messages), _error_of(row.error))


def _error_of(stored: str | None) -> ByssusError | None:
    """An error as its run recorded it: a model's failure of its own class, and any other one by its words."""
    if stored is None:
        return None
    kind, _, message = stored.partition(": ")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.ProviderError):
        return known(message)
    return ByssusError(stored)


def _with_output(result: RunResult[Any], output: Output[Any] | None) -> RunResult[Any]:
    if output is None or result.error is not None or result.stop_reason == "waiting":
        return result
    try:
        return msgspec.structs.replace(result, output=output.read(result.text))
    except OutputInvalid as error:
        return msgspec.structs.replace(result, error=error)


def _replay(result: RunResult[Any], thread_id: str, backlog: Backlog[Any] | None) -> None:
    """Tell a stream what a run said that it did not see: whole messages, as they are on disk."""
    if backlog is None:
        return
    signal, error = Signal(), result.error
    backlog.put(AgentStart(result.run_id, thread_id), signal)
    for message in result.messages:
        backlog.put(MessageStart(message), signal)
        backlog.put(MessageEnd(message), signal)
    failure = None if error is None else Failure(type(error).__name__, str(error))
    backlog.put(AgentEnd(result.run_id, result.messages, result.stop_reason, result.usage, failure), signal)
