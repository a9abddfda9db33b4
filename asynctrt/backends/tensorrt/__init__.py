"""TensorRT plans on a CUDA device. Only this package imports the four TensorRT packages, each on demand.

In reading order: ``model`` opens a plan, ``engine`` reads its inputs, outputs and profiles, and ``context``
runs batches. ``flavours`` chooses the package, ``plan`` reads the file, ``refusals`` explains why a plan was
refused, and TensorRT calls back into ``messages`` and ``memory``.
"""

from asynctrt.backends.tensorrt.memory import MemoryStatistics
from asynctrt.backends.tensorrt.model import TensorRTModel
from asynctrt.backends.tensorrt.plan import PlanHeader, read_header
from asynctrt.backends.tensorrt_options import TensorRTOptions

__all__ = ["MemoryStatistics", "PlanHeader", "TensorRTModel", "TensorRTOptions", "read_header"]
