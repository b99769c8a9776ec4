"""Tools in full: what a call needs and gives, through a real agent, and where storage matters through a database."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import threading
import types
import uuid
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec
import pydantic
import pytest

from byssus import (
    Agent,
    AssistantMessage,
    ImageContent,
    Model,
    RunResult,
    TextContent,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    tool,
)
from byssus.errors import InputError
from byssus.events import Event, ToolExecutionEnd, ToolExecutionStart, ToolExecutionUpdate
from byssus.messages import Message
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool
from tests.support.databases import Database

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers

Made = Tool[..., Any]


async def prompted(tools: list[Any], *replies: Any, listen: Callable[[Event], None] | None = None) -> RunResult:
    agent = Agent(provider=ScriptedProvider([*replies, "done"]), model=Model("m"), tools=tools)
    if listen is not None:
        agent.subscribe(listen)
    return await agent.prompt("go")


def results_of(messages: list[Message]) -> list[ToolResultMessage]:
    return [message for message in messages if isinstance(message, ToolResultMessage)]


def call(made: Any, /, **arguments: Any) -> ToolResultMessage:
    """Let a model call the tool once; the result that it sees."""
    made = made if isinstance(made, Tool) else tool(made)
    result = asyncio.run(prompted([made], [ToolCall("1", made.name, arguments)]))
    (message,) = results_of(result.messages)
    assert result.text == "done"
    return message


def schema_of(made: Made) -> dict[str, Any]:
    """The schema with all references put in place, as a validator would read it."""

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            name = part["$ref"].removeprefix("#/$defs/")
            return inlined(made.spec.parameters["$defs"][name])
        return {key: inlined(value) for key, value in part.items() if key != "$defs"}

    found: dict[str, Any] = inlined(made.spec.parameters)
    return found


# --- arguments --------------------------------------------------------------------------------------------------------


class Stop(pydantic.BaseModel):
    city: str = pydantic.Field(min_length=2, description="the city's name")
    nights: int = pydantic.Field(1, ge=1, le=30)


class Trip(pydantic.BaseModel):
    stops: list[Stop]
    style: Literal["slow", "fast"] = "slow"

    @pydantic.field_validator("stops")
    @classmethod
    def begins_at_home(cls, stops: list[Stop]) -> list[Stop]:
        if stops and stops[0].city != "Oslo":
            raise ValueError("a trip begins in Oslo")
        return stops


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    trips: list[Trip] = []


@dataclasses.dataclass
class Party:
    host: Person
    guests: dict[str, Person] = dataclasses.field(default_factory=dict)


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = []


T = TypeVar("T")


class Box(pydantic.BaseModel, Generic[T]):
    inside: T


@tool
def plan(trip: Trip, spare: Trip | None = None) -> str:
    """Plan a trip."""
    assert isinstance(trip, Trip)
    return f"{[(stop.city, stop.nights) for stop in trip.stops]} {trip.style} {spare}"


@tool
def invite(party: Party, more: list[Person], by_name: dict[str, Trip]) -> str:
    found = [party.host, *party.guests.values(), *more]
    assert all(isinstance(person, Person) for person in found)
    assert all(isinstance(trip, Trip) for person in found for trip in person.trips)
    assert all(isinstance(trip, Trip) for trip in by_name.values())
    return ", ".join(f"{person.name}:{len(person.trips)}" for person in found)


def test_a_pydantic_model_arrives_as_one_with_its_defaults() -> None:
    result = call(plan, trip={"stops": [{"city": "Oslo"}, {"city": "Rome", "nights": 3}]})
    assert result.text == "[('Oslo', 1), ('Rome', 3)] slow None"


def test_models_of_all_three_libraries_nest_in_each_other_in_lists_and_dicts() -> None:
    trip = {"stops": [{"city": "Oslo"}]}
    party = {"host": {"name": "Ann", "trips": [trip, trip]}, "guests": {"b": {"name": "Bo"}}}
    result = call(invite, party=party, more=[{"name": "Cy", "trips": [trip]}], by_name={"first": trip})
    assert result.text == "Ann:2, Bo:0, Cy:1"


def test_the_model_is_told_what_a_pydantic_model_wants() -> None:
    schema = schema_of(plan)
    stop = schema["properties"]["trip"]["properties"]["stops"]["items"]
    assert stop["properties"]["city"]["description"] == "the city's name"
    assert stop["properties"]["nights"]["maximum"] == 30
    assert schema["required"] == ["trip"]
    deep = schema_of(invite)["properties"]["party"]["properties"]["host"]["properties"]["trips"]["items"]
    assert deep["properties"]["stops"]["items"] == stop


def test_a_model_that_holds_itself_and_a_generic_one_are_described_and_read() -> None:
    @tool
    def grow(tree: Tree, box: Box[int], boxes: list[Box[str]]) -> str:
        return f"{tree.children[0].children[0].name} {box.inside} {boxes[0].inside}"

    references = set(grow.spec.parameters["$defs"])
    assert "Tree" in references
    assert all(name.replace("_", "").isalnum() for name in references)
    tree = {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}
    assert call(grow, tree=tree, box={"inside": 3}, boxes=[{"inside": "x"}]).text == "c 3 x"


def test_different_models_with_one_name_keep_their_own_schemas() -> None:
    one = types.new_class("Item", (pydantic.BaseModel,), {}, lambda body: body.update(__annotations__={"a": int}))
    two = types.new_class("Item", (pydantic.BaseModel,), {}, lambda body: body.update(__annotations__={"b": str}))
    three = msgspec.defstruct("Item", [("c", float)])

    def look(x, y, z):  # type: ignore[no-untyped-def]
        return f"{x.a} {y[0].b} {z.c}"

    look.__annotations__ = {"x": one, "y": list[two], "z": three}  # type: ignore[valid-type]
    properties = schema_of(tool(look))["properties"]
    found = [properties["x"], properties["y"]["items"], properties["z"]]
    assert [list(schema["properties"]) for schema in found] == [["a"], ["b"], ["c"]]
    assert call(look, x={"a": 1}, y=[{"b": "s"}], z={"c": 0.5}).text == "1 s 0.5"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"trip": {"stops": [{"city": "Oslo", "nights": 99}]}}, "stops.0.nights: Input should be less than or equal"),
        ({"trip": {"stops": [{"city": "Oslo", "nights": 99}]}}, "(got 99)"),
        ({"trip": {"stops": [{"city": "Rome"}]}}, "a trip begins in Oslo"),
        ({"trip": {"style": "mad"}}, "stops: Field required"),
        ({"trip": {"style": "mad"}}, "style: Input should be 'slow' or 'fast'"),
        ({"trip": 7}, "$.trip"),
        ({}, "missing required field `trip`"),
        ({"trip": {"stops": []}, "color": "red"}, "color"),
    ],
)
def test_arguments_that_a_pydantic_model_refuses_are_an_error_that_names_the_place(
    arguments: dict[str, Any], said: str
) -> None:
    result = call(plan, **arguments)
    assert result.is_error
    assert result.text.startswith("Invalid arguments")
    assert said in result.text
    assert "Expected: {" in result.text
    assert "errors.pydantic.dev" not in result.text


def test_arguments_that_a_nested_model_refuses_are_named_by_their_path() -> None:
    bad = {"host": {"name": "Ann", "trips": [{"stops": [{"city": "x"}]}]}}
    result = call(invite, party=bad, more=[], by_name={})
    assert result.is_error
    assert "stops.0.city" in result.text
    assert "$.party.host.trips[0]" in result.text


def test_a_check_that_breaks_instead_of_refusing_is_an_error_too() -> None:
    class Fragile(pydantic.BaseModel):
        x: int

        @pydantic.field_validator("x")
        @classmethod
        def broken(cls, x: int) -> int:
            raise ZeroDivisionError("by accident")

    def look(fragile):  # type: ignore[no-untyped-def]
        return "never"

    look.__annotations__ = {"fragile": Fragile}
    result = call(look, fragile={"x": 1})
    assert result.is_error
    assert "by accident" in result.text


def test_constraints_of_pydantic_fields_and_of_msgspec_hold_for_plain_parameters() -> None:
    @tool
    def roll(
        dice: Annotated[int, pydantic.Field(ge=1, le=5, description="how many")],
        word: Annotated[str, pydantic.Field(pattern="^a+$")] = "a",
        many: Annotated[list[int], msgspec.Meta(max_length=2)] = [],  # noqa: B006
    ) -> str:
        return f"{dice}{word}{many}"

    schema = schema_of(roll)["properties"]
    assert schema["dice"] == {"type": "integer", "minimum": 1, "maximum": 5, "description": "how many"}
    assert call(roll, dice=5).text == "5a[]"
    for wrong in ({"dice": 6}, {"dice": 1, "word": "b"}, {"dice": 1, "many": [1, 2, 3]}):
        assert call(roll, **wrong).is_error


def test_a_tool_that_changes_its_arguments_does_not_change_history() -> None:
    def spoil(data: dict[str, Any]) -> str:
        data["list"].append(4)
        data["nested"]["x"] = "changed"
        return "done"

    sent = {"data": {"list": [1], "nested": {"x": 1}}}
    result = asyncio.run(prompted([spoil], [ToolCall("1", "spoil", sent)]))
    reply = result.messages[1]
    assert isinstance(reply, AssistantMessage)
    assert reply.tool_calls[0].arguments == {"data": {"list": [1], "nested": {"x": 1}}}


def test_partials_objects_and_bound_methods_are_tools_too() -> None:
    class Adder:
        """Adds."""

        def __call__(self, a: int, b: int) -> int:
            return a + b

        async def later(self, a: int) -> int:
            return a + 1

    def power(base: int, exponent: int) -> int:
        """A power."""
        return int(base**exponent)

    square = Tool(functools.partial(power, exponent=2), name="square")
    assert square.spec.description == "A power."
    assert call(square, base=3).text == "9"
    assert call(Tool(Adder(), name="add"), a=1, b=2).text == "3"
    assert call(Adder().later, a=1).text == "2"


def test_a_hint_of_the_result_that_only_type_checkers_know_does_not_matter() -> None:
    def price(a: int) -> OnlyForTypeCheckers:
        return decimal.Decimal(a)

    assert call(price, a=3).text == '"3"'


# --- the context ------------------------------------------------------------------------------------------------------


def test_a_tool_knows_where_it_is_called_from(database: Database) -> None:
    seen: list[ToolContext] = []

    @tool
    async def look(city: str, context: ToolContext) -> str:
        seen.append(context)
        context.extra["looked"] = city
        return "ok"

    async def main() -> None:
        async with database.checkpointer() as cp:
            script = ScriptedProvider([[ToolCall("call-1", "look", {"city": "Oslo"})], "done"])
            agent = Agent(provider=script, model=Model("m"), tools=[look], checkpointer=cp, thread_id="trip")
            agent.state.extra["before"] = 1
            await agent.prompt("go")
            thread = await cp.load("trip")
            assert thread is not None
            assert thread.extra == {"before": 1, "looked": "Oslo"}

    asyncio.run(main())
    (context,) = seen
    assert (context.thread_id, context.tool_call_id, context.tool_name) == ("trip", "call-1", "look")
    assert not context.signal.aborted
    assert "context" not in schema_of(look)["properties"]


def test_a_tool_whose_context_is_optional_gets_it_and_can_be_called_without() -> None:
    @tool
    def look(city: str, context: ToolContext | None = None) -> str:
        return f"{city} {context.tool_call_id if context else 'alone'}"

    assert call(look, city="Oslo").text == "Oslo 1"
    assert look("Oslo") == "Oslo alone"


def test_idempotency_keys_differ_between_calls_also_where_a_service_uses_an_id_twice() -> None:
    keys: list[str] = []

    @tool(sequential=True)
    def pay(context: ToolContext) -> str:
        keys.append(context.idempotency_key)
        again = context.idempotency_key
        assert again == keys[-1]
        return "paid"

    same = [ToolCall("0", "pay"), ToolCall("1", "pay")]
    asyncio.run(prompted([pay], same, same))
    assert len(keys) == 4
    assert len(set(keys)) == 4
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_progress_of_any_type_is_heard_before_the_end(kind: str) -> None:
    heard: list[Any] = []

    def sync(context: ToolContext) -> str:
        context.update({"when": datetime.date(2026, 1, 2), "odd": Unprintable()})
        return "done"

    async def later(context: ToolContext) -> str:
        return sync(context)

    def listen(event: Event) -> None:
        if isinstance(event, ToolExecutionUpdate):
            heard.append(event.update)
        elif isinstance(event, ToolExecutionEnd):
            heard.append("end")

    made: Made = Tool(sync if kind == "sync" else later, name="t")
    asyncio.run(prompted([made], [ToolCall("1", "t")], listen=listen))
    assert heard == [{"when": "2026-01-02", "odd": "<Unprintable: its repr raised RuntimeError>"}, "end"]


def test_a_tool_that_was_left_behind_by_its_time_limit_is_not_heard_any_more() -> None:
    heard: list[Event] = []
    go, said = threading.Event(), threading.Event()

    @tool(timeout=0.01)
    def slow(context: ToolContext) -> None:
        assert go.wait(30)
        context.update("late")
        said.set()

    async def main() -> None:
        await prompted([slow], [ToolCall("1", "slow")], listen=heard.append)
        go.set()
        await asyncio.to_thread(said.wait, 30)

    asyncio.run(main())
    assert said.is_set()
    assert not any(isinstance(event, ToolExecutionUpdate) for event in heard)


# --- time and order ---------------------------------------------------------------------------------------------------


def test_a_sync_tool_that_takes_too_long_is_an_error_and_the_run_goes_on() -> None:
    never = threading.Event()

    @tool(timeout=0.01)
    def hang() -> None:
        never.wait(60)

    try:
        result = call(hang)
    finally:
        never.set()
    assert result.is_error
    assert result.text == "Timed out after 0.01 s; it may or may not have taken effect."


def test_an_async_tool_that_takes_too_long_is_cancelled_and_may_clean_up() -> None:
    cleaned: list[str] = []

    @tool(timeout=0.01)
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    assert "Timed out" in call(hang).text
    assert cleaned == ["yes"]


def test_a_clean_up_that_fails_does_not_hide_the_time_limit() -> None:
    @tool(timeout=0.01)
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while cleaning up")

    assert "Timed out" in call(hang).text


def test_an_async_tool_that_ignores_its_cancellation_is_left_behind() -> None:
    async def main() -> None:
        enough = asyncio.Event()

        @tool(timeout=0.01)
        async def stubborn() -> None:
            while not enough.is_set():
                try:
                    await enough.wait()
                except asyncio.CancelledError:
                    continue

        result = await prompted([stubborn], [ToolCall("1", "stubborn")])
        assert "Timed out" in results_of(result.messages)[0].text
        enough.set()

    asyncio.run(main())


def test_a_tool_that_finishes_its_work_while_it_is_stopped_has_done_it() -> None:
    @tool(timeout=0.01)
    async def careful() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "committed"
        return "unreachable"

    result = call(careful)
    assert (result.text, result.is_error) == ("committed", False)


def test_a_tool_with_a_time_limit_is_aborted_with_its_run() -> None:
    async def main() -> None:
        cleaned = False

        @tool(timeout=600)
        async def hang(context: ToolContext) -> None:
            nonlocal cleaned
            context.update("hanging")
            try:
                await asyncio.Event().wait()
            finally:
                cleaned = True

        agent = Agent(provider=ScriptedProvider([[ToolCall("1", "hang")]]), model=Model("m"), tools=[hang])
        agent.subscribe(lambda event: agent.abort() if isinstance(event, ToolExecutionUpdate) else None)
        result = await agent.prompt("go")
        assert result.stop_reason == "aborted"
        assert "aborted" in results_of(result.messages)[0].text
        assert cleaned

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_tool_whose_own_work_was_cancelled_has_failed_and_the_run_goes_on(timeout: float | None) -> None:
    @tool(timeout=timeout)
    async def work() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    result = call(work)
    assert result.is_error
    assert "CancelledError" in result.text


@pytest.mark.parametrize("timeout", [None, 600.0])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_tool_that_wants_to_exit_does_not_end_the_program(timeout: float | None, kind: str) -> None:
    def sync() -> None:
        raise SystemExit(3)

    async def later() -> None:
        raise SystemExit(3)

    made: Made = Tool(sync if kind == "sync" else later, name="t", timeout=timeout)
    assert call(made).text == "SystemExit: 3"


def test_calls_of_one_reply_run_side_by_side() -> None:
    meeting = threading.Barrier(3)

    @tool
    def meet(number: int) -> int:
        meeting.wait(30)  # broken unless all three are there
        return number

    calls = [ToolCall(str(number), "meet", {"number": number}) for number in range(3)]
    result = asyncio.run(prompted([meet], calls))
    assert [message.text for message in results_of(result.messages)] == ["0", "1", "2"]


def test_a_reply_that_calls_a_sequential_tool_runs_its_calls_one_after_the_other() -> None:
    running: list[str] = []
    order: list[str] = []

    async def note(name: str) -> None:
        assert running == []
        running.append(name)
        for _ in range(5):
            await asyncio.sleep(0)  # long enough for another one to begin
        running.remove(name)
        order.append(name)

    @tool(sequential=True)
    async def write(name: str) -> None:
        await note(name)

    @tool
    async def read(name: str) -> None:
        await note(name)

    events: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, ToolExecutionStart | ToolExecutionEnd):
            events.append(f"{event.type} {event.tool_call_id}")

    calls = [ToolCall(str(n), name, {"name": str(n)}) for n, name in enumerate(["read", "write", "read"])]
    result = asyncio.run(prompted([write, read], calls, listen=listen))
    assert not any(message.is_error for message in results_of(result.messages))
    assert order == ["0", "1", "2"]
    assert events == [f"tool_execution_{what} {n}" for n in range(3) for what in ("start", "end")]


def test_a_blocking_tool_does_not_stall_the_event_loop() -> None:
    async def main() -> None:
        turned = threading.Event()

        @tool
        def block() -> str:
            return "free" if turned.wait(30) else "stalled"

        agent = Agent(provider=ScriptedProvider([[ToolCall("1", "block")], "done"]), model=Model("m"), tools=[block])
        running = asyncio.create_task(agent.prompt("go"))
        agent.subscribe(
            lambda event: (
                asyncio.get_running_loop().call_later(0.001, turned.set)
                if isinstance(event, ToolExecutionStart)
                else None
            )
        )
        result = await running
        assert results_of(result.messages)[0].text == "free"

    asyncio.run(main())


# --- results ----------------------------------------------------------------------------------------------------------


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Color(enum.Enum):
    RED = "red"


class Weather(pydantic.BaseModel):
    when: datetime.date
    rain: decimal.Decimal


class Holder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    held: Any


class Spot(msgspec.Struct, tag="spot", rename="camel"):
    wind_speed: float


@dataclasses.dataclass
class Report:
    at: datetime.datetime
    by: set[str]
    inner: Report | None = None


Pair = namedtuple("Pair", "left right")


class Trap:
    """As wrong as a class can be."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("not even this")

    __repr__ = None  # type: ignore[assignment]


