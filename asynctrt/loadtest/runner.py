"""Sends requests when they are due, and records their times. This part of a load test must not be late.

While the next request is far off, an open loop sleeps on an :mod:`~asynctrt._util.alarm`. When a request to a
server is near, it reads the clock once per turn of the event loop. tests/benchmarks/lateness.py measures how
late it is.
"""

import asyncio
import contextlib
import errno
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asynctrt._util import clock
from asynctrt._util.alarm import Alarm
from asynctrt._util.clock import NEVER_NS
from asynctrt.errors import describe
from asynctrt.loadtest.arrivals import BLOCK, Arrivals
from asynctrt.loadtest.plans import ProcessPlan
from asynctrt.loadtest.recorder import RunRecorder, Windows
from asynctrt.loadtest.samples import Sample, differs
from asynctrt.loadtest.steps import StepTime
from asynctrt.loadtest.streams import Streamed
from asynctrt.loadtest.targets import BatchCounters, Target

SENT_A_TURN_MAX: Final = 64
"""Limit on the requests sent in one turn of the event loop, since answers wait for the next turn."""
TICK_S: Final = 0.05
"""Polling interval for timed-out requests."""
PAUSE_S: Final = 0.01
"""Delay of a closed loop's caller after an error."""
EMIT_NS: Final = 1_000_000_000
"""Interval between emitting windows. Nothing is sent while they are emitted."""
READY_MAX: Final = 1_000_000
"""Up to this many arrivals are all generated before a run; beyond it, each block is generated when needed."""
GRACE_NS: Final = 500_000_000
"""How long to wait for answers after a run was stopped."""
BEHIND_NS_MAX: Final = 3_000_000_000
"""How far the generator of an open loop may fall behind before the run is stopped as void."""

