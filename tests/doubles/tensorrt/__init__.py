"""A strict double of TensorRT, which needs neither TensorRT nor a GPU.

:class:`StrictTensorRT` takes the place of the module ``tensorrt``: it has the same names, arguments and
return values, as far as an inference runtime needs them. This code runs on either::

    device = HostDevice()
    trt = StrictTensorRT(device)
    spec = EngineSpec(inputs=(TensorIO("tokens", "int32", (-1, -1)),), work_ns=2_000_000)

    logger = Logger()  # Derived from trt.ILogger.
    engine = trt.Runtime(logger).deserialize_cuda_engine(double_plan(spec))
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    ...
    assert np.array_equal(answer, spec.expected(tokens)["output"])
    assert not trt.violations()

With ``StrictTensorRT(device, flavour="tensorrt_rtx")`` and ``double_plan(spec, flavour="tensorrt_rtx")`` it
stands in for TensorRT for RTX, which compiles when a plan is used; ``tensorrt_lean``
and ``tensorrt_dispatch`` lack the ONNX parser, which reads the files of :func:`double_weights`.

An engine may be a NumPy function with any inputs and outputs (``EngineSpec(function=...)``).

Others really compute, step by step, through the enqueue memory that they are given, on a
:class:`HostDevice` or, in float32 and with kernels compiled at run time, on a CUDA device.
:meth:`EngineSpec.expected` returns the right answers. Two unordered batches in one arena give wrong numbers,
as in reality, and a violation.

**Raised at the call**, as :class:`ViolationError`, because the real library leaves it undefined:

- a context used by two threads at once; an enqueue while a batch of the same context is pending on another
  stream; a switch of profiles while one is pending at all;
- an enqueue after a refused shape; enqueue memory that is too small; addresses that are not aligned to 256
  bytes; overlapping memory;
- an unknown stream; auxiliary streams that are not all different;
- weights that are refitted while a batch is in flight; a refit with weights that were freed;
- a logger, an error recorder, an allocator or an output allocator that was destroyed while it is needed;
- an output allocator that raises or returns ``None``, of which only the standard error stream would hear;
- what ends the process with an engine of TensorRT 8 under a later library, such as an output allocator.

**Noted**, because it is found while a batch executes or an object is destroyed: two batches in one arena at
once or out of order; a write to enqueue memory that is in use; a context that is destroyed while its batch is
in flight; a graph that executes after the context it was captured from was destroyed or modified, that is,
given another shape, address, profile, output allocator, enqueue memory or weights, even if it was undone. The
batch fails if it can, the next call into the double raises the violation, and
:meth:`StrictTensorRT.violations` lists it.

**Refused** as by the real library, with ``False`` or ``None`` and a report to the error recorder or, without
one, to the logger: plans that are damaged, of another version or for another GPU, shapes that no profile
takes, unknown names, memory that an allocator refuses, a profile that another context has to itself
(``EngineSpec(shares_profiles=False)``); an enqueue without shapes, addresses or enqueue memory, or with
shapes that are outside the active profile or do not fit together. ``infer_shapes`` and
``set_optimization_profile_async`` raise ``RuntimeError`` instead, as the bindings do.

**The memory of an output whose size depends on the data** is asked for twice: before the batch is enqueued,
with a guess, and in the middle of it, once the size is known, unless the guess was enough.

**Python's global lock (the GIL)** is released by the real bindings in ``execute_async_v3``, ``infer_shapes``,
``create_execution_context``, ``deserialize_cuda_engine`` and ``get_engine_stat``. They hold it, however long
that takes, in everything else: in ``Runtime()``, ``load_runtime``, ``set_optimization_profile_async``, all
other setters, and while objects are destroyed. The double releases it where it waits: in ``execute_async_v3``
alone.

**On a lost device** every call fails, and destroying an engine or a context reports an error, too.

:meth:`StrictTensorRT.fail_next` injects failures that cannot be provoked otherwise.
"""

from tests.doubles.tensorrt.double import StrictTensorRT
from tests.doubles.tensorrt.monitor import ViolationError
from tests.doubles.tensorrt.refit import double_weights
from tests.doubles.tensorrt.runtime import double_lean_runtime, double_plugin_library
from tests.doubles.tensorrt.spec import EngineSpec, TensorIO, double_plan

__all__ = [
    "EngineSpec",
    "StrictTensorRT",
    "TensorIO",
    "ViolationError",
    "double_lean_runtime",
    "double_plan",
    "double_plugin_library",
    "double_weights",
]
