"""Real TensorRT behind the contract suites: the package, plans and lean runtime that the environment names.

See :mod:`tests.gpu.differential` for the variables. Faults are real, too: a batch hangs behind a wait of its
stream, its enqueue is refused by the library, or a kernel before it writes where it must not.
"""

import asyncio
from collections import deque
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from tests.gpu.differential import setting_from_environment
from tests.gpu.support import gpu_is_here

SETTING = setting_from_environment()
PERCEPTRON = Path(SETTING.plans) / "mlp-vcx.plan"
OPTIONS = {
    "flavour": SETTING.flavour or None,
    "lean_runtime": SETTING.lean_runtime or None,
    "allow_host_code": bool(SETTING.lean_runtime),
}
"""For ``tensorrt`` of :func:`asynctrt.open`."""
LAYERS = (64, 256, 256, 16)
WAIT_S = 30
TOLERANCE = 3e-3
"""Of the largest value: the GPU multiplies with 10 bits of mantissa (TF32)."""

ILLEGAL = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry wrong()
{
    .reg .b64 %address;
    mov.u64 %address, 16;
    st.global.u64 [%address], %address;
    ret;
}
\0"""


def plans_are_here():
    """Return whether there are a GPU and plans for it."""
    return gpu_is_here() and bool(SETTING.flavour and SETTING.plans)


class Perceptron:
    """What ``mlp-vcx.plan`` computes, with the weights that its ONNX file was made from."""

    def __init__(self):
        made, self.layers = np.random.default_rng(0), []
        for fan_in, fan_out in pairwise(LAYERS):
            weights = (made.standard_normal((fan_in, fan_out)) / fan_in**0.5).astype(np.float32)
            self.layers.append((weights, made.standard_normal(fan_out).astype(np.float32) * 0.1))

    def __call__(self, x):
        *hidden, (weights, bias) = self.layers
        for one, other in hidden:
            x = np.maximum(x @ one + other, 0)
        return x @ weights + bias


class RealFaults:
    """What can be made to go wrong with the next batches of a package, as with the double of it."""

    def __init__(self, device, module):
        self._next = deque()
        self._hangs = self._released = 0
        self._word = device.allocate_staging(256)
        self._word.array(np.dtype("uint32"), (64,), 0)[...] = 0
        self._kind = module.IExecutionContext
        self._enqueue = enqueue = self._kind.execute_async_v3
        self._kind.execute_async_v3 = lambda context, handle: self._before(context, handle, enqueue)

    def close(self):
        """Let everything run, and the package be as it was."""
        self.release_hangs()
        self._kind.execute_async_v3 = self._enqueue

    def fail_next(self, what, count=1):
        """Make the next enqueues go wrong: ``hang``, ``enqueue`` or ``illegal-address``."""
        self._next.extend([what] * count)

    @property
    def hanging(self):
        """How many batches hang."""
        return self._hangs - self._released

    def release_hangs(self):
        """Let all batches that hang end."""
        self._released = self._hangs
        self._word.array(np.dtype("uint32"), (64,), 0)[0] = self._hangs

    def violations(self):
        """Return nothing: the real library does not tell."""
        return ()

    def _before(self, context, handle, enqueue):
        what = self._next.popleft() if self._next else None
        if what == "hang":
            self._wait(handle)
        elif what == "illegal-address":
            self._write_wrongly(handle)
        elif what == "enqueue":
            name = context.engine.get_tensor_name(0)
            address = context.get_tensor_address(name)
            context.set_tensor_address(name, 0)
            is_enqueued = enqueue(context, handle)
            context.set_tensor_address(name, address)
            return is_enqueued
        return enqueue(context, handle)

    def _wait(self, handle):
        from cuda.bindings import driver

        self._hangs += 1
        wait, flag = driver.cuStreamWaitValue32, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (code,) = wait(handle, self._word.address, self._hangs, flag)
        assert not int(code), code

    def _write_wrongly(self, handle):
        from cuda.bindings import driver

        code, module = driver.cuModuleLoadData(ILLEGAL)
        assert not int(code), code
        code, kernel = driver.cuModuleGetFunction(module, b"wrong")
        assert not int(code), code
        (code,) = driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, handle, 0, 0)
        assert not int(code), code


class AnySubject:
    """A model on a device that can be made to fail, and rows for it."""

    def open(self, **kw):
        kw = {"contexts": 3, "arenas": 3, "max_rows": 4, "graphs": "off", **kw}
        return asynctrt.open(self.model, device=self.device, **kw)

    async def check(self, engine, number=1):
        """Send a row, and check the answer."""
        sent = self.rows(number)
        async with asyncio.timeout(WAIT_S):
            self.compare(await engine.infer(sent), sent)


class RealSubject(AnySubject):
    """The perceptron's plan on a GPU, in the place of :class:`tests.contract.devices.Subject`."""

    is_real = True
    input, output = "x", "y"
    computes = Perceptron()

    def __init__(self, device, *, double=None):
        module = import_module(SETTING.flavour)
        self.device = device
        self.double = double or RealFaults(device, module)
        self.model = self.load()

    def load(self):
        """Open the plan once more."""
        return TensorRTModel(PERCEPTRON, device=self.device, options=TensorRTOptions(**OPTIONS))

    @staticmethod
    def rows(*numbers):
        """Return a different row for each number."""
        return np.stack([np.random.default_rng(n & 0xFFFF).normal(size=64) for n in numbers]).astype("f4")

    @classmethod
    def compare(cls, result, sent):
        """Check an answer."""
        expected = cls.computes(sent)
        answer = result[cls.output]
        assert answer.shape == expected.shape
        np.testing.assert_allclose(answer, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())

    def close(self):
        self.double.close()
        self.model.close()
