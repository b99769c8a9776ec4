"""A chat service: one agent per request, the thread from the authenticated user, server-sent events out.

export BYSSUS_DB=chat.db  # or postgresql://user:password@host/database
export CHAT_TOKENS='{"ann": "a-long-random-secret", "bob": "another-one"}'
uvicorn --factory examples.fastapi_app:app

curl -N localhost:8000/chat -H 'Authorization: Bearer a-long-random-secret' --json '{"message": "Hello!"}'

Claude answers if ANTHROPIC_API_KEY is set, else the embedded model, which has to be installed (docs/getting-started.md)
and calls no tools. All state is in the database, so any instance serves any request: run the same command with --port
8001 and --port 8002 on one Postgres, behind any load balancer. Sessions need not be sticky.

A client that disconnects aborts its run: the part of the reply that has arrived is kept, marked `aborted`, and the next
message continues from there. Runs whose process died, and runs whose question was answered, are resumed by the first
instance that finds them; /history then has the reply. SIGTERM waits for open requests and hands resumed runs over to
another instance. A SIGKILL after that is a crash like any other.
"""

import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

from byssus import Agent, Model, tool
from byssus.checkpointer import Checkpointer, checkpointer_for
from byssus.errors import (
    AlreadyAnswered,
    AnswerNeeded,
    ByssusError,
    InputError,
    NotFound,
    ThreadBusy,
    ThreadInactive,
    ThreadQuarantined,
    ToolMissing,
)
from byssus.events import AgentEnd, MessageEnd, MessageUpdate, TextDelta, ToolExecutionStart
from byssus.messages import AssistantMessage, Message, UserMessage
from byssus.providers.base import Provider
from byssus.providers.named import provider_of
from byssus.stream import EventStream

router = APIRouter()


@tool(recovery="retry")
def time_in(zone: Annotated[str, "an IANA time zone, such as Europe/Oslo"]) -> str:
    """The date and time in a time zone."""
    return datetime.now(ZoneInfo(zone)).isoformat(timespec="minutes")


@tool(approval=True)
def order(item: str, pieces: int) -> str:
    """Order something. A person approves each order."""
    return f"ordered {pieces} x {item}"


@dataclass(frozen=True)
class Service:
    cp: Checkpointer
    tokens: Mapping[str, str]
    provider: Provider
    model: Model

    def agent(self, thread_id: str, user: str | None) -> Agent:
        return Agent(
            provider=self.provider,
            model=self.model,
            system_prompt="You are concise.",
            tools=[time_in, order],
            checkpointer=self.cp,
            thread_id=thread_id,
            user_id=user,
            wait=2,  # a client that hung up and is back at once finds its former run about to end
        )


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(service_of)]


