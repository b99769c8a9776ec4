"""Commands with verbs, such as `byssus tasks cancel ID`: one parser has the options of all verbs of a command."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from byssus.cli.words import did_you_mean
from byssus.errors import InputError

Verbs = Mapping[str, Collection[str]]  # what can be typed, each with the options that go with it


def add_verbs(parser: argparse.ArgumentParser, verbs: Verbs) -> None:
    """Let it take a verb and what follows; words and options may be mixed."""
    *others, last = verbs
    parser.add_argument("words", metavar="VERB", nargs="*", help=f"{', '.join(others)} or {last}, and what it takes")
    parser.set_defaults(takes_more=_take_words)


def _take_words(args: argparse.Namespace, more: Sequence[str]) -> bool:
    if any(word.startswith("-") for word in more):
        return False
    args.words = [*args.words, *more]
    return True


def chosen_verb(args: argparse.Namespace, verbs: Verbs) -> tuple[str, Sequence[str]]:
    """The verb, without one `list`, and the words that follow it. One word that is no verb goes with `list`."""
    words: Sequence[str] = args.words
    verb, rest = (words[0], words[1:]) if words and words[0] in verbs else ("list", words)
    if len(rest) > 1 and verb == "list":
        hint = did_you_mean(rest[0], verbs) or f"type one of {', '.join(verbs)}"
        raise InputError(f"there is no 'byssus {args.command} {rest[0]}'; {hint}")
    for option in sorted({option for options in verbs.values() for option in options} - {*verbs[verb]}):
        if getattr(args, option) not in (None, False):
            known = " and ".join(f"'{each}'" for each, options in verbs.items() if option in options)
            raise InputError(f"--{option.replace('_', '-')} goes with {known}, not with '{verb}'")
    return verb, rest


def words_for(args: argparse.Namespace, verb: str, words: Sequence[str], *names: str) -> list[str | None]:
    """The words of a verb, one for each name; None for a name in brackets that was not given."""
    least = sum(not name.startswith("[") for name in names)
    if not least <= len(words) <= len(names):
        got = f"got {shlex.join(words)}" if words else "got nothing"
        raise InputError(f"type: {' '.join(['byssus', args.command, verb, *names])}; {got}")
    return [*words, *[None] * (len(names) - len(words))]


def json_of(what: str, text: str) -> Any:
    """A value as it is typed."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{what} must be JSON, for example '{{\"page\": 5}}', got {text:.80}: {error}") from error
