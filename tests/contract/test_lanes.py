"""Batches that compute one after the other because the engine says so, on devices that copy meanwhile."""

import asyncio
import time

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError
from asynctrt.tensors import TensorSpec
from tests.contract.devices import DEVICES, WITH_PLANS, subject_on
from tests.helpers import until

pytestmark = pytest.mark.anyio
WAIT_S = 30
WARM_UP = 16


@pytest.fixture(params=[name for name in ("host-separate-memory", "cuda") if name in DEVICES])
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()


SUBJECTS = [*(name for name in ("host-separate-memory", "cuda") if name in DEVICES), *WITH_PLANS]


@pytest.fixture(params=SUBJECTS)
def subject(request):
    made = subject_on(request.param)
    yield made
    made.close()
    made.device.close()


@pytest.fixture(params=SUBJECTS)
def slow_subject(request):
    made = subject_on(request.param, work_ns=1_000_000)
    yield made
    made.close()
    made.device.close()


@pytest.mark.parametrize("graphs", ["off", "auto"])
async def test_answers_are_right_and_batches_are_launched_ahead_of_time(slow_subject, graphs):
    subject = slow_subject
    async with subject.open(contexts=4, arenas=4, lanes=1, graphs=graphs) as engine, asyncio.timeout(WAIT_S):
        for _ in range(WARM_UP):
            await subject.check(engine)
        # Batches of a real plan take a few microseconds, so none is launched ahead of time.
        reasons = ("idle", "full") if subject.is_real else ("ahead", "idle", "full")
        rounds = 0
        while rounds < 5 or not all(engine.statistics().launched[why] for why in reasons):
            rounds += 1
            # The last batch of each round is not full.
            answers = await asyncio.gather(*[engine.infer(subject.rows(number)) for number in range(42)])
            for number, answer in enumerate(answers):
                subject.compare(answer, subject.rows(number))
        assert engine.statistics().succeeded == WARM_UP + 42 * rounds
    assert subject.double.violations() == ()


async def test_what_hangs_takes_along_who_waits_for_it_on_the_device_and_nobody_else(subject):
    engine = await subject.open(contexts=4, arenas=4, lanes=1, batch_timeout=1.0, close_timeout=0.5)
    for _ in range(WARM_UP):
        await subject.check(engine)
    subject.double.fail_next("hang")
    held = asyncio.create_task(engine.infer(subject.rows(1)))
    await until(lambda: subject.double.hanging)
    behind = asyncio.create_task(engine.infer(subject.rows(2)))
    await until(lambda: engine.statistics().in_flight_batches == 2)
    for number in range(5):
        await subject.check(engine, number)
    assert not held.done()
    with pytest.raises(DeviceLostError, match="batch_timeout of 1 s"):
        await asyncio.wait_for(held, WAIT_S)
    # The host device lets go of those that wait for what was given up; a GPU cannot.
    (outcome,) = await asyncio.wait_for(asyncio.gather(behind, return_exceptions=True), WAIT_S)
    assert isinstance(outcome, DeviceLostError | asynctrt.InferResult)
    await subject.check(engine, 7)
    assert engine.state == "open"
    subject.double.release_hangs()
    await engine.aclose()


class Sleeping(ModelBase):
    """Takes 20 milliseconds, in any number of threads at once."""

    name = platform = "sleeping"
    inputs = (TensorSpec("input", np.dtype("float32"), (4,)),)
    outputs = (TensorSpec("output", np.dtype("float32"), (4,)),)
    capabilities = Capabilities(is_pure=True)

    def create_context(self, device):
        return self

    def bind(self, inputs, outputs):
        return SleepingBinding(inputs[0], outputs[0])

    def close(self):
        """Do nothing: it holds nothing."""


class SleepingBinding:
    def __init__(self, source, target):
        self.source, self.target = source, target

    def enqueue(self, rows, *, profile, stream, arena):
        def work():
            time.sleep(0.02)
            self.target.view(rows)[...] = self.source.view(rows)

        stream.launch(work, label=rows)

    def unbound_outputs(self, rows):
        return {}


@pytest.mark.parametrize(("threads", "expected"), [(4, {2: 4}), (1, {2: 1})])
async def test_the_lanes_that_pay_are_measured_when_the_engine_opens(threads, expected):
    device = HostDevice(in_place="never", unified=False, threads=threads)
    async with asyncio.timeout(WAIT_S):
        lanes = None
        while lanes != expected:  # On a machine that is busy with something else, now and then others are.
            async with asynctrt.open(Sleeping(), device=device, contexts=4, max_rows=2) as engine:
                lanes = engine.statistics().lanes
                rates = engine.statistics().lane_rates
    assert {rows for rows, _, _ in rates} >= {2}
    assert all(0 < rate <= 50 * rows * lanes for rows, lanes, rate in rates), "that is what sleeping takes"


@pytest.mark.parametrize(
    ("settings", "expected"), [({"lanes": 3}, {2: 3}), ({"lanes": 2, "contexts": 2}, {2: 2})]
)
async def test_a_number_of_lanes_that_is_given_is_not_measured(settings, expected):
    device = HostDevice(in_place="never", unified=False, threads=4)
    async with asynctrt.open(Sleeping(), device=device, max_rows=2, **{"contexts": 4} | settings) as engine:
        statistics = engine.statistics()
    assert (statistics.lanes, statistics.lane_rates) == (expected, ())
