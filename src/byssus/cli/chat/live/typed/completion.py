"""What Tab offers: commands, what can stand behind them, and files behind an @."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from byssus.cli.chat.live.drawn.drawing import THEMES
from byssus.cli.chat.live.typed import attachments
from byssus.cli.chat.live.typed.commands import BY_NAME, COMMANDS
from byssus.cli.screen import terminal


class ChatCompleter(Completer):
    """Completes what is typed. `threads` gives the ids and titles of the threads that are known."""

    def __init__(self, threads: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._threads = threads

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:  # noqa: ARG002
        text = document.text_before_cursor
        if text.startswith("/") and "\n" not in text:
            name, space, argument = text[1:].partition(" ")
            if not space:
                for command in COMMANDS:
                    if command.name.startswith(name):
                        yield Completion(command.name, -len(name), command.usage, command.help)
                return
            if (known := BY_NAME.get(name)) is not None and known.takes not in ("text", "nothing", "point"):
                yield from self._behind(known.takes, argument.lstrip())
                return
        if (begun := attachments.name_being_typed(text)) is not None:
            typed, is_quoted = begun
            for path in attachments.completions(typed):
                begin, end = ('"', '"') if " " in path else ("", "")
                if is_quoted:
                    begin, end = "", '"'
                if path.endswith("/"):
                    end = ""  # a file in it comes next
                yield Completion(f"{begin}{path}{end}", -len(typed), path)

    def _behind(self, takes: str, typed: str) -> Iterable[Completion]:
        if takes == "thread":
            for thread_id, title in self._threads():
                if thread_id.startswith(typed):
                    yield Completion(thread_id, -len(typed), terminal.line(thread_id), terminal.line(title))
        elif takes == "theme":
            for theme in THEMES:
                if theme.startswith(typed):
                    yield Completion(theme, -len(typed))
        elif takes == "file":
            for path in attachments.completions(typed):
                yield Completion(path, -len(typed))
