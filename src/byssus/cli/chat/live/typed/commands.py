"""The commands of the chat: one table, from which the help, the completion and the documentation are made."""

from __future__ import annotations

from typing import Literal, NamedTuple

from byssus.cli.words import did_you_mean
from byssus.errors import InputError

Takes = Literal["nothing", "text", "thread", "point", "file", "theme"]


class ChatCommand(NamedTuple):
    """A command: its name, what stands behind it, what it does, and what can be completed behind it."""

    name: str
    argument: str
    help: str
    takes: Takes = "text"
    while_running: bool = False  # may be used while an answer arrives

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS = (
    ChatCommand("help", "[COMMAND]", "the commands and the keys", while_running=True),
    ChatCommand("new", "[ID]", "begin a new thread"),
    ChatCommand("threads", "[WORDS]", "choose a thread from the list"),
    ChatCommand("open", "THREAD", "open a thread; the start of its id will do", "thread"),
    ChatCommand("rename", "TITLE", "give this thread a title", while_running=True),
    ChatCommand("fork", "[POINT]", "go on in a copy of this thread, from a point or its end", "point"),
    ChatCommand("rewind", "[POINT]", "go back to a point of this thread; shows first what that means", "point"),
    ChatCommand("undo", "", "take back your last message and what followed", "nothing"),
    ChatCommand("checkpoint", "[NAME]", "name this point of the thread, to come back to it"),
    ChatCommand("tree", "", "the checkpoints and forks of this thread, to go to one", "nothing"),
    ChatCommand("search", "[WORDS]", "search in all threads; Enter opens the thread there"),
    ChatCommand("export", "FILE", "write this thread to a file: .md, .html or .json", "file", while_running=True),
    ChatCommand("mark", "LABEL", "put a mark on the last message"),
    ChatCommand("memory", "", "the marked messages and the summary of this thread", "nothing", while_running=True),
    ChatCommand("tokens", "", "tokens and cost of this thread, by model and tool", "nothing", while_running=True),
    ChatCommand("model", "[MODEL]", "show the model, or use another one from now on"),
    ChatCommand("system", "[TEXT]", "show the system prompt, or use another one from now on"),
    ChatCommand("tools", "", "the tools that the model can call", "nothing", while_running=True),
    ChatCommand("inbox", "[N]", "the messages that wait; with a number, withdraw that one", while_running=True),
    ChatCommand("later", "TEXT", "queue a message for after this answer (as Alt-Enter)", while_running=True),
    ChatCommand("approve", "", "answer the calls that wait for you", "nothing"),
    ChatCommand("retry", "", "try again: finish a run that failed or was stopped, or answer anew", "nothing"),
    ChatCommand("edit", "", "take back your last message, and change it", "nothing"),
    ChatCommand("theme", "dark|light|plain", "the colors of code, or no colors", "theme", while_running=True),
    ChatCommand("quit", "", "leave (as Ctrl-D)", "nothing", while_running=True),
)
BY_NAME = {command.name: command for command in COMMANDS}


class Typed(NamedTuple):
    """A command as it was typed."""

    command: ChatCommand
    argument: str


def parse(text: str) -> Typed | None:
    """The command that a line is; None if it is a message. Raises `InputError` for one that there is not.

    A message that begins with a slash is typed with two: `//etc is a folder`. A path (`/etc/hosts`) is no command.
    """
    word, _, rest = text.strip().partition(" ")
    if not word.startswith("/") or word.startswith("//") or "\n" in word or "/" in word[1:]:
        return None
    name = word[1:].lower()
    command = BY_NAME.get(name)
    if command is None:
        raise _unknown(word)
    argument = rest.strip()
    if argument and command.takes == "nothing":
        raise InputError(f"{command.usage} takes nothing behind it, got {argument!r:.60}")
    if not argument and command.argument and not command.argument.startswith("["):
        raise InputError(f"{command.usage}: {command.argument} is missing")
    return Typed(command, argument)


def message_in(text: str) -> str:
    """A line that is a message: of two slashes, one was typed to say so."""
    return text[1:] if text.startswith("//") else text


def help_lines(name: str = "") -> list[tuple[str, str]]:
    """What /help shows: the usage and what it does."""
    name = name.removeprefix("/").lower()
    if name and name not in BY_NAME:
        raise _unknown(f"/{name}")
    return [(command.usage, command.help) for command in COMMANDS if name in ("", command.name)]


def _unknown(word: str) -> InputError:
    hint = did_you_mean(word[1:].lower(), BY_NAME)
    guess = hint.replace("'", "'/", 1) if hint else "/help lists them"
    return InputError(f"there is no command {word!r}; {guess}")
