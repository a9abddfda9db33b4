"""What the doctor adds to an error of a GPU that cannot be used: the finding that tells why."""

from collections.abc import Mapping
from typing import Final

from asynctrt.doctor.checks import drivers
from asynctrt.doctor.children import Ending, Outcome, ask
from asynctrt.doctor.facts import Ask, gather
from asynctrt.doctor.findings import Level
from asynctrt.errors import DeviceUnavailableError

TIMEOUT_S: Final = 10.0
"""How long one probe may take while somebody waits for an error."""

ASKED: Final = ("driver", "nvml")
"""The probes that tell about the driver, and are quick."""

FINDINGS_MAX: Final = 2


def advise(
    error: DeviceUnavailableError, device: str, *, env: Mapping[str, str] | None = None, ask: Ask = ask
) -> DeviceUnavailableError:
    """Return an error with what the doctor has found about the driver at its end. Blocks for a moment.

    :param device: the device that cannot be used: ``cuda:0``.
    :param env: the environment of the probes. Default: that of this process.
    :param ask: runs a probe; for tests.
    """

    def ask_some(probe: str, *args: str, **more: object) -> Outcome:
        return ask(probe, *args, **more) if probe in ASKED else Outcome(Ending.RAISED, None, "not asked")

    try:
        facts = gather(device=device, timeout_s=TIMEOUT_S, env=env, ask=ask_some)
        findings = [one for one in drivers.check(facts) if one.level is Level.ERROR]
    except Exception:
        return error  # What went wrong is told all the same.
    said = "; ".join(f"{one.what.rstrip('.')}. {one.fix}" for one in findings[:FINDINGS_MAX])
    found = f" asynctrt doctor: {said}" if said else ""
    return DeviceUnavailableError(
        f"{str(error).rstrip('.')}.{found.rstrip('.')}{'.' * bool(found)} For all about this machine: "
        f"asynctrt doctor --device {device}"
    )
