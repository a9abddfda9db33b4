"""TensorRT plans on a CUDA device. The only importer of the four TensorRT packages, and of none until it
must.

In reading order: ``model`` opens a plan, ``engine`` reads what it takes and gives, ``context`` runs batches.
``flavours`` chooses the package, ``plan`` reads the file, ``refusals`` says why a plan was refused,
``messages`` and ``memory`` are what TensorRT calls back into.
"""

from asynctrt.backends.tensorrt.memory import MemoryStatistics
from asynctrt.backends.tensorrt.model import TensorRTModel
from asynctrt.backends.tensorrt.options import TensorRTOptions
from asynctrt.backends.tensorrt.plan import PlanHeader, read_header

__all__ = ["MemoryStatistics", "PlanHeader", "TensorRTModel", "TensorRTOptions", "read_header"]
