"""MCP servers as tools, each a real process that speaks the protocol through the official SDK."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from mcp import Client, StdioServerParameters
from mcp.server import MCPServer

from byssus import Agent, ImageContent, Model, TextContent, ToolCall, ToolResultMessage, tool
from byssus.errors import InputError, McpServerFailed
from byssus.events import Event, ToolExecutionEnd, ToolExecutionUpdate
from byssus.providers.scripted import ScriptedProvider
from byssus.tools import Tool
from byssus.tools.mcp import mcp_tools
from tests.support.databases import Database
from tests.support.mcp_server import server

pytestmark = pytest.mark.processes

SERVER = str(Path(__file__).parents[1] / "support" / "mcp_server.py")
STDIO = [sys.executable, SERVER, "stdio"]
ALL_KINDS = ["stdio", "http", "stdio of 2025", "http of 2025"]
Tools: TypeAlias = list[Tool[..., Any]]
Listen: TypeAlias = Callable[[Agent, Event], None]


class HttpServer:
    """A server process for all tests of this file, started again after one has killed it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._port = int(self._process.stdout.readline())
        return f"http://127.0.0.1:{self._port}/mcp"

    def stop(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()


@pytest.fixture(scope="module")
def http() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture(params=["stdio", "http", "http of 2025"])
def options(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """What to pass to mcp_tools: for both transports, and for the protocol as it was before 2026.

    Of that, a process of its own ("stdio of 2025") is tried where calls begin and where they are cancelled.
    """
    parameters = StdioServerParameters(command=STDIO[0], args=STDIO[1:])
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "stdio": lambda: {"command": STDIO},
        "http": lambda: {"url": request.getfixturevalue("http").url},
        "stdio of 2025": lambda: {"client": Client(parameters, mode="legacy")},
        "http of 2025": lambda: {"client": Client(request.getfixturevalue("http").url, mode="legacy")},
    }
    return kinds[request.param]


def inside() -> dict[str, Any]:
    """The same server without a process, for what has nothing to do with processes."""
    return {"client": Client(server)}


async def ask(tools: Tools, *calls: ToolCall, listen: Listen | None = None) -> list[ToolResultMessage]:
    """Let a model make these calls, all in one reply; returns their results."""
    return await ask_in_turn(tools, list(calls), listen=listen)


async def ask_in_turn(tools: Tools, *replies: list[ToolCall], listen: Listen | None = None) -> list[ToolResultMessage]:
    agent = Agent(provider=ScriptedProvider([*replies, "done"]), model=Model("m"), tools=tools)
    if listen is not None:
        agent.subscribe(lambda event: listen(agent, event))
    result = await agent.prompt("go")
    return [message for message in result.messages if isinstance(message, ToolResultMessage)]


def call(name: str, arguments: dict[str, Any] | None = None, id: str | None = None) -> ToolCall:
    return ToolCall(id or f"call-{name}", name, arguments or {})


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ALL_KINDS, indirect=True)
def test_all_calls_go_to_one_process_however_many_tasks_they_come_from(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            together = await ask(tools, call("pid", id="a"), call("pid", id="b"), call("pid", id="c"))
            later = await ask_in_turn(tools, [call("pid", id="d")], [call("pid", id="e")])
        pids = {result.text for result in together + later}
        assert len(together) + len(later) == 5
        assert len(pids) == 1
        assert int(pids.pop()) != os.getpid()

    run(main)


def test_the_model_is_told_what_the_server_says_of_its_tools() -> None:
    async def main() -> None:
        async with mcp_tools(**inside(), only=["forecast"]) as tools:
            provider = ScriptedProvider(["done"])
            await Agent(provider=provider, model=Model("m"), tools=tools).prompt("go")
        (spec,) = provider.requests[0].tools
        assert (spec.name, spec.description) == ("forecast", "The weather to come.")
        assert spec.parameters["type"] == "object"
        assert spec.parameters["required"] == ["place"]
        assert set(spec.parameters["$defs"]["Place"]["properties"]) == {"city", "days"}

    run(main)


@pytest.mark.parametrize("options", ["stdio", "http of 2025"], indirect=True)
def test_structured_content_is_in_the_details_and_survives_storage(
    options: Callable[[], dict[str, Any]], database: Database
) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools, database.checkpointer() as cp:
            script = ScriptedProvider([[call("forecast", {"place": {"city": "Oslo"}})], "done"])
            agent = Agent(provider=script, model=Model("m"), tools=tools, checkpointer=cp, thread_id="t")
            await agent.prompt("go")
            stored = await cp.load("t")
        assert stored is not None
        result = stored.messages[2]
        assert isinstance(result, ToolResultMessage)
        assert result == agent.state.messages[2]
        assert result.details == {"city": "Oslo", "days": 1, "sunny": True}
        assert '"sunny": true' in result.text
        assert not result.is_error

    run(main)


def test_a_tool_that_fails_is_an_error_that_the_model_reads(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            failed, invalid = await ask(tools, call("fail"), call("forecast", {"place": {}}))
        assert failed.is_error
        assert "the disk is on fire" in failed.text
        assert invalid.is_error
        assert "place.city" in invalid.text

    run(main)


def test_arguments_that_are_no_json_object_do_not_reach_the_server() -> None:
    async def main() -> None:
        async with mcp_tools(**inside(), only=["forecast"]) as tools:
            (result,) = await ask(tools, ToolCall("1", "forecast", {}, '{"place": '))
        assert result.is_error
        assert "not a JSON object" in result.text

    run(main)


def test_a_strange_argument_costs_at_most_its_own_call(options: Callable[[], dict[str, Any]]) -> None:
    strange: list[Any] = ["\ud800", float("nan"), 2**70, "\x00", [[[[]]]], {"": None}]

    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            replies = [[call("echo", {"value": value}, str(number))] for number, value in enumerate(strange)]
            *_, last = await ask_in_turn(tools, *replies, [call("pid")])
        assert last.text.isdigit()

    run(main)


@pytest.mark.parametrize("options", ["stdio", "http"], indirect=True)
def test_a_result_of_many_megabytes_arrives_whole(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            (result,) = await ask(tools, call("long", {"size": 5_000_000}))
        assert len(result.text) == 5_000_000

    run(main)


def test_a_server_that_prints_into_its_own_protocol_is_understood_all_the_same() -> None:
    script = (
        "import runpy, sys; print('Welcome!', flush=True); sys.argv[1:] = ['stdio']; "
        f"runpy.run_path({SERVER!r}, run_name='__main__')"
    )

    async def main() -> None:
        async with mcp_tools(command=[sys.executable, "-c", script]) as tools:
            (result,) = await ask(tools, call("pid"))
        assert result.text.isdigit()

    run(main)


def test_images_come_as_images(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            (result,) = await ask(tools, call("picture"))
        (image,) = result.content
        assert isinstance(image, ImageContent)
        assert image.mime_type == "image/png"
        assert image.data.startswith("iVBORw0KGgo")

    run(main)


def test_resources_come_as_text_and_what_cannot_be_shown_is_kept_in_the_details() -> None:
    async def main() -> None:
        async with mcp_tools(**inside()) as tools:
            result, nothing = await ask(tools, call("mixture"), call("nothing"))
        assert [type(block) for block in result.content].count(ImageContent) == 2
        assert [block.text for block in result.content if isinstance(block, TextContent)] == [
            "first",
            "[note://1]\na note",
            "[doc://1, application/pdf: kept in the details]",
            "[audio, audio/wav: kept in the details]",
            "[manual, https://example.com/manual: how to]",
        ]
        resource = {"uri": "doc://1", "mimeType": "application/pdf", "blob": "JVBERg=="}
        assert result.details["attachments"] == [
            {"type": "resource", "resource": resource},
            {"type": "audio", "data": "UklGRg==", "mimeType": "audio/wav"},
        ]
        assert nothing.text == "(no output)"
        assert not nothing.is_error

    run(main)


def test_progress_is_heard_as_updates_in_order_and_before_the_end(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        heard: list[Any] = []

        def listen(_: Agent, event: Event) -> None:
            if isinstance(event, ToolExecutionUpdate):
                heard.append(event.update)
            elif isinstance(event, ToolExecutionEnd):
                heard.append(event.result.text)

        async with mcp_tools(**options()) as tools:
            await ask(tools, call("count", {"to": 3}), listen=listen)
        steps = [{"progress": float(n), "total": 3.0, "message": f"at {n}"} for n in (1, 2, 3)]
        assert heard == [*steps, "counted to 3"]

    run(main)


def test_the_server_gets_the_idempotency_key_of_the_call(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            first, second = await ask(tools, call("idempotency_key", id="a"), call("idempotency_key", id="b"))
        assert len(first.text) == len(second.text) == 32
        assert first.text != second.text

    run(main)


def test_a_program_may_call_the_tools_itself() -> None:
    async def main() -> None:
        async with mcp_tools(**inside(), only=["files.read"]) as (read,):
            result = await read(path="a.txt")
        assert result.content == [TextContent("the content of a.txt")]

    run(main)


def test_a_command_sees_its_env_and_cwd_and_no_other_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PROGRAM", "1")
    (tmp_path / "here").mkdir()

    async def main() -> None:
        async with mcp_tools(command=STDIO, env={"GIVEN": "2"}, cwd=tmp_path / "here") as tools:
            names = ("GIVEN", "SECRET_OF_THE_PROGRAM")
            results = await ask(tools, *(call("environment", {"name": name}, name) for name in names))
        assert [result.text for result in results] == ["2 in here", "None in here"]

    run(main)


def test_a_url_gets_its_headers(http: HttpServer) -> None:
    async def main() -> None:
        async with mcp_tools(url=http.url, headers={"Authorization": "Bearer 1"}) as tools:
            (result,) = await ask(tools, call("header", {"name": "authorization"}))
        assert result.text == "Bearer 1"

    run(main)


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """Where the server says that a call was cancelled; reading it waits for that."""
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


@pytest.mark.parametrize("options", ALL_KINDS, indirect=True)
def test_abort_cancels_the_call_at_the_server_which_serves_on(options: Callable[[], dict[str, Any]], pipe: str) -> None:
    async def main() -> None:
        def abort(agent: Agent, event: Event) -> None:
            if isinstance(event, ToolExecutionUpdate):
                agent.abort()

        async with mcp_tools(**options()) as tools:
            agent = Agent(
                provider=ScriptedProvider([[call("wait", {"told": pipe})], [call("pid")], "done"]),
                model=Model("m"),
                tools=tools,
            )
            agent.subscribe(lambda event: abort(agent, event))
            aborted = await agent.prompt("go")
            assert await asyncio.to_thread(Path(pipe).read_text, "utf-8") == "cancelled"
            again = await agent.prompt("go on")
        assert aborted.stop_reason == "aborted"
        assert "aborted" in aborted.messages[-1].text
        assert again.text == "done"

    run(main)


def test_a_call_that_hangs_times_out_and_the_server_serves_on(options: Callable[[], dict[str, Any]]) -> None:
    async def main() -> None:
        async with mcp_tools(**options(), timeout=0.1, only=["pid", "wait"]) as (pid, wait):
            (result,) = await ask([wait], call("wait"))
            alive = await pid()  # not through a model, so without a time limit
        assert result.is_error
        assert "Timed out after 0.1 s" in result.text
        assert not alive.is_error

    run(main)


def test_a_process_that_stands_still_does_not_hold_the_run_or_the_end_of_the_context(tmp_path: Path) -> None:
    async def main() -> None:
        async with mcp_tools(command=STDIO, timeout=0.1, only=["pid"]) as (pid,):
            process = (await pid()).details["result"]
            os.kill(process, signal.SIGSTOP)
            (result,) = await ask([pid], call("pid"))
        assert "Timed out" in result.text
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)

    run(main)


def test_a_server_that_dies_during_a_call_is_an_error_and_later_calls_say_that_it_is_gone(
    options: Callable[[], dict[str, Any]],
) -> None:
    async def main() -> None:
        async with mcp_tools(**options()) as tools:
            died, *later = await ask_in_turn(tools, [call("die")], [call("pid", id="1")], [call("pid", id="2")])
        assert died.is_error
        assert died.text.startswith("The MCP server 'demo' went away during this call, which may or may not have taken")
        for result in later:
            assert result.is_error
            assert result.text.startswith("The MCP server 'demo' is gone")
            assert "was not made" in result.text

    run(main)


def test_the_last_words_of_a_dead_process_are_in_the_details_not_before_the_model() -> None:
    async def main() -> None:
        async with mcp_tools(command=STDIO) as tools:
            (died,) = await ask(tools, call("die"))
        assert died.details["error_output"][-1] == "I am slain"
        assert "slain" not in died.text

    run(main)


def test_calls_beside_the_one_that_kills_the_server_end_too() -> None:
    async def main() -> None:
        def kill_when_waiting(agent: Agent, event: Event) -> None:
            if isinstance(event, ToolExecutionUpdate):
                os.kill(pid, signal.SIGKILL)

        async with mcp_tools(command=STDIO) as tools:
            pid = int((await ask(tools, call("pid")))[0].text)
            waiting = [call("wait", id=str(number)) for number in range(5)]
            results = await ask(tools, *waiting, listen=kill_when_waiting)
        assert len(results) == 5
        assert all(result.is_error and "The MCP server 'demo'" in result.text for result in results)

    run(main)


def test_the_process_has_ended_when_the_context_has() -> None:
    async def main() -> None:
        async with mcp_tools(command=STDIO) as tools:
            (pid,) = await ask(tools, call("pid"))
            os.kill(int(pid.text), 0)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.text), 0)
        (late,) = await ask(tools, call("pid"))
        assert "is gone (it was closed)" in late.text

    run(main)


def test_an_error_inside_of_the_context_comes_out_as_it_is() -> None:
    async def main() -> None:
        with pytest.raises(KeyError, match="mine"):
            async with mcp_tools(command=STDIO):
                raise KeyError("mine")

    run(main)


def test_cancelling_the_program_that_holds_the_context_ends_the_process() -> None:
    async def main() -> None:
        pids: asyncio.Queue[int] = asyncio.Queue()

        async def hold() -> None:
            async with mcp_tools(command=STDIO) as tools:
                (pid,) = await ask(tools, call("pid"))
                pids.put_nowait(int(pid.text))
                await asyncio.Event().wait()

        holder = asyncio.create_task(hold())
        pid = await pids.get()
        holder.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holder
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(main)


def test_the_context_may_be_closed_while_a_call_is_under_way() -> None:
    async def main() -> None:
        waiting = asyncio.Event()
        async with mcp_tools(command=STDIO) as tools:
            asking = asyncio.create_task(ask(tools, call("wait"), listen=lambda *_: waiting.set()))
            await waiting.wait()
        (result,) = await asking
        assert result.is_error
        assert "The MCP server 'demo'" in result.text

    run(main)


def test_a_tool_does_not_work_in_another_event_loop_and_says_so() -> None:
    async def main() -> None:
        async with mcp_tools(**inside()) as tools:
            (result,) = await asyncio.to_thread(asyncio.run, ask(tools, call("pid")))
        assert "another event loop" in result.text

    run(main)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"command": ["no-such-command"]}, "`no-such-command` could not be started: FileNotFoundError"),
        ({"command": STDIO, "cwd": "/no/such/folder"}, "could not be started: .*/no/such/folder"),
        (
            {"command": [sys.executable, "-c", "exit('no configuration file')"]},
            "(?s)ended before it was ready.*no configuration file",
        ),
        (
            {"command": [sys.executable, "-c", "import sys; sys.stdin.read()"], "start_timeout": 0.5},
            "did not answer within 0.5 s; start_",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "at 127.0.0.1:9/mcp failed: ConnectError"),
        ({"url": "http://me:secret@127.0.0.1:9/mcp?key=secret"}, "at 127.0.0.1:9/mcp failed"),
    ],
)
def test_a_server_that_cannot_be_opened_is_an_error_that_says_why(wrong: dict[str, Any], message: str) -> None:
    async def main() -> None:
        with pytest.raises(McpServerFailed, match=message) as caught:
            async with mcp_tools(**wrong):
                pass
        assert "secret" not in str(caught.value)

    run(main)


