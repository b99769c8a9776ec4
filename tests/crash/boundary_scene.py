"""What a process does that is to be killed: an agent with tools of every recovery policy, and people who talk to it.

The first process and the one that goes on after a kill do the same: look at what is there, prompt if nobody has, else
answer what waits and resume, until nothing is left to do. So each of them can be killed anywhere, also in recovery. The
replies follow from the history that the model is sent, not from a count of the calls.

Whatever the process is told (a message that ended, a tool's result, a receipt) it says at once on a pipe, and each tool
writes to a diary when it begins and when it has had its effect: those two are what a kill is judged by. Both carry the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal as signals
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from byssus import Agent, Model, ToolCall
from byssus.checkpointer import Checkpointer
from byssus.errors import AnswerNeeded, InputError, ThreadBusy
from byssus.events import (
    Event,
    MessageEnd,
    StreamDone,
    StreamEvent,
    StreamStart,
    TextDelta,
    TextEnd,
    TextStart,
    ThinkingDelta,
    ThinkingEnd,
    ThinkingStart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolExecutionEnd,
    ToolExecutionStart,
)
from byssus.messages import AssistantMessage, Message, UserMessage, dumps, encode
from byssus.middleware import HookContext
from byssus.providers.base import Request
from byssus.queries.log import threads
from byssus.queries.log.inbox import FOLLOW_UP, STEER
from byssus.signals import Signal
from byssus.store.database import Store, Tx
from byssus.threads.encoding import message_row
from byssus.threads.inbox import Receipt
from byssus.threads.thread import partial_of
from byssus.tools import Done, NotDone, Tool, ToolContext, Unknown
from byssus.values import clock
from byssus.values.decisions import Answer, Ask, Pending
from byssus.values.results import RunResult, ToolResult
from byssus.values.thread_key import ThreadKey
from tests.crash.place import Place
from tests.support.histories import flaws

THREAD, NOISE = "t", "noise"
BY_HAND = "a person has done it"
# What the replies ask for, one after the other. `step` makes its reply sequential, whatever the mode.
STAGES = (("never", "retry", "check", "ask"), ("approve", "retry"), ("step", "ring", "jot", "step"))
NEVER_AGAIN = ("never", "approve", "step", "jot")  # the tools whose policy is never
_LEASE = 3600.0  # nobody could wait for its end: what is taken over is taken over at once
_MOST_ROUNDS = 40


class Variation(Struct, frozen=True):
    """What differs between two plays of the scene."""

    tool_mode: Literal["parallel", "sequential"] = "parallel"
    copies: int = 1  # how often the first two replies call each of their tools
    steering_mode: Literal["one-at-a-time", "all"] = "one-at-a-time"
    follow_up_mode: Literal["one-at-a-time", "all"] = "one-at-a-time"
    half_done: str = "not done"  # what the check says of a call that began and did not end; or "unknown"
    recovery: str = "approve"  # what the person says of a call that may have run; or "deny", or "result"
    approval: str = "approve"  # what the person says of a call that must be approved; or "deny"
    answers_by: str = "agent"  # or "checkpointer"; or "tool", while the run goes on
    reuses_ids: bool = False  # some services count their calls anew in each reply
    is_patient: bool = True  # whether `ring` waits for the neighbour
    save_partial: float | None = 0.001
    durability: str = "full"
    has_hooks: bool = False  # hooks that edit calls, ask about some and write when the run ends
    prompts_on: bool = False  # whether a process that finds the thread interrupted says something new
    checkpoint_every: Literal["turn"] | int | None = None
    is_noisy: bool = False  # other writes, some of which fail, share the commits of the run


def now() -> int:
    return time.monotonic_ns()


class Voice:
    """What the process has to say, a line of JSON each; whoever has read it knows that it has happened."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def say(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "at": now(), **more}).encode() + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except BrokenPipeError:
                os._exit(1)  # the parent is gone: there is nobody to go on for


class Commits:
    """Stands at the boundaries of the process's own writes: counts them, and dies at the one that it was given.

    Where several writers commit at once, each of them comes by here, and dies with all the others.
    """

    def __init__(self, dies_at: int | None) -> None:
        self._dies_at = dies_at
        self.boundaries = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def __call__(self, where: str) -> None:
        with self._lock:
            self.boundaries += 1
            if self.boundaries == self._dies_at:
                os.kill(os.getpid(), signals.SIGKILL)
        if where == "after commit":
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for loop, event in waiting:
                loop.call_soon_threadsafe(event.set)

    def next(self) -> asyncio.Event:
        """Set after the next commit."""
        event = asyncio.Event()
        with self._lock:
            self._waiting.append((asyncio.get_running_loop(), event))
        return event


