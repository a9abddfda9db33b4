"""Checks of settings and arguments: one sentence and one rule for each kind of value.

A class of settings is a frozen dataclass whose fields are made by :func:`setting`, with a check and the
documentation beside the default. Its ``__post_init__`` calls :func:`validate`, and then checks combinations
of values::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        max_rows: int | None = setting(
            default=None, check=count(1).or_none, doc="Rows that one batch holds at most."
        )

        def __post_init__(self) -> None:
            validate(self)
"""

import dataclasses
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, Final, TypeVar

from asynctrt._util.clock import NEVER_NS
from asynctrt._util.synonyms import nearest_name
from asynctrt.errors import SHOWN_MAX, InputError, OptionsError, bounded, show

T = TypeVar("T")

TIMEOUT_NS_MAX: Final = NEVER_NS
"""The longest timeout. Added to a monotonic clock it still fits into 63 bits, as timers need."""

UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""The units in which a text may give a time, in seconds."""

PART: Final = rf"(\d+(?:\.\d+)?)({'|'.join(UNITS_S)})"

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

_SESSION: Final = "make an onnxruntime.InferenceSession with it, and open that"
_STAGES: Final = "give the rate as stages and ramps, such as 100@9s,500@1s"
_GATE: Final = (
    "give an slo, as p99<20ms; for a change, save both reports, and run asynctrt compare A.json B.json "
    "--fail-if 'p99>+10%'"
)
REMOVED_OPTIONS: Final = {
    "arena_size": "every arena has room for the largest batch of any profile",
    "batch_axis": "onnx={'batch_axis': {...}} says so of an ONNX model",
    "batch_sizes": "give them to FunctionModel or @asynctrt.batch; for other models write graphs=(1, 4), or "
    "graphs='off' for none",
    "build": "tensorrt={'build': {...}} has the options of a build",
    "check_finite": "check inputs before the call: numpy.isfinite(rows).all()",
    "deterministic": "batching='deterministic' does the same",
    "flavour": "tensorrt={'flavour': 'tensorrt_lean'} chooses the package",
    "isolate_failures": "idempotent=False is for a model that must not be given the same rows twice",
    "max_batch_bytes": "max_rows limits batches; they also hold at most 256 MiB",
    "max_in_flight": "contexts is the number of batches that run at once",
    "shapes": "onnx={'shapes': {...}} names shapes that come often",
    "max_waiting": "max_memory limits the bytes of requests that wait, and max_queue_rows their rows",
    "min_rate": "a client has to read 1 KiB a second, over write_timeout",
    "share_by": "several tokens distinguish clients, otherwise their addresses do, or a header that a proxy "
    "sets, with client_header",
    "max_tensors": "a request may name as many tensors as its model has",
    "waiting": "the loop finds completions itself, as waiting='adaptive' did",
    "shared": "onnx={'shared': [...]} says so of an ONNX model",
    "lost_grace": "on_device_lost='exit' stops at once; otherwise the server is alive for 30 s",
    "max_pause": "the metric asynctrt_loop_delay_seconds has every pause",
    "watch": "let what writes the files ask for a load, once they are complete: "
    "POST /v2/repository/models/NAME/load, with model_control",
    "warm_spare": "isolation='spare' keeps a second worker",
    "key": "sign the plan that was built, with ssh-keygen -Y sign -n asynctrt -f KEY PLAN",
    "latency_target": "max_delay limits how long a batch waits for more requests, and timeout with "
    "timeout_until='answer' forms batches so that answers are in time",
    "strict": "asynctrt doctor --json has the level of each finding",
    "suspendable": "close the engine to free its memory, and open it again; a server does so when a model is "
    "unloaded and loaded",
    "urgent_share": "device.partition(0.25) gives two parts of a device, for two engines on one model",
    "warmup": "models are ready to run when they are open",
    **dict.fromkeys(("execution_mode", "inter_op_num_threads"), _SESSION),
    **dict.fromkeys(("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse"), _SESSION),
    **dict.fromkeys(("enable_profiling", "profile_file_prefix", "use_deterministic_compute"), _SESSION),
    **dict.fromkeys(("use_per_session_threads", "log_severity_level", "provider_libraries"), _SESSION),
    # Settings of load tests.
    "compare": "try both values with --sweep and --repeats, or save two reports for asynctrt compare",
    "max_outstanding": "callers limits the requests in flight",
    "precision": "the search of a load test finds the rate to within 5%",
    "png": "--report FILE.html writes a page with the charts",
    "scenario": "single-stream is --callers 1, multi-stream --callers 1 --rows 8, server --rate 500 --slo "
    "'p99<15ms', offline --callers 256",
    **dict.fromkeys(("burst", "burst_share", "swing", "period", "trace", "trace_speed"), _STAGES),
    **dict.fromkeys(("baseline", "any_machine", "fail_if"), _GATE),
    "until": "set seconds or repeats, and look at the report's intervals",
    "pacing": "how the generator waits follows from the target",
    "reader": "make an .npz, .csv or .jsonl of the files, and give that as inputs",
    "reference": "save the answers that count as right as an .npz, and give that as expect, with inputs",
    "uncorrected": "latency always counts from when a request was due",
    "trace_batches": "open the engine yourself, and load it inside of engine.tracing()",
}
"""Options and settings that only earlier releases had, each with its replacement."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of value.

    :param expected: completes the sentence "max_rows must be …".
    :param convert: returns the value in the form to keep; raises if it is not of this kind.
    :param fix: a sentence for the end of the message.
    """

    expected: str
    convert: Callable[[Any], Any]
    fix: str = ""

    def __call__(self, name: str, value: object) -> Any:
        """Return ``value`` in the form to keep.

        :param name: the value's name in the message.
        :raises OptionsError: if it is not of this kind.
        """
        try:
            return self.convert(value)
        except OptionsError:
            raise  # It is more specific: it says what is wrong inside the value.
        except Exception:  # Foreign objects may raise anything.
            fix = f". {self.fix}" if self.fix else ""
            raise OptionsError(f"{name} must be {self.expected}, not {show(value)}{fix}") from None

    @property
    def or_none(self) -> "Check":
        """This check, with ``None`` allowed as well."""
        convert = self.convert
        return dataclasses.replace(self, convert=lambda value: None if value is None else convert(value))


def setting(*, default: Any, doc: str, check: Check | None = None, is_secret: bool = False) -> Any:
    """Return a dataclass field.

    :param doc: its documentation, for readers and for :func:`docs_of`.
    :param check: the check that :func:`validate` applies; ``None`` if the class checks it in another way.
    :param is_secret: whether to leave it out of the settings' ``repr``.
    """
    return dataclasses.field(default=default, repr=not is_secret, metadata={"check": check, "doc": doc})


def validate(settings: Any) -> None:
    """Check every field of an instance whose class has fields made by :func:`setting`, and convert it.

    :raises OptionsError: for the first value that fails its field's check.
    """
    for item in dataclasses.fields(settings):
        check = item.metadata.get("check")  # A subclass may have fields of another kind.
        if check is not None:
            object.__setattr__(settings, item.name, check(item.name, getattr(settings, item.name)))


def changed(settings: Any) -> dict[str, Any]:
    """Return the values that are not their field's default, by name."""
    values = ((item, getattr(settings, item.name)) for item in dataclasses.fields(settings))
    return {item.name: value for item, value in values if value != item.default}


