"""Describes where and how a report was made: the machine, the versions, the command without its secrets."""

import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from asynctrt.devices.host import cores
from asynctrt.loadtest.targets import without_password

SECRET: Final = ("--token", "--header", "--headers")
"""Flags whose values must not appear in a report."""


def describe_machine() -> dict[str, Any]:
    """Describe this machine and the versions of the installed packages."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    versions = {"python": platform.python_version()}
    for package in ("asynctrt", "numpy", "uvloop", "onnxruntime"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    loaded = sys.modules.get("onnxruntime")
    if loaded is not None:
        # The package version may not be the module's, because onnxruntime-gpu installs the same module.
        versions["onnxruntime"] = loaded.__version__
    return {
        "cpu": cpu,
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def describe_making() -> dict[str, str]:
    """Return the time, the host and the command of a report."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "command": shlex.join(without_secrets([Path(sys.argv[0]).name, *sys.argv[1:]])),
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command's words without passwords and the values of flags for tokens and headers."""
    told = []
    hides = False
    for word in words:
        flag, mark, _ = word.partition("=")
        shown = without_password(word)
        told.append("…" if hides else f"{flag}=…" if mark and flag in SECRET else shown)
        hides = not hides and word in SECRET
    return told
