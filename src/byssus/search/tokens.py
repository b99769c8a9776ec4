r"""Words: how text is folded, cut into tokens, searched, and shown. Nothing here knows of a database.

- Text is compared folded: NFKC, casefolded, without the accents of Latin, Greek and Cyrillic letters.
- Scripts that are written without spaces between words (Chinese, Japanese, Thai and their like; and Korean, whose words
  carry endings) form runs. What is searched there is a plain substring, from one character up. All other letters and
  digits form words: those of plain Latin letters are compared by their English stem, the others as they are.
- The tokens of a text are its words and the overlapping pairs of its runs, in order; behind them, the single characters
  of its runs. Whatever a query matches has all the tokens of the query, and those of each of its `chains` side by side.
  The reverse need not be true: an index over the tokens gives candidates, and `Matcher` decides. So what is found does
  not depend on the index.
- Matching takes time that is linear in the text, whatever the query is: a phrase is not tried again at each place.
- `VERSION` grows with each change to what the tokens of a text are: an index of another version is rebuilt.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import threading
import unicodedata
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import add
from typing import NamedTuple, TypeAlias

import Stemmer

from byssus.errors import InputError

VERSION = 1
MAX_QUERY = 1_000  # characters
MAX_TERMS = 50

_LONGEST, _KEPT = 64, 40  # characters of a token: of a longer one, the beginning and a digest
_MANY = 1_000  # matches of one term in one text that are looked at
_SNIPPET, _LEAD = 120, 30  # characters of a snippet, and of them those before the first match

# Thai, Lao, Myanmar, Hangul, Khmer, ideographic marks, kana, bopomofo, Han.
_RUNS = (
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e50-\u0e59\u0e81-\u0edf\u1000-\u109f\u1100-\u11ff\u1780-\u17d3\u17d7\u17dc-\u17e9"
    "\u3005-\u3007\u3021-\u302f\u3031-\u3035\u3038-\u303c\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f"
    "\u3131-\u318e\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97c\ua9e0-\ua9fe\uaa60-\uaa7f"
    "\uac00-\ud7fb\uf900-\ufaff\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
# Vowel signs and the like, which continue a word: `\w` does not know them. (Letters between them do no harm.)
_MARKS = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u05bf\u05c1-\u05c2\u05c4-\u05c5\u05c7\u0610-\u061a\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed\u0711-\u07f3\u07fd\u0816-\u082d\u0859-\u085b\u0898-\u08e1\u08e3-\u0963"
    "\u0981-\u09e3\u09fe-\u0a75\u0a81-\u0ae3\u0afa-\u0b63\u0b82-\u0bd7\u0c00-\u0c63\u0c81-\u0c83\u0cbc-\u0d4d"
    "\u0d57-\u0d63\u0d81-\u0df3\u0f18-\u0f19\u0f35\u0f37\u0f39\u0f3e-\u0f84\u0f86-\u0fbc\u0fc6\u135d-\u135f"
    "\u1712-\u1734\u1752-\u1773\u180b-\u180d\u1885-\u1886\u18a9\u1920-\u193b\u1a17-\u1a1b\u1a55-\u1a7f\u1ab0-\u1b44"
    "\u1b6b-\u1b73\u1b80-\u1bf3\u1c24-\u1c37\u1cd0-\u1cd2\u1cd4-\u1cf9\u1dc0-\u1dff\ua8e0-\ua8f1\ufe20-\ufe2f"
)
_LETTER = rf"[^\W_{_RUNS}]"
_WORD = rf"{_LETTER}+(?:[{_MARKS}]+{_LETTER}*)*"

_token = re.compile(rf"([{_RUNS}]+)|({_WORD})")
_word = re.compile(_WORD)
_inside = re.compile(rf"{_LETTER}|[{_MARKS}]")  # a word goes on here
_solid = re.compile(rf"[^\W_]+|[{_RUNS}]+")  # all that is no gap
_space = re.compile(r"\s+")
_part = re.compile(r'(-?)"([^"]*)"|(\S+)')
_composing = re.compile("[\u1160-\u11ff\u3099\u309a\uff9e-\uffdc]")  # these join the character before them

# The marks of a sentence are no part of what is searched, unless they stand inside a word, as in 1,000 and foo.bar.
_EDGES = ",.?!:;()[]{}'"
_STOPS = str.maketrans(dict.fromkeys("，。？！：；、「」『』《》〈〉【】（）｡､｢｣…—", " "))  # noqa: RUF001

Span: TypeAlias = tuple[int, int]


# --- folding ----------------------------------------------------------------------------------------------------------

_ACCENTS = dict.fromkeys(range(0x300, 0x370))
_QUOTES = {**dict.fromkeys("\u2018\u2019\u201b", "'"), **dict.fromkeys("\u201c\u201d\u201e", '"')}


class _Folds(dict[int, str]):
    """What each character is folded to, found out when it is first seen."""

    def __init__(self) -> None:
        super().__init__()
        self.resized: set[str] = set()  # those that become none, or more than one

    def __missing__(self, code: int) -> str:
        folded = self[code] = _fold_character(chr(code))
        if len(folded) != 1:
            self.resized.add(chr(code))
        return folded


def _fold_character(character: str) -> str:
    if ord(character) in _ACCENTS:
        return ""
    folded = unicodedata.normalize("NFKC", _QUOTES.get(character, character)).casefold()
    if folded and folded[0].isalpha():
        folded = unicodedata.normalize("NFD", folded).translate(_ACCENTS)
    return unicodedata.normalize("NFKC", folded)


_folds = _Folds()


class Folded:
    """A text in its folded form, and the way back to the original."""

    __slots__ = ("_edges", "_gaps", "_spaces", "_words", "source", "text")

    def __init__(self, source: str) -> None:
        self.source = source
        self._words: dict[str, list[Span]] | None = None
        self._gaps: _Gaps | None = None
        self._spaces: _Gaps | None = None
        # Where the forms differ in length: begin and end there, begin and end here. None: not looked for yet.
        self._edges: list[tuple[int, int, int, int]] | None = None
        if source.isascii():
            self.text, self._edges = source.lower(), []
        elif unicodedata.is_normalized("NFC", source) and not _composing.search(source):
            self.text = source.translate(_folds)
        else:
            self.text, self._edges = _fold_clusters(source)

    def words(self) -> dict[str, list[Span]]:
        """Where the words are, by their tokens."""
        if self._words is None:
            self._words = defaultdict(list)
            for match in _word.finditer(self.text):
                self._words[token_of(match[0])].append(match.span())
        return self._words

    def gaps(self) -> _Gaps:
        """What lies between words and runs."""
        if self._gaps is None:
            ends = [0, *itertools.chain.from_iterable(match.span() for match in _solid.finditer(self.text))]
            between = zip(ends[::2], [*ends[1::2], len(self.text)], strict=True)
            self._gaps = _Gaps((start, end) for start, end in between if start < end)
        return self._gaps

    def spaces(self) -> _Gaps:
        """White space."""
        if self._spaces is None:
            self._spaces = _Gaps(match.span() for match in _space.finditer(self.text))
        return self._spaces

    def original(self, span: Span) -> Span:
        """The same place in the original."""
        start, end = self._back(span[0], 2), self._back(span[1] - 1, 3)
        while end < len(self.source) and ord(self.source[end]) in _ACCENTS:  # folded to nothing
            end += 1
        return start, end

    def _back(self, offset: int, side: int) -> int:
        if self._edges is None:
            self._edges = _edges_of(self.source)
        low, high = 0, len(self._edges)
        while low < high:  # the last edge that begins at the place or before it
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._edges[middle][0] <= offset else (low, middle)
        if low == 0:
            return offset + (side == 3)
        edge = self._edges[low - 1]
        return edge[side] if offset < edge[1] else offset - edge[1] + edge[3] + (side == 3)


class _Gaps:
    """Parts of a text that do not touch each other, in order."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = list(spans)
        self._starts = [start for start, _ in self._spans]

    def end(self, offset: int) -> int:
        """The end of the part with this place in it; -1 if there is none."""
        number = bisect_right(self._starts, offset)
        end = self._spans[number - 1][1] if number else -1
        return end if end > offset else -1


