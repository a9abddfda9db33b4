"""The reaper: finds what is done on devices that call and on devices that do not, and lets the loop sleep."""

import asyncio
import itertools

import pytest

from asynctrt import clock
from asynctrt.devices.host import HostEvent
from asynctrt.runtime.reaper import (
    BUSY_TICK_NS,
    GUARD_NS,
    LATE_NS,
    LATE_PAUSE_NS_MAX,
    QUIET_TICKS,
    Reaper,
)
from asynctrt.testing import LatchDevice

pytestmark = pytest.mark.anyio
WAIT_S = 20


class SilentEvent(HostEvent):
    """An event of a device that cannot call, as CUDA's. Counts how often it was asked."""

    __slots__ = ("queries",)

    def __init__(self):
        super().__init__()
        self.queries = 0

    def query(self):
        self.queries += 1
        return super().query()

    def on_done(self, callback):
        return False


class Waiter:
    """A reaper, events held by a latch, and the order in which they were found."""

    def __init__(self, *, waiting="adaptive", now_ns=clock.now_ns):
        self.device = LatchDevice()
        self.reaper = Reaper(asyncio.get_running_loop(), now_ns, waiting=waiting)
        self.found = []
        self._changed = asyncio.Event()

    def pend(self, event):
        """A stream that reaches ``event`` when it is released."""
        stream = self.device.create_stream()
        stream.launch(lambda: None, label="held")
        stream.record(event)

    def watch(self, event, name, expected_ns=None):
        self.pend(event)
        self.reaper.watch(event, lambda: self._note(name), expected_ns=expected_ns)

    def _note(self, name):
        self.found.append(name)
        self._changed.set()

    async def until(self, count):
        while len(self.found) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), WAIT_S)


async def ticks(count):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("waiting", ["adaptive", "spin", "thread"])
@pytest.mark.parametrize("kind", [HostEvent, SilentEvent])
@pytest.mark.parametrize("expected_ns", [None, 0, 300_000, 3_000_000])
async def test_what_is_done_is_found_once(waiting, kind, expected_ns):
    waiter = Waiter(waiting=waiting)
    for name in range(3):
        waiter.watch(kind(), name, expected_ns)
    await ticks(5)
    assert waiter.found == []
    waiter.device.release(2)
    await waiter.until(2)
    waiter.device.release()
    await waiter.until(3)
    await ticks(5)
    assert sorted(waiter.found) == [0, 1, 2]
    assert waiter.found[2] == 2
    waiter.reaper.close()


async def test_an_event_that_is_done_already_is_found_at_the_next_tick():
    waiter = Waiter()
    for name, event in enumerate([HostEvent(), SilentEvent()]):
        waiter.reaper.watch(event, lambda name=name: waiter._note(name), expected_ns=10**12)
    await ticks(3)
    assert sorted(waiter.found) == [0, 1]
    waiter.reaper.close()


async def test_before_the_expected_end_nobody_looks():
    waiter, event = Waiter(), SilentEvent()
    waiter.watch(event, "a", expected_ns=3600 * 10**9)
    looks = event.queries
    await ticks(50)
    assert event.queries == looks + QUIET_TICKS  # Until it knew that nobody else keeps the loop awake.
    waiter.reaper.close()


async def test_from_the_expected_end_on_there_is_a_look_every_tick():
    waiter, event = Waiter(), SilentEvent()
    waiter.watch(event, "a", expected_ns=0)
    looks = event.queries
    await ticks(50)
    assert event.queries - looks >= 45
    waiter.device.release()
    await ticks(2)
    assert waiter.found == ["a"]
    waiter.reaper.close()


async def test_on_a_loop_that_others_keep_busy_there_is_a_look_every_tick():
    time_ns = itertools.count(0, 2 * BUSY_TICK_NS)
    waiter, event = Waiter(now_ns=lambda: next(time_ns)), SilentEvent()
    waiter.watch(event, "a", expected_ns=3600 * 10**9)
    looks = event.queries
    await ticks(50)
    assert event.queries >= looks + 50
    waiter.device.release()
    await ticks(1)
    assert waiter.found == ["a"]
    waiter.reaper.close()


