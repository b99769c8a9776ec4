"""Runs, seen and reached from the command line, while nobody or another process drives them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from byssus import Agent, Ask, AssistantMessage, Model, ToolCall, UserMessage, tool
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.queries.log import threads
from byssus.queries.log.leases import Claim, Lease
from byssus.store.database import Store
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey
from tests.support.commands import Command, command, command_here
from tests.support.databases import Database
from tests.support.leases import agent_on

pytestmark = pytest.mark.processes


@tool(approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


@tool(approval=Ask("Both?", approvers=2, expires=3600))
def spend(amount: int) -> str:
    """Spend."""
    return f"spent {amount}"


@pytest.fixture
def byssus(tmp_path: Path, database: Database) -> Command:
    return command(tmp_path, database.place)


def run_agent(database: Database, steps: list[Step], prompt: str | None, thread_id: str = "t") -> tuple[str, str]:
    async def main() -> tuple[str, str]:
        async with database.checkpointer() as cp:
            agent = Agent(
                provider=ScriptedProvider(steps),
                model=Model("m"),
                tools=[pay, spend],
                checkpointer=cp,
                thread_id=thread_id,
            )
            result = await (agent.prompt(prompt) if prompt else agent.resume())
            return result.stop_reason, result.text

    return asyncio.run(main())


ASK: list[Step] = [[ToolCall("c1", "pay", {"amount": 7})]]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (["approve"], "paid 7"),
        (["deny"], "denied it"),
        (["deny", "too much"], "too much"),
        (["result", "paid by hand"], "paid by hand"),
    ],
)
def test_a_call_that_waits_is_listed_and_answered(
    byssus: Command, database: Database, answer: list[str], told: str
) -> None:
    assert run_agent(database, ASK, "Pay.")[0] == "waiting"
    assert byssus("pending").stdout == 't  c1  approval: pay with {"amount":7}\n'
    (listed,) = json.loads(byssus("pending", "t", "--json").stdout)
    assert (listed["call_id"], listed["arguments"], listed["reason"]) == ("c1", {"amount": 7}, "approval")
    assert byssus("unfinished").stdout == ""  # a person must speak first
    byssus("answer", "t", "c1", *answer)
    assert byssus("pending").stdout == ""
    assert byssus("unfinished").stdout.splitlines()[1].startswith("t  ")
    assert run_agent(database, [lambda request: request.messages[-1].text], None) == ("stop", _containing(told))
    assert json.loads(byssus("unfinished", "--json").stdout) == []


def test_an_answer_says_who_gave_it_and_may_change_the_arguments(byssus: Command, database: Database) -> None:
    run_agent(database, ASK, "Pay.")
    done = byssus("answer", "t", "c1", "approve", "--arguments", '{"amount": 2}', "--by", "ada")
    assert done.stderr == "Recorded. To continue the run: byssus resume t --app MODULE:FACTORY\n"
    again = byssus("answer", "t", "c1", "deny", code=1).stderr
    assert "ada answered at" in again
    assert "from cli" in again
    assert run_agent(database, [lambda request: request.messages[-1].text], None) == ("stop", _containing("paid 2"))


def test_the_list_says_how_many_must_approve_and_until_when(byssus: Command, database: Database) -> None:
    run_agent(database, [[ToolCall("c1", "spend", {"amount": 7})]], "Spend.")
    run_agent(database, ASK, "Pay.", "u")
    assert "needs more approvals" in byssus("answer", "t", "c1", "approve", "--by", "ada").stderr
    (line,) = byssus("pending", "--limit", "1").stdout.splitlines()
    assert line.startswith('t  c1  approval: spend with {"amount":7}  Both?  (1 of 2 approvals, ada)  (expires 20')
    assert line.endswith(" UTC: deny)")
    (listed,) = json.loads(byssus("pending", "t", "--json").stdout)
    assert [given["by"] for given in listed["approvals"]] == ["ada"]


class _containing(str):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) in other

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["answer", "t", "c1", "approve"], "does not wait for an answer"),
        (["answer", "t", "c1", "result"], "what is the result?"),
        (["answer", "t", "c1", "approve", "yes"], "takes no text"),
        (["answer", "t", "c1", "approve", "--arguments", "{"], "must be a JSON object"),
        (["answer", "t", "c1", "approve", "--arguments", "[1]"], "must be a JSON object"),
        (["answer", "t", "c1", "deny", "--arguments", "{}"], "goes with 'approve'"),
        (["pending", "--user", "nobody"], "there is no user 'nobody'"),
        (["answer", "nobody", "c1", "approve"], "there is no thread 'nobody'"),
        (["steer", "nobody", "hello"], "there is no thread 'nobody'"),
        (["steer", "t", "  "], "there is no message; write one: byssus steer t TEXT"),
        (["withdraw", "t", "0"], "is not queued in thread 't'"),
        (["abort", "t"], "thread 't' has no run in progress; 'byssus threads --state running' lists"),
        (["pending", "nobody"], "there is no thread 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_why(
    byssus: Command, database: Database, arguments: list[str], complaint: str
) -> None:
    run_agent(database, ["hello"], "hi")
    done = byssus(*arguments, code=1)
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_said_from_outside_waits_and_can_be_taken_back(byssus: Command, database: Database) -> None:
    run_agent(database, ["hello"], "hi")
    first = byssus("steer", "t", "not so fast").stdout.strip()
    second = byssus("follow-up", "t", "北京的天气怎么样?").stdout.strip()
    assert byssus("inbox", "t").stdout == f"{first}  steer: not so fast\n{second}  follow_up: 北京的天气怎么样?\n"
    assert [item["kind"] for item in json.loads(byssus("inbox", "t", "--json").stdout)] == ["steer", "follow_up"]
    byssus("withdraw", "t", first)
    assert run_agent(database, [lambda request: request.messages[-1].text], None) == ("stop", "北京的天气怎么样?")
    assert byssus("inbox", "t").stdout == ""


def test_a_run_that_another_process_drives_is_told_to_end(byssus: Command, store: Store) -> None:
    store.write_now(threads.append, ThreadKey("", "t"), [], by=Claim("elsewhere:1", "run-1", 60))
    byssus("abort", "t")
    assert store.read_now(lambda tx: tx.one("SELECT lease_abort FROM threads")) == (1,)


def test_a_reply_is_shown_as_arriving_while_its_run_goes_on_and_then_as_interrupted(
    byssus: Command, store: Store
) -> None:
    claim = Claim("elsewhere:1", "run-1", 60)
    position = store.write_now(threads.append, ThreadKey("", "t"), [], by=claim)
    lease = Lease(position.epoch, 60)
    body = '{"role":"assistant","content":[{"type":"text","text":"Once upon"}],"stop_reason":"aborted"}'
    store.write_now(threads.save_partial, ThreadKey("", "t"), body, by=lease)
    shown = byssus("show", "t").stdout
    assert "assistant, still arriving\nOnce upon" in shown
    assert "A run is in progress" in shown
    assert json.loads(byssus("threads", "--json").stdout)[0]["state"] == "running"
    store.write_now(threads.append, ThreadKey("", "t"), [], by=lease, release=Release.PAUSE)
    shown = byssus("show", "t").stdout
    assert "aborted: its run was interrupted" in shown
    assert "Once upon" in shown
    assert json.loads(byssus("threads", "--json").stdout)[0]["state"] == "interrupted"
    assert json.loads(byssus("show", "t", "--json").stdout)["partial"]["content"][0]["text"] == "Once upon"


def test_text_from_elsewhere_cannot_drive_the_terminal(byssus: Command, database: Database) -> None:
    run_agent(database, [[ToolCall("c\x1b[2J", "pay", {"amount": 7})]], "Pay.", thread_id="t\x1b[31m")
    assert "\x1b" not in byssus("pending").stdout


def test_what_a_call_was_given_is_shown_in_every_language(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person who is asked must be able to read it."""
    run_agent(database, [[ToolCall("c1", "pay", {"amount": 7, "to": "北京"})]], "Pay.")
    byssus = command_here(capsys, database.place)
    told = '{"amount":7,"to":"北京"}'
    assert byssus("pending").stdout == f"t  c1  approval: pay with {told}\n"
    assert f"[calls pay with {told}]" in byssus("show", "t").stdout
    assert told in byssus("show", "t", "--markdown").stdout
    assert "北京" in byssus("show", "t", "--html").stdout


