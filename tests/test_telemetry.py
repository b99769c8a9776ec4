"""What telemetry promises: one true tree of spans, the conventions' names, no content unless it is wanted, silence when
it is off."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import apsw
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

import byssus
from byssus import (
    Agent,
    AssistantMessage,
    Deny,
    ImageContent,
    Middleware,
    Model,
    TextContent,
    ThinkingContent,
    ToolCall,
    Usage,
    UserMessage,
    telemetry,
    tool,
)
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    AnswerNeeded,
    AuthenticationFailed,
    HookFailed,
    InputError,
    MissingExtra,
    NothingToResume,
    Overloaded,
    RateLimited,
    StoreBusy,
    StoreNotOpen,
    ToolMissing,
)
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.store import sharing
from byssus.store.database import Store, Tx
from byssus.store.postgres import store as postgres
from byssus.store.sqlite import store as sqlite
from tests.support.approvals import Deleting, delete
from tests.support.checkpointers import with_cp
from tests.support.databases import Database
from tests.support.leases import agent_on

MODEL = Model("m1", max_tokens=500, temperature=0.5)
SECRET = "the-secret"


class Traces:
    """The finished spans, and a tracer for a program's own ones."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("program")

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def tree(self) -> list[Any]:
        """Each span's name, with its children in a list behind it if it has any."""
        return self._below(None)

    def _below(self, parent: int | None) -> list[Any]:
        found: list[Any] = []
        for span in self.spans:
            if (span.parent.span_id if span.parent else None) == parent:
                below = self._below(span_id(span))
                found += [span.name, below] if below else [span.name]
        return found


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    telemetry.enable(traces.provider)
    yield traces
    telemetry.disable()


@pytest.fixture
def talkative() -> Iterator[Traces]:
    """With what was said."""
    traces = Traces()
    telemetry.enable(traces.provider, capture_content=True)
    yield traces
    telemetry.disable()


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def failure(span: ReadableSpan) -> str | None:
    """The span's error, which its status must agree with."""
    kind = attributes(span).get("error.type")
    assert (span.status.status_code is StatusCode.ERROR) == (kind is not None)
    return str(kind) if kind is not None else None


def prompt(*steps: Step, database: Database | None = None, **options: Any) -> byssus.RunResult[Any]:
    """One run of an agent, stored in a database if there is one."""

    async def run() -> byssus.RunResult[Any]:
        with ScriptedProvider(steps) as provider:
            settings: dict[str, Any] = {"provider": provider, "model": MODEL, **options}
            if database is None:
                return await Agent(**settings).prompt("hello")
            async with database.checkpointer() as cp:
                return await Agent(**settings, checkpointer=cp, thread_id="trip").prompt("hello")

    return asyncio.run(run())


@tool
async def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


@tool
def count(to: int = 3) -> str:
    """Count."""
    return str(to)


@tool
def break_down() -> str:
    """Break."""
    raise ValueError(SECRET)


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_a_run_with_parallel_tools_is_one_tree_of_turns_model_calls_tools_and_commits(
    traces: Traces, database: Database
) -> None:
    calls = [ToolCall("c1", "look", {}), ToolCall("c2", "count", {})]
    prompt(calls, "done", database=database, tools=[look, count])
    assert traces.tree() == [
        "invoke_agent",
        [
            "turn",
            [
                "commit threads.append",
                "chat m1",
                "commit threads.append",
                "execute_tool look",
                ["commit tool_calls.start"],
                "execute_tool count",
                ["commit tool_calls.start"],
                "commit tool_calls.finish",
                "commit tool_calls.finish",
            ],
            "turn",
            ["chat m1", "commit threads.append"],
        ],
    ]
    assert [failure(span) for span in traces.spans] == [None] * 14


def test_the_span_that_is_current_at_the_call_is_the_parent_of_the_run(traces: Traces) -> None:
    with traces.tracer.start_as_current_span("request"):
        prompt("hi")
    assert traces.tree() == ["request", ["invoke_agent", ["turn", ["chat m1"]]]]


