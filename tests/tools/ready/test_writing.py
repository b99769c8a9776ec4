"""Files are changed after a person has seen the difference, once, and never over another change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from byssus import Agent, Done, Model, NotDone, ToolCall, Unknown
from byssus.checkpointer import Checkpointer
from byssus.messages import ToolResultMessage
from byssus.providers.scripted import ScriptedProvider
from byssus.tools.ready import files
from byssus.tools.ready.text import difference, version_of
from tests.support.approvals import results
from tests.support.databases import Database
from tests.support.tools import context

OLD = "one\ntwo\nthree\n"
NEW = "one\n2\nthree\nfour\n"


def version(text: str) -> str:
    return version_of(text.encode())


def agent(cp: Checkpointer | None, folder: Path, *replies: Any) -> Agent:
    provider = ScriptedProvider([*replies])
    return Agent(
        provider=provider, model=Model("m"), tools=files(folder), checkpointer=cp, thread_id="t" if cp else None
    )


def writes(**arguments: str) -> list[ToolCall]:
    return [ToolCall("1", "write_file", {"path": "a.txt", **arguments})]


def edits(**arguments: str) -> list[ToolCall]:
    return [ToolCall("1", "edit_file", {"path": "a.txt", **arguments})]


def test_the_question_shows_the_difference_and_the_answer_makes_it(database: Database, tmp_path: Path) -> None:
    async def use() -> None:
        (tmp_path / "a.txt").write_text(OLD)
        async with database.checkpointer() as cp:
            asking = agent(cp, tmp_path, writes(content=NEW, version=version(OLD)), "Done.")
            assert (await asking.prompt("go")).stop_reason == "waiting"
            (call,) = await cp.pending("t")
            assert call.question == (
                "Change the file a.txt? 2 lines added, 1 removed.\n@@ -1,3 +1,4 @@\n one\n-two\n+2\n three\n+four"
            )
            assert (tmp_path / "a.txt").read_text() == OLD
            await asking.answer("1", "approve")
            await asking.resume()
            (result,) = await results(cp)
            assert result.text == f"Written: a.txt, 2 lines added, 1 removed, now version {version(NEW)}."
            assert (tmp_path / "a.txt").read_text() == NEW

    asyncio.run(use())


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (writes(content=NEW), "'a.txt' exists; read it, and pass the version that read_file names"),
        (writes(content=NEW, version="0" * 16), f"is version {version(OLD)}, and not 0000000000000000; read it again"),
        (writes(path="b.txt", content=NEW, version="0" * 16), "'b.txt' does not exist (any more)"),
        (writes(path="../b.txt", content=NEW), "has '..'"),
        (writes(path="binary", content=NEW, version=version("\0")), "'binary' is a binary file"),
        (writes(path="b.txt", content="\ud800"), "is not valid Unicode"),
        (writes(path="b.txt", content="x" * 10_000_001), "at most 10,000,000 are written"),
        (edits(version=version(OLD), old="four", new="5"), "the old text is not in 'a.txt'"),
        (edits(version=version(OLD), old="t", new="5"), "the old text is in 'a.txt' 2 times"),
        (edits(version=version(OLD), old="", new="5"), "the old text is empty"),
    ],
)
def test_what_cannot_be_done_is_not_asked_about(tmp_path: Path, call: list[ToolCall], why: str) -> None:
    async def use() -> None:
        (tmp_path / "a.txt").write_text(OLD)
        (tmp_path / "binary").write_bytes(b"\0")
        result = await agent(None, tmp_path, call, "I see.").prompt("go")
        (told,) = [message for message in result.messages if isinstance(message, ToolResultMessage)]
        assert told.is_error
        assert why in told.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "binary"]
        assert (tmp_path / "a.txt").read_text() == OLD

    asyncio.run(use())


def test_what_was_approved_is_not_made_of_another_file(tmp_path: Path) -> None:
    async def use() -> None:
        (tmp_path / "a.txt").write_text(OLD)
        asking = agent(None, tmp_path, writes(content=NEW, version=version(OLD)), "I see.")
        await asking.prompt("go")
        (tmp_path / "a.txt").write_text("what another program has written")
        await asking.answer("1", "approve")
        result = await asking.resume()
        assert "has changed" in result.messages[0].text
        assert (tmp_path / "a.txt").read_text() == "what another program has written"

    asyncio.run(use())


def test_a_call_that_was_approved_for_one_folder_is_not_run_in_another(tmp_path: Path, database: Database) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    async def use() -> None:
        async with database.checkpointer() as cp:
            await agent(cp, here, writes(content=NEW, folder="")).prompt("go")
            (call,) = await cp.pending("t")
            assert call.arguments == {"path": "a.txt", "content": NEW, "folder": str(here.resolve())}
            await cp.answer("t", "1", "approve")
            await agent(cp, there, "I see.").resume()
            (told,) = await results(cp)
            assert f"this call is for the folder {str(here.resolve())!r}" in told.text
        assert [*here.iterdir(), *there.iterdir()] == []

    asyncio.run(use())


def test_a_new_file_and_an_edit_are_shown_too(tmp_path: Path) -> None:
    async def use() -> None:
        made = agent(None, tmp_path, writes(content=OLD), edits(version=version(OLD), old="two", new="2\n3"), "Done.")
        await made.prompt("go")
        assert (
            made.pending[0].question
            == "Make the file a.txt? 3 lines added, 0 removed.\n@@ -0,0 +1,3 @@\n+one\n+two\n+three"
        )
        await made.answer("1", "approve")
        await made.resume()
        assert made.pending[0].question.endswith("@@ -1,3 +1,4 @@\n one\n-two\n+2\n+3\n three")
        await made.answer("1", "approve")
        assert (await made.resume()).text == "Done."
        assert (tmp_path / "a.txt").read_text() == "one\n2\n3\nthree\n"

    asyncio.run(use())


def test_a_change_that_changes_nothing_is_not_asked_about(tmp_path: Path) -> None:
    async def use() -> None:
        (tmp_path / "a.txt").write_text(OLD)
        result = await agent(None, tmp_path, writes(content=OLD, version=version(OLD)), "Done.").prompt("go")
        assert result.text == "Done."
        assert "0 lines added, 0 removed" in result.messages[2].text

    asyncio.run(use())


EDITED = "one\ntwo two\nthree\n"


@pytest.mark.parametrize(
    ("call", "found", "answer"),
    [
        (writes(content=NEW, version=version(OLD)), OLD, NotDone()),
        (writes(content=NEW, version=version(OLD)), NEW, Done(f"Written: a.txt, now version {version(NEW)}.")),
        (writes(content=NEW, version=version(OLD)), "other", Unknown()),
        (writes(content=NEW), None, NotDone()),
        (writes(content=NEW), NEW, Done(f"Written: a.txt, now version {version(NEW)}.")),
        (writes(content=NEW), "other", Unknown()),
        (edits(version=version(OLD), old="two", new="two two"), OLD, NotDone()),
        (
            edits(version=version(OLD), old="two", new="two two"),
            EDITED,
            Done(f"Written: a.txt, now version {version(EDITED)}."),
        ),
        (edits(version=version(OLD), old="two", new="two two"), "other", Unknown()),
        (edits(version=version(OLD), old="two", new="two two"), None, Unknown()),
        (edits(version=version(OLD), old="two", new=""), "another two", Unknown()),
    ],
)
def test_after_a_crash_the_file_tells_whether_it_was_written(
    tmp_path: Path, call: list[ToolCall], found: str | None, answer: object
) -> None:
    if found is not None:
        (tmp_path / "a.txt").write_text(found)
    made = {tool.name: tool for tool in files(tmp_path)}[call[0].name]
    interrupted = msgspec.structs.replace(context(arguments=call[0].arguments), tool_name=made.name)
    assert asyncio.run(made.ask_check(interrupted)) == answer


def test_a_difference_of_long_files_is_short_and_quick() -> None:
    lines = [f"line {number}\n" for number in range(200_000)]
    other = [*lines[:100_000], "new\n", *lines[100_001:]]
    added, removed, text = difference("".join(lines), "".join(other))
    assert (added, removed) == (1, 1)
    assert text.startswith("@@ -99998,7 +99998,7 @@\n line 99997\n")
    added, removed, text = difference("".join(lines), "".join(reversed(lines)))
    assert (added, removed) == (200_000, 200_000)
    assert text.startswith("@@ 200000 lines become 200000 from line 1 @@\n-line 0\n")
    assert "more lines of this diff" in text
    assert len(text) < 13_000


@pytest.mark.parametrize(("before", "after"), [("a", "a\n"), ("a\n", "a"), ("", "a"), ("a\r\nb", "a\nb")])
def test_a_difference_in_line_ends_alone_is_shown(before: str, after: str) -> None:
    assert difference(before, after)[2] != ""
