"""The options with which a plan is built: frozen, and checked when they are made."""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

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
    setting,
    validate,
)
from asynctrt.errors import OptionsError

BUILDERS: Final = ("tensorrt", "tensorrt_rtx")
"""The packages that can build plans, in the order in which they are tried."""

POOL_NBYTES: Final = 1 << 30
"""The limit of each of the builder's pools of device memory, unless the options set it."""

SIZES: Final = re.compile(r"\d+(?::\d+:\d+)?")
CAPABILITY: Final = re.compile(r"\d{1,2}\.\d")

Precision = Literal["fp16", "bf16", "int8", "fp8", "int4", "fp4"]
Refit = Literal["all", "identical", "individual"]
HardwareCompatibility = Literal["none", "ampere-plus", "same-compute-capability"]
Profiling = Literal["names", "detailed", "none"]


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError
    return texts


def _dims(value: Any) -> tuple[tuple[str, tuple[int, int, int]], ...]:
    """Return the sizes of named dimensions, from a mapping or from texts ``NAME=SIZES``."""
    if isinstance(value, Mapping):
        pairs = [(name, str(sizes)) for name, sizes in value.items()]
    else:
        pairs = []
        for item in (value,) if isinstance(value, str) else tuple(value):
            if isinstance(item, str):
                name, _, sizes = item.rpartition("=")
            else:  # As it was converted before.
                name, sizes = item[0], ":".join(map(str, item[1]))
            pairs.append((name, sizes))
    found = []
    for name, sizes in pairs:
        if not isinstance(name, str) or not name or not SIZES.fullmatch(sizes):
            raise ValueError
        numbers = [int(number) for number in sizes.split(":")]
        low, best, high = numbers if len(numbers) > 1 else numbers * 3
        if not 1 <= low <= best <= high:
            raise ValueError
        found.append((name, (low, best, high)))
    return tuple(found)


def _words(kind: Any) -> Check:
    names = get_args(kind)

    def convert(value: Any) -> tuple[str, ...]:
        words = (value,) if isinstance(value, str) else tuple(value)
        if not set(words) <= set(names):
            raise ValueError
        return tuple(word for word in names if word in words)

    return Check(f"one or several of {', '.join(map(repr, names))}", convert)


def _capabilities(value: Any) -> tuple[str, ...]:
    texts = _texts(value)
    if not all(CAPABILITY.fullmatch(text) for text in texts):
        raise ValueError
    return tuple(dict.fromkeys(texts))


