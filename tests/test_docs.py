"""The README and the examples say only what is true and runs: each snippet and example is run as its reader would."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import byssus.storage
from byssus import Agent
from byssus.checkpointer import FollowItem, item_from_json
from byssus.messages import ToolCall
from byssus.storage import AgentStorage
from tests.support import forked, postgres
from tests.support.overlay import OVERLAY
from tests.support.terminal import Terminal
from tests.support.wire import Anthropic, Server, Step

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATION = ROOT / "README.zh-CN.md"  # whose code is that of the README
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

SLOW = ("anthropic", "anthropic.resources.messages", "anthropic.types")  # to import, for every program of its own


def snippets(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = [body for kind, body in FENCE.findall(page.read_text("utf-8")) if kind == language]
        found += [(f"{page.name}-{number}", body) for number, body in enumerate(blocks, 1)]
    return found


def run(
    *arguments: str,
    folder: Path,
    server: Server | None = None,
    stdin: str = "",
    code: int = 0,
    variables: Mapping[str, str] | None = None,
    agentscope: bool = False,
) -> str:
    environment = {**_environment(folder, server), **(variables or {})}
    if agentscope:  # which lies in a directory of its own, and warns
        environment |= {"PYTHONPATH": f"{OVERLAY}{os.pathsep}{ROOT / 'src'}", "PYTHONWARNINGS": "default"}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, check=False
        )
    else:
        done = forked.run(arguments, env=environment, cwd=folder, imports=SLOW, input=stdin, timeout=100)
    assert done.returncode == code, done.stderr
    return done.stdout


def run_command(*arguments: str, folder: Path, stdin: str = "") -> str:
    return run("-m", "byssus", *arguments, folder=folder, stdin=stdin)


def _environment(folder: Path, server: Server | None = None) -> dict[str, str]:
    return {
        **os.environ,
        "ANTHROPIC_API_KEY": "test-key",
        "ANTHROPIC_BASE_URL": server.url if server else "http://127.0.0.1:9",
        "BYSSUS_DB": str(folder / "chat.db"),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONWARNINGS": "error",
    }


@pytest.mark.parametrize(("name", "code"), snippets("python"), ids=lambda value: value if len(value) < 40 else "code")
def test_each_python_snippet_runs_as_it_stands_and_again(name: str, code: str, tmp_path: Path) -> None:
    steps: list[Step] = []
    if "AnthropicProvider" in code or '"anthropic:' in code:
        asked = len(re.findall(r"agent\.(?:prompt|resume|run_sync|stream)\(", code))
        steps = [Anthropic.answer(text) for text in ("Hello!", "Fine, thank you.")[:asked]]
    times = 2 if '.db"' in code else 1  # readers run a program again, and its file is still there
    with Server(steps * times) as server, databases(code) as variables:
        for _ in range(times):
            run(
                "-c",
                code,
                folder=tmp_path,
                server=server,
                variables=variables,
                stdin="Hello.\n\nHow are you?\n" if "input(" in code else "",
                agentscope="agentscope" in code,
            )


def test_the_first_web_service_refuses_a_busy_thread_with_a_status(tmp_path: Path) -> None:
    code = dict(snippets("python"))["web.md-1"]
    busy = """
from byssus import ToolCall, tool
from byssus.checkpointer import SQLiteCheckpointer
from byssus.storage import AgentStorage

@tool
def ask_the_service() -> str:
    with TestClient(app) as client:
        return str(client.post("/chat/t", json={"message": "me too"}).status_code)

with SQLiteCheckpointer("chat.db") as cp:
    holder = ScriptedProvider([[ToolCall("c1", "ask_the_service", {})], "Done."])
    agent = Agent(provider=holder, model=Model("m"), tools=[ask_the_service], checkpointer=cp, thread_id="t")
    agent.run_sync("Go.")
    print(agent.state.messages[-2].text)

with AgentStorage("chat.db") as storage:
    storage.append("paused", [{"role": "user", "content": "Wait."}])
    storage.pause_session("paused")
