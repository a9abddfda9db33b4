"""The plan cache: found again, built again when something differs, bounded, safe under several processes."""

import asyncio
import dataclasses
import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.tensorrt import TensorRTModel, trust
from asynctrt.backends.tensorrt.manifest import Manifest, manifest_path
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceUnavailableError,
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    UsageError,
)
from asynctrt.options import Options
from asynctrt.plans import cache as cache_module
from asynctrt.plans.cache import PlanCache
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan
from tests.models import double_onnx

ROOT = Path(__file__).parents[2]


class Gpu(HostDevice):
    """A host device that passes for a GPU."""

    name = "cuda:0"
    gpu = "Imaginary 1"
    compute_capability = (8, 9)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setattr(cache_module, "installed_builders", lambda: {"tensorrt_rtx": "1.7.1.116"})
    monkeypatch.setattr(cache_module, "DRIVER", tmp_path / "driver")


@pytest.fixture
def device():
    made = Gpu()
    yield made
    made.close()


@pytest.fixture
def model(tmp_path):
    return double_onnx(tmp_path / "m.onnx")


class Builder:
    """Stands for the builder: plans of the double, each of its own bytes, and what each was built with."""

    def __init__(self):
        self.calls = []
        self.padding = b""

    def __call__(self, source, flavour, options, *, device, report):
        self.calls.append(options)
        content = double_plan(EngineSpec(name=str(len(self.calls)))) + self.padding
        facts = (hashlib.sha256(content).hexdigest(), len(content), "m.onnx", "", {}, flavour, device.gpu)
        manifest = Manifest(*facts, (), (), (), (), {})
        return dataclasses.make_dataclass("Built", ["content"])(content), manifest


@pytest.fixture
def builder(monkeypatch):
    made = Builder()
    monkeypatch.setattr(cache_module, "build_from", made)
    return made


@pytest.fixture
def find(builder, model, device):
    """Look for the plan; return whether it was there."""

    def find(nbytes_max=1 << 30, *, model=model, device=device, flavour=None, **options):
        cache = dataclasses.replace(PlanCache.of_user(), nbytes_max=nbytes_max)
        return cache.plan_for(model, device, flavour, BuildOptions(**options)).is_hit

    return find


def entries():
    return sorted(PlanCache.of_user().folder.glob("*.plan"))


def test_a_plan_is_built_once(find, builder):
    assert [find(), find(), find()] == [False, True, True]
    assert len(builder.calls) == 1
    assert len(entries()) == 1
    assert PlanCache.of_user().folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["model", "options", "version", "gpu", "driver"])
def test_whatever_it_depends_on_makes_another_plan(find, model, monkeypatch, tmp_path, what):
    assert not find()
    options = {}
    if what == "model":
        double_onnx(model, dims=(8,))
    elif what == "options":
        options = {"max_rows": 3}
    elif what == "version":
        monkeypatch.setattr(cache_module, "installed_builders", lambda: {"tensorrt_rtx": "1.8.0.1"})
    elif what == "gpu":
        monkeypatch.setattr(Gpu, "gpu", "Imaginary 2")
    else:
        (tmp_path / "driver").write_text("580.1\n")
    assert not find(**options)
    assert find(**options)


def test_what_changes_nothing_about_a_plan_finds_it(find, model, tmp_path):
    assert not find()
    assert find(verbosity=10)
    copied = tmp_path / "copy.onnx"
    copied.write_bytes(model.read_bytes())
    assert find(model=copied), "it is known by its content"


def test_weights_beside_the_model_count(find, model, tmp_path):
    entry = b"\x72\x13\x0a\x08location\x12\x07w.bytes"
    model.write_bytes(model.read_bytes() + entry)
    (tmp_path / "w.bytes").write_bytes(b"1")
    assert not find()
    assert find()
    (tmp_path / "w.bytes").write_bytes(b"2")
    assert not find()


