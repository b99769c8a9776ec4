"""The journal: what a run records, and what earlier runs have recorded.

A journal has three parts, and a caller takes the one that it needs:

    history   the messages, the extra and the lease of the run
    ledger    the tool calls of the last reply: which were started, which wait for an answer, which have a result
    inbox     messages that were queued for a run while it goes on

Each write is durable when it returns. `thread_journal.py` keeps the journal in a thread of a store, and
`memory_journal.py` in memory. Arguments are positional, so that an implementation may ignore one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from byssus.errors import AnswerNeeded, NothingToResume
from byssus.messages import AssistantMessage, Message, ToolCall, ToolResultMessage, UserMessage, checked_dumps
from byssus.providers.model_call import PartialSaver
from byssus.queries.log.answers import NewAnswer, Question
from byssus.queries.log.runs import RequestKey
from byssus.queries.log.tool_calls import WAITING, LedgerEntry
from byssus.signals import Signal
from byssus.stream import Publish
from byssus.threads.inbox import Receipt, Waiting
from byssus.threads.thread import Thread
from byssus.tools import Outcome, readable
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.decisions import Approval, Pending, Why, kind_of
from byssus.values.marks import MarkedMessages
from byssus.values.release import Release
from byssus.values.results import StopReason
from byssus.values.thread_key import ThreadKey


class Driver(NamedTuple):
    """The run that takes the lease. Its signal is set when the lease is lost or another process aborts the run."""

    run_id: str
    signal: Signal
    cause: str = "prompt"  # or "resume"
    request: RequestKey | None = None  # what makes the prompt happen once


class Stop(NamedTuple):
    """How a run stopped, for its row."""

    reason: StopReason | None = None  # None: it was interrupted
    error: str | None = None
    retries: int = 0  # model calls that were repeated since the lease was taken


INTERRUPTED = Stop()


class Ending(NamedTuple):
    """What is committed together with a reply."""

    release: Release | None = None  # release the lease
    checkpoint: NewCheckpoint | None = None  # make a checkpoint of the thread; only behind a reply without tool calls
    spent: int | None = None  # the tokens that the model call used, if a quota set some aside for it
    stop: Stop = INTERRUPTED  # how the run stops, if the lease is given back


class History(Protocol):
    """The messages of a thread, its extra, and the lease under which a run writes them."""

    @property
    def messages(self) -> list[Message]:
        """The thread's messages, or its last ones."""

    @property
    def first_seq(self) -> int:
        """The seq at which `messages` begins."""

    @property
    def earlier_count(self) -> int:
        """How many messages the thread has before `messages`."""

    @property
    def extra(self) -> dict[str, Any]: ...
    @property
    def partial(self) -> AssistantMessage | None:
        """The saved part of a reply whose run was interrupted."""

    @property
    def key(self) -> ThreadKey | None:
        """The thread in its store; None for one in memory."""

    @property
    def is_loaded(self) -> bool:
        """Whether the thread was loaded at least once."""

    @property
    def unfinished(self) -> str | None:
        """The id of an earlier run that has not ended, and that a resume continues."""

    @property
    def waiting_since(self) -> float | None:
        """When the oldest pending write was submitted, by the monotonic clock; None if there is none."""

    @property
    def payer(self) -> str | None:
        """The user whose quota the run spends."""

    async def load(self, *, again: bool = False) -> None:
        """Load the thread if it is unknown or stale; with `again`, in any case."""

    async def earlier(self, limit: int, /) -> list[Message]:
        """Load up to so many messages before `messages`, which begins with them from then on."""

    async def page(self, limit: int, before: int | None, /) -> Thread:
        """Up to so many messages before `messages`, or before a seq. Nothing changes in what is known."""

    async def messages_of(self, run_id: str, /) -> list[Message]:
        """The messages of a run, from the log."""

    def sent(self, count: int, /) -> None:
        """Note that so many messages were chosen for a model."""

    async def is_current(self) -> bool:
        """Whether the thread is still as it was loaded, and no run drives it."""

    async def begin(self, driver: Driver, messages: Sequence[Message] = (), /) -> None:
        """Take the lease and, in the same commit, append the messages. Without messages, load what changed."""

    async def append(self, messages: Sequence[Message], /) -> None:
        """Append messages at the end."""

    async def append_prompt(self, messages: Sequence[Message], /) -> None:
        """Append the prompt of a run that has the lease already. Its request is recorded in the same commit."""

    async def append_reply(self, reply: AssistantMessage, ending: Ending, /) -> None:
        """Append a reply, and reserve a slot behind it for the result of each of its tool calls."""

    async def set_aside(self, wanted: int, least: int, /) -> int | None:
        """Reserve tokens of the payer's quota for a model call: `wanted`, or what is left if that is at least `least`.

        Returns the number of tokens, or None without a limit. Raises `QuotaExceeded` if less than `least` is left.
        """

    async def checkpoint(self, checkpoint: NewCheckpoint, /) -> bool:
        """Make a checkpoint of the thread; False if its state is not known at the moment, so try again."""

    async def turns(self, every: int, /) -> int:
        """How many replies there are since the last checkpoint of a turn, counted up to `every`."""

    async def marked(self, marks: Sequence[str], /) -> MarkedMessages:
        """Those of `messages` that have one of these marks."""

    def partial_writer(self, reply_id: str, created_at: str, /) -> PartialSaver | None:
        """What saves a reply while it arrives; None if nothing is stored."""

    def shown_to_followers(self, publish: Publish, /) -> Publish:
        """Publish, and show the followers of the thread in this process what arrives of a reply."""

    def refuse_partial(self) -> None:
        """Delete the saved part of the reply when the run ends: a hook rejected the reply."""

    async def finish(self, release: Release, spent: int = 0, stop: Stop = ..., /) -> bool:
        """Save the extra and release the lease. False: a message waits in the inbox, and the lease is still held."""

    def leave(self, spent: int = 0, /) -> None:
        """Release the lease without waiting for the commit: the run was interrupted."""

    async def tidy(self) -> None:
        """Remove the checkpoints that have expired."""


