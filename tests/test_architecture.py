"""The shape of the code: who may import whom, what is public, and how long things may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import byssus

ROOT = Path(byssus.__file__).parent
REPOSITORY = Path(__file__).parents[1]
FILES = {file.relative_to(ROOT).as_posix(): file for file in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(file.read_text("utf-8"), name) for name, file in FILES.items()}

# Each room, from the top: what lies in it (a folder, or files of the root), and the rooms that it may use besides
# itself. It says less than "everything below": a provider knows no store.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "cli": ({"cli", "__main__"}, {"doors", "memory", "maintenance", "threads", "providers", "values"}),
    "adapters": ({"adapters"}, {"memory", "values"}),
    "doors": (
        {"__init__", "agent", "checkpointer", "storage"},
        {"run", "maintenance", "search", "accounts", "threads", "queries", "store", "middleware", "tools", "providers"}
        | {"values"},
    ),
    "memory": ({"memory"}, {"search", "threads", "queries", "store", "middleware", "providers", "values"}),
    "maintenance": ({"maintenance"}, {"search", "accounts", "threads", "queries", "store", "values"}),
    "run": ({"run"}, {"threads", "queries", "store", "middleware", "tools", "providers", "values"}),
    "search": ({"search"}, {"accounts", "threads", "queries", "store", "values"}),
    "accounts": ({"accounts"}, {"threads", "queries", "store", "values"}),
    "threads": ({"threads"}, {"queries", "store", "values"}),
    "queries": ({"queries"}, {"store", "values"}),
    "store": ({"store"}, {"values"}),
    "middleware": ({"middleware"}, {"tools", "providers", "values"}),
    "tools": ({"tools"}, {"providers", "values"}),
    "providers": ({"providers"}, {"values"}),
    "values": ({"values", "errors", "events", "messages", "signals", "stream", "telemetry"}, set()),
}
# What runs SQL knows no message: of the values it may use these alone.
SQL_MAY_USE = {"errors.py", "signals.py", "telemetry.py", "values/clock.py"}

# Arrows that have to turn round.
TO_TURN = {
    ("middleware/windows.py", "threads/encoding.py"),
    ("run/thread_journal.py", "checkpointer.py"),
}

# Packages that only these files may import, so that everything else works without them.
ONLY_IN = {
    "agentscope": ["adapters/agentscope.py"],
    "apsw": ["store/sqlite/file.py", "store/sqlite/store.py"],
    "anthropic": ["providers/anthropic.py"],
    "mcp": ["tools/mcp.py"],
    "openai": ["providers/openai.py"],
    "psycopg": [f"store/postgres/{part}.py" for part in ("notifications", "server", "store", "tx")],
    "opentelemetry": ["telemetry.py"],
    "Stemmer": ["search/tokens.py"],
    "xllamacpp": ["providers/local.py"],
}

# What is imported when it is first used: together they would make a start take twice as long.
LATE = {
    *("pathlib", "tempfile"),
    *("byssus.maintenance.backup", "byssus.maintenance.check", "byssus.maintenance.export"),
    *(
        "byssus.search.search",
        "byssus.search.tokens",
        "byssus.queries.search.candidates",
        "byssus.queries.moving.copying",
    ),
}
PUBLIC = [
    "Agent",
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


def room_of(file: str) -> str:
    top = file.split("/", maxsplit=1)[0].removesuffix(".py")
    (found,) = [name for name, (lies_in_it, _) in ROOMS.items() if top in lies_in_it]
    return found


def imported_names(file: str) -> Iterator[str]:
    """All that a file imports, anywhere in it, as full names; of `from x import y` that is x.y."""
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
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
    assert {arrow for file in FILES for arrow in wrong_arrows(file)} == TO_TURN


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


def test_importing_byssus_imports_no_heavy_package() -> None:
    script = (
        "import sys, byssus, byssus.checkpointer, byssus.providers.scripted, byssus.providers.anthropic,"
        " byssus.providers.local\n"
        "heavy = {'anthropic', 'httpx', 'httpx2', 'openai', 'psycopg', 'pydantic', 'xllamacpp', 'numpy'}\n"
        "print(*heavy & sys.modules.keys())"
    )
    assert printed_by(script) == []


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


@pytest.mark.parametrize("file", FILES)
def test_a_module_ends_after_600_lines_at_most(file: str) -> None:
    assert len(FILES[file].read_text("utf-8").splitlines()) <= 600


@pytest.mark.parametrize("file", FILES)
def test_a_function_ends_after_50_lines_at_most(file: str) -> None:
    too_long = [
        f"{file}:{node.lineno} {node.name}: {length} lines"
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.lineno + 1) > 50
    ]
    assert too_long == []


# --- databases --------------------------------------------------------------------------------------------------------

KNOW_DATABASES = {
    *(file for file in FILES if file.startswith(("store/sqlite/", "store/postgres/"))),
    *("store/opening.py", "checkpointer.py"),
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


@pytest.mark.parametrize("file", sorted(FILES.keys() - KNOW_DATABASES))
def test_nothing_asks_which_database_it_is_on(file: str) -> None:
    asked = [
        f"{file}:{condition.lineno} {word}"
        for condition in conditions(TREES[file])
        for word in words(condition)
        if isinstance(condition, ast.expr | ast.pattern) and any(name in word.lower() for name in DATABASE_WORDS)
    ]
    assert asked == []


@pytest.mark.parametrize("file", sorted(file for file in FILES if not file.startswith(("queries/", "store/"))))
def test_sql_stands_in_the_queries_and_the_store_alone(file: str) -> None:
    verbs = ("SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM ", "CREATE ", "PRAGMA ", "BEGIN", "COMMIT", "ROLLBACK")
    statements = [
        f"{file}:{node.lineno} {node.value[:40]!r}"
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lstrip().startswith(verbs)
    ]
    assert statements == []


# --- the name ---------------------------------------------------------------------------------------------------------


def test_the_old_name_of_the_project_is_in_the_changelog_alone() -> None:
    old = "hold" + "fast"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
    assert len(files) > 200
    told = [name for name in files if old in name.lower() or old.encode() in (REPOSITORY / name).read_bytes().lower()]
    assert told == ["CHANGELOG.md"]
