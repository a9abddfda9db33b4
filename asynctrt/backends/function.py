"""A Python function as a model on the host device, for tests, load tests and custom models."""

import asyncio
import inspect
import secrets
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, get_args

import numpy as np

from asynctrt._util import clock
from asynctrt._util.loops import opening_loop
from asynctrt._util.validation import choice, rising_sizes
from asynctrt.backends.base import ModelBase, TensorMemory
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.devices.host import HostStream, RunOn, Unfinished, warn_if_held
from asynctrt.errors import (
    AsynctrtError,
    DeviceUnavailableError,
    ExecutionError,
    ModelError,
    describe,
    show,
)
from asynctrt.tensors import Array, TensorSpec, as_numpy, is_array

BatchFunction = Callable[..., Any]

FunctionRunsOn = Literal["thread", "loop"]
"""Where a plain function runs."""

RUN_ON: Final = choice(*get_args(FunctionRunsOn))
BATCH_SIZES: Final = rising_sizes()

FILL: Final = 0xFF
"""The fill for bytes that no mark covers: NaN as a float, -1 or the largest value as an integer, so that it
stands out."""

BOOL_MARK: Final = b"\xa5"
"""Marks a bool output. No bool is stored as this byte, so each unwritten value is detected."""

MARK_NBYTES: Final = 8


