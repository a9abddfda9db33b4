"""What a batch costs, by its rows: read from a file, or fitted to what an engine has measured.

Any of these is a model of the latency:

- a table of our own:
  ``{"batches": [{"rows": 1, "copy_in_ms": 0.1, "compute_ms": 1.5, "copy_out_ms": 0.1}, ...]}``, with
  ``"shapes": {"length=512": [...]}`` for shapes that cost something else, and optionally ``lanes``,
  ``interference``, ``jitter``, ``overhead_ms`` and ``splits``;
- the report of ``asynctrt load MODEL --json`` or of ``asynctrt bench MODEL --json``;
- ``dataclasses.asdict(engine.statistics())`` as JSON.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from asynctrt.errors import OptionsError, UsageError
from asynctrt.validation import check_names

STAGES: Final = ("copy_in_ms", "compute_ms", "copy_out_ms")
ENTRY: Final = ("rows", *STAGES, "batches")
EXTRAS: Final[Mapping[str, float]] = {"lanes": 1, "interference": 0.0, "jitter": 0.0, "overhead_ms": 0.0}
"""What a table of our own may say besides its batches, with the defaults."""

MS_MAX: Final = 3.6e6
ROWS_MAX: Final = 1 << 20
NAMES: Final = ("batches", "shapes", *EXTRAS, "splits")


class Cost(NamedTuple):
    """How long a batch takes, in ns."""

    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int

    @property
    def total_ns(self) -> int:
        """The three together: what it takes alone on the device."""
        return self.copy_in_ns + self.compute_ns + self.copy_out_ns


class Entry(NamedTuple):
    """What batches of one size cost on average, in ms."""

    rows: int
    copy_in_ms: float
    compute_ms: float
    copy_out_ms: float
    batches: int = 1
    """How many batches that is the mean of."""


class CostTable:
    """Costs by rows: straight lines between the sizes that are known, and beyond them the nearest line."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(sorted(entries))
        self._rows = [entry.rows for entry in self.entries]
        self._known: dict[int, Cost] = {}

    def cost(self, rows: int) -> Cost:
        """Return the cost of a batch of ``rows``."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._interpolated(rows)
        return known

    def _interpolated(self, rows: int) -> Cost:
        entries = self.entries
        at = bisect_left(self._rows, rows)
        if len(entries) == 1:
            # One size says nothing about others: those take as long, as on a device that is not full.
            low = high = entries[0]
        elif at == 0:
            low, high = entries[0], entries[1]
        else:
            at = min(at, len(entries) - 1)
            low, high = entries[at - 1], entries[at]
        share = (rows - low.rows) / (high.rows - low.rows) if high is not low else 0.0
        values = []
        for before, after in zip(low[1:4], high[1:4], strict=True):
            # A line that falls must not reach 0 or less beyond the sizes that are known.
            least = min(before, after) / 4 if share < 0 or share > 1 else 0.0
            values.append(round(max(before + (after - before) * share, least) * 1e6))
        return Cost(*values)


@dataclass(frozen=True)
class LatencyModel:
    """How long batches take on a device, and how those beside one another hinder each other.

    :param table: the costs of every shape that has none of its own in ``shapes``.
    :param lanes: batches that compute at once where there are no arenas: threads of a host device.
    :param interference: how much longer a batch computes for each other one that computes beside it: 0, not
        at all; 1, as long as one after the other.
    :param jitter: the standard deviation of the computing, as a share of its mean (lognormal).
    :param overhead_ns: from the end of a batch on the device until its callers are answered.
    """

    table: CostTable
    shapes: Mapping[str, CostTable] = field(default_factory=dict)
    lanes: int = 1
    interference: float = 0.0
    jitter: float = 0.0
    overhead_ns: int = 0
    splits: bool = False
    """Whether rows that wait are spread over idle lanes, as on a host device."""

    def cost(self, shape: object, rows: int) -> Cost:
        """Return the cost of a batch without jitter."""
        return self.shapes.get(str(shape), self.table).cost(rows) if self.shapes else self.table.cost(rows)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values, which :func:`parse_latency` reads."""
        content: dict[str, Any] = {"batches": [entry._asdict() for entry in self.table.entries]}
        if self.shapes:
            content["shapes"] = {
                shape: [entry._asdict() for entry in table.entries] for shape, table in self.shapes.items()
            }
        return content | {
            "lanes": self.lanes,
            "interference": self.interference,
            "jitter": self.jitter,
            "overhead_ms": self.overhead_ns / 1e6,
            "splits": self.splits,
        }


