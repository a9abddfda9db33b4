"""What every device does, with CUDA's meaning of the terms. One suite for all devices."""

import threading
from itertools import pairwise

import numpy as np
import pytest

from asynctrt.devices.base import ALIGNMENT, aligned, check_room
from asynctrt.errors import DeviceError, DeviceMemoryError
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


@pytest.fixture
def streams(device):
    made = [device.create_stream() for _ in range(2)]
    yield made
    for one in made:
        assert one.close(WAIT_S)


class Memory:
    """Memory of the device as bytes, through staging memory where the CPU cannot see it."""

    def __init__(self, device):
        self._device = device
        self._stream = device.create_stream()

    def write(self, buffer, value):
        """Fill a buffer, and return it."""
        self._seen(buffer)[...] = value
        if not buffer.is_host_visible:
            self._copy(buffer, self._staging)
        return buffer

    def read(self, buffer):
        """Return the bytes of a buffer."""
        seen = self._seen(buffer)
        if not buffer.is_host_visible:
            self._copy(self._staging, buffer)
        return seen

    def values(self, buffer):
        """Return the set of bytes that occur in a buffer."""
        return set(np.unique(self.read(buffer)).tolist())

    def _seen(self, buffer):
        self._staging = buffer if buffer.is_host_visible else self._device.allocate_staging(buffer.nbytes)
        return self._staging.array(BYTES, (buffer.nbytes,), 0)

    def _copy(self, target, source):
        self._stream.copy(target, source, offset=0, nbytes=source.nbytes)
        finish(self._stream, self._device)

    def close(self):
        assert self._stream.close(WAIT_S)


@pytest.fixture
def memory(device):
    made = Memory(device)
    yield made
    made.close()


def finish(stream, device):
    event = device.create_event()
    stream.record(event)
    assert event.synchronize(WAIT_S)
    return event


def test_its_properties(device):
    assert device.name
    assert device.concurrency >= 1
    assert device.contexts_default >= 1
    assert device.unified in (True, False)
    assert device.is_parallel in (True, False)


@pytest.mark.parametrize("nbytes", [1, 255, 256, 100_000])
def test_buffers_are_aligned_zeroed_and_as_large_as_asked(device, nbytes, memory):
    for buffer in (device.allocate_staging(nbytes), device.allocate(nbytes)):
        assert buffer.nbytes == nbytes
        assert buffer.address % ALIGNMENT == 0
        assert memory.values(buffer) == {0}
        buffer.close()
        buffer.close()


def test_views_of_a_buffer_share_its_memory(device):
    buffer = device.allocate_staging(1024)
    floats = buffer.array(np.dtype("float32"), (4, 8), 512)
    floats[...] = 1.0
    assert floats.ctypes.data == buffer.address + 512
    assert buffer.array(np.dtype("float32"), (32,), 512).sum() == 32
    assert buffer.array(BYTES, (512,), 0).sum() == 0


def test_a_view_outlives_its_buffer(device, memory):
    buffer = memory.write(device.allocate_staging(64), 7)
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


def test_a_part_is_copied_at_its_offset(device, stream, memory):
    source, target = memory.write(device.allocate_staging(1024), 3), device.allocate(1024)
    stream.copy(target, source, offset=256, nbytes=512)
    finish(stream, device)
    content = memory.read(target)
    assert content[:256].sum() == content[768:].sum() == 0
    assert set(content[256:768].tolist()) == {3}


def test_a_stream_keeps_its_order(device, stream, memory):
    buffers = [device.allocate(4096) for _ in range(50)]
    memory.write(buffers[0], 9)
    for source, target in pairwise(buffers):
        stream.copy(target, source, offset=0, nbytes=4096)
    finish(stream, device)
    assert memory.values(buffers[-1]) == {9}


def test_a_stream_waits_for_an_event_of_another(device, streams, memory):
    first, second = streams
    a, b, c = (device.allocate(1 << 20) for _ in range(3))
    for value in range(1, 20):
        memory.write(a, value)
        between = device.create_event()
        first.copy(b, a, offset=0, nbytes=1 << 20)
        first.record(between)
        second.wait(between)
        second.copy(c, b, offset=0, nbytes=1 << 20)
        finish(second, device)
        assert memory.values(c) == {value}


