"""The choice of sizes to pad to, told batches whose times are made up."""

import logging
import random
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.options import Options
from asynctrt.runtime.pad_sizes import Padding
from asynctrt.runtime.padding import PaddedSource
from asynctrt.runtime.sizes import FIRST_MAX, OPENED_MAX, POINTS_MAX, SizeChooser
from asynctrt.runtime.staging import RowSource, Slab, StagingBuffers, lay_out
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.sizes import LOOK_FIRST
from asynctrt.tensors import BatchRecord, TensorSpec
from tests.runtime.support import make_batch, make_request

IDS = TensorSpec("ids", "uint8", ("length",))
IMAGE = TensorSpec("image", "uint8", ("height", "width"))


class World:
    """Batches of one model, each of 8 requests that are padded alike, and what they take."""

    def __init__(self, spec=IDS, *, batch_ns, unit_ns, opening_ns=0, contexts=1, pad="auto"):
        self.padding = Padding.of("model", [spec], (), Options(pad=pad))
        self.chooser = SizeChooser("model", self.padding, contexts, self.call_soon)
        self.spec, self.takes = spec, (batch_ns, unit_ns, opening_ns)
        self.opened = set()
        self.waiting = defaultdict(list)

    def call_soon(self, call, *given):
        """Call at once, as if the loop had nothing else to do."""
        call(*given)

    def come(self, *dims):
        """Let a request of one row come; a batch of its size is answered when it is full."""
        symbols = dict(zip(self.spec.dims, dims, strict=True))
        key = self.padding.key_of(symbols)
        waiting = self.waiting[key]
        waiting.append(make_request(np.zeros((1, *dims), np.uint8), key=key))
        if len(waiting) == 8:
            del self.waiting[key]
            self.chooser.answered(self.flight(key, waiting))

    def flight(self, key, requests, source=PaddedSource, *, is_timed=True):
        batch = make_batch(*requests, key=key, is_timed=is_timed)
        layout = lay_out([self.spec], (), dict(key.shape), 8)
        slab = Slab(layout, StagingBuffers(HostDevice(), layout.nbytes))
        batch_ns, unit_ns, opening_ns = self.takes
        record = BatchRecord(batch.rows, 0)
        record.copy_in_ns, record.copy_out_ns = batch_ns // 2, batch_ns // 2
        record.compute_ns = int(unit_ns * batch.rows * np.prod([size for _, size in key.shape]))
        record.compute_ns += opening_ns * (key.shape not in self.opened)
        self.opened.add(key.shape)
        more = () if source is RowSource else (self.padding,)
        return SimpleNamespace(batch=batch, record=record, source=source(batch, slab, *more))


def texts(count, seed=0):
    rng = random.Random(seed)
    return [min(max(int(rng.lognormvariate(3, 0.9)), 1), 256) for _ in range(count)]


def choice(world, dims=("length",)):
    return world.padding.chosen[dims]


def test_sizes_follow_from_what_batches_take(caplog):
    few, many = World(batch_ns=10_000_000, unit_ns=100), World(batch_ns=1_000, unit_ns=10_000)
    with caplog.at_level(logging.INFO, "asynctrt"):
        for world in (few, many):
            for length in texts(4 * LOOK_FIRST):
                world.come(length)
            assert world.padding.changes == choice(world).changes > 0
    assert len(choice(few).chosen) <= 2 < 8 < len(choice(many).chosen)
    assert len(caplog.messages) == few.padding.changes + many.padding.changes
    assert "10 ms" in choice(few).reason


def test_a_choice_that_turns_out_wrong_is_taken_back():
    """Padding seemed to cost nothing, and from then on there is one size alone to learn from."""
    world = World(batch_ns=10_000_000, unit_ns=0)
    lengths = iter(texts(40 * LOOK_FIRST))
    while not choice(world).chosen:
        world.come(next(lengths))
    assert len(choice(world).chosen) == 1
    world.takes = 100_000, 10_000, 0
    for length in lengths:
        world.come(length)
    assert len(choice(world).chosen) > 4