def read_latency(path: Path) -> LatencyModel:
    """Read a model of the latency from a file.

    :raises UsageError: if the file cannot be read.
    :raises OptionsError: if it is not JSON, or not a model; the message says where, and what is expected.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the latency model {str(path)!r} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionsError(
            f"{str(path)!r}, line {error.lineno}, column {error.colno} is not JSON: {error.msg}. A model of "
            'the latency reads {"batches": [{"rows": 1, "compute_ms": 1.5}, {"rows": 64, "compute_ms": 9}]}'
        ) from error
    except RecursionError as error:
        raise OptionsError(f"{str(path)!r} is nested too deeply to be a model of the latency") from error
    return parse_latency(content, str(path))


def parse_latency(content: Any, where: str) -> LatencyModel:
    """Return the model that JSON values describe, of any kind named above.

    :param where: what the values are called in messages.
    :raises OptionsError: if they are none; the message says where, and what is expected.
    """
    if not isinstance(content, dict):
        raise OptionsError(f'{where!r} is a {type(content).__name__}, not an object with "batches"')
    if "by_batch_rows" in content:
        return LatencyModel(_fitted(_of_statistics(content["by_batch_rows"], where), where))
    if "runs" in content:
        threads = _threads(content)
        table = _fitted(_of_load(content, where), where)
        return LatencyModel(table, lanes=threads or 1, splits=threads > 0)
    if "cases" in content:
        return LatencyModel(_fitted(_of_bench(content, where), where))
    if "batches" not in content:
        raise OptionsError(
            f'{where!r} has no "batches": give a table, or the --json report of `asynctrt load MODEL` '
            "or `asynctrt bench MODEL`"
        )
    return _of_table(content, where)


def _of_table(content: dict[str, Any], where: str) -> LatencyModel:
    """Return the model that a table of our own describes."""
    check_names(content, NAMES, f"key in {where}")
    numbers = {name: _number(content.get(name, usual), f"{where}, {name}") for name, usual in EXTRAS.items()}
    if numbers["lanes"] != int(numbers["lanes"]) or not 1 <= numbers["lanes"] <= ROWS_MAX:
        raise OptionsError(f"{where}, lanes must be a whole number from 1 on, not {content['lanes']!r}")
    for name in ("interference", "jitter"):
        if numbers[name] > 10:
            raise OptionsError(f"{where}, {name} is a share, so at most 10, not {content[name]!r}")
    if not isinstance(splits := content.get("splits", False), bool):
        raise OptionsError(f"{where}, splits must be true or false, not {splits!r:.100}")
    shapes = content.get("shapes", {})
    if not isinstance(shapes, dict):
        raise OptionsError(f"{where}, shapes must be an object: a table of batches for each shape")
    return LatencyModel(
        CostTable(_entries(content["batches"], f"{where}, batches")),
        {shape: CostTable(_entries(table, f"{where}, shapes, {shape}")) for shape, table in shapes.items()},
        int(numbers["lanes"]),
        numbers["interference"],
        numbers["jitter"],
        round(numbers["overhead_ms"] * 1e6),
        splits,
    )


def _entries(table: Any, where: str) -> list[Entry]:
    """Return the rows of a table as they are given."""
    if not isinstance(table, list) or not table:
        raise OptionsError(f'{where} must be a list such as [{{"rows": 1, "compute_ms": 1.5}}]')
    found: dict[int, Entry] = {}
    for number, item in enumerate(table, start=1):
        place = f"{where}, entry {number}"
        if not isinstance(item, dict) or "rows" not in item or "compute_ms" not in item:
            raise OptionsError(f"{place} lacks rows or compute_ms: {item!r:.100}")
        check_names(item, ENTRY, f"key in {place}")
        rows = item["rows"]
        if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= ROWS_MAX:
            raise OptionsError(
                f"{place}: rows must be a whole number from 1 to {ROWS_MAX}, not {rows!r:.100}"
            )
        if rows in found:
            raise OptionsError(f"{place}: {rows} rows are there already")
        values = [_number(item.get(name, 0.0), f"{place}, {name}") for name in STAGES]
        if not values[1] > 0:
            raise OptionsError(f"{place}: compute_ms must be above 0, not {item['compute_ms']!r}")
        found[rows] = Entry(rows, values[0], values[1], values[2])
    return list(found.values())


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MS_MAX:
        raise OptionsError(f"{where} must be a number from 0 to {MS_MAX:g}, not {value!r:.100}")
    return float(value)


def _of_statistics(sizes: Any, where: str) -> Iterator[Entry]:
    """Yield the means of ``Engine.statistics().by_batch_rows``."""
    try:
        for rows, size in sizes.items():
            count = int(size["count"])
            if count > 0:
                into, compute, out = (float(size[f"{stage[:-3]}_ns"]) / count / 1e6 for stage in STAGES)
                yield Entry(int(rows), into, compute, out, count)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OptionsError(
            f"{where!r}: by_batch_rows must have count, copy_in_ns, compute_ns and copy_out_ns by rows "
            f"({type(error).__name__}: {error})"
        ) from error


def _of_load(content: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """Yield what the runs of a load test found out about its engine's batches."""
    found = False
    try:
        for run in content["runs"]:
            costs = run.get("batches", {}).get("costs", {})
            found = found or bool(costs)
            yield from _of_statistics(costs, where)
    except (AttributeError, TypeError) as error:
        raise OptionsError(f"{where!r} is not the report of a load test: {error}") from error
    if not found:
        raise OptionsError(
            f"{where!r} does not say what batches cost: it is of a server, of a function, or an older one. "
            "Measure the model itself: asynctrt load MODEL --sweep callers=1,4,16,64 --json FILE"
        )


