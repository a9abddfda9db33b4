"""Examine this machine."""

import re
from collections.abc import Callable
from typing import Final

from asynctrt.doctor.checks import CHECKS
from asynctrt.doctor.facts import Facts, gather
from asynctrt.doctor.findings import Report
from asynctrt.errors import OptionsError, show

DEVICE: Final = re.compile(r"host|cuda:\d+")

TIMEOUT_S: Final = 60.0


def diagnose(
    device: str | None = None,
    *,
    timeout: float = TIMEOUT_S,
    on_done: Callable[[str], None] = lambda _: None,
) -> Report:
    """Examine this machine, and return what was found. Blocks for seconds, as libraries are loaded.

    Nothing is loaded into this process: what may crash or hang is tried in child processes.

    :param device: ``host``, ``cuda:0`` and so on: what has to work. A GPU that is missing is an error only if
        one is named, or if there are signs of one.
    :param timeout: seconds that each probe may take; several run at once.
    :param on_done: called with the name of each probe that has ended, from several threads.
    :raises OptionsError: if ``device`` is no name of a device, or ``timeout`` is not positive.
    """
    if device is not None and not DEVICE.fullmatch(device):
        raise OptionsError(
            f"{show(device)} is not a device. There are 'host' and 'cuda:0', 'cuda:1' and so on"
        )
    if not timeout > 0:
        raise OptionsError(f"timeout must be a number of seconds > 0, not {show(timeout)}")
    return conclude(gather(device=device, timeout_s=timeout, on_done=on_done))


def conclude(facts: Facts) -> Report:
    """Return what facts mean."""
    return Report.of(finding for check in CHECKS for finding in check(facts))
