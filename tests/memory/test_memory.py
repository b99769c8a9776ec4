"""What every memory promises, whichever it is: a list of this process, a SQLite file or a Postgres database."""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from byssus.errors import InputError, NoMessage, WrongType
from byssus.memory import InMemoryMemory, Msg
from tests.support.databases import Database
from tests.support.memories import Driven, ids, msg, msgs, snapshot, stored, texts

EXAMPLES = int(os.environ.get("BYSSUS_EXAMPLES", "8"))


class Mark(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    """As AgentScope's agents pass marks."""

    HINT = "hint"
    COMPRESSED = "compressed"


class Anything:
    """A value of no type that anybody takes."""


def marked(memory: Driven, mark: str | list[str]) -> list[str]:
    return ids(memory.get_memory(mark, prepend_summary=False))


def all_ids(memory: Driven) -> list[str]:
    return ids(memory.get_memory(prepend_summary=False))


# --- adding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [None, "m", 5, ("a",)])
def test_adding_none_does_nothing_whatever_the_marks(memory: Driven, marks: Any) -> None:
    assert memory.add(None, marks) is None
    assert memory.size() == 0


def test_what_is_added_must_be_said(memory: Driven) -> None:
    with pytest.raises(TypeError):
        memory.add()


@pytest.mark.parametrize("wrap", [list, tuple, iter, lambda given: (each for each in given)])
def test_whatever_gives_messages_can_be_added(memory: Driven, wrap: Callable[[list[Msg]], Any]) -> None:
    memory.add(wrap(msgs("1", "2")))
    assert all_ids(memory.again()) == ["1", "2"]


def test_one_message_needs_no_list(memory: Driven) -> None:
    assert memory.add(msg("hi", "1")) is None
    assert (all_ids(memory), memory.size()) == (["1"], 1)


@pytest.mark.parametrize("wrong", ["x", ["x"], [{"name": "a", "content": "b", "role": "user"}], {"id": "1"}, 5, b"x"])
def test_what_is_no_message_is_refused(memory: Driven, wrong: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'id'; use Msg") as caught:
        memory.add(wrong)
    assert isinstance(caught.value, NoMessage)
    assert memory.size() == 0


@pytest.mark.parametrize("given", [[], msg("x")])
@pytest.mark.parametrize("marks", [("a",), {"a"}, 5, [5], ["a", None], b"a"])
def test_marks_of_a_wrong_type_are_refused(memory: Driven, marks: Any, given: Any) -> None:
    with pytest.raises(TypeError) as caught:
        memory.add(given, marks)
    assert isinstance(caught.value, WrongType)
    expected = f"The mark should be a string, a list of strings, or None, but got {type(marks)}."
    assert str(caught.value) == expected
    assert memory.size() == 0


def test_a_string_is_one_mark_and_not_one_for_each_character(memory: Driven) -> None:
    memory.add(msgs("1"), "hint")
    assert [marked(memory.again(), mark) for mark in ("hint", "h", "hin")] == [["1"], [], []]


def test_a_message_bears_all_its_marks(memory: Driven) -> None:
    memory.add(msgs("1", "2"), ["a", "b"])
    assert marked(memory, "a") == marked(memory, "b") == ["1", "2"]


def test_a_mark_that_is_given_twice_is_there_twice(memory: Driven) -> None:
    memory.add(msgs("1"), ["a", "a"])
    assert marked(memory.again(), "a") == ["1"]
    assert memory.update_messages_mark(None, "a") == 1
    assert marked(memory, "a") == ["1"]
    assert memory.update_messages_mark(None, "a") == 1
    assert marked(memory, "a") == []
    assert memory.update_messages_mark(None, "a") == 0


def test_the_empty_mark_is_a_mark(memory: Driven) -> None:
    memory.add(msgs("1"), "")
    memory.add(msgs("2"))
    assert marked(memory.again(), "") == ["1"]
    assert ids(memory.get_memory(exclude_mark="")) == ["2"]
    assert memory.update_messages_mark("x", "") == 1
    assert (marked(memory, "x"), marked(memory, "")) == (["1"], [])
    assert memory.update_messages_mark("", msg_ids=["2"]) == 1
    assert memory.delete_by_mark("") == 1
    assert all_ids(memory) == ["1"]


def test_of_an_enum_the_value_is_the_mark(memory: Driven) -> None:
    memory.add(msgs("1"), Mark.HINT)
    memory.add(msgs("2"), [Mark.HINT, "b"])
    assert marked(memory.again(), "hint") == marked(memory, Mark.HINT) == ["1", "2"]
    assert ids(memory.get_memory(exclude_mark=Mark.HINT)) == []
    assert memory.update_messages_mark(Mark.COMPRESSED, Mark.HINT, ["2"]) == 1
    assert marked(memory, "compressed") == ["2"]
    assert memory.delete_by_mark(Mark.HINT) == 1
    assert all_ids(memory) == ["2"]


def test_a_message_whose_id_is_there_is_left_out_and_the_old_one_stays_as_it_is(memory: Driven) -> None:
    memory.add(msg("old", "1"), "a")
    memory.add(msgs("2"))
    memory.again().add([msg("new", "1"), *msgs("3")], "b")
    assert texts(memory.get_memory()) == ["old", "text of 2", "text of 3"]
    assert (marked(memory, "a"), marked(memory, "b")) == (["1"], ["3"])
    assert memory.size() == 3


def test_one_call_may_hold_an_id_twice(memory: Driven) -> None:
    memory.add([msg("a", "1"), msg("b", "1")])
    assert texts(memory.again().get_memory()) == ["a", "b"]
    assert memory.size() == 2
    assert memory.update_messages_mark("m", msg_ids=["1"]) == 2
    assert memory.delete(["1"]) == 2


def test_duplicates_are_stored_if_they_are_allowed_and_deleted_together(memory: Driven) -> None:
    memory.add(msg("a", "1"))
    memory.add([msg("b", "1"), *msgs("2")], "m", allow_duplicates=True)
    assert texts(memory.again().get_memory()) == ["a", "b", "text of 2"]
    assert texts(memory.get_memory("m")) == ["b", "text of 2"]
    memory.add(msg("c", "1"))
    assert memory.size() == 3
    assert memory.delete(["1"]) == 2
    assert all_ids(memory) == ["2"]


@pytest.mark.parametrize("option", [True, False])
def test_the_options_of_other_memories_change_nothing(memory: Driven, option: bool) -> None:
    memory.add(msg("a", "1"), skip_duplicated=option)
    memory.add(msg("b", "1"), skip_duplicated=option, whatever=object())
    assert texts(memory.get_memory(whatever=1)) == ["a"]
    assert memory.delete_by_mark("x", whatever=1) == 0
    assert memory.delete(["1"], whatever=1) == 1


def test_a_message_that_was_deleted_and_comes_back_stands_at_the_end_without_its_old_marks(memory: Driven) -> None:
    memory.add(msgs("1", "2"), "a")
    memory.delete(["1"])
    memory.again().add(msgs("1"))
    assert all_ids(memory) == ["2", "1"]
    assert marked(memory, "a") == ["2"]


def test_what_becomes_of_a_message_after_it_was_added_is_its_owners_business(memory: Driven) -> None:
    blocks, numbers, marks = [{"type": "text", "text": "a"}], [1], ["a"]
    given = msg(blocks, "1", metadata={"k": numbers})
    memory.add(given, marks)
    blocks[0]["text"] = "b"
    numbers.append(2)
    given.id = "2"
    marks.append("b")
    (found,) = memory.get_memory("a")
    assert (found.id, found.content, found.metadata) == ("1", [{"type": "text", "text": "a"}], {"k": [1]})
    assert marked(memory, "b") == []


def test_what_is_read_is_the_readers_own(memory: Driven) -> None:
    memory.add(msg([{"type": "text", "text": "a"}], "1"))
    found = memory.get_memory()
    found[0].content[0]["text"] = "b"
    found[0].id = "2"
    found.clear()
    (again,) = memory.get_memory()
    assert (again.id, again.content) == ("1", [{"type": "text", "text": "a"}])
    (searched,) = memory.search("a")
    searched.content.clear()
    assert texts(memory.get_memory()) == [[{"type": "text", "text": "a"}]]


# --- what cannot be stored --------------------------------------------------------------------------------------------


def with_own_key() -> Msg:
    message = msg("x")
    message.metadata = {"k": {1: 2}}
    return message


def circular() -> Msg:
    blocks: list[Any] = []
    blocks.append(blocks)
    return msg(blocks)


@pytest.mark.parametrize(
    "bad",
    [
        msg([{"type": "data", "data": b"bytes"}]),
        msg([Anything()]),
        msg("x", metadata={"at": {1, 2}}),
        with_own_key(),
        circular(),
        msg("x", "nul\0"),
        msg("x", "lone \ud800"),
    ],
    ids=["bytes", "object", "set", "number as a key", "circular", "id with NUL", "id with a surrogate"],
)
def test_what_cannot_be_stored_is_refused_and_nothing_of_the_call_is_stored(memory: Driven, bad: Msg) -> None:
    memory.add(msgs("1"))
    with pytest.raises(InputError):
        memory.add([*msgs("2", "3"), bad, *msgs("4")], "m")
    with pytest.raises(InputError):
        memory.add(bad)
    assert all_ids(memory.again()) == ["1"]
    assert marked(memory, "m") == []
    memory.add(msgs("2"))
    assert all_ids(memory) == ["1", "2"]


def test_an_id_that_is_no_string_is_refused(memory: Driven) -> None:
    bad = msg("x")
    bad.id = 5  # type: ignore[assignment]
    with pytest.raises(WrongType, match="a message's id must be a string"):
        memory.add([*msgs("1"), bad])
    assert memory.size() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("metadata", [1]),
        ("metadata", "x"),
        ("timestamp", 5.0),
        ("invocation_id", 7),
        ("content", None),
        ("content", {"a": 1}),
        ("role", "tool"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_or_comes_back_as_it_was(memory: Driven, field: str, value: Any) -> None:
    """It is not changed in silence, and neither are the fields beside it."""
    given = msg("x", "1", metadata={"k": 1}, timestamp="yesterday", invocation_id="i")
    setattr(given, field, value)
    try:
        memory.add(given)
    except InputError:
        assert memory.size() == 0
    else:
        (found,) = memory.get_memory()
        assert found.to_dict() == given.to_dict()


@pytest.mark.parametrize("bad", ["a\0b", "lone \ud800", "x" * 501])
def test_a_mark_that_cannot_be_stored_is_refused_where_it_is_set_and_found_nowhere(memory: Driven, bad: str) -> None:
    memory.add(msgs("1"), "ok")
    setting: list[Callable[[], Any]] = [
        lambda: memory.add(msgs("2"), bad),
        lambda: memory.add(msgs("2"), ["fine", bad]),
        lambda: memory.update_messages_mark(bad),
        lambda: memory.update_messages_mark(bad, "ok"),
        lambda: memory.mark_compressed(["1"], "so far", bad),
        lambda: memory.load_state_dict({"content": [[msg("x").to_dict(), [bad]]]}),
    ]
    for call in setting:
        with pytest.raises(InputError):
            call()
    assert marked(memory, bad) == marked(memory, [bad]) == []
    assert ids(memory.get_memory(None, bad)) == marked(memory, [bad, "ok"]) == ["1"]
    assert memory.delete_by_mark(bad) == memory.delete_by_mark([bad]) == 0
    assert memory.update_messages_mark("x", bad) == memory.update_messages_mark(None, bad) == 0
    assert (all_ids(memory), marked(memory, "ok"), memory.compressed_summary()) == (["1"], ["1"], "")


def test_a_call_names_a_thousand_marks_at_most(memory: Driven) -> None:
    memory.add(msgs("1"), "m0")
    many = [f"m{n}" for n in range(1_001)]
    calls: list[Callable[[], Any]] = [
        lambda: memory.add(msgs("2"), many),
        lambda: memory.delete_by_mark(many),
        lambda: memory.get_memory(many),
        lambda: memory.get_memory(None, many),
    ]
    for call in calls:
        with pytest.raises(InputError, match="1,000 marks at most"):
            call()
    assert marked(memory, "m0") == all_ids(memory) == ["1"]


def test_long_and_many_marks_are_kept(memory: Driven) -> None:
    long, many = "é" * 500, [f"m{n}" for n in range(999)]
    memory.add(msgs("1"), [long, *many])
    assert marked(memory.again(), long) == marked(memory, "m998") == ["1"]
    assert marked(memory, ["no", *many]) == ["1"]
    assert memory.delete_by_mark([long, *many]) == 1


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [5, ("a",), {"a"}, [5], ["a", 5], b"a"])
@pytest.mark.parametrize("name", ["mark", "exclude_mark"])
def test_a_filter_of_a_wrong_type_is_refused(memory: Driven, name: str, wrong: Any) -> None:
    with pytest.raises(TypeError) as caught:
        memory.get_memory(**{name: wrong})
    assert isinstance(caught.value, WrongType)
    expected = f"The {name} should be a string, a list of strings, or None, but got {type(wrong)}."
    assert str(caught.value) == expected


def test_of_a_list_of_marks_one_is_enough(memory: Driven) -> None:
    memory.add(msgs("1"), "a")
    memory.add(msgs("2"), ["a", "b"])
    memory.add(msgs("3"), "b")
    memory.add(msgs("4"))
    assert marked(memory, ["a", "b"]) == ["1", "2", "3"]
    assert marked(memory, ["b", "b", "no"]) == ["2", "3"]
    assert marked(memory, []) == []
    assert ids(memory.get_memory(exclude_mark=["a", "b"])) == ["4"]
    assert ids(memory.get_memory(exclude_mark=[])) == ["1", "2", "3", "4"]


def test_both_filters_must_let_a_message_pass(memory: Driven) -> None:
    memory.add(msgs("1"), "a")
    memory.add(msgs("2"), ["a", "b"])
    memory.add(msgs("3"))
    assert ids(memory.get_memory("a", "b")) == ["1"]
    assert ids(memory.get_memory("a", "a")) == []
    assert ids(memory.get_memory("a", "no")) == ["1", "2"]


def test_the_order_is_that_of_adding_whatever_the_timestamps_and_the_order_of_marking(memory: Driven) -> None:
    stamps = ["2030-01-01 00:00:00.000", "1999-01-01 00:00:00.000", "1700000000", "whenever", "2030-01-01 00:00:00.000"]
    memory.add([msg("x", str(n), timestamp=stamp) for n, stamp in enumerate(stamps[:2])])
    for n, stamp in enumerate(stamps[2:], 2):
        memory.add(msg("x", str(n), timestamp=stamp))
    for name in ("4", "0", "2"):
        memory.update_messages_mark("m", msg_ids=[name])
    assert all_ids(memory.again()) == ["0", "1", "2", "3", "4"]
    assert [message.timestamp for message in memory.get_memory()] == stamps
    assert marked(memory, "m") == ["0", "2", "4"]


def test_a_message_comes_back_whole(memory: Driven) -> None:
    blocks = [
        {"type": "text", "text": "你好 \ud800 \0 '\"\\"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1, 2.5, None, True, 2**70]}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "of tomorrow", "what": {"ever": []}},
    ]
    given = [
        Msg("ann", "hi", "user", {"k": {"deep": [1, {}]}}, "2026-01-02 03:04:05.678", "run-1"),
        Msg("bot", blocks, "assistant", timestamp="any time"),
        Msg("system", [{"type": "tool_result", "id": "c1", "name": "look", "output": [{"type": "text"}]}], "system"),
        Msg(None, "", "system", timestamp="1700000000"),
        Msg("", [], "user"),
    ]
    memory.add(given)
    found = memory.again().get_memory()
    assert [message.to_dict() for message in found] == [message.to_dict() for message in given]
    assert found == given
    assert found[0].invocation_id == "run-1"
    assert found[1].invocation_id is None


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
any_text = st.text(st.characters(codec=None), max_size=12)  # with NUL and lone surrogates


