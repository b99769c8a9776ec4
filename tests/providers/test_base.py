"""Model: what can be asked of it is checked when it is made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from byssus import Model, Prices
from byssus.errors import InputError


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"id": ""}, r"Model\(id=''\): id must be the name of a model"),
        ({"id": " "}, "id must be"),
        ({"id": None}, "id=None"),
        ({"provider": None}, r"Model\(provider=None\): provider must be the name of a provider, a string"),
        ({"temperature": "hot"}, r"Model\(temperature='hot'\): temperature must be a number from 0 up, or None"),
        ({"temperature": True}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens must be a number of tokens above 0"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"context_window": "8k"}, "context_window='8k'"),
        ({"reasoning": 0.5}, "reasoning=0.5.*'low', 'medium' or 'high'"),
        ({"prices": 3}, r"prices must be Prices\(\.\.\.\)"),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_its_field(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Model(**{"id": "m", **options})


def test_what_services_take_is_taken() -> None:
    Model("m", "openai", 1, 0, "high", 1_000_000, Prices(1.0))
    Model("m", max_tokens=10, temperature=1.5, reasoning=0)
