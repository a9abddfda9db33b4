"""One deadline and one priority for all that a piece of work asks of engines, and the run it is part of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

from asynctrt._util import clock
from asynctrt._util.nesting import Run, Runs
from asynctrt._util.validation import int_or_none, timeout_ns_of
from asynctrt.errors import DeadlineError, InputError, show

T = TypeVar("T")


@dataclass(slots=True)  # Not frozen, which takes longer to make: each run of a function has one.
class Limits:
    """What holds for every request of a piece of work, on top of what each says itself. Never changed."""

    deadline_ns: int | None = None
    priority: int = 0
    run: Run | None = None
    """The run of a function that the work is part of, or was part of: it may be over."""

    def left_ns(self) -> int | None:
        """Return the ns until the deadline; ``None`` without one.

        :raises DeadlineError: if it has passed.
        """
        if self.deadline_ns is None:
            return None
        left_ns = self.deadline_ns - clock.now_ns()
        if left_ns <= 0:
            raise DeadlineError(
                f"the time of asynctrt.within was over {-left_ns / 1e6:.3f} ms before this request was made. "
                "Allow more time, or ask for less in it"
            )
        return left_ns

    def stricter(self, timeout_ns: int | None, priority: int, priorities: int) -> tuple[int | None, int]:
        """Return the timeout in ns and the priority of a request that has these of its own.

        :param priorities: levels of the engine; the highest stands for those that it has not.
        :raises DeadlineError: if no time is left.
        """
        left_ns = self.left_ns()
        if left_ns is not None:
            timeout_ns = left_ns if timeout_ns is None else min(timeout_ns, left_ns)
        return timeout_ns, max(priority, min(self.priority, priorities - 1))


_LIMITS: Final[ContextVar[Limits | None]] = ContextVar("asynctrt-limits", default=None)

limits_here = _LIMITS.get
"""Return the limits that hold here; ``None``: there are none."""

hold_from_here = _LIMITS.set
"""Let limits hold in this task from here on. Returns what :data:`hold_no_longer` takes."""

hold_no_longer = _LIMITS.reset
"""Let the limits hold that held before."""


def run_here() -> Run | None:
    """Return the run of a function that is under way here; ``None`` if there is none."""
    limits = _LIMITS.get()
    if limits is None or limits.run is None or limits.run.is_over:
        return None
    return limits.run


def run_in(runs: Runs, function: Callable[[], T]) -> T:
    """Call a function as one of ``runs``, within the limits that hold here."""
    run, around = runs.begin(), _LIMITS.get() or Limits()
    token = _LIMITS.set(Limits(around.deadline_ns, around.priority, run))
    try:
        return function()
    finally:
        _LIMITS.reset(token)
        run.end()


@contextmanager
def within(timeout: float | None = None, *, priority: int = 0) -> Iterator[None]:
    """Give all that is asked of engines inside one deadline and one priority.

    Each call inside has what is left of the time as its ``timeout``, unless its own is shorter, and this
    priority, unless its own is higher; an engine with fewer ``priorities`` takes its highest. Tasks and
    threads that are started inside with this context (``asyncio.create_task``, ``asyncio.to_thread``) are
    inside as well, as are the calls of :mod:`asynctrt.client`, of which it limits the ``deadline``. Inside of
    another one the stricter of both holds. What does not ask an engine is not ended by it: that is
    ``asyncio.timeout``.

    :param timeout: seconds from now; ``None`` for no deadline.
    :raises InputError: for a timeout that is no number of seconds, or a priority that is no whole number ≥ 0.
    """
    level = int_or_none(priority)
    if level is None or level < 0:
        raise InputError(f"priority must be a whole number ≥ 0, not {show(priority)}")
    deadline_ns = None if timeout is None else clock.now_ns() + timeout_ns_of(timeout)
    around = _LIMITS.get()
    if around is not None:
        level = max(level, around.priority)
        if around.deadline_ns is not None:
            deadline_ns = around.deadline_ns if deadline_ns is None else min(deadline_ns, around.deadline_ns)
    token = _LIMITS.set(Limits(deadline_ns, level, run_here()))
    try:
        yield
    finally:
        _LIMITS.reset(token)


@contextmanager
def unlimited() -> Iterator[None]:
    """Let no limits hold inside: for what outlives the work that begins it."""
    token = _LIMITS.set(None)
    try:
        yield
    finally:
        _LIMITS.reset(token)
