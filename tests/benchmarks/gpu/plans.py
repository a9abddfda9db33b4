"""Real TensorRT plans behind `await`, beside raw loops of the same contexts, copies and graphs.

usage: python -m tests.benchmarks.gpu.plans [--lean LIBRARY] [--flavour PACKAGE] [--size N] PLAN...

For each plan: rows per second of raw loops with batches of --rows, and of the engine as it opens by default
to 1, 8, 64, 256 and 1,024 callers with a row each, in turn; then with graphs and without, and with 8 contexts
in 1, 2 and 8 arenas. Every dynamic dimension has --size. Inputs are made up, each caller's answer is checked
against its answer alone. Without a plan, the strict double on the host device stands in for one.
"""

import statistics
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from tests.benchmarks.common import medians, parser_of, save, show
from tests.benchmarks.gpu.raw import RawLoop
from tests.benchmarks.gpu.support import closed_loop, open_device, said
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan

CALLERS = (1, 8, 64, 256, 1024)
CONTEXTS = 8
ROWS_MADE = 64
TOLERANCE = 0.02
"""Of the largest value: half precision, and kernels that differ from one batch size to another."""


def load(plan, device, options):
    if plan is None:
        return TensorRTModel(double_plan(EngineSpec()), device=device, flavour=StrictTensorRT(device))
    settings = TensorRTOptions(lean_runtime=options.lean, allow_host_code=options.lean is not None)
    return TensorRTModel(plan, device=device, flavour=options.flavour, options=settings)


def made_up(model, size):
    """Return some different rows."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(ROWS_MADE):
        row = {}
        for spec in model.inputs:
            shape = (1, *(size if isinstance(dim, str) else dim for dim in spec.dims))
            if spec.dtype.kind in "iu":
                row[spec.name] = rng.integers(1, 200, shape).astype(spec.dtype)
            else:
                row[spec.name] = rng.normal(size=shape).astype(spec.dtype)
        rows.append(row)
    return rows


class Checked:
    """The answers to some rows, as they are without company."""

    def __init__(self, rows, answers):
        self._answers = {id(row): answer for row, answer in zip(rows, answers, strict=True)}

    def __call__(self, row, answer):
        for name, expected in self._answers[id(row)].items():
            off = np.abs(np.asarray(answer[name], np.float32) - np.asarray(expected, np.float32)).max()
            if off > TOLERANCE * np.abs(expected).max():
                raise AssertionError(f"a wrong answer: {name} is off by {off}")


async def engine_rates(model, device, rows, callers, options, **settings):
    """Return what some numbers of callers had, and the bytes that the engine takes beside weights."""
    runs, kinds = {}, settings or {"contexts": 4}
    async with asynctrt.open(model, device=device, max_rows=options.rows, **kinds) as engine:
        check = Checked(rows, [await engine.infer(row) for row in rows])
        for count in callers:
            sent = [rows[number % len(rows)] for number in range(count)]
            runs[count] = await closed_loop(engine, check, sent, options.seconds)
        taken = engine.statistics().arena_nbytes + model.memory_statistics().held_nbytes
    return runs, taken - model.weights_nbytes


def raw_loops(model, device, rows, options):
    """Return the raw loops by what distinguishes them."""
    sizes = {dim: options.size for spec in model.inputs for dim in spec.dims if isinstance(dim, str)}
    kinds = {
        "one stream": {"depth": 3},
        "overlapped, one arena": {"depth": 4, "is_overlapped": True},
        "two at once": {"depth": 4, "is_overlapped": True, "arenas": 2},
    }
    made = {}
    stacked = [
        np.concatenate([rows[number % len(rows)][spec.name] for number in range(options.rows)])
        for spec in model.inputs
    ]
    for name, kind in kinds.items():
        made[name] = RawLoop(device, model, options.rows, sizes=sizes, **kind)
        made[name].fill(*stacked)
    return made


async def measure(plan, options):
    device = open_device("host" if plan is None else options.device)
    model = load(plan, device, options)
    rows = made_up(model, options.size)
    figures = {"raw_rows_per_s": {}, "callers": [], "graphs": {}, "arenas": {}}
    raws = raw_loops(model, device, rows, options)
    with said(f"{model.name}: {len(raws)} raw loops and {len(CALLERS)} numbers of callers, in turn"):
        raw_runs, runs = {name: [] for name in raws}, []
        for _ in range(options.repeats):
            for name, raw in raws.items():
                raw_runs[name].append(raw.batches_per_s(options.seconds) * options.rows)
            runs.append((await engine_rates(model, device, rows, CALLERS, options))[0])
    for raw in raws.values():
        raw.close()
    figures["raw_rows_per_s"] = {name: statistics.median(found) for name, found in raw_runs.items()}
    best = max(figures["raw_rows_per_s"].values())
    for count in CALLERS:
        middle = medians([run[count] for run in runs])
        figures["callers"].append({"callers": count, **middle, "ratio": middle["rows_per_s"] / best})
    with said("graphs and arenas, with 256 callers"):
        for graphs in ("auto", "off"):
            found, _ = await engine_rates(
                model, device, rows, (256,), options, contexts=4, arenas=1, graphs=graphs
            )
            figures["graphs"][graphs] = found[256]["rows_per_s"]
        for arenas in (1, 2, CONTEXTS):
            found, taken = await engine_rates(
                model, device, rows, (256,), options, contexts=CONTEXTS, arenas=arenas, graphs="off"
            )
            figures["arenas"][arenas] = {"rows_per_s": found[256]["rows_per_s"], "mib": taken / 2**20}
    report(model, figures, device, options)
    model.close()
    return figures


def report(model, figures, device, options):
    loops = ", ".join(f"{name} {rate:,.0f}" for name, rate in figures["raw_rows_per_s"].items())
    show(
        f"{model.name} ({model.flavour.title}): rows per second of the engine as it opens by default",
        ("callers", "rows/s", "of the raw loop", "rows a batch", "cores", "p50 ms", "p99 ms"),
        [
            (
                f"{line['callers']:,}",
                f"{line['rows_per_s']:,.0f}",
                f"{line['ratio']:.2f}",
                f"{line['rows_a_batch']:.1f}",
                f"{line['cores']:.2f}",
                f"{line['p50_us'] / 1e3:.2f}",
                f"{line['p99_us'] / 1e3:.2f}",
            )
            for line in figures["callers"]
        ],
        f"Raw loops with batches of {options.rows}: {loops}.",
        device=device,
    )
    print(f"256 callers, graphs on {figures['graphs']['auto']:,.0f}, off {figures['graphs']['off']:,.0f}")
    for arenas, found in figures["arenas"].items():
        print(f"8 contexts in {arenas} arenas: {found['rows_per_s']:,.0f} rows/s, {found['mib']:,.1f} MiB")


def main():
    parser = parser_of(__doc__, device="cuda:0", rows=64, size=64, seconds=0.5, repeats=3)
    parser.add_argument("plans", nargs="*", type=Path, metavar="PLAN")
    parser.add_argument("--lean", help="the lean runtime of the version that built the plans")
    parser.add_argument("--flavour", help="the package that runs them")
    options = parser.parse_args()
    figures = {str(plan or "double"): uvloop.run(measure(plan, options)) for plan in options.plans or [None]}
    save(options.json, "real plans", figures, open_device(options.device if options.plans else "host"))


if __name__ == "__main__":
    main()
