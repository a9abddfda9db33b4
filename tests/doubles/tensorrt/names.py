"""The double's enums, shapes and callback interfaces of TensorRT's Python API.

Names, arguments and members are those of the real bindings, and so are the traps that an application would
otherwise meet only on a GPU: a :class:`Dims` cannot be compared with another one, and an allocator has to
override every method.
"""

import enum
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final

NOT_OVERRIDDEN: Final = "Method: {} was not overriden. Please provide an implementation for this method."
"""The real bindings' message when an allocator lacks a method, verbatim."""


class _Enum(enum.Enum):
    """An enum like those of the real bindings: it converts to an int, but does not equal one."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


def _enum(name: str, members: str) -> Any:
    return _Enum(name, members, module=__name__, start=0)


class DataType(_Enum):
    """Types of tensors."""

    FLOAT = 0
    HALF = 1
    BF16 = 7
    INT8 = 2
    INT32 = 3
    INT64 = 8
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    INT4 = 9
    FP4 = 10
    E8M0 = 11

    @property
    def itemsize(self) -> float | None:
        """Size of an element in bytes."""
        sizes = {0: 4, 1: 2, 7: 2, 2: 1, 3: 4, 8: 8, 4: 1, 5: 1, 6: 1, 9: 0.5, 10: 0.5}
        return sizes.get(self.value)


TensorIOMode = _enum("TensorIOMode", "NONE INPUT OUTPUT")
"""Whether a tensor is an input or an output."""

TensorLocation = _enum("TensorLocation", "DEVICE HOST")
"""Where the data of a tensor has to be."""

ExecutionContextAllocationStrategy = _enum(
    "ExecutionContextAllocationStrategy",
    "STATIC ON_PROFILE_CHANGE USER_MANAGED",
)
"""Who provides a context's enqueue memory."""

ErrorCodeTRT = _enum(
    "ErrorCodeTRT",
    "SUCCESS UNSPECIFIED_ERROR INTERNAL_ERROR INVALID_ARGUMENT INVALID_CONFIG FAILED_ALLOCATION "
    "FAILED_INITIALIZATION FAILED_EXECUTION FAILED_COMPUTATION INVALID_STATE UNSUPPORTED_STATE",
)
"""The codes of errors that are reported to an error recorder."""

HardwareCompatibilityLevel = _enum(
    "HardwareCompatibilityLevel",
    "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY",
)
"""The other GPUs that an engine runs on."""

EngineStat = _enum("EngineStat", "TOTAL_WEIGHTS_SIZE STRIPPED_WEIGHTS_SIZE")
"""The statistics of :meth:`ICudaEngine.get_engine_stat`."""

EngineCapability = _enum("EngineCapability", "STANDARD SAFETY DLA_STANDALONE")
"""The capability that an engine was restricted to."""

EngineCapabilityOf8 = _enum("EngineCapabilityOf8", "DEFAULT SAFE_GPU SAFE_DLA")
"""The same of TensorRT 8, whose first name for a value was its older one."""

ProfilingVerbosity = _enum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED")
"""How much an engine tells about its layers."""

CudaGraphStrategy = _enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")
"""Whether TensorRT for RTX captures batches by itself."""