@pytest.mark.parametrize(
    "damage", ["plan", "longer", "empty", "manifest", "no manifest", "no record", "junk"]
)
def test_an_entry_that_is_not_what_was_built_is_built_again(find, caplog, damage):
    caplog.set_level(logging.INFO, "asynctrt")
    find()
    (path,) = entries()
    content = path.read_bytes()
    if damage == "plan":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage in ("empty", "junk"):
        path.write_bytes(b"" if damage == "empty" else b"junk")
    elif damage == "manifest":
        manifest_path(path).write_text("{}")
    elif damage == "no manifest":
        manifest_path(path).unlink()
    else:
        trust.records_path().unlink()
    assert [find(), find()] == [False, True]
    assert "building a plan from" in caplog.text
    assert caplog.text.count("it is not in the cache") == 1, "the reason of the second is another"


def test_one_flipped_bit_anywhere_in_an_entry_is_built_again(find, builder):
    find()
    (path,) = entries()
    random = np.random.default_rng(4)
    for number in range(15):
        content = bytearray(path.read_bytes())
        content[random.integers(len(content))] ^= 1 << random.integers(8)
        path.write_bytes(content)
        assert not find()
        assert len(builder.calls) == number + 2


def test_what_was_used_longest_ago_goes_first(find, builder):
    builder.padding = b"\0" * 100_000
    each = len(double_plan(EngineSpec(name="1"))) + len(builder.padding)
    room = 3 * each + each // 2
    for number, rows in enumerate((1, 2, 3)):
        assert not find(room, max_rows=rows)
        for path in entries():
            if path.stat().st_mtime_ns > 10**12:
                os.utime(path, ns=(number, number))
    assert find(room, max_rows=1), "which makes it the one that was used last"
    assert not find(room, max_rows=4)
    assert len(entries()) == 3
    assert [find(room, max_rows=rows) for rows in (1, 3, 4)] == [True, True, True]
    assert not find(room, max_rows=2)
    assert sum(path.stat().st_size for path in entries()) <= room
    manifests = {path.stem for path in PlanCache.of_user().folder.glob("*.json")}
    assert manifests == {path.name for path in entries()}


def test_a_plan_larger_than_the_cache_is_used_all_the_same(find):
    assert [find(1), find(1)] == [False, True]


def test_refusals(find, tmp_path, monkeypatch):
    with pytest.raises(ModelNotFoundError):
        find(model=tmp_path / "missing.onnx")
    with pytest.raises(OptionsError, match="tensorrt_lean runs plans, and cannot build them"):
        find(flavour="tensorrt_lean")
    with pytest.raises(MissingExtraError, match="tensorrt is not installed: pip install"):
        find(flavour="tensorrt")
    monkeypatch.setattr(cache_module, "installed_builders", dict)
    with pytest.raises(MissingExtraError, match="no package that builds plans is installed"):
        find()


def test_a_cache_that_cannot_be_made(find, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="Set XDG_CACHE_HOME"):
        find()


@pytest.fixture
def opened(builder, monkeypatch, device):
    """Let the double run what comes out of the cache."""
    seen = []

    def make(plan, *, device, options):
        seen.append((plan, options))
        return TensorRTModel(plan, device=device, options=options, flavour=StrictTensorRT(device))

    monkeypatch.setattr(cache_module, "TensorRTModel", make)
    return seen


def test_an_engine_through_the_cache(opened, builder, model, device):
    async def run():
        async with asynctrt.open(model, device=device, runtime="tensorrt", max_rows=8) as engine:
            result = await engine.infer({"input": np.ones((2, 16), np.float32)})
            assert result["output"].shape == (2, 16)

    for _ in range(2):
        asyncio.run(run())
    assert len(builder.calls) == 1
    assert builder.calls[0].max_rows == 8, "the profile takes what the engine sends"
    (first, options), (second, _) = opened
    assert options.trust == ("built-here",)
    assert first.content == second.content
    assert "m.onnx" in first.where


OWN_ROWS = Options(runtime="tensorrt", max_rows=8, tensorrt={"build": {"max_rows": 16}})


def test_the_builds_own_rows_win(opened, builder, model, device):
    cache_module.load_for(model, device, OWN_ROWS).close()
    assert builder.calls[0].max_rows == 16


