"""Files behind an @ in what a person types: text files and images become a part of the message.

    What does @src/main.py do?      Compare @"first page.png" with @second.png

A word behind @ that is no file and does not look like one (`@ada`) stays what it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from byssus.cli.screen import terminal
from byssus.errors import InputError
from byssus.messages import Block, ImageContent, TextContent, UserMessage

MOST_TEXT = 256 * 1024  # bytes
MOST_IMAGE = 5 * 1024 * 1024
_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_BEGUN = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^"\s]*))$')
_ATTACHED = re.compile(r"\n\n[^\n]+:\n```")  # how the text of a file begins
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_LISTED = 200  # entries of a folder that are offered


def message_of(text: str) -> str | UserMessage:
    """What a person typed, with the files that it names. Raises `InputError` for one that cannot be attached."""
    blocks: list[Block] = []
    for found in _NAMED.finditer(text):
        path = _path_of(found[1] or found[2], is_quoted=found[1] is not None)
        if path is not None:
            blocks.append(_attached(path))
    return UserMessage([TextContent(text), *blocks]) if blocks else text


def typed_in(message: UserMessage) -> str:
    """The text of a message without the files that were attached here; what was typed has their names."""
    return "".join(text for text, is_attached in _texts(message) if not is_attached)


def attached_in(message: UserMessage) -> list[str]:
    """The files that were attached here, each with its name above it."""
    return [text.strip("\n") for text, is_attached in _texts(message) if is_attached]


def _texts(message: UserMessage) -> list[tuple[str, bool]]:
    texts = [block.text for block in message.content if isinstance(block, TextContent)]
    return [(text, number > 0 and _ATTACHED.match(text) is not None) for number, text in enumerate(texts)]


def _path_of(name: str, *, is_quoted: bool) -> Path | None:
    """The file that is meant; None if none is."""
    for candidate in (name, name.rstrip(".,;:!?)")):
        path = Path(candidate).expanduser()
        if candidate and _is_there(path):
            return path
    if is_quoted or "/" in name or Path(name.rstrip(".,;:!?)")).suffix:
        raise InputError(f"there is no file {name!r} to attach; correct the name, or put a space behind the @")
    return None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for a file
        return False


def _attached(path: Path) -> Block:
    name, is_image = str(path), path.suffix.lower() in _IMAGES
    try:
        _check(name, path, MOST_IMAGE if is_image else MOST_TEXT)
        data = path.read_bytes()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name!r} cannot be attached: {reason}") from error
    return _image(name, data) if is_image else _text(name, data)


def _check(name: str, path: Path, most: int) -> None:
    if path.is_dir():
        raise InputError(f"{name!r} is a folder; attach files of it")
    if not path.is_file():
        raise InputError(f"{name!r} is no file; attach a file")
    if (size := path.stat().st_size) > most:
        raise InputError(
            f"{name!r} is too large to attach: {size:,} bytes, and at most {most:,} are sent; attach a part of it"
        )


def _image(name: str, data: bytes) -> ImageContent:
    try:
        return ImageContent.from_bytes(data)
    except InputError as error:
        raise InputError(f"{name!r} is no image, whatever its name says; attach a PNG, JPEG, GIF or WebP") from error


def _text(name: str, data: bytes) -> Block:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    if "\0" in text or (data and not text):
        try:
            return ImageContent.from_bytes(data)  # an image under another name
        except InputError:
            raise InputError(f"{name!r} is neither text in UTF-8 nor an image; attach one of these") from None
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return TextContent(f"\n\n{name}:\n{fence}\n{text}\n{fence}")


def name_being_typed(text: str) -> tuple[str, bool] | None:
    """The beginning of a file's name at the end of a text, and whether it is in quotes; None if there is none."""
    found = _BEGUN.search(text)
    if found is None:
        return None
    return (found[2], False) if found[1] is None else (found[1], True)


def completions(typed: str) -> list[str]:
    """Files and folders whose path begins with what was typed behind the @."""
    folder, _, start = typed.rpartition("/")
    place = Path(f"{folder}/" if folder or typed.startswith("/") else ".").expanduser()
    found = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
                    found.append(f"{folder}/{entry.name}" if "/" in typed else entry.name)
                    found[-1] += "/" if entry.is_dir() else ""
                if len(found) >= _LISTED:
                    break
    except (OSError, RuntimeError):
        return []
    return sorted(each for each in found if terminal.line(each) == each)
