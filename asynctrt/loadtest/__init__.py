"""Load tests for any engine, function or server.

::

    report = await asynctrt.loadtest.run(engine, rate=2000, seconds=5, slo="p99<20ms")
    assert report.holds, report.runs[0].latency

Latency counts from when a request was due, not from when it could be sent. The report says how late the
generator itself was, and a run in which it could not keep up is reported as void.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from asynctrt.loadtest.settings import LoadSettings

if TYPE_CHECKING:
    from asynctrt.loadtest.api import run
    from asynctrt.loadtest.report import Report, Run
    from asynctrt.loadtest.steps import step
    from asynctrt.loadtest.targets import Target, TargetSpec
    from asynctrt.loadtest.tls import Tls

__all__ = ["LoadSettings", "Report", "Run", "Target", "TargetSpec", "Tls", "run", "step"]

MODULES: Final = {
    "run": "api",
    "Report": "report",
    "Run": "report",
    "step": "steps",
    "Tls": "tls",
} | dict.fromkeys(("Target", "TargetSpec"), "targets")


def __getattr__(name: str) -> Any:
    """Import names lazily, so that the command line works without the extra ``load``."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"asynctrt.loadtest.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return all public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
