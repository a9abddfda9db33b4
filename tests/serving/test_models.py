"""What a user writes for a model to serve."""

import anyio
import pytest

from asynctrt.errors import OptionsError
from asynctrt.serving.models import ModelSource
from tests.models import rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b/model.onnx", ("model", "1", "a/b/model.onnx")),
        ("name=model.onnx", ("name", "1", "model.onnx")),
        ("name:3=model.onnx", ("name", "3", "model.onnx")),
        ("a/b c.d:12=x=y.onnx", ("a/b c.d", "12", "x=y.onnx")),
        ("a:b=model.onnx", ("a:b", "1", "model.onnx")),
        ("package.module:make", ("make", "1", "package.module:make")),
        ("n:2=package.module:make", ("n", "2", "package.module:make")),
    ],
)
def test_ways_to_write_a_model(text, expected):
    source = ModelSource.parse(text, {})
    assert (source.name, source.version, source.path) == expected


@pytest.mark.parametrize("text", ["", "=", "=x", "name="])
def test_what_is_no_model(text):
    with pytest.raises(OptionsError, match="NAME=PATH"):
        ModelSource.parse(text, {})


def test_a_table_has_options_of_its_own():
    source = ModelSource.read(
        {"path": "m.onnx", "version": 2, "max_rows": 4}, {"max_rows": 8, "max_delay": 0.1}
    )
    assert (source.name, source.version) == ("m", "2")
    assert source.settings == {"max_rows": 4, "max_delay": 0.1}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "path"),
        ({"path": 3}, "path"),
        ({"path": "m.onnx", "name": 3}, "name must be a string"),
        ({"path": "m.onnx", "version": True}, "version a number"),
        ({"path": "m.onnx", "max_row": 3}, "did you mean 'max_rows'"),
        ({"path": "m.onnx", "max_rows": 0}, "max_rows"),
    ],
)
def test_impossible_tables(table, says):
    with pytest.raises(OptionsError, match=says):
        ModelSource.read(table, {})


def test_a_source_is_opened_with_its_options():
    async def main():
        engine = await ModelSource.parse("tests.models:double_model", {"max_rows": 3}).opener("host")()
        try:
            assert engine.max_rows == 3
            assert (await engine.infer(rows(2)))["output"][0, 0] == 4
        finally:
            await engine.aclose()

    anyio.run(main)
