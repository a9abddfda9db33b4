"""Examine this machine, as a whole or because a GPU cannot be used."""

import re
from collections.abc import Mapping
from typing import Final

from asynctrt.doctor.checks import drivers, engines, gpus, machine, packages
from asynctrt.doctor.children import Ending, ProbeOutcome, ask
from asynctrt.doctor.facts import Ask, Facts, gather
from asynctrt.doctor.findings import Findings, Level
from asynctrt.errors import DeviceUnavailableError, OptionsError, show

DEVICE: Final = re.compile(r"host|cuda:\d+")

TIMEOUT_S: Final = 60.0

ADVICE_TIMEOUT_S: Final = 10.0
"""How long one probe may take while a caller waits for its error."""

ADVICE_PROBES: Final = ("driver", "nvml")
"""The probes that concern the driver, and are quick."""


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
    checks = (drivers.check, gpus.check, packages.check, machine.check, engines.check)
    return Findings(tuple(finding for check in checks for finding in check(facts)))


def advise(
    error: DeviceUnavailableError, device: str, *, env: Mapping[str, str] | None = None, ask: Ask = ask
) -> DeviceUnavailableError:
    """Return an error that ends with the first error found about the driver. Blocks for a moment.

    :param device: the device that cannot be used: ``cuda:0``.
    :param env: the environment of the probes. Default: that of this process.
    :param ask: runs a probe; for tests.
    """

    def ask_some(probe: str, *args: str, **more: object) -> ProbeOutcome:
        return (
            ask(probe, *args, **more)
            if probe in ADVICE_PROBES
            else ProbeOutcome(Ending.FAILED, said="not asked")
        )

    try:
        facts = gather(device=device, timeout_s=ADVICE_TIMEOUT_S, env=env, ask=ask_some)
        found = [one for one in drivers.check(facts) if one.level is Level.ERROR]
    except Exception:
        return error  # The error itself says what went wrong.
    said = [str(error), *(f"asynctrt doctor: {one.what}. {one.fix}" for one in found[:1])]
    said.append(f"To examine this machine: asynctrt doctor --device {device}")
    return DeviceUnavailableError(". ".join(part.rstrip(".") for part in said))
