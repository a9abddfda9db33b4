"""What a load test can be told. The command's flags have the same names."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, get_args

from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import Profile
from asynctrt.loadtest.criteria import Criterion, parse_slo
from asynctrt.options import whole

Pacing = Literal["auto", "adaptive", "spin", "timer"]
Scenario = Literal["single-stream", "multi-stream", "server", "offline"]

CALLERS_DEFAULT: Final = 64
CALLERS_MAX: Final = 100_000
PERIOD_LEAST: Final = 0.01
PROCESSES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """One load test. Times are in seconds, rates in requests a second.

    :raises OptionsError: for a value that is impossible, or at odds with another.
    """

    rate: str | float | None = None
    """Open loop: requests a second, whether answers come or not. 1000, a ramp 100..2000, or steps
    100,500,1000."""
    callers: str | int | None = None
    """Closed loop: how many callers send, wait for the answer, and send again. A number, a ramp or steps.
    Default, without a rate: 64."""
    think: float = 0.0
    """Closed loop: how long a caller waits after an answer, on average; the times are exponential."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """How an open loop's requests are spaced."""
    burst: float | None = None
    """Bursts of this many times the rate, in random phases; less between them: the mean stays."""
    burst_share: float = 0.1
    """The share of the time that is burst."""
    swing: float | None = None
    """The rate rises and falls like a day's, by this share of itself."""
    period: float | None = None
    """How long a day is, or on average a burst and the phase after it. Default: a day is the whole run, and a
    tenth of it is for a burst."""
    trace: Path | None = None
    """Replay a recorded trace: CSV or JSON Lines with time, and if need be rows, sizes of dynamic dimensions,
    and priority as the target counts it: of an engine the largest, of a server 1 is the most urgent."""
    trace_speed: float = 1.0
    """How many times faster than recorded."""
    scenario: Scenario | None = None
    """One of MLPerf's four, with its rules; server needs a rate and an slo, offline a rate to expect."""

    seconds: float | None = None
    """How long to measure. Default: 10; 600 for a scenario, as its rules demand; a trace's own length."""
    warmup: float = 1.0
    """How long to send before that, unmeasured."""
    requests: int | None = None
    """End after so many requests, if that is sooner."""
    until: float | None = None
    """End as soon as mean latency and throughput are known to within this share of themselves, at 95%."""
    repeats: int | None = None
    """How often to do it all; the intervals are then over the repetitions. Default: 1; 3 for each rate of a
    search, 5 for each side of a comparison."""
    answer_timeout: float = 10.0
    """A request that is not answered by then is given up, and counted as an error."""
    max_outstanding: int | None = None
    """Requests on the way at once; further ones wait here, and it counts as latency. Default: what the target
    bears: an engine's queue, 256 for a server."""
    slo: tuple[str, ...] = ()
    """What a run has to hold, such as p99<20ms: for goodput, a search, and the exit status."""

    rows: int = 1
    """Rows a request."""
    dims: tuple[str, ...] = ()
    """Sizes of dynamic dimensions, such as length=128; several times: mixed. length=128,heads=4@3 is sent
    three times as often as one without @."""
    inputs: Path | None = None
    """What to send: an .npz with an array for each input, an .npy, or a folder whose files a reader takes.
    Default: random values."""
    reader: str | None = None
    """A function module:name that makes one request of a file: path -> arrays by name, one array, or None."""
    samples: int = 64
    """How many different requests there are at the most."""
    expect: Path | None = None
    """An .npz with what the model should answer to the rows of inputs; each answer is checked."""
    reference: str | None = None
    """A target whose answers are the right ones; each answer is checked."""
    rtol: float = 1e-3
    """How far an answer may be off, relative to the right one."""
    atol: float = 1e-5
    """And how far besides."""

    pacing: Pacing = "auto"
    """How an open loop waits. timer sleeps up to each request, and is some 20 to 60 us late; spin looks at
    the clock all the time; adaptive sleeps while the next one is far, and looks when it is near. auto is
    adaptive for a server, and timer for an engine in the same process, which needs the interpreter too."""
    processes: int = 1
    """Processes that send. More than one is for servers."""
    seed: int = 0
    """Of the arrivals and the random inputs: the same seed gives the same test."""

    def __post_init__(self) -> None:
        for name in ("requests", "repeats", "max_outstanding", "rows", "samples", "processes"):
            self._check_count(name)
        limits = {"seconds": 1e6, "warmup": 1e5, "answer_timeout": 3600.0, "think": 3600.0}
        for name, most in limits.items():
            self._check_number(name, 0.0, most, above=name not in ("warmup", "think"))
        self._check_number("period", PERIOD_LEAST, 1e6, above=False)
        self._check_number("burst", 1.0, 1e3, above=True)
        self._check_number("burst_share", 0.0, 1.0, above=True)
        self._check_number("swing", 0.0, 1.0, above=True)
        self._check_number("trace_speed", 0.0, 1e6, above=True)
        self._check_number("until", 0.0, 1.0, above=True)
        self._check_number("rtol", 0.0, math.inf, above=False)
        self._check_number("atol", 0.0, math.inf, above=False)
        if whole(self.seed) is None or self.seed < 0:
            raise OptionsError(f"seed is a whole number, 0 or more, not {self.seed!r}")
        if self.processes > PROCESSES_MAX:
            raise OptionsError(f"processes is at most {PROCESSES_MAX}, not {self.processes}")
        if self.pacing not in get_args(Pacing):
            raise OptionsError(f"pacing is {', '.join(get_args(Pacing))}, not {self.pacing!r}")
        if self.arrivals not in ("poisson", "constant"):
            raise OptionsError(f"arrivals are poisson or constant, not {self.arrivals!r}")
        self._take_texts()
        self._check_together()

    @property
    def is_open(self) -> bool:
        """Whether requests come by the clock, and not by the answers."""
        if self.scenario is not None:
            return self.scenario in ("server", "offline")
        return self.rate is not None or self.trace is not None

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The SLO, parsed."""
        return parse_slo(self.slo)

    def profile(self, seconds: float) -> Profile:
        """The rate, or the number of callers, over the time.

        :raises OptionsError: for one that is none, or too many callers.
        """
        if self.is_open:
            return Profile.parse(_text(self.rate), seconds)
        profile = Profile.parse(_text(CALLERS_DEFAULT if self.callers is None else self.callers), seconds)
        if not 1 <= profile.largest <= CALLERS_MAX:
            raise OptionsError(f"callers are 1 to {CALLERS_MAX}, not {self.callers}")
        return profile

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        count = whole(value)
        if value is None and name in ("requests", "repeats", "max_outstanding"):
            return
        if count is None or count < 1:
            raise OptionsError(f"{name} is a whole number of at least 1, not {value!r}")

    def _check_number(self, name: str, least: float, most: float, *, above: bool) -> None:
        value = getattr(self, name)
        if value is None and name in ("burst", "swing", "until", "seconds", "period"):
            return
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not (least < value if above else least <= value) or not value <= most:
            word = "more than" if above else "at least"
            raise OptionsError(f"{name} is {word} {least:g} and at most {most:g}, not {value!r}")

    def _take_texts(self) -> None:
        for name in ("slo", "dims"):
            value: Any = getattr(self, name)
            texts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
            if not all(isinstance(text, str) for text in texts):
                raise OptionsError(f"{name} is a text, or several, not {value!r}")
            object.__setattr__(self, name, texts)
        for name in ("trace", "inputs", "expect"):
            value = getattr(self, name)
            if not isinstance(value, str | PathLike | None):
                raise OptionsError(f"{name} is a path, not {value!r}")
            object.__setattr__(self, name, None if value is None else Path(value))
        for name in ("reader", "reference"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise OptionsError(f"{name} is a text, not {value!r}")

    def _check_together(self) -> None:
        at_odds = (
            (
                self.rate is not None and self.callers is not None,
                "rate is for an open loop and callers for a closed one: give one of them",
            ),
            (
                self.trace is not None and (self.rate is not None or self.callers is not None),
                "a trace brings its own arrivals: give neither rate nor callers",
            ),
            (
                self.trace is not None and (self.dims != () or self.inputs is not None),
                "a trace says what to send, by its columns: give neither dims nor inputs",
            ),
            (
                self.trace is not None and self.seconds is not None,
                "a trace is as long as it is: give no seconds, or another trace_speed",
            ),
            (
                self.rate is None and (self.burst is not None or self.swing is not None),
                "burst and swing change a rate: give one",
            ),
            (
                self.burst is not None and self.burst * self.burst_share >= 1,
                "bursts leave nothing for the time between them: burst * burst_share is less than 1",
            ),
            (
                self.think > 0 and self.is_open,
                "think is for callers, which a rate, a trace and this scenario do not have",
            ),
            (
                self.expect is not None and self.reference is not None,
                "expect and reference both say what is right: give one of them",
            ),
            (
                self.expect is not None and self.inputs is None,
                "expect has the answers to inputs: give both",
            ),
            (
                self.reader is not None and self.inputs is None,
                "reader reads the files of inputs: give both",
            ),
            (
                self.until is not None and self.scenario is not None,
                "MLPerf's rules say how long a scenario lasts: give no until",
            ),
        )
        for is_wrong, why in at_odds:
            if is_wrong:
                raise OptionsError(why)
        if self.scenario is not None:
            self._check_scenario()
        if self.trace is None and self.scenario not in ("single-stream", "multi-stream"):
            self.profile(1.0)
        parse_slo(self.slo)

    def _check_scenario(self) -> None:
        if self.scenario not in ("single-stream", "multi-stream", "server", "offline"):
            raise OptionsError(
                f"scenario is single-stream, multi-stream, server or offline, not {self.scenario!r}"
            )
        if self.callers is not None or self.trace is not None or self.burst or self.swing or self.think:
            raise OptionsError(
                "a scenario of MLPerf brings its own arrivals: give no callers, trace, burst, ..."
            )
        if self.arrivals != "poisson":
            raise OptionsError("MLPerf's arrivals are poisson")
        if self.scenario in ("server", "offline") and self.rate is None:
            raise OptionsError(f"scenario {self.scenario} needs the rate: for offline, the one to expect")
        if self.scenario in ("single-stream", "multi-stream") and self.rate is not None:
            raise OptionsError(
                f"scenario {self.scenario} has no rate: a query follows the answer to the last"
            )
        if self.rate is not None and len(self.profile(1.0).levels) > 1:
            raise OptionsError(f"scenario {self.scenario} has one rate, not {self.rate!r}")
        percentiles = [item for item in parse_slo(self.slo) if item.figure.startswith("p")]
        if self.scenario == "server" and len(percentiles) != 1:
            raise OptionsError("scenario server needs a target for one percentile: slo p99<15ms")


def _text(level: object) -> str:
    return f"{level:f}" if isinstance(level, float) else str(level)
