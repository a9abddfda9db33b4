"""Run the double's work on a CUDA device, with kernels that are compiled at run time for its GPU.

An enqueue neither allocates nor waits, so it can be captured; only a data-dependent output waits for its
batch, as in the real library. The kernels themselves keep the counters for arenas, contexts and failures, so
that these are also right when a graph launches them; the counters are mirrored in pinned memory.

What depends on a GPU is checked here: the order of batches in arenas, and what they write. Whether a graph's
context was modified, other types than float32 and auxiliary streams are for the host device.
"""

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from cuda.bindings import driver, nvrtc

from asynctrt.devices.base import ALIGNMENT, aligned
from asynctrt.devices.cuda import CudaDevice
from asynctrt.errors import DeviceError, DeviceLostError, DeviceUnavailableError
from tests.doubles.tensorrt.kernels import SOURCE
from tests.doubles.tensorrt.monitor import EnqueuedBatch, Fault, Ticket, ViolationMonitor
from tests.doubles.tensorrt.spec import INPUTS_MAX

SLOTS: Final = 2048
CELLS: Final = 1024
RECORDS: Final = 256
NEIGHBOURS: Final = 8
"""How many arenas a batch checks: its own, and the latest that overlap it."""

REMEMBERED: Final = 4096
"""How many batches messages can name."""

THREADS: Final = 256
ANY: Final = 0xFFFF_FFFF
CHECK_KINDS: Final = {
    1: "two enqueues in one arena without an order between them: {batch} starts to execute in {arena} "
    "while another batch executes in it or in one that overlaps it",
    2: "two enqueues in one arena without an order between them: {batch} starts to execute before a batch "
    "that was enqueued earlier in {arena}",
    3: "the enqueue memory of {batch} was written to while it executed",
}

_u32 = ctypes.c_uint32
_u64 = ctypes.c_uint64


