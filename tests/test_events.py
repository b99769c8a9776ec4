"""Events: frozen values that know their names."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from byssus import events
from byssus.errors import InputError
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    StreamDone,
    StreamError,
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
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnEnd,
    TurnStart,
)
from byssus.messages import (
    AssistantMessage,
    Failure,
    Note,
    TextContent,
    ToolCall,
    ToolResultMessage,
    UnknownBlock,
    Usage,
    UserMessage,
)


def test_a_run_tells_these_events_and_no_others() -> None:
    assert [kind.type for kind in get_args(Event)] == [
        "agent_start",
        "turn_start",
        "message_start",
        "message_update",
        "message_end",
        "tool_execution_start",
        "tool_execution_update",
        "tool_execution_end",
        "turn_end",
        "agent_end",
    ]


def test_a_stream_consists_of_these_events_and_no_others() -> None:
    blocks = [f"{kind}_{part}" for kind in ("text", "thinking", "toolcall") for part in ("start", "delta", "end")]
    assert [kind.type for kind in get_args(StreamEvent)] == ["start", *blocks, "done", "error"]


def test_every_event_class_is_one_of_the_two_kinds() -> None:
    classes = {value for value in vars(events).values() if isinstance(value, type) and hasattr(value, "type")}
    classes = {cls for cls in classes if cls.__module__ == events.__name__}
    assert classes == {*get_args(Event), *get_args(StreamEvent)}


def test_the_type_is_also_what_stands_in_json() -> None:
    for kind in (*get_args(Event), *get_args(StreamEvent)):
        assert kind.__struct_config__.tag == kind.type
        assert kind.__struct_config__.tag_field == "type"


def test_an_event_is_json_that_others_can_read() -> None:
    assert msgspec.json.encode(MessageUpdate(TextDelta(0, "hi"))) == (
        b'{"type":"message_update","stream_event":{"type":"text_delta","index":0,"delta":"hi"}}'
    )
    told = msgspec.json.decode(msgspec.json.encode(AgentEnd("r", [UserMessage("x")], "stop", Usage(1))))
    assert told["messages"] == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


def test_events_cannot_be_changed() -> None:
    made: list[Event] = [
        AgentStart("r"),
        TurnStart(1),
        MessageStart(UserMessage("x")),
        MessageEnd(UserMessage("x")),
        ToolExecutionStart("c", "t", {}),
        ToolExecutionEnd("c", "t", ToolResultMessage("c", "t", "x")),
        TurnEnd(AssistantMessage("x")),
    ]
    for event in made:
        with pytest.raises(AttributeError):
            event.type = "other"  # type: ignore[misc,assignment]
        with pytest.raises(AttributeError):
            setattr(event, event.__struct_fields__[0], None)


def test_two_events_do_not_share_a_list() -> None:
    TurnEnd().tool_results.append(ToolResultMessage("c", "t", "x"))
    assert TurnEnd().tool_results == []


def test_a_message_counts_as_stored_unless_said_otherwise() -> None:
    assert MessageEnd(UserMessage("x")).stored
    assert StreamDone().stop_reason == "stop"


# --- JSON -------------------------------------------------------------------------------------------------------------

ODD = AssistantMessage(  # type: ignore[call-arg]
    [TextContent("\ud800 上海"), UnknownBlock({"type": "new", "x": 1})], unknown={"later": [1]}
)
CALL = ToolCall("c", "t", {"a": None, "b": [1.5]})
SAMPLES: list[Event | StreamEvent] = [
    StreamStart("m", Usage(1)),
    TextStart(0),
    TextDelta(0, "\ud800"),
    TextEnd(0),
    ThinkingStart(0),
    ThinkingDelta(0, "x"),
    ThinkingEnd(0, "s", "r"),
    ToolCallStart(0, "c", "t"),
    ToolCallDelta(0, "{"),
    ToolCallEnd(0, CALL),
    StreamDone("length", Usage(1, cost=0.5)),
    StreamError(Failure("Overloaded", "busy")),
    AgentStart("r", "t"),
    TurnStart(1),
    MessageStart(ODD),
    MessageUpdate(ToolCallEnd(1, CALL)),
    MessageEnd(Note({"any": "thing"}), stored=False),
    ToolExecutionStart("c", "t", {"a": 1}),
    ToolExecutionUpdate("c", "t", {"half": True}),
    ToolExecutionEnd("c", "t", ToolResultMessage("c", "t", "x", {"d": 1}), is_error=True),
    TurnEnd(ODD, [ToolResultMessage("c", "t", "x")]),
    TurnEnd(),
    AgentEnd("r", [UserMessage("x"), ODD, Note(5)], "error", Usage(1), Failure("a", "b")),
]


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.type)
def test_every_event_comes_back_from_its_json(event: Event | StreamEvent) -> None:
    text = event.to_json()
    assert "\n" not in text
    assert events.from_json(text) == event
    assert events.from_json(text.encode()) == event


STABLE = {
    "start": "model usage",
    "text_start": "index",
    "text_delta": "index delta",
    "text_end": "index",
    "thinking_start": "index",
    "thinking_delta": "index delta",
    "thinking_end": "index signature redacted",
    "toolcall_start": "index id name",
    "toolcall_delta": "index delta",
    "toolcall_end": "index tool_call",
    "done": "stop_reason usage",
    "error": "error",
    "agent_start": "run_id thread_id",
    "turn_start": "turn",
    "message_start": "message",
    "message_update": "stream_event",
    "message_end": "message stored",
    "tool_execution_start": "tool_call_id tool_name arguments",
    "tool_execution_update": "tool_call_id tool_name update",
    "tool_execution_end": "tool_call_id tool_name result is_error stored",
    "turn_end": "message tool_results",
    "agent_end": "run_id messages stop_reason usage error",
}


def test_the_names_in_the_json_of_an_event_are_stable() -> None:
    kinds = [*get_args(Event), *get_args(StreamEvent)]
    found = {kind.type: kind.__struct_fields__ for kind in kinds}
    for name, fields in STABLE.items():
        assert set(found[name]) >= set(fields.split()), "programs read these; add to them, and never rename one"
    assert found.keys() >= STABLE.keys()


def test_a_stop_reason_of_a_newer_version_is_read() -> None:
    told = events.from_json('{"type":"agent_end","run_id":"r","messages":[],"stop_reason":"tired"}')
    assert isinstance(told, AgentEnd)
    assert str(told.stop_reason) == "tired"


def test_there_is_a_sample_of_every_event() -> None:
    assert {type(event) for event in SAMPLES} == {*get_args(Event), *get_args(StreamEvent)}


def test_fields_of_a_newer_version_are_ignored_and_those_of_a_message_kept() -> None:
    assert events.from_json('{"type":"turn_start","turn":1,"new":2}') == TurnStart(1)
    told = events.from_json('{"type":"message_end","message":{"role":"user","content":"x","new":1}}')
    assert told == MessageEnd(UserMessage([TextContent("x")], unknown={"new": 1}))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "this is no event as JSON"),
        ("[]", r"this is no event as JSON \(it has no type\): '\[\]'"),
        ("{}", "it has no type"),
        (5, "this is no event as JSON .*: 5"),
        ('{"type":"later"}', "type 'later' is unknown in this version; skip the event, or upgrade"),
        ('{"type":"turn_start"}', "turn"),
        ('{"type":"turn_start","turn":"x"}', "int"),
        ('{"type":"tool_execution_end","tool_call_id":"c","tool_name":"t","result":{"role":"user"}}', "belongs"),
    ],
)
def test_what_is_no_event_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        events.from_json(text)


def test_progress_that_is_no_json_is_refused_by_its_event() -> None:
    with pytest.raises(InputError, match="a tool_execution_update event cannot be written as JSON"):
        ToolExecutionUpdate("c", "t", object()).to_json()
