"""Hooks into a run, and how they compose.

A middleware is any object with hooks; deriving from `Middleware` is optional. Hooks run in the order of the list: each
gets the output of the one before, and no request, reply or call bypasses a hook. A hook can be async or plain, and gets
`signal` and `context` only if it declares them.

- A hook that raises or returns a wrong type ends the run with a `HookFailed` that names it; the thread can continue. A
  tool whose `before_tool_call` fails does not run, and a result whose `after_tool_call` fails is withheld.
- A hook gets copies: changing them in place changes neither the thread nor what is stored.
- Whatever the hooks leave of a history, the request is valid for a model.
- An aborted run waits for no hook: the loop cancels it, and what it would have checked is withheld. Only `on_run_end`
  is called for each run that has a result; after an abort it has a few seconds.
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
from byssus.values.decisions import Ask, Deny, joined
from byssus.values.inputs import checked_number
from byssus.values.marks import MarkedMessages
from byssus.values.results import RunResult

__all__ = ["HookContext", "Middleware"]

_log = logging.getLogger("byssus.middleware")


class HookContext(Struct, frozen=True):
    """The context of a hook. Changes to `extra` are stored with the thread when the run ends.

    A hook that calls a model itself should pass its messages through `as_sent`, which applies every `convert_to_llm`
    hook,
    so that redactors apply; and report the usage with `spend`, so that it counts towards the run's limits. `marked`
    returns the messages of the thread that have at least one of some marks.

    An agent may hold only the end of a long thread. `earlier_count` is the number of messages before those that the
    first `transform_context` hook gets; `await earlier(n)` loads up to n of them, the last ones first, in order.
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
    earlier: Callable[[int], Awaitable[list[Message]]] | None = None
    earlier_count: int = 0


