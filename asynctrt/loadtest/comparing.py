"""Compares two saved reports. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asynctrt.loadtest.criteria import Criterion
from asynctrt.loadtest.report import mean_figures

Line = tuple[str, float | None, float | None]
"""The name of a figure, or of a setting that differs, and its values in both reports."""


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[Line], list[str]]:
    """Return each figure of two reports and of their steps, and notes about what else differs."""
    before, after = mean_figures(a["runs"]), mean_figures(b["runs"])
    names = dict.fromkeys([*before, *after])
    return [(name, before.get(name), after.get(name)) for name in names], list(_notes(a, b))


def gate(texts: Iterable[str], a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the criteria that are true of the second report, with values, and the ones that cannot be
    checked.

    :raises OptionsError: for an invalid criterion.
    """
    failed, unchecked = [], []
    baseline, figures = mean_figures(a["runs"]), mean_figures(b["runs"])
    for item in map(Criterion.parse, texts):
        value, before = figures.get(item.key), baseline.get(item.key)
        if value is None or (item.is_relative and before is None):
            where = "this run" if value is None else "the baseline"
            unchecked.append(f"{item}: cannot be checked, because {where} has no {item.key}")
        elif item.compare(value, before):
            against = f", against {before:,.6g} in the baseline" if item.is_relative else ""
            failed.append(f"{item}: {item.key} is {value:,.6g}{against}")
    return failed, unchecked


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
