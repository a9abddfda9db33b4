"""ONNX Runtime's CUDA provider on a GPU, under the engine.

What makes a GPU unusable, or could end the process, is done in a process of its own.
"""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import asynctrt
from asynctrt.errors import DeviceMemoryError, ExecutionError, ModelError
from tests.gpu.support import gpu_is_here, memory_of_process
from tests.models import detector_onnx, double_onnx, node, rows, save, sequence_onnx

ort = pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not gpu_is_here() or "CUDAExecutionProvider" not in ort.get_available_providers(),
        reason="needs a GPU and onnxruntime-gpu",
    ),
    pytest.mark.timeout(150),
]

ROOT = Path(__file__).parents[2]
FLOAT = TensorProto.FLOAT
MIB = 1 << 20
WIDTH = 512


@pytest.fixture
def anyio_backend():
    return "asyncio"


def model_on(device, path, *, cuda=(), **options):
    from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel

    providers = {"CUDAExecutionProvider": {"use_tf32": "0", **dict(cuda)}}
    return OnnxCudaModel(path, {"providers": providers, **options}, device=device)


def held(device):
    """What it holds once all is freed that is being freed."""
    device._gpu.wait_for_frees()
    return device.memory().held_nbytes


def taken_nbytes(device):
    """Return what this process has taken of the GPU or, where the driver does not tell, what all have."""
    own = memory_of_process(device.ordinal)
    memory = device.memory()
    return memory.total_nbytes - memory.free_nbytes if own is None else own


