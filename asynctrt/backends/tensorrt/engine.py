"""What a deserialised engine takes and gives: tensors, the batch axis, profiles.

An engine knows its dimensions by number and has no names for them, so a dynamic one is called after its
tensor: ``tokens.1``. Which of them an output follows is found by trying (see ``probe``).
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import numpy as np

from asynctrt.devices.base import aligned
from asynctrt.errors import InputError, ModelError
from asynctrt.tensors import Dims, TensorSpec

DTYPES: Final = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""TensorRT's names of the types that NumPy has too."""

PACKED: Final = ("FP8", "INT4", "FP4", "E8M0")
"""Types that no array library of the host holds."""


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimisation profile: which shapes it admits, and how much enqueue memory they need at the most."""

    index: int
    enqueue_nbytes: int
    """A multiple of 256."""
    shapes: tuple[tuple[Dims, Dims, Dims], ...]
    """For each input the smallest, the usual and the largest shape, batch axis included."""

    @property
    def rows_min(self) -> int:
        """The smallest batch it admits."""
        return max((low[0] for low, _, _ in self.shapes), default=1)

    @property
    def rows_usual(self) -> int:
        """The batch it was optimised for."""
        return self.shapes[0][1][0]

    @property
    def rows_max(self) -> int:
        """The largest batch it admits."""
        return min(high[0] for _, _, high in self.shapes)

    def admits(self, dims: tuple[Dims, ...], rows: int) -> bool:
        """Whether a batch of rows of these dimensions, one for each input, lies within it."""
        return len(dims) == len(self.shapes) and all(
            len(low) == len(given) + 1
            and all(a <= value <= b for a, value, b in zip(low, (rows, *given), high, strict=True))
            for given, (low, _, high) in zip(dims, self.shapes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """What an engine takes and gives, and in which sizes."""

    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    rows_fixed: int | None
    profiles: tuple[Profile, ...]

    @property
    def rows_min(self) -> int:
        """The smallest batch that some profile admits."""
        return min(profile.rows_min for profile in self.profiles)

    @property
    def rows_max(self) -> int:
        """The largest batch that some profile admits."""
        return max(profile.rows_max for profile in self.profiles)

    @property
    def enqueue_nbytes(self) -> int:
        """Enqueue memory that is enough for every profile."""
        return max(profile.enqueue_nbytes for profile in self.profiles)

    @property
    def unbound(self) -> tuple[str, ...]:
        """Outputs with a dimension that no input has."""
        known = {dim for spec in self.inputs for dim in spec.dims if isinstance(dim, str)}
        return tuple(
            spec.name
            for spec in self.outputs
            if any(isinstance(dim, str) and dim not in known for dim in spec.dims)
        )

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> Profile:
        """The profile to run a batch with: of those that admit it, the one with the least enqueue memory.

        Of several with the same, the one that was optimised for the nearest number of rows.

        :raises InputError: when none admits it.
        """
        admitting = [profile for profile in self.profiles if profile.admits(dims, rows)]
        if not admitting:
            raise self._has_no_profile(rows, dims)
        return min(
            admitting,
            key=lambda profile: (profile.enqueue_nbytes, abs(profile.rows_usual - rows), profile.index),
        )

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        """The smallest and the largest batch of each profile that admits rows of these dimensions.

        :raises InputError: when none does, whatever the number of rows.
        """
        ranges = {
            (profile.rows_min, profile.rows_max)
            for profile in self.profiles
            if profile.admits(dims, profile.rows_min)
        }
        if not ranges:
            raise self._has_no_profile("rows", dims)
        return tuple(sorted(ranges))

    def profiles_text(self) -> str:
        """What the profiles admit, for messages."""
        return "; ".join(
            f"profile {profile.index} takes "
            + ", ".join(
                f"{spec.name} ({', '.join(_range_text(a, b) for a, b in zip(low, high, strict=True))})"
                for spec, (low, _, high) in zip(self.inputs, profile.shapes, strict=True)
            )
            for profile in self.profiles
        )

    def with_outputs(self, outputs: tuple[TensorSpec, ...]) -> "Signature":
        """The same with outputs of which more is known."""
        return replace(self, outputs=outputs)

    def _has_no_profile(self, rows: int | str, dims: tuple[Dims, ...]) -> InputError:
        given = ", ".join(
            f"{spec.name} {_shape_text((rows, *shape))}"
            for spec, shape in zip(self.inputs, dims, strict=False)
        )
        return InputError(
            f"{self.model!r} has no profile for {given}. {self.profiles_text()}. Send shapes within one "
            "of them, or build the plan with a profile for these"
        )


def read_signature(model: str, module: Any, engine: Any) -> Signature:
    """The tensors and profiles of an engine. Dynamic dimensions of outputs are still named after themselves.

    :raises ModelError: for an engine whose rows cannot be batched or do not lie in plain memory.
    """
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
    outputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.OUTPUT]
    if not inputs or not outputs:
        raise ModelError(f"{model!r} has {len(inputs)} inputs and {len(outputs)} outputs: needs both")
    for name in inputs:
        _check_input(model, module, engine, name)
    for name in outputs:
        _check_output(model, module, engine, name)
    rows_fixed = _fixed_rows(model, engine, inputs, outputs)
    profiles = tuple(
        Profile(
            index,
            aligned(int(engine.get_device_memory_size_for_profile_v2(index))),
            tuple(_profile_shapes(engine, name, index) for name in inputs),
        )
        for index in range(engine.num_optimization_profiles)
    )
    if rows_fixed is None:
        _check_rows(model, inputs, profiles)
    return Signature(
        model,
        tuple(_spec(model, engine, "input", name) for name in inputs),
        tuple(_spec(model, engine, "output", name) for name in outputs),
        rows_fixed,
        profiles,
    )


def shape_of(dims: Any) -> Dims:
    """A shape as a tuple; TensorRT's own ``Dims`` can be compared with nothing."""
    return tuple(int(dim) for dim in dims)


