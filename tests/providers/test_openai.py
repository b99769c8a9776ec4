"""The OpenAI provider, over real HTTP to a server that speaks its protocol, or something like it."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx2
import openai
import pytest

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
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.base import Model, Prices, Request, ToolSpec
from byssus.providers.openai import OpenAIProvider
from byssus.providers.reply import Reply
from byssus.signals import Signal
from tests.support.wire import Anthropic, OpenAI, Server
from tests.support.wire import Reply as WireReply

LLAMA = Model("llama3.3")
OFFICIAL = "https://api.openai.com/v1"
DEEPSEEK = "https://api.deepseek.com/v1"
QWEN = "https://dashscope-intl.aliyuncs.com/compatible-mode/v1"
KEY = "sk-secret"
HERE = "127.0.0.1"
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {}})
Provider = OpenAIProvider | AnthropicProvider


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", HERE)


def ask(provider: OpenAIProvider, *messages: Message, model: Model = LLAMA, **request: Any) -> list[StreamEvent]:
    return asyncio.run(collect(provider, Request(model, list(messages) or [UserMessage("hi")], **request)))


async def collect(provider: Provider, request: Request) -> list[StreamEvent]:
    return [event async for event in provider.stream(request, Signal())]


def sent(*messages: Message, model: Model = LLAMA, to: str | None = None, **request: Any) -> dict[str, Any]:
    """The body that a request puts on the wire; `to` is the address that the provider believes to talk to."""
    with Server([OpenAI.answer("ok")]) as server:
        if to is None:
            ask(OpenAIProvider(KEY, f"{server.url}/v1"), *messages, model=model, **request)
        else:
            question = Request(model, list(messages) or [UserMessage("hi")], **request)
            asyncio.run(ask_rerouted(to, server.url, question))
        return server.body


async def ask_rerouted(address: str, url: str, request: Request) -> None:
    async with httpx2.AsyncClient(transport=Rerouted(url)) as http:
        client = openai.AsyncOpenAI(api_key=KEY, base_url=address, http_client=http)
        await collect(OpenAIProvider(client=client), request)


class Rerouted(httpx2.AsyncHTTPTransport):
    """Sends what is meant for any service to a server of ours."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = httpx2.URL(url)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.url = request.url.copy_with(scheme="http", host=self._url.host, port=self._url.port)
        return await super().handle_async_request(request)


def sent_messages(*messages: Message, **more: Any) -> Any:
    return sent(*messages, **more)["messages"]


def streamed(reply: WireReply, model: Model = LLAMA) -> list[StreamEvent]:
    with Server([reply]) as server:
        return ask(OpenAIProvider(KEY, server.url), model=model)


def replied(reply: WireReply) -> AssistantMessage:
    """The message that an answer becomes."""
    collected = Reply("llama3.3", "openai")
    for event in streamed(reply):
        collected.add(event)
    return collected.message()


def failure(reply: WireReply) -> ProviderError:
    """The error that an answer leads to. It always names the model and a next step, and never the key."""
    with pytest.raises(ProviderError) as caught:
        streamed(reply)
    assert "llama3.3" in str(caught.value)
    assert ";" in str(caught.value)
    assert KEY not in str(caught.value)
    return caught.value


