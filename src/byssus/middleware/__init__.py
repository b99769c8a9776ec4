"""Hooks into a run, and how they compose.

A middleware is any object with hooks; deriving from `Middleware` is a convenience. Hooks chain in the order in which
the middleware was given: each sees what the one before made of it, and there is no other way to pass a hook that would
bypass one. A hook may be async or plain, and gets `signal` and `context` only if it declares them.

- A hook that raises, or returns what its hook cannot return, ends the run with a `HookFailed` that names it; the thread
  can go on. A tool whose `before_tool_call` fails does not run, and a result whose `after_tool_call` fails is withheld.
- What a hook gets is its own: changing it in place changes neither the thread nor what is stored.
- Whatever the hooks leave of a history, the request is one that a model can answer.
- A run that is aborted waits for no hook: the loop cuts it off, and what it would have checked is withheld. Only
  `on_run_end` is called for each run that came to a result, and has a few seconds if that was aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec
from msgspec import Struct

from byssus.errors import HookFailed, InputError
from byssus.messages import AssistantMessage, Message, Note, ToolCall, ToolResultMessage, Usage
from byssus.providers.base import Model, Provider
from byssus.providers.history import answerable, with_replies
from byssus.signals import Signal
from byssus.values.decisions import Ask, Deny
from byssus.values.marks import MarkedMessages
from byssus.values.results import RunResult

__all__ = ["HookContext", "Middleware"]

_log = logging.getLogger("byssus.middleware")


class HookContext(Struct, frozen=True):
    """Where a hook is called. What it writes to `extra` is stored with the thread when the run ends.

    A hook that asks a model by itself passes what it sends through `as_sent`, which applies every `convert_to_llm`, so
    that nothing gets past a redactor; and tells `spend` what that took, so that it counts as the run's. `marked` tells
    which messages of the thread bear one of some marks.
    """

    extra: dict[str, Any]
    thread_id: str | None = None
    user_id: str | None = None
    run_id: str | None = None
    provider: Provider | None = None
    model: Model | None = None
    as_sent: Callable[[Sequence[Message]], Awaitable[list[Message]]] | None = None
    spend: Callable[[Usage], None] | None = None
    marked: Callable[[Sequence[str]], Awaitable[MarkedMessages]] | None = None


class Middleware:
    """The hooks, each of them doing nothing. Every one may be async or plain, and may also declare `context`."""

    _changes_in_place: ClassVar[bool] = True  # False spares a long thread the copies: for those who know what they do

    async def transform_context(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        """Which messages the model shall see. The list is yours; the thread keeps everything."""
        return messages

    async def convert_to_llm(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        """How the model shall see them: reshapes what is sent, never what is stored."""
        return messages

    async def transform_system_prompt(self, system_prompt: str, *, signal: Signal | None = None) -> str:  # noqa: ARG002
        """The system prompt of this turn."""
        return system_prompt

    async def after_model_response(
        self,
        message: AssistantMessage,
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> AssistantMessage | None:
        """The reply as it shall be stored and acted upon; None leaves it as it is."""
        return message

    async def before_tool_call(
        self,
        call: ToolCall,
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> ToolCall | dict[str, Any] | Deny | Ask | None:
        """None allows the call, `Deny(reason)` does not, a dict or a ToolCall edits its arguments, and `Ask(question)`
        puts it before a person: the run waits until somebody has answered.

        The stored reply keeps the arguments that the model wrote.
        """
        return call

    async def after_tool_call(
        self,
        call: ToolCall,  # noqa: ARG002
        result: ToolResultMessage,
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> ToolResultMessage | None:
        """The result as the model shall see it and as it is stored; None leaves it as it is."""
        return result

    async def should_stop_after_turn(
        self,
        message: AssistantMessage,  # noqa: ARG002
        results: list[ToolResultMessage],  # noqa: ARG002
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> bool:
        """Whether the run ends here."""
        return False

    async def on_run_end(self, result: RunResult, *, signal: Signal | None = None) -> None:
        """The run is over and its messages are stored."""


Context: TypeAlias = Callable[[], HookContext]  # made only where there is a hook to hear of it
HOOKS = tuple(name for name in vars(Middleware) if not name.startswith("_"))
_LAST_WORDS = 5.0  # seconds that `on_run_end` has after an abort


class Chain:
    """The middleware of one agent, ready to be called: each method runs one hook through all of it."""

    def __init__(self, middleware: Sequence[object]) -> None:
        if not isinstance(middleware, Sequence) or isinstance(middleware, str):
            raise InputError(f"middleware must be a list of objects with hooks, got {middleware!r}")
        self._hooks: dict[str, list[_Hook]] = {name: [] for name in HOOKS}
        for item in middleware:
            names = [name for name in HOOKS if getattr(item, name, None) is not None]
            if not names or isinstance(item, type):
                raise InputError(
                    f"{item!r} is no middleware: pass an object that has at least one of the hooks {', '.join(HOOKS)}"
                )
            for name in names:
                if getattr(getattr(item, name), "__func__", None) is not getattr(Middleware, name):
                    self._hooks[name].append(_Hook(item, name))
        self.is_empty = not any(self._hooks.values())  # not a single hook
        self.hears_end = bool(self._hooks["on_run_end"])  # a hook wants to hear of the end of a run

    async def messages(self, messages: list[Message], signal: Signal, context: Context) -> list[Message]:
        """What a model shall see of the history: the same list if nobody wants to change it."""
        choosing, converting = self._hooks["transform_context"], self._hooks["convert_to_llm"]
        if not choosing and not converting:
            return messages

        async def as_sent(some: Sequence[Message]) -> list[Message]:
            return await _shown(converting, list(some), signal, here)

        here, messages = context(), list(messages)
        if any(hook.changes_in_place for hook in (*choosing, *converting)):
            messages = [_own(message) for message in messages]
        messages = await _shown(choosing, messages, signal, msgspec.structs.replace(here, as_sent=as_sent))
        return answerable(await as_sent(messages))

    async def system_prompt(self, system_prompt: str, signal: Signal, context: Context) -> str:
        for hook in self._hooks["transform_system_prompt"]:
            result = await hook(signal, context(), system_prompt)
            if not isinstance(result, str):
                raise hook.wrong("a string", result)
            system_prompt = result
        return system_prompt

    async def reply(self, message: AssistantMessage, signal: Signal, context: Context) -> AssistantMessage:
        for hook in self._hooks["after_model_response"]:
            result = await hook(signal, context(), message)
            if not isinstance(result, AssistantMessage | None):
                raise hook.wrong("an AssistantMessage or None", result)
            message = message if result is None else _in_place_of(message, result)
        return message

    async def call(self, call: ToolCall, signal: Signal, context: Context) -> tuple[ToolCall, Deny | Ask | None]:
        """The call as it shall run, and whether it shall not, or not yet. Whoever asks a person overrules no denial."""
        call, asked = _own_call(call), None
        for hook in self._hooks["before_tool_call"]:
            result = await hook(signal, context(), call)
            if isinstance(result, Deny):
                return call, result
            if isinstance(result, Ask):
                asked = asked or result
                continue
            if isinstance(result, dict):
                call = msgspec.structs.replace(call, arguments=result, malformed=None)
            elif isinstance(result, ToolCall):
                if (result.id, result.name) != (call.id, call.name):
                    raise hook.wrong(f"the call {call.name!r} with other arguments, not another call", result)
                call = result
            elif result is not None:
                raise hook.wrong("None, Deny(reason), Ask(question), a dict of arguments or the ToolCall", result)
        return call, asked

    async def result(
        self, call: ToolCall, result: ToolResultMessage, signal: Signal, context: Context
    ) -> ToolResultMessage:
        for hook in self._hooks["after_tool_call"]:
            changed = await hook(signal, context(), call, result)
            if not isinstance(changed, ToolResultMessage | None):
                raise hook.wrong("a ToolResultMessage or None", changed)
            if changed is not None:  # a result belongs to its call, whatever a hook writes into it
                result = msgspec.structs.replace(changed, tool_call_id=call.id, tool_name=call.name)
        return result

    async def stops(
        self, message: AssistantMessage, results: list[ToolResultMessage], signal: Signal, context: Context
    ) -> bool:
        stops = False
        for hook in self._hooks["should_stop_after_turn"]:
            answer = await hook(signal, context(), _own(message), [_own(result) for result in results])
            if not isinstance(answer, bool | None):
                raise hook.wrong("True or False", answer)
            stops = stops or bool(answer)
        return stops

    async def run_end(self, result: RunResult, signal: Signal, context: Context) -> None:
        """Tell everyone, also when one of them fails."""
        failed: HookFailed | None = None
        for hook in self._hooks["on_run_end"]:
            try:
                await _in_time(hook(signal, context(), result), signal)
            except HookFailed as error:
                failed = failed or error
            except TimeoutError:
                _log.warning("the hook %s was cut off: its run was aborted", hook.name)
        if failed is not None:
            raise failed


async def _shown(
    hooks: Sequence[_Hook], messages: list[Message], signal: Signal, context: HookContext
) -> list[Message]:
    for hook in hooks:
        result = await hook(signal, context, list(messages))
        if not isinstance(result, list | tuple):
            raise hook.wrong("a list of messages", result)
        for item in result:
            if not isinstance(item, Message):
                raise hook.wrong("a list of messages, and nothing else in it", item)
        messages = list(with_replies(result, messages))
    return messages


class _Hook:
    """One hook of one middleware, and which of the optional arguments it takes."""

    def __init__(self, owner: object, name: str) -> None:
        self.name = f"{type(owner).__name__}.{name}"
        self.changes_in_place = getattr(owner, "_changes_in_place", True)
        self._call: Callable[..., Any] = getattr(owner, name)
        if not callable(self._call):
            raise InputError(f"the hook {self.name} must be a function, got {self._call!r}")
        self._takes = self._options(_required(getattr(Middleware, name))[1:])

    def _options(self, wanted: list[str]) -> set[str]:
        """Which of signal and context it takes besides what it must. Raises if it cannot be called with that."""
        try:
            signature = inspect.signature(self._call)
        except ValueError:  # some builtins do not tell
            return set()
        parameters = list(signature.parameters.values())
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        taken = positional[: len(wanted)]  # whatever their names
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        options = {
            key for key in ("signal", "context") if key not in taken and (takes_all or key in signature.parameters)
        }
        try:
            signature.bind(*wanted, **dict.fromkeys(options))
        except TypeError as error:
            raise InputError(
                f"the hook {self.name}{signature} cannot be called ({error}); declare {', '.join(wanted)} and, if you "
                "want them, signal and context"
            ) from error
        return options

    async def __call__(self, signal: Signal, context: HookContext, *args: Any) -> Any:
        options = {"signal": signal, "context": context}
        try:
            result = self._call(*args, **{key: options[key] for key in self._takes})
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise HookFailed(f"the hook {self.name} failed: {type(error).__name__}: {error}") from error

    def wrong(self, wanted: str, got: object) -> HookFailed:
        return HookFailed(f"the hook {self.name} must return {wanted}, got {type(got).__name__}: {got!r:.80}")


async def _in_time(work: Awaitable[object], signal: Signal) -> None:
    """Await the work; from the moment that the signal is set it has a few seconds left. Raises `TimeoutError`."""
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)

    def hurry() -> None:
        with contextlib.suppress(RuntimeError):  # it has ended in the meantime
            limit.reschedule(loop.time() + _LAST_WORDS)

    forget = signal.on_abort(lambda: loop.call_soon_threadsafe(hurry))
    try:
        async with limit:
            await work
    finally:
        forget()


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty]


def _in_place_of(message: AssistantMessage, changed: AssistantMessage) -> AssistantMessage:
    """What a hook made of a reply: still that reply, with what it took, and with a stop reason that fits."""
    stop_reason = changed.stop_reason
    if stop_reason in ("stop", "tool_use"):
        stop_reason = "tool_use" if changed.tool_calls else "stop"
    return msgspec.structs.replace(
        changed,
        id=message.id,
        created_at=message.created_at,
        stop_reason=stop_reason,
        usage=message.usage if changed.usage == Usage() else changed.usage.plausible(),
        model=changed.model or message.model,
        provider=changed.provider or message.provider,
    )


def _own(message: Any) -> Any:
    """The message as a hook may change it: its lists and arguments are no longer those of the thread."""
    if isinstance(message, Note):
        return message
    own = copy.copy(message)
    content = [_own_call(block) if type(block) is ToolCall else block for block in message.content]
    msgspec.structs.force_setattr(own, "content", content)
    return own


def _own_call(call: ToolCall) -> ToolCall:
    try:
        return msgspec.structs.replace(call, arguments=_copied(call.arguments))
    except RecursionError:  # nested so deep that nobody will change it by hand
        return call


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value
