"""A new backend is one entry of the registry, and is then opened and served like any other."""

from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt.backends import registry
from asynctrt.backends.registry import Backend, find_backend
from asynctrt.client import connect
from asynctrt.errors import OptionsError
from asynctrt.serving.folder import ModelFolder
from asynctrt.serving.repository import Repository
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings
from tests.models import rows

pytestmark = pytest.mark.anyio


def load_scale(request):
    """Load a model that multiplies by the number in its file."""
    factor = float(Path(request.model).read_text())
    return asynctrt.FunctionModel(
        lambda inputs: inputs["input"] * np.float32(factor),
        inputs=asynctrt.TensorSpec("input", "float32", (4,)),
        outputs=asynctrt.TensorSpec("output", "float32", (4,)),
        name="scale",
    )


SCALE = Backend(name="scale", platform="scale_text", suffixes=(".scale",), load=load_scale)


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", (*registry.BACKENDS, SCALE))


@pytest.mark.usefixtures("added")
async def test_a_file_of_a_new_backend_is_opened(tmp_path):
    path = tmp_path / "triple.scale"
    path.write_text("3")
    async with asynctrt.open(path) as engine:
        answer = await engine.infer(rows(1, 2))
    np.testing.assert_array_equal(answer["output"], rows(3, 6))
    with pytest.raises(OptionsError, match="the option onnx says how ONNX Runtime loads a model"):
        await asynctrt.open(path, onnx={"graph_optimization_level": "basic"})


def test_each_kind_of_model_has_one_backend():
    suffixes = [suffix for backend in registry.BACKENDS for suffix in backend.suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert find_backend("model.onnx") is find_backend(b"content") is find_backend("model") is registry.ONNX
    assert find_backend(Path("model.trt")) is registry.PLAN
    assert find_backend(object()) is None


@pytest.mark.usefixtures("added")
async def test_a_folder_with_models_of_a_new_backend_is_served(tmp_path):
    version = tmp_path / "models" / "triple" / "1"
    version.mkdir(parents=True)
    (version / "model.scale").write_text("3")
    (version.parent / "config.pbtxt").write_text('backend: "scale"')
    repository = Repository()
    repository.add_place(ModelFolder(tmp_path / "models"))
    async with Server(repository, ServerSettings(http_port=0, grpc=False)) as server:
        await repository.load_all()
        url = server.http_url.replace("http", "ws") + "/v2/ws"
        async with connect(url, proxy=None, attempts=1) as client:
            answer = await client.infer("triple", {"input": rows(1, 2)})
    np.testing.assert_array_equal(answer["output"], rows(3, 6))
    await repository.aclose()
