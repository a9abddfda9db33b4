"""Alarms: never before their time, once for each, and not after closing. On both loops."""

import asyncio
import os
import resource
import sys
import threading
from contextvars import ContextVar, copy_context

import pytest

from asynctrt._util import clock
from asynctrt._util.alarm import Alarm
from asynctrt.errors import DeviceUnavailableError

pytestmark = pytest.mark.anyio
WAIT_S = 20


HOUR_NS = 3600 * 10**9


class Bell:
    """An alarm that counts its calls and wakes who waits for one."""

    def __init__(self):
        self.rung = 0
        self.rung_ns = 0
        self._next = asyncio.Event()
        self.alarm = Alarm(asyncio.get_running_loop(), self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.alarm.close()

    def __call__(self):
        self.rung += 1
        self.rung_ns = clock.now_ns()
        self._next.set()

    def set(self, delay_ns):
        """Set it, and return the time that it is set to."""
        when_ns = clock.now_ns() + delay_ns
        self.alarm.set(when_ns)
        return when_ns

    async def wait(self):
        await asyncio.wait_for(self._next.wait(), WAIT_S)
        self._next.clear()


@pytest.mark.parametrize("delay_ns", [0, 300_000, 1_400_000, 12_000_000])
async def test_it_rings_and_not_before_its_time(delay_ns):
    with Bell() as bell:
        when_ns = bell.set(delay_ns)
        await bell.wait()
        assert bell.rung_ns >= when_ns


@pytest.mark.parametrize("later_ns", [HOUR_NS, 2**62, 2**63, 10**28])
@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_times_the_earlier_one_counts(later_ns, order):
    with Bell() as bell:
        for delay_ns in (100_000, later_ns)[::order]:
            bell.set(delay_ns)
        await bell.wait()
        assert bell.rung == 1


async def test_it_can_be_set_again():
    with Bell() as bell:
        for rung in range(1, 4):
            bell.set(50_000)
            await bell.wait()
            assert bell.rung == rung


async def test_a_closed_alarm_never_rings():
    with Bell() as bell, Bell() as after:
        bell.set(50_000)
        bell.alarm.close()
        bell.alarm.close()
        bell.set(0)
        after.set(5_000_000)
        await after.wait()
        assert bell.rung == 0


async def test_it_never_rings_from_within_set():
    """Whoever sets it is in the middle of something."""
    with Bell() as bell:
        bell.alarm.set(0)
        assert bell.rung == 0
        await bell.wait()


@pytest.mark.parametrize("delay_ns", [0, 8_000_000])
async def test_it_rings_in_the_context_that_it_was_given(delay_ns):
    """Not in that of whoever happens to set it."""
    who, seen, rung = ContextVar("who", default="nobody"), [], asyncio.Event()
    own = copy_context()
    own.run(who.set, "owner")

    def ring():
        seen.append(who.get())
        rung.set()

    who.set("caller")
    alarm = Alarm(asyncio.get_running_loop(), ring, context=own)
    alarm.set(clock.now_ns() + delay_ns)
    await asyncio.wait_for(rung.wait(), WAIT_S)
    assert seen == ["owner"]
    alarm.close()


async def test_it_rings_on_a_loop_that_is_never_idle():
    loop = asyncio.get_running_loop()
    busy = True

    def keep_busy():
        if busy:
            loop.call_soon(keep_busy)

    with Bell() as bell:
        keep_busy()
        bell.set(500_000)
        await bell.wait()
        busy = False


async def test_to_set_it_lets_no_other_thread_run():
    """Who lets go of the GIL for a call that returns at once may wait for long until it has it again."""
    gate, ran = threading.Lock(), []
    gate.acquire()

    def run():
        with gate:
            ran.append(True)

    alarm = Alarm(asyncio.get_running_loop(), lambda: None)
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
        Alarm(asyncio.get_running_loop(), lambda: None).close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_without_a_descriptor_the_error_says_so():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(DeviceUnavailableError, match="ulimit -n"):
            Alarm(asyncio.get_running_loop(), lambda: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
