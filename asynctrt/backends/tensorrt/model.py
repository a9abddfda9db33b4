"""A TensorRT plan as a model: loaded once on a device, with its weights once."""

import ctypes
import logging
import os
import threading
from typing import Any

from asynctrt.backends.tensorrt.context import CLOSE_S, Loaded, TensorRTContext, create_trt_context
from asynctrt.backends.tensorrt.engine import Signature, read_signature
from asynctrt.backends.tensorrt.flavours import Flavour, cuda_runtimes, find_flavour, said_of_runtimes
from asynctrt.backends.tensorrt.memory import DeviceMemory, MemoryStatistics, make_allocator
from asynctrt.backends.tensorrt.messages import Errors, MessageLog, keep_alive, make_log, make_recorder
from asynctrt.backends.tensorrt.options import TensorRTOptions
from asynctrt.backends.tensorrt.plan import Plan, read_plan
from asynctrt.backends.tensorrt.probe import OutputProbe
from asynctrt.backends.tensorrt.refusals import Refused
from asynctrt.devices.base import Device
from asynctrt.errors import DeviceUnavailableError, ModelError, OptionsError, UsageError
from asynctrt.tensors import Dims, TensorSpec

logger = logging.getLogger("asynctrt.tensorrt")


class TensorRTModel:
    """A TensorRT plan, deserialised on a device. Loading blocks: ``asynctrt.open(path)`` does it in a thread.

    A plan is a program: it runs what it brings on the GPU, and nothing confines it. Open plans that you
    built, or that came over a way you trust ("How TensorRT works", Engine Deserialization and the Trust
    Boundary).

    :param plan: the path of a plan, or the plan itself.
    :param device: the CUDA device to load it on.
    :param flavour: the package to use, by name, or a module that has its surface, as the double of
        :mod:`asynctrt.testing.tensorrt` does. Default: as the options say, or else the first installed.
    :param name: what messages and metrics call it. Default: the file's name.
    :param options: all else that can be chosen.
    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is no plan, is damaged, was built for another version or another GPU, or has
        rows that cannot be batched.
    :raises MissingExtraError: if no package that runs it is installed.
    :raises DeviceUnavailableError: if the package or CUDA cannot be used here.
    :raises DeviceMemoryError: if its weights do not fit.
    """

    def __init__(
        self,
        plan: str | os.PathLike[str] | bytes | bytearray | memoryview,
        *,
        device: Device,
        flavour: Any = None,
        name: str | None = None,
        options: TensorRTOptions | None = None,
    ) -> None:
        options = options or TensorRTOptions()
        read = read_plan(plan)
        found = find_flavour(options.flavour if flavour is None else flavour, read.header.tag, read.where)
        if found.is_real and not device.name.startswith("cuda"):
            raise DeviceUnavailableError(
                f"{read.where} is a TensorRT plan, which runs on a CUDA device, not on {device.name!r}. Open "
                "it with device='cuda:0'; on the host, open the ONNX model that it was built from"
            )
        self.platform = "tensorrt_plan"
        self.name = name or read.name
        self.plan = read.header
        self.device = device
        self.flavour = found
        self.options = options
        # Guards what contexts that come and go on several threads change.
        self._lock = threading.Lock()
        self._contexts = 0
        self._loaded: Loaded | None = _load(read, found, device, options)
        try:
            self._is_streaming = _stream_weights(self.name, self._loaded)
            self.signature, self._is_capturable = _study(self.name, self._loaded)
            self._weights_nbytes = _weights_nbytes(self._loaded)
        except BaseException:
            loaded, self._loaded = self._loaded, None
            loaded.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._loaded is None else f"contexts={self._contexts}"
        return f"<TensorRTModel {self.name} {self.flavour.title} on {self.device.name} {state}>"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.signature.outputs

    @property
    def rows_fixed(self) -> int | None:
        return self.signature.rows_fixed

    @property
    def rows_min(self) -> int:
        """The smallest batch that some profile admits."""
        return self.signature.rows_min

    @property
    def rows_max(self) -> int:
        return self.signature.rows_max

    @property
    def enqueue_nbytes(self) -> int:
        return self.signature.enqueue_nbytes

    @property
    def weights_nbytes(self) -> int:
        """Bytes of weights on the device; with weight streaming, those that may be there."""
        return self._weights_nbytes

    @property
    def is_capturable(self) -> bool:
        """Whether batches can be captured into graphs, as far as can be told before trying.

        Not with outputs that TensorRT has to wait for, and not with streamed weights, which nobody has tried.
        """
        return self._is_capturable and not self._is_streaming and not self.signature.unbound

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> int:
        """The profile that a batch runs with: of those that admit it, the one with the least enqueue memory.

        :param dims: the dimensions of one row of each input.
        :raises InputError: when none admits it, with what the profiles do admit.
        """
        return self.signature.profile_of(dims, rows).index

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        """The smallest and the largest batch of each profile that admits rows of these dimensions.

        :param dims: the dimensions of one row of each input.
        :raises InputError: when none does, with what the profiles do admit.
        """
        return self.signature.rows_of(dims)

    def enqueue_nbytes_of(self, profile: int) -> int:
        """Bytes of enqueue memory that the largest batch of a profile needs."""
        return self.signature.profiles[profile].enqueue_nbytes

    def memory_statistics(self) -> MemoryStatistics:
        """What TensorRT holds on the device for this model, beside arenas and slabs.

        :raises UsageError: after :meth:`close`.
        """
        return self._open().memory.statistics()

    def create_context(self, device: Device) -> TensorRTContext:
        loaded = self._open()
        if device is not self.device:
            raise UsageError(
                f"{self!r} has its weights on {self.device!r}, so its contexts cannot be on {device!r}. Open "
                "the plan once for each device"
            )
        with self._lock:
            self._check_persistent_cache(self._contexts + 1)
            self._contexts += 1
        try:
            return TensorRTContext(loaded, self.signature, lambda: self._closed_context(loaded))
        except BaseException:
            self._closed_context(loaded)
            raise

    def close(self) -> None:
        with self._lock:
            loaded, self._loaded = self._loaded, None
            contexts = self._contexts
        if loaded is None:
            return
        if contexts:
            logger.warning("%r is closed before %d of its contexts, which keep its weights", self, contexts)
        else:
            _give_back(self.name, loaded)

    def _open(self) -> Loaded:
        if self._loaded is None:
            raise UsageError(f"{self!r} is closed. Open the plan again")
        return self._loaded

    def _closed_context(self, loaded: Loaded) -> None:
        with self._lock:
            self._contexts -= 1
            is_last = self._loaded is None and not self._contexts
        if is_last:
            _give_back(self.name, loaded)

    def _check_persistent_cache(self, contexts: int) -> None:
        limit = self.options.persistent_cache_limit
        there_is = getattr(self.device, "l2_persisting_nbytes", None)
        if limit is not None and there_is is not None and contexts * limit > there_is:
            raise OptionsError(
                f"persistent_cache_limit is {limit} bytes of L2 cache a context, and {contexts} contexts of "
                f"{self.name!r} would exceed the {there_is} that {self.device.name} sets aside for that. "
                "Lower it, or the number of contexts"
            )


