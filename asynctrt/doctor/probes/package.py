"""Import a package, and return its version and the library that it has loaded."""

import contextlib
import ctypes
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MAPS: Final = Path("/proc/self/maps")
"""The file in which Linux lists the libraries that a process has loaded."""

TENSORRT: Final = re.compile(r"/.*/lib(?:nvinfer(?:_lean|_dispatch)?|tensorrt_rtx)\.so.*$", re.MULTILINE)
"""The TensorRT library with functions that return its version."""

PARTS: Final = ("Major", "Minor", "Patch", "Build")
"""From version 10 on, TensorRT returns its version in parts: ``getInferLibMajorVersion`` and so on."""


def probe(name: str, with_runtime: str = "") -> dict[str, Any]:
    """Import ``name``; return its version, its library, and any errors.

    :param with_runtime: if not empty, also make a TensorRT runtime, which needs a GPU.
    """
    try:
        module = import_module(name)
    except Exception as error:
        # It is not installed, or it is installed but lacks something.
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        return {"missing": is_missing, "error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"version": str(getattr(module, "__version__", "unknown"))}
    if name.startswith("tensorrt"):
        path = TENSORRT.search(MAPS.read_text(errors="replace") if MAPS.exists() else "")
        found["library"] = path and path[0]
        found["library_version"] = path and _version(ctypes.CDLL(path[0]))
        found["runtime_error"] = _runtime_error(module) if with_runtime else None
    if name == "onnxruntime":
        found["providers"] = list(module.get_available_providers())
        found["cuda_error"] = _load_error(module)
    return found


def _version(library: ctypes.CDLL) -> str | None:
    """Return the version that TensorRT's library reports; ``None`` if it reports none."""
    functions = [f"getInferLib{part}Version" for part in PARTS]
    numbers = [getattr(library, name)() for name in functions if hasattr(library, name)]
    if not numbers and hasattr(library, "getInferLibVersion"):
        number = library.getInferLibVersion()  # 8601 is 8.6.1.
        numbers = [number // 1000, number % 1000 // 100, number % 100]
    return ".".join(map(str, numbers)) or None


def _runtime_error(module: ModuleType) -> str | None:
    logger = module.Logger(module.Logger.ERROR)
    try:
        module.Runtime(logger)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _load_error(module: ModuleType) -> str | None:
    """Return why ONNX Runtime's CUDA provider cannot be loaded; ``None`` if it loads or does not exist."""
    path = Path(module.__file__ or "").parent / "capi/libonnxruntime_providers_cuda.so"
    if not path.exists():
        return None
    with contextlib.suppress(Exception):
        module.preload_dlls()  # This loads CUDA's libraries from where pip installs them, as asynctrt does.
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        # The provider needs ONNX Runtime's core, which is not loaded here: that is not a fault.
        return None if "Provider_GetHost" in str(error) else str(error)
    return None
