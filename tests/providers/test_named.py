"""Models named by a string: which provider they get, who shares it, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from byssus import Agent, Model
from byssus.errors import InputError, MissingExtra
from byssus.providers import named
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.local import SMOLLM2, LocalProvider
from byssus.providers.named import provider_of, routes
from byssus.providers.openai import OpenAIProvider
from byssus.providers.scripted import ScriptedProvider
from tests.support.agents import within
from tests.support.wire import Anthropic, OpenAI, Server


@pytest.fixture(autouse=True)
def _nobody_shares_with_another_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-test")
    named._made.cache_clear()
    yield
    named._made.cache_clear()


def test_a_string_names_the_service_and_the_model() -> None:
    for text, kind, model in [
        ("openai:gpt-5.5", OpenAIProvider, Model("gpt-5.5", provider="openai")),
        ("anthropic:claude-x", AnthropicProvider, Model("claude-x", provider="anthropic")),
        (" openai : ft:gpt-5.5:me ", OpenAIProvider, Model("ft:gpt-5.5:me", provider="openai")),
        ("local", LocalProvider, SMOLLM2),
    ]:
        provider, named_model = provider_of(text)
        assert (type(provider), named_model) == (kind, model)


def test_a_local_file_is_a_model_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.v2.gguf").touch()
    provider, model = provider_of(f"local:{tmp_path}/tiny.v2.gguf")
    assert isinstance(provider, LocalProvider)
    assert model == Model("tiny.v2", provider="local")
    with pytest.raises(InputError, match=r"model 'local:nowhere\.gguf': there is no model file at nowhere\.gguf"):
        provider_of("local:nowhere.gguf")


def test_strings_of_one_service_share_its_provider_also_between_agents() -> None:
    one, other = (provider_of(f"openai:{model}")[0] for model in ("gpt-5.5", "gpt-5.5-mini"))
    assert one is other
    assert provider_of("anthropic:claude-x")[0] is provider_of("anthropic:claude-y")[0]


def test_another_key_in_the_environment_or_in_the_options_is_another_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    before = provider_of("openai:gpt-5.5")[0]
    assert provider_of("openai:gpt-5.5", api_key="sk-mine")[0] is not before
    monkeypatch.setenv("OPENAI_API_KEY", "sk-new")
    assert provider_of("openai:gpt-5.5")[0] is not before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("claude-sonnet-5-5", r"did you mean 'anthropic:claude-sonnet-5-5'\?"),
        ("gpt-5.5", r"did you mean 'openai:gpt-5\.5'\?"),
        ("o4-mini", r"did you mean 'openai:o4-mini'\?"),
        ("mistral:large", r"'mistral:large' names no service .* write 'anthropic:<model id>', .*base_url"),
        ("OpenAI:gpt-5.5", "'OpenAI:gpt-5.5' names no service"),
        ("", "model '' names no service"),
        ("openai", r"model 'openai' has no model id; write 'openai:<model id>'"),
        ("openai: ", "has no model id"),
        ("local:", "has no model id"),
        (5, "got 5"),
    ],
)
def test_a_string_that_names_no_model_is_refused_with_what_to_write(name: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        provider_of(name)


@pytest.mark.parametrize("service", ["openai", "anthropic"])
def test_a_missing_extra_is_told_when_the_agent_is_made(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(MissingExtra, match=rf"model '{service}:x' needs the extra '{service}'.*pip install"):
        Agent(model=f"{service}:x")


# --- agents -----------------------------------------------------------------------------------------------------------


def test_an_agent_needs_no_provider_when_its_model_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([OpenAI.answer("Hello.")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert within(Agent(model="openai:gpt-5.5").prompt("hi")).text == "Hello."
        assert server.requests[0].body["model"] == "gpt-5.5"


def test_an_agent_with_a_list_of_strings_asks_the_next_one_when_the_first_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = Anthropic.error(529, "overloaded_error", "Overloaded", retry_after="0")
    with Server([busy]) as first, Server([OpenAI.answer("Second.")]) as second:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", first.url)
        monkeypatch.setenv("OPENAI_BASE_URL", second.url)
        agent = Agent(model=["anthropic:claude-x", Model("gpt-5.5", provider="openai")], max_retries=0)
        assert within(agent.prompt("hi")).text == "Second."


def test_the_connections_of_a_named_provider_end_with_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([OpenAI.answer("1"), OpenAI.answer("2"), OpenAI.answer("3")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)

        async def twice() -> None:
            for _ in range(2):
                await Agent(model="openai:gpt-5.5").prompt("hi")

        asyncio.run(twice())
        assert server.connections == 1
        asyncio.run(Agent(model="openai:gpt-5.5").prompt("hi"))  # another loop; warnings are errors
        assert server.connections == 2


def test_with_a_provider_a_string_is_the_id_of_its_model() -> None:
    provider = ScriptedProvider(["ok"])
    within(Agent(provider=provider, model="llama3:8b").prompt("hi"))
    assert provider.requests[0].model == Model("llama3:8b", provider="scripted")


def test_a_service_that_is_named_is_served_by_the_provider_of_that_name() -> None:
    mine = OpenAIProvider(api_key="sk-mine")
    (first, second) = routes(mine, ["openai:gpt-5.5", "local"])
    assert first.provider is mine
    assert first.model == Model("gpt-5.5", provider="openai")
    assert isinstance(second.provider, LocalProvider)


@pytest.mark.parametrize(
    ("provider", "model", "told"),
    [
        ("openai", Model("gpt-5.5"), r"provider='openai' is a string.*OpenAIProvider\(\).*'openai:<model id>'"),
        (None, Model("gpt-5.5"), r"model 'gpt-5\.5' names the provider ''; pass provider=\.\.\., or Model"),
        (None, Model("x", provider="mistral"), "model 'x' names the provider 'mistral'; pass provider="),
        (None, [], r"model must be a Model\(id='\.\.\.'\) or one of .*got \[\]"),
        (None, [None], "got None"),
        ([], Model("m"), r"provider must have a stream\(\) method.*got \[\]"),
        ([ScriptedProvider(), OpenAIProvider()], "m", "model 'm' names no service"),
    ],
)
def test_what_names_no_provider_is_refused(provider: Any, model: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        Agent(provider=provider, model=model)
