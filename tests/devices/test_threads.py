"""Threads that streams share, which come and go with them, and the hand-over of the GIL."""

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.devices.host.threads import LEND_PAUSE_NS_MAX, LEND_PAUSE_NS_MIN, StreamThreads, _Worker
from tests.devices.test_host import WAIT_S, Clock, finish


class Job:
    """What a worker serves: notes its thread, waits for its gate if it has one, and sets `done`."""

    def __init__(self, gate=None):
        self.gate = gate
        self.begun, self.done = threading.Event(), threading.Event()
        self.thread = None
        self.served = 0

    def serve(self):
        self.thread = threading.current_thread()
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S), "the test never let it go on"
        self.served += 1
        self.done.set()


def shared_threads(threads_max=2, now_ns=None):
    shared = StreamThreads(threads_max, "served", now_ns or Clock())
    shared.join()
    return shared


def spin(condition, nudge=lambda: None):
    """A loop that is never idle, bounded in count and not in time."""
    for _ in range(3_000_000):
        if condition():
            return True
        nudge()
    return condition()


def finish_behind_work(stream, device):
    stream.launch(lambda: None, label="work")
    finish(stream, device)


def test_no_thread_is_there_before_it_is_needed():
    before = threading.active_count()
    shared = shared_threads()
    assert threading.active_count() == before
    assert shared.leave(WAIT_S)


@pytest.mark.parametrize(("threads_max", "jobs"), [(1, 3), (2, 2), (3, 2), (2, 7)])
def test_work_gets_as_many_threads_as_it_can_use_and_no_more(threads_max, jobs):
    gate = threading.Event()
    shared, work = shared_threads(threads_max), [Job(gate) for _ in range(jobs)]
    for job in work:
        shared.schedule(job)
    at_once = min(threads_max, jobs)
    for job in work[:at_once]:
        assert job.begun.wait(WAIT_S)
    assert not any(job.begun.is_set() for job in work[at_once:])
    gate.set()
    for job in work:
        assert job.done.wait(WAIT_S)
    assert len({job.thread for job in work}) <= threads_max
    assert {job.thread.name for job in work} <= {f"served-{number}" for number in range(at_once)}
    assert [job.served for job in work] == [1] * jobs
    assert shared.leave(WAIT_S)


def test_a_thread_that_is_free_is_used_again():
    shared = shared_threads(threads_max=8)
    threads = set()
    for _ in range(20):
        job = Job()
        shared.schedule(job)
        assert job.done.wait(WAIT_S)
        # A job is over for the threads just after it is for itself; only then is its thread free.
        assert spin(lambda: not shared._tickets)
        threads.add(job.thread)
    assert len(threads) == 1
    assert shared.leave(WAIT_S)


def test_of_threads_that_are_idle_the_last_one_that_worked_is_used():
    shared, gate = shared_threads(threads_max=3), threading.Event()
    work = [Job(gate) for _ in range(3)]
    for job in work:
        shared.schedule(job)
        assert job.begun.wait(WAIT_S)
    gate.set()
    assert spin(lambda: len(shared.ready._asleep) == 3)
    for count in (1, 2, 1):
        threads = set()
        for _ in range(20):
            gate, jobs = threading.Event(), []
            for _ in range(count):
                jobs.append(Job(gate))
                shared.schedule(jobs[-1])
                assert jobs[-1].begun.wait(WAIT_S)
            gate.set()
            assert spin(lambda: len(shared.ready._asleep) == 3)
            threads |= {job.thread for job in jobs}
        assert len(threads) == count
    assert shared.leave(WAIT_S)
    assert not any(job.thread.is_alive() for job in work)


@pytest.mark.parametrize("wakes", [True, False])
def test_ctrl_c_while_a_thread_is_woken_leaves_none_asleep_for_good(wakes):
    """Whether it comes before or after the thread was woken, which its place in the list does not tell."""
    shared = shared_threads(threads_max=2)
    for job in (Job(), Job()):
        shared.schedule(job)
        assert job.done.wait(WAIT_S)
        assert spin(lambda: shared.ready._asleep)
    sleep = shared.ready._asleep[-1]
    if wakes:
        sleep.release()
        assert spin(lambda: len(shared.ready._asleep) > 1), "it sleeps again, and is in the list twice"
    for _ in range(8):
        gate, work = threading.Event(), [Job(), Job()]
        for job in work:
            job.gate = gate
            shared.schedule(job)
        for job in work:
            assert job.begun.wait(WAIT_S)
        gate.set()
        assert all(job.done.wait(WAIT_S) for job in work)
    assert shared.leave(WAIT_S)
    assert not any(job.thread.is_alive() for job in work)


