"""The Anthropic provider, over real HTTP to a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from byssus.errors import (
    AuthenticationFailed,
    ContentRefused,
    ContextTooLong,
    InputError,
    InvalidRequest,
    NetworkFailed,
    Overloaded,
    ProviderError,
    RateLimited,
)
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
    ImageContent,
    Message,
    Note,
    ReplyStop,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    Usage,
    UserMessage,
)
from byssus.providers.anthropic import AnthropicProvider, _call_id, _clean
from byssus.providers.base import Model, Prices, Reasoning, Request, ToolSpec
from byssus.providers.reply import Reply
from byssus.signals import Signal
from tests.support.wire import Anthropic, Server
from tests.support.wire import Reply as WireReply

OLD = Model("claude-haiku-4-5")  # thinks by budgets, takes a temperature
NEW = Model("claude-opus-5")  # thinks by effort, takes no temperature
KEY = "sk-ant-secret"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(provider: AnthropicProvider, *messages: Message, model: Model = OLD, **request: Any) -> list[StreamEvent]:
    return asyncio.run(collect(provider, Request(model, list(messages) or [UserMessage("hi")], **request)))


async def collect(provider: AnthropicProvider, request: Request) -> list[StreamEvent]:
    return [event async for event in provider.stream(request, Signal())]


def sent(*messages: Message, model: Model = OLD, **request: Any) -> dict[str, Any]:
    """The body that a request puts on the wire."""
    with Server([Anthropic.answer("ok")]) as server:
        ask(AnthropicProvider(KEY, server.url, cache=False), *messages, model=model, **request)
        return server.body


def sent_messages(*messages: Message) -> Any:
    return sent(*messages)["messages"]


def streamed(reply: WireReply, model: Model = OLD) -> list[StreamEvent]:
    with Server([reply]) as server:
        return ask(AnthropicProvider(KEY, server.url, cache=False), model=model)


def failure(reply: WireReply) -> ProviderError:
    """The error that an answer leads to. It always names the model and a next step, and never the key."""
    with pytest.raises(ProviderError) as caught:
        streamed(reply)
    assert "claude-haiku-4-5" in str(caught.value)
    assert ";" in str(caught.value)
    assert KEY not in str(caught.value)
    return caught.value


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text(block) if isinstance(block, str) else block for block in content]}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def image(data: str, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def use(call_id: str, name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": user(*content)["content"], **more}


# --- the request ------------------------------------------------------------------------------------------------------


def test_a_plain_question_is_the_smallest_body_that_the_service_takes() -> None:
    assert sent(UserMessage("hi")) == {
        "model": "claude-haiku-4-5",
        "max_tokens": 32_000,
        "messages": [user("hi")],
        "stream": True,
    }


def test_system_prompt_tools_and_max_tokens_are_passed() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    body = sent(
        UserMessage("hi"),
        model=Model("claude-haiku-4-5", max_tokens=100),
        system_prompt="Be brief.",
        tools=[ToolSpec("weather", "Tells the weather.", schema)],
    )
    assert body["system"] == "Be brief."
    assert body["max_tokens"] == 100
    assert body["tools"] == [{"name": "weather", "description": "Tells the weather.", "input_schema": schema}]


def test_a_blank_system_prompt_is_left_out() -> None:
    assert "system" not in sent(system_prompt=" \n")


def test_images_are_sent_as_base64() -> None:
    message = UserMessage([TextContent("what is this?"), ImageContent("/9j/4A==", "image/jpeg")])
    assert sent_messages(message) == [user("what is this?", image("/9j/4A==", "image/jpeg"))]


def test_a_tool_call_and_its_result_are_a_pair() -> None:
    assert sent_messages(
        UserMessage("look"),
        AssistantMessage([TextContent("I look."), ToolCall("toolu_1", "look", {"at": "sky"})], "tool_use"),
        ToolResultMessage("toolu_1", "look", "blue"),
    ) == [
        user("look"),
        assistant("I look.", use("toolu_1", at="sky")),
        user(result("toolu_1", "blue")),
    ]


def test_results_of_one_turn_share_one_user_message_and_come_before_its_text() -> None:
    assert sent_messages(
        UserMessage("look twice"),
        AssistantMessage([ToolCall("a", "look"), ToolCall("b", "look")], "tool_use"),
        ToolResultMessage("a", "look", "one"),
        UserMessage("hurry"),
        ToolResultMessage("b", "look", "two"),
        UserMessage("please"),
    ) == [
        user("look twice"),
        assistant(use("a"), use("b")),
        user(result("a", "one"), result("b", "two"), "hurry", "please"),
    ]


def test_an_image_inside_a_tool_result_stays_inside() -> None:
    answer = ToolResultMessage("a", "look", [TextContent("see"), ImageContent("iVBORw0KGgo=")])
    assert sent_messages(AssistantMessage([ToolCall("a", "look")]), answer)[1] == user(
        result("a", "see", image("iVBORw0KGgo=")),
    )


def test_a_failed_tool_is_marked_as_an_error() -> None:
    answer = ToolResultMessage("a", "look", "no light", is_error=True)
    assert sent_messages(AssistantMessage([ToolCall("a", "look")]), answer)[1] == user(
        result("a", "no light", is_error=True),
    )


def test_images_of_a_failed_tool_go_next_to_it_because_an_error_may_hold_only_text() -> None:
    answer = ToolResultMessage("a", "look", [ImageContent("iVBORw0KGgo="), TextContent("no light")], is_error=True)
    assert sent_messages(AssistantMessage([ToolCall("a", "look")]), answer)[1] == user(
        result("a", "no light", is_error=True), image("iVBORw0KGgo=")
    )


def test_a_tool_result_is_never_empty() -> None:
    answer = ToolResultMessage("a", "look", "")
    assert sent_messages(AssistantMessage([ToolCall("a", "look")]), answer)[1] == user(result("a", "(no output)"))


def test_consecutive_messages_of_one_role_are_merged() -> None:
    assert sent_messages(
        UserMessage("a"), UserMessage("b"), AssistantMessage("c"), AssistantMessage("d"), UserMessage("e")
    ) == [user("a", "b"), assistant("c", "d"), user("e")]


def test_empty_text_and_messages_of_nothing_else_are_left_out() -> None:
    assert sent_messages(
        UserMessage([TextContent(""), TextContent("a"), TextContent(" \n")]),
        AssistantMessage(""),
        UserMessage("b"),
    ) == [user("a", "b")]


def test_notes_and_unknown_blocks_are_skipped() -> None:
    assert sent_messages(
        Note({"role": "system", "content": "internal"}),
        UserMessage([UnknownBlock({"type": "hologram"}), TextContent("a")]),
    ) == [user("a")]


def test_thinking_goes_back_with_its_signature_and_redacted_thinking_as_it_came() -> None:
    reply = AssistantMessage(
        [
            ThinkingContent("hm", signature="s1"),
            ThinkingContent(redacted="xyz"),
            ThinkingContent("", signature="s2"),
            TextContent("done"),
        ]
    )
    assert sent_messages(UserMessage("a"), reply, UserMessage("b"))[1] == assistant(
        {"type": "thinking", "thinking": "hm", "signature": "s1"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": "", "signature": "s2"},
        "done",
    )


def test_thinking_without_a_signature_is_not_sent() -> None:
    reply = AssistantMessage([ThinkingContent("hm"), TextContent("done")])
    assert sent_messages(UserMessage("a"), reply, UserMessage("b"))[1] == assistant("done")


def test_thinking_that_another_provider_signed_is_not_sent() -> None:
    reply = AssistantMessage([ThinkingContent("hm", signature="s"), TextContent("done")], provider="openai")
    assert sent_messages(UserMessage("a"), reply, UserMessage("b"))[1] == assistant("done")


def test_a_reply_that_broke_off_after_thinking_does_not_end_with_it() -> None:
    reply = AssistantMessage([ThinkingContent("hm", signature="s")], "aborted")
    assert sent_messages(UserMessage("a"), reply, UserMessage("b")) == [user("a", "b")]


def test_foreign_call_ids_become_valid_ones_that_match_on_both_sides() -> None:
    foreign = ["call_1|fc_2", "call_1|fc_3", "", "x" * 65, "anrop-å", "\ud800"]
    messages = sent_messages(
        AssistantMessage([ToolCall(call_id, "look") for call_id in foreign]),
        *[ToolResultMessage(call_id, "look", "ok") for call_id in foreign],
    )
    calls = [block["id"] for block in messages[0]["content"]]
    assert calls == [block["tool_use_id"] for block in messages[1]["content"]]
    assert len(set(calls)) == len(foreign)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call_id) for call_id in calls)
    assert calls == [_call_id(call_id) for call_id in foreign]


def test_valid_call_ids_stay_as_they_are() -> None:
    assert _call_id("toolu_01A-b") == "toolu_01A-b"


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    call = ToolCall("a", "look", {"at": {"k\udc00": ["\ud83d\ude00"]}})
    messages = sent_messages(
        UserMessage("a\ud800b"), AssistantMessage([call]), ToolResultMessage("a", "look", "\udfff")
    )
    assert messages == [
        user("a\ufffdb"),
        assistant(use("a", at={"k\ufffd": ["\U0001f600"]})),
        user(result("a", "\ufffd")),
    ]


def test_numbers_that_are_no_json_become_null() -> None:
    call = ToolCall("a", "look", {"x": math.nan, "y": [math.inf, 1.5], "z": 2**70})
    messages = sent_messages(AssistantMessage([call]), ToolResultMessage("a", "look", "ok"))
    assert messages[0] == assistant(use("a", x=None, y=[None, 1.5], z=2**70))


def test_arguments_without_a_bottom_do_not_break_the_request() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(900):
        arguments = {"a": arguments}
    messages = sent_messages(AssistantMessage([ToolCall("a", "look", arguments)]), ToolResultMessage("a", "look", "ok"))
    assert "[nested too deep]" in str(messages[0])


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_encoded_and_valid_text_stays_as_it_is(value: str) -> None:
    _clean(value).encode()
    if not any("\ud800" <= character <= "\udfff" for character in value):
        assert _clean(value) == value


# --- temperature and reasoning ----------------------------------------------------------------------------------------


def test_temperature_is_sent_to_models_that_take_it() -> None:
    assert sent(model=Model("claude-haiku-4-5", temperature=0.2))["temperature"] == 0.2
    assert sent(model=Model("some-other-model", temperature=0.2))["temperature"] == 0.2


@pytest.mark.parametrize(
    "model",
    [
        Model("claude-haiku-4-5", temperature=0.2, reasoning="low"),
        Model("claude-opus-4-7", temperature=0.2),
        Model("claude-opus-5", temperature=0.2),
        Model("claude-newest", temperature=0.2),
    ],
)
def test_temperature_is_left_out_where_it_would_be_refused(model: Model) -> None:
    assert "temperature" not in sent(model=model)


def test_a_number_is_a_thinking_budget_and_leaves_room_for_the_answer() -> None:
    body = sent(model=Model("claude-haiku-4-5", reasoning=40_000))
    assert body["thinking"] == {"type": "enabled", "budget_tokens": 40_000}
    assert body["max_tokens"] == 48_000


def test_zero_turns_thinking_off() -> None:
    body = sent(model=Model("claude-haiku-4-5", reasoning=0, temperature=0.5))
    assert body["thinking"] == {"type": "disabled"}
    assert body["temperature"] == 0.5


@pytest.mark.parametrize(("level", "budget"), [("low", 2_048), ("medium", 8_192), ("high", 16_384)])
def test_a_level_is_a_budget_for_models_that_think_by_budgets(level: Reasoning, budget: int) -> None:
    body = sent(model=Model("claude-haiku-4-5", reasoning=level))
    assert body["thinking"] == {"type": "enabled", "budget_tokens": budget}
    assert "output_config" not in body


def test_the_budget_of_a_level_fits_into_max_tokens() -> None:
    body = sent(model=Model("claude-haiku-4-5", reasoning="high", max_tokens=4_000))
    assert body["thinking"] == {"type": "enabled", "budget_tokens": 3_000}


@pytest.mark.parametrize(
    "name", ["claude-opus-5", "claude-sonnet-4-6", "anthropic.claude-opus-4-6-v1", "claude-newest"]
)
def test_a_level_is_an_effort_for_models_that_decide_themselves(name: str) -> None:
    body = sent(model=Model(name, reasoning="high"))
    assert body["thinking"] == {"type": "adaptive", "display": "summarized"}
    assert body["output_config"] == {"effort": "high"}


def test_an_unknown_level_is_an_input_error_at_once() -> None:
    with pytest.raises(InputError, match="reasoning='hard' is unknown; use one of low, medium, high"):
        AnthropicProvider(KEY).stream(Request(Model("claude-opus-5", reasoning="hard"), []), Signal())  # type: ignore[arg-type]


# --- the stream -------------------------------------------------------------------------------------------------------


def test_text_is_streamed_piece_by_piece() -> None:
    assert streamed(Anthropic.answer("Hello dear world", model="claude-haiku-4-5-20251001")) == [
        StreamStart("claude-haiku-4-5-20251001", Usage(10, 1)),
        TextStart(0),
        TextDelta(0, "Hello "),
        TextDelta(0, "dear "),
        TextDelta(0, "world"),
        TextEnd(0),
        StreamDone("stop", Usage(10, 5)),
    ]


def test_thinking_keeps_its_signature_and_redacted_thinking_its_data() -> None:
    events = streamed(Anthropic.answer(ThinkingContent("hm so", signature="s1"), ThinkingContent(redacted="xyz"), "ok"))
    assert events[1:-4] == [
        ThinkingStart(0),
        ThinkingDelta(0, "hm "),
        ThinkingDelta(0, "so"),
        ThinkingEnd(0, signature="s1"),
        ThinkingStart(1),
        ThinkingEnd(1, redacted="xyz"),
    ]


def test_tool_calls_are_streamed_and_parsed() -> None:
    call = ToolCall("toolu_1", "look", {"a": "b"})
    assert streamed(Anthropic.answer("I look.", call))[4:] == [
        TextEnd(0),
        ToolCallStart(1, "toolu_1", "look"),
        ToolCallDelta(1, '{"a":'),
        ToolCallDelta(1, ' "b"}'),
        ToolCallEnd(1, call),
        StreamDone("tool_use", Usage(10, 5)),
    ]


def test_a_tool_call_without_arguments_has_none() -> None:
    assert ToolCallEnd(0, ToolCall("a", "look")) in streamed(Anthropic.answer(ToolCall("a", "look", malformed="")))


def test_arguments_that_are_no_json_object_are_kept_as_malformed() -> None:
    call = ToolCall("a", "look", malformed='{"at": ')
    assert ToolCallEnd(0, call) in streamed(Anthropic.answer(call, stop_reason="max_tokens"))


def test_blocks_of_unknown_kinds_are_passed_over() -> None:
    search = [
        Anthropic.event(
            "content_block_start",
            index=0,
            content_block={"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        ),
        Anthropic.event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": "{}"}),
        Anthropic.event("content_block_stop", index=0),
        Anthropic.event("something_new", index=0),
    ]
    whole = Anthropic.answer("x").frames
    reply = WireReply([*whole[:2], *search, *Anthropic.block(1, "x"), *whole[-2:]])
    assert streamed(reply)[1:-1] == [TextStart(1), TextDelta(1, "x"), TextEnd(1)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("tool_use", "tool_use"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("a_new_reason", "stop"),
    ],
)
def test_stop_reasons_are_translated(theirs: str, ours: ReplyStop) -> None:
    assert streamed(Anthropic.answer("x", stop_reason=theirs))[-1] == StreamDone(ours, Usage(10, 5))


@pytest.mark.parametrize(
    "number", [-5, -(2**70), 2**70, pytest.param(10**400, id="400 digits"), 1.5e300]
)  # the SDK reads "12" and true as numbers
@pytest.mark.parametrize("name", ["input_tokens", "output_tokens", "cache_read_input_tokens"])
def test_a_usage_that_cannot_be_costs_no_reply(name: str, number: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Model("m", prices=Prices(1, 1, 1, 1))
    reply = Reply(model.id, "anthropic")
    for event in streamed(Anthropic.answer("x", final_usage={"output_tokens": 5, name: number}), model):
        reply.add(event)
    message = reply.message()
    assert (message.text, message.usage) == ("x", message.usage.plausible())
    assert "provider 'anthropic' reported an impossible usage" in caplog.text


def test_usage_counts_the_cache_and_costs_what_the_model_says() -> None:
    first = {
        "input_tokens": 100,
        "output_tokens": 1,
        "cache_read_input_tokens": 1_000,
        "cache_creation_input_tokens": 10,
    }
    model = Model("claude-haiku-4-5", prices=Prices(input=1, output=5, cache_read=0.1, cache_write=1.25))
    reply = Anthropic.answer("x", usage=first, final_usage={"output_tokens": 20})
    usage = Usage(100, 20, 1_000, 10, (100 + 20 * 5 + 1_000 * 0.1 + 10 * 1.25) / 1_000_000)
    assert streamed(reply, model)[-1] == StreamDone("stop", usage)


def test_a_later_usage_report_replaces_the_earlier_one() -> None:
    reply = Anthropic.answer("x", final_usage={"input_tokens": 30, "output_tokens": 20, "cache_read_input_tokens": 7})
    assert streamed(reply)[-1] == StreamDone("stop", Usage(30, 20, 7))


def test_a_reply_goes_back_exactly_as_it_came() -> None:
    content = ThinkingContent("hm so", signature="s1"), "I look.", ToolCall("toolu_1", "look", {"at": "sky"})
    with Server([Anthropic.answer(*content), Anthropic.answer("ok")]) as server:
        provider = AnthropicProvider(KEY, server.url, cache=False)
        reply = Reply("claude-haiku-4-5", provider.name)
        for event in ask(provider):
            reply.add(event)
        ask(provider, UserMessage("hi"), reply.message(), ToolResultMessage("toolu_1", "look", "blue"))
        assert server.requests[1].body["messages"] == [
            user("hi"),
            assistant(
                {"type": "thinking", "thinking": "hm so", "signature": "s1"}, "I look.", use("toolu_1", at="sky")
            ),
            user(result("toolu_1", "blue")),
        ]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Anthropic.error(401, "authentication_error", "invalid key"), AuthenticationFailed),
        (Anthropic.error(402, "billing_error", "no money"), AuthenticationFailed),
        (Anthropic.error(403, "permission_error", "not yours"), AuthenticationFailed),
        (Anthropic.error(429, "rate_limit_error", "slow down"), RateLimited),
        (Anthropic.error(500, "api_error", "oops"), Overloaded),
        (Anthropic.error(504, "timeout_error", "too slow"), Overloaded),
        (Anthropic.error(529, "overloaded_error", "busy"), Overloaded),
        (Anthropic.error(413, "request_too_large", "too big"), ContextTooLong),
        (Anthropic.error(400, "invalid_request_error", "prompt is too long: 9 > 8"), ContextTooLong),
        (Anthropic.error(400, "invalid_request_error", "length and `max_tokens` exceed context limit"), ContextTooLong),
        (Anthropic.error(400, "invalid_request_error", "Output blocked by content filtering policy"), ContentRefused),
        (Anthropic.error(400, "invalid_request_error", "messages: too few"), InvalidRequest),
        (Anthropic.error(404, "not_found_error", "model: claude-x"), InvalidRequest),
        (Anthropic.error(422, "something_new", "what?"), InvalidRequest),
        (WireReply([b"<html>Bad gateway</html>"], 502, {"content-type": "text/html"}), Overloaded),
        (WireReply([b"no"], 403, {"content-type": "text/plain"}), AuthenticationFailed),
    ],
)  # fmt: skip
def test_a_refused_request_is_a_typed_error(reply: WireReply, kind: type[ProviderError]) -> None:
    assert type(failure(reply)) is kind


def test_a_rate_limit_says_how_long_to_wait() -> None:
    error = failure(Anthropic.error(429, "rate_limit_error", "slow down", retry_after="7"))
    assert error.retryable
    assert error.retry_after == 7
    assert re.fullmatch(
        r"127\.0\.0\.1:\d+ limits the requests of this key for model 'claude-haiku-4-5': "
        r"429 rate_limit_error: slow down; try again later \(it asks to wait 7 s\)",
        str(error),
    )


@pytest.mark.parametrize("value", ["soon", "nan", "inf", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_waiting_time_that_is_no_number_of_seconds_is_ignored(value: str) -> None:
    assert failure(Anthropic.error(429, "rate_limit_error", "slow down", retry_after=value)).retry_after is None


def test_a_refused_key_says_where_keys_come_from() -> None:
    message = str(failure(Anthropic.error(401, "authentication_error", "invalid key")))
    assert "401 authentication_error: invalid key" in message
    assert "set ANTHROPIC_API_KEY or pass AnthropicProvider(api_key=...)" in message


def test_a_key_that_the_service_repeats_is_not_shown() -> None:
    assert "[key]" in str(failure(Anthropic.error(401, "authentication_error", f"unknown key {KEY}")))


def test_the_sdk_does_not_retry_because_the_run_does() -> None:
    failure(Anthropic.error(529, "overloaded_error", "busy"))  # the server complains about a second request


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        ("overloaded_error", Overloaded),
        ("rate_limit_error", RateLimited),
        ("api_error", Overloaded),
        ("something_new", Overloaded),
        ("invalid_request_error", InvalidRequest),
    ],
)
def test_an_error_event_inside_a_stream_is_a_typed_error(theirs: str, kind: type[ProviderError]) -> None:
    error = failure(Anthropic.answer("Hello").then(Anthropic.error_event(theirs, "in the middle"), after=4))
    assert type(error) is kind
    assert f"{theirs}: in the middle" in str(error)


def test_what_arrived_before_a_failure_has_been_passed_on() -> None:
    events: list[StreamEvent] = []

    async def read(provider: AnthropicProvider) -> None:
        async for event in provider.stream(Request(OLD, [UserMessage("hi")]), Signal()):
            events.append(event)  # noqa: PERF401 - the list must hold what came before the failure

    with Server([Anthropic.answer("Hello world").cut(after=4)]) as server, pytest.raises(NetworkFailed):
        asyncio.run(read(AnthropicProvider(KEY, server.url, cache=False)))
    assert events == [StreamStart("claude-test", Usage(10, 1)), TextStart(0), TextDelta(0, "Hello ")]


@pytest.mark.parametrize("frames", range(len(Anthropic.answer("Hello", ToolCall("a", "look", {"x": 1})).frames)))
def test_a_stream_that_is_cut_anywhere_is_a_network_failure(frames: int) -> None:
    error = failure(Anthropic.answer("Hello", ToolCall("a", "look", {"x": 1})).cut(after=frames))
    assert type(error) is NetworkFailed
    assert error.retryable


@pytest.mark.parametrize("frames", [0, 1, 4, 6])
def test_a_stream_that_ends_too_early_is_a_network_failure(frames: int) -> None:
    error = failure(Anthropic.answer("Hello").then(after=frames))
    assert type(error) is NetworkFailed
    assert "before the reply of 'claude-haiku-4-5' was complete" in str(error)


@pytest.mark.parametrize(
    "garbage",
    [
        b"event: content_block_delta\ndata: {not json\n\n",
        b"event: content_block_delta\ndata: 42\n\n",
        b"event: content_block_delta\ndata: null\n\n",
        b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n',
        Anthropic.event("content_block_delta", index=9, delta={"type": "text_delta", "text": "x"}),
        Anthropic.event("content_block_delta", index=0, delta={"type": "text_delta"}),
        Anthropic.event("content_block_delta", index=0, delta={"type": "text_delta", "text": ["x"]}),
        Anthropic.event("content_block_start", content_block={"type": "text", "text": ""}),
        Anthropic.event("content_block_start", index=1, content_block={"type": "tool_use"}),
        b"event: content_block_delta\ndata: \xff\xfe\n\n",
        b'event: message_start\ndata: {"type": "message_start"}\n\n',
    ],
)
def test_garbage_in_a_stream_is_a_network_failure(garbage: bytes) -> None:
    error = failure(Anthropic.answer("Hello").then(garbage, after=4))
    assert type(error) is NetworkFailed
    assert "not its protocol" in str(error)


def test_a_page_that_is_no_stream_is_a_network_failure() -> None:
    assert type(failure(WireReply([b"<html>Sign in</html>"], 200, {"content-type": "text/html"}))) is NetworkFailed


def test_a_refusal_is_an_error_with_the_reason_of_the_service() -> None:
    details = {"type": "refusal", "category": "cyber", "explanation": "looks like malware"}
    error = failure(Anthropic.answer("I", stop_reason="refusal", stop_details=details))
    assert type(error) is ContentRefused
    assert "looks like malware" in str(error)


def test_a_refusal_without_a_reason_is_an_error_too() -> None:
    assert type(failure(Anthropic.answer("I", stop_reason="refusal"))) is ContentRefused


def test_a_service_that_cannot_be_reached_is_a_network_failure_that_names_it() -> None:
    with Server() as server:
        url = server.url
    with pytest.raises(NetworkFailed, match=rf"connection to {url.removeprefix('http://')} failed .*check the network"):
        ask(AnthropicProvider(KEY, url))


@pytest.mark.parametrize("frames", [0, 4])
def test_a_stream_that_stalls_beyond_the_time_limit_is_a_network_failure(frames: int) -> None:
    async def read(url: str) -> None:
        async with anthropic.AsyncAnthropic(api_key=KEY, base_url=url, timeout=0.2, max_retries=0) as client:
            await collect(AnthropicProvider(client=client, cache=False), Request(OLD, [UserMessage("hi")]))

    with (
        Server([Anthropic.answer("Hello").stall(after=frames)]) as server,
        pytest.raises(NetworkFailed, match="did not answer in time"),
    ):
        asyncio.run(read(server.url))


# --- connections ------------------------------------------------------------------------------------------------------


def test_closing_the_iterator_closes_the_connection() -> None:
    async def read(server: Server) -> bool:
        stream = AnthropicProvider(KEY, server.url, cache=False).stream(Request(OLD, [UserMessage("hi")]), Signal())
        async with aclosing(stream):  # type: ignore[type-var]
            assert await anext(stream) == StreamStart("claude-test", Usage(10, 1))
        return await asyncio.to_thread(server.hung_up.wait, 30)

    with Server([Anthropic.answer("Hello").stall(after=3)]) as server:
        assert asyncio.run(read(server))


@pytest.mark.parametrize("frames", [0, 1, 4])
def test_cancelling_the_reader_closes_the_connection(frames: int) -> None:
    async def read(server: Server) -> bool:
        asked = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def stall(body: dict[str, Any]) -> WireReply:
            loop.call_soon_threadsafe(asked.set_result, None)
            return Anthropic.answer("Hello").stall(after=frames)

        server.script(stall)
        task = asyncio.create_task(
            collect(AnthropicProvider(KEY, server.url, cache=False), Request(OLD, [UserMessage("hi")])),
        )
        await asked
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(server.hung_up.wait, 30)

    with Server() as server:
        assert asyncio.run(read(server))


def test_one_provider_serves_one_event_loop_after_another() -> None:
    with Server([Anthropic.answer("one"), Anthropic.answer("two")]) as server:
        provider = AnthropicProvider(KEY, server.url, cache=False)
        assert TextDelta(0, "one") in ask(provider)
        assert TextDelta(0, "two") in ask(provider)


def test_one_provider_serves_many_streams_at_once() -> None:
    async def read(provider: AnthropicProvider) -> None:
        requests = [Request(OLD, [UserMessage(str(number))]) for number in range(20)]
        for events in await asyncio.gather(*(collect(provider, request) for request in requests)):
            assert events[-1] == StreamDone("stop", Usage(10, 5))

    with Server([Anthropic.answer("ok")] * 20) as server:
        asyncio.run(read(AnthropicProvider(KEY, server.url, cache=False)))


# --- keys, clients and the package ------------------------------------------------------------------------------------


def authorization(provider: Callable[[str], AnthropicProvider]) -> str:
    with Server([Anthropic.answer("ok")]) as server:
        ask(provider(server.url))
        assert server.requests[0].path == "/v1/messages"
        return server.requests[0].headers["authorization"]


def test_the_key_is_taken_from_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "from-environment")
    assert authorization(lambda url: AnthropicProvider("from-argument", url)) == "Bearer from-argument"


def test_the_key_and_the_address_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "from-environment")

    def provider(url: str) -> AnthropicProvider:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
        return AnthropicProvider()

    assert authorization(provider) == "Bearer from-environment"


def test_an_auth_token_of_the_environment_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token")
    assert authorization(lambda url: AnthropicProvider(base_url=url)) == "Bearer token"


def test_blanks_around_a_key_do_no_harm() -> None:
    assert authorization(lambda url: AnthropicProvider(f" {KEY}\n", url)) == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"“{KEY}”"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(AuthenticationFailed, match="copy it again") as caught:
        ask(AnthropicProvider(key))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", [None, ""])
def test_a_missing_key_is_told_before_anything_is_streamed(key: str | None) -> None:
    with pytest.raises(AuthenticationFailed, match=r"set ANTHROPIC_API_KEY or pass AnthropicProvider\(api_key=...\)"):
        AnthropicProvider(key).stream(Request(OLD, [UserMessage("hi")]), Signal())


def test_an_empty_key_is_not_replaced_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    with pytest.raises(AuthenticationFailed):
        AnthropicProvider("").stream(Request(OLD, [UserMessage("hi")]), Signal())


def test_a_client_of_ones_own_is_used_as_it_is() -> None:
    async def read(url: str) -> None:
        headers = {"x-team": "kelp"}
        async with anthropic.AsyncAnthropic(api_key="own", base_url=url, default_headers=headers) as client:
            await collect(AnthropicProvider(client=client, cache=False), Request(OLD, [UserMessage("hi")]))

    with Server([Anthropic.answer("ok")]) as server:
        asyncio.run(read(server.url))
        assert server.requests[0].headers["x-team"] == "kelp"
        assert server.requests[0].headers["authorization"] == "Bearer own"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_the_sdk_is_not_imported_before_it_is_used() -> None:
    code = """
