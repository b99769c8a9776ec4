"""One model call: when it is made again, when the next model is asked, and what remains when nothing helps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from byssus import Agent, AssistantMessage, Model, Prices, TextContent, ToolCall, ToolResultMessage, Usage, tool
from byssus.errors import (
    AuthenticationFailed,
    ContentRefused,
    ContextTooLong,
    InputError,
    InvalidRequest,
    NetworkFailed,
    Overloaded,
    ProviderError,
    RateLimited,
)
from byssus.events import (
    AgentEnd,
    MessageEnd,
    MessageUpdate,
    StreamDone,
    StreamError,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextStart,
    ThinkingDelta,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from byssus.providers.base import Request
from byssus.providers.reply import parse_tool_call
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.signals import Signal
from tests.support.agents import Heard, check_whole, look, make, within
from tests.support.databases import Database

PASSING: list[type[ProviderError]] = [RateLimited, Overloaded, NetworkFailed]
LASTING: list[type[ProviderError]] = [
    AuthenticationFailed,
    ContextTooLong,
    ContentRefused,
    InvalidRequest,
    ProviderError,
]

Scene = Callable[[Request, Signal], AsyncIterator[StreamEvent]]


def soon(kind: type[ProviderError], text: str = "busy") -> ProviderError:
    """A failure after which there is nothing to wait for."""
    return kind(text, retry_after=0)


class Acted:
    """A provider whose calls are acted out, one async generator each."""

    def __init__(self, *scenes: Scene, name: str = "acted") -> None:
        self.name = name
        self._scenes = scenes
        self.requests: list[Request] = []

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        return self._scenes[len(self.requests) - 1](request, signal)


def playing(*events: StreamEvent, then: BaseException | None = None) -> Scene:
    async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        yield StreamStart()
        for event in events:
            yield event
        if then is not None:
            raise then

    return scene


class Named(ScriptedProvider):
    def __init__(self, name: str, steps: Sequence[Step]) -> None:
        super().__init__(steps)
        self.name = name


HELLO: list[StreamEvent] = [TextStart(0), TextDelta(0, "Hel"), TextDelta(0, "lo"), StreamDone()]


def deltas(heard: Heard) -> list[str]:
    updates = [event.stream_event for event in heard.of(MessageUpdate)]
    return [event.delta for event in updates if isinstance(event, TextDelta)]


# --- asking again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PASSING)
def test_a_passing_failure_is_followed_by_another_attempt(kind: type[ProviderError]) -> None:
    provider = ScriptedProvider([soon(kind), soon(kind), "ok"])
    result = within(make(provider).prompt("hi"))
    assert (result.text, result.error) == ("ok", None)
    assert provider.requests[0] == provider.requests[1] == provider.requests[2]


@pytest.mark.parametrize("kind", LASTING)
def test_a_lasting_failure_is_not_tried_again(kind: type[ProviderError]) -> None:
    error = soon(kind)
    provider = ScriptedProvider([error])
    result = within(make(provider).prompt("hi"))
    assert (result.error, result.stop_reason) == (error, "error")


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_call_is_repeated_as_often_as_was_asked_for_and_the_last_failure_is_the_result(
    database: Database, retries: int
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            errors = [soon(Overloaded, f"busy {n}") for n in range(retries + 1)]
            provider = ScriptedProvider([*errors, "later"])
            agent = make(provider, max_retries=retries, checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("hi")
            check_whole(heard)
            assert result.error is errors[-1]
            assert len(provider.requests) == retries + 1
            thread = await cp.load("t")
            assert thread is not None
            assert len(thread.messages) == 2  # failures on the way are no messages
            reply = thread.messages[-1]
            assert isinstance(reply, AssistantMessage)
            assert reply.error is not None
            assert (reply.stop_reason, reply.error.kind) == ("error", "Overloaded")
            assert reply.error.message == f"busy {retries}"
            assert heard.of(AgentEnd)[0].error == reply.error
            assert [e.stream_event for e in heard.of(MessageUpdate) if isinstance(e.stream_event, StreamError)] == [
                StreamError(reply.error)
            ]
            assert (await agent.resume()).text == "later"

    within(main())


@pytest.mark.parametrize(
    "shown",
    [
        [TextStart(0), TextDelta(0, "Hel")],
        [ThinkingStart(0), ThinkingDelta(0, "hm")],
        [ToolCallStart(0, "c", "look"), ToolCallEnd(0, ToolCall("c", "look"))],
        [ToolCallStart(0, "c", "look"), ToolCallDelta(0, '{"at"')],
    ],
    ids=["text", "thinking", "a call", "half a call"],
)
def test_nothing_is_asked_again_once_a_part_of_the_reply_was_shown(shown: list[StreamEvent]) -> None:
    error = soon(NetworkFailed)
    first, second = Acted(playing(*shown, then=error), name="a"), Acted(playing(*HELLO), name="b")
    agent = Agent(provider=[first, second], model=[Model("a", provider="a"), Model("b", provider="b")], tools=[look])
    result = within(agent.prompt("hi"))
    assert result.error is error
    assert (len(first.requests), second.requests) == (1, [])


def test_what_was_shown_before_the_failure_is_kept() -> None:
    agent = make(Acted(playing(*HELLO[:2], then=soon(NetworkFailed)), playing(*HELLO)))
    result = within(agent.prompt("hi"))
    assert (result.text, result.stop_reason) == ("Hel", "error")
    again = within(agent.resume())
    assert again.text == "Hello"


def recorder(waits: list[float]) -> Callable[[float], Any]:
    """Stands for the clock: notes how long somebody wanted to wait, and lets them go on."""

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return sleep


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    noted: list[float] = []
    monkeypatch.setattr("byssus.providers.model_call.asyncio.sleep", recorder(noted))
    return noted


def test_a_stream_that_begins_or_ends_without_a_word_has_shown_nothing(waits: list[float]) -> None:
    agent = make(Acted(playing(TextStart(0), then=NetworkFailed("cut")), playing(), playing(*HELLO)))
    heard = Heard(agent)
    assert within(agent.prompt("hi")).text == "Hello"
    assert deltas(heard) == ["Hel", "lo"]
    assert len(waits) == 2


def test_the_pause_grows_with_each_attempt_and_is_never_the_same(waits: list[float]) -> None:
    for _ in range(5):
        within(make([*[Overloaded("busy")] * 4, "ok"], max_retries=4).prompt("hi"))
    for attempt in range(4):
        of_this_attempt = waits[attempt::4]
        assert all(0.5 * 2**attempt <= wait < 0.5 * 2 ** (attempt + 1) for wait in of_this_attempt)
        assert len({*of_this_attempt}) > 1


@pytest.mark.parametrize("seconds", [0, 7, 60])
def test_what_a_service_asks_to_wait_is_waited_and_hardly_more(waits: list[float], seconds: float) -> None:
    within(make([RateLimited("slow down", retry_after=seconds), "ok"]).prompt("hi"))
    assert len(waits) == 1
    assert seconds <= waits[0] <= seconds * 1.25


def test_a_service_that_asks_for_more_patience_than_there_is_is_not_asked_again(waits: list[float]) -> None:
    error = RateLimited("come back tomorrow", retry_after=86_400)
    first, second = Named("a", [error]), Named("b", ["ok"])
    agent = Agent(provider=[first, second], model=[Model("a", provider="a"), Model("b", provider="b")])
    assert within(agent.prompt("hi")).text == "ok"
    alone = within(make([error]).prompt("hi"))
    assert alone.error is error
    assert waits == []


def test_an_abort_ends_the_pause_before_the_next_attempt(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pausing = asyncio.Event()

        async def endless(seconds: float) -> None:
            pausing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr("byssus.providers.model_call.asyncio.sleep", endless)
        async with database.checkpointer() as cp:
            agent = make([Overloaded("busy")], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            running = asyncio.create_task(agent.prompt("hi"))
            await pausing.wait()
            agent.abort()
            result = await running
            check_whole(heard)
            assert (result.stop_reason, result.error) == ("aborted", None)
            assert (await make(["ok"], checkpointer=cp, thread_id="t").resume()).text == "ok"

    within(main())


# --- asking another model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*PASSING, *LASTING])
def test_the_next_model_is_asked_when_one_fails(kind: type[ProviderError]) -> None:
    provider = ScriptedProvider([soon(kind), "from the second"])
    agent = make(provider, model=[Model("a"), Model("b")], max_retries=0)
    result = within(agent.prompt("hi"))
    assert (result.text, result.error, result.stop_reason) == ("from the second", None, "stop")
    assert [request.model.id for request in provider.requests] == ["a", "b"]
    reply = result.messages[-1]
    assert isinstance(reply, AssistantMessage)
    assert reply.model == "b"


def test_a_model_is_tried_again_before_the_next_one_unless_that_is_no_use() -> None:
    script: list[Step] = [soon(Overloaded), soon(Overloaded), soon(AuthenticationFailed), soon(NetworkFailed), "ok"]
    provider = ScriptedProvider(script)
    models = [Model("a"), Model("b"), Model("c")]
    assert within(make(provider, model=models, max_retries=1).prompt("hi")).text == "ok"
    assert [request.model.id for request in provider.requests] == ["a", "a", "b", "c", "c"]


def test_models_of_several_providers_are_asked_in_the_order_of_the_models() -> None:
    first, second = Named("one", [soon(Overloaded), soon(Overloaded)]), Named("two", [soon(Overloaded), "ok"])
    models = [Model("b", provider="two"), Model("a", provider="one"), Model("c", provider="one")]
    models.append(Model("d", provider="two", prices=Prices(output=1_000_000)))
    agent = Agent(provider=[first, second], model=models, max_retries=0)
    heard = Heard(agent)
    result = within(agent.prompt("hi"))
    check_whole(heard)
    assert result.text == "ok"
    assert [request.model.id for request in first.requests] == ["a", "c"]
    assert [request.model.id for request in second.requests] == ["b", "d"]
    reply = result.messages[-1]
    assert isinstance(reply, AssistantMessage)
    assert (reply.provider, reply.model) == ("two", "d")
    assert len([e for e in heard.of(MessageEnd) if isinstance(e.message, AssistantMessage)]) == 1


def test_the_price_is_that_of_the_model_that_answered() -> None:
    models = [Model("a", prices=Prices(output=5)), Model("b", prices=Prices(output=1_000_000))]
    script: list[Step] = [soon(ContentRefused), AssistantMessage("ok", usage=Usage(0, 3))]
    assert within(make(ScriptedProvider(script), model=models).prompt("hi")).usage.cost == 3


def test_when_all_models_fail_the_failure_of_the_last_is_the_result() -> None:
    errors: list[Step] = [soon(ContextTooLong, "a"), soon(ContentRefused, "b"), soon(InvalidRequest, "c")]
    agent = make(ScriptedProvider(errors), model=[Model("a"), Model("b"), Model("c")])
    heard = Heard(agent)
    result = within(agent.prompt("hi"))
    check_whole(heard)
    assert result.error is errors[-1]
    reply = result.messages[-1]
    assert isinstance(reply, AssistantMessage)
    assert reply.error is not None
    assert (reply.model, reply.error.kind) == ("c", "InvalidRequest")


def test_each_turn_begins_with_the_first_model_again() -> None:
    provider = ScriptedProvider([soon(ContentRefused), [ToolCall("c", "look")], "ok"])
    within(make(provider, model=[Model("a"), Model("b")], tools=[look]).prompt("hi"))
    assert [request.model.id for request in provider.requests] == ["a", "b", "a"]


class Keyless:
    """Refuses before it begins, as a provider without a key does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0

    def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        self.asked += 1
        raise AuthenticationFailed(f"there is no key for {self.name}")


