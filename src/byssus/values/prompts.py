"""What a person says, in whatever form a program passes it on, as user messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from byssus.errors import InputError
from byssus.messages import Block, ImageContent, TextContent, UserMessage, image_type

Prompt: TypeAlias = str | UserMessage | Sequence[str | UserMessage | Block]


def as_prompts(message: Prompt) -> list[UserMessage]:
    """What a caller meant to say, as user messages."""
    if isinstance(message, str | UserMessage | bytes | bytearray):
        return [single(message, "prompt")]
    items: list[Any] = list(message) if isinstance(message, Sequence) else [message]
    if any(isinstance(item, Block) for item in items) and all(isinstance(item, Block | str) for item in items):
        blocks = [TextContent(item) if isinstance(item, str) else item for item in items]
        return [single(UserMessage(blocks), "prompt")]
    if not items:
        raise InputError("prompt() got an empty list; say something")
    return [single(item, "prompt") for item in items]


def single(message: object, method: str) -> UserMessage:
    if isinstance(message, str):
        message = UserMessage(message)
    if not isinstance(message, UserMessage):
        raise InputError(f"{method}() takes text or a UserMessage, got {type(message).__name__}: {message!r:.80}")
    for block in message.content:
        if isinstance(block, ImageContent) and image_type(block) is None:
            raise InputError(
                f"{method}() got an image that is none ({block.data[:20]!r}...): pass the base64 of a PNG, JPEG, GIF "
                "or WebP file"
            )
    if not any(not isinstance(block, TextContent) or block.text.strip() for block in message.content):
        raise InputError(f"{method}() got an empty message ({message.text!r}); say something")
    return message
