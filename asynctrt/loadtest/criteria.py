"""What a run is held to: ``p99<20ms`` for one run, ``p99>+10%`` against a baseline. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from asynctrt.errors import OptionsError

UNITS_MS: Final = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
PERCENTILES: Final = ("p50", "p90", "p95", "p99", "p99.9", "p99.99")
LATENCIES: Final = (*PERCENTILES, "mean", "max")
"""Figures of the latency, in ms."""
FIGURES: Final = (*LATENCIES, "throughput", "goodput", "errors")
"""What a criterion may be about. ``errors`` is a share of the requests; the other two are requests/s."""

SHAPE: Final = re.compile(r"\s*([a-z]+[\d.]*)\s*([<>])\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*(%|[a-zµ]*)\s*")


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure, and what it is compared with.

    :param limit: in ms for latencies, requests/s for throughput and goodput, a share for errors. For one
        that is relative, the change as a share of the baseline: ``+0.1`` is 10% more.
    """

    text: str
    figure: str
    sign: Literal["<", ">"]
    limit: float
    is_relative: bool

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Criterion":
        """``p99<20ms``, ``errors<0.1%``, ``throughput>1000``; relative with a sign: ``p99>+10%``.

        :raises OptionsError: for anything else.
        """
        found = SHAPE.fullmatch(text)
        if found is None:
            raise OptionsError(f"{text!r} is no criterion. It is like p99<20ms, errors<0.1% or p99>+10%")
        text = text.strip()
        figure, sign, plus, number, unit = found.groups()
        if figure not in FIGURES:
            raise OptionsError(f"{text!r}: {figure!r} is no figure. There are: {', '.join(FIGURES)}")
        limit = float(number)
        if plus:
            if unit != "%":
                raise OptionsError(
                    f"{text!r}: a change against a baseline is in percent, as in {figure}>+10%"
                )
            signed = limit / 100 if plus == "+" else -limit / 100
            return cls(text, figure, _sign(sign), signed, is_relative=True)
        if figure in LATENCIES:
            if unit not in UNITS_MS:
                raise OptionsError(f"{text!r}: a latency has a unit: {', '.join(UNITS_MS)}")
            limit *= UNITS_MS[unit]
        elif figure == "errors" and unit == "%":
            limit /= 100
        elif unit:
            raise OptionsError(f"{text!r}: {figure} has no unit {unit!r}")
        return cls(text, figure, _sign(sign), limit, is_relative=False)

    def compare(self, value: float, baseline: float | None = None) -> bool:
        """Whether it is true of a value; of its change over the baseline, if it is relative."""
        if self.is_relative:
            assert baseline is not None
            # Without a baseline other than 0 every change is without bounds.
            value = (
                (value - baseline) / baseline if baseline else (0.0 if value == baseline else float("inf"))
            )
        return value < self.limit if self.sign == "<" else value > self.limit


def parse_slo(texts: Iterable[str]) -> tuple[Criterion, ...]:
    """What a run has to hold. Several may stand in one text, with commas between them.

    :raises OptionsError: for one that is none, or that is relative.
    """
    criteria = tuple(Criterion.parse(part) for text in texts for part in text.split(","))
    for criterion in criteria:
        if criterion.is_relative:
            raise OptionsError(f"{criterion}: a target is a value, as in p99<20ms; a change is for --fail-if")
        if criterion.sign != ("<" if criterion.figure not in ("throughput", "goodput") else ">"):
            raise OptionsError(f"{criterion}: a target says what is good, and this is what is bad")
    return criteria


def latency_target_ms(criteria: Iterable[Criterion]) -> float | None:
    """The time within which an answer is good, for goodput: the largest latency that is asked for."""
    limits = [item.limit for item in criteria if item.figure in PERCENTILES or item.figure == "max"]
    return max(limits) if limits else None


def failures(
    criteria: Iterable[Criterion], figures: Mapping[str, Any], baseline: Mapping[str, Any] | None
) -> list[str]:
    """Which of the ``--fail-if`` criteria are true, with the values; one whose figure is missing is, too."""
    found = []
    for item in criteria:
        value = figures.get(item.figure)
        before = baseline.get(item.figure) if baseline is not None else None
        if value is None or (item.is_relative and before is None):
            where = "this run" if value is None else "the baseline"
            found.append(f"{item}: {where} has no {item.figure}, so it cannot be told")
        elif item.compare(value, before):
            against = f", against {before:,.6g} in the baseline" if item.is_relative else ""
            found.append(f"{item}: {item.figure} is {value:,.6g}{against}")
    return found


def _sign(sign: str) -> Literal["<", ">"]:
    return "<" if sign == "<" else ">"
