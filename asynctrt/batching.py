"""``@asynctrt.batch``: a function over many items becomes an awaitable that takes one.

Each decorated function has an engine per event loop. The engine's rows are tickets for items that wait in a
dictionary, so an item can be anything, and its result waits with it. Cancelling a call drops its item, even
if its ticket is in a batch by then.
"""

import asyncio
import functools
import inspect
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator
from contextlib import suppress
from contextvars import Context
from types import AsyncGeneratorType, MethodType, TracebackType
from typing import (
    Any,
    Concatenate,
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

from asynctrt._util.forks import Origin, in_child
from asynctrt._util.loops import result_of, running_loop
from asynctrt._util.synonyms import SYNONYMS
from asynctrt._util.validation import check_names
from asynctrt.backends.function import (
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

Keeper = AsyncGeneratorType[None, None]
"""What :func:`keep_open` returns."""

Names = str | tuple[str, ...] | list[str]
"""The parameters that a key names."""


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
    def __call__(
        self, function: Callable[[list[T], list[U]], Awaitable[list[R]]], /
    ) -> "Batched[[T, U], R]": ...
    @overload
    def __call__(self, function: Callable[[list[T], list[U]], list[R]], /) -> "Batched[[T, U], R]": ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Awaitable[list[R]]], /) -> "Batched[[S, T], R]": ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], list[R]], /) -> "Batched[[S, T], R]": ...
    @overload
    def __call__(
        self, function: Callable[[S, list[T], list[U]], Awaitable[list[R]]], /
    ) -> "Batched[[S, T, U], R]": ...
    @overload
    def __call__(self, function: Callable[[S, list[T], list[U]], list[R]], /) -> "Batched[[S, T, U], R]": ...


