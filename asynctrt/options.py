"""What an engine can be told. Frozen, and checked as a whole when it is made."""

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict

from asynctrt.errors import OptionsError

MAX_ROWS_DEFAULT: Final = 64

ELSEWHERE: Final = {
    "batch_size": "max_rows",
    "max_batch_size": "max_rows",
    "batch_wait_timeout_s": "max_delay",
    "max_latency_ms": "max_delay",
    "max_queue_delay": "max_delay",
    "max_queue_delay_microseconds": "max_delay",
    "max_wait_time": "max_delay",
    "max_queue_size": "max_queue_rows",
    "default_timeout_microseconds": "timeout",
    "priority_levels": "priorities",
    "num_instances": "contexts",
    "workers": "contexts",
}
"""What other servers call what is an option here, for the message to someone who comes from one."""


WAITING: Final = ("adaptive", "spin", "thread")
FLAVOURS: Final = ("tensorrt", "tensorrt_lean", "tensorrt_dispatch", "tensorrt_rtx")


class Settings(TypedDict, total=False):
    """The keywords that :func:`asynctrt.open` takes besides model and device; see :class:`Options`."""

    max_rows: int | None
    max_delay: float
    max_queue_rows: int
    max_in_flight: int | None
    timeout: float | None
    priorities: int
    contexts: int | None
    arenas: int | None
    graphs: str | Sequence[int]
    flavour: str | None
    waiting: Literal["adaptive", "spin", "thread"]
    check_finite: bool
    batch_timeout: float | None
    close_timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one engine. Times are in seconds, as everywhere in asyncio.

    :raises OptionsError: for a value that is impossible, or at odds with another.
    """

    max_rows: int | None = None
    """Rows that one batch holds at the most. Default: 64, or the model's own limit if that is lower."""

    max_delay: float = 0.0
    """How long a batch that is not full may wait for company while another is in flight. With nothing in
    flight a batch never waits."""

    max_queue_rows: int = 16384
    """Rows that may be queued; a request beyond it is refused with ``QueueFullError``."""

    max_in_flight: int | None = None
    """Batches that may be in flight at once. Default: one a context."""

    timeout: float | None = None
    """The timeout of requests that bring none: how long one may be queued. Default: no limit."""

    priorities: int = 3
    """Priority levels: a request's ``priority`` is 0, the default, up to ``priorities - 1``, the most
    urgent. A more urgent request is always launched first."""

    contexts: int | None = None
    """Execution contexts, each with a stream and a slab. Default: what the device advises (host: two a core
    of the process, 32 at the most)."""

    arenas: int | None = None
    """Blocks of enqueue memory that the contexts share. Default: one a context. A model that brings its own
    working memory, as ONNX Runtime does, needs none, and then none is made."""

    graphs: str | Sequence[int] = "auto"
    """Batch sizes to capture as CUDA graphs, as ``(1, 8, 64)`` or ``"1,8,64"``; a batch is padded to the next
    one where that pays. ``auto``: the powers of four and ``max_rows``, on a GPU. ``off``: none. Each size of
    each context takes an execution context of its own, with what persistent memory that has."""

    flavour: str | None = None
    """Which package runs a TensorRT plan: ``tensorrt``, ``tensorrt_lean``, ``tensorrt_dispatch`` or
    ``tensorrt_rtx``. Default: the first that is installed and fits the plan."""

    waiting: Literal["adaptive", "spin", "thread"] = "adaptive"
    """How completions are found: ``adaptive`` sleeps while it can, ``spin`` burns a core to be prompt, and
    ``thread`` has a thread wait, for loops that are mostly idle."""

    check_finite: bool = False
    """Refuse inputs that hold a NaN or an infinity. Off by default, since it reads every value once more."""

    batch_timeout: float | None = 60.0
    """How long a batch may take on the device before it is given up for hung: its callers fail with
    ``DeviceLostError`` and its context is not used again. ``None``: for ever."""

    close_timeout: float = 30.0
    """How long closing waits for batches in flight before it gives them up."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_queue_rows", "max_in_flight", "priorities", "contexts", "arenas"):
            self._check_count(name)
        self._check_seconds("max_delay", most=1.0, none_allowed=False)
        self._check_seconds("timeout", most=math.inf, none_allowed=True)
        self._check_seconds("close_timeout", most=math.inf, none_allowed=False)
        self._check_seconds("batch_timeout", most=math.inf, none_allowed=True)
        if self.waiting not in WAITING:
            raise OptionsError(f"waiting is one of {', '.join(WAITING)}, not {self.waiting!r}")
        if self.flavour is not None and self.flavour not in FLAVOURS:
            raise OptionsError(f"flavour is one of {', '.join(FLAVOURS)}, not {self.flavour!r}")
        if not (isinstance(self.graphs, str) and self.graphs in ("auto", "off")):
            object.__setattr__(self, "graphs", _sizes(self.graphs))
        if not isinstance(self.check_finite, bool):
            raise OptionsError(f"check_finite is True or False, not {self.check_finite!r}")
        self._check_together()

    @classmethod
    def from_settings(cls, base: "Options | None", settings: dict[str, Any]) -> "Options":
        """``base``, or the defaults, with some options changed.

        :raises OptionsError: for a name that is no option; it says which one is nearest.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        check_names(settings, names, "option", synonyms=ELSEWHERE)
        if base is not None and not isinstance(base, cls):
            raise OptionsError(f"options is an asynctrt.Options, not {type(base).__name__}")
        return dataclasses.replace(base or cls(), **settings)

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name not in ("max_queue_rows", "priorities"):
            return
        count = whole(value)
        if count is None or count < 1:
            raise OptionsError(f"{name} is a whole number of at least 1, not {value!r}")
        object.__setattr__(self, name, count)

    def _check_seconds(self, name: str, *, most: float, none_allowed: bool) -> None:
        value = getattr(self, name)
        if value is None and none_allowed:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise OptionsError(f"{name} is in seconds and not negative, not {value!r}")
        if value > most:
            raise OptionsError(
                f"{name} is in seconds and at most {most:g}, not {value!r}. For milliseconds, divide by 1000"
            )
        object.__setattr__(self, name, float(value))

    def _check_together(self) -> None:
        if self.max_rows is not None and self.max_rows > self.max_queue_rows:
            raise OptionsError(
                f"max_queue_rows ({self.max_queue_rows}) is less than max_rows ({self.max_rows}): no batch "
                "could ever fill. Raise max_queue_rows"
            )
        for name in ("max_in_flight", "arenas"):
            value = getattr(self, name)
            if value is not None and self.contexts is not None and value > self.contexts:
                raise OptionsError(
                    f"{name} ({value}) is more than contexts ({self.contexts}), and each batch in flight "
                    f"holds a context. Raise contexts, or lower {name}"
                )


