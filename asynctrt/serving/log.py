"""The access log: a JSON object a line, one a request."""

import sys
from pathlib import Path
from typing import Any, Final, Protocol

from asynctrt import clock
from asynctrt.errors import UsageError
from asynctrt.serving.api import Inference
from asynctrt.serving.wire import dump

FLUSH_NBYTES: Final = 64 << 10


class Logged(Protocol):
    """What is known of a request."""

    method: bytes
    path: bytes
    began_ns: int


class AccessLog:
    """Writes lines, gathered for as long as a sweep takes.

    :param path: the file to append to; ``-`` is standard output.
    :raises UsageError: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._nbytes = 0
        if str(path) == "-":
            self._file: Any = sys.stdout.buffer
            return
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"the access log {str(path)!r} cannot be written: {error}") from error

    def write(
        self,
        peer: Any,
        request: Logged,
        status: int,
        nbytes: int,
        inference: Inference | None = None,
    ) -> None:
        """One line for a request that was answered."""
        now_ns = clock.now_ns()
        line: dict[str, Any] = {
            "time": clock.wall_ns(now_ns) / 1e9,
            "peer": peer[0] if isinstance(peer, tuple) else None,
            "method": request.method.decode("latin-1"),
            "path": request.path.decode("latin-1"),
            "status": status,
            "nbytes": nbytes,
            "duration_us": (now_ns - request.began_ns) // 1000 if request.began_ns else None,
        }
        if inference is not None:
            line["model"], line["version"] = inference.served.name, inference.served.version
            line["id"] = inference.call.id
            future = inference.future
            if future.done() and not future.cancelled() and future.exception() is None:
                timing = future.result().timing
                line["batch_rows"] = future.result().batch_rows
                line["queue_us"] = timing.queue_ns // 1000
                line["compute_us"] = timing.compute_ns // 1000
        raw = dump(line) + b"\n"
        self._lines.append(raw)
        self._nbytes += len(raw)
        if self._nbytes > FLUSH_NBYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been gathered. A full disk costs lines, not requests."""
        lines, self._lines, self._nbytes = self._lines, [], 0
        if lines:
            try:
                self._file.write(b"".join(lines))
                self._file.flush()
            except OSError:
                return

    def close(self) -> None:
        """Write the last lines."""
        self.flush()
        if self._file is not sys.stdout.buffer:
            self._file.close()
