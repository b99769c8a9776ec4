"""Structured output: `prompt(..., output=T)` gives a T, or says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import json
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from byssus import Agent, Deny, Limits, Model, ToolCall, ToolResult, UserMessage, tool
from byssus.errors import InputError, NetworkFailed, OutputInvalid
from byssus.events import AgentEnd
from byssus.messages import AssistantMessage
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.values.output import Output
from tests.support.agents import Heard, check_whole, hooks, look, make, within
from tests.support.databases import Database


class Line(msgspec.Struct):
    what: str
    price: float = 0.0


class Invoice(msgspec.Struct):
    number: int
    lines: list[Line] = []


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)


class Team(pydantic.BaseModel):
    lead: Person
    others: list[Person] = []


class Movie(TypedDict, total=False):
    title: str
    year: int


class Pair(NamedTuple):
    left: int
    right: str


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(msgspec.Struct, tag="cat"):
    lives: int


class Dog(msgspec.Struct, tag="dog"):
    tricks: list[str]


class Mixed(msgspec.Struct):
    who: Person
    where: Point
    when: datetime.date


class Tree(msgspec.Struct):
    name: str
    children: list[Tree] = []


VALUES: list[tuple[Any, Any, Any]] = [
    (Invoice, {"number": 7, "lines": [{"what": "tea", "price": 2.5}]}, Invoice(7, [Line("tea", 2.5)])),
    (Point, {"x": 1}, Point(1)),
    (Person, {"name": "Ann", "age": 3}, Person(name="Ann", age=3)),
    (Team, {"lead": {"name": "Ann", "age": 3}}, Team(lead=Person(name="Ann", age=3))),
    (Movie, {"title": "M"}, {"title": "M"}),
    (
        Mixed,
        {"who": {"name": "Ann", "age": 3}, "where": {"x": 1}, "when": "2026-01-02"},
        Mixed(Person(name="Ann", age=3), Point(1), datetime.date(2026, 1, 2)),
    ),
    (Tree, {"name": "a", "children": [{"name": "b"}]}, Tree("a", [Tree("b")])),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (dict, {"a": [None]}, {"a": [None]}),
    (list[Line], {"value": [{"what": "tea"}]}, [Line("tea")]),
    (list[Person], {"value": [{"name": "Ann", "age": 3}]}, [Person(name="Ann", age=3)]),
    (int, {"value": 5}, 5),
    (str, {"value": "five"}, "five"),
    (bool, {"value": False}, False),
    (decimal.Decimal, {"value": "1.50"}, decimal.Decimal("1.50")),
    (Literal["yes", "no"], {"value": "no"}, "no"),
    (Colour, {"value": "red"}, Colour.RED),
    (Pair, {"value": [1, "a"]}, Pair(1, "a")),
    (Cat | Dog, {"value": {"type": "dog", "tricks": ["sit"]}}, Dog(["sit"])),
    (Invoice | None, {"value": None}, None),
    (int | list[str], {"value": ["a"]}, ["a"]),
    (Annotated[int, msgspec.Meta(ge=3)], {"value": 3}, 3),
]


class Native(ScriptedProvider):
    """A provider that has a mechanism of its own."""

    structured_output = True


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "reply", "value"), VALUES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("native", [True, False], ids=["native", "in words"])
def test_a_reply_becomes_a_value_of_the_type(kind: Any, reply: Any, value: Any, native: bool) -> None:
    provider = (Native if native else ScriptedProvider)([json.dumps(reply)])
    result = within(make(provider).prompt("go", output=kind))
    assert (result.output, result.error, result.stop_reason) == (value, None, "stop")
    assert type(result.output) is type(value)


def references(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
        return own.union(*map(references, schema.values()))
    return set().union(*map(references, schema)) if isinstance(schema, list) else set()


@pytest.mark.parametrize("kind", [kind for kind, _, _ in VALUES], ids=str)
def test_the_schema_is_an_object_of_plain_json_whose_references_lead_somewhere(kind: Any) -> None:
    schema = Output(kind).schema
    assert schema["type"] == "object"
    assert json.loads(json.dumps(schema)) == schema
    assert references(schema) <= {f"#/$defs/{name}" for name in schema.get("$defs", {})}


INVOICE = '{"number": 7}'


@pytest.mark.parametrize(
    "text",
    [
        INVOICE,
        f"  \n{INVOICE}\n",
        f"```json\n{INVOICE}\n```",
        f"```\n{INVOICE}```",
        f"Here it is:\n```JSON\n{INVOICE}\n```\nAnything else?",
        f"Sure! {INVOICE} That is all [1].",
        f"See [1]: {INVOICE}",
        '{"number": 7, "lines": [], "unknown": "```json {}```"}',
        'Well: ```json\n{"number": 7, "unknown": "```{"}\n```',
    ],
)
def test_json_is_found_where_models_put_it(text: str) -> None:
    assert Output(Invoice).read(text) == Invoice(7)


@pytest.mark.parametrize("text", ["[1, 2]", '{"value": [1, 2]}', "```json\n[1, 2]\n```", "It is [1, 2]."])
def test_a_list_is_found_with_its_wrapping_and_without(text: str) -> None:
    assert Output(list[int]).read(text) == [1, 2]


@pytest.mark.parametrize("text", ["42", '{"value": 42}', "```json\n42\n```"])
def test_a_number_is_found_with_its_wrapping_and_without(text: str) -> None:
    assert Output(int).read(text) == 42


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("Sorry, I cannot.", "Expecting value"),
        ('{"number": 7', "delimiter"),
        ('{"number": "seven"}', r"Expected `int`, got `str` - at `\$.number`"),
        ('{"number": NaN}', "NaN is no JSON"),
        ("[1]", "Expected `object`, got `array`"),
        ("{}", "missing required field `number`"),
        ('{"number": 7} or {"number": 8}', "Extra data"),
        ("9" * 10_000, "."),
        ("[" * 100_000, "."),
        ('{"a":' * 100_000, "."),
        ("\ud800\0", "."),
    ],
)
def test_a_reply_that_does_not_fit_is_refused_with_what_is_wrong_and_what_it_was(text: str, words: str) -> None:
    with pytest.raises(OutputInvalid, match=f"no valid Invoice: .*{words}") as caught:
        Output(Invoice).read(text)
    assert len(str(caught.value)) < 1_000


def test_the_checks_of_a_pydantic_model_count() -> None:
    with pytest.raises(OutputInvalid, match="age"):
        Output(Person).read('{"name": "Ann", "age": -1}')
    with pytest.raises(OutputInvalid, match="age"):
        Output(list[Person]).read('{"value": [{"name": "Ann", "age": -1}]}')


def test_a_type_whose_own_check_raises_anything_is_a_reply_that_does_not_fit() -> None:
    class Fussy(msgspec.Struct):
        number: int

        def __post_init__(self) -> None:
            _ = 1 / self.number
            raise KeyError(self.number)

    for number in (0, 1):
        with pytest.raises(OutputInvalid, match="Fussy"):
            Output(Fussy).read(f'{{"number": {number}}}')


@given(st.text())
def test_no_text_breaks_the_reading(text: str) -> None:
    with contextlib.suppress(OutputInvalid):
        assert isinstance(Output(Invoice).read(text), Invoice)


# --- types that cannot be described -----------------------------------------------------------------------------------


class Strange:
    pass


class Callback(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    what: Strange


@dataclasses.dataclass
class Dangling:
    other: Missing  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    "kind",
    [Strange, list[Strange], Callback, Dangling, Line | Invoice, Person | Line, 5, "Invoice", [int], Invoice(1), len],
    ids=str,
)
def test_a_type_that_cannot_be_described_is_refused_before_anything_is_stored(database: Database, kind: Any) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            agent = make([], checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            with pytest.raises(InputError, match=r"output=.* cannot be described to a model") as caught:
                await agent.prompt("go", output=kind)
            assert repr(kind) in str(caught.value)
            assert heard == []
            assert await cp.load("t") is None

    within(main())


# --- asking -----------------------------------------------------------------------------------------------------------


def test_the_schema_goes_to_a_provider_with_a_mechanism_of_its_own_and_not_into_the_prompt() -> None:
    provider = Native([INVOICE])
    within(make(provider, system_prompt="Be exact.").prompt("go", output=Invoice))
    (request,) = provider.requests
    assert request.output == Output(Invoice).schema
    assert request.system_prompt == "Be exact."


@pytest.mark.parametrize("prompt", ["Be exact.", ""])
def test_the_schema_goes_into_the_prompt_for_a_provider_without_one(prompt: str) -> None:
    provider = ScriptedProvider([INVOICE, "hello"])
    agent = make(provider, system_prompt=prompt)
    within(agent.prompt("go", output=Invoice))
    within(agent.prompt("hi"))
    asked, after = provider.requests
    assert asked.system_prompt == f"{prompt}\n\n{Output(Invoice).instruction()}".strip()
    assert '"number"' in asked.system_prompt
    assert (after.system_prompt, after.output) == (prompt, None)


@pytest.mark.parametrize("order", [1, -1])
def test_each_model_of_a_fallback_list_is_told_the_schema_in_its_own_way(order: int) -> None:
    class Plain(ScriptedProvider):
        name = "plain"

    gone = NetworkFailed("gone")
    native, plain = Native([gone if order == 1 else INVOICE]), Plain([INVOICE if order == 1 else gone])
    models = [Model("a", provider="scripted"), Model("b", provider="plain")][::order]
    agent = Agent(provider=[native, plain], model=models, max_retries=0)
    assert within(agent.prompt("go", output=Invoice)).output == Invoice(7)
    assert "JSON schema" not in native.requests[0].system_prompt
    assert native.requests[0].output == Output(Invoice).schema
    assert "JSON schema" in plain.requests[0].system_prompt


def test_structured_output_works_together_with_tools_and_middleware() -> None:
    provider = ScriptedProvider([[ToolCall("1", "look")], [ToolCall("2", "look")], f"<{INVOICE}>"])
    strip = hooks(
        after_model_response=lambda m: AssistantMessage(m.text.strip("<>")) if m.text else None,
        before_tool_call=lambda call: Deny("no") if call.id == "2" else None,
    )
    result = within(make(provider, tools=[look], middleware=[strip]).prompt("go", output=Invoice))
    assert result.output == Invoice(7)
    assert [len(request.tools) for request in provider.requests] == [1, 1, 1]
    assert all("JSON schema" in request.system_prompt for request in provider.requests)


def test_only_the_final_reply_is_read() -> None:
    provider = ScriptedProvider([[ToolCall("1", "look")], "not yet", INVOICE])
    agent = make(provider, tools=[look])
    agent.follow_up("And now in numbers.")
    result = within(agent.prompt("go", output=Invoice))
    assert result.output == Invoice(7)
    assert provider.requests[-1].messages[-1].text == "And now in numbers."


# --- the repair round -------------------------------------------------------------------------------------------------


def test_a_reply_that_does_not_fit_gets_one_chance_with_the_error_told(database: Database) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(["seven", INVOICE])
            agent = make(provider, checkpointer=cp, thread_id="t")
            result = await agent.prompt("go", output=Invoice)
            assert (result.output, result.error, result.stop_reason) == (Invoice(7), None, "stop")
            assert result.text == INVOICE
            said = provider.requests[1].messages[-1]
            assert isinstance(said, UserMessage)
            assert "no valid Invoice" in said.text
            assert "'seven'" in said.text
            assert '"number"' in said.text  # the schema again
            thread = await cp.load("t")
            assert thread is not None
            assert [message.role for message in thread.messages] == ["user", "assistant"] * 2

    within(main())


def test_a_reply_that_does_not_fit_the_second_time_either_is_the_runs_error_and_the_thread_goes_on(
    database: Database,
) -> None:
    async def main() -> None:
        async with database.checkpointer() as cp:
            provider = ScriptedProvider(["seven", "SEVEN", INVOICE, "eight", INVOICE, "fine"])
            agent = make(provider, checkpointer=cp, thread_id="t")
            heard = Heard(agent)
            result = await agent.prompt("go", output=Invoice)
            check_whole(heard)
            assert (result.output, result.stop_reason, result.text) == (None, "error", "SEVEN")  # type: ignore[comparison-overlap]
            assert isinstance(result.error, OutputInvalid)
            assert "SEVEN" in str(result.error)
            assert agent.state.error is result.error
            (end,) = heard.of(AgentEnd)
            assert end.error is not None
            assert end.error.kind == "OutputInvalid"
            with pytest.raises(OutputInvalid):
                result.raise_for_error()
            assert len(provider.requests) == 2
            assert (await agent.prompt("again", output=Invoice)).output == Invoice(7)
            assert (await agent.prompt("and again", output=Invoice)).output == Invoice(7)  # a chance in each run
            plain = await agent.prompt("thanks")
            assert (plain.text, plain.output, plain.error) == ("fine", None, None)

    within(main())


def test_a_repair_may_use_tools() -> None:
    provider = ScriptedProvider(["seven", [ToolCall("1", "look")], INVOICE])
    assert within(make(provider, tools=[look]).prompt("go", output=Invoice)).output == Invoice(7)


def test_a_reply_that_was_cut_off_is_repaired_too() -> None:
    provider = ScriptedProvider([AssistantMessage('{"number": 7, "lines": [', "length"), INVOICE])
    result = within(make(provider).prompt("go", output=Invoice))
    assert (result.output, result.stop_reason) == (Invoice(7), "stop")


def test_a_failing_model_is_told_as_such_and_not_as_a_bad_reply() -> None:
    result = within(make([NetworkFailed("gone")], max_retries=0).prompt("go", output=Invoice))
    assert isinstance(result.error, NetworkFailed)
    assert result.output is None


def test_a_model_that_fails_in_the_repair_round_is_told_as_such() -> None:
    result = within(make(["seven", NetworkFailed("gone")], max_retries=0).prompt("go", output=Invoice))
    assert isinstance(result.error, NetworkFailed)
    assert result.stop_reason == "error"


def test_a_run_that_ends_before_its_repair_leaves_nothing_behind_for_the_next_one() -> None:
    provider = ScriptedProvider(["seven", "hello"])
    agent = make(provider, limits=Limits(turns=1))
    result = within(agent.prompt("go", output=Invoice))
    assert (result.stop_reason, result.output) == ("turn_limit", None)  # type: ignore[comparison-overlap]
    assert isinstance(result.error, OutputInvalid)
    assert within(agent.prompt("hi")).text == "hello"
    assert [message.text for message in provider.requests[1].messages] == ["go", "seven", "hi"]


def test_a_run_that_a_tool_or_a_hook_ends_early_says_that_there_is_no_output() -> None:
    @tool
    def finish() -> ToolResult:
        return ToolResult("that is all", end_run=True)

    by_tool = within(make([[ToolCall("1", "finish")]], tools=[finish]).prompt("go", output=Invoice))
    stop = hooks(should_stop_after_turn=lambda message, results: True)
    by_hook = within(make(["seven"], middleware=[stop]).prompt("go", output=Invoice))
    for result in (by_tool, by_hook):
        assert (result.stop_reason, result.output) == ("stopped", None)  # type: ignore[comparison-overlap]
        assert isinstance(result.error, OutputInvalid)
    fitting = within(make([INVOICE], middleware=[stop]).prompt("go", output=Invoice))
    assert (fitting.stop_reason, fitting.output, fitting.error) == ("stopped", Invoice(7), None)


def test_an_aborted_run_has_no_output_and_no_error() -> None:
    def stop(request: Request) -> str:
        agent.abort()
        return INVOICE

    agent = make([stop])
    result = within(agent.prompt("go", output=Invoice))
    assert (result.stop_reason, result.output, result.error) == ("aborted", None, None)  # type: ignore[comparison-overlap]
