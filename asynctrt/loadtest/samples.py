"""Makes the requests to send, from random rows or files; and checks answers."""

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.tensors import Array, TensorSpec, convert, varying_dims

NBYTES_MAX: Final = 1 << 30
"""Limit on the bytes of all samples. A model with large rows gets fewer samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold the content of a request.

    :param group: its dimensions, for messages.
    :param expected: the expected answer by name; ``None`` if answers are not checked.
    """

    inputs: Mapping[str, Array]
    rows: int
    group: str = ""
    expected: Mapping[str, Array] | None = None


JSON_LINES: Final = (".jsonl", ".ndjson")
COLUMNS: Final = (".csv", *JSON_LINES)
"""Suffixes of files that hold a table."""


def make_samples(settings: LoadSettings, specs: Sequence[TensorSpec]) -> list[Sample]:
    """Make the samples of a test.

    :param specs: the inputs of one row; empty if they are unknown.
    :raises OptionsError: for unknown or missing dimensions, or unknown inputs.
    :raises UsageError: for files that cannot be read.
    """
    if settings.inputs is not None:
        return list(_from_files(settings, specs))
    if not specs:
        raise OptionsError("the inputs of this target are not known: set inputs to what should be sent")
    return _random(settings, specs, read_dims(settings.dims))


def read_dims(texts: Sequence[str]) -> list[dict[str, int]]:
    """Parse texts such as ``length=128,heads=4``: sizes of dynamic dimensions.

    Without any texts, return one entry without sizes.

    :raises OptionsError: for anything else.
    """
    kinds = []
    for text in texts or ("",):
        try:
            pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
            dims = {name.strip(): int(size) for name, _, size in pairs}
            if not all(name and size >= 0 for name, size in dims.items()):
                raise ValueError(text)
        except ValueError as error:
            raise OptionsError(
                f"{text!r} is not a list of dimensions: write length=128 or length=128,heads=4"
            ) from error
        kinds.append(dims)
    return kinds


