"""Apps: `module:factory`, from the name to an agent on the right database."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from byssus import apps, config
from byssus.errors import AppFailed
from tests.support.agents import within
from tests.support.databases import Database

HEADER = """\
import os
from byssus import Agent, Model
from byssus.checkpointer import checkpointer_for
from byssus.providers.scripted import ScriptedProvider

def made(**options):
    return Agent(provider=ScriptedProvider(["hello"] * 5), model=Model("m"), **options)
"""

Write = Callable[[str], Path]
P = ParamSpec("P")


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        within(test(*args, **kwargs))

    return run


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the module `shop` into the current directory, which is new."""
    before, folder = set(sys.modules), tmp_path / "program"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def module(text: str) -> Path:
        (folder / "shop.py").write_text(HEADER + text, "utf-8")
        return folder / "shop.py"

    yield module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("shop", "stores"):
            del sys.modules[name]


FACTORY = "def support(thread_id, user_id):\n    return made()\n"
ASYNC = "async def support(thread_id, user_id):\n    return made()\n"
OWN = (
    "def support(thread_id, user_id):\n"
    "    return made(checkpointer=checkpointer_for(os.environ['PLACE']), thread_id=thread_id)\n"
)
PARTIAL = "import functools\nsupport = functools.partial(lambda thread_id, user_id, x: made(), x=1)\n"


