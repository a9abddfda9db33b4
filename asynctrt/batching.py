"""``@asynctrt.batch``: a function over many items becomes an awaitable that takes one.

Each decorated function has an engine per event loop. The engine's rows are tickets for items that wait in a
dictionary, so an item can be anything, and its result waits with it. Cancelling a call drops its item, even
if its ticket is in a batch by then.
"""

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
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

from asynctrt.backends.function import FunctionModel, is_coroutine_function, refuse_generators
from asynctrt.engine import Engine
from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    EngineClosedError,
    ExecutionError,
    OptionsError,
    UsageError,
)
from asynctrt.loops import running_loop
from asynctrt.opening import open as open_engine
from asynctrt.options import Options
from asynctrt.statistics import Statistics
from asynctrt.synonyms import SYNONYMS
from asynctrt.tensors import Array, TensorSpec
from asynctrt.validation import check_names, show

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

GROUPS_MAX: Final = 64
"""Different shapes and dtypes of items that wait in queues of their own; further ones share a queue."""

SHARED_NBYTES_MAX: Final = 128 * 1024
"""Up to this size the results of a batch are copied as one block, of which each caller gets a view."""

INT64: Final = np.iinfo(np.int64)
NUMBERS: Final[dict[type, type]] = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


class BatchSettings(TypedDict, total=False):
    """The options of :func:`batch`; see :class:`asynctrt.Options`."""

    max_rows: int | None
    max_delay: float
    max_queue_rows: int
    timeout: float | None
    contexts: int | None
    batch_timeout: float | None
    close_timeout: float
    isolate_failures: bool


