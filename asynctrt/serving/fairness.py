"""Decide whose request goes next when more arrive than a model can handle. Pure: no asyncio, no clock.

An engine's queue is first come, first served, so a client that fills it makes everyone wait. A :class:`Gate`
in front of it keeps it so short that its requests go with the next batches. While there is room, requests
pass at once. Otherwise each waits behind others of its client, and clients take turns worth the same
number of rows (deficit round robin); the connections of one client take turns in the same way. A client with
only little in the engine need not wait at all.

A priority orders the requests of one client. It does not change whose turn it is, so calling everything
urgent gains nothing.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

NO_DEADLINE_NS: Final = 2**63 - 1

SHARED_NS: Final = 10_000_000_000
"""How long the engine's queue is kept short after one client's requests have held up another's."""

LIGHT_SHARE: Final = 4
"""Divides the rows of a batch: a client may always have that many in the engine, whatever others do, and one
turn is worth that many."""

RESERVE_SHARE: Final = 8
"""Divides the rows of a batch: that many stay free, for late arrivals, in a queue that is kept short."""

MUCH_BATCHES: Final = 4
"""A connection with this many batches of rows waiting is not read for now."""

DEAD_MIN: Final = 64
"""Entries of requests that have left are not worth removing below this number."""


class Ticket:
    """One request at the gate: its cost in rows, and its priority among its client's requests."""

    __slots__ = ("deadline_ns", "is_inside", "is_light", "is_waiting", "lane", "priority", "rows")

    def __init__(
        self,
        lane: "ConnectionShare",
        rows: int,
        *,
        priority: int = 0,
        deadline_ns: int = NO_DEADLINE_NS,
    ) -> None:
        self.lane = lane
        self.rows = rows
        self.priority = priority
        self.deadline_ns = deadline_ns
        self.is_waiting = False
        self.is_inside = False
        """Whether it is in the engine."""
        self.is_light = False
        """Whether it passed because its client had only little in the engine."""

    def __repr__(self) -> str:
        return f"<Ticket rows={self.rows}{' waiting' if self.is_waiting else ''}>"


class _Sharer(Protocol):
    """A participant that takes turns: a client, or one of its connections."""

    deficit: int
    is_in_turn: bool

    def head(self) -> Ticket | None: ...


S = TypeVar("S", bound=_Sharer)


class _Turns(Generic[S]):
    """The participants with requests waiting, in the order of their turns, each worth ``rows``."""

    __slots__ = ("_ring", "_rows")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ring: deque[S] = deque()

    def __iter__(self) -> Iterator[S]:
        return iter(self._ring)

    def add(self, one: S) -> None:
        """Add a participant, unless it already takes part."""
        if not one.is_in_turn:
            one.is_in_turn = True
            self._ring.append(one)

    def next(self) -> S | None:
        """Return the participant whose turn it is. It keeps its turn until its head is removed."""
        ring = self._ring
        while ring:
            one = ring[0]
            head = one.head()
            if head is None:
                one.is_in_turn = False
                one.deficit = 0
                ring.popleft()
            elif one.deficit >= head.rows or len(ring) == 1:
                return one
            else:
                one.deficit += self._rows
                ring.rotate(-1)
        return None


