"""Real TensorRT plans under Poisson arrivals, in company and beside other work of the loop.

usage: python -m tests.benchmarks.gpu.plans_load [--lean LIBRARY] [--flavour PACKAGE] [--size N] PLAN OTHER

- Two engines, of PLAN and OTHER, in shared arenas: each alone, then both at once. Answers are checked.
- PLAN with 256 callers beside a task that keeps the loop busy for a share of each millisecond.
- Poisson arrivals for PLAN, as it opens by default and with one context, at shares of what the GPU computes
  at the largest batch, or of what the engine answers to 256 callers if that is less: a loop that cannot send
  the requests measures only its own queue. "ideal" and the rest as in tests.benchmarks.gpu.poisson.

Without plans, the strict double on the host device stands in for both.
"""

import asyncio
import statistics
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt.devices.arenas import Arenas
from tests.benchmarks.common import medians, parser_of, save
from tests.benchmarks.gpu.plans import Checked, load, made_up
from tests.benchmarks.gpu.poisson import ideal
from tests.benchmarks.gpu.raw import Batch
from tests.benchmarks.gpu.resnet import SIZES, at_rate, report_load
from tests.benchmarks.gpu.support import burn, closed_loop, open_device, said

SERVICE_ROUNDS = 30
CALLERS = 256
COMPANY_CALLERS = 64
PERIOD_NS = 1_000_000
KINDS = {"the default": {}, "1 context": {"contexts": 1, "arenas": 1}}


def service_s(device, model, rows, size):
    """Return by batch size how long a captured batch takes with its copies, and how long it computes."""
    sizes = {dim: size for spec in model.inputs for dim in spec.dims if isinstance(dim, str)}
    arenas, found = Arenas(device, 1, nbytes=max(model.capabilities.enqueue_nbytes, 1)), {}
    arena = arenas.arenas[0].memory if model.capabilities.enqueue_nbytes else None
    for count in SIZES:
        stream = device.create_stream()
        batch = Batch(device, model, count, arena, stream, is_captured=True, sizes=sizes)
        batch.fill(
            *(np.concatenate([rows[n % len(rows)][spec.name] for n in range(count)]) for spec in model.inputs)
        )
        taken = {"all": [], "compute": []}
        for _ in range(SERVICE_ROUNDS):
            start_ns = clock.now_ns()
            batch.launch(None)
            batch.end.synchronize()
            taken["all"].append((clock.now_ns() - start_ns) / 1e9)
            batch.launch_timed()
            batch.end.synchronize()
            taken["compute"].append(batch.stages_ns()[1] / 1e9)
        found[count] = {name: statistics.median(times) for name, times in taken.items()}
        stream.close(10.0)
        batch.close()
    arenas.close()
    return found


async def under_poisson(device, model, rows, service, answered, options):
    """Return the latencies by share and by who answers.

    :param answered: the rows per second that the engine answers to many callers.
    """
    computed = SIZES[-1] / service[SIZES[-1]]["compute"]
    capacity = min(computed, answered)
    rates = {share: float(share) * capacity for share in options.shares.split(",")}
    seeds = range(1, options.repeats + 1)
    found = {share: {} for share in rates}
    for share, rate in rates.items():
        for name, which in (("ideal", "compute"), ("ideal, serial", "all")):
            runs = [ideal(service, which, rate, options.seconds, seed) for seed in seeds]
            found[share][name] = medians(runs)
    for name, kind in KINDS.items():
        async with asynctrt.open(model, device=device, max_rows=SIZES[-1], **kind) as engine:
            check = Checked(rows, [await engine.infer(row) for row in rows])
            asynctrt.tune_process()
            for share, rate in rates.items():
                found[share][name] = await at_rate(engine, rows, rate, options)
            for row in rows:
                check(row, await engine.infer(row))
    return {"capacity": capacity, "computed": computed, "service_s": service, "load": found}


async def rate_of(engine, check, rows, callers, seconds):
    sent = [rows[number % len(rows)] for number in range(callers)]
    return await closed_loop(engine, check, sent, seconds)


