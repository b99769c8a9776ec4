"""Opening a file: what is shared, what is made, and what is refused with a reason."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from byssus.errors import InputError, StoreCorrupt, StoreError, StoreUnusable
from byssus.queries.log import listing, threads
from byssus.queries.log.threads import MessageRow
from byssus.store import sharing
from byssus.store.sqlite import file as sqlite_file
from byssus.store.sqlite import store as sqlite
from byssus.store.sqlite.store import SQLiteStore
from byssus.values.thread_key import ThreadKey
from tests.support import processes

ROW = [MessageRow("id", "user", "{}")]


@contextmanager
def opened(path: str | os.PathLike[str], **options: Any) -> Iterator[SQLiteStore]:
    store = sqlite.open_store(path, **options)
    try:
        yield store
    finally:
        sharing.release(store)


def count(store: SQLiteStore) -> int:
    info = store.read_now(listing.one, ThreadKey("", "t"))
    return info.message_count if info else 0


def digest(path: Path) -> dict[str, str]:
    """All files beside the path, with what is in them."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.parent.iterdir()}


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_one_file_is_one_store_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "real.db"
    (tmp_path / "directory").symlink_to(tmp_path)
    (tmp_path / "symbolic.db").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with opened(file) as store:
        names = [
            "real.db",
            "./real.db",
            "directory/real.db",
            f"../{tmp_path.name}/real.db",
            "symbolic.db",
            "~/real.db",
        ]
        for name in names:
            with opened(name) as same:
                assert same is store
                same.write_now(threads.append, ThreadKey("", "t"), ROW)
        assert store.users == 1
        assert count(store) == len(names)


def test_a_symbolic_link_to_a_file_that_is_not_there_yet_makes_that_file(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    with opened(tmp_path / "link.db") as store, opened(tmp_path / "real.db") as same:
        assert same is store
    assert (tmp_path / "link.db").is_symlink()
    assert (tmp_path / "real.db").is_file()


def test_the_store_is_open_until_the_last_of_its_users_has_gone(tmp_path: Path) -> None:
    stores = [sqlite.open_store(tmp_path / "a.db") for _ in range(3)]
    for store in stores:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
        sharing.release(store)
    assert not Path(f"{tmp_path / 'a.db'}-wal").exists()
    with opened(tmp_path / "a.db") as again:
        assert again is not stores[0]
        assert count(again) == 3


def test_threads_that_open_and_release_one_file_all_the_time_lose_nothing(tmp_path: Path) -> None:
    def churn() -> None:
        for _ in range(15):
            with opened(tmp_path / "a.db") as store:
                store.write_now(threads.append, ThreadKey("", "t"), ROW)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(churn) for _ in range(6)]:
            done.result()
    with opened(tmp_path / "a.db") as store:
        assert count(store) == 90
        assert store.users == 1