def _edges_of(source: str) -> list[tuple[int, int, int, int]]:
    resized = _folds.resized.intersection(source)
    if not resized:
        return []
    edges, shift = [], 0
    for match in re.finditer(f"[{re.escape(''.join(sorted(resized)))}]", source):
        start, end = match.span()
        size = len(_folds[ord(match[0])])
        edges.append((start + shift, start + shift + size, start, end))
        shift += size - 1
    return edges


def _joins(character: str) -> bool:
    return unicodedata.category(character)[0] == "M" or _composing.match(character) is not None


def _fold_clusters(source: str) -> tuple[str, list[tuple[int, int, int, int]]]:
    """The slow way, for text whose characters are composed of several: each with what joins it, as one."""
    starts = [offset for offset, character in enumerate(source) if offset == 0 or not _joins(character)]
    parts: list[str] = []
    edges: list[tuple[int, int, int, int]] = []
    size = 0
    for start, end in zip(starts, [*starts[1:], len(source)], strict=True):
        folded = unicodedata.normalize("NFKC", source[start:end]).translate(_folds)
        if len(folded) != 1 or end - start != 1:
            edges.append((size, size + len(folded), start, end))
        size += len(folded)
        parts.append(folded)
    return "".join(parts), edges


# --- tokens -----------------------------------------------------------------------------------------------------------

