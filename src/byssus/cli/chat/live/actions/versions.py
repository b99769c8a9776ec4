"""Commands that go back and forth in one thread: /rewind /undo /edit /retry /checkpoint /tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byssus.checkpointer import CheckpointMetadata, Tree
from byssus.cli.chat.live.actions.points import SHOWN, checkpoints, latest, point_of
from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.drawn.picker import Choice, Picker
from byssus.cli.chat.live.session import Conversation
from byssus.cli.chat.live.typed import attachments
from byssus.cli.screen import terminal
from byssus.cli.subcommand import count
from byssus.errors import InputError
from byssus.messages import Message, UserMessage
from byssus.values.checkpoints import ASCII, Signs, drawn

_LOOK = 200  # messages among which is the last one of a person
_PREVIEW = 6


class _Point(NamedTuple):
    """Where a thread can go back to."""

    to: str | int  # a checkpoint's id, or the seq of a message
    seq: int | None


class _Said(NamedTuple):
    """The last message of a person, and where it stands."""

    text: str
    seq: int
    behind: int  # messages


async def do_rewind(session: Conversation, argument: str) -> None:
    if not argument:
        await _pick_point(session)
        return
    await _rewind(session, await point_of(session.cp, session.thread_id, argument))


async def _pick_point(session: Conversation) -> None:
    known, has_more = await latest(session.cp, session.thread_id)
    if has_more:
        session.view.note(f"(the latest {SHOWN} checkpoints; /rewind seq:N, step:N or a name goes to an earlier one)")

    async def find(_: str) -> Sequence[Choice]:
        made = [Choice(f"seq:{each.seq}", _about(each), _Point(each.checkpoint_id, each.seq)) for each in known]
        return made + await _before_prompts(session, {each.seq for each in known})

    async def preview(item: Choice) -> str:
        to = item.value.to
        if isinstance(to, str):
            checkpoint = await session.cp.get(to, session.thread_id)
            messages = checkpoint.messages[-_PREVIEW:] if checkpoint is not None else []
        else:
            thread = await session.cp.load(session.thread_id, last=_PREVIEW, before=to + 1)
            messages = thread.messages if thread is not None else []
        return "\n".join(map(_short, messages)) or "(nothing: the thread would be empty)"

    picker = Picker("rewind to:", find, preview, shows_end=True, empty="no messages yet")
    chosen = await session.board.pick(picker)
    if chosen is not None:
        await _rewind(session, chosen.to, chosen.seq)


async def _before_prompts(session: Conversation, known: set[int | None]) -> list[Choice]:
    """The points before the person's last messages, the latest first: an app may make no checkpoints."""
    thread = await session.cp.load(session.thread_id, last=_LOOK)
    said = list(zip(thread.messages, thread.seqs, strict=True)) if thread is not None else []
    return [
        Choice(f"seq:{seq - 1}", f"before: {attachments.typed_in(message)[:200]}", _Point(seq - 1, seq - 1))
        for message, seq in reversed(said)
        if isinstance(message, UserMessage) and seq - 1 not in known
    ]


def _about(checkpoint: CheckpointMetadata) -> str:
    """Its tags, and what was said there; "left" once."""
    summary = (checkpoint.summary or "").replace("\n", " ")
    tags = [tag for tag in checkpoint.tags if tag != "left" or not summary.startswith("left ")]
    return " ".join([*tags, summary])


def _short(message: object) -> str:
    text = getattr(message, "text", str(message))
    return f"{getattr(message, 'role', 'note')}: {' '.join(str(text).split())[:400]}"


async def _rewind(session: Conversation, to: str | int, seq: int | None = None) -> None:
    """Show where it goes and what it leaves, ask, and go."""
    seq = await _seq_of(session, to) if seq is None else seq
    what, end = await _left_before(session, to, seq) or await _cut_at(session, seq)
    session.view.lines(
        "ask",
        f"Rewind to message {seq} would {what}. It would end with:",
        *(f"  {_short(message)[:300]}" for message in end),
        *([] if end else ["  (nothing: the thread would be empty)"]),
    )
    answer = await session.board.ask("rewind? [y/N]", _nothing)
    if answer is None or answer.strip().lower() not in ("y", "yes"):
        session.view.note("(not rewound)")
        return
    await _go_back(session, to)


async def _cut_at(session: Conversation, seq: int) -> tuple[str, Sequence[object]]:
    """What going back to a message of this branch means, and how the thread would end."""
    thread = await session.cp.load(session.thread_id, last=_LOOK)
    head = thread.position.head if thread is not None else 0
    if seq > head:
        raise InputError(f"this thread ends with message {head}, so there is no message {seq}")
    left = sum(at > seq for at in thread.seqs) if thread is not None else 0
    more = "+" if thread is not None and thread.has_earlier and left == _LOOK else ""
    before = await session.cp.load(session.thread_id, last=2, before=seq + 1)
    return f"take {left}{more} message(s) off this thread", before.messages if before is not None else []


