"""Our SQLite memory answers like AgentScope's InMemoryMemory; and the comparison would notice if it did not.

Each run compares other sequences. `make torture` compares more of them.
"""

from __future__ import annotations

import asyncio
import copy
import random
from pathlib import Path
from typing import Any

import pytest
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg

from tests.adapters.agentscope.differential import Difference, Opener, compare, sqlite_files

SEED = random.SystemRandom().randrange(10**6)


@pytest.mark.timeout(400)
def test_sqlite_answers_as_upstream_does(tmp_path: Path) -> None:
    with sqlite_files(tmp_path) as opener:
        assert asyncio.run(compare(opener, seed=SEED, sequences=100)) == 100 * 12


# --- the comparison itself --------------------------------------------------------------------------------------------


def kept(kind: type) -> Opener:
    """Memories that live as long as the opener does, as a database would."""
    memories: dict[tuple[str | None, str | None], Any] = {}

    def opener(user: str | None, session: str | None) -> Any:
        return memories.setdefault((user, session), kind())

    return opener


class Copying(InMemoryMemory):  # type: ignore[misc]
    """Upstream, but for the one thing that we do otherwise on purpose: what it gives out are copies."""

    async def get_memory(self, *args: Any, **kwargs: Any) -> list[Msg]:
        return copy.deepcopy(await super().get_memory(*args, **kwargs))


class MarksTwice(Copying):
    async def update_messages_mark(self, new_mark: Any, old_mark: Any = None, msg_ids: Any = None) -> int:
        for message, marks in self.content:
            if old_mark is None and new_mark in marks and (msg_ids is None or message.id in msg_ids):
                marks.append(new_mark)
        return int(await super().update_messages_mark(new_mark, old_mark, msg_ids))


class MarksOnce(Copying):
    async def add(self, memories: Any, marks: Any = None, *args: Any, **kwargs: Any) -> None:
        unique = list(dict.fromkeys(marks)) if isinstance(marks, list) and all(map(str, marks)) else marks
        await super().add(memories, unique, *args, **kwargs)


class CountsWhatItIsAsked(Copying):
    async def delete(self, msg_ids: Any, **kwargs: Any) -> int:
        await super().delete(msg_ids, **kwargs)
        return len(msg_ids)


class TakesAnIdOnce(Copying):
    async def add(self, memories: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(memories, list) and all(isinstance(each, Msg) for each in memories):
            memories = list({each.id: each for each in reversed(memories)}.values())[::-1]
        await super().add(memories, *args, **kwargs)


class ClearsTheSummary(Copying):
    async def clear(self) -> None:
        await super().clear()
        self._compressed_summary = ""


class KnowsNoEmptyMark(Copying):
    async def get_memory(self, mark: Any = None, exclude_mark: Any = None, *args: Any, **kwargs: Any) -> list[Msg]:
        return await super().get_memory(mark, exclude_mark or None, *args, **kwargs)


class SortsByTime(Copying):
    async def get_memory(self, *args: Any, **kwargs: Any) -> list[Msg]:
        return sorted(await super().get_memory(*args, **kwargs), key=lambda message: str(message.timestamp))


class LosesTheInvocation(Copying):
    async def get_memory(self, *args: Any, **kwargs: Any) -> list[Msg]:
        return [Msg.from_dict(message.to_dict()) for message in await super().get_memory(*args, **kwargs)]


class KeepsTheInput(Copying):
    async def add(self, memories: Any, *args: Any, **kwargs: Any) -> None:
        before = len(self.content)
        await super().add(memories, *args, **kwargs)
        if isinstance(memories, Msg) and len(self.content) > before:
            self.content[-1] = (memories, self.content[-1][1])


class MistakesOneForTrue(Copying):
    async def get_memory(self, *args: Any, **kwargs: Any) -> list[Msg]:
        found = await super().get_memory(*args, **kwargs)
        for message in found:
            message.metadata = {key: int(value) if value == 1 else value for key, value in message.metadata.items()}
        return found


def test_no_difference_is_found_where_there_is_none() -> None:
    assert asyncio.run(compare(kept(Copying), seed=SEED, sequences=100)) == 100 * 12


@pytest.mark.parametrize("kind", Copying.__subclasses__())
def test_each_mistake_is_found(kind: type) -> None:
    with pytest.raises(Difference, match=r"sequence \d+ of seed \d+"):
        asyncio.run(compare(kept(kind), seed=SEED, sequences=400))


def test_giving_out_what_is_stored_is_found() -> None:
    with pytest.raises(Difference):
        asyncio.run(compare(kept(InMemoryMemory), seed=SEED, sequences=400))


def test_a_mix_up_of_two_sessions_is_found() -> None:
    one = kept(Copying)
    with pytest.raises(Difference):
        asyncio.run(compare(lambda user, session: one(f"{user}-{session}", None), seed=SEED, sequences=400))


def test_what_only_the_object_knows_is_missed_in_the_next_one() -> None:
    one = kept(Copying)

    def forgetful(user: str | None, session: str | None) -> Any:
        memory = one(user, session)
        memory._compressed_summary = ""
        return memory

    with pytest.raises(Difference):
        asyncio.run(compare(forgetful, seed=SEED, sequences=400))
