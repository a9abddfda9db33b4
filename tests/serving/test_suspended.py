"""A model that the application has suspended: it is not ready, and the server is."""

import json

import pytest

import asynctrt
from asynctrt.errors import ModelNotReadyError
from asynctrt.serving.entries import SUSPENDED
from asynctrt.serving.repository import Repository
from tests.models import double_model
from tests.serving.support import ask, engine_of, serving

pytestmark = pytest.mark.anyio


def suspendable():
    """A function that has no weights, so that there is nothing to do."""
    model = double_model()
    model.check_suspendable = model.suspend = lambda contexts: None
    model.resume = lambda: None
    return model


async def test_it_is_not_ready_and_the_server_is():
    repository = Repository()
    async with asynctrt.open(suspendable()) as engine, asynctrt.open(double_model()) as other:
        repository.add("model", engine)
        repository.add("other", other)
        for _ in range(2):
            await engine.suspend()
            assert repository.is_ready
            assert [entry["reason"] for entry in repository.index()] == [SUSPENDED, ""]
            assert [entry["state"] for entry in repository.index()] == ["UNAVAILABLE", "READY"]
            with pytest.raises(ModelNotReadyError, match="it is suspended"):
                repository.find_ready("model")
            await engine.resume()
            assert repository.find_ready("model").engine is engine
            assert {entry["state"] for entry in repository.index()} == {"READY"}


async def test_what_callers_are_told():
    async with serving({"double": suspendable()}) as server:
        engine = engine_of(server)
        tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
        body = json.dumps({"inputs": [tensor]}).encode()
        await engine.suspend()
        status, _, answer = await ask(server, "/v2/models/double/infer", body)
        assert status == 503
        assert "call resume() first" in json.loads(answer)["error"]
        assert (await ask(server, "/v2/models/double/ready"))[0] == 400
        assert (await ask(server, "/v2/health/ready"))[0] == 200
        await engine.resume()
        assert (await ask(server, "/v2/models/double/infer", body))[0] == 200
