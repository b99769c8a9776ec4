"""The groups of ready-made tools, and what they are called. It imports nothing: errors of all commands name them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GROUPS: dict[str, tuple[str, ...]] = {
    "files": ("read_file", "list_files", "search_files", "write_file", "edit_file"),
    "shell": ("shell",),
    "time": ("current_time",),
    "threads": ("search_threads",),
}

WITHOUT_LIMIT = frozenset({"shell"})  # one call says nothing about the next: each asks for approval


def groups_of(tools: Collection[str]) -> Sequence[str]:
    """The groups that these tools are from; none if one of them is from no group."""
    found = [group for group, names in GROUPS.items() if set(names) & set(tools)]
    known = {name for group in found for name in GROUPS[group]}
    return found if set(tools) <= known else []
