"""How many batches compute side by side, measured when an engine opens."""

import asyncio
import logging
import threading
import time

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.runtime import calibration
from asynctrt.runtime.calibration import sizes_to_measure
from asynctrt.runtime.contexts import SLAB_NBYTES_MIN
from asynctrt.tensors import TensorSpec

pytestmark = pytest.mark.anyio
DIMS = (4,)


class Sleeping(ModelBase):
    """Takes a time, in any number of threads at once, and notes what it was given."""

    name = platform = "sleeping"

    def __init__(self, work_ns=1_000_000, dims=DIMS, dtype="float32", **capabilities):
        self.work_ns = work_ns if callable(work_ns) else lambda rows: work_ns
        self.inputs = (TensorSpec("input", np.dtype(dtype), dims),)
        self.outputs = (TensorSpec("output", np.dtype(dtype), dims),)
        self.capabilities = Capabilities(**{"is_capturable": True, **capabilities})
        self.seen, self.arenas = [], []
        self.unfinished_max = 0

    def create_context(self, device):
        return self

    def bind(self, inputs, outputs):
        return SleepingBinding(self, inputs[0], outputs[0])

    def close(self):
        """Do nothing: it holds nothing."""


class SleepingBinding:
    def __init__(self, model, source, target):
        self.model, self.source, self.target = model, source, target

    def enqueue(self, rows, *, profile, stream, arena):
        model = self.model
        model.arenas.append(arena)
        model.unfinished_max = max(model.unfinished_max, len(model.arenas) - len(model.seen))

        def work():
            self.model.seen.append(self.source.view(rows).copy())
            time.sleep(self.model.work_ns(rows) / 1e9)
            self.target.view(rows)[...] = self.source.view(rows)

        stream.launch(work, label=rows)

    def unbound_outputs(self, rows):
        return {}


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    """On a machine that is busy with something else, too."""
    monkeypatch.setattr(calibration, "BUDGET_NS", 20_000_000_000)


@pytest.fixture
def device():
    made = HostDevice(in_place="never", unified=False, threads=4)
    yield made
    made.close()


def open_engine(model, device, **settings):
    return asynctrt.open(model, device=device, **{"contexts": 4, "max_rows": 8, "graphs": "off"} | settings)


@pytest.mark.parametrize(
    ("rows_max", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (8, (1, 4, 8)),
        (16, (1, 4, 16)),
        (64, (1, 4, 16, 64)),
        (1000, (1, 10, 100, 1000)),
    ],
)
def test_a_few_sizes_are_measured(rows_max, expected):
    assert sizes_to_measure(rows_max) == expected


async def test_zeros_are_run_and_nothing_else(device):
    model = Sleeping(dtype="int64")
    async with open_engine(model, device) as engine:
        assert {rows for rows, lanes, _ in engine.statistics().lane_rates if lanes == 1} == {1, 4, 8}
        assert not any(rows.any() for rows in model.seen)
        assert {len(rows) for rows in model.seen} == {1, 4, 8}
        assert engine.statistics().batches == 0


async def test_a_lane_does_not_run_out_of_short_batches(device):
    """More lanes would seem to pay off, as the thread that enqueues batches wakes up late."""
    model = Sleeping(work_ns=50_000)
    async with open_engine(model, device, contexts=2):
        assert model.unfinished_max > 8


async def test_dimensions_that_vary_have_a_usual_size(device):
    model = Sleeping(dims=("length",))
    async with open_engine(model, device, max_rows=4096) as engine:
        assert {rows.shape[1:] for rows in model.seen} == {(64,)}
        assert engine.statistics().lane_rates
        assert engine.statistics().memory_nbytes == 4 * 2 * SLAB_NBYTES_MIN


async def test_what_batches_take_is_known_before_the_first_request(device):
    async with open_engine(Sleeping(work_ns=4_000_000), device) as engine:
        batch_ns = engine._scheduler.times.compute.typical((), 8)
        assert 3_900_000 < batch_ns < 40_000_000


@pytest.mark.parametrize(("settings", "lanes"), [({"lanes": 2}, 2), ({"contexts": 1}, 1)])
async def test_what_batches_take_alone_is_measured_where_a_device_is_divided(device, settings, lanes):
    """It is what they are charged, however many lanes there are."""
    async with open_engine(Sleeping(work_ns=4_000_000), device, weight=1, **settings) as engine:
        assert engine.statistics().lanes == {8: lanes}
        assert 3_900_000 < engine._scheduler.times.alone.typical((), 8) < 40_000_000