def user(*content: Any) -> dict[str, Any]:
    if len(content) == 1 and isinstance(content[0], str):
        return {"role": "user", "content": content[0]}
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def assistant(text: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, **more}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(call_id: str, name: str = "look", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def image(data: str, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


# --- the request ------------------------------------------------------------------------------------------------------


def test_a_plain_question_is_the_smallest_body_that_counts_its_tokens() -> None:
    assert sent(UserMessage("hi")) == {
        "model": "llama3.3",
        "messages": [user("hi")],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_system_prompt_tools_max_tokens_and_temperature_are_passed_to_any_server() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    body = sent(
        UserMessage("hi"),
        model=Model("llama3.3", max_tokens=100, temperature=0.2),
        system_prompt="Be brief.",
        tools=[ToolSpec("weather", "Tells the weather.", schema)],
    )
    function = {"name": "weather", "description": "Tells the weather.", "parameters": schema}
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, user("hi")]
    assert body["max_tokens"] == 100
    assert body["temperature"] == 0.2
    assert body["tools"] == [{"type": "function", "function": function}]
    assert "max_completion_tokens" not in body


def test_a_blank_system_prompt_is_left_out() -> None:
    assert sent_messages(system_prompt=" \n") == [user("hi")]


def test_images_are_sent_as_data_urls() -> None:
    message = UserMessage([TextContent("what is this?"), ImageContent("/9j/4A==", "image/jpeg")])
    assert sent_messages(message) == [user("what is this?", image("/9j/4A==", "image/jpeg"))]


def test_a_tool_call_and_its_result_are_a_pair() -> None:
    assert sent_messages(
        UserMessage("look"),
        AssistantMessage([TextContent("I look."), ToolCall("call_1", "look", {"at": "天", "n": [1]})], "tool_use"),
        ToolResultMessage("call_1", "look", "blue"),
    ) == [
        user("look"),
        assistant("I look.", call("call_1", "look", '{"at":"天","n":[1]}')),
        result("call_1", "blue"),
    ]


def test_a_reply_of_calls_alone_has_null_content() -> None:
    assert sent_messages(
        UserMessage("look"), AssistantMessage([ToolCall("a", "look")]), ToolResultMessage("a", "look", "blue")
    )[1] == assistant(None, call("a"))


def test_results_of_one_turn_follow_their_calls_and_come_before_what_a_user_says() -> None:
    assert sent_messages(
        UserMessage("look twice"),
        AssistantMessage([ToolCall("a", "look"), ToolCall("b", "look")], "tool_use"),
        ToolResultMessage("a", "look", "one"),
        UserMessage("hurry"),
        ToolResultMessage("b", "look", "two"),
        UserMessage("please"),
    ) == [
        user("look twice"),
        assistant(None, call("a"), call("b")),
        result("a", "one"),
        result("b", "two"),
        user("hurry\n\nplease"),
    ]


def test_images_of_tool_results_follow_in_a_user_message_because_a_tool_answers_with_text() -> None:
    assert sent_messages(
        AssistantMessage([ToolCall("a", "look"), ToolCall("b", "listen"), ToolCall("c", "look")]),
        ToolResultMessage("a", "look", [TextContent("see"), ImageContent("iVBORw0KGgo=")]),
        ToolResultMessage("b", "listen", "nothing"),
        ToolResultMessage("c", "look", [ImageContent("R0lGODlh")]),
        UserMessage("and?"),
    )[1:] == [
        result("a", "see"),
        result("b", "nothing"),
        result("c", "(the images follow)"),
        user(
            "The images that look returned:",
            image("iVBORw0KGgo="),
            "The images that look returned:",
            image("R0lGODlh", "image/gif"),
            "and?",
        ),
    ]


def test_a_failed_tool_is_marked_in_its_text() -> None:
    answer = ToolResultMessage("a", "look", "no light", is_error=True)
    assert sent_messages(AssistantMessage([ToolCall("a", "look")]), answer)[1] == result("a", "Error: no light")


def test_a_tool_result_is_never_empty() -> None:
    answer = ToolResultMessage("a", "look", "")
    assert sent_messages(AssistantMessage([ToolCall("a", "look")]), answer)[1] == result("a", "(no output)")


def test_consecutive_messages_of_one_role_are_merged() -> None:
    assert sent_messages(
        UserMessage("a"), UserMessage("b"), AssistantMessage("c"), AssistantMessage("d"), UserMessage("e")
    ) == [user("a\n\nb"), assistant("c\n\nd"), user("e")]


def test_a_reply_that_broke_off_is_merged_with_the_calls_of_the_next() -> None:
    assert sent_messages(
        UserMessage("a"),
        AssistantMessage("b", "error"),
        AssistantMessage([ToolCall("x", "look")]),
        ToolResultMessage("x", "look", "blue"),
    ) == [user("a"), assistant("b", call("x")), result("x", "blue")]


def test_empty_text_and_messages_of_nothing_else_are_left_out() -> None:
    assert sent_messages(
        UserMessage([TextContent(""), TextContent("a"), TextContent(" \n")]),
        AssistantMessage(""),
        UserMessage("b"),
    ) == [user("a\n\nb")]


def test_notes_and_unknown_blocks_are_skipped() -> None:
    assert sent_messages(
        Note({"role": "system", "content": "internal"}),
        UserMessage([UnknownBlock({"type": "hologram"}), TextContent("a")]),
    ) == [user("a")]


def test_thinking_of_another_service_is_not_sent() -> None:
    thoughts = [
        ThinkingContent("hm"),
        ThinkingContent("hm", signature="EqQB"),
        ThinkingContent(redacted="xyz"),
        ThinkingContent("hm", signature="reasoning_content@api.deepseek.com"),
    ]
    reply = AssistantMessage([*thoughts, TextContent("done")])
    assert sent_messages(UserMessage("a"), reply, UserMessage("b"))[1] == assistant("done")


def test_long_and_foreign_call_ids_become_short_ones_that_match_on_both_sides() -> None:
    foreign = ["call_1|fc_2", "call_1|fc_3", "", "x" * 41, "anrop-å", "\ud800"]
    messages = sent_messages(
        AssistantMessage([ToolCall(call_id, "look") for call_id in foreign]),
        *[ToolResultMessage(call_id, "look", "ok") for call_id in foreign],
    )
    calls = [call["id"] for call in messages[0]["tool_calls"]]
    assert calls == [message["tool_call_id"] for message in messages[1:]]
    assert len(set(calls)) == len(foreign)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", call_id) for call_id in calls)
    again = sent_messages(AssistantMessage([ToolCall(call_id, "look") for call_id in foreign]))
    assert calls == [call["id"] for call in again[0]["tool_calls"]]


def test_ids_that_a_server_used_again_are_told_apart() -> None:
    messages = sent_messages(
        AssistantMessage([ToolCall("call_0", "look", {"n": 1}), ToolCall("call_0", "look", {"n": 2})]),
        ToolResultMessage("call_0", "look", "one"),
        ToolResultMessage("call_0", "look", "two"),
        AssistantMessage([ToolCall("call_0", "look", {"n": 3})]),
        ToolResultMessage("call_0", "look", "three"),
    )
    calls = [*messages[0]["tool_calls"], *messages[3]["tool_calls"]]
    results = [messages[1], messages[2], messages[4]]
    assert calls[0]["id"] == "call_0"
    assert len({call["id"] for call in calls}) == 3
    assert [call["id"] for call in calls] == [message["tool_call_id"] for message in results]
    assert [message["content"] for message in results] == ["one", "two", "three"]


def test_a_tool_name_that_a_model_made_up_does_not_break_the_thread() -> None:
    names = ["functions.look", "", "x" * 65, "sé"]
    messages = sent_messages(AssistantMessage([ToolCall(str(n), name) for n, name in enumerate(names)]))
    assert [call["function"]["name"] for call in messages[0]["tool_calls"]] == [
        "functions_look",
        "unnamed",
        "x" * 64,
        "s_",
    ]


def test_arguments_that_were_no_json_are_not_sent_back() -> None:
    messages = sent_messages(AssistantMessage([ToolCall("a", "look", malformed='{"at": ')]))
    assert messages[0] == assistant(None, call("a"))


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    arguments = ToolCall("a", "look", {"at": {"k\udc00": ["\ud83d\ude00"]}})
    assert sent_messages(
        UserMessage("a\ud800b"), AssistantMessage([arguments]), ToolResultMessage("a", "look", "\udfff")
    ) == [
        user("a\ufffdb"),
        assistant(None, call("a", "look", '{"at":{"k\ufffd":["\U0001f600"]}}')),
        result("a", "\ufffd"),
    ]


def test_numbers_that_are_no_json_become_null() -> None:
    arguments = {"x": math.nan, "y": [math.inf, 1.5], "z": 2**70}
    messages = sent_messages(AssistantMessage([ToolCall("a", "look", arguments)]))
    told = json.loads(messages[0]["tool_calls"][0]["function"]["arguments"])
    assert told == {"x": None, "y": [None, 1.5], "z": 2**70}


def test_arguments_without_a_bottom_do_not_break_the_request() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(900):
        arguments = {"a": arguments}
    assert "[nested too deep]" in str(sent_messages(AssistantMessage([ToolCall("a", "look", arguments)])))


# --- OpenAI itself, and the others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [OFFICIAL, "https://eu.api.openai.com/v1", "https://me.openai.azure.com/openai/v1"])
def test_openai_itself_gets_the_parameters_that_its_models_take(address: str) -> None:
    body = sent(model=Model("gpt-4o", max_tokens=100, temperature=0.2), to=address, system_prompt="Be brief.")
    assert body["max_completion_tokens"] == 100
    assert "max_tokens" not in body
    assert body["temperature"] == 0.2
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("name", ["o1", "o3-mini", "gpt-5", "gpt-5.4-mini", "ft:gpt-5:me", "gpt-6"])
def test_models_that_reason_get_a_developer_message_and_no_temperature(name: str) -> None:
    body = sent(model=Model(name, temperature=0.2), to=OFFICIAL, system_prompt="Be brief.")
    assert "temperature" not in body
    assert body["messages"][0] == {"role": "developer", "content": "Be brief."}


@pytest.mark.parametrize("name", ["gpt-4o", "gpt-4.1", "gpt-35-turbo", "chatgpt-4o-latest", "foo1"])
def test_other_models_are_not_taken_for_reasoning_ones(name: str) -> None:
    body = sent(model=Model(name, temperature=0.2, reasoning="high"), to=OFFICIAL, system_prompt="Be brief.")
    assert body["temperature"] == 0.2
    assert body["messages"][0]["role"] == "system"
    assert "reasoning_effort" not in body


def test_a_reasoning_model_behind_a_proxy_gets_what_it_takes_under_the_name_that_all_servers_know() -> None:
    body = sent(model=Model("openai/gpt-5", max_tokens=9, temperature=0.2, reasoning="low"), system_prompt="Be brief.")
    assert "temperature" not in body
    assert body["max_completion_tokens"] == 9
    assert body["messages"][0]["role"] == "system"
    assert body["reasoning_effort"] == "low"


def test_a_client_for_azure_is_openai_itself_wherever_it_stands() -> None:
    async def read(url: str) -> None:
        async with openai.AsyncAzureOpenAI(api_key="own", api_version="2026-01-01", azure_endpoint=url) as client:
            await collect(OpenAIProvider(client=client), Request(Model("o3", max_tokens=9), [UserMessage("hi")]))

    with Server([OpenAI.answer("ok")]) as server:
        asyncio.run(read(server.url))
        assert server.requests[0].path == "/openai/deployments/o3/chat/completions?api-version=2026-01-01"
        assert server.requests[0].headers["api-key"] == "own"
        assert server.body["max_completion_tokens"] == 9


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("o3", "high", "high"),
        ("o3", 0, "low"),
        ("o3", "max", "high"),
        ("gpt-5", 0, "minimal"),
        ("gpt-5", "minimal", "minimal"),
        ("gpt-5", "xhigh", "high"),
        ("gpt-5.1", 0, "none"),
        ("gpt-5.1", "minimal", "low"),
        ("gpt-5.2", "max", "xhigh"),
        ("gpt-5.6-sol", "max", "max"),
        ("gpt-5", 2_000, "low"),
        ("gpt-5", 8_000, "medium"),
        ("gpt-5", 100_000, "high"),
        ("gpt-5", None, None),
        ("gpt-5-chat-latest", "high", None),
    ],
)
def test_reasoning_is_the_nearest_effort_that_the_model_knows(name: str, asked: Any, told: str | None) -> None:
    assert sent(model=Model(name, reasoning=asked), to=OFFICIAL).get("reasoning_effort") == told


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("o3", "high", "high"),
        ("gpt-5.1", "high", "high"),
        ("gpt-5.4", "high", None),
        ("gpt-5.4", 0, None),
        ("gpt-5.6-sol", "high", "none"),
        ("gpt-5.6-sol", None, "none"),
        ("gpt-7", None, "none"),
    ],
)
def test_reasoning_is_left_out_where_it_is_refused_next_to_tools(name: str, asked: Any, told: str | None) -> None:
    assert sent(model=Model(name, reasoning=asked), to=OFFICIAL, tools=[LOOK]).get("reasoning_effort") == told


