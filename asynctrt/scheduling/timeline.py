"""When a batch that is launched now will be done, told from what earlier ones took on the device.

Batches in one arena compute one after the other, while their copies overlap with the computing of others; so
the expected end of one depends on those before it. What is expected errs on the early side: to look too early
costs a few more looks, to look too late costs latency.
"""

from typing import Final

from asynctrt.scheduling.latency import LatencyModel
from asynctrt.scheduling.ledger import Launch

TIMED_EVERY: Final = 8
"""One batch in so many is timed by the device: it takes the CPU and the GPU some 5 µs each."""

TIMED_ALWAYS_NS: Final = 5_000_000
"""Batches that compute for so long are all timed."""


class Timeline:
    """Expected ends, by arena, and which batches the device shall take the times of.

    :param compute: the measured times of computing, which the scheduler decides by too.
    """

    def __init__(self, *, arenas: int, compute: LatencyModel) -> None:
        self._compute = compute
        self._copy_in = LatencyModel()
        self._copy_out = LatencyModel()
        # Until when each arena is known to have computed, and what is in flight there, in order: from when
        # on a batch can compute, and for how long. An end that was seen moves all those behind it, so each
        # expectation is told from the last truth and no error is carried along.
        self._computed_ns = [0] * arenas
        self._ahead: list[dict[int, tuple[int, int]]] = [{} for _ in range(arenas)]

    def wants_times(self, launch: Launch) -> bool:
        """Whether the device shall take the times of this batch: a new size, a long one, or a sample."""
        if launch.number % TIMED_EVERY == 0 or not self._compute.is_sure(launch.bucket, launch.rows_run):
            return True
        return (self._compute.expected_ns(launch.bucket, launch.rows_run) or 0) >= TIMED_ALWAYS_NS

    def usual_ns(self, launch: Launch) -> tuple[int, int, int]:
        """What such a batch usually takes to be copied in, to compute and to be copied out."""
        models = self._copy_in, self._compute, self._copy_out
        times = [model.expected_ns(launch.bucket, launch.rows_run) or 0 for model in models]
        return times[0], times[1], times[2]

    def launched(self, launch: Launch, now_ns: int) -> int | None:
        """In how many ns the batch is expected to be done; ``None`` if none like it was seen yet."""
        bucket, rows = launch.bucket, launch.rows_run
        compute_ns = self._compute.expected_ns(bucket, rows)
        if compute_ns is None:
            return None
        copied_in_ns = now_ns + (self._copy_in.expected_ns(bucket, rows) or 0)
        computed_ns = copied_in_ns + compute_ns
        if launch.arena is not None:
            ahead = self._ahead[launch.arena]
            ahead[launch.number] = copied_in_ns, compute_ns
            computed_ns = self._computed_ns[launch.arena]
            for ready_ns, takes_ns in ahead.values():
                computed_ns = max(computed_ns, ready_ns) + takes_ns
        return computed_ns + (self._copy_out.expected_ns(bucket, rows) or 0) - now_ns

    def timed(self, launch: Launch, *, copy_in_ns: int, copy_out_ns: int) -> None:
        """What the device measured."""
        self._copy_in.observe(launch.bucket, launch.rows_run, copy_in_ns)
        self._copy_out.observe(launch.bucket, launch.rows_run, copy_out_ns)

    def landed(self, launch: Launch, now_ns: int) -> None:
        """The batch is done. Those behind it in its arena move with it."""
        if launch.arena is not None:
            ahead = self._ahead[launch.arena]
            # Copies out may end in another order; what was launched before this one has computed, too.
            for number in [number for number in ahead if number <= launch.number]:
                del ahead[number]
            copy_out_ns = self._copy_out.expected_ns(launch.bucket, launch.rows_run) or 0
            computed_ns = self._computed_ns[launch.arena]
            self._computed_ns[launch.arena] = max(computed_ns, now_ns - copy_out_ns)

    def forget(self, launch: Launch) -> None:
        """The batch failed: none waits for it any more, and it says nothing about others."""
        if launch.arena is not None:
            self._ahead[launch.arena].pop(launch.number, None)
