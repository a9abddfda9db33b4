"""Read the tensors, the batch axis and the profiles of a deserialised engine.

An engine numbers its dimensions and has no names for them, so a dynamic dimension is named after its tensor,
``tokens.1``, unless the plan's manifest names it. Trying shows which dimension an output follows (see
``probe``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np

from asynctrt.backends.tensorrt.abilities import Abilities
from asynctrt.devices.base import aligned
from asynctrt.errors import InputError, InternalError, ModelError
from asynctrt.tensors import Dims, TensorSpec, varying_dims

DTYPES: Final = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""NumPy's names for TensorRT's types."""

REBUILD: Final = "Build the plan from a model"
"""How to get a plan with another batch axis, for messages."""

PACKED: Final = ("FP8", "INT4", "FP4", "E8M0")
"""Types that no array library on the host can hold."""


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimisation profile: the shapes it accepts, and the maximum enqueue memory that they need."""

    index: int
    enqueue_nbytes: int
    """Enough for the largest shapes; a multiple of 256."""
    shapes: tuple[tuple[Dims, Dims, Dims], ...]
    """For each input the smallest, the optimal and the largest shape, including the batch axis."""

    @property
    def rows_min(self) -> int:
        """The smallest batch that it accepts."""
        return max((low[0] for low, _, _ in self.shapes), default=1)

    @property
    def rows_optimal(self) -> int:
        """The batch size that it was optimised for."""
        return self.shapes[0][1][0]

    @property
    def rows_max(self) -> int:
        """The largest batch that it accepts."""
        return min(high[0] for _, _, high in self.shapes)

    def accepts(self, dims: tuple[Dims, ...], rows: int) -> bool:
        """Return whether it accepts a batch of ``rows`` rows, whose inputs have these dimensions."""
        return len(dims) == len(self.shapes) and all(
            len(low) == len(given) + 1
            and all(a <= value <= b for a, value, b in zip(low, (rows, *given), high, strict=True))
            for given, (low, _, high) in zip(dims, self.shapes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of an engine, and the sizes that it accepts."""

    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    rows_fixed: int | None
    profiles: tuple[Profile, ...]

    @property
    def rows_min(self) -> int:
        """The smallest batch that some profile accepts."""
        return min(profile.rows_min for profile in self.profiles)

    @property
    def rows_max(self) -> int:
        """The largest batch that some profile accepts."""
        return max(profile.rows_max for profile in self.profiles)

    @property
    def enqueue_nbytes(self) -> int:
        """Enqueue memory that is enough for every profile."""
        return max(profile.enqueue_nbytes for profile in self.profiles)

    @property
    def unbound(self) -> tuple[str, ...]:
        """The names of outputs with a dimension that no input has."""
        known = varying_dims(self.inputs)
        return tuple(
            spec.name
            for spec in self.outputs
            if any(isinstance(dim, str) and dim not in known for dim in spec.dims)
        )

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> Profile:
        """Return the accepting profile with the least enqueue memory; of several, the one for the nearest
        size."""
        accepting = [profile for profile in self.profiles if profile.accepts(dims, rows)]
        if not accepting:
            raise self._has_no_profile(rows, dims)
        return min(
            accepting,
            key=lambda profile: (profile.enqueue_nbytes, abs(profile.rows_optimal - rows), profile.index),
        )

    def checked_profile(self, index: int, dims: tuple[Dims, ...], rows: int) -> Profile:
        """Return the profile chosen for a batch, after checking that it accepts the batch."""
        if not 0 <= index < len(self.profiles):
            raise InternalError(
                f"profile {index} was chosen for a batch of {self.model!r}, which has {len(self.profiles)}"
            )
        profile = self.profiles[index]
        if not profile.accepts(dims, rows):
            raise InternalError(
                f"profile {index} of {self.model!r} was chosen for {self._shapes_text(rows, dims)}, which it "
                f"does not take. {self.profiles_text()}"
            )
        return profile

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest batch of each profile that accepts rows of these dimensions."""
        ranges = {
            (profile.rows_min, profile.rows_max)
            for profile in self.profiles
            if profile.accepts(dims, profile.rows_min)
        }
        if not ranges:
            raise self._has_no_profile("rows", dims)
        return tuple(sorted(ranges))

    def ranges_of(self, dim: str) -> tuple[tuple[int, int], ...]:
        """Return the range of a dimension in each profile: the intersection, if several inputs have it."""
        places = [
            (number, axis)
            for number, spec in enumerate(self.inputs)
            for axis, name in enumerate(spec.dims, start=1)
            if name == dim
        ]
        return tuple(
            (
                max(profile.shapes[number][0][axis] for number, axis in places),
                min(profile.shapes[number][2][axis] for number, axis in places),
            )
            for profile in self.profiles
        )

    def profiles_text(self) -> str:
        """Return the shapes that the profiles accept, for messages."""
        return "; ".join(
            f"profile {profile.index} takes "
            + ", ".join(
                f"{spec.name} ({', '.join(_range_text(a, b) for a, b in zip(low, high, strict=True))})"
                for spec, (low, _, high) in zip(self.inputs, profile.shapes, strict=True)
            )
            for profile in self.profiles
        )

    def _shapes_text(self, rows: int | str, dims: tuple[Dims, ...]) -> str:
        return ", ".join(
            f"{spec.name} {_shape_text((rows, *shape))}"
            for spec, shape in zip(self.inputs, dims, strict=False)
        )

    def _has_no_profile(self, rows: int | str, dims: tuple[Dims, ...]) -> InputError:
        return InputError(
            f"{self.model!r} has no profile for {self._shapes_text(rows, dims)}. {self.profiles_text()}. "
            "Send shapes that one of them takes, or build the plan with a profile for these"
        )


def read_signature(
    model: str,
    module: Any,
    engine: Any,
    abilities: Abilities,
    names_of_dims: Mapping[tuple[str, int], str] | None = None,
) -> Signature:
    """Return the tensors and profiles of an engine. Dynamic dimensions without a name get a default one."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
    outputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.OUTPUT]
    for name in inputs:
        _check_input(model, module, engine, name)
    for name in outputs:
        _check_output(model, module, engine, name, abilities)
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for name in tensors:
            _check_format(model, engine, kind, name, abilities)
    rows_fixed = fixed_rows(
        model,
        {name: shape_of(engine.get_tensor_shape(name)) for name in inputs},
        {name: shape_of(engine.get_tensor_shape(name)) for name in outputs},
    )
    profiles = tuple(
        Profile(
            index,
            aligned(abilities.enqueue_nbytes(engine, index)),
            tuple(_profile_shapes(engine, name, index) for name in inputs),
        )
        for index in range(engine.num_optimization_profiles)
    )
    if rows_fixed is None:
        _check_rows(model, inputs, profiles)
    return Signature(
        model,
        tuple(_spec(model, engine, "input", name, names_of_dims or {}) for name in inputs),
        tuple(_spec(model, engine, "output", name, {}) for name in outputs),
        rows_fixed,
        profiles,
    )


