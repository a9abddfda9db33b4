"""The creation of ONNX Runtime sessions: their sources and options. This module imports ``onnxruntime``."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from asynctrt._util.validation import PATH
from asynctrt.backends.model_file import opened
from asynctrt.backends.onnx_objects import is_session, shown
from asynctrt.backends.onnx_options import CPU, CUDA, TENSORRT, OnnxOptions
from asynctrt.devices.host import cores
from asynctrt.errors import (
    DeviceUnavailableError,
    MissingExtraError,
    ModelError,
    OptionsError,
    show,
)

# Otherwise ONNX Runtime creates a telemetry database in the user's home directory on import or when a session
# is created. An application that wants it can set the variable itself.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingExtraError(
        "ONNX models need ONNX Runtime, which is not installed: pip install 'asynctrt[cpu]'"
    ) from error

__all__ = [
    "LOG_FATAL_ONLY",
    "Source",
    "check_available",
    "check_host_providers",
    "check_loaded",
    "ort",
    "session_options",
    "threads_of",
]

LOG_FATAL_ONLY: Final = 4
"""The log level of sessions: errors are in the exception, and need not appear on stderr as well."""

LEVELS: Final = {
    "disable_all": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

logger = logging.getLogger("asynctrt")

Providers = Sequence[tuple[str, Mapping[str, str]]]
"""Execution providers in order of priority, each with its options."""


class Source:
    """The source of a model's sessions: a file, the content of one, or an existing session."""

    def __init__(self, given: Any) -> None:
        self.session: ort.InferenceSession | None = given if is_session(given) else None
        """The session that was given. It belongs to the caller and is never ended here."""
        self.path: Path | None = None
        self.what: str | bytes | None = None
        """The argument for ONNX Runtime's constructor: a path, or the content of a file."""
        self._shown = shown(given)
        if self.session is not None:
            return
        if isinstance(given, bytes | bytearray | memoryview):
            self.what = bytes(given)
            return
        self.path = PATH("path", given)
        self.what = str(self.path)
        with opened(self.path):
            pass  # ONNX Runtime would block on a pipe.

    def __str__(self) -> str:
        return self._shown

    def name_for(self, session: ort.InferenceSession) -> str:
        """Return the model's name: that of its file or, without one, of its graph."""
        return self.path.stem if self.path is not None else str(session.get_modelmeta().graph_name) or "model"

    def load(self, options: ort.SessionOptions, providers: Providers = ()) -> ort.InferenceSession:
        """Create a session, by default on the CPU provider, or return the one that was given. Blocks."""
        if self.session is not None:
            return self.session
        providers = providers or [(CPU, {})]
        names, pairs = [name for name, _ in providers], [(name, dict(given)) for name, given in providers]
        check_available(names)
        session = ort.InferenceSession(self.what, options, providers=pairs, enable_fallback=0)
        check_loaded(session, names, str(self))
        return session

    def refused(self, error: Exception, options: OnnxOptions) -> ModelError:
        """Return the error for an exception that ONNX Runtime raised while loading the model."""
        said, version = str(error), ort.__version__
        if "INVALID_PROTOBUF" in said or "No graph was found in the protobuf" in said:
            return ModelError(
                f"{self} is not an ONNX model, or is damaged: ONNX Runtime {version} "
                "cannot parse it. Export the model to ONNX, for example with torch.onnx.export"
            )
        fix = "Check it with onnx.checker.check_model"
        if "not a registered function/op" in said:
            fix = (
                "Name the library that has the operator: onnx={'custom_ops': path}, or "
                "'onnxruntime_extensions' for the operators of that package"
            )
        elif options != OnnxOptions():
            fix = f"It was loaded with {options!r}: try it without"
        return ModelError(f"{self} cannot be loaded by ONNX Runtime {version}: {_first_line(error)}. {fix}")


def session_options(given: OnnxOptions) -> ort.SessionOptions:
    """Return ONNX Runtime's object for these options. This loads libraries that they name."""
    options = ort.SessionOptions()
    options.log_severity_level = LOG_FATAL_ONLY
    options.intra_op_num_threads = 1 if given.intra_op_num_threads is None else given.intra_op_num_threads
    options.inter_op_num_threads = 1
    if given.graph_optimization_level is not None:
        options.graph_optimization_level = LEVELS[given.graph_optimization_level]
    if given.providers:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, entry in given.session_config.items():
        options.add_session_config_entry(name, entry)
    for name, size in given.free_dimension_overrides.items():
        options.add_free_dimension_override_by_name(name, size)
    for library in given.custom_ops:
        _add_operators(options, _library(library))
    return options


def threads_of(session: ort.InferenceSession) -> int:
    """Return the number of threads that compute one batch."""
    return int(session.get_session_options().intra_op_num_threads) or cores()


def check_available(names: Sequence[str]) -> None:
    """Check that the installed ONNX Runtime has these providers."""
    there = ort.get_available_providers()
    for name in names:
        if name not in there:
            raise MissingExtraError(
                f"the installed ONNX Runtime ({ort.__version__}) has no {show(name)}; it has "
                f"{', '.join(there)}. Install the package of ONNX Runtime that brings it; for a plugin, make "
                "an InferenceSession yourself, and open that"
            )


def check_loaded(session: ort.InferenceSession, names: Sequence[str], model: str) -> None:
    """Refuse a session without a requested provider, and warn of a provider that runs no node."""
    has = session.get_providers()
    for name in names:
        if name not in has:
            raise DeviceUnavailableError(
                f"ONNX Runtime {ort.__version__} could not load {name} for {model}: most often a library "
                f"that it needs is missing, which standard error names. It would run on {', '.join(has)}"
            )
    if names == [CPU]:
        return
    with suppress(Exception):  # Older versions cannot tell.
        used = {str(part.ep_name) for part in session.get_provider_graph_assignment_info()}
        for name in names:
            if name not in used and name != CPU:
                logger.warning("%s: no node of the model runs on %s", model, name)


def check_host_providers(providers: Providers) -> None:
    """Check that the providers work on CPU memory."""
    for name, _ in providers:
        if name in (CUDA, TENSORRT):
            instead = "the same options" if name == CUDA else "runtime='tensorrt'"
            raise OptionsError(
                f"{name} runs on a GPU, where rows are copied by the engine: open the model with "
                f"device='cuda:0' and {instead}"
            )


def _library(named: str) -> str:
    """Return the path of a library, which may be named by its package."""
    if Path(named).is_file():
        return str(Path(named).resolve())
    try:
        package = import_module(named)
    except ImportError as error:
        distribution = named.replace("_", "-")
        raise MissingExtraError(
            f"custom_ops names {named!r}, which is not a file here, nor a package that can be imported "
            f"({error}): pip install {distribution}"
        ) from error
    try:
        return str(package.get_library_path())
    except Exception as error:
        raise OptionsError(
            f"custom_ops: the package {named!r} has no library for ONNX Runtime: {_first_line(error)}. Give "
            "the path of the library"
        ) from error


def _add_operators(options: ort.SessionOptions, path: str) -> None:
    try:
        options.register_custom_ops_library(path)
    except Exception as error:
        raise OptionsError(
            f"custom_ops: {path!r} has no operators for ONNX Runtime: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
