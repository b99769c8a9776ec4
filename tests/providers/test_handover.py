"""A thread that goes from one service to another and back: what each of them gets is valid by its own rules.

The validators are stricter than our converters need to be: they know the services' rules and nothing of our code.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from byssus import (
    Agent,
    AssistantMessage,
    ImageContent,
    Model,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    UserMessage,
)
from byssus.messages import Block, Message, Note, UnknownBlock
from byssus.providers import anthropic, openai
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.base import Provider, Request
from byssus.providers.history import valid_history
from byssus.providers.openai import OpenAIProvider
from byssus.providers.openai_models import Service
from byssus.providers.scripted import ScriptedProvider
from tests.support.databases import Database
from tests.support.histories import shared_ids
from tests.support.wire import Anthropic, OpenAI, Reply, Server

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
IMAGE_TYPES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
CLAUDE, GPT = Model("claude-haiku-4-5"), Model("gpt-4o")


# --- what OpenAI takes ------------------------------------------------------------------------------------------------


def check_openai(body: dict[str, Any]) -> None:
    """The rules of chat completions for a conversation."""
    as_strict_json(body)
    messages = body["messages"]
    assert messages
    waiting: list[str] = []
    used: set[str] = set()
    for position, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            assert set(message) == {"role", "tool_call_id", "content"}
            waiting.remove(message["tool_call_id"])  # each call is answered once, right behind it
            assert isinstance(message["content"], str)
            assert message["content"].strip()
            continue
        assert not waiting, "a call without its result"
        if role == "user":
            assert set(message) == {"role", "content"}
            check_openai_content(message["content"])
        elif role == "assistant":
            waiting = check_openai_reply(message)
            assert used.isdisjoint(waiting)
            used.update(waiting)
        else:
            assert (role, position) in {("system", 0), ("developer", 0)}
    assert not waiting, "a call without its result"


def check_openai_content(content: Any) -> None:
    if isinstance(content, str):
        assert content.strip()
        return
    assert content
    for part in content:
        if part["type"] == "text":
            assert set(part) == {"type", "text"}
            assert part["text"].strip()
        else:
            assert set(part) == {"type", "image_url"}
            media_type, data = re.fullmatch(r"data:(.+?);base64,(.+)", part["image_url"]["url"]).groups()  # type: ignore[union-attr]
            assert part["type"] == "image_url"
            assert media_type in IMAGE_TYPES
            base64.b64decode(data, validate=True)


def check_openai_reply(message: dict[str, Any]) -> list[str]:
    """The ids of its calls."""
    assert set(message) <= {"role", "content", "tool_calls"}, "a field that OpenAI does not know"
    calls = message.get("tool_calls", [])
    assert calls or "tool_calls" not in message
    assert message["content"].strip() if message["content"] is not None else calls
    for call in calls:
        assert set(call) == {"id", "type", "function"}
        assert call["type"] == "function"
        assert set(call["function"]) == {"name", "arguments"}
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", call["id"])
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call["function"]["name"])
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    return ids


# --- what Anthropic takes ---------------------------------------------------------------------------------------------


def without_marks(value: Any, marks: list[None]) -> Any:
    """The same without the marks for the cache, which may stand on any block but one of thinking."""
    if isinstance(value, list):
        return [without_marks(item, marks) for item in value]
    if not isinstance(value, dict):
        return value
    if "cache_control" in value:
        assert value["cache_control"] == {"type": "ephemeral"}
        assert "thinking" not in value["type"] if "type" in value else True
        marks.append(None)
    return {key: without_marks(item, marks) for key, item in value.items() if key != "cache_control"}


def check_anthropic(body: dict[str, Any]) -> None:
    """The rules of the Messages API for a conversation."""
    as_strict_json(body)
    marks: list[None] = []
    body = without_marks(body, marks)
    assert len(marks) <= 4
    waiting: list[str] = []
    used: set[str] = set()
    assert body["messages"]
    for position, turn in enumerate(body["messages"]):
        assert set(turn) == {"role", "content"}
        assert turn["role"] == ("assistant" if position % 2 else "user")
        assert turn["content"]
        if turn["role"] == "user":
            check_anthropic_answers(turn["content"], waiting)
            waiting = []
            continue
        waiting = check_anthropic_reply(turn["content"])
        assert used.isdisjoint(waiting)
        used.update(waiting)
    assert not waiting, "a call without its result"


def check_anthropic_answers(content: list[dict[str, Any]], waiting: list[str]) -> None:
    results = [block for block in content if block["type"] == "tool_result"]
    assert content[: len(results)] == results, "results come first"
    assert sorted(result["tool_use_id"] for result in results) == sorted(waiting)
    for result in results:
        assert set(result) <= {"type", "tool_use_id", "content", "is_error"}
        assert result["content"]
        kinds = {block["type"] for block in result["content"]}
        assert kinds <= ({"text"} if result.get("is_error") else {"text", "image"})
    for block in [*content[len(results) :], *(inner for result in results for inner in result["content"])]:
        check_anthropic_block(block)


def check_anthropic_reply(content: list[dict[str, Any]]) -> list[str]:
    """The ids of its calls."""
    ids = []
    for block in content:
        if block["type"] == "tool_use":
            assert set(block) == {"type", "id", "name", "input"}
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", block["id"])
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", block["name"])
            assert isinstance(block["input"], dict)
            ids.append(block["id"])
        else:
            check_anthropic_block(block, thinking=True)
    assert "thinking" not in content[-1]["type"]
    assert len(set(ids)) == len(ids)
    return ids


def check_anthropic_block(block: dict[str, Any], *, thinking: bool = False) -> None:
    match block["type"]:
        case "text":
            assert set(block) == {"type", "text"}
            assert block["text"].strip()
        case "image":
            source = block["source"]
            assert source["type"] == "base64"
            assert source["media_type"] in IMAGE_TYPES
            base64.b64decode(source["data"], validate=True)
        case "thinking":
            assert thinking
            assert set(block) == {"type", "thinking", "signature"}
            assert block["signature"].startswith("by-anthropic"), "signed by somebody else"
        case _:
            assert thinking
            assert (block["type"], set(block)) == ("redacted_thinking", {"type", "data"})
            assert block["data"]


def as_strict_json(body: dict[str, Any]) -> None:
    json.dumps(body, allow_nan=False, ensure_ascii=False).encode()


# --- a thread that wanders --------------------------------------------------------------------------------------------


def photograph(of: str) -> ToolResult:
    """Take a photograph."""
    return ToolResult([TextContent(f"{of}, from above"), ImageContent(PIXEL)])


def measure(of: str) -> str:
    """Measure something."""
    raise ValueError(f"{of} cannot be measured")


CLAUDES_ID = "toolu_" + "x" * 50  # longer than OpenAI takes
GPTS_ID = "call_1|fc_2"  # with a character that Anthropic does not take
REUSED_ID = "call_0"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_a_thread_goes_from_anthropic_to_openai_and_back(database: Database) -> None:
    with Server() as claude, Server() as gpt:
        claude.script(
            Anthropic.answer(
                ThinkingContent("a picture helps", signature="by-anthropic-1"),
                ThinkingContent(redacted="sealed"),
                "I look.",
                ToolCall(CLAUDES_ID, "photograph", {"of": "the reef"}),
                ToolCall(REUSED_ID, "measure", {"of": "the reef"}),
            ),
            Anthropic.answer("A reef."),
            Anthropic.answer(ThinkingContent("enough", signature="by-anthropic-2"), "Kelp, then."),
        )
        gpt.script(
            OpenAI.answer(
                ThinkingContent("closer"),
                ToolCall(GPTS_ID, "photograph", {"of": "a mussel"}),
                ToolCall(REUSED_ID, "functions.measure", {"of": "kelp"}),
            ),
            OpenAI.answer("A mussel."),
        )
        asyncio.run(wander(database, AnthropicProvider("k", claude.url), OpenAIProvider("k", gpt.url)))
        for request in claude.requests:
            check_anthropic(request.body)
        for request in gpt.requests:
            without_thoughts(request.body)
            check_openai(request.body)
        check_what_claude_remembers(claude.requests[-1].body["messages"])
        check_what_gpt_was_told(gpt.requests[-1].body["messages"])


async def wander(database: Database, claude: Provider, gpt: Provider) -> None:
    async with database.checkpointer() as checkpointer:
        for provider, model, prompt in (
            (claude, CLAUDE, "What is down there?"),
            (gpt, GPT, "And what holds on to it?"),
            (claude, CLAUDE, "So what is it?"),
        ):
            agent = Agent(
                provider=provider,
                model=model,
                system_prompt="Be brief.",
                tools=[photograph, measure],
                checkpointer=checkpointer,
                thread_id="wander",
            )
            (await agent.prompt(prompt)).raise_for_error()


def without_thoughts(body: dict[str, Any]) -> None:
    """This server told its thoughts and gets them back, as it should. OpenAI does neither."""
    for message in body["messages"]:
        assert message.pop("reasoning_content", "closer") == "closer"


def check_what_claude_remembers(messages: list[dict[str, Any]]) -> None:
    first, answers, foreign = messages[1]["content"], messages[2]["content"], messages[5]["content"]
    assert first[:3] == [
        {"type": "thinking", "thinking": "a picture helps", "signature": "by-anthropic-1"},
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "text", "text": "I look."},
    ]
    assert [block["id"] for block in first[3:]] == [CLAUDES_ID, REUSED_ID]
    assert [block["type"] for block in answers[0]["content"]] == ["text", "image"]
    assert answers[1]["is_error"]
    assert [block["type"] for block in foreign] == ["tool_use", "tool_use"]
    assert {block["id"] for block in foreign}.isdisjoint({GPTS_ID, REUSED_ID})


def check_what_gpt_was_told(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    called = ["assistant", "tool", "tool", "user"]
    assert roles == ["system", "user", *called, "assistant", "user", *called]
    calls = messages[2]["tool_calls"]
    assert messages[2]["content"] == "I look."
    assert calls[0]["id"] != CLAUDES_ID
    assert calls[1]["id"] == REUSED_ID
    assert messages[3]["content"] == "the reef, from above"
    assert messages[4]["content"].startswith("Error: ")
    assert messages[5]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"


def test_a_thread_of_the_one_can_be_continued_by_the_other_after_it_failed_in_the_middle(database: Database) -> None:
    cut: Reply = Anthropic.answer(
        ThinkingContent("hm", signature="by-anthropic"), "I was about to", ToolCall("a", "photograph", {"of": "it"})
    )

    async def go(claude: Provider, gpt: Provider) -> None:
        async with database.checkpointer() as checkpointer:
            for provider, model, prompt in ((claude, CLAUDE, "Go."), (gpt, GPT, "Go on."), (claude, CLAUDE, "And?")):
                agent = Agent(provider=provider, model=model, checkpointer=checkpointer, thread_id="cut")
                await agent.prompt(prompt)

    with (
        Server([cut.cut(after=len(cut.frames) - 4), Anthropic.answer("ok")]) as claude,
        Server([OpenAI.answer("ok")]) as gpt,
    ):
        asyncio.run(go(AnthropicProvider("k", claude.url), OpenAIProvider("k", gpt.url)))
        for request in claude.requests:
            check_anthropic(request.body)
        check_openai(gpt.body)
        assert [message["content"] for message in gpt.body["messages"]] == ["Go.", "I was about to", "Go on."]


SAME = [ToolCall("x", "measure", {"of": "one"}), ToolCall("x", "measure", {"of": "two"})]


@pytest.mark.parametrize("service", [Anthropic, OpenAI])
def test_a_service_that_uses_one_call_id_again_and_again_gets_ids_of_which_each_is_one_calls(
    database: Database, service: type[Anthropic] | type[OpenAI]
) -> None:
    async def go(provider: Provider, model: Model) -> None:
        async with database.checkpointer() as cp:
            agent = Agent(provider=provider, model=model, tools=[measure], checkpointer=cp, thread_id="t")
            (await agent.prompt("Measure them.")).raise_for_error()
            (await agent.prompt("Thank you.")).raise_for_error()

    answers = [service.answer(*SAME), service.answer(SAME[0]), service.answer("done"), service.answer("gladly")]
    with Server(answers) as server:
        if service is Anthropic:
            asyncio.run(go(AnthropicProvider("k", server.url, cache=False), CLAUDE))
        else:
            asyncio.run(go(OpenAIProvider("k", server.url), GPT))
        sent = [request.body for request in server.requests]
    for body, longer in itertools.pairwise(sent):
        assert longer["messages"][: len(body["messages"])] == body["messages"], "its cache knows the beginning"
    for body in sent:
        (check_anthropic if service is Anthropic else check_openai)(body)


def test_a_provider_of_ones_own_gets_each_call_id_once() -> None:
    provider = ScriptedProvider([SAME, SAME, [ToolCall("", "measure", {"of": "three"})], "done"])
    agent = Agent(provider=provider, model=Model("scripted"), tools=[measure])
    asyncio.run(agent.prompt("Measure them."))
    assert all(shared_ids(request.messages) == [] for request in provider.requests)
    assert len(provider.requests) == 4


# --- any history ------------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(exclude_categories=[]), max_size=8)
some_text = any_text.map(lambda text: f"{text}!")
ids = st.sampled_from(["call_0", "toolu_1", "x" * 41, "x" * 65, "a|b", "", "\ud800"]) | any_text
names = st.sampled_from(["look", "functions.look", "x" * 200, ""]) | any_text
texts = st.builds(TextContent, any_text)
images = st.builds(ImageContent, st.just(PIXEL), st.sampled_from(sorted(IMAGE_TYPES)))
unknown: st.SearchStrategy[Block] = st.builds(UnknownBlock, st.just({"type": "hologram"}))
signatures = st.none() | st.sampled_from(["by-anthropic", "reasoning_content@api.openai.com"])
thoughts = st.builds(ThinkingContent, any_text, signatures, st.none() | st.just("sealed"))
values = st.recursive(st.none() | any_text | st.floats() | st.integers(), lambda inner: st.lists(inner, max_size=2))
calls = st.builds(ToolCall, ids, names, st.dictionaries(any_text, values, max_size=2), st.none() | any_text)


def blocks(*kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Block]]:
    return st.lists(st.one_of(*kinds), max_size=4)


def is_visible(content: list[Block]) -> bool:
    """Whether a user said anything that a model can see: a history does not promise that yet."""
    return any(
        block.text.strip() if isinstance(block, TextContent) else isinstance(block, ImageContent) for block in content
    )


users = st.builds(UserMessage, blocks(texts, images, unknown).filter(is_visible))
stops = st.sampled_from(["stop", "tool_use", "length", "error", "aborted"])


def signed_by_its_maker(reply: AssistantMessage) -> bool:
    """Only Anthropic signs as Anthropic; a reply without a provider is taken for one's own."""
    foreign = any(isinstance(block, ThinkingContent) and "@" in (block.signature or "") for block in reply.content)
    return not foreign or reply.provider == "openai"