def fixed_rows(model: str, inputs: Mapping[str, Dims], outputs: Mapping[str, Dims]) -> int | None:
    """Return the batch size if it is fixed, and ``None`` if it is dynamic, from the shapes of the tensors."""
    if not inputs or not outputs:
        raise ModelError(
            f"{model!r} has {len(inputs)} inputs and {len(outputs)} outputs, but needs at least one of each"
        )
    for kind, side in (("input", inputs), ("output", outputs)):
        for name, shape in side.items():
            if not shape:
                raise ModelError(
                    f"{kind} {name!r} of {model!r} is a scalar, or has no known rank. {REBUILD} with a first "
                    "axis that counts rows"
                )
    sizes = {shape[0] for shape in inputs.values()}
    if len(sizes) > 1:
        raise ModelError(
            f"the inputs of {model!r} do not share a batch axis: {dict(inputs)}. {REBUILD} with a dynamic "
            "first axis on every input"
        )
    rows = sizes.pop()
    for name, shape in outputs.items():
        if shape[0] not in (-1, rows):
            raise ModelError(
                f"output {name!r} of {model!r} has the fixed first axis {shape[0]}, so its rows cannot be "
                f"separated. {REBUILD} with a first axis that counts rows on every output"
            )
    return None if rows < 0 else rows


def shape_of(dims: Any) -> Dims:
    """Return a shape as a tuple; TensorRT's ``Dims`` objects cannot be compared with each other."""
    return tuple(int(dim) for dim in dims)


def _check_input(model: str, module: Any, engine: Any, name: str) -> None:
    if engine.is_shape_inference_io(name) or engine.get_tensor_location(name) == module.TensorLocation.HOST:
        raise ModelError(
            f"input {name!r} of {model!r} is a shape tensor: its values determine shapes, so requests with "
            "different values cannot share a batch. Make it a constant of the network, or derive it from the "
            "shape of another input (ONNX: Shape), and rebuild the plan"
        )