WAS_WRONG: Final = "WrongAnswer"
NO_ANSWER: Final = "NoAnswer"
NOT_SENT: Final = "NotSent"
OWN_ERROR: Final = "GeneratorError"
"""The kind of errors caused by this machine's lack of resources, not by the target."""
OWN_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""Errors for a lack of file descriptors (process or machine), ports or memory."""


@dataclass(slots=True)
class ProcessResult:
    """Hold the results of one process in one run, apart from its windows."""

    cpu_ns: int = 0
    """CPU time of the process."""
    elapsed_ns: int = 0
    """Time from the start of the run to its end."""
    last_done_ns: int = 0
    """When the last answer came, from the start of the run."""
    stopped_ns: int = 0
    """When the run was stopped, or if it was not stopped, when it ended; from its start."""
    held_back: int = 0
    """Requests that had to wait because of the limit on requests in flight."""
    exhausted: bool = False
    """Whether everything was sent; false if the run was stopped."""
    is_overwhelmed: bool = False
    """Whether the run was stopped because the generator fell too far behind."""
    answered: int = 0
    """Answers that came, also in the warm-up."""
    batches: BatchCounters | None = None
    """What the target itself counted in the same time; ``None`` if it counts nothing."""


class Runner:
    """Perform one run of one process against one target. :meth:`stop` ends it early.

    :param first: the target's counters from before anything is sent; ``None`` if it has none.
    :param now_ns: the clock, in ns.
    """

    def __init__(
        self,
        target: Target,
        samples: Sequence[Sample],
        prepared: Sequence[Any],
        plan: ProcessPlan,
        first: BatchCounters | None = None,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_ns = now_ns
        self._target = target
        self._samples = samples
        self._prepared = prepared
        self._plan = plan
        self._start = target.start
        self._steps: list[StepTime] = getattr(target, "steps", [])
        self._timeout_ns = plan.timeout_ns
        self._room = max(1, plan.limit.requests // plan.shares)
        self._requests_max: float = math.inf
        if plan.requests_max is not None:
            self._requests_max = len(range(plan.share, plan.requests_max, plan.shares))
        self._checks = any(sample.expected is not None for sample in samples)
        self._rng = np.random.default_rng((plan.seed, 4, plan.share))
        # Requests in flight, oldest first, with the times when each was sent and due.
        self._flying: dict[asyncio.Future[Any], tuple[int, int]] = {}
        self._backlog: deque[tuple[int, int]] = deque()
        self._ended = self._loop.create_future()
        self._stopped_ns: int | None = None
        self._sending = True
        self._counted = 0  # Measured requests only.
        self._callers = 0
        self._is_level = plan.is_level
        self._outcome = ProcessResult()
        self._first = first
        self._handle: asyncio.TimerHandle | None = None
        self._sent_of = self._choices()
        # The current block of arrivals.
        self._blocks: Iterator[Arrivals] = iter(())
        self._due = _view(np.array([NEVER_NS]))
        self._what = _view(np.zeros(1, np.int64))
        self._next = 0

    def stop(self) -> None:
        """Stop sending, and end once the requests in flight are answered, or after a short grace period."""
        if self._stopped_ns is None:
            self._stopped_ns = self._now_ns()
            self._sending = False
            self._backlog.clear()

    async def run(self, start_ns: int, emit: Callable[[Windows], None]) -> ProcessResult:
        """Send all requests, starting at ``start_ns``, and return once each is answered or given up.

        :param start_ns: the start on the clock, the same for all processes.
        :param emit: called repeatedly with the windows counted since its last call.
        """
        plan = self._plan
        self._start_ns = start_ns
        self._from_ns = start_ns + plan.warmup_ns
        self._steps.clear()  # Left from the first requests, which are tries.
        self._recorder = RunRecorder(start_ns + plan.warmup_ns, plan.window_ns)
        self._end_ns = start_ns + plan.warmup_ns + plan.measured_ns
        self._alarm = Alarm(self._loop, self._tick)
        self._emit = emit
        self._emitted_ns = start_ns
        cpu_ns = clock.cpu_ns()
        try:
            if plan.schedule is not None:
                self._blocks = plan.schedule.blocks(plan.share, plan.shares)
                if plan.schedule.expected <= READY_MAX:
                    self._blocks = iter(list(self._blocks))
                self._next_block()
                self._wait(self._due[0], self._now_ns())
            else:
                await self._until(start_ns)
                self._call_up()
            self._handle = self._loop.call_later(TICK_S, self._look)
            await self._ended
            self._handle.cancel()
            outcome = self._outcome
            outcome.cpu_ns = clock.cpu_ns() - cpu_ns
            outcome.elapsed_ns = self._now_ns() - start_ns
            outcome.stopped_ns = outcome.elapsed_ns
            if self._stopped_ns is not None:
                outcome.stopped_ns = self._stopped_ns - start_ns
            self._take_steps()
            emit(self._recorder.take())
            # A server that has died has no counters any more, but its answers still count.
            with contextlib.suppress(Exception):
                after = await self._target.batches()
                if after is not None and self._first is not None:
                    outcome.batches = after.since(self._first)
            return outcome
        finally:
            if self._handle is not None:
                self._handle.cancel()
            self._alarm.close()
            self._sending = False
            self._give_up_all()

    # ---- open loop

    def _wait(self, due_ns: int, now_ns: int) -> None:
        """Schedule :meth:`_tick` for when the next request is due."""
        wakes_ns = due_ns - self._plan.near_ns
        if wakes_ns < now_ns:
            self._loop.call_soon(self._tick)
        else:
            self._alarm.set(wakes_ns)

    def _tick(self) -> None:
        """Send the requests that are due."""
        if not self._sending:
            self._end_if_idle()
            return
        now_ns = self._now_ns()
        due, next_ = self._due, self._next
        most = next_ + SENT_A_TURN_MAX
        while due[next_] <= now_ns and next_ < most:
            self._arrive(due[next_], self._what[next_], now_ns)
            next_ += 1
            now_ns = self._now_ns()
        self._next = next_
        if due[next_] == NEVER_NS and not self._next_block():
            self._sending = False
            self._outcome.exhausted = True
            self._end_if_idle()
            return
        self._wait(self._due[self._next], now_ns)

    def _next_block(self) -> bool:
        """Move to the next block of arrivals; return whether there is one."""
        block = next(self._blocks, None)
        left = self._requests_max - self._counted
        if block is None or left <= 0:
            self._due, self._next = _view(np.array([NEVER_NS])), 0
            return False
        # Use views, because converting to lists would block the event loop longer than drawing the numbers.
        due_ns = block.due_ns + self._start_ns
        last = min(np.searchsorted(due_ns, self._from_ns) + left, len(due_ns))
        self._due = _view(np.append(due_ns[:last], NEVER_NS))
        self._what = _view(block.samples)
        self._next = 0
        return True

    def _arrive(self, due_ns: int, what: int, now_ns: int) -> None:
        """Send a request that is due, or append it to the backlog."""
        self._counted += due_ns >= self._from_ns
        recorder = self._recorder
        recorder.late_due_ns.append(due_ns)
        recorder.noticed_ns.append(now_ns)
        if len(recorder.noticed_ns) >= BLOCK:
            recorder.flush_sent()
        if len(self._flying) < self._room and not self._backlog:
            self._send(due_ns, what, now_ns)
        else:
            self._backlog.append((due_ns, what))
            self._outcome.held_back += 1

    # ---- closed loop

    def _call_up(self) -> None:
        """Start callers until there are as many as the profile wants now."""
        wanted = self._wanted()
        while self._callers < wanted and self._sending:
            self._callers += 1
            self._think()

    def _wanted(self) -> int:
        """Return the number of this process's callers that the profile wants now."""
        profile, share, shares = self._plan.callers, self._plan.share, self._plan.shares
        assert profile is not None
        level = profile.at((self._now_ns() - self._start_ns) / 1e9)
        return len(range(share, round(level), shares))

    def _think(self) -> None:
        """Schedule a caller's next request after its think time."""
        if not self._plan.think:
            self._call()
        else:
            self._loop.call_later(self._rng.exponential(self._plan.think), self._call)

    def _call(self) -> None:
        """Send a caller's next request, or end the caller."""
        now_ns = self._now_ns()
        if now_ns >= self._end_ns or self._counted >= self._requests_max:
            self._outcome.exhausted = self._outcome.exhausted or self._sending
            self._sending = False
        if not self._sending:
            self._callers -= 1
            self._end_if_idle()
            return
        self._counted += now_ns >= self._from_ns
        recorder = self._recorder
        recorder.late_due_ns.append(now_ns)
        recorder.noticed_ns.append(now_ns)
        if len(recorder.noticed_ns) >= BLOCK:
            recorder.flush_sent()
        self._send(now_ns, next(self._sent_of), now_ns)

    def _choices(self) -> Iterator[int]:
        """Yield random sample indices for the requests of a closed loop."""
        count = len(self._samples)
        while True:
            yield from _view(self._rng.integers(0, count, BLOCK))

    # ---- both

    def _send(self, due_ns: int, what: int, now_ns: int) -> None:
        try:
            future = self._start(self._prepared[what])
        except Exception as error:
            self._recorder.failed(due_ns, *_described(error))
            self._go_on_after_error()
            return
        self._flying[future] = now_ns, due_ns
        future.add_done_callback(partial(self._answered, due_ns, what))

    def _answered(self, due_ns: int, what: int, future: "asyncio.Future[Any]") -> None:
        """Record an answer or an error."""
        now_ns = self._now_ns()
        if self._flying.pop(future, None) is None:
            if not future.cancelled():  # It was already given up and counted.
                future.exception()
            return
        recorder = self._recorder
        try:
            answer = future.result()
        except (Exception, asyncio.CancelledError) as error:
            recorder.failed(due_ns, *_described(error))
            self._outcome.last_done_ns = now_ns - self._start_ns
            self._go_on_after_error()
            return
        self._outcome.answered += 1
        if not self._checks or self._is_right(due_ns, what, answer):
            recorder.due_ns.append(due_ns)
            if isinstance(answer, Streamed):
                recorder.streamed(due_ns, answer.came_ns)
                recorder.done_ns.append(answer.came_ns[-1])
            else:
                recorder.done_ns.append(now_ns)
            if len(recorder.done_ns) >= BLOCK:
                recorder.flush_done()
        self._outcome.last_done_ns = now_ns - self._start_ns
        self._go_on()

    def _go_on_after_error(self) -> None:
        """Go on after a pause, so that a refused caller of a closed loop does not retry without a break."""
        if self._plan.schedule is None:
            self._loop.call_later(PAUSE_S, self._go_on)
        else:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Send the next request after another has ended."""
        if self._plan.schedule is None:
            if not self._is_level and self._callers > self._wanted():
                self._callers -= 1
                self._end_if_idle()
            else:
                self._think()
        elif self._backlog:
            due_ns, what = self._backlog.popleft()
            self._send(due_ns, what, self._now_ns())
        elif not self._sending:
            self._end_if_idle()

    def _is_right(self, due_ns: int, what: int, answer: Any) -> bool:
        """Return whether an answer is right. Count a wrong answer as an error."""
        expected = self._samples[what].expected
        if expected is None:
            return True
        try:
            wrong = differs(self._target.outputs(answer), expected, self._plan.rtol, self._plan.atol)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            self._recorder.failed(due_ns, WAS_WRONG, wrong)
        return wrong is None

    def _look(self) -> None:
        """Give up timed-out requests, emit the windows, and end the run if it is over."""
        now_ns = self._now_ns()
        self._give_up_late(now_ns)
        if self._stopped_ns is not None and now_ns - self._stopped_ns > GRACE_NS:
            self._give_up_all()
        if self._plan.schedule is None and self._sending:
            self._call_up()
            if now_ns >= self._end_ns:
                self._outcome.exhausted = True
                self._sending = False
        elif self._sending and now_ns - self._due[self._next] > BEHIND_NS_MAX:
            self._outcome.is_overwhelmed = True
            self.stop()
        self._take_steps()
        if now_ns - self._emitted_ns >= EMIT_NS:
            self._emitted_ns = now_ns
            try:
                self._emit(self._recorder.take())
            except Exception as error:  # The receiver is gone.
                if not self._ended.done():
                    self._ended.set_exception(error)
        self._end_if_idle()
        if not self._ended.done():
            self._handle = self._loop.call_later(TICK_S, self._look)

    def _take_steps(self) -> None:
        """Count the steps that have ended."""
        if self._steps:
            self._recorder.stepped(self._steps)
            self._steps.clear()

    def _give_up_late(self, now_ns: int) -> None:
        """Give up requests that timed out, in flight or in the backlog, and count them as errors."""
        limit_ns = now_ns - self._timeout_ns
        seconds = f"{self._timeout_ns / 1e9:g} s"
        for future in self._sent_before(limit_ns):
            _, due_ns = self._flying.pop(future)
            future.cancel()
            self._recorder.failed(due_ns, NO_ANSWER, f"no answer within {seconds}")
            self._outcome.last_done_ns = now_ns - self._start_ns
            self._loop.call_soon(self._go_on)
        while self._backlog and self._backlog[0][0] < limit_ns:
            due_ns, _ = self._backlog.popleft()
            self._recorder.failed(
                due_ns, NOT_SENT, f"waited {seconds} for room, because earlier requests were not answered"
            )

    def _sent_before(self, limit_ns: int) -> list["asyncio.Future[Any]"]:
        """Return requests sent at or before ``limit_ns``. They are in order, so the search ends early."""
        found = []
        for future, (sent_ns, _) in self._flying.items():
            if sent_ns > limit_ns:
                break
            found.append(future)
        return found

    def _give_up_all(self) -> None:
        """Give up all requests in flight. They count neither as answered nor as errors."""
        flying, self._flying = self._flying, {}
        for future in flying:
            future.cancel()

    def _end_if_idle(self) -> None:
        if not self._sending and not self._flying and not self._backlog and not self._ended.done():
            self._ended.set_result(None)

    async def _until(self, when_ns: int) -> None:
        """Sleep until the clock reaches ``when_ns``. The event loop's timers alone may fire early."""
        while (delay_ns := when_ns - self._now_ns()) > 0:  # noqa: ASYNC110  (a clock has no event)
            await asyncio.sleep(delay_ns / 1e9)


def _described(error: BaseException) -> tuple[str, str]:
    """Return the kind and message of an error, even an application's error whose message raises."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in OWN_ERRNOS:
            return OWN_ERROR, os.strerror(cause.errno)
        cause = cause.__cause__
    kind = type(error).__name__
    return kind, describe(error).removeprefix(kind).removeprefix(": ")


def _view(numbers: npt.NDArray[np.int64]) -> "memoryview[int]":
    """Return a view whose items can be read one by one as fast as from a list."""
    return memoryview(numbers)  # type: ignore[arg-type]  # Before Python 3.12 NumPy's types do not declare the buffer protocol.
