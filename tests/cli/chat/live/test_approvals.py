"""What a typed answer to a question about a tool call means, and what the transcript says of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from byssus.cli.chat.live.approvals import Decided, _decided, told
from byssus.cli.chat.live.drawn.board import ChatBoard
from byssus.errors import InputError
from byssus.values.decisions import Deny, Pending
from byssus.values.results import ToolResult


def _decide(answer: str, **call: Any) -> Decided | None:
    pending = Pending(
        **{"thread_id": "t", "call_id": "c", "tool_name": "pay", "arguments": {}, "reason": "approval"}
        | {"question": "", "asked_at": "2026-01-01"}
        | call
    )
    board = cast("ChatBoard", None)  # only an edit needs it
    return asyncio.run(_decided(board, pending, answer))


@pytest.mark.parametrize(
    ("answer", "decided", "text"),
    [
        ("Y", Decided("approve"), "approved"),
        ("n", Decided("deny"), "denied"),
        ("no not today", Decided(Deny("not today")), "denied: not today"),
        ("a", Decided("approve", always=True), "approved, always for this tool in this thread"),
    ],
)
def test_a_call_is_approved_or_denied(answer: str, decided: Decided, text: str) -> None:
    assert _decide(answer) == decided
    assert told(decided) == text


@pytest.mark.parametrize(
    ("answer", "decided", "text"),
    [
        ("yes", Decided("approve"), "approved"),
        ("n", Decided("deny"), "denied"),
        ("d reference 77", Decided(ToolResult("reference 77")), "it was done: reference 77"),
        (
            "done",
            Decided(ToolResult("A person checked: the call took effect.")),
            "it was done: A person checked: the call took effect.",
        ),
    ],
)
def test_an_interrupted_call_is_run_again_or_left_or_was_done(answer: str, decided: Decided, text: str) -> None:
    assert _decide(answer, reason="recovery") == decided
    assert told(decided) == text


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        ("", {}),
        ("y but", {}),
        ("d", {}),
        ("a", {"tool_name": "shell"}),
        ("a", {"approvers": 2}),
        ("e", {"approvers": 2}),
        ("a", {"reason": "recovery"}),
        ("e", {"reason": "recovery"}),
    ],
)
def test_other_answers_are_refused_with_those_that_there_are(answer: str, call: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"y (yes|run it again), n \[WHY\]"):
        _decide(answer, **call)
