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


class TensorIOMode(_Enum):
    """Whether a tensor is an input or an output."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(_Enum):
    """Where the data of a tensor has to be."""

    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(_Enum):
    """Who provides a context's enqueue memory."""

    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ErrorCodeTRT(_Enum):
    """The codes of errors that are reported to an error recorder."""

    SUCCESS = 0
    UNSPECIFIED_ERROR = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_CONFIG = 4
    FAILED_ALLOCATION = 5
    FAILED_INITIALIZATION = 6
    FAILED_EXECUTION = 7
    FAILED_COMPUTATION = 8
    INVALID_STATE = 9
    UNSUPPORTED_STATE = 10


class HardwareCompatibilityLevel(_Enum):
    """The other GPUs that an engine runs on."""

    NONE = 0
    AMPERE_PLUS = 1
    SAME_COMPUTE_CAPABILITY = 2


class EngineStat(_Enum):
    """The statistics of :meth:`ICudaEngine.get_engine_stat`."""

    TOTAL_WEIGHTS_SIZE = 0
    STRIPPED_WEIGHTS_SIZE = 1


class EngineCapability(_Enum):
    """The capability that an engine was restricted to."""

    STANDARD = 0
    SAFETY = 1
    DLA_STANDALONE = 2


class EngineCapabilityOf8(_Enum):
    """The same of TensorRT 8, whose first name for a value was its older one."""

    DEFAULT = 0
    SAFE_GPU = 1
    SAFE_DLA = 2


class ProfilingVerbosity(_Enum):
    """How much an engine tells about its layers."""

    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class CudaGraphStrategy(_Enum):
    """Whether TensorRT for RTX captures batches by itself."""

    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


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
    """Check a callback object as the real bindings do.

    :raises TypeError: if it is of the wrong class, or its base class was not initialised.
    """
    if not isinstance(interface, kind):
        raise TypeError(f"incompatible function arguments: a {kind.__name__} is expected, not {interface!r}")
    if not interface._is_initialised:
        raise TypeError(f"{kind.__name__}.__init__() must be called when overriding __init__")


class LayerInformationFormat(_Enum):
    """How layers are described."""

    ONELINE = 0
    JSON = 1


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
    """Return the four numbers of a version.

    :raises ValueError: unless there are four, each of which fits into a byte.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", text):
        raise ValueError(f"{text!r} is not a version of TensorRT such as 11.4.0.106")
    major, minor, patch, build = (int(part) for part in text.split("."))
    if max(major, minor, patch, build) > 255:
        raise ValueError(
            f"{text!r} does not fit into a plan, which has one byte for each number of a version"
        )
    return major, minor, patch, build
