"""What every checkpointer keeps, whatever the database is: messages, extra and the names of threads."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byssus.checkpointer import Checkpointer, Thread
from byssus.errors import InputError, StoreCorrupt
from byssus.messages import (
    AssistantMessage,
    Failure,
    ImageContent,
    Message,
    Note,
    TextContent,
    ThinkingContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    Usage,
    UserMessage,
    from_value,
    to_value,
)
from byssus.queries.log import threads
from byssus.queries.log.threads import MessageRow
from byssus.values.thread_key import ThreadKey
from tests.support.cases import case
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.databases import Database
from tests.support.quick import examples


def nested(depth: int) -> Any:
    value: Any = "core"
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


ALL_KINDS: list[Message] = [
    UserMessage("plain"),
    UserMessage([TextContent("look: "), ImageContent("aGk=", "image/jpeg")], id="u-1", created_at="2026-01-01"),
    AssistantMessage(
        [
            ThinkingContent("hm", signature="sig"),
            ThinkingContent(redacted="opaque"),
            TextContent("I will look."),
            ToolCall("c1", "search", {"q": "kelp", "deep": {"n": [1, 2.5, None, True]}}),
            ToolCall("c2", "search", malformed="{oops"),
        ],
        "tool_use",
        Usage(10, 20, 30, 40, 0.125),
        "claude",
        "anthropic",
    ),
    ToolResultMessage("c1", "search", "found", details={"rows": [1, None]}),
    ToolResultMessage("c2", "search", [ImageContent("aGk=")], is_error=True),
    AssistantMessage("", "error", error=Failure("Overloaded", "busy")),
    AssistantMessage([]),
    Note({"role": "system", "content": "be nice"}),
    Note({"anything": ["at", "all"]}),
    Note(None),
    Note("text"),
    Note(17),
]

NASTY_TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "pair the wrong way round: \udc00\ud800",
    "🪸🌊 👩‍👩‍👧‍👦",
    "汉字 한글 العربية עברית",
    "e\u0301 and \u00e9",
    "\u2028\u2029\ufeff\uffff",
    "'; DROP TABLE messages; --",
    ":name ?1 $x @y",
    '{"role": "user"}',
    "null",
    "~unknown",
    "\r\n\t\x1b\x7f",
]


# --- load and append --------------------------------------------------------------------------------------------------


def test_a_thread_that_was_never_written_is_none(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        assert await cp.load("nobody") is None
        await cp.append("somebody", UserMessage("hi"))
        assert await cp.load("nobody") is None

    with_cp(database, use)


def test_messages_of_all_kinds_come_back_equal_and_in_order(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", ALL_KINDS[:5])
        for message in ALL_KINDS[5:]:
            await cp.append("t", message)
        thread = await loaded(cp, "t")
        assert thread.messages == ALL_KINDS
        assert [type(message) for message in thread.messages] == [type(message) for message in ALL_KINDS]
        assert thread.extra == {}

    with_cp(database, use)


def test_a_dict_is_a_message_if_it_looks_like_one_and_a_note_if_not(database: Database) -> None:
    given_dicts: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "ho"}], "from_the_future": {"x": [1]}},
        {"role": "tool_result", "tool_call_id": "c", "tool_name": "t", "content": [{"type": "hologram", "z": 3}]},
        {"role": "user"},
        {"role": "assistant", "content": 5},
        {"role": ["user"], "content": "x"},
        {},
    ]

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", given_dicts)
        await cp.append("t", {"role": "user", "content": "one alone"})
        messages = (await loaded(cp, "t")).messages
        assert messages == [*map(from_value, given_dicts), UserMessage("one alone")]
        kinds = [UserMessage, AssistantMessage, ToolResultMessage, Note, Note, Note, Note, UserMessage]
        assert [type(message) for message in messages] == kinds

    with_cp(database, use)


def test_any_iterable_of_messages_can_be_appended(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", (UserMessage(str(i)) for i in range(3)))
        await cp.append("t", (UserMessage("3"), UserMessage("4")))
        assert await texts(cp, "t") == ["0", "1", "2", "3", "4"]

    with_cp(database, use)


def test_two_messages_may_carry_the_same_id(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("a", id="same"), UserMessage("b", id="same")])
        assert await texts(cp, "t") == ["a", "b"]

    with_cp(database, use)


def test_an_empty_append_makes_no_thread(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [])
        await cp.append("t", iter(()))
        assert await cp.load("t") is None
        assert await cp.threads() == []

    with_cp(database, use)


def test_threads_do_not_mix(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for i in range(10):
            await cp.append("ab"[i % 2], UserMessage(str(i)))
        await cp.save_extra("a", {"mine": 1})
        assert await texts(cp, "a") == ["0", "2", "4", "6", "8"]
        assert await texts(cp, "b") == ["1", "3", "5", "7", "9"]
        assert (await loaded(cp, "b")).extra == {}

    with_cp(database, use)


@pytest.mark.parametrize("count", [499, 500, 501, 1000, 1203])
def test_a_thread_of_any_length_is_loaded_whole(database: Database, count: int) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage(str(i)) for i in range(count)])
        assert await texts(cp, "t") == [str(i) for i in range(count)]

    with_cp(database, use)


def test_any_text_comes_back_exactly(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        for number, text in enumerate(NASTY_TEXTS):
            message = AssistantMessage([TextContent(text), ToolCall("c", "t", {text: text})])
            extra, thread_id = {text: text, "list": [text]}, f"t{number}"
            with case(text):
                await cp.append(thread_id, [message, Note(text), Note({"content": {text: text}})])
                await cp.save_extra(thread_id, extra)
                thread = await loaded(cp, thread_id)
                assert thread.messages == [message, Note(text), Note({"content": {text: text}})]
                assert thread.extra == extra

    with_cp(database, use)


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, 2**70, -(2**70), 10**400, 1e308, 5e-324, -0.0, math.inf])
def test_any_number_comes_back_exactly(database: Database, number: float) -> None:
    async def use(cp: Checkpointer) -> None:
        result = ToolResultMessage("c", "t", "x", details={"n": number})
        await cp.append("t", [result, Note(number)])
        await cp.save_extra("t", {"n": number})
        thread = await loaded(cp, "t")
        assert thread.messages == [result, Note(number)]
        assert thread.extra == {"n": number}
        assert isinstance(thread.extra["n"], type(number))

    with_cp(database, use)


def test_nan_comes_back_as_nan_and_not_as_null(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [ToolResultMessage("c", "t", "x", details=[math.nan]), Note(math.nan)])
        await cp.save_extra("t", {"n": math.nan})
        thread = await loaded(cp, "t")
        result, note = thread.messages
        assert isinstance(result, ToolResultMessage)
        assert isinstance(note, Note)
        assert math.isnan(result.details[0])
        assert math.isnan(note.body)
        assert math.isnan(thread.extra["n"])

    with_cp(database, use)


@pytest.mark.large
def test_a_message_of_20_mb_comes_back(database: Database) -> None:
    big = "x汉\ud800" * 4_000_000

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage(big))
        await cp.append("t", UserMessage("y" * 20_000_000))
        await cp.save_extra("t", {"big": big})
        thread = await loaded(cp, "t")
        assert thread.messages[0].text == big
        assert thread.messages[1].text == "y" * 20_000_000
        assert thread.extra == {"big": big}

    with_cp(database, use)


@pytest.mark.parametrize("depth", [100, 300])
def test_deep_nesting_comes_back(database: Database, depth: int) -> None:
    async def use(cp: Checkpointer) -> None:
        result = ToolResultMessage("c", "t", "x", details=nested(depth))
        await cp.append("t", [result, Note(nested(depth))])
        await cp.save_extra("t", {"deep": nested(depth)})
        thread = await loaded(cp, "t")
        assert thread.messages == [result, Note(nested(depth))]
        assert thread.extra == {"deep": nested(depth)}

    with_cp(database, use)


def test_a_nesting_that_is_accepted_can_be_loaded_from_a_deeper_stack(database: Database) -> None:
    async def deeper(cp: Checkpointer, frames: int, thread_id: str) -> Thread:
        return await (deeper(cp, frames - 1, thread_id) if frames else loaded(cp, thread_id))

    async def use(cp: Checkpointer) -> None:
        for depth in (300, 600, 800, 900, 940, 960, 980, 2000, 9000):
            thread_id = f"depth {depth}"
            try:
                await cp.append(thread_id, ToolResultMessage("c", "t", "x", details=nested(depth)))
                await cp.append(thread_id, Note(nested(depth)))
                await cp.save_extra(thread_id, {"deep": nested(depth)})
            except InputError:
                pass
            if await cp.threads(1) and (await cp.threads(1))[0].id == thread_id:
                await deeper(cp, 100, thread_id)

    with_cp(database, use)


def test_what_cannot_be_stored_in_a_message_is_an_input_error_and_nothing_is_written(database: Database) -> None:
    circle: dict[str, Any] = {}
    circle["circle"] = circle
    impossible = [object(), {"deep": [{"er": object()}]}, circle, nested(100_000), 10**5000]

    async def use(cp: Checkpointer) -> None:
        for value in impossible:
            for message in (ToolResultMessage("c", "t", "x", details=value), Note(value)):
                with pytest.raises(InputError, match="message"):
                    await cp.append("t", [UserMessage("good"), message, UserMessage("good")])
        assert await cp.load("t") is None

    with_cp(database, use)


@pytest.mark.parametrize(
    "what", [None, 5, "hello", b"bytes", [None], ["hello"], [UserMessage("a"), 5], TextContent("x")]
)
def test_what_is_no_message_is_an_input_error_and_nothing_is_written(database: Database, what: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="messages"):
            await cp.append("t", what)
        assert await cp.load("t") is None

    with_cp(database, use)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "x" * 100_000, ""], ids=ascii)
def test_a_message_id_or_role_may_be_any_string(database: Database, name: str) -> None:
    async def use(cp: Checkpointer) -> None:
        given_messages: list[Message] = [UserMessage("x", id=name), Note({"role": name, "content": "x"})]
        await cp.append("t", given_messages)
        assert (await loaded(cp, "t")).messages == given_messages

    with_cp(database, use)


def test_names_that_byssus_uses_inside_survive_as_data(database: Database) -> None:
    bodies: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "x"}], "~unknown": {"a": 1}},
        {"role": "user", "content": [{"type": "text", "text": "x", "~unknown": 3}]},
        {"role": "user", "content": [{"type": "~unknown", "data": 5}]},
        {"role": "~unknown", "content": "x"},
    ]

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", bodies)
        await cp.append("copy", (await loaded(cp, "t")).messages)
        for thread_id in ("t", "copy"):
            messages = (await loaded(cp, thread_id)).messages
            # Whether as a message or as a note is not the point: nothing that was given is gone.
            kept = [json.dumps(to_value(message), sort_keys=True) for message in messages]
            assert kept == [json.dumps(body, sort_keys=True) for body in bodies]

    with_cp(database, use)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(details=_JSON, body=_JSON, extra=st.dictionaries(st.text(st.characters()), _JSON, max_size=5))
def test_any_json_comes_back_equal(database: Database, details: Any, body: Any, extra: dict[str, Any]) -> None:
    async def use(cp: Checkpointer) -> None:
        given_messages = [
            ToolResultMessage("c", "t", "x", details=details),
            AssistantMessage([ToolCall("c", "t", {"value": details}), UnknownBlock({"type": "later", "x": body})]),
            from_value(body),
        ]
        before = await cp.load("t")
        await cp.append("t", given_messages)
        await cp.save_extra("t", extra)
        thread = await loaded(cp, "t")
        assert thread.messages[len(before.messages) if before else 0 :] == given_messages
        assert thread.extra == extra

    with_cp(database, use)


def test_append_is_all_or_nothing(database: Database) -> None:
    def messages() -> Iterator[Message]:
        yield UserMessage("first")
        raise ZeroDivisionError

    async def use(cp: Checkpointer) -> None:
        await cp.append("t", UserMessage("before"))
        with pytest.raises(ZeroDivisionError):
            await cp.append("t", messages())
        with pytest.raises(InputError):
            await cp.append("t", [UserMessage("first"), Note(object())])
        assert await texts(cp, "t") == ["before"]

    with_cp(database, use)


def test_a_message_of_a_newer_version_survives_loading_and_appending(database: Database) -> None:
    bodies = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "tone": "warm"}], "mood": {"deep": [1, None]}},
        {
            "role": "assistant",
            "content": [
                {"type": "hologram", "data": [1]},
                {"type": "tool_call", "id": "c", "name": "t", "cost": 2**70},
            ],
            "usage": {"input": 3, "imagined": 4},
            "error": {"kind": "Odd", "message": "x", "hint": None},
            "stop_reason": "enlightenment",
        },
        {"role": "tool_result", "tool_call_id": "c", "tool_name": "t", "content": [], "proof": "\ud800"},
        {"role": "oracle", "content": "?", "new": True},
        {"role": "user", "content": {"not": "a list any more"}},
        ["no", "object"],
    ]

    async def use(cp: Checkpointer) -> None:
        rows = [MessageRow("id", "some role", json.dumps(body)) for body in bodies]
        await cp.store.write(threads.append, ThreadKey("", "newer"), rows)
        messages = (await loaded(cp, "newer")).messages
        assert [message.role for message in messages] == ["user", "assistant", "tool_result", "oracle", "user", "note"]
        await cp.append("copy", messages)
        row = await cp.store.read(threads.find, ThreadKey("", "copy"))
        assert row is not None
        page = await cp.store.read(threads.page, row.branch, after=0, upto=row.head, limit=100)
        assert [json.loads(body) for _, body in page] == bodies

    with_cp(database, use)


@pytest.mark.parametrize("body", ["", "not JSON", '{"role": "user", "content": [', "\x01"])
def test_a_stored_message_that_cannot_be_read_is_an_error_that_shows_it(database: Database, body: str) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("good", UserMessage("hi"))
        await cp.store.write(threads.append, ThreadKey("", "bad"), [MessageRow("id", "user", body)])
        with pytest.raises(StoreCorrupt, match="stored message") as caught:
            await cp.load("bad")
        assert repr(body) in str(caught.value)
        assert await texts(cp, "good") == ["hi"]

    with_cp(database, use)


# --- extra ------------------------------------------------------------------------------------------------------------


def test_extra_is_replaced_whole(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.save_extra("t", {"a": 1, "b": {"c": 2}})
        await cp.save_extra("t", {"b": {"d": 3}})
        assert (await loaded(cp, "t")).extra == {"b": {"d": 3}}
        await cp.save_extra("t", {})
        assert (await loaded(cp, "t")).extra == {}

    with_cp(database, use)


def test_extra_alone_makes_a_thread_and_leaves_messages_alone(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.save_extra("t", {"a": 1})
        assert (await loaded(cp, "t")).messages == []
        await cp.append("t", UserMessage("hi"))
        await cp.save_extra("t", {"a": 2})
        thread = await loaded(cp, "t")
        assert (thread.messages, thread.extra) == ([UserMessage("hi")], {"a": 2})

    with_cp(database, use)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, [[object()]], {"x": {("a", "b"): 1}}, nested(100_000), 10**5000],
    ids=["object", "set", "bytes", "complex", "nested object", "tuple key", "too deep", "too many digits"],
)
def test_an_extra_that_is_no_json_is_an_input_error_that_names_the_key(database: Database, value: object) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="'broken_key'"):
            await cp.save_extra("new", {"fine": 1, "broken_key": value, "also_fine": 2})
        assert await cp.load("new") is None
        await cp.save_extra("old", {"was": "there"})
        with pytest.raises(InputError, match="'broken_key'"):
            await cp.save_extra("old", {"broken_key": value})
        assert (await loaded(cp, "old")).extra == {"was": "there"}

    with_cp(database, use)


def test_an_extra_that_contains_itself_is_an_input_error_that_names_the_key(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        extra: dict[str, Any] = {"fine": 1}
        extra["circle"] = extra
        with pytest.raises(InputError, match="'circle'"):
            await cp.save_extra("t", extra)
        assert await cp.load("t") is None

    with_cp(database, use)


@pytest.mark.parametrize("extra", [None, [], "text", 5, [("a", 1)]])
def test_an_extra_that_is_no_dict_is_an_input_error(database: Database, extra: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="extra must be a dict"):
            await cp.save_extra("t", extra)
        assert await cp.load("t") is None

    with_cp(database, use)


@pytest.mark.parametrize("extra", [{1: "a"}, {1: "a", "1": "b"}, {None: 1}, {"in": {True: 1}}], ids=str)
def test_a_key_that_is_no_string_is_refused_and_not_changed_on_the_way(
    database: Database, extra: dict[Any, Any]
) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(InputError, match="key"):
            await cp.save_extra("t", extra)
        assert await cp.load("t") is None

    with_cp(database, use)


# --- thread ids -------------------------------------------------------------------------------------------------------

UNUSABLE_IDS: list[Any] = ["", "\0", "a\0b", "\ud800", "ok\udfff", None, 5, b"bytes", ["t"]]


@pytest.mark.parametrize("thread_id", UNUSABLE_IDS, ids=ascii)
def test_an_unusable_thread_id_is_an_input_error_that_shows_it(database: Database, thread_id: Any) -> None:
    async def use(cp: Checkpointer) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: cp.load(thread_id),
            lambda: cp.append(thread_id, UserMessage("x")),
            lambda: cp.save_extra(thread_id, {}),
        ]
        for call in calls:
            with pytest.raises(InputError) as caught:
                await call()
            assert repr(thread_id) in str(caught.value)
        assert await cp.threads() == []

    with_cp(database, use)


def test_thread_ids_are_taken_as_they_are(database: Database) -> None:
    ids = [
        "t",
        "T",
        "t ",
        " t",
        "é",
        "e\u0301",
        "🪸",
        "线程",
        "'; DROP TABLE threads; --",
        'a"b',
        "%",
        "_",
        ":id",
        "?",
        "a/b",
        "..",
        "NULL",
        "0",
        "00",
        "\n",
        "x" * 1000,
    ]

    async def use(cp: Checkpointer) -> None:
        for thread_id in ids:
            await cp.append(thread_id, UserMessage(f"I am {thread_id}"))
        for thread_id in ids:
            assert await texts(cp, thread_id) == [f"I am {thread_id}"]
        assert [info.id for info in await cp.threads()] == ids[::-1]
        assert [info.id for info in await cp.threads(before="%")] == ids[: ids.index("%")][::-1]

    with_cp(database, use)


def test_a_thread_id_of_a_megabyte_works_or_is_refused_whole(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        thread_id = "x" * 1_000_000
        try:
            await cp.append(thread_id, UserMessage("hi"))
        except InputError:
            assert await cp.threads() == []
        else:
            assert await texts(cp, thread_id) == ["hi"]

    with_cp(database, use)
