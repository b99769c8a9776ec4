"""What a run makes of a service that fails, over real HTTP and in both dialects."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from byssus import Agent, Model, RunResult, ToolCall, ToolResultMessage, tool
from byssus.errors import (
    AuthenticationFailed,
    ContentRefused,
    ContextTooLong,
    NetworkFailed,
    Overloaded,
    ProviderError,
    RateLimited,
)
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.base import Provider
from byssus.providers.openai import OpenAIProvider
from tests.support.wire import Anthropic, OpenAI, Reply, Server


class Dialect(NamedTuple):
    answer: Callable[..., Reply]
    provider: Callable[[Server], Provider]
    busy: Reply
    overloaded: Reply
    refused_key: Reply
    too_long: Reply


DIALECTS = {
    "anthropic": Dialect(
        Anthropic.answer,
        lambda server: AnthropicProvider("key", server.url),
        Anthropic.error(429, "rate_limit_error", "Slow down", retry_after="0"),
        Anthropic.error(529, "overloaded_error", "Overloaded", retry_after="0"),
        Anthropic.error(401, "authentication_error", "invalid x-api-key"),
        Anthropic.error(400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"),
    ),
    "openai": Dialect(
        OpenAI.answer,
        lambda server: OpenAIProvider("key", f"{server.url}/v1"),
        OpenAI.error(429, "rate_limit_exceeded", "Slow down", retry_after="0"),
        OpenAI.error(503, "server_error", "Overloaded", retry_after="0"),
        OpenAI.error(401, "invalid_api_key", "Incorrect API key"),
        OpenAI.error(400, "context_length_exceeded", "too many tokens"),
    ),
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    importlib.import_module(request.param)  # a provider does so at its first use: that would count as silence
    return DIALECTS[request.param]


def prompt(dialect: Dialect, replies: Sequence[Reply], **options: Any) -> tuple[RunResult[Any], Server]:
    async def run(server: Server) -> RunResult[Any]:
        provider = dialect.provider(server)
        agent = Agent(provider=provider, model=options.pop("model", Model("a-model")), **options)
        result = await agent.prompt("hello")
        await provider.aclose()  # type: ignore[attr-defined]
        return result

    with Server(replies) as server:
        return asyncio.run(run(server)), server


def test_a_limit_and_an_overload_are_waited_out(dialect: Dialect) -> None:
    result, server = prompt(dialect, [dialect.busy, dialect.overloaded, dialect.answer("Hello!")])
    assert (result.text, result.error, len(server.requests)) == ("Hello!", None, 3)


def test_what_does_not_pass_is_the_result_with_its_kind(dialect: Dialect) -> None:
    for reply, kind in (
        ([dialect.busy] * 2, RateLimited),
        ([dialect.overloaded] * 2, Overloaded),
        ([dialect.refused_key], AuthenticationFailed),
        ([dialect.too_long], ContextTooLong),
    ):
        result, _ = prompt(dialect, reply, max_retries=1)
        assert result.stop_reason == "error"
        assert type(result.error) is kind
        with pytest.raises(kind):
            result.raise_for_error()


def test_the_next_model_answers_when_one_does_not(dialect: Dialect) -> None:
    models = [Model("first"), Model("second")]
    replies = [dialect.overloaded, dialect.overloaded, dialect.answer("Hello!")]
    result, server = prompt(dialect, replies, model=models, max_retries=1)
    assert result.text == "Hello!"
    assert [request.body["model"] for request in server.requests] == ["first", "first", "second"]


def test_a_connection_that_drops_before_anything_was_shown_is_made_again(dialect: Dialect) -> None:
    result, server = prompt(dialect, [dialect.answer("never").cut(after=0), dialect.answer("Hello!")])
    assert (result.text, len(server.requests)) == ("Hello!", 2)


def test_a_connection_that_drops_in_the_middle_keeps_what_was_shown_and_is_not_made_again(dialect: Dialect) -> None:
    whole = dialect.answer("Hello dear world")
    result, server = prompt(dialect, [whole.cut(after=4)])
    assert len(server.requests) == 1
    assert isinstance(result.error, NetworkFailed)
    assert result.text
    assert "Hello dear world".startswith(result.text)


def test_a_stream_that_stalls_ends_by_the_idle_timeout_and_is_asked_again(dialect: Dialect) -> None:
    replies = [dialect.answer("never").stall(after=0), dialect.answer("Hello!")]
    result, server = prompt(dialect, replies, idle_timeout=0.5)
    assert (result.text, len(server.requests)) == ("Hello!", 2)


def test_garbage_is_a_failure_that_passes(dialect: Dialect) -> None:
    garbage = Reply([b"data: {broken\n\n", b"data: [1, 2\n\n"])
    result, _ = prompt(dialect, [garbage, dialect.answer("Hello!")])
    assert result.text == "Hello!"


def test_broken_json_of_a_tool_call_goes_back_to_the_model_as_a_result(dialect: Dialect) -> None:
    @tool
    async def look(city: str) -> str:
        return f"sun in {city}"

    calls = [
        dialect.answer(ToolCall("call_1", "look", malformed='{"city": "Os')),
        dialect.answer(ToolCall("call_2", "look", {"city": "Oslo"})),
        dialect.answer("Sun."),
    ]
    result, server = prompt(dialect, calls, tools=[look])
    first, second = (message for message in result.messages if isinstance(message, ToolResultMessage))
    assert first.is_error
    assert "not a JSON object" in first.text
    assert second.text == "sun in Oslo"
    assert (result.text, len(server.requests)) == ("Sun.", 3)


def test_a_refusal_is_a_failure_of_its_own_kind() -> None:
    replies = [Anthropic.answer("I", stop_reason="refusal")]
    result, _ = prompt(DIALECTS["anthropic"], replies)
    assert isinstance(result.error, ContentRefused)
    assert isinstance(result.error, ProviderError)
    assert not result.error.retryable
