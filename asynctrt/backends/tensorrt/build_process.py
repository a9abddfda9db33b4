"""Build a plan in a separate process, because TensorRT's ONNX parser crashes on some damaged models.

A crash of the process becomes an error here. The builder's host and GPU memory is freed with the process.
Ctrl-C, which a terminal sends to both, ends it at once. The two exchange lines of JSON and plain bytes.
"""

import ctypes
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from asynctrt import errors
from asynctrt._util.cancellation import current
from asynctrt._util.process import child_command
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.tensorrt.builder import BuildStep, Built, Report, build_plan
from asynctrt.backends.tensorrt.flavours import find_builder
from asynctrt.backends.tensorrt.profiles import NetworkTensor
from asynctrt.errors import AsynctrtError, BuildError, InternalError

PR_SET_PDEATHSIG: Final = 1

logger = logging.getLogger("asynctrt.tensorrt")


def build_in_process(
    model: bytes,
    path: Path,
    flavour: str | None,
    options: BuildOptions,
    device: str | None = None,
    report: Report | None = None,
) -> Built:
    """Build a plan as :func:`build_plan` does, but in a separate process, whose crash is a ``BuildError``."""
    cancellation = current()
    order = {
        "path": os.fspath(path),
        "flavour": flavour,
        "options": options.as_json(),
        "device": device,
        "nbytes": len(model),
        "level": logger.getEffectiveLevel(),
    }
    command = child_command("asynctrt.backends.tensorrt.build_process")
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603  (our own program)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with cancellation.calling(process.kill):
                built = _exchange(process.stdin, process.stdout, order, model, report)
        finally:
            # It has finished, or the caller was interrupted and no longer reads its output.
            process.kill()
            process.stdout.close()
            status = process.wait()
        if built is not None:
            return built
        said.seek(0)
        tail = said.read().decode(errors="replace").strip()[-errors.DESCRIBED_MAX :]
    if status == -signal.SIGINT or cancellation.is_cancelled:
        raise errors.UsageError(f"building a plan from {str(path)!r} was interrupted")
    raise BuildError(
        f"the builder crashed on {str(path)!r}: its process ended with {_name_of(status)}. The model is "
        "damaged, or the library has a fault with it, or memory was short. Check the model (onnx.checker), "
        f"and export it again. It wrote: {tail or 'nothing'}"
    )


def _exchange(
    to: IO[bytes], come_from: IO[bytes], order: Mapping[str, Any], model: bytes, report: Report | None
) -> Built | None:
    """Send the order, and follow the build; return ``None`` if the process ends without a result."""
    try:
        with to:
            to.write(json.dumps(order).encode() + b"\n")
            to.write(model)
    except BrokenPipeError:
        return None
    for line in come_from:
        try:
            told = json.loads(line)
        except ValueError:
            return None  # The process ended in the middle of a line.
        if "step" in told:
            if report is not None:
                report(BuildStep(*told["step"]))
        elif "log" in told:
            logger.log(told["log"][0], "%s", told["log"][1])
        elif "error" in told:
            raise _error_of(told["error"])
        else:
            content = come_from.read(told["nbytes"])
            return _built_of(told["built"], content) if len(content) == told["nbytes"] else None
    return None


def _name_of(status: int) -> str:
    if status >= 0:
        return f"the status {status}"
    try:
        return f"the signal {signal.Signals(-status).name}"
    except ValueError:
        return f"the signal {-status}"


def _error_of(told: Mapping[str, Any]) -> AsynctrtError:
    kind = getattr(errors, told["type"], InternalError)
    error: AsynctrtError = kind(told["message"])
    return error


def _built_of(told: dict[str, Any], content: bytes) -> Built:
    for side in ("inputs", "outputs"):
        told[side] = tuple(
            NetworkTensor(**{**one, "shape": tuple(one["shape"]), "dims": tuple(one["dims"])})
            for one in told[side]
        )
    told["profiles"] = tuple(
        {name: tuple(map(tuple, shapes)) for name, shapes in profile.items()} for profile in told["profiles"]
    )
    told["plugins"] = tuple(told["plugins"])
    return Built(content=content, **told)


class _Line:
    """The channel back to the parent process."""

    def __init__(self) -> None:
        # Libraries may print anywhere, and their output must not come between the lines.
        self._file = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.RLock()

    def tell(self, content: bytes = b"", **what: Any) -> None:
        """Send one line, and bytes after it. The parent kills this process before it stops reading."""
        with self._lock:
            self._file.write(json.dumps(what).encode() + b"\n" + content)
            self._file.flush()


class _ToParent(logging.Handler):
    """Sends log records to the parent process."""

    def __init__(self, line: _Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        self._line.tell(log=[record.levelno, record.getMessage()])


def main() -> None:
    """Execute the order of the parent process. Called in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with_parent()
    line = _Line()
    order = json.loads(sys.stdin.buffer.readline())
    model = sys.stdin.buffer.read(order["nbytes"])
    logger.addHandler(_ToParent(line))
    logger.propagate = False
    logger.setLevel(order["level"])
    try:
        built = _build(order, model, line)
    except AsynctrtError as error:
        line.tell(error={"type": type(error).__name__, "message": str(error)})
    else:
        content = built.content
        told = dataclasses.asdict(dataclasses.replace(built, content=b""))
        del told["content"]
        line.tell(content, built=told, nbytes=len(content))
    # Skip the library's cleanup, which has no purpose here.
    os._exit(0)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the parent thread ends, as a build may hold memory for hours."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _build(order: Mapping[str, Any], model: bytes, line: _Line) -> Built:
    device = None
    if order["device"] is not None:
        from asynctrt.devices.cuda import find_cuda_device  # noqa: PLC0415  (it loads CUDA's bindings)

        device = find_cuda_device(order["device"])
    return build_plan(
        model,
        Path(order["path"]),
        find_builder(order["flavour"]),
        BuildOptions.from_settings(None, order["options"]),
        lambda step: line.tell(step=dataclasses.astuple(step)),
        device,
    )
