"""Apps: how a command, a worker or a service gets at the agents of a program.

    # shop/agents.py
    def support(thread_id: str, user_id: str | None) -> Agent:
        return Agent(model="anthropic:claude-sonnet-5-5", tools=[refund])

An app is named `module:factory`. The factory takes the id of a thread and of its user (None if there is none), and
returns the agent for it; it may be async. `module:factories` may also be a dict of factories, one of which is chosen by
name.

The program that loads the app owns the database. An agent without a checkpointer gets the program's. An agent with its
own checkpointer is used as it is if that is the same database; another one is an error, because a thread must not be in
two places.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from byssus.agent import Agent
from byssus.checkpointer import Checkpointer
from byssus.config import Config
from byssus.errors import AppFailed

__all__ = ["App", "Factory", "load", "load_app"]

Factory: TypeAlias = Callable[[str, str | None], Agent | Awaitable[Agent]]

_EXAMPLE = "MODULE:FACTORY, for example shop.agents:support"


class App(NamedTuple):
    """A factory that was imported, and its name for errors."""

    name: str
    factory: Factory

    async def agent(self, checkpointer: Checkpointer, thread_id: str, user_id: str | None = None) -> Agent:
        """The agent for a thread, on this database. The checkpointer must be open."""
        agent = await self._made(thread_id, user_id)
        if agent.checkpointer is None:
            agent.attach(checkpointer, thread_id, user_id=agent.user_id or user_id)
            return agent
        if agent.thread_id != thread_id:
            raise AppFailed(
                f"the agent of app {self.name} drives thread {agent.thread_id!r}, and not {thread_id!r}, which it was "
                "made for; pass thread_id=thread_id to Agent(...)"
            )
        await self._check_database(agent.checkpointer, checkpointer)
        return agent

    async def _made(self, thread_id: str, user_id: str | None) -> Agent:
        try:
            made: Any = self.factory(thread_id, user_id)
            if inspect.isawaitable(made):
                made = await made
        except Exception as error:
            raise AppFailed(f"app {self.name} raised {_told(error)}") from error
        if not isinstance(made, Agent):
            where = _place(self.factory)
            raise AppFailed(
                f"app {self.name} must return an Agent, and returned {made!r:.80}; return Agent(...){where}"
            )
        return made

    async def _check_database(self, own: Checkpointer, given: Checkpointer) -> None:
        """Open the agent's own checkpointer, and refuse it on another database."""
        if own is given:
            return
        await own.open()
        if own.store is not given.store and own.name != given.name:
            name = own.name
            await own.close()
            raise AppFailed(
                f"app {self.name} keeps its threads in {name}, and this command works on {given.name}; pass "
                f"--db {name}, or make the agent without a checkpointer, so that it gets the command's"
            )


def load(config: Config) -> App | None:
    """The app that is configured, imported; None if there is none."""
    if not config.app.value:
        return None
    origin = f"app in {config.app.origin}" if config.app.layer == "file" else config.app.origin
    return load_app(config.app.value, agent=config.agent.value, folder=config.folder, origin=origin)


def load_object(target: str, *, folder: str | None = None, origin: str = "") -> Any:
    """Import `module:name`, with this directory first in the places where modules are looked for."""
    where = f" ({origin})" if origin else ""
    module_name, _, path = target.partition(":")
    if not module_name or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise AppFailed(f"{target!r}{where} does not name an app; write {_EXAMPLE}")
    module = _imported(module_name, str(Path.cwd()) if folder is None else folder, where)
    found: Any = module
    for part in path.split("."):
        found = _member(found, part, target, where)
    return found


def load_app(target: str, *, agent: str | None = None, folder: str | None = None, origin: str = "") -> App:
    """Import `module:factory`, with this directory first in the places where modules are looked for.

    `agent` is the name of one of several; `origin` tells errors where the target was written.
    """
    where = f" ({origin})" if origin else ""
    found = load_object(target, folder=folder, origin=origin)
    name = repr(target) + where
    if isinstance(found, Mapping):
        chosen = _chosen(found, agent, name)
        name, found = f"{target!r} (agent {chosen!r}){where}", found[chosen]
    elif agent:
        raise AppFailed(f"app {name} is one factory, not a dict of them; leave out --agent {agent}")
    return App(name, _checked(found, name))


def app_of(app: App | Factory | Mapping[str, Factory] | str, agent: str | None = None) -> App:
    """The app that is named (`module:factory`), or that a program passes as a factory or a dict of factories."""
    if isinstance(app, str):
        return load_app(app, agent=agent)
    if isinstance(app, App):
        return app
    if isinstance(app, Mapping):
        chosen = _chosen(app, agent, "app=")
        return App(f"app= (agent {chosen!r})", _checked(app[chosen], "app="))
    return App(getattr(app, "__qualname__", "app="), _checked(app, "app="))


def _imported(name: str, folder: str, where: str) -> ModuleType:
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise AppFailed(
                f"the app's module {name!r}{where} was not found, neither in {folder} nor among the installed "
                "packages; change to the directory that holds it, or correct the name"
            ) from error
        raise AppFailed(f"the app's module {name!r}{where} cannot be imported: {_told(error)}") from error
    except (Exception, SystemExit) as error:
        raise AppFailed(f"the app's module {name!r}{where} cannot be imported: {_told(error)}") from error


def _member(owner: Any, name: str, target: str, where: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        names = [each for each in vars(owner) if not each.startswith("_")] if hasattr(owner, "__dict__") else []
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else "define it there, or correct the name"
        file = getattr(owner, "__file__", None) or repr(owner)
        raise AppFailed(f"app {target!r}{where}: there is no {name!r} in {file}; {hint}") from None


def _chosen(factories: Mapping[str, object], agent: str | None, name: str) -> str:
    names = ", ".join(map(str, factories))
    if not factories:
        raise AppFailed(f"app {name} is an empty dict; write {{'NAME': factory}}")
    if agent is None:
        if len(factories) != 1:
            raise AppFailed(f"app {name} has several agents; choose one with --agent NAME: {names}")
        return next(iter(factories))
    if agent not in factories:
        close = difflib.get_close_matches(agent, [*map(str, factories)], 1)
        raise AppFailed(
            f"app {name} has no agent {agent!r}; "
            + (f"did you mean --agent {close[0]}?" if close else f"choose one with --agent NAME: {names}")
        )
    return agent


def _checked(found: object, name: str) -> Factory:
    shape = "write def factory(thread_id: str, user_id: str | None) -> Agent"
    if isinstance(found, Agent):
        raise AppFailed(f"app {name} is an agent, which drives one thread, and not a factory of them; {shape}")
    if not callable(found):
        raise AppFailed(f"app {name} must be a function or a dict of functions, got {found!r:.80}; {shape}")
    try:
        inspect.signature(found).bind("thread", None)
    except TypeError as error:
        raise AppFailed(f"app {name} must take a thread id and a user id ({error}); {shape}") from error
    except ValueError:  # it does not tell: then it is tried
        pass
    return found


def _place(factory: object) -> str:
    """Where a function was written, for an error about it."""
    code = getattr(inspect.unwrap(factory), "__code__", None) if callable(factory) else None
    return "" if code is None else f" there ({code.co_filename}, line {code.co_firstlineno})"


def _told(error: BaseException) -> str:
    """What an error says, and the line of the program that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno}); correct it there"
    ours = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((ours, "<"))]
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{place}; --debug shows the traceback"