@pytest.mark.parametrize("text", [FACTORY, ASYNC, OWN, PARTIAL], ids=["plain", "async", "own", "partial"])
@in_a_loop
async def test_the_agent_works_on_the_database_of_the_command(
    write: Write, database: Database, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write(text)
    monkeypatch.setenv("PLACE", database.place)
    async with database.checkpointer() as cp:
        agent = await apps.load_app("shop:support").agent(cp, "trip")
        assert agent.thread_id == "trip"
        await agent.prompt("hi")
        info = await cp.info("trip")
        assert info is not None
        assert info.message_count == 2


@in_a_loop
async def test_a_second_agent_of_the_app_goes_on_where_the_first_stopped(write: Write, database: Database) -> None:
    write(FACTORY)
    app = apps.load_app("shop:support")
    async with database.checkpointer() as cp:
        await (await app.agent(cp, "trip")).prompt("hi")
        second = await app.agent(cp, "trip")
        await second.load()
        assert len(second.state.messages) == 2


@in_a_loop
async def test_the_user_of_the_command_owns_the_thread(write: Write, database: Database) -> None:
    write(FACTORY)
    async with database.checkpointer() as cp:
        user = await cp.create_user("ann")
        agent = await apps.load_app("shop:support").agent(cp, "trip", user["id"])
        await agent.prompt("hi")
        session = await cp.get_session("trip")
        assert session is not None
        assert session["user_id"] == user["id"] == agent.user_id


@in_a_loop
async def test_a_checkpointer_on_another_database_is_refused(
    write: Write, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(OWN)
    monkeypatch.setenv("PLACE", str(tmp_path / "other.db"))
    async with database.checkpointer() as cp:
        with pytest.raises(AppFailed, match=r"keeps its threads in \S+other\.db, and .* pass --db \S+other\.db"):
            await apps.load_app("shop:support").agent(cp, "trip")


@in_a_loop
async def test_an_agent_for_another_thread_is_refused(
    write: Write, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(OWN.replace("thread_id=thread_id", "thread_id='main'"))
    monkeypatch.setenv("PLACE", database.place)
    async with database.checkpointer() as cp:
        with pytest.raises(AppFailed, match=r"drives thread 'main', and not 'trip'.*thread_id=thread_id"):
            await apps.load_app("shop:support").agent(cp, "trip")


@in_a_loop
async def test_one_of_several_agents_is_chosen_by_name(write: Write, database: Database) -> None:
    write(FACTORY + "async def sales(thread_id, user_id):\n    return made(system_prompt='Sell.')\n")
    with (Path("shop.py")).open("a") as file:
        file.write("factories = {'support': support, 'sales': sales}\none = {'support': support}\n")
    assert apps.load_app("shop:factories", agent="sales").name == "'shop:factories' (agent 'sales')"
    assert apps.load_app("shop:one").factory is sys.modules["shop"].support
    for agent, words in ((None, "--agent NAME: support, sales"), ("sale", "did you mean --agent sales?")):
        with pytest.raises(AppFailed) as caught:
            apps.load_app("shop:factories", agent=agent)
        assert words in str(caught.value)
    sys.modules["shop"].factories.clear()
    with pytest.raises(AppFailed, match=r"'shop:factories' is an empty dict; write \{'NAME'"):
        apps.load_app("shop:factories")
    with pytest.raises(AppFailed, match="one factory, not a dict of them; leave out --agent sales"):
        apps.load_app("shop:support", agent="sales")


def test_a_program_may_pass_what_it_has_instead_of_a_name(write: Write) -> None:
    write(FACTORY)
    named = apps.app_of("shop:support")
    support = named.factory
    assert apps.app_of(named) is named
    assert apps.app_of(support) == apps.App("support", support)
    assert apps.app_of({"support": support, "sales": support}, "sales").factory is support
    for given, words in ((7, "must be a function or a dict"), ({}, "is an empty dict"), ({"a": 1, "b": 2}, "several")):
        with pytest.raises(AppFailed, match=words):
            apps.app_of(given)  # type: ignore[arg-type]


def test_a_module_below_another_and_a_name_below_another_are_found(write: Write) -> None:
    file = write(FACTORY + "class agents:\n    support = staticmethod(support)\n")
    package = file.parent / "stores"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "berlin.py").write_text("from shop import agents\n")
    assert apps.load_app("stores.berlin:agents.support").factory is sys.modules["shop"].support


def test_the_app_of_the_configuration_is_imported_from_its_directory(write: Write, tmp_path: Path) -> None:
    file = write(FACTORY)
    (file.parent / "byssus.toml").write_text('app = "shop:support"\n')
    (file.parent / "below").mkdir()
    found = config.load(environ={}, directory=str(file.parent / "below"))
    app = apps.load(found)
    assert app is not None
    assert app.name == f"'shop:support' (app in {file.parent / 'byssus.toml'})"  # for errors: the file and the key
    assert apps.load(config.load({"app": ""}, environ={}, directory=str(file.parent))) is None


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        (FACTORY, "shop", ["'shop' (--app) does not name an app", "MODULE:FACTORY"]),
        (FACTORY, ":support", ["does not name an app"]),
        (FACTORY, "shop:", ["does not name an app"]),
        (FACTORY, "../shop:support", ["does not name an app"]),
        (FACTORY, "\0:x", ["does not name an app"]),
        (FACTORY, "shp:support", ["module 'shp' (--app) was not found", "program"]),
        (FACTORY, "shop.agents:support", ["module 'shop.agents' (--app) was not found"]),
        (FACTORY, "shop:suport", ["there is no 'suport' in", "shop.py", "did you mean 'support'?"]),
        ("import nowhere_at_all\n", "shop:x", ["cannot be imported", "nowhere_at_all", "shop.py, line 8"]),
        ("1 / 0\n", "shop:x", ["ZeroDivisionError: division by zero", "shop.py, line 8", "--debug"]),
        ("def x(:\n", "shop:x", ["SyntaxError", "shop.py, line 8", "correct it there"]),
        ("import sys\nsys.exit(3)\n", "shop:x", ["cannot be imported: SystemExit: 3"]),
        ("support = 3\n", "shop:support", ["must be a function or a dict of functions, got 3"]),
        ("support = made()\n", "shop:support", ["is an agent, which drives one thread"]),
        ("def support():\n    pass\n", "shop:support", ["must take a thread id and a user id"]),
        ("support = {}\n", "shop:support", ["is an empty dict; write {'NAME': factory}"]),
    ],
)
def test_an_app_that_cannot_be_loaded_is_one_line(write: Write, text: str, target: str, words: list[str]) -> None:
    write(text)
    with pytest.raises(AppFailed) as caught:
        apps.load_app(target, origin="--app")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "def support(thread_id, user_id):\n    return 'hello'\n",
            ["must return an Agent, and returned 'hello'", "shop.py, line 8"],
        ),
        ("def support(thread_id, user_id):\n    pass\n", ["must return an Agent, and returned None"]),
        ("def support(thread_id, user_id):\n    return {}['x']\n", ["KeyError: 'x'", "shop.py, line 9"]),
        ("async def support(thread_id, user_id):\n    raise OSError('no')\n", ["OSError: no", "shop.py, line 9"]),
        ("def support(thread_id, user_id):\n    return Agent(model=3)\n", ["shop.py, line 9"]),
    ],
)
@in_a_loop
async def test_a_factory_that_fails_is_named(write: Write, database: Database, text: str, words: list[str]) -> None:
    write(text)
    async with database.checkpointer() as cp:
        with pytest.raises(AppFailed) as caught:
            await apps.load_app("shop:support").agent(cp, "trip")
    assert all(word in str(caught.value) for word in ["app 'shop:support'", *words]), str(caught.value)
    assert caught.value.__cause__ is not None or "return" in str(caught.value)
