"""The double's ``ICudaEngine``."""

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from asynctrt.devices.base import aligned
from asynctrt.testing.tensorrt.core import Block, Core, IRuntimeConfig, Reporter, checked
from asynctrt.testing.tensorrt.names import (
    DataType,
    Dims,
    EngineCapability,
    EngineStat,
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    HardwareCompatibilityLevel,
    IErrorRecorder,
    ProfilingVerbosity,
    TensorIOMode,
    TensorLocation,
)
from asynctrt.testing.tensorrt.spec import Plan, TensorIO

if TYPE_CHECKING:
    from asynctrt.testing.tensorrt.context import IExecutionContext


class ICudaEngine(Reporter):
    """A deserialised engine. Looking at it is thread-safe, and so is creating contexts."""

    def __init__(
        self, core: Core, recorder: "weakref.ref[IErrorRecorder] | None", plan: Plan, weights: Block
    ) -> None:
        super().__init__(core, recorder)
        self._spec = plan.spec
        self._weights: Block | None = weights
        self._tensors: Mapping[str, TensorIO] = {
            io.name: io for io in (*plan.spec.inputs, *plan.spec.outputs)
        }
        self._inputs = frozenset(io.name for io in plan.spec.inputs)
        self._budget = plan.spec.streamable_weights_nbytes
        self._contexts: weakref.WeakSet[IExecutionContext] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._write_weights()

    def __del__(self) -> None:
        weights = getattr(self, "_weights", None)
        if weights is not None:
            weights.close()

    def __repr__(self) -> str:
        return f"<ICudaEngine {self.name!r} of the double>"

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> str:
        return self.get_tensor_name(index)

    def _write_weights(self) -> None:
        assert self._weights is not None
        self._core.executor.write(self._weights.address, self._spec.coefficients.tobytes())

    @property
    def name(self) -> str:
        """The network's name."""
        return self._spec.name

    @property
    def num_io_tensors(self) -> int:
        """Inputs and outputs."""
        return len(self._tensors)

    @property
    def num_layers(self) -> int:
        """As many as there are steps."""
        return self._spec.steps

    @property
    def num_optimization_profiles(self) -> int:
        """At least one."""
        return len(self._spec.profiles)

    @property
    def num_aux_streams(self) -> int:
        """Streams it uses beside the one that it is given."""
        return self._spec.aux_streams

    @property
    def refittable(self) -> bool:
        """Never."""
        return False

    @property
    def engine_capability(self) -> EngineCapability:
        """Unrestricted."""
        return EngineCapability.STANDARD

    @property
    def tactic_sources(self) -> int:
        """None."""
        return 0

    @property
    def profiling_verbosity(self) -> ProfilingVerbosity:
        """The default of a build."""
        return ProfilingVerbosity.LAYER_NAMES_ONLY

    @property
    def hardware_compatibility_level(self) -> HardwareCompatibilityLevel:
        """As built."""
        return HardwareCompatibilityLevel[self._spec.hardware_compatibility]

    @property
    def device_memory_size_v2(self) -> int:
        """Enqueue memory that suffices for every profile, scratch of weight streaming included."""
        sizes = [self._spec.profile_nbytes(index) for index in range(len(self._spec.profiles))]
        return max(sizes) + self.weight_streaming_scratch_memory_size

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        """Enqueue memory that suffices for one profile; 0, and an error, if there is no such profile."""
        if not self._has_profile(profile_index, "ICudaEngine::getDeviceMemorySizeForProfileV2"):
            return 0
        return self._spec.profile_nbytes(profile_index) + self.weight_streaming_scratch_memory_size

    def get_engine_stat(self, stat: EngineStat = EngineStat.TOTAL_WEIGHTS_SIZE) -> int:
        """The size of the weights; -1 for what only an engine without weights has."""
        return self._spec.weights_nbytes if stat == EngineStat.TOTAL_WEIGHTS_SIZE else -1

    @property
    def streamable_weights_size(self) -> int:
        """Weights that a budget may leave on the host."""
        return self._spec.streamable_weights_nbytes

    @property
    def weight_streaming_scratch_memory_size(self) -> int:
        """What streaming needs in the enqueue memory of each context: room for one step's weights."""
        streamable = self._spec.streamable_weights_nbytes
        return aligned(-(-streamable // self._spec.steps)) if self._budget < streamable else 0

    def get_weight_streaming_automatic_budget(self) -> int:
        """All of them, if there is room on the device; otherwise half of what is free."""
        return min(self.streamable_weights_size, self._core.device.memory().room_nbytes // 2)

    @property
    def weight_streaming_budget_v2(self) -> int:
        """Bytes of streamable weights that are on the device."""
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        """Move weights. A ``RuntimeError``, and an error, while there are contexts."""
        where = "ICudaEngine::setWeightStreamingBudgetV2"
        if self._contexts:
            self._report_usage(where, "condition: no active IExecutionContext. The budget cannot change now.")
            raise RuntimeError("Failed to set weight streaming budget!")
        if budget < 0:
            self._report_usage(where, "condition: gpuMemoryBudget >= 0.")
            raise RuntimeError("Failed to set weight streaming budget!")
        budget = min(budget, self._spec.streamable_weights_nbytes)
        fixed = self._spec.weights_nbytes - self._spec.streamable_weights_nbytes
        old, self._weights = self._weights, None
        assert old is not None
        old.close()
        weights = self._core.allocate(aligned(fixed + budget))
        if weights is None:
            self._report(
                ErrorCodeTRT.FAILED_ALLOCATION, where, "OutOfMemory", f"Requested size was {budget} bytes."
            )
            raise RuntimeError("Failed to set weight streaming budget!")
        self._weights = weights
        self._budget = budget
        self._write_weights()

    def get_tensor_name(self, index: int) -> str:
        """Inputs first."""
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """Input, output, or none for a name that it does not know."""
        if self._tensor(name, "ICudaEngine::getTensorIOMode") is None:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        """Its type; FLOAT, and an error, for a name that it does not know."""
        tensor = self._tensor(name, "ICudaEngine::getTensorDataType")
        return DataType.FLOAT if tensor is None else tensor.data_type

    def get_tensor_shape(self, name: str) -> Dims:
        """Its dimensions as built: -1 where they are dynamic."""
        tensor = self._tensor(name, "ICudaEngine::getTensorShape")
        return Dims() if tensor is None else Dims(tensor.dims)

    def get_tensor_location(self, name: str) -> TensorLocation:
        """On the device, unless it is a shape tensor."""
        tensor = self._tensor(name, "ICudaEngine::getTensorLocation")
        return TensorLocation.HOST if tensor is not None and tensor.on_host else TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        """Whether its values are needed for the shapes of others."""
        tensor = self._tensor(name, "ICudaEngine::isShapeInferenceIO")
        return tensor is not None and tensor.on_host

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """None: no output shares its memory with an input."""
        self._tensor(name, "ICudaEngine::getAliasedInputTensor")
        return None

    def get_tensor_bytes_per_component(self, name: str, profile_index: int = 0) -> int:
        """Bytes of an element."""
        tensor = self._tensor(name, "ICudaEngine::getTensorBytesPerComponent")
        return -1 if tensor is None else tensor.itemsize

    def get_tensor_components_per_element(self, name: str, profile_index: int = 0) -> int:
        """Nothing is vectorised."""
        return 1 if self._tensor(name, "ICudaEngine::getTensorComponentsPerElement") else -1

    def get_tensor_vectorized_dim(self, name: str, profile_index: int = 0) -> int:
        """Nothing is vectorised."""
        self._tensor(name, "ICudaEngine::getTensorVectorizedDim")
        return -1

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        """The smallest, the usual and the largest shape of an input in a profile."""
        where = "ICudaEngine::getProfileShape"
        if name not in self._inputs or not self._has_profile(profile_index, where):
            self._report_usage(where, f"condition: an input and a profile. Given: {name}, {profile_index}")
            return []
        return [Dims(shape) for shape in self._spec.profiles[profile_index][name]]

    @checked
    def create_runtime_config(self) -> IRuntimeConfig:
        """A configuration for :meth:`create_execution_context`."""
        return IRuntimeConfig()

    @checked
    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
        runtime_config: IRuntimeConfig | None = None,
    ) -> "IExecutionContext | None":
        """A new context; ``None``, and an error, when its memory was refused. From any thread."""
        if isinstance(strategy, IRuntimeConfig):
            runtime_config = strategy
        if runtime_config is not None:
            strategy = runtime_config.get_execution_context_allocation_strategy()
        where = "ICudaEngine::createExecutionContext"
        if self._report_loss(where):
            return None
        if self._weights is None:
            self._report(
                ErrorCodeTRT.INVALID_STATE, where, "Internal Error", "the engine's weights are not there"
            )
            return None
        fails = self._core.monitor.take("context-memory")
        wanted = [aligned(self._spec.persistent_nbytes)]
        if strategy == ExecutionContextAllocationStrategy.STATIC:
            wanted.append(self.device_memory_size_v2)
        elif strategy == ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE:
            wanted.append(self.get_device_memory_size_for_profile_v2(0))
        blocks: list[Block] = []
        for nbytes in wanted:
            block = (
                None if fails else Block(0, 0, lambda: None) if not nbytes else self._core.allocate(nbytes)
            )
            if block is None:
                for taken in blocks:
                    taken.close()
                text = f"Requested size was {nbytes} bytes."
                self._report(ErrorCodeTRT.FAILED_ALLOCATION, where, "OutOfMemory", text)
                return None
            blocks.append(block)
        context = self._core.trt.IExecutionContext(
            self, strategy, blocks[0], blocks[1] if len(blocks) > 1 else None
        )
        with self._lock:
            self._contexts.add(context)
        return context

    def _tensor(self, name: str, where: str) -> TensorIO | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            self._report_usage(where, f"condition: a tensor's name. Given invalid tensor name: {name}")
        return tensor

    def _has_profile(self, index: int, where: str) -> bool:
        if 0 <= index < len(self._spec.profiles):
            return True
        self._report_usage(
            where,
            f"condition: profileIndex >= 0 && profileIndex < {len(self._spec.profiles)}. Given: {index}",
        )
        return False
