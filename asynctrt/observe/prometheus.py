"""Expose engines to Prometheus, under Triton's and asynctrt's names. The only importer of
``prometheus_client``.

::

    prometheus_client.REGISTRY.register(EngineCollector({"classifier": engine}))
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

from asynctrt.engine import Engine
from asynctrt.errors import MissingExtraError, UsageError, show
from asynctrt.statistics import Statistics, batch_bounds, batch_counts

try:
    from prometheus_client import GCCollector, PlatformCollector, ProcessCollector, exposition
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
        UnknownMetricFamily,
    )
    from prometheus_client.openmetrics import exposition as openmetrics
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector, CollectorRegistry
    from prometheus_client.samples import Exemplar
except ImportError as error:
    raise MissingExtraError(
        "metrics need prometheus-client: pip install 'asynctrt[serve]' for a server, or "
        "pip install 'asynctrt[prometheus]' for an application"
    ) from error

__all__ = [
    "MODEL",
    "READY",
    "Collector",
    "CollectorRegistry",
    "CounterMetricFamily",
    "EngineCollector",
    "Exemplar",
    "Family",
    "GCCollector",
    "GaugeMetricFamily",
    "HistogramMetricFamily",
    "InfoMetricFamily",
    "Metric",
    "PlatformCollector",
    "ProcessCollector",
    "Read",
    "Reading",
    "UnknownMetricFamily",
    "engine_families",
    "exposition",
    "family_by",
    "family_of",
    "lost_devices",
    "openmetrics",
    "text_string_to_metric_families",
]
"""Includes the names that a server needs to make metrics, because it imports them from here."""

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
"""Counters under Triton's names, which existing charts use and which lack the ``_total`` of OpenMetrics."""

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
    (
        "asynctrt_parallel_batches",
        "Batches that can compute at once: one an arena, or a context where there are no arenas.",
        lambda done: done.parallel_batches,
    ),
)

STATES: Final = ("succeeded", "failed", "cancelled", "expired", "refused")
"""Request outcomes, by their names in :class:`asynctrt.Statistics`."""

MODEL: Final = ("model", "version")

VERSION: Final = "1"
"""The version label of an application's engine, which is a server's default version."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's statistics with the labels of its metrics."""

    labels: list[str]
    engine: Engine
    done: Statistics
    answered: int
    """Answered requests, counted when ``done`` was read."""
    waiting_rows: int = 0
    """Rows of requests that wait for their client's turn to enter the queue."""


class Family(NamedTuple):
    """One metric: ``make`` makes it without samples, ``add`` adds the samples of one :class:`Reading`."""

    make: Callable[[], Metric]
    add: Callable[[Any, Any], None]

    def filled(self, items: Iterable[Any]) -> Metric:
        """Return the metric with the samples of all items."""
        metric = self.make()
        for item in items:
            self.add(metric, item)
        return metric


class EngineCollector(Collector):
    """Collect the metrics of an application's own engines, for a registry of ``prometheus_client``.

    Names and labels are the same as for a server's metrics. Any thread may scrape. Closed engines are left
    out, and so are metrics that only a server has, such as its clients and its latency histograms.

    :param engines: open engines by the names that label them. The mapping is read at each scrape, so engines
        may be added to it later.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._families = list(engine_families())

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics.

        :raises UsageError: if a value of the mapping is not an engine.
        """
        readings, index = [], []
        for name, engine in dict(self._engines).items():
            if not isinstance(engine, Engine):
                raise UsageError(
                    f"{name!r} is not an engine, but {show(engine)}. Of a function that asynctrt.batch "
                    "decorates give the attribute engine, once it is entered"
                )
            done = engine.statistics()
            if done.state != "closed":
                readings.append(Reading([name, VERSION], engine, done, done.succeeded))
                state = "READY" if done.state == "open" else "UNAVAILABLE"
                index.append({"name": name, "version": VERSION, "state": state})
        for family in self._families:
            yield family.filled(readings)
        yield READY.filled(index)
        yield lost_devices(readings)


def lost_devices(readings: Iterable[Reading]) -> Metric:
    """Return the metric for the number of lost devices."""
    devices = {reading.engine.device_name for reading in readings if reading.done.state == "lost"}
    return GaugeMetricFamily(
        "asynctrt_lost_devices",
        "Devices that are lost to this process, which only a new one can recover.",
        len(devices),
    )


