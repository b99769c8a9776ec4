"""Tools: what a model is told of a function, and what becomes of a call."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import decimal
import enum
import functools
import json
import math
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import msgspec
import pytest

from byssus import Agent, Model, ToolContext, ToolResult, tool
from byssus.errors import InputError
from byssus.events import Event, ToolExecutionUpdate
from byssus.messages import ImageContent, TextContent, ToolCall, ToolResultMessage, encode
from byssus.providers.scripted import ScriptedProvider
from byssus.signals import Signal
from byssus.tools import Tool, unknown_tool

Made = Tool[..., Any]


def context(**fields: Any) -> ToolContext:
    return ToolContext("c1", "look", Signal(), **fields)


def run(made: Made, /, **arguments: Any) -> ToolResultMessage:
    return asyncio.run(made.execute(ToolCall("c1", made.name, arguments), context())).message


def returning(value: Any) -> Made:
    def t() -> Any:
        return value

    return tool(t)


def properties(made: Made) -> dict[str, Any]:
    found: dict[str, Any] = made.spec.parameters["properties"]
    return found


# --- the schema -------------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Route:
    """A way."""

    points: list[Point]
    name: str = "unnamed"
    tags: dict[str, str] = field(default_factory=dict)


class Filter(TypedDict):
    word: str
    limit: NotRequired[int]


class Box(msgspec.Struct):
    size: float


@dataclass
class Arguments:
    """Named like something of ours."""

    x: int


@tool
def everything(  # type: ignore[no-untyped-def]
    text: str,
    number: int,
    ratio: float,
    flag: bool,
    color: Color,
    level: Level,
    size: Literal["s", "m", 3],
    words: list[str],
    pair: tuple[int, str],
    table: dict[str, float],
    either: int | str,
    maybe: str | None,
    old_maybe: Optional[int],  # noqa: UP045
    route: Route,
    filter: Filter,
    box: Box,
    when: datetime.datetime,
    amount: decimal.Decimal,
    key: uuid.UUID,
    raw: bytes,
    anything: Any,
    bounded: Annotated[int, msgspec.Meta(ge=1, le=9)],
    untyped,
) -> None:
    """All kinds."""


def test_all_common_hints_have_a_schema() -> None:
    schema = properties(everything)
    expected = {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "color": {"$ref": "#/$defs/Color"},
        "size": {"enum": [3, "m", "s"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "number"}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "old_maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "route": {"$ref": "#/$defs/Route"},
        "filter": {"$ref": "#/$defs/Filter"},
        "box": {"$ref": "#/$defs/Box"},
        "bounded": {"type": "integer", "minimum": 1, "maximum": 9},
        "anything": {},
        "untyped": {},
    }
    assert {name: schema[name] for name in expected} == expected
    assert schema["raw"]["type"] == schema["when"]["type"] == schema["amount"]["type"] == "string"
    assert everything.spec.parameters["required"] == list(schema)


def test_the_schema_is_plain_json_with_references_that_lead_somewhere() -> None:
    schema = everything.spec.parameters
    text = json.dumps(schema)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    for name in ("Color", "Level", "Route", "Point", "Filter", "Box"):
        assert f'"#/$defs/{name}"' in text
        assert name in schema["$defs"]
    assert schema["$defs"]["Color"]["enum"] == ["blue", "red"]


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    @tool
    def ping() -> str:
        return "pong"

    assert ping.spec.parameters == {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert run(ping).text == "pong"


def test_defaults_are_optional_and_shown_where_they_are_plain() -> None:
    @tool
    def look(
        a: int = 3,
        b: str = "x",
        c: bool = False,
        d: float | None = None,
        e: list[int] = [1],  # noqa: B006
        f: Point = Point(1),  # noqa: B008
        g: Color = Color.RED,
    ) -> str:
        return repr((a, b, c, d, e, f, g))

    schema = properties(look)
    assert [schema[name]["default"] for name in "abcd"] == [3, "x", False, None]
    assert look.spec.parameters.get("required", []) == []
    assert run(look).text == repr((3, "x", False, None, [1], Point(1), Color.RED))
    assert run(look, e=[2], f={"x": 5}, g="blue").text == repr((3, "x", False, None, [2], Point(5), Color.BLUE))


def test_a_user_class_may_be_named_like_one_of_ours() -> None:
    def look(a: Arguments) -> int:
        return a.x

    made = tool(look)
    assert run(made, a={"x": 3}).text == "3"


def test_hints_that_are_real_objects_work_as_well_as_strings() -> None:
    def look(city, days):  # type: ignore[no-untyped-def]
        return f"{city!r} {days!r}"

    look.__annotations__ = {"city": str, "days": int}
    assert properties(tool(look)) == {"city": {"type": "string"}, "days": {"type": "integer"}}


def test_a_bound_method_is_a_tool_without_its_self() -> None:
    class Station:
        def measure(self, city: str) -> str:
            return f"wet in {city}"

    made = tool(Station().measure)
    assert list(properties(made)) == ["city"]
    assert run(made, city="Kiel").text == "wet in Kiel"


# --- descriptions -----------------------------------------------------------------------------------------------------


def google(city: str, days: int = 1) -> str:
    """The weather forecast.

    It is often right.

    Args:
        city (str): The city's name,
            for example: Paris.
        days: How many days.

    Returns:
        The forecast: as text.
    """
    return city


def sphinx(city: str, days: int = 1) -> str:
    """The weather forecast.

    It is often right.

    :param str city: The city's name,
        for example: Paris.
    :type city: str
    :param days: How many days.
    :type days: int
    :returns: The forecast.
    :rtype: str
    """
    return city


def numpy(city: str, days: int = 1) -> str:
    """The weather forecast.

    It is often right.

    Parameters
    ----------
    city : str
        The city's name,
        for example: Paris.
    days : int, optional
        How many days.

    Returns
    -------
    str
        The forecast.
    """
    return city


def numpy_without_types(city: str, days: int = 1) -> str:
    """The weather forecast.

    It is often right.

    Parameters
    ----------
    city
        The city's name,
        for example: Paris.
    days
        How many days.
    """
    return city


@pytest.mark.parametrize("function", [google, sphinx, numpy, numpy_without_types])
def test_docstrings_of_every_style_describe_tool_and_parameters(function: Callable[..., str]) -> None:
    made = tool(function)
    assert made.spec.description == "The weather forecast.\n\nIt is often right."
    assert properties(made)["city"]["description"] == "The city's name, for example: Paris."
    assert properties(made)["days"]["description"] == "How many days."


def test_a_description_may_begin_with_any_word() -> None:
    def look() -> None:
        """Examples are looked up in the archive."""

    assert tool(look).spec.description == "Examples are looked up in the archive."


def test_an_annotated_description_wins_over_the_docstring() -> None:
    def look(city: Annotated[str, "the town"], days: Annotated[int, msgspec.Meta(ge=1), "how long"] = 1) -> None:
        """Look.

        Args:
            city: something else
        """

    schema = properties(tool(look))
    assert schema["city"] == {"type": "string", "description": "the town"}
    assert schema["days"]["description"] == "how long"
    assert schema["days"]["minimum"] == 1


def test_name_and_description_can_be_given() -> None:
    @tool(name="search-web", description="Finds it.")
    def look(word: str) -> None:
        """Something else."""

    assert (look.name, look.spec.name, look.spec.description) == ("search-web", "search-web", "Finds it.")


def test_a_tool_can_still_be_called_as_the_function_that_it_is() -> None:
    @tool
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8


# --- what cannot be a tool --------------------------------------------------------------------------------------------


def test_a_hint_that_cannot_be_expressed_is_refused_by_name() -> None:
    class Strange:
        pass

    for hint in (Strange, complex, Callable[[], int], object, type):

        def look(x):  # type: ignore[no-untyped-def]
            pass

        look.__annotations__ = {"x": hint}
        with pytest.raises(InputError, match=r"(?s)tool 'look'.*use str, int"):
            tool(look)


def test_a_hint_that_cannot_be_found_is_refused_by_name() -> None:
    def look(x: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(InputError, match=r"tool 'look'.*Nowhere"):
        tool(look)


def test_a_union_that_json_cannot_tell_apart_is_refused() -> None:
    def look(x: Point | Route) -> None:
        pass

    with pytest.raises(InputError, match="tool 'look'"):
        tool(look)


@pytest.mark.parametrize("name", ["with space", "äöü", "a" * 65, "a.b", "\n", "x\n", "<lambda>"])
def test_a_name_that_services_refuse_is_refused_at_once(name: str) -> None:
    def look() -> None: ...

    with pytest.raises(InputError, match="name"):
        tool(name=name)(look)


def test_a_lambda_needs_a_name() -> None:
    one: Callable[[], int] = lambda: 1  # noqa: E731
    with pytest.raises(InputError, match="name="):
        tool(one)
    assert run(tool(name="one")(one)).text == "1"


def test_parameters_without_names_are_refused() -> None:
    def many(*words: str) -> None: ...
    def any_key(**words: str) -> None: ...
    def bare(word: str, /) -> None: ...

    for function in (many, any_key, bare):
        with pytest.raises(InputError, match="plain named parameter"):
            tool(function)


def test_two_tools_with_one_name_are_refused_when_the_agent_is_built() -> None:
    def look() -> None: ...

    with pytest.raises(InputError, match="two tools are named 'look'"):
        Agent(provider=ScriptedProvider(), model=Model("m"), tools=[look, tool(look)])


def test_something_that_cannot_be_called_is_no_tool() -> None:
    with pytest.raises(InputError, match="a tool must be a function"):
        Agent(provider=ScriptedProvider(), model=Model("m"), tools=["look"])  # type: ignore[list-item]


# --- arguments --------------------------------------------------------------------------------------------------------


@tool
def typed(n: int, flag: bool = False, ratio: float = 0.5, word: str = "w", many: list[int] = []) -> str:  # noqa: B006
    return repr((n, flag, ratio, word, many))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"n": "3"}, (3, False, 0.5, "w", [])),
        ({"n": 3, "flag": "true"}, (3, True, 0.5, "w", [])),
        ({"n": 3, "ratio": "0.25"}, (3, False, 0.25, "w", [])),
        ({"n": 3, "ratio": 2}, (3, False, 2.0, "w", [])),
        ({"n": "-7", "many": ["1", 2]}, (-7, False, 0.5, "w", [1, 2])),
        ({"n": 3, "word": "3"}, (3, False, 0.5, "3", [])),
        ({"n": 3, "word": "null"}, (3, False, 0.5, "null", [])),
        ({"n": 3, "word": "\ud800\0"}, (3, False, 0.5, "\ud800\0", [])),
    ],
)
def test_numbers_in_quotes_are_taken_for_numbers_where_nothing_else_is_meant(
    arguments: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    result = run(typed, **arguments)
    assert not result.is_error, result.text
    assert result.text == repr(expected)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({}, "n"),
        ({"n": "three"}, "n"),
        ({"n": None}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": [1]}, "n"),
        ({"n": 1, "word": 5}, "word"),
        ({"n": 1, "nn": 2}, "nn"),
        ({"n": 1, "many": "1"}, "many"),
        ({"n": 1, "many": [1, "x"]}, "many"),
    ],
)
def test_bad_arguments_are_a_result_that_says_what_was_wrong_and_what_is_right(
    arguments: dict[str, Any], hint: str
) -> None:
    result = run(typed, **arguments)
    assert result.is_error
    assert result.text.startswith("Invalid arguments")
    assert hint in result.text.split("Expected: {")[0]
    assert '"integer"' in result.text


def test_a_value_outside_its_bounds_is_told() -> None:
    @tool
    def look(n: Annotated[int, msgspec.Meta(ge=1)]) -> None: ...

    assert "1" in run(look, n=0).text
    assert run(look, n=0).is_error


def test_arguments_that_are_no_json_object_are_shown_to_the_model() -> None:
    call = ToolCall("c1", "typed", {}, malformed='{"n": 3')
    result = asyncio.run(typed.execute(call, context())).message
    assert result.is_error
    assert "not a JSON object" in result.text
    assert '{"n": 3' in result.text


@dataclass
class Fussy:
    x: int

    def __post_init__(self) -> None:
        if self.x == 1:
            raise ValueError("one is none")
        if self.x == 2:
            raise LookupError("two is not there")


@pytest.mark.parametrize(("x", "hint"), [(1, "one is none"), (2, "two is not there")])
def test_a_parameters_own_check_is_a_result_whatever_it_raises(x: int, hint: str) -> None:
    @tool
    def look(a: Fussy) -> None: ...

    result = run(look, a={"x": x})
    assert result.is_error
    assert hint in result.text


def test_nested_arguments_arrive_as_what_they_are_declared_to_be() -> None:
    @tool
    def go(route: Route, filter: Filter, color: Color, when: datetime.date) -> str:
        return repr((route, filter, color, when))

    result = run(
        go, route={"points": [{"x": 1}, {"x": 2, "y": 3}]}, filter={"word": "w"}, color="red", when="2024-02-29"
    )
    assert result.text == repr((Route([Point(1), Point(2, 3)]), {"word": "w"}, Color.RED, datetime.date(2024, 2, 29)))


def test_a_call_of_a_tool_that_is_not_there_names_those_that_are() -> None:
    result = unknown_tool(ToolCall("c1", "lok"), ["look", "go"])
    assert result.is_error
    assert result.tool_call_id == "c1"
    assert "'lok'" in result.text
    assert "look, go" in result.text
    assert "no tools" in unknown_tool(ToolCall("c1", "lok"), []).text


# --- running ----------------------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ValueError("no such city"), "ValueError: no such city"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("over"), "StopIteration"),
        (StopAsyncIteration("over"), "StopAsyncIteration"),
        (TimeoutError(), "TimeoutError"),
        (ExceptionGroup("both", [ValueError("x")]), "both"),
        (RecursionError("deep"), "RecursionError"),
        (MemoryError(), "MemoryError"),
        (Exception("\ud800"), "\ud800"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_whatever_a_tool_raises_is_a_result_for_the_model(error: BaseException, hint: str, kind: str) -> None:
    def sync() -> None:
        raise error

    async def later() -> None:
        raise error

    result = run(tool(name="t")(sync if kind == "sync" else later))
    assert result.is_error
    assert hint in result.text
    encode(result)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_that_cannot_be_printed_is_a_result_too(kind: str) -> None:
    def sync() -> None:
        raise Unspeakable

    async def later() -> None:
        raise Unspeakable

    result = run(tool(name="t")(sync if kind == "sync" else later))
    assert result.is_error
    assert "Unspeakable" in result.text


def test_a_plain_function_runs_beside_the_event_loop() -> None:
    seen: list[int] = []

    @tool
    def look() -> None:
        seen.append(threading.get_ident())

    async def main() -> None:
        await look.execute(ToolCall("c", "look"), context())
        seen.append(threading.get_ident())

    asyncio.run(main())
    assert seen[0] != seen[1]


def test_a_plain_function_does_not_stop_the_event_loop() -> None:
    async def main() -> str:
        go = threading.Event()

        @tool
        def look() -> str:
            assert go.wait(30)  # set by the loop, which would otherwise stand still
            return "went"

        task = asyncio.create_task(look.execute(ToolCall("c", "look"), context()))
        asyncio.get_running_loop().call_soon(go.set)
        return (await task).message.text

    assert asyncio.run(main()) == "went"


def test_an_async_function_runs_on_the_event_loop() -> None:
    @tool
    async def look() -> int:
        return threading.get_ident()

    async def main() -> None:
        result = (await look.execute(ToolCall("c", "look"), context())).message
        assert result.text == str(threading.get_ident())

    asyncio.run(main())


def test_a_plain_function_sees_the_context_variables_of_its_run() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")

    @tool
    def look() -> str:
        return variable.get()

    async def main() -> str:
        variable.set("found")
        return (await look.execute(ToolCall("c", "look"), context())).message.text

    assert asyncio.run(main()) == "found"


def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    async def answer(x: int) -> int:
        return 2 * x

    def look(x: int) -> Any:
        return answer(x)

    assert run(tool(look), x=4).text == "8"


def test_a_decorated_async_function_is_awaited() -> None:
    async def answer(x: int) -> int:
        return 2 * x

    @functools.wraps(answer)
    def look(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    assert run(tool(look), x=4).text == "8"


# --- results ----------------------------------------------------------------------------------------------------------


class Odd:
    def __repr__(self) -> str:
        return "<odd>"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Model2:
    """As pydantic's models behave."""

    def __repr__(self) -> str:
        return "Model2()"

    def model_dump(self, mode: str = "python") -> dict[str, str]:
        return {"mode": mode}


