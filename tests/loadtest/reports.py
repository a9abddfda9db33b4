"""Reports for the tests of what draws them: of made-up requests that follow from a seed and a queue."""

from array import array
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from asynctrt.loadtest import figures
from asynctrt.loadtest.plans import make_plan
from asynctrt.loadtest.recorder import RunRecorder
from asynctrt.loadtest.report import ErrorCount, Interval, Report, SearchResult
from asynctrt.loadtest.runner import NO_ANSWER, ProcessResult
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import BatchCounters
from tests.loadtest.support import sample

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
    parameters=None,
    **changed,
):
    """A run against a queue with this capacity; ``changed`` are fields of the run as they should be."""
    settings = LoadSettings(seconds=seconds, warmup=0, slo=slo, **({"rate": rate} if is_open else {}))
    plan = make_plan(settings, [sample()], None)
    rng = np.random.default_rng(seed)
    due_s = np.sort(rng.uniform(0, seconds, int(rate * seconds)))
    taken_ns = latencies_ns(rng, due_s, rate, capacity, base_ms)
    noticed_ns = ((due_s + rng.exponential(0.012, len(due_s)) / 1e3) * 1e9).astype(np.int64)
    failed = rng.random(len(due_s)) < failing
    due_ns = (due_s * 1e9).astype(np.int64)
    recorder = RunRecorder(0, plan.window_ns)
    recorder.late_due_ns, recorder.noticed_ns = array("q", due_ns), array("q", noticed_ns)
    recorder.due_ns, recorder.done_ns = array("q", due_ns[~failed]), array("q", (due_ns + taken_ns)[~failed])
    for one in due_ns[failed]:
        recorder.failed(one, NO_ANSWER, "no answer within 10 s")
    elapsed_ns = round(seconds * 1e9)
    outcome = ProcessResult(
        cpu_ns=round(0.84 * elapsed_ns),
        elapsed_ns=elapsed_ns,
        exhausted=True,
        answered=len(recorder.due_ns),
        batches=batches_of(rng, taken_ns[~failed], base_ms * 1e6) if has_batches else None,
    )
    run = figures.make_run(
        settings, plan, recorder.take(), [outcome], is_server=False, label=label, parameters=parameters or {}
    )
    return replace(run, kept=None, **changed)


def batches_of(rng, taken_ns, base_ns):
    """Batches whose stages take their time whatever the load is, so that the queue has what is left."""
    sizes = np.clip(rng.poisson(9, max(1, len(taken_ns) // 9)), 1, 32)
    rows, counts = np.unique(sizes, return_counts=True)
    return BatchCounters(
        requests=len(taken_ns),
        rows=int(sizes.sum()),
        batches=len(sizes),
        queue_ns=int(np.maximum(taken_ns - base_ns, 0).sum()),
        **{
            f"{stage}_ns": int(len(taken_ns) * base_ns * share)
            for stage, share in (("copy_in", 0.09), ("compute", 0.62), ("copy_out", 0.05))
        },
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
