"""The time, where the model is told where."""

from __future__ import annotations

import re

from byssus.tools.ready import clock
from tests.support.tools import run


def test_the_time_has_a_weekday_and_a_zone() -> None:
    (made,) = clock()
    assert made.recovery == "retry"
    assert re.fullmatch(r"[A-Z]\w+day, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \+0000 UTC", run(made, zone="UTC").text)
    assert re.search(r"day, \d{4}-.*[+-]\d{4}", run(made).text)
    assert run(made, zone="Europe/Oslo").text.endswith(("+0100 CET", "+0200 CEST"))


def test_a_zone_that_does_not_exist_is_named() -> None:
    (made,) = clock()
    for zone in ("Europe/Nowhere", "../etc/passwd", "a\0b", "/etc/localtime"):
        assert "there is no time zone" in run(made, zone=zone).text