def test_another_durability_on_the_same_file_is_an_input_error_that_names_both(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db", durability="normal") as store:
        with pytest.raises(InputError, match=r"a\.db.*'normal'.*'full'"):
            sqlite.open_store(tmp_path / "a.db")
        assert store.users == 1
        with opened(tmp_path / "b.db") as other:
            assert other is not store
    with opened(tmp_path / "a.db") as store:
        assert store.durability == "full"


def test_every_memory_database_is_one_of_its_own() -> None:
    with opened(":memory:") as one, opened(":memory:") as two:
        assert one is not two
        one.write_now(threads.append, ThreadKey("", "t"), ROW)
        assert (count(one), count(two)) == (1, 0)


def test_a_store_that_could_not_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    file.write_bytes(b"no database" * 1000)
    for _ in range(3):
        with pytest.raises(StoreUnusable):
            sqlite.open_store(file)
    file.unlink()
    with opened(file) as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
        assert store.users == 1


# --- paths ------------------------------------------------------------------------------------------------------------


def test_directories_that_are_missing_are_made(tmp_path: Path) -> None:
    file = tmp_path / "not" / "there" / "yet" / "a.db"
    with opened(file) as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
    assert file.is_file()


@pytest.mark.parametrize(
    "name", ["線程 🪸.db", "a b.db", "a'b.db", "a%20b?mode=ro#x.db", "file:a.db", "-a.db", "a.db;x"]
)
def test_any_file_name_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(name) as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    with opened(tmp_path / "a.db") as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
        assert count(store) == 1


@pytest.mark.parametrize("path", ["", "\0", "a\0b.db", b"bytes.db"], ids=ascii)
def test_what_is_no_file_name_is_an_input_error_that_shows_it(path: Any) -> None:
    with pytest.raises(InputError, match="path") as caught:
        sqlite.open_store(path)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize("name", ["\ud800.db", "\udcff.db"], ids=ascii)
def test_a_path_that_is_no_unicode_works_or_is_refused_by_name(tmp_path: Path, name: str) -> None:
    try:
        with opened(tmp_path / name) as store:
            store.write_now(threads.append, ThreadKey("", "t"), ROW)
    except (InputError, StoreUnusable) as error:
        assert ascii(name)[1:-1] in str(error)


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/a.db", "x" * 5000 + ".db", "x" * 300 + "/a.db"], ids=lambda n: n[:9]
)
def test_a_path_that_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InputError, StoreUnusable), match=re.escape(name[:9])):
        sqlite.open_store(name)


def test_a_directory_is_refused_and_a_file_in_it_proposed(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match=rf"{re.escape(str(tmp_path))}.* is a directory.*chat\.db"):
        sqlite.open_store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am no directory")
    with pytest.raises(StoreUnusable, match="cannot be made"):
        sqlite.open_store(tmp_path / "file" / "a.db")
    with pytest.raises(StoreUnusable, match="cannot be made"):
        sqlite.open_store(tmp_path / "file" / "deeper" / "a.db")


# --- files that are not ours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"Dear diary, \n" * 1000,
        b"SQLite format 3\0",
        b"SQLite format 3\0" + b"rubbish" * 1000,
        os.urandom(9000),
    ],
    ids=["short", "text", "header only", "header and rubbish", "random"],
)
def test_a_file_that_is_no_database_is_refused_by_name_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "diary.txt"
    file.write_bytes(content)
    before = digest(file)
    with pytest.raises(StoreError, match=r"diary\.txt"):
        sqlite.open_store(file)
    assert digest(file) == before


def foreign(path: Path, *statements: str) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        for statement in statements:
            connection.execute(statement)


TABLE = "CREATE TABLE places (url TEXT)"


@pytest.mark.parametrize(
    "statements",
    [
        [TABLE],
        ["PRAGMA journal_mode = wal", TABLE],
        ["PRAGMA application_id = 42"],
        ["PRAGMA application_id = 42", TABLE, "PRAGMA user_version = 1"],
        ["CREATE TABLE threads (key INTEGER)", "PRAGMA user_version = 1"],
        ["PRAGMA user_version = 1"],
        ["PRAGMA user_version = 7"],
    ],
    ids="; ".join,
)
def test_another_programs_database_is_refused_by_name_and_left_as_it_is(tmp_path: Path, statements: list[str]) -> None:
    file = tmp_path / "browser.db"
    foreign(file, *statements)
    before = digest(file)
    with pytest.raises(StoreUnusable, match=r"browser\.db.*(another program|application id)"):
        sqlite.open_store(file)
    after = digest(file)  # an empty log beside a database that keeps one does no harm
    assert {name: after[name] for name in before} == before


def test_another_programs_wal_is_left_to_that_program(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "left").mkdir()
    with closing(apsw.Connection(str(tmp_path / "live" / "browser.db"))) as connection:
        connection.execute(f"PRAGMA journal_mode = wal; {TABLE}; INSERT INTO places VALUES ('x')").fetchall()
        for file in (tmp_path / "live").iterdir():  # as after a crash: part of the data is in the WAL only
            if not file.name.endswith("-shm"):
                shutil.copy(file, tmp_path / "left" / file.name)
    before = digest(tmp_path / "left" / "browser.db")
    assert len(before) == 2
    with pytest.raises(StoreUnusable, match=r"another program"):
        sqlite.open_store(tmp_path / "left" / "browser.db")
    after = digest(tmp_path / "left" / "browser.db")
    assert {name: after.get(name) for name in before} == before


