"""The context of one GPU: the conversion of its statuses to errors, and the memory that it holds."""

import logging
import threading
from _thread import start_new_thread
from asyncio import _get_running_loop
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from asynctrt._util.forks import Origin
from asynctrt.devices.base import ALIGNMENT, Account, MemoryFigures, Stream
from asynctrt.devices.cuda.bindings import driver
from asynctrt.errors import DeviceError, DeviceLostError, DeviceMemoryError, OptionsError, copy_for, show

STICKY: Final = frozenset(
    getattr(driver.CUresult, name)
    for name in (
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_MPS_RPC_FAILURE",
        "CUDA_ERROR_OPERATING_SYSTEM",
        "CUDA_ERROR_UNKNOWN",
    )
    if hasattr(driver.CUresult, name)  # Older bindings know fewer.
)
"""After one of these errors every later call of this process on the device also fails."""

FREE_S: Final = 1.0
"""How long an allocation waits for memory that a thread is freeing."""

LEGACY_STREAM: Final = 1
"""``CU_STREAM_LEGACY``: the default stream, which PyTorch and others use by default."""

_OK: Final = driver.CUresult.CUDA_SUCCESS

logger = logging.getLogger("asynctrt")


class Gpu:
    """The state of a GPU that all device objects of a process share."""

    def __init__(self) -> None:
        self.lost: DeviceLostError | None = None
        """Why this process can no longer run anything there; ``None`` while it can."""
        self.hanging: set[Stream] = set()
        """The streams whose work may run forever."""
        self.put_off: list[Callable[[], None]] = []
        """Operations postponed because they would wait for that work. They run if it ends after all."""
        self.held_nbytes = 0
        """Bytes of memory that buffers of this process hold, across all its device objects."""
        # Reentrant, because garbage collection in the thread that holds it may free memory.
        self.lock = threading.RLock()
        self._to_free: deque[Callable[[], None]] = deque()
        self._is_freeing = False
        self._all_is_free = threading.Condition(self.lock)

    def free(self, free: Callable[[], None]) -> None:
        """Run ``free``, which waits for all work on the GPU.

        If this thread runs an event loop, a separate thread runs it. If some work may run forever, it is
        postponed.
        """
        with self.lock:
            if self.lost is not None:
                return
            if self.hanging:
                self.put_off.append(free)
                return
            if _get_running_loop() is not None:
                self._to_free.append(free)
                if not self._is_freeing:
                    self._is_freeing = True
                    # Not threading.Thread: garbage collection may call this while this thread starts another,
                    # and the lock held then is not reentrant.
                    start_new_thread(self._free_all, ())
                return
        free()

    def wait_for_frees(self) -> bool:
        """Wait up to :data:`FREE_S` until nothing is being freed; return False if nothing was."""
        with self._all_is_free:
            was_freeing = self._is_freeing
            self._all_is_free.wait_for(lambda: not self._is_freeing, FREE_S)
        return was_freeing

    def _free_all(self) -> None:
        while True:
            with self.lock:
                if self.hanging:
                    self.put_off += self._to_free
                    self._to_free.clear()
                if not self._to_free or self.lost is not None:
                    self._to_free.clear()
                    self._is_freeing = False
                    self._all_is_free.notify_all()
                    return
                free = self._to_free.popleft()
            try:
                free()
            except DeviceError:
                logger.exception("memory could not be freed")


_gpus: defaultdict[int, Gpu] = defaultdict(Gpu)
_limit_nbytes: int | None = None


def limit_memory(nbytes: int | None) -> None:
    """Limit the memory that this process holds on each GPU, across all models; ``None``: no limit.

    The limit covers everything that engines allocate there: weights, persistent context memory, arenas, slab
    buffers, and outputs that stay on the GPU. Memory that is already held is kept.

    :raises OptionsError: if ``nbytes`` is not positive.
    """
    global _limit_nbytes  # noqa: PLW0603  (one for the process, as the memory is)
    if nbytes is not None and nbytes < 1:
        raise OptionsError(f"the limit of memory on each GPU must be at least 1 byte, not {show(nbytes)}")
    _limit_nbytes = nbytes