class KeyedItemsDecorator(Protocol):
    """What :func:`batch` returns with ``items=True`` and a key that names parameters: these are no lists."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[list[T], Q], Awaitable[list[R]]], /
    ) -> "Batched[Concatenate[T, Q], R]": ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[T], Q], list[R]], /
    ) -> "Batched[Concatenate[T, Q], R]": ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[T], Q], Awaitable[list[R]]], /
    ) -> "Batched[Concatenate[S, T, Q], R]": ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, list[T], Q], list[R]], /
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
    key: Callable[..., Hashable] | None = None,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> ItemsDecorator: ...
@overload
def batch(
    *,
    items: Literal[False] = False,
    key: Names | Callable[..., Hashable] | None = None,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> Decorator: ...


def batch(
    function: Callable[..., Any] | None = None,
    /,
    *,
    items: bool = False,
    key: Names | Callable[..., Hashable] | None = None,
    run_on: FunctionRunsOn = "thread",
    **settings: Unpack[BatchSettings],
) -> Any:
    """Turn a function over many items into an awaitable that takes one: ``@asynctrt.batch``.

    Calls that come while a batch runs form the next batch; a call that finds the function idle starts it at
    once. ::

        @asynctrt.batch(max_rows=32)
        def double(x):  # x: the items of up to 32 callers, stacked
            return 2 * x


        await double(21.0)

    The function may be a plain one, which runs in a thread, and in the same one each time unless there are
    several ``contexts``; or a coroutine function, which runs on the event loop, and is cancelled when all
    callers of its batch were; or a method, and then each instance, or class, has an engine of its own. It is
    called with the arguments of its callers, each gathered over the
    batch:

    - Arrays, NumPy's scalars and Python's bool, int (of 64 bits), float and complex are stacked to one array
      ``(rows, *shape)``. Arrays of other libraries are converted to NumPy's, and masked values are refused.
      Items of different shapes, dtypes or numbers of arguments form batches of their own.
    - Anything else, strings and lists among them, comes as a list with one element per item.
    - With ``items=True`` every argument comes as a list.
    - An argument that ``key`` names comes as it is, once, since it is the same for all items of a batch. ::

        @asynctrt.batch(key="model_id")
        def predict(x, model_id):  # x: stacked; model_id: one string
            return models[model_id](x)

    It returns one result per item, in order: an array whose first axis counts items, a list, or a tuple or
    mapping of these, of which each caller gets a tuple or dict of its own. One number or text of an array is
    Python's own: ``await double(3)`` is the ``int`` 6, which JSON takes. Arrays of other libraries become
    NumPy's if NumPy can hold them; else, and with ``items=True``, each caller gets a copy of a row as it is,
    without its gradient. A list may hold exceptions: a
    copy of each is raised to the caller of its item; for one that is no ``Exception``, such as a
    ``CancelledError``, an :class:`ExecutionError` with it as ``__cause__``. What the function raises fails
    all callers of this batch with :class:`ExecutionError`, as does a wrong number of results.

    The engine belongs to the event loop of the first call, and is closed with that loop (by
    ``asyncio.run``, a ``Runner``, pytest's plugins); on another loop the function has another engine.

    It must not wait for itself: a call that comes from within its own run, or from a run of another function
    that it waits for, raises :class:`UsageError`.

    :param items: whether the function takes lists of items, whatever they are.
    :param key: what must be equal for calls to share a batch: the name of a parameter, such as
        ``"model_id"``, several names, or a function that is called with a call's arguments (without ``self``)
        on the event loop and returns a hashable. With a function, arguments are stacked or come as lists as
        usual. A call whose key cannot be made or hashed fails alone, before it is queued. There may be any
        number of keys: one is forgotten when no call with it waits.
    :param run_on: ``loop`` runs a plain function on the event loop instead, which saves a lone caller some
        tens of microseconds. It must be quick and must not wait: nothing else runs on the loop meanwhile, and
        ``batch_timeout`` cannot end it. A run that holds the loop for more than 0.1 s is logged.
    :param settings: ``max_rows`` (items of the largest batch, 64 by default), ``max_delay`` (seconds that a
        batch which is not full may wait for more while another one runs, 0 by default), ``max_queue_rows``,
        ``timeout``, ``batch_timeout``, ``close_timeout``: see :class:`asynctrt.Options`. ``contexts`` is how
        many batches run at once; 1 by default, so that the function need not be safe to call from several
        threads. ``isolate_failures`` calls the function again with halves of a batch that raised; it is off
        by default, as a function may have effects that must not happen twice.
    :returns: a :class:`Batched`, or with options a decorator that makes one.
    :raises OptionsError: for an unknown option or parameter, or a value that is not valid.
    :raises ModelError: for a generator function.
    """
    check_names(
        settings, ["items", "key", "run_on", *BatchSettings.__annotations__], "option", synonyms=SYNONYMS
    )
    options = Options.from_settings(None, {"contexts": 1, "isolate_failures": False, **settings})
    RUN_ON("run_on", run_on)

    def decorate(decorated: Any) -> Batched[Any, Any]:
        if not callable(decorated) and not isinstance(decorated, classmethod):
            raise OptionsError(
                f"{show(decorated)} is not a function, which asynctrt.batch decorates. Options are keywords: "
                "@asynctrt.batch(max_rows=32)"
            )
        refuse_generators(decorated.__func__ if isinstance(decorated, classmethod) else decorated)
        return Batched(decorated, options, key, items=items, run_on=run_on)

    return decorate if function is None else decorate(function)


class Batched(Generic[P, R]):
    """A function that :func:`batch` decorated: ``await function(item)``. ``__wrapped__`` is the function."""

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        key: object,
        *,
        items: bool,
        run_on: FunctionRunsOn = "thread",
    ) -> None:
        # An object's own attributes are its state, which changes, and may be called like ours.
        updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
        functools.update_wrapper(self, function, updated=updated)
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        mark_as_coroutine_function(self)
        self._settings = options, key, items, run_on
        # A class method's own function takes the class, as a method's takes the instance.
        self._function = function.__func__ if isinstance(function, classmethod) else function
        self._options = options
        self._key = key_of(key, self._function, self.__name__)
        self._items = items
        self._run_on: FunctionRunsOn = run_on
        self._waits = is_coroutine_function(self._function)
        self._engines = self._engines_of(self._function, self._key, self.__name__)
        self._origin = origin_of(self, function, self._settings)
        self._instance: object = None
        # The classes that it is a method of.
        self._owners: tuple[type, ...] = ()
        # For methods, by the id of their instance, which need be neither hashable nor unequal to others.
        self._bound: dict[int, tuple[weakref.ref[Any], Engines]] = {}

    def __repr__(self) -> str:
        return f"<asynctrt.batch {self.__name__!r} max_rows={self._options.max_rows or 'default'}>"

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Pickle and copy by name, as a function; if no name leads here, by its function, without engines.

        What pickles functions of the main module by value (``cloudpickle``) does so with its function. What
        is bound is bound again to the instance, which is pickled or copied.
        """
        if self._instance is not None:
            return getattr, (self._instance, self.__name__)
        path: str = getattr(self, "__qualname__", self.__name__)
        found = found_by_name(self.__module__, path)
        if not isinstance(found, Batched) or found._origin is not self._origin:
            return restored, (self.__wrapped__, self._settings)
        # Before the fourth protocol the name of what an attribute has would be pickled with the attribute.
        return path if protocol < 4 else (original, (self._origin,))

    def __eq__(self, other: object) -> bool:
        """Compare as functions and bound methods do: a method is bound anew each time it is asked for."""
        if self._instance is None or not isinstance(other, Batched):
            return self is other
        return self._instance is other._instance and self._bound is other._bound

    def __hash__(self) -> int:
        """Hash what is compared."""
        return hash((id(self._instance), id(self._bound)))

    def __set_name__(self, owner: type[Any], name: str) -> None:
        """Learn that it is a method."""
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
        # It holds the instance, so that a call does too; its engines hold it weakly. What it wraps is bound,
        # too: signatures are read from there.
        bound.__dict__.update(
            self.__dict__,
            __wrapped__=MethodType(self._function, instance),
            _engines=found[1],
            _instance=instance,
            _owners=(),
        )
        return bound

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute one item, in a batch with those of other callers.

        :raises InputError: if the call's key cannot be hashed, or misses an argument, and for an argument
            that is an array of another library and cannot be read as one of NumPy's.
        :raises QueueFullError, DeadlineError: under overload.
        :raises UsageError: from within the function's own run, or one that it waits for.
        :raises ExecutionError: when the function or the key function raised; what it raised is the
            ``__cause__``.
        """
        engine = self._engines.last()
        if engine is None or engine.loop is not running_loop():
            if len(args) + len(kwargs) > 1 and args and self._is_method_of(args[0]):
                method: Batched[..., R] = self.__get__(args[0], type(args[0]))
                return await method(*args[1:], **kwargs)
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
        """Return a snapshot of what the engine on the running event loop has done; a row is an item.

        :raises UsageError: before the first call on this loop.
        """
        return self.engine.statistics()

    async def aclose(self) -> None:
        """Close the engine on the running event loop, if there is one. A later call opens another."""
        await self._engines.aclose()

    def _is_method_of(self, first: object) -> bool:
        """Return whether the first argument of a call is what a method would be bound to.

        It is if a method was asked of its class, and of class methods since Python 3.13, which no longer asks
        what they wrap to bind itself.
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
        method = WeakMethod(reference, self._function)
        owner = instance if isinstance(instance, type) else type(instance)
        name, method_key = f"{owner.__name__}.{self.__name__}", self._key.bound()
        found = reference, self._engines_of(method, method_key, name)
        return self._bound.setdefault(key, found)

    def _engines_of(self, function: Callable[..., Any], key: Key, name: str) -> "Engines":
        return Engines(
            function, self._options, key, name, items=self._items, waits=self._waits, run_on=self._run_on
        )


def restored(
    function: Callable[..., Any], settings: tuple[Options, object, bool, FunctionRunsOn]
) -> Batched[Any, Any]:
    """Decorate a function that was pickled or copied."""
    options, key, items, run_on = settings
    return Batched(function, options, key, items=items, run_on=run_on)


def origin_of(
    batched: Batched[Any, Any],
    function: Callable[..., Any],
    settings: tuple[Options, object, bool, FunctionRunsOn],
) -> Callable[[], tuple[Any, ...]]:
    """Return a function that pickles as that of the application does: by its name, or else by value.

    :returns: what returns the function and its settings. Its own name leads to the attribute ``_origin``.
    """

    def origin() -> tuple[Any, ...]:
        return function, settings

    origin.__module__, origin.__name__ = batched.__module__, "_origin"
    origin.__qualname__ = f"{getattr(batched, '__qualname__', batched.__name__)}._origin"
    return origin


def original(origin: Callable[[], tuple[Any, ...]]) -> Any:
    """Return what was pickled: it has this origin if that was found by name, else it is made anew."""
    found = found_by_name(origin.__module__, origin.__qualname__.removesuffix("._origin"))
    if isinstance(found, Batched) and found._origin is origin:
        return found
    return restored(*origin())


def found_by_name(module: str, path: str) -> Any:
    """Return what a module has; ``None`` if there is nothing of this name."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def mark_as_coroutine_function(batched: Batched[Any, Any]) -> None:
    """Have ``inspect`` and ``asyncio`` take an object for a coroutine function, which its call returns."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(batched)
    else:
        # What ``inspect`` takes for a function that is no Python function, as those of Cython: it has these.
        batched.__dict__.update(
            __code__=Batched.__call__.__code__,
            __defaults__=None,
            __kwdefaults__=None,
            _is_coroutine=vars(asyncio.coroutines)["_is_coroutine"],
        )


class WeakMethod:
    """A method whose instance is held by its callers alone."""

    def __init__(self, instance: "weakref.ref[Any]", function: Callable[..., Any]) -> None:
        self._instance = instance
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._instance(), *args, **kwargs)


