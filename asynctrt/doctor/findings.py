"""The doctor's findings, and the report made of them."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

SICK: Final = 3
"""The exit status if there is an error; 1 and 2 mean that the command itself failed."""

WIDTH: Final = 80
INDENT: Final = " " * 9


class Level(StrEnum):
    """How much a finding matters, from the least to the most."""

    OK = "ok"
    """It is as it should be."""
    NOTE = "note"
    """It is worth knowing, and may be intended; or it cannot be determined here."""
    WARNING = "warning"
    """It works, but slowly, or not for long, or by chance."""
    ERROR = "error"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """A stable name for programs: ``driver.missing``."""
    what: str
    """What was found, and its consequences."""
    fix: str = ""
    """What to do about it; empty if there is nothing to do."""
    level: Level = Level.OK


def ok(check: str, what: str) -> Finding:
    """Make a finding about something that is as it should be."""
    return Finding(check, what)


def note(check: str, what: str, fix: str) -> Finding:
    """Make a finding about something that is worth knowing."""
    return Finding(check, what, fix, Level.NOTE)


def warning(check: str, what: str, fix: str) -> Finding:
    """Make a finding about something that works badly or by chance."""
    return Finding(check, what, fix, Level.WARNING)


def error(check: str, what: str, fix: str) -> Finding:
    """Make a finding about something that will not work."""
    return Finding(check, what, fix, Level.ERROR)


@dataclass(frozen=True, slots=True)
class Findings:
    """All findings about a machine, in the order in which they are best read."""

    findings: tuple[Finding, ...]

    @property
    def status(self) -> int:
        """The exit status: 0, or ``SICK`` if there is an error."""
        return SICK if Level.ERROR in self.counts() else 0

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each level that occurs, the worst level first."""
        found = Counter(finding.level for finding in self.findings)
        return {level.value: found[level] for level in reversed(Level) if found[level]}

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, with its :attr:`status`."""
        findings = [asdict(finding) for finding in self.findings]
        return {"status": self.status, "counts": self.counts(), "findings": findings}

    def lines(self, width: int = WIDTH) -> Iterator[tuple[Level | None, str]]:
        """Yield the report as lines of text, each with the level of its finding; ``None`` for the summary.

        :param width: the maximum length of a line, unless a single word is longer.
        """
        for one in self.findings:
            fix = _wrapped(f"{INDENT}fix: ", one.fix, width)
            for line in (*_wrapped(f"{one.level.value:<9}", one.what, width), *fix):
                yield one.level, line
        counts = self.counts()
        listed = ", ".join(
            f"{count} {level}{'s' * (count != 1 and level != Level.OK)}" for level, count in counts.items()
        )
        advice = "Nothing stands in the way."
        if Level.WARNING in counts:
            advice = "It works; the warnings say what may cost speed or reliability."
        if Level.ERROR in counts:
            advice = "Begin with the first error: later ones often follow from it."
        for line in ("", *_wrapped("", f"{listed}. {advice}", width)):
            yield None, line


def _wrapped(start: str, text: str, width: int) -> list[str]:
    # Paths are never broken, so that a double click selects all of one.
    wrapper = textwrap.TextWrapper(
        width, start, " " * len(start), break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)