@pytest.mark.parametrize(("asked", "told"), [("high", "high"), (0, "none"), (5_000, "medium")])
def test_reasoning_is_an_effort_for_compatible_servers_too(asked: Any, told: str) -> None:
    assert sent(model=Model("qwen3", reasoning=asked), tools=[LOOK])["reasoning_effort"] == told


def test_deepseek_has_a_switch_for_thinking() -> None:
    on, off = (sent(model=Model("deepseek-chat", reasoning=asked), to=DEEPSEEK) for asked in ("minimal", 0))
    assert (on["thinking"], on["reasoning_effort"]) == ({"type": "enabled"}, "low")
    assert (off["thinking"], off.get("reasoning_effort")) == ({"type": "disabled"}, None)


def test_qwen_has_a_switch_for_thinking_and_a_budget() -> None:
    by_level, by_budget, off = (sent(model=Model("qwen-plus", reasoning=asked), to=QWEN) for asked in ("high", 500, 0))
    assert by_level["enable_thinking"] is True
    assert "thinking_budget" not in by_level
    assert (by_budget["enable_thinking"], by_budget["thinking_budget"]) == (True, 500)
    assert off["enable_thinking"] is False
    assert not any("reasoning_effort" in body for body in (by_level, by_budget, off))


def test_deepseek_gets_the_field_for_thoughts_on_each_reply_because_it_refuses_a_history_without() -> None:
    messages = sent_messages(
        UserMessage("a"),
        AssistantMessage([ThinkingContent("hm", signature="EqQB"), ToolCall("x", "look")], provider="anthropic"),
        ToolResultMessage("x", "look", "blue"),
        AssistantMessage([ThinkingContent("so", signature="reasoning_content@api.deepseek.com"), TextContent("b")]),
        to=DEEPSEEK,
    )
    assert messages[1] == assistant(None, call("x"), reasoning_content="")
    assert messages[3] == assistant("b", reasoning_content="so")


def test_an_unknown_level_is_an_input_error_at_once() -> None:
    with pytest.raises(InputError, match="reasoning='hard' is unknown; use one of none, minimal, low, medium, high"):
        OpenAIProvider(KEY).stream(Request(Model("gpt-5", reasoning="hard"), []), Signal())  # type: ignore[arg-type]


# --- the stream -------------------------------------------------------------------------------------------------------