class ChildHome(NamedTuple):
    """Where the child of a call works: on a thread of a database, or in memory, with the agent that was kept."""

    database: Any = None
    thread: ThreadKey | None = None
    child: Any = None


class Ledger(Protocol):
    """The tool calls of the last reply. A call is named by its index in the reply."""

    @property
    def entries(self) -> Mapping[int, LedgerEntry]:
        """The calls that were started, wait for an answer or have one, and have no result yet."""

    @property
    def unsaved(self) -> dict[tuple[str, int], ToolResultMessage]:
        """Results whose write failed, by `reply_key` and call index."""

    @property
    def namespace(self) -> str:
        """The namespace of the thread."""

    @property
    def reply_key(self) -> str:
        """Identifies the last reply among all replies of all threads."""

    def open_calls(self) -> dict[int, ToolCall]:
        """The calls without a result."""

    def was_recorded(self, call_index: int, /) -> bool:
        """Whether the ledger would have an entry if the call had been started. True for replies stored by an agent."""

    @property
    def is_foreign(self) -> bool:
        """Whether the last reply came with a fork, a rewind or an import: its calls may have been started there."""

    async def distrust(self, calls: int, /) -> None:
        """Record that the ledger may lack entries for the last reply, which has so many calls."""

    async def start(self, entry: LedgerEntry, /) -> None:
        """Record that a call is about to run."""

    async def ask(self, entry: LedgerEntry, question: Question, /) -> None:
        """Record that a call waits for a person's answer."""

    async def refresh(self) -> None:
        """Read the entries again: another process may have recorded an answer, or the time for it is over."""

    async def answer(self, call_id: str, answer: NewAnswer, /) -> bool:
        """Record a person's answer to a call that waits; False if it needs more approvals."""

    async def tool_of(self, call_id: str, /) -> str | None:
        """The name of the tool of a call that waits; None if there is no such call."""

    async def settle(self, call_index: int, outcome: Outcome, /) -> None:
        """Record a call's result. It joins the messages with `close_turn`."""

    @property
    def questions(self) -> Sequence[Pending]:
        """The questions of the open children of these calls, as they were read last."""

    async def child_of(self, key: str, name: str, limit: int | None, /) -> ChildHome | None:
        """The child of a call, by the call's idempotency key; made if there is none.

        Returns None if the run has begun `limit` children already.
        """

    def keep_child(self, key: str, child: Any, /) -> None:
        """Keep the agent of a call that stays open, or forget it (None). For children in memory."""

    def close_turn(self, results: Sequence[ToolResultMessage], /) -> None:
        """Add results that were recorded to the messages, in call order."""


