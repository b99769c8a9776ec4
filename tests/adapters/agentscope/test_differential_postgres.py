"""Our Postgres memory answers like AgentScope's InMemoryMemory."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.adapters.agentscope.differential import compare, postgres_schema

SEED = random.SystemRandom().randrange(10**6)


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_postgres_answers_as_upstream_does() -> None:
    with postgres_schema() as opener:
        assert asyncio.run(compare(opener, seed=SEED, sequences=40)) == 40 * 12