class CudaContext:
    """The primary context of a GPU, which is shared with other CUDA libraries in the process."""

    def __init__(self, cuda_device: Any, ordinal: int, memory_nbytes: int | None) -> None:
        self.ordinal = ordinal
        self._account = Account(memory_nbytes)
        self._origin = Origin()
        self._what = f"the device cuda:{ordinal}"
        self._gpu = _gpus[ordinal]
        # Guards state that engines in several threads may change at once. Reentrant, because garbage
        # collection in the thread that holds it may free memory here.
        self._lock = threading.RLock()
        if self._gpu.lost is not None:
            raise copy_for(self._gpu.lost)
        code, self._context = driver.cuDevicePrimaryCtxRetain(cuda_device)
        self.check(code, f"the context of cuda:{ordinal}")
        self.activate()

    @property
    def name(self) -> str:
        return f"cuda:{self.ordinal}"

    @property
    def lost(self) -> DeviceLostError | None:
        return self._gpu.lost

    def activate(self) -> None:
        self._origin.check(self._what)
        code = driver.cuCtxSetCurrent(self._context)[0]
        if code != _OK:
            raise self.failed(code, "making it the current device")

    def memory(self) -> MemoryFigures:
        self.activate()
        code, free, total = driver.cuMemGetInfo()
        self.check(code, "asking for free memory")
        return MemoryFigures(int(free), int(total), *self._budget())

    @property
    def state(self) -> str:
        """Return ``lost``, ``stuck`` while work on it hangs, or ``ready``."""
        return "lost" if self._gpu.lost else "stuck" if self._gpu.hanging else "ready"

    def abandon(self, stream: Stream) -> None:
        """Record that the work of a stream may run forever. Nothing is freed until it has ended."""
        with self._gpu.lock:
            is_first = not self._gpu.hanging
            self._gpu.hanging.add(stream)
        if is_first:
            logger.error(
                "%r: work on it did not end. Memory on it stays allocated until it does, since freeing any "
                "would wait for that work",
                self,
            )

    def ended(self, stream: Stream) -> None:
        """Record that the work of a stream has ended. If it had been abandoned, run the postponed frees."""
        with self._gpu.lock:
            if stream not in self._gpu.hanging:
                return
            self._gpu.hanging.discard(stream)
            if self._gpu.hanging:
                return
            put_off, self._gpu.put_off = self._gpu.put_off, []
        logger.warning("%r: the work on it that did not end has ended after all", self)
        for free in put_off:
            self._gpu.free(free)

    def take(self, nbytes: int, *, zeroed_on: int) -> int:
        """Allocate memory for a buffer, zero it on the stream with that handle, and return its address."""
        self.activate()
        try:
            return self._take(nbytes, zeroed_on)
        except DeviceMemoryError:
            if not self._gpu.wait_for_frees():
                raise
            return self._take(nbytes, zeroed_on)

    def _take(self, nbytes: int, zeroed_on: int) -> int:
        self.count_in(nbytes)
        code, address = driver.cuMemAlloc(max(nbytes, ALIGNMENT))
        if code != _OK:
            self.count_out(nbytes)
            raise self.failed(code, f"{nbytes} bytes of memory")
        try:
            code = driver.cuMemsetD8Async(address, 0, max(nbytes, ALIGNMENT), zeroed_on)[0]
            self.check(code, "zeroing memory")
            self.check(driver.cuStreamSynchronize(zeroed_on)[0], "zeroing memory")
        except BaseException:
            self.give_back(int(address), nbytes)
            raise
        return int(address)

    def give_back(self, address: int, nbytes: int) -> None:
        """Free a buffer's memory through :meth:`Gpu.free`."""
        self._gpu.free(partial(self._give_back, address, nbytes))

    def _give_back(self, address: int, nbytes: int) -> None:
        self.activate()
        self.check(driver.cuMemFree(address)[0], "freeing memory")
        self.count_out(nbytes)

    def take_in_order(self, nbytes: int, stream: int) -> int:
        """Allocate memory in the order of a stream, and return its address."""
        self.count_in(nbytes)
        code, address = driver.cuMemAllocAsync(max(nbytes, ALIGNMENT), stream)
        if code != _OK:
            self.count_out(nbytes)
            raise self.failed(code, f"{nbytes} bytes in the order of a stream")
        return int(address)

    def count_in(self, nbytes: int) -> None:
        """Count memory that is about to be allocated, or that a library has allocated."""
        with self._gpu.lock:
            held, budget = self._budget()
            if budget is not None and held + nbytes > budget:
                whose = (
                    "memory_nbytes" if budget == self._account.budget_nbytes else "the limit of the process"
                )
                raise DeviceMemoryError(
                    f"{self.name} holds {held} of the {budget} bytes of its budget, and has no "
                    f"room for {nbytes} more. Lower max_rows, contexts or arenas, or raise {whose}"
                )
            self._account.held_nbytes += nbytes
            self._gpu.held_nbytes += nbytes

    def count_out(self, nbytes: int) -> None:
        """Subtract memory that :meth:`count_in` counted and that was freed."""
        with self._gpu.lock:
            self._account.held_nbytes -= nbytes
            self._gpu.held_nbytes -= nbytes

    def _budget(self) -> tuple[int, int | None]:
        """Return the bytes held and the maximum: of this object, or of the process if it has less room."""
        own, limit = self._account.budget_nbytes, _limit_nbytes
        with self._gpu.lock:
            held, all_held = self._account.held_nbytes, self._gpu.held_nbytes
        if limit is None or (own is not None and own - held <= limit - all_held):
            return held, own
        return all_held, limit

    def free_pinned(self, address: int) -> None:
        """Free a pinned block through :meth:`Gpu.free`. May be called from any thread at any time."""
        self._gpu.free(partial(self._call_within, driver.cuMemFreeHost, address))

    def _call_within(self, call: Callable[..., Any], *args: int) -> None:
        """Call the driver in this context, whatever context the calling thread has."""
        driver.cuCtxPushCurrent(self._context)
        call(*args)
        driver.cuCtxPopCurrent()

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Pin memory of the process, and return a function that unpins it through :meth:`Gpu.free`."""
        self.activate()
        code = driver.cuMemHostRegister(address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)[0]
        self.check(code, f"pinning {nbytes} bytes that are shared with another process")
        return partial(self._gpu.free, partial(self._call_within, driver.cuMemHostUnregister, address))

    def free_in_order(self, address: int, nbytes: int, stream: int) -> None:
        """Free stream-ordered memory once a stream has done its work so far."""
        if self._gpu.lost is not None:
            return
        self._call_within(driver.cuMemFreeAsync, address, stream)
        self.count_out(nbytes)

    def check(self, code: Any, what: str) -> None:
        """Raise the error for a status other than success."""
        if code != _OK:
            raise self.failed(code, what)

    def failed(self, code: Any, what: str, *, ends_unknown: bool = False) -> DeviceError:
        """Return the error for a status. If it is sticky, or work may now run forever, the device is lost."""
        name = text_of(driver.cuGetErrorName(code)[1])
        said = text_of(driver.cuGetErrorString(code)[1])
        if code in STICKY or ends_unknown:
            lost = DeviceLostError(
                f"{self.name}: {what} failed with {name} ({said}). After this error CUDA refuses every "
                "call of this process on this GPU, so nothing on it can be trusted: only a new process "
                "helps. Restart it (a supervisor can), and look for the cause with compute-sanitizer"
            )
            if self._gpu.lost is None:
                self._gpu.lost = lost
                logger.critical("%s", lost)
            return lost
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return DeviceMemoryError(
                f"{self.name} has no room for {what} ({name}); {self._memory_said()}. Lower max_rows, "
                "contexts or arenas, or end what else uses the GPU (nvidia-smi shows it)"
            )
        return DeviceError(f"{self.name}: {what} failed with {name} ({said})")

    def _memory_said(self) -> str:
        code, free, total = driver.cuMemGetInfo()
        if code != _OK:
            return "how much is free is not known"
        return str(MemoryFigures(int(free), int(total), *self._budget()))


def text_of(raw: Any) -> str:
    """Return a C string from the driver as text."""
    return raw.split(b"\0", 1)[0].decode(errors="replace") if isinstance(raw, bytes) else str(raw)
