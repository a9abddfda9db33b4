"""One request, and the table that says how its state may change; and plain requests, which need no object.

A request is plain if it has one row, no deadline and no priority, and wants all outputs. Nothing is decided
about a single plain request, so each is only an entry in a list, and its future is its state: pending,
answered or cancelled. Objects are made of them only where something happens to one of them alone.
"""

from collections.abc import Iterator, Sequence
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
        "since_ns",
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
        self.since_ns = arrival_ns
        """When it joined its queue: a part of a call joins when the part before it has left."""
        self.deadline_ns = deadline_ns
        self.payload = payload
        self.future = future
        self.state = QUEUED
        self.outputs: frozenset[str] | None = None
        """The names of the outputs that its caller wants; ``None`` for all. They may differ within a
        batch."""
        self.reserve_ns = 0
        """How much earlier ``deadline_ns`` is than its caller's deadline, to leave time to compute it."""

    @property
    def has_left(self) -> bool:
        """Whether its caller has gone away, which the scheduler will hear later in this tick."""
        return False

    def __repr__(self) -> str:
        return f"<Request {self.state.name} rows={self.rows} priority={self.priority}>"


class PlainRequest(Request):
    """The object of a plain request. In flight, it is masked as soon as its future is done."""

    __slots__ = ()

    def __init__(self, key: BatchKey, state: State, future: Any, payload: Any, arrival_ns: int) -> None:
        super().__init__(1, key, 0, arrival_ns, NO_DEADLINE_NS, payload, future)
        self.state = state

    @property
    def state(self) -> State:
        """Return its state."""
        state: State = _STATE.__get__(self)
        return MASKED if state is IN_FLIGHT and self.has_left else state

    @state.setter
    def state(self, state: State) -> None:
        """Set its state."""
        _STATE.__set__(self, state)

    @property
    def has_left(self) -> bool:
        return self.future is not None and bool(self.future.done())


_STATE: Final[Any] = Request.__dict__["state"]

Entry = tuple[Any, Any, int]
"""A plain request: its future, its payload, and its arrival in ns."""


class PlainRequests(Sequence[Request]):
    """Plain requests that are launched together. Iterating over them makes their objects."""

    __slots__ = ("_made", "entries", "key", "state")

    def __init__(self, entries: list[Entry], key: BatchKey, state: State = QUEUED) -> None:
        self.entries = entries
        """Empty once objects were made, and once they were answered."""
        self.key = key
        self.state = state
        """The state of objects that are made now."""
        self._made: tuple[PlainRequest, ...] = ()

    def __len__(self) -> int:
        return len(self.entries) or len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._objects()[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._objects())

    def launch(self) -> None:
        """Note that all are in flight."""
        self.state = IN_FLIGHT
        for request in self._made:
            request.state = IN_FLIGHT

    def _objects(self) -> tuple[PlainRequest, ...]:
        if self.entries:
            self._made = made_of(self.entries, self.key, self.state)
            self.entries = []
        return self._made


def made_of(entries: list[Entry], key: BatchKey, state: State = QUEUED) -> tuple[PlainRequest, ...]:
    """Return objects for plain requests."""
    return tuple([PlainRequest(key, state, *entry) for entry in entries])


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
    if type(requests) is PlainRequests and (entries := requests.entries):
        arrivals = [arrival_ns for future, _, arrival_ns in entries if not future.done()]
        return len(arrivals), sum(arrivals)
    answered, arrived_ns = len(requests), 0
    for request in requests:
        if request.state is IN_FLIGHT:
            request.state = DONE
            arrived_ns += request.arrival_ns
        else:
            change(request, Change.COMPLETE)
            answered -= 1
    return answered, arrived_ns


def waiting_in(requests: Sequence[Request]) -> int:
    """Return how many requests in flight have callers who still wait. Any thread may ask."""
    if type(requests) is PlainRequests and (entries := requests.entries):
        return sum([not future.done() for future, _, _ in entries])
    return sum([request.state is IN_FLIGHT for request in requests])


def holds(requests: Sequence[Request], future: Any) -> bool:
    """Return whether the request with this future is among them."""
    if type(requests) is PlainRequests and (entries := requests.entries):
        return any(entry[0] is future for entry in entries)
    return any(request.future is future for request in requests)


def awaited(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests in flight whose callers still wait, and end the masked ones."""
    left = []
    for request in requests:
        if request.state is IN_FLIGHT:
            left.append(request)
        else:
            change(request, Change.FAIL)
    return tuple(left)