def check_growth(found, slack_nbytes=4 * MIB):
    """Check that the second half of a run takes no more than the first, in which caches were filled.

    The least of each half is compared: what other processes take for a while is no growth.
    """
    half = len(found) // 2
    grown = min(found[half:]) - min(found[half // 2 : half])
    assert grown < slack_nbytes, [nbytes // MIB for nbytes in found]


def mlp_onnx(path, *, weights_nbytes=4 * MIB):
    """A perceptron whose weights take about as many bytes."""
    inner = weights_nbytes // 8 // WIDTH
    rng = np.random.default_rng(0)
    first = (rng.standard_normal((WIDTH, inner)) / np.sqrt(WIDTH)).astype(np.float32)
    second = (rng.standard_normal((inner, WIDTH)) / np.sqrt(inner)).astype(np.float32)
    nodes = [
        node("MatMul", "input first", "hidden"),
        node("Relu", "hidden", "active"),
        node("MatMul", "active second", "output"),
    ]
    return save(
        path,
        nodes,
        [("input", FLOAT, ["batch", WIDTH])],
        [("output", FLOAT, ["batch", WIDTH])],
        [("first", first), ("second", second)],
    )


def rows_for(number, count=1):
    return np.random.default_rng(number).standard_normal((count, WIDTH)).astype(np.float32)


def on_cpu(path, sent):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: sent})[0]


async def check_all(engine, path, numbers):
    sent = [rows_for(number, 1 + number % 5) for number in numbers]
    answers = await asyncio.gather(*(engine.infer(array) for array in sent))
    expected = on_cpu(path, np.concatenate(sent))
    found = np.concatenate([answer["output"] for answer in answers])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("graphs", ["off", "auto", "1,16"])
async def test_answers_are_those_of_the_cpu(tmp_path, device, graphs):
    path = mlp_onnx(tmp_path / "mlp.onnx")
    model = model_on(device, path)
    async with asynctrt.open(model, device=device, contexts=3, max_rows=16, graphs=graphs) as engine:
        expected = {"off": (), "auto": (1, 2, 3, 4, 6, 8, 12, 16), "1,16": (1, 16)}[graphs]
        assert engine.statistics().graphs == expected
        for turn in range(4):
            await check_all(engine, path, range(50 * turn, 50 * turn + 50))
        assert engine.statistics().failed == 0
    assert held(device) == 0


def convolutions_onnx(path, *, layers=4, channels=8):
    """Convolutions of pictures, whose kernels cuDNN makes anew for each batch size."""
    rng = np.random.default_rng(3)
    nodes, weights = [], []
    for layer in range(layers):
        name = f"w{layer}"
        weights.append((name, rng.standard_normal((channels, channels, 3, 3)).astype(np.float32) / 8))
        source, target = "input" if not layer else f"x{layer - 1}", f"x{layer}"
        nodes += [
            node("Conv", f"{source} {name}", f"c{layer}", pads=[1, 1, 1, 1]),
            node("Relu", f"c{layer}", target),
        ]
    nodes.append(node("GlobalAveragePool", f"x{layers - 1}", "output"))
    dims = ["n", channels, 24, 24]
    return save(path, nodes, [("input", FLOAT, dims)], [("output", FLOAT, ["n", channels, 1, 1])], weights)


async def test_graphs_of_convolutions_hold_beside_sessions_that_plan_anew(tmp_path, device):
    """A session drops what cuDNN made for a size when another comes: its graphs would end the context."""
    path = convolutions_onnx(tmp_path / "conv.onnx")
    rng = np.random.default_rng(1)
    sent = [rng.standard_normal((1 + n % 12, 8, 24, 24)).astype(np.float32) for n in range(120)]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = [session.run(None, {"input": each})[0] for each in sent]
    async with (
        asynctrt.open(model_on(device, path), device=device, contexts=3, max_rows=12) as captured,
        asynctrt.open(model_on(device, path), device=device, contexts=2, max_rows=12, graphs="off") as direct,
    ):
        assert captured.statistics().graphs == (1, 2, 3, 4, 6, 8, 12)
        assert direct.statistics().graphs == ()
        for _ in range(3):
            asked = [engine.infer(each) for each in sent for engine in (captured, direct)]
            answers = await asyncio.gather(*asked)
            for right, *found in zip(expected, answers[::2], answers[1::2], strict=True):
                for answer in found:
                    np.testing.assert_allclose(answer["output"], right, rtol=1e-3, atol=1e-3)
    assert held(device) == 0


async def test_a_detector_whose_dimensions_are_all_symbolic(tmp_path, device):
    """A shape that recurs is built for while requests are answered, and one that is named before."""
    path = detector_onnx(tmp_path / "detector.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    sent = {
        side: [rng.random((1 + n % 5, 3, side, 64), np.float32) for n in range(20)] for side in (32, 64, 96)
    }
    expected = {side: [session.run(None, {"images": one})[0] for one in rows] for side, rows in sent.items()}

    async def check(engine, side):
        answers = await asyncio.gather(*(engine.infer(one) for one in sent[side]))
        for answer, right in zip(answers, expected[side], strict=True):
            np.testing.assert_allclose(answer["output0"], right, rtol=1e-3, atol=1e-3)

    opened = asynctrt.open(
        model_on(device, path),
        device=device,
        contexts=3,
        max_rows=12,
        onnx={"shapes": {"images": (3, 32, 64)}},
    )
    async with opened as engine:
        assert engine.statistics().batch_sizes == (1, 2, 4, 8, 12)
        async with asyncio.timeout(60):
            while len(engine.statistics().specialised) < 2:
                for side in (32, 64, 64, 64):
                    await check(engine, side)
        for one in engine.statistics().specialised:
            assert one.is_captured
            assert one.batch_sizes == (1, 2, 4, 8, 12)
        for _ in range(5):
            await asyncio.gather(*(check(engine, side) for side in (32, 64, 96)))
        assert engine.statistics().failed == 0
    assert held(device) == 0


@pytest.mark.xdist_group("gpu memory")
@pytest.mark.parametrize("graphs", ["off", "auto"])
async def test_weights_are_there_once_for_all_sessions(tmp_path, device, graphs, caplog):
    weights_nbytes = 512 * MIB
    path = mlp_onnx(tmp_path / "mlp.onnx", weights_nbytes=weights_nbytes)
    taken = []
    with caplog.at_level("INFO", "asynctrt"):
        for contexts in (1, 4):
            before, model = device.memory().free_nbytes, model_on(device, path)
            opened = asynctrt.open(model, device=device, contexts=contexts, max_rows=4, graphs=graphs)
            async with opened as engine:
                taken.append(before - device.memory().free_nbytes)
                sessions = 1 + len(engine.statistics().graphs)
                assert sessions == (5 if graphs == "auto" else 1)
                await check_all(engine, path, range(30))
            model.close()
    assert taken[0] >= weights_nbytes
    # Another session takes memory for cuBLAS and for what is computed, but none for weights.
    assert taken[1] - taken[0] < 3 * sessions * weights_nbytes // 2, [nbytes // MIB for nbytes in taken]
    assert "512.0 MiB of weights are shared by all sessions" in caplog.text
    assert held(device) == 0


async def test_random_numbers_are_not_captured(tmp_path, device, caplog):
    path = save(
        tmp_path / "noise.onnx",
        [node("RandomUniformLike", "input", "noise"), node("Add", "input noise", "output")],
        [("input", FLOAT, ["n", 4])],
        [("output", FLOAT, ["n", 4])],
    )
    async with asynctrt.open(model_on(device, path), device=device, max_rows=2) as engine:
        assert engine.statistics().graphs == ()
        drawn = [(await engine.infer(rows(1)))["output"].tobytes() for _ in range(8)]
        assert len(set(drawn)) == 8
    assert "draws random numbers (RandomUniformLike)" in caplog.text


async def test_a_graph_has_its_own_copy_of_what_it_copies_from_the_host(tmp_path, device):
    """The number of rows is computed on the CPU, in memory that is soon used for something else."""
    path = save(
        tmp_path / "count.onnx",
        [
            node("Shape", "input", "shape"),
            node("Gather", "shape first", "count"),
            node("Cast", "count", "factor", to=FLOAT),
            node("Relu", "input", "positive"),
            node("Mul", "positive factor", "output"),
        ],
        [("input", FLOAT, ["n", 4])],
        [("output", FLOAT, ["n", 4])],
        [("first", np.array(0))],
    )
    settings = {"contexts": 2, "max_rows": 8, "batching": "on"}  # Answers depend on how many rows there are.
    async with asynctrt.open(model_on(device, path), device=device, **settings) as engine:
        assert engine.statistics().graphs == (1, 2, 3, 4, 6, 8)
        for turn in range(60):
            count = 1 + turn % 8
            padded = next(size for size in (1, 2, 3, 4, 6, 8) if size >= count)
            sent = rows(*range(1, 1 + count))
            answer = await engine.infer(sent)
            np.testing.assert_array_equal(answer["output"], padded * sent)


async def test_what_waits_for_the_gpu_to_compute_on_cannot_be_captured(tmp_path, device, caplog):
    """The engine serves it call by call, and the GPU is as usable as before."""
    path = save(
        tmp_path / "inner.onnx",
        [node("Relu", "input", "positive"), node("Det", "positive", "det"), node("Mul", "det det", "output")],
        [("input", FLOAT, ["n", 3, 3])],
        [("output", FLOAT, ["n"])],
    )
    async with asynctrt.open(model_on(device, path), device=device, max_rows=4) as engine:
        assert engine.statistics().graphs == ()
        for number in range(8):
            sent = np.random.default_rng(number).random((2, 3, 3), np.float32)
            answer = await engine.infer(sent)
            np.testing.assert_allclose(answer["output"], np.linalg.det(sent) ** 2, rtol=1e-3, atol=1e-5)
        assert engine.statistics().batches_bisected == engine.statistics().failed == 0
    assert "cannot be captured as a CUDA graph" in caplog.text
    assert "could not be run beforehand" not in caplog.text, (
        "CUDA keeps the capture's error for the next call"
    )
    assert device.lost is None
    assert held(device) == 0


async def test_a_path_is_opened_on_the_gpu(tmp_path, caplog):
    path = mlp_onnx(tmp_path / "mlp.onnx")
    with caplog.at_level("INFO", "asynctrt"):
        async with asynctrt.open(path, device="cuda:0", runtime="onnxruntime") as engine:
            assert engine.device_name == "cuda:0"
            assert (await engine.infer(rows_for(1)))["output"].shape == (1, WIDTH)
    said = [record.message for record in caplog.records if "CUDA provider" in record.message]
    assert said == ["'mlp' runs on cuda:0 by ONNX Runtime's CUDA provider"]


async def test_rows_of_many_shapes(tmp_path, device):
    model = model_on(device, sequence_onnx(tmp_path / "sequence.onnx"))
    async with asynctrt.open(model, device=device) as engine:
        sent = [np.full((1, length), length, np.float32) for length in (1, 7, 3, 7, 100, 1, 1000, 3) * 4]
        answers = await asyncio.gather(*(engine.infer(array) for array in sent))
        for array, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer["doubled"], 2 * array)
            np.testing.assert_allclose(answer["total"], array.sum(axis=1))


