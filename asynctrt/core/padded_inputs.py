"""The check of inputs that will be padded to common sizes, or that callers may leave out."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from asynctrt.core.inputs import Checked, InputCheck, Inputs
from asynctrt.errors import InputError, show
from asynctrt.options import Options
from asynctrt.runtime.pad_sizes import Padding
from asynctrt.scheduling.key import FIXED_SHAPE, KEYS_KEPT_MAX, BatchKey
from asynctrt.tensors import Array, Dims, TensorSpec, check_shape, split_shared


class PaddedInputCheck(InputCheck):
    """Checks inputs that will be padded, and fills inputs that callers leave out.

    :param padding: the dimensions and inputs to pad.
    :param keeps_shapes: whether keys have the shapes as given, because the workers will pad.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], padding: Padding, *, keeps_shapes: bool = False, **kw: Any
    ) -> None:
        super().__init__(specs, **kw)
        self._padding = padding
        self._keeps_shapes = keeps_shapes
        self._asked = tuple(
            name for name in self._names if name not in {filled.spec.name for filled in padding.filled}
        )
        with_rows = {spec.name for spec in self._with_rows}
        self._given_with_rows = tuple(spec for spec in self._given if spec.name in with_rows)
        # Masks and lengths, for later requests of the same shape.
        self._kept: dict[tuple[int, Dims], dict[str, Array]] = {}
        self._changes = padding.changes

    def validate(self, inputs: Inputs) -> Checked:
        """Add the inputs that were left out, then do as :meth:`InputCheck.validate`.

        :raises InputError: as there, and for a dimension longer than the largest size.
        """
        if self._padding.changes != self._changes:
            self._changes = self._padding.changes
            self._known.clear()
        if self._padding.filled:
            inputs = self._fill(inputs)
        return super().validate(inputs)

    def key_of(self, shapes: Sequence[Dims]) -> BatchKey:
        """Return the key of a batch of padded rows, given the shape of one row of each input.

        :raises InputError: if two inputs disagree on a dimension, or a dimension is too long.
        """
        symbols = self.symbols(shapes)
        key = self._padding.key_of(symbols) if symbols else FIXED_SHAPE
        if self._keeps_shapes:
            return BatchKey(tuple(symbols.items()))
        if self._padding.is_default and self._check_key is not None:
            try:
                self._check_key(key)
            except InputError:
                # Each padded size fits a profile, but no profile fits them all. The given sizes may fit one.
                return BatchKey(tuple(symbols.items()))
        return key

    def key_of_dims(self, dims: Mapping[str, Dims]) -> BatchKey:
        """Return the key of batches for rows of these dimensions.

        :raises InputError: as in :class:`InputCheck`, and for dimensions that would be padded.
        """
        if self._padding.is_default:
            return super().key_of(self._shapes_of(dims))
        key = super().key_of_dims(dims)
        assert isinstance(key.shape, tuple)
        sizes = dict(key.shape)
        for name, given in dims.items():
            spec = next(spec for spec in self.specs if spec.name == name)
            if spec.resolve(sizes) != tuple(given):
                raise InputError(
                    f"rows of input {name!r} of shape {tuple(given)} are padded to {spec.resolve(sizes)}: "
                    "name that shape"
                )
        return key

    def key_as_given(self, arrays: Sequence[Array], key: BatchKey) -> BatchKey:
        """Return the key of checked arrays that are not padded."""
        with_rows = {spec.name: array.shape[1:] for spec, array in zip(self._with_rows, arrays, strict=True)}
        if len(with_rows) < len(self.specs):
            return key  # With shared inputs the sizes are as given already, or have no part of them.
        return key._replace(shape=super().key_of([with_rows[spec.name] for spec in self.specs]).shape)

    def _check(self, inputs: Inputs) -> Checked:
        arrays, rows, key = super()._check(inputs)
        if key.on_device:
            symbols = self.symbols([array.shape[1:] for array in arrays])
            if self._padding.is_default:
                return arrays, rows, key._replace(shape=tuple(symbols.items()))
            if key.shape != tuple(symbols.items()):
                raise InputError(
                    f"rows on the device are not padded: they have {show(symbols)}, and the engine runs "
                    f"{show(key.shape)}. Pad them there, or give arrays on the host"
                )
        return arrays, rows, key

    def _fill(self, inputs: Inputs) -> Inputs:
        """Return the inputs with the left-out ones filled. Errors in the others are reported later."""
        if isinstance(inputs, Mapping):
            missing = [filled for filled in self._padding.filled if filled.spec.name not in inputs]
            if not missing:
                return inputs
            named = dict(inputs)
        elif len(self._asked) == 1:
            missing, named = list(self._padding.filled), {self._asked[0]: inputs}
        else:
            return inputs
        symbols: dict[str, int] = {}
        rows = 0
        for dim, (number, axis) in self._padding.sources.items():
            spec = self._given_with_rows[number]
            if spec.name not in named:
                return named
            array = named[spec.name] = self._as_array(spec, named[spec.name])
            check_shape(spec, array.shape)
            placed = self._placed(spec, array)
            symbols[dim] = placed.shape[axis]
            rows = len(placed)
        kept = self._kept.get((rows, tuple(symbols.values())))
        if kept is None:
            if len(self._kept) >= KEYS_KEPT_MAX:
                self._kept.clear()
            self._padding.key_of(symbols)  # Refuse a dimension that is too long before allocating for it.
            kept = self._kept[rows, tuple(symbols.values())] = {
                filled.spec.name: given.as_given(filled.array(rows, symbols))
                for filled in self._padding.filled
                for given in self._given_with_rows
                if given.name == filled.spec.name
            }
        return named | {filled.spec.name: kept[filled.spec.name] for filled in missing}


def front_check(
    name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], options: Options
) -> InputCheck:
    """Return the check for an engine whose workers pad rows according to its options."""
    padding = Padding.of(name, split_shared(inputs)[0], outputs, options)
    create = InputCheck if padding is None else partial(PaddedInputCheck, padding=padding, keeps_shapes=True)
    return create(
        inputs,
        ignores_extra=options.ignore_extra,
        repeats_shared=True,
    )
