"""``batching="deterministic"``: the answer to a request depends on nothing but its own rows."""

import asyncio
import random

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import OptionsError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 60
FIXED = EngineSpec(inputs=(TensorIO("input", dims=(-1, 4)),), is_sensitive=True)
DYNAMIC = EngineSpec(
    inputs=(TensorIO("input", dims=(-1, -1)),),
    profiles=({"input": ((1, 1), (4, 4), (8, 8))}, {"input": ((1, 1), (16, 8), (64, 32))}),
    is_sensitive=True,
)


@pytest.fixture(params=[True, False], ids=["unified", "separate memory"])
def model_of(request):
    made = []

    def make(spec):
        device = HostDevice(in_place="never", unified=request.param)
        double = StrictTensorRT(device)
        made.append((TensorRTModel(double_plan(spec), device=device, flavour=double), double))
        return made[-1][0], device

    yield make
    for model, double in made:
        model.close()
        assert double.violations() == ()


def request_of(number):
    """Rows of one caller: some rows, each of some length."""
    return np.random.default_rng(number).random((1 + number % 5, 4), np.float32)


async def answers(model, device, seed, **kw):
    """Ask for the same rows in another order, at once with others, and return the answers by number."""
    order = list(range(24))
    random.Random(seed).shuffle(order)
    found = {}

    async def ask(engine, number):
        sent = request_of(number)
        result = await engine.infer(sent, priority=number % 3)
        found[number] = result["output"].tobytes()

    async with asynctrt.open(model, device=device, max_rows=8, **kw) as engine, asyncio.timeout(WAIT_S):
        async with asyncio.TaskGroup() as group:
            for number in order:
                group.create_task(ask(engine, number))
                if number % 7 == seed % 7:
                    await asyncio.sleep(0)
        return found, engine.statistics()


@pytest.mark.parametrize("spec", [FIXED, DYNAMIC], ids=["fixed rows", "profiles"])
async def test_without_it_the_double_rounds_as_its_company_would_have_it(model_of, spec):
    model, device = model_of(spec)
    one, _ = await answers(model, device, 1)
    assert any([(await answers(model, device, seed))[0] != one for seed in (2, 3, 4)])


@pytest.mark.parametrize("spec", [FIXED, DYNAMIC], ids=["fixed rows", "profiles"])
async def test_with_it_only_ones_own_rows_count(model_of, spec):
    model, device = model_of(spec)
    kw = {"batching": "deterministic"}
    one, statistics = await answers(model, device, 1, **kw)
    assert statistics.batches == 24
    assert statistics.rows_padded == 24 * 8 - statistics.rows
    for seed in (2, 3, 4):
        assert (await answers(model, device, seed, **kw))[0] == one
    async with asynctrt.open(model, device=device, max_rows=8, batching="deterministic") as engine:
        assert engine.statistics().contexts == 1
        for number in range(24):
            assert (await engine.infer(request_of(number)))["output"].tobytes() == one[number]


async def test_a_call_of_more_rows_than_a_batch_holds(model_of):
    model, device = model_of(FIXED)
    sent = np.random.default_rng(1).random((21, 4), np.float32)
    async with asynctrt.open(model, device=device, max_rows=8, batching="deterministic") as engine:
        alone = (await engine.infer(sent))["output"]
        _, among, _ = await asyncio.gather(*[engine.infer(given) for given in (rows(1), sent, rows(2))])
        np.testing.assert_array_equal(among["output"], alone)


async def test_it_says_what_remains_random(model_of, caplog):
    model, device = model_of(FIXED)
    async with asynctrt.open(model, device=device, batching="deterministic"):
        assert "layers that TensorRT leaves random" in caplog.text


async def test_it_works_for_functions():
    async with asynctrt.open(double_model(), batching="deterministic", max_rows=4) as engine:
        results = await asyncio.gather(*[engine.infer(rows(value)) for value in range(9)])
        assert [result["output"][0, 0] for result in results] == [2 * value for value in range(9)]
        assert engine.statistics().batches == 9


@pytest.mark.parametrize("wrong", [{"contexts": 2}, {"arenas": 2}, {"graphs": (1, 2)}])
def test_what_contradicts_it(wrong):
    with pytest.raises(OptionsError, match="deterministic"):
        asynctrt.open("model.onnx", batching="deterministic", **wrong)
