"""The shape of the code: who may import whom, what is public, and how long things may get."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import byssus
from tests.support import drawing
from tests.support.rooms import ROOMS

ROOT = Path(byssus.__file__).parent
REPOSITORY = Path(__file__).parents[1]
FILES = {file.relative_to(ROOT).as_posix(): file for file in sorted(ROOT.rglob("*.py"))}

# What runs SQL knows no message: of the values it may use these alone.
SQL_MAY_USE = {
    "errors.py",
    "signals.py",
    "telemetry.py",
    "values/clock.py",
    "values/places.py",
    "values/release.py",
    "values/thread_key.py",
}

# Packages that only these files may import, so that everything else works without them.
ONLY_IN = {
    "agentscope": ["adapters/agentscope.py"],
    "apsw": [f"store/sqlite/{part}.py" for part in ("file", "reading", "room", "store", "tx")],
    "anthropic": ["providers/anthropic.py"],
    "cronsim": ["tasks/ticks.py"],
    "mcp": ["tools/mcp.py"],
    "openai": ["providers/openai.py"],
    "psycopg": [f"store/postgres/{part}.py" for part in ("login", "notifications", "pool", "server", "store", "tx")],
    "opentelemetry": ["telemetry.py"],
    "Stemmer": ["search/tokens.py"],
    "wcwidth": ["cli/screen/table.py"],
    "xllamacpp": ["providers/local.py"],
}

# What is imported when it is first used: together they would make a start take twice as long.
LATE = {
    *("pathlib", "tempfile"),
    *(f"byssus.maintenance.{name}" for name in ("backup", "restore", "check", "repair", "export", "import_")),
    *(
        "byssus.search.search",
        "byssus.search.tokens",
        "byssus.queries.search.candidates",
        "byssus.queries.moving.copying",
    ),
}
PUBLIC = [
    "Agent",
    "Approval",
    "Approve",
    "Ask",
    "AssistantMessage",
    "Deny",
    "Done",
    "ExcludeMarked",
    "HookContext",
    "ImageContent",
    "Limits",
    "Middleware",
    "Model",
    "NotDone",
    "Pending",
    "Prices",
    "Redact",
    "RunResult",
    "SlidingWindow",
    "Summarize",
    "TextContent",
    "ThinkingContent",
    "ThreadKey",
    "TokenBudget",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "ToolResultMessage",
    "Unknown",
    "Usage",
    "UserMessage",
    "tool",
]


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text("utf-8"), name) for name, file in FILES.items()}


def room_of(file: str) -> str:
    top = file.split("/", maxsplit=1)[0].removesuffix(".py")
    (found,) = [name for name, (lies_in_it, _) in ROOMS.items() if top in lies_in_it]
    return found


@functools.cache
def imported_names(file: str) -> frozenset[str]:
    return frozenset(names_imported_by(trees()[file]))


def names_imported_by(tree: ast.AST) -> Iterator[str]:
    """All that a file imports, anywhere in it, as full names; of `from x import y` that is x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_files(file: str) -> set[str]:
    """The files of byssus that a file imports: the module x.y if there is one, and else the x that holds y."""
    found = set()
    for name in imported_names(file):
        top, *path = name.split(".")
        if top == "byssus":
            places = ["/".join(path[:end]) for end in range(len(path), -1, -1)]
            candidates = [each for place in places for each in (f"{place}.py", f"{place}/__init__.py".lstrip("/"))]
            found.add(next(candidate for candidate in candidates if candidate in FILES))
    return found - {file}


def test_every_module_has_its_room() -> None:
    tops = {file.split("/", maxsplit=1)[0].removesuffix(".py") for file in FILES}
    placed = [each for lies_in_it, _ in ROOMS.values() for each in lies_in_it]
    assert len(placed) == len(set(placed))
    assert tops == set(placed), f"a new folder or file of the root needs a room: {sorted(tops ^ set(placed))}"


def test_rooms_only_use_what_is_below_them() -> None:
    order = list(ROOMS)
    for position, (_, uses) in enumerate(ROOMS.values()):
        assert uses <= set(order[position + 1 :])


