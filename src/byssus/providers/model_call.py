"""One model call: retry after a transient failure, call the next model after a permanent one.

Nothing is asked twice once a part of the reply was shown. A failure that remains is a reply too: what had arrived, with
the stop reason `error`. A run that is handed over asks no model again: another process does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import msgspec

from byssus import telemetry
from byssus.errors import NetworkFailed, ProviderError
from byssus.events import Event, MessageUpdate, StreamError, StreamEvent
from byssus.messages import AssistantMessage, Failure
from byssus.providers.base import Model, Provider, Request
from byssus.providers.reply import Reply
from byssus.signals import Aborted, HandedOver, Signal, until_aborted
from byssus.stream import Backlog, Publish
from byssus.values.following.growth import Growth
from byssus.values.output import in_words

_LONGEST_PAUSE = 60.0
_WATCHED = 0.25  # seconds between two saves while another process watches
_SOON = 0.001  # seconds by which a timer may be early
_TOGETHER = 0.075  # seconds between two saves of replies that are published when they are saved
_log = logging.getLogger("byssus.model")


class Route(NamedTuple):
    """A model and the provider that serves it."""

    provider: Provider
    model: Model


def check_provider(routes: Sequence[Route]) -> None:
    """Raise for a missing key or package before anything is stored; with several models, another one may do."""
    check_one = getattr(routes[0].provider, "check", None)
    if check_one is not None and len(routes) == 1:
        check_one()


class Patience(NamedTuple):
    """Limits of a call: retries, seconds without an event, and seconds to wait for a provider that ignores an abort."""

    retries: int
    idle: float | None
    grace: float
    partial: float | None = None  # seconds between two saves of what has arrived
    is_strict: bool = False  # whether nothing is published before it is committed


class PartialSaver(Protocol):
    """Saves a reply while it arrives."""

    def save(self, growth: Growth, so_far: Callable[[], AssistantMessage], /) -> Future[None] | None:
        """Submit what is new, without waiting for the commit. None: there is nothing to save."""

    def is_watched(self) -> bool:
        """Whether another process watches, so that it should be saved often."""


class ModelCall:
    """A call in progress. Creating one raises for mistakes of the program, such as a missing key."""

    def __init__(
        self,
        routes: Sequence[Route],
        request: Request,
        patience: Patience,
        signal: Signal,
        publish: Publish,
        saver: PartialSaver | None = None,
        leaving: Signal | None = None,  # set when the run is to be handed over
    ) -> None:
        self._saver = saver
        self._leaving = leaving or Signal()
        self.error: ProviderError | None = None
        self.retries = 0  # how often a model was asked again after a passing failure
        self._routes = routes
        self._request = request
        self._patience = patience
        self._signal = signal
        self._publish = publish
        self._first: AsyncIterator[StreamEvent] | None = self._open(routes[0], at_once=len(routes) == 1)

    async def answer(self) -> AssistantMessage:
        """The reply, whole or broken off. If the run is leaving, `HandedOver` is raised instead of asking again."""
        for route in self._routes:
            if self.error is not None:
                if self._leaving.aborted:
                    raise HandedOver
                why = type(self.error).__name__
                _log.warning("%s; asking model %r of %r instead", why, route.model.id, route.provider.name)
            with telemetry.chat(route.provider.name, route.model, self._request) as span:
                reply = await self._ask(route, span)
                message = _priced(self._settled(reply), route.model)
                span.answered(message)
            if self.error is None or not reply.is_empty or self._signal.aborted:
                break
        if message.error is not None:
            self._publish(MessageUpdate(StreamError(message.error)), self._signal)
        return message

    def _settled(self, reply: Reply) -> AssistantMessage:
        """The outcome of a model call. An abort is not a failure."""
        if self._signal.aborted and not reply.is_whole:
            self.error = None
            return reply.broken("aborted")
        if self.error is not None:
            return reply.broken("error", as_failure(self.error))
        message = reply.message()
        if message.stop_reason == "error":  # a provider that says so instead of raising
            self.error = ProviderError(f"the reply of {reply.provider!r} ended with an error that it did not explain")
        return message

    async def _ask(self, route: Route, span: telemetry.Span) -> Reply:
        """Ask one model until it answers, or will not; sets `error`."""
        for attempt in itertools.count():
            reply = Reply(route.model.id, route.provider.name)
            try:
                stream = self._first or self._open(route)
                self._first = None
                self.error = await self._listen(span.timed(stream), reply)
                if self.error is None or not self._is_worth_another(attempt, reply):
                    break
                pause = _pause(attempt, self.error)
                span.retrying(self.error, attempt + 1, pause)
                what = f"model {route.model.id!r} of {route.provider.name!r}"
                _log.warning("%s; asking %s again in %.1f s", type(self.error).__name__, what, pause)
                await self._rest(pause)
                self.retries += 1
            except Aborted:
                break
        return reply

    async def _rest(self, seconds: float) -> None:
        """Wait before a model is asked again. Raises `Aborted` or `HandedOver` when the run is to stop meanwhile."""
        woken = Signal()
        forget = [signal.on_abort(woken.abort) for signal in (self._signal, self._leaving)]
        try:
            await until_aborted(asyncio.sleep(seconds), woken, self._patience.grace)
        except Aborted:
            if woken.reason == "cancelled":
                self._signal.abort("cancelled")
            if self._signal.aborted:
                raise
            raise HandedOver from None
        finally:
            for each in forget:
                each()

    def _is_worth_another(self, attempt: int, reply: Reply) -> bool:
        assert self.error is not None
        soon = (self.error.retry_after or 0) <= _LONGEST_PAUSE  # to come back too early is no use
        return attempt < self._patience.retries and self.error.retryable and soon and reply.is_empty

    def _open(self, route: Route, *, at_once: bool = False) -> AsyncIterator[StreamEvent]:
        request = msgspec.structs.replace(self._request, model=route.model)
        if request.output is not None and not getattr(route.provider, "structured_output", False):
            prompt = f"{request.system_prompt}\n\n{in_words(request.output)}".strip()
            request = msgspec.structs.replace(request, system_prompt=prompt)
        try:
            return route.provider.stream(request, self._signal)
        except ProviderError as error:
            if at_once:
                raise
            return _failing(error)

    async def _listen(self, stream: AsyncIterator[StreamEvent], reply: Reply) -> ProviderError | None:
        """Receive the reply; returns its failure, if any. Raises `Aborted` when the run was asked to stop."""
        attempt = Signal()
        forget = self._signal.on_abort(attempt.abort)
        watch = _Watch(self._patience.idle, attempt)
        is_strict = self._patience.is_strict and self._saver is not None
        saver = None if is_strict else _Saver(self._patience.partial, self._saver, reply, watch)
        strict = _Strict(self._saver, reply, self._publish, self._signal) if is_strict and self._saver else None
        try:
            await until_aborted(self._receive(stream, reply, watch, attempt, strict), attempt, self._patience.grace)
            if not self._signal.aborted:
                reply.check_whole()
        except Aborted:
            if attempt.reason == _STALLED:
                return NetworkFailed(
                    f"{reply.provider} sent nothing for {self._patience.idle:g} s; try again, or wait longer with "
                    "idle_timeout=..."
                )
            self._signal.abort(attempt.reason or "aborted")  # a cancellation of the run, if not an abort already
            raise
        except Exception as error:  # noqa: BLE001 - a provider's failure, of whatever kind, is the final message
            return as_provider_error(error, reply.provider)
        finally:
            if saver is not None:
                saver.stop()
            if strict is not None:
                strict.stop()
            watch.stop()
            forget()
        return None

    async def _receive(
        self,
        stream: AsyncIterator[StreamEvent],
        reply: Reply,
        watch: _Watch,
        attempt: Signal,
        strict: _Strict | None,
    ) -> None:
        """The hot path: once for each delta."""
        signal, last_event, now = self._signal, watch.last_event, watch.now
        publish = self._publish if strict is None else strict.publish
        try:
            async for event in stream:
                if attempt.aborted:  # the run is over or calls another model: publish nothing more
                    return
                last_event[0] = now()
                event = reply.add(event)
                if (backlog := publish(MessageUpdate(event), signal)) is not None:
                    await watch.aside(backlog.room())
            if strict is not None:
                await watch.aside(strict.drain())
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()  # releases the connection, also when the run is aborted


_STALLED = "stalled"


class _Watch:
    """Sets a signal when the stream was silent for too long. One timer per stream, not one per delta."""

    def __init__(self, seconds: float | None, signal: Signal) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.last_event = [self.now()]  # when the last event arrived; shared with what saves
        self._loop = loop
        self._seconds = seconds
        self._signal = signal
        self._is_aside = False
        self._timer = None if seconds is None else loop.call_later(seconds, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def aside(self, wait: Awaitable[None]) -> None:
        """Wait for something other than the model, whose silence does not count meanwhile."""
        self._is_aside = True
        try:
            await wait
        finally:
            self._is_aside = False
            self.last_event[0] = self.now()

    def _look(self) -> None:
        assert self._seconds is not None
        left = self._seconds if self._is_aside else self.last_event[0] + self._seconds - self.now()
        if left <= 0:
            self._signal.abort(_STALLED)
        else:
            self._timer = self._loop.call_later(left, self._look)


class _Saver:
    """Saves what has arrived, more often while another process watches. A timer, so that a delta costs nothing."""

    def __init__(self, seconds: float | None, saver: PartialSaver | None, reply: Reply, watch: _Watch) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds or 0.0
        self._saver = saver
        self._reply = reply
        self._last_event = watch.last_event
        self._saved_at = watch.last_event[0]  # when the last event arrived that was saved
        self._due_at = watch.last_event[0] + self._seconds
        self._timer = self._next() if seconds and saver is not None else None

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _next(self) -> asyncio.TimerHandle:
        return self._loop.call_later(min(self._seconds, _WATCHED), self._look)

    def _look(self) -> None:
        assert self._saver is not None
        self._timer = self._next()
        if self._last_event[0] == self._saved_at or self._reply.is_empty:
            return
        now = self._loop.time()
        if now >= self._due_at - _SOON or self._saver.is_watched():
            self._saved_at, self._due_at = self._last_event[0], now + self._seconds
            self._saver.save(self._reply.growth, self._reply.so_far)


class _Strict:
    """Publishes what has arrived of a reply when it is committed, and not before.

    The moments at which it is saved are the same for all replies of a process, so they share one commit. A save that
    failed is tried again with the next one; until then nothing is published.
    """

    def __init__(self, saver: PartialSaver, reply: Reply, publish: Publish, signal: Signal) -> None:
        self._loop = asyncio.get_running_loop()
        self._saver = saver
        self._reply = reply
        self._publish = publish
        self._signal = signal
        self._waiting: list[Event] = []
        self._write: Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Future[None] | None = None
        self._backlog: Backlog[Any] | None = None  # of a consumer that is behind
        self._is_over = False
        self._has_failed = False

    def publish(self, event: Event, signal: Signal) -> Backlog[Any] | None:  # noqa: ARG002 - as `Publish`
        """Publish an event as soon as it may be."""
        self._waiting.append(event)
        if self._timer is None and self._write is None:
            self._schedule()
        backlog, self._backlog = self._backlog, None
        return backlog

    def stop(self) -> None:
        """What is not committed by now is published no more: the reply is stored as a whole, or not at all."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    async def drain(self) -> None:
        """Wait until all that has arrived is committed and published, or cannot be saved."""
        while self._waiting or self._write is not None:
            if self._write is None:
                self._save()
            if self._write is not None:
                self._settled = self._loop.create_future()
                await self._settled
                if self._write is None and self._has_failed:
                    return

    def _schedule(self) -> None:
        moment = (self._loop.time() // _TOGETHER + 1) * _TOGETHER
        self._timer = self._loop.call_at(moment, self._save)

    def _save(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._has_failed = False
        events, self._waiting = self._waiting, []
        write = self._saver.save(self._reply.growth, self._reply.so_far)
        if write is None:  # they add nothing that could be lost
            self._publish_all(events)
            return
        self._write = write
        write.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._commit, events, write))

    def _commit(self, events: list[Event], write: Future[None]) -> None:
        self._write = None
        self._has_failed = write.exception() is not None
        if self._has_failed:
            self._waiting = [*events, *self._waiting]
        elif not self._is_over:
            self._publish_all(events)
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        elif self._waiting and not self._is_over:
            self._schedule()

    def _publish_all(self, events: list[Event]) -> None:
        for event in events:
            self._backlog = self._publish(event, self._signal) or self._backlog


async def _failing(error: ProviderError) -> AsyncIterator[StreamEvent]:
    """The stream of a provider that refused before it began."""
    raise error
    yield  # what makes this a stream


def _pause(attempt: int, error: ProviderError) -> float:
    """Seconds before the next attempt: what the service asks for, else longer each time, and never in step."""
    wait = error.retry_after if error.retry_after is not None else 0.5 * 2**attempt
    return min(wait, _LONGEST_PAUSE) * (1 + os.urandom(1)[0] / 1024)


def _priced(message: AssistantMessage, model: Model) -> AssistantMessage:
    if message.usage.cost or model.prices is None:
        return message
    usage = msgspec.structs.replace(message.usage, cost=model.cost(message.usage))
    return msgspec.structs.replace(message, usage=usage)


def as_failure(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error))


def as_provider_error(error: Exception, provider: str) -> ProviderError:
    """Whatever a provider raised, as one of ours."""
    if isinstance(error, ProviderError):
        return error
    ours = ProviderError(f"provider {provider!r} failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