class Middleware:
    """Base class with all hooks, which do nothing. Each can be async or plain, and can also declare `context`."""

    _changes_in_place: ClassVar[bool] = True  # False avoids copying a long thread, if no hook changes it in place

    asks_for_earlier: ClassVar[bool] = False
    """True: `transform_context` needs only the end of a thread, and loads more with `context.earlier` if it must. If
    the first such hook of an agent says so, the agent does not load the whole of a long thread."""

    async def transform_context(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        """Return the messages that the model will get. The list is a copy; the thread keeps everything."""
        return messages

    async def convert_to_llm(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        """Return the messages in the form in which the model will get them. The stored messages do not change."""
        return messages

    async def transform_system_prompt(self, system_prompt: str, *, signal: Signal | None = None) -> str:  # noqa: ARG002
        """Return the system prompt of this turn."""
        return system_prompt

    async def after_model_response(
        self,
        message: AssistantMessage,
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> AssistantMessage | None:
        """Return the reply to store and act on; None keeps it as it is."""
        return message

    async def before_tool_call(
        self,
        call: ToolCall,
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> ToolCall | dict[str, Any] | Deny | Ask | None:
        """Return None to run the call, `Deny(reason)` to refuse it, a dict or a ToolCall to change its arguments, or
        `Ask(question)` to ask a person: the run then waits for the answer.

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
        """Return the result to store and show to the model; None keeps it as it is."""
        return result

    async def should_stop_after_turn(
        self,
        message: AssistantMessage,  # noqa: ARG002
        results: list[ToolResultMessage],  # noqa: ARG002
        *,
        signal: Signal | None = None,  # noqa: ARG002
    ) -> bool:
        """Return True to end the run after this turn."""
        return False

    async def on_run_end(self, result: RunResult[Any], *, signal: Signal | None = None) -> None:
        """Called when the run has ended and its messages are stored."""


Context: TypeAlias = Callable[[], HookContext]  # created only if there is a hook to call
HOOKS = tuple(name for name, value in vars(Middleware).items() if callable(value) and not name.startswith("_"))
_LAST_WORDS = 5.0  # seconds that `on_run_end` has after an abort


class Chain:
    """The middleware of one agent: each method runs one hook of all of them."""

    def __init__(self, middleware: Sequence[object]) -> None:
        if not isinstance(middleware, Sequence) or isinstance(middleware, str):
            raise InputError(f"middleware must be a list of objects with hooks, got {middleware!r}")
        self._hooks: dict[str, list[_Hook]] = {name: [] for name in HOOKS}
        for item in middleware:
            names = [name for name in HOOKS if getattr(item, name, None) is not None]
            if not names or isinstance(item, type):
                raise InputError(
                    f"{item!r} is not a middleware: pass an object with at least one of the hooks {', '.join(HOOKS)}"
                )
            for name in names:
                if getattr(getattr(item, name), "__func__", None) is not getattr(Middleware, name):
                    self._hooks[name].append(_Hook(item, name))
        self.is_empty = not any(self._hooks.values())  # there is no hook at all
        self.has_run_end = bool(self._hooks["on_run_end"])  # there is an `on_run_end` hook
        choosing = self._hooks["transform_context"]  # the later ones get what the first one leaves
        self.asks_for_earlier = bool(choosing) and choosing[0].asks_for_earlier
        self.changes_messages = bool(choosing or self._hooks["convert_to_llm"])  # the model may get other messages

    async def messages(self, messages: list[Message], signal: Signal, context: Context) -> list[Message]:
        """Return the history that the model will get: the same list if no hook changes it."""
        choosing, converting = self._hooks["transform_context"], self._hooks["convert_to_llm"]
        if not choosing and not converting:
            return messages

        async def as_sent(some: Sequence[Message]) -> list[Message]:
            return await _shown(converting, list(some), signal, here)

        async def earlier(limit: int) -> list[Message]:
            found = await load_earlier(checked_number("limit", limit)) if load_earlier is not None else []
            return [_own(message) for message in found] if changes_in_place else list(found)

        here, messages = context(), list(messages)
        load_earlier = here.earlier
        changes_in_place = any(hook.changes_in_place for hook in (*choosing, *converting))
        if changes_in_place:
            messages = [_own(message) for message in messages]
        shown_to = msgspec.structs.replace(here, as_sent=as_sent, earlier=earlier)
        messages = await _shown(choosing, messages, signal, shown_to)
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
        """Return the call to run, and whether it is denied or must be approved first. A denial overrules a question."""
        call, asked = _own_call(call), None
        for hook in self._hooks["before_tool_call"]:
            result = await hook(signal, context(), call)
            if isinstance(result, Deny):
                return call, result
            if isinstance(result, Ask):
                asked = result if asked is None else joined(asked, result)
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
            if changed is not None:  # a result keeps its call id, whatever a hook writes into it
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

    async def run_end(self, result: RunResult[Any], signal: Signal, context: Context) -> None:
        """Call every `on_run_end` hook, even if one of them fails."""
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
                raise hook.wrong("a list of messages and nothing else", item)
        messages = list(with_replies(result, messages))
    return messages


class _Hook:
    """One hook of one middleware, and which optional arguments it takes."""

    def __init__(self, owner: object, name: str) -> None:
        self.name = f"{type(owner).__name__}.{name}"
        self.changes_in_place = getattr(owner, "_changes_in_place", True)
        self.asks_for_earlier = getattr(owner, "asks_for_earlier", False) is True
        self._call: Callable[..., Any] = getattr(owner, name)
        if not callable(self._call):
            raise InputError(f"the hook {self.name} must be a function, got {self._call!r}")
        self._takes = self._options(_required(getattr(Middleware, name))[1:])

    def _options(self, wanted: list[str]) -> set[str]:
        """Return which of signal and context the hook takes. Raises if it cannot be called with its
        required arguments.
        """
        try:
            signature = inspect.signature(self._call)
        except ValueError:  # some builtins have no signature
            return set()
        parameters = list(signature.parameters.values())
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        taken = positional[: len(wanted)]  # by position, whatever their names
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        options = {
            key for key in ("signal", "context") if key not in taken and (takes_all or key in signature.parameters)
        }
        try:
            signature.bind(*wanted, **dict.fromkeys(options))
        except TypeError as error:
            raise InputError(
                f"the hook {self.name}{signature} cannot be called ({error}); declare {', '.join(wanted)} and, if "
                "needed, signal and context"
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
    """Await the work; once the signal is set, it has a few seconds left. Raises `TimeoutError`."""
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)

    def hurry() -> None:
        with contextlib.suppress(RuntimeError):  # it has ended meanwhile
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
    """Return the changed reply with the id and usage of the original, and a stop reason that matches its content."""
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
    """Return a copy of the message that a hook can change: lists and arguments are not shared with the thread."""
    if isinstance(message, Note):
        return message
    own = copy.copy(message)
    content = [_own_call(block) if type(block) is ToolCall else block for block in message.content]
    msgspec.structs.force_setattr(own, "content", content)
    return own


def _own_call(call: ToolCall) -> ToolCall:
    try:
        return msgspec.structs.replace(call, arguments=_copied(call.arguments))
    except RecursionError:  # nested too deep to be changed by hand
        return call


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value