def test_a_provider_without_a_key_is_passed_over_when_there_is_another() -> None:
    keyless, other = Keyless("a"), Named("b", ["ok"])
    agent = Agent(provider=[keyless, other], model=[Model("a", provider="a"), Model("b", provider="b")])
    assert within(agent.prompt("hi")).text == "ok"
    assert keyless.asked == 1


@pytest.mark.parametrize("step", [soon(Overloaded), "never"])
def test_a_last_provider_without_a_key_is_a_result_like_any_other_failure(database: Database, step: Step) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            first = Named("a", [step]) if isinstance(step, Exception) else Keyless("a")
            models = [Model("a", provider="a"), Model("b", provider="b")]
            options: Any = {"max_retries": 0, "checkpointer": cp, "thread_id": "t"}
            agent = Agent(provider=[first, Keyless("b")], model=models, **options)
            heard = Heard(agent)
            result = await agent.prompt("hi")
            check_whole(heard)
            assert isinstance(result.error, AuthenticationFailed)
            assert "no key for b" in str(result.error)
            assert (await make(["ok"], checkpointer=cp, thread_id="t").resume()).text == "ok"

    within(main())


def test_a_model_that_none_of_the_providers_serves_is_refused_by_name() -> None:
    providers = [Named("a", []), Named("b", [])]
    with pytest.raises(InputError, match=r"'x' names the provider 'c', but there are only 'a', 'b'"):
        Agent(provider=providers, model=Model("x", provider="c"))


