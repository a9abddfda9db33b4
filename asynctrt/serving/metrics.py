"""Expose a server's metrics to Prometheus: those of its engines, and its own.

Metrics are computed at each scrape from counters. A scrape gives the event loop back after
:data:`SLICE_NS`, again and again, so that one of many models does not hold it. Rendering in a thread instead
would hold it longer: the loop would wait for the GIL each time that it had let go of it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import asynctrt
from asynctrt._util import clock
from asynctrt.observe.prometheus import (
    MODEL,
    READY,
    Collector,
    CollectorRegistry,
    CounterMetricFamily,
    Exemplar,
    Family,
    GaugeMetricFamily,
    GCCollector,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    PlatformCollector,
    ProcessCollector,
    Reading,
    UnknownMetricFamily,
    engine_families,
    exposition,
    family_by,
    family_of,
    lost_devices,
    openmetrics,
    text_string_to_metric_families,
)
from asynctrt.serving.api import Answer, Headers, Page
from asynctrt.serving.coding import accepted_codings, compress
from asynctrt.serving.gpus import GpuFigures
from asynctrt.serving.latency import BOUNDS_S, Latencies
from asynctrt.serving.latency import Exemplar as Traced
from asynctrt.serving.memory import MemoryLimit
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import resident_nbytes
from asynctrt.serving.served import ServedModel
from asynctrt.serving.stalls import Stalls

SECONDS: Final[tuple[tuple[str, str, Callable[[Latencies], list[int]]], ...]] = (
    ("asynctrt_queue_seconds", "Answered requests by their time in the queue.", lambda known: known.queue),
    (
        "asynctrt_compute_seconds",
        "Answered requests by the time that their batch computed.",
        lambda known: known.compute,
    ),
    (
        "asynctrt_request_seconds",
        "Answered requests by their time from arrival to answer.",
        lambda known: known.total,
    ),
)
"""Histograms of latencies."""

GPU: Final[tuple[tuple[str, str, Callable[[GpuFigures], float | None]], ...]] = (
    (
        "nv_gpu_utilization",
        "Share of the time in which the GPU computed anything, 0 to 1.",
        lambda gpu: gpu.utilization,
    ),
    ("nv_gpu_memory_total_bytes", "MemoryLimit of the GPU, in bytes.", lambda gpu: gpu.memory_nbytes),
    (
        "nv_gpu_memory_used_bytes",
        "MemoryLimit of the GPU in use by any process, in bytes.",
        lambda gpu: gpu.used_nbytes,
    ),
    ("nv_gpu_power_usage", "Power that the GPU draws, in watts.", lambda gpu: gpu.watts),
)
"""Gauges under Triton's names."""

SLICE_NS: Final = 100_000
"""How long a scrape holds the event loop at a time, plus one piece of work."""

PIECE_SAMPLES: Final = 8
"""Samples that are rendered at a time, or those of one histogram: the library takes 10 µs for each."""

JOIN_NBYTES: Final = 64 << 10
"""Bytes of a piece of the answer's body."""

OPENMETRICS: Final = b"application/openmetrics-text"
END: Final = b"# EOF\n"

