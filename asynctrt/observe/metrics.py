"""The metrics of engines, under Triton's and asynctrt's names, and Prometheus's text format."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, NamedTuple

from asynctrt.engine import Engine
from asynctrt.errors import UsageError, show
from asynctrt.statistics import Statistics, batch_bounds, batch_counts

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"
MODEL: Final = ("model", "version")
VERSION: Final = "1"
"""The version label of an application's engine, which is a server's default version."""

STATES: Final = ("succeeded", "failed", "cancelled", "expired", "refused")
"""Request outcomes, by their names in :class:`asynctrt.Statistics`."""

Sample = tuple[str, Sequence[str], float]
"""The suffix of a sample's name, the values of its labels, and its value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's statistics with the labels of its metrics."""

    labels: tuple[str, str]
    engine: Engine
    done: Statistics
    answered: int
    """Answered requests, counted when ``done`` was read."""
    waiting_rows: int = 0
    """Rows of requests that wait for their client's turn to enter the queue."""


def readings_of(engines: Mapping[str, Engine]) -> list[Reading]:
    """Read the statistics of an application's engines, by the names that label them; leave out closed ones.

    :raises UsageError: if a value of the mapping is not an engine.
    """
    readings = []
    for name, engine in dict(engines).items():
        if not isinstance(engine, Engine):
            raise UsageError(
                f"{name!r} is not an engine but {show(engine)}. For a function decorated with "
                "asynctrt.batch, give its attribute engine, once it is entered"
            )
        done = engine.statistics()
        if done.state != "closed":
            readings.append(Reading((name, VERSION), engine, done, done.succeeded))
    return readings


class Metric(NamedTuple):
    """A metric: ``samples`` returns the samples of one item, such as a :class:`Reading`.

    A histogram's samples with the suffix ``_bucket`` have one more label, ``le``.
    """

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    samples: Callable[[Any], Iterable[Sample]]

    def labels_of(self, suffix: str) -> tuple[str, ...]:
        """Return the names of a sample's labels."""
        return (*self.labels, "le") if suffix == "_bucket" else self.labels

    def texts(self, items: Iterable[Any]) -> Iterator[str]:
        """Yield the metric in Prometheus's text format: its head, and then the samples of each item."""
        yield f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"
        for item in items:
            yield "".join([self._line(*sample) for sample in self.samples(item)])

    def _line(self, suffix: str, values: Sequence[str], value: float) -> str:
        pairs = [
            f'{name}="{_escaped(text)}"' for name, text in zip(self.labels_of(suffix), values, strict=True)
        ]
        return (
            f"{self.name}{suffix}{{{','.join(pairs)}}} {float(value)}\n"
            if pairs
            else (f"{self.name}{suffix} {float(value)}\n")
        )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def counter(name: str, text: str, read: str | Callable[[Any], float | None]) -> Metric:
    """Return a metric with one count per model: see :func:`gauge`."""
    return _one(name, COUNTER, text, read)


def gauge(name: str, text: str, read: str | Callable[[Any], float | None]) -> Metric:
    """Return a metric with one momentary value per model, and no value where ``read`` returns ``None``.

    :param read: returns the value of a reading, or is the name of one in :class:`asynctrt.Statistics`.
    """
    return _one(name, GAUGE, text, read)


def _one(name: str, kind: str, text: str, read: str | Callable[[Any], float | None]) -> Metric:
    value_of = attrgetter(f"done.{read}") if isinstance(read, str) else read

    def samples(reading: Any) -> Iterable[Sample]:
        value = value_of(reading)
        return () if value is None else (("", reading.labels, value),)

    return Metric(name, kind, text, MODEL, samples)


def split(name: str, text: str, label: str, read: Callable[[Any], Mapping[str, float]]) -> Metric:
    """Return a metric with one count per model and value of an additional label."""

    def samples(reading: Any) -> Iterable[Sample]:
        return [("", (*reading.labels, key), value) for key, value in read(reading).items()]

    return Metric(name, COUNTER, text, (*MODEL, label), samples)


def buckets(
    labels: Sequence[str], bounds: Iterable[float], counts: Sequence[int], total: float
) -> Iterator[Sample]:
    """Yield the samples of a histogram.

    :param counts: the number of values in each bucket; one more bucket has no bound.
    :param total: the sum of all values.
    """
    sums = list(accumulate(counts))
    for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), sums, strict=True):
        yield "_bucket", (*labels, bound), count
    yield "_count", labels, sums[-1]
    yield "_sum", labels, total


def _batches(reading: Reading) -> Iterator[Sample]:
    bounds, sizes = batch_bounds(reading.engine.max_rows), reading.done.by_batch_rows
    rows = sum(size * batches.count for size, batches in sizes.items())
    return buckets(reading.labels, bounds, [*batch_counts(reading.done, bounds), 0], rows)


