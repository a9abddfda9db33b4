"""One request, and the table that says how its state may change."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final

from asynctrt.errors import InternalError
from asynctrt.scheduling.key import BatchKey

NO_DEADLINE_NS: Final = 2**63 - 1
"""The deadline of requests without one. It is later than any time that a clock returns."""


class State(IntEnum):
    """Where a request is. An ``IntEnum`` because it indexes the rows of the transition table."""

    QUEUED = 0
    IN_FLIGHT = 1
    MASKED = 2  # Its caller left, or was answered, while it was in flight: its rows still run.
    DONE = 3
    FAILED = 4
    CANCELLED = 5
    EXPIRED = 6


class Change(IntEnum):
    """What can happen to a request."""

    LAUNCH = 0
    COMPLETE = 1
    FAIL = 2
    CANCEL = 3
    EXPIRE = 4


# Members as module constants: looking one up on its class costs as much as comparing with it.
QUEUED = State.QUEUED
IN_FLIGHT = State.IN_FLIGHT
MASKED = State.MASKED
DONE = State.DONE

TRANSITIONS: Final[dict[Change, tuple[State | None, ...]]] = {
    # The columns are the states before the change: QUEUED, IN_FLIGHT, MASKED, then the four final ones.
    Change.LAUNCH: (State.IN_FLIGHT, None, None, None, None, None, None),
    Change.COMPLETE: (None, State.DONE, State.CANCELLED, None, None, None, None),
    Change.FAIL: (State.FAILED, State.FAILED, State.CANCELLED, None, None, None, None),
    Change.CANCEL: (State.CANCELLED, State.MASKED, None, None, None, None, None),
    Change.EXPIRE: (State.EXPIRED, None, None, None, None, None, None),
}
"""The state after each change, by the state before it; ``None`` if the change is not allowed."""


class Request:
    """Rows that travel together, from submission to answer.

    The scheduler decides by ``rows``, ``key``, ``priority``, ``deadline_ns`` and ``arrival_ns``. ``payload``,
    ``future`` and ``outputs`` are for the runtime: the scheduler never looks at them.
    """

    __slots__ = (
        "arrival_ns",
        "deadline_ns",
        "future",
        "key",
        "outputs",
        "payload",
        "priority",
        "reserve_ns",
        "rows",
        "state",
    )

    def __init__(
        self,
        rows: int,
        key: BatchKey,
        priority: int,
        arrival_ns: int,
        deadline_ns: int = NO_DEADLINE_NS,
        payload: Any = None,
        future: Any = None,
    ) -> None:
        self.rows = rows
        self.key = key
        self.priority = priority
        self.arrival_ns = arrival_ns
        self.deadline_ns = deadline_ns
        self.payload = payload
        self.future = future
        self.state = QUEUED
        self.outputs: frozenset[str] | None = None
        """The names of the outputs that its caller wants; ``None`` for all. They may differ within a
        batch."""
        self.reserve_ns = 0
        """How much earlier ``deadline_ns`` is than its caller's deadline, to leave time to compute it."""

    def __repr__(self) -> str:
        return f"<Request {self.state.name} rows={self.rows} priority={self.priority}>"


def change(request: Request, what: Change) -> None:
    """Change the state of one request by the table. An illegal change raises and changes nothing."""
    after = TRANSITIONS[what][request.state]
    if after is None:
        raise InternalError(f"{what.name} is not allowed for {request!r}")
    request.state = after


def complete(requests: Sequence[Request]) -> tuple[int, int]:
    """Change the states of the requests of a batch that ended well.

    :returns: how many of its requests are answered, and the sum of their arrival times in ns.
    """
    answered, arrived_ns = len(requests), 0
    for request in requests:
        if request.state is IN_FLIGHT:
            request.state = DONE
            arrived_ns += request.arrival_ns
        else:
            change(request, Change.COMPLETE)
            answered -= 1
    return answered, arrived_ns


def awaited(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests in flight whose callers still wait, and end the masked ones."""
    left = []
    for request in requests:
        if request.state is IN_FLIGHT:
            left.append(request)
        else:
            change(request, Change.FAIL)
    return tuple(left)


def change_all(requests: Iterable[Request], what: Change) -> None:
    """Change the states of all requests of a batch by the table."""
    row = TRANSITIONS[what]
    for request in requests:
        after = row[request.state]
        if after is None:
            raise InternalError(f"{what.name} is not allowed for {request!r}")
        request.state = after