def test_any_json_comes_back_as_it_was(memory: Driven) -> None:
    @settings(max_examples=EXAMPLES * 4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        content=any_text | st.lists(any_json, max_size=4),
        name=st.none() | any_text,
        role=st.sampled_from(["user", "assistant", "system"]),
        metadata=st.none() | st.dictionaries(any_text, any_json, max_size=3),
        timestamp=st.none() | any_text,
        invocation_id=st.none() | any_text,
    )
    def check(**fields: Any) -> None:
        said = Msg(**fields)
        memory.clear()
        memory.add(said)
        assert [message.to_dict() for message in memory.get_memory()] == [said.to_dict()]

    check()


def test_a_database_holds_json_and_so_tuples_come_back_as_lists(memory: Driven) -> None:
    memory.add(msg([{"at": (1, (2,))}], "1", metadata={"k": ()}))
    (found,) = memory.get_memory()
    stored_so: tuple[Any, Any] = ([{"at": [1, [2]]}], {"k": []})
    given_so: tuple[Any, Any] = ([{"at": (1, (2,))}], {"k": ()})
    assert (found.content, found.metadata) == (stored_so if memory.is_stored else given_so)


class Special(Msg):
    """A message of somebody's own kind."""


def test_a_message_of_a_class_of_ones_own_comes_back_as_a_message(memory: Driven) -> None:
    special = Special("ann", "hi", "user")
    memory.add(special)
    (found,) = memory.get_memory()
    assert isinstance(found, Msg)
    assert type(found) is (Msg if memory.is_stored else Special)
    assert found.to_dict() == special.to_dict()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\0", "𝄞 \ud834"])
