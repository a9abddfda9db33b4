"""Which version of TensorRT brought a name: the double of an older one lacks it.

Read from the Python bindings of 8.6 and of all versions from 10.0 to 11.4.
"""

import functools
from typing import Any, Final

from tests.doubles.tensorrt.names import version_of

SINCE: Final = {
    "EngineStat": (10, 14),
    "ExecutionContextAllocationStrategy": (10, 0),
    "IGpuAsyncAllocator": (10, 0),
    "IRuntimeConfig": (10, 11),
    "OnnxParserRefitter": (10, 0),
    "bfloat16": (10, 0),
    "int64": (10, 0),
    "ICudaEngine.create_runtime_config": (10, 11),
    "ICudaEngine.device_memory_size_v2": (10, 1),
    "ICudaEngine.get_aliased_input_tensor": (10, 15),
    "ICudaEngine.get_device_memory_size_for_profile": (10, 0),
    "ICudaEngine.get_device_memory_size_for_profile_v2": (10, 1),
    "ICudaEngine.get_engine_stat": (10, 14),
    "IExecutionContext.set_device_memory": (10, 1),
    "IGpuAllocator.allocate_async": (10, 0),
    "IGpuAllocator.deallocate_async": (10, 0),
    "ParserError.node_name": (10, 0),
    "Refitter.release_refit_resources": (11, 4),
}
"""The first version with a name of the module, or with a member of a class. TensorRT for RTX has them all."""


class Missing:
    """A member that a class inherits from a later version, and does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type[Any]) -> Any:
        """Raise what Python raises for an attribute that is not there."""
        raise AttributeError(
            f"{self._name} is new in TensorRT {'.'.join(map(str, SINCE[self._name]))}", name=self._name
        )


def is_missing(name: str, version: str) -> bool:
    """Return whether a version lacks a name of the module, or a member: ``ICudaEngine.get_engine_stat``."""
    return name in SINCE and version_of(version)[:2] < SINCE[name]


@functools.cache
def of_version(kind: type[Any], version: str) -> type[Any]:
    """Return a class as the bindings of a version have it: without the members that came later."""
    bases = {base.__name__ for base in kind.__mro__}
    missing = {}
    for name in SINCE:
        base, _, member = name.partition(".")
        if base in bases and is_missing(name, version):
            missing[member] = Missing(name)
    return type(kind.__name__, (kind,), {**missing, "__doc__": kind.__doc__}) if missing else kind
