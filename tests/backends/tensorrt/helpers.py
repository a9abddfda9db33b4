"""Models over the strict double on a host device, and batches without an engine's pool."""

import struct
import threading

import numpy as np

from asynctrt.backends.base import TensorMemory
from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from asynctrt.devices.host import HostDevice
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan

WAIT_S = 20


def in_threads(work, count=4):
    """Do some work in several threads, all of which begin at once."""
    barrier = threading.Barrier(count)
    threads = [threading.Thread(target=lambda: (barrier.wait(WAIT_S), work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Bench:
    """One model of the double, and the means to run batches on it."""

    def __init__(
        self,
        spec=None,
        *,
        device=None,
        trt=None,
        double="tensorrt",
        version=None,
        plan=None,
        model=True,
        **options,
    ):
        self.device = device or HostDevice(in_place="never", threads=2)
        self.trt = trt or StrictTensorRT(self.device, flavour=double, version=version)
        self.spec = spec or EngineSpec()
        self.options = TensorRTOptions(**options)
        made = double_plan(self.spec, flavour=self.trt.__name__, version=version) if plan is None else plan
        self.plan = made
        self.stream = self.device.create_stream()
        self.model = self.open() if model else None
        self._buffers = []
        self._contexts = []

    def open(self, plan=None):
        plan = self.plan if plan is None else plan
        return TensorRTModel(plan, device=self.device, flavour=self.trt, options=self.options)

    def memory(self, spec, rows, sizes):
        dims = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims)
        buffer = self.device.allocate(int(np.prod((rows, *dims))) * spec.dtype.itemsize)
        self._buffers.append(buffer)
        array = buffer.array(spec.dtype, (rows, *dims), 0)
        return TensorMemory(spec.name, spec.dtype, dims, buffer.address, array)

    def create_context(self):
        """Create a context, which is closed with the bench."""
        self._contexts.append(self.model.create_context(self.device))
        return self._contexts[-1]

    def ready(self, **sizes):
        """Return a binding of a new context, and an arena."""
        return self.bind(self.create_context(), **sizes), self.arena()

    def bind(self, context, rows=64, **sizes):
        """Bind a context to new memory; keywords size dynamic dimensions, with '_' for '.'."""
        model = self.model
        named = {name.replace("_", "."): size for name, size in sizes.items()}
        inputs = tuple(self.memory(spec, rows, named) for spec in model.inputs)
        outputs = tuple(
            None if spec.name in model.signature.unbound else self.memory(spec, rows, named)
            for spec in model.outputs
        )
        return context.bind(inputs, outputs)

    def arena(self, nbytes=None):
        # Kept, as an enqueue returns before its batch has run.
        self._buffers.append(
            self.device.allocate(self.model.capabilities.enqueue_nbytes if nbytes is None else nbytes)
        )
        return self._buffers[-1]

    def fill(self, binding, seed=1):
        random = np.random.default_rng(seed)
        for memory in binding.inputs:
            memory.array[...] = random.integers(-9, 9, memory.array.shape)

    def finish(self):
        """Wait for the stream, and return its error."""
        event = self.device.create_event()
        self.stream.record(event)
        assert event.synchronize(WAIT_S)
        return event.error

    def check(self, binding, rows):
        """Compare the answers with NumPy's for the first ``rows`` rows; return those without bound memory."""
        expected = self.spec.expected({memory.name: memory.array[:rows] for memory in binding.inputs})
        for memory in binding.outputs:
            if memory is not None:
                np.testing.assert_array_equal(memory.array[:rows], expected[memory.name])
        unbound = binding.unbound_outputs(rows)
        for name, array in unbound.items():
            np.testing.assert_array_equal(array, expected[name])
        return unbound

    def run(self, binding, rows, arena, seed=1, profile=None):
        """Fill, enqueue, wait and check; return the outputs without bound memory."""
        self.fill(binding, seed)
        binding.enqueue(rows, profile=profile, stream=self.stream, arena=arena)
        assert self.finish() is None
        return self.check(binding, rows)

    def close(self):
        for context in self._contexts:
            context.close()
        if self.model is not None:
            self.model.close()
        assert self.stream.close(WAIT_S)
        self.device.close()


def header(tag=b"ftrt", nbytes=64, version=(11, 4, 0, 106), gpus=0):
    """Return the first 64 bytes of a plan."""
    return struct.pack("<4sIQQ4B4sQ24x", tag, 0, 2, nbytes, *version, tag, gpus)
