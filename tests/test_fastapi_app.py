"""examples/fastapi_app.py as its users meet it: real processes, real HTTP, both databases.

This module is also the program that the tests start: `python -m tests.test_fastapi_app ...` serves the example with a
model that does as it is told. Its standard input is the socket, which is there before the service listens to it: a
request simply waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import shlex
import signal as signals
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from email.message import Message
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn

from byssus import Agent, Model, TextContent, ToolCall, UserMessage, tool
from byssus.checkpointer import checkpointer_for
from byssus.errors import REFUSALS, KeyReused, NothingToResume, Overloaded
from byssus.events import StreamDone, StreamEvent, StreamStart, TextDelta, TextEnd, TextStart
from byssus.providers.base import Request
from byssus.providers.scripted import ScriptedProvider
from byssus.signals import Signal
from byssus.storage import AgentStorage
from tests.support import forked, postgres
from tests.support.wire import Anthropic, Server

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "fastapi_app.py"
TOKENS = {"ann": "token-of-ann", "bob": "token-of-bob"}
END = ("assistant", "Once upon a time.")
LIMIT = 60  # seconds, for what takes far less
# What takes long to import, once for all instances.
IMPORTED = ("fastapi", "fastapi.sse", "pytest", "uvicorn", "uvicorn.lifespan.on", "uvicorn.protocols.http.auto")


class Obedient:
    """A model that reads its part in the last thing said to it: hold, fail, order, time, or repeat."""

    name = "obedient"

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    async def stream(self, request: Request, signal: Signal) -> AsyncIterator[StreamEvent]:
        last = request.messages[-1]
        if last.text == "hold":
            yield StreamStart()
            yield TextStart(0)
            yield TextDelta(0, "Once ")
            while not self._gate.exists():
                await asyncio.sleep(0.01)
            yield TextDelta(0, "upon a time.")
            yield TextEnd(0)
            yield StreamDone()
            return
        step: Any = f"{last.text}, after {len(request.messages) - 1}"
        if last.text == "fail":
            step = Overloaded("secret.internal is too busy", retry_after=0)
        elif last.text.startswith("order "):
            item, pieces = last.text.split()[1:]
            step = [ToolCall("c1", "order", {"item": item, "pieces": int(pieces)})]
        elif last.role == "tool_result" and "ordered" in last.text:
            step = f"Done: {last.text}."
        elif last.text.startswith("time"):
            step = [TextContent("Let me see. "), ToolCall("c1", "time_in", {"zone": last.text.split()[1]})]
        elif last.role == "tool_result":
            step = f"It is {last.text[10:11]}."
        async for event in ScriptedProvider([step]).stream(request, signal):
            yield event


class Event(NamedTuple):
    event: str
    data: Any


class Answer(NamedTuple):
    status: int
    headers: Message
    json: Any


class Stream:
    """A reply that is arriving."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self.headers = response.headers
        self._connection = connection
        self._response = response

    def event(self) -> Event | None:
        """The next event; None if there are no more."""
        fields: dict[str, str] = {}
        while line := self._response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields:  # and no mere sign of life
                return Event(fields["event"], json.loads(fields["data"]))
        return None

    def rest(self) -> list[Event]:
        events = list(iter(self.event, None))
        self.hang_up()
        return events

    def hang_up(self) -> None:
        self._response.close()
        self._connection.close()


