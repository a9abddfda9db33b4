"""Engines of the double: what they take, what they compute, and how they are written down as plans.

What an engine computes is exact, so that tests can compare for equality. For each element ``x`` of an
input::

    s[0] = x          s[k] = a[k] * s[k-1] + b[k]          output = s[steps]

with the small whole numbers ``a`` and ``b`` of :attr:`EngineSpec.coefficients`. Floating point types are
computed in float32 and whole ones in int64, and then cast to the type of the tensor. Every ``s[k]`` is
written to the enqueue memory by one piece of work on the stream and read from there by the next.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final, Literal

import numpy as np

from asynctrt.devices.base import ALIGNMENT, aligned
from asynctrt.errors import OptionsError
from asynctrt.tensors import Array, Dims
from asynctrt.testing.tensorrt.names import DataType, version_of

Shapes = tuple[Dims, Dims, Dims]
"""The smallest, the usual and the largest shape that a profile admits for a tensor."""

VERSION: Final = "11.4.0.106"
COMPUTE_CAPABILITY: Final = (9, 0)

TAG: Final = b"ftrt"
HEADER: Final = struct.Struct("<4sIQQ4B4sI28x")
"""As of real plans: tag, 0, 2, size of the plan, version in four bytes, the inner tag and the version of
the serialisation, zeros up to 64 bytes."""

ROWS: Final = (1, 8, 64)
LENGTHS: Final = (1, 8, 32)
"""The default profile: its rows, and the values of other dynamic dimensions."""

COMPUTED: Final = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "bfloat16": DataType.BF16,
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
}
DESCRIBED: Final = COMPUTED | {
    "bool": DataType.BOOL,
    "fp8": DataType.FP8,
    "int4": DataType.INT4,
    "fp4": DataType.FP4,
}


@dataclass(frozen=True, slots=True)
class TensorIO:
    """An input of an engine.

    :param name: its name.
    :param dtype: ``float32``, ``float16``, ``bfloat16``, ``int8``, ``uint8``, ``int32`` or ``int64``; an
        engine with ``bool``, ``fp8``, ``int4`` or ``fp4`` can be loaded and looked at, but refuses to run.
    :param dims: all its dimensions, the batch axis first; -1 for one that is dynamic.
    :param on_host: a shape tensor, whose values the engine would read on the CPU. It does not run either.
    """

    name: str
    dtype: str = "float32"
    dims: Dims = (-1, 16)
    on_host: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(int(dim) for dim in self.dims))
        if self.dtype not in DESCRIBED:
            known = ", ".join(DESCRIBED)
            raise OptionsError(f"{self.name!r}: TensorRT has no type {self.dtype!r}. It has {known}")
        if not self.dims or len(self.dims) > 8 or min(self.dims) < -1:
            raise OptionsError(f"{self.name!r} has impossible dimensions: {self.dims}")

    @property
    def data_type(self) -> DataType:
        """Its type, as TensorRT names it."""
        return DESCRIBED[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether it is computed in float32; otherwise in int64."""
        return self.dtype in ("float32", "float16", "bfloat16")

    @property
    def itemsize(self) -> int:
        """Bytes of an element; types of less than a byte count as one."""
        return max(1, int(self.data_type.itemsize or 1))


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine of the double. ``EngineSpec()`` takes ``input: float32[rows, 16]`` and gives ``output``.

    Each input has an output of its type and shape: ``output`` where there is one input, ``output_<input>``
    where there are several.

    :param name: the engine's name.
    :param inputs: what it takes.
    :param profiles: for each profile the shapes it admits, by input: smallest, usual, largest. Inputs that
        are left out, and an engine without profiles, get 1, 8 and up to 64 rows, and 1, 8 and up to 32 for
        other dynamic dimensions.
    :param steps: how many dependent steps lie between input and output.
    :param bias: makes what each step adds that many times larger: it tells engines apart by their answers.
    :param work_ns: how long a batch keeps the device busy, in addition to the steps.
    :param work_ns_per_row: how much longer for each row.
    :param fills_gpu: whether that work leaves no room for that of another batch.
    :param data_dependent: adds the output ``positives`` with the shape ``(rows, n)``: of each row of the
        first output the positive values in their order, padded with zeros to the longest row.
    :param aux_streams: how many auxiliary streams it uses; the elements are shared among all streams.
    :param weights_nbytes: device memory that is allocated when it is deserialised.
    :param streamable_weights_nbytes: how much of it a weight streaming budget may leave out.
    :param persistent_nbytes: device memory that each context allocates.
    :param fixed_rows: the batch axis has this size instead of being dynamic.
    :param capturable: whether an enqueue can be part of a graph. With ``data_dependent`` it never can.
    :param version_compatible: whether other, newer versions can deserialise it.
    :param excludes_lean_runtime: whether a version compatible plan comes without the code of its runtime.
    :param hardware_compatibility: the member of ``HardwareCompatibilityLevel`` it was built for.
    """

    name: str = "double"
    inputs: tuple[TensorIO, ...] = (TensorIO("input"),)
    profiles: tuple[Mapping[str, Shapes], ...] = ({},)
    steps: int = 4
    bias: int = 0
    work_ns: int = 0
    work_ns_per_row: int = 0
    fills_gpu: bool = True
    data_dependent: bool = False
    aux_streams: int = 0
    weights_nbytes: int = 4096
    streamable_weights_nbytes: int = 0
    persistent_nbytes: int = 0
    fixed_rows: int | None = None
    capturable: bool = True
    version_compatible: bool = False
    excludes_lean_runtime: bool = False
    hardware_compatibility: Literal["NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"] = "NONE"
    _outputs: tuple[TensorIO, ...] = dataclass_field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if self.fixed_rows is not None:
            rows = self.fixed_rows
            fixed = tuple(TensorIO(io.name, io.dtype, (rows, *io.dims[1:]), io.on_host) for io in self.inputs)
            object.__setattr__(self, "inputs", fixed)
        self._check()
        full = tuple(
            {io.name: _shapes(io, profile.get(io.name)) for io in self.inputs} for profile in self.profiles
        )
        object.__setattr__(self, "profiles", full)
        several = len(self.inputs) > 1
        outputs = [
            TensorIO(f"output_{io.name}" if several else "output", io.dtype, io.dims) for io in self.inputs
        ]
        if self.data_dependent:
            first = self.inputs[0]
            outputs.append(TensorIO("positives", first.dtype, (first.dims[0], -1)))
        object.__setattr__(self, "_outputs", tuple(outputs))

    def _check(self) -> None:
        names = [io.name for io in self.inputs]
        if not names or len(names) > INPUTS_MAX or len(set(names)) < len(names):
            raise OptionsError(f"an engine has 1 to {INPUTS_MAX} inputs with names of their own, not {names}")
        if not self.profiles:
            raise OptionsError("an engine has at least one profile; leave `profiles` out for the default")
        for profile in self.profiles:
            if unknown := set(profile) - set(names):
                raise OptionsError(f"a profile is about {sorted(unknown)}, and the inputs are {names}")
        if not 1 <= self.steps <= STEPS_MAX:
            raise OptionsError(f"an engine has 1 to {STEPS_MAX} steps, not {self.steps}")
        if not 0 <= self.aux_streams <= AUX_STREAMS_MAX:
            raise OptionsError(
                f"an engine has up to {AUX_STREAMS_MAX} auxiliary streams, not {self.aux_streams}"
            )
        least = self.coefficients.nbytes + self.streamable_weights_nbytes
        if self.weights_nbytes < least:
            raise OptionsError(
                f"weights_nbytes is {self.weights_nbytes}, and the coefficients of {self.steps} steps and "
                f"what can be streamed come to {least}"
            )

    @property
    def outputs(self) -> tuple[TensorIO, ...]:
        """What it gives."""
        return self._outputs

    @property
    def coefficients(self) -> np.ndarray:
        """``a`` and ``b`` of each step: int64 of the shape ``(steps, 2)``. They are the engine's weights.

        Only the first step multiplies, by two: so nothing overflows however many steps there are. Every
        fourth, from the second on, changes the sign, so that their order matters.
        """
        a = [2 if step == 1 else -1 if step % 4 == 2 else 1 for step in range(1, self.steps + 1)]
        b = [step * (1 + self.bias) for step in range(1, self.steps + 1)]
        return np.stack([np.asarray(a, np.int64), np.asarray(b, np.int64)], axis=1)

    def expected(self, inputs: Mapping[str, Array] | Array) -> dict[str, Array]:
        """What the engine answers, computed with NumPy: exactly that, bit by bit.

        :param inputs: by name, or the array where there is one input.
        """
        given = inputs if isinstance(inputs, Mapping) else {self.inputs[0].name: np.asarray(inputs)}
        answers: dict[str, Array] = {}
        for io, output in zip(self.inputs, self.outputs, strict=False):
            array = np.asarray(given[io.name])
            state = read_state(io, array)
            for a, b in self.coefficients:
                state = advance(state, int(a), int(b))
            answers[output.name] = write_state(io, state).view(array.dtype).reshape(array.shape)
            if self.data_dependent and io is self.inputs[0]:
                packed = pack_positives(state.reshape(array.shape[0], -1))
                answers["positives"] = write_state(io, packed).view(array.dtype)
        return answers

    def enqueue_nbytes(self, shapes: Mapping[str, Dims]) -> int:
        """Enqueue memory that a batch of these shapes needs: a guard at each end and every state between."""
        total = 2 * ALIGNMENT
        for io in self.inputs:
            count = int(np.prod(shapes[io.name], dtype=np.int64))
            total += self.steps * aligned(count * (4 if io.is_floating else 8))
        if self.data_dependent:
            total += aligned(4 * (shapes[self.inputs[0].name][0] + 1))
        return total

    def profile_nbytes(self, index: int) -> int:
        """Enqueue memory that the largest batch of a profile needs."""
        return self.enqueue_nbytes({name: shapes[2] for name, shapes in self.profiles[index].items()})


STEPS_MAX: Final = 64
INPUTS_MAX: Final = 4
AUX_STREAMS_MAX: Final = 3


def _shapes(io: TensorIO, given: Shapes | None) -> Shapes:
    """The shapes of a profile for one input, in full."""
    if given is None:
        chosen = []
        for rows, length in zip(ROWS, LENGTHS, strict=True):
            dynamic = (rows, *[length] * (len(io.dims) - 1))
            chosen.append(tuple(d if dim == -1 else dim for dim, d in zip(io.dims, dynamic, strict=True)))
        given = (chosen[0], chosen[1], chosen[2])
    low, usual, high = (tuple(int(dim) for dim in shape) for shape in given)
    if not len(low) == len(usual) == len(high) == len(io.dims) or not all(
        1 <= a <= b <= c and dim in (-1, a) and (dim == -1 or a == c)
        for dim, a, b, c in zip(io.dims, low, usual, high, strict=True)
    ):
        raise OptionsError(f"{io.name!r} has the dimensions {io.dims}; no profile of it can be {given}")
    return low, usual, high


def read_state(io: TensorIO, array: Array) -> Array:
    """``s[0]``: a tensor's elements in the type that they are computed in, in a row."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if io.dtype == "bfloat16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32 if io.is_floating else np.int64)


