"""Calculates the figures of one run from its counts. Pure.

A figure is given only if there is enough data. A percentile needs enough requests for the largest to bound it
with 95% confidence: 5 for p50, 299 for p99, 29,956 for p99.99.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from asynctrt.loadtest.criteria import PERCENTILES, Criterion, latency_target_ms
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.plans import WINDOWS_MAX, ProcessPlan
from asynctrt.loadtest.recorder import StepCount, Window, Windows, total
from asynctrt.loadtest.report import (
    BatchFigures,
    Moment,
    Run,
    StepFigures,
    StreamFigures,
)
from asynctrt.loadtest.runner import NO_ANSWER, NOT_SENT, OWN_ERROR, ProcessResult
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.statistics import exceeds, requests_least
from asynctrt.loadtest.targets import BatchCounters

LATE_MS: Final = 0.1
"""Lateness of the generator up to this never makes a run void."""
LATE_SHARE: Final = 0.1
"""Largest share of the mean latency that the generator's lateness may be."""
LATE_TAIL_SHARE: Final = 0.5
"""Largest ratio of p99 lateness to p99 latency."""
OWED_SHARE: Final = 0.02
OWED_DEVIATIONS: Final = 2.0
OWED_LEAST: Final = 100
"""A target does not keep up if, in the second half, the number of unfinished requests grows by more than
``OWED_SHARE`` of the requests sent, which must be at least ``OWED_LEAST``, and by more than
``OWED_DEVIATIONS`` standard deviations of the number of Poisson arrivals."""
COUNTED_SHARE: Final = 0.9
"""Smallest ratio, either way, of a target's request count to the answers. Processes read it at different
times."""
BUSY_CORES: Final = 0.97
"""A sending process that uses more cores than this is saturated."""


def make_run(
    settings: LoadSettings,
    plan: ProcessPlan,
    counted: Windows,
    outcomes: Sequence[ProcessResult],
    *,
    is_server: bool,
    label: str,
    parameters: Mapping[str, Any],
) -> Run | None:
    """Compute the figures of one run; ``None`` if it was stopped before anything was measured.

    :param counted: the windows of all processes.
    :param outcomes: the result of each process.
    :param is_server: whether the target runs in another process.
    """
    complete = all(outcome.exhausted for outcome in outcomes)
    seconds, count = _measured(plan, outcomes, complete=complete)
    if seconds <= 0:
        return None
    windows = [counted.get(number, Window()) for number in range(count)]
    whole = total(windows)
    answered, failed = whole.answered, whole.failed
    requests = max(whole.sent, answered + failed)
    criteria = settings.criteria
    limit_ms = latency_target_ms(criteria)
    latency = latencies(whole.latency)
    late = latencies(whole.lateness) if plan.schedule is not None else {}
    throughput = sum(window.completed for window in windows) / seconds
    error_share = failed / (answered + failed) if answered + failed else 0.0
    goodput = whole.latency.within(limit_ms * 1e6) / seconds if limit_ms is not None else None
    held, unjudged = judge(criteria, whole, throughput, goodput)
    held_back = None if plan.limit.is_void else _held_back(plan, outcomes)
    # The process that ended last has read the most.
    known = [outcome.batches for outcome in outcomes if outcome.batches is not None]
    counters = max(known, key=attrgetter("requests"), default=None)
    unbelievable = _unbelievable(counters, sum(outcome.answered for outcome in outcomes))
    return Run(
        label=label,
        seconds=seconds,
        complete=complete,
        void=_void(plan, outcomes, whole, latency, late, is_server=is_server),
        notes=tuple(note for note in (held_back, unbelievable) if note is not None),
        offered=whole.sent / seconds if plan.schedule is not None else None,
        requests=requests,
        answered=answered,
        unanswered=max(0, requests - answered - failed),
        rows=plan.rows,
        throughput=throughput,
        goodput=goodput,
        error_share=error_share,
        errors=dict(sorted(whole.errors.items())),
        latency=latency,
        lateness=late,
        slo=held,
        unjudged=unjudged,
        batches=None if unbelievable else batch_figures(counters),
        generator_cores=sum(outcome.cpu_ns / max(outcome.elapsed_ns, 1) for outcome in outcomes),
        moments=_moments(windows, plan.window_ns / 1e9, seconds),
        histogram=whole.latency.as_mapping(),
        parameters=parameters,
        kept=_kept(plan, windows),
        stream=_stream(whole, seconds),
        steps=_steps(whole, counted),
    )


