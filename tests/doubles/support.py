"""A double with an application's logger, error recorder, allocators, streams and memory."""

import threading

import numpy as np

from asynctrt.devices.host import HostDevice
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan

WAIT_S = 20.0


class Bench:
    """One engine on a host device, and all that is needed to run it."""

    def __init__(self, spec=None, *, device=None, start=True, **kwargs):
        self.device = device or HostDevice(threads=4)
        self.trt = StrictTensorRT(self.device, **kwargs)
        self.spec = spec or EngineSpec()
        self.logger = make_logger(self.trt)
        self.recorder = make_recorder(self.trt)
        self.allocator = make_allocator(self.trt, self.device)
        self.runtime = self.trt.Runtime(self.logger)
        self.runtime.error_recorder = self.recorder
        self.runtime.gpu_allocator = self.allocator
        self.engine = self.load(self.spec) if start else None
        self.streams = []

    def load(self, spec, **kwargs):
        plan = double_plan(spec, flavour=self.trt.__name__, **kwargs)
        return self.runtime.deserialize_cuda_engine(plan)

    def stream(self):
        self.streams.append(self.device.create_stream())
        return self.streams[-1]

    def user(self, **kwargs):
        return User(self, **kwargs)

    def close(self):
        for stream in self.streams:
            assert stream.close(WAIT_S)


class User:
    """A context with memory of its own, as an application would have it."""

    def __init__(self, bench, *, engine=None, spec=None, arena=None, strategy="USER_MANAGED", context=None):
        self.bench = bench
        self.spec = spec or bench.spec
        self.engine = engine or bench.engine
        self.outputs = {}
        self.allocators = {}
        self.arrays = {}
        self.context, self.arena = context, arena
        if context is not None:
            return  # Its memory is the test's business.
        self.context = self.engine.create_execution_context(
            bench.trt.ExecutionContextAllocationStrategy[strategy]
        )
        self.arena = arena or bench.device.allocate(self.engine.device_memory_size_v2)
        if strategy == "USER_MANAGED" and self.arena.nbytes:
            self.context.set_device_memory(self.arena.address, self.arena.nbytes)

    def give(self, arrays):
        """Set shapes and addresses for these inputs."""
        if not isinstance(arrays, dict):
            arrays = {self.spec.inputs[0].name: arrays}
        self.arrays = arrays
        self.kept = []
        for io in self.spec.inputs:
            array = arrays[io.name]
            # Staging memory: both a GPU and the test reach it.
            buffer = self.bench.device.allocate_staging(max(256, array.nbytes))
            buffer.array(array.dtype, array.shape, 0)[:] = array
            assert self.context.set_input_shape(io.name, array.shape)
            assert self.context.set_tensor_address(io.name, buffer.address)
            self.kept.append(buffer)
        for io in self.spec.outputs:
            if io.name == "positives":
                self.allocators[io.name] = make_output_allocator(self.bench)
                assert self.context.set_output_allocator(io.name, self.allocators[io.name])
                continue
            nbytes = max(256, self.spec.expected(arrays)[io.name].nbytes)
            buffer = self.bench.device.allocate_staging(nbytes)
            assert self.context.set_tensor_address(io.name, buffer.address)
            self.outputs[io.name] = buffer
        return self

    def run(self, stream=None):
        """Enqueue, and wait for the batch; returns its outputs by name."""
        stream = stream or self.bench.stream()
        assert self.context.execute_async_v3(stream.handle)
        error = wait(self.bench.device, stream)
        if error is not None:
            raise error
        return self.answers()

    def answers(self):
        found = {}
        for io, given in zip(self.spec.inputs, self.spec.outputs, strict=False):
            array = self.arrays[io.name]
            found[given.name] = self.outputs[given.name].array(array.dtype, array.shape, 0).copy()
        if "positives" in self.allocators:
            allocator = self.allocators["positives"]
            dtype = self.arrays[self.spec.inputs[0].name].dtype
            found["positives"] = allocator.buffer.array(dtype, allocator.shape, 0).copy()
        return found

    def check(self):
        """Check the outputs."""
        same(self.answers(), self.spec.expected(self.arrays))


def two_profiles():
    """Both admit the same batches, so that a switch between them changes nothing else."""
    shapes = {"input": ((1, 16), (8, 16), (64, 16))}
    return EngineSpec(profiles=(shapes, shapes))


