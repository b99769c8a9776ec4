"""A program with an app, for tests that run the command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PROGRAM = """\
from byssus import Agent, Model, tool
from byssus.errors import InvalidRequest
from byssus.providers.scripted import ScriptedProvider

heard = []

@tool
def pay(amount: int) -> str:
    return f"paid {amount}"

def answer(request):
    heard.append([message.text for message in request.messages])
    return "The answer."

def support(thread_id, user_id):
    return Agent(provider=ScriptedProvider([answer] * 9), model=Model("m"), tools=[pay])

def failing(thread_id, user_id):
    return Agent(provider=ScriptedProvider([InvalidRequest("no such model")]), model=Model("m"))

def deaf(thread_id, user_id):
    def listener(event):
        print(event.tpye)

    agent = support(thread_id, user_id)
    agent.subscribe(listener)
    return agent

agents = {"support": support, "failing": failing}
"""


def write_program(folder: Path) -> None:
    """The module `clerk`, for a process that is started in this directory or finds it on its path."""
    (folder / "clerk.py").write_text(_PROGRAM, "utf-8")


@contextmanager
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `clerk` in the current directory, which is this one; without settings of the person who tests."""
    write_program(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("BYSSUS_DB", "BYSSUS_APP", "BYSSUS_AGENT", "BYSSUS_MODEL", "BYSSUS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "home" / "data"))
    sys.modules.pop("clerk", None)
    try:
        yield
    finally:
        sys.modules.pop("clerk", None)


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the command find this text on its standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def heard() -> list[list[str]]:
    """What the model of the program was sent, call by call."""
    found: list[list[str]] = sys.modules["clerk"].heard
    return found
