"""Build a plan from an ONNX model with TensorRT's builder and its parser.

Two traps of the library shape this module. An error recorder beside an ``OnnxParser`` crashes the process
when the network is destroyed, so this module uses none and reads errors from the log. The builder's callbacks
must not raise. A build only ends early with its process (``build_process``).
"""

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import read_regular, write_whole
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.tensorrt.abilities import asks_parser
from asynctrt.backends.tensorrt.flavours import Flavour, cuda_runtimes, describe_runtimes
from asynctrt.backends.tensorrt.messages import (
    ERRORS_MAX,
    LogSubscription,
    TensorRTErrors,
    callback,
    create_with_errors,
    keep_alive,
    log_of,
)
from asynctrt.backends.tensorrt.plan import capability_text
from asynctrt.backends.tensorrt.plugins import register_plugins
from asynctrt.backends.tensorrt.profiles import NetworkTensor, Range, profile_text, profiles_of
from asynctrt.backends.tensorrt.refusals import NO_CUDA, NO_PLUGIN
from asynctrt.devices.base import Device
from asynctrt.errors import BuildError, DeviceMemoryError, DeviceUnavailableError, OptionsError

CACHE_NBYTES_MAX: Final = 4 << 30

FAULTS: Final = {
    r"deserialize|failed to parse the onnx": "this is not an ONNX model, or a damaged one. Export it again",
    r"opset": (
        "the model's opset is too old. Export it with opset 17, or convert it: "
        "onnx.version_converter.convert_version(model, 17)"
    ),
    r"importInput|convertDtype|datatype|data type": (
        "TensorRT does not have this type (strings, for example). Do that part outside the model, or cast to "
        "float32 or int32 in it"
    ),
    r"does not support": (
        "TensorRT has the operator, but not in this form. Export the model without that, or run it with ONNX "
        "Runtime"
    ),
    r"unsupported_node\b|plugin not found|could not find plugin|plugin registry|no importer": (
        "this version of TensorRT has no such operator, or not in this form. Export the model with another "
        "opset or without it, name a library that has it (plugins), or run the model with ONNX Runtime"
    ),
    r"external|open file|weights file": (
        "weights outside the model were not found. Keep them in the model's folder, under their names"
    ),
    r"shape|dimension": (
        "its shapes cannot be found or are not allowed. Simplify the model (onnx.shape_inference, "
        "onnxsim), and export it with fixed sizes where they are known"
    ),
}
"""Advice for a parser error, by patterns for its text and code; the first match applies."""

CANNOT_HERE: Final = r"MyelinCheckException.*CUDA_SUCCESS|CHECK\(status == CUDA_SUCCESS\)"
"""The error of TensorRT for RTX when it needs a GPU to build after all."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(frozen=True, slots=True)
class BuildStep:
    """The progress of a build."""

    phase: str
    parent: str | None
    """The phase that contains this one, or ``None``."""
    done: int
    total: int


Report = Callable[[BuildStep], object]
"""A callback for each step of a build, called from the building thread or from threads of TensorRT."""


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build."""

    content: bytes
    """The plan."""
    flavour: str
    version: str
    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[NetworkTensor, ...]
    profiles: tuple[dict[str, Range], ...]
    plugins: tuple[str, ...] = ()
    """Libraries of TensorRT's own plugins packed into a version-compatible plan."""


@dataclass(slots=True)
class _Build:
    """One build: the library's objects, in order of creation."""

    flavour: Flavour
    options: BuildOptions
    where: str
    log: LogSubscription
    builder: Any = None
    network: Any = None
    parser: Any = None
    config: Any = None
    plugins: list[str] = field(default_factory=list)


