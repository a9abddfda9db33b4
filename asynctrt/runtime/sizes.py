"""The choice of sizes to pad to, from observed batches, repeated now and then."""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Final

from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.pad_sizes import Padding
from asynctrt.runtime.padding import PaddedSource
from asynctrt.scheduling.estimates import QUANTILE, LatencyHistory
from asynctrt.scheduling.sizes import Costs, Parts

OPENED_MAX: Final = 1024
"""The most pairs of a context and a shape to remember as run before."""

FIRST_MAX: Final = 32
"""The most first runs to remember."""

POINTS_MAX: Final = 256
"""The most kinds of batches to fit the cost of a batch to: each takes some microseconds."""

MEAN_OVER: Final = 64
"""About how many batches to average over."""

logger = logging.getLogger("asynctrt")


class _Over:
    """Marks the end of a choice."""


class SizeChooser:
    """Chooses the sizes that the dimensions of one model are padded to.

    :param padding: the padding whose sizes change.
    :param contexts: how many contexts run a new shape for the first time.
    :param call_soon: the loop's: calls a function with arguments after the callbacks that wait already.
    """

    def __init__(self, name: str, padding: Padding, contexts: int, call_soon: Callable[..., object]) -> None:
        self._name = name
        self._padding = padding
        self._contexts = contexts
        self._times = LatencyHistory()
        self._opened: OrderedDict[tuple[int, Hashable], None] = OrderedDict()
        # The first runs of shapes: their units, their rows, and their time in ns.
        self._first: deque[tuple[int, int, int]] = deque(maxlen=FIRST_MAX)
        # For each dimension, the average product of a row's other dynamic sizes.
        self._others = dict.fromkeys(padding.chosen, 1.0)
        self._batches = 0
        self._call_soon = call_soon
        # The dimensions whose sizes are being chosen.
        self._looking: set[tuple[str, ...]] = set()

    def answered(self, flight: InFlight) -> None:
        """Record an answered batch, and choose again when due, in one part per iteration of the loop."""
        source, batch = flight.source, flight.batch
        if not isinstance(source, PaddedSource):
            return
        if batch.is_timed:
            self._observe(flight)
        share = 1 / min(self._batches + 1, MEAN_OVER)
        self._batches += 1
        shape = batch.key.shape
        assert isinstance(shape, tuple)
        units = self._padding.units_of(shape)
        for dims, sizes in self._padding.chosen.items():
            number, axis = self._padding.sources[dims[0]]
            sizes.answered(
                [
                    (fit.dims[number][axis - 1], request.rows)
                    for request, fit in zip(batch.requests, source.fits, strict=True)
                    if fit is not None
                ]
            )
            others = units / max(dict(shape)[dims[0]], 1)
            self._others[dims] += share * (others - self._others[dims])
        for dims, sizes in self._padding.chosen.items():
            if sizes.is_due and dims not in self._looking:
                self._looking.add(dims)
                self._go_on(dims, self._look(dims))

    def _observe(self, flight: InFlight) -> None:
        """Record the time of a batch: on the device, and for the copies to and from it."""
        batch, record = flight.batch, flight.record
        took_ns = record.copy_in_ns + record.compute_ns + record.copy_out_ns
        opened = batch.context, batch.key.shape
        if opened not in self._opened:
            self._opened[opened] = None
            if len(self._opened) > OPENED_MAX:
                self._opened.popitem(last=False)
            units = self._padding.units_of(batch.key.shape) * batch.rows_run
            self._first.append((units, batch.rows_run, took_ns))
        self._times.observe(batch.key.shape, batch.rows_run, took_ns)

    def _go_on(self, dims: tuple[str, ...], parts: Parts[None]) -> None:
        """Run the next part of a choice. All parts at once would block the loop for 10 ms."""
        is_over = True
        try:
            is_over = next(parts, _Over) is _Over
        finally:
            if is_over:
                self._looking.discard(dims)
        if not is_over:
            self._call_soon(self._go_on, dims, parts)

    def _look(self, dims: tuple[str, ...]) -> Parts[None]:
        """Choose the sizes of a dimension again, if that pays off."""
        sizes, units_of = self._padding.chosen[dims], self._padding.units_of
        points = [
            (units_of(shape) * rows, rows, took_ns, count)
            for shape, rows, took_ns, count in self._times.measured(POINTS_MAX)
        ]
        yield
        costs = Costs.fit(points)
        yield
        opening_ns = 0.0
        if costs is not None:
            # A low quantile, as some of them were late for other reasons than being the first.
            late_ns = sorted(max(took_ns - costs.ns(units, rows), 0) for units, rows, took_ns in self._first)
            opening_ns = self._contexts * late_ns[len(late_ns) // QUANTILE]
            costs = costs._replace(unit_ns=costs.unit_ns * self._others[dims])
        if (yield from sizes.look(costs, opening_ns)):
            self._padding.changes += 1
            logger.info(
                "%r: %s is padded to %s from now on: %s",
                self._name,
                "=".join(dims),
                ", ".join(map(str, sizes.chosen)),
                sizes.reason,
            )
