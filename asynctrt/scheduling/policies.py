"""The policies that decide the next batch. Each one answers one question of the scheduler, with one method.

Is there room for it (:class:`Room`)? Is it the turn of a part of a batch that failed (:class:`Again`), and if
not, which bucket goes out of turn (:class:`Turns`)? May the batch still grow (:class:`AtOnce`,
:class:`JustInTime`)? Which rows does it take (:class:`TakeRows` and its subclasses)? With how many rows is it
run (:class:`RunAs`), and on which contexts may that be (:class:`AnySize`, :class:`KeptSizes`)?

To add a policy, such as one that limits the tokens of a batch, write a class with the same method, and pass
it to the scheduler where that is created (``core/assembly.py``).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final

from asynctrt.scheduling.batch import Batch, Reason
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.contexts import ContextAllocator
from asynctrt.scheduling.forecast import Forecast
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import AGED_EVERY, DEADLINE_MARGIN_NS, Policy
from asynctrt.scheduling.queues import Bucket, BucketQueue, Buckets, Deadlines
from asynctrt.scheduling.request import Request, awaited
from asynctrt.scheduling.shapes import Shapes
from asynctrt.scheduling.shares import Share

CHANGES: Final = 8
"""How many of the last changes of a context's size count: enough that one of them, which a busy CPU held up,
decides little. The number itself was not tuned."""

PART_NS_MIN: Final = 200_000
"""Rows are spread over idle cores only if each part computes for at least this long: several times as long as
handing it to a thread and back takes."""

Part = tuple[BatchKey, tuple[Request, ...]]

Turn = tuple[BucketQueue, Reason]
"""The bucket to launch from, and why it is launched now."""

Chosen = tuple[Sequence[Request], int, tuple[Request, ...]]
"""The requests of a batch, their rows, and requests that would be too late for it. If there are late ones,
they must leave the queue first, and nothing else is chosen."""


class AnySize:
    """Lets a batch of any size run on any context."""

    until_ns: int | None = None
    """Until when at most a batch waits for which :meth:`fit` returned ``None``."""

    def fit(
        self, bucket: BucketQueue, chosen: Sequence[Request], rows: int, reason: Reason, now_ns: int
    ) -> tuple[Sequence[Request], int, int] | None:
        """Return the requests of the next batch of a bucket, their rows, and how many rows to run it with at
        least; ``None`` if it has to wait for a context.

        :param chosen: the requests that it would have, with ``rows`` rows.
        :param reason: why it is launched.
        """
        return chosen, rows, 0

    def usual(self, shape: Hashable, rows_run: int) -> int:
        """Return how many rows the context that is free for a batch runs: the fewest that hold its rows, or
        else the most; ``rows_run`` if any number will do."""
        return rows_run

    def note(self, shape: Hashable, rows: int, size: int) -> None:
        """Note that a batch of some rows is run with ``size`` rows without having been fitted."""

    def profile(self, key: BatchKey, rows_run: int, profile: int | None) -> Hashable:
        """Return what the context of a batch must have run before to run it without delay."""
        return profile

    def changed(self, extra_ns: int) -> None:
        """Note how much longer than usual a batch took for which a context changed."""


class KeptSizes(AnySize):
    """Keeps contexts at the shape and the number of rows that they ran last, where a change takes long.

    A batch runs on a context of its shape: padded if it has fewer rows, and cut if it has more. It waits if
    all of these are busy, for as long as a change takes. The time that a wrong size loses is added up for
    each shape. Once it is as long as a change, a context changes to the size that is wanted. So batches lose
    at most about as much time by wrong sizes as by changes.

    How long a change takes depends on the shape and on what else the CPU has to do (45 ms to 1.5 s with
    PP-OCR's recogniser on an H100), so the mean of the last changes counts. What was measured before the
    first request is only the first of them.

    :param times: how long batches take.
    :param change_ns: how much longer a batch took on a context that had run another size before.
    """

    def __init__(self, contexts: ContextAllocator, shapes: Shapes, times: BatchTimes, change_ns: int) -> None:
        self._contexts, self._shapes, self._times = contexts, shapes, times
        self._changes_ns = deque((change_ns,), CHANGES)
        self._change_ns = change_ns
        # The time lost since a context last changed, by shape.
        self._lost_ns: dict[Hashable, int] = {}
        self._since_ns: int | None = None

    def fit(
        self, bucket: BucketQueue, chosen: Sequence[Request], rows: int, reason: Reason, now_ns: int
    ) -> tuple[Sequence[Request], int, int] | None:
        key = bucket.key
        size = 0 if self._shapes.is_specialised(key.shape) else self._size(key.shape, rows, now_ns)
        if size is None:
            return None
        if 0 < size < rows:
            by_age = reason is Reason.AGED
            # The first request is never cut.
            chosen, rows = bucket.choose(max(size, bucket.head_rows(by_age=by_age)), by_age)
        return chosen, rows, size

    def usual(self, shape: Hashable, rows_run: int) -> int:
        if self._shapes.is_specialised(shape):
            return rows_run
        return _fitting(self._contexts.sizes(shape)[0] or [rows_run], rows_run)

    def note(self, shape: Hashable, rows: int, size: int) -> None:
        wanted = self._shapes.padded_rows(shape, rows)
        self._lost_ns[shape] = self._lost_ns.get(shape, 0) + self._loss_ns(shape, rows, size, wanted)

    def profile(self, key: BatchKey, rows_run: int, profile: int | None) -> Hashable:
        return None if self._shapes.is_specialised(key.shape) else (key.shape, rows_run)

    def changed(self, extra_ns: int) -> None:
        self._changes_ns.append(extra_ns)
        self._change_ns = sum(self._changes_ns) // len(self._changes_ns)

    def _size(self, shape: Hashable, rows: int, now_ns: int) -> int | None:
        """Return the size of the context that a batch of ``rows`` runs on; ``None`` if it has to wait."""
        free, is_busy = self._contexts.sizes(shape)
        wanted = self._shapes.padded_rows(shape, rows)
        if not free:
            return None if is_busy and self._waits(now_ns) else self._change(shape, wanted)
        self._since_ns = None
        size = _fitting(free, rows)
        lost_ns = self._lost_ns.get(shape, 0) + self._loss_ns(shape, rows, size, wanted)
        if size != wanted and lost_ns >= self._change_ns:
            return self._change(shape, wanted)
        self._lost_ns[shape] = lost_ns
        return size

    def _change(self, shape: Hashable, wanted: int) -> int:
        known = self._contexts.shapes - {shape}
        self._lost_ns = {other: lost_ns for other, lost_ns in self._lost_ns.items() if other in known}
        self._since_ns = None
        return wanted

    def _waits(self, now_ns: int) -> bool:
        """Return whether a batch still waits for a busy context."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self.until_ns = self._since_ns + self._change_ns
        return now_ns < self.until_ns

    def _loss_ns(self, shape: Hashable, rows: int, size: int, wanted: int) -> int:
        """Return how much longer the rows of a batch take with ``size`` rows than with ``wanted``.

        Until the wanted size has run, assume the best: that its time is proportional to its rows if they are
        fewer, and the same if they are more.
        """
        took_ns = self._times.compute.typical(shape, size)
        if took_ns is None:
            return 0
        would_ns = took_ns * min(wanted, size) // size
        if self._times.compute.has_seen(shape, wanted):
            would_ns = self._times.compute.typical(shape, wanted) or 0
        return max(took_ns - would_ns * min(rows, size) // rows, 0)


def _fitting(sizes: Sequence[int], rows: int) -> int:
    """Return the smallest of these sizes that holds some rows, or else the largest."""
    return min((size for size in sizes if size >= rows), default=max(sizes))


class Room:
    """Whether there is room for another batch: a free context, and a share of the device.

    :param in_flight: the batches in flight; ``in_flight_max``: how many there may be.
    """

    def __init__(self, contexts: ContextAllocator, in_flight: Collection[Batch], in_flight_max: int) -> None:
        self.contexts = contexts
        self._in_flight = in_flight
        self.in_flight_max = in_flight_max
        self.share: Share | None = None
        """The scheduler's share, if schedulers divide the device; ``None`` if it takes what it can get."""
        self.until_ns: int | None = None
        """The latest time until which the device is left to others, or a batch waits for a context of its
        size; ``None`` if neither is so."""
        self.bides = False
        """Whether what is queued waits for company or for a context of its size, not for the device."""
        self.sizes = AnySize()
        """Decides which sizes a batch may have on the contexts that are free."""
        self.contexts_differ = False
        """Whether it matters which context a batch runs on."""

    @property
    def is_free(self) -> bool:
        """Return whether a batch could be launched, unless the device is left to others."""
        return self.contexts.free > 0 and len(self._in_flight) < self.in_flight_max

    @property
    def is_held(self) -> bool:
        """Return whether the device was left to others at the last check."""
        return self.share is not None and self.share.is_held

    @property
    def is_wanted(self) -> bool:
        """Return whether queued requests would be launched now, or when a batch in flight ends."""
        return bool(self._in_flight) or (not self.bides and self.contexts.free > 0)

    def is_full(self) -> bool:
        """Return whether nothing would be launched now, however much room the device has."""
        return self.bides or not self.is_free

    def has_room(self, now_ns: int) -> bool:
        """Return whether a batch may be launched now. Call it only if there is something to launch."""
        if not self.contexts.free or len(self._in_flight) >= self.in_flight_max:
            return False
        if self.share is None:
            return True
        self.bides = False
        self.until_ns = self.share.hold_until(now_ns)
        return self.until_ns is None


class Again:
    """Parts of failed batches, the largest first. They take turns with the queue.

    :param waiting_max: while more parts than this wait, they all go before the queue.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self.parts: list[Part] = []
        """Each is launched as a separate batch."""
        self.is_over = False
        """Whether parts are no longer launched."""
        self.was_part = False
        """Whether the latest batch was a part, so that it is the queue's turn."""

    @property
    def goes_first(self) -> bool:
        """Return whether it is the turn of a part."""
        return bool(self.parts) and not (self.was_part and len(self.parts) <= self._waiting_max)

    def divide(self, key: BatchKey, requests: Sequence[Request]) -> None:
        """Keep the halves of a batch that failed, without requests whose callers have gone away."""
        left = awaited(requests)
        half = (len(left) + 1) // 2
        for part in (left[:half], left[half:]):
            if part:
                # Large parts, for which many callers wait, go before small ones, which more likely fail.
                insort(self.parts, (key, part), key=_smallness)

    def pop(self) -> Part | None:
        """Return the next part, without requests whose callers have gone; ``None`` if no part is left."""
        while self.parts:
            key, requests = self.parts.pop(0)
            chosen = awaited(requests)
            if chosen:
                return key, chosen
        return None

    def close(self) -> list[Request]:
        """Drop all parts and keep none from now on; return the requests whose callers still wait."""
        self.is_over = True
        left = [request for _, part in self.parts for request in awaited(part)]
        self.parts.clear()
        return left


class Turns:
    """Decides which bucket goes out of turn, where there are priorities or deadlines.

    Now and then it is the bucket with the most overdue request, and at most every second time the one with
    the earliest deadline.
    """

    def __init__(self, buckets: Buckets, deadlines: Deadlines) -> None:
        self._buckets = buckets
        self._deadlines = deadlines
        self.aged_number = 0
        """The number of the last batch that started with the most overdue request."""
        # Whether the last batch went out of turn.
        self._is_out_of_turn = False

    def reconsider(self, picked: Turn, number: int, now_ns: int, in_flight: int) -> Turn:
        """Return the turn of a bucket that goes before the picked one, if there is such a bucket.

        :param number: the number of the next batch.
        """
        buckets = self._buckets
        is_due = buckets.priority_max and number - self.aged_number >= AGED_EVERY
        if is_due and (aged := buckets.overdue(now_ns)) is not None:
            return aged, Reason.AGED
        out_of_turn, self._is_out_of_turn = self._is_out_of_turn, False
        if not out_of_turn and (first := self._deadlines.earliest()) is not None:
            other = buckets.instead(picked[0], first)
            if other is not None:
                self._is_out_of_turn = True
                return other, buckets.reason(other, now_ns, in_flight)
        return picked


class AtOnce:
    """Launches batches as soon as possible: for devices that start each batch at once."""

    due_ns: int | None = None
    """When to launch the batch that may still grow; ``None`` if there is none."""

    def may_grow(self, bucket: Bucket, now_ns: int) -> bool:
        """Return whether the next batch can still grow before the device needs it. Call it only while others
        are in flight."""
        return False

    def begin(self) -> None:
        """Forget the batch that may still grow."""


class JustInTime(AtOnce):
    """Lets batches grow until the device is about to be free for them.

    :param deadlines: batches are launched before the earliest of them; ``None`` if launching sooner would not
        help.
    """

    def __init__(
        self, concurrency: Concurrency, deadlines: Deadlines | None, *, holds_full_ones: bool
    ) -> None:
        self._concurrency = concurrency
        self._deadlines = deadlines
        self._holds_full_ones = holds_full_ones

    def begin(self) -> None:
        self.due_ns = None

    def may_grow(self, bucket: Bucket, now_ns: int) -> bool:
        if bucket.is_full and not self._holds_full_ones:
            return False
        rows_max = bucket.rows_max
        due_ns = self._concurrency.due_ns(bucket.key, min(bucket.rows, rows_max), rows_max, now_ns)
        if due_ns is None:
            return False
        if self._deadlines is not None and (deadline_ns := self._deadlines.earliest_ns()) is not None:
            due_ns = min(due_ns, deadline_ns - DEADLINE_MARGIN_NS)
        if due_ns <= now_ns:
            return False
        self.due_ns = due_ns
        return True


class TakeRows:
    """Takes as many rows as fit into a batch."""

    def rows_max(self, bucket: Bucket, in_flight: int, reason: Reason) -> int:
        """Return how many rows the next batch of a bucket may have; never fewer than its first request has.

        :param reason: why it is launched.
        """
        return bucket.rows_max

    def choose(self, bucket: BucketQueue, in_flight: int, now_ns: int, reason: Reason) -> Chosen:
        """Return the requests of the next batch of a bucket; change nothing."""
        return *bucket.choose(self.rows_max(bucket, in_flight, reason), reason is Reason.AGED), ()


class TakeOneRequest(TakeRows):
    """Takes one request, whatever else is queued."""

    def rows_max(self, bucket: Bucket, in_flight: int, reason: Reason) -> int:
        return bucket.head_rows(by_age=reason is Reason.AGED)


class SpreadOverCores(TakeRows):
    """Takes an even share of the rows for each idle core, where batches compute in parallel.

    Two cores compute 16 rows each in about half the time that one core takes for 32.
    """

    def __init__(self, policy: Policy, buckets: Buckets, times: BatchTimes) -> None:
        self._concurrency = policy.concurrency
        self._buckets = buckets
        self._compute = times.compute

    def rows_max(self, bucket: Bucket, in_flight: int, reason: Reason) -> int:
        most = bucket.rows_max
        if bucket.rows < 2 or reason is Reason.AGED:
            return most
        shape, compute, rows = bucket.key.shape, self._compute, min(bucket.rows, most)
        idle = self._concurrency - in_flight - max(self._buckets.waiting - 1, 0)
        expected_ns = compute.typical(shape, rows)
        if idle < 2 or expected_ns is None or expected_ns < 2 * PART_NS_MIN:
            return most
        parts = min(idle, expected_ns // PART_NS_MIN)
        part = max(min(-(-bucket.rows // parts), most), bucket.head_rows())
        # If batches of this size are always divided, the time of a whole one is never measured again, and a
        # first slow run would count forever. The parts together are an upper bound of it.
        if compute.has_seen(shape, part):
            part_ns = compute.typical(shape, part) or 0
            if -(-rows // part) * part_ns < 2 * PART_NS_MIN:
                return most
        return part


class HalvesFirst(TakeRows):
    """Takes half of the rows for an idle device, if copying the other half in while the first one computes is
    faster than copying all of them in first.

    :param expected_rows: returns the rows that the device would execute for a number of rows of a key.
    """

    def __init__(
        self,
        concurrency: Concurrency,
        times: BatchTimes,
        room: Room,
        expected_rows: Callable[[BatchKey, int], int],
    ) -> None:
        self._concurrency = concurrency
        self._times = times
        self._room = room
        self._expected_rows = expected_rows

    def rows_max(self, bucket: Bucket, in_flight: int, reason: Reason) -> int:
        if reason is Reason.AGED or self._concurrency.occupied:
            return bucket.rows_max
        rows = min(bucket.rows, bucket.rows_max)
        half = max((rows + 1) // 2, bucket.head_rows())
        if half >= rows or self._room.contexts.free < 2 or self._room.in_flight_max < 2:
            return bucket.rows_max  # There is no second context to copy the others in for.
        key, compute, delay_ns = bucket.key, self._times.compute, self._times.delay_ns
        run, half_run = self._expected_rows(key, rows), self._expected_rows(key, half)
        whole_ns, half_ns = compute.typical(key.shape, run), compute.typical(key.shape, half_run)
        if whole_ns is None or half_ns is None:
            return bucket.rows_max
        first_ns = delay_ns(key, half_run) + half_ns
        # The second half computes after the first one, and not before it has been copied in.
        halves_ns = max(first_ns, 2 * delay_ns(key, half_run)) + half_ns
        return half if halves_ns < delay_ns(key, run) + whole_ns else bucket.rows_max


class InTime(TakeRows):
    """Takes the rows that another policy takes, as far as they can be answered in time."""

    def __init__(self, policy: TakeRows, forecast: Forecast, deadlines: Deadlines) -> None:
        self._policy = policy
        self._forecast = forecast
        self._deadlines = deadlines

    def rows_max(self, bucket: Bucket, in_flight: int, reason: Reason) -> int:
        return self._policy.rows_max(bucket, in_flight, reason)

    def choose(self, bucket: BucketQueue, in_flight: int, now_ns: int, reason: Reason) -> Chosen:
        if not self._deadlines.line:
            return self._policy.choose(bucket, in_flight, now_ns, reason)
        bucket.make_objects()

        def choose(rows_max: int) -> tuple[Sequence[Request], int]:
            return bucket.choose(rows_max, reason is Reason.AGED)

        rows_max = self.rows_max(bucket, in_flight, reason)
        return self._forecast.fit(bucket, rows_max, choose, now_ns, may_split=reason is not Reason.AGED)


class RunAs:
    """Decides how many rows the device executes for a batch.

    :param shapes: which rows of each shape the model takes.
    """

    def __init__(self, policy: Policy, shapes: Shapes, times: BatchTimes) -> None:
        self._policy = policy
        self._shapes = shapes
        self._times = times
        self.limit = shapes.limit
        """Returns the rows that one batch of a shape holds; raises as :meth:`Shapes.limit`."""
        self.has_profiles = shapes.has_profiles
        """Whether batches have profiles."""
        self._is_as_given = shapes.runs_as_many_as_it_takes and not policy.captured.sizes

    def find(self, key: BatchKey, rows: int) -> tuple[int, int | None] | Exception:
        """Return the rows that the device executes for ``rows``, and their profile; or what the model
        raises."""
        if self._is_as_given:
            return rows, None
        try:
            rows_run = self._shapes.padded_rows(key.shape, rows)
            if self._policy.captured.sizes:
                rows_run = self._policy.rows_to_run(key.shape, rows_run, self._times.compute)
            return rows_run, self._shapes.profile(key.shape, rows_run)
        except Exception as error:
            return error

    def expected(self, key: BatchKey, rows: int) -> tuple[int, int | None]:
        """Return what :meth:`find` is expected to return at the launch; never raise."""
        found = self.find(key, rows)
        # What the model raises, it raises again when the batch is formed, where that is handled.
        return (rows, None) if isinstance(found, Exception) else found

    def expected_rows(self, key: BatchKey, rows: int) -> int:
        """Return the rows that the device is expected to execute for ``rows``."""
        return self.expected(key, rows)[0]


def _smallness(part: Part) -> int:
    return -len(part[1])
