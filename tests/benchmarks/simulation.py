"""How many scheduler events a second does the simulator get through? And worlds with faults?

An event is something that happens to a scheduler: a request comes, leaves or is answered, a batch is launched
or ends. What it is merely asked (for the next batch, for when to look again) is not counted.
"""

from asynctrt._util import clock
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
from tests.simulation.arrivals import at_random, in_bursts, requests
from tests.simulation.check import Failure, check_seed
from tests.simulation.latency import linear
from tests.simulation.load import simulate

BATCHES = (1, 1.0), (64, 4.0)


def load(times_ns, seconds, options=None, *, timeout_s=None, interference=0.0):
    """Return a function that simulates a load and says how fast that was."""
    sent = list(requests(times_ns, timeout_s=timeout_s))
    latency = linear(*BATCHES, lanes=2, interference=interference)

    def run():
        found = simulate(sent, latency, options, seconds=seconds)
        return {
            "events_per_s": found.events / found.real_s,
            "events": found.events,
            "requests": found.requests,
            "mean_rows": found.mean_rows,
            "took_s": found.real_s,
        }

    return run


def check(seeds):
    """Run worlds with faults, every rule checked at every step."""
    started_ns, events = clock.now_ns(), 0
    for seed in range(seeds):
        found = check_seed(seed)
        assert not isinstance(found, Failure), "\n".join(found.lines())
        events += found.events
    took_s = (clock.now_ns() - started_ns) / 1e9
    return {
        "events_per_s": events / took_s,
        "events": events,
        "requests": 0,
        "mean_rows": 0.0,
        "took_s": took_s,
    }


def main():
    options = arguments(__doc__, seconds=10.0, repeats=5, seeds=200)
    seconds = options.seconds
    gpu = {"arenas": 4, "contexts": 8}
    cases = {
        "poisson, half of capacity": load(at_random(15_000, seconds, 0), seconds),
        "poisson, 80%": load(at_random(25_000, seconds, 0), seconds),
        "bursts": load(in_bursts(15_000, seconds, 0, period_s=seconds / 10), seconds),
        "lone requests": load(at_random(500, 10 * seconds, 0), 10 * seconds),
        "4 arenas that hinder each other, deadlines": load(
            at_random(8_000, seconds, 0), seconds, gpu, timeout_s=0.05, interference=0.3
        ),
        f"{options.seeds} worlds with faults and all rules": lambda: check(options.seeds),
    }
    found = in_turn(cases, options.repeats, "simulating")
    lines = [
        (
            name,
            f"{median(runs, 'events_per_s'):,.0f}",
            spread(runs, "events_per_s"),
            f"{median(runs, 'events'):,.0f}",
            f"{median(runs, 'mean_rows'):.1f}",
            f"{median(runs, 'took_s'):.2f}",
        )
        for name, runs in found.items()
    ]
    show(
        "Events that a scheduler sees, a second",
        ("", "events/s", "least to most", "events", "mean batch", "s"),
        lines,
    )
    save(options.json, "the simulator's speed", found)


if __name__ == "__main__":
    main()