def _measured(plan: ProcessPlan, outcomes: Sequence[ProcessResult], *, complete: bool) -> tuple[float, int]:
    """Return the number of seconds and of windows that were measured."""
    last_ns = max(outcome.last_done_ns for outcome in outcomes) - plan.warmup_ns
    elapsed_ns = min(outcome.elapsed_ns for outcome in outcomes) - plan.warmup_ns
    if complete and plan.requests_max is None:
        return plan.measured_ns / 1e9, -(-plan.measured_ns // plan.window_ns)
    if complete:
        # The run ended with the last answer, not at a set time.
        ended_ns = min(last_ns, plan.measured_ns)
        return ended_ns / 1e9, -(-ended_ns // plan.window_ns) if ended_ns > 0 else 0
    count = min(elapsed_ns, max(outcome.stopped_ns for outcome in outcomes) - plan.warmup_ns)
    count //= plan.window_ns
    return count * plan.window_ns / 1e9, int(count)


def latencies(counts: Counts) -> dict[str, float]:
    """Return mean, maximum and percentiles in ms, without percentiles for which there are too few values."""
    count = len(counts)
    found: dict[str, float] = {}
    if not count:
        return found
    for name in PERCENTILES:
        percent = float(name[1:])
        value_ns = counts.percentile(percent) if count >= requests_least(percent) else None
        if value_ns is not None:
            found[name] = value_ns / 1e6
    found["mean"] = counts.total_ns / count / 1e6
    found["max"] = counts.nth(count) / 1e6
    return found


def judge(
    criteria: Sequence[Criterion], whole: Window, throughput: float, goodput: float | None
) -> tuple[dict[str, bool], dict[str, str]]:
    """Return whether each criterion was met, and which have too few requests to be judged, with the reason.

    A failed request counts as infinite latency.
    """
    held, unjudged = {}, {}
    for item in criteria:
        latency, failed = _judged(item, whole)
        ended = len(latency) + failed
        why = _too_few(item, latency, ended)
        if why:
            unjudged[str(item)] = why
        elif not ended:
            held[str(item)] = False
        elif item.figure in PERCENTILES:
            held[str(item)] = latency.within(item.limit * 1e6) >= float(item.figure[1:]) / 100 * ended
        else:
            known = {"errors": failed / ended, "throughput": throughput, "goodput": goodput}
            if not failed:  # Otherwise mean and maximum are infinite.
                known |= latencies(latency)
            value = known.get(item.figure)
            held[str(item)] = value is not None and item.compare(value)
    return held, unjudged


def _too_few(item: Criterion, latency: Counts, ended: int) -> str:
    """Return why there are too few requests to judge a criterion; empty if there are enough."""
    if item.step and not ended:
        return f"no step {item.step!r} ended"
    if not ended or item.figure not in PERCENTILES:
        return ""
    percent = float(item.figure[1:])
    least = requests_least(percent)
    if ended >= least or exceeds(ended - latency.within(item.limit * 1e6), ended, percent):
        return ""
    return f"{item.figure} needs {least:,} requests, and {ended:,} ended"


def _judged(item: Criterion, whole: Window) -> tuple[Counts, int]:
    """Return the latencies and the number of failures that a criterion judges."""
    if not item.step:
        return whole.latency, whole.failed
    step = whole.steps.get(item.step, StepCount())
    return step.latency, step.failed


def _void(
    plan: ProcessPlan,
    outcomes: Sequence[ProcessResult],
    whole: Window,
    latency: Mapping[str, float],
    late: Mapping[str, float],
    *,
    is_server: bool,
) -> tuple[str, ...]:
    """Return why the figures would describe the generator instead of the target, if they would."""
    sent = whole.sent
    reasons = []
    if any(outcome.is_overwhelmed for outcome in outcomes):
        reasons.append("the generator fell seconds behind the schedule and gave up: set a lower rate")
    mean, tail = late.get("mean", 0.0), late.get("p99", 0.0)
    # An engine in this process shares the event loop with the generator, as it would with an application, so
    # its callers see the lateness too. If most requests fail, the latency of the answered ones says nothing
    # about how the others were sent.
    if is_server and late and latency and whole.failed <= whole.answered:
        if mean > max(LATE_MS, LATE_SHARE * latency["mean"]):
            reasons.append(
                f"of a mean latency of {latency['mean']:.3g} ms, {mean:.3g} ms are the generator's lateness: "
                "set a lower rate, or more processes"
            )
        elif tail > max(LATE_MS, LATE_TAIL_SHARE * latency.get("p99", tail)):
            reasons.append(
                f"p99 is {latency['p99']:.3g} ms, and that of the generator's lateness {tail:.3g} ms: set a "
                "lower rate, or more processes"
            )
    if is_server and plan.callers is not None and not plan.think:
        cores = max(outcome.cpu_ns / max(outcome.elapsed_ns, 1) for outcome in outcomes)
        if cores > BUSY_CORES:
            reasons.append(
                f"a sending process used {cores:.2f} cores, so the throughput may be limited by it: set more "
                "processes"
            )
    held_back = _held_back(plan, outcomes) if plan.limit.is_void else None
    if held_back is not None:
        reasons.append(held_back)
    own = whole.errors.get(OWN_ERROR)
    if own is not None:
        reasons.append(f"{own.count:,} requests could not be sent from here: {own.example}")
    if not sent:
        reasons.append("no request was due in the measured time")
    return tuple(reasons)


def _held_back(plan: ProcessPlan, outcomes: Sequence[ProcessResult]) -> str | None:
    """Return a note that requests had to wait in the generator; ``None`` if none had to."""
    count = sum(outcome.held_back for outcome in outcomes)
    if not count:
        return None
    return (
        f"{count:,} requests waited to be sent, because {plan.limit.requests:,} were in flight and "
        f"{plan.limit.why}"
    )


def _kept(plan: ProcessPlan, windows: Sequence[Window]) -> float | None:
    """Return the rate of answers in the second half of a level open loop; ``None`` if the target kept up."""
    if plan.schedule is None or not plan.is_level:
        return None
    half = total(windows[len(windows) // 2 :])
    given_up = sum(half.errors[kind].count for kind in (NO_ANSWER, NOT_SENT) if kind in half.errors)
    owed = half.sent - half.completed - (half.failed - given_up)
    by_chance = OWED_DEVIATIONS * half.sent**0.5
    if owed <= max(OWED_SHARE * half.sent, by_chance) or half.sent < OWED_LEAST:
        return None
    return half.completed / ((len(windows) - len(windows) // 2) * plan.window_ns / 1e9)


def _unbelievable(counters: BatchCounters | None, answered: int) -> str | None:
    """Return a note that the target's own statistics are implausible; ``None`` if they may be right."""
    if counters is None or not answered:
        return None
    requests = counters.requests
    is_all = COUNTED_SHARE * answered <= requests <= answered / COUNTED_SHARE
    if is_all and min(counters.batches, counters.queue_ns) >= 0:
        return None
    return (
        f"the target's own statistics are left out: they rose by {requests:,} requests, while {answered:,} "
        "were answered. It may have other clients, have restarted, or have several processes that count apart"
    )


def batch_figures(counters: BatchCounters | None) -> BatchFigures | None:
    """Return the figures of a target's batches; ``None`` if it has no statistics, or computed nothing."""
    if counters is None or not counters.batches or not counters.requests:
        return None
    requests = counters.requests
    return BatchFigures(
        requests=requests,
        batches=counters.batches,
        mean_rows=counters.rows / counters.batches,
        queue=counters.queue_ns / requests / 1e6,
        copy_in=counters.copy_in_ns / requests / 1e6,
        compute=counters.compute_ns / requests / 1e6,
        copy_out=counters.copy_out_ns / requests / 1e6,
        by_rows=dict(counters.by_rows),
    )


def _stream(whole: Window, seconds: float) -> StreamFigures | None:
    """Return the figures of answers that came in pieces; ``None`` if none did."""
    if not len(whole.first):
        return None
    return StreamFigures(whole.pieces / seconds, latencies(whole.first), latencies(whole.between))


def _steps(whole: Window, windows: Windows) -> dict[str, StepFigures]:
    """Return the figures of the steps, in the order in which they first ended, also in the warm-up."""
    names = dict.fromkeys(name for number in sorted(windows) for name in windows[number].steps)
    return {
        name: StepFigures(len(step.latency) + step.failed, step.failed, latencies(step.latency))
        for name in names
        if (step := whole.steps.get(name)) is not None
    }


def _moments(windows: Sequence[Window], window_s: float, seconds: float) -> tuple[Moment, ...]:
    each = max(1, -(-len(windows) // WINDOWS_MAX))
    moments = []
    for start in range(0, len(windows), each):
        part = total(windows[start : start + each])
        at_s = start * window_s
        length_s = min(each * window_s, seconds - at_s)
        if length_s <= 0:
            continue
        figures, late = latencies(part.latency), latencies(part.lateness)
        moments.append(
            Moment(
                at_s=at_s,
                seconds=length_s,
                sent=part.sent / length_s,
                throughput=part.completed / length_s,
                p50=figures.get("p50"),
                p99=figures.get("p99"),
                max=figures.get("max"),
                errors=part.failed,
                answered=part.answered,
                late_p99=late.get("p99"),
            )
        )
    return tuple(moments)
