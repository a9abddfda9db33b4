"""Messages between two processes, both ends as unkind as processes are."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.ring import Receiver, Sender, ring_nbytes

ROOT = Path(__file__).parent.parent.parent
COUNT = 200_000

PRODUCER = """
import random, sys, time
from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.ring import Sender
fd, nbytes, eventfd, count = map(int, sys.argv[1:])
sender = Sender(SharedMemory(fd, nbytes), 0, 64, eventfd)
random.seed(1)
number = 0
while number < count:
    for _ in range(min(random.randrange(1, 20), sender.room, count - number)):
        sender.put(1, 2, 3, number, -number, number, 0, 0, 0, number * number)
        number += 1
    sender.publish()
    if random.random() < 0.001:
        time.sleep(0.0005)
"""


@pytest.fixture
def memory():
    made = SharedMemory.create(ring_nbytes(64))
    yield made
    made.close()


@pytest.fixture
def receiver(memory):
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    yield Receiver(memory, 0, 64, eventfd)
    os.close(eventfd)


@pytest.fixture
def sender(memory, receiver):
    return Sender(memory, 0, 64, receiver.eventfd)


def test_what_was_put_is_taken_once_published(sender, receiver):
    sender.put(1, 2, 3, 4, -5, 6, 7, 8, 9, 10)
    assert not list(receiver.take())
    sender.publish()
    assert list(receiver.take()) == [(1, 2, 3, 4, -5, 6, 7, 8, 9, 10)]
    assert not list(receiver.take())
    assert sender.room == 64


def test_only_a_consumer_that_sleeps_is_woken_and_only_once(sender, receiver):
    sender.publish()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(receiver.eventfd)
    assert receiver.sleep()
    for _ in range(3):
        sender.put(*range(10))
        sender.publish()
    assert os.eventfd_read(receiver.eventfd) == 1
    os.eventfd_write(receiver.eventfd, 1)
    receiver.wake()
    assert len(list(receiver.take())) == 3
    assert receiver.sleep()
    sender.put(*range(10))
    sender.publish()
    assert os.eventfd_read(receiver.eventfd) == 1


def test_a_consumer_does_not_sleep_over_an_entry(sender, receiver):
    sender.put(*range(10))
    sender.publish()
    assert not receiver.sleep()
    assert len(list(receiver.take())) == 1


def test_the_beat_is_seen(sender, receiver):
    assert sender.beat_ns == 0
    receiver.beat(123)
    assert sender.beat_ns == 123


def test_no_entry_is_lost_torn_or_out_of_order_between_processes(memory, receiver):
    eventfd = receiver.eventfd
    command = [sys.executable, "-c", PRODUCER, *map(str, (memory.fd, memory.nbytes, eventfd, COUNT))]
    producer = subprocess.Popen(command, pass_fds=[memory.fd, eventfd], cwd=ROOT)
    try:
        expected = sleeps = 0
        end = time.monotonic() + 50
        while expected < COUNT:
            for fields in receiver.take():
                assert fields == (1, 2, 3, expected, -expected, expected, 0, 0, 0, expected * expected)
                expected += 1
            if expected < COUNT and receiver.sleep():
                sleeps += 1
                ready, _, _ = select.select([eventfd], [], [], 40)
                assert ready, f"not woken after {expected} entries"
                receiver.wake()
            assert time.monotonic() < end
        assert sleeps > 10
        assert producer.wait(40) == 0
    finally:
        producer.kill()
        producer.wait()


def test_a_consumer_that_goes_to_sleep_twice_is_woken(sender, receiver):
    # It was woken, and was due to look again anyway, as there was more when it went to sleep before.
    assert receiver.sleep()
    assert receiver.sleep()
    sender.put(*range(1, 11))
    sender.publish()
    assert os.eventfd_read(receiver.eventfd) == 1