def test_a_thread_that_was_only_written_to_has_nothing_unfinished(byssus: Command, database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.append("t", [UserMessage("hi"), AssistantMessage("hello")])

    asyncio.run(main())
    assert byssus("unfinished").stdout == ""


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_and_one_is_shown_step_by_step(capsys: pytest.CaptureFixture[str], database: Database) -> None:
    with database.checkpointer() as cp:
        first = agent_on(cp, ["Oslo."], "trip").run_sync("Where?", key="order-17")
        agent_on(cp, ["Hi."], "other").run_sync("Hello")
    byssus = command_here(capsys, database.place)
    head, other, trip = byssus("runs", "--utc").stdout.splitlines()
    assert head.split() == ["RUN", "THREAD", "STATE", "STOPPED", "BY", "ATTEMPTS", "BEGAN"]
    assert other.split()[1:5] == ["other", "ended", "stop", "1"]
    assert trip.split()[0] == first.run_id
    (run,) = json.loads(byssus("runs", "trip", "--json").stdout)
    assert (run["id"], run["request_key"], run["state"]) == (first.run_id, "order-17", "ended")
    shown = byssus("run", first.run_id[:30], "--utc").stdout
    assert shown.startswith(f"run {first.run_id}\nthread:  trip\nstate:   ended\ncause:   prompt\nkey:     order-17\n")
    assert "user: Where?" in shown
    assert "turn 1: " in shown
    assert shown.rstrip().endswith("ended: stop")
    told = json.loads(byssus("run", first.run_id, "--json").stdout)
    assert told.keys() == {"run", "attempts", "timeline"}
    assert [step["kind"] for step in told["timeline"]] == ["attempt", "message", "model_call", "end"]


def test_an_unknown_run_is_named_with_the_next_step(capsys: pytest.CaptureFixture[str], database: Database) -> None:
    with database.checkpointer() as cp:
        agent_on(cp, ["Oslo."], "trip").run_sync("Where?")
    byssus = command_here(capsys, database.place)
    assert "there is no run 'zz'" in byssus("run", "zz", code=1).stderr
    assert "'byssus runs' lists them" in byssus("run", "zz", code=1).stderr
    assert "there is no thread 'nope'" in byssus("runs", "nope", code=1).stderr
