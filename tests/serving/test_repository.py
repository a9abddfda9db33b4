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
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, rows
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
        await repository.load("m")
        assert repository.find("m").engine is engine
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


async def test_a_swap_lets_the_old_engine_answer_what_it_has():
    old = LatchDevice(concurrency=1)
    devices = [old, "host"]

    async def opened():
        return await asynctrt.open(double_model(), device=devices.pop(0), contexts=1, max_rows=2)

    repository = Repository()
    repository.add("m", opener=opened)
    async with asyncio.timeout(WAIT_S):
        await repository.load("m")
        first = repository.find("m")
        # One batch in flight, one queued, and one that is split.
        futures = [first.engine.submit(rows(*values)) for values in ([1], [2, 3], [4, 5, 6, 7, 8])]
        await until(lambda: old.held)
        await repository.load("m")
        second = repository.find("m")
        assert second is not first
        assert list(repository) == [second]
        assert (await second.engine.infer(rows(9)))["output"][0, 0] == 18
        assert first.engine.state == "draining"
        assert not any(future.done() for future in futures)
        draining = asyncio.create_task(repository.drain())
        old.open()
        answers = [(await future)["output"][:, 0].tolist() for future in futures]
        assert answers == [[2], [4, 6], [8, 10, 12, 14, 16]]
        await draining
        await until(lambda: first.engine.state == "closed")
        await repository.aclose()


async def test_states_while_it_changes():
    gate, device = asyncio.Event(), LatchDevice(concurrency=1)

    async def opened():
        await gate.wait()
        return await asynctrt.open(double_model(), device=device)

    def state():
        return repository.index()[0]["state"]

    repository = Repository()
    repository.add("m", opener=opened)
    async with asyncio.timeout(WAIT_S):
        loading = asyncio.create_task(repository.load("m"))
        await until(lambda: state() == "LOADING")
        gate.set()
        await loading
        gate.clear()
        loading = asyncio.create_task(repository.load("m"))
        future = repository.find("m").engine.submit(rows(1))
        await until(lambda: device.held)
        assert state() == "READY", "the old one answers"
        loading.cancel()
        await asyncio.wait([loading])
        unloading = asyncio.create_task(repository.unload("m"))
        await until(lambda: state() == "UNLOADING")
        device.open()
        await unloading
        assert (await future)["output"][0, 0] == 2
        assert repository.index()[0] == {
            "name": "m",
            "version": "1",
            "state": "UNAVAILABLE",
            "reason": "unloaded",
        }
        await repository.aclose()


async def test_a_load_whose_client_goes_away_changes_nothing():
    engines, gate = [], asyncio.Event()

    async def opened():
        engines.append(await asynctrt.open(double_model()))
        return engines[-1]

    async def slow():
        await gate.wait()
        raise AssertionError("it is cancelled before")

    repository = Repository()
    repository.add("m", opener=opened, version="1")
    openers = [opened, slow]

    async def second():
        return await openers.pop(0)()

    repository.add("m", opener=second, version="2")
    async with asyncio.timeout(WAIT_S):
        await repository.load("m")
        served = list(repository)
        loading = asyncio.create_task(repository.load("m"))
        await until(lambda: len(engines) == 3)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert list(repository) == served
        assert [engine.state for engine in engines] == ["open", "open", "closed"]
        assert [item["state"] for item in repository.index()] == ["READY", "READY"]
        await repository.aclose()
