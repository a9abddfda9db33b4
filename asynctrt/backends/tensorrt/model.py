"""A TensorRT plan as a model, loaded once per device."""

import ctypes
import hashlib
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from asynctrt.backends.base import Capabilities
from asynctrt.backends.tensorrt.abilities import Abilities, check_lean_runtime
from asynctrt.backends.tensorrt.context import CLOSE_S, Loaded, TensorRTContext, create_trt_context
from asynctrt.backends.tensorrt.details import EngineDetails, read_details
from asynctrt.backends.tensorrt.engine import Signature, read_signature
from asynctrt.backends.tensorrt.flavours import Flavour, cuda_runtimes, describe_runtimes, find_flavour
from asynctrt.backends.tensorrt.jit import KernelCache, check_options
from asynctrt.backends.tensorrt.manifest import find_manifest, manifest_path
from asynctrt.backends.tensorrt.memory import (
    DeviceMemory,
    MemoryStatistics,
    make_allocator,
    make_temporary_allocator,
)
from asynctrt.backends.tensorrt.messages import (
    LogSubscription,
    TensorRTErrors,
    create_with_errors,
    keep_alive,
    log_of,
    make_recorder,
)
from asynctrt.backends.tensorrt.plan import Plan, read_plan
from asynctrt.backends.tensorrt.plugins import register_plugins
from asynctrt.backends.tensorrt.probe import OutputProbe
from asynctrt.backends.tensorrt.refit import refit
from asynctrt.backends.tensorrt.refusals import Refused
from asynctrt.backends.tensorrt.trust import check_trust
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.devices.base import Device
from asynctrt.errors import DeviceMemoryError, DeviceUnavailableError, ModelError, UsageError
from asynctrt.tensors import Dims

EXCLUSIVE: Final = "it was built so that an optimization profile belongs to one execution context at a time"
SHARING: Final = (
    "build it with TensorRT 8.6 and PreviewFeature.PROFILE_SHARING_0806, or with TensorRT 10 or later, where "
    "profiles are always shared"
)
"""Plans limited to one context, and plans that are not, for messages."""

logger = logging.getLogger("asynctrt.tensorrt")


class TensorRTModel:
    """A TensorRT plan, deserialised on a device. Loading blocks: ``asynctrt.open(path)`` does it in a thread.

    A plan is a program: it runs its own code on the GPU without any sandbox. Open only plans that you built,
    or that come from a source you trust ("How TensorRT works", Engine Deserialization and the Trust
    Boundary).

    :param plan: the path of a plan, its content, or a :class:`Plan`.
    :param device: the CUDA device to load it on.
    :param flavour: the package to use: its name, or a module with the same API. Default: the one in the
        options, or else the first installed.
    :param name: the name used in messages and metrics. Default: the file's name without its suffix.
    :param options: all other settings.
    :raises ModelNotFoundError: if there is no such file.
    :raises UntrustedError: if no method named in the option ``trust`` trusts it.
    :raises ModelError: if it is not a plan, is damaged, was built for another version or another GPU, or has
        rows that cannot be batched.
    :raises MissingExtraError: if no package that can run it is installed.
    :raises DeviceUnavailableError: if the package or CUDA cannot be used here.
    :raises DeviceMemoryError: if its weights do not fit on the device.
    :raises OptionsError: for an option that the package or the plan does not support.
    """

    def __init__(
        self,
        plan: str | os.PathLike[str] | bytes | bytearray | memoryview | Plan,
        *,
        device: Device,
        flavour: Any = None,
        name: str | None = None,
        options: TensorRTOptions | None = None,
    ) -> None:
        options = options or TensorRTOptions()
        read = read_plan(plan)
        check_trust(read.content, read.path, read.where, options.trust)
        found = find_flavour(options.flavour if flavour is None else flavour, read.header.tag, read.where)
        if found.is_real and not device.name.startswith("cuda"):
            raise DeviceUnavailableError(
                f"{read.where} is a TensorRT plan, which runs on a CUDA device, not on {device.name!r}. Open "
                "it with device='cuda:0', or open the ONNX model that it was built from on the host"
            )
        self.platform = "tensorrt_plan"
        self.name = name or read.name
        self.plan = read.header
        self.device = device
        self.flavour = found
        self.options = options
        # Guards the number of contexts, which several threads create and close.
        self._lock = threading.Lock()
        self._contexts = 0
        check_options(found, options)
        self._loaded: Loaded | None = _load(read, found, device, options)
        try:
            refit(read, self._loaded)
            self._loaded.cache = _create_cache(self._loaded)
            self.signature, self.capabilities = _examine(self.name, self._loaded, _names_of_dims(read))
            self.inputs, self.outputs = self.signature.inputs, self.signature.outputs
            self.weights_nbytes = _weights_nbytes(self._loaded)
            """Bytes of weights on the device."""
        except BaseException:
            loaded, self._loaded = self._loaded, None
            loaded.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._loaded is None else f"contexts={self._contexts}"
        return f"<TensorRTModel {self.name} {self.flavour.title} on {self.device.name} {state}>"

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> int:
        return self.signature.profile_of(dims, rows).index

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        return self.signature.rows_of(dims)

    def ranges_of(self, dim: str) -> tuple[tuple[int, int], ...]:
        return self.signature.ranges_of(dim)

    def details(self) -> EngineDetails:
        """Return properties of the engine other than its tensors and profiles.

        :raises UsageError: after :meth:`close`.
        """
        loaded = self._open()
        return read_details(loaded.flavour.module, loaded.engine, loaded.abilities)

    def memory_statistics(self) -> MemoryStatistics:
        """Return how much device memory TensorRT holds for this model, excluding arenas and slabs.

        :raises UsageError: after :meth:`close`.
        """
        return self._open().memory.statistics()

    def create_context(self, device: Device) -> TensorRTContext:
        loaded = self._open()
        if device.whole is not self.device.whole:
            raise UsageError(
                f"{self!r} has its weights on {self.device!r}, so its contexts cannot run on {device!r}. "
                "Open the plan once for each device"
            )
        with self._lock:
            if self._contexts >= (self.capabilities.contexts_max or math.inf):
                raise UsageError(
                    f"{self!r} has its only context already: {EXCLUSIVE}. Close what uses it, or open the "
                    f"plan once more; for several contexts, {SHARING}"
                )
            self._contexts += 1
        try:
            return TensorRTContext(loaded, self.signature, device, lambda: self._closed_context(loaded))
        except BaseException:
            self._closed_context(loaded)
            raise

    def close(self) -> None:
        """Release the weights, and write the runtime cache if there is one. Blocks. Idempotent."""
        with self._lock:
            loaded, self._loaded = self._loaded, None
            contexts = self._contexts
        if loaded is None:
            return
        if contexts:
            logger.warning("%r was closed before %d of its contexts, which keep its weights", self, contexts)
        else:
            _release(self.name, loaded)

    def _open(self) -> Loaded:
        if self._loaded is None:
            raise UsageError(f"{self!r} is closed. Open the plan again")
        return self._loaded

    def _closed_context(self, loaded: Loaded) -> None:
        with self._lock:
            self._contexts -= 1
            is_last = self._loaded is None and not self._contexts
        if is_last:
            _release(self.name, loaded)


