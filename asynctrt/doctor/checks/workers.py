"""Whether engines can run in worker processes here, and what such processes are allowed."""

from collections.abc import Iterator
from typing import Final

from asynctrt.doctor.children import Ending
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, note, ok, warning

DESCRIPTORS: Final = 4096
"""Each connection of a server takes one, each worker some ten."""

PROCESSES: Final = 256
"""Threads count as processes, and libraries start as many as there are cores in each worker."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield how a worker did, and limits that workers and servers run into."""
    yield _of_worker(facts)
    machine = facts.machine
    descriptors = machine.descriptors
    if descriptors is not None and descriptors < DESCRIPTORS:
        yield note(
            "system.descriptors",
            f"A process may have {descriptors:,} open files (RLIMIT_NOFILE)",
            "A server needs one for each connection, and each worker takes some ten.",
            "ulimit -n 65536; docker run --ulimit nofile=65536; LimitNOFILE=65536 in systemd",
        )
    tasks = machine.tasks
    if tasks is not None and tasks < PROCESSES:
        yield note(
            "system.processes",
            f"Only {tasks:,} processes and threads are allowed here",
            "Each worker and each front is a process, and libraries start a thread for each core in each.",
            "docker run --pids-limit; podPidsLimit in Kubernetes; TasksMax in systemd; ulimit -u",
        )


def _of_worker(facts: Facts) -> Finding:
    outcome = facts.worker
    if outcome.ending is not Ending.ANSWERED:
        verb = {Ending.HUNG: "hangs", Ending.CRASHED: "crashes"}.get(outcome.ending, "fails")
        return warning(
            "workers",
            f"An engine in a worker process {verb}: {outcome.said}",
            'isolation="process" and asynctrt serve --fronts do not work here; engines in process do.',
            "They need Linux 5.3, memfd_create, pidfd_open, eventfd and a child process; a sandbox (seccomp, "
            "gVisor) may forbid one of them: allow it, or use another runtime class",
        )
    value = outcome.value
    if not value["is_right"]:
        return warning(
            "workers",
            "An engine in a worker process gave a wrong answer",
            "What the worker writes does not reach this process as it was.",
            "Please report it with this output; engines in process do not share memory with anybody",
        )
    return ok(
        "workers",
        f"Worker processes: one opened in {value['open_ms']:.0f} ms, answered in {value['answer_ms']:.1f} "
        f"ms, and after SIGKILL another answered within {value['recovery_ms']:.0f} ms",
    )
