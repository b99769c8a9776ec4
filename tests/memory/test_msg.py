"""Msg: a message as memories give and take it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from byssus.errors import InputError
from byssus.memory.msg import Msg

BLOCKS = [
    {"type": "text", "text": "one"},
    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
    {"type": "text", "text": "two"},
    "not a dict",
]


def test_a_message_has_an_id_of_its_own_and_nothing_that_it_was_not_given() -> None:
    made, other = Msg("ann", "hi", "user"), Msg("ann", "hi", "user")
    assert isinstance(made.id, str)
    assert made.id
    assert made.id != other.id
    assert (made.name, made.content, made.role, made.metadata, made.invocation_id) == ("ann", "hi", "user", {}, None)


def test_the_id_can_be_set_but_is_no_argument() -> None:
    made = Msg("ann", "hi", "user")
    made.id = "mine"
    assert made.to_dict()["id"] == "mine"
    with pytest.raises(TypeError):
        Msg("ann", "hi", "user", id="mine")  # type: ignore[call-arg]


def test_a_message_is_of_now_by_the_local_clock_to_the_millisecond() -> None:
    before = datetime.now()
    made = Msg("ann", "hi", "user").timestamp
    after = datetime.now()
    assert made is not None
    assert len(made) == len("2026-01-02 03:04:05.678")
    read = datetime.strptime(made, "%Y-%m-%d %H:%M:%S.%f")
    assert before - timedelta(milliseconds=1) <= read <= after  # what is left out is below a millisecond


@pytest.mark.parametrize("stamp", ["1700000000", "whenever", "2026-01-02T03:04:05Z"])
def test_a_timestamp_is_any_text(stamp: str) -> None:
    assert Msg("ann", "hi", "user", timestamp=stamp).timestamp == stamp


@pytest.mark.parametrize("name", [None, "", "ann"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_name_may_be_missing_and_a_role_is_one_of_three(name: str | None, role: str) -> None:
    made = Msg(name, [], role)
    assert (made.name, made.role) == (name, role)


@pytest.mark.parametrize("role", ["tool", "", "User", None, 5, ["user"]])
def test_another_role_is_refused(role: Any) -> None:
    with pytest.raises(InputError, match="role must be one of 'user', 'assistant', 'system'"):
        Msg("ann", "hi", role)


@pytest.mark.parametrize("content", [None, 5, ("a",), {"type": "text"}, b"hi"])
def test_content_is_a_text_or_a_list(content: Any) -> None:
    with pytest.raises(InputError, match="content must be a string or a list of blocks"):
        Msg("ann", content, "user")


# --- as a dict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        Msg("ann", "hi", "user"),
        Msg(None, BLOCKS, "assistant", {"k": [1, {"deep": None}]}, "whenever", "run-1"),
        Msg("", [], "system", {}, "1700000000"),
    ],
)
def test_a_message_comes_back_from_its_dict_also_through_json(made: Msg) -> None:
    assert Msg.from_dict(made.to_dict()) == made
    again = Msg.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert (again.id, again.timestamp, again.invocation_id) == (made.id, made.timestamp, made.invocation_id)


def test_the_dict_has_the_fields_that_agentscope_reads() -> None:
    made = Msg("ann", "hi", "user", {"k": 1}, "then")
    fields = {"name": "ann", "role": "user", "content": "hi", "metadata": {"k": 1}, "timestamp": "then"}
    assert made.to_dict() == {"id": made.id, **fields, "invocation_id": None}
    made.invocation_id = "run-1"
    assert made.to_dict() == {"id": made.id, **fields, "invocation_id": "run-1"}


def test_the_dict_is_the_callers_own() -> None:
    made = Msg("ann", [{"type": "text", "text": "a"}], "user", {"k": [1]})
    told = made.to_dict()
    told["content"][0]["text"] = "b"
    told["metadata"]["k"].append(2)
    assert (made.content, made.metadata) == ([{"type": "text", "text": "a"}], {"k": [1]})


def test_a_dict_without_an_id_makes_a_new_message_and_what_is_unknown_in_it_is_left_out() -> None:
    values = {"name": "ann", "content": "hi", "role": "user", "url": "of tomorrow"}
    made, other = Msg.from_dict(values), Msg.from_dict(values)
    assert made.id != other.id
    assert made.timestamp is not None
    assert "url" not in made.to_dict()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        "hi",
        {},
        {"name": "ann", "content": "hi"},
        {"content": "hi", "role": "user"},
        {"name": "ann", "content": "hi", "role": "nobody"},
        {"name": "ann", "content": 5, "role": "user"},
    ],
)
def test_a_dict_that_is_no_message_is_refused(bad: Any) -> None:
    with pytest.raises(InputError):
        Msg.from_dict(bad)


def test_a_subclass_reads_its_own_kind() -> None:
    class Special(Msg):
        pass

    assert type(Special.from_dict(Msg("ann", "hi", "user").to_dict())) is Special


# --- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "other"),
        ("name", "bob"),
        ("content", "ho"),
        ("role", "system"),
        ("metadata", {"k": 1}),
        ("timestamp", "then"),
        ("invocation_id", "run-1"),
    ],
)
def test_messages_are_equal_if_all_their_fields_are(field: str, value: Any) -> None:
    made = Msg("ann", "hi", "user")
    other = Msg.from_dict(made.to_dict())
    assert made == other
    setattr(other, field, value)
    assert made != other


# --- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [("hi", "hi"), ("", ""), (BLOCKS, "one\ntwo"), ([], None), ([BLOCKS[1]], None), ([BLOCKS[0]], "one")],
)
def test_the_text_is_that_of_the_text_blocks(content: Any, text: str | None) -> None:
    assert Msg("ann", content, "user").get_text_content() == text


def test_texts_are_joined_as_the_caller_wants() -> None:
    assert Msg("ann", BLOCKS, "user").get_text_content(" + ") == "one + two"


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        (None, [0, 1, 2, 3]),
        ("text", [0, 2]),
        ("tool_use", [1]),
        (["text", "tool_use"], [0, 1, 2]),
        (("tool_use",), [1]),
        ("image", []),
        ([], []),
    ],
)
def test_blocks_are_found_by_their_types(wanted: Any, places: list[int]) -> None:
    made = Msg("ann", BLOCKS, "user")
    assert made.get_content_blocks(wanted) == [BLOCKS[place] for place in places]
    assert made.has_content_blocks(wanted) is bool(places)


def test_a_text_is_one_block() -> None:
    made = Msg("ann", "hi", "user")
    assert made.get_content_blocks() == made.get_content_blocks("text") == [{"type": "text", "text": "hi"}]
    assert made.get_content_blocks("tool_use") == []
    assert made.has_content_blocks("text")
    assert not made.has_content_blocks("tool_use")


def test_the_list_of_blocks_is_the_callers_own() -> None:
    made = Msg("ann", list(BLOCKS), "user")
    made.get_content_blocks().clear()
    assert made.content == BLOCKS
