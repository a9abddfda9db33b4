"""Write the access log: a JSON object per request, each on one line."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asynctrt._util import clock
from asynctrt.errors import AsynctrtError, UsageError
from asynctrt.kserve.json_codec import dump
from asynctrt.serving.admission import Inference, error_of, has_result
from asynctrt.serving.api import CANCELLED_STATUS, Headers
from asynctrt.serving.http_reader import HttpRequest
from asynctrt.serving.line_writer import LineWriter
from asynctrt.serving.responses import ID_HEADER

FLUSH_NBYTES: Final = 64 << 10

logger = logging.getLogger("asynctrt.serving")


class AccessLog:
    """The access log: buffered lines that are appended to a file.

    :param path: the file to append to; ``-`` is standard output.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._writer = self._open()
        self._lost = 0
        self._is_told = False

    def __repr__(self) -> str:
        return f"<AccessLog {str(self._path)!r}>"

    def _open(self) -> LineWriter:
        try:
            if str(self._path) == "-":
                return LineWriter(sys.stdout.fileno())
            with self._path.open("ab", buffering=0) as file:
                return LineWriter(file.fileno())
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"cannot write the access log {str(self._path)!r}: {error}") from error

    def reopen(self) -> None:
        """Continue in a new file of the same name after the old one was renamed.

        :raises UsageError: if it cannot be opened. The old file then stays in use.
        """
        writer = self._open()
        self.flush()
        before, self._writer, self._lost = self._writer, writer, 0
        before.close(0)

    def write(
        self,
        peer: Any,
        request: HttpRequest,
        status: int,
        nbytes: int,
        inference: Inference | None = None,
    ) -> None:
        """Write a line for an answered HTTP request."""
        method, began_ns = request.method.decode("latin-1"), request.began_ns
        more = {"path": request.path.decode("latin-1"), "nbytes": nbytes}
        self._append(method, peer, request.headers, status, began_ns, inference, more)

    def write_inference(self, protocol: str, peer: Any, inference: Inference) -> None:
        """Write a line for an ended inference that came over another protocol."""
        error, status = error_of(inference.future), 200
        if isinstance(error, asyncio.CancelledError):
            status = CANCELLED_STATUS
        elif error is not None:
            status = error.http_status if isinstance(error, AsynctrtError) else 500
        self._append(protocol, peer, inference.headers, status, inference.began_ns, inference, {})

    def _append(
        self,
        method: str,
        peer: Any,
        headers: Headers,
        status: int,
        began_ns: int,
        inference: Inference | None,
        more: Mapping[str, Any],
    ) -> None:
        now_ns = clock.now_ns()
        line = {
            "time": clock.wall_ns(now_ns) / 1e9,
            "peer": peer[0] if isinstance(peer, tuple | list) else peer,
            "method": method,
            "request_id": headers.get(ID_HEADER, b"").decode("latin-1"),
            "status": status,
            "duration_us": (now_ns - began_ns) // 1000 if began_ns else None,
            **more,
            **(_of(inference) if inference is not None else {}),
        }
        raw = dump(line) + b"\n"
        self._lines.append(raw)
        self._nbytes += len(raw)
        if self._nbytes > FLUSH_NBYTES:
            self.flush()

    def flush(self) -> None:
        """Pass the buffered lines to the writer. A full disk or a stalled reader only costs lines."""
        lines, self._lines, self._nbytes = self._lines, [], 0
        if lines:
            self._writer.put(b"".join(lines))

    def tell_losses(self) -> None:
        """Log that lines are not being written; once they are again, log how many are missing."""
        writer = self._writer
        if writer.lost == self._lost:
            return
        if writer.why and not self._is_told:
            logger.warning("lines of the access log are not written: %s", writer.why)
            self._is_told = True
        elif not writer.why:
            logger.warning("%d lines of the access log were not written", writer.lost - self._lost)
            self._lost, self._is_told = writer.lost, False

    def close(self) -> None:
        """Write the buffered lines, and close the file. Blocks for up to a second if nothing reads them."""
        self.flush()
        self._writer.close()


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
