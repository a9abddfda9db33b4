"""Find out by trying which input dimension each dynamic dimension of an output follows.

An engine reports -1 for a dynamic dimension, but not where its value comes from. So this sets many input
shapes on a context that never runs, and lets it infer the output shapes. An output dimension that equals the
same input dimension every time follows it. The result is checked again for every new shape of a batch, so a
wrong guess leads to an error, and never to a write beyond the bound memory.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from asynctrt.backends.tensorrt.abilities import Abilities
from asynctrt.backends.tensorrt.engine import REBUILD, Profile, Signature, shape_of
from asynctrt.backends.tensorrt.messages import ErrorRecorder, TensorRTErrors
from asynctrt.errors import ModelError
from asynctrt.tensors import Dims, TensorSpec

ROWS: Final = ""
"""The name of the batch axis among the names of dimensions."""

Values = Mapping[str, int]
"""The value of each dynamic dimension of the inputs, including the batch axis."""


class OutputProbe:
    """Output shapes that a context infers for many input shapes."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._seen: list[tuple[Values, dict[str, Dims]]] = []
        self.refused: TensorRTErrors | None = None
        """The last errors of the engine, if any."""

    def observe(
        self, context: Any, stream_handle: int, abilities: Abilities, recorder: ErrorRecorder
    ) -> None:
        """Try shapes of every profile. Where the engine refuses one, this takes its errors."""
        for profile in self._signature.profiles:
            try:
                if not context.set_optimization_profile_async(profile.index, stream_handle):
                    continue
            except RuntimeError:
                continue
            for values in _values(self._signature, profile):
                try:
                    shapes = self._infer(context, values, abilities)
                except RuntimeError:
                    shapes = None  # Incompatible inputs.
                # TensorRT 8 only reports them.
                refused = recorder.take()
                if shapes is not None and not refused:
                    self._seen.append((values, shapes))
                self.refused = refused or self.refused

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs, with dynamic dimensions named after the input dimensions that they follow."""
        return tuple(self._output(spec) for spec in self._signature.outputs)

    def _infer(self, context: Any, values: Values, abilities: Abilities) -> dict[str, Dims] | None:
        for spec in self._signature.inputs:
            shape = tuple(values[dim] if isinstance(dim, str) else dim for dim in spec.dims)
            if not context.set_input_shape(spec.name, (values[ROWS], *shape)):
                return None
        if not abilities.infers_shapes(context):
            return None
        return {spec.name: shape_of(context.get_tensor_shape(spec.name)) for spec in self._signature.outputs}

    def _output(self, spec: TensorSpec) -> TensorSpec:
        model = self._signature.model
        followed = [self._followed(spec, axis) for axis in range(1 + len(spec.dims))]
        if self._seen and ROWS not in followed[0]:
            raise ModelError(
                f"the first axis of output {spec.name!r} of {model!r} does not count rows: it is "
                f"{self._example(spec)}, so its rows cannot be separated. {REBUILD} with a first axis that "
                "counts rows on every output; results found in a row belong on the second axis"
            )
        dims: list[int | str] = []
        for axis, dim in enumerate(spec.dims, start=1):
            names = [name for name in followed[axis] if name != ROWS]
            if isinstance(dim, int):
                dims.append(dim)
            elif names:
                dims.append(names[0])
            elif ROWS in followed[axis] and self._rows_vary:
                raise ModelError(
                    f"output {spec.name!r} of {model!r} has the batch size on axis {axis} too, so rows of "
                    "one batch would see each other, and requests cannot share a batch"
                )
            else:
                dims.append(dim)
        return TensorSpec(spec.name, spec.dtype, tuple(dims))

    def _followed(self, spec: TensorSpec, axis: int) -> list[str]:
        """Return the input dimensions that were equal to this one every time."""
        if not self._seen:
            return []
        return [
            name
            for name in self._seen[0][0]
            if all(values[name] == _at(shapes[spec.name], axis) for values, shapes in self._seen)
        ]

    @property
    def _rows_vary(self) -> bool:
        return len({values[ROWS] for values, _ in self._seen}) > 1

    def _example(self, spec: TensorSpec) -> str:
        values, shapes = self._seen[-1]
        first = _at(shapes[spec.name], 0)
        found = "known only when the batch has run" if first < 0 else str(first)
        return f"{found} for {values[ROWS]} rows"


def _at(shape: Dims, axis: int) -> int:
    return shape[axis] if axis < len(shape) else -1


def _values(signature: Signature, profile: Profile) -> Iterator[Values]:
    """Yield values to try within one profile: each dimension alone, and all of them together."""
    samples: dict[str, list[int]] = {ROWS: []}
    for spec, (low, usual, high) in zip(signature.inputs, profile.shapes, strict=True):
        for name, axis in ((ROWS, 0), *((dim, axis) for axis, dim in enumerate(spec.dims, start=1))):
            if isinstance(name, str):
                samples[name] = _samples(low[axis], usual[axis], high[axis])
    middle = {name: tried[len(tried) // 2] for name, tried in samples.items()}
    for name, tried in samples.items():
        for value in tried:
            yield {**middle, name: value}
    # Inputs that must agree on a dimension accept only the middle of the above.
    lengths = {name: tried for name, tried in samples.items() if name != ROWS}
    for step in range(max((len(tried) for tried in lengths.values()), default=0)):
        together = {name: tried[min(step, len(tried) - 1)] for name, tried in lengths.items()}
        yield {ROWS: middle[ROWS], **together}


def _samples(low: int, usual: int, high: int) -> list[int]:
    """Return values to try for one dimension: even and odd, at both ends, in the middle, near the optimum."""
    half = (low + high) // 2
    near = {low, low + 1, half, half + 1, usual - 1, usual, usual + 1, high - 1, high}
    return sorted(value for value in near if low <= value <= high)
