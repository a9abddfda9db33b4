"""A model with profiles: batches stay within them, contexts on theirs, and what lies between is padded."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt.context import TensorRTContext
from asynctrt.devices.base import DeviceArray
from asynctrt.errors import InputError
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec, TensorIO

pytestmark = pytest.mark.anyio
WAIT_S = 30

SPEC = EngineSpec(
    inputs=(TensorIO("tokens", dims=(-1, -1)),),
    profiles=(
        {"tokens": ((1, 1), (4, 16), (8, 32))},
        {"tokens": ((4, 33), (8, 64), (16, 256))},
        {"tokens": ((12, 1), (16, 16), (20, 32))},
    ),
)


@pytest.fixture
def model(device):
    made = strict(device, SPEC)
    yield made
    made.close()


def tokens(rows, length, start=0):
    return np.arange(start, start + rows * length, dtype=np.float32).reshape(rows, length) % 7


async def check(engine, sent):
    async with asyncio.timeout(WAIT_S):
        result = await engine.infer(sent)
    np.testing.assert_array_equal(result["output"], SPEC.expected({"tokens": sent})["output"])
    return result


async def test_rows_of_all_profiles_at_once(device, model):
    async with asynctrt.open(model, device=device, contexts=4, arenas=2, max_rows=20) as engine:
        lengths = (5, 32, 40, 256)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[check(engine, tokens(n % 3 + 1, lengths[n % 4], n)) for n in range(200)])
        assert engine.statistics().mean_batch_rows > 3
        assert model.flavour.module.violations() == ()


@pytest.mark.parametrize(("rows", "length", "batches"), [(6, 20, 1), (9, 20, 1), (45, 20, 3), (17, 40, 2)])
async def test_no_batch_is_larger_than_its_profile(device, model, rows, length, batches):
    async with asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=20) as engine:
        result = await check(engine, tokens(rows, length))
        assert result.batches == batches


async def test_many_small_requests_make_no_batch_that_no_profile_takes(device, model):
    async with asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=20) as engine:
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*[check(engine, tokens(6, 40, n)) for n in range(20)])
        assert max(result.batch_rows for result in results) <= 16


async def test_fewer_rows_than_a_profile_takes_are_padded(device, model):
    async with asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=20) as engine:
        await check(engine, tokens(1, 40))
        assert engine.statistics().rows_padded == 3
        # Between two profiles: 9 to 11 rows of such a length are run as 12.
        await check(engine, tokens(10, 20))
        assert engine.statistics().rows_padded == 5


async def test_shapes_that_no_profile_takes_are_refused_before_they_are_queued(device, model):
    async with asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=20) as engine:
        with pytest.raises(InputError, match=r"no profile for tokens \(rows, 257\).*1 takes .*33..256"):
            await engine.infer(tokens(1, 257))
        assert engine.statistics().submitted == 0
        await check(engine, tokens(1, 5))


async def test_a_fixed_batch_size_is_padded(device):
    spec = EngineSpec(fixed_rows=8)
    model = strict(device, spec)
    async with asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=8, graphs="8") as engine:
        assert engine.statistics().graphs == (8,)
        for rows in (1, 8, 11):
            sent = tokens(rows, 16)
            async with asyncio.timeout(WAIT_S):
                result = await engine.infer(sent)
            np.testing.assert_array_equal(result["output"], spec.expected({"input": sent})["output"])
    model.close()


def on_device(device, array):
    buffer = device.allocate(array.nbytes)
    stream = device.create_stream()
    staging = device.allocate_staging(array.nbytes)
    staging.array(array.dtype, array.shape, 0)[...] = array
    stream.copy(buffer, staging, offset=0, nbytes=array.nbytes)
    ready = device.create_event()
    stream.record(ready)
    assert ready.synchronize(WAIT_S)
    assert stream.close(WAIT_S)
    staging.close()
    return DeviceArray(device, buffer.address, array.dtype, array.shape, owner=buffer, ready=ready)


@pytest.mark.parametrize("way", ["arrays", "device"])
@pytest.mark.parametrize("fixed", [True, False])
async def test_padding_shows_nothing_of_an_earlier_batch(device, fixed, way):
    """The length of a data-dependent output is that of the longest row, of those that only pad included."""
    spec = EngineSpec(
        inputs=(TensorIO("input", dims=(-1, 4)),),
        fixed_rows=8 if fixed else None,
        profiles=({},) if fixed else ({"input": ((8, 4), (8, 4), (8, 4))},),
        data_dependent=True,
    )
    model = strict(device, spec)
    async with asynctrt.open(model, device=device, contexts=1, arenas=1, max_rows=8) as engine:
        for sent, positives in (
            (np.zeros((8, 4), np.float32), 4),
            (np.float32([[10, 0, 10, 10]]), 1),
            (np.float32([[10, 10, 10, 10]] * 5), 0),
        ):
            async with asyncio.timeout(WAIT_S):
                result = await engine.infer(on_device(device, sent) if way == "device" else sent)
            expected = spec.expected({"input": sent})
            assert result["positives"].shape == (len(sent), positives)
            for name in ("output", "positives"):
                np.testing.assert_array_equal(result[name], expected[name])
        assert model.flavour.module.violations() == ()
    model.close()


async def test_batches_of_shapes_that_padding_names_are_captured(device, model, monkeypatch):
    async with asynctrt.open(
        model,
        device=device,
        contexts=2,
        arenas=1,
        max_rows=8,
        pad={"tokens.1": (32, 64)},
        graphs=(1, 4, 8),
    ) as engine:
        assert engine.statistics().graphs == (4, 8), "one profile takes no batch of 1"
        enqueued = []
        enqueue = TensorRTContext.enqueue

        def count(context, binding, rows, **kw):
            enqueued.append(rows)
            enqueue(context, binding, rows, **kw)

        monkeypatch.setattr(TensorRTContext, "enqueue", count)
        async with asyncio.timeout(WAIT_S):
            for rows in (4, 8):
                await asyncio.gather(
                    *[check(engine, tokens(rows, length, length)) for length in (5, 32, 40, 64)]
                )
            assert enqueued == [], "each is a graph"
            await asyncio.gather(*[check(engine, tokens(n % 3 + 1, 5 + n % 60, n)) for n in range(200)])
        assert model.flavour.module.violations() == ()


async def test_shapes_that_no_profile_takes_are_not_captured(device, model):
    async with asynctrt.open(
        model, device=device, contexts=1, max_rows=8, pad={"tokens.1": (32, 512)}, graphs=(1, 4)
    ) as engine:
        assert engine.statistics().graphs == ()
        await check(engine, tokens(2, 20))
