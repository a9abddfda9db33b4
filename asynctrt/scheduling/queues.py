"""Where requests wait: one queue per bucket with a lane per priority, and one heap of deadlines.

A request that leaves its queue from the middle (cancelled, expired) is left in place as a tombstone,
known by its state, and skipped when it comes up. Both structures rebuild themselves before tombstones
outnumber what is alive, so they stay bounded by the queue bound and removal stays O(1) on average.
"""

from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from asynctrt.scheduling.request import NO_DEADLINE_NS, QUEUED, TRANSITIONS, Change, Request

TOMBSTONES_MIN: Final = 64
"""Below this many tombstones a rebuild is not worth its cost."""

LOOKAHEAD_MAX: Final = 16
"""Requests that may be passed over because they do not fit into the rest of a batch."""


class BucketQueue:
    """The requests of one bucket, most urgent lane first, in order of arrival within a lane."""

    __slots__ = ("_lanes", "_tombstones", "key", "requests", "rows", "rows_max")

    def __init__(self, key: Hashable, priorities: int, rows_max: int) -> None:
        self.key = key
        self.rows_max = rows_max
        """Rows that one batch of this bucket holds at the most."""
        self.rows = 0
        self.requests = 0
        self._lanes: tuple[deque[Request], ...] = tuple([deque() for _ in range(priorities)])
        self._tombstones = 0

    def __repr__(self) -> str:
        return f"<BucketQueue {self.key!r} requests={self.requests} rows={self.rows}>"

    def push(self, request: Request) -> None:
        """Append a queued request to the lane of its priority; a larger priority is more urgent."""
        self._lanes[-1 - request.priority].append(request)
        self.rows += request.rows
        self.requests += 1

    def discard(self, request: Request) -> None:
        """Forget a request whose state has just left QUEUED. Its place becomes a tombstone."""
        self.rows -= request.rows
        self.requests -= 1
        self._tombstones += 1
        if self._tombstones > self.requests + TOMBSTONES_MIN:
            for lane in self._lanes:
                alive = [request for request in lane if request.state is QUEUED]
                lane.clear()
                lane.extend(alive)
            self._tombstones = 0

    def reuse(self, key: Hashable, rows_max: int) -> None:
        """Serve another bucket; only for a queue that is empty."""
        self.key = key
        self.rows_max = rows_max
        if self._tombstones:
            for lane in self._lanes:
                lane.clear()
            self._tombstones = 0

    def waiting(self) -> list[Request]:
        """The requests that are queued, most urgent first."""
        return [request for lane in self._lanes for request in lane if request.state is QUEUED]

    def head(self) -> Request | None:
        """The request that the next batch of this bucket starts with."""
        for lane in self._lanes:
            while lane:
                if lane[0].state is QUEUED:
                    return lane[0]
                lane.popleft()
                self._tombstones -= 1
        return None

    def oldest_arrival_ns(self) -> int:
        """When the request that has waited longest came. Only for a queue that is not empty."""
        oldest_ns = NO_DEADLINE_NS
        for lane in self._lanes:
            while lane and lane[0].state is not QUEUED:
                lane.popleft()
                self._tombstones -= 1
            if lane:
                oldest_ns = min(oldest_ns, lane[0].arrival_ns)
        return oldest_ns

    def take(self, rows_max: int) -> list[Request]:
        """Launch what the next batch holds, never more than ``rows_max`` rows, and return it.

        A request that does not fit into what is left of the batch is passed over in favour of
        smaller ones behind it. It moves up with every batch, and the head always fits, so none starves.
        """
        launch_row = TRANSITIONS[Change.LAUNCH]
        taken: list[Request] = []
        room = rows_max
        for lane in self._lanes:
            passed_over: list[Request] = []
            while lane and room:
                request = lane.popleft()
                launched = launch_row[request.state]
                if launched is None:
                    self._tombstones -= 1
                elif request.rows <= room:
                    request.state = launched
                    taken.append(request)
                    room -= request.rows
                else:
                    passed_over.append(request)
                    if len(passed_over) == LOOKAHEAD_MAX:
                        break
            if passed_over:
                lane.extendleft(reversed(passed_over))
        self.rows -= rows_max - room
        self.requests -= len(taken)
        return taken


class DeadlineHeap:
    """The queued requests that have a deadline, the earliest on top."""

    __slots__ = ("_entries", "_order")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []
        # Two requests may share a deadline, and requests have no order of their own.
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request, *, queued_max: int) -> None:
        """Add a queued request. ``queued_max``: how many entries can be alive at the most."""
        if len(self._entries) > 2 * queued_max + TOMBSTONES_MIN:
            self._entries = [entry for entry in self._entries if entry[2].state is QUEUED]
            heapify(self._entries)
        heappush(self._entries, (request.deadline_ns, next(self._order), request))

    def earliest_ns(self) -> int | None:
        """The earliest deadline of a request that is still queued."""
        entries = self._entries
        while entries and entries[0][2].state is not QUEUED:
            heappop(entries)
        return entries[0][0] if entries else None

    def pop_due(self, now_ns: int) -> list[Request]:
        """Remove and return the queued requests whose deadline has come."""
        due: list[Request] = []
        while (deadline_ns := self.earliest_ns()) is not None and deadline_ns <= now_ns:
            due.append(heappop(self._entries)[2])
        return due
