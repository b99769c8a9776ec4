"""Child threads in a database: they are shown under their parent, and go where it goes."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, ToolCall
from byssus.checkpointer import Checkpointer, SQLiteCheckpointer
from byssus.errors import ForksUndecided, InputError, ThreadBusy
from byssus.maintenance.copy import copy
from byssus.queries.moving.tables import TABLES
from tests.support.agents import history, make
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import with_cp, with_users
from tests.support.children import CHILD, ask, ids, research
from tests.support.commands import command_here
from tests.support.databases import Database
from tests.support.leases import agent_on, die, with_two
from tests.support.tool_calls import Acting, act

GRANDCHILD = f"{CHILD}.inner-1"


async def family(cp: Checkpointer, word: str = "found", **options: Any) -> None:
    """The thread "t" with a child, which has a child too."""
    inner = make([word]).as_tool("inner")
    child = research([[ToolCall("i1", "inner", {"task": word})], word], tools=[inner])
    await agent_on(cp, [[ask(word)], "done"], tools=[child], **options).prompt("go")


async def counts(cp: Checkpointer) -> dict[str, int]:
    """How many rows each table has, but for what a deletion leaves on purpose."""

    def look(tx: Any) -> dict[str, int]:
        names = [table.name for table in TABLES if table.name not in ("floors", "usage", "tool_usage", "users")]
        return {name: tx.one(f"SELECT COUNT(*) FROM {name}")[0] for name in names}

    return {name: count for name, count in (await cp.store.read(look)).items() if count}


# --- shown ------------------------------------------------------------------------------------------------------------


def test_children_are_shown_under_their_parent(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    async def use(cp: Checkpointer) -> None:
        await family(cp)
        await agent_on(cp, ["hi"], "u").prompt("go")
        tree = await cp.tree("t")
        assert tree is not None
        assert str(tree).splitlines() == [
            "t (4 messages)",
            f"└── child {CHILD} (4 messages)",
            f"    └── child {GRANDCHILD} (2 messages)",
        ]
        assert (tree.child_of, tree.children[0].child_of) == (None, "t")
        assert [info.id for info in await cp.threads()] == ["u", "t"]
        assert [(info.id, info.parent_id) for info in await cp.children(CHILD)] == [(GRANDCHILD, CHILD)]
        assert await cp.children("nobody") == []
        with pytest.raises(InputError, match="children must be"):
            await cp.threads(children=1)  # type: ignore[arg-type]

    with_cp(database, use)
    byssus = command_here(capsys, database.place)
    assert f"child {CHILD}" in byssus("tree", "t").stdout
    assert [node["child_of"] for node in json.loads(byssus("tree", "t", "--json").stdout)] == [None, "t", CHILD]
    assert f"(child thread {CHILD}: found)" in byssus("show", "t").stdout
    assert json.loads(byssus("show", "t", "--json").stdout)["children"] == [CHILD]
    listed = json.loads(byssus("threads", "--children", "--json").stdout)
    assert [info["id"] for info in listed] == ["u", "t", CHILD, GRANDCHILD]
    run = json.loads(byssus("runs", "t", "--json").stdout)[0]["id"]
    assert f"research (r1) done on thread {CHILD}" in byssus("run", run).stdout


def test_a_question_of_a_child_is_answered_under_its_parent(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    deleting = Deleting()

    async def begin(cp: Checkpointer) -> None:
        await agent_on(cp, [[ask()]], tools=[research([[delete("a")]], tools=[deleting.tool])]).prompt("go")

    with_cp(database, begin)
    byssus = command_here(capsys, database.place)
    assert byssus("pending", "t").stdout.startswith(f"{CHILD}  a  approval: delete")
    byssus("answer", "t", "a", "approve")

    async def go_on(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["done"], tools=[research(["gone"], tools=[deleting.tool])])
        assert (await agent.resume()).text == "done"
        assert deleting.deleted == ["a"]

    with_cp(database, go_on)


# --- removed ----------------------------------------------------------------------------------------------------------


def test_a_deleted_thread_takes_its_children_along(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await family(cp)
        await agent_on(cp, ["hi"], "u").prompt("go")
        await cp.delete_thread("t")
        assert await ids(cp) == ["u"]
        assert (await counts(cp))["messages"] == 2
        await family(cp)  # whose ids are free again
        await cp.delete_thread(CHILD)
        assert await ids(cp) == ["t", "u"]
        assert (await history(cp, "t"))[2] == "tool_result: found"

    with_cp(database, use)


def test_a_thread_and_a_child_whose_processes_have_died_are_deleted(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        acting = Acting(hangs=1)

        async def interrupted(name: str, attempts: int) -> Agent:
            """A parent whose lease has another epoch than its child's, and both owners of which are gone."""
            for _ in range(attempts):
                await agent_on(cp, ["hi"], name).prompt("go")
            acting.begun.clear()
            agent = agent_on(cp, [[ask()]], name, tools=[research([[act(1)]], tools=[acting.tool])], user_id="ada")
            run = asyncio.create_task(agent.prompt("go"))
            await acting.begun.wait()
            with pytest.raises(ThreadBusy):
                await other.delete_thread(name)
            await die(cp, agent, run)
            return agent

        await with_users(cp, "ada")
        await interrupted("t", 3)
        await other.delete_thread("t")
        assert await ids(other) == []
        acting.runs.clear()
        await interrupted("t", 2)
        assert (await other.erase_user("ada")).threads == 2
        assert await ids(other) == []

    with_two(database, use)


