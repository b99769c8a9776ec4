"""Random sequences of calls on a memory, each drawn from its seed and from nothing else.

A call holds its arguments as values: whoever makes it copies them, so that one call can be made on several memories.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from agentscope.message import Msg

LENGTH = 12
_LONG = "x" * 3000
_MARKS = ["hint", "compressed", "", "a", "a ", "记号", "o'clock", "%"]
_TEXTS = [
    *("", "hello", "你好, 世界", "🙂 astral", _LONG, "'; DROP TABLE messages; --", "%_\\", "\r\n"),
    *("lone \ud800 surrogate", "\udc00\ud800", "nul \x00 inside"),
]
_TIMES = [None, "2020-01-01 00:00:00.000", "1700000000", "yesterday"]
_NUMBERS = [0, -1, 1.0, 1.5, 1e100, 2**70, True, None]


class Mark(str, Enum):  # noqa: UP042 - what ReActAgent passes is made like this
    HINT = "hint"
    COMPRESSED = "compressed"


@dataclass
class Call:
    """One call of a method, or what is done with a memory besides."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    once: bool = False  # the messages go in as a generator
    spoil: bool = False  # whoever passed the arguments changes them afterwards

    def __str__(self) -> str:
        shown = [repr(value) for value in self.args] + [f"{name}={value!r}" for name, value in self.kwargs.items()]
        notes = [word for word, is_so in (("generator", self.once), ("spoilt afterwards", self.spoil)) if is_so]
        return f"{self.method}({', '.join(shown).replace(_LONG, 'x...')}){' # ' if notes else ''}{', '.join(notes)}"


# What is no method: another object on the same data, with the first one closed or still there, and changes to what a
# memory gave out.
REOPEN, BESIDE, SPOIL = "reopen", "open a second one", "spoil the answers"