def test_text_is_streamed_piece_by_piece() -> None:
    assert streamed(OpenAI.answer("Hello dear world", model="llama3.3:70b")) == [
        StreamStart("llama3.3:70b"),
        TextStart(0),
        TextDelta(0, "Hello "),
        TextDelta(0, "dear "),
        TextDelta(0, "world"),
        TextEnd(0),
        StreamDone("stop", Usage(10, 5)),
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_a_model_thinks_is_thinking_and_remembers_where_it_came_from(field: str) -> None:
    assert streamed(OpenAI.raw({field: "hm "}, {field: "so", "content": ""}, {field: None, "content": "ok"}))[1:-1] == [
        ThinkingStart(0),
        ThinkingDelta(0, "hm "),
        ThinkingDelta(0, "so"),
        ThinkingEnd(0, signature=f"{field}@{HERE}"),
        TextStart(1),
        TextDelta(1, "ok"),
        TextEnd(1),
    ]


def test_thoughts_that_are_told_under_both_names_are_told_once() -> None:
    reply = replied(OpenAI.raw({"reasoning_content": "hm", "reasoning": "hm"}, {"content": "ok"}))
    assert reply.content == [ThinkingContent("hm", f"reasoning_content@{HERE}"), TextContent("ok")]


def test_tool_calls_are_streamed_and_parsed() -> None:
    first, second = ToolCall("call_1", "look", {"a": "b"}), ToolCall("call_2", "listen")
    assert streamed(OpenAI.answer("I look.", first, second))[4:] == [
        TextEnd(0),
        ToolCallStart(1, "call_1", "look"),
        ToolCallDelta(1, '{"a":'),
        ToolCallDelta(1, ' "b"}'),
        ToolCallStart(2, "call_2", "listen"),
        ToolCallDelta(2, "{}"),
        ToolCallEnd(1, first),
        ToolCallEnd(2, second),
        StreamDone("tool_use", Usage(10, 5)),
    ]


def test_a_tool_call_without_arguments_has_none() -> None:
    assert replied(OpenAI.answer(ToolCall("a", "look", malformed=""))).tool_calls == [ToolCall("a", "look")]


def test_arguments_that_are_no_json_object_are_kept_as_malformed() -> None:
    broken = ToolCall("a", "look", malformed='{"at": ')
    reply = replied(OpenAI.answer(broken, finish_reason="length"))
    assert reply.tool_calls == [broken]
    assert reply.stop_reason == "length"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("stop", "stop"), ("length", "length"), ("eos", "stop"), ("tool_calls", "stop")],
)
def test_stop_reasons_are_translated(theirs: str, ours: ReplyStop) -> None:
    assert streamed(OpenAI.answer("x", finish_reason=theirs))[-1] == StreamDone(ours, Usage(10, 5))


@pytest.mark.parametrize("theirs", ["tool_calls", "function_call", "stop"])
def test_a_reply_with_calls_stops_for_them_whatever_it_says(theirs: str) -> None:
    events = streamed(OpenAI.answer(ToolCall("a", "look"), finish_reason=theirs))
    assert events[-1] == StreamDone("tool_use", Usage(10, 5))


@pytest.mark.parametrize(
    "number", [-5, -(2**70), 2**70, pytest.param(10**400, id="400 digits"), 1.5e300, "12", True, [1]]
)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "cached_tokens", "cache_write_tokens"])
def test_a_usage_that_cannot_be_costs_no_reply(name: str, number: Any, caplog: pytest.LogCaptureFixture) -> None:
    details = {"cached_tokens": 3, "cache_write_tokens": 4}
    told: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": details}
    (details if name in details else told)[name] = number
    model = Model("m", prices=Prices(1, 1, 1, 1))
    reply = Reply(model.id, "openai")
    for event in streamed(OpenAI.answer("x", usage=told), model):
        reply.add(event)
    message = reply.message()
    assert (message.text, message.usage) == ("x", message.usage.plausible())
    assert "provider 'openai' reported an impossible usage" in caplog.text


def test_usage_counts_the_cache_apart_and_costs_what_the_model_says() -> None:
    details = {"cached_tokens": 1_000, "cache_write_tokens": 10}
    usage = {"prompt_tokens": 1_110, "completion_tokens": 20, "prompt_tokens_details": details}
    model = Model("llama3.3", prices=Prices(input=1, output=5, cache_read=0.1, cache_write=1.25))
    expected = Usage(100, 20, 1_000, 10, (100 + 20 * 5 + 1_000 * 0.1 + 10 * 1.25) / 1_000_000)
    assert streamed(OpenAI.answer("x", usage=usage), model)[-1] == StreamDone("stop", expected)


def test_deepseeks_count_of_the_cache_is_understood() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "prompt_cache_hit_tokens": 64}
    assert streamed(OpenAI.answer("x", usage=usage))[-1] == StreamDone("stop", Usage(36, 20, 64))


def test_a_reply_goes_back_exactly_as_it_came() -> None:
    content = ThinkingContent("hm so"), "I look.", ToolCall("call_1", "look", {"at": "sky"})
    with Server([OpenAI.answer(*content), OpenAI.answer("ok")]) as server:
        provider = OpenAIProvider(KEY, server.url)
        reply = Reply("llama3.3", provider.name)
        for event in ask(provider):
            reply.add(event)
        ask(provider, UserMessage("hi"), reply.message(), ToolResultMessage("call_1", "look", "blue"))
        assert server.requests[1].body["messages"] == [
            user("hi"),
            assistant("I look.", call("call_1", "look", '{"at":"sky"}'), reasoning_content="hm so"),
            result("call_1", "blue"),
        ]


# --- streams of servers that are less exact ---------------------------------------------------------------------------

FIRST = {"name": "look", "arguments": '{"n":1}'}
SECOND = {"name": "look", "arguments": '{"n":2}'}


def calls_of(*pieces: Any) -> list[ToolCall]:
    calls = replied(OpenAI.raw(*({"tool_calls": [piece]} for piece in pieces))).tool_calls
    assert len({call.id for call in calls}) == len(calls)
    return calls


def said(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, call.malformed or call.arguments) for call in calls]


def test_a_missing_call_id_is_made_up_and_is_the_same_at_both_ends() -> None:
    events = streamed(OpenAI.raw({"tool_calls": [{"index": 0, "function": FIRST}]}))
    (start,) = (event for event in events if isinstance(event, ToolCallStart))
    (end,) = (event for event in events if isinstance(event, ToolCallEnd))
    assert re.fullmatch(r"call_[0-9a-f]{32}", start.id)
    assert end.tool_call == ToolCall(start.id, "look", {"n": 1})


