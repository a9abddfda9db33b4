"""A latency target in words: ``p99<20ms``."""

import re
from typing import Final, NamedTuple

from asynctrt.errors import OptionsError

SHAPE: Final = re.compile(r"\s*p(\d{1,2}(?:\.\d{1,2})?)\s*<\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)\s*")
UNITS_NS: Final = {"us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}


class Target(NamedTuple):
    """A share of the requests, and within which time they are to be answered."""

    percentile: float
    """As a share: 0.99."""
    within_ns: int

    def __str__(self) -> str:
        return f"p{100 * self.percentile:g}<{self.within_ns / 1e6:g}ms"

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse ``p99<20ms``.

        :raises OptionsError: for anything else.
        """
        found = SHAPE.fullmatch(text)
        percentile = round(float(found[1]) / 100, 6) if found else 0.0
        within_ns = round(float(found[2]) * UNITS_NS[found[3]]) if found else 0
        if not 0.5 <= percentile < 1 or within_ns <= 0:
            raise OptionsError(
                f"{text!r} is not a latency target: write p99<20ms, a percentile from p50 on and a time in "
                "us, ms or s"
            )
        return cls(percentile, within_ns)
