"""``@asynctrt.batch``: turn a function over many items into an awaitable that takes one item.

Each decorated function has one engine per event loop. The engine's rows are tickets; the items themselves
wait in a dictionary, together with their results, so an item can be any object. Cancelling a call drops its
item, even if its ticket is already in a batch.
"""

import asyncio
import functools
import inspect
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from types import AsyncGeneratorType, MethodType, TracebackType
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import numpy as np

from asynctrt._util.forks import Origin, in_child
from asynctrt._util.loops import result_of, running_loop
from asynctrt._util.synonyms import SYNONYMS
from asynctrt._util.validation import check_names
from asynctrt.backends.function import (
    BATCH_SIZES,
    RUN_ON,
    FunctionModel,
    FunctionRunsOn,
    is_coroutine_function,
    refuse_generators,
)
from asynctrt.core.items import DONE, TICKET, Groups, Item, Key, Tickets, key_of
from asynctrt.engine import Engine
from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    EngineClosedError,
    OptionsError,
    UsageError,
    copy_of,
    show,
)
from asynctrt.opening import NotOpenError
from asynctrt.opening import open as open_engine
from asynctrt.options import Options
from asynctrt.statistics import Statistics
from asynctrt.tensors import Array

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

Results = list[R] | Awaitable[list[R]]
"""What a function over lists returns, or a coroutine function."""

Keeper = AsyncGeneratorType[None, None]
"""What :func:`keep_open` returns."""

Names = str | tuple[str, ...] | list[str]
"""The name or names of the parameters that form a key."""


class BatchSettings(TypedDict, total=False):
    """The options of :func:`batch`; see :class:`asynctrt.Options`."""

    max_rows: int | None
    batch_sizes: Sequence[int] | None
    max_delay: float
    max_queue_rows: int
    timeout: float | None
    contexts: int | None
    batch_timeout: float | None
    close_timeout: float
    idempotent: bool


class Decoration(NamedTuple):
    """What a function was decorated with."""

    options: Options
    key: object
    items: bool
    run_on: FunctionRunsOn
    batch_sizes: tuple[int, ...]


class Decorator(Protocol):
    """What :func:`batch` returns for arrays."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> "Batched[P, R]": ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> "Batched[P, R]": ...


class ItemsDecorator(Protocol):
    """What :func:`batch` returns with ``items=True``."""

    @overload
    def __call__(self, function: Callable[[list[T]], Results[R]], /) -> "Batched[[T], R]": ...
    @overload
    def __call__(self, function: Callable[[list[T], list[U]], Results[R]], /) -> "Batched[[T, U], R]": ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Results[R]], /) -> "Batched[[S, T], R]": ...
    @overload
    def __call__(
        self, function: Callable[[S, list[T], list[U]], Results[R]], /
    ) -> "Batched[[S, T, U], R]": ...


class KeyedItemsDecorator(Protocol):
    """What :func:`batch` returns with ``items=True`` and a key, whose parameters are not lists."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[list[T], Q], Results[R]], /
    ) -> "Batched[Concatenate[T, Q], R]": ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[T], Q], Results[R]], /
    ) -> "Batched[Concatenate[S, T, Q], R]": ...


