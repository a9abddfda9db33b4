"""The double's ``IExecutionContext``, which checks how it is used.

Calls that the real library refuses are refused in the same way: with ``False``, and a report to the error
recorder or the logger. Calls whose effect it leaves undefined, or reports too late to tell which call was
wrong, raise :class:`ViolationError`.
"""

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from asynctrt.devices.base import ALIGNMENT
from asynctrt.errors import DeviceError
from tests.doubles.tensorrt.core import Block, Reporter
from tests.doubles.tensorrt.description import EngineDescription
from tests.doubles.tensorrt.monitor import EnqueuedBatch, Ticket, ViolationError
from tests.doubles.tensorrt.names import (
    Dims,
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    IGpuAllocator,
    IGpuAsyncAllocator,
    ILogger,
    IOutputAllocator,
    require_initialised,
    version_of,
)
from tests.doubles.tensorrt.spec import COMPUTED, DESCRIBED, TensorIO

ENQUEUE: Final = "IExecutionContext::enqueueV3"

UNRESOLVED: Final = "condition: allInputDimensionsSpecified(routine)."

ALIGNMENT_OF_8: Final = 512
"""What TensorRT 8 asks of the address of enqueue memory, and rounds sizes of outputs up to."""


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="IExecutionContext")


def exclusive(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Make it a violation to call a method while another thread is in one ("How TensorRT works", Threading).

    Callbacks during an execution may use the context, since they run in the same thread.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        me = threading.get_ident()
        if self._user == me:
            return method(self, *args, **kwargs)
        if not self._entered.acquire(blocking=False):
            raise self._violation(f"used by two threads at once: {method.__name__} during another call")
        self._user = me
        try:
            self._core.check()
            return method(self, *args, **kwargs)
        finally:
            self._user = None
            self._entered.release()

    return call


class IExecutionContext(Reporter):
    """Runs batches of one engine: one at a time, from one thread at a time."""

    def __init__(
        self,
        engine: EngineDescription,
        strategy: ExecutionContextAllocationStrategy,
        persistent: Block,
        own_arena: Block | None,
    ) -> None:
        super().__init__(engine._core, engine._recorder)
        self._engine = engine
        self._spec = engine._spec
        self._strategy = strategy
        self._persistent = persistent
        self._own_arena = own_arena
        self._user: int | None = None
        self._entered = threading.Lock()
        self._profile = 0 if engine._give_profile(0, self) else -1
        self._has_chosen_profile = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, weakref.ref[IOutputAllocator]] = {}
        self._arena = (0, 0) if own_arena is None else (own_arena.address, own_arena.nbytes)
        self._refused: str | None = None
        self._aux: tuple[int, ...] | None = None
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._batches: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._switch: Ticket | None = None
        self._generation = 0
        self._enqueued: EnqueuedBatch | None = None
        self._is_changed = True
        self._computed: dict[tuple[tuple[int, ...], ...], dict[str, tuple[int, ...]] | str] = {}
        self._changing = threading.Event()
        self._number = next(engine._core.library.numbers)
        self._name = f"{self._spec.name} context {self._number}"
        self._temporary_allocator: weakref.ref[IGpuAllocator] | None = None
        self._reset_shapes()
        self._modified()
        if self._profile < 0:
            self._core.say(
                ILogger.WARNING,
                "Could not set default profile 0 for execution context. Profile index must be set "
                "explicitly.",
            )

    def __del__(self) -> None:
        tickets = getattr(self, "_tickets", None)
        if tickets is None:
            return
        pending = [ticket for ticket in tickets if not ticket.is_done]
        if pending and self._core.monitor.lost is None:
            self._core.monitor.note(f"{self.name} was destroyed while {pending[0].text} was in flight")
        self._report_destroyed_late("IExecutionContext::~IExecutionContext")
        self._core.executor.retire(self._number)
        self._persistent.close()
        if self._own_arena is not None:
            self._own_arena.close()

    def __repr__(self) -> str:
        return f"<IExecutionContext {self.name!r} profile={self._profile} shapes={self._shapes}>"

    def _check_detachable(self) -> None:
        """Check that it may be left without a recorder: under a later library, TensorRT 8 crashes then."""
        if self._engine._is_passed_on:
            raise self._violation(
                f"error_recorder is set to None: TensorRT {self._core.library.version} ends the process when "
                "the engine is of TensorRT 8"
            )

    def _violation(self, message: str) -> ViolationError:
        return self._core.monitor.found(f"{self.name}: {message}")

    def _modified(self) -> None:
        """Note a change, after which no graph that was captured before may execute.

        TensorRT leaves undefined what a graph does after the context that it was captured from was modified.
        Undoing the change is another change: nothing guarantees that it restores the state.
        """
        self._generation += 1
        self._core.executor.modified(self._number, self._generation)

    # Properties

    @property
    def name(self) -> str:
        """The name used in messages."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        """Set the name used in messages."""
        self._name = name

    @property
    def engine(self) -> EngineDescription:
        """The engine that it is a context of."""
        return self._engine

    @property
    def active_optimization_profile(self) -> int:
        """The index of the active profile: 0 at first, or -1 if another context has it to itself."""
        return self._profile

    @property
    def all_binding_shapes_specified(self) -> bool:
        """Whether the shapes of all dynamic inputs are set.

        TensorRT 8.6 said no of complete shapes, on a GPU, to a caller that had chosen a profile. Of an engine
        of TensorRT 8, a later library says no of shapes that only another profile accepts.
        """
        if self._unspecified() or (self._library_is_8 and self._has_chosen_profile):
            return False
        shapes = self._shapes.items() if self._engine._is_of_8 else ()
        return all(self._is_within(name, shape, self._profile) for name, shape in shapes)

    @property
    def temporary_allocator(self) -> IGpuAllocator | None:
        """The allocator of temporary storage; the engine's if it is ``None``."""
        return None if self._temporary_allocator is None else self._temporary_allocator()

    @temporary_allocator.setter
    def temporary_allocator(self, allocator: IGpuAllocator | None) -> None:
        """Allocate from there what an enqueue needs only while its batch runs."""
        if allocator is not None:
            require_initialised(allocator, IGpuAllocator)
        self._temporary_allocator = None if allocator is None else weakref.ref(allocator)

    # Shapes and profiles

    @exclusive
    def set_input_shape(self, name: str, shape: Sequence[int] | Dims) -> bool:
        """Set the shape of an input; ``False``, and an error, if no profile accepts it.

        One that only another profile accepts is refused later, when it is used. An engine of TensorRT 8 takes
        -1 for a dimension that is not known yet.

        :raises RuntimeError: for more dimensions than there can be; under TensorRT 8, ``TypeError``.
        """
        given = tuple(int(dim) for dim in shape)
        if len(given) > Dims.MAX_DIMS:
            raise (TypeError if self._library_is_8 else RuntimeError)(
                f"a shape has at most {Dims.MAX_DIMS} dimensions, not {len(given)}"
            )
        where = "IExecutionContext::setInputShape"
        is_known = self._engine._tensor(name, where, self) is not None
        problem = self._shape_problem(name, given) if is_known else None
        if problem is not None:
            self._report_usage(where, problem)
        if problem is not None or not is_known:
            self._refused = f"set_input_shape({name!r}, {given}) was refused"
            self._enqueued = None
            return False
        if self._shapes.get(name) != given:
            self._shapes[name] = given
            self._enqueued, self._is_changed = None, True
            self._modified()
        self._refused = None
        return True

    def _shape_problem(self, name: str, given: tuple[int, ...]) -> str | None:
        if name not in self._engine._inputs:
            return f"condition: mEngine.getTensorIOMode(...) == TensorIOMode::kINPUT. Given: {name}"
        if self._profile < 0:
            return "condition: an optimization profile that is set. Profile index must be set explicitly."
        dims = self._engine._tensors[name].dims
        if len(given) != len(dims) or any(
            dim not in (-1, set_) for dim, set_ in zip(dims, given, strict=True)
        ):
            return (
                f"condition: engineDims.d[i] == dims.d[i]. Static dimension mismatch while setting input "
                f"shape for {name}. Set dimensions are {list(given)}. Expected dimensions are {list(dims)}."
            )
        if not any(self._is_within(name, given, profile) for profile in range(len(self._spec.profiles))):
            ranges = (profile[name] for profile in self._spec.profiles)
            valid = (
                f"Valid range for profile {index}: {list(low)}..{list(high)}."
                for index, (low, _, high) in enumerate(ranges)
            )
            return (
                f"condition: satisfyProfile. Set dimension {list(given)} for tensor {name} does not "
                f"satisfy any optimization profiles. {' '.join(valid)}"
            )
        return None

    def _is_within(self, name: str, given: tuple[int, ...], profile: int) -> bool:
        low, _, high = self._spec.profiles[profile][name]
        return all(
            a <= dim <= b or (dim == -1 and self._engine._is_of_8)
            for a, dim, b in zip(low, given, high, strict=True)
        )

    def _reset_shapes(self) -> None:
        """Forget all shapes but the static ones; an engine of TensorRT 8 keeps those that were set."""
        if not (self._shapes and self._engine._is_of_8):
            self._shapes = {io.name: io.dims for io in self._spec.inputs if -1 not in io.dims}
        self._refused = None
        self._enqueued, self._is_changed = None, True

    def _unspecified(self) -> list[str]:
        return [io.name for io in self._spec.inputs if -1 in self._shapes.get(io.name, (-1,))]

    def _shape_of(self, io: TensorIO) -> tuple[int, ...]:
        """Return the shape of a tensor, with -1 for unknown dimensions."""
        if io.name in self._engine._inputs:
            return self._shapes.get(io.name, io.dims)
        if self._spec.function is not None:
            computed = {} if self._unspecified() else self._computed_shapes()
            return io.dims if isinstance(computed, str) else computed.get(io.name, io.dims)
        names = [other.name for other in self._spec.outputs]
        index = names.index(io.name)
        if index < len(self._spec.inputs):
            return self._shapes.get(self._spec.inputs[index].name, io.dims)
        return (*self._shapes.get(self._spec.inputs[0].name, io.dims)[:1], -1)

    def _computed_shapes(self) -> dict[str, tuple[int, ...]] | str:
        """Return the shapes of what the engine's function makes of the inputs, or why it makes nothing."""
        shapes = tuple(self._shapes[io.name] for io in self._spec.inputs)
        if shapes not in self._computed:
            try:
                self._computed[shapes] = self._spec.output_shapes(shapes)
            except Exception as error:  # Of the application's function.
                self._computed[shapes] = f"{self._spec.name}: {error}"
        return self._computed[shapes]

    def _shapes_problem(self) -> str | None:
        """Return why inputs of the current shapes, each of which is accepted, do not fit together."""
        rows = {io.name: self._shapes[io.name][0] for io in self._spec.inputs if self._shapes[io.name]}
        (first, count), *others = rows.items() or [("", 0)]
        for name, other in others:
            if other != count:
                return (
                    f"{first} and {name}: the first dimensions must be equal. Condition '==' violated: "
                    f"{count} != {other}. Instruction: CHECK_EQUAL {count} {other}."
                )
        computed = self._computed_shapes() if self._spec.function is not None else {}
        return computed if isinstance(computed, str) else None

    def _fits_together(self, where: str) -> bool:
        """Return whether the shapes of the inputs fit the profile and each other; report an error if not."""
        for name, shape in self._shapes.items():
            if not self._is_within(name, shape, self._profile):
                low, _, high = self._spec.profiles[self._profile][name]
                self._report_usage(
                    where,
                    "condition: profileMinDims.d[i] <= dimensions.d[i]. Supplied binding dimension "
                    f"{list(shape)} for {name} exceed min ~ max range {list(low)}..{list(high)}.",
                )
                return False
        problem = self._shapes_problem()
        if problem is not None:
            self._report(ErrorCodeTRT.FAILED_EXECUTION, where, "Internal Error", problem)
        return problem is None

    @exclusive
    def infer_shapes(self) -> list[str]:
        """Return the inputs whose shapes are missing.

        :raises RuntimeError: if the shapes do not fit the active profile, or together, after a report.
        :raises ViolationError: in that case under TensorRT 8, whose bindings raise without the GIL.
        """
        missing = self._unspecified()
        if not missing and not self._fits_together("IExecutionContext::inferShapes"):
            if self._library_is_8:
                raise self._violation("infer_shapes is refused, of which the bindings of TensorRT 8.6 crash")
            raise RuntimeError("infer_shapes error code: -1")
        return missing

    @property
    def _library_is_8(self) -> bool:
        return version_of(self._core.library.version) < (10,) and self._core.library.flavour != "tensorrt_rtx"

    @exclusive
    def get_tensor_shape(self, name: str) -> Dims:
        """Return the shape of a tensor, with -1 where it is missing or depends on the data.

        TensorRT 8 returns none of an output, and reports an error, if the inputs' shapes do not fit
        together. It does not check whether they fit the profile.
        """
        where = "IExecutionContext::getTensorShape"
        io = self._engine._tensor(name, where, self)
        if io is not None and self._library_is_8 and name not in self._engine._inputs:
            problem = None if self._unspecified() else self._shapes_problem()
            if problem is not None:
                self._report(ErrorCodeTRT.FAILED_EXECUTION, where, "Internal Error", problem)
                return Dims()
        return Dims() if io is None else Dims(self._shape_of(io))

    def _nbytes_of(self, io: TensorIO) -> int:
        """Return the bytes of a tensor; a packed row is at most as long as the row it comes from."""
        shape = self._shape_of(io)
        if -1 in shape:
            shape = self._shapes[self._spec.inputs[0].name]
        return int(np.prod(shape, dtype=np.int64)) * io.itemsize

    @exclusive
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Switch the profile on a stream, and return ``True``; a violation while its batch is in flight, and
        with TensorRT 8, for a profile that belongs to another context.

        :raises RuntimeError: where the other methods return ``False``, after a report: the bindings do.
        """
        if not self._switch_profile(profile_index, stream_handle):
            raise RuntimeError("Error in set optimization profile async.")
        return True

    def _switch_profile(self, profile_index: int, stream_handle: int) -> bool:
        where = "IExecutionContext::setOptimizationProfileAsync"
        if not self._engine._has_profile(profile_index, where):
            return False
        self._check_stream(stream_handle)
        self._check_order(stream_handle, "its profile is switched")
        if self._report_loss(where):
            return False
        if profile_index == self._profile:
            return True
        self._core.say(
            ILogger.INFO,
            f"Switching optimization profile from: {self._profile} to {profile_index}. Please ensure there "
            "are no enqueued operations pending in this context prior to switching profiles",
        )
        for ticket in self._batches:
            if not ticket.is_done:
                raise self._violation(f"its profile is switched while {ticket.text} is pending")
        if not self._engine._give_profile(profile_index, self):
            self._report(
                ErrorCodeTRT.INVALID_ARGUMENT,
                where,
                "Internal Error",
                f"Profile {profile_index} has been chosen by another IExecutionContext. Use another "
                "profileIndex or destroy the IExecutionContext that use this profile.",
            )
            if self._library_is_8:
                raise self._violation("is refused a profile, of which the bindings of TensorRT 8.6 crash")
            return False
        self._profile, self._has_chosen_profile = profile_index, True
        self._reset_shapes()
        self._modified()
        self._switch = self._core.executor.mark(
            self._number, f"{self.name}'s switch to profile {profile_index}", stream_handle
        )
        self._tickets.add(self._switch)
        return True

    # Memory

    @exclusive
    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Set an address, or 0 to unset it; ``False``, and an error, for an unknown name."""
        if self._engine._tensor(name, "IExecutionContext::setTensorAddress", self) is None:
            return False
        memory = int(memory)
        if memory < 0 or memory % ALIGNMENT:
            raise self._violation(f"the address {memory:#x} of {name!r} is not aligned to {ALIGNMENT} bytes")
        if memory != self._addresses.get(name, 0):
            self._modified()
        self._addresses[name] = memory
        self._enqueued = None
        return True

    @exclusive
    def get_tensor_address(self, name: str) -> int:
        """Return the address of a tensor, or 0 if it is not set; engines of TensorRT 8 report other names."""
        if self._engine._is_of_8:
            self._engine._tensor(name, "IExecutionContext::getTensorAddress", self)
        return self._addresses.get(name, 0)

    @exclusive
    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator | None) -> bool:
        """Set the allocator of an output, or ``None``; ``False``, and an error, if it is not an output."""
        where = "IExecutionContext::setOutputAllocator"
        if self._engine._tensor(name, where, self) is None:
            return False
        if name in self._engine._inputs:
            self._report_usage(where, f"condition: an output tensor. Given: {name}")
            return False
        self._enqueued = None
        if output_allocator is None:
            if self._allocators.pop(name, None) is not None:
                self._modified()
            return True
        require_initialised(output_allocator, IOutputAllocator)
        held = self._allocators.get(name)
        if held is None or held() is not output_allocator:
            self._allocators[name] = weakref.ref(output_allocator)
            self._modified()
        return True

    @exclusive
    def set_device_memory(self, memory: int, size: int) -> None:
        """Set the enqueue memory of a context that was created with ``USER_MANAGED``.

        What is not aligned to 256 bytes, or too small for the active profile, is reported and otherwise
        ignored: the context keeps the memory that it had.

        :raises ViolationError: if the context has enqueue memory of its own.
        """
        memory, size = int(memory), int(size)
        where = "IExecutionContext::setDeviceMemoryV2"
        if not self._engine._has_sizes(where):
            return
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            raise self._violation(
                f"set_device_memory on a context that was created with {self._strategy.name}"
            )
        if memory <= 0:
            self._report_usage(where, "setDeviceMemoryV2: Cannot set memory to nullptr.")
            return
        if memory % ALIGNMENT:
            self._report_usage(where, f"The provided address must be aligned to {ALIGNMENT} bytes.")
            return
        least = self._arena_needed()
        if size < least:
            self._report_usage(
                where,
                "setDeviceMemoryV2: The provided memory size is too small. "
                f"Provided {size}, but expected at least {least}.",
            )
            return
        self._take_memory(memory, size)

    def _take_memory(self, memory: int, size: int) -> None:
        if self._arena != (memory, size):
            self._is_changed = True
            self._modified()
        self._arena = (memory, size)
        self._enqueued = None

    @exclusive
    def _set_v1_memory(self, memory: int) -> None:
        if self._engine._sizes_memory:
            raise self._violation("device_memory has no size, so it cannot be checked: use set_device_memory")
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            text = "Context not created with createExecutionContextWithoutDeviceMemory, cannot set buffer"
            self._report_words(ErrorCodeTRT.INVALID_STATE, text)
            return
        memory, where = int(memory), "IExecutionContext::setDeviceMemory"
        if memory <= 0 or memory % ALIGNMENT_OF_8:
            text = f"setDeviceMemory: memory must be aligned on {ALIGNMENT_OF_8} byte boundary."
            if memory <= 0:
                text = "setDeviceMemory: Cannot set memory to nullptr."
            self._report(ErrorCodeTRT.INVALID_ARGUMENT, where, "Internal Error", text)
            return
        self._take_memory(memory, self._engine._memory_nbytes())

    device_memory = property(
        None,
        _set_v1_memory,
        doc="The older way to set enqueue memory, for engines of versions before 10.1; else a violation.",
    )

    def _arena_needed(self) -> int:
        if self._profile < 0 or not self._engine._sizes_memory:
            return self._engine._memory_nbytes()
        return self._engine._memory_nbytes(self._profile)

    # Streams and events

    @exclusive
    def set_aux_streams(self, aux_streams: Sequence[int]) -> None:
        """Set the streams to use beside the main one, which is used for missing ones. They have to differ."""
        handles = tuple(int(handle) for handle in aux_streams)
        if len(set(handles)) < len(handles):
            raise self._violation(f"the auxiliary streams {handles} are not all different")
        for handle in handles:
            self._check_stream(handle)
        self._aux = handles

    def _check_stream(self, handle: int) -> None:
        problem = self._core.executor.problem_of(handle)
        if problem is not None:
            raise self._violation(problem)

    def _check_order(self, handle: int, what: str) -> None:
        """Check that the batches of this context are ordered by their stream; events do not count."""
        for ticket in self._tickets:
            if not ticket.is_done and ticket.handle != handle:
                raise self._violation(
                    f"{what} on stream {handle} while {ticket.text} is pending on stream {ticket.handle}"
                )

    # Execution

    @exclusive
    def execute_async_v3(self, stream_handle: int) -> bool:
        """Enqueue one batch on a stream; ``False``, and an error, if the library or the device refuses."""
        handle = int(stream_handle)
        self._check_stream(handle)
        if self._core.monitor.take("enqueue"):
            self._report(
                ErrorCodeTRT.FAILED_EXECUTION, ENQUEUE, "Internal Error", "the enqueue failed on demand"
            )
            return False
        if self._report_loss(ENQUEUE) or not self._can_run(handle):
            return False
        self._check_order(handle, "executes")
        if self._core.monitor.take("enqueue-hang"):
            self._core.monitor.hang()
        self._enqueued = self._enqueued or self._prepared()
        asked = self._with_outputs(self._enqueued, handle)
        if asked is None:
            return False
        enqueued, packed_nbytes = asked
        number = next(self._core.library.numbers)
        text = f"batch {number} of {self.name}"
        enqueued = dataclasses.replace(enqueued, number=number, generation=self._generation, text=text)
        temporary = self._take_temporary(handle)
        if temporary is None:
            return False
        try:
            return self._execute(enqueued, handle, temporary, packed_nbytes)
        except DeviceError as error:
            lost = self._core.monitor.lost
            text = lost or str(error)
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, ENQUEUE, "Cuda Runtime", text)
            return False
        finally:
            temporary.close()

    def _pack(self, enqueued: EnqueuedBatch, ticket: Ticket, asked: int) -> bool:
        """Wait until it is known how large the packed output is, and enqueue what writes it.

        Return ``False``, and report an error, if its allocator refuses the memory; the batch then ends too.
        """
        executor, io = self._core.executor, self._spec.outputs[-1]
        rows, address = enqueued.shapes[0][0], 0
        try:
            longest = executor.longest(enqueued, ticket)
            nbytes = rows * longest * io.itemsize
            address = enqueued.outputs[-1] if nbytes <= asked else self._ask(io.name, nbytes, ticket.handle)
            if address:
                self._tell(io.name, (rows, longest))
        finally:
            outputs = (*enqueued.outputs[:-1], address)
            executor.finish(dataclasses.replace(enqueued, outputs=outputs), ticket.handle)
        return address != 0

    def _execute(self, enqueued: EnqueuedBatch, handle: int, temporary: Block, packed_nbytes: int) -> bool:
        """Put a batch on its stream, and wait for it if this engine does so. As :meth:`_pack`."""
        executor = self._core.executor
        if temporary.address:
            executor.touch(temporary.address, temporary.nbytes, handle)
        ticket = executor.enqueue(enqueued, handle, self._aux_streams(handle))
        self._tickets.add(ticket)
        self._batches.add(ticket)
        is_complete = not self._spec.data_dependent or self._pack(enqueued, ticket, packed_nbytes)
        if temporary.address:
            executor.touch(temporary.address, temporary.nbytes, handle)
        if self._waits or (temporary.address and not self._frees_in_order):
            executor.wait(enqueued, ticket)
        return is_complete

    @property
    def _frees_in_order(self) -> bool:
        """Whether temporary storage is allocated and freed in the order of the batch's stream."""
        return isinstance(self.temporary_allocator, IGpuAsyncAllocator)

    def _take_temporary(self, handle: int) -> Block | None:
        """Return temporary storage for one batch; ``None``, and report an error, if it is refused."""
        nbytes = self._spec.temporary_nbytes
        if not nbytes:
            return Block(0, 0, lambda: None)
        allocator = self.temporary_allocator
        if allocator is None and self._temporary_allocator is not None:
            raise self._violation("the allocator of temporary storage was destroyed while it was set")
        if allocator is None:
            block = self._core.allocate(nbytes)
        elif self._frees_in_order:
            address = int(allocator.allocate_async(nbytes, ALIGNMENT, 0, handle) or 0)
            block = Block(address, nbytes, lambda: allocator.deallocate_async(address, handle))
        else:
            address = int(allocator.allocate(nbytes, ALIGNMENT, 0) or 0)
            block = Block(address, nbytes, lambda: allocator.deallocate(address))
        if block is None or not block.address:
            text = f"Requested size was {nbytes} bytes."
            self._report_memory(ENQUEUE, text)
            return None
        return block

    @property
    def _waits(self) -> bool:
        """Whether an enqueue returns only once its batch has ended."""
        return self._spec.waits

    def _can_run(self, handle: int) -> bool:
        """Return whether the engine can run, as the real library would decide; report an error if not."""
        if self._profile < 0:
            self._report_usage(ENQUEUE, "condition: mOptimizationProfile >= 0. No profile is set.")
            return False
        computed = DESCRIBED if self._spec.function is not None else COMPUTED
        unsupported = [io for io in self._spec.inputs if io.on_host or io.dtype not in computed]
        if unsupported:
            self._report(
                ErrorCodeTRT.UNSUPPORTED_STATE,
                ENQUEUE,
                "Internal Error",
                f"the double cannot compute {unsupported[0]}",
            )
            return False
        if self._enqueued is None and not self._is_complete():
            return False
        # After a change the layers update what they hold, which cannot be part of a graph. On a GPU, those of
        # engines of TensorRT 8 were captured nevertheless.
        waits = self._waits or self._spec.data_dependent
        is_changed = self._is_changed and not self._engine._is_of_8
        can_be_captured = self._spec.capturable and not waits and not is_changed
        can_be_captured &= not self._spec.temporary_nbytes or self._frees_in_order
        if not can_be_captured and self._core.executor.is_capturing(handle):
            text = "operation not permitted when stream is capturing"
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, ENQUEUE, "Cuda Runtime", text)
            return False
        return True

    def _is_complete(self) -> bool:
        """Return whether addresses, shapes that fit and enqueue memory are there; report an error if not."""
        for io in (*self._spec.inputs, *self._spec.outputs):
            if not self._addresses.get(io.name) and io.name not in self._allocators:
                kind = "input" if io.name in self._engine._inputs else "output"
                self._report_usage(ENQUEUE, f"condition: an address. None is set for {kind} {io.name}.")
                return False
        missing = self._unspecified()
        if missing:
            self._report_usage(ENQUEUE, f"{UNRESOLVED} Missing: {', '.join(missing)}")
            return False
        if not self._fits_together(ENQUEUE):
            return False
        if self._arena_needed() and not self._arena[0]:
            text = "mEngine.getDeviceMemorySize() == 0 || mExecutionResources->getDeviceMemory() != nullptr"
            self._report_usage(ENQUEUE, f"condition: {text}")
            return False
        return True

    def _prepared(self) -> EnqueuedBatch:
        """Return the next batch, without its numbers. It is made anew only after a change."""
        if self._refused:
            raise self._violation(f"executes although {self._refused}: it would run with the old shapes")
        needed = self._arena_needed()
        address, size = self._arena if needed else (0, 0)
        if size < needed:
            raise self._violation(f"executes with {size} bytes of enqueue memory, but needs {needed}")
        self._check_memory(address, size)
        if self._is_changed and self._spec.change_ns:
            self._changing.wait(self._spec.change_ns / 1e9)
        self._is_changed = False
        weights = self._engine._weights
        assert weights is not None
        return EnqueuedBatch(
            number=0,
            context=self._number,
            generation=0,
            text="",
            spec=self._spec,
            shapes=tuple(self._shapes[io.name] for io in self._spec.inputs),
            inputs=tuple(self._addresses[io.name] for io in self._spec.inputs),
            outputs=tuple(self._addresses.get(io.name, 0) for io in self._spec.outputs),
            arena=address,
            arena_size=size,
            weights=weights.address,
        )

    def _check_memory(self, arena: int, nbytes: int) -> None:
        """Check that all memory is the device's, and that outputs and enqueue memory overlap with nothing."""
        spans = [(arena, nbytes, "the enqueue memory", False)] if nbytes else []
        spans.extend(
            (self._addresses[io.name], self._nbytes_of(io), repr(io.name), io.name in self._engine._inputs)
            for io in (*self._spec.inputs, *self._spec.outputs)
            if self._addresses.get(io.name)
        )
        for start, nbytes, one, _ in spans:
            problem = self._core.executor.memory_problem(start, nbytes)
            if problem is not None:
                raise self._violation(f"{one}: {problem}")
        spans.sort()
        for (start, nbytes, one, is_input), (next_start, _, other, is_other) in itertools.pairwise(spans):
            if next_start < start + nbytes and not (is_input and is_other):
                raise self._violation(f"{one} and {other} overlap in memory")

    def _with_outputs(self, enqueued: EnqueuedBatch, handle: int) -> tuple[EnqueuedBatch, int] | None:
        """Ask the output allocators for memory; return ``None``, and report an error, if one refuses.

        Of an output whose size depends on the data that is a first guess, one value for each row, of which
        the bytes are returned too. More is asked for in the middle of the enqueue.
        """
        guess = 0
        if not self._allocators and not self._spec.data_dependent:
            return enqueued, guess
        outputs = list(enqueued.outputs)
        for index, io in enumerate(self._spec.outputs):
            allocator = self._living_allocator(io.name)
            if allocator is not None and self._engine._is_passed_on:
                raise self._violation(
                    f"executes with an output allocator for {io.name!r}: TensorRT "
                    f"{self._core.library.version} ends the process when an engine of TensorRT 8 calls it"
                )
            if allocator is None:
                if self._spec.data_dependent and index == len(outputs) - 1:
                    raise self._violation(
                        f"executes without an output allocator for {io.name!r}, whose shape depends on data"
                    )
                continue
            shape = self._shape_of(io)
            if -1 in shape:
                nbytes = guess = shape[0] * io.itemsize
            else:
                nbytes = self._nbytes_of(io)
            outputs[index] = self._ask(io.name, nbytes, handle)
            if not outputs[index]:
                return None
            if -1 not in shape:
                self._tell(io.name, shape)
        return dataclasses.replace(enqueued, outputs=tuple(outputs)), guess

    @property
    def _asks_in_order(self) -> bool:
        return not self._library_is_8

    def _living_allocator(self, name: str) -> IOutputAllocator | None:
        held = self._allocators.get(name)
        if held is None:
            return None
        allocator = held()
        if allocator is None:
            raise self._violation(f"the output allocator of {name!r} was destroyed while it was set")
        return allocator

    def _ask(self, name: str, nbytes: int, handle: int) -> int:
        """Return memory of an output's allocator, or 0, after a report, if it refuses.

        The asynchronous method is called if there is one, as by the real library from 10 on, otherwise the
        older one.
        The size is positive even for an empty output, and the memory before is that of
        ``set_tensor_address``.

        :raises ViolationError: for what the bindings tell nobody but the standard error stream.
        """
        allocator: Any = self._living_allocator(name)
        memory, size = self._addresses.get(name, 0), max(1, nbytes)
        alignment = ALIGNMENT_OF_8 if self._library_is_8 else ALIGNMENT
        try:
            if self._asks_in_order and hasattr(allocator, "reallocate_output_async"):
                given = allocator.reallocate_output_async(name, memory, size, ALIGNMENT, handle)
            else:
                given = allocator.reallocate_output(name, memory, size, alignment)
        except Exception as error:
            raise self._violation(f"the output allocator of {name!r} raised {error!r}") from error
        if given is None:
            raise self._violation(
                f"the output allocator of {name!r} returned None, of which the bindings complain on the "
                "standard error stream: refuse memory with 0"
            )
        if given % ALIGNMENT:
            raise self._violation(
                f"the output allocator returned {given:#x}, which is not aligned to {ALIGNMENT} bytes"
            )
        if not given:
            text = f"IOutputAllocator returned nullptr for allocation request of {size} bytes."
            if self._library_is_8:
                self._report(ErrorCodeTRT.INTERNAL_ERROR, ENQUEUE, "Internal Error", text)
            else:
                self._report_memory(ENQUEUE, text)
        return int(given)

    def _tell(self, name: str, shape: tuple[int, ...]) -> None:
        allocator: Any = self._living_allocator(name)
        try:
            allocator.notify_shape(name, Dims(shape))
        except Exception as error:
            raise self._violation(f"notify_shape of {name!r} raised {error!r}") from error

    def _aux_streams(self, handle: int) -> tuple[int, ...]:
        """Return the auxiliary streams that were set; the main one takes the place of missing ones."""
        given = (self._aux or ())[: self._spec.aux_streams]
        if handle in given:
            raise self._violation(f"stream {handle} is both its main stream and an auxiliary one")
        return given