def _load(plan: Plan, flavour: Flavour, device: Device, options: TensorRTOptions) -> Loaded:
    """Deserialise a plan, with everything that its engine will call back."""
    module = flavour.module
    device.activate()
    log = make_log(module, options.verbosity)
    recorder = make_recorder(module)
    memory = DeviceMemory(device, budget=options.memory_budget, watermark=options.memory_watermark)
    allocator = make_allocator(module, memory)
    runtimes: tuple[Any, ...] = (_create_runtime(flavour, device, log),)
    _configure_runtime(runtimes[0], recorder, allocator, options)
    if options.lean_runtime is not None:
        lean = runtimes[0].load_runtime(os.fspath(options.lean_runtime))
        if lean is None:
            raise ModelError(
                f"the lean runtime {os.fspath(options.lean_runtime)!r} cannot be loaded by {flavour.title}. "
                f"Give the libnvinfer_lean of the version that built the plan. {recorder.take()}"
            )
        _configure_runtime(lean, recorder, allocator, options)
        runtimes = (*runtimes, lean)
    engine = runtimes[-1].deserialize_cuda_engine(plan.content)
    errors = recorder.take()
    if engine is None:
        errors = errors.joined(log.take())
        raise Refused(plan, flavour, device, errors, memory.take_refusals(), runtimes[-1]).error()
    keep_alive(engine, allocator, recorder, log, runtimes)
    if errors:
        logger.warning("%s was loaded by %s, and %s", plan.where, flavour.title, errors)
    return Loaded(flavour, device, options, memory, log, recorder, allocator, runtimes, engine)


