"""A batch as the scheduler decided it: nothing about it changes afterwards."""

from collections.abc import Hashable
from enum import StrEnum
from typing import Final, NamedTuple

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


class Charge(NamedTuple):
    """What a batch costs its engine's share of the device."""

    kind: Hashable
    cost_ns: float
    """What was charged for it."""
    launched_ns: int
    computing_ns: int
    """The time that batches had computed when it was launched, summed over them."""
    own_ns: int
    """The same of its own scheduler's batches."""
    alone_ns: int | None = None
    """How long such a batch takes alone, if that was measured when its engine was opened."""


NO_CHARGE: Final = Charge(None, 0.0, 0, 0, 0)


class Flight:
    """What the scheduler knows of a batch from its launch until it has ended.

    :param number: the batch's.
    """

    # Defaults of the class, so that a batch stores only what differs.
    is_in_line = False
    """Whether it is in a line of batches that compute one after the other, and has not ended."""
    is_staged = False
    """Whether it is on its stream."""
    ready_ns = 0
    """When it can compute at the earliest, once that is known."""
    takes_ns: int | None = None
    """How long it then computes, typically; ``None`` if that is not known, 0 once it has computed."""
    ends_ns: int | None = None
    """When it is expected to be done."""
    stuck_ns = 0
    """When it counts as stuck."""
    was_due = False
    """Whether it was launched just in time, and is timed: its wait says how well that was foretold."""
    charge = NO_CHARGE
    """What it costs its engine's share of the device."""

    def __init__(self, number: int) -> None:
        self.number = number


NO_FLIGHT: Final = Flight(0)
"""That of batches that no scheduler launched."""


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
    flight: Flight = NO_FLIGHT

    def __repr__(self) -> str:
        return (
            f"<Batch {self.number} {self.reason} rows={self.rows} run={self.rows_run} "
            f"requests={len(self.requests)} context={self.context} arena={self.arena}>"
        )


def trial_batch(
    key: BatchKey,
    requests: tuple[Request, ...],
    *,
    rows: int,
    rows_run: int,
    profile: int | None,
    context: int,
) -> Batch:
    """Return a batch that no scheduler decided, to try or measure a model before it is served."""
    return Batch(
        number=0,
        key=key,
        requests=requests,
        rows=rows,
        rows_run=rows_run,
        profile=profile,
        context=context,
        arena=None,
        is_timed=False,
        reason=Reason.IDLE,
        launched_ns=0,
    )


class RejectedBatch(NamedTuple):
    """Requests that cannot be launched because their model raised when it was asked about them."""

    requests: tuple[Request, ...]
    error: Exception
