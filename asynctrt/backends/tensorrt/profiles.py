"""Optimisation profiles: parsed from their notation, proposed for a network, and checked against its inputs.

TensorRT silently accepts a wrong name or order and fails later, so everything is checked here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asynctrt.errors import ModelError, OptionsError, show

SHAPE: Final = r"\d+(?:x\d+)*"
INPUT: Final = re.compile(rf"(?P<name>[^=]+)=(?P<shapes>{SHAPE}(?::{SHAPE}:{SHAPE})?)(?:,|$)")
"""One input of a profile. Names may contain any character except "=", including colons and commas."""

NOTATION: Final = "input=1x3x224x224:16x3x224x224:64x3x224x224"

SIZE_MAX: Final = 2**31 - 1

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]
"""The smallest, the optimal and the largest shape of an input."""


@dataclass(frozen=True, slots=True)
class NetworkTensor:
    """An input or output of a network that was parsed."""

    name: str
    dtype: str
    """TensorRT's name: ``FLOAT``."""
    shape: Shape
    """-1 for dynamic sizes."""
    dims: tuple[str | None, ...]
    """Names of dimensions, which plans do not keep."""
    is_shape_tensor: bool = False

    def name_of(self, axis: int) -> str:
        """Return the name of a dimension, or ``INPUT.AXIS`` if it has none."""
        return self.dims[axis] or f"{self.name}.{axis}"

    @property
    def is_dynamic(self) -> bool:
        """Whether any of its sizes is dynamic."""
        return -1 in self.shape


def profiles_of(
    given: Sequence[str],
    inputs: Sequence[NetworkTensor],
    rows_max: int,
    dims: Mapping[str, tuple[int, int, int]],
) -> tuple[dict[str, Range], ...]:
    """Return the profiles of a network: the given ones, or a proposed one; none if all sizes are fixed."""
    for one in inputs:
        if one.is_shape_tensor:
            raise ModelError(
                f"the values of input {one.name!r} are a shape, so requests with different values cannot "
                "share a batch. Make it a constant of the model, or derive it from the shape of another input"
            )
    if not given:
        return _propose(inputs, rows_max, dims)
    dynamic = [one for one in inputs if one.is_dynamic]
    if not dynamic:
        raise OptionsError(
            f"profiles are for dynamic sizes, and every size of {_named(inputs)} is fixed. Leave profiles out"
        )
    return tuple(_checked(parse_profile(text), text, inputs) for text in given)


def parse_profile(text: str) -> dict[str, Range]:
    """Parse a profile."""
    found: dict[str, Range] = {}
    position = 0
    while position < len(text):
        match = INPUT.match(text, position)
        if match is None or match["name"] in found:
            fault = "names an input twice" if match else f"cannot be read from {show(text[position:])} on"
            raise OptionsError(
                f"the profile {show(text)} {fault}. Write it as {NOTATION!r}: the smallest, the best and "
                "the largest shape, or one shape for all three; several inputs divided by commas"
            )
        shapes = [tuple(map(int, shape.split("x"))) for shape in match["shapes"].split(":")]
        low, best, high = shapes if len(shapes) > 1 else shapes * 3
        if not len(low) == len(best) == len(high) or not all(
            1 <= a <= b <= c <= SIZE_MAX for a, b, c in zip(low, best, high, strict=True)
        ):
            raise OptionsError(
                f"the shapes of {match['name']!r} in the profile {show(text)} must have as many dimensions "
                "as each other, each ≥ 1, and rise from the smallest to the best to the largest"
            )
        found[match["name"]] = (low, best, high)
        position = match.end()
    return found


def profile_text(profile: Mapping[str, Range]) -> str:
    """Return a profile in text notation."""
    return ",".join(
        f"{name}={':'.join('x'.join(map(str, shape)) for shape in shapes)}"
        for name, shapes in profile.items()
    )


def _checked(profile: dict[str, Range], text: str, inputs: Sequence[NetworkTensor]) -> dict[str, Range]:
    known = {one.name: one for one in inputs}
    unknown = [name for name in profile if name not in known]
    missing = [one.name for one in inputs if one.is_dynamic and one.name not in profile]
    if unknown or missing:
        fault = f"names {unknown}, which is not an input" if unknown else f"lacks {missing}"
        raise OptionsError(f"the profile {show(text)} {fault}. The model has {_named(inputs)}")
    for name, shapes in profile.items():
        shape = known[name].shape
        if any(
            len(one) != len(shape) or any(size not in (-1, at) for size, at in zip(shape, one, strict=True))
            for one in shapes
        ):
            raise OptionsError(
                f"the profile {show(text)} has other dimensions than the model for {name!r}, which is "
                f"{_written(known[name])}. Only sizes that are dynamic can be chosen"
            )
    return profile


def _propose(
    inputs: Sequence[NetworkTensor], rows_max: int, dims: Mapping[str, tuple[int, int, int]]
) -> tuple[dict[str, Range], ...]:
    """Return one profile for 1 to ``rows_max`` rows, optimal for the maximum, which full batches have."""
    dynamic = {
        one.name_of(axis): axis == 0 for one in inputs for axis, size in enumerate(one.shape) if size < 0
    }
    unknown = [name for name in dims if name not in dynamic]
    if unknown:
        raise OptionsError(
            f"dims names {unknown}, and the model's dynamic dimensions are {list(dynamic) or 'none'}: it has "
            f"{_named(inputs)}"
        )
    missing = [name for name, is_rows in dynamic.items() if not is_rows and name not in dims]
    if missing:
        example = " ".join(f"--dims {name}=1:128:512" for name in missing)
        raise OptionsError(
            f"the model has dynamic dimensions besides its rows, and nothing says how large they get: "
            f"{', '.join(missing)}. Give the smallest, the best and the largest size of each: {example}. It "
            f"has {_named(inputs)}"
        )
    profile = {
        one.name: _range(one, dict.fromkeys(dynamic, (1, rows_max, rows_max)) | dict(dims))
        for one in inputs
        if one.is_dynamic
    }
    return (profile,) if profile else ()


def _range(tensor: NetworkTensor, sizes: Mapping[str, tuple[int, int, int]]) -> Range:
    ranges = [
        sizes[tensor.name_of(axis)] if size < 0 else (size, size, size)
        for axis, size in enumerate(tensor.shape)
    ]
    low, best, high = zip(*ranges, strict=True)
    return low, best, high


def _named(inputs: Sequence[NetworkTensor]) -> str:
    return ", ".join(map(_written, inputs))


def _written(tensor: NetworkTensor) -> str:
    sizes = (tensor.name_of(axis) if size < 0 else str(size) for axis, size in enumerate(tensor.shape))
    return f"{tensor.name}[{', '.join(sizes)}]"
