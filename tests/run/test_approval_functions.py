"""A tool whose own function decides, call by call, whether a person is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from byssus import Agent, Ask, Deny, Middleware, Model, ToolCall, ToolContext, tool
from byssus.messages import ToolResultMessage
from byssus.providers.scripted import ScriptedProvider


def agent(approval: Callable[[ToolContext], Any], *calls: ToolCall, **options: Any) -> tuple[Agent, list[int]]:
    paid: list[int] = []

    @tool(approval=approval, recovery="ask")
    def pay(amount: int) -> str:
        paid.append(amount)
        return f"paid {amount}"

    provider = ScriptedProvider([list(calls), "Done."])
    return Agent(provider=provider, model=Model("m"), tools=[pay], **options), paid


def pays(amount: object) -> ToolCall:
    return ToolCall(str(amount), "pay", {"amount": amount})


def large(context: ToolContext) -> Ask | bool:
    amount = context.arguments["amount"]
    return Ask(f"Pay {amount}?", approvers=2) if amount > 100 else amount > 10


async def large_later(context: ToolContext) -> Ask | bool:
    await asyncio.sleep(0)
    return large(context)


@pytest.mark.parametrize("approval", [large, large_later])
def test_each_call_is_asked_about_as_the_function_says(approval: Callable[[ToolContext], Any]) -> None:
    async def use() -> None:
        made, paid = agent(approval, pays(5), pays(50), pays(500))
        assert (await made.prompt("go")).stop_reason == "waiting"
        assert [(call.call_id, call.question, call.approvers) for call in made.pending] == [
            ("50", "", 1),
            ("500", "Pay 500?", 2),
        ]
        assert paid == [5]
        await made.answer("50", "approve")
        await made.answer("500", "deny")
        await made.resume()
        assert paid == [5, 50]

    asyncio.run(use())


def _fails(_: ToolContext) -> bool:
    raise ValueError("no such account")


@pytest.mark.parametrize(
    ("approval", "why"),
    [
        (lambda _: Deny("not today"), "This call was blocked: not today"),
        (_fails, "could not be found out (ValueError: no such account)"),
        (lambda _: "yes", "approval must be True, False, Ask(...)"),
        (lambda _: None, "approval must be True, False, Ask(...)"),
    ],
)
def test_what_it_denies_or_does_not_say_is_not_run(approval: Callable[[ToolContext], Any], why: str) -> None:
    made, paid = agent(approval, pays(5))
    result = asyncio.run(made.prompt("go"))
    (told,) = [message for message in result.messages if isinstance(message, ToolResultMessage)]
    assert told.is_error
    assert why in told.text
    assert (paid, result.text) == ([], "Done.")


def test_what_the_function_adds_to_the_arguments_is_shown_and_passed_on() -> None:
    def complete(context: ToolContext) -> Ask:
        context.arguments["amount"] += 1
        return Ask("Shall it be paid?")

    async def use() -> None:
        made, paid = agent(complete, pays(5))
        await made.prompt("go")
        assert made.pending[0].arguments == {"amount": 6}
        await made.answer("5", "approve")
        await made.resume()
        assert paid == [6]

    asyncio.run(use())


def test_arguments_that_do_not_fit_are_an_error_and_no_question() -> None:
    made, paid = agent(_fails, pays("much"))
    result = asyncio.run(made.prompt("go"))
    assert "Invalid arguments" in result.messages[2].text
    assert paid == []


def test_a_hook_and_the_function_are_one_question_with_the_stricter_terms() -> None:
    class Careful(Middleware):
        async def before_tool_call(self, call: ToolCall, **_: Any) -> Ask:
            return Ask("Are you sure?", approvers=3)

    async def use() -> None:
        made, _ = agent(large, pays(500), middleware=[Careful()])
        await made.prompt("go")
        assert [(call.question, call.approvers) for call in made.pending] == [("Are you sure?", 3)]

    asyncio.run(use())
