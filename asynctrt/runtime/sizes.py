"""The sizes that a dimension is padded to if the options give none: powers of two, and some in between."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

STEPS_WHERE_SHAPES_ARE_FREE: Final = 8
"""The number of sizes from one power of two to the next, if more shapes cost nothing, as on the host. Padding
a row to the next size then adds at most an eighth to it. Rows of neighbouring sizes share batches if that
pays off."""

RangesOf = Callable[[str], Sequence[tuple[int, int]]]
"""Returns the range of sizes of a dimension in each profile of the model."""


class Sizes:
    """The sizes that one dimension is padded to, as far as the model supports them.

    :param ranges: the smallest and largest sizes of the ranges that the model supports; all sizes if empty.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] = ()) -> None:
        self._ranges = merged(ranges)
        self.steps = 1
        """How many sizes there are from one power of two to the next."""
        self.proven: int | None = None
        """The largest size that is known to run. No row is padded beyond it; ``None`` if any size runs."""

    @classmethod
    def within(cls, dims: Sequence[str], ranges_of: "RangesOf | None") -> "Sizes":
        """Return the sizes for dimensions that share them, within the profiles of the model."""
        if ranges_of is None:
            return cls()
        each = zip(*[ranges_of(dim) for dim in dims], strict=True)
        return cls([(max(least for least, _ in same), min(most for _, most in same)) for same in each])

    def __repr__(self) -> str:
        return f"<Sizes of {self._ranges or 'any'}, {self.steps} from one power of two to the next>"

    @property
    def largest(self) -> int | None:
        """The largest size that the model supports; ``None`` if there is no limit."""
        return self._ranges[-1][1] if self._ranges else None

    def rounded(self, size: int) -> int | None:
        """Return the size to pad a row to; ``None`` if it is beyond the largest size."""
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
        """Note that rows of a size ran; return whether this changes the sizes to pad to."""
        if self.proven is None or size <= self.proven or self._ranges:
            return False
        self.proven = size
        return True


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of integers in rising order; join ranges that touch, and leave out empty ones."""
    found: list[tuple[int, int]] = []
    for least, most in sorted(ranges):
        if least > most:
            continue
        if found and least <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], most)
        else:
            found.append((least, most))
    return tuple(found)
