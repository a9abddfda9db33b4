"""Execution contexts: they run batches, each in the arena that it is given for that batch.

What TensorRT keeps from batch to batch (profile, shapes, addresses, enqueue memory) is set only where it
changes, and all of it anew after an error. A context is used from one thread at a time, and by one batch at a
time; that is TensorRT's rule ("How TensorRT works", Threading), and the pool's to keep.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asynctrt.backends.base import TensorMemory
from asynctrt.backends.tensorrt.engine import Profile, Signature, shape_of
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.memory import DeviceMemory, said_of_refusals
from asynctrt.backends.tensorrt.messages import ErrorRecorder, Errors, MessageLog, keep_alive, make_recorder
from asynctrt.backends.tensorrt.options import TensorRTOptions
from asynctrt.backends.tensorrt.outputs import UnboundOutput, make_output_allocator
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
    InternalError,
    UsageError,
)
from asynctrt.tensors import Array, Dims

CLOSE_S: Final = 5.0
"""How long the auxiliary streams of a context that is done may take to end."""

NVTX: Final = {"none": "NONE", "names": "LAYER_NAMES_ONLY", "detailed": "DETAILED"}
"""Our words for the members of ``ProfilingVerbosity``."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(slots=True)
class Loaded:
    """A deserialised engine with all that must outlive it ("How TensorRT works", Object Lifetimes)."""

    flavour: Flavour
    device: Device
    options: TensorRTOptions
    memory: DeviceMemory
    log: MessageLog
    recorder: ErrorRecorder
    allocator: Any
    runtimes: tuple[Any, ...]
    """The library's runtime, and the lean runtime that it loaded, if it did."""
    engine: Any

    def failed(self, what: str, errors: Errors) -> DeviceError:
        """The funnel: the error for a call that TensorRT said failed, after all that is known about it."""
        refusals = self.memory.take_refusals()
        try:
            # A sticky CUDA error shows in the next call of anybody, so the device gets one to notice it by.
            self.device.memory()
        except DeviceError as error:
            logger.debug("the device failed too: %s", error)
        if self.device.lost is not None or errors.is_sticky:
            said = f" {self.device.lost}" if self.device.lost is not None else ""
            return DeviceLostError(
                f"{what} failed, and nothing on {self.device.name} can be trusted in this process any more. "
                f"{errors}.{said or ' Restart the process (a supervisor can)'}"
            )
        if refusals or errors.has_code("FAILED_ALLOCATION"):
            why = said_of_refusals(refusals) or f"The device: {self.device.memory()}"
            return DeviceMemoryError(f"{what} failed for want of memory. {why}. {errors}")
        return ExecutionError(f"{what} failed. {errors}")

    def activate_to_close(self) -> None:
        """Make the device current to give something back; on a device that is lost, that is no matter."""
        try:
            self.device.activate()
        except DeviceError as error:
            logger.debug("the device failed while something was given back: %s", error)

    def close(self) -> None:
        """Let go of the engine, then of what made it, then of what they call back."""
        self.engine = None
        self.runtimes = ()
        self.allocator = None


