"""Messages and blocks: the values that a conversation is made of, and their JSON in both directions.

- Values are frozen. `content` is always a list of blocks; a plain string given to a constructor becomes one text block.
- `decode(encode(m)) == m`, whatever strings, numbers and nesting it holds.
- A field or block that this version does not know (a newer one wrote it) is kept aside and written back unchanged.
- JSON that is no message for a model becomes a `Note`: visible to people, skipped for models.
- JSON only. Nothing is imported, called or evaluated while decoding.
"""

from __future__ import annotations

import binascii
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field

from byssus.errors import InputError, StoreCorrupt
from byssus.values import clock, shown

# The encoded name of the fields that carry what this version does not know. It never reaches the database: `encode`
# looks for it and splices the content back to where it came from.
__all__ = [
    "AssistantMessage",
    "Block",
    "Failure",
    "ImageContent",
    "Message",
    "ModelMessage",
    "Note",
    "TextContent",
    "ThinkingContent",
    "ToolCall",
    "ToolResultMessage",
    "UnknownBlock",
    "Usage",
    "UserMessage",
    "decode",
    "encode",
    "from_value",
    "to_value",
]

_ASIDE: Final = "~unknown"

if TYPE_CHECKING:
    ReplyStop: TypeAlias = Literal["stop", "tool_use", "length", "error", "aborted"]
else:
    ReplyStop = str  # a newer version may know others, and what it has stored is read all the same

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")

# Deeper JSON could be written here, and then not be read by a caller whose stack is already deep.
MAX_DEPTH = 400
_SHALLOW = 2 * MAX_DEPTH  # bytes of JSON that cannot be nested deeper


# gc=False: JSON has no cycles, and a long thread should not be walked by the collector again and again.
class _Value(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, repr_omit_defaults=True, gc=False
):
    unknown: dict[str, Any] | None = field(default=None, name=_ASIDE)


class TextContent(_Value, frozen=True, tag_field="type", tag="text"):
    """A block of text."""

    type: ClassVar[Literal["text"]] = "text"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InputError(f"TextContent needs a string, got {type(self.text).__name__}: {self.text!r:.80}")


class ImageContent(_Value, frozen=True, tag_field="type", tag="image"):
    """An image: base64 data and its media type."""

    type: ClassVar[Literal["image"]] = "image"
    data: str
    mime_type: str = "image/png"

    @classmethod
    def from_bytes(cls, data: bytes) -> ImageContent:
        """Make an image from the bytes of a PNG, JPEG, GIF or WebP file."""
        image = cls(binascii.b2a_base64(data, newline=False).decode())
        kind = image_type(image)
        if kind is None:
            raise InputError(f"these bytes are no PNG, JPEG, GIF or WebP image: {bytes(data[:20])!r}...")
        return cls(image.data, kind)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ImageContent:
        """Make an image from a PNG, JPEG, GIF or WebP file."""
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow to import
                return cls.from_bytes(file.read())
        except OSError as error:
            raise InputError(f"the image {os.fspath(path)!r} cannot be read: {error.strerror or error}") from error
        except InputError as error:
            raise InputError(f"the file {os.fspath(path)!r} is no PNG, JPEG, GIF or WebP image") from error


_IMAGES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def image_type(image: ImageContent) -> str | None:
    """The media type of the data itself, whatever `mime_type` says; None if it is not a supported image."""
    try:
        start = binascii.a2b_base64(image.data[:64])  # enough to tell, and the rest is checked as letters only
    except (ValueError, TypeError):
        return None
    if not _BASE64.fullmatch(image.data):
        return None
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for mark, kind in _IMAGES if start.startswith(mark)), None)


class ThinkingContent(_Value, frozen=True, tag_field="type", tag="thinking"):
    """A model's thinking. `signature` proves it to its service; `redacted` is its encrypted form."""

    type: ClassVar[Literal["thinking"]] = "thinking"
    thinking: str = ""
    signature: str | None = None
    redacted: str | None = None


class ToolCall(_Value, frozen=True, tag_field="type", tag="tool_call"):
    """A model's request to run a tool. `malformed` holds the text of arguments that were no JSON object.

    `is_invented`: the agent that got this reply had no tool of that name.
    """

    type: ClassVar[Literal["tool_call"]] = "tool_call"
    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    malformed: str | None = None
    is_invented: bool = False


class UnknownBlock(Struct, frozen=True, tag_field="type", tag=_ASIDE):
    """A block of a type that this version does not know; it is stored unchanged."""

    type: ClassVar[Literal["~unknown"]] = _ASIDE
    data: Any


