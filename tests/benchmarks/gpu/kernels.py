"""A model whose batches take a given time, and whose answers show whether all went well.

On a GPU a batch is one kernel, compiled at run time: it doubles its input, spins until its time is over, and
notes when that was. Its blocks take all the shared memory of their multiprocessors, so two such kernels never
share one. Each block writes a mark of its batch into the arena when it begins and checks it when it ends; if
another batch used the arena meanwhile, the answer is NaN. On the host device, NumPy does the same in a thread
that sleeps instead of spinning.
"""

import ctypes
import threading
from functools import partial

import numpy as np

from asynctrt._util import clock
from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.errors import DeviceError
from asynctrt.tensors import TensorSpec

THREADS = 256
STATE_NBYTES = 256
ENQUEUE_NBYTES = 1 << 20

SOURCE = r"""
__device__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// state[0]: blocks that have ended; state[1]: batches that have ended.
extern "C" __global__ void work(const float* in, float* out, unsigned long long count,
                                unsigned long long work_ns, unsigned int seed, volatile unsigned int* state,
                                volatile unsigned long long* ended_ns, volatile unsigned int* arena) {
    unsigned long long begun_ns = now_ns();
    unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned long long stride = gridDim.x * (unsigned long long)blockDim.x;
    unsigned int batch = state[1];
    unsigned int mark = (batch + 1) * 65536u + seed;
    if (threadIdx.x == 0 && arena) arena[blockIdx.x] = mark;
    for (unsigned long long i = first; i < count; i += stride) out[i] = 2.0f * in[i];
    __syncthreads();
    if (threadIdx.x) return;
    while (now_ns() - begun_ns < work_ns) { }
    if (arena && arena[blockIdx.x] != mark) out[0] = __int_as_float(0x7fffffff);
    __threadfence();
    if (atomicAdd((unsigned int*)state, 1u) == gridDim.x - 1) {
        state[0] = 0;
        state[1] = batch + 1;
        *ended_ns = now_ns();
        __threadfence_system();
    }
}

// Answers the host `rounds` times with what the GPU's clock says; gives up after two seconds.
extern "C" __global__ void tell_time(volatile unsigned long long* asked, volatile unsigned long long* told,
                                     unsigned long long rounds) {
    unsigned long long begun_ns = now_ns();
    for (unsigned long long round = 1; round <= rounds; ++round) {
        while (*asked < round) { if (now_ns() - begun_ns > 2000000000ull) return; }
        told[0] = now_ns();
        __threadfence_system();
        told[1] = round;
        __threadfence_system();
    }
}

// The shortest step that the GPU's clock makes.
extern "C" __global__ void clock_step(volatile unsigned long long* told) {
    unsigned long long least = 1000000000ull, last = now_ns();
    for (int steps = 0; steps < 200;) {
        unsigned long long now = now_ns();
        if (now != last) { if (now - last < least) least = now - last; last = now; ++steps; }
    }
    told[0] = least;
    __threadfence_system();
}
"""


def kernels_on(device):
    """Return what runs batches on this kind of device."""
    return HostKernels(device) if device.name == "host" else CudaKernels(device)


class SpinModel(ModelBase):
    """``output = 2 * input``, in a given time.

    :param work_ns: how long a batch keeps its part of the device busy; a function of its rows, or one number.
    :param row: the dimensions of one row, float32.
    :param share: which share of the GPU's multiprocessors it takes.
    """

    platform = "benchmark"

    def __init__(
        self,
        kernels,
        work_ns,
        *,
        row=(512,),
        share=1.0,
        rows_max=None,
    ):
        self.kernels = kernels
        self.work_ns = work_ns if callable(work_ns) else lambda rows: work_ns
        self.share = share
        self.name = "spin"
        self.inputs = (TensorSpec("input", np.dtype("float32"), row),)
        self.outputs = (TensorSpec("output", np.dtype("float32"), row),)
        self.capabilities = Capabilities(is_capturable=True, enqueue_nbytes=ENQUEUE_NBYTES, rows_max=rows_max)
        self.contexts = []

    def create_context(self, device):
        context = self.kernels.create_context(self, seed=len(self.contexts) + 1)
        self.contexts.append(context)
        return context

    def close(self):
        """Do nothing: all models share the kernels."""

    @property
    def ended_ns(self):
        """When the latest batch had been computed, on the device's clock (see ``compare_clocks``)."""
        return max(context.ended_ns for context in self.contexts)

    def expected(self, rows):
        return {"output": 2 * rows}


