"""What a plan says of itself, before any library is asked to read it.

A plan begins with 64 bytes: a tag, the size of the whole, the version of the library that built it and, in
plans of TensorRT for RTX, the GPUs that it was built for. So most of what goes wrong with a plan can be said
with its cause: another kind of file, one that was cut off, another version, another GPU.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt.errors import ModelError, ModelNotFoundError

HEADER_NBYTES: Final = 64
"""``Runtime.engine_header_size`` of the package that has it."""

TAG_TENSORRT: Final = b"ftrt"
TAG_RTX: Final = b"vtrt"

KINDS: Final = {TAG_TENSORRT: "TensorRT", TAG_RTX: "TensorRT for RTX"}

_FIXED: Final = struct.Struct("<4s I Q Q 4B 4s Q")
"""Tag, layout (0), number of parts, size of the whole, version, the tag again, GPUs. ``trtexec
--getPlanVersionOnly`` reads the version of a TensorRT plan at the same place; the rest was seen on plans of
TensorRT for RTX 1.7."""

_RTX_GPUS: Final = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
"""The compute capabilities that the lowest bits stand for, seen on plans that were built for one each."""

_SIGNATURES: Final = (
    (b"PK\x03\x04", "a zip archive, as PyTorch and TorchScript save models. Export it to ONNX"),
    (b"\x80", "a Python pickle, as old PyTorch checkpoints are. Export the model to ONNX"),
    (b"\x89HDF", "an HDF5 file, as Keras saves models. Export the model to ONNX"),
    (b"\x1f\x8b", "a gzip archive. Unpack it, and give the plan that is in it"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself. Fetch it: git lfs pull"),
    (b"ptrt", "a plan of a TensorRT before 8.6, whose plans no later version reads. Build it anew"),
    (b"\x08", "most likely an ONNX model. Open that as .onnx on the host device, or build a plan from it"),
)
"""How files begin that are given in a plan's place. In this order; the last is a guess."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What the first 64 bytes of a plan say."""

    tag: bytes
    """``ftrt`` for TensorRT, full, lean or dispatch; ``vtrt`` for TensorRT for RTX."""
    nbytes: int
    """Size of the whole plan."""
    version: tuple[int, int, int, int]
    """The library that built it."""
    compute_capabilities: tuple[tuple[int, int], ...] | None
    """The GPUs it was built for, where the header says so."""

    @property
    def kind(self) -> str:
        """What builds and runs such plans."""
        return KINDS[self.tag]

    @property
    def version_text(self) -> str:
        """The version as packages write it."""
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan in memory."""

    where: str
    """Its path, or what stands for it, for messages."""
    name: str
    """What a model of it is called when nobody says otherwise."""
    content: bytes
    header: PlanHeader


def read_plan(plan: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Plan:
    """The plan at a path, or in memory.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is no plan, or not the whole of one.
    """
    if isinstance(plan, bytes | bytearray | memoryview):
        content = bytes(plan)
        where, name = f"the plan given as {len(content):,} bytes", "plan"
    else:
        path = Path(plan)
        where, name = repr(str(path)), path.stem
        content = _read_file(path)
    return Plan(where, name, content, read_header(content, where=where))


def read_header(content: bytes, *, where: str = "the plan") -> PlanHeader:
    """The header of a whole plan.

    :raises ModelError: if it is no plan, or not the whole of one.
    """
    if not content:
        raise ModelError(f"{where} is empty. Build the plan again, or copy it again")
    if content[:4] not in KINDS:
        raise ModelError(f"{where} is not a TensorRT plan: it {_guess(content)}")
    if len(content) < HEADER_NBYTES:
        raise ModelError(
            f"{where} is cut off: it has {len(content)} bytes, and the header of a plan alone has "
            f"{HEADER_NBYTES}. Copy it again"
        )
    tag, _, _, nbytes, major, minor, patch, build, _, gpus = _FIXED.unpack_from(content)
    if nbytes > len(content):
        raise ModelError(
            f"{where} is cut off: its header says {nbytes:,} bytes, and it has {len(content):,}. Copy it "
            "again"
        )
    capabilities = None
    if tag == TAG_RTX:
        capabilities = tuple(gpu for bit, gpu in enumerate(_RTX_GPUS) if gpus >> bit & 1)
    return PlanHeader(tag, nbytes, (major, minor, patch, build), capabilities)


def capability_text(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it: ``9.0``."""
    return f"{capability[0]}.{capability[1]}"


def _read_file(path: Path) -> bytes:
    try:
        # The whole file, not a mapping of it: a file that is cut off while it is mapped ends the process.
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file {str(path)!r}. Give the path of a TensorRT plan; the working directory is "
            f"{str(Path.cwd())!r}"
        ) from error
    except IsADirectoryError as error:
        raise ModelNotFoundError(
            f"{str(path)!r} is a folder. Give the path of a TensorRT plan in it"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{str(path)!r} cannot be read: {error.strerror}. Look at its owner and mode"
        ) from error


def _guess(content: bytes) -> str:
    """What a file that is no plan probably is."""
    for signature, meaning in _SIGNATURES:
        if content.startswith(signature):
            return f"begins like {meaning}"
    start = content[:64]
    if all(32 <= byte < 127 or byte in b"\t\n\r" for byte in start):
        return f"is text, beginning with {start.decode('ascii')[:40]!r}. Give the path of a plan"
    return (
        f"begins with {content[:4]!r}, and a plan with {TAG_TENSORRT!r} or {TAG_RTX!r}. Build it with trtexec"
    )
