"""The settings of a simulated load. The command's flags have the same names."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from asynctrt.errors import OptionsError
from asynctrt.loadtest.criteria import Criterion, parse_slo
from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey
from asynctrt.validation import (
    FLAG,
    TEXT,
    TEXTS,
    changed_repr,
    choice,
    count,
    documented,
    duration,
    number,
    setting,
    validate,
)
from tests.simulation.arrivals import Load, Mix, parse_load, parse_mix

Balance = Literal["least", "round-robin"]

DEVICES_MAX: Final = 100_000


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The settings of a simulated load. Times are in seconds, rates in requests per second.

    :raises OptionsError: for a value that is not valid, or two that contradict each other.
    """

    seconds: float = setting(
        default=10.0,
        check=duration(0, 1e7, above=True),
        doc="Simulated seconds of arrivals. A trace has its own length.",
    )
    warmup: float = setting(
        default=0.0,
        check=duration(0, 1e6),
        doc="Simulated seconds at the beginning that are left out of the figures.",
    )
    rows: str = setting(
        default="1",
        check=TEXT,
        doc="Rows per request, with weights: 1, or 1@3,8, which is 1 three times as often as 8.",
    )
    shapes: str | None = setting(
        default=None,
        check=TEXT.or_none,
        doc="Shapes of rows by name, with weights: short@9,long. The latency model may tell them apart.",
    )
    urgency: str = setting(
        default="0",
        check=TEXT,
        doc="Priorities of requests, with weights, the largest the most urgent: 0@9,2.",
    )
    cancel: float = setting(
        default=0.0,
        check=number(0, 1),
        doc="Share of the callers who go away.",
    )
    patience: float = setting(
        default=0.1,
        check=duration(0, 1e5, above=True),
        doc="Seconds after which they do, on average; the times are exponential.",
    )
    trace_speed: float = setting(
        default=1.0,
        check=number(0, 1e6, above=True),
        doc="How many times faster than recorded a trace is.",
    )
    concurrency: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="Batches that keep a device busy. Default: its lanes; 2 with arenas, as on a GPU.",
    )
    lanes: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="Without arenas: batches that compute at once, a thread each. Default: the latency model's.",
    )
    interference: float | None = setting(
        default=None,
        check=number(0, 10).or_none,
        doc="""How much longer a batch computes for each other one beside it: 0, not at all; 1, as if one
        after the other. Default: the latency model's.""",
    )
    jitter: float | None = setting(
        default=None,
        check=number(0, 10).or_none,
        doc="""Standard deviation of the time to compute, as a share of it. Default: the latency
        model's.""",
    )
    split: bool = setting(
        default=False,
        check=FLAG,
        doc="""Spread the rows that wait over idle lanes, as an engine on the host device does, instead of
        filling one batch. So it is by default with the report of a load test there.""",
    )
    devices: int = setting(
        default=1,
        check=count(1, DEVICES_MAX),
        doc="Devices, each with an engine of its own; requests are divided among them.",
    )
    balance: Balance = setting(
        default="least",
        check=choice(*get_args(Balance)),
        doc="Which device takes a request: the one that is expected to be done first, or each in turn.",
    )
    slo: tuple[str, ...] = setting(
        default=(),
        check=TEXTS,
        doc="What has to be met, such as p99<20ms, which also says what goodput counts.",
    )

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        validate(self)
        parse_slo(self.slo)
        if self.warmup >= self.seconds:
            raise OptionsError(f"warmup ({self.warmup:g}) must be below seconds ({self.seconds:g})")
        self.mix(None)

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The parsed SLO."""
        return parse_slo(self.slo)

    def mix(self, timeout: float | None) -> Mix:
        """Return what requests are made of.

        :param timeout: seconds within which an answer is of any use.
        :raises OptionsError: for rows, shapes or priorities that are not.
        """
        rows = parse_mix(self.rows, "rows", is_whole=True)
        urgency = parse_mix(self.urgency, "urgency", is_whole=True)
        if min(value for value, _ in rows) < 1 or min(value for value, _ in urgency) < 0:
            raise OptionsError("rows must be 1 or more, and urgency 0 or more")
        keys = [(FIXED_SHAPE, 1.0)]
        if self.shapes is not None:
            named = parse_mix(self.shapes, "shapes", is_whole=False)
            keys = [(BatchKey(name), weight) for name, weight in named]
        timeout_ns = None if timeout is None else int(timeout * 1e9)
        return Mix(rows, keys, urgency, timeout_ns, self.cancel, int(self.patience * 1e9))

    def load(self, arrivals: str, timeout: float | None, seed: int) -> Load:
        """Return the arrivals that a text describes; see :func:`parse_load`."""
        return parse_load(arrivals, self.seconds, self.mix(timeout), seed, self.trace_speed)
