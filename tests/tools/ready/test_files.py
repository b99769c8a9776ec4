"""Reading, listing and searching the files below a folder, as a model sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from byssus.tools.ready import files
from byssus.tools.ready.text import version_of
from tests.support.tools import Made, run


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Made]:
    return {tool.name: tool for tool in files(tmp_path)}


def test_the_tools_are_these_and_only_those_that_write_ask(tmp_path: Path) -> None:
    tools = files(tmp_path)
    assert [(tool.name, tool.recovery, tool.decides_by_call) for tool in tools] == [
        ("read_file", "retry", False),
        ("list_files", "retry", False),
        ("search_files", "retry", False),
        ("write_file", "check", True),
        ("edit_file", "check", True),
    ]
    assert [tool.name for tool in files(tmp_path, write=False)] == ["read_file", "list_files", "search_files"]


def test_a_file_is_read_in_pages_with_its_version(made: dict[str, Made], tmp_path: Path) -> None:
    text = "".join(f"line {number} 中文 🙂\n" for number in range(1, 5_001))
    (tmp_path / "a.txt").write_text(text)
    version, read = version_of(text.encode()), made["read_file"]
    first, *lines = run(read, path="a.txt").text.split("\n")
    assert lines[0] == "line 1 中文 🙂"
    assert first == f"[a.txt, version {version}, lines 1 to 2,000 of 5,000; go on with first_line=2001]"
    first, *lines = run(read, path="a.txt", first_line=4_001).text.split("\n")
    assert first == f"[a.txt, version {version}, lines 4,001 to 5,000 of 5,000]"
    assert lines[-1] == "line 5000 中文 🙂"
    assert "first_line must be from 1 to 5,000" in run(read, path="a.txt", first_line=5_001).text
    (tmp_path / "empty").touch()
    assert run(read, path="empty").text == f"[empty, version {version_of(b'')}, empty]"


def test_a_very_long_line_and_many_long_ones_are_cut(made: dict[str, Made], tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 1_000_000)
    assert run(made["read_file"], path="long").text.endswith("x [... 1,000,000 characters]")
    (tmp_path / "wide").write_text("".join("y" * 1_999 + "\n" for _ in range(100)))
    said = run(made["read_file"], path="wide").text
    assert "lines 1 to 20 of 100; go on with first_line=21]" in said
    assert len(said) < 41_000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x89PNG\r\n\0\0", "'f' is a binary file: it has a NUL byte at 6"),
        ("caf\xe9".encode("latin-1"), "'f' is not UTF-8 text: byte 0xe9 at 3"),
        ("hello".encode("utf-16"), "'f' is a binary file"),
    ],
)
def test_what_is_no_text_is_refused_clearly(made: dict[str, Made], tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "f").write_bytes(data)
    result = run(made["read_file"], path="f")
    assert result.is_error
    assert why in result.text
    assert run(made["search_files"], text="h").text == "[0 lines; 0 text files searched]"


def test_a_list_has_names_with_signs(made: dict[str, Made], tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "c.py").touch()
    (tmp_path / "d").symlink_to("/etc")
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()
    listed = run(made["list_files"]).text.split("\n")
    assert listed == ["[., 4 entries]", "b/", "c.py", "caf\\xe9", "d@"]
    assert run(made["list_files"], pattern="*.py").text == "[., 1 entry]\nc.py"
    assert run(made["list_files"], path="d").is_error
    assert run(made["list_files"], path="..").is_error


@pytest.mark.large
def test_a_directory_of_100_000_entries_is_a_short_list(made: dict[str, Made], tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(100_000):
        (tmp_path / "many" / f"{number:06}").touch()
    first, *names = run(made["list_files"], path="many").text.split("\n")
    assert first == "[many, 100,000 entries, the first 500; a pattern narrows it down]"
    assert (names[0], names[-1], len(names)) == ("000000", "000499", 500)
    said = run(made["search_files"], text="x").text
    assert said == "[0 lines; 20,000 text files searched: there are more files, search a smaller directory]"


def test_a_search_finds_lines_and_follows_no_link(made: dict[str, Made], tmp_path: Path) -> None:
    (tmp_path / "inside" / ".git").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret.txt").write_text("needle")
    (tmp_path / "inside" / ".git" / "config").write_text("needle")
    (tmp_path / "inside" / "a.py").write_text("one\n  a Needle \n")
    (tmp_path / "inside" / "b.txt").write_text("needle (.*) 针\n")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "other")
    search = {tool.name: tool for tool in files(tmp_path / "inside")}["search_files"]
    assert run(search, text="needle").text == "[1 line; 2 text files searched]\nb.txt:1: needle (.*) 针"
    assert (
        run(search, text="NEEDLE", ignore_case=True, pattern="*.py").text
        == "[1 line; 1 text file searched]\na.py:2: a Needle"
    )
    assert run(search, text="(.*) 针").text.endswith("b.txt:1: needle (.*) 针")
    assert run(search, text="needle", path=".git").text.endswith(".git/config:1: needle")
    assert run(search, text="needle", path="link").is_error
    assert run(search, text="needle", path="").text == run(search, text="needle").text
    assert run(search, text="needle", path="nowhere/").is_error
    assert run(search, text="").is_error
