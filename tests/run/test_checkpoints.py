"""The checkpoints that agents make, and agents that start from one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus import NotDone, ToolCall, ToolContext, UserMessage, tool
from byssus.checkpointer import Checkpoint, Checkpointer, CheckpointMetadata, keep_last
from byssus.errors import InputError, NotFound, ThreadBusy
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.following import rows as following
from byssus.values.decisions import Answer
from byssus.values.thread_key import ThreadKey
from tests.support.agents import Acted, Hanging, make, sent
from tests.support.approvals import Deleting, delete, look, statuses
from tests.support.checkpointers import texts, with_cp, with_users
from tests.support.databases import Database
from tests.support.following import Following
from tests.support.leases import agent_on, die
from tests.support.tool_calls import UNKNOWN, Acting, act, interrupt


async def listed(cp: Checkpointer, thread_id: str = "t") -> list[CheckpointMetadata]:
    """Oldest first."""
    return list(reversed(await cp.list_checkpoints(thread_id)))


async def said_at(cp: Checkpointer, checkpoint: str, thread_id: str = "t") -> list[str]:
    found = await cp.get(checkpoint, thread_id)
    assert found is not None
    return [message.text for message in found.messages]


# --- made by themselves -----------------------------------------------------------------------------------------------


def test_each_turn_ends_with_a_checkpoint_of_all_that_was_said(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello", [ToolCall("c1", "look")], "there it is"], checkpoint_every="turn", tools=[look])
        await agent.prompt("hi")
        await agent.prompt("look!")
        made = await listed(cp)
        assert [(one.step, one.tags, one.summary) for one in made] == [
            (1, ["turn"], "hello"),
            (2, ["turn"], "called look"),
            (3, ["turn"], "there it is"),
        ]
        assert [one.parent_checkpoint_id for one in made] == [None, *(one.checkpoint_id for one in made[:-1])]
        assert [await said_at(cp, one.checkpoint_id) for one in made] == [
            ["hi", "hello"],
            ["hi", "hello", "look!", "", "seen"],
            ["hi", "hello", "look!", "", "seen", "there it is"],
        ]

    with_cp(database, use)


def test_every_second_turn_of_the_thread_counts_and_not_of_the_process(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for number in range(5):
            await agent_on(cp, [f"reply {number}"], checkpoint_every=2).prompt("on")
        assert [one.summary for one in await listed(cp)] == ["reply 1", "reply 3"]

    with_cp(database, use)


def test_without_being_asked_an_agent_makes_none(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["hello"]).prompt("hi")
        assert await listed(cp) == []

    with_cp(database, use)


def test_a_plain_turn_costs_no_more_commits_with_a_checkpoint_a_key_or_a_follower_than_without(
    database: Database,
) -> None:
    async def commits(cp: Checkpointer, thread_id: str, key: str | None = None, **options: Any) -> int:
        agent = agent_on(cp, ["a", "b"], thread_id, **options)
        await agent.prompt("first")  # loads
        seen: list[str] = []
        cp.store.boundary = seen.append
        await agent.prompt("second", key=key)
        cp.store.boundary = None
        return seen.count("after commit")

    async def use(cp: Checkpointer) -> None:
        assert await commits(cp, "plain") == 2
        assert await commits(cp, "checkpoint", checkpoint_every="turn") == 2
        assert await commits(cp, "key", key="k") == 2
        follower = Following(cp, "followed")
        assert await commits(cp, "followed") == 2
        await follower.until_type("run_ended", 2)
        assert not await cp.store.read(following.is_watched, ThreadKey("", "followed"))
        await follower.stop()

    with_cp(database, use)


def test_behind_the_highest_step_there_is_may_be_one_of_the_same(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.put(Checkpoint(CheckpointMetadata("t", "top", 2**53 - 1), []))
        agent = agent_on(cp, ["hello"], checkpoint_every="turn")
        await agent.prompt("hi")
        by_hand = await agent.checkpoint()
        assert {one.step for one in await listed(cp)} == {2**53 - 1}
        latest = await cp.get_latest("t")
        assert latest is not None
        assert latest.metadata.checkpoint_id == by_hand
        await cp.put(latest)

    with_cp(database, use)


def test_a_summary_is_one_line_of_a_readable_length(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["first\n\nsecond   line " + "x" * 200], checkpoint_every="turn").prompt("hi")
        (one,) = await listed(cp)
        assert one.summary.startswith("first second line xxx")
        assert len(one.summary) == 80

    with_cp(database, use)


def test_a_reply_that_failed_makes_no_checkpoint(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, [RuntimeError("no"), "yes"], checkpoint_every="turn", max_retries=0)
        await agent.prompt("hi")
        assert await listed(cp) == []
        await agent.prompt("again")
        assert [one.summary for one in await listed(cp)] == ["yes"]

    with_cp(database, use)


def test_a_turn_that_waits_for_a_person_has_not_ended(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, [[delete("a")], "gone"], checkpoint_every="turn", tools=[Deleting().tool])
        assert (await agent.prompt("delete")).stop_reason == "waiting"
        assert await listed(cp) == []
        await agent.answer("a", "approve")
        await agent.resume()
        assert [one.summary for one in await listed(cp)] == ["gone"]

    with_cp(database, use)


def test_the_extra_of_a_checkpoint_is_the_one_of_its_turn(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["one", "two"], checkpoint_every="turn")
        for number in (1, 2):
            agent.state.extra["n"] = number
            await agent.prompt("on")
        first = (await listed(cp))[0].checkpoint_id
        fork = await cp.fork("t", at=first)
        loaded = await cp.load(fork)
        assert loaded is not None
        assert loaded.extra == {"n": 1}

    with_cp(database, use)


@pytest.mark.parametrize("every", ["turns", 0, -1, True, 1.5, []])
def test_what_is_no_number_of_turns_is_refused(database: Database, every: Any) -> None:
    with pytest.raises(InputError, match="checkpoint_every must be"):
        make([], checkpointer=database.checkpointer(), thread_id="t", checkpoint_every=every)


def test_checkpoints_need_a_checkpointer() -> None:
    with pytest.raises(InputError, match="without a checkpointer"):
        make([], checkpoint_every="turn")
    with pytest.raises(InputError, match="needs a checkpointer"):
        asyncio.run(make([]).checkpoint())
    with pytest.raises(InputError, match="at='c1' needs"):
        make([], at="c1")


# --- made by hand -----------------------------------------------------------------------------------------------------


def test_one_by_hand_says_what_it_is_told_to(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello"])
        await agent.prompt("hi")
        first = await agent.checkpoint()
        second = await agent.checkpoint(tags=["milestone"], summary="agreed", state={"plan": [1, None]})
        found = await cp.get(second)
        assert found is not None
        assert (found.metadata.tags, found.metadata.summary, found.state) == (
            ["milestone"],
            "agreed",
            {"plan": [1, None]},
        )
        assert found.metadata.parent_checkpoint_id == first
        assert [one.summary for one in await listed(cp)] == ["hello", "agreed"]
        assert await said_at(cp, second) == ["hi", "hello"]

    with_cp(database, use)


def test_one_by_hand_in_the_middle_of_tools_stays_as_it_was(database: Database) -> None:
    """The results of that turn come later, into places before its end."""
    made: list[str] = []

    async def use(cp: Checkpointer) -> None:
        @tool
        async def note(context: ToolContext) -> str:
            made.append(await agent.checkpoint(summary="in between"))
            return "noted"

        agent = agent_on(cp, [[ToolCall("c1", "note"), ToolCall("c2", "look")], "done"], tools=[note, look])
        await agent.prompt("go")
        before = await said_at(cp, made[0])
        assert before[:2] == ["go", ""]
        assert "noted" not in before
        assert await texts(cp, "t") == ["go", "", "noted", "seen", "done"]
        # From there on, the calls without a result may have run: nothing is run again, and the history is valid.
        provider = ScriptedProvider(["from there"])
        other = agent_on(cp, provider, tools=[note, look], at=made[0])
        await other.prompt("and now?")
        assert sum("unknown" in text for text in sent(provider)) >= 1
        assert len(made) == 1
        assert await said_at(cp, made[0]) == before

    with_cp(database, use)


def test_an_idle_agent_marks_what_another_process_has_said_too(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello"])
        await agent.prompt("hi")
        await cp.append("t", UserMessage("from elsewhere"))
        made = await agent.checkpoint()
        assert await said_at(cp, made) == ["hi", "hello", "from elsewhere"]
        assert [message.text for message in agent.state.messages] == ["hi", "hello", "from elsewhere"]

    with_cp(database, use)


def test_one_by_hand_at_any_moment_of_a_run_disturbs_nothing(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for moment in range(40):
            name = f"t{moment}"
            agent = agent_on(cp, [[ToolCall("c1", "look")], "done"], name, tools=[look])
            run = asyncio.create_task(agent.prompt("go"))
            for _ in range(moment):
                await asyncio.sleep(0 if moment < 20 else 0.0005)
            made = await asyncio.wait_for(agent.checkpoint(), 30)
            assert (await run).text == "done"
            assert await texts(cp, name) == ["go", "", "seen", "done"]
            assert await said_at(cp, made, name) in (["go", "", "seen", "done"][:end] for end in range(5))
            assert [message.text for message in agent.state.messages] == ["go", "", "seen", "done"]
            assert await cp.delete_thread(name) == 1

    with_cp(database, use)


def test_its_summary_is_of_what_it_holds_and_not_of_what_the_agent_remembers(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["one", "two"])
        await agent.prompt("on")
        await agent.prompt("on")
        await cp.rewind("t", to=2)
        await agent.checkpoint()
        assert (await listed(cp))[-1].summary == "one"
        await cp.erase_thread("t")
        await agent.checkpoint()
        assert [one.summary for one in await listed(cp)] == [""]

    with_cp(database, use)


def test_an_agent_for_somebody_else_is_refused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        await agent_on(cp, ["hello"], user_id="ann").prompt("hi")
        with pytest.raises(InputError, match="thread 't' belongs to user 'ann', and this agent works for 'bob'"):
            await agent_on(cp, ["never"], user_id="bob").prompt("hi")
        assert await texts(cp, "t") == ["hi", "hello"]
        await agent_on(cp, ["nobody's"]).prompt("hi")
        await cp.set_user("t", "bob")
        await agent_on(cp, ["hello"], user_id="bob").prompt("hi")
        assert (await cp.erase_user("ann")).threads == 0
        assert (await cp.erase_user("bob")).threads == 1

    with_cp(database, use)


def test_a_checkpoint_that_was_got_is_a_point_and_has_a_next_one(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        first = Checkpoint(CheckpointMetadata("t", "c1", 1), ["a"], {"x": 1})
        await cp.put(first)
        await cp.put(first.next(messages=["a", "b"]))
        latest = await cp.get_latest("t")
        assert latest is not None
        assert (latest.metadata.step, latest.metadata.parent_checkpoint_id, latest.state) == (2, "c1", {"x": 1})
        assert latest.metadata.checkpoint_id != "c1"
        await cp.fork("t", at=first, new_id="f")
        await cp.rewind("t", to=first.metadata)
        assert await cp.diff("t", "f") == (1, 1, 0, 0)

    with_cp(database, use)


def test_an_extra_that_was_changed_is_saved_with_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello", "more"])
        await agent.prompt("hi")
        agent.state.extra["x"] = 1
        await agent.checkpoint()
        loaded = await cp.load("t")
        assert loaded is not None
        assert loaded.extra == {"x": 1}
        await agent.prompt("goes on")

    with_cp(database, use)


@pytest.mark.parametrize("wrong", [{"tags": "x"}, {"tags": [1]}, {"summary": 7}, {"state": {"x": {1, 2}}}])
def test_what_cannot_be_stored_is_refused_and_nothing_is_written(database: Database, wrong: dict[str, Any]) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["hello"])
        await agent.prompt("hi")
        with pytest.raises(InputError):
            await agent.checkpoint(**wrong)
        assert await listed(cp) == []

    with_cp(database, use)


# --- agents that start from one ---------------------------------------------------------------------------------------


def test_an_agent_that_starts_from_a_checkpoint_drives_a_fork(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["hello", "bye"], checkpoint_every="turn").prompt("hi")
        await agent_on(cp, ["bye"], checkpoint_every="turn").prompt("again")
        first = (await listed(cp))[0].checkpoint_id
        provider = ScriptedProvider(["other", "more"])
        agent = agent_on(cp, provider, at=first, checkpoint_every="turn")
        fork = agent.thread_id
        assert fork not in (None, "t")
        await agent.prompt("what else?")
        await agent.prompt("and?")
        assert sent(provider, 0) == ["user: hi", "assistant: hello", "user: what else?"]
        assert await texts(cp, str(fork)) == ["hi", "hello", "what else?", "other", "and?", "more"]
        assert await texts(cp, "t") == ["hi", "hello", "again", "bye"]
        assert [one.step for one in await listed(cp, str(fork))] == [1, 2, 3]

    with_cp(database, use)


def test_a_seq_is_a_point_to_start_from_as_well(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["hello"]).prompt("hi")
        agent = agent_on(cp, ["again"], at=1)
        await agent.resume()
        assert await texts(cp, str(agent.thread_id)) == ["hi", "again"]

    with_cp(database, use)


def test_what_was_said_to_it_before_its_first_run_is_heard(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["hello"]).prompt("hi")
        agent = agent_on(cp, ["a", "b"], at=2)
        await agent.follow_up("and then?")
        await agent.prompt("go")
        assert await texts(cp, str(agent.thread_id)) == ["hi", "hello", "go", "a", "and then?", "b"]

    with_cp(database, use)


def test_a_fork_that_was_made_and_not_heard_of_is_gone_on_with(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await agent_on(cp, ["hello"]).prompt("hi")
        agent = agent_on(cp, ["again"], at=2)
        assert agent.thread_id is not None
        await cp.fork("t", 2, new_id=agent.thread_id)
        await agent.prompt("on")
        assert await texts(cp, agent.thread_id) == ["hi", "hello", "on", "again"]

    with_cp(database, use)


def test_an_unknown_point_is_said_by_the_first_run_and_nothing_is_written(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("hi"))
        for point in ("nowhere", 2):
            agent = agent_on(cp, ["never"], at=point)
            with pytest.raises(NotFound, match="thread 't' has no"):
                await agent.prompt("go")
        assert [info.id for info in await cp.threads()] == ["t"]

    with_cp(database, use)


def test_a_question_to_a_person_is_open_on_both_sides_of_a_fork(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "done"], tools=[deleting.tool])
        await agent.prompt("delete")
        fork = await cp.fork("t")
        other = agent_on(cp, ["refused"], fork, tools=[deleting.tool])
        await other.load()
        assert [call.call_id for call in other.pending] == ["a"]
        await other.answer("a", "deny")
        await other.resume()
        assert deleting.deleted == []
        await agent.answer("a", "approve")
        await agent.resume()
        assert deleting.deleted == ["a"]

    with_cp(database, use)


def test_a_fork_at_a_checkpoint_that_was_made_while_a_person_is_asked_asks_too(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "done"], tools=[deleting.tool])
        await agent.prompt("delete")
        fork = await cp.fork("t", at=await agent.checkpoint())
        assert [(call.thread_id, call.call_id) for call in await cp.pending()] == [("t", "a"), (fork, "a")]
        again = await cp.fork(fork)
        other = agent_on(cp, ["gone"], again, tools=[deleting.tool])
        await cp.answer(again, "a", "approve")
        await other.resume()
        assert deleting.deleted == ["a"]
        assert [call.thread_id for call in await cp.pending()] == ["t", fork]

    with_cp(database, use)


@pytest.mark.parametrize("answer", ["approve", "deny"])
@pytest.mark.parametrize("way", ["head", "seq", "reply", "checkpoint", "fork of a fork", "agent"])
def test_a_fork_takes_the_question_along_and_not_the_answer(database: Database, way: str, answer: Answer) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "done"], tools=[deleting.tool])
        await agent.prompt("delete")
        checkpoint = await agent.checkpoint()
        await cp.answer("t", "a", answer)
        other = agent_on(cp, ["of the fork"], "t", tools=[deleting.tool], at=checkpoint)
        if way != "agent":
            points: dict[str, Any] = {"seq": 3, "reply": 2, "checkpoint": checkpoint}
            fork = await cp.fork("t", points.get(way))
            fork = await cp.fork(fork) if way == "fork of a fork" else fork
            other = agent_on(cp, ["of the fork"], fork, tools=[deleting.tool])
        assert (await other.resume()).stop_reason == "waiting"
        assert (await agent.resume()).text == "done"
        assert deleting.deleted == (["a"] if answer == "approve" else [])
        await other.answer("a", "approve")
        assert (await other.resume()).text == "of the fork"
        assert len(deleting.keys) == len(set(deleting.keys)) == (2 if answer == "approve" else 1)

    with_cp(database, use)


def test_a_fork_has_the_questions_of_its_own_reply_and_of_no_other_at_that_place(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "no need"], tools=[deleting.tool])
        await agent.prompt("delete")
        await cp.rewind("t", 1)
        assert (await agent.resume()).text == "no need"  # in the place of the reply that asked
        await cp.fork("t")
        assert await cp.pending() == []

    with_cp(database, use)


def test_two_forks_of_one_name_have_keys_of_their_own(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        await agent_on(cp, [[delete("a")]], tools=[deleting.tool]).prompt("delete")
        for _ in range(2):
            await cp.fork("t", new_id="f")
            await cp.answer("f", "a", "approve")
            await agent_on(cp, ["done"], "f", tools=[deleting.tool]).resume()
            await cp.delete_thread("f")
        assert len(set(deleting.keys)) == 2

    with_cp(database, use)


def test_an_answer_counts_once_however_often_the_thread_is_rewound_to_it(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, [[delete("a")], "done", "again"], tools=[deleting.tool])
        await agent.prompt("delete")
        await cp.answer("t", "a", "approve")
        before = await cp.rewind("t", to=3)
        assert [call.call_id for call in await cp.pending("t")] == ["a"]
        assert (await agent.resume()).stop_reason == "waiting"
        await cp.answer("t", "a", "approve")
        await agent.resume()
        assert deleting.deleted == ["a"]
        await cp.rewind("t", to=before)  # where the first answer was given
        assert (await agent.resume()).stop_reason == "waiting"
        assert deleting.deleted == ["a"]

    with_cp(database, use)


@pytest.mark.parametrize(
    "options", [{"recovery": "retry"}, {"check": lambda context: NotDone()}], ids=["retry", "check"]
)
@pytest.mark.parametrize("approval", [False, True])
@pytest.mark.parametrize("way", ["started", "ended"])
def test_a_call_that_ran_on_the_other_side_of_a_fork_or_a_rewind_is_not_run_again_by_itself(
    database: Database, way: str, approval: bool, options: dict[str, Any]
) -> None:
    async def use(cp: Checkpointer) -> None:
        acting = Acting(hangs=int(way == "started"), approval=approval, **options)
        agent = agent_on(cp, [[act(1)], "done"], tools=[acting.tool])
        run = asyncio.create_task(agent.prompt("go"))
        if approval:
            await run
            await agent.answer("c1", "approve")
            run = asyncio.create_task(agent.resume())
        if way == "started":
            await acting.begun.wait()
            await die(cp, agent, run)
        else:
            await run
        open_at = 3 if way == "started" else 2  # with the place of its result, or before it
        fork = await cp.fork("t", open_at)
        await cp.rewind("t", open_at)
        for name in (fork, "t"):
            provider = ScriptedProvider(["I see"])
            await agent_on(cp, provider, name, tools=[acting.tool]).resume()
            assert sent(provider) == ["user: go", "assistant: ", UNKNOWN]
        assert len(acting.runs) == 1

    with_cp(database, use)


def test_a_tool_that_asks_after_an_interruption_asks_on_a_fork_and_runs_there_with_a_key_of_its_own(
    database: Database,
) -> None:
    async def use(cp: Checkpointer) -> None:
        acting = Acting(hangs=1, recovery="ask")
        await interrupt(cp, acting)
        fork = await cp.fork("t")
        for name in (fork, "t"):
            agent = agent_on(cp, ["ok"], name, tools=[acting.tool])
            assert (await agent.resume()).stop_reason == "waiting"
            await agent.answer("c1", "approve")
            await agent.resume()
        first, of_fork, again = (key for _, key in acting.runs)
        assert first == again != of_fork

    with_cp(database, use)


def test_a_rewind_takes_a_question_away_and_its_undoing_brings_it_back(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        agent = agent_on(cp, ["hello", [delete("a")], "gone"], tools=[deleting.tool])
        await agent.prompt("hi")
        await agent.prompt("delete")
        left = await cp.rewind("t", to=2)
        assert await cp.pending() == []
        assert (await statuses(cp)) == {"a": "left"}
        assert left is not None
        await cp.rewind("t", to=left)
        assert [call.call_id for call in await cp.pending()] == ["a"]
        await agent.answer("a", "approve")
        assert (await agent.resume()).text == "gone"
        assert deleting.deleted == ["a"]

    with_cp(database, use)


def test_rewinding_to_and_fro_makes_no_checkpoint_of_what_has_one(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["one", "two", "three"], checkpoint_every="turn")
        for _ in range(3):
            await agent.prompt("on")
        names = [one.checkpoint_id for one in await listed(cp)]
        at = names[-1]
        for name in [*names, *reversed(names), names[1], names[0]]:
            assert await cp.rewind("t", to=name) == at
            at = name
        tree = await cp.tree("t")
        assert tree is not None
        assert {one.checkpoint_id for one in (*tree.checkpoints, *tree.left)} == set(names)

    with_cp(database, use)


def test_a_call_that_was_started_before_the_fork_does_not_run_on_it(database: Database) -> None:
    """In the middle of open calls, the fork's history is valid all the same."""

    async def use(cp: Checkpointer) -> None:
        started, go_on, runs = asyncio.Event(), asyncio.Event(), []

        @tool
        async def slow() -> str:
            runs.append("slow")
            started.set()
            await go_on.wait()
            return "slow is done"

        agent = agent_on(cp, [[ToolCall("c1", "slow"), ToolCall("c2", "look")], "done"], tools=[slow, look])
        run = asyncio.create_task(agent.prompt("go"))
        await asyncio.wait_for(started.wait(), 30)
        fork = await cp.fork("t")
        go_on.set()
        await run
        provider = ScriptedProvider(["on the fork"])
        await agent_on(cp, provider, fork, tools=[slow, look]).prompt("and?")
        assert runs == ["slow"]
        assert await texts(cp, "t") == ["go", "", "slow is done", "seen", "done"]
        assert "slow is done" not in await texts(cp, fork)
        assert any("unknown" in text for text in sent(provider))

    with_cp(database, use)


