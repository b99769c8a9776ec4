"""A reply in the making."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byssus.errors import NetworkFailed
from byssus.events import (
    StreamDone,
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
)
from byssus.messages import (
    MOST_TOKENS,
    AssistantMessage,
    Block,
    Failure,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
)
from byssus.providers.base import Model, Prices
from byssus.providers.reply import Reply, parse_tool_call

TEXT: list[StreamEvent] = [TextStart(0), TextDelta(0, "Hello "), TextDelta(0, "world"), TextEnd(0)]
CALL = ToolCall("c1", "look", {"at": "sky"})


def reply(*events: StreamEvent) -> Reply:
    made = Reply("asked-model", "test")
    for event in events:
        made.add(event)
    return made


def content(*events: StreamEvent) -> list[Block]:
    return reply(*events, StreamDone()).message().content


def test_deltas_become_one_text_block() -> None:
    assert reply(StreamStart(), *TEXT, StreamDone("stop", Usage(1, 2))).message() == AssistantMessage(
        "Hello world", "stop", Usage(1, 2), "asked-model", "test"
    )


@given(st.text(st.sampled_from("a\U0001f600\ud800\udc00")), st.lists(st.integers(0, 40)))
def test_a_surrogate_pair_that_was_cut_in_two_is_one_character(text: str, cuts: list[int]) -> None:
    halves = "".join(chr(unit) for unit in memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H"))
    places = [0, *sorted(min(cut, len(halves)) for cut in cuts), len(halves)]
    made = Reply("m", "test")
    parts = [json.loads(json.dumps(halves[a:b])) for a, b in itertools.pairwise(places)]  # as they come from a service
    shown = [made.add(TextDelta(0, part)) for part in parts]
    stored = made.broken("aborted").text
    assert stored == json.loads(json.dumps(halves))
    assert stored.startswith("".join(event.delta for event in shown if isinstance(event, TextDelta)))


def test_the_model_is_the_one_that_answered() -> None:
    assert reply(StreamStart("real-model"), StreamDone()).message().model == "real-model"


def test_the_stop_reason_and_usage_come_from_done() -> None:
    message = reply(*TEXT, StreamDone("length", Usage(1, 2))).message()
    assert (message.stop_reason, message.usage) == ("length", Usage(1, 2))


HUGE = 10**30
IMPOSSIBLE: list[tuple[Any, Usage]] = [
    (Usage(-10_000, 5), Usage(0, 5)),
    (Usage(1, 2, -3, -4, -0.5), Usage(1, 2)),
    (Usage(HUGE, 2**63, 2**64, 5, 0.5), Usage(MOST_TOKENS, MOST_TOKENS, MOST_TOKENS, 5, 0.5)),
    (Usage(math.nan, math.inf, -math.inf, 2.5, math.nan), Usage(0, MOST_TOKENS, 0, 2)),  # type: ignore[arg-type]
    (Usage("7", None, True, [], HUGE), Usage()),  # type: ignore[arg-type]
    (Usage(10**5_000), Usage(MOST_TOKENS)),
    (None, Usage()),
    ({"input": 3}, Usage()),
]


@pytest.mark.parametrize(("told", "counted"), IMPOSSIBLE)
def test_a_usage_that_cannot_be_is_counted_within_bounds_and_reported(
    told: Any, counted: Usage, caplog: pytest.LogCaptureFixture
) -> None:
    message = reply(*TEXT, StreamDone("stop", told)).message()
    assert (message.text, message.usage) == ("Hello world", counted)
    assert all(type(number) is int for number in (message.usage.input, message.usage.output, message.usage.total))
    (record,) = caplog.records
    assert record.getMessage().startswith("provider 'test' reported an impossible usage for model 'asked-model': ")
    assert Model("m", prices=Prices(1.0, 1.0, 1.0, 1.0)).cost(counted) < MOST_TOKENS


def test_a_usage_of_whole_floats_is_a_usage(caplog: pytest.LogCaptureFixture) -> None:
    assert reply(StreamDone("stop", Usage(12.0, 3, cost=1))).message().usage == Usage(12, 3, cost=1.0)  # type: ignore[arg-type]
    assert not caplog.records


def test_blocks_stand_in_the_order_of_their_indexes() -> None:
    events: list[StreamEvent] = [
        TextStart(7),
        TextDelta(7, "b"),
        TextEnd(7),
        ToolCallEnd(9, CALL),
        TextStart(2),
        TextDelta(2, "a"),
    ]
    assert content(*events) == [TextContent("a"), TextContent("b"), CALL]


def test_interleaved_deltas_reach_their_own_blocks() -> None:
    assert content(
        ThinkingStart(0),
        TextStart(1),
        ThinkingDelta(0, "h"),
        TextDelta(1, "o"),
        ThinkingDelta(0, "m"),
        TextDelta(1, "k"),
        ThinkingEnd(0, "s1"),
    ) == [ThinkingContent("hm", "s1"), TextContent("ok")]


def test_empty_text_is_no_block() -> None:
    assert content(TextStart(0), TextEnd(0), TextStart(1), TextDelta(1, ""), TextEnd(1)) == []


def test_thinking_keeps_signature_and_redacted_data_even_without_text() -> None:
    assert content(ThinkingStart(0), ThinkingEnd(0, "s1"), ThinkingStart(1), ThinkingEnd(1, redacted="xyz")) == [
        ThinkingContent("", "s1"),
        ThinkingContent(redacted="xyz"),
    ]


def test_a_reply_with_tool_calls_stops_for_them_whatever_the_service_says() -> None:
    assert reply(ToolCallEnd(0, CALL), StreamDone("stop")).message().stop_reason == "tool_use"


def test_a_reply_that_ran_out_of_tokens_stays_one_with_tool_calls_too() -> None:
    assert reply(ToolCallEnd(0, CALL), StreamDone("length")).message().stop_reason == "length"


def test_a_stream_without_an_end_is_no_reply() -> None:
    unfinished = reply(StreamStart(), *TEXT)
    with pytest.raises(NetworkFailed, match="the stream from test ended before the reply was complete"):
        unfinished.message()


def test_a_reply_is_empty_until_something_of_it_was_shown() -> None:
    assert reply(StreamStart("real-model"), StreamDone()).is_empty
    assert not reply(StreamStart(), TextStart(0), TextDelta(0, "H")).is_empty


def test_a_broken_reply_keeps_the_tokens_that_were_counted_when_it_began() -> None:
    assert reply(StreamStart("real-model", Usage(7))).broken("aborted").usage == Usage(7)


def test_a_broken_reply_keeps_what_arrived_and_says_why() -> None:
    failure = Failure("NetworkFailed", "cut")
    broken = reply(StreamStart("real-model"), TextStart(0), TextDelta(0, "Hel")).broken("error", failure)
    assert broken == AssistantMessage("Hel", "error", Usage(), "real-model", "test", failure)
    assert broken.failed


def test_a_broken_reply_keeps_whole_tool_calls_and_leaves_out_the_others() -> None:
    broken = reply(
        ToolCallStart(0, "c1", "look"),
        ToolCallDelta(0, "{}"),
        ToolCallEnd(0, CALL),
        ToolCallStart(1, "c2", "look"),
        ToolCallDelta(1, '{"at": '),
    ).broken("aborted")
    assert broken.content == [CALL]
    assert broken.stop_reason == "aborted"


def test_thinking_that_broke_off_has_no_signature() -> None:
    assert reply(ThinkingStart(0), ThinkingDelta(0, "h")).broken("aborted").content == [ThinkingContent("h")]


def test_a_reply_that_is_broken_after_its_end_keeps_its_usage() -> None:
    assert reply(*TEXT, StreamDone("stop", Usage(1, 2))).broken("aborted").usage == Usage(1, 2)


def test_nothing_at_all_can_be_broken_off() -> None:
    assert reply().broken("aborted") == AssistantMessage([], "aborted", Usage(), "asked-model", "test")


def test_arguments_are_parsed_from_json() -> None:
    assert parse_tool_call("c1", "look", '{"at": "sky"}') == CALL


def test_no_text_means_no_arguments() -> None:
    assert parse_tool_call("c1", "look", "") == ToolCall("c1", "look")


@pytest.mark.parametrize("text", ['{"at": ', "[1]", "null", "42", '"sky"', " ", "{'at': 1}"])
def test_text_that_is_no_json_object_is_kept(text: str) -> None:
    assert parse_tool_call("c1", "look", text) == ToolCall("c1", "look", {}, malformed=text)


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())))
def test_any_json_object_survives(arguments: dict[str, object]) -> None:
    assert parse_tool_call("c1", "look", json.dumps(arguments)).arguments == arguments


def test_numbers_beyond_strict_json_are_read_as_models_write_them() -> None:
    assert parse_tool_call("c1", "look", '{"x": Infinity}').arguments == {"x": math.inf}


@pytest.mark.parametrize(
    "text",
    [
        '{"n": ' + "1" * 5_000 + "}",
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
)
def test_hostile_arguments_are_malformed_and_do_no_harm(text: str) -> None:
    assert parse_tool_call("c1", "look", text).malformed == text