def test_an_id_that_an_earlier_call_has_is_replaced_so_that_an_answer_to_that_one_cannot_reach_this_one() -> None:
    before: list[Message] = [
        UserMessage("hi"),
        AssistantMessage([ToolCall("a", "look", {})]),
        ToolResultMessage("a", "look", "x"),
    ]
    pieces = [
        {"id": "a", "function": {"name": "look", "arguments": '{"n"'}},
        {"id": "a", "function": {"arguments": ":1}"}},
    ]
    with Server([OpenAI.raw({"tool_calls": pieces})]) as server:
        events = ask(OpenAIProvider(KEY, server.url), *before)
    (end,) = (event for event in events if isinstance(event, ToolCallEnd))
    assert end.tool_call.arguments == {"n": 1}
    assert end.tool_call.id != "a"


@pytest.mark.parametrize(
    "pieces",
    [
        [{"index": 0, "id": "a", "function": FIRST}, {"index": 1, "id": "b", "function": SECOND}],
        [{"index": 0, "id": "a", "function": FIRST}, {"index": 0, "id": "b", "function": SECOND}],
        [{"index": 0, "id": "a", "function": FIRST}, {"index": 1, "id": "a", "function": SECOND}],
        [{"id": "a", "function": FIRST}, {"id": "a", "function": SECOND}],
        [{"index": 0, "function": FIRST}, {"index": 0, "function": SECOND}],
        [{"index": 0, "id": "", "function": FIRST}, {"index": 0, "id": "", "function": SECOND}],
        [{"id": "a", "function": FIRST}, {"id": "b", "function": SECOND}],
        [{"function": FIRST}, {"function": SECOND}],
        [{"index": None, "id": None, "function": FIRST}, {"index": None, "id": None, "function": SECOND}],
    ],
)
def test_two_calls_stay_two_whatever_their_indexes_and_ids(pieces: list[Any]) -> None:
    assert said(calls_of(*pieces)) == [("look", {"n": 1}), ("look", {"n": 2})]
    assert said(replied(OpenAI.raw({"tool_calls": pieces})).tool_calls) == [("look", {"n": 1}), ("look", {"n": 2})]


@pytest.mark.parametrize(
    "pieces",
    [
        [{"index": 0, "id": "a", "function": {"name": "look"}}, {"index": 0, "function": {"arguments": '{"n":1}'}}],
        [{"index": 0, "id": "a"}, {"index": 0, "function": FIRST}],
        [
            {"index": 0, "function": {"arguments": '{"n"'}},
            {"index": 0, "function": {"name": "look", "arguments": ":1}"}},
        ],
        [{"id": "a", "function": {"name": "look", "arguments": '{"n"'}}, {"id": "a", "function": {"arguments": ":1}"}}],
        [{"id": "a", "function": {"name": "look", "arguments": '{"n"'}}, {"function": {"arguments": ":1}"}}],
        [
            {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"n"'}},
            {"index": 0, "id": "a", "function": {"name": "look", "arguments": ":1}"}},
        ],
        [
            {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"n"'}},
            {"index": 0, "id": "z", "function": {"arguments": ":1}"}},
        ],
        [{"index": 0, "function": FIRST}, {"index": 0, "function": {"name": "look", "arguments": ""}}],
        [{"index": 0, "id": "a", "function": {"name": "look", "arguments": {"n": 1}}}],
    ],
)
def test_one_call_stays_one_however_it_is_cut(pieces: list[Any]) -> None:
    assert said(calls_of(*pieces)) == [("look", {"n": 1})]


def test_calls_that_arrive_interleaved_are_put_together() -> None:
    calls = calls_of(
        {"index": 0, "id": "a", "function": {"name": "look", "arguments": '{"n"'}},
        {"index": 1, "id": "b", "function": {"name": "listen", "arguments": '{"m"'}},
        {"index": 0, "function": {"arguments": ":1}"}},
        {"index": 1, "function": {"arguments": ":2}"}},
    )
    assert calls == [ToolCall("a", "look", {"n": 1}), ToolCall("b", "listen", {"m": 2})]


def test_calls_without_arguments_or_indexes_stay_apart() -> None:
    assert said(calls_of({"function": {"name": "look"}}, {"function": {"name": "look"}})) == [("look", {})] * 2


def test_a_call_that_never_got_a_name_is_still_a_call() -> None:
    events = streamed(OpenAI.raw({"tool_calls": [{"index": 0, "id": "a", "function": {"arguments": '{"n":1}'}}]}))
    assert events[1:-1] == [
        ToolCallStart(0, "a", ""),
        ToolCallDelta(0, '{"n":1}'),
        ToolCallEnd(0, ToolCall("a", "", {"n": 1})),
    ]


@pytest.mark.parametrize(
    "frames",
    [
        [OpenAI.chunk({"content": "ok"}), OpenAI.DONE],
        [OpenAI.chunk({"content": "ok"}), OpenAI.chunk({}, "stop")],
        [OpenAI.chunk({"content": "ok"}, "stop")],
        [OpenAI.chunk({"content": "ok"}, "stop"), b"data: [DONE]"],
        [OpenAI.event(choices=[]), OpenAI.chunk({"content": "ok"}), OpenAI.event(choices=None), OpenAI.DONE],
        [OpenAI.chunk({"role": "assistant"}), OpenAI.chunk({"content": "ok"}), OpenAI.chunk(None, "stop")],
        [OpenAI.chunk({"content": None}), OpenAI.chunk({"content": "ok"}), OpenAI.chunk({}, ""), OpenAI.DONE],
        [b": keep-alive\n\n", OpenAI.chunk({"content": "ok"}), b"event: ping\ndata:\n\n", OpenAI.DONE],
        [b'data:{"choices":[{"delta":{"content":"ok"}}]}\r\n\r\n', b"data:[DONE]\r\n\r\n"],
        [b'data: {"choices":[{"delta":{"con', b'tent":"o', b'k"}}]}\n', b"\ndata: [DO", b"NE]\n\n"],
        [b'data: {"model":"","choices":[{"delta":{"content":"ok","tool_calls":null}}]}\n\n', OpenAI.DONE],
    ],
)
def test_a_stream_may_leave_out_whatever_is_not_its_content(frames: list[bytes]) -> None:
    assert replied(WireReply(frames)) == AssistantMessage("ok", model="llama3.3", provider="openai")


def test_a_line_ends_with_a_newline_and_nothing_else() -> None:
    content = "a\u2028b\x85c\x0bd"
    chunk = json.dumps({"choices": [{"delta": {"content": content}}]}, ensure_ascii=False)
    frames = [f"data: {chunk}\n\n".encode(), OpenAI.DONE]
    assert replied(WireReply(frames)).text == content


@pytest.mark.parametrize(
    "frame",
    [
        OpenAI.event(choices=[], usage=OpenAI.USAGE),
        OpenAI.chunk({}, "stop", usage=OpenAI.USAGE),
        OpenAI.event(choices=[{"delta": {}, "finish_reason": "stop", "usage": OpenAI.USAGE}]),
    ],
)
def test_usage_is_found_wherever_it_stands(frame: bytes) -> None:
    early = OpenAI.chunk({"content": "ok"}, usage={"prompt_tokens": 10, "completion_tokens": 1})
    assert streamed(WireReply([early, frame, OpenAI.DONE]))[-1] == StreamDone("stop", Usage(10, 5))


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (OpenAI.error(401, "invalid_api_key", "incorrect key"), AuthenticationFailed),
        (OpenAI.error(402, None, "Insufficient Balance"), AuthenticationFailed),
        (OpenAI.error(403, "unsupported_country_region_territory", "not there"), AuthenticationFailed),
        (OpenAI.error(429, "rate_limit_exceeded", "slow down", "requests"), RateLimited),
        (OpenAI.error(429, "insufficient_quota", "check your plan", "insufficient_quota"), AuthenticationFailed),
        (OpenAI.error(429, "rate_limit_exceeded", "Request too large for gpt-4o", "tokens"), ContextTooLong),
        (OpenAI.error(500, None, "oops", "server_error"), Overloaded),
        (OpenAI.error(503, None, "busy"), Overloaded),
        (OpenAI.error(413, None, "too big"), ContextTooLong),
        (OpenAI.error(400, "context_length_exceeded", "too long", "invalid_request_error"), ContextTooLong),
        (OpenAI.error(400, 400, "This model's maximum context length is 8 tokens", "BadRequestError"), ContextTooLong),
        (OpenAI.error(500, 500, "the request exceeds the available context size"), ContextTooLong),
        (OpenAI.error(400, None, "Range of input length should be [1, 8]"), ContextTooLong),
        (OpenAI.error(400, "content_filter", "filtered"), ContentRefused),
        (OpenAI.error(400, "content_policy_violation", "no", "invalid_request_error"), ContentRefused),
        (OpenAI.error(400, "data_inspection_failed", "Input data may contain inappropriate content"), ContentRefused),
        (OpenAI.error(400, "unsupported_parameter", "no such thing", "invalid_request_error"), InvalidRequest),
        (OpenAI.error(404, "model_not_found", "no such model"), InvalidRequest),
        (OpenAI.error(422, None, "what?"), InvalidRequest),
        (WireReply([b'{"detail":"no"}'], 422, {"content-type": "application/json"}), InvalidRequest),
        (WireReply([b'{"error":"model not found"}'], 404, {"content-type": "application/json"}), InvalidRequest),
        (WireReply([b"<html>Bad gateway</html>"], 502, {"content-type": "text/html"}), Overloaded),
        (WireReply([b""], 403, {"content-type": "text/plain"}), AuthenticationFailed),
    ],
)  # fmt: skip
def test_a_refused_request_is_a_typed_error(reply: WireReply, kind: type[ProviderError]) -> None:
    assert type(failure(reply)) is kind


