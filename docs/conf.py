"""The documentation as a site: `make docs` builds it from these pages and from the docstrings, and every warning fails.

Two things are added to Sphinx here. A public name that the reference does not show, or that has no docstring, is a
warning. And the search finds Chinese, which has no spaces: index and query are cut into characters and pairs of
characters, so a word of any length is found.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Container, Iterator
from types import ModuleType
from typing import Any

from pygments.lexers.python import PythonLexer
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.search.en import SearchEnglish
from sphinx.util import logging

import byssus

project = "byssus"
copyright = "the authors of byssus"  # noqa: A001 - Sphinx's name for it
version = release = byssus.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
nitpicky = True
# Without requests to other hosts nothing is known of other projects' names: only our own are checked.
nitpick_ignore_regex = [
    ("py:.*", r"(?!byssus\b).*"),
    ("py:.*", r"byssus\..*\.(_\w+|[FPRT])"),  # private bases and type variables
    ("py:class", r"byssus\.tools\.Tool\[.*"),  # Sphinx does not take a list of parameters apart
]
# Internal types that a public signature mentions.
nitpick_ignore = [
    ("py:class", f"byssus.{name}")
    for name in (
        "tools.Outcome",
        "stream.Backlog",
        "store.database.Store",
        "store.operations.HasStore",
        "store.operations.Runner",
        "run.outside.supervision.Resumable",
        "values.marks.MarkedMessages",
        "queries.log.threads.Position",
        "queries.tasks.rates.TypeLimits",
        "worker.context.Attempt",
    )
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_all_links_external = False

autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_mock_imports = ["agentscope"]  # which cannot be installed beside mcp
autodoc_typehints_format = "short"
default_role = "code"  # docstrings mark code with single backticks
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "byssus"
html_search_language = "pairs"
html_copy_source = False
html_show_copyright = False

# What docs/stability.md calls public.
PUBLIC = [
    "byssus",
    *(f"byssus.{name}" for name in ("checkpointer", "storage", "memory", "errors", "events", "messages", "middleware")),
    *(f"byssus.{name}" for name in ("signals", "stream", "telemetry", "testing", "tools", "tools.mcp")),
    "byssus.apps",
    "byssus.config",
    "byssus.worker",
    *(f"byssus.providers.{name}" for name in ("anthropic", "openai", "local", "scripted", "base")),
    "byssus.adapters.agentscope",
]

# What runs the queries; the tag of a value, to which every `type` would link; and what only an agent reads.
HIDDEN = {"store", "type", "position", "unledgered", "mail", "has_ttl", "made", "demand"}

_log = logging.getLogger(__name__)


# --- search -----------------------------------------------------------------------------------------------------------

_CHINESE = r"\u3400-\u9fff\uf900-\ufaff\u3040-\u30ff\uac00-\ud7af"


class SearchPairs(SearchEnglish):  # type: ignore[misc]
    """English words by their stems; Chinese, Japanese and Korean by characters and pairs of them."""

    lang = "pairs"
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[CHINESE]+|(?:(?![CHINESE])[\p{L}\p{M}\p{N}_])+/gu) ?? []).flatMap((run) =>
    !/[CHINESE]/.test(run) || run.length < 3 ? [run] : [...run].slice(1).map((last, at) => run[at] + last));
""".replace("CHINESE", _CHINESE)

    def split(self, input: str) -> list[str]:
        runs = re.findall(rf"[{_CHINESE}]+|[^\W{_CHINESE}]+", input)
        return [term for run in runs for term in (_pairs(run) if re.match(f"[{_CHINESE}]", run) else [run])]


def _pairs(run: str) -> Iterator[str]:
    yield from run
    yield from (run[at : at + 2] for at in range(len(run) - 1))


# --- docstrings -------------------------------------------------------------------------------------------------------


def read_as_markdown(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """In our docstrings an indented block after a paragraph is code, and a bar is a bar."""
    shown: list[str] = []
    before = ""
    for line in lines:
        if line.startswith("    ") and before and not before.startswith((" ", "-", "*")) and shown[-1] == "":
            shown += ["::", ""]
        shown.append(line if line.startswith("    ") else _without_bars(line))
        before = line or before
    lines[:] = shown


def _without_bars(line: str) -> str:
    return "`".join(part if at % 2 else part.replace("|", "\\|") for at, part in enumerate(line.split("`")))


def skip_what_the_package_shows(app: Sphinx, _what: str, name: str, obj: object, skip: bool, _options: object) -> bool:
    """A name of `byssus` itself is shown on its page alone; and fields that would catch the links to `type` nowhere."""
    elsewhere = app.env.current_document.docname != "api/byssus"
    return skip or name in HIDDEN or (elsewhere and name in byssus.__all__ and getattr(byssus, name) is obj)


# --- nothing public is undocumented -----------------------------------------------------------------------------------


def warn_of_undocumented(_app: Sphinx, env: BuildEnvironment) -> None:
    for told in undocumented(env.domains.python_domain.objects):
        _log.warning(told)


def undocumented(shown: Container[str]) -> Iterator[str]:
    for name, obj in public_names():
        if name not in shown and _canonical(obj) not in shown:
            yield f"the reference does not show the public name {name}"
        elif not (obj.__doc__ if inspect.isclass(obj) else inspect.getdoc(obj)):
            yield f"there is no docstring on the public name {name}"


def public_names() -> Iterator[tuple[str, Any]]:
    """All classes, functions, methods and properties that are public, by their full names."""
    with mock(autodoc_mock_imports):
        modules = [importlib.import_module(name) for name in PUBLIC]
    for module in modules:
        for name, obj in exported(module):
            if inspect.isclass(obj) or inspect.isroutine(obj):
                yield f"{module.__name__}.{name}", obj
            if inspect.isclass(obj):
                yield from ((f"{module.__name__}.{name}.{key}", value) for key, value in _members(obj))


def exported(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module offers: its `__all__`, else what it defines; without what `byssus` itself shows already."""
    own = [name for name, obj in vars(module).items() if getattr(obj, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", own):
        obj = getattr(module, name)
        if not name.startswith("_") and (module is byssus or getattr(byssus, name, None) is not obj):
            yield name, obj


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name in vars(kind):
        obj = getattr(kind, name)
        if not name.startswith("_") and name not in HIDDEN and (inspect.isroutine(obj) or isinstance(obj, property)):
            yield name, obj


def _canonical(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '')}.{getattr(obj, '__qualname__', '')}"


def setup(app: Sphinx) -> None:
    app.add_lexer("ipython", PythonLexer)  # cells of a notebook, in which `await` is allowed
    app.add_lexer("mermaid", TextLexer)  # drawing it would take a script of three megabytes
    app.add_search_language(SearchPairs)
    app.connect("autodoc-process-docstring", read_as_markdown)
    app.connect("autodoc-skip-member", skip_what_the_package_shows)
    app.connect("env-check-consistency", warn_of_undocumented)
