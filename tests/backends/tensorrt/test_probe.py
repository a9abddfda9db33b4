"""Which input dimension an output's follows: engines that compute their shapes in many ways."""

import numpy as np
import pytest

from asynctrt.backends.tensorrt.abilities import Abilities
from asynctrt.backends.tensorrt.engine import Profile, Signature
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.messages import ErrorRecorder
from asynctrt.backends.tensorrt.plan import read_header
from asynctrt.backends.tensorrt.probe import OutputProbe
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ModelError
from asynctrt.tensors import TensorSpec
from tests.backends.tensorrt.helpers import header
from tests.doubles.tensorrt import StrictTensorRT

FLOAT = np.dtype("float32")
LATEST = Flavour("tensorrt", StrictTensorRT(HostDevice()), is_real=False)
ABILITIES = Abilities.of(LATEST, read_header(header()))


class Context:
    """Infers output shapes with a function, in place of a TensorRT context."""

    def __init__(self, signature, infer, refuse=lambda shapes: False, switch=lambda index: True):
        self._signature = signature
        self._infer = infer
        self._refuse = refuse
        self._switch = switch
        self._shapes = {}
        self._profile = None

    def set_optimization_profile_async(self, index, stream):
        self._profile = self._signature.profiles[index]
        return self._switch(index)

    def set_input_shape(self, name, shape):
        index = [spec.name for spec in self._signature.inputs].index(name)
        low, _, high = self._profile.shapes[index]
        assert all(a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True)), "within the profile"
        self._shapes[name] = shape
        return True

    def infer_shapes(self):
        if self._refuse(self._shapes):
            raise RuntimeError("shapes do not fit together")
        return []

    def get_tensor_shape(self, name):
        return self._infer(self._shapes)[name]


def signature(outputs, *, inputs=("a", "b"), ranges=(((1, 2), (8, 16), (64, 128)),), rows_fixed=None):
    """Return a signature with one dynamic dimension per input, and the given number per output."""
    return Signature(
        "model",
        tuple(TensorSpec(name, FLOAT, (f"{name}.1",)) for name in inputs),
        tuple(
            TensorSpec(name, FLOAT, tuple(f"{name}.{axis}" for axis in range(1, count + 1)))
            for name, count in outputs.items()
        ),
        rows_fixed,
        tuple(Profile(index, 0, (shapes,) * len(inputs)) for index, shapes in enumerate(ranges)),
    )


def probed(read, infer, **kw):
    probe = OutputProbe(read)
    probe.observe(Context(read, infer, **kw), 1, ABILITIES, ErrorRecorder())
    return {spec.name: spec.dims for spec in probe.outputs()}


def test_outputs_that_follow_an_input():
    read = signature({"y": 2, "z": 1, "w": 0})
    dims = probed(
        read,
        lambda s: {"y": (s["a"][0], s["a"][1], s["b"][1]), "z": (s["b"][0], s["b"][1]), "w": (s["a"][0],)},
    )
    assert dims == {"y": ("a.1", "b.1"), "z": ("b.1",), "w": ()}


@pytest.mark.parametrize(
    "length",
    [
        lambda a, b: a + b,
        lambda a, b: 2 * a,
        lambda a, b: -(-a // 2) * 2,  # To the next even number: equal at both ends of the profile.
        lambda a, b: max(a, b),
        lambda a, b: min(a, 127),
        lambda a, b: a - 1,
        lambda a, b: -1,
    ],
    ids=["sum", "double", "even", "max", "min", "less", "data"],
)
def test_outputs_that_follow_none(length):
    read = signature({"y": 1})
    assert probed(read, lambda s: {"y": (s["a"][0], length(s["a"][1], s["b"][1]))}) == {"y": ("y.1",)}


def test_inputs_that_have_to_agree():
    """Most tried shapes are refused; the two inputs are then equally good, and the first is chosen."""
    read = signature({"y": 1})
    dims = probed(
        read,
        lambda s: {"y": (s["a"][0], s["a"][1])},
        refuse=lambda s: s["a"][1] != s["b"][1],
    )
    assert dims == {"y": ("a.1",)}


def test_an_engine_that_refuses_everything():
    read = signature({"y": 1})
    assert probed(read, lambda s: {}, refuse=lambda s: True) == {"y": ("y.1",)}
    assert probed(read, lambda s: {}, switch=lambda index: False) == {"y": ("y.1",)}


def test_profiles_are_all_looked_at():
    """Being equal only in the first profile is not enough."""
    read = signature({"y": 1}, ranges=(((1, 2), (4, 4), (8, 8)), ((1, 2), (4, 40), (8, 80))))
    assert probed(read, lambda s: {"y": (s["a"][0], min(s["a"][1], 8))}) == {"y": ("y.1",)}


def test_dimensions_that_a_profile_fixes():
    read = signature({"y": 1}, inputs=("a",), ranges=(((1, 5), (4, 5), (8, 5)),))
    assert probed(read, lambda s: {"y": (s["a"][0], s["a"][1])}) == {"y": ("a.1",)}


def test_a_first_axis_that_does_not_count_rows():
    with pytest.raises(ModelError, match="does not count rows: it is 128 for 9 rows"):
        probed(signature({"y": 1}), lambda s: {"y": (s["a"][1], 3)})
    with pytest.raises(ModelError, match="known only when the batch has run"):
        probed(signature({"y": 1}), lambda s: {"y": (-1, 3)})


def test_the_batch_size_on_another_axis():
    with pytest.raises(ModelError, match="batch size on axis 1 too"):
        probed(signature({"y": 1}), lambda s: {"y": (s["a"][0], s["a"][0])})


def test_a_constant_that_equals_a_fixed_batch_is_not_the_batch():
    read = signature({"y": 1}, inputs=("a",), ranges=(((4, 2), (4, 16), (4, 128)),), rows_fixed=4)
    assert probed(read, lambda s: {"y": (4, 4)}) == {"y": ("y.1",)}
