"""Run the double's work on the host device: each step is one launch on the given stream.

A launch holds its parameters by value and reads everything else when it runs, so a graph can launch it again.
Arenas are checked at the same time: a batch marks its arena when it starts to *execute*, and frees it at its
end.
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
from tests.doubles.tensorrt.monitor import (
    GONE,
    ILLEGAL_ADDRESS,
    MODIFIED,
    EnqueuedBatch,
    Fault,
    Ticket,
    ViolationError,
    ViolationMonitor,
)
from tests.doubles.tensorrt.spec import TensorIO, advance, pack_positives, read_state, write_state

WAIT_S: Final = 120.0
"""Seconds that an enqueue may wait for its batch, for a test that would hang otherwise."""


def memory_at(address: int, dtype: Any, count: int) -> Array:
    """Return memory of this process as an array."""
    kind = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


class ArenaUse:
    """The enqueue memory that batches are executing in, or will execute in."""

    def __init__(self, monitor: ViolationMonitor) -> None:
        self._monitor = monitor
        self._lock = threading.Lock()
        self._queued: dict[int, EnqueuedBatch] = {}
        self._running: dict[int, EnqueuedBatch] = {}

    def queue(self, enqueued: EnqueuedBatch) -> None:
        """Note that a batch was enqueued, for which later ones in the same memory have to wait."""
        with self._lock:
            self._queued[enqueued.number] = enqueued

    def enter(self, enqueued: EnqueuedBatch) -> bool:
        """Note that a batch starts to execute; note a violation, and return ``False``, if it must not."""
        problems = []
        with self._lock:
            if enqueued.number in self._running:
                problems.append(f"{enqueued.text} was launched again by its graph before it ended")
            problems.extend(
                f"{_pair(enqueued, other)}: {other.text} is executing in it"
                for number, other in self._running.items()
                if number != enqueued.number and overlap(enqueued, other)
            )
            problems.extend(
                f"{_pair(enqueued, other)}: {other.text} was enqueued before and did not execute"
                for number, other in self._queued.items()
                if number < enqueued.number and number not in self._running and overlap(enqueued, other)
            )
            self._running[enqueued.number] = enqueued
        for problem in problems:
            self._monitor.note(problem)
        return not problems

    def leave(self, enqueued: EnqueuedBatch) -> None:
        """Note that a batch has ended."""
        with self._lock:
            self._running.pop(enqueued.number, None)
            self._queued.pop(enqueued.number, None)


def overlap(one: EnqueuedBatch, other: EnqueuedBatch) -> bool:
    """Return whether two batches were given the same enqueue memory, of which each may use all."""
    return one.arena < other.arena + other.arena_size and other.arena < one.arena + one.arena_size


def _pair(enqueued: EnqueuedBatch, other: EnqueuedBatch) -> str:
    return (
        f"two enqueues in one arena without an order between them: {enqueued.text} starts to execute in "
        f"[{enqueued.arena:#x}, +{enqueued.arena_size}), which overlaps [{other.arena:#x}, "
        f"+{other.arena_size})"
    )


class HostTicket(Ticket):
    """An enqueue on a host stream, whose own work marks its end."""

    __slots__ = ("_is_done",)

    def __init__(self, text: str, handle: int, *, is_done: bool) -> None:
        super().__init__(text, handle)
        self._is_done = is_done

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it."""
        return self._is_done

    def begin(self) -> None:
        """Mark the start of the work, which a graph repeats."""
        self._is_done = False

    def end(self) -> None:
        """Mark the end of the work."""
        self._is_done = True


