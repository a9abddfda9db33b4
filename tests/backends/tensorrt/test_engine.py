"""Signatures of engines: tensors, the batch axis, profiles; and engines that cannot be batched."""

import dataclasses
import sys

import numpy as np
import pytest

from asynctrt.backends.tensorrt.abilities import Abilities
from asynctrt.backends.tensorrt.engine import DTYPES, Profile, Signature, read_signature
from asynctrt.devices.host import HostDevice
from asynctrt.errors import InputError, ModelError
from asynctrt.tensors import TensorSpec
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO

ABILITIES = Abilities(
    shares_profiles=True,
    sizes_memory=True,
    tells_formats_by_profile=True,
    tells_weights=True,
    tells_aliases=True,
    allocates_outputs=True,
    raises=True,
)


class Engine:
    """The part of ``ICudaEngine`` that ``read_signature`` uses, for engines that the double cannot have."""

    def __init__(self, inputs, outputs, *, profiles=None, locations=(), aliases=(), formats=()):
        self._inputs = inputs
        self._tensors = {**inputs, **outputs}
        self._profiles = profiles or [{}]
        self._locations = dict(locations)
        self._aliases = dict(aliases)
        self._formats = dict(formats)
        self._trt = StrictTensorRT(HostDevice())
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(self._profiles)

    def get_tensor_name(self, index):
        return list(self._tensors)[index]

    def get_tensor_mode(self, name):
        modes = self._trt.TensorIOMode
        return modes.INPUT if name in self._inputs else modes.OUTPUT

    def get_tensor_dtype(self, name):
        return self._trt.DataType.FLOAT

    def get_tensor_shape(self, name):
        return self._trt.Dims(self._tensors[name])

    def get_tensor_location(self, name):
        return self._locations.get(name, self._trt.TensorLocation.DEVICE)

    def is_shape_inference_io(self, name):
        return False

    def get_aliased_input_tensor(self, name):
        return self._aliases.get(name)

    def get_tensor_format_desc(self, name, profile_index=0):
        last = profile_index == self.num_optimization_profiles - 1
        return self._formats.get(name if last else None, "Row major linear FP32 format")

    def get_tensor_vectorized_dim(self, name, profile_index=0):
        return -1

    def get_device_memory_size_for_profile_v2(self, index):
        return 1000 * (index + 1)

    def get_tensor_profile_shape(self, name, index):
        shape = self._tensors[name]
        given = self._profiles[index].get(name)
        if given is None:
            given = [tuple(value if dim == -1 else dim for dim in shape) for value in (1, 4, 8)]
        return [self._trt.Dims(one) for one in given]

    def read(self):
        return read_signature("model", self._trt, self, ABILITIES)


def refused(engine):
    with pytest.raises(ModelError) as caught:
        engine.read()
    message = str(caught.value)
    assert "'model'" in message
    return message


def test_names_types_and_dimensions(bench):
    spec = EngineSpec(
        inputs=(TensorIO("tokens", "int64", (-1, -1)), TensorIO("mask", "uint8", (-1, -1)), TensorIO("image"))
    )
    model = bench(spec).model
    assert [str(one) for one in model.inputs] == [
        "tokens: int64[rows, tokens.1]",
        "mask: uint8[rows, mask.1]",
        "image: float32[rows, 16]",
    ]
    assert model.capabilities.rows_fixed is None
    assert (model.capabilities.rows_min, model.capabilities.rows_max) == (1, 64)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), "bfloat16"])
def test_every_type_that_an_array_can_have(bench, dtype):
    model = bench(EngineSpec(inputs=(TensorIO("x", dtype),))).model
    assert model.inputs[0].dtype.name == dtype
    assert model.outputs[0].dtype.name == dtype


@pytest.mark.parametrize("dtype", ["fp8", "int4", "fp4"])
def test_types_that_no_array_has(bench, dtype):
    with pytest.raises(ModelError, match="Build the plan with such inputs"):
        bench(EngineSpec(inputs=(TensorIO("x", dtype),)), model=False).open()


def test_bfloat16_without_its_package(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ModelError, match="pip install ml-dtypes"):
        bench(EngineSpec(inputs=(TensorIO("x", "bfloat16"),)), model=False).open()


def test_a_shape_tensor_among_the_inputs(bench):
    spec = EngineSpec(inputs=(TensorIO("x"), TensorIO("size", "int64", (2,), on_host=True)))
    with pytest.raises(ModelError, match="'size'.* is a shape tensor"):
        bench(spec, model=False).open()


def test_a_shape_tensor_among_the_outputs():
    host = StrictTensorRT(HostDevice()).TensorLocation.HOST
    engine = Engine({"x": (-1, 4)}, {"y": (-1, 4), "count": (1,)}, locations={"count": host})
    assert "'count'" in refused(engine)


