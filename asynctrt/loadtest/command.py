"""``asynctrt load`` without its display: parsing flags, handling Ctrl-C, writing files, and the CI gate."""

import asyncio
import dataclasses
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from asynctrt._util import clock
from asynctrt._util.files import write_whole
from asynctrt.errors import AsynctrtError, OptionsError, UsageError
from asynctrt.loadtest.job import LoadJob, carry_out, make_report
from asynctrt.loadtest.opening import find_modules
from asynctrt.loadtest.processes import ENDINGS
from asynctrt.loadtest.report import FORMAT, Report
from asynctrt.loadtest.session import OPTION_NAMES, SETTING_NAMES, LoadSession, Watch
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.summary import FAILED_SHARE
from asynctrt.loadtest.targets import TargetSpec
from asynctrt.loadtest.tls import Tls
from asynctrt.options import Options

ADDRESS: Final = re.compile(r"[\w.-]+:\d+(/|$)")
"""Matches an address without a scheme, such as ``localhost:8000``."""

NOT_GOOD: Final = 3
VOID: Final = 4
UNJUDGED: Final = 5
"""Exit statuses."""

AGAIN_NS: Final = 1_000_000_000
"""A second signal within this time is the same one: ``timeout`` signals a process and then its group."""

TLS_NAMES: Final = tuple(item.name for item in dataclasses.fields(Tls))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The parsed command: load test and output files."""

    job: LoadJob
    json: Path | None = None
    report: Path | None = None

    @property
    def outputs(self) -> list[Path]:
        """The files that will be written."""
        return [path for path in (None if self.prints_json else self.json, self.report) if path is not None]

    @property
    def prints_json(self) -> bool:
        """Whether the JSON goes to standard output."""
        return str(self.json) == "-"


def plan(target: str, given: Mapping[str, Any]) -> LoadPlan:
    """Return the plan for the flags in ``given``, which holds only the flags that were passed.

    :raises OptionsError: for invalid values.
    :raises UsageError: for files that cannot be read or written.
    """
    settings = {name: given[name] for name in SETTING_NAMES if name in given}
    options = {name: given[name] for name in OPTION_NAMES if name in given}
    if ADDRESS.match(target) and not Path(target).exists():
        raise UsageError(
            f"{target!r} is not a file. For a server, give the address of a model, such as "
            f"http://{target.partition('/')[0]}/v2/models/NAME, or with grpc:// or ws://"
        )
    spec = TargetSpec(
        target,
        given.get("token"),
        given.get("device", "host"),
        Options.from_settings(None, options),
        given.get("body"),
        tuple(given.get("header") or ()),
        given.get("method"),
        given.get("until_message"),
        Tls(**{name: given[name] for name in TLS_NAMES if name in given}),
    )
    sweep = dict(_values(text) for text in given.get("sweep", ()))
    job = LoadJob(spec, LoadSettings(**settings), sweep, given.get("search", False))
    made = LoadPlan(job, given.get("json"), given.get("report"))
    for path in made.outputs:
        _check_writable(path, is_page=path == made.report)
    return made


async def load(planned: LoadPlan, watch: Watch) -> Report:
    """Run the load test. Ctrl-C, SIGTERM or SIGHUP ends it with a report of the results so far; a second
    signal later cancels it at once. Under ``nohup``, SIGHUP is ignored.

    :raises KeyboardInterrupt: if it is interrupted before there is anything to report.
    :raises AsynctrtError: if the target cannot be measured.
    """
    find_modules(planned.job.target)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    async with LoadSession(apart=True, watch=watch) as session:
        interruption = _Interruption(session, task)
        endings = set(ENDINGS)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            endings.remove(signal.SIGHUP)
        for number in endings:
            loop.add_signal_handler(number, interruption.take_signal)
        try:
            return await carry_out(planned.job, session)
        except (asyncio.CancelledError, AsynctrtError):
            if interruption.began_ns is None:
                raise
            if session.runs:
                return make_report(planned.job, session.runs, None)
            raise KeyboardInterrupt from None
        finally:
            for number in endings:
                loop.remove_signal_handler(number)


class _Interruption:
    """End a session at the first signal, and cancel its task at a later one."""

    def __init__(self, session: LoadSession, task: asyncio.Task[Any]) -> None:
        self.began_ns: int | None = None
        self._session = session
        self._task = task

    def take_signal(self) -> None:
        now_ns = clock.now_ns()
        if self.began_ns is not None and now_ns - self.began_ns <= AGAIN_NS:
            return
        if self.began_ns is not None or not self._session.is_running:
            self._task.cancel()
        self.began_ns = now_ns
        self._session.stop()


def write(planned: LoadPlan, report: Report) -> list[Path]:
    """Write the requested files, each completely or not at all, and return their paths.

    ``--json -`` writes to standard output.

    :raises UsageError: for the first file that cannot be written, after writing all the others.
    """
    written: list[Path] = []
    failed: list[AsynctrtError] = []
    if planned.prints_json:
        sys.stdout.write(report.as_text())
    for path in planned.outputs:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path == planned.json:
                write_whole(path, report.as_text())
            else:
                report.save(path)
            written.append(path)
        except OSError as error:
            failed.append(UsageError(f"{str(path)!r} cannot be written: {error}"))
        except UsageError as error:
            failed.append(error)
    if failed:
        there = f". Written: {', '.join(map(str, written))}" if written else ""
        raise UsageError(f"{failed[0]}{there}")
    return written


def exit_status(report: Report) -> int:
    """Return 3 if an slo is missed or most requests failed, 4 if figures are void, 5 if there were too few
    requests to judge, and 0 otherwise."""
    if report.search is not None and report.search.holds is not None:
        # If its last run is void, nothing is known above the rate that holds.
        return VOID if report.runs[-1].void else 0
    if any(not run.answered or run.error_share > FAILED_SHARE for run in report.runs):
        return NOT_GOOD
    if report.void:
        return VOID
    is_missed, is_unjudged = any(run.misses for run in report.runs), any(run.unjudged for run in report.runs)
    if report.kind == "sweep":
        is_missed = is_unjudged = False
    elif report.search is not None:
        # It found nothing, and ended because of its last run.
        is_unjudged = bool(report.runs) and bool(report.runs[-1].unjudged)
        is_missed = not is_unjudged
    if is_missed or not report.runs:
        return NOT_GOOD
    return UNJUDGED if is_unjudged else 0


def read_report(path: Path) -> dict[str, Any]:
    """Read a report that was saved as JSON.

    :raises UsageError: if the file cannot be read, or is not a report.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the report {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.get("runs"):
        raise UsageError(f"{str(path)!r} is not the report of a load test: make one with --json")
    return content


def _values(text: str) -> tuple[str, list[Any]]:
    """Parse a list ``rate=100,200``, or a range ``callers=1:64``, which doubles at each step."""
    name, mark, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not mark or not values:
        raise OptionsError(f"{text!r} has no values: write rate=1000,2000 or, doubling, callers=1:64")
    first, colon, last = values.partition(":")
    if colon:
        low, high = _number(first), _number(last)
        if not (isinstance(low, int | float) and isinstance(high, int | float) and 0 < low <= high):
            raise OptionsError(
                f"{text!r} is not a range: write two numbers, the smaller first, as in callers=1:64"
            )
        doubling = itertools.takewhile(lambda value: value <= high, (low * 2**step for step in range(64)))
        return name, list(doubling)
    return name, [_number(value) for value in values.split(",")]


def _number(text: str) -> Any:
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _check_writable(path: Path, *, is_page: bool) -> None:
    """Raise before the test, not after it, if a file cannot be written."""
    folder = path if path.is_dir() else path.parent
    while not folder.exists():
        folder = folder.parent
    if is_page and path.suffix not in (".html", ".csv"):
        raise UsageError(f"{str(path)!r} is not an .html or .csv file: --report writes one of these")
    if path.suffix == ".html":
        import_module("asynctrt.loadtest.page")  # It names the extra that brings what it needs.
    if path.is_dir() and path.suffix in (".json", ".html", ".csv"):
        raise UsageError(f"{str(path)!r} is a folder, not a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{str(path)!r} cannot be written: {str(folder)!r} is not a folder that you may write to"
        )
