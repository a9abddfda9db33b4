"""A check that a graph computes the same as the model it was captured from, by running both on equal rows."""

from typing import Any, Final

import numpy as np

from asynctrt.devices.base import Stream
from asynctrt.errors import ExecutionError
from asynctrt.runtime.staging import Slab
from asynctrt.tensors import Array

Expected = dict[int, dict[str, Array]]
"""The outputs of each batch of a trial, by their names."""

SAMPLES: Final = 2
"""The number of batches to run. Two different ones detect a graph that always repeats the answers to one."""

TOLERANCE: Final = 0.02
"""The allowed difference of a value, relative to the largest of its output: parallel sums vary in order."""

SHARE_MIN: Final = 0.99
"""The share of values that must be that close: a steep function amplifies a few small differences."""

NUMBERS: Final = 65_537
"""How many numbers to draw; they are repeated, as drawing takes far longer. A prime, so that rows differ."""

UNWRITTEN: Final = 0xA5
"""The bytes of outputs before a batch, to detect an output that is not written."""


class NoTrial:
    """A trial without comparison: batches run with whatever is in the slab."""

    launches = 1
    """How often to launch a graph to measure its cost and check its outputs."""

    def put_in(self, number: int) -> None:
        """Leave the rows as they are."""

    def put_out(self) -> None:
        """Leave the outputs where they are."""

    def note(self, number: int) -> None:
        """Record nothing."""

    def check(self, number: int) -> None:
        """Check nothing."""


class Trial(NoTrial):
    """Batches of known rows in a slab, and the outputs that the model computes for them call by call.

    :param rows: the number of rows of a batch.
    :param stream: an idle stream that is not being captured.
    :param expected: the expected outputs of each batch. Default: what :meth:`note` is called after.
    """

    launches = SAMPLES

    def __init__(self, slab: Slab, rows: int, stream: Stream, expected: Expected | None = None) -> None:
        self._slab, self._rows, self._stream = slab, rows, stream
        self._is_told = expected is not None
        self.expected: Expected = expected or {}
        """The outputs of each batch."""

    def put_in(self, number: int) -> None:
        """Put the rows of a batch, and outputs marked as unwritten, into the memory that the device uses."""
        slab = self._slab
        for array in (*(view[: self._rows] for view in slab.input_views(self._rows)), *slab.shared):
            array[...] = _sample(number, array)
        for array in slab.outputs.values():
            array[: self._rows].reshape(-1).view(np.uint8)[...] = UNWRITTEN
        buffers = self._slab.buffers
        if buffers.device_buffer is not None:
            self._slab.put_in(self._stream, self._rows)
            self._slab.put_shared_in(self._stream)
            for span in self._slab.layout.outputs:
                if span is not None:
                    nbytes = span.row_nbytes * self._rows
                    self._stream.copy(
                        buffers.device_buffer, buffers.staging, offset=span.offset, nbytes=nbytes
                    )

    def put_out(self) -> None:
        """Put the copies of the outputs on the stream, after the batch."""
        if self._slab.buffers.device_buffer is not None:
            self._slab.put_out(self._stream, self._rows)

    def note(self, number: int) -> None:
        """Record the outputs of the finished batch as the expected ones, or check them if they are known.

        :raises ExecutionError: if they are not as expected.
        """
        if self._is_told:
            self._compare(number, f"a session with fixed sizes, with {self._rows} rows,")
            return
        self.expected[number] = {
            name: array[: self._rows].copy() for name, array in self._slab.output_views(self._rows).items()
        }

    def check(self, number: int) -> None:
        """Check that the finished batch computed the expected outputs.

        :raises ExecutionError: if it did not.
        """
        self._compare(number, f"a graph of {self._rows} rows")

    def _compare(self, number: int, what: str) -> None:
        for name, expected in self.expected[number].items():
            if error_of(self._slab.output_views(self._rows)[name][: self._rows], expected, TOLERANCE):
                raise ExecutionError(
                    f"{what} does not compute what the model does: output {name!r} "
                    "differs for the same rows. It may draw random numbers, or compute some of it on the CPU"
                )


def _sample(number: int, like: Array) -> Any:
    """Return rows that every model accepts: zeros, or numbers from 0 to 1, as they may be indices."""
    if number == 0:
        return 0
    rng, size = np.random.default_rng(number), min(like.size, NUMBERS)
    is_whole = np.issubdtype(like.dtype, np.integer) or like.dtype == np.bool_
    some = rng.integers(0, 2, size) if is_whole else rng.random(size, np.float32)
    return np.resize(some.astype(like.dtype), like.shape)


@np.errstate(all="ignore")
def error_of(found: Array, expected: Array, tolerance: float, share: float = SHARE_MIN) -> float:
    """Return the largest difference of a value; 0 if they are close, 1 if they have no size.

    :param tolerance: the allowed difference; like the result, relative to the largest expected value.
    :param share: the share of values that must be that close.
    """
    if expected.dtype.hasobject:
        return 0.0 if found.tolist() == expected.tolist() else 1.0
    # Unlike comparing bytes objects, this lets other threads run: an engine may be serving meanwhile.
    if not expected.size or np.array_equal(_bytes_of(found), _bytes_of(expected)):
        return 0.0
    if expected.dtype.kind in "biu":
        near = found == expected
        if expected.dtype.itemsize == 1 and expected.dtype.kind != "b":
            # Values rounded to 8 bits may be rounded the other way.
            near = np.abs(found.astype(np.int16) - expected.astype(np.int16)) <= 1
        return 0.0 if float(near.mean()) >= share else 1.0
    # As np.isclose(), which takes several times as long: an output may have millions of values.
    wide = np.float64 if expected.dtype == np.float64 else np.float32
    ours: Array
    right: Array
    ours, right = found.astype(wide, copy=False), expected.astype(wide, copy=False)
    most = float(np.max(np.abs(right), initial=0, where=np.isfinite(right)))
    gaps = np.abs(ours - right)
    near = gaps <= tolerance * most
    near |= ours == right  # Infinities.
    near |= np.isnan(ours) & np.isnan(right)
    if float(near.mean()) >= share:
        return 0.0
    gaps = gaps[~near & np.isfinite(gaps)]
    return float(gaps.max()) / most if gaps.size and most else 1.0


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