def _in_us(field: str) -> Callable[[Reading], float]:
    return lambda it: getattr(it.done, field) / 1e3


ENGINE: Final[tuple[Metric, ...]] = (
    # Triton's names, which existing charts use. Unlike other counters they have no `_total`.
    counter("nv_inference_request_success", "Requests answered.", lambda it: it.answered),
    counter("nv_inference_count", "Rows answered.", "rows"),
    counter("nv_inference_exec_count", "Batches run.", "batches"),
    *[
        counter(name, f"{text}, summed over answered requests, in microseconds.", _in_us(field))
        for name, text, field in (
            ("nv_inference_request_duration_us", "Time from arrival to answer", "total_ns"),
            ("nv_inference_queue_duration_us", "Time in the queue", "queue_ns"),
            ("nv_inference_compute_input_duration_us", "Time to copy a batch's inputs", "copy_in_ns"),
            ("nv_inference_compute_infer_duration_us", "Time to compute a batch", "compute_ns"),
            ("nv_inference_compute_output_duration_us", "Time to copy a batch's outputs", "copy_out_ns"),
        )
    ],
    gauge("nv_inference_pending_request_count", "Requests in the queue.", "queued_requests"),
    gauge("asynctrt_queued_requests", "Requests in the queue.", "queued_requests"),
    gauge("asynctrt_queued_rows", "Rows of the requests in the queue.", "queued_rows"),
    gauge("asynctrt_in_flight_batches", "Batches in flight.", "in_flight_batches"),
    gauge("asynctrt_contexts", "Execution contexts.", "contexts"),
    gauge(
        "asynctrt_contexts_quarantined",
        "Contexts abandoned because their work did not end.",
        "contexts_quarantined",
    ),
    gauge("asynctrt_arenas", "Arenas of enqueue memory shared by the contexts.", "arenas"),
    gauge("asynctrt_arena_bytes", "Enqueue memory of the arenas, in bytes.", "arena_nbytes"),
    gauge(
        "asynctrt_memory_bytes",
        "Memory of slabs, on the host and the device, and of arenas, in bytes.",
        "memory_nbytes",
    ),
    gauge(
        "asynctrt_parallel_batches",
        "Batches that can compute at once: one per arena, or per context without arenas.",
        "parallel_batches",
    ),
    gauge(
        "asynctrt_drain_seconds",
        "Estimated seconds until every waiting, queued and running request is answered; absent at first.",
        lambda it: it.done.drain_s(it.waiting_rows),
    ),
    split(
        "asynctrt_requests_total",
        "Requests by outcome; expired: timed out in the queue; refused: never queued.",
        "state",
        lambda it: {state: getattr(it.done, state) for state in STATES},
    ),
    counter(
        "asynctrt_requests_refused_late_total",
        "Refused requests that would have been too late.",
        "refused_late",
    ),
    counter(
        "asynctrt_device_seconds_total",
        "Device time of batches, shared among batches that computed at once; absent without weight.",
        lambda it: it.done.device_ns / 1e9 if it.done.device_ns else None,
    ),
    counter(
        "asynctrt_held_seconds_total",
        "Time in which a batch waited for other models on the device, by weight; absent without weight.",
        lambda it: it.done.held_ns / 1e9 if it.done.device_ns else None,
    ),
    split(
        "asynctrt_batches_launched_total",
        "Batches by why they were launched; full: no more rows fitted; idle: the device had room; delay: "
        "max_delay had passed; deadline: a timeout was near; turn: another queue was full, but it was this "
        "one's turn; ahead: the device was about to finish the last batch; again: a part of a failed batch.",
        "reason",
        lambda it: it.done.launched,
    ),
    counter(
        "asynctrt_worker_deaths_total",
        "Worker processes of the model that died; 0 for an engine in this process.",
        "worker_deaths",
    ),
    Metric("asynctrt_batch_rows", HISTOGRAM, "Batches by number of rows.", MODEL, _batches),
)
"""The metrics that come from an engine's statistics. Their items are readings."""

READY: Final = Metric(
    "asynctrt_model_ready",
    GAUGE,
    "Whether the model is ready: 1, or 0.",
    MODEL,
    lambda item: [("", (item["name"], item["version"]), item["state"] == "READY")],
)
"""Whether each model is ready, loaded or not. Its items are a repository's index."""

LOST_DEVICES: Final = Metric(
    "asynctrt_lost_devices",
    GAUGE,
    "Devices that are lost to this process, which only a new one can recover.",
    (),
    lambda readings: [("", (), len({it.engine.device_name for it in readings if it.done.state == "lost"}))],
)
"""The number of lost devices. Its only item is the list of all readings."""