def engine_families() -> Iterator[Family]:
    """Yield the metrics that come from an engine's statistics."""
    for name, text, read in TRITON:
        yield family_of(UnknownMetricFamily, name, text, partial(_read, read))
    yield family_of(
        UnknownMetricFamily,
        "nv_inference_request_success",
        "Requests answered.",
        lambda reading: reading.answered,
    )
    for name, text, read in GAUGES:
        yield family_of(GaugeMetricFamily, name, text, partial(_read, read))
    yield family_of(
        GaugeMetricFamily,
        "asynctrt_drain_seconds",
        "Estimated seconds until all that waits, is queued or in flight is answered; absent at first.",
        lambda reading: reading.done.drain_s(reading.waiting_rows),
    )
    yield family_by(
        CounterMetricFamily,
        "asynctrt_requests",
        "Requests by outcome; expired: timed out in the queue; refused: never queued.",
        "state",
        lambda reading: {state: getattr(reading.done, state) for state in STATES},
    )
    yield family_of(
        CounterMetricFamily,
        "asynctrt_requests_refused_late",
        "Requests refused because they would have been too late, which are among the refused.",
        lambda reading: reading.done.refused_late,
    )
    yield family_of(
        CounterMetricFamily,
        "asynctrt_device_seconds",
        "Time of the device that batches took, each its part of what computed at once; absent without "
        "weight.",
        lambda reading: reading.done.device_ns / 1e9 if reading.done.device_ns else None,
    )
    yield family_of(
        CounterMetricFamily,
        "asynctrt_held_seconds",
        "Time in which a batch was held for other models on the device, by weight; absent without.",
        lambda reading: reading.done.held_ns / 1e9 if reading.done.device_ns else None,
    )
    yield family_by(
        CounterMetricFamily,
        "asynctrt_batches_launched",
        "Batches by why they were launched; full: no more rows fitted; idle: the device had room; delay: "
        "max_delay was over; deadline: a timeout was near; turn: another bucket was full, but it was this "
        "one's turn; ahead: the device was about to be done with the one before; again: a part of one that "
        "failed.",
        "reason",
        lambda reading: reading.done.launched,
    )
    yield family_of(
        CounterMetricFamily,
        "asynctrt_worker_deaths",
        "Worker processes of the model that died; 0 for an engine in the server's own process.",
        lambda reading: reading.done.worker_deaths,
    )
    yield family_of(
        CounterMetricFamily,
        "asynctrt_handover_seconds",
        "Time of answered requests outside queue, copies and compute, in seconds: waiting for a busy device "
        "after launch, and for the event loop to notice the result.",
        _handover_s,
    )
    yield Family(
        lambda: HistogramMetricFamily("asynctrt_batch_rows", "Batches by number of rows.", labels=MODEL),
        _add_batches,
    )


def _read(read: Read, reading: Reading) -> float:
    return read(reading.done)


def _handover_s(reading: Reading) -> float:
    done = reading.done
    return max(0, done.total_ns - done.queue_ns - done.copy_in_ns - done.compute_ns - done.copy_out_ns) / 1e9


def family_of(kind: Any, name: str, text: str, read: Callable[[Any], float | None]) -> Family:
    """Return a metric with one value per model, and no value if ``read`` returns ``None``."""

    def add(family: Any, reading: Reading) -> None:
        value = read(reading)
        if value is not None:
            family.add_metric(reading.labels, value)

    return Family(lambda: kind(name, text, labels=MODEL), add)


def family_by(kind: Any, name: str, text: str, label: str, read: Callable[[Any], Any]) -> Family:
    """Return a metric with one value per model and value of an additional label."""

    def add(family: Any, reading: Reading) -> None:
        for key, value in read(reading).items():
            family.add_metric([*reading.labels, key], value)

    return Family(lambda: kind(name, text, labels=(*MODEL, label)), add)


def _add_batches(family: Any, reading: Reading) -> None:
    bounds = batch_bounds(reading.engine.max_rows)
    counts = list(accumulate(batch_counts(reading.done, bounds)))
    buckets = [(str(float(bound)), count) for bound, count in zip(bounds, counts, strict=True)]
    rows = sum(size * batches.count for size, batches in reading.done.by_batch_rows.items())
    family.add_metric(reading.labels, [*buckets, ("+Inf", counts[-1])], rows)


def _add_ready(family: Any, item: dict[str, str]) -> None:
    family.add_metric([item["name"], item["version"]], float(item["state"] == "READY"))


READY: Final = Family(
    partial(GaugeMetricFamily, "asynctrt_model_ready", "Whether the model is ready: 1, or 0.", labels=MODEL),
    _add_ready,
)
"""Whether each model is ready. This is the only metric that also covers models that are not loaded."""
