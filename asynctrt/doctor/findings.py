"""What the doctor found: findings, and the report that they make up."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

SICK: Final = 3
"""The exit status if something has to be mended; 1 and 2 mean that the command itself failed."""


class Level(StrEnum):
    """How much a finding matters, from the least to the most."""

    OK = "ok"
    """It is as it should be."""
    NOTE = "note"
    """It is worth knowing, and may be as intended."""
    UNKNOWN = "unknown"
    """It cannot be known here."""
    WARNING = "warning"
    """It works, but slowly, or not for long, or by chance."""
    ERROR = "error"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """A stable name for programs: ``driver.missing``."""
    level: Level
    what: str
    """What is."""
    why: str = ""
    """Why it matters; empty if it is as it should be."""
    fix: str = ""
    """What to do about it; empty if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about a machine, in the order in which they are best read."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> "Report":
        """Make a report of findings."""
        return cls(tuple(findings))

    def at(self, level: Level) -> tuple[Finding, ...]:
        """Return the findings of one level."""
        return tuple(finding for finding in self.findings if finding.level is level)

    def find(self, check: str) -> tuple[Finding, ...]:
        """Return the findings of one check."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def status(self, *, strict: bool = False) -> int:
        """Return the exit status: 0, or ``SICK`` if there is an error.

        :param strict: whether warnings count as errors.
        """
        return SICK if self.at(Level.ERROR) or (strict and self.at(Level.WARNING)) else 0

    def counts(self) -> dict[str, int]:
        """Return how many findings there are of each level that occurs, the worst first."""
        found = Counter(finding.level for finding in self.findings)
        return {level.value: found[level] for level in reversed(Level) if found[level]}

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the report as plain values, with its status as :meth:`status` gives it."""
        return {
            "status": self.status(strict=strict),
            "counts": self.counts(),
            "findings": [asdict(finding) for finding in self.findings],
        }


def ok(check: str, what: str) -> Finding:
    """Return a finding about something that is as it should be."""
    return Finding(check, Level.OK, what)


def note(check: str, what: str, why: str, fix: str = "") -> Finding:
    """Return a finding about something that is worth knowing."""
    return Finding(check, Level.NOTE, what, why, fix)


def unknown(check: str, what: str, why: str, fix: str = "") -> Finding:
    """Return a finding about something that cannot be known here."""
    return Finding(check, Level.UNKNOWN, what, why, fix)


def warning(check: str, what: str, why: str, fix: str) -> Finding:
    """Return a finding about something that works badly or by chance."""
    return Finding(check, Level.WARNING, what, why, fix)


def error(check: str, what: str, why: str, fix: str) -> Finding:
    """Return a finding about something that will not work."""
    return Finding(check, Level.ERROR, what, why, fix)
