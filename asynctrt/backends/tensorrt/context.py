"""Execution contexts, which run batches, each in the arena passed with the batch.

State that TensorRT keeps between batches (profile, shapes, addresses, enqueue memory) is set only when it
changes, and completely after an error. A context is used by one thread at a time, for one batch at a time:
TensorRT requires this ("How TensorRT works", Threading), and the pool guarantees it.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from asynctrt._util import clock
from asynctrt._util.pace import Paces
from asynctrt.backends.base import TensorMemory
from asynctrt.backends.tensorrt.abilities import Abilities
from asynctrt.backends.tensorrt.engine import Profile, Signature, shape_of
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.jit import KernelCache, attach_cache, create_config
from asynctrt.backends.tensorrt.memory import STEP_NBYTES, DeviceMemory, describe_refusals, lacks_memory
from asynctrt.backends.tensorrt.messages import (
    ErrorRecorder,
    LogSubscription,
    TensorRTErrors,
    keep_alive,
)
from asynctrt.backends.tensorrt.outputs import UnboundOutput, make_output_allocator
from asynctrt.backends.tensorrt_options import TensorRTOptions
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
"""Seconds to wait for the auxiliary streams when a context is closed."""

ENQUEUE_NS: Final = 250_000
"""The event loop does enqueues that take less than this. A thread for an enqueue costs 50 µs. Four times this
limit is as long as a pump may block the loop."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(slots=True)
class Loaded:
    """A deserialised engine with everything that must outlive it ("How TensorRT works", Object Lifetimes)."""

    flavour: Flavour
    device: Device
    options: TensorRTOptions
    memory: DeviceMemory
    log: LogSubscription
    recorder: ErrorRecorder
    allocator: Any
    temporary_allocator: Any
    """For memory that an enqueue needs only while its batch runs; ``None`` if the library has none."""
    runtimes: tuple[Any, ...]
    """The library's runtime, followed by the lean runtime if it loaded one."""
    engine: Any
    abilities: Abilities
    cache: KernelCache | None = None
    """The store for kernels that TensorRT for RTX compiles."""
    paces: Paces = field(default_factory=lambda: Paces(ENQUEUE_NS, 2))
    """Durations of enqueues, by whether a batch has another shape than the previous one on its context."""

    def failed(self, what: str, errors: TensorRTErrors) -> DeviceError:
        """Return the error for a call that TensorRT reported as failed, from all available information."""
        refusals = self.memory.take_refusals()
        try:
            # A sticky CUDA error shows up in the next CUDA call, so make one to let the device detect it.
            self.device.memory()
        except DeviceError as error:
            logger.debug("the device failed too: %s", error)
        if self.device.lost is not None or errors.is_sticky:
            said = f" {self.device.lost}" if self.device.lost is not None else ""
            return DeviceLostError(
                f"{what} failed, and nothing on {self.device.name} can be trusted in this process any more. "
                f"{errors}.{said or ' Restart the process, for example under a supervisor'}"
            )
        if refusals or errors.is_out_of_memory or lacks_memory(self.device, STEP_NBYTES):
            why = describe_refusals(refusals) or f"The device: {self.device.memory()}"
            return DeviceMemoryError(f"{what} failed for lack of memory. {why}. {errors}")
        return ExecutionError(f"{what} failed. {errors}")

    def activate_to_close(self) -> None:
        """Make the device current in order to free something. A failure is only logged."""
        try:
            self.device.activate()
        except DeviceError as error:
            logger.debug("the device failed while something was freed: %s", error)

    def close(self) -> None:
        """Release the engine, then the runtimes that created it, then the allocator that they call."""
        self.cache = None
        self.engine = None
        self.runtimes = ()
        self.allocator = self.temporary_allocator = None


@dataclass(slots=True)
class _State:
    """A native TensorRT context, and the latest settings it was given.

    A setting is ``None`` if it was never made, or is unknown after an error.
    """

    trt: Any
    profile: int | None = None
    binding: "TensorRTBinding | None" = None
    shapes: tuple[tuple[Dims, ...], int] | None = None
    memory: tuple[int, int] | None = None
    is_warm: bool = False

    def forget(self) -> None:
        """Forget the settings after an error."""
        self.profile = self.binding = self.shapes = self.memory = None
        self.is_warm = False