class Sequence:
    """What one sequence does. Few marks and few messages, so that calls meet."""

    def __init__(self, seed: int, index: int, length: int = LENGTH) -> None:
        self._random = random.Random(f"{seed}/{index}")
        self.marks: list[str] = self._random.sample(_MARKS, 3)
        self._said: list[Msg] = []
        self.calls = [self._add(), *(self._draw() for _ in range(length - 1))]

    def _draw(self) -> Call:
        kinds: list[tuple[Callable[[], Call], int]] = [
            (self._add, 32),
            (self._delete, 8),
            (self._delete_by_mark, 7),
            (self._update_mark, 26),
            (self._summarise, 5),
            (self._get, 7),
            (self._mistake, 5),
            (lambda: Call("size"), 1),
            (lambda: Call("clear"), 2),
            (lambda: Call(REOPEN), 4),
            (lambda: Call(BESIDE), 2),
            (lambda: Call(SPOIL), 2),
        ]
        draw = self._random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        return draw()

    def _add(self) -> Call:
        some = [self._message() for _ in range(self._random.choice([0, 1, 1, 1, 2, 2, 3, 5]))]
        if some and self._chance(0.15):
            some.append(self._random.choice(some))
        form = self._random.choice(["one", "list", "list", "tuple", "generator", "none"])
        passed: Any = tuple(some) if form == "tuple" else some
        if form == "one" and some:
            passed = some[0]
        if form == "none" and self._chance(0.3):
            passed = None
        kwargs: dict[str, Any] = {}
        if self._chance(0.6):
            kwargs["marks"] = self._new_marks()
        if self._chance(0.15):
            kwargs["allow_duplicates"] = self._chance(0.8)
        return Call("add", (passed,), self._with_noise(kwargs), once=form == "generator", spoil=self._chance(0.3))

    def _delete(self) -> Call:
        ids = self._ids()
        form = self._random.choice([list, list, tuple, set])
        return Call("delete", (form(ids),), self._with_noise({}))

    def _delete_by_mark(self) -> Call:
        return Call("delete_by_mark", (self._random.choice([self._mark, self._mark, self._mark_list])(),))

    def _update_mark(self) -> Call:
        new = None if self._chance(0.3) else self._mark()
        kwargs: dict[str, Any] = {"old_mark": self._mark()} if self._chance(0.6) else {}
        if self._chance(0.1):
            kwargs["old_mark"] = new
        if self._chance(0.4):
            kwargs["msg_ids"] = self._ids()
        if self._chance(0.5):
            return Call("update_messages_mark", (), {"new_mark": new, **kwargs})
        return Call("update_messages_mark", (new,), kwargs)

    def _summarise(self) -> Call:
        return Call("update_compressed_summary", (self._random.choice(_TEXTS),))

    def _get(self) -> Call:
        kwargs: dict[str, Any] = {}
        for name in ("mark", "exclude_mark"):
            if self._chance(0.6):
                kwargs[name] = None if self._chance(0.1) else self._mark()
        if self._chance(0.3):
            kwargs["prepend_summary"] = self._chance(0.3)
        return Call("get_memory", (), self._with_noise(kwargs))

    def _mistake(self) -> Call:
        """What upstream refuses, and stores nothing of."""
        good = [self._message()]
        return self._random.choice(
            [
                Call("add", (good,), {"marks": ("a",)}),
                Call("add", (good,), {"marks": {"a"}}),
                Call("add", (good,), {"marks": 5}),
                Call("add", (good,), {"marks": ["a", 5]}),
                Call("add", ([],), {"marks": 5}),
                Call("add"),
                Call("add", ([*good, {"id": "x"}],)),
                Call("add", ("text",)),
                Call("get_memory", (5,)),
                Call("get_memory", (), {"exclude_mark": 5}),
                Call("delete_by_mark", ([5],)),
                Call("delete_by_mark", (["a", None],)),
                Call("delete_by_mark", (5,)),
                Call("delete_by_mark", (None,)),
            ]
        )

    def _message(self) -> Msg:
        """A new one, one that was there before, or another one with an id that was."""
        if self._said and self._chance(0.2):
            return self._random.choice(self._said)
        made = Msg(
            self._random.choice(["user", "Friday", "助手", ""]),
            self._content(),
            self._random.choice(["user", "assistant", "system"]),
            metadata=self._random.choice([None, {}, {"score": 1.0, "tags": ["x", {"y": None}]}, {"键": "\ud800\x00"}]),
            timestamp=self._random.choice(_TIMES),
            invocation_id=self._random.choice([None, None, "", "inv-1"]),
        )
        if self._said and self._chance(0.15):
            made.id = self._random.choice(self._said).id
        elif self._chance(0.9):  # else the one that it came with, which is another one each time
            made.id = self._random.choice(["m", "m-", "id ", "编号", "m%"]) + str(len(self._said))
        self._said.append(made)
        return made

    def _content(self) -> str | list[dict[str, Any]]:
        if self._chance(0.5):
            return self._text()
        return [self._block() for _ in range(self._random.randrange(4))]

    def _block(self) -> dict[str, Any]:
        called = f"call-{self._random.randrange(3)}"
        number = self._random.choice(_NUMBERS)
        return self._random.choice(
            [
                {"type": "text", "text": self._text()},
                {"type": "thinking", "thinking": self._text()},
                {"type": "tool_use", "id": called, "name": "weigh", "input": {"what": self._text(), "n": [number, {}]}},
                {"type": "tool_result", "id": called, "name": "weigh", "output": self._text()},
                {"type": "tool_result", "id": called, "name": "weigh", "output": [{"type": "text", "text": "three"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "custom", "": self._text(), "clé": {"z": 1, "a": [[], [number]]}},
            ]
        )

    def _text(self) -> str:
        return self._random.choice(_TEXTS)

    def _ids(self) -> list[str]:
        known = [message.id for message in self._said]
        some = self._random.choices(known, k=self._random.randrange(4)) if known else []
        return some + self._random.choice([[], [], ["missing"], ["missing", "missing"], ["\ud800", "nul \x00"]])

    def _new_marks(self) -> Any:
        kind = self._random.choice(["none", "one", "some", "empty"])
        return {"none": None, "one": self._mark(), "some": self._mark_list(), "empty": []}[kind]

    def _mark(self) -> str:
        mark = self._random.choice(self.marks)
        return Mark(mark) if mark in set(Mark) and self._chance(0.4) else mark

    def _mark_list(self) -> list[str]:
        return [self._mark() for _ in range(self._random.choice([0, 1, 2, 2, 3]))]

    def _with_noise(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Unknown arguments are allowed, and mean nothing."""
        return {**kwargs, "unheard_of": 1} if self._chance(0.05) else kwargs

    def _chance(self, share: float) -> bool:
        return self._random.random() < share