class Instance:
    """One process of the service."""

    def __init__(self, place: str, folder: Path, lease_seconds: float) -> None:
        self.complains = False
        self._log = folder / f"instance-{time.monotonic_ns()}.log"
        with socket.create_server(("127.0.0.1", 0)) as listening, self._log.open("wb") as log:
            self.port = listening.getsockname()[1]
            self.process = forked.Process(
                ["-W", "error", "-m", __name__, place, str(folder / "gate"), str(lease_seconds)],
                env=os.environ,
                cwd=ROOT,
                imports=IMPORTED,
                stdin=listening.fileno(),
                stdout=log.fileno(),
                stderr=log.fileno(),
            )

    def open(self, method: str, path: str, body: Any, token: str | None) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        headers = {"content-type": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection, connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, token: str | None = TOKENS["ann"]) -> Answer:
        connection, response = self.open(method, path, body, token)
        with contextlib.closing(connection):
            return Answer(response.status, response.headers, json.loads(response.read()))

    def chat(self, message: str, conversation: str = "main", token: str = TOKENS["ann"]) -> Stream:
        body = {"message": message, "conversation": conversation}
        connection, response = self.open("POST", "/chat", body, token)
        if response.status != 200:
            with contextlib.closing(connection):
                raise AssertionError(f"{response.status}: {response.read()!r}")
        return Stream(connection, response)

    def refusal(self, conversation: str) -> tuple[int, str]:
        answer = self.ask("POST", "/chat", {"message": "hello", "conversation": conversation})
        return answer.status, answer.json["detail"]

    def hold(self) -> Stream:
        """Begin a run that stays in the middle of its reply until the gate opens."""
        stream = self.chat("hold")
        assert stream.event() == Event("text", "Once ")
        return stream

    def history(self, token: str = TOKENS["ann"], conversation: str = "main") -> list[tuple[str, str]]:
        messages = self.ask("GET", f"/history?conversation={conversation}", token=token).json
        return [(message["role"], message["text"]) for message in messages]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT)

    def stop(self) -> None:
        """As a deployment does."""
        if self.process.returncode is None:
            self.process.terminate()
            assert self.process.wait(LIMIT) == -signals.SIGTERM, self._log.read_text()
        assert ("Traceback" in self._log.read_text()) == self.complains, self._log.read_text()