def test_texts_may_hold_anything(memory: Driven, text: str) -> None:
    memory.add(msg(text, "1", metadata={text: text}))
    memory.update_compressed_summary(text)
    summary, found = memory.again().get_memory()
    assert (summary.content, found.content, found.metadata) == (text, text, {text: text})


def test_nothing_is_in_a_memory_that_nobody_has_used(memory: Driven) -> None:
    assert memory.size() == 0
    assert memory.get_memory() == memory.get_memory("m") == memory.search("word") == []
    assert memory.clear() is None
    assert memory.delete(["1"]) == memory.delete_by_mark("m") == 0
    assert memory.update_messages_mark("m") == memory.update_messages_mark(None, "m") == 0
    assert memory.update_messages_mark("m", "n", ["1"]) == 0
    assert memory.compressed_summary() == ""
    assert memory.mark_compressed(["1"], "") == 0
    assert memory.size() == 0


def test_a_memory_is_never_false(memory: Driven) -> None:
    """AgentScope's agents say `memory or InMemoryMemory()`."""
    assert bool(memory.memory) is True


# --- the summary ------------------------------------------------------------------------------------------------------


def test_the_summary_stands_in_front_as_a_new_message_of_the_user(memory: Driven) -> None:
    memory.add(msgs("1"))
    memory.update_compressed_summary("so far")
    for found in (memory.again().get_memory(), memory.get_memory(), memory.get_memory("no such mark")):
        assert (found[0].name, found[0].content, found[0].role) == ("user", "so far", "user")
    assert memory.get_memory()[0].id != memory.get_memory()[0].id
    assert all_ids(memory) == ["1"]
    assert memory.size() == 1
    assert memory.compressed_summary() == "so far"


