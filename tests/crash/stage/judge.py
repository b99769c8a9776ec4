"""What a new process finds in a database, and whether that is what others were told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from byssus.errors import ByssusError
from tests.crash.place import Place
from tests.crash.stage.actors import Actor, Broken, apart

Texts = Mapping[str, Sequence[str]]  # of messages, by thread


class Found(NamedTuple):
    """What a new process sees. `refusal` is the error with which it was refused, and `problems` are those of check."""

    texts: dict[str, list[str]]
    problems: list[str]
    refusal: str = ""

    @property
    def damage(self) -> str:
        """How the damage is named, if there is any."""
        return self.refusal or "; ".join(self.problems)


def look(place: Place) -> Found:
    """Open the database in a new process, check it and read all threads."""

    async def read() -> Found:
        try:
            async with place.checkpointer() as cp:
                problems = [f"{problem['what']}: {problem['detail']}" for problem in (await cp.check())["problems"]]
                texts = {}
                for info in await cp.threads(limit=10**6):
                    thread = await cp.load(info.id)
                    texts[info.id] = [getattr(message, "text", "") for message in thread.messages] if thread else []
                return Found(texts, problems)
        except ByssusError as error:
            return Found({}, [], f"{type(error).__name__}: {error}")

    return apart(read)


def acknowledged(actors: Iterable[Actor]) -> dict[str, list[str]]:
    """What actors were told that is stored, by thread: in the order of each actor."""
    told: dict[str, list[str]] = {}
    for actor in actors:
        for line in actor.lines("stored"):
            told.setdefault(line["thread"], []).append(line["text"])
    return told


def judge(place: Place, told: Texts, tried: Texts | None = None) -> Found:
    """All that was acknowledged is there, once; nothing is there that nobody tried; the database is sound."""
    found = look(place)
    if found.damage:
        raise Broken(f"the database is not sound: {found.damage}")
    judge_texts(found, told, tried)
    return found


def judge_texts(found: Found, told: Texts, tried: Texts | None = None) -> None:
    for thread, texts in told.items():
        there = Counter(found.texts.get(thread, []))
        if lost := [text for text in texts if not there[text]]:
            raise Broken(f"{len(lost)} of {len(texts)} acknowledged messages of {thread!r} are lost: {lost[:5]}")
        if twice := [text for text in texts if there[text] > 1]:
            raise Broken(f"messages of {thread!r} are there more than once: {twice[:5]}")
    for thread, there_texts in found.texts.items() if tried is not None else ():
        assert tried is not None
        may = Counter(tried.get(thread, []))
        if odd := [text for text, count in Counter(there_texts).items() if count > may[text]]:
            raise Broken(f"{thread!r} holds what nobody wrote there, or too often: {odd[:5]}")


def in_order(there: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether the texts are all there, in their order, whatever else is between them."""
    rest = iter(there)
    return all(text in rest for text in texts)


def judge_order(found: Found, told: Texts) -> None:
    for thread, texts in told.items():
        if not in_order(found.texts.get(thread, []), texts):
            raise Broken(f"{thread!r} is not in the order in which it was written: {found.texts.get(thread, [])[:20]}")


def expect(is_so: object, otherwise: str, *seen: Any) -> None:
    """Raise unless it is so."""
    if not is_so:
        raise Broken(otherwise + (f": {', '.join(map(repr, seen))}" if seen else ""))
