"""Lines are written by a thread: a reader that stands still costs lines, and nobody's time."""

import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest

from asynctrt.serving import line_writer
from asynctrt.serving.line_writer import LineWriter
from asynctrt.serving.server_log import WriterHandler
from tests.helpers import WAIT_S

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    ends = [reading, writing]
    yield ends
    for end in ends:
        if end >= 0:
            os.close(end)


def read(reading, nbytes):
    """Read what comes, in a thread that a test does not wait for without end."""
    content = bytearray()

    def run():
        while len(content) < nbytes and (more := os.read(reading, 1 << 16)):
            content.extend(more)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert len(content) >= nbytes
    return bytes(content)


def test_all_is_written_in_order(pipe):
    writer = LineWriter(pipe[1])
    lines = [f"{number}\n".encode() for number in range(1000)]
    for line in lines:
        writer.put(line)
    writer.close(WAIT_S)
    writer.put(b"too late\n")
    assert read(pipe[0], len(b"".join(lines))) == b"".join(lines)
    assert writer.lost == 0


@pytest.mark.parametrize("blocks", [True, False])
def test_nobody_waits_for_a_reader_that_stands_still(pipe, blocks):
    if not blocks:
        fcntl.fcntl(pipe[1], fcntl.F_SETFL, os.O_NONBLOCK)
    writer = LineWriter(pipe[1])
    count = 2 * line_writer.NBYTES_MAX // len(LINE)
    for _ in range(count):
        writer.put(LINE)
    lost = writer.lost
    assert 0 < lost < count
    assert writer.why == "they are not read"
    written = read(pipe[0], (count - lost) * len(LINE))
    assert written == LINE * (count - lost)
    writer.put(LINE)
    assert read(pipe[0], len(LINE)) == LINE
    writer.close(WAIT_S)
    assert (writer.lost, writer.why) == (lost, "")


def test_the_log_says_how_many_of_its_lines_are_missing(pipe):
    writer = LineWriter(pipe[1])
    handler = WriterHandler(writer)
    log = logging.getLogger("asynctrt.serving")
    log.addHandler(handler)
    content = bytearray()

    def run():
        while more := os.read(pipe[0], 1 << 16):
            content.extend(more)

    thread = threading.Thread(target=run, daemon=True)
    try:
        for _ in range(2):
            before = writer.lost
            while writer.lost == before:
                log.warning("x" * 10_000)
        thread.start()
        with writer._changed:
            assert writer._changed.wait_for(lambda: not writer.why, WAIT_S)
        log.warning("here again")
        writer.close(WAIT_S)
    finally:
        log.removeHandler(handler)
    os.close(pipe[1])
    pipe[1] = -1
    thread.join(WAIT_S)
    assert content.decode().splitlines()[-2:] == ["2 lines of the log were not written", "here again"]


def test_closing_does_not_wait_for_a_reader_that_stands_still(pipe):
    writer = LineWriter(pipe[1])
    writer.put(LINE * 10_000)
    writer.close(0.01)
    writer.close(3600)
    assert "lines" in repr(writer)


def test_a_full_disk_costs_lines_and_is_told_of():
    with Path("/dev/full").open("wb") as file:
        writer = LineWriter(file.fileno())
    for _ in range(3):
        writer.put(LINE)
        writer.flush(WAIT_S)
    assert (writer.lost, writer.why) == (3, "No space left on device")
    writer.close()


def test_a_reader_that_has_gone_costs_lines(pipe):
    writer = LineWriter(pipe[1])
    os.close(pipe[0])
    pipe[0] = -1
    writer.put(LINE)
    writer.flush(WAIT_S)
    assert (writer.lost, writer.why) == (1, "Broken pipe")
    writer.close()