def ring() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def abyss() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "(no output)"),
        ("plain", "plain"),
        ("\ud800\0", "\ud800\0"),
        (3, "3"),
        (2**70, str(2**70)),
        (1.5, "1.5"),
        (True, "true"),
        ([1, "a", None], '[1,"a",null]'),
        ((1, 2), "[1,2]"),
        ([], "[]"),
        ({"a": {"b": [1]}}, '{"a":{"b":[1]}}'),
        ({1: "a"}, '{"1":"a"}'),
        (Point(1, 2), '{"x":1,"y":2}'),
        (Box(1.5), '{"size":1.5}'),
        (Color.RED, '"red"'),
        (datetime.date(2024, 2, 29), '"2024-02-29"'),
        (decimal.Decimal("1.10"), '"1.10"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Odd(), '"<odd>"'),
        ([Odd()], '["<odd>"]'),
        (Model2(), '{"mode":"json"}'),
    ],
    ids=repr,
)
def test_a_result_of_any_kind_is_readable(value: Any, text: str) -> None:
    result = run(returning(value))
    assert (result.text, result.is_error) == (text, False)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(math.nan, id="nan"),
        pytest.param([math.inf], id="infinity"),
        pytest.param(["\ud800"], id="surrogate"),
        pytest.param({"a": [2**70, -(2**70)]}, id="huge"),
        pytest.param(10**5000, id="endless"),
        pytest.param(b"\xff\0", id="bytes"),
        pytest.param({1, 2}, id="set"),
        pytest.param({(1, 2): 3}, id="tuple key"),
        pytest.param({"a": object()}, id="object"),
        pytest.param([Broken()], id="broken repr"),
        pytest.param(ring(), id="ring"),
        pytest.param(abyss(), id="abyss"),
        pytest.param(Odd, id="class"),
        pytest.param(1j, id="complex"),
    ],
)
def test_a_tool_that_worked_has_not_failed_because_its_result_is_strange(value: Any) -> None:
    """The side effect has happened: a result that says otherwise makes the model do it again."""
    answered = run(returning(value))
    assert not answered.is_error, answered.text[:200]
    encode(answered)
    detailed = run(returning(ToolResult("done", value)))
    assert (detailed.text, detailed.is_error) == ("done", False), detailed.text[:200]
    encode(detailed)


