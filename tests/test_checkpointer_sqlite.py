"""SQLiteCheckpointer: what belongs to files and memory, and to the opening of them."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from byssus import UserMessage
from byssus.checkpointer import SQLiteCheckpointer, exists
from byssus.errors import InputError, StoreNotOpen, StoreUnusable
from byssus.messages import Note
from byssus.store import sharing
from byssus.store.sqlite import store as sqlite


async def texts(cp: SQLiteCheckpointer, thread_id: str = "t") -> list[str]:
    thread = await cp.load(thread_id)
    return [message.text for message in thread.messages] if thread else []


def write(path: str | Path, text: str, **options: Any) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(path, **options) as cp:
            await cp.append("t", UserMessage(text))

    asyncio.run(main())


def read(path: str | Path) -> list[str]:
    async def main() -> list[str]:
        async with SQLiteCheckpointer(path) as cp:
            return await texts(cp)

    return asyncio.run(main())


def assert_nobody_has_it_open(path: Path) -> None:
    """Another durability is refused as long as anybody in this process holds the file."""
    sharing.release(sqlite.open_store(path, durability="normal"))


def test_the_default_is_checkpoints_db_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with SQLiteCheckpointer() as cp:
            await cp.append("t", UserMessage("hi"))

    asyncio.run(main())
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoints.db"]
    assert read("checkpoints.db") == ["hi"]


@pytest.mark.parametrize("path", [None, 5, b"a.db", "", "a\0.db"])
@pytest.mark.parametrize("make", [SQLiteCheckpointer, sqlite.open_store])
def test_what_is_no_path_is_refused_by_name(make: Any, path: Any) -> None:
    with pytest.raises(InputError, match=rf"must be a file name or ':memory:', got {re.escape(repr(path))}"):
        make(path)


@pytest.mark.parametrize("path", ["a.db/", "./a.db", "a.db/.", ".//./a.db"])
def test_a_path_has_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(path, "one")
    assert exists(path)
    assert read("a.db") == read(path) == ["one"]
    assert [file.name for file in tmp_path.iterdir()] == ["a.db"]


def test_an_absolute_path_needs_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    write(tmp_path / "a.db", "one")
    assert read(tmp_path / "a.db") == ["one"]


def test_whether_there_is_a_database_is_not_guessed(tmp_path: Path) -> None:
    assert not exists(str(tmp_path / "a.db"))
    assert not exists("~nobody-of-that-name/a.db")
    assert not exists("a\0.db")
    with pytest.raises(OSError, match="too long"):
        exists("x" * 300)


def test_a_kind_of_message_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    class Memo(Note, frozen=True):
        pass

    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            with pytest.raises(InputError, match="a thread holds messages, got Memo"):
                await cp.append("t", Memo({"role": "user"}))
            assert await cp.load("t") is None

    asyncio.run(main())


def test_making_a_checkpointer_touches_nothing(tmp_path: Path) -> None:
    SQLiteCheckpointer(tmp_path / "a" / "b.db")
    assert list(tmp_path.iterdir()) == []


def test_a_path_may_be_text_or_a_path_and_its_directory_is_made(tmp_path: Path) -> None:
    write(str(tmp_path / "new" / "a.db"), "text")
    write(tmp_path / "new" / "a.db", "path")
    assert read(tmp_path / "new" / "a.db") == ["text", "path"]


def test_memory_works_and_belongs_to_one_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with SQLiteCheckpointer(":memory:") as one, SQLiteCheckpointer(":memory:", durability="normal") as two:
            await one.append("t", [UserMessage(str(i)) for i in range(1200)])
            await one.save_extra("t", {"a": 1})
            assert await texts(one) == [str(i) for i in range(1200)]
            assert await two.load("t") is None
            assert await two.threads() == []
            await asyncio.gather(*(two.append("t", UserMessage("x")) for _ in range(50)))
            assert len(await texts(two)) == 50
            await one.open()
            assert len(await texts(one)) == 1200
        async with SQLiteCheckpointer(":memory:") as three:
            assert await three.threads() == []

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_an_error_before_opening_names_the_class_and_the_file(tmp_path: Path) -> None:
    cp = SQLiteCheckpointer(tmp_path / "chat.db")
    with pytest.raises(
        StoreNotOpen, match=r"SQLiteCheckpointer.*chat\.db.*not open yet.*async with SQLiteCheckpointer"
    ):
        asyncio.run(cp.load("t"))
    asyncio.run(open_and_close(cp))
    with pytest.raises(StoreNotOpen, match=r"SQLiteCheckpointer.*chat\.db.*was closed.*async with SQLiteCheckpointer"):
        asyncio.run(cp.load("t"))


async def open_and_close(cp: SQLiteCheckpointer) -> None:
    async with cp:
        pass


def test_a_checkpointer_that_could_not_be_opened_can_be_when_the_cause_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "chat.db"
    file.write_text("Dear diary, " * 100)
    cp = SQLiteCheckpointer(file)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(StoreUnusable, match=re.escape(str(file))):
                await cp.open()
        with pytest.raises(StoreNotOpen, match="not open yet"):
            await cp.load("t")
        await cp.close()
        file.unlink()
        async with cp:
            await cp.append("t", UserMessage("now"))
            assert await texts(cp) == ["now"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"db_path": ""},
        {"db_path": "a\0b"},
        {"db_path": "a.db", "durability": "maybe"},
        {"db_path": "a.db", "lease_seconds": 0},
        {"db_path": "a.db", "lease_seconds": "30"},
        {"db_path": "a.db", "lease_seconds": float("nan")},
    ],
)
def test_unusable_arguments_are_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        asyncio.run(open_and_close(SQLiteCheckpointer(**options)))
    assert list(tmp_path.iterdir()) == []


def test_two_checkpointers_on_one_file_need_one_durability(tmp_path: Path) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db", durability="normal") as cp:
            with pytest.raises(InputError, match="durability"):
                await SQLiteCheckpointer(tmp_path / "a.db").open()
            await cp.append("t", UserMessage("still open"))
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            assert await texts(cp) == ["still open"]

    asyncio.run(main())


def test_a_checkpointer_that_is_opened_twice_at_once_is_closed_by_one_close(tmp_path: Path) -> None:
    async def main() -> None:
        cp = SQLiteCheckpointer(tmp_path / "a.db")
        await asyncio.gather(cp.open(), cp.open(), cp.open())
        await cp.append("t", UserMessage("x"))
        await cp.close()

    asyncio.run(main())
    assert_nobody_has_it_open(tmp_path / "a.db")


class SlowPath:
    """A path that takes its time, so that a test can act while it is being opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def __fspath__(self) -> str:
        self.entered.set()
        assert self.go_on.wait(60)
        return str(self._path)


