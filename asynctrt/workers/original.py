"""A check that each worker of an engine opens the same model as the first one did.

Files change while a server runs, for example by a deployment. If a replacement worker opened the new file, it
would answer with other weights under the old name and version, and perhaps with shapes that its front does
not expect.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from asynctrt._util.files import is_there, open_regular
from asynctrt._util.version import __version__
from asynctrt.backends.onnx_objects import external_names
from asynctrt.core.description import Description
from asynctrt.core.loading import is_attribute
from asynctrt.errors import ModelError

OPENING_S_MIN: Final = 20.0
"""The minimum time limit for a replacement worker to open the engine: files that were in memory at first may
have to be read from disk by now."""

OPENING_FACTOR: Final = 10
"""The same limit as a multiple of the slowest opening so far; the larger limit counts."""

FILES_NAMED: Final = 32
"""The maximum number of files reported by name: a model may have one for each of its tensors."""

RUNTIMES: Final = ("numpy", "onnxruntime", "tensorrt")
"""Packages whose versions affect a worker's answers."""

Digest = tuple[str, str]
"""A file's path, and its SHA-256 in hexadecimal."""


class Original:
    """The engine as its first worker opened it."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self._opening_s = 0.0

    def __repr__(self) -> str:
        return f"<Original {self.description.name if self.description else 'not opened yet'}>"

    @property
    def opening_s_max(self) -> float | None:
        """The time limit for the next worker to open the engine; ``None`` for the first one."""
        if self.description is None:
            return None
        return max(OPENING_FACTOR * self._opening_s, OPENING_S_MIN)

    def why_late(self, limit_s: float) -> str:
        """Return the message for a worker that exceeded the limit."""
        return f"it had not opened the engine after {limit_s:.0f} s; others took {self._opening_s:.1f} s"

    def why_not(self, description: Description, opening_s: float) -> str:
        """Return why a worker cannot be used; empty if it is the first one or matches that."""
        if self.description is None:
            self.description = description
        why = difference(self.description, description)
        if not why:
            self._opening_s = max(self._opening_s, opening_s)
        return why


def difference(first: Description, other: Description) -> str:
    """Return why a worker cannot replace the first one; empty if it matches."""
    known = dict(first.files)
    for path, digest in other.files:
        if known.pop(path, None) != digest:
            return f"the file {path!r} was changed since the engine was opened. {FIX}"
    if known:
        return f"the file {next(iter(known))!r} is not used any more since the engine was opened. {FIX}"
    for name, version in other.versions:
        before = dict(first.versions).get(name, version)
        if before != version:
            return f"{name} {version} is installed now, and the engine was opened with {before}. {FIX}"
    if (first.name, first.platform) != (other.name, other.platform):
        now, before = [f"{one.name!r} on {one.platform}" for one in (other, first)]
        return f"the model is {now} now, and was {before} when the engine was opened. {FIX}"
    if (first.inputs, first.outputs) != (other.inputs, other.outputs):
        return f"the model's inputs or outputs were changed since the engine was opened. {FIX}"
    if first.batching.is_on != other.batching.is_on:
        return "it did not find the same as the first one about whether requests may share a batch"
    return ""


FIX: Final = "Open the engine again for the new one, or put the old one back"


def files_of(model: str) -> list[Path]:
    """Return the existing files of a model: its own file and, for ONNX, its external files with weights.

    For a model in a Python module, return the module's file.
    """
    if is_attribute(model):
        try:
            spec = find_spec(model.partition(":")[0])
        except Exception:
            return []  # Opening the model will fail as well, and say why.
        return [Path(spec.origin)] if spec is not None and spec.origin and spec.has_location else []
    path = Path(model)
    return [path, *dict.fromkeys(_beside(path))] if is_there(path) and path.is_file() else []


def _beside(path: Path) -> Iterator[Path]:
    """Iterate over the existing external files with weights that an ONNX file names."""
    if path.suffix != ".onnx":
        return
    try:
        with open_regular(path) as file:
            places = list(external_names(file))
    except OSError:
        return
    beside = [path.parent / place for place in places]
    yield from [one for one in beside if is_there(one) and one.is_file()]


def marks_of(files: Sequence[Path]) -> list[tuple[int, int, int, int] | None]:
    """Return for each file a mark that changes when the file changes; ``None`` if it cannot be read."""
    return [_mark(path) for path in files]


def _mark(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digests_of(files: Sequence[Path]) -> tuple[Digest, ...]:
    """Return the digests of files, with one joint digest for those above the limit. Blocks while reading."""
    found = []
    for path in files:
        try:
            with open_regular(path) as file:
                found.append((str(path), hashlib.file_digest(file, "sha256").hexdigest()))
        except OSError as error:  # Opening the model fails as well, or `check_unchanged` finds the file gone.
            found.append((str(path), str(error)))
    if len(found) > FILES_NAMED:
        named, others = found[:FILES_NAMED], found[FILES_NAMED:]
        found = [*named, (f"{len(others)} others", hashlib.sha256(repr(others).encode()).hexdigest())]
    return tuple(found)


def check_unchanged(files: Sequence[Path], before: Sequence[object]) -> None:
    """Check that the opened files are those read for the digests.

    :raises ModelError: if a file was changed meanwhile.
    """
    for path, mark, now in zip(files, before, marks_of(files), strict=True):
        if mark != now:
            raise ModelError(
                f"{str(path)!r} was changed while it was opened: open it again once it is complete"
            )


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the packages that this process computes with."""
    loaded = [(name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in RUNTIMES]
    return ("asynctrt", __version__), *[(name, version) for name, version in loaded if version]