def test_a_programs_own_span_in_a_tool_is_a_child_of_the_tools_span(traces: Traces) -> None:
    @tool
    async def fetch() -> str:
        """Async."""
        with traces.tracer.start_as_current_span("own async"):
            return "x"

    @tool
    def compute() -> str:
        """In a thread."""
        with traces.tracer.start_as_current_span("own sync"):
            return "y"

    prompt([ToolCall("1", "fetch", {}), ToolCall("2", "compute", {})], "done", tools=[fetch, compute])
    own = [span for span in traces.spans if span.name.startswith("own")]
    ids = {span_id(span): span.name for span in traces.spans}
    parents = {span.name: ids[span.parent.span_id] for span in own if span.parent}
    assert parents == {"own async": "execute_tool fetch", "own sync": "execute_tool compute"}


def test_a_providers_own_span_is_a_child_of_the_model_calls_span(traces: Traces) -> None:
    def answer(_: object) -> str:
        with traces.tracer.start_as_current_span("POST"):
            return "hi"

    prompt(answer)
    assert traces.tree() == ["invoke_agent", ["turn", ["chat m1", ["POST"]]]]


def test_an_agent_inside_a_tool_is_a_subtree_with_a_conversation_of_its_own(traces: Traces, database: Database) -> None:
    @tool
    async def delegate() -> str:
        """Ask another agent."""
        async with database.checkpointer() as cp:
            inner = Agent(provider=ScriptedProvider(["42"]), model=Model("m2"), checkpointer=cp, thread_id="inner")
            return (await inner.prompt("?")).text

    prompt([ToolCall("1", "delegate", {})], "done", database=database, tools=[delegate])
    assert attributes(traces.one("chat m2"))["gen_ai.conversation.id"] == "inner"
    assert {attributes(span)["gen_ai.conversation.id"] for span in traces.named("chat m1")} == {"trip"}
    first_turn = traces.tree()[1][1]
    inside = first_turn[first_turn.index("execute_tool delegate") + 1]
    assert inside == [
        "commit tool_calls.start",
        "invoke_agent",
        ["turn", ["commit threads.append", "chat m2", "commit threads.append"]],
    ]


def test_nothing_is_current_any_more_after_a_run(traces: Traces) -> None:
    async def run() -> trace.Span:
        await Agent(provider=ScriptedProvider(["hi"]), model=MODEL).prompt("hello")
        return trace.get_current_span()

    assert not asyncio.run(run()).get_span_context().is_valid


# --- names and attributes ---------------------------------------------------------------------------------------------


def test_a_run_and_its_model_call_say_who_answered_and_what_it_took(traces: Traces, database: Database) -> None:
    reply = AssistantMessage("hi", usage=Usage(10, 5, 100, 20, 0.25), model="m1-0613")
    result = prompt(reply, database=database)
    usage = {
        "gen_ai.usage.input_tokens": 130,  # the conventions count what the cache gave and took
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 100,
        "gen_ai.usage.cache_creation.input_tokens": 20,
        "byssus.usage.cost": 0.25,
    }
    asked = {
        "gen_ai.provider.name": "scripted",
        "gen_ai.request.model": "m1",
        "gen_ai.conversation.id": "trip",
    }
    run, chat = traces.one("invoke_agent"), traces.one("chat m1")
    assert dict(attributes(run)) == usage | asked | {
        "gen_ai.operation.name": "invoke_agent",
        "byssus.run.id": result.run_id,
        "byssus.run.stop_reason": "stop",
    }
    measured = dict(attributes(chat))
    assert measured.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert measured == usage | asked | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 500,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.model": "m1-0613",
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert (run.kind, chat.kind) == (SpanKind.INTERNAL, SpanKind.CLIENT)