class TensorRTContext:
    """A context of one engine. It has no enqueue memory of its own; each batch brings an arena.

    :param loaded: the engine; this holds it, and so all that the engine needs.
    :param signature: what the engine takes and gives.
    :param on_close: called once when the context is gone.
    """

    def __init__(self, loaded: Loaded, signature: Signature, on_close: Callable[[], None]) -> None:
        self._loaded = loaded
        self._signature = signature
        self._on_close: Callable[[], None] | None = on_close
        self._guard = threading.Lock()
        self._streams: list[Stream] = []
        self._trt: Any = create_trt_context(loaded)
        self._recorder = make_recorder(loaded.flavour.module)
        # What TensorRT has been told last. None: nothing, or it cannot be relied on.
        self._binding: TensorRTBinding | None = None
        self._profile: int | None = None
        self._shapes: tuple[tuple[Dims, ...], int] | None = None
        self._memory: tuple[int, int] | None = None
        self._is_warm = False
        by_name = {spec.name: spec for spec in signature.outputs}
        self.unbound = {
            name: UnboundOutput(by_name[name], loaded.device, loaded.memory) for name in signature.unbound
        }
        self._output_allocator = (
            make_output_allocator(loaded.flavour.module, self.unbound) if self.unbound else None
        )
        keep_alive(self._trt, self._recorder, self._output_allocator, loaded.engine)
        self._trt.error_recorder = self._recorder
        try:
            self._configure()
        except BaseException:
            self._on_close = None  # It was never there for who made it.
            self.close()
            raise

    def __repr__(self) -> str:
        if self._trt is None:
            return f"<TensorRTContext {self._signature.model} closed>"
        return f"<TensorRTContext {self._signature.model} profile={self._profile} shapes={self._shapes}>"

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "TensorRTBinding":
        assert self._trt is not None, "a closed context is bound to nothing"
        for spec, memory in zip(self._signature.outputs, outputs, strict=True):
            assert (memory is None) == (spec.name in self.unbound), (
                f"{spec} is bound where its shape is known"
            )
        return TensorRTBinding(self, self._signature, inputs, outputs)

    def close(self) -> None:
        if self._trt is None:
            return
        self._loaded.activate_to_close()
        self._binding = None
        self._trt = None
        for output in self.unbound.values():
            output.close()
        for stream in self._streams:
            stream.close(CLOSE_S)
        self._streams.clear()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def enqueue(self, binding: "TensorRTBinding", rows: int, *, stream: Stream, arena: Buffer | None) -> None:
        """Put one batch of a binding of this context on ``stream``.

        Where the stream is being captured, a batch of the same shapes must have been enqueued before, as
        TensorRT does work at the first one that cannot be part of a graph.

        :raises InputError: when no profile admits so many rows of these dimensions.
        :raises ExecutionError: when TensorRT refuses; the next batch is not affected.
        :raises DeviceLostError: when the device is lost.
        """
        profile = binding.profile_of(rows)
        if not self._guard.acquire(blocking=False):
            raise InternalError(f"{self!r} is used by two threads at once")
        done = False
        try:
            self._loaded.device.activate()
            self._prepare(binding, profile, rows, stream, arena)
            for output in binding.unbound:
                output.begin()
            self._call("execute_async_v3", stream.handle)
            for output in binding.unbound:
                output.collect(stream)
            self._is_warm = self._is_warm or not stream.is_capturing
            done = True
        finally:
            if not done:
                self._forget()
            self._guard.release()
        if self._recorder.has_errors:
            logger.warning("%r enqueued a batch, and %s", self, self._recorder.take())

    def _configure(self) -> None:
        """What is set once, when the context is made."""
        loaded, options, trt = self._loaded, self._loaded.options, self._trt
        trt.name = self._signature.model
        if options.persistent_cache_limit is not None:
            trt.persistent_cache_limit = options.persistent_cache_limit
        if options.nvtx is not None:
            trt.nvtx_verbosity = getattr(loaded.flavour.module.ProfilingVerbosity, NVTX[options.nvtx])
        if options.aux_streams == "ours":
            for _ in range(int(loaded.engine.num_aux_streams)):
                self._streams.append(loaded.device.create_stream())
        errors = self._recorder.take()
        if errors:
            raise loaded.failed(f"configuring a context of {self._signature.model!r}", errors)

    def _prepare(
        self,
        binding: "TensorRTBinding",
        profile: Profile,
        rows: int,
        stream: Stream,
        arena: Buffer | None,
    ) -> None:
        """Tell TensorRT what it has not been told yet."""
        shapes = (binding.dims, rows)
        is_other_shape = profile.index != self._profile or shapes != self._shapes
        if stream.is_capturing and (is_other_shape or not self._is_warm):
            raise InternalError(
                f"{self!r} is captured with {rows} rows of {binding.dims}, and was not run with them before"
            )
        if profile.index != self._profile:
            # On the batch's own stream, so that what it copies is there before the batch runs.
            self._call("set_optimization_profile_async", profile.index, stream.handle)
            self._profile, self._shapes, self._binding = profile.index, None, None
        if binding is not self._binding:
            self._bind(binding)
            self._binding = binding
        if is_other_shape:
            self._is_warm = False
            self._set_shapes(binding, rows)
            self._shapes = shapes
        self._set_arena(profile, arena, is_other_shape=is_other_shape)
        if self._streams:
            # TensorRT promises to use them for the next enqueue only.
            self._trt.set_aux_streams([aux.handle for aux in self._streams])

    def _bind(self, binding: "TensorRTBinding") -> None:
        for memory in binding.bound:
            self._call("set_tensor_address", memory.name, memory.address)
        for name in self.unbound:
            self._call("set_output_allocator", name, self._output_allocator)

    def _set_shapes(self, binding: "TensorRTBinding", rows: int) -> None:
        """Set the shapes of inputs, and check that the outputs come to what is bound for them."""
        for memory in binding.inputs:
            self._call("set_input_shape", memory.name, (rows, *memory.dims))
        try:
            missing = self._trt.infer_shapes()
        except RuntimeError as error:
            raise self._failed(f"infer_shapes for {rows} rows of {binding.dims}") from error
        if missing:
            raise self._failed(f"infer_shapes for {rows} rows of {binding.dims} (not known: {missing})")
        for output in binding.outputs:
            if output is None:
                continue  # TensorRT says its shape when the batch is enqueued.
            shape = shape_of(self._trt.get_tensor_shape(output.name))
            if shape != (rows, *output.dims):
                raise ExecutionError(
                    f"output {output.name!r} of {self._signature.model!r} has shape {shape} for {rows} rows "
                    f"of {binding.dims}, and memory is bound for {(rows, *output.dims)}. Its dimensions do "
                    "not follow the input's as they did for every shape that was tried when the plan was "
                    "opened"
                )

    def _set_arena(self, profile: Profile, arena: Buffer | None, *, is_other_shape: bool) -> None:
        """Give TensorRT the enqueue memory of this batch, where it is not what it has already."""
        if arena is None:
            if profile.enqueue_nbytes:
                raise InternalError(f"{self!r} was given no arena, and needs {profile.enqueue_nbytes} bytes")
            return
        memory = arena.address, arena.nbytes
        if arena.nbytes < profile.enqueue_nbytes and (is_other_shape or memory != self._memory):
            # Not enough for every batch of the profile. TensorRT computes what this one needs.
            needed = int(self._trt.update_device_memory_size_for_shapes())
            if not 0 < needed <= arena.nbytes:
                raise InternalError(f"{self!r} has an arena of {arena.nbytes} bytes, and needs {needed}")
            self._memory = None
        if memory != self._memory:
            self._trt.set_device_memory(*memory)
            self._memory = memory

    def _call(self, name: str, *args: Any) -> None:
        """A call that says whether it went well, by its answer or by an exception."""
        try:
            went_well = getattr(self._trt, name)(*args)
        except RuntimeError as error:
            raise self._failed(f"{name}({', '.join(map(repr, args))})") from error
        if not went_well:
            raise self._failed(f"{name}({', '.join(map(repr, args))})")

    def _failed(self, what: str) -> DeviceError:
        return self._loaded.failed(f"{what} of {self._signature.model!r}", self._recorder.take())

    def _forget(self) -> None:
        """After an error: TensorRT is told everything anew."""
        self._binding = self._profile = self._shapes = self._memory = None
        self._is_warm = False
        self._recorder.clear()


