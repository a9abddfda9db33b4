"""A server's metrics for Prometheus: Triton's names, and asynctrt's own. The only importer of
``prometheus_client``.

They are read when they are asked for, from counters that are kept anyway, so that a request costs nothing.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import asynctrt
from asynctrt import clock
from asynctrt.errors import MissingExtraError
from asynctrt.serving.api import Answer, Headers, Page
from asynctrt.serving.repository import Repository, ServedModel
from asynctrt.serving.sampler import batch_bounds, batch_counts, resident_nbytes
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
    ("nv_inference_count", "Rows that were answered.", lambda done: done.rows),
    ("nv_inference_exec_count", "Batches that were run.", lambda done: done.batches),
    (
        "nv_inference_request_duration_us",
        "Time from arrival to answer, in microseconds, summed over the answered requests.",
        lambda done: done.total_ns / 1e3,
    ),
    (
        "nv_inference_queue_duration_us",
        "Time in the queue, in microseconds, summed over the answered requests.",
        lambda done: done.queue_ns / 1e3,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Time of copying inputs, in microseconds: that of each answered request's batch, summed.",
        lambda done: done.copy_in_ns / 1e3,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Time of running the model, in microseconds: that of each answered request's batch, summed.",
        lambda done: done.compute_ns / 1e3,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Time of copying outputs, in microseconds: that of each answered request's batch, summed.",
        lambda done: done.copy_out_ns / 1e3,
    ),
)
"""Counters by the names that users of Triton chart already, without the ``_total`` of newer conventions."""

GAUGES: Final[tuple[tuple[str, str, Read], ...]] = (
    (
        "nv_inference_pending_request_count",
        "Requests that wait in the queue now.",
        lambda done: done.queued_requests,
    ),
    ("asynctrt_queued_requests", "Requests that wait in the queue now.", lambda done: done.queued_requests),
    (
        "asynctrt_queued_rows",
        "Rows of the requests that wait in the queue now.",
        lambda done: done.queued_rows,
    ),
    ("asynctrt_in_flight_batches", "Batches that run now.", lambda done: done.in_flight_batches),
    ("asynctrt_contexts", "Contexts to run batches on.", lambda done: done.contexts),
    (
        "asynctrt_contexts_quarantined",
        "Contexts that were given up because their work did not end.",
        lambda done: done.contexts_quarantined,
    ),
    ("asynctrt_arenas", "Arenas of enqueue memory that contexts share.", lambda done: done.arenas),
    (
        "asynctrt_arena_bytes",
        "Enqueue memory that the arenas hold, in bytes.",
        lambda done: done.arena_nbytes,
    ),
    (
        "asynctrt_arena_private_bytes",
        "Enqueue memory that a workspace of its own for each context would hold, in bytes.",
        lambda done: done.arena_nbytes_private,
    ),
    (
        "asynctrt_arena_busy_share",
        "Which share of the time since the model was loaded its arenas were computing for it.",
        lambda done: done.arena_busy_share,
    ),
    (
        "asynctrt_memory_bytes",
        "Memory of slabs, their twins on the device, and arenas, in bytes.",
        lambda done: done.memory_nbytes,
    ),
)

STATES: Final = ("succeeded", "failed", "cancelled", "expired", "refused")
"""What came of requests, as :class:`asynctrt.Statistics` has it."""

_UNTYPED: Final = re.compile(rb"^(# TYPE nv_\w+) untyped$", re.MULTILINE)


class _Look(NamedTuple):
    labels: list[str]
    served: ServedModel
    done: Statistics


class Metrics:
    """A collector of its own registry, so that two servers in one process do not meet.

    :param repository: whose models it tells of. Labels are their names and versions, and so as many.
    :param connections: says how many connections the server has; ``in_flight``: how many requests it is
        answering; ``loop_lag_ns``: how late the loop's timer was. What is not given is not in the metrics.
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
        """The page for ``/metrics``."""
        return Page(self.answer, is_open)

    def answer(self, headers: Headers) -> Answer:
        """The metrics, in OpenMetrics' format for a client that takes it, else in Prometheus's own."""
        accepted = headers.get(b"accept", b"").lower().split(b",")
        if any(item.split(b";")[0].strip() == b"application/openmetrics-text" for item in accepted):
            body = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]  # It is.
            kind = openmetrics.CONTENT_TYPE_LATEST
        else:
            # The library would call them counters under a name with _total only, which is not theirs.
            # OpenMetrics has no counters without it, so that there they stay of unknown type.
            body = _UNTYPED.sub(rb"\1 counter", exposition.generate_latest(self.registry))
            kind = exposition.CONTENT_TYPE_PLAIN_0_0_4
        return Answer(200, (("Content-Type", kind), ("Cache-Control", "no-store")), (body,))

    def collect(self) -> Iterator[Metric]:
        """Every metric as it is now."""
        looks = [
            _Look([served.name, served.version], served, served.engine.statistics())
            for served in self._repository
        ]
        yield from _triton(looks)
        yield from _gauges(looks)
        yield from _requests(looks)
        yield _batches(looks)
        yield self._ready()
        yield from self._server()

    def _ready(self) -> Metric:
        ready = GaugeMetricFamily(
            "asynctrt_model_ready", "Whether the model is served: 1, or 0.", labels=("model", "version")
        )
        for item in self._repository.index():
            ready.add_metric([item["name"], item["version"]], float(item["state"] == "READY"))
        return ready

    def _server(self) -> Iterator[Metric]:
        if self._connections is not None:
            yield GaugeMetricFamily(
                "asynctrt_server_connections", "Connections that are open now.", self._connections()
            )
        if self._in_flight is not None:
            yield GaugeMetricFamily(
                "asynctrt_server_requests_in_flight",
                "Requests to all models that are being answered now.",
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
            "CPU time that the process has used, in seconds.",
            self._cpu_ns() / 1e9,
        )
        resident = resident_nbytes()
        if resident is not None:
            yield GaugeMetricFamily(
                "asynctrt_process_resident_memory_bytes",
                "Memory that the process has in RAM, in bytes.",
                resident,
            )
        yield InfoMetricFamily(
            "asynctrt_build", "The version of asynctrt that serves.", {"version": asynctrt.__version__}
        )


