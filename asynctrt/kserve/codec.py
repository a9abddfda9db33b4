"""Represent a request independently of its encoding: where its tensors lie, and which outputs it wants.

A client sends nearly the same request again and again: only the id and the tensors differ. So everything else
(:class:`RequestLayout`) is cached by its bytes, together with the head of the answer.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import numpy as np

from asynctrt.errors import InputError, RequestError, TooLargeError, UnsupportedError
from asynctrt.kserve.datatypes import (
    DIMS_MAX,
    PIECE,
    TEXT,
    Buffer,
    Pause,
    brief,
    datatype_of,
    no_pause,
    read_tensor,
    size_of,
)
from asynctrt.tensors import Array, InferResult, TensorSpec, check_shape, too_many_rows

LAYOUTS_MAX: Final = 256
"""Layouts cached for each model."""

LAYOUT_NBYTES_MAX: Final = 4096
"""The largest request, in bytes without its id and tensors, that is cached."""

FAST_NBYTES: Final = 16 << 10
"""Typed contents and byte strings up to this size are decoded on the event loop: it takes at most a
millisecond."""

FAST_BOOLS_NBYTES: Final = 4 << 20
"""Raw booleans up to this size are decoded on the event loop: checking every value takes 4 ms for 60 MiB."""

SIZE_MAX: Final = 2**40
"""The largest number of elements of a tensor: more than any body can hold, and too few to overflow."""

EMPTY_SIZE_MAX: Final = 1 << 20
"""The largest product of the nonzero sizes of an empty tensor. The tensor itself takes no memory, but outputs
with those sizes are allocated anyway."""

ANSWER_NBYTES_MAX: Final = 1 << 30
"""Default limit for the total bytes of a request's outputs."""

JSON_NBYTES_MAX: Final = 4 << 20
"""Default limit for the JSON of one request, and of one answer. The parser holds the GIL, and so blocks the
event loop, until it is done: 9 ms for JSON full of numbers, 12 ms for JSON full of short strings."""

STRINGS_MAX: Final = 1 << 18
"""The largest number of elements of a BYTES tensor: reading more would block the event loop too long."""

FAST_VALUES: Final = 32 << 10
FAST_STRINGS_NBYTES: Final = 1 << 20
"""Up to this many numbers, or characters in a tensor of strings, are encoded on the event loop: numbers take
0.8 ms."""

STRING_NBYTES: Final = 64
"""Approximate overhead of each Python string, in bytes."""

K = TypeVar("K")
V = TypeVar("V")

PlacedTensor = tuple[TensorSpec, tuple[int, ...], int, Array | None]
"""A tensor's spec, shape and number of raw bytes; and if its values were in the head, the array itself, or
:data:`IN_HEAD`."""

IN_HEAD: Final[Array] = np.empty(0)
"""Stands for an array whose values are in the head: they are read anew for each request of a layout."""

Specs = Mapping[str, tuple[TensorSpec, str]]
"""Spec and datatype of a model's tensors, by name."""


