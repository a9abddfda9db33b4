"""Reports made by hand, for the tests of what draws them: their figures follow from a seed and a queue."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from asynctrt.loadtest.criteria import PERCENTILES, latency_target_ms, parse_slo
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.report import (
    BatchFigures,
    ErrorCount,
    Interval,
    Moment,
    Report,
    Run,
    SearchResult,
)

XSS = "<script>alert(1)</script> &amp; 'quoted' \"twice\""
MACHINE = {
    "cpu": "AMD EPYC 9554 64-Core Processor",
    "cores": 16,
    "memory_mb": 131072,
    "system": "Linux 6.8.0 x86_64",
    "gpus": ["NVIDIA H200"],
    "versions": {"asynctrt": "0.1.0", "python": "3.12.3", "numpy": "2.4.6", "tensorrt": "10.13.0"},
}
TARGET = {
    "where": "resnet50.plan",
    "name": "resnet50",
    "kind": "engine",
    "device": "cuda:0",
    "options": {"max_rows": 32, "contexts": 3},
}


def ms_of(counts, percent):
    """A percentile in ms, or none of too few."""
    if len(counts) * (1 - percent / 100) < 3:
        return None
    return counts.percentile(percent) / 1e6


def counted(latencies_ns):
    counts = Counts()
    counts.add(np.asarray(latencies_ns, np.int64))
    return counts


def figures_of(counts):
    """Percentiles by name, with mean and max, without those of too few."""
    if not len(counts):
        return {}
    found = {name: ms_of(counts, float(name[1:])) for name in PERCENTILES}
    known = {name: value for name, value in found.items() if value is not None}
    return {**known, "mean": counts.total_ns / len(counts) / 1e6, "max": counts.percentile(100) / 1e6}


def latencies_ns(rng, due_s, rate, capacity, base_ms):
    """A queue's latencies: slower as it fills, and without bounds when it is more than full."""
    load = min(rate / capacity, 0.97)
    typical = base_ms * (1 + load / (2 * (1 - load)))
    drawn = typical * rng.lognormal(0, 0.35, len(due_s))
    slow = rng.random(len(due_s)) < 0.006
    drawn[slow] *= rng.uniform(2, 5, slow.sum())
    drawn += np.where(due_s < 1.2, typical * (1.2 - due_s), 0)
    if rate > capacity:
        drawn += due_s * (1 - capacity / rate) * 1000
    return (drawn * 1e6).astype(np.int64)


def moments_of(due_s, taken_ns, late_ns, failed, seconds, piece=0.25):
    done_s = due_s + taken_ns / 1e9
    for number in range(round(seconds / piece)):
        mine = (due_s >= number * piece) & (due_s < (number + 1) * piece)
        ended = (done_s >= number * piece) & (done_s < (number + 1) * piece) & ~failed
        counts, lateness = counted(taken_ns[mine & ~failed]), counted(late_ns[mine])
        yield Moment(
            number * piece,
            piece,
            mine.sum() / piece,
            ended.sum() / piece,
            ms_of(counts, 50),
            ms_of(counts, 99),
            counts.percentile(100) / 1e6 if len(counts) else None,
            int((mine & failed).sum()),
            ms_of(lateness, 99),
        )