_UNTYPED: Final = re.compile(rb"^(# TYPE nv_\w+) untyped$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServedReading(Reading):
    """A served model's statistics with the labels of its metrics."""

    served: ServedModel = field(kw_only=True)


class _Only(NamedTuple):
    """What the library renders: a collector of one metric."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


class Metrics:
    """Collect metrics of a server. Two in one process do not collide.

    :param repository: the models, whose names and versions are the labels.
    :param connections: returns the number of open connections; ``in_flight`` that of requests being answered;
        ``loop_lag_ns`` how late the loop ran its last timer; ``busy_share`` how busy a model was lately.
    :param stalls: knows how late the loop was at any time. What is not given has no metric.
    :param gpus: returns the readings of the GPUs; it is called in a thread.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        connections: Callable[[], int] | None = None,
        in_flight: Callable[[], int] | None = None,
        loop_lag_ns: Callable[[], int | None] | None = None,
        busy_share: Callable[[ServedModel], float | None] | None = None,
        cpu_ns: Callable[[], int] = clock.cpu_ns,
        stalls: Stalls | None = None,
        memory: MemoryLimit | None = None,
        gpus: Callable[[], list[GpuFigures]] | None = None,
    ) -> None:
        self._repository = repository
        self._connections = connections
        self._in_flight = in_flight
        self._loop_lag_ns = loop_lag_ns
        self._cpu_ns = cpu_ns
        self._stalls = stalls
        self._memory = memory
        self._gpus = gpus
        self._families = [*engine_families(), *_families(busy_share)]
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        # One scrape at a time: several would each hold the loop in turn.
        self._scraping = asyncio.Lock()

    def page(self, *, is_open: bool = False) -> Page:
        """Return the page for ``/metrics``."""
        return Page(self.answer, is_open)

    async def answer(self, headers: Headers) -> Answer:
        """Return the metrics in OpenMetrics' format if the client accepts it, else in Prometheus's."""
        accepted = headers.get(b"accept", b"").lower().split(b",")
        is_open = any(item.split(b";")[0].strip() == OPENMETRICS for item in accepted)
        kind = openmetrics.CONTENT_TYPE_LATEST if is_open else exposition.CONTENT_TYPE_PLAIN_0_0_4
        body: list[bytes] = []
        async with self._scraping:
            piece = bytearray()
            async for text in self._texts(_rendered_open if is_open else _rendered):
                piece += text
                if len(piece) >= JOIN_NBYTES:
                    body.append(bytes(piece))
                    piece.clear()
            body.append(bytes(piece) + (END if is_open else b""))
            answer = Answer(200, (("Content-Type", kind), ("Cache-Control", "no-store")), body)
            return await compressed(headers, answer)

    async def _texts(self, render: Callable[[Any], bytes]) -> AsyncIterator[bytes]:
        """Yield the text in pieces, giving the loop back between them."""
        yield await asyncio.to_thread(self._of_process, render)
        began_ns = clock.now_ns()
        for text in self._pieces(render):
            if text:
                yield text
            if clock.now_ns() - began_ns > SLICE_NS:
                await asyncio.sleep(0)
                began_ns = clock.now_ns()

    def _of_process(self, render: Callable[[Any], bytes]) -> bytes:
        """Render what the operating system and the driver have to be asked for. Runs in a thread."""
        gpus = self._gpus() if self._gpus is not None else []
        return render(self._process) + render(_Only(list(_of_gpus(gpus))))

    def _pieces(self, render: Callable[[Any], bytes]) -> Iterator[bytes]:
        """Yield small pieces of the text, some of them empty."""
        readings = []
        for served in list(self._repository):
            done = served.engine.statistics()
            waiting_rows = served.admission.gate.waiting_rows
            readings.append(
                ServedReading(
                    [served.name, served.version],
                    served.engine,
                    done,
                    served.succeeded(done),
                    waiting_rows,
                    served=served,
                )
            )
            yield b""
        for family in self._families:
            yield from _texts_of(render, family, readings)
        yield from _texts_of(render, READY, self._repository.index())
        yield render(_Only([lost_devices(readings), *self._server()]))

    def _server(self) -> Iterator[Metric]:
        if self._connections is not None:
            yield GaugeMetricFamily("asynctrt_server_connections", "Open connections.", self._connections())
        if self._in_flight is not None:
            yield GaugeMetricFamily(
                "asynctrt_server_requests_in_flight",
                "Requests to all models that are being answered.",
                self._in_flight(),
            )
        lag_ns = self._loop_lag_ns() if self._loop_lag_ns is not None else None
        if lag_ns is not None:
            yield GaugeMetricFamily(
                "asynctrt_loop_lag_seconds",
                "How late the event loop ran the server's last timer, in seconds.",
                lag_ns / 1e9,
            )
        if self._stalls is not None:
            yield from _of_loop(self._stalls)
        if self._memory is not None:
            yield from _of_memory(self._memory)
        yield CounterMetricFamily(
            "asynctrt_process_cpu_seconds",
            "CPU time used by the process, in seconds.",
            self._cpu_ns() / 1e9,
        )
        resident = resident_nbytes()
        if resident is not None:
            yield GaugeMetricFamily(
                "asynctrt_process_resident_memory_bytes",
                "Resident memory of the process, in bytes.",
                resident,
            )
        yield InfoMetricFamily(
            "asynctrt_build", "The version of asynctrt.", {"version": asynctrt.__version__}
        )


def _rendered(collector: Collector) -> bytes:
    # The library accepts counters only with _total, which Triton's names lack. Prometheus's format can
    # declare them counters all the same; in OpenMetrics they stay of unknown type.
    return _UNTYPED.sub(rb"\1 counter", exposition.generate_latest(collector))


async def compressed(headers: Headers, answer: Answer) -> Answer:
    """Compress metrics in a thread if the client accepts gzip: unlike tensors, they shrink to a tenth."""
    if "gzip" not in accepted_codings(headers.get(b"accept-encoding", b"")):
        return answer
    body = await asyncio.to_thread(compress, "gzip", answer.body)
    added = (("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"))
    return Answer(answer.status, answer.headers + added, (body,))


def merged_answer(texts: Mapping[int, bytes]) -> Answer:
    """Return the metrics of several fronts as one answer: each sample has its front's number as a label.

    Blocks: the library takes some milliseconds for each front.

    :param texts: what :meth:`Metrics.answer` gave for Prometheus, by the number of the front.
    """
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            # Triton's counters lack the _total that the library adds to every counter.
            is_triton = family.name.startswith("nv_") and family.type == "counter"
            kind = "unknown" if is_triton else family.type
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, kind))
            for sample in family.samples:
                name = sample.name.removesuffix("_total") if is_triton else sample.name
                labels = {**sample.labels, "front": str(number)}
                kept.samples.append(sample._replace(name=name, labels=labels))
    headers = (("Content-Type", exposition.CONTENT_TYPE_PLAIN_0_0_4), ("Cache-Control", "no-store"))
    return Answer(200, headers, [_rendered(_Only(list(families.values())))])


def _rendered_open(collector: Collector) -> bytes:
    text: bytes = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]  # It is.
    return text.removesuffix(END)


