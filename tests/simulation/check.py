"""Runs worlds with faults from seeds, and shrinks those in which a rule of the scheduler is broken."""

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from asynctrt.errors import DeviceLostError, EngineClosedError, InternalError
from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from asynctrt.scheduling.shares import DeviceShares
from tests.simulation.arrivals import Arrival
from tests.simulation.device import VirtualDevice
from tests.simulation.engine import VirtualEngine
from tests.simulation.rules import Limits, Rules
from tests.simulation.scenario import DefectiveProfiles, Disturbance, Scenario, row_nbytes, scenario_of
from tests.simulation.timeline import Timeline

STEPS_MAX: Final = 50_000
"""Things that may happen in one small world before it counts as one that never ends."""
SHRINK_RUNS_MAX: Final = 600
"""Worlds that are tried to find a smaller one."""


@dataclass(slots=True)
class Outcome:
    """What happened in a world in which every rule held."""

    events: int = 0
    ends: Counter[State] = field(default_factory=Counter)
    reasons: Counter[Reason] = field(default_factory=Counter)
    refusals: int = 0
    rejections: int = 0
    bisections: int = 0
    displacements: int = 0
    foreseen: int = 0
    quarantined: int = 0
    padded: int = 0
    lost: int = 0
    ended_ns: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed in whose world a rule was broken."""

    seed: int
    broken: str
    """The rule, in words."""
    scenario: Scenario
    """The smallest world that was found in which a rule is broken, too."""
    broken_there: str
    requests: int
    """How many requests the world of the seed has."""
    log: tuple[str, ...]
    """The last things that happened in the smallest world."""

    @property
    def command(self) -> str:
        """The command that repeats it."""
        return f"python -m tests.simulation.check {self.seed}"

    def lines(self) -> list[str]:
        """Return all of it in words."""
        return [
            f"seed {self.seed}: {self.broken}",
            f"repeat it with: {self.command}",
            f"shrunk from {self.requests} requests to {len(self.scenario.requests)}: {self.broken_there}",
            *(f"  {line}" for line in self.scenario.described()),
            "the last that happened:",
            *(f"  {line}" for line in self.log),
        ]


class World:
    """One scenario with its engines, on one device."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        rng = random.Random(scenario.seed ^ 0x5EED)
        device = VirtualDevice(
            self.timeline, scenario.latency(), scenario.arenas, rng, change_ns=scenario.policy().change_ns
        )
        self._users = [0] * scenario.arenas
        self._submitted = [0] * scenario.engines
        self.engines: list[VirtualEngine] = []
        self.rules: list[Rules] = []
        self._shares = DeviceShares()
        for number in range(scenario.engines):
            self._add_engine(number, device, rng)

    def _add_engine(self, number: int, device: VirtualDevice, rng: random.Random) -> None:
        scenario = self.scenario
        profiles = DefectiveProfiles(rng, scenario.rows_max, scenario.defect_share)
        policy = scenario.policy()
        rows_fixed = scenario.rows_max if scenario.rows_fixed else None
        in_flight_max = min(scenario.in_flight_max, scenario.contexts)
        scheduler = Scheduler(
            policy=policy,
            shapes=Shapes(
                rows_max=scenario.rows_max,
                rows_fixed=rows_fixed,
                profiles=profiles if scenario.has_profiles else None,
                fills_batches=scenario.is_alone,
                nbytes_max=scenario.batch_nbytes_max,
                row_nbytes=row_nbytes if scenario.batch_nbytes_max else None,
            ),
            queue_rows_max=scenario.queue_rows_max,
            priorities=scenario.priorities,
            contexts=scenario.contexts,
            arenas=scenario.arenas,
            in_flight_max=in_flight_max,
            arena_users=self._users if scenario.arenas else None,
            times_all=scenario.times_all,
        )
        rules = Rules(
            scheduler,
            Limits(
                policy=policy,
                queue_rows_max=scenario.queue_rows_max,
                contexts=scenario.contexts,
                arenas=scenario.arenas,
                in_flight_max=in_flight_max,
                rows_fixed=rows_fixed,
                limit_of=scenario.limit,
                profile_of=profiles.right_profile if scenario.has_profiles else None,
                is_calm=scenario.is_calm,
                batch_ns=scenario.latency().cost((), scenario.rows_max).total_ns,
                times_all=scenario.times_all,
                keeps_promises=scenario.keeps_promises,
                users=self._users,
                others_have_work=partial(self._others_have_work, number),
            ),
        )
        engine = VirtualEngine(
            self.timeline,
            scheduler,
            device,
            rules,
            has_arenas=scenario.arenas > 0,
            batch_timeout_ns=scenario.batch_timeout_ns,
            faults={
                fault.batch: (fault.kind, fault.much) for fault in scenario.faults if fault.engine == number
            },
            group=number,
        )
        if scenario.weights:
            share = self._shares.join(
                scenario.weights[number],
                width=scenario.concurrency,
                overlaps=scenario.is_pipelined,
                wake=engine.pump_soon,
            )
            scheduler.divide(share)
        engine.on_lost = self._lose
        engine.on_arena_lost = self._avoid
        self.engines.append(engine)
        self.rules.append(rules)

    def run(self) -> Outcome:
        """Let everything happen, until nothing is left to happen.

        :raises InternalError: when a rule is broken.
        """
        timeline, scenario = self.timeline, self.scenario
        for request in scenario.requests:
            timeline.at(request[1].due_ns, self._arrive, request)
        for item in scenario.disturbances:
            timeline.at(item.at_ns, self._disturb, item)
        steps = 0
        while timeline.entries:
            timeline.run_next()
            steps += 1
            self._check_users()
            if steps > STEPS_MAX:
                raise InternalError("the world never comes to rest: it is woken again and again")
        return self._end()

    def _arrive(self, request: tuple[int, Arrival]) -> None:
        if not self.timeline.is_late(self._arrive, request):
            engine, arrival = request
            self._submitted[engine] += 1
            self.engines[engine].submit(arrival)

    def _disturb(self, what: Disturbance) -> None:
        if what.kind == "lost":
            self._lose(DeviceLostError("the device was lost"))
        elif what.kind == "stall":
            self.timeline.stalled_until_ns = self.timeline.now_ns + what.much_ns
        else:
            for engine in self.engines:
                engine.offset_ns += what.much_ns
                engine.pump_soon()

    def _lose(self, why: DeviceLostError) -> None:
        for engine in self.engines:
            engine.lose(why)

    def _avoid(self, arena: int) -> None:
        for engine in self.engines:
            engine.avoid(arena)

    def _others_have_work(self, number: int) -> bool:
        return any(
            not engine.scheduler.is_idle for engine in self.engines if engine is not self.engines[number]
        )

    def _check_users(self) -> None:
        """Check that the batches in each arena are counted over all engines."""
        if self._users:
            own = [0] * len(self._users)
            for rules in self.rules:
                for batch in rules.in_flight.values():
                    own[batch.arena or 0] += 1
            if own != self._users:
                raise InternalError(f"the users of arenas are counted as {self._users}, instead of {own}")

    def _end(self) -> Outcome:
        outcome = Outcome(ended_ns=self.timeline.now_ns)
        self._check_users()
        if self._shares.in_flight:
            raise InternalError(f"{self._shares.in_flight} batches are charged as if they were in flight")
        for engine, rules, submitted in zip(self.engines, self.rules, self._submitted, strict=True):
            rules.end(submitted)
            outcome.events += engine.events
            outcome.ends += rules.ends
            outcome.reasons += rules.reasons
            outcome.refusals += rules.refusals
            outcome.rejections += rules.rejections
            outcome.bisections += rules.bisections
            outcome.displacements += rules.displacements
            outcome.foreseen += rules.foreseen
            outcome.quarantined += len(rules.quarantined)
            outcome.padded += engine.scheduler.snapshot().counters.rows_padded
            outcome.lost += engine.lost is not None
            closed = EngineClosedError("closed")
            if engine.scheduler.close(closed):
                raise InternalError("an engine that was idle had something in its queue")
            try:
                engine.scheduler.queue.submit(Request(1, BatchKey(), 0, self.timeline.now_ns))
            except EngineClosedError:
                continue
            raise InternalError("a closed engine took a request")
        return outcome


