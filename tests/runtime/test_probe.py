"""Made-up rows: what counts as a difference, and where they are run."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.core.lengths import Lengths
from asynctrt.errors import DeviceMemoryError
from asynctrt.runtime.probe import differing
from tests.backends.onnx_sessions import HostSessions
from tests.benchmarks.lengths import encoder_onnx
from tests.helpers import WAIT_S
from tests.models import node, rows, save

FLOAT = 1


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "differs"),
    [
        (np.float32([1, 2]), np.float32([1, 2]), None, False),
        (np.float32([1, 2]), np.float32([1, 2.0001]), None, False),
        (np.float32([1, 2]), np.float32([1, 2.001]), None, True),
        (np.float32([1, 2]), np.float32([1, 2.001]), 0.01, False),
        (np.float16([1, 2]), np.float16([1, 2.004]), None, False),
        (np.float16([1, 2]), np.float16([1, 2.1]), None, True),
        (np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf]), None, False),
        (np.float32([1, np.nan]), np.float32([1, 0]), None, True),
        (np.float32([1, np.inf]), np.float32([1, 5]), None, True),
        (np.float32([0, 0]), np.float32([0, 1e-9]), None, True),
        (np.int64([7, 8]), np.int64([7, 9]), None, True),
        (np.uint8([7, 8]), np.uint8([7, 9]), None, False),
        (np.uint8([7, 8]), np.uint8([7, 10]), None, True),
        (np.array([True, False]), np.array([True, True]), None, True),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), None, True),
        (np.array(["a", "b"], object), np.array(["a", "b"], object), None, False),
        (np.float32([1, 2]), np.float32([1, 2, 3]), None, True),
        (np.zeros(0, np.float32), np.zeros(0, np.float32), None, False),
    ],
)
def test_what_counts_as_a_difference(ours, theirs, tolerance, differs):
    found = differing({"y": ours[None]}, 0, {"y": theirs[None]}, 0, tolerance)
    assert bool(found) is differs
    assert not found or "'y'" in found


def test_a_few_values_of_many_may_differ():
    """A steep function makes much of little here and there."""
    ours, theirs = np.ones(1000, np.float32), np.ones(1000, np.float32)
    theirs[:10] = 2
    assert not differing({"y": ours[None]}, 0, {"y": theirs[None]}, 0)
    theirs[:11] = 2
    assert differing({"y": ours[None]}, 0, {"y": theirs[None]}, 0)


class Fragile(HostSessions):
    """Sessions of a library that does not survive a run that fails, and a twin that does."""

    capabilities = replace(HostSessions.capabilities, has_host_twin=True)

    def __init__(self, path):
        super().__init__(path, is_direct=True)
        self.failures = []
        self.runs = 0

    def load_session(self, device, stream, sizes):
        session = super().load_session(device, stream, sizes)
        run = session.run

        def noted(binding, options):
            self.runs += 1
            try:
                run(binding, options)
            except Exception as error:
                self.failures.append(error)
                raise

        session.run = noted
        return session

    def host_twin(self):
        return OnnxModel(self.path)


def by_32_onnx(path, *, mixes=False):
    """Rows whose lengths are multiples of 32, each summed by the piece, and mixed with others perhaps."""
    nodes = [node("Reshape", "x pieces", "p"), node("ReduceSum", "p two", "sums", keepdims=0)]
    nodes += [node("Softmax", "sums", "y", axis=0) if mixes else node("Identity", "sums", "y")]
    weights = [("pieces", np.array([0, -1, 32])), ("two", np.array([2]))]
    return save(path, nodes, [("x", FLOAT, ["n", "k"])], [("y", FLOAT, ["n", "pieces_of_k"])], weights)


@pytest.mark.anyio
@pytest.mark.parametrize("mixes", [False, True])
async def test_what_fails_is_tried_on_the_host_alone(tmp_path, mixes):
    model = Fragile(by_32_onnx(tmp_path / "model.onnx", mixes=mixes))
    device = asynctrt.HostDevice(in_place="always", unified=False)
    async with asynctrt.open(model, device=device) as engine:
        assert engine.batching.is_on is not mixes
        assert (model.runs > 0) is not mixes  # What is known by then need not be tried again.
        sent = [np.full((1, 64), number, np.float32) for number in range(6)]
        answers = await asyncio.gather(*map(engine.infer, sent))
    for number, answer in enumerate(answers):
        right = np.ones((1, 2)) if mixes else np.full((1, 2), 32 * number)
        np.testing.assert_array_equal(answer["y"], right)
    assert not model.failures


@pytest.mark.anyio
async def test_rows_that_the_device_alone_mixes_are_seen(tmp_path):
    """It is the device whose answers count."""

    class Mixing(Fragile):
        def host_twin(self):
            return OnnxModel(save(tmp_path / "twin.onnx", [node("Identity", "x", "y")], X, Y))

    X, Y = [("x", FLOAT, ["n", 4])], [("y", FLOAT, ["n", 4])]
    model = Mixing(save(tmp_path / "model.onnx", [node("Softmax", "x", "y", axis=0)], X, Y))
    device = asynctrt.HostDevice(in_place="always", unified=False)
    async with asynctrt.open(model, device=device) as engine:
        assert not engine.batching.is_on
        np.testing.assert_array_equal((await engine.infer(rows(1)))["y"], np.ones((1, 4)))


@pytest.mark.anyio
async def test_what_batches_take_is_measured_on_the_device_alone(tmp_path, monkeypatch):
    measured, measure = [], Lengths._measured

    def noted(lengths, padding, found):
        measured.append(lengths._model)
        return measure(lengths, padding, found)

    monkeypatch.setattr(Lengths, "_measured", noted)
    model = Fragile(encoder_onnx(tmp_path / "encoder.onnx", 8))
    device = asynctrt.HostDevice(in_place="always", unified=False)
    async with asynctrt.open(model, device=device) as engine:
        assert "padding sequence changed no answer" in engine.batching.lengths
    assert measured == [model]


class Waiting(Fragile):
    """A model that loads no session on the device before it is tried on the host."""

    def __init__(self, path, error=None):
        super().__init__(path)
        self.is_tried, self.error = threading.Event(), error

    def load_session(self, device, stream, sizes):
        assert self.is_tried.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return super().load_session(device, stream, sizes)

    def host_twin(self):
        self.is_tried.set()
        return super().host_twin()


@pytest.mark.anyio
async def test_a_model_is_tried_on_the_host_while_it_is_loaded_for_the_device(tmp_path):
    device = asynctrt.HostDevice(in_place="always", unified=False)
    path = encoder_onnx(tmp_path / "encoder.onnx", 8)
    async with asynctrt.open(Waiting(path), device=device) as engine:
        assert "padding sequence changed no answer" in engine.batching.lengths
    with pytest.raises(DeviceMemoryError, match="no room"):
        await asynctrt.open(Waiting(path, DeviceMemoryError("there is no room")), device=device)
    assert not [thread for thread in threading.enumerate() if "asynctrt-probe" in thread.name]
