"""A batch, from the decision to launch it until its end."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

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


class Measured(Protocol):
    """How long a batch took, in ns."""

    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    arena_wait_ns: int
    """How long it waited for its turn on the device once it was copied in."""


class Batch:
    """A decision to run these requests as one batch, on this context and in this arena, and what the
    scheduler knows of the batch until its end.

    What the constructor takes was decided, and never changes.

    :param rows: the rows of its requests; ``rows_run``: rows that the device executes, with padding.
    :param profile: the optimisation profile to run it with; ``None`` for a model without profiles.
    :param number: the number of the batch, counted from 1; 0 if no scheduler decided on it.
    :param is_timed: whether the device takes its times.
    :param lane: batches in one lane compute one after the other; ``None`` if the device orders batches
        itself.
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
    changes_size = False
    """Whether its context, which keeps its size, ran another one before."""

    def __init__(
        self,
        key: BatchKey,
        requests: Sequence[Request],
        rows: int,
        rows_run: int,
        profile: int | None,
        context: int,
        arena: int | None = None,
        lane: int | None = None,
        number: int = 0,
        reason: Reason = Reason.IDLE,
        launched_ns: int = 0,
        is_timed: bool = False,  # noqa: FBT001, FBT002  (keywords would cost each batch)
    ) -> None:
        self.key = key
        self.requests = requests
        self.rows = rows
        self.rows_run = rows_run
        self.profile = profile
        self.context = context
        self.arena = arena
        self.lane = lane
        self.number = number
        self.reason = reason
        self.launched_ns = launched_ns
        self.is_timed = is_timed

    def __repr__(self) -> str:
        return (
            f"<Batch {self.number} {self.reason} rows={self.rows} run={self.rows_run} "
            f"requests={len(self.requests)} context={self.context} arena={self.arena}>"
        )


class RejectedBatch(NamedTuple):
    """Requests that cannot be launched because their model raised when it was asked about them."""

    requests: Sequence[Request]
    error: Exception