def test_a_url_that_is_no_mcp_server_is_an_error_that_says_so(http: HttpServer) -> None:
    async def main() -> None:
        with pytest.raises(McpServerFailed, match="/nothing failed: MCPError"):
            async with mcp_tools(url=http.url.replace("/mcp", "/nothing")):
                pass

    run(main)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one of"),
        ({"command": STDIO, "url": "http://x"}, "exactly one of"),
        ({"command": "python server.py"}, "as a list"),
        ({"command": []}, "as a list"),
        ({"url": "localhost:8000"}, "begins with http"),
        ({**inside(), "only": ["nope"]}, "'demo' has no tool 'nope'; it has pid, forecast"),
        ({**inside(), "only": "pid"}, "list of names"),
        ({**inside(), "prefix": "a b"}, "prefix must be"),
        ({**inside(), "timeout": 0}, "timeout must be"),
    ],
)
def test_options_that_cannot_be_used_are_named(wrong: dict[str, Any], message: str) -> None:
    async def main() -> None:
        with pytest.raises(InputError, match=message):
            async with mcp_tools(**wrong):
                pass

    run(main)


def test_two_servers_with_the_same_tools_need_a_prefix() -> None:
    async def main() -> None:
        servers = [MCPServer(name) for name in ("one", "two")]
        for each in servers:
            each.add_tool(lambda: "hello", name="greet")
        one, two = (Client(each) for each in servers)
        async with mcp_tools(client=one) as first, mcp_tools(client=two) as second:
            with pytest.raises(InputError, match="two tools are named 'greet'"):
                Agent(provider=ScriptedProvider(), model=Model("m"), tools=[*first, *second])
        one, two = (Client(each) for each in servers)
        async with mcp_tools(client=one) as first, mcp_tools(client=two, prefix="two_") as second:
            results = await ask([*first, *second], call("greet"), call("two_greet"))
        assert [(result.tool_name, result.text) for result in results] == [("greet", "hello"), ("two_greet", "hello")]

    run(main)