def broken_by(scenario: Scenario) -> tuple[str, World] | None:
    """Return the rule that is broken in a world, in words, and the world as it is then; ``None``: none is."""
    world = World(scenario)
    try:
        world.run()
    except InternalError as error:
        return str(error), world
    except Exception as error:  # The scheduler must not raise anything else either.
        return f"{type(error).__name__}: {error}", world
    return None


def check_seed(seed: int) -> Outcome | Failure:
    """Run the world of a seed. If a rule is broken there, look for a smaller world in which one is, too."""
    scenario = scenario_of(seed)
    world = World(scenario)
    try:
        return world.run()
    except InternalError as error:
        broken = str(error)
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    small = shrink(scenario)
    found = broken_by(small)
    there, world = found if found is not None else (broken, world)
    log = tuple(line for rules in world.rules for line in rules.log)
    return Failure(seed, broken, small, there, len(scenario.requests), log)


def shrink(scenario: Scenario, runs_max: int = SHRINK_RUNS_MAX) -> Scenario:
    """Return a smaller world in which a rule is broken, too: fewer requests and faults."""
    runs = 0

    def fails(candidate: Scenario) -> bool:
        nonlocal runs
        runs += 1
        return runs <= runs_max and broken_by(candidate) is not None

    best, before = scenario, None
    while best != before and runs < runs_max:
        before = best
        for name in ("requests", "faults", "disturbances"):
            best = _fewer(best, name, fails)
    return best


def _fewer(best: Scenario, name: str, fails: Callable[[Scenario], bool]) -> Scenario:
    """Leave out parts of a world: halves first, then smaller parts, down to one."""
    length = len(getattr(best, name))
    while length:
        at = 0
        while at < len(getattr(best, name)):
            parts = getattr(best, name)
            candidate = _with(best, name, parts[:at] + parts[at + length :])
            if fails(candidate):
                best = candidate
            else:
                at += length
        length //= 2
    return best


def _with(scenario: Scenario, name: str, value: Any) -> Scenario:
    return dataclasses.replace(scenario, **{name: value})


def check_seeds(seeds: Iterable[int], advance: Callable[[Outcome | Failure], bool]) -> Sequence[Failure]:
    """Check seed after seed until ``advance``, which is told of each, returns False; return the failures."""
    failures: list[Failure] = []
    for seed in seeds:
        found = check_seed(seed)
        if isinstance(found, Failure):
            failures.append(found)
        if not advance(found):
            break
    return failures


def main(first: str = "0", count: str = "1") -> bool:
    """Check the worlds of seeds, show those in which a rule is broken, and return whether there are any."""
    failures = check_seeds(range(int(first), int(first) + int(count)), lambda _: True)
    for failure in failures:
        print(*failure.lines(), sep="\n")
    print(f"{int(count):,} worlds from seed {first} on: {len(failures)} broke a rule")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
