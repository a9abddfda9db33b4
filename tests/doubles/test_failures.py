"""Failures on demand, on the host device."""

import gc

import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError
from tests.doubles.support import WAIT_S, Bench, rows, until, wait


@pytest.fixture
def bench():
    made = Bench(device=HostDevice(threads=2, in_place="never"))
    yield made
    made.close()
    assert made.trt.violations() == ()


def test_what_was_queued_behind_it_fails_too(bench):
    user, stream = bench.user().give(rows(4, 16)), bench.stream()
    bench.trt.fail_next("hang")
    bench.trt.fail_next("illegal-address")
    events = []
    for _ in range(2):
        assert user.context.execute_async_v3(stream.handle)
        events.append(bench.device.create_event())
        stream.record(events[-1])
    until(lambda: bench.trt.hanging == 1)
    assert not any(event.query() for event in events)
    bench.trt.release_hangs()
    assert events[-1].synchronize(WAIT_S)
    assert [type(event.error) for event in events] == [DeviceLostError, DeviceLostError]
    # A context that goes with a device that is lost does no harm, but says so.
    user.context = None
    gc.collect()
    lost = "Error Code 1: Cuda Runtime (an illegal memory access was encountered)"
    assert bench.recorder.last()[1] == f"IExecutionContext::~IExecutionContext: {lost}"
    bench.engine.error_recorder = None
    user.engine = bench.engine = None
    gc.collect()
    assert bench.logger.errors() == [f"ICudaEngine::~ICudaEngine: {lost}"]


def test_what_outlives_its_recorder_on_a_lost_device():
    bench = Bench()
    user, stream = bench.user().give(rows(4, 16)), bench.stream()
    bench.trt.fail_next("illegal-address")
    assert user.context.execute_async_v3(stream.handle)
    assert isinstance(wait(bench.device, stream), DeviceLostError)
    bench.recorder = None
    gc.collect()
    user.context = None
    gc.collect()
    assert any("the error recorder was destroyed before" in one for one in bench.trt.violations())
    bench.close()
