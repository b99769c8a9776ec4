"""A reply as it grows: its blocks, and what is new since the last look.

What is saved of a reply, and what its followers get, are differences: the text of each block behind an offset. So
it does not matter how the deltas were cut, or how often they are read. A piece carries its own offset, so what comes
twice is noticed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from byssus.events import (
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import AssistantMessage, TextContent, ThinkingContent, dumps

TEXT, THINKING, ARGUMENTS = "text", "thinking", "arguments"
SHOWN = (TEXT, THINKING, ARGUMENTS)
_SIGNATURE, _REDACTED = "signature", "redacted"  # of a block of thinking: kept for the model, never shown

Strand: TypeAlias = tuple[int, str]  # the index of a block, and which of its texts


class Piece(NamedTuple):
    """Text of one strand, and how many characters came before it. A call has an id and a tool."""

    block: int
    kind: str
    offset: int
    text: str
    call_id: str | None = None
    tool_name: str | None = None


class _Text:
    __slots__ = ("call", "ends", "parts")

    def __init__(self, call: tuple[str, str] | None) -> None:
        self.parts: list[str] = []
        self.ends: list[int] = []  # where each part ends
        self.call = call

    def add(self, text: str) -> None:
        self.ends.append(self.length + len(text))
        self.parts.append(text)

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0

    def behind(self, offset: int, most: int | None) -> str:
        first = bisect_right(self.ends, offset)
        last = None if most is None else bisect_right(self.ends, offset + most) + 1
        text = "".join(self.parts[first:last])
        begins = self.ends[first - 1] if first else 0
        return text[offset - begins : None if most is None else offset - begins + most]


class Growth:
    """The blocks of a reply. `add` is on the hot path: it runs once for each delta."""

    def __init__(self) -> None:
        self._texts: dict[Strand, _Text] = {}

    def add(self, event: StreamEvent) -> None:
        kind = type(event)
        if kind is TextDelta:
            self._grow((event.index, TEXT), event.delta)  # type: ignore[union-attr]
        elif kind is ThinkingDelta:
            self._grow((event.index, THINKING), event.delta)  # type: ignore[union-attr]
        elif kind is ToolCallDelta:
            self._grow((event.index, ARGUMENTS), event.delta)  # type: ignore[union-attr]
        elif isinstance(event, ThinkingStart):
            self._grow((event.index, THINKING), "")
        elif isinstance(event, ToolCallStart):
            self._texts[event.index, ARGUMENTS] = _Text((event.id, event.name))
        elif isinstance(event, ThinkingEnd):
            for name, text in ((_SIGNATURE, event.signature), (_REDACTED, event.redacted)):
                if text:
                    self._grow((event.index, name), text)
        elif isinstance(event, ToolCallEnd):
            self._end_call(event)

    def _end_call(self, event: ToolCallEnd) -> None:
        """A provider may send a call as a whole."""
        call = event.tool_call
        known = self._texts.setdefault((event.index, ARGUMENTS), _Text((call.id, call.name)))
        known.call = (call.id, call.name)
        if not known.length:
            known.add(call.malformed or dumps(call.arguments))

    def _grow(self, strand: Strand, text: str) -> None:
        known = self._texts.get(strand)
        if known is None:
            known = self._texts[strand] = _Text(None)
        known.add(text)

    def put(self, pieces: Iterable[Piece]) -> None:
        """Add what was saved."""
        for piece in pieces:
            call = (piece.call_id, piece.tool_name or "") if piece.call_id is not None else None
            known = self._texts.setdefault((piece.block, piece.kind), _Text(call))
            if piece.offset <= known.length < piece.offset + len(piece.text):
                known.add(piece.text[known.length - piece.offset :])

    def text(self, block: int) -> str:
        """The text or the thinking of a block."""
        return "".join(
            "".join(known.parts) for kind in (TEXT, THINKING) if (known := self._texts.get((block, kind))) is not None
        )

    @property
    def blocks(self) -> set[int]:
        """The blocks of text and thinking that have begun."""
        return {block for block, kind in tuple(self._texts) if kind in (TEXT, THINKING)}

    @property
    def offsets(self) -> dict[Strand, int]:
        return {strand: known.length for strand, known in tuple(self._texts.items())}

    def since(self, offsets: Mapping[Strand, int], *, most: int | None = None) -> list[Piece]:
        """What is behind these offsets, of each strand so many characters at most.

        A call whose arguments have not begun is there as an empty piece.
        """
        found = []
        for strand, known in sorted(self._texts.items()):
            offset = offsets.get(strand, -1)
            if known.length > offset and (known.length or known.call):
                call_id, tool_name = known.call or (None, None)
                found.append(Piece(*strand, max(offset, 0), known.behind(max(offset, 0), most), call_id, tool_name))
        return found

    def message(self, head: AssistantMessage) -> AssistantMessage:
        """What can be read of it, behind the blocks of a head. Calls are left out: they are not whole."""
        blocks: list[Any] = []
        for block in sorted(self.blocks):
            thinking = self._texts.get((block, THINKING))
            if thinking is None:
                blocks.append(TextContent(self.text(block)))
            else:
                blocks.append(
                    ThinkingContent(self.text(block), self._kept(block, _SIGNATURE), self._kept(block, _REDACTED))
                )
        return msgspec.structs.replace(head, content=[*head.content, *blocks])

    def _kept(self, block: int, kind: str) -> str | None:
        known = self._texts.get((block, kind))
        return "".join(known.parts) if known is not None else None


def encode_pieces(pieces: Iterable[Piece]) -> str:
    return dumps([list(piece) if piece.call_id is not None else list(piece[:4]) for piece in pieces])


def decode_pieces(body: str) -> list[Piece]:
    return [Piece(*values) for values in json.loads(body)]


def assembled(head: AssistantMessage, bodies: Iterable[str]) -> AssistantMessage:
    """The part of a reply that was saved: its head, and the pieces that were added to it."""
    growth = Growth()
    for body in bodies:
        growth.put(decode_pieces(body))
    return growth.message(head)
