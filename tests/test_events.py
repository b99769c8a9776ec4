"""Events: frozen values that know their names."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from byssus import events
from byssus.events import (
    AgentEnd,
    AgentStart,
    Event,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    StreamDone,
    StreamEvent,
    TextDelta,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
)
from byssus.messages import AssistantMessage, ToolResultMessage, Usage, UserMessage


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