@pytest.mark.parametrize("nothing", ["", None])
def test_without_a_summary_nothing_stands_in_front(memory: Driven, nothing: Any) -> None:
    memory.add(msgs("1"))
    memory.update_compressed_summary("so far")
    assert all_ids(memory) == ["1"]
    memory.update_compressed_summary(nothing)
    assert ids(memory.again().get_memory()) == ["1"]


@pytest.mark.parametrize("wrong", [5, ["a"], b"a", msg("a")])
def test_a_summary_is_a_text(memory: Driven, wrong: Any) -> None:
    with pytest.raises(WrongType):
        memory.update_compressed_summary(wrong)
    with pytest.raises(WrongType):
        memory.mark_compressed(["1"], wrong)
    assert memory.compressed_summary() == ""


def test_clear_takes_out_the_messages_and_leaves_the_summary(memory: Driven) -> None:
    memory.add(msgs("1", "2"), "m")
    memory.update_compressed_summary("so far")
    memory.clear()
    assert texts(memory.again().get_memory()) == ["so far"]
    assert memory.size() == 0
    memory.add(msgs("2"))
    assert (all_ids(memory), marked(memory, "m")) == (["2"], [])


def test_marks_and_summary_are_set_together(memory: Driven) -> None:
    memory.add(msgs("1", "2", "3"), "old")
    memory.update_messages_mark("compressed", msg_ids=["1"])
    assert memory.mark_compressed(["1", "2", "2", "gone"], "so far") == 1
    assert marked(memory.again(), "compressed") == ["1", "2"]
    assert texts(memory.get_memory(exclude_mark="compressed")) == ["so far", "text of 3"]
    assert marked(memory, "old") == ["1", "2", "3"]
    assert memory.mark_compressed(iter(["3"]), "more", Mark.HINT) == 1
    assert (marked(memory, "hint"), memory.compressed_summary()) == (["3"], "more")


