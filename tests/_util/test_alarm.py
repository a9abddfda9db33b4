"""Alarms: never before their time, once for each, and not after closing. Both kinds, on both loops."""

import asyncio
import os
import sys
import threading
from contextvars import ContextVar, copy_context

import pytest

from asynctrt._util import alarm as alarms
from asynctrt._util import clock
from asynctrt._util.alarm import TickAlarm, TimerfdAlarm, create_alarm

pytestmark = pytest.mark.anyio
WAIT_S = 20


class Bell:
    """Counts the calls and wakes who waits for one."""

    def __init__(self):
        self.rung = 0
        self.rung_ns = 0
        self._next = asyncio.Event()

    def __call__(self):
        self.rung += 1
        self.rung_ns = clock.now_ns()
        self._next.set()

    async def wait(self):
        await asyncio.wait_for(self._next.wait(), WAIT_S)
        self._next.clear()


MAKERS = {
    "timerfd": lambda bell: TimerfdAlarm(asyncio.get_running_loop(), bell),
    "ticks": lambda bell: TickAlarm(asyncio.get_running_loop(), bell, clock.now_ns),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.mark.parametrize("delay_ns", [0, 300_000, 1_400_000, 12_000_000])
async def test_it_rings_and_not_before_its_time(make, delay_ns):
    bell = Bell()
    alarm = make(bell)
    when_ns = clock.now_ns() + delay_ns
    alarm.set(when_ns)
    await bell.wait()
    assert bell.rung_ns >= when_ns
    alarm.close()


@pytest.mark.parametrize("when_ns", [2**62, 2**63, 10**28])
async def test_a_time_that_is_never_reached(make, when_ns):
    bell = Bell()
    alarm = make(bell)
    alarm.set(when_ns)
    alarm.set(clock.now_ns() + 100_000)
    await bell.wait()
    assert bell.rung == 1
    alarm.close()


async def test_an_earlier_time_replaces_a_later_one(make):
    bell = Bell()
    alarm = make(bell)
    alarm.set(clock.now_ns() + 3600 * 10**9)
    alarm.set(clock.now_ns() + 100_000)
    await bell.wait()
    assert bell.rung == 1
    alarm.close()


async def test_a_later_time_does_not_replace_an_earlier_one(make):
    bell = Bell()
    alarm = make(bell)
    alarm.set(clock.now_ns() + 100_000)
    alarm.set(clock.now_ns() + 3600 * 10**9)
    await bell.wait()
    alarm.close()


async def test_it_can_be_set_again(make):
    bell = Bell()
    alarm = make(bell)
    for rung in range(1, 4):
        alarm.set(clock.now_ns() + 50_000)
        await bell.wait()
        assert bell.rung == rung
    alarm.close()


async def test_a_closed_alarm_never_rings(make):
    bell, other = Bell(), Bell()
    alarm = make(bell)
    alarm.set(clock.now_ns() + 50_000)
    alarm.close()
    alarm.close()
    alarm.set(clock.now_ns())
    after = make(other)
    after.set(clock.now_ns() + 5_000_000)
    await other.wait()
    assert bell.rung == 0
    after.close()


async def test_it_never_rings_from_within_set(make):
    """Whoever sets it is in the middle of something."""
    bell = Bell()
    alarm = make(bell)
    alarm.set(0)
    assert bell.rung == 0
    await bell.wait()
    alarm.close()


@pytest.mark.parametrize("delay_ns", [0, 8_000_000])
@pytest.mark.parametrize("kind", [None, OSError])
async def test_it_rings_in_the_context_that_it_was_given(monkeypatch, kind, delay_ns):
    """Not in that of whoever happens to set it."""
    if kind is not None:
        monkeypatch.setattr(alarms, "TimerfdAlarm", Refusing)
    who, seen, rung = ContextVar("who", default="nobody"), [], asyncio.Event()
    own = copy_context()
    own.run(who.set, "owner")

    def ring():
        seen.append(who.get())
        rung.set()

    who.set("caller")
    alarm = create_alarm(asyncio.get_running_loop(), ring, clock.now_ns, context=own)
    alarm.set(clock.now_ns() + delay_ns)
    await asyncio.wait_for(rung.wait(), WAIT_S)
    assert seen == ["owner"]
    alarm.close()


class Refusing:
    """Stands for a platform without a timerfd."""

    def __init__(self, *args):
        raise OSError


async def test_it_rings_on_a_loop_that_is_never_idle(make):
    bell = Bell()
    alarm = make(bell)
    loop = asyncio.get_running_loop()
    busy = True

    def keep_busy():
        if busy:
            loop.call_soon(keep_busy)

    keep_busy()
    alarm.set(clock.now_ns() + 500_000)
    await bell.wait()
    busy = False
    alarm.close()


async def test_to_set_it_lets_no_other_thread_run():
    """Who lets go of the GIL for a call that returns at once may wait for long until it has it again."""
    gate, ran = threading.Lock(), []
    gate.acquire()

    def run():
        with gate:
            ran.append(True)

    alarm = TimerfdAlarm(asyncio.get_running_loop(), lambda: None)
    thread = threading.Thread(target=run)
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(WAIT_S)
    try:
        gate.release()
        awake_ns = clock.now_ns() + 20_000_000  # Until then it has come to wait for the GIL.
        while clock.now_ns() < awake_ns:
            pass
        for sooner in range(2000):
            alarm.set(awake_ns + 10**12 - sooner)
        assert not ran
    finally:
        sys.setswitchinterval(interval_s)
        alarm.close()
    thread.join(WAIT_S)
    assert ran


async def test_no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        create_alarm(asyncio.get_running_loop(), lambda: None, clock.now_ns).close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_without_timerfd_ticks_do_it(monkeypatch):
    def missing(*_, **__):
        raise OSError("no such library")

    monkeypatch.setattr(alarms, "libc", missing)
    bell = Bell()
    alarm = create_alarm(asyncio.get_running_loop(), bell, clock.now_ns)
    assert isinstance(alarm, TickAlarm)
    alarm.set(clock.now_ns())
    await bell.wait()
    alarm.close()