def wrong_arrows(file: str) -> set[tuple[str, str]]:
    mine = room_of(file)
    knows_no_message = mine in {"queries", "store"}
    return {
        (file, other)
        for other in imported_files(file)
        if room_of(other) not in {mine, *ROOMS[mine][1]}
        or (knows_no_message and room_of(other) == "values" and other not in SQL_MAY_USE)
    }


def test_imports_point_downwards() -> None:
    assert {arrow for file in FILES for arrow in wrong_arrows(file)} == set()


def test_no_imports_go_in_circles() -> None:
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, f"a circle: {' -> '.join((*path, file))}"
        if file not in done:
            for other in sorted(imported_files(file)):
                visit(other, (*path, file))
            done.add(file)

    for file in FILES:
        visit(file, ())


@pytest.mark.parametrize(("package", "files"), ONLY_IN.items())
def test_a_package_that_one_file_needs_is_imported_there_alone(package: str, files: list[str]) -> None:
    importers = [name for name in FILES if any(imported.split(".")[0] == package for imported in imported_names(name))]
    assert importers == files


def test_the_public_names_are_these_and_no_others() -> None:
    assert byssus.__all__ == PUBLIC
    assert all(hasattr(byssus, name) for name in PUBLIC)
    assert sorted(name for names in byssus._HOMES.values() for name in names) == sorted(PUBLIC)
    homes = {f"byssus.{home}.{name}" for home, names in byssus._HOMES.items() for name in names}
    assert {name for name in names_imported_by(trees()["__init__.py"]) if name.startswith("byssus.")} == homes


@pytest.mark.processes
def test_importing_byssus_imports_no_heavy_package() -> None:
    script = (
        "import sys, byssus, byssus.checkpointer, byssus.providers.scripted, byssus.providers.anthropic,"
        " byssus.providers.local\n"
        "heavy = {'anthropic', 'httpx', 'httpx2', 'openai', 'psycopg', 'pydantic', 'xllamacpp', 'numpy'}\n"
        "print(*heavy & sys.modules.keys())"
    )
    assert printed_by(script) == []


@pytest.mark.processes
def test_an_agent_that_starts_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from byssus import Agent, Model\n"
        "from byssus.checkpointer import SQLiteCheckpointer\n"
        "from byssus.providers.scripted import ScriptedProvider\n"
        "async def main():\n"
        f"    async with SQLiteCheckpointer({str(tmp_path / 'a.db')!r}) as cp:\n"
        "        provider = ScriptedProvider(['hello'])\n"
        "        agent = Agent(provider=provider, model=Model('m'), checkpointer=cp, thread_id='t')\n"
        "        print(len((await agent.prompt('hi')).messages))\n"
        "asyncio.run(main())\n"
        f"late = {LATE!r}\n"
        "print(*sorted(late & sys.modules.keys()))"
    )
    assert printed_by(script) == ["2"]


