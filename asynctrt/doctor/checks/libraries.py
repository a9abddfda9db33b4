"""What the dynamic loader takes, and from where: links, damaged files, several versions, mixed toolkits."""

import filecmp
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from asynctrt.doctor.children import Ending
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok, warning
from asynctrt.doctor.libraries import LIBRARY, STUBS, Candidate, is_elf

CUDNN_PARTS: Final = re.compile(r"libcudnn(_\w+)?\.so\.\d+")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is known about libraries and the loader's search path."""
    yield from _variables(facts)
    yield from _links(facts)
    yield from _loaded(facts)
    yield from _shadowed(facts)
    yield from _toolkits(facts)
    yield from _cudnn(facts)


def _variables(facts: Facts) -> Iterator[Finding]:
    path = facts.search_path
    for entry in dict.fromkeys(path.entries):
        folder = Path(entry)
        if not entry or not folder.is_absolute():
            yield warning(
                "path.relative",
                f"LD_LIBRARY_PATH has {'an empty entry' if not entry else f'the relative entry {entry!r}'}",
                "It means the working directory: which library is loaded, and whose code runs, depends on "
                "where the program is started.",
                "Take it out; look for a colon at the beginning, at the end, or twice in a row",
            )
        elif folder.name == STUBS:
            yield error(
                "path.stubs",
                f"LD_LIBRARY_PATH has {entry}",
                "Libraries there are empty shells for linkers: CUDA does not start with them "
                "(CUDA_ERROR_STUB_LIBRARY).",
                "Take it out",
            )
        elif not folder.is_dir():
            yield note(
                "path.missing",
                f"LD_LIBRARY_PATH has {entry}, which is no folder",
                "Libraries that should come from there come from elsewhere, in another version perhaps.",
                "Correct or remove it",
            )
    for entry in path.preloaded:
        if LIBRARY.fullmatch(Path(entry).name):
            yield warning(
                "path.preload",
                f"LD_PRELOAD has {entry}",
                "It is loaded into every process before anything else, and takes the place of what packages "
                "bring.",
                "Take it out, unless it is meant to",
            )


def _links(facts: Facts) -> Iterator[Finding]:
    for one in facts.search_path.candidates:
        if one.target is None:
            points = f"points to {one.path.readlink()}, which" if one.path.is_symlink() else "is listed but"
            yield warning(
                "library.link",
                f"{one.path} {points} is not there",
                f"The loader passes it over or fails. A library of the name {one.name} from elsewhere may be "
                "loaded in its place.",
                "Reinstall the package that it belongs to, or remove the link; then run ldconfig",
            )


def _loaded(facts: Facts) -> Iterator[Finding]:
    """Tell what loading each library came to."""
    for name, outcome in facts.libraries.items():
        there = [one for one in facts.search_path.named(name) if one.target is not None]
        if outcome.ending is not Ending.ANSWERED:
            verb = "does not end" if outcome.ending is Ending.HUNG else "ends the process"
            where = f" ({there[0].path})" if there else ""
            yield error(
                "library.crash",
                f"Loading {name}{where} {verb}: {outcome.said}",
                "Every program that loads it will end in the same way, before any of its own code runs.",
                "Reinstall it in the version that fits the driver and the other libraries",
            )
            continue
        if "error" not in outcome.value:
            yield _found(name, outcome.value)
        elif there:
            yield _refused(name, there[0], outcome.value["error"])


def _found(name: str, value: dict[str, Any]) -> Finding:
    version = f" {value['version']}" if value.get("version") else ""
    return ok("library", f"{name}{version}: {value.get('path') or 'loaded'}")


def _refused(name: str, first: Candidate, said: str) -> Finding:
    missing = re.search(r"(lib[^:\s]+\.so[^:\s]*): cannot open shared object file", said)
    if missing and missing[1] != name:
        return error(
            "library.needs",
            f"{name} ({first.path}) cannot be loaded: it needs {missing[1]}, which is nowhere",
            "Programs that use it do not start.",
            f"Install what brings {missing[1]}, or add its folder to LD_LIBRARY_PATH",
        )
    is_damaged = first.target is not None and not is_elf(first.target)
    return error(
        "library.damaged" if is_damaged else "library.refused",
        f"{first.path} is no library" if is_damaged else f"{name} cannot be loaded: {said}",
        f"The loader finds it first (through {first.source}) and fails: {said}.",
        "Reinstall the package that it belongs to, or take its folder out of the search path",
    )