@overload
def batch(function: Callable[P, Awaitable[R]], /) -> "Batched[P, R]": ...
@overload
def batch(function: Callable[P, R], /) -> "Batched[P, R]": ...
@overload
def batch(
    *,
    items: Literal[True],
    key: Names,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> KeyedItemsDecorator: ...
@overload
def batch(
    *,
    items: Literal[True],
    key: None = None,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> ItemsDecorator: ...
@overload
def batch(
    *,
    items: Literal[False] = False,
    key: Names | None = None,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> Decorator: ...


def batch(
    function: Callable[..., Any] | None = None,
    /,
    *,
    items: bool = False,
    key: Names | None = None,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> Any:
    """Turn a function over many items into an awaitable that takes one item: ``@asynctrt.batch``.

    Calls that arrive while a batch runs form the next batch. A call that arrives while the function is idle
    starts a batch at once. ::

        @asynctrt.batch(max_rows=32)
        def double(x):  # x: the items of up to 32 callers, stacked
            return 2 * x


        await double(21.0)

    The function may be:

    - a plain function, which runs in a thread: always the same one, unless there are several ``contexts``;
    - a coroutine function, which runs on the event loop and is cancelled once every caller of its batch has
      been cancelled;
    - a method: each instance, or each class for a class method, then has its own engine.

    It is called with its callers' arguments, each gathered over the batch:

    - Arrays, NumPy scalars and Python's bool, int (64 bits), float and complex are stacked into one array
      ``(rows, *shape)``. Arrays of other libraries are converted to NumPy arrays; masked values are refused.
      Items that differ in shape, dtype or number of arguments go into separate batches.
    - Anything else, including strings and lists, is passed as a list with one element per item.
    - With ``items=True`` every argument is passed as a list.
    - An argument that ``key`` names is passed once and unchanged, since all items of a batch share it. ::

        @asynctrt.batch(key="model_id")
        def predict(x, model_id):  # x: stacked; model_id: one string
            return models[model_id](x)

    It returns one result per item, in order: an array whose first axis counts items, a list, or a tuple or
    mapping of these. From a tuple or mapping, each caller gets its own tuple or dict. A single number or
    string of NumPy becomes a Python object: ``await double(3)`` is the ``int`` 6, which JSON accepts.
    An array of another library becomes a NumPy array if NumPy can hold it; otherwise, and with
    ``items=True``, each caller gets a copy of its row in that library, without its gradient.

    If a result in a list is an exception, a copy of it is raised to that item's caller. If it is not an
    ``Exception``, such as a ``CancelledError``, the caller gets an :class:`ExecutionError` with it as
    ``__cause__``. If the function itself raises, or returns a wrong number of results, every caller of the
    batch gets an :class:`ExecutionError`.

    With ``batch_sizes=(1, 4, 16)`` the function sees no other number of items: the last item is repeated up
    to the next size, in every list and array, and the results of the copies are dropped. ``max_rows`` is the
    largest size. The first call opens the engine, also within ``async with``, and before it is answered each
    context calls the function twice for each size with copies of its item, in the thread that runs all of
    its batches later (a coroutine function, and ``run_on="loop"``: on the event loop). So make a first call
    at startup, for libraries that prepare each size separately, and only if extra calls do no harm. Items of
    another shape or key are padded as well, but their sizes are not run beforehand.

    The engine belongs to the event loop of the first call, and is closed with that loop (by
    ``asyncio.run``, a ``Runner``, pytest's plugins). On another loop the function has another engine.

    The function must not wait for a call of itself, which would wait for the function in turn. Call
    ``__wrapped__`` there.

    :param items: whether the function takes lists of items, regardless of their type.
    :param key: the name of a parameter, such as ``"model_id"``, or several: calls share a batch only if these
        arguments are equal. A call whose key cannot be hashed fails alone, before it is queued. The number of
        keys is not limited: a key is forgotten once no call with it is waiting.
    :param run_on: ``loop`` runs a plain function on the event loop instead of in a thread, which saves a lone
        caller about 0.1 ms. The function must be quick and must not block: nothing else runs on
        the loop meanwhile, and ``batch_timeout`` cannot end it. A run that holds the loop for more than 0.1 s
        is logged.
    :param settings: ``max_rows`` (items in the largest batch, 64 by default), ``max_delay`` (seconds that a
        batch which is not full may wait for more items while another one runs, 0 by default),
        ``batch_sizes``, ``max_queue_rows``, ``timeout``, ``batch_timeout``, ``close_timeout``: see
        :class:`asynctrt.Options`. ``contexts`` is the number of batches that run at once; 1 by default, so
        that the function need not be thread-safe. ``idempotent=True`` calls the function again with each half
        of a batch that raised; it is off by default, because a function may have effects that must not happen
        twice.
    :returns: a :class:`Batched`; or, if called with options, a decorator that makes one.
    :raises OptionsError: if an option or parameter is unknown, or a value is not valid.
    :raises ModelError: for a generator function.
    """
    check_names(
        settings, ["items", "key", "run_on", *BatchSettings.__annotations__], "option", synonyms=SYNONYMS
    )
    given: dict[str, Any] = {"contexts": 1, "idempotent": False, **settings}
    sizes = BATCH_SIZES.or_none("batch_sizes", given.pop("batch_sizes", None)) or ()
    options = Options.from_settings(None, given)
    RUN_ON("run_on", run_on)
    decoration = Decoration(options, key, items, run_on, sizes)

    def decorate(decorated: Any) -> Batched[Any, Any]:
        if not callable(decorated) and not isinstance(decorated, classmethod):
            raise OptionsError(
                f"asynctrt.batch decorates a function, not {show(decorated)}. Give options as keywords: "
                "@asynctrt.batch(max_rows=32)"
            )
        refuse_generators(decorated.__func__ if isinstance(decorated, classmethod) else decorated)
        return Batched(decorated, decoration)

    return decorate if function is None else decorate(function)


class Batched(Generic[P, R]):
    """A decorated function: ``await function(item)``. ``__wrapped__`` is the original; see :func:`batch`."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], decoration: Decoration) -> None:
        # The attributes of a callable object are its changing state, and their names may clash with ours.
        updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
        functools.update_wrapper(self, function, updated=updated)
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        mark_as_coroutine_function(self)
        self._decoration = decoration
        # A class method's function takes the class, as a method's function takes the instance.
        self._function = function.__func__ if isinstance(function, classmethod) else function
        self._key = key_of(decoration.key, self._function, self.__name__)
        self._waits = is_coroutine_function(self._function)
        self._engines = self._engines_of(self._function, self._key, self.__name__)
        self._origin = origin_of(self, function, decoration)
        self._instance: object = None
        # The classes that have it as a method.
        self._owners: tuple[type, ...] = ()
        # For methods: by the instance's id, since instances may be unhashable or equal to each other.
        self._bound: dict[int, tuple[weakref.ref[Any], Engines]] = {}

    def __repr__(self) -> str:
        return f"<asynctrt.batch {self.__name__!r} max_rows={self._decoration.options.max_rows or 'default'}>"

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Pickle and copy by name, as functions do; if no name leads here, by its function, without engines.

        A pickler that pickles functions of the main module by value (``cloudpickle``) does so with its
        function too. A bound method is pickled or copied as its instance, and bound again.
        """
        if self._instance is not None:
            return getattr, (self._instance, self.__name__)
        path: str = getattr(self, "__qualname__", self.__name__)
        found = found_by_name(self.__module__, path)
        if not isinstance(found, Batched) or found._origin is not self._origin:
            return Batched, (self.__wrapped__, self._decoration)
        # Before protocol 4, an attribute is pickled together with its parent, which here is this object.
        return path if protocol < 4 else (original, (self._origin,))

    def __eq__(self, other: object) -> bool:
        """Compare as functions and bound methods do: each access to a method makes a new bound object."""
        if self._instance is None or not isinstance(other, Batched):
            return self is other
        return self._instance is other._instance and self._bound is other._bound

    def __hash__(self) -> int:
        """Hash the values that ``__eq__`` compares."""
        return hash((id(self._instance), id(self._bound)))

    def __set_name__(self, owner: type[Any], name: str) -> None:
        """Record the class that it is a method of."""
        self._owners += (owner,)

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self: "Batched[Concatenate[S, Q], R]", instance: S, owner: type[Any]) -> "Batched[Q, R]": ...
    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if self._instance is not None:
            return self
        decorated: Any = self.__wrapped__
        if isinstance(decorated, classmethod):
            instance = owner
        elif instance is None or isinstance(decorated, staticmethod):
            return self
        found = self._bound.get(id(instance))
        if found is None:
            found = self._bind(instance)
        bound: Batched[Any, R] = object.__new__(type(self))
        # The bound object holds the instance, so a call in progress does too; its engines hold it weakly.
        # `__wrapped__` is bound as well, because signatures are read from it.
        bound.__dict__.update(
            self.__dict__,
            __wrapped__=MethodType(self._function, instance),
            _engines=found[1],
            _instance=instance,
            _owners=(),
        )
        return bound

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute one item, in a batch with items of other callers.

        :raises InputError: if the call's key cannot be hashed, if an argument of the key is missing, or if an
            array of another library cannot be read as a NumPy array.
        :raises QueueFullError, DeadlineError: under overload.
        :raises ExecutionError: if the function raised; the ``__cause__`` is its exception.
        """
        engine = self._engines.last()
        if engine is None or engine.loop is not running_loop():
            if len(args) + len(kwargs) > 1 and args and self._is_method_of(args[0]):
                method: Batched[..., R] = self.__get__(args[0], type(args[0]))
                return await method(*args[1:], **kwargs)
            engine = await self._engines.open(self._engines.example_of(args, kwargs))
        try:
            return cast("R", await engine.compute(args, kwargs))
        except (DeviceLostError, EngineClosedError):
            self._engines.discard(engine)
            raise

    async def __aenter__(self) -> Self:
        if not self._decoration.batch_sizes:  # Otherwise the first call brings the item to begin with.
            await self._engines.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def engine(self) -> Engine:
        """The engine on the running event loop.

        :raises UsageError: before the first call on this loop.
        """
        try:
            loop = running_loop()
        except UsageError as error:
            raise NotOpenError(str(error)) from None
        found = self._engines.find(loop)
        if found is None:
            raise NotOpenError(
                f"{self.__name__!r} has no engine on this event loop yet: call it, or enter it "
                f"(async with {self.__name__}:)"
            )
        return found.engine

    def statistics(self) -> Statistics:
        """Return a snapshot of the statistics of the engine on the running event loop; a row is an item.

        :raises UsageError: before the first call on this loop.
        """
        return self.engine.statistics()

    async def aclose(self) -> None:
        """Close the engine on the running event loop, if there is one. A later call opens another."""
        await self._engines.aclose()

    def _is_method_of(self, first: object) -> bool:
        """Return whether the first argument of a call is the instance or class to bind the method to.

        It is if a method is called through its class. It is also for class methods since Python 3.13, where
        ``classmethod`` no longer binds the object that it wraps.
        """
        return isinstance(first, self._owners) or (
            isinstance(first, type)
            and any(
                isinstance(found := vars(kind).get(self.__name__), classmethod) and found.__func__ is self
                for kind in first.__mro__
            )
        )

    def _bind(self, instance: Any) -> "tuple[weakref.ref[Any], Engines]":
        key, bound = id(instance), self._bound
        try:
            reference = weakref.ref(instance, lambda _: bound.pop(key, None))
        except TypeError:
            raise UsageError(
                f"{type(instance).__name__!r} has a method that asynctrt.batch decorates, and its instances "
                "cannot be referenced weakly. Add '__weakref__' to its __slots__; for a dataclass, give "
                "weakref_slot=True"
            ) from None
        function = self._function

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(reference(), *args, **kwargs)

        owner = instance if isinstance(instance, type) else type(instance)
        name, method_key = f"{owner.__name__}.{self.__name__}", self._key.bound()
        found = reference, self._engines_of(method, method_key, name)
        return self._bound.setdefault(key, found)

    def _engines_of(self, function: Callable[..., Any], key: Key, name: str) -> "Engines":
        return Engines(function, self._decoration, key, name, waits=self._waits)


def origin_of(
    batched: Batched[Any, Any], function: Callable[..., Any], decoration: Decoration
) -> Callable[[], tuple[Any, ...]]:
    """Return a function that pickles as the application's function does: by name, or else by value.

    :returns: a function that returns ``function`` and ``decoration``; its qualified name leads to the
        attribute ``_origin``.
    """

    def origin() -> tuple[Any, ...]:
        return function, decoration

    origin.__module__, origin.__name__ = batched.__module__, "_origin"
    origin.__qualname__ = f"{getattr(batched, '__qualname__', batched.__name__)}._origin"
    return origin


def original(origin: Callable[[], tuple[Any, ...]]) -> Any:
    """Return the pickled object: the one found by name if it has this origin, otherwise a new one."""
    found = found_by_name(origin.__module__, origin.__qualname__.removesuffix("._origin"))
    if isinstance(found, Batched) and found._origin is origin:
        return found
    return Batched(*origin())


def found_by_name(module: str, path: str) -> Any:
    """Return the object at a dotted path in a module, or ``None``."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def mark_as_coroutine_function(batched: Batched[Any, Any]) -> None:
    """Mark an object so that ``inspect`` and ``asyncio`` treat it as a coroutine function."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(batched)
    else:
        # ``inspect`` accepts any callable with these attributes as a function, such as one made by Cython.
        batched.__dict__.update(
            __code__=Batched.__call__.__code__,
            __defaults__=None,
            __kwdefaults__=None,
            _is_coroutine=vars(asyncio.coroutines)["_is_coroutine"],
        )


class Engines:
    """The engines of one function, by event loop.

    :param key: the part of a call that must be equal for calls to share a batch.
    :param waits: whether it is a coroutine function.
    """

    def __init__(
        self, function: Callable[..., Any], decoration: Decoration, key: Key, name: str, *, waits: bool
    ) -> None:
        self._function = function
        self._decoration = decoration
        self._waits = waits
        self._key = key
        self._name = name
        self._items = decoration.items
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[TicketEngine]] = {}
        self._closing: dict[asyncio.AbstractEventLoop, Engine] = {}
        in_child(self, Engines._let_go)
        self.last: Callable[[], TicketEngine | None] = lambda: None
        """Returns the engine that was opened last: a shortcut, since most programs have only one."""

    def _let_go(self) -> None:
        """Forget, in a forked child, the tasks and engines that the parent was opening or closing."""
        self._opening = {}
        self._closing = {}

    def find(self, loop: asyncio.AbstractEventLoop) -> "TicketEngine | None":
        """Return the engine on `loop`, if there is one."""
        return engines_on(loop).get(self)

    def discard(self, engine: "TicketEngine") -> None:
        """Let the next call open another engine if this one no longer accepts requests."""
        if engine.engine.state != "open":
            self._forget(engine)

    def example_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        """Return the item of a call, to call the function with before the engine is open, if it needs one.

        :raises InputError: if the call's key cannot be hashed, or its arguments cannot be stacked.
        """
        if not self._decoration.batch_sizes or self.find(running_loop()) is not None:
            return None
        args, kwargs, group = Groups(self._key, items=self._items).enter(args, dict(kwargs))
        return Item(args, kwargs, group)

    async def open(self, example: Item | None = None) -> "TicketEngine":
        """Return the engine on the running loop. The first call opens it; concurrent calls wait for that."""
        loop = running_loop()
        found = self.find(loop)
        if found is None:
            task = self._opening.get(loop)
            if task is None:
                # In an empty context: all later calls would otherwise be served in this call's context.
                task = self._opening[loop] = Context().run(loop.create_task, self._open(loop, example))
                # Retrieve the exception here, because by then every waiting caller may have been cancelled.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            # A cancelled caller does not stop the opening, because others wait for it too.
            await asyncio.wait([task])
            found = result_of(task)
            self.last = weakref.ref(found)
        return found

    async def aclose(self) -> None:
        """Close the engine on the running loop, if there is one."""
        loop = running_loop()
        opening = self._opening.get(loop)
        if opening is not None:
            with suppress(AsynctrtError):
                await asyncio.shield(opening)
        found = self.find(loop)
        if found is not None:
            self._forget(found)
            self._closing[loop] = found.engine
            try:
                await found.aclose()
            finally:
                self._closing.pop(loop, None)
        elif (closing := self._closing.get(loop)) is not None:
            await closing.aclose()

    async def _open(self, loop: asyncio.AbstractEventLoop, example: Item | None) -> "TicketEngine":
        try:
            options, _, items, run_on, sizes = self._decoration
            tickets = Tickets(
                self._function, self._key, items=items, isolates=options.idempotent, sizes=sizes
            )
            model = FunctionModel(
                tickets,
                inputs=TICKET,
                outputs=DONE,
                name=self._name,
                run_on=run_on,
                batch_sizes=sizes or None,
            )
            if example is not None:
                tickets.example = example
                model.capabilities = replace(model.capabilities, shapes_beforehand=((("group", 1),),))
            if self._waits:
                model.await_results()
            engine = await open_engine(model, options=options)
            tickets.example = None
            opened = TicketEngine(loop, engine, tickets, Groups(self._key, items=self._items))
            await opened.attach(weakref.WeakMethod(self._forget))
            engines_on(loop)[self] = opened
            return opened
        finally:
            self._opening.pop(loop, None)

    def _forget(self, engine: "TicketEngine") -> None:
        engines = engines_on(engine.loop)
        if engines.get(self) is engine:
            del engines[self]
        if self.last() is engine:
            self.last = lambda: None


def engines_on(
    loop: asyncio.AbstractEventLoop,
) -> "weakref.WeakKeyDictionary[Engines, TicketEngine]":
    """Return the engines on a loop. The loop stores them, so they live as long as it and their function."""
    found: weakref.WeakKeyDictionary[Engines, TicketEngine]
    found = vars(loop).setdefault("_asynctrt_engines", weakref.WeakKeyDictionary())
    return found


class TicketEngine:
    """An engine whose rows are tickets, on one event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: Engine, tickets: Tickets, groups: Groups
    ) -> None:
        self.loop = loop
        self.engine = engine
        self._waiting = tickets.waiting
        self._tickets = numbered()
        self._groups = groups
        self._keeper: Keeper | None = None

    async def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue one item and return its result."""
        # Arrays of other libraries are converted to NumPy here, once, for both the group and the batch.
        args, kwargs, group = self._groups.enter(args, kwargs)
        ticket, row = next(self._tickets)
        if group.queue:
            row = np.full((1, group.queue + 1), ticket)
        item = self._waiting[ticket] = Item(args, kwargs, group)
        try:
            await self.engine.infer(row)
        except (asyncio.CancelledError, GeneratorExit):
            item.leave()
            raise
        finally:
            self._waiting.pop(ticket, None)
            self._groups.leave(group)
        result = item.result
        if isinstance(result, BaseException):
            raise copy_of(result)  # Other callers may get the same object, and the function may keep it.
        return result

    async def attach(self, forget: "weakref.WeakMethod[Callable[[TicketEngine], None]]") -> None:
        """Arrange for the engine to close with its loop, or once nothing refers to this object any more."""
        loop, engine, origin = self.loop, self.engine, Origin()
        keeper = cast("Keeper", keep_open(engine, origin, weakref.ref(self), forget))
        self._keeper = keeper
        await anext(keeper)
        # Stored on this object, so that the callback does not keep the engine alive any longer than it.
        self._end = weakref.ref(self, lambda _: close_soon(loop, engine, origin, keeper))

    async def aclose(self) -> None:
        """Close the engine."""
        if self._keeper is not None:
            await self._keeper.aclose()


async def keep_open(
    engine: Engine,
    origin: Origin,
    owner: "weakref.ref[TicketEngine]",
    forget: "weakref.WeakMethod[Callable[[TicketEngine], None]]",
) -> AsyncGenerator[None, None]:
    """Close an engine when its loop ends.

    A runner shuts down the asynchronous generators of a loop before it closes the loop.
    """
    try:
        yield
    finally:
        closing, let_go = owner(), forget()
        if closing is not None and let_go is not None:
            let_go(closing)
        if origin.is_here:  # A forked child may end the loop that it inherited from its parent.
            await engine.aclose()


def close_soon(loop: asyncio.AbstractEventLoop, engine: Engine, origin: Origin, keeper: Keeper) -> None:
    """Close an engine that nothing refers to any more, from any thread.

    Keep its generator alive until then, so that a loop that ends meanwhile still closes the engine. If the
    generator were garbage, asyncio would close it in a task, which an ending loop may not run.
    """
    if engine.state == "closed" or not origin.is_here:
        return

    def begin(before: "asyncio.Task[None] | None" = None) -> None:
        # An ending loop cancels every task, and a task cancelled before it starts runs none of its code.
        if before is None or before.cancelled():
            loop.create_task(close(engine, keeper)).add_done_callback(begin)

    with suppress(RuntimeError):  # A closed loop has already closed the engine, or never will.
        loop.call_soon_threadsafe(begin, context=Context())


async def close(engine: Engine, keeper: Keeper) -> None:
    """Close an engine, and then the generator that would have closed it."""
    await engine.aclose()
    if not keeper.ag_running:
        await keeper.aclose()


def numbered() -> Iterator[tuple[int, Array]]:
    """Yield 0, 1, 2, ..., each also as an array ``(1, 1)``. Views of one block are cheaper to make."""
    start, size = 0, 256
    while True:
        block = np.arange(start, start + size, dtype=np.int64).reshape(size, 1, 1)
        yield from enumerate(block, start)
        start += size
