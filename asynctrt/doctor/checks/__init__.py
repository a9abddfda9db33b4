"""What the facts mean. Each check takes them and yields findings; it looks at nothing itself."""

from collections.abc import Callable, Iterator
from typing import Final

from asynctrt.doctor.checks import drivers, engines, gpus, libraries, packages, system, workers
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding

CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    drivers.check,
    gpus.check,
    libraries.check,
    packages.check,
    system.check,
    engines.check,
    workers.check,
)
"""In the order in which their findings are best read: what comes first explains what comes later."""
