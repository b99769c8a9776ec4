"""Tools that read, list, search and write the text files below one folder (`folder.py`).

`read_file` names the version of what it has read: a hash of the content. `write_file` and `edit_file` take the version
that they replace. So a change that was made in between is never overwritten, what a person has approved is what
happens, and after a crash the version tells whether the call took effect.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any

from byssus.errors import InputError
from byssus.tools import Tool, ToolContext, tool
from byssus.tools.ready.folder import Folder, shown
from byssus.tools.ready.text import decoded, version_of
from byssus.tools.ready.writing import Writer

_MOST_LINES, _MOST_CHARS, _LONGEST_LINE = 2_000, 40_000, 2_000  # of a file that the model gets at once
_MOST_ENTRIES = 500
_MOST_HITS, _LONGEST_HIT = 200, 300
_MOST_SEARCHED, _MOST_BYTES = 20_000, 500_000_000  # files, and their bytes, that one search looks at
_SKIPPED = {"node_modules", "__pycache__"}  # and hidden ones

Path = Annotated[str, "a path below the folder, such as src/main.py"]


def files(folder: str | os.PathLike[str] = ".", *, write: bool = True) -> list[Tool[..., Any]]:
    """Return the tools for the files below a folder: `read_file`, `list_files`, `search_files`, and with `write=True`
    also `write_file` and `edit_file`, which ask a person and show the difference.
    """
    opened = Folder(folder)
    reader = _Reader(opened)
    reading: list[Callable[..., str]] = [reader.read_file, reader.list_files, reader.search_files]
    tools: list[Tool[..., Any]] = [tool(recovery="retry")(function) for function in reading]
    return [*tools, *Writer(opened).tools()] if write else tools


class _Reader:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def read_file(self, path: Path, first_line: Annotated[int, "start there; 1 is the first line"] = 1) -> str:
        """Read a UTF-8 text file. The first line of the result names its version and which lines follow."""
        data = self._folder.read(path).data
        lines = decoded(path, data).splitlines()
        if first_line < 1 or (first_line > len(lines) and lines):
            raise InputError(f"first_line must be from 1 to {len(lines):,}, got {first_line}")
        page = list(_page(lines, first_line - 1))
        last = first_line + len(page) - 1
        which = f"lines {first_line:,} to {last:,} of {len(lines):,}" if lines else "empty"
        more = f"; go on with first_line={last + 1}" if last < len(lines) else ""
        return "\n".join([f"[{path}, version {version_of(data)}, {which}{more}]", *page])

    def list_files(
        self,
        path: Annotated[str, "a directory below the folder; . is the folder itself"] = ".",
        pattern: Annotated[str, "only names that match, such as *.py"] = "",
    ) -> str:
        """List a directory. Directories end with a slash, links (which are not followed) with an @."""
        entries, is_cut = self._folder.entries(path, pattern)
        signs = {"directory": "/", "link": "@", "other": " (no regular file)"}
        names = [f"{shown(each.name)}{signs.get(each.kind, '')}" for each in entries[:_MOST_ENTRIES]]
        count = f"{'more than ' * is_cut}{len(entries):,} entr{'y' if len(entries) == 1 else 'ies'}"
        first = f", the first {_MOST_ENTRIES}; a pattern narrows it down" if len(entries) > _MOST_ENTRIES else ""
        return "\n".join([f"[{path}, {count}{first}]", *names])

    def search_files(
        self,
        text: Annotated[str, "what a line must have in it, as it is: no pattern"],
        context: ToolContext,
        path: Annotated[str, "search below this directory"] = ".",
        pattern: Annotated[str, "only files whose names match, such as *.py"] = "*",
        ignore_case: Annotated[bool, "find small and capital letters alike"] = False,
    ) -> str:
        """Search the lines of all text files below a directory.

        Hidden directories, binary files and huge files are skipped.
        """
        if not text or "\n" in text:
            raise InputError(f"text must be a part of one line, got {text!r:.80}")
        folded = str.casefold if ignore_case else str
        wanted, hits, searched, ending = folded(text), list[str](), 0, ""
        for name, content in self._texts(path, pattern, context):
            if content is None:
                ending = ": there are more files, search a smaller directory"
                break
            searched += 1
            if wanted not in folded(content):
                continue
            lines = enumerate(content.splitlines(), 1)
            here = (f"{name}:{n}: {line.strip()[:_LONGEST_HIT]}" for n, line in lines if wanted in folded(line))
            hits += islice(here, _MOST_HITS - len(hits))
            if len(hits) >= _MOST_HITS:
                ending = ": there are more lines, search for a longer text"
                break
        found = f"{len(hits)} line{'s' * (len(hits) != 1)}; {searched:,} text file{'s' * (searched != 1)} searched"
        return "\n".join([f"[{found}{ending}]", *hits])

    def _texts(self, path: str, pattern: str, context: ToolContext) -> Iterator[tuple[str, str | None]]:
        """Yield the text files below a directory; without a text, there are more than a search looks at."""
        first = path.rstrip("/") or ("/" if path else ".")
        left, files_left, waiting = _MOST_BYTES, _MOST_SEARCHED, [first]
        while waiting:
            above = waiting.pop()
            try:
                entries = self._folder.entries(above)[0]
            except InputError:
                if above == first:
                    raise
                continue  # it is gone, or must not be read
            names = {each.name: f"{above}/{each.name}".removeprefix("./") for each in entries}
            below = [each.name for each in entries if each.kind == "directory"]
            waiting += [names[name] for name in reversed(below) if not name.startswith(".") and name not in _SKIPPED]
            for each in entries:
                if each.kind != "file" or not fnmatch.fnmatch(each.name, pattern):
                    continue
                if context.signal.aborted or (files_left := files_left - 1) < 0 or left < 0:
                    yield "", None
                    return
                try:
                    data = self._folder.read(names[each.name]).data
                    left -= len(data)
                    yield shown(names[each.name]), decoded(each.name, data)
                except InputError:  # binary, too large, or gone
                    continue


def _page(lines: list[str], first: int) -> Iterator[str]:
    room = _MOST_CHARS
    for line in lines[first : first + _MOST_LINES]:
        text = line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} [... {len(line):,} characters]"
        if (room := room - len(text) - 1) < 0:
            return
        yield text
