"""The service of docs/web.md whose runs outlive their requests, as its users meet it: real processes, real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from byssus import UserMessage
from byssus.checkpointer import FollowItem, item_from_json
from byssus.storage import AgentStorage
from tests.support import postgres
from tests.support.agents import Acted
from tests.support.following import Client
from tests.support.leases import Streaming, agent_on, die, until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "web.md").read_text("utf-8")
(CODE,) = [code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "follow" in code]
REPLY = "The train leaves at ten."
LIMIT = 60  # seconds, for what takes far less


class Service:
    """One process of the service. `pace` is that of its model."""

    def __init__(self, folder: Path, pace: float = 0) -> None:
        code = CODE.replace("pace=0.05", f"pace={pace}").replace("grace=5", "grace=0")
        (folder / "page.py").write_text(code, "utf-8")
        self.port = postgres.free_port()
        command = [sys.executable, "-m", "uvicorn", "page:app", "--port", str(self.port)]
        graceful = re.search(r"`(--timeout-graceful-shutdown) \d+`", PAGE)
        assert graceful is not None
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}"}
        self.log = folder / "service.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen([*command, graceful[1], "1"], cwd=folder, env=environment, stderr=log)
        postgres.wait_until(self._is_up, "the service does not start")

    def _is_up(self) -> bool:
        assert self.process.poll() is None
        with contextlib.suppress(ConnectionRefusedError):
            return self.status_of("unknown") == 404
        return False

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, headers: dict[str, str], body: Any = None) -> Iterator[HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with contextlib.closing(connection.getresponse()) as response:
                yield response

    def say(self, message: str, key: str | None = None) -> int:
        return self.post(message, key)[0]

    def post(self, message: str, key: str | None = None) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        with self._asked("POST", "/chat/t", headers, {"message": message, "key": key}) as response:
            return response.status, json.loads(response.read())

    def status_of(self, thread_id: str, after: str | None = None) -> int:
        """The status with which following begins."""
        with self._asked("GET", f"/chat/{thread_id}/events", behind(after)) as response:
            return response.status

    def follow(self, after: str | None = None) -> Generator[FollowItem, None, None]:
        """The items, each with its cursor as the id of its event, until the service closes the stream."""
        event: dict[str, str] = {}
        with self._asked("GET", "/chat/t/events", behind(after)) as response:
            assert response.status == 200
            while line := response.readline().decode():
                name, _, value = line.rstrip("\n").partition(": ")
                if name:
                    event[name] = value
                elif "data" in event:
                    item = item_from_json(event["data"])
                    assert (event["event"], event["id"]) == (item.type, item.cursor)
                    yield item
                    event = {}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(LIMIT)


def behind(cursor: str | None) -> dict[str, str]:
    return {} if cursor is None else {"Last-Event-ID": cursor}


@contextlib.contextmanager
def serving(folder: Path, pace: float = 0) -> Iterator[Service]:
    service = Service(folder, pace)
    try:
        yield service
    finally:
        service.process.kill()
        service.process.wait()
        sys.stderr.write(service.log.read_text("utf-8"))


def read_until(kind: str, items: Generator[FollowItem, None, None], client: Client) -> None:
    for item in items:
        client.see([item])
        if item.type == kind:
            return
    raise AssertionError(f"the stream ended before {kind}")


def test_a_client_that_is_cut_off_anywhere_has_each_message_once(tmp_path: Path) -> None:
    client = Client()
    with serving(tmp_path) as service:
        status, begun = service.post("When?", "k1")
        assert status == 202
        for kind in ("run_began", "message", "message", "run_ended", "caught_up"):
            with contextlib.closing(service.follow(client.cursor)) as items:
                read_until(kind, items, client)
        assert client.texts == ["When?", REPLY]
        assert client.twice == []
        assert service.post("When?", "k1") == (202, begun)  # the run is done already
    with AgentStorage(str(tmp_path / "follow.db")) as storage:
        assert [run.id for run in storage.runs("t")] == [begun["run_id"]]


def test_clients_that_leave_in_the_middle_of_a_long_thread_leave_no_error_in_the_log(tmp_path: Path) -> None:
    with AgentStorage(str(tmp_path / "follow.db")) as storage:
        storage.append("t", [UserMessage(f"number {number}") for number in range(100)])
    with serving(tmp_path) as service:
        for _ in range(20):
            with contextlib.closing(service.follow()) as items:
                next(items)
        service.stop()
        assert "Error" not in service.log.read_text("utf-8")


def test_what_can_be_known_before_the_stream_begins_is_a_status(tmp_path: Path) -> None:
    with serving(tmp_path, pace=3600) as service:
        assert service.status_of("t") == 404
        assert [service.say(text) for text in ("", " ")] == [422, 422]
        assert service.say("When?", "k1") == 202
        assert service.say("And where?") == 409
        assert service.say("And where?", "k1") == 409
        for unknown in ("nonsense", "000000-1-1"):
            assert service.status_of("t", after=unknown) == 410
    with AgentStorage(str(tmp_path / "follow.db")) as storage:
        storage.pause_session("t")
    with serving(tmp_path, pace=3600) as service:
        assert service.post("And where?") == (409, {"detail": "ThreadInactive"})


def test_the_response_comes_after_the_prompt_is_stored_though_an_interrupted_reply_ends_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {"__name__": "page"}
    exec(CODE, page)
    cp, runs, post, prompt_of = page["cp"], page["runs"], page["chat"], page["Prompt"]

    async def use() -> list[str]:
        async with cp:
            streaming = Streaming("The tr")
            interrupted = agent_on(cp, Acted(streaming), save_partial=0.005)
            run = asyncio.create_task(interrupted.prompt("When?"))
            await until(lambda: streaming.is_saved(cp))
            await die(cp, interrupted, run)
            await post("t", prompt_of(message="And where?"))
            ((task, agent),) = runs.items()
            stored = [message.text for message in agent.state.messages]
            await task
            return stored

    assert asyncio.run(use())[:3] == ["When?", "The tr", "And where?"]


def test_a_service_ends_while_clients_follow_and_the_next_one_continues_run_and_stream(tmp_path: Path) -> None:
    client = Client()
    with serving(tmp_path, pace=3600) as service:
        assert service.say("When?") == 202
        with contextlib.closing(service.follow()) as items:
            read_until("caught_up", items, client)
            service.stop()
    with serving(tmp_path) as service, contextlib.closing(service.follow(client.cursor)) as items:
        while REPLY not in client.texts:
            read_until("message", items, client)
        assert client.texts[0] == "When?"
        assert client.texts[-1] == REPLY
        assert client.twice == []
