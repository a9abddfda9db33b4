"""The options of a TensorRT model: frozen, and checked when they are made."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from asynctrt._util.validation import (
    FLAG,
    PATH,
    PATHS,
    Check,
    changed_repr,
    check_file,
    check_names,
    check_target,
    choice,
    count,
    documented,
    setting,
    validate,
)
from asynctrt.backends.build_options import BuildOptions

FLAVOURS: Final = ("tensorrt", "tensorrt_lean", "tensorrt_dispatch", "tensorrt_rtx")
"""The four TensorRT packages, in the order in which they are tried for a plan that several can run."""

TRUSTED: Final = re.compile(r"signed|built-here|sha256:[0-9a-fA-F]{64}")
"""The notation of the ways to trust a plan."""


def _ways(value: Any) -> tuple[str, ...]:
    ways = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(way, str) and TRUSTED.fullmatch(way) for way in ways):
        raise ValueError
    return tuple(way.lower() for way in ways)


TRUST: Final = Check("'signed', 'built-here', 'sha256:' and 64 hexadecimal digits, or a list of these", _ways)


def _build(value: Any) -> BuildOptions:
    return value if isinstance(value, BuildOptions) else BuildOptions.from_settings(None, dict(value))


BUILD: Final = Check(
    "an asynctrt.BuildOptions, or a mapping such as {'dims': {'length': '1:128:512'}}", _build
)


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTOptions:
    """How a plan is loaded and run.

    :raises OptionsError: for a value out of its range, or for two that contradict each other.
    """

    flavour: str | None = setting(
        default=None,
        check=choice(*FLAVOURS).or_none,
        doc="The package to use. Default: the first that is installed and that this kind of plan runs with.",
    )

    allow_host_code: bool = setting(
        default=False,
        check=FLAG,
        doc="""Let a plan bring code that runs in this process (``Runtime.engine_host_code_allowed``).
        Version-compatible plans carry their own lean runtime and need it; so do plans with plugins packed in.
        Any plan is as trusted as a program, since it runs on the GPU ("How TensorRT works", Engine
        Deserialization and the Trust Boundary); with this option it runs on the host as well. Set it for
        plans that you built yourself.""",
    )

    trust: tuple[str, ...] = setting(
        default=(),
        check=TRUST,
        doc="""Open the plan only if it is trusted, in one of these ways: ``signed``, by an OpenSSH key that
        this user allows (``PLAN.sig``, checked by ``ssh-keygen -Y verify``); ``built-here``, by this user on
        this machine (``asynctrt build``); ``sha256:...``, its digest in hexadecimal. Checked on the bytes
        that are deserialised. Empty: every plan is opened, as code that you trust. It does not cover what
        other options name: ``lean_runtime``, ``plugins``, ``refit_from``, ``runtime_cache``.""",
    )

    lean_runtime: str | os.PathLike[str] | None = setting(
        default=None,
        check=PATH.or_none,
        doc="""The shared library of the lean runtime that a version-compatible plan without one was built for
        (``Runtime.load_runtime``). It is loaded into this process: name only a library that you trust as you
        trust a program.""",
    )

    refit_from: str | os.PathLike[str] | None = setting(
        default=None,
        check=PATH.or_none,
        doc="""The ONNX file to take all weights from, for a plan that was built without them
        (``BuilderFlag.STRIP_PLAN``) or to be refitted. With the packages that have an ONNX parser:
        ``tensorrt`` and ``tensorrt_rtx``. Weights are found by their names: give the file that the plan was
        built from, or one that was trained further.""",
    )

    memory_budget: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="""Bytes of device memory that TensorRT may hold at most for this model: weights, what contexts
        keep, and outputs whose size depends on the data. Allocations beyond it are refused. Arenas do not
        count.""",
    )

    build: BuildOptions | Mapping[str, Any] | None = setting(
        default=None,
        check=BUILD.or_none,
        doc="""How a plan is built from an ``.onnx`` file with ``runtime="tensorrt"``: ``BuildOptions``, or a
        mapping of its names, such as ``{"dims": {"length": "1:128:512"}}``.""",
    )

    plugins: tuple[str, ...] = setting(
        default=(),
        check=PATHS,
        doc="""Shared libraries with plugins that the plan uses (``IPluginRegistry.load_library``). They are
        loaded into this process, once, and stay: name only libraries that you trust as you trust a program.
        TensorRT's own plugins are registered in any case, if the package has them.""",
    )

    verbosity: int = setting(
        default=logging.WARNING,
        check=count(0),
        doc="""Which messages of TensorRT go to the logger ``asynctrt.tensorrt``: a level of :mod:`logging`.
        Errors that TensorRT reports for a call are in the exception in any case.""",
    )

    runtime_cache: str | os.PathLike[str] | None = setting(
        default=None,
        check=PATH.or_none,
        doc="""The file in which TensorRT for RTX keeps the kernels that it compiles when a plan is used
        (``IRuntimeCache``), so that the next process need not compile them. It is read when the plan is
        loaded, and replaced when the model is closed, if there are new kernels; of several processes that
        share it, the last to close wins. If the file cannot be used, a warning says so. The kernels run
        on the GPU: trust the file, and everyone who can write it, as you trust the plan.""",
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.lean_runtime is not None:
            what = "the libnvinfer_lean of the version that the plan was built with"
            check_file("lean_runtime", self.lean_runtime, what)
        if self.refit_from is not None:
            check_file("refit_from", self.refit_from, "the ONNX file that the plan was built from")
        check_target("runtime_cache", self.runtime_cache)
        for path in self.plugins:
            check_file("plugins", path, "each shared library")

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "TensorRTOptions":
        """Return the defaults with some options changed.

        :raises OptionsError: for an unknown name, with the nearest option; for a value that is not valid.
        """
        check_names(settings, [item.name for item in fields(cls)], "option of TensorRT")
        return cls(**settings)

    __repr__ = changed_repr
