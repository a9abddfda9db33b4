"""``asynctrt.build``: real plans of real models, their manifests, and what goes wrong."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import asynctrt
from asynctrt.backends.tensorrt.manifest import manifest_path, read_manifest
from asynctrt.backends.tensorrt.plan import read_header, read_plan
from asynctrt.backends.tensorrt.trust import is_recorded
from asynctrt.errors import BuildError, ModelError, ModelNotFoundError, OptionsError
from asynctrt.plans import building as building_module
from asynctrt.plans.building import build_from, read_source
from asynctrt.plans.plan_file import digest_of, find_plan
from tests.models import double_onnx, node, save, sequence_onnx

ROOT = Path(__file__).parents[2]
F = onnx.TensorProto.FLOAT


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def model(tmp_path):
    return double_onnx(tmp_path / "double.onnx")


def test_a_plan_with_its_manifest(model):
    built = asynctrt.build(model, max_rows=8)
    content = built.path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert built.path == model.with_suffix(".plan")
    assert read_header(content).tag == b"vtrt"
    assert read_manifest(manifest_path(built.path)) == built.manifest
    assert built.manifest.plan_digest == digest
    assert built.manifest.model_digest == hashlib.sha256(model.read_bytes()).hexdigest()
    assert built.manifest.profiles == ("input=1x4:8x4:8x4",)
    assert built.manifest.inputs[0].dims == ("batch", 4)
    assert built.manifest.options["max_rows"] == 8
    assert is_recorded(digest)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"plan": "m.bin"}, OptionsError, "recognises plans by their suffix: .plan, .engine, .trt"),
        ({"plan": "missing/m.plan"}, OptionsError, "Create the folder first"),
        ({"key": "mine"}, OptionsError, "'key' was removed: .*ssh-keygen"),
        ({"rows": 3}, OptionsError, "unknown option 'rows' of a build; did you mean 'max_rows'"),
        ({"flavour": "tensorrt_lean"}, OptionsError, "flavour must be 'tensorrt' or 'tensorrt_rtx'"),
    ],
)
def test_what_is_refused_before_anything_is_built(model, settings, error, said):
    with pytest.raises(error, match=said):
        asynctrt.build(model, **settings)
    assert not model.with_suffix(".plan").exists()


def test_there_is_no_such_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        asynctrt.build(tmp_path / "missing.onnx")


@pytest.mark.tier2
def test_importing_the_package_does_not_import_the_builder():
    program = "import sys, asynctrt; print('asynctrt.plans.building' in sys.modules, asynctrt.build.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False build\n"
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        _ = asynctrt.biuld


def with_weights_in(name, folder):
    """Save a model whose weights are in a file of that name beside it."""
    weights = [("w", np.eye(64, dtype=np.float32))]
    ends = [("x", F, ["n", 64])], [("y", F, ["n", 64])]
    path = save(folder / "m.onnx", [node("MatMul", "x w", "y")], *ends, weights)
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location=name, size_threshold=0)
    return path


@pytest.mark.parametrize("length", [5, 127, 128, 200])
def test_weights_outside_the_model_are_a_part_of_it(tmp_path, length):
    name = ("w" * length)[: length - 4] + ".bin"
    path = with_weights_in(name, tmp_path)
    first = read_source(path)
    assert list(first.external) == [name]
    (tmp_path / name).write_bytes(b"\1" * (64 * 64 * 4))
    assert read_source(path).external != first.external
    assert read_source(path).digest == first.digest


def test_weights_that_change_while_the_plan_is_built(tmp_path, monkeypatch):
    source = read_source(with_weights_in("w.bin", tmp_path))
    assert list(source.external) == ["w.bin"]

    def building(*_):
        (tmp_path / "w.bin").write_bytes(b"\1" * (64 * 64 * 4))

    monkeypatch.setattr(building_module, "build_in_process", building)
    with pytest.raises(BuildError, match="changed while the plan was built"):
        build_from(source, "tensorrt_rtx", asynctrt.BuildOptions())


@pytest.mark.parametrize("name", ["m.onnx", "m.plan"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for read in (read_source, read_plan, digest_of, find_plan):
        with pytest.raises(ModelError, match="not a regular file"):
            read(tmp_path / name)
    with pytest.raises(ModelError, match="not a regular file"):
        read_plan(Path("/dev/zero"))


def test_what_is_no_plan_is_not_read_as_a_whole(tmp_path):
    path = tmp_path / "m.plan"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # All of it a hole.
    with pytest.raises(ModelError, match="is not a TensorRT plan"):
        read_plan(path)


def test_a_file_outside_the_models_folder_is_not_looked_at(tmp_path):
    entry = b"\x0a\x08location\x12"
    for name in (b"../secret", b"/etc/passwd", b"a\0b", b""):
        path = tmp_path / "m.onnx"
        path.write_bytes(b"\x08\x09" + entry + bytes([len(name)]) + name)
        assert read_source(path).external == {}


def command(*arguments):
    words = [sys.executable, "-m", "asynctrt", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=50, check=False)


@pytest.mark.tier2
def test_the_command(tmp_path):
    path = sequence_onnx(tmp_path / "m.onnx")
    asked = command("build", path)
    assert asked.returncode == 1
    assert "--dims length=1:128:512" in asked.stderr
    assert "Traceback" not in asked.stderr
    done = command("build", path, "-o", tmp_path / "o.plan", "--dims", "length=1:16:32", "--max-rows", "4")
    assert done.returncode == 0, done.stderr
    assert "Opset version" not in done.stderr
    told = command("build", path, "-o", tmp_path / "t.plan", "--dims", "length=16", "--verbosity", "20")
    assert "Opset version" in told.stderr, "what TensorRT says"
    assert "tokens=1x1:4x16:4x32" in done.stdout
    shown = command("inspect", tmp_path / "o.plan")
    assert "tokens: FLOAT[batch, length]" in shown.stdout
    refused = command("inspect", tmp_path / "o.plan", "--open", "--tensorrt", "trust=built-here")
    assert "UntrustedError" not in refused.stderr
    content = bytearray((tmp_path / "o.plan").read_bytes())
    content[-1] ^= 1
    (tmp_path / "o.plan").write_bytes(content)
    refused = command("inspect", tmp_path / "o.plan", "--open", "--tensorrt", "trust=built-here")
    assert "UntrustedError" in refused.stderr or "DeviceUnavailableError" in refused.stderr


SQUEEZENET = Path(onnx.__file__).parent / "backend/test/data/light/light_densenet121.onnx"


@pytest.mark.tier2
@pytest.mark.skipif(not SQUEEZENET.exists(), reason="this version of onnx carries no models")
def test_ctrl_c_ends_a_build_and_leaves_nothing(tmp_path):
    """Of densenet121, which takes seconds: the signal goes to both processes, as from a terminal."""
    running = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(SQUEEZENET), str(tmp_path / "o.plan")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert running.stdout.readline() == "step\n"
    os.killpg(running.pid, signal.SIGINT)
    assert running.communicate(timeout=30)[0].endswith("interrupted\n")
    assert running.returncode == 0
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".plan", ".json")]


INTERRUPTED = """
import sys, asynctrt
seen = []
def progress(step):
    if not seen:
        print("step", flush=True)
    seen.append(step)
