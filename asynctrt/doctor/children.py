"""Run a probe in a child process with a time limit, so that a crash becomes an answer.

A library that does not fit the driver may end the process in its constructor, or hang in it. A child gives
its answer through a file of its own, as libraries write to standard output and standard error as they like.
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
from typing import Any, BinaryIO, Final, cast

PROBES: Final = Path(__file__).parent / "probes"
"""Where the probes are, each a file with a function ``probe``."""

RUNNER: Final = PROBES / "run.py"

CONTENT_NBYTES_MAX: Final = 4 << 20
SAID_CHARS_MAX: Final = 600


class Ending(StrEnum):
    """How a probe ended."""

    ANSWERED = "answered"
    """It gave an answer, and its process ended as it should."""
    RAISED = "raised"
    """It raised an exception."""
    CRASHED = "crashed"
    """A signal ended its process, perhaps after it had answered."""
    HUNG = "hung"
    """It did not end in time."""
    GARBLED = "garbled"
    """Its answer cannot be read."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a probe ended, and what it answered."""

    ending: Ending
    value: Any = None
    """Its answer, also from one that crashed once it had answered; otherwise ``None``."""
    said: str = ""
    """How it ended, for messages: the exception, the signal and where it struck, or the time limit."""

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer, whatever happened afterwards."""
        return self.value is not None


def ask(probe: str | Path, *args: str, timeout_s: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a probe in a child process, and return how it ended. Blocks for ``timeout_s`` at most.

    :param probe: the name of a probe of this package, or the path of a file with a function ``probe``, which
        takes texts and returns what JSON can hold.
    :param args: the arguments of the function.
    :param env: the environment of the child. Default: that of this process.
    """
    path = probe if isinstance(probe, Path) else PROBES / f"{probe}.py"
    env = {**(os.environ if env is None else env), "ORT_DISABLE_TELEMETRY": "1"}
    # Files in memory: what a probe leaves running would keep pipes open.
    with _memory_file("answer") as answer, _memory_file("errors") as errors:
        child = subprocess.Popen(  # noqa: S603  (its arguments are ours)
            # -P: what lies beside a probe, or in the working directory, is no module.
            [sys.executable, "-P", str(RUNNER), str(answer.fileno()), str(path), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(answer.fileno(),),
            env=env,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(child)
        return _outcome(code, _content(answer), _content(errors).decode(errors="replace").strip(), timeout_s)


def _outcome(code: int | None, raw: bytes, said: str, timeout_s: float) -> Outcome:
    """Return what the exit status, the answer and the standard error of a child amount to."""
    value, is_garbled = None, False
    if raw:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            is_garbled = True
    when = " once it had answered" if value is not None else ""
    if code is None:
        return Outcome(Ending.HUNG, value, f"it did not end within {timeout_s:g} s{when}")
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Outcome(Ending.CRASHED, value, f"{name}{when}{_place(said)}")
    if code:
        return Outcome(Ending.RAISED, said=_last(said) or f"it ended with status {code}")
    if is_garbled or value is None:
        return Outcome(Ending.GARBLED, said=f"its answer was {raw[:60]!r}")
    return Outcome(Ending.ANSWERED, value)


def _memory_file(name: str) -> BinaryIO:
    try:
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    except OSError:  # A sandbox may forbid it.
        return cast("BinaryIO", tempfile.TemporaryFile(buffering=0))


def _content(file: BinaryIO) -> bytes:
    return os.pread(file.fileno(), CONTENT_NBYTES_MAX, 0)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # What hangs in the driver cannot be killed. It is left behind.
        child.wait(2)


def _place(said: str) -> str:
    """Return where the signal struck, from what faulthandler wrote."""
    for line in said.splitlines():
        if line.strip().startswith('File "') and " in probe" not in line and "run.py" not in line:
            return f", in {line.strip()[:160]}"
    return ""


def _last(said: str) -> str:
    """Return the last line that says something: the exception, below its traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:SAID_CHARS_MAX] if lines else ""
