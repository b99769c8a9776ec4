"""Somebody else holds the lock that every write needs: a VACUUM, a migration, a shell that was forgotten."""

from __future__ import annotations

import random
import time
from pathlib import Path

import apsw
import psycopg

from byssus import UserMessage
from tests.crash.place import Place
from tests.crash.stage import runs
from tests.crash.stage.actors import Actor, Line
from tests.crash.stage.judge import acknowledged, expect, judge

_SOON = 10.0  # seconds in which an abort returns: a second is promised, on a machine with nothing else to do


def hold(line: Line, place: Place) -> None:
    """Take the lock each time that a line is read, and release it with the next one."""
    while line.told():
        if place.dsn is None:
            connection = apsw.Connection(str(place.file))
            connection.set_busy_timeout(20_000)
            connection.execute("BEGIN IMMEDIATE")
            line.say("held")
            line.told()
            connection.execute("ROLLBACK")
            connection.close()
        else:
            with psycopg.connect(place.dsn) as server:
                server.execute(f'LOCK TABLE "{place.schema}".threads IN SHARE ROW EXCLUSIVE MODE'.encode())
                line.say("held")
                line.told()
                server.rollback()
        line.say("released")


def locks(chance: random.Random, directory: Path, place: Place) -> None:
    """A tool ends, a message is appended and a run is aborted while another process holds the write lock."""
    recovery = chance.choice(["never", "retry"])

    async def drive(line: Line) -> None:
        async with place.checkpointer() as cp:
            line.say("open")
            while text := await line.told_soon():
                agent = runs.agent(line, cp, place, "t", holds=True, recovery=recovery, wait=20)
                with line.trying(text):
                    line.say("result", reason=(await agent.prompt(text)).stop_reason)

    async def append(line: Line) -> None:
        async with place.checkpointer() as cp:
            line.say("open")
            while text := await line.told_soon():
                with line.trying(text):
                    await cp.append("other", UserMessage(text))
                    line.say("stored", thread="other", text=text)
                with line.trying("load"):
                    await cp.load("other")

    with (
        Actor("driver", drive) as driver,
        Actor("appender", append) as appender,
        Actor("holder", lambda line: hold(line, place)) as holder,
    ):
        driver.hear("open")
        appender.hear("open")
        _end_under_lock(chance, driver, appender, holder)
        _abort_under_lock(driver, holder)
        for actor in (driver, appender, holder):
            actor.tell()
            actor.finish()
    expect(
        not appender.lines("refused"), "an append was refused because of a short lock", appender.lines("refused")[:1]
    )
    runs.judge_tools(place)
    judge(place, acknowledged([driver, appender]))


def _end_under_lock(chance: random.Random, driver: Actor, appender: Actor, holder: Actor) -> None:
    """The tool has finished while nobody can write; what it has found is not thrown away."""
    seconds = 33.0 if chance.random() < 0.02 else chance.choice([0.1, 0.3, 0.8])
    driver.tell("first")
    driver.hear("began")
    holder.ask("hold", "held")
    driver.tell("go on")
    if seconds < 30:  # a plain write may give up after that
        appender.tell("under the lock")
    time.sleep(seconds)  # this is what the scene is about: so long is it held
    holder.ask("release", "released")
    answer = driver.hear("done", "refused")
    expect(answer["what"] == "done", f"a run did not outlast a lock of {seconds} s", answer)
    expect(len([line for line in driver.lines("stored") if line["text"].startswith("did ")]) == 1, "a result is lost")


def _abort_under_lock(driver: Actor, holder: Actor) -> None:
    """Who aborts a run has its result soon; what must be recorded follows, or the next run finds it."""
    driver.tell("second")
    driver.hear("began")
    holder.ask("hold", "held")
    driver.tell("abort")
    try:
        driver.hear("done", "refused", silence=_SOON)
    finally:
        holder.ask("release", "released")
    driver.tell("third")  # which waits until the end of the one before is recorded
    driver.hear("began")
    driver.tell("go on")
    expect(driver.hear("done", "refused")["what"] == "done", "no run comes after one that was aborted", driver.said[-1])
