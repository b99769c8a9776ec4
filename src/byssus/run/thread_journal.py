"""A thread of a store as a run's journal: what is in its list and what is on disk agree.

A message joins the list after its commit, and once a write has failed, the journal is stale and is loaded again before
the next run. A run holds its thread's lease from `begin` to `finish`, and every write in between carries it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from byssus.errors import InputError, LeaseLost, NotFound, ThreadBusy, ThreadInactive, ThreadMoved
from byssus.messages import AssistantMessage, Message, ToolCall, ToolResultMessage, UserMessage, decode, encode
from byssus.providers import history
from byssus.queries.accounts import users
from byssus.queries.accounts.quotas import Charge
from byssus.queries.log import inbox, memories, threads, tool_calls
from byssus.queries.log.leases import Claim, Held, Lease
from byssus.queries.log.threads import Position
from byssus.queries.log.tool_calls import Start
from byssus.queries.versions import forks, putting
from byssus.run.journal import ANSWERED, WAITING, LedgerEntry
from byssus.signals import Aborted, Signal, turn_into_abort, until_aborted
from byssus.store import keeper, owners
from byssus.store.database import Store
from byssus.store.keeper import Keeper
from byssus.store.operations import HasStore
from byssus.threads import approvals, checkpoints, retention
from byssus.threads import forks as fork_operations
from byssus.threads import inbox as inbox_operations
from byssus.threads.encoding import encode_extra, message_row
from byssus.threads.inbox import Modes, Receipt, Waiting
from byssus.threads.thread import Thread, load
from byssus.threads.waiting import retry_while_driven
from byssus.values import clock
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.inputs import column_text
from byssus.values.marks import MarkedMessages
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

T = TypeVar("T")
_GRACE = 30.0  # an abort waits for a claim that is being written, as for any commit
_log = logging.getLogger("byssus.agent")


class ThreadJournal:
    """A thread of a store."""

    def __init__(
        self,
        database: HasStore,
        thread_key: ThreadKey,
        lease_seconds: float,
        modes: Modes,
        wait: float,
        *,
        user_id: str | None = None,
        origin: tuple[ThreadKey, str | int] | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self.extra: dict[str, Any] = {}
        self.unsaved: dict[tuple[str, int], ToolResultMessage] = {}
        self.entries: dict[int, LedgerEntry] = {}
        self.partial: AssistantMessage | None = None
        self.is_interrupted = False
        self._database = database
        self._thread_key = thread_key
        self._lease_seconds = lease_seconds
        self._modes = modes
        self._wait = wait
        self._user_id = self.payer = user_id
        self._origin = origin  # the thread and the point that this one is to be forked from
        self._is_owned = False
        self._has_ttl = False
        self._saved_extra = "{}"
        self._loaded = False
        self._position: Position | None = None  # None: not loaded yet, or stale
        self._held: Held | None = None  # the lease of the run that is going on
        self._keeper: Keeper | None = None  # who renews it
        self._reply_id: str | None = None
        self._first_result_seq = 0  # the seq that is reserved for the first call of the last reply
        self._reserved = 0  # the last seq that may be a place of the last reply
        self._taken: set[int] = set()  # the seqs behind the last reply that hold a message
        self._unseen = 0  # results that are stored and not in the list
        self._unledgered = 0
        self._sent: list[Receipt] = []  # what this agent sent, and the run has not waited for
        self._mail = 0  # what is known to wait in the inbox: 2 steering, 1 only follow-ups
        self._saves_partial = False
        self._is_refused = False  # whether what was saved of a reply must not be kept

    @property
    def _store(self) -> Store:
        return self._database.store

    @property
    def reply_key(self) -> str:
        namespace, thread_id = self._thread_key
        where = f"{namespace}/{thread_id}" if namespace else thread_id
        return f"{where}/{self._first_result_seq - 1}/{self._reply_id}"

    def open_calls(self) -> dict[int, ToolCall]:
        found = history.open_calls(self.messages)
        reply = history.last_reply(self.messages)
        if found and reply is not None and len({call.id for call in reply.tool_calls}) < len(reply.tool_calls):
            # A service that uses an id twice: which of the calls has its result, only the place tells.
            open_calls = {
                i: call for i, call in enumerate(reply.tool_calls) if self._first_result_seq + i not in self._taken
            }
            return open_calls if len(open_calls) == len(found) else found
        return found

    # --- the history --------------------------------------------------------------------------------------------------

    async def load(self, *, again: bool = False) -> None:
        if self._position is not None and self._unseen == 0 and not again:
            return
        if self._origin is not None:
            await self._fork(*self._origin)
            self._origin = None
        if self._user_id is not None and not self._is_owned:
            await self._store.read(users.require, self._user_id)
        thread = await load(self._store, self._thread_key) or Thread([], {})
        if thread.owner is not None and self._user_id not in (None, thread.owner):
            raise InputError(
                f"thread {self._thread_key.id!r} belongs to user {thread.owner!r}, and this agent works for "
                f"{self._user_id!r}; use another thread, or a fork: cp.fork({self._thread_key.id!r}, user_id=...)"
            )
        self._has_ttl, self._is_owned = thread.has_ttl, thread.owner is not None
        self.payer = self._user_id or thread.owner
        self.messages = thread.messages
        # What the program put there before the first run counts on top of what is stored.
        if not self._loaded:
            self.extra = {**thread.extra, **self.extra}
        elif encode_extra(self.extra) == self._saved_extra:  # else it is about to be saved, and wins
            self.extra = thread.extra.copy()
        self._loaded = True
        self._saved_extra = encode_extra(thread.extra)
        self._position, self._unseen = thread.position, 0
        self._unledgered = thread.unledgered
        self._mail = max(thread.mail, self._mail if self._sent else 0)  # what is still on its way counts too
        self.partial = thread.partial
        self._saves_partial = thread.partial is not None
        self.is_interrupted = thread.run_id is not None
        self._first_result_seq = _seq_behind_last_reply(thread)
        self._reply_id = history.last_reply_id(thread.messages)
        self._reserved = thread.position.head
        self._taken = {seq for seq in reversed(thread.seqs) if seq >= self._first_result_seq}
        await self.refresh()

    async def _fork(self, origin: ThreadKey, at: str | int) -> None:
        """Make the fork that this is a journal of, unless an attempt of ours has done so and did not hear of it."""
        try:
            await fork_operations.fork(self._store, origin, at, new_id=self._thread_key.id, user_id=self._user_id)
        except NotFound:
            raise
        except InputError:
            made = await self._store.read(forks.node, self._thread_key)
            if made is None or made.origin != origin.id:
                raise

    async def refresh(self) -> None:
        if self._position is None or not self.open_calls():
            self.entries = {}
            return
        store, branch, reply = self._store, self._position.branch, self._first_result_seq - 1
        rows = await store.read(tool_calls.of_reply, branch, reply)
        self.entries = {entry.call_index: entry for entry in rows if entry.status in tool_calls.OPEN}
        if self._reply_id is None:
            self._reply_id = await store.read(threads.message_id, branch, reply)

    async def begin(self, run_id: str, signal: Signal, messages: Sequence[Message] = ()) -> None:
        before = self._position or Position(0, 0)
        expect = before.version if messages else threads.ANY
        rows = [message_row(message) for message in messages]
        claimed = _Claimed(self, run_id, signal)

        async def attempt(dead_epoch: int) -> None:
            claim = claimed.claim._replace(dead_epoch=dead_epoch)
            await self._written(
                lambda position: claimed.succeed(position, messages),
                threads.append,
                self._thread_key,
                rows,
                by=claim,
                expect=expect,
                owner=None if self._is_owned else self._user_id,
            )

        waiting = retry_while_driven(self._store, attempt, self._wait)
        try:
            await (until_aborted(waiting, signal, _GRACE) if self._wait else waiting)
        except Aborted:
            if self._held is None:
                raise  # else the abort came with the commit: what was stored is told first
        finally:
            claimed.settle()
        if not messages:
            if self._position is None or self._position.version != before.version + 1:
                await self.load(again=True)
                self.is_interrupted = False  # whoever wrote meanwhile has taken that run up, or ended it
            else:
                await self.refresh()

    async def append(
        self,
        messages: Sequence[Message],
        *,
        reserve: int = 0,
        release: Release | None = None,
        checkpoint: NewCheckpoint | None = None,
        spent: int | None = None,
    ) -> None:
        def note(position: Position) -> None:
            self._note(position)
            self._first_result_seq, self._reserved = position.head - reserve + 1, position.head
            self._taken, self.entries, self._saves_partial, self.partial = set(), {}, False, None
            self.messages.extend(messages)
            if messages and isinstance(messages[-1], AssistantMessage):
                self._reply_id = messages[-1].id
            if extra is not None:
                self._saved_extra = extra

        try:
            extra = self._changed_extra() if release or checkpoint else None
        except InputError:  # the reply is worth more; `finish` says it
            extra, release = None, None
        query: Callable[..., Position]
        more: dict[str, Any]
        if checkpoint is None:
            query, more = threads.append, {"reserve": reserve}
        else:
            assert reserve == 0, "a checkpoint is made when no call is open"
            query, more = putting.append, {"new": checkpoints.encoded_checkpoint(checkpoint)}
        rows = [message_row(message) for message in messages]
        more |= {"by": self._lease(), "release": release, "extra": extra, "clear_partial": self._saves_partial}
        if spent is not None and self.payer is not None:
            more["charge"] = Charge(self.payer, spent)
        await self._written(note, query, self._thread_key, rows, **more)

    async def set_aside(self, wanted: int, least: int) -> int | None:
        if self.payer is None:
            return None
        granted = await self._store.write(users.reserve, self._thread_key, self.payer, wanted, least, by=self._lease())
        return granted.tokens

    async def checkpoint(self, checkpoint: NewCheckpoint) -> bool:
        def note(position: Position) -> None:
            self._note(position)
            self._saved_extra = self._saved_extra if extra is None else extra

        held = self._held
        if held is None and (self._position is None or self._unseen):
            return False  # a run is about to begin, or must be loaded first
        if checkpoint.summary is None:
            checkpoint = msgspec.structs.replace(
                checkpoint, summary=history.one_line(history.last_reply(self.messages))
            )
        new, extra = checkpoints.encoded_checkpoint(checkpoint), self._changed_extra()
        by, expect = (self._lease(), threads.ANY) if held else (threads.UNLEASED, self._known_version())
        write = self._store.write(putting.put_here, self._thread_key, new, by=by, expect=expect, extra=extra)
        try:
            await _settled(write, note)
        except ThreadMoved:
            if held is not None:
                raise
            self._position = None  # somebody else has written since we looked: read it first
            return False
        except (LeaseLost, ThreadBusy):
            if self._held == held:
                raise
            return False  # our own run has begun meanwhile, or ended
        return True

    async def marked(self, marks: Sequence[str]) -> MarkedMessages:
        summary, ids, count = await self._store.read(memories.marked, self._thread_key, marks)
        return MarkedMessages(json.loads(summary) if summary else "", ids, count)

    async def tidy(self) -> None:
        if self._has_ttl:
            await retention.tidy(self._store, self._thread_key)

    # --- tool calls ---------------------------------------------------------------------------------------------------

    def was_recorded(self, call_index: int) -> bool:
        seq = self._first_result_seq + call_index
        return self._unledgered < seq <= self._reserved and seq not in self._taken

    async def distrust(self, calls: int) -> None:
        upto = self._first_result_seq + calls - 1
        await self._store.write(threads.distrust, self._thread_key, upto, by=self._lease())
        self._unledgered = max(self._unledgered, upto)

    async def start(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> None:
        start = self._start(call_index, entry, run_id, policy)
        await self._store.write(tool_calls.start, self._thread_key, start, by=self._lease())
        self.entries[call_index] = entry

    async def ask(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> None:
        await self._store.write(
            tool_calls.ask,
            self._thread_key,
            self._start(call_index, entry, run_id, policy),
            reason=entry.reason or "",
            question=entry.question or "",
            by=self._lease(),
        )
        self.entries[call_index] = entry

    def _start(self, call_index: int, entry: LedgerEntry, run_id: str, policy: str) -> Start:
        reply, key = self._first_result_seq - 1, entry.idempotency_key
        call_id, name = column_text(entry.call_id), column_text(entry.name)
        return Start(reply, call_index, call_id, name, entry.arguments, policy, key, run_id)

    async def answer(self, call_id: str, answer: str) -> None:
        await approvals.record_answer(self._store, self._thread_key, call_id, answer)
        for call_index, entry in sorted(self.entries.items()):
            if entry.call_id == call_id and entry.status == WAITING:
                self.entries[call_index] = entry._replace(status=ANSWERED, answer=answer)
                return

    async def settle(
        self, call_index: int, result: ToolResultMessage, status: str, elapsed_ms: float | None = None
    ) -> None:
        settled = False

        def note(position: Position) -> None:
            nonlocal settled
            self._note(position)
            self._unseen += 1
            self._taken.add(seq)
            self._saved_extra = self._saved_extra if extra is None else extra
            self.entries.pop(call_index, None)
            settled = True

        seq, reply = self._first_result_seq + call_index, self._first_result_seq - 1
        try:  # what the tool wrote to the extra: it will not run again
            extra = self._changed_extra()
        except InputError:  # `finish` says it
            extra = None
        try:
            row, store = message_row(result), self._store
            if seq in self._taken or seq > self._reserved:  # somebody else stored the reply, and left no room behind it
                write = store.write(
                    tool_calls.finish_behind,
                    self._thread_key,
                    reply,
                    [(call_index, row, status, elapsed_ms)],
                    by=self._lease(),
                    extra=extra,
                )
            else:
                write = store.write(
                    tool_calls.finish,
                    self._thread_key,
                    reply,
                    [(call_index, seq, row, status, elapsed_ms)],
                    by=self._lease(),
                    extra=extra,
                )
            await _settled(write, note)
        except asyncio.CancelledError:
            self._position = None  # it may be stored, and is not in the list
            raise
        finally:
            if not settled:
                self._position = None
                if status in ("done", "failed"):  # the tool ran all the same: its answer is not forgotten while we live
                    self.unsaved[self.reply_key, call_index] = result

    def close_turn(self, results: Sequence[ToolResultMessage]) -> None:
        self.messages.extend(results)
        self._unseen -= len(results)

    # --- the inbox ----------------------------------------------------------------------------------------------------

    def send(self, kind: str, message: UserMessage) -> Receipt:
        receipt = inbox_operations.send(self._store, self._thread_key, kind, message)
        self._sent.append(receipt)
        self._mail = max(self._mail, 2 if kind == inbox.STEER else 1)
        return receipt

    async def waiting(self) -> list[Waiting]:
        return await inbox_operations.inbox(self._store, self._thread_key)

    async def withdraw(self, message_id: str) -> bool:
        return await inbox_operations.withdraw(self._store, self._thread_key, message_id)

    def has_mail(self, *, stopping: bool) -> bool:
        return self._mail > (0 if stopping else 1)

    async def take(self, run_id: str, signal: Signal, *, stopping: bool) -> list[UserMessage]:
        sent, self._sent, self._mail = self._sent, [], 0
        for receipt in sent:
            await receipt
        claimed = _Claimed(self, run_id, signal) if self._held is None else None
        taken: list[UserMessage] = []

        def note(outcome: tuple[Position | None, list[str]]) -> None:
            position, bodies = outcome
            taken.extend(decode(body) for body in bodies)  # type: ignore[misc]
            if position is None:
                return
            if claimed is not None:
                claimed.succeed(position, taken)
            else:
                self._note(position)
                self.messages.extend(taken)

        by = self._lease() if claimed is None else claimed.claim
        expect = threads.ANY if claimed is None or self._position is None else self._position.version
        limits = self._modes.limits(stopping=stopping)
        try:
            await self._written(note, inbox.take, self._thread_key, by=by, expect=expect, limits=limits)
        except asyncio.CancelledError:
            if not taken:
                raise
            turn_into_abort(signal)  # they have left the inbox: the run has heard them
        except (
            ThreadBusy,
            ThreadInactive,
            ThreadMoved,
        ):  # after our run had ended, somebody else's began: it will hear them
            if claimed is None:
                raise
        finally:
            if claimed is not None:
                claimed.settle()
        return taken

    # --- the lease ----------------------------------------------------------------------------------------------------

    def save_partial(self, reply: AssistantMessage) -> None:
        if self._held is not None:
            self._saves_partial = True
            write = self._store.submit(threads.save_partial, self._thread_key, encode(reply), by=self._lease())
            write.add_done_callback(_report_partial)

    async def finish(self, release: Release, *, spent: int = 0) -> bool:
        self.unsaved = {key: result for key, result in self.unsaved.items() if key[0] == self.reply_key}
        try:
            extra = self._changed_extra()
        except InputError:
            self.leave(spent=spent)
            raise
        if self._held is None and (extra is None or self._position is None):
            return True

        def note(position: Position) -> None:
            self._note(position)
            self._saved_extra = self._saved_extra if extra is None else extra

        held = self._held
        by, expect = (self._lease(), threads.ANY) if held else (threads.UNLEASED, self._known_version())
        try:
            await self._written(
                note,
                threads.append,
                self._thread_key,
                [],
                by=by,
                expect=expect,
                extra=extra,
                release=release if held else None,
                clear_partial=self._is_refused,
                charge=self._charge(spent),
            )
            self._is_refused = False
        except BaseException:
            self._drop()
            raise
        return self._held is None

    def leave(self, *, spent: int = 0) -> None:
        held, self._position = self._held, None
        if held is not None:
            by = self._lease()
            self._drop()
            charge = self._charge(spent)
            self._store.submit(threads.append, self._thread_key, [], by=by, release=Release.PAUSE, charge=charge)

    def _charge(self, spent: int) -> Charge | None:
        return Charge(self.payer, spent) if spent and self.payer is not None else None

    def refuse_partial(self) -> None:
        self._is_refused, self._saves_partial = self._saves_partial, False

    def _lease(self) -> Lease:
        if self._held is None:
            raise LeaseLost(self._thread_key.id)
        return Lease(self._held.epoch, self._held.seconds)

    def _known_version(self) -> int:
        return threads.ANY if self._position is None else self._position.version

    def _note(self, position: Position) -> None:
        if self._position is None or position.version > self._position.version:
            self._position = position
        self._mail = max(self._mail, position.mail)
        if self._held is not None and not position.is_held:
            self._drop()

    def _drop(self) -> None:
        if self._held is not None and self._keeper is not None:
            self._keeper.drop(self._held)
            self._held = None

    def _changed_extra(self) -> str | None:
        extra = encode_extra(self.extra)
        return None if extra == self._saved_extra else extra

    async def _written(self, note: Callable[[T], None], query: Callable[..., T], *args: Any, **kwargs: Any) -> None:
        """Write, and note the outcome; until it is known, the journal is stale."""
        write = self._store.write(query, *args, **kwargs)
        before, self._position = self._position, None
        try:
            await _settled(write, note)
        except ThreadBusy:  # nothing was written, so what was known is still known
            self._position = before
            raise


class _Claimed:
    """A claim for a journal's thread. Its token is known in the process before the lease exists."""

    def __init__(self, journal: ThreadJournal, run_id: str, signal: Signal) -> None:
        self._journal = journal
        self._store = journal._store
        self._signal = signal
        self._token = clock.new_id()
        self.claim = Claim(owners.name(self._token), run_id, journal._lease_seconds)
        keeper.expect(self._token)

    def succeed(self, position: Position, messages: Sequence[Message]) -> None:
        journal = self._journal
        held = Held(
            journal._thread_key.id, journal._thread_key.namespace, position.epoch, self.claim.seconds, self._token
        )
        journal._held, journal._keeper = held, keeper.of(self._store)
        journal._keeper.keep(held, self._signal.abort)
        journal._position = position
        journal.messages.extend(messages)

    def settle(self) -> None:
        if self._journal._held is None:
            keeper.forget(self._token)


async def _settled(write: asyncio.Future[T], note: Callable[[T], None]) -> None:
    """Wait for a write. A cancelled caller still learns of a commit: the write settles before the cancellation."""
    try:
        await write
    finally:
        if write.done() and write.exception() is None:
            note(write.result())


def _report_partial(write: Future[None]) -> None:
    if (error := write.exception()) is not None:  # the run will hear of it from a write that counts
        _log.debug("a part of a reply could not be saved: %s", type(error).__name__)


def _seq_behind_last_reply(thread: Thread) -> int:
    for message, seq in zip(reversed(thread.messages), reversed(thread.seqs), strict=True):
        if isinstance(message, AssistantMessage):
            return seq + 1
    return 0