def _texts_of(render: Callable[[Any], bytes], family: Family, items: Sequence[Any]) -> Iterator[bytes]:
    """Render one metric in pieces."""
    metric, is_first = family.make(), True
    for item in items:
        family.add(metric, item)
        if len(metric.samples) >= PIECE_SAMPLES:
            yield _piece(render, metric, is_first=is_first)
            metric, is_first = family.make(), False
    if metric.samples or is_first:
        yield _piece(render, metric, is_first=is_first)


def _piece(render: Callable[[Any], bytes], metric: Metric, *, is_first: bool) -> bytes:
    """Render a metric, or more samples of one: without its help and type then."""
    text = render(_Only([metric]))
    if is_first:
        return text
    # Newlines in names and help are escaped, so these are the lines of HELP and TYPE.
    return text.split(b"\n", 2)[2]


def _of_memory(memory: MemoryLimit) -> Iterator[Metric]:
    """Yield what a server holds for its clients."""
    yield GaugeMetricFamily(
        "asynctrt_server_memory_bytes",
        "Memory that is held for clients: large messages, requests in progress, answers, in bytes.",
        memory.nbytes,
    )
    yield GaugeMetricFamily(
        "asynctrt_server_memory_limit_bytes", "The most of it, max_memory, in bytes.", memory.nbytes_max
    )
    yield CounterMetricFamily(
        "asynctrt_server_memory_refused",
        "Requests and messages that were refused as there was no memory for them.",
        memory.refused,
    )


def _of_loop(stalls: Stalls) -> Iterator[Metric]:
    delays = HistogramMetricFamily(
        "asynctrt_loop_delay_seconds",
        "How long a request waited for the event loop, sampled twenty times a second.",
    )
    delays.add_metric(
        [], list(zip(_LES, accumulate(stalls.delays[:-1]), strict=True)), stalls.delays[-1] / 1e9
    )
    yield delays
    yield CounterMetricFamily(
        "asynctrt_loop_stalls", "Pauses of the event loop that were longer than max_pause.", stalls.count
    )


def _of_gpus(gpus: list[GpuFigures]) -> Iterator[Metric]:
    for name, text, read in GPU:
        gauge = GaugeMetricFamily(name, text, labels=("gpu_uuid",))
        for gpu in gpus:
            value = read(gpu)
            if value is not None:
                gauge.add_metric([gpu.uuid], value)
        if gauge.samples:
            yield gauge


def _families(busy_share: Callable[[ServedModel], float | None] | None) -> Iterator[Family]:
    """Yield the metrics of models that only a server knows."""
    yield family_by(
        UnknownMetricFamily,
        "nv_inference_request_failure",
        "Requests that failed, by reason: REJECTED under overload, CANCELED by the client, BACKEND if the "
        "model failed, or OTHER.",
        "reason",
        lambda reading: reading.served.failures,
    )
    if busy_share is not None:
        yield family_of(
            GaugeMetricFamily,
            "asynctrt_busy_share",
            "Share of the last second in which the model computed as many batches as it can at once, 0 to 1.",
            lambda reading: busy_share(reading.served),
        )
    yield family_of(
        GaugeMetricFamily,
        "asynctrt_pending_requests",
        "Requests accepted and not answered yet, queued or running.",
        lambda reading: reading.served.pending,
    )
    yield family_of(
        GaugeMetricFamily,
        "asynctrt_waiting_requests",
        "Requests that wait for their client's turn, before the queue.",
        lambda reading: reading.served.admission.gate.waiting,
    )
    yield family_of(
        GaugeMetricFamily,
        "asynctrt_waiting_rows",
        "Rows of the requests that wait for their client's turn.",
        lambda reading: reading.waiting_rows,
    )
    yield family_by(
        CounterMetricFamily,
        "asynctrt_waiting_refused",
        "Requests refused before the queue, by reason; crowded: their client had the most waiting; expired: "
        "timed out behind others of their client.",
        "reason",
        lambda reading: reading.served.refused,
    )
    for name, text, which in SECONDS:
        yield Family(
            partial(HistogramMetricFamily, name, text, labels=MODEL),
            partial(_add_seconds, which),
        )


def _add_seconds(which: Callable[[Latencies], list[int]], family: Any, reading: ServedReading) -> None:
    known = reading.served.latencies
    values = which(known)
    if reading.done.succeeded and not any(known.total):
        return  # The application asks the engine itself: no request of it passed through the server.
    traced = known.exemplars if values is known.total else {}
    counts = accumulate(values[:-1])
    buckets = [
        (bound, count, _exemplar(traced[number])) if number in traced else (bound, count)
        for number, (bound, count) in enumerate(zip(_LES, counts, strict=True))
    ]
    family.add_metric(reading.labels, buckets, values[-1] / 1e9)


_LES: Final = (*(str(bound) for bound in BOUNDS_S), "+Inf")


def _exemplar(traced: Traced) -> Exemplar:
    ids = {"trace_id": traced.trace_id, "span_id": traced.span_id}
    return Exemplar(ids, traced.total_ns / 1e9, traced.at_s)
