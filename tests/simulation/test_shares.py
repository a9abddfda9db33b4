"""Engines that divide one device by weight, in virtual time."""

import random
from functools import partial

import numpy as np
import pytest

from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from asynctrt.scheduling.shares import DeviceShares
from tests.simulation.arrivals import Arrival
from tests.simulation.device import VirtualDevice
from tests.simulation.engine import VirtualEngine
from tests.simulation.latency import CostTable, Entry, LatencyModel
from tests.simulation.timeline import Timeline

SECONDS = 1.0
ROWS_MAX = 8
ASKS_AGAIN_NS = 50_000

KINDS = {
    "a GPU that does one after the other": {
        "contexts": 4,
        "lanes": 0,
        "arenas": 4,
        "hinder": 1.0,
        "width": 2,
        "in_turn": True,
    },
    "a GPU that one batch fills": {"contexts": 4, "lanes": 0, "arenas": 4, "hinder": 1.0, "width": 2},
    "one arena for all": {"contexts": 4, "lanes": 0, "arenas": 1, "hinder": 1.0, "width": 2, "shared": 1},
    "four arenas for all": {
        "contexts": 8,
        "lanes": 0,
        "arenas": 4,
        "hinder": 0.0,
        "width": 2,
        "fit": 4,
        "shared": 1,
    },
    "two threads": {"contexts": 4, "lanes": 2, "arenas": 0, "hinder": 0.0, "width": 2},
    "one thread": {"contexts": 2, "lanes": 1, "arenas": 0, "hinder": 0.0, "width": 1},
}


OVERLAP = ("a GPU that one batch fills", "a GPU that does one after the other")
"""Where it is not known what each batch has computed of what computes at once."""

EACH = [pytest.param(kind, marks=() if kind in OVERLAP else pytest.mark.tier2) for kind in KINDS]


class Seen:
    """Notes what one engine's batches computed, and when its callers had answers."""

    def __init__(self, batch_ms):
        self.batch_ms = batch_ms
        self.computed_ms, self.took_ms, self.answers = 0.0, [], 0
        self.again = lambda count: None

    def answered(self, flight, now_ns):
        self.again(len(flight.batch.requests))
        self.computed_ms += self.batch_ms
        self.answers += len(flight.batch.requests)
        self.took_ms += [(now_ns - request.arrival_ns) / 1e6 for request in flight.batch.requests]

    def refused(self, request, error):
        raise AssertionError(f"{request} was refused: {error}")

    def __getattr__(self, name):
        return lambda *args, **kw: None


