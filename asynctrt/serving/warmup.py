"""Run requests through an engine before clients may, so that the first client's is not slow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from asynctrt._util.files import read_regular
from asynctrt._util.loops import in_lost_thread
from asynctrt.engine import Engine
from asynctrt.errors import AsynctrtError, ModelError
from asynctrt.kserve.datatypes import TEXT, check_nbytes, datatype_of, read_tensor
from asynctrt.tensors import Array, TensorSpec, cast

TENSOR_NBYTES_MAX: Final = 1 << 30
"""The most bytes of one input of a warm-up request."""


@dataclass(frozen=True, slots=True)
class WarmUpTensor:
    """One input of a warm-up request: its datatype, the dims of a row or of the whole tensor, and the source
    of its values."""

    datatype: str
    dims: tuple[int, ...]
    is_random: bool = False
    path: Path | None = None
    """A file with the raw values of all rows. Without one, the values are zeros unless random."""
    within: Path | None = None
    """The folder that no link may lead out of."""

    def read(self, spec: TensorSpec, rows: int) -> Array:
        """Return the values of ``rows`` rows, or of the whole tensor if ``dims`` describe it. Blocks.

        :raises ModelError: if they cannot be read, or the model does not accept them.
        """
        if self.datatype != datatype_of(spec):
            raise ModelError(f"input {spec.name!r} is {datatype_of(spec)}, not {self.datatype}")
        shape = stated_shape(spec, self.dims, rows)
        if shape is None:
            raise ModelError(f"{row_text('input', spec)}, not {list(self.dims)}")
        nbytes = math.prod(shape) * spec.dtype.itemsize
        if nbytes > TENSOR_NBYTES_MAX:
            raise ModelError(
                f"input {spec.name!r} has {nbytes} bytes; at most {TENSOR_NBYTES_MAX} are accepted"
            )
        if self.path is None:
            return filled(spec, shape, is_random=self.is_random)
        try:
            raw = read_regular(self.path, TENSOR_NBYTES_MAX, within=self.within)
        except OSError as error:
            raise ModelError(
                f"the values of input {spec.name!r} cannot be read from {self.path.name!r}: {error.strerror}"
            ) from error
        check_nbytes(spec, shape, len(raw))
        return read_tensor(spec, shape, raw, 0, len(raw))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A request sent ``count`` times to an engine before it is ready."""

    name: str
    rows: int
    count: int
    tensors: Mapping[str, WarmUpTensor] = field(hash=False)

    async def run(self, engine: Engine) -> None:
        """Send the request ``count`` times, one after the other.

        :raises ModelError: if the model does not accept the request, or fails with it.
        """
        specs = {spec.name: spec for spec in engine.inputs}
        if specs.keys() != self.tensors.keys():
            raise ModelError(
                f"warm-up {self.name!r} has the inputs {', '.join(sorted(self.tensors)) or 'none'}, and the "
                f"model {', '.join(sorted(specs))}"
            )
        try:
            arrays = await in_lost_thread(
                lambda: {name: tensor.read(specs[name], self.rows) for name, tensor in self.tensors.items()}
            )
            for _ in range(self.count):
                await engine.infer(arrays)
        except AsynctrtError as error:
            raise ModelError(f"warm-up {self.name!r} failed: {error}") from error


def filled(spec: TensorSpec, shape: Sequence[int], *, is_random: bool = False) -> Array:
    """Return zeros, or random values, of a tensor's dtype. Strings are empty."""
    if spec.dtype.kind == "O":
        return np.full(shape, "", object)
    if not is_random or spec.dtype.kind in TEXT:
        return np.zeros(shape, spec.dtype)
    generator = np.random.default_rng(0)
    if spec.dtype.kind in "iub":
        return generator.integers(0, 2, shape).astype(spec.dtype)
    return cast(generator.random(shape, np.float32), spec.dtype)


def stated_shape(spec: TensorSpec, dims: tuple[int, ...], rows: int) -> tuple[int, ...] | None:
    """Return the shape that stated dims mean: with ``rows`` rows if they describe a row.

    They may also describe the whole tensor; return ``None`` if they do neither. Any size, even -1, fits a
    dimension that the model leaves open.
    """
    if _fits(dims, spec.dims):
        return dims if spec.axis is None else (*dims[: spec.axis], rows, *dims[spec.axis :])
    return dims if _fits(dims, spec.shape("rows")) else None


def _fits(dims: tuple[int, ...], known: tuple[int | str, ...]) -> bool:
    return len(dims) == len(known) and all(
        isinstance(size, str) or dim == size for dim, size in zip(dims, known, strict=True)
    )


def row_text(side: str, spec: TensorSpec) -> str:
    """Return the dims that a configuration may state, worded for a message."""
    of_row = "" if spec.axis is None else "a row of "
    return f"{of_row}{side} {spec.name!r} is {list(spec.dims)}"
