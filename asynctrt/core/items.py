"""The items of ``@asynctrt.batch``: which calls share a batch, stacking items, distributing results."""

import asyncio
import inspect
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from asynctrt._util.loops import is_cancelled
from asynctrt._util.validation import check_names
from asynctrt.backends.function import own_error
from asynctrt.errors import ExecutionError, InputError, OptionsError, copy_for, describe, show
from asynctrt.scheduling.key import SHAPES_MAX
from asynctrt.tensors import SHARED_NBYTES_MAX, Array, TensorSpec, as_numpy, has_masked, is_array

PLAIN_KINDS: Final = "biufcUS"
"""NumPy's kinds that have a Python type: booleans, numbers and strings."""

GROUPS_MAX: Final = 64
"""The number of queues for groups of calls. Further groups share queues, but are still computed apart."""

INT64: Final = np.iinfo(np.int64)
NUMBERS: Final[dict[type, type]] = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


class Parameter(NamedTuple):
    """A parameter that a key names."""

    name: str
    place: int | None
    """Its position; ``None`` if it is keyword-only."""
    default: Any
    """``inspect.Parameter.empty`` if it has no default."""


class Key:
    """The values of some parameters, which calls that share a batch have in common, and their types, since 1,
    1.0 and True are equal. Without parameters all calls share one key.

    :param name: the name of the batched function, for messages.
    """

    def __init__(self, parameters: Iterable[Parameter], name: str) -> None:
        self._parameters = tuple(parameters)
        self._name = name
        places = [parameter.place for parameter in self._parameters if parameter.place is not None]
        self.once: frozenset[int | str] = frozenset([*places, *(one.name for one in self._parameters)])
        """The places and names of the arguments that the function gets once, not once for each item."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return the key of a call.

        :raises InputError: if the call leaves out a parameter without a default.
        """
        key: list[Any] = []
        for name, place, default in self._parameters:
            if name in kwargs:
                value = kwargs[name]
            elif place is not None and place < len(args):
                value = args[place]
            elif default is not inspect.Parameter.empty:
                value = default
            else:
                raise InputError(f"{self._name!r} was called without {name!r}, which its key names")
            key += (type(value), value)
        return tuple(key)

    def bound(self) -> "Key":
        """Return the key of calls without ``self``, which all calls to an instance share."""
        shifted = [
            parameter if parameter.place is None else parameter._replace(place=parameter.place - 1)
            for parameter in self._parameters
        ]
        return Key([parameter for parameter in shifted if parameter.place != -1], self._name)


def key_of(key: object, function: Callable[..., Any], name: str) -> Key:
    """Return the key that the option ``key=`` of a function asks for.

    :raises OptionsError: if ``key`` is neither ``None`` nor names of the function's parameters.
    """
    if key is None:
        return Key((), name)
    names = [key] if isinstance(key, str) else key
    if isinstance(names, tuple | list) and names and all(isinstance(each, str) for each in names):
        return Key(_parameters_of(function, name, names), name)
    raise OptionsError(
        f"key must be the name of a parameter, or several names, not {show(key)}. For a key that is "
        "computed, give the function a parameter, and let callers compute it"
    )


def _parameters_of(function: Callable[..., Any], name: str, names: Sequence[str]) -> list[Parameter]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise OptionsError(
            f"key names parameters of {name!r}, which has no signature: wrap it in a function that has one"
        ) from None
    found = {
        each.name: Parameter(
            each.name, None if each.kind is inspect.Parameter.KEYWORD_ONLY else place, each.default
        )
        for place, each in enumerate(signature.parameters.values())
        if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }
    check_names(names, list(found), f"parameter of {name!r}")
    return [found[each] for each in dict.fromkeys(names)]


class Group:
    """Calls that may share a batch.

    :param kind: the shapes and key that the calls share.
    :param queue: the number of the queue that the calls wait in.
    """

    __slots__ = ("kind", "queue", "waiting")

    def __init__(self, kind: Hashable, queue: int) -> None:
        self.kind = kind
        self.queue = queue
        self.waiting = 0