async def in_company(device, models, rows_of, options):
    """Return the rates of two engines in shared arenas: each alone, and both at once."""
    with Arenas(device, options.arenas) as arenas:
        # The one that needs most first, as a larger one would leave what the first had.
        order = sorted(models, key=lambda model: -model.capabilities.enqueue_nbytes)
        engines = {}
        try:
            for model in order:
                engines[model] = await asynctrt.open(
                    model, device=device, max_rows=SIZES[-1], contexts=4, shared_arenas=arenas
                )
            checks = {
                model: Checked(rows_of[model], [await engines[model].infer(row) for row in rows_of[model]])
                for model in models
            }

            def run(model):
                rows = rows_of[model]
                return rate_of(engines[model], checks[model], rows, COMPANY_CALLERS, options.seconds)

            alone = [await run(model) for model in models]
            both = await asyncio.gather(*(run(model) for model in models))
        finally:
            for engine in engines.values():
                await engine.aclose()
        mib = arenas.nbytes / 2**20
    pairs = zip(models, alone, both, strict=True)
    return {"mib": mib, "models": [{"name": model.name, "alone": a, "both": b} for model, a, b in pairs]}


async def keep_busy(share):
    """Burn a share of each millisecond."""
    while True:
        burn(int(share * PERIOD_NS))
        await asyncio.sleep((1 - share) * PERIOD_NS / 1e9)


async def beside_work(device, model, rows, options):
    """Return the rates beside a loop that does other work for a share of the time."""
    found = {}
    async with asynctrt.open(model, device=device, max_rows=SIZES[-1]) as engine:
        check = Checked(rows, [await engine.infer(row) for row in rows])
        for share in (0.0, 0.2, 0.5):
            work = asyncio.create_task(keep_busy(share)) if share else None
            found[share] = await rate_of(engine, check, rows, CALLERS, options.seconds)
            if work is not None:
                work.cancel()
                await asyncio.wait([work])
    return found


def report_company(company):
    for found in company["models"]:
        alone, both = found["alone"], found["both"]
        print(
            f"{found['name']} in shared arenas of {company['mib']:.0f} MiB: "
            f"alone {alone['rows_per_s']:,.0f} rows/s, "
            f"p99 {alone['p99_us'] / 1e3:.2f} ms; beside the other {both['rows_per_s']:,.0f}, "
            f"p99 {both['p99_us'] / 1e3:.2f} ms, {both['rows_a_batch']:.1f} rows a batch",
            flush=True,
        )


def report_work(busy):
    for share, found in busy.items():
        print(
            f"loop busy for {share:.0%}: {found['rows_per_s']:,.0f} rows/s, p50 {found['p50_us'] / 1e3:.2f}, "
            f"p99 {found['p99_us'] / 1e3:.2f} ms, {found['rows_a_batch']:.1f} rows a batch, "
            f"{found['cores']:.2f} cores",
            flush=True,
        )


async def measure(plans, options):
    device = open_device(options.device if options.plans else "host")
    models = [load(plan, device, options) for plan in plans]
    rows_of = {model: made_up(model, options.size) for model in models}
    first, figures = models[0], {}
    with said("batch by batch"):
        service = service_s(device, first, rows_of[first], options.size)
        for size, by in service.items():
            print(f"  {size}: compute {by['compute'] * 1e3:.3f}, all {by['all'] * 1e3:.3f} ms")
    with said("in company"):
        figures["company"] = await in_company(device, models, rows_of, options)
    report_company(figures["company"])
    with said("beside work"):
        figures["busy"] = await beside_work(device, first, rows_of[first], options)
    report_work(figures["busy"])
    with said("Poisson"):
        answered = figures["busy"][0.0]["rows_per_s"]
        figures["poisson"] = await under_poisson(device, first, rows_of[first], service, answered, options)
    poisson = figures["poisson"]
    rates = f"load: of {poisson['capacity']:,.0f} rows/s; the GPU: {poisson['computed']:,.0f}."
    report_load(poisson["load"], "Poisson arrivals", rates, device)
    save(options.json, __doc__, figures, device)
    for model in models:
        model.close()


def main():
    defaults = {
        "rows": 64,
        "size": 32,
        "seconds": 1.0,
        "repeats": 1,
        "arenas": 2,
        "shares": "0.2,0.4,0.6,0.8,0.9",
    }
    parser = parser_of(__doc__, device="cuda:0", **defaults)
    parser.add_argument("plans", nargs="*", type=Path, metavar="PLAN")
    parser.add_argument("--lean", help="the lean runtime of the version that built the plans")
    parser.add_argument("--flavour", help="the package that runs them")
    options = parser.parse_args()
    uvloop.run(measure(options.plans or [None, None], options))


if __name__ == "__main__":
    main()
