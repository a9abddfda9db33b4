"""How many scheduler events a second does the simulator get through? And a fleet, and worlds with faults?

An event is something that happens to a scheduler: a request comes, leaves or is answered, a batch is launched
or ends. What it is merely asked (for the next batch, for when to look again) is not counted.
"""

from asynctrt import clock
from asynctrt.options import Options
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
from tests.simulation.check import Failure, check_seed
from tests.simulation.latency import parse_latency
from tests.simulation.plan import make_plan, simulate_plan
from tests.simulation.settings import SimulationSettings

LATENCY = {"batches": [{"rows": 1, "compute_ms": 1.0}, {"rows": 64, "compute_ms": 4.0}], "lanes": 2}
DEVICES = 1000


def plan(arrivals, seconds, options=None, **settings):
    """Return a function that simulates a load and says how fast that was."""
    made = make_plan(
        arrivals,
        parse_latency(LATENCY, "the table"),
        SimulationSettings(seconds=seconds, **settings),
        Options(**options or {}),
        seed=0,
    )

    def run():
        found, _ = simulate_plan(made)
        return {
            "events_per_s": found.events / found.took_s,
            "events": found.events,
            "requests": found.requests,
            "mean_rows": found.mean_rows,
            "took_s": found.took_s,
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
    gpu = {"arenas": 4, "contexts": 8, "timeout": 0.05}
    cases = {
        "poisson, half of capacity": plan("poisson:15000", seconds),
        "poisson, 80%": plan("poisson:25000", seconds),
        "bursts": plan("bursts:15000", seconds),
        "lone requests": plan("poisson:500", 10 * seconds),
        "4 arenas that hinder each other, deadlines": plan("poisson:8000", seconds, gpu, interference=0.3),
        f"{DEVICES} devices, the least loaded": plan("poisson:1000000", seconds / 20, devices=DEVICES),
        f"{DEVICES} devices, in turn": plan(
            "poisson:1000000", seconds / 20, devices=DEVICES, balance="round-robin"
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