class Groups:
    """The groups of the waiting calls.

    :param key: the key that calls of one group share, besides shapes.
    :param items: whether the function takes lists, so that shapes do not matter.
    """

    def __init__(self, key: Key, *, items: bool) -> None:
        self._key = key
        self._items = items
        # There are few shapes, so keep their groups: what a queue has learned of their batches helps the next
        # call. Keys may be large and never recur.
        self._keeps = not key.once
        self._found: dict[Hashable, Group] = {}
        # How many groups have calls waiting in each queue.
        self._queued = [0] * GROUPS_MAX

    def __len__(self) -> int:
        return len(self._found)

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Group]:
        """Return the arguments of a call, with arrays as NumPy arrays, and the group that it now waits in.

        :raises InputError: if the key cannot be hashed.
        """
        key = self._key(args, kwargs)
        kind: Hashable
        if self._items:
            kind = len(args), *kwargs
        else:
            args, kwargs, kind = grouped(args, kwargs, self._key.once)
        kind = kind, key
        try:
            group = self._found.get(kind)
        except Exception as error:
            raise InputError(
                "the key of a call must be hashable, such as a string, a number or a tuple of these: "
                f"{describe(error)}"
            ) from error
        if group is None:
            group = self._add(kind)
        if not group.waiting:
            if self._queued[group.queue]:
                group.queue = self._queued.index(min(self._queued))
            self._queued[group.queue] += 1
        group.waiting += 1
        return args, kwargs, group

    def leave(self, group: Group) -> None:
        """Remove a call that no longer waits."""
        group.waiting -= 1
        if not group.waiting:
            self._queued[group.queue] -= 1
            if self._keeps:
                return
            if self._found.get(group.kind) is group:
                del self._found[group.kind]
            else:  # The key was mutated meanwhile, so its hash no longer finds it.
                self._found = {kind: found for kind, found in self._found.items() if found is not group}

    def _add(self, kind: Hashable) -> Group:
        if self._keeps and len(self._found) >= SHAPES_MAX:
            self._found.clear()
        group = self._found[kind] = Group(kind, len(self._found) % GROUPS_MAX)
        return group


class Item:
    """The arguments of one call, and later its result.

    :param group: the calls that it can be stacked with.
    """

    __slots__ = ("args", "group", "has_left", "kwargs", "result", "wait")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], group: Group) -> None:
        self.args = args
        self.kwargs = kwargs
        self.group = group
        self.result: Any = None
        self.has_left = False
        """Whether its caller was cancelled."""
        self.wait: Wait | None = None

    def leave(self) -> None:
        """Record that its caller was cancelled."""
        self.has_left = True
        if self.wait is not None:
            self.wait.leave()


class Wait:
    """The wait for the awaitable that a function returned for the items of one group.

    :param task: the task that waits.
    :param callers: the number of callers that it waits for.
    """

    __slots__ = ("_callers", "_task", "is_vain")

    def __init__(self, task: "asyncio.Task[Any] | None", callers: int) -> None:
        self._task = task
        self._callers = callers
        self.is_vain = False
        """Whether it was cancelled because all callers have left."""

    def leave(self) -> None:
        """Record that a caller has left. When all have, cancel the function: other calls wait behind it."""
        self._callers -= 1
        if not self._callers and self._task is not None:
            self.is_vain = True
            self._task.cancel()

    def end(self) -> None:
        """Record that the wait is over."""
        if self.is_vain and self._task is not None:
            self._task.uncancel()
        self._task = None


TICKET: Final = TensorSpec("ticket", np.dtype(np.int64), ("group",))
"""A row repeats an item's ticket. The queue sets the number of repeats, so each queue has its own bucket."""

DONE: Final = TensorSpec("done", np.dtype(np.uint8))


