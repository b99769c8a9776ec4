"""A chat service: one agent a request, the thread from the authenticated user, server-sent events out.

export BYSSUS_DB=chat.db  # or postgresql://user:password@host/database
export CHAT_TOKENS='{"ann": "a-long-random-secret", "bob": "another-one"}'
uvicorn --factory examples.fastapi_app:app

curl -N localhost:8000/chat -H 'Authorization: Bearer a-long-random-secret' --json '{"message": "Hello!"}'

Claude answers if ANTHROPIC_API_KEY is set, else the embedded model. Only the database remembers anything, so any
instance serves any request: run the same command with --port 8001 and --port 8002 on one Postgres, behind any load
balancer. Nothing has to be sticky.

A run belongs to the client that reads it. One that hangs up ends it, for nobody should pay for words that nobody reads:
what was said is kept, marked `aborted`, and the next message goes on from there. A run whose process died belongs to
nobody: the first instance that notices finishes it, and /history has the answer. So SIGTERM waits for the runs, and
SIGKILL may follow whenever patience ends.
"""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

from byssus import Agent, Model, tool
from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.errors import StoreError, ThreadBusy
from byssus.events import AgentEnd, MessageEnd, MessageUpdate, TextDelta, ToolExecutionStart
from byssus.messages import AssistantMessage, Message
from byssus.providers.anthropic import AnthropicProvider
from byssus.providers.base import Provider
from byssus.providers.local import SMOLLM2, LocalProvider
from byssus.stream import EventStream

router = APIRouter()


@tool(recovery="retry")
def time_in(zone: Annotated[str, "an IANA time zone, such as Europe/Oslo"]) -> str:
    """The date and time in a time zone."""
    return datetime.now(ZoneInfo(zone)).isoformat(timespec="minutes")


@dataclass(frozen=True)
class Service:
    cp: Checkpointer
    tokens: Mapping[str, str]
    provider: Provider
    model: Model

    def agent(self, thread_id: str) -> Agent:
        return Agent(
            provider=self.provider,
            model=self.model,
            system_prompt="You are concise.",
            tools=[time_in],
            checkpointer=self.cp,
            thread_id=thread_id,
            wait=2,  # a client that hung up and is back at once finds its former run about to end
        )

    async def take_over(self, runs: asyncio.TaskGroup) -> None:
        """Finish what a process that died has begun; look again when the lease of one elsewhere has run out."""
        while True:
            with suppress(StoreError):  # the database is away: later, then
                for thread in await self.cp.unfinished():
                    runs.create_task(self.resume(thread.id))
            await asyncio.sleep(self.cp.lease_seconds)

    async def resume(self, thread_id: str) -> None:
        with suppress(Exception):  # ThreadBusy: another instance was faster. Whatever it is, the agent has logged it
            await self.agent(thread_id).resume()


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(service_of)]


def user_of(service: Here, bearer: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> str:
    for user, token in service.tokens.items():
        if secrets.compare_digest(token.encode(), bearer.credentials.encode()):
            return user
    raise HTTPException(401, "this token is nobody's", {"WWW-Authenticate": "Bearer"})


User = Annotated[str, Depends(user_of)]
Name = Annotated[str, Field(pattern=r"^[\w-]{1,64}$")]  # no colon: `user:conversation` means one user only


class Said(BaseModel):
    message: Annotated[str, Field(min_length=1, max_length=100_000)]
    conversation: Name = "main"


async def run_of(said: Said, user: User, service: Here) -> AsyncIterator[EventStream[None]]:
    """The run that a request starts, and that ends with it at the latest."""
    async with service.agent(f"{user}:{said.conversation}").stream(said.message) as events:
        try:
            async for event in events:
                if isinstance(event, MessageEnd):  # the thread is ours: before that, a refusal still has a status
                    break
        except ThreadBusy as busy:
            raise HTTPException(409, "a run is going on here: /steer speaks to it, /abort ends it") from busy
        yield events


def shown(message: Message) -> dict[str, str]:
    """A message for the client: not what went wrong inside, because an error's text may name hosts and keys."""
    mark = {"stop_reason": message.stop_reason} if isinstance(message, AssistantMessage) else {}
    return {"role": message.role, "text": message.text, **mark}


@router.post("/chat", response_class=EventSourceResponse)
async def chat(events: Annotated[EventStream[None], Depends(run_of)]) -> AsyncIterator[ServerSentEvent]:
    """`text` as it arrives, `tool` when one begins, `message` when it is stored; in the end, `done` or `error`."""
    async for event in events:
        match event:
            case MessageUpdate(stream_event=TextDelta(delta=text)):
                yield ServerSentEvent(event="text", data=text)
            case ToolExecutionStart(tool_name=name, arguments=arguments):
                yield ServerSentEvent(event="tool", data={"name": name, "arguments": arguments})
            case MessageEnd(message=message, stored=True):
                yield ServerSentEvent(event="message", data=shown(message))
            case AgentEnd(stop_reason=reason, error=None):
                yield ServerSentEvent(event="done", data={"stop_reason": reason})
            case AgentEnd(stop_reason=reason):
                yield ServerSentEvent(event="error", data={"stop_reason": reason})
                return  # what the run raised goes to the server's log


@router.post("/steer", status_code=202)
async def steer(said: Said, user: User, service: Here) -> None:
    """Say something into the run, whichever instance drives it; if none does, into the next one."""
    await service.cp.steer(f"{user}:{said.conversation}", said.message)


@router.post("/abort")
async def abort(user: User, service: Here, conversation: Name = "main") -> dict[str, bool]:
    return {"aborted": await service.cp.abort(f"{user}:{conversation}")}


@router.get("/history")
async def history(user: User, service: Here, conversation: Name = "main") -> list[dict[str, str]]:
    thread = await service.cp.load(f"{user}:{conversation}")
    return [shown(message) for message in thread.messages] if thread else []


def create_app(place: str, tokens: Mapping[str, str], provider: Provider, model: Model) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with checkpointer_for(place) as cp, asyncio.TaskGroup() as background:
            app.state.service = service = Service(cp, tokens, provider, model)
            watch = background.create_task(service.take_over(background))
            yield
            watch.cancel()  # and wait for the runs that were taken over

    app = FastAPI(title="chat", lifespan=lifespan)
    app.include_router(router)
    return app


def app() -> FastAPI:
    place, tokens = os.environ["BYSSUS_DB"], json.loads(os.environ["CHAT_TOKENS"])
    if "ANTHROPIC_API_KEY" in os.environ:
        return create_app(place, tokens, AnthropicProvider(), Model(id="claude-sonnet-5-5", provider="anthropic"))
    return create_app(place, tokens, LocalProvider(), SMOLLM2)