def test_two_providers_of_the_same_name_are_refused() -> None:
    """One of them would never be asked."""
    with pytest.raises(InputError, match="'a'"):
        Agent(provider=[Named("a", []), Named("a", [])], model=[Model("x", provider="a"), Model("y", provider="a")])


@pytest.mark.parametrize(("provider", "model"), [([], Model("x")), (Named("a", []), []), (None, None), (5, None)])
def test_an_empty_or_senseless_list_is_refused(provider: Any, model: Any) -> None:
    with pytest.raises(InputError, match="must"):
        Agent(provider=provider, model=model)


@pytest.mark.parametrize(
    "options", [{"max_retries": -1}, {"max_retries": "2"}, {"idle_timeout": 0}, {"idle_timeout": -1.0}]
)
def test_a_patience_that_makes_no_sense_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))}.*{next(iter(options.values()))!r}"):
        make([], **options)


# --- a stream that stalls ---------------------------------------------------------------------------------------------


class Stalling:
    """A scene that says something and then nothing more. One that is stubborn ignores its cancellation."""

    def __init__(self, *events: StreamEvent, stubborn: bool = False) -> None:
        self._events = events
        self._stubborn = stubborn
        self.release = asyncio.Event()
        self.over = asyncio.Event()

    async def __call__(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        try:
            yield StreamStart()
            for event in self._events:
                yield event
            while not self.release.is_set():
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    if not self._stubborn:
                        raise
            yield TextStart(7)
            yield TextDelta(7, "too late")
            yield StreamDone()
        finally:
            self.over.set()


TINY = 0.001  # seconds: something that stalls for ever does so for longer


def test_a_stream_that_stalls_before_it_said_anything_is_asked_again(waits: list[float]) -> None:
    async def main() -> None:
        stalling = Stalling()
        agent = make(Acted(stalling, playing(*HELLO)), idle_timeout=TINY)
        heard = Heard(agent)
        result = await agent.prompt("hi")
        check_whole(heard)
        assert (result.text, result.error) == ("Hello", None)
        assert stalling.over.is_set()  # its connection is given back

    within(main())


def test_a_stream_that_stalls_after_it_said_something_has_failed_and_keeps_it() -> None:
    async def main() -> None:
        stalling = Stalling(*HELLO[:2])
        agent = make(Acted(stalling), idle_timeout=TINY)
        heard = Heard(agent)
        result = await agent.prompt("hi")
        check_whole(heard)
        assert (result.text, result.stop_reason) == ("Hel", "error")
        assert isinstance(result.error, NetworkFailed)
        assert "acted sent nothing for 0.001 s" in str(result.error)
        assert "idle_timeout=" in str(result.error)
        assert stalling.over.is_set()

    within(main())


def test_the_next_model_is_asked_when_one_stalls() -> None:
    async def main() -> None:
        agent = make(
            Acted(Stalling(), playing(*HELLO)), idle_timeout=TINY, model=[Model("a"), Model("b")], max_retries=0
        )
        assert (await agent.prompt("hi")).text == "Hello"

    within(main())


@pytest.mark.parametrize("said", [[], HELLO[:2]], ids=["before output", "after output"])
def test_a_stalled_stream_that_ignores_its_cancellation_is_left_behind_and_not_heard_any_more(
    said: list[StreamEvent],
) -> None:
    async def main() -> None:
        stubborn = Stalling(*said, stubborn=True)

        async def releasing(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
            yield StreamStart()
            stubborn.release.set()
            await stubborn.over.wait()
            for event in HELLO:
                yield event

        options: Any = {"idle_timeout": TINY, "abort_grace": 0.0, "max_retries": 0}
        agent = make(Acted(stubborn, releasing), model=[Model("a"), Model("b")], **options)
        heard = Heard(agent)
        result = await agent.prompt("hi")
        stubborn.release.set()
        await stubborn.over.wait()
        check_whole(heard)
        assert result.text == ("Hel" if said else "Hello")
        assert "too late" not in deltas(heard)

    within(main())


def test_a_model_may_be_silent_for_ever_when_there_is_no_limit() -> None:
    async def main() -> None:
        async def slow(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
            for _ in range(100):
                await asyncio.sleep(0)
            for event in HELLO:
                yield event

        assert (await make(Acted(slow), idle_timeout=None).prompt("hi")).text == "Hello"

    within(main())


# --- tool calls that are no JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"at": "he', "[1, 2]", '"here"', "null", "}{", '{"at": NaN', "\ud800", "{" * 5_000])
def test_broken_json_in_a_call_goes_back_to_the_model_as_a_helpful_error_and_the_run_goes_on(
    database: Database, text: str
) -> None:
    ran: list[str] = []

    @tool
    def visit(at: str) -> str:
        ran.append(at)
        return "visited"

    async def main() -> None:
        async with database.checkpointer() as cp:
            broken = parse_tool_call("c1", "visit", text)
            assert broken.malformed == text
            provider = ScriptedProvider([[broken, ToolCall("c2", "visit", {"at": "home"})], "ok"])
            agent = make(provider, tools=[visit], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("go")
            check_whole(heard)
            assert (result.text, result.error) == ("ok", None)
            assert ran == ["home"]
            failed, good = (m for m in result.messages if isinstance(m, ToolResultMessage))
            assert failed.is_error
            assert "JSON" in failed.text
            assert '"at"' in failed.text  # what would have been right
            assert good.text == "visited"
            thread = await cp.load("t")
            assert thread is not None
            reply = thread.messages[1]
            assert isinstance(reply, AssistantMessage)
            assert reply.tool_calls[0].malformed == text

    within(main())


def test_arguments_nested_too_deep_to_be_stored_are_a_broken_call_and_not_a_broken_run(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            deep = parse_tool_call("c1", "look", '{"at":' * 600 + "1" + "}" * 600)
            provider = ScriptedProvider([[deep], "ok"])
            result = await make(provider, tools=[look], checkpointer=cp, thread_id="t").prompt("go")
            assert result.text == "ok"
            told = provider.requests[1].messages[-1]
            assert isinstance(told, ToolResultMessage)
            assert told.is_error

    within(main())


def test_deeply_nested_arguments_do_not_break_a_run_with_middleware() -> None:
    deep = parse_tool_call("c1", "look", '{"at":' * 380 + "1" + "}" * 380)
    provider = ScriptedProvider([[TextContent("look"), deep], "ok"])

    class Same:
        def transform_context(self, messages: list[Any]) -> list[Any]:
            return messages

    assert within(make(provider, tools=[look], middleware=[Same()]).prompt("go")).text == "ok"
