"""Performs runs one after another: opens the target, monitors the run, and keeps its result."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from asynctrt._util import clock
from asynctrt._util.validation import check_names
from asynctrt.errors import OptionsError
from asynctrt.loadtest.figures import make_run
from asynctrt.loadtest.local import Local
from asynctrt.loadtest.plans import WINDOWS_MAX, ProcessPlan
from asynctrt.loadtest.processes import Fleet
from asynctrt.loadtest.recorder import Windows, coarser, merge
from asynctrt.loadtest.report import Run
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec
from asynctrt.options import Options

WINDOWS_HELD_MAX: Final = 2 * WINDOWS_MAX
"""Beyond this number, windows are merged in pairs: a run of any length takes a bounded amount of memory."""

OPTION_NAMES: Final = tuple(item.name for item in dataclasses.fields(Options))
SETTING_NAMES: Final = tuple(item.name for item in dataclasses.fields(LoadSettings))
RUN_ONLY: Final = frozenset(
    {"rate", "callers", "think", "arrivals", "seconds", "warmup"}
    | {"requests", "repeats", "answer_timeout", "slo", "rtol", "atol"}
)
"""Settings that can change from run to run without new samples or new processes."""


@dataclass(frozen=True, slots=True)
class LoadCase:
    """Describe one run: its target, its settings, and the parameters that differ from other runs."""

    target: Any
    settings: LoadSettings
    label: str
    parameters: Mapping[str, Any]

    def with_values(self, values: Mapping[str, Any]) -> "LoadCase":
        """Return a copy with these values of settings or an engine's options, which are its label too.

        :raises OptionsError: for an unknown name or an invalid value.
        """
        check_names(values, [*SETTING_NAMES, *OPTION_NAMES], "setting of a load test or an engine")
        settings = {name: value for name, value in values.items() if name in SETTING_NAMES}
        options = {name: value for name, value in values.items() if name in OPTION_NAMES}
        target = self.target
        if options:
            if not isinstance(target, TargetSpec) or target.is_server:
                raise OptionsError(
                    f"cannot set {', '.join(options)} for {target!r}: it is already open, or a server"
                )
            target = replace(target, options=replace(target.options, **options))
        # A rate replaces callers, and vice versa.
        other = {"rate": "callers", "callers": "rate"}
        settings = {other[name]: None for name in settings if name in other} | settings
        shown = (f"{value:g}" if isinstance(value, float) else value for value in values.values())
        label = ", ".join(f"{name}={value}" for name, value in zip(values, shown, strict=True))
        return LoadCase(target, replace(self.settings, **settings), label, {**self.parameters, **values})


@dataclass(slots=True)
class Progress:
    """The progress of a load test, for display. One object is updated throughout the test."""

    number: int = 0
    """Number of the current run, from 1."""
    count: int | None = None
    """Number of runs; ``None`` if it is unknown."""
    label: str = ""
    seconds: float = 0.0
    """Length of the current run including its warm-up."""
    started_ns: int = 0
    windows: Windows = dataclasses.field(default_factory=dict)
    window_ns: int = 250_000_000
    """The length of one recorded window."""
    pairs: int = 1
    """How many of these windows were merged into each of ``windows``."""
    runs: list[Run] = dataclasses.field(default_factory=list)


Watch = Callable[[Progress], None]


class LoadSession:
    """Perform runs one after another, and keep their results, even if the session is cut short.

    :param apart: send from child processes, even if there is only one.
    :param watch: called about once a second during a run.
    """

    def __init__(self, *, apart: bool, watch: Watch | None) -> None:
        self._apart = apart
        self._watch = watch
        self._opened: dict[Any, tuple[Any, AsyncExitStack]] = {}
        self._current: Local | Fleet | None = None
        self._is_stopped = False
        self.progress = Progress()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _, stack in self._opened.values():
            await stack.aclose()
        self._opened.clear()

    @property
    def runs(self) -> list[Run]:
        """The results so far."""
        return self.progress.runs

    @property
    def is_stopped(self) -> bool:
        """Whether the session was cut short."""
        return self._is_stopped

    @property
    def is_running(self) -> bool:
        """Whether a run is in progress, which can still be reported after :meth:`stop`."""
        return self._current is not None

    def stop(self) -> None:
        """End the current run, and start no other."""
        self._is_stopped = True
        if self._current is not None:
            self._current.stop()

    async def run(self, case: LoadCase) -> Run | None:
        """Perform one run; return ``None`` if it was cut short before anything was measured.

        :raises AsynctrtError: if it cannot start.
        """
        if self._is_stopped:
            return None
        sender = await self._sender(case)
        progress = self.progress
        progress.number += 1
        progress.label = case.label
        progress.windows, progress.pairs = {}, 1
        progress.started_ns = clock.now_ns()
        self._current = sender
        try:
            plan, outcomes = await sender.perform(case.settings, self._emit, self._planned)
        finally:
            self._current = None
        run = make_run(
            case.settings,
            replace(plan, window_ns=plan.window_ns * progress.pairs),
            progress.windows,
            outcomes,
            is_server=isinstance(case.target, TargetSpec) and case.target.is_server,
            label=case.label,
            parameters=case.parameters,
        )
        if run is not None:
            progress.runs.append(run)
        return run

    def _planned(self, plan: ProcessPlan) -> None:
        """Note how long the run takes, before anything is sent."""
        self.progress.window_ns = plan.window_ns
        self.progress.seconds = (plan.warmup_ns + plan.measured_ns) / 1e9

    def _emit(self, windows: Windows) -> None:
        """Add windows counted since the last call to the progress, and show it."""
        progress = self.progress
        for number, window in windows.items():
            merge(progress.windows, {number // progress.pairs: window})
        if len(progress.windows) > WINDOWS_HELD_MAX:
            progress.windows = coarser(progress.windows)
            progress.pairs *= 2
        if self._watch is not None:
            self._watch(progress)

    async def _sender(self, case: LoadCase) -> Local | Fleet:
        """Return the sender for a case: an open one if the cases differ only in ``RUN_ONLY`` settings."""
        same = tuple(getattr(case.settings, name) for name in SETTING_NAMES if name not in RUN_ONLY)
        key = (case.target, same)
        if key in self._opened:
            sender: Local | Fleet = self._opened[key][0]
            return sender
        while len(self._opened) > 1:  # A sweep of two values alternates between them.
            _, stack = self._opened.pop(next(iter(self._opened)))
            await stack.aclose()
        stack = AsyncExitStack()
        if self._apart:
            sender = await stack.enter_async_context(Fleet.open(case.target, case.settings))
        else:
            sender = await stack.enter_async_context(Local.open(case.target, case.settings))
        self._opened[key] = sender, stack
        return sender
