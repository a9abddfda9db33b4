"""Where requests wait: a queue for each bucket, the buckets in the order of their turns, and their deadlines.

A request that leaves from the middle of its queue (cancelled, expired, or launched before a larger one ahead
of it) stays there as a tombstone, recognised by its state, and is skipped later. Queues and the heap are
rebuilt before tombstones far outnumber live entries. So their size stays bounded and removal stays O(1) on
average. The time to find the bucket to launch from does not depend on the number of buckets.

If a call was split, only one of its parts at a time is in the queue. When that part leaves, the next one
joins at the end, so that other requests have their turns between the parts.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.key import FIXED_SHAPE, KEYS_KEPT_MAX, BatchKey
from asynctrt.scheduling.policy import PATIENCE_NS, Policy
from asynctrt.scheduling.request import (
    IN_FLIGHT,
    NO_DEADLINE_NS,
    QUEUED,
    Entry,
    PlainRequest,
    PlainRequests,
    Request,
    made_of,
)

TOMBSTONES_MIN: Final = 64
"""Below this many tombstones, rebuilding costs more than skipping them does."""

SEARCHED_MAX: Final = 64
"""How many requests or buckets are looked at for one decision, beginning with the next in turn, to bound the
work for each batch and for each request to a full queue. All others move up with every batch, so their time
comes soon. The number was not tuned."""

TURNS_KEPT: Final = 8
"""How many full batches a bucket may launch in a row for each other bucket that recently had a turn without
filling a batch. Strict turns were tried first: 15 rare shapes beside a common one then cost a third of the
answers at 90% load (``docs/batching.md``)."""


class BucketQueue:
    """The requests of one bucket: by priority, the most urgent first, then by when they are due.

    A request is due at its deadline, or after waiting for ``patience_ns`` if that is earlier. So no request
    waits for later ones for longer than that, and without deadlines the order is that of arrival. The parts
    of a split call count as arriving one after the other.

    As long as all of its requests are plain, they are in ``entries`` and have no objects.

    :param made: where to note the objects that are made of plain requests, by their futures.
    """

    # Its place in `Buckets`, to whom these belong.
    priority = -1
    is_full = False
    is_ready = False
    turn = -NO_DEADLINE_NS
    turns_kept = 0

    rows = 0
    deadline_ns = NO_DEADLINE_NS
    """If the bucket is filling, no queued request has an earlier deadline."""
    _tombstones = 0

    def __init__(
        self,
        key: BatchKey,
        priorities: int,
        rows_max: int,
        patience_ns: int = PATIENCE_NS,
        made: dict[Any, PlainRequest] | None = None,
    ) -> None:
        self.key = key
        self.rows_max = rows_max
        """Rows that one batch of this bucket holds."""
        self.entries: list[Entry] = []
        """Its plain requests; empty if any request has an object."""
        self._made = {} if made is None else made
        self._by_priority: tuple[deque[Request], ...] = tuple([deque() for _ in range(priorities)])
        self._patience_ns = patience_ns
        # Rows by priority. Rows of priority 0 are not counted, as they go behind all others.
        self._urgent_rows: dict[int, int] = {}
        # The parts of split calls that are not in the queue yet, by the part before them, which is.
        self._following: dict[Request, deque[Request]] = {}
        # The rows of these parts by priority, including parts that have left.
        self._rows_following = [0] * priorities

    def __repr__(self) -> str:
        return f"<BucketQueue {self.key!r} requests={self.requests} rows={self.rows}>"

    @property
    def requests(self) -> int:
        """Return how many requests are queued. Other threads may ask, and may miss concurrent changes."""
        parts = sum(map(len, tuple(self._following.values())))
        return max(sum(map(len, self._by_priority)) + parts - self._tombstones, len(self.entries))

    def head_rows(self, *, by_age: bool = False) -> int:
        """Return the rows of the request that the next batch of this bucket starts with; 0 if it is empty.

        :param by_age: as for :meth:`head`.
        """
        if self.entries:
            return 1
        head = self.head(by_age=by_age)
        return 0 if head is None else head.rows

    @property
    def head_priority(self) -> int:
        """Return the priority of that request; -1 if the bucket is empty."""
        if self.entries:
            return 0
        head = self.head()
        return -1 if head is None else head.priority

    def extend(self, entries: list[Entry]) -> None:
        """Append plain requests."""
        if not self.rows:
            self.entries = entries
        elif self.entries:
            self.entries += entries
        else:
            self._append_made(entries)
        self.rows += len(entries)

    def make_objects(self) -> None:
        """Make the objects of its plain requests, as something is about to happen to one of them alone."""
        if entries := self.entries:
            self._append_made(entries)
            self.entries = []

    def _append_made(self, entries: list[Entry]) -> None:
        made = made_of(entries, self.key)
        self._by_priority[-1].extend(made)
        self._made.update([(request.future, request) for request in made])

    def push(self, request: Request, *others: Request) -> bool:
        """Append a queued request; a larger priority is more urgent.

        :param others: the other parts of its call. Their rows count at once, but they join the queue one by
            one.
        :returns: whether this may change the bucket's turn.
        """
        self.make_objects()
        if others:
            rows = sum(part.rows for part in others)
            self._following[request] = deque(others)
            self._rows_following[request.priority] += rows
            self._add_rows(request.priority, rows)
        self._enter(request)
        self._add_rows(request.priority, request.rows)
        return (
            request.priority > self.priority
            or request.deadline_ns < self.deadline_ns
            or (self.rows >= self.rows_max and not self.is_full)
        )

    def _enter(self, request: Request) -> None:
        """Put a request into the queue of its priority, in the order of when requests are due."""
        queue = self._by_priority[-1 - request.priority]
        if queue:
            if request.since_ns < queue[-1].since_ns:
                request.since_ns = queue[-1].since_ns  # A part that waited for the ones before it.
            if self._goes_before(request, queue[-1]):
                queue.insert(self._place_in(queue, request), request)
                return
        queue.append(request)

    def _add_rows(self, priority: int, rows: int) -> None:
        self.rows += rows
        if priority:
            self._urgent_rows[priority] = self._urgent_rows.get(priority, 0) + rows

    def discard(self, request: Request) -> None:
        """Forget a request whose state has just left QUEUED. Its place becomes a tombstone."""
        self._made.pop(request.future, None)
        self.rows -= request.rows
        self._tombstones += 1
        if request.priority:
            self._urgent_rows[request.priority] -= request.rows
        self._let_next_in((request,))
        self._bury()

    def rows_ahead(self, request: Request) -> int:
        """Return a lower bound of the rows that would go before a request that is not queued yet."""
        priority = request.priority
        if not self.rows:
            return 0
        self.make_objects()
        queue = self._by_priority[-1 - priority]
        above = sum(rows for level, rows in self._urgent_rows.items() if level > priority)
        if queue and self._goes_before(request, queue[-1]):
            # Each request has at least one row, but some may be tombstones.
            return above + max(self._place_in(queue, request) - self._tombstones, 0)
        ahead = above + self._urgent_rows.get(priority, 0) if priority else self.rows
        # Parts that are not in the queue yet will join it behind the request.
        return max(ahead - self._rows_following[priority], above)

    def overdue_ns(self) -> int:
        """Return when the first of its requests is due, of any priority. The queue must not be empty."""
        if self.entries:
            return self.entries[0][2] + self._patience_ns
        return min(self._due_ns(queue[0]) for queue in self._heads())

    def earliest_deadline_ns(self) -> int:
        """Return the earliest deadline in it. This goes through all requests, as does
        :meth:`oldest_arrival_ns`."""
        if self.entries:
            return NO_DEADLINE_NS
        return min(request.deadline_ns for request in self.waiting())

    def waiting(self) -> Iterator[Request]:
        """Yield the queued requests, most urgent first."""
        self.make_objects()
        for priority in reversed(range(len(self._by_priority))):
            for requests in (self._by_priority[-1 - priority], *self._parts(priority)):
                for request in requests:
                    if request.state is QUEUED:
                        yield request

    def head(self, *, by_age: bool = False) -> Request | None:
        """Return the request that the next batch of this bucket starts with.

        :param by_age: return the request that is due first, whatever its priority.
        """
        self.make_objects()
        if by_age:
            return self._heads()[0][0]
        for queue in self._by_priority:
            while queue:
                if queue[0].state is QUEUED:
                    return queue[0]
                queue.popleft()
                self._tombstones -= 1
        return None

    def oldest_arrival_ns(self) -> int:
        """Return when the request that has waited longest arrived. The queue must not be empty.

        This goes through all requests, so it is for buckets that do not fill a batch.
        """
        if self.entries:
            return self.entries[0][2]
        return min(request.arrival_ns for request in self.waiting())

    def newest(self, priority: int) -> Iterator[Request]:
        """Return the queued requests of one priority, starting with the one that would go last."""
        self.make_objects()
        queue = self._by_priority[-1 - priority]
        while queue and queue[-1].state is not QUEUED:
            queue.pop()
            self._tombstones -= 1
        standing = (queue, *self._parts(priority))
        return (
            request
            for requests in reversed(standing)
            for request in reversed(requests)
            if request.state is QUEUED
        )

    def choose(
        self,
        rows_max: int,
        by_age: bool = False,  # noqa: FBT001, FBT002  (a keyword would cost each batch)
    ) -> tuple[Sequence[Request], int]:
        """Return the requests of the next batch, at most ``rows_max`` rows, and their rows. Change nothing.

        A request that does not fit into the rest of the batch is passed over in favour of smaller ones behind
        it. Since it moves up with every batch, and the head always fits, no request starves.

        :param by_age: begin with the priority whose first request is due first.
        """
        if self.entries:
            entries = self.entries if len(self.entries) <= rows_max else self.entries[:rows_max]
            return PlainRequests(entries, self.key), len(entries)
        if not self._tombstones and not self._following and self.rows <= rows_max:
            return tuple(chain.from_iterable(self._by_priority)), self.rows
        return self._choose_fitting(self._heads() if by_age else self._by_priority, rows_max)

    @staticmethod
    def _choose_fitting(queues: Iterable[deque[Request]], rows_max: int) -> tuple[tuple[Request, ...], int]:
        """Return the first requests of these queues that fit, and their rows."""
        chosen: list[Request] = []
        room = rows_max
        for queue in queues:
            passed_over = 0
            for request in queue:
                if request.state is not QUEUED:
                    continue
                if request.rows <= room:
                    chosen.append(request)
                    room -= request.rows
                    if not room:
                        return tuple(chosen), rows_max
                else:
                    passed_over += 1
                    if passed_over == SEARCHED_MAX:
                        break
        return tuple(chosen), rows_max - room

    def take(self, chosen: Sequence[Request], rows: int) -> None:
        """Remove the requests that :meth:`choose` returned, as they are launched."""
        if type(chosen) is PlainRequests:
            chosen.launch()
            self.entries = _behind(self.entries, rows)
            self.rows -= rows
            return
        for request in chosen:
            request.state = IN_FLIGHT
            if request.priority:
                self._urgent_rows[request.priority] -= request.rows
        if self._made:
            for request in chosen:
                self._made.pop(request.future, None)
        if rows == self.rows:
            self._clear()
            return
        self.rows -= rows
        self._tombstones += len(chosen)
        self._let_next_in(chosen)
        self.head()
        self._bury()

    def _clear(self) -> None:
        for queue in self._by_priority:
            queue.clear()
        self.rows = self._tombstones = 0
        self.deadline_ns = NO_DEADLINE_NS
        self._urgent_rows.clear()
        if self._following:  # Only parts that have left.
            self._following.clear()
            self._rows_following = [0] * len(self._by_priority)

    def _let_next_in(self, left: Iterable[Request]) -> None:
        """Let the next parts of calls into the queue when others have left."""
        for part in left if self._following else ():
            parts = self._following.pop(part, None)
            while parts:
                following = parts.popleft()
                self._rows_following[following.priority] -= following.rows
                if following.state is QUEUED:
                    self._following[following] = parts
                    self._enter(following)
                    break
                self._tombstones -= 1

    def _parts(self, priority: int) -> list[deque[Request]]:
        """Return the parts of calls of one priority that are not in the queue yet."""
        return [parts for part, parts in self._following.items() if part.priority == priority]

    def _due_ns(self, request: Request) -> int:
        return min(request.deadline_ns, request.since_ns + self._patience_ns)

    def _goes_before(self, request: Request, other: Request) -> bool:
        # The first check is cheap and usually enough: a later request with a later deadline is due later.
        return request.deadline_ns < other.deadline_ns and self._due_ns(request) < self._due_ns(other)

    def _place_in(self, queue: deque[Request], request: Request) -> int:
        """Return the place of a request in the order of when requests are due, the last one among equals."""
        return bisect_right(queue, self._due_ns(request), key=self._due_ns)

    def _heads(self) -> list[deque[Request]]:
        """Return the queues with requests, sorted by when their first request is due."""
        found = []
        for queue in self._by_priority:
            while queue and queue[0].state is not QUEUED:
                queue.popleft()
                self._tombstones -= 1
            if queue:
                found.append(queue)
        found.sort(key=lambda queue: self._due_ns(queue[0]))
        return found

    def _bury(self) -> None:
        """Rebuild the queues if tombstones outnumber queued requests."""
        if self._tombstones > TOMBSTONES_MIN and self._tombstones > self.requests + TOMBSTONES_MIN:
            for queue in self._by_priority:
                alive = [request for request in queue if request.state is QUEUED]
                queue.clear()
                queue.extend(alive)
            self._rows_following = [0] * len(self._by_priority)
            for part, parts in self._following.items():
                self._following[part] = deque(other for other in parts if other.state is QUEUED)
                self._rows_following[part.priority] += sum(other.rows for other in self._following[part])
            self._tombstones = 0


class OpenBatch:
    """Plain requests of one bucket, in the order of their arrival. They are launched from here if nothing
    else waits, and moved into their bucket otherwise.

    A plain request whose key is ``joins`` is appended to ``entries`` directly, as long as that is not
    ``length_max`` long. Once the scheduler has decided about them, the next request takes the longer way, by
    :meth:`Queue.submit_plain`, to note when it came. To policies, it answers as its bucket would.
    """

    __slots__ = ("arrival_ns", "bucket", "entries", "joins", "key", "length_max", "may_launch", "rows_max")

    def __init__(self, policy: Policy) -> None:
        self.may_launch = not (policy.delay_ns_max or policy.change_ns)
        """Whether batches are launched from here at all."""
        self.bucket: BucketQueue | None = None
        self.key = FIXED_SHAPE
        """The key of its bucket; ``rows_max``: the rows that one batch of it holds."""
        self.rows_max = 0
        self.joins: BatchKey | None = None
        """The key by whose identity requests join: equal to the bucket's; ``None`` if none may."""
        self.entries: list[Entry] = []
        self.length_max = 0
        self.arrival_ns = 0

    def join(self, key: BatchKey, future: Any, payload: Any) -> bool:
        """Add a plain request, if it may join; return whether it did."""
        if key is not self.joins or len(self.entries) >= self.length_max:
            return False
        self.entries.append((future, payload, self.arrival_ns))
        return True

    @property
    def rows(self) -> int:
        """Return the rows that wait here."""
        return len(self.entries)

    @property
    def is_full(self) -> bool:
        """Return whether they fill a batch."""
        return len(self.entries) >= self.rows_max

    def head_rows(self, *, by_age: bool = False) -> int:
        """Return 1: the rows of each."""
        return 1

    def first(self, rows: int) -> PlainRequests:
        """Return the first requests, to be launched together; change nothing."""
        entries = self.entries
        return PlainRequests(entries if rows == len(entries) else entries[:rows], self.key, IN_FLIGHT)

    def leave(self, rows: int) -> None:
        """Drop the first requests, which are in flight now."""
        self.entries = _behind(self.entries, rows)


