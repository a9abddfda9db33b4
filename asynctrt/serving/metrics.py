"""Expose a server's metrics to Prometheus, under Triton's names and asynctrt's own. The only importer of
``prometheus_client``.

Metrics are computed at each scrape from counters that exist anyway, so they cost requests nothing.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import asynctrt
from asynctrt import clock
from asynctrt.errors import MissingExtraError
from asynctrt.serving.api import Answer, Headers, Page
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import batch_bounds, batch_counts, resident_nbytes
from asynctrt.serving.served import ServedModel
from asynctrt.statistics import Statistics

try:
    from prometheus_client import exposition
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
        UnknownMetricFamily,
    )
    from prometheus_client.openmetrics import exposition as openmetrics
    from prometheus_client.registry import CollectorRegistry
except ImportError as error:
    raise MissingExtraError("serving needs prometheus-client: pip install 'asynctrt[serve]'") from error

Read = Callable[[Statistics], float]

TRITON: Final[tuple[tuple[str, str, Read], ...]] = (
    ("nv_inference_count", "Rows answered.", lambda done: done.rows),
    ("nv_inference_exec_count", "Batches run.", lambda done: done.batches),
    (
        "nv_inference_request_duration_us",
        "Time from arrival to answer, summed over answered requests, in microseconds.",
        lambda done: done.total_ns / 1e3,
    ),
    (
        "nv_inference_queue_duration_us",
        "Time in the queue, summed over answered requests, in microseconds.",
        lambda done: done.queue_ns / 1e3,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Time to copy a batch's inputs, summed over answered requests, in microseconds.",
        lambda done: done.copy_in_ns / 1e3,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Time to compute a batch, summed over answered requests, in microseconds.",
        lambda done: done.compute_ns / 1e3,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Time to copy a batch's outputs, summed over answered requests, in microseconds.",
        lambda done: done.copy_out_ns / 1e3,
    ),
)
"""Counters under Triton's names, which users chart already and which lack the ``_total`` of OpenMetrics."""

GAUGES: Final[tuple[tuple[str, str, Read], ...]] = (
    (
        "nv_inference_pending_request_count",
        "Requests in the queue.",
        lambda done: done.queued_requests,
    ),
    ("asynctrt_queued_requests", "Requests in the queue.", lambda done: done.queued_requests),
    (
        "asynctrt_queued_rows",
        "Rows of the requests in the queue.",
        lambda done: done.queued_rows,
    ),
    ("asynctrt_in_flight_batches", "Batches in flight.", lambda done: done.in_flight_batches),
    ("asynctrt_contexts", "Execution contexts.", lambda done: done.contexts),
    (
        "asynctrt_contexts_quarantined",
        "Contexts abandoned because their work did not end.",
        lambda done: done.contexts_quarantined,
    ),
    ("asynctrt_arenas", "Arenas of enqueue memory shared by the contexts.", lambda done: done.arenas),
    (
        "asynctrt_arena_bytes",
        "Enqueue memory of the arenas, in bytes.",
        lambda done: done.arena_nbytes,
    ),
    (
        "asynctrt_arena_private_bytes",
        "Enqueue memory that private workspaces, one a context, would take, in bytes.",
        lambda done: done.arena_nbytes_private,
    ),
    (
        "asynctrt_arena_busy_share",
        "Share of the time since the model was loaded in which its arenas were computing.",
        lambda done: done.arena_busy_share,
    ),
    (
        "asynctrt_memory_bytes",
        "Memory of slabs, on the host and the device, and of arenas, in bytes.",
        lambda done: done.memory_nbytes,
    ),
)

STATES: Final = ("succeeded", "failed", "cancelled", "expired", "refused")
"""Outcomes of requests, by their names in :class:`asynctrt.Statistics`."""

_UNTYPED: Final = re.compile(rb"^(# TYPE nv_\w+) untyped$", re.MULTILINE)


class _Labelled(NamedTuple):
    """A model's statistics with the labels of its metrics."""

    labels: list[str]
    served: ServedModel
    done: Statistics


