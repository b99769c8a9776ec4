"""The scripted provider: plays what it was given, and complains about everything else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from byssus.errors import InputError, Overloaded
from byssus.events import (
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.messages import (
    AssistantMessage,
    Block,
    ImageContent,
    Message,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
    UserMessage,
)
from byssus.providers.base import Model, Provider, Request
from byssus.providers.reply import Reply
from byssus.providers.scripted import ScriptedProvider, ScriptError, Step
from byssus.signals import Signal


def request(*messages: Message) -> Request:
    return Request(Model("test"), list(messages) or [UserMessage("hi")])


async def collect(provider: Provider, asked: Request) -> list[StreamEvent]:
    return [event async for event in provider.stream(asked, Signal())]


def play(step: Step) -> list[StreamEvent]:
    return asyncio.run(collect(ScriptedProvider([step]), request()))


def test_a_string_is_a_text_reply_streamed_word_by_word() -> None:
    assert play("Hello  dear\nworld") == [
        StreamStart(),
        TextStart(0),
        TextDelta(0, "Hello  "),
        TextDelta(0, "dear\n"),
        TextDelta(0, "world"),
        TextEnd(0),
        StreamDone("stop"),
    ]


@pytest.mark.parametrize("text", ["", " ", "\n\n", " a  b ", "你好 世界", "\ud800"])
def test_no_character_of_a_text_is_lost(text: str) -> None:
    assert "".join(event.delta for event in play(text) if isinstance(event, TextDelta)) == text


def test_a_list_of_blocks_is_one_reply_with_an_index_for_each_block() -> None:
    call = ToolCall("c1", "look", {"at": "sky"})
    assert play([ThinkingContent("hm", "s1"), TextContent("I look."), call]) == [
        StreamStart(),
        ThinkingStart(0),
        ThinkingDelta(0, "hm"),
        ThinkingEnd(0, "s1"),
        TextStart(1),
        TextDelta(1, "I "),
        TextDelta(1, "look."),
        TextEnd(1),
        ToolCallStart(2, "c1", "look"),
        ToolCallDelta(2, '{"at":"sky"}'),
        ToolCallEnd(2, call),
        StreamDone("stop"),
    ]


def test_redacted_thinking_is_passed_on() -> None:
    assert ThinkingEnd(0, None, "xyz") in play([ThinkingContent(redacted="xyz")])


def test_a_malformed_tool_call_streams_its_text() -> None:
    call = ToolCall("c1", "look", malformed='{"at": ')
    events = play([call])
    assert ToolCallDelta(0, '{"at": ') in events
    assert ToolCallEnd(0, call) in events


def test_a_message_brings_its_model_stop_reason_and_usage() -> None:
    events = play(AssistantMessage("cut", "length", Usage(1, 2), model="small"))
    assert events[0] == StreamStart("small")
    assert events[-1] == StreamDone("length", Usage(1, 2))


def test_a_scripted_message_is_put_together_again_as_it_was() -> None:
    content: list[Block] = [ThinkingContent("hm", "s1"), TextContent("I look."), ToolCall("c1", "look", {"at": "sky"})]
    message = AssistantMessage(content, "tool_use", Usage(3, 4), "small", "scripted")
    reply = Reply("test", "scripted")
    for event in play(message):
        reply.add(event)
    assert reply.message() == message


def test_an_exception_is_raised_while_streaming() -> None:
    stream = ScriptedProvider([Overloaded("busy")]).stream(request(), Signal())

    async def first() -> StreamEvent:
        return await anext(stream)

    with pytest.raises(Overloaded, match="busy"):
        asyncio.run(first())


def test_a_function_is_asked_with_the_request() -> None:
    provider = ScriptedProvider([lambda asked: f"you said {asked.messages[-1].text}"])
    events = asyncio.run(collect(provider, request(UserMessage("kelp"))))
    assert TextDelta(0, "kelp") in events


def test_an_async_function_is_awaited() -> None:
    async def answer(asked: Request) -> list[ToolCall]:
        await asyncio.sleep(0)
        return [ToolCall("c1", asked.messages[-1].text)]

    assert ToolCallEnd(0, ToolCall("c1", "hi")) in play(answer)


def test_a_function_may_return_an_exception() -> None:
    with pytest.raises(Overloaded):
        play(lambda asked: Overloaded("busy"))


def test_steps_are_played_in_order_one_for_each_call() -> None:
    async def converse() -> None:
        with ScriptedProvider(["one", "two"]) as provider:
            assert TextDelta(0, "one") in await collect(provider, request())
            assert TextDelta(0, "two") in await collect(provider, request())

    asyncio.run(converse())


def test_requests_are_recorded_as_they_were_sent() -> None:
    history: list[Message] = [UserMessage("one")]
    provider = ScriptedProvider(["a", "b"])
    provider.stream(Request(Model("test"), history, "Be brief."), Signal())
    history.append(UserMessage("two"))
    provider.stream(Request(Model("test"), history, "Be brief."), Signal())
    assert [list(asked.messages) for asked in provider.requests] == [
        [UserMessage("one")],
        [UserMessage("one"), UserMessage("two")],
    ]
    assert provider.requests[0].system_prompt == "Be brief."


def test_a_call_that_was_not_scripted_is_an_error_at_once() -> None:
    provider = ScriptedProvider(["only one"])
    provider.stream(request(), Signal())
    with pytest.raises(ScriptError, match=r"model call 2 was not scripted \(the script has 1 steps\).*'and then\?'"):
        provider.stream(request(UserMessage("and then?")), Signal())
    assert len(provider.requests) == 1


def test_a_call_that_was_not_scripted_may_have_no_messages() -> None:
    with pytest.raises(ScriptError, match="model call 1"):
        ScriptedProvider().stream(Request(Model("test"), []), Signal())


def test_a_step_that_nobody_used_is_an_error_when_asked() -> None:
    provider = ScriptedProvider(["one", "two"])
    provider.stream(request(), Signal())
    with pytest.raises(ScriptError, match="1 of 2 scripted steps were never used"):
        provider.assert_done()


def test_a_step_that_nobody_used_is_an_error_at_the_end_of_with() -> None:
    with pytest.raises(ScriptError, match="never used"), ScriptedProvider(["one"]):
        pass


def test_another_error_is_not_hidden_by_unused_steps() -> None:
    with pytest.raises(KeyError), ScriptedProvider(["one"]):
        raise KeyError


def test_a_script_that_was_played_to_its_end_is_fine() -> None:
    with ScriptedProvider(["one"]) as provider:
        provider.stream(request(), Signal())
    provider.assert_done()


class Hurried(asyncio.SelectorEventLoop):
    """An event loop in which no time passes: it notes the pauses, and goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self.pauses.append(delay)
        return super().call_later(0, callback, *args, context=context)