def user_of(service: Here, bearer: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> str:
    for user, token in service.tokens.items():
        if secrets.compare_digest(token.encode(), bearer.credentials.encode()):
            return user
    raise HTTPException(401, "this token is not known", {"WWW-Authenticate": "Bearer"})


User = Annotated[str, Depends(user_of)]
Name = Annotated[str, Field(pattern=r"^[\w-]{1,64}$")]  # no colon: `user:conversation` means one user only


class Said(BaseModel):
    message: Annotated[str, Field(min_length=1, max_length=100_000)]
    conversation: Name = "main"


REFUSED: dict[type[ByssusError], tuple[int, str]] = {  # why no run begins, as a status; the first that fits counts
    ThreadBusy: (409, "a run is in progress: /steer sends it a message, /abort stops it"),
    AnswerNeeded: (409, "a tool call waits for approval: see /pending, then /answer"),
    ThreadInactive: (409, "the conversation is paused or cancelled"),
    ThreadQuarantined: (409, "the conversation is stopped: its run has ended its process several times"),
    ToolMissing: (409, "the conversation has an open call of a tool that this service does not have"),
    NotFound: (404, "this user is not known"),
    InputError: (422, "this message cannot be sent: it needs some text"),
}


async def run_of(said: Said, user: User, service: Here) -> AsyncIterator[EventStream[None]]:
    """The run that a request starts. It ends with the request at the latest."""
    async with service.agent(f"{user}:{said.conversation}", user).stream(said.message) as events:
        try:
            async for event in events:
                # The end of an interrupted reply can come first. An error before the prompt can still become a status.
                if isinstance(event, MessageEnd) and isinstance(event.message, UserMessage):
                    break
        except tuple(REFUSED) as error:
            status, detail = next(answer for kind, answer in REFUSED.items() if isinstance(error, kind))
            raise HTTPException(status, detail) from error
        yield events


def shown(message: Message) -> dict[str, str]:
    """A message for the client, without its error: the text of an error can name hosts."""
    mark = {"stop_reason": message.stop_reason} if isinstance(message, AssistantMessage) else {}
    return {"role": message.role, "text": message.text, **mark}


@router.post("/chat", response_class=EventSourceResponse)
async def chat(events: Annotated[EventStream[None], Depends(run_of)]) -> AsyncIterator[ServerSentEvent]:
    """`text` as it arrives, `tool` when a call starts, `message` when it is stored; then `done` or `error`."""
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
    """Queue a message for the current run, in any instance, or else for the next run."""
    await service.cp.steer(f"{user}:{said.conversation}", said.message)


@router.post("/abort")
async def abort(user: User, service: Here, conversation: Name = "main") -> dict[str, bool]:
    return {"aborted": await service.cp.abort(f"{user}:{conversation}")}


@router.get("/history")
async def history(user: User, service: Here, conversation: Name = "main") -> list[dict[str, str]]:
    thread = await service.cp.load(f"{user}:{conversation}")
    return [shown(message) for message in thread.messages] if thread else []


@router.get("/threads")
async def threads(user: User, service: Here) -> list[dict[str, str]]:
    """The user's conversations, most recently updated first."""
    return [
        {"conversation": conversation(info.id), "title": info.title, "state": info.state, "updated_at": info.updated_at}
        for info in await service.cp.threads(user_id=user)
    ]


@router.get("/pending")
async def pending(user: User, service: Here) -> list[dict[str, Any]]:
    """The tool calls that wait for the user's approval."""
    return [
        {
            "conversation": conversation(call.thread_id or ""),
            "call": call.call_id,
            "tool": call.tool_name,
            "arguments": call.arguments,
        }
        for call in await service.cp.pending(user=user)
    ]


class Decided(BaseModel):
    call: Annotated[str, Field(max_length=1_000)]
    answer: Literal["approve", "deny"]
    conversation: Name = "main"


@router.post("/answer", status_code=202)
async def answer(decided: Decided, user: User, service: Here) -> None:
    """Record an answer. The supervision of some instance then resumes the run."""
    thread_id = f"{user}:{decided.conversation}"
    try:
        await service.cp.answer(thread_id, decided.call, decided.answer, by=user, source="web")
    except AlreadyAnswered as error:
        raise HTTPException(409, "this call was answered before") from error
    except InputError as error:
        raise HTTPException(404, "no such call waits: see /pending") from error


def conversation(thread_id: str) -> str:
    return thread_id.partition(":")[2]


def create_app(place: str, tokens: Mapping[str, str], provider: Provider, model: Model) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with checkpointer_for(place) as cp:
            for user in tokens:
                with suppress(InputError):  # the user exists
                    await cp.create_user(user, user_id=user, quota_total=None)
            app.state.service = service = Service(cp, tokens, provider, model)
            async with cp.supervise(service.agent):  # resumes interrupted and answered runs
                yield

    app = FastAPI(title="chat", lifespan=lifespan)
    app.include_router(router)
    return app


def app() -> FastAPI:
    place, tokens = os.environ["BYSSUS_DB"], json.loads(os.environ["CHAT_TOKENS"])
    name = "anthropic:claude-sonnet-5-5" if "ANTHROPIC_API_KEY" in os.environ else "local"
    try:
        provider, model = provider_of(name)
    except ByssusError as error:
        raise SystemExit(f"{error}\nOr set ANTHROPIC_API_KEY.") from error
    return create_app(place, tokens, provider, model)
