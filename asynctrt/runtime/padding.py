"""Rows of different lengths: padded when written into a slab, with their outputs cut back."""

from collections.abc import Callable, Mapping

from asynctrt.runtime.pad_sizes import Fit, Padding
from asynctrt.runtime.spans import spans_of
from asynctrt.runtime.staging import RowSource, Slab
from asynctrt.scheduling.batch import Batch
from asynctrt.tensors import Array, copy_rows


class PaddedSource(RowSource):
    """Rows gathered from arrays, some of them smaller than the rows of the batch.

    :param padding: the values to pad them with.
    """

    def __init__(self, batch: Batch, slab: Slab, padding: Padding) -> None:
        super().__init__(batch, slab)
        self._padding = padding
        # Computed from the arrays now: if a caller changes an array later, copying it detects that.
        self.fits = [
            padding.fit(tuple([array.shape[1:] for array in request.payload])) for request in batch.requests
        ]
        """How the rows of each request fit into the batch; ``None`` if they do not."""
        dims = tuple([span.dims for span in slab.layout.inputs])
        self.is_cut = any(fit is None or fit.dims != dims for fit in self.fits)

    def stage(self) -> None:
        """Copy the rows contiguously into the slab, and pad each row. Runs in any thread.

        :raises InputError: if no request's rows can be staged.
        """
        if not self.is_cut:
            super().stage()
            return
        batch = self.batch
        spans = self.spans or spans_of(batch.requests)
        try:
            for index, view in enumerate(self.views):
                # Fill the whole view at once: filling the rest of each request takes a call for each.
                view[: batch.rows] = self._padding.values[index]
                for array, span, fit in zip(self.arrays_of(index), spans, self.fits, strict=True):
                    _copy_into(view[span], index, array, fit)
        except Exception:
            self._stage_one_by_one()
        if batch.rows_run != batch.rows:
            for view in self.views:
                view[batch.rows : batch.rows_run] = view[0]

    def parts(self, parts_max: int) -> list[Callable[[], object]]:
        """Return functions that together do the same as :meth:`stage`: only one if anything is padded."""
        parts = super().parts(parts_max)
        return [self.stage] if self.is_cut else parts

    def put(self, number: int, index: int, view: Array) -> None:
        """Write the padded rows of one request for one input."""
        view[...] = self._padding.values[index]
        _copy_into(view, index, self.batch.requests[number].payload[index], self.fits[number])

    def cut(self, outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        """Return views of the outputs of each request, with the padding cut off."""
        views = super().cut(outputs)
        for fit, own in zip(self.fits, views, strict=True):
            if fit is not None:  # If None, it was refused and gets no answer.
                own.update({name: own[name][cut] for name, cut in fit.cuts.items() if name in own})
        return views


def _copy_into(view: Array, index: int, array: Array, fit: Fit | None) -> None:
    """Copy rows into their part of a view."""
    if fit is None:
        raise ValueError("its inputs contradict each other")
    copy_rows(array, view[fit.corners[index]])
