"""Expose a server's metrics to Prometheus: its engines' and its own.

Metrics are computed at each scrape from counters. A scrape gives the event loop back after :data:`SLICE_NS`,
again and again, so that one of many models does not block it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import asynctrt
from asynctrt._util import clock
from asynctrt.observe.metrics import (
    COUNTER,
    ENGINE,
    GAUGE,
    HISTOGRAM,
    LOST_DEVICES,
    MODEL,
    READY,
    Metric,
    Reading,
    Sample,
    buckets,
    gauge,
    split,
)
from asynctrt.observe.prometheus import process_text
from asynctrt.serving.api import Answer, Headers, Page
from asynctrt.serving.coding import accepted_codings, compress
from asynctrt.serving.latency import BOUNDS_S, LoopDelays
from asynctrt.serving.memory import MemoryLimit
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import Sampler
from asynctrt.serving.served import ServedModel

SLICE_NS: Final = 100_000
"""How long a scrape holds the event loop at a time, plus the time for one metric of a model."""

NAME: Final = re.compile(r"[^{ ]+\{?")
"""The name of a sample, and the brace before its labels, if it has any."""

HEADERS: Final = (
    ("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),
    ("Cache-Control", "no-store"),
)


@dataclass(frozen=True, slots=True)
class ServedReading(Reading):
    """A served model's statistics with the labels of its metrics."""

    served: ServedModel = field(kw_only=True)


