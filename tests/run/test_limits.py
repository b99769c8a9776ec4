"""A run is stopped where its limits say so, each with a reason of its own, and can be taken up again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, Limits, Model, Prices, ToolCall, Usage, tool
from byssus.errors import InputError
from byssus.events import AgentEnd
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import Acted, Hanging, Heard, check_whole, make, sent, within
from tests.support.databases import Database


def test_a_time_limit_ends_a_stream_that_hangs(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(Acted(Hanging("Hel")), checkpointer=cp, thread_id="t", limits=Limits(seconds=0.01))
            heard = Heard(agent)
            result = await agent.prompt("hi")
            assert (result.stop_reason, result.error) == ("time_limit", None)
            check_whole(heard)
            assert heard.of(AgentEnd)[0].stop_reason == "time_limit"
            resumed = ScriptedProvider(["ok"])
            assert (await make(resumed, checkpointer=cp, thread_id="t").resume()).text == "ok"
            assert sent(resumed) == ["user: hi"]

    within(main())


def test_a_time_limit_ends_a_tool_that_ignores_it() -> None:
    async def main() -> None:
        release = threading.Event()

        @tool
        def stuck() -> None:
            release.wait(60)

        agent = make([[ToolCall("c1", "stuck")]], tools=[stuck], limits=Limits(seconds=0.01), abort_grace=0.01)
        heard = Heard(agent)
        result = await agent.prompt("go")
        release.set()
        assert result.stop_reason == "time_limit"
        check_whole(heard)

    within(main())


def test_an_agent_can_be_built_without_anything_but_a_provider_and_a_model() -> None:
    assert within(Agent(provider=ScriptedProvider(["ok"]), model=Model("m")).prompt("hi")).text == "ok"


@tool
def look() -> str:
    return "seen"


def calling(usage: Usage = Usage()) -> AssistantMessage:  # noqa: B008
    return AssistantMessage([ToolCall("c1", "look")], "tool_use", usage)


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(turns=3), "turn_limit", 3),
        (Limits(turns=1), "turn_limit", 1),
        (Limits(tokens=20), "token_limit", 2),
        (Limits(tokens=1), "token_limit", 1),
        (Limits(cost=0.5), "cost_limit", 2),
        (Limits(turns=5, tokens=20, cost=0.25), "cost_limit", 1),
    ],
)
def test_a_limit_stops_a_run_behind_a_whole_turn(database: Database, limits: Limits, reason: str, turns: int) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            usage = Usage(4, 3, 2, 1, 0.25)
            provider = ScriptedProvider([calling(usage)] * turns + ["ok"])
            agent = make(provider, tools=[look], limits=limits, checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("go")
            check_whole(heard)
            assert (result.stop_reason, result.error) == (reason, None)
            assert len(provider.requests) == turns
            assert result.usage.total == 10 * turns
            assert heard.of(AgentEnd)[0].stop_reason == reason
            assert [m.role for m in agent.state.messages] == ["user", *["assistant", "tool_result"] * turns]
            assert (await agent.resume()).text == "ok"

    within(main())


def test_a_run_that_is_done_at_its_limit_is_just_done() -> None:
    async def main() -> None:
        agent = make([AssistantMessage("ok", usage=Usage(100, cost=5.0))], limits=Limits(turns=1, tokens=1, cost=1.0))
        assert (await agent.prompt("hi")).stop_reason == "stop"

    within(main())


def test_a_limit_counts_from_the_beginning_of_each_run() -> None:
    async def main() -> None:
        agent = make([AssistantMessage("ok", usage=Usage(100))] * 3, limits=Limits(turns=1, tokens=1))
        for _ in range(3):
            assert (await agent.prompt("hi")).stop_reason == "stop"

    within(main())


def test_what_waits_in_the_inbox_outlasts_a_limit() -> None:
    async def main() -> None:
        provider = ScriptedProvider(["a", "b"])
        agent = make(provider, limits=Limits(turns=1))
        agent.steer("wait for me")
        assert (await agent.prompt("hi")).stop_reason == "turn_limit"
        assert (await agent.resume()).text == "b"
        assert sent(provider)[-1] == "user: wait for me"

    within(main())


def test_there_is_a_limit_on_turns_without_asking() -> None:
    assert Limits().turns is not None


def test_prices_make_the_cost_of_a_reply() -> None:
    async def main() -> None:
        model = Model("m", prices=Prices(input=1.0, output=10.0, cache_read=0.1, cache_write=2.0))
        agent = make(
            [calling(Usage(1_000_000, 100_000, 1_000_000, 500_000))], model=model, tools=[look], limits=Limits(cost=3.0)
        )
        result = await agent.prompt("go")
        assert result.stop_reason == "cost_limit"
        assert result.usage.cost == pytest.approx(1.0 + 1.0 + 0.1 + 1.0)
        assert agent.state.usage == result.usage

    within(main())


@pytest.mark.parametrize("field", ["turns", "tokens", "cost", "seconds"])
@pytest.mark.parametrize("value", [0, -1, "3", True, float("nan")])
def test_a_limit_that_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"limit on {field} must be a number above 0"):
        Limits(**{field: value})
