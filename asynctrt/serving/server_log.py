"""Write the server's log: its lines as text or JSON, failed batches, and refusals.

A client must not be able to fill a disk or forge a line: possible floods are only counted beyond a limit, and
control characters are replaced.
"""

import asyncio
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from asynctrt._util import clock
from asynctrt._util.validation import printable
from asynctrt.errors import DeviceError, InternalError
from asynctrt.serving.admission import Inference, Served
from asynctrt.serving.api import Api
from asynctrt.serving.line_writer import LineWriter, standard_error
from asynctrt.serving.responses import ID_HEADER
from asynctrt.serving.served import ServedModel
from asynctrt.serving.settings import LogFormat, LogLevel

FIELDS: Final = ("request_id", "requests", "model", "version")
"""Fields that a record may have besides its message, given as ``extra``."""

TRACEBACK_CHARS_MAX: Final = 20_000
IDS_MAX: Final = 8
"""Requests named in the log of a failed batch."""

FAILURES_MAX: Final = 10
"""Failed batches logged in one period."""

PERIOD_NS: Final = 10_000_000_000
"""How often a line that could come in floods is logged at most. Meanwhile, what it says is counted."""

logger = logging.getLogger("asynctrt.serving")


def set_up_logging(form: LogFormat, level: LogLevel) -> None:
    """Send this process's log to standard error; of other packages, only warnings and above."""
    writer = standard_error()
    handler = logging.StreamHandler(sys.stderr) if writer is None else WriterHandler(writer)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("asynctrt").setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a record of gRPC's is worth a line.

    For each answer whose client has just gone it logs an error with a traceback: clients could fill a disk.
    """
    return not record.getMessage().startswith("ExecuteBatchError ")


class WriterHandler(logging.Handler):
    """Passes each line to a writer, so that nothing waits for the log's reader."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer
        self._lost = writer.lost

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for writing."""
        try:
            lost = self._writer.lost - self._lost
            if lost and not self._writer.why:  # Lines are written again.
                self._lost += lost
                logger.warning("%d lines of the log were not written", lost)
            self._writer.put(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything is written, unless nothing reads it."""
        self._writer.flush()


