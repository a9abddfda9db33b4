"""Models by name and version: found, loaded, unloaded, counted."""

import asyncio

import pytest

import asynctrt
from asynctrt.errors import (
    EngineClosedError,
    ModelError,
    ModelNotReadyError,
    UnknownModelError,
    UsageError,
)
from asynctrt.serving.repository import Repository
from asynctrt.serving.served import reason_of
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S

pytestmark = pytest.mark.anyio


def opener(model=None, log=None):
    async def opened():
        if log is not None:
            log.append("opened")
        return await asynctrt.open(model or double_model())

    return opened


async def test_versions_are_numbers_and_the_newest_is_meant():
    repository = Repository()
    for version in ("2", "10", "9"):
        repository.add("m", version=version, opener=opener())
    await repository.load_all()
    assert repository.versions("m") == ["2", "9", "10"]
    assert repository.find("m").version == "10"
    assert repository.find("m", "2").version == "2"
    for version in ("11", "02", "x", "9 "):
        with pytest.raises(UnknownModelError, match="2, 9, 10"):
            repository.find("m", version)
    await repository.aclose()


@pytest.mark.parametrize("version", ["", "x", "-1", "01", "1.0", "²"])
async def test_a_version_that_is_no_number(version):
    with pytest.raises(UsageError, match="whole number"):
        Repository().add("m", version=version, opener=opener())


@pytest.mark.parametrize("name", ["", " m", "m "])
async def test_a_name_that_cannot_be_said(name):
    with pytest.raises(UsageError, match="name"):
        Repository().add(name, opener=opener())


async def test_the_same_twice():
    repository = Repository()
    repository.add("m", opener=opener())
    with pytest.raises(UsageError, match="duplicate version 1"):
        repository.add("m", opener=opener())


async def test_loading_and_unloading():
    log = []
    repository = Repository()
    repository.add("m", opener=opener(log=log))
    assert not repository.is_ready
    with pytest.raises(ModelNotReadyError, match="not loaded yet"):
        repository.find("m")
    await repository.load_all()
    await repository.load_all()
    assert log == ["opened"]
    assert repository.is_ready
    assert repository.index() == [{"name": "m", "version": "1", "state": "READY", "reason": ""}]
    engine = repository.find("m").engine
    await repository.unload("m")
    assert not list(repository)
    assert engine.statistics().state == "closed"
    with pytest.raises(ModelNotReadyError, match="unloaded"):
        repository.find("m", "1")
    await repository.load("m")
    assert repository.find("m").engine is not engine
    for what in (repository.load, repository.unload):
        with pytest.raises(UnknownModelError):
            await what("other")
    await repository.aclose()


async def test_a_model_that_cannot_be_loaded_says_why_and_the_others_are_there():
    repository = Repository()
    repository.add("good", opener=opener())

    async def opened():
        return await asynctrt.open("nothing.onnx")

    repository.add("bad", opener=opened)
    with pytest.raises(ModelError, match=r"nothing\.onnx"):
        await repository.load_all()
    assert repository.find("good").version == "1"
    (bad,) = [item for item in repository.index() if item["name"] == "bad"]
    assert bad["state"] == "UNAVAILABLE"
    assert "nothing.onnx" in bad["reason"]
    await repository.aclose()


async def test_a_tensor_without_a_datatype():
    model = asynctrt.FunctionModel(
        lambda inputs, outputs: None,
        inputs=TensorSpec("x", "complex64", (1,)),
        outputs=TensorSpec("y", "float32", (1,)),
    )
    repository = Repository()
    repository.add("m", opener=opener(model))
    with pytest.raises(ModelError, match="complex64"):
        await repository.load("m")
    async with asynctrt.open(model) as engine:
        with pytest.raises(ModelError, match="'x'"):
            repository.add("other", engine)


async def test_an_engine_of_the_applications_stays_its_own():
    async with asynctrt.open(double_model()) as engine:
        repository = Repository()
        repository.add("m", engine)
        await repository.unload("m")
        assert engine.statistics().state == "open"
        repository = Repository()
        repository.add("m", engine)
        await repository.aclose()
        assert engine.statistics().state == "open"


async def test_draining():
    repository = Repository()
    repository.add("m", opener=opener())
    await repository.load("m")
    async with asyncio.timeout(WAIT_S):
        await repository.drain()
    assert not repository.is_ready
    with pytest.raises(EngineClosedError):
        repository.find("m").engine.submit([[0] * 4])
    await repository.aclose()
    assert "closed" in repository.index()[0]["reason"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (asyncio.CancelledError(), "CANCELED"),
        (asynctrt.QueueFullError("x"), "REJECTED"),
        (asynctrt.DeadlineError("x"), "REJECTED"),
        (asynctrt.InputError("x"), "OTHER"),
        (asynctrt.ExecutionError("x"), "BACKEND"),
        (asynctrt.DeviceLostError("x"), "BACKEND"),
        (ZeroDivisionError(), "OTHER"),
    ],
)
async def test_reasons(error, reason):
    assert reason_of(error) == reason


async def test_a_model_that_is_loaded_while_the_repository_closes():
    gate, engines = asyncio.Event(), []

    async def opened():
        engines.append(await asynctrt.open(double_model()))
        await gate.wait()
        return engines[0]

    repository = Repository()
    repository.add("m", opener=opened)
    loading = asyncio.create_task(repository.load("m"))
    await until(lambda: engines)
    await repository.aclose()
    gate.set()
    with pytest.raises(EngineClosedError, match="closed while it was loading"):
        await loading
    assert engines[0].statistics().state == "closed"
    assert not list(repository)
