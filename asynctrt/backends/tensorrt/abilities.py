"""The abilities of an engine under the library that runs it. Decisions that depend on a version are here.

An engine has the abilities of the version that built it, even if a later one runs it. Under TensorRT 10.16,
calls newer than 8.6 on an engine of 8.6 return 0 or -1 with an error, and some crash the process.
"""

import mmap
import re
import threading
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import SpecialFileError, open_regular
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.plan import TAG_RTX, PlanHeader
from asynctrt.errors import ModelError

V8_6: Final = (8, 6)
"""The first version whose plans later versions can run, if they were built as version-compatible."""

V8_6_1: Final = (8, 6, 1)
"""The first library that is asked for the format of a tensor in each profile, and whose parser takes flags
and reports the plugins that a version-compatible plan needs. Under the bindings of 8.6.1, these questions
crash 8.6.0."""

V10: Final = (10, 0)
"""The first version whose engines always allow several contexts to use one profile at once. Engines of 8.6
allow it if they were built with ``PreviewFeature.PROFILE_SHARING_0806``, which no call reports.

Its engines are also the first to call an output allocator as later libraries do, under which the call of an
older engine ends the process; and its bindings the first to hold the GIL where they raise an error. In
``infer_shapes``, the bindings of 8.6 do not, which ends the process."""

SIZES_MEMORY: Final = (10, 1)
"""The first version in which enqueue memory is set with its size, and the library tells the needs of a
profile or a batch."""

TELLS_WEIGHTS: Final = (10, 14)
"""The first version whose engines report the size of their weights."""

TELLS_ALIASES: Final = (10, 15)
"""The first version whose engines report which outputs overwrite an input."""

V11: Final = (11, 0)
"""The first library without the older calls for enqueue memory, and without plans of versions before 10
(TensorRT's documentation, Support Matrix, Engine Portability)."""

_filtering: Final = threading.Lock()
"""Filters of warnings belong to the process, and two threads that restored them in turn would mix them up."""

LEAN_NAME: Final = re.compile(rb"libnvinfer_lean\.so\.(\d+)\0")
"""The name in every lean runtime (its ``SONAME``), with its major version."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of one engine under one library."""

    shares_profiles: bool | None
    """Whether several contexts can use one profile at once; ``None`` if that must be tried."""
    sizes_memory: bool
    """Whether enqueue memory is set with its size, and the library tells the needs of a batch's shapes."""
    tells_formats_by_profile: bool
    """Whether the library reports the format of a tensor for each profile."""
    tells_weights: bool
    """Whether the engine reports the size of its weights."""
    tells_aliases: bool
    """Whether the engine reports which outputs overwrite an input."""
    allocates_outputs: bool
    """Whether output sizes may depend on the data."""
    raises: bool
    """Whether ``infer_shapes`` raises an error for shapes that the engine refuses. Otherwise it crashes."""

    @classmethod
    def of(cls, flavour: Flavour, header: PlanHeader) -> "Abilities":
        """Return the abilities of an engine, from the versions of the library and of the plan."""
        if header.tag == TAG_RTX:
            return cls(**dict.fromkeys((field.name for field in fields(cls)), True))
        built = header.version
        here = numbers_of(flavour.version) or built
        version = min(built, here)
        return cls(
            shares_profiles=True if version >= V10 else None,
            sizes_memory=version >= SIZES_MEMORY or here >= V11,
            tells_formats_by_profile=here >= V8_6_1,
            tells_weights=version >= TELLS_WEIGHTS,
            tells_aliases=version >= TELLS_ALIASES,
            allocates_outputs=built >= V10 or here < V10,
            raises=here >= V10,
        )

    def enqueue_nbytes(self, engine: Any, profile: int) -> int:
        """Return the bytes of enqueue memory that a profile needs; for older engines, that all need."""
        if self.sizes_memory:
            return int(engine.get_device_memory_size_for_profile_v2(profile))
        # An engine without the call above crashes in get_device_memory_size_for_profile.
        with _filtering, warnings.catch_warnings():
            # TensorRT 10 calls it deprecated; where warnings are errors, its bindings raise SystemError.
            warnings.simplefilter("ignore", DeprecationWarning)
            return int(engine.device_memory_size)

    def stat(self, engine: Any, module: Any, name: str) -> int | None:
        """Return one of the engine's figures, a member of ``EngineStat``; ``None`` if it is not available."""
        stats = getattr(module, "EngineStat", None) if self.tells_weights else None
        return None if stats is None else int(engine.get_engine_stat(getattr(stats, name)))

    def create_context(self, engine: Any, module: Any) -> Any:
        """Create a context without enqueue memory, which is set later."""
        if self.sizes_memory:
            return engine.create_execution_context(module.ExecutionContextAllocationStrategy.USER_MANAGED)
        # With a strategy, an engine that supports none silently allocates memory for each context.
        return engine.create_execution_context_without_device_memory()

    def infers_shapes(self, context: Any) -> bool:
        """Check the shapes of the inputs; return whether none is known to be missing.

        Where the check would crash, the shapes of the outputs must do: an unknown size is -1, and shapes that
        the engine refuses are reported as errors. ``all_binding_shapes_specified`` does not serve: on a GPU,
        TensorRT 8.6 said ``False`` of complete shapes.
        """
        return not (self.raises and context.infer_shapes())

    def set_memory(self, context: Any, address: int, nbytes: int) -> None:
        """Set the enqueue memory of a context, which reports an error if it refuses."""
        if self.sizes_memory:
            context.set_device_memory(address, nbytes)
        else:
            context.device_memory = address


def asks_parser(flavour: Flavour) -> bool:
    """Return whether the ONNX parser of a library takes flags, and reports the plugins of a plan."""
    here = numbers_of(flavour.version)
    return here is None or here >= V8_6_1


def numbers_of(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a library's version, without the package's suffix; TensorRT 8 has three."""
    found = re.match(r"\d+\.\d+\.\d+(\.\d+)?", version)
    return tuple(map(int, found[0].split("."))) if found else None


def compatible_since(library: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the first version whose version-compatible plans a library of this version runs."""
    return V8_6 if library is None or library < V11 else V10


def check_lean_runtime(flavour: Flavour, path: Path) -> None:
    """Refuse a lean runtime that a library cannot load: TensorRT 11 crashes in ``load_runtime`` for 8.6.

    A file that does not look like a lean runtime is left for the library to refuse.
    """
    here, found = numbers_of(flavour.version), _lean_major(path)
    oldest = compatible_since(here)[0]
    if flavour.tag == TAG_RTX or here is None or found is None or oldest <= found <= here[0]:
        return
    raise ModelError(
        f"the lean runtime {str(path)!r} is of TensorRT {found}, and {flavour.title} loads lean runtimes of "
        f"TensorRT {oldest} to {here[0]}. Pass the libnvinfer_lean of the version that built the plan; the "
        "last version that runs plans of TensorRT 8 is TensorRT 10. It was refused before the library loaded "
        "it"
    )


def _lean_major(path: Path) -> int | None:
    """Return the major version of a lean runtime from the name in it; ``None`` if there is no name."""
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = LEAN_NAME.search(content)
            return None if found is None else int(found[1])
    except SpecialFileError as error:
        raise ModelError(f"the lean runtime {str(path)!r} cannot be read: {error}") from error
    except (OSError, ValueError):
        return None
