"""What engines of each version can do, and how they run under a later library."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import UsageError
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.backends.tensorrt.helpers import WAIT_S

pytestmark = pytest.mark.anyio

VERSION = "8.6.1.6"
TWO = ({"input": ((1, 1), (4, 4), (8, 8))}, {"input": ((1, 1), (16, 8), (64, 32))})
SPECS = {
    "one profile": EngineSpec(shares_profiles=False),
    "two profiles": EngineSpec(
        inputs=(TensorIO("input", dims=(-1, -1)),), profiles=TWO, shares_profiles=False
    ),
}


@pytest.fixture
def load():
    made = []

    def load(spec, version=VERSION, **kw):
        device = HostDevice(in_place="never", unified=False, **kw)
        double = StrictTensorRT(device, version=version)
        model = TensorRTModel(double_plan(spec, version=version), device=device, flavour=double)
        made.append((model, double))
        return model

    yield load
    for model, double in made:
        model.close()
        assert double.violations() == ()


async def check(engine, spec, count=30):
    length = 16 if -1 not in spec.inputs[0].dims[1:] else None
    random = np.random.default_rng(1)
    sent = [
        random.integers(-9, 9, (1 + n % 5, length or 1 + 5 * n % 32)).astype(np.float32) for n in range(count)
    ]
    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(*[engine.infer(one) for one in sent])
    for given, result in zip(sent, results, strict=True):
        np.testing.assert_array_equal(result["output"], spec.expected(given)["output"])


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("contexts", [1, 2, 8])
async def test_every_request_is_answered_by_the_one_context_that_can_be(load, caplog, kind, contexts):
    spec = SPECS[kind]
    model = load(spec)
    (warning,) = [text for text in caplog.messages if "PreviewFeature.PROFILE_SHARING_0806" in text]
    assert "runs on one execution context" in warning
    assert model.contexts_max == 1
    assert not model.is_capturable
    async with asynctrt.open(model, device=model.device, contexts=contexts) as engine:
        await check(engine, spec)
        assert (engine.statistics().contexts, engine.statistics().arenas) == (1, 1)


async def test_a_plan_that_shares_its_profiles_has_as_many_contexts_as_are_asked_for(load, caplog):
    spec = EngineSpec()
    model = load(spec)
    assert not caplog.records
    assert (model.contexts_max, model.is_capturable) == (None, True)
    async with asynctrt.open(model, device=model.device, contexts=3) as engine:
        assert engine.statistics().contexts == 3
        await check(engine, spec)


async def test_with_later_versions_it_is_known_and_not_tried(load, monkeypatch):
    made = []
    engine = StrictTensorRT(HostDevice()).ICudaEngine
    create = engine.create_execution_context
    monkeypatch.setattr(engine, "create_execution_context", lambda *args: made.append(1) or create(*args))
    load(EngineSpec(), version="10.9.0.34")
    later = len(made)
    load(EngineSpec())
    assert (later, len(made) - later) == (1, 2)


async def test_a_second_engine_on_the_same_model_is_refused_when_it_is_opened(load):
    spec = SPECS["one profile"]
    model = load(spec)
    async with asynctrt.open(model, device=model.device) as engine:
        with pytest.raises(UsageError, match="has its only context already.*PROFILE_SHARING_0806"):
            await asynctrt.open(model, device=model.device)
        await check(engine, spec)
    async with asynctrt.open(model, device=model.device) as engine:
        await check(engine, spec)


async def test_it_works_in_arenas_that_are_shared(load):
    spec = SPECS["two profiles"]
    model = load(spec)
    with Arenas(model.device, 2) as arenas:
        async with asynctrt.open(model, device=model.device, contexts=4, shared_arenas=arenas) as engine:
            await check(engine, spec)


async def test_without_room_for_a_second_context_nothing_is_tried(load):
    spec = EngineSpec(persistent_nbytes=100_000, shares_profiles=True)
    model = load(spec, memory_nbytes=150_000)
    assert model.contexts_max is None
    async with asynctrt.open(model, device=model.device, contexts=1, max_rows=4) as engine:
        await check(engine, spec, 3)