@pytest.mark.parametrize("summary", ["so far", ""])
def test_a_summary_that_is_not_the_expected_one_keeps_everything_as_it_is(memory: Driven, summary: str) -> None:
    memory.add(msgs("1"))
    memory.update_compressed_summary(summary)
    assert memory.mark_compressed(["1"], "new", expected="another") is None
    assert (marked(memory, "compressed"), memory.compressed_summary()) == ([], summary)
    assert memory.mark_compressed(["1"], "new", expected=summary) == 1
    assert (marked(memory.again(), "compressed"), memory.compressed_summary()) == (["1"], "new")


@pytest.mark.parametrize(
    "wrong", [{"mark": ["a", "b"]}, {"mark": None}, {"mark": 5}, {"expected": 5}, {"msg_ids": "1"}, {"msg_ids": 5}]
)
def test_to_compress_takes_one_mark_and_texts(memory: Driven, wrong: dict[str, Any]) -> None:
    memory.add(msgs("1"))
    with pytest.raises(WrongType):
        memory.mark_compressed(**{"msg_ids": ["1"], "summary": "so far", **wrong})
    assert (marked(memory, "compressed"), memory.compressed_summary()) == ([], "")


# --- deleting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [5, None, msg("1"), b"1"])
def test_what_is_no_id_among_ids_is_refused_by_name(memory: Driven, wrong: Any) -> None:
    memory.add(msgs("1"), marks="a")
    for call in (memory.delete, lambda ids: memory.update_messages_mark("b", "a", ids)):
        with pytest.raises(WrongType, match="among them"):
            call(["1", wrong])
    with pytest.raises(WrongType, match="among them"):
        memory.mark_compressed(["1", wrong], "summary")
    assert ids(memory.get_memory(mark="a")) == ["1"]


@pytest.mark.parametrize(
    ("doomed", "count", "left"),
    [
        (["1", "2", "no"], 2, ["3"]),
        (["1", "1"], 1, ["2", "3"]),
        ([], 0, ["1", "2", "3"]),
        (["no"], 0, ["1", "2", "3"]),
        (("3", "1"), 2, ["2"]),
        ({"2"}, 1, ["1", "3"]),
        (["1\0", "\ud800", "2"], 1, ["1", "3"]),
    ],
)
def test_delete_counts_the_messages_that_it_took_out(memory: Driven, doomed: Any, count: int, left: list[str]) -> None:
    memory.add(msgs("1", "2", "3"))
    assert memory.delete(doomed) == count
    assert all_ids(memory.again()) == left
    assert memory.size() == len(left)


