"""Are the load test's figures true? Targets with known service times, and one that freezes for a second.

The figures are compared with those calculated from the same arrivals and service times (Lindley's recursion
for a queue), and with theory.
"""

import heapq
import math
from collections import deque

import numpy as np
import uvloop

from asynctrt import loadtest
from asynctrt._util import clock
from asynctrt.loadtest.arrivals import LoadProfile, Schedule
from tests.benchmarks.common import arguments, save, show
from tests.loadtest.support import Target

PERCENTILES = ("p50", "p90", "p99", "p99.9")
SEED = 7


class KnownTarget(Target):
    """Answer after given service times, concurrently or one after the other."""

    in_flight_max = 1 << 20

    def __init__(self, services_ns, *, is_queue, freeze_ns=None):
        super().__init__()
        self.kind = "http"  # The generator then polls the clock when a request is near.
        self.services = deque(services_ns.tolist())
        self.is_queue = is_queue
        self.freeze_ns = freeze_ns
        self.first_ns = None
        self.free_ns = 0
        self.heap = []
        self.number = 0
        self.is_scheduled = False

    def start(self, prepared):
        now_ns = clock.now_ns()
        future = self.loop.create_future()
        if self.first_ns is None:  # The first request, which is tried before the run.
            self.first_ns = now_ns
            future.set_result(None)
            return future
        begin_ns = max(now_ns, self.free_ns) if self.is_queue else now_ns
        end_ns = begin_ns + self.services.popleft()
        self.free_ns = end_ns
        if self.freeze_ns is not None:
            # A request that would end during the freeze ends after it.
            start_ns, stop_ns = (self.first_ns + part for part in self.freeze_ns)
            end_ns = stop_ns if start_ns <= end_ns < stop_ns else end_ns
        self.number += 1
        heapq.heappush(self.heap, (end_ns, self.number, future))
        self._wait()
        return future

    def _wait(self):
        # Its own times must be exact, so it never sleeps.
        if self.heap and not self.is_scheduled:
            self.is_scheduled = True
            self.loop.call_soon(self._tick)

    def _tick(self):
        self.is_scheduled = False
        now_ns = clock.now_ns()
        while self.heap and self.heap[0][0] <= now_ns:
            _, _, future = heapq.heappop(self.heap)
            if not future.done():
                future.set_result(None)
        self._wait()


def due_ns(rate, seconds):
    """Return the arrivals that the run will have."""
    profile = LoadProfile.parse(f"{rate:f}", seconds)
    schedule = Schedule("poisson", profile, 1, SEED)
    return np.concatenate([block.due_ns for block in schedule.blocks()])


def on_paper(due, services, *, is_queue):
    """Calculate percentiles in ms from the same arrivals and service times."""
    if is_queue:
        free, sojourn = 0, np.empty(len(due))
        for number, (due_one, service) in enumerate(zip(due.tolist(), services.tolist(), strict=True)):
            free = max(due_one, free) + service
            sojourn[number] = free - due_one
    else:
        sojourn = services.astype(float)
    return {
        name: np.percentile(sojourn, float(name[1:]), method="inverted_cdf") / 1e6 for name in PERCENTILES
    }


async def compare(name, rate, seconds, mean_ms, *, is_exponential, is_queue):
    due = due_ns(rate, seconds)
    rng = np.random.default_rng(SEED)
    services = np.full(len(due), mean_ms * 1e6)
    if is_exponential:
        services = rng.exponential(mean_ms * 1e6, len(due))
    services = services.astype(np.int64)
    target = KnownTarget(services, is_queue=is_queue)
    report = await loadtest.run(
        target,
        rate=f"{rate:f}",
        seconds=seconds,
        warmup=0.0,
        seed=SEED,
        samples=1,
        answer_timeout=60.0,
    )
    (run,) = report.runs
    assert run.answered == len(due), (run.answered, len(due), run.errors)
    paper = on_paper(due, services, is_queue=is_queue)
    theory = {}
    if is_exponential:
        mean = 1 / (1 / mean_ms - rate / 1e3) if is_queue else mean_ms
        theory = {name: -mean * math.log(1 - float(name[1:]) / 100) for name in PERCENTILES}
    elif not is_queue:
        theory = dict.fromkeys(PERCENTILES, mean_ms)
    return {
        "name": name,
        "requests": run.answered,
        "measured_ms": {name: run.latency[name] for name in PERCENTILES if name in run.latency},
        "on_paper_ms": paper,
        "theory_ms": theory,
        "lateness_p99_us": run.lateness["p99"] * 1e3,
    }


async def freeze(seconds):
    """Measure 1,000 requests/s of 2 ms, with a freeze of one second in the middle."""
    rate, start = 1000, seconds / 2
    due = due_ns(rate, seconds)
    services = np.full(len(due), 2_000_000)
    window = (int(start * 1e9), int((start + 1) * 1e9))
    target = KnownTarget(services, is_queue=False, freeze_ns=window)
    report = await loadtest.run(
        target,
        rate=rate,
        seconds=seconds,
        warmup=0.0,
        seed=SEED,
        samples=1,
    )
    (run,) = report.runs
    # The same by calculation: what would end during the freeze ends after it.
    ends = due + services
    waited = np.where((window[0] <= ends) & (ends < window[1]), window[1], ends) - due
    paper = np.percentile(waited, 99, method="inverted_cdf") / 1e6
    return {
        "requests": run.answered,
        "corrected": run.latency,
        "p99_on_paper_ms": paper,
    }


def main():
    options = arguments(__doc__, seconds=30.0)
    seconds = options.seconds
    cases = [
        ("deterministic 5 ms, side by side", 1000, 5.0, False, False),
        ("exponential 5 ms, side by side", 1000, 5.0, True, False),
        ("deterministic 2 ms, in a queue, 40% busy", 200, 2.0, False, True),
        ("exponential 2 ms, in a queue, half busy", 250, 2.0, True, True),
        ("exponential 2 ms, in a queue, 80% busy", 400, 2.0, True, True),
    ]
    found = []
    for name, rate, mean_ms, is_exponential, is_queue in cases:
        found.append(
            uvloop.run(
                compare(name, rate, seconds, mean_ms, is_exponential=is_exponential, is_queue=is_queue)
            )
        )
    frozen = uvloop.run(freeze(min(seconds, 20.0)))
    lines = []
    for one in found:
        cells = []
        for percentile in PERCENTILES:
            measured, paper = one["measured_ms"].get(percentile), one["on_paper_ms"][percentile]
            cells.append("" if measured is None else f"{measured:.3f} ({measured / paper - 1:+.2%})")
        lines.append((one["name"], f"{one['requests']:,}", *cells))
    show(
        "Measured, in ms, and how far from the same arrivals and service times on paper",
        ("", "requests", *PERCENTILES),
        lines,
    )
    show(
        "A freeze of 1 s, 8 requests on the way at most, in ms",
        ("", "p50", "p99", "max"),
        [("measured", *(f"{frozen['corrected'][percentile]:,.1f}" for percentile in ("p50", "p99", "max")))],
        f"p99 on paper: {frozen['p99_on_paper_ms']:,.0f} ms.",
    )
    save(options.json, "the harness against known service times", {"cases": found, "freeze": frozen})


if __name__ == "__main__":
    main()
