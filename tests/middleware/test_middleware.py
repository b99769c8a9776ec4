"""Middleware: what the model sees is decided here, what the thread holds is not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from byssus import Middleware, SlidingWindow, ToolCall, UserMessage, tool
from byssus.errors import HookFailed, InputError
from byssus.events import AgentEnd
from byssus.messages import AssistantMessage, Message, TextContent
from byssus.middleware import HookContext
from byssus.providers.scripted import ScriptedProvider
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole, history, make, sent, within
from tests.support.databases import Database
from tests.support.histories import flaws


@tool
def look() -> str:
    return "seen"


class LastTwo:
    """Exactly what users write; no base class."""

    async def transform_context(self, messages, *, signal=None):  # type: ignore[no-untyped-def]
        return messages[-2:]


class LastTwoPlain:
    def transform_context(self, messages, *, signal=None):  # type: ignore[no-untyped-def]
        return messages[-2:]


class Window:
    """A window of any size, as a user would write it."""

    def __init__(self, n: int) -> None:
        self._n = n

    async def transform_context(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:
        return messages[-self._n :]


# --- the sliding window -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("middleware", [LastTwo(), LastTwoPlain(), SlidingWindow(2)])
def test_a_window_limits_the_model_and_not_the_database(database: Database, middleware: object) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(["a", "b", "c"])
            agent = make(provider, middleware=[middleware], checkpointer=cp, thread_id="t")
            for prompt in ("one", "two", "three"):
                await agent.prompt(prompt)
            assert [len(await history(cp, "t")), len(agent.state.messages)] == [6, 6]
            assert sent(provider)[-1] == "user: three"
            assert "user: one" not in sent(provider)
            assert flaws(provider.requests[-1].messages) == []

    within(main())


@pytest.mark.parametrize("kind", [SlidingWindow, Window])
@pytest.mark.parametrize("n", range(1, 12))
def test_a_window_of_any_size_is_a_valid_history_also_between_calls_and_results(
    database: Database, kind: type[Any], n: int
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            calls = [ToolCall(f"c{number}", "look") for number in range(3)]
            provider = ScriptedProvider([calls, calls[:1], "done", calls[:2], "done again"])
            agent = make(provider, tools=[look], middleware=[kind(n)], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            assert (await agent.prompt("one")).text == "done"
            assert (await agent.prompt("two")).text == "done again"
            check_whole(heard)
            for request in provider.requests:
                assert flaws(request.messages) == []
            assert len(await history(cp, "t")) == 13

    within(main())


@pytest.mark.parametrize("n", [0, -1])
def test_a_window_without_a_message_is_refused(n: int) -> None:
    with pytest.raises(InputError, match=str(n)):
        SlidingWindow(n)


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_a_hook_sees_all_messages_and_the_list_is_its_own() -> None:
    async def main() -> None:
        seen: list[list[str]] = []

        class Greedy(Middleware):
            async def transform_context(self, messages: list[Message], *, signal: Any = None) -> list[Message]:
                seen.append([message.text for message in messages])
                del messages[:-1]
                return messages

        provider = ScriptedProvider(["a", "b"])
        agent = make(provider, middleware=[Greedy()])
        await agent.prompt("one")
        await agent.prompt("two")
        assert seen == [["one"], ["one", "a", "two"]]
        assert sent(provider) == ["user: two"]
        assert [m.text for m in agent.state.messages] == ["one", "a", "two", "b"]

    within(main())


def test_hooks_chain_in_the_order_in_which_they_were_given() -> None:
    class Add:
        def __init__(self, text: str) -> None:
            self._text = text

        def transform_context(self, messages: list[Message]) -> list[Message]:
            return [*messages, UserMessage(self._text)]

    provider = ScriptedProvider(["ok"])
    within(make(provider, middleware=[Add("first"), Middleware(), Add("second")]).prompt("hi"))
    assert sent(provider) == ["user: hi", "user: first", "user: second"]


def test_a_hook_is_asked_before_each_model_call_and_gets_the_runs_signal() -> None:
    signals: list[Signal] = []

    class Watch:
        def transform_context(self, messages: list[Message], *, signal: Signal) -> tuple[Message, ...]:
            signals.append(signal)
            return tuple(messages)

    agent = make([[ToolCall("c1", "look")], "ok"], tools=[look], middleware=[Watch()])
    within(agent.prompt("go"))
    assert len(signals) == 2
    assert signals[0] is signals[1]
    assert isinstance(signals[0], Signal)


def test_what_a_hook_writes_to_extra_is_stored(database: Database) -> None:
    class Count:
        async def transform_context(
            self, messages: list[Message], *, context: HookContext, signal: Any = None
        ) -> list[Message]:
            assert (context.thread_id, context.user_id) == ("t", "ann")
            context.extra["calls"] = context.extra.get("calls", 0) + 1
            return messages

    async def main() -> None:
        async with database.checkpointer() as cp:
            await cp.create_user("Ann", user_id="ann")
            for _ in range(2):  # the second agent is as good as another process
                agent = make(
                    [[ToolCall("c1", "look")], "ok"],
                    tools=[look],
                    middleware=[Count()],
                    checkpointer=cp,
                    thread_id="t",
                    user_id="ann",
                )
                await agent.prompt("go")
            thread = await cp.load("t")
            assert thread is not None
            assert thread.extra == agent.state.extra == {"calls": 4}

    within(main())


def test_a_hook_that_takes_anything_gets_everything() -> None:
    got: list[set[str]] = []

    class Any_:
        def transform_context(self, messages: list[Message], **options: Any) -> list[Message]:
            got.append({*options})
            return messages

    within(make(["ok"], middleware=[Any_()]).prompt("hi"))
    assert got == [{"signal", "context"}]


def test_what_a_hook_makes_up_is_seen_by_the_model_and_not_stored(database: Database) -> None:
    class Remind:
        def transform_context(self, messages: list[Message]) -> list[Message]:
            return [UserMessage("remember me"), AssistantMessage("I do"), *messages]

    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(["ok"])
            await make(provider, middleware=[Remind()], checkpointer=cp, thread_id="t").prompt("hi")
            assert sent(provider) == ["user: remember me", "assistant: I do", "user: hi"]
            assert await history(cp, "t") == ["user: hi", "assistant: ok"]

    within(main())


def test_whatever_a_hook_leaves_is_made_valid() -> None:
    class Vandal:
        def transform_context(self, messages: list[Message]) -> list[Message]:
            calls = [m for m in messages if isinstance(m, AssistantMessage)]
            return [*calls, *messages[::-1], UserMessage([TextContent(" ")])]

    provider = ScriptedProvider([[ToolCall("c1", "look"), ToolCall("c2", "look")], "ok"])
    within(make(provider, tools=[look], middleware=[Vandal()]).prompt("go"))
    assert flaws(provider.requests[1].messages) == []


# --- hooks that fail --------------------------------------------------------------------------------------------------


class Bad:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def transform_context(self, messages: list[Message], *, signal: Any = None) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def explained(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("answer", [None, "text", 5, {"a": 1}, [1], ["text"], [{"role": "user", "content": "x"}]])
def test_a_hook_that_returns_something_else_is_named(database: Database, answer: Any) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            bad = make([], middleware=[Bad(answer)], checkpointer=cp, thread_id="t")
            heard = Heard(bad)
            wrong = answer[0] if isinstance(answer, list) else answer
            what = rf"Bad\.transform_context must return a list of messages.*, got {re.escape(type(wrong).__name__)}"
            with pytest.raises(HookFailed, match=what):
                await bad.prompt("hi")
            check_whole(heard)
            assert heard.of(AgentEnd)[0].stop_reason == "error"
            provider = ScriptedProvider(["ok"])
            assert (await make(provider, checkpointer=cp, thread_id="t").resume()).text == "ok"
            assert sent(provider) == ["user: hi"]

    within(main())


def test_a_hook_that_raises_is_named_and_the_thread_can_go_on(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            hook = Bad(KeyError("mine"))
            provider = ScriptedProvider(["ok"])
            agent = make(provider, middleware=[hook], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(Exception, match="mine") as caught:
                await agent.prompt("hi")
            check_whole(heard)
            assert agent.state.error is caught.value
            hook.answer = [UserMessage("mended")]
            assert (await agent.resume()).text == "ok"
            assert "Bad.transform_context" in explained(caught.value)

    within(main())


def test_a_hook_that_leaves_nothing_is_an_error_that_says_so() -> None:
    agent = make([], middleware=[Bad([])])
    heard = Heard(agent)
    with pytest.raises(InputError, match="nothing to send"):
        within(agent.prompt("hi"))
    check_whole(heard)


@pytest.mark.parametrize(
    "item", [None, object(), "window", lambda messages: messages, SlidingWindow, Middleware, LastTwo]
)
def test_what_is_no_middleware_is_refused_when_the_agent_is_built(item: object) -> None:
    with pytest.raises(InputError, match="is no middleware"):
        make([], middleware=[item])


def test_a_middleware_that_is_not_in_a_list_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="middleware"):
        make([], middleware=SlidingWindow(2))


def test_extra_that_a_hook_made_unstorable_is_named_and_costs_no_message(database: Database) -> None:
    class Spoil:
        def transform_context(self, messages: list[Message], *, context: HookContext) -> list[Message]:
            context.extra["when"] = object()
            return messages

    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make(["ok", "ok again"], middleware=[Spoil()], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(InputError, match=r"extra\['when'\]"):
                await agent.prompt("hi")
            check_whole(heard)
            assert await history(cp, "t") == ["user: hi", "assistant: ok"]
            thread = await cp.load("t")
            assert thread is not None
            assert json.dumps(thread.extra) == "{}"

    within(main())
