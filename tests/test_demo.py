"""The pictures say what the program says: the scripts that drew them are played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import demo

ROOT = Path(__file__).parents[1]


@pytest.mark.processes
@pytest.mark.parametrize("path", demo.FILES, ids=lambda path: path.stem)
def test_a_picture_says_what_the_program_says(path: Path) -> None:
    said = demo.said(demo.drawn(path))
    assert said == demo.said(path.read_text("utf-8")), "run: make demo"
    assert len(said) > 5


def test_the_animation_is_small_enough_for_a_page() -> None:
    assert 10_000 < demo.DEMO.stat().st_size < 200_000


def test_every_picture_is_on_the_page_of_the_chat() -> None:
    page = (ROOT / "docs" / "chat.md").read_text("utf-8")
    assert [path.name for path in demo.FILES[1:] if f"(pictures/{path.name})" not in page] == []
    assert "](docs/demo.svg)" in (ROOT / "README.md").read_text("utf-8")
    assert "](docs/demo.svg)" in (ROOT / "README.zh-CN.md").read_text("utf-8")