async def test_rows_that_are_padded_to_few_shapes_run_as_graphs(tmp_path, device):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    opened = asynctrt.open(
        model_on(device, path), device=device, contexts=3, max_rows=8, pad={"length": (5, 64, 300)}
    )
    async with opened as engine:
        assert engine.statistics().graphs == (1, 2, 3, 4, 6, 8)
        rng = np.random.default_rng(9)
        sent = [rng.random((1 + n % 8, 1 + 7 * n % 300), np.float32) for n in range(300)]
        for _ in range(3):
            answers = await asyncio.gather(*(engine.infer(array) for array in sent))
            for array, answer in zip(sent, answers, strict=True):
                np.testing.assert_array_equal(answer["doubled"], 2 * array)
                np.testing.assert_allclose(answer["total"], array.sum(axis=1), rtol=1e-4)
    assert held(device) == 0


async def test_an_output_whose_shape_depends_on_the_data(tmp_path, device):
    nodes = [
        node("NonZero", "input", "where"),
        node("Transpose", "where", "found", perm=[1, 0]),
        node("Unsqueeze", "found axes", "whole"),
        node("Expand", "whole wanted", "output"),
    ]
    path = save(
        tmp_path / "found.onnx",
        nodes,
        [("input", FLOAT, [2, 3])],
        [("output", TensorProto.INT64, [2, None, 2])],
        [("axes", np.array([0])), ("wanted", np.array([2, 1, 1]))],
    )
    async with asynctrt.open(model_on(device, path), device=device, max_rows=2) as engine:
        for found in (1, 3, 0, 6) * 3:
            sent = np.zeros((2, 3), np.float32)
            sent.reshape(-1)[:found] = 1
            answer = await engine.infer(sent)
            expected = np.argwhere(sent)
            np.testing.assert_array_equal(answer["output"], np.stack([expected, expected]))
    assert held(device) == 0


