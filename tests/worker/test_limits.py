"""TypeLimits of types: of all tasks, of a user and of a session at once, and of starts in a time; over all workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from byssus.checkpointer import Checkpointer
from byssus.errors import InputError
from byssus.queries.tasks import claims
from byssus.queries.tasks.claims import ClaimedTask, HeldTask, Wish
from byssus.queries.tasks.rates import TypeLimits
from byssus.values.thread_key import ThreadKey
from byssus.worker import Limit, TaskContext, Worker
from tests.support.checkpointers import with_cp, with_users
from tests.support.databases import Database
from tests.support.leases import with_two

KEY = ThreadKey("", "")


async def claim(cp: Checkpointer, limits: TypeLimits, count: int = 10, served: str | None = None) -> list[ClaimedTask]:
    last = {} if served is None else {"t": served}
    return await cp.store.write(claims.claim, KEY, Wish("nobody", 30, count, None, {"t": limits}, last))


def users(found: list[ClaimedTask]) -> list[str]:
    return [each.task.owner for each in found]


async def fill(cp: Checkpointer) -> None:
    """Six tasks of each of two users, three of a session of one of them, and three of nobody."""
    await with_users(cp, "ann", "bob")
    await cp.create_session("bob", session_id="s")
    for n in range(6):
        for user in ("ann", "bob"):
            await cp.create_task(None, "t", n, user_id=user)
    for n in range(3):
        await cp.create_task("s", "t", n)
        await cp.create_task(None, "t", n)


def test_a_type_has_so_many_running_tasks(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        found = await claim(cp, TypeLimits(concurrency=3))
        assert users(found) == ["", "ann", "bob"]
        assert await claim(cp, TypeLimits(concurrency=3)) == []
        first = found[0].task
        assert await cp.store.write(claims.complete, KEY, HeldTask(first.id, first.lease_epoch, 30, "t"), "1")
        assert users(await claim(cp, TypeLimits(concurrency=3), served="bob")) == [""]
        assert users(await claim(cp, TypeLimits(concurrency=5), served="")) == ["ann", "bob"]

    with_cp(database, use)


def test_a_user_has_so_many_running_tasks(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        found = await claim(cp, TypeLimits(per_user=2))
        assert Counter(users(found)) == {"ann": 2, "bob": 2, "": 3}  # those of nobody are not counted together
        assert await claim(cp, TypeLimits(per_user=2)) == []
        assert Counter(users(await claim(cp, TypeLimits(per_user=3), served="ann"))) == {"bob": 1, "ann": 1}

    with_cp(database, use)


def test_a_session_has_so_many_running_tasks(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await cp.create_session(None, session_id="s")
        await cp.create_session(None, session_id="other")
        for name in ("s", "s", "s", "other", None):
            await cp.create_task(name, "t", name)
        taken = [each.task.session_id for _ in range(3) for each in await claim(cp, TypeLimits(per_session=1))]
        assert sorted(taken, key=str) == [None, "other", "s"]

    with_cp(database, use)


def test_a_session_at_its_limit_does_not_hold_up_other_users(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        await cp.create_session("ann", session_id="s")
        await cp.create_task("s", "t", 1)
        await claim(cp, TypeLimits(per_session=1))
        await cp.create_task("s", "t", 2)
        await cp.create_task(None, "t", 3, user_id="bob")
        assert users(await claim(cp, TypeLimits(per_session=1), count=1, served="bob")) == ["bob"]

    with_cp(database, use)


def test_what_one_user_leaves_of_the_places_goes_to_others_before_a_lower_priority(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        for user, count, priority in (("ann", 1, 5), ("bob", 9, 5), ("ann", 9, 0)):
            for n in range(count):
                await cp.create_task(None, "t", n, priority, user_id=user)
        found = await claim(cp, TypeLimits(), count=8)
        assert [(each.task.owner, each.task.payload) for each in found] == [
            *(("ann", "0"), ("bob", "0"), ("bob", "1"), ("bob", "2"), ("bob", "3"), ("bob", "4"), ("bob", "5")),
            ("bob", "6"),
        ]

    with_cp(database, use)


def test_so_many_start_in_a_time(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await fill(cp)
        limits = Limit(rate="2/hour").limits
        assert len(await claim(cp, limits)) == 2
        assert await claim(cp, limits) == []
        await set_back(cp, 1_800)
        assert len(await claim(cp, limits)) == 1
        await set_back(cp, 100 * 3_600)
        assert len(await claim(cp, limits)) == 2  # no more than the bucket holds
        await set_back(cp, -3_600)  # the clock was set back: nothing is filled, and nothing is taken away
        assert await claim(cp, limits) == []
        await set_back(cp, 3_600)
        assert len(await claim(cp, limits)) == 2

    async def set_back(cp: Checkpointer, seconds: float) -> None:
        await cp.store.write(lambda tx: tx.run("UPDATE task_rates SET filled_at = :then", then=tx.after(-seconds)))

    with_cp(database, use)


def test_limits_hold_over_all_workers_and_a_freed_place_is_used(database: Database) -> None:
    async def use(cp: Checkpointer, other: Checkpointer) -> None:
        now, most = Counter[str](), Counter[str]()

        async def work(ctx: TaskContext, payload: Any) -> None:
            user = ctx.user_id or ""
            for name in ("all", user):
                now[name] += 1
                most[name] = max(most[name], now[name])
            await asyncio.sleep(0.005)
            now["all"] -= 1
            now[user] -= 1

        await fill(cp)
        limit = {"t": Limit(concurrency=3, per_user=2)}
        workers = [Worker(each, {"t": work}, concurrency=8, limits=limit) for each in (cp, other)]
        await asyncio.gather(*(worker.drained() for worker in workers))
        assert {task["status"] for task in await cp.list_tasks() or []} == {"completed"}
        assert most["all"] <= 3
        assert max(most["ann"], most["bob"]) <= 2

    with_two(database, use)


def test_one_users_many_tasks_do_not_hold_up_another_ones(database: Database) -> None:
    async def use(cp: Checkpointer) -> None:
        await with_users(cp, "ann", "bob")
        done: list[str | None] = []

        async def work(ctx: TaskContext, payload: Any) -> None:
            done.append(ctx.user_id)

        for n in range(50):
            await cp.create_task(None, "t", n, user_id="ann")
        await cp.create_task(None, "t", 0, user_id="bob")
        await Worker(cp, {"t": work}, concurrency=2).drained()
        assert done.index("bob") <= 2

    with_cp(database, use)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"concurrency": 0}, "concurrency must be a number from 1 up"),
        ({"per_user": True}, "per_user must be a number from 1 up"),
        ({"per_session": 1.5}, "per_session must be a number from 1 up"),
        ({"rate": "10"}, "rate must be a text such as '10/minute'"),
        ({"rate": "0/minute"}, "rate must be a text"),
        ({"rate": "5/fortnight"}, "rate must be a text"),
        ({"rate": 5}, "rate must be a text"),
    ],
    ids=repr,
)
def test_a_limit_that_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Limit(**given)