Block: TypeAlias = TextContent | ImageContent | ThinkingContent | ToolCall | UnknownBlock
_BLOCKS: dict[str, type[Block]] = {cls.type: cls for cls in (TextContent, ImageContent, ThinkingContent, ToolCall)}
_BLOCK_TYPES = frozenset({*_BLOCKS.values(), UnknownBlock})


class Usage(_Value, frozen=True):
    """The tokens of a model call, and their cost."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cost: float = 0.0

    @property
    def total(self) -> int:
        """All tokens: input, output, cache reads and cache writes."""
        return self.input + self.output + self.cache_read + self.cache_write

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cache_read + other.cache_read,
            self.cache_write + other.cache_write,
            self.cost + other.cost,
        )

    def plausible(self) -> Usage:
        """Return the usage with impossible numbers clamped: tokens from 0 to `MOST_TOKENS`, a cost from 0.

        A service may send any number. A negative one would lower a user's quota, and a huge one fits no column.
        """
        tokens = self.input, self.output, self.cache_read, self.cache_write
        if type(self.cost) is float and 0 <= self.cost < MOST_TOKENS and all(map(_is_plausible, tokens)):
            return self
        counts = dict(zip(("input", "output", "cache_read", "cache_write"), map(plausible_tokens, tokens), strict=True))
        return msgspec.structs.replace(self, **counts, cost=_plausible_cost(self.cost))


MOST_TOKENS = 2**40  # far above any real call; millions of such numbers can be added in a column


def _is_plausible(tokens: object) -> bool:
    return type(tokens) is int and 0 <= tokens <= MOST_TOKENS


def plausible_tokens(tokens: object) -> int:
    """A number of tokens that can be counted and added; what is no number counts as 0."""
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or tokens != tokens:  # noqa: PLR0124 - NaN
        return 0
    return int(max(0, min(tokens, MOST_TOKENS)))


def _plausible_cost(cost: object) -> float:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < MOST_TOKENS:
        return 0.0
    return float(cost)


class Failure(_Value, frozen=True):
    """The failure of a reply, as it is stored: the error's class name and its message."""

    kind: str
    message: str


class _Message(_Value, frozen=True, kw_only=True):
    id: str | None = None
    created_at: str | None = None

    def __post_init__(self) -> None:
        content = self.content  # type: ignore[attr-defined]
        if type(content) is not list or not _BLOCK_TYPES.issuperset(map(type, content)):
            msgspec.structs.force_setattr(self, "content", _blocks_of(self, content))

    @property
    def text(self) -> str:
        """All text of the message, without its other blocks."""
        return "".join(block.text for block in self.content if type(block) is TextContent)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return shown.as_text(self)

    def _repr_markdown_(self) -> str:
        return shown.as_markdown(self)


def _blocks_of(message: _Message, content: object) -> list[Block]:
    """Convert content to blocks: a string, or a list of blocks and dicts."""
    if isinstance(content, str):
        return [TextContent(content)]
    blocks: list[Any] = list(content) if isinstance(content, Sequence) else [content]
    for position, block in enumerate(blocks):
        if isinstance(block, dict):
            blocks[position] = _block(block)
        elif type(block) not in _BLOCK_TYPES:
            raise InputError(
                f"{type(message).__name__} content must be a string or a list of blocks, got "
                f"{type(block).__name__}: {block!r:.80}"
            )
    return blocks


class UserMessage(_Message, frozen=True, tag_field="role", tag="user"):
    """A message from the user to the agent."""

    role: ClassVar[Literal["user"]] = "user"
    content: list[Block]

    if TYPE_CHECKING:

        def __init__(
            self, content: str | Sequence[Block], *, id: str | None = None, created_at: str | None = None
        ) -> None: ...


