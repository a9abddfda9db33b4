"""How many requests are answered within three times what a full batch takes, from half to 1.5 of capacity?

In the simulator, over several seeds, Poisson arrivals and bursts of 5 times the mean rate, by how the engine
is opened; beside it a batcher with a fixed delay, as of servers that hold a batch back for a configured time,
and a bound that no schedule exceeds, though it knew all arrivals. Then some loads are sent to an engine
on the host device whose model takes those times.

The bound: a device that computes each row alone in the time that it takes in a full batch, the shortest there
is, and takes a request only if it is in time. Any schedule of batches is one of these rows, as a batch takes
no less than its rows there; and of requests that all take equally long and have equally long, turning those
away that would be late loses the fewest.
"""

import statistics
from collections import deque
from functools import partial

import uvloop

import asynctrt
from asynctrt import loadtest
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import arguments, copying_model, save, show
from tests.simulation.arrivals import at_random, in_bursts, requests
from tests.simulation.latency import linear
from tests.simulation.load import simulate

ROWS = 16
BASE_MS, ROW_MS = 3.6, 0.4
FULL_MS = BASE_MS + ROW_MS * ROWS
TARGET_MS = 3 * FULL_MS
DELAY_MS = FULL_MS / 2
CAPACITY = ROWS / FULL_MS * 1e3
LOADS = "0.5,0.75,0.9,1.0,1.2,1.5"
REAL_LOADS = (0.5, 0.9, 1.5)
WARMUP_S = 0.5
KINDS = {"Poisson": at_random, "bursts": partial(in_bursts, period_s=0.5)}
TIMEOUT = {"timeout": TARGET_MS / 1e3}
WAYS = {
    "work-conserving": {},
    "timeout until launch": TIMEOUT,
    "timeout until answer": {**TIMEOUT, "timeout_until": "answer"},
}
DEVICES = {
    "one thread": {"contexts": 2},
    # Batches are put there ahead of time, and copied in meanwhile.
    "pipelined": {"contexts": 4, "arenas": 1},
}


def took_ms(rows):
    return BASE_MS + ROW_MS * rows


def simulated(kind, load, seconds, seed, **options):
    made = simulate(
        requests(KINDS[kind](load * CAPACITY, seconds, seed), timeout_s=options.get("timeout")),
        linear((1, took_ms(1)), (ROWS, took_ms(ROWS))),
        {"max_rows": ROWS, **options},
        seconds=seconds,
        warmup=WARMUP_S,
        limit_ms=TARGET_MS,
        seed=seed,
    )
    return {"goodput": made.goodput / CAPACITY, "p99_ms": made.ms(99)}


def arrivals_ms(kind, load, seconds, seed):
    return [due_ns / 1e6 for due_ns in KINDS[kind](load * CAPACITY, seconds, seed)]


def share_in_time(kept, seconds):
    """Return the answers in time as a share of capacity, of those that end after the warm-up."""
    good = sum(end - came <= TARGET_MS and WARMUP_S * 1e3 <= end <= seconds * 1e3 for came, end in kept)
    return good / (seconds - WARMUP_S) / CAPACITY


def fixed_delay(arrivals, seconds):
    """Serve in the order of arrival; a batch that is not full waits until its first has waited for long."""
    kept, queue, free = [], deque(arrivals), 0.0
    while queue:
        first = queue[0]
        due = first + DELAY_MS
        if len(queue) >= ROWS:
            due = min(due, queue[ROWS - 1])
        begins = max(free, due)
        batch = []
        while queue and len(batch) < ROWS and queue[0] <= begins:
            batch.append(queue.popleft())
        free = begins + took_ms(len(batch))
        kept += [(came, free) for came in batch]
    latencies = sorted(end - came for came, end in kept)
    return {
        "goodput": share_in_time(kept, seconds),
        "p99_ms": latencies[int(0.99 * len(latencies))],
    }


def bound(arrivals, seconds):
    kept, free = [], 0.0
    for came in arrivals:
        end = max(free, came) + FULL_MS / ROWS
        if end <= came + TARGET_MS:
            free = end
            kept.append((came, end))
    return {"goodput": share_in_time(kept, seconds), "p99_ms": 0.0}


async def really(load, seconds, seed, **options):
    model = copying_model(lambda rows: took_ms(rows) / 1e3)
    device = HostDevice(threads=1, in_place="never")
    async with asynctrt.open(model, device=device, max_rows=ROWS, contexts=2, **options) as engine:
        report = await loadtest.run(
            engine,
            rate=load * CAPACITY,
            seconds=seconds,
            warmup=WARMUP_S,
            seed=seed,
            slo=(f"p99<{TARGET_MS}ms",),
        )
    (run,) = report.runs
    return {"goodput": (run.figure("goodput") or 0.0) / CAPACITY, "p99_ms": run.figure("p99") or 0.0}


def middle(runs, figure="goodput"):
    return statistics.median(run[figure] for run in runs)


def main():
    options = arguments(__doc__, seconds=8.0, seeds=10, real_seconds=6.0, repeats=3, loads=LOADS)
    loads = [float(load) for load in options.loads.split(",")]
    seconds, seeds = options.seconds, range(options.seeds)
    found = {}
    for kind in KINDS:
        cases = {}
        for load in loads:
            for device, its in DEVICES.items():
                for way, how in WAYS.items():
                    runs = [simulated(kind, load, seconds, seed, **how, **its) for seed in seeds]
                    cases.setdefault(f"{way}, {device}", {})[str(load)] = runs
            arrivals = [arrivals_ms(kind, load, seconds, seed) for seed in seeds]
            for name, serve in (("fixed delay", fixed_delay), ("clairvoyant bound", bound)):
                cases.setdefault(name, {})[str(load)] = [serve(these, seconds) for these in arrivals]
        found[kind] = cases
        show(
            f"{kind}: share of capacity answered within {TARGET_MS:g} ms, and p99 in ms",
            ("", *(f"{load:.0%}" for load in loads)),
            [
                (
                    name,
                    *(
                        f"{middle(by_load[str(load)]):.2f} {middle(by_load[str(load)], 'p99_ms'):.0f}"
                        for load in loads
                    ),
                )
                for name, by_load in cases.items()
            ],
            f"medians of {len(seeds)} seeds of {seconds:g} s;",
        )
    real, lines = {}, []
    for way in ("work-conserving", "timeout until answer"):
        for load in sorted({*REAL_LOADS}.intersection(loads)):
            pairs = []
            for seed in range(options.repeats):
                measured = uvloop.run(really(load, options.real_seconds, seed, **WAYS[way]))
                predicted = simulated(
                    "Poisson", load, options.real_seconds + WARMUP_S, seed, contexts=2, **WAYS[way]
                )
                pairs.append({"measured": measured, "predicted": predicted})
            real.setdefault(way, {})[str(load)] = pairs
            both = [middle([pair[who] for pair in pairs]) for who in ("measured", "predicted")]
            p99 = [middle([pair[who] for pair in pairs], "p99_ms") for who in ("measured", "predicted")]
            lines.append(
                (f"{way}, {load:.0%}", *(f"{value:.2f}" for value in both), *(f"{ms:.1f}" for ms in p99))
            )
    show(
        "Really sent to the host device",
        ("", "in time, measured", "predicted", "p99 ms, measured", "predicted"),
        lines,
        f"medians of {options.repeats} runs of {options.real_seconds:g} s;",
    )
    save(options.json, __doc__, {"simulated": found, "real": real, "target_ms": TARGET_MS})


if __name__ == "__main__":
    main()