def test_an_empty_purse_is_not_worth_a_retry() -> None:
    error = failure(OpenAI.error(429, "insufficient_quota", "check your plan", "insufficient_quota"))
    assert not error.retryable
    assert "429 insufficient_quota: check your plan; check the key, what it may do and what it may spend" in str(error)


def test_a_rate_limit_says_how_long_to_wait() -> None:
    error = failure(OpenAI.error(429, "rate_limit_exceeded", "slow down", "requests", retry_after="7"))
    assert error.retryable
    assert error.retry_after == 7
    assert re.fullmatch(
        r"127\.0\.0\.1:\d+ limits the requests of this key for model 'llama3.3': "
        r"429 rate_limit_exceeded requests: slow down; try again later \(it asks to wait 7 s\)",
        str(error),
    )


def test_milliseconds_are_more_exact() -> None:
    assert failure(OpenAI.error(429, None, "slow", retry_after_ms="250", retry_after="1")).retry_after == 0.25


@pytest.mark.parametrize("value", ["soon", "nan", "inf", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_waiting_time_that_is_no_number_of_seconds_is_ignored(value: str) -> None:
    assert failure(OpenAI.error(429, None, "slow down", retry_after=value)).retry_after is None


def test_a_refused_key_says_where_keys_come_from() -> None:
    message = str(failure(OpenAI.error(401, "invalid_api_key", "incorrect key")))
    assert "401 invalid_api_key: incorrect key" in message
    assert "set OPENAI_API_KEY or pass OpenAIProvider(api_key=...)" in message


def test_a_wrong_address_or_model_says_what_to_check() -> None:
    assert "does base_url end in /v1?" in str(failure(WireReply([b"404 page not found"], 404)))


@pytest.mark.parametrize(
    "reply",
    [
        OpenAI.error(401, "invalid_api_key", f"unknown key {KEY}"),
        OpenAI.answer("x").then(OpenAI.event(error={"message": f"unknown key {KEY}"}), after=1),
        OpenAI.raw({"refusal": f"not with {KEY}"}),
    ],
)
def test_a_key_that_the_service_repeats_is_not_shown(reply: WireReply) -> None:
    assert "[key]" in str(failure(reply))


def test_the_sdk_does_not_retry_because_the_run_does() -> None:
    failure(OpenAI.error(503, None, "busy"))  # the server complains about a second request


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        ({"message": "m", "type": "server_error", "code": None}, Overloaded),
        ({"message": "m", "code": 429}, RateLimited),
        ({"message": "m", "code": 502}, Overloaded),
        ({"message": "m", "code": "rate_limit_exceeded"}, RateLimited),
        ({"message": "m", "code": "context_length_exceeded"}, ContextTooLong),
        ({"message": "m", "type": "BadRequestError", "code": 400}, InvalidRequest),
        ({"message": "m", "type": "something_new"}, Overloaded),
        ("m", Overloaded),
    ],
)
def test_an_error_inside_a_stream_is_a_typed_error(theirs: Any, kind: type[ProviderError]) -> None:
    error = failure(OpenAI.answer("Hello").then(OpenAI.event(error=theirs), after=2))
    assert type(error) is kind
    assert ": m;" in str(error)


@pytest.mark.parametrize("reason", ["error", "insufficient_system_resource"])
def test_a_reply_that_the_service_could_not_finish_is_an_overload(reason: str) -> None:
    assert type(failure(OpenAI.answer("Hello", finish_reason=reason))) is Overloaded


