"""One function, two surfaces: what is written once for coroutines also serves code that has no event loop.

An operation is `async def operation(store, ...)`, and awaits nothing but `store.read`, `store.write`, `store.aside`,
`store.sleep` and other operations. With a real store those are futures of the running loop. With `Blocking` they are
settled when they are awaited, so that the coroutine runs from its beginning to its end in one step: no event loop is
started, and none that is running is in the way.

    class AgentStorage:
        get_user = blocking(accounts.get_user)       # storage.get_user("ann")

    class Checkpointer:
        get_user = awaited(accounts.get_user)        # await cp.get_user("ann")
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from byssus.store.database import Store, Tx

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Runner(Protocol):
    """What an operation may ask of a store."""

    @property
    def name(self) -> str: ...

    @property
    def system(self) -> str: ...

    @property
    def base(self) -> Store:
        """The store itself, for what blocks and runs aside."""

    def read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...

    def write(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...

    def aside(self, call: Callable[[], T]) -> Awaitable[T]: ...

    def sleep(self, seconds: float) -> Awaitable[None]: ...


class Blocking:
    """A store whose answers are there when they are awaited."""

    def __init__(self, store: Store) -> None:
        self.base = store
        self.name = store.name
        self.system = store.system

    async def read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.base.read_now(query, *args, **kwargs)

    async def write(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.base.write_now(query, *args, **kwargs)

    async def aside(self, call: Callable[[], T]) -> T:
        return call()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop: see above


def to_the_end(operation: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits."""
    try:
        operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    operation.close()
    raise RuntimeError(f"{operation!r} awaits something else than its store, and cannot run without an event loop")


class HasStore(Protocol):
    @property
    def store(self) -> Store: ...


class _Operation(Generic[P, T]):
    """An operation of a surface. What it looks like to help() and editors is worked out when somebody first asks."""

    def __init__(self, operation: Callable[Concatenate[Runner, P], Coroutine[Any, Any, T]]) -> None:
        self._operation = operation
        self._method: Any = None

    def _bound(self, owner: HasStore | None) -> Any:
        if self._method is None:
            if isinstance(self._operation, _LazyModule):
                self._operation = self._operation.found()
            self._method = _described(self._made(self._operation), self._operation)
        return self._method if owner is None else functools.partial(self._method, owner)

    def _made(self, operation: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
        raise NotImplementedError


class blocking(_Operation[P, T]):  # noqa: N801 - it stands where a function stands
    """An operation as a method that returns when it is done."""

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., T]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, T]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., T]:
        return self._bound(owner)  # type: ignore[no-any-return]

    def _made(self, operation: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
        def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> T:
            return to_the_end(operation(Blocking(owner.store), *args, **kwargs))

        return method


class direct(Generic[P, T]):  # noqa: N801
    """A function of a store as a method that returns what it returns: a receipt, or an iterator."""

    def __init__(self, function: Callable[Concatenate[Store, P], T]) -> None:
        self._function: Any = function
        self._method: Any = None

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., T]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, T]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., T]:
        if self._method is None:
            function = self._function.found() if isinstance(self._function, _LazyModule) else self._function

            def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> T:
                return function(owner.store, *args, **kwargs)  # type: ignore[no-any-return]

            self._method = _described(method, function)
        return self._method if owner is None else functools.partial(self._method, owner)


class iterated(Generic[P, T]):  # noqa: N801
    """An async iterator of a store's as a method that returns a plain iterator."""

    def __init__(self, function: Callable[Concatenate[Runner, P], AsyncIterator[T]]) -> None:
        self._function: Any = function
        self._method: Any = None

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., Iterator[T]]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, Iterator[T]]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., Iterator[T]]:
        if self._method is None:
            function = self._function.found() if isinstance(self._function, _LazyModule) else self._function

            def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> Iterator[T]:
                return _iterate(function(Blocking(owner.store), *args, **kwargs))

            self._method = _described(method, function)
        return self._method if owner is None else functools.partial(self._method, owner)


def _iterate(items: AsyncIterator[T]) -> Iterator[T]:
    try:
        while True:
            try:
                item: T = to_the_end(items.__anext__())  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
            yield item
    finally:
        if isinstance(items, AsyncGenerator):
            to_the_end(items.aclose())


class awaited(_Operation[P, T]):  # noqa: N801
    """An operation as a method that is awaited."""

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., Coroutine[Any, Any, T]]:
        return self._bound(owner)  # type: ignore[no-any-return]

    def _made(self, operation: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
        async def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> T:
            return await operation(owner.store, *args, **kwargs)

        return method


def lazy_modules(*names: str) -> list[_LazyModule]:
    """Modules of byssus that most programs never need: each is imported when a function of it is first called."""
    return [_LazyModule(f"byssus.{name}") for name in names]


def preload(*modules: Any) -> None:
    """Import these now: what comes next must not fail for want of a module."""
    for module in modules:
        if isinstance(module, _LazyModule):
            importlib.import_module(module.__module__)


class _LazyModule:
    """A module that is not imported yet, or one of its functions."""

    def __init__(self, module: str, name: str = "") -> None:
        self.__module__ = module
        self.__name__ = name

    def __getattr__(self, name: str) -> _LazyModule:
        if name.startswith("__"):
            raise AttributeError(name)
        return _LazyModule(self.__module__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.found()(*args, **kwargs)

    def found(self) -> Any:
        return getattr(importlib.import_module(self.__module__), self.__name__)


def _described(method: Any, operation: Callable[..., Any]) -> Any:
    """Let help() and editors show the operation without its store."""
    method.__doc__, method.__name__ = operation.__doc__, operation.__name__
    known = inspect.signature(operation)
    first, *others = known.parameters.values()
    method.__signature__ = known.replace(parameters=[inspect.Parameter("self", first.kind), *others])
    return method
