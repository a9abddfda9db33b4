"""The rule that the first axis of every tensor of a plan counts rows."""

import pytest

from asynctrt.backends.tensorrt.engine import fixed_rows
from asynctrt.errors import ModelError


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [
        ({"x": (-1, 4)}, {"y": (-1,)}, None),
        ({"x": (-1, 4), "z": (-1,)}, {"y": (-1, -1)}, None),
        ({"x": (8, 4), "z": (8,)}, {"y": (8, 8)}, 8),
        ({"x": (8, 4)}, {"y": (-1, 8)}, 8),
        ({"x": (0, 4)}, {"y": (0,)}, 0),
    ],
)
def test_the_batch_size_if_it_is_fixed(inputs, outputs, rows):
    assert fixed_rows("m", inputs, outputs) == rows


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ({}, {"y": (-1,)}, "'m' has 0 inputs and 1 outputs, but needs at least one of each"),
        ({"x": (-1,)}, {}, "'m' has 1 inputs and 0 outputs"),
        (
            {"x": ()},
            {"y": (-1,)},
            "input 'x' of 'm' is a scalar, or has no known rank",
        ),
        ({"x": (-1,)}, {"y": ()}, "output 'y' of 'm' is a scalar"),
        ({"x": (-1,), "z": (8,)}, {"y": (-1,)}, "the inputs of 'm' do not share a batch axis"),
        ({"x": (4,), "z": (8,)}, {"y": (-1,)}, "with a dynamic first axis on every input"),
        ({"x": (-1,)}, {"y": (8,)}, "output 'y' of 'm' has the fixed first axis 8"),
        ({"x": (4,)}, {"y": (8,)}, "with a first axis that counts rows on every output"),
    ],
)
def test_a_model_without_a_batch_axis_is_refused(inputs, outputs, said):
    with pytest.raises(ModelError) as caught:
        fixed_rows("m", inputs, outputs)
    assert said in str(caught.value)