async def test_outputs_stay_on_the_gpu_if_asked_for(tmp_path, device):
    path = mlp_onnx(tmp_path / "mlp.onnx")
    async with asynctrt.open(model_on(device, path), device=device) as engine:
        sent = rows_for(3)
        answer = await engine.infer(sent, outputs="device")
        np.testing.assert_allclose(answer["output"].numpy(), on_cpu(path, sent), rtol=1e-3, atol=1e-3)


def det_onnx(path):
    """Determinants, for which the CUDA provider has no kernel."""
    return save(
        path,
        [node("Det", "input", "det"), node("Mul", "det det", "output")],
        [("input", FLOAT, ["n", 3, 3])],
        [("output", FLOAT, ["n"])],
    )


async def test_nodes_on_the_cpu_are_named_and_can_be_refused(tmp_path, device, caplog):
    path = det_onnx(tmp_path / "det.onnx")
    async with asynctrt.open(model_on(device, path), device=device, max_rows=2) as engine:
        assert engine.statistics().graphs == (), "what the CPU reads is copied when it is bound"
        sent = np.random.default_rng(5).random((40, 3, 3), np.float32)
        expected = np.linalg.det(sent) ** 2
        answers = await asyncio.gather(*(engine.infer(each[None]) for each in sent))
        found = np.concatenate([answer["output"] for answer in answers])
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
        again = await engine.infer(sent[:2], outputs="device")
        np.testing.assert_allclose(again["output"].numpy(), expected[:2], rtol=1e-3, atol=1e-5)
        del again
    said = [record.message for record in caplog.records if "run on the CPU" in record.message]
    assert len(said) == 1, "once, not for each context"
    assert "Det" in said[0]
    with pytest.raises(ModelError, match=r"det\.onnx"):
        await asynctrt.open(
            model_on(device, path, session_config={"session.disable_cpu_ep_fallback": "1"}), device=device
        )
    assert held(device) == 0


