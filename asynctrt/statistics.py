"""Snapshots of what an engine has done and is doing, made by ``engine.statistics()``.

They are values: frozen, comparable, hashable; ``pickle``, ``copy`` and ``dataclasses.asdict`` work on them.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from asynctrt._util.frozen import FrozenDict
from asynctrt.scheduling.sizes import Sizes


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The batches with one number of rows: how many there were, and the sums of their times in ns."""

    count: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int

    def joined(self, other: "BatchStatistics") -> "BatchStatistics":
        """Return the sums of two."""
        return BatchStatistics(
            self.count + other.count,
            self.copy_in_ns + other.copy_in_ns,
            self.compute_ns + other.compute_ns,
            self.copy_out_ns + other.copy_out_ns,
        )


@dataclass(frozen=True, slots=True)
class PaddingStatistics:
    """The sizes that the engine has chosen to pad a dimension to, with ``pad="auto"``."""

    dimension: str
    """Its name; several with ``=`` between them, if they are padded as one."""
    sizes: tuple[int, ...]
    """What it is padded to, rising; empty while that is the next power of two, as is whatever is longer."""
    reason: str
    """Why, in words."""
    changes: int
    """How often the sizes have changed."""

    @classmethod
    def of_all(cls, chosen: Mapping[tuple[str, ...], Sizes]) -> "tuple[PaddingStatistics, ...]":
        """Return what was chosen for each dimension."""
        return tuple(
            cls("=".join(dims), sizes.chosen, sizes.reason, sizes.changes) for dims, sizes in chosen.items()
        )

    def joined(self, other: "PaddingStatistics") -> "PaddingStatistics":
        """Return what two engines pad a dimension to: each of its own sizes, for reasons of its own."""
        return PaddingStatistics(
            self.dimension,
            tuple(sorted({*self.sizes, *other.sizes})),
            "; ".join(dict.fromkeys(one.reason for one in (self, other) if one.reason)),
            self.changes + other.changes,
        )

    def without_gauges(self) -> "PaddingStatistics":
        """Return its count alone, of an engine that is no more."""
        return PaddingStatistics(self.dimension, (), "", self.changes)


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """One answered batch: where and when it ran. Times are in ns; see :meth:`Engine.tracing`."""

    context: int
    arena: int | None
    rows: int
    rows_run: int
    """Rows that the device executed: more than ``rows`` where the batch was padded."""
    requests: int
    reason: str
    """The reason for launching it: ``full``, ``idle``, ``ahead`` …: see :attr:`Statistics.launched`."""
    is_timed: bool
    """Whether the device timed it; if not, the times are those of other batches of its size."""
    launched_ns: int
    """On the clock of ``time.monotonic_ns``."""
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
    """How long it took to find out; 0 if nothing was run."""

    def __str__(self) -> str:
        return f"{'on' if self.is_on else 'off, each request runs alone'}: {self.reason}"


