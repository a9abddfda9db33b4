"""What can be chosen about a TensorRT model: frozen and validated."""

import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal, get_args

from asynctrt.errors import OptionsError

AuxStreams = Literal["ours", "library"]
Nvtx = Literal["none", "names", "detailed"]

FLAVOURS: Final = ("tensorrt", "tensorrt_lean", "tensorrt_dispatch", "tensorrt_rtx")
"""The four packages, in the order in which they are tried for a plan that several of them can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTOptions:
    """How a plan is loaded and run.

    :raises OptionsError: for a value out of its range, or for two that contradict each other.
    """

    flavour: str | None = None
    """The package to use. Default: the first that is installed and that this kind of plan runs with."""

    allow_host_code: bool = False
    """Let a plan bring code that runs in this process (``Runtime.engine_host_code_allowed``).
    Version-compatible plans carry their own lean runtime and need it; so do plans with plugins packed in. Any
    plan is as trusted as a program, since it runs on the GPU ("How TensorRT works", Engine Deserialization
    and the Trust Boundary); with this option it runs on the host as well. Set it for plans that you built
    yourself."""

    lean_runtime: str | os.PathLike[str] | None = None
    """The shared library of the lean runtime that a version-compatible plan without one was built for
    (``Runtime.load_runtime``). It is loaded into this process, so it is to be trusted as one trusts a
    program."""

    memory_budget: int | None = None
    """Bytes of device memory that TensorRT may hold for this model at the most: weights, what contexts keep,
    and outputs whose size depends on the data. What goes beyond it is refused. Arenas are the engine's, not
    these."""

    memory_watermark: float | int | None = None
    """Refuse TensorRT memory when the device would then be used beyond this, by anybody: a fraction of its
    memory (a float up to 1.0) or bytes (an int)."""

    persistent_cache_limit: int | None = None
    """Bytes of the L2 cache that one context may keep activations in. All contexts together must not exceed
    what the GPU sets aside for that ("How TensorRT works", L2 Persistent Cache Management)."""

    weight_streaming_budget: int | None = None
    """Bytes of weights to keep on the device, for a plan that was built to stream the rest from the host."""

    aux_streams: AuxStreams = "ours"
    """Whose streams a plan that works on several at once uses beside the batch's: some of ours, made with the
    context, or TensorRT's own."""

    max_threads: int | None = None
    """Threads that TensorRT may use to load the plan."""

    verbosity: int = logging.WARNING
    """Which messages of TensorRT go to the logger ``asynctrt.tensorrt``: a level of :mod:`logging`. What
    TensorRT reports as an error of a call is in the exception, whatever this says."""

    nvtx: Nvtx | None = None
    """How much contexts tell a profiler about their layers. Not more than the plan was built with."""

    def __post_init__(self) -> None:
        if self.flavour is not None and self.flavour not in FLAVOURS:
            raise OptionsError(f"flavour is one of {', '.join(FLAVOURS)}, not {self.flavour!r}")
        for name in ("memory_budget", "max_threads"):
            self._check_int(name, least=1)
        for name in ("persistent_cache_limit", "weight_streaming_budget", "verbosity"):
            self._check_int(name, least=0)
        self._check_watermark()
        for name, allowed in (("aux_streams", AuxStreams), ("nvtx", Nvtx)):
            value = getattr(self, name)
            if value not in get_args(allowed) and not (name == "nvtx" and value is None):
                raise OptionsError(f"{name} is one of {', '.join(get_args(allowed))}, not {value!r}")
        if not isinstance(self.allow_host_code, bool):
            raise OptionsError(f"allow_host_code is True or False, not {self.allow_host_code!r}")
        if self.lean_runtime is not None and not Path(self.lean_runtime).is_file():
            raise OptionsError(
                f"lean_runtime: there is no file {str(self.lean_runtime)!r}. Give the path of the "
                "libnvinfer_lean of the version that the plan was built with"
            )

    def _check_int(self, name: str, *, least: int) -> None:
        value = getattr(self, name)
        if value is None and name != "verbosity":
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionsError(f"{name} is a whole number of at least {least}, not {value!r}")

    def _check_watermark(self) -> None:
        value = self.memory_watermark
        if value is None:
            return
        is_fraction = isinstance(value, float) and 0.0 < value <= 1.0
        is_bytes = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not (is_fraction or is_bytes):
            raise OptionsError(
                "memory_watermark is a fraction of the device's memory (a float above 0.0, up to 1.0) or "
                f"bytes (a positive int), not {value!r}"
            )

    def __repr__(self) -> str:
        changed = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        return f"TensorRTOptions({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
