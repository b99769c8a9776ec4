"""What the keys do. Everything else is as in a shell with Emacs keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from prompt_toolkit.completion import CompleteEvent, get_common_complete_suffix
from prompt_toolkit.filters import Condition, FilterOrBool, has_focus, is_searching
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.keys import Keys

from byssus.cli.chat.live.drawn.board import ChatBoard

# What /help says of them.
HELP = (
    ("Enter", "send; while an answer arrives: say it to the run at once"),
    ("Alt-Enter", "a new line; while an answer arrives: queue it for afterwards"),
    ("Ctrl-J", "a new line"),
    ("Tab", "complete a command, a thread or a file behind @"),
    ("Up, Down, Ctrl-R", "what was typed before; Ctrl-R searches in it"),
    ("Ctrl-C", "clear the line, then stop the answer; twice within a second: leave"),
    ("Ctrl-D", "leave, if the line is empty"),
    ("Ctrl-O", "show what was cut short: thinking, arguments and results of tools"),
    ("Ctrl-X Ctrl-E", "write in your editor ($VISUAL or $EDITOR)"),
    ("Ctrl-L", "draw the screen anew"),
    ("Ctrl-Z", "suspend; fg comes back"),
)


class Chat(Protocol):
    """What keys can ask of the chat."""

    @property
    def is_running(self) -> bool: ...
    @property
    def is_typed_ahead(self) -> bool: ...
    def enter(self, text: str) -> None: ...
    def queue(self, text: str) -> None: ...
    def interrupt(self) -> None: ...
    def leave(self, code: int = 0) -> None: ...
    def unfold(self) -> None: ...
    def repaint(self) -> None: ...
    def suspend(self) -> None: ...
    def edit(self) -> None: ...


def bindings(chat: Chat, board: ChatBoard) -> KeyBindings:
    keys = KeyBindings()
    is_typing = has_focus(board.input) & ~is_searching
    is_picking = Condition(lambda: board.picker is not None)

    def add(*names: str, when: FilterOrBool = True, do: Callable[[], object]) -> None:
        keys.add(*names, filter=when)(lambda _: do())

    add("enter", when=is_typing & ~is_picking, do=lambda: _enter(chat, board))
    add("escape", "enter", when=is_typing & ~is_picking, do=lambda: _alt_enter(chat, board))
    add("c-j", when=is_typing & ~is_picking, do=lambda: _ctrl_j(chat, board))
    add("tab", when=is_typing & ~is_picking, do=lambda: _complete(board))
    add("escape", when=is_typing & Condition(lambda: board.question is not None), do=lambda: board.answer(None))
    for name, steps in (("up", -1), ("c-p", -1), ("down", 1), ("c-n", 1), ("pageup", -8), ("pagedown", 8)):
        add(name, when=is_picking, do=partial(_pick, board, "move", steps))
    for name in ("enter", "c-j"):
        add(name, when=is_picking, do=partial(_pick, board, "take"))
    keys.add("escape", filter=is_picking, eager=True)(lambda _: board.leave_picker())  # no key with Alt is awaited
    add("c-c", when=~is_searching, do=chat.interrupt)
    add(Keys.SIGINT, do=chat.interrupt)
    add("c-d", when=is_typing & Condition(lambda: not board.input.text), do=lambda: _end(chat, board))
    add("c-o", do=chat.unfold)
    add("c-l", do=chat.repaint)
    add("c-z", do=chat.suspend)
    add("c-x", "c-e", when=is_typing & ~is_picking, do=chat.edit)
    return keys


def _pick(board: ChatBoard, what: str, *how: int) -> None:
    if board.picker is not None:
        getattr(board.picker, what)(*how)


def _taken(board: ChatBoard) -> str:
    """What was typed, which is in the history from then on."""
    text = board.input.text
    board.input.append_to_history()
    board.input.reset()
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are no text


def _enter(chat: Chat, board: ChatBoard) -> None:
    if board.question is not None:
        board.answer(board.input.text)
    elif board.input.text.strip():
        chat.enter(_taken(board))


def _ctrl_j(chat: Chat, board: ChatBoard) -> None:
    """A new line. Before the terminal was ours, it made the same of Enter: what was typed ahead is sent."""
    if chat.is_typed_ahead:
        _enter(chat, board)
    else:
        board.input.insert_text("\n")


def _alt_enter(chat: Chat, board: ChatBoard) -> None:
    if board.question is None and chat.is_running and board.input.text.strip():
        chat.queue(_taken(board))
    else:
        board.input.insert_text("\n")


def _complete(board: ChatBoard) -> None:
    """Insert what is certain, at once: a menu that is still being made must not swallow the key."""
    buffer = board.input
    if buffer.complete_state:
        buffer.complete_next()
        return
    found = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
    if len(found) == 1:
        buffer.delete_before_cursor(-found[0].start_position)
        buffer.insert_text(found[0].text)
    elif found:
        buffer.insert_text(get_common_complete_suffix(buffer.document, found))
        buffer.start_completion()


def _end(chat: Chat, board: ChatBoard) -> None:
    if not board.leave_picker() and not board.answer(None):
        chat.leave()