def _load(plan: Plan, flavour: Flavour, device: Device, options: TensorRTOptions) -> Loaded:
    """Deserialise a plan, and create all objects that its engine calls back."""
    module = flavour.module
    device.activate()
    log = log_of(module).subscribe(options.verbosity)
    recorder = make_recorder(module)
    memory = DeviceMemory(device, budget=options.memory_budget)
    allocator = make_allocator(module, memory)
    runtimes: tuple[Any, ...] = (_create_runtime(flavour, device, log),)
    register_plugins(flavour, options.plugins, log)
    _configure_runtime(runtimes[0], recorder, allocator, options)
    refused = Refused(plan, flavour, device, TensorRTErrors(()), (), runtimes[0])
    error = refused.before_loading(has_lean_runtime=options.lean_runtime is not None)
    if error is not None:
        raise error
    if options.lean_runtime is not None:
        check_lean_runtime(flavour, Path(options.lean_runtime))
        lean = runtimes[0].load_runtime(os.fspath(options.lean_runtime))
        if lean is None:
            raise ModelError(
                f"the lean runtime {os.fspath(options.lean_runtime)!r} cannot be loaded by {flavour.title}. "
                f"Pass the libnvinfer_lean of the version that built the plan. {recorder.take()}"
            )
        # The bindings do not ensure this, and a traceback may drop the two in any order.
        keep_alive(lean, runtimes[0])
        _configure_runtime(lean, recorder, allocator, options)
        runtimes = (*runtimes, lean)
    engine = runtimes[-1].deserialize_cuda_engine(plan.content)
    errors = recorder.take()
    if engine is None:
        errors = errors.joined(log.take())
        raise Refused(plan, flavour, device, errors, memory.take_refusals(), runtimes[-1]).error()
    keep_alive(engine, allocator, recorder, runtimes)
    if errors:
        logger.warning("%s was loaded by %s, but %s", plan.where, flavour.title, errors)
    return Loaded(
        flavour,
        device,
        options,
        memory,
        log,
        recorder,
        allocator,
        make_temporary_allocator(module, memory),
        runtimes,
        engine,
        Abilities.of(flavour, plan.header),
    )


def _create_cache(loaded: Loaded) -> KernelCache | None:
    """Return the runtime cache named in the options, filled from its file."""
    path = loaded.options.runtime_cache
    if path is None:
        return None
    cache = KernelCache(path, loaded.engine.create_runtime_config())
    if cache.trt is not None:
        keep_alive(cache.trt, loaded.engine)
    return cache


def _create_runtime(flavour: Flavour, device: Device, log: LogSubscription) -> Any:
    """Create TensorRT's ``Runtime``. If CUDA fails, TensorRT logs an error and creates an empty object."""
    runtime, said = create_with_errors(flavour.module.Runtime, flavour.module, log)
    if runtime is None or said:
        # Never destroyed, because TensorRT 11.4 crashes in the destructor of the empty object.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
        raise DeviceUnavailableError(
            f"{flavour.title} cannot start on {device.name}. Check with nvidia-smi that the driver is "
            "installed and at least as new as the CUDA version that the package is built for (its name ends "
            "in -cu12 or -cu13). "
            f"{TensorRTErrors.logged(said)}{describe_runtimes(cuda_runtimes())}"
        )
    return runtime