def _threads(content: Mapping[str, Any]) -> int:
    """Return how many threads computed in a load test: one a core on the host device; 0 elsewhere."""
    target, machine = content.get("target"), content.get("machine")
    if isinstance(target, dict) and target.get("device") == "host" and isinstance(machine, dict):
        cores = machine.get("cores")
        return cores if type(cores) is int and cores > 0 else 1
    return 0


def _of_bench(content: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """Yield the batches of the raw runtime, with the fewest threads that were measured."""
    try:
        raw = [case for case in content["cases"] if case.get("kind") == "raw" and case.get("median")]
        threads = min((case["threads"] for case in raw), default=0)
        for case in raw:
            if case["threads"] == threads:
                yield Entry(int(case["rows"]), 0.0, float(case["median"]["batch_ms"]), 0.0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OptionsError(
            f"{where!r} is not the report of a benchmark: {type(error).__name__}: {error}"
        ) from error
    if not raw:
        raise OptionsError(
            f"{where!r} has no batches of a model: make it with asynctrt bench MODEL.onnx --json"
        )


def _fitted(entries: Iterator[Entry], where: str) -> CostTable:
    """Return a table in which more rows never cost less: what is measured of few batches is noisy.

    Neighbours that are out of order are put together, weighted by their batches (isotonic regression by
    pooling adjacent violators).
    """
    sums: dict[int, list[float]] = {}
    for entry in entries:
        if not 1 <= entry.rows <= ROWS_MAX or not all(0 <= value <= MS_MAX for value in entry[1:4]):
            raise OptionsError(f"{where!r}: {entry} is out of range")
        into = sums.setdefault(entry.rows, [0.0] * 4)
        for place, value in enumerate((*entry[1:4], 1.0)):
            into[place] += value * entry.batches
    if not sums:
        raise OptionsError(f"{where!r} has no batch in it: measure for longer")
    rows = sorted(sums)
    counts = [sums[size][3] for size in rows]
    stages = [_rising([sums[size][stage] / sums[size][3] for size in rows], counts) for stage in range(3)]
    if not all(value > 0 and math.isfinite(value) for value in stages[1]):
        raise OptionsError(f"{where!r}: its batches took no time to compute, so nothing follows from them")
    found = zip(rows, stages[0], stages[1], stages[2], counts, strict=True)
    return CostTable(
        [Entry(size, into, compute, out, int(count)) for size, into, compute, out, count in found]
    )


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, its, count = pools.pop()
            mean = (before * its + mean * total) / (its + total)
            total, length = total + its, length + count
        pools.append((mean, total, length))
    return [mean for mean, _, length in pools for _ in range(length)]
