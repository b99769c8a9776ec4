"""The ready-made middleware: what the model sees of a long thread, and what it never sees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byssus import (
    Agent,
    AssistantMessage,
    ImageContent,
    Limits,
    Model,
    Redact,
    SlidingWindow,
    Summarize,
    TextContent,
    ThinkingContent,
    TokenBudget,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    Usage,
    UserMessage,
    tool,
)
from byssus.errors import ContextTooLong, HookFailed, InputError, NetworkFailed, Overloaded
from byssus.messages import Message, Note, encode
from byssus.middleware.windows import estimate_tokens
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole, history, hooks, look, make, sent, within
from tests.support.conversations import SECRET, histories
from tests.support.databases import Database
from tests.support.histories import flaws
from tests.support.quick import examples


def told(request: Request) -> list[str]:
    return [f"{message.role}: {message.text}" for message in request.messages]


# --- an independent judge ---------------------------------------------------------------------------------------------


def says_something(message: Any) -> bool:
    return any(
        block.text.strip() if isinstance(block, TextContent) else not isinstance(block, ThinkingContent)
        for block in message.content
    )


def refused_for(history: Sequence[Message]) -> list[str]:
    """All reasons for which a service would refuse this conversation. Written from the rules, not from the code."""
    found: list[str] = []
    if not history or history[0].role != "user":
        found.append("does not begin with a user")
    if history and history[-1].role == "assistant":
        found.append("ends with a reply")
    due: list[str] = []
    for position, message in enumerate(history):
        if isinstance(message, ToolResultMessage):
            if not due or due.pop(0) != message.tool_call_id:
                found.append(f"{position}: a result without its call, or out of order")
            continue
        if due:
            found.append(f"{position}: the calls {due} have no result")
        due = [call.id for call in message.tool_calls] if isinstance(message, AssistantMessage) else []
        if isinstance(message, Note) or not says_something(message):
            found.append(f"{position}: nothing is said")
    if due:
        found.append(f"the calls {due} have no result at the end")
    return found


@pytest.mark.parametrize(
    "history",
    [
        [],
        [AssistantMessage("hi")],
        [UserMessage("hi"), AssistantMessage("Hel", "error")],
        [UserMessage("hi"), AssistantMessage([ToolCall("a", "look")])],
        [UserMessage("hi"), ToolResultMessage("a", "look", "x")],
        [UserMessage("hi"), AssistantMessage([ToolCall("a", "look")]), UserMessage("x")],
        [UserMessage("hi"), AssistantMessage([ToolCall("a", "look")]), *[ToolResultMessage("a", "look", "x")] * 2],
        [UserMessage("hi"), AssistantMessage([]), UserMessage("x")],
        [UserMessage("hi"), AssistantMessage([ThinkingContent("hm")]), UserMessage("x")],
        [UserMessage("hi"), Note(1)],
    ],
)
def test_the_judge_knows_a_bad_history(history: list[Message]) -> None:
    assert refused_for(history)


def test_the_judge_knows_a_good_history() -> None:
    calls = AssistantMessage([ToolCall("a", "look"), ToolCall("b", "look")])
    results = [ToolResultMessage("a", "look", "x"), ToolResultMessage("b", "look", "x")]
    assert refused_for([UserMessage("hi"), calls, *results, AssistantMessage("ok"), UserMessage("x")]) == []


# --- whatever is cut --------------------------------------------------------------------------------------------------


class Cut:
    """A hook that takes some messages away and perhaps turns the others round."""

    def __init__(self, name: str, kept: list[bool], *, turned: bool) -> None:
        self._kept = kept
        self._turned = turned
        setattr(self, name, self._cut)

    def __repr__(self) -> str:
        return f"Cut({self._kept}, turned={self._turned})"

    def _cut(self, messages: list[Message]) -> list[Message]:
        left = [each for i, each in enumerate(messages) if self._kept[i % len(self._kept)]] or messages
        return left[::-1] if self._turned else left


cuts = st.builds(
    Cut,
    st.sampled_from(["transform_context", "convert_to_llm"]),
    st.lists(st.booleans(), min_size=1, max_size=7),
    turned=st.booleans(),
)
middleware = st.lists(
    st.one_of(
        st.builds(SlidingWindow, st.integers(1, 8)),
        st.builds(TokenBudget, st.integers(1, 200)),
        st.builds(Summarize, st.integers(1, 200), st.integers(1, 8)),
        st.just(Redact(SECRET)),
        cuts,
    ),
    max_size=4,
)


class Eager(ScriptedProvider):
    """Answers every question: a summary with a summary, the first others with calls, the last with words."""

    def __init__(self, turns: int) -> None:
        super().__init__([self._answer] * 100)
        self._turns = turns
        self.asked: list[Request] = []

    def _answer(self, request: Request) -> Any:
        if request.system_prompt == Summarize.INSTRUCTION:
            return "what happened"
        self.asked.append(request)
        calls = [ToolCall(f"new{len(self.asked)}-{n}", "look", {"at": SECRET}) for n in range(2)]
        return calls if len(self.asked) < self._turns else "done"


@settings(max_examples=examples(300), deadline=None)
@given(histories, middleware, st.integers(1, 4))
def test_whatever_the_middleware_cuts_every_request_is_a_valid_history(
    history: list[Message], middleware: list[object], turns: int
) -> None:
    async def main() -> None:
        provider = Eager(turns)
        agent = make(provider, tools=[look], middleware=middleware)
        agent.state.messages.extend(history)
        try:
            await agent.prompt("go on")
        except InputError as error:
            # A hook may leave nothing that a model could see, and then the error says so.
            assert "nothing to send" in str(error)
            assert any(isinstance(each, Cut) for each in middleware)
        for request in provider.requests:
            assert refused_for(request.messages) == []
            if any(isinstance(each, Redact) for each in middleware):
                assert SECRET not in repr(request.messages)

    within(main())


# --- the sliding window -----------------------------------------------------------------------------------------------


def test_a_sliding_window_shows_the_last_messages_and_the_question_of_a_turn_that_it_cuts() -> None:
    script: list[Step] = ["a", "b", [ToolCall("1", "look")], [ToolCall("2", "look")], "c"]
    provider = ScriptedProvider(script)
    agent = make(provider, tools=[look], middleware=[SlidingWindow(2)])
    for prompt in ("one", "two", "three"):
        within(agent.prompt(prompt))
    assert [told(request) for request in provider.requests] == [
        ["user: one"],
        ["user: one", "assistant: a", "user: two"],
        ["user: two", "assistant: b", "user: three"],
        ["user: three", "assistant: ", "tool_result: seen here"],
        ["user: three", "assistant: ", "tool_result: seen here"],
    ]


def test_a_sliding_window_keeps_the_results_of_one_reply_together() -> None:
    calls = [ToolCall(str(n), "look", {"at": str(n)}) for n in range(4)]
    provider = ScriptedProvider([calls, "ok"])
    within(make(provider, tools=[look], middleware=[SlidingWindow(2)]).prompt("go"))
    assert [m.role for m in provider.requests[1].messages] == ["user", "assistant", *["tool_result"] * 4]


@pytest.mark.parametrize("window", [SlidingWindow(1), TokenBudget(1), Summarize(1_000, 1)])
def test_a_run_that_failed_can_be_resumed_behind_the_smallest_window(window: object) -> None:
    agent = make([NetworkFailed("gone"), "ok"], middleware=[window], max_retries=0)
    agent.state.messages.append(Note("a note"))
    assert within(agent.prompt("hi")).stop_reason == "error"
    agent.state.messages.append(Note("another"))
    assert within(agent.resume()).text == "ok"


@pytest.mark.parametrize("n", [0, -1, 1.5, "3", None, True])
@pytest.mark.parametrize("kind", [SlidingWindow, TokenBudget, Summarize])
def test_a_size_that_makes_no_sense_is_refused_by_name(kind: type[Any], n: Any) -> None:
    with pytest.raises(InputError, match=f"{kind.__name__} needs .*{n!r}"):
        kind(n)


# --- the token budget -------------------------------------------------------------------------------------------------


def test_a_token_budget_keeps_whole_turns() -> None:
    provider = ScriptedProvider(["x" * 40, [ToolCall("1", "look")], "x" * 40, "ok"])
    agent = make(provider, tools=[look], middleware=[TokenBudget(45)])
    for prompt in ("one", "two", "three"):
        within(agent.prompt(prompt))
    assert [text[:22] for text in told(provider.requests[-1])] == [
        "user: two",
        "assistant: ",
        "tool_result: seen here",
        "assistant: xxxxxxxxxxx",
        "user: three",
    ]
    assert refused_for(provider.requests[-1].messages) == []


def test_a_turn_that_is_larger_than_the_budget_is_shown_whole() -> None:
    provider = ScriptedProvider(["a", [ToolCall("1", "look", {"at": "x" * 1_000})], "ok"])
    agent = make(provider, tools=[look], middleware=[TokenBudget(10)])
    within(agent.prompt("one"))
    within(agent.prompt("two"))
    assert [m.role for m in provider.requests[-1].messages] == ["user", "assistant", "tool_result"]
    assert provider.requests[-1].messages[0].text == "two"


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("The quick brown fox jumps over the lazy dog. " * 20, 180, 260),  # about 200 for a real tokeniser
        ("敏捷的棕色狐狸跳过了懒狗。" * 20, 180, 320),  # about 200
        ("Быстрая коричневая лиса прыгает. " * 20, 180, 480),  # about 200
        ("😀" * 100, 100, 300),
        ("\0" * 100, 20, 110),
        ("\ud800" * 100, 20, 210),
        ("", 0, 4),
    ],
    ids=["English", "Chinese", "Russian", "emoji", "NUL", "surrogates", "nothing"],
)
def test_the_estimate_of_tokens_is_about_right(text: str, low: int, high: int) -> None:
    assert low <= estimate_tokens(UserMessage(text)) <= high


def test_everything_that_is_sent_counts() -> None:
    nothing = estimate_tokens(AssistantMessage([]))
    for block in (
        ImageContent("b64"),
        ThinkingContent("x" * 100),
        ThinkingContent(redacted="x" * 100),
        ToolCall("1", "look", {"at": "x" * 100}),
        ToolCall("1", "look", malformed="x" * 100),
    ):
        assert estimate_tokens(AssistantMessage([block])) > nothing + 20
    assert estimate_tokens(Note("x" * 100)) == 0


# --- summaries --------------------------------------------------------------------------------------------------------


class Talk(ScriptedProvider):
    """Answers with 'Reply n' and enough words; writes summaries, numbered, when asked for one."""

    def __init__(self, *, calls: int = 0, summary: Any = None) -> None:
        super().__init__([self._answer] * 200)
        self._calls = calls
        self._summary = summary
        self.asked: list[Request] = []
        self.summaries: list[Request] = []

    def _answer(self, request: Request) -> Any:
        if request.system_prompt == Summarize.INSTRUCTION:
            self.summaries.append(request)
            return self._summary(request) if self._summary else f"summary {len(self.summaries)}"
        self.asked.append(request)
        if len(self.asked) <= self._calls:
            return [ToolCall(f"c{len(self.asked)}", "look", {"at": "y" * 80})]
        return f"Reply {len(self.asked)} " + "x" * 80


def test_old_messages_are_replaced_by_a_summary_which_is_stored_and_not_written_again(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            talk = Talk()
            options: Any = {"checkpointer": cp, "thread_id": "t"}
            agent = make(talk, middleware=[Summarize(100, keep=2)], **options)
            for n in range(5):
                await agent.prompt(f"Question {n}")
            assert len(talk.summaries) == 1
            assert told(talk.asked[-1])[0] == "user: Summary of the conversation so far:\nsummary 1"
            assert "Question 0" in talk.summaries[0].messages[0].text
            thread = await cp.load("t")
            assert thread is not None
            assert len(thread.messages) == 10  # the thread keeps all of it
            assert thread.extra["summary"]["text"] == "summary 1"

    within(main())


def test_a_summary_survives_a_restart(database: Database) -> None:
    async def main(prompts: list[str]) -> Talk:
        async with database.checkpointer() as cp:
            talk = Talk()
            agent = make(talk, middleware=[Summarize(100, keep=2)], checkpointer=cp, thread_id="t")
            for prompt in prompts:
                await agent.prompt(prompt)
            return talk

    first = within(main([f"Question {n}" for n in range(4)]))
    assert len(first.summaries) == 1
    second = within(main(["Go on"]))
    assert second.summaries == []
    assert told(second.asked[0])[0].endswith("summary 1")
    assert told(second.asked[0])[-1] == "user: Go on"
    assert len(told(second.asked[0])) < 9


def test_a_summary_is_merged_into_the_next_one_and_nothing_is_summed_up_twice() -> None:
    talk = Talk()
    agent = make(talk, middleware=[Summarize(100, keep=2)])
    for n in range(20):
        within(agent.prompt(f"Question {n}."))
    assert 3 <= len(talk.summaries) <= 10
    for number, request in enumerate(talk.summaries):
        text = request.messages[0].text
        assert (f"summary {number}" in text) == (number > 0)
    for n in range(20):
        assert sum(f"Question {n}." in request.messages[0].text for request in talk.summaries) <= 1
    for request in talk.asked:
        assert sum(map(estimate_tokens, request.messages)) < 300
        assert refused_for(request.messages) == []


def test_nothing_is_lost_between_the_summary_and_the_messages_that_stay() -> None:
    talk = Talk()
    agent = make(talk, middleware=[Summarize(100, keep=3)])
    for n in range(12):
        within(agent.prompt(f"Question {n}."))
        told_so_far = "".join(request.messages[0].text for request in talk.summaries)
        seen = told_so_far + "".join(told(talk.asked[-1]))
        assert [k for k in range(n + 1) if f"Question {k}." not in seen] == []


def test_a_tool_loop_longer_than_what_is_kept_is_summed_up_and_its_question_stays() -> None:
    talk = Talk(calls=30)
    agent = make(talk, tools=[look], middleware=[Summarize(400, keep=4)])
    assert within(agent.prompt("Find it.")).text.startswith("Reply 31")
    assert 2 <= len(talk.summaries) <= 15
    for request in talk.asked:
        assert refused_for(request.messages) == []
        assert "user: Find it." in told(request)
        assert sum(map(estimate_tokens, request.messages)) < 800
    assert not talk.summaries[0].tools
    assert "[call of look]" in talk.summaries[0].messages[0].text
    assert "[result of look]" in talk.summaries[0].messages[0].text


def test_a_short_turn_before_a_long_one_does_not_keep_the_long_one_from_being_summed_up() -> None:
    talk = Talk(calls=30)
    agent = make(talk, tools=[look], middleware=[Summarize(400, keep=4)])
    agent.state.messages.extend([UserMessage("hello"), AssistantMessage("hi")])
    within(agent.prompt("Find it."))
    assert len(talk.summaries) >= 2
    assert max(len(request.messages) for request in talk.asked) < 40


@pytest.mark.parametrize("failure", [Overloaded("busy"), ContextTooLong("too long"), "", "  \n"])
def test_without_a_summary_the_conversation_goes_on_as_it_is_and_the_next_turn_tries_again(
    failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [failure] * 40
    with_summary = Talk(summary=lambda request: answers.pop() if answers else "at last")
    agent = make(with_summary, middleware=[Summarize(100, keep=2)])
    with caplog.at_level(logging.WARNING, "byssus"):
        for n in range(8):
            assert within(agent.prompt(f"Question {n}")).error is None
    assert len(with_summary.asked[-1].messages) == 15 or not answers
    if isinstance(failure, Exception):
        assert "no new summary" in caplog.text
    while answers:
        answers.pop()
    within(agent.prompt("Once more"))
    assert told(with_summary.asked[-1])[0].endswith("at last")


def test_what_a_model_cannot_sum_up_at_once_is_summed_up_by_and_by() -> None:
    def strict(request: Request) -> Any:
        text = request.messages[0].text
        return ContextTooLong("too long") if text.count("Question") > 1 else f"summary of {len(text)}"

    talk = Talk(summary=strict)
    agent = make(talk, middleware=[Summarize(300, keep=2)])
    for n in range(10):
        within(agent.prompt(f"Question {n}"))
    assert told(talk.asked[-1])[0].startswith("user: Summary of the conversation so far:\nsummary of")
    summed_up = [r.messages[0].text for r in talk.summaries if r.messages[0].text.count("Question") == 1]
    assert len(summed_up) >= 3
    assert sum("Summary of what came before" in text for text in summed_up) >= len(summed_up) - 1


def test_a_summary_may_hold_any_text(database: Database) -> None:
    odd = "语言模型 \0 \ud800 é"

    async def main() -> None:
        async with database.checkpointer() as cp:
            for n in range(6):
                talk = Talk(summary=lambda request: odd)
                agent = make(talk, middleware=[Summarize(100, keep=2)], checkpointer=cp, thread_id="t")
                await agent.prompt(f"{odd} {n} " + "语" * 50)
            thread = await cp.load("t")
            assert thread is not None
            assert thread.extra["summary"]["text"] == odd
            assert told(talk.asked[-1])[0].endswith(odd)

    within(main())


def test_a_summary_of_messages_that_the_thread_no_longer_has_is_left_out() -> None:
    talk = Talk()
    agent = make(talk, middleware=[Summarize(100, keep=2)])
    for n in range(5):
        within(agent.prompt(f"Question {n}"))
    del agent.state.messages[1:]  # as after a rewind
    within(agent.prompt("Again"))
    assert told(talk.asked[-1]) == ["user: Question 0", "user: Again"]


def test_messages_without_ids_are_summed_up_too(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            foreign: list[Any] = [{"role": "user", "content": f"Question {n}"} for n in range(30)]
            await cp.append("t", foreign)
            for _ in range(2):
                talk = Talk()
                await make(talk, middleware=[Summarize(100, keep=2)], checkpointer=cp, thread_id="t").prompt("Go on")
            assert talk.summaries == []
            assert told(talk.asked[0])[0].endswith("summary 1")

    within(main())


def test_the_same_message_said_twice_is_not_taken_for_the_one_that_was_summed_up() -> None:
    talk = Talk()
    agent = make(talk, middleware=[Summarize(100, keep=2)])
    agent.state.messages.extend([UserMessage("ok") for _ in range(60)])  # without ids, as from another program
    within(agent.prompt("Go on"))
    seen = len(talk.asked[0].messages)
    agent.state.messages.append(UserMessage("ok"))
    within(agent.prompt("And on"))
    assert len(talk.asked[1].messages) == seen + 3


def test_what_is_hidden_from_the_model_is_hidden_from_the_one_that_sums_up(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            for order in (1, -1):
                talk = Talk()
                chain = [Summarize(100, keep=2), Redact(SECRET)][::order]
                agent = make(talk, middleware=chain, checkpointer=cp, thread_id=f"t{order}")
                for n in range(6):
                    await agent.prompt(f"Question {n} {SECRET}")
                assert talk.summaries
                assert SECRET not in repr(talk.requests)

    within(main())


def test_a_summary_can_be_written_by_another_model() -> None:
    writer, talk = ScriptedProvider(["by another"]), Talk()
    small = Model("small", provider="other")
    agent = make(talk, middleware=[Summarize(100, keep=2, provider=writer, model=small)])
    for n in range(4):
        within(agent.prompt(f"Question {n}"))
    writer.assert_done()
    assert writer.requests[0].model == small
    assert told(talk.asked[-1])[0].endswith("by another")


def test_a_provider_without_a_model_cannot_write_summaries() -> None:
    with pytest.raises(InputError, match="needs a model of it"):
        Summarize(provider=ScriptedProvider())


def test_what_a_summary_took_counts_as_the_runs() -> None:
    reply = AssistantMessage("short", usage=Usage(100, 10))
    talk = Talk(summary=lambda request: reply)
    agent = make(talk, middleware=[Summarize(100, keep=2)])
    results = [within(agent.prompt(f"Question {n}")) for n in range(5)]
    assert sum(result.usage.total for result in results) == 110 * len(talk.summaries) > 0


def test_a_limit_on_tokens_counts_what_summaries_took() -> None:
    talk = Talk(calls=5, summary=lambda request: AssistantMessage("short", usage=Usage(100, 10)))
    agent = make(talk, tools=[look], middleware=[Summarize(60, keep=1)], limits=Limits(tokens=100))
    assert within(agent.prompt("Find it.")).stop_reason == "token_limit"


def test_extra_that_is_no_summary_is_not_overwritten() -> None:
    for mine in ("my own", {"my": "own"}, [1]):
        agent = make([], middleware=[Summarize(1, keep=1)])
        agent.state.extra["summary"] = mine
        with pytest.raises(HookFailed, match=r"extra\['summary'\].*Summarize\(key="):
            within(agent.prompt("hi"))
        assert agent.state.extra == {"summary": mine}
    talk = Talk()
    agent = make(talk, middleware=[Summarize(100, keep=2, key="so far")])
    agent.state.extra["summary"] = "my own"
    for n in range(5):
        within(agent.prompt(f"Question {n}"))
    assert agent.state.extra["summary"] == "my own"
    assert agent.state.extra["so far"]["text"] == "summary 1"


def test_an_abort_while_a_summary_is_written_stores_no_half_of_it(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent: Agent

            async def endless(request: Request) -> Any:
                agent.abort()
                await asyncio.Event().wait()

            talk = Talk(summary=endless)
            agent = make(talk, middleware=[Summarize(100, keep=2)], checkpointer=cp, thread_id="t", abort_grace=0.0)
            heard = Heard(agent)
            results = [await agent.prompt(f"Question {n}") for n in range(4)]
            check_whole(heard)
            assert [result.stop_reason for result in results].count("aborted") >= 1
            thread = await cp.load("t")
            assert thread is not None
            assert thread.extra == {}

    within(main())


def test_listeners_do_not_hear_a_summary_being_written() -> None:
    talk = Talk(summary=lambda request: "between us")
    agent = make(talk, middleware=[Summarize(100, keep=2)])
    heard = Heard(agent)
    for n in range(5):
        within(agent.prompt(f"Question {n}"))
    assert talk.summaries
    assert "between us" not in repr(heard)


# --- redaction --------------------------------------------------------------------------------------------------------


def test_a_redactor_hides_in_everything_that_is_sent(database: Database) -> None:
    card = 4111_1111_1111_1111

    @tool
    def pay(how: dict[str, Any]) -> ToolResult:
        return ToolResult(f"paid with {card}", details={str(card): [card, ("x", str(card))]})

    async def main() -> None:
        async with database.checkpointer() as cp:
            call = ToolCall("c1", "pay", {"how": {"card": card, str(card): [f"no {card}", 1.5, True, None]}})
            thought = [ThinkingContent(f"it is {card}"), TextContent(f"Paying with {card}"), call]
            provider = ScriptedProvider([thought, [ToolCall("c2", "pay", malformed=f'{{"how": {card}')], "ok"])
            agent = make(
                provider,
                tools=[pay],
                system_prompt=f"The test card is {card}.",
                middleware=[Redact(r"\b\d{16}\b", replacement=r"\1 gone")],
                checkpointer=cp,
                thread_id="t",
            )
            heard = Heard(agent)
            await agent.prompt([TextContent(f"My card is {card}")])
            assert str(card) not in repr(provider.requests)
            assert r"\1 gone" in provider.requests[-1].system_prompt
            first = provider.requests[-1].messages[1]
            assert isinstance(first, AssistantMessage)
            assert first.tool_calls[0].arguments["how"][r"\1 gone"][1:] == [1.5, True, None]
            thread = await cp.load("t")
            assert thread is not None
            results = [m for m in thread.messages if isinstance(m, ToolResultMessage)]
            assert str(card) not in "".join(map(encode, results))
            assert str(card) in encode(thread.messages[0])  # what was said is stored as it was said
            check_whole(heard)

    within(main())


def test_thinking_that_its_service_signed_is_not_touched() -> None:
    signed = ThinkingContent(SECRET, "signature")
    provider = ScriptedProvider([[signed, ToolCall("c", "look")], "ok"])
    within(make(provider, tools=[look], middleware=[Redact(SECRET)]).prompt("hi"))
    assert provider.requests[1].messages[1].content[0] == signed  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ((), "at least one"),
        (("(",), r"'\('"),
        ((b"x",), "b'x'"),
        ((5,), "5"),
        (("x*",), "empty"),
        (("a", "^"), "empty"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_by_name(patterns: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Redact(*patterns)


def test_a_chain_of_ready_made_middleware_and_hooks_of_ones_own_works_together() -> None:
    provider = ScriptedProvider([f"Reply {n} {SECRET}" for n in range(6)])
    seen: list[int] = []

    def watch(messages: list[Message]) -> list[Message]:
        seen.append(len(messages))
        return messages

    agent = make(
        provider,
        middleware=[TokenBudget(1_000), hooks(transform_context=watch), SlidingWindow(3), Redact(SECRET)],
    )
    for n in range(6):
        within(agent.prompt(f"Question {n}"))
    assert seen == [1, 3, 5, 7, 9, 11]
    assert told(provider.requests[-1]) == ["user: Question 4", "assistant: Reply 4 [redacted]", "user: Question 5"]


# --- windows that users write -----------------------------------------------------------------------------------------


class LastTwo:
    """Exactly what users write; no base class."""

    async def transform_context(self, messages, *, signal=None):  # type: ignore[no-untyped-def]
        return messages[-2:]


class LastTwoPlain:
    def transform_context(self, messages, *, signal=None):  # type: ignore[no-untyped-def]
        return messages[-2:]


class Window:
    """A window of any size, as a user would write it."""

    def __init__(self, n: int) -> None:
        self._n = n

    async def transform_context(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:
        return messages[-self._n :]


@pytest.mark.parametrize("middleware", [LastTwo(), LastTwoPlain(), SlidingWindow(2)])
def test_a_window_limits_the_model_and_not_the_database(database: Database, middleware: object) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(["a", "b", "c"])
            agent = make(provider, middleware=[middleware], checkpointer=cp, thread_id="t")
            for prompt in ("one", "two", "three"):
                await agent.prompt(prompt)
            assert [len(await history(cp, "t")), len(agent.state.messages)] == [6, 6]
            assert sent(provider)[-1] == "user: three"
            assert "user: one" not in sent(provider)
            assert flaws(provider.requests[-1].messages) == []

    within(main())


@pytest.mark.parametrize("kind", [SlidingWindow, Window])
@pytest.mark.parametrize("n", range(1, 12))
def test_a_window_of_any_size_is_a_valid_history_also_between_calls_and_results(
    database: Database, kind: type[Any], n: int
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            calls = [ToolCall(f"c{number}", "look") for number in range(3)]
            provider = ScriptedProvider([calls, calls[:1], "done", calls[:2], "done again"])
            agent = make(provider, tools=[look], middleware=[kind(n)], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            assert (await agent.prompt("one")).text == "done"
            assert (await agent.prompt("two")).text == "done again"
            check_whole(heard)
            for request in provider.requests:
                assert flaws(request.messages) == []
            assert len(await history(cp, "t")) == 13

    within(main())


@pytest.mark.parametrize("n", [0, -1])
def test_a_window_without_a_message_is_refused(n: int) -> None:
    with pytest.raises(InputError, match=str(n)):
        SlidingWindow(n)