class AssistantMessage(_Message, frozen=True, tag_field="role", tag="assistant"):
    """A model's reply. `stop_reason` is stop, tool_use, length, error or aborted."""

    role: ClassVar[Literal["assistant"]] = "assistant"
    content: list[Block]
    stop_reason: ReplyStop = "stop"
    usage: Usage = Usage()
    model: str | None = None
    provider: str | None = None
    error: Failure | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            content: str | Sequence[Block],
            stop_reason: ReplyStop = "stop",
            usage: Usage = ...,
            model: str | None = None,
            provider: str | None = None,
            error: Failure | None = None,
            *,
            id: str | None = None,
            created_at: str | None = None,
        ) -> None: ...

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls in the reply, in order."""
        return [block for block in self.content if type(block) is ToolCall]

    @property
    def failed(self) -> bool:
        """Whether the reply is incomplete, because of an error or an abort."""
        return self.stop_reason in ("error", "aborted")


class ToolResultMessage(_Message, frozen=True, tag_field="role", tag="tool_result"):
    """The result of a tool call. The model sees `content`; `details` is for programs and people."""

    role: ClassVar[Literal["tool_result"]] = "tool_result"
    tool_call_id: str
    tool_name: str
    content: list[Block]
    details: Any = None
    is_error: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            tool_call_id: str,
            tool_name: str,
            content: str | Sequence[Block],
            details: Any = None,
            is_error: bool = False,
            *,
            id: str | None = None,
            created_at: str | None = None,
        ) -> None: ...


class Note(Struct, frozen=True):
    """Any JSON that is not a message: it is stored and shown, but never sent to a model."""

    body: Any

    @property
    def role(self) -> str:
        """The role in its body, or "note"."""
        role = self.body.get("role") if isinstance(self.body, dict) else None
        return role if isinstance(role, str) else "note"

    @property
    def text(self) -> str:
        """All text in its content."""
        return "\n".join(_strings(self.body.get("content") if isinstance(self.body, dict) else self.body))

    def __str__(self) -> str:
        return shown.note_as_text(self.role, self.text, self.body)

    def _repr_markdown_(self) -> str:
        return shown.code(str(self))


ModelMessage: TypeAlias = UserMessage | AssistantMessage | ToolResultMessage
Message: TypeAlias = ModelMessage | Note
M = TypeVar("M", bound=ModelMessage)
S = TypeVar("S", bound=Struct)


def stamped(message: M) -> M:
    """Return the message with an id and a time; existing ones are kept."""
    if message.id and message.created_at:
        return message
    return msgspec.structs.replace(
        message, id=message.id or clock.new_id(), created_at=message.created_at or clock.now()
    )


_MESSAGES: dict[str, type[ModelMessage]] = {cls.role: cls for cls in (UserMessage, AssistantMessage, ToolResultMessage)}
_MESSAGES["tool"] = ToolResultMessage  # as most other programs call it
_PARTS: dict[str, type[Struct]] = {"usage": Usage, "error": Failure}
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[ModelMessage] = msgspec.json.Decoder(ModelMessage)


def encode(message: Message) -> str:
    """One message as JSON text that any database can hold."""
    if type(message) is not Note:
        try:
            raw = _encoder.encode(message)
        except (TypeError, ValueError, RecursionError):  # a lone surrogate, or what is no JSON: the exact path tells
            return _encode_exactly(message)
        # msgspec writes NaN as null; a null is rare enough to look twice. So is deep nesting.
        if b"null" not in raw and b"~unknown" not in raw and (len(raw) < _SHALLOW or not _may_be_deep(raw)):
            return raw.decode()
    return _encode_exactly(message)


def decode(body: str) -> Message:
    """Decode a message that `encode` wrote; any other JSON becomes a Note."""
    try:
        if _ASIDE not in body:
            return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeEncodeError):
        pass  # an older or newer shape, lone surrogates, NaN: all readable, but not on the fast path
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(f"a stored message is not JSON ({error}): {body[:80]!r}; run an integrity check") from error
    return from_value(value)


def to_value(message: Message) -> Any:
    """The message as plain dicts and lists."""
    if isinstance(message, Note):
        return message.body
    value = msgspec.to_builtins(message)
    value["content"] = [block["data"] if block["type"] == _ASIDE else _joined(block) for block in value["content"]]
    for name in _PARTS.keys() & value.keys():
        value[name] = _joined(value[name])
    return _joined(value)


def plain(value: Any) -> Any:
    """Messages, blocks and what is inside them as plain dicts and lists; other values stay as they are."""
    if isinstance(value, ModelMessage | Note):
        return to_value(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, _Value):
        return _joined(msgspec.to_builtins(value))
    return plain(json.loads(value.to_json())) if hasattr(value, "to_json") else value


def part_from_value(value: Any, kind: type[S]) -> S:
    """A block, usage or failure from a plain dict; unknown fields are kept aside."""
    return msgspec.convert(_apart(value, kind), kind)


def from_value(value: Any) -> Message:
    """A message from plain dicts and lists; anything else becomes a Note."""
    if isinstance(value, dict) and "timestamp" in value and "metadata" in value:
        value = _of_memory(value)
    cls = _MESSAGES.get(role) if isinstance(value, dict) and isinstance(role := value.get("role"), str) else None
    if cls is None:
        return Note(value)
    if value["role"] == "tool" or (cls is AssistantMessage and "tool_calls" in value):
        value = _in_our_words(value)
    content = value.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return Note(value)
    parts = {name: _apart(value[name], part) for name, part in _PARTS.items() if isinstance(value.get(name), dict)}
    try:
        message = msgspec.convert(_apart({**value, **parts, "content": []}, cls), cls)
    except msgspec.ValidationError:
        return Note(value)
    return msgspec.structs.replace(message, content=[_block(block) for block in content])


def _in_our_words(value: dict[str, Any]) -> dict[str, Any]:
    """A reply that calls tools, or a tool's result, as most other programs write them."""
    if value["role"] == "tool":
        named = value.get("name") or value.get("tool_name")
        known = {"role": "tool_result", "tool_call_id": str(value.get("tool_call_id") or ""), "tool_name": named or ""}
        return {**{key: item for key, item in value.items() if key != "name"}, **known}
    calls, content = value["tool_calls"], value.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    if not isinstance(calls, list | None) or not isinstance(blocks, list):
        return value
    for place, call in enumerate(calls or ()):
        blocks = [*blocks, _call_block(call, f"call_{value.get('id') or ''}_{place}")]
    return {**{key: item for key, item in value.items() if key != "tool_calls"}, "content": blocks}


