"""Messages as people read them: one text for `print(message)`, and Markdown for notebooks.

- A model's reply is Markdown already and stays so, but for what a notebook would act on: HTML, and images that are
  fetched from somewhere as soon as they are shown. Inside code nothing is changed.
- What comes from tools is shown as code.
- A text can always be printed: lone surrogates are written as escapes.
- The reason of a failure is one line for the logs, without passwords and control characters.

It takes anything shaped like a message (a role and blocks with a `type`), so that `messages` can use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from byssus.values.inputs import column_text
from byssus.values.places import redacted

_LONGEST_CALL = 200  # characters of a tool call's arguments in a printed line
_LONGEST_REASON = 500  # characters of an error's text in the logs
_LARGEST_IMAGE = 2_000_000  # characters of base64 that a notebook gets to show

_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
# An escaped character, or code within one line: left to right, as Markdown reads. A table cell ends code at its "|".
_TOKEN = re.compile(r"(\\.)|((?<!`)(`+)(?!`)[^|\n]*?(?<!`)\3(?!`))")
_ACTIVE = re.compile(r"<(?=[A-Za-z/!?])|(?<=!)\[")
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def as_text(message: Any) -> str:
    """A message as it is printed: the role, the text, and in brackets everything that is not text."""
    text = "\n".join(filter(None, map(_block_as_text, message.content)))
    if not text and any(block.type == "thinking" for block in message.content):
        text = "[thinking]"
    return column_text(f"{_speaker(message)}: {text}{_ending(message)}")


def note_as_text(role: str, text: str, body: Any) -> str:
    """JSON that is no message for a model, as it is printed."""
    return column_text(f"{role}: {text or json.dumps(body, default=repr)}")


def as_markdown(message: Any) -> str:
    """A message for a notebook."""
    parts = [f"**{escaped(_speaker(message))}**", *_markdown_parts(message)]
    if ending := _ending(message).strip():
        parts.append(f"*{escaped(ending)}*")
    return column_text("\n\n".join(parts))


def safe_markdown(text: str) -> str:
    """Markdown without HTML and without images that would be fetched. Code blocks and code in a line stay."""
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        opening = _FENCE.match(line)
        if fence:
            is_end = opening is not None and opening[1].startswith(fence) and not line[opening.end() :].strip()
            fence = "" if is_end else fence
            lines.append(line)
        elif opening is not None:
            fence = opening[1]
            lines.append(line)
        else:
            lines.append(_defused(line))
    return "\n".join([*lines, fence] if fence else lines)  # an open block would swallow what follows


def escaped(text: str) -> str:
    """Plain text, as Markdown shows it unchanged."""
    return _SPECIAL.sub(r"\\\1", text)


def code(text: str) -> str:
    """Text as a code block that nothing in it can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def reason(error: BaseException) -> str:
    """The reason of a failure on one line: the class of the error and its text."""
    text = " ".join(redacted(str(error)).split())
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_LONGEST_REASON]}..."
    printable = text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)
    return f"{type(error).__name__}: {printable}" if printable else type(error).__name__


def raised_at(error: BaseException) -> str:
    """Where a mistake in the code of a provider or hook was raised, as " (file.py:12)"; "" for any other failure."""
    while error.__cause__ is not None:
        error = error.__cause__
    trace = error.__traceback__ if isinstance(error, _MISTAKES) else None
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = "/".join(re.split(r"[\\/]", trace.tb_frame.f_code.co_filename)[-2:])
    return f" ({path}:{trace.tb_lineno})"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _defused(line: str) -> str:
    parts, at = [], 0
    for token in _TOKEN.finditer(line):
        parts += [_ACTIVE.sub(_inert, line[at : token.start()]), token[0]]
        at = token.end()
    return "".join([*parts, _ACTIVE.sub(_inert, line[at:])])


def _inert(found: re.Match[str]) -> str:
    return "&lt;" if found[0] == "<" else "\\["


def _speaker(message: Any) -> str:
    return f"{message.role} {message.tool_name}" if message.role == "tool_result" else str(message.role)


def _ending(message: Any) -> str:
    """How a message ended, if not well."""
    if message.role == "tool_result":
        return " [failed]" if message.is_error else ""
    reason = getattr(message, "stop_reason", "stop")
    if reason in ("stop", "tool_use"):
        return ""
    error = message.error
    return f" [{reason}]" if error is None else f" [{reason}: {error.kind}: {error.message}]"


def _block_as_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image":
            return f"[image {block.mime_type}]"
        case "tool_call":
            arguments = _arguments(block)
            short = arguments if len(arguments) <= _LONGEST_CALL else f"{arguments[:_LONGEST_CALL]}..."
            return f"[calls {block.name}({short})]"
        case "thinking":
            return ""
    return "[a block of an unknown kind]"


def _arguments(call: Any) -> str:
    return str(call.malformed) if call.malformed is not None else json.dumps(call.arguments, ensure_ascii=False)


def _markdown_parts(message: Any) -> Iterator[str]:
    for block in message.content:
        if block.type == "text" and message.role == "tool_result":
            yield code(block.text)
        elif block.type == "text":
            yield safe_markdown(block.text)
        elif block.type == "tool_call":
            yield code(f"{block.name}({_arguments(block)})")
        elif block.type == "image":
            yield _image(block)


def _image(block: Any) -> str:
    """The image itself, which is in the message; nothing is fetched."""
    data = "".join(block.data.split())
    is_shown = len(data) <= _LARGEST_IMAGE and re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", data)
    if not is_shown or not re.fullmatch(r"image/[a-z0-9.+-]+", block.mime_type) or "svg" in block.mime_type:
        return escaped(_block_as_text(block))
    return f"![image](data:{block.mime_type};base64,{data})"