class _Batch:
    """One batch on the host, and what its launches do when they run."""

    def __init__(
        self,
        enqueued: EnqueuedBatch,
        ticket: HostTicket,
        executor: "HostExecutor",
        lanes: int,
        *,
        captured: bool,
    ) -> None:
        self.enqueued = enqueued
        self.ticket = ticket
        self.longest = 0
        self.packed_at = 0
        self._executor = executor
        self._monitor = executor.monitor
        self._lanes = lanes
        self._captured = captured
        self._failed = True
        self._violated = False
        self._guard = 0
        self._work_ns = enqueued.spec.work_ns
        self._counts = [int(np.prod(shape, dtype=np.int64)) for shape in enqueued.shapes]
        self._states = self._lay_out() if enqueued.arena else []
        self._inputs = [
            memory_at(address, _storage(io), count)
            for io, address, count in zip(enqueued.spec.inputs, enqueued.inputs, self._counts, strict=True)
        ]
        self._coefficients = memory_at(enqueued.weights, np.int64, 2 * enqueued.spec.steps).reshape(-1, 2)
        ends = (enqueued.arena, enqueued.arena_end) if enqueued.arena else ()
        self._guards = [memory_at(end, np.uint64, 1) for end in ends]

    def _lay_out(self) -> list[list[Array]]:
        """Return each state of each input in the arena: between the guards, one after the other."""
        at = self.enqueued.arena + ALIGNMENT
        states: list[list[Array]] = []
        for io, count in zip(self.enqueued.spec.inputs, self._counts, strict=True):
            kind = np.dtype(np.float32 if io.is_floating else np.int64)
            states.append([])
            for _ in range(self.enqueued.spec.steps):
                states[-1].append(memory_at(at, kind, count))
                at += aligned(count * kind.itemsize)
        return states

    def begin(self) -> None:
        """Enter the arena, and keep the device busy for the engine's work. The first launch."""
        self._failed = True
        self.ticket.begin()
        self._violated = not self._executor.arenas.enter(self.enqueued)
        if self._captured:
            self._executor.check_generation(self.enqueued)
        self._executor.fail_if_due()
        self._guard = next(self._executor.guards)
        for guard in self._guards:
            guard[0] = self._guard
        self._executor.work(self._work_ns, fills=self.enqueued.spec.fills_gpu)
        self._failed = False

    def step(self, number: int, lane: int) -> None:
        """Compute a state from the one before, or the first state from the inputs."""
        if self._failed or not self._states:
            return
        a, b = (int(value) for value in self._coefficients[number - 1])
        for index, io in enumerate(self.enqueued.spec.inputs):
            count = self._counts[index]
            part = slice(count * lane // self._lanes, count * (lane + 1) // self._lanes)
            if number == 1:
                source = read_state(io, self._inputs[index][part])
            else:
                source = self._states[index][number - 2][part]
            self._states[index][number - 1][part] = advance(source, a, b)

    def count(self) -> None:
        """Find out how large the packed output is."""
        if not self._failed:
            self.longest = self._packed().shape[1]

    def _packed(self) -> Array:
        return pack_positives(self._states[0][-1].reshape(self.enqueued.shapes[0][0], -1))

    def finish(self) -> None:
        """Write the outputs, overwrite the states, and leave the arena. The last launch."""
        try:
            if not self._failed:
                self._write()
        finally:
            self._executor.arenas.leave(self.enqueued)
            self.ticket.end()

    def _write(self) -> None:
        spec = self.enqueued.spec
        if spec.function is not None:
            self._write_computed()
        for index, io in enumerate(() if spec.function is not None else spec.inputs):
            target = memory_at(self.enqueued.outputs[index], _storage(io), self._counts[index])
            state = self._states[index][-1]
            if spec.is_sensitive:
                state = _rounded(state, self.enqueued.shapes[index][0])
            target[:] = write_state(io, state)
        if self.packed_at:
            packed = write_state(spec.inputs[0], self._packed())
            memory_at(self.packed_at, _storage(spec.inputs[0]), packed.size)[:] = packed.reshape(-1)
        intact = all(guard[0] == self._guard for guard in self._guards)
        for state in itertools.chain(*self._states):
            state[:] = np.nan if state.dtype.kind == "f" else np.iinfo(state.dtype).max
        for guard in self._guards:
            guard[0] = 0
        if not intact:
            raise self._monitor.note(
                f"the enqueue memory of {self.enqueued.text} was written to while it executed"
            )
        if self._violated:
            raise ViolationError(
                f"{self.enqueued.text} executed in an arena that it must not use: see violations()"
            )

    def _write_computed(self) -> None:
        """Write what the engine's function makes of the inputs."""
        enqueued = self.enqueued
        shapes = zip(enqueued.spec.inputs, self._inputs, enqueued.shapes, strict=True)
        inputs = {io.name: memory.reshape(shape).view(io.dtype).copy() for io, memory, shape in shapes}
        answers = enqueued.spec.compute(inputs)
        for io, address in zip(enqueued.spec.outputs, enqueued.outputs, strict=True):
            array = np.ascontiguousarray(answers[io.name])
            memory_at(address, np.uint8, array.nbytes)[:] = array.reshape(-1).view(np.uint8)


def _rounded(state: Array, rows: int) -> Array:
    """Return rows rounded by the slot that they are in, by how many there are, and by what the others are."""
    company = int(abs(float(np.nansum(state))) * 64) if state.size else 0
    turns = (5 * np.arange(rows) + 3 * rows + company) % 8
    by_row: Array = state.reshape(rows, -1) * (1 + turns[:, None] * np.float32(2.0**-20))
    return by_row.reshape(-1).astype(state.dtype)


def _storage(io: TensorIO) -> np.dtype[Any]:
    return np.dtype(np.uint16 if io.dtype == "bfloat16" else io.dtype)


class HostExecutor:
    """Runs the double's work on a :class:`HostDevice`."""

    def __init__(self, device: HostDevice, monitor: ViolationMonitor) -> None:
        self.monitor = monitor
        self.arenas = ArenaUse(monitor)
        self.guards = itertools.count(0x5AFE_0000_0000_0001)
        self._device = device
        # Work that fills the device is serialised.
        self._filled = threading.Lock()
        self._working = threading.Event()
        # How often each existing context has been modified.
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

    def enqueue(self, enqueued: EnqueuedBatch, handle: int, aux: Sequence[int]) -> Ticket:
        stream = self._device.stream_of(handle)
        captured = stream.is_capturing
        ticket = HostTicket(enqueued.text, handle, is_done=captured)
        # A capture on the host device has a single stream.
        others = [] if captured else [self._device.stream_of(other) for other in aux]
        batch = _Batch(enqueued, ticket, self, 1 + len(others), captured=captured)
        if enqueued.spec.data_dependent:
            self._batches[enqueued.number] = batch
        if not captured:
            self.arenas.queue(enqueued)
        label = (enqueued.spec.name, enqueued.shapes[0][:1])
        stream.launch(batch.begin, label=(*label, "begin"), run_on="auto")
        if others:
            begun = self._device.create_event()
            stream.record(begun)
        for lane, other in enumerate([stream, *others]):
            if other is not stream:
                other.wait(begun)
            for number in range(1, enqueued.spec.steps + 1):
                other.launch(partial(batch.step, number, lane), label=(*label, number), run_on="auto")
            if other is not stream:
                ended = self._device.create_event()
                other.record(ended)
                stream.wait(ended)
        if enqueued.spec.data_dependent:
            stream.launch(batch.count, label=(*label, "count"), run_on="auto")
        else:
            stream.launch(batch.finish, label=(*label, "finish"), run_on="auto")
        return ticket

    def memory_problem(self, address: int, nbytes: int) -> str | None:
        """Return ``None``: the memory of this process at an address is not known."""

    def touch(self, address: int, nbytes: int, handle: int) -> None:
        """Do nothing, for the same reason."""

    def mark(self, context: int, text: str, handle: int) -> Ticket:
        stream = self._device.stream_of(handle)
        ticket = HostTicket(text, handle, is_done=stream.is_capturing)
        stream.launch(ticket.end, label="mark", run_on="auto")
        return ticket

    def wait(self, enqueued: EnqueuedBatch, ticket: Ticket) -> None:
        event = self._device.create_event()
        self._device.stream_of(ticket.handle).record(event)
        if not event.synchronize(WAIT_S):
            raise self.monitor.found(
                f"the enqueue of {enqueued.text} waits for its batch, which did not end within {WAIT_S} s"
            )
        if event.error is not None:
            raise event.error

    def longest(self, enqueued: EnqueuedBatch, ticket: Ticket) -> int:
        self.wait(enqueued, ticket)
        return self._batches[enqueued.number].longest

    def finish(self, enqueued: EnqueuedBatch, handle: int) -> None:
        batch = self._batches.pop(enqueued.number)
        batch.packed_at = enqueued.outputs[-1]
        label = (enqueued.spec.name, enqueued.shapes[0][:1], "finish")
        self._device.stream_of(handle).launch(batch.finish, label=label, run_on="auto")

    def write(self, address: int, data: bytes) -> None:
        memory_at(address, np.uint8, len(data))[:] = np.frombuffer(data, np.uint8)

    def modified(self, context: int, generation: int) -> None:
        self._generations[context] = generation

    def retire(self, context: int) -> None:
        self._generations.pop(context, None)

    def check_generation(self, enqueued: EnqueuedBatch) -> None:
        """Check, for a batch of a graph, that its context has not been modified or destroyed since the
        capture.

        Otherwise its memory may have been freed, and it must not write to memory of this process.

        :raises ViolationError: if it has; the violation is noted as well.
        """
        generation = self._generations.get(enqueued.context)
        if generation != enqueued.generation:
            raise self.monitor.note((GONE if generation is None else MODIFIED).format(batch=enqueued.text))

    def poll(self) -> None:
        """Do nothing: violations are noted at once."""

    def armed(self, what: Fault, count: int) -> None:
        """Do nothing: each batch asks the monitor when it begins."""

    @property
    def hanging(self) -> int:
        """0: batches hang in the monitor."""
        return 0

    def release_hangs(self) -> None:
        """Do nothing: batches hang in the monitor."""

    def fail_if_due(self) -> None:
        """Fail or hang, for a batch that begins, if the test has asked for it."""
        if self.monitor.take("hang"):
            self.monitor.hang()
        if self.monitor.take("illegal-address"):
            self.monitor.lost = ILLEGAL_ADDRESS
        if self.monitor.lost is not None:
            raise DeviceLostError(f"the device is lost: {self.monitor.lost}")

    def work(self, duration_ns: int, *, fills: bool) -> None:
        """Keep the device busy: wait, as if computing without the GIL."""
        if not duration_ns:
            return
        if fills:
            with self._filled:
                self._working.wait(duration_ns / 1e9)
        else:
            self._working.wait(duration_ns / 1e9)
