"""Cursors: how far a client has read a thread, as short text.

    3f9a2c-12-345                       of branch 12, everything up to seq 345
    3f9a2c-12-345.347~349               and 347 to 349: the tool result at 346 was not stored yet
    3f9a2c-12-345-9be1c2d4.0k88.1t120   and of the reply that arrives: 88 characters of block 0, 120 of block 1

The first part identifies the thread. The letter between a block and its length is the kind of the block. All characters
can stand in a URL and in the `id` of a server-sent event.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

_LONGEST = 20_000  # characters: a reply may have thousands of calls, and their results come in any order
_HIGHEST = 2**62  # no branch, seq or offset is as high
_TEXT = re.compile(
    r"(?P<thread>[0-9a-f]{6})-(?P<branch>\d{1,19})-(?P<upto>\d{1,19})(?P<ranges>(?:\.\d{1,19}(?:~\d{1,19})?)*)"
    r"(?:-(?P<reply>[0-9a-f]{8})(?P<blocks>(?:\.\d{1,19}[tkc]\d{1,19})*))?"
)
_KINDS = {"text": "t", "thinking": "k", "arguments": "c"}
_LETTERS = {letter: kind for kind, letter in _KINDS.items()}


class Seen(NamedTuple):
    """Which seqs of a branch were read: all up to `upto`, and these ranges behind it.

    Results of parallel tools fill the slots behind their reply in any order; so there are gaps, until the next reply.
    """

    upto: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def last(self) -> int:
        return self.ranges[-1][1] if self.ranges else self.upto

    def __contains__(self, seq: object) -> bool:
        assert isinstance(seq, int)
        return seq <= self.upto or any(first <= seq <= last for first, last in self.ranges)

    def gaps(self, head: int) -> Iterator[tuple[int, int]]:
        """What is not in it, up to a head: behind one seq and up to another."""
        after = self.upto
        for first, last in (*self.ranges, (head + 1, head)):
            if after < first - 1:
                yield after, first - 1
            after = last

    def with_seq(self, seq: int, *, is_reply: bool) -> Seen:
        """With one more. Before a reply is stored, all calls of the one before it are settled: gaps there stay."""
        if is_reply and seq > self.upto:
            return Seen(seq, tuple(each for each in self.ranges if each[0] > seq))._joined()
        if seq == self.upto + 1 and not self.ranges:
            return Seen(seq)
        return Seen(self.upto, tuple(sorted((*self.ranges, (seq, seq)))))._joined()

    def cut(self, seq: int) -> Seen:
        """What is left of it up to a seq."""
        ranges = tuple((first, min(last, seq)) for first, last in self.ranges if first <= seq)
        return Seen(min(self.upto, seq), ranges)

    def _joined(self) -> Seen:
        upto, joined = self.upto, list[tuple[int, int]]()
        for first, last in self.ranges:
            if first <= upto + 1 and not joined:
                upto = max(upto, last)
            elif joined and first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], last))
            else:
                joined.append((first, last))
        return Seen(upto, tuple(joined))


class Offset(NamedTuple):
    """How much of a block was read. `kind` is text, thinking or arguments."""

    kind: str
    length: int


class Cursor(NamedTuple):
    """A position in a thread. `reply` identifies a reply that is arriving; `offsets` has its blocks by their index."""

    thread: str
    branch: int
    seen: Seen = Seen()
    reply: str | None = None
    offsets: tuple[tuple[int, Offset], ...] = ()

    def __str__(self) -> str:
        ranges = "".join(f".{first}" if first == last else f".{first}~{last}" for first, last in self.seen.ranges)
        text = f"{self.thread}-{self.branch}-{self.seen.upto}{ranges}"
        if self.reply is None:
            return text
        blocks = "".join(f".{index}{_KINDS[kind]}{length}" for index, (kind, length) in self.offsets)
        return f"{text}-{self.reply}{blocks}"


def parse(text: object) -> Cursor | None:
    """The cursor that a text stands for; None if it is none."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST and text.isascii() else None
    if found is None or any(int(number) >= _HIGHEST for number in re.findall(r"\d+", found[0][7:])):
        return None
    ranges = [tuple(map(int, each.split("~"))) for each in found["ranges"].split(".")[1:]]
    seen = Seen(int(found["upto"]), tuple((each[0], each[-1]) for each in ranges))
    if any(first > last for first, last in seen.ranges) or seen != seen._joined():
        return None
    blocks = re.findall(r"\.(\d+)([tkc])(\d+)", found["blocks"] or "")
    offsets = tuple((int(index), Offset(_LETTERS[letter], int(length))) for index, letter, length in blocks)
    return Cursor(found["thread"], int(found["branch"]), seen, found["reply"], offsets)


def thread_mark(namespace: str, thread_id: str, made_at: str) -> str:
    """What identifies a thread in cursors: a thread that is made anew under the same id has another mark."""
    return _digest(f"{namespace}\0{thread_id}\0{made_at}")[:6]


def reply_mark(reply_id: str) -> str:
    """What identifies a reply in cursors."""
    return _digest(reply_id)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
