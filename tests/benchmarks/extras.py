"""What each extra takes on disk, and how long it takes to install: in a new virtual environment."""

import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

from tests.benchmarks.common import arguments, save, show

ROOT = Path(__file__).parents[2]
FOR_OURSELVES = {"all", "deploy", "dev", "docs", "peers", "types"}
ELSEWHERE = {"tensorrt"}
"""What needs another package index."""
MB = 10**6


def names():
    """Return the extras for users, after the core."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = content["project"]["optional-dependencies"]
    return ["core", *(name for name in extras if name not in FOR_OURSELVES | ELSEWHERE)]


def measure(name, folder):
    """Install an extra, and return what it takes: packages with their compiled modules, not the commands."""
    venv.create(folder, symlinks=True)
    wanted = str(ROOT) if name == "core" else f"{ROOT}[{name}]"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    start = time.monotonic()
    done = subprocess.run(
        [*pip, "install", "-q", wanted], capture_output=True, text=True, check=False, timeout=900
    )
    seconds = time.monotonic() - start
    if done.returncode != 0:
        raise SystemExit(f"{name} cannot be installed: {done.stderr[-2000:]}")
    (packages,) = folder.glob("lib/python*/site-packages")
    sizes = [path.stat().st_size for path in packages.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        "installed_mb": round(sum(sizes) / MB),
        "seconds": round(seconds),
        "packages": len(list(packages.glob("*.dist-info"))),
        "has_scipy": (packages / "scipy").exists(),
        "has_grpc": (packages / "grpc").exists(),
    }


def main():
    options = arguments(__doc__, only="")
    figures = {}
    for name in options.only.split(",") if options.only else names():
        folder = Path(tempfile.mkdtemp(prefix="asynctrt-extra-"))
        try:
            figures[name] = measure(name, folder)
        finally:
            shutil.rmtree(folder)
        print(name, figures[name], file=sys.stderr, flush=True)
    show(
        "what extras take, with the core",
        ("extra", "MB", "seconds", "packages"),
        [
            (name, f"{found['installed_mb']:,}", str(found["seconds"]), str(found["packages"]))
            for name, found in figures.items()
        ],
        f"Python {sys.version_info.major}.{sys.version_info.minor};",
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
