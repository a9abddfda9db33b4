"""Why a plan was not loaded, and what to do: from what its header says, what the library says, and the
device.

``deserialize_cuda_engine`` returns ``None`` and raises nothing. Here that becomes one typed error, which
always ends with what the library said, so that nothing it knew is lost.
"""

import re
from dataclasses import dataclass
from typing import Any

from asynctrt.backends.tensorrt.flavours import Flavour, cuda_runtimes, said_of_runtimes
from asynctrt.backends.tensorrt.memory import MemoryRefusal, said_of_refusals
from asynctrt.backends.tensorrt.messages import Errors
from asynctrt.backends.tensorrt.plan import HEADER_NBYTES, TAG_RTX, Plan, capability_text
from asynctrt.devices.base import Device
from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceUnavailableError,
    ModelError,
)

NO_CUDA = r"CUDA initialization failure|cudaError (?:3|35|36|100|803|804)\b|driver version is insufficient"
"""CUDA cannot be used at all: no driver, too old a driver, or no GPU."""

NO_MEMORY = r"out of memory|OutOfMemory|allocation (?:failed|failure)|failed to allocate"
OTHER_VERSION = (
    r"version tag does not match|stdVersionRead|expecting library version|incompatible serialization version"
)
OTHER_GPU = (
    r"expecting compute \S+ got compute|incompatible device|compute capability|Target GPU SM"
    r"|not compatible with (?:this|the) (?:GPU|device)"
)
HOST_CODE = r"host (?:executable )?code|engineHostCodeAllowed|engine_host_code_allowed"
NO_LEAN = r"EXCLUDE_LEAN_RUNTIME|lean runtime|load_?runtime|not version.compatible"
NO_PLUGIN = r"plugin[^.]*not (?:found|registered)|could not find plugin|getPluginCreator"
"""How TensorRT says each of these: as seen on TensorRT 11.4 and TensorRT for RTX 1.7, or as reported of
others."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that a library did not take, with all that is known about it."""

    plan: Plan
    flavour: Flavour
    device: Device
    errors: Errors
    memory: tuple[MemoryRefusal, ...]
    runtime: Any = None
    """The library's ``Runtime``, to ask for what it thinks of the header, where it can be asked."""

    def error(self) -> AsynctrtError:
        """The error to raise: by who has to act, with what was found, what is here, and the fix."""
        if self.device.lost is not None:
            return self.device.lost
        kind, said = self._cause()
        return kind(
            f"{self.plan.where} cannot be loaded by {self.flavour.title} on {self.device.name}: {said}. "
            f"{self.errors}" + said_of_runtimes(cuda_runtimes())
        )

    def _cause(self) -> tuple[type[AsynctrtError], str]:
        errors = self.errors
        if errors.is_sticky:
            return DeviceLostError, (
                "a CUDA error that ends the use of this GPU by this process came up, now or before. Restart "
                "the process (a supervisor can)"
            )
        if self.memory or errors.has_code("FAILED_ALLOCATION") or errors.search(NO_MEMORY):
            refused = said_of_refusals(self.memory) or f"memory was refused; {self.device.memory()}"
            return DeviceMemoryError, f"there is no room for its weights. {refused}"
        # Whoever cannot use CUDA is not asked what it thinks of the header: it would only say so again.
        diagnoses = frozenset() if errors.search(NO_CUDA) else self._diagnoses()
        if errors.search(NO_CUDA) or diagnoses & {"OLD_CUDA_DRIVER", "OLD_CUDA_RUNTIME"}:
            return DeviceUnavailableError, (
                "CUDA cannot be used by this library. Look at nvidia-smi: the driver must be there, and as "
                "new as the CUDA version that the package is built for (its name ends in -cu12 or -cu13)"
            )
        if "UNSUPPORTED_CC" in diagnoses or self._is_for_other_gpus() or errors.search(OTHER_GPU):
            return ModelError, self._other_gpu()
        if errors.search(HOST_CODE):
            return ModelError, (
                "it brings code that would run in this process. If you built it yourself, open it with "
                "TensorRTOptions(allow_host_code=True); never do so with a plan from somebody else"
            )
        if "VERSION_MISMATCH" in diagnoses or errors.search(OTHER_VERSION):
            return ModelError, self._other_version()
        if errors.search(NO_LEAN):
            return ModelError, (
                "it was built without the lean runtime that it needs. Give the libnvinfer_lean of version "
                f"{self.plan.header.version_text}: TensorRTOptions(lean_runtime=path)"
            )
        if errors.search(NO_PLUGIN):
            return ModelError, (
                "it uses a plugin that is not in this process. Load the plugin's library (ctypes.CDLL) "
                "before, or pack it into the plan when building it"
            )
        if self._is_of_other_version():
            return ModelError, self._other_version()
        return ModelError, "it is damaged, or was not built by this library. Copy it again, or build it anew"

    def _diagnoses(self) -> frozenset[str]:
        """What the library says about the header, where it has ``Runtime.get_engine_validity``."""
        ask = getattr(self.runtime, "get_engine_validity", None)
        names = getattr(self.flavour.module, "EngineInvalidityDiagnostics", None)
        if ask is None or names is None:
            return frozenset()
        try:
            _, bits = ask(self.plan.content[: max(HEADER_NBYTES, int(self.runtime.engine_header_size))])
            return frozenset(
                name for name, member in names.__members__.items() if int(member) and int(bits) & int(member)
            )
        except (RuntimeError, TypeError, ValueError):
            return frozenset()  # It is one more opinion, and not what failed.

    def _is_of_other_version(self) -> bool:
        found, here = self.plan.header.version, _numbers(self.flavour.version)
        return here is not None and found != here

    def _is_for_other_gpus(self) -> bool:
        built_for = self.plan.header.compute_capabilities
        here = getattr(self.device, "compute_capability", None)
        return bool(built_for) and here is not None and tuple(here) not in (built_for or ())

    def _other_gpu(self) -> str:
        here = getattr(self.device, "compute_capability", None)
        gpu = getattr(self.device, "gpu", self.device.name)
        is_here = f"{gpu} has compute capability {capability_text(here)}" if here else f"this is {gpu}"
        built_for = self.plan.header.compute_capabilities
        listed = f" ({', '.join(map(capability_text, built_for))})" if built_for else ""
        if self.plan.header.tag == TAG_RTX:
            supported = getattr(self.flavour.module, "ComputeCapability", None)
            known = [name for name in getattr(supported, "__members__", {}) if name.startswith("SM")]
            versions = f", which supports {', '.join(known)}" if known else ""
            return (
                f"it was built for other GPUs{listed}, and {is_here}. Build it with set_compute_capability "
                f"for this one, if {self.flavour.title} supports it{versions}; else use TensorRT"
            )
        return (
            f"it was built for another GPU{listed}, and {is_here}. Build it on a GPU of this kind, or for "
            "several kinds with HardwareCompatibilityLevel.AMPERE_PLUS or SAME_COMPUTE_CAPABILITY"
        )

    def _other_version(self) -> str:
        found = self.plan.header.version_text
        major, minor = self.plan.header.version[:2]
        flavour = self.flavour
        said = (
            f"it was built by version {found} of {self.plan.header.kind}, and this is {flavour.version}. "
            f"Install the version that built it (pip install '{flavour.distribution}=={major}.{minor}.*'), "
            "or build it anew"
        )
        if flavour.tag == TAG_RTX:
            return said
        if (here := _numbers(flavour.version)) is not None and self.plan.header.version > here:
            return f"{said}; no TensorRT runs plans of a later one"
        return (
            f"{said}, with BuilderFlag.VERSION_COMPATIBLE if later versions shall run it: then open it with "
            "TensorRTOptions(allow_host_code=True)"
        )


def _numbers(version: str) -> tuple[int, ...] | None:
    """The four numbers of a library's version, without what a package adds to them."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else None
