"""From rows to items: what a follower has sent of a thread, and what it sends next.

No I/O: `Follower.tell` gets what one read has found (`LogPage`), compares it with what was sent before, and returns the
items that are new. So the items depend only on the rows, in the order in which they are found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple, cast

from byssus.messages import (
    AssistantMessage,
    Message,
    TextContent,
    ThinkingContent,
    ToolResultMessage,
    UserMessage,
    decode,
)
from byssus.queries.following.rows import CallRow, FollowedRow, MadeRow, Mail, RanRow
from byssus.queries.log import branches
from byssus.queries.log.branches import Segment
from byssus.queries.log.tool_calls import ANSWERED, OPEN, WAITING
from byssus.threads.following.hub import LiveReply
from byssus.values.following.cursors import Cursor, Offset, Seen, reply_mark, thread_mark
from byssus.values.following.growth import SHOWN, TEXT, THINKING, Piece, Strand
from byssus.values.following.items import (
    CallAnswered,
    CallEnded,
    CallStarted,
    CallWaiting,
    CaughtUp,
    CheckpointAdded,
    FollowItem,
    InboxHeard,
    InboxPut,
    InboxWithdrawn,
    Lagged,
    MessageAdded,
    ReplyDelta,
    ReplyReset,
    RunBegan,
    RunEnded,
    ThreadDeleted,
    ThreadRewound,
    TitleChanged,
)
from byssus.values.results import StopReason
from byssus.values.thread_key import ThreadKey

_MOST_UNREAD = 256_000  # characters of a reply: a follower that is behind by more gets `Lagged`
_LONGEST_DELTA = 32_000  # characters


class Path(NamedTuple):
    """Which thread is read, along which branch: a rewind changes the branch, and a deletion the thread."""

    thread: int
    made_at: str
    branch: int
    segments: list[Segment]

    def is_of(self, row: FollowedRow) -> bool:
        return (self.thread, self.made_at) == (row.key, row.made_at)


class LogPage(NamedTuple):
    """What one read has found: the next messages that were not seen, and what stands beside them.

    `is_all` says that there are no more messages. Only then is the rest of the thread's state sent.
    """

    row: FollowedRow
    path: Path
    seen: Seen  # before the page
    page: list[tuple[int, Message]]
    last: int  # the seq up to which calls and checkpoints were looked for
    is_all: bool
    calls: list[CallRow]
    made: list[MadeRow]
    runs: list[RanRow]
    mail: Mail
    arriving: SavedPieces | None = None  # what another process has saved of a reply

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing more to read."""
        return self.is_all and self.mail.is_all and (self.arriving is None or self.arriving.is_all)

    def last_seq_of(self, run: RanRow) -> int:
        """The last seq of a run along the path: a rewind may have left the rest of it, or all of it (0)."""
        along = [segment.upto for segment in self.path.segments if segment.has(run.branch, run.first_seq)]
        return min(run.last_seq or 0, *along) if along else 0


class SavedPieces(NamedTuple):
    """Pieces of a reply that is arriving. `saved_at` and `number` say up to which saved piece."""

    reply: str
    pieces: list[Piece]
    saved_at: str = ""
    number: int = 0
    is_all: bool = True