def test_details_are_kept_as_json() -> None:
    moment = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    details = {"when": moment, "set": {1}, "raw": b"ab", "price": decimal.Decimal("1.10"), "odd": Odd(), "p": Point(1)}
    result = run(returning(ToolResult("done", details)))
    assert result.details == {
        "when": "2024-02-29T12:00:00Z",
        "set": [1],
        "raw": "YWI=",
        "price": "1.10",
        "odd": "<odd>",
        "p": {"x": 1, "y": 0},
    }


def test_a_tool_can_say_that_it_failed() -> None:
    result = run(returning(ToolResult("no such city", {"tried": 3}, is_error=True)))
    assert (result.text, result.details, result.is_error) == ("no such city", {"tried": 3}, True)


def test_blocks_reach_the_model_as_blocks() -> None:
    image = ImageContent("/9j/4A==", "image/jpeg")
    assert run(returning(image)).content == [image]
    assert run(returning([TextContent("look"), image])).content == [TextContent("look"), image]
    assert run(returning(ToolResult([image]))).content == [image]


def test_a_result_carries_the_call_that_it_belongs_to() -> None:
    result = run(returning(1))
    assert (result.tool_call_id, result.tool_name) == ("c1", "t")


# --- the context ------------------------------------------------------------------------------------------------------


