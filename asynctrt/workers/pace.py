"""Estimates of batch times in workers, learned from answers: how many groups to form."""

from typing import Final

EWMA: Final = 0.1
"""The weight of the latest answer."""

PART_NS_MIN: Final = 200_000
"""The minimum computing time of each part when requests of one tick are divided over idle cores."""


class Pace:
    """Estimates of the time per row, over all workers of an engine.

    :param parallel: the number of batches that compute side by side in all workers together.
    """

    def __init__(self, parallel: int) -> None:
        self._parallel = parallel
        self._row_ns = 0.0
        self._largest_rows = 0
        self._largest_row_ns = 0.0

    @property
    def added_row_ns(self) -> float:
        """The time that one more row takes, in ns, from the largest batches so far; 0 before the first."""
        return self._largest_row_ns / self._parallel

    def parts(self, rows: int) -> int:
        """Return the number of groups into which to divide rows, so that all cores have some.

        A group is one request to a worker, which cannot divide it between its idle cores.
        """
        return max(min(int(rows * self._row_ns) // PART_NS_MIN, self._parallel), 1)

    def measured(self, batch_rows: int, compute_ns: int) -> None:
        """Learn from a batch."""
        self._row_ns += EWMA * (compute_ns / max(batch_rows, 1) - self._row_ns)
        if batch_rows > self._largest_rows:
            self._largest_rows, self._largest_row_ns = batch_rows, compute_ns / batch_rows
        elif batch_rows == self._largest_rows > 0:
            self._largest_row_ns += EWMA * (compute_ns / batch_rows - self._largest_row_ns)
