"""Run as how many rows, and with which profile? Batches are padded, where that is needed or pays off."""

from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.shapes import Shapes


class RunAs:
    """Decides how many rows the device executes for those of a batch."""

    def __init__(self, policy: Policy, shapes: Shapes, times: BatchTimes) -> None:
        self._policy = policy
        self._shapes = shapes
        self._times = times
        self._is_as_given = shapes.runs_as_many_as_it_takes and not policy.captured.sizes

    def find(self, key: BatchKey, rows: int) -> tuple[int, int | None]:
        """Return the rows that the device executes for ``rows``, and the profile to do it with.

        :raises Exception: what the model raises when it is asked.
        """
        if self._is_as_given:
            return rows, None
        rows_run = self._shapes.padded_rows(key.shape, rows)
        if self._policy.captured.sizes and key.shape == ():
            rows_run = self._policy.rows_to_run(key.cost_key, rows_run, self._times.compute)
        return rows_run, self._shapes.profile(key.shape, rows_run)

    def expected(self, key: BatchKey, rows: int) -> tuple[int, int | None]:
        """Return what :meth:`find` is expected to return, which may raise by then."""
        try:
            return self.find(key, rows)
        except Exception:  # The model raises again when the batch is formed, and is answered for then.
            return rows, None

    def expected_rows(self, key: BatchKey, rows: int) -> int:
        """Return the rows that the device is expected to execute for ``rows``."""
        return self.expected(key, rows)[0]
