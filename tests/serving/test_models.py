"""What a user writes for a model to serve."""

import anyio
import pytest

from asynctrt.errors import DeviceUnavailableError, ModelError, OptionsError
from asynctrt.serving.models import ModelSource, files_mark
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


def test_a_folder_is_a_model_of_many(tmp_path):
    (tmp_path / "model.onnx").mkdir()
    source = ModelSource.parse(str(tmp_path), {"max_rows": 4})
    assert source.is_folder
    assert source.settings == {"max_rows": 4}
    assert not ModelSource.parse(str(tmp_path / "model.onnx"), {}).is_folder
    table = {"path": str(tmp_path), "device": "cuda:1", "max_rows": 8}
    source = ModelSource.read(table, {"max_delay": 0.1})
    assert (source.is_folder, source.device) == (True, "cuda:1")
    assert source.settings == {"max_rows": 8, "max_delay": 0.1}
    for name in ("name", "version"):
        with pytest.raises(OptionsError, match="gives its models names and versions"):
            ModelSource.read({"path": str(tmp_path), name: "1"}, {})


@pytest.mark.parametrize(
    ("table", "says"),
    [({"device": 1}, "name of a device"), ({"max_rows": -1}, "max_rows")],
)
def test_impossible_devices_and_options(table, says):
    with pytest.raises(OptionsError, match=says):
        ModelSource.read({"path": "m.onnx", **table}, {})


def test_a_model_has_its_own_device():
    async def main():
        with pytest.raises(DeviceUnavailableError, match="'mars' is not a device"):
            await ModelSource("m", "1", "tests.models:double_model", device="mars").opener("host")()

    anyio.run(main)


def test_the_mark_of_a_file(tmp_path):
    path = tmp_path / "m.onnx"
    source = ModelSource.parse(str(path), {})
    assert source.mark() is None
    path.write_bytes(b"a")
    first = source.mark()
    assert source.mark() == first
    path.write_bytes(b"ab")
    assert source.mark() != first
    assert ModelSource.parse("tests.models:double_model", {}).mark() is None
    for number in range(12):
        (tmp_path / f"{number}").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynctrt.serving.models.FILES_MAX", 10)
        with pytest.raises(ModelError, match="more than 10 files"):
            files_mark(tmp_path)