class FunctionModel(ModelBase):
    """Calls a Python function once per batch.

    ``function(inputs)`` returns its outputs; ``function(inputs, outputs)`` writes or returns them. Both
    arguments are mappings from tensor name to an array ``(rows, *dims)``. Each output of a batch must be set
    in one of these ways:

    - Return an array, for a model with one output.
    - Return a tuple or list of arrays, in the order of ``outputs``.
    - Return a mapping from output name to array.
    - Assign: ``outputs["y"] = array``.
    - Write in place: ``outputs["y"][...] = values``, or ``np.add(a, b, out=outputs["y"])``.

    A returned or assigned array has shape ``(rows, *dims)`` and a dtype that NumPy casts to the output's with
    ``casting="same_kind"`` (``float64`` to ``float32``, ``int64`` to ``int32``, but not ``float32`` to
    ``int32``). Integers that do not fit are an error. The array is copied at once, so it may be a view of an
    input, or a buffer that the function reuses.

    A batch fails with :class:`ExecutionError` if some row was not written. When the function accesses an
    output to write it in place, the output is filled and marked; the marks are searched for at the end:

    - Rows of 8 bytes or more: a row is detected if any of its groups of 8 bytes, counted from its start, was
      not written.
    - ``bool``: every unwritten value is detected.
    - Rows of one ``float32``: every unwritten row is detected.
    - Other rows of fewer than 8 bytes: 8 consecutive unwritten bytes, at a multiple of 8 bytes from the start
      of the output, are detected: two rows of one ``int32``, eight of one ``uint8``.
    - An output that the function never accessed is always detected.

    Undetected gaps contain NaN in float outputs and meaningless numbers in integer outputs, but never another
    caller's rows. A mark is a random 64-bit number. In float outputs it consists of NaNs with random
    payloads, so that no computed value is mistaken for a mark.

    The function may change both mappings and write to its inputs, but it must not keep the arrays: they are
    in the batch's slab, which the next batch will reuse. If it raises, only its batch fails, with an
    :class:`ExecutionError`. It must not wait for its own engine, which waits for it.

    It runs in a thread of the device, so it may block, call ``asyncio.run``, or use libraries that are not
    allowed on an event loop. With ``contexts=1`` every batch runs in the same thread, which database
    connections may require; after a batch that hangs (``batch_timeout``) it is a new thread, because the old
    one is lost. ``run_on="loop"`` runs it on the engine's event loop, which saves a lone caller the hand-over
    to the thread and back, about 0.1 ms. Then it blocks the loop, and ``batch_timeout`` cannot
    end it; a run that blocks the loop for more than 0.1 s is logged.

    A coroutine function, or any function that returns an awaitable, is awaited on the engine's event loop. It
    occupies no thread, so all contexts of the engine can have batches in flight. It is cancelled when its
    batch is given up (``batch_timeout``, ``close_timeout``).

    ``batch_sizes`` is for libraries that prepare each batch size separately, such as PyTorch on a GPU
    (``torch.compile``, ``cudnn.benchmark``). A batch is padded to the next of these sizes with copies of its
    first row, in every input, strings and Python values included; the outputs of the copies are dropped. The
    largest size is the engine's ``max_rows``. Before the engine is ready, each context runs two batches of
    zeros of each size (empty strings, or ``None`` for Python values), the largest size first, in the thread
    that runs all of its batches later; there are at most as many such contexts as the device has threads. A
    coroutine function, and a function with ``run_on="loop"``, runs them on the event loop. If inputs have
    dimensions that vary, batches are padded, but only the shapes that ``pad`` names, up to 8, run
    beforehand. If the function raises, a warning is logged, and batches are padded nevertheless. With
    ``deterministic`` the largest size is the only one, and with ``batching="off"`` none is used.

    :param function: called with the inputs of the batch, or with its inputs and outputs.
    :param inputs: one or several specs; likewise ``outputs``.
    :param run_on: where a plain function runs: ``thread`` or ``loop``. A coroutine function is awaited on the
        loop regardless.
    :param batch_sizes: the only batch sizes that the function is to see, rising, such as ``(1, 4, 16, 64)``.
    :raises OptionsError: for any other ``run_on``, and for batch sizes that are not whole numbers in rising
        order.
    :raises ModelError: for an output dimension that no input determines, for an argument that is not a
        function or spec, and for a function that is a generator or accepts neither one argument nor two.
    """

    def __init__(
        self,
        function: BatchFunction,
        *,
        inputs: TensorSpec | Sequence[TensorSpec],
        outputs: TensorSpec | Sequence[TensorSpec],
        name: str | None = None,
        run_on: FunctionRunsOn = "thread",
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        if not callable(function):
            raise ModelError(f"{show(function)} is not a function: a FunctionModel calls one for each batch")
        self.run_on: RunOn = RUN_ON("run_on", run_on)
        self.function = function
        self.name: str = name or getattr(function, "__name__", None) or type(function).__name__
        self.inputs = (inputs,) if isinstance(inputs, TensorSpec) else tuple(inputs)
        self.outputs = (outputs,) if isinstance(outputs, TensorSpec) else tuple(outputs)
        for spec in (*self.inputs, *self.outputs):
            if not isinstance(spec, TensorSpec):
                raise ModelError(
                    f"{show(spec)} is not a TensorSpec: inputs and outputs are one or several, such as "
                    'asynctrt.TensorSpec("x", "float32", (4,))'
                )
        if batch_sizes is not None:
            sizes = BATCH_SIZES("batch_sizes", batch_sizes)
            self.capabilities = replace(self.capabilities, batch_sizes=sizes, rows_max=sizes[-1])
        self.platform = "python"
        refuse_generators(function)
        # A key for durations: batches take about equally long on all contexts of a model, and other models
        # may use the same device.
        self.kind = object()
        if is_coroutine_function(function):
            self.await_results()
        self.takes_outputs = _takes_outputs(function)
        known = {dim for spec in self.inputs for dim in spec.dims}
        for spec in self.outputs:
            for dim in spec.dims:
                if isinstance(dim, str) and dim not in known:
                    raise ModelError(
                        f"output {spec.name!r} has the dimension {dim!r}, which no input has. Memory for the "
                        "outputs is laid out before the function runs, so their shapes must follow from the "
                        "inputs"
                    )

    def __repr__(self) -> str:
        return f"<FunctionModel {self.name}>"

    def create_context(self, device: Device) -> "FunctionContext":
        if device.name != "host":
            raise DeviceUnavailableError(
                f"{self!r} runs on the host device, not on {device.name!r}. Open it with device='host'"
            )
        return FunctionContext(self, opening_loop())

    def await_results(self) -> None:
        """Assume that calls only return awaitables, which run on the loop and do not occupy the device."""
        self.capabilities = replace(self.capabilities, occupies_device=False)
        # Calling a coroutine function runs none of its code, so that may happen in a thread or on the loop.
        self.run_on = "auto"

    def close(self) -> None:
        """Do nothing: a function holds nothing."""


class FunctionContext:
    """A context without state, so any number can exist. ``loop`` runs batches before the engine is ready."""

    def __init__(self, model: FunctionModel, loop: asyncio.AbstractEventLoop | None) -> None:
        self._model = model
        self._loop = loop

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "FunctionBinding":
        return FunctionBinding(self._model, inputs, outputs, self._loop)

    def close(self) -> None:
        """Do nothing: a context holds nothing."""


class FunctionBinding:
    """A function bound to the arrays of one slab."""

    def __init__(
        self,
        model: FunctionModel,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._function = model.function
        self._takes_outputs = model.takes_outputs
        self._name = repr(model.name)
        self._run_on = model.run_on
        self._kind = model.kind, tuple(memory.dims for memory in inputs)
        self._inputs = tuple((memory.name, memory.array) for memory in inputs if memory.array is not None)
        self._outputs = {memory.name: OutputMemory(memory) for memory in outputs if memory is not None}
        self._only_output = next(iter(self._outputs.values())) if len(self._outputs) == 1 else None
        self._rows = 0
        self._label: Hashable = None
        self._loop = loop

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        assert isinstance(stream, HostStream)
        if rows != self._rows:
            self._label = (self._kind, rows)
            self._rows = rows
        if self._loop is None:
            self._loop = _get_running_loop()
        stream.launch(partial(self._run, rows), label=self._label, run_on=self._run_on, loop=self._loop)

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return {}

    def _run(self, rows: int) -> "Coroutine | None":
        # Mappings and views are new for each batch, because the function may pop, rebind and reshape them.
        inputs = {}
        for name, array in self._inputs:
            inputs[name] = array[:rows]
        outputs = Outputs(self._outputs, rows) if self._takes_outputs else None
        try:
            given = self._function(inputs) if outputs is None else self._function(inputs, outputs)
        except ExecutionError:
            raise
        except AsynctrtError as error:
            raise own_error(error) from error
        if outputs is None:
            if self._only_output is not None and type(given) is np.ndarray:
                self._only_output.store(given, rows)
                return None
            outputs = Outputs(self._outputs, rows)
        if given is not None and not isinstance(given, np.ndarray) and isinstance(given, Awaitable):
            return Coroutine(given, outputs, self._loop, self._name)
        outputs.finish(given)
        return None


class Coroutine(Unfinished):
    """An awaitable from the function that completes the outputs of its batch on the engine's event loop."""

    def __init__(
        self,
        awaitable: Awaitable[Any],
        outputs: "Outputs",
        loop: asyncio.AbstractEventLoop | None,
        name: str,
    ) -> None:
        self._awaitable = awaitable
        self._outputs = outputs
        self._loop = loop
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._finish: Callable[[BaseException | None], None] = _ignore

    def start(self, finish: Callable[[BaseException | None], None]) -> None:
        """Start it on its loop, from any thread, and call `finish` when it has finished."""
        self._finish = finish
        if self._loop is None:
            self._refuse("no event loop is running that it could be awaited on")
        elif _get_running_loop() is self._loop:
            self._begin()
        else:
            try:
                self._loop.call_soon_threadsafe(self._begin)
            except RuntimeError:
                self._refuse("its event loop is closed")

    def cancel(self) -> None:
        """Cancel it, from any thread."""
        self._is_cancelled = True
        if self._loop is not None:
            with suppress(RuntimeError):  # A closed loop no longer runs it.
                self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        assert self._loop is not None
        if self._is_cancelled:
            self._refuse("its batch was given up before it began")
            return
        self._task = self._loop.create_task(self._complete())
        self._task.add_done_callback(self._ended)

    async def _complete(self) -> None:
        if self._is_cancelled:  # Perhaps by an interrupt, before `_begin` had stored this task.
            self._drop()
            raise asyncio.CancelledError
        self._outputs.finish(await Watched(self._awaitable, self._name))

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # Break the reference cycle first: the error's traceback leads back to this object.
        finish, self._finish, self._task = self._finish, _ignore, None
        if task.cancelled():
            finish(ExecutionError("the function's coroutine was cancelled"))
        else:
            error = task.exception()
            finish(None if error is None else own_error(error))

    def _drop(self) -> None:
        if inspect.iscoroutine(self._awaitable):
            self._awaitable.close()

    def _refuse(self, why: str) -> None:
        self._drop()
        self._finish(ExecutionError(f"the function returned an awaitable, and {why}"))


class Watched:
    """An awaitable whose steps are timed: a step that blocks the loop for long is logged."""

    def __init__(self, awaitable: Awaitable[Any], name: str) -> None:
        self._awaitable = awaitable
        self._name = name

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._awaitable.__await__()
        onward: Callable[[], Any] = partial(next, steps)
        step = onward
        while True:
            start_ns = clock.now_ns()
            try:
                awaited = step()
            except StopIteration as ended:
                return ended.value
            finally:
                step = onward  # Drop an error that was thrown in, because it refers to this frame.
                warn_if_held(self._name, clock.now_ns() - start_ns)
            try:
                yield awaited
            except GeneratorExit:
                if hasattr(steps, "close"):
                    steps.close()
                raise
            except BaseException as error:
                if not hasattr(steps, "throw"):
                    raise
                step = partial(steps.throw, error)


def _ignore(_error: BaseException | None) -> None:
    """Do nothing: the end of a coroutine has no callback yet, or it has been called."""


def own_error(error: BaseException) -> BaseException:
    """Return the error of a batch whose function raised ``error``.

    An asynctrt error from another engine that the function uses says nothing about this engine: neither that
    its callers are at fault nor that its device is lost. It becomes the cause of an ``ExecutionError``.
    """
    if not isinstance(error, AsynctrtError) or isinstance(error, ExecutionError):
        return error
    failed = ExecutionError(f"the function raised {describe(error)}")
    failed.__cause__ = error
    return failed


class Outputs(Mapping[str, Array]):
    """The outputs of one batch, as passed to a function: arrays by name, to write into or to assign to."""

    __slots__ = ("_arrays", "_marked", "_memory", "_rows")

    def __init__(self, memory: Mapping[str, "OutputMemory"], rows: int) -> None:
        self._memory = memory
        self._rows = rows
        self._arrays: dict[str, Array] = {}
        # Memory is only marked on access: outputs that are returned or assigned need no marks.
        self._marked: tuple[OutputMemory, ...] = ()

    def __getitem__(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            try:
                memory = self._memory[name]
            except KeyError:
                raise self._unknown(name) from None
            array = self._arrays[name] = memory.hand_out(self._rows)
            self._marked += (memory,)
        return array

    def __setitem__(self, name: str, value: object) -> None:
        if name not in self._memory:
            raise self._unknown(name)
        self._arrays[name] = self._memory[name].store(value, self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._memory

    def __iter__(self) -> Iterator[str]:
        return iter(self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def __repr__(self) -> str:
        return f"<Outputs of {self._rows} rows: {', '.join(self._memory)}>"

    def finish(self, given: object) -> None:
        """Store the function's return value, and check that every row of every output was set."""
        if given is not None and given is not self:
            self._store_all(given)
        for memory in self._marked:
            if missing := memory.count_marked():
                raise self._not_written(memory.name, missing)
        if len(self._arrays) < len(self._memory):
            name = next(name for name in self._memory if name not in self._arrays)
            raise self._not_written(name, self._rows)
        # Code that the function started may still run, and must not write into the memory of a later batch.
        self._memory = {}

    def _store_all(self, given: object) -> None:
        if isinstance(given, tuple | list):
            if len(given) != len(self._memory):
                raise ExecutionError(
                    f"the function returned a {type(given).__name__} of {len(given)}, and the model has "
                    f"{len(self._memory)} outputs: {', '.join(self._memory)}. Return one array for each, in "
                    "this order, and the rows of one output as an array: np.asarray(rows)"
                )
            named = dict(zip(self._memory, given, strict=True))
        elif not isinstance(given, np.ndarray) and isinstance(given, Mapping):
            named = dict(given)
        elif len(self._memory) > 1:
            raise ExecutionError(
                f"the function returned one {type(given).__name__}, and the model has {len(self._memory)} "
                f"outputs: {', '.join(self._memory)}. Return a tuple of arrays in this order, or a mapping"
            )
        else:
            named = dict.fromkeys(self._memory, given)
        if self._arrays and len(named) > 1:
            # A value may be a view of another output's memory, which would be overwritten before it was read.
            named = {name: np.array(value) for name, value in named.items()}
        for name, value in named.items():
            self[name] = value

    def _not_written(self, name: str, missing: int) -> ExecutionError:
        return ExecutionError(
            f"output {name!r}: {missing} of {self._rows} rows were not written. A function returns its "
            "outputs (an array, a tuple of arrays in the order of the outputs, or a mapping by name), or it "
            f"takes a second argument, outputs, and assigns them (outputs[{name!r}] = array) or writes them "
            f"in place (outputs[{name!r}][...] = values)"
        )

    def _unknown(self, name: str) -> KeyError:
        if not self._memory:
            return KeyError(f"{name!r} cannot be written any more: its batch has ended")
        return KeyError(f"{name!r} is not an output of this model; its outputs: {', '.join(self._memory)}")


class OutputMemory:
    """The memory of one output, filled with marks that show which rows a function did not write.

    A mark is a random number. After it was found, a new one is drawn.
    """

    def __init__(self, memory: TensorMemory) -> None:
        assert memory.array is not None
        self.name = memory.name
        self._array = memory.array
        self._dtype = memory.dtype
        self._bytes = memory.array.reshape(-1).view(np.uint8)
        self._row_nbytes = self._bytes.nbytes // len(memory.array)
        self.mark = b""
        """The mark, as stored in memory; empty until one is drawn."""
        # The rest applies to this mark and to batches of this many rows.
        self._rows = 0
        self._value = self._bytes[:0]
        self._has_rest = False
        self.places = self._bytes[:0]
        """The places of the marks."""

    def hand_out(self, rows: int) -> Array:
        """Fill the first `rows` rows with marks, so that no earlier data is left, and return a view."""
        if not self.mark:
            self._rows, self.mark = 0, self._draw()
        if rows != self._rows:
            self._cut(rows)
        if self._has_rest:
            self._bytes[: rows * self._row_nbytes] = FILL
        self.places[...] = self._value
        return self._array[:rows]

    def count_marked(self) -> int:
        """Return how many rows are marked. If any are, discard the mark, so that a new one is drawn."""
        if not np.count_nonzero(found := self.places == self._value):
            return 0
        self.mark = b""
        if found.ndim > 1:
            return int(found.any(axis=1).sum())
        # A mark spans several rows. None of them was written.
        found = np.repeat(found, self.places.itemsize)
        return int(np.logical_or.reduceat(found, range(0, found.size, self._row_nbytes)).sum())

    def store(self, value: object, rows: int) -> Array:
        """Copy `value` into the first `rows` rows, and return a view of them."""
        target = self._array[:rows]
        array = value if isinstance(value, np.ndarray) else self._converted(value)
        if array.shape != target.shape:
            raise ExecutionError(
                f"output {self.name!r} has shape {target.shape} in a batch of {rows} rows, and the "
                f"function gave {array.shape}. Give one row for each row of the inputs"
            )
        dtype = self._dtype
        if array.dtype == dtype:
            target[...] = array
            return target
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ExecutionError(
                f"output {self.name!r} is {dtype.name}, and the function gave {array.dtype}, which NumPy "
                f"does not cast to it with casting='same_kind'. Convert it: array.astype({dtype.name!r})"
            )
        with np.errstate(all="ignore"):  # Overrides the NumPy error settings of the application.
            target[...] = array
        if dtype.kind in "iu" and not np.array_equal(target, array):
            limits = np.iinfo(dtype)
            raise ExecutionError(
                f"output {self.name!r} is {dtype.name}, which holds {limits.min} to {limits.max}, and the "
                f"function gave {array.dtype} with a value outside that range"
            )
        return target

    def _cut(self, rows: int) -> None:
        """Find the places of marks in a batch of this many rows."""
        self._rows = 0  # Valid for no batch until all of it is done: Ctrl-C may come in between.
        unit, nbytes = np.dtype(f"u{len(self.mark)}"), self._row_nbytes
        size = unit.itemsize
        if nbytes >= size:
            places = np.ndarray((rows, nbytes // size), unit, self._bytes, strides=(nbytes, size))
        else:
            places = np.ndarray((rows * nbytes // size,), unit, self._bytes)
        self.places, self._value = places, np.frombuffer(self.mark, unit)
        self._has_rest = places.nbytes < rows * nbytes
        self._rows = rows

    def _draw(self) -> bytes:
        """Draw a mark: a random number or, for floats, NaNs with random payloads.

        A computed NaN carries such a payload only if one of its operands did.
        """
        if self._dtype == np.bool_:
            return BOOL_MARK
        drawn = np.frombuffer(secrets.token_bytes(MARK_NBYTES), np.uint8)
        if self._dtype.kind in "fc" or self._dtype.name == "bfloat16":
            drawn = drawn | np.full(MARK_NBYTES, np.nan).astype(self._dtype).view(np.uint8)[:MARK_NBYTES]
        is_one = self._row_nbytes == self._dtype.itemsize == 4 and self._dtype.kind == "f"
        return drawn.tobytes()[: 4 if is_one else MARK_NBYTES]

    def _converted(self, value: object) -> Array:
        if not is_array(value):
            raise ExecutionError(
                f"output {self.name!r} is an array, and the function gave a {type(value).__name__}. Give an "
                "array: np.asarray(rows)"
            )
        return as_numpy(value)


def is_coroutine_function(function: BatchFunction) -> bool:
    """Return whether a function is declared with ``async def`` or is an object whose ``__call__`` is."""
    return any(map(inspect.iscoroutinefunction, _calls_of(function)))


def _calls_of(function: BatchFunction) -> tuple[Any, ...]:
    return (function,) if inspect.isroutine(function) else (function, type(function).__call__)


def refuse_generators(function: BatchFunction) -> None:
    """Check that a function returns its outputs at once."""
    for kind in _calls_of(function):
        if inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind):
            raise ModelError(
                f"{show(function)} is a generator function, and a batch has one set of outputs. Return them "
                "instead of yielding them"
            )


def _takes_outputs(function: BatchFunction) -> bool:
    """Return whether a function is called with its inputs and outputs rather than with its inputs alone.

    An optional second parameter belongs to the function, unless it is called ``outputs``. A function without
    a signature, or with only ``*args``, gets both.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    parameters = signature.parameters.values()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in positional)
    is_open = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    keywords = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if needed > 2 or keywords or not (positional or is_open):
        raise ModelError(
            f"{show(function)} is called as function(inputs) or function(inputs, outputs), and its signature "
            f"is {signature}"
        )
    is_named = len(positional) > 1 and positional[1].name == "outputs"
    return needed == 2 or is_named or (is_open and not needed)
