"""What a load test found: frozen, and as JSON and back.

A figure that is not known is ``None`` here and missing in the JSON: a percentile of too few requests, the
batches of a server that does not tell, the GPU of a machine without one.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from asynctrt.errors import UsageError
from asynctrt.loadtest.criteria import FIGURES

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one kind, and what the first of them said."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the interval that has the true one with 95% confidence."""

    mean: float
    low: float
    high: float
    count: int
    """Of what the mean is: repetitions, or pieces of one run."""

    @property
    def half_width(self) -> float:
        """Half of its width, as a share of the mean."""
        return (self.high - self.low) / 2 / self.mean if self.mean else float("inf")


@dataclass(frozen=True, slots=True)
class Moment:
    """One piece of a run's time. Latencies are in ms, of requests that were due in it."""

    at_s: float
    """When it begins, from the end of the warm-up."""
    seconds: float
    sent: float
    """Requests/s that were due."""
    throughput: float
    """Answers/s that came."""
    p50: float | None
    p99: float | None
    max: float | None
    errors: int
    late_p99: float | None
    """How late the generator was, in ms."""


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What the target has computed during a run. Times are in ms, mean over its requests."""

    requests: int
    batches: int
    mean_rows: float
    queue: float
    copy_in: float
    compute: float
    copy_out: float
    by_rows: Mapping[int, int]
    """Batches by their number of rows."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One batch of a timeline: where it ran, and when, in ms from the first one's launch."""

    context: int
    arena: int | None
    rows: int
    begin: float
    copied_in: float
    started: float
    """When it began to compute: until then it waited for the device."""
    computed: float
    end: float


@dataclass(frozen=True, slots=True)
class Resources:
    """What was used while a run went on; ``None`` where there is nothing to look at."""

    generator_cores: float | None = None
    """CPU of the processes that send, in cores; an engine in them is included."""
    memory_mb: float | None = None
    """Largest resident memory of the same processes."""
    gpu_name: str | None = None
    gpu_share: float | None = None
    """Mean share of the time in which the GPU was busy."""
    gpu_memory_mb: float | None = None
    """Largest memory in use on the GPU."""
    gpu_watts: float | None = None
    """Mean power."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Latencies are in ms by name: ``p50`` to ``p99.99``, ``mean``, ``max``; rates in requests/s."""

    label: str
    seconds: float
    """How long was measured, without the warm-up."""
    complete: bool
    """False if it was stopped: the figures are of what was measured until then."""
    void: tuple[str, ...]
    """Why the figures are those of the generator and not of the target; empty if they are not."""
    notes: tuple[str, ...]
    offered: float | None
    """Requests/s that were due, for an open loop."""
    requests: int
    """That were sent, or should have been."""
    answered: int
    unanswered: int
    """Neither answered nor failed when a run was stopped."""
    rows: float
    """Rows a request, on average."""
    throughput: float
    goodput: float | None
    """Answers/s within the target; ``None`` without one."""
    error_share: float
    errors: Mapping[str, Errors]
    latency: Mapping[str, float]
    uncorrected: Mapping[str, float]
    """The latency from when a request was sent, not from when it was due: it hides a target's stalls."""
    lateness: Mapping[str, float]
    """How late the generator was."""
    slo: Mapping[str, bool]
    """Whether each part of the target was held."""
    steady_from_s: float | None
    """From when on the figures no longer drift, from the end of the warm-up; ``None``: they never do."""
    throughput_interval: Interval | None
    """Within this run, over its pieces."""
    latency_interval: Interval | None
    """Of the mean latency in ms, likewise."""
    batches: BatchFigures | None
    resources: Resources
    moments: tuple[Moment, ...]
    timeline: tuple[Bar, ...]
    histogram: str
    """The latency in ns, as HDR tools exchange it (V2, base64)."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What is this run's own among several: the rate, a setting that is swept."""
    scenario: Mapping[str, Any] | None = None
    """What MLPerf's rules say of it: valid or not, and why."""

    @property
    def holds(self) -> bool:
        """Whether the target was held, and the figures can be trusted."""
        return not self.void and all(self.slo.values())

    def figure(self, name: str) -> float | None:
        """A figure by the name that criteria have for it."""
        if name in ("throughput", "goodput"):
            return self.throughput if name == "throughput" else self.goodput
        if name == "errors":
            return self.error_share
        return self.latency.get(name)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The highest rate that holds the target."""

    slo: tuple[str, ...]
    holds: float | None
    """Requests/s; ``None`` if not even the lowest rate held it."""
    fails: float | None
    """The lowest rate that did not; ``None`` if none was found that failed."""
    why: str
    """How the search ended."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two configurations in turn, A B A B. A ratio is B over A, pair by pair."""

    a: str
    b: str
    ratios: Mapping[str, Interval]
    """By figure: the geometric mean and its interval."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that one load test found."""

    kind: str
    """``run``, ``repeats``, ``sweep``, ``search`` or ``compare``."""
    target: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    runs: tuple[Run, ...]
    intervals: Mapping[str, Interval]
    """Over the repetitions, by figure; empty with fewer than two."""
    search: SearchResult | None = None
    comparison: Comparison | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing was cut short."""
        return all(run.complete for run in self.runs)

    @property
    def void(self) -> tuple[str, ...]:
        """Why runs are void; empty if none is."""
        return tuple(dict.fromkeys(why for run in self.runs for why in run.void))

    @property
    def holds(self) -> bool:
        """Whether there is a run, and every one holds the target."""
        return bool(self.runs) and all(run.holds for run in self.runs)

    def figure(self, name: str) -> float | None:
        """The mean over the runs of a figure by the name that criteria have for it."""
        return mean_figures(self.runs).get(name)

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines. What is not known is not there."""
        content: dict[str, Any] = {"format": FORMAT, "complete": self.complete, **_plain(self)}
        return content

    def as_text(self) -> str:
        """The JSON, as it is in a file."""
        return json.dumps(self.as_json(), indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write it as JSON.

        :raises UsageError: if it cannot be written; what was there before is then as it was.
        """
        write_whole(path, self.as_text())


def mean_figures(runs: Sequence[Run]) -> dict[str, float]:
    """The means over some runs, by the names that criteria have for figures, of those that every run has."""
    return _means([run.figure for run in runs])


def saved_figures(content: Mapping[str, Any]) -> dict[str, float]:
    """As :func:`mean_figures`, of a report's runs as JSON."""
    return _means([partial(_saved_figure, run) for run in content["runs"]])


def _means(runs: Sequence[Callable[[str], float | None]]) -> dict[str, float]:
    found = {}
    for name in FIGURES:
        known = [value for figure in runs if (value := figure(name)) is not None]
        if known and len(known) == len(runs):
            found[name] = sum(known) / len(known)
    return found


def _saved_figure(run: Mapping[str, Any], name: str) -> float | None:
    """As :meth:`Run.figure`, of a run as JSON."""
    if name in ("throughput", "goodput"):
        return run.get(name)
    return run.get("error_share") if name == "errors" else run.get("latency", {}).get(name)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all. A pipe or a device, as ``/dev/stdout`` is, is written to.

    :raises UsageError: if the disk is full, the folder is not there, and so on.
    """
    # An error's text may have half of a surrogate pair in it, of which there is no UTF-8.
    raw = content.encode(errors="replace") if isinstance(content, str) else content
    temporary = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(raw)
            return
        target = Path(os.path.realpath(path))  # A link stays one.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return {name: _plain(part) for name, part in fields if part is not None}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, Integral):
        return int(value)  # NumPy's as well.
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return str(value)  # JSON has no infinity.
