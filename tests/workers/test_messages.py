"""Messages to the other end of a socket that does not read just now."""

import asyncio
import os
import socket
import threading

import pytest

from asynctrt.workers.messages import Close, Kill, Outbox, To, channel, receive, send
from asynctrt.workers.process import ChildProcess
from asynctrt.workers.spawn import SharedWorker, SharedWorkers
from tests.helpers import WAIT_S, until

pytestmark = pytest.mark.anyio
COUNT = 2000
"""More messages than a socket keeps."""


@pytest.fixture
def ends():
    own, other = channel()
    own.settimeout(0)
    other.settimeout(0)
    with own, other:
        yield own, other


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def read(other, count):
    """Read ``count`` messages. The loop has turns in between."""
    found = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            try:
                found.append(receive(other))
            except BlockingIOError:
                await asyncio.sleep(0)
    return found


async def test_what_is_not_read_at_once_comes_later_and_in_order(ends):
    own, other = ends
    outbox = Outbox(asyncio.get_running_loop(), own)
    for number in range(COUNT):
        outbox.put(number)
    assert not outbox.is_empty, "the socket had room for all, which tests nothing"
    assert [message for message, _ in await read(other, COUNT)] == list(range(COUNT))
    await until(lambda: outbox.is_empty)
    outbox.put("at once")
    assert receive(other) == ("at once", [])


def test_nobody_waits_for_an_end_that_does_not_read_unless_he_means_to():
    """A worker's socket blocks, as a thread waits at it; its event loop must not."""
    own, other = channel()
    told = []

    def send_all():
        try:
            for number in range(COUNT):
                send(own, number, flags=socket.MSG_DONTWAIT)
        except OSError as error:
            told.append(error)

    with own:
        with other:
            thread = threading.Thread(target=send_all)
            thread.start()
            thread.join(WAIT_S)
            was_alive = thread.is_alive()
        thread.join()  # With the other end gone it is over in any case.
    assert not was_alive
    assert [type(error) for error in told] == [BlockingIOError]


async def test_descriptors_that_are_closed_meanwhile_come_along(ends):
    own, other = ends
    outbox = Outbox(asyncio.get_running_loop(), own)
    before = descriptors()
    while outbox.is_empty:
        outbox.put("filler")
    reading, writing = os.pipe()
    outbox.put("with one", [writing])
    os.close(writing)
    given = []
    while not given or given[-1][0] != "with one":
        given += await read(other, 1)
    os.write(given[-1][1][0], b"through")
    assert os.read(reading, 7) == b"through"
    os.close(given[-1][1][0])
    os.close(reading)
    await until(lambda: outbox.is_empty)
    assert descriptors() == before


@pytest.mark.parametrize("dies", [True, False])
async def test_what_is_left_when_it_ends_keeps_no_descriptor(ends, dies):
    own, other = ends
    before = descriptors()
    outbox = Outbox(asyncio.get_running_loop(), own)
    while outbox.is_empty:
        outbox.put("filler")
    reading, writing = os.pipe()
    outbox.put("with one", [writing])
    os.close(reading)
    os.close(writing)
    if dies:
        other.close()
        before -= 1
        await until(lambda: outbox.is_empty)
        outbox.put("dropped")
        assert outbox.is_empty
    outbox.close()
    outbox.close()
    assert descriptors() == before


async def test_a_front_loses_none_that_its_parent_has_not_read(ends):
    own, other = ends
    shared = SharedWorkers(asyncio.get_running_loop(), own, lambda *_: None)
    worker = SharedWorker(7, shared._tell, lambda _: None, lambda _: None)
    for _ in range(COUNT):
        worker.kill("again")
    assert [message for message, _ in await read(other, COUNT)] == [To(7, Kill("again"))] * COUNT
    shared.close()


async def test_a_parent_loses_none_that_its_worker_has_not_read(ends):
    own, other = ends
    process = ChildProcess.__new__(ChildProcess)
    process.how_it_ended, process.outbox = "", Outbox(asyncio.get_running_loop(), own)
    for _ in range(COUNT):
        process.send(Close())
    assert [message for message, _ in await read(other, COUNT)] == [Close()] * COUNT
