"""What a tool returns: text, blocks, JSON or anything at all, as a model reads it and a thread keeps it."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import types
import uuid
from collections import OrderedDict, deque, namedtuple
from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic
import pytest

from byssus import (
    Agent,
    ImageContent,
    Model,
    RunResult,
    TextContent,
    ToolCall,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    tool,
)
from byssus.messages import encode
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool
from tests.support.cases import case
from tests.support.checkpointers import loaded
from tests.support.databases import Database
from tests.support.tools import call, results_of, returning, run

# --- results ----------------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Box(msgspec.Struct):
    size: float


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


# --- through an agent, and where storage matters through a database ---------------------------------------------------


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


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


def stored_result(database: Database, made: Any) -> tuple[ToolResultMessage, RunResult[Any]]:
    """Run the tool on a stored thread; its result, equal before and after a reload."""
    (found,) = stored_results(database, [made])
    return found


def stored_results(database: Database, tools: Sequence[Any]) -> list[tuple[ToolResultMessage, RunResult[Any]]]:
    """Run each tool on a stored thread of its own; their results, equal before and after a reload."""

    async def main() -> list[tuple[ToolResultMessage, RunResult[Any]]]:
        found, before = [], []
        async with database.checkpointer() as cp:
            for number, made in enumerate(tools):
                script = ScriptedProvider([[ToolCall("1", "t")], "done"])
                agent = Agent(
                    provider=script,
                    model=Model("m"),
                    tools=[Tool(made, name="t")],
                    checkpointer=cp,
                    thread_id=f"t{number}",
                )
                found.append(await agent.prompt("go"))
                before.append(list(agent.state.messages))
        async with database.checkpointer() as cp:
            threads = [await loaded(cp, f"t{number}") for number in range(len(tools))]
        assert [thread.messages for thread in threads] == before
        return [(results_of(thread.messages)[0], result) for thread, result in zip(threads, found, strict=True)]

    return asyncio.run(main())


def giving(value: Any) -> Any:
    return lambda: value


def test_details_of_any_type_are_stored_readable_and_reload_equal(database: Database) -> None:
    results = stored_results(database, [giving(ToolResult("done", details=value)) for value, _ in ODD.values()])
    for (name, (_, expected)), (stored, result) in zip(ODD.items(), results, strict=True):
        with case(name):
            assert result.text == "done"
            assert (stored.text, stored.is_error) == ("done", False)
            if expected is not None:
                assert stored.details == expected


def test_a_value_of_any_type_can_be_returned_and_is_no_failure(database: Database) -> None:
    results = stored_results(database, [giving(value) for value, _ in ODD.values()])
    for name, (stored, result) in zip(ODD, results, strict=True):
        with case(name):
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
