"""Settings of a program: a file, `BYSSUS_*` variables over it, and flags over both.

- The file is `byssus.toml`, or the table `[tool.byssus]` of a `pyproject.toml`. The nearest one is used, from the
  current directory upwards; in one directory `byssus.toml` wins. Files are not merged. `BYSSUS_CONFIG` names a file.
- Every setting knows where it came from, so that an error and `byssus doctor` can say so.
- A file names the environment variables that hold API keys. It never holds a key, and an error never shows one.
- A path in a file is relative to that file; in a variable or a flag, to the current directory.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from byssus.errors import InputError
from byssus.values.places import looks_like_dsn, redacted

__all__ = ["Config", "Layer", "Setting", "load"]

Layer = Literal["default", "file", "variable", "flag"]

FILE = "byssus.toml"
KEY_VARIABLES = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY"}  # where the providers look by default
VARIABLES = {"database": "BYSSUS_DB", "app": "BYSSUS_APP", "agent": "BYSSUS_AGENT", "model": "BYSSUS_MODEL"}
FLAGS = {"database": "--db", "app": "--app", "agent": "--agent", "model": "--model"}
CONFIG_VARIABLE = "BYSSUS_CONFIG"

_PROJECT = "pyproject.toml"
_LAYERS: tuple[Layer, ...] = ("default", "file", "variable", "flag")
_EXAMPLES = {
    "database": 'database = "chat.db"',
    "app": 'app = "shop.agents:support"',
    "agent": 'agent = "support"',
    "model": 'model = "anthropic:claude-sonnet-5-5"',
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Setting(NamedTuple):
    """A value and where it came from: a flag, a variable, the path of a file, or "default"."""

    value: str | None = None
    origin: str = "default"
    layer: Layer = "default"

    @property
    def rank(self) -> int:
        """Settings of a higher rank are more specific: a flag is above a variable, and a variable above a file."""
        return _LAYERS.index(self.layer)

    def __repr__(self) -> str:
        shown = None if self.value is None else redacted(self.value)
        return f"Setting(value={shown!r}, origin={self.origin!r}, layer={self.layer!r})"


class Config(NamedTuple):
    """All settings. A value that was not set is None; for `keys`, the variable that the provider reads by default."""

    database: Setting
    app: Setting
    agent: Setting
    model: Setting
    keys: dict[str, Setting]
    file: str | None = None

    @property
    def folder(self) -> str:
        """The directory from which the app is imported: that of the file that names it, or the current one."""
        if self.app.layer == "file" and self.file is not None:
            return str(Path(self.file).parent)
        return str(Path.cwd())

    def key_of(self, provider: str, environ: Mapping[str, str] | None = None) -> str | None:
        """The API key for a provider, from the variable that is configured for it; None if that is not set."""
        variable = self.keys[provider].value
        return (os.environ if environ is None else environ).get(variable or "") or None


def load(
    flags: Mapping[str, str | None] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: str | None = None,
) -> Config:
    """The settings of a program that was started in this directory.

    `flags` are those of its command line, by name of the setting. An empty variable counts as not
    set. An empty flag is a value: `--app ''` is a command without an app.
    """
    environ = os.environ if environ is None else environ
    file, table = _found(environ.get(CONFIG_VARIABLE), directory)
    settings: dict[str, Setting] = {}
    for name, variable in VARIABLES.items():
        flag = (flags or {}).get(name)
        if flag is not None:
            settings[name] = Setting(flag, FLAGS[name], "flag")
        elif environ.get(variable):
            settings[name] = Setting(environ[variable], variable, "variable")
        elif name in table:
            settings[name] = Setting(table[name], str(file), "file")
        else:
            settings[name] = Setting()
    if settings["agent"].rank < settings["app"].rank:  # it was chosen for another app
        settings["agent"] = Setting()
    return Config(**settings, keys=_keys(table, file), file=file)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like settings of ours and are none: `byssus doctor` names them."""
    known = {*VARIABLES.values(), CONFIG_VARIABLE}
    found = os.environ if environ is None else environ
    return sorted(name for name in found if name.startswith("BYSSUS_") and name not in known)