class RequestLayout:
    """Everything in a request except its id and its raw tensors."""

    __slots__ = (
        "answer",
        "answer_key",
        "answer_nbytes",
        "binary_nbytes",
        "http_head",
        "inputs",
        "is_simple",
        "keeps_message",
        "outputs",
        "plain",
        "priority",
        "raw_numbers",
        "rows",
        "timeout",
        "wanted",
    )

    def __init__(
        self,
        inputs: tuple[PlacedTensor, ...],
        outputs: tuple[tuple[TensorSpec, bool], ...],
        priority: int,
        timeout: float | None,
        wanted: Literal["host"] | tuple[str, ...] = "host",
        plain: str = "",
    ) -> None:
        self.inputs = inputs
        self.binary_nbytes = sum([nbytes for _, _, nbytes, _ in inputs])
        """Raw bytes of all inputs."""
        self.raw_numbers = _raw_numbers_of(inputs)
        """Name, shape, dtype and offset of each input, if all are raw numbers and any value is valid."""
        self.keeps_message = any(
            array is None and spec.dtype.kind not in TEXT for spec, _, _, array in inputs
        )
        """Whether an input is a view of the message, which stays in memory as long."""
        self.rows = _rows_of(inputs)
        self.outputs = outputs
        """The spec of each wanted output, and whether it is wanted as raw bytes."""
        self.wanted = wanted
        """The outputs to request from the engine: their names, or ``host`` for all."""
        self.plain = plain
        """``predictions`` or ``outputs`` if the answer is plain JSON of that name; empty for KServe V2."""
        self.answer_nbytes = nbytes_of(inputs, [spec for spec, _ in outputs], symbols_of(inputs, {}))
        """Raw bytes of the wanted outputs, as far as the inputs' shapes determine them."""
        self.is_simple = all(binary and spec.dtype.kind not in TEXT for spec, binary in outputs)
        """Whether every output is wanted as raw numbers, so that there is nothing to encode."""
        self.priority = priority
        """The priority on the wire: 1 is the most urgent, 0 means the model's default."""
        self.timeout = timeout
        """Seconds that the request may be queued, or ``None``."""
        # The shapes, encoded head and HTTP head of the last answer, which the next one usually shares.
        self.answer_key: list[tuple[int, ...]] | None = None
        self.answer = b""
        self.http_head = b""


class DecodedRequest:
    """One inference request: its id, its layout, and its inputs by name."""

    __slots__ = ("id", "inputs", "kept_nbytes", "layout", "nbytes")

    def __init__(
        self, layout: RequestLayout, request_id: str, inputs: dict[str, Array], message_nbytes: int
    ) -> None:
        self.layout = layout
        self.id = request_id
        self.inputs = inputs
        self.kept_nbytes = self.nbytes = message_nbytes if layout.keeps_message else 0
        """Memory that the inputs take, in bytes; and how much of it is the message's."""
        if not layout.raw_numbers:
            for spec, _, _, array in layout.inputs:
                if array is not None or spec.dtype.kind in TEXT:
                    self.nbytes += _memory_of(inputs[spec.name])


