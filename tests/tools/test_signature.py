"""What a model is told of a function, and what becomes of the arguments that it sends."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import types
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NotRequired, Optional, TypedDict, TypeVar

import msgspec
import pydantic
import pytest

from byssus import (
    Agent,
    AssistantMessage,
    Model,
    ToolCall,
    ToolContext,
    tool,
)
from byssus.errors import InputError
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool, unknown_tool

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers
from tests.support.tools import call, context, prompted, properties, run, schema_of

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


# --- models of pydantic, msgspec and dataclasses ----------------------------------------------------------------------


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


class Crate(pydantic.BaseModel, Generic[T]):
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
    def grow(tree: Tree, box: Crate[int], boxes: list[Crate[str]]) -> str:
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
    with pytest.raises(InputError, match=r"'look' is an unbound method.*tool\(thing.method\)"):

        class Thing:
            @tool
            def look(self, city: str) -> None: ...


def test_two_contexts_are_refused() -> None:
    def look(one: ToolContext, two: ToolContext) -> None: ...

    with pytest.raises(InputError, match="only one parameter can be a ToolContext"):
        tool(look)


@pytest.mark.parametrize("timeout", [0, -1, True, "3", float("nan")])
def test_a_time_limit_that_is_none_is_refused(timeout: Any) -> None:
    def look() -> None: ...

    with pytest.raises(InputError, match="tool 'look': timeout must be a number of seconds above 0"):
        Tool(look, timeout=timeout)
