"""Ctrl-C at every point of the driver's own work: the engine ends whole or closed, and nothing is used twice.

Python raises an interrupt where a function of its own begins and where one in C has returned, among others.
A profile function is called at just these points, so that each of them is tried in turn.
"""

import asyncio
import gc
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.devices.host.threads import StreamThreads
from asynctrt.errors import AsynctrtError, DeviceLostError
from asynctrt.runtime import driver, spans
from asynctrt.runtime.completion import Reaper
from asynctrt.runtime.jobs import Job
from asynctrt.runtime.staging import RowSource, StagingBuffers
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.models import rows
from tests.runtime.support import WAIT_S

ENTRIES = ("_pump", "_look", "submit", "submit_plain")
"""Where the loop, or a caller, enters the driver."""


class SlowToEnqueue(FunctionModel):
    """Doubles; its batches are put on the device by a thread."""

    def __init__(self, *, blocks):
        super().__init__(
            lambda inputs: 2 * inputs["input"],
            inputs=TensorSpec("input", "float32", (4,)),
            outputs=TensorSpec("output", "float32", (4,)),
        )
        self.capabilities = replace(self.capabilities, enqueue_may_block=blocks)


class Slabs:
    """Tells when a slab is staged for a batch while it is still used for another."""

    def __init__(self, monkeypatch):
        self.users = Counter()
        self.clashes = []
        self._lock = threading.Lock()
        for name in ("stage", "_stage_part"):
            monkeypatch.setattr(RowSource, name, self._watched(getattr(RowSource, name)))

    def _watched(self, stage):
        def watched(source, *between):
            with self._using(source):
                stage(source, *between)

        return watched

    @contextmanager
    def _using(self, source):
        mine = id(source.slab), source.batch.number
        with self._lock:
            self.clashes += [other for other in self.users if other[0] == mine[0] and other != mine]
            self.users[mine] += 1
        try:
            yield
        finally:
            with self._lock:
                self.users[mine] -= 1
                if not self.users[mine]:
                    del self.users[mine]


class Interrupt:
    """Raises ``KeyboardInterrupt`` at one point of the driver's work, or of other work."""

    def __init__(self, at, is_part=None):
        self.left = at
        self.where = None
        self._is_part = is_part or _is_ours

    def __call__(self, frame, event, arg):
        if event not in ("call", "c_return") or not self._is_part(frame, event):
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname} {event}"
            raise KeyboardInterrupt


class InterruptOfPlaces(Interrupt):
    """Raises at the next place in the code that was passed more often than it was interrupted before.

    :param tried: how often each place was interrupted by earlier ones, which this one adds to.
    """

    TIMES_MAX = 2

    def __init__(self, tried):
        super().__init__(0)
        self.tried, self.passed = tried, Counter()

    def __call__(self, frame, event, arg):
        if event not in ("call", "c_return") or not self._is_part(frame, event):
            return
        place = event, frame.f_code, frame.f_lineno, frame.f_back.f_code, frame.f_back.f_lineno
        self.passed[place] += 1
        if self.tried[place] < self.passed[place] <= self.TIMES_MAX:
            self.tried[place] += 1
            super().__call__(frame, event, arg)


def _is_of_stream(frame, event):
    return "/asynctrt/devices/host/" in frame.f_code.co_filename


def _is_ours(frame, event):
    """Return whether a frame is the driver's work, or called for it, and not yet before its first line."""
    if "/asynctrt/" not in frame.f_code.co_filename:
        return False
    frame = frame.f_back if event == "call" else frame
    while frame is not None:
        if frame.f_code.co_name in ENTRIES and "/asynctrt/runtime/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Gate:
    """Holds the first batch that a thread stages."""

    def __init__(self, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        self.staged = []
        stage = RowSource.stage

        def held(source, *between):
            self.staged.append(source.batch.number)
            if len(self.staged) == 1:
                self.begun.set()
                assert self.go.wait(WAIT_S)
            stage(source, *between)

        monkeypatch.setattr(RowSource, "stage", held)


@pytest.mark.parametrize("how", ["_hand_over_unstaged", "copied"])
def test_a_thread_that_has_begun_keeps_its_context(monkeypatch, how):
    """The interrupt comes between the hand-over of a batch to a thread and the return from it."""
    name = "STAGE_ON_LOOP_NBYTES_MAX" if how == "_hand_over_unstaged" else "GATHER_ON_LOOP_NBYTES_MAX"
    monkeypatch.setattr(driver, name, 0)
    gate, slabs = Gate(monkeypatch), Slabs(monkeypatch)
    schedule, interrupts = StreamThreads.schedule, [KeyboardInterrupt]

    def schedule_and_raise(threads, served):
        schedule(threads, served)
        if isinstance(served, Job) and interrupts:
            assert gate.begun.wait(WAIT_S)
            raise interrupts.pop()

    monkeypatch.setattr(StreamThreads, "schedule", schedule_and_raise)
    loop = asyncio.new_event_loop()
    model = SlowToEnqueue(blocks=how == "_hand_over_unstaged")
    device = HostDevice(in_place="never", threads=2)
    engine = loop.run_until_complete(asynctrt.open(model, device=device, contexts=1, max_rows=1)._open())
    tasks = [loop.create_task(engine.infer(rows(value))) for value in range(3)]
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.wait(tasks, timeout=WAIT_S))
    for _ in range(20):
        loop.run_until_complete(asyncio.sleep(0))
    assert gate.staged == [1], "its slab was given to another batch"
    gate.go.set()
    loop.run_until_complete(asyncio.wait(tasks, timeout=WAIT_S))
    for value, task in enumerate(tasks):
        assert (task.result()["output"] == 2 * value).all()
    assert not slabs.clashes
    loop.run_until_complete(engine.aclose())
    loop.close()