class _Input(ctypes.Structure):
    _fields_ = (
        ("source", _u64),
        ("target", _u64),
        ("states", _u64),
        ("count", _u64),
        ("stride", _u64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("control", _u64),
        ("pinned", _u64),
        ("guards", _u64 * 2),
        ("weights", _u64),
        ("packed", _u64),
        ("counts", _u64),
        ("work_ns", _u64),
        ("rows", _u64),
        ("row_length", _u64),
        ("number", _u32),
        ("slot", _u32),
        ("captured", _u32),
        ("inputs", _u32),
        ("steps", _u32),
        ("cells", _u32),
        ("cell", _u32 * NEIGHBOURS),
        ("expected", _u32 * NEIGHBOURS),
        ("input", _Input * INPUTS_MAX),
    )


class _Record(ctypes.Structure):
    _fields_ = (("kind", _u32), ("number", _u32), ("cell", _u32), ("valid", _u32))


class _Pinned(ctypes.Structure):
    _fields_ = (
        ("hangs_armed", _u32),
        ("hangs_begun", _u32),
        ("hangs_released", _u32),
        ("faults_armed", _u32),
        ("started", _u32 * SLOTS * 2),
        ("finished", _u32 * SLOTS * 2),
        ("longest", _u32 * SLOTS),
        ("records", _Record * RECORDS),
    )


CONTROL_NBYTES: Final = 4 * (4 + 2 * CELLS + 5 * SLOTS)


class _Context:
    """One execution context, and its slot on the device."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.queued = 0
        self.batch = _Batch()
        self.key: object = None
        # The latest of each kind, kept alive for as long as it may be pending.
        self.last: CudaTicket | None = None
        self.captured: CudaTicket | None = None


class CudaTicket(Ticket):
    """An enqueue on a CUDA stream, whose end shows in its context's counter."""

    __slots__ = ("_executor", "_slot", "_wanted")

    def __init__(
        self, text: str, handle: int, executor: "CudaExecutor", slot: int, wanted: int | None
    ) -> None:
        super().__init__(text, handle)
        self._executor = executor
        self._slot = slot
        self._wanted = wanted

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it."""
        pinned = self._executor.pinned
        if self._wanted is None:
            return bool(pinned.started[1][self._slot] == pinned.finished[1][self._slot])
        ahead: int = (pinned.finished[0][self._slot] - self._wanted) & ANY
        return ahead < 1 << 31


class CudaExecutor:
    """Runs the double's work on a :class:`CudaDevice`."""

    def __init__(self, device: CudaDevice, monitor: ViolationMonitor) -> None:
        self.monitor = monitor
        self._device = device
        # A context that is destroyed retires, in the middle of anything that its thread is doing.
        self._lock = threading.RLock()
        device.activate()
        self._kernels = _compiled(device)
        multiprocessors = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self._processors = int(driver.cuDeviceGetAttribute(multiprocessors, device.ordinal)[1])
        self._control = device.allocate(CONTROL_NBYTES)
        self._staging = device.allocate_staging(ctypes.sizeof(_Pinned))
        memory = self._staging.array(np.dtype(np.uint8), (ctypes.sizeof(_Pinned),), 0)
        memory[:] = 0
        self.pinned = _Pinned.from_address(self._staging.address)
        self._stream = device.create_stream()
        self._contexts: dict[int, _Context] = {}
        self._cells: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._queued = [0] * CELLS
        self._slots = 0
        self._texts: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._seen = 0

    def problem_of(self, handle: int) -> str | None:
        # Asking CUDA about an invalid handle could crash the process.
        return None if handle > 2 else f"{handle} is not the handle of a stream, or that of a default stream"

    def memory_problem(self, address: int, nbytes: int) -> str | None:
        attribute = driver.CUpointer_attribute
        code, start = driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)
        if code != driver.CUresult.CUDA_SUCCESS:
            return f"the GPU cannot reach the memory at {address:#x}"
        code, size = driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)
        left = int(start) + int(size) - address
        if code == driver.CUresult.CUDA_SUCCESS and left < nbytes:
            return f"{nbytes} bytes are needed at {address:#x}, but its allocation ends after {left}"
        return None

    def is_capturing(self, handle: int) -> bool:
        code, status = driver.cuStreamIsCapturing(handle)
        self._check(code, "asking a stream whether it captures")
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def enqueue(self, enqueued: EnqueuedBatch, handle: int, aux: Sequence[int]) -> Ticket:
        spec = enqueued.spec
        is_other = any(io.dtype != "float32" for io in spec.inputs) or aux
        if is_other or spec.is_sensitive or spec.function is not None:
            raise DeviceError(
                "on a GPU the double computes steps of float32 alone, on one stream and without regard to "
                "company: use the host device"
            )
        self._device.activate()
        captured = self.is_capturing(handle)
        context = self._context_of(enqueued.context)
        batch = self._described(enqueued, context)
        batch.captured = captured
        self._place(enqueued, batch, counted=not captured)
        kernel = self._launcher(batch)
        if spec.fills_gpu and batch.work_ns:
            kernel("begin", 2 * self._processors, 1024, handle)
        else:
            kernel("begin", 1, 1024 if batch.work_ns else 1, handle)
        blocks = self._blocks(enqueued)
        for number in range(1, spec.steps + 1):
            kernel("step", blocks, THREADS, handle, number)
        if spec.data_dependent:
            kernel("count", -(-batch.rows // THREADS), THREADS, handle)
            kernel("tell", 1, 1, handle)
        else:
            kernel("finish", blocks, THREADS, handle)
        if captured:
            if context.captured is None:
                context.captured = CudaTicket(
                    f"a graph with {enqueued.text}", handle, self, context.slot, None
                )
            return context.captured
        context.queued = (context.queued + 1) & ANY
        context.last = CudaTicket(enqueued.text, handle, self, context.slot, context.queued)
        return context.last

    def touch(self, address: int, nbytes: int, handle: int) -> None:
        self._device.check(driver.cuMemsetD8Async(address, 1, nbytes, handle)[0], "temporary storage")

    def mark(self, context: int, text: str, handle: int) -> Ticket:
        self._device.activate()
        known = self._context_of(context)
        if self.is_capturing(handle):
            # Everything that would have to be waited for is done by now.
            return CudaTicket(text, handle, self, known.slot, self.pinned.finished[0][known.slot])
        batch = _Batch(control=self._control.address, pinned=self._staging.address, slot=known.slot)
        self._launcher(batch)("mark", 1, 1, handle)
        known.queued = (known.queued + 1) & ANY
        known.last = CudaTicket(text, handle, self, known.slot, known.queued)
        return known.last

    def wait(self, enqueued: EnqueuedBatch, ticket: Ticket) -> None:
        self._check(driver.cuStreamSynchronize(ticket.handle)[0], f"waiting for {enqueued.text}")

    def longest(self, enqueued: EnqueuedBatch, ticket: Ticket) -> int:
        self.wait(enqueued, ticket)
        return int(self.pinned.longest[self._contexts[enqueued.context].slot])

    def finish(self, enqueued: EnqueuedBatch, handle: int) -> None:
        self._device.activate()
        batch = self._context_of(enqueued.context).batch
        kernel = self._launcher(batch)
        if enqueued.outputs[-1]:
            batch.packed = enqueued.outputs[-1]
            kernel("pack", -(-batch.rows // THREADS), THREADS, handle)
        kernel("finish", self._blocks(enqueued), THREADS, handle)

    def write(self, address: int, data: bytes) -> None:
        self._device.activate()
        self._check(
            driver.cuMemcpyHtoDAsync(address, data, len(data), self._stream.handle)[0], "writing weights"
        )
        self._check(driver.cuStreamSynchronize(self._stream.handle)[0], "writing weights")

    def modified(self, context: int, generation: int) -> None:
        """Do nothing: which graphs are out of date is checked on the host device."""

    def retire(self, context: int) -> None:
        with self._lock:
            self._contexts.pop(context, None)

    def poll(self) -> None:
        lost = self._device.lost
        if lost is not None and self.monitor.lost is None:
            self.monitor.lost = str(lost)
        with self._lock:
            while self._seen < RECORDS and self.pinned.records[self._seen].valid == self._seen + 1:
                record = self.pinned.records[self._seen]
                self._seen += 1
                batch, arena = self._texts.get(record.number, (f"batch {record.number}", "its arena"))
                self.monitor.note(CHECK_KINDS[record.kind].format(batch=batch, arena=arena))

    def armed(self, what: Fault, count: int) -> None:
        if what == "hang":
            self.pinned.hangs_armed += count
        elif what == "illegal-address":
            self.pinned.faults_armed += count

    @property
    def hanging(self) -> int:
        return int(self.pinned.hangs_begun - self.pinned.hangs_released)

    def release_hangs(self) -> None:
        self.pinned.hangs_released = self.pinned.hangs_begun

    def _check(self, code: Any, what: str) -> None:
        """Raise the error for a status, and record the loss of the device."""
        try:
            self._device.check(code, what)
        except DeviceLostError:
            if self.monitor.lost is None:
                self.monitor.lost = driver.cuGetErrorString(code)[1].decode()
            raise

    def _context_of(self, number: int) -> _Context:
        with self._lock:
            context = self._contexts.get(number)
            if context is None:
                if self._slots == SLOTS:
                    raise DeviceError(f"the TensorRT double supports at most {SLOTS} execution contexts")
                context = self._contexts[number] = _Context(self._slots)
                self._slots += 1
            return context

    def _described(self, enqueued: EnqueuedBatch, context: _Context) -> _Batch:
        """Return the batch as its kernels see it. It is computed again only after a change."""
        batch = context.batch
        batch.number = enqueued.number & ANY
        # Not an address yet, which is known in the middle of the enqueue: something is to be counted.
        batch.packed = ALIGNMENT if enqueued.spec.data_dependent else 0
        arena = (enqueued.arena, enqueued.arena_size)
        key = (enqueued.shapes, enqueued.inputs, enqueued.outputs, arena, enqueued.weights)
        if key == context.key:
            return batch
        context.key = key
        spec = enqueued.spec
        batch.control, batch.pinned = self._control.address, self._staging.address
        batch.guards[0], batch.guards[1] = enqueued.arena, enqueued.arena_end
        batch.weights, batch.slot = enqueued.weights, context.slot
        batch.rows = enqueued.shapes[0][0]
        batch.row_length = int(np.prod(enqueued.shapes[0][1:], dtype=np.int64))
        batch.work_ns = spec.work_ns
        batch.inputs, batch.steps = len(spec.inputs), spec.steps
        at = enqueued.arena + ALIGNMENT
        for index in range(len(spec.inputs)):
            count = int(np.prod(enqueued.shapes[index], dtype=np.int64))
            stride = aligned(count * 4)
            batch.input[index] = _Input(enqueued.inputs[index], enqueued.outputs[index], at, count, stride)
            at += spec.steps * stride
        batch.counts = at
        return batch

    def _place(self, enqueued: EnqueuedBatch, batch: _Batch, *, counted: bool) -> None:
        """Set which arenas the batch checks, and how many batches have to end in them before it."""
        low, high = enqueued.arena, enqueued.arena + enqueued.arena_size
        with self._lock:
            own = (enqueued.arena, enqueued.arena_size)
            index = self._cells.get(own)
            if index is None:
                index = len(self._cells)
                if index == CELLS:
                    _, index = self._cells.popitem(last=False)
                self._cells[own] = index
            self._cells.move_to_end(own)
            near = [index]
            for (start, size), other in reversed(self._cells.items()):
                if other != index and start < high and low < start + size and len(near) < NEIGHBOURS:
                    near.append(other)
            batch.cells = len(near)
            for position, cell in enumerate(near):
                batch.cell[position] = cell
                batch.expected[position] = self._queued[cell] if counted else ANY
            if counted:
                self._queued[index] = (self._queued[index] + 1) % ANY
            self._texts[batch.number] = enqueued.text, f"[{low:#x}, +{enqueued.arena_size})"
            if len(self._texts) > REMEMBERED:
                self._texts.popitem(last=False)

    def _launcher(self, batch: _Batch) -> Any:
        """Return a function that launches kernels with a batch as their argument, copied at each launch."""
        step = _u32(0)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(batch), ctypes.addressof(step))
        address = ctypes.addressof(pointers)

        def launch(name: str, blocks: int, threads: int, handle: int, number: int = 0) -> None:
            step.value = number
            code = driver.cuLaunchKernel(
                self._kernels[name], blocks, 1, 1, threads, 1, 1, 0, handle, address, 0
            )[0]
            self._check(code, f"launching the double's kernel {name}")
            # Refer to the pointers, so that they live as long as this function does.
            assert pointers

        return launch

    def _blocks(self, enqueued: EnqueuedBatch) -> int:
        largest = max(int(np.prod(shape, dtype=np.int64)) for shape in enqueued.shapes)
        return max(1, min(-(-largest // THREADS) + 1, 4 * self._processors))


def _compiled(device: CudaDevice) -> dict[str, Any]:
    """Return the kernels, loaded on the device."""
    major, minor = device.compute_capability
    cubin = compile_kernels(f"sm_{major}{minor}")
    code, module = driver.cuModuleLoadData(cubin)
    device.check(code, "loading the double's kernels")
    kernels = {}
    for name in ("begin", "step", "count", "tell", "pack", "finish", "mark"):
        code, kernels[name] = driver.cuModuleGetFunction(module, name.encode())
        device.check(code, f"finding the double's kernel {name}")
    return kernels


def compile_kernels(architecture: str) -> bytes:
    """Compile the double's kernels to machine code, for an architecture such as ``sm_90``."""
    try:
        code, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"double.cu", 0, [], [])
    except (RuntimeError, OSError, ImportError) as error:
        raise DeviceUnavailableError(
            f"the TensorRT double compiles its kernels with NVRTC, which is not installed "
            f"({str(error).strip()}): pip install nvidia-cuda-nvrtc, for a CUDA version that the driver "
            "supports"
        ) from error
    sizes = {"BATCH": ctypes.sizeof(_Batch), "PINNED": ctypes.sizeof(_Pinned), "CONTROL": CONTROL_NBYTES}
    options = [f"--gpu-architecture={architecture}".encode(), b"--fmad=false"]
    options += [f"--define-macro={name}_NBYTES={size}".encode() for name, size in sizes.items()]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.decode().strip("\0 \n")
        raise DeviceUnavailableError(
            f"NVRTC cannot compile the TensorRT double's kernels for {architecture}: {said}"
        )
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin: bytes = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin
