"""Quotas that hold: of applications that consume them, and of agents that set tokens aside for each model call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from byssus import Agent, AssistantMessage, Middleware, Model, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer
from byssus.errors import (
    HookFailed,
    InputError,
    NotFound,
    Overloaded,
    ProviderError,
    QuotaExceeded,
    ThreadInactive,
)
from byssus.events import StreamDone, StreamEvent, StreamStart
from byssus.messages import Usage
from byssus.middleware import HookContext
from byssus.middleware.windows import Summarize
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider, Step
from byssus.queries.accounts import quotas, users
from byssus.queries.accounts.quotas import Charge, QuotaLeft
from byssus.queries.log import threads
from byssus.queries.log.leases import Claim, Lease
from byssus.signals import Signal
from byssus.storage import AgentStorage, SessionStatus
from byssus.threads.encoding import message_row
from byssus.values.release import Release
from byssus.values.thread_key import ThreadKey
from tests.support.accounts import known
from tests.support.agents import Acted, saying, text_events
from tests.support.checkpointers import loaded, texts, with_cp
from tests.support.databases import Database
from tests.support.leases import CALL_SLOW, FAR_AWAY, Slow, Streaming, agent_on, expire, is_free, look

SQL = "' OR '1'='1"


@pytest.fixture
def storage(database: Database) -> Iterator[AgentStorage]:
    with AgentStorage(database.place) as opened:
        yield opened


def used(storage: AgentStorage, user: str = "ann") -> int:
    found = storage.get_user(user)
    assert found is not None
    count: int = found["quota_used"]
    return count


def left(storage: AgentStorage, user: str = "ann") -> int:
    """What `check_quota` says is left, found by asking."""
    low, high = -1, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if storage.check_quota(user, middle) else (low, middle)
    return low


def spending(text: str, tokens: int) -> AssistantMessage:
    return AssistantMessage(text, usage=Usage(tokens // 2, tokens - tokens // 2))


def of_ann(cp: Checkpointer, script: Any, thread_id: str = "t", /, **options: Any) -> Any:
    return agent_on(cp, script, thread_id, user_id="ann", **options)


async def used_by(cp: Checkpointer, user: str = "ann") -> int:
    found = await cp.get_user(user)
    assert found is not None
    count: int = found["quota_used"]
    return count


# --- consuming --------------------------------------------------------------------------------------------------------


def test_what_does_not_suffice_consumes_nothing(storage: AgentStorage) -> None:
    storage.create_user("ann", quota_total=10, user_id="ann")
    assert storage.consume_quota("ann", 7) is True
    assert storage.consume_quota("ann", 4) is False
    assert used(storage) == 7
    assert storage.consume_quota("ann", 3) is True
    assert storage.consume_quota("ann", 1) is False
    assert storage.consume_quota("ann", 0) is True
    assert used(storage) == 10


def test_a_quota_answers_for_the_number_that_is_asked_for(storage: AgentStorage) -> None:
    storage.create_user("ann", quota_total=10, user_id="ann")
    storage.consume_quota("ann", 4)
    assert [storage.check_quota("ann", n) for n in (0, 6, 7)] == [True, True, False]
    assert storage.check_quota("ann") is True
    storage.update_user("ann", quota_total=3)
    assert [storage.check_quota("ann", n) for n in (0, 1)] == [False, False]
    assert storage.consume_quota("ann", 0) is False


def test_a_user_without_a_limit_may_spend_anything(storage: AgentStorage) -> None:
    storage.create_user("ann", quota_total=None, user_id="ann")
    assert storage.check_quota("ann", 2**53 - 1)
    assert storage.consume_quota("ann", 2**53 - 1)
    assert storage.consume_quota("ann", 5)
    assert used(storage) == 2**53 + 4


def test_a_quota_of_nothing_lets_nothing_through(storage: AgentStorage) -> None:
    storage.create_user("ann", quota_total=0, user_id="ann")
    assert not storage.check_quota("ann", 1)
    assert not storage.consume_quota("ann", 1)


@pytest.mark.parametrize("tokens", [-1, 1.0, True, "1", None, 2**70])
def test_tokens_are_a_number_from_zero_up(storage: AgentStorage, tokens: Any) -> None:
    storage.create_user("ann", quota_total=10, user_id="ann")
    with pytest.raises(InputError, match="tokens must be a number from 0 up"):
        storage.consume_quota("ann", tokens)
    with pytest.raises(InputError, match="required_tokens must be a number from 0 up"):
        storage.check_quota("ann", tokens)
    with pytest.raises(InputError, match="quota_used must be a number from 0 up"):
        storage.update_user("ann", quota_used=tokens)
    assert used(storage) == 0


def test_a_user_who_does_not_exist_has_no_quota_and_cannot_spend(storage: AgentStorage) -> None:
    storage.create_user("ann", user_id="ann")
    assert storage.check_quota(SQL) is False
    with pytest.raises(NotFound, match="there is no user"):
        storage.consume_quota(SQL, 1)
    assert used(storage) == 0


def test_a_hundred_threads_never_exceed_the_total(storage: AgentStorage) -> None:
    storage.create_user("ann", quota_total=1_000, user_id="ann")
    begin = threading.Barrier(100)

    def consume(n: int) -> int:
        begin.wait()
        return sum(tokens for tokens in (7, n, 13) if storage.consume_quota("ann", tokens))

    with ThreadPoolExecutor(100) as pool:
        spent = sum(pool.map(consume, range(100)))
    assert used(storage) == spent <= 1_000
    assert not storage.consume_quota("ann", 1_000 - spent + 1)
    assert storage.consume_quota("ann", 1_000 - spent)


# --- a model of it all ------------------------------------------------------------------------------------------------


class Quotas(RuleBasedStateMachine):
    """Consumers, and runs that reserve, settle, end and die, against a few numbers."""

    storage: AgentStorage

    @initialize(total=st.integers(0, 100))
    def begin(self, total: int) -> None:
        self.user = self.storage.create_user("somebody", quota_total=total)["id"]
        self.sessions = [self.storage.create_session(self.user)["id"] for _ in range(3)]
        self.total, self.used = total, 0
        self.leases: dict[str, Lease] = {}
        self.reserved: dict[str, int] = {}

    @property
    def left(self) -> int:
        return self.total - self.used - sum(self.reserved.values())

    @rule(tokens=st.integers(0, 60))
    def consume(self, tokens: int) -> None:
        suffices = tokens <= self.left
        assert self.storage.consume_quota(self.user, tokens) is suffices
        self.used += tokens if suffices else 0

    @rule(place=st.integers(0, 2), wanted=st.integers(0, 60), least=st.integers(0, 60))
    def reserve(self, place: int, wanted: int, least: int) -> None:
        session, least = self.sessions[place], min(wanted, least)
        if session not in self.leases:
            write, claim = self.storage.store.write_now, Claim(FAR_AWAY, "run", 600)
            self.leases[session] = Lease(write(threads.append, ThreadKey("", session), [], by=claim).epoch, 600)
        known = self.reserved.pop(session, 0)  # a thread has one: the next call takes the place of the one before
        free = self.left
        try:
            granted = self.storage.store.write_now(
                users.reserve, ThreadKey("", session), self.user, wanted, least, by=self.leases[session]
            )
        except QuotaExceeded as error:
            assert least > free
            assert error.left == free
            self.reserved |= {session: known} if known else {}
            return
        assert least <= free
        assert granted.tokens == min(wanted, free)
        self.reserved[session] = min(wanted, free)

    @rule(place=st.integers(0, 2), tokens=st.integers(0, 60))
    def settle(self, place: int, tokens: int) -> None:
        session = self.sessions[place]
        if session in self.leases:
            reply = [message_row(AssistantMessage("x", usage=Usage(tokens)))]
            charge = Charge(self.user, tokens)
            self.storage.store.write_now(
                threads.append, ThreadKey("", session), reply, by=self.leases[session], charge=charge
            )
            self.used += tokens
            self.reserved.pop(session, None)

    @rule(place=st.integers(0, 2))
    def end(self, place: int) -> None:
        session = self.sessions[place]
        if (lease := self.leases.pop(session, None)) is not None:
            self.storage.store.write_now(threads.append, ThreadKey("", session), [], by=lease, release=Release.END)
            self.reserved.pop(session, None)

    @rule(place=st.integers(0, 2))
    def die(self, place: int) -> None:
        """The lease runs out, or somebody else takes the thread over."""
        session = self.sessions[place]
        if (lease := self.leases.pop(session, None)) is not None:
            claim = Claim(FAR_AWAY, "another run", 600, dead_epoch=lease.epoch)
            taken = self.storage.store.write_now(threads.append, ThreadKey("", session), [], by=claim)
            self.leases[session] = Lease(taken.epoch, 600)
            self.reserved.pop(session, None)

    @rule(total=st.integers(0, 150))
    def change(self, total: int) -> None:
        self.storage.update_user(self.user, quota_total=total)
        self.total = total

    @rule(place=st.integers(0, 2))
    def delete(self, place: int) -> None:
        session = self.sessions[place]
        if session not in self.leases:
            self.storage.delete_session(session)
            self.sessions[place] = self.storage.create_session(self.user)["id"]

    @invariant()
    def agrees(self) -> None:
        assert used(self.storage, self.user) == self.used
        assert self.storage.check_quota(self.user, max(0, self.left)) is (self.left >= 0)
        assert not self.storage.check_quota(self.user, max(0, self.left + 1))


@pytest.mark.large
def test_quotas_agree_with_a_model_whatever_is_consumed_reserved_settled_and_lost(storage: AgentStorage) -> None:
    machine = type("QuotasHere", (Quotas,), {"storage": storage})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=checks),
    )


# --- agents -----------------------------------------------------------------------------------------------------------


def with_ann(database: Database, total: int | None, use: Callable[[Checkpointer], Any], **options: Any) -> None:
    async def begin(cp: Checkpointer) -> None:
        async with asyncio.timeout(90):
            await cp.create_user("ann", quota_total=total, user_id="ann", **options)
            await use(cp)

    with_cp(database, begin)


def test_an_agent_spends_what_its_replies_really_took(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        script = [AssistantMessage([ToolCall("c1", "look")], "tool_use", Usage(10, 5, 3, 2)), spending("done", 30)]
        result = await of_ann(cp, script, tools=[look]).prompt("go")
        assert (result.stop_reason, await used_by(cp)) == ("stop", 50)
        assert await cp.check_quota("ann", 100_000 - 50)
        session = await cp.get_session("t")
        assert session is not None
        assert (session["user_id"], session["total_tokens"]) == ("ann", 50)

    with_ann(database, 100_000, use)


@pytest.mark.parametrize(
    "usage",
    [
        Usage(-10_000),
        Usage(-(2**70), 1),
        Usage(2**63, 2**64, 10**30, 10**300, 1e300),
        Usage(float("nan"), float("inf"), cost=float("nan")),  # type: ignore[arg-type]
        Usage("7", None, True, cost="free"),  # type: ignore[arg-type]
    ],
    ids=["negative", "very negative", "huge", "no numbers", "no numbers at all"],
)
def test_what_a_provider_says_of_tokens_neither_lowers_a_quota_nor_costs_the_reply(
    database: Database, usage: Usage
) -> None:
    async def use(cp: Checkpointer) -> None:
        told = AssistantMessage("still here", model="m", usage=usage)
        await of_ann(cp, [told] * 3).prompt("hi")
        assert await texts(cp, "t") == ["hi", "still here"]
        used = await used_by(cp)
        assert 0 <= used < 2**43
        result = await of_ann(cp, [told], "u").prompt("and again?")
        assert result.text == "still here"
        assert used <= await used_by(cp) < 2**44
        stats = await cp.get_usage_stats("ann")
        assert stats is not None
        assert all(0 <= stats[name] < 2**44 for name in ("total_tokens", "input_tokens", "output_tokens", "total_cost"))
        assert (await cp.check())["ok"]

    with_ann(database, None, use)


def test_a_usage_that_is_stored_and_cannot_be_sets_nothing_aside_below_nothing(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("hi"), AssistantMessage("ho", usage=Usage(-(10**9)))])
        await of_ann(cp, [spending("ok", 10)]).prompt("and?")
        assert await used_by(cp) == 10
        await cp.append("huge", [UserMessage("hi"), AssistantMessage("ho", usage=Usage(10**30))])
        assert (await of_ann(cp, [], "huge").prompt("and?")).stop_reason == "quota_limit"

    with_ann(database, 5_000, use)


def test_tokens_are_set_aside_while_the_model_is_asked(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        scene = Streaming("well", "")
        run = asyncio.create_task(
            of_ann(cp, Acted(scene), model=Model("m", max_tokens=400), save_partial=0.001).prompt("go")
        )
        while not await scene.is_saved(cp):
            await asyncio.sleep(0.005)
        assert await used_by(cp) == 0
        aside = 1_000 - left(storage)
        assert 400 < aside < 450
        assert not await cp.consume_quota("ann", 1_000 - aside + 1)
        scene.let_go.set()
        await run
        assert left(storage) == 1_000

    with_ann(database, 1_000, use)


def test_a_run_that_is_out_of_quota_stops_with_that_reason_and_goes_on_when_there_is_more(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider([spending("at last", 25)]) as provider:
            agent = of_ann(cp, provider)
            result = await agent.prompt("go")
            assert (result.stop_reason, result.text, provider.requests) == ("quota_limit", "", [])
            assert await is_free(cp)
            assert await texts(cp, "t") == ["go"]
            result = await agent.resume()
            assert result.stop_reason == "quota_limit"
            await cp.update_user("ann", quota_total=5_000)
            result = await agent.resume()
            assert (result.stop_reason, result.text) == ("stop", "at last")
        assert await used_by(cp) == 25

    with_ann(database, 10, use)


def test_another_process_resumes_what_stopped_for_lack_of_quota(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        assert (await of_ann(cp, []).prompt("go")).stop_reason == "quota_limit"
        async with database.checkpointer() as other:
            await other.update_user("ann", quota_total=None)
            assert (await of_ann(other, ["hello"]).resume()).text == "hello"
        assert await texts(cp, "t") == ["go", "hello"]

    with_ann(database, 10, use)


def test_a_quota_that_ends_between_two_turns_keeps_the_results_of_the_tools(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        first = AssistantMessage([ToolCall("c1", "look")], "tool_use", Usage(60, 30))
        result = await of_ann(cp, [first], tools=[look]).prompt("go")
        assert result.stop_reason == "quota_limit"
        assert await texts(cp, "t") == ["go", "", "seen"]
        assert await used_by(cp) == 90
        await cp.update_user("ann", quota_total=10_000)
        with ScriptedProvider([spending("done", 100)]) as provider:
            assert (await of_ann(cp, provider, tools=[look]).resume()).text == "done"
        assert [message.text for message in provider.requests[0].messages] == ["go", "", "seen"]
        assert await used_by(cp) == 190

    with_ann(database, 100, use)


def test_with_little_left_a_reply_may_only_be_short(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider([spending("short", 40)]) as provider:
            await of_ann(cp, provider, model=Model("m", max_tokens=1_000)).prompt("go")
        longest = provider.requests[0].model.max_tokens
        assert longest is not None
        assert 16 <= longest < 60

    with_ann(database, 60, use)


def test_with_enough_left_the_model_is_asked_as_it_is_set_up(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider(["a", "b"]) as provider:
            await of_ann(cp, provider, model=Model("m", max_tokens=1_000)).prompt("go")
            await of_ann(cp, provider, "other").prompt("go")
        assert [request.model.max_tokens for request in provider.requests] == [1_000, None]

    with_ann(database, 50_000, use)


def test_a_fallback_is_never_allowed_a_longer_reply_than_it_is_set_up_for(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider([ProviderError("no"), spending("short", 40)]) as provider:
            models = [Model("large", max_tokens=1_000), Model("small", max_tokens=20)]
            result = await of_ann(cp, provider, model=models).prompt("go")
        assert result.text == "short"
        assert [request.model.id for request in provider.requests] == ["large", "small"]
        assert provider.requests[1].model.max_tokens == 20

    with_ann(database, 100, use)


def test_a_fallback_that_may_say_more_than_the_first_model_has_its_tokens_set_aside(
    database: Database, storage: AgentStorage
) -> None:
    async def use(cp: Checkpointer) -> None:
        asides = []

        def answer(request: Request) -> str:
            asides.append(10_000 - left(storage))
            return "done"

        script: list[Step] = [ProviderError("no"), answer]
        models = [Model("small", max_tokens=20), Model("large", max_tokens=5_000)]
        await of_ann(cp, ScriptedProvider(script), model=models).prompt("go")
        assert asides[0] >= 5_000

    with_ann(database, 10_000, use)


def test_retries_cost_what_the_last_answer_took(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        script = [Overloaded("wait", retry_after=0), Overloaded("wait", retry_after=0), spending("done", 30)]
        result = await of_ann(cp, script).prompt("go")
        assert (result.text, await used_by(cp), left(storage)) == ("done", 30, 99_970)

    with_ann(database, 100_000, use)


def test_a_model_that_fails_costs_nothing_and_gives_back_what_was_set_aside(
    database: Database, storage: AgentStorage
) -> None:
    async def use(cp: Checkpointer) -> None:
        result = await of_ann(cp, [ProviderError("no")]).prompt("go")
        assert (result.stop_reason, await used_by(cp), left(storage)) == ("error", 0, 5_000)

    with_ann(database, 5_000, use)


def test_an_abort_gives_back_what_was_set_aside(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        scene = Streaming("well", "")
        agent = of_ann(cp, Acted(scene), save_partial=0.001)
        run = asyncio.create_task(agent.prompt("go"))
        while not await scene.is_saved(cp):
            await asyncio.sleep(0.005)
        assert left(storage) < 5_000
        agent.abort()
        assert (await run).stop_reason == "aborted"
        assert (await used_by(cp), left(storage)) == (0, 5_000)

    with_ann(database, 5_000, use)


def test_nothing_is_set_aside_while_tools_run(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        reply = AssistantMessage(CALL_SLOW, "tool_use", Usage(40))
        run = asyncio.create_task(of_ann(cp, [reply, spending("done", 50)], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        assert left(storage) == 5_000 - 40
        slow.let_go.set()
        await run
        assert left(storage) == 5_000 - 90

    with_ann(database, 5_000, use)


def test_two_agents_at_once_never_have_more_than_the_total(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        allowed: list[int] = []
        go = asyncio.Event()

        async def scene(request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
            assert request.model.max_tokens is not None
            allowed.append(request.model.max_tokens)
            if len(allowed) == 2:
                go.set()
            await go.wait()
            yield StreamStart()
            for event in text_events("done"):
                yield event
            yield StreamDone("stop", Usage(1, request.model.max_tokens))

        async def run(n: int) -> str:
            result = await of_ann(cp, Acted(scene), f"t{n}", model=Model("m", max_tokens=600)).prompt("go")
            reason: str = result.stop_reason
            if reason == "quota_limit":
                go.set()
            return reason

        reasons = await asyncio.gather(*(run(n) for n in range(6)))
        assert 1 <= reasons.count("stop") < 6
        assert set(reasons) == {"stop", "quota_limit"}
        assert await used_by(cp) <= 1_000
        assert left(storage) >= 0

    with_ann(database, 1_000, use)


def test_runs_and_consumers_that_are_committed_together_never_have_more_than_the_total(storage: AgentStorage) -> None:
    storage.create_user("zoe", quota_total=1_000, user_id="zoe")
    store = storage.store
    claims = [
        store.submit(threads.append, ThreadKey("", f"t{n}"), [], by=Claim(FAR_AWAY, "run", 600)) for n in range(30)
    ]
    leases = [Lease(claim.result().epoch, 600) for claim in claims]
    writes: list[Any] = []
    for n, by in enumerate(leases):  # all of them wait at once, so many of them share a transaction
        writes.append(store.submit(users.reserve, ThreadKey("", f"t{n}"), "zoe", 300, 100, by=by))
        writes.append(store.submit(quotas.consume, "zoe", 90))
    granted = consumed = 0
    for write in writes:
        try:
            answer = write.result()
        except QuotaExceeded:
            continue
        granted += (answer.tokens or 0) if isinstance(answer, QuotaLeft) else 0
        consumed += 90 if answer is True else 0
    assert granted + consumed <= 1_000
    assert granted > 0
    assert (used(storage, "zoe"), left(storage, "zoe")) == (consumed, 1_000 - granted - consumed)


def test_a_run_that_ends_is_charged_before_another_is_granted_its_tokens(storage: AgentStorage) -> None:
    storage.create_user("zoe", quota_total=1_000, user_id="zoe")
    store, keys = storage.store, [ThreadKey("", f"t{n:02}") for n in range(60)]
    claims = [store.submit(threads.append, key, [], by=Claim(FAR_AWAY, "run", 600)) for key in keys]
    leases = [Lease(claim.result().epoch, 600) for claim in claims]
    ending, waiting = list(zip(keys, leases, strict=True))[:30], list(zip(keys, leases, strict=True))[30:]
    for key, by in ending:
        assert store.write_now(users.reserve, key, "zoe", 30, 30, by=by).tokens == 30
    ends = [
        store.submit(threads.append, key, [], by=by, release=Release.END, charge=Charge("zoe", 30))
        for key, by in ending
    ]
    asked = [store.submit(users.reserve, key, "zoe", 60, 60, by=by) for key, by in waiting]  # some share a transaction
    assert all(end.result() for end in ends)
    assert sum(write.exception() is None for write in asked) == 1
    assert (used(storage, "zoe"), left(storage, "zoe")) == (900, 40)


def test_a_reservation_counts_no_more_when_its_lease_has_run_out(database: Database, storage: AgentStorage) -> None:
    async def use(cp: Checkpointer) -> None:
        position = await cp.store.write(threads.append, ThreadKey("", "t"), [], by=Claim(FAR_AWAY, "run", 600))
        by = Lease(position.epoch, 600)
        await cp.store.write(users.reserve, ThreadKey("", "t"), "ann", 700, 1, by=by)
        assert left(storage) == 300
        await expire(cp)
        assert left(storage) == 1_000
        assert await cp.consume_quota("ann", 1_000)

    with_ann(database, 1_000, use)


def test_an_agent_of_an_unlimited_user_is_counted_and_never_stopped(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with ScriptedProvider([spending("a", 2**40), spending("b", 5)]) as provider:
            agent = of_ann(cp, provider)
            await agent.prompt("go")
            await agent.prompt("go")
        assert await used_by(cp) == 2**40 + 5
        assert [request.model.max_tokens for request in provider.requests] == [None, None]

    with_ann(database, None, use)


def test_an_agent_of_nobody_that_is_known_does_not_start(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        with pytest.raises(NotFound, match="there is no user 'bob'"):
            await agent_on(cp, [], user_id="bob").prompt("go")
        assert await cp.load("t") is None

    with_ann(database, 10, use)


def test_an_agent_does_not_work_for_another_user_on_somebodys_session(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_user("bob", user_id="bob")
        await cp.create_session("bob", session_id="t")
        with pytest.raises(InputError, match="belongs to user 'bob'"):
            await of_ann(cp, []).prompt("go")

    with_ann(database, 10, use)


@pytest.mark.parametrize("status", ["paused", "cancelled"])
def test_no_run_starts_on_a_session_that_is_not_active_and_the_error_says_why(
    database: Database, status: SessionStatus
) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_session("ann", session_id="t")
        await cp.save_message("t", "user", "hi")
        await cp.update_session("t", status=status)
        begins: list[Callable[[Any], Any]] = [lambda agent: agent.prompt("go"), lambda agent: agent.resume()]
        for begin in begins:
            with pytest.raises(ThreadInactive, match=f"thread 't' is {status}, and no run starts on it"):
                await begin(of_ann(cp, []))
        assert await texts(cp, "t") == ["hi"]
        assert [info.id for info in await cp.unfinished()] == []
        await cp.resume_session("t")
        assert (await of_ann(cp, ["hello"]).resume()).text == "hello"

    with_ann(database, 10_000, use)


def test_a_run_that_is_going_on_comes_to_its_end_on_a_session_that_is_paused(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        agent = of_ann(cp, [CALL_SLOW, "done"], tools=[slow.tool])
        run = asyncio.create_task(agent.prompt("go"))
        await slow.begun.wait()
        await cp.pause_session("t")
        slow.let_go.set()
        assert (await run).text == "done"
        with pytest.raises(ThreadInactive):
            await agent.prompt("more")

    with_ann(database, 10_000, use)


def test_a_completed_session_can_be_gone_on_with(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_session("ann", session_id="t")
        await cp.complete_session("t")
        assert (await of_ann(cp, ["hello"]).prompt("hi")).text == "hello"

    with_ann(database, 10_000, use)


def test_an_agent_whose_user_is_deleted_meanwhile_keeps_its_messages_and_says_why_it_stops(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        slow = Slow()
        reply = AssistantMessage(CALL_SLOW, "tool_use", Usage(40))
        run = asyncio.create_task(of_ann(cp, [reply], tools=[slow.tool]).prompt("go"))
        await slow.begun.wait()
        assert await cp.delete_user("ann", sessions="keep") == 1
        slow.let_go.set()
        with pytest.raises(NotFound, match="there is no user 'ann'"):
            await run
        assert await texts(cp, "t") == ["go", "", "slow is done"]
        assert await is_free(cp)
        assert (await agent_on(cp, ["done"], tools=[slow.tool]).resume()).text == "done"

    with_ann(database, 10_000, use)


def test_a_user_who_is_deleted_while_the_model_answers_costs_nobody_the_reply(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        async def answer(request: Request) -> AssistantMessage:
            await cp.delete_user("ann", sessions="keep")
            return spending("hello", 40)

        result = await of_ann(cp, [answer]).prompt("go")
        assert result.text == "hello"
        assert await texts(cp, "t") == ["go", "hello"]
        session = await cp.get_session("t")
        assert session is not None
        assert (session["user_id"], session["total_tokens"]) == (None, 40)

    with_ann(database, 10_000, use)


# --- hooks that spend -------------------------------------------------------------------------------------------------


class Spender(Middleware):
    """A middleware that spends tokens in one of its hooks."""

    def __init__(self, hook: str, tokens: int = 100) -> None:
        self._hook, self._tokens = hook, tokens

    def _spend(self, hook: str, context: HookContext) -> None:
        if hook == self._hook:
            assert context.spend is not None
            context.spend(Usage(self._tokens))

    async def transform_context(self, messages: Any, *, signal: Any = None, context: HookContext) -> Any:  # type: ignore[override]
        self._spend("transform_context", context)
        return messages

    async def after_model_response(self, message: Any, *, signal: Any = None, context: HookContext) -> Any:  # type: ignore[override]
        self._spend("after_model_response", context)
        return message

    async def after_tool_call(self, call: Any, result: Any, *, signal: Any = None, context: HookContext) -> Any:  # type: ignore[override]
        self._spend("after_tool_call", context)
        return result

    async def should_stop_after_turn(  # type: ignore[override]
        self, message: Any, results: Any, *, signal: Any = None, context: HookContext
    ) -> bool:
        self._spend("should_stop_after_turn", context)
        return False

    async def on_run_end(self, result: Any, *, signal: Any = None, context: HookContext) -> None:  # type: ignore[override]
        self._spend("on_run_end", context)


@pytest.mark.parametrize(
    ("hook", "times"),
    [
        ("transform_context", 2),
        ("after_model_response", 2),
        ("after_tool_call", 1),
        ("should_stop_after_turn", 2),
        ("on_run_end", 1),
    ],
)
def test_what_a_hook_spends_is_the_users_to_pay(database: Database, hook: str, times: int) -> None:
    async def use(cp: Checkpointer) -> None:
        script = [AssistantMessage([ToolCall("c1", "look")], "tool_use", Usage(10)), spending("done", 30)]
        await of_ann(cp, script, tools=[look], middleware=[Spender(hook)]).prompt("go")
        assert await used_by(cp) == 40 + 100 * times

    with_ann(database, 100_000, use)


def test_what_a_hook_spent_before_the_quota_ended_is_the_users_to_pay(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        agent = of_ann(cp, [], middleware=[Spender("transform_context", 7)])
        assert (await agent.prompt("go")).stop_reason == "quota_limit"
        assert await used_by(cp) == 7

    with_ann(database, 10, use)


def test_a_reply_that_a_hook_refuses_is_the_users_to_pay(database: Database, storage: AgentStorage) -> None:
    class Refusing(Middleware):
        async def after_model_response(self, message: AssistantMessage, *, signal: Signal | None = None) -> None:
            raise ValueError("not that")

    async def use(cp: Checkpointer) -> None:
        with pytest.raises(HookFailed):
            await of_ann(cp, [spending("bad", 30)], middleware=[Refusing()]).prompt("go")
        assert (await used_by(cp), left(storage)) == (30, 100_000 - 30)

    with_ann(database, 100_000, use)


def test_a_summary_is_the_users_to_pay(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.append("t", [UserMessage("word " * 200), AssistantMessage("well")])
        with ScriptedProvider([spending("all in all", 11), spending("done", 30)]) as provider:
            await of_ann(cp, provider, middleware=[Summarize(above=50, keep=1)]).prompt("go")
        assert await used_by(cp) == 41

    with_ann(database, 100_000, use)


def test_settling_a_reply_is_part_of_the_commit_that_stores_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cp: Checkpointer) -> None:
        def fail(*_: object) -> None:
            raise ProviderError("the quota could not be written")

        with monkeypatch.context() as broken:
            broken.setattr("byssus.queries.accounts.quotas.settle", fail)
            with pytest.raises(ProviderError):
                await of_ann(cp, [spending("lost", 30)]).prompt("go")
        assert (await texts(cp, "t"), await used_by(cp)) == (["go"], 0)
        assert await cp.check_quota("ann", 10_000)
        await of_ann(cp, [spending("kept", 30)]).resume()
        assert (await texts(cp, "t"), await used_by(cp)) == (["go", "kept"], 30)
        assert (await loaded(cp, "t")).owner == "ann"

    with_ann(database, 10_000, use)


def test_an_agent_says_how_much_was_left_when_the_model_is_asked_for_too_much() -> None:
    error = QuotaExceeded("ann", 500, -3)
    assert (error.user_id, error.needed, error.left) == ("ann", 500, -3)
    assert "user 'ann' has 0 tokens left, and the next model call needs about 500" in str(error)


def test_a_scene_that_costs_two_tokens_is_settled_with_two(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await of_ann(cp, Acted(saying("hello"))).prompt("hi")
        assert await used_by(cp) == 2

    with_ann(database, 10_000, use)


def test_an_agent_that_continues_a_users_session_spends_their_quota(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        ann = await cp.create_user("Ann", quota_total=10_000)
        session = await cp.create_session(ann["id"])
        script = ScriptedProvider([AssistantMessage("hello", usage=Usage(300, 20)), "never"])
        agent = Agent(provider=script, model=Model("m"), checkpointer=cp, thread_id=session["id"])
        assert (await agent.prompt("hi")).stop_reason == "stop"
        assert known(await cp.get_user(ann["id"]))["quota_used"] == 320
        await cp.update_user(ann["id"], quota_total=320)
        result = await agent.prompt("more")
        assert result.stop_reason == "quota_limit"
        with pytest.raises(QuotaExceeded, match="has 0 tokens left"):
            result.raise_for_error()
        await cp.update_session(session["id"], user_id=None)
        assert (await agent.resume()).text == "never"  # a session of nobody costs nobody anything

    with_cp(database, use)