class Metrics:
    """Collect metrics into a registry of its own, so that two servers in one process do not collide.

    :param repository: the models, whose names and versions are the labels.
    :param connections: returns the number of open connections; ``in_flight`` that of requests being answered;
        ``loop_lag_ns`` how late the loop ran its last timer. Without one of them its metric is left out.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        connections: Callable[[], int] | None = None,
        in_flight: Callable[[], int] | None = None,
        loop_lag_ns: Callable[[], int | None] | None = None,
        cpu_ns: Callable[[], int] = clock.cpu_ns,
    ) -> None:
        self._repository = repository
        self._connections = connections
        self._in_flight = in_flight
        self._loop_lag_ns = loop_lag_ns
        self._cpu_ns = cpu_ns
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def page(self, *, is_open: bool = False) -> Page:
        """Return the page for ``/metrics``."""
        return Page(self.answer, is_open)

    def answer(self, headers: Headers) -> Answer:
        """Return the metrics in OpenMetrics' format if the client accepts it, else in Prometheus's."""
        accepted = headers.get(b"accept", b"").lower().split(b",")
        if any(item.split(b";")[0].strip() == b"application/openmetrics-text" for item in accepted):
            body = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]  # It is.
            kind = openmetrics.CONTENT_TYPE_LATEST
        else:
            # The library accepts counters only with _total, which Triton's names lack. Prometheus's format
            # can declare them counters all the same; in OpenMetrics they stay of unknown type.
            body = _UNTYPED.sub(rb"\1 counter", exposition.generate_latest(self.registry))
            kind = exposition.CONTENT_TYPE_PLAIN_0_0_4
        return Answer(200, (("Content-Type", kind), ("Cache-Control", "no-store")), (body,))

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        readings = [
            _Labelled([served.name, served.version], served, served.engine.statistics())
            for served in self._repository
        ]
        yield from _triton(readings)
        yield from _gauges(readings)
        yield from _requests(readings)
        yield _batches(readings)
        yield self._ready()
        yield from self._server()

    def _ready(self) -> Metric:
        ready = GaugeMetricFamily(
            "asynctrt_model_ready", "Whether the model is ready: 1, or 0.", labels=("model", "version")
        )
        for item in self._repository.index():
            ready.add_metric([item["name"], item["version"]], float(item["state"] == "READY"))
        return ready

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


def _triton(readings: list[_Labelled]) -> Iterator[Metric]:
    for name, text, read in TRITON:
        counter = UnknownMetricFamily(name, text, labels=("model", "version"))
        for reading in readings:
            counter.add_metric(reading.labels, read(reading.done))
        yield counter
    success = UnknownMetricFamily(
        "nv_inference_request_success", "Requests answered.", labels=("model", "version")
    )
    for reading in readings:
        success.add_metric(reading.labels, reading.served.succeeded(reading.done))
    yield success
    failures = UnknownMetricFamily(
        "nv_inference_request_failure",
        "Requests that failed, by reason: REJECTED under overload, CANCELED by the client, BACKEND if the "
        "model failed, or OTHER.",
        labels=("model", "version", "reason"),
    )
    for reading in readings:
        for reason, count in reading.served.failures.items():
            failures.add_metric([*reading.labels, reason], count)
    yield failures


def _gauges(readings: list[_Labelled]) -> Iterator[Metric]:
    for name, text, read in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("model", "version"))
        for reading in readings:
            gauge.add_metric(reading.labels, read(reading.done))
        yield gauge


def _requests(readings: list[_Labelled]) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "asynctrt_requests",
        "Requests by outcome; expired: timed out in the queue; refused: never queued.",
        labels=("model", "version", "state"),
    )
    launched = CounterMetricFamily(
        "asynctrt_batches_launched",
        "Batches by why they were launched; full: no more rows fitted; idle: the device had room; delay: "
        "max_delay was over; deadline: a timeout was near; turn: another bucket was full, but it was this "
        "one's turn.",
        labels=("model", "version", "reason"),
    )
    pending = GaugeMetricFamily(
        "asynctrt_pending_requests",
        "Requests accepted and not answered yet, queued or running.",
        labels=("model", "version"),
    )
    handover = CounterMetricFamily(
        "asynctrt_handover_seconds",
        "Time of answered requests outside queue, copies and compute, in seconds: waiting for a busy device "
        "after launch, and for the event loop to notice the result.",
        labels=("model", "version"),
    )
    for reading in readings:
        done = reading.done
        for reason, count in done.launched.items():
            launched.add_metric([*reading.labels, reason], count)
        for state in STATES:
            ended.add_metric([*reading.labels, state], getattr(done, state))
        pending.add_metric(reading.labels, reading.served.pending)
        known_ns = done.queue_ns + done.copy_in_ns + done.compute_ns + done.copy_out_ns
        handover.add_metric(reading.labels, max(0, done.total_ns - known_ns) / 1e9)
    yield ended
    yield launched
    yield pending
    yield handover


def _batches(readings: list[_Labelled]) -> Metric:
    family = HistogramMetricFamily(
        "asynctrt_batch_rows", "Batches by number of rows.", labels=("model", "version")
    )
    for reading in readings:
        bounds = batch_bounds(reading.served.engine.max_rows)
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(bounds, batch_counts(reading.done, bounds), strict=True):
            total += count
            buckets.append((str(float(bound)), total))
        rows = sum(size * batches.count for size, batches in reading.done.by_batch_rows.items())
        family.add_metric(reading.labels, [*buckets, ("+Inf", total)], rows)
    return family
