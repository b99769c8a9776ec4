"""What happened in a run, step by step, from its rows, its messages and the ledger."""

from __future__ import annotations

import asyncio

from byssus import Approve, Ask, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import NetworkFailed
from byssus.providers.scripted import ScriptedProvider
from byssus.queries.log import listing
from byssus.values.thread_key import ThreadKey
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import agent_on, die, look
from tests.support.tool_calls import Acting, act


async def steps(cp: Checkpointer, run_id: str) -> list[tuple[str, str]]:
    return [(step.kind, step.text) for step in await cp.timeline(run_id)]


def test_a_timeline_has_turns_model_calls_tool_calls_and_the_end(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        result = await agent_on(cp, [[ToolCall("c1", "look")], "done"], tools=[look]).prompt("go")
        found = await cp.timeline(result.run_id)
        kinds = [step.kind for step in found]
        assert sorted(kinds) == sorted(
            ["attempt", "message", "model_call", "tool_call", "message", "model_call", "end"]
        )
        assert [step.at for step in found] == sorted(step.at for step in found)
        calls = [step for step in found if step.kind == "model_call"]
        assert [step.details["turn"] for step in calls] == [1, 2]
        assert all(step.details["seconds"] >= 0 for step in calls)
        assert all(step.details["usage"]["output"] >= 0 for step in calls)
        (call,) = [step for step in found if step.kind == "tool_call"]
        assert (call.details["name"], call.details["status"], call.details["attempts"]) == ("look", "done", 1)
        assert found[-1].text == "ended: stop"
        assert await cp.timeline("unknown") == []

    with_cp(database, use)


def test_a_clock_that_was_set_back_mixes_no_messages_up(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        result = await agent_on(cp, [[ToolCall("c1", "look")], "done"], tools=[look]).prompt("go")
        back = "UPDATE messages SET created_at = '2001-01-01T00:00:00.000000Z' WHERE seq > 2"
        await cp.store.write(lambda tx: tx.run(back))
        found = await cp.timeline(result.run_id)
        assert [step.details["seq"] for step in found if "seq" in step.details] == [1, 2, 3, 4]
        assert found[-1].kind == "end"

    with_cp(database, use)


def test_a_timeline_tells_of_a_crash_and_how_the_unknown_was_decided(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        tools = {policy: Acting(hangs=1, name=policy, recovery=policy) for policy in ("never", "retry", "ask")}
        calls = [ToolCall(f"c-{policy}", policy, {"n": 1}) for policy in tools]
        agent = agent_on(cp, [calls], tools=[each.tool for each in tools.values()])
        running = asyncio.create_task(agent.prompt("go"))
        for acting in tools.values():
            await acting.begun.wait()
        await die(cp, agent, running)
        again = [each.tool for each in tools.values()]
        await agent_on(cp, [], tools=again).resume()
        await cp.answer("t", "c-ask", "deny", by="ann")
        result = await agent_on(cp, ["done"], tools=again).resume()
        texts = [text for _, text in await steps(cp, result.run_id)]
        assert any("attempt 1 was lost" in text for text in texts)
        assert any("attempt 2 stopped: a tool call waits for a person" in text for text in texts)
        assert any("never (c-never) unknown; its outcome was unknown" in text for text in texts)
        assert any("retry (c-retry) done, 2 attempts" in text and "tried again" in text for text in texts)
        assert any("ask (c-ask) denied" in text and "ann denied" in text for text in texts)
        assert texts[-1] == "ended: stop"

    with_cp(database, use)


def test_a_timeline_tells_what_still_waits_and_who_approved(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        deleting = Deleting()
        waits = await agent_on(cp, [[delete("/a")]], tools=[deleting.tool]).prompt("go")
        assert any("it needs an approval: a person is asked" in text for _, text in await steps(cp, waits.run_id))
        await cp.answer("t", "/a", "approve", by="ann")
        await agent_on(cp, ["gone"], tools=[deleting.tool]).resume()
        assert any("ann approved" in text for _, text in await steps(cp, waits.run_id))

    with_cp(database, use)


def test_a_timeline_has_each_answer_with_who_when_and_from_where(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        shared = Deleting(approval=Ask("sure?", approvers=2))
        calls = [delete("/a"), delete("/b"), delete("/c")]
        run_id = (await agent_on(cp, [calls], tools=[shared.tool]).prompt("go")).run_id
        await cp.answer("t", "/a", "approve", by="ann", source="web")
        assert any("a person is asked (1 of 2 approvals)" in text for _, text in await steps(cp, run_id))
        await cp.answer("t", "/a", "approve", by="bob", source="cli")
        await cp.answer("t", "/b", "approve", by="bob")
        await cp.answer("t", "/b", "deny", by="ann")
        await cp.answer("t", "/c", "deny")
        await agent_on(cp, [[delete("/d")]], tools=[Deleting().tool]).resume()
        await cp.answer("t", "/d", Approve({"path": "/e"}), by="cy")
        await agent_on(cp, ["done"], tools=[Deleting().tool]).resume()
        found = await cp.timeline(run_id)
        assert [step.text for step in found if step.kind == "answer"] == [
            "delete (/a): ann approved from web",
            "delete (/a): bob approved from cli",
            "delete (/b): bob approved",
            "delete (/b): ann denied",
            "delete (/c): a person denied",
            "delete (/d): cy approved with edited arguments",
        ]
        calls_of = {step.details["call_id"]: step.details for step in found if step.kind == "tool_call"}
        assert {call_id: call["decision"] for call_id, call in calls_of.items()} == {
            "/a": "ann, bob approved",
            "/b": "ann denied",
            "/c": "a person denied",
            "/d": "cy approved with edited arguments",
        }
        assert [call["edited_arguments"] for call in calls_of.values()] == [None, None, None, {"path": "/e"}]
        assert [(each["by"], each["source"]) for each in calls_of["/a"]["approvals"]] == [
            ("ann", "web"),
            ("bob", "cli"),
        ]

    with_cp(database, use)


def test_a_timeline_has_the_quarantine_of_its_run_and_its_lifting(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        earlier = (await agent_on(cp, ["Hi."]).prompt("hello")).run_id
        acting = Acting(hangs=1)
        agent = agent_on(cp, [[act(1)]], tools=[acting.tool])
        running = asyncio.create_task(agent.prompt("go"))
        await acting.begun.wait()
        await die(cp, agent, running)
        (run, _) = await cp.runs("t")
        (died,) = await cp.store.read(listing.interrupted)
        assert await cp.store.write(listing.quarantine, ThreadKey("", "t"), died.epoch)
        assert (await steps(cp, run.id))[-1] == (
            "quarantine",
            "quarantined: too many of its processes died; a person must lift it",
        )
        assert await cp.lift_quarantine("t")
        assert (await steps(cp, run.id))[-1] == ("quarantine", "a person lifted the quarantine")
        await agent_on(cp, ["done"], tools=[Acting().tool]).resume()
        later = (await agent_on(cp, ["Bye."]).prompt("go")).run_id
        told = [[kind for kind, _ in await steps(cp, each)].count("quarantine") for each in (earlier, run.id, later)]
        assert told == [0, 1, 0]

    with_cp(database, use)


def test_a_failure_and_the_repeated_calls_are_in_the_last_step(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        fails = NetworkFailed("cut off", retry_after=0)
        provider = ScriptedProvider([fails, fails])
        result = await agent_on(cp, provider, max_retries=1).prompt(UserMessage("go " * 100))
        *_, last = await steps(cp, result.run_id)
        assert last == ("end", "ended: error, NetworkFailed: cut off, 1 model calls were repeated")

    with_cp(database, use)


def test_a_long_run_is_read_page_by_page(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        acting = Acting()
        script = [[act(n)] for n in range(20)]
        result = await agent_on(cp, [*script, "done"], tools=[acting.tool]).prompt("go")
        kinds = [kind for kind, _ in await steps(cp, result.run_id)]
        assert kinds.count("model_call") == 21
        assert kinds.count("tool_call") == 20

    with_cp(database, use)