def changed_repr(settings: Any) -> str:
    """Return a ``repr`` of the non-default values, without secrets; some classes have 40 fields."""
    secret = {item.name for item in dataclasses.fields(settings) if not item.repr}
    given = [f"{name}={value!r}" for name, value in changed(settings).items() if name not in secret]
    return f"{type(settings).__name__}({', '.join(given)})"


def docs_of(cls: type) -> dict[str, str]:
    """Return the documentation of each field by name, as one line without markup, for a flag's help."""
    return {
        item.name: " ".join(item.metadata["doc"].replace("``", "'").split())
        for item in dataclasses.fields(cls)
    }


def documented(cls: type[T]) -> type[T]:
    """Add the fields' documentation to the class's docstring, for ``help()`` and for editors."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # T is a class of settings.
    lines = [f":param {item.name}: {' '.join(item.metadata['doc'].split())}" for item in fields]
    head, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    cls.__doc__ = "\n".join([head, "", *lines, *rest.splitlines()])
    return cls


def check_names(
    given: Iterable[str], names: Sequence[str], what: str, *, synonyms: Mapping[str, str] | None = None
) -> None:
    """Check that every name given is a valid one.

    :param what: the kind of name, for the message: ``option``, or ``setting in serve.toml``.
    :param synonyms: other programs' names for some of the names.
    :raises OptionsError: for the first name that is not valid; the message suggests the nearest valid one.
    """
    others = synonyms or {}
    kind, _, where = what.partition(" ")
    valid = f"alid {kind}s{' ' * bool(where)}{where}: {', '.join(names)}"
    for name in given:
        if name not in names:
            if name in REMOVED_OPTIONS:
                raise OptionsError(removed(name))
            nearest = nearest_name(str(name)[:SHOWN_MAX], names, others, 0.4)
            hint = f"did you mean {nearest!r}? V" if nearest else "v"
            raise OptionsError(f"unknown {kind} {show(name)}{' ' * bool(where)}{where}; {hint}{valid}")


def removed(name: str) -> str:
    """Return the message for an option that only earlier releases had."""
    return f"the option {name!r} was removed: {REMOVED_OPTIONS[name]}"


def printable(text: str, keep: str = "") -> str:
    """Replace each character of a text that could control a terminal.

    Names in files and errors of servers come from other people.

    :param keep: characters to keep.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else REPLACEMENT for letter in text)


