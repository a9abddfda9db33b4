"""Snapshots of an engine's counters and current load, returned by ``engine.statistics()``.

They are values: frozen, comparable, hashable; ``pickle``, ``copy`` and ``dataclasses.asdict`` work on them.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from asynctrt._util.frozen import FrozenDict


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The number of batches of one size, and the sums of their times in ns."""

    count: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int

    def joined(self, other: "BatchStatistics") -> "BatchStatistics":
        """Return the sum of two sets of statistics."""
        return BatchStatistics(
            self.count + other.count,
            self.copy_in_ns + other.copy_in_ns,
            self.compute_ns + other.compute_ns,
            self.copy_out_ns + other.copy_out_ns,
        )


@dataclass(frozen=True, slots=True)
class ShapeStatistics:
    """A shape of rows that recurs, and so has separate contexts: what they cost, and what they gain."""

    shape: str
    """The sizes of the dimensions that vary: ``height=640 width=640``."""
    batch_sizes: tuple[int, ...]
    """The batch sizes that are run, to which others are padded."""
    is_captured: bool
    """Whether they are CUDA graphs."""
    built_ns: int
    """How long it took to build them."""
    nbytes: int
    """The device memory that they took."""
    before_ns: Mapping[int, int]
    """How long batches of the smallest and the largest size took before, by their rows."""
    after_ns: Mapping[int, int]
    """How long batches of each size take now."""

    def __post_init__(self) -> None:
        for name in ("before_ns", "after_ns"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))

    def __str__(self) -> str:
        how = "CUDA graphs" if self.is_captured else "sessions"
        gains = ", ".join(
            f"{rows} rows {self.after_ns[rows] / 1e6:.2f} instead of {before_ns / 1e6:.2f} ms"
            for rows, before_ns in self.before_ns.items()
        )
        return (
            f"{self.shape}: {how} of {', '.join(map(str, self.batch_sizes))} rows ({gains}; built in "
            f"{self.built_ns / 1e9:.1f} s, {self.nbytes / 2**20:.0f} MiB)"
        )


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """One answered batch, with where and when it ran. Times are in ns; see :meth:`Engine.tracing`."""

    context: int
    arena: int | None
    rows: int
    rows_run: int
    """Rows that the device executed: more than ``rows`` if the batch was padded."""
    requests: int
    reason: str
    """The reason for launching it, such as ``full``, ``idle``, ``ahead``: see :attr:`Statistics.launched`."""
    is_timed: bool
    """Whether the device timed it; if not, its times are from other batches of its size."""
    launched_ns: int
    """When it was launched, on the clock of ``time.monotonic_ns``."""
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    answered_ns: int
    """When its callers were answered, on the same clock."""


@dataclass(frozen=True, slots=True)
class Batching:
    """Whether rows of different requests share batches, and why."""

    is_on: bool = True
    reason: str = "rows are trusted to be independent"
    probe_ns: int = 0
    """How long the probe took; 0 if nothing was run."""
    lengths: str = ""
    """Whether rows of different sizes share batches, and why; empty if nothing decides that."""

    def __str__(self) -> str:
        lengths = f"; {self.lengths}" if self.lengths else ""
        return f"{'on' if self.is_on else 'off, each request runs alone'}: {self.reason}{lengths}"