def test_they_end_with_the_last_stream():
    shared = shared_threads()
    shared.join()
    job = Job()
    shared.schedule(job)
    assert job.done.wait(WAIT_S)
    assert shared.leave(WAIT_S)
    assert job.thread.is_alive(), "another stream may still need it"
    assert shared.leave(WAIT_S)
    assert not job.thread.is_alive()


def test_a_thread_that_hangs_is_not_waited_for_and_does_not_affect_later_streams():
    gate = threading.Event()
    shared, hung = shared_threads(threads_max=1), Job(gate)
    shared.schedule(hung)
    assert hung.begun.wait(WAIT_S)
    assert not shared.leave(0.01)
    shared.join()
    later = Job()
    shared.schedule(later)
    assert later.done.wait(WAIT_S), "the new ones have threads of their own"
    assert later.thread is not hung.thread
    assert shared.leave(WAIT_S)
    gate.set()
    hung.thread.join(WAIT_S)
    assert not hung.thread.is_alive(), "what had hung ends as soon as it can"


def test_a_thread_that_hangs_is_replaced_and_ends_when_it_can():
    gate, before = threading.Event(), threading.active_count()
    shared, hung, waiting = shared_threads(threads_max=1), Job(gate), Job()
    shared.schedule(hung)
    assert hung.begun.wait(WAIT_S)
    shared.schedule(waiting)
    shared.replace(hung)
    assert waiting.done.wait(WAIT_S), "what waited behind it is served"
    shared.replace(hung)
    later = Job()
    shared.schedule(later)
    assert later.done.wait(WAIT_S)
    assert later.thread is waiting.thread, "there is still but one thread for what is well"
    assert threading.active_count() == before + 2
    gate.set()
    assert hung.done.wait(WAIT_S)
    hung.thread.join(WAIT_S)
    assert not hung.thread.is_alive()
    assert spin(lambda: not shared._tickets)
    assert shared.leave(WAIT_S)


def test_to_replace_the_thread_of_what_no_thread_serves_changes_nothing():
    shared, job = shared_threads(threads_max=1), Job()
    shared.replace(job)
    shared.schedule(job)
    assert job.done.wait(WAIT_S)
    assert spin(lambda: not shared._tickets)
    shared.replace(job)
    later = Job()
    shared.schedule(later)
    assert later.done.wait(WAIT_S)
    assert later.thread is job.thread
    assert shared.leave(WAIT_S)


def test_a_thread_does_not_keep_what_it_served():
    """Else a closed stream, and all that its last operation holds, would live as long as the thread."""
    shared, job = shared_threads(), Job()
    shared.schedule(job)
    assert job.done.wait(WAIT_S)
    thread, known = job.thread, weakref.ref(job)
    del job
    assert spin(lambda: known() is None)
    assert thread.is_alive()
    assert shared.leave(WAIT_S)


def test_threads_end_with_the_last_stream_and_begin_again():
    device = HostDevice(threads=3, in_place="never")
    before = threading.active_count()
    for _ in range(5):
        streams = [device.create_stream() for _ in range(4)]
        for stream in streams:
            finish_behind_work(stream, device)
        assert threading.active_count() > before
        assert all(stream.close(WAIT_S) for stream in streams)
        assert threading.active_count() == before


def test_a_device_is_shared_by_threads_that_open_and_close():
    """Engines on several loops may share one device: its threads end with the last stream and not before."""
    device = HostDevice(threads=2, in_place="never")
    failures = []

    def come_and_go():
        try:
            for _ in range(50):
                stream = device.create_stream()
                finish_behind_work(stream, device)
                assert stream.close(WAIT_S)
        except BaseException as error:
            failures.append(error)

    before = threading.active_count()
    users = [threading.Thread(target=come_and_go) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(WAIT_S)
    assert not failures
    assert threading.active_count() == before


@pytest.fixture
def _no_switches():
    """Let Python never ask a thread for the GIL: a thread that has it keeps it until it blocks."""
    before = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)
    gc.enable()


@pytest.mark.usefixtures("_no_switches")
def test_a_nudge_hands_the_gil_to_a_thread_that_cannot_get_it():
    device = HostDevice(in_place="never")
    stream = device.create_stream()
    finish_behind_work(stream, device)  # The thread is there, and waits.
    event = device.create_event()
    matrix = np.random.default_rng(0).random((200, 200))
    stream.launch(partial(np.linalg.svd, matrix), label="computes without the GIL")
    stream.record(event)
    assert not spin(event.query, lambda: None), "the thread got the GIL by itself: this proves nothing"
    helped = []
    assert spin(event.query, lambda: helped.append(event.nudge()) or helped)
    assert any(helped)
    assert stream.close(WAIT_S)


