"""What does a worker's loop take for a row, by the rows of the groups in which they come?

One process poses as the fronts of a server: it gives a worker groups of rows of a no-op model through shared
memory, gives it others as soon as these are answered, and does nothing else. So the worker's loop is what
limits the rows/s, as it is behind many fronts.
"""

import asyncio
import os
import time
from types import SimpleNamespace

import psutil
import uvloop

from asynctrt.options import Options
from asynctrt.scheduling.request import NO_DEADLINE_NS
from asynctrt.workers.layout import Layouts
from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.messages import Attach, Attached, Kind, Ready, Want
from asynctrt.workers.process import WorkerProcess
from asynctrt.workers.ring import Receiver, Sender, ring_nbytes
from tests.benchmarks.common import arguments, median, save, show, spread

MODEL = "tests.benchmarks.serving:noop"
ENTRIES = 4096
BLOCK_NBYTES = 1 << 20
START_S = 60
WARM_UP_S = 0.5


class Front:
    """What a front has: memory, rings, and groups in it."""

    def __init__(self, layout):
        self._layout = layout
        self._memory = SharedMemory.create(256 * BLOCK_NBYTES)
        self._rings = SharedMemory.create(2 * ring_nbytes(ENTRIES))
        self._eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self._sender = Sender(self._rings, 0, ENTRIES, self._eventfds[0])
        self._receiver = Receiver(self._rings, ring_nbytes(ENTRIES), ENTRIES, self._eventfds[1])
        self._blocks = {}
        self._free = []
        self._next = 0
        self.answered = 0

    def attach(self, worker, number):
        message = Attach(self._memory.nbytes, self._rings.nbytes, number, ENTRIES)
        worker.send(message, [self._memory.fd, self._rings.fd, *self._eventfds])

    def fill(self, groups, rows):
        """Send groups of ``rows`` rows until the worker has ``groups`` of them."""
        step = -(-self._layout.nbytes(rows) // 64) * 64
        given = 0
        while len(self._blocks) < groups:
            block = self._free.pop() if self._free else len(self._blocks) * step
            self._memory.words[block // 8] = 0
            self._next += 1
            self._blocks[self._next] = block
            self._sender.put(Kind.SUBMIT, 0, 0, self._next, NO_DEADLINE_NS, block, rows, 0, 0, 0)
            given += 1
        if given:
            self._sender.publish()

    def take(self):
        """Take the answers that there are."""
        for fields in self._receiver.take():
            assert fields[0] == Kind.ANSWER, fields
            self._free.append(self._blocks.pop(fields[3]))
            self.answered += 1

    def reset(self):
        """Forget the places of blocks, once all are answered."""
        assert not self._blocks
        self._free.clear()


def keep_busy(fronts, groups, rows, seconds):
    """Let the worker never run out of groups; return how many it answered."""
    before = sum(front.answered for front in fronts)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for front in fronts:
            front.take()
            front.fill(groups, rows)
    return sum(front.answered for front in fronts) - before


def drain(fronts):
    """Take answers until there are no more to come."""
    end_s = time.perf_counter() + START_S
    while any(front._blocks for front in fronts):
        if time.perf_counter() > end_s:
            raise TimeoutError("the worker does not answer any more")
        for front in fronts:
            front.take()


def measure(worker, fronts, rows, options):
    """Measure groups of one size: rows/s, and what they cost the worker."""
    groups = max(options.in_flight // len(fronts) // rows, 1)
    keep_busy(fronts, groups, rows, WARM_UP_S)
    before, began_s = sum(worker.cpu_times()[:2]), time.perf_counter()
    answered = keep_busy(fronts, groups, rows, options.seconds)
    took_s, cpu_s = time.perf_counter() - began_s, sum(worker.cpu_times()[:2]) - before
    drain(fronts)
    for front in fronts:
        front.reset()
    return {
        "rows_per_s": answered * rows / took_s,
        "us_per_row": cpu_s / (answered * rows) * 1e6,
        "us_per_group": cpu_s / answered * 1e6,
        "worker_cores": cpu_s / took_s,
    }


async def opened(options):
    """Return a worker and the fronts that it has."""
    heard = SimpleNamespace(description=None, attached=0, how_it_ended="")
    changed = asyncio.Event()

    def hear(message):
        if isinstance(message, Ready):
            heard.description = message.description
        elif isinstance(message, Attached):
            assert not message.error, message.error
            heard.attached += 1
        changed.set()

    async def until(condition):
        while not condition():
            changed.clear()
            await changed.wait()
            if heard.how_it_ended:
                raise RuntimeError(f"the worker {heard.how_it_ended}")

    def died(how):
        heard.how_it_ended = how
        changed.set()

    want = Want(MODEL, "host", Options(max_rows=options.max_rows), "")
    async with asyncio.timeout(START_S):
        worker = await WorkerProcess.start(want, hear, died)
        await until(lambda: heard.description is not None)
        layout = Layouts(heard.description.inputs, heard.description.outputs).of_sizes(())
        fronts = [Front(layout) for _ in range(options.fronts)]
        for number, front in enumerate(fronts, start=1):
            front.attach(worker, number)
        await until(lambda: heard.attached == len(fronts))
    return worker, fronts


async def measured(options):
    worker, fronts = await opened(options)
    process = psutil.Process(worker.pid)
    sizes = [int(size) for size in options.rows.split(",")]
    runs = {rows: [] for rows in sizes}
    try:
        for _ in range(options.repeats):
            for rows in sizes:
                runs[rows].append(measure(process, fronts, rows, options))
                print(f"  groups of {rows}: {runs[rows][-1]['rows_per_s']:,.0f} rows/s", flush=True)
    finally:
        process.kill()
    return runs


def main():
    options = arguments(
        __doc__, rows="1,3,16", fronts=16, in_flight=1344, max_rows=64, seconds=1.0, repeats=5
    )
    runs = uvloop.run(measured(options))
    lines = [
        (
            f"{rows}",
            f"{median(found, 'rows_per_s'):,.0f}",
            spread(found, "rows_per_s"),
            f"{median(found, 'us_per_row'):.2f}",
            f"{median(found, 'us_per_group'):.1f}",
            f"{median(found, 'worker_cores'):.2f}",
        )
        for rows, found in runs.items()
    ]
    columns = "rows of a group", "rows/s", "spread", "CPU µs a row", "µs a group", "cores"
    show(f"A worker behind {options.fronts} fronts, batches of up to {options.max_rows}", columns, lines)
    save(options.json, __doc__, {f"groups of {rows}": found for rows, found in runs.items()})


if __name__ == "__main__":
    main()