def printed_by(script: str) -> list[str]:
    """What a fresh interpreter prints, word by word."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT.parent)},
        timeout=60,
    )
    return done.stdout.split()


def test_a_module_ends_after_600_lines_at_most() -> None:
    lengths = {name: len(file.read_text("utf-8").splitlines()) for name, file in FILES.items()}
    assert [f"{name}: {length} lines" for name, length in lengths.items() if length > 600] == []


def test_a_function_ends_after_50_lines_at_most() -> None:
    too_long = [
        f"{file}:{node.lineno} {node.name}: {length} lines"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.lineno + 1) > 50
    ]
    assert too_long == []


def test_the_checkpointer_is_a_life_cycle_and_a_table_of_operations() -> None:
    (found,) = [node for node in trees()["checkpointer.py"].body if getattr(node, "name", "") == "Checkpointer"]
    assert isinstance(found, ast.ClassDef)
    assert found.end_lineno is not None
    assert found.end_lineno - found.lineno < 250


# --- databases --------------------------------------------------------------------------------------------------------

KNOW_DATABASES = {
    *(file for file in FILES if file.startswith(("store/sqlite/", "store/postgres/"))),
    *("store/opening.py", "values/places.py", "checkpointer.py"),
}
DATABASE_WORDS = ("sqlite", "postgres", "psycopg")


def conditions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
            yield from (case.pattern for case in node.cases)
        elif isinstance(node, ast.Compare | ast.BoolOp) or _is_call_of_isinstance(node):
            yield node


def _is_call_of_isinstance(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"


def words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_nothing_asks_which_database_it_is_on() -> None:
    asked = [
        f"{file}:{condition.lineno} {word}"
        for file in sorted(FILES.keys() - KNOW_DATABASES)
        for condition in conditions(trees()[file])
        for word in words(condition)
        if isinstance(condition, ast.expr | ast.pattern) and any(name in word.lower() for name in DATABASE_WORDS)
    ]
    assert asked == []


def test_sql_stands_in_the_queries_and_the_store_alone() -> None:
    verbs = ("SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM ", "CREATE ", "PRAGMA ", "BEGIN", "COMMIT", "ROLLBACK")
    statements = [
        f"{file}:{node.lineno} {node.value[:40]!r}"
        for file, tree in trees().items()
        if not file.startswith(("queries/", "store/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lstrip().startswith(verbs)
    ]
    assert statements == []


# --- the tests --------------------------------------------------------------------------------------------------------

TESTS = {file.relative_to(REPOSITORY).as_posix(): file for file in sorted((REPOSITORY / "tests").rglob("*.py"))}

# A module is tested in the file of its name in the same folder. These are tested elsewhere: in the tests of what users
# call, or together with the modules that they were made for.
COVERED_BY: dict[str, list[str]] = {
    "__init__.py": ["test_architecture.py"],
    "__main__.py": ["cli/chat/test_chat.py", "cli/test_ending.py"],
    "errors.py": ["providers/test_failures.py", "run/test_failures.py", "store/test_operations.py"],
    "cli/chat/agents.py": ["cli/chat/test_ask.py", "cli/chat/test_resume.py"],
    "cli/chat/plain.py": ["cli/chat/test_chat.py"],
    "cli/chat/live/actions/change.py": ["cli/chat/live/actions/test_do.py"],
    "cli/chat/live/actions/points.py": ["cli/chat/live/actions/test_do.py"],
    "cli/chat/live/actions/threads.py": ["cli/chat/live/actions/test_do.py"],
    "cli/chat/live/actions/versions.py": ["cli/chat/live/actions/test_do.py"],
    "cli/chat/live/drawn/board.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/drawn/calls.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/drawn/drawing.py": ["cli/chat/live/drawn/test_markdown.py"],
    "cli/chat/live/drawn/picker.py": ["cli/chat/live/actions/test_do.py"],
    "cli/chat/live/drawn/screen.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/drawn/view.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/opening.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/printed.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/start.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/typed/completion.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/typed/editor.py": ["cli/chat/live/test_session.py"],
    "cli/chat/live/typed/keys.py": ["cli/chat/live/test_session.py"],
    "cli/commands.py": ["cli/test_cli.py"],
    "cli/database.py": ["cli/chat/test_chat.py"],
    "cli/options.py": ["cli/test_cli.py"],
    "cli/parser.py": ["cli/test_cli.py"],
    "cli/screen/pages.py": ["cli/browse/test_show.py"],
    "cli/watch/tasks.py": ["cli/watch/test_rows.py", "cli/watch/test_watch.py"],
    "cli/work/verbs.py": ["cli/work/test_tasks.py", "cli/work/test_schedules.py"],
    "cli/watch/board.py": ["cli/watch/test_watch.py"],
    "cli/watch/watched.py": ["cli/watch/test_rows.py", "cli/watch/test_watch.py"],
    "cli/tools/names.py": ["cli/tools/test_chosen.py"],
    "cli/subcommand.py": ["cli/chat/test_chat.py"],
    "queries/log/runs.py": ["threads/runs/test_records.py"],
    "run/children/tool.py": ["run/children/test_calls.py"],
    "run/children/leading.py": ["run/children/test_calls.py", "run/children/test_processes.py"],
    "run/outside/reporting.py": ["run/test_failures.py"],
    "run/outside/journals.py": ["test_agent.py", "run/outside/test_requests.py"],
    "maintenance/look.py": ["cli/admin/test_doctor.py"],
    "maintenance/lines.py": ["maintenance/test_export.py"],
    "maintenance/shapes.py": ["maintenance/test_export.py"],
    "memory/arguments.py": ["memory/test_memory.py"],
    "memory/base.py": ["memory/test_memory.py"],
    "memory/in_memory.py": ["memory/test_memory.py"],
    "middleware/tokens.py": ["accounts/test_quotas.py"],
    "providers/openai_models.py": ["providers/test_openai.py"],
    "providers/wire.py": ["providers/test_failures.py", "providers/test_anthropic.py", "providers/test_openai.py"],
    "queries/accounts/quotas.py": ["accounts/test_quotas.py"],
    "queries/accounts/sessions.py": ["accounts/test_sessions.py"],
    "queries/accounts/tool_log.py": ["accounts/test_tool_log.py"],
    "queries/accounts/usage.py": ["accounts/test_usage.py"],
    "queries/accounts/users.py": ["accounts/test_users.py"],
    "queries/log/answers.py": ["run/outside/test_answering.py", "run/test_approvals.py"],
    "queries/log/branches.py": ["threads/test_forks.py", "threads/test_checkpoint_machine.py"],
    "queries/log/listing.py": ["threads/test_listing.py", "queries/log/test_threads.py"],
    "queries/following/rows.py": ["threads/following/test_follow.py"],
    "queries/log/inbox.py": ["threads/test_inbox.py", "threads/test_inbox_races.py"],
    "queries/log/marks.py": ["threads/test_marks.py"],
    "queries/log/memories.py": ["memory/test_memory.py", "memory/test_stored.py"],
    "queries/log/prefixes.py": ["threads/test_prefixes.py"],
    "queries/log/tool_calls.py": ["run/test_tool_calls.py", "run/test_tool_call_recovery.py"],
    "queries/moving/checks.py": ["maintenance/test_check.py"],
    "queries/moving/copying.py": ["maintenance/test_copy.py", "maintenance/test_backup.py"],
    "queries/moving/exporting.py": ["maintenance/test_export.py"],
    "queries/moving/importing.py": ["maintenance/test_export.py"],
    "queries/moving/known_backups.py": ["threads/test_known_backups.py"],
    "queries/tasks/claims.py": ["worker/test_worker.py", "worker/test_running.py"],
    "queries/tasks/rates.py": ["worker/test_limits.py"],
    "worker/context.py": ["worker/test_running.py", "worker/test_worker.py"],
    "worker/ready.py": ["worker/test_agent_tasks.py"],
    "worker/outcomes.py": ["worker/test_handlers.py"],
    "queries/tasks/agents.py": ["worker/test_agent_waits.py"],
    "queries/tasks/moves.py": ["tasks/test_moves.py"],
    "queries/tasks/owners.py": ["tasks/test_tasks.py"],
    "queries/tasks/steps.py": ["tasks/test_steps.py"],
    "queries/tasks/tasks.py": ["tasks/test_tasks.py"],
    "queries/versions/children.py": ["threads/test_children.py", "run/children/test_calls.py"],
    "queries/versions/checkpoints.py": ["threads/test_checkpoints.py"],
    "queries/versions/deleting.py": ["threads/test_retention.py"],
    "queries/versions/erasure_notes.py": ["threads/test_erasure.py"],
    "queries/versions/erasures.py": ["threads/test_erasure.py"],
    "queries/versions/forks.py": ["threads/test_forks.py"],
    "queries/versions/putting.py": ["threads/test_checkpoints.py", "threads/test_checkpoint_machine.py"],
    "run/journal.py": ["run/test_thread_journal.py", "run/test_loop.py"],
    "run/memory_journal.py": ["run/test_loop.py", "run/test_approval_runs.py"],
    "run/settings.py": ["run/test_limits.py"],
    "run/known/state.py": ["run/test_loading.py", "run/known/test_tail.py"],
    "run/thread_inbox.py": ["threads/test_inbox.py", "run/test_steering.py"],
    "run/thread_ledger.py": ["run/test_tool_calls.py", "run/test_tool_call_recovery.py"],
    "store/postgres/tx.py": ["store/postgres/test_store.py"],
    "store/sqlite/pauses.py": ["store/sqlite/test_reading.py", "store/sqlite/test_processes.py"],
    "store/sqlite/tx.py": ["store/sqlite/test_store.py"],
    "store/schema.py": ["store/test_migrations.py"],
    "store/sharing.py": ["store/sqlite/test_file.py"],
    "threads/encoding.py": ["test_checkpointer.py"],
    "threads/following/news.py": ["threads/following/test_follow.py"],
    "threads/waiting.py": ["run/test_leases.py"],
    "tools/__init__.py": ["tools/test_signature.py", "tools/test_execution.py", "tools/test_details.py"],
    "tools/mcp_process.py": ["tools/test_mcp.py"],
    "tools/ready/__init__.py": ["tools/ready/test_files.py", "tools/ready/test_shell.py"],
    "tools/ready/text.py": ["tools/ready/test_files.py", "tools/ready/test_writing.py"],
    "values/clock.py": ["test_messages.py", "values/test_checkpoints.py"],
    "values/decisions.py": ["run/test_approvals.py", "run/test_approval_runs.py"],
    "values/marks.py": ["threads/test_marks.py"],
    "values/prompts.py": ["test_agent.py"],
    "values/following/records.py": ["test_events.py", "values/following/test_items.py"],
    "values/release.py": ["run/test_leases.py", "run/test_leases_lost.py"],
    "values/results.py": ["test_agent.py"],
    "values/schemas.py": ["tools/test_signature.py", "values/test_output.py"],
    "values/thread_key.py": ["queries/log/test_threads.py"],
    "maintenance/import_.py": ["maintenance/test_export.py"],
    "maintenance/repair.py": ["maintenance/test_check.py"],
    "maintenance/restore.py": ["maintenance/test_backup.py"],
    "queries/tasks/schedules.py": ["tasks/test_schedules.py"],
    "queries/search/candidates.py": ["search/test_search.py", "search/test_index.py"],
    "queries/search/engines.py": ["search/test_search.py"],
    "queries/search/fts5.py": ["search/test_search.py"],
    "queries/search/index.py": ["search/test_index.py"],
    "queries/search/kinds.py": ["search/test_search.py"],
    "queries/search/tsvector.py": ["search/test_search.py"],
    "tasks/rows.py": ["tasks/test_tasks.py"],
    "store/upkeep.py": ["maintenance/test_backup.py", "threads/test_erasure.py"],
    "testing.py": ["providers/test_scripted.py"],
    "threads/approvals.py": ["run/test_approvals.py", "test_storage.py"],
}


def is_only_a_docstring(file: str) -> bool:
    return all(isinstance(node, ast.Expr) for node in trees()[file].body)


def own_tests(file: str) -> str:
    """Where the tests of a module are, if they are where they are looked for first; of a folder, by its name."""
    folder, _, name = file.removesuffix(".py").rpartition("/")
    return f"{folder}/test_{folder.rpartition('/')[2] if name == '__init__' else name}.py".lstrip("/")


def test_every_module_has_tests_that_can_be_found() -> None:
    needed = {file for file in FILES if not is_only_a_docstring(file)}
    without = sorted(file for file in needed if f"tests/{own_tests(file)}" not in TESTS and file not in COVERED_BY)
    assert without == [], "write tests/<folder>/test_<module>.py, or name in COVERED_BY the file that tests them"
    assert COVERED_BY.keys() <= needed, f"not there any more: {sorted(COVERED_BY.keys() - needed)}"
    named_twice = sorted(file for file in COVERED_BY if f"tests/{own_tests(file)}" in TESTS)
    assert named_twice == [], "these have a file of their own: take them out of COVERED_BY"


def test_the_tests_of_a_module_hold_tests() -> None:
    named = {f"tests/{name}" for names in COVERED_BY.values() for name in names}
    named |= {f"tests/{own_tests(file)}" for file in FILES if file not in COVERED_BY and not is_only_a_docstring(file)}
    empty = sorted(name for name in named if name not in TESTS or "\ndef test_" not in TESTS[name].read_text("utf-8"))
    assert empty == []


def test_no_test_module_is_imported() -> None:
    found = [
        f"{name} imports {imported}"
        for name, file in TESTS.items()
        for imported in names_imported_by(ast.parse(file.read_text("utf-8"), name))
        if imported.startswith("tests.") and any(map(is_no_library, imported.split(".")[1:]))
    ]
    assert found == [], "what several tests share belongs in tests/support"


def is_no_library(part: str) -> bool:
    return part == "conftest" or part.startswith("test_")


# --- the name ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_old_name_of_the_project_is_in_the_changelog_alone() -> None:
    old = "hold" + "fast"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
    assert len(files) > 200
    told = [name for name in files if old in name.lower() or old.encode() in (REPOSITORY / name).read_bytes().lower()]
    assert told == ["CHANGELOG.md"]


# --- the page ---------------------------------------------------------------------------------------------------------

RETIRED = {"Settling", "Visit", "Stored", "Said", "Kept", "Told", "Anchor", "Doomed", "Spot", "Mortal", "Heir", "Place"}


def classes() -> list[str]:
    return [node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


# Words that were renamed, as parts of names: nobody searches for them.
RETIRED_PARTS = {
    "patiently",
    "mortal",
    "mortals",
    "heir",
    "heirs",
    "forsake",
    "forsaken",
    "worn",
    "bearers",
    "storable",
}


def names_in(tree: ast.Module) -> set[str]:
    """What is named or used in a module."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


