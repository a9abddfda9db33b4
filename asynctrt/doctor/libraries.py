"""Find the files that the dynamic loader could take for NVIDIA's libraries, without loading any."""

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIBRARY: Final = re.compile(
    r"(lib(?:cuda|nvidia-ml|cudart|cudnn\w*|cublas|cublasLt|nvrtc|nvinfer\w*|nvonnxparser|"
    r"tensorrt_\w+))\.so((?:\.\d+)*)"
)
"""The names of files that are looked at: the stem, and the numbers after ``.so``."""

STANDARD: Final = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
TOOLKITS: Final = "/usr/local/cuda*/lib*"
STUBS: Final = "stubs"
"""The folder of a toolkit whose libraries only linkers can use."""

LDCONFIG: Final = ("/sbin/ldconfig", "/usr/sbin/ldconfig")
LDCONFIG_S: Final = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file, or a link to one, that is named like one of NVIDIA's libraries."""

    name: str
    """Its own name: ``libcudart.so.13``."""
    path: Path
    source: str
    """How it can be found: ``LD_LIBRARY_PATH``, ``ldconfig``, ``folder`` or ``package``."""

    @property
    def stem(self) -> str:
        """The name without ``.so`` and what follows it."""
        found = LIBRARY.fullmatch(self.name)
        return found[1] if found else self.name

    @property
    def target(self) -> Path | None:
        """The file itself, with all links followed, or ``None`` if there is none."""
        real = Path(os.path.realpath(self.path))
        return real if real.is_file() else None

    @property
    def version(self) -> str | None:
        """The version in the file's name, if it has more than one number."""
        found = LIBRARY.fullmatch(self.target.name) if self.target else None
        numbers = found[2].strip(".") if found else ""
        return numbers if "." in numbers else None

    @property
    def is_found_by_the_loader(self) -> bool:
        """Whether a program that gives only the name can get it."""
        return self.source in ("LD_LIBRARY_PATH", "ldconfig")


@dataclass(frozen=True, slots=True)
class SearchPath:
    """Where the dynamic loader looks, and what is there."""

    entries: tuple[str, ...]
    """The entries of ``LD_LIBRARY_PATH``, as they stand there."""
    preloaded: tuple[str, ...]
    """The entries of ``LD_PRELOAD``."""
    candidates: tuple[Candidate, ...]
    """In the order in which the loader prefers them; those that it does not find come last."""

    def names(self) -> tuple[str, ...]:
        """Return each name by which a program may ask for a library: with one number after ``.so``."""
        found = {one.name for one in self.candidates if re.search(r"\.so\.\d+$", one.name)}
        return tuple(sorted(found | set(ALWAYS)))

    def named(self, name: str) -> tuple[Candidate, ...]:
        """Return the candidates of one name that the loader can find, the one that it takes first."""
        return tuple(one for one in self.candidates if one.name == name and one.is_found_by_the_loader)


ALWAYS: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the driver, which are looked for even where no file has such a name."""


def read_search_path(
    env: Mapping[str, str], *, cache: str | None = None, folders: Iterable[str] | None = None
) -> SearchPath:
    """Return where the dynamic loader looks for libraries, and what it would find.

    :param env: the environment that programs are started with.
    :param cache: what ``ldconfig -p`` prints. Default: it is run.
    :param folders: folders to look for links that point nowhere. Default: the usual ones.
    """
    entries = tuple(re.split("[:;]", env["LD_LIBRARY_PATH"])) if env.get("LD_LIBRARY_PATH") else ()
    candidates = [
        Candidate(path.name, path, "LD_LIBRARY_PATH")
        for entry in entries
        # An empty entry means the working directory.
        for path in _libraries(Path(entry or "."))
    ]
    cached = [
        Candidate(path.name, path, "ldconfig")
        for path in _paths_of(_print_cache() if cache is None else cache)
    ]
    candidates += cached
    if folders is None:
        folders = [*STANDARD, f"/usr/lib/{os.uname().machine}-linux-gnu"]
        folders += [str(path) for path in sorted(Path("/").glob(TOOLKITS.lstrip("/")))]
    known = {_place(one.path) for one in candidates}
    for folder in [*map(Path, folders), *(one.path.parent for one in cached)]:
        for path in _libraries(folder):
            if _place(path) not in known:
                known.add(_place(path))
                candidates.append(Candidate(path.name, path, "folder"))
    candidates += [Candidate(path.name, path, "package") for path in _of_packages()]
    return SearchPath(entries, tuple(env.get("LD_PRELOAD", "").replace(":", " ").split()), tuple(candidates))


def is_elf(path: Path) -> bool:
    """Return whether a file begins as libraries do; a text file or an empty one does not."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _place(path: Path) -> str:
    """Return the path with the links of its folder followed: ``/lib`` often is ``/usr/lib``."""
    return os.path.join(os.path.realpath(path.parent), path.name)  # noqa: PTH118


def _of_packages() -> list[Path]:
    """Return the libraries that Python packages bring."""
    site = Path(sysconfig.get_paths()["purelib"])
    found = []
    for glob in ("nvidia/*/lib", "nvidia/*", "tensorrt*_libs"):
        for folder in sorted(site.glob(glob)):
            found += _libraries(folder)
    return found


def _paths_of(cache: str) -> list[Path]:
    """Return the files that are named in what ``ldconfig -p`` prints, in its order."""
    found = []
    for line in cache.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        # "(libc6)" alone means one for 32 bits, which Python never takes.
        if arrow and LIBRARY.fullmatch(name.split(" ")[0]) and "(libc6)" not in name:
            found.append(Path(path))
    return found


def _print_cache() -> str:
    for program in LDCONFIG:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(  # noqa: S603  (it is a constant)
                [program, "-p"], capture_output=True, text=True, timeout=LDCONFIG_S, check=False
            )
            return done.stdout
    return ""


def _libraries(folder: Path) -> list[Path]:
    """Return the files and links of a folder that are named like NVIDIA's libraries."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if LIBRARY.fullmatch(path.name))
    return []
