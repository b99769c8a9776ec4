"""A list to choose from: type to filter, arrows to move, a preview beside it, Enter to take what is marked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.screen import table, terminal

_ROWS = 12
_BESIDE = 70  # columns from which on the preview stands beside the list
_PAUSE = 0.15  # seconds without a key before a search begins


class Choice(NamedTuple):
    """Something to choose."""

    title: str
    about: str  # shown behind the title
    value: Any


class Picker:
    """The state of a list.

    `find` gets the items for a filter; a list that is `fixed` is filtered here. `preview` is asked for the marked item;
    of a long one, the beginning is shown, or with `shows_end` the end.
    """

    def __init__(
        self,
        label: str,
        find: Callable[[str], Awaitable[Sequence[Choice]]],
        preview: Callable[[Choice], Awaitable[str]],
        *,
        is_fixed: bool = True,
        shows_end: bool = False,
        text: str = "",
        empty: str = "nothing here",
    ) -> None:
        self.label = label
        self.text = text
        self.on_change: Callable[[], None] = lambda: None
        self._find, self._preview, self._is_fixed, self._empty = find, preview, is_fixed, empty
        self._shows_end = shows_end
        self._all: Sequence[Choice] = []
        self._items: Sequence[Choice] = []
        self._marked = 0
        self._previews: dict[int, str] = {}
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._search: asyncio.Task[None] | None = None
        self._is_loading = True
        self._is_taken_first = False
        self._problem = ""

    async def choice(self) -> Any:
        """Wait for the choice; None if there is none."""
        self._start_search(0.0)
        try:
            return await self._answer
        finally:
            for task in list(self._tasks):
                task.cancel()

    # --- keys ---------------------------------------------------------------------------------------------------------

    def filter(self, text: str) -> None:
        if text == self.text:
            return
        self.text = text
        if self._is_fixed:
            self._show_matching()
        else:
            self._start_search(_PAUSE)

    def move(self, steps: int) -> None:
        self._marked = max(0, min(self._marked + steps, len(self._items) - 1))
        self._look_at_marked()

    def take(self) -> None:
        """Take the marked item; while the list is being made, the first one as soon as it is there."""
        if self._is_loading:
            self._is_taken_first = True
        elif not self._answer.done() and self._items:
            self._answer.set_result(self._items[self._marked].value)

    def leave(self) -> None:
        if not self._answer.done():
            self._answer.set_result(None)

    # --- items --------------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_search(self, pause: float) -> None:
        if self._search is not None:
            self._search.cancel()
        self._search = self._start(self._load(pause))

    async def _load(self, pause: float) -> None:
        self._is_loading = True
        await asyncio.sleep(pause)
        self.on_change()
        try:
            self._all, self._problem = await self._find(self.text), ""
        except Exception as error:  # noqa: BLE001 - shown in place of the list
            self._all, self._problem = [], str(error)
        self._is_loading = False
        self._show_matching()
        if self._is_taken_first:
            self._is_taken_first = False
            self.take()

    def _show_matching(self) -> None:
        words = self.text.casefold().split() if self._is_fixed else []
        self._items = [
            item for item in self._all if all(word in f"{item.title} {item.about}".casefold() for word in words)
        ]
        self._previews = {}
        self._marked = 0
        self._look_at_marked()

    def _look_at_marked(self) -> None:
        if self._items and self._marked not in self._previews:
            self._previews[self._marked] = ""
            self._start(self._load_preview(self._marked, self._items[self._marked]))
        self.on_change()

    async def _load_preview(self, number: int, item: Choice) -> None:
        try:
            text = await self._preview(item)
        except Exception as error:  # noqa: BLE001 - shown in its place
            text = str(error)
        if number < len(self._items) and self._items[number] is item:
            self._previews[number] = text
            self.on_change()

    # --- drawing ------------------------------------------------------------------------------------------------------

    def lines(self, drawer: Drawer, rows: int) -> list[Line]:
        count = max(min(_ROWS, rows - 2), 2)
        beside = drawer.width >= _BESIDE
        columns = drawer.width * 2 // 5 if beside else drawer.width
        shown = count if beside else max(count // 2, 1)
        left = self._list_lines(columns - 1, shown)
        preview = self._preview_lines(drawer, drawer.width - columns - 2 if beside else drawer.width, count)
        if not beside:
            return [drawer.line(part) for part in left] + [
                drawer.line(("faint", line)) for line in preview[: count - shown]
            ]
        found: list[Line] = []
        for number in range(max(len(left), len(preview), 1)):
            style, text = left[number] if number < len(left) else ("", "")
            space = " " * (columns - table.width(text))
            behind = preview[number] if number < len(preview) else ""
            found.append(drawer.line((style, text + space), ("faint", f"{terminal.drawn('│', '|')} {behind}")))
        return found

    def _list_lines(self, columns: int, rows: int) -> list[tuple[str, str]]:
        if not self._items:
            state = self._problem or ("looking ..." if self._is_loading else self._empty)
            return [("faint", table.cut(f"  {terminal.line(state)}", columns))]
        first = max(0, min(self._marked - rows // 2, len(self._items) - rows))
        found = []
        for number, item in enumerate(self._items[first : first + rows], first):
            sign = terminal.drawn("❯", ">") if number == self._marked else " "
            text = f"{sign} {terminal.line(item.title)}  {terminal.line(item.about)}"
            found.append(("you" if number == self._marked else "", table.cut(text.rstrip(), columns)))
        return found

    def _preview_lines(self, drawer: Drawer, columns: int, rows: int) -> list[str]:
        text = self._previews.get(self._marked, "")
        narrow = Drawer(drawer.look._replace(width=max(columns, 8)))
        lines = ["".join(segment.text for segment in line) for line in narrow.text(text)]
        return lines[-rows:] if self._shows_end else lines[:rows]