def _another_allocator(user):
    user.allocators["output"] = make_output_allocator(user.bench)
    assert user.context.set_output_allocator("output", user.allocators["output"])


def _another_address(user, name):
    buffer = user.bench.device.allocate_staging(1 << 14)
    user.kept.append(buffer)
    assert user.context.set_tensor_address(name, buffer.address)


def _other_memory(user):
    other = user.bench.device.allocate(user.arena.nbytes)
    user.kept.append(other)
    user.context.set_device_memory(other.address, other.nbytes)


def _another_shape_and_back(user):
    assert user.context.set_input_shape("input", (3, 16))
    assert user.context.set_input_shape("input", user.arrays["input"].shape)


MODIFICATIONS = {
    "another shape": lambda user, stream: user.context.set_input_shape("input", (3, 16)),
    "another shape and back": lambda user, stream: _another_shape_and_back(user),
    "another address of the input": lambda user, stream: _another_address(user, "input"),
    "another address of the output": lambda user, stream: _another_address(user, "output"),
    "no address": lambda user, stream: user.context.set_tensor_address("output", 0),
    "other enqueue memory": lambda user, stream: _other_memory(user),
    "more of the same enqueue memory": lambda user, stream: user.context.set_device_memory(
        user.arena.address, user.arena.nbytes + 256
    ),
    "another profile": lambda user, stream: user.context.set_optimization_profile_async(1, stream.handle),
    "an output allocator": lambda user, stream: _another_allocator(user),
}
"""After each of them, a graph that was captured before must not be launched."""


def set_the_same(user, stream):
    """Set everything to the values that a context has already, which does not modify it."""
    context, shape = user.context, user.arrays["input"].shape
    assert context.set_optimization_profile_async(context.active_optimization_profile, stream.handle)
    assert context.set_input_shape("input", shape)
    for name in ("input", "output"):
        assert context.set_tensor_address(name, context.get_tensor_address(name))
    assert context.set_output_allocator("output", user.allocators.get("output"))
    context.set_device_memory(user.arena.address, user.arena.nbytes)


def wait(device, stream):
    """Wait for all that is on a stream; returns the error of its work."""
    event = device.create_event()
    stream.record(event)
    assert event.synchronize(WAIT_S)
    return event.error


def until(condition):
    """Give the device turns until that is so."""
    turn = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if condition():
            return
        turn.wait(0.002)
    raise TimeoutError("what the test waits for did not come about")


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def rows(count, *dims, dtype="float32", seed=0):
    """Values that every type takes."""
    return np.random.default_rng(seed).integers(-9, 10, (count, *dims)).astype(dtype)


def make_logger(trt):
    class Logger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)
            self.said = []

        def log(self, severity, msg):
            self.said.append((severity, msg))

        def errors(self):
            return [msg for severity, msg in self.said if severity <= trt.ILogger.ERROR]

    return Logger()


def make_recorder(trt):
    class Recorder(trt.IErrorRecorder):
        def __init__(self):
            trt.IErrorRecorder.__init__(self)
            self.errors = []

        def report_error(self, val, desc):
            self.errors.append((val, desc))
            return False

        def num_errors(self):
            return len(self.errors)

        def get_error_code(self, index):
            return self.errors[index][0]

        def get_error_desc(self, index):
            return self.errors[index][1]

        def has_overflowed(self):
            return False

        def clear(self):
            self.errors.clear()

        def last(self):
            return self.errors[-1]

    return Recorder()


def make_allocator(trt, device):
    class Allocator(trt.IGpuAllocator):
        def __init__(self):
            trt.IGpuAllocator.__init__(self)
            self.held = {}
            self.refuse = False

        def allocate(self, size, alignment, flags):
            if self.refuse:
                return 0
            buffer = device.allocate(size)
            self.held[buffer.address] = buffer
            return buffer.address

        def deallocate(self, memory):
            self.held.pop(memory).close()
            return True

    return Allocator()


def make_output_allocator(bench):
    class OutputAllocator(bench.trt.IOutputAllocator):
        def __init__(self):
            bench.trt.IOutputAllocator.__init__(self)
            self.buffer = None
            self.shape = None
            self.asked = []

        def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
            self.asked.append((tensor_name, memory, size, alignment, stream))
            if self.buffer is None or self.buffer.nbytes < size:
                self.buffer = bench.device.allocate_staging(size)
            return self.buffer.address

        def notify_shape(self, tensor_name, shape):
            self.shape = tuple(shape)

    return OutputAllocator()
