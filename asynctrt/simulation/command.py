"""``asynctrt simulate`` without its display: flags to what is to be done, Ctrl-C, files."""

import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from asynctrt.errors import MissingExtraError, OptionsError
from asynctrt.files import write_whole
from asynctrt.options import Options
from asynctrt.simulation.check import Failure, Outcome, check_seeds
from asynctrt.simulation.latency import read_latency
from asynctrt.simulation.plan import Collected, Plan, Prediction, as_json, make_plan, simulate_plan
from asynctrt.simulation.settings import OPTION_NAMES, SimulationSettings

NOT_GOOD: Final = 3
"""The exit status when the slo is missed."""
NEEDED: Final = ("matplotlib", "jinja2", "hdrh")
"""What plots need, of the extra ``load``."""


class Interrupt:
    """Turns the first Ctrl-C into a flag, so that nothing is torn; a second one ends everything at once."""

    def __init__(self) -> None:
        self.is_set = False
        """Whether Ctrl-C was pressed."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._set)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """Everything that the command was asked to do: seeds to check, or a load to predict."""

    seeds: range | None = None
    arrivals: str = ""
    plan: Plan | None = None
    json: Path | None = None
    plot: Path | None = None


def make_job(given: Mapping[str, Any]) -> SimulationJob:
    """Return what the flags in ``given`` ask for, which has only those that were passed.

    :raises OptionsError: for impossible values.
    :raises UsageError: for files that cannot be read.
    :raises MissingExtraError: if a plot is asked for and the extra for plots is missing.
    """
    names = [*SimulationSettings.__dataclass_fields__, *OPTION_NAMES, "latency", "plot", "json"]
    if given.get("arrivals") is None:
        extra = [f"--{name.replace('_', '-')}" for name in names if name in given]
        if extra:
            raise OptionsError(
                f"{', '.join(extra)} belong to a load that is predicted: give --arrivals too, such as "
                "poisson:1000"
            )
        seeds = given.get("seeds", 100)
        if seeds < 1 or given.get("seed", 0) < 0:
            raise OptionsError("--seeds must be 1 or more, and --seed 0 or more")
        first = given.get("seed", 0)
        return SimulationJob(range(first, first + seeds))
    if "seeds" in given:
        raise OptionsError("--seeds checks the scheduler in worlds of its own: leave --arrivals out")
    if given.get("latency") is None:
        raise OptionsError(
            "a prediction needs what batches cost: --latency model.json. `asynctrt load MODEL --sweep "
            "callers=1,4,16,64 --json model.json` measures it"
        )
    if given.get("plot") is not None:
        for name in NEEDED:
            # It takes long to import, and is needed last.
            if sys.modules.get(name, name) is None or importlib.util.find_spec(name) is None:
                raise MissingExtraError(f"plots need {name}: pip install 'asynctrt[plots]'")
    settings = {name: given[name] for name in SimulationSettings.__dataclass_fields__ if name in given}
    options = {name: given[name] for name in OPTION_NAMES if name in given}
    seed = given.get("seed", 0)
    if seed < 0:
        raise OptionsError(f"--seed must be 0 or more, not {seed}")
    plan = make_plan(
        given["arrivals"],
        read_latency(given["latency"]),
        SimulationSettings(**settings),
        Options.from_settings(None, options),
        seed,
    )
    return SimulationJob(None, given["arrivals"], plan, given.get("json"), given.get("plot"))


def check(seeds: range, advance: Callable[[Outcome | Failure], None]) -> tuple[int, Sequence[Failure], bool]:
    """Check the worlds of seeds.

    :param advance: called after each.
    :returns: how many were checked, the failures, and whether Ctrl-C ended it.
    """
    done = 0
    with Interrupt() as interrupt:

        def told(found: Outcome | Failure) -> bool:
            nonlocal done
            done += 1
            advance(found)
            return not interrupt.is_set

        failures = check_seeds(seeds, told)
    return done, failures, interrupt.is_set and done < len(seeds)


def predict(plan: Plan, advance: Callable[[float], None]) -> tuple[Prediction, Collected]:
    """Simulate a load. Ctrl-C ends it with figures of what there is.

    :param advance: called now and then with the share that is done.
    """
    with Interrupt() as interrupt:

        def told(share: float) -> bool:
            advance(share)
            return not interrupt.is_set

        return simulate_plan(plan, told)


def write(job: SimulationJob, made: Prediction, collected: Collected) -> list[Path]:
    """Write the files that were asked for, and return their paths. ``-`` is standard output.

    :raises UsageError: if one cannot be written.
    """
    assert job.plan is not None
    written: list[Path] = []
    if job.json is not None:
        text = json.dumps(as_json(job.plan, made, job.arrivals), indent=1) + "\n"
        if str(job.json) == "-":
            sys.stdout.write(text)
        else:
            write_whole(job.json, text)
            written.append(job.json)
    if job.plot is not None:
        # They need the extra `load`, which a prediction does not.
        from asynctrt.simulation.drawing import draw  # noqa: PLC0415

        written += draw(job.plot, job.plan, made, collected, job.arrivals)
    return written


def exit_status(made: Prediction) -> int:
    """Return 3 if a criterion of the slo is missed, and 0 otherwise."""
    return 0 if all(made.slo.values()) else NOT_GOOD
