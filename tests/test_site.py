"""The documentation as a site: no fault passes, no other host is asked, and the search finds words."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import byssus

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

# What the search's own code asks of a browser.
BROWSER = """
globalThis.window = globalThis;
const nothing = () => null;
globalThis.localStorage = {setItem: nothing, getItem: nothing, removeItem: nothing};
globalThis.document = {
  readyState: "loading", addEventListener: nothing, getElementById: nothing,
  documentElement: {dataset: {content_root: "./"}},
};
globalThis._removeChildren = nothing;
globalThis._ready = nothing;
globalThis._ = (text) => text;
const SPHINX_HIGHLIGHT_ENABLED = false;
"""


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--quiet",
        "--define",
        "toc_object_entries=0",  # a third of the time: each page would copy the contents of all, with every method
        "-c",
        str(DOCS),
        str(source),
        str(target),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)  # the whole site, which takes minutes on a busy machine
def test_the_site_has_no_fault_asks_no_other_host_and_finds_words_of_both_languages(tmp_path: Path) -> None:
    built = build(DOCS, tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    assert_nothing_comes_from_another_host(tmp_path)
    assert_the_search_finds(tmp_path)


def assert_nothing_comes_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text("utf-8")
        loads = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=\"([^\"]*)\"", text)
        assert loads
        assert [url for url in loads if re.match(r"(\w+:)?//", url)] == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(\w+:)?//", style.read_text("utf-8")), style.name
    assert "prefers-color-scheme: dark" in (site / "index.html").read_text("utf-8") or any(
        "prefers-color-scheme:dark" in style.read_text("utf-8").replace(" ", "") for style in site.rglob("*.css")
    )


def assert_the_search_finds(site: Path) -> None:
    found = searcher(site)
    assert "recovery" in found("crashed lease")
    assert "recovery" in found("Crashes")  # another form of the word
    assert found("follow_up")
    assert "zh-CN" in found("崩溃")
    assert "zh-CN" in found("审")  # one character
    assert "zh-CN" in found("工具调用")  # more than one word
    assert found("审崩") == []


def searcher(site: Path) -> Callable[[str], list[str]]:
    """The site's own search, run as a browser would; returns the names of the pages that it lists."""
    engine = importlib.import_module("quickjs").Context()
    engine.eval(BROWSER)
    for script in ("_static/language_data.js", "_static/searchtools.js", "searchindex.js"):
        engine.eval((site / script).read_text("utf-8"))
    engine.eval("var find = (query) => Search._performSearch(...Search._parseQuery(query)).map((hit) => hit[0]).join()")
    find = engine.get("find")
    return lambda query: sorted(set(filter(None, find(query).split(","))))


def test_each_kind_of_fault_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    faults = "[a](missing.md) [b](other.md#missing) {py:class}`byssus.Agnet` {py:meth}`byssus.Agent.promt`"
    (source / "index.md").write_text(f"# Faults\n\n{faults}\n", "utf-8")
    (source / "other.md").write_text("# Left out\n", "utf-8")
    built = build(source, tmp_path / "site")
    assert built.returncode == 1
    for told in (
        "'missing.md'",
        "'missing'",
        "byssus.Agnet",
        "byssus.Agent.promt",
        "isn't included in any toctree",
        "does not show the public name byssus.Agent.prompt",
        "does not show the public name byssus.checkpointer.Checkpointer.append",
    ):
        assert told in built.stderr, told


def test_a_public_name_without_a_docstring_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    undocumented = runpy.run_path(str(DOCS / "conf.py"))["undocumented"]
    every = {told.rpartition(" ")[2] for told in undocumented({})}
    assert list(undocumented(every)) == []
    monkeypatch.setattr(byssus.Agent.prompt, "__doc__", None)
    monkeypatch.setattr(byssus.RunResult, "__doc__", None)
    assert list(undocumented(every)) == [
        "there is no docstring on the public name byssus.Agent.prompt",
        "there is no docstring on the public name byssus.RunResult",
    ]


def test_the_pins_of_the_site_agree_with_those_of_the_tests() -> None:
    def pins(name: str) -> set[tuple[str, str]]:
        return set(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / name).read_text("utf-8"), re.MULTILINE))

    docs, dev = pins("docs.txt"), dict(pins("dev.txt"))
    assert docs
    assert [(name, version, dev[name]) for name, version in docs if dev.get(name, version) != version] == []
