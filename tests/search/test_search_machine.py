"""Random writing, forking, rewinding, editing, deleting, indexing: both databases find what a scan finds."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from byssus.accounts import sessions, tool_log, users
from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.messages import AssistantMessage, Message, ToolResultMessage, UserMessage
from byssus.queries.search import index as queries
from byssus.search import search as searching
from byssus.search import tokens
from byssus.search.index import Indexer
from byssus.storage import SearchHit
from byssus.store.database import Tx
from byssus.values.checkpoints import keep_last
from tests.support.databases import DATABASES, Database

T = TypeVar("T")

EXAMPLES = int(os.environ.get("BYSSUS_EXAMPLES", "10"))
TABLES = ("hidden", "inherited", "checkpoints", "tool_calls", "messages", "segments", "branches", "threads", "users")
PIECES = [
    *(
        "你",
        "好",
        "你好",
        "世界",
        "机",
        "ガ",
        "한국",
        "ไทย",
        "run",
        "running",
        "runs",
        "cat",
        "Cat",
        "hello_world",
        "100%",
    ),
    *(
        "C++",
        "café",
        "cafe",
        "iPhone",
        "n1",
        "-",
        "_",
        ".",
        "%",
        "'",
        "\n",
        " ",
        " ",
        " ",
        "\uff0c",
        "ß",
        "\u0301",
        "\U0001f44d",
    ),
]
any_number = st.integers(0, 40)
any_text = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
any_term = st.tuples(st.sampled_from(["", "", "", "-"]), st.sampled_from(["", "", '"']), any_text).map(
    lambda parts: f"{parts[0]}{parts[1]}{parts[2].strip()}{parts[1]}"
)
any_query = st.one_of(
    st.sampled_from([piece for piece in PIECES if piece.isalnum()]), st.lists(any_term, max_size=3).map(" ".join)
)


class StoredMessage:
    """A message or a tool call of the model. All threads that show it share it."""

    def __init__(self, number: int, role: str, text: str, thread: str) -> None:
        self.number, self.role, self.text, self.thread = number, role, text, thread
        self.is_call = False


class Searching(RuleBasedStateMachine):
    """Both databases beside a list of what each thread shows. A search is compared with a scan of that."""

    def __init__(self, cps: list[Checkpointer], runner: asyncio.Runner) -> None:
        super().__init__()
        self.cps, self.runner = cps, runner
        self.numbers = itertools.count(1)
        self.threads: dict[str, list[StoredMessage]] = {}
        self.calls: dict[str, list[StoredMessage]] = {}
        self.names: list[dict[str, int]] = [{}, {}]  # the ids of calls, by database

    def run(self, *doing: Coroutine[Any, Any, T]) -> list[T]:
        return [self.runner.run(each) for each in doing]

    def some_thread(self, number: int) -> str:
        return sorted(self.threads)[number % len(self.threads)]

    @initialize()
    def begin(self) -> None:
        for cp in self.cps:
            cp.store.write_now(_clear)
        for name in ("ann", "bob"):
            self.run(*(users.create_user(cp.store, name, user_id=name) for cp in self.cps))

    # --- writing ------------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(["t", "u"]),
        role=st.sampled_from(["user", "assistant", "tool"]),
        texts=st.lists(any_text, min_size=1, max_size=3),
    )
    def append(self, name: str, role: str, texts: list[str]) -> None:
        said = [StoredMessage(next(self.numbers), role, text, name) for text in texts]
        is_new = name not in self.threads
        self.run(*(cp.append(name, [_message(each) for each in said]) for cp in self.cps))
        self.threads.setdefault(name, []).extend(said)
        if is_new:
            self.run(*(sessions.update_session(cp.store, name, user_id=_owner(name)) for cp in self.cps))

    @precondition(lambda self: self.threads)
    @rule(which=any_number, text=any_text)
    def log(self, which: int, text: str) -> None:
        name = self.some_thread(which)
        said = StoredMessage(next(self.numbers), "tool", text, name)
        said.is_call = True
        ids = self.run(*(tool_log.log_tool_call(cp.store, name, "look", {"x": [text]}, None, 0) for cp in self.cps))
        for known, each in zip(self.names, ids, strict=True):
            known[each] = said.number
        self.calls.setdefault(name, []).append(said)

    @precondition(lambda self: 0 < len(self.threads) < 5)
    @rule(which=any_number, at=any_number)
    def fork(self, which: int, at: int) -> None:
        name, new = self.some_thread(which), f"fork {next(self.numbers)}"
        shown = self.threads[name]
        place = at % (len(shown) + 1)
        points = [0 if place == 0 else self._seqs(cp, name)[place - 1] for cp in self.cps]
        self.run(*(cp.fork(name, point, new_id=new) for cp, point in zip(self.cps, points, strict=True)))
        self.threads[new] = shown[:place]
        self.run(*(sessions.update_session(cp.store, new, user_id=_owner(new)) for cp in self.cps))

    def _seqs(self, cp: Checkpointer, name: str) -> list[int]:
        thread = self.runner.run(cp.load(name))
        assert thread is not None
        return list(thread.seqs)

    @precondition(lambda self: self.threads)
    @rule(which=any_number, at=any_number)
    def rewind(self, which: int, at: int) -> None:
        name = self.some_thread(which)
        place = at % (len(self.threads[name]) + 1)
        points = [0 if place == 0 else self._seqs(cp, name)[place - 1] for cp in self.cps]
        self.run(*(cp.rewind(name, point) for cp, point in zip(self.cps, points, strict=True)))
        self.threads[name] = self.threads[name][:place]

    @precondition(lambda self: any(self.threads.values()))
    @rule(which=any_number, at=any_number, text=any_text)
    def edit(self, which: int, at: int, text: str) -> None:
        name = self.some_thread(which)
        shown = self.threads[name]
        if not shown:
            return
        old = shown[at % len(shown)]
        self.run(*(sessions.update_message(cp.store, name, f"m{old.number}", text) for cp in self.cps))
        new = StoredMessage(old.number, old.role, text, name)
        self.threads[name] = [new if each is old else each for each in shown]

    @precondition(lambda self: any(self.threads.values()))
    @rule(which=any_number, at=any_number)
    def delete_message(self, which: int, at: int) -> None:
        name = self.some_thread(which)
        shown = self.threads[name]
        if not shown:
            return
        old = shown[at % len(shown)]
        self.run(*(sessions.delete_message(cp.store, name, f"m{old.number}") for cp in self.cps))
        self.threads[name] = [each for each in shown if each is not old]

    @precondition(lambda self: self.threads)
    @rule(which=any_number)
    def prune(self, which: int) -> None:
        name = self.some_thread(which)
        self.run(*(cp.prune(name, keep_last(1)) for cp in self.cps))

    @precondition(lambda self: self.threads)
    @rule(which=any_number)
    def delete_thread(self, which: int) -> None:
        name = self.some_thread(which)
        self.run(*(cp.delete_thread(name) for cp in self.cps))
        del self.threads[name]
        self.calls.pop(name, None)

    # --- the index ----------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def index_some(self, count: int) -> None:
        self.run(*(searching.index(cp.store, count) for cp in self.cps))

    @rule()
    def index_all(self) -> None:
        self.run(*(searching.index(cp.store) for cp in self.cps))

    @rule()
    def reset(self) -> None:
        for cp in self.cps:
            cp.store.write_now(queries.reset)

    # --- searching ----------------------------------------------------------------------------------------------------

    @rule(
        query=any_query,
        whose=st.sampled_from([{}, {}, {"user_id": "ann"}, {"session_id": "t"}, {"user_id": "bob", "session_id": "u"}]),
        role=st.sampled_from([None, None, "user", "tool"]),
        page=st.sampled_from([(100, 0), (3, 0), (2, 1)]),
    )
    def search(self, query: str, whose: dict[str, str], role: str | None, page: tuple[int, int]) -> None:
        limit, offset = page
        options: dict[str, Any] = {**whose, "role": role, "limit": limit, "offset": offset}
        try:
            matcher = tokens.parse(query)
        except InputError:
            for cp in self.cps:
                with pytest.raises(InputError):
                    self.runner.run(searching.search(cp.store, query, **options))
            return
        newest = self.run(*(searching.search(cp.store, query, **options) for cp in self.cps))
        best = self.run(*(searching.search(cp.store, query, order="relevance", **options) for cp in self.cps))
        for hits in (newest, best):
            assert self._plain(0, hits[0]) == self._plain(1, hits[1])
        options |= {"limit": 1_000, "offset": 0}
        every = self.run(*(searching.search(cp.store, query, **options) for cp in self.cps))
        assert every[0][offset : offset + limit] == newest[0]
        self._compare(every[0], matcher, whose, role)

    def _compare(self, hits: list[SearchHit], matcher: tokens.Matcher, whose: dict[str, str], role: str | None) -> None:
        passing = {
            name
            for name in self.threads
            if whose.get("session_id", name) == name and whose.get("user_id", _owner(name)) == _owner(name)
        }
        expected = {
            each
            for source in (self.threads, self.calls)
            for name in passing & source.keys()
            for each in source[name]
            if (role is None or each.role == role) and matcher.find(each.text)
        }
        assert len(hits) == len(expected)
        found = {(self._number(0, hit), hit["content"], hit["role"], hit["kind"]) for hit in hits}
        assert found == {(e.number, e.text, e.role, "tool_call" if e.is_call else "message") for e in expected}
        for hit in hits:
            shown = {name for name in passing for each in self._of(name) if each.number == self._number(0, hit)}
            assert hit["session_id"] in shown
            assert "**" in hit["snippet"]

    def _of(self, name: str) -> list[StoredMessage]:
        return [*self.threads.get(name, ()), *self.calls.get(name, ())]

    def _number(self, database: int, hit: SearchHit) -> int:
        name: str = hit["message_id"]
        return self.names[database][name] if hit["kind"] == "tool_call" else int(name[1:])

    def _plain(self, database: int, hits: list[SearchHit]) -> list[dict[str, Any]]:
        """What must be the same on both databases: times and the ids of calls are not."""
        return [{**hit, "created_at": None, "message_id": self._number(database, hit)} for hit in hits]

    @rule()
    def look_for_each_piece(self) -> None:
        for piece in ("你", "好", "你好", "世界", "run", "cat", "hello_world", "100%", "n1"):
            self.search(piece, {}, None, (100, 0))


def _owner(name: str) -> str:
    return "bob" if name == "u" else "ann"


def _message(said: StoredMessage) -> Message:
    name = f"m{said.number}"
    if said.role == "tool":
        return ToolResultMessage("c", "look", said.text, id=name)
    return UserMessage(said.text, id=name) if said.role == "user" else AssistantMessage(said.text, id=name)


def _clear(tx: Tx) -> None:
    for table in TABLES:
        tx.run(f"DELETE FROM {table}")


@pytest.fixture
def both(tmp_path: Path) -> Any:
    made: list[Database] = [make(tmp_path) for make in DATABASES.values()]
    yield made
    for each in made:
        each.drop()


@pytest.mark.processes
@pytest.mark.timeout(600)  # half a minute; what fails is made small first, and that takes longer
def test_both_databases_find_what_a_scan_finds(both: list[Database], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Indexer, "start", lambda _: None)  # what is indexed when is up to the rules
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    with asyncio.Runner() as runner:
        cps = [database.checkpointer() for database in both]
        for cp in cps:
            runner.run(cp.open())

        class Here(Searching):
            def __init__(self) -> None:
                super().__init__(cps, runner)

        try:
            run_state_machine_as_test(Here, settings=limits)
        finally:
            for cp in cps:
                runner.run(cp.close())
