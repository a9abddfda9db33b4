"""When simulated requests arrive, and what they are: from a rate and a seed, or from a trace. Pure."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest.arrivals import Fixed, LoadProfile, Schedule, trace_records
from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey

KINDS: Final = ("poisson", "constant", "bursts", "day")
KNOBS: Final[dict[str, tuple[str, ...]]] = {
    "poisson": (),
    "constant": (),
    "bursts": ("factor", "share", "period"),
    "day": ("swing", "period"),
}
TRACE_NAMES: Final = ("time", "rows", "shape", "priority", "deadline")
ROWS_MAX: Final = 1 << 20

T = TypeVar("T")


class Arrival(NamedTuple):
    """One request of a simulated world."""

    due_ns: int
    """From the beginning of the world."""
    rows: int
    key: BatchKey
    priority: int
    timeout_ns: int | None
    """How long after its arrival its answer is of any use."""
    patience_ns: int | None = None
    """After how long its caller goes away, if it has not been answered; ``None``: never."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are made of, each a list of values with their weights."""

    rows: Sequence[tuple[int, float]] = ((1, 1.0),)
    keys: Sequence[tuple[BatchKey, float]] = ((FIXED_SHAPE, 1.0),)
    priorities: Sequence[tuple[int, float]] = ((0, 1.0),)
    timeout_ns: int | None = None
    cancel_share: float = 0.0
    """The share of the callers who go away."""
    patience_ns: int = 0
    """After how long they do, on average; the times are exponential."""


class Load:
    """The arrivals of a world: :meth:`arrivals` gives them again and again, always the same.

    :param times: when they come.
    :param seconds: how long that goes on.
    :param entries: for a trace, what each of its arrivals is.
    """

    def __init__(
        self,
        times: Schedule | Fixed,
        seconds: float,
        mix: Mix,
        seed: int,
        entries: Sequence[tuple[int, BatchKey, int, int | None]] | None = None,
    ) -> None:
        self._times = times
        self.seconds = seconds
        self._mix = mix
        self._seed = seed
        self._entries = entries

    @property
    def expected(self) -> float:
        """How many arrivals there will be, about."""
        return self._times.expected

    @property
    def priority_max(self) -> int:
        """The highest priority that occurs."""
        if self._entries is not None:
            return max(priority for _, _, priority, _ in self._entries)
        return max(priority for priority, _ in self._mix.priorities)

    @property
    def rows_max(self) -> int:
        """The most rows that a request has."""
        if self._entries is not None:
            return max(rows for rows, _, _, _ in self._entries)
        return max(rows for rows, _ in self._mix.rows)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield them in order of time."""
        rng = np.random.default_rng((self._seed, 2))
        mix = self._mix
        for block in self._times.blocks():
            count = len(block.due_ns)
            due = block.due_ns.tolist()
            what: Iterable[tuple[int, BatchKey, int, int | None]]
            if self._entries is None:
                what = zip(
                    _drawn(rng, mix.rows, count),
                    _drawn(rng, mix.keys, count),
                    _drawn(rng, mix.priorities, count),
                    itertools.repeat(mix.timeout_ns, count),
                    strict=True,
                )
            else:
                what = (self._entries[sample] for sample in block.samples.tolist())
            patience = self._patience(rng, count)
            for due_ns, (rows, key, priority, timeout_ns), patience_ns in zip(
                due, what, patience, strict=True
            ):
                yield Arrival(due_ns, rows, key, priority, timeout_ns, patience_ns)

    def _patience(self, rng: np.random.Generator, count: int) -> Sequence[int | None]:
        mix = self._mix
        if not mix.cancel_share:
            return [None] * count
        leaves = (rng.random(count) < mix.cancel_share).tolist()
        after = rng.exponential(mix.patience_ns, count).astype(np.int64).tolist()
        return [after_ns if does else None for does, after_ns in zip(leaves, after, strict=True)]


def _drawn(rng: np.random.Generator, choices: Sequence[tuple[T, float]], count: int) -> Sequence[T]:
    if len(choices) == 1:
        return [choices[0][0]] * count
    weights = np.array([weight for _, weight in choices])
    places = rng.choice(len(choices), count, p=weights / weights.sum())
    return [choices[place][0] for place in places.tolist()]


def parse_load(text: str, seconds: float, mix: Mix, seed: int, speed: float = 1.0) -> Load:
    """Return the load that a text describes.

    ``poisson:1000`` and ``constant:1000`` have a rate in requests/s, or a ramp ``100..2000``, or steps
    ``100,500``. ``bursts:1000,factor=5,share=0.1,period=1`` has bursts of 5 times the mean rate for a tenth
    of the time, a burst and its pause 1 s on average; ``day:1000,swing=0.5,period=86400`` rises and falls by
    half. Anything else is the path of a trace.

    :param seconds: how long; a trace has its own length.
    :param speed: how many times faster than recorded a trace is.
    :raises OptionsError: for a rate or a value that is impossible; for an invalid entry of a trace, with its
        line.
    :raises UsageError: for a trace that cannot be read.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        return read_trace_load(Path(text), mix, seed, speed)
    parts = rest.split(",")
    rate = ",".join(part for part in parts if "=" not in part)
    knobs = {name.strip(): value for name, mark, value in (part.partition("=") for part in parts) if mark}
    for name in knobs:
        if name not in KNOBS[kind]:
            valid = ", ".join(KNOBS[kind]) or "none"
            raise OptionsError(f"{text!r}: unknown value {name!r}; valid values for {kind}: {valid}")
    profile = LoadProfile.parse(rate, seconds)
    if kind == "bursts":
        factor = _knob(text, knobs, "factor", 5.0, 1.0, 1e3)
        share = _knob(text, knobs, "share", 0.1, 0.0, 1.0)
        period = _knob(text, knobs, "period", seconds / 10, 1e-3, 1e6)
        if factor * share >= 1:
            raise OptionsError(
                f"{text!r}: the bursts leave no requests for the time between them: factor * share must be "
                "below 1"
            )
        profile = profile.bursty(period, share, factor, np.random.default_rng((seed, 3)))
    elif kind == "day":
        swing = _knob(text, knobs, "swing", 0.5, 0.0, 1.0)
        profile = profile.diurnal(_knob(text, knobs, "period", seconds, 1e-2, 1e6), swing)
    process: Any = "constant" if kind == "constant" else "poisson"
    return Load(Schedule(process, profile, np.ones(1), seed), seconds, mix, seed)