@pytest.mark.parametrize("source", ["input", "positive"])
async def test_outputs_of_every_kind(tmp_path, device, source):
    """What the CPU computes, what it reads, what is the input itself, and twice the same."""
    shape = ["n", 3, 3]
    path = save(
        tmp_path / "kinds.onnx",
        [
            node("Relu", "input", "positive"),
            node("Det", source, "det"),
            node("Identity", "input", "same"),
            node("Identity", "positive", "twin"),
            node("Unsqueeze", "positive axis", "wide"),
            node("Neg", "positive", "negative"),
            node("Det", "negative", "deep"),
        ],
        [("input", FLOAT, shape)],
        [
            ("positive", FLOAT, shape),
            ("det", FLOAT, ["n"]),
            ("same", FLOAT, shape),
            ("twin", FLOAT, shape),
            ("wide", FLOAT, ["n", 1, 3, 3]),
            ("deep", FLOAT, ["n"]),
            ("negative", FLOAT, shape),
        ],
        [("axis", np.array([1]))],
    )
    async with asynctrt.open(model_on(device, path), device=device, contexts=3, max_rows=4) as engine:
        assert engine.statistics().graphs == ()
        sent = np.random.default_rng(7).random((200, 3, 3), np.float32)
        for turn in range(3):
            rows = sent + turn
            answers = await asyncio.gather(*(engine.infer(each[None]) for each in rows))
            found = {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
            for name in ("positive", "same", "twin"):
                np.testing.assert_array_equal(found[name], rows, err_msg=name)
            np.testing.assert_array_equal(found["wide"], rows[:, None])
            np.testing.assert_array_equal(found["negative"], -rows)
            np.testing.assert_allclose(found["det"], np.linalg.det(rows), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(found["deep"], -np.linalg.det(rows), rtol=1e-3, atol=1e-4)
        kept = await engine.infer(sent[:3], outputs="device")
        np.testing.assert_array_equal(kept["positive"].numpy(), sent[:3])
        np.testing.assert_allclose(kept["deep"].numpy(), -np.linalg.det(sent[:3]), rtol=1e-3, atol=1e-4)
        del kept
        assert engine.statistics().batches_bisected == engine.statistics().failed == 0
    assert held(device) == 0


async def test_integers_and_shapes(tmp_path, device):
    path = save(
        tmp_path / "picky.onnx",
        [node("OneHot", "input depth values", "wide"), node("Slice", "wide from to axis", "output")],
        [("input", TensorProto.INT64, ["n"])],
        [("output", FLOAT, ["n", 4])],
        [
            ("depth", np.array([8])),
            ("values", np.array([0, 1], np.float32)),
            ("from", np.array([0])),
            ("to", np.array([4])),
            ("axis", np.array([1])),
        ],
    )
    async with asynctrt.open(model_on(device, path), device=device) as engine:
        for number in range(8):
            answer = await engine.infer(np.array([number]))
            np.testing.assert_array_equal(answer["output"][0], np.eye(8, dtype=np.float32)[number, :4])


async def test_no_room_for_the_weights(tmp_path, device):
    path = mlp_onnx(tmp_path / "mlp.onnx", weights_nbytes=64 * MIB)
    free = device.memory().free_nbytes
    with pytest.raises(DeviceMemoryError, match=r"loading 'mlp'.*gpu_mem_limit"):
        await asynctrt.open(model_on(device, path, cuda={"gpu_mem_limit": 8 * MIB}), device=device)
    assert held(device) == 0
    assert device.memory().free_nbytes > free - 700 * MIB


async def test_no_room_for_a_batch_fails_it_and_smaller_ones_go_on(tmp_path, device):
    """Squares of 1024 rows a row: a batch of 64 needs 256 MiB in between."""
    path = save(
        tmp_path / "outer.onnx",
        [
            node("Unsqueeze", "input one", "row"),
            node("Unsqueeze", "input two", "column"),
            node("Mul", "row column", "outer"),
            node("Exp", "outer", "risen"),
            node("ReduceSum", "risen two", "output", keepdims=0),
        ],
        [("input", FLOAT, ["n", 1024])],
        [("output", FLOAT, ["n", 1024])],
        [("one", np.array([1])), ("two", np.array([2]))],
    )
    model = model_on(device, path, cuda={"gpu_mem_limit": 64 * MIB})
    async with asynctrt.open(model, device=device, contexts=1, max_rows=64, idempotent=False) as engine:
        sent = np.full((64, 1024), 0.01, np.float32)
        with pytest.raises((DeviceMemoryError, ExecutionError)) as caught:
            await engine.infer(sent)
        assert isinstance(caught.value, DeviceMemoryError), caught.value
        for _ in range(3):
            answer = await engine.infer(sent[:2])
            np.testing.assert_allclose(answer["output"], 1024 * np.exp(1e-4), rtol=1e-3)


async def test_two_engines_on_one_gpu(tmp_path, device):
    paths = [mlp_onnx(tmp_path / f"mlp{n}.onnx", weights_nbytes=(n + 1) * MIB) for n in range(2)]
    async with (
        asynctrt.open(model_on(device, paths[0]), device=device, contexts=2) as first,
        asynctrt.open(model_on(device, paths[1]), device=device, contexts=2) as second,
    ):
        for turn in range(5):
            numbers = range(40 * turn, 40 * turn + 40)
            await asyncio.gather(check_all(first, paths[0], numbers), check_all(second, paths[1], numbers))
    assert held(device) == 0


@pytest.mark.parametrize("state", ["idle", "queued", "in flight", "draining", "cancelled"])
async def test_closing_in_every_state(tmp_path, device, state):
    model = model_on(device, mlp_onnx(tmp_path / "mlp.onnx"))
    engine = await asynctrt.open(model, device=device, contexts=2)
    sent = []
    if state != "idle":
        sent = [asyncio.create_task(engine.infer(rows_for(n, 8))) for n in range(60)]
        await asyncio.sleep(0)
    if state == "in flight":
        await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
    if state == "draining":
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
    if state == "cancelled":
        for task in sent:
            task.cancel()
    async with asyncio.timeout(60):
        await engine.aclose()
        await asyncio.gather(*sent, return_exceptions=True)
        if state == "draining":
            await draining
    assert engine.state == "closed"
    assert held(device) == 0


async def test_closing_while_contexts_of_a_shape_are_built(tmp_path, device):
    """They run batches on the model's weights, so these are freed afterwards."""
    from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel

    path = detector_onnx(tmp_path / "detector.onnx")
    begun = threading.Event()

    class Observed(OnnxCudaModel):
        def create_context_for(self, *told):
            begun.set()
            return super().create_context_for(*told)

    one = np.random.default_rng(1).random((1, 3, 64, 64), np.float32)
    expected = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"images": one})
    for _ in range(3):
        begun.clear()
        model = Observed(path, {"providers": {"CUDAExecutionProvider": {"use_tf32": "0"}}}, device=device)
        engine = await asynctrt.open(model, device=device, contexts=2, max_rows=8)
        async with asyncio.timeout(60):
            while not begun.is_set():
                answers = await asyncio.gather(*(engine.infer(one) for _ in range(8)))
                for answer in answers:
                    np.testing.assert_allclose(answer["output0"], expected[0], rtol=1e-3, atol=1e-3)
            await engine.aclose()
        model.close()
        assert held(device) == 0