def advance(state: Array, a: int, b: int) -> Array:
    """``s[k]`` from ``s[k-1]``."""
    kind = state.dtype.type
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = kind(a) * state + kind(b)
    return result


def write_state(io: TensorIO, state: Array) -> Array:
    """A state in the type of the tensor; bfloat16 as the bits it consists of."""
    if io.dtype == "bfloat16":
        bits = state.astype(np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
        return (
            np.where(np.isnan(state), np.uint32(0x7FFF0000), rounded)
            .astype(np.uint32)
            .view(np.uint16)[..., 1::2]
        )
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = state.astype(io.dtype)
    return result


def pack_positives(rows: Array) -> Array:
    """Of each row the positive values in their order, padded with zeros to the longest."""
    positive = rows > 0
    counts = positive.sum(axis=1)
    packed = np.zeros((len(rows), int(counts.max(initial=0))), rows.dtype)
    for row, kept in enumerate(positive):
        packed[row, : counts[row]] = rows[row, kept]
    return packed


@dataclass(frozen=True, slots=True)
class Plan:
    """What a plan says."""

    spec: EngineSpec
    version: str
    compute_capability: tuple[int, int]


class PlanError(Exception):
    """A plan that cannot be read; the message is as of the real library."""


def serialization_version(version: str) -> int:
    """The number that the real library compares first; it rises with each release."""
    major, minor, patch, _ = version_of(version)
    return (20 * major + minor * 4 + patch) % 2**32


def double_plan(
    spec: EngineSpec,
    *,
    version: str = VERSION,
    compute_capability: tuple[int, int] = COMPUTE_CAPABILITY,
) -> bytes:
    """The plan of such an engine, as if that version of TensorRT had built it on a GPU of that kind.

    Its header is as of real plans: the tag ``ftrt``, the size of the whole plan at byte 16, the version in
    bytes 24 to 27. The rest is for the double alone.
    """
    fields: dict[str, Any] = {name: value for name, value in asdict(spec).items() if name != "_outputs"}
    body = json.dumps({"spec": fields, "compute_capability": compute_capability}).encode()
    body = struct.pack("<I", zlib.crc32(body)) + body
    numbers = version_of(version)
    size = HEADER.size + len(body)
    return HEADER.pack(TAG, 0, 2, size, *numbers, TAG, serialization_version(version)) + body


def read_plan(plan: bytes) -> Plan:
    """What :func:`double_plan` wrote.

    :raises PlanError: when it is none, or not all of it.
    """
    if len(plan) < HEADER.size or plan[:4] != TAG:
        raise PlanError(
            "Serialization (Serialization assertion header.magicTag == kMAGIC_TAG failed."
            "Magic tag does not match)"
        )
    _, _, _, size, *numbers, _, _ = HEADER.unpack_from(plan)
    if size != len(plan):
        raise PlanError(
            "Serialization (Serialization assertion header.size == blobSize failed.Plan size does not match. "
            f"Note: Size in header: {size}, Size of buffer: {len(plan)})"
        )
    checksum, body = plan[HEADER.size : HEADER.size + 4], plan[HEADER.size + 4 :]
    # A header that is all there is may still say so, and have its size right.
    if not body or checksum != struct.pack("<I", zlib.crc32(body)):
        raise PlanError(
            "Serialization (Serialization assertion readCrc == computedCrc failed.Plan is corrupt)"
        )
    said = json.loads(body)
    fields = said["spec"]
    fields["inputs"] = tuple(TensorIO(**io) for io in fields["inputs"])
    fields["profiles"] = tuple(fields["profiles"])
    version = ".".join(str(number) for number in numbers)
    major, minor = said["compute_capability"]
    return Plan(EngineSpec(**fields), version, (major, minor))
