"""A journal in a thread of a store, and the part of it that is the history.

A run holds its thread's lease from `begin` to `finish`, and every write in between carries it. The list of messages and
what is stored agree, or the thread is loaded again before the next run: see `driven_thread.py`. The other parts are in
`thread_ledger.py` and `thread_inbox.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from byssus.errors import InputError, LeaseLost, NotFound, ThreadBusy, ThreadMoved
from byssus.messages import AssistantMessage, Message
from byssus.providers import history
from byssus.providers.model_call import PartialSaver
from byssus.queries.accounts import users
from byssus.queries.accounts.quotas import Charge
from byssus.queries.log import memories, runs, threads
from byssus.queries.log.leases import Lease
from byssus.queries.log.runs import RunBegin, RunEnd
from byssus.queries.log.threads import Position
from byssus.queries.versions import forks, putting
from byssus.run.driven_thread import Change, Claimed, DrivenThread, Geometry, may_be_late, settled
from byssus.run.journal import INTERRUPTED, Driver, Ending, Journal, Stop
from byssus.run.known.tail import Tail, load_tail
from byssus.run.thread_inbox import ThreadInbox
from byssus.run.thread_ledger import ThreadLedger
from byssus.signals import Aborted, until_aborted
from byssus.store.operations import HasStore
from byssus.stream import Publish
from byssus.threads import checkpoints, listing, retention
from byssus.threads import forks as fork_operations
from byssus.threads.encoding import PAGE, encode_extra, message_row
from byssus.threads.following import arriving
from byssus.threads.following.arriving import PartialWriter
from byssus.threads.inbox import Modes
from byssus.threads.runs import records
from byssus.threads.thread import Thread, load, load_behind
from byssus.threads.waiting import retry_while_driven
from byssus.values.checkpoints import NewCheckpoint
from byssus.values.inputs import column_text
from byssus.values.marks import MarkedMessages
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey

_LONGEST_ERROR = 10_000  # characters
_SLACK = 100  # messages, so that a short end is not cut with every run
_GRACE = 30.0  # seconds that an abort waits for a claim that is being written
_log = logging.getLogger("byssus.agent")


def thread_journal(
    database: HasStore,
    thread_key: ThreadKey,
    lease_seconds: float,
    modes: Modes,
    wait: float,
    *,
    user_id: str | None = None,
    origin: tuple[ThreadKey, str | int] | None = None,
    last: int | None = None,
) -> Journal:
    """The journal of a thread. `origin` is the thread and the point that the first load forks it from; `last` is how
    many messages from its end are loaded (None: all)."""
    thread = DrivenThread(database, thread_key, lease_seconds)
    ledger, inbox = ThreadLedger(thread), ThreadInbox(thread, modes)
    return Journal(ThreadHistory(thread, ledger, inbox, wait, user_id, origin, last), ledger, inbox)


class ThreadHistory:
    """The messages of a thread, and the lease under which a run writes them."""

    def __init__(
        self,
        thread: DrivenThread,
        ledger: ThreadLedger,
        inbox: ThreadInbox,
        wait: float,
        user_id: str | None,
        origin: tuple[ThreadKey, str | int] | None,
        last: int | None,
    ) -> None:
        self.unfinished: str | None = None
        self.is_loaded = False
        self.payer = user_id
        self._thread = thread
        self._ledger = ledger
        self._inbox = inbox
        self._wait = wait
        self._user_id = user_id
        self._origin = origin
        self._last = last  # how many messages to load; None: all
        self._settled: Thread | None = None  # of a long thread, what is not loaded again; its messages are in the list
        self._sent = 0  # how many messages the hooks left of the history, if one of them has asked for earlier ones
        self._turns: int | None = None  # since the last checkpoint of a turn, once they are counted
        self._is_owned = False
        self._has_ttl = False
        self._is_refused = False  # whether the saved part of a reply must not be kept

    @property
    def messages(self) -> list[Message]:
        return self._thread.messages

    @property
    def first_seq(self) -> int:
        return self._thread.first_seq

    @property
    def earlier_count(self) -> int:
        return self._thread.earlier

    @property
    def key(self) -> ThreadKey:
        return self._thread.key

    @property
    def extra(self) -> dict[str, Any]:
        return self._thread.extra

    @property
    def partial(self) -> AssistantMessage | None:
        return self._thread.partial

    @property
    def waiting_since(self) -> float | None:
        return self._thread.waiting_since

    # --- loading ------------------------------------------------------------------------------------------------------

    async def load(self, *, again: bool = False) -> None:
        known = self._thread
        if known.position is not None and known.unseen == 0 and not again and not self._is_overgrown():
            return
        await known.late.catch_up(known.key)
        if self._origin is not None:
            await self._fork(*self._origin)
            self._origin = None
        if self._user_id is not None and not self._is_owned:
            await known.store.read(users.require, self._user_id)
        stored, known.reply_before = await self._read()
        self._check_owner(stored.owner)
        self._has_ttl, self._is_owned = stored.has_ttl, stored.owner is not None
        self.payer = self._user_id or stored.owner
        self.unfinished = stored.run_id
        self._merge_extra(stored.extra)
        known.messages, known.position, known.unseen, self._turns = stored.messages, stored.position, 0, None
        self._settled = _settled(stored) if self._last is None else None
        known.first_seq = stored.seqs[0] if stored.seqs else stored.position.head + 1
        known.earlier = max(stored.message_count - len(stored.messages), 1) if stored.has_earlier else 0
        known.mail = max(stored.mail, known.mail if self._inbox.is_sending else 0)
        known.partial, known.has_partial = stored.partial, stored.partial is not None
        known.geometry, known.reply_id = _geometry_of(stored), history.last_reply_id(stored.messages)
        await self._ledger.refresh()

    async def _read(self) -> Tail:
        """The thread as it is stored, or the end of it."""
        store, key = self._thread.store, self._thread.key
        if self._last is None:
            known = self._settled and self._settled._replace(messages=self._thread.messages[: len(self._settled.seqs)])
            return Tail((known and await load_behind(store, key, known)) or await load(store, key) or Thread([], {}))
        return await load_tail(store, key, max(self._last, self._sent)) or Tail(Thread([], {}))

    def _is_overgrown(self) -> bool:
        """Whether runs have added so much to the end of a thread that it should be cut again."""
        return self._last is not None and len(self._thread.messages) > 2 * max(self._last, self._sent) + _SLACK

    async def earlier(self, limit: int, /) -> list[Message]:
        known = self._thread
        if not known.earlier or known.position is None:
            return []
        branch = known.position.branch
        page = await load(known.store, known.key, last=limit, before=known.first_seq)
        if page is None or page.position.branch != branch or not page.messages:  # it is not the thread that is known
            return []
        known.messages[:0], known.first_seq = page.messages, page.seqs[0]
        known.earlier = max(known.earlier - len(page.messages), 1) if page.has_earlier else 0
        self._sent = self._sent or 1
        return page.messages

    async def page(self, limit: int, before: int | None, /) -> Thread:
        known = self._thread
        page = await load(known.store, known.key, last=limit, before=known.first_seq if before is None else before)
        return page or Thread([], {})

    async def messages_of(self, run_id: str, /) -> list[Message]:
        row = await self._thread.store.read(runs.find, run_id, self._thread.key)
        return [] if row is None else await records.messages(self._thread.store, row)

    def sent(self, count: int, /) -> None:
        if self._sent:
            self._sent = count

    async def is_current(self) -> bool:
        position, store, key = self._thread.position, self._thread.store, self._thread.key
        if position is None or await listing.state(store, key) == "running":
            return False
        row = await store.read(threads.find, key)  # after the state: a run that has ended since has changed the version
        return position.version == (0 if row is None else row.version)

    async def _fork(self, origin: ThreadKey, at: str | int) -> None:
        """Make the fork that this is the journal of, unless an earlier attempt made it and failed afterwards."""
        store, key = self._thread.store, self._thread.key
        try:
            await fork_operations.fork(store, origin, at, new_id=key.id, user_id=self._user_id)
        except NotFound:
            raise
        except InputError:
            made = await store.read(forks.node, key)
            if made is None or made.origin != origin.id:
                raise

    def _check_owner(self, owner: str | None) -> None:
        thread_id = self._thread.key.id
        if owner is not None and self._user_id not in (None, owner):
            raise InputError(
                f"thread {thread_id!r} belongs to user {owner!r}, and this agent works for {self._user_id!r}; "
                f"use another thread, or a fork: cp.fork({thread_id!r}, user_id=...)"
            )

    def _merge_extra(self, stored: dict[str, Any]) -> None:
        thread = self._thread
        if not self.is_loaded:  # what the program set before the first run is added to what is stored
            thread.extra = {**stored, **thread.extra}
        elif encode_extra(thread.extra) == thread.saved_extra:  # else it is about to be saved, and wins
            thread.extra = stored.copy()
        thread.saved_extra, self.is_loaded = encode_extra(stored), True

    # --- the lease ----------------------------------------------------------------------------------------------------

    async def begin(self, driver: Driver, messages: Sequence[Message] = (), /) -> None:
        thread = self._thread
        before = thread.position or Position(0, 0)
        with thread.claiming(driver) as claimed:
            try:
                await self._claim(claimed, messages, before.version if messages else threads.ANY)
            except Aborted:
                if thread.held is None:
                    raise  # else the abort came after the commit: the run goes on, publishes it and then ends
        if messages:
            self.unfinished = None
            return
        if thread.position is not None and thread.position.version == before.version + 1:
            await self._ledger.refresh()
        else:
            await self.load(again=True)
            self.unfinished = None  # the run that wrote meanwhile has continued the interrupted one, or ended it

    async def _claim(self, claimed: Claimed, messages: Sequence[Message], expect: int) -> None:
        """Append the messages by a claim; while another run drives the thread, try again for `wait` seconds."""
        thread, rows = self._thread, [message_row(message) for message in messages]
        change, owner = Change(messages, claimed=claimed), None if self._is_owned else self._user_id
        assert thread.driver is not None
        driver = thread.driver
        begins = RunBegin(
            driver.run_id,
            driver.cause,
            self.payer,
            None if driver.cause == "resume" else driver.request,
            continues=driver.cause == "resume" and self.unfinished == driver.run_id,
            has_prompt=bool(messages),  # without the prompt, the key would stand for nothing
            takes_over=not messages or self.unfinished is not None,
        )

        async def attempt(dead_epoch: int) -> None:
            by = claimed.claim._replace(dead_epoch=dead_epoch)
            await thread.write(change, threads.append, rows, by=by, expect=expect, owner=owner, begins=begins)

        attempts = retry_while_driven(thread.store, attempt, self._wait)
        await (until_aborted(attempts, thread.driver.signal, _GRACE) if self._wait else attempts)

    async def finish(self, release: Release, spent: int = 0, stop: Stop = INTERRUPTED, /) -> bool:
        thread = self._thread
        try:
            extra = thread.changed_extra()
        except InputError:
            self.leave(spent)
            raise
        if thread.held is None and (extra is None or thread.position is None):
            return True
        try:
            if thread.late.has(thread.key):  # what comes behind it is late too
                charge, ends = self._charge(spent) if spent else None, self._end(Release.PAUSE, INTERRUPTED)
                thread.write_late("the end of a run", threads.release_late, extra=extra, charge=charge, ends=ends)
                thread.drop()
                return True
            await self._release(release, extra, spent, stop)
        except BaseException:
            thread.drop()
            raise
        self._is_refused = False
        return thread.held is None

    async def _release(self, release: Release, extra: str | None, spent: int, stop: Stop) -> None:
        by, expect = self._thread.right_to_write()
        ends = self._end(release, stop) if self._thread.held else None
        await self._thread.write(
            Change(extra=extra),
            threads.append,
            [],
            by=by,
            expect=expect,
            extra=extra,
            release=release if self._thread.held else None,
            clear_partial=self._is_refused,
            charge=self._charge(spent) if spent else None,
            ends=ends,
        )
        if ends is not None and self._thread.held is None:
            self.unfinished = ends.id if release is Release.PAUSE else None

    def _end(self, release: Release, stop: Stop) -> RunEnd:
        """How the run that holds the lease ends, for its row."""
        assert self._thread.driver is not None
        run_id, error = (
            self._thread.driver.run_id,
            None if stop.error is None else column_text(stop.error[:_LONGEST_ERROR]),
        )
        if release is not Release.PAUSE:
            return RunEnd(run_id, "ended", stop.reason, error, stop.retries)
        if stop.reason == "waiting":
            return RunEnd(run_id, "waiting", "waiting", error, stop.retries)
        outcome = "handed over" if stop.reason == "handed_over" else "interrupted"
        return RunEnd(run_id, outcome, None, error, stop.retries)

    def leave(self, spent: int = 0, /) -> None:
        thread = self._thread
        thread.position = None
        if thread.held is not None:
            by, charge = thread.lease(), self._charge(spent) if spent else None
            ends = self._end(Release.PAUSE, INTERRUPTED)
            thread.drop()
            thread.store.submit(threads.append, thread.key, [], by=by, release=Release.PAUSE, charge=charge, ends=ends)

    def _charge(self, spent: int) -> Charge | None:
        return None if self.payer is None else Charge(self.payer, spent)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def append(self, messages: Sequence[Message], /) -> None:
        thread, rows = self._thread, [message_row(message) for message in messages]
        change = Change(messages, reserve=0)
        await thread.write(change, threads.append, rows, by=thread.lease(), clear_partial=thread.has_partial)

    async def append_prompt(self, messages: Sequence[Message], /) -> None:
        thread = self._thread
        if thread.driver is None or thread.driver.request is None:
            await self.append(messages)
            return
        rows, (run_id, _, _, request) = [message_row(message) for message in messages], thread.driver
        change = Change(messages, reserve=0)
        await thread.write(change, threads.append_requested, rows, by=thread.lease(), run=run_id, request=request)

    async def append_reply(self, reply: AssistantMessage, ending: Ending, /) -> None:
        thread, release, extra = self._thread, ending.release, None
        reserve, clear_partial = len(reply.tool_calls), thread.has_partial
        if ending.release or ending.checkpoint:
            try:
                extra = thread.changed_extra()
            except InputError:  # the reply is stored without it; `finish` raises
                release = None
        if self._turns is not None and not reply.failed:
            self._turns = 0 if ending.checkpoint else self._turns + 1
        change, row, before = Change([reply], extra, reserve), message_row(reply), thread.position
        charge = None if ending.spent is None else self._charge(ending.spent)
        query, options = (
            (threads.append, {"reserve": reserve}) if ending.checkpoint is None else _with_checkpoint(ending)
        )
        write = thread.submit(
            query,
            [row],
            by=thread.lease(),
            extra=extra,
            release=release,
            clear_partial=clear_partial,
            charge=charge,
            ends=None if release is None else self._end(release, ending.stop),
            **options,
        )
        try:
            await thread.stale_until(write, lambda position: thread.apply(position, change))
        except BaseException:
            if before is not None and reply.content and may_be_late(write):
                thread.write_late(
                    "a reply",
                    threads.append_late,
                    message=row,
                    behind=before,
                    reserve=reserve,
                    extra=extra,
                    charge=charge,
                )
            raise

    async def set_aside(self, wanted: int, least: int, /) -> int | None:
        if self.payer is None:
            return None
        thread = self._thread
        granted = await thread.submit(users.reserve, self.payer, wanted, least, by=thread.lease())
        return granted.tokens

    async def checkpoint(self, checkpoint: NewCheckpoint, /) -> bool:
        thread = self._thread
        held = thread.held
        if held is None and (thread.position is None or thread.unseen):
            return False  # a run is about to begin, or the thread must be loaded first
        if checkpoint.summary is None:
            summary = history.one_line(history.last_reply(self.messages) or thread.reply_before)
            checkpoint = msgspec.structs.replace(checkpoint, summary=summary)
        new, extra = checkpoints.encoded_checkpoint(checkpoint), thread.changed_extra()
        by, expect = thread.right_to_write()
        write = thread.submit(putting.put_here, new, by=by, expect=expect, extra=extra)
        try:
            await settled(write, lambda position: thread.apply(position, Change(extra=extra)))
        except ThreadMoved:
            if held is not None:
                raise
            thread.position = None  # another writer was faster: load the thread first
            return False
        except (LeaseLost, ThreadBusy):
            if thread.held == held:
                raise
            return False  # this agent's run has begun or ended meanwhile
        self._turns = None
        return True

    async def turns(self, every: int, /) -> int:
        if self._turns is None:
            self._turns = await checkpoints.turns(self._thread.store, self._thread.key, every)
        return self._turns

    async def marked(self, marks: Sequence[str], /) -> MarkedMessages:
        known = self._thread
        after = known.first_seq - 1 if known.earlier else 0
        summary, ids, count = await known.store.read(memories.marked, known.key, marks, after=after)
        return MarkedMessages(json.loads(summary) if summary else "", ids, count)

    def partial_writer(self, reply_id: str, created_at: str, /) -> PartialSaver | None:
        return PartialWriter(self._thread.store, self._thread.key, self._lease_for_partial, reply_id, created_at)

    def _lease_for_partial(self) -> Lease | None:
        if self._thread.held is None:
            return None
        self._thread.has_partial = True
        return self._thread.lease()

    def shown_to_followers(self, publish: Publish, /) -> Publish:
        return arriving.beside(self._thread.store, self._thread.key, publish)

    def refuse_partial(self) -> None:
        self._is_refused, self._thread.has_partial = self._thread.has_partial, False

    async def tidy(self) -> None:
        if self._has_ttl:
            await retention.tidy(self._thread.store, self._thread.key)


def _with_checkpoint(ending: Ending) -> tuple[Callable[..., Position], dict[str, Any]]:
    """The query that stores a reply and makes a checkpoint behind it, when no call is open."""
    assert ending.checkpoint is not None
    return putting.append, {"new": checkpoints.encoded_checkpoint(ending.checkpoint)}


def _settled(thread: Thread) -> Thread | None:
    """What is before the last reply of a long thread: only removals change it, and those are noticed."""
    replies = (place for place in range(len(thread.messages) - 1, -1, -1) if _is_reply(thread.messages[place]))
    count = next(replies, 0)
    return thread._replace(messages=[], seqs=thread.seqs[:count]) if count > PAGE else None


def _is_reply(message: Message) -> bool:
    return isinstance(message, AssistantMessage)


def _geometry_of(thread: Thread) -> Geometry:
    first = 0
    for message, seq in zip(reversed(thread.messages), reversed(thread.seqs), strict=True):
        if isinstance(message, AssistantMessage):
            first = seq + 1
            break
    taken = frozenset(seq for seq in thread.seqs if seq >= first)
    return Geometry(first, thread.position.head, taken, thread.unledgered)
