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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

import asynctrt
from asynctrt.errors import MissingExtraError
from asynctrt.tensors import Array

CALLERS: Final = 32
"""Requests in flight at once."""

MAX_ROWS: Final = 4
"""On a CPU this model is fastest in small batches: `asynctrt load demo --sweep max_rows=1,4,32` shows it."""


LOOKED_AT_MAX: Final = 100_000
"""A folder may be a whole disk, and nobody waits for that."""


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
class Found:
    """What the files are. It is filled while they are identified, so that Ctrl-C still shows them."""

    labels: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    skipped: int = 0

    @property
    def files(self) -> int:
        """The files that were identified."""
        return self.labels.total()


def default_folders() -> tuple[Path, ...]:
    """Return the folders of Python's standard library and of this package."""
    return Path(sysconfig.get_path("stdlib")), Path(asynctrt.__file__).parent


def find_files(folders: Sequence[Path], limit: int) -> list[Path]:
    """Return up to ``limit`` files below the folders: a random sample, the same each time.

    What may not be looked at is left out, and so is what comes after the first :data:`LOOKED_AT_MAX` files.
    """

    def walk() -> Iterator[Path]:
        for folder in folders:
            for path in folder.rglob("*"):
                with suppress(OSError):
                    if path.is_file() and not path.is_symlink():
                        yield path

    files = sorted(set(islice(walk(), LOOKED_AT_MAX)))
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


async def identify(
    engine: asynctrt.Engine,
    model: ContentModel,
    rows: Sequence[tuple[Path, Array]],
    found: Found,
    advance: Callable[[], None],
) -> None:
    """Identify every file with ``await engine.infer``, many at once, and count the labels."""
    waiting = iter(rows)

    async def caller() -> None:
        for path, row in waiting:
            result = await engine.infer(row)
            label = model.label(result[engine.outputs[0].name][0])
            agrees = model.agrees(path, label)
            found.labels[label] += 1
            if agrees is not None:
                found.judged[label] += 1
                found.right[label] += agrees
            advance()

    async with asyncio.TaskGroup() as callers:
        for _ in range(min(CALLERS, len(rows))):
            callers.create_task(caller())
