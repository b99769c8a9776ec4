"""The plain chat: text in, text out, where there is no terminal to draw on, or what draws is not installed.

Nothing runs between two replies, so the main thread reads the next prompt outside the event loop: editing works, and
Ctrl-C arrives. During a reply, Ctrl-C is the agent's `abort()`, and the chat goes on. SIGTERM ends the chat, in good
order: during a reply as in every run, and else by what is here.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from byssus import Agent, AssistantMessage, ToolCall, UserMessage
from byssus.checkpointer import Checkpointer, Thread
from byssus.cli import database, ending
from byssus.cli.chat import agents
from byssus.cli.chat.agents import AgentSource
from byssus.cli.screen import terminal
from byssus.cli.words import in_words
from byssus.errors import AnswerNeeded, InputError, LeaseLost, ThreadBusy, ToolMissing
from byssus.events import Event, MessageUpdate, TextDelta
from byssus.values.places import redacted
from byssus.values.results import RunResult

_LOOK = 100  # messages: among the last ones is the question of an interrupted run


def run(args: argparse.Namespace, source: AgentSource) -> int:
    """Talk until the input ends."""
    checkpointer = database.checkpointer_of(args)
    runner = ending.closed_last(asyncio.Runner())
    with _sigterm_leaves(), terminal.keys_to_ourselves():
        runner.run(checkpointer.open())
        try:
            agent = runner.run(source.agent(checkpointer, args.thread))
            runner.run(agent.load())
            info = runner.run(checkpointer.info(args.thread))  # the agent may hold only the end of the thread
            _greet(args, info.message_count if info else 0, is_local=source.is_local)
            return _Chat(runner, agent, args.thread).go(_half_done(runner, checkpointer, args.thread))
        finally:
            runner.run(checkpointer.close())


def _half_done(runner: asyncio.Runner, checkpointer: Checkpointer, thread_id: str) -> Thread | None:
    """The thread as it was left, if its last run was interrupted."""
    if runner.run(checkpointer.state(thread_id)) != "interrupted":
        return None
    return runner.run(checkpointer.load(thread_id, last=_LOOK))


def _greet(args: argparse.Namespace, messages: int, *, is_local: bool) -> None:
    past = f"{messages} message{'s' * (messages != 1)} so far" if messages else "new"
    say = terminal.write if terminal.is_interactive() else terminal.remark
    say(f"Thread {terminal.line(args.thread)}: {past}.\n")
    if is_local:
        say(
            "A small embedded model is speaking: it needs no key and no network, and its answers are weak.\n"
            f"For a real one: {terminal.line(switch(args))}\n"
        )
    if terminal.is_interactive():
        terminal.write("Ctrl-C stops a reply (at the prompt: leaves), Ctrl-D leaves.\n")


def switch(args: argparse.Namespace) -> str:
    """What to type for a chat with a real model in the same thread."""
    thread = [] if args.thread == "main" else [args.thread]
    database_of = [] if args.db is None else ["--db", redacted(args.db)]
    words = shlex.join([*thread, "--provider", "anthropic", *database_of])
    key, checkout = "ANTHROPIC_API_KEY=...", Path(sys.prefix).parent
    if importlib.util.find_spec("anthropic") is not None:
        return f"{key} {_command()} chat {words}"
    if (checkout / "src" / "byssus").is_dir() and checkout == Path.cwd() and not set("'\"$") & set(words):
        return f'{key} make chat ARGS="{words}"'  # it installs the SDK
    return f"{shlex.quote(sys.executable)} -m pip install anthropic, then {key} {_command()} chat {words}"


def _command() -> str:
    """How this program was called, if its name alone would not be found."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m byssus"
    return "byssus" if shutil.which("byssus") else sys.argv[0]


def _prompts() -> Iterator[str]:
    """What is said: all that is piped in is one prompt; a person says one line, or what was pasted, at a time."""
    if sys.stdin is not None and not sys.stdin.isatty():
        yield terminal.read_all()
        return
    _prepare_line()
    while (line := terminal.read_line()) is not None:
        yield line


def _prepare_line() -> None:
    """Where GNU readline is, pasted lines wait in the line that is edited until Enter, which Python turns off. And
    all languages can be typed: in a locale without UTF-8, their bytes would be taken for keys with Alt."""
    if os.environ.get("TERM", "dumb") == "dumb":  # it would show the marks
        return
    with suppress(ImportError):
        import readline  # noqa: PLC0415 - not every Python has it

        if "libedit" not in (readline.__doc__ or ""):
            for setting in ("enable-bracketed-paste on", "input-meta on", "output-meta on", "convert-meta off"):
                readline.parse_and_bind(f"set {setting}")


