"""Load libraries as the dynamic loader would, and tell which files they came from and their versions."""

import ctypes
import json
import os
import re
from typing import Any, Final

VERSIONS: Final = {
    "libcuda": ("cuDriverGetVersion", "out"),
    "libcudart": ("cudaRuntimeGetVersion", "out"),
    "libcudnn": ("cudnnGetVersion", "returned"),
    "libnvrtc": ("nvrtcVersion", "pair"),
    "libnvinfer": ("getInferLibVersion", "returned"),
    "libnvinfer_lean": ("getInferLibVersion", "returned"),
    "libnvinfer_dispatch": ("getInferLibVersion", "returned"),
    "libtensorrt_rtx": ("getInferLibVersion", "returned"),
}
"""The function that tells the version of a library, and how it gives it."""

PARTS: Final = ("getInferLibMajorVersion", "getInferLibMinorVersion", "getInferLibPatchVersion")
"""How TensorRT tells its version number by number, from 10 on; its build has a fourth function."""

RTLD_DI_LINKMAP: Final = 2


class _LinkMap(ctypes.Structure):
    """The beginning of glibc's ``struct link_map``."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def probe(names: str) -> dict[str, Any]:
    """Load each of a JSON list of names or paths; return its file and version, or why it cannot be loaded."""
    return {name: _look(name) for name in json.loads(names)}


def _look(name: str) -> dict[str, Any]:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"path": _path(library), "version": version(library, name)}
    if _stem(name) == "libcudnn":
        found["cudart"] = _number(library, "cudnnGetCudartVersion", "returned")
    return found


def version(library: ctypes.CDLL, name: str) -> str | None:
    """Return the version that a library tells of itself."""
    told = VERSIONS.get(_stem(name))
    if told is None:
        return None
    function, how = told
    if function == "getInferLibVersion" and all(hasattr(library, part) for part in PARTS):
        numbers = [getattr(library, part)() for part in PARTS]
        if hasattr(library, "getInferLibBuildVersion"):
            numbers.append(library.getInferLibBuildVersion())
        return ".".join(map(str, numbers))
    if how == "pair":
        major, minor = ctypes.c_int(), ctypes.c_int()
        is_told = hasattr(library, function) and not library.nvrtcVersion(
            ctypes.byref(major), ctypes.byref(minor)
        )
        return f"{major.value}.{minor.value}" if is_told else None
    number = _number(library, function, how)
    return None if number is None else _text(_stem(name), number)


def _number(library: ctypes.CDLL, function: str, how: str) -> int | None:
    if not hasattr(library, function):
        return None
    if how == "returned":
        ask = getattr(library, function)
        ask.restype = ctypes.c_size_t if function.startswith("cudnn") else ctypes.c_int
        return int(ask())
    number = ctypes.c_int()
    return number.value if not getattr(library, function)(ctypes.byref(number)) else None


def _text(stem: str, number: int) -> str:
    """Return a version that is one number as numbers with points between them."""
    if stem in ("libcuda", "libcudart"):
        return f"{number // 1000}.{number % 1000 // 10}"
    # Major versions from 10 of TensorRT and from 9 of cuDNN have two more digits for the minor one.
    wide = number >= (90_000 if stem == "libcudnn" else 100_000)
    major, rest = divmod(number, 10_000 if wide else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _stem(name: str) -> str:
    return re.split(r"\.so\b", os.path.basename(name))[0]  # noqa: PTH119  (imports the least it can)


def _path(library: ctypes.CDLL) -> str | None:
    """Return the file that a library was loaded from."""
    pointer = ctypes.POINTER(_LinkMap)()
    try:
        dlinfo = ctypes.CDLL(None).dlinfo
    except AttributeError:
        return None  # Not glibc.
    dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if dlinfo(library._handle, RTLD_DI_LINKMAP, ctypes.byref(pointer)):
        return None
    name: bytes = pointer.contents.name
    return os.path.abspath(os.fsdecode(name))  # noqa: PTH100  (links are for the caller to follow)