class TensorRTContext:
    """A context of one engine. It has no enqueue memory; each batch brings an arena.

    Switching the profile of a native context can take longer than a batch. So this keeps one native context
    per profile in use, as long as there is room. Only one of them runs at a time.
    """

    def __init__(
        self, loaded: Loaded, signature: Signature, device: Device, on_close: Callable[[], None]
    ) -> None:
        self._loaded = loaded
        self._device = device
        self._signature = signature
        self._on_close: Callable[[], None] | None = on_close
        self._guard = threading.Lock()
        self._streams: list[Stream] = []
        self._recorder = loaded.recorder.another()
        self._in_place = True
        by_name = {spec.name: spec for spec in signature.outputs}
        self.unbound = {
            name: UnboundOutput(by_name[name], loaded.device, loaded.memory) for name in signature.unbound
        }
        self._output_allocator = (
            make_output_allocator(loaded.flavour.module, self.unbound) if self.unbound else None
        )
        self._now: _State | None = _State(self._create())
        # By the latest profile that each was given, even if an error followed.
        self._by_profile: dict[int, _State] = {}
        try:
            for _ in range(int(loaded.engine.num_aux_streams)):
                self._streams.append(device.create_stream())
        except BaseException:
            self._on_close = None  # The caller never had this context.
            self.close()
            raise

    def __repr__(self) -> str:
        now = self._now
        if now is None:
            return f"<TensorRTContext {self._signature.model} closed>"
        return f"<TensorRTContext {self._signature.model} profile={now.profile} shapes={now.shapes}>"

    @property
    def _trt(self) -> Any:
        """The native context for the profile of the latest batch."""
        assert self._now is not None, "a closed context runs nothing"
        return self._now.trt

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "TensorRTBinding":
        assert self._now is not None, "a closed context cannot be bound"
        for spec, memory in zip(self._signature.outputs, outputs, strict=True):
            assert (memory is None) == (spec.name in self.unbound), (
                f"memory is bound for {spec} exactly if its shape is known"
            )
        return TensorRTBinding(self, self._signature, inputs, outputs)

    def close(self) -> None:
        if self._now is None:
            return
        self._loaded.activate_to_close()
        self._now = None
        self._by_profile.clear()
        on_close, self._on_close = self._on_close, None
        with ExitStack() as rest:
            # Run all of them, even if some raise.
            if on_close is not None:
                rest.callback(on_close)
            for stream in self._streams:
                rest.callback(stream.close, CLOSE_S)
            self._streams = []
            for output in self.unbound.values():
                rest.callback(output.close)

    def enqueue(
        self,
        binding: "TensorRTBinding",
        rows: int,
        *,
        profile: int | None,
        stream: Stream,
        arena: Buffer | None,
    ) -> None:
        """Enqueue one batch of a binding of this context on ``stream``.

        During a capture of the stream, a batch of the same shapes must have been enqueued before: for the
        first one, TensorRT does work that cannot be part of a graph.
        """
        begun_ns = clock.now_ns()
        chosen = binding.profile_for(rows, profile)
        is_change, in_place = self._is_change(binding, chosen, rows), self._in_place
        self._in_place = True
        if not self._guard.acquire(blocking=False):
            raise InternalError(f"{self!r} was used by two threads at once")
        done = False
        try:
            self._loaded.device.activate()
            self._prepare(binding, chosen, rows, stream, arena, is_other_shape=is_change)
            for output in binding.unbound:
                output.begin()
            self._call("execute_async_v3", stream.handle)
            for output in binding.unbound:
                output.collect(rows, stream)
            assert self._now is not None
            self._now.is_warm = self._now.is_warm or not stream.is_capturing
            self._loaded.paces.observe(is_change, clock.now_ns() - begun_ns, in_place=in_place)
            done = True
        finally:
            if not done:
                self._forget()
            self._guard.release()
        if self._recorder.has_errors:
            logger.warning("%r enqueued a batch, but %s", self, self._recorder.take())

    def may_block(self, binding: "TensorRTBinding", rows: int, profile: int | None) -> bool:
        """Return whether to enqueue a batch in a thread, because that blocks or was measured to be slow.

        An enqueue blocks for outputs whose size depends on the data. After a change of shapes or profile,
        TensorRT updates the state of its layers. The behaviour of plugins is unknown.
        """
        if binding.unbound:
            blocks = True
        else:
            chosen = binding.profile_for(rows, profile)
            # Another profile needs a new native context first.
            is_new = bool(self._by_profile) and chosen.index not in self._by_profile
            is_short = self._loaded.paces.is_short(self._is_change(binding, chosen, rows))
            blocks = is_new or not is_short
        self._in_place = not blocks
        return blocks

    def _is_change(self, binding: "TensorRTBinding", profile: Profile, rows: int) -> bool:
        state = self._by_profile.get(profile.index)
        return state is None or state.profile != profile.index or (binding.dims, rows) != state.shapes

    def _create(self) -> Any:
        """Create and configure a native context."""
        loaded = self._loaded
        trt = create_trt_context(loaded)
        keep_alive(trt, self._recorder, self._output_allocator, loaded.temporary_allocator, loaded.engine)
        trt.error_recorder = self._recorder
        trt.name = self._signature.model
        if loaded.temporary_allocator is not None:
            trt.temporary_allocator = loaded.temporary_allocator
        errors = self._recorder.take()
        if errors:
            raise loaded.failed(f"configuring a context of {self._signature.model!r}", errors)
        return trt

    def _prepare(
        self,
        binding: "TensorRTBinding",
        profile: Profile,
        rows: int,
        stream: Stream,
        arena: Buffer | None,
        *,
        is_other_shape: bool,
    ) -> None:
        """Apply all settings that have changed since the previous batch of the profile."""
        if stream.is_capturing and binding.unbound:
            raise InternalError(
                f"{self!r} cannot be captured: a graph does not report the shape of "
                f"{binding.unbound[0].name!r}"
            )
        state = self._by_profile.get(profile.index)
        if stream.is_capturing and (is_other_shape or state is None or not state.is_warm):
            raise InternalError(
                f"{self!r} is being captured with {rows} rows of {binding.dims}, but was not run with them "
                "before"
            )
        self._now = state = state or self._state_for(profile)
        if profile.index != state.profile:
            # On the batch's stream, so that copies made by this call are complete before the batch runs.
            self._call("set_optimization_profile_async", profile.index, stream.handle)
            state.profile, state.shapes, state.binding = profile.index, None, None
        if binding is not state.binding:
            self._bind(binding)
            state.binding = binding
        if is_other_shape:
            state.is_warm = False
            self._set_shapes(binding, rows)
            state.shapes = binding.dims, rows
        self._set_arena(state, profile, arena)
        if self._streams:
            # TensorRT only promises to use them for the next enqueue.
            self._trt.set_aux_streams([aux.handle for aux in self._streams])

    def _state_for(self, profile: Profile) -> _State:
        """Return the native context for a profile: the first one, a new one or, without room, the oldest."""
        assert self._now is not None
        state = self._now
        if self._by_profile:
            try:
                state = _State(self._create())
            except DeviceMemoryError as error:
                logger.debug("%r switches profiles, without room for another context: %s", self, error)
                state = self._by_profile.pop(next(iter(self._by_profile)))
        self._by_profile[profile.index] = state
        return state

    def _bind(self, binding: "TensorRTBinding") -> None:
        for memory in binding.bound:
            self._call("set_tensor_address", memory.name, memory.address)
        for name in self.unbound:
            self._call("set_output_allocator", name, self._output_allocator)

    def _set_shapes(self, binding: "TensorRTBinding", rows: int) -> None:
        """Set the shapes of inputs. The first time, check that the outputs have the shapes that memory is
        bound for: they follow from the inputs' shapes."""
        for memory in binding.inputs:
            self._call("set_input_shape", memory.name, (rows, *memory.dims))
        if rows not in binding.checked:
            self._check_shapes(binding, rows)
            binding.checked.add(rows)

    def _check_shapes(self, binding: "TensorRTBinding", rows: int) -> None:
        what = f"infer_shapes for {rows} rows of {binding.dims}"
        before = self._recorder.num_errors()
        try:
            is_complete = self._loaded.abilities.infers_shapes(self._trt)
        except RuntimeError as error:
            raise self._failed(what) from error
        if not is_complete:
            raise self._failed(f"{what} (some are unknown)")
        for output in binding.outputs:
            if output is None:
                continue  # TensorRT reports the shape when the batch is enqueued.
            shape = shape_of(self._trt.get_tensor_shape(output.name))
            if self._recorder.num_errors() > before:
                raise self._failed(what)
            if shape != (rows, *output.dims):
                raise ExecutionError(
                    f"output {output.name!r} of {self._signature.model!r} has shape {shape} for {rows} rows "
                    f"of {binding.dims}, but memory is bound for {(rows, *output.dims)}. Its dimensions do "
                    "not follow the inputs' as they did for every shape that was tried when the plan was "
                    "opened"
                )

    def _set_arena(self, state: _State, profile: Profile, arena: Buffer | None) -> None:
        """Set the enqueue memory for this batch, unless it is already set."""
        if arena is None:
            if profile.enqueue_nbytes:
                raise InternalError(f"{self!r} was given no arena, but needs {profile.enqueue_nbytes} bytes")
            return
        if arena.nbytes < profile.enqueue_nbytes:
            raise InternalError(
                f"{self!r} was given an arena of {arena.nbytes} bytes, but needs {profile.enqueue_nbytes}"
            )
        memory = arena.address, arena.nbytes
        if memory != state.memory:
            # This returns nothing: on failure TensorRT reports an error and keeps using its previous memory.
            before = self._recorder.num_errors()
            self._loaded.abilities.set_memory(self._trt, *memory)
            if self._recorder.num_errors() > before:
                raise self._failed(f"set_device_memory({memory[0]:#x}, {memory[1]})")
            state.memory = memory

    def _call(self, name: str, *args: Any) -> None:
        """Make a call that reports failure by returning ``False`` or by raising."""
        try:
            succeeded = getattr(self._trt, name)(*args)
        except RuntimeError as error:
            raise self._failed(f"{name}({', '.join(map(repr, args))})") from error
        if not succeeded:
            raise self._failed(f"{name}({', '.join(map(repr, args))})")

    def _failed(self, what: str) -> DeviceError:
        return self._loaded.failed(f"{what} of {self._signature.model!r}", self._recorder.take())

    def _forget(self) -> None:
        """Forget the settings after an error, so that the next batch sets everything again."""
        if self._now is not None:
            self._now.forget()
        self._recorder.clear()


