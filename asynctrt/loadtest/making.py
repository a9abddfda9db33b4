"""Describes when and where a report was made: the time, the machine, the versions."""

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asynctrt.devices.host import cores


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
    """Return the time and the host of a report."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
    }
