"""Workers that are no processes, with a real engine on any device: all that happens is seen from a test."""

import asyncio
import os
from contextlib import asynccontextmanager

import asynctrt
from asynctrt.workers.child import FrontSession
from asynctrt.workers.messages import Attach, Attached, Close, Ready
from asynctrt.workers.spawn import SPAWNER
from tests.helpers import WAIT_S


class Worker:
    """The worker's side of each front, in this process."""

    pid = 1

    def __init__(self, engine, hear, died):
        self.engine, self.hear, self.died = engine, hear, died
        self.how_it_ended = ""
        self.served = None

    def say_ready(self):
        self.hear(Ready(self.engine.description, self.engine.statistics()))

    def send(self, message, fds=()):
        if isinstance(message, Attach):
            loop = asyncio.get_running_loop()
            self.served = FrontSession(loop, self.engine, message, [os.dup(fd) for fd in fds], self.lose)
            self.hear(Attached(message.number, ""))
        elif isinstance(message, Close):
            asyncio.get_running_loop().call_soon(self.end, "ended with status 0")

    def lose(self, error):
        raise error

    def kill(self, _why=""):
        asyncio.get_running_loop().call_soon(self.end, "ended by SIGKILL")

    def end(self, how):
        if not self.how_it_ended:
            self.how_it_ended = how
            if self.served is not None:
                self.served.close()
                assert not self.served._layouts._arrays, "arrays over the memory of a front were kept"
                self.served = None
            self.died(how)


class Workers:
    """Gives the workers of one engine."""

    is_shared = False

    def __init__(self, engine):
        self.engine = engine
        self.all = []

    @property
    def served(self):
        """The worker's side of the latest front."""
        return self.all[-1].served

    async def start(self, want, hear, died):
        assert not want.alone
        self.all.append(Worker(self.engine, hear, died))
        asyncio.get_running_loop().call_soon(self.all[-1].say_ready)
        return self.all[-1]


@asynccontextmanager
async def opened(model, *, device, front=None, **settings):
    """An engine, and one that has it for its worker: yields both, and the workers.

    :param front: options of the front.
    """
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, device=device, **settings) as engine:
        workers = Workers(engine)
        token = SPAWNER.set(workers)
        try:
            async with asynctrt.open("local", isolation="process", **(front or {})) as isolated:
                yield isolated, engine, workers
        finally:
            SPAWNER.reset(token)
        assert isolated._front._heap.blocks == 0, "blocks were not given back"
        assert not isolated._front._layouts._arrays, "arrays over the memory were kept"
        for context in engine._pool.contexts:
            kept = [slab.layout for slab in context._bindings_in_place]
            assert not kept, "bindings were kept that hold the memory of a front"
