"""What only the host device does: running in place, failing work, replacing threads that hang."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from asynctrt._util.pace import FORGIVEN_AFTER, InlinePolicy
from asynctrt.devices.host import HostDevice, cores
from asynctrt.devices.host.memory import HostBuffer
from asynctrt.devices.host.streams import HostEvent, Unfinished
from asynctrt.devices.host.threads import HAND_OVER_NS, LABELS_MAX
from asynctrt.errors import DeviceError, DeviceMemoryError, OptionsError

WAIT_S = 20
ROOT = Path(__file__).parent.parent.parent


class Clock:
    """A time that moves only when a test or its work moves it."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


def finish(stream, device):
    event = device.create_event()
    stream.record(event)
    assert event.synchronize(WAIT_S)
    return event


def hold(gate):
    """Work that lasts until the gate is opened."""
    assert gate.wait(WAIT_S), "the test never let it go on"


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

        self.stream.launch(work, label=label, run_on="auto")
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


def test_short_work_of_a_thread_is_done_when_its_launch_returns(bench, monkeypatch):
    """It needs the GIL, for which it would otherwise compete with the launching thread."""
    monkeypatch.setattr("asynctrt.devices.host.threads.LEND_S", WAIT_S)  # However busy the machine is.
    stream, event = bench.stream, bench.device.create_event()
    threads, done = [], []
    for _ in range(20):
        stream.launch(lambda: threads.append(threading.get_ident()), label="work", run_on="thread")
        stream.record(event)
        done.append(event.query())
        assert event.synchronize(WAIT_S)
    assert threading.get_ident() not in threads
    assert all(done[10:])


def test_a_launch_does_not_wait_for_work_that_hangs_although_it_was_short(bench):
    stream, event, gate = bench.stream, bench.device.create_event(), threading.Event()
    for _ in range(20):
        stream.launch(lambda: None, label="work", run_on="thread")
        finish(stream, bench.device)
    stream.launch(partial(hold, gate), label="work", run_on="thread")
    stream.record(event)
    assert not event.query()
    gate.set()
    assert event.synchronize(WAIT_S)
    assert event.error is None


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


def runs_in_the_thread(bench):
    """Return how many runs of short work are made in the thread until one is made in place."""
    return next(count for count in range(1000) if bench.was_in_place(1000))


def test_work_that_was_short_for_long_is_not_punished_for_being_long_twice(bench):
    """Another process may hold up a run at any time, which says nothing about the work."""
    runs_in_the_thread(bench)
    for _ in range(6):
        assert bench.was_in_place(100 * HAND_OVER_NS)
        punished = runs_in_the_thread(bench)
    for _ in range(FORGIVEN_AFTER):
        assert bench.was_in_place(1000)
    assert bench.was_in_place(100 * HAND_OVER_NS)
    assert runs_in_the_thread(bench) < punished / 10


@pytest.mark.parametrize(("long_every", "least", "most"), [(200, 0.95, 1), (100, 0.8, 1), (20, 0, 0.2)])
def test_work_stays_in_place_unless_it_is_often_long(long_every, least, most):
    pace, chance, in_place, runs = InlinePolicy(HAND_OVER_NS), random.Random(0), 0, 20_000
    for _ in range(runs):
        is_long, is_in_place = chance.random() < 1 / long_every, pace.is_short
        in_place += is_in_place
        pace.observe(100 * HAND_OVER_NS if is_long else 1000, in_place=is_in_place)
    assert least <= in_place / runs <= most


def test_labels_are_judged_apart(bench):
    for _ in range(10):
        bench.was_in_place(1000, label="short")
        bench.was_in_place(10 * HAND_OVER_NS, label="long")
    assert bench.was_in_place(1000, label="short")
    assert not bench.was_in_place(1000, label="long")


def test_what_is_remembered_of_labels_is_bounded(bench):
    for label in range(3 * LABELS_MAX):
        bench.stream.launch(lambda: None, label=label, run_on="auto")
    finish(bench.stream, bench.device)
    assert len(bench.stream.threads.paces) <= LABELS_MAX


def test_what_one_stream_has_learned_holds_for_all(bench):
    """An engine on a machine with many cores has dozens of contexts."""
    runs_in_the_thread(bench)
    first, bench.stream = bench.stream, bench.device.create_stream()
    assert bench.was_in_place(1000)
    assert first.close(WAIT_S)


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
        stream.launch(lambda: None, label="short", run_on="auto")
        finish(stream, device)
    stream.launch(partial(hold, gate), label="long")
    for number in range(5):
        stream.launch(partial(order.append, number), label="short", run_on="auto")
    assert order == []
    gate.set()
    finish(stream, device)
    assert order == [0, 1, 2, 3, 4]
    assert stream.close(WAIT_S)