@pytest.mark.xdist_group("gpu memory")
async def test_opening_again_and_again_does_not_grow(tmp_path, device):
    path = mlp_onnx(tmp_path / "mlp.onnx")
    taken = []
    for number in range(12):
        async with asynctrt.open(model_on(device, path), device=device, contexts=2) as engine:
            await check_all(engine, path, range(number, number + 10))
        assert held(device) == 0
        taken.append(taken_nbytes(device))
    check_growth(taken)


@pytest.mark.tier2
@pytest.mark.xdist_group("gpu memory")
@pytest.mark.parametrize(("make", "graphs"), [("double", "off"), ("double", "auto"), ("joined", "off")])
async def test_many_batches_without_growth(tmp_path, device, make, graphs):
    """Also of a model whose runs leave host memory, which ONNX Runtime frees in runs that it waits for."""
    import psutil

    path = {"double": double_onnx, "joined": joined_onnx}[make](tmp_path / "model.onnx")
    process = psutil.Process()
    async with asynctrt.open(model_on(device, path), device=device, max_rows=8, graphs=graphs) as engine:
        sent = rows(1) if make == "double" else rows_for(1)

        async def caller(count):
            for _ in range(count):
                await engine.infer(sent)

        resident, taken = [], []
        for _ in range(10):
            await asyncio.gather(*(caller(600) for _ in range(8)))
            resident.append(process.memory_info().rss)
            taken.append(taken_nbytes(device))
        assert engine.statistics().batches > 5000
        check_growth(taken)
        check_growth(resident, 8 * MIB)


PRELUDE = """
import asyncio, os, sys
import numpy as np
import asynctrt
from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel
from asynctrt.devices.cuda import CudaDevice
from asynctrt.errors import *
from cuda.bindings import driver, nvrtc

SOURCE = br'''
extern "C" __global__ void bad() { *(volatile int*)16 = 1; }
extern "C" __global__ void hang(volatile int* flag) { while (!*flag) { } }
'''

def kernel(device, name):
    device.activate()
    major, minor = device.compute_capability
    code, program = nvrtc.nvrtcCreateProgram(SOURCE, b"k.cu", 0, [], [])
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    assert nvrtc.nvrtcCompileProgram(program, 1, options)[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    code, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    code, module = driver.cuModuleLoadData(cubin)
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return driver.cuModuleGetFunction(module, name)[1]

def launch(device, function, stream, arguments=((), ())):
    code = driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.handle, arguments, 0)[0]
    assert code == driver.CUresult.CUDA_SUCCESS, code

path = sys.argv[1]
device = CudaDevice(0)
sent = np.ones((1, 512), np.float32)

def opened(**kw):
    return asynctrt.open(OnnxCudaModel(path, device=device), device=device, **kw)
"""

ILLEGAL = """
async def main():
    bad = kernel(device, b"bad")
    engine = await opened(contexts=2)
    await engine.infer(sent)
    launch(device, bad, engine._pool.contexts[0].stream)
    kinds = set()
    for _ in range(20):
        try:
            async with asyncio.timeout(20):
                await engine.infer(sent)
        except DeviceLostError as error:
            kinds.add("lost")
            kept = error
    assert kinds == {"lost"}, kinds
    assert engine.state == "lost", engine.state
    async with asyncio.timeout(20):
        await engine.aclose()
    print("closed", flush=True)

asyncio.run(main())
print("ended", flush=True)
"""

HANG = """
async def main():
    import contextlib
    import ctypes
    hang = kernel(device, b"hang")
    flag = device.allocate_staging(256)
    number = flag.array(np.dtype("int32"), (1,), 0)
    number[0] = 0
    engine = await opened(contexts=3, max_rows=8, batch_timeout=0.5, close_timeout=0.5)
    # CUDA loads a kernel when it is first launched, and waits for all that runs to do so: sizes that are new
    # while a kernel hangs would hang as well.
    for _ in range(4):
        for count in range(1, 9):
            await asyncio.gather(*(engine.infer(np.repeat(sent, count, 0)) for _ in range(24)))
    launch(device, hang, engine._pool.contexts[0].stream, ((flag.address,), (ctypes.c_void_p,)))
    try:
        full, lost = np.repeat(sent, 8, 0), []
        async with asyncio.timeout(20):
            while not lost:  # Until a batch came to the context whose stream hangs.
                asked = [engine.infer(full) for _ in range(3)]
                outcomes = await asyncio.gather(*asked, return_exceptions=True)
                lost = [error for error in outcomes if isinstance(error, DeviceLostError)]
        assert "batch_timeout" in str(lost[0]), outcomes
        # What ONNX Runtime asks CUDA for in other contexts, memory say, may wait for the kernel, too: each
        # of the others is answered, or given up in time.
        for _ in range(5):
            with contextlib.suppress(DeviceLostError):
                async with asyncio.timeout(20):
                    await engine.infer(sent)
        print("in time", flush=True)
        async with asyncio.timeout(20):
            await engine.aclose()
        print("closed", flush=True)
    finally:
        # Whatever was found: nothing ends a process in which a kernel runs on.
        number[0] = 1

asyncio.run(main())
print("ended", flush=True)
"""

