"""Each benchmark still runs, as briefly as it can, and writes what it measured."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import installed, needed
from tests.serving.test_perf_analyzer import BINARY

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "benchmarks"
LEAST = {
    "copies": ["--batches", "1"],
    "lengths": ["--repeats", "1", "--seconds", "0.05", "--callers", "8"],
    "busy_loop": ["--requests", "3"],
    "busy_thread": ["--seconds", "0.05", "--repeats", "1"],
    "memory": ["--requests", "2000", "--engines", "2"],
    "overhead": ["--repeats", "1", "--seconds", "0.05"],
    "mlp": ["--repeats", "1", "--seconds", "0.05"],
    "serving": ["--repeats", "1", "--seconds", "0.1", "--only", "HTTP no-op, 64"],
    "frameworks": ["--repeats", "1", "--seconds", "0.2", "--only", "asynctrt in"],
    "several": ["--seconds", "1", "--cost-seconds", "0.1", "--repeats", "1", "--only", "80/s"],
    "soak": ["--requests", "3000"],
    "lateness": ["--seconds", "0.1", "--repeats", "1"],
    "goodput": [
        *("--seconds", "0.8", "--seeds", "1", "--loads", "0.9"),
        *("--real-seconds", "0.1", "--repeats", "1"),
    ],
    "truth": ["--seconds", "2"],
    "agreement": ["--seconds", "0.5", "--repeats", "1", "--count", "500", "--only", "4 ms"],
    "workers": ["--repeats", "1", "--seconds", "0.05", "--callers", "1", "--loads", "large"],
    "scale": ["--quick", "--seconds", "0.1", "--protocols", "HTTP,gRPC"],
    "worker_faults": ["--requests", "300", "--repeats", "1", "--batch-timeout", "0.3", "--only", "kills"],
    "front_faults": ["--requests", "300", "--every", "0.1", "--only", "all"],
    "ort_cuda": ["--host", "--quick", "--only", "magika", "--callers", "1", "--contexts", "2"],
}
LEAST_ON_GPU = {
    "completion": ["--seconds", "0.02", "--kernels", "200", "--loops", "idle,busy"],
    "saturation": ["--seconds", "0.05", "--repeats", "1", "--kernels", "300"],
    "urgent": ["--seconds", "0.1", "--repeats", "1"],
    "poisson": ["--seconds", "0.1", "--repeats", "1", "--shares", "0.02", "--contexts", "2"],
    "shapes": ["--seconds", "0.1", "--repeats", "1", "--shares", "0.02", "--shapes", "1,2"],
    "weights": ["--seconds", "0.05", "--repeats", "1"],
    "million": ["--batches", "2000"],
    "plans": ["--seconds", "0.02", "--repeats", "1"],
    "plans_load": ["--seconds", "0.05", "--shares", "0.001"],
    "detector": [
        *("--seconds", "0.2", "--side", "64", "--callers", "1,8"),
        *("--random", "4", "--shapes", "8"),
    ],
    "texts": [
        *("--seconds", "0.1", "--layers", "1", "--width", "64", "--words", "200"),
        *("--callers", "1,8", "--random", "4", "--patience", "0.5"),
    ],
    "function_sizes": ["--seconds", "0.05"],
    "two_gpus": ["--seconds", "0.1", "--repeats", "1", "--callers", "8"],
}
"""Without a GPU they run on the host device."""
PARTS = {
    "client",
    "servers",
    "mosec_server",
    "peer_servers",
    "peer_lit",
    "peer_bento",
    "scale_clients",
    "bare_http",
}
"""What benchmarks start as processes of their own."""
PARTS_ON_GPU = {"batchers", "kernels", "onnx_models", "raw", "resnet", "support", "torch_model"}


def test_every_benchmark_is_run_and_explained():
    names = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "common", "pictures", "tables", *PARTS}
    assert names == set(LEAST)
    on_gpu = {path.stem for path in (FOLDER / "gpu").glob("*.py")} - {"__init__", *PARTS_ON_GPU}
    assert on_gpu == set(LEAST_ON_GPU)
    explained = (FOLDER / "README.md").read_text()
    assert all(f"tests.benchmarks.{name}`" in explained for name in names)
    assert all(f"tests.benchmarks.gpu.{name}`" in explained for name in on_gpu)


@pytest.mark.tier2
@pytest.mark.parametrize("name", LEAST_ON_GPU)
def test_benchmark_for_a_gpu(name, tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"tests.benchmarks.gpu.{name}", *LEAST_ON_GPU[name], "--device", "host"]
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, check=False, timeout=55, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["figures"]
    assert content["machine"]["gpu"] is None


@pytest.mark.tier2
@pytest.mark.parametrize("name", LEAST)
@pytest.mark.timeout(250)
def test_benchmark(name, tmp_path):
    if name == "overhead":
        needed(find_spec("async_batcher"), "there is no async-batcher: pip install '.[peers]'")
    if name == "agreement":
        installed(BINARY)
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", *LEAST[name], "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content["figures"]
    assert content["machine"]["cores"]


def test_the_results_that_are_kept_are_of_benchmarks_that_there_are():
    names = {path.stem for path in (FOLDER / "results").glob("*.json")}
    names.remove("zoo")
    on_gpu = {name for name in names if name.startswith("gpu-")}
    assert {name.split("-")[1] for name in on_gpu} <= set(LEAST_ON_GPU)
    assert {name.split("-")[0] for name in names - on_gpu} == {*LEAST}
