"""What the double has in TensorRT for RTX alone: compiling when a plan is used.

TensorRT for RTX compiles kernels when a context is created, and when it meets new shapes. A runtime cache
keeps them.
"""

import json
import struct
import threading
import weakref
import zlib
from typing import Any, Final

from tests.doubles.tensorrt.context import IExecutionContext
from tests.doubles.tensorrt.core import Block, Core, IRuntimeConfig, checked
from tests.doubles.tensorrt.engine import ICudaEngine
from tests.doubles.tensorrt.monitor import EnqueuedBatch
from tests.doubles.tensorrt.names import (
    CudaGraphStrategy,
    ExecutionContextAllocationStrategy,
    ILogger,
)
from tests.doubles.tensorrt.runtime import Runtime

CACHE: Final = b"asynctrt runtime cache "


class IHostMemory(bytes):
    """Memory that the library has allocated."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self)


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

    @property
    def cuda_graph_strategy(self) -> CudaGraphStrategy:
        """Whether the contexts capture batches by themselves."""
        return self._graphs

    @cuda_graph_strategy.setter
    def cuda_graph_strategy(self, strategy: CudaGraphStrategy) -> None:
        """Set whether they do."""
        self._graphs = CudaGraphStrategy(strategy)


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
        if self._graphs is not CudaGraphStrategy.DISABLED and self._core.executor.is_capturing(handle):
            raise self._violation("is captured, although it captures by itself (cuda_graph_strategy)")
        return super()._can_run(handle)

    def _prepared(self) -> EnqueuedBatch:
        is_changed = self._is_changed
        prepared = super()._prepared()
        if is_changed:
            self._compile(str(prepared.shapes))
        return prepared


class RtxCudaEngine(ICudaEngine):
    """An engine whose contexts compile what they run."""

    @checked
    def create_runtime_config(self) -> RtxRuntimeConfig:
        """Return settings for :meth:`create_execution_context`."""
        return RtxRuntimeConfig(self._core)

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


class RtxRuntime(Runtime):
    """Deserialises plans of the double of TensorRT for RTX."""

    def _engine_class(self) -> type[ICudaEngine]:
        return RtxCudaEngine