def as_int(value: Any) -> int:
    """Return a whole number as an ``int``.

    :raises TypeError: for anything but an ``int`` or a NumPy integer; ``True`` and ``False`` are not numbers.
    :raises ValueError: if it does not fit into 64 bits: nothing here counts that far, and Python refuses to
        print very large numbers.
    """
    if isinstance(value, bool):
        raise TypeError("a bool is not a number")
    whole = operator.index(value)
    if whole.bit_length() > 64:
        raise ValueError("it does not fit into 64 bits")
    return whole


def int_or_none(value: Any) -> int | None:
    """Return a whole number as an ``int``, as :func:`as_int` does, or ``None`` for anything else."""
    try:
        return as_int(value)
    except Exception:  # __index__ may raise anything.
        return None


def as_float(value: Any) -> float:
    """Return a real number as a ``float``: Python's, NumPy's, a ``Fraction`` or a ``Decimal``.

    :raises TypeError: for anything else, including ``True``, ``False`` and texts.
    """
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise TypeError("not a real number")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def count(least: int, most: int | None = None) -> Check:
    """Return a check for a whole number from ``least`` to ``most``."""

    def convert(value: Any) -> int:
        whole = as_int(value)
        if whole < least or (most is not None and whole > most):
            raise ValueError
        return whole

    limits = f"≥ {least}" if most is None else f"from {least} to {most}"
    return Check(f"a whole number {limits}", convert)


def sizes_in(given: Any) -> tuple[int, ...]:
    """Return sizes ≥ 1 from a sequence, or a text such as ``1,4,16`` or ``(1, 4, 16)``.

    :raises TypeError, ValueError: for anything else.
    """
    if isinstance(given, str):
        given = map(int, given.strip("()[] ").rstrip(",").split(","))
    sizes = tuple(map(as_int, given))
    if not sizes or min(sizes) < 1:
        raise ValueError
    return sizes


def rising_sizes() -> Check:
    """Return a check for batch sizes in rising order, from a sequence or a text such as ``1,4,16``."""

    def convert(given: Any) -> tuple[int, ...]:
        sizes = sizes_in(given)
        rising = tuple(sorted(set(sizes)))
        if sizes != rising:
            what = "has a size twice" if len(rising) < len(sizes) else "does not rise"
            given, fix = bounded(str(sizes), SHOWN_MAX), bounded(str(rising), SHOWN_MAX)
            raise OptionsError(f"batch_sizes is {given}, which {what}. Write {fix}")
        return sizes

    return Check("batch sizes ≥ 1 in rising order, such as (1, 4, 16) or '1,4,16'", convert)


def number(
    least: float = 0.0, most: float = math.inf, *, above: bool = False, unit: str = "", fix: str = ""
) -> Check:
    """Return a check for a real number from ``least`` to ``most``, which refuses NaN.

    :param above: whether ``least`` itself is refused.
    :param unit: the unit, for the message: ``seconds``.
    """

    def convert(value: Any) -> float:
        real = as_float(value)
        if not (least < real if above else least <= real) or not real <= most:
            raise ValueError
        return real

    limits = f"{'>' if above else '≥'} {least:g}" + (f" and ≤ {most:g}" if most < math.inf else "")
    return Check(f"a number{' of ' * bool(unit)}{unit} {limits}", convert, fix)


def duration(least: float = 0.0, most: float = math.inf, *, above: bool = False, fix: str = "") -> Check:
    """Return a check for a time in seconds, or as a text such as ``"2ms"``: see :func:`number`."""
    check = number(least, most, above=above, unit="seconds", fix=fix)

    def convert(value: Any) -> float:
        return float(check.convert(seconds_of(value) if isinstance(value, str) else value))

    return dataclasses.replace(check, convert=convert)