class FailingMapping(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("the disk is gone")


def circle() -> dict[str, Any]:
    made: dict[str, Any] = {"name": "loop"}
    made["self"] = [made]
    return made


def circle_of_objects() -> Report:
    made = Report(datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), set())
    made.inner = made
    return made


def deep() -> Any:
    made: Any = "bottom"
    for _ in range(5_000):
        made = {"down": made}
    return made


MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)
ODD: dict[str, tuple[Any, Any]] = {
    "datetime": (MOMENT, "2026-01-02T03:04:05.000678Z"),
    "date, time": ([MOMENT.date(), MOMENT.time()], ["2026-01-02", "03:04:05.000678"]),
    "timedelta": (datetime.timedelta(hours=1), "PT3600S"),
    "set": ({3, 1, 2}, [1, 2, 3]),
    "mixed set": ({1, "a"}, ["a", 1]),
    "frozenset": ({"a": frozenset({"b", "a"})}, {"a": ["a", "b"]}),
    "bytes": (b"\xff\x00", "/wA="),
    "bytearray": ({"raw": bytearray(b"ab")}, {"raw": "YWI="}),
    "Decimal": (decimal.Decimal("1.10"), "1.10"),
    "UUID": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "enum": ({Color.RED: Color.RED}, {"red": "red"}),
    "path": (pathlib.PurePosixPath("/a/b"), "/a/b"),
    "dataclass": (Report(MOMENT, {"ann"}), {"at": "2026-01-02T03:04:05.000678Z", "by": ["ann"], "inner": None}),
    "pydantic": (Weather(when=MOMENT.date(), rain=decimal.Decimal("0.5")), {"when": "2026-01-02", "rain": "0.5"}),
    "pydantic with anything": (Holder(held=Unprintable()), {"held": "<Unprintable: its repr raised RuntimeError>"}),
    "struct": (Spot(2.5), {"type": "spot", "windSpeed": 2.5}),
    "named tuple": (Pair(1, {2}), {"left": 1, "right": [2]}),
    "tuple": ((1, (2,)), [1, [2]]),
    "deque": (deque([1, 2]), [1, 2]),
    "mapping": (types.MappingProxyType(OrderedDict(b=1, a=2)), {"b": 1, "a": 2}),
    "keys": ({1: "a", None: "b", (1, 2): "d"}, {"1": "a", "null": "b", "[1, 2]": "d"}),
    "two keys in one": ({1: "a", "1": "b"}, {"1": "a", "1'": "b"}),
    "exception": (ValueError("no"), "ValueError: no"),
    "complex": (1j, "1j"),
    "class": (Weather, repr(Weather)),
    "iterator": (iter([1]), None),
    "huge number": ([2**70, -(2**70)], [2**70, -(2**70)]),
    "endless number": (10**5000, None),
    "surrogate": ({"\ud800": "\udfff\x00"}, {"\ud800": "\udfff\x00"}),
    "broken repr": ([1, Unprintable()], [1, "<Unprintable: its repr raised RuntimeError>"]),
    "trap": ([1, Trap()], None),
    "broken mapping": (FailingMapping(a=1), "{'a': 1}"),
    "circle": (circle(), {"name": "loop", "self": ["<dict: the same again, in a circle>"]}),
    "circle of objects": (circle_of_objects(), None),
    "the same twice": ([shared := [1], shared], [[1], [1]]),
    "deep": (deep(), None),
}


