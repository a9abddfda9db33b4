"""What batches take in workers, learned from their answers: how many groups to form, and who is fast."""

from typing import Final

EWMA: Final = 0.1
"""Weight of the latest answer."""

PART_NS_MIN: Final = 200_000
"""Requests of one tick are divided over idle cores only while each part computes for at least so long."""

FACTOR_MAX: Final = 8.0
"""A worker that was slower than this in one batch was held up by something else."""


class Pace:
    """What a row takes, and a batch of about each size, over all workers of an engine.

    :param parallel: batches that compute side by side in all workers together.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._row_ns = 0.0
        self._largest_rows = 0
        self._largest_row_ns = 0.0
        # By the number of bits of a batch's rows.
        self._usual_ns: dict[int, float] = {}

    @property
    def added_row_ns(self) -> float:
        """What one more row takes in the largest batches that were seen; 0 before the first."""
        return self._largest_row_ns / self._parallel

    def parts(self, rows: int) -> int:
        """Return into how many groups to divide rows, so that all that can compute at once has some.

        A group is one request to a worker, which cannot divide it between its idle cores.
        """
        return max(min(int(rows * self._row_ns) // PART_NS_MIN, self._parallel), 1)

    def measured(self, factor: float, batch_rows: int, compute_ns: int) -> float:
        """Learn from a batch; return how long its worker's batches take, as a multiple of the usual.

        :param factor: what this returned for the worker before. It starts with 1. Batches of other sizes than
            its own would say nothing of it.
        """
        self._row_ns += EWMA * (compute_ns / max(batch_rows, 1) - self._row_ns)
        if batch_rows > self._largest_rows:
            self._largest_rows, self._largest_row_ns = batch_rows, compute_ns / batch_rows
        elif batch_rows == self._largest_rows > 0:
            self._largest_row_ns += EWMA * (compute_ns / batch_rows - self._largest_row_ns)
        size = batch_rows.bit_length()
        usual_ns = self._usual_ns.setdefault(size, compute_ns)
        if usual_ns:
            factor += EWMA * (min(compute_ns / usual_ns, FACTOR_MAX) - factor)
        self._usual_ns[size] = usual_ns + EWMA * (compute_ns - usual_ns)
        return factor
