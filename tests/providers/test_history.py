"""Whatever happened to a history, what goes to a model is valid, and as close to what was said as it can be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus.messages import (
    AssistantMessage,
    Block,
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
    UserMessage,
)
from byssus.providers.history import (
    UNKNOWN_OUTCOME,
    ValidHistory,
    can_continue,
    open_calls,
    unknown_outcome,
    valid_history,
)
from tests.support.histories import flaws, shared_ids, without_ids
from tests.support.quick import examples

USER = UserMessage("hello")
ANSWER = AssistantMessage("hi")


def call(call_id: str, name: str = "look") -> ToolCall:
    return ToolCall(call_id, name, {"at": call_id})


def calling(*ids: str, text: str = "", stop_reason: ReplyStop = "tool_use") -> AssistantMessage:
    blocks: list[Block] = [TextContent(text)] if text else []
    return AssistantMessage([*blocks, *map(call, ids)], stop_reason)


def result(call_id: str, text: str = "seen") -> ToolResultMessage:
    return ToolResultMessage(call_id, "look", f"{text} {call_id}")


# --- an independent judge ---------------------------------------------------------------------------------------------


def test_the_judge_knows_a_good_history() -> None:
    assert flaws([]) == []
    assert flaws([USER, calling("a", "b"), result("a"), result("b"), ANSWER, USER]) == []


@pytest.mark.parametrize(
    "history",
    [
        [ANSWER],
        [USER, result("a")],
        [USER, calling("a")],
        [USER, calling("a"), USER, result("a")],
        [USER, calling("a", "b"), result("b"), result("a")],
        [USER, calling("a"), result("a"), result("a")],
        [USER, calling("a", "b"), result("a"), ANSWER],
        [USER, AssistantMessage([]), USER],
        [USER, AssistantMessage(" "), USER],
        [USER, AssistantMessage([ThinkingContent("hm")]), USER],
        [USER, AssistantMessage("Hel", "error")],
        [USER, Note(1)],
    ],
)
def test_the_judge_knows_a_bad_history(history: list[Message]) -> None:
    assert flaws(history)


# --- strategies -------------------------------------------------------------------------------------------------------

words = st.sampled_from(["a", "b c", "\ud800", "é", "\0"])
call_ids = st.sampled_from(["c1", "c2", "c3"])  # few, so that they are reused


@st.composite
def turns(draw: st.DrawFn) -> list[ModelMessage]:
    """One whole exchange: a user, perhaps some tool turns, an answer."""
    made: list[ModelMessage] = [UserMessage(draw(words))]
    for _ in range(draw(st.integers(0, 2))):
        ids = draw(st.lists(call_ids, min_size=1, max_size=3, unique=True))
        thinking: list[Block] = [ThinkingContent("hm", "sig")] if draw(st.booleans()) else []
        text: list[Block] = [TextContent(draw(words))] if draw(st.booleans()) else []
        made.append(AssistantMessage([*thinking, *text, *map(call, ids)], "tool_use"))
        made.extend(result(call_id, draw(words)) for call_id in ids)
    if draw(st.booleans()):
        made.append(AssistantMessage(draw(words), draw(st.sampled_from(["stop", "length"]))))
    return made


valid_histories = st.lists(turns(), max_size=4).map(lambda parts: [message for part in parts for message in part])

odd_blocks: st.SearchStrategy[Block] = st.one_of(
    st.builds(TextContent, st.sampled_from(["", " ", "\n", "x"])),
    st.builds(ThinkingContent, st.sampled_from(["", "hm"]), st.none() | st.just("sig")),
    st.builds(call, call_ids),
    st.just(ImageContent("b64")),
    st.just(UnknownBlock({"type": "new"})),
)
odd_messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(UserMessage, st.lists(odd_blocks.filter(lambda block: not isinstance(block, ToolCall)), max_size=2)),
    st.builds(
        AssistantMessage,
        st.lists(odd_blocks, max_size=3),
        st.sampled_from(["stop", "tool_use", "length", "error", "aborted"]),
    ),
    st.builds(result, call_ids, words),
    st.builds(Note, st.sampled_from([None, 1, {"role": "system", "content": "be nice"}, {"role": "assistant"}])),
)


def damaged(history: list[ModelMessage], seed: int, strength: int) -> list[Message]:
    chance = random.Random(seed)
    messages: list[Message] = list(history)
    for _ in range(strength):
        if not messages:
            break
        at, to = chance.randrange(len(messages)), chance.randrange(len(messages))
        match chance.choice(["drop", "double", "move", "cut the head", "cut the tail", "break"]):
            case "drop":
                del messages[at]
            case "double":
                messages.insert(to, messages[at])
            case "move":
                messages.insert(to, messages.pop(at))
            case "cut the head":
                del messages[: at // 2]
            case "cut the tail":
                del messages[at + 1 :]
            case "break":
                if isinstance(reply := messages[at], AssistantMessage):
                    messages[at] = AssistantMessage(reply.content, chance.choice(["error", "aborted"]))
    return messages


damaged_histories = st.builds(damaged, valid_histories, st.integers(0, 10**6), st.integers(1, 6))
wild_histories = st.lists(odd_messages, max_size=8)


# --- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(300))
@given(valid_histories)
def test_a_valid_history_is_left_as_it_is_but_for_ids_that_come_again(history: list[ModelMessage]) -> None:
    assert flaws(history) == []
    assert without_ids(valid_history(history)) == without_ids(history)
    if not shared_ids(history):
        assert valid_history(history) == history


@settings(max_examples=examples(500))
@given(damaged_histories)
def test_a_damaged_history_becomes_valid(history: list[Message]) -> None:
    assert flaws(valid_history(history)) == []
    assert shared_ids(valid_history(history)) == []


@settings(max_examples=examples(500))
@given(wild_histories)
def test_any_history_becomes_valid(history: list[Message]) -> None:
    assert flaws(valid_history(history)) == []


@settings(max_examples=examples(300))
@given(damaged_histories | wild_histories)
def test_what_was_made_valid_stays_as_it_is(history: list[Message]) -> None:
    once = valid_history(history)
    assert valid_history(once) == once


@settings(max_examples=examples(300))
@given(damaged_histories | wild_histories)
def test_a_history_that_grows_is_made_valid_like_one_that_is_whole(history: list[Message]) -> None:
    growing: list[Message] = []
    incremental = ValidHistory()
    for message in history:
        growing.append(message)
        assert incremental.of(growing) == valid_history(list(growing))


@settings(max_examples=examples(300))
@given(damaged_histories, damaged_histories)
def test_a_history_that_is_another_one_is_made_valid_afresh(first: list[Message], second: list[Message]) -> None:
    incremental = ValidHistory()
    incremental.of(first)
    assert incremental.of(second) == valid_history(second)
    assert incremental.of(first) == valid_history(first)


@settings(max_examples=examples(300))
@given(damaged_histories, st.integers(0, 10))
def test_a_history_that_shrinks_is_made_valid_afresh(history: list[Message], kept: int) -> None:
    incremental = ValidHistory()
    incremental.of(history)
    del history[kept:]
    assert incremental.of(history) == valid_history(list(history))


def test_what_was_sent_does_not_change_when_the_history_grows() -> None:
    history: list[Message] = [USER, ANSWER, USER]
    incremental = ValidHistory()
    first = incremental.of(history)
    history += [ANSWER, USER]
    incremental.of(history)
    assert first == [USER, ANSWER, USER]


@given(damaged_histories | wild_histories)
def test_the_given_history_is_not_changed(history: list[Message]) -> None:
    before = list(history)
    valid_history(history)
    assert history == before


def spoken(history: Sequence[Message]) -> list[Message]:
    """What users and models said, without the results and without the words that stand for what was left out."""
    return [m for m in history if isinstance(m, UserMessage | AssistantMessage) and "left out" not in m.text]


def is_part(part: list[Message], whole: list[Message]) -> bool:
    rest = iter(whole)
    return all(any(other == message for other in rest) for message in part)


@settings(max_examples=examples(300))
@given(damaged_histories)
def test_what_remains_keeps_its_order(history: list[Message]) -> None:
    assert is_part(without_ids(spoken(valid_history(history))), without_ids(spoken(history)))


@settings(max_examples=examples(300))
@given(damaged_histories)
def test_nothing_that_a_user_or_a_whole_reply_says_is_left_out(history: list[Message]) -> None:
    whole = [m for m in spoken(history) if not (isinstance(m, AssistantMessage) and m.failed)]
    kept = [m for m in spoken(valid_history(history)) if not (isinstance(m, AssistantMessage) and m.failed)]
    assert without_ids(kept) == without_ids(whole)


@settings(max_examples=examples(300))
@given(damaged_histories)
def test_no_result_is_used_twice_and_none_is_made_up(history: list[Message]) -> None:
    given_results = without_ids([m for m in history if isinstance(m, ToolResultMessage)])
    for message in without_ids(valid_history(history)):
        if isinstance(message, ToolResultMessage) and message.text != UNKNOWN_OUTCOME:
            given_results.remove(message)  # raises when it is not there any more


@settings(max_examples=examples(300))
@given(damaged_histories | wild_histories)
def test_a_model_is_asked_exactly_when_there_is_something_to_answer(history: list[Message]) -> None:
    valid = valid_history(history)
    assert can_continue(history) == (bool(valid) and valid[-1].role in ("user", "tool_result"))


@settings(max_examples=examples(300))
@given(damaged_histories | wild_histories)
def test_open_calls_are_calls_of_the_last_reply_without_a_result_behind_it(history: list[Message]) -> None:
    replies = [position for position, message in enumerate(history) if isinstance(message, AssistantMessage)]
    found = open_calls(history)
    if not replies:
        assert found == {}
        return
    last = history[replies[-1]]
    assert isinstance(last, AssistantMessage)
    # A reply may use one id for several calls: the first results are those of its first calls.
    behind = Counter(m.tool_call_id for m in history[replies[-1] :] if isinstance(m, ToolResultMessage))
    ids = [c.id for c in last.tool_calls]
    assert found == {index: c for index, c in enumerate(last.tool_calls) if ids[: index + 1].count(c.id) > behind[c.id]}


# --- the cases that are known to happen -------------------------------------------------------------------------------


def test_a_call_without_a_result_gets_one_that_says_so() -> None:
    assert valid_history([USER, calling("a", "b"), result("b"), USER]) == [
        USER,
        calling("a", "b"),
        unknown_outcome(call("a")),
        result("b"),
        USER,
    ]


def test_an_unknown_outcome_is_an_error_that_warns_of_trying_again() -> None:
    made = unknown_outcome(call("a"))
    assert (made.tool_call_id, made.tool_name, made.is_error) == ("a", "look", True)
    assert "may or may not" in made.text


def test_results_out_of_order_are_put_in_call_order() -> None:
    assert valid_history([USER, calling("a", "b"), result("b"), result("a")]) == [
        USER,
        calling("a", "b"),
        result("a"),
        result("b"),
    ]


def test_a_result_behind_a_later_message_is_moved_to_its_call() -> None:
    assert valid_history([USER, calling("a"), USER, result("a")]) == [USER, calling("a"), result("a"), USER]


def test_a_reused_id_does_not_mix_up_two_results() -> None:
    history: list[Message] = [USER, calling("a"), result("a", "first"), calling("a"), result("a", "second")]
    assert valid_history(history) == [*history[:3], named("a_2"), answered("a_2", "second a")]


def named(*ids: str) -> AssistantMessage:
    """A reply whose calls are all of `a`, by other ids."""
    return AssistantMessage([ToolCall(name, "look", {"at": "a"}) for name in ids], "tool_use")


def answered(call_id: str, text: str) -> ToolResultMessage:
    return ToolResultMessage(call_id, "look", text)


def test_calls_of_one_reply_that_share_an_id_get_their_own_and_so_do_their_results() -> None:
    history: list[Message] = [USER, calling("a", "a", "a"), result("a", "first"), result("a", "second")]
    assert valid_history(history)[1:] == [
        named("a", "a_2", "a_3"),
        answered("a", "first a"),
        answered("a_2", "second a"),
        unknown_outcome(ToolCall("a_3", "look")),
    ]
    assert history[1] == calling("a", "a", "a"), "what is stored stays as the model said it"


def test_calls_without_an_id_get_one() -> None:
    calls = AssistantMessage([ToolCall("", "look", {"at": "a"}), ToolCall("", "look", {"at": "a"})], "tool_use")
    history: list[Message] = [USER, calls, answered("", "first"), answered("", "second")]
    assert valid_history(history)[1:] == [
        named("call_2", "call_3"),
        answered("call_2", "first"),
        answered("call_3", "second"),
    ]


def test_an_id_that_was_made_up_is_not_taken_by_a_call_that_comes_with_it() -> None:
    history: list[Message] = [USER, calling("a", "a"), calling("a_2"), calling("a")]
    ids = [
        call.id for reply in valid_history(history) if isinstance(reply, AssistantMessage) for call in reply.tool_calls
    ]
    assert ids == ["a", "a_2", "a_2_2", "a_3"]


@settings(max_examples=examples(200))
@given(damaged_histories | wild_histories)
def test_an_id_stays_the_same_while_the_conversation_grows(history: list[Message]) -> None:
    """So a service finds the beginning in its cache. Up to a user's message, all is said and settled."""
    growing, before = ValidHistory(), list[ModelMessage]()
    for end in range(len(history) + 1):
        valid = growing.of(history[:end])
        assert valid == valid_history(history[:end])
        assert shared_ids(valid) == []
        settled = max((n for n, message in enumerate(before) if isinstance(message, UserMessage)), default=0)
        if not any(message.text == UNKNOWN_OUTCOME for message in before):
            assert valid[:settled] == before[:settled]
        before = valid


