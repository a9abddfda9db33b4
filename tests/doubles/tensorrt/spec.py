"""Describe engines of the double: their inputs, what they compute, and their serialised form.

An engine's results are exact, so that tests can compare for equality. For each element ``x`` of an input::

    s[0] = x          s[k] = a[k] * s[k-1] + b[k]          output = s[steps]

with the small integers ``a`` and ``b`` of :attr:`EngineSpec.coefficients`. Floating-point types are computed
in float32 and integers in int64, and then cast to the type of the tensor. One piece of work on the stream
writes each ``s[k]`` to the enqueue memory, and the next reads it from there.
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, Final, Literal

import numpy as np

from asynctrt.devices.base import ALIGNMENT, aligned
from asynctrt.tensors import Array, Dims
from tests.doubles.tensorrt.names import DataType, version_of

Shapes = tuple[Dims, Dims, Dims]
"""The smallest, the optimal and the largest shape that a profile accepts for a tensor."""

Flavour = Literal["tensorrt", "tensorrt_lean", "tensorrt_dispatch", "tensorrt_rtx"]
"""The packages that the double imitates."""

VERSION: Final = "11.4.0.106"
RTX_VERSION: Final = "1.7.1.116"
COMPUTE_CAPABILITY: Final = (9, 0)

TAG: Final = b"ftrt"
RTX_TAG: Final = b"vtrt"
RTX_GPUS: Final = 0x3F
SHARES_PROFILES: Final = (10,)
"""The first version whose engines share profiles, however they were built."""
MAY_SHARE_PROFILES: Final = (8, 6)
"""The first version that can build them so."""
HEADER: Final = struct.Struct("<4sIQQ4B4sI28x")
"""As in real plans: tag, 0, 2, size of the plan, version in four bytes, the inner tag and the version of
the serialisation (for RTX a bit for each kind of GPU that it runs on), zeros up to 64 bytes."""

ROWS: Final = (1, 8, 64)
LENGTHS: Final = (1, 8, 32)
"""The default profile: its batch sizes, and the sizes of other dynamic dimensions."""

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
    :param dtype: ``float32``, ``float16``, ``bfloat16``, ``int8``, ``uint8``, ``int32`` or ``int64``. An
        engine with ``bool``, ``fp8``, ``int4`` or ``fp4`` can be loaded and inspected, but refuses to run.
    :param dims: all its dimensions, the batch axis first, with -1 for dynamic ones.
    :param on_host: whether it is a shape tensor, whose values the engine reads on the CPU. Such an engine
        refuses to run, too.
    """

    name: str
    dtype: str = "float32"
    dims: Dims = (-1, 16)
    on_host: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(int(dim) for dim in self.dims))
        assert self.dtype in DESCRIBED, f"unknown dtype {self.dtype!r} of {self.name!r}"
        assert all(dim >= -1 for dim in self.dims), f"{self.name!r} has the dimensions {self.dims}"

    @property
    def data_type(self) -> DataType:
        """Its type as a member of TensorRT's enum."""
        return DESCRIBED[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether it is computed in float32 rather than int64."""
        return self.dtype in ("float32", "float16", "bfloat16")

    @property
    def itemsize(self) -> int:
        """Bytes of an element, at least 1."""
        return max(1, int(self.data_type.itemsize or 1))


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine of the double. ``EngineSpec()`` has the input ``input: float32[rows, 16]`` and one output.

    Each input has an output of its type and shape: ``output`` if there is one input, ``output_<input>`` if
    there are several.

    :param name: the engine's name.
    :param inputs: its inputs.
    :param profiles: for each profile the smallest, the optimal and the largest shape of each input. The
        default is 1, 8 and 64 rows, and 1, 8 and 32 for other dynamic dimensions.
    :param steps: the number of dependent steps between input and output.
    :param bias: makes each step add ``1 + bias`` times as much, to tell engines apart by their answers.
    :param work_ns: how long a batch keeps the device busy, in addition to the steps.
    :param fills_gpu: whether that work leaves no room for that of another batch.
    :param function: computes the outputs with NumPy, in place of the steps, from a mapping of arrays by the
        names of the inputs: an array, a tuple or a mapping by name. On the host device only; a plan with a
        function can be loaded in the process that made it.
    :param function_outputs: the outputs of ``function``. A first size of -1 is the number of rows. With sizes
        of -1 beyond the first all of them are those of what it returns for zeros.
    :param is_sensitive: whether answers in float32 are rounded in another way in another slot, batch size or
        company, as those of real kernels may be; ``expected`` is then not exact. On the host device only.
    :param waits: whether an enqueue waits for its batch to end, as the code of a plugin may.
    :param change_ns: how much longer an enqueue takes, without the GIL, after a change of shapes or profile.
    :param data_dependent: adds the output ``positives`` of the shape ``(rows, n)``: the positive values of
        each row of the first output in their order, padded with zeros to the length of the longest.
    :param aux_streams: the number of auxiliary streams; the elements are divided among all streams.
    :param weights_nbytes: device memory that is allocated when it is deserialised.
    :param stripped_weights_nbytes: how much of its weights the plan lacks. Its answers are wrong until it is
        refitted with :func:`double_weights`.
    :param refittable: whether its weights can be replaced. A plan that lacks some always can.
    :param persistent_nbytes: device memory that each context allocates.
    :param temporary_nbytes: device memory that each enqueue takes from the allocator of temporary storage and
        gives back. An enqueue waits for its batch unless that allocator works in the order of streams.
    :param fixed_rows: the size of the batch axis, if it is not dynamic.
    :param plugins: the names of the plugins that it uses; it cannot be deserialised without them.
    :param capturable: whether an enqueue can be captured into a graph. With ``data_dependent`` it never can.
    :param version_compatible: whether later versions can deserialise it.
    :param excludes_lean_runtime: whether a version-compatible plan lacks the code of its runtime.
    :param hardware_compatibility: the member of ``HardwareCompatibilityLevel`` that it was built for.
    :param shares_profiles: whether several contexts may have one profile at once. Plans of versions before 10
        do not unless they were built so (``PreviewFeature.PROFILE_SHARING_0806``); later ones always do.
    """

    name: str = "double"
    inputs: tuple[TensorIO, ...] = (TensorIO("input"),)
    profiles: tuple[Mapping[str, Shapes], ...] = ({},)
    steps: int = 4
    bias: int = 0
    work_ns: int = 0
    fills_gpu: bool = True
    function: Callable[[dict[str, Array]], Any] | None = None
    function_outputs: tuple[TensorIO, ...] = ()
    is_sensitive: bool = False
    waits: bool = False
    change_ns: int = 0
    data_dependent: bool = False
    aux_streams: int = 0
    weights_nbytes: int = 4096
    stripped_weights_nbytes: int = 0
    refittable: bool = False
    persistent_nbytes: int = 0
    temporary_nbytes: int = 0
    fixed_rows: int | None = None
    plugins: tuple[str, ...] = ()
    capturable: bool = True
    version_compatible: bool = False
    excludes_lean_runtime: bool = False
    hardware_compatibility: Literal["NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"] = "NONE"
    shares_profiles: bool = True
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
        if self.function is not None:
            object.__setattr__(self, "_outputs", tuple(self.function_outputs))
            return
        several = len(self.inputs) > 1
        outputs = [
            TensorIO(f"output_{io.name}" if several else "output", io.dtype, io.dims) for io in self.inputs
        ]
        if self.data_dependent:
            first = self.inputs[0]
            outputs.append(TensorIO("positives", first.dtype, (first.dims[0], -1)))
        object.__setattr__(self, "_outputs", tuple(outputs))

    def _check(self) -> None:
        names = [io.name for io in (*self.inputs, *self.function_outputs)]
        assert len(set(names)) == len(names), names
        assert 1 <= len(self.inputs) <= INPUTS_MAX
        assert all(set(profile) <= set(names) for profile in self.profiles), self.profiles
        assert 1 <= self.steps <= STEPS_MAX
        assert 0 <= self.aux_streams <= AUX_STREAMS_MAX
        assert self.weights_nbytes >= self.coefficients.nbytes
        computes_steps = (
            self.data_dependent or self.is_sensitive or self.refittable or self.stripped_weights_nbytes > 0
        )
        if self.function is None:
            assert not self.function_outputs, "they are those of a function"
        else:
            assert self.function_outputs, "a function has some"
            assert not computes_steps, "a function has no steps"

    @property
    def outputs(self) -> tuple[TensorIO, ...]:
        """Its outputs."""
        return self._outputs

    @property
    def coefficients(self) -> np.ndarray:
        """The engine's weights: ``a`` and ``b`` of each step, int64 of the shape ``(steps, 2)``.

        Only the first step multiplies by two, so nothing overflows, whatever the number of steps. Every
        fourth step from the second on changes the sign, so their order matters.
        """
        a = [2 if step == 1 else -1 if step % 4 == 2 else 1 for step in range(1, self.steps + 1)]
        b = [step * (1 + self.bias) for step in range(1, self.steps + 1)]
        return np.stack([np.asarray(a, np.int64), np.asarray(b, np.int64)], axis=1)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of its weights, one for each row of ``coefficients``."""
        return tuple(f"step{step}" for step in range(1, self.steps + 1))

    def expected(self, inputs: Mapping[str, Array] | Array) -> dict[str, Array]:
        """Return the engine's outputs, computed with NumPy; the engine's are equal bit by bit."""
        given = inputs if isinstance(inputs, Mapping) else {self.inputs[0].name: np.asarray(inputs)}
        if self.function is not None:
            return self.compute(given)
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

    def compute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what ``function`` makes of a batch, by the names of the outputs."""
        assert self.function is not None
        given = self.function(dict(inputs))
        if isinstance(given, Mapping):
            found = dict(given)
        else:
            several = given if isinstance(given, tuple | list) else (given,)
            found = {io.name: array for io, array in zip(self._outputs, several, strict=False)}
        answers = {}
        for io in self._outputs:
            array = np.asarray(found.get(io.name))
            expected = self._known_dims(io, len(inputs[self.inputs[0].name]))
            if len(array.shape) != len(expected) or any(
                dim not in (-1, size) for dim, size in zip(expected, array.shape, strict=True)
            ):
                raise ValueError(
                    f"the function of {self.name!r} gave {array.shape} for its output {io.name!r}, which is "
                    f"{expected} here"
                )
            answers[io.name] = array if array.dtype.name == io.dtype else array.astype(io.dtype)
        return answers

    def _known_dims(self, io: TensorIO, rows: int) -> Dims:
        """Return the dimensions of an output of the function, with -1 for those that only it knows."""
        return io.dims if -1 in io.dims[1:] or io.dims[0] >= 0 else (rows, *io.dims[1:])

    def output_shapes(self, shapes: tuple[Dims, ...]) -> dict[str, Dims]:
        """Return the shapes of what ``function`` makes of inputs of these shapes; call it only if needed."""
        known = {io.name: self._known_dims(io, shapes[0][0]) for io in self._outputs}
        if not any(-1 in dims for dims in known.values()):
            return known
        zeros = {io.name: np.zeros(shape, io.dtype) for io, shape in zip(self.inputs, shapes, strict=True)}
        return {name: array.shape for name, array in self.compute(zeros).items()}

    def enqueue_nbytes(self, shapes: Mapping[str, Dims]) -> int:
        """Return the bytes of enqueue memory for a batch: all states, and a guard at each end."""
        total = 2 * ALIGNMENT
        for io in self.inputs:
            count = int(np.prod(shapes[io.name], dtype=np.int64))
            total += self.steps * aligned(count * (4 if io.is_floating else 8))
        if self.data_dependent:
            total += aligned(4 * (shapes[self.inputs[0].name][0] + 1))
        return total

    def profile_nbytes(self, index: int) -> int:
        """Return the bytes of enqueue memory for the largest batch of a profile."""
        return self.enqueue_nbytes({name: shapes[2] for name, shapes in self.profiles[index].items()})


STEPS_MAX: Final = 64
INPUTS_MAX: Final = 4
AUX_STREAMS_MAX: Final = 3


def _shapes(io: TensorIO, given: Shapes | None) -> Shapes:
    """Return the shapes of a profile for one input, with defaults filled in."""
    if given is None:
        chosen = []
        for rows, length in zip(ROWS, LENGTHS, strict=True):
            dynamic = (rows, *[length] * (len(io.dims) - 1))
            chosen.append(tuple(d if dim == -1 else dim for dim, d in zip(io.dims, dynamic, strict=True)))
        given = (chosen[0], chosen[1], chosen[2])
    low, usual, high = (tuple(int(dim) for dim in shape) for shape in given)
    assert all(
        1 <= a <= b <= c and dim in (-1, a) and (dim == -1 or a == c)
        for dim, a, b, c in zip(io.dims, low, usual, high, strict=True)
    ), f"{given} is not a profile for {io.name!r}, whose dimensions are {io.dims}"
    return low, usual, high


def read_state(io: TensorIO, array: Array) -> Array:
    """Return ``s[0]``: a tensor's elements, flattened, in the type in which they are computed."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if io.dtype == "bfloat16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32 if io.is_floating else np.int64)


def advance(state: Array, a: int, b: int) -> Array:
    """Return ``s[k]``, given ``s[k-1]``."""
    kind = state.dtype.type
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = kind(a) * state + kind(b)
    return result


def write_state(io: TensorIO, state: Array) -> Array:
    """Return a state in the type of the tensor; bfloat16 as uint16 bits."""
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
    """Return the positive values of each row in their order, padded with zeros to the longest."""
    positive = rows > 0
    counts = positive.sum(axis=1)
    packed = np.zeros((len(rows), int(counts.max(initial=0))), rows.dtype)
    for row, kept in enumerate(positive):
        packed[row, : counts[row]] = rows[row, kept]
    return packed


@dataclass(frozen=True, slots=True)
class PlanContent:
    """The content of a plan."""

    spec: EngineSpec
    version: str
    compute_capability: tuple[int, int]


class PlanError(Exception):
    """A plan that cannot be read; the message is that of the real library."""


def serialization_version(version: str) -> int:
    """Return the number that the real library compares first; it rises with each release."""
    major, minor, patch, _ = version_of(version)
    return (20 * major + minor * 4 + patch) % 2**32


_functions: dict[int, Callable[[dict[str, Array]], Any]] = {}
"""The functions in plans that this process has made."""


def double_plan(
    spec: EngineSpec,
    *,
    version: str | None = None,
    compute_capability: tuple[int, int] = COMPUTE_CAPABILITY,
    flavour: Flavour = "tensorrt",
) -> bytes:
    """Return the plan of an engine, as if that version of TensorRT had built it on that kind of GPU.

    Its header is that of a real plan: the tag ``ftrt``, or ``vtrt`` for the flavour ``tensorrt_rtx``, the
    size of the whole plan at byte 16, the version in bytes 24 to 27. Only the double can read the rest.

    :param version: ``None`` for the one that the double of the flavour imitates.
    """
    version = version_for(flavour) if version is None else version
    may_share_none = flavour != "tensorrt_rtx" and version_of(version) < SHARES_PROFILES
    assert spec.shares_profiles or may_share_none, f"every engine of {flavour} {version} shares profiles"
    # A function may be any object, which is not to be copied.
    plain = asdict(replace(spec, function=None, function_outputs=()))
    fields: dict[str, Any] = {name: value for name, value in plain.items() if name != "_outputs"}
    fields["function_outputs"] = [asdict(io) for io in spec.function_outputs]
    if spec.function is not None:
        fields["function"] = id(spec.function)
        _functions[id(spec.function)] = spec.function
    body = json.dumps({"spec": fields, "compute_capability": compute_capability}).encode()
    body = struct.pack("<I", zlib.crc32(body)) + body
    numbers = version_of(version)
    size = HEADER.size + len(body)
    tag = tag_of(flavour)
    last = RTX_GPUS if tag == RTX_TAG else serialization_version(version)
    return HEADER.pack(tag, 0, 2, size, *numbers, tag, last) + body


def tag_of(flavour: Flavour) -> bytes:
    """Return the first bytes of the plans of a flavour."""
    return RTX_TAG if flavour == "tensorrt_rtx" else TAG


def version_for(flavour: Flavour) -> str:
    """Return the version of a flavour that the double imitates unless told otherwise."""
    return RTX_VERSION if flavour == "tensorrt_rtx" else VERSION


def read_plan(plan: bytes, flavour: Flavour = "tensorrt") -> PlanContent:
    """Return the content of a plan of :func:`double_plan`."""
    if len(plan) < HEADER.size or plan[:4] != tag_of(flavour):
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
    # A header alone may have the right size in it.
    if not body or checksum != struct.pack("<I", zlib.crc32(body)):
        raise PlanError(
            "Serialization (Serialization assertion readCrc == computedCrc failed.Plan is corrupt)"
        )
    said = json.loads(body)
    fields = said["spec"]
    for name in ("inputs", "function_outputs"):
        fields[name] = tuple(TensorIO(**io) for io in fields[name])
    if fields["function"] is not None:
        fields["function"] = _functions[fields["function"]]
    fields["profiles"] = tuple(fields["profiles"])
    version = ".".join(str(number) for number in numbers)
    major, minor = said["compute_capability"]
    return PlanContent(EngineSpec(**fields), version, (major, minor))