def test_a_fixed_batch(bench):
    model = bench(EngineSpec(fixed_rows=8)).model
    assert model.capabilities.rows_fixed == model.capabilities.rows_max == model.capabilities.rows_min == 8


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ({}, {"y": (-1,)}, "0 inputs"),
        ({"x": (-1,)}, {}, "0 outputs"),
        ({"x": ()}, {"y": (-1, 2)}, "is a scalar"),
        ({"x": (-1, 2)}, {"y": ()}, "is a scalar"),
        ({"x": (-1, 2), "z": (8, 2)}, {"y": (-1, 2)}, "do not share a batch axis"),
        ({"x": (4, 2), "z": (8, 2)}, {"y": (4, 2)}, "do not share a batch axis"),
        ({"x": (-1, 2)}, {"y": (5, 2)}, "fixed first axis 5"),
        ({"x": (4, 2)}, {"y": (5, 2)}, "fixed first axis 5"),
    ],
)
def test_a_batch_axis_that_is_missing(inputs, outputs, said):
    assert said in refused(Engine(inputs, outputs))


def test_inputs_with_different_ranges_of_rows():
    profile = {"x": [(1, 2), (2, 2), (8, 2)], "z": [(1, 2), (2, 2), (4, 2)]}
    message = refused(Engine({"x": (-1, 2), "z": (-1, 2)}, {"y": (-1, 2)}, profiles=[profile]))
    assert "(1, 8)" in message
    assert "(1, 4)" in message


def test_an_output_in_place_of_an_input():
    engine = Engine({"cache": (-1, 4)}, {"next": (-1, 4)}, aliases={"next": "cache"})
    assert "overwrites input 'cache'" in refused(engine)


@pytest.mark.parametrize("profiles", [1, 3])
def test_layouts_that_are_not_row_major(profiles):
    engine = Engine(
        {"x": (-1, 8, 4, 4)},
        {"y": (-1, 4)},
        profiles=[{}] * profiles,
        formats={"x": "Channel major FP16 format where C % 8 == 0"},
    )
    message = refused(engine)
    assert "Channel major FP16" in message
    assert f"in profile {profiles - 1}" in message
    assert "linear" in message


def test_enqueue_memory_is_aligned():
    signature = Engine({"x": (-1, 4)}, {"y": (-1, 4)}, profiles=[{}, {}]).read()
    assert [profile.enqueue_nbytes for profile in signature.profiles] == [1024, 2048]
    assert signature.enqueue_nbytes == 2048


def test_a_static_engine_whose_profile_says_nothing():
    signature = Engine({"x": (4, 2)}, {"y": (4, 2)}, profiles=[{"x": []}]).read()
    assert signature.profiles[0].shapes == (((4, 2), (4, 2), (4, 2)),)
    assert signature.rows_fixed == 4


def profile(index, nbytes, low, usual, high):
    return Profile(index, nbytes, ((low, usual, high),))


SIGNATURE = Signature(
    "model",
    (TensorSpec("x", np.dtype("float32"), ("x.1",)),),
    (TensorSpec("y", np.dtype("float32"), ("x.1",)),),
    None,
    (
        profile(0, 4096, (1, 1), (32, 64), (64, 128)),
        profile(1, 1024, (1, 1), (4, 16), (8, 32)),
        profile(2, 1024, (1, 1), (8, 16), (8, 32)),
        profile(3, 512, (16, 1), (16, 8), (16, 8)),
    ),
)


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        (1, 1, 1),  # The least memory, and of two the one optimised for fewer rows.
        (8, 32, 2),
        (5, 32, 1),
        (9, 32, 0),
        (8, 33, 0),
        (16, 8, 3),
        (16, 9, 0),
        (64, 128, 0),
    ],
)
def test_the_profile_with_the_least_memory_is_taken(rows, length, expected):
    assert SIGNATURE.profile_of(((length,),), rows).index == expected


@pytest.mark.parametrize(("rows", "length"), [(65, 1), (1, 129), (0, 1), (1, 0)])
def test_shapes_that_no_profile_admits(rows, length):
    with pytest.raises(InputError) as caught:
        SIGNATURE.profile_of(((length,),), rows)
    message = str(caught.value)
    assert str((rows, length)) in message
    assert "profile 0 takes x (1..64, 1..128)" in message
    assert "profile 3 takes x (16, 1..8)" in message


def test_what_the_profiles_come_to():
    assert (SIGNATURE.rows_min, SIGNATURE.rows_max, SIGNATURE.enqueue_nbytes) == (1, 64, 4096)
    assert SIGNATURE.unbound == ()
    spec = TensorSpec("y", np.dtype("float32"), ("y.1",))
    assert dataclasses.replace(SIGNATURE, outputs=(spec,)).unbound == ("y",)
