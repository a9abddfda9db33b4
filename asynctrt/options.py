"""The options of an engine: frozen, and checked as a whole when they are made."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypedDict, get_args

from asynctrt._util.pad_options import OFF, sizes_of, values_of
from asynctrt._util.synonyms import SYNONYMS
from asynctrt._util.validation import (
    FLAG,
    Check,
    changed_repr,
    check_names,
    choice,
    count,
    documented,
    duration,
    number,
    setting,
    sizes_in,
    validate,
)
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.errors import OptionsError, show

MAX_ROWS_DEFAULT: Final = 64

CONTEXTS_MAX: Final = 4096
PRIORITIES_MAX: Final = 256
"""Far more than are useful. Each takes memory at once, and a model's folder may ask for any number."""

BATCH_NBYTES_MAX: Final = 256 << 20
"""Bytes of inputs and outputs that one batch of rows of any size holds at most, unless a single row has more.
Each context keeps memory for its largest batch so far. 64 images for a detector, of 1.2 MB each, fit."""

Isolation = Literal["none", "process", "spare"]
"""Where an engine runs."""


TimeoutUntil = Literal["launch", "answer"]
"""The event that must happen before a timeout passes."""


Runtime = Literal["onnxruntime", "tensorrt"]
"""The runtimes that can run a model."""


BatchingChoice = Literal["auto", "on", "off", "probe", "deterministic"]
"""Whether rows of different requests share batches."""


class Settings(TypedDict, total=False):
    """The keywords of :func:`asynctrt.open` besides model and device: see :class:`Options`."""

    batching: BatchingChoice
    ignore_extra: bool
    max_rows: int | None
    max_delay: float
    max_queue_rows: int
    timeout: float | None
    timeout_until: TimeoutUntil
    priorities: int
    weight: float | None
    contexts: int | None
    arenas: int | None
    lanes: int | None
    graphs: str | Sequence[int]
    pad: Mapping[str, int | Sequence[int]] | str | None
    pad_with: Mapping[str, int | float | str] | None
    runtime: Runtime | None
    tensorrt: TensorRTOptions | Mapping[str, Any] | None
    onnx: OnnxOptions | Mapping[str, Any] | None
    batch_timeout: float | None
    close_timeout: float
    isolation: Isolation
    idempotent: bool


def _graph_sizes(given: Any) -> str | tuple[int, ...]:
    """Return the batch sizes to capture in rising order; return ``auto`` and ``off`` unchanged."""
    if isinstance(given, str) and given in ("auto", "off"):
        return given
    return tuple(sorted(set(sizes_in(given))))


def _tensorrt_options(given: Any) -> TensorRTOptions:
    return given if isinstance(given, TensorRTOptions) else TensorRTOptions.from_settings(_settings(given))


def _onnx_options(given: Any) -> OnnxOptions:
    return OnnxOptions.of(given if isinstance(given, OnnxOptions) else _settings(given))


def _settings(given: Any) -> dict[str, Any]:
    """Return values by name, from a mapping or a list of ``NAME=VALUE``."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, list | tuple) and all(isinstance(text, str) and "=" in text for text in given):
        named = (text.partition("=") for text in given)
        return {name.strip(): _value_of(text) for name, _, text in named}
    raise ValueError


def _value_of(text: str) -> Any:
    """Return a value from TOML syntax; return any other text as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()


