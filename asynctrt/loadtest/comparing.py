"""Compares two saved reports. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from asynctrt.loadtest import criteria
from asynctrt.loadtest.criteria import Criterion
from asynctrt.loadtest.report import saved_figures

STEPS: Final = ("mean", "p50", "p99")
"""Figures of steps that are compared."""

Line = tuple[str, float | None, float | None]
"""The name of a figure, or of a setting that differs, and its values in both reports."""


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[Line], list[str]]:
    """Return each figure of two reports, with those of their steps, and notes about what else differs."""
    before, after = saved_figures(a), saved_figures(b)
    lines: list[Line] = [
        (name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])
    ]
    steps = [_steps(content) for content in (a, b)]
    names = dict.fromkeys([*steps[0], *steps[1]])
    lines += [(name, steps[0].get(name), steps[1].get(name)) for name in names]
    return lines, list(_notes(a, b))


def gate(texts: Iterable[str], a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the criteria that are true of the second report, and those that cannot be checked.

    :raises OptionsError: for an invalid criterion.
    """
    return criteria.gate(map(Criterion.parse, texts), saved_figures(b), saved_figures(a))


def _steps(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of each step that every run of a report has, as means over its runs."""
    found: dict[str, list[float]] = {}
    for run in content["runs"]:
        for name, step in run.get("steps", {}).items():
            for figure in STEPS:
                if figure in step.get("latency", {}):
                    found.setdefault(f"{name} {figure}", []).append(step["latency"][figure])
    count = len(content["runs"])
    return {name: sum(values) / count for name, values in found.items() if len(values) == count}


def _notes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs besides the figures, and why they may not be comparable."""
    for part in ("target", "settings", "machine"):
        there, here = a.get(part, {}), b.get(part, {})
        for name in dict.fromkeys([*there, *here]):
            if there.get(name) != here.get(name):
                yield f"{part}, {name}: {there.get(name)} in A, {here.get(name)} in B"
    for letter, content in (("A", a), ("B", b)):
        if any(run.get("void") for run in content["runs"]):
            yield f"{letter} is void: its figures are the generator's, not the target's"
        if not content.get("complete", False):
            yield f"{letter} was stopped early"
