"""The reaper: finds what is done on devices that call and on devices that do not, and lets the loop sleep."""

import asyncio
import itertools
from contextvars import ContextVar, copy_context
from functools import partial

import pytest

from asynctrt._util import clock
from asynctrt.devices.host import HostEvent
from asynctrt.runtime.completion import Reaper
from asynctrt.runtime.completion.callbacks import GUARD_NS, GUARD_NS_MAX, HELP_EVENTS, HELP_NS, Guard
from asynctrt.runtime.completion.polling import BUSY_TICK_NS, LATE_NS, LATE_PAUSE_NS_MAX, QUIET_TICKS
from asynctrt.runtime.completion.watcher import CHECK_NS_MAX, CHECKS, Watch, Watcher
from asynctrt.testing import LatchDevice
from tests.helpers import until

pytestmark = pytest.mark.anyio
WAIT_S = 20


class SilentEvent(HostEvent):
    """An event of a device that cannot call, as CUDA's. Counts its queries."""

    __slots__ = ("queries",)

    def __init__(self):
        super().__init__()
        self.queries = 0

    def query(self):
        self.queries += 1
        return super().query()

    def on_done(self, callback):
        return False


class Stopped:
    """A time that stands still until the test moves it on, so that no tick seems to take any."""

    def __init__(self):
        self.ns = clock.now_ns()

    def __call__(self):
        return self.ns


class Waiter:
    """A reaper, events held by a latch, and the order in which they were found."""

    def __init__(self, *, now_ns=clock.now_ns, context=None):
        self.device = LatchDevice()
        self.reaper = Reaper(asyncio.get_running_loop(), now_ns, context=context)
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


@pytest.mark.parametrize("kind", [HostEvent, SilentEvent])
@pytest.mark.parametrize("expected_ns", [None, 0, 300_000, 3_000_000])
async def test_what_is_done_is_found_once(kind, expected_ns):
    waiter = Waiter()
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


async def test_before_the_expected_end_there_is_no_look():
    waiter, event = Waiter(now_ns=Stopped()), SilentEvent()
    waiter.watch(event, "a", expected_ns=3600 * 10**9)
    looks = event.queries
    await ticks(50)
    assert event.queries == looks + QUIET_TICKS  # Until it knew that no other work keeps the loop awake.
    waiter.reaper.close()


async def test_from_the_expected_end_on_there_is_a_look_every_tick():
    waiter, event = Waiter(now_ns=Stopped()), SilentEvent()
    waiter.watch(event, "a", expected_ns=0)
    looks = event.queries
    await ticks(50)
    assert event.queries - looks >= 45
    waiter.device.release()
    await ticks(2)
    assert waiter.found == ["a"]
    waiter.reaper.close()


async def test_of_many_only_those_that_may_be_done_are_looked_at():
    """Each query costs as much as all else of a look."""
    waiter = Waiter(now_ns=Stopped())
    events = [SilentEvent() for _ in range(8)]
    for number, event in enumerate(events):
        waiter.watch(event, number, expected_ns=0 if number == 3 else (1 + number) * 10**9)
    looks = [event.queries for event in events]
    await ticks(50)
    queries = [event.queries - before for event, before in zip(events, looks, strict=True)]
    assert queries[3] >= 45
    assert sum(queries) == queries[3], "the others are not due, nor next"
    waiter.reaper.close()


def test_each_event_is_queried_once_a_look():
    watcher, device = Watcher(), LatchDevice()
    for number in range(3):
        stream, event = device.create_stream(), SilentEvent()
        stream.launch(lambda: None, label="held")
        stream.record(event)
        watch = Watch(
            event,
            lambda: None,
            start_ns=0,
            expected_ns=0,
            hung_after_ns=None,
            on_hung=None,
            order_group=None,
        )
        watch.look_ns = number
        watcher.watches.append(watch)
    assert watcher.look(10, at_all=False) == ([], [])
    assert [watch.event.queries for watch in watcher.watches] == [1, 1, 1]
    assert watcher.look(1, at_all=False) == ([], [])
    assert [watch.event.queries for watch in watcher.watches] == [2, 2, 1]


async def test_what_ends_earlier_than_expected_is_found_with_what_was_expected_to_end_next():
    waiter = Waiter(now_ns=Stopped())
    for number in range(4):
        waiter.watch(SilentEvent(), number, expected_ns=0 if number == 3 else (1 + number) * 10**9)
    waiter.device.release(4)
    await ticks(2)
    assert waiter.found == [0, 1, 2, 3]
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


