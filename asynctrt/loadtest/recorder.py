"""Counts the results of requests in windows of time.

A window counts the requests that were *due* in it, even if their answers come later. Only ``completed``, the
source of the throughput, and ``pieces`` count answers when they come.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from asynctrt.loadtest.arrivals import BLOCK
from asynctrt.loadtest.histogram import Counts, Ints
from asynctrt.loadtest.report import ErrorCount
from asynctrt.loadtest.steps import StepTime

WARM_UP: Final = -1
"""The number of the window for everything before measuring starts."""
KINDS_MAX: Final = 64
COUNTS: Final = ("latency", "lateness", "first", "between")
"""The counts of a window."""
EXAMPLE_CHARACTERS: Final = 500


@dataclass(slots=True)
class StepCount:
    """Count the steps of one name: the latency of the successful ones, and the number that failed."""

    latency: Counts = field(default_factory=Counts)
    failed: int = 0


@dataclass(slots=True)
class Window:
    """Hold the counts of one window of time."""

    sent: int = 0
    completed: int = 0
    latency: Counts = field(default_factory=Counts)
    """Latency of answers, from when the request was due."""
    lateness: Counts = field(default_factory=Counts)
    """Time from when a request was due to when the generator noticed it."""
    first: Counts = field(default_factory=Counts)
    """Time from when the request was due to its answer's first piece, for answers in pieces."""
    between: Counts = field(default_factory=Counts)
    """Time from each piece of such an answer to the next."""
    pieces: int = 0
    """Number of pieces that came in this window."""
    errors: dict[str, ErrorCount] = field(default_factory=dict)
    steps: dict[str, StepCount] = field(default_factory=dict)
    """Steps by their name that began in this window."""

    @property
    def answered(self) -> int:
        """Number of requests due in this window that were answered."""
        return len(self.latency)

    @property
    def failed(self) -> int:
        """Number of requests due in this window that ended with an error."""
        return sum(error.count for error in self.errors.values())

    def merge(self, other: "Window") -> None:
        """Add counts of the same window: another process's, or later ones."""
        self.sent += other.sent
        self.completed += other.completed
        for name in COUNTS:
            getattr(self, name).merge(getattr(other, name))
        self.pieces += other.pieces
        for kind, error in other.errors.items():
            _count(self.errors, kind, error.count, error.example)
        for name, step in other.steps.items():
            mine = _step(self.steps, name)
            mine.latency.merge(step.latency)
            mine.failed += step.failed


Windows = dict[int, Window]
"""Windows by their number, from 0; -1 is the warm-up."""


def merge(into: Windows, more: Windows) -> None:
    """Add windows to ``into``, which takes ownership of them."""
    for number, window in more.items():
        if number in into:
            into[number].merge(window)
        else:
            into[number] = window


