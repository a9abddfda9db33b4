"""A model for workers on a GPU: one kernel that doubles its rows, or does what their first values ask for.

As ``tests.gpu.fallible:kind`` a worker opens it by itself. ``HANG`` spins for a minute, and then leaves the
GPU to others, whatever has become of the process.
"""

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.errors import DeviceError
from asynctrt.tensors import TensorSpec
from tests.benchmarks.gpu.kernels import Arguments, compiled
from tests.contract.plans import PERCEPTRON, SETTING, RealFaults

ILLEGAL, HANG = -1.0, -2.0
GATE = "ASYNCTRT_TEST_FAULT"
"""The environment variable with a path: if a file is there, the next batch takes it away, and writes where it
must not."""

ROW_MAX = 64
WORK_NS = 2_000_000
"""How long a batch of ``steady`` takes, whatever its rows."""

SOURCE = r"""
__device__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// One block for each row.
extern "C" __global__ void behave(const float* in, float* out, unsigned int dim, unsigned int kept,
                                  unsigned long long work_ns, unsigned int is_bad) {
    unsigned long long begun_ns = now_ns();
    const float* row = in + (unsigned long long)blockIdx.x * dim;
    float what = row[0];
    if (what == -1.0f || is_bad) *(volatile float*)16 = what;
    if (what == -2.0f) work_ns = 60000000000ull;
    for (unsigned int i = threadIdx.x; i < kept; i += blockDim.x)
        out[(unsigned long long)blockIdx.x * kept + i] = 2.0f * row[i];
    while (now_ns() - begun_ns < work_ns) { }
}
"""


class FallibleModel(ModelBase):
    """``y = 2 * x``, but for rows that ask for something else.

    :param work_ns: how long a batch keeps its blocks busy.
    :param kept: how many values of a row are doubled, from the first on; all by default.
    """

    platform = "test"
    capabilities = Capabilities(rows_max=ROW_MAX)

    def __init__(self, dim, work_ns, kept=None):
        self.name = "fallible"
        self.dim, self.work_ns, self.kept = dim, work_ns, kept or dim
        self.inputs = (TensorSpec("x", "float32", (dim,)),)
        self.outputs = (TensorSpec("y", "float32", (self.kept,)),)

    def create_context(self, device):
        return FallibleContext(self, device)

    def close(self):
        """Do nothing: what is loaded belongs to the contexts."""


class FallibleContext:
    """A context with the kernel, loaded for its device."""

    def __init__(self, model, device):
        from cuda.bindings import driver

        self.model, self.driver = model, driver
        device.activate()
        major, minor = device.compute_capability
        module = self.checked(driver.cuModuleLoadData(compiled(f"sm_{major}{minor}", SOURCE)))
        self.kernel = self.checked(driver.cuModuleGetFunction(module, b"behave"))

    def checked(self, result):
        code, *values = result
        if int(code):
            raise DeviceError(f"a call of the test's model failed with {code!r}")
        return values[0] if values else None

    def bind(self, inputs, outputs):
        return FallibleBinding(self, inputs[0].address, outputs[0].address)

    def close(self):
        """Do nothing: the kernel goes with the process."""


class FallibleBinding:
    """The kernel with one slab's memory."""

    def __init__(self, context, source, target):
        self._context = context
        self._gate = Path(os.environ.get(GATE, "/nonexistent"))
        self._good, self._bad = (
            Arguments(
                ("p", source),
                ("p", target),
                ("I", context.model.dim),
                ("I", context.model.kept),
                ("Q", context.model.work_ns),
                ("I", is_bad),
            )
            for is_bad in (0, 1)
        )

    def enqueue(self, rows, *, profile, stream, arena):
        context = self._context
        arguments = self._good
        if self._gate.exists():
            self._gate.unlink()
            arguments = self._bad
        launch = context.driver.cuLaunchKernel
        context.checked(launch(context.kernel, rows, 1, 1, 128, 1, 1, 0, stream.handle, arguments.address, 0))

    def unbound_outputs(self, rows):
        return {}


def kind():
    """A model whose rows are four numbers."""
    return FallibleModel(4, 0)


def steady():
    """A model whose batches take 2 ms each, whatever their rows: 32,000 rows a second."""
    return FallibleModel(16, WORK_NS)


def large():
    """A model of rows of 588 KiB, of which it doubles 16 values."""
    return FallibleModel(150_528, 0, kept=16)


class GatedFaults(RealFaults):
    """Faults of a real plan: the next batch does what the file at :data:`GATE` says, and removes it."""

    def _before(self, context, handle, enqueue):
        gate = Path(os.environ[GATE])
        with suppress(FileNotFoundError):
            self.fail_next(gate.read_text())
            gate.unlink()
        return super()._before(context, handle, enqueue)


def plan():
    """The perceptron's plan, under the package that the environment names, with :class:`GatedFaults`."""
    from asynctrt.devices.cuda import find_cuda_device

    GatedFaults(find_cuda_device("cuda:0"), import_module(SETTING.flavour))
    return PERCEPTRON