with TestClient(app) as client:
    for thread, message in (("t", " "), ("paused", "me too")):
        refused = client.post(f"/chat/{thread}", json={"message": message})
        print(refused.status_code, refused.json()["detail"])
"""
    assert run("-c", code + busy, folder=tmp_path).splitlines() == ["409", "422 InputError", "409 ThreadInactive"]


def test_the_cells_of_a_notebook_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in IPython: top-level await on one event loop, one namespace, and the value of a last expression is shown."""
    monkeypatch.chdir(tmp_path)

    async def shown() -> list[object]:
        names: dict[str, object] = {"__name__": "__main__"}
        return [await run_cell(cell, names) for _, cell in snippets("ipython")]

    last = [value for value in asyncio.run(shown()) if hasattr(value, "_repr_markdown_")]
    assert len(last) == 2
    assert all("Oslo has about **718,000** people." in value._repr_markdown_() for value in last)


async def run_cell(cell: str, names: dict[str, object]) -> object:
    *statements, last = ast.parse(cell).body
    if isinstance(last, ast.Expr):
        last = ast.Assign([ast.Name("_", ast.Store())], last.value)
    module = ast.fix_missing_locations(ast.Module([*statements, last], []))
    done = eval(compile(module, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(done):
        await done
    return names.pop("_", None)


@contextlib.contextmanager
def databases(code: str) -> Iterator[dict[str, str]]:
    """What a snippet that asks for a Postgres finds in its environment."""
    if "DATABASE_URL" not in code:
        yield {}
        return
    place = postgres.server_for_tests().fresh_schema()
    yield {"DATABASE_URL": f"{place.dsn}&schema={place.name}"}
    postgres.server_for_tests().drop(place)


def test_the_first_snippet_remembers_in_a_second_process_and_starts_blank_in_another_thread(tmp_path: Path) -> None:
    code = snippets("python")[0][1]
    other = code.replace('thread_id="trip"', 'thread_id="other"')
    assert other != code
    with Server([Anthropic.answer(text) for text in ("a", "b", "c", "d", "e", "f")]) as server:
        assert run("-c", code, folder=tmp_path, server=server) == "a\nb\n"
        assert run("-c", code, folder=tmp_path, server=server) == "c\nd\n"
        assert run("-c", other, folder=tmp_path, server=server) == "e\nf\n"
        lengths = [len(request.body["messages"]) for request in server.requests]
    assert lengths == [1, 3, 5, 7, 1, 3]


def test_the_items_of_a_follower_are_shown_as_json_one_of_each() -> None:
    ((_, body),) = [snippet for snippet in snippets("json") if snippet[0].startswith("runs.md")]
    lines = body.splitlines()
    items = [item_from_json(line) for line in lines]
    assert sorted(item.type for item in items) == sorted(kind.type for kind in get_args(FollowItem))
    assert [json.loads(item.to_json()) for item in items] == [json.loads(line) for line in lines]


def test_the_tables_of_storage_have_each_method_with_its_arguments() -> None:
    page = (ROOT / "docs" / "storage.md").read_text("utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    shown = {name: given for cell in cells for name, given in re.findall(r"`(\w+_\w+)\((.*?)\)`", cell)}
    assert len(shown) > 30
    for name, given in shown.items():
        (named,) = ast.parse(f"def f(self, {given}): ...").body
        assert isinstance(named, ast.FunctionDef)
        known = inspect.getfullargspec(getattr(AgentStorage, name))
        parts = ([each.arg for each in named.args.args], [each.arg for each in named.args.kwonlyargs])
        assert parts == (known.args, known.kwonlyargs), name


def test_the_tables_of_options_and_rows_have_each_name() -> None:
    def names(page: str, heading: str) -> list[list[str]]:
        section = (ROOT / "docs" / page).read_text("utf-8").partition(f"{heading}\n")[2].partition("\n#")[0]
        return [re.findall(r"`(\w+)`", line) for line in section.splitlines() if line.startswith("| `")]

    options = [name for line in names("agents.md", "## Options") for name in line]
    assert set(options) >= set(inspect.getfullargspec(Agent).kwonlyargs)
    rows = {row: keys for row, *keys in names("storage.md", "### Rows")}
    assert len(rows) == 8
    for row, keys in rows.items():
        wanted = list(get_type_hints(getattr(byssus.storage, row)))
        assert keys[: len(wanted)] == wanted, row


def test_the_readme_is_short_and_its_agent_has_twelve_lines() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200
    assert len([line for line in snippets("python")[0][1].splitlines() if line]) == 12


def test_the_chinese_readme_has_the_same_code_links_and_sections() -> None:
    english, chinese = (page.read_text("utf-8") for page in (PAGES[0], TRANSLATION))
    assert FENCE.findall(chinese) == FENCE.findall(english)
    for shared in (r"\]\(([^)]+)\)", r"^(#+ |\| |- |\d\. )"):
        assert re.findall(shared, chinese, re.MULTILINE) == re.findall(shared, english, re.MULTILINE)


def test_the_readme_names_commands_of_make_and_byssus_alone() -> None:
    lines = [line.split("#")[0].strip() for _, body in snippets("console") for line in body.splitlines()]
    commands = [shlex.split(line) for line in dict.fromkeys(lines) if line]
    assert {command[0] for command in commands} == {"make", "byssus"}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {command[1] for command in commands if command[0] == "make"} <= {*targets}


@pytest.mark.timeout(600)  # dozens of processes, on a machine that may be busy
def test_each_byssus_command_of_the_readme_runs(tmp_path: Path) -> None:
    lines = [line.split("#")[0].strip() for _, body in snippets("console") for line in body.splitlines()]
    for line in dict.fromkeys(line for line in lines if line.startswith("byssus")):
        arguments = shlex.split(line)[1:]
        stdin = "Say hello.\n" if arguments[0] == "chat" else ""
        said = run_command(*arguments, folder=tmp_path, stdin=stdin).strip()
        assert bool(said) != (
            arguments in (["unfinished"], ["pending"], ["memory"], ["resume"], ["watch"])
        )  # of which there are none here


def test_example_chat_goes_on_in_a_second_process(tmp_path: Path) -> None:
    with Server([Anthropic.answer("Hello, Ann."), Anthropic.answer("You are Ann.")]) as server:
        example = str(ROOT / "examples" / "chat.py")
        first = run(example, "t", folder=tmp_path, server=server, stdin="I am Ann.\n")
        second = run(example, "t", folder=tmp_path, server=server, stdin="\nWho am I?\n")
        sent = [turn["content"][0]["text"] for turn in server.requests[1].body["messages"]]
    assert (first, second) == ("> Hello, Ann.\n> \n", "> > You are Ann.\n> \n")
    assert sent == ["I am Ann.", "Hello, Ann.", "Who am I?"]


@pytest.mark.parametrize("program", ["chat.md-1", "chat.py"])
def test_ctrl_c_at_the_prompt_ends_a_chat_at_once_and_without_a_traceback(tmp_path: Path, program: str) -> None:
    page = dict(snippets("python")).get(program)
    command = ["-c", page] if page else [str(ROOT / "examples" / program)]
    environment = {name: value for name, value in _environment(tmp_path).items() if os.environ.get(name) != value}
    terminal = Terminal(sys.executable, *command, env=environment, cwd=tmp_path)
    try:
        terminal.wait_for("> ")
        terminal.press_until_it_ends("\x03")
        assert (terminal.process.returncode, "Traceback" in terminal.screen) == (0, False), terminal.screen
    finally:
        terminal.close()


def test_a_question_that_another_window_asks_and_answers_costs_the_chat_neither_its_life_nor_its_text(
    tmp_path: Path,
) -> None:
    windows = """
import builtins
from byssus import Model, ToolCall, tool
from byssus.testing import ScriptedProvider

@tool(approval=True)
def book() -> str:
    return "booked"

def in_two_windows(prompt: str) -> str:
    with SQLiteCheckpointer("chat.db") as cp, AgentStorage("chat.db") as storage:
        if "[y/n]" in prompt:
            storage.answer("main", "c1", "approve")
            return "n"
        if storage.info("main") is not None:
            raise EOFError
        provider = ScriptedProvider([[ToolCall("c1", "book", {})]])
        Agent(provider=provider, model=Model("m"), tools=[book], checkpointer=cp, thread_id="main").run_sync("Book it.")
        return "Thanks."

builtins.input = in_two_windows

"""
    before, defined, after = dict(snippets("python"))["chat.md-1"].partition("def show(")
    after = after.replace("wait=60", "wait=60, tools=[book]")
    with Server([Anthropic.answer("It is booked."), Anthropic.answer("Welcome.")]) as server:
        told = run("-c", before + windows + defined + after, folder=tmp_path, server=server)
        sent = [request.body["messages"][-1]["content"][0] for request in server.requests]
    assert told == "It is booked.\nWelcome.\n\n"
    assert (sent[0]["type"], sent[1]["text"]) == ("tool_result", "Thanks.")


def test_example_weather_answers_from_both_calls(tmp_path: Path) -> None:
    calls = [
        ToolCall("toolu_1", "temperature", {"city": "Oslo"}),
        ToolCall("toolu_2", "forecast", {"city": "Lisbon", "period": {"days": 2, "unit": "F"}}),
    ]
    with Server([Anthropic.answer(*calls), Anthropic.answer("Lisbon is warmer.")]) as server:
        output = run(str(ROOT / "examples" / "weather.py"), folder=tmp_path, server=server)
        results = server.requests[1].body["messages"][-1]["content"]
    *told, reply = output.splitlines()
    assert sorted(told) == ["[forecast: 66 F, 64 F]", "[temperature: 4 C]"]
    assert reply == "Lisbon is warmer."
    assert [result["content"][0]["text"] for result in results] == ["4 C", "66 F, 64 F"]


def test_example_fallback_is_answered_by_the_next_model(tmp_path: Path) -> None:
    busy = Anthropic.error(529, "overloaded_error", "Overloaded", retry_after="0")
    with Server([busy, busy, Anthropic.answer("Hello.", model="claude-haiku-4-5")]) as server:
        output = run(str(ROOT / "examples" / "fallback.py"), folder=tmp_path, server=server)
        models = [request.body["model"] for request in server.requests]
    assert models == ["claude-sonnet-5-5", "claude-sonnet-5-5", "claude-haiku-4-5"]
    assert output == "Hello.\nanswered by claude-haiku-4-5 (anthropic)\n"


def test_example_fallback_is_answered_by_the_embedded_model_when_the_service_is_down(tmp_path: Path) -> None:
    busy = Anthropic.error(529, "overloaded_error", "Overloaded", retry_after="0")
    with Server([busy] * 4) as server:
        output = run(str(ROOT / "examples" / "fallback.py"), folder=tmp_path, server=server)
    assert output.endswith("answered by smollm2-135m-instruct (local)\n")


def test_example_sliding_window_keeps_all_and_shows_the_last(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples" / "sliding_window.py"), folder=tmp_path)
    assert "stored: 10 messages" in output
    assert "['Question 4?', 'Reply 4.', 'Question 5?']" in output


def test_example_offline_answers_without_a_key(tmp_path: Path) -> None:
    assert "2 messages in the thread" in run(str(ROOT / "examples" / "offline.py"), folder=tmp_path)


@pytest.mark.parametrize(("answer", "told"), [("approve", "is deleted"), ("deny", "denied it")])
def test_example_approval_keeps_its_question_until_somebody_answers(tmp_path: Path, answer: str, told: str) -> None:
    example = str(ROOT / "examples" / "approval.py")
    assert run(example, folder=tmp_path).startswith("waiting")
    assert run(example, folder=tmp_path).startswith("Still waiting")
    assert told in run(example, answer, folder=tmp_path)


def test_example_resume_all_finishes_what_a_crash_interrupted(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "resume_all.py")
    before = run(example, "crash", folder=tmp_path, code=137).splitlines()
    assert sorted(before[:3]) == [f"charging for order {number}" for number in (1, 2, 3)]
    after = run(example, folder=tmp_path).splitlines()
    assert [line for line in after if "charging" in line] == []
    finished = sorted(line for line in after if line.startswith("order"))
    assert finished == [f"order-{number}: charged and shipped" for number in (1, 2, 3)]
    assert run(example, folder=tmp_path) == ""


def test_example_time_travel_tells_the_same_story_each_time(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "time_travel.py")
    first, second = (re.sub(r"[0-9a-f]{32}", "ID", run(example, folder=tmp_path)) for _ in range(2))
    assert first == second
    plan, other, parted, changed, tree, pruned, whole = first.strip().split("\n\n")
    assert plan.splitlines()[-1] == "  assistant: Booked: two beds."
    assert "They share 2 messages; then 4 follow here, and 2 there." in parted
    assert changed.splitlines()[-1] == "  assistant: Booked: two seats."
    assert "left behind\n│   └── step 3 · message 6 · ID  [turn]  Booked: two beds." in tree
    assert pruned.startswith("Pruned: 3 checkpoints and 2 messages went.")
    assert "beds" not in pruned
    assert whole.splitlines()[1:] == other.splitlines()[1:]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_example_storage_tour_tells_the_same_story_on_both_databases(tmp_path: Path, kind: str) -> None:
    example = str(ROOT / "examples" / "storage_tour.py")
    with databases("DATABASE_URL") as variables:
        place = [variables["DATABASE_URL"]] if kind == "postgres" else []
        story = run(example, *place, folder=tmp_path)
    begun, said, tools, quota, task, usage, found, kept = story.strip().split("\n\n")
    assert begun.splitlines()[1] == "The agent says: 上海今天晴, 21 度。"
    assert "is paused, and no run starts on it" in begun
    assert said.splitlines()[-1] == "  assistant  上海今天晴, 21 度。"
    assert tools.splitlines()[1:] == [
        "  weather({'city': '上海'}) -> 上海: 晴, 21 °C",
        "  weather({'city': '北京'}) -> {'sky': '多云'}",
    ]
    assert quota.splitlines()[0] == "1,067 of 2,000 tokens are spent."
    assert task == "The task 'summarize' is completed: 两座城市的天气"
    assert "8 messages, 1,067 tokens" in usage
    assert found.splitlines()[1] == "  user: 北京的**天气**怎么样?"
    assert len([line for line in found.splitlines() if line.startswith("  assistant: [{")]) == 2
    assert kept.splitlines()[-1] == "Restored elsewhere: 8 messages; check: ok."


def test_example_memory_tour_is_remembered_after_a_restart(tmp_path: Path) -> None:
    told = run(str(ROOT / "examples" / "memory_tour.py"), folder=tmp_path).splitlines()
    assert told == [
        "13 messages, 1 of them a hint",
        "removed: 1",
        "summary: Ann asked 4 questions about Beijing.",
        "after a restart: Ann asked 4 questions about Beijing. ... Answer 6.",
        "found: ['Question 2 about Beijing?']",
        "the model saw 6 messages and said: Six.",
        "the thread keeps 14",
    ]


def test_each_example_has_a_test() -> None:
    tested = "".join(Path(__file__).with_name(f"test_{name}.py").read_text("utf-8") for name in ("docs", "fastapi_app"))
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f'"{path.name}"' not in tested] == []


def test_no_page_holds_a_placeholder() -> None:
    for page in (*PAGES, TRANSLATION):
        assert not re.search(r"^[A-Z_]{5,}$|TODO|FIXME", page.read_text("utf-8"), re.MULTILINE), page.name


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in (*PAGES, TRANSLATION):
        for target in re.findall(r"(?:\]\(|<a href=\")([^)#:\"]+)[)\"]", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
