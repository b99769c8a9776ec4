"""The parts of docs/cli.md that are made from the code: the list of commands, what can be typed in
a chat, and the options of each command.

`python -m tools.cli_page` writes them; a test compares them. What all commands share stands on the page once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from byssus.cli.chat.live.typed import commands as chat_commands
from byssus.cli.chat.live.typed import keys
from byssus.cli.commands import COMMANDS
from byssus.cli.parser import commands_of, parser_for

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_SHARED = {"help", "db", "utc", "no_pager", "debug"}


def with_commands(page: str) -> str:
    """The page with the parts that are made."""
    for name, lines in (("commands", _list()), ("chat", _chat()), ("reference", _reference())):
        page = _filled(page, name, lines)
    return page


def _filled(page: str, name: str, lines: Iterator[str]) -> str:
    begin, end = f"<!-- {name}: made by `python -m tools.cli_page` -->\n", f"<!-- end of {name} -->"
    assert page.count(begin) == page.count(end) == 1, f"{PAGE} has no place for {name}"
    before, after = page.partition(begin)[0], page.partition(end)[2]
    return before + begin + "\n".join([*lines, ""]) + end + after


def _list() -> Iterator[str]:
    yield "| command | what it does |"
    yield "|---|---|"
    for name, command in COMMANDS.items():
        yield f"| [`{name}`](#{name}) | {_plain(command.help)} |"


def _chat() -> Iterator[str]:
    yield from ("| command | what it does |", "|---|---|")
    yield from (f"| `{_cell(each.usage)}` | {_plain(each.help)} |" for each in chat_commands.COMMANDS)
    yield from ("", "| key | what it does |", "|---|---|")
    yield from (f"| {key} | {_plain(does)} |" for key, does in keys.HELP)


def _reference() -> Iterator[str]:
    for name, parser in commands_of(parser_for()).items():
        own = [each for each in parser._actions if each.dest not in _SHARED]
        actions = sorted(own, key=lambda each: bool(each.option_strings))
        words = [_word(each) for each in actions if not each.option_strings]
        has_options = any(each.option_strings for each in actions)
        usage = " ".join(["byssus", name, *words, *["[options]"] * has_options])
        yield from (f"### {name}", "", f"`{usage}`", "", _plain(parser.description or ""), "")
        if actions:
            yield from ("| argument or option | meaning |", "|---|---|")
            yield from (f"| {_names(each)} | {_meaning(each)} |" for each in actions)
            yield ""


def _word(action: argparse.Action) -> str:
    """A positional argument as it stands in the usage."""
    name = _metavar(action)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    names = [f"{name}{value}" for name in action.option_strings] or [_metavar(action)]
    return ", ".join(f"`{name}`" for name in names)


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return action.dest.upper()


def _meaning(action: argparse.Action) -> str:
    told = _plain((action.help or "") % {"default": action.default, "prog": "byssus"})
    choices = ", ".join(f"`{each}`" for each in action.choices or ())
    return ": ".join(part for part in (told, choices) if part)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    """Text that Markdown takes for nothing else; a command in quotes is code."""
    text = re.sub(r"([\\*_<|\[\]`])", r"\\\1", text)
    return re.sub(r"'(byssus [^']*)'", r"`\1`", text)


def main() -> None:
    PAGE.write_text(with_commands(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
