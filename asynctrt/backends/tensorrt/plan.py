"""Read the header of a plan, before any library loads it.

A plan begins with 64 bytes: a tag, the total size, the version of the library that built it and, in plans of
TensorRT for RTX, the GPUs that it was built for. So most errors can name their cause: another kind of file, a
truncated one, another version, another GPU.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt.backends.model_file import opened
from asynctrt.errors import ModelError

HEADER_NBYTES: Final = 64
"""The value of ``Runtime.engine_header_size`` in packages that have it."""

TAG_TENSORRT: Final = b"ftrt"
TAG_RTX: Final = b"vtrt"

KINDS: Final = {TAG_TENSORRT: "TensorRT", TAG_RTX: "TensorRT for RTX"}

_FIXED: Final = struct.Struct("<4s I Q Q 4B 4s Q")
"""Tag, layout (0), number of parts, total size, version, the tag again, GPUs. ``trtexec
--getPlanVersionOnly`` reads the version of a TensorRT plan at the same offset; the rest was inferred from
plans of TensorRT for RTX 1.7."""

_RTX_GPUS: Final = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
"""The compute capabilities of the lowest bits, inferred from plans that were each built for one of them."""

_SIGNATURES: Final = (
    (b"PK\x03\x04", "a zip archive, as PyTorch and TorchScript save models. Export the model to ONNX"),
    (b"\x80", "a Python pickle, as old PyTorch checkpoints are. Export the model to ONNX"),
    (b"\x89HDF", "an HDF5 file, as Keras saves models. Export the model to ONNX"),
    (b"\x1f\x8b", "a gzip archive. Unpack it, and give the path of the plan in it"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself. Fetch it: git lfs pull"),
    (b"ptrt", "a plan of a TensorRT before 8.6, which no later version reads. Rebuild it"),
    (b"\x08", "most likely an ONNX model. Open it as .onnx, or build a plan: asynctrt build MODEL.onnx"),
)
"""The first bytes of files that are often given instead of a plan, in matching order; the last one is a
guess."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """The content of the first 64 bytes of a plan."""

    tag: bytes
    """``ftrt`` for TensorRT (full, lean or dispatch), ``vtrt`` for TensorRT for RTX."""
    nbytes: int
    """The size of the whole plan."""
    version: tuple[int, int, int, int]
    """The version of the library that built it."""
    compute_capabilities: tuple[tuple[int, int], ...] | None
    """The GPUs that it was built for, or ``None`` if the header does not say."""

    @property
    def kind(self) -> str:
        """The product that builds and runs this kind of plan."""
        return KINDS[self.tag]

    @property
    def version_text(self) -> str:
        """The version as in package names: ``11.4.0.106``."""
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan in memory."""

    where: str
    """The path or a description, for messages."""
    name: str
    """The default name of the model."""
    content: bytes
    header: PlanHeader
    path: Path | None = None
    """The file, or ``None`` if there is none."""


def read_plan(plan: str | os.PathLike[str] | bytes | bytearray | memoryview | Plan) -> Plan:
    """Read a plan from a path or from memory, and check its header. A :class:`Plan` is returned unchanged."""
    path = None
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, bytes | bytearray | memoryview):
        content = bytes(plan)
        where, name = f"the plan given as {len(content):,} bytes", "plan"
    else:
        path = Path(plan)
        where, name = repr(str(path)), path.stem
        with opened(path) as file:
            # Refuse a file that is not a plan before reading all of it, however large it is.
            read_header(file.read(HEADER_NBYTES), where=where, nbytes=os.fstat(file.fileno()).st_size)
            file.seek(0)
            # Not memory-mapped, because truncating a mapped file would kill the process.
            content = file.read()
    return Plan(where, name, content, read_header(content, where=where), path)


def read_header(content: bytes, *, where: str = "the plan", nbytes: int | None = None) -> PlanHeader:
    """Return the header of a plan from its content, or from the beginning of its ``nbytes`` bytes."""
    given = len(content) if nbytes is None else nbytes
    if not content:
        raise ModelError(f"{where} is empty. Rebuild the plan, or copy it again")
    if not is_plan(content):
        raise ModelError(f"{where} is not a TensorRT plan: it {_guess(content)}")
    if len(content) < HEADER_NBYTES:
        raise ModelError(
            f"{where} is truncated: it has {len(content)} bytes, and the header of a plan alone has "
            f"{HEADER_NBYTES}. Copy it again"
        )
    tag, _, _, said, major, minor, patch, build, _, gpus = _FIXED.unpack_from(content)
    if said > given:
        raise ModelError(
            f"{where} is truncated: its header says {said:,} bytes, but it has {given:,}. Copy it again"
        )
    capabilities = None
    if tag == TAG_RTX:
        capabilities = tuple(gpu for bit, gpu in enumerate(_RTX_GPUS) if gpus >> bit & 1)
    return PlanHeader(tag, said, (major, minor, patch, build), capabilities)


def is_plan(beginning: bytes) -> bool:
    """Return whether a file begins with the signature of a plan."""
    return beginning.startswith(tuple(KINDS))


def capability_text(capability: tuple[int, int]) -> str:
    """Return a compute capability as NVIDIA writes it: ``9.0``."""
    return f"{capability[0]}.{capability[1]}"


def _guess(content: bytes) -> str:
    """Return what kind of file this probably is, and the fix."""
    for signature, meaning in _SIGNATURES:
        if content.startswith(signature):
            return f"begins like {meaning}"
    start = content[:HEADER_NBYTES]
    if start.isascii() and start.translate(None, b"\t\n\r").decode().isprintable():
        return f"is text that begins with {start.decode()!r}. Give the path of a plan"
    return (
        f"begins with {content[: len(TAG_RTX)]!r}, but a plan begins with {TAG_TENSORRT!r} or {TAG_RTX!r}. "
        "Build one: asynctrt build MODEL.onnx"
    )