async def test_what_does_not_end_is_given_up_and_told_once_it_ends_after_all():
    waiter, told = Waiter(), []
    event = SilentEvent()
    waiter.pend(event)
    waiter.reaper.watch(
        event,
        lambda: told.append("done"),
        expected_ns=0,
        hung_after_ns=1_000_000,
        on_hung=lambda: told.append("hung"),
    )
    await until(lambda: told)
    await ticks(5)
    assert told == ["hung"]
    waiter.device.release()
    await until(lambda: len(told) > 1)
    await ticks(5)
    assert told == ["hung", "done"]
    waiter.reaper.close()


class Held:
    """An event of which the test says in what state it is."""

    def __init__(self):
        self.state = "waits"

    def __repr__(self):
        return f"<Held {self.state}>"

    def query(self):
        return self.state == "done"

    def is_running(self):
        return self.state == "runs"

    def on_done(self, callback):
        return False


HUNG_NS = 160_000_000
STEP_NS = HUNG_NS // CHECKS


class Watching:
    """A watcher, events with names, and a time that the test moves on."""

    def __init__(self):
        self.watcher = Watcher()
        self.now_ns = 0

    def add(self, name, group=None):
        event = Held()
        watch = Watch(
            event,
            name,
            start_ns=self.now_ns,
            expected_ns=0,
            hung_after_ns=HUNG_NS,
            on_hung=name,
            order_group=group,
        )
        self.watcher.watches.append(watch)
        return event

    def look(self, pause_ns=STEP_NS):
        self.now_ns += pause_ns
        done, hung = self.watcher.look(self.now_ns, at_all=True)
        return [watch.on_done for watch in done], [watch.on_hung for watch in hung]

    def looks_until_hung(self, pause_ns=STEP_NS):
        for count in range(1, 1000):
            done, hung = self.look(pause_ns)
            assert not done
            if hung:
                return count, hung
        raise AssertionError("it was never given up")


def test_the_time_in_which_work_waits_for_its_turn_does_not_count():
    watching = Watching()
    event = watching.add("a")
    for _ in range(10 * CHECKS):
        assert watching.look() == ([], [])
    event.state = "runs"
    assert watching.looks_until_hung() == (CHECKS + 1, ["a"])