def build_plan(
    model: bytes,
    path: Path,
    flavour: Flavour,
    options: BuildOptions,
    report: Report | None = None,
    device: Device | None = None,
) -> Built:
    """Build a plan from the content of an ONNX file. Blocks for seconds to hours, without holding the GIL.

    Weights beside ``path`` are read, and messages name it. TensorRT 8 reports no steps to ``report``. By
    default CUDA chooses the GPU.
    """
    check_flavour(flavour, options)
    if device is not None:
        _check_fits(device, flavour, options)
        device.activate()
    made = _Build(flavour, options, repr(str(path)), log_of(flavour.module).subscribe(options.verbosity))
    register_plugins(flavour, options.plugins, made.log)
    _create(made)
    try:
        _parse(made, model, path)
        inputs = _tensors(made.network.num_inputs, made.network.get_input)
        outputs = _tensors(made.network.num_outputs, made.network.get_output)
    except UnicodeDecodeError as error:
        # The bindings decode the file's names as UTF-8, whatever the file contains.
        raise BuildError(
            f"{made.where} has a name that is not UTF-8: {error}. It is damaged, or its exporter is. Export "
            "it again"
        ) from error
    profiles = profiles_of(options.profiles, inputs, options.max_rows, dict(options.dims))
    _configure(made)
    _add_profiles(made, profiles)
    cache = _timing_cache(made)
    content = _run(made, report)
    if cache is not None:
        assert options.timing_cache is not None
        write_whole(Path(options.timing_cache), bytes(memoryview(cache.serialize())))
    return Built(
        content,
        flavour.name,
        flavour.version,
        inputs,
        outputs,
        profiles,
        tuple(made.plugins),
    )


def check_flavour(flavour: Flavour, options: BuildOptions) -> None:
    """Check that a package supports the options, before anything is parsed."""
    module, title = flavour.module, flavour.title
    if not hasattr(module, "Builder") or not hasattr(module, "OnnxParser"):
        raise OptionsError(
            f"{title} runs plans, and cannot build them. Build with tensorrt or tensorrt_rtx: "
            "pip install 'asynctrt[tensorrt]' or 'asynctrt[rtx]'"
        )
    is_rtx = "rtx" in flavour.name
    if is_rtx and options.hardware_compatibility != "none":
        raise OptionsError(
            f"{title} ignores hardware_compatibility: its plans are compiled on the GPU that runs them. Name "
            "GPUs by compute_capabilities, or build with flavour='tensorrt'"
        )
    if is_rtx and options.timing_cache is not None:
        raise OptionsError(f"{title} has no timing cache: it tries no kernels. Leave timing_cache out")
    if not is_rtx and options.compute_capabilities:
        raise OptionsError(
            f"{title} builds for the GPU that it runs on, so compute_capabilities cannot be chosen. Use "
            "hardware_compatibility, or build with flavour='tensorrt_rtx'"
        )
    for name in _flags(options):
        if not hasattr(module.BuilderFlag, name):
            raise OptionsError(_lacks(flavour, name))
    for text in options.compute_capabilities:
        known = _gpus_of(flavour)
        if text not in known:
            raise OptionsError(
                f"{title} does not build for compute capability {text}, but for {', '.join(known)}. For "
                "other GPUs build with flavour='tensorrt', on one of them"
            )


def _check_fits(device: Device, flavour: Flavour, options: BuildOptions) -> None:
    """Refuse a GPU that the package cannot build for, and limits that leave too little of its memory."""
    capability = device.compute_capability
    known = _gpus_of(flavour)
    if capability is not None and known and capability_text(capability) not in known:
        raise OptionsError(
            f"{device.gpu or device.name} has compute capability {capability_text(capability)}, and "
            f"{flavour.title} runs on {', '.join(known)}. Build with flavour='tensorrt': pip install "
            "'asynctrt[tensorrt]'"
        )
    total = device.memory().total_nbytes
    if max(options.workspace, options.tactic_memory) > total * 3 // 4:
        raise OptionsError(
            f"workspace is {options.workspace:,} and tactic_memory {options.tactic_memory:,} bytes, and "
            f"{device.name} has {total:,}. Leave a quarter of it to the weights and to others"
        )


def _gpus_of(flavour: Flavour) -> list[str]:
    """Return the compute capabilities that TensorRT for RTX knows; of other packages, none."""
    known = getattr(flavour.module, "ComputeCapability", None) if "rtx" in flavour.name else None
    names = [name for name in getattr(known, "__members__", ()) if name.startswith("SM")]
    return [f"{name[2:-1]}.{name[-1]}" for name in names]


