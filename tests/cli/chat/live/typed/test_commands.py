"""The table of commands: what is typed, what is refused, and that each one does something."""

from __future__ import annotations

import pytest

from byssus.cli.chat.live.actions.do import ACTIONS
from byssus.cli.chat.live.typed.commands import BY_NAME, COMMANDS, help_lines, message_in, parse
from byssus.errors import InputError


def test_a_line_with_a_slash_is_a_command() -> None:
    typed = parse("/open  trip ")
    assert typed is not None
    assert (typed.command.name, typed.argument) == ("open", "trip")


@pytest.mark.parametrize("text", ["hello", "//etc is a folder", "/etc/hosts is a file", " 1/2", "/a\nb"])
def test_other_lines_are_messages(text: str) -> None:
    assert parse(text) is None


def test_two_slashes_are_one_in_the_message() -> None:
    assert message_in("//etc") == "/etc"
    assert message_in("/etc/hosts") == "/etc/hosts"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/hlep", "there is no command '/hlep'; did you mean '/help'?"),
        ("/xyzzy", "there is no command '/xyzzy'; /help lists them"),
        ("/help xyzzy", "there is no command '/xyzzy'; /help lists them"),
        ("/undo 3", "/undo takes nothing behind it, got '3'"),
        ("/open", "/open THREAD: THREAD is missing"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_next_step(text: str, why: str) -> None:
    with pytest.raises(InputError) as refused:
        typed = parse(text)
        assert typed is not None
        help_lines(typed.argument)
    assert str(refused.value) == why


def test_each_command_is_in_the_help_and_does_something() -> None:
    assert [usage.split()[0].removeprefix("/") for usage, _ in help_lines()] == list(BY_NAME) == list(ACTIONS)
    assert len({command.help for command in COMMANDS}) == len(COMMANDS)
    assert help_lines("/fork") == [(BY_NAME["fork"].usage, BY_NAME["fork"].help)]
