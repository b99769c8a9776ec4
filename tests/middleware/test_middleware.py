"""Hooks: they chain, they see what they should, and decide what the model sees and not what the thread holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest

from byssus import (
    Deny,
    HookContext,
    Middleware,
    Model,
    Redact,
    RunResult,
    ToolCall,
    ToolContext,
    UserMessage,
    tool,
)
from byssus.errors import HookFailed, NetworkFailed
from byssus.events import (
    MessageEnd,
    ToolExecutionStart,
    TurnEnd,
)
from byssus.messages import AssistantMessage, Message, TextContent, ToolResultMessage, Usage
from byssus.middleware import HOOKS
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole, history, hooks, look, make, sent, within
from tests.support.checkpointers import content
from tests.support.databases import Database
from tests.support.histories import flaws

T = TypeVar("T")


def stored(thread: Any) -> list[str]:
    return [f"{message.role}: {message.text}" for message in thread.messages]


SECRET = "sk-12345"


@tool
def leak() -> str:
    return f"the key is {SECRET}"


class Mask:
    """A redactor as a user would write it."""

    def after_tool_call(self, call: ToolCall, result: ToolResultMessage) -> ToolResultMessage:
        hidden = [TextContent(block.text.replace(SECRET, "***")) for block in result.content]  # type: ignore[union-attr]
        return msgspec.structs.replace(result, content=hidden)


class Decorate:
    """Remembers what it was shown and wraps it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def after_tool_call(self, call: ToolCall, result: ToolResultMessage) -> ToolResultMessage:
        self.seen.append(result.text)
        return msgspec.structs.replace(result, content=f"<{result.text}>")


# --- what hooks see ---------------------------------------------------------------------------------------------------


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