def _lacks(flavour: Flavour, flag: str) -> str:
    if flag.lower() in ("fp16", "bf16", "int8", "fp8", "int4", "fp4"):
        return (
            f"{flavour.title} computes in the types that the model has, so precision cannot be chosen when "
            f"building. Convert the ONNX model to {flag.lower()} (onnxconverter-common, NVIDIA's Model "
            "Optimizer), and build that"
        )
    return f"{flavour.title} has no BuilderFlag.{flag}. Leave the option out, or build with another version"


def _flags(options: BuildOptions) -> list[str]:
    """Return the names of the builder flags that result from the options."""
    chosen = {
        "VERSION_COMPATIBLE": options.version_compatible,
        "EXCLUDE_LEAN_RUNTIME": options.exclude_lean_runtime,
        "REFIT": options.refit == "all",
        "REFIT_IDENTICAL": options.refit == "identical",
        "REFIT_INDIVIDUAL": options.refit == "individual",
        "STRIP_PLAN": options.strip,
    }
    return [*(name.upper() for name in options.precision), *(name for name, is_on in chosen.items() if is_on)]


def _create(made: _Build) -> None:
    module, options = made.flavour.module, made.options
    made.builder, said = create_with_errors(module.Builder, module, made.log)
    if made.builder is None:
        raise DeviceUnavailableError(
            f"{made.flavour.title} cannot build here. It needs a GPU and its driver: check with nvidia-smi. "
            "Only tensorrt_rtx builds without one. "
            f"{TensorRTErrors.logged(said)}{describe_runtimes(cuda_runtimes())}"
        )
    made.network = made.builder.create_network(_network_flags(module, options))
    # With an error recorder, destroying a network that a parser has filled crashes the process.
    made.network.error_recorder = None
    keep_alive(made.network, made.builder)
    made.parser = module.OnnxParser(made.network, log_of(module))
    keep_alive(made.parser, made.network)
    if options.version_compatible and asks_parser(made.flavour):
        made.parser.set_flag(module.OnnxParserFlag.NATIVE_INSTANCENORM)


def _network_flags(module: Any, options: BuildOptions) -> int:
    """Return the flags to create the network with, as far as the library has them."""
    known, flags = module.NetworkDefinitionCreationFlag, 0
    # Before TensorRT 10, the parser refuses a network without it.
    if hasattr(known, "EXPLICIT_BATCH"):
        flags |= 1 << int(known.EXPLICIT_BATCH)
    if hasattr(known, "STRONGLY_TYPED") and options.strongly_typed:
        flags |= 1 << int(known.STRONGLY_TYPED)
    return flags


def _parse(made: _Build, model: bytes, path: Path) -> None:
    # Pass the content, so that the parser reads exactly what was inspected. The path locates other files.
    if made.parser.parse(model, str(path)):
        made.log.take()
        if not int(made.network.num_outputs):
            raise BuildError(
                f"{made.where} cannot be parsed by {made.flavour.title}: it has no outputs, as an empty or "
                "damaged file. Export the model again"
            )
        return
    count = int(made.parser.num_errors)
    faults = [_fault(made.parser.get_error(index)) for index in range(min(count, ERRORS_MAX))]
    logged = made.log.take()
    said = "; ".join(where + what for where, what in faults) or str(TensorRTErrors.logged(logged))
    more = f"; and {count - ERRORS_MAX} more" if count > ERRORS_MAX else ""
    # The first error is most likely the cause, and the others may follow from it.
    advice = _advice(faults[0][1] if faults else said)
    raise BuildError(f"{made.where} cannot be parsed by {made.flavour.title}: {said}{more}. {advice}")