def stored_result(database: Database, made: Any) -> tuple[ToolResultMessage, RunResult]:
    """Run the tool on a stored thread; its result, equal before and after a reload."""

    async def main() -> tuple[ToolResultMessage, RunResult]:
        async with database.checkpointer() as cp:
            script = ScriptedProvider([[ToolCall("1", "t")], "done"])
            agent = Agent(
                provider=script, model=Model("m"), tools=[Tool(made, name="t")], checkpointer=cp, thread_id="t"
            )
            result = await agent.prompt("go")
            before = list(agent.state.messages)
        async with database.checkpointer() as cp:
            thread = await cp.load("t")
        assert thread is not None
        assert thread.messages == before
        return results_of(thread.messages)[0], result

    return asyncio.run(main())


@pytest.mark.parametrize("name", ODD)
def test_details_of_any_type_are_stored_readable_and_reload_equal(name: str, database: Database) -> None:
    value, expected = ODD[name]
    stored, result = stored_result(database, lambda: ToolResult("done", details=value))
    assert result.text == "done"
    assert (stored.text, stored.is_error) == ("done", False)
    if expected is not None:
        assert stored.details == expected


@pytest.mark.parametrize("name", ODD)
def test_a_value_of_any_type_can_be_returned_and_is_no_failure(name: str, database: Database) -> None:
    value, _ = ODD[name]
    stored, result = stored_result(database, lambda: value)
    assert result.text == "done"
    assert not stored.is_error
    assert stored.text


