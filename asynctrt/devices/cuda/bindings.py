"""The only module of the package that imports ``cuda.*``.

Calls made for each batch use ``cuda.bindings``, which costs less per call than ``cuda.core``; arrays of other
libraries are read through ``cuda.core``.
"""

from asynctrt.errors import DeviceUnavailableError

try:
    from cuda.bindings import driver
    from cuda.core.utils import StridedMemoryView
except ImportError as error:
    raise DeviceUnavailableError(
        f"a CUDA device needs cuda-python, which cannot be imported here ({error}): pip install cuda-python"
    ) from error

__all__ = ["StridedMemoryView", "driver"]