def make_run(
    label="run",
    *,
    rate=2000.0,
    capacity=4000.0,
    seconds=10.0,
    base_ms=1.6,
    seed=1,
    is_open=True,
    failing=0.0,
    slo=(),
    has_batches=True,
    generator_cores=0.84,
    parameters=None,
    **changed,
):
    """A run against a queue with this capacity; ``changed`` are fields of the run as they should be."""
    rng = np.random.default_rng(seed)
    due_s = np.sort(rng.uniform(0, seconds, int(rate * seconds)))
    taken_ns = latencies_ns(rng, due_s, rate, capacity, base_ms)
    late_ns = (rng.exponential(0.012, len(due_s)) * 1e6).astype(np.int64)
    failed = rng.random(len(due_s)) < failing
    latency = counted(taken_ns[~failed])
    moments = tuple(moments_of(due_s, taken_ns, late_ns, failed, seconds))
    throughput = float(np.mean([moment.throughput for moment in moments]))
    errors = int(failed.sum())
    kinds = {"NoAnswer": ErrorCount(errors, "no answer within 10 s")} if errors else {}
    found = figures_of(latency)
    run = Run(
        label=label,
        seconds=seconds,
        complete=True,
        void=(),
        notes=(),
        offered=rate if is_open else None,
        requests=len(due_s),
        answered=len(due_s) - errors,
        unanswered=0,
        rows=1.0,
        throughput=throughput,
        goodput=None,
        error_share=errors / max(1, len(due_s)),
        errors=kinds,
        latency=found,
        lateness=figures_of(counted(late_ns)),
        slo={},
        batches=batches_of(rng, len(due_s), found["mean"], base_ms) if has_batches and found else None,
        generator_cores=generator_cores,
        moments=moments,
        histogram=latency.as_mapping(),
        parameters=parameters or {},
    )
    run = replace(run, **changed)
    criteria = parse_slo(slo)
    held = {str(item): (run.figure(item.figure) or 0.0) < item.limit for item in criteria}
    within = latency.within((latency_target_ms(criteria) or 0.0) * 1e6) / seconds
    return replace(run, slo=held, goodput=within) if criteria else run


