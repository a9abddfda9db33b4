"""Run a probe in a child process with a time limit, so that a crash becomes an answer.

A library that does not fit the driver may crash or hang the process that loads it. A child writes its answer
to a separate file, because libraries may write anything to standard output and standard error.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

from asynctrt.errors import bounded

PROBES: Final = Path(__file__).parent / "probes"
"""The folder of the probes, each a file with a function ``probe``."""

CONTENT_NBYTES_MAX: Final = 4 << 20
"""The most to read of what a probe has written, which may be anything."""


class Ending(StrEnum):
    """How a probe ended."""

    ANSWERED = "answered"
    """It gave an answer, and its process exited normally."""
    FAILED = "failed"
    """It raised an exception, or its answer cannot be read."""
    CRASHED = "crashed"
    """A signal ended its process, perhaps after it had answered."""
    HUNG = "hung"
    """It did not end in time, perhaps after it had answered."""


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """How a probe ended, and its answer."""

    ending: Ending
    value: Any = None
    """Its answer, even if it crashed or hung afterwards; otherwise ``None``."""
    said: str = ""
    """How it ended, for messages: the exception, the signal or the time limit."""

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer, whatever happened afterwards."""
        return self.value is not None

    @property
    def verb(self) -> str:
        """What it does, for messages about one that gave no right answer."""
        return {Ending.HUNG: "hangs", Ending.CRASHED: "crashes"}.get(self.ending, "fails")


def ask(
    probe: str | Path,
    *args: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    running: set[subprocess.Popen[bytes]] | None = None,
) -> ProbeOutcome:
    """Run a probe in a child process, and return how it ended. Blocks for ``timeout_s`` at most.

    :param probe: the name of a probe of this package, or the path of a file with a function ``probe``, which
        takes strings and returns a value that JSON can represent.
    :param args: the arguments of the function.
    :param env: the environment of the child. Default: that of this process.
    :param running: has the child while it runs, so that another thread can :func:`kill` it.
    """
    running = set() if running is None else running
    path = probe if isinstance(probe, Path) else PROBES / f"{probe}.py"
    env = {**(os.environ if env is None else env), "ORT_DISABLE_TELEMETRY": "1"}
    # Files instead of pipes: a process that a probe leaves running would keep pipes open.
    with _file("answer") as answer, _file("errors") as errors:
        child = subprocess.Popen(  # noqa: S603  (its arguments are ours)
            # -P: do not import modules from a probe's folder or the working directory.
            [sys.executable, "-P", str(PROBES / "run.py"), str(answer.fileno()), str(path), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(answer.fileno(),),
            env=env,
            start_new_session=True,
        )
        running.add(child)
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout_s)
        finally:
            kill(child)
            running.discard(child)
        raw, said = (os.pread(file.fileno(), CONTENT_NBYTES_MAX, 0) for file in (answer, errors))
        return _outcome(code, raw, said.decode(errors="replace"), timeout_s)


def _outcome(code: int | None, raw: bytes, said: str, timeout_s: float) -> ProbeOutcome:
    """Return the outcome for a child's exit status, answer and standard error."""
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(raw)
    when = " once it had answered" if value is not None else ""
    if code is None:
        return ProbeOutcome(Ending.HUNG, value, f"it did not end within {timeout_s:g} s{when}")
    if code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return ProbeOutcome(Ending.CRASHED, value, f"{names.get(-code, f'signal {-code}')}{when}")
    if code:
        # The last line is the exception, below its traceback.
        last = bounded(said.strip().rpartition("\n")[2].strip())
        return ProbeOutcome(Ending.FAILED, said=last or f"it ended with status {code}")
    if value is None:
        return ProbeOutcome(Ending.FAILED, said=f"its answer was {raw[:60]!r}")
    return ProbeOutcome(Ending.ANSWERED, value)


def _file(name: str) -> IO[bytes]:
    """Open a file in memory, or a temporary one where a sandbox forbids that; containers may have no disk."""
    try:
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    except OSError:
        return tempfile.TemporaryFile(buffering=0)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # A process that hangs in the driver cannot be killed, and is left behind.
        child.wait(2)