def test_a_filtered_reply_is_a_refusal() -> None:
    error = failure(OpenAI.answer("I", finish_reason="content_filter"))
    assert type(error) is ContentRefused
    assert "content filter" in str(error)


def test_a_refusal_is_an_error_with_the_reason_of_the_model() -> None:
    error = failure(OpenAI.raw({"refusal": "I can't "}, {"refusal": "help."}))
    assert type(error) is ContentRefused
    assert "I can't help." in str(error)


def test_what_arrived_before_a_failure_has_been_passed_on() -> None:
    events: list[StreamEvent] = []

    async def read(provider: OpenAIProvider) -> None:
        async for event in provider.stream(Request(LLAMA, [UserMessage("hi")]), Signal()):
            events.append(event)  # noqa: PERF401 - the list must hold what came before the failure

    with Server([OpenAI.answer("Hello world").cut(after=2)]) as server, pytest.raises(NetworkFailed):
        asyncio.run(read(OpenAIProvider(KEY, server.url)))
    assert events == [StreamStart("gpt-test"), TextStart(0), TextDelta(0, "Hello ")]


LONG = OpenAI.answer("Hello", ToolCall("a", "look", {"x": 1}))


@pytest.mark.parametrize("frames", range(len(LONG.frames)))
def test_a_stream_that_is_cut_anywhere_is_a_network_failure(frames: int) -> None:
    error = failure(LONG.cut(after=frames))
    assert type(error) is NetworkFailed
    assert error.retryable


@pytest.mark.parametrize("frames", [0, 1, 2, 4])
def test_a_stream_that_ends_before_it_says_so_is_a_network_failure(frames: int) -> None:
    error = failure(LONG.then(after=frames))
    assert type(error) is NetworkFailed
    assert "before the reply of 'llama3.3' was complete" in str(error)


def test_a_stream_of_nothing_but_its_end_is_a_network_failure() -> None:
    assert type(failure(WireReply([OpenAI.DONE]))) is NetworkFailed


@pytest.mark.parametrize(
    "garbage",
    [
        b"data: {not json\n\n",
        b"data: 42\n\n",
        b"data: null\n\n",
        b"data: \xff\xfe\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        OpenAI.event(choices=[42]),
        OpenAI.event(choices=42),
        OpenAI.chunk("text"),
        OpenAI.chunk({"content": ["x"]}),
        OpenAI.chunk({"reasoning_content": {"text": "x"}}),
        OpenAI.chunk({"tool_calls": ["look"]}),
        OpenAI.chunk({"tool_calls": [{"index": "0", "function": FIRST}]}),
        OpenAI.chunk({"tool_calls": [{"index": 0, "id": 7, "function": FIRST}]}),
        OpenAI.chunk({"tool_calls": [{"index": 0, "function": {"name": 7}}]}),
        OpenAI.chunk({}, "stop", usage="much"),
    ],
)
def test_garbage_in_a_stream_is_a_network_failure(garbage: bytes) -> None:
    error = failure(OpenAI.answer("Hello").then(garbage, after=2))
    assert type(error) is NetworkFailed
    assert "not its protocol" in str(error)


def test_a_page_that_is_no_stream_is_a_network_failure() -> None:
    assert type(failure(WireReply([b"<html>Sign in</html>"], 200, {"content-type": "text/html"}))) is NetworkFailed


def test_a_service_that_cannot_be_reached_is_a_network_failure_that_names_it() -> None:
    with Server() as server:
        url = server.url
    with pytest.raises(NetworkFailed, match=rf"connection to {url.removeprefix('http://')} failed .*check the network"):
        ask(OpenAIProvider(KEY, url))


@pytest.mark.parametrize("frames", [0, 2])
def test_a_stream_that_stalls_beyond_the_time_limit_is_a_network_failure(frames: int) -> None:
    async def read(url: str) -> None:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=url, timeout=0.2, max_retries=0) as client:
            await collect(OpenAIProvider(client=client), Request(LLAMA, [UserMessage("hi")]))

    with (
        Server([OpenAI.answer("Hello").stall(after=frames)]) as server,
        pytest.raises(NetworkFailed, match="did not answer in time"),
    ):
        asyncio.run(read(server.url))


# --- connections ------------------------------------------------------------------------------------------------------


def test_closing_the_iterator_closes_the_connection() -> None:
    async def read(server: Server) -> bool:
        stream = OpenAIProvider(KEY, server.url).stream(Request(LLAMA, [UserMessage("hi")]), Signal())
        async with aclosing(stream):  # type: ignore[type-var]
            assert await anext(stream) == StreamStart("gpt-test")
        return await asyncio.to_thread(server.hung_up.wait, 30)

    with Server([OpenAI.answer("Hello").stall(after=2)]) as server:
        assert asyncio.run(read(server))


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_cancelling_the_reader_closes_the_connection(frames: int) -> None:
    async def read(server: Server) -> bool:
        asked = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def stall(body: dict[str, Any]) -> WireReply:
            loop.call_soon_threadsafe(asked.set_result, None)
            return OpenAI.answer("Hello").stall(after=frames)

        server.script(stall)
        task = asyncio.create_task(collect(OpenAIProvider(KEY, server.url), Request(LLAMA, [UserMessage("hi")])))
        await asked
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(server.hung_up.wait, 30)

    with Server() as server:
        assert asyncio.run(read(server))


def test_a_server_that_says_done_and_stays_on_the_line_does_not_keep_the_reply() -> None:
    whole = OpenAI.answer("Hello")
    assert streamed(whole.stall(after=len(whole.frames)))[-1] == StreamDone("stop", Usage(10, 5))


def test_one_provider_serves_many_streams_at_once() -> None:
    async def read(provider: OpenAIProvider) -> None:
        requests = [Request(LLAMA, [UserMessage(str(number))]) for number in range(20)]
        for events in await asyncio.gather(*(collect(provider, request) for request in requests)):
            assert events[-1] == StreamDone("stop", Usage(10, 5))

    with Server([OpenAI.answer("ok")] * 20) as server:
        asyncio.run(read(OpenAIProvider(KEY, server.url)))


# What both providers over HTTP promise about their connections.

services = pytest.mark.parametrize(
    ("new_provider", "reply", "model"),
    [
        (OpenAIProvider, OpenAI.answer("ok"), LLAMA),
        (AnthropicProvider, Anthropic.answer("ok"), Model("claude-haiku-4-5")),
    ],
    ids=["openai", "anthropic"],
)