def _configure_runtime(runtime: Any, recorder: Any, allocator: Any, options: TensorRTOptions) -> None:
    runtime.error_recorder = recorder
    runtime.gpu_allocator = allocator
    runtime.engine_host_code_allowed = options.allow_host_code


def _names_of_dims(plan: Plan) -> Mapping[tuple[str, int], str]:
    """Return the dimension names stored beside a plan, because engines do not keep them."""
    if plan.path is None or not manifest_path(plan.path).is_file():
        return {}
    found = find_manifest(plan.path, hashlib.sha256(plan.content).hexdigest())
    return {} if found is None else found.dimension_names()


def _examine(
    name: str, loaded: Loaded, names_of_dims: Mapping[tuple[str, int], str]
) -> tuple[Signature, Capabilities]:
    """Return the inputs and outputs of the engine, and what its contexts can do.

    This creates contexts without running them, so an engine that cannot have contexts is refused here.
    """
    signature = read_signature(name, loaded.flavour.module, loaded.engine, loaded.abilities, names_of_dims)
    probe = OutputProbe(signature)
    context = create_trt_context(loaded)
    recorder = loaded.recorder.another()
    keep_alive(context, recorder)
    context.error_recorder = recorder
    ask = getattr(context, "is_stream_capturable", None)
    stream, event = loaded.device.create_stream(), loaded.device.create_event()
    try:
        shares_profiles = _shares_profiles(loaded, context)
        probe.observe(context, stream.handle, loaded.abilities, recorder)
        is_capturable = ask is None or bool(ask(stream.handle))
        stream.record(event)
        event.synchronize(CLOSE_S)
    finally:
        # Everything that the context enqueued is done, so the context can be destroyed.
        del context, ask
        stream.close(CLOSE_S)
    if probe.refused:
        logger.debug("%r: some shapes were refused while its outputs were examined: %s", name, probe.refused)
    if not shares_profiles:
        logger.warning(
            "%r runs on one execution context, however many it is opened with, and without CUDA graphs: %s. "
            "To run batches side by side, %s",
            name,
            EXCLUSIVE,
            SHARING,
        )
    signature = replace(signature, outputs=probe.outputs())
    if signature.unbound and not loaded.abilities.allocates_outputs:
        raise ModelError(
            f"the size of output {signature.unbound[0]!r} of {name!r} depends on the data, and "
            f"{loaded.flavour.title} ends the process when a plan of TensorRT 8 asks for its memory. Build "
            "the plan with TensorRT 10 or later, or run it under the version that built it"
        )
    return signature, Capabilities(
        rows_fixed=signature.rows_fixed,
        rows_min=signature.rows_min,
        rows_max=signature.rows_max,
        # If each profile belongs to one context at a time, the only context switches profiles.
        contexts_max=None if shares_profiles else 1,
        is_pure=True,
        # How long an engine takes to enqueue a batch is only known once measured.
        enqueue_may_block=True,
        enqueue_nbytes=signature.enqueue_nbytes,
        # Not if TensorRT must wait for an output's size, or if the graph's separate context cannot have the
        # profile.
        is_capturable=is_capturable and shares_profiles and not signature.unbound,
        has_profiles=True,
        has_ranges=True,
    )


def _shares_profiles(loaded: Loaded, context: Any) -> bool:
    """Return whether several contexts can use one profile at once. Try it if it is not known.

    A new context starts with profile 0, or with none (-1) if another context has exclusive use of that.
    Requesting the profile in that case would end the process under TensorRT 8.6, because its bindings crash
    when they refuse.
    """
    known = loaded.abilities.shares_profiles
    if known is not None:
        return known
    try:
        other = create_trt_context(loaded)
    except DeviceMemoryError as error:
        # An engine opened with several contexts will find no room for them either.
        logger.debug("whether contexts can share a profile was not tried: %s", error)
        return True
    return int(other.active_optimization_profile) == int(context.active_optimization_profile)


def _weights_nbytes(loaded: Loaded) -> int:
    engine = loaded.engine
    total = loaded.abilities.stat(engine, loaded.flavour.module, "TOTAL_WEIGHTS_SIZE")
    if total is None or total < 0:
        # Before it has a context, it holds only its weights.
        return loaded.memory.statistics().held_nbytes
    return total


def _release(name: str, loaded: Loaded) -> None:
    """Drop the engine and its runtime, and warn if TensorRT has not freed all memory."""
    loaded.activate_to_close()
    if loaded.cache is not None and loaded.device.lost is None:
        loaded.cache.save()
    loaded.close()
    held = loaded.memory.statistics()
    if held.blocks and loaded.device.lost is None:
        logger.warning(
            "%r is closed, but TensorRT has not freed %d bytes in %d blocks",
            name,
            held.held_nbytes,
            held.blocks,
        )