class HostKernels:
    """Runs batches on the host device."""

    def __init__(self, device):
        self.device = device
        self.said = "host device, whose batches sleep: only to see that the benchmark works"

    def create_context(self, model, seed):
        return HostContext(model, seed)

    def compare_clocks(self):
        now_ns = clock.now_ns()
        return now_ns, now_ns

    def create_finish(self, stream):
        event = self.device.create_event()

        def finish():
            stream.record(event)
            event.synchronize()

        return finish


class HostContext:
    """One context, which counts its batches."""

    def __init__(self, model, seed):
        self.model = model
        self.seed = seed
        self.batch = 0
        self.ended_ns = 0

    def bind(self, inputs, outputs):
        return HostBinding(self, inputs[0].array, outputs[0].array)

    def close(self):
        """Do nothing: it holds nothing."""

    def work(self, source, target, marks, work_ns):
        begun_ns = clock.now_ns()
        mark = (self.batch + 1) * 65536 + self.seed
        if marks is not None:
            marks[0] = mark
        np.multiply(source, 2, out=target)
        threading.Event().wait(max(work_ns - (clock.now_ns() - begun_ns), 0) / 1e9)
        if marks is not None and marks[0] != mark:
            target[...] = np.nan
        self.batch += 1
        self.ended_ns = clock.now_ns()


class HostBinding:
    """A context bound to its arrays."""

    def __init__(self, context, source, target):
        self.context = context
        self.source, self.target = source, target

    def enqueue(self, rows, *, profile, stream, arena):
        marks = None if arena is None else arena.array(np.dtype("int64"), (1,), 0)
        work_ns = self.context.model.work_ns(rows)
        work = partial(self.context.work, self.source[:rows], self.target[:rows], marks, work_ns)
        stream.launch(work, label=rows)

    def unbound_outputs(self, rows):
        return {}


