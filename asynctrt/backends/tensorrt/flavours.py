"""Choose the TensorRT package, of the four, that runs a plan, and explain the fix if none can be loaded.

No import statement imports a package, because the plan decides which one is needed.
"""

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from asynctrt._util.validation import choice
from asynctrt.backends.build_options import BUILDERS
from asynctrt.backends.tensorrt.plan import KINDS, TAG_RTX, TAG_TENSORRT
from asynctrt.backends.tensorrt_options import FLAVOURS
from asynctrt.errors import DeviceUnavailableError, MissingExtraError, ModelError

EXTRAS: Final = {
    "tensorrt": "tensorrt",
    "tensorrt_lean": "lean",
    "tensorrt_dispatch": "dispatch",
    "tensorrt_rtx": "rtx",
}
"""The extra that installs each package."""

MAPS: Final = Path("/proc/self/maps")
"""Where Linux lists the libraries that this process has loaded."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(frozen=True, slots=True)
class Flavour:
    """A TensorRT package, or a stand-in with the same API."""

    name: str
    module: Any
    is_real: bool
    """Whether it is one of the four packages, which run only on CUDA devices."""

    def __repr__(self) -> str:
        return f"<Flavour {self.name} {self.version}>"

    @property
    def version(self) -> str:
        """The library's version."""
        return str(getattr(self.module, "__version__", "unknown"))

    @property
    def tag(self) -> bytes:
        """The first four bytes of the plans that it runs."""
        return TAG_RTX if "rtx" in self.name else TAG_TENSORRT

    @property
    def title(self) -> str:
        """The name and version, for messages."""
        return f"{self.name} {self.version}"

    @property
    def distribution(self) -> str:
        """The name for pip."""
        return self.name.replace("_", "-")

    def check_tag(self, tag: bytes, where: str) -> None:
        """Check that this package runs plans that begin with ``tag``."""
        if tag != self.tag:
            fits = "tensorrt_rtx" if tag == TAG_RTX else "tensorrt, tensorrt_lean or tensorrt_dispatch"
            raise ModelError(
                f"{where} was built by {KINDS[tag]} (it begins with {tag.decode()!r}), and {self.title} runs "
                f"plans of {KINDS[self.tag]} ({self.tag.decode()!r}). Open it with {fits}, or rebuild it"
            )


def find_flavour(flavour: Any, tag: bytes, where: str) -> Flavour:
    """Return the package for plans that begin with ``tag``: the given one, or the first that loads."""
    if flavour is None:
        return _first(tag, where)
    if isinstance(flavour, str):
        found = _load(choice(*FLAVOURS)("flavour", flavour))
    else:
        name = str(getattr(flavour, "__name__", type(flavour).__name__))
        # The bindings alone are a package, too. TensorRT 8.6 crashes without a GPU.
        is_real = isinstance(flavour, ModuleType) and name.removesuffix("_bindings") in FLAVOURS
        found = Flavour(name, flavour, is_real)
    found.check_tag(tag, where)
    return found


def find_builder(flavour: str | None) -> Flavour:
    """Return the package to build plans with: the given one, or the first that can be loaded."""
    if flavour is not None:
        return _load(choice(*BUILDERS)("flavour", flavour))
    for name in BUILDERS:
        with suppress(MissingExtraError):
            return _load(name)
    raise MissingExtraError(
        "no package that builds plans is installed: pip install 'asynctrt[tensorrt]' for the GPU that is "
        "here, or 'asynctrt[rtx]' for GeForce, RTX and Ada GPUs, which builds without a GPU"
    )


def cuda_runtimes(maps: Path = MAPS) -> tuple[str, ...]:
    """Return the CUDA runtimes that this process has loaded. Several often cause unexplained failures."""
    try:
        mapped = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(sorted(set(re.findall(r"\s(/.*/libcudart[^/\n]*\.so[^/\n]*)$", mapped, re.MULTILINE))))


def describe_runtimes(runtimes: tuple[str, ...]) -> str:
    """Return a sentence to append to a message when several CUDA runtimes are loaded, or an empty string."""
    if len(runtimes) < 2:
        return ""
    return (
        f" Note that this process has loaded {len(runtimes)} CUDA runtimes ({', '.join(runtimes)}): install "
        "packages that are all built for one CUDA version, and check LD_LIBRARY_PATH"
    )


def _first(tag: bytes, where: str) -> Flavour:
    """Return the first package that runs this kind of plan and can be loaded."""
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
            logger.warning("%s. Using %s instead", broken, found.title)
        return found
    if broken is not None:
        raise broken
    extras = " or ".join(f"'asynctrt[{EXTRAS[name]}]'" for name in names)
    raise MissingExtraError(
        f"{where} is a {KINDS[tag]} plan, and no package that runs it is installed: pip install {extras}"
        + (". The lean and dispatch packages run version-compatible plans" if len(names) > 1 else "")
    )


def _load(name: str) -> Flavour:
    """Import a package, or raise an error that says what is missing."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise MissingExtraError(
                f"{name} is not installed: pip install 'asynctrt[{EXTRAS[name]}]'"
            ) from error
        raise DeviceUnavailableError(
            f"{name} is only partly installed: {error}. Reinstall it: "
            f"pip install --force-reinstall 'asynctrt[{EXTRAS[name]}]'"
        ) from error
    except (ImportError, OSError) as error:
        raise DeviceUnavailableError(
            f"{name} is installed but cannot be loaded: {error}. {fix_of_import(name, str(error))}"
            + describe_runtimes(cuda_runtimes())
        ) from error
    return Flavour(name, module, is_real=True)


def fix_of_import(name: str, said: str) -> str:
    """Return the fix for a shared library that is missing or incompatible."""
    extra = EXTRAS[name]
    if "libcuda.so" in said:
        return (
            "That library belongs to the NVIDIA driver: install the driver, after which nvidia-smi works; "
            "start a container with --gpus all"
        )
    cudart = re.search(r"lib(?:cudart|cublas\w*|nvrtc)\.so\.(\d+)", said)
    if cudart:
        return (
            f"That library belongs to CUDA {cudart[1]}: install the package that is built for your CUDA "
            f"version (its name ends in -cu12 or -cu13), or CUDA {cudart[1]}: pip install "
            f"'asynctrt[{extra}]' installs both"
        )
    if "nvinfer" in said or "tensorrt" in said.split(":", maxsplit=1)[0]:
        return (
            "That is TensorRT's own library, which comes in another wheel than the bindings: "
            f"pip install --force-reinstall 'asynctrt[{extra}]'"
        )
    return (
        "Find the library that the message names, or reinstall: "
        f"pip install --force-reinstall 'asynctrt[{extra}]'"
    )