class ModelCodec:
    """A model's tensors, and a cache of the layouts of its requests. Each encoding has a subclass.

    :param name: the model's name, as answers state it, like ``version``.
    :param rows_max: the largest number of rows that the engine accepts in a request.
    :param json_max: the largest JSON part of a request, and of an answer, in bytes.
    :param answer_max: the largest total size in bytes of a request's outputs, wanted or not, as far as its
        inputs' shapes determine it; the same limit applies to padded inputs.
    :param pad: the sizes that dimensions are padded to, as in :attr:`Options.pad`.
    """

    def __init__(
        self,
        name: str,
        version: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        rows_max: int | None = None,
        json_max: int = JSON_NBYTES_MAX,
        answer_max: int = ANSWER_NBYTES_MAX,
        pad: Mapping[str, Any] | str | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.rows_max = rows_max
        self.json_max = json_max
        self.answer_max = answer_max
        pad = {} if pad is None or isinstance(pad, str) else pad
        self._pad = {dim.strip(): sizes for dims, sizes in pad.items() for dim in dims.split("=")}
        self._inputs: Specs = {spec.name: (spec, datatype_of(spec)) for spec in inputs}
        self._outputs: Specs = {spec.name: (spec, datatype_of(spec)) for spec in outputs}
        self._layouts: dict[Any, RequestLayout] = {}
        # The same by the bytes of whole heads without values, but for their ids: these are not parsed again.
        self._heads: dict[bytes, RequestLayout] = {}
        # Raw tensors whose values are all checked, and the size from which that is slow.
        kinds = {spec.dtype.kind for spec in inputs}
        self._slow_nbytes = (
            FAST_NBYTES if kinds & set(TEXT) else FAST_BOOLS_NBYTES if "b" in kinds else sys.maxsize
        )

    @staticmethod
    def is_slow_answer(layout: RequestLayout, result: InferResult) -> bool:
        """Return whether encoding an answer would block the event loop for a millisecond or more."""
        if layout.is_simple:
            return False
        if layout.plain and layout.rows * len(layout.outputs) > PIECE:
            return True  # The answer may have an object for each row.
        return any(
            _is_much(result[spec.name])
            for spec, binary in layout.outputs
            if not binary or spec.dtype.kind in TEXT
        )

    def _checked_layout(
        self,
        placed: tuple[PlacedTensor, ...],
        outputs: tuple[tuple[TensorSpec, bool], ...],
        priority: int = 0,
        timeout: float | None = None,
        plain: str = "",
    ) -> RequestLayout:
        """Return the layout of a request, unless its tensors would be too large.

        :raises TooLargeError: if they are: a few bytes may ask for more than the memory, such as one row of
            length n that gives an output of n x n.
        """
        symbols = symbols_of(placed, self._pad)
        nbytes = nbytes_of(placed, [spec for spec, _ in self._outputs.values()], symbols)
        if self._pad:
            padded_nbytes = nbytes_of(placed, [spec for spec, _ in self._inputs.values()], symbols)
            if padded_nbytes > self.answer_max:
                raise TooLargeError(
                    f"inputs of these shapes are padded to {padded_nbytes} bytes; at most {self.answer_max} "
                    "are accepted in one request. Send fewer rows or smaller ones, or raise max_answer"
                )
        if nbytes > self.answer_max:
            raise TooLargeError(
                f"inputs of these shapes give outputs of {nbytes} bytes; at most {self.answer_max} are "
                "accepted in one request. Send fewer rows or smaller ones, or raise max_answer"
            )
        if len(outputs) == len(self._outputs):
            return RequestLayout(placed, outputs, priority, timeout, plain=plain)
        return RequestLayout(placed, outputs, priority, timeout, tuple([spec.name for spec, _ in outputs]))

    def _shape(self, spec: TensorSpec, given: Any) -> tuple[int, ...]:
        """Return the shape of an input, checked before its values are read, which may take far longer."""
        shape = read_shape(spec.name, given)
        check_shape(spec, shape)
        if self.rows_max is not None and spec.axis is not None and shape[spec.axis] > self.rows_max:
            raise too_many_rows(shape[spec.axis], self.rows_max)
        if 0 in shape and size_of([size for size in shape if size]) > EMPTY_SIZE_MAX:
            raise TooLargeError(
                f"input {spec.name!r} has no elements, and its other sizes are too large for that: "
                f"{brief(list(shape))}; at most {EMPTY_SIZE_MAX} as a product are accepted"
            )
        if spec.dtype.kind in TEXT and size_of(shape) > STRINGS_MAX:
            raise TooLargeError(
                f"input {spec.name!r} has {size_of(shape)} elements of BYTES; at most {STRINGS_MAX} are "
                "accepted"
            )
        return shape

    @staticmethod
    def _named(name: str, side: str, specs: Specs, found: Mapping[str, object]) -> tuple[TensorSpec, str]:
        """Return spec and datatype of a tensor that a request names, and that is not in ``found`` yet."""
        if name not in specs:
            raise InputError(f"unknown {side[:-1]} {brief(name)}; the model's {side}: {', '.join(specs)}")
        if name in found:
            raise RequestError(f"duplicate {side[:-1]} {name!r}")
        return specs[name]


def read_inputs(layout: RequestLayout, body: Buffer, start: int, pause: Pause = no_pause) -> dict[str, Array]:
    """Return the inputs of a request, as :func:`read_tensors` does."""
    if not layout.raw_numbers:
        return read_tensors(layout.inputs, body, start, pause)
    arrays: dict[str, Array] = {}
    for name, shape, dtype, offset in layout.raw_numbers:
        arrays[name] = np.ndarray(shape, dtype, body, start + offset)
    return arrays


def read_tensors(
    placed: Sequence[PlacedTensor],
    body: Buffer,
    start: int,
    pause: Pause = no_pause,
    *,
    decodes: bool = True,
) -> dict[str, Array]:
    """Return tensors by name. Raw ones follow one another in ``body`` from ``start`` on."""
    arrays = {}
    for spec, shape, nbytes, array in placed:
        if array is None:
            arrays[spec.name] = read_tensor(spec, shape, body, start, nbytes, pause, decodes=decodes)
        else:
            arrays[spec.name] = array
        start += nbytes
    return arrays


def _raw_numbers_of(
    placed: Sequence[PlacedTensor],
) -> tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]:
    found = []
    start = 0
    for spec, shape, nbytes, array in placed:
        if array is not None or spec.dtype.kind in TEXT + "b":
            return ()
        found.append((spec.name, shape, spec.dtype, start))
        start += nbytes
    return tuple(found)