@pytest.mark.anyio
async def test_what_cannot_be_waited_for_is_not_begun(monkeypatch):
    """It would be staged and put on the stream a second time, by the loop."""
    monkeypatch.setattr(driver, "STAGE_ON_LOOP_NBYTES_MAX", 0)
    gate = Gate(monkeypatch)
    gate.go.set()
    watch, refusals = Reaper.watch, [RuntimeError("can't start new thread")]

    def refuse(reaper, event, *given, **named):
        if isinstance(event, Job) and refusals:
            raise refusals.pop()
        watch(reaper, event, *given, **named)

    monkeypatch.setattr(Reaper, "watch", refuse)
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(SlowToEnqueue(blocks=True), device=HostDevice(in_place="never")) as engine,
    ):
        for value in range(3):
            assert ((await engine.infer(rows(value)))["output"] == 2 * value).all()
        assert gate.staged == [1, 2, 3]
        assert not refusals


@pytest.mark.anyio
async def test_a_slab_outlives_the_thread_that_writes_it(monkeypatch):
    """Although its engine is closed meanwhile, and waits for it no longer."""
    monkeypatch.setattr(driver, "GATHER_ON_LOOP_NBYTES_MAX", 0)
    gate = Gate(monkeypatch)
    closed = []
    close = StagingBuffers.close
    monkeypatch.setattr(StagingBuffers, "close", lambda buffers: (closed.append(buffers), close(buffers)))
    model = SlowToEnqueue(blocks=False)
    engine = await asynctrt.open(model, device=HostDevice(), contexts=1, max_rows=1, close_timeout=0.01)
    (context,) = engine._pool.contexts
    buffers = context._buffers
    task = asyncio.create_task(engine.infer(rows(1)))
    await until(gate.begun.is_set)
    async with asyncio.timeout(WAIT_S):
        await engine.aclose()
    with pytest.raises(DeviceLostError, match="did not end within the close_timeout"):
        await task
    assert buffers not in closed
    gate.go.set()
    await until(lambda: buffers in closed)


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupted_stream_does_what_it_took_and_nothing_else(busy):
    """An event is done or was never recorded, and no work that was refused is done after all."""
    device = HostDevice(in_place="never", threads=1)
    points = Counter()
    for at in range(200):
        stream, event, end = device.create_stream(), device.create_event(), device.create_event()
        gate, done = threading.Event(), []
        if busy:
            stream.launch(partial(gate.wait, WAIT_S), label="gate")
        interrupt = Interrupt(at, _is_of_stream)
        taken, launched = [], []
        sys.setprofile(interrupt)
        try:
            stream.launch(partial(done.append, 1), label="work")
            launched.append(1)
            stream.record(event)
            taken.append(event)
            stream.launch(partial(done.append, 2), label="work")
            launched.append(2)
        except KeyboardInterrupt:
            points[len(taken) + len(launched)] += 1
        finally:
            sys.setprofile(None)
        gate.set()
        stream.record(end)
        assert end.synchronize(WAIT_S)
        assert event.query(), f"pending for ever after {interrupt.where}"
        seen = list(done)
        for again in (event, end):
            stream.record(again)
            assert again.synchronize(WAIT_S)
        assert done == seen, f"done late after {interrupt.where}"
        assert seen[: len(launched)] == launched
        assert stream.close(WAIT_S)
        if interrupt.where is None:
            break
    assert interrupt.where is None
    assert all(points[part] > 1 for part in range(3)), points


class Awaiting(FunctionModel):
    """Doubles, in a coroutine."""

    def __init__(self, *, blocks):
        async def double(inputs):
            await asyncio.sleep(0)
            return 2 * inputs["input"]

        super().__init__(
            double,
            inputs=TensorSpec("input", "float32", (4,)),
            outputs=TensorSpec("output", "float32", (4,)),
        )


