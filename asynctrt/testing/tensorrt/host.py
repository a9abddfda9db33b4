"""The double's work on the host device: each step is a launch of its own on the given stream.

Whatever is launched holds its parameters by value and finds everything else out when it runs, so a graph
can launch it again. That is also where arenas are checked: a batch marks its arena when it starts to
*execute* and frees it when it is through.
"""

import ctypes
import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from asynctrt.devices.base import ALIGNMENT, aligned
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceError, DeviceLostError
from asynctrt.tensors import Array
from asynctrt.testing.tensorrt.monitor import (
    GONE,
    ILLEGAL_ADDRESS,
    MODIFIED,
    Fault,
    Job,
    Monitor,
    Ticket,
    ViolationError,
)
from asynctrt.testing.tensorrt.spec import TensorIO, advance, pack_positives, read_state, write_state

LONGEST_S: Final = 30.0
"""How long an enqueue with a data-dependent output may wait for its batch."""


def memory_at(address: int, dtype: Any, count: int) -> Array:
    """Memory of this process as an array."""
    kind = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


class Arenas:
    """Which parts of memory batches work in right now, and which they will work in."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._lock = threading.Lock()
        self._queued: dict[int, Job] = {}
        self._running: dict[int, Job] = {}

    def queue(self, job: Job) -> None:
        """A batch was enqueued, and whoever works in the same memory later has to wait for it."""
        with self._lock:
            self._queued[job.number] = job

    def enter(self, job: Job) -> bool:
        """A batch starts to execute; False if it must not, which is noted."""
        problems = []
        with self._lock:
            if job.number in self._running:
                problems.append(f"{job.text} was launched again by its graph before it was through")
            problems.extend(
                f"{_pair(job, other)}: {other.text} is executing in it"
                for number, other in self._running.items()
                if number != job.number and overlap(job, other)
            )
            problems.extend(
                f"{_pair(job, other)}: {other.text} was enqueued before and did not execute"
                for number, other in self._queued.items()
                if number < job.number and number not in self._running and overlap(job, other)
            )
            self._running[job.number] = job
        for problem in problems:
            self._monitor.note(problem)
        return not problems

    def leave(self, job: Job) -> None:
        """A batch is through."""
        with self._lock:
            self._running.pop(job.number, None)
            self._queued.pop(job.number, None)


def overlap(one: Job, other: Job) -> bool:
    """Whether two batches use the same enqueue memory."""
    return one.arena < other.arena + other.arena_nbytes and other.arena < one.arena + one.arena_nbytes


def _pair(job: Job, other: Job) -> str:
    return (
        f"two enqueues in one arena without an order between them: {job.text} starts to execute in "
        f"[{job.arena:#x}, +{job.arena_nbytes}), which overlaps [{other.arena:#x}, +{other.arena_nbytes})"
    )


class HostTicket(Ticket):
    """An enqueue on a host stream: its own work says when it is through."""

    __slots__ = ("_is_done",)

    def __init__(self, text: str, handle: int, *, is_done: bool) -> None:
        super().__init__(text, handle)
        self._is_done = is_done

    @property
    def is_done(self) -> bool:
        """As of every ticket."""
        return self._is_done

    def begin(self) -> None:
        """The work begins; that of a graph, again."""
        self._is_done = False

    def end(self) -> None:
        """The work is through."""
        self._is_done = True


class _Batch:
    """One batch on the host: what its launches do when their turn comes."""

    def __init__(
        self, job: Job, ticket: HostTicket, executor: "HostExecutor", lanes: int, *, captured: bool
    ) -> None:
        self.job = job
        self.ticket = ticket
        self.longest = 0
        self._executor = executor
        self._monitor = executor.monitor
        self._lanes = lanes
        self._captured = captured
        self._failed = True
        self._violated = False
        self._guard = 0
        rows = job.shapes[0][0] if job.shapes[0] else 0
        self._work_ns = job.spec.work_ns + rows * job.spec.work_ns_per_row
        self._counts = [int(np.prod(shape, dtype=np.int64)) for shape in job.shapes]
        self._states = self._lay_out()
        self._inputs = [
            memory_at(address, _storage(io), count)
            for io, address, count in zip(job.spec.inputs, job.inputs, self._counts, strict=True)
        ]
        self._coefficients = memory_at(job.weights, np.int64, 2 * job.spec.steps).reshape(-1, 2)
        self._guards = [
            memory_at(job.arena, np.uint64, 1),
            memory_at(job.arena + job.arena_nbytes - ALIGNMENT, np.uint64, 1),
        ]

    def _lay_out(self) -> list[list[Array]]:
        """Where each state of each input lies in the arena: between the guards, one after the other."""
        at = self.job.arena + ALIGNMENT
        states: list[list[Array]] = []
        for io, count in zip(self.job.spec.inputs, self._counts, strict=True):
            kind = np.dtype(np.float32 if io.is_floating else np.int64)
            states.append([])
            for _ in range(self.job.spec.steps):
                states[-1].append(memory_at(at, kind, count))
                at += aligned(count * kind.itemsize)
        return states

    def begin(self) -> None:
        """The first launch: enter the arena, and be as busy as the engine's work takes."""
        self._failed = True
        self.ticket.begin()
        self._violated = not self._executor.arenas.enter(self.job)
        if self._captured:
            self._executor.check_generation(self.job)
        self._executor.fail_if_due()
        self._guard = next(self._executor.guards)
        for guard in self._guards:
            guard[0] = self._guard
        self._executor.work(self._work_ns, fills=self.job.spec.fills_gpu)
        self._failed = False

    def step(self, number: int, lane: int) -> None:
        """Read one state, write the next. The first reads the inputs."""
        if self._failed:
            return
        a, b = (int(value) for value in self._coefficients[number - 1])
        for index, io in enumerate(self.job.spec.inputs):
            count = self._counts[index]
            part = slice(count * lane // self._lanes, count * (lane + 1) // self._lanes)
            if number == 1:
                source = read_state(io, self._inputs[index][part])
            else:
                source = self._states[index][number - 2][part]
            self._states[index][number - 1][part] = advance(source, a, b)

    def finish(self) -> None:
        """The last launch: write the outputs, leave nothing usable behind, leave the arena."""
        try:
            if not self._failed:
                self._write()
        finally:
            self._executor.arenas.leave(self.job)
            self.ticket.end()

    def _write(self) -> None:
        spec = self.job.spec
        for index, io in enumerate(spec.inputs):
            target = memory_at(self.job.outputs[index], _storage(io), self._counts[index])
            target[:] = write_state(io, self._states[index][-1])
        if spec.data_dependent:
            rows = self.job.shapes[0][0]
            packed = write_state(spec.inputs[0], pack_positives(self._states[0][-1].reshape(rows, -1)))
            self.longest = packed.shape[1]
            memory_at(self.job.outputs[-1], _storage(spec.inputs[0]), packed.size)[:] = packed.reshape(-1)
        intact = all(guard[0] == self._guard for guard in self._guards)
        for state in itertools.chain(*self._states):
            state[:] = np.nan if state.dtype.kind == "f" else np.iinfo(state.dtype).max
        for guard in self._guards:
            guard[0] = 0
        if not intact:
            raise self._monitor.note(
                f"the enqueue memory of {self.job.text} was written to while it executed"
            )
        if self._violated:
            raise ViolationError(f"{self.job.text} executed where it must not: see violations()")


def _storage(io: TensorIO) -> np.dtype[Any]:
    return np.dtype(np.uint16 if io.dtype == "bfloat16" else io.dtype)


class HostExecutor:
    """Work of the double on a :class:`HostDevice`."""

    def __init__(self, device: HostDevice, monitor: Monitor) -> None:
        self.monitor = monitor
        self.arenas = Arenas(monitor)
        self.guards = itertools.count(0x5AFE_0000_0000_0001)
        self._device = device
        # Work that fills the device is done one after the other.
        self._filled = threading.Lock()
        self._working = threading.Event()
        self._hangs = threading.Condition()
        self._hanging = 0
        self._released = 0
        # Of each context that is there, how often it has been modified.
        self._generations: dict[int, int] = {}
        self._batches: dict[int, _Batch] = {}

    def problem_of(self, handle: int) -> str | None:
        try:
            self._device.stream_of(handle)
        except DeviceError as error:
            return str(error)
        return None

    def is_capturing(self, handle: int) -> bool:
        return self._device.stream_of(handle).is_capturing

    def enqueue(self, job: Job, handle: int, aux: Sequence[int]) -> Ticket:
        stream = self._device.stream_of(handle)
        captured = stream.is_capturing
        ticket = HostTicket(job.text, handle, is_done=captured)
        # A stream that captures is one queue, and other streams cannot be a part of it.
        others = [] if captured else [self._device.stream_of(other) for other in aux]
        batch = _Batch(job, ticket, self, 1 + len(others), captured=captured)
        if job.spec.data_dependent:
            self._batches = {job.number: batch}
        if not captured:
            self.arenas.queue(job)
        label = (job.spec.name, job.shapes[0][:1])
        stream.launch(batch.begin, label=(*label, "begin"))
        if others:
            begun = self._device.create_event()
            stream.record(begun)
        for lane, other in enumerate([stream, *others]):
            if other is not stream:
                other.wait(begun)
            for number in range(1, job.spec.steps + 1):
                other.launch(partial(batch.step, number, lane), label=(*label, number))
            if other is not stream:
                ended = self._device.create_event()
                other.record(ended)
                stream.wait(ended)
        stream.launch(batch.finish, label=(*label, "finish"))
        return ticket

    def memory_problem(self, address: int, nbytes: int) -> str | None:
        """Nobody knows what the process has at an address."""

    def mark(self, context: int, text: str, handle: int) -> Ticket:
        stream = self._device.stream_of(handle)
        ticket = HostTicket(text, handle, is_done=stream.is_capturing)
        stream.launch(ticket.end, label="mark")
        return ticket

    def longest(self, job: Job, ticket: Ticket) -> int:
        batch = self._batches.pop(job.number)
        event = self._device.create_event()
        self._device.stream_of(ticket.handle).record(event)
        if not event.synchronize(LONGEST_S):
            raise self.monitor.found(
                f"the enqueue of {job.text} waits for its data-dependent output, and the batch did not end "
                f"within {LONGEST_S} s"
            )
        if event.error is not None:
            raise event.error
        return batch.longest

    def record(self, event: int, handle: int) -> None:
        raise self.monitor.found(f"{event} is the handle of no event: those of the host device have none")

    def write(self, address: int, data: bytes) -> None:
        memory_at(address, np.uint8, len(data))[:] = np.frombuffer(data, np.uint8)

    def modified(self, context: int, generation: int) -> None:
        self._generations[context] = generation

    def retire(self, context: int) -> None:
        self._generations.pop(context, None)

    def check_generation(self, job: Job) -> None:
        """For a batch of a graph that begins: it must not run when its context is not what it was.

        What it would run in may be gone, and this process's memory is not to be written to then.

        :raises ViolationError: which was noted.
        """
        generation = self._generations.get(job.context)
        if generation != job.generation:
            raise self.monitor.note((GONE if generation is None else MODIFIED).format(batch=job.text))

    def poll(self) -> None:
        """What goes wrong here is noted at once."""

    def armed(self, what: Fault, count: int) -> None:
        """The monitor knows, and is asked by each batch that begins."""

    def release_hangs(self) -> None:
        with self._hangs:
            self._released = self._hanging
            self._hangs.notify_all()

    def fail_if_due(self) -> None:
        """For a batch that begins: fail, or hang, if that is what the test asked for.

        :raises DeviceLostError: now, or since the last time.
        """
        if self.monitor.take("hang"):
            with self._hangs:
                self._hanging += 1
                own = self._hanging
                self._hangs.wait_for(lambda: self._released >= own)
        if self.monitor.take("illegal-address"):
            self.monitor.lost = ILLEGAL_ADDRESS
        if self.monitor.lost is not None:
            raise DeviceLostError(f"the device is lost: {self.monitor.lost}")

    def work(self, duration_ns: int, *, fills: bool) -> None:
        """Keep the device busy: this thread waits, as a core would that computes outside Python's lock."""
        if not duration_ns:
            return
        if fills:
            with self._filled:
                self._working.wait(duration_ns / 1e9)
        else:
            self._working.wait(duration_ns / 1e9)
