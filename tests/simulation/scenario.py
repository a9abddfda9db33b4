"""A small world with faults: all of it follows from a seed, and is written down so that it can be shrunk."""

import dataclasses
import random
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import PATIENCE_NS, Captured, Policy
from tests.simulation.arrivals import Arrival
from tests.simulation.engine import FAULTS
from tests.simulation.latency import CostTable, Entry, LatencyModel
from tests.simulation.rules import ModelDefectError

MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to one batch, known by its number."""

    engine: int
    batch: int
    kind: str
    much: float = 1.0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The loop stands still (``stall``), the clock leaps ahead (``jump``), or the device is ``lost``."""

    at_ns: int
    kind: str
    much_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that one world is made of. The defaults are the simplest."""

    seed: int
    requests: tuple[tuple[int, Arrival], ...]
    """Each with the number of its engine."""
    faults: tuple[Fault, ...] = ()
    disturbances: tuple[Disturbance, ...] = ()
    engines: int = 1
    """Engines that share the device and its arenas."""
    weights: tuple[float, ...] = ()
    """The weight of each by which they divide the device, if they do."""
    rows_max: int = 8
    contexts: int = 2
    arenas: int = 0
    in_flight_max: int = 2
    concurrency: int = 1
    priorities: int = 3
    queue_rows_max: int = 1024
    delay_ns: int = 0
    is_parallel: bool = False
    is_pipelined: bool = False
    is_alone: bool = False
    answers_in_time: bool = False
    patience_ns: int = PATIENCE_NS
    times_all: bool = False
    captured: tuple[int, ...] = ()
    rows_fixed: bool = False
    batch_nbytes_max: int = 0
    """Bytes of a batch, if they are limited; a row of the shape ``("n", k)`` has k + 1."""
    has_profiles: bool = False
    defect_share: float = 0.0
    """How often the model raises when it is asked about its profiles."""
    base_us: int = 500
    row_us: int = 50
    copy_us: int = 0
    """To compute any batch; for each row; to copy each row in, and half of that out."""
    change_us: int = 0
    """How much longer a batch takes on a context that ran another shape or size before."""
    lanes: int = 1
    interference: float = 0.0
    jitter: float = 0.0
    batch_timeout_ns: int = 1000 * MS

    @property
    def is_calm(self) -> bool:
        """Whether every batch takes exactly what others like it took."""
        # Another engine's batches are in no estimate, nor is the wait for others that are copied out.
        return self._is_exact and not self.copy_us

    @property
    def _is_exact(self) -> bool:
        return self.engines == 1 and not (
            self.faults or self.disturbances or self.jitter or self.interference or self.change_us
        )

    @property
    def keeps_promises(self) -> bool:
        """Return whether the scheduler can know whatever a batch takes and waits for on the device."""
        if not self._is_exact or self.copy_us * self.rows_max > self.base_us:
            return False  # What takes longer to copy than to compute waits for other copies.
        if self.is_pipelined:
            # With more lanes it learns first how many of them pay.
            return self.policy().lanes_max == 1
        return self.arenas > 0 or min(self.concurrency, self.in_flight_max) <= self.lanes

    def limit(self, shape: Hashable) -> int:
        """Return the rows that a batch of a shape holds."""
        if not self.batch_nbytes_max:
            return self.rows_max
        return max(1, min(self.rows_max, self.batch_nbytes_max // row_nbytes(shape)))

    def latency(self) -> LatencyModel:
        """Return what batches cost."""
        sizes = [1, self.rows_max] if self.rows_max > 1 else [1]
        entries = [
            Entry(
                rows,
                self.copy_us * rows / 1e3,
                (self.base_us + self.row_us * rows) / 1e3,
                self.copy_us * rows / 2e3,
            )
            for rows in sizes
        ]
        return LatencyModel(CostTable(entries), {}, self.lanes, self.interference, self.jitter)

    def policy(self) -> Policy:
        """Return the rules of its engines."""
        captured = Captured(self.captured, direct_ns=40_000, graph_ns=5_000) if self.captured else Captured()
        lanes_max = min(self.arenas or self.contexts, self.in_flight_max) if self.is_pipelined else 1
        return Policy(
            rows_max=self.rows_max,
            delay_ns_max=self.delay_ns,
            concurrency=self.concurrency + lanes_max - 1,
            is_parallel=self.is_parallel and not self.is_pipelined,
            captured=captured,
            is_alone=self.is_alone,
            is_pipelined=self.is_pipelined,
            lanes=self.latency().lanes_that_pay(self.rows_max, lanes_max),
            lanes_max=lanes_max,
            answers_in_time=self.answers_in_time,
            patience_ns=self.patience_ns,
            change_ns=self.change_us * 1000,
        )

    def described(self) -> list[str]:
        """Return the world in words, a line for each part of it that is not as simple as can be."""
        plain = Scenario(seed=self.seed, requests=())
        parts = ("requests", "faults", "disturbances", "seed")
        settings = [
            f"{item.name}={getattr(self, item.name)}"
            for item in dataclasses.fields(self)
            if item.name not in parts and getattr(self, item.name) != getattr(plain, item.name)
        ]
        lines = [", ".join(settings)] if settings else []
        lines += [_request_in_words(engine, arrival, self.engines) for engine, arrival in self.requests]
        lines += [
            f"batch {fault.batch}{_of(fault.engine, self.engines)}: {fault.kind}"
            f"{f', {fault.much:g} times' if fault.kind == 'slow' else ''}"
            for fault in self.faults
        ]
        for item in self.disturbances:
            much = f" by {item.much_ns / MS:g} ms" if item.much_ns else ""
            lines.append(f"{item.at_ns / MS:12.3f} ms  {item.kind}{much}")
        return lines


def row_nbytes(shape: Hashable) -> int:
    """Return the bytes of one row of a shape."""
    return 1 + sum(size for _, size in shape) if isinstance(shape, tuple) else 1


def _of(engine: int, engines: int) -> str:
    return f" of engine {engine}" if engines > 1 else ""


def _request_in_words(engine: int, arrival: Arrival, engines: int) -> str:
    words = [f"{arrival.due_ns / MS:12.3f} ms  {arrival.rows} row{'s' * (arrival.rows > 1)}"]
    if arrival.key != BatchKey():
        words.append(f"of {arrival.key!r}")
    if arrival.priority:
        words.append(f"priority {arrival.priority}")
    if arrival.timeout_ns is not None:
        words.append(f"timeout {arrival.timeout_ns / MS:g} ms")
    if arrival.patience_ns is not None:
        words.append(f"cancelled after {arrival.patience_ns / MS:g} ms")
    return ", ".join(words) + _of(engine, engines)


class DefectiveProfiles:
    """The profiles of a simulated model: small batches and large ones, and a defect now and then."""

    def __init__(self, rng: random.Random, rows_max: int, defect_share: float) -> None:
        self._random = rng
        self._rows_max = rows_max
        self._defect_share = defect_share

    def row_ranges(self, shape: Hashable) -> list[tuple[int, int]]:
        """Return two ranges: any batch, and one from half of the rows on."""
        self._fail_now_and_then()
        return [(1, self._rows_max), (max(self._rows_max // 2, 1), self._rows_max)]

    def profile_of(self, shape: Hashable, rows: int) -> int:
        """Return 1 for batches of more than half of the rows."""
        self._fail_now_and_then()
        return self.right_profile(rows)

    def right_profile(self, rows: int) -> int:
        """Return what :meth:`profile_of` does, without the defects."""
        return int(2 * rows > self._rows_max)

    def _fail_now_and_then(self) -> None:
        if self._defect_share and self._random.random() < self._defect_share:
            raise ModelDefectError


def scenario_of(seed: int) -> Scenario:
    """Return the world of a seed. Every kind of world comes up within some dozens of seeds."""
    rng = random.Random(seed)
    choose = rng.choice
    rows_max = choose([1, 2, 8, 8, 64])
    contexts = rng.randint(1, 6)
    kind = choose(["plain", "plain", "plain", "captured", "fixed", "profiles", "alone"])
    sizes = sorted({rng.randint(1, rows_max), rows_max}) if kind == "captured" else []
    engines = choose([1, 1, 1, 2])
    arenas = choose([0, contexts, rng.randint(1, contexts)])
    base = Scenario(
        seed=seed,
        requests=(),
        engines=engines,
        rows_max=rows_max,
        contexts=contexts,
        arenas=arenas,
        in_flight_max=choose([contexts, rng.randint(1, contexts)]),
        concurrency=choose([1, 2, 4]),
        priorities=choose([1, 3]),
        queue_rows_max=choose([rows_max, 4 * rows_max, 1024]),
        delay_ns=choose([0, 0, MS // 2, 5 * MS]),
        is_parallel=choose([False, False, True]),
        # That leaves the numbers drawn for the others as they are.
        is_pipelined=seed % 3 == 2,
        answers_in_time=seed % 4 == 1,
        is_alone=kind == "alone",
        times_all=choose([False, True]),
        captured=tuple(sizes),
        rows_fixed=kind == "fixed",
        has_profiles=kind == "profiles",
        defect_share=choose([0.0, 0.1]) if kind == "profiles" else 0.0,
        base_us=choose([50, 500, 5000]),
        row_us=choose([1, 50]),
        copy_us=choose([0, 5, 40]),
        lanes=choose([1, 2, 4]),
        interference=choose([0.0, 0.0, 0.5, 1.0]),
        jitter=choose([0.0, 0.0, 0.3]),
    )
    if kind in ("plain", "alone") and seed % 4 == 1:
        # As above: nothing is drawn for it.
        base = dataclasses.replace(base, batch_nbytes_max=2 * rows_max)
    if kind == "plain" and seed % 7 == 3:
        base = dataclasses.replace(base, change_us=(2 + seed % 40) * base.base_us)
    requests = _requests(rng, base)
    if engines > 1 and seed % 2:
        base = dataclasses.replace(base, weights=((1.0, 1.0), (3.0, 1.0), (0.01, 20.0))[seed % 3])
    if is_promised := seed % 12 == 7:
        base, requests = _promised(rng, base, is_pipelined=seed % 24 == 7)
    if seed % 5 > 2:
        patience_ns = rng.randrange(1, 20) * base.latency().cost((), rows_max).total_ns
        base = dataclasses.replace(base, patience_ns=patience_ns)
    last_ns = requests[-1][1].due_ns if requests else 0
    faults: list[Fault] = []
    disturbances: list[Disturbance] = []
    if rng.random() < 0.7 and not is_promised:
        batches = partial(rng.randint, 1, max(2, len(requests) // 3))
        for _ in range(rng.randint(1, 6)):
            # A lost device ends the world, so that is rare.
            fault = choose([*FAULTS[:-1] * 4, "lost"])
            much = float(rng.randrange(8)) if fault == "row" else choose([3.0, 30.0, 3000.0])
            faults.append(Fault(rng.randrange(engines), batches(), fault, much))
        for _ in range(choose([0, 0, 1, 2])):
            what = choose(["stall", "jump", "jump", "lost"] if rng.random() < 0.1 else ["stall", "jump"])
            much_ns = 0 if what == "lost" else choose([5, 100, 3000]) * MS
            disturbances.append(Disturbance(rng.randrange(last_ns + 1), what, much_ns))
    return dataclasses.replace(
        base, requests=tuple(requests), faults=tuple(faults), disturbances=tuple(disturbances)
    )


def _promised(
    rng: random.Random, base: Scenario, *, is_pipelined: bool
) -> tuple[Scenario, list[tuple[int, Arrival]]]:
    """Return a world in which it is soon known what batches take, and all requests have deadlines: what is
    promised by what is known can be held to it."""
    width, base_us = rng.choice([1, 2]), rng.choice([50, 500])
    world = Scenario(
        seed=base.seed,
        requests=(),
        rows_max=4,
        contexts=3,
        arenas=1 if is_pipelined else 0,
        in_flight_max=3,
        concurrency=2 if is_pipelined else width,
        lanes=width,
        is_pipelined=is_pipelined,
        answers_in_time=True,
        times_all=True,
        base_us=base_us,
        row_us=rng.choice([50, 200]),
        copy_us=rng.choice([0, base_us // 5]) if is_pipelined else 0,
    )
    batch_ns = world.latency().cost((), world.rows_max).total_ns
    mean_ns = batch_ns / world.rows_max / rng.choice([0.6, 1.0, 2.0, 4.0])
    now_ns, requests = 0.0, []
    for _ in range(200):
        now_ns += rng.expovariate(1) * mean_ns
        timeout_ns = rng.randrange(batch_ns // 2, 4 * batch_ns)
        requests.append((0, Arrival(int(now_ns), 1, BatchKey(), 0, timeout_ns)))
    return world, requests


def _requests(rng: random.Random, world: Scenario) -> list[tuple[int, Arrival]]:
    """Return the requests of a world, at a rate between idle and more than it can do."""
    choose = rng.choice
    count = choose([30, 60, 120])
    shapes = choose([1, 1, 2, 5])
    rows_mean = choose([1, world.rows_max])
    batch_ns = (world.base_us + world.row_us * world.rows_max) * 1000
    capacity = world.rows_max / batch_ns / ((1 + rows_mean) / 2)
    mean_ns = 1 / (capacity * choose([0.2, 0.8, 1.5, 4.0]))
    pace = choose(["poisson", "bursts", "together", "day"])
    cancel_share = choose([0.0, 0.1, 0.3])
    timeouts: list[int | None] = choose(
        [[None], [None], [None, 2 * batch_ns, 20 * batch_ns], [0, batch_ns // 2, 5 * batch_ns]]
    )
    now_ns = 0.0
    found: list[tuple[int, Arrival]] = []
    for number in range(count):
        factor = 1.0
        if pace == "bursts":
            factor = 0.1 if number // 10 % 2 else 1.9
        elif pace == "day":
            factor = 0.3 + 1.4 * abs(2 * number / count - 1)
        elif pace == "together":
            factor = 0.0 if number % 5 else 5.0
        now_ns += rng.expovariate(1) * mean_ns * factor
        rows = rng.randint(1, rows_mean)
        kind = rng.randrange(shapes)
        shape: Any = () if kind == 0 else (("n", kind),)
        # An engine splits what is larger than a batch.
        rows = min(rows, world.limit(shape))
        key = BatchKey(shape, on_device=rng.random() < 0.1)
        engine = rng.randrange(world.engines)
        patience_ns = int(rng.expovariate(1) * batch_ns) if rng.random() < cancel_share else None
        priority = rng.randrange(world.priorities)
        found.append((engine, Arrival(int(now_ns), rows, key, priority, choose(timeouts), patience_ns)))
    return found