def test_ids_that_no_message_can_have_are_of_no_message(memory: Driven) -> None:
    memory.add(msgs("1"))
    strange = ["\ud800", "a\0b", "x" * 10_000, ""]
    assert memory.delete(strange) == memory.update_messages_mark("m", msg_ids=strange) == 0
    assert memory.mark_compressed(strange, "so far") == 0


@pytest.mark.parametrize("wrong", ["11", 5, None, b"1", {"1": 2}])
def test_ids_come_in_a_list(memory: Driven, wrong: Any) -> None:
    memory.add(msgs("1", "11"))
    with pytest.raises(WrongType, match="should be a list of strings"):
        memory.delete(wrong)
    if wrong is not None:
        with pytest.raises(WrongType, match="should be a list of strings"):
            memory.update_messages_mark("m", msg_ids=wrong)
    assert (all_ids(memory), marked(memory, "m")) == (["1", "11"], [])


def test_ids_are_compared_whole(memory: Driven) -> None:
    long = "x" * 64
    names = [long, f"{long}a", f"{long}b", f"{long}{long}"]
    memory.add(msgs(*names))
    memory.add(msgs(f"{long}b", f"{long}c", "X" * 64))
    assert all_ids(memory.again()) == [*names, f"{long}c", "X" * 64]
    assert memory.update_messages_mark("m", msg_ids=[f"{long}a"]) == 1
    assert memory.delete([long]) == 1
    assert (marked(memory, "m"), memory.size()) == ([f"{long}a"], 5)


def test_of_ids_there_may_be_any_number(memory: Driven) -> None:
    memory.add(msgs("1", "2", "3"))
    many = [f"no {n}" for n in range(100_000)]
    assert memory.update_messages_mark("m", msg_ids=[*many, "2", "3"]) == 2
    assert memory.mark_compressed([*many, "3"], "so far") == 1
    assert memory.delete([*many, "1", "3"]) == 2
    assert marked(memory.again(), "m") == ["2"]


@pytest.mark.parametrize("count", [7, 8, 9, 63, 64, 65, 511, 512, 513])
def test_each_of_many_ids_is_found(memory: Driven, count: int) -> None:
    """However many are looked up at once."""
    names = [f"n{n}" for n in range(count)]
    memory.add(msgs("first", *names, "last"))
    memory.add(msgs(*reversed(names)))
    assert memory.size() == count + 2
    assert memory.update_messages_mark("m", msg_ids=names) == count
    assert memory.delete(names) == count
    assert all_ids(memory) == ["first", "last"]


def test_by_several_marks_each_message_is_deleted_and_counted_once(memory: Driven) -> None:
    memory.add(msgs("1"), ["a", "b"])
    memory.add(msgs("2"), "b")
    memory.add(msgs("3"), "c")
    assert memory.delete_by_mark(["a", "b", "a"]) == 2
    assert all_ids(memory.again()) == ["3"]
    assert memory.delete_by_mark("c") == 1
    assert memory.size() == 0


@pytest.mark.parametrize("mark", [[], "no", ["no", "neither"], ()])
def test_by_marks_that_nobody_bears_nothing_is_deleted(memory: Driven, mark: Any) -> None:
    memory.add(msgs("1"), "a")
    assert memory.delete_by_mark(mark) == 0
    assert memory.size() == 1


def test_marks_to_delete_by_must_be_strings(memory: Driven) -> None:
    memory.add(msgs("5"), "a")
    with pytest.raises(TypeError) as caught:
        memory.delete_by_mark(["a", 5])
    assert str(caught.value).startswith(
        "The mark should be a string or a list of strings, but got <class 'list'> with elements of types "
    )
    for wrong in (5, None, b"a", {"a": 1}):
        with pytest.raises(WrongType, match="should be a string or a list of strings"):
            memory.delete_by_mark(wrong)
    assert memory.size() == 1


# --- marking ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(memory: Driven) -> Driven:
    """Messages 1, 2 and 3 with the marks y; y and x; none."""
    memory.add(msgs("1"), "y")
    memory.add(msgs("2"), ["y", "x"])
    memory.add(msgs("3"))
    return memory


@pytest.mark.parametrize(
    ("change", "count", "x", "y"),
    [
        (("x",), 2, "123", "12"),
        (("x", None, ["3", "2", "no"]), 1, "23", "12"),
        (("x", None, []), 0, "2", "12"),
        (("x", "y"), 1, "12", ""),
        (("x", "y", ["1", "3"]), 1, "12", "2"),
        (("x", "y", ["2"]), 0, "2", "1"),
        (("x", "no"), 0, "2", "12"),
        (("y", "y"), 2, "2", "12"),
        (("y", "y", ["2", "3"]), 1, "2", "12"),
        ((None, "y"), 2, "2", ""),
        ((None, "y", ["2", "3"]), 1, "2", "1"),
        ((None, "no"), 0, "2", "12"),
        ((None, "y", []), 0, "2", "12"),
        ((None, None), 0, "2", "12"),
        ((None, None, ["1"]), 0, "2", "12"),
    ],
)
def test_marks_are_added_changed_and_removed(
    three: Driven, change: tuple[Any, ...], count: int, x: str, y: str
) -> None:
    assert three.update_messages_mark(*change) == count
    assert (marked(three.again(), "x"), marked(three, "y")) == (list(x), list(y))


