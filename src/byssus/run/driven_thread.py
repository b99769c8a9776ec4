"""A thread that a run drives: what this process knows of it, the run's lease, and the writes that carry the lease.

The history, the ledger and the inbox of a journal work on one of these.

- What is known changes in one place: `apply`, after a commit. So a message joins the list when it is on disk.
- While a write of the history is under way, and after one that failed, `position` is None: what is known may differ
  from what is stored, and is loaded again before the next run. A write that `ThreadBusy` refused changed nothing, so
  what was known is still known.
- A cancelled caller still learns of a commit: a write settles before the cancellation is delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from byssus.errors import LeaseLost, ThreadBusy
from byssus.messages import AssistantMessage, Message
from byssus.queries.log import leases, threads
from byssus.queries.log.leases import Claim, Held, Lease, Unleased
from byssus.queries.log.threads import Position
from byssus.queries.log.tool_calls import LedgerEntry
from byssus.run import late_writes
from byssus.run.journal import Driver
from byssus.run.late_writes import LateWrite, LateWrites
from byssus.store import keeper
from byssus.store.database import Store
from byssus.store.keeper import Keeper
from byssus.store.operations import HasStore
from byssus.threads.encoding import encode_extra
from byssus.values import clock
from byssus.values.thread_key import ThreadKey

T = TypeVar("T")


class Geometry(NamedTuple):
    """The slots behind the last reply: the seq of call `i`'s result is `first + i`, and the reply has `first - 1`.

    These combinations are legal:

    - `first` 0: the thread has no reply, and so no call.
    - `reserved` = `first - 1`: nothing is behind the reply. Either it has no calls, or the program that stored it
      reserved no slots. A result goes to the end of the log.
    - `reserved` >= `first`, nothing `taken`: an agent stored the reply; `reserved` is the slot of its last call.
    - `reserved` >= `first`, some `taken`: calls were settled, or the thread was loaded and has messages behind the
      reply. Then `reserved` is the thread's last seq, which may be before or behind the slot of the last call.

    Calls whose seq, or whose reply's, is at most `unledgered` may have been started without an entry in the ledger.
    """

    first: int = 0
    reserved: int = 0  # the last seq that may be a slot
    taken: frozenset[int] = frozenset()  # the seqs from `first` on that hold a message
    unledgered: int = 0

    @property
    def reply(self) -> int:
        """The seq of the reply."""
        return self.first - 1

    def seq(self, call_index: int) -> int:
        """The seq that belongs to a call's result."""
        return self.first + call_index

    def is_free(self, call_index: int) -> bool:
        """Whether the call's slot was reserved and holds no message."""
        seq = self.seq(call_index)
        return seq <= self.reserved and seq not in self.taken

    def is_recorded(self, call_index: int) -> bool:
        """Whether the ledger would have an entry if the call had been started."""
        return self.is_free(call_index) and self.seq(call_index) > self.unledgered

    @property
    def is_foreign(self) -> bool:
        """Whether the reply came from where its calls may have been started: another thread, branch or database."""
        return 0 < self.reply <= self.unledgered

    def settled(self, call_index: int) -> Geometry:
        return self._replace(taken=self.taken | {self.seq(call_index)})


class Claimed(NamedTuple):
    """A claim for the lease, the token under which this process knows the lease before it exists, and its keeper."""

    claim: Claim
    token: str
    keeper: Keeper[Held]


class Change(NamedTuple):
    """What a write changes in what is known, once it is committed."""

    messages: Sequence[Message] = ()  # they join the list
    extra: str | None = None  # what was saved; None: the extra was not part of the write
    reserve: int | None = None  # so many slots were reserved behind the messages; None: the slots stay as they are
    settled: int | None = None  # the index of a call whose result was stored and joins the list later
    claimed: Claimed | None = None  # the write has taken the lease


