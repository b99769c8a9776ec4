"""How a database is named: what is meant is opened, and nothing that looks like a DSN gives its password away."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from byssus import UserMessage, cli
from byssus.checkpointer import PostgresCheckpointer, SQLiteCheckpointer, checkpointer_for
from byssus.errors import ByssusError, InputError
from byssus.maintenance.copy import copy
from byssus.memory import Msg, PostgresMemory, SQLiteMemory
from byssus.storage import AgentStorage
from byssus.store import opening
from tests.support.postgres import Schema

SECRET = "hunter2"
NOWHERE = "127.0.0.1:1"  # where nothing listens
SPELLINGS: list[Any] = [
    f"postgresql://u:{SECRET}@{NOWHERE}/db",
    f"postgresql+psycopg://u:{SECRET}@{NOWHERE}/db",
    f"POSTGRESQL://u:{SECRET}@{NOWHERE}/db",
    f"  postgres://u:{SECRET}@{NOWHERE}/db\n",
    f"postgresql://u:x#{SECRET}/?@{NOWHERE}/db",
    f"mysql://u:{SECRET}@{NOWHERE}/db",
    f"mysql://u:a {SECRET}@{NOWHERE}/db",
    f"redis://:{SECRET}@{NOWHERE}",
    f"sqlite:///{SECRET}:x@chat.db",
    f"jdbc:postgresql://{NOWHERE}/db?user=u&password={SECRET}",
    f"host=127.0.0.1 port=1 user=u password={SECRET} dbname=db",
    f"dbname=db host=127.0.0.1 port=1 user=u password='a {SECRET}'",
    f"host=127.0.0.1;port=1;user=u;password={SECRET}",
    f"Server=127.0.0.1;Uid=u;Pwd={SECRET}",
    f"u:{SECRET}@{NOWHERE}/db",
    f"//u:{SECRET}@{NOWHERE}/db",
    Path(f"postgresql://u:{SECRET}@{NOWHERE}/db"),
    Path(f"mysql://u:{SECRET}@{NOWHERE}/db"),
    f"mysql://u:{SECRET}@{NOWHERE}/db".encode(),
]
shown: list[str] = []  # what each surface says of itself


def of_coroutine(use: Callable[[Any], Any]) -> Callable[[Any], None]:
    """What makes an object, shows it, and opens it."""

    async def main(place: Any) -> None:
        made = use(place)
        shown.append(f"{made!r} {made.name}")
        async with made as opened:
            if isinstance(opened, SQLiteMemory | PostgresMemory):
                await opened.add(Msg("user", "hello", "user"))

    return lambda place: asyncio.run(main(place))


def with_storage(use: Callable[[AgentStorage, Any], Any]) -> Callable[[Any], None]:
    def main(place: Any) -> None:
        with AgentStorage("here.db") as storage:
            use(storage, place)

    return main


async def load_state(place: Any) -> None:
    async with SQLiteMemory("memory.db") as memory:
        state = {**memory.state_dict(), "db_path": place}
        memory.load_state_dict(state)
        shown.append(repr(memory))
        await memory.add(Msg("user", "hello", "user"))


SURFACES: dict[str, Callable[[Any], object]] = {
    "SQLiteCheckpointer": of_coroutine(SQLiteCheckpointer),
    "PostgresCheckpointer": of_coroutine(PostgresCheckpointer),
    "listen_dsn": of_coroutine(lambda place: PostgresCheckpointer(f"postgresql://{NOWHERE}/db", listen_dsn=place)),
    "checkpointer_for": of_coroutine(checkpointer_for),
    "AgentStorage": lambda place: shown.append(repr(AgentStorage(place))),
    "SQLiteMemory": of_coroutine(SQLiteMemory),
    "PostgresMemory": of_coroutine(PostgresMemory),
    "load_state_dict": lambda place: asyncio.run(load_state(place)),
    "copy from": lambda place: copy(place, "target.db"),
    "copy to": lambda place: copy("here.db", place),
    "backup": with_storage(lambda storage, place: storage.backup(place)),
    "incremental backup": with_storage(lambda storage, place: storage.backup(place, incremental=True)),
    "restore": with_storage(lambda storage, place: storage.restore(place)),
    "import": with_storage(lambda storage, place: storage.import_from(place)),
    "exists": opening.exists,
    "name": lambda place: shown.append(opening.name(place)),
}

COMMANDS: dict[str, list[str]] = {
    "--db": ["threads", "--db", "PLACE"],
    "--db of a command that makes one": ["import", "export.jsonl", "--db", "PLACE"],
    "BYSSUS_DB": ["threads"],
    "copy from": ["copy", "PLACE", "target.db"],
    "copy to": ["copy", "here.db", "PLACE"],
    "no --db": ["copy", "here.db", "there.db", "--db", "PLACE"],
    "backup": ["backup", "PLACE", "--db", "here.db"],
    "restore": ["restore", "PLACE", "--db", "new.db"],
    "export": ["export", "trip", "-o", "PLACE", "--db", "here.db"],
    "import": ["import", "PLACE", "--db", "here.db"],
    "no command": ["PLACE"],
    "too many": ["threads", "PLACE", "--db", "here.db"],
    "no number": ["threads", "--limit", "PLACE"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with AgentStorage("here.db") as storage:
        storage.append("trip", [UserMessage("hello")])
        Path("export.jsonl").write_text("\n".join(storage.export_thread("trip")), "utf-8")
    return tmp_path


def made_in(folder: Path) -> list[str]:
    return [os.path.join(where, name) for where, *names in os.walk(folder) for some in names for name in some]


@pytest.mark.parametrize("surface", SURFACES)
def test_no_surface_shows_a_password_or_makes_a_file_of_a_dsn(
    folder: Path, surface: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for place in SPELLINGS:
        told = ""
        try:
            SURFACES[surface](place)
        except (ByssusError, TypeError) as error:
            told = "".join(traceback.format_exception(error))
        assert told or surface in ("exists", "name"), f"{place!r} was opened"
        assert SECRET not in told
        assert SECRET not in "".join([*shown, *capfd.readouterr()])
        assert SECRET not in caplog.text
    assert [path for path in made_in(folder) if SECRET in path or "127.0.0.1" in path] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_a_password_or_makes_a_file_of_a_dsn(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (place for place in SPELLINGS if isinstance(place, str)):
        if name == "BYSSUS_DB":
            monkeypatch.setenv("BYSSUS_DB", place)
        try:
            code = cli.main([place if word == "PLACE" else word for word in COMMANDS[name]])
        except SystemExit as end:
            assert end.code == 2
            code = 2
        assert code != 0, f"{place!r} was taken"
        out, err = capfd.readouterr()
        assert (out, err != "") == ("", True)
        assert SECRET not in err
    assert [path for path in made_in(folder) if SECRET in path or "127.0.0.1" in path] == []


@pytest.mark.parametrize(
    "spelled",
    [
        lambda dsn: f" {dsn}\n",
        lambda dsn: dsn.replace("postgresql://", "POSTGRES://"),
        lambda dsn: dsn.replace("postgresql://", "postgresql+asyncpg://"),
        lambda dsn: dsn.replace("postgresql://", "postgresql+psycopg://"),
    ],
    ids=["white space", "upper case", "asyncpg", "psycopg"],
)
def test_postgres_is_opened_however_it_is_written(where: Schema, spelled: Callable[[str], str]) -> None:
    place = spelled(f"{where.dsn}&schema={where.name}")
    with AgentStorage(place) as storage:
        storage.append("trip", [UserMessage("hello")])

    async def main() -> None:
        async with checkpointer_for(place) as cp, PostgresCheckpointer(place) as other:
            assert [info.id for info in await cp.threads()] == ["trip"]
            assert await other.info("trip")

    asyncio.run(main())


def test_the_settings_of_libpq_are_a_dsn(where: Schema) -> None:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: PLC0415

    settings = make_conninfo(**{name: str(value) for name, value in conninfo_to_dict(where.dsn).items()})
    assert "://" not in settings
    with AgentStorage(settings, schema=where.name) as storage:
        storage.append("trip", [UserMessage("hello")])
        assert "password" not in repr(storage)


def test_a_file_may_be_called_like_a_dsn_with_its_folder_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./u:p@h", "./host=h password=p", "run=7.db", "user=ann/chat.db", str(tmp_path / "host=h user=u")):
        with AgentStorage(name) as storage:
            storage.append("trip", [UserMessage("hello")])
        assert Path(name).is_file()
        assert opening.exists(name)


def test_another_database_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'mysql://\*\*\*@h/db' is no path; a database is a file, or Postgres"):
        SQLiteCheckpointer("mysql://u:p@h/db")