FORGOTTEN = """
async def main():
    engine = await opened(contexts=2)
    await engine.infer(sent)

import warnings
warnings.simplefilter("ignore")
asyncio.run(main())
import gc
gc.collect()
print("ended", flush=True)
"""


AGAIN_AND_AGAIN = """
async def main():
    for _ in range(6):
        async with asyncio.timeout(60), opened(contexts=2, max_rows=8) as engine:
            await asyncio.gather(*(engine.infer(sent) for _ in range(20)))
    print("closed", flush=True)

asyncio.run(main())
print("ended", flush=True)
"""


def joined_onnx(path):
    """Joins many arrays, not all as wide, of which ONNX Runtime leaves a table of 160 KiB on the host."""
    nodes = [
        node("ReduceSum", "input axis", "total"),
        node("Concat", " ".join([*["input"] * 40, "total"]), "wide", axis=1),
        node("ReduceSum", "wide axis", "output"),
    ]
    return save(
        path,
        nodes,
        [("input", FLOAT, ["n", 512])],
        [("output", FLOAT, ["n", 1])],
        [("axis", np.array([1]))],
    )


@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_a_process_outlives_engines_whose_last_run_has_left_something(tmp_path, graphs):
    """What it leaves is freed when the session ends, by CUDA, where no session may end (``settle``)."""
    program = AGAIN_AND_AGAIN.replace("max_rows=8", f"max_rows=8, graphs={graphs!r}")
    check_end(joined_onnx(tmp_path / "joined.onnx"), program, ["closed", "ended"])


async def test_what_onnx_runtime_refuses_to_capture_runs_call_by_call(tmp_path, device, caplog):
    """It refuses to join more than 32 arrays, for which it needs memory of the host."""
    path = joined_onnx(tmp_path / "joined.onnx")
    async with asynctrt.open(model_on(device, path), device=device, contexts=2, max_rows=8) as engine:
        assert engine.statistics().graphs == ()
        sent = [rows_for(number, 1 + number % 5) for number in range(40)]
        for _ in range(3):
            answers = await asyncio.gather(*(engine.infer(array) for array in sent))
            for array, answer in zip(sent, answers, strict=True):
                expected = 41 * array.astype(np.float64).sum(axis=1, keepdims=True)
                np.testing.assert_allclose(answer["output"], expected, rtol=1e-3, atol=0.1)
    assert "cannot be captured as a CUDA graph" in caplog.text
    assert held(device) == 0


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(ILLEGAL, ["closed", "ended"], id="illegal address"),
        pytest.param(HANG, ["in time", "closed", "ended"], id="hang"),
        pytest.param(FORGOTTEN, ["ended"], id="an engine that is never closed"),
    ],
)
def test_a_process_ends_in_order(tmp_path, program, said):
    check_end(mlp_onnx(tmp_path / "mlp.onnx"), program, said)


def check_end(path, program, said):
    """Run a program on a model, and check what it says, and that it ends by itself."""
    traces = "import faulthandler; faulthandler.dump_traceback_later(60, exit=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", traces + PRELUDE + program, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            child.kill()
            stdout, stderr = child.communicate()
            pytest.fail(f"it did not end: {stdout}\n{stderr[-4000:]}")
    found = [line for line in stdout.splitlines() if line in ("in time", "closed", "ended")]
    assert found == said, f"{child.returncode}: {stdout}\n{stderr[-4000:]}"
    assert child.returncode == 0, f"{child.returncode}: {stderr[-4000:]}"
