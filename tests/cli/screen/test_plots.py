"""Bars and sparklines, of blocks or of ASCII."""

from __future__ import annotations

import pytest

from byssus.cli.screen.plots import Bar, chart, drawn_bar, sparkline
from byssus.cli.screen.table import width
from tests.support.screens import screen_of


def test_a_bar_is_as_long_as_its_share_and_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen_of(monkeypatch)
    assert [drawn_bar(value, 8, 4) for value in (8, 4, 3, 0.001, 0)] == ["████", "██", "█▌", "▏", ""]
    assert drawn_bar(1, 0, 4) == ""
    screen_of(monkeypatch, encoding="ascii")
    assert [drawn_bar(value, 8, 4) for value in (8, 4, 0.001, 0)] == ["####", "##", "#", ""]


def test_a_sparkline_has_a_character_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    screen_of(monkeypatch)
    assert sparkline([0, 50, None, 100]) == "▁▅ █"
    assert (sparkline([]), sparkline([0, 0]), sparkline([None])) == ("", "▁▁", " ")
    screen_of(monkeypatch, encoding="ascii")
    assert sparkline([0, 50, None, 100]) == "_= #"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_chart_fits_its_columns_with_names_of_any_kind(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    screen_of(monkeypatch)
    bars = [Bar("anthropic:claude-" + "x" * 60, 7.0, "7"), Bar("模型\x1b[31m", 1.0, "1,000,000"), Bar("m", 0.0, "0")]
    title, *rows = chart("TOKENS", bars, columns)
    assert title == "TOKENS"
    assert max(map(width, rows)) <= columns
    assert rows[0].endswith("█")
    assert "\x1b" not in "".join(rows)