TRUSTED: Final = Batching()
"""The default: rows are trusted without a probe."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of an engine. Counts and sums start when it is opened."""

    state: str
    """``open``, ``draining``, ``closing``, ``closed``; or ``lost`` if it can run nothing any more."""
    submitted: int = 0
    """Requests accepted; a call that was split counts once for each part."""
    succeeded: int = 0
    failed: int = 0
    """Requests that ended with an error, including requests evicted from a full queue by more urgent ones."""
    cancelled: int = 0
    expired: int = 0
    """Requests whose timeout passed while they were queued."""
    refused: int = 0
    """Requests refused because the queue was full, they would have been too late, or the engine was closing.
    """
    refused_late: int = 0
    """The refused requests that would have been too late: ``DeadlineUnreachableError``."""
    rows: int = 0
    """Rows answered."""
    rows_padded: int = 0
    """Padding: rows computed only to fill batches up to a captured or fixed size."""
    batches: int = 0
    batches_timed: int = 0
    """Batches that the device timed: all of them, except that a GPU times one in 8 of those below 5 ms."""
    batches_bisected: int = 0
    """Batches that failed and whose requests were retried in halves (``idempotent``)."""
    launched: Mapping[str, int] = field(default_factory=dict)
    """Batches by the reason for launching them, including batches in flight: ``full`` (the batch could not
    grow), ``idle`` (the device had room), ``delay`` (``max_delay`` had passed), ``deadline`` (a deadline
    would have passed), ``turn`` (it was the bucket's turn when another bucket was full), ``ahead`` (the
    device was about to finish the batch before it), ``aged`` (it starts with the most overdue request,
    whatever its priority), ``again`` (a part of a failed batch)."""
    queue_ns: int = 0
    """Time in the queue, summed over the answered requests."""
    copy_in_ns: int = 0
    """Summed over the answered requests; each counts the time of its whole batch. So do the next two."""
    compute_ns: int = 0
    copy_out_ns: int = 0
    total_ns: int = 0
    """Time from arrival to answer, summed over the answered requests."""
    queued_requests: int = 0
    queued_rows: int = 0
    in_flight_batches: int = 0
    contexts: int = 0
    contexts_quarantined: int = 0
    """Contexts taken out of use because their work did not end."""
    worker_deaths: int = 0
    """Worker processes that died, with ``isolation="process"``."""
    arenas: int = 0
    arena_waits: int = 0
    """Timed batches that had been copied to the device before it was their turn in their arena or lane."""
    arena_wait_ns: int = 0
    """The sum of those waits."""
    arena_busy_share: float = 0.0
    """The share of the time since opening in which its arenas computed for this engine, 0 to 1."""
    arena_nbytes: int = 0
    """Bytes of enqueue memory, which other engines on the same arenas share."""
    arena_nbytes_private: int = 0
    """Bytes that a private workspace for each context would take instead."""
    lanes: Mapping[int, int] = field(default_factory=dict)
    """The number of batches that compute in parallel, by the largest batch size that does so, as the option
    ``lanes`` says or was measured when the engine opened. Empty on a device that does not copy while it
    computes."""
    graphs: tuple[int, ...] = ()
    """The batch sizes that are captured as CUDA graphs."""
    batch_sizes: tuple[int, ...] = ()
    """The batch sizes that are run, to which other batches are padded; empty if every size is run."""
    memory_nbytes: int = 0
    """Bytes of slabs, of their buffers on the device, and of arenas."""
    by_batch_rows: Mapping[int, BatchStatistics] = field(default_factory=dict)
    """Batches by their number of rows. This mapping, ``launched`` and ``lanes`` are kept as frozen copies."""
    row_ns_foreign: float = 0.0
    """The time of one more row in ns, by the answers that this front of a server has seen. It serves
    estimates when another front reports the batches; 0 for an engine in this process."""
    device_ns: int = 0
    """With a ``weight``: the device time of its batches. Batches that compute at once share the time."""
    held_ns: int = 0
    """With a ``weight``: the time for which its batches were held so that others on the device went first."""
    specialised: tuple[ShapeStatistics, ...] = ()
    """The shapes that have separate contexts, if the model's shapes vary (:class:`ShapeStatistics`)."""
    batching: Batching = TRUSTED
    """Whether rows of different requests share batches, and why."""
    lane_rates: tuple[tuple[int, int, float], ...] = ()
    """The measurements that ``lanes`` follows from, if any: the rows of a batch, how many such batches
    computed in parallel, and the rows per second that they did."""

    def __post_init__(self) -> None:
        for name in ("launched", "lanes", "by_batch_rows"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))

    def __repr__(self) -> str:
        counts = ("submitted", "succeeded", "failed", "cancelled", "expired", "refused", "queued_requests")
        shown = [f"{name}={count}" for name in counts if (count := getattr(self, name))]
        batches = f"batches={self.batches} of {self.mean_batch_rows:.1f} rows"
        return f"<Statistics {' '.join([self.state, *shown, batches])}>"

    def joined(self, other: "Statistics") -> "Statistics":
        """Return the sum of two snapshots of engines that share a model. Other values are from ``self``."""
        arenas = self.arenas + other.arenas
        busy = self.arena_busy_share * self.arenas + other.arena_busy_share * other.arenas
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.type in (int, "int")
        }
        launched = {
            reason: self.launched.get(reason, 0) + other.launched.get(reason, 0)
            for reason in {**self.launched, **other.launched}
        }
        sizes = dict(self.by_batch_rows)
        for rows, size in other.by_batch_rows.items():
            sizes[rows] = sizes[rows].joined(size) if rows in sizes else size
        return replace(
            self,
            **sums,
            specialised=tuple({one.shape: one for one in (*other.specialised, *self.specialised)}.values()),
            arena_busy_share=busy / arenas if arenas else 0.0,
            launched=launched,
            by_batch_rows=dict(sorted(sizes.items())),
        )

    def without_gauges(self) -> "Statistics":
        """Return only the counts and sums, for an engine that no longer exists."""
        return replace(
            self,
            queued_requests=0,
            queued_rows=0,
            in_flight_batches=0,
            contexts=0,
            contexts_quarantined=0,
            arenas=0,
            arena_busy_share=0.0,
            arena_nbytes=0,
            arena_nbytes_private=0,
            memory_nbytes=0,
            specialised=(),
        )

    @property
    def mean_batch_rows(self) -> float:
        """The mean number of rows per batch; 0 before the first batch."""
        return self.rows / self.batches if self.batches else 0.0

    @property
    def parallel_batches(self) -> int:
        """The number of batches that can compute at once: one per arena, or per context without arenas."""
        return self.arenas or self.contexts - self.contexts_quarantined

    def drain_s(self, waiting_rows: int = 0) -> float | None:
        """Estimate the seconds until all queued and in-flight requests are answered.

        The estimate assumes batches of the largest size that has run, each with that size's mean time. It is
        ``None`` if no batch has run yet, or no context is left to run one.

        :param waiting_rows: rows that wait elsewhere and are not in the engine's queue yet.
        """
        queued_rows = self.queued_rows + waiting_rows
        if not queued_rows and not self.in_flight_batches:
            return 0.0
        if not self.by_batch_rows or not self.parallel_batches:
            return queued_rows * self.row_ns_foreign / 1e9 or None
        rows, batches = max(self.by_batch_rows.items())
        count = -(-queued_rows // rows) + self.in_flight_batches
        return count * _batch_ns(batches) / self.parallel_batches / 1e9

    def busy_share_since(self, before: "Statistics", elapsed_ns: int) -> float:
        """Return the share of the engine's capacity that was used since an earlier snapshot, 0 to 1.

        1 means that it computed as many batches at once as it can, all the time.

        :param elapsed_ns: the time between the two snapshots, in ns.
        """
        busy_ns = [sum(size.compute_ns for size in one.by_batch_rows.values()) for one in (before, self)]
        return min(1.0, (busy_ns[1] - busy_ns[0]) / elapsed_ns / max(1, self.parallel_batches))


def batch_bounds(rows_max: int) -> list[int]:
    """Return the upper bounds of the batch size histogram: the powers of two below ``rows_max``, and it."""
    return [1 << bits for bits in range((rows_max - 1).bit_length())] + [rows_max]


def batch_counts(done: Statistics, bounds: list[int]) -> list[int]:
    """Count the batches up to each bound and above the previous one."""
    counts = [0] * len(bounds)
    for rows, batches in done.by_batch_rows.items():
        counts[bisect_left(bounds, rows)] += batches.count
    return counts


def _batch_ns(batches: BatchStatistics) -> float:
    return (batches.copy_in_ns + batches.compute_ns + batches.copy_out_ns) / batches.count


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker of an engine."""

    device: str
    state: str
    """``starting``, ``open``, ``restarting``, ``lost``, ``closed``."""
    pid: int | None
    """The process id; ``None`` before it has a process."""
    deaths: int
    """The number of workers on this device that died."""
    groups: int
    """The number of request groups that it holds now."""
    spare: str
    """The state of the worker that would replace it: ``starting`` or ``ready``. Empty without
    ``isolation="spare"``, and in a server's front, whose parent has it."""
