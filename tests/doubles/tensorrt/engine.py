"""The double's ``ICudaEngine``."""

import warnings
import weakref

import numpy as np

from asynctrt.devices.base import aligned
from tests.doubles.tensorrt.context import IExecutionContext
from tests.doubles.tensorrt.core import Block, Core, IRuntimeConfig, checked
from tests.doubles.tensorrt.description import EngineDescription
from tests.doubles.tensorrt.inspector import EngineInspector
from tests.doubles.tensorrt.names import (
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    IErrorRecorder,
    version_of,
)
from tests.doubles.tensorrt.spec import PlanContent
from tests.doubles.tensorrt.versions import of_version


class ICudaEngine(EngineDescription):
    """A deserialised engine. Reading it is thread-safe, and so is creating contexts."""

    def __init__(
        self,
        core: Core,
        recorder: "weakref.ref[IErrorRecorder] | None",
        plan: PlanContent,
        weights: Block | None,
    ) -> None:
        super().__init__(core, recorder, plan, weights)
        self._contexts: weakref.WeakSet[IExecutionContext] = weakref.WeakSet()
        # What was stripped is zero, and so are the answers.
        stripped = plan.spec.stripped_weights_nbytes > 0
        self._coefficients = np.zeros_like(plan.spec.coefficients) if stripped else plan.spec.coefficients
        self._refit_scratch: Block | None = None
        if weights is not None:
            self._write_weights()

    def __del__(self) -> None:
        if getattr(self, "_weights", None) is not None:
            self._report_destroyed_late("ICudaEngine::~ICudaEngine")
        for name in ("_weights", "_refit_scratch"):
            block = getattr(self, name, None)
            if block is not None:
                block.close()

    def __repr__(self) -> str:
        return f"<ICudaEngine {self.name!r} of the double>"

    def _write_weights(self) -> None:
        assert self._weights is not None
        self._core.executor.write(self._weights.address, self._coefficients.tobytes())

    def create_engine_inspector(self) -> EngineInspector:
        """Create what tells of its layers. Lean and dispatch have the method, and not what it returns."""
        if self._core.library.flavour in ("tensorrt_lean", "tensorrt_dispatch"):
            raise TypeError("Unable to convert function return value to a Python type!")
        return EngineInspector([f"{self.name} step {step}" for step in range(self.num_layers)])

    def _is_busy(self) -> bool:
        """Return whether a batch of one of its contexts is in flight."""
        return any(not ticket.is_done for context in list(self._contexts) for ticket in context._tickets)

    @checked
    def create_runtime_config(self) -> IRuntimeConfig:
        """Return settings for :meth:`create_execution_context`."""
        return IRuntimeConfig()

    @checked
    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
        runtime_config: IRuntimeConfig | None = None,
    ) -> IExecutionContext | None:
        """Create a context. Thread-safe.

        One of an engine of a version before 10.1 has enqueue memory of its own, whatever the strategy.

        :raises ViolationError: if its memory is refused, with which the real library crashes.
        """
        if isinstance(strategy, IRuntimeConfig):
            runtime_config = strategy
        if runtime_config is not None:
            strategy = runtime_config.get_execution_context_allocation_strategy()
        if not self._sizes_memory:
            # The real library does not say so, either.
            strategy = ExecutionContextAllocationStrategy.STATIC
        return self._create_context(strategy, runtime_config)

    def _create_context(
        self, strategy: ExecutionContextAllocationStrategy, runtime_config: IRuntimeConfig | None = None
    ) -> IExecutionContext | None:
        where = "ICudaEngine::createExecutionContext"
        if self._report_loss(where):
            return None
        if self._weights is None:
            self._report(
                ErrorCodeTRT.INVALID_STATE, where, "Internal Error", "the engine's weights are missing"
            )
            return None
        if self._core.monitor.take("context-memory"):
            self._report_memory(where, "no further information")
            return None
        wanted = [aligned(self._spec.persistent_nbytes)]
        if strategy == ExecutionContextAllocationStrategy.STATIC:
            wanted.append(self._memory_nbytes())
        else:
            assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED, "the double has no other"
        blocks: list[Block] = []
        for nbytes in wanted:
            block = self._core.allocate(nbytes)
            if block is None:
                for taken in blocks:
                    taken.close()
                raise self._core.monitor.found(
                    f"a context of {self.name!r} was refused {nbytes} bytes while it was created, which "
                    "ends the process with a segmentation fault"
                )
            blocks.append(block)
        own_arena = blocks[1] if len(blocks) > 1 else None
        context = self._new_context(strategy, blocks[0], own_arena, runtime_config)
        with self._lock:
            self._contexts.add(context)
        return context

    def _new_context(
        self,
        strategy: ExecutionContextAllocationStrategy,
        persistent: Block,
        own_arena: Block | None,
        config: IRuntimeConfig | None,
    ) -> IExecutionContext:
        made: IExecutionContext = of_version(IExecutionContext, self._core.library.version)(
            self, strategy, persistent, own_arena
        )
        return made


class OldCudaEngine(ICudaEngine):
    """An engine as libraries before 11 have it: with the calls for enqueue memory that has no size."""

    @property
    def device_memory_size(self) -> int:
        """Bytes of enqueue memory that suffice for every profile.

        :raises SystemError: where the warning of TensorRT 10.1 and later is an error.
        """
        if version_of(self._core.library.version) >= (10, 1):
            try:
                text = "Use Deprecated in TensorRT 10.1. Superseded by get_device_memory_size_v2 instead."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            except DeprecationWarning as error:
                raise SystemError("a built-in method returned a result with an exception set") from error
        return self._memory_nbytes()

    def get_device_memory_size_for_profile(self, profile_index: int) -> int:
        """Return the bytes of enqueue memory for a profile; a violation before 10.1, which crashes."""
        if not self._sizes_memory:
            raise self._core.monitor.found(
                f"get_device_memory_size_for_profile of {self.name!r}, which {self._built_by} built, crashes"
            )
        where = "ICudaEngine::getDeviceMemorySizeForProfile"
        return self._memory_nbytes(profile_index) if self._has_profile(profile_index, where) else 0

    @property
    def _built_by(self) -> str:
        return f"TensorRT {'.'.join(map(str, self._version))}"

    @checked
    def create_execution_context_without_device_memory(self) -> IExecutionContext | None:
        """Create a context that is given enqueue memory; as :meth:`create_execution_context` otherwise."""
        return self._create_context(ExecutionContextAllocationStrategy.USER_MANAGED)


class CudaEngineOf8(OldCudaEngine):
    """An engine as libraries before 10 have it: its contexts have enqueue memory of their own, or none."""

    def create_execution_context(self) -> IExecutionContext | None:  # type: ignore[override]  # As it was.
        """Create a context with enqueue memory of its own; as later versions do otherwise."""
        return super().create_execution_context()

    def get_tensor_vectorized_dim(self, name: str, profile_index: int | None = None) -> int:
        """Return -1. A profile is a violation before library 8.6.1, which crashes."""
        if profile_index is not None and version_of(self._core.library.version) < (8, 6, 1):
            raise self._core.monitor.found(f"a format of {self.name!r} in a profile: TensorRT 8.6.0 crashes")
        return super().get_tensor_vectorized_dim(name)


def engine_class_of(version: str) -> type[ICudaEngine]:
    """Return the class of the engines of a library, but that of TensorRT for RTX."""
    library = version_of(version)
    if library >= (11,):
        return ICudaEngine
    kind: type[ICudaEngine] = of_version(OldCudaEngine if library >= (10,) else CudaEngineOf8, version)
    return kind