def test_an_idle_device_needs_no_nudge():
    device = HostDevice(in_place="never")
    stream = device.create_stream()
    assert not finish(stream, device).nudge()
    assert stream.close(WAIT_S)


def test_a_thread_that_computes_is_left_alone():
    device = HostDevice(in_place="never")
    stream, event = device.create_stream(), device.create_event()
    started = threading.Event()
    matrix = np.random.default_rng(0).random((300, 300))

    def compute():
        started.set()
        np.linalg.svd(matrix)

    stream.launch(compute, label="compute")
    stream.record(event)
    assert started.wait(WAIT_S)
    assert not event.nudge(), "one look cannot tell a stalled thread from a computing one"
    assert event.synchronize(WAIT_S)
    assert not event.nudge()
    assert stream.close(WAIT_S)


class Idle:
    """A worker without work."""

    serves = None

    def is_stalled(self, now_ns):
        return False

    def has_computed(self, lent_ns, now_ns):
        return False


class Copying:
    """A worker that takes the GIL for each of many arrays: starved before a hand-over, not through after it.

    It computes in ``share`` of the time that it is lent.
    """

    def __init__(self, clock, share):
        self.clock, self.share = clock, share
        self.cpu_ns = 0
        worker = _Worker.__new__(_Worker)
        worker.serves, worker._seen, worker._cpu_ns = object(), None, lambda: self.cpu_ns
        self.worker = worker

    def acquire(self, blocking=True, timeout=0):
        """In place of the baton: the loop stands still, and nobody hands back."""
        if blocking:
            self.clock.ns += int(timeout * 1e9)
            self.cpu_ns += int(timeout * 1e9 * self.share)
        return False


@pytest.mark.parametrize(("share", "is_vain"), [(0.9, False), (0.1, True)])
def test_lending_to_a_thread_that_wants_more_of_it_is_not_in_vain(monkeypatch, share, is_vain):
    clock = Clock()
    shared = shared_threads(now_ns=clock)
    monkeypatch.setattr("asynctrt.devices.host.threads.GIL", True)
    copying = Copying(clock, share)
    shared._workers.append(copying.worker)
    shared._baton = copying
    lent = 0
    for _ in range(400):
        lent += shared.lend_gil()
        clock.ns += LEND_PAUSE_NS_MIN
    assert (shared._lend_pause_ns > LEND_PAUSE_NS_MIN) == is_vain
    # It starves for two looks of three at most, and is not starved for the one after a hand-over.
    assert lent == 0 if is_vain else lent > 100
    shared._workers.clear()
    assert shared.leave(WAIT_S)


def test_lending_in_vain_is_done_ever_more_rarely(monkeypatch):
    """The loop stands still while it lends, and must not pay for a thread that does not take the GIL."""
    clock = Clock()
    shared = shared_threads(now_ns=clock)
    monkeypatch.setattr("asynctrt.devices.host.threads.GIL", True)
    monkeypatch.setattr("asynctrt.devices.host.threads.LEND_S", 0.0)
    shared._tickets = 1  # Something is to be done, and the thread does not take it up.
    shared._workers.append(Idle())
    pauses = []
    for _ in range(12):
        assert not shared.lend_gil()
        begun_ns = clock.ns
        while shared._lend_next_ns > clock.ns:
            clock.ns += LEND_PAUSE_NS_MIN // 2
        pauses.append(clock.ns - begun_ns)
    assert pauses[0] == LEND_PAUSE_NS_MIN
    assert all(later in (2 * before, LEND_PAUSE_NS_MAX) for before, later in pairwise(pauses))
    assert pauses[-1] == LEND_PAUSE_NS_MAX
    shared._workers.clear()
    assert shared.leave(WAIT_S)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_thread_in_the_middle_of_something_comes_back_before_the_interpreter_goes(hangs):
    """From a C++ library it would be ended by force, with the process. What hangs is not waited for."""
    program = f"""
import os, threading, time
from asynctrt.devices.host.threads import StreamThreads

class Job:
    def serve(self):
        begun.set()
        threading.Event().wait({WAIT_S * 10 if hangs else 0.1})
        os.write(1, b"back")

begun = threading.Event()
threads = StreamThreads(1, "test", time.monotonic_ns)
threads.join()
threads.schedule(Job())
assert begun.wait({WAIT_S})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert done.stdout == ("" if hangs else "back")
