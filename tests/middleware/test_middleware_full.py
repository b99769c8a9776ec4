"""All hooks: they chain, they see what they should, and what they break can be mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest

from byssus import Agent, Deny, HookContext, Middleware, Model, Redact, RunResult, ToolContext, tool
from byssus.checkpointer import Checkpointer
from byssus.errors import HookFailed, InputError, NetworkFailed
from byssus.events import (
    Event,
    MessageEnd,
    ToolExecutionStart,
    TurnEnd,
)
from byssus.messages import (
    AssistantMessage,
    Message,
    TextContent,
    ToolCall,
    ToolResultMessage,
    Usage,
    UserMessage,
    encode,
)
from byssus.middleware import HOOKS
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole, hooks, look, make, within
from tests.support.databases import Database

T = TypeVar("T")


# --- tools of these tests ---------------------------------------------------------------------------------------------


def stored(thread: Any) -> list[str]:
    return [f"{message.role}: {message.text}" for message in thread.messages]


async def content(cp: Checkpointer) -> str:
    """All that the database holds of a thread, in one text."""
    thread = await cp.load("t")
    assert thread is not None
    return "\n".join([*map(encode, thread.messages), str(thread.extra)])


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

    async def main() -> RunResult:
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
            ends: list[tuple[RunResult, int]] = []

            async def on_run_end(result: RunResult) -> None:
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

    def fail(result: RunResult) -> None:
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


# --- hooks that fail --------------------------------------------------------------------------------------------------

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
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *((name, answer) for name, answers in WRONG.items() for answer in answers),
        *((name, KeyError("mine")) for name in HOOKS),
    ],
    ids=lambda value: value if isinstance(value, str) and value in HOOKS else repr(value)[:30],
)
def test_a_hook_that_fails_is_named_and_the_thread_can_go_on(
    database: Database, name: str, answer: Any, mode: str
) -> None:
    COUNTED.clear()

    async def main() -> None:
        async with database.checkpointer() as cp:
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
                assert (result.text, result.stop_reason) == ("mended", "stop")
                sent = provider.requests[0].messages
                replies = [message for message in sent if isinstance(message, AssistantMessage)]
                wanted = [call.id for reply in replies for call in reply.tool_calls]
                assert [m.tool_call_id for m in sent if isinstance(m, ToolResultMessage)] == wanted
                assert len(COUNTED) == ran  # what had run, or was refused, does not run again

    within(main())


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

    async def on_run_end(result: RunResult) -> None:
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


# --- aborts between a reply and its hooks -----------------------------------------------------------------------------


class Shout:
    async def after_model_response(self, message: AssistantMessage, *, signal: Any = None) -> AssistantMessage:
        return msgspec.structs.replace(message, content=[TextContent(message.text.upper())])


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