class CudaKernels:
    """Runs batches on a GPU: the compiled kernels and their parameters."""

    def __init__(self, device):
        from cuda.bindings import driver

        self.device = device
        self.driver = driver
        device.activate()
        major, minor = device.compute_capability
        module = self.checked(driver.cuModuleLoadData(compiled(f"sm_{major}{minor}")))
        self.work, self._tell_time, clock_step = (
            self.checked(driver.cuModuleGetFunction(module, name))
            for name in (b"work", b"tell_time", b"clock_step")
        )
        attribute = driver.CUdevice_attribute
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        # A block that takes all the shared memory there is has its multiprocessor for itself.
        self.shared_nbytes = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.checked(
            driver.cuFuncSetAttribute(
                self.work,
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.shared_nbytes,
            )
        )
        self._stream = device.create_stream()
        self._words = device.allocate_staging(4096)
        told = self._words.address + 1024
        self.run(clock_step, 1, 1, 0, self._stream.handle, Arguments(("p", told)))
        self.checked(driver.cuStreamSynchronize(self._stream.handle))
        self.clock_step_ns = ctypes.c_uint64.from_address(told).value
        self.said = f"the GPU's clock steps by {self.clock_step_ns} ns"

    def checked(self, result):
        code, *values = result
        if int(code):
            raise DeviceError(f"a call of the benchmark failed with {code!r}")
        return values[0] if values else None

    def _attribute(self, which):
        return self.checked(self.driver.cuDeviceGetAttribute(which, self.device.ordinal))

    def run(self, kernel, blocks, threads, shared_nbytes, stream, params):
        self.checked(
            self.driver.cuLaunchKernel(
                kernel, blocks, 1, 1, threads, 1, 1, shared_nbytes, stream, params.address, 0
            )
        )

    def create_context(self, model, seed):
        return CudaContext(self, model, seed)

    def compare_clocks(self, rounds=300):
        """Return one moment on the GPU's clock and on the host's, from the quickest of many exchanges."""
        asked = ctypes.c_uint64.from_address(self._words.address)
        told = (ctypes.c_uint64 * 2).from_address(self._words.address + 1024)
        asked.value = told[1] = 0
        params = Arguments(("p", self._words.address), ("p", self._words.address + 1024), ("Q", rounds))
        self.run(self._tell_time, 1, 1, 0, self._stream.handle, params)
        answers = []
        give_up_ns = clock.now_ns() + 3_000_000_000
        for number in range(1, rounds + 1):
            asked_ns = clock.now_ns()
            asked.value = number
            while told[1] != number:
                if clock.now_ns() > give_up_ns:
                    raise DeviceError("the GPU does not tell the time")
            told_ns = clock.now_ns()
            answers.append((told_ns - asked_ns, told[0], (asked_ns + told_ns) // 2))
        self.checked(self.driver.cuStreamSynchronize(self._stream.handle))
        _, gpu_ns, host_ns = min(answers)
        return gpu_ns, host_ns

    def create_finish(self, stream):
        """Return a function that records an event and spins on it, which is CUDA's fastest way to wait."""
        driver = self.driver
        event = self.checked(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
        handle = stream.handle

        def finish():
            driver.cuEventRecord(event, handle)
            code = driver.cuEventSynchronize(event)[0]
            if int(code):
                raise DeviceError(f"the raw loop failed with {code!r}")

        return finish


class CudaContext:
    """One context, whose batches count themselves on the GPU."""

    def __init__(self, kernels, model, seed):
        self.kernels = kernels
        self.model = model
        self.seed = seed
        self.state = kernels.device.allocate(STATE_NBYTES)
        self.stamp = kernels.device.allocate_staging(STATE_NBYTES)
        self._ended = ctypes.c_uint64.from_address(self.stamp.address)

    @property
    def ended_ns(self):
        return self._ended.value

    def bind(self, inputs, outputs):
        return CudaBinding(self, inputs[0], outputs[0])

    def close(self):
        # The stamp is looked at when all is over; it is a few bytes, and the process's in the end.
        self.state.close()


class CudaBinding:
    """A context bound to its memory. The parameters of each batch size are prepared once."""

    def __init__(self, context, source, target):
        self.context = context
        self.source, self.target = source.address, target.address
        self.row_count = int(np.prod(source.dims, dtype=np.int64))
        self._params = {}

    def enqueue(self, rows, *, profile, stream, arena):
        context = self.context
        kernels, model = context.kernels, context.model
        blocks = max(round(kernels.multiprocessors * model.share), 1)
        key = rows, 0 if arena is None else arena.address
        params = self._params.get(key)
        if params is None:
            params = self._params[key] = Arguments(
                ("p", self.source),
                ("p", self.target),
                ("Q", rows * self.row_count),
                ("Q", model.work_ns(rows)),
                ("I", context.seed),
                ("p", context.state.address),
                ("p", context.stamp.address),
                ("p", key[1]),
            )
        kernels.run(kernels.work, blocks, THREADS, kernels.shared_nbytes, stream.handle, params)

    def unbound_outputs(self, rows):
        return {}


TYPES = {"p": ctypes.c_void_p, "Q": ctypes.c_uint64, "I": ctypes.c_uint32}


class Arguments:
    """A kernel's arguments, laid out once, with the address that ``cuLaunchKernel`` takes."""

    def __init__(self, *values):
        self._values = [TYPES[kind](value) for kind, value in values]
        pointers = [ctypes.addressof(value) for value in self._values]
        self._array = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._array)


def compiled(arch, source=SOURCE):
    """Compile kernels to machine code for an architecture."""
    from cuda.bindings import nvrtc

    def checked(result):
        code, *values = result
        if int(code):
            raise DeviceError(f"the kernels cannot be compiled: {code!r}")
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"work.cu", 0, [], []))
    code = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()])[0]
    if int(code):
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise DeviceError(f"the kernels cannot be compiled for {arch}: {log.decode().strip()}")
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin
