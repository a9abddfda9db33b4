"""``asynctrt.build``: from an ONNX file to a plan, with its manifest."""

import hashlib
import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import is_there, write_whole
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.model_file import opened
from asynctrt.backends.onnx_objects import external_names
from asynctrt.backends.registry import PLAN_SUFFIXES
from asynctrt.backends.tensorrt.build_process import build_in_process
from asynctrt.backends.tensorrt.builder import Built, Report
from asynctrt.backends.tensorrt.manifest import Manifest, NamedTensor, manifest_path
from asynctrt.backends.tensorrt.profiles import NetworkTensor, profile_text
from asynctrt.backends.tensorrt.trust import record
from asynctrt.core.loading import find_device
from asynctrt.devices.base import Device
from asynctrt.errors import BuildError, OptionsError
from asynctrt.plans.plan_file import digest_of

MODEL_NBYTES_MAX: Final = 2 << 30
"""The limit of protobuf; larger models keep their weights in external files."""


@dataclass(frozen=True, slots=True)
class OnnxContent:
    """The content of an ONNX model, and the digests that identify it."""

    path: Path
    content: bytes
    digest: str
    """SHA-256 of the file itself, in hexadecimal."""
    external: dict[str, str]
    """Its external files with weights, and the SHA-256 of each."""


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan that was built and written."""

    path: Path
    manifest: Manifest


def build(
    model: str | os.PathLike[str],
    plan: str | os.PathLike[str] | None = None,
    *,
    device: str | Device | None = None,
    progress: Report | None = None,
    options: BuildOptions | None = None,
    **settings: Any,
) -> BuiltPlan:
    """Build a TensorRT plan from an ONNX model. Blocks, for seconds to hours; Ctrl-C ends it.

    The build runs in a child process, because the library's parser crashes on some damaged models.

    It also writes a manifest beside the plan, as ``PLAN.json``, and records the plan's digest, so that this
    user can open the plan with ``trust="built-here"``.

    :param model: the path of an ``.onnx`` file. External weights are read from its folder.
    :param plan: where to write the plan. Default: the model's path with ``.plan`` as its suffix.
    :param device: the GPU to build on, ``"cuda:0"``. Default: CUDA's own choice; TensorRT for RTX needs none.
    :param progress: called with each step, a :class:`~asynctrt.backends.tensorrt.builder.BuildStep`, in the
        calling thread.
    :param options: a :class:`BuildOptions`; ``settings`` are single options, which override it.
    :raises OptionsError: for an option that is unknown, or that the package or the model does not have.
    :raises BuildError: if the model cannot be parsed, or no plan can be built from it.
    :raises ModelNotFoundError: if there is no such file.
    :raises MissingExtraError: if no package that builds is installed.
    :raises DeviceUnavailableError, DeviceMemoryError: if the GPU is needed and cannot be used, or is full.
    :raises UsageError: if the plan cannot be written.
    """
    chosen = BuildOptions.from_settings(options, settings)
    source = read_source(Path(model))
    target = source.path.with_suffix(PLAN_SUFFIXES[0]) if plan is None else Path(plan)
    _check_target(target, source.path)
    made, manifest = build_from(source, chosen.flavour, chosen, device=device, report=progress)
    write_plan(target, made.content, manifest)
    return BuiltPlan(target, manifest)


def read_source(path: Path) -> OnnxContent:
    """Read an ONNX file, and digest it and its external files."""
    with opened(path) as file:
        content = file.read(MODEL_NBYTES_MAX + 1)
    if len(content) > MODEL_NBYTES_MAX:
        raise BuildError(
            f"{str(path)!r} has more than 2 GiB, which no ONNX file can. Export it with its weights outside "
            "(save_as_external_data)"
        )
    return OnnxContent(path, content, hashlib.sha256(content).hexdigest(), _external(path, content))


def build_from(
    source: OnnxContent,
    flavour: str | None,
    options: BuildOptions,
    *,
    device: str | Device | None = None,
    report: Report | None = None,
) -> tuple[Built, Manifest]:
    """Build a plan in a child process with a package, or the first one installed, and describe it."""
    found = None if device is None else find_device(device)
    try:
        name = None if found is None else found.name
        built = build_in_process(source.content, source.path, flavour, options, name, report)
        if _external(source.path, source.content) != source.external:
            # The plan would be recorded with the digests of other weights.
            raise BuildError(
                f"files beside {str(source.path)!r} that hold its weights were changed while the plan was "
                "built. Build it again when they are complete"
            )
        return built, _describe(source, built, options, None if found is None else found.gpu)
    finally:
        if found is not None and found is not device:
            found.close()


def write_plan(target: Path, content: bytes, manifest: Manifest) -> None:
    """Write a plan and its manifest, and record that it was built here."""
    # In this order a plan is only briefly beside another plan's manifest, which its digest reveals.
    write_whole(target, content)
    write_whole(manifest_path(target), manifest.as_text())
    record(manifest.plan_digest)


def _describe(source: OnnxContent, built: Built, options: BuildOptions, gpu: str | None) -> Manifest:
    return Manifest(
        plan_digest=hashlib.sha256(built.content).hexdigest(),
        plan_nbytes=len(built.content),
        model=source.path.name,
        model_digest=source.digest,
        external=source.external,
        builder=f"{built.flavour} {built.version}",
        gpu=gpu,
        inputs=tuple(map(_tensor, built.inputs)),
        outputs=tuple(map(_tensor, built.outputs)),
        profiles=tuple(map(profile_text, built.profiles)),
        plugins=(*built.plugins, *options.plugins),
        options=options.as_json(),
    )


def _tensor(tensor: NetworkTensor) -> NamedTensor:
    dims = tuple(tensor.name_of(axis) if size < 0 else size for axis, size in enumerate(tensor.shape))
    return NamedTensor(tensor.name, tensor.dtype, dims)


def _external(path: Path, content: bytes) -> dict[str, str]:
    """Return the digests of the external files with weights that a model names, of those in its folder."""
    folder = os.path.realpath(path.parent)
    found = {}
    for name in dict.fromkeys(external_names(BytesIO(content))):
        real = os.path.realpath(path.parent / name)
        if os.path.commonpath([folder, real]) == folder and is_there(real) and Path(real).is_file():
            found[name] = digest_of(Path(real))
    return dict(sorted(found.items()))


def _check_target(target: Path, model: Path) -> None:
    if target.suffix not in PLAN_SUFFIXES:
        raise OptionsError(
            f"{str(target)!r} is not named like a plan. asynctrt.open recognises plans by their suffix: "
            f"{', '.join(PLAN_SUFFIXES)}"
        )
    if not target.parent.is_dir() or target.is_dir() or target == model:
        raise OptionsError(
            f"{str(target)!r} is not a path in a folder that is there. Create the folder first"
        )