def _of_memory(value: dict[str, Any]) -> dict[str, Any]:
    """A memory's message, which calls tools or holds the result of one in blocks of its own."""
    content = value.get("content")
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return value
    if value.get("role") == "system" and [block.get("type") for block in content] == ["tool_result"]:
        (result,) = content
        named = {"tool_call_id": str(result.get("id") or ""), "tool_name": str(result.get("name") or "")}
        output = result.get("output")
        return {**value, **named, "role": "tool_result", "content": output if isinstance(output, str | list) else ""}
    if value.get("role") != "assistant":
        return value
    blocks = [
        _call_block(block, f"call_{value.get('id') or ''}_{place}") if block.get("type") == "tool_use" else block
        for place, block in enumerate(content)
    ]
    return {**value, "content": blocks}


def _call_block(call: Any, name: str) -> Any:
    """One tool call; without its own id, it gets the given one."""
    function = call.get("function") if isinstance(call, dict) else None
    given = function if isinstance(function, dict) else call
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return call
    arguments, malformed = given.get("arguments", given.get("input")), None
    if isinstance(arguments, str):
        try:
            arguments, malformed = json.loads(arguments), arguments
        except (ValueError, RecursionError):
            malformed = arguments
    block = {"type": "tool_call", "id": str(call.get("id") or name), "name": given["name"]}
    if isinstance(arguments, dict) or arguments is None:
        return {**block, "arguments": arguments or {}}
    return {**block, "malformed": malformed if malformed is not None else dumps(arguments)}


def dumps(value: Any) -> str:
    """Any JSON value as ASCII text: NaN, huge integers and lone surrogates included."""
    return _dumps(value)


_dumps = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder each time


def checked_dumps(value: Any) -> str:
    """JSON text that decodes to the same value: raises if a key is no string, or the nesting is too deep."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        raise TypeError(f"the key {key!r:.80} is no string")
                below.extend(item.values())
            elif isinstance(item, list | tuple):
                below.extend(item)
        level = below
    if level:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return dumps(value)


def _may_be_deep(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") >= MAX_DEPTH


def _encode_exactly(message: Message) -> str:
    try:
        return checked_dumps(to_value(message))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a {message.role} message cannot be stored as JSON: {error}; use strings, numbers, booleans, None, "
            "lists and dicts"
        ) from error


def _joined(value: dict[str, Any]) -> dict[str, Any]:
    aside = value.pop(_ASIDE, None)
    return {**value, **aside} if aside else value


def _apart(value: dict[str, Any], cls: type[Struct]) -> dict[str, Any]:
    """The fields, with unknown ones kept aside."""
    names = {*cls.__struct_encode_fields__, cls.__struct_config__.tag_field} - {_ASIDE}
    known = {key: item for key, item in value.items() if key in names}
    unknown = {key: item for key, item in value.items() if key not in names}
    return {**known, _ASIDE: unknown} if unknown else known


def _block(value: Any) -> Block:
    cls = _BLOCKS.get(value["type"]) if isinstance(value, dict) and isinstance(value.get("type"), str) else None
    if cls is None:
        return UnknownBlock(value)
    try:
        return msgspec.convert(_apart(value, cls), cls)
    except msgspec.ValidationError:
        return UnknownBlock(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict) and isinstance(value.get("text"), str):
        yield value["text"]
