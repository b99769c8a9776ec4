"""`byssus chat`: a conversation in the terminal that goes on where it stopped.

Nothing runs between two replies, so the main thread reads the next line outside the event loop: editing works, and
Ctrl-C arrives. During a reply, Ctrl-C is the agent's `abort()`, and the chat goes on. SIGTERM ends the chat, in good
order: during a reply as in every run, and else by what is here.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from byssus import Agent, Model
from byssus.cli import database, terminal
from byssus.errors import AnswerNeeded, InputError, LeaseLost, ThreadBusy, ToolMissing
from byssus.events import Event, MessageUpdate, TextDelta
from byssus.providers.base import Provider

_DESCRIPTION = (
    "Talk to a model in the terminal. The conversation is kept; run it again to go on. "
    "Ctrl-C stops a reply (at the prompt: leaves), Ctrl-D leaves."
)
_SYSTEM = "You are a helpful assistant. Answer briefly."
_CLAUDE = "claude-sonnet-5-5"
_GPT = "gpt-5.5"
_LOCAL_CONTEXT = 2048  # tokens: a long thread's first reply takes ten seconds with this, and half a minute with 4096


def add_to(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a model, in a thread that is kept", description=_DESCRIPTION)
    parser.add_argument("thread", metavar="THREAD", nargs="?", default="main", help="the thread's id (default: main)")
    parser.add_argument("--provider", choices=["local", "anthropic", "openai"], default="local", help="who answers")
    parser.add_argument("--model", metavar="ID", help="the model's id; for the local provider, a GGUF file")
    parser.add_argument("--system", metavar="TEXT", default=_SYSTEM, help="the system prompt")
    database.add_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    provider, model = _speaker(args.provider, args.model)
    if (check := getattr(provider, "check", None)) is not None:
        check()
    checkpointer = database.checkpointer_of(args)
    agent = Agent(
        provider=provider,
        model=model,
        system_prompt=args.system,
        checkpointer=checkpointer,
        thread_id=args.thread,
        checkpoint_every="turn",  # so that a conversation can be forked and rewound from the command line
    )
    with _sigterm_leaves(), terminal.keys_to_ourselves(), asyncio.Runner() as runner:
        runner.run(checkpointer.open())
        try:
            runner.run(agent.load())
            _greet(args, len(agent.state.messages))
            return _Chat(runner, agent).go()
        finally:
            runner.run(checkpointer.close())


def _speaker(provider: str, model: str | None) -> tuple[Provider, Model]:
    if provider == "openai":
        from byssus.providers.openai import OpenAIProvider  # noqa: PLC0415 - only whoever asks for it needs it

        return OpenAIProvider(), Model(id=model or _GPT, provider="openai")
    if provider == "anthropic":
        from byssus.providers.anthropic import AnthropicProvider  # noqa: PLC0415 - likewise

        return AnthropicProvider(), Model(id=model or _CLAUDE, provider="anthropic")
    from byssus.providers.local import SMOLLM2, LocalProvider  # noqa: PLC0415 - likewise

    named = Model(id=Path(model).stem, provider="local") if model else SMOLLM2
    return LocalProvider(model, n_ctx=_LOCAL_CONTEXT), named


def _greet(args: argparse.Namespace, messages: int) -> None:
    past = f"{messages} message{'s' * (messages != 1)} so far" if messages else "new"
    say = terminal.write if terminal.is_interactive() else terminal.remark
    say(f"Thread {terminal.line(args.thread)}: {past}.\n")
    if args.provider == "local":
        say(
            "A small embedded model is speaking: it needs no key and no network, and its answers are weak.\n"
            f"For a real one: ANTHROPIC_API_KEY=... {_command()} chat --provider anthropic\n"
        )
    if terminal.is_interactive():
        terminal.write("Ctrl-C stops a reply (at the prompt: leaves), Ctrl-D leaves.\n")


def _command() -> str:
    """How this program was called, if its name alone would not be found."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m byssus"
    return "byssus" if shutil.which("byssus") else sys.argv[0]


class _Chat:
    def __init__(self, runner: asyncio.Runner, agent: Agent) -> None:
        self._runner = runner
        self._agent = agent
        self._broken: OSError | None = None
        self._failed = False
        agent.subscribe(self._hear)

    def go(self) -> int:
        """Answer line by line until there are no more. A script learns from the exit code whether a reply failed."""
        try:
            while (line := terminal.read_line()) is not None:
                if line.strip():
                    self._reply(line.rstrip("\n"))
        except KeyboardInterrupt:
            terminal.write("\n")
        except SystemExit:
            with suppress(OSError):
                terminal.write("\n")
            raise
        return int(self._failed and not terminal.is_interactive())

    def _reply(self, line: str) -> None:
        try:
            with _signals_end_the_reply(self._runner.get_loop(), self._agent):
                result = self._runner.run(self._agent.prompt(line))
        except (
            AnswerNeeded,
            InputError,
            ThreadBusy,
            LeaseLost,
            ToolMissing,
        ) as error:  # of no use; the next line may be
            self._fail(error)
            return
        if self._broken:
            raise self._broken
        terminal.write("\n")
        if result.stop_reason == "aborted":
            terminal.write("[stopped]\n")
        elif result.error:
            self._fail(result.error)
        elif result.stop_reason != "stop":
            terminal.write(f"[cut off: {result.stop_reason}]\n")

    def _hear(self, event: Event) -> None:
        if isinstance(event, MessageUpdate) and isinstance(event.stream_event, TextDelta) and not self._broken:
            try:
                terminal.write(event.stream_event.delta)
            except OSError as error:  # nobody reads us any more: a listener cannot say so, but it can end the run
                self._broken = error
                self._agent.abort()

    def _fail(self, error: Exception) -> None:
        self._failed = True
        terminal.complain(error)


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    sys.exit(128 + number)


@contextmanager
def _sigterm_leaves() -> Iterator[None]:
    """SIGTERM leaves in good order, unless whoever started us wants it otherwise."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
