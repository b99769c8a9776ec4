"""Memories of every kind as a fixture: what takes `memory` runs once for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.memories import KINDS, Driven, makers


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Driven]]:
    with makers(request.param, tmp_path_factory.mktemp("memory")) as made:
        yield made


@pytest.fixture
def memory(make: Callable[[], Driven]) -> Iterator[Driven]:
    made = make()
    yield made
    made.close()
