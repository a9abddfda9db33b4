"""Write a report as text."""

import textwrap
from collections.abc import Iterator
from typing import Final

from asynctrt.doctor.findings import Finding, Level, Report

WIDTH: Final = 80
INDENT: Final = " " * 9

UNCOUNTED: Final = (Level.OK, Level.UNKNOWN)
"""Words without a plural."""


def lines(report: Report, *, width: int = WIDTH) -> Iterator[tuple[Level | None, str]]:
    """Yield the lines of a report, each with the level of its finding; ``None`` for the summary.

    :param width: characters of a line at most, but for words that are longer.
    """
    for finding in report.findings:
        for line in _lines_of(finding, width):
            yield finding.level, line
    yield None, ""
    for line in textwrap.wrap(_summary(report), width, break_long_words=False, break_on_hyphens=False):
        yield None, line


def _lines_of(finding: Finding, width: int) -> Iterator[str]:
    yield from _wrapped(f"{finding.level.value:<9}", finding.what, width)
    if finding.why:
        yield from _wrapped(f"{INDENT}why: ", finding.why, width)
    if finding.fix:
        yield from _wrapped(f"{INDENT}fix: ", finding.fix, width)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    # Paths are copied by double click: they are never broken.
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(report: Report) -> str:
    counts = ", ".join(
        f"{count} {level}{'s' * (count != 1 and level not in UNCOUNTED)}"
        for level, count in report.counts().items()
    )
    if report.at(Level.ERROR):
        return f"{counts}. Begin with the first error: what comes later often follows from it."
    if report.at(Level.WARNING):
        return f"{counts}. It works; the warnings say what may cost speed or reliability."
    return f"{counts}. Nothing stands in the way."