def _sizes(given: str | Sequence[int]) -> tuple[int, ...]:
    """Batch sizes, rising."""
    try:
        parts = map(int, given.split(",")) if isinstance(given, str) else map(whole, given)
        sizes = sorted({0 if part is None else part for part in parts})
    except (TypeError, ValueError):
        sizes = []
    if not sizes or sizes[0] < 1:
        raise OptionsError(
            f"graphs is 'auto', 'off' or batch sizes of at least 1, as (1, 8, 64) or '1,8,64'; not {given!r}"
        )
    return tuple(sizes)


def whole(value: Any) -> int | None:
    """A whole number, NumPy's among them; ``None`` for anything else, and for True and False."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_names(
    given: Iterable[str], names: Sequence[str], what: str, *, synonyms: Mapping[str, str] | None = None
) -> None:
    """Whether every name is one of those that there are.

    :param what: what a name would be: an option, a setting in some file.
    :param synonyms: what others call some of the names.
    :raises OptionsError: for the first that is not; it says which one is nearest.
    """
    others = synonyms or {}
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, [*names, *others], n=1, cutoff=0.4)
            hint = f"Did you mean {others.get(nearest[0], nearest[0])!r}? " if nearest else ""
            raise OptionsError(f"{name!r} is no {what}. {hint}There are: {', '.join(names)}")
