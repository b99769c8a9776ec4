"""What an answer looks like while it arrives and afterwards, in terminals of all kinds."""

from __future__ import annotations

import re

import pytest

from tests.support.chats import Stage

pytestmark = pytest.mark.processes

STORY = """\
# A day in Lisbon

Take **tram 28** to the Alfama, *before* the crowds, and read `guide.md`.

- first the castle
- then 葡式蛋挞 and coffee ☕

| place | opens | costs |
|---|---|---|
| castle | 09:00 | 15 EUR |
\f| museum | 10:00 | 8 EUR |

```python
def walk(places):
    return [place for place in places if place.is_open]
```

里斯本是葡萄牙的首都也是这个国家最大的城市位于特茹河的入海口建在七座山丘之上每年都有许多人来这里旅行。

The end of the story.
"""
WORDS = [
    *("A day in Lisbon", "tram 28", "Alfama", "guide.md", "first the castle", "葡式蛋挞", "museum", "8 EUR", "The end")
]


@pytest.mark.parametrize(("columns", "rows"), [(80, 10), (40, 24)])
def test_an_answer_is_whole_in_the_scrollback_and_each_part_is_there_once(
    stage: Stage, columns: int, rows: int
) -> None:
    window = stage.chat(columns=columns, rows=rows)
    window.enter(f"tell {stage.write('story.md', STORY)}")
    window.wait_for("castle", times=2)
    stage.go()
    window.wait_for("The end of the story.")
    assert {word: window.transcript.count(word) for word in WORDS} == dict.fromkeys(WORDS, 1)
    assert "里斯本是葡萄牙的首都也是这个国家最大的城市" in re.sub(r"\s", "", window.transcript)
    (museum,) = [row for row in window.transcript.splitlines() if "museum" in row]
    assert "10:00" in museum
    assert "8 EUR" in museum
    assert all(len(row) <= columns for row in window.transcript.splitlines())


def test_code_is_colored_and_no_color_means_none(stage: Stage) -> None:
    stage.write("code.md", "```python\ndef walk(): return 1\n```\n")
    window = stage.chat(rows=40)
    window.enter("tell code.md")
    window.wait_for_on_screen("def walk(): return 1")
    assert window.look_of("def walk").fg != window.look_of("walk()").fg
    window.press("ctrl-d")
    window.wait_for_its_end()
    plain = stage.chat("other", NO_COLOR="1")
    plain.enter("tell code.md")
    plain.wait_for_on_screen("def walk(): return 1")
    attributes = {
        int(each) for found in re.findall(r"\x1b\[([\d;]*)m", plain.output) for each in found.split(";") if each
    }
    assert {each for each in attributes if each >= 30} == set()


def test_a_terminal_that_changes_its_size_in_the_middle_of_a_table_shows_the_whole_table(stage: Stage) -> None:
    window = stage.chat(columns=100)
    window.enter(f"tell {stage.write('story.md', STORY)}")
    window.wait_for_on_screen("castle", "09:00")
    window.resize(44, 30)
    window.wait_until(lambda: "15 EUR" in window.screen and max(map(len, window.rows)) <= 44, "the new width")
    window.resize(90, 20)
    stage.go()
    window.wait_for_on_screen("The end of the story.")
    (museum,) = [row for row in window.rows if "museum" in row]
    assert "8 EUR" in museum
    assert window.screen.count("museum") == window.screen.count("The end of the story.") == 1


def test_a_chat_that_is_suspended_goes_on_with_the_answer(stage: Stage) -> None:
    window = stage.chat()
    window.enter(f"tell {stage.write('story.md', 'One. ' + chr(12) + 'Two.')}")
    window.wait_for("One.")
    window.type("half a line")
    window.wait_for_on_screen("half a line")
    window.press("ctrl-z")
    window.wait_until_it_stops()
    window.resume()
    stage.go()
    window.wait_for("Two.")
    window.wait_for_on_screen("half a line")
