"""What is the host device's own: running in place, failing work, threads that wait for nobody."""

import threading
from functools import partial

import pytest

from asynctrt.devices.host import HAND_OVER_NS, LABELS_MAX, HostBuffer, HostDevice, cores
from asynctrt.errors import DeviceError, DeviceMemoryError, OptionsError

WAIT_S = 20


class Clock:
    """Time that moves only when work says how long it took."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


def finish(stream, device):
    event = device.create_event()
    stream.record(event)
    assert event.synchronize(WAIT_S)
    return event


class Bench:
    """A device under a clock of its own, and work of a given length that notes its thread."""

    def __init__(self, **kw):
        self.clock = Clock()
        self.device = HostDevice(now_ns=self.clock, **kw)
        self.stream = self.device.create_stream()

    def was_in_place(self, duration_ns, label="work"):
        threads = []

        def work():
            threads.append(threading.get_ident())
            self.clock.ns += duration_ns

        self.stream.launch(work, label=label)
        finish(self.stream, self.device)
        # The thread lets go of the stream just after the event; only then is the stream idle.
        while "busy" in repr(self.stream):
            pass
        return threads == [threading.get_ident()]


@pytest.fixture
def bench():
    made = Bench()
    yield made
    assert made.stream.close(WAIT_S)


def test_short_work_comes_to_run_in_place(bench):
    runs = [bench.was_in_place(HAND_OVER_NS // 2) for _ in range(10)]
    assert runs[:4] == [False] * 4
    assert runs[-1]


def test_long_work_never_runs_in_place(bench):
    assert not any(bench.was_in_place(2 * HAND_OVER_NS) for _ in range(30))


def test_work_that_turns_out_long_goes_back_to_the_thread_for_longer_each_time(bench):
    def runs_until_in_place():
        count = 1
        while not bench.was_in_place(1000):
            count += 1
        return count

    first = runs_until_in_place()
    assert bench.was_in_place(100 * HAND_OVER_NS), "it was short until now"
    assert not bench.was_in_place(1000)
    assert runs_until_in_place() > first


def test_labels_are_judged_apart(bench):
    for _ in range(10):
        bench.was_in_place(1000, label="short")
        bench.was_in_place(10 * HAND_OVER_NS, label="long")
    assert bench.was_in_place(1000, label="short")
    assert not bench.was_in_place(1000, label="long")


def test_what_is_remembered_of_labels_is_bounded(bench):
    for label in range(3 * LABELS_MAX):
        bench.stream.launch(lambda: None, label=label)
    finish(bench.stream, bench.device)
    assert len(bench.stream._paces) <= LABELS_MAX


@pytest.mark.parametrize(("in_place", "expected"), [("always", True), ("never", False)])
def test_running_in_place_can_be_forced(in_place, expected):
    bench = Bench(in_place=in_place)
    assert [bench.was_in_place(1000) for _ in range(10)] == [expected] * 10
    assert bench.stream.close(WAIT_S)


def test_no_work_runs_in_place_behind_work_that_is_queued():
    device = HostDevice()
    stream = device.create_stream()
    order, gate = [], threading.Event()
    for _ in range(10):
        stream.launch(lambda: None, label="short")
        finish(stream, device)
    stream.launch(partial(gate.wait, WAIT_S), label="long")
    for number in range(5):
        stream.launch(partial(order.append, number), label="short")
    assert order == []
    gate.set()
    finish(stream, device)
    assert order == [0, 1, 2, 3, 4]
    assert stream.close(WAIT_S)


@pytest.mark.parametrize("in_place", ["always", "never"])
def test_what_work_raises_is_the_error_of_the_next_event_only(in_place):
    device = HostDevice(in_place=in_place)
    stream = device.create_stream()
    broken = ValueError("broken")

    def raise_it():
        raise broken

    stream.launch(raise_it, label="bad")
    assert finish(stream, device).error is broken
    stream.launch(lambda: None, label="good")
    assert finish(stream, device).error is None
    assert stream.close(WAIT_S)


def test_ctrl_c_in_place_is_the_applications():
    def interrupt():
        raise KeyboardInterrupt

    stream = HostDevice(in_place="always").create_stream()
    with pytest.raises(KeyboardInterrupt):
        stream.launch(interrupt, label="work")


def test_a_stream_that_waits_holds_no_thread():
    device = HostDevice(threads=1, in_place="never")
    waits, goes_on = device.create_stream(), device.create_stream()
    gate, event = threading.Event(), device.create_event()
    goes_on.launch(partial(gate.wait, WAIT_S), label="gate")
    goes_on.record(event)
    waits.wait(event)
    done = device.create_event()
    waits.record(done)
    third = device.create_stream()
    gate.set()
    finish(third, device)
    assert done.synchronize(WAIT_S)
    assert all(stream.close(WAIT_S) for stream in (waits, goes_on, third))


def test_a_stream_whose_work_hangs_is_not_waited_for_longer_than_asked():
    device = HostDevice(in_place="never")
    stream, gate = device.create_stream(), threading.Event()
    stream.launch(partial(gate.wait, WAIT_S), label="hangs")
    assert not stream.close(0.01)
    gate.set()
    assert stream.close(WAIT_S)


def test_a_closed_stream_takes_no_work():
    stream = HostDevice(in_place="never").create_stream()
    assert stream.close(WAIT_S)
    with pytest.raises(DeviceError, match="closed"):
        stream.launch(lambda: None, label="late")


def test_events_of_other_devices_are_refused():
    stream = HostDevice().create_stream()
    for use in (stream.record, stream.wait, HostDevice().create_event().elapsed_ns):
        with pytest.raises(DeviceError, match="not an event of the host device"):
            use(object())


def test_recording_a_pending_event_again_is_refused():
    device = HostDevice(in_place="never")
    stream, gate, event = device.create_stream(), threading.Event(), device.create_event()
    stream.launch(partial(gate.wait, WAIT_S), label="gate")
    stream.record(event)
    with pytest.raises(DeviceError, match="recorded again"):
        stream.record(event)
    gate.set()
    assert event.synchronize(WAIT_S)
    assert stream.close(WAIT_S)


def test_memory_that_is_not_there_is_a_typed_error():
    with pytest.raises(DeviceMemoryError, match="Lower max_rows or contexts"):
        HostBuffer(1 << 60)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_device_without_threads(threads):
    with pytest.raises(OptionsError, match="at least one thread"):
        HostDevice(threads=threads)


def test_cores():
    assert cores() >= 1
