"""Messages and blocks: made, written and read back without loss."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus.errors import InputError, StoreCorrupt
from byssus.messages import (
    AssistantMessage,
    Block,
    Failure,
    ImageContent,
    Message,
    ModelMessage,
    Note,
    ReplyStop,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    Usage,
    UserMessage,
    decode,
    encode,
    from_value,
    to_value,
)
from tests.support.quick import examples

# JSON writes a character beyond U+FFFF as a pair of surrogates, so a pair in a string *is* that character afterwards:
# that one thing cannot come back as two. Everything else must, lone surrogates and NUL included.
PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
texts = st.text(st.characters(codec=None, exclude_categories=())).filter(lambda text: not PAIR.search(text))
numbers = st.integers() | st.integers(-(2**300), 2**300) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
ids = st.none() | texts


def unknown(*known: str) -> st.SearchStrategy[dict[str, Any] | None]:
    """Fields that no version of this code has heard of."""
    names = texts.filter(lambda name: name not in known and name != "~unknown")
    return st.none() | st.dictionaries(names, values, min_size=1, max_size=2)


text_blocks = st.builds(TextContent, text=texts, unknown=unknown("type", "text"))
image_blocks = st.builds(ImageContent, data=texts, mime_type=texts, unknown=unknown("type", "data", "mime_type"))
thinking_blocks = st.builds(
    ThinkingContent,
    thinking=texts,
    signature=ids,
    redacted=ids,
    unknown=unknown("type", "thinking", "signature", "redacted"),
)
call_blocks = st.builds(
    ToolCall,
    id=texts,
    name=texts,
    arguments=objects,
    malformed=ids,
    unknown=unknown("type", "id", "name", "arguments", "malformed"),
)
KNOWN_TYPES = ("text", "image", "thinking", "tool_call", "~unknown")
unknown_blocks = st.builds(
    UnknownBlock,
    st.builds(lambda kind, rest: {**rest, "type": kind}, texts.filter(lambda kind: kind not in KNOWN_TYPES), objects)
    | values.filter(lambda value: not isinstance(value, dict) or value.get("type") not in KNOWN_TYPES),
)
contents = st.lists(text_blocks | image_blocks | thinking_blocks | call_blocks | unknown_blocks, max_size=3)

usages = st.builds(
    Usage,
    st.integers(),
    st.integers(0, 2**80),
    st.integers(),
    st.integers(),
    st.floats(),
    unknown=unknown("input", "output", "cache_read", "cache_write", "cost"),
)
failures = st.builds(Failure, texts, texts, unknown=unknown("kind", "message"))
COMMON = ("role", "id", "created_at", "content")
user_messages = st.builds(UserMessage, contents, id=ids, created_at=ids, unknown=unknown(*COMMON))
replies = st.builds(
    AssistantMessage,
    contents,
    texts,
    usages,
    ids,
    ids,
    st.none() | failures,
    id=ids,
    created_at=ids,
    unknown=unknown(*COMMON, "stop_reason", "usage", "model", "provider", "error"),
)
results = st.builds(
    ToolResultMessage,
    texts,
    texts,
    contents,
    values,
    st.booleans(),
    id=ids,
    created_at=ids,
    unknown=unknown(*COMMON, "tool_call_id", "tool_name", "details", "is_error"),
)
ROLES = ("user", "assistant", "tool_result")
notes = st.builds(Note, values.filter(lambda value: not isinstance(value, dict) or value.get("role") not in ROLES))
messages = user_messages | replies | results | notes


def exactly(value: object) -> str:
    """A form in which NaN equals itself, and 1, 1.0 and True are three things."""
    return repr(value)


def body(**fields: Any) -> str:
    return json.dumps({"role": "user", "content": [], **fields})


# --- round trips ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(400))
@given(messages)
def test_a_message_comes_back_from_json_as_it_was(message: Message) -> None:
    assert exactly(decode(encode(message))) == exactly(message)


@given(messages)
def test_a_message_comes_back_from_plain_values_as_it_was(message: Message) -> None:
    assert exactly(from_value(to_value(message))) == exactly(message)


@given(messages)
def test_stored_json_is_text_that_every_database_takes(message: Message) -> None:
    stored = encode(message)
    assert "\0" not in stored
    assert stored.encode()
    json.loads(stored)


@given(messages)
def test_writing_what_was_read_changes_nothing(message: Message) -> None:
    once = encode(message)
    assert encode(decode(once)) == once


@given(values)
def test_any_json_can_be_read_and_is_kept(value: Any) -> None:
    assert exactly(to_value(decode(json.dumps(value)))) == exactly(value)


@given(messages)
def test_equal_messages_are_written_alike(message: Message) -> None:
    assert encode(from_value(to_value(message))) == encode(message)


def test_a_pair_of_surrogates_is_the_character_that_it_stands_for() -> None:
    assert decode(encode(UserMessage("\ud83d\ude00"))).text == "\U0001f600"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 2**64, -(2**63) - 1, 10**400])
def test_numbers_survive_at_every_level(number: float) -> None:
    message = AssistantMessage(
        [ToolCall("c", "t", {"n": number, "in": [{"n": number}]}), UnknownBlock({"type": "new", "n": number})],
        unknown={"n": number},  # type: ignore[call-arg]
    )
    assert exactly(decode(encode(message))) == exactly(message)
    result = ToolResultMessage("c", "t", "x", {"n": number})
    assert exactly(decode(encode(result))) == exactly(result)


@pytest.mark.parametrize("cost", [math.nan, math.inf, 0.1])
def test_a_cost_survives_whatever_number_it_is(cost: float) -> None:
    message = AssistantMessage("x", usage=Usage(1, 2, 3, 4, cost))
    assert exactly(decode(encode(message))) == exactly(message)


def test_a_number_beside_nothing_is_not_taken_for_nothing() -> None:
    details = {"nothing": None, "nan": math.nan, "text": "null"}
    read = decode(encode(ToolResultMessage("c", "t", "x", details)))
    assert isinstance(read, ToolResultMessage)
    assert exactly(read.details) == exactly(details)


def test_text_that_looks_like_our_own_marks_is_text() -> None:
    message = UserMessage([TextContent("~unknown null NaN"), TextContent('{"~unknown": 1}')])
    assert decode(encode(message)) == message


def test_a_block_named_like_our_own_marks_is_kept() -> None:
    message = UserMessage([{"type": "~unknown", "data": 5}])  # type: ignore[list-item]
    assert to_value(message)["content"] == [{"type": "~unknown", "data": 5}]
    assert to_value(decode(encode(message)))["content"] == [{"type": "~unknown", "data": 5}]


def test_a_field_named_like_our_own_marks_is_kept() -> None:
    stored = body(**{"~unknown": {"a": 1}, "b": 2})
    assert json.loads(encode(decode(stored))) == json.loads(stored)


# --- newer versions ---------------------------------------------------------------------------------------------------


def test_fields_of_a_newer_version_survive_at_every_level() -> None:
    newer = {
        "role": "assistant",
        "id": "m1",
        "content": [
            {"type": "text", "text": "a", "citations": [{"url": "x"}]},
            {"type": "tool_call", "id": "c", "name": "t", "arguments": {"x": 1}, "server": None},
            {"type": "audio", "data": "...", "length": 3.5},
            "a bare string",
            7,
            None,
        ],
        "stop_reason": "paused",
        "usage": {"input": 1, "reasoning": 5},
        "error": {"kind": "A", "message": "b", "status": 529},
        "weight": {"nested": [1, None, True]},
    }
    message = decode(json.dumps(newer))
    assert isinstance(message, AssistantMessage)
    assert message.text == "a"
    assert message.usage.input == 1
    assert message.error is not None
    assert message.error.kind == "A"
    assert json.loads(encode(message)) == newer


def test_a_changed_message_keeps_what_it_does_not_know() -> None:
    message = decode(body(weight=3))
    assert json.loads(encode(message)) == {"role": "user", "content": [], "weight": 3}


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "text",
        [],
        {},
        {"role": "system", "content": "be nice"},
        {"role": 5, "content": []},
        {"role": ["user"], "content": []},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"type": "text", "text": "x"}},
        {"role": "tool_result", "content": "no call"},
        {"role": "assistant", "content": [], "usage": "a lot"},
        {"role": "user", "content": [], "id": 5},
    ],
)
def test_what_is_no_message_becomes_a_note_and_is_kept(value: Any) -> None:
    note = decode(json.dumps(value))
    assert note == Note(value)
    assert json.loads(encode(note)) == value


def test_a_note_has_the_role_and_the_text_that_people_see() -> None:
    assert Note({"role": "system", "content": "be nice"}).role == "system"
    assert Note({"role": "system", "content": [{"type": "text", "text": "be"}, "nice"]}).text == "be\nnice"
    assert Note([1]).role == "note"
    assert Note({"role": 5}).role == "note"
    assert Note({}).text == ""


def test_the_text_content_of_other_libraries_is_read() -> None:
    assert decode('{"role": "user", "content": "plain"}') == UserMessage("plain")


@pytest.mark.parametrize("text", ["", "{", "nul", "{'role': 'user'}", '{"role": "user"} x', '"\\ud83'])
def test_text_that_is_no_json_is_called_corrupt(text: str) -> None:
    with pytest.raises(StoreCorrupt, match="not JSON"):
        decode(text)


def test_json_that_is_nested_too_deeply_is_called_corrupt() -> None:
    with pytest.raises(StoreCorrupt):
        decode('{"role":"user","content":[],"x":' + "[" * 100_000 + "]" * 100_000 + "}")


# --- what cannot be written -------------------------------------------------------------------------------------------


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "details",
    [pytest.param(object(), id="object"), pytest.param(1j, id="complex"), pytest.param({1, object()}, id="s")],
)
def test_what_json_cannot_hold_is_refused_by_name(details: object) -> None:
    with pytest.raises(InputError, match="a tool_result message cannot be stored as JSON"):
        encode(ToolResultMessage("c", "t", "x", details))


def test_nesting_beyond_all_limits_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="cannot be stored as JSON"):
        encode(ToolResultMessage("c", "t", "x", deep()))


def test_a_number_beyond_all_limits_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="cannot be stored as JSON"):
        encode(ToolResultMessage("c", "t", "x", 10**5000))


def test_a_note_that_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="a note message cannot be stored as JSON"):
        encode(Note([object()]))


# --- constructors -----------------------------------------------------------------------------------------------------


def test_a_string_becomes_one_text_block() -> None:
    assert UserMessage("plain").content == [TextContent("plain")]
    assert UserMessage(content="plain") == UserMessage(content=[TextContent(text="plain")])
    assert AssistantMessage("plain").content == [TextContent("plain")]
    assert ToolResultMessage("c", "t", "plain").content == [TextContent("plain")]


def test_blocks_may_come_in_any_sequence() -> None:
    blocks: list[Block] = [TextContent("a"), ImageContent("b64", "image/jpeg")]
    assert UserMessage(tuple(blocks)) == UserMessage(blocks)
    assert isinstance(UserMessage(tuple(blocks)).content, list)


def test_a_single_block_is_a_content() -> None:
    assert UserMessage(TextContent("a")) == UserMessage("a")  # type: ignore[arg-type]


def test_dicts_are_blocks_too() -> None:
    message = UserMessage([{"type": "text", "text": "a", "new": 1}, {"type": "video"}])  # type: ignore[list-item]
    assert message.content == [TextContent("a", unknown={"new": 1}), UnknownBlock({"type": "video"})]


@pytest.mark.parametrize("content", [None, 5, 1.5, b"bytes", object(), [None], ["a", "b"], [UserMessage("x")], [[]]])
def test_content_that_cannot_be_meant_is_refused(content: Any) -> None:
    with pytest.raises(InputError, match="UserMessage content must be a string or a list of blocks"):
        UserMessage(content)


def test_the_role_is_an_attribute_of_the_class_and_of_the_value() -> None:
    pairs: list[tuple[ModelMessage, str]] = [
        (UserMessage("x"), "user"),
        (AssistantMessage("x"), "assistant"),
        (ToolResultMessage("c", "t", "x"), "tool_result"),
    ]
    for message, role in pairs:
        assert message.role == role
        assert type(message).role == role


def test_blocks_know_their_type() -> None:
    blocks: list[Block] = [TextContent("x"), ImageContent("x"), ThinkingContent("x"), ToolCall("c", "t")]
    assert [block.type for block in blocks] == ["text", "image", "thinking", "tool_call"]


def test_a_message_cannot_be_changed() -> None:
    for message in (UserMessage("x"), AssistantMessage("x"), ToolResultMessage("c", "t", "x"), Note(1)):
        with pytest.raises(AttributeError):
            message.content = []  # type: ignore[union-attr,misc]
    with pytest.raises(AttributeError):
        TextContent("x").text = "y"  # type: ignore[misc]


def test_the_callers_list_of_blocks_is_not_changed() -> None:
    blocks: list[Any] = [{"type": "text", "text": "a"}]
    UserMessage(blocks)
    assert blocks == [{"type": "text", "text": "a"}]


def test_two_messages_do_not_share_what_is_mutable() -> None:
    first, second = ToolCall("a", "t"), ToolCall("b", "t")
    first.arguments["x"] = 1
    assert second.arguments == {}


def test_text_is_all_text_and_nothing_else() -> None:
    message = AssistantMessage([ThinkingContent("hm"), TextContent("a"), ToolCall("c", "t"), TextContent("b")])
    assert message.text == "ab"
    assert [call.id for call in message.tool_calls] == ["c"]


@pytest.mark.parametrize(
    ("stop_reason", "failed"),
    [("stop", False), ("tool_use", False), ("length", False), ("error", True), ("aborted", True)],
)
def test_a_reply_failed_when_it_broke_off(stop_reason: ReplyStop, failed: bool) -> None:
    assert AssistantMessage("x", stop_reason).failed is failed


def test_usage_adds_up() -> None:
    total = Usage(1, 2, 3, 4, 0.5) + Usage(10, 20, 30, 40, 0.25)
    assert total == Usage(11, 22, 33, 44, 0.75)
    assert total.total == 110
    assert sum([Usage(1), Usage(2)], Usage()) == Usage(3)
