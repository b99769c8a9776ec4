"""What the tests of accounts share: JSON as deep as it goes, and a session that another process is using."""

from __future__ import annotations

from typing import Any, TypeVar

from byssus.queries.log import threads
from byssus.queries.log.leases import Claim
from byssus.storage import AgentStorage
from byssus.values.thread_key import ThreadKey
from tests.support.leases import FAR_AWAY

T = TypeVar("T")


def known(found: T | None) -> T:
    """What a read has found, which must be there."""
    assert found is not None
    return found


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def drive(storage: AgentStorage, session_id: str) -> None:
    """Somebody far away begins a run on the session."""
    storage.store.write_now(threads.append, ThreadKey("", session_id), [], by=Claim(FAR_AWAY, "their-run", 30))
