"""The result of a load test from Python: a report that can be saved to files and shown in a notebook."""

import csv
import io
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import write_whole
from asynctrt.devices.host import cores
from asynctrt.errors import UsageError
from asynctrt.loadtest.criteria import LATENCIES
from asynctrt.loadtest.report import Report
from asynctrt.loadtest.targets import without_password

SECRET: Final = ("--token", "--header", "--headers")
"""Flags whose values must not appear in a report."""


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport(Report):
    """Hold all results of one load test; save and show them."""

    def __repr__(self) -> str:
        return f"<LoadReport {self.kind} of {self._name()}: {self._headline()}>"

    def _repr_html_(self) -> str:
        """Return the verdict and the key figures for a notebook."""
        from asynctrt.loadtest import page  # noqa: PLC0415  (It needs jinja2.)

        cell = '<td style="text-align:left">'
        rows = [
            f"<tr>{cell}{escape(tile.name)}</td>"
            f"{cell}<b>{escape(tile.value.text)}</b> {escape(tile.unit)}</td>"
            f"{cell}{escape(tile.more)}</td></tr>"
            for tile in page.tiles(self)
        ]
        warnings = [
            f"<p><b>{escape(banner.title)}</b> {escape(' '.join(banner.reasons))}</p>"
            for banner in page.banners(self)
        ]
        head = f"<p>{escape(self._name())}: <b>{escape(self._headline())}</b></p>"
        return head + "".join(warnings) + f"<table>{''.join(rows)}</table>"

    def save(self, path: str | Path) -> list[Path]:
        """Write the report in the format of the file's suffix: ``.json``, ``.html`` with charts, or ``.csv``.

        :returns: the files.
        :raises UsageError: for another suffix, or if the file cannot be written; an existing file is then
            unchanged.
        """
        path = Path(path)
        if path.suffix == ".json":
            text = self.as_text()
        elif path.suffix == ".csv":
            text = as_csv(self)
        elif path.suffix == ".html":
            from asynctrt.loadtest.page import interactive  # noqa: PLC0415

            text = interactive(self)
        else:
            raise UsageError(
                f"{str(path)!r} is not a .json, .html or .csv file: a report is written as one of these"
            )
        try:
            write_whole(path, text)
        except OSError as error:
            raise UsageError(f"{str(path)!r} cannot be written: {error}") from error
        return [path]

    def _name(self) -> str:
        return str(self.target.get("model") or self.target.get("where") or "a target")

    def _headline(self) -> str:
        from asynctrt.loadtest import page  # noqa: PLC0415

        return page.headline(self)


def as_csv(report: Report) -> str:
    """Return a table with a row for each run, and for each of its steps.

    Latencies are in ms, throughput and goodput in requests/s. An unknown figure is an empty field.
    """
    text = io.StringIO()
    names = [f"{name}_ms" for name in LATENCIES]
    head = ["run", "step", "seconds", "requests", "answered", "failed", "throughput", "goodput", *names]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "complete", "void"])
    for run in report.runs:
        failed = sum(error.count for error in run.errors.values())
        last = [run.complete, "; ".join(run.void)]
        figures = [run.requests, run.answered, failed, run.throughput, run.goodput]
        latency = [run.latency.get(name) for name in LATENCIES]
        writer.writerow([run.label, "", run.seconds, *figures, *latency, *last])
        for name, step in run.steps.items():
            figures = [step.count, step.count - step.failed, step.failed, None, None]
            latency = [step.latency.get(figure) for figure in LATENCIES]
            writer.writerow([run.label, name, run.seconds, *figures, *latency, *last])
    return text.getvalue()


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
