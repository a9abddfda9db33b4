"""Which of the four TensorRT packages runs a plan, and what to do when none can be loaded.

No package is imported by its name in an import statement: which one it is, is known when the plan is.
"""

import logging
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from asynctrt.backends.tensorrt.options import FLAVOURS
from asynctrt.backends.tensorrt.plan import KINDS, TAG_RTX, TAG_TENSORRT
from asynctrt.errors import DeviceUnavailableError, MissingExtraError, ModelError, OptionsError

EXTRAS: Final = {
    "tensorrt": "tensorrt",
    "tensorrt_lean": "lean",
    "tensorrt_dispatch": "dispatch",
    "tensorrt_rtx": "rtx",
}
"""The extra that installs each package."""

MAPS: Final = Path("/proc/self/maps")
"""Where Linux says which libraries this process has loaded."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(frozen=True, slots=True)
class Flavour:
    """A TensorRT package, or what stands in for one."""

    name: str
    module: Any
    is_real: bool
    """Whether it is one of the four packages, which run on CUDA and nowhere else."""

    def __repr__(self) -> str:
        return f"<Flavour {self.name} {self.version}>"

    @property
    def version(self) -> str:
        """The library's version."""
        return str(getattr(self.module, "__version__", "unknown"))

    @property
    def tag(self) -> bytes:
        """How the plans that it runs begin."""
        return TAG_RTX if "rtx" in self.name else TAG_TENSORRT

    @property
    def title(self) -> str:
        """What it is and of which version, for messages."""
        return f"{self.name} {self.version}"

    @property
    def distribution(self) -> str:
        """What pip calls it."""
        return self.name.replace("_", "-")

    def check_tag(self, tag: bytes, where: str) -> None:
        """Refuse a plan of the other kind.

        :raises ModelError: with the package that would run it.
        """
        if tag != self.tag:
            fits = "tensorrt_rtx" if tag == TAG_RTX else "tensorrt, tensorrt_lean or tensorrt_dispatch"
            raise ModelError(
                f"{where} was built by {KINDS[tag]} (it begins with {tag.decode()!r}), and {self.title} runs "
                f"plans of {KINDS[self.tag]} ({self.tag.decode()!r}). Open it with {fits}, or build it anew"
            )


def find_flavour(flavour: Any, tag: bytes, where: str) -> Flavour:
    """The package to run a plan with: by name, the object given, or the first that can be loaded.

    :param flavour: ``None``, a name, or a module or what stands in for one.
    :param tag: how the plan begins.
    :param where: what the plan is called in messages.
    :raises OptionsError: for a name that is none of the four.
    :raises MissingExtraError: if the package is not installed, with the extra that brings it.
    :raises DeviceUnavailableError: if it is installed and a library that it needs is not there.
    :raises ModelError: for a package that does not run this kind of plan.
    """
    if flavour is None:
        return _first(tag, where)
    if isinstance(flavour, str):
        if flavour not in FLAVOURS:
            raise OptionsError(f"flavour is one of {', '.join(FLAVOURS)}, not {flavour!r}")
        found = _load(flavour)
    else:
        name = str(getattr(flavour, "__name__", type(flavour).__name__))
        found = Flavour(name, flavour, isinstance(flavour, ModuleType) and name in FLAVOURS)
    found.check_tag(tag, where)
    return found


def cuda_runtimes(maps: Path = MAPS) -> tuple[str, ...]:
    """The CUDA runtime libraries (``libcudart``) that this process has loaded, by path.

    More than one is a frequent cause of failures that no message names: a package brings a runtime of one
    CUDA version, and ``LD_LIBRARY_PATH`` or another package that of another.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libcudart" in line and line.count(" ") >= 5}
    return tuple(sorted(path for path in paths if re.search(r"/libcudart[^/]*\.so[^/]*$", path)))


def said_of_runtimes(runtimes: tuple[str, ...]) -> str:
    """What to add to a message when several CUDA runtimes are loaded; empty otherwise."""
    if len(runtimes) < 2:
        return ""
    return (
        f" Note that this process has loaded {len(runtimes)} CUDA runtimes ({', '.join(runtimes)}): let all "
        "packages be built for one CUDA version, and look at LD_LIBRARY_PATH"
    )


def _first(tag: bytes, where: str) -> Flavour:
    """The first package that runs this kind of plan and can be loaded."""
    names = [name for name in FLAVOURS if ("rtx" in name) == (tag == TAG_RTX)]
    broken: DeviceUnavailableError | None = None
    for name in names:
        try:
            found = _load(name)
        except MissingExtraError:
            continue
        except DeviceUnavailableError as error:
            broken = broken or error
            continue
        if broken is not None:
            logger.warning("%s. %s is used in its place", broken, found.title)
        return found
    if broken is not None:
        raise broken
    extras = " or ".join(f"'asynctrt[{EXTRAS[name]}]'" for name in names)
    raise MissingExtraError(
        f"{where} is a plan of {KINDS[tag]}, and no package that runs it is installed: pip install {extras}"
        + (". Lean and dispatch run plans that were built version-compatible" if len(names) > 1 else "")
    )


def _load(name: str) -> Flavour:
    """Import a package, or say what is missing."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise MissingExtraError(
                f"{name} is not installed: pip install 'asynctrt[{EXTRAS[name]}]'"
            ) from error
        raise DeviceUnavailableError(
            f"{name} is installed in part: {error}. Install it again: "
            f"pip install --force-reinstall 'asynctrt[{EXTRAS[name]}]'"
        ) from error
    except (ImportError, OSError) as error:
        raise DeviceUnavailableError(
            f"{name} is installed and cannot be loaded: {error}. {_fix_of_import(name, str(error))}"
            + said_of_runtimes(cuda_runtimes())
        ) from error
    return Flavour(name, module, is_real=True)


def _fix_of_import(name: str, said: str) -> str:
    """What to do about a shared library that was not found or does not fit."""
    extra = EXTRAS[name]
    if "libcuda.so" in said:
        return (
            "That is the NVIDIA driver's: install the driver (nvidia-smi should work then); in a container, "
            "start it with --gpus all"
        )
    cudart = re.search(r"lib(?:cudart|cublas\w*|nvrtc)\.so\.(\d+)", said)
    if cudart:
        return (
            f"That belongs to CUDA {cudart[1]}: install the package that is built for the CUDA you have "
            f"(its name ends in -cu12 or -cu13), or CUDA {cudart[1]}: pip install 'asynctrt[{extra}]' brings "
            "both"
        )
    if "nvinfer" in said or "tensorrt" in said.split(":", maxsplit=1)[0]:
        return (
            "That is TensorRT's own library, which comes in a wheel beside the bindings: "
            f"pip install --force-reinstall 'asynctrt[{extra}]'"
        )
    return (
        "Look for the library that it names, or install again: "
        f"pip install --force-reinstall 'asynctrt[{extra}]'"
    )