class Panic(BaseException):
    """As a Rust extension's panic: no Exception."""


ODD = [ValueError, Panic, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit]


def raising(error):
    """Work that raises it."""

    def work():
        raise error

    return work


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("in_place", ["always", "never"])
def test_whatever_work_raises_is_the_error_of_the_next_event_only_and_the_stream_goes_on(kind, in_place):
    device, broken, seen = HostDevice(in_place=in_place), kind("broken"), []
    stream = device.create_stream()

    async def main():
        stream.launch(raising(broken), label="bad")
        seen.append(finish(stream, device).error)
        stream.launch(lambda: None, label="good")
        seen.append(finish(stream, device).error)
        await asyncio.sleep(0)
        seen.append("went on")

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    if in_place == "always" and kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind) as caught:
            loop.run_until_complete(task)
        assert caught.value is broken
        assert seen == [broken, None], "it reaches the application once what launched it is through"
    loop.run_until_complete(task)
    loop.close()
    assert seen == [broken, None, "went on"]
    assert stream.close(WAIT_S)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_without_a_loop_an_interrupt_in_place_is_raised_where_the_work_was_launched(kind):
    device, broken = HostDevice(in_place="always"), kind("broken")
    stream = device.create_stream()
    with pytest.raises(kind):
        stream.launch(raising(broken), label="work")
    assert finish(stream, device).error is broken
    stream.launch(lambda: None, label="work")
    assert finish(stream, device).error is None


def test_work_runs_from_when_a_thread_has_taken_it_up():
    """What waits for a thread, or behind another stream, is not running."""
    device = HostDevice(threads=1, in_place="never")
    streams = [device.create_stream() for _ in range(3)]
    events = [device.create_event() for _ in streams]
    gates, begun = [threading.Event() for _ in streams], [threading.Event() for _ in streams]

    def work(number):
        begun[number].set()
        hold(gates[number])

    for number, (stream, event) in enumerate(zip(streams, events, strict=True)):
        if number == 2:
            stream.wait(events[1])
        stream.launch(partial(work, number), label="work")
        stream.record(event)
    for number, event in enumerate(events):
        assert begun[number].wait(WAIT_S)
        assert [other.is_running() for other in events] == [other is event for other in events]
        gates[number].set()
        assert event.synchronize(WAIT_S)
    assert not any(event.is_running() for event in events)
    assert all(stream.close(WAIT_S) for stream in streams)


def test_work_behind_what_was_abandoned_hangs_too():
    device = HostDevice(threads=2, in_place="never")
    hung, behind = device.create_stream(), device.create_stream()
    first, second = device.create_event(), device.create_event()
    gate, begun = threading.Event(), threading.Event()
    hung.launch(lambda: (begun.set(), hold(gate)), label="hangs")
    hung.record(first)
    behind.wait(first)
    behind.launch(lambda: None, label="work")
    behind.record(second)
    assert begun.wait(WAIT_S)
    assert (first.is_running(), second.is_running()) == (True, False)
    hung.abandon()
    for _ in range(1000):  # Until a thread has seen that it has to wait.
        if second.is_running():
            break
        threading.Event().wait(0.01)
    assert (first.is_running(), second.is_running()) == (True, True)
    gate.set()
    assert first.synchronize(WAIT_S), "its late end is seen"
    assert second.synchronize(WAIT_S)
    assert not second.is_running()
    assert hung.close(WAIT_S)
    assert behind.close(WAIT_S)


FORKED = """
import asyncio, os, sys
import asynctrt
from asynctrt.devices.host import HostDevice
from tests.models import double_model, rows

device = HostDevice(in_place="never")
async def main():
    async with asynctrt.open(double_model(), device=device) as engine:
        await engine.infer(rows(1))
asyncio.run(main())
stream = device.create_stream()
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for use in (lambda: asyncio.run(main()), lambda: stream.launch(print, label="work")):
    try:
        use()
    except asynctrt.UsageError as error:
        print(error, flush=True)
assert stream.close(1.0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_forked_child_is_told_that_the_device_is_its_parents():
    """Its threads do not exist there, so that work would wait for ever."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert " was made in process " in line
        assert "forked from it" in line
        assert "start method 'spawn'" in line


def test_a_stream_that_waits_holds_no_thread():
    device = HostDevice(threads=1, in_place="never")
    waits, goes_on = device.create_stream(), device.create_stream()
    gate, event = threading.Event(), device.create_event()
    goes_on.launch(partial(hold, gate), label="gate")
    goes_on.record(event)
    waits.wait(event)
    done = device.create_event()
    waits.record(done)
    third = device.create_stream()
    gate.set()
    finish(third, device)
    assert done.synchronize(WAIT_S)
    assert all(stream.close(WAIT_S) for stream in (waits, goes_on, third))


