"""The sizes that a dimension is padded to, unless the options give them: powers of two, and some between."""

from collections.abc import Iterable, Sequence
from typing import Final

STEPS_WHERE_SHAPES_ARE_FREE: Final = 8
"""The sizes from one power of two to the next where another shape costs nothing, as on the host: padding a
row to the next one adds an eighth to it at most. Rows of neighbouring sizes share batches where that pays."""


class Sizes:
    """The sizes that one dimension is padded to, as far as the model supports them.

    :param ranges: the sizes that the model supports, each a smallest and a largest; none: all.
    :param steps: how many sizes there are from one power of two to the next.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] = (), steps: int = 1) -> None:
        self._ranges = merged(ranges)
        self.steps = steps
        self.proven: int | None = None
        """The largest size that is known to run, beyond which no row is padded; ``None``: any size runs."""

    def __repr__(self) -> str:
        return f"<Sizes of {self._ranges or 'any'}, {self.steps} from one power of two to the next>"

    @property
    def largest(self) -> int | None:
        """The largest size that the model supports; ``None`` if there is no limit."""
        return self._ranges[-1][1] if self._ranges else None

    def rounded(self, size: int) -> int | None:
        """Return the size that a row is padded to; ``None`` for one beyond the largest."""
        power = 1 << (size - 1).bit_length() if size > 1 else 1
        step = max(power // 2 // self.steps, 1)
        padded = max(-(-size // step) * step, 1)
        if not self._ranges:
            return padded if self.proven is None else min(padded, max(size, self.proven))
        for least, most in self._ranges:
            if size <= most:
                return min(max(padded, least), most)
        return None

    def ran(self, size: int) -> bool:
        """Note that rows of a size ran; return whether that changes the sizes to pad to."""
        if self.proven is None or size <= self.proven or self._ranges:
            return False
        self.proven = size
        return True


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
