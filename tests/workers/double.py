"""Workers that are no processes: they do what a test says, over the real rings and memory."""

import asyncio
import os
from contextlib import asynccontextmanager

import numpy as np

import asynctrt
from asynctrt._util import clock
from asynctrt.core.description import Description
from asynctrt.workers.layout import LAUNCHED, SYMBOLS, Layouts
from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.messages import Attach, Attached, Close, Kind, Ready
from asynctrt.workers.ring import Receiver, Sender, ring_nbytes
from asynctrt.workers.spawn import SPAWNER
from tests.helpers import WAIT_S
from tests.workers.models import HANG, SEGFAULT

KIND = "tests.workers.models:kind"


def opened(model=KIND, **settings):
    """An engine of such workers: open it in :func:`workers`."""
    return asynctrt.open(model, max_queue_rows=100_000, **{"isolation": "process", **settings})


class Worker:
    """One that doubles its input as soon as it has it, unless it ``holds``. It dies of SEGFAULT, hangs
    with HANG, and does not answer then what came at the same time."""

    def __init__(self, workers, hear, died):
        self.workers, self.hear, self.died = workers, hear, died
        self.loop = asyncio.get_running_loop()
        self.pid, self.how_it_ended = 1, ""
        self.receiver = None
        self.holds = False

    def say_ready(self):
        if not self.how_it_ended:
            self.hear(self.workers.ready)

    def send(self, message, fds=()):
        if isinstance(message, Attach) and self.workers.why_not:
            self.hear(Attached(message.number, self.workers.why_not))
        elif isinstance(message, Attach):
            heap, rings, own, front = (os.dup(fd) for fd in fds)
            self.memory, ring = (
                SharedMemory(heap, message.heap_nbytes),
                SharedMemory(rings, message.rings_nbytes),
            )
            self.memory.close()
            ring.close()
            self.eventfds = own, front
            self.receiver = Receiver(ring, 0, message.capacity, own)
            self.sender = Sender(ring, ring_nbytes(message.capacity), message.capacity, front)
            described = self.workers.ready.description
            self.layouts = Layouts(described.inputs, described.outputs)
            self.loop.add_reader(own, self.look)
            self.loop.call_soon(self.look)
            if self.workers.attaches:
                self.hear(Attached(message.number, ""))
        elif isinstance(message, Close):
            self.loop.call_soon(self.end, "ended with status 0")

    def kill(self, _why=""):
        if self.workers.says_ready_when_killed:
            self.say_ready()
        self.loop.call_soon(self.end, "ended by SIGKILL")

    def end(self, how):
        if self.how_it_ended:
            return
        self.how_it_ended = how
        if self.receiver is not None:
            self.loop.remove_reader(self.receiver.eventfd)
            for fd in self.eventfds:
                os.close(fd)
        self.died(how)

    def look(self):
        if self.how_it_ended or self.holds:
            return
        self.receiver.wake()
        done, stamps = [], {}
        for kind, _, _, number, _, block, rows, *_ in self.receiver.take():
            if kind != Kind.SUBMIT:
                continue
            first = block // 8 + SYMBOLS
            layout = self.layouts.of_sizes(tuple(self.memory.words[first : first + self.layouts.symbols]))
            word = block // 8 + LAUNCHED
            self.memory.words[word], stamps[word] = 1, layout.stamp(number)
            arrays = layout.arrays(self.memory, block, rows)
            (given,), (asked,) = arrays.inputs.values(), arrays.outputs.values()
            np.multiply(given, 2, out=asked)
            self.workers.runs += 1
            done.append((number, rows, SEGFAULT in given, HANG in given))
        if any(deadly for *_, deadly, _ in done):
            self.end("ended by SIGSEGV")
            return
        if any(hangs for *_, hangs in done):
            self.holds = True
            return
        for word, stamp in stamps.items() if self.workers.stamps else ():
            self.memory.words[word] = stamp
        for number, rows, *_ in done:
            self.sender.put(Kind.ANSWER, 1, rows, number, clock.now_ns(), 0, 1000, 0, 0, 0)
        self.sender.publish()
        self.receiver.sleep()


class Workers:
    """Gives workers. They are ready at once while ``starts``, and have the front's memory if ``attaches``."""

    is_shared = False

    def __init__(self, ready):
        self.ready = ready
        self.all = []
        self.starts, self.says_ready_when_killed, self.attaches = True, False, True
        self.runs = 0
        """Groups that they have taken."""
        self.stamps = True
        """Whether they say in a block that its answer is there."""
        self.why_not = ""
        """Why they cannot have the memory of the front."""

    async def start(self, want, hear, died):
        assert not want.alone
        self.all.append(Worker(self, hear, died))
        if self.starts:
            self.all[-1].loop.call_soon(self.all[-1].say_ready)
        return self.all[-1]


@asynccontextmanager
async def workers(model):
    """Workers for engines of this model that are opened inside."""
    async with asynctrt.open(model) as engine:
        one = engine.statistics()
        description = Description(
            engine.name, engine.platform, "host", engine.inputs, engine.outputs, 4096, one.contexts, 1
        )
    made = Workers(Ready(description, one))
    token = SPAWNER.set(made)
    try:
        async with asyncio.timeout(WAIT_S):
            yield made
    finally:
        SPAWNER.reset(token)