async def test_what_does_not_end_is_given_up():
    waiter, hung = Waiter(), []
    event = SilentEvent()
    waiter.pend(event)
    waiter.reaper.watch(
        event,
        lambda: hung.append("done"),
        expected_ns=0,
        hung_after_ns=1_000_000,
        on_hung=lambda: hung.append("hung"),
    )
    for _ in range(100_000):
        if hung:
            break
        await asyncio.sleep(0.001)
    assert hung == ["hung"]
    waiter.device.release()
    await ticks(5)
    assert hung == ["hung"]
    waiter.reaper.close()


async def test_spinning_looks_every_tick_whatever_is_expected():
    waiter, event = Waiter(waiting="spin"), SilentEvent()
    waiter.watch(event, "a", expected_ns=3600 * 10**9)
    looks = event.queries
    await ticks(50)
    assert event.queries - looks >= 45
    waiter.reaper.close()


async def test_what_is_very_late_is_looked_at_with_pauses():
    shift_ns = 0
    waiter, event = Waiter(now_ns=lambda: clock.now_ns() + shift_ns), SilentEvent()
    waiter.watch(event, "a", expected_ns=0)
    shift_ns = 3600 * 10**9
    await ticks(3)
    looks = event.queries
    await ticks(50)
    assert event.queries - looks <= 2
    waiter.reaper.close()


async def test_what_is_late_is_found_all_the_same():
    waiter = Waiter()
    waiter.watch(SilentEvent(), "a", expected_ns=0)
    late_ns = clock.now_ns() + LATE_NS + LATE_PAUSE_NS_MAX
    while clock.now_ns() < late_ns:
        await ticks(1)
    waiter.device.release()
    await waiter.until(1)
    waiter.reaper.close()


async def test_while_a_calling_device_works_the_loop_sleeps():
    waiter, event = Waiter(), HostEvent()
    waiter.watch(event, "a")
    await ticks(3)
    assert not waiter.reaper._tick_is_scheduled
    waiter.device.release()
    await waiter.until(1)
    waiter.reaper.close()


class StuckEvent(HostEvent):
    """An event whose thread cannot report until it is nudged often enough."""

    __slots__ = ("left", "release")

    def nudge(self):
        self.left -= 1
        if self.left == 0:
            self.release()
        return True


async def test_on_a_busy_loop_the_guard_nudges_what_cannot_report_by_itself(monkeypatch):
    monkeypatch.setattr(clock, "own_cpu_ns", clock.now_ns)
    waiter, event = Waiter(), StuckEvent()
    event.left, event.release = 5, waiter.device.release
    waiter.watch(event, "a")
    async with asyncio.timeout(WAIT_S):
        while not waiter.found:
            await ticks(1)
    assert event.left == 0
    waiter.reaper.close()


async def test_on_an_idle_loop_nobody_is_nudged(monkeypatch):
    monkeypatch.setattr(clock, "own_cpu_ns", lambda: 0)
    waiter, event = Waiter(), StuckEvent()
    event.left, event.release = 1, waiter.device.release
    waiter.watch(event, "a")
    end_ns = clock.now_ns() + 5 * GUARD_NS
    while clock.now_ns() < end_ns:
        await ticks(1)
    assert event.left == 1, "an idle loop keeps the GIL from nobody"
    waiter.device.release()
    await waiter.until(1)
    waiter.reaper.close()


async def test_after_closing_nothing_is_reported():
    waiter = Waiter()
    waiter.watch(HostEvent(), "a")
    waiter.reaper.close()
    waiter.device.release()
    await ticks(5)
    assert waiter.found == []


def test_an_event_that_is_done_after_the_loop_was_closed_harms_nobody():
    loop = asyncio.new_event_loop()
    device = LatchDevice()
    reaper = Reaper(loop, clock.now_ns, waiting="adaptive")
    event, stream = device.create_event(), device.create_stream()
    stream.launch(lambda: None, label="held")
    stream.record(event)
    reaper.watch(event, lambda: None, expected_ns=None)
    reaper.close()
    loop.close()
    device.release()
    assert event.query()
