"""One function, two surfaces: what is written once for coroutines also serves code that has no event loop.

An operation is `async def operation(store, ...)`, and awaits nothing but `store.read`, `store.write`, `store.aside`,
`store.compute`, `store.sleep`, `store.until` and other operations. With a real store those wait in the running loop.
With `Blocking` they are settled when they are awaited, so that the coroutine runs from its beginning to its end in one
step: no event loop is started, and none that is running is in the way.

    class AgentStorage:
        get_user = blocking(accounts.get_user)       # storage.get_user("ann")

    class Checkpointer:
        get_user = awaited(accounts.get_user)        # await cp.get_user("ann")
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from byssus.store.bell import Bell
from byssus.store.computing import IsDropped
from byssus.store.database import Store, Tx

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Q = ParamSpec("Q")  # of static methods: a checker would not find those of the class there
R = TypeVar("R")


class Runner(Protocol):
    """What an operation may ask of a store."""

    @property
    def name(self) -> str: ...

    @property
    def base(self) -> Store:
        """The store itself, for what blocks and runs aside."""

    def read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...

    def write(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...

    def aside(self, call: Callable[[], T]) -> Awaitable[T]: ...

    def compute(self, call: Callable[[IsDropped], T]) -> Awaitable[T]: ...

    def sleep(self, seconds: float) -> Awaitable[None]: ...

    def until(self, bell: Bell) -> Awaitable[None]: ...


class Blocking:
    """A store whose answers are there when they are awaited."""

    def __init__(self, store: Store) -> None:
        self.base = store
        self.name = store.name

    async def read(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.base.read_now(query, *args, **kwargs)

    async def write(self, query: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.base.write_now(query, *args, **kwargs)

    async def aside(self, call: Callable[[], T]) -> T:
        return call()

    async def compute(self, call: Callable[[IsDropped], T]) -> T:
        return call(lambda: False)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop: see above

    async def until(self, bell: Bell) -> None:
        bell.wait_now()


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


class _Method:
    """A function of a store as a method of a surface. What help() shows of it is worked out when it is first used."""

    _find: Callable[[], Callable[..., Any]]
    _made: Any = None
    _name = _owner = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner.__qualname__, name

    def _bound(self, owner: HasStore | None) -> Any:
        if self._made is None:
            function = self._find()
            self._made = _described(self._make(function), function, self._name, self._owner)
        return self._made if owner is None else MethodType(self._made, owner)

    def _make(self, function: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class blocking(_Method, Generic[P, T]):  # noqa: N801 - it stands where a function stands
    """An operation as a method that returns when it is done."""

    def __init__(self, operation: Callable[Concatenate[Runner, P], Coroutine[Any, Any, T]]) -> None:
        self._find = lambda: operation

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., T]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, T]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., T]:
        return self._bound(owner)  # type: ignore[no-any-return]

    def _make(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> T:
            return to_the_end(function(Blocking(owner.store), *args, **kwargs))  # type: ignore[no-any-return]

        return method


class iterated(_Method, Generic[P, T]):  # noqa: N801
    """An async iterator as a method that returns a plain iterator."""

    def __init__(self, function: Callable[Concatenate[Runner, P], AsyncIterator[T]]) -> None:
        self._find = lambda: function

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., Iterator[T]]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, Iterator[T]]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., Iterator[T]]:
        return self._bound(owner)  # type: ignore[no-any-return]

    def _make(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> Iterator[T]:
            return _iterate(function(Blocking(owner.store), *args, **kwargs))

        return method


def _iterate(items: AsyncGenerator[T, None]) -> Iterator[T]:
    try:
        while True:
            try:
                item: T = to_the_end(items.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        to_the_end(items.aclose())


class awaited(_Method, Generic[P, T]):  # noqa: N801
    """An operation as a method that is awaited."""

    def __init__(self, operation: Callable[Concatenate[Runner, P], Coroutine[Any, Any, T]]) -> None:
        self._find = lambda: operation

    @staticmethod
    def late(find: Callable[[], Callable[Concatenate[Runner, Q], Coroutine[Any, Any, R]]]) -> awaited[Q, R]:
        """An operation of a module that is imported with its first use: `awaited.late(lambda: search.search)`."""
        made: awaited[Q, R] = awaited.__new__(awaited)
        made._find = find
        return made

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., Coroutine[Any, Any, T]]:
        return self._bound(owner)  # type: ignore[no-any-return]

    def _make(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> T:
            return await function(owner.store, *args, **kwargs)  # type: ignore[no-any-return]

        return method


class direct(_Method, Generic[P, T]):  # noqa: N801
    """A function of a store as a method that returns what it returns: a receipt, or an async iterator."""

    def __init__(self, function: Callable[Concatenate[Store, P], T]) -> None:
        self._find = lambda: function

    @staticmethod
    def late(find: Callable[[], Callable[Concatenate[Store, Q], R]]) -> direct[Q, R]:
        """A function of a module that is imported with its first use."""
        made: direct[Q, R] = direct.__new__(direct)
        made._find = find
        return made

    @overload
    def __get__(self, owner: None, kind: type, /) -> Callable[..., T]: ...
    @overload
    def __get__(self, owner: HasStore, kind: type, /) -> Callable[P, T]: ...
    def __get__(self, owner: HasStore | None, kind: type, /) -> Callable[..., T]:
        return self._bound(owner)  # type: ignore[no-any-return]

    def _make(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def method(owner: HasStore, /, *args: Any, **kwargs: Any) -> Any:
            return function(owner.store, *args, **kwargs)

        return method


def _described(method: Any, operation: Callable[..., Any], name: str, owner: str) -> Any:
    """Let help(), editors and "was never awaited" show the operation as a method, without its store."""
    method.__doc__, method.__name__ = operation.__doc__, name or operation.__name__
    method.__qualname__ = f"{owner}.{method.__name__}"
    known = inspect.signature(operation)
    first, *others = known.parameters.values()
    method.__signature__ = known.replace(parameters=[inspect.Parameter("self", first.kind), *others])
    method.__wrapped__ = operation  # its module is where the names of the types are looked up
    method.__annotations__ = {name: kind for name, kind in operation.__annotations__.items() if name != first.name}
    return method
