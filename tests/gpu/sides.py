"""One side of a comparison: the real TensorRT on a GPU or the double, and notes of what it does.

A note is a line of JSON, written at once, so that it is there when the library ends the process.
"""

import functools
import gc
import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from asynctrt.backends.tensorrt.plan import read_header
from asynctrt.devices.host import HostDevice
from tests.doubles.support import make_logger, make_recorder, wait
from tests.doubles.tensorrt import (
    EngineSpec,
    StrictTensorRT,
    TensorIO,
    ViolationError,
    double_lean_runtime,
    double_plan,
)

PLANS = ("mlp", "encoder2")
"""A perceptron with one profile, and a text encoder with two, both version-compatible."""

CLOSE_S = 5.0
CALLED_BACK = []
"""What a library may call until the process ends, whatever should have been destroyed."""

BUILT_BY = "8.6.0.12"
LIBRARY = "10.16.1.11"
"""The versions of the double where no real package says others."""

SPECS = {
    "mlp": {
        "inputs": (TensorIO("x", "float32", (-1, 64)),),
        "profiles": ({"x": ((1, 64), (16, 64), (64, 64))},),
        "function": lambda given: given["x"][:, :16] * 2,
        "function_outputs": (TensorIO("y", "float32", (-1, 16)),),
    },
    "encoder2": {
        "inputs": (TensorIO("ids", "int32", (-1, -1)),),
        "profiles": (
            {"ids": ((1, 1), (16, 16), (64, 32))},
            {"ids": ((1, 32), (16, 64), (32, 128))},
        ),
        "function": lambda given: {
            "pooled": np.repeat(given["ids"].sum(axis=1, keepdims=True), 128, axis=1).astype("f4"),
            "states": np.repeat(given["ids"][..., None], 128, axis=2).astype("f4"),
        },
        "function_outputs": (
            TensorIO("pooled", "float32", (-1, 128)),
            TensorIO("states", "float32", (-1, -1, 128)),
        ),
    },
}


@dataclass(frozen=True)
class Setting:
    """What is compared: a package, its plans, and the lean runtime that runs them."""

    flavour: str
    """A package, or ``double`` to try the suite without one."""
    plans: str
    """The folder of ``mlp-vcx.plan`` and ``encoder2-vcx.plan``."""
    lean_runtime: str
    """``libnvinfer_lean.so`` of the version that built the plans; empty if the package itself runs them."""


@functools.cache
def library(flavour):
    """Return what a process has once: its GPU, a package, and the one logger that this takes."""
    from asynctrt.devices.cuda import CudaDevice

    device, trt = CudaDevice(0), import_module(flavour)
    device.activate()
    return device, trt, make_logger(trt)


class OverError(Exception):
    """What follows is undefined."""