def test_the_first_runs_of_shapes_are_counted_for_each_context():
    free, dear = World(batch_ns=20_000, unit_ns=1_000), None
    for length in texts(4 * LOOK_FIRST):
        free.come(length)
    assert choice(free).chosen
    for contexts, opens in ((1, True), (1000, False)):
        dear = World(batch_ns=20_000, unit_ns=1_000, opening_ns=100_000, contexts=contexts)
        for length in texts(4 * LOOK_FIRST):
            dear.come(length)
        assert bool(choice(dear).chosen) is opens


def test_each_dimension_is_chosen_with_the_others_as_they_are():
    """A row of an image is as much to compute as it is high, times how wide they are."""
    world = World(IMAGE, batch_ns=100_000, unit_ns=10)
    rng = random.Random(0)
    for _ in range(20 * LOOK_FIRST):
        world.come(rng.randrange(70, 90), rng.randrange(300, 400))
    height, width = choice(world, ("height",)), choice(world, ("width",))
    assert height.chosen
    assert height.chosen[-1] <= 92 < 288 < width.chosen[0]
    assert width.chosen[-1] <= 400


def test_what_is_not_padded_says_nothing():
    world = World(batch_ns=1, unit_ns=1)
    request = make_request(np.zeros((1, 5), np.uint8))
    for _ in range(2 * LOOK_FIRST):
        world.chooser.answered(world.flight(BatchKey((("length", 5),)), [request], RowSource))
    assert not choice(world).is_due
    assert choice(world)._seen == {}


def test_requests_of_untimed_batches_and_those_that_were_refused():
    world = World(batch_ns=1, unit_ns=1)
    key = BatchKey((("length", 8),))
    flight = world.flight(key, [make_request(np.zeros((3, 5), np.uint8)) for _ in range(2)], is_timed=False)
    flight.source.fits[0] = None
    world.chooser.answered(flight)
    assert choice(world)._seen == {5: [1.0, 3.0]}
    assert list(world.chooser._times.measured(9)) == []


def test_a_choice_is_made_in_many_parts_and_batches_may_be_answered_in_between(monkeypatch):
    world = World(batch_ns=20_000, unit_ns=1_000)
    rounds = deque()
    monkeypatch.setattr(world, "call_soon", lambda *call: rounds.append(call))
    world.chooser._call_soon = world.call_soon
    lengths = iter(texts(40 * LOOK_FIRST))
    while not rounds:
        world.come(next(lengths))
    parts = 0
    while rounds:
        call, *given = rounds.popleft()
        assert not rounds, "one choice at a time"
        assert not choice(world).chosen
        call(*given)
        parts += 1
        for length in (*(next(lengths) for _ in range(16)), *[2 * parts + 256] * 8):
            world.come(length)  # Some are larger than any before.
    assert parts > 16
    assert choice(world).chosen
    assert choice(world).rounded(300) >= 300


def test_what_batches_take_is_told_from_a_bounded_number_of_them():
    world = World(batch_ns=20_000, unit_ns=1_000)
    for size in range(POINTS_MAX):
        for rows in (1, 2, 3, 4):
            world.chooser._times.observe((("length", size),), rows, 1)
    points = list(world.chooser._times.measured(POINTS_MAX))
    assert POINTS_MAX / 2 < len(points) <= POINTS_MAX
    assert {rows for _, rows, _, _ in points} == {1, 2, 3, 4}


@pytest.mark.parametrize("pad", ["auto", {"length": "auto:100000"}])
def test_what_is_remembered_is_bounded(pad):
    world = World(batch_ns=1_000, unit_ns=1_000, pad=pad)
    request = make_request(np.zeros((1, 5), np.uint8))
    for size in range(5, 3 * OPENED_MAX):
        world.chooser.answered(world.flight(BatchKey((("length", size),)), [request]))
    assert len(world.chooser._opened) == OPENED_MAX
    assert len(world.chooser._first) == FIRST_MAX
