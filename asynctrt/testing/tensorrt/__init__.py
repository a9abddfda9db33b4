"""A strict TensorRT for an application's own tests, where neither TensorRT nor a GPU is needed.

:class:`StrictTensorRT` stands where the module ``tensorrt`` would: the same names, arguments and return
values, as far as an inference runtime needs them. What runs on it unchanged::

    device = HostDevice()
    trt = StrictTensorRT(device)
    spec = EngineSpec(inputs=(TensorIO("tokens", "int32", (-1, -1)),), work_ns_per_row=20_000)

    logger = trt.Logger()
    engine = trt.Runtime(logger).deserialize_cuda_engine(double_plan(spec))
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    ...
    assert np.array_equal(answer, spec.expected(tokens)["output"])
    assert not trt.violations()

Its engines compute something real, step by step, through the enqueue memory that they are given, on a
:class:`HostDevice` or, with kernels compiled at run time, on a CUDA device. :meth:`EngineSpec.expected` says
what comes out. Two batches in one arena without an order between them give wrong numbers, as in reality, and
a violation.

**What raises** :class:`ViolationError`, at the call, because the real library leaves it undefined:

- a context used by two threads at once; an enqueue or a switch of profiles while a batch of the same
  context is pending on another stream;
- an enqueue without all shapes, after a shape was refused, without an address or enqueue memory; enqueue
  memory that is too small; addresses that are not aligned to 256 bytes; memory that overlaps;
- a stream that the device does not know; auxiliary streams that are not all different;
- a logger, an error recorder, an allocator or an output allocator that is gone while it is needed.

**What is noted**, because it is found while a batch executes or an object is destroyed: two batches in one
arena at once or out of order, a write to enqueue memory that is in use, a context that is destroyed while its
batch is in flight, a graph that executes after the context that it was captured from was destroyed or
modified: given another shape, address, profile, output allocator or enqueue memory, even if that was taken
back. The batch fails where it can, the next call into the double raises it, and
:meth:`StrictTensorRT.violations` lists it.

**What is refused** as by the real library, with ``False`` or ``None`` and a report to the error recorder or,
without one, to the logger: plans that are damaged, of another version or for another GPU, shapes outside
the profile, names that are not there, memory that the allocator does not give.

:meth:`StrictTensorRT.fail_next` makes things fail that cannot be made to fail otherwise.
"""

from asynctrt.testing.tensorrt.double import StrictTensorRT
from asynctrt.testing.tensorrt.monitor import ViolationError
from asynctrt.testing.tensorrt.runtime import double_lean_runtime
from asynctrt.testing.tensorrt.spec import EngineSpec, TensorIO, double_plan

__all__ = ["EngineSpec", "StrictTensorRT", "TensorIO", "ViolationError", "double_lean_runtime", "double_plan"]
