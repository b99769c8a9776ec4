"""Hooks into a run, and how they compose.

A middleware is any object with hooks; deriving from `Middleware` is a convenience. Hooks chain in the order in which
the middleware was given: each sees what the one before made of it. A hook may be async or plain, and gets `signal` and
`context` only if it declares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from holdfast.errors import HookFailed, InputError
from holdfast.messages import Message
from holdfast.signals import Signal

HOOKS = ("transform_context",)


class HookContext(Struct):
    """Where a hook is called. What it writes to `extra` is stored with the thread when the run ends."""

    extra: dict[str, Any]
    thread_id: str | None = None
    user_id: str | None = None


class Middleware:
    """The hooks, each of them doing nothing."""

    async def transform_context(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        """What the model shall see of the history. The list is yours; the thread keeps everything."""
        return messages


class SlidingWindow(Middleware):
    """The model sees the last n messages; the database keeps all."""

    def __init__(self, n: int) -> None:
        if n < 1:
            raise InputError(f"SlidingWindow needs at least one message, got {n!r}")
        self._n = n

    async def transform_context(self, messages: list[Message], *, signal: Signal | None = None) -> list[Message]:  # noqa: ARG002
        return messages[-self._n :]


class Chain:
    """The middleware of one agent, ready to be called."""

    def __init__(self, middleware: Sequence[object]) -> None:
        self._context_hooks: list[_Hook] = []
        if not isinstance(middleware, Sequence):
            raise InputError(f"middleware must be a list of objects, got {middleware!r}")
        for item in middleware:
            hooks = [name for name in HOOKS if callable(getattr(item, name, None))]
            if not hooks or isinstance(item, type):
                raise InputError(
                    f"{item!r} is no middleware: pass an object that has at least one of the hooks {', '.join(HOOKS)}"
                )
            if getattr(type(item), "transform_context", None) is not Middleware.transform_context:
                self._context_hooks.append(_Hook(item, "transform_context"))

    async def transform_context(self, messages: list[Message], signal: Signal, context: HookContext) -> list[Message]:
        if not self._context_hooks:
            return messages
        messages = list(messages)
        for hook in self._context_hooks:
            result = await hook(messages, signal=signal, context=context)
            if not isinstance(result, list | tuple) or not all(isinstance(item, Message) for item in result):
                raise HookFailed(f"the hook {hook.name} must return a list of messages, got {result!r:.80}")
            messages = list(result)
        return messages


class _Hook:
    """One hook of one middleware, and which of the optional arguments it takes."""

    def __init__(self, owner: object, name: str) -> None:
        self.name = f"{type(owner).__name__}.{name}"
        self._call: Callable[..., Any] = getattr(owner, name)
        parameters = inspect.signature(self._call).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._takes = {key for key in ("signal", "context") if takes_all or key in parameters}

    async def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            result = self._call(*args, **{key: value for key, value in options.items() if key in self._takes})
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise HookFailed(f"the hook {self.name} failed: {type(error).__name__}: {error}") from error
