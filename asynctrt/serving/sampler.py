"""What a server did in each of the last seconds: rates, latencies, queues. The dashboard draws it.

The server calls :meth:`Sampler.sample` once a second. Requests cost nothing for it: it takes the differences
of counters that are kept anyway, and the latencies that were noted since it looked last.
"""

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from asynctrt import clock
from asynctrt.serving.repository import Repository, ServedModel
from asynctrt.statistics import Statistics

SAMPLES_MAX: Final = 300
"""Samples that are kept: five minutes of seconds."""

PERCENTILES: Final = (50, 95, 99)

SERVER_FIELDS: Final = ("connections", "requests_in_flight", "loop_lag_ms", "cpu_percent", "resident_bytes")
"""The figures of a sample's ``server``, in order. 100 % is one core."""

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

The first eleven and the last are of the time since the sample before, and null where there was nothing to
measure; the seven between are of the moment. ``batches`` counts the batches by their rows, with the bounds
of :func:`batch_bounds`.
"""

_NOTHING: Final = (None,) * 11

PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

STATM: Final = Path("/proc/self/statm")


class _Look(NamedTuple):
    """What a model's counters said at one moment."""

    served: ServedModel
    done: Statistics
    answers: int
    failures: int
    batches: list[int]


class Sampler:
    """Keeps a sample of every second. It belongs to the event loop of its server.

    :param repository: whose models are looked at.
    :param connections: says how many connections the server has; ``in_flight``: how many requests it is
        answering. Without them these figures are null.
    :param interval_ns: between the end of one sample and the next; what a sample comes later than that is
        the loop's lag, so the server's timer is to be started anew after each. A sample that comes after
        less than a tenth of it is not taken: the rates of so short a time would be wild.
    """

    def __init__(
        self,
        repository: Repository,
        now_ns: Callable[[], int] = clock.now_ns,
        *,
        connections: Callable[[], int] | None = None,
        in_flight: Callable[[], int] | None = None,
        cpu_ns: Callable[[], int] = clock.cpu_ns,
        interval_ns: int = 1_000_000_000,
        samples_max: int = SAMPLES_MAX,
    ) -> None:
        self._repository = repository
        self._connections = connections
        self._in_flight = in_flight
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._interval_ns = interval_ns
        self._samples: deque[dict[str, Any]] = deque(maxlen=samples_max)
        self._number = 0
        self._at_ns = self._ended_ns = now_ns()
        self._cpu_at_ns = cpu_ns()
        self.started_ms = clock.wall_ns(self._at_ns) // 1_000_000
        """When it was made, in ms since 1970. Another one's samples are numbered from 1 again."""
        self.loop_lag_ns: int | None = None
        """How late the last sample came; ``None`` before the first."""
        # What was done before is no second's: it is where the first sample begins.
        self._looks: dict[str, _Look] = {}
        for served in repository:
            self._looks[key_of(served)] = _look(served)
            served.latencies_ns = []

    def __repr__(self) -> str:
        return f"<Sampler {self._number} samples taken, {len(self._samples)} kept>"

    def sample(self) -> None:
        """Take one sample, and forget the oldest if there are too many."""
        now_ns, cpu_ns = self._now_ns(), self._cpu_ns()
        elapsed_ns = now_ns - self._at_ns
        if elapsed_ns * 10 < self._interval_ns:
            return
        # Since the end of the last one, so that what sampling itself took is not held to be lag.
        self.loop_lag_ns = max(0, now_ns - self._ended_ns - self._interval_ns)
        looks = {}
        models = {}
        for served in self._repository:
            key = key_of(served)
            look = looks[key] = _look(served)
            latencies_ns, served.latencies_ns = served.latencies_ns, []
            before = self._looks.get(key)
            if before is not None and (
                before.served is not served or before.done.succeeded > look.done.succeeded
            ):
                before = None  # Loaded again: its counters began anew, some time within this second.
            models[key] = _figures(before, look, elapsed_ns, latencies_ns)
        self._number += 1
        self._samples.append(
            {
                "number": self._number,
                "at_ms": clock.wall_ns(now_ns) // 1_000_000,
                "server": [
                    self._connections() if self._connections else None,
                    self._in_flight() if self._in_flight else None,
                    round(self.loop_lag_ns / 1e6, 3),
                    round(100 * (cpu_ns - self._cpu_at_ns) / elapsed_ns, 2),
                    resident_nbytes(),
                ],
                "models": models,
            }
        )
        self._looks = looks
        self._at_ns, self._cpu_at_ns = now_ns, cpu_ns
        self._ended_ns = self._now_ns()

    def history(self, since: int = 0) -> dict[str, Any]:
        """The samples after number ``since``, ready for JSON; all that are kept, if it is not given."""
        return {
            "started_ms": self.started_ms,
            "number": self._number,
            "server_fields": SERVER_FIELDS,
            "model_fields": MODEL_FIELDS,
            "samples": [sample for sample in self._samples if sample["number"] > since],
        }

    def recent(self, count: int) -> dict[str, Any]:
        """The newest ``count`` samples; see :meth:`history`."""
        return self.history(self._number - count)


