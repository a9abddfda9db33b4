"""A batch as the scheduler decided it: nothing about it changes afterwards."""

from collections.abc import Hashable, Sequence
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
    """The device had enough to do, but another bucket was full, and it was this one's turn."""
    AHEAD = "ahead"
    """The device was about to finish the batch before it, so this one was put there just in time."""
    AGED = "aged"
    """It starts with the request that is most overdue, whatever its priority."""
    AGAIN = "again"
    """It is part of a batch that failed, and is tried again."""


class Charge(NamedTuple):
    """What a batch costs its engine of its share of the device."""

    kind: Hashable
    cost_ns: float
    """The time that was charged for it."""
    launched_ns: int
    computing_ns: int
    """The total compute time of all batches on the device up to its launch."""
    own_ns: int
    """The part of ``computing_ns`` that its scheduler's batches computed."""
    alone_ns: int | None = None
    """How long such a batch takes alone, if that was measured when its engine opened."""


NO_CHARGE: Final = Charge(None, 0.0, 0, 0, 0)


class Flight:
    """What the scheduler knows about a batch from its launch until its end.

    :param number: the batch's number.
    """

    # Defaults of the class, so that a batch stores only what differs.
    is_in_line = False
    """Whether it is in a :class:`Line` and has not ended."""
    is_staged = False
    """Whether it is on its stream."""
    ready_ns = 0
    """The earliest time at which it can compute; 0 until that is known."""
    takes_ns: int | None = None
    """How long it typically computes from then on; ``None`` if unknown, 0 once it has computed."""
    ends_ns: int | None = None
    """When it is expected to end."""
    stuck_ns = 0
    """When it is considered stuck, unless it has ended."""
    was_due = False
    """Whether it was launched just in time, and is timed: its wait shows how good the forecast was."""
    charge = NO_CHARGE
    """What it costs its engine of its share of the device."""

    def __init__(self, number: int) -> None:
        self.number = number


NO_FLIGHT: Final = Flight(0)
"""The flight of batches that no scheduler launched."""


class Batch(NamedTuple):
    """A decision to run these requests as one batch, on this context and in this arena."""

    number: int
    """The number of the batch, counted from 1."""
    key: BatchKey
    requests: Sequence[Request]
    rows: int
    """The rows of its requests."""
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
    """Batches in one lane compute one after the other; ``None`` if the device orders batches itself."""
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
    """Return a batch that no scheduler decided on, to try or measure a model before it is served."""
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

    requests: Sequence[Request]
    error: Exception