def _fault(error: Any) -> tuple[str, str]:
    """Return one error of the parser: the node, and what is wrong with the place in the parser."""
    code, node = error.code(), int(error.node())
    # Before TensorRT 10, an error has no names.
    name = str(error.node_name()) if hasattr(error, "node_name") else ""
    operator = str(error.node_operator()) if hasattr(error, "node_operator") else ""
    where = [f"node {node}"] if node >= 0 else []
    where += [repr(name)] if name else []
    where += [f"({operator})"] if operator else []
    source = f"{error.file()}:{error.line()} {error.func()}".strip()
    said = f"{str(error.desc()).strip()} [{getattr(code, 'name', code)}, {source}]"
    return f"{' '.join(where)}: " if where else "", said


def _advice(said: str) -> str:
    for words, advice in FAULTS.items():
        if re.search(words, said, re.IGNORECASE):
            return advice[0].upper() + advice[1:]
    return "Check the model (onnx.checker), export it with another opset, or run it with ONNX Runtime"


def _tensors(count: int, get: Callable[[int], Any]) -> tuple[NetworkTensor, ...]:
    found = []
    for tensor in map(get, range(int(count))):
        shape = tuple(int(size) for size in tensor.shape)
        dims = tuple(tensor.get_dimension_name(axis) or None for axis in range(len(shape)))
        found.append(
            NetworkTensor(str(tensor.name), str(tensor.dtype.name), shape, dims, bool(tensor.is_shape_tensor))
        )
    return tuple(found)


def _configure(made: _Build) -> None:
    module, options = made.flavour.module, made.options
    config = made.config = made.builder.create_builder_config()
    keep_alive(config, made.builder)
    # The defaults are all of the GPU's memory, or 64 GiB without a GPU.
    config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, options.workspace)
    config.set_memory_pool_limit(module.MemoryPoolType.TACTIC_DRAM, options.tactic_memory)
    if hasattr(getattr(module, "PreviewFeature", None), "PROFILE_SHARING_0806"):
        # Without it, plans of TensorRT 8.6 let only one context use a profile.
        config.set_preview_feature(module.PreviewFeature.PROFILE_SHARING_0806, True)  # noqa: FBT003  (its own)
    for name in _flags(options):
        config.set_flag(getattr(module.BuilderFlag, name))
    if not options.tf32:
        config.clear_flag(module.BuilderFlag.TF32)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    verbosity = {"names": "LAYER_NAMES_ONLY", "detailed": "DETAILED", "none": "NONE"}[options.profiling]
    config.profiling_verbosity = getattr(module.ProfilingVerbosity, verbosity)
    if options.hardware_compatibility != "none":
        level = options.hardware_compatibility.replace("-", "_").upper()
        config.hardware_compatibility_level = getattr(module.HardwareCompatibilityLevel, level)
    _set_compute_capabilities(made)
    if options.version_compatible and asks_parser(made.flavour):
        made.plugins += list(made.parser.get_used_vc_plugin_libraries())
    if made.plugins:
        config.plugins_to_serialize = made.plugins


def _set_compute_capabilities(made: _Build) -> None:
    module, options, config = made.flavour.module, made.options, made.config
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, text in enumerate(options.compute_capabilities):
            gpu = module.ComputeCapability.__members__[f"SM{text.replace('.', '')}"]
            if not config.set_compute_capability(gpu, index):
                raise OptionsError(
                    f"{made.flavour.title} refuses compute capability {text} beside "
                    f"{', '.join(options.compute_capabilities)}. {_logged(made)}"
                )


def _add_profiles(made: _Build, profiles: Sequence[Mapping[str, Range]]) -> None:
    for profile in profiles:
        one = made.builder.create_optimization_profile()
        for name, (low, best, high) in profile.items():
            one.set_shape(name, low, best, high)
        if made.config.add_optimization_profile(one) < 0:
            raise OptionsError(
                f"{made.flavour.title} refuses the profile {profile_text(profile)!r}. {_logged(made)}"
            )