def test_names_that_models_do_not_take_are_changed_and_those_that_clash_are_refused() -> None:
    async def main() -> None:
        odd = MCPServer("odd")
        for name in ("files.read", "x" * 70, "x" * 69 + "y"):
            odd.add_tool(lambda name=name: f"I am {name}", name=name)
        async with mcp_tools(client=Client(odd)) as tools:
            names = [tool.name for tool in tools]
            results = await ask(tools, *(call(name) for name in names))
        assert names[0] == "files_read"
        assert len(set(names)) == 3
        assert all(len(name) <= 64 for name in names)
        assert [result.text for result in results] == ["I am files.read", "I am " + "x" * 70, "I am " + "x" * 69 + "y"]
        odd.add_tool(lambda: "", name="files_read")
        with pytest.raises(InputError, match=r"'files.read' and 'files_read' .* only="):
            async with mcp_tools(client=Client(odd)):
                pass

    run(main)


def test_tools_of_a_server_and_of_the_program_run_side_by_side() -> None:
    @tool
    def double(number: int) -> int:
        return 2 * number

    async def main() -> None:
        async with mcp_tools(command=STDIO, only=["count"], sequential=True) as tools:
            results = await ask([*tools, double], call("count", {"to": 1}), call("double", {"number": 4}))
        assert [result.text for result in results] == ["counted to 1", "8"]

    run(main)


def test_without_the_sdk_the_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ImportError('not installed')")
    script = (
        "import asyncio\n"
        "from byssus.errors import MissingExtra\n"
        "from byssus.tools.mcp import mcp_tools\n"
        "async def main():\n"
        "    async with mcp_tools(url='http://localhost'): pass\n"
        "try: asyncio.run(main())\n"
        "except MissingExtra as error: print(error)\n"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": f"{tmp_path}:{source}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install '.[mcp]'" in done.stdout