class Deployment:
    """A database, and the instances on it."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place = place
        self._folder = folder
        self.instances: list[Instance] = []

    def start(self, lease_seconds: float = 30) -> Instance:
        self.instances.append(Instance(self.place, self._folder, lease_seconds))
        return self.instances[-1]

    def open_gate(self) -> None:
        (self._folder / "gate").touch()

    def stop(self) -> None:
        self.open_gate()
        for instance in self.instances:
            instance.stop()


@pytest.fixture(params=["sqlite", "postgres"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    place = str(tmp_path / "chat.db") if request.param == "sqlite" else postgres.server_for_tests().fresh_database()
    made = Deployment(place, tmp_path)
    try:
        yield made
        made.stop()
    finally:
        for instance in made.instances:
            instance.kill()
        if request.param == "postgres":
            postgres.server_for_tests().drop(place)


# --- one instance -----------------------------------------------------------------------------------------------------


def test_a_reply_arrives_as_events_in_order_and_what_was_stored_is_what_was_streamed(deployment: Deployment) -> None:
    service = deployment.start()
    reply = service.chat("time Europe/Oslo")
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.rest()
    assert [name for name, _ in events] == [
        *("text", "text", "text", "message", "tool", "message"),  # the first turn: a reply, its call, the result
        *("text", "text", "text", "message", "done"),
    ]
    assert events[4].data == {"name": "time_in", "arguments": {"zone": "Europe/Oslo"}}
    assert "".join(data for name, data in events if name == "text") == "Let me see. It is T."
    assert events[-1].data == {"stop_reason": "stop"}
    stored = service.ask("GET", "/history").json
    assert stored[0]["text"] == "time Europe/Oslo"
    assert [data for name, data in events if name == "message"] == stored[1:]


def test_a_conversation_goes_on_after_a_restart_of_the_service(deployment: Deployment) -> None:
    first = deployment.start()
    assert first.chat("hello").rest()[-1] == Event("done", {"stop_reason": "stop"})
    first.stop()
    second = deployment.start()
    second.chat("again").rest()
    assert second.history() == [
        ("user", "hello"),
        ("assistant", "hello, after 0"),
        ("user", "again"),
        ("assistant", "again, after 2"),
    ]


def test_a_user_reaches_no_thread_but_their_own(deployment: Deployment) -> None:
    service, bob = deployment.start(), TOKENS["bob"]
    run = service.hold()
    assert service.history(bob) == []
    assert service.ask("POST", "/abort", token=bob).json == {"aborted": False}
    assert service.ask("POST", "/steer", {"message": "psst"}, bob).status == 202
    for name in ("ann:main", ":main", "../main", "", "x" * 65):
        assert service.ask("POST", "/steer", {"message": "psst", "conversation": name}, bob).status == 422
    deployment.open_gate()
    assert run.rest()[-1].event == "done"
    service.chat("hello", token=bob).rest()
    assert service.history() == [("user", "hold"), ("assistant", "Once upon a time.")]
    assert {text for role, text in service.history(bob) if role == "user"} == {"hello", "psst"}


def test_threads_lists_the_conversations_of_the_user_alone(deployment: Deployment) -> None:
    service = deployment.start()
    for name in ("work", "home"):
        service.chat(f"about {name}", name).rest()
    listed = service.ask("GET", "/threads").json
    assert [(each["conversation"], each["title"], each["state"]) for each in listed] == [
        ("home", "about home", "idle"),
        ("work", "about work", "idle"),
    ]
    assert service.ask("GET", "/threads", token=TOKENS["bob"]).json == []


def test_a_call_waits_for_approval_and_any_instance_goes_on_after_the_answer(deployment: Deployment) -> None:
    one, two, bob = deployment.start(), deployment.start(), TOKENS["bob"]
    assert one.chat("order tea 3").rest()[-1] == Event("done", {"stop_reason": "waiting"})
    (call,) = two.ask("GET", "/pending").json
    assert call == {"conversation": "main", "call": "c1", "tool": "order", "arguments": {"item": "tea", "pieces": 3}}
    assert [each["state"] for each in two.ask("GET", "/threads").json] == ["waiting"]
    busy = one.ask("POST", "/chat", {"message": "and now?"})
    assert (busy.status, "/pending" in busy.json["detail"]) == (409, True)

    approve = {"call": "c1", "answer": "approve"}
    assert one.ask("GET", "/pending", token=bob).json == []
    assert one.ask("POST", "/answer", approve, bob).status == 404
    assert one.ask("POST", "/answer", {"call": "c9", "answer": "approve"}).status == 404
    assert one.ask("POST", "/answer", {"call": "c1", "answer": "maybe"}).status == 422
    assert two.ask("POST", "/answer", approve).status == 202
    assert one.ask("POST", "/answer", approve).status in (404, 409)  # 404 once the run has gone on
    end = ("assistant", "Done: ordered 3 x tea.")
    postgres.wait_until(lambda: one.history()[-1] == end, "no instance resumes the run")
    assert one.history().count(end) == 1
    assert one.ask("GET", "/pending").json == []


def test_conversations_of_a_user_are_apart(deployment: Deployment) -> None:
    service = deployment.start()
    for name in ("work", "home"):
        service.chat(name, name).rest()
    assert service.history(conversation="home") == [("user", "home"), ("assistant", "home, after 0")]
    assert service.history() == []


def test_without_a_known_token_nothing_is_done(deployment: Deployment) -> None:
    service = deployment.start()
    for token in (None, "", "token-of-eve", "token-of-an", "ann", "t\xf6ken"):
        routes = ("/chat", "/steer", "/abort", "/answer"), ("/history", "/threads", "/pending")
        for method, path in [("POST", path) for path in routes[0]] + [("GET", path) for path in routes[1]]:
            answer = service.ask(method, path, {"message": "hello"}, token)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert service.history() == []


def test_what_is_no_message_is_refused_before_anything_is_stored(deployment: Deployment) -> None:
    service = deployment.start()
    wrong: list[Any] = [None, [], {}, {"message": ""}, {"message": " "}, {"message": 3}, {"message": "x" * 100_001}]
    for body in [*wrong, {"message": "x", "conversation": ":"}, {"message": "x", "conversation": "main\n"}]:
        answer = service.ask("POST", "/chat", body)
        assert answer.status == 422
        assert answer.json["detail"]
    assert service.history() == []


def test_a_conversation_that_can_have_no_run_and_an_erased_user_are_statuses(deployment: Deployment) -> None:
    @tool(approval=True)
    def gone() -> None:
        """A tool that the service does not have."""

    service = deployment.start()
    with checkpointer_for(deployment.place) as cp:
        provider = ScriptedProvider([[ToolCall("c1", "gone")]])
        Agent(provider=provider, model=Model("m"), tools=[gone], checkpointer=cp, thread_id="ann:open").run_sync("Go.")
    with AgentStorage(deployment.place) as storage:
        storage.append("ann:main", [UserMessage("Wait.")])
        storage.pause_session("ann:main")
        open_call, paused = (service.refusal(conversation) for conversation in ("open", "main"))
        assert (open_call[0], "a tool" in open_call[1]) == (409, True)
        assert (paused[0], "paused" in paused[1]) == (409, True)
        assert service.history() == [("user", "Wait.")]
        storage.erase_user("ann")
    assert service.refusal("new")[0] == 404
    refused = importlib.import_module("examples.fastapi_app").REFUSED
    assert {*REFUSALS} - {*refused} == {KeyReused, NothingToResume}  # it uses no keys, and does not resume


def test_a_failing_model_ends_the_stream_with_an_error_that_tells_no_secret(deployment: Deployment) -> None:
    service = deployment.start()
    assert service.chat("fail").rest() == [
        Event("message", {"role": "assistant", "text": "", "stop_reason": "error"}),
        Event("error", {"stop_reason": "error"}),
    ]
    assert "internal" not in str(service.ask("GET", "/history").json)
    assert service.chat("hello").rest()[-1].event == "done"


def test_a_client_that_hangs_up_ends_its_run_and_the_conversation_goes_on(deployment: Deployment) -> None:
    service = deployment.start()
    service.hold().hang_up()
    postgres.wait_until(lambda: ("assistant", "Once ") in service.history(), "the run does not end")
    assert service.chat("hello").rest()[-1] == Event("done", {"stop_reason": "stop"})
    messages = service.ask("GET", "/history").json
    assert [message["text"] for message in messages[:3]] == ["hold", "Once ", "hello"]
    assert messages[1]["stop_reason"] == "aborted"


def test_a_service_that_is_told_to_end_finishes_what_it_has_begun(deployment: Deployment) -> None:
    service = deployment.start()
    run = service.hold()
    service.process.terminate()
    deployment.open_gate()
    assert run.rest()[-1] == Event("done", {"stop_reason": "stop"})


# --- several instances ------------------------------------------------------------------------------------------------


def test_a_second_message_is_refused_by_every_instance_while_the_first_is_answered(deployment: Deployment) -> None:
    one, two = deployment.start(), deployment.start()
    run = one.hold()
    for instance in (one, two):
        answer = instance.ask("POST", "/chat", {"message": "me too"})
        assert (answer.status, answer.headers["content-type"]) == (409, "application/json")
        assert "/steer" in answer.json["detail"]
    deployment.open_gate()
    assert run.rest()[-1].event == "done"
    assert two.chat("now").rest()[-1].event == "done"
    assert [text for role, text in two.history() if role == "user"] == ["hold", "now"]


def test_what_is_said_to_another_instance_reaches_the_run(deployment: Deployment) -> None:
    one, two = deployment.start(), deployment.start()
    run = one.hold()
    assert two.ask("POST", "/steer", {"message": "and then?"}).status == 202
    deployment.open_gate()
    events = run.rest()
    stored = [data["text"] for name, data in events if name == "message"]
    assert stored == ["Once upon a time.", "and then?", "and then?, after 2"]
    assert events[-1] == Event("done", {"stop_reason": "stop"})


def test_another_instance_aborts_the_run(deployment: Deployment) -> None:
    one, two = deployment.start(), deployment.start()
    run = one.hold()
    assert two.ask("POST", "/abort").json == {"aborted": True}
    assert run.rest()[-1] == Event("done", {"stop_reason": "aborted"})
    assert two.ask("POST", "/abort").json == {"aborted": False}
    assert two.history() == [("user", "hold"), ("assistant", "Once ")]


def test_a_run_whose_process_was_killed_is_finished_once_by_those_that_start_next(deployment: Deployment) -> None:
    killed = deployment.start()
    killed.chat("time Europe/Oslo").rest()
    run = killed.hold()
    killed.kill()
    run.hang_up()
    deployment.open_gate()
    one, two = deployment.start(), deployment.start()
    postgres.wait_until(lambda: one.history()[-1] == END, "nobody finishes the run")
    assert two.chat("thanks").rest()[-1].event == "done"
    history = one.history()
    assert [text for role, text in history if role == "user"] == ["time Europe/Oslo", "hold", "thanks"]
    assert history.count(END) == 1


def test_a_run_whose_process_stands_still_is_taken_over_and_wakes_up_to_an_error(deployment: Deployment) -> None:
    one, two = deployment.start(lease_seconds=1), deployment.start(lease_seconds=1)
    assert two.history() == []  # it is up, and has looked for interrupted runs before there was one
    run = one.hold()
    one.process.send_signal(signals.SIGSTOP)
    deployment.open_gate()
    postgres.wait_until(lambda: two.history()[-1] == END, "nobody takes the run over")
    one.process.send_signal(signals.SIGCONT)
    assert run.rest()[-1] == Event("error", {"stop_reason": "error"})
    assert two.history().count(END) == 1
    one.complains = True  # of the lease that it has lost


# --- as the module says -----------------------------------------------------------------------------------------------


def test_the_command_that_the_module_names_starts_it(tmp_path: Path) -> None:
    port = postgres.free_port()
    command = next(line for line in EXAMPLE.read_text("utf-8").splitlines() if line.startswith("uvicorn"))
    with Server([Anthropic.answer("Hello, Ann.")]) as model:
        settings = {
            "ANTHROPIC_API_KEY": "test-key",
            "ANTHROPIC_BASE_URL": model.url,
            "CHAT_TOKENS": json.dumps(TOKENS),
            "BYSSUS_DB": str(tmp_path / "chat.db"),
        }
        arguments = [sys.executable, "-m", *shlex.split(command), "--port", str(port)]
        process = subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, **settings})
        try:
            postgres.wait_until(lambda: is_listening(port) or process.poll() is not None, "it does not start")
            connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT)
            headers = {"content-type": "application/json", "authorization": f"Bearer {TOKENS['ann']}"}
            connection.request("POST", "/chat", json.dumps({"message": "hello"}), headers)
            events = Stream(connection, connection.getresponse()).rest()
        finally:
            process.terminate()
            process.wait(LIMIT)
    assert [data for name, data in events if name == "text"] == ["Hello, ", "Ann."]
    assert events[-1] == Event("done", {"stop_reason": "stop"})


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serve(place: str, gate: str, lease_seconds: str) -> None:
    example = importlib.import_module("examples.fastapi_app")  # mypy knows the examples as scripts, not as a package
    vars(example)["checkpointer_for"] = functools.partial(checkpointer_for, lease_seconds=float(lease_seconds))
    app = example.create_app(place, TOKENS, Obedient(Path(gate)), Model(id="obedient"))
    uvicorn.Server(uvicorn.Config(app)).run([socket.socket(fileno=sys.stdin.fileno())])


if __name__ == "__main__":
    serve(*sys.argv[1:])
