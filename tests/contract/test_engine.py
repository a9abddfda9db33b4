"""The whole way from ``await engine.infer`` down and back, over every device and backend."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import EngineClosedError
from tests.contract.devices import DEVICES
from tests.models import double_model, double_onnx, mixed_onnx, rows, sequence_onnx, unnamed_output_onnx

pytestmark = pytest.mark.anyio
WAIT_S = 30


@pytest.fixture(params=DEVICES)
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()


@pytest.fixture(params=["function", "onnxruntime"])
def model(request, tmp_path):
    return double_model() if request.param == "function" else double_onnx(tmp_path / "double.onnx")


async def test_a_lone_request(device, model):
    async with asynctrt.open(model, device=device) as engine:
        result = await engine.infer({"input": rows(1, 2)})
        np.testing.assert_array_equal(result["output"], rows(2, 4))
        assert result.batch_rows == 2
        timing = result.timing
        assert min(timing.queue_ns, timing.copy_in_ns, timing.compute_ns, timing.copy_out_ns) >= 0
        assert timing.compute_ns > 0


async def test_many_callers_at_once_each_get_their_own_rows(device, model):
    async with asynctrt.open(model, device=device, max_rows=16) as engine:

        async def caller(number):
            count = number % 5 + 1
            sent = rows(*range(number, number + count))
            result = await engine.infer(sent)
            np.testing.assert_array_equal(result["output"], 2 * sent)
            return count

        async with asyncio.timeout(WAIT_S):
            counts = await asyncio.gather(*[caller(number) for number in range(500)])
        statistics = engine.statistics()
        assert statistics.rows == sum(counts)
        assert statistics.succeeded == 500
        assert statistics.mean_batch_rows > 8


async def test_more_rows_than_a_batch_are_split_and_rejoined_in_order(device, model):
    async with asynctrt.open(model, device=device, max_rows=8) as engine:
        sent = rows(*range(30))
        result = await engine.infer(sent)
        np.testing.assert_array_equal(result["output"], 2 * sent)
        assert result.batch_rows == 8
        assert engine.statistics().submitted == 4


async def test_slots_are_written_straight_into_the_slab(device, model):
    async with asynctrt.open(model, device=device) as engine:

        async def caller(number):
            async with engine.slot(rows=2) as slot:
                slot["input"][...] = rows(number, number + 1)
                result = await slot.infer()
            np.testing.assert_array_equal(result["output"], rows(2 * number, 2 * number + 2))

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[caller(number) for number in range(200)])


async def test_large_rows_are_copied_off_the_loop(device, tmp_path):
    dims = (300_000,)
    async with asynctrt.open(double_model(dims=dims), device=device, max_rows=4) as engine:
        sent = [rows(number, dims=dims) for number in range(10)]
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*[engine.infer(row) for row in sent])
        for row, result in zip(sent, results, strict=True):
            np.testing.assert_array_equal(result["output"], 2 * row)
        assert result.timing.copy_in_ns > 0


async def test_closing_answers_everybody(device, model):
    async with asyncio.timeout(WAIT_S):
        engine = await asynctrt.open(model, device=device, max_rows=4)
        callers = [asyncio.create_task(engine.infer(rows(1))) for _ in range(50)]
        await asyncio.sleep(0)
        await engine.aclose()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
    for outcome in outcomes:
        if not isinstance(outcome, EngineClosedError):
            np.testing.assert_array_equal(outcome["output"], rows(2))


async def test_several_tensors_of_mixed_types(device, tmp_path):
    async with asynctrt.open(mixed_onnx(tmp_path / "mixed.onnx"), device=device) as engine:
        ids = np.arange(6).reshape(2, 3)
        values = np.full((2, 3), 0.5, np.float32)
        several = [engine.infer({"ids": ids + n, "values": values + n}) for n in range(20)]
        for n, result in enumerate(await asyncio.gather(*several)):
            np.testing.assert_array_equal(result["sum"], ids + n + values + n)
            np.testing.assert_array_equal(result["large"], ids + n + values + n > 10)
            np.testing.assert_array_equal(result["twice"], 2 * (ids + n))


@pytest.mark.parametrize("make", [sequence_onnx, unnamed_output_onnx])
async def test_shapes_are_batched_each_with_its_like(device, make, tmp_path):
    async with asynctrt.open(make(tmp_path / "m.onnx"), device=device) as engine:

        async def caller(number):
            length = (3, 700)[number % 2]
            sent = np.arange(number, number + length, dtype=np.float32)[None]
            result = await engine.infer(sent)
            if make is sequence_onnx:
                np.testing.assert_array_equal(result["doubled"], 2 * sent)
                np.testing.assert_array_equal(result["total"], sent.sum(axis=1))
            else:
                np.testing.assert_array_equal(result["joined"], np.concatenate([sent, sent], axis=1))

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[caller(number) for number in range(100)])
        assert engine.statistics().mean_batch_rows > 5