def test_a_tool_call_says_which_call_of_which_tool_it_is(traces: Traces, database: Database) -> None:
    prompt([ToolCall("call-7", "look", {})], "done", database=database, tools=[look])
    span = traces.one("execute_tool look")
    assert span.kind is SpanKind.INTERNAL
    assert dict(attributes(span)) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call-7",
        "gen_ai.conversation.id": "trip",
    }
    assert attributes(traces.named("chat m1")[0])["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert [attributes(turn)["byssus.turn.number"] for turn in traces.named("turn")] == [1, 2]


def test_every_gen_ai_attribute_is_a_name_of_the_conventions(talkative: Traces, database: Database) -> None:
    prompt([ToolCall("1", "look", {})], "done", database=database, tools=[look], system_prompt="Be kind.")
    known = {value for name, value in vars(gen_ai_attributes).items() if name.isupper()}
    used = {key for span in talkative.spans for key in attributes(span) if key.startswith("gen_ai.")}
    assert used - known == set()
    assert len(used) > 15


def test_a_wish_for_a_structured_reply_is_told(traces: Traces) -> None:
    agent = Agent(provider=ScriptedProvider(['{"value": 3}']), model=MODEL)
    assert asyncio.run(agent.prompt("How many?", output=int)).output == 3
    assert attributes(traces.one("chat m1"))["gen_ai.output.type"] == "json"


# --- commits ----------------------------------------------------------------------------------------------------------


def test_writes_that_share_a_commit_have_a_span_each_under_whoever_waits_and_tell_their_number(
    traces: Traces, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_GROUP_SECONDS", 60.0)  # all that waits, however slow this machine is
    begun, queued = threading.Event(), threading.Event()

    def hold(_: Tx, thread_id: str) -> None:
        begun.set()
        queued.wait(60)

    async def append(cp: Checkpointer, name: str) -> None:
        with traces.tracer.start_as_current_span(name):
            await cp.append("t", UserMessage(name))

    async def run() -> None:
        async with database.checkpointer() as cp:
            held = cp.store.write(hold, "t")
            await asyncio.to_thread(begun.wait, 60)
            tasks = [asyncio.create_task(append(cp, name)) for name in "abc"]
            asyncio.get_running_loop().call_soon(queued.set)  # behind the first steps of the three
            await asyncio.gather(held, *tasks)

    asyncio.run(run())
    commits = ["commit threads.append"]
    assert traces.tree() == ["commit test_telemetry.hold", "a", commits, "b", commits, "c", commits]
    spans = [traces.one("commit test_telemetry.hold"), *traces.named("commit threads.append")]
    for span in spans:
        assert span.kind is SpanKind.CLIENT
        assert attributes(span)["db.system.name"] == database.system
        assert attributes(span)["db.operation.name"] in span.name
    numbers = [attributes(span)["byssus.commit.writes"] for span in spans]
    assert numbers == ([4, 4, 4, 4] if database.commits_latecomers else [1, 3, 3, 3])


def test_a_write_that_fails_fails_its_span_and_not_its_neighbours(traces: Traces, database: Database) -> None:
    def fail(_: Tx) -> None:
        raise KeyError(SECRET)

    def succeed(_: Tx) -> None:
        pass

    async def run() -> None:
        async with database.checkpointer() as cp:
            await asyncio.gather(cp.store.write(fail), cp.store.write(succeed), return_exceptions=True)

    asyncio.run(run())
    assert failure(traces.one("commit test_telemetry.fail")) == "KeyError"
    assert failure(traces.one("commit test_telemetry.succeed")) is None


def test_a_write_of_plain_code_has_its_span_too(traces: Traces, store: Store) -> None:
    def note(_: Tx) -> int:
        return 7

    def fail(_: Tx) -> None:
        raise KeyError

    with traces.tracer.start_as_current_span("own"):
        assert store.write_now(note) == 7
        assert store.read_now(note) == 7
        with pytest.raises(KeyError):
            store.write_now(fail)
    assert traces.tree() == ["own", ["commit test_telemetry.note", "commit test_telemetry.fail"]]
    assert failure(traces.one("commit test_telemetry.fail")) == "KeyError"


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_retry_is_an_event_of_the_one_span_that_covers_all_attempts(traces: Traces) -> None:
    prompt(RateLimited("slow down", retry_after=0), Overloaded("busy", retry_after=0), "hi")
    assert traces.tree() == ["invoke_agent", ["turn", ["chat m1"]]]
    events = traces.one("chat m1").events
    assert [(event.name, dict(event.attributes or {})) for event in events] == [
        ("byssus.retry", {"error.type": "RateLimited", "byssus.retry.attempt": 1, "byssus.retry.pause": 0.0}),
        ("byssus.retry", {"error.type": "Overloaded", "byssus.retry.attempt": 2, "byssus.retry.pause": 0.0}),
    ]
    assert [failure(span) for span in traces.spans] == [None] * 3


def test_a_fallback_is_a_second_model_call_and_leaves_the_run_without_an_error(traces: Traces) -> None:
    prompt(AuthenticationFailed("no"), "hi", model=[MODEL, Model("m2")])
    assert traces.tree() == ["invoke_agent", ["turn", ["chat m1", "chat m2"]]]
    errors = {span.name: failure(span) for span in traces.spans}
    assert errors == {"invoke_agent": None, "turn": None, "chat m1": "AuthenticationFailed", "chat m2": None}


def test_a_failed_model_fails_its_call_its_turn_and_its_run(traces: Traces, database: Database) -> None:
    result = prompt(AuthenticationFailed("no"), database=database)
    assert isinstance(result.error, AuthenticationFailed)
    errors = {span.name: failure(span) for span in traces.spans}
    assert errors == dict.fromkeys(["invoke_agent", "turn", "chat m1"], "AuthenticationFailed") | {
        "commit threads.append": None
    }
    assert attributes(traces.one("invoke_agent"))["byssus.run.stop_reason"] == "error"


def test_an_error_that_prompt_raises_ends_and_fails_what_is_open(traces: Traces) -> None:
    with pytest.raises(AssertionError, match="was not scripted"):
        prompt([ToolCall("1", "look", {})], tools=[look])
    assert {span.name: failure(span) for span in traces.spans if failure(span)} == {
        "invoke_agent": "ScriptError",
        "turn": "ScriptError",
    }
    assert [failure(turn) for turn in traces.named("turn")] == [None, "ScriptError"]


def test_a_run_that_cannot_begin_has_a_span_that_says_why(traces: Traces, database: Database) -> None:
    agent = Agent(provider=ScriptedProvider(), model=MODEL, checkpointer=database.checkpointer(), thread_id="trip")
    with pytest.raises(StoreNotOpen):
        asyncio.run(agent.prompt("hello"))
    assert [(span.name, failure(span)) for span in traces.spans] == [("invoke_agent", "StoreNotOpen")]


class Guard(Middleware):
    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before

    async def before_tool_call(self, call: ToolCall, **_: Any) -> Any:
        return self._before()


def test_a_tool_that_fails_is_an_error_of_its_own_span_alone(traces: Traces) -> None:
    calls = [ToolCall("1", "break_down", {}), ToolCall("2", "look", {}), ToolCall("3", "nothing", {})]
    prompt(calls, "sorry", tools=[break_down, look])
    assert {span.name: failure(span) for span in traces.spans if failure(span)} == {
        "execute_tool break_down": "tool_error",
        "execute_tool nothing": "unknown_tool",
    }


def test_a_blocked_call_says_so(traces: Traces) -> None:
    prompt([ToolCall("1", "look", {})], "ok", tools=[look], middleware=[Guard(lambda: Deny("no"))])
    assert failure(traces.one("execute_tool look")) == "blocked"


def test_a_hook_that_fails_fails_the_call_the_turn_and_the_run(traces: Traces) -> None:
    with pytest.raises(HookFailed):
        prompt([ToolCall("1", "look", {})], tools=[look], middleware=[Guard(lambda: 1 / 0)])
    names = ["invoke_agent", "turn", "execute_tool look"]
    assert {span.name: failure(span) for span in traces.spans} == dict.fromkeys(names, "HookFailed") | {"chat m1": None}


def test_an_abort_in_mid_stream_ends_every_span_and_is_no_error(traces: Traces, database: Database) -> None:
    async def run() -> None:
        async def hang(_: object) -> None:
            agent.abort()
            await asyncio.Event().wait()

        async with database.checkpointer() as cp:
            agent = Agent(provider=ScriptedProvider([hang]), model=MODEL, checkpointer=cp, thread_id="trip")
            await agent.prompt("hello")

    asyncio.run(run())
    commit = "commit threads.append"
    assert traces.tree() == ["invoke_agent", ["turn", [commit, "chat m1", commit]]]
    assert [failure(span) for span in traces.spans] == [None] * 5
    assert {span.name for span in traces.spans if attributes(span).get("byssus.aborted")} == {
        "invoke_agent",
        "turn",
        "chat m1",
    }
    assert attributes(traces.one("invoke_agent"))["byssus.run.stop_reason"] == "aborted"


def test_an_abort_ends_the_spans_of_the_tools_that_run_and_starts_none_for_those_that_wait(traces: Traces) -> None:
    async def run() -> None:
        @tool
        async def hang() -> None:
            """Hang."""
            agent.abort()
            await asyncio.Event().wait()

        calls = [ToolCall("1", "hang", {}), ToolCall("2", "look", {})]
        agent = Agent(provider=ScriptedProvider([calls]), model=MODEL, tools=[hang, look], tool_mode="sequential")
        await agent.prompt("hello")

    asyncio.run(run())
    assert traces.tree() == ["invoke_agent", ["turn", ["chat m1", "execute_tool hang"]]]
    assert attributes(traces.one("execute_tool hang"))["byssus.aborted"] is True
    assert [failure(span) for span in traces.spans] == [None] * 4


def test_a_prompt_that_is_cancelled_ends_its_spans(traces: Traces) -> None:
    async def run() -> None:
        streaming = asyncio.Event()

        async def hang(_: object) -> None:
            streaming.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(Agent(provider=ScriptedProvider([hang]), model=MODEL).prompt("hello"))
        await streaming.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert traces.tree() == ["invoke_agent", ["turn", ["chat m1"]]]
    assert all(attributes(span)["byssus.aborted"] for span in traces.spans)


def test_a_run_that_is_torn_down_with_its_event_loop_is_aborted_and_no_error(traces: Traces) -> None:
    async def run() -> asyncio.Task[Any]:
        waiting = asyncio.Event()

        class Hang(Middleware):
            async def transform_context(self, messages: list[Any], **_: Any) -> list[Any]:
                waiting.set()
                await asyncio.Event().wait()
                return messages

        task = asyncio.create_task(Agent(provider=ScriptedProvider(), model=MODEL, middleware=[Hang()]).prompt("hello"))
        await waiting.wait()
        return task  # and asyncio.run cancels all that is left

    assert asyncio.run(run()).cancelled()
    assert traces.tree() == ["invoke_agent", ["turn"]]
    assert [failure(span) for span in traces.spans] == [None, None]
    assert all(attributes(span)["byssus.aborted"] for span in traces.spans)


# --- content ----------------------------------------------------------------------------------------------------------


def everything(traces: Traces) -> str:
    return "".join(span.to_json() for span in traces.spans)


def say_all(database: Database) -> None:
    """A run that has a secret wherever one can be."""
    calls = [ToolCall("1", "look", {"at": SECRET}), ToolCall("2", "break_down", {})]
    prompt(calls, SECRET, database=database, tools=[look, break_down], system_prompt=SECRET)
    prompt(RateLimited(SECRET, retry_after=0), AuthenticationFailed(SECRET), database=database)


def test_by_default_nothing_that_was_said_is_recorded(traces: Traces, database: Database) -> None:
    say_all(database)
    assert "execute_tool break_down" in everything(traces)
    assert SECRET not in everything(traces)
    assert "hello" not in everything(traces)


def test_with_capture_content_a_model_call_carries_what_was_sent_and_answered(talkative: Traces) -> None:
    thought = AssistantMessage([ThinkingContent("hm"), ToolCall("1", "look", {"at": "sea"})], "tool_use")
    prompt(thought, "done", tools=[look], system_prompt="Be kind.")
    first, second = (attributes(span) for span in talkative.named("chat m1"))
    assert json.loads(first["gen_ai.system_instructions"]) == [{"type": "text", "content": "Be kind."}]
    hello = {"role": "user", "parts": [{"type": "text", "content": "hello"}]}
    call = {"type": "tool_call", "id": "1", "name": "look", "arguments": {"at": "sea"}}
    said = {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, call]}
    seen = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": "seen sea"}]}
    assert json.loads(first["gen_ai.input.messages"]) == [hello]
    assert json.loads(first["gen_ai.output.messages"]) == [{**said, "finish_reason": "tool_call"}]
    assert json.loads(second["gen_ai.input.messages"]) == [hello, said, seen]
    done = {"role": "assistant", "parts": [{"type": "text", "content": "done"}], "finish_reason": "stop"}
    assert json.loads(second["gen_ai.output.messages"]) == [done]


def test_with_capture_content_a_tool_call_carries_arguments_and_result_and_errors_their_texts(
    talkative: Traces, database: Database
) -> None:
    say_all(database)
    looked = attributes(talkative.one("execute_tool look"))
    assert json.loads(looked["gen_ai.tool.call.arguments"]) == {"at": SECRET}
    assert looked["gen_ai.tool.call.result"] == f"seen {SECRET}"
    assert SECRET in str(talkative.one("execute_tool break_down").status.description)
    assert talkative.named("invoke_agent")[1].status.description == SECRET


def test_an_images_bytes_and_what_no_exporter_can_send_stay_out(talkative: Traces) -> None:
    @tool
    async def draw() -> list[Any]:
        """Draw."""
        return [TextContent("here"), ImageContent("iVBORw0KGgo=")]

    prompt([ToolCall("1", "draw", {}), ToolCall("2", "\ud800", {"x": "\udfff"})], "done", tools=[draw])
    sent = json.loads(attributes(talkative.named("chat m1")[1])["gen_ai.input.messages"])
    assert sent[2]["parts"] == [
        {"type": "tool_call_response", "id": "1", "response": "here"},
        {"type": "image", "mime_type": "image/png"},
    ]
    assert failure(talkative.one("execute_tool \\ud800")) == "unknown_tool"
    everything(talkative).encode()


def test_what_cannot_be_described_is_left_out_and_the_run_goes_on(talkative: Traces) -> None:
    class Odd(Middleware):
        async def after_model_response(self, message: AssistantMessage, **_: Any) -> AssistantMessage | None:
            odd: dict[Any, Any] = {("no", "JSON"): "key"}
            return AssistantMessage([ToolCall("1", "look", odd)], "tool_use") if message.tool_calls else None

    assert prompt([ToolCall("1", "look", {})], "done", tools=[look], middleware=[Odd()]).text == "done"
    assert "gen_ai.tool.call.arguments" not in attributes(talkative.one("execute_tool look"))
    recorded = ["gen_ai.input.messages" in attributes(span) for span in talkative.named("chat m1")]
    assert recorded == [True, False]


# --- on and off -------------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_after_disable_nor_by_a_sampler_that_wants_nothing(traces: Traces) -> None:
    telemetry.disable()
    assert not telemetry.is_enabled()
    assert prompt("hi").text == "hi"
    telemetry.enable(TracerProvider(sampler=ALWAYS_OFF), capture_content=True)
    assert prompt("hi").text == "hi"
    assert traces.spans == []


def run_python(code: str, place: str) -> tuple[str, str]:
    """What a program that does not set up logging prints, and what it has on stderr."""
    source = str(Path(byssus.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, place],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": source},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


AGENT = """
import asyncio, sys
from byssus import Agent, Model, telemetry
from byssus.checkpointer import checkpointer_for
from byssus.errors import AuthenticationFailed
from byssus.providers.scripted import ScriptedProvider

async def run():
    async with checkpointer_for(sys.argv[1]) as cp:
        provider = ScriptedProvider(["hi", AuthenticationFailed("no")])
        agent = Agent(provider=provider, model=Model("m1"), checkpointer=cp, thread_id="trip")
        await agent.prompt("hello")
        await agent.prompt("hello")
"""


@pytest.mark.processes
def test_a_process_without_telemetry_never_imports_opentelemetry_and_has_warnings_on_stderr(
    database: Database,
) -> None:
    code = f"{AGENT}\nasyncio.run(run())\nprint([name for name in sys.modules if name.startswith('opentelemetry')])"
    printed, warned = run_python(code, database.place)
    assert printed == "[]\n"
    assert re.fullmatch(r"run \S+ on thread 'trip' failed: AuthenticationFailed: no\n", warned), warned


SILENT = """
import asyncio
from byssus import Agent, Model
from byssus.providers.openai import OpenAIProvider
from byssus.testing import ScriptedProvider

def listen(event):
    print(evnt)

async def run():
    agent = Agent(provider=ScriptedProvider(["hi"]), model=Model("m"))
    agent.subscribe(listen)
    await agent.prompt("hello")
    provider = OpenAIProvider(api_key="sk-the-secret", base_url="http://127.0.0.1:1/v1")
    await Agent(provider=provider, model=Model("m"), max_retries=0).prompt("hello")

asyncio.run(run())
"""


@pytest.mark.processes
def test_a_typo_in_a_listener_and_a_model_that_cannot_be_reached_are_on_stderr() -> None:
    _, warned = run_python(SILENT, "")
    assert warned.count("NameError: name 'evnt' is not defined") == warned.count("Traceback") == 1
    last = warned.splitlines()[-1]
    assert " failed: NetworkFailed: " in last
    assert "127.0.0.1" in last
    assert SECRET not in warned


@pytest.mark.processes
def test_without_a_provider_the_programs_global_one_is_used_even_if_it_is_set_later(database: Database) -> None:
    code = f"""{AGENT}
telemetry.enable()
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
asyncio.run(run())
print(len(exporter.get_finished_spans()))
"""
    assert run_python(code, database.place)[0] == "10\n"


def test_enable_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[otel\]'"):
        telemetry.enable()
    assert not telemetry.is_enabled()


def test_enable_refuses_what_is_no_tracer_provider() -> None:
    with pytest.raises(InputError, match="TracerProvider"):
        telemetry.enable("http://localhost:4318")  # type: ignore[arg-type]
    assert not telemetry.is_enabled()


# --- logs -------------------------------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[tuple[str, str, str]]:
    return [
        (record.name, record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("byssus") and record.levelno >= level
    ]


def test_a_run_is_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "byssus")
    result = prompt("hi")
    assert logged(caplog, logging.DEBUG) == [("byssus.agent", "INFO", f"run {result.run_id} ended: stop")]


def test_retries_fallbacks_and_failed_runs_are_warnings_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    failures = [RateLimited("slow", retry_after=0), AuthenticationFailed("no"), AuthenticationFailed("no")]
    result = prompt(*failures, model=[MODEL, Model("m2")])
    assert logged(caplog, logging.WARNING) == [
        ("byssus.model", "WARNING", "RateLimited; asking model 'm1' of 'scripted' again in 0.0 s"),
        ("byssus.model", "WARNING", "AuthenticationFailed; asking model 'm2' of 'scripted' instead"),
        ("byssus.agent", "WARNING", f"run {result.run_id} failed: AuthenticationFailed: no"),
    ]


def test_a_mistake_in_a_provider_is_a_warning_that_names_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    def mistaken(request: Request) -> str:
        return request.no_such_name  # type: ignore[attr-defined, no-any-return]

    prompt(mistaken, max_retries=0)
    line = mistaken.__code__.co_firstlineno + 1
    assert logged(caplog, logging.WARNING)[-1][2].endswith(f"(tests/test_telemetry.py:{line})")


def test_a_run_that_was_refused_is_no_failed_run(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "byssus")

    async def use(cp: Checkpointer) -> None:
        asking = Deleting()
        agent = agent_on(cp, [[delete("a")]], tools=[asking.tool])
        await agent.prompt("go")
        with pytest.raises(AnswerNeeded):
            await agent.prompt("and now?")
        await cp.answer("t", "a", "approve")
        with pytest.raises(ToolMissing):
            await agent_on(cp, []).resume()
        with pytest.raises(NothingToResume):
            await agent_on(cp, [], "empty").resume()

    with_cp(database, use)
    assert logged(caplog, logging.WARNING) == []
    refused = [text.split(" did not begin: ") for _, _, text in logged(caplog, logging.INFO) if "begin" in text]
    assert [why.split(":")[0] for _, why in refused] == ["AnswerNeeded", "ToolMissing", "NothingToResume"]


def test_a_failed_tool_is_told_at_info_and_its_text_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "byssus")
    prompt([ToolCall("c1", "break_down", {})], "sorry", tools=[break_down])
    told = [(level, text) for name, level, text in logged(caplog, logging.DEBUG) if name == "byssus.tool"]
    assert told[0] == ("INFO", "tool 'break_down' failed in call 'c1'")
    assert told[1][0] == "DEBUG"
    assert SECRET in told[1][1]


def test_a_failed_hook_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(HookFailed):
        prompt([ToolCall("c1", "look", {})], tools=[look], middleware=[Guard(lambda: 1 / 0)])
    first, second = logged(caplog, logging.WARNING)
    assert first == ("byssus.tool", "WARNING", "a hook failed around call 'c1' of tool 'look'")
    assert "failed: HookFailed: the hook " in second[2]
    assert re.search(r"ZeroDivisionError: division by zero \(tests/test_telemetry\.py:\d+\)$", second[2])


def test_no_log_above_debug_quotes_what_was_said_but_for_the_reason_of_a_failed_run(
    caplog: pytest.LogCaptureFixture, database: Database
) -> None:
    caplog.set_level(logging.DEBUG, "byssus")
    say_all(database)
    assert any(SECRET in text for _, _, text in logged(caplog, logging.DEBUG))
    above = [text for _, _, text in logged(caplog, logging.INFO) if SECRET in text or "hello" in text]
    assert [text.partition("failed: ")[2] for text in above] == [
        f"AuthenticationFailed: {SECRET}"
    ]  # what the model said


def test_a_lock_that_outlasts_the_wait_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def touch(_: Tx) -> None:
        pass

    path = tmp_path / "t.db"
    store = sqlite.open_store(path, busy_seconds=0.01)
    try:
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            store.write_now(touch)
        other.close()
    finally:
        sharing.release(store)
    assert logged(caplog, logging.WARNING) == [
        ("byssus.store", "WARNING", f"1 write(s) to {str(path)!r} failed: StoreBusy")
    ]


def test_a_slow_commit_is_a_warning(
    caplog: pytest.LogCaptureFixture, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite, postgres):
        monkeypatch.setattr(module, "_SLOW_SECONDS", 0.0)  # now all of them are
    prompt("hi", database=database)
    lines = [text for name, _, text in logged(caplog, logging.WARNING) if name == "byssus.store"]
    assert len(lines) == 2
    assert all(line.startswith(f"1 write(s) to {database.checkpointer().name!r} took ") for line in lines)