class World:
    """Engines on one device; each has a weight (or none), batches of a length, and requests a second."""

    def __init__(self, kind, *, faults=None):
        self.kind = KINDS[kind]
        self.faults = faults or {}
        self.timeline = Timeline()
        self.shares = DeviceShares()
        self.engines = []
        self.late_s = {}
        self.contexts = {}
        self.callers = {}
        """How many ask an engine again as soon as they are answered."""
        self.wakes = 0
        self.is_calibrated = True
        """Whether it was measured what batches take, as engines on a GPU do when they are opened."""

    def run(self, *loads):
        """Run engines with such loads, each ``(weight, batch_ms, requests/s)``; return what they did."""
        kind, timeline = self.kind, self.timeline
        seen = [Seen(batch_ms) for _, batch_ms, _ in loads]
        shapes = [BatchKey((("engine", number),)) for number in range(len(loads))]
        tables = {
            str(key.shape): CostTable([Entry(rows, 0.02, batch_ms, 0.02) for rows in (1, ROWS_MAX)])
            for key, (_, batch_ms, _) in zip(shapes, loads, strict=True)
        }
        latency = LatencyModel(
            tables[str(shapes[0].shape)], tables, kind["lanes"] or kind["contexts"], kind["hinder"], 0.02
        )
        arenas = kind["arenas"]
        is_shared = "shared" in kind
        device = VirtualDevice(
            timeline, latency, arenas, random.Random(1), groups=1 if is_shared or not arenas else len(loads)
        )
        if "in_turn" in kind:
            device._lane = lambda flight: device._lanes[0]
        rng = np.random.default_rng(3)
        arrivals = []
        for number, (weight, _, rate) in enumerate(loads):
            engine = self._engine(device, seen[number], number, is_shared=is_shared)
            if self.is_calibrated:
                batch_ns = round(seen[number].batch_ms * 1e6)
                engine.scheduler.times.seed(shapes[number], {1: batch_ns, ROWS_MAX: batch_ns})
            if weight is not None:
                share = self.shares.join(
                    weight,
                    width=kind["width"],
                    overlaps=not kind["lanes"] and not is_shared,
                    wake=partial(self._wake, engine),
                )
                engine.scheduler.divide(share)
            self.engines.append(engine)
            if number in self.callers:
                self._keep_asking(engine, shapes[number], self.callers[number], seen[number])
            due_ns = np.cumsum(rng.exponential(1e9 / rate, int(rate * SECONDS))).astype(np.int64)
            due_ns += int(self.late_s.get(number, 0.0) * 1e9)
            arrivals += [(due, number) for due in due_ns.tolist() if due < SECONDS * 1e9]
        for due_ns, number in sorted(arrivals):
            if due_ns > timeline.now_ns:
                timeline.run_until(due_ns)
            self.engines[number].submit(Arrival(due_ns, 1, shapes[number], 0, None))
        timeline.run_until(int(SECONDS * 1e9))
        return seen

    def drain(self):
        while self.timeline.entries:
            self.timeline.run_next()
        assert all(engine.scheduler.is_idle for engine in self.engines)
        assert self.shares.in_flight == 0

    def _keep_asking(self, engine, shape, callers, seen):
        def ask(count):
            for _ in range(count):
                engine.submit(Arrival(self.timeline.now_ns, 1, shape, 0, None))

        seen.again = lambda count: self.timeline.at(self.timeline.now_ns + ASKS_AGAIN_NS, ask, count)
        seen.again(callers)

    @staticmethod
    def _ran(ran, computed_ns, batch, now_ns, took_ns):
        """Tell the time for which others computed first as well, as a GPU does."""
        begun_ns = max(batch.launched_ns + 40_000, computed_ns.get(batch.lane, 0))
        computed_ns[batch.lane] = now_ns
        ran(batch, now_ns, max(took_ns, now_ns - begun_ns))

    def _wake(self, engine):
        self.wakes += 1
        engine.pump_soon()

    def _engine(self, device, seen, number, *, is_shared):
        kind = self.kind
        contexts = self.contexts.get(number, kind["contexts"])
        arenas, is_pipelined = kind["arenas"], not kind["lanes"]
        lanes_max = arenas if is_pipelined else 1
        scheduler = Scheduler(
            policy=Policy(
                rows_max=ROWS_MAX,
                concurrency=1 + lanes_max if is_pipelined else kind["width"],
                is_pipelined=is_pipelined,
                lanes=device.latency.lanes_that_pay(ROWS_MAX, lanes_max),
                lanes_max=lanes_max,
            ),
            shapes=Shapes(rows_max=ROWS_MAX, profiles=None),
            queue_rows_max=1 << 22,
            priorities=3,
            contexts=contexts,
            arenas=arenas,
            in_flight_max=contexts,
            arena_users=self.__dict__.setdefault("users", [0] * arenas) if is_shared else None,
            times_all=True,
        )
        if "in_turn" in kind:
            scheduler.ran = partial(self._ran, scheduler.ran, {})
        return VirtualEngine(
            self.timeline,
            scheduler,
            device,
            seen,
            has_arenas=arenas > 0,
            batch_timeout_ns=2_000_000_000,
            faults=self.faults.get(number),
            group=number,
        )


def flood(batch_ms, width=1):
    """Requests a second that are more than a device can compute."""
    return 1.5 * width * ROWS_MAX / batch_ms * 1e3


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize(("ours_ms", "theirs_ms"), [(4.0, 4.0), (8.0, 1.0), (1.0, 8.0)])
@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.tier2), 3.0])
def test_two_that_are_flooded_get_time_by_weight(kind, ours_ms, theirs_ms, weight):
    world = World(kind)
    width = KINDS[kind].get("fit", KINDS[kind]["width"])
    ours, theirs = world.run(
        (weight, ours_ms, flood(ours_ms, width)), (1.0, theirs_ms, flood(theirs_ms, width))
    )
    assert ours.computed_ms / theirs.computed_ms == pytest.approx(weight, rel=0.15)


@pytest.mark.parametrize("kind", [kind for kind in EACH if kind.values != ("four arenas for all",)])
@pytest.mark.parametrize(("ours_ms", "theirs_ms"), [(4.0, 4.0), (8.0, 1.0), (1.0, 8.0)])
@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.tier2), 3.0])
def test_callers_whose_requests_all_fit_on_the_device_get_time_by_weight(kind, ours_ms, theirs_ms, weight):
    """Nothing of theirs is queued while the others look for something to launch."""
    world = World(kind)
    world.callers = dict.fromkeys(range(2), KINDS[kind]["contexts"] * ROWS_MAX)
    ours, theirs = world.run((weight, ours_ms, 0.1), (1.0, theirs_ms, 0.1))
    assert ours.computed_ms / theirs.computed_ms == pytest.approx(weight, rel=0.15)
    assert ours.computed_ms + theirs.computed_ms >= 0.97 * 1e3 * SECONDS * KINDS[kind].get("lanes", 1)


@pytest.mark.tier2
@pytest.mark.parametrize("kind", EACH)
def test_three_get_time_by_weight_until_one_has_no_more_to_do(kind):
    world = World(kind)
    width = KINDS[kind].get("fit", KINDS[kind]["width"])
    loads = [(5.0, 2.0, flood(2.0, width)), (2.0, 5.0, flood(5.0, width)), (1.0, 1.0, flood(1.0, width))]
    found = world.run(*loads)
    total = sum(one.computed_ms for one in found)
    shares = [one.computed_ms / total for one in found]
    assert shares == pytest.approx([5 / 8, 2 / 8, 1 / 8], rel=0.15)
    world.drain()


