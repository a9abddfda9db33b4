"""Write the access log: one JSON object a request, each on a line."""

import sys
from pathlib import Path
from typing import Any, Final, Protocol

from asynctrt import clock
from asynctrt.errors import AsynctrtError, UsageError
from asynctrt.kserve.json_codec import dump
from asynctrt.serving.admission import has_result
from asynctrt.serving.api import CANCELLED_STATUS
from asynctrt.serving.request_id import HEADER
from asynctrt.serving.served import Inference

FLUSH_NBYTES: Final = 64 << 10


class Logged(Protocol):
    """What the log needs of an HTTP request."""

    method: bytes
    path: bytes
    headers: dict[bytes, bytes]
    began_ns: int


class AccessLog:
    """Write buffered lines to a file.

    :param path: the file to append to; ``-`` is standard output.
    :raises UsageError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._file = self._open()

    def __repr__(self) -> str:
        return f"<AccessLog {str(self._path)!r}>"

    def _open(self) -> Any:
        if str(self._path) == "-":
            return sys.stdout.buffer
        try:
            return self._path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot write the access log {str(self._path)!r}: {error}") from error

    def reopen(self) -> None:
        """Go on in a new file of the same name, now that the old one was renamed.

        :raises UsageError: if it cannot be opened. Then the old file is still written.
        """
        file = self._open()
        self.close()
        self._file = file

    def write(
        self,
        peer: Any,
        request: Logged,
        status: int,
        nbytes: int,
        inference: Inference | None = None,
    ) -> None:
        """Write a line for an answered HTTP request."""
        now_ns = clock.now_ns()
        line = {
            "time": clock.wall_ns(now_ns) / 1e9,
            "peer": peer[0] if isinstance(peer, tuple) else None,
            "method": request.method.decode("latin-1"),
            "path": request.path.decode("latin-1"),
            "request_id": request.headers.get(HEADER, b"").decode("latin-1"),
            "status": status,
            "nbytes": nbytes,
            "duration_us": (now_ns - request.began_ns) // 1000 if request.began_ns else None,
        }
        self._append(line | (_of(inference) if inference is not None else {}))

    def write_inference(self, protocol: str, peer: Any, inference: Inference) -> None:
        """Write a line for an ended inference that came over another protocol."""
        now_ns, future = clock.now_ns(), inference.future
        status = 200
        if future.cancelled():
            status = CANCELLED_STATUS
        elif (error := future.exception()) is not None:
            status = error.http_status if isinstance(error, AsynctrtError) else 500
        line = {
            "time": clock.wall_ns(now_ns) / 1e9,
            "peer": peer[0] if isinstance(peer, tuple | list) else peer,
            "method": protocol,
            "request_id": inference.headers.get(HEADER, b"").decode("latin-1"),
            "status": status,
            "duration_us": (now_ns - inference.began_ns) // 1000,
        }
        self._append(line | _of(inference))

    def _append(self, line: dict[str, Any]) -> None:
        raw = dump(line) + b"\n"
        self._lines.append(raw)
        self._nbytes += len(raw)
        if self._nbytes > FLUSH_NBYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines. A full disk costs lines, not requests."""
        lines, self._lines, self._nbytes = self._lines, [], 0
        if lines:
            try:
                self._file.write(b"".join(lines))
                self._file.flush()
            except OSError:
                return

    def close(self) -> None:
        """Write the buffered lines, and close the file."""
        self.flush()
        if self._file is not sys.stdout.buffer:
            self._file.close()


def _of(inference: Inference) -> dict[str, Any]:
    """Return an inference's model and id, and if it succeeded, where its time went."""
    served, future = inference.served, inference.future
    known: dict[str, Any] = {"model": served.name, "version": served.version, "id": inference.request.id}
    if has_result(future):
        result = future.result()
        timing = result.timing
        known["batch_rows"] = result.batch_rows
        known["queue_us"] = timing.queue_ns // 1000
        known["compute_us"] = timing.compute_ns // 1000
    return known
