"""Counters of what an engine has done so far."""

from dataclasses import dataclass, field, replace
from typing import Final

from asynctrt.scheduling.batch import Batch, Measured, Reason

ARENA_WAIT_NS_MIN: Final = 10_000
"""A shorter time between the end of the copy in and the start of computing does not count as a wait for the
arena: even without a wait, the two events are some µs apart."""


@dataclass(slots=True)
class SizeCounters:
    """What the batches of one size have cost so far, in ns."""

    count: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0


@dataclass(slots=True)
class Counters:
    """Counts since the engine was opened. ``engine.statistics()`` is the public, frozen view."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    refused_late: int = 0
    rows_padded: int = 0
    batches_timed: int = 0
    busy_ns: int = 0
    arena_waits: int = 0
    arena_wait_ns: int = 0
    queue_ns: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    total_ns: int = 0
    by_rows: dict[int, SizeCounters] = field(default_factory=dict)
    launched: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Batches by the reason for their launch, including batches in flight."""
    bisected: int = 0
    """Batches that failed, and were tried again in halves."""

    @property
    def ended(self) -> int:
        """Return the requests that were answered, failed, or given up by their callers."""
        return self.succeeded + self.failed + self.cancelled + self.expired

    @property
    def batches(self) -> int:
        """Return the batches that ended well."""
        return sum(size.count for size in self.by_rows.values())

    @property
    def rows(self) -> int:
        """Return the rows of the batches that ended well, without padding."""
        return sum(rows * size.count for rows, size in self.by_rows.items())

    def copy(self) -> "Counters":
        """Return a copy. Any thread may call this while the loop's thread counts."""
        sizes = sorted(dict(self.by_rows).items())
        return replace(
            self, by_rows={rows: replace(size) for rows, size in sizes}, launched=dict(self.launched)
        )

    def add_batch(
        self,
        batch: Batch,
        now_ns: int,
        answered: int,
        arrived_ns: int,
        took: Measured,
    ) -> None:
        """Count a batch that ended well.

        :param answered: how many of its requests are answered; ``arrived_ns``: the sum of their arrival
            times.
        """
        rows, copy_in_ns, copy_out_ns = batch.rows, took.copy_in_ns, took.copy_out_ns
        compute_ns = took.compute_ns
        self.succeeded += answered
        if batch.rows_run != rows:
            self.rows_padded += batch.rows_run - rows
        if batch.is_timed:
            self.batches_timed += 1
        if batch.arena is not None or batch.lane is not None:
            if batch.arena is not None:
                self.busy_ns += compute_ns
            self.arena_wait_ns += took.arena_wait_ns
            self.arena_waits += took.arena_wait_ns > ARENA_WAIT_NS_MIN
        self.queue_ns += batch.launched_ns * answered - arrived_ns
        self.copy_in_ns += copy_in_ns * answered
        self.compute_ns += compute_ns * answered
        self.copy_out_ns += copy_out_ns * answered
        self.total_ns += now_ns * answered - arrived_ns
        size = self.by_rows.get(rows)
        if size is None:
            size = self.by_rows[rows] = SizeCounters()
        size.count += 1
        size.copy_in_ns += copy_in_ns
        size.compute_ns += compute_ns
        size.copy_out_ns += copy_out_ns