def _check_input(model: str, module: Any, engine: Any, name: str) -> None:
    if engine.is_shape_inference_io(name) or engine.get_tensor_location(name) == module.TensorLocation.HOST:
        raise ModelError(
            f"input {name!r} of {model!r} is a shape tensor: its values decide about shapes, so requests "
            "with other values cannot share a batch. Make it a constant of the network, or derive it from "
            "the shape of another input (ONNX: Shape), and build the plan anew"
        )
    _check_format(model, engine, "input", name)


def _check_output(model: str, module: Any, engine: Any, name: str) -> None:
    if engine.get_tensor_location(name) == module.TensorLocation.HOST:
        raise ModelError(
            f"output {name!r} of {model!r} is a shape tensor, which the engine writes on the host and not "
            "for each row. Leave it out of the network's outputs"
        )
    aliased = getattr(engine, "get_aliased_input_tensor", None)
    if aliased is not None and aliased(name):
        raise ModelError(
            f"output {name!r} of {model!r} is written in place of input {aliased(name)!r}, as caches of key "
            "and value are: such a model keeps state from batch to batch, and requests of different callers "
            "would see it. Build it without (ONNX: no aliased outputs)"
        )
    _check_format(model, engine, "output", name)


def _check_format(model: str, engine: Any, kind: str, name: str) -> None:
    """Rows must lie one after the other, row-major."""
    describe = getattr(engine, "get_tensor_format_desc", None)
    said = str(describe(name)) if describe is not None else ""
    if engine.get_tensor_vectorized_dim(name) != -1 or (said and "linear" not in said.lower()):
        raise ModelError(
            f"{kind} {name!r} of {model!r} has the layout {said or 'of vectors'!r}, and rows are row-major "
            "arrays. Build the plan with linear inputs and outputs (allowed_formats = 1 << "
            "TensorFormat.LINEAR, trtexec --inputIOFormats=fp32:chw)"
        )


def _fixed_rows(model: str, engine: Any, inputs: list[str], outputs: list[str]) -> int | None:
    """The batch size if it is fixed; a model whose tensors do not share a batch axis is refused."""
    shapes = {name: shape_of(engine.get_tensor_shape(name)) for name in (*inputs, *outputs)}
    for name, shape in shapes.items():
        if not shape:
            kind = "input" if name in inputs else "output"
            raise ModelError(
                f"{kind} {name!r} of {model!r} is a scalar. Batching needs a first axis that counts rows: "
                "build the plan from a model with one"
            )
    first = {shapes[name][0] for name in inputs}
    if len(first) > 1:
        listed = {name: shapes[name] for name in inputs}
        raise ModelError(
            f"the inputs of {model!r} do not share a batch axis: {listed}. Build the plan from a model with "
            "a dynamic first axis on every input"
        )
    rows = first.pop()
    for name in outputs:
        if shapes[name][0] not in (-1, rows):
            raise ModelError(
                f"output {name!r} of {model!r} has the fixed first axis {shapes[name][0]}, so its rows "
                "cannot be told apart. Build the plan from a model whose outputs have a first axis that "
                "counts rows"
            )
    return None if rows == -1 else rows


def _check_rows(model: str, inputs: list[str], profiles: tuple[Profile, ...]) -> None:
    for profile in profiles:
        ranges = {
            name: (low[0], high[0]) for name, (low, _, high) in zip(inputs, profile.shapes, strict=True)
        }
        if len(set(ranges.values())) > 1:
            raise ModelError(
                f"the inputs of {model!r} have different ranges on their first axis in profile "
                f"{profile.index}: {ranges}. It is the batch axis of all of them: build the plan with one "
                "range for all"
            )


def _profile_shapes(engine: Any, name: str, index: int) -> tuple[Dims, Dims, Dims]:
    """The shapes that a profile admits for an input; its fixed shape where it has no other."""
    shapes = [shape_of(shape) for shape in engine.get_tensor_profile_shape(name, index)]
    if len(shapes) == 3 and all(shapes):
        return shapes[0], shapes[1], shapes[2]
    fixed = shape_of(engine.get_tensor_shape(name))
    return fixed, fixed, fixed


def _spec(model: str, engine: Any, kind: str, name: str) -> TensorSpec:
    shape = shape_of(engine.get_tensor_shape(name))
    dims = tuple(dim if dim >= 0 else f"{name}.{axis}" for axis, dim in enumerate(shape[1:], start=1))
    return TensorSpec(name, _dtype(model, kind, name, str(engine.get_tensor_dtype(name).name)), dims)


def _dtype(model: str, kind: str, name: str, data_type: str) -> np.dtype[Any]:
    if data_type in DTYPES:
        return np.dtype(DTYPES[data_type])
    if data_type == "BF16":
        try:
            bfloat16: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
        except ImportError as error:
            raise ModelError(
                f"{kind} {name!r} of {model!r} is bfloat16, which NumPy has from another package: "
                "pip install ml-dtypes. Or build the plan with float32 inputs and outputs"
            ) from error
        return bfloat16
    packed = " (several values a byte, or scaled)" if data_type in PACKED else ""
    raise ModelError(
        f"{kind} {name!r} of {model!r} is {data_type}{packed}, and requests carry NumPy arrays of "
        f"{', '.join(sorted(DTYPES.values()))} or bfloat16. Build the plan with such inputs and outputs; "
        "inside, it may compute in any type"
    )


def _shape_text(shape: tuple[int | str, ...]) -> str:
    return str(shape).replace("'", "")


def _range_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"
