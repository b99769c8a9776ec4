"""What OpenAI's models and their relatives accept: which of them reason, and how one asks them to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from byssus.errors import InputError
from byssus.providers.base import Model

_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BUDGETS = {0: "none", 2_048: "low", 8_192: "medium", 16_384: "high"}  # up to so many tokens, so much effort
O_SERIES = (4, 99)  # o1 to o4: after gpt-4, before gpt-5, and the first that reason
_SINCE: dict[tuple[int, int], tuple[str, ...]] = {
    O_SERIES: ("low", "medium", "high"),
    (5, 0): ("minimal", "low", "medium", "high"),
    (5, 1): ("none", "low", "medium", "high"),
    (5, 2): ("none", "low", "medium", "high", "xhigh"),
    (5, 6): ("none", "low", "medium", "high", "xhigh", "max"),
}


class Service(NamedTuple):
    """Who is asked: the host, and whether it is OpenAI itself (or Azure's copy of it)."""

    host: str
    own: bool


def generation(model_id: str) -> tuple[int, int]:
    """(5, 4) for gpt-5.4-mini. What is not by OpenAI, or has no number, is (0, 0)."""
    found = re.search(r"(?:^|[/:])(?:gpt-(\d)(?:\.(\d+))?(?!\d)|o\d(?![\w.]))", model_id)
    if found is None:
        return (0, 0)
    return (int(found[1]), int(found[2] or 0)) if found[1] else O_SERIES


def effort(model: Model, service: Service, *, with_tools: bool) -> dict[str, Any]:
    level = _level(model.reasoning)
    if service.own:
        return _own_effort(level, model.id, with_tools=with_tools)
    if level is None:
        return {}
    if service.host.endswith("deepseek.com"):
        on = {"thinking": {"type": "enabled"}, "reasoning_effort": _nearest(level, _LEVELS[2:])}
        return on if level != "none" else {"thinking": {"type": "disabled"}}
    if service.host.endswith("aliyuncs.com"):  # Qwen
        budget = {"thinking_budget": model.reasoning} if level != "none" and isinstance(model.reasoning, int) else {}
        return {"enable_thinking": level != "none", **budget}
    return {"reasoning_effort": level}


def _level(reasoning: str | int | None) -> str | None:
    if isinstance(reasoning, int):
        return next((level for budget, level in _BUDGETS.items() if reasoning <= budget), "high")
    if reasoning is None or reasoning in _LEVELS:
        return reasoning
    raise InputError(f"reasoning={reasoning!r} is unknown; use one of {', '.join(_LEVELS)}, or a number of tokens")


def _own_effort(level: str | None, model_id: str, *, with_tools: bool) -> dict[str, Any]:
    own = generation(model_id)
    if own < O_SERIES or "-chat" in model_id:
        return {}
    if with_tools and own >= (5, 6):
        return {"reasoning_effort": "none"}  # else refused, even if nothing is said about reasoning
    if level is None or (with_tools and own >= (5, 2)):  # refused next to tools, "none" included
        return {}
    return {"reasoning_effort": _nearest(level, _SINCE[max(since for since in _SINCE if since <= own)])}


def _nearest(level: str, known: Sequence[str]) -> str:
    at = _LEVELS.index(level)
    return min(known, key=lambda other: (abs(_LEVELS.index(other) - at), -_LEVELS.index(other)))