replies = st.builds(
    AssistantMessage,
    blocks(texts, thoughts, calls, images, unknown),
    stops,
    provider=st.sampled_from([None, "anthropic", "openai", "local"]),
).filter(signed_by_its_maker)
results = st.builds(ToolResultMessage, ids, names, blocks(texts, images, unknown), is_error=st.booleans())
notes = st.builds(Note, st.just({"role": "system", "content": "internal"}))


@st.composite
def exchanges(draw: st.DrawFn) -> list[Message]:
    """A reply and results for some of its calls, in any order, with others in between."""
    reply = draw(replies)
    answered = draw(st.permutations(reply.tool_calls))[: draw(st.integers(0, 4))]
    told: list[Message] = [
        ToolResultMessage(call.id, call.name, draw(blocks(texts, images)), is_error=draw(st.booleans()))
        for call in answered
    ]
    between = draw(st.lists(users | notes | results, max_size=2))
    return [reply, *draw(st.permutations([*told, *between]))]


histories = st.lists(exchanges() | st.lists(users | replies | results | notes, max_size=2), max_size=5)


@given(histories, some_text)
def test_whatever_history_there_is_both_services_get_a_valid_one(parts: list[list[Message]], prompt: str) -> None:
    messages = valid_history([*(message for part in parts for message in part), UserMessage(prompt)])
    assume(messages)
    check_anthropic(anthropic._body(Request(CLAUDE, messages)))
    check_openai(openai._body(Request(GPT, messages, "Be brief."), Service("api.openai.com", own=True)))