def test_the_result_of_a_reused_id_is_not_given_to_the_earlier_call() -> None:
    assert valid_history([USER, calling("a"), calling("a"), result("a")]) == [
        USER,
        calling("a"),
        unknown_outcome(call("a")),
        named("a_2"),
        answered("a_2", "seen a"),
    ]


def test_one_reply_may_use_an_id_twice() -> None:
    assert flaws(valid_history([USER, calling("a", "a"), result("a"), USER])) == []


def test_a_result_without_a_call_is_left_out() -> None:
    assert valid_history([USER, result("a"), ANSWER]) == [USER, ANSWER]


def test_a_result_in_front_of_its_call_is_not_its_result() -> None:
    assert valid_history([USER, result("a"), calling("a")]) == [USER, calling("a"), unknown_outcome(call("a"))]


def test_a_window_that_begins_with_a_reply_says_that_something_is_left_out() -> None:
    history = valid_history([ANSWER, USER])
    assert [message.role for message in history] == ["user", "assistant", "user"]
    assert "left out" in history[0].text
    assert history[1:] == [ANSWER, USER]


def test_a_reply_that_broke_off_at_the_end_is_tried_again() -> None:
    assert valid_history([USER, AssistantMessage("Hel", "error")]) == [USER]
    assert valid_history([USER, AssistantMessage("Hel", "error"), AssistantMessage([], "aborted")]) == [USER]