@pytest.mark.parametrize("settings", [{"contexts": 1}, {"batching": "deterministic", "contexts": 1}])
async def test_nothing_is_run_where_there_is_one_lane_in_any_case(device, settings):
    model = Sleeping()
    async with open_engine(model, device, **settings) as engine:
        assert engine.statistics().lanes == {8: 1}
    assert model.seen == []


async def test_nothing_is_run_of_a_model_that_is_not_known_to_be_safe_to_try(device):
    model = Sleeping(is_capturable=False)
    async with open_engine(model, device) as engine:
        assert engine.statistics().lanes == {8: 1}
    assert model.seen == []


async def test_a_device_that_does_not_copy_meanwhile_has_no_lanes():
    model = Sleeping()
    async with open_engine(model, "host") as engine:
        assert (engine.statistics().lanes, engine.statistics().lane_rates) == ({}, ())
    assert model.seen == []


async def test_it_ends_in_time_though_batches_take_long(device, monkeypatch):
    monkeypatch.setattr(calibration, "BUDGET_NS", 50_000_000)
    model = Sleeping(work_ns=lambda rows: 20_000_000 * rows)
    async with open_engine(model, device) as engine:
        assert engine.statistics().lanes == {8: 1}, "of large batches nothing could be measured"
    assert len(model.seen) < 4


async def test_a_model_that_fails_has_one_lane(device, caplog):
    def fail(rows):
        raise ValueError("zeros are not for me")

    with caplog.at_level(logging.DEBUG, "asynctrt"):
        async with open_engine(Sleeping(work_ns=fail), device) as engine:
            assert engine.statistics().lanes == {8: 1}
    assert "no batches were run side by side" in caplog.text


async def test_what_fails_on_the_device_after_it_failed_to_be_put_there(device):
    """Nothing else asks for that error, and no batch of a caller has it."""

    class Failing(SleepingBinding):
        def enqueue(self, rows, **given):
            super().enqueue(rows, **given)
            if rows == 8:
                raise ValueError("too many zeros")

    def fail(rows):
        if rows == 8:
            raise ValueError("nor there")
        return 0

    model = Sleeping(work_ns=fail)
    model.bind = lambda inputs, outputs: Failing(model, inputs[0], outputs[0])
    async with open_engine(model, device) as engine:
        assert engine.statistics().lanes == {8: 1}
        for number in range(8):
            sent = np.full((1, *DIMS), number, np.float32)
            np.testing.assert_array_equal((await engine.infer(sent))["output"], sent)


async def test_no_batch_of_zeros_runs_beside_those_of_callers(device):
    """One failed, and those enqueued behind it write to the memory of their context, too."""
    failed = []

    def work_ns(rows):
        if not failed and len(model.arenas) > len(model.seen) + 2:
            failed.append(rows)
            raise ValueError("too many zeros")
        return 20_000_000 if failed else 100_000

    model = Sleeping(work_ns=work_ns)
    async with open_engine(model, device) as engine:
        assert failed
        assert engine.statistics().lanes == {8: 1}
        assert len(model.seen) == len(model.arenas)
        assert not any(context.stream.is_running for context in engine._pool.contexts)


async def test_arenas_that_others_use_are_left_alone(device):
    model = Sleeping(enqueue_nbytes=1024)
    before = device.memory().held_nbytes
    with Arenas(device, 4) as arenas:
        async with open_engine(model, device, shared_arenas=arenas) as engine:
            assert engine.statistics().lane_rates
            used = {id(arena) for arena in model.arenas}
            own = {id(arena.buffer) for arena in engine._pool.arenas}
            assert used
            assert not used & own
    assert device.memory().held_nbytes == before


async def test_an_opening_that_is_cancelled_runs_no_more(device):
    entered = threading.Event()

    def slowly(rows):
        entered.set()
        return 30_000_000

    model = Sleeping(work_ns=slowly)
    opening = asyncio.ensure_future(open_engine(model, device)._open())
    await asyncio.to_thread(entered.wait, 30)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(model.seen) < 6