def test_an_entry_that_does_not_run_is_built_again_once(opened, builder, model, device, monkeypatch, caplog):
    make = cache_module.TensorRTModel
    options = Options(runtime="tensorrt")
    cache_module.load_for(model, device, options).close()
    refuse = [ModelError("it was built on another GPU")]

    def moody(plan, **more):
        if refuse:
            raise refuse.pop()
        return make(plan, **more)

    monkeypatch.setattr(cache_module, "TensorRTModel", moody)
    cache_module.load_for(model, device, options).close()
    assert len(builder.calls) == 2
    assert "is removed from the plan cache: it was built on another GPU" in caplog.text
    refuse[:] = [ModelError("again"), ModelError("once")]
    with pytest.raises(ModelError, match="again"):
        cache_module.load_for(model, device, options)
    assert len(builder.calls) == 3


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("m.onnx", {"runtime": "tensorrt"}, DeviceUnavailableError, "needs a GPU"),
        ("m.plan", {"runtime": "onnxruntime"}, OptionsError, "ONNX Runtime does not run"),
        ("m:model", {"runtime": "tensorrt"}, OptionsError, "neither an .onnx file nor a plan"),
        ("m.onnx", {"tensorrt": {"build": {"max_rows": 3}}}, OptionsError, "goes with an .onnx model and"),
        ("m.plan", {"tensorrt": {"build": {}}, "runtime": "tensorrt"}, OptionsError, "build says how"),
    ],
)
def test_runtimes_that_do_not_fit(name, options, error, said):
    device = HostDevice()
    with pytest.raises(error, match=said):
        cache_module.load_for(name, device, Options(**options))
    device.close()


def test_options():
    options = Options(tensorrt=["build={dims={length = '1:2:3'}, workspace=5}"], runtime="tensorrt")
    assert options.tensorrt.build == BuildOptions(dims={"length": "1:2:3"}, workspace=5)
    with pytest.raises(OptionsError, match="runtime must be 'onnxruntime' or 'tensorrt'"):
        Options(runtime="tensorflow")
    with pytest.raises(OptionsError, match="build must be an asynctrt.BuildOptions"):
        Options(tensorrt={"build": 7})


SHARED = """
import sys
from pathlib import Path
from asynctrt.backends.build_options import BuildOptions
from asynctrt.devices.host import HostDevice
from asynctrt.plans import cache
build = cache.build_from
def slow(source, flavour, options, *, device, report):
    print("building", flush=True)
    return build(source, flavour, options, report=report)
cache.build_from = slow
found = cache.PlanCache.of_user().plan_for(Path(sys.argv[1]), HostDevice(), "tensorrt_rtx", BuildOptions())
print(found.plan.header.nbytes)
"""


def run(program, model):
    """Look for a model's plan in another process; return its status."""
    command = [sys.executable, "-c", program, str(model)]
    return subprocess.run(command, cwd=ROOT, timeout=50, capture_output=True, check=False).returncode


@pytest.mark.tier2
def test_several_processes_build_once(model):
    """With the real builder: all get the same plan, and one has built it."""
    command = [sys.executable, "-c", SHARED, str(model)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)]
    said = [one.communicate(timeout=50)[0].split() for one in running]
    assert sum(words[0] == "building" for words in said) == 1
    assert len({words[-1] for words in said}) == 1
    assert [one.returncode for one in running] == [0] * 4


@pytest.mark.tier2
def test_a_process_that_dies_while_it_builds_leaves_no_lock(model):
    program = SHARED.replace("    return build(", "    import os; os.kill(os.getpid(), 9)\n    return build(")
    assert run(program, model) == -9
    assert run(SHARED, model) == 0


@pytest.mark.tier2
def test_a_process_that_dies_while_it_writes_leaves_nothing_for_long(model):
    """A plan may have gigabytes, and the limit of the cache counts only plans."""
    program = SHARED.replace("import sys", "import os, sys\nos.fsync = lambda _: os.kill(os.getpid(), 9)")
    for _ in range(3):
        assert run(program, model) == -9
    (left,) = PlanCache.of_user().folder.glob(".*")
    assert left.stat().st_size
    assert run(SHARED, model) == 0
    assert not list(PlanCache.of_user().folder.glob(".*"))
