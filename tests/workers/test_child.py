"""A worker's side of a front, with an engine that does what no engine should."""

import asyncio
import gc
import json
import os
import threading
import weakref

import numpy as np
import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.core.inputs import InputCheck
from asynctrt.errors import InputError
from asynctrt.scheduling.request import Request
from asynctrt.statistics import TRUSTED
from asynctrt.workers.child import FrontSession
from asynctrt.workers.layout import Layouts
from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.messages import Attach, Kind
from asynctrt.workers.ring import Receiver, Sender, ring_nbytes
from tests.helpers import WAIT_S, until
from tests.workers import local
from tests.workers.models import ROW, rows

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]


class OwnError(InputError):
    """A class that a front does not know."""


class Broken:
    """Raises, or answers with what is no result."""

    inputs, outputs = (ROW,), (ROW,)
    batching, has_plain_rows = TRUSTED, True
    check = InputCheck(inputs)
    requests = ()

    @property
    def intake(self):
        return self

    def submit(self, future, checked, *_):
        (array,), rows, key = checked
        if array[0, 0] == 1:
            raise RuntimeError("a rule of ours is broken")
        if array[0, 0] == 2:
            raise OwnError("in its own words")
        if array[0, 0] == 3:
            return None
        # As a driver answers the requests of a batch.
        asyncio.get_running_loop().call_soon(future.set_result, "no result")
        return Request(rows, key, 0, 0)

    def submit_split(self, *_):
        return self

    def begin(self, loop):
        async def answer():
            return "no result"

        return loop.create_task(answer())


async def test_the_memory_of_a_front_that_goes_is_let_go_of_whatever_it_had_asked_for():
    """At once: a worker collects garbage seldom."""
    go = threading.Event()

    def wait(inputs):
        go.wait(WAIT_S)
        return {"x": inputs["x"]}

    async with local.opened(FunctionModel(wait, inputs=ROW, outputs=ROW), device="host", max_rows=2) as (
        engine,
        _,
        workers,
    ):
        calls = [engine.submit(rows(*range(count))) for count in (1, 2, 5, 1)]
        served = workers.served
        await until(lambda: len(served._works) == len(calls))
        memory = weakref.ref(served._memory)
        gc.disable()
        try:
            served = None
            workers.all[-1].end("ended by SIGKILL")
            go.set()
            await until(lambda: memory() is None)
        finally:
            gc.enable()
        assert [len(answer["x"]) for answer in await asyncio.gather(*calls)] == [1, 2, 5, 1]


async def test_what_breaks_a_rule_is_answered_and_what_follows_too(caplog):
    loop = asyncio.get_running_loop()
    heap, rings = SharedMemory.create(1 << 16), SharedMemory.create(2 * ring_nbytes(64))
    theirs, own = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    fds = [os.dup(fd) for fd in (heap.fd, rings.fd, theirs, own)]
    sender, receiver = Sender(rings, 0, 64, theirs), Receiver(rings, ring_nbytes(64), 64, own)
    attach = Attach(heap.nbytes, rings.nbytes, 0, 64)
    served = FrontSession(loop, Broken(), attach, fds, lambda error: pytest.fail(str(error)))
    layout = Layouts((ROW,), (ROW,)).of_sizes(())
    broken = "a rule of ours is broken", "in its own words", "string indices", "string indices"
    for number, told in enumerate(broken, start=1):
        np.copyto(layout.arrays(heap, number * 4096, 1).inputs["x"], number)
        sender.put(Kind.SUBMIT, 0, 0, number, 2**63 - 1, number * 4096, 1, 0, 0, 0)
        sender.publish()
        found = []
        await until(lambda found=found: found.extend(receiver.take()) or found)
        if found[0][0] == Kind.LARGE:
            sender.put(Kind.FETCH, 0, 0, number, 2**63 - 1, 32768, 0, 0, 0, 0)
            sender.publish()
            found.clear()
            await until(lambda found=found: found.extend(receiver.take()) or found)
        assert found[0][0] == Kind.ERROR
        text = json.loads(heap.buffer[32768 : 32768 + found[0][8]])
        assert told in text["text"]
        assert text["kind"] == ("InputError" if number == 2 else "InternalError")
    assert "could not take or answer a request" in caplog.text
    assert not served._works
    served.close()
    heap.close()
    rings.close()
    os.close(theirs)
    os.close(own)