def test_a_wait_is_for_the_recording_that_was_there(device, streams):
    """As with cuStreamWaitEvent, recording the event again later does not affect a waiting stream."""
    first, second = streams
    event = device.create_event()
    for _ in range(20):
        first.record(event)
        second.wait(event)
        finish(second, device)
        finish(first, device)


def test_waiting_for_an_event_that_was_never_recorded_returns_at_once(device, stream):
    stream.wait(device.create_event())
    finish(stream, device)


def test_a_callback_is_called_when_a_pending_event_is_done(device, stream):
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


def test_work_behind_an_abandoned_stream_runs_once_that_has_ended(device, streams, memory):
    first, second = streams
    between, end = device.create_event(), device.create_event()
    source, target = memory.write(device.allocate_staging(4096), 4), device.allocate(4096)
    first.record(between)
    second.wait(between)
    second.copy(target, source, offset=0, nbytes=4096)
    second.record(end)
    first.abandon()
    assert end.synchronize(WAIT_S)
    assert memory.values(target) == {4}


def test_closing_a_stream_twice(device):
    stream = device.create_stream()
    finish(stream, device)
    assert stream.close(WAIT_S)
    assert stream.close(WAIT_S)


def test_what_is_captured_is_not_done_until_it_is_launched(device, stream, memory):
    source, target = memory.write(device.allocate_staging(4096), 5), device.allocate(4096)
    stream.begin_capture()
    stream.copy(target, source, offset=0, nbytes=4096)
    graph = stream.end_capture()
    finish(stream, device)
    assert memory.values(target) == {0}
    for value in (6, 7, 8):
        memory.write(source, value)
        graph.launch(stream=stream)
        finish(stream, device)
        assert memory.values(target) == {value}
    graph.close()
    graph.close()


def test_graphs_keep_the_order_of_the_streams_they_are_launched_on(device, streams, memory):
    """As arenas need it: each after the batch of another stream, whichever that was."""
    first, second = streams
    a, b, c = (device.allocate(1 << 20) for _ in range(3))
    second.begin_capture()
    second.copy(c, b, offset=0, nbytes=1 << 20)
    graph = second.end_capture()
    written = [device.create_event(is_timed=False) for _ in range(2)]
    for value in range(1, 20):
        memory.write(a, value)
        first.copy(b, a, offset=0, nbytes=1 << 20)
        first.record(written[value % 2])
        second.wait(written[value % 2])
        graph.launch(stream=second)
        finish(second, device)
        assert memory.values(c) == {value}
    graph.close()


def test_a_capture_needs_a_beginning_and_an_end(device, stream):
    with pytest.raises(DeviceError):
        stream.end_capture()
    stream.begin_capture()
    with pytest.raises(DeviceError):
        stream.begin_capture()
    stream.end_capture().close()
    finish(stream, device)


def test_memory_is_counted(device):
    before = device.memory()
    assert 0 < before.free_nbytes <= before.total_nbytes
    buffer = device.allocate(1 << 20)
    # At once, as other processes take and free memory meanwhile.
    now = device.memory()
    assert now.held_nbytes == before.held_nbytes + (1 << 20)
    assert now.room_nbytes == now.free_nbytes
    buffer.close()
    assert device.memory().held_nbytes == before.held_nbytes


def test_what_would_not_fit_is_refused_with_the_arithmetic(device):
    memory = device.memory()
    with pytest.raises(DeviceMemoryError, match=r"3 things need .*MiB on .* there is room for .*Take fewer"):
        check_room(device, memory.total_nbytes + 1, "3 things", "Take fewer")
    check_room(device, 0, "nothing", "")


def test_streams_have_handles_of_their_own(device):
    streams = [device.create_stream() for _ in range(4)]
    handles = {stream.handle for stream in streams}
    assert len(handles) == 4
    assert 0 not in handles
    device.activate()
    assert device.lost is None
    for stream in streams:
        assert stream.close(WAIT_S)
