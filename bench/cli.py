"""The command line: how fast it starts, how fast a chat is ready, and what it costs to draw an answer.

Everything is measured from outside, in a pseudo-terminal, on processes of their own. What is compared alternates.

- `byssus --help` against `python -c pass`: the processor time, which is what such a start takes on a machine at rest.
- A chat that is ready for input (its prompt is on the screen) against a Python that imports what the chat stands on.
- 100 deltas of Markdown a second: the processor time of the whole process, with the agent and the database; and the
  time from a delta, stamped by the provider as it yields it, to its text in the output of the terminal.
- Opening a thread of 100,000 messages against one of 10.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import resource
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import alternate, conversation, report, scratch
from byssus.checkpointer import SQLiteCheckpointer

PROMPT = "\u203a ".encode()  # what stands before the input
DELTAS, PER_SECOND = 1_000, 100
MESSAGES = 100_000
LIBRARIES = "import byssus.agent, byssus.checkpointer, prompt_toolkit.application, rich.console, pygments"
APP = """
import asyncio, json, time
from byssus import Agent, Model
from byssus.events import *
from byssus.messages import Usage

class Paced:
    name = "paced"

    async def stream(self, request, signal):
        yield StreamStart("paced")
        yield TextStart(0)
        sent, began = [], time.monotonic()
        for number in range({deltas}):
            await asyncio.sleep(max(0.0, began + number / {rate} - time.monotonic()))
            space = "\\n\\n" if number % 12 == 11 else " "
            text = f"**w{{number:04}}**{{space}}" if number % 7 == 0 else f"w{{number:04}}{{space}}"
            sent.append(time.monotonic())
            yield TextDelta(0, text)
        yield TextEnd(0)
        with open("sent.json", "w") as file:
            json.dump(sent, file)
        yield TextStart(1)
        yield TextDelta(1, "The end.")
        yield TextEnd(1)
        yield StreamDone("stop", Usage(10, 10))

def agent(thread_id, user_id):
    return Agent(provider=Paced(), model=Model("paced"))
"""


class Terminal:
    """A program in a terminal, and when it wrote what."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.began = time.monotonic()
        self.process, self._master = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            variables = {**os.environ, "TERM": "xterm-256color", "HOME": str(folder), "BYSSUS_DB": str(folder / "a.db")}
            variables.pop("PYTHONDONTWRITEBYTECODE", None)
            os.execve(sys.executable, [sys.executable, *arguments], variables)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.output: list[tuple[float, bytes]] = []

    def wait_for(self, text: bytes) -> float:
        """Seconds from the start until the text is there."""
        seen = b""
        while text not in seen:
            ready, _, _ = select.select([self._master], [], [], 60)
            if not ready:
                sys.exit(f"{text!r} did not appear: {seen[-2000:]!r}")
            data = os.read(self._master, 65536)
            self.output.append((time.monotonic(), data))
            seen += data
        return self.output[-1][0] - self.began

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def processor_time(self) -> float:
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self._master)


def main() -> None:
    folder = scratch()
    (folder / "paced.py").write_text(APP.format(deltas=DELTAS, rate=PER_SECOND))
    bare, listed = alternate(
        7, lambda: processor_time_of("-c", "pass"), lambda: processor_time_of("-m", "byssus", "--help")
    )
    more = (listed - bare) * 1e3
    verdict = "ok" if more <= 150 else "MISSED"
    print(
        f"byssus --help: {more:.0f} ms of a core more than python -c pass (bar: at most 150 ms) {verdict}", flush=True
    )
    libraries, ready = alternate(5, lambda: started("-c", LIBRARIES), lambda: opened(folder, "new"))
    figure = f"{ready * 1e3:.0f} ms, libraries {libraries * 1e3:.0f} ms"
    report("a chat that is ready for input, against its libraries", figure, ready / libraries, 2, at_least=False)
    stream(folder)
    asyncio.run(fill(folder))
    short, long = alternate(9, lambda: opened(folder, "short"), lambda: opened(folder, "long"))
    figure = f"{long * 1e3:.0f} ms, {short * 1e3:.0f} ms"
    report(f"opening a thread of {MESSAGES:,} messages against one of 10", figure, long / short, 1.2, at_least=False)


def started(*arguments: str) -> float:
    """Seconds that a Python takes from its start to its end."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=variables)
    return time.perf_counter() - began


def processor_time_of(*arguments: str) -> float:
    """Seconds of a core that a Python takes from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def opened(folder: Path, thread: str) -> float:
    """Seconds until a chat shows its prompt, and what it knows of the thread."""
    terminal = Terminal(["-m", "byssus", "chat", thread, "--app", "paced:agent"], folder)
    try:
        terminal.wait_for(f"Thread {thread}".encode())
        last, data = terminal.output[-1]
        return last - terminal.began if PROMPT in data else terminal.wait_for(PROMPT)
    finally:
        terminal.close()


def stream(folder: Path) -> None:
    """Draw a paced answer: the processor time, and the time from a delta to the screen."""
    terminal = Terminal(["-m", "byssus", "chat", "paced", "--app", "paced:agent"], folder)
    try:
        terminal.wait_for(PROMPT)
        terminal.type("go\r")
        terminal.wait_for(b"w0001")
        before, began = terminal.processor_time(), time.monotonic()
        terminal.wait_for(b"The end.")
        share = (terminal.processor_time() - before) / (time.monotonic() - began)
    finally:
        terminal.close()
    delays = sorted(delays_of(terminal.output, json.loads((folder / "sent.json").read_text())))
    assert len(delays) == DELTAS, f"{DELTAS - len(delays)} words never appeared"
    middle, late = statistics.median(delays), delays[int(len(delays) * 0.95)]
    report(f"{PER_SECOND} deltas of Markdown a second: share of a core", f"{share:.0%}", share, 0.2, at_least=False)
    verdict = "ok" if middle <= 0.03 else "MISSED"
    figure = f"{middle * 1e3:.0f} ms, 95 % within {late * 1e3:.0f} ms"
    print(f"  from a delta to the screen: {figure} (bar: at most 30 ms) {verdict}", flush=True)


def delays_of(output: list[tuple[float, bytes]], sent: list[float]) -> list[float]:
    """For each delta, how long it took until its word was written to the terminal."""
    shown: dict[int, float] = {}
    rest = b""
    for when, data in output:
        for found in re.finditer(rb"w(\d{4})", rest + data):
            shown.setdefault(int(found[1]), when)
        rest = data[-4:]
    return [shown[number] - when for number, when in enumerate(sent) if number in shown]


async def fill(folder: Path) -> None:
    async with SQLiteCheckpointer(folder / "a.db") as cp:
        await cp.append("short", conversation(10))
        for _ in range(MESSAGES // 1000):
            await cp.append("long", conversation(1000))


if __name__ == "__main__":
    main()