class Tickets:
    """The waiting items of a function, and the function as the engine calls it.

    :param function: called with the items of one group.
    :param key: names the arguments that the function gets once.
    :param items: whether the function takes lists, whatever the items are.
    :param isolates: whether a failed batch is retried in halves.
    :param sizes: the only numbers of items that the function is called with, rising; empty for any.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        key: Key,
        *,
        items: bool,
        isolates: bool,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self._function = function
        self._once = key.once
        self._items = items
        self._isolates = isolates
        self._sizes = sizes
        self.waiting: dict[int, Item] = {}
        self.example: Item | None = None
        """The item that batches consist of until the engine is open."""

    def __call__(self, inputs: dict[str, Array]) -> Any:
        """Compute the items of one batch; may return an awaitable."""
        tickets = inputs["ticket"]
        done = np.ones(len(tickets), np.uint8)
        groups = self._groups(tickets[:, 0].tolist())
        for index, group in enumerate(groups):
            try:
                given = self._compute(group)
                if isinstance(given, Awaitable):
                    return self._await(given, groups, index, done)
                self._distribute(given, group)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                if self._fails_all(groups):
                    raise
                fail(group, error)
        return done

    async def _await(self, given: Any, groups: list[list[Item]], index: int, done: Array) -> Array:
        for group in groups[index:]:
            try:
                if group is not groups[index]:
                    given = None if all_left(group) else self._compute(group)
                if isinstance(given, Awaitable):
                    given = await self._waited(given, group)
                if not all_left(group):
                    self._distribute(given, group)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                has_left = all_left(group)
                if has_left and not all(map(all_left, groups)):
                    continue  # The callers of other groups still wait.
                is_ended = isinstance(error, asyncio.CancelledError) and is_cancelled()
                if has_left or is_ended or self._fails_all(groups):
                    raise
                fail(group, error)
        return done

    async def _waited(self, given: Awaitable[Any], group: list[Item]) -> Any:
        """Await what the function returned; stop when all callers of the group have left."""
        staying = [item for item in group if not item.has_left]
        if not staying:
            if inspect.iscoroutine(given):
                given.close()
            raise asyncio.CancelledError
        wait = Wait(asyncio.current_task(), len(staying))
        for item in staying:
            item.wait = wait
        try:
            return await given
        finally:
            wait.end()

    def _fails_all(self, groups: list[list[Item]]) -> bool:
        """Return whether a group's error fails its batch: it is the only group, or halves are retried."""
        return self._isolates or len(groups) == 1

    def _groups(self, tickets: list[int]) -> list[list[Item]]:
        """Return the items of a batch by group, without items of cancelled callers. Usually one group.

        Items stay in ``waiting`` until their callers remove them: a failed batch may be retried in halves.
        """
        if self.example is not None:
            return [[self.example] * len(tickets)]
        if self._sizes:
            tickets = list(dict.fromkeys(tickets))  # The engine has padded them with copies.
        get = self.waiting.get
        items = [item for ticket in tickets if (item := get(ticket)) is not None]
        groups = {item.group for item in items}
        if len(groups) <= 1:
            return [items] if items else []
        return [[item for item in items if item.group is group] for group in groups]

    def _padded(self, group: list[Item]) -> list[Item]:
        """Return the items that the function is called with: the last one is repeated up to a size."""
        if not self._sizes:
            return group
        return group + group[-1:] * (self._sizes[bisect_left(self._sizes, len(group))] - len(group))

    def _distribute(self, given: object, group: list[Item]) -> None:
        """Give each item of a group its result, and drop the results of copies.

        :raises ExecutionError: if there is not one result per item that the function was called with.
        """
        results = results_of(given, len(self._padded(group)), keeps=self._items)
        for item, result in zip(group, results, strict=False):
            item.result = result

    def _compute(self, group: list[Item]) -> Any:
        group = self._padded(group)
        first, once = group[0], self._once
        stack = list if self._items else stacked
        args = [
            value if place in once else stack([item.args[place] for item in group])
            for place, value in enumerate(first.args)
        ]
        kwargs = {
            name: value if name in once else stack([item.kwargs[name] for item in group])
            for name, value in first.kwargs.items()
        }
        return self._function(*args, **kwargs)


def all_left(group: list[Item]) -> bool:
    """Return whether all callers of a group were cancelled."""
    return all(item.has_left for item in group)


def grouped(
    args: tuple[Any, ...], kwargs: dict[str, Any], once: frozenset[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any], Hashable]:
    """Return the arguments of a call, with arrays as NumPy arrays, and the kinds of all not in ``once``."""
    group: list[Hashable] = []
    taken = []
    for place, value in enumerate(args):
        array, kind = (value, None) if place in once else kind_of(value)
        taken.append(array)
        group.append(kind)
    for name, value in kwargs.items():
        kwargs[name], kind = (value, None) if name in once else kind_of(value)
        group += (name, kind)
    return tuple(taken), kwargs, tuple(group)


