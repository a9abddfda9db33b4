"""Turns settings into the plan of one process for one run."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from asynctrt._util.cgroup import available_memory, memory_nbytes
from asynctrt._util.process import raise_open_files
from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import LoadProfile, Schedule
from asynctrt.loadtest.samples import Sample
from asynctrt.loadtest.settings import LoadSettings

SECONDS_DEFAULT: Final = 10.0
WINDOW_S: Final = 0.25
WINDOWS_MAX: Final = 120
"""Windows that a long run ends with, after they were merged in pairs, and moments in a report."""
NEAR_NS: Final = 150_000
"""How long before a request to a server is due the generator stops sleeping and polls the clock. Alarms are
nearly always late by less."""


OPEN_FILES: Final = Path("/proc/self/fd")

SPARE_FILES: Final = 64
"""File descriptors reserved for everything but requests: files of modules, pipes, the event loop."""

REQUEST_NBYTES: Final = 32 << 10
"""Approximate memory of a request in flight besides its body: a task, a connection, kernel buffers."""

MEMORY_SHARE: Final = 0.5
"""Largest share of the available memory to use."""


class Limit(NamedTuple):
    """A limit on the requests in flight.

    :param why: the reason for it; empty if the requests in flight cannot exceed it.
    :param is_void: whether a run is void in which requests had to wait because of it.
    """

    requests: int
    why: str = ""
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """Describe one process's part of one run. Times are in ns.

    :param schedule: the arrivals of an open loop; ``None`` for a closed loop.
    :param callers: the callers of a closed loop over time; ``None`` for an open loop.
    :param measured_ns: how long to send after the warm-up. Exactly this time is measured.
    :param limit: the limit on the requests in flight, over all processes.
    :param near_ns: how long before a request is due to poll the clock instead of sleeping.
    :param requests_max: limit on the measured requests, over all processes.
    :param rows: mean number of rows per request.
    :param share: the index of this process among ``shares`` processes.
    """

    schedule: Schedule | None
    callers: LoadProfile | None
    warmup_ns: int
    measured_ns: int
    window_ns: int
    think: float
    timeout_ns: int
    limit: Limit
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
        profile = self.callers if self.schedule is None else self.schedule.profile
        return profile is not None and len(profile.levels) == 1


def room(*, body_nbytes: int, has_connections: bool, processes: int = 1) -> Limit:
    """Return how many requests this process can have in flight.

    With ``has_connections``, raise the process's soft limit on open files first.

    :param body_nbytes: the bytes of one request.
    :param has_connections: whether each request uses a separate connection.
    :param processes: the number of processes that share the machine's memory.
    """
    free = available_memory() or sys.maxsize
    memory = MEMORY_SHARE * min(free, memory_nbytes() or free) / processes
    by_memory = max(1, int(memory / (REQUEST_NBYTES + body_nbytes)))
    found = Limit(by_memory, f"the memory of this machine has room for {by_memory:,} in a process")
    if has_connections:
        files = raise_open_files()
        unused = files - (len(list(OPEN_FILES.iterdir())) if OPEN_FILES.is_dir() else 0)
        by_files = max(1, unused - SPARE_FILES)
        if by_files < by_memory:
            found = Limit(by_files, f"a process may have {files:,} open files (ulimit -n)")
    return found


def make_plan(
    settings: LoadSettings,
    samples: Sequence[Sample],
    rows_max: int | None,
    share: int = 0,
    shares: int = 1,
    room: Limit | None = None,
) -> ProcessPlan:
    """Make the plan of one process.

    :param rows_max: the target's limit on the rows in flight, if it has one.
    :param room: this machine's limit on the requests in flight in each process, for a target in another
        process. A target in this process computes in threads that need the interpreter. An event loop that
        polls the clock takes the interpreter from them, which makes the latency many times higher than with
        an alarm.
    :raises OptionsError: if no plan is possible, for instance for too many callers for this machine.
    """
    warmup = settings.warmup
    seconds = settings.seconds or settings.stages_s or SECONDS_DEFAULT
    rows = np.array([sample.rows for sample in samples])
    profile = settings.profile(warmup + seconds)
    schedule, callers = None, None
    if settings.is_open:
        schedule = Schedule(settings.arrivals, profile, len(samples), settings.seed)
    else:
        callers = profile
    limit = _limit(settings, profile, rows_max, int(rows.max()))
    if room is not None and limit.requests > room.requests * shares:
        if callers is not None:
            raise OptionsError(
                f"{limit.requests:,} callers are too many for {shares} process(es): {room.why}. Set fewer "
                "callers, more processes, or raise the limit"
            )
        why = f"{room.why}: raise that, or set more processes"
        limit = Limit(room.requests * shares, why, is_void=True)
    return ProcessPlan(
        schedule=schedule,
        callers=callers,
        warmup_ns=int(warmup * 1e9),
        measured_ns=int(seconds * 1e9),
        window_ns=max(1, math.ceil(_window_s(seconds) * 1e9)),
        think=settings.think,
        timeout_ns=int(settings.answer_timeout * 1e9),
        limit=limit,
        near_ns=NEAR_NS if room is not None else 0,
        seed=settings.seed,
        rtol=settings.rtol,
        atol=settings.atol,
        requests_max=settings.requests,
        rows=float(rows.mean()),
        share=share,
        shares=shares,
    )


def _window_s(seconds: float) -> float:
    """Return the length of windows that fill the time exactly, also when they are merged in pairs."""
    count, pairs = math.ceil(seconds / WINDOW_S), 1
    while count > WINDOWS_MAX * pairs:
        pairs *= 2
    return seconds / (math.ceil(count / pairs) * pairs)


def _limit(settings: LoadSettings, profile: LoadProfile, rows_max: int | None, request_rows: int) -> Limit:
    """Return the limit that the target, the callers, or the time until requests are given up sets.

    :param profile: the rate, or the number of callers.
    :param request_rows: the largest number of rows of a request.
    """
    callers = 0 if settings.is_open else math.ceil(profile.largest)
    if rows_max is not None:
        fit = max(1, rows_max // request_rows, callers)
        return Limit(fit, f"the target takes {rows_max:,} rows at once")
    if callers:
        return Limit(callers)
    mean = profile.largest * settings.answer_timeout
    return Limit(math.ceil(mean + 6 * math.sqrt(mean)) + 1)  # Six standard deviations of a Poisson process.
