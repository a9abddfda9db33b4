"""The CPU as a device."""

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from asynctrt._util import clock
from asynctrt._util.cgroup import available_memory
from asynctrt._util.forks import Origin
from asynctrt.devices.base import Account, Buffer, DeviceArray, MemoryFigures, Stream, check_share
from asynctrt.devices.host.memory import HostBuffer
from asynctrt.devices.host.streams import HostEvent, HostStream, InPlace
from asynctrt.devices.host.threads import StreamThreads
from asynctrt.errors import DeviceError, DeviceLostError, DeviceMemoryError, OptionsError

CONTEXTS_MAX: Final = 32
"""The largest default number of contexts of an engine."""


class HostDevice:
    """The CPU as a device.

    Engines opened with the same object share its threads; ``device="host"`` creates a new one.

    A function runs in a thread unless it says ``run_on="loop"``; with ``contexts=1`` it is always the same
    thread. Batches of ONNX models that were measured to be shorter than a hand-over to a thread run in place,
    on the event loop's thread. A run that blocks the loop for more than 0.1 s is logged: ``batch_timeout``
    cannot end it, because the blocked loop cannot notice the timeout.

    :param threads: how many batches compute at once. Default: the number of cores available to the process.
    :param in_place: ``auto`` behaves as described above. ``always`` runs everything in the launching thread.
        ``never`` runs nothing there, and runs functions with ``run_on="loop"`` as callbacks of the loop.
    :param unified: ``False`` gives the device separate memory, so that every batch is copied in and out as on
        a GPU, for tests.
    :param memory_nbytes: the most that its buffers may hold. Default: no limit but the machine's.
    :raises OptionsError: if ``threads`` is less than 1.
    """

    name = "host"
    gpu: str | None = None
    compute_capability: tuple[int, int] | None = None
    is_integrated = False
    prefers_graphs = False
    timing_is_free = True
    lost: DeviceLostError | None = None
    """The CPU is never lost."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        in_place: InPlace = "auto",
        unified: bool = True,
        memory_nbytes: int | None = None,
        name: str = "asynctrt-host",
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        if threads is not None and threads < 1:
            raise OptionsError(f"threads must be at least 1, not {threads}")
        self.unified = unified
        self._in_place: InPlace = in_place
        self._now_ns = now_ns
        self._thread_name = name
        self.concurrency = threads or cores()
        self._stream_threads = StreamThreads(self.concurrency, name, now_ns)
        self._account = Account(memory_nbytes)
        # Guards state that engines in several threads may change at once.
        self._lock = threading.Lock()
        self._origin = Origin()
        self._streams: WeakValueDictionary[int, HostStream] = WeakValueDictionary()
        self._handles = itertools.count(1)

    def __repr__(self) -> str:
        return f"<HostDevice threads={self.concurrency} in_place={self._in_place} unified={self.unified}>"

    @property
    def is_parallel(self) -> bool:
        # With separate memory it imitates a GPU in every respect.
        return self.unified

    @property
    def is_pipelined(self) -> bool:
        return not self.unified

    @property
    def contexts_default(self) -> int:
        # Twice as many as can compute, so that a thread finds the next batch ready when it finishes one. The
        # maximum limits memory on machines with many cores, because each context has a slab.
        return min(2 * self.concurrency, CONTEXTS_MAX)

    @property
    def whole(self) -> "HostDevice":
        return self

    def partition(self, share: float) -> "tuple[HostDevice, HostDevice]":
        """Divide its threads; each part has at least one."""
        self._origin.check(self)
        check_share(self, share)
        threads = max(1, round(self.concurrency * share))
        return HostPart(self, threads), HostPart(self, max(1, self.concurrency - threads))

    def activate(self) -> None:
        """Do nothing: there is no other host device."""

    def memory(self) -> MemoryFigures:
        account, total = self._account, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryFigures(available_memory() or total, total, account.held_nbytes, account.budget_nbytes)

    def create_stream(self) -> HostStream:
        return self._keep(HostStream)

    def _keep(self, kind: type[HostStream]) -> HostStream:
        self._origin.check(self)
        handle = next(self._handles)
        stream = kind(
            threads=self._stream_threads, in_place=self._in_place, now_ns=self._now_ns, handle=handle
        )
        with self._lock:
            self._streams[handle] = stream
        return stream

    def stream_of(self, handle: int) -> HostStream:
        """Return the stream with that handle, for libraries that take handles as with CUDA.

        :raises DeviceError: if no stream has it.
        """
        stream = self._streams.get(handle)
        if stream is None:
            raise DeviceError(f"no stream of {self!r} has the handle {handle}")
        return stream

    def create_event(self, *, is_timed: bool = True) -> HostEvent:
        return HostEvent()

    def allocate_staging(self, nbytes: int) -> HostBuffer:
        return self.allocate(nbytes)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        return _nothing

    def allocate(self, nbytes: int) -> HostBuffer:
        self._origin.check(self)
        held, budget = self._account, self._account.budget_nbytes
        with self._lock:
            if budget is not None and held.held_nbytes + nbytes > budget:
                raise DeviceMemoryError(
                    f"the host device holds {held.held_nbytes} of the {budget} bytes of its budget, and has "
                    f"no room for {nbytes} more. Lower max_rows, contexts or arenas, or raise memory_nbytes"
                )
            held.held_nbytes += nbytes
        try:
            # A weak reference: the buffer's finalizer would otherwise keep the device and its threads alive.
            # It is to the whole device, whose account it is: a part may be gone before its buffers.
            return HostBuffer(nbytes, partial(_gave_back, weakref.ref(self.whole)))
        except BaseException:
            self._gave_back(nbytes)
            raise

    def import_array(self, value: object) -> DeviceArray | None:
        return value if isinstance(value, DeviceArray) and value.device.whole is self.whole else None

    def allocate_ordered(self, nbytes: int, *, stream: int) -> HostBuffer:
        return self.allocate(nbytes)

    def free_ordered(self, buffer: Buffer, *, stream: int) -> None:
        self.stream_of(stream).launch(buffer.close, label="free", run_on="auto")

    def abandon(self, stream: Stream) -> None:
        """Do nothing: freeing host memory waits for no work."""

    def ended(self, stream: Stream) -> None:
        """Do nothing: nothing was postponed."""

    def _gave_back(self, nbytes: int) -> None:
        if self._origin.is_here:  # After a fork the parent may hold the lock.
            with self._lock:
                self._account.held_nbytes -= nbytes

    def close(self) -> None:
        """Do nothing: its threads end with its last stream, and buffers are closed by their owners.

        :raises UsageError: in a process that was forked from the one that made it.
        """
        self._origin.check(self)


class HostPart(HostDevice):
    """Some of the threads of a host device. It shares everything else with the whole."""

    def __init__(self, whole: HostDevice, threads: int) -> None:
        # Includes the streams, because libraries find them by their handles.
        self.__dict__.update(whole.__dict__)
        self._whole = whole
        self.concurrency = threads
        self._stream_threads = StreamThreads(threads, f"{self._thread_name}-part", self._now_ns)

    @property
    def whole(self) -> HostDevice:
        return self._whole


def _gave_back(device: "weakref.ref[HostDevice]", nbytes: int) -> None:
    """Subtract a buffer's bytes from the total, if the device still exists."""
    counting = device()
    if counting is not None:
        counting._gave_back(nbytes)


def _nothing() -> None:
    """Do nothing: the CPU can copy from any address."""


def cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))