def _behind(entries: list[Entry], rows: int) -> list[Entry]:
    """Return the plain requests behind the first ones, which are launched."""
    if rows == len(entries):
        return []  # The batch keeps the list.
    del entries[:rows]  # Copying the others would take much longer.
    return entries


Bucket = BucketQueue | OpenBatch

JoinedRows = tuple[BucketQueue, Sequence[Request], int]
"""Requests of another bucket that join a batch, and their rows."""


class _Level:
    """The buckets whose most urgent request has one priority, by kind and in the order of turns."""

    __slots__ = ("filling", "ready")

    def __init__(self) -> None:
        self.ready: OrderedDict[BucketQueue, None] = OrderedDict()
        self.filling: OrderedDict[BucketQueue, int] = OrderedDict()
        """Each with the time in ns at which it becomes ready if nothing else happens."""


class Buckets:
    """All buckets, and which of them is next.

    A bucket with work is *ready* once waiting longer cannot improve its batch: it is full, no delay is
    configured, or its delay is over. Until then it is *filling*. Both kinds are kept in the order of their
    turns, by the priority of their most urgent request.
    """

    def __init__(self, policy: Policy, priorities: int) -> None:
        self._policy = policy
        self._has_delay = policy.delay_ns_max > 0
        self.by_key: dict[BatchKey, BucketQueue] = {}
        """The buckets with work, and some empty ones, kept for the next request of their key."""
        self._levels = tuple([_Level() for _ in range(priorities)])
        self.priority_max = 0
        """An upper bound of the priorities of queued requests."""
        self.waiting = 0
        """The number of buckets with work."""
        self.full = 0
        """The number of buckets that fill a batch."""
        # The number of batches that were launched while other buckets had work.
        self._turn = 0

    def __len__(self) -> int:
        return self.waiting

    def __iter__(self) -> Iterator[BucketQueue]:
        """Yield the buckets with work, from a copy: other threads may call this too."""
        return (bucket for bucket in tuple(self.by_key.values()) if bucket.rows)

    def add(self, bucket: BucketQueue) -> None:
        """Add a new bucket. If there are many empty ones, drop them."""
        if len(self.by_key) - self.waiting >= KEYS_KEPT_MAX:
            self.by_key = {key: kept for key, kept in self.by_key.items() if kept.rows}
        self.by_key[bucket.key] = bucket

    def pushed(self, bucket: BucketQueue, priority: int, deadline_ns: int) -> None:
        """Note that a request has joined a bucket. Call it if :meth:`BucketQueue.push` returned True."""
        self._place(bucket, max(priority, bucket.priority))
        if not bucket.is_ready and deadline_ns < bucket.deadline_ns:
            self._await_delay(bucket)

    def left(self, bucket: BucketQueue) -> None:
        """Note that requests have left a bucket without a batch."""
        self._place(bucket, bucket.head_priority)

    def launched(self, bucket: BucketQueue) -> None:
        """Note that a batch has left a bucket, so that other buckets have their turn."""
        had_turn = bucket.is_full and next(iter(self._levels[bucket.priority].ready)) is bucket
        self._remove(bucket)
        if self.waiting:
            self._turn = bucket.turn = self._turn + 1
        if not bucket.rows:
            return
        self._place(bucket, bucket.head_priority)
        if had_turn and self._keeps_turn(bucket):
            bucket.turns_kept += 1
            self._levels[bucket.priority].ready.move_to_end(bucket, last=False)
        else:
            bucket.turns_kept = 0

    def _keeps_turn(self, bucket: BucketQueue) -> bool:
        """Return whether a bucket that fills another batch keeps its turn.

        With strict turns, small batches of rare shapes would take the time that a common shape needs, until
        the queue is full. If all buckets fill batches, or none does, they simply take turns. A next bucket
        that has not had a turn for long is not passed over.
        """
        if not bucket.is_full or self._policy.is_alone:
            return False
        following = next(iter(self._levels[bucket.priority].ready))
        turns = TURNS_KEPT * (self.waiting - self.full)
        is_due = not following.is_full and self._turn - following.turn >= turns
        return not is_due and bucket.turns_kept + 1 < turns // self.full

    def clear(self) -> list[Request]:
        """Empty every bucket and return what was queued."""
        queued = [request for bucket in self for request in bucket.waiting()]
        self.by_key.clear()
        for level in self._levels:
            level.ready.clear()
            level.filling.clear()
        self.waiting = self.full = 0
        return queued

    def least_urgent(self, below: int, rows: int) -> list[Request]:
        """Return queued requests below a priority with ``rows`` rows or more in total; none if too few are
        queued.

        They are the least urgent requests, and among these the latest, from buckets whose turn is far off.
        """
        far_off = (
            bucket
            for level in self._levels
            for bucket in chain(reversed(level.filling), reversed(level.ready))
        )
        looked_through = list(islice(far_off, SEARCHED_MAX))
        found: list[Request] = []
        for priority in range(below):
            for bucket in looked_through:
                for request in bucket.newest(priority):
                    found.append(request)
                    rows -= request.rows
                    if rows <= 0:
                        return found
        return []

    def pick(self, now_ns: int, in_flight: int) -> tuple[BucketQueue, Reason] | None:
        """Return the bucket to launch from now, and why; ``None`` when none should."""
        if self._has_delay:
            self._end_delays(now_ns)
        if in_flight >= self._policy.concurrency and (not self.full or self._policy.answers_in_time):
            return None
        ready = self._levels[self.priority_max].ready
        bucket = next(iter(ready)) if ready else self._first_ready(is_idle=not in_flight)
        if bucket is None:
            return None
        if not in_flight and not bucket.is_full:
            return bucket, Reason.IDLE
        return bucket, self.reason(bucket, now_ns, in_flight)

    def _first_ready(self, *, is_idle: bool) -> BucketQueue | None:
        """Return the bucket whose turn it is, among the ready ones; on an idle device, also among filling
        ones."""
        for priority in range(self.priority_max, -1, -1):
            level = self._levels[priority]
            if level.ready:
                return next(iter(level.ready))
            if level.filling:
                if is_idle:
                    return next(iter(level.filling))
            elif priority == self.priority_max and priority:
                self.priority_max -= 1
        return None

    def overdue(self, now_ns: int) -> BucketQueue | None:
        """Return the bucket with the most overdue request of any priority; ``None`` if there is none."""
        found, due_ns = None, now_ns + 1
        for level in self._levels:
            for bucket in islice(level.ready, SEARCHED_MAX):
                if (its_ns := bucket.overdue_ns()) < due_ns:
                    found, due_ns = bucket, its_ns
        return found

    def next_ones(self) -> Iterator[BucketQueue]:
        """Yield buckets with work in the order of their turns."""
        levels = reversed(self._levels[: self.priority_max + 1])
        waiting = chain.from_iterable(chain(level.ready, level.filling) for level in levels)
        return islice(waiting, SEARCHED_MAX)

    def instead(self, bucket: BucketQueue, request: Request) -> BucketQueue | None:
        """Return the bucket of the request with the earliest deadline, if it may be launched instead of
        ``bucket``."""
        other = self.by_key[request.key]
        if other is bucket or not other.is_ready or not request.priority == other.priority == bucket.priority:
            return None
        return other

    def wakeup_ns(self, in_flight: int) -> int | None:
        """Return the time in ns at which a delay ends and lets a batch go; ``None`` if there is none."""
        return self._first_end_ns() if in_flight < self._policy.concurrency else None

    def reason(self, bucket: BucketQueue, now_ns: int, in_flight: int) -> Reason:
        """Return why a ready bucket is launched now."""
        if bucket.is_full:
            return Reason.FULL
        if in_flight >= self._policy.concurrency:
            return Reason.TURN
        delay_ns = self._policy.delay_ns_max
        if not delay_ns:
            return Reason.IDLE
        return Reason.DELAY if bucket.oldest_arrival_ns() + delay_ns <= now_ns else Reason.DEADLINE

    def _place(self, bucket: BucketQueue, priority: int) -> None:
        """Move a bucket to the place that its rows and its most urgent request call for, at the end there.

        :param priority: that of its most urgent request; -1 if it is empty.
        """
        is_full = bucket.rows >= bucket.rows_max
        is_ready = bucket.is_ready or is_full or not self._has_delay
        if priority != bucket.priority or is_ready is not bucket.is_ready:
            if bucket.priority >= 0:
                self._remove(bucket)
            if priority < 0:
                return
            bucket.priority, bucket.is_ready = priority, is_ready
            self.waiting += 1
            if priority > self.priority_max:
                self.priority_max = priority
            if is_ready:
                self._levels[priority].ready[bucket] = None
            else:
                self._await_delay(bucket)
        if is_full is not bucket.is_full:
            self.full += 1 if is_full else -1
            bucket.is_full = is_full

    def _remove(self, bucket: BucketQueue) -> None:
        level = self._levels[bucket.priority]
        del (level.ready if bucket.is_ready else level.filling)[bucket]
        self.waiting -= 1
        self.full -= bucket.is_full
        bucket.priority, bucket.is_ready, bucket.is_full = -1, False, False

    def _await_delay(self, bucket: BucketQueue) -> int:
        """Return and note when a filling bucket becomes ready. As it holds less than a batch, this is
        cheap."""
        bucket.deadline_ns = bucket.earliest_deadline_ns()
        ready_ns = self._policy.ready_ns(bucket.oldest_arrival_ns(), bucket.deadline_ns)
        self._levels[bucket.priority].filling[bucket] = ready_ns
        return ready_ns

    def _first_end_ns(self) -> int | None:
        """Return when the first delay ends."""
        return min(chain.from_iterable(level.filling.values() for level in self._levels), default=None)

    def _end_delays(self, now_ns: int) -> None:
        """Make buckets ready whose delay is over."""
        first_ns = self._first_end_ns()
        if first_ns is None or first_ns > now_ns:
            return
        filling = [pair for level in self._levels for pair in level.filling.items() if pair[1] <= now_ns]
        for bucket, _ in sorted(filling, key=_end_ns):
            # The request from whose arrival the delay counts may have left meanwhile.
            if self._await_delay(bucket) <= now_ns:
                priority = bucket.priority
                self._remove(bucket)
                bucket.is_ready = True
                self._place(bucket, priority)


