"""Compression: old messages are marked, and a summary that a model has written stands for them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from byssus import (
    Model,
)
from byssus.errors import (
    ByssusError,
    InputError,
    ProviderError,
)
from byssus.memory import Msg, compress
from byssus.providers.scripted import ScriptedProvider
from tests.support.databases import Database
from tests.support.memories import TOLD, Driven, ids, msg, msgs, stored, texts

MODEL = Model("m")


def naming(text: str) -> str:
    """A summary that names all messages that the text tells of, or that a summary before it has named."""
    return " ".join(dict.fromkeys(re.findall(r"text of \w+", text)))


def test_all_but_the_last_messages_are_summed_up_and_marked(memory: Driven) -> None:
    memory.add(msgs(*"123456"))
    asked: list[str] = []

    def write(text: str) -> str:
        asked.append(text)
        return f" {naming(text)}\n"

    assert memory.run(compress(memory.memory, write, keep=4)) == "text of 1 text of 2"
    assert ids(memory.again().get_memory("compressed", prepend_summary=False)) == ["1", "2"]
    assert texts(memory.get_memory(exclude_mark="compressed"))[:2] == ["text of 1 text of 2", "text of 3"]
    assert memory.size() == 6
    assert memory.run(compress(memory.memory, write, keep=2)) == "text of 1 text of 2 text of 3 text of 4"
    assert "text of 1 text of 2" in asked[1]  # the first summary
    assert len(re.findall("text of", asked[1])) == 4
    assert memory.run(compress(memory.memory, write, keep=2)) is None
    assert memory.run(compress(memory.memory, write)) is None
    assert len(asked) == 2
    assert memory.compressed_summary() == "text of 1 text of 2 text of 3 text of 4"


def test_a_model_is_asked_through_its_provider(memory: Driven) -> None:
    memory.add([msg("one", "1"), msg([{"type": "text", "text": "two"}], "2", role="assistant"), msg("three", "3")])
    with ScriptedProvider([" all in short "]) as provider:
        made = memory.run(
            compress(memory.memory, MODEL, provider=provider, keep=1, mark="done", instruction="In short!")
        )
        assert made == "all in short"
        (request,) = provider.requests
        assert (request.system_prompt, request.model) == ("In short!", MODEL)
        (sent,) = request.messages
        assert "one" in sent.text
        assert "two" in sent.text
        assert "three" not in sent.text
    assert ids(memory.get_memory("done", prepend_summary=False)) == ["1", "2"]
    assert memory.get_memory("compressed", prepend_summary=False) == []


def test_a_function_that_asks_a_model_may_be_awaited_and_is_told_what_to_do(memory: Driven) -> None:
    memory.add(msgs("1", "2"))
    asked: list[str] = []

    async def write(text: str) -> str:
        asked.append(text)
        await asyncio.sleep(0)
        return "so far"

    assert memory.run(compress(memory.memory, write, keep=0, instruction="In short!")) == "so far"
    assert asked[0].startswith("In short!")
    assert texts(memory.get_memory(exclude_mark="compressed")) == ["so far"]


@pytest.mark.parametrize(("keep", "expected"), [(5, 1), (4, 1), (3, 1), (2, 4), (1, 5), (0, 6), (6, 0), (100, 0)])
def test_a_call_and_its_results_stay_together(memory: Driven, keep: int, expected: int) -> None:
    memory.add([TOLD[0], *TOLD[1:4], TOLD[5], msg("last")])
    if memory.run(compress(memory.memory, lambda text: "so far", keep=keep)) is None:
        assert expected == 0
    assert len(memory.get_memory("compressed", prepend_summary=False)) == expected


class Broken(Exception):
    """What somebody's function raises."""


def breaking(text: str) -> str:
    raise Broken


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (breaking, Broken),
        (lambda text: " \n", ProviderError),
        (lambda text: 5, InputError),
        (5, InputError),
        (ScriptedProvider([ProviderError("no")]), ProviderError),
        (ScriptedProvider([""]), ProviderError),
    ],
    ids=["raises", "says nothing", "says no text", "no function", "provider fails", "provider says nothing"],
)
def test_a_model_that_fails_leaves_the_memory_as_it_was(memory: Driven, model: Any, error: type[Exception]) -> None:
    memory.add(msgs("1", "2"))
    memory.update_compressed_summary("before")
    options: dict[str, Any] = {}
    if isinstance(model, ScriptedProvider):
        model, options = MODEL, {"provider": ScriptedProvider(model._steps)}
    with pytest.raises(error):
        memory.run(compress(memory.memory, model, keep=0, **options))
    assert memory.compressed_summary() == "before"
    assert memory.get_memory("compressed", prepend_summary=False) == []