def test_no_name_has_a_retired_word_in_it() -> None:
    found = {
        f"{file}: {name}"
        for file, tree in trees().items()
        for name in names_in(tree)
        if not RETIRED_PARTS.isdisjoint(name.lower().split("_"))
    }
    assert found == set()


def glossary() -> dict[str, list[str]]:
    """The words of the page, each with the classes that it names."""
    rows = drawing.PAGE.read_text("utf-8").partition("## Glossary")[2].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]
    return {word: re.findall(r"`(\w+)`", names) for word, _, names in cells if word != "word"}


def test_the_drawing_is_that_of_the_table() -> None:
    page = drawing.PAGE.read_text("utf-8")
    assert drawing.with_drawing(page, ROOMS) == page, "run: python -m tests.support.drawing"
    assert "flowchart" in page


def test_the_page_has_a_row_for_each_room() -> None:
    page = drawing.PAGE.read_text("utf-8").partition("## From")[0]
    rooms = [room for room in ROOMS if room != "doors"]
    assert [room for room in rooms if f"`{room}/`" not in page] == []


def test_the_page_names_each_folder() -> None:
    page = drawing.PAGE.read_text("utf-8").partition("## From")[0]
    folders = {parent.as_posix() for file in FILES for parent in Path(file).parents if parent.parts}
    assert sorted(folder for folder in folders if f"{folder.rpartition('/')[2]}/`" not in page) == []


def test_the_page_names_the_files_of_the_root() -> None:
    page = drawing.PAGE.read_text("utf-8").partition("## From")[0]
    files = {file.removesuffix(".py") for file in FILES if "/" not in file and not file.startswith("__")}
    assert sorted(file for file in files if f"`{file}`" not in page) == []


def test_the_glossary_is_short_and_names_classes_that_exist() -> None:
    words, defined = glossary(), set(classes())
    assert 15 <= len(words) <= 25
    assert [name for names in words.values() for name in names if name not in defined] == []
    assert all(words.values())


def test_no_class_has_a_retired_name_and_no_public_name_is_used_twice() -> None:
    names = classes()
    assert RETIRED.isdisjoint(names)
    twice = {name for name in names if names.count(name) > 1 and not name.startswith("_")}
    assert twice == {"PostgresMemory", "SQLiteMemory"}  # AgentScope's, and the ones that they stand on


def test_no_folder_holds_more_than_about_a_dozen_modules() -> None:
    folders = [file.rpartition("/")[0] for file in FILES if not file.endswith("__init__.py")]
    assert {folder: folders.count(folder) for folder in folders if folders.count(folder) > 13} == {}