import sys
from byssus.providers.anthropic import AnthropicProvider
AnthropicProvider("key")
print("anthropic" in sys.modules, "httpx2" in sys.modules)
"""
    assert run_python(code) == "False False"


@pytest.mark.processes
def test_a_missing_package_names_the_extra() -> None:
    code = """
import sys
sys.modules["anthropic"] = None
from byssus.errors import MissingExtra
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.base import Model, Request
from byssus.signals import Signal
try:
    AnthropicProvider("key").stream(Request(Model("claude-opus-5"), []), Signal())
except MissingExtra as error:
    print(error)
"""
    told = run_python(code)
    assert told.startswith("AnthropicProvider needs the extra")
    assert "needs the extra 'anthropic'" in told
    assert f"{sys.executable} -m pip install '.[anthropic]'" in told


# --- the cache, structured output, images -----------------------------------------------------------------------------


def test_tools_system_prompt_and_conversation_are_marked_for_the_cache() -> None:
    marked = {"type": "ephemeral"}
    history: list[Message] = [UserMessage("one"), AssistantMessage("two"), UserMessage("three")]
    request = Request(OLD, history, "Be brief.", [ToolSpec("look", "Looks.", {"type": "object"})])
    with Server([Anthropic.answer("ok")]) as server:
        asyncio.run(collect(AnthropicProvider(KEY, server.url), request))
    assert server.body["system"] == [{"type": "text", "text": "Be brief.", "cache_control": marked}]
    assert server.body["tools"][-1]["cache_control"] == marked
    assert [["cache_control" in block for block in turn["content"]] for turn in server.body["messages"]] == [
        [False],
        [False],
        [True],
    ]


def test_the_schema_of_the_reply_goes_out_as_the_output_format() -> None:
    schema = {"type": "object", "properties": {"total": {"type": "number"}}}
    with Server([Anthropic.answer("{}")]) as server:
        asyncio.run(collect(AnthropicProvider(KEY, server.url), Request(OLD, [UserMessage("sum")], output=schema)))
    assert server.body["output_config"] == {"format": {"type": "json_schema", "schema": schema}}


def test_an_image_goes_out_as_what_it_is_and_not_as_what_it_is_called() -> None:
    message = UserMessage([TextContent("what is this?"), ImageContent("iVBORw0KGgo=", "image/jpeg")])
    assert sent_messages(message) == [user("what is this?", image("iVBORw0KGgo=", "image/png"))]


def test_an_image_that_is_none_does_not_poison_the_thread() -> None:
    message = UserMessage([TextContent("what is this?"), ImageContent("!", "image/jpeg"), ImageContent("aGVsbG8=")])
    none = {"type": "text", "text": "[an image that cannot be shown]"}
    assert sent_messages(message) == [user("what is this?", none, none)]
