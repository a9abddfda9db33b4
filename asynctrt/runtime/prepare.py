"""Batch sizes whose first batch takes long, run once in each context before the first caller comes.

cuDNN chooses how to compute a convolution when it first sees its shape: with ONNX Runtime the first batch of
each size takes a tenth of a second for a model of many convolutions, in each session anew. Requests that come
at random make batches of every size, and would find that out one by one. So a few sizes are run beforehand,
if that pays, and each batch is padded to the next of them.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from asynctrt import clock
from asynctrt.backends.base import Binding
from asynctrt.devices.base import Device, Event, Stream
from asynctrt.errors import DeviceLostError

PREPARE_S: Final = 120.0
"""How long a batch may take the first time."""

FIRST_EXTRA_NS_MIN: Final = 10_000_000
"""Sizes are restricted if the first batch of one takes so much longer than the second."""

TRIED: Final = 3
"""How many sizes have to show that: a process may be held up once."""

STEPS: Final = 4
"""Sizes between two powers of two: at most a fifth of what is computed is padding."""

logger = logging.getLogger("asynctrt")


def sizes_up_to(rows_max: int) -> tuple[int, ...]:
    """Return batch sizes of which each is at most a quarter larger than the one before, but for the first."""
    sizes, size = [], 1
    while size < rows_max:
        sizes.append(size)
        size += max(1, (1 << size.bit_length() - 1) // STEPS)
    return (*sizes, rows_max)


class Preparation:
    """Runs batches of the sizes in contexts that nothing else uses. Blocks.

    :param bindings: for each context its stream, an event of it, and its binding to a slab of zeros.
    """

    def __init__(self, device: Device, bindings: Sequence[tuple[Stream, Event, Binding]]) -> None:
        self._device = device
        self._bindings = bindings

    def run(self, sizes: Sequence[int], name: str, *, is_forced: bool) -> tuple[int, ...]:
        """Run each size once in every context, if that pays.

        :param sizes: rising; the last is the most rows that a batch has.
        :param is_forced: do so in any case.
        :returns: the sizes; none if batches of all sizes may as well come as they are.
        :raises DeviceLostError: if that happened meanwhile. What else goes wrong is logged.
        """
        try:
            largest, *smaller = reversed(sizes)
            if not is_forced:
                first = self._bindings[0]
                self._timed(first, largest)  # What happens once for a model counts for no size.
                tried = smaller[:TRIED]
                extra_ns = min(
                    [self._timed(first, rows) - self._timed(first, rows) for rows in tried], default=0
                )
                if extra_ns < FIRST_EXTRA_NS_MIN:
                    return ()
                logger.info(
                    "%r: the first batch of a size takes %.0f ms longer than the next, so batches are padded "
                    "to one of %d sizes, which are run once now in each of %d contexts",
                    name,
                    extra_ns / 1e6,
                    len(sizes),
                    len(self._bindings),
                )
            with ThreadPoolExecutor(len(self._bindings), "asynctrt-prepare") as pool:
                done = [pool.submit(self._run_all, one, tuple(reversed(sizes))) for one in self._bindings]
                for one in done:
                    one.result()
        except DeviceLostError:
            raise
        except Exception as error:
            logger.warning(
                "%r: batches of zeros could not be run beforehand, so the first batch of each size may take "
                "long: %s",
                name,
                error,
            )
            return ()
        return tuple(sizes)

    def _run_all(self, bound: tuple[Stream, Event, Binding], sizes: Sequence[int]) -> None:
        self._device.activate()
        for rows in sizes:
            self._timed(bound, rows)

    def _timed(self, bound: tuple[Stream, Event, Binding], rows: int) -> int:
        """Run a batch of zeros; return how long it took, in ns."""
        stream, end, binding = bound
        start_ns = clock.now_ns()
        binding.enqueue(rows, profile=None, stream=stream, arena=None)
        stream.record(end)
        if not end.synchronize(PREPARE_S):
            raise DeviceLostError(f"a batch of {rows} rows of zeros did not end within {PREPARE_S:g} s")
        if end.error is not None:
            raise end.error
        return clock.now_ns() - start_ns
