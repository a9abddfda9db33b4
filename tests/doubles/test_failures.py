"""Failures on demand, on the host device."""

import gc

import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError
from tests.doubles.support import WAIT_S, Bench, rows, until, wait
from tests.doubles.tensorrt import EngineSpec


@pytest.fixture
def bench():
    made = Bench(device=HostDevice(threads=2, in_place="never"))
    yield made
    made.close()
    assert made.trt.violations() == ()


def test_a_batch_that_hangs_until_it_is_released(bench):
    users = [bench.user().give(rows(4, 16, seed=seed)) for seed in (1, 2)]
    streams = [bench.stream(), bench.stream()]
    bench.trt.fail_next("hang")
    assert users[0].context.execute_async_v3(streams[0].handle)
    ended = bench.device.create_event()
    streams[0].record(ended)
    until(lambda: bench.trt.hanging == 1)
    # The other stream goes on meanwhile.
    assert users[1].context.execute_async_v3(streams[1].handle)
    assert wait(bench.device, streams[1]) is None
    users[1].check()
    assert not ended.query()
    bench.trt.release_hangs()
    assert ended.synchronize(WAIT_S)
    assert ended.error is None
    users[0].check()
    # What hangs later waits for a later release.
    bench.trt.fail_next("hang")
    assert users[0].context.execute_async_v3(streams[0].handle)
    again = bench.device.create_event()
    streams[0].record(again)
    until(lambda: bench.trt.hanging == 1)
    assert not again.query()
    bench.trt.release_hangs()
    assert again.synchronize(WAIT_S)


def test_an_illegal_address_is_the_end_of_the_device(bench):
    users = [bench.user().give(rows(4, 16, seed=seed)) for seed in (1, 2)]
    stream = bench.stream()
    users[0].run(stream)
    bench.trt.fail_next("illegal-address")
    assert users[0].context.execute_async_v3(stream.handle)
    error = wait(bench.device, stream)
    assert isinstance(error, DeviceLostError)
    assert "an illegal memory access was encountered" in str(error)
    # Sticky: for every context, and for all that comes later.
    assert not users[1].context.execute_async_v3(stream.handle)
    assert bench.recorder.last() == (
        bench.trt.ErrorCodeTRT.UNSPECIFIED_ERROR,
        "IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (an illegal memory access was encountered)",
    )
    assert bench.engine.create_execution_context() is None
    assert bench.load(EngineSpec()) is None
    with pytest.raises(RuntimeError, match="Error in set optimization profile async"):
        users[1].context.set_optimization_profile_async(0, stream.handle)


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


def test_memory_that_its_allocator_does_not_free(bench):
    context = bench.load(EngineSpec(persistent_nbytes=1024)).create_execution_context()
    type(bench.allocator).deallocate = lambda self, memory: False
    assert context is not None
    del context
    gc.collect()
    said = bench.logger.errors()
    assert said
    assert all("the GPU allocator did not free the memory at 0x" in one for one in said)


def test_an_enqueue_that_waits_for_its_batch_learns_of_the_loss():
    bench = Bench(EngineSpec(data_dependent=True))
    user = bench.user().give(rows(4, 16))
    bench.trt.fail_next("illegal-address")
    assert not user.context.execute_async_v3(bench.stream().handle)
    assert "an illegal memory access" in bench.recorder.last()[1]
    bench.close()