class _Chat:
    def __init__(self, runner: asyncio.Runner, agent: Agent, thread_id: str) -> None:
        self._runner = runner
        self._agent = agent
        self._thread_id = thread_id
        self._broken: OSError | None = None
        self._failed = False
        agent.subscribe(self._hear)

    def go(self, half_done: Thread | None = None) -> int:
        """Answer each prompt until there are no more. A script learns from the exit code whether a reply failed."""
        try:
            if half_done is not None and not self._goes_on(half_done):
                return 0
            for prompt in _prompts():
                if prompt.strip():
                    self._reply(self._agent.prompt(prompt.rstrip("\n"), raise_errors=False))
        except KeyboardInterrupt:
            terminal.write("\n")
        except SystemExit:
            with suppress(OSError):
                terminal.write("\n")
            raise
        return int(self._failed and not terminal.is_interactive())

    def _goes_on(self, half_done: Thread) -> bool:
        """Tell what was interrupted and offer to finish it; False if the person leaves instead."""
        if not terminal.is_interactive():
            terminal.remark(agents.interrupted(self._thread_id))
            return True
        terminal.write(told(half_done))
        answer = _yes_or_no("Finish it? [Y/n] ")
        if answer:
            self._reply(self._agent.resume(raise_errors=False))
        return answer is not None

    def _reply(self, run: Coroutine[Any, Any, RunResult[Any]]) -> None:
        try:
            with _signals_end_the_reply(self._runner.get_loop(), self._agent):
                result = self._runner.run(run)
        except (AnswerNeeded, InputError, LeaseLost, ThreadBusy, ToolMissing) as error:  # the next prompt may be better
            self._fail(error)
            return
        if self._broken:
            raise self._broken
        terminal.write("\n")
        if result.stop_reason == "aborted":
            terminal.write("[stopped]\n")
        elif result.error:
            self._fail(result.error)
        elif result.stop_reason == "waiting":
            self._failed = True
            terminal.remark(f"A tool call waits for a person: byssus pending {shlex.quote(self._thread_id)}\n")
        elif result.stop_reason != "stop":
            terminal.write(f"[cut off: {result.stop_reason}]\n")

    def _hear(self, event: Event) -> None:
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta) and not self._broken:
            try:
                terminal.write(event.stream_event.delta)
            except (
                OSError
            ) as error:  # the reader of the output is gone: a listener cannot raise, but it can abort the run
                self._broken = error
                self._agent.abort()

    def _fail(self, error: Exception) -> None:
        self._failed = True
        terminal.complain(in_words(error, self._thread_id))


def told(half_done: Thread) -> str:
    """What an interrupted run was about: the question, the calls that may have run, and the beginning of the reply."""
    lines = ["The last run on this thread was interrupted."]
    questions = [message.text for message in half_done.messages if isinstance(message, UserMessage)]
    if questions:
        lines.append(f"The question: {questions[-1].strip()}")
    last = half_done.messages[-1] if half_done.messages else None
    if isinstance(last, AssistantMessage) and (calls := [b.name for b in last.content if isinstance(b, ToolCall)]):
        lines.append(f"It was calling: {', '.join(calls)}")
    if half_done.partial is not None:
        lines.append(f"The answer so far: {half_done.partial.text.strip()}")
    return "\n".join(lines) + "\n"


def _yes_or_no(question: str) -> bool | None:
    """What a person answers; Enter is yes, and None is Ctrl-D."""
    while True:
        try:
            answer = input(question).strip().lower()
        except EOFError:
            print()
            return None
        if answer in ("", "y", "yes", "n", "no"):
            return answer not in ("n", "no")


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    signal.signal(number, signal.SIG_IGN)  # it leaves already: a second one must not change the exit code
    sys.exit(128 + number)


@contextmanager
def _sigterm_leaves() -> Iterator[None]:
    """SIGTERM ends the chat cleanly, unless the process has another handler for it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    before: Any = signal.SIG_DFL
    try:
        yield
    except SystemExit:
        before = signal.SIG_IGN
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _signals_end_the_reply(loop: asyncio.AbstractEventLoop, agent: Agent) -> Iterator[None]:
    """While a reply arrives, Ctrl-C ends the reply and nothing else, and SIGTERM is the run's."""
    # Not abort() itself: a handler runs between any two instructions, also those of abort's own lock.
    interrupt = signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(agent.abort))
    is_ours = signal.getsignal(signal.SIGTERM) is _leave
    if is_ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        if is_ours:
            signal.signal(signal.SIGTERM, _leave)
