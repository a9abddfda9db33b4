"""What is set on an ``IExecutionContext`` of the double: shapes, profile, memory, streams."""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from asynctrt.devices.base import ALIGNMENT
from asynctrt.testing.tensorrt.core import Block, Reporter, Setting
from asynctrt.testing.tensorrt.engine import ICudaEngine
from asynctrt.testing.tensorrt.monitor import Job, Ticket, ViolationError
from asynctrt.testing.tensorrt.names import (
    Dims,
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    IGpuAllocator,
    IOutputAllocator,
    ProfilingVerbosity,
    require_initialised,
)
from asynctrt.testing.tensorrt.spec import TensorIO

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="ContextState")


def exclusive(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Let a method be a violation while another thread is in one ("How TensorRT works", Threading).

    The calls back that an execution makes may use the context: that is the same thread.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        me = threading.get_ident()
        if self._user == me:
            return method(self, *args, **kwargs)
        if not self._entered.acquire(blocking=False):
            raise self._violation(
                f"used by two threads at once: {method.__name__} while another call is under way"
            )
        self._user = me
        try:
            self._core.check()
            return method(self, *args, **kwargs)
        finally:
            self._user = None
            self._entered.release()

    return call


class ContextState(Reporter):
    """What a context is told before it executes. From one thread at a time."""

    name = Setting("", "What messages call it.")
    debug_sync = Setting(default=False, doc="Of no effect: it is for an enqueue that blocks.")
    enqueue_emits_profile = Setting(default=True, doc="Of no effect: steps have no times of their own.")
    profiler = Setting[Any](None, "Of no effect, as above.")

    def __init__(
        self,
        engine: ICudaEngine,
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
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, weakref.ref[IOutputAllocator]] = {}
        self._arena = (0, 0) if own_arena is None else (own_arena.address, own_arena.nbytes)
        self._refused: str | None = None
        self._sized_for_shapes = False
        self._aux: tuple[int, ...] | None = None
        self._consumed_event = 0
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._switch: Ticket | None = None
        self._generation = 0
        self._job: Job | None = None
        self._number = engine._core.trt.number()
        self.name = f"{self._spec.name} context {self._number}"
        self._persistent_cache_limit = 0
        self._nvtx_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self._temporary_allocator: weakref.ref[IGpuAllocator] | None = None
        self._reset_shapes()
        self._modified()

    def __del__(self) -> None:
        tickets = getattr(self, "_tickets", None)
        if tickets is None:
            return
        pending = [ticket for ticket in tickets if not ticket.is_done]
        if pending and self._core.monitor.lost is None:
            self._core.monitor.note(f"{self.name} was destroyed while {pending[0].text} was in flight")
        self._core.executor.retire(self._number)
        self._persistent.close()
        if self._own_arena is not None:
            self._own_arena.close()

    def __repr__(self) -> str:
        return f"<IExecutionContext {self.name!r} profile={self._profile} shapes={self._shapes}>"

    def _violation(self, message: str) -> ViolationError:
        return self._core.monitor.found(f"{self.name}: {message}")

    def _modified(self) -> None:
        """It is in another state now, for which no graph was captured yet.

        TensorRT leaves undefined what a graph does after a modification of the context that it was captured
        from. To take the modification back is one more: nothing says that all is as it was then.
        """
        self._generation += 1
        self._core.executor.modified(self._number, self._generation)

    # What it is

    @property
    def engine(self) -> ICudaEngine:
        """Of which it is a context."""
        return self._engine

    @property
    def active_optimization_profile(self) -> int:
        """0 until another one was set."""
        return self._profile

    @property
    def all_binding_shapes_specified(self) -> bool:
        """Whether every dynamic input has its shape."""
        return not self._unspecified()

    @property
    def persistent_cache_limit(self) -> int:
        """Bytes of L2 cache that it may keep activations in."""
        return self._persistent_cache_limit

    @persistent_cache_limit.setter
    def persistent_cache_limit(self, limit: int) -> None:
        """Of no effect: the double caches nothing."""
        self._persistent_cache_limit = int(limit)

    @property
    def nvtx_verbosity(self) -> ProfilingVerbosity:
        """What it tells profilers. It cannot be raised above what the engine was built with."""
        return self._nvtx_verbosity

    @nvtx_verbosity.setter
    def nvtx_verbosity(self, verbosity: ProfilingVerbosity) -> None:
        """Raising it is an error that is reported, and changes nothing."""
        if verbosity is not ProfilingVerbosity.DETAILED:
            self._nvtx_verbosity = verbosity
            return
        self._report_usage(
            "IExecutionContext::setNvtxVerbosity", "condition: verbosity <= that of the build."
        )

    @property
    def temporary_allocator(self) -> IGpuAllocator | None:
        """Whoever provides temporary storage. The double needs none."""
        return None if self._temporary_allocator is None else self._temporary_allocator()

    @temporary_allocator.setter
    def temporary_allocator(self, allocator: IGpuAllocator | None) -> None:
        """Of no effect, as above."""
        if allocator is not None:
            require_initialised(allocator, IGpuAllocator)
        self._temporary_allocator = None if allocator is None else weakref.ref(allocator)

    # Shapes and profiles

    @exclusive
    def set_input_shape(self, name: str, shape: Sequence[int] | Dims) -> bool:
        """False, and an error, for a shape that the active profile does not admit."""
        given = tuple(int(dim) for dim in shape)
        problem = self._shape_problem(name, given)
        if problem is not None:
            self._refused = f"set_input_shape({name!r}, {given}) was refused"
            self._report_usage("IExecutionContext::setInputShape", problem)
            return False
        if self._shapes.get(name) != given:
            self._shapes[name] = given
            self._sized_for_shapes = False
            self._job = None
            self._modified()
        self._refused = None
        return True

    def _shape_problem(self, name: str, given: tuple[int, ...]) -> str | None:
        if name not in self._engine._inputs:
            return f"condition: an input tensor's name. Given invalid tensor name: {name}"
        low, _, high = self._spec.profiles[self._profile][name]
        dims = self._engine._tensors[name].dims
        if len(given) != len(dims) or any(
            dim not in (-1, set_) for dim, set_ in zip(dims, given, strict=True)
        ):
            return (
                f"condition: engineDims.d[i] == dims.d[i]. Static dimension mismatch while setting input "
                f"shape for {name}. Set dimensions are {list(given)}. Expected dimensions are {list(dims)}."
            )
        if any(not a <= dim <= b for a, dim, b in zip(low, given, high, strict=True)):
            return (
                f"condition: satisfyProfile. Set dimension {list(given)} for tensor {name} does not "
                f"satisfy any optimization profiles. Valid range for profile {self._profile}: "
                f"{list(low)}..{list(high)}."
            )
        return None

    def _reset_shapes(self) -> None:
        """Only static shapes are known."""
        self._shapes = {io.name: io.dims for io in self._spec.inputs if -1 not in io.dims}
        self._sized_for_shapes = False
        self._refused = None
        self._job = None

    def _unspecified(self) -> list[str]:
        return [io.name for io in self._spec.inputs if io.name not in self._shapes]

    def _shape_of(self, io: TensorIO) -> tuple[int, ...]:
        """The shape as known by now: -1 where it is not."""
        names = [other.name for other in self._spec.outputs]
        if io.name in self._engine._inputs:
            return self._shapes.get(io.name, io.dims)
        index = names.index(io.name)
        if index < len(self._spec.inputs):
            return self._shapes.get(self._spec.inputs[index].name, io.dims)
        return (*self._shapes.get(self._spec.inputs[0].name, io.dims)[:1], -1)

    @exclusive
    def infer_shapes(self) -> list[str]:
        """The inputs whose shapes are missing."""
        return self._unspecified()

    @exclusive
    def get_tensor_shape(self, name: str) -> Dims:
        """As known by now: -1 where a shape is missing or depends on the data."""
        io = self._engine._tensor(name, "IExecutionContext::getTensorShape")
        return Dims() if io is None else Dims(self._shape_of(io))

    @exclusive
    def get_tensor_strides(self, name: str) -> Dims:
        """Row by row."""
        io = self._engine._tensor(name, "IExecutionContext::getTensorStrides")
        if io is None:
            return Dims()
        shape = self._shape_of(io)
        if -1 in shape:
            return Dims([-1] * len(shape))
        return Dims([int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))])

    @exclusive
    def get_max_output_size(self, name: str) -> int:
        """Bytes that an output needs at the most for the shapes that are set; -1 before, and for an input."""
        io = self._engine._tensors.get(name)
        if io is None or name in self._engine._inputs or self._unspecified():
            return -1
        return self._nbytes_of(io)

    def _nbytes_of(self, io: TensorIO) -> int:
        """The upper bound: a packed row is at most as long as the row it comes from."""
        shape = self._shape_of(io)
        if -1 in shape:
            shape = self._shapes[self._spec.inputs[0].name]
        return int(np.prod(shape, dtype=np.int64)) * io.itemsize

    @exclusive
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Switch on a stream. Batches in flight on another stream make it a violation."""
        where = "IExecutionContext::setOptimizationProfileAsync"
        if not self._engine._has_profile(profile_index, where):
            return False
        self._check_stream(stream_handle)
        self._check_order(stream_handle, "its profile is switched")
        if self._report_loss(where):
            return False
        if profile_index == self._profile:
            return True
        if self._strategy == ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE:
            block = self._core.allocate(self._engine.get_device_memory_size_for_profile_v2(profile_index))
            if block is None:
                self._report(ErrorCodeTRT.FAILED_ALLOCATION, where, "OutOfMemory", "no enqueue memory")
                return False
            assert self._own_arena is not None
            self._own_arena.close()
            self._own_arena, self._arena = block, (block.address, block.nbytes)
        self._profile = profile_index
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
        """False, and an error, for an unknown name. 0 unsets. It has to be aligned to 256 bytes."""
        if name not in self._engine._tensors:
            text = f"condition: a tensor's name. Given invalid tensor name: {name}"
            self._report_usage("IExecutionContext::setTensorAddress", text)
            return False
        memory = int(memory)
        if memory < 0 or memory % ALIGNMENT:
            raise self._violation(f"the address {memory:#x} of {name!r} is not aligned to {ALIGNMENT} bytes")
        if memory != self._addresses.get(name, 0):
            self._modified()
        self._addresses[name] = memory
        self._job = None
        return True

    @exclusive
    def get_tensor_address(self, name: str) -> int:
        """0 if none was set."""
        return self._addresses.get(name, 0)

    @exclusive
    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator | None) -> bool:
        """False, and an error, for what is no output. ``None`` unsets."""
        if name not in self._engine._tensors or name in self._engine._inputs:
            text = f"condition: an output tensor's name. Given invalid tensor name: {name}"
            self._report_usage("IExecutionContext::setOutputAllocator", text)
            return False
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
    def get_output_allocator(self, name: str) -> IOutputAllocator | None:
        """``None`` if none was set."""
        held = self._allocators.get(name)
        return None if held is None else held()

    @exclusive
    def set_device_memory(self, memory: int, size: int) -> None:
        """Enqueue memory for a context that was created with USER_MANAGED.

        :raises ViolationError: if it is not aligned to 256 bytes, if it is smaller than any batch could do
            with, and for a context that has its own.
        """
        memory, size = int(memory), int(size)
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            raise self._violation(
                f"set_device_memory on a context that was created with {self._strategy.name}"
            )
        if memory <= 0 or memory % ALIGNMENT:
            raise self._violation(f"the enqueue memory at {memory:#x} is not aligned to {ALIGNMENT} bytes")
        least = min(
            self._engine.get_device_memory_size_for_profile_v2(index)
            for index in range(len(self._spec.profiles))
        )
        if size < least and not self._sized_for_shapes:
            raise self._violation(
                f"enqueue memory of {size} bytes, and no profile can do with less than {least}"
            )
        if self._arena != (memory, size):
            self._modified()
        self._arena = (memory, size)
        self._job = None

    def _set_v1_memory(self, memory: int) -> None:
        raise self._violation("device_memory has no size, so nothing can check it: use set_device_memory")

    device_memory = property(None, _set_v1_memory, doc="The old way to give enqueue memory: a violation.")

    @exclusive
    def update_device_memory_size_for_shapes(self) -> int:
        """What a batch of the shapes that are set needs. From now on, until one changes, that is enough."""
        missing = self._unspecified()
        if missing:
            text = f"condition: all input shapes are specified. Missing: {', '.join(missing)}"
            self._report_usage("IExecutionContext::updateDeviceMemorySizeForShapes", text)
            return 0
        if not self._sized_for_shapes:
            # The real one lays its enqueue memory out anew.
            self._sized_for_shapes = True
            self._modified()
        return self._arena_needed()

    def _arena_needed(self) -> int:
        if not self._sized_for_shapes:
            return self._engine.get_device_memory_size_for_profile_v2(self._profile)
        return self._spec.enqueue_nbytes(self._shapes) + self._engine.weight_streaming_scratch_memory_size

    # Streams and events

    @exclusive
    def set_aux_streams(self, aux_streams: Sequence[int]) -> None:
        """Streams to use beside the main one. They have to differ. Missing ones: the main one is used."""
        handles = tuple(int(handle) for handle in aux_streams)
        if len(set(handles)) < len(handles):
            raise self._violation(f"the auxiliary streams {handles} are not all different")
        for handle in handles:
            self._check_stream(handle)
        self._aux = handles

    @exclusive
    def set_input_consumed_event(self, event: int) -> bool:
        """An event to be recorded once the inputs may be overwritten; 0 unsets."""
        self._consumed_event = int(event)
        return True

    @exclusive
    def get_input_consumed_event(self) -> int:
        """0 if none was set."""
        return self._consumed_event

    def _check_stream(self, handle: int) -> None:
        problem = self._core.executor.problem_of(handle)
        if problem is not None:
            raise self._violation(problem)

    def _check_order(self, handle: int, what: str) -> None:
        """Batches of one context are ordered by their stream. Events are not looked at."""
        for ticket in self._tickets:
            if not ticket.is_done and ticket.handle != handle:
                raise self._violation(
                    f"{what} on stream {handle} while {ticket.text} is pending on stream {ticket.handle}"
                )