def seconds_of(text: str) -> float:
    """Convert a time with its unit, such as ``2ms``, ``30s`` or ``1m30s``, to seconds.

    :raises ValueError: for any other text, including a number without a unit.
    """
    if not re.fullmatch(f"(?:{PART})+", text):
        raise ValueError(f"not a time with its unit: {text!r}")
    return sum(float(count) * UNITS_S[unit] for count, unit in re.findall(PART, text))


def choice(*values: str) -> Check:
    """Return a check for one of several words."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError
        return value

    *others, last = map(repr, values)
    return Check(f"{', '.join(others)} or {last}", convert)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, (value,) if isinstance(value, str) else value))


def _word(value: Any) -> str:
    word = _text(value)
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise ValueError
    return word


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(map(_word, value))


def _paths(value: Any) -> tuple[str, ...]:
    paths = (value,) if isinstance(value, str | os.PathLike) else tuple(value)
    return tuple(os.fsdecode(path) for path in paths)


def _path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    return Path(value)


FLAG: Final = Check("True or False", _flag)
TEXT: Final = Check("a string", _text)
TEXTS: Final = Check("a string or several", _texts)
WORDS: Final = Check("a list of words of printable ASCII characters without spaces", _words)
PATH: Final = Check("a path", _path)
PATHS: Final = Check("a path or a list of paths", _paths)
PORT: Final = count(0, 65535)


def check_file(option: str, path: str | os.PathLike[str], what: str) -> None:
    """Check that an option names a file.

    :param what: which file it is to be, for the message.
    :raises OptionsError: if there is no such file.
    """
    if not Path(path).is_file():
        raise OptionsError(f"{option}: there is no file {os.fspath(path)!r}. Give the path of {what}")


def check_target(option: str, path: str | os.PathLike[str] | None) -> None:
    """Check that a file can be where an option says, if it does. It need not be there.

    :raises OptionsError: if it is a folder, or in no folder.
    """
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise OptionsError(
            f"{option}: {os.fspath(path)!r} is not the path of a file in a folder that is there. Give the "
            "path of a file, which need not be there yet"
        )


def priority_of(priority: Any, priorities: int) -> int:
    """Return the priority of a call as an ``int``.

    :param priorities: the engine's number of priority levels.
    :raises InputError: for anything but a whole number, of Python or NumPy, from 0 to ``priorities - 1``.
    """
    try:
        level = priority if type(priority) is int else as_int(priority)
    except Exception:  # __index__ may raise anything. Nothing is queued yet, and the caller gets an error.
        level = -1
    if not 0 <= level < priorities:
        raise InputError(f"priority must be a whole number from 0 to {priorities - 1}, not {show(priority)}")
    return level


def output_names(outputs: Any, known: Sequence[str]) -> frozenset[str] | None:
    """Return the names of the outputs that a call wants; ``None`` for all, even if it names them all.

    :param outputs: the caller's argument: ``host``, or names.
    :param known: the names of the model's outputs.
    :raises InputError: for another text, for no names, or for a name that the model does not have.
    """
    if isinstance(outputs, str) and outputs == "host":
        return None
    listed = ", ".join(known)
    try:
        names = None if isinstance(outputs, str | bytes) else frozenset(outputs)
    except Exception:  # Foreign objects may raise anything.
        names = None
    if names is None:
        raise InputError(
            f"outputs must be 'host' or 'device', or a list of names of the model's outputs ({listed}), not "
            f"{show(outputs)}"
        )
    if not names:
        raise InputError(f"outputs names none. Name some of the model's outputs: {listed}; or leave it out")
    unknown = names.difference(known)
    if unknown:
        named = bounded(", ".join(sorted(map(show, unknown))), 4 * SHOWN_MAX)
        raise InputError(f"unknown output {named}; the model's outputs: {listed}")
    return None if len(names) == len(known) else names


def timeout_ns_of(timeout: Any) -> int:
    """Convert a timeout in seconds to ns, limited to :data:`TIMEOUT_NS_MAX`.

    :raises InputError: for anything but a real number ≥ 0, of Python or NumPy or a ``Decimal``.
    """
    try:
        seconds = timeout if type(timeout) is float else as_float(timeout)
    except Exception:  # __float__ may raise anything. Nothing is queued yet, and the caller gets an error.
        seconds = math.nan
    if not seconds >= 0:
        raise InputError(f"timeout must be a number of seconds ≥ 0, not {show(timeout)}")
    return int(seconds * 1e9) if seconds < TIMEOUT_NS_MAX / 1e9 else TIMEOUT_NS_MAX