TRUSTED: Final = Batching()
"""Nothing was tried."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of an engine. Counts and sums start when it is opened."""

    state: str
    """``open``, ``draining``, ``closing``, ``closed``; ``lost`` if nothing can
    run on it any longer."""
    submitted: int
    """Requests accepted; a call that was split counts once for each part."""
    succeeded: int
    failed: int
    """Requests that ended with an error, also those that left a full queue for more urgent ones."""
    cancelled: int
    expired: int
    """Requests whose timeout passed while they were queued."""
    refused: int
    """Requests not accepted, because the queue was full, they would have been too late, or the engine was
    closing."""
    refused_late: int
    """Of these, how many would have been too late: ``DeadlineUnreachableError``."""
    rows: int
    """Rows answered."""
    rows_padded: int
    """Padding: rows computed only to fill batches up to a captured or fixed size."""
    batches: int
    batches_timed: int
    """Batches that the device timed: all of them, except that a GPU times one in 8 of those below 5 ms."""
    batches_bisected: int
    """Batches that failed and whose requests were tried again in halves (``isolate_failures``)."""
    launched: Mapping[str, int]
    """Batches by the reason for launching them, those in flight included: ``full`` (the batch could not
    grow), ``idle`` (the device had room), ``delay`` (``max_delay`` had passed), ``deadline`` (one would have
    passed), ``turn`` (it was the bucket's turn when another bucket was full), ``ahead`` (the device was about
    to be done with the one before it), ``aged`` (it starts with what was most overdue, whatever its
    priority), ``again`` (a part of one that failed)."""
    queue_ns: int
    """Time in the queue, summed over the answered requests."""
    copy_in_ns: int
    """Summed over the answered requests, each with the time of its whole batch; likewise the next two."""
    compute_ns: int
    copy_out_ns: int
    total_ns: int
    """From arrival to answer, summed over the answered requests."""
    queued_requests: int
    queued_rows: int
    in_flight_batches: int
    contexts: int
    contexts_quarantined: int
    """Contexts taken out of use because their work did not end."""
    worker_deaths: int
    """Worker processes that died, with ``isolation="process"``."""
    arenas: int
    arena_waits: int
    """Timed batches that were on the device, copied in, before it was their turn: in their arena, or their
    lane."""
    arena_wait_ns: int
    """The sum of those waits."""
    arena_busy_share: float
    """The share of the time since it was opened in which its arenas computed for it, 0 to 1."""
    arena_nbytes: int
    """Bytes of enqueue memory, shared with the other engines on it."""
    arena_nbytes_private: int
    """Bytes that a private workspace for each context would take instead."""
    lanes: Mapping[int, int]
    """How many batches compute side by side, where that turned out to be faster than one after the other, by
    the most rows of the batches that do. Empty on a device that does not copy while it computes."""
    graphs: tuple[int, ...]
    """The batch sizes that are captured as CUDA graphs."""
    batch_sizes: tuple[int, ...]
    """The batch sizes that are run, to which others are padded; empty if all are."""
    memory_nbytes: int
    """Bytes of slabs, of their buffers on the device, and of arenas."""
    module_loading: str | None
    """When CUDA loads kernels: ``lazy``, or ``eager`` (``CUDA_MODULE_LOADING``), which takes more memory;
    ``None`` on a device that is not a GPU."""
    by_batch_rows: Mapping[int, BatchStatistics]
    """Batches by their number of rows. Of this mapping, of ``launched`` and of ``lanes``, a frozen copy is
    kept."""
    row_ns_foreign: float
    """What one more row takes, by the answers that this front of a server has seen: for estimates where it is
    another front that tells of batches. 0 in an engine in process."""
    device_ns: int = 0
    """With a ``weight``: the time of the device that its batches took; of what computed at once, each has its
    part."""
    held_ns: int = 0
    """With a ``weight``: the time in which a batch of it was held, for others on the device to go first."""
    padding: tuple[PaddingStatistics, ...] = ()
    """What each dimension is padded to whose sizes the engine chooses."""
    batching: Batching = TRUSTED
    """Whether rows of different requests share batches, and why."""

    def __post_init__(self) -> None:
        for name in ("launched", "lanes", "by_batch_rows"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))

    def __repr__(self) -> str:
        counts = ("submitted", "succeeded", "failed", "cancelled", "expired", "refused", "queued_requests")
        shown = [f"{name}={count}" for name in counts if (count := getattr(self, name))]
        batches = f"batches={self.batches} of {self.mean_batch_rows:.1f} rows"
        return f"<Statistics {' '.join([self.state, *shown, batches])}>"

    def joined(self, other: "Statistics") -> "Statistics":
        """Return the sum of two snapshots, of engines that share a model. What has no sum is this one's."""
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
        padding = {one.dimension: one for one in self.padding}
        for one in other.padding:
            own = padding.get(one.dimension)
            padding[one.dimension] = one if own is None else own.joined(one)
        return replace(
            self,
            **sums,
            padding=tuple(padding.values()),
            arena_busy_share=busy / arenas if arenas else 0.0,
            launched=launched,
            by_batch_rows=dict(sorted(sizes.items())),
        )

    def without_gauges(self) -> "Statistics":
        """Return the counts and sums alone, of an engine that is no more."""
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
            padding=tuple(one.without_gauges() for one in self.padding),
        )

    @property
    def mean_batch_rows(self) -> float:
        """The mean number of rows per batch; 0 before the first batch."""
        return self.rows / self.batches if self.batches else 0.0

    @property
    def parallel_batches(self) -> int:
        """How many batches can compute at once: one an arena, or a context where there are no arenas."""
        return self.arenas or self.contexts - self.contexts_quarantined

    @property
    def row_s(self) -> float | None:
        """How much longer one more row makes the queue, in seconds: the time of a row in batches of the
        largest size that has run. ``None`` if no batch has run yet, or nothing is left to run one on."""
        if not self.by_batch_rows or not self.parallel_batches:
            return self.row_ns_foreign / 1e9 or None
        rows, batches = max(self.by_batch_rows.items())
        return _batch_ns(batches) / rows / self.parallel_batches / 1e9

    def drain_s(self, waiting_rows: int = 0) -> float | None:
        """Estimate how long it takes to answer what is queued and in flight, in seconds.

        It assumes batches of the largest size that has run, each with that size's mean time. ``None`` if no
        batch has run yet, or nothing is left to run one on.

        :param waiting_rows: rows that are not in the engine's queue yet, and wait elsewhere for their turn.
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
        """Return how much of the time since an earlier snapshot it computed, 0 to 1.

        1 means as many batches as it can compute at once.

        :param elapsed_ns: the time between the two, in ns.
        """
        busy_ns = [sum(size.compute_ns for size in one.by_batch_rows.values()) for one in (before, self)]
        return min(1.0, (busy_ns[1] - busy_ns[0]) / elapsed_ns / max(1, self.parallel_batches))


def batch_bounds(rows_max: int) -> list[int]:
    """Return the upper bounds of the batch size histogram: powers of two below ``rows_max``, then it."""
    return [1 << bits for bits in range((rows_max - 1).bit_length())] + [rows_max]


def batch_counts(done: Statistics, bounds: list[int]) -> list[int]:
    """Count the batches within each bound and above the previous one."""
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
    """Of its process; ``None`` before it has one."""
    deaths: int
    """Workers on this device that died."""
    groups: int
    """Groups of requests that it has now."""
    spare: str
    """The worker that would take its place: ``starting``, ``ready``, ``failed`` if no further one is started
    since so many died; empty without ``warm_spare``, and in a front of a server, whose parent has it."""
