"""`byssus completion`: a script that lets a shell complete commands, options and thread ids.

The words are written into the script; thread ids are asked for when the key is pressed.
"""

from __future__ import annotations

import argparse
from typing import Any

from byssus.cli.parser import commands_of, parser_for
from byssus.cli.subcommand import add, work_on

_BASH = """\
_byssus() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [[ "$word" == -* ]]; then
        case "$command" in
{cases}
        esac
    else
        words="$(byssus completion ids 2>/dev/null)"
    fi
    local IFS=$' \\n'
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _byssus byssus
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_FISH = """\
complete -c byssus -f
complete -c byssus -n __fish_use_subcommand -a '{commands}'
complete -c byssus -n 'not __fish_use_subcommand' -a '(byssus completion ids 2>/dev/null)'
"""
_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:@/+")
_LIMIT = 200


def add_to(commands: Any) -> None:
    more = "For bash: eval \"$(byssus completion bash)\". 'ids' prints thread ids, which the scripts ask for."
    parser = add(commands, "completion", _completion, more)
    parser.add_argument("shell", choices=["bash", "zsh", "fish", "ids"], metavar="SHELL", help="bash, zsh or fish")


def _completion(args: argparse.Namespace) -> int:
    if args.shell == "ids":
        return _print_ids(args)
    choices = commands_of(parser_for())
    names = " ".join(choices)
    if args.shell == "fish":
        print(_FISH.format(commands=names) + "\n".join(_fish_options(choices)))
        return 0
    cases = "\n".join(f'        {name}) words="{" ".join(_options(each))}" ;;' for name, each in choices.items())
    print((_ZSH if args.shell == "zsh" else "") + _BASH.format(commands=names, cases=cases), end="")
    return 0


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def _fish_options(choices: dict[str, argparse.ArgumentParser]) -> list[str]:
    return [
        f"complete -c byssus -n '__fish_seen_subcommand_from {name}' -l {option.removeprefix('--')}"
        for name, parser in choices.items()
        for option in _options(parser)
    ]


def _print_ids(args: argparse.Namespace) -> int:
    """Ids that a shell can take as they are: it would expand or split others."""
    for info in work_on(args, lambda cp: cp.threads(limit=_LIMIT)):
        if _PLAIN.issuperset(info.id):
            print(info.id)
    return 0