try:
    asynctrt.build(sys.argv[1], sys.argv[2], progress=progress)
except (KeyboardInterrupt, asynctrt.UsageError):
    print("interrupted")
"""


def transformer(path, width=32):
    """One block of attention over tokens of any number."""
    random = np.random.default_rng(0)
    weights = [(name, random.standard_normal((width, width)).astype(np.float32)) for name in ("q", "k", "v")]
    weights.append(("table", random.standard_normal((100, width)).astype(np.float32)))
    return save(
        path,
        [
            node("Gather", "table tokens", "x"),
            node("MatMul", "x q", "xq"),
            node("MatMul", "x k", "xk"),
            node("MatMul", "x v", "xv"),
            node("Transpose", "xk", "xkt", perm=[0, 2, 1]),
            node("MatMul", "xq xkt", "scores"),
            node("Softmax", "scores", "weights", axis=-1),
            node("MatMul", "weights xv", "y"),
        ],
        [("tokens", onnx.TensorProto.INT64, ["batch", "length"])],
        [("y", F, ["batch", "length", width])],
        weights,
    )


@pytest.mark.tier2
def test_a_transformer_of_any_length(tmp_path):
    built = asynctrt.build(transformer(tmp_path / "m.onnx"), dims={"length": "1:16:64"}, max_rows=4)
    assert built.manifest.profiles == ("tokens=1x1:4x16:4x64",)
    assert built.manifest.inputs[0].dims == ("batch", "length")


@pytest.mark.tier2
def test_a_model_of_a_package(tmp_path):
    magika = pytest.importorskip("magika")
    (path,) = (Path(magika.__file__).parent / "models" / "standard_v3_3").glob("*.onnx")
    built = asynctrt.build(path, tmp_path / "magika.plan", max_rows=16)
    assert built.manifest.plan_nbytes > 1 << 20
    assert built.manifest.inputs[0].dtype == "INT32"