def _end_ns(pair: tuple[BucketQueue, int]) -> int:
    return pair[1]


class Deadlines:
    """The queued requests with a deadline, the earliest first.

    Most requests arrive in the order of their deadlines, because callers of a model mostly use the same
    timeout.
    """

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line: deque[Request] = deque()
        """The requests, some perhaps no longer queued."""

    def push(self, request: Request, *, queued_max: int) -> None:
        """Add a queued request.

        :param queued_max: an upper bound of the number of queued requests.
        """
        line = self.line
        if len(line) > 2 * queued_max + TOMBSTONES_MIN:
            self.line = line = deque(request for request in line if request.state is QUEUED)
        if not line or request.deadline_ns >= line[-1].deadline_ns:
            line.append(request)
        else:
            line.insert(bisect_right(line, request.deadline_ns, key=_deadline_ns), request)

    def earliest(self) -> Request | None:
        """Return the queued request with the earliest deadline."""
        line = self.line
        while line and line[0].state is not QUEUED:
            line.popleft()
        return line[0] if line else None

    def earliest_ns(self) -> int | None:
        """Return the earliest deadline of a request that is still queued."""
        earliest = self.earliest()
        return None if earliest is None else earliest.deadline_ns

    def pop_due(self, now_ns: int, arrived_by_ns: int) -> list[Request]:
        """Remove and return the queued requests that are due and arrived by a certain time."""
        due: list[Request] = []
        later: list[Request] = []
        while (request := self.earliest()) is not None and request.deadline_ns <= now_ns:
            self.line.popleft()
            (due if request.arrival_ns <= arrived_by_ns else later).append(request)
        self.line.extendleft(reversed(later))
        return due


def _deadline_ns(request: Request) -> int:
    return request.deadline_ns
