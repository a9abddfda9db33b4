"""Measure how late the event loop is, and log when something has held it for too long.

A timer of the loop beats every :data:`BEAT_S`. Its delay is how long a request that arrives at that moment
waits before any work is done for it.
"""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from asynctrt._util import clock
from asynctrt.serving.latency import BOUNDS_NS
from asynctrt.serving.server_log import PERIOD_NS

BEAT_S: Final = 0.05
"""Time between beats, which take 0.1% of a slow core. A pause that exceeds the bound by this much is always
noticed."""

logger = logging.getLogger("asynctrt.serving")


class Stalls:
    """Watches the running event loop until :meth:`close`.

    :param bound_ns: how long the loop may be blocked before that is logged.
    :param is_starting: returns whether the server does not serve yet, so that no client waits for the loop.
    """

    def __init__(self, bound_ns: int, is_starting: Callable[[], bool]) -> None:
        self._bound_ns = bound_ns
        self._is_starting = is_starting
        self._now_ns = now_ns = clock.now_ns
        self._loop = asyncio.get_running_loop()
        self._cpu_ns = clock.cpu_clock_of_this_thread()
        self.delays = [0] * (len(BOUNDS_NS) + 2)
        """How many beats were late by at most each of ``BOUNDS_NS``, or more; then the sum of the delays in
        ns."""
        self.count = 0
        """Pauses longer than the bound."""
        self._unsaid = 0
        self._said_ns = now_ns() - PERIOD_NS
        self._schedule()

    def __repr__(self) -> str:
        return f"<Stalls {self.count} pauses of more than {self._bound_ns / 1e6:g} ms>"

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def restart(self) -> None:
        """Forget the pause that ends now, because it was intended."""
        self._timer.cancel()
        self._schedule()

    def _schedule(self) -> None:
        # Timers of asyncio and uvloop may be a millisecond early or late.
        self._due_ns = self._now_ns() + int(BEAT_S * 1e9)
        self._cpu_before_ns = self._cpu_ns()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        late_ns = max(0, self._now_ns() - self._due_ns)
        delays = self.delays
        delays[bisect_left(BOUNDS_NS, late_ns)] += 1
        delays[-1] += late_ns
        if late_ns > self._bound_ns and not self._is_starting():
            self.count += 1
            self._say(late_ns)
        self._schedule()

    def _say(self, late_ns: int) -> None:
        """Log a pause, if none was logged recently."""
        now_ns = self._now_ns()
        if now_ns - self._said_ns < PERIOD_NS:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more pauses since the last such line)" if self._unsaid else ""
        self._said_ns, self._unsaid = now_ns, 0
        cpu_ns = self._cpu_ns() - self._cpu_before_ns
        logger.warning(
            "the event loop was held for %d ms, while its thread computed for %d ms%s. A profiler such as "
            "py-spy shows what holds it",
            *(late_ns // 1_000_000, cpu_ns // 1_000_000, more),
        )
