"""A reply that is arriving in this process: it is saved piece by piece, and shown to the followers of its thread.

- Only what is new is saved, so a long reply is written once, and not again with each save. A write that failed leaves a
  gap: then the whole is saved again.
- Followers in this process read the reply from memory (`LiveReply`), as far as it was published. Those in other
  processes read what was saved. They leave a note that they watch, and it is saved more often while they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from byssus.errors import LeaseLost, StoreNotOpen
from byssus.events import AgentEnd, AgentStart, Event, MessageEnd, MessageStart, MessageUpdate
from byssus.messages import AssistantMessage, encode
from byssus.queries.following import rows as following
from byssus.queries.log import threads
from byssus.queries.log.leases import Lease
from byssus.signals import Signal
from byssus.store.database import Store
from byssus.stream import Publish
from byssus.threads.following import hub
from byssus.threads.following.hub import LiveReply
from byssus.values.following.growth import Growth, Strand, encode_pieces
from byssus.values.thread_key import ThreadKey

_log = logging.getLogger("byssus.agent")


class PartialWriter:
    """Saves one reply as it grows. `lease` returns the lease of its run, or None if it has none any more."""

    def __init__(
        self, store: Store, thread_key: ThreadKey, lease: Callable[[], Lease | None], reply_id: str, created_at: str
    ) -> None:
        self._store = store
        self._key = thread_key
        self._lease = lease
        self._head = {"id": reply_id, "created_at": created_at, "content": []}
        self._saved: dict[Strand, int] = {}
        self._number = 0  # of the last piece; 0: the whole is to be saved
        self._is_watched = False
        self._is_asking = False

    def save(self, growth: Growth, so_far: Callable[[], AssistantMessage]) -> Future[None] | None:
        """Submit what is new, without waiting for the commit. None: there is nothing to save."""
        pieces = growth.since(self._saved if self._number else {})
        if not pieces:
            return None
        lease = self._lease()
        if lease is None:
            refused: Future[None] = Future()
            refused.set_exception(LeaseLost(self._key.id))
            return refused
        body = encode_pieces(pieces)
        if self._number:
            write = self._store.submit(threads.add_piece, self._key, self._number + 1, body, by=lease)
        else:
            head = encode(msgspec.structs.replace(so_far(), **self._head))
            write = self._store.submit(threads.save_partial, self._key, head, by=lease, piece=body)
        self._number += 1
        self._saved = {**self._saved, **{(p.block, p.kind): p.offset + len(p.text) for p in pieces}}
        write.add_done_callback(self._settle)
        return write

    def _settle(self, write: Future[None]) -> None:
        if (error := write.exception()) is not None:
            self._number, self._saved = 0, {}
            # A write that counts will raise it in the run.
            _log.debug("a part of a reply could not be saved: %s", type(error).__name__)

    def is_watched(self) -> bool:
        """Whether another process watches. The answer may be a moment old, so that asking takes no time."""
        if not self._is_asking:
            self._is_asking = True
            try:
                self._store.submit_read(following.is_watched, self._key).add_done_callback(self._note)
            except StoreNotOpen:
                return False
        return self._is_watched

    def _note(self, answer: Future[bool]) -> None:
        self._is_asking = False
        self._is_watched = answer.exception() is None and answer.result()


def beside(store: Store, thread_key: ThreadKey, publish: Publish) -> Publish:
    """Show the followers of the thread what is published of a run's replies."""
    center = hub.of(store)
    live: list[LiveReply] = []  # the reply that is arriving, if there is one

    def show(event: Event, signal: Signal) -> Any:
        backlog = publish(event, signal)
        if type(event) is MessageUpdate:
            if live:
                live[0].growth.add(event.stream_event)
                center.ring(thread_key)
        elif isinstance(event, MessageStart):
            message = event.message
            if isinstance(message, AssistantMessage) and not message.content and message.id is not None:
                live[:] = [LiveReply(message.id, Growth())]
                center.live[thread_key] = live[0]
        elif isinstance(event, AgentStart):
            center.here.add(thread_key)
        elif isinstance(event, MessageEnd | AgentEnd):
            center.reply_ended(thread_key, live)
            if isinstance(event, AgentEnd):
                center.here.discard(thread_key)
        return backlog

    return show