@services
def test_calls_of_one_event_loop_share_a_connection(new_provider: Any, reply: WireReply, model: Model) -> None:
    async def read(provider: Provider) -> None:
        for _ in range(3):
            await collect(provider, Request(model, [UserMessage("hi")]))

    with Server([reply] * 3) as server:
        asyncio.run(read(new_provider(KEY, server.url)))
        assert server.connections == 1


@services
def test_one_provider_serves_one_event_loop_after_another(new_provider: Any, reply: WireReply, model: Model) -> None:
    with Server([reply] * 3) as server:
        provider = new_provider(KEY, server.url)
        for _ in range(3):
            events = asyncio.run(collect(provider, Request(model, [UserMessage("hi")])))
            assert TextDelta(0, "ok") in events
        assert server.connections == 3
    gc.collect()  # a connection that is still open would complain


@services
def test_a_connection_does_not_outlive_its_event_loop(new_provider: Any, reply: WireReply, model: Model) -> None:
    with Server([reply]) as server:
        provider = new_provider(KEY, server.url)
        asyncio.run(collect(provider, Request(model, [UserMessage("hi")])))
        assert server.left.wait(30)


@services
def test_a_provider_that_is_closed_opens_a_new_connection(new_provider: Any, reply: WireReply, model: Model) -> None:
    async def read(provider: Provider) -> None:
        await provider.aclose()
        for _ in range(2):
            await collect(provider, Request(model, [UserMessage("hi")]))
            await provider.aclose()

    with Server([reply] * 2) as server:
        asyncio.run(read(new_provider(KEY, server.url)))
        assert server.connections == 2


@services
def test_connections_of_a_provider_that_is_gone_are_closed_by_the_next(
    new_provider: Any, reply: WireReply, model: Model
) -> None:
    async def read(url: str, others_url: str) -> bool:
        await collect(new_provider(KEY, url), Request(model, [UserMessage("hi")]))
        gc.collect()
        await collect(new_provider(KEY, others_url), Request(model, [UserMessage("hi")]))
        return await asyncio.to_thread(server.left.wait, 30)

    with Server([reply]) as server, Server([reply]) as other:
        assert asyncio.run(read(server.url, other.url))


@services
def test_a_stream_that_is_left_open_ends_with_its_event_loop(new_provider: Any, reply: WireReply, model: Model) -> None:
    left: list[Any] = []

    async def read(provider: Provider) -> None:
        stream = provider.stream(Request(model, [UserMessage("hi")]), Signal())
        left.append(stream)
        await anext(stream)

    with Server([reply.stall(after=3)]) as server:
        asyncio.run(read(new_provider(KEY, server.url)))
        assert server.hung_up.wait(30)
    left.clear()
    gc.collect()


# --- keys, clients and the package ------------------------------------------------------------------------------------


def authorization(provider: Callable[[str], OpenAIProvider]) -> str:
    with Server([OpenAI.answer("ok")]) as server:
        ask(provider(f"{server.url}/v1"))
        assert server.requests[0].path == "/v1/chat/completions"
        return server.requests[0].headers["authorization"]


def test_the_key_is_taken_from_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert authorization(lambda url: OpenAIProvider("from-argument", url)) == "Bearer from-argument"


def test_the_key_and_the_address_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")

    def provider(url: str) -> OpenAIProvider:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        return OpenAIProvider()

    assert authorization(provider) == "Bearer from-environment"


@pytest.mark.parametrize("key", [None, ""])
def test_another_server_needs_no_key(key: str | None) -> None:
    assert authorization(lambda url: OpenAIProvider(key, url)) == "Bearer no-key"


def test_blanks_around_a_key_do_no_harm() -> None:
    assert authorization(lambda url: OpenAIProvider(f" {KEY}\n", url)) == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"“{KEY}”"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(AuthenticationFailed, match="copy it again") as caught:
        OpenAIProvider(key).stream(Request(LLAMA, [UserMessage("hi")]), Signal())
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", [None, "", " "])
def test_a_missing_key_for_openai_is_told_before_anything_is_streamed(key: str | None) -> None:
    with pytest.raises(AuthenticationFailed, match=r"set OPENAI_API_KEY or pass OpenAIProvider\(api_key=...\)"):
        OpenAIProvider(key).stream(Request(Model("gpt-5"), [UserMessage("hi")]), Signal())


def test_an_empty_key_is_not_replaced_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(AuthenticationFailed):
        OpenAIProvider("").stream(Request(Model("gpt-5"), [UserMessage("hi")]), Signal())


def test_a_client_of_ones_own_is_used_as_it_is() -> None:
    async def read(url: str) -> None:
        headers = {"x-team": "kelp"}
        async with openai.AsyncOpenAI(api_key="own", base_url=url, default_headers=headers) as client:
            provider = OpenAIProvider(client=client)
            await collect(provider, Request(LLAMA, [UserMessage("hi")]))
            await provider.aclose()
            assert not client.is_closed()

    with Server([OpenAI.answer("ok")]) as server:
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
from byssus.providers.openai import OpenAIProvider
OpenAIProvider("key")
print("openai" in sys.modules, "httpx2" in sys.modules)
"""
    assert run_python(code) == "False False"


@pytest.mark.processes
def test_a_missing_package_names_the_extra() -> None:
    code = """
import sys
sys.modules["openai"] = None
from byssus.errors import MissingExtra
from byssus.providers.base import Model, Request
from byssus.providers.openai import OpenAIProvider
from byssus.signals import Signal
try:
    OpenAIProvider("key").stream(Request(Model("gpt-5"), []), Signal())
except MissingExtra as error:
    print(error)
"""
    told = run_python(code)
    assert told.startswith("OpenAIProvider needs the extra")
    assert "needs the extra 'openai'" in told
    assert f"{sys.executable} -m pip install '.[openai]'" in told


def test_the_schema_of_the_reply_goes_out_as_the_response_format() -> None:
    schema = {"type": "object", "properties": {"total": {"type": "number"}}}
    assert sent(UserMessage("sum"), output=schema)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "reply", "schema": schema, "strict": False},
    }


def test_an_image_that_is_none_does_not_poison_the_thread() -> None:
    message = UserMessage([TextContent("what is this?"), ImageContent("!", "image/jpeg")])
    assert sent_messages(message) == [user("what is this?\n\n[an image that cannot be shown]")]