def batches_of(rng, requests, mean_ms, base_ms):
    """Batches whose stages take their time whatever the load is, so that the queue has what is left."""
    sizes = np.clip(rng.poisson(9, max(1, requests // 9)), 1, 32)
    rows, counts = np.unique(sizes, return_counts=True)
    return BatchFigures(
        requests=requests,
        batches=len(sizes),
        mean_rows=float(sizes.mean()),
        queue=max(0.0, mean_ms - base_ms),
        copy_in=base_ms * 0.09,
        compute=base_ms * 0.62,
        copy_out=base_ms * 0.05,
        by_rows=dict(zip(rows.tolist(), counts.tolist(), strict=True)),
    )


def nothing(label="run", **changed):
    """A run that nobody answered."""
    refused = {"ConnectionRefusedError": ErrorCount(500, "[Errno 111] Connect call failed ('10.0.0.7', 80)")}
    empty = make_run(label, rate=50, has_batches=False, failing=2.0)
    return replace(empty, errors=refused, **changed)


def make_report(*runs, kind="run", settings=None, **changed):
    """A report of these runs."""
    given = {
        "rate": "2000",
        "arrivals": "poisson",
        "seconds": 10.0,
        "warmup": 1.0,
        "timeout": 10.0,
        "repeats": 1,
        "slo": [],
        "callers": None,
        "dims": [],
        "seed": 0,
        **(settings or {}),
    }
    report = Report(kind=kind, target=TARGET, settings=given, machine=MACHINE, runs=tuple(runs), intervals={})
    return replace(report, **changed)


def single(slo=("p99<20ms",), **changed):
    return make_report(make_run(slo=slo, **changed), settings={"slo": list(slo)})


def repeats(count=5):
    runs = [make_run(f"repetition {n + 1}", seed=n, base_ms=1.6 + 0.05 * n) for n in range(count)]
    intervals = {}
    for name in ("throughput", "p50", "p99", "mean"):
        values = np.array([run.figure(name) for run in runs])
        reach = 2.776 * values.std(ddof=1) / count**0.5
        intervals[name] = Interval(values.mean(), values.mean() - reach, values.mean() + reach, count)
    return make_report(*runs, kind="repeats", settings={"repeats": count}, intervals=intervals)


def sweep(rates=(250, 500, 1000, 2000, 3000, 3500, 3800, 4500), slo=("p99<20ms",)):
    runs = [
        make_run(f"rate={rate}", rate=rate, seed=rate, seconds=5.0, slo=slo, parameters={"rate": rate})
        for rate in rates
    ]
    return make_report(*runs, kind="sweep", settings={"slo": list(slo), "rate": None})


def sweep_of_a_setting(values=(0, 1, 2, 5, 10)):
    """The same rate, with another delay each time."""
    runs = [
        make_run(
            f"max_delay_ms={value}", base_ms=1.4 + 0.6 * value, seed=value, parameters={"max_delay_ms": value}
        )
        for value in values
    ]
    return make_report(*runs, kind="sweep")


def search(slo=("p99<20ms",), rates=(1000, 2000, 4000, 2828, 3364, 3668, 3513, 3438, 3438)):
    runs = [
        make_run(f"{rate:,} requests/s", rate=rate, seed=n, seconds=4.0, slo=slo, parameters={"rate": rate})
        for n, rate in enumerate(rates)
    ]
    held = [run.offered for run in runs if run.holds]
    fell = [run.offered for run in runs if not run.holds]
    result = SearchResult(
        slo,
        max(held, default=None),
        min(fell, default=None),
        "between what holds and what fails is less than 3%",
    )
    settings = {"slo": list(slo), "rate": None, "warmup": 0.5}
    return make_report(*runs, kind="search", search=result, settings=settings)


def void():
    """One run that the generator did not keep up with, was stopped, and held nothing."""
    run = make_run(
        rate=3900,
        slo=("p99<20ms",),
        failing=0.02,
        complete=False,
        unanswered=12,
        void=("the generator was 14.2 ms late at p99, more than a tenth of the latency",),
        notes=("The figures drift until the end: it never became steady.",),
    )
    return make_report(run, settings={"rate": "3900", "slo": ["p99<20ms"]})


def hostile():
    """Errors whose texts came from a server that nobody should trust, and names like them."""
    errors = {
        "HTTPError": ErrorCount(1234, XSS + " " + "x" * 480),
        "<b>bold</b>": ErrorCount(3, "\x00\x1b[31m\u202e"),
        "QueueFullError": ErrorCount(17, "the queue has room for 512 rows, and 512 are in it"),
    }
    run = make_run(label=XSS, failing=0.01, errors=errors, notes=(XSS,))
    return make_report(run, target={"where": XSS, "name": XSS}, settings={"inputs": XSS})


def sweep_of_hostile_names():
    """Names that reach the charts: markup, mathematics, and letters that XML does not have."""
    names = (XSS, "$x_1$ & 'y' \"z\"", 'bell \x07 id="a" url(#b)')
    runs = [make_run(name, rate=300, seed=n, parameters={"model": name}) for n, name in enumerate(names)]
    return make_report(*runs, kind="sweep")


def few():
    """So few requests that most percentiles are not known, of a server that does not tell what it does."""
    run = make_run(rate=8, seconds=5, is_open=False, has_batches=False)
    run = replace(run, generator_cores=0.02)
    return make_report(run, settings={"rate": None, "callers": "4"})


def unanswered():
    """Nobody answered."""
    return make_report(nothing())


def empty():
    """Stopped before the first run."""
    return make_report()


def long_sweep():
    """More runs than one plot can show, the last one void."""
    report = sweep(rates=[round(10 * 1.35**n) for n in range(20)])
    last = replace(report.runs[-1], void=("the generator fell behind by 1.4 s",))
    return replace(report, runs=(*report.runs[:-1], last))


def search_in_vain():
    """No rate holds the target."""
    return search(slo=("p99<1ms",), rates=(1000, 500, 250, 125))


EVERY = {
    made.__name__: cache(made)
    for made in (
        single,
        repeats,
        sweep,
        sweep_of_a_setting,
        search,
        void,
        hostile,
        sweep_of_hostile_names,
        few,
        unanswered,
        empty,
        long_sweep,
        search_in_vain,
    )
}
"""Reports of every kind, by name."""
IN_TIERS = [
    kind if kind in ("single", "hostile", "few", "empty") else pytest.param(kind, marks=pytest.mark.tier2)
    for kind in EVERY
]
"""Their names, for tests that draw each: a few kinds in the first tier, all the others in the second."""
