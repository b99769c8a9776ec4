"""The lines of an export as they come back: each line is checked alone, and all of them together.

Rows must come in their order, and point to what is there. What passes can be stored and read; and the sums at the end
tell whether it is what was exported. What may come in is another question: see `admission.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from byssus.errors import InputError
from byssus.maintenance.admission import Admission
from byssus.maintenance.shapes import COUNTED, FORMAT, checked_format, is_int, is_name, kinds, list_of, parse
from byssus.messages import dumps

_OF_USER = ("account", "usage", "tool_usage", "task")  # what comes before the threads of a user


class _Thread:
    """A thread that is arriving: what its rows may point to, and what its last line has to say."""

    def __init__(self, header: dict[str, Any], line: bytes) -> None:
        self.format: int = header["format"]
        self._header = header
        self._digest = hashlib.sha256(line + b"\n")
        self._kinds = kinds(self.format)  # those that may still come
        self._counts = {COUNTED[kind]: 0 for kind in self._kinds}
        self._last: tuple[int, ...] = ()
        self._version = 0  # the highest
        self._checks: dict[str, Callable[[dict[str, Any]], None]] = {
            "branch": self._branch,
            "message": self._message,
            "mark": self._mark,
            "call": self._call,
            "run": self._run,
            "checkpoint": self._checkpoint,
        }
        if header["message_count"] > header["head"] or header["unledgered"] > header["head"]:
            raise InputError(f"a thread whose head is {header['head']} cannot have more messages than that")
        if (header["below"] is None) != (header["parent_call"] is None):
            raise InputError("a child thread has a parent and the call of the parent, and any other thread has neither")
        if (header["saved_at"] is None) != (header["partial"] is None):
            raise InputError("a partial comes with the time when it was saved")

    def row(self, kind: str, row: dict[str, Any], line: bytes) -> None:
        if kind not in self._kinds:
            raise InputError(f"a {kind} cannot come here; the lines are not in the order in which they were exported")
        if kind != self._kinds[0]:
            self._kinds = self._kinds[self._kinds.index(kind) :]
            self._last = ()
        if kind in self._checks:
            self._checks[kind](row)
        self._counts[COUNTED[kind]] += 1
        self._digest.update(line + b"\n")

    def end(self, row: dict[str, Any], at: int) -> dict[str, Any]:
        """What the store needs at the end of a thread that has all its rows."""
        if row.keys() != {"end", "sha256"} or row["end"] != self._counts:
            raise InputError(
                f"thread {self._header['id']!r} is not whole: {dumps(self._counts)} have come, and it should be "
                f"{dumps(row.get('end'))[:200]}"
            )
        if row["sha256"] != self._digest.hexdigest():
            raise InputError(
                f"something in the lines of thread {self._header['id']!r} was changed: their sha256 differs"
            )
        for name in ("branch", "line"):
            self._known(self._header[name], name)
        return {"at": at, **dict.fromkeys(COUNTED.values(), 0), **self._counts, "version": self._version}

    def _branch(self, row: dict[str, Any]) -> None:
        number, end = row["number"], 0
        if number != self._counts["branches"] + 1:
            raise InputError(f"this should be branch {self._counts['branches'] + 1}, and is {number}")
        is_read = number == self._header["branch"]
        for place, (source, after, upto) in enumerate(row["segments"]):
            is_last = place == len(row["segments"]) - 1
            is_open = upto is None and is_read and is_last and source == number and after <= self._header["head"]
            if source > number or after < end or not (is_open or (upto is not None and upto > after)):
                raise InputError(f"branch {number} cannot be read along {row['segments']!r:.200}")
            end = after if upto is None else upto
        if is_read and (not row["segments"] or row["segments"][-1][2] is not None):
            raise InputError(f"branch {number}, on which the thread goes on, has no end to write to")
        self._inherited(number, row["inherited"])

    def _inherited(self, number: int, inherited: list[list[Any]]) -> None:
        for source, step, version, as_of in inherited:
            self._follow((source,), f"what branch {number} inherits")
            if source >= number or (step is None) != (version is None):
                raise InputError(f"branch {number} cannot inherit {inherited!r:.200}")
            self._version = max(self._version, version or 0, as_of)
        self._last = ()

    def _message(self, row: dict[str, Any]) -> None:
        self._known(row["branch"], "branch")
        self._follow((row["branch"], row["seq"]), "a message")
        if row["branch"] == self._header["branch"] and row["seq"] > self._header["head"]:
            raise InputError(f"message {row['seq']} is behind the head of the thread, {self._header['head']}")
        if row["role"] == "tool_result" and not row["body"].lstrip().startswith("{"):
            raise InputError(f"the result of a tool cannot be {row['body'][:80]!r}")

    def _mark(self, row: dict[str, Any]) -> None:
        self._known(row["branch"], "branch")
        place = (row["branch"], row["seq"])
        if place != self._last:  # a message may have several
            self._follow(place, "a mark")

    def _call(self, row: dict[str, Any]) -> None:
        self._known(row["branch"], "branch")
        asked = ("reason", "question", "asked_at")
        needed = {"waiting": asked, "answered": (*asked, "answer"), "left": asked}.get(row["status"], ())
        missing = [name for name in needed if row[name] is None]
        if missing:
            raise InputError(f"a call that is {row['status']} has no {', no '.join(missing)}")
        if row["reply"] == 0 and row["status"] not in ("done", "failed"):
            raise InputError(f"a call that no reply has asked for cannot be {row['status']}")
        if row["reply"] > 0 and not row["arguments"].startswith("{") and json.loads(row["arguments"]):
            raise InputError(f"the arguments of this call cannot be {row['arguments'][:80]!r}")

    def _run(self, row: dict[str, Any]) -> None:
        if row["branch"] is not None:
            self._known(row["branch"], "branch")
        if (row["request_key"] is None) != (row["request_digest"] is None):
            raise InputError(f"run {row['id']!r:.80} has a request key without its digest, or the other way round")
        if row["ended_at"] is None and row["id"] != self._header["run"]:
            raise InputError(f"run {row['id']!r:.80} has no end, and is not the one that the thread has not ended")

    def _checkpoint(self, row: dict[str, Any]) -> None:
        for name in ("line", "branch"):
            self._known(row[name], name)
        for number in row["hidden"]:
            self._known(number, "line")
        self._follow((row["line"], row["step"], row["version"]), "a checkpoint")
        self._version = max(self._version, row["version"])

    def _known(self, number: int, what: str) -> None:
        if number > self._counts["branches"]:
            raise InputError(f"there is no {what} {number}")

    def _follow(self, place: tuple[int, ...], what: str) -> None:
        if place <= self._last:
            raise InputError(f"{what} at {place} comes behind {self._last}: the lines are not in their order")
        self._last = place


class Incoming:
    """Lines as they arrive, each checked. An error names the line."""

    def __init__(self, admission: Admission) -> None:
        self.forks: list[tuple[int, int, int]] = []  # which thread was forked from which, and up to where
        self.user_id = ""
        self.account: dict[str, Any] | None = None  # what is kept of the user
        self.left = dict.fromkeys(_OF_USER[1:], 0)  # how many rows deleted threads have left them
        self._admission = admission
        self._count = 0
        self._threads = 0
        self._names: set[tuple[str, str]] = set()  # of the threads that have come
        self._thread: _Thread | None = None
        self._user: Any = None  # the sum over all lines, where they are a user's
        self._format = FORMAT  # of what is a user's
        self._kinds: Sequence[str] = ()  # of the rows that may still come before a user's threads
        self._is_over = False

    def take(self, lines: Sequence[bytes]) -> list[tuple[str, dict[str, Any]]]:
        """The rows of these lines, and where each thread ends."""
        rows = []
        for line in lines:
            self._count += 1
            try:
                for kind, row in self._take(line):
                    if (admitted := self._admission.row(kind, row)) is not None:
                        rows.append((kind, admitted))
            except InputError as error:
                raise InputError(f"line {self._count}: {error}") from error
        return rows

    def finish(self) -> None:
        """There are no more lines."""
        if self._thread is not None or (self._user is not None and not self._is_over):
            what = "a thread" if self._thread is not None else "the export of a user"
            raise InputError(f"line {self._count + 1} is missing: {what} has no end; what was exported is not all here")
        if self._threads == 0 and self._user is None:
            raise InputError("line 1 is missing: there is nothing to import")

    def _take(self, line: bytes) -> list[tuple[str, dict[str, Any]]]:
        kind, row = parse(line, self._format if self._thread is None else self._thread.format)
        if self._is_over:
            raise InputError("nothing can come behind the end of a user's export")
        if self._thread is None:
            rows = self._between(kind, row, line)
        elif kind == "end":
            rows = [("end", self._thread.end(row, self._count))]
            self._thread = None
            self._threads += 1
        else:
            self._thread.row(kind, row, line)
            rows = [(kind, row)]
        if self._user is not None:
            self._user.update(line + b"\n")
        return rows

    def _between(self, kind: str, row: dict[str, Any], line: bytes) -> list[tuple[str, dict[str, Any]]]:
        """A line that is not within a thread."""
        if kind == "thread":
            self._thread = _Thread(row, line)
            self._kinds = ()
            if row["below"] is not None and (row["namespace"], row["below"]) not in self._names:
                raise InputError(f"thread {row['id']!r} is a child of {row['below']!r}, which does not come before it")
            self._names.add((row["namespace"], row["id"]))
            return [(kind, row)]
        if kind in self._kinds:
            return self._of_user(kind, row)
        if kind == "user" and self._count == 1:
            self._begin_user(row)
        elif kind == "end" and self._user is not None:
            self._end_user(row)
        else:
            raise InputError(f"this is no beginning of a thread: {line[:80]!r}")
        return []

    def _begin_user(self, row: dict[str, Any]) -> None:
        self._format = checked_format(row)
        if row.keys() != {"byssus", "user"} or not is_name(row["user"]):
            raise InputError(f"a user cannot be {dumps(row)[:80]}")
        self.user_id = row["user"]
        self._user = hashlib.sha256()
        self._kinds = _OF_USER[:1] if self._format > 1 else ()

    def _of_user(self, kind: str, row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """What is kept of a user beside their threads."""
        if kind == "account":
            self._admission.account()
            self.account = row
            self._kinds = _OF_USER[1:]
            return []
        self._kinds = self._kinds[self._kinds.index(kind) :]
        self.left[kind] += 1
        return [(kind, row)]

    def _end_user(self, row: dict[str, Any]) -> None:
        if row.keys() != {"end", "forks", "sha256"} or row["end"] != {"threads": self._threads}:
            raise InputError(f"{self._threads} threads have come, and it should be {dumps(row.get('end'))[:200]}")
        if row["sha256"] != self._user.hexdigest():
            raise InputError("something in the lines of this user was changed: their sha256 differs")
        before = -1
        if not list_of(is_int, is_int, is_int)(row["forks"]):
            raise InputError(f"the forks cannot be {row['forks']!r:.80}")
        for fork, origin, _ in row["forks"]:
            if not origin < fork < self._threads or fork <= before:
                raise InputError(f"thread {fork} cannot be a fork of thread {origin} of these")
            before = fork
        self.forks = [(fork, origin, seq) for fork, origin, seq in row["forks"]]
        self._is_over = True