PROFILES: Final = Check("a text such as 'input=1x3x224x224:16x3x224x224:64x3x224x224', or several", _texts)
DIMS: Final = Check(
    "NAME=SIZE or NAME=MIN:OPT:MAX with 1 ≤ MIN ≤ OPT ≤ MAX, a mapping such as {'length': '1:128:512'}, or "
    "several",
    _dims,
)
CAPABILITIES: Final = Check("compute capabilities such as '8.9', or several", _capabilities)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """How a plan is built.

    :raises OptionsError: for a value out of its range, or for two that contradict each other.
    """

    flavour: str | None = setting(
        default=None,
        check=choice(*BUILDERS).or_none,
        doc="""The package to build with, ``tensorrt`` or ``tensorrt_rtx``. Each runs only its own plans.
        Default: the first that is installed.""",
    )
    profiles: tuple[str, ...] = setting(
        default=(),
        check=PROFILES,
        doc="""Optimisation profiles, each a text with the smallest, the best and the largest shape of every
        dynamic input: ``input=1x3x224x224:16x3x224x224:64x3x224x224``, inputs divided by commas. Default: one
        profile, proposed from ``max_rows`` and ``dims``.""",
    )
    max_rows: int = setting(
        default=64,
        check=count(1),
        doc="""Rows of the largest batch, for the profile that is proposed. The plan takes up to this
        many rows, and is tuned for full batches.""",
    )
    dims: tuple[tuple[str, tuple[int, int, int]], ...] = setting(
        default=(),
        check=DIMS,
        doc="""Sizes of dynamic dimensions, for the profile that is proposed: ``length=1:128:512`` (smallest,
        best, largest) or ``length=128``. A dimension without a name is ``INPUT.AXIS``, such as ``tokens.1``.
        """,
    )
    precision: tuple[str, ...] = setting(
        default=(),
        check=_words(Precision),
        doc="""Types that layers may compute in besides the model's own: ``fp16``, ``bf16``, ``int8``,
        ``fp8``, ``int4``, ``fp4``. Only with TensorRT 10: later versions and TensorRT for RTX take the
        types of the model as they are.""",
    )
    tf32: bool = setting(
        default=True, check=FLAG, doc="Whether products of float32 may be computed in TF32, with 10 bits."
    )
    strongly_typed: bool = setting(
        default=False,
        check=FLAG,
        doc="Take the types of the model as they are (TensorRT 10; later versions always do).",
    )
    workspace: int = setting(
        default=POOL_NBYTES,
        check=count(1),
        doc="""Bytes of device memory that a layer may work in (``MemoryPoolType.WORKSPACE``). A context needs
        as much as the layer that uses most.""",
    )
    tactic_memory: int = setting(
        default=POOL_NBYTES,
        check=count(1 << 20),
        doc="""Bytes of device memory that the builder may take to try one kernel
        (``MemoryPoolType.TACTIC_DRAM``).""",
    )
    optimization_level: int | None = setting(
        default=None,
        check=count(0, 5).or_none,
        doc="How long the builder searches: from 0, the least, to 5. Default: TensorRT's own, 3.",
    )
    timing_cache: str | os.PathLike[str] | None = setting(
        default=None,
        check=PATH.or_none,
        doc="""The file in which ``tensorrt`` keeps how long each kernel took, so that the next build need not
        try them again. It is read if it exists, and replaced after a build. Not for TensorRT for RTX.""",
    )
    version_compatible: bool = setting(
        default=False,
        check=FLAG,
        doc="""Build a plan that later versions can run too. The plan contains the lean runtime, whose code
        then runs in the process: open such plans with ``allow_host_code``.""",
    )
    exclude_lean_runtime: bool = setting(
        default=False,
        check=FLAG,
        doc="""Leave the lean runtime out of a version-compatible plan. Open such a plan with
        ``lean_runtime``, which names the runtime.""",
    )
    hardware_compatibility: HardwareCompatibility = setting(
        default="none",
        check=choice(*get_args(HardwareCompatibility)),
        doc="""Which GPUs besides the one that it is built on run the plan: ``none``, ``ampere-plus`` (all
        from 8.0 on) or ``same-compute-capability``. Only for ``tensorrt``.""",
    )
    compute_capabilities: tuple[str, ...] = setting(
        default=(),
        check=CAPABILITIES,
        doc="""GPUs to build for, by their compute capability, such as ``8.9``. Only for ``tensorrt_rtx``.
        Default: all that it supports.""",
    )
    refit: Refit | None = setting(
        default=None,
        check=choice(*get_args(Refit)).or_none,
        doc="""Let weights be replaced later: ``all``; ``identical``, by the same values, as stripped plans
        need; ``individual``, the weights that the network marks.""",
    )
    strip: bool = setting(
        default=False,
        check=FLAG,
        doc="""Leave the weights out of the plan, which is then opened with ``refit_from`` and the model.""",
    )
    plugins: tuple[str, ...] = setting(
        default=(),
        check=PATHS,
        doc="""Shared libraries with plugins that the model uses. They are loaded into this process, and stay:
        name only libraries that you trust as you trust a program.""",
    )
    profiling: Profiling = setting(
        default="names",
        check=choice(*get_args(Profiling)),
        doc="What the plan can tell about its layers: their ``names``, ``detailed`` facts, or ``none``.",
    )
    verbosity: int = setting(
        default=logging.WARNING,
        check=count(0),
        doc="Which messages of TensorRT go to the logger ``asynctrt.tensorrt``: a level of :mod:`logging`.",
    )

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        validate(self)
        for path in self.plugins:
            check_file("plugins", path, "each shared library")
        if self.exclude_lean_runtime and not self.version_compatible:
            raise OptionsError(
                "exclude_lean_runtime says nothing without version_compatible. Set both, or leave "
                "exclude_lean_runtime out"
            )
        if self.profiles and self.dims:
            raise OptionsError(
                "profiles give the sizes of all dimensions, and dims are for the profile that is proposed "
                "without them. Leave one of the two out"
            )
        check_target("timing_cache", self.timing_cache)

    @classmethod
    def from_settings(cls, base: "BuildOptions | None", settings: Mapping[str, Any]) -> "BuildOptions":
        """Return ``base``, or the defaults, with some options changed.

        :raises OptionsError: for an unknown name, with the nearest option; for a value that is not valid.
        """
        check_names(settings, [item.name for item in fields(cls)], "option of a build")
        return dataclasses.replace(base or cls(), **settings)

    def as_json(self) -> dict[str, Any]:
        """Return all options as plain values, in the order in which they are defined."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        plain["timing_cache"] = None if self.timing_cache is None else os.fspath(self.timing_cache)
        plain["dims"] = {name: ":".join(map(str, sizes)) for name, sizes in self.dims}
        return plain
