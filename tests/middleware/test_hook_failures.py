"""Hooks that fail, hang or are none: each is named, and the thread can go on."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

import msgspec
import pytest

from byssus import (
    Agent,
    Deny,
    HookContext,
    Middleware,
    Redact,
    RunResult,
    SlidingWindow,
    ToolCall,
    UserMessage,
    tool,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import HookFailed, InputError
from byssus.events import (
    AgentEnd,
    Event,
)
from byssus.messages import AssistantMessage, Message, TextContent, ToolResultMessage
from byssus.middleware import HOOKS
from byssus.providers.scripted import ScriptedProvider
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole, history, hooks, look, make, sent, within
from tests.support.checkpointers import content
from tests.support.databases import Database

T = TypeVar("T")


SECRET = "sk-12345"


class Shout:
    async def after_model_response(self, message: AssistantMessage, *, signal: Any = None) -> AssistantMessage:
        return msgspec.structs.replace(message, content=[TextContent(message.text.upper())])


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
    "item", [None, object(), "window", lambda messages: messages, SlidingWindow, Middleware, Shout]
)
def test_what_is_no_middleware_is_refused_when_the_agent_is_built(item: object) -> None:
    with pytest.raises(InputError, match="is not a middleware"):
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


WRONG: dict[str, list[Any]] = {
    "transform_context": [None, "text", [1]],
    "convert_to_llm": [None, 5, ["text"]],
    "transform_system_prompt": [None, 5, ["text"]],
    "after_model_response": ["text", UserMessage("x"), False],
    "before_tool_call": [True, False, "text", [1], ToolCall("other", "look"), ToolCall("c", "delete")],
    "after_tool_call": ["text", AssistantMessage("x"), True],
    "should_stop_after_turn": ["no", 1, [True]],
}


class Broken:
    """A middleware with one hook, which raises or returns what it was given."""

    def __init__(self, name: str, answer: Any) -> None:
        self.answer = answer
        setattr(self, name, self._hook)

    async def _hook(self, *args: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@tool
def count(extra: int = 0) -> str:
    COUNTED.append(1)
    return f"the secret is {SECRET}"


COUNTED: list[int] = []


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_fails_is_named_and_the_thread_can_go_on(database: Database, name: str, mode: str) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            for answer in (*WRONG.get(name, ()), KeyError("mine")):
                await fails(cp, name, answer, mode)
                await cp.delete_thread("t")

    within(main())


async def fails(cp: Checkpointer, name: str, answer: Any, mode: str) -> None:
    """One hook, with one thing that it must not return, or raises."""
    COUNTED.clear()
    options: Any = {"tools": [count, look], "checkpointer": cp, "thread_id": "t", "tool_mode": mode}
    calls = [ToolCall("c", "count"), ToolCall("d", "count")]
    agent = make([calls, "ok"], middleware=[Broken(name, answer)], **options)
    heard = Heard(agent)
    with pytest.raises(HookFailed, match=rf"Broken\.{name}") as caught:
        await agent.prompt("hi")
    check_whole(heard)
    assert agent.state.error is caught.value
    if isinstance(answer, Exception):
        assert caught.value.__cause__ is answer
    ran = len(COUNTED)
    if name == "before_tool_call":
        assert ran == 0
    if name == "after_tool_call":
        assert SECRET not in await content(cp)
        assert SECRET not in repr(heard)
    for goes_on in ("prompt", "resume"):
        thread = await cp.load("t")
        assert thread is not None
        if goes_on == "resume" and thread.messages[-1].role == "assistant":
            break  # there is nothing to resume
        provider = ScriptedProvider(["mended"])
        mended = make(provider, **options)
        result = await (mended.prompt("again") if goes_on == "prompt" else mended.resume())
        assert (result.text, result.stop_reason) == ("mended", "stop"), repr(answer)
        sent = provider.requests[0].messages
        replies = [message for message in sent if isinstance(message, AssistantMessage)]
        wanted = [call.id for reply in replies for call in reply.tool_calls]
        assert [m.tool_call_id for m in sent if isinstance(m, ToolResultMessage)] == wanted
        assert len(COUNTED) == ran  # what had run, or was refused, does not run again


@pytest.mark.parametrize("name", ["before_tool_call", "after_tool_call", "should_stop_after_turn"])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("durable", [True, False], ids=["stored", "in memory"])
def test_the_same_agent_goes_on_when_its_hook_is_mended(
    database: Database, name: str, mode: str, durable: bool
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            options: Any = {"checkpointer": cp, "thread_id": "t"} if durable else {}
            broken = Broken(name, KeyError("mine"))
            provider = ScriptedProvider([[ToolCall("c", "look"), ToolCall("d", "look")], "resumed", "prompted"])
            agent = make(provider, tools=[look], tool_mode=mode, middleware=[broken], **options)
            with pytest.raises(HookFailed):
                await agent.prompt("hi")
            broken.answer = None
            assert (await agent.resume()).text == "resumed"
            assert (await agent.prompt("more")).text == "prompted"
            sent = provider.requests[-1].messages
            assert [m.role for m in sent] == [
                "user",
                "assistant",
                "tool_result",
                "tool_result",
                "assistant",
                "user",
            ]
            results = [message.text for message in sent if isinstance(message, ToolResultMessage)]
            wanted = {
                "before_tool_call": "A check around this call failed: it was not run.",
                "after_tool_call": "A check around this call failed: it may have taken effect, but its result is "
                "withheld.",
                "should_stop_after_turn": "seen here",
            }[name]
            assert results[0] == wanted
            if name == "should_stop_after_turn":
                assert results[1] == wanted
            else:  # it was refused like the first, or not even begun
                assert results[1] in (wanted, "This call was not started, because a hook failed.")
            if durable:
                thread = await cp.load("t")
                assert thread is not None
                assert thread.messages == agent.state.messages

    within(main())


# --- an abort ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "on_run_end"])
def test_an_abort_ends_a_run_whose_hook_waits_for_ever_and_what_it_would_have_checked_is_withheld(
    database: Database, name: str
) -> None:
    COUNTED.clear()

    async def main() -> None:
        async with database.checkpointer() as cp:
            agent: Agent

            async def wait(*args: Any) -> Any:
                agent.abort()
                await asyncio.Event().wait()

            provider = ScriptedProvider([[ToolCall("c", "count")], "never"])
            options: Any = {"checkpointer": cp, "thread_id": "t", "abort_grace": 0.0}
            agent = make(provider, tools=[count], middleware=[hooks(**{name: wait})], **options)
            heard = Heard(agent)
            result = await agent.prompt("hi")
            check_whole(heard)
            assert (result.stop_reason, result.error) == ("aborted", None)
            if name in ("before_tool_call", "after_model_response"):
                assert COUNTED == []
            if name != "should_stop_after_turn":
                assert SECRET not in await content(cp)
            mended = make(["mended"], checkpointer=cp, thread_id="t")
            assert (await mended.prompt("again")).text == "mended"

    within(main())


def test_an_aborted_run_still_tells_its_end() -> None:
    ends: list[str] = []

    async def on_run_end(result: RunResult[Any]) -> None:
        await asyncio.sleep(0)
        ends.append(result.stop_reason)

    @tool
    def stop() -> str:
        agent.abort()
        return "stopped"

    agent = make([[ToolCall("c", "stop")]], tools=[stop], middleware=[hooks(on_run_end=on_run_end)])
    assert within(agent.prompt("hi")).stop_reason == "aborted"
    assert ends == ["aborted"]


def test_a_hook_that_times_out_by_itself_has_failed_and_was_not_aborted() -> None:
    async def impatient(text: str) -> str:
        raise TimeoutError("no answer from the policy service")

    with pytest.raises(HookFailed, match="policy service"):
        within(make([], middleware=[hooks(transform_system_prompt=impatient)]).prompt("hi"))


# --- aborts between a reply and its hooks -----------------------------------------------------------------------------


class Stuck:
    async def after_model_response(self, message: AssistantMessage, *, signal: Any = None) -> AssistantMessage:
        await asyncio.Event().wait()
        return message


def abort_when_done(agent: Agent) -> None:
    def listen(event: Event) -> None:
        if event.type == "message_update" and event.stream_event.type == "done":
            agent.abort()

    agent.subscribe(listen)


def test_a_whole_reply_is_kept_although_the_abort_came_before_its_hooks() -> None:
    agent = make(ScriptedProvider(["all said"]), middleware=[Shout()])
    abort_when_done(agent)
    result = within(agent.prompt("go"))
    assert (result.text, result.stop_reason) == ("ALL SAID", "aborted")
    assert [message.text for message in agent.state.messages] == ["go", "ALL SAID"]


def test_a_reply_whose_hook_hangs_in_an_aborted_run_is_withheld_and_the_thread_can_go_on(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            options = {"checkpointer": cp, "thread_id": "t", "abort_grace": 0.05}
            agent = make(ScriptedProvider(["a secret"]), middleware=[Stuck()], **options)
            abort_when_done(agent)
            result = await agent.prompt("go")
            assert (result.text, result.stop_reason) == ("", "aborted")
            thread = await cp.load("t")
            assert thread is not None
            assert [message.text for message in thread.messages] == ["go", ""]
            assert (await make(ScriptedProvider(["once more"]), **options).resume()).text == "once more"

    within(main())


# --- what is no middleware --------------------------------------------------------------------------------------------


def test_a_hook_that_cannot_be_called_is_refused_when_the_agent_is_built() -> None:
    class Short(Middleware):
        def after_tool_call(self, call: ToolCall) -> None:  # type: ignore[override]
            pass

    with pytest.raises(InputError, match=r"Short\.after_tool_call\(.*declare call, result"):
        make([], middleware=[Short()])


def test_a_hook_that_is_no_function_is_refused_when_the_agent_is_built() -> None:
    with pytest.raises(InputError, match=r"before_tool_call must be a function, got Deny"):
        make([], middleware=[hooks(before_tool_call=Deny("no"))])


def test_a_hook_set_on_an_instance_counts() -> None:
    policy: Any = Middleware()
    policy.before_tool_call = lambda call: Deny("no")
    provider = ScriptedProvider([[ToolCall("c", "look")], "ok"])
    within(make(provider, tools=[look], middleware=[policy]).prompt("hi"))
    assert "blocked" in provider.requests[1].messages[-1].text


@pytest.mark.parametrize("middleware", [Redact("x"), "window", None, 5])
def test_middleware_that_is_no_list_is_refused(middleware: Any) -> None:
    with pytest.raises(InputError, match="middleware must be a list"):
        make([], middleware=middleware)


def test_the_hooks_of_a_middleware_are_called_with_what_their_base_declares() -> None:
    """So that a subclass may call super(), and a type checker knows the arguments."""

    class Loud(Middleware):
        async def after_tool_call(
            self, call: ToolCall, result: ToolResultMessage, *, signal: Signal | None = None
        ) -> ToolResultMessage | None:
            assert signal is not None
            return await super().after_tool_call(call, result, signal=signal)

    assert within(make([[ToolCall("c", "look")], "ok"], tools=[look], middleware=[Loud()]).prompt("hi")).text == "ok"