class Metrics:
    """Collect metrics of a server. Two in one process do not collide."""

    def __init__(
        self,
        repository: Repository,
        sampler: Sampler,
        delays: LoopDelays,
        memory: MemoryLimit,
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._repository = repository
        self._sampler = sampler
        self._delays = delays
        self._memory = memory
        self._refused = refused
        busy_share = gauge(
            "asynctrt_busy_share",
            "Share of the last second in which the model computed as many batches as it can at once.",
            lambda it: sampler.busy_share(it.served),
        )
        self._of_models = (*ENGINE, *SERVED, busy_share)
        # One scrape at a time: several would each hold the loop in turn.
        self._scraping = asyncio.Lock()

    def page(self, *, is_open: bool = False) -> Page:
        """Return the page for ``/metrics``."""
        return Page(self.answer, is_open)

    async def answer(self, headers: Headers) -> Answer:
        """Return the metrics in Prometheus's text format."""
        async with self._scraping:
            texts = [text async for text in self._texts()]
            return await compressed(headers, Answer(200, HEADERS, ["".join(texts).encode()]))

    async def _texts(self) -> AsyncIterator[str]:
        """Yield the text in pieces, giving the loop back between them."""
        yield (await asyncio.to_thread(process_text)).decode()  # The operating system may take long.
        began_ns = clock.now_ns()
        for text in self._pieces():
            yield text
            if clock.now_ns() - began_ns > SLICE_NS:
                await asyncio.sleep(0)
                began_ns = clock.now_ns()

    def _pieces(self) -> Iterator[str]:
        """Yield small pieces of the text, some of them empty."""
        readings = []
        for served in list(self._repository):
            done = served.engine.statistics()
            readings.append(
                ServedReading(
                    (served.name, served.version),
                    served.engine,
                    done,
                    served.succeeded(done),
                    served.admission.gate.waiting_rows,
                    served=served,
                )
            )
            yield ""
        for metric in self._of_models:
            yield from metric.texts(readings)
        yield from READY.texts(self._repository.index())
        yield from LOST_DEVICES.texts([readings])
        for name, kind, text, value in self._of_server():
            yield from Metric(name, kind, text, (), lambda value: [("", (), value)]).texts([value])
        yield from REFUSED.texts([self._refused()])
        yield from DELAYS.texts([self._delays.counts])
        yield from BUILD.texts([asynctrt.__version__])

    def _of_server(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield name, kind, help and value of the server's own metrics."""
        yield "asynctrt_server_connections", GAUGE, "Open connections.", self._sampler.connections()
        text = "Requests to all models that are being answered."
        yield "asynctrt_server_requests_in_flight", GAUGE, text, self._sampler.in_flight()
        text = "Memory held for clients, in bytes: large messages, requests in progress, answers."
        yield "asynctrt_server_memory_bytes", GAUGE, text, self._memory.nbytes
        text = "Its limit, max_memory, in bytes."
        yield "asynctrt_server_memory_limit_bytes", GAUGE, text, self._memory.nbytes_max


def _seconds(labels: tuple[str, ...], values: list[int]) -> Iterator[Sample]:
    """Yield the samples of a histogram of times: the requests in each bucket, then the sum in ns."""
    return buckets(labels, BOUNDS_S, values[:-1], values[-1] / 1e9)


def _latencies(which: str) -> Callable[[ServedReading], Iterable[Sample]]:
    def samples(reading: ServedReading) -> Iterable[Sample]:
        known = reading.served.latencies
        if reading.done.succeeded and not any(known.total):
            return ()  # The application asks the engine itself: no request of it passed through the server.
        return _seconds(reading.labels, getattr(known, which))

    return samples


SERVED: Final[tuple[Metric, ...]] = (
    split(
        "nv_inference_request_failure",
        "Requests that failed, by reason: REJECTED under overload, CANCELED by the client, BACKEND if the "
        "model failed, or OTHER.",
        "reason",
        lambda it: it.served.failures,
    ),
    gauge(
        "asynctrt_pending_requests",
        "Requests accepted and not answered yet, queued or running.",
        lambda it: it.served.pending,
    ),
    gauge(
        "asynctrt_waiting_requests",
        "Requests that wait for their client's turn, before the queue.",
        lambda it: it.served.admission.gate.waiting,
    ),
    gauge(
        "asynctrt_waiting_rows",
        "Rows of the requests that wait for their client's turn.",
        lambda it: it.waiting_rows,
    ),
    split(
        "asynctrt_waiting_refused_total",
        "Requests refused before the queue, by reason; crowded: their client had the most waiting; expired: "
        "timed out behind others of their client.",
        "reason",
        lambda it: it.served.refused,
    ),
    *[
        Metric(name, HISTOGRAM, f"Answered requests by {text}.", MODEL, _latencies(which))
        for name, text, which in (
            ("asynctrt_queue_seconds", "their time in the queue", "queue"),
            ("asynctrt_compute_seconds", "the time that their batch computed", "compute"),
            ("asynctrt_request_seconds", "their time from arrival to answer", "total"),
        )
    ],
)
"""The metrics of models that only a server has."""

REFUSED: Final = Metric(
    "asynctrt_server_refused_total",
    COUNTER,
    "Refused before they reached a model, by reason: connections beyond max_connections; requests for their "
    "credentials (token, host or origin); requests and messages for lack of memory.",
    ("reason",),
    lambda counts: [("", (reason,), count) for reason, count in counts.items()],
)

DELAYS: Final = Metric(
    "asynctrt_loop_delay_seconds",
    HISTOGRAM,
    "How long a request waited for the event loop, sampled twenty times a second.",
    (),
    lambda delays: _seconds((), delays),
)

BUILD: Final = Metric(
    "asynctrt_build_info",
    GAUGE,
    "The version of asynctrt.",
    ("version",),
    lambda version: [("", (version,), 1)],
)


async def compressed(headers: Headers, answer: Answer) -> Answer:
    """Compress metrics in a thread if the client accepts gzip: unlike tensors, they shrink to a tenth."""
    if "gzip" not in accepted_codings(headers.get(b"accept-encoding", b"")):
        return answer
    body = await asyncio.to_thread(compress, "gzip", answer.body)
    added = (("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"))
    return Answer(answer.status, answer.headers + added, (body,))


def merged_answer(texts: Mapping[int, bytes]) -> Answer:
    """Return the metrics of several fronts as one answer: each sample has its front's number as a label."""
    found: dict[str, list[str]] = {}
    for number, text in texts.items():
        label, samples = f'front="{number}"', found.setdefault("", [])
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                samples = found.setdefault(name, [])
            if not line.startswith("#"):
                head = NAME.match(line)
                assert head is not None, "a sample begins with its name"
                name, rest = head[0], line[head.end() :]
                samples.append(f"{name}{label},{rest}" if name[-1] == "{" else f"{name}{{{label}}}{rest}")
            elif line not in samples[:2]:  # Help and type, from the first front.
                samples.append(line)
    merged = "".join([f"{line}\n" for samples in found.values() for line in samples])
    return Answer(200, HEADERS, [merged.encode()])
