"""To which sizes a dimension is padded: chosen from the sizes that came, and from what batches took.

Fewer sizes share more batches, and each batch costs something whatever is in it; more sizes compute less
padding. Both are counted in ns a request, and the sizes with the least sum are found by dynamic programming.
They are changed rarely, and only for what pays: a shape that is new costs its first run.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import add
from typing import Final, NamedTuple, TypeVar

SIZES_MAX: Final = 16
"""The most sizes that are chosen."""

STEPS_BITS: Final = 4
"""Sizes are distinguished in 2**4 steps from one power of two to the next: of those above 32, what pads a
row to the next step is at most a sixteenth of it."""

BINS_MAX: Final = 64
"""Steps between which is chosen; of more, neighbours that make up little of the work are taken together."""

WINDOW: Final = 8192
"""Requests after which what is remembered counts for half."""

LOOK_FIRST: Final = 512
"""Requests before it is chosen for the first time."""

LOOK_USUAL: Final = 8192
LOOK_MAX: Final = 32768
"""Requests until it is looked again: twice as many after each change; with none it comes to be as usual."""

STRANGE: Final = 512
"""Requests of sizes unlike those that were chosen for, after which it is looked at once: twice as many after
each time that nothing has changed for it."""

GAIN_MIN: Final = 0.05
"""Other sizes have to be expected to take so much less."""

AS_GOOD: Final = 1.01
"""Sets of sizes that cost up to this many times the cheapest count as equal: the one with the fewest wins."""

FORGOTTEN: Final = 1 / 16
"""What counts for less is no longer remembered."""

SPANS_AT_ONCE: Final = 8
"""Steps up to which is counted at once what it takes to pad to them: half a millisecond."""

TOGETHER_MAX: Final = 1 << 14
KNOWN_MAX: Final = 4096

T = TypeVar("T")
Parts = Generator[None, None, T]
"""What is done in parts of less than a millisecond, so that whoever waits for the loop does not wait long."""


def at_once(parts: Parts[T]) -> T:
    """Do all parts, and return what they find."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: T = end.value
            return found


class Costs(NamedTuple):
    """What a batch takes, in ns: something for itself, for each row, and for each unit of its rows."""

    batch_ns: float
    unit_ns: float
    row_ns: float = 0.0

    @classmethod
    def fit(cls, points: Iterable[tuple[int, int, int, int]]) -> "Costs | None":
        """Return what explains the measured times best; ``None`` if there are none.

        Deviations count by their share of what was measured, so that long batches do not decide alone, and
        those that took too long for once hardly count. Where all batches were about as large, half of what
        they took is taken to be for the batch: with other sizes there will be others to learn from.

        :param points: the units of a batch, its rows, the ns that it took, and how many such there were.
        """
        given = [(units, rows, max(took_ns, 1), count) for units, rows, took_ns, count in points if units > 0]
        if not given:
            return None
        # The sums of squares and products of what each batch is: one, its units, its rows, its time.
        sums = [[0.0] * 4 for _ in range(4)]
        for units, rows, took_ns, count in given:
            weight = count / took_ns**2
            what = (1.0, units, rows, took_ns)
            for number, first in enumerate(what):
                line, product = sums[number], weight * first
                for other in range(number, 4):
                    line[other] += product * what[other]
        if len(given) < 3 or max(given)[0] < 2 * min(given)[0]:
            half_ns = sums[0][3] / sums[0][0] / 2
            return cls(half_ns, half_ns * sums[0][0] / sums[0][1])
        found = max((_solved(sums, parts) for parts in PARTS), key=lambda one: one[0])
        return cls(*found[1])

    def ns(self, units: float, rows: float = 0.0) -> float:
        """Return how long a batch of this many units and rows takes."""
        return self.batch_ns + self.unit_ns * units + self.row_ns * rows


PARTS: Final = ((0, 1), (0, 1, 2), (1, 2), (0, 2), (1,), (0,), (2,))
"""The sets of parts that may explain the times. Any part may be missing: one that would have to take less
than nothing costs nothing."""

TELLABLE: Final = 1e-4
"""Parts whose matrix of products, scaled to ones on its diagonal, has a smaller determinant cannot be told
from one another."""


