"""Paths of models: a wrong one gives the same error, whatever reads the file."""

from pathlib import Path

import pytest

from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.backends.tensorrt.plan import read_plan
from asynctrt.errors import ModelError, ModelNotFoundError
from asynctrt.plans.building import read_source
from asynctrt.plans.plan_file import digest_of, find_plan

READERS = {
    "onnx": OnnxModel,
    "build": read_source,
    "plan": read_plan,
    "inspect": find_plan,
    "digest": digest_of,
}


@pytest.fixture(params=READERS)
def read(request):
    return READERS[request.param]


@pytest.mark.parametrize("name", ["missing", "a\0b", "a\ud800b", "file/m", "n" * 5000, "missing/m"])
def test_a_path_of_no_file(tmp_path, read, name):
    (tmp_path / "file").touch()
    for suffix in (".onnx", ".plan"):
        with pytest.raises(ModelNotFoundError, match="there is no file .* working directory is") as caught:
            read(Path(f"{tmp_path}/{name}{suffix}"))
        assert len(str(caught.value)) < 2000


def test_a_folder(tmp_path, read):
    with pytest.raises(ModelNotFoundError, match="is a folder. Give the path of a file in it"):
        read(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path, read, monkeypatch):
    (tmp_path / "m.onnx").touch()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("asynctrt._util.files.os.open", refuse)
    with pytest.raises(ModelError, match="cannot be read: Permission denied. Check its owner and mode"):
        read(tmp_path / "m.onnx")