def test_who_has_a_mark_does_not_get_it_again(three: Driven) -> None:
    assert [three.update_messages_mark("x") for _ in range(2)] == [2, 0]
    assert three.update_messages_mark(None, "x") == 3
    assert marked(three, "x") == []


@pytest.mark.parametrize("wrong", [(["x"],), (5,), ("x", ["y"]), ("x", 5), (("x",), "y"), (b"x",)])
def test_one_mark_takes_the_place_of_one(three: Driven, wrong: tuple[Any, ...]) -> None:
    with pytest.raises(WrongType, match="should be a string or None"):
        three.update_messages_mark(*wrong)
    assert (marked(three, "x"), marked(three, "y")) == (["2"], ["1", "2"])


# --- states -----------------------------------------------------------------------------------------------------------


def state_of(*entries: tuple[Msg, list[str]], summary: str = "so far") -> dict[str, Any]:
    return {
        "_compressed_summary": summary,
        "content": [[message.to_dict(), marks] for message, marks in entries],
    }


def test_a_state_of_a_list_holds_all_of_it() -> None:
    async def main() -> None:
        memory = InMemoryMemory()
        one, two = msg([{"type": "text", "text": "a"}], "1", invocation_id="i"), msg("b", "2")
        await memory.add(one, ["a", "b"])
        await memory.add(two)
        await memory.update_compressed_summary("so far")
        state = memory.state_dict()
        assert state == state_of((one, ["a", "b"]), (two, []))
        state["content"][0][0]["content"].clear()
        state["content"][0][1].clear()
        assert memory.state_dict() == state_of((one, ["a", "b"]), (two, []))

    asyncio.run(main())


def test_a_loaded_state_takes_the_place_of_all_that_was_there(memory: Driven) -> None:
    memory.add(msgs("0", "1"), "old")
    memory.update_compressed_summary("old")
    one = msg("one", "1", timestamp="then", invocation_id="i")
    memory.load_state_dict(state_of((one, ["a", "a"]), (msg("two", "2"), [])))
    assert texts(memory.get_memory()) == ["so far", "one", "two"]
    assert [message.to_dict() for message in memory.again().get_memory("a", prepend_summary=False)] == [one.to_dict()]
    assert marked(memory, "old") == []
    assert memory.update_messages_mark(None, "a") == 1
    assert marked(memory, "a") == ["1"]
    memory.add(msgs("2", "3"))
    assert all_ids(memory) == ["1", "2", "3"]


def test_a_state_without_marks_and_summary_is_read_too(memory: Driven) -> None:
    memory.add(msgs("0"))
    memory.update_compressed_summary("old")
    memory.load_state_dict({"content": [message.to_dict() for message in msgs("1", "2")]})
    assert ids(memory.get_memory()) == ["1", "2"]
    memory.load_state_dict({"content": []})
    assert (memory.get_memory(), memory.size()) == ([], 0)


def test_a_loaded_state_stays_its_owners(memory: Driven) -> None:
    state = state_of((msg([{"type": "text", "text": "a"}], "1"), ["a"]))
    memory.load_state_dict(state)
    state["content"][0][0]["content"].clear()
    state["content"][0][1].append("b")
    state["content"].clear()
    assert texts(memory.get_memory(prepend_summary=False)) == [[{"type": "text", "text": "a"}]]
    assert (marked(memory, "a"), marked(memory, "b")) == (["1"], [])


@pytest.mark.parametrize(
    "bad",
    [
        5,
        None,
        ["x"],
        [5],
        [[]],
        [[msg("a").to_dict()]],
        [[msg("a").to_dict(), [], []]],
        [[msg("a").to_dict(), [5]]],
        [[msg("a").to_dict(), 5]],
        [{"name": "a", "content": "b"}],
        [{"name": "a", "content": "b", "role": "nobody"}],
        [{"name": "a", "content": 5, "role": "user"}],
        [{"name": "a", "content": "b", "role": "user", "id": 5}],
        [{"name": "a", "content": "b", "role": "user", "id": "\0"}],
        [{"name": "a", "content": [b"bytes"], "role": "user"}],
    ],
)
def test_a_state_with_anything_bad_is_refused_and_changes_nothing(memory: Driven, bad: Any) -> None:
    memory.add(msgs("1"), "m")
    memory.update_compressed_summary("before")
    content = [*[[message.to_dict(), []] for message in msgs("2")], *bad] if isinstance(bad, list) else bad
    with pytest.raises(ValueError):
        memory.load_state_dict({"_compressed_summary": "so far", "content": content})
    assert texts(memory.get_memory("m")) == ["before", "text of 1"]
    assert memory.size() == 1


