"""Python packages: TensorRT's flavours, ONNX Runtime, cuda-python, and whether their parts fit together."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from asynctrt.backends.tensorrt.flavours import EXTRAS, fix_of_import
from asynctrt.backends.tensorrt.plan import capability_text
from asynctrt.doctor.children import Ending, Outcome
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok, warning
from asynctrt.tensorrt_options import FLAVOURS

SUFFIXES: Final = ("", "-bindings", "-libs")
"""The wheels that a flavour of TensorRT consists of."""

CAPABILITY_MIN: Final = {13: (7, 5)}
"""The oldest GPUs that a CUDA version has code for: CUDA 13 ended with those before Turing."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is known about packages."""
    installed = [name for name in FLAVOURS if not _is_missing(facts.packages[name])]
    for name in installed:
        yield from _flavour(facts, name, facts.packages[name])
    if not installed:
        make = warning if facts.gpus else note
        yield make(
            "tensorrt.missing",
            "None of TensorRT's packages is installed",
            "Plans cannot be opened without one.",
            "pip install 'asynctrt[tensorrt]', or lean, dispatch or rtx instead of tensorrt",
        )
    yield from _cuda_python(facts)
    yield from _onnxruntime(facts)


def _is_missing(outcome: Outcome) -> bool:
    return bool((outcome.value or {}).get("missing"))


def _flavour(facts: Facts, name: str, outcome: Outcome) -> Iterator[Finding]:
    yield from _parts(facts, name)
    value = outcome.value or {}
    broken = _broken(name, outcome, "tensorrt.broken")
    if broken:
        yield broken
    if "version" not in value:
        return
    library = value.get("library")
    version = str(value["version"])
    if library is None:
        yield warning(
            "tensorrt.library",
            f"{name} {version} can be imported, but has loaded no library of TensorRT",
            "Something else stands in for it, or its libraries have other names than those known here.",
            f"pip install --force-reinstall 'asynctrt[{EXTRAS[name]}]', unless it is meant to",
        )
    else:
        yield from _library(name, version, value, library)
    yield from _gpus(facts, name, value)
    yield from _cuda(facts, name, version)


def _broken(name: str, outcome: Outcome, check: str) -> Finding | None:
    """Return a finding if a package could not be imported, or ended the process."""
    value = outcome.value or {}
    if outcome.ending is Ending.ANSWERED and "error" not in value:
        return None
    said = value.get("error") or outcome.said
    if outcome.ending is Ending.ANSWERED:
        what, fix = f"{name} is installed but cannot be imported: {said}", _fix(name, said)
    else:
        verb = "hangs" if outcome.ending is Ending.HUNG else "ends the process"
        what = f"Importing {name} {verb}: {outcome.said}"
        fix = "Reinstall it in the version that fits the driver; look above for libraries of several versions"
    return error(check, what, "Nothing that needs it can be opened.", fix)


def _fix(name: str, said: str) -> str:
    if name in EXTRAS:
        return fix_of_import(name, said)
    return "Find the library or package that the message names, or reinstall it"


def _parts(facts: Facts, name: str) -> Iterator[Finding]:
    """Compare the versions of the wheels of a flavour."""
    for cuda in ("", "-cu11", "-cu12", "-cu13"):
        wheels = {f"{name.replace('_', '-')}{cuda}{suffix}" for suffix in SUFFIXES}
        found = {
            wheel: facts.distributions[wheel] for wheel in sorted(wheels) if wheel in facts.distributions
        }
        # The metapackage may carry a suffix of its own after the fourth number.
        if len({version.split("+")[0].split(".post")[0] for version in found.values()}) > 1:
            listed = ", ".join(f"{wheel} {version}" for wheel, version in found.items())
            yield error(
                "tensorrt.parts",
                f"The wheels of {name} are of different versions: {listed}",
                "Bindings that call a library of another version crash or read wrong values.",
                f"pip install --force-reinstall 'asynctrt[{EXTRAS[name]}]'",
            )
    variants = [
        wheel
        for cuda in ("-cu11", "-cu12", "-cu13")
        if (wheel := f"{name.replace('_', '-')}{cuda}-bindings") in facts.distributions
    ]
    if len(variants) > 1:
        yield error(
            "tensorrt.parts",
            f"{name} is installed for several CUDA versions: {', '.join(variants)}",
            "They share one folder, so that files of one have overwritten those of the other.",
            f"Uninstall all of them, then pip install 'asynctrt[{EXTRAS[name]}]'",
        )


def _library(name: str, version: str, value: dict[str, Any], library: dict[str, Any]) -> Iterator[Finding]:
    """Compare the bindings with the library that they have loaded."""
    told, path = library["version"], library["path"]
    if told and not _agree(version, told):
        yield error(
            "tensorrt.mismatch",
            f"The bindings of {name} are version {version}, and the library says {told} ({path})",
            "Bindings that call a library of another version crash or read wrong values; plans are refused "
            "with version numbers that make no sense.",
            f"Take the folder of that library out of LD_LIBRARY_PATH, or reinstall: pip install "
            f"--force-reinstall 'asynctrt[{EXTRAS[name]}]'",
        )
        return
    site = Path(value["place"] or "/").parent
    if site not in Path(path).parents and value["place"]:
        yield note(
            "tensorrt.elsewhere",
            f"{name} {version} has loaded {path}, which is not in its own environment ({site})",
            "That library may be updated without the bindings.",
            "Check that this is meant; LD_LIBRARY_PATH decides",
        )
    yield ok("tensorrt", f"{name} {version}, library {told or 'of unknown version'}: {path}")


