"""Import a package, and tell its version and which of NVIDIA's libraries came with it."""

import ctypes
import re
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

INTERESTING: Final = re.compile(
    r"/lib(cuda|cudart|cudnn\w*|cublas\w*|nvrtc|nvinfer\w*|nvonnxparser|tensorrt_\w+)[^/]*\.so[^/]*$"
)
MAIN: Final = re.compile(r"/lib(nvinfer(_lean|_dispatch)?|tensorrt_rtx)\.so[^/]*$")
"""The library of TensorRT that tells its version."""


def probe(name: str) -> dict[str, Any]:
    """Import ``name``; return its version, its place, its libraries and what else it tells."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        # It is not installed, or it is and lacks something.
        missing = error.name == name.partition(".")[0]
        return {"missing": missing, "error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"missing": False, "error": f"{type(error).__name__}: {error}"}
    libraries = _libraries()
    found: dict[str, Any] = {
        "version": getattr(module, "__version__", None),
        "place": str(Path(module.__file__).parent) if module.__file__ else None,
        "libraries": libraries,
    }
    for path in libraries:
        if MAIN.search(path):
            found["library"] = {"path": path, "version": _version(path)}
    capabilities = getattr(module, "ComputeCapability", None)
    if capabilities is not None:
        found["capabilities"] = [name for name in capabilities.__members__ if name.startswith("SM")]
    if name == "onnxruntime":
        found["providers"] = list(module.get_available_providers())
        found["cuda_error"] = _load_error(Path(module.__file__ or "").parent / "capi")
    return found


def _libraries() -> list[str]:
    """Return the files of NVIDIA's libraries that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = maps.read_text(errors="replace").splitlines()
    paths = {
        line.split(maxsplit=5)[5] for line in lines if "/lib" in line and len(line.split(maxsplit=5)) == 6
    }
    return sorted(path for path in paths if INTERESTING.search(path))


def _version(path: str) -> str | None:
    spec = spec_from_file_location("library", Path(__file__).with_name("library.py"))
    assert spec is not None, path
    assert spec.loader is not None, path
    library = module_from_spec(spec)
    sys.modules["library"] = library
    spec.loader.exec_module(library)
    told: str | None = library.version(ctypes.CDLL(path), path)
    return told


def _load_error(folder: Path) -> str | None:
    """Return why ONNX Runtime's provider for CUDA cannot be loaded, if it is there and cannot."""
    for path in folder.glob("libonnxruntime_providers_cuda.so"):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            # Its own core, which it asks for when it is loaded for real, is no fault.
            return None if "Provider_GetHost" in str(error) else str(error)
    return None
