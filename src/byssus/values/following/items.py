"""What `cp.follow()` yields: the items of a thread, each with a cursor.

- A cursor is a position in the thread's log. `follow(thread, after=item.cursor)` continues behind the item, at any time
  and in any process.
- Messages and the text of a reply come exactly once. Items that describe a state (a title, a queued message, a call
  that waits) can be repeated after a reconnect: they are idempotent by their ids.
- `MessageAdded` has the whole message and is the truth. `ReplyDelta`s show a reply while it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from msgspec import Struct

from byssus.messages import Message, UserMessage
from byssus.values.following.records import Record, read

if TYPE_CHECKING:
    from byssus.values.results import StopReason
else:
    StopReason = str  # a newer version may know others, and its items are read all the same


class _Item(Record, frozen=True, gc=False):
    """What all items have in common. `cursor` continues behind the item."""

    cursor: str


# --- the log ----------------------------------------------------------------------------------------------------------


class MessageAdded(_Item, frozen=True, tag="message"):
    """A message is committed. If its id is that of a reply that was arriving, the reply is complete."""

    type: ClassVar[Literal["message"]] = "message"
    message: Message
    seq: int


class ReplyDelta(_Item, frozen=True, tag="reply_delta"):
    """A piece of a reply that is still arriving.

    `reply` is the id that its message will have. `block` is the index of the block in the stream, and `offset` is how
    many characters of the block came before. `kind` is text, thinking or arguments: the JSON text of a tool call's
    arguments, whose id and tool are `call_id` and `tool_name`.
    """

    type: ClassVar[Literal["reply_delta"]] = "reply_delta"
    reply: str
    block: int
    kind: str
    offset: int
    delta: str
    call_id: str | None = None
    tool_name: str | None = None


class ReplyReset(_Item, frozen=True, tag="reset"):
    """The reply that was arriving is void: forget its text. Its process crashed, or a hook changed the reply."""

    type: ClassVar[Literal["reset"]] = "reset"


class ThreadRewound(_Item, frozen=True, tag="rewound"):
    """The thread continues on another branch: forget all messages behind `seq`. What is there instead follows."""

    type: ClassVar[Literal["rewound"]] = "rewound"
    seq: int


class ThreadDeleted(_Item, frozen=True, tag="deleted"):
    """The thread was deleted or erased. Items of a new thread with this id may follow."""

    type: ClassVar[Literal["deleted"]] = "deleted"


# --- tool calls -------------------------------------------------------------------------------------------------------


class CallStarted(_Item, frozen=True, tag="call_started"):
    """A tool starts to run, for the `attempt`-th time. `reply` is the seq of the reply that asks for it."""

    type: ClassVar[Literal["call_started"]] = "call_started"
    call_id: str
    tool_name: str
    arguments: Any
    reply: int
    attempt: int = 1


class CallWaiting(_Item, frozen=True, tag="call_waiting"):
    """A tool call waits for a person. `reason` is approval or recovery."""

    type: ClassVar[Literal["call_waiting"]] = "call_waiting"
    call_id: str
    tool_name: str
    arguments: Any
    reply: int
    reason: str
    question: str
    asked_at: str


class CallAnswered(_Item, frozen=True, tag="call_answered"):
    """A person has answered; the next run acts upon it. `by` and `source` say who, and from where, if that is known."""

    type: ClassVar[Literal["call_answered"]] = "call_answered"
    call_id: str
    tool_name: str
    reply: int
    answer: Any
    by: str | None = None
    source: str | None = None


class CallEnded(_Item, frozen=True, tag="call_ended"):
    """A tool call has ended. `status` is done, failed, denied, aborted, unknown or left (by a rewind, unanswered)."""

    type: ClassVar[Literal["call_ended"]] = "call_ended"
    call_id: str
    tool_name: str
    reply: int
    status: str


# --- what stands beside the log ---------------------------------------------------------------------------------------


class InboxPut(_Item, frozen=True, tag="inbox_put"):
    """A message waits for a run. `kind` is steer or follow_up."""

    type: ClassVar[Literal["inbox_put"]] = "inbox_put"
    message_id: str
    kind: str
    message: UserMessage
    created_at: str


class InboxHeard(_Item, frozen=True, tag="inbox_heard"):
    """A queued message was delivered to a run. It is in the log, under the same id."""

    type: ClassVar[Literal["inbox_heard"]] = "inbox_heard"
    message_id: str


class InboxWithdrawn(_Item, frozen=True, tag="inbox_withdrawn"):
    """A queued message was withdrawn."""

    type: ClassVar[Literal["inbox_withdrawn"]] = "inbox_withdrawn"
    message_id: str


class CheckpointAdded(_Item, frozen=True, tag="checkpoint"):
    """A checkpoint of the thread up to `seq`."""

    type: ClassVar[Literal["checkpoint"]] = "checkpoint"
    checkpoint_id: str
    step: int
    seq: int
    tags: list[str] = []  # noqa: RUF012 - msgspec copies it
    summary: str | None = None


class TitleChanged(_Item, frozen=True, tag="title"):
    """The title that was set; empty when the automatic one applies."""

    type: ClassVar[Literal["title"]] = "title"
    title: str


class RunBegan(_Item, frozen=True, tag="run_began"):
    """A run began, or continues: `attempt` is above 1 after a crash, a hand-over or a person's answer.

    `cause` is prompt or resume.
    """

    type: ClassVar[Literal["run_began"]] = "run_began"
    run_id: str
    cause: str = "prompt"
    attempt: int = 1


class RunEnded(_Item, frozen=True, tag="run_ended"):
    """A run ended, or stopped to wait for a person (`stop_reason` waiting)."""

    type: ClassVar[Literal["run_ended"]] = "run_ended"
    run_id: str
    stop_reason: StopReason | None = None
    error: str | None = None


# --- the follower itself ----------------------------------------------------------------------------------------------


class CaughtUp(_Item, frozen=True, tag="caught_up"):
    """All that was stored has been yielded; what follows happens now.

    `run_id` is the run that has not ended, `inbox` has the ids of the messages that wait, and `waiting` the ids of the
    calls that wait for a person. A queued message or a question that you know and that is not listed is gone.
    """

    type: ClassVar[Literal["caught_up"]] = "caught_up"
    run_id: str | None = None
    inbox: list[str] = []  # noqa: RUF012 - msgspec copies it
    waiting: list[str] = []  # noqa: RUF012 - msgspec copies it


class Lagged(_Item, frozen=True, tag="lagged"):
    """The follower was slow: more was waiting than is held for it. It continues from the log, and nothing is lost."""

    type: ClassVar[Literal["lagged"]] = "lagged"


FollowItem: TypeAlias = (
    MessageAdded
    | ReplyDelta
    | ReplyReset
    | ThreadRewound
    | ThreadDeleted
    | CallStarted
    | CallWaiting
    | CallAnswered
    | CallEnded
    | InboxPut
    | InboxHeard
    | InboxWithdrawn
    | CheckpointAdded
    | TitleChanged
    | RunBegan
    | RunEnded
    | CaughtUp
    | Lagged
)

_KINDS: dict[str, type[Struct]] = {kind.type: kind for kind in get_args(FollowItem)}


def item_from_json(text: str | bytes) -> FollowItem:
    """The item that `to_json` wrote. Fields that this version does not know are ignored."""
    item: FollowItem = read(text, _KINDS, "item")
    return item