class DrivenThread:
    """What is known of one thread. The parts of its journal read and write these fields."""

    def __init__(self, database: HasStore, thread_key: ThreadKey, lease_seconds: float) -> None:
        self.key = thread_key
        self.messages: list[Message] = []
        self.first_seq = 1  # where the list begins; before that, there are `earlier` messages
        self.earlier = 0
        self.reply_before: AssistantMessage | None = None  # the last reply, if it is before the list
        self.extra: dict[str, Any] = {}
        self.saved_extra = "{}"
        self.entries: dict[int, LedgerEntry] = {}
        self.position: Position | None = None  # None: not loaded, or stale
        self.geometry = Geometry()
        self.reply_id: str | None = None  # of the last reply
        self.unseen = 0  # results that are stored and not in the list yet
        self.partial: AssistantMessage | None = None  # the saved part of a reply whose run was interrupted
        self.has_partial = False  # whether the store may hold a part of a reply
        self.mail = 0  # what is known to wait in the inbox: 2 steering, 1 only follow-ups
        self.held: Held | None = None
        self.driver: Driver | None = None  # the run that claimed the thread last
        self.database = database
        self._lease_seconds = lease_seconds
        self._keeper: Keeper[Held] | None = None
        self._under_way: dict[asyncio.Future[Any], float] = {}  # writes, and when they were submitted

    @property
    def store(self) -> Store:
        return self.database.store

    # --- the lease ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claiming(self, driver: Driver) -> Iterator[Claimed]:
        """A claim for the thread. Its token counts as alive until the claim has failed or the lease is dropped."""
        token = clock.new_id()
        self.driver = driver
        keeper.expect(token)
        try:
            store, seconds = self.store, self._lease_seconds
            claim = Claim(store.presence.name(token, seconds), driver.run_id, seconds)
            yield Claimed(claim, token, keeper.of(store, leases.renew, leases.aborted))
        finally:
            if self.held is None:
                keeper.forget(token)

    def lease(self) -> Lease:
        """The lease that is held; raises `LeaseLost` if there is none."""
        if self.held is None:
            raise LeaseLost(self.key.id)
        return Lease(self.held.epoch, self.held.seconds)

    def right_to_write(self) -> tuple[Lease | Unleased, int]:
        """The lease; or outside a run, the condition that the thread still has the known version."""
        if self.held is not None:
            return self.lease(), threads.ANY
        return threads.UNLEASED, threads.ANY if self.position is None else self.position.version

    def drop(self) -> None:
        """Stop renewing the lease."""
        if self.held is not None and self._keeper is not None:
            self._keeper.drop(self.held)
            self.held = None

    def _hold(self, claimed: Claimed, epoch: int) -> None:
        assert self.driver is not None
        self.held = Held(self.key.id, self.key.namespace, epoch, claimed.claim.seconds, claimed.token)
        self._keeper = claimed.keeper
        self._keeper.keep(self.held, self.driver.signal.abort)

    # --- writes -------------------------------------------------------------------------------------------------------

    async def write(self, change: Change, query: Callable[..., Position], *args: Any, **kwargs: Any) -> None:
        """Run a query of the history and apply the change."""
        write = self.submit(query, *args, **kwargs)
        await self.stale_until(write, lambda position: self.apply(position, change))

    def submit(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """Submit a write to this thread."""
        write: asyncio.Future[T] = self.store.write(query, self.key, *args, **kwargs)
        self._under_way[write] = time.monotonic()
        write.add_done_callback(self._under_way.pop)
        return write

    @property
    def waiting_since(self) -> float | None:
        """When the oldest pending write was submitted, by the monotonic clock."""
        return next(iter(self._under_way.values()), None)

    # --- what could not be written ------------------------------------------------------------------------------------

    @property
    def late(self) -> LateWrites:
        return late_writes.of(self.store)

    def write_late(self, what: str, query: Callable[..., None], **arguments: Any) -> None:
        """Keep what the run has finished, and write it as soon as that is possible."""
        if self.held is not None:
            arguments["epoch"] = self.held.epoch
            self.late.add(LateWrite(what, self.key, query, arguments))

    async def stale_until(self, write: asyncio.Future[T], note: Callable[[T], None]) -> None:
        """Wait for a write and note its outcome; until that is known, what is known counts as stale."""
        before, self.position = self.position, None
        try:
            await settled(write, note)
        except ThreadBusy:
            self.position = before
            raise

    def apply(self, position: Position, change: Change) -> None:
        """Bring what is known up to date with a commit."""
        if change.claimed is not None:
            self._hold(change.claimed, position.epoch)
        elif self.held is not None and not position.is_held:
            self.drop()
        if self.position is None or position.version > self.position.version:
            self.position = position
        self.mail = max(self.mail, position.mail)
        self.messages.extend(change.messages)
        if change.extra is not None:
            self.saved_extra = change.extra
        if change.reserve is not None:
            self._open_slots(position.head, change)
        if change.settled is not None:
            self.geometry = self.geometry.settled(change.settled)
            self.entries.pop(change.settled, None)
            self.unseen += 1

    def _open_slots(self, head: int, change: Change) -> None:
        first = head - (change.reserve or 0) + 1
        self.geometry = Geometry(first, head, unledgered=self.geometry.unledgered)
        self.entries, self.partial, self.has_partial = {}, None, False
        if change.messages and isinstance(change.messages[-1], AssistantMessage):
            self.reply_id = change.messages[-1].id

    def changed_extra(self) -> str | None:
        """The extra as it is to be saved, or None if it is saved already. Raises `InputError` if it is no JSON."""
        extra = encode_extra(self.extra)
        return None if extra == self.saved_extra else extra


async def settled(write: asyncio.Future[T], note: Callable[[T], None]) -> None:
    """Wait for a write and note its outcome, also if the caller is cancelled meanwhile."""
    try:
        await write
    finally:
        if is_committed(write):
            note(write.result())


def is_committed(write: asyncio.Future[Any]) -> bool:
    return write.done() and write.exception() is None


def may_be_late(write: asyncio.Future[Any] | None) -> bool:
    """Whether a write failed only because it could not be made in time."""
    if write is None or not write.done():
        return False
    return isinstance(write.exception(), (*late_writes.TRANSIENT, LeaseLost))
