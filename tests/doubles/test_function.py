"""Engines of the double that compute a function: an application's own model, without a GPU."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError, ModelError
from tests.doubles.support import Bench as Strict
from tests.doubles.support import wait
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan

pytestmark = pytest.mark.anyio
WAIT_S = 30
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.standard_normal((48, 10), np.float32)
IMAGE = TensorIO("image", "uint8", (-1, 4, 4, 3))
LOGITS = TensorIO("logits", "float32", (-1, 10))


def classify(inputs):
    pixels = inputs["image"].reshape(len(inputs["image"]), -1).astype(np.float32)
    if (pixels == 7).all(axis=1).any():
        raise ValueError("seven is refused")
    # Not by a matrix product, whose rounding depends on how many rows there are.
    return {
        "logits": (pixels[:, :, None] * WEIGHTS).sum(axis=1),
        "mean": pixels.mean(axis=1).astype(np.float16),
    }


CLASSIFIER = EngineSpec(
    "classifier",
    inputs=(IMAGE,),
    function=classify,
    function_outputs=(LOGITS, TensorIO("mean", "float16", (-1,))),
)


class Bench:
    def __init__(self, spec, *, unified=True):
        self.device = HostDevice(in_place="never", unified=unified)
        self.double = StrictTensorRT(self.device)
        self.model = TensorRTModel(double_plan(spec), device=self.device, flavour=self.double)

    def open(self, **kw):
        return asynctrt.open(self.model, device=self.device, **kw)

    def close(self):
        self.model.close()
        assert self.double.violations() == ()


def images(number, rows=1):
    return np.random.default_rng(number).integers(8, 255, (rows, 4, 4, 3), np.uint8)


@pytest.mark.parametrize("unified", [True, False])
async def test_inputs_and_outputs_of_any_kind(unified):
    bench = Bench(CLASSIFIER, unified=unified)
    assert [str(one) for one in bench.model.outputs] == ["logits: float32[rows, 10]", "mean: float16[rows]"]
    async with bench.open(contexts=3, arenas=1) as engine, asyncio.timeout(WAIT_S):
        sent = [images(number, 1 + number % 4) for number in range(40)]
        results = await asyncio.gather(*[engine.infer(one) for one in sent])
        for given, result in zip(sent, results, strict=True):
            for name, expected in CLASSIFIER.expected(given).items():
                np.testing.assert_array_equal(result[name], expected)
    bench.close()


async def test_what_the_function_raises_fails_its_batch_alone():
    bench = Bench(CLASSIFIER)
    async with bench.open(max_rows=1) as engine, asyncio.timeout(WAIT_S):
        with pytest.raises(ExecutionError, match="seven is refused"):
            await engine.infer(np.full((1, 4, 4, 3), 7, np.uint8))
        await engine.infer(images(1))
    bench.close()


async def test_sizes_that_the_function_keeps():
    def scale(inputs):
        return 3 * inputs["x"]

    dynamic = TensorIO("x", "float32", (-1, -1))
    bench = Bench(
        EngineSpec(inputs=(dynamic,), function=scale, function_outputs=(TensorIO("y", dims=(-1, -1)),))
    )
    async with bench.open() as engine, asyncio.timeout(WAIT_S):
        for length in (1, 5, 32):
            sent = np.arange(length, dtype=np.float32)[None]
            np.testing.assert_array_equal((await engine.infer(sent))["y"], 3 * sent)
    bench.close()


TWO = (TensorIO("a", dims=(-1, -1)), TensorIO("b", dims=(-1, -1)))


def matched(inputs):
    """One output of the length of the second input, one of half that of the first, rounded up."""
    a, b = inputs["a"], inputs["b"]
    return {"like_b": b + a.sum(axis=1, keepdims=True), "half": a[:, ::2]}


async def test_outputs_that_follow_another_input_or_are_derived_from_one():
    outputs = (TensorIO("like_b", dims=(-1, -1)), TensorIO("half", dims=(-1, -1)))
    spec = EngineSpec(inputs=TWO, function=matched, function_outputs=outputs)
    bench = Bench(spec)
    assert [str(one) for one in bench.model.outputs] == [
        "like_b: float32[rows, b.1]",
        "half: float32[rows, half.1]",
    ]
    async with bench.open() as engine, asyncio.timeout(WAIT_S):
        for length, other in ((1, 4), (5, 32), (32, 1)):
            sent = {
                "a": np.arange(2 * length, dtype=np.float32).reshape(2, -1),
                "b": np.ones((2, other), np.float32),
            }
            result = await engine.infer(sent)
            for name, expected in spec.expected(sent).items():
                np.testing.assert_array_equal(result[name], expected)
    bench.close()


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda inputs: inputs["a"].sum(axis=0, keepdims=True)[:, :1], (1, 1)),
        (lambda inputs: np.repeat(inputs["a"], 3, axis=0), (-1, -1)),
        (lambda inputs: inputs["a"].T, (-1, -1)),
    ],
    ids=["one for all rows", "three for each row", "turned"],
)
def test_an_output_whose_first_axis_does_not_count_rows_is_refused(function, dims):
    spec = EngineSpec(inputs=TWO[:1], function=function, function_outputs=(TensorIO("y", dims=dims),))
    with pytest.raises(ModelError, match="first axis"):
        Bench(spec)


async def test_inputs_that_do_not_fit_together_fail_alone():
    """Each is within the profile, and TensorRT infers the shapes of all of them together."""
    add = EngineSpec(
        inputs=TWO,
        function=lambda inputs: inputs["a"] + inputs["b"],
        function_outputs=(TensorIO("sum", dims=(-1, -1)),),
    )
    bench = Bench(add)
    fits = {"a": np.ones((1, 5), np.float32), "b": np.ones((1, 5), np.float32)}
    async with bench.open(contexts=1) as engine, asyncio.timeout(WAIT_S):
        for _ in range(3):
            with pytest.raises(ExecutionError, match=r"infer_shapes for 1 rows .* could not be broadcast"):
                await engine.infer({"a": fits["a"], "b": np.ones((1, 4), np.float32)})
            np.testing.assert_array_equal((await engine.infer(fits))["sum"], fits["a"] + fits["b"])
    bench.close()


SMALL, LARGE = (((1, 4, 4, 3), (rows // 2, 4, 4, 3), (rows, 4, 4, 3)) for rows in (8, 64))


@pytest.mark.parametrize("rows_without_memory", [64, 8], ids=["no batch", "only large ones"])
@pytest.mark.parametrize("shares", [False, True])
async def test_batches_that_need_no_enqueue_memory(rows_without_memory, shares):
    spec = replace(
        CLASSIFIER,
        rows_without_memory=rows_without_memory,
        profiles=({"image": SMALL}, {"image": LARGE}),
    )
    bench = Bench(spec)
    needs = rows_without_memory < 64
    engine = bench.model._loaded.engine
    assert engine.get_device_memory_size_for_profile_v2(0) == 0
    assert bool(engine.device_memory_size_v2) == needs == bool(bench.model.capabilities.enqueue_nbytes)
    with Arenas(bench.device, 1, nbytes=1024) as arenas:
        kw = {"contexts": 2, "graphs": (1, 4, 32), "max_rows": 64}
        kw |= {"shared_arenas": arenas} if shares else {}
        async with bench.open(**kw) as opened, asyncio.timeout(WAIT_S):
            sent = [images(number, 1 + 7 * (number % 9)) for number in range(30)]
            results = await asyncio.gather(*[opened.infer(one) for one in sent])
            assert bool(opened.statistics().arena_nbytes) == needs
    for given, result in zip(sent, results, strict=True):
        np.testing.assert_array_equal(result["logits"], spec.expected(given)["logits"])
    bench.close()


def test_memory_that_no_batch_needs():
    user = Strict(replace(CLASSIFIER, rows_without_memory=64)).user()
    context, trt = user.context, user.bench.trt
    assert user.engine.device_memory_size_v2 == 0
    assert user.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.STATIC)
    user.give(images(1, 3))
    assert context.update_device_memory_size_for_shapes() == 0
    assert user.bench.recorder.errors == []
    stream = user.bench.stream()
    assert context.execute_async_v3(stream.handle)
    assert wait(user.bench.device, stream) is None
    logits = user.outputs["logits"].array(np.dtype("f4"), (3, 10), 0)
    np.testing.assert_array_equal(logits, CLASSIFIER.expected(images(1, 3))["logits"])
    user.bench.close()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda inputs: np.zeros((1, 3)), r"gave \(1, 3\) for its output 'logits', which is \(2, 10\)"),
        (lambda inputs: {"other": np.zeros((2, 10))}, r"gave \(\) for its output 'logits'"),
        (lambda inputs: np.zeros((2, 10, 1)), r"gave \(2, 10, 1\)"),
    ],
)
async def test_what_the_function_must_give(function, said):
    spec = EngineSpec(inputs=(IMAGE,), function=function, function_outputs=(LOGITS,))
    with pytest.raises(ValueError, match=said):
        spec.expected(images(1, 2))
    bench = Bench(spec)
    async with bench.open() as engine, asyncio.timeout(WAIT_S):
        with pytest.raises(ExecutionError, match=said):
            await engine.infer(images(1, 2))
    bench.close()