def kind_of(value: Any) -> tuple[Any, Any]:
    """Return a value, with any library's array as a NumPy array, and its kind: equal kinds can be stacked."""
    kind = type(value)
    if kind is np.ndarray:
        return value, (value.shape, value.dtype)
    if kind in NUMBERS:
        return value, (None if kind is int and not INT64.min <= value <= INT64.max else kind)
    if isinstance(value, str | bytes) or not is_array(value):
        return value, None
    if has_masked(value):
        raise InputError(
            "an argument has masked values, which stacked arrays cannot have. Replace them: array.filled(0); "
            "or take lists of items: @asynctrt.batch(items=True)"
        )
    try:
        array = as_numpy(value)
    except Exception as error:
        raise InputError(
            f"an argument, a {type(value).__name__}, cannot be read as a NumPy array, to be stacked "
            f"({describe(error)}). Convert it; or take lists of items: @asynctrt.batch(items=True)"
        ) from error
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


def fail(group: list[Item], error: BaseException) -> None:
    """Fail one of the groups that share a batch, and no other."""
    for item in group:
        item.result = copy_for(own_error(error))


def results_of(given: object, count: int, *, keeps: bool = False) -> list[Any]:
    """Split a function's return value into one result per item. Arrays are copied: they may be reused.

    :param keeps: whether to keep arrays of other libraries as they are. If not, they become NumPy arrays
        where NumPy supports them.
    :raises ExecutionError: if it contains anything but arrays and lists with one result per item.
    """
    if isinstance(given, list):
        check_count(given, count)
        return [each.item() if is_plain_scalar(each) else each for each in given]
    if isinstance(given, tuple) and given:
        make = getattr(type(given), "_make", tuple)  # A named tuple stays one.
        parts = [results_of(part, count, keeps=keeps) for part in given]
        return [make(each) for each in zip(*parts, strict=True)]
    if isinstance(given, Mapping):
        named = {name: results_of(part, count, keeps=keeps) for name, part in given.items()}
        return [{name: part[index] for name, part in named.items()} for index in range(count)]
    if has_masked(given):
        raise ExecutionError(
            "the function returned an array with masked values. Return a list of one array for each item, or "
            "replace them: array.filled(0)"
        )
    if is_array(given) and not isinstance(given, np.generic) and getattr(given, "shape", True):
        return rows_of(given, count, keeps=keeps)
    raise ExecutionError(
        f"the function returned a {type(given).__name__} for {count} items. Return a list with one result "
        "per item, an array whose first axis counts items, or a tuple or mapping of these"
    )


def is_plain_scalar(given: object) -> bool:
    """Return whether a value is one of NumPy's numbers or strings, for which Python has a type as well."""
    return isinstance(given, np.generic) and given.dtype.kind in PLAIN_KINDS


def rows_of(given: Any, count: int, *, keeps: bool) -> list[Any]:
    """Return copies of the rows of an array. PyTorch tensors are detached from their gradients.

    Rows that are single numbers or strings become Python objects, which JSON supports too.
    """
    if hasattr(given, "detach"):
        given = given.detach()
    array = None
    if isinstance(given, np.ndarray) or not keeps:
        with suppress(Exception):  # It is on a GPU, or NumPy has no such dtype.
            array = as_numpy(given)
    if array is None:
        check_count(given, count)
        rows = [given[index] for index in range(count)]
        copies = [getattr(row, "clone", None) or getattr(row, "copy", None) for row in rows]
        return [row if copy is None else copy() for row, copy in zip(rows, copies, strict=True)]
    check_count(array, count)
    if array.ndim == 1 and array.dtype.kind in PLAIN_KINDS:
        return array.tolist()  # type: ignore[no-any-return]  # Of one axis it is a list.
    if array.ndim == 1 or array.nbytes <= SHARED_NBYTES_MAX:
        return list(array.copy())
    return [row.copy() for row in array]


def check_count(results: Any, count: int) -> None:
    """Check that there is one result per item.

    :raises ExecutionError: if there are more or fewer.
    """
    if len(results) != count:
        raise ExecutionError(
            f"the function returned {len(results)} results for {count} items. Return one per item, in order "
            "(strings, lists and other items that are neither numbers nor arrays arrive as a list of items)"
        )
