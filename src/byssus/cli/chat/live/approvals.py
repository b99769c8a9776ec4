"""Questions about tool calls, asked in the chat: may it run, and what became of one that was interrupted.

"Always" is kept in the metadata of the thread, under `byssus_chat`, with the id of the thread: so it is there after a
restart, and a fork, which has a copy of the metadata, asks again. It is for calls that have not run. Whether an
interrupted call runs again is asked each time, and so is a call that several people must approve. A command of the
ready-made `shell` is asked for each time, too: any other command would be allowed with it. `write_file` and `edit_file`
can be allowed always, because they stay in the folder that was chosen.
"""

from __future__ import annotations

import getpass
import json
from typing import Any, NamedTuple

from byssus.checkpointer import Checkpointer
from byssus.cli.chat.live.drawn.board import ChatBoard
from byssus.cli.chat.live.drawn.calls import argument_lines
from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.drawn.screen import ChatScreen
from byssus.cli.screen import terminal
from byssus.cli.tools.names import WITHOUT_LIMIT
from byssus.errors import InputError
from byssus.values.decisions import RECOVERY, Answer, Approve, Deny, Pending
from byssus.values.results import ToolResult

_KEY = "byssus_chat"
_DIFFERENCE = {"+": "good", "-": "bad", "@": "faint"}  # styles of its lines, by their first character


class Decided(NamedTuple):
    """What a person said to a question."""

    answer: Answer
    always: bool = False


class Allowed:
    """The tools of a thread that need no question any more."""

    def __init__(self, cp: Checkpointer, thread_id: str) -> None:
        self._cp, self._thread_id = cp, thread_id

    async def tools(self) -> set[str]:
        session = await self._cp.get_session(self._thread_id)
        kept = None if session is None else session["metadata"].get(_KEY)
        if not isinstance(kept, dict) or kept.get("thread") != self._thread_id:
            return set()
        names = kept.get("always")
        return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()

    async def add(self, tool: str) -> None:
        names = sorted(await self.tools() | {tool})
        session = await self._cp.get_session(self._thread_id)
        metadata = {} if session is None else session["metadata"]
        kept = {"thread": self._thread_id, "always": names}
        await self._cp.update_session(self._thread_id, metadata={**metadata, _KEY: kept})

    async def allows(self, pending: Pending) -> bool:
        """Whether a call needs no question."""
        return _may_be_always(pending) and pending.tool_name in await self.tools()


def who() -> str | None:
    """Who answers, as the ledger keeps it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # an account without a name
        return None


async def ask(screen: ChatScreen, board: ChatBoard, pending: Pending) -> Decided | None:
    """Ask until there is an answer; None leaves the question open.

    The call is printed with all its arguments, so that a person sees what they approve.
    """
    screen.show(lambda drawer: _call(drawer, pending))
    problem = ""
    while True:
        answer = await board.ask("allow?" if pending.reason != RECOVERY else "what now?", _drawn(pending, problem))
        if answer is None:
            return None
        try:
            decided = await _decided(board, pending, answer.strip())
        except InputError as error:
            problem = str(error)
        else:
            if decided is not None:
                return decided
            problem = ""


def told(decided: Decided) -> str:
    """What was answered, for the transcript."""
    match decided.answer:
        case Deny(reason=reason):
            return f"denied: {reason}"
        case "deny":
            return "denied"
        case Approve(arguments=dict() as arguments):
            return f"approved with other arguments: {terminal.as_json(arguments)}"
        case ToolResult(content=content):
            return f"it was done: {content}"
    return "approved, always for this tool in this thread" if decided.always else "approved"


async def _decided(board: ChatBoard, pending: Pending, answer: str) -> Decided | None:
    """What an answer means; None to ask again."""
    word, _, rest = answer.partition(" ")
    word, rest = word.lower(), rest.strip()
    if word in ("y", "yes") and not rest:  # "y, but" would run what was not meant
        return Decided("approve")
    if word in ("n", "no"):
        return Decided(Deny(rest) if rest else "deny")
    if word in ("a", "always") and _may_be_always(pending):
        return Decided("approve", always=True)
    if word in ("e", "edit") and _may_be_edited(pending):
        arguments = await _edited(board, pending)
        return None if arguments is None else Decided(Approve(arguments=arguments))
    if word in ("d", "done") and pending.reason == RECOVERY:
        return Decided(ToolResult(rest or "A person checked: the call took effect."))
    raise InputError(f"{answer!r:.40} is no answer here: {_choices(pending)}" if answer else _choices(pending))


def _may_be_always(pending: Pending) -> bool:
    return _may_be_edited(pending) and pending.tool_name not in WITHOUT_LIMIT


def _may_be_edited(pending: Pending) -> bool:
    return pending.reason != RECOVERY and pending.approvers == 1


def _choices(pending: Pending) -> str:
    if pending.reason == RECOVERY:
        return "y run it again, n [WHY] leave it, d [RESULT] it was done, Esc later"
    edit = ", e edit" if _may_be_edited(pending) else ""
    always = ", a always for this tool in this thread" if _may_be_always(pending) else ""
    return f"y yes, n [WHY] no{edit}{always}, Esc later"


def _call(drawer: Drawer, pending: Pending) -> list[Line]:
    """The question with all arguments."""
    if pending.reason == RECOVERY:
        head = f"{pending.tool_name} was interrupted:"
    else:
        head = f"{pending.tool_name} asks for your approval:"
    lines: list[Line] = [[], *drawer.text(f"? {head}", "ask")]
    asked, *details = pending.question.split("\n") if pending.question else [""]
    lines += drawer.text(asked, "bold", indent=2) if asked else []
    for each in details:
        lines += drawer.text(each, _DIFFERENCE.get(each[:1], ""), indent=2)
    lines += argument_lines(drawer, pending.arguments)
    if pending.approvers > 1:
        lines += drawer.text(f"{len(pending.approvals)} of {pending.approvers} people have approved", indent=2)
    return lines


def _drawn(pending: Pending, problem: str) -> Any:
    """What can be answered, and what was wrong with the last answer."""

    def draw(drawer: Drawer) -> list[Line]:
        wrong = drawer.text(problem, "bad") if problem else []
        return [*wrong, *([] if problem.endswith(_choices(pending)) else drawer.text(_choices(pending), "faint"))]

    return draw


async def _edited(board: ChatBoard, pending: Pending) -> dict[str, Any] | None:
    """The arguments as a person has changed them; None if they do not want to."""
    text, problem = json.dumps(pending.arguments, ensure_ascii=False, indent=2), ""
    while True:

        def draw(drawer: Drawer, problem: str = problem) -> list[Line]:
            lines = drawer.text(f"Change the arguments of {pending.tool_name}; Enter runs it, Esc goes back.", "ask")
            return [*lines, *(drawer.text(problem, "bad") if problem else [])]

        edited = await board.ask("arguments", draw, text)
        if edited is None:
            return None
        text = edited
        try:
            arguments = json.loads(edited)
        except ValueError as error:
            problem = f"this is no JSON: {error}"
            continue
        if isinstance(arguments, dict):
            return arguments
        problem = "the arguments are a JSON object: {...}"
