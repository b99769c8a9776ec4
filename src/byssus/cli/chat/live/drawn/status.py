"""The status line: thread, model, tokens and cost of the thread and the turn, quota, queue and database."""

from __future__ import annotations

from typing import NamedTuple

from byssus.checkpointer import Checkpointer
from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.screen import table, terminal
from byssus.messages import Usage


class ThreadCosts(NamedTuple):
    """What is known of a thread's costs."""

    tokens: int = 0
    cost: float = 0.0
    quota_left: int | None = None


class Status(NamedTuple):
    """What the line shows."""

    thread: str
    model: str
    state: str  # "", or what goes on
    spent: ThreadCosts
    turn: Usage
    queued: int
    database: str


async def spent_on(cp: Checkpointer, thread_id: str, user_id: str | None) -> ThreadCosts:
    """The costs of a thread, and what its user has left."""
    session = await cp.get_session(thread_id)
    owner = user_id or (None if session is None else session["user_id"])
    user = None if owner is None else await cp.get_user(owner)
    left = None
    if user is not None and user["quota_total"] is not None:
        left = max(int(user["quota_total"]) - int(user["quota_used"]), 0)
    if session is None:
        return ThreadCosts(quota_left=left)
    return ThreadCosts(session["total_tokens"], session["total_cost"], left)


def database_name(name: str) -> str:
    """What of a path or a DSN tells it from others: the file, or the server and its database."""
    if "://" not in name:
        return name.rpartition("/")[2]
    return name.partition("?")[0].rpartition("@")[2].rpartition("://")[2]


def line(drawer: Drawer, status: Status) -> Line:
    """The parts that fit, the important ones first."""
    parts = [("bold", terminal.line(status.thread))]
    if status.state:
        parts.append(("ask", status.state))
    parts.append(("faint", terminal.line(status.model.rpartition("/")[2])))
    if status.queued:
        parts.append(("ask", f"{status.queued} queued"))
    if status.turn.total:
        parts.append(("faint", f"turn {_tokens(status.turn.total)}{_cost(status.turn.cost)}"))
    parts.append(("faint", f"thread {_tokens(status.spent.tokens)}{_cost(status.spent.cost)}"))
    if status.spent.quota_left is not None:
        parts.append(("faint", f"{_tokens(status.spent.quota_left)} left"))
    parts.append(("faint", terminal.line(status.database)))
    dot = terminal.drawn(" · ", " - ")
    shown: list[tuple[str, str]] = []
    room = drawer.width - 1
    for style, text in parts:
        gap = dot if shown else ""
        if table.width(gap + text) > room:
            if shown:
                break
            text = table.cut(text, room)
        shown += [("faint", gap), (style, text)] if gap else [(style, text)]
        room -= table.width(gap + text)
    return drawer.line(*shown)


def _tokens(number: int) -> str:
    if number < 1_000:
        return f"{number} tok"
    return f"{number / 1_000:.1f}k tok" if number < 1_000_000 else f"{number / 1_000_000:.1f}M tok"


def _cost(cost: float) -> str:
    return f" ${cost:.4f}".rstrip("0").rstrip(".") if cost else ""
