"""The options of an ONNX model: ONNX Runtime's own, frozen, and checked when they are made."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from asynctrt._util.frozen import FrozenDict
from asynctrt._util.pad_options import shapes_of
from asynctrt._util.validation import (
    Check,
    as_float,
    changed_repr,
    check_names,
    choice,
    count,
    documented,
    setting,
    validate,
)
from asynctrt.errors import OptionsError, show

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"

NO_FALLBACK: Final = "session.disable_cpu_ep_fallback"
"""The session configuration entry with which no node may run on the CPU provider."""

OURS: Final = frozenset({"device_id", "enable_cuda_graph", "user_compute_stream"})
"""Options of the CUDA provider that only the engine may set: otherwise answers would be read too early, or
captured twice."""

PACKAGE: Final = re.compile(r"[A-Za-z_]\w*")
"""The name of a Python package, in place of the path of a library."""

THREADS_MAX: Final = 1024
"""The most threads for one batch: thousands of threads would only take memory."""

GraphOptimizationLevel = Literal["disable_all", "basic", "extended", "all"]


def relative_to(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return options as they were given, with relative paths taken from a folder."""

    def placed(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [placed(name, each) for each in value]
        is_path = name == "custom_ops" and isinstance(value, str) and not PACKAGE.fullmatch(value)
        return str(folder / value) if is_path else value

    return {name: placed(name, value) for name, value in given.items()}


def _entry(value: Any) -> str:
    """Return the value of a session configuration entry: these are texts, and flags are 0 and 1."""
    return str(int(value)) if isinstance(value, bool) else _setting(value)


def _setting(value: Any) -> str:
    """Return the value of a provider's option as the text that ONNX Runtime takes."""
    if isinstance(value, str | bool):
        return str(value)
    as_float(value)
    return str(value)


def _named(given: Any, convert: Any) -> FrozenDict[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise TypeError
    return FrozenDict({name: convert(value) for name, value in given.items()})


def _libraries(given: Any) -> tuple[str, ...]:
    items = (given,) if isinstance(given, str | os.PathLike) else tuple(given)
    return tuple(os.fsdecode(item) for item in items)


def _providers(given: Any) -> tuple[tuple[str, FrozenDict[str, str]], ...]:
    """Return names and options, from a list of names and pairs, a mapping, or names with commas between."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",")]
    pairs = given.items() if isinstance(given, Mapping) else given
    found: dict[str, FrozenDict[str, str]] = {}
    for pair in pairs:
        name, options = (pair, {}) if isinstance(pair, str) else pair
        if not isinstance(name, str) or not name:
            raise TypeError
        if name in found:
            raise OptionsError(f"providers names {name!r} twice. Leave one out")
        found[name] = _named(options, _setting)
    return tuple(found.items())


def _names(given: Any) -> tuple[str, ...]:
    names = {given} if isinstance(given, str) else set(given)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError
    return tuple(sorted(names))


ENTRIES: Final = Check(
    "names and values, each a text or a number, such as {'session.intra_op.allow_spinning': '0'}",
    lambda given: _named(given, _entry),
)
SIZES: Final = Check(
    "whole numbers ≥ 1 by the names of dimensions, such as {'sequence': 128}",
    lambda given: _named(given, count(1).convert),
)
LIBRARIES: Final = Check("a path, the name of a package, or a list of these", _libraries)
PROVIDERS: Final = Check(
    "names of execution providers, or pairs of a name and its options, each a text or a number, such as "
    "[('OpenVINOExecutionProvider', {'device_type': 'CPU'}), 'CPUExecutionProvider']",
    _providers,
)
AXES: Final = Check(
    "axes from 0 on by the names of inputs and outputs, such as {'state': 1}",
    lambda given: _named(given, count(0).convert),
)
NAMES: Final = Check("names of inputs, such as {'sr'}", _names)
SHAPES: Final = Check(
    "the dimensions of a row by the names of inputs, such as {'images': (3, 640, 640)}, or a list of such",
    shapes_of,
)


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxOptions:
    """How an ONNX model is understood, and how ONNX Runtime loads and runs it.

    :raises OptionsError: for a value out of its range, or for one that only the engine may set.
    """

    batch_axis: Mapping[str, int] = setting(
        default=FrozenDict(),
        check=AXES,
        doc="""The axis that counts rows, by the names of inputs and outputs, where that is not the first:
        ``{"state": 1, "stateN": 1}``. Default: the axis whose name is that of a batch, if every tensor has
        one (``batch``, ``batch_size``, ``N``).""",
    )

    shared: Iterable[str] = setting(
        default=(),
        check=NAMES,
        doc="""Inputs that all rows of a batch have in common, such as ``{"sr"}``. Requests share a batch if
        these are equal. Scalars, and inputs of the shape ``[1]``, need not be named.""",
    )

    shapes: tuple[Mapping[str, Sequence[int]], ...] = setting(
        default=(),
        check=SHAPES,
        doc="""Shapes of rows that will come often, such as ``{"images": (3, 640, 640)}``, or a list of such,
        on a GPU, for a model whose dimensions vary. Each gets sessions for its sizes, captured as CUDA graphs
        where possible, before the engine opens. Other shapes get theirs while the engine serves, once they
        have come often.""",
    )

    providers: tuple[tuple[str, Mapping[str, str]], ...] = setting(
        default=(),
        check=PROVIDERS,
        doc="""Execution providers, in order of preference: names, pairs of a name and its options, or a
        mapping of names to options. On the host device: any that takes and returns CPU memory. On a GPU:
        ``CUDAExecutionProvider``, which is always used, and ``CPUExecutionProvider``. The engine itself sets
        ``device_id``, ``user_compute_stream`` and graphs. A provider that is missing, or does not load, is an
        error. Default: ``CPUExecutionProvider`` and, on a GPU, ``CUDAExecutionProvider`` before it.""",
    )

    custom_ops: tuple[str, ...] = setting(
        default=(),
        check=LIBRARIES,
        doc="""Libraries of operators (``register_custom_ops_library``): paths, or the names of packages that
        have ``get_library_path()``, such as ``onnxruntime_extensions``. They are loaded into this process:
        name only libraries that you trust as you trust a program.""",
    )

    intra_op_num_threads: int | None = setting(
        default=None,
        check=count(0, THREADS_MAX).or_none,
        doc="""Threads that compute one batch; 0: as many as there are cores. Default: 1, since the host
        device computes as many batches at once as there are cores, which gives the most rows per second. For
        a few callers, 2 on ``HostDevice(threads=1)`` answers sooner but uses more CPU: the threads spin while
        they wait.""",
    )

    graph_optimization_level: GraphOptimizationLevel | None = setting(
        default=None,
        check=choice(*get_args(GraphOptimizationLevel)).or_none,
        doc="""How far the model is optimised when it is loaded: ``disable_all``, ``basic``, ``extended`` or
        ``all``. Default: ONNX Runtime's own, ``all``.""",
    )

    free_dimension_overrides: Mapping[str, int] = setting(
        default=FrozenDict(),
        check=SIZES,
        doc="""Sizes of dimensions that the model leaves open, by their names
        (``add_free_dimension_override_by_name``): rows then have these sizes.""",
    )

    session_config: Mapping[str, str] = setting(
        default=FrozenDict(),
        check=ENTRIES,
        doc="""Session configuration entries (``add_session_config_entry``), such as
        ``{"session.intra_op.allow_spinning": "0"}``. With ``{"session.disable_cpu_ep_fallback": "1"}`` a
        model that needs operators on the CPU is refused.""",
    )

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        validate(self)
        if not OURS.isdisjoint(self.of_provider(CUDA)):
            raise OptionsError(
                f"providers: {', '.join(sorted(OURS))} of {CUDA} are the engine's to give, as it waits for "
                "batches on its own stream, and captures them. Choose the GPU with device, and what is "
                "captured with graphs"
            )
        for library in self.custom_ops:
            if not PACKAGE.fullmatch(library) and not Path(library).is_file():
                raise OptionsError(
                    f"custom_ops: there is no file {library!r}. Give the path of each library, or the name "
                    "of a package that has get_library_path()"
                )
        _ = self.gpu_mem_limit

    @classmethod
    def of(cls, given: "OnnxOptions | Mapping[str, Any] | None") -> "OnnxOptions":
        """Return options that were given as such, as a mapping of their names, or not at all.

        :raises OptionsError: for anything else; for an unknown name, with the nearest; for a wrong value.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, Mapping):
            raise OptionsError(f"options must be an asynctrt.OnnxOptions, or a mapping, not {show(given)}")
        check_names(given, [item.name for item in fields(cls)], "option of ONNX Runtime")
        return cls(**given)

    def says_more_than(self, names: Sequence[str]) -> bool:
        """Return whether any option besides these differs from its default."""
        others = (item for item in fields(self) if item.name not in names)
        return any(getattr(self, item.name) != item.default for item in others)

    def of_provider(self, name: str) -> dict[str, str]:
        """Return the options of a provider; none if it is not named."""
        return dict(dict(self.providers).get(name, {}))

    @property
    def gpu_mem_limit(self) -> int | None:
        """The most bytes that a session may hold on the GPU, if the CUDA provider's options say so.

        :raises OptionsError: if they say something else.
        """
        given = self.of_provider(CUDA).get("gpu_mem_limit")
        if given is None:
            return None
        if not given.isdecimal() or not int(given):
            raise OptionsError(f"gpu_mem_limit of {CUDA} must be a whole number ≥ 1, not {show(given)}")
        return int(given)

    @property
    def allows_cpu(self) -> bool:
        """Whether nodes that no other provider has may run on the CPU provider."""
        return self.session_config.get(NO_FALLBACK) != "1"
