"""From a function's signature to the JSON schema of its arguments, and from a model's JSON to the arguments.

The arguments of a tool are the fields of a generated struct, so one library validates and describes them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, field

from byssus.errors import InputError
from byssus.values.schemas import describe

# The constraints of `pydantic.Field(ge=1)` and of the annotated-types package. msgspec has the same names.
_CONSTRAINTS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")

_WRAPPERS = (Union, types.UnionType, Annotated)


def arguments_of(
    function: Callable[..., Any], tool_name: str, described: dict[str, str], context: type
) -> tuple[str | None, type[Struct]]:
    """Return the name of the context parameter, and a struct of all other parameters."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(f"tool {tool_name!r} is a generator; return the result, and report progress with ToolContext")
    hints, parameters = _read(function, tool_name)
    contexts: list[str] = []
    fields: list[Any] = []
    for name, parameter in parameters.items():
        hint = hints.get(name, Any)
        if hint is context or (get_origin(hint) in _WRAPPERS and context in get_args(hint)):
            contexts.append(name)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(f"tool {tool_name!r}: parameter {name!r} must be a plain named parameter")
        elif parameter.default is parameter.empty:
            fields.append((name, _described(hint, described.get(name), tool_name)))
        else:
            fields.append((name, _described(hint, described.get(name), tool_name), _default(parameter.default)))
    if len(contexts) > 1:
        raise InputError(f"tool {tool_name!r}: only one parameter can be a {context.__name__}, got {contexts}")
    try:
        struct = msgspec.defstruct(f"{tool_name}__arguments", fields, kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise InputError(f"tool {tool_name!r}: {error}") from error
    return (contexts[0] if contexts else None), struct


def _read(function: Callable[..., Any], tool_name: str) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    """Return the type hints and parameters of a function, a method, a partial or a callable object."""
    try:
        hints = _hints(inner(function))
        parameters = dict(inspect.signature(function).parameters)
    except (AttributeError, NameError, TypeError, ValueError) as error:
        raise InputError(
            f"tool {tool_name!r}: its type hints cannot be read ({error}); define them at module level"
        ) from error
    first = next(iter(parameters), None)
    if first in ("self", "cls") and first not in hints:
        raise InputError(f"tool {tool_name!r} is an unbound method; pass the bound one: tool(thing.method)")
    return hints, parameters


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a partial finally calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _hints(function: Any) -> dict[str, Any]:
    if isinstance(function, type):
        return get_type_hints(function, include_extras=True)
    if not inspect.isroutine(function):
        function = type(function).__call__

    def stand_in() -> None: ...

    # Without the hint of the result: it may be a name that only a type checker knows, and it is not needed.
    stand_in.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(stand_in, getattr(inspect.unwrap(function), "__globals__", None), include_extras=True)


def _default(value: Any) -> Any:
    """Return a default for the struct: in the schema if it is a plain value, otherwise the object itself."""
    return value if isinstance(value, str | int | float | None) else field(default_factory=lambda: value)


def _described(hint: Any, description: str | None, tool_name: str) -> Any:
    """Return the hint with its description for the schema; `Annotated[str, "..."]` wins over the docstring."""
    base, metas = hint, []
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        texts = [text for note in notes if (text := _text(note))]
        description = texts[0] if texts else description
        metas = [meta for note in notes for meta in _metas(note, tool_name)]
    if description:
        metas.append(msgspec.Meta(description=description))
    return Annotated[(base, *metas)] if metas else base


def _text(note: Any) -> str | None:
    text = note if isinstance(note, str) else getattr(note, "description", None)
    return text if isinstance(text, str) else None


def _metas(note: Any, tool_name: str) -> Iterator[msgspec.Meta]:
    if isinstance(note, msgspec.Meta):
        yield note
        return
    found = getattr(note, "metadata", None)  # of a pydantic Field
    for item in found if isinstance(found, Sequence) and not isinstance(found, str) else [note]:
        limits = {name: value for name in _CONSTRAINTS if (value := getattr(item, name, None)) is not None}
        try:
            if limits:
                yield msgspec.Meta(**limits)
        except TypeError as error:
            raise InputError(f"tool {tool_name!r}: {item!r} cannot be used ({error}); try msgspec.Meta") from error


def schema_of(arguments: type[Struct], tool_name: str) -> dict[str, Any]:
    try:
        schema = describe(arguments)
    except TypeError as error:
        raise InputError(f"tool {tool_name!r}: {_culprit(arguments, error)}") from error
    schema.pop("title", None)
    return schema


def _culprit(arguments: type[Struct], error: TypeError) -> str:
    advice = (
        "use str, int, float, bool, list, dict, Literal, Enum, dataclasses, TypedDicts, msgspec Structs or pydantic "
        "models (in a union, a pydantic model stands alone or with None)"
    )
    for item in get_type_hints(arguments, include_extras=True).items():
        try:
            describe(item[1])
        except TypeError as reason:
            what = str(reason).rsplit("\n", maxsplit=1)[-1]  # the lines above it are advice for authors of schemas
            return f"the parameter {item[0]!r} cannot be described to a model ({what}); {advice}"
    return f"its parameters cannot be described to a model ({error}); {advice}"


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of the tool and of each parameter, from a Google, NumPy or Sphinx docstring."""
    if ":" not in text and "---" not in text:
        return text.strip(), {}
    import docstring_parser  # noqa: PLC0415 - only who has something to parse pays for it

    parsed = docstring_parser.parse(text)
    described = {item.arg_name.lstrip("*"): " ".join((item.description or "").split()) for item in parsed.params}
    return (parsed.description or "").strip(), {name: text for name, text in described.items() if text}
