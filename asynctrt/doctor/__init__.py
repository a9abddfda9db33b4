"""Examine a machine before anything runs on it, and say how to fix what is wrong.

``facts`` gathers facts, the risky ones in child processes (``children``, ``probes``); ``checks`` interprets
them and touches nothing else. :func:`diagnose` does both.
"""

import re
from typing import Final

from asynctrt.doctor.checks import drivers, engines, packages
from asynctrt.doctor.facts import Facts, gather
from asynctrt.doctor.findings import SICK, Finding, Findings, Level
from asynctrt.errors import OptionsError, show

__all__ = ["SICK", "Finding", "Findings", "Level", "diagnose"]

DEVICE: Final = re.compile(r"host|cuda:\d+")

TIMEOUT_S: Final = 60.0


def diagnose(device: str | None = None, *, timeout: float = TIMEOUT_S) -> Findings:
    """Examine this machine and return a report. Blocks for seconds, while libraries are loaded.

    Nothing is loaded into this process: anything that may crash or hang runs in child processes.

    :param device: the device that must work: ``host``, ``cuda:0`` and so on. A missing GPU is an error only
        if one is named, or if there are signs of one.
    :param timeout: seconds that each probe may take; several run at once.
    :raises OptionsError: if ``device`` is not the name of a device, or ``timeout`` is not positive.
    """
    if device is not None and not DEVICE.fullmatch(device):
        raise OptionsError(
            f"{show(device)} is not a device. There are 'host' and 'cuda:0', 'cuda:1' and so on"
        )
    if not timeout > 0:
        raise OptionsError(f"timeout must be a number of seconds > 0, not {show(timeout)}")
    return conclude(gather(device=device, timeout_s=timeout))


def conclude(facts: Facts) -> Findings:
    """Return the report that follows from the facts."""
    # Earlier findings explain later ones.
    checks = (drivers.check, packages.check, engines.check)
    return Findings(tuple(finding for check in checks for finding in check(facts)))
