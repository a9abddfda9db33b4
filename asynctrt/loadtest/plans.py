"""Turns settings into the plan of one process for one run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import Fixed, LoadProfile, Schedule, TraceEntry, read_trace
from asynctrt.loadtest.limits import Room
from asynctrt.loadtest.samples import Sample, Shape
from asynctrt.loadtest.settings import LoadSettings

SECONDS_DEFAULT: Final = 10.0
WINDOW_S: Final = 0.25
WINDOWS_MAX: Final = 120
"""Windows that a long run ends with, after they were merged in pairs; a report shows as many moments."""
NEAR_NS: Final = 150_000
"""How long before a request to a server is due the generator stops sleeping and polls the clock. Alarms are
nearly always late by less."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """Describe one process's part of one run. Times are in ns.

    :param schedule: the arrivals of an open loop; ``None`` for a closed loop.
    :param callers: the callers of a closed loop over time; ``None`` for an open loop.
    :param measured_ns: how long to send after the warm-up. With ``is_timed``, exactly this time is measured;
        otherwise the run is measured until the last answer.
    :param in_flight_max: limit on the requests in flight, over all processes.
    :param in_flight_why: the reason for this limit; empty if the requests in flight cannot exceed it.
    :param is_void_at_limit: whether the run is void if requests had to wait because of this limit.
    :param near_ns: how long before a request is due to poll the clock instead of sleeping.
    :param requests_max: limit on the measured requests, over all processes.
    :param rows: mean number of rows per request.
    :param share: the index of this process among ``shares`` processes.
    """

    schedule: Schedule | Fixed | None
    callers: LoadProfile | None
    warmup_ns: int
    measured_ns: int
    window_ns: int
    is_timed: bool
    think: float
    timeout_ns: int
    in_flight_max: int
    in_flight_why: str
    is_void_at_limit: bool
    near_ns: int
    seed: int
    rtol: float
    atol: float
    requests_max: int | None
    rows: float
    share: int
    shares: int

    @property
    def is_level(self) -> bool:
        """Whether the load is constant, so that it can become steady."""
        if self.callers is not None:
            return len(self.callers.levels) == 1
        return isinstance(self.schedule, Schedule) and len(self.schedule.profile.levels) == 1


def resolve(settings: LoadSettings) -> tuple[float, float]:
    """Return the lengths of the warm-up and the measurement in seconds, with defaults filled in."""
    seconds = settings.seconds or settings.stages_s or SECONDS_DEFAULT
    # A trace is sent only once, so it has no warm-up.
    return (0.0 if settings.trace is not None else settings.warmup), seconds


def trace_shapes(entries: Sequence[TraceEntry]) -> list[tuple[Shape, int, int]]:
    """Return each kind of request in a trace: dimensions, rows, priority."""
    return list(dict.fromkeys((entry.dims, entry.rows, entry.priority) for entry in entries))


def make_plan(
    settings: LoadSettings,
    samples: Sequence[Sample],
    rows_max: int | None,
    share: int = 0,
    shares: int = 1,
    *,
    is_server: bool = False,
    room: Room | None = None,
) -> ProcessPlan:
    """Make the plan of one process.

    :param rows_max: the target's limit on the rows in flight, if it has one.
    :param room: this machine's limit on the requests in flight in each process.
    :param is_server: whether the target is in another process. A target in this process computes in threads
        that need the interpreter. An event loop that polls the clock takes the interpreter from
        them, which makes the latency many times higher than with an alarm.
    :raises OptionsError: if no plan is possible, for instance for too many callers for this machine.
    """
    warmup, seconds = resolve(settings)
    rows = np.array([sample.rows for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    schedule: Schedule | Fixed | None = None
    callers, is_timed = None, True
    if settings.trace is not None:
        schedule = _trace_schedule(settings, samples)
        seconds, is_timed = schedule.seconds, False
    elif settings.is_open:
        profile = settings.profile(warmup + seconds)
        schedule = Schedule(settings.arrivals, profile, weights, settings.seed)
    else:
        callers = settings.profile(warmup + seconds)
    asked = None if callers is None else math.ceil(callers.largest)
    due_max = _due_within(schedule, settings.answer_timeout)
    limit = _limit(settings.max_outstanding, asked, rows_max, int(rows.max()), due_max)
    if room is not None:
        limit = _within_room(
            limit, room, shares, is_asked=asked is not None or bool(settings.max_outstanding)
        )
    if isinstance(schedule, Fixed):
        mean_rows = rows[schedule.samples].mean()
    else:
        mean_rows = np.average(rows, weights=weights)
    return ProcessPlan(
        schedule=schedule,
        callers=callers,
        warmup_ns=int(warmup * 1e9),
        measured_ns=int(seconds * 1e9),
        window_ns=max(1, math.ceil((_window_s(seconds) if is_timed else WINDOW_S) * 1e9)),
        is_timed=is_timed,
        think=settings.think,
        timeout_ns=int(settings.answer_timeout * 1e9),
        in_flight_max=limit.requests,
        in_flight_why=limit.why,
        is_void_at_limit=limit.is_void,
        near_ns=NEAR_NS if is_server else 0,
        seed=settings.seed,
        rtol=settings.rtol,
        atol=settings.atol,
        requests_max=settings.requests,
        rows=float(mean_rows),
        share=share,
        shares=shares,
    )


class _Limit(NamedTuple):
    """A limit on the requests in flight, and whether a run is void in which requests waited for it."""

    requests: int
    why: str
    is_void: bool = False


def _window_s(seconds: float) -> float:
    """Return the length of windows that fill the time exactly, also when they are merged in pairs."""
    count, pairs = math.ceil(seconds / WINDOW_S), 1
    while count > WINDOWS_MAX * pairs:
        pairs *= 2
    return seconds / (math.ceil(count / pairs) * pairs)


def _limit(
    given: int | None, callers: int | None, rows_max: int | None, request_rows: int, due_max: int
) -> _Limit:
    """Return the limit that the settings, the target or the time until requests are given up sets."""
    if given is not None:
        return _Limit(given, f"max_outstanding is {given:,}")
    if rows_max is not None:
        fit = max(1, rows_max // request_rows, callers or 0)
        return _Limit(fit, f"the target takes {rows_max:,} rows at once")
    return _Limit(callers or due_max, "")


def _within_room(limit: _Limit, room: Room, processes: int, *, is_asked: bool) -> _Limit:
    """Return the limit, or this machine's own if that is less.

    :raises OptionsError: if the settings ask for more than this machine has room for.
    """
    most = room.requests * processes
    if limit.requests <= most:
        return limit
    if is_asked:
        raise OptionsError(
            f"{limit.requests:,} requests in flight are too many for {processes} process(es): {room.limit}. "
            "Set fewer callers or max_outstanding, more processes, or raise the limit"
        )
    return _Limit(most, f"{room.limit}: raise that, or set more processes", is_void=True)


def _due_within(schedule: Schedule | Fixed | None, seconds: float) -> int:
    """Return an upper bound, nearly certain, on the number of requests due within ``seconds``."""
    if isinstance(schedule, Schedule):
        mean = schedule.profile.largest * seconds
        return math.ceil(mean + 6 * math.sqrt(mean)) + 1  # Six standard deviations of a Poisson process.
    return len(schedule.due_ns) if schedule is not None else 1


def _trace_schedule(settings: LoadSettings, samples: Sequence[Sample]) -> Fixed:
    """Return the arrivals of a trace. Each sends a random sample of its kind."""
    assert settings.trace is not None
    entries = read_trace(settings.trace)
    kinds = {shape: number for number, shape in enumerate(trace_shapes(entries))}
    each = len(samples) // len(kinds)
    if not each or len(samples) % len(kinds):
        raise OptionsError("the trace has changed since its samples were made: start the load test again")
    rng = np.random.default_rng((settings.seed, 5))
    picks = rng.integers(0, each, len(entries))
    what = np.array([kinds[entry.dims, entry.rows, entry.priority] * each for entry in entries]) + picks
    due_s = np.array([entry.seconds for entry in entries]) / settings.trace_speed
    return Fixed((due_s * 1e9).astype(np.int64), what.astype(np.int64), float(due_s[-1]))
