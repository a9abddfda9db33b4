"""A batch as the scheduler decided it: nothing about it changes afterwards."""

from enum import StrEnum
from typing import NamedTuple

from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request


class Reason(StrEnum):
    """Why a batch was launched when it was."""

    FULL = "full"
    """It could not grow any more."""
    IDLE = "idle"
    """The device had room for it, and no delay was configured or nothing else was in flight."""
    DELAY = "delay"
    """Its oldest request had waited ``max_delay``."""
    DEADLINE = "deadline"
    """Waiting longer would have let the deadline of one of its requests pass."""
    TURN = "turn"
    """It was its turn among buckets of which another was full, on a device with enough to do."""
    AHEAD = "ahead"
    """The device was about to be done with the batch before it: staged and copied in, it is there in time."""
    AGED = "aged"
    """It starts with the request that is most overdue, whatever its priority."""
    AGAIN = "again"
    """It is a part of a batch that failed."""


class Batch(NamedTuple):
    """A decision: these requests, as one batch, on this context and in this arena."""

    number: int
    """Counts batches from 1."""
    key: BatchKey
    requests: tuple[Request, ...]
    rows: int
    """Rows of its requests."""
    rows_run: int
    """Rows that the device executes: ``rows``, or more where the batch is padded."""
    profile: int | None
    """The optimisation profile to run it with; ``None`` for a model without profiles."""
    context: int
    arena: int | None
    is_timed: bool
    """Whether the device takes its times."""
    reason: Reason
    launched_ns: int
    lane: int | None = None
    """Batches in one lane compute one after the other; ``None`` where the device sees to that."""

    def __repr__(self) -> str:
        return (
            f"<Batch {self.number} {self.reason} rows={self.rows} run={self.rows_run} "
            f"requests={len(self.requests)} context={self.context} arena={self.arena}>"
        )


class RejectedBatch(NamedTuple):
    """Requests that cannot be launched because their model raised when it was asked about them."""

    requests: tuple[Request, ...]
    error: Exception