class TextFormatter(logging.Formatter):
    """Formats a record as a line, and a traceback as further, indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        at = datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")
        line = f"{at} {record.levelname} {record.getMessage()}"
        # The message contains the other fields.
        known = {name: value for name, value in _fields(record).items() if name.startswith("request")}
        if known:
            line += f" ({', '.join(f'{name}: {_shown(value)}' for name, value in known.items())})"
        trace = _traceback(record)
        indented = "".join(f"\n    {printable(row)}".rstrip() for row in trace.splitlines())
        return printable(line) + indented


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        trace = _traceback(record)
        if trace:
            line["traceback"] = trace
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    text = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
    if len(text) > TRACEBACK_CHARS_MAX:
        half = TRACEBACK_CHARS_MAX // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text


class _Failed(NamedTuple):
    """One failed batch, whose requests are reported one after the other in a turn of the event loop."""

    served: Served
    error: BaseException
    ids: list[str]
    is_left_out: bool


class Failures:
    """Logs each failed batch once, with its traceback and its requests; beyond a limit, only counts it."""

    def __init__(self, now_ns: Callable[[], int] = clock.now_ns) -> None:
        self._now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._batches: dict[Any, _Failed] = {}
        self._began_ns = now_ns()
        self._logged = 0
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<Failures {self._logged} logged, {self._left_out} left out>"

    def note(self, inference: Inference, error: BaseException) -> None:
        """Record a failed inference, unless its client caused the failure."""
        if not isinstance(error, DeviceError | InternalError):
            return
        served = inference.served
        # Each request of a batch has a separate error, with the same cause or at least the same text.
        key = served, str(error) if error.__cause__ is None else id(error.__cause__)
        batch = self._batches.get(key)
        if batch is None:
            if not self._batches:
                self._loop.call_soon(self._write)
            self.tick()
            is_left_out = self._logged >= FAILURES_MAX
            self._left_out += is_left_out
            self._logged += not is_left_out
            batch = self._batches[key] = _Failed(served, error, [], is_left_out)
        batch.ids.append(_id_of(inference))

    def _write(self) -> None:
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            if batch.is_left_out:
                continue
            served, count = batch.served, len(batch.ids)
            more = f" and {count - IDS_MAX} more" if count > IDS_MAX else ""
            logger.error(
                "a batch of model %s version %s failed, with %d request%s%s",
                *(served.name, served.version, count, "s" * (count != 1), more),
                exc_info=batch.error,
                extra={"model": served.name, "version": served.version, "requests": batch.ids[:IDS_MAX]},
            )

    def tick(self) -> None:
        """Log how many were left out, once a period is over."""
        now_ns = self._now_ns()
        passed_ns = now_ns - self._began_ns
        if passed_ns >= PERIOD_NS:
            if self._left_out:
                logger.error(
                    "%d more batches failed in the last %d s and were not logged",
                    *(self._left_out, passed_ns // 1_000_000_000),
                )
            self._began_ns, self._logged, self._left_out = now_ns, 0, 0


def _id_of(inference: Inference) -> str:
    """Return a name for a request: its id, if it has one, and that of its HTTP request or gRPC call."""
    given = inference.headers.get(ID_HEADER, b"").decode("latin-1")
    own = inference.request.id
    return f"{given}/{own}" if given and own else given or own or "-"


class Refusals:
    """Logs how many requests and connections were refused, at most once in a :data:`PERIOD_NS`.

    It takes differences of existing counters, so it costs requests nothing.
    """

    def __init__(
        self, api: Api, connections: Callable[[], int], now_ns: Callable[[], int] = clock.now_ns
    ) -> None:
        self._api = api
        self._connections = connections
        self._now_ns = now_ns
        self._told_ns = now_ns() - PERIOD_NS
        self._since_ns = now_ns()
        self._known = self._read()

    def __repr__(self) -> str:
        return f"<Refusals known={len(self._known)}>"

    def tick(self, *, is_last: bool = False) -> None:
        """Log the refusals since the last time, if it is time for that."""
        now_ns = self._now_ns()
        if now_ns - self._told_ns < PERIOD_NS and not is_last:
            return
        seconds = max(1, round((now_ns - self._since_ns) / 1e9))
        known, self._known = self._known, self._read()
        for key, counts in self._known.items():
            new = [count - before for count, before in zip(counts, known.get(key, (0, 0, 0)), strict=True)]
            if new[0] <= 0:
                continue
            self._told_ns = now_ns
            if isinstance(key, ServedModel):
                logger.warning(
                    "model %s version %s refused %d requests within %d s: %d found its queue full, %d waited "
                    "longer than they allowed",
                    *(key.name, key.version, new[0], seconds, new[1], new[2]),
                    extra={"model": key.name, "version": key.version},
                )
            elif key == "connections":
                logger.warning("refused %d connections within %d s, beyond the limit", new[0], seconds)
            elif key == "memory":
                logger.warning(
                    "refused %d requests within %d s, as max_memory is held for clients", new[0], seconds
                )
            else:
                foreign = self._api.foreign
                logger.warning(
                    "refused %d requests within %d s for their token, host or origin%s",
                    *(new[0], seconds, f"; the latest foreign one is {foreign}" if foreign else ""),
                )
        self._since_ns = now_ns

    def _read(self) -> dict[Any, Iterable[int]]:
        known: dict[Any, Iterable[int]] = {
            "connections": (self._connections(), 0, 0),
            "unauthorized": (self._api.unauthorized, 0, 0),
            "memory": (self._api.memory.refused, 0, 0),
        }
        for served in self._api.repository:
            if served.failures["REJECTED"]:
                done = served.engine.statistics()
                before = served.refused
                known[served] = (
                    served.failures["REJECTED"],
                    done.refused + before["crowded"],
                    done.expired + before["expired"],
                )
        return known