def coarser(windows: Windows) -> Windows:
    """Merge windows in pairs."""
    found: Windows = {}
    for number in sorted(windows):
        merge(found, {number // 2: windows[number]})
    return found


def total(windows: Iterable[Window]) -> Window:
    """Merge all windows into one."""
    whole = Window()
    for window in windows:
        whole.merge(window)
    return whole


class RunRecorder:
    """Record the times of requests, and count them in blocks.

    The generator appends to the public arrays directly, because a method call for each request would double
    the cost. It also flushes them when they hold ``BLOCK`` times.

    :param from_ns: when the warm-up ends and the first window starts.
    :param window_ns: the length of a window.
    """

    __slots__ = (
        "_from_ns",
        "_pieces",
        "_streams",
        "_window_ns",
        "_windows",
        "done_ns",
        "due_ns",
        "late_due_ns",
        "noticed_ns",
    )

    def __init__(self, from_ns: int, window_ns: int) -> None:
        self._from_ns = from_ns
        self._window_ns = window_ns
        self.due_ns = array("q")
        self.done_ns = array("q")
        self.late_due_ns = array("q")
        self.noticed_ns = array("q")
        self._windows: Windows = {}
        self._streams: list[tuple[int, array[int]]] = []
        self._pieces = 0

    def streamed(self, due_ns: int, came_ns: "array[int]") -> None:
        """Record when each piece of an answer came; its request was due at ``due_ns``."""
        self._streams.append((due_ns, came_ns))
        self._pieces += len(came_ns)
        if self._pieces >= BLOCK:
            self.flush_pieces()

    def stepped(self, steps: Sequence[StepTime]) -> None:
        """Count steps that have ended."""
        taken: dict[tuple[int, str], list[int]] = {}
        for step in steps:
            if step.has_failed:
                _step(self._window(step.began_ns).steps, step.name).failed += 1
            else:
                key = self._number(step.began_ns), step.name
                taken.setdefault(key, []).append(step.ended_ns - step.began_ns)
        for (number, name), times_ns in taken.items():
            window = self._windows.setdefault(number, Window())
            _step(window.steps, name).latency.add(np.array(times_ns, np.int64))

    def failed(self, due_ns: int, kind: str, example: str) -> None:
        """Count a request that was due at ``due_ns`` and ended with an error."""
        _count(self._window(due_ns).errors, kind, 1, example)

    def flush_done(self) -> None:
        """Count the answers."""
        if not self.done_ns:
            return
        due, done = _taken(self.due_ns), _taken(self.done_ns)
        self.due_ns, self.done_ns = array("q"), array("q")
        for window, mine in self._by_window(due):
            window.latency.add(done[mine] - due[mine])
        for window, mine in self._by_window(done):
            window.completed += len(done[mine])

    def flush_sent(self) -> None:
        """Count the requests that the generator has noticed as due."""
        if not self.late_due_ns:
            return
        due, noticed = _taken(self.late_due_ns), _taken(self.noticed_ns)
        self.late_due_ns, self.noticed_ns = array("q"), array("q")
        for window, mine in self._by_window(due):
            window.sent += len(due[mine])
            window.lateness.add(noticed[mine] - due[mine])

    def flush_pieces(self) -> None:
        """Count the pieces of answers."""
        if not self._streams:
            return
        due = np.array([due_ns for due_ns, _ in self._streams], np.int64)
        counts = np.array([len(came_ns) for _, came_ns in self._streams])
        came = np.concatenate([_taken(came_ns) for _, came_ns in self._streams])
        self._streams, self._pieces = [], 0
        firsts = np.cumsum(counts) - counts
        for window, mine in self._by_window(due):
            window.first.add((came[firsts] - due)[mine])
        for window, mine in self._by_window(came):
            window.pieces += len(came[mine])
        if len(came) > len(due):
            # Leave out the times from the last piece of one answer to the first of the next answer.
            between = np.delete(np.diff(came), firsts[1:] - 1)
            for window, mine in self._by_window(np.repeat(due, counts - 1)):
                window.between.add(between[mine])

    def take(self) -> Windows:
        """Return everything that was counted since the last call."""
        self.flush_done()
        self.flush_pieces()
        self.flush_sent()
        windows, self._windows = self._windows, {}
        return windows

    def _window(self, due_ns: int) -> Window:
        return self._windows.setdefault(self._number(due_ns), Window())

    def _number(self, due_ns: int) -> int:
        return max(WARM_UP, (due_ns - self._from_ns) // self._window_ns)

    def _by_window(self, times_ns: Ints) -> Iterator[tuple[Window, Any]]:
        """Yield each window that contains some of the times, with the indices of these times."""
        first = self._window(int(times_ns.min()))
        if first is self._window(int(times_ns.max())):
            yield first, slice(None)  # The usual case, because a block is shorter than a window.
            return
        numbers = np.maximum((times_ns - self._from_ns) // self._window_ns, WARM_UP)
        for number in sorted(set(numbers.tolist())):  # Not np.unique, whose first call imports numpy.ma.
            yield self._windows.setdefault(number, Window()), numbers == number


def _kept(kinds: Mapping[str, Any], kind: str) -> str:
    """Return the kind under which to count, which is "others" once there are ``KINDS_MAX``."""
    return kind if kind in kinds or len(kinds) < KINDS_MAX else "others"


def _step(steps: dict[str, StepCount], name: str) -> StepCount:
    return steps.setdefault(_kept(steps, name), StepCount())


def _taken(times: "array[int]") -> Ints:
    return np.frombuffer(times, np.int64)


def _count(errors: dict[str, ErrorCount], kind: str, count: int, example: str) -> None:
    kind = _kept(errors, kind)
    before = errors.get(kind)
    if before is not None:
        count, example = before.count + count, before.example
    errors[kind] = ErrorCount(count, example[:EXAMPLE_CHARACTERS])
