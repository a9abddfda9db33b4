"""The settings of a load test. The command's flags have the same names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike

from asynctrt._util.validation import (
    PATH,
    TEXTS,
    Check,
    changed_repr,
    choice,
    count,
    documented,
    duration,
    number,
    setting,
    validate,
)
from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import LoadProfile, parse_stages
from asynctrt.loadtest.criteria import Criterion, latency_target_ms, parse_slo
from asynctrt.tensors import Array

Arrivals = Literal["poisson", "constant"]

CALLERS_DEFAULT: Final = 64
CALLERS_MAX: Final = 100_000
PROCESSES_MAX: Final = 64


class Arrays(dict[str, Array]):
    """Arrays by name that an application passed instead of a file; an unnamed array has the name "".

    Compare and hash by identity, because settings need both and arrays support neither.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def _path_or_arrays(value: Any) -> Any:
    if isinstance(value, Arrays):
        return value
    if isinstance(value, np.ndarray):
        return Arrays({"": value})
    if isinstance(value, Mapping):
        return Arrays({str(name): np.asarray(array) for name, array in value.items()})
    return PATH.convert(value)


PATH_OR_ARRAYS: Final = Check("a path, or arrays by name", _path_or_arrays)
"""From Python it may be arrays; a flag is always a path."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The settings of one load test. Times are in seconds or as "30s", rates in requests per second.

    :raises OptionsError: for a value that is not valid, or two that contradict each other.
    """

    rate: str | float | None = setting(
        default=None,
        doc="""Open loop: requests per second, sent whether or not answers arrive. A number, a ramp such as
        100..2000, or stages such as 100,500,1000, with lengths 100@30s,100..500@1m.""",
    )
    callers: str | int | None = setting(
        default=None,
        doc="""Closed loop: how many callers send, wait for the answer, and send again. A number, a ramp or
        stages. Default, without a rate: 64.""",
    )
    think: float = setting(
        default=0.0,
        check=duration(0, 3600),
        doc="Closed loop: how long a caller waits after an answer, on average; the times are exponential.",
    )
    arrivals: Arrivals = setting(
        default="poisson",
        check=choice(*get_args(Arrivals)),
        doc="How an open loop's requests are spaced.",
    )
    seconds: float | None = setting(
        default=None,
        check=duration(0, 1e6, above=True).or_none,
        doc="How long to measure. Default: 10; for stages with lengths, their own length.",
    )
    warmup: float = setting(
        default=1.0,
        check=duration(0, 1e5),
        doc="How long to send before measuring starts.",
    )
    requests: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="End after this many requests have been measured, if that is sooner.",
    )
    repeats: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="""How often to repeat the run; confidence intervals are then over the repetitions. Default: 1; 3
        for each rate of a search.""",
    )
    answer_timeout: float = setting(
        default=10.0,
        check=duration(0, 3600, above=True),
        doc="How long to wait for an answer; after that the request counts as an error.",
    )
    slo: tuple[str, ...] = setting(
        default=(),
        check=TEXTS,
        doc="""What a run has to meet, such as p99<20ms, or login:p99<50ms for a step: for goodput, a search,
        and the exit status.""",
    )

    rows: int = setting(
        default=1,
        check=count(1),
        doc="Rows per request.",
    )
    dims: tuple[str, ...] = setting(
        default=(),
        check=TEXTS,
        doc="""Sizes of dynamic dimensions, such as length=128,heads=4. Several are sent equally often, and
        one that is given twice is sent twice as often.""",
    )
    inputs: Path | None = setting(
        default=None,
        check=PATH_OR_ARRAYS.or_none,
        doc="""What to send: an .npz with an array for each input, an .npy, or a .csv or .jsonl with a
        column for each. Default: random values.""",
    )
    samples: int = setting(
        default=64,
        check=count(1),
        doc="How many different requests to send at most.",
    )
    expect: Path | None = setting(
        default=None,
        check=PATH_OR_ARRAYS.or_none,
        doc="An .npz with what the model should answer to the rows of inputs; each answer is checked.",
    )
    rtol: float = setting(
        default=1e-3,
        check=number(),
        doc="How far an answer may be off, relative to the right one.",
    )
    atol: float = setting(
        default=1e-5,
        check=number(),
        doc="How far an answer may be off in addition, as an absolute difference.",
    )

    processes: int = setting(
        default=1,
        check=count(1, PROCESSES_MAX),
        doc="Processes that send. More than one works only against servers.",
    )
    seed: int = setting(
        default=0,
        check=count(0),
        doc="Seed of the arrivals and the random inputs: the same seed gives the same test.",
    )

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        validate(self)
        self._check_together()

    @property
    def is_open(self) -> bool:
        """Whether requests are sent on a schedule, independently of answers."""
        return self.rate is not None

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The parsed SLO."""
        return parse_slo(self.slo)

    @property
    def stages_s(self) -> float | None:
        """The total length of stages with lengths, in seconds; ``None`` for others."""
        return parse_stages(_text((self.rate if self.is_open else self.callers) or CALLERS_DEFAULT))[1]

    def profile(self, seconds: float) -> LoadProfile:
        """Return the rate or the number of callers over a run of ``seconds``.

        :raises OptionsError: if it cannot be parsed, or the number of callers is out of range.
        """
        if self.is_open:
            return LoadProfile.parse(_text(self.rate), seconds)
        text = _text(CALLERS_DEFAULT if self.callers is None else self.callers)
        profile = LoadProfile.parse(text, seconds)
        levels = [level for part, _ in parse_stages(text)[0] for level in part]
        if not 1 <= profile.largest <= CALLERS_MAX or not all(map(float.is_integer, levels)):
            raise OptionsError(f"callers must be whole numbers up to {CALLERS_MAX:,}, not {self.callers}")
        return profile

    def _check_together(self) -> None:
        at_odds = (
            (
                self.rate is not None and self.callers is not None,
                "rate is for an open loop and callers for a closed loop: give only one of them",
            ),
            (
                self.think > 0 and self.is_open,
                "think is the pause of a caller, and a rate has no callers",
            ),
            (
                any(item.figure == "goodput" for item in parse_slo(self.slo))
                and latency_target_ms(parse_slo(self.slo)) is None,
                "goodput counts answers in time: add to slo what that is, as p99<20ms",
            ),
            (
                bool(self.dims) and self.inputs is not None,
                "dims are the sizes of random values, and inputs have their own: give only one of them",
            ),
            (
                self.expect is not None and self.inputs is None,
                "expect has the answers to the rows of inputs: give inputs too",
            ),
        )
        for is_wrong, why in at_odds:
            if is_wrong:
                raise OptionsError(why)
        self.profile(1.0)
        if self.seconds is not None and self.stages_s is not None:
            raise OptionsError("the stages have lengths: leave seconds out")


Given = str | Path | Array | Mapping[str, ArrayLike]
"""A file of arrays, one array, or arrays by name."""


class RunSettings(TypedDict, total=False):
    """The settings as keywords of :func:`asynctrt.loadtest.run`, for type checkers and editors.

    A type checker cannot derive them, so a test compares them. Their types are wider, because ``run``
    converts the values. Times are in seconds, or text such as ``"1m30s"``.
    """

    rate: float | str | None
    callers: int | str | None
    think: float | str
    arrivals: Arrivals
    seconds: float | str | None
    warmup: float | str
    requests: int | None
    repeats: int | None
    answer_timeout: float | str
    slo: str | Sequence[str]
    rows: int
    dims: str | Sequence[str]
    inputs: Given | None
    samples: int
    expect: Given | None
    rtol: float
    atol: float
    processes: int
    seed: int


def _text(level: object) -> str:
    return f"{level:f}" if isinstance(level, float) else str(level)
