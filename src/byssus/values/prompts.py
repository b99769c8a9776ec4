"""Prompts in all forms that a program can pass, as user messages.

Text, a `UserMessage`, a dict of either shape (`{"role": "user", ...}`, or a block such as `{"type": "image", ...}`), an
image as a block, as the path of its file or as its bytes. In a list, text beside an image belongs to one message;
otherwise each text is a message of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from byssus.errors import InputError
from byssus.messages import Block, ImageContent, TextContent, UnknownBlock, UserMessage, from_value, image_type

Part: TypeAlias = str | UserMessage | Block | Mapping[str, Any] | bytes | os.PathLike[str]
Prompt: TypeAlias = Part | Sequence[Part]

_TAKES = "takes text, a UserMessage, a dict of one, an image (ImageContent, a path, bytes) or a list of these"


def as_prompts(message: Prompt, method: str = "prompt") -> list[UserMessage]:
    """Convert a prompt to user messages."""
    is_list = isinstance(message, Sequence) and not isinstance(message, str | bytes | bytearray)
    items: list[Any] = list(message) if is_list else [message]  # type: ignore[arg-type]
    if not items:
        raise InputError(f"{method}() got an empty list; pass at least one message")
    parts = [_part(item, method) for item in items]
    return [_checked(prompt, method) for prompt in _joined(parts)]


def single(message: object, method: str) -> UserMessage:
    """Convert a prompt that must be a single message."""
    messages = as_prompts(message, method)  # type: ignore[arg-type]
    if len(messages) != 1:
        raise InputError(f"{method}() takes one message, and got {len(messages)}; call it once for each")
    return messages[0]


def _joined(parts: list[str | UserMessage | Block]) -> Iterator[UserMessage]:
    """Text and blocks between two messages are one message if a block is among them."""
    run: list[str | Block] = []
    for part in [*parts, None]:
        if part is not None and not isinstance(part, UserMessage):
            run.append(part)
            continue
        if any(not isinstance(item, str) for item in run):
            yield UserMessage([TextContent(item) if isinstance(item, str) else item for item in run])
        else:
            yield from (UserMessage(item) for item in run if isinstance(item, str))
        run = []
        if part is not None:
            yield part


def _part(item: object, method: str) -> str | UserMessage | Block:
    if isinstance(item, str | UserMessage | Block):
        return item
    if isinstance(item, Mapping):
        return _from_dict(dict(item), method)
    try:
        if isinstance(item, bytes | bytearray):
            return ImageContent.from_bytes(bytes(item))
        if isinstance(item, os.PathLike):
            return ImageContent.from_file(item)
    except InputError as error:
        raise InputError(f"{method}() {_TAKES}: {error}") from error
    raise InputError(f"{method}() {_TAKES}; got {type(item).__name__}: {item!r:.80}")


def _from_dict(item: dict[str, Any], method: str) -> UserMessage | Block:
    made = from_value(item if "role" in item else {"role": "user", "content": [item]})
    if isinstance(made, UserMessage) and not any(isinstance(block, UnknownBlock) for block in made.content):
        return made if "role" in item else made.content[0]
    raise InputError(
        f"{method}() {_TAKES}; a dict is {{'role': 'user', 'content': ...}}, {{'type': 'text', 'text': ...}} or "
        f"{{'type': 'image', 'data': <base64>, 'mime_type': ...}}; got {item!r:.80}"
    )


def _checked(message: UserMessage, method: str) -> UserMessage:
    for block in message.content:
        if isinstance(block, ImageContent) and image_type(block) is None:
            raise InputError(
                f"{method}() got an image that is none ({block.data[:20]!r}...): pass the base64 of a PNG, JPEG, GIF "
                "or WebP file"
            )
    if not any(not isinstance(block, TextContent) or block.text.strip() for block in message.content):
        raise InputError(f"{method}() got an empty message ({message.text!r}); pass some text or an image")
    return message
