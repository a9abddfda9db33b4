"""Criteria for checking a run: ``p99<20ms``, or ``p99>+10%`` relative to a baseline. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asynctrt.errors import OptionsError

UNITS_MS: Final = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
PERCENTILES: Final = ("p50", "p90", "p95", "p99", "p99.9", "p99.99")
LATENCIES: Final = (*PERCENTILES, "mean", "max")
"""Latency figures, in ms."""
FIGURES: Final = (*LATENCIES, "throughput", "goodput", "errors")
"""Figures that a criterion may name. ``errors`` is a share of the requests; throughput and goodput are in
requests/s."""

SHAPE: Final = re.compile(
    r"(?:(.*\S)\s*:)?\s*([a-z]+[\d.]*)\s*([<>])\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*(%|[a-zµ]*)\s*"
)


@dataclass(frozen=True, slots=True)
class Criterion:
    """Compare a figure with a limit.

    :param step: the step that the figure belongs to; empty for whole requests.
    :param limit: in ms for latencies, requests/s for throughput and goodput, a share for errors. If the
        criterion is relative, the change as a share of the baseline: ``+0.1`` is 10% more.
    """

    text: str
    step: str
    figure: str
    sign: str
    """``<`` or ``>``."""
    limit: float
    is_relative: bool

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Criterion":
        """Parse ``p99<20ms``, ``errors<0.1%``, ``throughput>1000``; relative with a sign: ``p99>+10%``; for a
        step with its name, ``login:p99<50ms``.

        :raises OptionsError: for anything else.
        """
        found = SHAPE.fullmatch(text)
        if found is None:
            raise OptionsError(f"{text!r} is not a criterion: write p99<20ms, errors<0.1% or p99>+10%")
        text = text.strip()
        step, figure, sign, plus, number, unit = found.groups()
        if figure not in FIGURES:
            raise OptionsError(f"{text!r}: unknown figure {figure!r}; valid figures: {', '.join(FIGURES)}")
        if step and figure in ("throughput", "goodput"):
            raise OptionsError(f"{text!r}: a step has latencies and errors, but no {figure}")
        limit = float(number)
        if plus:
            if unit != "%":
                raise OptionsError(
                    f"{text!r}: a change over a baseline must be in percent, as in {figure}>+10%"
                )
            signed = limit / 100 if plus == "+" else -limit / 100
            return cls(text, step or "", figure, sign, signed, is_relative=True)
        if figure in LATENCIES:
            if unit not in UNITS_MS:
                raise OptionsError(f"{text!r}: a latency needs a unit: {', '.join(UNITS_MS)}")
            limit *= UNITS_MS[unit]
        elif figure == "errors" and unit == "%":
            limit /= 100
        elif unit:
            raise OptionsError(f"{text!r}: {figure} does not take the unit {unit!r}")
        return cls(text, step or "", figure, sign, limit, is_relative=False)

    @property
    def key(self) -> str:
        """The name of its figure among a run's: ``p99``, or ``login p99`` for a step."""
        return f"{self.step} {self.figure}" if self.step else self.figure

    def compare(self, value: float, baseline: float | None = None) -> bool:
        """Return whether a value, or for a relative criterion its change over the baseline, fulfils it."""
        if self.is_relative:
            assert baseline is not None
            # Any change from a baseline of 0 is infinite.
            value = (
                (value - baseline) / baseline if baseline else (0.0 if value == baseline else float("inf"))
            )
        return value < self.limit if self.sign == "<" else value > self.limit


def parse_slo(texts: Iterable[str]) -> tuple[Criterion, ...]:
    """Parse the criteria that a run must meet. One text may hold several, separated by commas.

    :raises OptionsError: for an invalid, relative or reversed criterion.
    """
    criteria = tuple(Criterion.parse(part) for text in texts for part in text.split(","))
    for criterion in criteria:
        if criterion.is_relative:
            raise OptionsError(
                f"{criterion}: an slo needs an absolute limit, as in p99<20ms; a relative one is for "
                "asynctrt compare"
            )
        if criterion.sign != ("<" if criterion.figure not in ("throughput", "goodput") else ">"):
            raise OptionsError(
                f"{criterion}: an slo states what is good, and this states what is bad: reverse the sign"
            )
    return criteria


def latency_target_ms(criteria: Iterable[Criterion]) -> float | None:
    """Return the latency limit for goodput: the largest of the percentile and ``max`` limits."""
    timed = (*PERCENTILES, "max")
    limits = [item.limit for item in criteria if item.figure in timed and not item.step]
    return max(limits, default=None)