def _check_output(model: str, module: Any, engine: Any, name: str, abilities: Abilities) -> None:
    if engine.get_tensor_location(name) == module.TensorLocation.HOST:
        raise ModelError(
            f"output {name!r} of {model!r} is a shape tensor, which the engine writes on the host, and not "
            "for each row. Remove it from the network's outputs"
        )
    aliased = engine.get_aliased_input_tensor(name) if abilities.tells_aliases else None
    if aliased:
        raise ModelError(
            f"output {name!r} of {model!r} overwrites input {aliased!r}, as a key-value cache does: "
            "such a model keeps state from batch to batch, which requests of other callers would see. Build "
            "it without aliased outputs"
        )


def _check_format(model: str, engine: Any, kind: str, name: str, abilities: Abilities) -> None:
    """Check that rows are contiguous and row-major in every profile, as far as the library can tell."""
    describe = getattr(engine, "get_tensor_format_desc", None)
    profiles = range(engine.num_optimization_profiles if abilities.tells_formats_by_profile else 1)
    for profile in profiles:
        of = (name, profile) if abilities.tells_formats_by_profile else (name,)
        said = str(describe(*of)) if describe is not None else ""
        is_linear = engine.get_tensor_vectorized_dim(*of) == -1
        if is_linear and (not said or "linear" in said.lower()):
            continue
        raise ModelError(
            f"{kind} {name!r} of {model!r} has the layout {said or 'vectorised'!r} in profile {profile}, but "
            "rows are row-major arrays. Build the plan with linear inputs and outputs (allowed_formats = "
            "1 << TensorFormat.LINEAR, trtexec --inputIOFormats=fp32:chw)"
        )


def _check_rows(model: str, inputs: list[str], profiles: tuple[Profile, ...]) -> None:
    for profile in profiles:
        ranges = {
            name: (low[0], high[0]) for name, (low, _, high) in zip(inputs, profile.shapes, strict=True)
        }
        if len(set(ranges.values())) > 1:
            raise ModelError(
                f"the inputs of {model!r} have different ranges on their first axis in profile "
                f"{profile.index}: {ranges}. That axis is the batch axis of all inputs: build the plan with "
                "one range for all"
            )


def _profile_shapes(engine: Any, name: str, index: int) -> tuple[Dims, Dims, Dims]:
    """Return the smallest, the optimal and the largest shape of an input, which are equal if it is fixed."""
    shapes = [shape_of(shape) for shape in engine.get_tensor_profile_shape(name, index)]
    if len(shapes) == 3 and all(shapes):
        return shapes[0], shapes[1], shapes[2]
    fixed = shape_of(engine.get_tensor_shape(name))
    return fixed, fixed, fixed


def _spec(
    model: str, engine: Any, kind: str, name: str, names_of_dims: Mapping[tuple[str, int], str]
) -> TensorSpec:
    shape = shape_of(engine.get_tensor_shape(name))
    dims = tuple(
        dim if dim >= 0 else names_of_dims.get((name, axis), f"{name}.{axis}")
        for axis, dim in enumerate(shape[1:], start=1)
    )
    return TensorSpec(name, _dtype(model, kind, name, str(engine.get_tensor_dtype(name).name)), dims)


def _dtype(model: str, kind: str, name: str, data_type: str) -> np.dtype[Any]:
    if data_type in DTYPES:
        return np.dtype(DTYPES[data_type])
    if data_type == "BF16":
        try:
            bfloat16: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
        except ImportError as error:
            raise ModelError(
                f"{kind} {name!r} of {model!r} is bfloat16, for which NumPy needs another package: "
                "pip install ml-dtypes. Or build the plan with float32 inputs and outputs"
            ) from error
        return bfloat16
    packed = " (several values in a byte, or scaled)" if data_type in PACKED else ""
    raise ModelError(
        f"{kind} {name!r} of {model!r} is {data_type}{packed}, but requests carry NumPy arrays of "
        f"{', '.join(sorted(DTYPES.values()))} or bfloat16. Build the plan with such inputs and outputs; "
        "internally it may compute in any type"
    )


def _shape_text(shape: tuple[int | str, ...]) -> str:
    return str(shape).replace("'", "")


def _range_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"