def _knob(text: str, knobs: dict[str, str], name: str, usual: float, least: float, most: float) -> float:
    try:
        value = float(knobs.get(name, usual))
    except ValueError:
        value = math.nan
    if not least < value < most:
        raise OptionsError(f"{text!r}: {name} must be a number above {least:g} and below {most:g}")
    return value


def read_trace_load(path: Path, mix: Mix, seed: int, speed: float) -> Load:
    """Read a trace: CSV with a header, or JSON Lines.

    ``time`` is in seconds. Optional are ``rows``; ``priority``, the largest the most urgent; ``deadline``, in
    seconds after the arrival; and ``shape``, any text. Other columns are sizes of dynamic dimensions, which
    make up the shape, as for ``asynctrt load``.

    :raises UsageError: if it cannot be read.
    :raises OptionsError: for an invalid entry; the message names its line and what is expected.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        kinds = ", ".join(f"{kind}:RATE" for kind in KINDS)
        raise UsageError(
            f"the trace {str(path)!r} cannot be read: {error}. Arrivals are {kinds}, or the path of a trace"
        ) from error
    found = []
    for number, item in trace_records(path, text):
        if not isinstance(item, dict):
            raise OptionsError(f"{str(path)!r}, line {number}: {item!r:.100} is not an object with a time")
        found.append(_entry(item, mix, f"{str(path)!r}, line {number}"))
    if not found:
        raise OptionsError(f"the trace {str(path)!r} has no entries: it needs a header with time, and lines")
    found.sort(key=lambda entry: entry[0])
    first = found[0][0]
    due_ns = np.array([round((entry[0] - first) / speed * 1e9) for entry in found], np.int64)
    times = Fixed(due_ns, np.arange(len(found)), float(due_ns[-1]) / 1e9)
    return Load(times, times.seconds, mix, seed, [entry[1:] for entry in found])


def _entry(item: dict[Any, Any], mix: Mix, where: str) -> tuple[float, int, BatchKey, int, int | None]:
    """Return time, rows, key, priority and timeout of one line of a trace."""
    if None in item:
        raise OptionsError(f"{where}: there are more values than names in the header")
    if "time" not in item:
        raise OptionsError(f"{where}: there is no time, in seconds; the columns are {', '.join(TRACE_NAMES)}")
    seconds = _real(item["time"], f"{where}: time", 1e9)
    rows = _real(item.get("rows", 1), f"{where}: rows", ROWS_MAX)
    priority = _real(item.get("priority", 0), f"{where}: priority", 1e3)
    for name, value in (("rows", rows), ("priority", priority)):
        if value != int(value) or value < (name == "rows"):
            raise OptionsError(f"{where}: {name} must be a whole number, not {item[name]!r}")
    timeout_ns = mix.timeout_ns
    if "deadline" in item:
        timeout_ns = round(_real(item["deadline"], f"{where}: deadline", 1e9) * 1e9)
    others = sorted(name for name in item if name not in TRACE_NAMES)
    sizes = [f"{name}={_real(item[name], f'{where}: {name}', 1e12):g}" for name in others]
    shape = ",".join([*([str(item["shape"])] if "shape" in item else ()), *sizes])
    key = BatchKey(shape) if shape else FIXED_SHAPE
    return seconds, int(rows), key, int(priority), timeout_ns


def _real(value: Any, what: str, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= most:
        raise OptionsError(f"{what} must be a number from 0 to {most:g}, not {value!r:.100}")
    return number


def parse_mix(text: str, name: str, *, is_whole: bool) -> list[tuple[Any, float]]:
    """Parse values with weights: ``1``, or ``1@3,8``, which is 1 three times as often as 8.

    :param is_whole: whether the values are whole numbers.
    :raises OptionsError: for anything else.
    """
    found: list[tuple[Any, float]] = []
    for part in text.split(","):
        value, _, weight = part.strip().partition("@")
        try:
            weighs = float(weight or 1)
            found.append((int(value) if is_whole else value, weighs))
        except ValueError:
            weighs = math.nan
        if not 0 < weighs < 1e9 or not value:
            what = "whole numbers" if is_whole else "values"
            raise OptionsError(f"{name}: {text!r} are not {what} with weights: write 1, or 1@3,8")
    return found
