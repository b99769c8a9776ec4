"""Tools: plain functions that a model can call.

    @tool
    def weather(city: Annotated[str, "the city's name"], days: int = 1) -> str:
        "The weather forecast for a city."

The schema comes from the type hints, the docstring and `Annotated` descriptions. A failed call (invalid arguments, an
exception) becomes an error result that the model reads; it never ends a run.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_args, overload

import msgspec
from msgspec import Struct, field

from byssus.errors import InputError
from byssus.messages import Block, ImageContent, TextContent, ToolCall, ToolResultMessage, dumps, image_type
from byssus.providers.base import ToolSpec
from byssus.signals import Signal
from byssus.tools.details import error_text
from byssus.tools.details import readable as readable
from byssus.tools.execution import Exited, TimedOut, is_async, run, within
from byssus.tools.signature import arguments_of, inner, read_docstring, schema_of
from byssus.values.decisions import Ask, Deny, Recovery
from byssus.values.results import ToolResult as ToolResult
from byssus.values.schemas import convert

__all__ = ["Done", "NotDone", "Tool", "ToolContext", "Unknown", "tool"]

P = ParamSpec("P")
R = TypeVar("R")

RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)
MAX_ATTEMPTS = 3  # interrupted attempts of a call before a person is asked

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_log = logging.getLogger("byssus.tool")


class ToolContext(Struct):
    """The context of a tool call. It is passed to a parameter annotated with this class, which the
    model does not see.
    """

    tool_call_id: str
    tool_name: str
    signal: Signal
    thread_id: str | None = None
    user_id: str | None = None
    idempotency_key: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    on_update: Callable[[Any], None] | None = None

    def update(self, progress: Any) -> None:
        """Report progress to listeners, as `tool_execution_update`."""
        if self.on_update is not None:
            self.on_update(progress)


class Done(Struct, frozen=True):
    """Returned by a `check` if the interrupted call has taken effect; `result` is the call's result."""

    result: Any = None


class NotDone(Struct, frozen=True):
    """Returned by a `check` if the interrupted call has not taken effect: it is run again."""


class Unknown(Struct, frozen=True):
    """Returned by a `check` that cannot tell: the model gets a result that says so."""


class Outcome(NamedTuple):
    """How a call ended: its result, whether the run ends with it, its status in the ledger, and its duration."""

    message: ToolResultMessage
    ends_run: bool = False
    status: str = ""
    elapsed_ms: float | None = None

    @property
    def ending(self) -> str:
        return self.status or ("failed" if self.message.is_error else "done")