def key_of(served: ServedModel) -> str:
    """A model's name and version as one word, as samples have it."""
    return f"{served.name}:{served.version}"


def batch_bounds(rows_max: int) -> list[int]:
    """The sizes up to which batches are counted together: powers of two, and in the end ``rows_max``."""
    return [1 << bits for bits in range((rows_max - 1).bit_length())] + [rows_max]


def batch_counts(done: Statistics, bounds: list[int]) -> list[int]:
    """How many batches had rows up to each of the bounds, and more than the bound before it."""
    counts = [0] * len(bounds)
    for rows, batches in done.by_batch_rows.items():
        counts[bisect_left(bounds, rows)] += batches.count
    return counts


def resident_nbytes() -> int | None:
    """The memory that this process has in RAM; ``None`` where the platform does not say it in /proc."""
    try:
        return int(STATM.read_bytes().split()[1]) * PAGE_NBYTES
    except (OSError, IndexError, ValueError):
        return None


def percentiles_ms(latencies_ns: list[int]) -> list[float | None]:
    """The latencies that 50, 95 and 99 % are not above, each one that occurred; null without any."""
    if not latencies_ns:
        return [None] * len(PERCENTILES)
    ranks = [-(-len(latencies_ns) * percent // 100) - 1 for percent in PERCENTILES]
    ordered = np.partition(np.array(latencies_ns, np.int64), ranks)
    return [round(int(ordered[rank]) / 1e6, 4) for rank in ranks]


def _look(served: ServedModel) -> _Look:
    done = served.engine.statistics()
    counts = batch_counts(done, batch_bounds(served.engine.max_rows))
    return _Look(served, done, served.succeeded(done), sum(served.failures.values()), counts)


def _figures(before: _Look | None, look: _Look, elapsed_ns: int, latencies_ns: list[int]) -> list[Any]:
    """One model's figures, in the order of :data:`MODEL_FIELDS`."""
    done = look.done
    now = (
        done.queued_requests,
        done.queued_rows,
        look.served.pending,
        done.in_flight_batches,
        done.contexts,
        done.arenas,
        done.memory_nbytes,
    )
    if before is None:
        return [*_NOTHING, *now, None]
    was = before.done
    answers, batches = look.answers - before.answers, done.batches - was.batches

    def a_second(count: int) -> float:
        return round(count * 1e9 / elapsed_ns, 3)

    def a_request(total_ns: int) -> float | None:
        return round(total_ns / answers / 1e6, 4) if answers else None

    return [
        a_second(answers),
        a_second(done.rows - was.rows),
        a_second(look.failures - before.failures),
        round((done.rows - was.rows) / batches, 3) if batches else None,
        *percentiles_ms(latencies_ns),
        a_request(done.queue_ns - was.queue_ns),
        a_request(done.copy_in_ns - was.copy_in_ns),
        a_request(done.compute_ns - was.compute_ns),
        a_request(done.copy_out_ns - was.copy_out_ns),
        *now,
        [count - earlier for count, earlier in zip(look.batches, before.batches, strict=True)],
    ]