PICTURE = ImageContent("iVBORw0KGgo=", "image/png")


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (None, [TextContent("(no output)")]),
        ("text", [TextContent("text")]),
        (["a", "b"], [TextContent('["a","b"]')]),
        ({"ä": [1.5, True, None]}, [TextContent('{"ä":[1.5,true,null]}')]),
        (TextContent("block"), [TextContent("block")]),
        (PICTURE, [PICTURE]),
        ([TextContent("look:"), PICTURE], [TextContent("look:"), PICTURE]),
        (("look:", PICTURE), [TextContent("look:"), PICTURE]),
        (ToolResult("text"), [TextContent("text")]),
        (ToolResult(["look:", PICTURE]), [TextContent("look:"), PICTURE]),
        (ToolResult({"a": 1}), [TextContent('{"a":1}')]),
        (ToolResult(details={"a": 1}), [TextContent("(no output)")]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_tool_may_return_text_blocks_json_or_a_result(value: Any, content: list[Any], database: Database) -> None:
    stored, _ = stored_result(database, lambda: value)
    assert stored.content == content
    assert not stored.is_error


def test_a_tool_may_say_that_it_failed_without_raising(database: Database) -> None:
    stored, result = stored_result(database, lambda: ToolResult("no such city", {"tried": {3}}, is_error=True))
    assert (stored.text, stored.details, stored.is_error) == ("no such city", {"tried": [3]}, True)
    assert result.stop_reason == "stop"


def test_a_tool_may_end_the_run_and_the_thread_can_go_on(database: Database) -> None:
    @tool
    def hand_over(to: str) -> ToolResult:
        return ToolResult(f"handed over to {to}", end_run=True)

    async def main() -> None:
        async with database.checkpointer() as cp:
            with ScriptedProvider([[ToolCall("1", "hand_over", {"to": "Ann"})], "welcome back"]) as script:
                agent = Agent(provider=script, model=Model("m"), tools=[hand_over], checkpointer=cp, thread_id="t")
                ended = await agent.prompt("go")
                assert ended.stop_reason == "stopped"
                assert ended.messages[-1].text == "handed over to Ann"
                assert len(script.requests) == 1
                assert (await agent.prompt("and now?")).text == "welcome back"

    asyncio.run(main())


def test_one_of_several_calls_ends_the_run_after_all_of_them() -> None:
    @tool
    async def stop() -> ToolResult:
        return ToolResult("stop", end_run=True)

    @tool
    async def go() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        return "gone"

    async def main() -> None:
        with ScriptedProvider([[ToolCall("1", "stop"), ToolCall("2", "go")]]) as script:
            result = await Agent(provider=script, model=Model("m"), tools=[stop, go]).prompt("x")
        assert [message.text for message in results_of(result.messages)] == ["stop", "gone"]
        assert result.stop_reason == "stopped"

    asyncio.run(main())


def test_a_very_long_result_is_cut_for_the_model_and_kept_whole(database: Database) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))

    async def main() -> None:
        async with database.checkpointer() as cp:
            script = ScriptedProvider([[ToolCall("1", "t")], "done"])
            agent = Agent(
                provider=script,
                model=Model("m"),
                tools=[Tool(lambda: [TextContent(text), PICTURE], name="t")],
                checkpointer=cp,
                thread_id="t",
                max_result_chars=1_000,
            )
            await agent.prompt("go")
            sent = results_of(list(script.requests[1].messages))[0]
            assert len(sent.text) < 1_200
            assert sent.text.startswith("line 0\n")
            assert sent.text.endswith("line 19999\n")
            assert f"of {len(text):,} characters are left out" in sent.text
            assert PICTURE in sent.content
            assert results_of(agent.state.messages)[0].text == text
            thread = await cp.load("t")
            assert thread is not None
            assert results_of(thread.messages)[0].text == text

    asyncio.run(main())


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_printed_is_named() -> None:
    def fail() -> None:
        raise Unspeakable

    result = call(fail)
    assert result.is_error
    assert "Unspeakable" in result.text