WEIGHT: Final = number(0.001, 1000.0)
TENSORRT: Final = Check(
    "an asynctrt.TensorRTOptions, a mapping such as {'allow_host_code': True}, or a list of 'NAME=VALUE'",
    _tensorrt_options,
)
ONNX: Final = Check(
    "an asynctrt.OnnxOptions, a mapping such as {'intra_op_num_threads': 2}, or a list of 'NAME=VALUE'",
    _onnx_options,
)
PAD: Final = Check(
    "sizes ≥ 1 by the names of dimensions, such as {'sequence': (32, 64, 128)}, or a list of "
    "'NAME=32,64,128'; or 'off'",
    sizes_of,
)
PAD_WITH: Final = Check(
    "numbers, 'mask' or 'length' by the names of inputs, such as {'attention_mask': 'mask'}, or a list of "
    "'NAME=VALUE'",
    values_of,
)
GRAPHS: Final = Check("'auto', 'off' or batch sizes ≥ 1, such as (1, 8, 64) or '1,8,64'", _graph_sizes)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one engine. Times are in seconds.

    :raises OptionsError: for a value that is not valid, or two that contradict each other.
    """

    batching: BatchingChoice = setting(
        default="auto",
        check=choice(*get_args(BatchingChoice)),
        doc="""Whether rows of different requests share batches. ``auto``: if they can. A few made-up rows are
        run when the engine is opened, alone and together; where answers differ, and where the model's shapes
        forbid it, each request runs alone, and a warning says why. ``on``: they do; what the made-up rows
        showed is logged, and shapes that forbid it are an error. ``off``: each request runs alone, with
        arrays of whatever shape the model takes. ``probe``: as ``auto``, also for your own functions and
        models, which are otherwise trusted, because calling them may have effects. ``deterministic``: as
        ``auto``, but an answer depends on nothing but its request's own rows, to the last bit. Each request
        then runs alone, padded with copies of its rows to ``max_rows``, on one context, which costs
        throughput. Random layers stay random (TensorRT: ``IFillLayer``, and ``IScatterLayer`` with repeated
        indices), and a plan that is built again may give other answers.""",
    )
    ignore_extra: bool = setting(
        default=False,
        check=FLAG,
        doc="Drop inputs that the model does not have, as tokenizers return them, instead of refusing them.",
    )
    max_rows: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="The largest number of rows in a batch. Default: 64, or the model's own limit if that is lower.",
    )
    max_delay: float = setting(
        default=0.0,
        check=duration(0, 1, fix="For milliseconds, divide by 1000, or write '2ms'"),
        doc="""How long a batch that is not full may wait for more requests while another batch is in flight.
        With nothing in flight a batch never waits.""",
    )
    max_queue_rows: int = setting(
        default=16384,
        check=count(1),
        doc="""Rows that may be queued. A request that would exceed it takes the place of less urgent ones,
        the newest first. A request that gets no place, or loses its place, fails with ``QueueFullError``.""",
    )
    timeout: float | None = setting(
        default=None,
        check=duration().or_none,
        doc="How long a request without its own timeout may be queued. Default: no limit.",
    )
    timeout_until: TimeoutUntil = setting(
        default="launch",
        check=choice(*get_args(TimeoutUntil)),
        doc="""What has to happen before a timeout passes. ``launch``: the request leaves the queue.
        ``answer``: it is answered, judging by how long earlier batches took; a request that can no longer
        make it is not computed. Either way a request that would be too late is refused on arrival, with
        ``DeadlineUnreachableError``.""",
    )
    priorities: int = setting(
        default=3,
        check=count(1, PRIORITIES_MAX),
        doc="""Priority levels. A request's ``priority`` goes from 0, the default, to ``priorities - 1``, the
        most urgent. A more urgent request is launched first, and of equals the one with the earliest
        deadline; but one batch in 8 starts with what has waited longest, if that is over a second.""",
    )
    weight: float | None = setting(
        default=None,
        check=WEIGHT.or_none,
        doc="""The engine's share of the device's time while other engines have work too, in proportion to
        their weights: three quarters with 3 beside an engine with 1. Time that one does not use goes to the
        others. It applies among engines that have a weight, on one event loop and one device. Default: the
        device decides.""",
    )
    contexts: int | None = setting(
        default=None,
        check=count(1, CONTEXTS_MAX).or_none,
        doc="""Execution contexts, each with a stream and a slab. Default: what the device advises (host: two
        for each core of the process, up to 32). On a GPU use at least two: with one, nothing is copied while
        a batch computes. Two in one arena need no more enqueue memory.""",
    )
    arenas: int | None = setting(
        default=None,
        check=count(1, CONTEXTS_MAX).or_none,
        doc="""Blocks of enqueue memory that the contexts share. Default: one per context. A model that brings
        its own working memory, as ONNX Runtime does, needs none and gets none.""",
    )
    lanes: int | None = setting(
        default=None,
        check=count(1, CONTEXTS_MAX).or_none,
        doc="""How many batches compute side by side on a GPU, while others are copied in. Default: as many as
        pay off, which is measured when the engine opens.""",
    )
    graphs: str | Sequence[int] = setting(
        default="auto",
        check=GRAPHS,
        doc="""Batch sizes to capture as CUDA graphs, as ``(1, 8, 64)`` or ``"1,8,64"``; a batch is padded to
        the next one where that pays. ``auto``: on a GPU, 1, 2, 3, 4, 6, 8, 12, 16, ... and ``max_rows``; 1,
        2, 4, 8, 16, 24, 32, 48, ... and ``max_rows`` for each shape that ``pad`` names.
        If they would take more than half of the free memory, every second size is left out. ``off``: none.
        Each size of each context takes a separate execution context, and its memory.""",
    )
    pad: Mapping[str, int | Sequence[int]] | str | None = setting(
        default=None,
        check=PAD.or_none,
        doc="""Sizes that dimensions are padded to, by their names in the model, such as
        ``{"sequence": (32, 64, 128)}``, so that rows of different lengths share batches; outputs are cut back
        where they have the dimension. On the command line ``NAME=32,64,128``, once for each. Default: powers
        of two (on the host also seven sizes between any two), for every dimension whose padding with 0
        changed no answer when the engine was opened. ``off``: no padding.""",
    )
    pad_with: Mapping[str, int | float | str] | None = setting(
        default=None,
        check=PAD_WITH.or_none,
        doc="""What inputs are padded with, by their names, if not 0: a number. ``mask``: 0, and callers may
        leave the input out, which then has 1 for what is not padding. ``length``: callers may leave it out,
        and it has the size of the dimension (``length:NAME`` if several are padded).""",
    )
    runtime: Runtime | None = setting(
        default=None,
        check=choice(*get_args(Runtime)).or_none,
        doc="""What runs the model: ``onnxruntime`` or ``tensorrt``. Default: ONNX Runtime for ``.onnx``
        files, on a GPU with its CUDA provider, and TensorRT for plans. With ``tensorrt`` a plan is built
        from an ``.onnx`` file, and kept in the plan cache.""",
    )
    tensorrt: TensorRTOptions | Mapping[str, Any] | None = setting(
        default=None,
        check=TENSORRT.or_none,
        doc="""How a TensorRT plan is built, loaded and run: ``TensorRTOptions``, or a mapping of its names,
        such as ``{"memory_budget": 2 << 30}``; on the command line ``NAME=VALUE``, once for each.""",
    )
    onnx: OnnxOptions | Mapping[str, Any] | None = setting(
        default=None,
        check=ONNX.or_none,
        doc="""Which axes of an ONNX model count rows, and how ONNX Runtime loads and runs it:
        ``OnnxOptions``, or a mapping of its names, such as ``{"providers": "OpenVINOExecutionProvider"}``; on
        the command line ``NAME=VALUE``, once for each.""",
    )
    batch_timeout: float | None = setting(
        default=60.0,
        check=duration().or_none,
        doc="""How long a batch may take on the device before it counts as hung: its callers fail with
        ``DeviceLostError`` and its context is not used again. ``None``, or ``inf`` as a flag: no limit.""",
    )
    close_timeout: float = setting(
        default=30.0,
        check=duration(),
        doc="How long closing waits for batches in flight before it gives them up.",
    )
    isolation: Isolation = setting(
        default="none",
        check=choice(*get_args(Isolation)),
        doc="""Where the engine runs: ``none``, in this process; ``process``, in a worker process, which is
        replaced when it dies of a fault of the model, the driver or the GPU; ``spare``, as ``process``, and
        a second worker has the model loaded too, and takes over at once, for twice the memory. Rows travel in
        shared memory. The model is given by its path, or as ``module:attribute``. Linux only.""",
    )
    idempotent: bool = setting(
        default=True,
        check=FLAG,
        doc="""Whether the model may compute the same rows twice. A batch that failed is then run again in
        halves, down to single requests, so that only the requests whose rows make the model fail do fail; and
        requests in a batch whose worker process died are computed again, unless they end their workers again
        and again (``PoisonError``). Off, for models with effects: all requests of such a batch fail.""",
    )

    __repr__ = changed_repr

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Make an instance; refuse unknown options, and the ones that only earlier releases had."""
        check_names(settings, [item.name for item in dataclasses.fields(cls)], "option", synonyms=SYNONYMS)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        validate(self)
        self._check_model()
        if self.max_rows is not None and self.max_rows > self.max_queue_rows:
            raise OptionsError(
                f"max_queue_rows ({self.max_queue_rows}) must be ≥ max_rows ({self.max_rows}), or no batch "
                "could ever fill"
            )
        if self.weight is not None and self.isolation != "none":
            raise OptionsError(
                "weight divides a device among engines of one process, and with "
                f"isolation={self.isolation!r} this one runs in another process. Leave one of them out"
            )
        if self.pad_with is not None and self.pad in (None, OFF):
            raise OptionsError(
                "pad_with says what to pad with, but pad is missing. Give the sizes too, such as "
                "pad={'sequence': (32, 64, 128)}"
            )
        self._check_deterministic()
        for name in ("arenas", "lanes"):
            value = getattr(self, name)
            if value is not None and self.contexts is not None and value > self.contexts:
                raise OptionsError(
                    f"{name} ({value}) must be ≤ contexts ({self.contexts}), since each batch needs a context"
                )

    def _check_model(self) -> None:
        """Check the options that describe the model."""
        onnx = self.onnx
        if self.batching == "off" and isinstance(onnx, OnnxOptions) and (onnx.batch_axis or onnx.shared):
            raise OptionsError(
                "batch_axis and shared say how requests share batches, and with batching='off' each runs "
                "alone. Leave them out"
            )
        if onnx is not None and self.runtime == "tensorrt":
            raise OptionsError(
                "onnx says how ONNX Runtime loads a model, and runtime is 'tensorrt'. Leave one of them out; "
                "options of a plan and of its build are in tensorrt"
            )

    @property
    def is_deterministic(self) -> bool:
        """Whether an answer depends on nothing but its request's own rows, to the last bit."""
        return self.batching == "deterministic"

    @property
    def filled(self) -> frozenset[str]:
        """The inputs that callers may leave out because the engine fills them: masks and lengths."""
        given = self.pad_with or {}
        return frozenset(name for name, value in given.items() if isinstance(value, str))

    def _check_deterministic(self) -> None:
        if not self.is_deterministic:
            return
        for name in ("contexts", "arenas", "lanes"):
            if getattr(self, name) not in (None, 1):
                raise OptionsError(
                    f"batching='deterministic' runs one batch at a time, and {name} is "
                    f"{getattr(self, name)}. Leave it out, or open several engines"
                )
        if self.graphs not in ("auto", "off"):
            raise OptionsError(
                f"batching='deterministic' pads every batch to max_rows, so graphs must be 'auto' or "
                f"'off', not {show(self.graphs)}"
            )

    @classmethod
    def from_settings(cls, base: "Options | None", settings: dict[str, Any]) -> "Options":
        """Return ``base``, or the defaults, with some options changed.

        :raises OptionsError: if a name is unknown (the message suggests the nearest option), or a value is
            not valid.
        """
        if base is not None and not isinstance(base, cls):
            raise OptionsError(f"options must be an asynctrt.Options, not a {type(base).__name__}")
        return dataclasses.replace(base or cls(), **settings)
