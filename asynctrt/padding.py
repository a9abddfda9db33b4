"""Padding: rows whose lengths differ are brought to a few common sizes, so that they share batches.

Arrays stay as their callers gave them until they are written into a slab. Only the key of their batch says to
which sizes they will be padded there; outputs are cut back to what each request had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np

from asynctrt.errors import InputError, OptionsError
from asynctrt.options import Options
from asynctrt.pad_options import MASK
from asynctrt.scheduling.key import BatchKey
from asynctrt.tensors import Array, Dims, TensorSpec
from asynctrt.validation import show

FITS_MAX: Final = 4096
"""Shapes of requests that are remembered."""


@dataclass(frozen=True, slots=True)
class Filled:
    """An input that the engine fills where a caller leaves it out.

    :param dims: the names or sizes of its dimensions.
    :param length_of: the dimension whose size it says; ``None`` for a mask.
    """

    spec: TensorSpec
    length_of: str | None

    def array(self, rows: int, symbols: Mapping[str, int]) -> Array:
        """Return the rows for a request, before they are padded: ones, or the length. Nobody writes to it.

        All its elements are one in memory, so that what callers ask for takes none.
        """
        dims = self.spec.resolve(symbols)
        assert dims is not None, "the sizes of its dimensions come from other inputs"
        value = 1 if self.length_of is None else symbols[self.length_of]
        return np.broadcast_to(np.array(value, self.spec.dtype), (rows, *dims))


class Fit(NamedTuple):
    """How the rows of one request lie within those of a batch."""

    dims: tuple[Dims, ...]
    """The dimensions of one row of each input."""
    corners: tuple[tuple[slice, ...], ...]
    """The part of its rows that each input takes; the rest is padding."""
    cuts: dict[str, tuple[slice, ...]]
    """The part of its rows that is its own, for each output that is cut back."""


class Padding:
    """What is padded of one model, and with what.

    :param pad: the sizes of each dimension that is padded, rising.
    :param pad_with: what inputs are padded with, where that is not 0: a number; ``mask`` and ``length`` are
        filled by the engine.
    :raises OptionsError: for names that the model does not have, and values that do not fit.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        pad: Mapping[str, tuple[int, ...]],
        pad_with: Mapping[str, int | float | str],
    ) -> None:
        self._name = name
        self._inputs = tuple(inputs)
        self._same = [tuple(name.strip() for name in names.split("=")) for names in pad]
        self.sizes = {name: pad[names] for names in pad for name in map(str.strip, names.split("="))}
        """The sizes of each dimension that is padded, rising."""
        named = [name for names in self._same for name in names]
        if len(self.sizes) != len(named):
            twice = next(name for name in named if named.count(name) > 1)
            raise OptionsError(f"pad names the dimension {twice!r} twice: it can have one list of sizes")
        varying = dict.fromkeys(dim for spec in inputs for dim in spec.dims if isinstance(dim, str))
        unknown = [dim for dim in self.sizes if dim not in varying]
        if unknown:
            raise OptionsError(
                f"pad names the dimension {unknown[0]!r}, and those that vary in the inputs of {name!r} are: "
                f"{', '.join(map(repr, varying)) or 'none'}. asynctrt inspect shows a model's dimensions"
            )
        by_name = {spec.name: spec for spec in inputs}
        unknown = [input_ for input_ in pad_with if input_ not in by_name]
        if unknown:
            raise OptionsError(
                f"pad_with names the input {unknown[0]!r}, and those of {name!r} are: "
                f"{', '.join(map(repr, by_name))}"
            )
        self.filled = tuple(
            self._filled(by_name[input_], value)
            for input_, value in pad_with.items()
            if isinstance(value, str)
        )
        self.values: tuple[Any, ...] = tuple(self._value(spec, pad_with.get(spec.name, 0)) for spec in inputs)
        """What each input is padded with."""
        given = {filled.spec.name for filled in self.filled}
        self.sources: dict[str, tuple[int, int]] = {}
        """Where the size of a dimension is read: the number of an input that callers give, and its axis."""
        for number, spec in enumerate(inputs):
            for axis, dim in enumerate(spec.dims, start=1):
                if isinstance(dim, str) and spec.name not in given:
                    self.sources.setdefault(dim, (number, axis))
        for names in self._same:
            known = [self.sources[dim] for dim in names if dim in self.sources]
            for dim in names if known else ():
                self.sources.setdefault(dim, known[0])
        self._check_sources()
        self._cuts = {spec.name: spec.dims for spec in outputs if any(dim in self.sizes for dim in spec.dims)}
        self._fits: dict[tuple[Dims, ...], Fit | None] = {}

    @classmethod
    def of(
        cls, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], options: Options
    ) -> "Padding | None":
        """Return what the options pad of a model; ``None`` for nothing."""
        pad, pad_with = options.pad, options.pad_with or {}
        if not pad:
            return None
        return cls(name, inputs, outputs, cast("Mapping[str, tuple[int, ...]]", pad), pad_with)

    def __repr__(self) -> str:
        return f"<Padding of {self._name!r} {self.sizes}>"

    def key_of(self, symbols: Mapping[str, int]) -> BatchKey:
        """Return the key of the batches for rows of these sizes: each is rounded up to the next.

        :raises InputError: for a size above the largest, and where two that are to be the same are not.
        """
        for names in self._same:
            if len({symbols[dim] for dim in names if dim in symbols}) > 1:
                raise InputError(
                    f"{' and '.join(map(repr, names))} are padded as one dimension, given "
                    f"{', '.join(str(symbols.get(dim)) for dim in names)}. Give them the same size"
                )
        return BatchKey(
            tuple(
                [
                    (dim, self._rounded(dim, size) if dim in self.sizes else size)
                    for dim, size in symbols.items()
                ]
            )
        )

    def fit(self, dims: tuple[Dims, ...]) -> Fit | None:
        """Return how rows lie within those of a batch, from the dimensions of one row of each input.

        :returns: ``None`` if they contradict each other.
        """
        try:
            return self._fits[dims]
        except KeyError:
            if len(self._fits) >= FITS_MAX:
                self._fits.clear()
            found = self._fits[dims] = self._fit(dims)
            return found

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
                name: (every, *[slice(sizes[dim]) if dim in self.sizes else every for dim in own])
                for name, own in self._cuts.items()
            },
        )

    def _rounded(self, dim: str, given: int) -> int:
        for size in self.sizes[dim]:
            if size >= given:
                return size
        number, axis = self.sources[dim]
        sizes = self.sizes[dim]
        raise InputError(
            f"input {self._inputs[number].name!r} has size {given} on axis {axis} ({dim!r}), which this "
            f"engine pads to {', '.join(map(str, sizes))}: {sizes[-1]} is the most. Shorten it, or open the "
            f"engine with a larger size: pad={{{dim!r}: (..., {given})}}"
        )

    def _filled(self, spec: TensorSpec, value: str) -> Filled:
        if spec.dtype.kind not in "biuf":
            raise OptionsError(f"pad_with says that {spec.name!r} is a {value}, and it is {spec.dtype.name}")
        if value == MASK:
            if not any(dim in self.sizes for dim in spec.dims):
                raise OptionsError(
                    f"pad_with says that {spec.name!r} is a mask, and none of its dimensions {spec.dims} is "
                    f"padded: {', '.join(self.sizes)} are"
                )
            return Filled(spec, None)
        dim = value.partition(":")[2] or (self._same[0][0] if len(self._same) == 1 else "")
        if dim not in self.sizes:
            raise OptionsError(
                f"pad_with says that {spec.name!r} is a {value}, and does not say of which of the dimensions "
                f"that are padded. Write 'length:NAME', with one of: {', '.join(self.sizes)}"
            )
        if not all(size == 1 for size in spec.dims):
            raise OptionsError(
                f"pad_with says that {spec.name!r} is a length, of which a row has one; its rows have the "
                f"shape {spec.dims}"
            )
        if (longest := self.sizes[dim][-1]) > _counts_to(spec.dtype):
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
            with np.errstate(over="raise", invalid="raise"):
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
        """Check that each size is told by an input that callers give."""
        needed = [*self.sizes, *(dim for one in self.filled for dim in one.spec.dims if isinstance(dim, str))]
        for dim in needed:
            if dim not in self.sources:
                raise OptionsError(
                    f"the size of {dim!r} is not known: every input of {self._name!r} that has it is filled "
                    "by the engine, as pad_with says. Leave one of them out of it"
                )


def _counts_to(dtype: np.dtype[Any]) -> int:
    """Return the number up to which a dtype of numbers holds every whole one."""
    if dtype.kind == "f":
        return 1 << int(np.finfo(dtype).nmant) + 1
    return 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)
