"""Whose turn is it? The bucket whose turn it is, unless something is overdue or due before it."""

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.policy import AGED_EVERY
from asynctrt.scheduling.queues import BucketQueue, Buckets, DeadlineHeap

Turn = tuple[BucketQueue, Reason]
"""The bucket to launch from, and why it is launched now."""


class Turns:
    """Decides which bucket the next batch is of.

    Now and then it is that of what is most overdue, and every second time that of the earliest deadline.
    """

    def __init__(self, buckets: Buckets, deadlines: DeadlineHeap) -> None:
        self._buckets = buckets
        self._deadlines = deadlines
        self.aged_number = 0
        """The last batch that started with what was most overdue."""
        # Whether the last batch went out of turn.
        self._is_out_of_turn = False

    def next(self, number: int, now_ns: int, in_flight: int) -> Turn | None:
        """Return whose turn it is; ``None`` if no batch should be launched now.

        :param number: that of the next batch.
        """
        buckets = self._buckets
        picked = buckets.pick(now_ns, in_flight)
        if picked is None:
            return None
        if buckets.priority_max or (self._deadlines.line and buckets.waiting > 1):
            return self._reconsider(picked, number, now_ns, in_flight)
        return picked

    def _reconsider(self, picked: Turn, number: int, now_ns: int, in_flight: int) -> Turn:
        """Return the turn of a bucket that goes before the one whose turn it is, if there is one."""
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