class Diary:
    """Where tools leave what they have done: on disk before they go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, context: ToolContext, **more: Any) -> None:
        entry = {"what": what, "name": context.tool_name, "key": context.idempotency_key, **context.arguments, **more}
        os.write(self._fd, json.dumps({**entry, "pid": os.getpid(), "at": now()}).encode() + b"\n")
        os.fsync(self._fd)

    def has_ended(self, key: str) -> bool:
        return any(entry["what"] == "end" and entry["key"] == key for entry in entries(self._path))


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- what is on disk --------------------------------------------------------------------------------------------------

_THREAD = f"(SELECT key FROM threads WHERE id = '{THREAD}')"
_ROWS = {
    "threads": ("head message_count run lease_owner lease_until extra", f"id = '{THREAD}'"),
    "messages": ("seq id role body", f"branch = (SELECT branch FROM threads WHERE id = '{THREAD}') ORDER BY seq"),
    "tool_calls": (
        "reply place call_id name idempotency_key status attempts ended_at",
        f"thread = {_THREAD} ORDER BY key",
    ),
    "runs": ("key id first_seq last_seq ended_at stop_reason attempts", f"thread = {_THREAD} ORDER BY key"),
    "run_attempts": (
        "run number epoch ended_at outcome",
        f"run IN (SELECT key FROM runs WHERE thread = {_THREAD}) ORDER BY run, number",
    ),
    "inbox": ("kind id", f"thread = {_THREAD} ORDER BY key"),
    "partials": ("body", f"thread = {_THREAD}"),
    "checkpoints": (
        "id step version parent seq message_count extra",
        f"line = (SELECT line FROM threads WHERE id = '{THREAD}') ORDER BY key",
    ),
    "noise": ("id", f"branch = (SELECT branch FROM threads WHERE id = '{NOISE}') ORDER BY seq"),
}


def look(tx: Tx) -> dict[str, list[dict[str, Any]]]:
    """All rows of the thread as they stand, and which messages the noise has left."""
    found = {}
    for name, (columns, which) in _ROWS.items():
        table = "messages" if name == "noise" else name
        rows = tx.all(f"SELECT {columns.replace(' ', ', ')} FROM {table} WHERE {which}")
        found[name] = [dict(zip(columns.split(), row, strict=True)) for row in rows]
    thread = threads.find(tx, ThreadKey("", THREAD))
    partial = None if thread is None else partial_of(tx, thread)
    found["partials"] = [] if partial is None else [{"body": encode(partial)}]  # with its pieces
    return found


# --- the model --------------------------------------------------------------------------------------------------------


class Muse:
    """A model that knows what to say from what was said. It waits now and then until its words have been saved."""

    name = "muse"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        stage = sum(isinstance(message, AssistantMessage) and bool(message.tool_calls) for message in request.messages)
        ids = [message.id for message in request.messages]  # type: ignore[union-attr]
        self._scene.voice.say("request", stage=stage, ids=ids, flaws=flaws(request.messages))
        nonce = clock.new_id()
        yield StreamStart()
        if stage == 1:
            yield ThinkingStart(0)
            yield ThinkingDelta(0, f"hm, {nonce} ")
            await self._scene.saved(nonce)
            yield ThinkingEnd(0, "signed")
        yield TextStart(1)
        yield TextDelta(1, f"to {stage}, {nonce}: ")
        await self._scene.saved(f"to {stage}, {nonce}: ")
        yield TextDelta(1, f"after {request.messages[-1].text[:20]!r}, and so on; ")
        if stage == 0:
            await self._scene.saved("and so on")
        yield TextDelta(1, "that is it")
        yield TextEnd(1)
        for event in self._calls(stage):
            yield event
        yield StreamDone()

    def _calls(self, stage: int) -> Iterator[StreamEvent]:
        if stage >= len(STAGES):
            return
        variation = self._scene.variation
        copies = variation.copies if "step" not in STAGES[stage] else 1
        for place, name in enumerate(STAGES[stage] * copies):
            call_id = f"call-{place}" if variation.reuses_ids else f"call-{stage}-{place}"
            call = ToolCall(call_id, name, {"stage": stage, "place": place})
            yield ToolCallStart(place + 2, call_id, name)
            yield ToolCallDelta(place + 2, dumps(call.arguments))
            yield ToolCallEnd(place + 2, call)


class Censor:
    """Hooks that leave a trace which a kill must not wipe out."""

    def before_tool_call(self, call: ToolCall) -> dict[str, Any] | Ask:
        return Ask("may I?") if call.name == "jot" else {**call.arguments, "edited": True}

    def on_run_end(self, result: RunResult[Any], context: HookContext) -> None:
        context.extra[f"{result.run_id} in {os.getpid()}"] = True  # a run goes on under its id in another process


# --- the scene --------------------------------------------------------------------------------------------------------


class Scene:
    """One process. `ears` is where the parent tells `ring` that the neighbour is done."""

    def __init__(self, place: Place, variation: Variation, voice: Voice, ears: int, dies_at: int | None) -> None:
        self.variation = variation
        self.voice = voice
        self._ears = ears
        self._place = place
        self._diary = Diary(place.diary)
        self._commits = Commits(dies_at)
        self._listened: list[tuple[UserMessage, Receipt]] = []
        # A second one on the same database, as another part of the program would have it.
        self._other = self._checkpointer()
        Store.boundary = self._commits

    def _checkpointer(self) -> Checkpointer:
        return self._place.checkpointer(durability=self.variation.durability, lease_seconds=_LEASE)

    def _agent(self, cp: Checkpointer) -> Agent:
        variation = self.variation
        return Agent(
            provider=Muse(self),
            model=Model("m"),
            tools=self._tools(),
            checkpointer=cp,
            thread_id=THREAD,
            tool_mode=variation.tool_mode,
            steering_mode=variation.steering_mode,
            follow_up_mode=variation.follow_up_mode,
            save_partial=variation.save_partial,
            middleware=[Censor()] if variation.has_hooks else [],
            checkpoint_every=variation.checkpoint_every,
        )

    async def play(self) -> None:
        """Go on until nothing is left to do, from wherever the last process was killed."""
        async with self._checkpointer() as cp, self._other:
            await self._tell("found", cp)
            self.agent = self._agent(cp)
            self.agent.subscribe(self._hear)
            thread = await cp.load(THREAD)
            if thread is None or not thread.messages:
                await self._sent(self.agent.follow_up, FOLLOW_UP)
                await self._ran(self.agent.prompt("go"))
            elif self.variation.prompts_on:
                await self._answer_all(cp)
                with contextlib.suppress(AnswerNeeded):  # what must be asked first comes to light in the prompt
                    await self._ran(self.agent.prompt("and?"))
            for _ in range(_MOST_ROUNDS):
                await self._answer_all(cp)
                if not await cp.unfinished() and not await cp.inbox(THREAD):
                    break
                await self._ran(self.agent.resume())
            await self._tell("left", cp)

    async def interrupt(self, *, is_rival: bool) -> None:
        """The neighbour: says something into the run of the other process, and perhaps wants its thread."""
        async with self._checkpointer() as cp:
            await self._sent(functools.partial(cp.steer, THREAD), STEER)
            if is_rival:
                try:
                    await self._agent(cp).prompt("let me")
                    self.voice.say("odd", problem="a second process drove the thread while the first one did")
                except ThreadBusy as busy:
                    self.voice.say("refused", owner=busy.owner)

    async def _tell(self, what: str, cp: Checkpointer) -> None:
        looked_at = now()
        unfinished = [info.id for info in await cp.unfinished()]
        questions = [[question.call_id, question.reason] for question in await cp.pending()]
        tables = await cp.store.read(look)
        found = {"unfinished": unfinished, "questions": questions, "tables": tables}
        self.voice.say(what, looked_at=looked_at, boundaries=self._commits.boundaries, **found)

    async def _ran(self, run: Any) -> None:
        result: RunResult[Any] = await run
        assert result.stop_reason in ("stop", "waiting"), f"a run ended with {result.stop_reason}: {result.error!r}"
        self.voice.say("ended", stop_reason=result.stop_reason, extra=self.agent.state.extra)
        listened, self._listened = self._listened, []
        for message, receipt in listened:
            await receipt
            self.voice.say("receipt", id=message.id)

    def _hear(self, event: Event) -> None:
        if self.variation.is_noisy and isinstance(event, MessageEnd | ToolExecutionStart | ToolExecutionEnd):
            self._make_noise()
        if isinstance(event, MessageEnd):
            message = event.message
            self.voice.say("message_end", id=_id(message), role=message.role, stored=event.stored)
            if isinstance(message, AssistantMessage) and any(call.name == "ring" for call in message.tool_calls):
                said = self._sending(STEER)
                self._listened.append((said, self.agent.steer(said)))
        elif isinstance(event, ToolExecutionEnd):
            self.voice.say("tool_end", call=event.tool_call_id, id=event.result.id, stored=event.stored)

    def _make_noise(self) -> None:
        row = message_row(UserMessage("psst", id=clock.new_id()))
        self._other.store.submit(_refuse)
        write = self._other.store.submit(threads.append, ThreadKey("", NOISE), [row])
        write.add_done_callback(lambda done: self.voice.say("noise", id=row.id, error=repr(done.exception())))

    # --- people -------------------------------------------------------------------------------------------------------

    async def _answer_all(self, cp: Checkpointer) -> None:
        for question in await cp.pending(THREAD):
            await self._answer(cp, question)

    async def _answer(self, cp: Checkpointer, question: Pending) -> None:
        said = self.variation.approval if question.reason == "approval" else self.variation.recovery
        self.voice.say("answering", said=said, reason=question.reason, **question.arguments)
        answer: Answer = ToolResult(BY_HAND) if said == "result" else "approve" if said == "approve" else "deny"
        if self.variation.answers_by != "checkpointer":
            await self.agent.answer(question.call_id, answer)
        else:
            await cp.answer(THREAD, question.call_id, answer)

    async def _answer_from_inside(self) -> None:
        """Answer as soon as the question is there. It is not, if an earlier process has answered it."""
        while True:
            commit = self._commits.next()
            calls = (await self._other.store.read(look))["tool_calls"]
            if any(row["name"] == "approve" for row in calls):
                break
            await commit.wait()
        for question in await self._other.pending(THREAD):
            with contextlib.suppress(InputError):  # a copy of this call has been faster
                await self._answer(self._other, question)

    async def _sent(self, send: Callable[[UserMessage], Receipt], kind: str) -> None:
        message = self._sending(kind)
        await send(message)
        self.voice.say("receipt", id=message.id)

    def _sent_now(self, send: Callable[[UserMessage], Receipt], kind: str) -> None:
        message = self._sending(kind)
        send(message).wait()
        self.voice.say("receipt", id=message.id)

    def _sending(self, kind: str) -> UserMessage:
        message = UserMessage(f"{kind} of {os.getpid()}", id=clock.new_id())
        self.voice.say("sending", id=message.id, kind=kind)
        return message

    async def saved(self, words: str) -> None:
        """Wait until these words of the reply are on disk."""
        if self.variation.save_partial is None:
            return
        while True:
            commit = self._commits.next()
            thread = await self._other.load(THREAD)
            if thread is not None and thread.partial is not None and words in encode(thread.partial):
                break
            await commit.wait()
        self.voice.say("saved", words=words)

    # --- tools --------------------------------------------------------------------------------------------------------

    def _tools(self) -> list[Tool[..., Any]]:
        return [
            Tool(self.never),
            Tool(self.retry, recovery="retry", max_attempts=None),
            Tool(self.check, recovery="check", check=self._look_up),
            Tool(self.ask, recovery="ask"),
            Tool(self.approve, approval=True),
            Tool(self.step, sequential=True),
            Tool(self.ring, recovery="retry", max_attempts=None),
            Tool(self.jot),
        ]

    def never(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        self._sent_now(self.agent.steer, STEER)
        return self._end(context)

    async def retry(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        await self._sent(self.agent.follow_up, FOLLOW_UP)
        if "approve" in STAGES[stage] and self.variation.answers_by == "tool":
            await self._answer_from_inside()
        return self._end(context)

    def check(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        self._sent_now(functools.partial(self._other.steer, THREAD), STEER)
        return self._end(context)

    def _look_up(self, context: ToolContext) -> Done | NotDone | Unknown:
        if self._diary.has_ended(context.idempotency_key):
            self._diary.write("checked", context, answer="done")
            return Done(effect(context.tool_name, context.idempotency_key))
        self._diary.write("checked", context, answer=self.variation.half_done)
        return NotDone() if self.variation.half_done == "not done" else Unknown()

    async def ask(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        await self._sent(functools.partial(self._other.follow_up, THREAD), FOLLOW_UP)
        return self._end(context)

    def approve(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        return self.jot(context, stage, place)

    def step(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        return self._end(context)

    async def ring(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        self.voice.say("ring")
        if not await asyncio.to_thread(os.read, self._ears, 1):
            os._exit(1)  # the parent is gone
        return self._end(context)

    def jot(self, context: ToolContext, stage: int, place: int, edited: bool = False) -> str:
        self._diary.write("begin", context)
        context.extra[context.idempotency_key] = os.getpid()
        return self._end(context)

    def _end(self, context: ToolContext) -> str:
        self._diary.write("end", context)
        return effect(context.tool_name, context.idempotency_key)


def effect(name: str, key: str) -> str:
    """What a tool answers that has done its work."""
    return f"{name} {key}"


def _refuse(tx: Tx) -> None:
    raise InputError("this write fails on purpose")


def _id(message: Message) -> str | None:
    return getattr(message, "id", None)