# --- chaining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redactor", [Mask(), Redact(r"sk-\d+", replacement="***")], ids=["mine", "ready-made"])
def test_a_redactor_followed_by_a_decorator_leaks_neither_to_the_model_nor_to_the_database(
    database: Database, redactor: object
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            provider, decorator = ScriptedProvider([[ToolCall("c", "leak")], "ok"]), Decorate()
            agent = make(provider, tools=[leak], middleware=[redactor, decorator], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            await agent.prompt("go")
            assert decorator.seen == ["the key is ***"]
            assert provider.requests[1].messages[-1].text == "<the key is ***>"
            assert SECRET not in await content(cp)
            assert SECRET not in repr(heard)

    within(main())


def test_each_hook_sees_what_the_one_before_made_of_it() -> None:
    def grow(letter: str) -> Any:
        def add_text(message: Any) -> Any:
            return msgspec.structs.replace(message, content=[*message.content, TextContent(letter)])

        return hooks(
            transform_context=lambda messages: [*messages, UserMessage(letter)],
            convert_to_llm=lambda messages: [*messages[:-1], add_text(messages[-1])],
            transform_system_prompt=lambda text: text + letter,
            after_model_response=add_text,
            before_tool_call=lambda call: {"at": call.arguments["at"] + letter},
            after_tool_call=lambda call, result: add_text(result),
        )

    provider = ScriptedProvider([[ToolCall("c", "look", {"at": ""})], "ok"])
    agent = make(provider, tools=[look], system_prompt="s", middleware=[grow("a"), Middleware(), grow("b")])
    result = within(agent.prompt("hi"))
    first = provider.requests[0]
    assert [message.text for message in first.messages] == ["hi", "a", "bab"]
    assert first.system_prompt == "sab"
    assert result.text == "okab"
    assert [m.text for m in result.messages if isinstance(m, ToolResultMessage)] == ["seen abab"]


def test_what_is_chosen_is_converted_whatever_the_order_of_the_middleware() -> None:
    redactor = Redact(SECRET)
    adder = hooks(transform_context=lambda messages: [UserMessage(SECRET), *messages])
    for middleware in ([redactor, adder], [adder, redactor]):
        provider = ScriptedProvider(["ok"])
        within(make(provider, middleware=middleware).prompt("hi"))
        assert [message.text for message in provider.requests[0].messages] == ["[redacted]", "hi"]


def test_hooks_may_be_plain_or_async_functions_methods_or_any_awaitable() -> None:
    async def as_coroutine(text: str) -> str:
        return text + "a"

    class AsMethod:
        @staticmethod
        def transform_system_prompt(text: str) -> Awaitable[str]:
            return as_coroutine(text)

    provider = ScriptedProvider(["ok"])
    plain = hooks(transform_system_prompt=lambda text: text + "p")
    within(make(provider, middleware=[plain, hooks(transform_system_prompt=as_coroutine), AsMethod()]).prompt("hi"))
    assert provider.requests[0].system_prompt == "paa"


def test_signal_and_context_are_given_to_those_who_declare_them_and_to_no_others() -> None:
    got: list[Any] = []

    def with_signal(messages: list[Message], signal: Signal) -> list[Message]:
        got.append(signal)
        return messages

    def with_context(messages: list[Message], *, context: HookContext) -> list[Message]:
        got.append(context)
        return messages

    def with_neither(messages: list[Message]) -> list[Message]:
        got.append(None)
        return messages

    def whose_messages_have_that_name(context: list[Message]) -> list[Message]:
        got.append(context)
        return context

    each = (with_signal, with_context, with_neither, whose_messages_have_that_name)
    within(make(["ok"], middleware=[hooks(transform_context=function) for function in each]).prompt("hi"))
    assert isinstance(got[0], Signal)
    assert isinstance(got[1], HookContext)
    assert got[2] is None
    assert [message.text for message in got[3]] == ["hi"]


def test_the_context_tells_where_a_hook_is_called(database: Database) -> None:
    contexts: list[HookContext] = []

    def note(text: str, context: HookContext) -> str:
        contexts.append(context)
        return text

    async def main() -> RunResult[Any]:
        async with database.checkpointer() as cp:
            await cp.create_user("U", user_id="u")
            options: Any = {"checkpointer": cp, "thread_id": "t", "user_id": "u"}
            return await make(["ok"], middleware=[hooks(transform_system_prompt=note)], **options).prompt("hi")

    result = within(main())
    (context,) = contexts
    assert (context.thread_id, context.user_id, context.run_id) == ("t", "u", result.run_id)
    assert context.provider is not None
    assert (context.provider.name, context.model) == ("scripted", Model("m"))


def test_every_hook_may_write_to_extra_which_is_stored(database: Database) -> None:
    def count(name: str) -> Callable[..., Any]:
        def hook(*args: Any, context: HookContext) -> Any:
            context.extra[name] = context.extra.get(name, 0) + 1
            return args[0] if name in ("transform_context", "convert_to_llm", "transform_system_prompt") else None

        return hook

    async def main() -> None:
        async with database.checkpointer() as cp:
            counters = hooks(**{name: count(name) for name in HOOKS})
            for _ in range(2):  # the second agent is as good as another process
                script: list[Step] = [[ToolCall("c", "look")], "ok"]
                await make(script, tools=[look], middleware=[counters], checkpointer=cp, thread_id="t").prompt("hi")
            thread = await cp.load("t")
            assert thread is not None
            assert thread.extra == {
                "transform_context": 4,
                "convert_to_llm": 4,
                "transform_system_prompt": 4,
                "after_model_response": 4,
                "before_tool_call": 2,
                "after_tool_call": 2,
                "should_stop_after_turn": 4,
                "on_run_end": 2,
            }

    within(main())


def test_extra_cannot_be_replaced_by_mistake() -> None:
    def forget(text: str, context: HookContext) -> str:
        context.extra = {"mine": 1}  # type: ignore[misc]
        return text

    with pytest.raises(HookFailed, match="immutable"):
        within(make([], middleware=[hooks(transform_system_prompt=forget)]).prompt("hi"))


# --- what is sent, and what is stored ---------------------------------------------------------------------------------


def test_convert_to_llm_changes_what_is_sent_and_never_what_is_stored(database: Database) -> None:
    def vandalise(messages: list[Message]) -> list[Message]:
        for message in messages:
            for block in message.content:  # type: ignore[union-attr]
                if isinstance(block, ToolCall):
                    block.arguments["at"] = "elsewhere"
            message.content.append(TextContent("!"))  # type: ignore[union-attr]
        return [UserMessage("made up"), *messages]

    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider([[ToolCall("c", "look", {"at": "here"})], "ok"])
            vandal = hooks(convert_to_llm=vandalise)
            agent = make(provider, tools=[look], middleware=[vandal], checkpointer=cp, thread_id="t")
            await agent.prompt("hi")
            assert [m.text for m in provider.requests[1].messages] == ["made up", "hi!", "!", "seen here!"]
            thread = await cp.load("t")
            assert thread is not None
            assert thread.messages == agent.state.messages
            assert stored(thread) == ["user: hi", "assistant: ", "tool_result: seen here", "assistant: ok"]
            assert "elsewhere" not in await content(cp)

    within(main())


def test_a_changed_reply_is_stored_told_and_acted_upon(database: Database) -> None:
    def strip_calls(message: AssistantMessage) -> AssistantMessage:
        return AssistantMessage("I will not.")

    async def main() -> None:
        async with database.checkpointer() as cp:
            reply = AssistantMessage([ToolCall("c", "look")], "tool_use", Usage(3, 4))
            guard = hooks(after_model_response=strip_calls)
            agent = make([reply], tools=[look], middleware=[guard], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("hi")
            assert (result.text, result.stop_reason, result.usage.total) == ("I will not.", "stop", 7)
            assert heard.of(ToolExecutionStart) == []
            ends = [e.message for e in heard.of(MessageEnd) if isinstance(e.message, AssistantMessage)]
            assert [message.text for message in ends] == ["I will not."]
            assert (ends[0].model, ends[0].provider) == ("m", "scripted")
            thread = await cp.load("t")
            assert thread is not None
            assert stored(thread) == ["user: hi", "assistant: I will not."]

    within(main())


def test_calls_that_a_hook_adds_to_a_reply_are_run_each_under_a_key_of_its_own() -> None:
    keys: list[str] = []

    @tool
    def act(context: ToolContext) -> str:
        keys.append(context.idempotency_key)
        return "done"

    def add_call(message: AssistantMessage) -> AssistantMessage | None:
        return AssistantMessage([ToolCall("c", "act")]) if message.text == "again" else None

    agent = make(["again", "again", "done"], tools=[act], middleware=[hooks(after_model_response=add_call)])
    assert within(agent.prompt("hi")).text == "done"
    assert len({*keys}) == 2


def test_the_prompt_and_the_system_prompt_can_differ_from_turn_to_turn() -> None:
    turns: list[int] = []

    def number(text: str) -> str:
        turns.append(1)
        return f"{text} turn {len(turns)}"

    provider = ScriptedProvider([[ToolCall("c", "look")], "ok"])
    within(
        make(
            provider, tools=[look], system_prompt="Be nice,", middleware=[hooks(transform_system_prompt=number)]
        ).prompt("hi")
    )
    assert [request.system_prompt for request in provider.requests] == ["Be nice, turn 1", "Be nice, turn 2"]


@pytest.mark.parametrize("name", ["transform_context", "convert_to_llm"])
def test_a_hook_that_cuts_the_question_off_leaves_something_to_answer(name: str) -> None:
    provider = ScriptedProvider(["a", "b"])
    agent = make(provider, middleware=[hooks(**{name: lambda messages: messages[:-1] or messages})])
    within(agent.prompt("one"))
    within(agent.prompt("two"))
    assert [f"{m.role}: {m.text}" for m in provider.requests[1].messages] == [
        "user: one",
        "assistant: a",
        "user: (Go on.)",
    ]


def test_a_redactor_in_front_of_a_window_is_not_bypassed_when_the_window_cuts_between_call_and_result() -> None:
    @tool
    def log_in(key: str) -> str:
        return "fine"

    redactor = Redact(SECRET)
    mask = hooks(transform_context=redactor.convert_to_llm)
    window = hooks(transform_context=lambda messages: messages[-1:])
    for middleware in ([mask, window], [window, redactor], [redactor, window]):
        provider = ScriptedProvider([[ToolCall("c", "log_in", {"key": SECRET})], "ok"])
        within(make(provider, tools=[log_in], middleware=middleware).prompt("hi"))
        sent = provider.requests[1].messages
        assert [message.role for message in sent][-2:] == ["assistant", "tool_result"]
        assert SECRET not in repr(sent)


# --- before and after a tool ------------------------------------------------------------------------------------------


def test_a_denied_call_does_not_run_and_the_model_reads_why() -> None:
    ran: list[str] = []

    @tool
    def act(name: str) -> str:
        ran.append(name)
        return "done"

    def guard(call: ToolCall) -> Deny | None:
        return Deny("not on Sundays") if call.arguments["name"] == "bad" else None

    def later(call: ToolCall) -> None:
        asked.append(call.arguments["name"])

    asked: list[str] = []
    provider = ScriptedProvider([[ToolCall("1", "act", {"name": "bad"}), ToolCall("2", "act", {"name": "good"})], "ok"])
    agent = make(provider, tools=[act], middleware=[hooks(before_tool_call=guard), hooks(before_tool_call=later)])
    heard = Heard(agent)
    result = within(agent.prompt("go"))
    check_whole(heard)
    assert (ran, asked) == (["good"], ["good"])
    denied, done = (m for m in result.messages if isinstance(m, ToolResultMessage))
    assert denied.is_error
    assert denied.text == "This call was blocked: not on Sundays"
    assert done.text == "done"
    assert provider.requests[1].messages[-2:] == [denied, done]


def edits() -> list[Any]:
    def in_place(call: ToolCall) -> None:
        call.arguments["at"] = "there"

    return [
        lambda call: {"at": "there"},
        lambda call: msgspec.structs.replace(call, arguments={"at": "there"}),
        in_place,
    ]


@pytest.mark.parametrize("edit", edits(), ids=["a dict", "a call", "in place"])
def test_edited_arguments_are_run_and_told_while_the_stored_reply_keeps_the_models_own(
    database: Database, edit: Callable[[ToolCall], Any]
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            afterwards: list[Any] = []

            def after_tool_call(call: ToolCall, result: ToolResultMessage) -> None:
                afterwards.append(call.arguments)

            middleware = [hooks(before_tool_call=edit), hooks(after_tool_call=after_tool_call)]
            call = ToolCall("c", "look", {"at": "here"})
            agent = make([[call], "ok"], tools=[look], middleware=middleware, checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("hi")
            assert [m.text for m in result.messages] == ["hi", "", "seen there", "ok"]
            assert [event.arguments for event in heard.of(ToolExecutionStart)] == [{"at": "there"}]
            assert afterwards == [{"at": "there"}]
            thread = await cp.load("t")
            assert thread is not None
            for messages in (thread.messages, agent.state.messages):
                reply = messages[1]
                assert isinstance(reply, AssistantMessage)
                assert reply.tool_calls == [ToolCall("c", "look", {"at": "here"})]

    within(main())


def test_edited_arguments_are_validated() -> None:
    provider = ScriptedProvider([[ToolCall("c", "look")], "ok"])
    within(make(provider, tools=[look], middleware=[hooks(before_tool_call=lambda call: {"at": [1]})]).prompt("hi"))
    result = provider.requests[1].messages[-1]
    assert isinstance(result, ToolResultMessage)
    assert result.is_error
    assert "at" in result.text


def test_a_hook_can_mend_arguments_that_were_no_json() -> None:
    provider = ScriptedProvider([[ToolCall("c", "look", malformed='{"at": ')], "ok"])
    within(make(provider, tools=[look], middleware=[hooks(before_tool_call=lambda call: {"at": "home"})]).prompt("hi"))
    assert provider.requests[1].messages[-1].text == "seen home"


def test_a_tool_that_changes_its_arguments_does_not_change_the_history() -> None:
    @tool
    def pop(items: list[Any]) -> str:
        items.clear()
        return "empty"

    agent = make([[ToolCall("c", "pop", {"items": [1, [2]]})], "ok"], tools=[pop])
    within(agent.prompt("hi"))
    reply = agent.state.messages[1]
    assert isinstance(reply, AssistantMessage)
    assert reply.tool_calls[0].arguments == {"items": [1, [2]]}


def test_a_result_stays_with_its_call_whatever_a_hook_writes_into_it() -> None:
    provider = ScriptedProvider([[ToolCall("c", "look")], "ok"])
    swap = hooks(after_tool_call=lambda call, result: ToolResultMessage("other", "other", "swapped"))
    within(make(provider, tools=[look], middleware=[swap]).prompt("hi"))
    result = provider.requests[1].messages[-1]
    assert isinstance(result, ToolResultMessage)
    assert (result.tool_call_id, result.tool_name, result.text) == ("c", "look", "swapped")


def test_after_tool_call_sees_the_failures_of_tools_too() -> None:
    @tool
    def fail() -> str:
        raise ValueError(SECRET)

    provider = ScriptedProvider([[ToolCall("1", "fail"), ToolCall("2", f"no-{SECRET}")], "ok"])
    within(make(provider, tools=[fail], middleware=[Redact(SECRET)]).prompt("hi"))
    assert [SECRET in message.text for message in provider.requests[1].messages] == [False] * 4


# --- ending a run -----------------------------------------------------------------------------------------------------


def test_should_stop_after_turn_ends_the_run_behind_the_results(database: Database) -> None:
    seen: list[tuple[str, list[str]]] = []

    def stop(message: AssistantMessage, results: list[ToolResultMessage]) -> bool:
        seen.append((message.text, [result.text for result in results]))
        results.clear()  # the list is the hook's own
        return len(seen) == 2

    async def main() -> None:
        async with database.checkpointer() as cp:
            script: list[Step] = [[ToolCall("1", "look")], [TextContent("two"), ToolCall("2", "look")]]
            others = hooks(should_stop_after_turn=lambda message, results: len(results) > 1)
            agent = make(
                script,
                tools=[look],
                middleware=[hooks(should_stop_after_turn=stop), others],
                checkpointer=cp,
                thread_id="t",
            )
            heard = Heard(agent)
            result = await agent.prompt("go")
            check_whole(heard)
            assert (result.stop_reason, result.error) == ("stopped", None)
            assert seen == [("", ["seen here"]), ("two", ["seen here"])]
            assert [len(event.tool_results) for event in heard.of(TurnEnd)] == [1, 1]
            thread = await cp.load("t")
            assert thread is not None
            assert len(thread.messages) == 5
            resumed = ScriptedProvider(["on"])
            assert (await make(resumed, tools=[look], checkpointer=cp, thread_id="t").resume()).text == "on"

    within(main())


def test_on_run_end_sees_the_result_after_its_messages_are_stored(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            ends: list[tuple[RunResult[Any], int]] = []

            async def on_run_end(result: RunResult[Any]) -> None:
                thread = await cp.load("t")
                assert thread is not None
                ends.append((result, len(thread.messages)))

            options: Any = {"checkpointer": cp, "thread_id": "t", "max_retries": 0}
            agent = make(["ok", NetworkFailed("gone")], middleware=[hooks(on_run_end=on_run_end)], **options)
            good, bad = await agent.prompt("hi"), await agent.prompt("again")
            assert ends == [(good, 2), (bad, 4)]
            assert isinstance(bad.error, NetworkFailed)

    within(main())


def test_a_failing_on_run_end_does_not_keep_the_others_from_hearing() -> None:
    heard: list[str] = []

    def fail(result: RunResult[Any]) -> None:
        raise ValueError("full")

    agent = make(["ok", "ok"], middleware=[hooks(on_run_end=fail), hooks(on_run_end=lambda r: heard.append(r.text))])
    with pytest.raises(HookFailed, match=r"on_run_end failed: ValueError: full"):
        within(agent.prompt("hi"))
    assert heard == ["ok"]


def test_extra_is_stored_although_a_later_hook_fails(database: Database) -> None:
    def remember(text: str, context: HookContext) -> str:
        context.extra["mine"] = 1
        return text

    def fail(*args: Any) -> None:
        raise ValueError("full")

    async def main() -> None:
        async with database.checkpointer() as cp:
            for name in ("on_run_end", "after_model_response"):
                middleware = [hooks(transform_system_prompt=remember), hooks(**{name: fail})]
                with pytest.raises(HookFailed, match="full"):
                    await make(["ok"], middleware=middleware, checkpointer=cp, thread_id=name).prompt("hi")
                thread = await cp.load(name)
                assert thread is not None
                assert thread.extra == {"mine": 1}

    within(main())
