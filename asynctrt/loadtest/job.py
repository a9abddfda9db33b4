"""A whole load test (a run, repetitions, a sweep or a search) and its report."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from asynctrt._util.validation import changed
from asynctrt.core.loading import is_attribute
from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest.criteria import FIGURES, PERCENTILES
from asynctrt.loadtest.making import describe_machine, describe_making
from asynctrt.loadtest.plans import SECONDS_DEFAULT
from asynctrt.loadtest.report import Interval, Report, Run
from asynctrt.loadtest.search import Search
from asynctrt.loadtest.session import SETTING_NAMES, LoadCase, LoadSession
from asynctrt.loadtest.settings import CALLERS_DEFAULT, Arrays, LoadSettings
from asynctrt.loadtest.statistics import interval, requests_least
from asynctrt.loadtest.targets import SEND_APART, TargetSpec

Kind = Literal["run", "repeats", "sweep", "search"]

PROBE_S: Final = 1.0
"""Length of the closed-loop probe that determines the first rate of a search."""
SEARCH_REPEATS: Final = 3
PRECISION: Final = 0.05
"""The share of the rate to within which a search finds it."""
SEARCH_S_MAX: Final = 600.0
"""Limit on how long a search extends a run to judge its slo."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Describe a load test.

    :param target: a :class:`TargetSpec`, an engine, a target, or an async function.
    :param sweep: values to try in every combination, by the name of a setting or of an engine's option.
    :param search: find the highest rate that holds the slo.
    :raises OptionsError: for values that are invalid or contradict each other.
    """

    target: Any
    settings: LoadSettings
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    search: bool = False

    def __post_init__(self) -> None:
        settings, has_rate = self.settings, self.settings.rate is not None
        least = _requests_least(settings)
        for is_wrong, why in (
            (self.sweep and self.search, "sweep and search exclude each other: give only one of them"),
            (self.search and not settings.slo, "a search needs an slo, such as p99<20ms"),
            (self.search and settings.callers is not None, "a search varies the rate: leave callers out"),
            (
                self.search and has_rate and not _is_number(settings.rate),
                f"a search begins at one constant rate, not {settings.rate!r}",
            ),
            (
                self.search and settings.requests is not None and settings.requests < least,
                f"a search for this slo needs {least:,} requests a rate: set that, or leave requests out",
            ),
            (
                settings.arrivals != "poisson" and not (has_rate or self.search or "rate" in self.sweep),
                "arrivals says how the requests of an open loop are spaced: set rate",
            ),
        ):
            if is_wrong:
                raise OptionsError(why)
        if settings.processes > 1 and not (
            isinstance(self.target, TargetSpec) and (self.target.is_server or is_attribute(self.target.where))
        ):
            raise OptionsError(SEND_APART)
        # Raise an error in any of the runs before the first one starts.
        list(self.cases())

    @property
    def kind(self) -> Kind:
        """The kind of the load test."""
        if self.sweep:
            return "sweep"
        if self.search:
            return "search"
        return "repeats" if (self.settings.repeats or 1) > 1 else "run"

    @property
    def repeats(self) -> int:
        """The number of runs of each case."""
        return self.settings.repeats or (SEARCH_REPEATS if self.search else 1)

    def cases(self) -> "list[LoadCase]":
        """Return the runs in order; empty for a search, whose runs depend on each other.

        :raises OptionsError: for an invalid setting or option.
        """
        base = LoadCase(self.target, self.settings, _label(self.settings), {})
        if self.search:
            return []
        if not self.sweep:
            return [base] * self.repeats
        values = [
            dict(zip(self.sweep, items, strict=True)) for items in itertools.product(*self.sweep.values())
        ]
        # In rounds, A B A B, so that whatever else changes on the machine affects all of them.
        return [base.with_values(item) for item in values] * self.repeats


async def carry_out(job: LoadJob, session: LoadSession) -> Report:
    """Run the load test until it is complete or the session is stopped.

    :raises AsynctrtError: if it cannot start.
    :raises UsageError: if it was stopped before anything was measured.
    """
    search: Search | None = None
    if job.search:
        session.progress.count = None
        search = await _search(job, session)
    else:
        cases = job.cases()
        session.progress.count = len(cases)
        for case in cases:
            await session.run(case)
            if session.is_stopped:
                break
    return make_report(job, session.runs, search)


def make_report(job: LoadJob, runs: Sequence[Run], search: Search | None) -> Report:
    """Return the report of the runs.

    :raises UsageError: if there are no runs.
    """
    if not runs:
        raise UsageError(
            "the load test ended before anything was measured: there is nothing to report. Choose a shorter "
            "warmup"
        )
    return Report(
        kind=job.kind,
        target=_described(job.target),
        settings=_changed(job.settings),
        machine=describe_machine(),
        runs=tuple(runs),
        intervals=_intervals(runs) if job.kind in ("run", "repeats") else {},
        search=search.result(job.settings.slo) if search is not None else None,
        made=describe_making(),
    )


async def _search(job: LoadJob, session: LoadSession) -> Search:
    """Try rates until the highest rate that holds is found."""
    start = job.settings.rate
    base = LoadCase(job.target, job.settings, "", {})
    if start is None:
        probe = replace(job.settings, rate=None, arrivals="poisson", seconds=PROBE_S, requests=None, slo=())
        found = await session.run(LoadCase(job.target, probe, "closed-loop probe", {}))
        session.runs.clear()
        start = found.throughput / 2 if found is not None and found.throughput else 1.0
    search = Search(float(start), PRECISION)
    while (rate := search.next) is not None and not session.is_stopped:
        case = base.with_values({"rate": rate})
        held = missed = void = 0
        while max(held, missed, void) <= job.repeats // 2:
            run = await session.run(case)
            if run is None or session.is_stopped:
                search.end("the search was stopped")
                return search
            if not run.requests or (run.unjudged and not run.misses):
                longer_s = _seconds_needed(job.settings, rate)
                if longer_s > (case.settings.seconds or SECONDS_DEFAULT):
                    case = replace(case, settings=replace(case.settings, seconds=longer_s))
                    continue
                why = "; ".join(run.unjudged.values()) or "none was due"
                search.end(f"too few requests at {rate:g} requests/s to tell: measure for longer ({why})")
                return search
            void += bool(run.void)
            # A target that falls behind meets a latency only for as long as the run is short.
            is_held = run.holds and run.kept is None
            held += is_held
            missed += not is_held and not run.void
        search.tell(holds=held > job.repeats // 2, void=void > job.repeats // 2)
    return search


def _seconds_needed(settings: LoadSettings, rate: float) -> float:
    """Return how long to measure at a rate so that there are enough requests to judge the slo."""
    least = _requests_least(settings)
    # Three standard deviations more, because the number of due requests is random.
    return min((least + 3 * math.sqrt(least)) / rate, SEARCH_S_MAX)


def _requests_least(settings: LoadSettings) -> int:
    """Return the number of requests that are needed to judge every percentile of the slo."""
    known = [float(item.figure[1:]) for item in settings.criteria if item.figure in PERCENTILES]
    return max((requests_least(percent) for percent in known), default=1)


def _intervals(runs: Sequence[Run]) -> dict[str, Interval]:
    """Return the intervals over the complete repetitions, for each figure that all of them have."""
    found = {}
    for name in FIGURES:
        values = [run.figure(name) for run in runs if run.complete]
        known = [value for value in values if value is not None]
        made = interval(known) if len(known) == len(values) else None
        if made is not None:
            found[name] = made
    return found


def _described(target: Any) -> dict[str, Any]:
    if isinstance(target, TargetSpec):
        return target.describe()
    name = getattr(target, "name", None) or getattr(target, "__qualname__", None) or type(target).__name__
    return {"where": f"{name}, in the application's own process"}


def _changed(settings: LoadSettings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, and some that are always reported."""
    always = ("rate", "callers", "seconds", "warmup", "rows", "answer_timeout", "processes", "seed")
    shown = {*always, *changed(settings)}
    return {name: _told(getattr(settings, name)) for name in SETTING_NAMES if name in shown}


def _told(value: Any) -> Any:
    """Return a setting as shown in the report; arrays are replaced by their types and shapes."""
    if isinstance(value, Arrays):
        return {name or "array": f"{array.dtype.name} {array.shape}" for name, array in value.items()}
    return value


def _label(settings: LoadSettings) -> str:
    if settings.rate is not None:
        return f"{settings.arrivals}, {settings.rate} requests/s"
    return f"{settings.callers or CALLERS_DEFAULT} callers"


def _is_number(value: object) -> bool:
    try:
        return float(str(value)) > 0
    except ValueError:
        return False