def _create_runtime(flavour: Flavour, device: Device, log: MessageLog) -> Any:
    """TensorRT's ``Runtime``. Where CUDA cannot be used, it logs an error and gives an empty object."""
    try:
        runtime = flavour.module.Runtime(log)
        said = log.take()
    except (RuntimeError, TypeError) as error:
        runtime, said = None, (*log.take(), str(error))
    if runtime is None or said:
        # Never destroyed, as TensorRT 11.4 was seen to crash in the destructor of the empty object.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
        raise DeviceUnavailableError(
            f"{flavour.title} cannot start on {device.name}. Look at nvidia-smi: the driver must be there, "
            "and as new as the CUDA version that the package is built for (its name ends in -cu12 or -cu13). "
            f"{Errors(tuple(('', text) for text in said))}{said_of_runtimes(cuda_runtimes())}"
        )
    return runtime


def _configure_runtime(runtime: Any, recorder: Any, allocator: Any, options: TensorRTOptions) -> None:
    runtime.error_recorder = recorder
    runtime.gpu_allocator = allocator
    runtime.engine_host_code_allowed = options.allow_host_code
    if options.max_threads is not None:
        runtime.max_threads = options.max_threads


def _stream_weights(name: str, loaded: Loaded) -> bool:
    """Set the budget for weight streaming, if one was asked for; whether weights are streamed."""
    budget, engine = loaded.options.weight_streaming_budget, loaded.engine
    streamable = int(engine.streamable_weights_size)
    if budget is None:
        return streamable > 0 and int(engine.weight_streaming_budget_v2) < streamable
    if not streamable:
        raise OptionsError(
            f"weight_streaming_budget is {budget}, and {name!r} was not built to stream weights. Build it "
            "with BuilderFlag.WEIGHT_STREAMING, or leave the option out"
        )
    try:
        engine.weight_streaming_budget_v2 = budget
    except RuntimeError as error:
        what = f"setting the weight streaming budget of {name!r} to {budget} bytes"
        raise loaded.failed(what, loaded.recorder.take()) from error
    return budget < streamable


def _study(name: str, loaded: Loaded) -> tuple[Signature, bool]:
    """What the engine takes and gives, and whether it lets itself be captured, where it says so.

    A context that runs nothing is made for it, so that an engine which can have none is refused here.
    """
    signature = read_signature(name, loaded.flavour.module, loaded.engine)
    probe = OutputProbe(signature)
    context = create_trt_context(loaded)
    recorder = make_recorder(loaded.flavour.module)
    keep_alive(context, recorder)
    context.error_recorder = recorder
    ask = getattr(context, "is_stream_capturable", None)
    stream, event = loaded.device.create_stream(), loaded.device.create_event()
    try:
        probe.observe(context, stream.handle)
        is_capturable = ask is None or bool(ask(stream.handle))
        stream.record(event)
        event.synchronize(CLOSE_S)
    finally:
        refused = recorder.take()
        # What the context put on the stream is done, so the context can go.
        del context, ask
        stream.close(CLOSE_S)
    if refused:
        logger.debug("%r: some shapes were refused while its outputs were studied: %s", name, refused)
    return signature.with_outputs(probe.outputs()), is_capturable


def _weights_nbytes(loaded: Loaded) -> int:
    engine = loaded.engine
    total = max(0, int(engine.get_engine_stat(loaded.flavour.module.EngineStat.TOTAL_WEIGHTS_SIZE)))
    streamable = int(engine.streamable_weights_size)
    return (
        max(0, total - max(0, streamable - int(engine.weight_streaming_budget_v2))) if streamable else total
    )


def _give_back(name: str, loaded: Loaded) -> None:
    """Drop the engine and its runtime, and look whether all memory came back."""
    loaded.activate_to_close()
    loaded.close()
    held = loaded.memory.statistics()
    if held.blocks and loaded.device.lost is None:
        logger.warning(
            "%r is closed, and TensorRT has not given back %d bytes in %d blocks",
            name,
            held.held_nbytes,
            held.blocks,
        )