class Decorator(Protocol):
    """What :func:`batch` returns for arrays."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> "Batched[P, R]": ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> "Batched[P, R]": ...


class ItemsDecorator(Protocol):
    """What :func:`batch` returns with ``items=True``."""

    @overload
    def __call__(self, function: Callable[[list[T]], Awaitable[list[R]]], /) -> "Batched[[T], R]": ...
    @overload
    def __call__(self, function: Callable[[list[T]], list[R]], /) -> "Batched[[T], R]": ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Awaitable[list[R]]], /) -> "Batched[[S, T], R]": ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], list[R]], /) -> "Batched[[S, T], R]": ...


@overload
def batch(function: Callable[P, Awaitable[R]], /) -> "Batched[P, R]": ...
@overload
def batch(function: Callable[P, R], /) -> "Batched[P, R]": ...
@overload
def batch(*, items: Literal[True], **settings: Unpack[BatchSettings]) -> ItemsDecorator: ...
@overload
def batch(*, items: Literal[False] = False, **settings: Unpack[BatchSettings]) -> Decorator: ...


def batch(
    function: Callable[..., Any] | None = None,
    /,
    *,
    items: bool = False,
    **settings: Unpack[BatchSettings],
) -> Any:
    """Turn a function over many items into an awaitable that takes one: ``@asynctrt.batch``.

    Calls that come while a batch runs form the next batch; a call that finds the function idle starts it at
    once. ::

        @asynctrt.batch(max_rows=32)
        def double(x):  # x: the items of up to 32 callers, stacked
            return 2 * x


        await double(21.0)

    The function may be a plain one, which runs in a thread or, if it is short, on the event loop; or a
    coroutine function, which runs on the event loop; or a method, and then each instance has an engine of its
    own. It is called with the arguments of its callers, each gathered over the batch:

    - Arrays, NumPy's scalars and Python's bool, int (of 64 bits), float and complex are stacked to one array
      ``(rows, *shape)``. Arrays of other libraries are converted to NumPy's. Items of different shapes,
      dtypes or numbers of arguments form batches of their own.
    - Anything else, strings and lists among them, comes as a list with one element per item.
    - With ``items=True`` every argument comes as a list.

    It returns one result per item, in order: an array whose first axis counts items, a list, or a tuple or
    mapping of these, of which each caller gets a tuple or dict of its own. A list may hold exceptions: each
    is raised to the caller of its item. What the function raises fails all callers of this batch with
    :class:`ExecutionError`, as does a wrong number of results.

    The engine belongs to the event loop of the first call, and is closed with that loop (by
    ``asyncio.run``, a ``Runner``, pytest's plugins); on another loop the function has another engine.

    :param items: whether the function takes lists of items, whatever they are.
    :param settings: ``max_rows`` (items of the largest batch, 64 by default), ``max_delay`` (seconds that a
        batch which is not full may wait for more while another one runs, 0 by default), ``max_queue_rows``,
        ``timeout``, ``batch_timeout``, ``close_timeout``: see :class:`asynctrt.Options`. ``contexts`` is how
        many batches run at once; 1 by default, so that the function need not be safe to call from several
        threads. ``isolate_failures`` calls the function again with halves of a batch that raised; it is off
        by default, as a function may have effects that must not happen twice.
    :returns: a :class:`Batched`, or with options a decorator that makes one.
    :raises OptionsError: for an unknown option, or a value that is not valid.
    :raises ModelError: for a generator function.
    """
    check_names(settings, list(BatchSettings.__annotations__), "option", synonyms=SYNONYMS)
    options = Options.from_settings(None, {"contexts": 1, "isolate_failures": False, **settings})

    def decorate(decorated: Callable[..., Any]) -> Batched[Any, Any]:
        if not callable(decorated):
            raise OptionsError(
                f"{show(decorated)} is not a function, which asynctrt.batch decorates. Options are keywords: "
                "@asynctrt.batch(max_rows=32)"
            )
        refuse_generators(decorated)
        return Batched(decorated, options, items=items)

    return decorate if function is None else decorate(function)


class Batched(Generic[P, R]):
    """A function that :func:`batch` decorated: ``await function(item)``. ``__wrapped__`` is the function."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], options: Options, *, items: bool) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self._options = options
        self._items = items
        self._waits = is_coroutine_function(function)
        self._engines = Engines(function, options, self.__name__, items=items, waits=self._waits)
        self._instance: object = None
        # For methods, by the id of their instance, which need be neither hashable nor unequal to others.
        self._bound: dict[int, tuple[weakref.ref[Any], Engines]] = {}

    def __repr__(self) -> str:
        return f"<asynctrt.batch {self.__name__!r} max_rows={self._options.max_rows or 'default'}>"

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self: "Batched[Concatenate[S, Q], R]", instance: S, owner: type[Any]) -> "Batched[Q, R]": ...
    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        found = self._bound.get(id(instance))
        if found is None:
            found = self._bind(instance)
        bound: Batched[Any, R] = object.__new__(type(self))
        # It holds the instance, so that a call does too; its engines hold it weakly.
        bound.__dict__.update(self.__dict__, _engines=found[1], _instance=instance)
        return bound

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute one item, in a batch with those of other callers.

        :raises QueueFullError, DeadlineError: under overload.
        :raises ExecutionError: when the function failed, with what it raised as ``__cause__``.
        """
        engine = self._engines.last
        if engine is None or engine.loop is not running_loop():
            engine = await self._engines.open()
        try:
            return cast("R", await engine.compute(args, kwargs))
        except (DeviceLostError, EngineClosedError):
            self._engines.discard(engine)
            raise

    async def __aenter__(self) -> Self:
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
        found = self._engines.find(running_loop())
        if found is None:
            raise UsageError(
                f"{self.__name__!r} has no engine on this event loop yet: call it, or enter it "
                f"(async with {self.__name__}:)"
            )
        return found.engine

    def statistics(self) -> Statistics:
        """Return a snapshot of what the engine on the running event loop has done; a row is an item.

        :raises UsageError: before the first call on this loop.
        """
        return self.engine.statistics()

    async def aclose(self) -> None:
        """Close the engine on the running event loop, if there is one. A later call opens another."""
        await self._engines.aclose()

    def _bind(self, instance: Any) -> "tuple[weakref.ref[Any], Engines]":
        key, bound = id(instance), self._bound
        try:
            reference = weakref.ref(instance, lambda _: bound.pop(key, None))
        except TypeError:
            raise UsageError(
                f"{type(instance).__name__!r} has a method that asynctrt.batch decorates, and its instances "
                "cannot be referenced weakly. Add '__weakref__' to its __slots__"
            ) from None
        method = WeakMethod(reference, self.__wrapped__)
        name = f"{type(instance).__name__}.{self.__name__}"
        found = reference, Engines(method, self._options, name, items=self._items, waits=self._waits)
        return self._bound.setdefault(key, found)


class WeakMethod:
    """A method whose instance is held by its callers alone."""

    def __init__(self, instance: "weakref.ref[Any]", function: Callable[..., Any]) -> None:
        self._instance = instance
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._instance(), *args, **kwargs)


class Engines:
    """The engines of one function, by event loop.

    :param items: whether the function takes lists, whatever the items are.
    :param waits: whether it is a coroutine function.
    """

    def __init__(
        self, function: Callable[..., Any], options: Options, name: str, *, items: bool, waits: bool
    ) -> None:
        self._function = function
        self._waits = waits
        self._options = options
        self._name = name
        self._items = items
        self._by_loop: dict[asyncio.AbstractEventLoop, TicketEngine] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[TicketEngine]] = {}
        # Guards what calls on loops in several threads may change at once.
        self._lock = threading.Lock()
        self.last: TicketEngine | None = None
        """The engine that was opened last: a shortcut for the only one that most programs have."""

    def find(self, loop: asyncio.AbstractEventLoop) -> "TicketEngine | None":
        """Return the engine on `loop`, if there is one."""
        return self._by_loop.get(loop)

    def discard(self, engine: "TicketEngine") -> None:
        """Let the next call open another engine, if this one takes no more."""
        if engine.engine.state != "open":
            self._forget(engine)

    async def open(self) -> "TicketEngine":
        """Return the engine on the running loop. The first call opens it, and others wait for that."""
        loop = running_loop()
        found = self.find(loop)
        if found is None:
            task = self._opening.get(loop)
            if task is None:
                task = self._opening[loop] = loop.create_task(self._open(loop))
            # Whoever is cancelled does not stop it, because others wait for it too.
            self.last = found = await asyncio.shield(task)
        return found

    async def aclose(self) -> None:
        """Close the engine on the running loop, if there is one."""
        loop = running_loop()
        opening = self._opening.get(loop)
        if opening is not None:
            with suppress(AsynctrtError):
                await asyncio.shield(opening)
        found = self._by_loop.get(loop)
        if found is not None:
            self._forget(found)
            await found.aclose()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> "TicketEngine":
        try:
            tickets = Tickets(self._function, items=self._items)
            model = FunctionModel(tickets, inputs=TICKET, outputs=DONE, name=self._name)
            model.occupies_device = not self._waits
            engine = await open_engine(model, options=self._options)
            opened = TicketEngine(loop, engine, tickets)
            await opened.attach(weakref.WeakMethod(self._forget))
            with self._lock:
                for closed in [one for one in self._by_loop if one.is_closed()]:
                    del self._by_loop[closed]
                self._by_loop[loop] = opened
            return opened
        finally:
            self._opening.pop(loop, None)

    def _forget(self, engine: "TicketEngine") -> None:
        with self._lock:
            if self._by_loop.get(engine.loop) is engine:
                del self._by_loop[engine.loop]
            if self.last is engine:
                self.last = None


class Item:
    """The arguments of one call, and then its result.

    :param group: the number of the calls that it can be stacked with.
    """

    __slots__ = ("args", "group", "kwargs", "result")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], group: int) -> None:
        self.args = args
        self.kwargs = kwargs
        self.group = group
        self.result: Any = None


TICKET: Final = TensorSpec("ticket", np.dtype(np.int64), ("group",))
"""A row is the ticket of an item, repeated, as often as the number of its group says: each has a bucket."""

DONE: Final = TensorSpec("done", np.dtype(np.uint8))


class Tickets:
    """The items that wait for a function, and the function as the engine calls it.

    :param function: called with the items of one group.
    :param items: whether it takes lists, whatever the items are.
    """

    def __init__(self, function: Callable[..., Any], *, items: bool) -> None:
        self._function = function
        self.items = items
        self.waiting: dict[int, Item] = {}

    def __call__(self, inputs: dict[str, Array]) -> Any:
        """Compute the items of one batch; may return an awaitable."""
        tickets = inputs["ticket"]
        done = np.ones(len(tickets), np.uint8)
        groups = self._groups(tickets[:, 0].tolist())
        for index, group in enumerate(groups):
            given = self._compute(group)
            if isinstance(given, Awaitable):
                return self._await(given, groups[index:], done)
            distribute(given, group)
        return done

    async def _await(self, given: Any, groups: list[list[Item]], done: Array) -> Array:
        distribute(await given, groups[0])
        for group in groups[1:]:
            given = self._compute(group)
            distribute(await given if isinstance(given, Awaitable) else given, group)
        return done

    def _groups(self, tickets: list[int]) -> list[list[Item]]:
        """Return the items of a batch, less those whose callers went away. Nearly always there is one group.

        Their callers let go of them: a batch that fails may come again in halves.
        """
        get = self.waiting.get
        items = [item for ticket in tickets if (item := get(ticket)) is not None]
        numbers = {item.group for item in items}
        if len(numbers) <= 1:
            return [items] if items else []
        return [[item for item in items if item.group == number] for number in numbers]

    def _compute(self, group: list[Item]) -> Any:
        first = group[0]
        stack = list if self.items else stacked
        args = [stack([item.args[index] for item in group]) for index in range(len(first.args))]
        kwargs = {name: stack([item.kwargs[name] for item in group]) for name in first.kwargs}
        return self._function(*args, **kwargs)


class TicketEngine:
    """An engine whose rows are tickets, on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine, tickets: Tickets) -> None:
        self.loop = loop
        self.engine = engine
        self._infer = engine.infer
        self._items = tickets.items
        self._waiting = tickets.waiting
        self._tickets = numbered()
        self._groups: dict[Hashable, int] = {}
        self._groups_seen = 0
        self._keeper: AsyncGenerator[None, None] | None = None

    async def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue one item and return its result."""
        if self._items:
            group: Hashable = (len(args), *kwargs)
        else:
            # Arrays of other libraries become NumPy's here, once, for the group and for the batch.
            args, kwargs, group = grouped(args, kwargs)
        number = self._groups.get(group)
        if number is None:
            number = self._number(group)
        ticket, row = next(self._tickets)
        if number:
            row = np.full((1, number % GROUPS_MAX + 1), ticket)
        item = self._waiting[ticket] = Item(args, kwargs, number)
        try:
            await self._infer(row)
        finally:
            self._waiting.pop(ticket, None)
        result = item.result
        if isinstance(result, Exception):
            raise result
        return result

    async def attach(self, forget: "weakref.WeakMethod[Callable[[TicketEngine], None]]") -> None:
        """Have the engine closed together with its loop, or when nothing refers to this object any more."""
        self._keeper = keep_open(self.engine, weakref.ref(self), forget)
        await anext(self._keeper)

    async def aclose(self) -> None:
        """Close the engine."""
        if self._keeper is not None:
            await self._keeper.aclose()

    def _number(self, group: Hashable) -> int:
        """Number a group that was not seen lately."""
        if len(self._groups) >= 16 * GROUPS_MAX:
            self._groups.clear()
        number = self._groups[group] = self._groups_seen
        self._groups_seen += 1
        return number


async def keep_open(
    engine: Engine,
    owner: "weakref.ref[TicketEngine]",
    forget: "weakref.WeakMethod[Callable[[TicketEngine], None]]",
) -> AsyncGenerator[None, None]:
    """Close an engine when its loop ends, or when nothing refers to this generator any more.

    A runner shuts down the asynchronous generators of a loop before it closes the loop, and a generator that
    is garbage is closed on the loop that it was begun on.
    """
    try:
        yield
    finally:
        closing, let_go = owner(), forget()
        if closing is not None and let_go is not None:
            let_go(closing)
        await engine.aclose()


def numbered() -> Iterator[tuple[int, Array]]:
    """Count up, each number also as an array ``(1, 1)``. Arrays cost less when they are views of a block."""
    start, size = 0, 256
    while True:
        block = np.arange(start, start + size, dtype=np.int64).reshape(size, 1, 1)
        yield from enumerate(block, start)
        start += size


def grouped(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Hashable]:
    """Return the arguments of a call, arrays as NumPy's, and which calls they can share a batch with."""
    group: list[Hashable] = []
    taken = []
    for value in args:
        array, kind = kind_of(value)
        taken.append(array)
        group.append(kind)
    for name, value in kwargs.items():
        kwargs[name], kind = kind_of(value)
        group += (name, kind)
    return tuple(taken), kwargs, tuple(group)