class Tool(Generic[P, R]):
    """A function with its description for a model. Calling the tool calls the function.

    `timeout` is in seconds. If a reply calls a `sequential` tool, all calls of the reply run one after the other. With
    `approval=True` a person must approve each call before it runs; `approval=Ask(...)` says how many people, and until
    when. `approval=function` decides about each call: it gets the call's `ToolContext` and returns True, False, an
    `Ask` with a question of its own, or `Deny(reason)`. What it adds to `context.arguments` is shown with the question,
    and passed to the tool. If it fails, the call is denied.

    `recovery` is the policy for a call that was started and interrupted, so that its outcome is unknown: `never` run it
    again (the model reads that the outcome is unknown), `retry` it with the same idempotency key, `check` with the
    tool's own function, or `ask` a person. After `max_attempts` interrupted attempts a person is asked, because the
    call itself may be what kills the process.
    """

    approval: Ask | None
    max_attempts: int | None
    _approval_of: Callable[[ToolContext], Any] | None
    _check: Callable[[ToolContext], Any] | None

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
        sequential: bool = False,
        recovery: Recovery = "never",
        approval: bool | Ask | Callable[[ToolContext], Any] = False,
        check: Callable[[ToolContext], Any] | None = None,
        max_attempts: int | None = MAX_ATTEMPTS,
    ) -> None:
        name = name or str(getattr(function, "__name__", ""))
        summary, described = read_docstring(inspect.getdoc(inner(function)) or "")
        self._context_parameter, self._arguments = arguments_of(function, name, described, ToolContext)
        spec = ToolSpec(name, description or summary, schema_of(self._arguments, name))
        self._setup(function, spec, timeout, sequential=sequential)
        if recovery not in RECOVERIES:
            raise InputError(f"tool {name!r}: recovery must be one of {', '.join(RECOVERIES)}; got {recovery!r}")
        self.recovery = "check" if check is not None and recovery == "never" else recovery
        if callable(approval):
            self._approval_of = approval
        else:
            self.approval = _checked_approval(name, approval)
        self.max_attempts = _checked_attempts(name, max_attempts)
        if check is not None:
            self.check(check)

    def check(self, function: Callable[[ToolContext], Any]) -> Callable[[ToolContext], Any]:
        """Register a function that finds out the outcome of an interrupted call: `@pay.check`.

        It gets the call's context (with `arguments` and `idempotency_key`), can be async or plain, and returns
        `Done(result)`, `NotDone()` or `Unknown()`.
        """
        if not callable(function):
            raise InputError(f"tool {self.name!r}: check must be a function of a ToolContext, got {function!r}")
        if self.recovery != "check":
            raise InputError(
                f"tool {self.name!r} has a check, but its recovery is {self.recovery!r}; pass recovery='check'"
            )
        self._check = function
        return function

    @property
    def has_check(self) -> bool:
        """Whether the tool has a function that finds out what became of an interrupted call."""
        return self._check is not None

    @property
    def decides_by_call(self) -> bool:
        """Whether a function of the tool decides which of its calls need an approval."""
        return self._approval_of is not None

    @property
    def needs_thread(self) -> bool:
        """Whether a call may take an OS thread: for the function itself, or for its check."""
        return not is_async(self.function) or (self._check is not None and not is_async(self._check))

    async def ask_check(self, context: ToolContext) -> Done | NotDone | Unknown:
        """Return the answer of the tool's check for an interrupted call. If it fails or returns another type:
        `Unknown`.
        """
        assert self._check is not None
        check = self._check
        try:
            answer = await within(run(check, {"context": context}, positional=True), self._timeout)
        except Exception:  # noqa: BLE001 - the model reads that the outcome is unknown
            _log.exception("the check of tool %r failed for call %r", self.name, context.tool_call_id)
            return Unknown()
        if isinstance(answer, Done | NotDone | Unknown):
            return answer
        _log.error("the check of tool %r must return Done(...), NotDone() or Unknown(), got %r", self.name, answer)
        return Unknown()

    async def demand(self, call: ToolCall, context: ToolContext) -> Ask | Deny | None:
        """Ask the tool's approval function about a call: a question to a person, nothing, or a refusal."""
        assert self._approval_of is not None
        if self.problem_with(call) is not None:  # the call fails with that, and never runs
            return None
        try:
            answer = await within(run(self._approval_of, {"context": context}, positional=True), self._timeout)
        except Exception as error:  # noqa: BLE001 - a call without its approval does not run
            return Deny(f"whether it needs an approval could not be found out ({error_text(error)})")
        if isinstance(answer, Deny):
            return answer
        try:
            return _checked_approval(self.name, answer)
        except InputError as error:
            return Deny(str(error))

    def _setup(self, function: Callable[P, R], spec: ToolSpec, timeout: float | None, *, sequential: bool) -> None:
        if not _NAME.fullmatch(spec.name):
            raise InputError(f"a tool's name must be 1 to 64 letters, digits, _ or -, got {spec.name!r}; pass name=...")
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
        ):
            raise InputError(f"tool {spec.name!r}: timeout must be a number of seconds above 0, got {timeout!r}")
        self.function = function
        self.spec = spec
        self.name = spec.name
        self.sequential = sequential
        self.recovery = "never"
        self.approval = None
        self._approval_of = None
        self.max_attempts = MAX_ATTEMPTS
        self._timeout = timeout
        self._check = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    async def execute(self, call: ToolCall, context: ToolContext) -> Outcome:
        """Run the call; any failure becomes an error result."""
        try:
            arguments = self._read(call)
        except msgspec.ValidationError as error:
            return Outcome(failure(call, f"Invalid arguments: {error}. Expected: {dumps(self.spec.parameters)}"))
        except Exception as error:  # noqa: BLE001 - a validator of the tool's own
            return Outcome(failure(call, f"Invalid arguments: {error_text(error)}"))
        return await self._perform(call, arguments, context)

    def problem_with(self, call: ToolCall) -> str | None:
        """Return why the arguments of a call do not fit this tool; None if they do."""
        try:
            self._read(call)
        except msgspec.ValidationError as error:
            return f"{error}. Expected: {dumps(self.spec.parameters)}"
        except Exception as error:  # noqa: BLE001 - a validator of the tool's own
            return error_text(error)
        return None

    async def _perform(self, call: ToolCall, arguments: dict[str, Any], context: ToolContext) -> Outcome:
        try:
            return outcome(call, await within(self._run(arguments, context), self._timeout))
        except TimedOut:
            return Outcome(failure(call, f"Timed out after {self._timeout} s; it may or may not have taken effect."))
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            return Outcome(failure(call, error_text(error)))  # raised by the function: the call was not cancelled
        except Exited as error:
            return Outcome(failure(call, f"SystemExit: {error}"))
        except Exception as error:  # noqa: BLE001 - the model sees it
            return Outcome(failure(call, error_text(error)))

    def _read(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of the function; raises `msgspec.ValidationError`."""
        sent = arguments_in(call)
        try:
            value = convert(sent, self._arguments)
        except msgspec.ValidationError:
            # Models often send "3" for 3: accept it where it is unambiguous.
            value = convert(sent, self._arguments, strict=False)
        return {name: getattr(value, name) for name in self._arguments.__struct_fields__}

    async def _run(self, arguments: dict[str, Any], context: ToolContext) -> Any:
        if self._context_parameter:
            arguments[self._context_parameter] = context
        return await run(self.function, arguments)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    sequential: bool = False,
    recovery: Recovery = "never",
    approval: bool | Ask | Callable[[ToolContext], Any] = False,
    check: Callable[[ToolContext], Any] | None = None,
    max_attempts: int | None = MAX_ATTEMPTS,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Any = None, /, **options: Any) -> Any:
    """Make a function a tool: `@tool`, or `@tool(name=..., timeout=..., recovery=..., approval=...)`: see `Tool`."""
    if function is not None:
        return Tool(function, **options)
    return lambda wrapped: Tool(wrapped, **options)


def _checked_approval(name: str, approval: object) -> Ask | None:
    if isinstance(approval, Ask):
        return approval
    if not isinstance(approval, bool):
        raise InputError(
            f"tool {name!r}: approval must be True, False, Ask(...) or a function that returns one of them, got "
            f"{approval!r:.80}"
        )
    return Ask() if approval else None


def _checked_attempts(name: str, attempts: object) -> int | None:
    if attempts is None:
        return None
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InputError(f"tool {name!r}: max_attempts must be a number from 1 up, or None; got {attempts!r}")
    return attempts


def unknown_tool(call: ToolCall, names: Sequence[str]) -> ToolResultMessage:
    known = f"The tools are: {', '.join(names)}." if names else "There are no tools."
    return failure(call, f"There is no tool {call.name!r}. {known}")


def aborted(call: ToolCall) -> ToolResultMessage:
    return failure(call, "The run was aborted during this call: it may or may not have taken effect.")


def not_started(call: ToolCall, reason: str) -> ToolResultMessage:
    return failure(call, f"This call was not started, because {reason}.")


def failure(call: ToolCall, text: str) -> ToolResultMessage:
    """Return an error result for the model."""
    return ToolResultMessage(call.id, call.name, text, is_error=True)


def arguments_in(call: ToolCall) -> dict[str, Any]:
    """Return a copy of the model's arguments: the tool may change it, but not the history."""
    if call.malformed is not None:
        raise msgspec.ValidationError(f"the arguments are not a JSON object: {call.malformed[:200]!r}")
    return own_arguments(call)


def own_arguments(call: ToolCall) -> dict[str, Any]:
    return copy.deepcopy(call.arguments)


def outcome(call: ToolCall, value: Any) -> Outcome:
    """Convert the return value of a tool to a message."""
    result = value if _is(value, ToolResult) else ToolResult(value)
    message = ToolResultMessage(
        call.id, call.name, _content(result.content), readable(result.details), bool(result.is_error)
    )
    if any(isinstance(block, ImageContent) and image_type(block) is None for block in message.content):
        no_image = "The tool returned an image that is none; it has to be the base64 of a PNG, JPEG, GIF or WebP file."
        return Outcome(failure(call, f"{no_image} Its text was: {message.text}" if message.text else no_image))
    return Outcome(message, bool(result.end_run))


def _content(value: Any) -> str | Sequence[Block]:
    if value is None:
        return "(no output)"
    if _is(value, str):
        return str(value)
    blocks = value if _is(value, list, tuple) else [value]
    if any(_is(item, TextContent, ImageContent) for item in blocks) and all(
        _is(item, TextContent, ImageContent, str) for item in blocks
    ):
        return [TextContent(item) if isinstance(item, str) else item for item in blocks]
    return json.dumps(readable(value), ensure_ascii=False, separators=(",", ":"))


def _is(value: object, *kinds: type) -> bool:
    """`isinstance` that never raises: a proxy without its object raises when its class is read."""
    return issubclass(type(value), kinds)