@pytest.mark.parametrize(
    "tail", [result("stray"), UserMessage(""), UserMessage(" \n"), AssistantMessage([]), AssistantMessage(" "), Note(1)]
)
def test_a_reply_that_broke_off_is_tried_again_whatever_worthless_stands_behind_it(tail: Message) -> None:
    assert valid_history([USER, AssistantMessage("Hel", "error"), tail]) == [USER]


def test_a_reply_that_broke_off_in_the_middle_keeps_its_text() -> None:
    broken = AssistantMessage("Hel", "aborted")
    assert valid_history([USER, broken, USER]) == [USER, broken, USER]


def test_a_reply_that_broke_off_loses_thoughts_that_its_service_would_not_recognise() -> None:
    broken = AssistantMessage([ThinkingContent("hm"), ThinkingContent("ok", "sig"), TextContent("Hel")], "aborted")
    sent = valid_history([USER, broken, USER])[1]
    assert sent.content == [ThinkingContent("ok", "sig"), TextContent("Hel")]


def test_a_whole_reply_keeps_all_its_thoughts() -> None:
    reply = AssistantMessage([ThinkingContent("hm"), TextContent("hi")])
    assert valid_history([USER, reply, USER])[1] is reply


def test_a_reply_that_broke_off_behind_whole_calls_keeps_them() -> None:
    broken = calling("a", text="Let me", stop_reason="aborted")
    assert valid_history([USER, broken, result("a")]) == [USER, broken, result("a")]


