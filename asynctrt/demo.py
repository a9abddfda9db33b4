"""Run a real model on real input: identify file types with the ONNX model that magika ships.

Only magika's data is used: the model, its configuration and its table of content types. The inputs are made
here from each file's bytes, as the configuration specifies.
"""

import asyncio
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

import asynctrt
from asynctrt import clock
from asynctrt.errors import MissingExtraError
from asynctrt.tensors import Array

CALLERS: Final = 256
"""Requests in flight at once."""

MAX_ROWS: Final = 4
"""On a CPU this model is fastest in small batches: `asynctrt bench` on it shows by how much."""


@dataclass(frozen=True, slots=True)
class ContentModel:
    """The model's file, and the meaning of its input and output."""

    path: Path
    labels: tuple[str, ...]
    beg_size: int
    end_size: int
    block_size: int
    padding: int
    bytes_min: int
    thresholds: dict[str, float]
    threshold_default: float
    overwrite: dict[str, str]
    extensions: dict[str, tuple[str, ...]]
    texts: frozenset[str]

    @classmethod
    def find(cls) -> "ContentModel":
        """Find the model of the installed ``magika``.

        :raises MissingExtraError: if it is not installed.
        """
        spec = find_spec("magika")
        if spec is None or spec.origin is None:
            raise MissingExtraError("the demo's model comes with magika: pip install 'asynctrt[demo]'")
        package = Path(spec.origin).parent
        path = max((package / "models").glob("*/model.onnx"))
        config: dict[str, Any] = json.loads((path.parent / "config.min.json").read_bytes())
        kinds: dict[str, Any] = json.loads((package / "config" / "content_types_kb.min.json").read_bytes())
        return cls(
            path=path,
            labels=tuple(config["target_labels_space"]),
            beg_size=config["beg_size"],
            end_size=config["end_size"],
            block_size=config["block_size"],
            padding=config["padding_token"],
            bytes_min=config["min_file_size_for_dl"],
            thresholds=config["thresholds"],
            threshold_default=config["medium_confidence_threshold"],
            overwrite=config["overwrite_map"],
            extensions={label: tuple(kind["extensions"]) for label, kind in kinds.items()},
            texts=frozenset(label for label, kind in kinds.items() if kind["is_text"]),
        )

    def row(self, beginning: bytes, end: bytes) -> Array | None:
        """Return the input of a file, int32 ``(1, beg_size + end_size)``; ``None`` if the file is too small.

        ``beginning`` and ``end`` are its first and last ``block_size`` bytes. White space around them is
        stripped, and missing bytes are padded towards the middle.
        """
        head = beginning.lstrip()[: self.beg_size]
        tail = end.rstrip()[-self.end_size :]
        if len(head) < self.bytes_min:
            return None
        row = np.full((1, self.beg_size + self.end_size), self.padding, np.int32)
        row[0, : len(head)] = np.frombuffer(head, np.uint8)
        row[0, row.shape[1] - len(tail) :] = np.frombuffer(tail, np.uint8)
        return row

    def label(self, scores: Array) -> str:
        """Return the most likely label; or "txt" or "unknown" if the model is not confident."""
        best = int(scores.argmax())
        label = self.labels[best]
        shown = self.overwrite.get(label, label)
        if scores[best] >= self.thresholds.get(label, self.threshold_default):
            return shown
        return "txt" if shown in self.texts else "unknown"

    def agrees(self, path: Path, label: str) -> bool | None:
        """Return whether the label fits the file's extension; ``None`` if the extension is unknown."""
        ending = path.suffix.lower().lstrip(".")
        if not any(ending in known for known in self.extensions.values()):
            return None
        return ending in self.extensions.get(label, ())


@dataclass(slots=True)
class DemoRun:
    """The timing of one run over all files, in ns."""

    files: int = 0
    elapsed_ns: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    mean_batch_rows: float = 0.0

    @property
    def files_per_s(self) -> float:
        """Files a second; 0 before the first."""
        return self.files / self.elapsed_ns * 1e9 if self.elapsed_ns else 0.0

    def latency_ms(self, percent: float) -> float:
        """Return a percentile of the requests' latency in ms."""
        return float(np.percentile(self.latencies_ns, percent)) / 1e6 if self.latencies_ns else 0.0


@dataclass(slots=True)
class DemoReport:
    """The demo's findings and timings. It is filled while the demo runs, so that Ctrl-C still shows them."""

    folders: tuple[Path, ...] = ()
    found: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    together: DemoRun = field(default_factory=DemoRun)
    one_by_one: DemoRun = field(default_factory=DemoRun)


def default_folders() -> tuple[Path, ...]:
    """Return the folders of Python's standard library and of this package."""
    return Path(sysconfig.get_path("stdlib")), Path(asynctrt.__file__).parent


def find_files(folders: Sequence[Path], limit: int) -> list[Path]:
    """Return up to ``limit`` files below the folders: a random sample, the same each time."""

    def walk() -> Iterator[Path]:
        for folder in folders:
            for path in folder.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    yield path

    files = sorted(set(walk()))
    if len(files) > limit:
        files = sorted(random.Random(0).sample(files, limit))  # noqa: S311  (a sample, not a secret)
    return files


def read_row(model: ContentModel, path: Path) -> Array | None:
    """Return the model's input for a file; ``None`` if it cannot be read or is too small."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            block = min(size, model.block_size)
            file.seek(0)
            beginning = file.read(block)
            file.seek(size - block)
            return model.row(beginning, file.read(block))
    except OSError:
        return None


def read_input(path: Path) -> Array | None:
    """Return the installed model's input for a file, as a reader for ``asynctrt load --reader`` does."""
    return read_row(_installed_model(), path)


@cache
def _installed_model() -> ContentModel:
    return ContentModel.find()


async def run_together(
    engine: asynctrt.Engine,
    model: ContentModel,
    rows: Sequence[tuple[Path, Array]],
    report: DemoReport,
    advance: Callable[[int], None],
) -> None:
    """Identify every file with ``await engine.infer``, many at once, and count the labels."""
    waiting = iter(rows)
    done = report.together
    started_ns = clock.now_ns()

    async def caller() -> None:
        for path, row in waiting:
            sent_ns = clock.now_ns()
            result = await engine.infer(row)
            now_ns = clock.now_ns()
            label = model.label(result[engine.outputs[0].name][0])
            agrees = model.agrees(path, label)
            report.found[label] += 1
            if agrees is not None:
                report.judged[label] += 1
                report.right[label] += agrees
            done.latencies_ns.append(now_ns - sent_ns)
            done.files += 1
            done.elapsed_ns = now_ns - started_ns
            advance(1)

    try:
        async with asyncio.TaskGroup() as callers:
            for _ in range(min(CALLERS, len(rows))):
                callers.create_task(caller())
    finally:
        done.mean_batch_rows = engine.statistics().mean_batch_rows


async def run_one_by_one(
    engine: asynctrt.Engine,
    rows: Sequence[tuple[Path, Array]],
    done: DemoRun,
    advance: Callable[[int], None],
) -> None:
    """Send the same files one at a time, for comparison."""
    started_ns = clock.now_ns()
    done.mean_batch_rows = 1.0
    for _, row in rows:
        sent_ns = clock.now_ns()
        await engine.infer(row)
        now_ns = clock.now_ns()
        done.latencies_ns.append(now_ns - sent_ns)
        done.files += 1
        done.elapsed_ns = now_ns - started_ns
        advance(1)
