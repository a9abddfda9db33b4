"""What the double has seen: violations, and failures that a test has asked for. All of it thread-safe."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from asynctrt.errors import OptionsError
from asynctrt.tensors import Dims
from asynctrt.testing.tensorrt.spec import EngineSpec

Fault = Literal["enqueue", "illegal-address", "hang", "context-memory", "deserialize-memory"]
FAULTS: Final[tuple[Fault, ...]] = (
    "enqueue",
    "illegal-address",
    "hang",
    "context-memory",
    "deserialize-memory",
)
VIOLATIONS_MAX: Final = 1000
MODIFIED: Final = "a graph was launched with {batch}, whose execution context was modified after the capture"
GONE: Final = "a graph was launched with {batch}, whose execution context is gone"
ILLEGAL_ADDRESS: Final = "an illegal memory access was encountered"


class ViolationError(Exception):
    """A use of TensorRT that the real library leaves undefined. It is a bug of whoever made the call."""


def check_fault(what: Fault, count: int) -> None:
    """Refuse to fail in a way that there is not.

    :raises OptionsError: with the ways that there are.
    """
    if what not in FAULTS or count < 1:
        raise OptionsError(
            f"the double cannot fail {count} times with {what!r}. It knows {', '.join(FAULTS)}"
        )


class Monitor:
    """Violations that were found, and failures that are due."""

    def __init__(self) -> None:
        # Whatever is destroyed may note something, in the middle of anything that its thread is doing.
        self._lock = threading.RLock()
        self._found: list[str] = []
        self._unraised: list[str] = []
        self._due: Counter[Fault] = Counter()
        self.lost: str | None = None
        """The sticky error of the device, once there is one."""

    def found(self, message: str) -> ViolationError:
        """One more, for the caller to raise."""
        with self._lock:
            if len(self._found) < VIOLATIONS_MAX:
                self._found.append(message)
        return ViolationError(message)

    def note(self, message: str) -> ViolationError:
        """One more, found where nobody can be told: the next call into the double raises it."""
        with self._lock:
            if len(self._unraised) < VIOLATIONS_MAX:
                self._unraised.append(message)
        return self.found(message)

    def raise_noted(self) -> None:
        """Raise what was noted and not raised yet.

        :raises ViolationError: the first of them.
        """
        if self._unraised:
            with self._lock:
                message = self._unraised[0] if self._unraised else None
                self._unraised.clear()
            if message is not None:
                raise ViolationError(message)

    def violations(self) -> tuple[str, ...]:
        """All that were found."""
        with self._lock:
            return tuple(self._found)

    def arm(self, what: Fault, count: int) -> None:
        """Let the next ``count`` of these fail."""
        with self._lock:
            self._due[what] += count

    def take(self, what: Fault) -> bool:
        """Whether this is one that shall fail."""
        if not self._due[what]:
            return False
        with self._lock:
            if not self._due[what]:
                return False
            self._due[what] -= 1
            return True


class Ticket:
    """One enqueue: whether the device is through with it. A captured one begins anew with each launch."""

    __slots__ = ("__weakref__", "handle", "text")

    def __init__(self, text: str, handle: int) -> None:
        self.text = text
        self.handle = handle

    def __repr__(self) -> str:
        return f"<Ticket {self.text} on stream {self.handle} {'done' if self.is_done else 'pending'}>"

    @property
    def is_done(self) -> bool:
        """Whether the device is through with it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Job:
    """All that one batch needs, by value: so it can be captured and launched again later."""

    number: int
    context: int
    """The number of its execution context."""
    generation: int
    """How often that context had been modified when this was enqueued."""
    text: str
    spec: EngineSpec
    shapes: tuple[Dims, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Addresses, in the order of the engine's tensors; the packed output, if there is one, comes last."""
    arena: int
    arena_nbytes: int
    """How much of the arena this batch uses."""
    arena_size: int
    """How large it is."""
    weights: int


class Executor(Protocol):
    """Gets the double's work onto a device."""

    def problem_of(self, handle: int) -> str | None:
        """Why that is not the handle of a stream of this device, if it is not."""

    def is_capturing(self, handle: int) -> bool:
        """Whether that stream collects its work for a graph."""

    def enqueue(self, job: Job, handle: int, aux: Sequence[int]) -> Ticket:
        """Put a batch on a stream; returns before it has run."""

    def memory_problem(self, address: int, nbytes: int) -> str | None:
        """Why that is not so much memory that the device can reach, as far as that can be told."""

    def mark(self, context: int, text: str, handle: int) -> Ticket:
        """Put a piece of work on a stream that does nothing but take its turn."""

    def longest(self, job: Job, ticket: Ticket) -> int:
        """Wait for a batch, and say how long the longest row of its packed output is."""

    def record(self, event: int, handle: int) -> None:
        """Record an event of the application, given by its handle."""

    def write(self, address: int, data: bytes) -> None:
        """Write to memory of the device, and wait until that is done."""

    def modified(self, context: int, generation: int) -> None:
        """A context is new, or in another state: a graph captured from it before must not execute now."""

    def retire(self, context: int) -> None:
        """A context is gone: no graph with its batches may be launched from now on."""

    def poll(self) -> None:
        """Look what the device has reported: violations and losses go to the monitor."""

    def armed(self, what: Fault, count: int) -> None:
        """The test wants the next ones to fail."""

    def release_hangs(self) -> None:
        """Let what hangs go on."""
