"""The drawing of the rooms in docs/architecture.md, made from the table of the layer test.

`python -m tests.support.drawing` writes it. An arrow that another way down implies is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.rooms import ROOMS

PAGE = Path(__file__).parents[2] / "docs/architecture.md"
_BLOCK = re.compile(r"(<!-- drawing: .*? -->\n).*?(<!-- end of drawing -->)", re.DOTALL)
Rooms = dict[str, tuple[set[str], set[str]]]


def mermaid(rooms: Rooms) -> str:
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"  {room}[{_label(room, lies_in_it)}]" for room, (lies_in_it, _) in rooms.items()]
    lines += [f"  {room} --> {used}" for room in rooms for used in _direct(rooms, room)]
    return "\n".join([*lines, "```"]) + "\n"


def _label(room: str, lies_in_it: set[str]) -> str:
    files = sorted(name for name in lies_in_it - {room} if not name.startswith("__"))
    return f'"{room}: {", ".join(files)}"' if files else f'"{room}/"'


def _direct(rooms: Rooms, room: str) -> list[str]:
    """What a room uses, without what it reaches through another room that it uses."""
    uses = rooms[room][1]
    reached = {below for used in uses for below in _below(rooms, used)}
    return [used for used in rooms if used in uses - reached]


def _below(rooms: Rooms, room: str) -> set[str]:
    uses = rooms[room][1]
    return uses.union(*(_below(rooms, used) for used in uses))


def with_drawing(page: str, rooms: Rooms) -> str:
    return _BLOCK.sub(lambda found: found[1] + mermaid(rooms) + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_drawing(PAGE.read_text("utf-8"), ROOMS), "utf-8")