class FailsForOne(FunctionModel):
    """Doubles, but for batches with one value, which fail."""

    def __init__(self, *, blocks):
        def double(inputs):
            if (inputs["input"] == 1).any():
                raise ValueError("1 is not doubled")
            return 2 * inputs["input"]

        super().__init__(
            double,
            inputs=TensorSpec("input", "float32", (4,)),
            outputs=TensorSpec("output", "float32", (4,)),
        )


HOW = {
    "in place": {"in_place": "always"},
    "a coroutine, begun in place": {"in_place": "always", "model": Awaiting},
    "a coroutine, begun by a thread": {"in_place": "never", "model": Awaiting},
    "on a thread of the device": {"in_place": "never"},
    "tried again in halves in place": {"in_place": "always", "model": FailsForOne},
    "tried again in halves on a thread, with late ones": {
        "in_place": "never",
        "model": FailsForOne,
        "timeout": 1e-7,
    },
    "enqueued by a thread": {"in_place": "never", "blocks": True},
    "staged and enqueued by a thread": {
        "in_place": "never",
        "blocks": True,
        "patched": {(driver, "STAGE_ON_LOOP_NBYTES_MAX"): 0, (spans, "PART_NBYTES_MIN"): 1},
    },
    "copied by threads": {
        "in_place": "never",
        "patched": {
            (driver, "GATHER_ON_LOOP_NBYTES_MAX"): 0,
            (driver, "COPY_ON_LOOP_NBYTES_MAX"): 0,
            (spans, "PART_NBYTES_MIN"): 1,
        },
    },
}


class Attempt:
    """Some requests, interrupted once."""

    def __init__(self, interrupt, *, in_place, blocks=False, model=SlowToEnqueue, timeout=None):
        self.interrupt = interrupt
        self.loop = asyncio.new_event_loop()
        device = HostDevice(in_place=in_place, threads=2)
        opening = asynctrt.open(
            model(blocks=blocks), device=device, contexts=2, max_rows=2, close_timeout=2 * WAIT_S
        )
        self.engine = self.finish(opening._open())
        timeouts = [None] * 4 + [timeout] * 2
        self.tasks = [self.loop.create_task(self.ask(*one)) for one in enumerate(timeouts)]

    async def ask(self, value, timeout=None):
        result = await self.engine.infer(rows(value, value), timeout=timeout)
        assert (result["output"] == 2 * value).all(), "rows of another caller"

    def finish(self, awaitable):
        """Wait for something, and go on after an interrupt that was put off."""

        async def bounded():
            async with asyncio.timeout(WAIT_S):
                return await task

        async def begun():
            return await awaitable

        task = self.loop.create_task(begun())
        for _ in range(2):
            try:
                return self.loop.run_until_complete(bounded())
            except KeyboardInterrupt:
                pass
        raise AssertionError("interrupted more than once")

    def run(self):
        gc.disable()  # Python ignores what is raised in __del__.
        try:
            sys.setprofile(self.interrupt)
            self.loop.run_until_complete(asyncio.wait(self.tasks, timeout=WAIT_S))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            gc.enable()
        _, waiting = self.finish(asyncio.wait(self.tasks, timeout=WAIT_S))
        assert not waiting, "nobody tells some callers anything"
        errors = [task.exception() for task in self.tasks]
        told = AsynctrtError, KeyboardInterrupt
        assert all(error is None or isinstance(error, told) for error in errors), errors
        if self.engine.state == "open":
            self.finish(self.ask(9))
        else:
            assert self.engine.state == "lost"
            with pytest.raises(AsynctrtError, match="interrupted the"):
                self.finish(self.ask(9))
        self.finish(self.engine.aclose())
        self.finish(asyncio.sleep(0))
        self.loop.close()


def run(monkeypatch, interrupts, *, patched=None, **how):
    """Interrupt at one point after the other until there is none left; return how the engine ended."""
    for (module, name), value in (patched or {}).items():
        monkeypatch.setattr(module, name, value)
    slabs, ends = Slabs(monkeypatch), Counter()
    for number, interrupt in enumerate(interrupts):
        attempt = Attempt(interrupt, **how)
        try:
            attempt.run()
            assert not slabs.clashes, "a slab was given to a batch while another was written there"
        except BaseException as error:
            error.add_note(f"attempt {number}, interrupted at {interrupt.where}")
            raise
        if interrupt.where is None:
            break
        ends[interrupt.where.rpartition(" ")[2]] += 1
    return ends


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_an_interrupt_leaves_the_engine_whole_or_closed(monkeypatch, how):
    ends = run(monkeypatch, map(Interrupt, count(3, 29)), **how)
    assert set(ends) == {"call", "c_return"}


@pytest.mark.tier2
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_an_interrupt_at_every_place_leaves_the_engine_whole_or_closed(monkeypatch, how):
    """At each of the first times that an attempt comes to it: later requests pass the same places."""
    tried = Counter()
    run(monkeypatch, (InterruptOfPlaces(tried) for _ in count()), **how)
    assert len(tried) > 100