def test_notes_are_for_people() -> None:
    assert valid_history([Note({"role": "system"}), USER, Note("x"), ANSWER]) == [USER, ANSWER]


def test_a_user_message_with_only_an_image_is_not_empty() -> None:
    picture = UserMessage([ImageContent("b64")])
    assert valid_history([picture]) == [picture]


def test_nothing_stays_nothing() -> None:
    assert valid_history([]) == []
    assert open_calls([]) == {}
    assert not can_continue([])


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([USER], True),
        ([USER, ANSWER], False),
        ([USER, calling("a")], True),
        ([USER, calling("a"), result("a")], True),
        ([USER, AssistantMessage("Hel", "error")], True),
        ([USER, AssistantMessage([], "aborted")], True),
        ([USER, ANSWER, Note(1)], False),
        ([AssistantMessage([], "aborted")], False),
        ([UserMessage("")], False),
    ],
)
def test_whether_a_model_has_something_to_answer(history: list[Message], expected: bool) -> None:
    assert can_continue(history) is expected


def test_open_calls_are_found_by_their_index() -> None:
    assert open_calls([USER, calling("a", "b", "c"), result("b")]) == {0: call("a"), 2: call("c")}


def test_calls_of_an_earlier_reply_are_not_open() -> None:
    assert open_calls([USER, calling("a"), USER, ANSWER]) == {}


