"""Files behind an @: what becomes a part of the message, and what is refused."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from byssus.cli.chat.live.typed.attachments import (
    MOST_IMAGE,
    MOST_TEXT,
    attached_in,
    completions,
    message_of,
    typed_in,
)
from byssus.cli.chat.live.typed.completion import ChatCompleter
from byssus.errors import InputError
from byssus.messages import ImageContent, TextContent, UserMessage

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_text_file_and_an_image_are_attached(here: Path) -> None:
    (here / "notes.txt").write_text("buy ```milk```", "utf-8")
    (here / "first page.png").write_bytes(PNG)
    message = message_of('Compare @notes.txt with @"first page.png".')
    assert isinstance(message, UserMessage)
    said, text, image = message.content
    assert said == TextContent('Compare @notes.txt with @"first page.png".')
    assert text == TextContent("\n\nnotes.txt:\n````\nbuy ```milk```\n````")
    assert isinstance(image, ImageContent)
    assert image.mime_type == "image/png"
    assert typed_in(message) == said.text
    assert attached_in(message) == ["notes.txt:\n````\nbuy ```milk```\n````"]


def test_texts_of_other_programs_are_no_attached_files() -> None:
    message = UserMessage([TextContent("one, "), TextContent("two")])
    assert (typed_in(message), attached_in(message)) == ("one, two", [])


@pytest.mark.parametrize("text", ["hello @ada", "mail me: ada@example.com", "a @ b", "no files"])
def test_other_words_with_an_at_stay_text(text: str) -> None:
    assert message_of(text) == text


def test_what_cannot_be_attached_is_refused_by_name(here: Path) -> None:
    (here / "large.txt").write_bytes(b"x" * (MOST_TEXT + 1))
    (here / "large.png").write_bytes(PNG + b"x" * MOST_IMAGE)
    (here / "fake.png").write_text("no image", "utf-8")
    (here / "data.bin").write_bytes(b"\xff\x00\xfe")
    (here / "folder").mkdir()
    os.mkfifo(here / "pipe")
    reasons = {
        "missing.txt": "there is no file 'missing.txt'",
        "no/such": "there is no file 'no/such'",
        "large.txt": "too large to attach",
        "large.png": "too large to attach",
        "fake.png": "'fake.png' is no image",
        "data.bin": "neither text in UTF-8 nor an image",
        "folder": "'folder' is a folder",
        "pipe": "'pipe' is no file",
    }
    for name, why in reasons.items():
        with pytest.raises(InputError, match=why):
            message_of(f"look at @{name}")


def test_files_are_completed(here: Path) -> None:
    (here / "src").mkdir()
    (here / "src" / "main.py").touch()
    (here / "setup.py").touch()
    (here / ".hidden").touch()
    assert completions("") == ["setup.py", "src/"]
    assert completions("s") == ["setup.py", "src/"]
    assert completions("src/m") == ["src/main.py"]
    assert completions("nowhere/") == []


def test_a_name_with_spaces_is_completed_in_quotes_folder_by_folder(here: Path) -> None:
    (here / "my files").mkdir()
    (here / "my files" / "first page.png").touch()

    def completed(text: str) -> list[str]:
        """What the text becomes with each completion."""
        found = ChatCompleter(lambda: ()).get_completions(Document(text), CompleteEvent())
        return [text[: len(text) + each.start_position] + each.text for each in found]

    assert completed("see @my") == ['see @"my files/']
    assert completed('see @"my files/') == ['see @"my files/first page.png"']
    assert completed('see @"my files/first p') == ['see @"my files/first page.png"']
    assert completed('see @"my files/first page.png" a') == []
    assert completed("mail me@my") == []
