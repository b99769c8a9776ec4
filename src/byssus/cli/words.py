"""Errors as a person at a shell reads them: the next step is a command to type, and never a Python call.

The library's texts name Python calls, because its users write Python. Errors of a run have a text of their own here, by
class. In all others the call is replaced by the command that does the same; a test looks through all texts for calls
that have none.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
from collections.abc import Collection, Iterable

from byssus.cli.tools.names import groups_of
from byssus.errors import (
    AnswerNeeded,
    ByssusError,
    InputError,
    LeaseLost,
    NothingToResume,
    QuotaExceeded,
    SearchTimeout,
    ThreadBusy,
    ThreadInactive,
    ToolMissing,
)

_COMMANDS = [
    (re.compile(pattern), command)
    for pattern, command in (
        (r"agent\.pending lists", "'byssus pending' lists"),
        (r"(?<![\w.])pending\(\) lists", "'byssus pending' lists"),
        (r"(?<![\w.])threads\(\) lists", "'byssus threads' lists"),
        (r"list_checkpoints\([^;]*\) names", "'byssus checkpoints' names"),
        (r"list_tasks\(session_id\) lists those of a session", "'byssus tasks' lists them"),
        (r"list_tasks\(\) lists them", "'byssus tasks' lists them"),
        (r"task_steps\(\) lists the steps", "'byssus tasks show' lists the steps"),
        (r"\b(pause|resume|cancel|retry)_task\b", r"\1"),
        (r"(?<![\w.])schedules\(\) lists", "'byssus schedules' lists"),
        (r"a schedule needs either cron=.*", "a schedule needs --cron or --every, for example: --cron '0 9 * * 1-5'"),
        (r"; for seconds, pass every=SECONDS", "; for seconds: --every SECONDS"),
        (r"create_user\([^;]*\) makes one", "'byssus users' lists them, and a program adds them"),
        (r"create_session\([^;]*\) makes one", "'byssus threads' lists them"),
        (r"update_user\([^;]*\) sets it", "a program sets it"),
        (r"get_prices\(\) lists them", "a program sets prices"),
        (r"a fork: cp\.fork\('(.*?)', user_id=\.\.\.\)", r"a fork of it: byssus fork '\1'"),
        (r"set (\w+_API_KEY) or pass \w+\(api_key=\.\.\.\)", r"set it: export \1=..."),
        (r"; any other server[^;]*base_url=\.\.\.\)", ""),
        (r", or use LocalProvider\(n_ctx=\.\.\.\) with more", ", or use another model: --model MODEL"),
        (r", or wait longer with (idle_timeout=\.\.\.|client=\S*\(timeout=\.\.\.\))", ""),
        (r"PostgresCheckpointer\(dsn, schema=\.\.\.\)", "add ?schema=NAME to the DSN"),
        (r"page with offset=\.\.\.", "choose a smaller --limit"),
        (r"\b(since|until) must be a datetime or a text", r"--\1 must be a time"),
        (r"resume\(\) goes on", "byssus resume goes on"),
        (r"pass incremental=True \(--incremental\)", "add --incremental"),
    )
]


def in_words(error: Exception, thread_id: str = "") -> Exception:
    """The error with the next step at a shell; a mistake of ours is named so. `thread_id`: the thread of a run."""
    if (text := _of_a_run(error, thread_id)) is not None:
        return InputError(text)
    if isinstance(error, OSError) and not isinstance(error, ByssusError):
        return _of_the_system(error)
    if isinstance(error, ByssusError):
        text = at_shell(str(error))
        return error if text == str(error) else InputError(text)
    return ByssusError(f"unexpected {type(error).__name__}: {error}; run it again with --debug for the traceback")


def at_shell(text: str) -> str:
    """A text of the library with commands in place of Python calls."""
    for pattern, command in _COMMANDS:
        text = pattern.sub(command, text)
    return text


def _of_a_run(error: Exception, thread_id: str) -> str | None:
    name = getattr(error, "thread_id", None) or thread_id
    known = _fact_and_step(error, f"thread {name!r}" if name else "the thread", shlex.quote(name) if name else "THREAD")
    return None if known is None else f"{known[0]}; {known[1]}"


def _fact_and_step(error: Exception, what: str, thread: str) -> tuple[str, str] | None:
    """The fact and the next step; None for errors that no run raises."""
    fact = str(error).partition("; ")[0]
    known: dict[type[Exception], tuple[str, str]] = {
        NothingToResume: (f"{what} has nothing to resume", f"go on with it: byssus chat {thread}"),
        AnswerNeeded: (f"{what} waits for a person", f"list the questions: byssus pending {thread}"),
        ThreadBusy: (
            f"{what} is being driven by {getattr(error, 'owner', '').split(' ', 1)[0]}",
            f"watch it: byssus show {thread} --follow, say something: byssus steer {thread} TEXT, or end that run: "
            f"byssus abort {thread}",
        ),
        ToolMissing: (
            f"{str(error).partition('. Nothing was changed')[0]}. Nothing was changed",
            f"use what has the tool: byssus resume {thread} {options_for(getattr(error, 'calls', ()))}",
        ),
        ThreadInactive: (
            f"{what} is {getattr(error, 'status', '')}, and no run starts on it until a program makes it active again",
            f"to go on in a copy: byssus fork {thread}",
        ),
        LeaseLost: (str(error).rpartition(": ")[0], f"to go on: byssus resume {thread}"),
        QuotaExceeded: (fact, "a program raises quotas, 'byssus users' shows them"),
        SearchTimeout: (fact, "search in less (--thread, --user, --since), or for longer: --timeout SECONDS"),
    }
    return known.get(type(error))


def options_for(tools: Collection[str]) -> str:
    """The options of a command that needs these tools."""
    groups = groups_of(tools)
    return f"--tools {','.join(groups)}" if groups else "--app MODULE:FACTORY"


def _of_the_system(error: OSError) -> Exception:
    """What the system says, with the file that it is about and what to look at."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return InputError(
            f"{os.fsdecode(error.filename)!r} cannot be used ({reason}); check that the path is right and may be read "
            "and written, or name another place"
        )
    if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
        return InputError(f"the output cannot be written ({reason}); free some space, or write it elsewhere")
    return error


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """A question that names what is most like the typed word; empty if nothing is."""
    alike = difflib.get_close_matches(typed, [*known], n=1)
    return f"did you mean {alike[0]!r}?" if alike else ""