def test_the_time_in_which_nothing_was_checked_does_not_count():
    """The loop was blocked, or the process was stopped, and so may the work have been."""
    watching = Watching()
    event = watching.add("a")
    event.state = "runs"
    watching.look()
    for _ in range(CHECKS // 2 - 1):
        assert watching.look(100 * HUNG_NS) == ([], [])
    assert watching.look(100 * HUNG_NS) == ([], ["a"])


def test_work_that_runs_for_its_time_is_given_up_within_an_eighth_more():
    watching = Watching()
    watching.add("a").state = "runs"
    count, _ = watching.looks_until_hung(STEP_NS // 10)
    assert HUNG_NS <= count * STEP_NS // 10 <= HUNG_NS * 9 // 8


def test_only_the_first_of_an_order_group_counts_and_it_takes_the_others_along():
    watching = Watching()
    first, second, other = watching.add("a", 1), watching.add("b", 1), watching.add("c", 2)
    first.state = second.state = "runs"
    assert watching.looks_until_hung() == (CHECKS + 1, ["a", "b"])
    other.state = "runs"
    first.state = second.state = "done"
    assert watching.look() == (["a", "b"], [])
    other.state = "done"
    assert watching.look() == (["c"], [])
    assert watching.watcher.is_empty


def test_what_follows_in_an_order_group_has_its_own_time():
    watching = Watching()
    first, second = watching.add("a", 1), watching.add("b", 1)
    first.state = second.state = "runs"
    for _ in range(CHECKS - 1):
        assert watching.look() == ([], [])
    first.state = "done"
    assert watching.look() == (["a"], [])
    assert watching.looks_until_hung() == (CHECKS, ["b"])


def test_a_check_is_never_far_away():
    watching = Watching()
    watching.add("a")
    assert watching.watcher.next_ns() == STEP_NS
    long = Watch(
        Held(), None, start_ns=0, expected_ns=0, hung_after_ns=10**15, on_hung=None, order_group=None
    )
    assert long.check_ns == CHECK_NS_MAX


@pytest.mark.parametrize("kind", [HostEvent, SilentEvent])
@pytest.mark.parametrize("broken", [ValueError("broken"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_callback_that_raises_loses_no_other(kind, broken):
    """An error while one batch is answered must not leave the callers of others waiting for ever."""
    told, handled = [], []

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: handled.append(context["exception"])
        )
        waiter, events = Waiter(), [kind() for _ in range(4)]

        def fail():
            told.append("fails")
            raise broken

        for number, event in enumerate(events):
            waiter.pend(event)
            on_done = fail if number == 1 else partial(told.append, number)
            waiter.reaper.watch(event, on_done, expected_ns=0)
        waiter.device.release(4)
        await until(lambda: len(told) == 4)
        event = kind()
        waiter.watch(event, "later", 0)
        waiter.device.release()
        await waiter.until(1)
        waiter.reaper.close()

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    if isinstance(broken, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
    loop.run_until_complete(task)
    loop.close()
    assert told == [0, "fails", 2, 3]
    assert handled == ([] if isinstance(broken, KeyboardInterrupt) else [broken])


@pytest.mark.parametrize("kind", [HostEvent, SilentEvent])
async def test_callbacks_run_in_the_context_that_was_given(kind):
    who, seen = ContextVar("who", default="nobody"), []
    own = copy_context()
    own.run(who.set, "owner")
    who.set("caller")
    waiter = Waiter(context=own)
    for expected_ns in (0, 3_000_000):
        event = kind()
        waiter.pend(event)
        waiter.reaper.watch(event, lambda: seen.append(who.get()), expected_ns=expected_ns)
        waiter.device.release()
    await until(lambda: len(seen) == 2)
    assert seen == ["owner"] * 2
    waiter.reaper.close()


class TestGuard:
    """When it looks whether a thread needs help: often at first, and ever more rarely."""

    def rings(self, batches, duration_ns, *, helped=False, expected_ns=0):
        """Return the times at which a guard looks at batches of this duration that need no help.

        :param helped: whether an earlier batch needed it.
        """
        guard = Guard(lambda: 0)
        guard._help_events = HELP_EVENTS if helped else 0
        watches = []
        for number in range(batches):
            watch = Watch(
                Held(),
                None,
                start_ns=number,
                expected_ns=expected_ns,
                hung_after_ns=None,
                on_hung=None,
                order_group=None,
            )
            watch.calls = True
            guard.begin(watch)
            watches.append(watch)
        times_ns, now_ns = [], 0
        while (now_ns := min(watch.look_ns for watch in watches)) < duration_ns:
            guard.look(watches, now_ns)
            times_ns.append(now_ns)
        return times_ns

    def test_its_pause_grows_up_to_a_bound(self):
        times_ns = self.rings(1, 10**10)
        pauses_ns = [later - before for before, later in itertools.pairwise(times_ns)]
        assert pauses_ns == sorted(pauses_ns)
        assert (pauses_ns[0], pauses_ns[-1]) == (GUARD_NS, GUARD_NS_MAX)

    @pytest.mark.parametrize("expected_ns", [0, 10**6, 10**9])
    def test_after_it_helped_its_pause_grows_too(self, expected_ns):
        """A batch of unknown length, or a late one, does not cost a look every 0.1 ms."""
        times_ns = self.rings(1, 10**10, helped=True, expected_ns=expected_ns)
        assert times_ns[0] == HELP_NS
        pauses_ns = [later - before for before, later in itertools.pairwise(times_ns)]
        assert pauses_ns[-1] == GUARD_NS_MAX
        assert len(times_ns) < 400

    def test_several_batches_ring_no_oftener_than_one(self):
        assert len(self.rings(8, 10**9)) <= len(self.rings(1, 10**9)) + 1


async def test_what_is_very_late_is_looked_at_with_pauses():
    stopped = Stopped()
    waiter, event = Waiter(now_ns=stopped), SilentEvent()
    waiter.watch(event, "a", expected_ns=0)
    stopped.ns += 3600 * 10**9
    await ticks(3)
    looks = event.queries
    await ticks(50)
    assert event.queries == looks
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


async def test_on_an_idle_loop_nothing_is_nudged(monkeypatch):
    monkeypatch.setattr(clock, "own_cpu_ns", lambda: 0)
    waiter, event = Waiter(), StuckEvent()
    event.left, event.release = 1, waiter.device.release
    waiter.watch(event, "a")
    end_ns = clock.now_ns() + 5 * GUARD_NS
    while clock.now_ns() < end_ns:
        await ticks(1)
    assert event.left == 1, "an idle loop does not keep the GIL from any thread"
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


def test_an_event_that_is_done_after_the_loop_was_closed_does_no_harm():
    loop = asyncio.new_event_loop()
    device = LatchDevice()
    reaper = Reaper(loop, clock.now_ns)
    event, stream = device.create_event(), device.create_stream()
    stream.launch(lambda: None, label="held")
    stream.record(event)
    reaper.watch(event, lambda: None, expected_ns=None)
    reaper.close()
    loop.close()
    device.release()
    assert event.query()
