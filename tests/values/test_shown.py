"""What people see of messages, agents and providers: readable, printable, and without secrets."""

from __future__ import annotations

import pytest

from byssus import Agent, AssistantMessage, ImageContent, Model, TextContent, ToolCall, ToolResultMessage, UserMessage
from byssus.checkpointer import PostgresCheckpointer, SQLiteCheckpointer
from byssus.errors import ProviderError
from byssus.memory import SQLiteMemory
from byssus.messages import Failure, Note, ThinkingContent
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.local import LocalProvider
from byssus.providers.openai import OpenAIProvider
from byssus.providers.scripted import ScriptedProvider
from byssus.storage import AgentStorage
from byssus.values.shown import raised_at, reason, safe_markdown
from tests.support.agents import make, within
from tests.support.databases import Database


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        (UserMessage("hi"), "user: hi"),
        (AssistantMessage([ThinkingContent("hm"), TextContent("a")]), "assistant: a"),
        (
            AssistantMessage([ToolCall("c", "w", {"city": "上海"})], "tool_use"),
            'assistant: [calls w({"city": "上海"})]',
        ),
        (AssistantMessage("a", "error", error=Failure("Overloaded", "busy")), "assistant: a [error: Overloaded: busy]"),
        (ToolResultMessage("c", "w", "no", is_error=True), "tool_result w: no [failed]"),
        (UserMessage([TextContent("see"), ImageContent("iVBORw0KGgo=")]), "user: see\n[image image/png]"),
        (UserMessage("\ud800"), "user: \\ud800"),
        (Note({"a": 1}), 'note: {"a": 1}'),
    ],
)
def test_a_message_prints_as_people_read_it(message: object, printed: str) -> None:
    assert str(message) == printed
    str(message).encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b, 1 <2", "a < b, 1 <2"),
        ("<script>x</script>", "&lt;script>x&lt;/script>"),
        ("`<b>` and ``a`<b>``", "`<b>` and ``a`<b>``"),
        ("\\`<b>`", "\\`&lt;b>`"),
        ("| `a | <b>` |", "| `a | &lt;b>` |"),
        ("![x](https://tracker)", "!\\[x](https://tracker)"),
        ("```html\n<b>\n```\n<b>", "```html\n<b>\n```\n&lt;b>"),
        ("~~~\n<b>", "~~~\n<b>\n~~~"),
    ],
)
def test_markdown_keeps_code_and_loses_what_a_notebook_would_act_on(text: str, shown: str) -> None:
    assert safe_markdown(text) == shown


def test_a_message_in_a_notebook_shows_its_image_and_fences_what_tools_say() -> None:
    assert UserMessage([ImageContent("iVBORw0KGgo=")])._repr_markdown_() == (
        "**user**\n\n![image](data:image/png;base64,iVBORw0KGgo=)"
    )
    bad = ImageContent("x)<script>", "image/png")
    assert "<script>" not in UserMessage([bad])._repr_markdown_()
    assert "````\n```x\n````" in ToolResultMessage("c", "w", "```x")._repr_markdown_()


def test_no_repr_shows_a_key_or_a_password() -> None:
    for shown in (
        repr(OpenAIProvider("sk-secret", "https://me:sk-secret@host/v1?key=sk-secret")),
        repr(AnthropicProvider("sk-secret", "https://host")),
        repr(PostgresCheckpointer("postgresql://ann:sk-secret@host/db")),
        repr(Agent(model=Model("m"), provider=OpenAIProvider("sk-secret"))),
    ):
        assert "sk-secret" not in shown
        assert not shown.startswith("<")
    assert repr(AnthropicProvider("k", "https://host")) == "AnthropicProvider(base_url='https://host')"
    assert repr(SQLiteCheckpointer("a.db")) == "SQLiteCheckpointer('a.db', not open)"


def test_agents_and_streams_tell_their_state() -> None:
    agent = make(ScriptedProvider(["ok"]))
    stream = agent.stream("hi")
    assert repr(stream) == "EventStream(not started)"

    async def main() -> None:
        async for _ in stream:
            assert repr(stream) == "EventStream(running)" or "over" in repr(stream)

    within(main())
    assert repr(stream) == "EventStream(over: stop)"
    assert repr(agent.state) == "AgentState(2 messages, idle)"
    assert repr(agent).startswith("Agent('scripted:")


def test_no_repr_raises_on_what_is_not_loaded_not_open_or_closed(database: Database) -> None:
    cp = database.checkpointer()
    agent = make(ScriptedProvider(["ok"]), checkpointer=cp, thread_id="t")
    assert repr(agent.state) == "AgentState(not loaded, idle)"
    assert repr(cp).endswith("not open)")
    with cp:
        agent.run_sync("hi")
        assert repr(agent.state) == "AgentState(2 messages, idle)"
        assert repr(cp).endswith(", open)")
    assert repr(cp).endswith("not open)")
    storage = AgentStorage(database.place)
    storage.close()
    assert repr(storage).endswith(", closed)")
    assert repr(LocalProvider()).startswith("LocalProvider(")
    assert repr(SQLiteMemory(":memory:")).startswith("SQLiteMemory(")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no\n\tnetwork"), "ValueError: no network"),
        (ValueError(), "ValueError"),
        (ValueError("\x1b[31m \u202e \ud800 错误"), "ValueError: \\x1b[31m \\u202e \\ud800 错误"),
        (ValueError("at postgresql://eve:hush@db/chat"), "ValueError: at postgresql://***@db/chat"),
        (ValueError("x" * 600), f"ValueError: {'x' * 500}..."),
    ],
)
def test_a_reason_is_one_line_that_can_be_printed_and_holds_no_password(error: Exception, line: str) -> None:
    assert reason(error) == line


def _mistaken() -> None:
    dict[str, str]().__getitem__("a key that is not there")


def test_a_mistake_in_code_is_told_with_its_file_and_line_and_other_failures_are_not() -> None:
    with pytest.raises(KeyError) as caught:
        _mistaken()
    wrapped = ProviderError("provider 'p' failed")
    wrapped.__cause__ = caught.value
    line = _mistaken.__code__.co_firstlineno + 1
    assert raised_at(wrapped) == raised_at(caught.value) == f" (values/test_shown.py:{line})"
    assert raised_at(ProviderError("busy")) == raised_at(TypeError("never raised")) == ""
    with pytest.raises(OSError, match="gone") as failed:
        raise OSError("gone")
    assert raised_at(failed.value) == ""
