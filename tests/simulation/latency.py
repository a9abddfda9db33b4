"""What a batch costs on a simulated device, by its rows."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asynctrt.scheduling.concurrency import Lanes, choose_lanes


class Cost(NamedTuple):
    """How long a batch takes, in ns."""

    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int

    @property
    def total_ns(self) -> int:
        """The three together: what it takes alone on the device."""
        return self.copy_in_ns + self.compute_ns + self.copy_out_ns


class Entry(NamedTuple):
    """What batches of one size cost, in ms."""

    rows: int
    copy_in_ms: float
    compute_ms: float
    copy_out_ms: float


class CostTable:
    """Costs by rows: straight lines between the sizes that are known, and beyond them the nearest line."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(sorted(entries))
        self._rows = [entry.rows for entry in self.entries]
        self._known: dict[int, Cost] = {}

    def cost(self, rows: int) -> Cost:
        """Return the cost of a batch of ``rows``."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._interpolated(rows)
        return known

    def _interpolated(self, rows: int) -> Cost:
        entries = self.entries
        at = bisect_left(self._rows, rows)
        if len(entries) == 1:
            # One size says nothing about others: those take as long, as on a device that is not full.
            low = high = entries[0]
        elif at == 0:
            low, high = entries[0], entries[1]
        else:
            at = min(at, len(entries) - 1)
            low, high = entries[at - 1], entries[at]
        share = (rows - low.rows) / (high.rows - low.rows) if high is not low else 0.0
        values = []
        for before, after in zip(low[1:], high[1:], strict=True):
            # A line that falls must not reach 0 or less beyond the sizes that are known.
            least = min(before, after) / 4 if share < 0 or share > 1 else 0.0
            values.append(round(max(before + (after - before) * share, least) * 1e6))
        return Cost(*values)


@dataclass(frozen=True)
class LatencyModel:
    """How long batches take on a device, and how those beside one another hinder each other.

    :param table: the costs of every shape that has none of its own in ``shapes``.
    :param lanes: batches that compute at once where there are no arenas: threads of a host device.
    :param interference: how much longer a batch computes for each other one that computes beside it: 0, not
        at all; 1, as long as one after the other.
    :param jitter: the standard deviation of the computing, as a share of its mean (lognormal).
    """

    table: CostTable
    shapes: Mapping[str, CostTable] = field(default_factory=dict)
    lanes: int = 1
    interference: float = 0.0
    jitter: float = 0.0

    def cost(self, shape: object, rows: int) -> Cost:
        """Return the cost of a batch without jitter."""
        return self.shapes.get(str(shape), self.table).cost(rows) if self.shapes else self.table.cost(rows)

    def lanes_that_pay(self, rows_max: int, lanes_max: int) -> Lanes:
        """Return the lanes that an engine measures when it opens."""

        def rate(rows: int, lanes: int) -> float:
            return rows * lanes / (1 + self.interference * (lanes - 1)) / self.table.cost(rows).compute_ns

        return choose_lanes(sorted({1, rows_max}), rate, rows_max, lanes_max)


def linear(*batches: tuple[float, ...], **more: float) -> LatencyModel:
    """Return the model of batches, each given as its rows and its ms to compute, copy in and copy out."""
    entries = [
        Entry(int(rows), copies[0] if copies else 0.0, compute_ms, copies[1] if len(copies) > 1 else 0.0)
        for rows, compute_ms, *copies in batches
    ]
    return LatencyModel(CostTable(entries), **more)