class Elsewhere(Unfinished):
    """Work that begins something and leaves it unfinished until the test ends it."""

    def __init__(self):
        self.finish = None
        self.cancelled = 0
        self.started = threading.Event()

    def __call__(self):
        return self

    def start(self, finish):
        self.finish = finish
        self.started.set()

    def cancel(self):
        self.cancelled += 1
        self.finish(RuntimeError("cancelled"))


class TestWorkThatIsUnfinished:
    @pytest.fixture(params=["always", "never", "auto"])
    def device(self, request):
        return HostDevice(threads=1, in_place=request.param)

    def test_what_follows_waits_for_it_and_holds_no_thread(self, device):
        streams = [device.create_stream() for _ in range(4)]
        works = [Elsewhere() for _ in streams]
        done = []
        for number, (stream, work) in enumerate(zip(streams, works, strict=True)):
            stream.launch(work, label="begins")
            stream.launch(partial(done.append, number), label="follows")
        for work in works:  # Four of them at a time, with one thread.
            assert work.started.wait(WAIT_S)
        assert done == []
        ends = [device.create_event() for _ in streams]
        for stream, end in zip(streams, ends, strict=True):
            stream.record(end)
        for work, end in reversed(list(zip(works, ends, strict=True))):
            assert not end.query()
            work.finish(None)
            assert end.synchronize(WAIT_S)
            assert end.error is None
        assert done == [3, 2, 1, 0]
        assert all(stream.close(WAIT_S) for stream in streams)

    def test_its_error_is_that_of_the_next_event(self, device):
        stream = device.create_stream()
        work = Elsewhere()
        stream.launch(work, label=None)
        end = device.create_event()
        stream.record(end)
        assert work.started.wait(WAIT_S)
        work.finish(ValueError("no"))
        assert end.synchronize(WAIT_S)
        assert str(end.error) == "no"
        assert finish(stream, device).error is None
        assert stream.close(WAIT_S)

    def test_what_is_over_at_once_or_cannot_start(self, device):
        class Over(Elsewhere):
            def start(self, finish):
                finish(None)

        class Refused(Elsewhere):
            def start(self, finish):
                raise ValueError("no")

        stream = device.create_stream()
        stream.launch(Over(), label=None)
        assert finish(stream, device).error is None
        stream.launch(Refused(), label=None)
        assert str(finish(stream, device).error) == "no"
        assert stream.close(WAIT_S)

    @pytest.mark.parametrize("way", ["abandon", "close"])
    def test_it_is_cancelled_with_its_stream(self, device, way):
        stream = device.create_stream()
        work = Elsewhere()
        stream.launch(work, label=None)
        end = device.create_event()
        stream.record(end)
        assert work.started.wait(WAIT_S)
        assert end.is_running()
        if way == "abandon":
            stream.abandon()
        assert stream.close(WAIT_S)
        assert work.cancelled
        assert str(end.error) == "cancelled"


def test_a_stream_whose_work_hangs_is_not_waited_for_longer_than_asked():
    device = HostDevice(in_place="never")
    stream, gate = device.create_stream(), threading.Event()
    stream.launch(partial(hold, gate), label="hangs")
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
    stream.launch(partial(hold, gate), label="gate")
    stream.record(event)
    with pytest.raises(DeviceError, match="recorded again"):
        stream.record(event)
    gate.set()
    assert event.synchronize(WAIT_S)
    assert stream.close(WAIT_S)


def test_an_event_is_done_until_it_is_recorded():
    event, stream = HostEvent(), HostDevice(in_place="never").create_stream()
    gate = threading.Event()
    assert repr(event) == "<HostEvent done>"
    stream.launch(partial(hold, gate), label="gate")
    stream.record(event)
    assert repr(event) == "<HostEvent pending>"
    gate.set()
    assert stream.close(WAIT_S)
    assert repr(event) == "<HostEvent done>"


def test_memory_is_aligned_as_that_of_a_gpu():
    buffers = [HostBuffer(nbytes) for nbytes in (1, 100, 4096, 1 << 20) for _ in range(8)]
    assert {buffer.address % 512 for buffer in buffers} == {0}


def test_memory_that_is_not_there_is_a_typed_error():
    with pytest.raises(DeviceMemoryError, match="Lower max_rows or contexts"):
        HostBuffer(1 << 60)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_device_without_threads(threads):
    with pytest.raises(OptionsError, match="threads must be at least 1"):
        HostDevice(threads=threads)


def test_cores():
    assert cores() >= 1
