"""The tools that change files: a person sees the difference first, and a crash leaves a file whole.

Each change names the version that it replaces (see `files.py`). `_asked` and the call itself plan the same change; a
file that is of another version by then makes the call fail instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from byssus.errors import InputError
from byssus.tools import Done, NotDone, Tool, ToolContext, Unknown, tool
from byssus.tools.ready.folder import LARGEST, Folder, Opened, Where
from byssus.tools.ready.text import decoded, difference, version_of
from byssus.values.decisions import Ask, Deny
from byssus.values.results import ToolResult

Path = Annotated[str, "a path below the folder, such as src/main.py"]

_MOST_PLACES = 100  # where a text is looked for that may have been put into a file


class _Change(NamedTuple):
    path: str
    before: str
    after: str
    replaces: Opened | None  # None: the file is new

    @property
    def is_new(self) -> bool:
        return self.replaces is None


class Writer:
    """Writes files below a folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def tools(self) -> list[Tool[..., Any]]:
        return [
            tool(sequential=True, approval=self._asked, check=self._checked)(function)
            for function in (self.write_file, self.edit_file)
        ]

    def write_file(
        self,
        path: Path,
        content: Annotated[str, "the whole new text of the file"],
        version: Annotated[str, "which read_file has named; empty for a file that does not exist yet"] = "",
        folder: Where = "",
    ) -> ToolResult:
        """Write a text file: a new one, or in place of the version that you have read. A person approves it first."""
        return self._make(self._rewritten(path, content, version, folder))

    def edit_file(
        self,
        path: Path,
        version: Annotated[str, "which read_file has named"],
        old: Annotated[str, "the text to replace; it must be in the file exactly once"],
        new: Annotated[str, "what to put in its place"],
        folder: Where = "",
    ) -> ToolResult:
        """Replace a piece of text in a file. A person approves it first."""
        return self._make(self._edited(path, version, old, new, folder))

    def _rewritten(self, path: str, content: str, version: str = "", folder: str = "") -> _Change:
        self._folder.check(folder)
        opened = self._folder.find(path)
        if opened is None:
            if version:
                raise InputError(f"{path!r} does not exist (any more); to make it, leave out the version")
            return _Change(path, "", content, None)
        if not version:
            raise InputError(f"{path!r} exists; read it, and pass the version that read_file names")
        before = decoded(path, opened.data)
        _check_version(path, opened.data, version)
        return _Change(path, before, content, opened)

    def _edited(self, path: str, version: str, old: str, new: str, folder: str = "") -> _Change:
        self._folder.check(folder)
        opened = self._folder.read(path)
        before = decoded(path, opened.data)
        _check_version(path, opened.data, version)
        if not old or (count := before.count(old)) != 1:
            where = "empty" if not old else f"in {path!r} {count} times" if count else f"not in {path!r}"
            raise InputError(f"the old text is {where}; it must be there exactly once, with its spaces and line ends")
        return _Change(path, before, before.replace(old, new), opened)

    def _make(self, change: _Change) -> ToolResult:
        data = _encoded(change)
        if change.is_new or change.after != change.before:
            self._folder.write(change.path, data, change.replaces)
        added, removed, _ = difference(change.before, change.after)
        version = version_of(data)
        about = {"path": change.path, "version": version, "lines_added": added, "lines_removed": removed}
        return ToolResult(f"Written: {change.path}, {_count(added, removed)}, now version {version}.", details=about)

    def _planned(self, context: ToolContext) -> _Change:
        plan = self._rewritten if context.tool_name == "write_file" else self._edited
        return plan(**context.arguments)

    def _asked(self, context: ToolContext) -> Ask | Deny | bool:
        """Show a person the difference. What cannot be done is not asked about."""
        try:
            change = self._planned(context)
            _encoded(change)
        except InputError as error:
            return Deny(str(error))
        if not change.is_new and change.after == change.before:
            return False
        self._folder.bind(context.arguments)
        added, removed, text = difference(change.before, change.after)
        what = "Make the file" if change.is_new else "Change the file"
        return Ask(f"{what} {change.path}? {_count(added, removed)}.\n{text}")

    def _checked(self, context: ToolContext) -> Done | NotDone | Unknown:
        """Find out whether an interrupted call has taken effect: by the version of the file."""
        try:
            self._planned(context)
            return NotDone()  # the file is still what it was
        except InputError:
            self._folder.check(context.arguments.get("folder", ""))
            opened = self._folder.find(context.arguments["path"])
        if opened is None or not _is_made(opened.data.decode("utf-8", "replace"), context.arguments):
            return Unknown()
        return Done(f"Written: {context.arguments['path']}, now version {version_of(opened.data)}.")


def _is_made(now: str, call: Mapping[str, Any]) -> bool:
    """Whether a text is what a call makes. An edited one is, with the old text put back, of the version it replaced."""
    if "content" in call:
        return bool(now == call["content"])
    old, new, place = call["old"], call["new"], -1
    for _ in range(_MOST_PLACES):
        if (place := now.find(new, place + 1)) < 0:
            return False
        before = f"{now[:place]}{old}{now[place + len(new) :]}"
        if version_of(before.encode("utf-8", "surrogatepass")) == call["version"]:
            return True
    return False


def _check_version(path: str, data: bytes, version: str) -> None:
    if (now := version_of(data)) != version:
        raise InputError(f"{path!r} has changed: it is version {now}, and not {version:.40}; read it again")


def _encoded(change: _Change) -> bytes:
    try:
        data = change.after.encode("utf-8")
    except UnicodeError as error:
        raise InputError(f"the text for {change.path!r} is not valid Unicode: {error.reason}") from error  # type: ignore[attr-defined]
    if len(data) > LARGEST:
        raise InputError(f"the text for {change.path!r} has {len(data):,} bytes, and at most {LARGEST:,} are written")
    return data


def _count(added: int, removed: int) -> str:
    return f"{added:,} line{'s' * (added != 1)} added, {removed:,} removed"
