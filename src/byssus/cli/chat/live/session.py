"""The conversation: one thread at a time, its agent, and what a person types.

Runs go on in the event loop that draws, so a person can type meanwhile. What is typed during a run goes into the
thread's inbox, where a crash does not lose it; it appears in the transcript where the run has taken it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from prompt_toolkit.application import in_terminal

from byssus import Agent, UserMessage
from byssus.checkpointer import Checkpointer, Receipt, Thread, Waiting
from byssus.cli.chat.agents import AgentSource
from byssus.cli.chat.live import approvals
from byssus.cli.chat.live.drawn import status
from byssus.cli.chat.live.drawn.board import ChatBoard
from byssus.cli.chat.live.drawn.drawing import Drawer, Line
from byssus.cli.chat.live.drawn.screen import ChatScreen
from byssus.cli.chat.live.drawn.status import Status, ThreadCosts
from byssus.cli.chat.live.drawn.view import View, spinner
from byssus.cli.chat.live.typed import attachments, commands, editor, keys
from byssus.cli.chat.live.typed.completion import ChatCompleter
from byssus.cli.chat.live.typed.history import history
from byssus.cli.screen import table, terminal
from byssus.cli.words import in_words
from byssus.errors import AlreadyAnswered, AnswerNeeded, ByssusError, LeaseLost, NothingToResume, ThreadBusy
from byssus.events import Event, MessageEnd, MessageStart, MessageUpdate, StreamDone
from byssus.messages import AssistantMessage, Usage
from byssus.values.decisions import Pending
from byssus.values.following.cursors import Seen
from byssus.values.results import RunResult

_SECOND = 1.0  # between two Ctrl-C that leave
_TICK = 0.12  # seconds between two frames of a spinner
_SOON = 0.05  # seconds until a message is looked for again that is about to be stored
_LOOKS = 4  # ticks between two looks for questions, and for messages that others have queued
_AHEAD = 0.2  # seconds in which keys are read that were typed before
_MOMENT = 0.5  # seconds that a command waits for the end of a run
_LONG = 1.0  # seconds after which a command is said to go on
_NEWS = 20  # messages of others that are shown at most
_KNOWN = 100  # threads that Tab completes
_LAST_WORDS = 5.0  # seconds that a run has to end when the chat is left

WHEN = {"steer": "now", "follow_up": "later"}  # a queued message is delivered

Prompt = str | UserMessage


class Conversation:
    """The chat: what is typed, what runs, and what is open."""

    def __init__(self, args: argparse.Namespace, source: AgentSource, cp: Checkpointer) -> None:
        self.args, self.source, self.cp = args, source, cp
        self.thread_id: str = args.thread
        self.screen = ChatScreen("dark")
        self.view = View(self.screen)
        self.board = ChatBoard(self.screen, history(), ChatCompleter(lambda: self.known_threads))
        self.agent: Agent | None = None
        self.known_threads: list[tuple[str, str]] = []
        self.waiting: list[Waiting] = []
        self._sending: dict[str, Waiting] = {}  # queued here, and not stored yet
        self.watching: asyncio.Task[None] | None = None  # a run of another process
        self.command: Callable[[commands.Typed], Awaitable[None]] | None = None  # set by start.py
        self.opened: Callable[[], Awaitable[None]] | None = None
        self.found_busy: Callable[[], Awaitable[None]] | None = None
        self._run: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque()  # that were sent, and not taken yet
        self._doing: asyncio.Task[Any] | None = None  # a command
        self._commanded: tuple[str, float] | None = None  # its name, and since when
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turn = Usage()
        self._spent = ThreadCosts()
        self._model = ""  # of the last agent
        self.seen = Seen()  # the messages that are shown
        self._was_taken = False  # the run has stored the prompt
        self._interrupted_at = float("-inf")
        self._is_stopping = False
        self._ended_well = False
        self._is_asking = False
        self._asked: Pending | None = None  # in the input line
        self._answered_elsewhere = False
        self._ours_since = 0.0  # the terminal
        self._leaving: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self.board.live = self._live
        self.board.chips = self._chips
        self.board.status = self._status

    async def talk(self) -> int:
        """Show the chat until a person leaves; returns the exit code."""
        app = self.screen.application(self.board.layout, keys.bindings(self, self.board), self.board.style)
        ticker = asyncio.create_task(self._tick())
        self._ours_since = time.monotonic()
        self._do(self.open(self.thread_id))
        try:
            return await app.run_async(set_exception_handler=False)
        except (EOFError, KeyboardInterrupt):  # the terminal was closed
            self.screen.lose_terminal()
            await self._stop_all()
            return 129
        finally:
            ticker.cancel()
            await self._stop_all()
            self.screen.flush_left()

    # --- keys ---------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a run goes on, here or where it is watched."""
        return (self._run is not None and not self._run.done()) or self.watching is not None

    def enter(self, text: str) -> None:
        """A line was sent. Lines are taken in order: one waits for the end of a command that was typed before."""
        self._interrupted_at = float("-inf")
        self._lines.append(text)
        self._take_lines()

    def _take_lines(self) -> None:
        while self._lines and (self._doing is None or self._doing.done()) and not self._is_stopping:
            self._take(self._lines.popleft())

    def _take(self, text: str) -> None:
        try:
            typed = commands.parse(text)
        except ByssusError as error:
            self.give_back(text)
            self.view.fail(str(error))
            return
        if typed is not None:
            self._do(self._command(typed, text))
        elif self.is_running:
            self.say(commands.message_in(text), later=False)
        else:
            self.spawn_run(self._prompt(commands.message_in(text)))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Lines that are typed meanwhile are taken afterwards."""
        self._doing = self.spawn(work)
        self._doing.add_done_callback(lambda _: self._take_lines())

    def queue(self, text: str) -> None:
        self.say(commands.message_in(text), later=True)

    def interrupt(self) -> None:
        """Ctrl-C: clear the line, else stop the answer; twice within a second: leave."""
        now = time.monotonic()
        is_second, self._interrupted_at = now - self._interrupted_at < _SECOND, now
        if self.board.leave_picker():
            pass
        elif self.board.question is not None:
            self.board.answer(None)
        elif self.board.input.text:
            self.board.input.append_to_history()
            self.board.input.reset()
            if self.is_running and not self._is_stopping:  # the next one stops the answer, however soon it comes
                self._interrupted_at = float("-inf")
        elif is_second:
            self.leave()
        elif self.watching is not None:
            self.watching.cancel()
        elif self.is_running and not self._is_stopping and self.agent is not None:
            self._is_stopping = self.watching is None
            self.agent.abort()
        else:
            self.view.note("(Ctrl-C again leaves, /help shows what else there is)")
        self.screen.refresh()

    def leave(self, code: int = 0) -> None:
        """End the chat in good order: the run first."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(code))

    def unfold(self) -> None:
        if not self.view.unfold():
            self.view.note("(nothing was cut short)")

    def repaint(self) -> None:
        self.screen.repaint()

    @property
    def is_typed_ahead(self) -> bool:
        """Whether what comes was typed before the terminal was ours."""
        return time.monotonic() < self._ours_since + _AHEAD

    def suspend(self) -> None:
        """Ctrl-Z, until `fg`."""
        self.spawn(self._suspend())

    async def _suspend(self) -> None:
        async with in_terminal():
            os.kill(0, signal.SIGTSTP)  # the whole group, as the terminal would
        self._ours_since = time.monotonic()

    def edit(self) -> None:
        self.spawn(editor.edit(self.screen, self.board.input))

    # --- runs ---------------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something beside the drawing; what goes wrong is a line in the transcript."""
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn_run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin a run. There is at most one. A line that is sent after it was stopped is the next prompt."""
        self._run = self.spawn(work)
        self._run.add_done_callback(lambda _: self._run_is_over())

    def _run_is_over(self) -> None:
        self._is_stopping = False
        if self._ended_well and self.waiting and self._leaving is None:  # said while its end was recorded
            self.spawn_run(self.resume())
        self._take_lines()

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except ThreadBusy:
            if self.found_busy is not None:
                await self.found_busy()
        except Exception as error:  # noqa: BLE001 - the chat goes on, whatever it is
            self.fail(error)
        finally:
            self.screen.refresh()

    def fail(self, error: Exception) -> None:
        told = str(in_words(error, self.thread_id))
        if isinstance(error, LeaseLost):  # the chat was suspended for long
            told = told.partition("; to go on:")[0] + "; /retry goes on"
        self.view.fail(told)

    async def _command(self, typed: commands.Typed, text: str) -> None:
        if not typed.command.while_running and self._run is not None:
            await asyncio.wait({self._run}, timeout=_MOMENT)  # the last words may be there before the end is recorded
        if self.is_running and not typed.command.while_running:
            self.give_back(text)
            self.view.fail(f"/{typed.command.name} has to wait until the answer has ended; Ctrl-C stops it")
            return
        assert self.command is not None
        self._commanded = (typed.command.name, time.monotonic())
        try:
            await self.command(typed)
        except Exception:
            self.give_back(text)
            raise
        finally:
            self._commanded = None

    async def _prompt(self, text: str) -> None:
        try:
            message = attachments.message_of(text)
        except ByssusError:
            self.give_back(text)
            raise
        self._was_taken = False
        try:
            await self.show_news()
            await self.run(lambda agent: agent.prompt(message, raise_errors=False))
        except AnswerNeeded:
            self.give_back(text)
            self.view.note("(first, this thread needs an answer from you; your message is kept)")
            await self.settle()
        finally:
            if not self._was_taken:
                self.give_back(text)

    async def run(self, begin: Callable[[Agent], Awaitable[RunResult[Any]]]) -> None:
        """Run to the end, with the questions and the queued messages that come up."""
        agent = await self.ready()
        self._turn, self._ended_well = Usage(), False
        self.view.wait(is_stored=self._was_taken)
        try:
            result = await begin(agent)
            while await self._goes_on(agent, result):
                result = await agent.resume(raise_errors=False)
        except NothingToResume:  # another process was faster, or what was queued is not stored yet
            self._ended_well = True
            await self.show_news()
            if self._sending:
                await asyncio.sleep(_SOON)
        finally:
            self.view.end()
            with suppress(Exception):  # the run has said what is wrong with its database
                await self.look()

    async def _goes_on(self, agent: Agent, result: RunResult[Any]) -> bool:
        """Say how a run has ended; whether another one has to follow it at once."""
        self.view.end()
        await self.look()
        await self.know_end()
        if result.error is not None:
            self.fail(result.error)
            self.view.note("(/retry tries again)")
            return False
        if result.stop_reason == "waiting":
            return await self.ask_for_answers(agent.pending)
        if result.stop_reason in ("stop", "stopped"):
            self._ended_well = True
            return bool(self.waiting) and self._leaving is None
        if result.stop_reason not in ("aborted", "length"):
            self.view.note(f"[ended: {result.stop_reason}; /retry goes on]")
        return False

    async def resume(self) -> None:
        self._was_taken = True  # by the run that it continues
        await self.run(lambda agent: agent.resume(raise_errors=False))

    async def settle(self) -> None:
        """Ask a person about the calls that wait, and go on."""
        pending = await self.cp.pending(self.thread_id)
        agent = await self.ready()
        await agent.load()
        if await self.ask_for_answers(pending):
            await self.resume()

    async def ready(self) -> Agent:
        """The agent of the thread."""
        if self.agent is None:
            self.agent = await self.source.agent(self.cp, self.thread_id)
            self._unsubscribe = self.agent.subscribe(self._hear)
            self._model = str(self.agent.models[0])
        return self.agent

    def renew(self) -> None:
        """Make another agent before the next run: the model or the thread has changed."""
        self._unsubscribe()
        self.agent = None

    def _hear(self, event: Event) -> None:
        match event:
            case MessageStart(message=UserMessage()):
                self._was_taken = True
            case MessageEnd(message=UserMessage(id=message_id)):
                self.waiting = [each for each in self.waiting if each.id != message_id]
            case MessageUpdate(stream_event=StreamDone(usage=usage)):
                self._turn += usage
        self.view.hear(event)

    # --- questions ----------------------------------------------------------------------------------------------------

    async def ask_for_answers(self, pending: list[Pending]) -> bool:
        """Ask a person about calls that wait; whether a run can go on with the answers."""
        if self._is_asking:
            return False
        self._is_asking = True
        try:
            answered = [await self._ask(each) for each in pending]
        finally:
            self._is_asking = False
        if not all(answered):
            self.view.note("(a call waits for your answer: /approve asks again)")
        return bool(answered) and all(answered)

    async def _ask(self, pending: Pending) -> bool:
        allowed = approvals.Allowed(self.cp, self.thread_id)
        if await allowed.allows(pending):
            decided: approvals.Decided | None = approvals.Decided("approve")
            self.view.note(f"({pending.tool_name}: allowed always in this thread)")
        else:
            decided = await self._asked_here(pending)
            if decided is not None:
                self.view.note(f"({approvals.told(decided)})")
        if decided is None:
            return self._answered_elsewhere
        if decided.always:
            await allowed.add(pending.tool_name)
        agent = await self.ready()
        try:
            return await agent.answer(pending.call_id, decided.answer, by=approvals.who(), source="chat")
        except AlreadyAnswered as error:
            self.view.note(f"({error})")
            return True

    async def _asked_here(self, pending: Pending) -> approvals.Decided | None:
        """The answer given here; None if there is none, or if the call was answered elsewhere meanwhile."""
        self._asked, self._answered_elsewhere = pending, False
        try:
            return await approvals.ask(self.screen, self.board, pending)
        finally:
            self._asked = None

    async def _look_for_answer(self, asked: Pending) -> None:
        """Take a question back that was answered elsewhere."""
        waiting = {each.call_id for each in await self.cp.pending(self.thread_id)}
        if self._asked is asked and asked.call_id not in waiting:
            self._answered_elsewhere = True
            self.view.note("(answered elsewhere)")
            self.board.answer(None)

    # --- what waits ---------------------------------------------------------------------------------------------------

    def say(self, text: str, *, later: bool) -> None:
        """Queue a message: for the run that goes on, or for afterwards."""
        try:
            message = attachments.message_of(text)
            send = self.cp.follow_up if later else self.cp.steer
            receipt = send(self.thread_id, message)
        except ByssusError as error:
            self.give_back(text)
            self.view.fail(str(error))
            return
        kind = "follow_up" if later else "steer"
        self._sending[receipt.id] = sent = Waiting(receipt.id, kind, receipt.message, "")
        self.waiting.append(sent)
        self.screen.refresh()
        self.spawn(self._queued(receipt, text))

    async def _queued(self, receipt: Receipt, text: str) -> None:
        try:
            await receipt
        except ByssusError:
            self.waiting = [each for each in self.waiting if each.id != receipt.id]
            self.give_back(text)
            raise
        finally:
            self._sending.pop(receipt.id, None)
        await self.look()
        if self.waiting and not self.is_running:  # the run ended just before
            self.spawn_run(self.resume())

    async def _look_at_inbox(self) -> None:
        waiting = await self._inbox()
        if waiting != self.waiting:
            self.waiting = waiting
            self.screen.refresh()

    async def _inbox(self) -> list[Waiting]:
        stored = await self.cp.inbox(self.thread_id)
        known = {each.id for each in stored}
        return [*stored, *(each for each in self._sending.values() if each.id not in known)]

    async def look(self) -> None:
        """What waits, and what was spent, as the database knows it."""
        self.waiting = await self._inbox()
        user = self.agent.user_id if self.agent is not None else self.source.user
        self._spent = await status.spent_on(self.cp, self.thread_id, user)
        self.screen.refresh()

    async def know_end(self) -> None:
        """All messages of the thread are shown."""
        self.seen = seen_in(await self.cp.load(self.thread_id, last=_NEWS))

    async def show_news(self) -> None:
        """Show what others have added to the thread: the model will read it too."""
        end = await self.cp.load(self.thread_id, last=_NEWS)
        stored = seen_in(end)
        if stored.last < self.seen.last:
            what = f"rewound elsewhere, to message {stored.last}" if stored.last else "emptied or deleted elsewhere"
            self.view.note(f"(meanwhile, this thread was {what})")
            self.seen = stored
        if end is None:
            return
        news = [message for message, seq in zip(end.messages, end.seqs, strict=True) if seq not in self.seen]
        if news:
            self.view.note("(meanwhile, from elsewhere:)")
        for message in news:
            self.view.show_message(message)
        self.view.calls.end_all()
        self.seen = stored

    def give_back(self, text: str) -> None:
        """Put a line back that could not be used, unless something else was typed meanwhile."""
        if not self.board.input.text and self.board.question is None and self.board.picker is None:
            self.board.input.insert_text(text)

    # --- the thread ---------------------------------------------------------------------------------------------------

    async def open(self, thread_id: str) -> None:
        """Go to a thread."""
        self.renew()
        self._model = ""
        self.thread_id, self.waiting, self._turn, self._spent = thread_id, [], Usage(), ThreadCosts()
        self._sending, self.seen = {}, Seen()
        await self.look()
        self.known_threads = [(info.id, info.title) for info in await self.cp.threads(_KNOWN)]
        assert self.opened is not None
        await self.opened()

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def _live(self, drawer: Drawer, rows: int) -> list[Line]:
        working = self._working(drawer)
        return [*self.view.live(drawer, max(rows - len(working), 1)), *working]

    def _working(self, drawer: Drawer) -> list[Line]:
        """A command that takes long, as with a database that is locked."""
        if self._commanded is None or self.board.picker is not None or self.board.question is not None:
            return []
        name, since = self._commanded
        seconds = time.monotonic() - since
        return [[], drawer.line(("faint", f"{spinner(seconds)} working on /{name}"))] if seconds > _LONG else []

    def _chips(self, drawer: Drawer) -> list[Line]:
        lines = []
        for number, each in enumerate(self.waiting, 1):
            sign = terminal.drawn("↳", ">") if each.kind == "steer" else terminal.drawn("⏲", "~")
            text = table.cut(terminal.line(attachments.typed_in(each.message)), max(drawer.width - 14, 8))
            lines.append(drawer.line(("ask", f"{sign} {number} {WHEN[each.kind]} "), ("faint", text)))
        return lines

    def _status(self, drawer: Drawer) -> Line:
        model = self._model or self.source.name
        state = "watching" if self.watching is not None else ""
        name = status.database_name(self.cp.name)
        now = Status(self.thread_id, model, state, self._spent, self._turn, len(self.waiting), name)
        return status.line(drawer, now)

    async def _tick(self) -> None:
        """Move what moves with time, and look for what others have done."""
        ticks = 0
        while True:
            await asyncio.sleep(_TICK)
            ticks += 1
            if self.view.is_moving or self._commanded is not None:
                self.screen.refresh()
            if (self.is_running or self.waiting) and ticks % _LOOKS == 0:
                with suppress(Exception):  # a database that does not answer for a moment; the run tells the rest
                    await self._look_at_inbox()
                    if self._asked is not None:
                        await self._look_for_answer(self._asked)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _leave(self, code: int) -> None:
        if self.watching is not None:
            self.watching.cancel()
        await self._stop_all()
        app = self.screen.app
        if app is not None and app.is_running and not app.is_done:
            app.exit(result=code)

    async def _stop_all(self) -> None:
        """Abort the run, and wait until its end is recorded; but not for a database that does not answer."""
        if self.agent is not None:
            self.agent.abort()
        if self._run is not None and not self._run.done():
            self.board.answer(None)
            await asyncio.wait({self._run}, timeout=_LAST_WORDS)
        for task in list(self._tasks):
            task.cancel()


def seen_in(end: Thread | None) -> Seen:
    """All messages up to the end of a thread, without the results of calls that are still to come."""
    if end is None or not end.seqs:
        return Seen()
    seen = Seen(end.seqs[0] - 1)
    for message, seq in zip(end.messages, end.seqs, strict=True):
        seen = seen.with_seq(seq, is_reply=isinstance(message, AssistantMessage))
    return seen
