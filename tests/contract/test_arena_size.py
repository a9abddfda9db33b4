"""Arenas that are sized by shapes: as large as the batches so far needed, growing in the order of streams."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.devices.arenas import Arenas, GrowingBuffer
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError, InternalError, OptionsError
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec, TensorIO
from tests.helpers import until
from tests.runtime.support import ScratchModel

pytestmark = pytest.mark.anyio
WAIT_S = 30
BY_SHAPES = TensorRTOptions(arena_size="shapes")

WIDE = EngineSpec(
    inputs=(TensorIO("tokens", dims=(-1, -1)),), profiles=({"tokens": ((1, 1), (8, 64), (64, 2048))},)
)
FIXED = EngineSpec(profiles=({"input": ((1, 16), (8, 16), (256, 16))},))


@pytest.fixture
def opened(device):
    """Open models of the double with arenas that are sized by shapes; check for violations in the end."""
    models = []

    def make(spec=WIDE, **kw):
        models.append(strict(device, spec, None if "shared_arenas" in kw else BY_SHAPES))
        return asynctrt.open(models[-1], device=device, **{"contexts": 2, "graphs": "off", **kw})

    make.models = models
    yield make
    for model in models:
        assert model.flavour.module.violations() == ()
        model.close()


def tokens(count, length, start=0):
    return (np.arange(start, start + count * length, dtype=np.float32) % 7).reshape(count, length)


async def check(engine, sent, spec=WIDE):
    async with asyncio.timeout(WAIT_S):
        result = await engine.infer(sent)
    expected = spec.expected({spec.inputs[0].name: sent})
    np.testing.assert_array_equal(result["output"], expected["output"])


async def test_they_are_as_large_as_the_batches_need(device, opened):
    before = device.memory().held_nbytes
    opening = opened(contexts=1, pad="off")  # Rows of the sizes that are given.
    async with opening as engine:
        sizes = [engine.statistics().arena_nbytes]
        for sent in (tokens(1, 8), tokens(4, 100), tokens(2, 10), tokens(64, 500), tokens(1, 1)):
            await check(engine, sent)
            sizes.append(engine.statistics().arena_nbytes)
        needed = [WIDE.enqueue_nbytes({"tokens": shape}) for shape in ((1, 8), (4, 100), (64, 500))]
        assert sizes == [0, needed[0], needed[1], needed[1], needed[2], needed[2]]
        assert sizes[-1] < WIDE.profile_nbytes(0) // 4
    opened.models.pop().close()
    await until(lambda: device.memory().held_nbytes == before)  # A device like a GPU frees in a thread.


async def test_they_grow_while_others_work_in_them(opened):
    async with opened(contexts=4, arenas=2, max_rows=64) as engine:
        lengths = (3, 300, 30, 1000, 7)
        for burst in range(3):
            sent = [tokens(n % 5 + 1, lengths[n % 5] + burst, n) for n in range(60)]
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*[check(engine, each) for each in sent])


async def test_one_grows_behind_a_batch_that_is_still_in_it(opened):
    async with opened(contexts=2, arenas=1) as engine:
        await check(engine, tokens(1, 8))
        double = opened.models[0].flavour.module
        double.fail_next("hang")
        first = asyncio.create_task(check(engine, tokens(2, 8)))
        async with asyncio.timeout(WAIT_S):
            while not double.hanging:
                await asyncio.sleep(0)
        second = asyncio.create_task(check(engine, tokens(8, 900)))
        async with asyncio.timeout(WAIT_S):
            while engine.statistics().in_flight_batches < 2:
                await asyncio.sleep(0)
        assert not first.done()
        double.release_hangs()
        await asyncio.gather(first, second)


async def test_a_batch_for_which_they_cannot_grow_fails_alone(little_reserve):
    device = HostDevice(unified=False, memory_nbytes=400_000)
    model = strict(device, WIDE, BY_SHAPES)
    async with asynctrt.open(model, device=device, contexts=2, arenas=1) as engine:
        await check(engine, tokens(1, 8))
        for _ in range(3):
            with pytest.raises(DeviceMemoryError, match="has no room for"):
                await engine.infer(tokens(12, 2000))
            await check(engine, tokens(2, 50))
    model.close()
    assert device.memory().held_nbytes == 0
    assert model.flavour.module.violations() == ()


async def test_graphs_are_captured_in_arenas_of_ones_own(opened):
    async with opened(FIXED, contexts=2, arenas=2, max_rows=16, graphs=(1, 4, 16)) as engine:
        statistics = engine.statistics()
        assert statistics.graphs == (1, 4, 16)
        assert statistics.arena_nbytes == 2 * FIXED.enqueue_nbytes({"input": (16, 16)})
        assert statistics.arena_nbytes < 2 * FIXED.profile_nbytes(0) // 10
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[check(engine, tokens(n % 9 + 1, 16, n), FIXED) for n in range(60)])


async def test_shared_with_another_engine(device, opened, caplog):
    with Arenas(device, 2, by_shapes=True) as arenas:
        async with (
            opened(FIXED, shared_arenas=arenas, graphs=(1, 4)) as fixed,
            opened(WIDE, shared_arenas=arenas) as wide,
        ):
            assert fixed.statistics().graphs == ()
            assert "captures no CUDA graphs" in caplog.text
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(
                    *[check(fixed, tokens(n % 5 + 1, 16, n), FIXED) for n in range(40)],
                    *[check(wide, tokens(n % 3 + 1, 10 * n + 1)) for n in range(40)],
                )
            assert "by shapes" in repr(arenas)
        assert arenas.nbytes > 0
    assert arenas.nbytes == 0


async def test_a_model_that_cannot_say_what_it_needs():
    device = HostDevice()
    with (
        Arenas(device, 2, by_shapes=True) as arenas,
        pytest.raises(OptionsError, match="'scratch' is none: it does not say"),
    ):
        await asynctrt.open(ScratchModel(4096), device=device, shared_arenas=arenas)


def test_their_size_is_not_given():
    with pytest.raises(OptionsError, match="begin empty, so leave out nbytes=100"):
        Arenas(HostDevice(), 1, nbytes=100, by_shapes=True)


class TestGrowingBuffer:
    def test_what_it_outgrows_is_freed_in_the_order_of_the_stream(self, device):
        stream, buffer, before = device.create_stream(), GrowingBuffer(device), device.memory().held_nbytes
        assert (buffer.address, buffer.nbytes, buffer.is_host_visible) == (0, 0, False)
        for nbytes, expected in ((1000, 1024), (500, 1024), (1025, 1280)):
            buffer.reserve(nbytes, stream=stream)
            assert buffer.nbytes == expected
            assert buffer.address % 256 == 0
        assert stream.drain(WAIT_S)
        assert device.memory().held_nbytes - before == 1280
        buffer.close()
        buffer.close()
        assert buffer.nbytes == 0
        assert device.memory().held_nbytes == before
        assert stream.close(WAIT_S)

    def test_what_graphs_work_in_is_kept(self, device):
        stream, buffer, before = device.create_stream(), GrowingBuffer(device), device.memory().held_nbytes
        buffer.reserve(1000, stream=stream)
        buffer.keep()
        buffer.reserve(2000, stream=stream)
        assert stream.drain(WAIT_S)
        assert (buffer.nbytes, buffer.held_nbytes) == (2048, 3072)
        assert device.memory().held_nbytes - before == 3072
        buffer.close()
        assert device.memory().held_nbytes == before
        assert stream.close(WAIT_S)

    def test_it_does_not_grow_in_a_capture(self, device):
        stream, buffer = device.create_stream(), GrowingBuffer(device)
        stream.begin_capture()
        with pytest.raises(InternalError, match="cannot grow to 1000 bytes while .* captures"):
            buffer.reserve(1000, stream=stream)
        stream.end_capture().close()
        assert stream.close(WAIT_S)