def test_a_pace_is_a_pause_before_each_piece_of_a_reply() -> None:
    with asyncio.Runner(loop_factory=Hurried) as runner:
        step: list[Any] = [ThinkingContent("hm"), TextContent("one two three"), ToolCall("c1", "look")]
        paced = runner.run(collect(ScriptedProvider([step], pace=7), request()))
        loop = runner.get_loop()
        assert isinstance(loop, Hurried)
        assert [pause for pause in loop.pauses if pause == 7] == [7] * 5
    assert paced == play(step)


@pytest.mark.parametrize("pace", [-1, True, "1", float("nan"), float("inf")])
def test_a_pace_is_a_number_of_seconds(pace: Any) -> None:
    with pytest.raises(InputError, match="pace must be a number of seconds from 0 up"):
        ScriptedProvider(pace=pace)


def test_a_script_that_is_repeated_answers_any_number_of_calls() -> None:
    provider = ScriptedProvider(["one", "two"], repeat=True)
    assert repr(provider) == "ScriptedProvider(0 of 2 steps used)"
    for text in ["one", "two", "one", "two", "one"]:
        assert TextDelta(0, text) in asyncio.run(collect(provider, request()))
    provider.assert_done()
    assert repr(provider) == "ScriptedProvider(2 of 2 steps used)"


def test_a_script_that_is_repeated_has_steps_and_uses_each() -> None:
    with pytest.raises(ScriptError, match="model call 1 was not scripted"):
        ScriptedProvider(repeat=True).stream(request(), Signal())
    provider = ScriptedProvider(["one", "two"], repeat=True)
    provider.stream(request(), Signal())
    with pytest.raises(ScriptError, match="1 of 2 scripted steps were never used"):
        provider.assert_done()


def test_a_reply_cannot_contain_what_no_model_says() -> None:
    with pytest.raises(ScriptError, match="cannot contain ImageContent"):
        play([ImageContent("AAAA")])
    with pytest.raises(InputError):
        play([42])
