"""The reasons why plans are refused, and their fixes, derived from the header, the library's errors, and the
device.

``deserialize_cuda_engine`` returns ``None`` and never raises. This module turns that into one typed error,
which always ends with the library's own words, so that none of them are lost.
"""

import hashlib
import shlex
from dataclasses import dataclass
from typing import Any, Final

from asynctrt.backends.build_options import BUILDERS
from asynctrt.backends.tensorrt.abilities import V8_6, compatible_since, numbers_of
from asynctrt.backends.tensorrt.flavours import Flavour, cuda_runtimes, describe_runtimes
from asynctrt.backends.tensorrt.manifest import find_manifest, manifest_path
from asynctrt.backends.tensorrt.memory import CODE_NBYTES, MemoryRefusal, describe_refusals, lacks_memory
from asynctrt.backends.tensorrt.messages import TensorRTErrors
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
"""CUDA cannot be used at all: the driver is missing or too old, or there is no GPU."""

OTHER_VERSION = (
    r"version tag does not match|stdVersionRead|expecting library version|incompatible serialization version"
    r"|plan major version does not match"
)
OTHER_PLATFORM = r"platform specific tag mismatch|only supported on the target runtime platform"
TOO_SMALL_GPU = r"only supports \d+ multiprocessors"
OTHER_RUNTIME = r"Cannot deserialize (?:safety engine|serialized engine built with EngineCapability)"
OTHER_GPU = (
    r"expecting compute \S+ got compute|incompatible device|compute capability|Target GPU SM"
    r"|not compatible with (?:this|the) (?:GPU|device|hardware-compatible engine)"
)
HOST_CODE = r"host (?:executable )?code|engineHostCodeAllowed|engine_host_code_allowed"
NO_LEAN = (
    r"EXCLUDE_LEAN_RUNTIME|lean runtime|load_?runtime|not version.compatible"
    r"|old deserialization call on a newer plan"
)
NO_PLUGIN = r"plugin[^.]*not (?:found|registered)|could not find plugin|getPluginCreator"
"""TensorRT's texts for each of these reasons, as seen with TensorRT 11.4 and TensorRT for RTX 1.7, found
among the texts of their libraries, or reported for other versions."""

