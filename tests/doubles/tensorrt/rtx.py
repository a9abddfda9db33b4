"""What the double has in TensorRT for RTX alone: compiling when a plan is used, and weights that come later.

TensorRT for RTX compiles kernels when a context is created, and when it meets new shapes. A runtime cache
keeps them. Weights can be loaded after the engine, unloaded, and loaded again.
"""

import json
import struct
import threading
import weakref
import zlib
from typing import Any, Final

from asynctrt.devices.base import aligned
from tests.doubles.tensorrt.context import ENQUEUE, IExecutionContext
from tests.doubles.tensorrt.core import Block, Core, IRuntimeConfig, checked
from tests.doubles.tensorrt.engine import ICudaEngine
from tests.doubles.tensorrt.monitor import EnqueuedBatch
from tests.doubles.tensorrt.names import (
    CudaGraphStrategy,
    DataType,
    DynamicShapesKernelSpecializationStrategy,
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    ILogger,
)
from tests.doubles.tensorrt.runtime import Runtime
from tests.doubles.tensorrt.spec import PlanContent

CACHE: Final = b"asynctrt runtime cache "
DEFERRED: Final = (
    "ICudaEngine::{} is only valid for engines deserialized with IRuntime::setDeferredWeightsLoading(true)."
)


class IHostMemory(bytes):
    """Memory that the library has allocated."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self)

    @property
    def dtype(self) -> DataType:
        """The type of its elements."""
        return DataType.INT8


class IRuntimeCache:
    """Kernels that were compiled, for contexts to share. Thread-safe."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._kernels: set[str] = set()

    def serialize(self) -> IHostMemory:
        """Return its content."""
        self._core.check()
        with self._lock:
            body = json.dumps([*self._environment(), *sorted(self._kernels)]).encode()
        return IHostMemory(CACHE + struct.pack("<I", zlib.crc32(body)) + body)

    def deserialize(self, blob: Any) -> bool:
        """Take content; ``False``, and nothing changed, if it is damaged or of another library or GPU."""
        self._core.check()
        content = bytes(blob)
        checksum, body = content[len(CACHE) : len(CACHE) + 4], content[len(CACHE) + 4 :]
        if not content.startswith(CACHE) or checksum != struct.pack("<I", zlib.crc32(body)):
            self._core.say(ILogger.ERROR, "IRuntimeCache::deserialize: the blob is invalid or corrupt.")
            return False
        environment = self._environment()
        version, capability, *kernels = json.loads(body)
        if [version, capability] != environment:
            self._core.say(ILogger.ERROR, "IRuntimeCache::deserialize: the environment does not match.")
            return False
        with self._lock:
            self._kernels = set(kernels)
        return True

    def reset(self) -> bool:
        """Forget everything."""
        with self._lock:
            self._kernels.clear()
        return True

    def _environment(self) -> list[str]:
        major, minor = self._core.library.compute_capability
        return [self._core.version, f"{major}.{minor}"]

    def _note(self, kernel: str) -> bool:
        """Keep a kernel; return whether it was there already."""
        with self._lock:
            is_known = kernel in self._kernels
            self._kernels.add(kernel)
            return is_known


