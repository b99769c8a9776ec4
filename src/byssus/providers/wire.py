"""What the providers that speak HTTP to a service have in common.

- Outward: values as strict JSON carries them, names and call ids in the alphabet that services take.
- One client of an SDK for each event loop, so that connections are kept alive between the calls of a run, and none
  outlives the loop that it belongs to.
- Failures: one wording for all services, and never a key in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from byssus.errors import (
    AuthenticationFailed,
    ContentRefused,
    ContextTooLong,
    InvalidRequest,
    NetworkFailed,
    Overloaded,
    ProviderError,
    RateLimited,
)
from byssus.values import places

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

# --- values -----------------------------------------------------------------------------------------------------------


NO_IMAGE = "[an image that cannot be shown]"  # what stands for data that is none


def clean(value: Any, room: int = 200) -> Any:
    """The value as strict JSON in UTF-8 can carry it: lone surrogates replaced, NaN and infinity null, no bottomless
    nesting (arguments that a model once wrote must not break each later request)."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict | list | tuple) and room == 0:
        return "[nested too deep]"
    if isinstance(value, dict):
        return {clean(key): clean(item, room - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, room - 1) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def checked(kind: type[T], value: Any) -> T:
    """The value, which a service should have sent as this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.80} where a {kind.__name__} belongs")
    return value


def tool_name(name: str, longest: int) -> str:
    """The name of a called tool as services take it: models also call tools that do not exist."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:longest] or "unnamed"


def call_id(theirs: str, longest: int) -> str:
    """The id itself, or a digest of one that is too long or holds what only another service takes."""
    if re.fullmatch(r"[a-zA-Z0-9_-]+", theirs) and len(theirs) <= longest:
        return theirs
    return "call_" + hashlib.sha256(theirs.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class CallIds:
    """The call ids of one request: valid, the same on a call and its result, and each used once.

    Some services count from zero in every reply, and others refuse an id that comes twice.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._used: set[str] = set()
        self._waiting: dict[str, list[str]] = {}

    def of_call(self, theirs: str) -> str:
        ours = call_id(theirs, self._longest)
        while ours in self._used:
            ours = call_id(f"{theirs} {len(self._used)}", self._longest)
        self._used.add(ours)
        self._waiting.setdefault(theirs, []).append(ours)
        return ours

    def of_result(self, theirs: str) -> str:
        waiting = self._waiting.get(theirs)
        return waiting.pop(0) if waiting else call_id(theirs, self._longest)


# --- keys and clients -------------------------------------------------------------------------------------------------


class Client(Protocol):
    """What each SDK's client can do."""

    def is_closed(self) -> bool: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=Client)


class Clients(Generic[C]):
    """One client for each event loop, made at its first use, on a thread: imports and certificates take a while.

    A client is closed by `aclose()`, with its event loop, or some time after its provider is gone. So `make` should not
    hold the provider.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._making = threading.Lock()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, C] = WeakKeyDictionary()
        weakref.finalize(self, _leave_behind, self._clients).atexit = False

    async def get(self) -> C:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        home = await _home_in(loop)
        client = self._clients.get(loop)
        if client is None or client.is_closed():
            client = await asyncio.to_thread(self._open, loop)
        home.clients.add(client)
        return client

    async def aclose(self) -> None:
        """Close the connections of the running event loop. The next stream opens new ones."""
        loop = asyncio.get_running_loop()
        if (client := self._clients.pop(loop, None)) is not None:
            await (await _home_in(loop)).close([client])

    def _open(self, loop: asyncio.AbstractEventLoop) -> C:
        with self._making:  # many streams may begin at once, each on a thread
            client = self._clients.get(loop)
            if client is None or client.is_closed():
                client = self._clients[loop] = self._make()
            return client


class _Home:
    """The clients of one event loop. An idle connection belongs to its loop and must not outlive it."""

    def __init__(self) -> None:
        self.clients: set[Client] = set()
        self.left_behind: list[Client] = []
        self.lifetime = self._live()

    async def _live(self) -> AsyncGenerator[None, None]:
        """An event loop closes, as the last thing it does, all generators that wait somewhere: that is our notice."""
        try:
            yield
        finally:
            await self.close(list(self.clients))

    async def close(self, clients: list[Client]) -> None:
        while clients:
            client = clients.pop()
            await client.close()
            self.clients.discard(client)


_homes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Home] = WeakKeyDictionary()


async def _home_in(loop: asyncio.AbstractEventLoop) -> _Home:
    home = _homes.get(loop)
    if home is None:
        home = _homes[loop] = _Home()
        await anext(home.lifetime)
    await home.close(home.left_behind)
    return home


def _leave_behind(clients: Mapping[asyncio.AbstractEventLoop, Client]) -> None:
    """The provider is gone, on whatever thread. Its clients are closed by the next one who asks, on their own loop."""
    for loop, client in clients.items():
        if (home := _homes.get(loop)) is not None:
            home.left_behind.append(client)


def limits() -> httpx2.Limits:
    """How many connections to keep, and for how long: a tool may run between two calls of a model."""
    import httpx2  # noqa: PLC0415

    return httpx2.Limits(max_connections=1_000, max_keepalive_connections=100, keepalive_expiry=60)


async def frames(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event, which is one line. Only a newline ends a line: text may hold the others."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()):
                yield data
    if rest.startswith(b"data:") and (data := rest[5:].strip()):
        yield data


async def drain(rest: AsyncIterator[object]) -> None:
    """Read the rest of a response: a connection is reused only if its response was read to the end."""
    with suppress(Exception):  # the reply is whole, whatever happens now; the connection is closed instead
        async with asyncio.timeout(0.1):
            async for _ in rest:
                pass


def transport_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library raises. The SDKs use httpx2, and httpx when a user's own client is built on it."""
    loaded = (sys.modules.get(name) for name in ("httpx2", "httpx"))
    return tuple(module.HTTPError for module in loaded if module is not None)


def given(key: str | None) -> str | None:
    """A snippet's `api_key=...` is taken at its word: the key stands somewhere else, in the environment."""
    return None if isinstance(key, EllipsisType) else key


def sendable(key: str | None, hint: str) -> str | None:
    """A key without the blanks that come with copying. Others would show up, key and all, in an HTTP error."""
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise AuthenticationFailed(f"the API key holds a character that no key has; copy it again, then {hint}")
    return key or None


def redacted(text: str, client: object) -> str:
    """At most 500 characters of a service's error, without the key, which some repeat."""
    for name in ("api_key", "auth_token", "access_token", "admin_api_key", "aws_secret_key", "aws_session_token"):
        if secret := getattr(client, name, None):
            text = text.replace(str(secret), "[key]")
    return text[:500]


def shown(provider: object, base_url: str | None, client: object) -> str:
    """A provider as its repr: where it asks, and never a key."""
    where = [] if base_url is None else [f"base_url={places.redacted(str(base_url)).partition('?')[0]!r}"]
    own = [] if client is None else [f"client={type(client).__name__}"]
    return f"{type(provider).__name__}({', '.join([*where, *own])})"


# --- failures ---------------------------------------------------------------------------------------------------------

_ADVICE: dict[type[ProviderError], tuple[str, str]] = {
    AuthenticationFailed: ("refused the key", "check the key, what it may do and what it may spend"),
    RateLimited: ("limits the requests of this key", "try again later"),
    Overloaded: ("is overloaded or failed inside", "try again later"),
    ContextTooLong: ("cannot take a request of this length", "send less: trim or summarise the context"),
    ContentRefused: ("declined to answer", "ask differently"),
    InvalidRequest: ("rejected the request", "change what it names"),
}


def refusal(
    kind: type[ProviderError], host: str, model: str, why: str, *, hint: str, wait: float | None = None
) -> ProviderError:
    """The service rejected the request. `hint` says where a key comes from."""
    happened, advice = _ADVICE[kind]
    if kind is AuthenticationFailed:
        advice = f"{advice}; {hint}"
    waiting = "" if wait is None else f" (it asks to wait {wait:g} s)"
    return kind(f"{host} {happened} for model {model!r}: {why}; {advice}{waiting}", retry_after=wait)


def too_slow(host: str, model: str, client: str) -> NetworkFailed:
    return NetworkFailed(
        f"{host} did not answer in time (model {model!r}); try again, or wait longer with client={client}(timeout=...)"
    )


def unreachable(host: str, model: str, what: str) -> NetworkFailed:
    return NetworkFailed(
        f"the connection to {host} failed (model {model!r}, {what}); check the network and base_url, then try again"
    )


def garbled(host: str, model: str, error: Exception) -> NetworkFailed:
    return NetworkFailed(
        f"{host} sent something that is not its protocol (model {model!r}): {error}; try again, and check base_url and "
        "proxies if it persists"
    )


def cut_short(host: str, model: str) -> NetworkFailed:
    return NetworkFailed(f"{host} ended its stream before the reply of {model!r} was complete; try again")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a service asks to wait."""
    for name, unit in (("retry-after-ms", 1_000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < math.inf:
            return seconds
    return None
