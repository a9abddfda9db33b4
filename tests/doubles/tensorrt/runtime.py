"""The double's ``Runtime``."""

import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar, Final

from asynctrt.devices.base import aligned
from tests.doubles.tensorrt.core import Core, Library, Reporter, checked
from tests.doubles.tensorrt.engine import ICudaEngine, engine_class_of
from tests.doubles.tensorrt.monitor import ViolationMonitor
from tests.doubles.tensorrt.names import (
    ErrorCodeTRT,
    IGpuAllocator,
    ILogger,
    oldest_plan,
    require_initialised,
    version_of,
)
from tests.doubles.tensorrt.spec import PlanContent, PlanError, read_plan, serialization_version

LEAN_RUNTIME: Final = b"asynctrt lean runtime "
PLUGIN_LIBRARY: Final = b"asynctrt plugins "
OWN_PLUGINS: Final = frozenset({"EfficientNMS_TRT", "ROIAlign_TRT"})
"""What ``init_libnvinfer_plugins`` registers: some of those that the real library has."""


def double_lean_runtime(version: str) -> bytes:
    """Return the content of the file that the double's ``load_runtime`` loads as a lean runtime."""
    major = version_of(version)[0]
    # Every library has its name in it, by which its version can be told before it is loaded.
    return LEAN_RUNTIME + f"{version}\0libnvinfer_lean.so.{major}\0".encode()


def double_plugin_library(*plugins: str) -> bytes:
    """Return the content of the file that the double loads as a library with these plugins."""
    return PLUGIN_LIBRARY + " ".join(plugins).encode()


class PluginRegistry:
    """The plugins of a double: its own, once they are initialised, and those of libraries."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def load_library(self, plugin_path: str) -> object | None:
        """Register the plugins of a library; return its handle, or ``None`` if one is registered already."""
        try:
            content = Path(plugin_path).read_bytes()
        except OSError:
            return None
        plugins = content.removeprefix(PLUGIN_LIBRARY).decode(errors="replace").split()
        if not content.startswith(PLUGIN_LIBRARY) or self._library.plugins.intersection(plugins):
            return None
        self._library.plugins.update(plugins)
        return object()


def initialise_plugins(library: Library, logger: ILogger, namespace: str) -> bool:
    """Register the library's own plugins."""
    require_initialised(logger, ILogger)
    library.plugins.update(namespace + name for name in OWN_PLUGINS)
    return True


def _note_orphan(loaded: "weakref.ref[Runtime]", monitor: ViolationMonitor) -> None:
    """Note that a runtime is gone before the one that it loaded, whose code lies in the library it holds."""
    if loaded() is not None:
        monitor.note("a runtime was destroyed before the lean runtime that it loaded and has to outlive")


