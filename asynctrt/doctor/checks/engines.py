"""Whether an engine answers on the host device and in a worker process, and whether each GPU copies."""

from collections.abc import Iterator

from asynctrt.doctor.children import Ending
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, ok, warning


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings about each device and the worker."""
    for name, outcome in facts.engines.items():
        if name.startswith("cuda") and not facts.driver.has_answered:
            continue  # Without a driver there is nothing to try, and a finding says so already.
        if outcome.ending is Ending.ANSWERED and outcome.value["is_right"]:
            times = ", ".join(f"{what} in {ms:.1f} ms" for what, ms in outcome.value["ms"].items())
            yield ok("workers" if name == "worker" else "engine", f"{name}: {times}")
            continue
        is_wrong = outcome.ending is Ending.ANSWERED
        said = "gives a wrong answer" if is_wrong else f"{outcome.verb}: {outcome.said}"
        if name == "worker":
            yield warning(
                "workers",
                f'An engine in a worker process {said}. isolation="process" and asynctrt serve --fronts do '
                "not work here; engines in this process do",
                "They need Linux 5.3, memfd_create, pidfd_open, eventfd and a child process; a sandbox "
                "(seccomp, gVisor) may forbid one of them: allow it, or use another runtime class",
            )
        elif is_wrong:
            fix = "Check the memory errors of the GPU (nvidia-smi -q -d ECC), and have it examined"
            yield error("engine.wrong", f"{name} {said}; nothing that it computes can be trusted", fix)
        else:
            tried = "An engine on the host" if name == "host" else f"Copying to {name} and back"
            fix = "Fix what is found above first. If nothing is, please report it with this output"
            yield error("engine.failed", f"{tried} {said}", fix)
