"""The journal of an agent without a checkpointer: it lives as long as the agent.

There is one run at a time and no other process, so there are no leases, quotas or checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from byssus.errors import InputError, KeyReused
from byssus.messages import AssistantMessage, Message, ToolCall, ToolResultMessage, UserMessage, stamped
from byssus.providers import history
from byssus.providers.model_call import PartialSaver
from byssus.queries.log import answers
from byssus.queries.log.answers import EXPIRY, NewAnswer, Question
from byssus.queries.log.tool_calls import WAITING, LedgerEntry
from byssus.run.journal import INTERRUPTED, ChildHome, Driver, Ending, Journal, Stop, pending
from byssus.run.outside.answering import answered, approved, is_expired
from byssus.stream import Publish
from byssus.threads import approvals
from byssus.threads.encoding import encode_extra
from byssus.threads.inbox import Modes, Receipt, Waiting, is_same
from byssus.threads.thread import Thread
from byssus.tools import Outcome
from byssus.values import clock
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.decisions import Pending
from byssus.values.inputs import checked_number
from byssus.values.marks import MarkedMessages
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey


def memory_journal(modes: Modes) -> Journal:
    """An empty journal."""
    messages: list[Message] = []
    ledger, inbox = MemoryLedger(messages), MemoryInbox(messages, modes)
    return Journal(MemoryHistory(messages, ledger, inbox), ledger, inbox)


class MemoryHistory:
    """A list of messages."""

    partial: AssistantMessage | None = None
    unfinished: str | None = None
    key: ThreadKey | None = None
    is_loaded = True
    payer: str | None = None
    waiting_since: float | None = None
    first_seq = 1
    earlier_count = 0

    def __init__(self, messages: list[Message], ledger: MemoryLedger, inbox: MemoryInbox) -> None:
        self.messages = messages
        self.extra: dict[str, Any] = {}
        self._ledger = ledger
        self._inbox = inbox

    async def load(self, *, again: bool = False) -> None:  # noqa: ARG002
        await self._ledger.refresh()

    async def earlier(self, _limit: int, /) -> list[Message]:
        return []

    async def page(self, limit: int, before: int | None, /) -> Thread:
        checked_number("limit", limit)
        return Thread([], {}) if before is None else Thread(self.messages[: before - 1][-limit:], {})

    async def messages_of(self, _run_id: str, /) -> list[Message]:
        return []  # there is no log, and no run of another process

    def sent(self, count: int, /) -> None:
        pass

    async def is_current(self) -> bool:
        return True

    async def begin(self, _driver: Driver, messages: Sequence[Message] = (), /) -> None:
        self._ledger.children_of_run = 0
        self.messages.extend(messages)

    async def append(self, messages: Sequence[Message], /) -> None:
        self.messages.extend(messages)
        self._ledger.entries.clear()

    async def append_prompt(self, messages: Sequence[Message], /) -> None:
        await self.append(messages)

    async def append_reply(self, reply: AssistantMessage, _ending: Ending, /) -> None:
        await self.append([reply])

    async def set_aside(self, _wanted: int, _least: int, /) -> int | None:
        return None

    async def checkpoint(self, _checkpoint: NewCheckpoint, /) -> bool:
        raise InputError("a checkpoint needs a checkpointer; pass checkpointer=... and thread_id=... to the Agent")

    async def turns(self, _every: int, /) -> int:
        return 0

    async def marked(self, _marks: Sequence[str], /) -> MarkedMessages:
        return MarkedMessages()

    def partial_writer(self, _reply_id: str, _created_at: str, /) -> PartialSaver | None:
        return None

    def shown_to_followers(self, publish: Publish, /) -> Publish:
        return publish

    def refuse_partial(self) -> None:
        pass

    async def finish(self, release: Release, _spent: int = 0, _stop: Stop = INTERRUPTED, /) -> bool:
        encode_extra(self.extra)  # raises what a stored thread would raise
        return release is not Release.END_IF_INBOX_EMPTY or not self._inbox.has_mail(stopping=True)

    def leave(self, spent: int = 0, /) -> None:
        pass

    async def tidy(self) -> None:
        pass


class MemoryLedger:
    """The open calls of the last reply."""

    namespace = ""

    def __init__(self, messages: list[Message]) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self.unsaved: dict[tuple[str, int], ToolResultMessage] = {}
        self._messages = messages
        self._answered: dict[str, tuple[str | None, str, str | None]] = {}  # by whom, when, and from where
        self._children: dict[str, Any] = {}  # of calls that are open, by the keys of the calls
        self.children_of_run = 0

    @property
    def reply_key(self) -> str:
        return history.last_reply_id(self._messages) or ""

    def open_calls(self) -> dict[int, ToolCall]:
        return history.open_calls(self._messages)

    def was_recorded(self, _call_index: int, /) -> bool:
        return True

    @property
    def is_foreign(self) -> bool:
        return False

    async def distrust(self, calls: int, /) -> None:
        pass

    async def start(self, entry: LedgerEntry, /) -> None:
        before = self.entries.get(entry.call_index)
        self.entries[entry.call_index] = entry._replace(attempts=1 + (before.attempts if before else 0))

    async def ask(self, entry: LedgerEntry, _question: Question, /) -> None:
        before = self.entries.get(entry.call_index)
        self.entries[entry.call_index] = entry._replace(attempts=before.attempts if before else 0)

    async def refresh(self) -> None:
        for call_index, entry in self.entries.items():
            if is_expired(entry):
                self.entries[call_index] = answered(entry, NewAnswer(entry.fallback or "{}"))
                self._answered[entry.call_id] = (None, entry.expires_at or "", EXPIRY)

    async def answer(self, call_id: str, answer: NewAnswer, /) -> bool:
        await self.refresh()
        for call_index, entry in self.entries.items():
            if entry.call_id != call_id or entry.status != WAITING:
                continue
            answers.check_edit(call_id, "the agent", answer, entry.reason)
            if answer.is_approval and entry.approvers > 1:
                self._check_approver(entry, answer)
                if len(entry.approvals) + 1 < entry.approvers:
                    self.entries[call_index] = approved(entry, answer)
                    return False
            self.entries[call_index] = answered(entry, answer)
            self._answered[call_id] = (answer.by, clock.now(), answer.source)
            return True
        for child in self._children.values():
            if any(question.call_id == call_id for question in pending("", child.journal)):
                done: bool = await child.journal.ledger.answer(call_id, answer)
                return done
        if call_id in self._answered:
            raise answers.answered("the agent does not wait for an answer", call_id, *self._answered[call_id])
        raise answers.not_waiting("the agent", approvals.checked_call(call_id), None)

    def _check_approver(self, entry: LedgerEntry, answer: NewAnswer) -> None:
        answers.check_approval(entry.call_id, "the agent", answer, entry.approvers)
        earlier = next((given for given in entry.approvals if given.person == answer.by), None)
        if earlier is not None:
            raise answers.approved_before(entry.call_id, "the agent", earlier, len(entry.approvals), entry.approvers)

    async def tool_of(self, call_id: str, /) -> str | None:
        waiting = (entry for entry in self.entries.values() if entry.status == WAITING and entry.call_id == call_id)
        return next((entry.name for entry in waiting), None)

    async def settle(self, call_index: int, _outcome: Outcome, /) -> None:
        self.entries.pop(call_index, None)

    @property
    def questions(self) -> list[Pending]:
        return [question for child in self._children.values() for question in pending("", child.journal)]

    async def child_of(self, key: str, _name: str, limit: int | None, /) -> ChildHome | None:
        if key in self._children:
            return ChildHome(child=self._children[key])
        if limit is not None and self.children_of_run >= limit:
            return None
        self.children_of_run += 1
        return ChildHome()

    def keep_child(self, key: str, child: Any, /) -> None:
        if child is None:
            self._children.pop(key, None)
        else:
            self._children[key] = child

    def close_turn(self, results: Sequence[ToolResultMessage], /) -> None:
        self._messages.extend(results)


class MemoryInbox:
    """A queue of messages."""

    def __init__(self, messages: list[Message], modes: Modes) -> None:
        self._messages = messages
        self._modes = modes
        self._queue: list[Waiting] = []

    def send(self, kind: str, message: UserMessage, /) -> Receipt:
        sent = stamped(message)
        assert sent.id is not None
        known = None if message.id is None else self._known(message.id)
        if known is None:
            self._queue.append(Waiting(sent.id, kind, sent, sent.created_at or ""))
            return Receipt(sent)
        written: Future[None] = Future()
        if is_same(known, message):
            written.set_result(None)
        else:
            written.set_exception(KeyReused("", sent.id, None))
        return Receipt(sent, written)

    def _known(self, message_id: str) -> Message | None:
        """A user's message by its id: one that waits, or one of the conversation."""
        messages = (message for message in reversed(self._messages) if isinstance(message, UserMessage))
        known = itertools.chain((item.message for item in self._queue), messages)
        return next((message for message in known if message.id == message_id), None)

    async def waiting(self) -> list[Waiting]:
        return list(self._queue)

    async def withdraw(self, message_id: str, /) -> bool:
        found = [item for item in self._queue if item.id == message_id][:1]
        self._remove(found)
        return bool(found)

    def has_mail(self, *, stopping: bool) -> bool:
        return any(item.kind in self._modes.limits(stopping=stopping) for item in self._queue)

    async def take(self, *, stopping: bool) -> list[UserMessage]:
        for kind, limit in self._modes.limits(stopping=stopping).items():
            if due := [item for item in self._queue if item.kind == kind][:limit]:
                self._remove(due)
                self._messages.extend(item.message for item in due)
                return [item.message for item in due]
        return []

    def _remove(self, items: list[Waiting]) -> None:
        self._queue = [item for item in self._queue if item not in items]
