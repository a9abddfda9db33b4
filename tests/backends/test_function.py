"""Python functions as models."""

import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.errors import ModelError
from asynctrt.tensors import TensorSpec
from tests.models import double


def test_names():
    spec = TensorSpec("x", "float32", (2,))
    assert FunctionModel(double, inputs=spec, outputs=spec).name == "double"
    assert FunctionModel(double, inputs=spec, outputs=spec, name="other").name == "other"
    assert repr(FunctionModel(double, inputs=[spec], outputs=[spec])) == "<FunctionModel double>"


def test_an_output_dimension_that_no_input_determines():
    with pytest.raises(ModelError, match="output 'y' has the dimension 'n', which no input has"):
        FunctionModel(
            double, inputs=TensorSpec("x", "float32", ("m",)), outputs=TensorSpec("y", "float32", ("n",))
        )