FAULTS: Final = {
    OTHER_PLATFORM: "it was built on another platform: another operating system or kind of processor. Build "
    "it on this one, or for it (BuilderConfig.runtime_platform)",
    OTHER_RUNTIME: "it was built for another runtime, safety or DLA. Build it with EngineCapability.STANDARD",
    TOO_SMALL_GPU: "it was built on a GPU with more multiprocessors than this one has, which may be a part "
    "(MIG) of a GPU of the same kind. Build it on this one, or on the smallest that is to run it",
}
"""Reasons for a refusal, by the library's texts, with their fixes, which apply whatever else is known."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that the library refused to load, with all that is known about the refusal."""

    plan: Plan
    flavour: Flavour
    device: Device
    errors: TensorRTErrors
    memory: tuple[MemoryRefusal, ...]
    runtime: Any = None
    """The library's ``Runtime``, which can diagnose the header in some versions."""

    def error(self) -> AsynctrtError:
        """Return the error to raise. Its type says who must act, and its message what to do."""
        if self.device.lost is not None:
            return self.device.lost
        error_type, said = self._cause()
        return error_type(
            f"{self.plan.where} cannot be loaded by {self.flavour.title} on {self.device.name}: {said}. "
            f"{self.errors}" + describe_runtimes(cuda_runtimes())
        )

    def before_loading(self, *, has_lean_runtime: bool) -> AsynctrtError | None:
        """Return the error for a plan that its header refuses: deserialising it would run code from it."""
        here, found = numbers_of(self.flavour.version), self._built_by()
        fatal = self._diagnoses() & {"VERSION_MISMATCH", "UNSUPPORTED_CC", "MALFORMED_ENGINE"}
        is_rtx = self.flavour.tag == TAG_RTX
        is_old = not is_rtx and found != here and found[:2] < compatible_since(here)
        is_late = not is_rtx and here is not None and found > here
        if not (is_old or is_late) and (has_lean_runtime or not fatal):
            return None
        return ModelError(
            f"{self.plan.where} cannot be loaded by {self.flavour.title} on {self.device.name}: "
            f"{self._fault_of_the_plan(fatal)}. It was refused by its header, before the library loaded it"
        )

    def _cause(self) -> tuple[type[AsynctrtError], str]:
        errors = self.errors
        if errors.is_sticky:
            return DeviceLostError, (
                "a CUDA error has made this GPU unusable for the rest of this process. Restart the process, "
                "for example under a supervisor"
            )
        if self.memory or errors.is_out_of_memory:
            refused = describe_refusals(self.memory) or f"An allocation failed; {self.device.memory()}"
            return DeviceMemoryError, f"the device has no room for its weights. {refused}"
        # If the library cannot use CUDA, do not ask it about the header: it would only repeat that.
        diagnoses = frozenset() if errors.search(NO_CUDA) else self._diagnoses()
        if errors.search(NO_CUDA) or diagnoses & {"OLD_CUDA_DRIVER", "OLD_CUDA_RUNTIME"}:
            return DeviceUnavailableError, (
                "the library cannot use CUDA. Check with nvidia-smi that the driver is installed and at "
                "least as new as the CUDA version that the package is built for (its name ends in -cu12 or "
                "-cu13)"
            )
        if not diagnoses and lacks_memory(self.device, CODE_NBYTES):
            return DeviceMemoryError, f"the device has hardly any memory left. {self.device.memory()}"
        return ModelError, self._fault_of_the_plan(diagnoses)

    def _fault_of_the_plan(self, diagnoses: frozenset[str]) -> str:
        errors = self.errors
        for words, said in FAULTS.items():
            # For a plan of another version, the library reports the platform first.
            if errors.search(words) and not (words is OTHER_PLATFORM and self._is_of_other_version()):
                return said
        if "UNSUPPORTED_CC" in diagnoses or self._is_for_other_gpus() or errors.search(OTHER_GPU):
            return self._other_gpu()
        if errors.search(HOST_CODE):
            return (
                "it contains code that would run in this process. If you built the plan yourself, open it "
                "with TensorRTOptions(allow_host_code=True); never do so with a plan from another source"
            )
        if "VERSION_MISMATCH" in diagnoses or errors.search(OTHER_VERSION) or errors.search(OTHER_PLATFORM):
            return self._other_version()
        if errors.search(NO_LEAN):
            return (
                "it was built without the lean runtime that it needs. Pass the path of libnvinfer_lean, "
                f"version {self.plan.header.version_text}: TensorRTOptions(lean_runtime=path)"
            )
        if errors.search(NO_PLUGIN):
            return (
                "it uses a plugin that is not registered in this process. Name the library that has it, "
                "TensorRTOptions(plugins=[path])"
            )
        if self._is_of_other_version():
            return self._other_version()
        return "it is damaged, or was not built by this library. Copy it again, or rebuild it"

    def _diagnoses(self) -> frozenset[str]:
        """Return the library's diagnoses of the header, if it has ``Runtime.get_engine_validity``."""
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
            return frozenset()  # The diagnosis is optional, and the actual failure was the loading.

    def _built_by(self) -> tuple[int, ...]:
        """Return the version in the header, with as many numbers as the library's: TensorRT 8 tells three."""
        here = numbers_of(self.flavour.version)
        return self.plan.header.version[: len(here)] if here else self.plan.header.version

    def _is_of_other_version(self) -> bool:
        here = numbers_of(self.flavour.version)
        return here is not None and self._built_by() != here

    def _is_for_other_gpus(self) -> bool:
        built_for = self.plan.header.compute_capabilities
        here = self.device.compute_capability
        return bool(built_for) and here is not None and tuple(here) not in (built_for or ())

    def _other_gpu(self) -> str:
        here = self.device.compute_capability
        gpu = self.device.gpu or self.device.name
        this_gpu = f"{gpu} has compute capability {capability_text(here)}" if here else f"this is {gpu}"
        built_for = self.plan.header.compute_capabilities
        listed = f" ({', '.join(map(capability_text, built_for))})" if built_for else ""
        if self.plan.header.tag == TAG_RTX:
            supported = getattr(self.flavour.module, "ComputeCapability", None)
            known = [name for name in getattr(supported, "__members__", {}) if name.startswith("SM")]
            versions = f", which supports {', '.join(known)}" if known else ""
            return (
                f"it was built for other GPUs{listed}, and {this_gpu}. Rebuild it for this GPU if "
                f"{self.flavour.title} supports it{versions}: {self._rebuild()} --compute-capabilities "
                f"{capability_text(here) if here else 'X.Y'}; otherwise use TensorRT"
            )
        return (
            f"it was built for another GPU{listed}, and {this_gpu}. Build it on the same kind of GPU: "
            f"{self._rebuild()}; or for several kinds, with --hardware-compatibility ampere-plus or "
            "same-compute-capability (HardwareCompatibilityLevel.AMPERE_PLUS or SAME_COMPUTE_CAPABILITY)"
        )

    def _other_version(self) -> str:
        found = self.plan.header.version_text
        major, minor = self.plan.header.version[:2]
        flavour = self.flavour
        said = (
            f"it was built by version {found} of {self.plan.header.kind}, and this is {flavour.version}. "
            f"Install the version that built it (pip install '{flavour.distribution}=={major}.{minor}.*'), "
            f"or rebuild it: {self._rebuild()}"
        )
        if flavour.tag == TAG_RTX:
            return said
        if self.plan.header.version[:2] < V8_6:
            return f"{said}; plans of versions before 8.6 run on no other"
        if self.plan.header.version[:2] < compatible_since(numbers_of(flavour.version)):
            return f"{said}; the last version that runs plans of TensorRT {major} is TensorRT 10"
        if (here := numbers_of(flavour.version)) is not None and self._built_by() > here:
            return f"{said}; TensorRT does not run plans that a later version built"
        return (
            f"{said}. Build it with --version-compatible (BuilderFlag.VERSION_COMPATIBLE) if later versions "
            "are to run it, and then open it with TensorRTOptions(allow_host_code=True); or, if it was built "
            f"so without its lean runtime, with lean_runtime= the libnvinfer_lean of version {found}"
        )

    def _rebuild(self) -> str:
        """Return the command that builds the plan again, as far as it is known."""
        path = self.plan.path
        manifest = None
        if path is not None and manifest_path(path).is_file():
            manifest = find_manifest(path, hashlib.sha256(self.plan.content).hexdigest())
        model = "MODEL.onnx" if manifest is None else manifest.model
        words = ["asynctrt", "build", model, "-o", "PLAN" if path is None else str(path)]
        if self.flavour.name in BUILDERS:
            words += ["--flavour", self.flavour.name]
        for profile in () if manifest is None else manifest.profiles:
            words += ["--profiles", profile]
        # Users may paste it into a shell, and the manifest is not trusted.
        return "".join(filter(str.isprintable, shlex.join(words)))
