"""Arrival times of requests: a process of rate 1 (Poisson or even), stretched by a varying rate. Pure.

Mapping the times of a process of rate 1 through the inverse of the integral of any rate gives a process of
that rate. So the shape of the rate (ramp, stages), a :class:`LoadProfile`, is separate from the
spacing of the requests (Poisson or constant).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from asynctrt._util.validation import seconds_of
from asynctrt.errors import OptionsError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Process = Literal["poisson", "constant"]

Stage = tuple[list[float], float | None]
"""The level of a stage, or the first and the last; and its length in seconds, if it has its own."""

RATE_MAX: Final = 1e8
"""Highest rate in arrivals/s. Above it, successive times would hardly differ in ns."""
BLOCK: Final = 4096
"""Arrivals generated at once, and answers counted at once: 0.1 ms in which nothing is sent. Smaller blocks
cost more per arrival, and the intermediate results of counting larger ones no longer fit in the cache."""
KNOTS: Final = 1000
"""Number of constant pieces that approximate a ramp."""

LEVELS: Final = re.compile(r"\d+(?:\.\d+)?(?:e\d+)?")


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """Describe a level (arrivals/s, or callers) over time as pieces of constant level.

    :param ends_s: the end of each piece, ascending; the last is the end of the profile.
    :param levels: the level of each piece.
    """

    ends_s: Floats
    levels: Floats
    _sums: Floats = field(init=False)

    def __post_init__(self) -> None:
        starts = np.concatenate(([0.0], self.ends_s[:-1]))
        object.__setattr__(self, "_sums", np.cumsum((self.ends_s - starts) * self.levels))

    @classmethod
    def parse(cls, text: str, seconds: float) -> "LoadProfile":
        """Parse ``1000``, a ramp ``100..2000``, or stages, ``100,500..1000,50``.

        Stages have equal lengths, or each its own: ``100@30s,100..500@1m``. If ``seconds`` is longer than
        these together, the time before them is a warm-up at the first level.

        :raises OptionsError: for anything else, and for a level that is 0 or too high.
        """
        stages, total_s = parse_stages(text)
        if not 0 < max(max(levels) for levels, _ in stages) <= RATE_MAX:
            raise OptionsError(
                f"{text!r}: a rate or a number of callers must be above 0 and at most {RATE_MAX:,.0f}"
            )
        now_s, ends, found = 0.0, [], []
        if total_s is not None and total_s < seconds:
            levels, own_s = stages[0]
            stages.insert(0, (levels[:1], seconds - total_s))
            if len(levels) == 1:  # One constant level stays one.
                stages[:2] = [(levels, seconds - total_s + (own_s or 0.0))]
        for levels, own_s in stages:
            length_s = seconds / len(stages) if own_s is None else own_s
            pieces = KNOTS if len(levels) == 2 else 1
            pieces_s = np.linspace(0, length_s, pieces + 1)
            ends.append(now_s + pieces_s[1:])
            found.append(
                np.interp((pieces_s[1:] + pieces_s[:-1]) / 2, (0, length_s), (levels[0], levels[-1]))
            )
            now_s += length_s
        return cls(np.concatenate(ends), np.concatenate(found))

    @property
    def total(self) -> float:
        """The integral of the level: the expected number of arrivals."""
        return float(self._sums[-1])

    @property
    def largest(self) -> float:
        """The highest level."""
        return float(self.levels.max())

    def at(self, seconds: float) -> float:
        """Return the level at a time. After the end, this is the last level."""
        place = int(np.searchsorted(self.ends_s, seconds, "right"))
        return float(self.levels[min(place, len(self.levels) - 1)])

    def times_s(self, sums: Floats) -> Floats:
        """Return the times at which the integral reaches each of ``sums``."""
        return np.interp(sums, np.concatenate(([0.0], self._sums)), np.concatenate(([0.0], self.ends_s)))


def parse_stages(text: str) -> tuple[list[Stage], float | None]:
    """Return the stages of a profile, and the length of all of them; ``None`` if they have none.

    :raises OptionsError: if only some of them have one, or the text is not a profile.
    """
    stages = [_stage(part, text) for part in text.split(",")]
    known = [length_s for _, length_s in stages if length_s is not None]
    if known and len(known) < len(stages):
        raise OptionsError(f"{text!r}: give every stage a length, as in 100@30s,500@1m, or none")
    return stages, sum(known) if known else None


def _stage(part: str, text: str) -> Stage:
    """Parse ``100``, ``100..500`` or either with its length, ``100@30s``."""
    shown, mark, length = part.partition("@")
    levels = [level.strip() for level in shown.split("..")]
    try:
        length_s = seconds_of(length.strip()) if mark else None
        if len(levels) > 2 or not all(LEVELS.fullmatch(level) for level in levels) or length_s == 0:
            raise ValueError(part)
    except ValueError as error:
        raise OptionsError(
            f"{text!r} is not a rate or a number of callers: write 1000, a ramp 100..2000, stages "
            "100,500,1000, or with lengths, 100@30s,100..500@1m"
        ) from error
    return [float(level) for level in levels], length_s


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Hold a block of arrivals: when each is due, and which sample it sends.

    :param due_ns: the due times from the start of the run, ascending.
    :param samples: the index of the sample that each arrival sends.
    """

    due_ns: Ints
    samples: Ints


@dataclass(frozen=True, slots=True)
class Schedule:
    """Generate the arrivals of a run. The same seed gives the same arrivals for any number of processes.

    :param profile: the rate.
    :param samples: how many samples there are; each is sent as often as another.
    """

    process: Process
    profile: LoadProfile
    samples: int
    seed: int

    @property
    def expected(self) -> float:
        """The expected number of arrivals."""
        return self.profile.total

    def blocks(self, share: int = 0, shares: int = 1) -> Iterator[Arrivals]:
        """Yield the arrivals of one process in blocks. Arrivals go to the processes in turn."""
        rng = np.random.default_rng(self.seed)
        # A separate generator, so that the times do not depend on the samples.
        choices = np.random.default_rng((self.seed, 1))
        last, made, total = 0.0, 0, self.profile.total
        while last < total:
            if self.process == "poisson":
                sums: npt.NDArray[Any] = last + np.cumsum(rng.exponential(size=BLOCK))
            else:
                sums = np.arange(made, made + BLOCK) + 0.5
            last = float(sums[-1])
            samples = choices.integers(0, self.samples, BLOCK)
            # Every process generates all arrivals and keeps its share.
            mine = slice((share - made) % shares, int(np.searchsorted(sums, total)), shares)
            made += BLOCK
            due_ns = (self.profile.times_s(sums[mine]) * 1e9).astype(np.int64)
            if len(due_ns):
                yield Arrivals(due_ns, samples[mine])
