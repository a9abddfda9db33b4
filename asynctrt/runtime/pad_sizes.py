"""Padding: rows of different lengths are padded to a few common sizes, so that they share batches.

Arrays stay as their callers gave them until they are written into a slab. Until then only the key of their
batch has the sizes to pad to. Outputs are cut back to the sizes of each request.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from asynctrt._util.frozen import FrozenDict
from asynctrt._util.pad_options import MASK, OFF
from asynctrt.errors import InputError, OptionsError, show
from asynctrt.options import Options
from asynctrt.scheduling.key import SHAPES_MAX, BatchKey
from asynctrt.tensors import Array, Dims, TensorSpec, varying_dims

STEPS_WHERE_SHAPES_ARE_FREE: Final = 8
"""The number of sizes from one power of two to the next, if more shapes cost nothing, as on the host. Padding
a row to the next size then adds at most an eighth to it. Rows of neighbouring sizes share batches if that
pays off."""

RangesOf = Callable[[str], Sequence[tuple[int, int]]]
"""Returns the range of sizes of a dimension in each profile of the model."""


class Sizes:
    """Sizes that the engine chooses to pad a dimension to, as far as the model supports them.

    :param ranges: the smallest and largest sizes of the ranges that the model supports; all sizes if empty.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]] = ()) -> None:
        self._ranges = merged(ranges)
        self.steps = 1
        """How many sizes there are from one power of two to the next."""
        self.proven: int | None = None
        """The largest size that is known to run. No row is padded beyond it; ``None`` if any size runs."""

    @classmethod
    def within(cls, dims: Sequence[str], ranges_of: RangesOf | None) -> "Sizes":
        """Return the sizes for dimensions that share them, within the profiles of the model."""
        if ranges_of is None:
            return cls()
        each = zip(*[ranges_of(dim) for dim in dims], strict=True)
        return cls([(max(least for least, _ in same), min(most for _, most in same)) for same in each])

    def __repr__(self) -> str:
        return f"<Sizes of {self._ranges or 'any'}, {self.steps} from one power of two to the next>"

    @property
    def largest(self) -> int | None:
        """The largest size that the model supports; ``None`` if there is no limit."""
        return self._ranges[-1][1] if self._ranges else None

    def rounded(self, size: int) -> int | None:
        """Return the size to pad a row to; ``None`` if it is beyond the largest size."""
        power = 1 << (size - 1).bit_length() if size > 1 else 1
        step = max(power // 2 // self.steps, 1)
        padded = max(-(-size // step) * step, 1)
        if not self._ranges:
            return padded if self.proven is None else min(padded, max(size, self.proven))
        for least, most in self._ranges:
            if size <= most:
                return min(max(padded, least), most)
        return None

    def ran(self, size: int) -> bool:
        """Note that rows of a size ran; return whether this changes the sizes to pad to."""
        if self.proven is None or size <= self.proven or self._ranges:
            return False
        self.proven = size
        return True


@dataclass(frozen=True, slots=True)
class Filled:
    """An input that the engine fills if a caller leaves it out.

    :param length_of: the dimension whose size it has as its value; ``None`` for a mask.
    """

    spec: TensorSpec
    length_of: str | None

    def array(self, rows: int, symbols: Mapping[str, int]) -> Array:
        """Return the read-only rows for a request, before padding: ones, or the length.

        All elements share one place in memory, so large requests take no memory here.
        """
        dims = self.spec.resolve(symbols)
        assert dims is not None, "the sizes of its dimensions come from other inputs"
        value = 1 if self.length_of is None else symbols[self.length_of]
        return np.broadcast_to(np.array(value, self.spec.dtype), (rows, *dims))


class Fit(NamedTuple):
    """How the rows of one request fit into a batch."""

    dims: tuple[Dims, ...]
    """The dimensions of one row of each input."""
    corners: tuple[tuple[slice, ...], ...]
    """For each input, the part of the batch's rows that the request fills; the rest is padding."""
    cuts: dict[str, tuple[slice, ...]]
    """For each output to cut back, the part of the batch's rows without padding."""


class Padding:
    """The dimensions and inputs to pad for one model, and the values to pad with.

    :param pad: the sizes of each dimension to pad, rising. If no option asks for it, and the engine chooses
        them, :class:`Sizes`; rows that cannot be padded then run as they are given.
    :param pad_with: the number to pad an input with. Default: 0. The engine fills an input with ``mask`` or
        ``length``.
    :raises OptionsError: for names that the model does not have, and values that do not fit.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        pad: Mapping[str, Any],
        pad_with: Mapping[str, int | float | str] = FrozenDict(),
    ) -> None:
        self._name = name
        self._inputs = tuple(inputs)
        varying = varying_dims(inputs)
        self._varying, self._names = varying, set(varying)
        groups = {names: tuple(name.strip() for name in names.split("=")) for names in pad}
        self._same = list(groups.values())
        self._dims: dict[str, Any] = {dim: pad[names] for names, dims in groups.items() for dim in dims}
        """The sizes of each dimension to pad."""
        named = [name for names in self._same for name in names]
        if len(self._dims) != len(named):
            twice = next(name for name in named if named.count(name) > 1)
            raise OptionsError(f"pad names the dimension {twice!r} twice: it can have one list of sizes")
        unknown = [dim for dim in self._dims if dim not in varying]
        if unknown:
            raise OptionsError(
                f"pad names the dimension {unknown[0]!r}, but the dimensions of {name!r} that vary are: "
                f"{', '.join(map(repr, varying)) or 'none'}. asynctrt inspect shows a model's dimensions"
            )
        by_name = {spec.name: spec for spec in inputs}
        unknown = [input_ for input_ in pad_with if input_ not in by_name]
        if unknown:
            raise OptionsError(
                f"pad_with names the input {unknown[0]!r}, but the inputs of {name!r} are: "
                f"{', '.join(map(repr, by_name))}"
            )
        self.chosen: dict[tuple[str, ...], Sizes] = {
            dims: pad[names] for names, dims in groups.items() if isinstance(pad[names], Sizes)
        }
        """The sizes that the options leave to the engine: all of them or none. A key has the names of all
        dimensions that share them."""
        self.is_default = bool(self.chosen)
        self.changes = 0
        """How often rows of some size have become padded to another one."""
        self.filled = tuple(
            self._filled(by_name[input_], value)
            for input_, value in pad_with.items()
            if isinstance(value, str)
        )
        self.values: tuple[Any, ...] = tuple(self._value(spec, pad_with.get(spec.name, 0)) for spec in inputs)
        """The value to pad each input with."""
        given = {filled.spec.name for filled in self.filled}
        self.sources: dict[str, tuple[int, int]] = {}
        """Where to read the size of a dimension: the number of an input that callers give, and its axis."""
        for number, spec in enumerate(inputs):
            for axis, dim in enumerate(spec.dims, start=1):
                if isinstance(dim, str) and spec.name not in given:
                    self.sources.setdefault(dim, (number, axis))
        for names in self._same:
            known = [self.sources[dim] for dim in names if dim in self.sources]
            for dim in names if known else ():
                self.sources.setdefault(dim, known[0])
        self._check_sources()
        self._cuts = {spec.name: spec.dims for spec in outputs if any(dim in self._dims for dim in spec.dims)}
        self._repeated = {dim for dims in self._same for dim in dims[1:]}
        self._fits: dict[tuple[Dims, ...], Fit | None] = {}

    @classmethod
    def of(
        cls,
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        options: Options,
    ) -> "Padding | None":
        """Return the padding that the options ask for; ``None`` if they ask for no padding."""
        if not options.pad or options.pad == OFF:
            return None
        assert isinstance(options.pad, Mapping), "it was converted by its check"
        return cls(name, inputs, outputs, options.pad, options.pad_with or FrozenDict())

    @staticmethod
    def groups_of(inputs: Sequence[TensorSpec], ranges_of: RangesOf | None) -> list[str]:
        """Return the dimensions that may be padded by default, as the option ``pad`` names them.

        Dimensions without names count as one if the model supports the same sizes of all of them.
        """
        ranges_of = ranges_of or (lambda _: ())
        varying = varying_dims(inputs)
        nameless = _nameless(inputs)
        named = [dim for dim in varying if dim not in nameless]
        if len({tuple(ranges_of(dim)) for dim in nameless}) == 1:
            named.append("=".join(nameless))
        return named

    def __repr__(self) -> str:
        return f"<Padding of {self._name!r} {self._dims}>"

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """All shapes of batches, as in their keys; empty unless the options give all dimensions' sizes."""
        if self.is_default or not self._dims.keys() >= set(self._varying):
            return ()
        shapes = []
        for sizes in product(*(self._dims[dims[0]] for dims in self._same)):
            size_of = {dim: int(size) for dims, size in zip(self._same, sizes, strict=True) for dim in dims}
            shapes.append(tuple((dim, size_of[dim]) for dim in self._varying))
        return tuple(shapes)

    def key_of(self, symbols: Mapping[str, int]) -> BatchKey:
        """Return the key of batches for rows of these sizes, each rounded up to the next size to pad to.

        :raises InputError: for a size above the largest, and if dimensions that must be equal differ.
        """
        if self.is_default and not self._fits_all(symbols):
            return BatchKey(tuple(symbols.items()))
        for names in self._same:
            if len({symbols[dim] for dim in names if dim in symbols}) > 1:
                raise InputError(
                    f"{' and '.join(map(repr, names))} are padded as one dimension, given "
                    f"{', '.join(str(symbols.get(dim)) for dim in names)}. Give them the same size"
                )
        return BatchKey(
            tuple(
                [
                    (dim, self._rounded(dim, size) if dim in self._dims else size)
                    for dim, size in symbols.items()
                ]
            )
        )

    def _fits_all(self, symbols: Mapping[str, int]) -> bool:
        """Return whether rows of these sizes can be padded."""
        return self.knows(tuple(symbols.items())) and all(
            sizes.rounded(symbols[dims[0]]) is not None for dims, sizes in self.chosen.items()
        )

    def knows(self, shape: Hashable) -> bool:
        """Return whether a batch's shape has the dimensions that the model names, each with one size.

        Rows of another shape run as they are, and so do rows that are empty without padding.
        """
        assert isinstance(shape, tuple)
        sizes = dict(shape)
        return sizes.keys() == self._names and all(
            len({sizes[dim] for dim in dims}) == 1 and sizes[dims[0]] > 0 for dims in self._same
        )

    def holds(self, shape: Hashable, other: Hashable) -> bool:
        """Return whether rows of the shape ``other`` can be padded to ``shape``."""
        assert isinstance(shape, tuple)
        assert isinstance(other, tuple)
        if not (self.knows(shape) and self.knows(other)):
            return False
        for (dim, size), (name, own) in zip(shape, other, strict=True):
            if dim != name or own > size or (own < size and dim not in self._dims):
                return False
        return True

    def ran(self, shape: Hashable) -> None:
        """Note that a batch of a shape ran: from now on, other rows may be padded to its sizes."""
        assert isinstance(shape, tuple)
        for dim, size in shape:
            if isinstance(sizes := self._dims.get(dim), Sizes):
                self.changes += sizes.ran(size)

    def pads(self, dim: str) -> bool:
        """Return whether a dimension is padded."""
        return dim in self._dims

    def sizes_given(self, dim: str) -> tuple[int, ...]:
        """Return the sizes that the options give for a dimension, rising; empty if they give none."""
        return () if self.is_default else tuple(map(int, self._dims.get(dim, ())))

    def units_of(self, shape: Hashable) -> int:
        """Return the cost of a row of this shape in units: the product of its dynamic sizes."""
        assert isinstance(shape, tuple)
        return prod([size for dim, size in shape if dim not in self._repeated])

    def fit(self, dims: tuple[Dims, ...]) -> Fit | None:
        """Return how rows fit into a batch, given the dimensions of one row of each input.

        :returns: ``None`` if the inputs contradict each other.
        """
        # Not `lru_cache`: it would hold this object, so that only the collector could free both.
        if dims not in self._fits:
            if len(self._fits) >= SHAPES_MAX:
                self._fits.clear()
            self._fits[dims] = self._fit(dims)
        return self._fits[dims]

    def _fit(self, dims: tuple[Dims, ...]) -> Fit | None:
        if any(len(given) != len(spec.dims) for spec, given in zip(self._inputs, dims, strict=True)):
            return None
        sizes = {dim: dims[number][axis - 1] for dim, (number, axis) in self.sources.items()}
        if any(spec.resolve(sizes) != given for spec, given in zip(self._inputs, dims, strict=True)):
            return None
        every = slice(None)
        return Fit(
            dims,
            tuple((every, *map(slice, given)) for given in dims),
            {
                name: (every, *[slice(sizes[dim]) if dim in self._dims else every for dim in own])
                for name, own in self._cuts.items()
            },
        )

    def _rounded(self, dim: str, given: int) -> int:
        sizes = self._dims[dim]
        if isinstance(sizes, Sizes):
            return sizes.rounded(given) or given
        for size in sizes:
            if size >= given:
                return int(size)
        number, axis = self.sources[dim]
        raise InputError(
            f"input {self._inputs[number].name!r} has size {given} on axis {axis} ({dim!r}), which this "
            f"engine pads to {', '.join(map(str, sizes))}: {sizes[-1]} is the most. Shorten it, or open the "
            f"engine with a larger size: pad={{{dim!r}: (..., {given})}}"
        )

    def _dim_of_length(self, value: str) -> str:
        """Return the dimension that ``length`` refers to; an empty string if that is ambiguous."""
        return value.partition(":")[2] or (self._same[0][0] if len(self._same) == 1 else "")

    def _filled(self, spec: TensorSpec, value: str) -> Filled:
        if spec.dtype.kind not in "biuf":
            raise OptionsError(f"pad_with says that {spec.name!r} is a {value}, and it is {spec.dtype.name}")
        if value == MASK:
            if not any(dim in self._dims for dim in spec.dims):
                raise OptionsError(
                    f"pad_with says that {spec.name!r} is a mask, and none of its dimensions {spec.dims} is "
                    f"padded: {', '.join(self._dims)} are"
                )
            return Filled(spec, None)
        dim = self._dim_of_length(value)
        if dim not in self._dims:
            raise OptionsError(
                f"pad_with says that {spec.name!r} is a {value}, but not which padded "
                f"dimension has it. Write 'length:NAME', with one of: {', '.join(self._dims)}"
            )
        if not all(size == 1 for size in spec.dims):
            raise OptionsError(
                f"pad_with says that {spec.name!r} is a length, one for each row, but its rows have the "
                f"shape {spec.dims}"
            )
        longest = int(self._dims[dim][-1])
        if longest > _counts_to(spec.dtype):
            raise OptionsError(
                f"pad_with says that {spec.name!r} is a length, which is up to {longest}, and its dtype "
                f"{spec.dtype.name} does not hold every one"
            )
        return Filled(spec, dim)

    def _value(self, spec: TensorSpec, value: float | str) -> Any:
        if isinstance(value, str):
            value = 0
        if spec.dtype.kind not in "biufc":
            if value:
                raise OptionsError(f"pad_with is {value} for {spec.name!r}, whose dtype is {spec.dtype.name}")
            return np.zeros((), spec.dtype)[()]
        try:
            with np.errstate(all="ignore", over="raise", invalid="raise"):
                converted = np.array(value).astype(spec.dtype)
        except (FloatingPointError, OverflowError):
            converted = None
        exact = converted is not None and (spec.dtype.kind in "fc" or bool(converted == value))
        if converted is None or not exact:
            raise OptionsError(
                f"pad_with is {show(value)} for {spec.name!r}, whose dtype {spec.dtype.name} does not hold it"
            )
        return converted[()]

    def _check_sources(self) -> None:
        """Check that each size can be read from an input that callers give."""
        for dim in (*self._dims, *varying_dims(one.spec for one in self.filled)):
            if dim not in self.sources:
                raise OptionsError(
                    f"the size of {dim!r} is not known: every input of {self._name!r} that has it is filled "
                    "by the engine, as pad_with says. Leave one of them out of it"
                )


def _nameless(inputs: Sequence[TensorSpec]) -> list[str]:
    """Return the dynamic dimensions to which the model gives no names."""
    return [
        dim
        for spec in inputs
        for axis, dim in enumerate(spec.dims, start=1)
        if isinstance(dim, str) and dim == f"{spec.name}.{axis}"
    ]


def _counts_to(dtype: np.dtype[Any]) -> int:
    """Return the largest N such that a numeric dtype represents every integer from 0 to N."""
    if dtype.kind == "f":
        return 1 << int(np.finfo(dtype).nmant) + 1
    return 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of integers in rising order; join ranges that touch, and leave out empty ones."""
    found: list[tuple[int, int]] = []
    for least, most in sorted(ranges):
        if least > most:
            continue
        if found and least <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], most)
        else:
            found.append((least, most))
    return tuple(found)