class _Queue:
    """The requests of one connection that have the same priority, first come, first served."""

    __slots__ = ("deficit", "is_in_turn", "tickets", "waiting")

    def __init__(self) -> None:
        self.deficit = 0
        self.is_in_turn = False
        self.tickets: deque[Ticket] = deque()
        """Includes requests that left from the middle, until they reach an end."""
        self.waiting = 0

    def push(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.waiting += 1

    def head(self) -> Ticket | None:
        """Return the oldest waiting request."""
        tickets = self.tickets
        while tickets:
            if tickets[0].is_waiting:
                return tickets[0]
            tickets.popleft()
        return None

    def latest(self) -> Ticket | None:
        """Return the newest waiting request."""
        tickets = self.tickets
        while tickets:
            if tickets[-1].is_waiting:
                return tickets[-1]
            tickets.pop()
        return None

    def left(self) -> None:
        """Record that a request no longer waits; drop the ones that left once they outnumber the others."""
        self.waiting -= 1
        if len(self.tickets) > 2 * self.waiting + DEAD_MIN:
            self.tickets = deque([ticket for ticket in self.tickets if ticket.is_waiting])


class ClientShare:
    """One client's share of a gate. Its connections keep it alive."""

    __slots__ = (
        "__weakref__",
        "_turn_rows",
        "_turns",
        "deficit",
        "is_in_turn",
        "light_rows",
        "rows",
        "waiting_rows",
    )

    def __init__(self, turn_rows: int) -> None:
        self._turn_rows = turn_rows
        # By priority, the highest first.
        self._turns: dict[int, _Turns[_Queue]] = {}
        self.deficit = 0
        self.is_in_turn = False
        self.rows = 0
        """Rows in the engine, queued or in flight."""
        self.light_rows = 0
        """Rows in the engine that passed as light."""
        self.waiting_rows = 0

    def __repr__(self) -> str:
        return f"<Client waiting_rows={self.waiting_rows}>"

    def __iter__(self) -> Iterator[Ticket]:
        """Yield the waiting requests, the most urgent first."""
        for turns in self._turns.values():
            for queue in turns:
                for ticket in queue.tickets:
                    if ticket.is_waiting:
                        yield ticket

    def add(self, queue: _Queue, priority: int) -> None:
        """Add a connection's queue to the turns."""
        turns = self._turns.get(priority)
        if turns is None:
            self._turns[priority] = turns = _Turns(self._turn_rows)
            self._turns = dict(sorted(self._turns.items(), reverse=True))
        turns.add(queue)

    def head(self) -> Ticket | None:
        """Return the client's next request: the most urgent, of the connection whose turn it is."""
        for turns in self._turns.values():
            queue = turns.next()
            if queue is not None:
                return queue.head()
        return None

    def latest(self) -> Ticket | None:
        """Return the request that would go last: of the least urgent, the newest in the longest queue."""
        for turns in reversed(self._turns.values()):
            queue = max(turns, key=_waiting, default=None)
            if queue is not None and (ticket := queue.latest()) is not None:
                return ticket
        return None


class ConnectionShare:
    """One connection's share of a gate."""

    __slots__ = ("_much_rows", "_queues", "client", "rows", "waiting", "waiting_rows")

    def __init__(self, client: ClientShare, much_rows: int) -> None:
        self.client = client
        self._much_rows = much_rows
        self.rows = 0
        """Rows in the engine, queued or in flight."""
        self.waiting = 0
        """Waiting requests."""
        self.waiting_rows = 0
        self._queues: dict[int, _Queue] = {}

    def __repr__(self) -> str:
        return f"<Lane rows={self.rows} waiting={self.waiting}>"

    @property
    def has_much_waiting(self) -> bool:
        """Whether more waits here than the turns need, so that the connection need not be read."""
        return self.waiting_rows >= self._much_rows

    def queue(self, priority: int) -> _Queue:
        """Return the queue of its requests with a priority."""
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = _Queue()
        return queue


class Gate:
    """The gate in front of one engine's queue.

    :param batch_rows: rows that one batch holds.
    :param busy_rows: rows in the engine that keep the device busy while others take their turns.
    :param full_rows: rows in the engine beyond which nothing is gained; at least ``busy_rows``.
    :param waiting_rows_max: rows that may wait here. Beyond these, requests of the client with the most
        waiting are refused. With 0 rows nothing ever waits: everything passes.
    """

    def __init__(
        self,
        *,
        batch_rows: int,
        busy_rows: int,
        full_rows: int,
        waiting_rows_max: int,
    ) -> None:
        reserve_rows = batch_rows // RESERVE_SHARE
        self.batch_rows = batch_rows
        self._full_rows = full_rows
        self._short_rows = busy_rows - reserve_rows
        self._step_rows = max(1, batch_rows - reserve_rows)
        self._light_rows = max(1, batch_rows // LIGHT_SHARE)
        self._much_rows = MUCH_BATCHES * batch_rows
        self._waiting_rows_max = waiting_rows_max
        # Rows in the engine beyond which requests wait.
        self._window_rows = full_rows
        self._shared_until_ns = 0
        # When a client, and a connection, last had more than the light rows in the engine.
        self._heavy_client_ns = self._heavy_lane_ns = -SHARED_NS
        self._clients: WeakValueDictionary[Hashable, ClientShare] = WeakValueDictionary()
        self._turns: _Turns[ClientShare] = _Turns(self._light_rows)
        self._deadlines: list[tuple[int, int, Ticket]] = []
        self._order = count()
        self.rows = 0
        """Rows in the engine, queued or in flight."""
        self.waiting = 0
        """Waiting requests."""
        self.waiting_rows = 0

    def __repr__(self) -> str:
        return f"<Gate rows={self.rows} waiting={self.waiting} waiting_rows={self.waiting_rows}>"

    @property
    def is_shared(self) -> bool:
        """Whether the engine's queue is kept short because one client's requests held up another's."""
        return self._window_rows != self._full_rows

    def lane(self, name: Hashable) -> ConnectionShare:
        """Return the lane of a new connection of the client called ``name``."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = ClientShare(self._light_rows)
        return ConnectionShare(client, self._much_rows)

    def enter(self, ticket: Ticket, now_ns: int) -> bool:
        """Return whether a request passes at once; if so, count it as in the engine."""
        lane, rows = ticket.lane, ticket.rows
        client = lane.client
        if client.rows + rows > self._light_rows:
            self._heavy_client_ns = now_ns
            if lane.rows + rows > self._light_rows:
                self._heavy_lane_ns = now_ns
        if (self.waiting or self.rows + rows > self._short_rows) and self._waiting_rows_max:
            self._look(ticket, now_ns)
            if self.waiting or self.rows + rows > self._window_rows:
                if not self._is_light(ticket):
                    return False
                ticket.is_light = True
                client.light_rows += rows
        ticket.is_inside = True
        lane.rows += rows
        client.rows += rows
        self.rows += rows
        return True

    def _look(self, ticket: Ticket, now_ns: int) -> None:
        """Keep the engine's queue short for a while if other clients' requests hold up this one."""
        lane, rows, most = ticket.lane, ticket.rows, self._light_rows
        since_ns = now_ns - SHARED_NS
        if (lane.rows + rows <= most and self._heavy_lane_ns > since_ns) or (
            lane.client.rows + rows <= most and self._heavy_client_ns > since_ns
        ):
            self._shared_until_ns = now_ns + SHARED_NS
            self._window_rows = self._short_rows

    def _is_light(self, ticket: Ticket) -> bool:
        """Return whether a request may pass waiting ones; only an urgent one passes its own connection's."""
        lane, most = ticket.lane, self._light_rows
        light_rows = lane.client.light_rows + ticket.rows
        if ticket.priority > 0:
            # An urgent request does not wait behind its client's waiting requests, or those in the engine.
            return light_rows <= 2 * most
        return light_rows <= most and not lane.waiting and lane.rows + ticket.rows <= most

    def make_room(self, ticket: Ticket) -> tuple[list[Ticket], bool]:
        """Remove waiting requests of the client with the most, so that a new one can wait.

        :returns: the requests to refuse, and whether there is room now: not if the new request's own client
            has the most.
        """
        crowded: list[Ticket] = []
        client = ticket.lane.client
        while self.waiting and self.waiting_rows + ticket.rows > self._waiting_rows_max:
            # The client with the most waiting, counting the new request, causes the excess.
            heaviest = max(self._turns, key=_waiting_rows)
            if client.waiting_rows + ticket.rows >= heaviest.waiting_rows:
                return crowded, False
            latest = heaviest.latest()
            assert latest is not None, "a client has the most waiting, and nothing waits"
            self.leave(latest)
            crowded.append(latest)
        return crowded, True

    def wait(self, ticket: Ticket) -> None:
        """Let a request wait for its client's turn."""
        lane, client = ticket.lane, ticket.lane.client
        ticket.is_waiting = True
        queue = lane.queue(ticket.priority)
        queue.push(ticket)
        lane.waiting += 1
        client.add(queue, ticket.priority)
        self._turns.add(client)
        self.waiting += 1
        self._count(lane, ticket.rows)
        if ticket.deadline_ns != NO_DEADLINE_NS:
            if len(self._deadlines) > 2 * self.waiting + DEAD_MIN:
                self._deadlines = [entry for entry in self._deadlines if entry[2].is_waiting]
                heapify(self._deadlines)
            heappush(self._deadlines, (ticket.deadline_ns, next(self._order), ticket))

    def leave(self, ticket: Ticket) -> bool:
        """Remove a waiting request that was cancelled or refused. Return false if it does not wait."""
        if not ticket.is_waiting:
            return False
        self._forget(ticket)
        return True

    def admit(self, now_ns: int) -> list[Ticket]:
        """Return the waiting requests that the engine has room for, and count them as in the engine."""
        if self.is_shared and now_ns >= self._shared_until_ns:
            self._window_rows = self._full_rows
        is_short = self.is_shared
        admitted: list[Ticket] = []
        step = 0
        while (client := self._turns.next()) is not None:
            ticket = client.head()
            assert ticket is not None, "a client has its turn with nothing to send"
            rows = ticket.rows
            if self.rows and self.rows + rows > self._window_rows:
                break
            step += rows
            if is_short and admitted and step > self._step_rows:
                break  # A full batch would launch now, without requests that arrive a little later.
            lane = ticket.lane
            client.deficit = max(0, client.deficit - rows)
            queue = lane.queue(ticket.priority)
            queue.deficit = max(0, queue.deficit - rows)
            self._forget(ticket)
            ticket.is_inside = True
            lane.rows += rows
            client.rows += rows
            self.rows += rows
            admitted.append(ticket)
        return admitted

    def end(self, ticket: Ticket) -> None:
        """Record that a request has left the engine. Idempotent."""
        if not ticket.is_inside:
            return
        ticket.is_inside = False
        lane, rows = ticket.lane, ticket.rows
        lane.rows -= rows
        lane.client.rows -= rows
        self.rows -= rows
        if ticket.is_light:
            lane.client.light_rows -= rows

    def earliest_ns(self) -> int | None:
        """Return the earliest deadline of a waiting request."""
        deadlines = self._deadlines
        while deadlines and not deadlines[0][2].is_waiting:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def due(self, now_ns: int) -> list[Ticket]:
        """Remove and return the waiting requests whose deadline has passed."""
        due: list[Ticket] = []
        while (deadline_ns := self.earliest_ns()) is not None and deadline_ns <= now_ns:
            ticket = heappop(self._deadlines)[2]
            self.leave(ticket)
            due.append(ticket)
        return due

    def clear(self) -> list[Ticket]:
        """Remove and return all waiting requests."""
        waiting = [ticket for client in self._turns for ticket in client]
        for ticket in waiting:
            self._forget(ticket)
        return waiting

    def _forget(self, ticket: Ticket) -> None:
        ticket.is_waiting = False
        ticket.lane.waiting -= 1
        ticket.lane.queue(ticket.priority).left()
        self.waiting -= 1
        self._count(ticket.lane, -ticket.rows)

    def _count(self, lane: ConnectionShare, rows: int) -> None:
        lane.waiting_rows += rows
        lane.client.waiting_rows += rows
        self.waiting_rows += rows


def _waiting(queue: _Queue) -> int:
    return queue.waiting


def _waiting_rows(client: ClientShare) -> int:
    return client.waiting_rows
