"""The whole way from ``await engine.infer`` down and back, over every device and backend."""

import asyncio

import numpy as np
import pytest

import asynctrt
from tests.contract.devices import DEVICES, WITH_PLANS, RealSubject, Subject, subject_on
from tests.models import double_model, double_onnx, mixed_onnx, rows, sequence_onnx, unnamed_output_onnx

pytestmark = pytest.mark.anyio
WAIT_S = 30


def pairs():
    """Each device with each backend that runs on it."""
    for name in DEVICES:
        for kind in ("function", "onnxruntime", "tensorrt"):
            if kind == "tensorrt" or name != "cuda":
                yield name, kind
    for kind in WITH_PLANS:
        yield "cuda", kind


@pytest.fixture(params=pairs(), ids="-".join)
def pair(request):
    return request.param


@pytest.fixture
def device(pair):
    made = DEVICES[pair[0]]()
    yield made
    made.close()


@pytest.fixture(params=[name for name in DEVICES if name != "cuda"])
def host_device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()


class Twice:
    """What the function and the ONNX model compute, as a subject."""

    is_real = False
    input, output = "input", "output"
    rows = staticmethod(rows)

    def __init__(self, model):
        self.model = model

    @staticmethod
    def compare(result, sent):
        np.testing.assert_array_equal(result["output"], 2 * sent)

    def close(self):
        """Do nothing: whoever opens the model closes it."""


@pytest.fixture
def subject(pair, device, tmp_path):
    if pair[1] == "function":
        made = Twice(double_model())
    elif pair[1] == "onnxruntime":
        made = Twice(double_onnx(tmp_path / "double.onnx"))
    else:
        made = (RealSubject if pair[1] in WITH_PLANS else Subject)(device)
    yield made
    made.close()


async def test_many_callers_at_once_each_get_their_own_rows(device, subject):
    async with asynctrt.open(subject.model, device=device, max_rows=16) as engine:

        async def caller(number):
            count = number % 5 + 1
            sent = subject.rows(*range(number, number + count))
            result = await engine.infer(sent)
            subject.compare(result, sent)
            return count

        async with asyncio.timeout(WAIT_S):
            counts = await asyncio.gather(*[caller(number) for number in range(500)])
        statistics = engine.statistics()
        assert statistics.rows == sum(counts)
        assert statistics.succeeded == 500
        # Batches are full, or halved for two idle cores if one took long, as on a busy machine.
        assert statistics.mean_batch_rows > 4


async def test_more_rows_than_a_batch_are_split_and_rejoined_in_order(device, subject):
    async with asynctrt.open(subject.model, device=device, max_rows=8) as engine:
        sent = subject.rows(*range(30))
        result = await engine.infer(sent)
        subject.compare(result, sent)
        assert result.batch_rows == 8
        assert engine.statistics().submitted == 4


async def test_large_rows_are_copied_off_the_loop(host_device, tmp_path):
    dims = (300_000,)
    async with asynctrt.open(double_model(dims=dims), device=host_device, max_rows=4) as engine:
        sent = [rows(number, dims=dims) for number in range(10)]
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*[engine.infer(row) for row in sent])
        for row, result in zip(sent, results, strict=True):
            np.testing.assert_array_equal(result["output"], 2 * row)
        assert result.timing.copy_in_ns > 0


async def test_several_tensors_of_mixed_types(host_device, tmp_path):
    async with asynctrt.open(mixed_onnx(tmp_path / "mixed.onnx"), device=host_device) as engine:
        ids = np.arange(6).reshape(2, 3)
        values = np.full((2, 3), 0.5, np.float32)
        several = [engine.infer({"ids": ids + n, "values": values + n}) for n in range(20)]
        for n, result in enumerate(await asyncio.gather(*several)):
            np.testing.assert_array_equal(result["sum"], ids + n + values + n)
            np.testing.assert_array_equal(result["large"], ids + n + values + n > 10)
            np.testing.assert_array_equal(result["twice"], 2 * (ids + n))


@pytest.mark.parametrize("make", [sequence_onnx, unnamed_output_onnx])
async def test_shapes_are_batched_each_with_its_like(host_device, make, tmp_path):
    async with asynctrt.open(make(tmp_path / "m.onnx"), device=host_device) as engine:

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


async def test_outputs_that_stay_on_the_device_are_inputs_again(device, subject):
    async with asynctrt.open(subject.model, device=device, max_rows=8) as engine:

        async def caller(number):
            sent = subject.rows(number, number + 1)
            held = (await engine.infer(sent, outputs="device"))[subject.output]
            once = held.numpy()
            subject.compare({subject.output: once}, sent)
            if not subject.is_real:  # Its answers are shorter than its rows.
                subject.compare(await engine.infer(held), once)

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[caller(number) for number in range(40)])


@pytest.mark.parametrize("arenas", [1, 2])
@pytest.mark.parametrize("name", [*DEVICES, *WITH_PLANS])
async def test_each_way_of_launching(name, arenas):
    """With graphs and without, in one arena and in two: the same answers."""
    subject = subject_on(name)
    for graphs in ("off", "1,4,8"):
        async with subject.open(arenas=arenas, max_rows=8, graphs=graphs) as engine:
            assert engine.statistics().graphs == (() if graphs == "off" else (1, 4, 8))

            async def caller(number, engine=engine):
                sent = subject.rows(*range(number, number + number % 3 + 1))
                subject.compare(await engine.infer(sent), sent)

            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*[caller(number) for number in range(40)])
    subject.close()
    subject.device.close()