class Inbox(Protocol):
    """Messages that were queued for a run: steering for its next turn, follow-ups for when it would stop."""

    def send(self, kind: str, message: UserMessage, /) -> Receipt:
        """Queue a message after all others, without waiting for the commit; one with an id of its own only once."""

    async def waiting(self) -> list[Waiting]:
        """The queued messages, in order."""

    async def withdraw(self, message_id: str, /) -> bool:
        """Remove a queued message; False if it was already delivered."""

    def has_mail(self, *, stopping: bool) -> bool:
        """Whether a message is known to wait for the next turn or, if the run is `stopping`, for its end."""

    async def take(self, *, stopping: bool) -> list[UserMessage]:
        """Move the messages that are due from the inbox into the history."""


class Journal(NamedTuple):
    history: History
    ledger: Ledger
    inbox: Inbox


def pending(thread_id: str, journal: Journal) -> list[Pending]:
    """The calls of the last reply that wait for a person's answer, and those of the open children."""
    own = [
        Pending(
            thread_id,
            entry.call_id,
            entry.name,
            json.loads(entry.edited or entry.arguments) or {},
            cast("Why", entry.reason),  # of a call that waits it is known
            entry.question or "",
            entry.asked_at or "",
            journal.ledger.namespace,
            journal.history.payer,
            entry.approvers,
            [Approval(*row[1:]) for row in entry.approvals],
            entry.expires_at,
            kind_of(entry.fallback),
        )
        for _, entry in sorted(journal.ledger.entries.items())
        if entry.status == WAITING
    ]
    return [*own, *journal.ledger.questions]


def is_waiting(ledger: Ledger) -> bool:
    return any(entry.status == WAITING for entry in ledger.entries.values())


def entry_of(
    call: ToolCall, call_index: int, key: str, status: str, recovery: str, *, original: str | None = None
) -> LedgerEntry:
    """The ledger's entry of a call. `original` is its arguments before a person replaced them, as JSON."""
    try:  # null stands for what is no JSON object: the reply has it
        arguments = checked_dumps(call.arguments if call.malformed is None else None)
    except (TypeError, ValueError, RecursionError):  # a hook may put anything there; the tool itself gets it as it is
        arguments = checked_dumps(readable(call.arguments))
    first, edited = (arguments, None) if original is None else (original, arguments)
    return LedgerEntry(
        *(call_index, call.id, call.name, first, key, status, None, None, None, 1, None, recovery), edited=edited
    )


def nothing_to_resume(thread_id: str | None, messages: Sequence[Message]) -> NothingToResume:
    """The error of a resume of a thread in which nothing is left to answer."""
    where = f"thread {thread_id!r}" if thread_id else "the agent"
    if not messages:
        return NothingToResume(f"{where} has no messages to continue from; prompt() it first")
    why = "its last reply is complete" if isinstance(messages[-1], AssistantMessage) else "it has nothing to answer"
    return NothingToResume(
        f"Cannot continue from message role: {messages[-1].role}; {where}: {why}; prompt() continues the thread"
    )


def answer_needed(thread_id: str | None, journal: Journal) -> AnswerNeeded:
    """The error of a prompt to a thread with a call that waits for a person's answer."""
    waiting = ", ".join(
        f"{call.tool_name} ({call.call_id!r}{f' of {call.thread_id!r}' if call.thread_id != (thread_id or '') else ''})"
        for call in pending(thread_id or "", journal)
    )
    where = f"thread {thread_id!r}" if thread_id else "the agent"
    return AnswerNeeded(
        f"{where} waits for a person: {waiting}; answer first (await agent.answer(call_id, 'approve' or 'deny')), "
        "then resume() or prompt()"
    )