def _solved(sums: Sequence[Sequence[float]], parts: Sequence[int]) -> tuple[float, list[float]]:
    """Return how much of the times some parts explain, and what each of all parts costs then.

    They explain nothing if they cannot be told from one another, or one would take less than nothing.
    """
    scales = [sums[part][part] ** 0.5 for part in parts]
    lines = [
        [
            sums[min(part, other)][max(part, other)] / scale / scales[column]
            for column, other in enumerate(parts)
        ]
        + [sums[part][3] / scale]
        for part, scale in zip(parts, scales, strict=True)
    ]
    count, determinant = len(parts), 1.0
    # The lines are those of a positive definite matrix, so that it takes no exchange of them.
    for number in range(count):
        pivot = lines[number][number]
        determinant *= pivot
        if determinant < TELLABLE:
            return -1.0, [0.0] * 3
        for below in range(number + 1, count):
            share = lines[below][number] / pivot
            lines[below] = [
                own - share * above for own, above in zip(lines[below], lines[number], strict=True)
            ]
    costs, explained = [0.0] * 3, 0.0
    solved = [0.0] * count
    for number in reversed(range(count)):
        known = sum(lines[number][column] * solved[column] for column in range(number + 1, count))
        solved[number] = (lines[number][count] - known) / lines[number][number]
        if solved[number] < 0:
            return -1.0, costs
        costs[parts[number]] = solved[number] / scales[number]
        explained += costs[parts[number]] * sums[parts[number]][3]
    return explained, costs


class _Share(NamedTuple):
    """What goes to one size: its share of the requests, and its rows a request."""

    size: int
    requests: float
    rows: float