class TensorRTBinding:
    """A context tied to one set of tensor memory."""

    def __init__(
        self,
        context: TensorRTContext,
        signature: Signature,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
    ) -> None:
        self._context = context
        self._signature = signature
        self._profiles: dict[int, Profile] = {}
        self.inputs = inputs
        self.outputs = outputs
        self.dims = tuple(memory.dims for memory in inputs)
        self.bound = (*inputs, *(memory for memory in outputs if memory is not None))
        self.unbound = tuple(
            context.unbound[spec.name]
            for spec, memory in zip(signature.outputs, outputs, strict=True)
            if memory is None
        )

    def enqueue(self, rows: int, *, stream: Stream, arena: Buffer | None) -> None:
        self._context.enqueue(self, rows, stream=stream, arena=arena)

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return {output.name: output.array() for output in self.unbound}

    def profile_of(self, rows: int) -> Profile:
        """The profile to run so many rows with.

        :raises InputError: when none admits them.
        """
        profile = self._profiles.get(rows)
        if profile is None:
            # As many entries as a batch can have rows, at the most.
            profile = self._profiles[rows] = self._signature.profile_of(self.dims, rows)
        return profile


def create_trt_context(loaded: Loaded) -> Any:
    """TensorRT's own context, without enqueue memory.

    :raises DeviceMemoryError: when what it keeps for itself does not fit.
    :raises ExecutionError: when TensorRT refuses for another reason.
    """
    if loaded.engine is None:
        raise UsageError("the model is closed. Open the plan again")
    loaded.device.activate()
    strategy = loaded.flavour.module.ExecutionContextAllocationStrategy.USER_MANAGED
    trt = loaded.engine.create_execution_context(strategy)
    if trt is None:
        raise loaded.failed("creating an execution context", loaded.recorder.take())
    return trt
