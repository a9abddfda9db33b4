"""The surface that a model declares, and what a model of the user's own has to bring."""

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.base import MODEL_MEMBERS, Capabilities, Model, ModelBase, missing_members
from asynctrt.errors import ModelError, OptionsError
from asynctrt.tensors import TensorSpec
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio

SPEC = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (4,))


class DoubleBinding:
    def __init__(self, source, target):
        self.source, self.target = source, target

    def enqueue(self, rows, *, profile, stream, arena):
        stream.launch(lambda: np.multiply(self.source[:rows], 2, out=self.target[:rows]), label=rows)

    def unbound_outputs(self, rows):
        return {}


class DoubleContext:
    def bind(self, inputs, outputs):
        return DoubleBinding(inputs[0].array, outputs[0].array)

    def close(self):
        pass


class Own(ModelBase):
    """A model of the user's own, with what the base class does not have."""

    name = "own"
    inputs, outputs = SPEC[:1], SPEC[1:]

    def create_context(self, device):
        return DoubleContext()

    def close(self):
        pass


class Older:
    """A model that was written when the protocol had fewer members."""

    name, inputs, outputs = "older", SPEC[:1], SPEC[1:]
    create_context, close = Own.create_context, Own.close


async def test_a_model_of_ones_own_is_served_with_the_defaults_of_the_base_class():
    async with asynctrt.open(Own()) as engine:
        assert engine.platform == "custom"
        answer = await engine.infer(rows(1, 2))
        np.testing.assert_array_equal(answer["output"], rows(2, 4))


async def test_each_member_that_is_missing_is_named():
    with pytest.raises(
        ModelError,
        match=r"it lacks platform, capabilities\. .*backends\.base\.ModelBase",
    ):
        await asynctrt.open(Older())


def test_the_members_are_those_that_the_protocol_checks():
    assert missing_members(object()) == MODEL_MEMBERS
    assert missing_members(double_model()) == ()
    for name in MODEL_MEMBERS:
        members = {key: 0 for key in MODEL_MEMBERS if key != name}
        assert not isinstance(type("Partial", (), members)(), Model), name
    assert isinstance(type("Whole", (), dict.fromkeys(MODEL_MEMBERS, 0))(), Model)


async def test_a_capability_outside_of_the_capabilities_is_refused():
    class Mistaken(Own):
        rows_max = 8

    with pytest.raises(ModelError, match=r"attribute rows_max, which is not read.*Capabilities\(rows_max="):
        await asynctrt.open(Mistaken())


async def test_capabilities_are_obeyed():
    class Narrow(Own):
        capabilities = Capabilities(rows_max=2)

    with pytest.raises(OptionsError, match="takes at most 2 rows"):
        await asynctrt.open(Narrow(), max_rows=4)
