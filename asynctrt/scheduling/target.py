"""A latency target in words: ``p99<20ms``."""

import re
from fractions import Fraction
from typing import Final, NamedTuple

from asynctrt.errors import SHOWN_MAX, OptionsError

SHAPE: Final = re.compile(r"\s*p(\d{1,2}(?:\.\d{1,2})?)\s*<\s*(\d{1,15}(?:\.\d{1,15})?)\s*(us|µs|ms|s)\s*")
UNITS_NS: Final = {"us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
WITHIN_NS_MAX: Final = 2**62
"""146 years: added to a monotonic clock it still fits into 63 bits."""


class Target(NamedTuple):
    """A share of the requests, and within which time they are to be answered."""

    percentile: float
    """As a share: 0.99."""
    within_ns: int

    def __str__(self) -> str:
        # No digit is lost: settings are kept as this text, and parsed again.
        whole, rest = divmod(self.within_ns, UNITS_NS["ms"])
        within = f"{whole}.{rest:06}".rstrip("0").rstrip(".")
        return f"p{100 * self.percentile:g}<{within}ms"

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse ``p99<20ms``.

        :raises OptionsError: for anything else.
        """
        found = SHAPE.fullmatch(text)
        percentile = round(float(found[1]) / 100, 6) if found else 0.0
        within_ns = round(Fraction(found[2]) * UNITS_NS[found[3]]) if found else 0
        if not 0.5 <= percentile < 1 or not 0 < within_ns <= WITHIN_NS_MAX:
            raise OptionsError(
                f"{text[:SHOWN_MAX]!r} is not a latency target: write p99<20ms, a percentile from p50 on "
                "and a time in us, ms or s"
            )
        return cls(percentile, within_ns)