def _triton(looks: list[_Look]) -> Iterator[Metric]:
    for name, text, read in TRITON:
        counter = UnknownMetricFamily(name, text, labels=("model", "version"))
        for look in looks:
            counter.add_metric(look.labels, read(look.done))
        yield counter
    success = UnknownMetricFamily(
        "nv_inference_request_success", "Requests that were answered.", labels=("model", "version")
    )
    for look in looks:
        success.add_metric(look.labels, look.served.succeeded(look.done))
    yield success
    failures = UnknownMetricFamily(
        "nv_inference_request_failure",
        "Requests that failed: REJECTED under overload, CANCELED by the client, BACKEND failed, or OTHER.",
        labels=("model", "version", "reason"),
    )
    for look in looks:
        for reason, count in look.served.failures.items():
            failures.add_metric([*look.labels, reason], count)
    yield failures


def _gauges(looks: list[_Look]) -> Iterator[Metric]:
    for name, text, read in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("model", "version"))
        for look in looks:
            gauge.add_metric(look.labels, read(look.done))
        yield gauge


def _requests(looks: list[_Look]) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "asynctrt_requests",
        "Requests by what came of them; expired: timed out in the queue; refused: never queued.",
        labels=("model", "version", "state"),
    )
    pending = GaugeMetricFamily(
        "asynctrt_pending_requests",
        "Requests to the server that were taken and not answered yet, queued or running.",
        labels=("model", "version"),
    )
    handover = CounterMetricFamily(
        "asynctrt_handover_seconds",
        "Time of answered requests that is in none of the nv_inference durations but the whole, in seconds: "
        "a launched batch waits for a busy device, and a computed one for the event loop to notice it.",
        labels=("model", "version"),
    )
    for look in looks:
        done = look.done
        for state in STATES:
            ended.add_metric([*look.labels, state], getattr(done, state))
        pending.add_metric(look.labels, look.served.pending)
        known_ns = done.queue_ns + done.copy_in_ns + done.compute_ns + done.copy_out_ns
        handover.add_metric(look.labels, max(0, done.total_ns - known_ns) / 1e9)
    yield ended
    yield pending
    yield handover


def _batches(looks: list[_Look]) -> Metric:
    family = HistogramMetricFamily(
        "asynctrt_batch_rows", "Batches by their number of rows.", labels=("model", "version")
    )
    for look in looks:
        bounds = batch_bounds(look.served.engine.max_rows)
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(bounds, batch_counts(look.done, bounds), strict=True):
            total += count
            buckets.append((str(float(bound)), total))
        rows = sum(size * batches.count for size, batches in look.done.by_batch_rows.items())
        family.add_metric(look.labels, [*buckets, ("+Inf", total)], rows)
    return family