class TensorRTBinding:
    """A context bound to one set of tensor memory."""

    def __init__(
        self,
        context: TensorRTContext,
        signature: Signature,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
    ) -> None:
        self._context = context
        self._signature = signature
        self._profiles: dict[tuple[int, int | None], Profile] = {}
        self.inputs = inputs
        self.outputs = outputs
        self.checked: set[int] = set()
        """The numbers of rows for which the shapes of the outputs were checked."""
        self.dims = tuple(memory.dims for memory in inputs)
        self.bound = (*inputs, *(memory for memory in outputs if memory is not None))
        self.unbound = tuple(
            context.unbound[spec.name]
            for spec, memory in zip(signature.outputs, outputs, strict=True)
            if memory is None
        )

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        self._context.enqueue(self, rows, profile=profile, stream=stream, arena=arena)

    def may_block(self, rows: int, *, profile: int | None) -> bool:
        return self._context.may_block(self, rows, profile)

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return {output.name: output.take() for output in self.unbound}

    def profile_for(self, rows: int, index: int | None) -> Profile:
        """Return the profile with this index, if it accepts ``rows`` rows, or choose one for ``None``."""
        # At most one entry per number of rows and profile.
        profile = self._profiles.get((rows, index))
        if profile is None:
            signature = self._signature
            profile = (
                signature.profile_of(self.dims, rows)
                if index is None
                else signature.checked_profile(index, self.dims, rows)
            )
            self._profiles[rows, index] = profile
        return profile


def create_trt_context(loaded: Loaded) -> Any:
    """Create a native context without enqueue memory."""
    if loaded.engine is None:
        raise UsageError("the model is closed. Open the plan again")
    loaded.device.activate()
    with loaded.memory.room_for_context() as reserve:
        config = create_config(loaded.engine, loaded.flavour)
        if config is None:
            trt = loaded.abilities.create_context(loaded.engine, loaded.flavour.module)
        else:
            if loaded.cache is not None:
                attach_cache(config, loaded.cache)
            trt = loaded.engine.create_execution_context(config)
    if trt is None or reserve.is_overdrawn:
        del trt, config
        raise loaded.failed("creating an execution context", loaded.recorder.take())
    if config is not None:
        keep_alive(trt, config, loaded.cache)
    return trt
