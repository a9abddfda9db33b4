"""Inspection of a plan without deserialising it: its header, and which installed packages could run it."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path
from typing import Final

from asynctrt.backends.registry import ONNX
from asynctrt.backends.tensorrt.abilities import COMPATIBLE_SINCE, compatible_since
from asynctrt.backends.tensorrt.flavours import EXTRAS
from asynctrt.backends.tensorrt.manifest import Manifest, find_manifest
from asynctrt.backends.tensorrt.plan import (
    HEADER_NBYTES,
    KINDS,
    TAG_RTX,
    PlanHeader,
    capability_text,
    opened,
    read_header,
)
from asynctrt.backends.tensorrt_options import FLAVOURS

SUFFIXES: Final = ("", "-cu11", "-cu12", "-cu13")
"""The suffixes of package names: none, or the CUDA version that the package is built for."""

BEGINNING_NBYTES: Final = max(HEADER_NBYTES, 4096)


@dataclass(frozen=True, slots=True)
class PlanRunner:
    """One of TensorRT's packages, and whether it runs a plan."""

    package: str
    version: str | None
    """The installed version, or ``None``."""
    verdict: str
    """``yes``, ``no``, ``maybe`` or ``not installed``."""
    why: str


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
    layout: int
    parts: int
    compute_capabilities: tuple[str, ...] | None
    """The GPUs that it was built for; ``None`` for plans of TensorRT, whose headers do not say."""
    surplus_nbytes: int
    """The number of bytes after the plan's end, which the digest also covers."""
    runners: tuple[PlanRunner, ...]
    manifest: Manifest | None
    """The manifest beside it, if it describes exactly these bytes."""


def find_plan(path: Path) -> PlanFile | None:
    """Return what a plan says without running any of its code; ``None`` for an ONNX model.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is neither, or a damaged plan.
    """
    beginning = read_beginning(path)
    # An ONNX model has no signature. Any other file is read as a plan, whose errors explain the mismatch.
    if not is_plan(beginning) and (path.suffix == ONNX.suffixes[0] or beginning[:1] == b"\x08"):
        return None
    return read_plan_file(path)


def read_plan_file(path: Path) -> PlanFile:
    """Read a plan's header and digest without running any of its code.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is not a plan, or is truncated.
    """
    # Open it only once: the file may be replaced meanwhile.
    with opened(path) as file:
        beginning = file.read(BEGINNING_NBYTES)
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
        layout=header.layout,
        parts=header.parts,
        compute_capabilities=None if capabilities is None else tuple(map(capability_text, capabilities)),
        surplus_nbytes=nbytes - header.nbytes,
        runners=judge(header, installed_versions()),
        manifest=find_manifest(path, digest),
    )


def read_beginning(path: Path) -> bytes:
    """Return the first bytes of a file.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it cannot be read.
    """
    with opened(path) as file:
        return file.read(BEGINNING_NBYTES)


def is_plan(beginning: bytes) -> bool:
    """Return whether a file begins with the signature of a plan."""
    return beginning[:4] in KINDS


def installed_versions() -> dict[str, str]:
    """Return the version of each installed TensorRT package, without importing any."""
    found = {}
    for package in FLAVOURS:
        for suffix in SUFFIXES:
            with suppress(PackageNotFoundError):
                found[package] = version(package.replace("_", "-") + suffix)
    return found


def judge(header: PlanHeader, installed: Mapping[str, str]) -> tuple[PlanRunner, ...]:
    """Return whether each package can run a plan, judged by versions only."""
    is_rtx = header.tag == TAG_RTX
    return tuple(_judge(header, name, installed.get(name)) for name in FLAVOURS if ("rtx" in name) == is_rtx)


def _judge(header: PlanHeader, name: str, here: str | None) -> PlanRunner:
    if here is None:
        return PlanRunner(name, None, "not installed", f"pip install 'asynctrt[{EXTRAS[name]}]'")
    numbers = tuple(int(number) for number in re.findall(r"\d+", here)[:4])
    needs_compatible = name in ("tensorrt_lean", "tensorrt_dispatch")
    if numbers == header.version:
        if needs_compatible:
            return PlanRunner(name, here, "maybe", "it runs only plans that were built version-compatible")
        return PlanRunner(name, here, "yes", "the version that built it")
    if "rtx" in name:
        return PlanRunner(name, here, "no", "it runs only plans of the same version. Rebuild the plan")
    if header.version > numbers:
        return PlanRunner(name, here, "no", "the plan was built by a later version. Update, or rebuild it")
    if header.version[:2] < COMPATIBLE_SINCE:
        return PlanRunner(name, here, "no", "plans of versions before 8.6 run nowhere else. Rebuild it")
    if header.version < compatible_since(numbers):
        last = "the last version that runs plans of TensorRT 8 is TensorRT 10. Install that, or rebuild it"
        return PlanRunner(name, here, "no", last)
    return PlanRunner(
        name, here, "maybe", "only if it was built version-compatible, and with allow_host_code=True"
    )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Reads the whole file, part by part.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it cannot be read.
    """
    with opened(path) as file:
        return digest_of_file(file)


def digest_of_file(file: BufferedReader) -> str:
    """Return the SHA-256 of the whole of an open file, in hexadecimal."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
