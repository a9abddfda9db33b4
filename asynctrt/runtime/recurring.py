"""Decides which shapes of rows are worth dedicated contexts: shapes that recur often."""

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Final

SHAPES_MAX: Final = 8
"""The most shapes that are specialised at once, because each needs memory and build time for all of its
sizes. The number was not tuned."""

OFTEN: Final = 16
"""A shape recurs only if at least this many recent batches had it, so that a few requests at the start do not
trigger a build, which may take seconds. The number was not tuned."""

SHARE_MIN: Final = 1 / 16
"""A shape recurs only if at least this share of recent batches had it: a rarer one could gain little, and
takes memory. The share was not tuned."""

WINDOW: Final = 512
"""After this many batches, earlier ones count half, so that shapes which no longer come make room. It is long
enough for a shape with a share of ``SHARE_MIN`` to come ``OFTEN`` times."""

SEEN_MAX: Final = 1024
"""The most shapes that are remembered. It bounds memory, and is more than the shapes of ``WINDOW``
batches."""

HYSTERESIS: Final = 2
"""A shape replaces another one only if it came this many times as often, so that two equally common shapes do
not replace each other again and again."""


class RecurringShapes:
    """Counts the shapes of batches, and decides which shape is specialised next and which one it replaces.

    :param shapes_max: the most shapes that are specialised at once.
    """

    def __init__(self, shapes_max: int = SHAPES_MAX) -> None:
        self._shapes_max = shapes_max
        # In the order in which they came last, the latest at the end.
        self._counts: OrderedDict[Hashable, float] = OrderedDict()
        self._total = 0.0
        self._refused: set[Hashable] = set()

    def __repr__(self) -> str:
        return f"<RecurringShapes {len(self._counts)} of {self._total:.0f} batches>"

    def note(self, shape: Hashable) -> bool:
        """Count a batch of a shape; return whether the shape recurs."""
        count = self._counts[shape] = self._counts.get(shape, 0.0) + 1
        self._counts.move_to_end(shape)
        self._total += 1
        if len(self._counts) > SEEN_MAX:
            self._total -= self._counts.popitem(last=False)[1]
        if self._total >= WINDOW:
            self._forget()
        return count >= OFTEN and count >= SHARE_MIN * self._total and shape not in self._refused

    def refuse(self, shape: Hashable) -> None:
        """Never again report a shape as recurring: it could not be specialised."""
        if len(self._refused) >= SEEN_MAX:
            self._refused.clear()
        self._refused.add(shape)

    def victim(self, shape: Hashable, specialised: Collection[Hashable]) -> Hashable | None:
        """Return the specialised shape to replace with ``shape``; ``None`` if all of them come about as
        often.

        Of several, return the one that has not come for the longest time.
        """
        least = self._counts.get(shape, 0.0) / HYSTERESIS
        order = [other for other in self._counts if other in specialised]
        gone = [other for other in specialised if other not in self._counts]
        return next((other for other in [*gone, *order] if self._counts.get(other, 0.0) <= least), None)

    def limit(self, shapes_max: int) -> None:
        """Specialise at most this many shapes from now on, because there is no room for more."""
        self._shapes_max = shapes_max

    def is_full(self, specialised: Collection[Hashable]) -> bool:
        """Return whether the maximum number of shapes is specialised."""
        return len(specialised) >= self._shapes_max

    def _forget(self) -> None:
        """Let all batches so far count half."""
        for shape, count in tuple(self._counts.items()):
            if count < 1:
                del self._counts[shape]
            else:
                self._counts[shape] = count / 2
        self._total = sum(self._counts.values())