_stemmer = Stemmer.Stemmer("english", 0)
_stemming = threading.Lock()


def _unlock() -> None:
    global _stemming, _stemmer
    _stemming, _stemmer = threading.Lock(), Stemmer.Stemmer("english", 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@functools.lru_cache(maxsize=100_000)
def token_of(word: str) -> str:
    """What stands for a folded word in an index."""
    token = word
    if word.isascii() and word.isalpha():
        with _stemming:
            token = _stemmer.stemWord(word)
    if len(token) <= _LONGEST:
        return token
    return token[:_KEPT] + hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def tokens(text: str) -> tuple[list[str], list[str]]:
    """The tokens of a text, as an index holds them: those in order, and the single characters of its runs."""
    sequence: list[str] = []
    singles: set[str] = set()
    for match in _token.finditer(Folded(text).text):
        run = match[1]
        if run is None:
            sequence.append(token_of(match[2]))
        else:
            singles.update(run)
            sequence.extend(map(add, run, run[1:]))
    return sequence, sorted(singles)


# --- queries ----------------------------------------------------------------------------------------------------------


class _Piece:
    """A part of a term without white space: a word, a run, or a literal in which every character counts."""

    def __init__(self, text: str) -> None:
        self.text = text
        word = _word.match(text)  # not fullmatch: letters may count as marks, and it would try all ways to part them
        self.token = token_of(text) if word and word.end() == len(text) else None
        self.is_spaced = not _token.match(text)  # it begins with what else would be taken for a gap
        self._starts_word = _inside.match(text) is not None
        self._ends_word = _inside.match(text[-1]) is not None

    def at(self, folded: Folded, offset: int) -> int:
        """Where it ends, if it is at this place; else -1."""
        text = folded.text
        if self.token is not None:
            word = _word.match(text, offset)
            return word.end() if word and token_of(word[0]) == self.token else -1
        end = offset + len(self.text)
        if not text.startswith(self.text, offset):
            return -1
        cuts_start = self._starts_word and offset > 0 and _inside.match(text, offset - 1)
        cuts_end = self._ends_word and _inside.match(text, end)
        return -1 if cuts_start or cuts_end else end

    def spans(self, folded: Folded) -> Iterator[Span]:
        """All places where it is, also those that overlap."""
        if self.token is not None:
            yield from folded.words().get(self.token, ())
            return
        offset = folded.text.find(self.text)
        while offset >= 0:
            end = self.at(folded, offset)
            if end >= 0:
                yield offset, end
            offset = folded.text.find(self.text, offset + 1)


class Term:
    """What must be in a text, or must not: pieces, one after the other, with nothing but gaps between them.

    A phrase is found from the end of the text to its beginning. For each place where one of the pieces is, a number
    says which of them are there *and* followed by all the others: its bit 0 stands for the first piece. So each place
    is looked at once, however often the phrase almost matches.
    """

    def __init__(self, text: str) -> None:
        self._pieces = [_Piece(piece) for piece in text.split()]
        self._bits: dict[str, int] = defaultdict(int)  # by the text of a piece: at which positions of the phrase it is
        self._spaced = 0  # the positions behind white space; the others are behind any gap
        for position, piece in enumerate(self._pieces):
            self._bits[piece.text] |= 1 << position
            self._spaced |= piece.is_spaced << position

    def spans(self, folded: Folded) -> Iterator[Span]:
        """The places where it is; those of a phrase do not overlap."""
        first, *others = self._pieces
        if not others:
            yield from first.spans(folded)
            return
        end = 0
        for start in self._starts(folded):
            if start >= end:
                end = self._end(folded, start)
                yield start, end

    def _starts(self, folded: Folded) -> list[int]:
        """Where the phrase begins, in order."""
        last = 1 << len(self._pieces) - 1
        complete: dict[int, int] = {}
        for start, end, bits in self._places(folded):
            follows = complete.get(folded.gaps().end(end), 0) & ~self._spaced
            if self._spaced:
                follows |= complete.get(folded.spaces().end(end), 0) & self._spaced
            if found := bits & (follows >> 1 | last):
                complete[start] = complete.get(start, 0) | found
        return [start for start in reversed(complete) if complete[start] & 1]

    def _places(self, folded: Folded) -> list[tuple[int, int, int]]:
        """Where its pieces are, the last place first; nothing if one of them is nowhere."""
        places: list[tuple[int, int, int]] = []
        for piece in {piece.text: piece for piece in self._pieces}.values():
            bits = self._bits[piece.text]
            before = len(places)
            places += [(start, end, bits) for start, end in piece.spans(folded)]
            if len(places) == before:
                return []
        places.sort(reverse=True)
        return places

    def _end(self, folded: Folded, start: int) -> int:
        """Where the phrase ends that begins here."""
        end = self._pieces[0].at(folded, start)
        for piece in self._pieces[1:]:
            end = piece.at(folded, (folded.spaces() if piece.is_spaced else folded.gaps()).end(end))
        return end

    def chains(self) -> Iterator[list[str]]:
        """Tokens that are side by side in each text with this term."""
        chain: list[str] = []
        for piece in self._pieces:
            for match in _token.finditer(piece.text):
                run = match[1]
                if run is None:
                    chain.append(token_of(match[2]))
                elif len(run) > 1:
                    chain.extend(map(add, run, run[1:]))
                else:  # it may be a part of a longer run there, and then it is in another place
                    yield [run]
                    if chain:
                        yield chain
                    chain = []
        if chain:
            yield chain


class Found(NamedTuple):
    """A text that matches: where each of the terms is, in its folded form."""

    folded: Folded
    spans: list[list[Span]]

    def counts(self) -> list[int]:
        return [len(spans) for spans in self.spans]


class Matcher:
    """A query, read: what must be there, and what must not."""

    def __init__(self, required: list[Term], excluded: list[Term]) -> None:
        self._required = required
        self._excluded = excluded

    def find(self, text: str) -> Found | None:
        """Where the query matches in a text; None if it does not."""
        folded = Folded(text)
        spans: list[list[Span]] = []
        for term in self._required:
            found = [span for span, _ in zip(term.spans(folded), range(_MANY), strict=False)]
            if not found:
                return None
            spans.append(found)
        for term in self._excluded:
            if next(term.spans(folded), None) is not None:
                return None
        return Found(folded, spans)

    def chains(self) -> list[list[str]]:
        """Tokens that each text which matches has, those of a list side by side."""
        unique = {tuple(chain): None for term in self._required for chain in term.chains()}
        return [list(chain) for chain in unique]


def parse(query: object) -> Matcher:
    """Read a query: words that must all be there, `"phrases"`, and `-words` or `-"phrases"` that must not."""
    if not isinstance(query, str):
        raise InputError(f"a search is for text, got {type(query).__name__}: {query!r:.80}")
    if len(query) > MAX_QUERY:
        raise InputError(f"a search takes up to {MAX_QUERY:,} characters, got {len(query):,}; use fewer words")
    required: list[Term] = []
    excluded: list[Term] = []
    for match in _part.finditer(Folded(query.translate(_STOPS)).text):
        text, is_excluded = _read_part(match)
        if text.strip():
            (excluded if is_excluded else required).append(Term(text))
    if len(required) + len(excluded) > MAX_TERMS:
        raise InputError(
            f"a search takes up to {MAX_TERMS} words and phrases, got {len(required) + len(excluded)}; use fewer"
        )
    matcher = Matcher(required, excluded)
    if not matcher.chains():
        raise InputError(f"a search needs a letter or a digit that is not excluded, got {query!r:.80}; add a word")
    return matcher


def _read_part(match: re.Match[str]) -> tuple[str, bool]:
    sign, phrase, plain = match.groups()
    if plain is None:
        return phrase, sign == "-"
    is_excluded = len(plain) > 1 and plain[0] == "-" and plain[1] != "-"  # not `--help`: that is text
    text = plain[is_excluded:].strip(_EDGES)
    return ("" if all(map(_is_mark, text)) else text), is_excluded


def _is_mark(character: str) -> bool:
    """Whether it only parts words: not a letter, nor a sign that means something, as = or an emoji."""
    return unicodedata.category(character)[0] == "P"


# --- snippets ---------------------------------------------------------------------------------------------------------


def snippet(found: Found, marks: tuple[str, str]) -> str:
    """A line of the original around the place where most of the terms are close to each other, with matches marked."""
    source = found.folded.source
    first = _best(found.spans)
    start = max(0, found.folded.original(first)[0] - _LEAD)
    end = min(len(source), start + _SNIPPET)
    start, end = _whole(source, start), _whole(source, end)
    parts = ["\u2026"] if start > 0 else []
    offset = start
    for left, right in _merged(found, first[0], start, end):
        parts += [_line(source[offset:left]), marks[0], _line(source[left:right]), marks[1]]
        offset = right
    parts += [_line(source[offset:end]), "\u2026" if end < len(source) else ""]
    return "".join(parts).strip()


def _best(spans: list[list[Span]]) -> Span:
    """The match behind which most of the terms follow within a snippet; the first of those."""
    found_spans = sorted((span, term) for term, found in enumerate(spans) for span in found)
    best, most, last = found_spans[0][0], 0, 0
    inside = [0] * len(spans)
    for position, (span, term) in enumerate(found_spans):
        while last < len(found_spans) and found_spans[last][0][0] < span[0] + _SNIPPET - _LEAD:
            inside[found_spans[last][1]] += 1
            last += 1
        terms = sum(count > 0 for count in inside)
        if terms > most:
            best, most = span, terms
        if last > position:
            inside[term] -= 1
    return best


def _merged(found: Found, near: int, start: int, end: int) -> list[Span]:
    """The matches inside a part of the original, those that touch as one."""
    merged: list[Span] = []
    close = [span for spans in found.spans for span in spans if abs(span[0] - near) <= 4 * _SNIPPET or span[1] > near]
    for left, right in sorted(map(found.folded.original, sorted(close)[: 8 * _SNIPPET])):
        left, right = max(left, start), min(right, end)
        if left >= right:
            continue
        if merged and left <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(right, merged[-1][1]))
        else:
            merged.append((left, right))
    return merged


def _whole(source: str, offset: int) -> int:
    """The place, moved back so that it cuts no character in two that consists of several."""
    for _ in range(_LEAD):
        if offset == 0 or offset == len(source) or not _is_inside(source[offset - 1], source[offset]):
            break
        offset -= 1
    return offset


def _is_inside(before: str, here: str) -> bool:
    joiner = "\u200d"
    return _joins(here) or joiner in (before, here) or "\U0001f3fb" <= here <= "\U0001f3ff" or _is_flag(before, here)


def _is_flag(before: str, here: str) -> bool:
    return all("\U0001f1e6" <= character <= "\U0001f1ff" for character in (before, here))


def _line(text: str) -> str:
    return _space.sub(" ", text)
