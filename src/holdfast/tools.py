"""Tools: plain functions that a model may call.

    @tool
    def weather(city: Annotated[str, "the city's name"], days: int = 1) -> str:
        "The weather forecast for a city."

The schema comes from the type hints, the docstring and `Annotated` descriptions. Whatever goes wrong with a call (bad
arguments, an exception) becomes a result that tells the model how to do better; a tool never ends a run by failing.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import re
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import Struct, field

from holdfast.errors import InputError
from holdfast.messages import Block, ImageContent, TextContent, ToolCall, ToolResultMessage, dumps
from holdfast.providers.base import ToolSpec
from holdfast.signals import Signal

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ITEM = re.compile(r"(?::param\s+)?(?:\w+\s+)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)")
_SECTION = re.compile(r"(Args|Arguments|Parameters):?\s*")


class ToolContext(Struct):
    """What a tool can ask for: a parameter annotated with this class receives it, unseen by the model."""

    tool_call_id: str
    tool_name: str
    signal: Signal
    thread_id: str | None = None
    user_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    on_update: Callable[[Any], None] | None = None

    def update(self, progress: Any) -> None:
        """Report progress: listeners hear of it as `tool_execution_update`."""
        if self.on_update is not None:
            self.on_update(progress)


class ToolResult(Struct):
    """A tool's answer in full. The model sees `content`; `details` are kept for programs and people."""

    content: str | Sequence[Block]
    details: Any = None
    is_error: bool = False


