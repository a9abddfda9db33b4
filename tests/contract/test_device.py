"""What every device does, in CUDA's sense of the words. One suite for all of them."""

import threading
from itertools import pairwise

import numpy as np
import pytest

from asynctrt.devices.base import ALIGNMENT, aligned
from tests.contract.devices import DEVICES

WAIT_S = 20
BYTES = np.dtype("uint8")


@pytest.fixture(params=DEVICES)
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()


@pytest.fixture
def stream(device):
    made = device.create_stream()
    yield made
    assert made.close(WAIT_S)


def filled(buffer, value):
    buffer.array(BYTES, (buffer.nbytes,), 0)[...] = value
    return buffer


def values(buffer):
    return set(buffer.array(BYTES, (buffer.nbytes,), 0).tolist())


def finish(stream, device):
    event = device.create_event()
    stream.record(event)
    assert event.synchronize(WAIT_S)
    return event


def test_what_it_says_of_itself(device):
    assert device.name
    assert device.slots >= 1
    assert device.contexts_default >= 1
    assert device.unified in (True, False)
    assert device.is_parallel in (True, False)


@pytest.mark.parametrize("nbytes", [1, 255, 256, 100_000])
def test_buffers_are_aligned_zeroed_and_as_large_as_asked(device, nbytes):
    for buffer in (device.allocate_staging(nbytes), device.allocate(nbytes)):
        assert buffer.nbytes == nbytes
        assert buffer.address % ALIGNMENT == 0
        assert values(buffer) == {0}
        buffer.close()
        buffer.close()


def test_views_of_a_buffer_share_its_memory(device):
    buffer = device.allocate_staging(1024)
    floats = buffer.array(np.dtype("float32"), (4, 8), 512)
    floats[...] = 1.0
    assert floats.ctypes.data == buffer.address + 512
    assert buffer.array(np.dtype("float32"), (32,), 512).sum() == 32
    assert buffer.array(BYTES, (512,), 0).sum() == 0


def test_a_view_outlives_its_buffer(device):
    buffer = filled(device.allocate_staging(64), 7)
    view = buffer.array(BYTES, (64,), 0)
    buffer.close()
    assert set(view.tolist()) == {7}


def test_alignment():
    assert [aligned(nbytes) for nbytes in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_a_new_event_is_done(device):
    event = device.create_event()
    assert event.query()
    assert event.synchronize(0)
    assert event.error is None
    assert not event.nudge()


def test_an_event_is_done_when_its_stream_gets_there(device, stream):
    source, target = filled(device.allocate_staging(1 << 16), 3), device.allocate(1 << 16)
    stream.copy(target, source, offset=0, nbytes=1 << 16)
    assert finish(stream, device).query()
    assert values(target) == {3}


def test_a_part_is_copied_at_its_offset(device, stream):
    source, target = filled(device.allocate_staging(1024), 3), device.allocate(1024)
    stream.copy(target, source, offset=256, nbytes=512)
    finish(stream, device)
    content = target.array(BYTES, (1024,), 0)
    assert content[:256].sum() == content[768:].sum() == 0
    assert set(content[256:768].tolist()) == {3}


def test_a_stream_keeps_its_order(device, stream):
    buffers = [device.allocate(4096) for _ in range(50)]
    filled(buffers[0], 9)
    for source, target in pairwise(buffers):
        stream.copy(target, source, offset=0, nbytes=4096)
    finish(stream, device)
    assert values(buffers[-1]) == {9}


def test_a_stream_waits_for_an_event_of_another(device):
    first, second = device.create_stream(), device.create_stream()
    a, b, c = (device.allocate(1 << 20) for _ in range(3))
    for value in range(1, 20):
        filled(a, value)
        between = device.create_event()
        first.copy(b, a, offset=0, nbytes=1 << 20)
        first.record(between)
        second.wait(between)
        second.copy(c, b, offset=0, nbytes=1 << 20)
        finish(second, device)
        assert values(c) == {value}
    assert first.close(WAIT_S)
    assert second.close(WAIT_S)


def test_a_wait_is_for_the_recording_that_was_there(device):
    """As cuStreamWaitEvent: recording the event again afterwards changes nothing for who waits already."""
    first, second = device.create_stream(), device.create_stream()
    event = device.create_event()
    for _ in range(20):
        first.record(event)
        second.wait(event)
        finish(second, device)
        finish(first, device)
    assert first.close(WAIT_S)
    assert second.close(WAIT_S)


def test_waiting_for_an_event_that_was_never_recorded_is_no_wait(device, stream):
    stream.wait(device.create_event())
    finish(stream, device)


def test_who_asks_is_called_when_a_pending_event_is_done(device, stream):
    for _ in range(50):
        event, called = device.create_event(), threading.Event()
        target, source = device.allocate(1 << 18), device.allocate(1 << 18)
        stream.copy(target, source, offset=0, nbytes=1 << 18)
        stream.record(event)
        if event.on_done(called.set):
            assert called.wait(WAIT_S)
        assert event.synchronize(WAIT_S)
        assert event.query()


def test_elapsed_time_is_that_between_two_events(device, stream):
    begin, end = device.create_event(), device.create_event()
    target, source = device.allocate(1 << 20), device.allocate(1 << 20)
    stream.record(begin)
    stream.copy(target, source, offset=0, nbytes=1 << 20)
    stream.record(end)
    assert end.synchronize(WAIT_S)
    assert end.elapsed_ns(begin) > 0
    assert begin.elapsed_ns(end) == -end.elapsed_ns(begin)


def test_an_event_can_be_recorded_again(device, stream):
    event = device.create_event()
    for _ in range(3):
        stream.record(event)
        assert event.synchronize(WAIT_S)


def test_closing_a_stream_twice(device):
    stream = device.create_stream()
    finish(stream, device)
    assert stream.close(WAIT_S)
    assert stream.close(WAIT_S)