def test_a_thread_that_is_driven_is_neither_rewound_nor_deleted_nor_put_to(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("before"))
        hanging = Hanging()
        agent = agent_on(cp, Acted(hanging))
        run = asyncio.create_task(agent.prompt("go"))
        await asyncio.wait_for(hanging.begun.wait(), 30)
        for write in (
            cp.rewind("t", to=1),
            cp.delete_thread("t"),
            cp.erase_thread("t"),
            cp.put(Checkpoint(CheckpointMetadata("t", "c"), [])),
        ):
            with pytest.raises(ThreadBusy):
                await write
        fork = await cp.fork("t")
        assert await texts(cp, fork) == ["before", "go"]
        agent.abort()
        await run

    with_cp(database, use)


def test_an_agent_notices_that_its_thread_was_rewound_or_deleted(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        provider = ScriptedProvider(["one", "two", "three", "four"])
        agent = agent_on(cp, provider, checkpoint_every="turn")
        await agent.prompt("first")
        await agent.prompt("second")
        await cp.rewind("t", to=(await listed(cp))[0].checkpoint_id)
        await agent.prompt("third")
        assert sent(provider, 2) == ["user: first", "assistant: one", "user: third"]
        assert [one.summary for one in await listed(cp)] == ["one", "three"]
        await cp.delete_thread("t")
        await agent.prompt("fourth")
        assert sent(provider, 3) == ["user: fourth"]
        assert await texts(cp, "t") == ["fourth", "four"]

    with_cp(database, use)


def test_a_process_that_slept_through_a_deletion_does_not_take_a_new_thread_for_its_own(database: Database) -> None:
    """The new one has as many versions as the old one had."""

    async def use(cp: Checkpointer) -> None:
        provider = ScriptedProvider(["one", "two"])
        agent = agent_on(cp, provider)
        await agent.prompt("mine")
        await cp.delete_thread("t")
        await agent_on(cp, ["theirs"]).prompt("somebody else's")
        await agent.prompt("what is here?")
        assert sent(provider, 1) == ["user: somebody else's", "assistant: theirs", "user: what is here?"]

    with_cp(database, use)


def test_a_time_to_live_is_kept_at_the_end_of_each_run(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = agent_on(cp, ["one", "two", "three"], checkpoint_every="turn")
        await agent.prompt("on")
        await cp.set_ttl("t", days=1e-9, keep=keep_last(2))
        for _ in range(2):
            await agent.prompt("on")
        assert [one.summary for one in await listed(cp)] == ["two", "three"]
        await cp.set_ttl("t", None)

    with_cp(database, use)
