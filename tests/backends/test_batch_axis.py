"""The rule that the first axis of every tensor counts rows, whatever stands for a dynamic dimension."""

import pytest

from asynctrt.backends.batch_axis import BatchAxis
from asynctrt.errors import ModelError

AXIS = BatchAxis("m", "Export the model")


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [
        ({"x": (-1, 4)}, {"y": (-1,)}, None),
        ({"x": ("rows", 4)}, {"y": (None, "n")}, None),
        ({"x": (8, 4), "z": (8,)}, {"y": (8, 8)}, 8),
        ({"x": (8, 4)}, {"y": (-1, 8)}, 8),
        ({"x": (0, 4)}, {"y": (0,)}, 0),
    ],
)
def test_the_batch_size_if_it_is_fixed(inputs, outputs, rows):
    assert AXIS.fixed_rows(inputs, outputs) == rows


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ({}, {"y": (-1,)}, "'m' has 0 inputs and 1 outputs, but needs at least one of each"),
        ({"x": (-1,)}, {}, "'m' has 1 inputs and 0 outputs"),
        (
            {"x": ()},
            {"y": (-1,)},
            "input 'x' of 'm' is a scalar, or has no known rank. Export the model with a",
        ),
        ({"x": (-1,)}, {"y": ()}, "output 'y' of 'm' is a scalar"),
        ({"x": (-1,), "z": (8,)}, {"y": (-1,)}, "the inputs of 'm' do not share a batch axis"),
        ({"x": (4,), "z": (8,)}, {"y": (-1,)}, "Export the model with a dynamic first axis on every input"),
        ({"x": (-1,)}, {"y": (8,)}, "output 'y' of 'm' has the fixed first axis 8"),
        ({"x": (4,)}, {"y": (8,)}, "Export the model with a first axis that counts rows on every output"),
    ],
)
def test_a_model_without_a_batch_axis_is_refused(inputs, outputs, said):
    with pytest.raises(ModelError) as caught:
        AXIS.fixed_rows(inputs, outputs)
    assert said in str(caught.value)


def test_the_error_for_a_second_batch_axis():
    assert "input 'x' of 'm' has the batch size on axis 2 too" in str(AXIS.second_axis_error("input", "x", 2))