def kind_of(value: Any) -> tuple[Any, Any]:
    """Return a value, as an array if it is one of any library, and what it can be stacked with."""
    kind = type(value)
    if kind is np.ndarray:
        return value, (value.shape, value.dtype)
    if kind in NUMBERS:
        return value, (None if kind is int and not INT64.min <= value <= INT64.max else kind)
    if isinstance(value, str | bytes) or not hasattr(value, "__array__"):
        return value, None
    array = np.asarray(value)
    return array, (array.shape, array.dtype)


def stacked(values: list[Any]) -> Any:
    """Return values of one kind as an array, or the list if they do not stack."""
    first = values[0]
    if isinstance(first, np.ndarray):
        if not first.ndim or not first.shape[0]:
            return np.array(values)
        return np.concatenate(values).reshape(len(values), *first.shape)
    if type(first) not in NUMBERS or kind_of(first)[1] is None:
        return values
    return np.array(values, NUMBERS[type(first)])


def distribute(given: object, group: list[Item]) -> None:
    """Give each item of a batch its result.

    :raises ExecutionError: when there is not one result per item.
    """
    for item, result in zip(group, results_of(given, len(group)), strict=True):
        item.result = result


def results_of(given: object, count: int) -> list[Any]:
    """Return what a function returned as one result per item. Arrays are copied: they may be used again.

    :raises ExecutionError: when it is made up of anything but arrays and lists with one result per item.
    """
    if isinstance(given, list):
        check_count(given, count)
        return given
    if isinstance(given, tuple) and given:
        make = getattr(type(given), "_make", tuple)  # A named tuple stays one.
        return [make(parts) for parts in zip(*[results_of(part, count) for part in given], strict=True)]
    if isinstance(given, Mapping):
        parts = {name: results_of(part, count) for name, part in given.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(count)]
    if hasattr(given, "__array__") and not isinstance(given, np.generic):
        array = np.asarray(given)
        if array.ndim:
            check_count(array, count)
            return list(array.copy()) if array.nbytes <= SHARED_NBYTES_MAX else [row.copy() for row in array]
    raise ExecutionError(
        f"the function returned a {type(given).__name__} for {count} items. Return a list with one result "
        "per item, an array whose first axis counts items, or a tuple or mapping of these"
    )


def check_count(results: Sequence[Any] | Array, count: int) -> None:
    """Check that there is one result per item.

    :raises ExecutionError: if there are more or fewer.
    """
    if len(results) != count:
        raise ExecutionError(
            f"the function returned {len(results)} results for {count} items. Return one per item, in order"
        )
