"""The copiers: a copy runs in a thread, and its end is told on the loop."""

import asyncio
import threading
from functools import partial

import pytest

from asynctrt._util import clock
from asynctrt.runtime.completion import Reaper
from asynctrt.runtime.jobs import Copiers, Jobs, SharedWork

pytestmark = pytest.mark.anyio
WAIT_S = 20


class Told:
    """Copiers, and what they told in which order."""

    def __init__(self, **kw):
        self.reaper = Reaper(asyncio.get_running_loop(), clock.now_ns)
        self.copiers = Copiers(self.reaper, clock.now_ns, **kw)
        self.told = []
        self._changed = asyncio.Event()

    def submit(self, copy, name="copy"):
        self.copiers.copy(copy, 1000, partial(self._note, name))

    def _note(self, name, error):
        self.told.append((name, error, threading.get_ident()))
        self._changed.set()

    async def until(self, count):
        while len(self.told) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), WAIT_S)

    def close(self):
        self.reaper.close()
        return self.copiers.close(WAIT_S)


async def test_a_copy_runs_in_a_thread_and_its_end_is_told_on_the_loop():
    made, ran_in = Told(), []
    made.submit(lambda: ran_in.append(threading.get_ident()))
    await made.until(1)
    assert made.told == [("copy", None, threading.get_ident())]
    assert ran_in != [threading.get_ident()]
    assert made.close()


@pytest.mark.parametrize("fails", [(), (1,), (0, 2)])
async def test_the_end_of_parts_is_told_once_when_all_of_them_have_ended(fails):
    made, ended, all_there = Told(threads_max=3), [], threading.Barrier(3, timeout=WAIT_S)

    def part(number):
        all_there.wait()
        ended.append(number)
        if number in fails:
            raise ValueError(number)

    made.copiers.copy_in_parts(
        [partial(part, number) for number in range(3)], 3000, partial(made._note, "all")
    )
    await made.until(1)
    assert sorted(ended) == [0, 1, 2]
    ((name, error, thread),) = made.told
    assert (name, thread) == ("all", threading.get_ident())
    assert error is None if not fails else error.args[0] in fails
    assert made.close()


async def test_parts_are_done_by_one_thread_where_the_system_refuses_others(monkeypatch):
    """Who asked must not take it for a failure while that thread works."""
    made, done, scheduled = Told(threads_max=3), [], []
    schedule = made.copiers._threads.schedule

    def refuse_all_but_the_first(job):
        scheduled.append(job)
        if len(scheduled) > 1:
            raise RuntimeError("can't start new thread")
        schedule(job)

    monkeypatch.setattr(made.copiers._threads, "schedule", refuse_all_but_the_first)
    made.copiers.copy_in_parts(
        [partial(done.append, number) for number in range(3)], 3000, partial(made._note, "all")
    )
    await made.until(1)
    assert len(scheduled) == 3
    assert done == [0, 1, 2]
    assert made.told[0][1] is None
    assert made.close()


@pytest.mark.parametrize(
    "kind", [ValueError, MemoryError, KeyboardInterrupt, SystemExit, asyncio.CancelledError]
)
async def test_what_a_copy_raises_is_told_and_others_go_on(kind):
    made, broken = Told(threads_max=1), kind("broken")

    def fail():
        raise broken

    made.submit(fail, "bad")
    made.submit(lambda: None, "good")
    await made.until(2)
    assert [(name, error) for name, error, _ in made.told] == [("bad", broken), ("good", None)]
    assert made.close()


async def test_copies_run_side_by_side_up_to_the_bound():
    made, together = Told(threads_max=3), threading.Barrier(3)
    before = threading.active_count()
    for _ in range(6):
        made.submit(partial(together.wait, WAIT_S))
    await made.until(6)
    assert [error for _, error, _ in made.told] == [None] * 6
    assert threading.active_count() == before + 3
    assert made.close()
    assert threading.active_count() == before


async def test_no_thread_is_there_before_the_first_copy():
    before = threading.active_count()
    made = Told()
    assert threading.active_count() == before
    assert made.close()
    assert made.close()


async def test_a_loop_that_is_never_idle_lends_the_gil_to_a_copy_that_waits_for_it(monkeypatch):
    """As for batches: the reaper's guard nudges what it watches."""
    monkeypatch.setattr(clock, "own_cpu_ns", clock.now_ns)
    made, lent, gate = Told(), [], threading.Event()

    def lend():
        lent.append(True)
        gate.set()
        return True

    monkeypatch.setattr(made.copiers._threads, "lend_gil", lend)
    made.submit(partial(gate.wait, WAIT_S))
    async with asyncio.timeout(WAIT_S):
        while not made.told:
            await asyncio.sleep(0)
    assert lent
    assert made.close()


async def test_a_copy_that_does_not_end_is_not_waited_for_longer_than_asked():
    made, gate, begun = Told(), threading.Event(), threading.Event()

    def hang():
        begun.set()
        gate.wait(WAIT_S)

    made.submit(hang)
    assert begun.wait(WAIT_S)
    made.reaper.close()
    assert not made.copiers.close(0.01)
    gate.set()
    assert not made.told


def test_work_is_shared_with_those_who_help():
    reached, go_on = threading.Barrier(3), []
    work = SharedWork([lambda: go_on.append(reached.wait(WAIT_S)) for _ in range(3)])
    helpers = [threading.Thread(target=work.help) for _ in range(2)]
    for helper in helpers:
        helper.start()
    work.do()  # None of the three gets further alone.
    assert sorted(go_on) == [0, 1, 2]
    for helper in helpers:
        helper.join(WAIT_S)


def test_work_is_done_though_nobody_helps():
    done = []
    work = SharedWork([partial(done.append, part) for part in range(4)])
    assert len(work) == 4
    work.do()
    work.help()
    assert sorted(done) == [0, 1, 2, 3]


def test_what_a_helper_raises_is_told_when_all_is_done():
    begun, done = threading.Event(), []

    def fail():
        begun.set()
        raise ValueError("no")

    work = SharedWork([fail, partial(done.append, 1), partial(done.append, 2)])
    helper = threading.Thread(target=work.help)
    helper.start()
    assert begun.wait(WAIT_S)
    with pytest.raises(ValueError, match="no"):
        work.do()
    assert sorted(done) == [1, 2]
    helper.join(WAIT_S)


async def test_nobody_is_told_of_help():
    reaper = Reaper(asyncio.get_running_loop(), clock.now_ns)
    jobs, helped = Jobs("test", 2, reaper, clock.now_ns), threading.Event()
    jobs.assist(helped.set)
    assert await asyncio.to_thread(helped.wait, WAIT_S)
    assert jobs.close(WAIT_S)
    reaper.close()