@pytest.mark.parametrize("kind", EACH)
def test_nothing_is_lost_by_dividing(kind):
    """As many batches end as without weights, whoever's they are."""
    width = KINDS[kind].get("fit", KINDS[kind]["width"])
    loads = [(4.0, flood(4.0, width)), (2.0, flood(2.0, width))]
    divided = World(kind).run(*[(weight, *load) for weight, load in zip((3.0, 1.0), loads, strict=True)])
    free = World(kind).run(*[(None, *load) for load in loads])
    # What the lanes of one are worth is learned beside batches of the other.
    least = 0.7 if kind == "four arenas for all" else 0.97
    assert sum(one.computed_ms for one in divided) >= least * sum(one.computed_ms for one in free)


@pytest.mark.parametrize("kind", EACH)
def test_what_one_leaves_the_other_takes(kind):
    width = KINDS[kind].get("fit", KINDS[kind]["width"])
    (alone,) = World(kind).run((None, 4.0, flood(4.0, width)))
    _, ours = World(kind).run((9.0, 4.0, 1.0), (1.0, 4.0, flood(4.0, width)))
    assert ours.computed_ms >= 0.95 * alone.computed_ms


@pytest.mark.parametrize("kind", EACH)
def test_a_flooded_one_does_not_starve_one_that_asks_little(kind):
    width = KINDS[kind].get("fit", KINDS[kind]["width"])
    rate = 0.2 * width * 1e3 / 2.0
    (alone,) = World(kind).run((None, 2.0, rate))
    beside = World(kind).run((1.0, 2.0, rate), (1.0, 6.0, flood(6.0, width)))[0]
    p99_ms = [float(np.percentile(one.took_ms, 99)) for one in (alone, beside)]
    assert beside.answers == pytest.approx(alone.answers, abs=4)
    # It waits for what is on the device, and computes beside what comes next.
    assert p99_ms[1] <= 2 * p99_ms[0] + (8 if "in_turn" in KINDS[kind] else 4) * 6.0


@pytest.mark.parametrize("kind", EACH)
def test_time_is_not_saved_up(kind):
    """Whoever had nothing to do for half of the time gets their part from then on, and no more."""
    width = KINDS[kind].get("fit", KINDS[kind]["width"])
    world = World(kind)
    world.late_s = {0: SECONDS / 2}
    late, steady = world.run((1.0, 4.0, flood(4.0, width)), (1.0, 4.0, flood(4.0, width)))
    assert late.computed_ms / steady.computed_ms == pytest.approx(1 / 3, rel=0.15)


@pytest.mark.parametrize("kind", ["a GPU that one batch fills", "two threads"])
def test_one_whose_batch_hangs_does_not_hold_the_other_up(kind):
    faults = {0: {20: ("hang", 1.0)}}
    world, width = World(kind, faults=faults), KINDS[kind]["lanes"] or 1
    _, ours = world.run((9.0, 4.0, flood(4.0)), (1.0, 4.0, flood(4.0)))
    (alone,) = World(kind).run((None, 4.0, flood(4.0)))
    # The first time that it is held in vain, it is for twice what the other would need to catch up. Where
    # there is another thread, the other one goes on with that.
    assert ours.computed_ms >= (0.4 if width == 1 else 0.05) * alone.computed_ms


@pytest.mark.parametrize("kind", ["a GPU that one batch fills", "two threads"])
def test_one_that_has_too_few_contexts_leaves_the_rest_in_equal_parts(kind):
    """Whoever ended a batch looks first, and would take all that is left."""
    world = World(kind)
    world.contexts = {0: 1}
    rate = flood(4.0, 2) / 3
    _, ours, theirs = world.run((10.0, 4.0, rate), (1.0, 4.0, rate), (1.0, 4.0, rate))
    assert ours.computed_ms == pytest.approx(theirs.computed_ms, rel=0.1)
    charged_ms = [member.charged_ns / 1e6 for member in world.shares.members]
    assert max(charged_ms) - min(charged_ms) < 50, "time is saved up"


@pytest.mark.parametrize("kind", ["a GPU that one batch fills", "two threads"])
def test_many_that_are_flooded_wake_one_another_as_often_as_few(kind):
    world = World(kind)
    found = world.run(*[(1.0, 4.0, flood(4.0, KINDS[kind]["width"]) / 16)] * 16)
    batches = sum(one.computed_ms for one in found) / 4.0
    assert world.wakes <= 2 * batches


@pytest.mark.parametrize("kind", ["a GPU that one batch fills", "two threads"])
def test_batches_that_fail_cost_their_time_as_well(kind):
    world = World(kind, faults={0: dict.fromkeys(range(1, 5000), ("refused", 1.0))})
    width = KINDS[kind]["width"]
    _, ours = world.run((1.0, 4.0, flood(4.0, width)), (1.0, 4.0, flood(4.0, width)))
    (alone,) = World(kind).run((None, 4.0, flood(4.0, width)))
    # It may be more, as what fails is divided into parts, each a batch.
    assert 0.85 < ours.computed_ms / (alone.computed_ms / 2) < 1.5
