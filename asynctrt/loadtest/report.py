"""The report of a load test: immutable, and saved as JSON.

An unknown figure is ``None`` here and missing in the JSON: a percentile of too few requests, the batches of a
server without statistics.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import write_whole
from asynctrt.errors import UsageError
from asynctrt.loadtest.criteria import LATENCIES

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Count the errors of one kind, with the message of the first."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Interval:
    """Hold a mean and the interval that contains the true mean with 95% confidence."""

    mean: float
    low: float
    high: float
    count: int
    """Number of values in the mean."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Hold the figures of one piece of a run. Latencies are in ms, for requests that were due in it."""

    at_s: float
    """The start of the piece, in s from the end of the warm-up."""
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
    """The generator's lateness, in ms."""
    answered: int = 0
    """Answered requests that were due in it. They add up to the run's ``answered``."""


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Hold the figures of the batches computed during a run. Times are means per request, in ms.

    The target counts them itself, over the whole run with its warm-up, and including other callers' requests.
    If a GPU times only a sample of the batches, the others count with the usual time for their size.
    """

    requests: int
    """Answers. If an engine splits a request, it counts each part."""
    batches: int
    mean_rows: float
    queue: float
    copy_in: float
    compute: float
    copy_out: float
    by_rows: Mapping[int, int]
    """Batches by their number of rows."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Hold the figures of answers that came in pieces: messages of a websocket, or events over HTTP.

    Times are in ms by name, like a run's latencies.
    """

    pieces: float
    """Pieces/s, over all answers."""
    first: Mapping[str, float]
    """Time from when a request was due to its answer's first piece."""
    between: Mapping[str, float]
    """Time from each piece of an answer to the next."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Hold the figures of the steps of one name (:func:`asynctrt.loadtest.step`)."""

    count: int
    """Number of steps that began in the measured time."""
    failed: int
    latency: Mapping[str, float]
    """Time from the beginning to the end of a step, in ms by name, like a run's latencies."""


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """Hold the results of one run. Latencies are in ms by name (``p50`` to ``p99.99``, ``mean``, ``max``),
    rates in requests/s."""

    label: str
    seconds: float
    """Measured time, without the warm-up."""
    complete: bool
    """False if the run was stopped; the figures then cover only the time before."""
    void: tuple[str, ...]
    """Why the figures describe the generator instead of the target; empty if they are valid."""
    notes: tuple[str, ...]
    offered: float | None
    """Requests/s that were due; ``None`` for a closed loop."""
    requests: int
    """Requests that were sent or should have been sent."""
    answered: int
    unanswered: int
    """Requests that had neither been answered nor failed when the run was stopped."""
    rows: float
    """Mean number of rows per request."""
    throughput: float
    goodput: float | None
    """Answers/s within the latency of the slo; ``None`` without one."""
    error_share: float
    errors: Mapping[str, ErrorCount]
    latency: Mapping[str, float]
    lateness: Mapping[str, float]
    """Lateness of the generator, in ms by name."""
    slo: Mapping[str, bool]
    """Whether each criterion of the slo was met, without ``unjudged`` criteria."""
    batches: BatchFigures | None
    generator_cores: float
    """CPU use of the sending processes in cores, including an engine that runs in them."""
    moments: tuple[Moment, ...]
    histogram: Mapping[int, int]
    """How often each latency in ns occurred, rounded down to 3 significant digits."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that differ between runs, such as the rate."""
    kept: float | None = None
    """Requests/s answered if the target did not keep up with an open loop; ``None`` if it did."""
    stream: StreamFigures | None = None
    """Figures of answers in pieces; ``None`` if they came whole."""
    unjudged: Mapping[str, str] = field(default_factory=dict)
    """Criteria of the slo that cannot be judged from so few requests, and why."""
    steps: Mapping[str, StepFigures] = field(default_factory=dict)
    """Figures of the steps by name, in the order in which they first ended."""

    def __repr__(self) -> str:
        told = [f"{self.answered:,} of {self.requests:,} answered", f"{self.throughput:,.6g} requests/s"]
        told += [f"{name} {self.latency[name]:.3g} ms" for name in ("p50", "p99") if name in self.latency]
        return f"<Run {self.label!r}: {', '.join(told)}{', void' if self.void else ''}>"

    @property
    def holds(self) -> bool:
        """Whether every criterion of the slo was judged and met, and the figures are not void."""
        return not (self.void or self.unjudged or self.misses)

    @property
    def misses(self) -> bool:
        """Whether a criterion of the slo was missed."""
        return not all(self.slo.values())

    def figure(self, name: str) -> float | None:
        """Return a figure by its name in criteria; ``None`` if it is unknown."""
        return figures_of(self).get(name)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hold the highest rate that meets the slo."""

    slo: tuple[str, ...]
    holds: float | None
    """The highest rate that met the slo, in requests/s; ``None`` if none was found."""
    fails: float | None
    """The lowest rate that did not meet it; ``None`` if no rate failed."""
    why: str
    """Why the search ended."""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """Hold all results of one load test; save and show them."""

    kind: str
    """``run``, ``repeats``, ``sweep`` or ``search``."""
    target: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    runs: tuple[Run, ...]
    intervals: Mapping[str, Interval]
    """Confidence intervals over the repetitions, by figure; empty with fewer than two repetitions."""
    search: SearchResult | None = None
    made: Mapping[str, str] = field(default_factory=dict)
    """When (``at``, ISO 8601) and where (``host``) the report was made."""

    @property
    def complete(self) -> bool:
        """Whether no run was cut short."""
        return all(run.complete for run in self.runs)

    @property
    def void(self) -> tuple[str, ...]:
        """Why runs are void; empty if none are."""
        return tuple(dict.fromkeys(why for run in self.runs for why in run.void))

    @property
    def holds(self) -> bool:
        """Whether there are runs, and every one holds."""
        return bool(self.runs) and all(run.holds for run in self.runs)

    def figure(self, name: str) -> float | None:
        """Return a figure's mean over the runs, by its name in criteria; ``None`` if it is unknown."""
        return mean_figures(self.runs).get(name)

    def __repr__(self) -> str:
        target = self.target.get("where") or "a target"
        summary = import_module("asynctrt.loadtest.summary")  # It imports this module.
        return f"<Report {self.kind} of {target}: {summary.headline(self)}>"

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, leaving out unknown figures."""
        content: dict[str, Any] = {"format": FORMAT, "complete": self.complete, **_plain(self)}
        return content

    def as_text(self) -> str:
        """Return the JSON text of a report file."""
        return json.dumps(self.as_json(), indent=1) + "\n"

    def as_csv(self) -> str:
        """Return a table with a row for each run, and for each of its steps.

        Latencies are in ms, throughput and goodput in requests/s. An unknown figure is an empty field.
        """
        text = io.StringIO()
        names = [f"{name}_ms" for name in LATENCIES]
        head = ["run", "step", "seconds", "requests", "answered", "failed", "throughput", "goodput", *names]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*head, "complete", "void"])
        for run in self.runs:
            failed = sum(error.count for error in run.errors.values())
            rows: list[tuple[str, Mapping[str, float], Sequence[float | None]]] = [
                ("", run.latency, (run.requests, run.answered, failed, run.throughput, run.goodput))
            ]
            for name, step in run.steps.items():
                rows.append(
                    (name, step.latency, (step.count, step.count - step.failed, step.failed, None, None))
                )
            for name, latency, figures in rows:
                times = [latency.get(name) for name in LATENCIES]
                last = run.complete, "; ".join(run.void)
                writer.writerow([run.label, name, run.seconds, *figures, *times, *last])
        return text.getvalue()

    def save(self, path: str | Path) -> list[Path]:
        """Write the report in the format of the file's suffix: ``.json``, ``.html`` with charts, or ``.csv``.

        :returns: the files.
        :raises UsageError: for another suffix, or if the file cannot be written; an existing file is then
            unchanged.
        """
        path = Path(path)
        makers: dict[str, Callable[[Report], str]] = {
            ".json": Report.as_text,
            ".csv": Report.as_csv,
            # The page needs jinja2, so import it only here.
            ".html": lambda report: str(import_module("asynctrt.loadtest.page").render(report)),
        }
        if path.suffix not in makers:
            raise UsageError(
                f"{str(path)!r} is not a .json, .html or .csv file: a report is written as one of these"
            )
        write_whole(path, makers[path.suffix](self))
        return [path]


def figures_of(run: Run | Mapping[str, Any]) -> dict[str, float]:
    """Return the known figures of a run, or of a run in JSON, by their names in criteria.

    A step's figures have its name in front: ``login p99``.
    """
    known = _part(run, "latency") or {}
    found = {name: known.get(name) for name in LATENCIES}
    found |= {name: _part(run, name) for name in ("throughput", "goodput")}
    found["errors"] = _part(run, "error_share")
    for name, step in (_part(run, "steps") or {}).items():
        found |= {f"{name} {figure}": value for figure, value in (_part(step, "latency") or {}).items()}
        if _part(step, "count"):
            found[f"{name} errors"] = (_part(step, "failed") or 0) / _part(step, "count")
    return {name: value for name, value in found.items() if value is not None}


def mean_figures(runs: Sequence[Run | Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each figure that every run has, as :func:`figures_of` names them."""
    every = [figures_of(run) for run in runs]
    names = [name for name in (every[0] if every else ()) if all(name in figures for figures in every)]
    return {name: sum(figures[name] for figures in every) / len(every) for name in names}


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name)


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
        return int(value)  # NumPy's integers too.
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return str(value)  # JSON has no infinity.
