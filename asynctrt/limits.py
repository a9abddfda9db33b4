"""Limits of a piece of work: one deadline and one priority for all its requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from asynctrt._util import clock
from asynctrt._util.validation import int_or_none, timeout_ns_of
from asynctrt.errors import DeadlineError, InputError, show


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for every request of a piece of work, besides the request's own."""

    deadline_ns: int | None = None
    priority: int = 0

    def left_ns(self) -> int | None:
        """Return the ns until the deadline, or ``None`` without a deadline.

        :raises DeadlineError: if it has passed.
        """
        if self.deadline_ns is None:
            return None
        left_ns = self.deadline_ns - clock.now_ns()
        if left_ns <= 0:
            raise DeadlineError(
                "the deadline of asynctrt.within, or of the pipeline that makes this request, passed "
                f"{-left_ns / 1e6:.3f} ms before the request was made. Allow more time, or do less within it"
            )
        return left_ns

    def stricter(self, timeout_ns: int | None, priority: int, priorities: int) -> tuple[int | None, int]:
        """Return the timeout in ns and the priority that a request gets, given its own.

        :param priorities: the engine's number of levels; a limit above its highest level counts as that.
        :raises DeadlineError: if no time is left.
        """
        left_ns = self.left_ns()
        if left_ns is not None:
            timeout_ns = left_ns if timeout_ns is None else min(timeout_ns, left_ns)
        return timeout_ns, max(priority, min(self.priority, priorities - 1))


_LIMITS: Final[ContextVar[Limits | None]] = ContextVar("asynctrt-limits", default=None)

limits_here = _LIMITS.get
"""Return the limits that hold here, or ``None``."""

hold_from_here = _LIMITS.set
"""Apply limits to the rest of this task. Returns the token for :data:`hold_no_longer`."""

hold_no_longer = _LIMITS.reset
"""Restore the previous limits."""


@contextmanager
def within(timeout: float | None = None, *, priority: int = 0) -> Iterator[None]:
    """Apply one deadline and one priority to every engine call inside the block.

    Each call gets the remaining time as its ``timeout``, unless its own is shorter; and this priority, unless
    its own is higher. An engine with fewer ``priorities`` uses its highest. The limits also apply to tasks
    and threads that are started inside with this context (``asyncio.create_task``, ``asyncio.to_thread``),
    and to calls of :mod:`asynctrt.client`, whose ``deadline`` they shorten. If blocks are nested, the
    stricter limit holds. Other code in the block is not interrupted: use ``asyncio.timeout`` for that.

    :param timeout: seconds from now; ``None`` for no deadline.
    :raises InputError: if the timeout is not a number of seconds, or the priority not a whole number ≥ 0.
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
    token = _LIMITS.set(Limits(deadline_ns, level))
    try:
        yield
    finally:
        _LIMITS.reset(token)


@contextmanager
def unlimited() -> Iterator[None]:
    """Remove all limits inside the block, for something that outlives the work that starts it."""
    token = _LIMITS.set(None)
    try:
        yield
    finally:
        _LIMITS.reset(token)
