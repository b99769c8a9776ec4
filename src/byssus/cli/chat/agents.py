"""Who answers in `chat`, `ask` and `resume`: an agent of the program's own (`--app`), or a plain one with a model."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from byssus import Agent, Model, TokenBudget, apps
from byssus.apps import App
from byssus.checkpointer import Checkpointer
from byssus.cli import database
from byssus.cli.tools import chosen
from byssus.cli.tools.chosen import Tools
from byssus.config import KEY_VARIABLES, Config
from byssus.errors import InputError, MissingExtra
from byssus.providers.base import Provider
from byssus.providers.named import SERVICES, provider_of

_SYSTEM = "You are a helpful assistant. Answer briefly."
_DEFAULT_MODELS = {"anthropic": "anthropic:claude-sonnet-5-5", "openai": "openai:gpt-5.5", "local": "local"}
_BUDGET = 100_000  # tokens of a thread that a model gets: half of what the smaller ones of the services take
_LOCAL_CONTEXT = 2048  # tokens: a long thread's first reply takes ten seconds with this, and half a minute with 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take --app and its kin, and the options of a plain agent."""
    parser.add_argument("--app", metavar="MODULE:FACTORY", help="your program's agents (see docs/apps.md); '' for none")
    parser.add_argument("--agent", metavar="NAME", help="which agent of the app, if it has several")
    parser.add_argument("--user", metavar="ID", help="the user that owns the thread; passed to the app")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="anthropic:ID, openai:ID, local, or local:FILE with a GGUF file (default: local)",
    )
    parser.add_argument("--provider", choices=[*SERVICES], help="who answers, for a model that does not say so")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    chosen.add_options(parser)


class AgentSource(NamedTuple):
    """Where agents come from: an app, or the model of a plain agent."""

    app: App | None
    plain: tuple[Provider, Model] | None
    system_prompt: str
    user: str | None
    tools: Tools = Tools((), ".")

    @property
    def name(self) -> str:
        """Who will answer: the app, or the model."""
        if self.app is not None:
            return self.app.name.partition(" ")[0].strip("'")
        return "" if self.plain is None else self.plain[1].id

    @property
    def is_local(self) -> bool:
        """Whether the embedded model speaks."""
        return self.plain is not None and self.plain[0].name == "local"

    async def agent(self, checkpointer: Checkpointer, thread_id: str) -> Agent:
        """The agent for a thread. The checkpointer must be open."""
        info = await checkpointer.info(thread_id)
        owner = None if info is None else info.user_id
        if self.user and owner and self.user != owner:
            raise InputError(
                f"thread {thread_id!r} belongs to user {owner!r}, and not to {self.user!r}; leave out --user"
            )
        if self.app is not None:
            return await self.app.agent(checkpointer, thread_id, self.user or owner)
        assert self.plain is not None
        provider, model = self.plain
        return Agent(
            provider=provider,
            model=model,
            system_prompt=self.system_prompt,
            tools=self.tools.made(checkpointer, self.user or owner),
            middleware=[TokenBudget(_BUDGET if model.context_window is None else min(model.context_window, _BUDGET))],
            checkpointer=checkpointer,
            thread_id=thread_id,
            user_id=self.user,
            checkpoint_every="turn",  # so that a conversation can be forked and rewound from the command line
        )


class NoModel(InputError):
    """No model was chosen, and the embedded one is not installed."""


def source_of(args: argparse.Namespace) -> AgentSource:
    """Where the agents of a command come from. What is missing (a key, a package, the app) is said here."""
    config = database.config_of(args)
    _export_keys(config)
    app = apps.load(config)
    if app is not None:
        _refuse_with_app(args, config)
        return AgentSource(app, None, "", args.user)
    if config.agent.layer == "flag":
        raise InputError(
            f"--agent {args.agent} chooses an agent of an app, and there is no app; add --app MODULE:FACTORY"
        )
    system = _SYSTEM if args.system is None else args.system
    tools, plain = chosen.of(args), _plain(args, config)
    check_tools(plain[0], tools)
    return AgentSource(None, plain, system, args.user, tools)


def check_tools(provider: Provider, tools: Tools) -> None:
    """Refuse tools for the embedded model."""
    if tools.groups and provider.name == "local":
        raise InputError("the local model is too small to use tools; leave out --tools, or choose another --model")


def _refuse_with_app(args: argparse.Namespace, config: Config) -> None:
    for name in ("model", "provider", "system", "tools"):
        if getattr(args, name) is not None:
            raise InputError(
                f"the app {config.app.value} ({config.app.origin}) chooses its {name} itself; leave out --{name}, or "
                "add --app '' to do without the app"
            )


def _plain(args: argparse.Namespace, config: Config) -> tuple[Provider, Model]:
    name = _model_name(args, config)
    service = name.partition(":")[0]
    key = config.keys.get(service)
    if key is not None and key.layer == "file" and config.key_of(service) is None:
        raise InputError(f"{key.value} is not set, which keys.{service} in {key.origin} names; export {key.value}=...")
    options = {"n_ctx": _LOCAL_CONTEXT} if service == "local" else {}
    try:
        provider, model = provider_of(name, **options)
    except InputError as error:
        if name == config.model.value and config.model.layer in ("file", "variable"):
            raise InputError(f"{error} (model in {config.model.origin})") from error
        raise
    except MissingExtra as error:
        if args.provider is None and config.model.layer == "default":  # they have chosen no model
            services = " or ".join(config.keys)
            raise NoModel(f"{error}; or use a service: add --provider {services}") from error
        raise
    if (check := getattr(provider, "check", None)) is not None:
        check()
    return provider, model


def _model_name(args: argparse.Namespace, config: Config) -> str:
    if args.provider is not None:
        if not args.model:
            return _DEFAULT_MODELS[args.provider]
        return args.model if args.model.startswith(f"{args.provider}:") else f"{args.provider}:{args.model}"
    name = config.model.value or "local"
    is_file = name.partition(":")[0] not in SERVICES and (name.endswith(".gguf") or Path(name).is_file())
    return f"local:{name}" if is_file else name


def _export_keys(config: Config) -> None:
    """Give providers the keys from the variables that the file names. They look in their own: an app's do, too."""
    for provider, setting in config.keys.items():
        if setting.layer == "file" and (key := config.key_of(provider)) is not None:
            os.environ[KEY_VARIABLES[provider]] = key


def interrupted(thread_id: str) -> str:
    """What a command that goes on without asking says about a run that was interrupted before."""
    return (
        f"The last run on thread {thread_id} was interrupted; this prompt goes on from there. "
        f"To finish it first: byssus resume {shlex.quote(thread_id)}\n"
    )