class Engines:
    """The engines of one function, by event loop.

    :param key: what calls must have in common to share a batch.
    :param items: whether the function takes lists, whatever the items are.
    :param waits: whether it is a coroutine function.
    :param run_on: where it runs if it is not.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        key: Key,
        name: str,
        *,
        items: bool,
        waits: bool,
        run_on: FunctionRunsOn,
    ) -> None:
        self._function = function
        self._run_on: FunctionRunsOn = run_on
        self._waits = waits
        self._options = options
        self._key = key
        self._name = name
        self._items = items
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[TicketEngine]] = {}
        self._closing: dict[asyncio.AbstractEventLoop, Engine] = {}
        in_child(self, Engines._let_go)
        self.last: Callable[[], TicketEngine | None] = _none
        """Returns the engine that was opened last: a shortcut for the only one that most programs have."""

    def _let_go(self) -> None:
        """In a child that was forked: wait for nothing that the parent was doing."""
        self._opening = {}
        self._closing = {}

    def find(self, loop: asyncio.AbstractEventLoop) -> "TicketEngine | None":
        """Return the engine on `loop`, if there is one."""
        return engines_on(loop).get(self)

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
                # Not in the context of this call, in which all later ones would be served.
                task = self._opening[loop] = Context().run(loop.create_task, self._open(loop))
                # Looked at here: all who wait may have been cancelled by then.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Whoever is cancelled does not stop it, because others wait for it too.
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

    async def _open(self, loop: asyncio.AbstractEventLoop) -> "TicketEngine":
        try:
            isolates = self._options.isolate_failures
            tickets = Tickets(self._function, self._key, items=self._items, isolates=isolates)
            model = FunctionModel(tickets, inputs=TICKET, outputs=DONE, name=self._name, run_on=self._run_on)
            if self._waits:
                model.await_results()
            engine = await open_engine(model, options=self._options)
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
            self.last = _none


def engines_on(
    loop: asyncio.AbstractEventLoop,
) -> "weakref.WeakKeyDictionary[Engines, TicketEngine]":
    """Return the engines on a loop, which has them itself: they live as long as it and their function do."""
    found: weakref.WeakKeyDictionary[Engines, TicketEngine]
    found = vars(loop).setdefault("_asynctrt_engines", weakref.WeakKeyDictionary())
    return found


def _none() -> None:
    return None


class TicketEngine:
    """An engine whose rows are tickets, on one event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: Engine, tickets: Tickets, groups: Groups
    ) -> None:
        self.loop = loop
        self.engine = engine
        self._infer = engine.infer
        self._waiting = tickets.waiting
        self._tickets = numbered()
        self._groups = groups
        self._keeper: Keeper | None = None

    async def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue one item and return its result."""
        # Arrays of other libraries become NumPy's here, once, for the group and for the batch.
        args, kwargs, group = self._groups.enter(args, kwargs)
        ticket, row = next(self._tickets)
        if group.queue:
            row = np.full((1, group.queue + 1), ticket)
        item = self._waiting[ticket] = Item(args, kwargs, group)
        try:
            await self._infer(row)
        except (asyncio.CancelledError, GeneratorExit):
            item.leave()
            raise
        finally:
            self._waiting.pop(ticket, None)
            self._groups.leave(group)
        result = item.result
        if isinstance(result, BaseException):
            raise copy_of(result)  # Other callers may get this object, and the function may keep it.
        return result

    async def attach(self, forget: "weakref.WeakMethod[Callable[[TicketEngine], None]]") -> None:
        """Have the engine closed together with its loop, or when nothing refers to this object any more."""
        loop, engine, origin = self.loop, self.engine, Origin()
        keeper = cast("Keeper", keep_open(engine, origin, weakref.ref(self), forget))
        self._keeper = keeper
        await anext(keeper)
        # Its own, so that it holds the engine no longer than this object does.
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
        if origin.is_here:  # A child that was forked may end the loop that it has of its parent.
            await engine.aclose()


def close_soon(loop: asyncio.AbstractEventLoop, engine: Engine, origin: Origin, keeper: Keeper) -> None:
    """Close an engine that nothing refers to any more, from any thread.

    Until then its generator is no garbage, so that a loop which ends meanwhile closes the engine after all.
    To close what is garbage, asyncio makes a task, which a loop that ends may not run.
    """
    if engine.state == "closed" or not origin.is_here:
        return

    def begin(before: "asyncio.Task[None] | None" = None) -> None:
        # A loop that ends cancels every task, and one that has not begun runs no line of its own.
        if before is None or before.cancelled():
            loop.create_task(close(engine, keeper)).add_done_callback(begin)

    with suppress(RuntimeError):  # A loop that is closed has closed it, or never will.
        loop.call_soon_threadsafe(begin, context=Context())


async def close(engine: Engine, keeper: Keeper) -> None:
    """Close an engine, and then the generator that would."""
    await engine.aclose()
    if not keeper.ag_running:
        await keeper.aclose()


def numbered() -> Iterator[tuple[int, Array]]:
    """Count up, each number also as an array ``(1, 1)``. Arrays cost less when they are views of a block."""
    start, size = 0, 256
    while True:
        block = np.arange(start, start + size, dtype=np.int64).reshape(size, 1, 1)
        yield from enumerate(block, start)
        start += size