@pytest.mark.parametrize("keep", [-1, 1.5, "3", True, None])
def test_how_many_messages_are_kept_is_a_number(memory: Driven, keep: Any) -> None:
    with pytest.raises(InputError, match="keep must be a number"):
        memory.run(compress(memory.memory, naming, keep=keep))


def test_a_model_of_an_unknown_provider_cannot_be_asked(memory: Driven) -> None:
    with pytest.raises(InputError, match=r"pass provider=\.\.\."):
        memory.run(compress(memory.memory, Model("m", "nobody")))


def test_of_two_compressions_at_once_the_later_one_takes_in_what_the_other_has_done(memory: Driven) -> None:
    memory.add(msgs(*"123456"))
    asked: list[str] = []

    async def both() -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def late(text: str) -> str:
            asked.append(naming(text))
            begun.set()
            await over.wait()
            return naming(text)

        slow = asyncio.create_task(compress(memory.memory, late, keep=2))
        await begun.wait()
        assert await compress(memory.memory, naming, keep=4) == "text of 1 text of 2"
        over.set()
        assert await slow == "text of 1 text of 2 text of 3 text of 4"

    memory.run(both())
    assert asked == ["text of 1 text of 2 text of 3 text of 4"] * 2
    assert ids(memory.get_memory("compressed", prepend_summary=False)) == ["1", "2", "3", "4"]
    assert memory.compressed_summary() == "text of 1 text of 2 text of 3 text of 4"


def test_who_is_always_too_late_to_compress_gives_up_and_changes_nothing(memory: Driven) -> None:
    memory.add(msgs("1", "2"))
    tries: list[str] = []

    async def write(text: str) -> str:
        tries.append(text)
        await memory.memory.update_compressed_summary(f"of another {len(tries)}")
        return "too late"

    with pytest.raises(ByssusError, match="another process compressed the memory at the same time"):
        memory.run(compress(memory.memory, write, keep=0))
    assert memory.compressed_summary() == f"of another {len(tries)}"
    assert memory.get_memory("compressed", prepend_summary=False) == []


def test_a_compression_marks_nothing_that_it_has_not_summed_up(database: Database) -> None:
    async def main() -> None:
        async with stored(database) as memory:
            await memory.add(msgs("1", "2"))
            await memory.add(msg("another text", "1"), allow_duplicates=True)
            assert await compress(memory, lambda _: "summed up", keep=1) == "summed up"
            assert texts(await memory.get_memory(exclude_mark="compressed"))[-1] == "another text"

    asyncio.run(main())


def test_a_provider_that_knows_its_model_can_write_the_summary(database: Database) -> None:
    async def main() -> None:
        async with stored(database) as memory:
            await memory.add(msgs("1", "2"))
            with ScriptedProvider(["summed up"]) as provider:
                assert await compress(memory, provider, keep=1) == "summed up"
            assert texts(await memory.get_memory(exclude_mark="compressed")) == ["summed up", "text of 2"]

    asyncio.run(main())


def test_the_class_of_a_provider_writes_no_summary(database: Database) -> None:
    async def main() -> None:
        async with stored(database) as memory:
            await memory.add(msgs("1", "2"))
            with pytest.raises(InputError, match=r"got the class; write ScriptedProvider\(\.\.\.\)"):
                await compress(memory, ScriptedProvider, keep=1)  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("results", [0, 1])
def test_a_call_whose_results_have_not_all_come_is_not_compressed(database: Database, keep: int, results: int) -> None:
    calls = [{"type": "tool_use", "id": str(number), "name": "look", "input": {}} for number in (1, 2)]
    answers = [
        Msg("system", [{"type": "tool_result", "id": str(number), "name": "look", "output": "seen"}], "system")
        for number in (1, 2)
    ]

    async def main() -> None:
        async with stored(database) as memory:
            await memory.add([msg("hello"), Msg("a", calls, "assistant"), *answers[:results]])
            await compress(memory, lambda _: "summed up", keep=keep)
            await memory.add(answers[results:])
            left: list[Any] = [
                block["id"]
                for message in await memory.get_memory(exclude_mark="compressed", prepend_summary=False)
                for block in message.get_content_blocks(["tool_use", "tool_result"])
            ]
            assert sorted(left) == ["1", "1", "2", "2"]

    asyncio.run(main())
