"""Lines are written by a thread: a reader that stands still costs lines, and nobody's time."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from asynctrt.serving import line_writer
from asynctrt.serving.line_writer import LineWriter
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
    writer = LineWriter(pipe[1], missing=lambda count, why: f"{count} missing: {why}\n".encode())
    count = 2 * line_writer.NBYTES_MAX // len(LINE)
    for _ in range(count):
        writer.put(LINE)
    lost = writer.lost
    assert 0 < lost < count
    assert writer.why == "they are not read"
    written = read(pipe[0], (count - lost) * len(LINE))
    assert written == LINE * (count - lost)
    writer.put(LINE)
    told = f"{lost} missing: they are not read\n".encode()
    assert read(pipe[0], len(told + LINE)) == told + LINE
    writer.close(WAIT_S)
    assert writer.why == ""


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