def test_a_cancelled_open_leaves_nothing_open(tmp_path: Path) -> None:
    path = SlowPath(tmp_path / "a.db")

    async def main() -> None:
        opening = asyncio.ensure_future(SQLiteCheckpointer(path).open())
        await asyncio.to_thread(path.entered.wait, 60)
        opening.cancel()
        await asyncio.sleep(0)
        path.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(main())  # it waits for the thread that opens
    assert_nobody_has_it_open(tmp_path / "a.db")


def test_a_cancelled_close_closes(tmp_path: Path) -> None:
    async def main() -> None:
        cp = await SQLiteCheckpointer(tmp_path / "a.db").open()
        await cp.append("t", UserMessage("x"))
        closing = asyncio.ensure_future(cp.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        with pytest.raises(StoreNotOpen):
            await cp.load("t")

    asyncio.run(main())
    assert_nobody_has_it_open(tmp_path / "a.db")
    assert read(tmp_path / "a.db") == ["x"]


def test_an_exception_inside_async_with_closes_and_is_not_swallowed(tmp_path: Path) -> None:
    async def main() -> None:
        async with SQLiteCheckpointer(tmp_path / "a.db") as cp:
            await cp.append("t", UserMessage("kept"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert_nobody_has_it_open(tmp_path / "a.db")
    assert read(tmp_path / "a.db") == ["kept"]


def test_the_body_of_a_message_is_plain_json_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.db", "汉字")
    store = sqlite.open_store(tmp_path / "a.db")
    rows = store.read_now(lambda tx: tx.all("SELECT role, body FROM messages"))
    sharing.release(store)
    assert rows == [("user", '{"role":"user","content":[{"type":"text","text":"汉字"}]}')]