class Tool(Generic[P, R]):
    """A function with what a model needs to call it. Calling the tool calls the function."""

    def __init__(self, function: Callable[P, R], *, name: str | None = None, description: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", ""))
        if not _NAME.fullmatch(self.name):
            raise InputError(f"a tool's name must be 1 to 64 letters, digits, _ or -, got {self.name!r}; pass name=...")
        summary, described = _read_docstring(inspect.getdoc(function) or "")
        self._context_parameter, self._arguments = _arguments_of(function, self.name, described)
        self.spec = ToolSpec(self.name, description or summary, _schema(self._arguments, self.name))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    async def execute(self, call: ToolCall, context: ToolContext) -> ToolResultMessage:
        """Run the call; a failure of any kind is a result."""
        try:
            arguments = self._convert(call)
        except msgspec.ValidationError as error:
            return _failure(call, f"Invalid arguments: {error}. Expected: {dumps(self.spec.parameters)}")
        if self._context_parameter:
            arguments[self._context_parameter] = context
        try:
            return _message(call, await self._run(arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model sees it
            return _failure(call, f"{type(error).__name__}: {error}")

    def _convert(self, call: ToolCall) -> dict[str, Any]:
        if call.malformed is not None:
            raise msgspec.ValidationError(f"the arguments are not a JSON object: {call.malformed[:200]!r}")
        try:
            value = msgspec.convert(call.arguments, self._arguments)
        except msgspec.ValidationError:
            # Models like to send "3" for 3: take it where it can only mean that.
            value = msgspec.convert(call.arguments, self._arguments, strict=False)
        return {name: getattr(value, name) for name in self._arguments.__struct_fields__}

    async def _run(self, arguments: dict[str, Any]) -> Any:
        function: Callable[..., Any] = self.function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return await function(**arguments)
        result = await in_thread(lambda: function(**arguments))
        return await result if inspect.isawaitable(result) else result


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Any = None, /, *, name: str | None = None, description: str | None = None) -> Any:
    """Make a function a tool: `@tool`, or `@tool(name=..., description=...)`."""
    if function is not None:
        return Tool(function, name=name, description=description)
    return lambda wrapped: Tool(wrapped, name=name, description=description)


async def in_thread(function: Callable[[], R]) -> R:
    """Run a blocking function on a daemon thread of its own.

    Not the event loop's pool: one that hangs must neither use it up nor keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001 - it travels to the caller
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, name="holdfast-tool", daemon=True).start()
    return await future


def unknown_tool(call: ToolCall, names: Sequence[str]) -> ToolResultMessage:
    known = f"The tools are: {', '.join(names)}." if names else "There are no tools."
    return _failure(call, f"There is no tool {call.name!r}. {known}")


def aborted(call: ToolCall, *, started: bool) -> ToolResultMessage:
    what = "it may or may not have taken effect" if started else "it was not started"
    return _failure(call, f"The run was aborted during this call: {what}.")


def _failure(call: ToolCall, text: str) -> ToolResultMessage:
    return ToolResultMessage(call.id, call.name, text, is_error=True)


def _message(call: ToolCall, value: Any) -> ToolResultMessage:
    """Whatever a tool returned, as a message."""
    result = value if isinstance(value, ToolResult) else ToolResult(_content(value))
    details = None if result.details is None else readable(result.details)
    return ToolResultMessage(call.id, call.name, result.content, details, result.is_error)


def _content(value: Any) -> str | Sequence[Block]:
    if value is None:
        return "(no output)"
    if isinstance(value, str):
        return value
    if isinstance(value, TextContent | ImageContent):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, TextContent | ImageContent) for item in value):
        return value
    return msgspec.json.encode(readable(value)).decode()


def readable(value: Any) -> Any:
    """Any Python value as JSON that a person can read. Nothing is too strange: the last resort is its repr."""
    try:
        return msgspec.to_builtins(value, enc_hook=_describe, str_keys=True)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _describe(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) and not isinstance(value, type) else repr(value)


# --- from a signature to a schema -------------------------------------------------------------------------------------


def _arguments_of(
    function: Callable[..., Any], tool_name: str, described: dict[str, str]
) -> tuple[str | None, type[Struct]]:
    """The parameter that takes the context, and a struct of all the others."""
    try:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise InputError(
            f"tool {tool_name!r}: its type hints cannot be read ({error}); define them at module level"
        ) from error
    context_parameter: str | None = None
    required: list[Any] = []
    optional: list[Any] = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, Any)
        if hint is ToolContext:
            context_parameter = name
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"tool {tool_name!r}: parameter {name!r} must be a plain named parameter")
        elif parameter.default is parameter.empty:
            required.append((name, _described(hint, described.get(name))))
        else:
            optional.append((name, _described(hint, described.get(name)), _default(parameter.default)))
    try:
        struct = msgspec.defstruct("Arguments", required + optional, kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise InputError(f"tool {tool_name!r}: {error}") from error
    return context_parameter, struct


def _default(value: Any) -> Any:
    """A default for the struct: shown in the schema where it is plain, else the very object, as Python would do."""
    return value if isinstance(value, str | int | float | None) else field(default_factory=lambda: value)


def _described(hint: Any, description: str | None) -> Any:
    """The hint with its description where a schema finds it; `Annotated[str, "..."]` wins over the docstring."""
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        texts = [note for note in notes if isinstance(note, str)]
        rest = tuple(note for note in notes if isinstance(note, msgspec.Meta))
        hint = Annotated[(base, *rest)] if rest else base
        description = texts[0] if texts else description
    return Annotated[hint, msgspec.Meta(description=description)] if description else hint


def _schema(arguments: type[Struct], tool_name: str) -> dict[str, Any]:
    try:
        _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise InputError(
            f"tool {tool_name!r}: its parameters cannot be described to a model ({error}); use str, int, float, bool, "
            "list, dict, Literal, Enum, dataclasses, TypedDicts or msgspec Structs"
        ) from error
    schema = components.pop("Arguments")
    schema.pop("title", None)
    return {**schema, "$defs": components} if components else schema


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what an `Args:` section or `:param x:` lines say of each parameter."""
    summary: list[str] = []
    described: dict[str, str] = {}
    inside, current = False, ""
    for line in text.splitlines():
        stripped = line.strip()
        if _SECTION.fullmatch(stripped) or (set(stripped) == {"-"} and inside):
            inside = True
        elif (match := _ITEM.fullmatch(stripped)) and (inside or stripped.startswith(":param")):
            current = match[1]
            described[current] = match[2].strip()
        elif inside and stripped and line.startswith(" ") and current:
            described[current] += " " + stripped
        elif stripped.startswith((":return", ":rtype", ":raise", "Returns:", "Raises:", "Example")):
            inside, current = False, ""
            break
        elif not inside:
            summary.append(line)
    return "\n".join(summary).strip(), described
