"""Sample a server once a second for the dashboard: rates, latencies, queues.

Sampling takes differences of counters that exist anyway, and the latencies recorded since the last sample, so
it costs requests nothing.
"""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from asynctrt._util import clock
from asynctrt.serving.repository import Repository
from asynctrt.serving.served import ServedModel
from asynctrt.statistics import Statistics, batch_bounds, batch_counts

SAMPLES_MAX: Final = 300
"""Samples kept: five minutes."""

PERCENTILES: Final = (50, 95, 99)

SERVER_FIELDS: Final = ("connections", "requests_in_flight", "loop_lag_ms", "cpu_percent", "resident_bytes")
"""The figures of a sample's ``server``, in order. A CPU percentage of 100 is one core."""

MODEL_FIELDS: Final = (
    "answers_per_s",
    "rows_per_s",
    "failures_per_s",
    "batch_rows",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "queue_ms",
    "copy_in_ms",
    "compute_ms",
    "copy_out_ms",
    "queued_requests",
    "queued_rows",
    "pending_requests",
    "in_flight_batches",
    "contexts",
    "arenas",
    "memory_bytes",
    "batches",
)
"""The figures of one model in a sample, in order.

The first eleven and the last cover the time since the previous sample, and are null if there was nothing to
measure; the seven between are momentary. ``batches`` counts batches by rows, within the bounds of
:func:`batch_bounds`.
"""

_NOTHING: Final = (None,) * MODEL_FIELDS.index("queued_requests")

PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

STATM: Final = Path("/proc/self/statm")


class _Reading(NamedTuple):
    """A model's counters at one moment."""

    served: ServedModel
    done: Statistics
    answers: int
    failures: int
    batches: list[int]


class Sampler:
    """The last samples of a server, taken in its event loop."""

    def __init__(
        self,
        repository: Repository,
        now_ns: Callable[[], int] = clock.now_ns,
        *,
        connections: Callable[[], int],
        in_flight: Callable[[], int],
        lag_ns: Callable[[], int],
        cpu_ns: Callable[[], int] = clock.cpu_ns,
    ) -> None:
        self._repository = repository
        self.connections = connections
        self.in_flight = in_flight
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._lag_ns = lag_ns
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_MAX)
        self._number = 0
        self._at_ns = now_ns()
        self._cpu_at_ns = cpu_ns()
        self.started_ms = clock.wall_ms(self._at_ns)
        """When the sampler was made, in ms since 1970, so that a client can detect a restart."""
        # The first sample starts from the current counters.
        self._readings: dict[str, _Reading] = {}
        self._busy: dict[ServedModel, float] = {}
        for served in repository:
            self._readings[key_of(served)] = _read(served)
            served.latencies_ns = []

    def __repr__(self) -> str:
        return f"<Sampler {self._number} samples taken, {len(self._samples)} kept>"

    def sample(self) -> None:
        """Take one sample, dropping the oldest beyond the limit."""
        now_ns, cpu_ns = self._now_ns(), self._cpu_ns()
        elapsed_ns = now_ns - self._at_ns
        readings = {}
        models = {}
        self._busy = {}
        for served in self._repository:
            key = key_of(served)
            reading = readings[key] = _read(served)
            latencies_ns, served.latencies_ns = served.latencies_ns, []
            before = self._readings.get(key)
            if before is not None and (
                before.served is not served or before.done.succeeded > reading.done.succeeded
            ):
                before = None  # The model was reloaded, so its counters restarted.
            models[key] = _figures(before, reading, elapsed_ns, latencies_ns)
            if before is not None:
                self._busy[served] = reading.done.busy_share_since(before.done, elapsed_ns)
        self._number += 1
        self._samples.append(
            {
                "number": self._number,
                "at_ms": clock.wall_ms(now_ns),
                "server": [
                    self.connections(),
                    self.in_flight(),
                    round(self._lag_ns() / 1e6, 3),
                    round(100 * (cpu_ns - self._cpu_at_ns) / elapsed_ns, 2),
                    resident_nbytes(),
                ],
                "models": models,
            }
        )
        self._readings = readings
        self._at_ns, self._cpu_at_ns = now_ns, cpu_ns

    def busy_share(self, served: ServedModel) -> float | None:
        """Return the fraction of the time between the last two samples in which a model computed, 0 to 1.

        1 means as many batches at once as it can compute. ``None`` before it was sampled twice.
        """
        return self._busy.get(served)

    def history(self, count: int = SAMPLES_MAX) -> dict[str, Any]:
        """Return the newest samples, ready for JSON."""
        return {
            "started_ms": self.started_ms,
            "number": self._number,
            "server_fields": SERVER_FIELDS,
            "model_fields": MODEL_FIELDS,
            "samples": list(self._samples)[-count:],
        }


def key_of(served: ServedModel) -> str:
    """Return the key of a model and version in samples."""
    return f"{served.name}:{served.version}"


def resident_nbytes() -> int | None:
    """Return the process's resident memory in bytes; ``None`` on a platform without /proc."""
    try:
        return int(STATM.read_bytes().split()[1]) * PAGE_NBYTES
    except (OSError, IndexError, ValueError):
        return None


def percentiles_ms(latencies_ns: list[int]) -> list[float | None]:
    """Return the 50th, 95th and 99th percentile in ms, each a latency that occurred; ``None`` without any."""
    if not latencies_ns:
        return [None] * len(PERCENTILES)
    ranks = [-(-len(latencies_ns) * percent // 100) - 1 for percent in PERCENTILES]
    ordered = np.partition(np.array(latencies_ns, np.int64), ranks)
    return [round(int(ordered[rank]) / 1e6, 4) for rank in ranks]


def _read(served: ServedModel) -> _Reading:
    done = served.engine.statistics()
    counts = batch_counts(done, batch_bounds(served.engine.max_rows))
    return _Reading(served, done, served.succeeded(done), sum(served.failures.values()), counts)


def _figures(
    before: _Reading | None, reading: _Reading, elapsed_ns: int, latencies_ns: list[int]
) -> list[Any]:
    """Return one model's figures, in the order of :data:`MODEL_FIELDS`."""
    done = reading.done
    now = (
        done.queued_requests,
        done.queued_rows,
        reading.served.pending,
        done.in_flight_batches,
        done.contexts,
        done.arenas,
        done.memory_nbytes,
    )
    if before is None:
        return [*_NOTHING, *now, None]
    was = before.done
    answers, batches = reading.answers - before.answers, done.batches - was.batches

    def a_second(count: int) -> float:
        return round(count * 1e9 / elapsed_ns, 3)

    def a_request(total_ns: int) -> float | None:
        return round(total_ns / answers / 1e6, 4) if answers else None

    return [
        a_second(answers),
        a_second(done.rows - was.rows),
        a_second(reading.failures - before.failures),
        round((done.rows - was.rows) / batches, 3) if batches else None,
        *percentiles_ms(latencies_ns),
        a_request(done.queue_ns - was.queue_ns),
        a_request(done.copy_in_ns - was.copy_in_ns),
        a_request(done.compute_ns - was.compute_ns),
        a_request(done.copy_out_ns - was.copy_out_ns),
        *now,
        [count - earlier for count, earlier in zip(reading.batches, before.batches, strict=True)],
    ]