def test_an_erased_thread_leaves_nothing_of_its_children(tmp_path: Path, database: Database) -> None:
    word = f"needle-{secrets.token_hex(12)}"

    async def use(cp: Checkpointer) -> None:
        await family(cp, word)
        assert (await cp.erase_thread("t")).threads == 3
        assert await ids(cp) == []
        await family(cp, word)
        await cp.fork(CHILD, new_id="fork")
        with pytest.raises(ForksUndecided, match="fork"):
            await cp.erase_thread("t")
        erased = await cp.erase_thread("t", forks="keep")
        assert (erased.threads, erased.kept) == (3, ["fork"])
        assert (await history(cp, "fork"))[0] == f"user: {word}"
        await family(cp, word)
        await cp.fork("t", new_id="fork of t")
        assert (await cp.erase_thread("t", forks="erase")).threads == 4
        assert await ids(cp) == ["fork"]
        assert (await cp.erase_thread("fork")).threads == 1
        assert await counts(cp) == {}

    with_cp(database, use)
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or word.encode() not in file.read_bytes(), file


# --- moved ------------------------------------------------------------------------------------------------------------


async def exported(cp: Checkpointer, thread_id: str) -> list[str]:
    return [line async for line in cp.export_thread(thread_id)]


def test_an_export_has_the_children_and_an_import_brings_them_back(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ada")
        await family(cp, user_id="ada")
        lines = await exported(cp, "t")
        async with SQLiteCheckpointer(tmp_path / "other.db") as other:
            assert await other.import_from(lines, trusted=True) == ["t", CHILD, GRANDCHILD]
            assert await exported(other, "t") == lines
            assert str(await other.tree("t")) == str(await cp.tree("t"))
            assert [line async for line in other.export_user("ada")][2:-1] == [
                line async for line in cp.export_user("ada")
            ][2:-1]
        assert await cp.import_from(lines, "copy") == ["copy", *(f"copy{name[1:]}" for name in (CHILD, GRANDCHILD))]
        assert str(await cp.tree("copy")).splitlines()[1:] == [
            "└── child copy.research-1 (4 messages)",
            "    └── child copy.research-1.inner-1 (2 messages)",
        ]
        (run,) = await cp.runs("copy")
        assert any("on thread copy.research-1" in step.text for step in await cp.timeline(run.id, "copy"))
        alone = await exported(cp, CHILD)
        assert await cp.import_from(alone, "alone") == ["alone", "alone.inner-1"]
        info = await cp.info("alone")
        assert info is not None
        assert info.parent_id is None

    with_cp(database, use)


def test_an_imported_thread_that_was_interrupted_goes_on_with_its_child(database: Database, tmp_path: Path) -> None:
    async def use(cp: Checkpointer, _: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="retry")
        agent = agent_on(cp, [[ask()]], tools=[research([[act(1)]], tools=[acting.tool])])
        run = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        await die(cp, agent, run)
        lines = await exported(cp, "t")
        async with SQLiteCheckpointer(tmp_path / "other.db") as other:
            await other.import_from(lines, trusted=True)
            again = agent_on(other, ["done"], tools=[research(["found"], tools=[acting.tool])])
            assert (await again.resume()).text == "done"
            assert await ids(other) == ["t", CHILD]
        assert len(acting.runs) == 2

    with_two(database, use)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"below":"t"', '"below":"nobody"', "does not come before it"),
        ('"below":"t"', '"below":null', "the call of the parent"),
        ('"below":"t"', '"below":7', "the below of this thread cannot be 7"),
    ],
)
def test_a_child_without_its_parent_is_no_import(database: Database, old: str, new: str, why: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await family(cp)
        lines = [line.replace(old, new) for line in await exported(cp, "t")]
        await cp.delete_thread("t")
        with pytest.raises(InputError, match=why):
            await cp.import_from(lines, trusted=True)
        assert await ids(cp) == []

    with_cp(database, use)


def test_a_copy_and_a_check_know_children(database: Database, tmp_path: Path) -> None:
    target = str(tmp_path / "target.db")

    async def fill(cp: Checkpointer) -> None:
        await family(cp)

    with_cp(database, fill)
    copy(database.place, target)

    async def look() -> None:
        async with SQLiteCheckpointer(target) as cp, database.checkpointer() as original:
            assert str(await cp.tree("t")) == str(await original.tree("t"))
            assert (await cp.check())["problems"] == []
            assert (await original.check())["problems"] == []

    asyncio.run(look())


def test_a_new_user_of_a_thread_is_that_of_its_children(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ada", "bob")
        await family(cp)
        await agent_on(cp, ["hi"], user_id="ada").prompt("go")  # which makes it hers
        assert [info.user_id for info in await cp.threads(children=True)] == ["ada"] * 3
        await cp.set_user("t", "bob")
        assert [info.user_id for info in await cp.threads(children=True)] == ["bob"] * 3

    with_cp(database, use)