class Sizes:
    """The sizes that one dimension is padded to.

    Until enough is known, and for what is unlike all that has come, a size goes to the next power of two.

    :param ranges: the sizes that the model takes, each a smallest and a largest; none: all.
    :param rows_max: rows that a batch holds; ``rows_fixed``: whether it always has as many.
    :param sizes_max: the most sizes that are chosen.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]] = (),
        *,
        rows_max: int = 64,
        rows_fixed: bool = False,
        sizes_max: int = SIZES_MAX,
    ) -> None:
        self._ranges = merged(ranges)
        self._rows_max = rows_max
        self._rows_fixed = rows_fixed
        self._sizes_max = sizes_max
        self.chosen: tuple[int, ...] = ()
        """The sizes that were chosen, rising; none at first."""
        self.changes = 0
        """How often they were."""
        self.reason = "powers of two, until enough is known of the sizes that come and of what batches take"
        """Why they are what they are, in words."""
        # The steps between which all lay that had come when they were chosen.
        self._least, self._most = 0, sys.maxsize
        # Requests and rows by the step that their size is rounded up to.
        self._seen: dict[int, list[float]] = {}
        self._step_of: dict[int, int] = {}
        self._requests = 0.0
        # Batches since the last choice, and the requests in them.
        self._batches = self._batched = 0
        self._since_look = self._strange = 0
        self._pause = LOOK_FIRST
        self._strange_max = STRANGE

    def __repr__(self) -> str:
        return f"<Sizes {self.chosen or 'powers of two'} of {self._ranges or 'any'}>"

    @property
    def largest(self) -> int | None:
        """The largest size that there can be; ``None`` if there is no limit."""
        return self._ranges[-1][1] if self._ranges else None

    @property
    def is_due(self) -> bool:
        """Whether :meth:`look` has something to look at."""
        return self._since_look >= self._pause or self._strange >= self._strange_max

    def rounded(self, size: int) -> int | None:
        """Return to what a size is padded; ``None`` for one beyond the largest."""
        chosen = self.chosen
        number = bisect_left(chosen, size)
        power = _power(size)
        if number == len(chosen) or power < self._least:
            return self._within(size, power)
        return chosen[number]

    def answered(self, requests: Sequence[tuple[int, int]]) -> None:
        """Note the requests of a batch: the size that each had before it was padded, and its rows."""
        steps, seen_by, count = self._step_of, self._seen, len(requests)
        for size, rows in requests:
            step = steps.get(size) or self._step(size)
            if step is None:
                count -= 1
                continue
            seen = seen_by.get(step)
            if seen is None:
                seen = seen_by[step] = [0.0, 0.0]
            seen[0] += 1
            seen[1] += rows
            if step < self._least or step > self._most:
                self._strange += 1
        self._requests += count
        self._since_look += count
        self._batches += 1
        self._batched += count
        if self._requests >= 2 * WINDOW:
            self._forget()

    def look(self, costs: Costs | None, opening_ns: float = 0.0) -> Parts[bool]:
        """Choose anew if that pays; return whether the sizes have changed.

        Requests may be noted between two parts. They count the next time.

        :param costs: what a batch takes; a unit is one of this dimension's size. ``None``: it is not known.
        :param opening_ns: what the first batches of a new size take longer than those after them.
        """
        was_strange = self._strange >= self._strange_max
        self._since_look = self._strange = 0
        if costs is None or not self._seen or not self._batches:
            return False
        seen = {step: (requests, rows) for step, (requests, rows) in self._seen.items()}
        # As if what comes next were as much as what is remembered.
        opening_ns /= self._requests
        together = self._together()
        yield
        used = {self.rounded(step) for step in seen}
        before = self._expected_ns(self._shares(self.rounded, seen), costs, together)
        yield
        found = yield from self._best(costs, together, used, opening_ns, seen)
        shares = self._shares(lambda size: found[bisect_left(found, size)], seen)
        after = self._expected_ns(shares, costs, together)
        gain = before - after - opening_ns * sum(size not in used for size in found)
        if gain <= 0 or gain < GAIN_MIN * before:
            if self._pause > LOOK_USUAL:
                self._pause = max(self._pause // 2, LOOK_USUAL)
            else:
                self._pause = min(2 * self._pause, LOOK_USUAL)
            if was_strange:
                self._strange_max = min(2 * self._strange_max, LOOK_MAX)
            return False
        self.chosen, self._least, self._most = found, min(seen), found[-1]
        self.changes += 1
        middle = found[len(found) // 2]
        self.reason = (
            f"{gain / before:.0%} less time a request is expected than with those before: a batch takes "
            f"{costs.batch_ns / 1e6:.3g} ms, and {middle * costs.unit_ns / 1e6:.3g} ms more for each row of "
            f"{middle}, and {together:.3g} requests are there at a time"
        )
        self._batches = self._batched = 0
        self._pause = min(2 * self._pause, LOOK_MAX)
        self._strange_max = STRANGE
        return True

    # ---- what is expected

    def _shares(
        self, rounded: Callable[[int], int | None], seen: Mapping[int, Sequence[float]]
    ) -> list[_Share]:
        """Return what goes to each size."""
        found: dict[int, list[float]] = {}
        for step, (requests, rows) in sorted(seen.items()):
            size = rounded(step)
            assert size is not None, "what cannot be padded was not noted"
            own = found.setdefault(size, [0.0, 0.0])
            own[0] += requests
            own[1] += rows
        total = sum(requests for requests, _ in seen.values())
        return [_Share(size, requests / total, rows / total) for size, (requests, rows) in found.items()]

    def _expected_ns(self, shares: Sequence[_Share], costs: Costs, together: float) -> float:
        """Return what a request takes with these sizes."""
        return sum(
            self._share_ns(share.requests, share.rows, share.size, costs, together) for share in shares
        )

    def _share_ns(self, requests: float, rows: float, size: int, costs: Costs, together: float) -> float:
        """Return what the part of the requests that is padded to one size takes, for each of all requests."""
        batches = self._batches_of(requests, rows, together) / together
        if self._rows_fixed:
            return batches * costs.ns(self._rows_max * size, self._rows_max)
        return batches * costs.batch_ns + rows * size * costs.unit_ns

    def _batches_of(self, requests: float, rows: float, together: float) -> float:
        """Return how many batches of one size are expected in a round of all sizes.

        None, if nobody of those who are there together has it; else one, or as many as it takes to hold them.
        """
        some: float = 1 - (1 - min(requests, 1.0)) ** together
        return max(some, together * rows / self._rows_max)

    def _together(self) -> float:
        """Return how many requests are there together, if that fills batches as they are filled now."""
        filled = self._batched / self._batches
        shares = self._shares(self.rounded, self._seen)
        least, most = 1.0, float(TOGETHER_MAX)
        for _ in range(24):
            middle = (least * most) ** 0.5
            batches = sum(self._batches_of(share.requests, share.rows, middle) for share in shares)
            if middle / batches < filled:
                least = middle
            else:
                most = middle
        return least

    def _best(
        self,
        costs: Costs,
        together: float,
        used: Collection[int | None],
        opening_ns: float,
        seen: Mapping[int, Sequence[float]],
    ) -> Parts[tuple[int, ...]]:
        """Return the fewest sizes with which a request takes about the least.

        :param used: the sizes that are in use; ``opening_ns``: what another one costs each request.
        :param seen: requests and rows by their step.
        """
        bins = _bins(seen)
        edges = [size for size, _, _ in bins]
        total = sum(count for _, count, _ in bins)
        requests = [0.0, *accumulate(count / total for _, count, _ in bins)]
        rows = [0.0, *accumulate(count / total for _, _, count in bins)]
        # What it takes to pad all from one edge (not included) to another one to that.
        spans = []
        for end, size in enumerate(edges, start=1):
            opened_ns = 0.0 if size in used else opening_ns
            part = partial(self._share_ns, size=size, costs=costs, together=together)
            spans.append(
                [
                    part(requests[end] - requests[start], rows[end] - rows[start]) + opened_ns
                    for start in range(end)
                ]
            )
            if not end % SPANS_AT_ONCE:
                yield
        # The least with one size more in each round, for all up to each edge.
        least = [0.0] + [float("inf")] * len(edges)
        rounds: list[list[int]] = []
        totals: list[float] = []
        for _ in range(min(self._sizes_max, len(edges))):
            following, before = [float("inf")], [0]
            for own in spans:
                sums = list(map(add, least, own))
                smallest = min(sums)
                following.append(smallest)
                before.append(sums.index(smallest))
            least = following
            rounds.append(before)
            totals.append(least[-1])
            yield
        enough = next(number for number, total in enumerate(totals) if total <= AS_GOOD * min(totals))
        found, end = [], len(edges)
        for before in reversed(rounds[: enough + 1]):
            found.append(edges[end - 1])
            end = before[end]
        return tuple(reversed(found))

    # ---- steps

    def _step(self, size: int) -> int | None:
        """Return the step that a size is rounded up to; ``None`` for one that is too large."""
        found = self._within(size, _step(size))
        if found is not None:
            if len(self._step_of) >= KNOWN_MAX:
                self._step_of.clear()
            self._step_of[size] = found
        return found

    def _within(self, size: int, padded: int) -> int | None:
        """Return the nearest to ``padded`` that the model takes and that is not below ``size``."""
        if not self._ranges:
            return padded
        for least, most in self._ranges:
            if size <= most:
                return min(max(padded, least), most)
        return None

    def _forget(self) -> None:
        """Let what is remembered count for half."""
        self._seen = {
            step: [requests / 2, rows / 2]
            for step, (requests, rows) in self._seen.items()
            if requests / 2 >= FORGOTTEN
        }
        self._requests = sum(requests for requests, _ in self._seen.values())


def _bins(seen: Mapping[int, Sequence[float]]) -> list[tuple[int, float, float]]:
    """Return the steps, their requests and their rows, of many taken together."""
    bins = [(step, requests, rows) for step, (requests, rows) in sorted(seen.items())]
    if len(bins) <= BINS_MAX:
        return bins
    most = 2 * sum(step * rows for step, _, rows in bins) / BINS_MAX
    found = [bins[0]]
    left = len(bins) - BINS_MAX
    for step, requests, rows in bins[1:]:
        _, requests_before, rows_before = found[-1]
        if left and step * (rows_before + rows) <= most:
            found[-1] = step, requests_before + requests, rows_before + rows
            left -= 1
        else:
            found.append((step, requests, rows))
    return found


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of whole numbers in rising order, those that touch as one; empty ones are left out."""
    found: list[tuple[int, int]] = []
    for least, most in sorted(ranges):
        if least > most:
            continue
        if found and least <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], most)
        else:
            found.append((least, most))
    return tuple(found)


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


def _step(size: int) -> int:
    """Return the next step: each whole number up to 32, and then 16 from one power of two to the next."""
    if size <= 1:
        return 1
    bits = max((size - 1).bit_length() - STEPS_BITS - 1, 0)
    return -(-size >> bits) << bits