async def _left_before(session: Conversation, to: str | int, seq: int) -> tuple[str, Sequence[object]] | None:
    """The same for a checkpoint that an earlier rewind has left; None if it is on this branch."""
    tree = await session.cp.tree(session.thread_id) if isinstance(to, str) else None
    if tree is None or to not in {each.checkpoint_id for each in tree.left}:
        return None
    checkpoint = await session.cp.get(str(to), session.thread_id)
    return f"bring back what an earlier rewind has left, {seq} message(s)", (
        checkpoint.messages[-2:] if checkpoint is not None else []
    )


async def _seq_of(session: Conversation, to: str | int) -> int:
    if isinstance(to, int):
        return to
    known = {each.checkpoint_id: each.seq for each in await checkpoints(session.cp, session.thread_id)}
    return known.get(to) or 0


async def _go_back(session: Conversation, to: str | int) -> None:
    session.renew()
    stood = await session.cp.rewind(session.thread_id, to)
    session.view.note(f"(rewound; nothing is lost: /rewind {stood} goes back)")
    await session.look()
    await session.know_end()


def _nothing(drawer: Drawer) -> list[Line]:  # noqa: ARG001
    return []


# --- one message back -------------------------------------------------------------------------------------------------


async def _last_said(session: Conversation) -> _Said:
    thread = await session.cp.load(session.thread_id, last=_LOOK)
    if thread is not None:
        for place in range(len(thread.messages) - 1, -1, -1):
            message: Message = thread.messages[place]
            if isinstance(message, UserMessage):
                return _Said(attachments.typed_in(message), thread.seqs[place], len(thread.messages) - place - 1)
    raise InputError("there is no message of yours in this thread to take back")


async def do_undo(session: Conversation, argument: str) -> None:  # noqa: ARG001
    said = await _last_said(session)
    await _go_back(session, said.seq - 1)
    session.view.note(f"(taken back, with {count(said.behind, 'message')} behind it: {said.text[:60]})")


async def do_edit(session: Conversation, argument: str) -> None:  # noqa: ARG001
    said = await _last_said(session)
    await _go_back(session, said.seq - 1)
    session.board.input.reset()
    session.board.input.insert_text(said.text)


async def do_retry(session: Conversation, argument: str) -> None:  # noqa: ARG001
    if await session.cp.state(session.thread_id) == "waiting":
        session.spawn_run(session.settle())
        return
    thread = await session.cp.load(session.thread_id, last=1)
    if thread is None or not thread.messages:
        raise InputError("this thread has no messages yet, so there is nothing to try again")
    is_whole = getattr(thread.messages[-1], "stop_reason", "") in ("stop", "length")
    if is_whole and await session.cp.state(session.thread_id) == "idle":  # the same question again
        said = await _last_said(session)
        await _go_back(session, said.seq)
    session.spawn_run(session.resume())


# --- checkpoints ------------------------------------------------------------------------------------------------------


async def do_checkpoint(session: Conversation, argument: str) -> None:
    if await session.cp.info(session.thread_id) is None:
        raise InputError("this thread has no messages yet, so there is no point to name")
    agent = await session.ready()
    made = await agent.checkpoint(tags=[argument] if argument else [])
    name = argument or made
    session.view.note(f"(checkpoint {name}; /rewind {name} comes back to it, /fork {name} tries something else)")


async def do_tree(session: Conversation, argument: str) -> None:  # noqa: ARG001
    tree = await session.cp.tree(session.thread_id)
    if tree is None:
        raise InputError("this thread has no messages yet, so there is no tree")
    if len(tree.checkpoints) > SHOWN or len(tree.left) > SHOWN:
        session.view.note(f"(the latest {SHOWN} checkpoints of each thread; 'byssus tree' draws all)")

    async def find(_: str) -> Sequence[Choice]:
        return _tree_items(tree)

    async def preview(item: Choice) -> str:
        thread_id, point = item.value
        if point is None:
            thread = await session.cp.load(thread_id, last=_PREVIEW)
            return "\n".join(map(_short, thread.messages)) if thread is not None else ""
        checkpoint = await session.cp.get(point, thread_id)
        return "\n".join(map(_short, checkpoint.messages[-_PREVIEW:])) if checkpoint is not None else ""

    chosen = await session.board.pick(Picker("tree:", find, preview, shows_end=True))
    if chosen is None:
        return
    thread_id, point = chosen
    if thread_id != session.thread_id:
        await session.open(thread_id)
    if point is not None:
        await _rewind(session, point)


def _tree_items(tree: Tree) -> list[Choice]:
    """The thread and its forks, each with its checkpoints, indented by depth."""
    found: list[Choice] = []
    waiting = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        space = "  " * depth
        found.append(Choice(f"{space}{node.thread_id}", count(node.message_count, "message"), (node.thread_id, None)))
        left = {each.checkpoint_id for each in node.left}
        for each in [*node.checkpoints[-SHOWN:], *node.left[-SHOWN:]]:
            about = _about(each)
            if each.checkpoint_id in left and not about.startswith("left "):
                about = f"left {about}"
            found.append(Choice(f"{space}  seq:{each.seq}", about, (node.thread_id, each.checkpoint_id)))
        waiting += [(fork, depth + 1) for fork in reversed(node.forks)]
    return found


def tree_text(tree: Tree) -> str:
    """The drawing of `byssus tree`."""
    return "\n".join(drawn(tree, Signs() if terminal.drawn("├└│─·", "") else ASCII))