def test_a_database_of_a_newer_byssus_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    with opened(file) as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
    foreign(file, "PRAGMA user_version = 9999", "CREATE TABLE of_the_future (x)")
    before = digest(file)
    with pytest.raises(StoreUnusable, match=r"a\.db.*newer byssus.*9999.*upgrade"):
        sqlite.open_store(file)
    assert digest(file) == before


def test_a_damaged_database_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    with opened(file) as store:
        store.write_now(threads.append, ThreadKey("", "t"), [MessageRow("id", "user", "x" * 200_000)])
    content = bytearray(file.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"a\.db"), opened(file) as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)


def test_what_is_too_long_to_be_read_is_damage_and_no_mistake_of_the_reader(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store, pytest.raises(StoreCorrupt, match=r"a\.db.*restore a backup"):
        store.read_now(lambda tx: tx.one("SELECT zeroblob(2000000000)"))


@pytest.mark.parametrize("version", ["3.51.2", "3.50.7", "3.44.6", "3.9.0", "3.7", "2.99.99"])
def test_a_sqlite_that_can_corrupt_a_database_is_refused_by_name(version: str) -> None:
    with pytest.raises(StoreUnusable, match=rf"SQLite {re.escape(version)} .*3\.51\.3.*pip install"):
        sqlite_file.check_library(version)


@pytest.mark.parametrize("version", ["3.51.3", "3.51.10", "3.52.0", "3.100.0", "4.0.0", apsw.sqlite_lib_version()])
def test_a_newer_sqlite_is_fine(version: str) -> None:
    sqlite_file.check_library(version)


# --- permissions ------------------------------------------------------------------------------------------------------

# Permissions count for root too, once it has laid down its capabilities.
UNPRIVILEGED = """
    import ctypes
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0:
        assert ctypes.CDLL(None).capset(header, nothing) == 0

    def attempt(path):
        try:
            store = sqlite.open_store(path)
            try:
                store.write_now(threads.append, ThreadKey("", "t"), rows("x"))
            finally:
                sharing.release(store)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "written"

    print(attempt(sys.argv[1]))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file_mode", "directory_mode", "error"),
    [
        (0o444, 0o755, "StoreReadOnly"),
        (0o444, 0o555, "StoreReadOnly"),
        (0o644, 0o555, "Store(ReadOnly|Unusable)"),
        (0o000, 0o755, "StoreUnusable"),
        (0o644, 0o000, "StoreUnusable"),
    ],
    ids=["file", "file and directory", "directory", "no access to the file", "no access to the directory"],
)
def test_a_database_that_may_not_be_written_is_refused_by_name_and_left_as_it_is(
    tmp_path: Path, file_mode: int, directory_mode: int, error: str
) -> None:
    file = tmp_path / "locked" / "a.db"
    with opened(file) as store:
        store.write_now(threads.append, ThreadKey("", "t"), ROW)
    before = file.read_bytes()
    file.chmod(file_mode)
    file.parent.chmod(directory_mode)
    try:
        assert re.match(rf"{error}: .*a\.db.*writ", processes.run(UNPRIVILEGED, file))
    finally:
        file.parent.chmod(0o755)
        file.chmod(0o644)
    assert file.read_bytes() == before


@pytest.mark.processes
@pytest.mark.parametrize("path", ["new.db", "deeper/new.db"])
def test_a_directory_that_may_not_be_written_gets_no_new_database(tmp_path: Path, path: str) -> None:
    directory = tmp_path / "locked"
    directory.mkdir()
    directory.chmod(0o555)
    try:
        assert re.match(r"Store(Unusable|ReadOnly): .*new\.db", processes.run(UNPRIVILEGED, directory / path))
    finally:
        directory.chmod(0o755)
    assert list(directory.iterdir()) == []