class RtxRuntimeConfig(IRuntimeConfig):
    """Settings for creating a context."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self._cache: weakref.ref[IRuntimeCache] | None = None
        self._graphs = CudaGraphStrategy.DISABLED
        self._specialisation = DynamicShapesKernelSpecializationStrategy.LAZY

    def create_runtime_cache(self) -> IRuntimeCache:
        """Return an empty cache, which has no effect until it is set."""
        return IRuntimeCache(self._core)

    def set_runtime_cache(self, cache: IRuntimeCache | None = None) -> bool:
        """Keep what the contexts compile in this cache, which has to outlive them."""
        if cache is None:
            return False
        if not isinstance(cache, IRuntimeCache):
            raise TypeError("set_runtime_cache(): incompatible function arguments")
        self._cache = weakref.ref(cache)
        return True

    def get_runtime_cache(self) -> IRuntimeCache | None:
        """Return the cache that was set."""
        return None if self._cache is None else self._cache()

    @property
    def cuda_graph_strategy(self) -> CudaGraphStrategy:
        """Whether the contexts capture batches by themselves."""
        return self._graphs

    @cuda_graph_strategy.setter
    def cuda_graph_strategy(self, strategy: CudaGraphStrategy) -> None:
        """Set whether they do."""
        self._graphs = CudaGraphStrategy(strategy)

    @property
    def dynamic_shapes_kernel_specialization_strategy(self) -> DynamicShapesKernelSpecializationStrategy:
        """When the contexts compile kernels for new shapes."""
        return self._specialisation

    @dynamic_shapes_kernel_specialization_strategy.setter
    def dynamic_shapes_kernel_specialization_strategy(
        self, strategy: DynamicShapesKernelSpecializationStrategy
    ) -> None:
        """Set when they do."""
        self._specialisation = DynamicShapesKernelSpecializationStrategy(strategy)


class RtxExecutionContext(IExecutionContext):
    """A context that compiles what it runs."""

    def __init__(
        self,
        engine: ICudaEngine,
        strategy: ExecutionContextAllocationStrategy,
        persistent: Block,
        own_arena: Block | None,
        config: RtxRuntimeConfig,
    ) -> None:
        super().__init__(engine, strategy, persistent, own_arena)
        self._cache = config._cache
        self._graphs = config.cuda_graph_strategy
        self._specialisation = config.dynamic_shapes_kernel_specialization_strategy
        self._compile("any shape")

    def __del__(self) -> None:
        cache = getattr(self, "_cache", None)
        if cache is not None and cache() is None:
            self._core.monitor.note(f"the runtime cache of {self.name} was destroyed before it")
        super().__del__()

    def is_stream_capturable(self, stream: int) -> bool:
        """Return whether a batch can be captured on a stream."""
        return self._spec.capturable and not self._waits

    def _compile(self, what: str) -> None:
        kernel = f"{self._spec.name} bias={self._spec.bias} steps={self._spec.steps}: {what}"
        cache = None
        if self._cache is not None:
            cache = self._cache()
            if cache is None:
                raise self._violation("its runtime cache was destroyed before it")
        if cache is None or not cache._note(kernel):
            self._core.library.compiled.append(kernel)

    def _can_run(self, handle: int) -> bool:
        if self._engine._weights is None:
            text = (
                "Cannot run inference with deferred weight loading. Load weights before calling enqueueV3()."
            )
            self._report(ErrorCodeTRT.INVALID_STATE, ENQUEUE, "API Usage Error", text)
            return False
        if self._graphs is not CudaGraphStrategy.DISABLED and self._core.executor.is_capturing(handle):
            raise self._violation("is captured, although it captures by itself (cuda_graph_strategy)")
        return super()._can_run(handle)

    def _prepared(self) -> EnqueuedBatch:
        is_changed = self._is_changed
        prepared = super()._prepared()
        if is_changed and self._specialisation is not DynamicShapesKernelSpecializationStrategy.NONE:
            self._compile(str(prepared.shapes))
        return prepared

    def _refresh(self) -> None:
        """Take note that the weights have gone, or lie elsewhere: no graph may be launched that has them."""
        self._enqueued, self._is_changed = None, True
        self._modified()


class RtxCudaEngine(ICudaEngine):
    """An engine whose weights may be loaded after it."""

    def __init__(
        self, core: Core, recorder: Any, plan: PlanContent, weights: Block | None, content: bytes
    ) -> None:
        super().__init__(core, recorder, plan, weights)
        self._is_deferred = weights is None
        self._content = zlib.crc32(content)

    @property
    def weights_loaded(self) -> bool:
        """Whether the weights are on the device."""
        return self._weights is not None

    @checked
    def load_weights(self, blob: Any) -> bool:
        """Load the weights from the plan; ``False``, and an error, unless they are deferred and unloaded."""
        where = "ICudaEngine::loadWeights"
        if not self._is_deferred or self._report_loss(where):
            return self._refuse(where, DEFERRED.format("loadWeights"))
        if self._weights is not None:
            return self._refuse(where, "!mWeightsLoaded")
        if not isinstance(blob, bytes | bytearray | memoryview):
            raise TypeError("load_weights(): incompatible function arguments")
        if zlib.crc32(blob) != self._content:
            return self._refuse(where, "Engine plan blob does not contain a kWEIGHTS section.")
        nbytes = aligned(self._spec.weights_nbytes)
        weights = self._core.allocate(nbytes)
        if weights is None:
            self._report_memory(where, f"Requested size was {nbytes} bytes.")
            return False
        self._weights = weights
        self._write_weights()
        self._refresh()
        return True

    @checked
    def unload_weights(self) -> bool:
        """Free the weights; ``False``, and an error, unless they are deferred and loaded.

        :raises ViolationError: while a batch of one of its contexts is in flight.
        """
        where = "ICudaEngine::unloadWeights"
        if not self._is_deferred or self._report_loss(where):
            return self._refuse(where, DEFERRED.format("unloadWeights"))
        if self._weights is None:
            return self._refuse(where, "mWeightsLoaded")
        if self._is_busy():
            raise self._core.monitor.found(f"the weights of {self.name!r} were unloaded while a batch ran")
        weights, self._weights = self._weights, None
        weights.close()
        self._refresh()
        return True

    @checked
    def create_runtime_config(self) -> RtxRuntimeConfig:
        """Return settings for :meth:`create_execution_context`."""
        return RtxRuntimeConfig(self._core)

    @property
    def _can_lack_weights(self) -> bool:
        return self._is_deferred

    def _new_context(
        self,
        strategy: ExecutionContextAllocationStrategy,
        persistent: Block,
        own_arena: Block | None,
        config: IRuntimeConfig | None,
    ) -> RtxExecutionContext:
        config = config or RtxRuntimeConfig(self._core)
        assert isinstance(config, RtxRuntimeConfig), "an engine makes its own configs"
        return RtxExecutionContext(self, strategy, persistent, own_arena, config)

    def _refuse(self, where: str, why: str) -> bool:
        self._report(ErrorCodeTRT.INVALID_STATE, where, "API Usage Error", why)
        return False

    def _refresh(self) -> None:
        for context in list(self._contexts):
            assert isinstance(context, RtxExecutionContext), "they are made by `_new_context`"
            context._refresh()


class RtxRuntime(Runtime):
    """Deserialises plans of the double of TensorRT for RTX."""

    _defers = False

    @property
    def defer_weights_loading(self) -> bool:
        """Whether engines that are deserialised get their weights later."""
        return self._defers

    @defer_weights_loading.setter
    def defer_weights_loading(self, defer: bool) -> None:
        """Set whether they do."""
        self._defers = defer

    def _new_engine(self, plan: PlanContent, content: bytes) -> ICudaEngine | None:
        if not self._defers:
            return super()._new_engine(plan, content)
        where, why = "IRuntime::deserializeCudaEngine", None
        if plan.spec.stripped_weights_nbytes:
            why = "Deferred weight loading is not supported for weight-stripped engines."
        elif plan.spec.streamable_weights_nbytes:
            why = "Deferred weight loading combined with weight streaming is not yet supported."
        if why is not None:
            self._report(ErrorCodeTRT.INVALID_STATE, where, "API Usage Error", why)
            return None
        return self._made(plan, None, content)

    def _made(self, plan: PlanContent, weights: Block | None, content: bytes) -> ICudaEngine:
        return RtxCudaEngine(self._core, self._recorder, plan, weights, content)
