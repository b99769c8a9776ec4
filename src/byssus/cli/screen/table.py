"""Tables on a screen, by display width: a Chinese character and an emoji take two columns, a combining mark none.

On a terminal a table fits its width: the widest text columns are cut with an ellipsis, but numbers and times are not.
If that leaves too little of the text, each row is printed as a block of lines, in which nothing is cut. Nothing is cut
in a pipe or a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from byssus.cli.screen import terminal

_GAP = "  "
_LEAST = 8  # columns that must be left of a text that is cut


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[int] = (),
    whole: Collection[int] = (),
) -> None:
    """Print the rows under their headers. `right` and `whole` are indexes of columns, and neither is ever cut.

    A column of `right` is aligned to the right.
    """
    lines = [[terminal.printable(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    columns = terminal.columns()
    fitted = widths if columns is None else _fitted(widths, columns, {*right, *whole})
    if fitted is None:
        _print_blocks(lines, columns or 0)
        return
    for number, row in enumerate(lines):
        cells = [aligned(cell, fitted[index], index in right) for index, cell in enumerate(row)]
        text = _GAP.join(cells).rstrip()
        print(terminal.styled(text, "bold") if number == 0 else text)


def width(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth  # noqa: PLC0415 - its tables take longer to load than most commands need

    return max(wcswidth(text), 0)


def cut(text: str, columns: int) -> str:
    """The text in at most so many columns, with an ellipsis if something is left out."""
    if width(text) <= columns:
        return text
    from wcwidth import iter_graphemes  # noqa: PLC0415 - likewise

    ellipsis = terminal.drawn("…", "...")
    left, kept = columns - width(ellipsis), ""
    for each in iter_graphemes(text):  # what a reader sees as one character stays one
        if (left := left - width(each)) < 0:
            break
        kept += each
    return kept.rstrip() + ellipsis


def _fitted(widths: list[int], columns: int, whole: Collection[int]) -> list[int] | None:
    """The widths of columns that fit side by side: the widest text gives way first. None if too little is left."""
    fitted = list(widths)
    texts = [index for index in range(len(widths)) if index not in whole]
    while (excess := sum(fitted) + len(_GAP) * (len(fitted) - 1) - columns) > 0:
        widest = max(texts, key=fitted.__getitem__, default=None)
        if widest is None or fitted[widest] <= _LEAST:
            return None
        others = [fitted[index] for index in texts if index != widest]
        step = max(1, fitted[widest] - max([*others, _LEAST]))  # down to the next widest, and then in turns
        fitted[widest] -= min(excess, step)
    return fitted


def aligned(cell: str, columns: int, is_right: bool) -> str:
    cell = cut(cell, columns)
    space = " " * (columns - width(cell))
    return space + cell if is_right else cell + space


def _print_blocks(lines: list[list[str]], columns: int) -> None:
    headers, *rows = lines
    broad = max(map(width, headers))
    room = max(columns - broad - len(_GAP), _LEAST)
    for number, row in enumerate(rows):
        if number:
            print()
        for header, cell in zip(headers, row, strict=True):
            first, *others = wrapped(cell, room)
            print(f"{terminal.styled(aligned(header, broad, False), 'bold')}{_GAP}{first}".rstrip())
            for each in others:
                print(f"{' ' * broad}{_GAP}{each}")


def wrapped(text: str, columns: int) -> list[str]:
    """The whole text in lines of at most so many columns, broken at spaces where there are any."""
    from wcwidth import iter_graphemes  # noqa: PLC0415 - as above

    lines, current = [], ""
    for each in iter_graphemes(text):
        if width(current + each) > columns:
            head, space, tail = (current, " ", "") if each == " " else current.rpartition(" ")
            if space or not current.isascii():  # an id stays whole: the terminal breaks it, and it can be copied
                lines.append(head if space else current)
                current, each = (tail, each.strip()) if space else ("", each)
        current += each
    return [*lines, current]