class Dims:
    """A shape. Like the real one, it is not a tuple, and comparing two of them raises ``TypeError``."""

    MAX_DIMS: ClassVar[int] = 8

    __hash__: ClassVar[None]  # type: ignore[assignment]  # As in any class that defines only equality.

    def __init__(self, shape: Iterable[int] = ()) -> None:
        self._dims = [operator.index(dim) for dim in shape]
        if len(self._dims) > self.MAX_DIMS:
            raise ValueError(f"Input length {len(self._dims)}. Max expected length is {self.MAX_DIMS}")

    def __repr__(self) -> str:
        return repr(tuple(self._dims))

    def __len__(self) -> int:
        return len(self._dims)

    def __iter__(self) -> Iterator[int]:
        return iter(self._dims)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self._dims[index])
        return self._dims[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._dims[index] = operator.index(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | list):
            raise TypeError("__eq__(): incompatible function arguments. a Dims equals a tuple or a list only")
        return self._dims == list(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class _Interface:
    """A base class of callback objects. Like the real ones, it has to be initialised."""

    _is_initialised = False

    def __init__(self) -> None:
        self._is_initialised = True


def require_initialised(interface: Any, kind: type[Any]) -> None:
    """Check a callback object as the real bindings do."""
    if not isinstance(interface, kind):
        raise TypeError(f"incompatible function arguments: a {kind.__name__} is expected, not {interface!r}")
    if not interface._is_initialised:
        raise TypeError(f"{kind.__name__}.__init__() must be called when overriding __init__")


LayerInformationFormat = _enum("LayerInformationFormat", "ONELINE JSON")
"""How layers are described."""


class ILogger(_Interface):
    """Derive from it, and override :meth:`log`, which may be called from any thread."""

    Severity = _Severity
    INTERNAL_ERROR = _Severity.INTERNAL_ERROR
    ERROR = _Severity.ERROR
    WARNING = _Severity.WARNING
    INFO = _Severity.INFO
    VERBOSE = _Severity.VERBOSE

    def log(self, severity: _Severity, msg: str) -> None:
        """Log one message."""
        raise NotImplementedError('Tried to call pure virtual function "ILogger::log"')


class IErrorRecorder(_Interface):
    """Derive from it, and override all methods. While attached, it gets the errors instead of the logger."""

    def num_errors(self) -> int:
        """Return the number of errors that it holds."""
        raise NotImplementedError('Tried to call pure virtual function "IErrorRecorder::num_errors"')

    def get_error_code(self, arg0: int) -> ErrorCodeTRT:
        """Return the code of an error."""
        raise NotImplementedError('Tried to call pure virtual function "IErrorRecorder::get_error_code"')

    def get_error_desc(self, arg0: int) -> str:
        """Return the description of an error."""
        raise NotImplementedError('Tried to call pure virtual function "IErrorRecorder::get_error_desc"')

    def has_overflowed(self) -> bool:
        """Return whether errors were dropped."""
        raise NotImplementedError('Tried to call pure virtual function "IErrorRecorder::has_overflowed"')

    def clear(self) -> None:
        """Forget all errors."""
        raise NotImplementedError('Tried to call pure virtual function "IErrorRecorder::clear"')

    def report_error(self, arg0: ErrorCodeTRT, arg1: str) -> bool:
        """Record an error; return ``True`` if it is fatal."""
        raise NotImplementedError('Tried to call pure virtual function "IErrorRecorder::report_error"')


class IGpuAllocator(_Interface):
    """Derive from it, and override all methods. Addresses are ints; ``None`` refuses an allocation."""

    def allocate(self, size: int, alignment: int, flags: int) -> int | None:
        """Allocate device memory. The real library calls the asynchronous variant."""
        raise NotImplementedError(NOT_OVERRIDDEN.format("allocate"))

    def reallocate(self, address: int, alignment: int, new_size: int) -> int | None:
        """Resize memory; ``None`` if that is not possible, and the memory stays as it is."""
        raise NotImplementedError(NOT_OVERRIDDEN.format("reallocate"))

    def deallocate(self, memory: int) -> bool:
        """Free memory."""
        raise NotImplementedError(NOT_OVERRIDDEN.format("deallocate"))

    def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> int | None:
        """Allocate device memory in the order of a stream."""
        raise NotImplementedError(NOT_OVERRIDDEN.format("allocate"))

    def deallocate_async(self, memory: int, stream: int) -> bool:
        """Free memory in the order of a stream."""
        raise NotImplementedError(NOT_OVERRIDDEN.format("deallocate"))


class IGpuAsyncAllocator(IGpuAllocator):
    """An allocator that allocates and frees in the order of streams."""


class IOutputAllocator(_Interface):
    """Derive from it for outputs whose shape depends on the data, and define, as for the real one::

    def reallocate_output(self, tensor_name, memory, size, alignment): ...
    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream): ...
    def notify_shape(self, tensor_name, shape): ...
    """


def oldest_plan(library: tuple[int, ...]) -> tuple[int, int]:
    """Return the first version whose version-compatible plans and lean runtime a library can load."""
    return (10, 0) if library >= (11,) else (8, 6)


def version_of(text: str) -> tuple[int, int, int, int]:
    """Return the four numbers of a version, each of which fits into a byte."""
    if not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", text):
        raise ValueError(f"{text!r} is not a version of TensorRT such as 11.4.0.106")
    major, minor, patch, build = (int(part) for part in text.split("."))
    if max(major, minor, patch, build) > 255:
        raise ValueError(
            f"{text!r} does not fit into a plan, which has one byte for each number of a version"
        )
    return major, minor, patch, build
