"""Record violations, and hand out the failures that a test has asked for; and the protocol of an executor."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

from asynctrt.devices.base import ALIGNMENT
from asynctrt.tensors import Dims
from tests.doubles.tensorrt.spec import EngineSpec

Fault = Literal["enqueue", "enqueue-hang", "illegal-address", "hang", "context-memory", "deserialize-memory"]
VIOLATIONS_MAX: Final = 1000
MODIFIED: Final = "a graph was launched with {batch}, whose execution context was modified after the capture"
GONE: Final = "a graph was launched with {batch}, whose execution context is gone"
ILLEGAL_ADDRESS: Final = "an illegal memory access was encountered"


class ViolationError(Exception):
    """A use of TensorRT that the real library leaves undefined: a bug in the code that made the call."""


class ViolationMonitor:
    """The violations that were found, and the failures that are due. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: destroying an object may note a violation, in the middle of any call of its thread.
        self._lock = threading.RLock()
        self._found: list[str] = []
        self._unraised: list[str] = []
        self._due: Counter[Fault] = Counter()
        self._hangs = threading.Condition()
        self._hanging = 0
        self._released = 0
        self.lost: str | None = None
        """The sticky error of the device, once it has occurred."""

    def found(self, message: str) -> ViolationError:
        """Record a violation, and return it for the caller to raise."""
        with self._lock:
            if len(self._found) < VIOLATIONS_MAX:
                self._found.append(message)
        return ViolationError(message)

    def note(self, message: str) -> ViolationError:
        """Record a violation that cannot be raised where it was found, so that the next call raises it."""
        with self._lock:
            if len(self._unraised) < VIOLATIONS_MAX:
                self._unraised.append(message)
        return self.found(message)

    def raise_noted(self) -> None:
        """Raise the first violation that was noted since the last call."""
        if self._unraised:
            with self._lock:
                message = self._unraised[0] if self._unraised else None
                self._unraised.clear()
            if message is not None:
                raise ViolationError(message)

    def violations(self) -> tuple[str, ...]:
        """Return all violations that were found."""
        with self._lock:
            return tuple(self._found)

    def arm(self, what: Fault, count: int) -> None:
        """Make the next ``count`` operations of a kind fail."""
        assert what in get_args(Fault), what
        with self._lock:
            self._due[what] += count

    def take(self, what: Fault) -> bool:
        """Return whether the current operation is to fail, and count it."""
        if not self._due[what]:
            return False
        with self._lock:
            if not self._due[what]:
                return False
            self._due[what] -= 1
            return True

    def hang(self) -> None:
        """Wait until :meth:`release_hangs`."""
        with self._hangs:
            self._hanging += 1
            own = self._hanging
            self._hangs.wait_for(lambda: self._released >= own)

    @property
    def hanging(self) -> int:
        """How many hang now."""
        return self._hanging - self._released

    def release_hangs(self) -> None:
        """Let all that hang go on."""
        with self._hangs:
            self._released = self._hanging
            self._hangs.notify_all()


class Ticket:
    """The state of one enqueue on the device. A captured one starts again with each launch of its graph."""

    __slots__ = ("__weakref__", "handle", "text")

    def __init__(self, text: str, handle: int) -> None:
        self.text = text
        self.handle = handle

    def __repr__(self) -> str:
        return f"<Ticket {self.text} on stream {self.handle} {'done' if self.is_done else 'pending'}>"

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EnqueuedBatch:
    """Everything that one batch needs, by value, so that a graph can launch it again later."""

    number: int
    context: int
    """The number of its execution context."""
    generation: int
    """How often that context had been modified when the batch was enqueued."""
    text: str
    spec: EngineSpec
    shapes: tuple[Dims, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Addresses, in the order of the engine's tensors; a packed output comes last."""
    arena: int
    arena_size: int
    """Bytes of the whole arena, of which TensorRT may use any."""
    weights: int

    @property
    def arena_end(self) -> int:
        """The last aligned address of the arena, where its guard is."""
        return self.arena + (self.arena_size // ALIGNMENT - 1) * ALIGNMENT


class Executor(Protocol):
    """Runs the double's work on a device."""

    def problem_of(self, handle: int) -> str | None:
        """Return why ``handle`` is not a stream of this device, or ``None`` if it is."""

    def is_capturing(self, handle: int) -> bool:
        """Return whether that stream is capturing its work into a graph."""

    def enqueue(self, enqueued: EnqueuedBatch, handle: int, aux: Sequence[int]) -> Ticket:
        """Enqueue a batch on a stream; return before it has run.

        A batch with a packed output goes as far as to find out how large that is, and :meth:`finish` goes on.
        """

    def memory_problem(self, address: int, nbytes: int) -> str | None:
        """Return why the device cannot reach that memory, or ``None`` if it can, or if that is not known."""

    def touch(self, address: int, nbytes: int, handle: int) -> None:
        """Write to memory in the order of a stream, where that is safe even if the memory is gone."""

    def mark(self, context: int, text: str, handle: int) -> Ticket:
        """Enqueue a piece of work on a stream that does nothing but take its turn."""

    def wait(self, enqueued: EnqueuedBatch, ticket: Ticket) -> None:
        """Wait for a batch, without the GIL."""

    def longest(self, enqueued: EnqueuedBatch, ticket: Ticket) -> int:
        """Wait, without the GIL, for the length of the longest row of a batch's packed output."""

    def finish(self, enqueued: EnqueuedBatch, handle: int) -> None:
        """Enqueue the rest of a batch with a packed output, which is left out if its address is 0."""

    def write(self, address: int, data: bytes) -> None:
        """Write to memory of the device, and wait for the write."""

    def modified(self, context: int, generation: int) -> None:
        """Note that a context is new or modified, so that graphs captured from it are out of date."""

    def retire(self, context: int) -> None:
        """Note that a context was destroyed, so no graph with its batches may be launched from now on."""

    def poll(self) -> None:
        """Pass violations and losses that the device has reported to the monitor."""

    def armed(self, what: Fault, count: int) -> None:
        """Prepare for the next ``count`` faults, if the device itself injects them."""

    @property
    def hanging(self) -> int:
        """How many batches hang now on the device."""

    def release_hangs(self) -> None:
        """Let hanging batches continue."""