class Side:
    """A module of TensorRT with an engine and all that it needs."""

    def __init__(self, name, setting, version, folder):
        self.name, self.setting, self.folder = name, setting, folder
        self.is_real = name == "real" and setting.flavour != "double"
        if self.is_real:
            self.device, self.trt, self.logger = library(setting.flavour)
        else:
            self.device = HostDevice(threads=4)
            flavour = "tensorrt_lean" if setting.flavour == "double" else setting.flavour
            self.trt = StrictTensorRT(self.device, version=version or LIBRARY, flavour=flavour)
            self.logger = make_logger(self.trt)
        self.recorder = make_recorder(self.trt)
        self.allocator = make_allocator(self.trt, self.device)
        self.root = self.runtime = self.engine = None
        self.kept, self.streams = [], []
        self.told = len(self.logger.said)

    def close(self):
        """Free all that it has, so that another side can follow in this process."""
        self.engine = None
        gc.collect()
        self.runtime = None
        for stream in self.streams:
            stream.close(CLOSE_S)
        for one in self.kept:
            if hasattr(one, "close"):
                one.close()
        self.kept.clear()
        self.root = None
        gc.collect()
        CALLED_BACK.append((self.logger, self.recorder, self.allocator))

    # Notes

    def note(self, step, value, **more):
        print(json.dumps({"step": step, "value": value, **more}), flush=True)

    def attempt(self, step, do):
        """Note what a call returns or raises and what it reports, and return its value.

        :raises OverError: after a violation, since the real library leaves undefined what comes then.
        """
        print(json.dumps({"begins": step}), flush=True)
        given = is_over = None
        try:
            given = do()
            value = plain(given)
        except ViolationError as error:
            value, is_over = f"undefined: {error}", True
        except Exception as error:
            value = f"raises {type(error).__name__}"
        errors, self.recorder.errors = self.recorder.errors, []
        logged, self.told = self.logger.said[self.told :], len(self.logger.said)
        said = [f"{int(severity)} {text}" for severity, text in logged if int(severity) <= 2]
        self.note(
            step,
            value,
            recorded=[kind_of(int(code), text) for code, text in errors],
            logged=[kind_of(None, text) for severity, text in logged if int(severity) <= 1],
            said=[text for _, text in errors] + said,
        )
        if is_over:
            raise OverError
        return given

    # What scenarios are made of

    def plan(self, name):
        """Return the bytes of a plan."""
        path = Path(self.setting.plans) / f"{name}-vcx.plan"
        if self.is_real:
            return path.read_bytes()
        version = BUILT_BY
        if self.setting.plans and path.exists():
            version = ".".join(map(str, read_header(path.read_bytes()).version))
        if version.split(".")[:2] == self.trt.__version__.split(".")[:2]:
            version = self.trt.__version__
        spec = EngineSpec(
            **SPECS[name], persistent_nbytes=2048, version_compatible=True, excludes_lean_runtime=True
        )
        return double_plan(spec, version=version)

    def lean_runtime(self):
        """Return the path of the lean runtime, or ``None`` if there is none."""
        if self.is_real:
            return self.setting.lean_runtime or None
        if self.setting.flavour != "double" and not self.setting.lean_runtime:
            return None
        path = self.folder / "lean.so"
        path.write_bytes(double_lean_runtime(BUILT_BY))
        return str(path)

    def start(self, *, recorder=True, allocator=True):
        """Make the runtime that deserialises the plans."""
        self.root = self.runtime = self.trt.Runtime(self.logger)
        path = self.lean_runtime()
        if recorder:
            self.root.error_recorder = self.recorder
        if allocator:
            self.root.gpu_allocator = self.allocator
        if path is not None:
            self.root.engine_host_code_allowed = True
            self.runtime = self.root.load_runtime(path)
            if recorder:
                self.runtime.error_recorder = self.recorder
            if allocator:
                self.runtime.gpu_allocator = self.allocator
        return self.runtime

    def open(self, name="mlp", **settings):
        """Deserialise a plan."""
        self.start(**settings)
        self.engine = self.runtime.deserialize_cuda_engine(self.plan(name))
        return self.engine

    @property
    def sizes_memory(self):
        """Whether enqueue memory is given with its size."""
        header = read_header(self.plan("mlp")[:64], nbytes=1 << 40)
        return header.version >= (10, 1)

    def context(self, arena=None):
        """Create a context with enqueue memory of the application's, as the adapter does."""
        engine = self.engine
        least = engine.device_memory_size_v2 if self.sizes_memory else engine.device_memory_size
        nbytes = max(256, least)
        arena = arena or self.keep(self.device.allocate(nbytes))
        if self.sizes_memory:
            strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self.engine.create_execution_context(strategy)
            context.set_device_memory(arena.address, nbytes)
        else:
            context = self.engine.create_execution_context_without_device_memory()
            context.device_memory = arena.address
        return context

    def keep(self, one):
        self.kept.append(one)
        return one

    def stream(self):
        self.streams.append(self.device.create_stream())
        return self.streams[-1]

    def tensors(self):
        """Return the names of the inputs and those of the outputs."""
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        inputs = [one for one in names if self.engine.get_tensor_mode(one) == self.trt.TensorIOMode.INPUT]
        return inputs, [one for one in names if one not in inputs]

    def give(self, context, *shape, seed=0):
        """Set the shape and the addresses for a batch; return the outputs' arrays by name."""
        (name,), outputs = self.tensors()
        dtype = np.dtype("int32" if name == "ids" else "float32")
        assert context.set_input_shape(name, shape)
        buffer = self.keep(self.device.allocate_staging(max(256, int(np.prod(shape)) * dtype.itemsize)))
        buffer.array(dtype, shape, 0)[...] = np.random.default_rng(seed).integers(1, 900, shape)
        assert context.set_tensor_address(name, buffer.address)
        arrays = {}
        for output in outputs:
            dims = tuple(context.get_tensor_shape(output))
            nbytes = max(256, 4 * int(np.prod(dims)))
            held = self.keep(self.device.allocate_staging(nbytes))
            assert context.set_tensor_address(output, held.address)
            arrays[output] = held.array(np.dtype("float32"), dims, 0)
            arrays[output][...] = np.nan
        return arrays

    def finish(self, stream):
        error = wait(self.device, stream)
        if error is not None:
            raise error

    def run(self, context, *shape, seed=0, stream=None):
        """Run a batch, and return a copy of its outputs."""
        stream = stream or self.stream()
        arrays = self.give(context, *shape, seed=seed)
        assert context.execute_async_v3(stream.handle)
        self.finish(stream)
        return {name: array.copy() for name, array in arrays.items()}


def plain(value):
    """Return a value as JSON can hold it, and as it can be compared between two libraries."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if type(value).__name__.startswith("Dims") or isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "name") and hasattr(type(value), "__members__"):
        return value.name
    return "an object"


def kind_of(code, text):
    """Return an error without its words and places: the code and its meaning."""
    found = re.search(r"Error Code (\d+): ([\w ]+\w)", text)
    return f"{found[1]} {found[2]}" if found else f"{'' if code is None else code} (unknown form)".strip()


def same(one, other):
    """Return whether two batches had the same answers, and had any."""
    return all(np.array_equal(one[name], other[name]) and not np.isnan(one[name]).any() for name in one)


class Held:
    """Memory that an allocator gave, the calls that it got, and whether it refuses."""

    def __init__(self, device):
        self.device = device
        self.held = {}
        self.calls = []
        self.refuses = False
        self.answer = 0

    def take(self, method, size):
        self.calls.append(method)
        if self.refuses:
            return self.answer
        buffer = self.device.allocate(size)
        self.held[buffer.address] = buffer
        return buffer.address

    def drop(self, method, memory):
        self.calls.append(method)
        if memory:
            self.held.pop(memory).close()
        return True


def make_allocator(trt, device):
    class Allocator(Held, trt.IGpuAllocator):
        def __init__(self):
            trt.IGpuAllocator.__init__(self)
            Held.__init__(self, device)

        def allocate(self, size, alignment, flags):
            return self.take("allocate", size)

        def reallocate(self, address, alignment, new_size):
            return 0

        def deallocate(self, memory):
            return self.drop("deallocate", memory)

        def allocate_async(self, size, alignment, flags, stream):
            return self.take("allocate_async", size)

        def deallocate_async(self, memory, stream):
            return self.drop("deallocate_async", memory)

    return Allocator()
