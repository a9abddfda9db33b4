"""Inspection of a plan without deserialising it: its header, its digest, and its manifest."""

import hashlib
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from asynctrt.backends.model_file import opened
from asynctrt.backends.registry import ONNX
from asynctrt.backends.tensorrt.manifest import Manifest, find_manifest
from asynctrt.backends.tensorrt.plan import (
    HEADER_NBYTES,
    capability_text,
    is_plan,
    read_header,
)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The facts about a plan that are known without deserialising it."""

    path: str
    nbytes: int
    digest: str
    """SHA-256, in hexadecimal."""
    kind: str
    """``TensorRT`` or ``TensorRT for RTX``."""
    tag: str
    version: str
    """The version of the library that built it."""
    compute_capabilities: tuple[str, ...] | None
    """The GPUs that it was built for; ``None`` for plans of TensorRT, whose headers do not say."""
    surplus_nbytes: int
    """The number of bytes after the plan's end, which the digest also covers."""
    manifest: Manifest | None
    """The manifest beside it, if it describes exactly these bytes."""


def find_plan(path: Path) -> PlanFile | None:
    """Return what a plan says without running any of its code; ``None`` for an ONNX model."""
    # Open it only once: the file may be replaced meanwhile.
    with opened(path) as file:
        beginning = file.read(HEADER_NBYTES)
        # An ONNX model has no signature. Any other file is read as a plan, whose errors explain the mismatch.
        if not is_plan(beginning) and (path.suffix == ONNX.suffixes[0] or beginning[:1] == b"\x08"):
            return None
        digest = digest_of_file(file)
        nbytes = file.tell()
    header = read_header(beginning, where=repr(str(path)), nbytes=nbytes)
    capabilities = header.compute_capabilities
    return PlanFile(
        path=str(path),
        nbytes=nbytes,
        digest=digest,
        kind=header.kind,
        tag=header.tag.decode(),
        version=header.version_text,
        compute_capabilities=None if capabilities is None else tuple(map(capability_text, capabilities)),
        surplus_nbytes=nbytes - header.nbytes,
        manifest=find_manifest(path, digest),
    )


def read_beginning(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with opened(path) as file:
        return file.read(HEADER_NBYTES)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Reads the whole file, part by part."""
    with opened(path) as file:
        return digest_of_file(file)


def digest_of_file(file: BufferedReader) -> str:
    """Return the SHA-256 of the whole of an open file, in hexadecimal."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
