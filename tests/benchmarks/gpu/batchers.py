"""What the engine is compared with: bare loops, a batcher by hand, and ``async-batcher``.

Those of ``ort_cuda`` run the engine's own sessions by I/O binding, from pinned memory, on their own streams.
"""

import asyncio
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import numpy as np

from asynctrt._util import clock
from asynctrt.devices.cuda.bindings import driver
from asynctrt.devices.cuda.streams import CudaStream
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out


class Runner:
    """One session on one stream, with pinned buffers for each shape. Runs a batch and waits for it."""

    def __init__(self, device, model, rows_max):
        self.device, self.model, self.rows_max = device, model, rows_max
        self.stream = device.create_stream()
        self.end = device.create_event(is_timed=False)
        self.context = model.create_context_on(device, self.stream)
        self._slabs = {}

    def slab(self, batch):
        """Return the slab for rows of this shape, and its binding."""
        shape = tuple(array.shape[1:] for array in batch[0].values())
        found = self._slabs.get(shape)
        if found is None:
            symbols = {}
            for spec, array in zip(self.model.inputs, batch[0].values(), strict=True):
                named = zip(spec.dims, array.shape[1:], strict=True)
                symbols |= {dim: size for dim, size in named if isinstance(dim, str)}
            layout = lay_out(self.model.inputs, self.model.outputs, symbols, self.rows_max)
            slab = Slab(layout, StagingBuffers(self.device, layout.nbytes))
            binding = self.context.bind(slab.input_memory(), slab.output_memory())
            found = self._slabs[shape] = slab, binding
        return found

    def stage(self, batch):
        """Copy the rows of a batch side by side."""
        slab, _ = self.slab(batch)
        for view, spec in zip(slab.inputs, self.model.inputs, strict=True):
            np.concatenate([rows[spec.name] for rows in batch], out=view[: len(batch)])

    def put(self, batch, *, has_copies=True):
        """Put a batch whose rows are staged on the stream."""
        slab, binding = self.slab(batch)
        rows = len(batch)
        if has_copies:
            slab.put_in(self.stream, rows)
        binding.enqueue(rows, profile=None, stream=self.stream, arena=None)
        if has_copies:
            slab.put_out(self.stream, rows)

    def wait(self):
        """Wait until the stream has come to its end, as promptly as can be: on a GPU the driver spins."""
        self.stream.record(self.end)
        if isinstance(self.stream, CudaStream):
            driver.cuStreamSynchronize(self.stream.handle)
        assert self.end.synchronize(60)
        if self.end.error is not None:
            raise self.end.error

    def run(self, batch):
        """Run a batch, a list of rows; return a list of answers."""
        self.device.activate()
        self.stage(batch)
        self.put(batch)
        self.wait()
        slab, _ = self.slab(batch)
        outputs = {name: array[: len(batch)].copy() for name, array in slab.outputs.items()}
        return [{name: array[row : row + 1] for name, array in outputs.items()} for row in range(len(batch))]

    def close(self):
        self.context.close()
        self.stream.close(10)
        for slab, _ in self._slabs.values():
            slab.buffers.close()


def bare_loop(runners, batch, seconds):
    """Rows a second of bare loops, one in a thread of its own for each runner."""
    is_over = False

    def loop(runner):
        runner.device.activate()
        runner.run(batch)
        count, start_ns = 0, clock.now_ns()
        while not is_over:
            runner.run(batch)
            count += 1
        return count / (clock.now_ns() - start_ns) * 1e9

    with ThreadPoolExecutor(len(runners)) as pool:
        futures = [pool.submit(loop, runner) for runner in runners]
        threading.Event().wait(seconds)
        is_over = True
        return sum(future.result() for future in futures) * len(batch)


def back_to_back(runner, batch, seconds):
    """Rows a second of a bare loop that copies nothing and waits every eight batches: computing alone."""
    runner.run(batch)
    count, start_ns = 0, clock.now_ns()
    while clock.now_ns() - start_ns < seconds * 1e9:
        for _ in range(8):
            runner.put(batch, has_copies=False)
        runner.wait()
        count += 8
    return count * len(batch) / (clock.now_ns() - start_ns) * 1e9


class ByHand:
    """The batcher that a good engineer writes: as soon as a thread is free it takes all that waits.

    :param runs: one function for each thread, which returns the answers to a list of rows. All have the
        shape of the oldest request's.
    """

    def __init__(self, runs, rows_max):
        self._free, self._rows_max = deque(runs), rows_max
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(len(runs))
        self._waiting = {}
        self._numbers = count()

    def submit(self, rows):
        """Queue some rows; the future has the answer."""
        future = self._loop.create_future()
        arrays = rows.values() if isinstance(rows, dict) else (rows,)
        queue = self._waiting.setdefault(tuple(array.shape[1:] for array in arrays), deque())
        queue.append((next(self._numbers), rows, future))
        if self._free:
            self._loop.call_soon(self._next)
        return future

    async def infer(self, rows):
        return await self.submit(rows)

    def _next(self):
        if not self._free or not self._waiting:
            return
        shape = min(self._waiting, key=lambda shape: self._waiting[shape][0][0])
        queue = self._waiting[shape]
        taken = [queue.popleft() for _ in range(min(self._rows_max, len(queue)))]
        if not queue:
            del self._waiting[shape]
        run = self._free.popleft()
        work = self._loop.run_in_executor(self._pool, run, [rows for _, rows, _ in taken])
        work.add_done_callback(partial(self._done, run, taken))

    def _done(self, run, taken, work):
        self._free.append(run)
        self._next()  # First, as the device waits for it.
        error = work.exception()
        for number, (_, _, future) in enumerate(taken):
            if future.done():
                continue
            if error is None:
                future.set_result(work.result()[number])
            else:
                future.set_exception(error)

    async def aclose(self):
        self._pool.shutdown()


def async_batcher(runner):
    """Return ``async-batcher`` over the same session, or ``None`` if it is not installed."""
    try:
        from async_batcher.batcher import AsyncBatcher
    except ImportError:
        return None

    class Peer(AsyncBatcher):
        def process_batch(self, batch):
            answers = [None] * len(batch)
            by_shape = defaultdict(list)
            for number, rows in enumerate(batch):
                by_shape[tuple(array.shape for array in rows.values())].append(number)
            for numbers in by_shape.values():
                found = runner.run([batch[number] for number in numbers])
                for number, answer in zip(numbers, found, strict=True):
                    answers[number] = answer
            return answers

        async def infer(self, rows):
            return await self.process(rows)

        async def aclose(self):
            await self.stop(force=True)
            self.executor.shutdown()

    return Peer(max_batch_size=runner.rows_max, max_queue_time=0.0, executor=ThreadPoolExecutor(1))