@pytest.mark.parametrize("wrong", [None, [], "state", 5])
def test_a_state_is_a_dict(memory: Driven, wrong: Any) -> None:
    with pytest.raises(WrongType):
        memory.load_state_dict(wrong)


def test_a_state_that_lacks_what_a_memory_needs_is_refused(memory: Driven) -> None:
    needed = "Key '_compressed_summary' not found" if memory.is_stored else "The state_dict does not contain 'content'"
    with pytest.raises(KeyError, match=needed):
        memory.load_state_dict({"what": "ever"})


def test_without_strictness_a_state_from_elsewhere_changes_nothing(memory: Driven) -> None:
    memory.add(msgs("1"), "m")
    memory.update_compressed_summary("so far")
    memory.load_state_dict({"what": "ever"}, strict=False)
    assert texts(memory.get_memory("m")) == ["so far", "text of 1"]


# --- all of it together -----------------------------------------------------------------------------------------------

NAMES, MARKS = ["1", "2", "3", "4", "x" * 70, "x" * 69 + "y"], ["a", "b", ""]
some_names = st.lists(st.sampled_from([*NAMES, "no"]), max_size=4)
some_marks = st.lists(st.sampled_from(MARKS), max_size=3)
a_mark = st.none() | st.sampled_from(MARKS)
a_summary = st.sampled_from(["", "one", "two \ud800"])


class Remembering(RuleBasedStateMachine):
    """A memory in a database beside a list. Whatever is asked of both has one answer."""

    def __init__(self, make: Callable[[], Driven], runner: asyncio.Runner) -> None:
        super().__init__()
        self.make, self.runner = make, runner
        self.numbers = iter(range(1_000_000))

    @initialize()
    def begin(self) -> None:
        self.memory, self.model = self.make(), Driven(InMemoryMemory(), self.runner)

    def both(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.model, name)(*args, **kwargs)
        assert getattr(self.memory, name)(*args, **kwargs) == answer
        return answer

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4), marks=some_marks, again=st.booleans())
    def add(self, names: list[str], marks: list[str], again: bool) -> None:
        self.both("add", [msg(f"{next(self.numbers)}", name) for name in names], marks, allow_duplicates=again)

    @rule(names=some_names)
    def delete(self, names: list[str]) -> None:
        self.both("delete", names)

    @rule(marks=some_marks)
    def delete_by_mark(self, marks: list[str]) -> None:
        self.both("delete_by_mark", marks)

    @rule(new=a_mark, old=a_mark, names=st.none() | some_names)
    def mark(self, new: str | None, old: str | None, names: list[str] | None) -> None:
        self.both("update_messages_mark", new, old, names)

    @rule(summary=a_summary)
    def summarize(self, summary: str) -> None:
        self.both("update_compressed_summary", summary)

    @rule(names=some_names, summary=a_summary, mark=st.sampled_from(MARKS), expected=st.none() | a_summary)
    def compress(self, names: list[str], summary: str, mark: str, expected: str | None) -> None:
        self.both("mark_compressed", names, summary, mark, expected=expected)

    @rule()
    def clear(self) -> None:
        self.both("clear")

    @rule(copies=st.integers(1, 2))
    def load(self, copies: int) -> None:
        state = self.model.state_dict()
        self.both("load_state_dict", {**state, "content": state["content"][1:] * copies})

    @rule()
    def reopen(self) -> None:
        self.memory.again()

    @rule(wanted=st.none() | some_marks, unwanted=st.none() | some_marks)
    def read(self, wanted: list[str] | None, unwanted: list[str] | None) -> None:
        found = [
            [message.to_dict() for message in each.get_memory(wanted, unwanted, prepend_summary=False)]
            for each in (self.memory, self.model)
        ]
        assert found[0] == found[1]

    @rule(word=st.integers(0, 12))
    def search(self, word: int) -> None:
        found = [ids(each.search(str(word), limit=2)) for each in (self.memory, self.model)]
        assert found[0] == found[1]

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        super().check_invariants(*args, **kwargs)
        if hasattr(self, "memory"):
            assert snapshot(self.memory, MARKS) == snapshot(self.model, MARKS)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()


@pytest.mark.large
@pytest.mark.timeout(600)  # seconds; what fails is made small first, and that takes longer
def test_a_memory_in_a_database_does_what_a_list_would(database: Database) -> None:
    limits = settings(
        max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    numbers = iter(range(1_000_000))
    with asyncio.Runner() as runner, database.store():  # held open, so that to open a memory costs little

        class Here(Remembering):
            def __init__(self) -> None:
                super().__init__(lambda: Driven(stored(database, "ann", f"s{next(numbers)}"), runner), runner)

        run_state_machine_as_test(Here, settings=limits)
