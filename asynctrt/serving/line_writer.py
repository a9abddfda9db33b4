"""Write lines without waiting for their reader: a pipe that is not read stays full forever."""

import os
import select
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Final

NBYTES_MAX: Final = 4 << 20
"""The most bytes of lines that may wait to be written. Further lines are dropped and counted."""

NOT_READ: Final = "they are not read"

FLUSH_S: Final = 1.0
"""How long the end of a process waits for lines to be written."""


class LineWriter:
    """A writer of lines that uses a separate thread.

    :param descriptor: the file descriptor to write to; it is duplicated.
    """

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        """Lines that were not written so far."""
        self.why = ""
        """Why lines are currently not written."""
        self._descriptor = os.dup(descriptor)
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._nbytes = 0
        self._is_stuck = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<LineWriter {self._nbytes} bytes waiting, {self.lost} lines lost>"

    def put(self, lines: bytes) -> None:
        """Queue lines for writing, or drop them if too many are waiting."""
        with self._changed:
            if self._is_closing:
                return
            if self._nbytes + len(lines) > NBYTES_MAX:
                self._is_stuck = True
                self._lose(lines.count(b"\n"), NOT_READ)
                return
            self._waiting.append(lines)
            self._nbytes += len(lines)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="asynctrt-lines", daemon=True)
                with suppress(RuntimeError):  # The system is out of threads now; that may pass.
                    thread.start()
                    self._thread = thread
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all lines are written, unless nothing reads them."""
        with self._changed:
            if not self._is_stuck and not self._changed.wait_for(lambda: not self._nbytes, timeout_s):
                self._is_stuck = True

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Write the waiting lines, and accept no more. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            if self._thread is None:
                self._close()
        self.flush(timeout_s)

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self.why = why

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                lines = b"".join(self._waiting)
                self._waiting.clear()
                if not lines:
                    self._close()
                    return
            failed = self._write(lines)
            with self._changed:
                self._nbytes -= len(lines)
                self._is_stuck = False
                self.why = ""
                if failed:
                    self._lose(lines.count(b"\n"), failed)
                self._changed.notify_all()

    def _write(self, content: bytes) -> str:
        """Write all of ``content``; return why that failed, or an empty string."""
        left = memoryview(content)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # The parent process made it non-blocking.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError as error:
                return error.strerror or str(error)
        return ""


def standard_error() -> LineWriter | None:
    """Return the writer of standard error, shared by the whole process; ``None`` if that is not a file."""
    with suppress(OSError, AttributeError, ValueError):
        return _writer_of(sys.stderr.fileno())
    return None


@cache
def _writer_of(descriptor: int) -> LineWriter:
    return LineWriter(descriptor)
