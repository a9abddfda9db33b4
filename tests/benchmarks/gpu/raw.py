"""The loops that the engine is compared with: they enqueue the same batches, without asyncio.

A batch is copied in, computed by replaying a graph of the model's kernels, and copied out. The engine puts
the same on a stream; here a few lines of a loop do.
"""

from itertools import pairwise

from asynctrt._util import clock
from asynctrt.devices.arenas import Arenas
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out

WARM_UP_NS = 50_000_000


class Batch:
    """Memory and a context for one batch at a time.

    :param sizes: of each dynamic dimension.
    """

    def __init__(self, device, model, rows, arena, stream, *, is_captured, sizes=None):
        self.stream = stream
        self.rows = rows
        layout = lay_out(model.inputs, model.outputs, sizes or {}, rows)
        self._memory = StagingBuffers(device, layout.nbytes)
        self.slab = Slab(layout, self._memory)
        self._context = model.create_context(device)
        self._binding = self._context.bind(self.slab.input_memory(), self.slab.output_memory())
        self._arena = arena
        # Events that take times cost the GPU some, so what is measured goes without.
        self.computed, self.end = (device.create_event(is_timed=False) for _ in range(2))
        self._marks = [device.create_event() for _ in range(4)]
        self._graph = None
        for _ in range(2):  # A model may plan and allocate at its first batch of a size.
            self.launch_timed()
            self.end.synchronize()
        if is_captured:
            stream.begin_capture()
            self._compute()
            self._graph = stream.end_capture()

    def launch(self, after=None):
        """Enqueue it. Its computing waits for ``after``; its copy in does not."""
        self._copy_in()
        if after is not None:
            self.stream.wait(after)
        self._compute()
        if after is not None:
            self.stream.record(self.computed)
        self._copy_out()
        self.stream.record(self.end)

    def launch_timed(self):
        """Enqueue it with events that time each stage."""
        record = self.stream.record
        record(self._marks[0])
        self._copy_in()
        record(self._marks[1])
        self._compute()
        record(self._marks[2])
        self._copy_out()
        record(self._marks[3])
        record(self.end)

    def stages_ns(self):
        """Return the times of copy in, computing and copy out after :meth:`launch_timed`."""
        return [after.elapsed_ns(before) for before, after in pairwise(self._marks)]

    def fill(self, *rows):
        """Write its inputs."""
        for into, given in zip(self.slab.inputs, rows, strict=True):
            into[...] = given

    def answer(self):
        """Return its outputs, once it has ended."""
        return {name: array[: self.rows] for name, array in self.slab.outputs.items()}

    def close(self):
        if self._graph is not None:
            self._graph.close()
        self._context.close()
        self._memory.close()

    def _copy_in(self):
        if self._memory.device_buffer is not None:
            self.slab.put_in(self.stream, self.rows)

    def _compute(self):
        if self._graph is None:
            self._binding.enqueue(self.rows, profile=None, stream=self.stream, arena=self._arena)
        else:
            self._graph.launch(stream=self.stream)

    def _copy_out(self):
        if self._memory.device_buffer is not None:
            self.slab.put_out(self.stream, self.rows)


class RawLoop:
    """Launches a few batches repeatedly.

    :param depth: how many are on the GPU, so that it never has nothing to do.
    :param is_overlapped: each in a stream of its own, computing in one arena in turn, so that copies run
        beside kernels; otherwise all in one stream, one after the other.
    :param arenas: with more than one, as many batches compute side by side.
    """

    def __init__(
        self, device, model, rows, *, depth, is_overlapped=False, is_captured=True, arenas=1, sizes=None
    ):
        streams = [device.create_stream() for _ in range(depth if is_overlapped else 1)]
        self._streams = streams
        self._arenas = Arenas(device, arenas, nbytes=max(model.capabilities.enqueue_nbytes, 1))
        memory = [
            arena.memory if model.capabilities.enqueue_nbytes else None for arena in self._arenas.arenas
        ]
        # A batch waits for the one that computes in its arena before it, if that is on another stream.
        self._behind = arenas if is_overlapped and arenas < depth else 0
        self.batches = [
            Batch(
                device,
                model,
                rows,
                memory[number % arenas],
                streams[number % len(streams)],
                is_captured=is_captured,
                sizes=sizes,
            )
            for number in range(depth)
        ]

    def fill(self, *rows):
        for batch in self.batches:
            batch.fill(*rows)

    def _launch(self, at):
        before = self.batches[at - self._behind].computed if self._behind else None
        self.batches[at].launch(before)

    def batches_per_s(self, seconds):
        """Return the rate when the next batch is launched as soon as the oldest has ended."""
        batches = self.batches
        for at in range(len(batches)):
            self._launch(at)
        count = at = 0
        start_ns = None
        now_ns = begun_ns = clock.now_ns()
        while start_ns is None or now_ns - start_ns < seconds * 1e9:
            batch = batches[at]
            while not batch.end.query():
                batch.end.nudge()
            if batch.end.error is not None:
                raise batch.end.error
            self._launch(at)
            at = (at + 1) % len(batches)
            now_ns = clock.now_ns()
            if start_ns is not None:
                count += 1
            elif now_ns - begun_ns > WARM_UP_NS:
                start_ns = now_ns
        for batch in batches:
            batch.end.synchronize()
        return count / (now_ns - start_ns) * 1e9

    def stages_us(self, count=15):
        """Return the median times of copy in, computing and copy out on the device."""
        batch = self.batches[0]
        found = []
        for _ in range(count):
            batch.launch_timed()
            batch.end.synchronize()
            found.append(batch.stages_ns())
        return [sorted(stage)[count // 2] / 1e3 for stage in zip(*found, strict=True)]

    def close(self):
        for stream in self._streams:
            stream.close(10.0)
        for batch in self.batches:
            batch.close()
        self._arenas.close()