def _timing_cache(made: _Build) -> Any:
    """Attach the timing cache named in the options, filled from its file, and return it, if any."""
    if made.options.timing_cache is None:
        return None
    path = Path(made.options.timing_cache)
    try:
        content = read_regular(path, CACHE_NBYTES_MAX)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise OptionsError(f"the timing cache {str(path)!r} cannot be read: {error.strerror}") from error
    cache = made.config.create_timing_cache(content)
    if cache is None or not made.config.set_timing_cache(cache, False):  # noqa: FBT003  (the library's own)
        logger.warning(
            "the timing cache %r is not used and will be replaced: it is of another version or GPU, or "
            "damaged. %s",
            str(path),
            _logged(made),
        )
        cache = made.config.create_timing_cache(b"")
        if cache is None or not made.config.set_timing_cache(cache, False):  # noqa: FBT003
            return None
    return cache


def _run(made: _Build, report: Report | None) -> bytes:
    module = made.flavour.module
    # Before TensorRT 10, a build reports nothing.
    if report is not None and hasattr(module, "IProgressMonitor"):
        monitor = _make_monitor(module, report)
        keep_alive(made.config, monitor)
        made.config.progress_monitor = monitor
    made.log.take()
    plan = made.builder.build_serialized_network(made.network, made.config)
    if plan is not None:
        return bytes(memoryview(plan))
    raise _failure(made)


def _failure(made: _Build) -> Exception:
    errors = TensorRTErrors.logged(made.log.take())
    what = f"{made.flavour.title} cannot build a plan from {made.where}"
    if errors.is_out_of_memory:
        return DeviceMemoryError(
            f"{what}: the GPU has too little memory. Make profiles smaller (max_rows, dims), or workspace "
            f"and tactic_memory; they are {made.options.workspace:,} and {made.options.tactic_memory:,} "
            f"bytes. {errors}"
        )
    if errors.search(CANNOT_HERE):
        why = " with refit or strip" if made.options.refit or made.options.strip else ""
        return DeviceUnavailableError(
            f"{what}{why} without a GPU. Build it on a machine with one, or without these options. {errors}"
        )
    if errors.search(NO_CUDA):
        return DeviceUnavailableError(f"{what}: CUDA cannot be used. Check with nvidia-smi. {errors}")
    if errors.search(r"Unable to load library: libnvinfer_lean"):
        return OptionsError(
            f"{what} that is version-compatible, as the package brings no lean runtime to pack in. Set "
            f"exclude_lean_runtime too. {errors}"
        )
    if errors.search(NO_PLUGIN):
        return BuildError(f"{what}: a plugin is missing. Name its library in plugins. {errors}")
    if errors.search(r"workspace|insufficient memory|could not find any implementation"):
        return BuildError(
            f"{what}: it found no kernel for a layer, which often means that there was too little workspace: "
            f"{made.options.workspace:,} bytes. Allow more. {errors}"
        )
    return BuildError(f"{what}. {errors}")


def _logged(made: _Build) -> TensorRTErrors:
    return TensorRTErrors.logged(made.log.take())


class ProgressMonitor:
    """Reports steps. TensorRT calls it on several threads."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.RLock()
        self._phases: dict[str, tuple[str | None, int]] = {}

    @callback
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Record that a phase has started."""
        with self._lock:
            self._phases[phase_name] = (parent_phase, int(num_steps))
        self._tell(phase_name, 0)

    @callback
    def step_complete(self, phase_name: str, step: int) -> bool:
        """Report that a step is done; return ``True``, as ``False`` would end the build."""
        self._tell(phase_name, int(step) + 1)
        return True

    @callback
    def phase_finish(self, phase_name: str) -> None:
        """Report that a phase is done."""
        with self._lock:
            total = self._phases.get(phase_name, (None, 0))[1]
        self._tell(phase_name, total)
        with self._lock:
            self._phases.pop(phase_name, None)

    def _tell(self, phase: str, done: int) -> None:
        with self._lock:
            parent, total = self._phases.get(phase, (None, done))
        try:
            self._report(BuildStep(phase, parent, min(done, total), total))
        except Exception:  # Inside the library it would end the process.
            logger.warning("the callback for the progress of a build raised", exc_info=True)


def _make_monitor(module: Any, report: Report) -> Any:
    class Monitor(ProgressMonitor, module.IProgressMonitor):  # type: ignore[misc]  # Known at run time.
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            ProgressMonitor.__init__(self, report)

    return Monitor()
