"""What an engine has done and is doing: frozen snapshots, made by ``engine.statistics()``."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The batches of one size: how many, and their times in ns, summed."""

    count: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """One batch that was answered: where it ran and when. Times are in ns; see :meth:`Engine.tracing`."""

    context: int
    arena: int | None
    rows: int
    requests: int
    launched_ns: int
    """On the clock of ``time.monotonic_ns``."""
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    answered_ns: int
    """When its callers were answered, on the same clock."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of an engine. Counts and sums are since it was opened."""

    state: str
    """``open``, ``draining``, ``closing`` or ``closed``; ``lost`` if nothing can run any more."""
    submitted: int
    """Requests taken; a call that was split counts once for each part."""
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    """Requests whose timeout passed while they were queued."""
    refused: int
    """Requests not taken: the queue was full, or the engine closed."""
    rows: int
    """Rows answered."""
    rows_padded: int
    """Rows computed for nobody, to fill batches up to a captured or fixed size."""
    batches: int
    batches_timed: int
    """Batches whose times the device took: all, but on a GPU one in 8 of those below 5 ms."""
    queue_ns: int
    """Time in the queue, summed over the answered requests."""
    copy_in_ns: int
    """Of the batch that each answered request was part of; so too the next two."""
    compute_ns: int
    copy_out_ns: int
    total_ns: int
    """From arrival to answer, summed over the answered requests."""
    queued_requests: int
    queued_rows: int
    in_flight_batches: int
    contexts: int
    contexts_quarantined: int
    """Contexts given up because their work did not end."""
    arenas: int
    arena_waits: int
    """Batches whose computing had to wait until their arena was free, of those that were timed."""
    arena_wait_ns: int
    """How long they waited, summed."""
    arena_busy_share: float
    """Which share of the time since it was opened its arenas computed for it, 0 to 1."""
    arena_nbytes: int
    """Bytes of enqueue memory held, by all engines that share it."""
    arena_nbytes_private: int
    """Bytes that as many private workspaces as there are contexts would hold."""
    graphs: tuple[int, ...]
    """The batch sizes that were captured as CUDA graphs."""
    memory_nbytes: int
    """Bytes of slabs, their twins on the device, and arenas."""
    by_batch_rows: Mapping[int, BatchStatistics]
    """Batches by their number of rows."""

    @property
    def mean_batch_rows(self) -> float:
        """Rows a batch, on average; 0 before the first."""
        return self.rows / self.batches if self.batches else 0.0