class Runtime(Reporter):
    """Deserialises plans of the double. It may be destroyed before its engines, not before what it loaded."""

    _library: ClassVar[Library]

    def __init__(self, logger: ILogger) -> None:
        require_initialised(logger, ILogger)
        super().__init__(Core(self._library, logger), None)
        self._is_loaded = False
        if not self._library.log.register(self, logger):
            self._core.say(
                ILogger.WARNING,
                "The logger passed into createInferRuntime differs from one already registered for an "
                "existing builder, runtime, or refitter. So the current new logger is ignored, and TensorRT "
                "will use the existing one which is returned by nvinfer1::getLogger() instead.",
            )
        self._core.say(ILogger.VERBOSE, f"[MemUsageChange] Init CUDA; TensorRT double {self._core.version}")

    @property
    def logger(self) -> ILogger:
        """The application's logger."""
        return self._core.logger

    def _set_gpu_allocator(self, allocator: IGpuAllocator | None) -> None:
        if allocator is not None:
            require_initialised(allocator, IGpuAllocator)
        self._core.allocator = allocator

    gpu_allocator = property(
        None,
        _set_gpu_allocator,
        doc="The allocator of device memory from now on, or ``None``. As in the real one, it cannot be read.",
    )

    @property
    def engine_host_code_allowed(self) -> bool:
        """Whether plans may contain code that runs on the host."""
        return self._core.is_lean_code_allowed

    @engine_host_code_allowed.setter
    def engine_host_code_allowed(self, allowed: bool) -> None:
        """Set whether plans may contain code that runs on the host."""
        self._core.is_lean_code_allowed = allowed

    @checked
    def load_runtime(self, path: str) -> "Runtime | None":
        """Load a runtime of :func:`double_lean_runtime`; one of two major versions before crashes, a
        violation."""
        try:
            found = Path(path).read_bytes()
            version = found.removeprefix(LEAN_RUNTIME).split(b"\0")[0].decode()
            numbers = version_of(version)
        except (OSError, ValueError) as error:
            self._report(
                ErrorCodeTRT.FAILED_INITIALIZATION,
                "IRuntime::loadRuntime",
                "Internal Error" if self._is_of_8 else "API Usage Error",
                f"Unable to load library: {path}: {error}",
            )
            return None
        if numbers < oldest_plan(version_of(self._core.version)):
            raise self._core.monitor.found(
                f"load_runtime of TensorRT {self._core.version} crashes on a lean runtime of {version}"
            )
        other = type(self)(self._core.logger)
        other._core.version = version
        other._core.allocator = self._core.allocator
        other._core.is_lean_code_allowed = self._core.is_lean_code_allowed
        other._recorder = self._recorder
        other._is_loaded = True
        weakref.finalize(self, _note_orphan, weakref.ref(other), self._core.monitor).atexit = False
        return other

    @checked
    def deserialize_cuda_engine(self, serialized_engine: Any) -> "ICudaEngine | None":
        """Return the engine of a plan; on failure return ``None``, and report an error."""
        where = "IRuntime::deserializeCudaEngine"
        if not isinstance(serialized_engine, bytes | bytearray | memoryview):
            raise TypeError(
                "deserialize_cuda_engine(): incompatible function arguments: the double accepts a plan as "
                "bytes"
            )
        size_mib = memoryview(serialized_engine).nbytes >> 20
        self._say_from_thread(f"Loaded engine size: {size_mib} MiB")
        if self._report_loss(where):
            return None
        engine = self._deserialise(bytes(serialized_engine), where)
        if engine is None and self._is_loaded:
            # What loaded it looks at the result, too.
            self._report(
                ErrorCodeTRT.INTERNAL_ERROR,
                where,
                "Internal Error",
                "Assertion engine != nullptr failed. Engine deserialization failed.",
            )
        return engine

    @property
    def _is_of_8(self) -> bool:
        return version_of(self._core.version) < (10,)

    def _deserialise(self, content: bytes, where: str) -> "ICudaEngine | None":
        if not content and self._is_of_8:
            text = "Cannot deserialize with an empty memory buffer."
            self._report(ErrorCodeTRT.INVALID_ARGUMENT, where, "Internal Error", text)
            return None
        try:
            plan = read_plan(content, self._core.library.flavour)
        except PlanError as error:
            self._core.say(ILogger.VERBOSE, "the plan cannot be read")
            self._report_raw(where, ErrorCodeTRT.UNSPECIFIED_ERROR, str(error))
            return None
        if refusal := self._refusal(plan):
            self._report_raw(where, *refusal)
            return None
        unknown = [name for name in plan.spec.plugins if name not in self._core.library.plugins]
        if unknown:
            self._report_raw(
                "IPluginRegistry::getCreator",
                ErrorCodeTRT.INVALID_STATE,
                f"API Usage Error (Cannot find plugin: {unknown[0]}, version: 1, namespace:.)",
            )
            self._report_raw(
                where,
                ErrorCodeTRT.UNSPECIFIED_ERROR,
                "Serialization (Serialization assertion creator failed.Cannot deserialize plugin since "
                "corresponding IPluginCreator not found in Plugin Registry)",
            )
            return None
        return self._new_engine(plan)

    def _new_engine(self, plan: PlanContent) -> "ICudaEngine | None":
        """Return the engine with its weights on the device; ``None``, and an error, if they do not fit."""
        where = "IRuntime::deserializeCudaEngine"
        fails = self._core.monitor.take("deserialize-memory")
        weights = None if fails else self._core.allocate(aligned(plan.spec.weights_nbytes))
        if weights is None:
            self._report_memory(where, f"Requested size was {aligned(plan.spec.weights_nbytes)} bytes.")
            return None
        return self._engine_class()(self._core, self._recorder, plan, weights)

    def _engine_class(self) -> type[ICudaEngine]:
        return engine_class_of(self._core.library.version)

    def _report_raw(self, where: str, code: ErrorCodeTRT, text: str) -> None:
        kind, _, rest = text.partition(" (")
        self._report(code, where, kind, rest.removesuffix(")"))

    def _say_from_thread(self, message: str) -> None:
        """Log from another thread, as the real library does, so that a logger has to be thread-safe."""
        logger = self._core.logger
        worker = threading.Thread(target=logger.log, args=(ILogger.VERBOSE, message), name="tensorrt-double")
        worker.start()
        worker.join()

    def _refusal(self, plan: PlanContent) -> tuple[ErrorCodeTRT, str] | None:
        """Return why a plan is refused, or ``None`` ("Version Compatibility", Compatibility Checks)."""
        here, built = version_of(self._core.version), version_of(plan.version)
        if here != built and plan.spec.version_compatible and built < oldest_plan(here):
            return ErrorCodeTRT.UNSPECIFIED_ERROR, (
                "Serialization (TensorRT plan major version does not match runtime major version.)"
            )
        if here != built and not (plan.spec.version_compatible and built[:2] <= here[:2]):
            return ErrorCodeTRT.UNSPECIFIED_ERROR, (
                "Serialization (Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed."
                "Version tag does not match. Note: Current Version: "
                f"{serialization_version(self._core.version)}, "
                f"Serialized Engine Version: {serialization_version(plan.version)})"
            )
        if plan.spec.version_compatible and not plan.spec.excludes_lean_runtime:
            if not self._core.is_lean_code_allowed:
                return ErrorCodeTRT.INVALID_STATE, (
                    "API Usage Error (The engine contains host executable code, and engineHostCodeAllowed is "
                    "false. Call IRuntime::setEngineHostCodeAllowed(true) if the plan is trusted.)"
                )
        elif here != built:
            return ErrorCodeTRT.UNSPECIFIED_ERROR, (
                "Internal Error (Failed due to an old deserialization call on a newer plan file. This might "
                "happen when the plan file was built from an older TensorRT version.)"
            )
        level = plan.spec.hardware_compatibility
        compute = self._core.library.compute_capability
        fits = compute >= (8, 0) if level == "AMPERE_PLUS" else compute == plan.compute_capability
        if not fits:
            expected, got = (f"{major}.{minor}" for major, minor in (compute, plan.compute_capability))
            return ErrorCodeTRT.FAILED_INITIALIZATION, (
                "API Usage Error (The engine plan file is generated on an incompatible device, expecting "
                f"compute {expected} got compute {got}, please rebuild.)"
            )
        return None