def symbols_of(inputs: Sequence[PlacedTensor], pad: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of the open dimensions, after padding."""
    symbols: dict[str, int] = {}
    for spec, shape, _, _ in inputs:
        row = shape if spec.axis is None else (*shape[: spec.axis], *shape[spec.axis + 1 :])
        symbols |= {dim: size for dim, size in zip(spec.dims, row, strict=True) if isinstance(dim, str)}
    for dim, sizes in pad.items():
        if dim not in symbols:
            continue
        larger = [size for size in sizes if size >= symbols[dim]]
        symbols[dim] = min(larger, default=symbols[dim])  # The engine refuses larger sizes.
    return symbols


def nbytes_of(inputs: Sequence[PlacedTensor], specs: Sequence[TensorSpec], symbols: Mapping[str, int]) -> int:
    """Return the bytes of tensors in a request, as far as the sizes of the open dimensions determine them."""
    rows = _rows_of(inputs)
    nbytes = 0
    for spec in specs:
        dims = spec.resolve(symbols)
        if dims is not None:
            nbytes += (1 if spec.axis is None else rows) * size_of(dims) * spec.dtype.itemsize
    return nbytes


def _rows_of(inputs: Sequence[PlacedTensor]) -> int:
    """Return the rows of a request: 1 if none of its inputs has rows."""
    return max([shape[spec.axis] for spec, shape, _, _ in inputs if spec.axis is not None], default=1)


def _memory_of(array: Array) -> int:
    """Return the approximate memory that an input takes, in bytes."""
    if array.dtype.kind != "O":
        return array.nbytes
    return array.nbytes + STRING_NBYTES * array.size + characters_of(array)


def characters_of(strings: Array) -> int:
    """Return the total length of all strings. Elements that are not strings count as 0."""
    return sum([len(item) for item in strings.reshape(-1).tolist() if isinstance(item, str | bytes)])


def _is_much(output: Array) -> bool:
    """Return whether encoding an output that is not raw numbers would block the event loop."""
    if output.dtype.kind not in TEXT:
        return output.size > FAST_VALUES
    return output.size > PIECE or (output.dtype.kind == "O" and characters_of(output) > FAST_STRINGS_NBYTES)


def remember(known: dict[K, V], key: K, value: V) -> None:
    """Cache an entry. A full cache is cleared first, so it stays bounded."""
    if len(known) >= LAYOUTS_MAX:
        known.clear()
    known[key] = value


def read_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Check and return a tensor's shape as it came over the wire."""
    if (
        not isinstance(shape, list)
        or len(shape) > DIMS_MAX
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise RequestError(
            f"shape of {name!r} must be a list of at most {DIMS_MAX} sizes, none negative, not {brief(shape)}"
        )
    # Skip zeros: NumPy refuses shapes whose nonzero sizes overflow.
    if size_of([size for size in shape if size]) > SIZE_MAX:
        raise RequestError(f"shape of {name!r} has more elements than any message: {brief(shape)}")
    return tuple(shape)


def read_scheduling(parameters: Mapping[str, Any]) -> tuple[int, float | None]:
    """Return a request's priority as on the wire, and its timeout in seconds."""
    priority = parameters.get("priority", 0)
    if type(priority) is not int or priority < 0:
        raise RequestError(f"priority must be a whole number, 0 or more, not {brief(priority)}")
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or timeout_us < 0:
        raise RequestError(f"timeout must be whole microseconds, 0 or more, not {brief(timeout_us)}")
    return priority, timeout_us / 1e6 if timeout_us else None


def refuse_shared_memory(name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse a tensor that is in shared memory instead of the message."""
    if "shared_memory_region" in parameters:
        raise UnsupportedError(f"{name!r} is in shared memory, which this server does not support")