def _random(
    settings: LoadSettings, specs: Sequence[TensorSpec], kinds: Sequence[dict[str, int]]
) -> list[Sample]:
    """Make the same number of random samples for each kind, given by its dimensions."""
    rng = np.random.default_rng((settings.seed, 2))
    names = set(varying_dims(specs))
    for dims in kinds:
        unknown, missing = sorted(dims.keys() - names), sorted(names - dims.keys())
        if unknown or missing:
            example = ",".join(f"{name}=..." for name in sorted(names))
            raise OptionsError(
                f"dynamic dimensions of this model: {sorted(names)}; missing: {missing}, unknown: {unknown}. "
                + (f"Set dims {example}" if names else "Leave dims out")
            )
    nbytes = settings.rows * sum(_row_nbytes(spec, dims) for dims in kinds for spec in specs)
    if nbytes > NBYTES_MAX:
        raise OptionsError(
            f"one request of each kind takes {nbytes:,} bytes in all, and the limit is {NBYTES_MAX:,}: set "
            "fewer rows, or smaller dims"
        )
    each = max(1, min(settings.samples // len(kinds), NBYTES_MAX // max(nbytes, 1)))
    return [
        Sample(
            random_inputs(specs, dims, settings.rows, rng),
            settings.rows,
            ", ".join(f"{name}={size}" for name, size in dims.items()),
        )
        for dims in kinds
        for _ in range(each)
    ]


def _row_nbytes(spec: TensorSpec, dims: Mapping[str, int]) -> int:
    return math.prod(dims[dim] if isinstance(dim, str) else dim for dim in spec.dims) * spec.dtype.itemsize


def _from_files(settings: LoadSettings, specs: Sequence[TensorSpec]) -> Iterator[Sample]:
    path: Any = settings.inputs
    given: Any = path
    if not isinstance(path, Path):
        path = Path("inputs")  # The name in messages for arrays without a file.
    elif path.suffix not in (".npy", ".npz", *COLUMNS):
        raise UsageError(
            f"{str(path)!r} is neither .npz nor .npy, .csv nor .jsonl: make one of these of what to send"
        )
    arrays = _named(_load(given), specs, str(path))
    expected = _load(settings.expect) if settings.expect is not None else None
    if isinstance(expected, dict):  # Text is sent as bytes, so it comes back as bytes.
        expected = {
            name: np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
            for name, array in expected.items()
        }
    if isinstance(expected, np.ndarray):
        raise UsageError(f"{str(settings.expect)!r} must be an .npz, with an array for each output")
    count = min((len(array) for array in arrays.values() if array.ndim), default=0)
    for name, array in {**arrays, **(expected or {})}.items():
        if array.ndim == 0 or len(array) != count:
            raise UsageError(
                f"every array must have the same number of rows on its first axis: {name!r} has shape "
                f"{array.shape}, another {count} rows"
            )
    rows = settings.rows
    if count < rows:
        raise UsageError(f"{str(path)!r} has {count} rows, and one request needs {rows}")
    for start in range(0, min(count - rows + 1, rows * settings.samples), rows):
        part = slice(start, start + rows)
        inputs = {name: np.ascontiguousarray(array[part]) for name, array in arrays.items()}
        right = None if expected is None else {name: array[part] for name, array in expected.items()}
        yield Sample(inputs, rows, expected=right)


def _load(path: Any) -> Any:
    """Load an array or arrays by name from a path, or return the arrays given instead of one.

    Do not load pickled objects, because unpickling may run code.
    """
    if not isinstance(path, Path):
        return path[""] if list(path) == [""] else dict(path)
    if path.suffix in COLUMNS:
        return _columns(path)
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged file open.
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return content
            # NumPy returns an archive member that is not an array as bytes.
            return {name: np.asarray(value) for name, value in content.items()}
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    except Exception as error:  # A damaged archive raises errors of zipfile and of zlib.
        raise UsageError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error


def _columns(path: Path) -> dict[str, Array]:
    """Read a table, whose values of CSV stay text as they are written."""
    rows = _read_table(path)
    names = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or list(row) != names:
            raise UsageError(
                f"row {number} of {str(path)!r} does not have a value for each of {names}, and no others"
            )
    return {name: _column([row[name] for row in rows]) for name in names}


def _column(values: list[Any]) -> Array:
    """Return values as an array: of objects if an array of one type would change them."""
    with contextlib.suppress(ValueError, MemoryError):  # Lists of different lengths; one very long text.
        array = np.array(values)
        if repr(array.tolist()) == repr(values):
            return array
    array = np.empty(len(values), object)
    for number, value in enumerate(values):
        array[number] = value
    return array


def _read_table(path: Path) -> list[Any]:
    """Return the rows of a file, CSV with a header or JSON Lines.

    :raises UsageError: if the file cannot be read.
    :raises OptionsError: for a line that is not JSON or CSV, or a column that occurs twice.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    rows: list[Any] = []
    if path.suffix not in JSON_LINES:
        table, ended = csv.reader(io.StringIO(text, newline=""), strict=True), 0
        try:
            for row in table:
                rows.append(row)
                ended = table.line_num
        except csv.Error as error:
            raise OptionsError(f"{str(path)!r}, line {ended + 1} is not CSV: {error}") from error
        names, *rows = rows or [[]]
        if len(set(names)) < len(names):
            raise OptionsError(f"{str(path)!r} has two columns of the same name: {names}")
        # A row with too few or too many values is returned as it is.
        count = len(names)
        return [dict(zip(names, row, strict=True)) if len(row) == count else row for row in rows if row]
    # Not `splitlines`, which also splits at other characters, such as U+2028 in a text.
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise OptionsError(f"{str(path)!r}, line {number} is not JSON: {error}") from error
    return rows


def _named(made: Any, specs: Sequence[TensorSpec], where: str) -> dict[str, Array]:
    """Return arrays by input name; a single array belongs to the only input."""
    if not isinstance(made, Mapping):
        if len(specs) != 1:
            names = [spec.name for spec in specs]
            raise UsageError(
                f"{where!r} has one unnamed array, and the inputs are {names}: give arrays by name"
            )
        made = {specs[0].name: made}
    known = {spec.name: spec for spec in specs}
    return {str(name): _array(value, known.get(name), where) for name, value in made.items()}


def _array(value: Any, spec: TensorSpec | None, where: str) -> Array:
    """Return one input as an array. Convert numbers and lists to the input's type."""
    try:
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            value = value.tolist() if spec is not None and spec.dtype.kind in "biufc" else value
        if spec is not None and spec.dtype.kind in "biufc" and isinstance(value, list | tuple | int | float):
            return convert(spec, value)
        array = np.asarray(value)
        if spec is not None and array.ndim and array.dtype.kind == "U" and spec.dtype.kind in "biuf":
            array = array.astype(spec.dtype)  # Numbers of a CSV file.
    except ValueError as error:
        raise UsageError(f"{where!r} has a value that cannot become an array: {error}") from error
    return array if spec is None else _with_name(array, spec.dtype)


def _with_name(array: Array, dtype: np.dtype[Any]) -> Array:
    """Restore a type such as bfloat16: NumPy files keep its bytes, but not its name."""
    is_same = array.dtype.kind == dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize
    return array.view(dtype) if is_same else array


def differs(
    outputs: Mapping[str, Array], expected: Mapping[str, Array], rtol: float, atol: float
) -> str | None:
    """Return how an answer differs from the expected one; ``None`` if it does not."""
    for name, wanted in expected.items():
        if name not in outputs:
            return f"output {name!r} is missing"
        given = outputs[name]
        right = _with_name(wanted, given.dtype)
        if right.shape == (1, *given.shape):
            right = right[0]  # A server that takes one row may answer without the axis of rows.
        if given.shape != right.shape:
            return f"output {name!r} has shape {given.shape}, not {right.shape}"
        if right.dtype.kind in "fcV":
            wide = np.complex128 if "c" in given.dtype.kind + right.dtype.kind else np.float64
            close = np.isclose(
                given.astype(wide, copy=False), right.astype(wide, copy=False), rtol, atol, equal_nan=True
            )
        else:
            close = np.asarray(given == right)
        if not close.all():
            place = tuple(int(index) for index in np.argwhere(~close)[0])
            return f"output {name!r} is {given[place]} at {place}, not {right[place]}"
    return None


def random_inputs(
    specs: Sequence[TensorSpec],
    dims: Mapping[str, int],
    rows: int,
    rng: np.random.Generator | None = None,
) -> dict[str, Array]:
    """Return random rows that fit the specs: floats from -1 to 1, integers 0 and 1, letters.

    :param dims: the sizes of dynamic dimensions.
    :param rng: the source of the values. By default, the same ``rows`` give the same values.
    """
    rng = rng or np.random.default_rng(rows)
    inputs: dict[str, Array] = {}
    for spec in specs:
        shape = [dims[dim] if isinstance(dim, str) else dim for dim in spec.shape(rows)]
        if spec.dtype.kind in "SO":
            letters = rng.integers(97, 123, (*shape, 1)).astype(np.uint8).view("S1")[..., 0]
            inputs[spec.name] = letters.astype(str).astype(spec.dtype)
        elif spec.dtype.kind in "fV":  # NumPy gives bfloat16 the kind V.
            inputs[spec.name] = rng.uniform(-1, 1, shape).astype(np.float32).astype(spec.dtype)
        else:
            inputs[spec.name] = rng.integers(0, 2, shape).astype(spec.dtype)
    return inputs
