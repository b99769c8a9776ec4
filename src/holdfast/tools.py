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
import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import Struct, field

from holdfast.errors import InputError
from holdfast.messages import Block, ImageContent, TextContent, ToolCall, ToolResultMessage, checked_dumps, dumps
from holdfast.providers.base import ToolSpec
from holdfast.signals import Signal

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
        except Exception as error:  # noqa: BLE001 - a parameter's own class may raise anything
            return failure(call, f"Invalid arguments: {_told(error)}. Expected: {dumps(self.spec.parameters)}")
        if self._context_parameter:
            arguments[self._context_parameter] = context
        try:
            return _message(call, await self._run(arguments))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and context.signal.aborted:
                raise
            return failure(call, f"{type(error).__name__}: {_told(error)}")

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
    return failure(call, f"There is no tool {call.name!r}. {known}")


def aborted(call: ToolCall) -> ToolResultMessage:
    return failure(call, "The run was aborted during this call: it may or may not have taken effect.")


def not_started(call: ToolCall, reason: str) -> ToolResultMessage:
    return failure(call, f"This call was not started, because {reason}.")


def failure(call: ToolCall, text: str) -> ToolResultMessage:
    """A result that tells the model what went wrong."""
    return ToolResultMessage(call.id, call.name, text, is_error=True)


def _told(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - somebody's __str__
        return "(it cannot be shown)"


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
    return json.dumps(readable(value), ensure_ascii=False, separators=(",", ":"))


def readable(value: Any) -> Any:
    """Any Python value as JSON that a person can read. Nothing is too strange: the last resort is its repr."""
    try:
        plain = msgspec.to_builtins(value, enc_hook=_describe, str_keys=True)
        checked_dumps(plain)
    except Exception:  # noqa: BLE001 - cycles, bottomless nesting, classes that fail when they are looked at
        return _repr(value)
    return plain


def _describe(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) and not isinstance(value, type) else _repr(value)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - somebody's __repr__, or a number that is too long to be shown
        return object.__repr__(value)


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
        struct = msgspec.defstruct(
            f"{tool_name}__arguments", required + optional, kw_only=True, forbid_unknown_fields=True
        )
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
        (root,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise InputError(
            f"tool {tool_name!r}: its parameters cannot be described to a model ({error}); use str, int, float, bool, "
            "list, dict, Literal, Enum, dataclasses, TypedDicts or msgspec Structs"
        ) from error
    schema = components.pop(root["$ref"].rsplit("/", 1)[1])
    schema.pop("title", None)
    return {**schema, "$defs": components} if components else schema


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the tool, and of each parameter: Google, NumPy and Sphinx styles."""
    if ":" not in text and "---" not in text:
        return text.strip(), {}
    import docstring_parser  # noqa: PLC0415 - only who has something to parse pays for it

    parsed = docstring_parser.parse(text)
    described = {item.arg_name.lstrip("*"): " ".join((item.description or "").split()) for item in parsed.params}
    return (parsed.description or "").strip(), {name: said for name, said in described.items() if said}
