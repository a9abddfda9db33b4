"""Python and packages: versions, TensorRT's flavours, ONNX Runtime, cuda-python."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from asynctrt.backends.tensorrt.flavours import EXTRAS, fix_of_import
from asynctrt.backends.tensorrt_options import FLAVOURS
from asynctrt.doctor.checks.drivers import built_for
from asynctrt.doctor.children import Ending
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok, warning

CORE: Final = ("anyio", "cuda-core", "cuda-python", "numpy", "uvloop")
"""The packages that asynctrt requires."""

CAPABILITY_MIN: Final = {13: (7, 5)}
"""The oldest GPUs that a CUDA version supports: CUDA 13 dropped those before Turing."""

ONNXRUNTIME: Final = re.compile(r"onnxruntime(-(gpu|directml|openvino|qnn|rocm|training))?")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings about packages."""
    yield from _core(facts)
    installed = [name for name in FLAVOURS if not (facts.packages[name].value or {}).get("missing")]
    for name in installed:
        yield from _flavour(facts, name)
    if not installed:
        yield (warning if facts.gpus else note)(
            "tensorrt.missing",
            "None of TensorRT's packages is installed; plans need one",
            "pip install 'asynctrt[tensorrt]', or lean, dispatch or rtx instead of tensorrt",
        )
    yield from _onnxruntime(facts)


def _core(facts: Facts) -> Iterator[Finding]:
    """Yield findings about Python and the packages that asynctrt requires."""
    found = {name: facts.distributions.get(name, "not installed") for name in CORE}
    yield ok("python", f"Python {facts.python}; {_listed(found)}")
    broken = _broken(facts, "cuda.bindings.driver", "cuda_python")
    if broken:
        yield broken


def _broken(facts: Facts, name: str, check: str) -> Finding | None:
    """Return an error if importing a package fails, hangs or crashes the process."""
    outcome = facts.packages[name]
    if outcome.ending is not Ending.ANSWERED:
        fix = "Reinstall it in the version that fits the driver"
        return error(check, f"Loading {name} {outcome.verb}: {outcome.said}", fix)
    said = outcome.value.get("error")
    if said is None:
        return None
    fix = fix_of_import(name, said) if name in EXTRAS else "Install or reinstall what the message names"
    return error(check, f"{name} cannot be imported: {said}", fix)


def _flavour(facts: Facts, name: str) -> Iterator[Finding]:
    value, fix = facts.packages[name].value or {}, f"pip install --force-reinstall 'asynctrt[{EXTRAS[name]}]'"
    wheel = re.compile(rf"{name.replace('_', '-')}(-cu\d+)?(-bindings|-libs)?")
    wheels = {one: version for one, version in facts.distributions.items() if wheel.fullmatch(one)}
    cudas = {built_for(one, version) for one, version in wheels.items()} - {0}
    # The metapackage may have an extra suffix after the fourth number.
    if len(cudas) > 1 or len({re.split(r"\+|\.post", version)[0] for version in wheels.values()}) > 1:
        yield error(
            "tensorrt.parts",
            f"The wheels of {name} do not belong together: {_listed(wheels)}. They overwrite each other's "
            "files, or call libraries of another version and crash",
            f"Uninstall all of them, then {fix}",
        )
    least = CAPABILITY_MIN.get(max(cudas, default=0), (0, 0))
    for ordinal, gpu in enumerate(facts.gpus):
        if (gpu["major"] or 0, gpu["minor"] or 0) < least:
            yield error(
                "tensorrt.gpu",
                f"cuda:{ordinal} ({gpu['name']}) has compute capability {gpu['major']}.{gpu['minor']}; "
                f"{name} is built for CUDA {max(cudas)}, which needs {least[0]}.{least[1]} or later",
                "Install the package for CUDA 12 (its name ends in -cu12), or use a newer GPU",
            )
    broken = _broken(facts, name, "tensorrt.broken")
    if broken:
        yield broken
    if "version" not in value:
        return
    version, path, told = value["version"], value["library"], value["library_version"] or "unknown"
    if value["runtime_error"]:
        what = f"{name} {version} was imported, but makes no runtime: {value['runtime_error']}"
        yield error(
            "tensorrt.broken", what, f"Fix the driver and the GPUs first if they are at fault; then {fix}"
        )
    if path is None:
        yield warning("tensorrt.library", f"{name} {version} was imported without a library of TensorRT", fix)
    # Only the numbers that both versions have are compared.
    elif any(ours != theirs for ours, theirs in zip(_numbers(version), _numbers(told), strict=False)):
        yield error(
            "tensorrt.mismatch",
            f"The bindings of {name} are version {version}, and the library is {told} ({path})",
            f"Take the folder of that library out of LD_LIBRARY_PATH, or reinstall: {fix}",
        )
    else:
        yield ok("tensorrt", f"{name} {version}, library {told}: {path}")


def _onnxruntime(facts: Facts) -> Iterator[Finding]:
    value = facts.packages["onnxruntime"].value or {}
    wheels = [name for name in sorted(facts.distributions) if ONNXRUNTIME.fullmatch(name)]
    if len(wheels) > 1:
        yield warning(
            "onnxruntime.several",
            f"Several packages bring ONNX Runtime: {', '.join(wheels)}. They overwrite each other's files",
            "Uninstall all of them, then install one",
        )
    if value.get("missing"):
        what = "ONNX Runtime is not installed; ONNX models need it"
        yield note("onnxruntime", what, "pip install 'asynctrt[cpu]', or 'asynctrt[gpu]' for a GPU")
        return
    if value.get("cuda_error"):
        yield warning(
            "onnxruntime.cuda",
            f"ONNX Runtime's provider for CUDA cannot be loaded: {value['cuda_error']}",
            "pip install 'asynctrt[gpu]', which brings the CUDA and cuDNN that it was built for",
        )
    said = f"ONNX Runtime {value.get('version')}: {', '.join(value.get('providers', ()))}"
    yield _broken(facts, "onnxruntime", "onnxruntime") or ok("onnxruntime", said)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