def _agree(ours: str, theirs: str) -> bool:
    """Return whether two versions agree in the numbers that both have."""
    pairs = zip(re.findall(r"\d+", ours), re.findall(r"\d+", theirs), strict=False)
    return all(int(a) == int(b) for a, b in pairs)


def _gpus(facts: Facts, name: str, value: dict[str, Any]) -> Iterator[Finding]:
    """Compare the compute capability of each GPU with what a flavour supports."""
    known = value.get("capabilities")
    cuda = _cuda_of(facts, name)
    for ordinal, gpu in enumerate(facts.gpus):
        if gpu["major"] is None or gpu["minor"] is None:
            continue
        capability = (gpu["major"], gpu["minor"])
        said = f"cuda:{ordinal} ({gpu['name']}) has compute capability {capability_text(capability)}"
        if known is not None and f"SM{capability[0]}{capability[1]}" not in known:
            yield warning(
                "tensorrt.gpu",
                f"{said}, and {name} {value['version']} is for {', '.join(known)}",
                "It neither builds nor runs plans for this GPU.",
                "Use TensorRT (pip install 'asynctrt[tensorrt]') or a version of it that supports the GPU",
            )
        least = CAPABILITY_MIN.get(cuda or 0)
        if least and capability < least:
            yield error(
                "tensorrt.gpu",
                f"{said}, and {name} is built for CUDA {cuda}",
                f"CUDA {cuda} has no code for GPUs below {capability_text(least)}.",
                "Install the package for CUDA 12 (its name ends in -cu12), or use a newer GPU",
            )


def _cuda_of(facts: Facts, name: str) -> int | None:
    """Return the CUDA version that a flavour is built for, from the names of its wheels."""
    found = [
        int(match[1])
        for wheel in facts.distributions
        if (match := re.fullmatch(rf"{name.replace('_', '-')}-cu(\d+)(?:-bindings|-libs)?", wheel))
    ]
    return max(found, default=None)


def _cuda(facts: Facts, name: str, version: str) -> Iterator[Finding]:
    """Compare the CUDA version of a flavour with that of the driver."""
    built_for, driver = _cuda_of(facts, name), facts.cuda_version
    if built_for and driver and built_for > driver[0]:
        yield error(
            "tensorrt.driver",
            f"{name} {version} is built for CUDA {built_for}, and the driver supports CUDA "
            f"{driver[0]}.{driver[1]}",
            "It cannot start: CUDA driver version is insufficient. Some calls may work before one crashes.",
            f"Update the driver, or install the package for CUDA {driver[0]} (its name ends in "
            f"-cu{driver[0]})",
        )


def _cuda_python(facts: Facts) -> Iterator[Finding]:
    outcome = facts.packages["cuda.bindings.driver"]
    version = facts.distributions.get("cuda-bindings", "")
    if _is_missing(outcome):
        yield error(
            "cuda_python",
            "cuda-python is not installed",
            "asynctrt talks to GPUs through it.",
            "pip install cuda-python cuda-core",
        )
        return
    broken = _broken("cuda.bindings.driver", outcome, "cuda_python")
    if broken:
        yield broken
        return
    driver = facts.cuda_version
    major = int(version.split(".")[0]) if version[:1].isdigit() else None
    if major and driver and major > driver[0]:
        yield note(
            "cuda_python",
            f"cuda-bindings {version} is for CUDA {major}, the driver for CUDA {driver[0]}.{driver[1]}",
            "What both have works; what is new in the later version does not.",
            f"Update the driver, or pip install 'cuda-python=={driver[0]}.*'",
        )
    else:
        core = facts.distributions.get("cuda-core", "not installed")
        yield ok("cuda_python", f"cuda-bindings {version or 'of unknown version'}, cuda-core {core}")


def _onnxruntime(facts: Facts) -> Iterator[Finding]:
    outcome = facts.packages["onnxruntime"]
    wheels = [name for name in sorted(facts.distributions) if name.startswith("onnxruntime")]
    value = outcome.value or {}
    if len(wheels) > 1:
        yield warning(
            "onnxruntime.several",
            f"Several packages bring ONNX Runtime: {', '.join(wheels)}",
            "They share one folder, so that files of one have overwritten those of the other.",
            "Uninstall all of them, then install one",
        )
    if _is_missing(outcome):
        yield note(
            "onnxruntime",
            "ONNX Runtime is not installed",
            "ONNX models on the host device need it.",
            "pip install 'asynctrt[cpu]'",
        )
        return
    broken = _broken("onnxruntime", outcome, "onnxruntime")
    if broken:
        yield broken
        return
    if value.get("cuda_error"):
        yield warning(
            "onnxruntime.cuda",
            f"ONNX Runtime's provider for CUDA cannot be loaded: {value['cuda_error']}",
            "It then computes on the CPU without saying so. asynctrt itself uses it on the CPU alone.",
            "Install the CUDA and cuDNN that it was built for, or the package onnxruntime",
        )
    yield ok("onnxruntime", f"ONNX Runtime {value['version']}: {', '.join(value['providers'])}")
