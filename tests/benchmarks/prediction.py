"""Does the simulator predict what a real engine does? A model on the host device that takes known ms.

The model sleeps for a fixed time and so much a row, in a thread of the device. What batches cost is taken
from a short load test of that engine, as a user would; from it, and from a table of the true times, the same
arrivals are simulated that are then really sent.
"""

import asyncio
import time

import uvloop

import asynctrt
from asynctrt import loadtest
from asynctrt.devices.host import HostDevice
from asynctrt.options import Options
from asynctrt.simulation.latency import parse_latency
from asynctrt.simulation.plan import make_plan, simulate_plan
from asynctrt.simulation.settings import SimulationSettings
from tests.benchmarks.common import arguments, save, show

BASE_MS, ROW_MS = 20.0, 1.25
THREADS = 2
MAX_ROWS = 16
FIGURES = ("throughput", "p50", "p99")
SEED = 11


def known(inputs, outputs):
    """Take a known time."""
    rows = len(inputs["x"])
    time.sleep((BASE_MS + ROW_MS * rows) / 1e3)
    outputs["y"][...] = inputs["x"]


def model():
    x, y = (asynctrt.TensorSpec(name, "float32", (4,)) for name in "xy")
    return asynctrt.FunctionModel(known, inputs=x, outputs=y)


def capacity():
    """Return the rows/s of full batches on all threads."""
    return THREADS * MAX_ROWS / (BASE_MS + ROW_MS * MAX_ROWS) * 1e3


def opened(**options):
    device = HostDevice(threads=THREADS, in_place="never")
    return asynctrt.open(model(), device=device, max_rows=MAX_ROWS, **options)


async def fit(seconds):
    """Measure what batches cost, with as many callers as make batches of several sizes."""
    runs = []
    # What waits for a thread counts as computing there, so none does.
    async with opened(max_in_flight=THREADS) as engine:
        for callers in (1, 4, 8, 16, 24, 4 * MAX_ROWS):
            report = await loadtest.run(engine, callers=callers, seconds=seconds, warmup=0.2)
            runs += report.as_json()["runs"]
    model = parse_latency({"runs": runs}, "the load test").as_json()
    return parse_latency({**model, "lanes": THREADS, "splits": True}, "the load test")


def table():
    """Return the true times."""
    batches = [{"rows": rows, "compute_ms": BASE_MS + ROW_MS * rows} for rows in (1, MAX_ROWS)]
    return parse_latency({"batches": batches, "lanes": THREADS, "splits": True}, "the table")


async def measure(rate, seconds):
    async with opened() as engine:
        report = await loadtest.run(engine, rate=rate, seconds=seconds, warmup=1.0, seed=SEED)
        await asyncio.sleep(0)
    (run,) = report.runs
    return {name: run.figure(name) for name in FIGURES} | {"late_p99": run.lateness.get("p99", 0.0)}


def predict(latency, rate, seconds):
    # A load test goes on for its warm-up and its measured time, with the same seed: the same arrivals.
    settings = SimulationSettings(seconds=seconds + 1.0, warmup=1.0)
    plan = make_plan(f"poisson:{rate:f}", latency, settings, Options(max_rows=MAX_ROWS, contexts=4), SEED)
    made, _ = simulate_plan(plan)
    return {name: made.figure(name) for name in FIGURES}


def main():
    options = arguments(__doc__, seconds=10.0, fit_seconds=1.5, repeats=3)
    found = []
    for repeat in range(options.repeats):
        fitted = uvloop.run(fit(options.fit_seconds))
        for load in (0.5, 0.8):
            rate = load * capacity()
            measured = uvloop.run(measure(rate, options.seconds))
            for name, latency in (("fitted", fitted), ("table", table())):
                predicted = predict(latency, rate, options.seconds)
                found.append(
                    {
                        "repeat": repeat,
                        "load": load,
                        "model": name,
                        "measured": measured,
                        "predicted": predicted,
                    }
                )
    lines = []
    for one in found:
        measured, predicted = one["measured"], one["predicted"]
        cells = []
        for name in FIGURES:
            if measured[name] and predicted[name]:
                off = predicted[name] / measured[name] - 1
                cells.append(f"{measured[name]:,.2f} / {predicted[name]:,.2f} ({off:+.1%})")
            else:
                cells.append("too few")
        lines.append((f"{one['load']:.0%}, {one['model']}", *cells, f"{measured['late_p99']:.2f}"))
    show(
        f"Measured / predicted at shares of the capacity of {capacity():,.0f} requests/s",
        ("", "requests/s", "p50 ms", "p99 ms", "generator late, p99 ms"),
        lines,
    )
    save(options.json, "prediction of a real run", found)


if __name__ == "__main__":
    main()