def _shadowed(facts: Facts) -> Iterator[Finding]:
    """Find names for which there are several different files. A family such as cuDNN's is one finding."""
    twice: dict[tuple[str, ...], list[str]] = {}
    for name in facts.search_path.names():
        visible = _different(list(facts.search_path.named(name)))
        outcome = facts.libraries.get(name)
        taken = (outcome.value or {}).get("path") if outcome else None
        if len(visible) > 1:
            listed = "; ".join(f"{one.path} ({_version(one)}, {one.source})" for one in visible)
            yield warning(
                "library.shadowed",
                f"There are {len(visible)} different {name}: {listed}. The loader takes {taken or 'neither'}",
                "Which one a program gets depends on LD_LIBRARY_PATH and on the order of folders. Libraries "
                "of different versions in one process crash, often later and elsewhere.",
                "Keep one: take the others' folders out of LD_LIBRARY_PATH or of /etc/ld.so.conf.d, and run "
                "ldconfig",
            )
        packaged = [
            one for one in facts.search_path.candidates if one.name == name and one.source == "package"
        ]
        if taken and packaged and len(_different([visible[0], packaged[0]] if visible else packaged)) > 1:
            brought = packaged[0]
            versions = _version(visible[0] if visible else brought), _version(brought)
            twice.setdefault((str(Path(taken).parent), str(brought.path.parent), *versions), []).append(name)
    for (taken_from, brought_in, taken_version, brought_version), names in twice.items():
        more = f", as are {len(names) - 1} more of its family" if len(names) > 1 else ""
        yield warning(
            "library.twice",
            f"{names[0]} is there twice{more}: the loader takes it from {taken_from} ({taken_version}), a "
            f"Python package has it in {brought_in} ({brought_version})",
            "The first that a process loads serves everything in it, so that it depends on the order of "
            "imports which one that is.",
            "Take the folder of the first out of the search path where Python packages are used, or "
            "install both in one version",
        )


def _different(candidates: list[Candidate]) -> list[Candidate]:
    """Return the first of each set of candidates with the same content."""
    found: list[Candidate] = []
    for one in candidates:
        target = one.target
        if target is None:
            continue
        if not any(
            other.target is not None and (other.target == target or filecmp.cmp(other.target, target))
            for other in found
        ):
            found.append(one)
    return found


def _version(one: Candidate) -> str:
    return f"version {one.version}" if one.version else "version unknown"


def _toolkits(facts: Facts) -> Iterator[Finding]:
    """Compare CUDA runtimes with the driver and with one another."""
    cuda = facts.cuda_version
    found = {}
    for name, outcome in facts.libraries.items():
        version = _number((outcome.value or {}).get("version"))
        if name.startswith("libcudart.so.") and version:
            found[name] = version
    for name, version in found.items():
        if cuda and version[0] > cuda[0]:
            yield error(
                "runtime.newer",
                f"{name} is of CUDA {_dotted(version)}, and the driver supports CUDA {_dotted(cuda)}",
                "A runtime of a later major version does not start on this driver (CUDA driver version is "
                "insufficient for CUDA runtime version).",
                f"Update the driver, or install packages for CUDA {cuda[0]} (named ...-cu{cuda[0]})",
            )
        elif cuda and version > cuda:
            yield note(
                "runtime.newer",
                f"{name} is of CUDA {_dotted(version)}, and the driver supports CUDA {_dotted(cuda)}",
                "Within a major version that works, but what is new in it does not, and kernels that are "
                "compiled when they are used (PTX) are refused.",
                "Update the driver if something is reported as unsupported",
            )
    # The same number of libcudart may be there, but only one of them is loaded by its name.
    if len({version[0] for version in found.values()}) > 1:
        yield note(
            "runtime.several",
            f"There are runtimes of several CUDA versions: {', '.join(sorted(found))}",
            "Packages that were built for different ones share a process badly: each has its own idea of "
            "streams and of errors, and other libraries come in one version alone.",
            "Install packages that are all built for one CUDA version (-cu12 or -cu13)",
        )


def _cudnn(facts: Facts) -> Iterator[Finding]:
    """Check that cuDNN was built for the CUDA that is here, and that its parts come from one place."""
    runtimes = {
        name.rpartition(".")[2] for name, one in facts.libraries.items()
        if name.startswith("libcudart.so.") and "path" in (one.value or {})
    }  # fmt: skip
    folders: dict[str, set[str]] = {}
    for name, outcome in facts.libraries.items():
        value = outcome.value or {}
        if not CUDNN_PARTS.fullmatch(name) or not value.get("path"):
            continue
        folders.setdefault(name.rpartition(".")[2], set()).add(str(Path(value["path"]).resolve().parent))
        built_for = str(value["cudart"] // 1000) if value.get("cudart") else None
        if built_for and runtimes and built_for not in runtimes:
            yield error(
                "cudnn.toolkit",
                f"cuDNN {value.get('version')} ({value['path']}) was built for CUDA {built_for}, and here is "
                f"CUDA {', '.join(sorted(runtimes))}",
                "It loads, and fails or crashes in the first computation: its libraries for linear algebra "
                "are of another version.",
                f"Install the cuDNN for your CUDA: pip install nvidia-cudnn-cu{max(runtimes)}",
            )
    for major, places in folders.items():
        if len(places) > 1:
            yield error(
                "cudnn.mixed",
                f"The parts of cuDNN {major} come from several folders: {', '.join(sorted(places))}",
                "cuDNN loads its parts by name when they are needed; parts of different versions end the "
                "process or give wrong answers.",
                "Keep one cuDNN: take the folders of the others out of LD_LIBRARY_PATH",
            )


def _number(version: Any) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