def test_a_service_that_uses_one_id_for_all_its_calls_is_served() -> None:
    history: list[Message] = [USER]
    for _ in range(1_000):
        history += [calling("a"), result("a")]
    valid = valid_history(history)
    assert without_ids(valid) == without_ids(history)
    assert (flaws(valid), shared_ids(valid)) == ([], [])


def test_a_result_that_names_no_call_is_that_of_the_first_call_without_one() -> None:
    calls = AssistantMessage([ToolCall("a", "f"), ToolCall("b", "g"), ToolCall("c", "h")])
    history: list[Message] = [
        UserMessage("go"),
        calls,
        ToolResultMessage("b", "g", "of b"),
        ToolResultMessage("", "", "the first"),
    ]
    assert list(open_calls(history)) == [2]
    results = [m for m in valid_history(history) if isinstance(m, ToolResultMessage)]
    assert [(m.tool_call_id, m.tool_name) for m in results] == [("a", "f"), ("b", "g"), ("c", "h")]
    assert [m.text for m in results[:2]] == ["the first", "of b"]
    assert results[2].is_error


def test_a_result_that_names_no_call_does_not_reach_back_past_another_reply() -> None:
    history: list[Message] = [
        UserMessage("go"),
        AssistantMessage([ToolCall("a", "f")]),
        AssistantMessage([ToolCall("b", "g")]),
        ToolResultMessage("", "", "of b"),
        ToolResultMessage("", "", "of nobody"),
    ]
    results = [m for m in valid_history(history) if isinstance(m, ToolResultMessage)]
    assert [(m.tool_call_id, m.is_error) for m in results] == [("a", True), ("b", False)]
    assert open_calls(history) == {}
