"""Load tests for any engine, function or server.

::

    report = await asynctrt.loadtest.run(engine, rate=2000, seconds=5, slo="p99<20ms")
    assert report.holds, report.runs[0].latency

Latency counts from when a request was due, not from when it could be sent. The report says how late the
generator itself was, and a run in which it could not keep up is reported as void.
"""

from typing import TYPE_CHECKING, Any

from asynctrt.loadtest.settings import LoadSettings

if TYPE_CHECKING:
    from asynctrt.loadtest.api import run
    from asynctrt.loadtest.report import Report, Run
    from asynctrt.loadtest.saving import LoadReport
    from asynctrt.loadtest.steps import step
    from asynctrt.loadtest.targets import Target, TargetSpec
    from asynctrt.loadtest.tls import Tls

__all__ = ["LoadReport", "LoadSettings", "Report", "Run", "Target", "TargetSpec", "Tls", "run", "step"]


def __getattr__(name: str) -> Any:
    """Import names lazily, so that the command line works without the extra ``load``."""
    if name == "run":
        from asynctrt.loadtest.api import run  # noqa: PLC0415

        return run
    if name == "step":
        from asynctrt.loadtest.steps import step  # noqa: PLC0415

        return step
    if name == "Tls":
        from asynctrt.loadtest.tls import Tls  # noqa: PLC0415

        return Tls
    if name == "LoadReport":
        from asynctrt.loadtest.saving import LoadReport  # noqa: PLC0415

        return LoadReport
    if name in ("Report", "Run"):
        from asynctrt.loadtest import report  # noqa: PLC0415

        return getattr(report, name)
    if name in ("Target", "TargetSpec"):
        from asynctrt.loadtest import targets  # noqa: PLC0415

        return getattr(targets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
