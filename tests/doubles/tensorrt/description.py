"""The part of the double's ``ICudaEngine`` that describes tensors, profiles and sizes."""

import threading
import weakref
from collections.abc import Mapping
from typing import Final

from tests.doubles.tensorrt.core import Block, Core, Reporter
from tests.doubles.tensorrt.names import (
    DataType,
    Dims,
    EngineCapability,
    EngineCapabilityOf8,
    EngineStat,
    ErrorCodeTRT,
    HardwareCompatibilityLevel,
    IErrorRecorder,
    TensorIOMode,
    TensorLocation,
    version_of,
)
from tests.doubles.tensorrt.spec import MAY_SHARE_PROFILES, RTX_TAG, PlanContent, TensorIO, tag_of

SIZES_MEMORY: Final = (10, 1)
"""The first version whose engines are given enqueue memory with its size, whatever library runs them."""


class EngineDescription(Reporter):
    """The read-only part of an engine, which is all that its contexts need."""

    def __init__(
        self,
        core: Core,
        recorder: "weakref.ref[IErrorRecorder] | None",
        plan: PlanContent,
        weights: Block | None,
    ) -> None:
        super().__init__(core, recorder)
        self._spec = plan.spec
        self._weights = weights
        self._tensors: Mapping[str, TensorIO] = {
            io.name: io for io in (*plan.spec.inputs, *plan.spec.outputs)
        }
        self._inputs = frozenset(io.name for io in plan.spec.inputs)
        self._version = version_of(plan.version)
        self._is_rtx = tag_of(core.library.flavour) == RTX_TAG
        self._sizes_memory = self._is_rtx or self._version >= SIZES_MEMORY
        # TensorRT 8 runs its engines, also under a later library, which passes on the calls.
        self._is_of_8 = not self._is_rtx and self._version < (10,)
        self._is_passed_on = self._is_of_8 and version_of(core.library.version) >= (10,)
        self._lock = threading.Lock()
        self._owners: dict[int, weakref.ref[Reporter]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> str:
        return list(self._tensors)[index]

    @property
    def name(self) -> str:
        """The network's name."""
        return self._spec.name

    @property
    def num_io_tensors(self) -> int:
        """The number of inputs and outputs."""
        return len(self._tensors)

    @property
    def num_layers(self) -> int:
        """The number of layers: one for each step."""
        return self._spec.steps

    @property
    def num_optimization_profiles(self) -> int:
        """The number of profiles: at least one."""
        return len(self._spec.profiles)

    @property
    def num_aux_streams(self) -> int:
        """The number of streams that it uses beside the batch's."""
        return self._spec.aux_streams

    @property
    def refittable(self) -> bool:
        """Whether its weights can be replaced: if it was built for that, or without them."""
        return self._spec.refittable or self._spec.stripped_weights_nbytes > 0

    @property
    def engine_capability(self) -> EngineCapability | EngineCapabilityOf8:
        """The capability that it was built for: unrestricted."""
        is_old = not self._is_rtx and version_of(self._core.library.version) < (10,)
        return EngineCapabilityOf8.DEFAULT if is_old else EngineCapability.STANDARD

    @property
    def hardware_compatibility_level(self) -> HardwareCompatibilityLevel:
        """The other GPUs that it was built to run on."""
        return HardwareCompatibilityLevel[self._spec.hardware_compatibility]

    @property
    def device_memory_size_v2(self) -> int:
        """Bytes of enqueue memory that suffice for every profile; 0, and an error, before version 10.1."""
        return self._memory_nbytes() if self._has_sizes("ICudaEngine::getDeviceMemorySizeV2") else 0

    def _memory_nbytes(self, profile: int | None = None) -> int:
        """Return the bytes of enqueue memory that suffice for a profile, or for all of them."""
        profiles = range(len(self._spec.profiles)) if profile is None else (profile,)
        return max(map(self._spec.profile_nbytes, profiles))

    def _has_sizes(self, where: str) -> bool:
        """Return whether the engine knows a call of 10.1; report an error if not."""
        if not self._sizes_memory:
            text = f"::{where.partition('::')[2]} is only supported from TensorRT 10.1 onwards."
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, where, "Internal Error", text)
        return self._sizes_memory

    def _knows(self, since: tuple[int, int], where: str) -> bool:
        """Return whether the engine knows a call of another version; report an error if not."""
        if self._is_rtx or self._version >= since:
            return True
        text = f"Not supported for engine created before TensorRT {since[0]}.{since[1]}."
        self._report(ErrorCodeTRT.INVALID_ARGUMENT, where, "API Usage Error", text)
        return False

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        """Return the bytes of enqueue memory that suffice for a profile; 0, and an error, if unknown."""
        where = "ICudaEngine::getDeviceMemorySizeForProfileV2"
        if not self._has_sizes(where) or not self._has_profile(profile_index, where):
            return 0
        return self._memory_nbytes(profile_index)

    def get_engine_stat(self, stat: EngineStat = EngineStat.TOTAL_WEIGHTS_SIZE) -> int:
        """Return the size of the weights, or of those that were stripped; -1 if none were.

        -1, and an error, from an engine of a version before 10.14.
        """
        if not self._knows((10, 14), "ICudaEngine::getEngineStat"):
            return -1
        if stat == EngineStat.TOTAL_WEIGHTS_SIZE:
            return self._spec.weights_nbytes
        return self._spec.stripped_weights_nbytes or -1

    def get_tensor_name(self, index: int) -> str | None:
        """Return the name of a tensor, inputs first; ``None``, and an error, if there are not as many."""
        if 0 <= index < len(self._tensors):
            return list(self._tensors)[index]
        self._report_usage(
            "ICudaEngine::getIOTensorName",
            "condition: index >= 0 && index < getNbIOTensors(). getIOTensorName is called with invalid index "
            f"{index}.",
        )
        return None

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """Return whether a tensor is an input or an output; ``NONE``, and an error, for an unknown name."""
        if self._tensor(name, "ICudaEngine::getTensorIOMode") is None:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        """Return the type of a tensor; ``FLOAT``, and an error, for an unknown name."""
        tensor = self._tensor(name, "ICudaEngine::getTensorDataType")
        return DataType.FLOAT if tensor is None else tensor.data_type

    def get_tensor_shape(self, name: str) -> Dims:
        """Return the dimensions of a tensor as built, with -1 for dynamic ones."""
        tensor = self._tensor(name, "ICudaEngine::getTensorShape")
        return Dims() if tensor is None else Dims(tensor.dims)

    def get_tensor_location(self, name: str) -> TensorLocation:
        """Return where a tensor's data has to be: on the device, unless it is a shape tensor."""
        tensor = self._tensor(name, "ICudaEngine::getTensorLocation")
        return TensorLocation.HOST if tensor is not None and tensor.on_host else TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        """Return whether the shapes of other tensors depend on the values of this one."""
        tensor = self._tensor(name, "ICudaEngine::isShapeInferenceIO")
        return tensor is not None and tensor.on_host

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """Return ``None``: no output shares its memory with an input. With an error before 10.15."""
        where = "ICudaEngine::getAliasedInputTensor"
        if self._knows((10, 15), where):
            self._tensor(name, where)
        return None

    def get_tensor_vectorized_dim(self, name: str, profile_index: int = 0) -> int:
        """Return -1, as no tensor is vectorised."""
        self._tensor(name, "ICudaEngine::getTensorVectorizedDim")
        return -1

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        """Return the smallest, the optimal and the largest shape of an input in a profile.

        Three empty ones, each with an error, for an unknown profile or name; an engine of TensorRT 8 does not
        report an output.
        """
        return [self._profile_shape(name, profile_index, which) for which in range(3)]

    def _profile_shape(self, name: str, profile: int, which: int) -> Dims:
        where = "ICudaEngine::getProfileShape"
        if not self._has_profile(profile, where) or self._tensor(name, where) is None:
            return Dims()
        if name in self._inputs:
            return Dims(self._spec.profiles[profile][name][which])
        if not self._is_of_8:
            self._report_usage(where, f"condition: an input. Given: {name}")
        return Dims()

    def _tensor(self, name: str, where: str, reporter: Reporter | None = None) -> TensorIO | None:
        """Return a tensor; ``None``, and report an error, if there is none with that name."""
        tensor = self._tensors.get(name)
        if tensor is None:
            text = f"Given invalid tensor name: {name}. Get valid tensor names with getIOTensorName()"
            (reporter or self)._report(ErrorCodeTRT.INVALID_ARGUMENT, where, "Internal Error", text)
        return tensor

    def _give_profile(self, index: int, context: Reporter) -> bool:
        """Note that a context has a profile, and no other; ``False`` if another context has it."""
        if self._is_rtx or (self._spec.shares_profiles and self._version >= MAY_SHARE_PROFILES):
            return True
        with self._lock:
            owner = self._owners[index]() if index in self._owners else None
            if owner is not None and owner is not context:
                return False
            self._owners = {at: of for at, of in self._owners.items() if of() is not context}
            self._owners[index] = weakref.ref(context)
        return True

    def _has_profile(self, index: int, where: str) -> bool:
        if 0 <= index < len(self._spec.profiles):
            return True
        self._report_usage(
            where,
            f"condition: profileIndex >= 0 && profileIndex < {len(self._spec.profiles)}. Given: {index}",
        )
        return False
