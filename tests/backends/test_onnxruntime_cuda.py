"""What can be told of ONNX Runtime's CUDA provider without a GPU; tests/gpu has the rest."""

import pytest

import asynctrt
from asynctrt.backends import onnxruntime_cuda
from asynctrt.backends.onnxruntime_cuda import (
    OnnxCudaModel,
    check_provider,
    describe_fallback,
    provider_settings,
)
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError, MissingExtraError, OptionsError
from tests.models import double_onnx


def test_a_session_is_tied_to_its_stream_and_bounded():
    settings = provider_settings(1, 0xABC, 1 << 30, {})
    assert settings["device_id"] == "1"
    assert settings["user_compute_stream"] == str(0xABC)
    assert settings["gpu_mem_limit"] == str(1 << 30)
    assert settings["arena_extend_strategy"] == "kSameAsRequested"
    assert all(isinstance(value, str) for value in settings.values())


def test_options_of_the_provider_that_are_given_win():
    given = {"use_tf32": "0", "cudnn_conv_algo_search": "EXHAUSTIVE"}
    settings = provider_settings(0, 1, 1, given)
    assert settings["use_tf32"] == "0"
    assert settings["cudnn_conv_algo_search"] == "EXHAUSTIVE"


def test_nodes_on_the_cpu_are_counted_and_some_are_named():
    said = describe_fallback([("Shape", f"s{n}") for n in range(9)] + [("NonZero", "n")])
    assert said.startswith(
        "10 nodes run on the CPU (9 Shape, 1 NonZero): 's0', 's1', 's2', 's3', 's4', 's5' and"
    )
    assert "4 more" in said


def test_without_the_provider_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(onnxruntime_cuda.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(MissingExtraError, match=r"asynctrt\[gpu\]"):
        check_provider()


def test_another_device_than_a_gpu_is_refused(tmp_path):
    with pytest.raises(DeviceUnavailableError, match="cuda:0"):
        OnnxCudaModel(double_onnx(tmp_path / "m.onnx"), device=HostDevice())


@pytest.mark.anyio
async def test_a_runtime_that_does_not_fit_the_file_is_refused(tmp_path):
    path = double_onnx(tmp_path / "m.onnx")
    with pytest.raises(OptionsError, match="'onnxruntime' or 'tensorrt'"):
        asynctrt.open(path, runtime="tensorflow")
    plan = tmp_path / "m.plan"
    plan.write_bytes(b"")
    with pytest.raises(OptionsError, match="ONNX Runtime does not run"):
        await asynctrt.open(plan, runtime="onnxruntime")
    async with asynctrt.open(path, runtime="onnxruntime") as engine:
        assert engine.platform == "onnxruntime_onnx"