def _keys(table: Mapping[str, Any], file: str | None) -> dict[str, Setting]:
    named = table.get("keys", {})
    return {
        provider: Setting(named[provider], str(file), "file") if provider in named else Setting(variable)
        for provider, variable in KEY_VARIABLES.items()
    }


# --- the file ---------------------------------------------------------------------------------------------------------


def _found(named: str | None, directory: str | None) -> tuple[str | None, dict[str, Any]]:
    """The file that counts, and what it says; no file is an empty table."""
    if named:
        path = Path(named).expanduser().absolute()
        return str(path), _checked(path, _table(path) or {})
    try:
        start = Path.cwd() if directory is None else Path(directory).absolute()
    except OSError:  # it was removed while we were in it
        return None, {}
    for path in (folder / name for folder in (start, *start.parents) for name in (FILE, _PROJECT)):
        if path.is_file() and (table := _table(path)) is not None:
            _check_owner(path, start)
            return str(path), _checked(path, table)
    return None, {}


def _table(path: Path) -> dict[str, Any] | None:
    """What a file says; None for a pyproject.toml that says nothing about byssus."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"the configuration {path} cannot be read ({error.strerror or error}); make it readable, or name another "
            f"file: {CONFIG_VARIABLE}=FILE"
        ) from error
    if path.name != _PROJECT:
        return _parsed(path, data)
    if b"byssus" not in data:  # most files: nothing is parsed, so errors in unrelated parts do not matter
        return None
    tools = _parsed(path, data).get("tool")
    table = tools.get("byssus") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise InputError(f"tool.byssus in {path} must be a table, got {table!r:.80}; write [tool.byssus]")
    return table


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 - most commands are run without a file

    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path} is not UTF-8 (line {line}); save it as UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}; correct it there") from error


def _check_owner(path: Path, start: Path) -> None:
    """A file in a parent directory that belongs to another user must not choose the code that runs."""
    if hasattr(os, "getuid") and not is_trusted(path.stat().st_uid, here=start.stat().st_uid, user=os.getuid()):
        raise InputError(
            f"{path} belongs to another user, so it is not used; to use it, set {CONFIG_VARIABLE}={path}, and to do "
            f"without, {CONFIG_VARIABLE}={os.devnull}"
        )


def is_trusted(owner: int, *, here: int, user: int) -> bool:
    """Whether a file is used without being named: the user's own, root's, or of the owner of the current directory."""
    return owner in (0, here, user)


def _checked(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    known = [*VARIABLES, "keys"]
    for name, value in table.items():
        if name not in known:
            raise InputError(f"unknown key {name!r} in {path}; {_suggestion(name, known)}")
        if name != "keys" and not (isinstance(value, str) and value):
            shown = redacted(repr(value))
            raise InputError(
                f"{name} in {path} must be a non-empty string, got {shown:.80}; for example: {_EXAMPLES[name]}"
            )
    _check_keys(path, table.get("keys", {}))
    if "database" in table:
        table = {**table, "database": _beside(path, table["database"])}
    return table


def _check_keys(path: Path, keys: object) -> None:
    if not isinstance(keys, dict):
        raise InputError(
            f'keys in {path} must be a table of variables by provider; for example: keys = {{anthropic = "MY_KEY"}}'
        )
    for provider, variable in keys.items():
        if provider not in KEY_VARIABLES:
            raise InputError(f"unknown key 'keys.{provider}' in {path}; {_suggestion(provider, [*KEY_VARIABLES])}")
        if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
            raise InputError(  # what is there may be a key: it is not shown
                f"keys.{provider} in {path} must be the name of the environment variable that holds the key, not the "
                f'key itself; for example: {provider} = "{KEY_VARIABLES[provider]}"'
            )


def _beside(file: Path, place: str) -> str:
    """A place as a file means it: a path is relative to the file."""
    if place == ":memory:" or place.startswith("~") or looks_like_dsn(place):
        return place
    return str(file.parent / place)


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