def test_after_any_failure_the_thread_can_go_on() -> None:
    @tool
    def fail(how: str) -> Any:
        if how == "raise":
            raise ValueError("no")
        return Trap()

    async def main() -> None:
        calls = [
            ToolCall("1", "fail", {"how": "raise"}),
            ToolCall("2", "fail", {"how": "trap"}),
            ToolCall("3", "fail", {}, malformed='{"how": '),
            ToolCall("4", "unknown", {}),
        ]
        agent = Agent(provider=ScriptedProvider([calls, "sorry", "hello"]), model=Model("m"), tools=[fail])
        await agent.prompt("go")
        assert (await agent.prompt("again")).text == "hello"
        assert [message.is_error for message in results_of(agent.state.messages)] == [True, False, True, True]
        assert isinstance(agent.state.messages[0], UserMessage)

    asyncio.run(main())


# --- what cannot be a tool --------------------------------------------------------------------------------------------


class Plain:
    pass


class NoSchema(pydantic.BaseModel):
    do: Callable[[], int]


@pytest.mark.parametrize(
    "hint", [Plain, list[Plain], complex, object, Callable[[], int], NoSchema, Stop | str, Stop | Trip]
)
def test_a_hint_that_cannot_be_a_schema_is_refused_with_the_parameters_name(hint: Any) -> None:
    def look(fine: int, odd: Any) -> None: ...

    look.__annotations__ = {"fine": int, "odd": hint}
    with pytest.raises(InputError, match=r"tool 'look': the parameter 'odd' cannot be described .*; use str, int"):
        tool(look)


def test_a_generator_is_refused() -> None:
    def sync() -> Iterator[int]:
        yield 1

    async def later() -> Any:
        yield 1

    for function in (sync, later):
        with pytest.raises(InputError, match="is a generator; return the result"):
            tool(function)


def test_a_method_without_its_object_is_refused() -> None:
    with pytest.raises(InputError, match=r"'look' is a method without its object.*tool\(thing.method\)"):

        class Thing:
            @tool
            def look(self, city: str) -> None: ...


def test_two_contexts_are_refused() -> None:
    def look(one: ToolContext, two: ToolContext) -> None: ...

    with pytest.raises(InputError, match="one parameter may take the ToolContext"):
        tool(look)


@pytest.mark.parametrize("timeout", [0, -1, True, "3", float("nan")])
def test_a_time_limit_that_is_none_is_refused(timeout: Any) -> None:
    def look() -> None: ...

    with pytest.raises(InputError, match="tool 'look': timeout must be a number of seconds above 0"):
        Tool(look, timeout=timeout)