def test_a_tool_that_asks_for_its_context_gets_it_unseen_by_the_model() -> None:
    @tool
    def look(city: str, ctx: ToolContext) -> str:
        return (
            f"{city} {ctx.tool_call_id} {ctx.tool_name} {ctx.thread_id} {ctx.user_id} {ctx.extra} {ctx.signal.aborted}"
        )

    assert list(properties(look)) == ["city"]
    made = context(thread_id="trip", user_id="ann", extra={"a": 1})
    result = asyncio.run(look.execute(ToolCall("c1", "look", {"city": "Kiel"}), made)).message
    assert result.text == "Kiel c1 look trip ann {'a': 1} False"


def test_a_model_cannot_pass_a_context() -> None:
    @tool
    def look(ctx: ToolContext) -> None: ...

    result = run(look, ctx={"tool_call_id": "x"})
    assert result.is_error
    assert "ctx" in result.text


def test_progress_goes_nowhere_when_nobody_listens() -> None:
    @tool
    def look(ctx: ToolContext) -> str:
        ctx.update("half")
        return "done"

    assert run(look).text == "done"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_progress_is_heard_on_the_loop_in_order_and_before_the_end(kind: str) -> None:
    heard: list[Event] = []
    threads: set[int] = set()

    def sync(ctx: ToolContext) -> str:
        for step in range(20):
            ctx.update({"step": step, "odd": Odd()})
        return "done"

    async def later(ctx: ToolContext) -> str:
        return sync(ctx)

    def listen(event: Event) -> None:
        heard.append(event)
        threads.add(threading.get_ident())

    provider = ScriptedProvider([[ToolCall("c1", "t")], "ok"])
    agent = Agent(
        provider=provider, model=Model("m"), tools=[tool(name="t")(sync) if kind == "sync" else tool(name="t")(later)]
    )
    agent.subscribe(listen)

    asyncio.run(agent.prompt("go"))
    updates = [event for event in heard if isinstance(event, ToolExecutionUpdate)]
    assert [event.update for event in updates] == [{"step": step, "odd": "<odd>"} for step in range(20)]
    kinds = [event.type for event in heard]
    assert kinds.index("tool_execution_start") < kinds.index("tool_execution_update")
    assert len(kinds) - kinds[::-1].index("tool_execution_update") <= kinds.index("tool_execution_end")
    assert threads == {threading.get_ident()}


def test_a_tool_that_is_over_has_nothing_more_to_say() -> None:
    heard: list[str] = []
    kept: list[ToolContext] = []

    @tool
    def look(ctx: ToolContext) -> None:
        kept.append(ctx)

    async def main() -> None:
        agent = Agent(provider=ScriptedProvider([[ToolCall("c1", "look")], "ok"]), model=Model("m"), tools=[look])
        agent.subscribe(lambda event: heard.append(event.type))
        await agent.prompt("go")
        kept[0].update("late")
        assert "tool_execution_update" not in heard
        assert heard[-1] == "agent_end"

    asyncio.run(main())
