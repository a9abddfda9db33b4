"""From settings to what one process does in one run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import Fixed, Profile, Schedule, TraceEntry, read_trace
from asynctrt.loadtest.samples import Sample, Shape
from asynctrt.loadtest.scenarios import RULES, offline_requests
from asynctrt.loadtest.settings import LoadSettings

SECONDS_DEFAULT: Final = 10.0
WINDOW_S: Final = 0.25
PERIODS_MAX: Final = 10_000
BURSTS: Final = 10
"""Bursts in a run, on average, if the settings do not say how long a period is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process does in one run. Times are in ns.

    :param schedule: an open loop's arrivals; ``None``: a closed loop.
    :param callers: a closed loop's callers over the time; ``None``: an open loop.
    :param measured_ns: how long to send after the warm-up. With ``is_timed`` that is how long is measured;
        without, it is until the last answer.
    :param in_flight_max: requests on the way at once, all processes together.
    :param requests_max: all processes together.
    :param rows: of a request, on average.
    :param share: which of ``shares`` processes this is.
    """

    schedule: Schedule | Fixed | None
    callers: Profile | None
    warmup_ns: int
    measured_ns: int
    window_ns: int
    is_timed: bool
    think: float
    timeout_ns: int
    in_flight_max: int
    pacing: Literal["adaptive", "spin", "timer"]
    seed: int
    rtol: float
    atol: float
    requests_max: int | None
    rows: float
    share: int
    shares: int

    @property
    def is_batch(self) -> bool:
        """Whether everything is due at once."""
        return isinstance(self.schedule, Fixed) and not self.schedule.seconds

    @property
    def is_level(self) -> bool:
        """Whether the load is meant to be the same all the time, so that it can become steady."""
        if self.callers is not None:
            return len(self.callers.levels) == 1
        return isinstance(self.schedule, Schedule) and len(self.schedule.profile.levels) == 1


def resolve(settings: LoadSettings) -> tuple[float, float]:
    """How long to warm up and to measure, in seconds, where the settings leave it to the rest."""
    seconds = settings.seconds
    if seconds is None:
        seconds = RULES[settings.scenario].seconds_min if settings.scenario else SECONDS_DEFAULT
    # MLPerf measures from the first query on; a trace has one beginning, and offline one moment.
    warmup = 0.0 if settings.scenario is not None or settings.trace is not None else settings.warmup
    return warmup, seconds


def window_seconds(settings: LoadSettings) -> tuple[float, int | None]:
    """How long a window is, and how many there are; ``None`` where the last answer is the end."""
    if settings.trace is not None or settings.scenario == "offline":
        return WINDOW_S, None
    _, seconds = resolve(settings)
    count = max(1, math.ceil(seconds / WINDOW_S))
    return seconds / count, count


def rows_of(settings: LoadSettings) -> int:
    """Rows a request."""
    return RULES[settings.scenario].rows if settings.scenario == "multi-stream" else settings.rows


def trace_shapes(entries: Sequence[TraceEntry]) -> list[tuple[Shape, int, int]]:
    """Each kind of request in a trace: dimensions, rows, priority."""
    return list(dict.fromkeys((entry.dims, entry.rows, entry.priority) for entry in entries))


def make_plan(
    settings: LoadSettings,
    samples: Sequence[Sample],
    rows_max: int,
    share: int = 0,
    shares: int = 1,
    *,
    is_server: bool = False,
) -> Plan:
    """The plan of one process.

    :param rows_max: rows that the target bears on the way at once.
    :param is_server: whether the target is in another process. One in this process computes in threads that
        need the interpreter, and a loop that looks at the clock all the time takes it from them: under 15,000
        requests/s a perceptron's mean latency was 15 to 110 ms with an alarm, and over 1 s with such a loop.
    """
    warmup, seconds = resolve(settings)
    rows = np.array([sample.rows for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    schedule: Schedule | Fixed | None = None
    callers, is_timed = None, True
    if settings.trace is not None:
        schedule = _trace_schedule(settings, samples)
        seconds, is_timed = schedule.seconds, False
    elif settings.scenario == "offline":
        count = settings.requests or offline_requests(settings, seconds)
        rng = np.random.default_rng((settings.seed, 5))
        what = rng.choice(len(samples), count, p=weights / weights.sum())
        schedule = Fixed(np.zeros(count, np.int64), what, 0.0)
        is_timed = False
    elif settings.is_open:
        profile = _shaped(settings, warmup + seconds)
        schedule = Schedule(settings.arrivals, profile, weights, settings.seed)
    elif settings.scenario is not None:
        callers = Profile.parse("1", seconds)
    else:
        callers = settings.profile(warmup + seconds)
    pacing = settings.pacing if settings.pacing != "auto" else "adaptive" if is_server else "timer"
    measured_ns = int(seconds * 1e9)
    window_s, _ = window_seconds(settings)
    in_flight_max = settings.max_outstanding or max(1, rows_max // int(rows.max()))
    if callers is not None and settings.max_outstanding is None:
        in_flight_max = max(in_flight_max, math.ceil(callers.largest))
    if isinstance(schedule, Fixed):
        mean_rows = rows[schedule.samples].mean()
    else:
        mean_rows = np.average(rows, weights=weights)
    return Plan(
        schedule=schedule,
        callers=callers,
        warmup_ns=int(warmup * 1e9),
        measured_ns=measured_ns,
        window_ns=max(1, math.ceil(window_s * 1e9)),
        is_timed=is_timed,
        think=settings.think,
        timeout_ns=int(settings.answer_timeout * 1e9),
        in_flight_max=in_flight_max,
        pacing=pacing,
        seed=settings.seed,
        rtol=settings.rtol,
        atol=settings.atol,
        requests_max=settings.requests,
        rows=float(mean_rows),
        share=share,
        shares=shares,
    )


def _shaped(settings: LoadSettings, seconds: float) -> Profile:
    """The rate over the time, with bursts and days."""
    profile = settings.profile(seconds)
    if settings.period is not None and seconds / settings.period > PERIODS_MAX:
        raise OptionsError(f"a period of {settings.period:g} s is too short for {seconds:g} s")
    if settings.swing is not None:
        profile = profile.diurnal(settings.period or seconds, settings.swing)
    if settings.burst is not None:
        rng = np.random.default_rng((settings.seed, 6))
        period = settings.period or seconds / BURSTS
        profile = profile.bursty(period, settings.burst_share, settings.burst, rng)
    return profile


def _trace_schedule(settings: LoadSettings, samples: Sequence[Sample]) -> Fixed:
    """A trace's arrivals; each sends one of the samples that were made for its kind, drawn evenly."""
    assert settings.trace is not None
    entries = read_trace(settings.trace)
    kinds = {shape: number for number, shape in enumerate(trace_shapes(entries))}
    each = len(samples) // len(kinds)
    if not each or len(samples) % len(kinds):
        raise OptionsError("the trace has changed since its samples were made")
    rng = np.random.default_rng((settings.seed, 5))
    picks = rng.integers(0, each, len(entries))
    what = np.array([kinds[entry.dims, entry.rows, entry.priority] * each for entry in entries]) + picks
    due_s = np.array([entry.seconds for entry in entries]) / settings.trace_speed
    return Fixed((due_s * 1e9).astype(np.int64), what.astype(np.int64), float(due_s[-1]))
