"""Weights that are on a device once, for all sessions of a model: here with ONNX Runtime's CPU provider."""

import gc
import logging
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from asynctrt.backends import onnxruntime_weights
from asynctrt.backends.onnxruntime import ort
from asynctrt.backends.onnxruntime_weights import SHARED_NBYTES_MIN, share_weights
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError, DeviceMemoryError
from tests.models import node, save

FLOAT = TensorProto.FLOAT
WIDTH = 64
CPU = "cpu", 0


def mixed_onnx(path, *, inner=SHARED_NBYTES_MIN // 4 // WIDTH, dtype=np.float32):
    """Large weights of two types, some that are too small to share, and one that shapes depend on."""
    rng = np.random.default_rng(4)
    weights = [
        ("first", (rng.standard_normal((WIDTH, inner)) / 8).astype(dtype)),
        ("bias", rng.standard_normal(inner).astype(dtype)),
        ("table", rng.integers(0, 100, (1000, WIDTH)).astype(np.uint8)),
        ("shape", np.array([-1, inner])),
        ("column", np.array([3, 7])),
    ]
    nodes = [
        node("Cast", "input", "narrow", to=TensorProto.FLOAT16 if dtype == np.float16 else FLOAT),
        node("MatMul", "narrow first", "wide"),
        node("Add", "wide bias", "risen"),
        node("Reshape", "risen shape", "same"),
        node("Cast", "same", "output", to=FLOAT),
        node("Gather", "table column", "rows"),
        node("Cast", "rows", "numbers", to=FLOAT),
        node("ReduceSum", "numbers", "total", keepdims=0),
        node("Mul", "input total", "scaled"),
    ]
    outputs = [("output", FLOAT, ["batch", inner]), ("scaled", FLOAT, ["batch", WIDTH])]
    return save(path, nodes, [("input", FLOAT, ["batch", WIDTH])], outputs, weights)


def options():
    made = ort.SessionOptions()
    made.log_severity_level = 4
    return made


class Loader:
    """Loads a model, and counts how often."""

    def __init__(self, path):
        self.path, self.count, self.made = path, 0, []

    def __call__(self, given):
        self.count += 1
        session = ort.InferenceSession(str(self.path), given, providers=["CPUExecutionProvider"])
        self.made.append(weakref.ref(session._sess))
        return session


@pytest.fixture
def device():
    return HostDevice(unified=False)


def share(path, device):
    stream, load = device.create_stream(), Loader(path)
    try:
        shared = share_weights(load, options(), device, stream, CPU, "mixed")
    finally:
        assert stream.close(10)
    (made,) = load.made
    assert made() is None, "the session that optimised has weights of its own, and is ended"
    return shared


def session_of(shared, level=None, **sizes):
    given = options()
    given.add_session_config_entry("session.disable_prepacking", "1")
    shared.add_to(given)
    if level is not None:
        given.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    for name, size in sizes.items():
        given.add_free_dimension_override_by_name(name, size)
    return ort.InferenceSession(str(shared.path), given, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sessions_compute_with_weights_that_lie_in_one_place(tmp_path, device, dtype):
    path = mixed_onnx(tmp_path / "mixed.onnx", inner=SHARED_NBYTES_MIN // WIDTH // 2, dtype=dtype)
    sent = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
    expected = Loader(path)(options()).run(None, {"input": sent})
    shared = share(path, device)
    assert device.memory().held_nbytes == shared.nbytes >= SHARED_NBYTES_MIN
    loaded = [session_of(shared) for _ in range(2)]
    for session in loaded:
        for found, right in zip(session.run(None, {"input": sent}), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
    bytes_of = shared._buffer.array(np.dtype("uint8"), (shared.nbytes,), 0)
    bytes_of[...] = 0
    for session in loaded:
        output, _ = session.run(None, {"input": sent})
        assert not output.any(), "it computed with a copy of the weights"
    del session, loaded
    gc.collect()
    folder = shared.path.parent
    assert folder.is_dir()
    shared.close()
    shared.close()
    assert not folder.exists()
    assert device.memory().held_nbytes == 0


def test_what_depends_on_sizes_alone_is_computed_from_the_file(tmp_path, device):
    """Not from where the weights lie on a GPU, as the CPU computes it: that would end the process."""
    inner = SHARED_NBYTES_MIN // 4 // WIDTH
    rng = np.random.default_rng(2)
    first = rng.standard_normal((WIDTH, inner)).astype(np.float32)
    place = rng.standard_normal((1, inner)).astype(np.float32)
    path = save(
        tmp_path / "places.onnx",
        [
            node("MatMul", "input first", "wide"),
            node("Shape", "wide", "shape"),
            node("Expand", "place shape", "places"),
            node("Add", "wide places", "output"),
        ],
        [("input", FLOAT, ["batch", WIDTH])],
        [("output", FLOAT, ["batch", inner])],
        [("first", first), ("place", place)],
    )
    shared = share(path, device)
    shared._buffer.array(np.dtype("uint8"), (shared.nbytes,), 0)[...] = 0
    sent = rng.standard_normal((3, WIDTH)).astype(np.float32)
    for level, expected in (("ORT_DISABLE_ALL", 0), ("ORT_ENABLE_BASIC", place)):
        session = session_of(shared, level, batch=3)
        (output,) = session.run(None, {"input": sent})
        np.testing.assert_array_equal(output, np.broadcast_to(expected, output.shape))
        del session
    gc.collect()
    shared.close()


def test_few_bytes_of_weights_are_not_shared(tmp_path, device, monkeypatch):
    folders = kept_folders(monkeypatch)
    assert share(mixed_onnx(tmp_path / "small.onnx", inner=2000), device) is None
    check_nothing_is_left(device, folders)


def kept_folders(monkeypatch):
    """Return a list of the folders that are made from now on."""
    folders, make = [], onnxruntime_weights.optimising
    monkeypatch.setattr(
        onnxruntime_weights, "optimising", lambda given: folders.append(make(given)) or folders[-1]
    )
    return folders


def check_nothing_is_left(device, folders):
    (folder,) = folders
    assert not Path(folder.name).exists()
    assert device.memory().held_nbytes == 0


@pytest.mark.parametrize("where", ["load", "copy"])
@pytest.mark.parametrize("error", [DeviceMemoryError("no room"), RuntimeError("unheard of"), OSError("full")])
def test_what_goes_wrong_leaves_each_session_its_own(tmp_path, device, monkeypatch, caplog, where, error):
    folders, path = kept_folders(monkeypatch), mixed_onnx(tmp_path / "mixed.onnx")

    def fail(*_, **__):
        raise error

    stream = device.create_stream()
    if where == "copy":
        stream.copy_bytes = fail
    load = fail if where == "load" else Loader(path)
    with caplog.at_level(logging.INFO, "asynctrt"):
        assert share_weights(load, options(), device, stream, CPU, "mixed") is None
    assert f"each session has separate weights: {error}" in caplog.text
    check_nothing_is_left(device, folders)


def test_a_device_that_is_lost_is_told_of(tmp_path, device, monkeypatch):
    folders = kept_folders(monkeypatch)

    def fail(_):
        raise DeviceLostError("it is lost")

    with pytest.raises(DeviceLostError, match="it is lost"):
        share_weights(fail, options(), device, device.create_stream(), CPU, "mixed")
    check_nothing_is_left(device, folders)


def test_without_onnx_each_session_has_its_own(tmp_path, device, monkeypatch, caplog):
    monkeypatch.setattr(onnxruntime_weights, "find_spec", lambda name: None)
    load = Loader(tmp_path / "none.onnx")
    with caplog.at_level(logging.INFO, "asynctrt"):
        assert share_weights(load, options(), device, None, CPU, "mixed") is None
    assert "as onnx is not installed" in caplog.text
    assert load.count == 0


def test_onnx_is_imported_for_large_models_alone():
    code = "import sys, asynctrt.backends.onnxruntime_weights; assert 'onnx' not in sys.modules"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