class Follower:
    """What was sent of a thread so far."""

    def __init__(self, thread_key: ThreadKey) -> None:
        self._key = thread_key
        self.path: Path | None = None
        self.seen = Seen()
        self.stamp: int | None = None  # of the row that was found last
        self.version = -1  # of the thread, when its state was sent last; -1: never
        self.calls_from = 0  # calls of earlier replies were sent, and have ended
        self.made_after = -1  # checkpoints up to this seq were sent
        # Status, attempts, and when it was asked about last, by reply and index.
        self._calls: dict[tuple[int, int], tuple[str, int, str | None]] = {}
        self.inbox: frozenset[str] = frozenset()  # the messages that waited when they were read last
        self._title: str | None = ""  # None: what the client knows may be old
        self.runs_from = 0  # the key of the run that was sent last
        self._runs: dict[int, tuple[int, str | None]] = {}  # attempts, and how the last one was said to end, by key
        self._is_caught_up = False
        self.saved = ("", 0)  # up to which saved piece of a reply it was read: see `SavedPieces`
        self._last_reply: str | None = None  # the id of the reply that was stored last
        self._is_driven = False  # whether a run held the thread when its row was found last
        self._reply: str | None = None  # the mark of the reply that is arriving
        self._offsets: dict[Strand, int] = {}

    @property
    def cursor(self) -> str:
        return str(self._cursor())

    def _cursor(self) -> Cursor:
        if self.path is None:
            return Cursor("000000", 0)
        mark = thread_mark(*self._key, self.path.made_at)
        blocks = sorted((block, Offset(kind, length)) for (block, kind), length in self._offsets.items())
        return Cursor(mark, self.path.branch, self.seen, self._reply, tuple(blocks))

    def begin_at(self, cursor: Cursor, path: Path, calls_from: int, runs_from: int) -> None:
        """Go on behind a cursor, on the branch that it is of."""
        self.path, self.seen, self.calls_from, self.runs_from = path, cursor.seen, calls_from, runs_from
        self.made_after = cursor.seen.upto - 1  # one that is there may have been made since
        self._title = None
        self._reply = cursor.reply
        self._offsets = {(block, offset.kind): offset.length for block, offset in cursor.offsets}

    # --- items --------------------------------------------------------------------------------------------------------

    def tell_deleted(self) -> list[FollowItem]:
        """The thread is not there any more."""
        if self.path is None:
            return []
        item = ThreadDeleted(self.cursor)
        self.__init__(self._key)  # type: ignore[misc]
        return [item]

    def tell(self, found: LogPage) -> Iterator[FollowItem]:
        """The items that are new. All of them must be taken."""
        if self._is_caught_up and not found.is_all:
            self._is_caught_up = False
            yield Lagged(self.cursor)
        yield from self._go_along(found)
        calls: dict[str, list[CallRow]] = {}
        for call in found.calls:
            calls.setdefault(call.call_id, []).append(call)
        made = list(found.made)
        for seq, message in found.page:
            while made and made[0].seq < seq:
                yield self._checkpoint(made.pop(0))
            yield from self._runs_before(seq, found)
            yield from self._message(seq, message, calls)
        yield from self._begun_again(found)
        for call in found.calls:
            if not (found.is_all and call.status == ANSWERED):
                yield from self._call(call)
        for checkpoint in made:
            yield self._checkpoint(checkpoint)
        self.made_after = found.last
        if found.is_all:
            yield from self._behind_the_last(found)
        self._forget(found)

    def _behind_the_last(self, found: LogPage) -> Iterator[FollowItem]:
        """What is sent when there are no more messages."""
        if found.arriving is not None:
            self.saved = (found.arriving.saved_at, found.arriving.number)
            yield from self.tell_arriving(found.arriving)
        elif self._reply is not None and found.row.saved_at is None and not found.row.is_driven:
            yield from self._reset()  # its run has ended without it
        yield from self._runs_before(found.last + 1, found)
        for call in found.calls:
            if call.status == ANSWERED:  # the run that waited for the answer has stopped before it
                yield from self._call(call)
        yield from self._state(found)

    def _go_along(self, found: LogPage) -> Iterator[FollowItem]:
        before, self.path, self.seen = self.path, found.path, found.seen
        self._is_driven = bool(found.row.is_driven)
        if before is not None and before.branch != found.path.branch:
            parting = branches.parting(before.segments, found.path.segments)
            self._calls = {key: sent for key, sent in self._calls.items() if key[0] <= parting}
            self.calls_from = min(self.calls_from, parting)
            self._reply, self._offsets = None, {}
            yield ThreadRewound(self.cursor, min(parting, found.row.head))

    def _message(self, seq: int, message: Message, calls: dict[str, list[CallRow]]) -> Iterator[FollowItem]:
        if isinstance(message, ToolResultMessage):
            for call in calls.get(message.tool_call_id, ()):
                if call.reply < seq:
                    yield from self._call(call)
        if isinstance(message, UserMessage) and message.id in self.inbox:
            self.inbox -= {message.id}
            yield InboxHeard(self.cursor, message.id)
        if self._reply is not None:
            yield from self._close_reply(message)
        self.seen = self.seen.with_seq(seq, is_reply=isinstance(message, AssistantMessage))
        if isinstance(message, AssistantMessage):
            self._last_reply = message.id
        yield MessageAdded(self.cursor, message, seq)

    # --- replies that are arriving ------------------------------------------------------------------------------------

    def is_behind(self, reply: LiveReply) -> bool:
        """Whether more of a reply was not read yet than is held for a follower."""
        unread = sum(reply.growth.offsets.values()) - sum(self._offsets.values())
        return self._is_caught_up and unread > _MOST_UNREAD

    def tell_live(self, reply: LiveReply) -> Iterator[FollowItem]:
        """What is new of a reply that arrives in this process."""
        if self.path is None or not self._is_driven or self._last_reply == reply.id:
            return  # without a run that holds the thread, the reply was refused or left: it is never stored
        if self.is_behind(reply):
            yield Lagged(self.cursor)
        is_all = False
        while not is_all:  # a part at a time: a follower that stops reading here holds no more than that
            known = self._offsets if self._reply == reply_mark(reply.id) else {}
            pieces = reply.growth.since(known, most=_LONGEST_DELTA)
            is_all = all(len(piece.text) < _LONGEST_DELTA or piece.kind not in SHOWN for piece in pieces)
            yield from self.tell_arriving(SavedPieces(reply.id, pieces))

    def tell_arriving(self, arriving: SavedPieces) -> Iterator[FollowItem]:
        """What is new in these pieces."""
        mark = reply_mark(arriving.reply)
        if self._reply not in (None, mark):
            yield from self._reset()
        for piece in arriving.pieces:
            strand = (piece.block, piece.kind)
            known = self._offsets.get(strand, -1)
            if piece.kind in SHOWN and piece.offset + len(piece.text) > known:
                self._reply = mark
                yield from self._delta(arriving.reply, piece, max(known, 0))

    def _delta(self, reply: str, piece: Piece, offset: int) -> Iterator[FollowItem]:
        text = piece.text[offset - piece.offset :]
        for first in range(0, len(text) or 1, _LONGEST_DELTA):
            delta = text[first : first + _LONGEST_DELTA]
            self._offsets[piece.block, piece.kind] = offset + first + len(delta)
            yield ReplyDelta(
                self.cursor, reply, piece.block, piece.kind, offset + first, delta, piece.call_id, piece.tool_name
            )

    def _close_reply(self, message: Message) -> Iterator[FollowItem]:
        """A message was stored while a reply was arriving: it is that reply, or the reply is void."""
        rest = None
        if isinstance(message, AssistantMessage) and message.id and reply_mark(message.id) == self._reply:
            rest = self._rest_of(message)
        if rest is None:
            yield from self._reset()
            return
        assert message.id is not None  # type: ignore[union-attr]
        for piece in rest:
            yield from self._delta(message.id, piece, piece.offset)  # type: ignore[union-attr]
        self._reply, self._offsets = None, {}

    def _rest_of(self, message: AssistantMessage) -> list[Piece] | None:
        """What of the text of a stored reply was not sent; None if what was sent is not its beginning."""
        rest = []
        texts = {
            TEXT: [block.text for block in message.content if isinstance(block, TextContent) and block.text],
            THINKING: [block.thinking for block in message.content if isinstance(block, ThinkingContent)],
        }
        behind = max((block for block, _ in self._offsets), default=-1) + 1
        for kind, stored in texts.items():
            known = sorted((block, length) for (block, each), length in self._offsets.items() if each == kind)
            if len(known) > len(stored):
                return None
            known += [(behind + number, 0) for number in range(len(stored) - len(known))]
            behind += len(stored)
            for (block, length), text in zip(known, stored, strict=True):
                if length > len(text):
                    return None
                if length < len(text):
                    rest.append(Piece(block, kind, length, text[length:]))
        return rest

    def _reset(self) -> Iterator[FollowItem]:
        self._reply, self._offsets = None, {}
        yield ReplyReset(self.cursor)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _begun_again(self, found: LogPage) -> Iterator[FollowItem]:
        """Another attempt of the last run: before the calls, which it may have started or asked about again."""
        for run in found.runs[-1:]:
            if run.attempts > self._runs.get(run.key, (run.attempts, None))[0]:
                self._runs[run.key] = (run.attempts, None)
                yield RunBegan(self.cursor, run.id, run.cause, run.attempts)

    def _runs_before(self, seq: int, found: LogPage) -> Iterator[FollowItem]:
        """The runs that began at this seq or before it, and ended before it."""
        for run in found.runs:
            attempts, ending = self._runs.get(run.key, (0, None))
            if run.first_seq <= seq and run.attempts > attempts:
                attempts, ending, self.runs_from = run.attempts, None, max(self.runs_from, run.key)
                yield RunBegan(self.cursor, run.id, run.cause, run.attempts)
            if attempts and run.stop_reason not in (None, ending) and found.last_seq_of(run) < seq:
                ending = run.stop_reason
                yield RunEnded(self.cursor, run.id, cast("StopReason", ending), run.error)
            if attempts:
                self._runs[run.key] = (attempts, ending)

    def _call(self, call: CallRow) -> Iterator[FollowItem]:
        """What is new of a tool call."""
        key = (call.reply, call.place)
        before, now = self._calls.get(key, ("", 0, None)), (call.status, call.attempts, call.asked_at)
        self._calls[key] = now
        if now == before:
            return
        status, attempts, _ = before
        cursor, arguments = self.cursor, json.loads(call.arguments)
        if call.status == WAITING:
            about = (call.call_id, call.name, arguments, call.reply)
            yield CallWaiting(cursor, *about, call.reason or "", call.question or "", call.asked_at or "")
        elif call.answer is not None and status in (WAITING, ""):
            answer, by = json.loads(call.answer), (call.answered_by, call.answered_from)
            yield CallAnswered(cursor, call.call_id, call.name, call.reply, answer, *by)
        if call.attempts > attempts:
            yield CallStarted(cursor, call.call_id, call.name, arguments, call.reply, call.attempts)
        if call.status not in OPEN:
            yield CallEnded(cursor, call.call_id, call.name, call.reply, call.status)

    def _forget(self, found: LogPage) -> None:
        """Of replies and runs that are not the last, nothing new comes."""
        replies = [seq for seq, message in found.page if isinstance(message, AssistantMessage)]
        self.calls_from = max(self.calls_from, *replies, 0)
        self._calls = {key: sent for key, sent in self._calls.items() if key[0] >= self.calls_from}
        self._runs = {key: sent for key, sent in self._runs.items() if key >= self.runs_from}

    def _checkpoint(self, made: MadeRow) -> FollowItem:
        about = json.loads(made.about)
        tags, summary = about.get("tags") or [], about.get("summary")
        return CheckpointAdded(self.cursor, made.id, made.step, made.seq, tags, summary)

    def _state(self, found: LogPage) -> Iterator[FollowItem]:
        """What stands beside the log. Each item can be repeated after a reconnect."""
        row, cursor = found.row, self.cursor
        self.stamp, self.version = row.stamp if found.is_whole else None, row.version
        if row.title != self._title:
            self._title = row.title
            yield TitleChanged(cursor, row.title)
        for message_id in sorted(self.inbox.difference(found.mail.ids)):
            yield InboxWithdrawn(cursor, message_id)
        for each in found.mail.new:
            message = decode(each.body)
            assert isinstance(message, UserMessage)
            yield InboxPut(cursor, each.id, each.kind, message, each.created_at)
        self.inbox = self.inbox.intersection(found.mail.ids) | {each.id for each in found.mail.new}
        if found.mail.is_all and not self._is_caught_up:
            self._is_caught_up = True
            questions = [call.call_id for call in found.calls if call.status == WAITING]
            yield CaughtUp(cursor, row.run, list(found.mail.ids), questions)
