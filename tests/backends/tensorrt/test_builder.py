"""Building plans with the real TensorRT for RTX, which needs no GPU for that; and what it refuses."""

import dataclasses
import hashlib
import re
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import tensorrt_lean
import tensorrt_rtx
from onnx import TensorProto

from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.tensorrt.builder import ProgressMonitor, build_plan, check_flavour
from asynctrt.backends.tensorrt.flavours import Flavour, find_builder
from asynctrt.backends.tensorrt.plan import read_header
from asynctrt.devices.host import HostDevice
from asynctrt.errors import BuildError, DeviceUnavailableError, OptionsError
from tests.doubles.tensorrt import StrictTensorRT
from tests.gpu.support import gpu_is_here
from tests.models import double_onnx, node, save

RTX = find_builder("tensorrt_rtx")
F = TensorProto.FLOAT


def build(path, *, report=None, **options):
    return build_plan(path.read_bytes(), path, RTX, BuildOptions(**options), report)


def saved(folder, *nodes, shape=("n", 4), outputs=None, kind=F, weights=()):
    """Save a model with the input x and the output y."""
    ends = [("x", kind, list(shape))], [("y", kind, list(outputs or shape))]
    return save(folder / "m.onnx", nodes, *ends, weights)


@pytest.fixture
def model(tmp_path):
    return double_onnx(tmp_path / "double.onnx")


def test_a_plan(model):
    made = build(model, max_rows=8)
    header = read_header(made.content)
    assert (header.tag, header.version_text) == (b"vtrt", tensorrt_rtx.__version__)
    assert made.profiles == ({"input": ((1, 4), (8, 4), (8, 4))},)
    assert [(one.name, one.shape, one.dims) for one in made.inputs] == [
        ("input", (-1, 4), ("batch", None))
    ], "names of dimensions are known here, and never again"
    again = build(model, max_rows=8)
    assert hashlib.sha256(again.content).digest() == hashlib.sha256(made.content).digest()


def test_profiles_and_gpus(model):
    made = build(model, profiles=("input=1x4:2x4:8x4", "input=1x4:16x4:64x4"), compute_capabilities="8.9")
    assert read_header(made.content).compute_capabilities == ((8, 9),)
    assert len(made.profiles) == 2


def test_float64_becomes_float32(tmp_path):
    made = build(saved(tmp_path, node("Add", "x x", "y"), kind=TensorProto.DOUBLE))
    assert (made.inputs[0].dtype, made.outputs[0].dtype) == ("FLOAT", "FLOAT")


def test_steps_are_told_and_each_phase_ends(model):
    steps = []
    build(model, report=steps.append)
    whole = [step for step in steps if step.parent is None]
    assert whole[0].done == 0
    assert whole[-1].done == whole[-1].total > 1
    assert {step.parent for step in steps} > {None, whole[0].phase}


def test_a_callback_that_raises_does_not_end_the_process(model, caplog):
    def report(step):
        raise RuntimeError("from the callback")

    assert build(model, report=report).content
    assert "the callback for the progress of a build raised" in caplog.text


def test_an_operator_that_there_is_not(tmp_path):
    path = saved(tmp_path, onnx.helper.make_node("Foo", ["x"], ["y"], name="the_node", domain="my"))
    with pytest.raises(BuildError, match=r"node 0 'the_node' \(Foo\): .*\.cpp:\d+ .*Export the model"):
        build(path)


@pytest.mark.parametrize("kind", ["NonZero", "Compress"])
def test_outputs_as_large_as_the_data_says(tmp_path, kind):
    """TensorRT for RTX 1.7 cannot; the message names the operator, and what can run the model."""
    nodes = {
        "NonZero": [node("NonZero", "x", "found"), node("Transpose", "found", "y")],
        "Compress": [node("Compress", "x keep", "y", axis=0)],
    }[kind]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [("x", F, ["n", 4])],
        [("y", TensorProto.INT64 if kind == "NonZero" else F, ["k", "m"])],
        [("keep", np.array([True, False]))],
    )
    with pytest.raises(BuildError, match=f"{kind}.*ONNX Runtime|cannot build a plan from"):
        build(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("opset", "opset is too old"),
        ("string", "does not have this type"),
        ("dilations", "not in this form"),
    ],
)
def test_what_to_do_fits_what_is_wrong(tmp_path, change, said):
    kind = TensorProto.STRING if change == "string" else F
    pool = node("MaxPool", "x", "y", kernel_shape=[3], dilations=[2] if change == "dilations" else [1])
    nodes = {"opset": [node("Add", "x w", "y")], "string": [node("Identity", "x", "y")], "dilations": [pool]}
    weights = [("w", np.ones((4, 1), np.float32))] if change == "opset" else ()
    path = saved(
        tmp_path, *nodes[change], shape=("n", 4, 8), outputs=("n", 4, "m"), kind=kind, weights=weights
    )
    if change == "opset":
        model = onnx.load(path)
        model.opset_import[0].version = 6
        onnx.save(model, path)
    with pytest.raises(BuildError, match=said):
        build(path)


@pytest.mark.parametrize("content", [b"", b"junk" * 99, b"\x08\x07"])
def test_files_that_are_no_models(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(BuildError, match="cannot be parsed by tensorrt_rtx"):
        build(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hardware_compatibility": "ampere-plus"}, "ignores hardware_compatibility"),
        ({"timing_cache": "cache"}, "has no timing cache"),
        ({"precision": "fp16"}, "computes in the types that the model has.*Convert the ONNX model to fp16"),
        ({"compute_capabilities": "9.0"}, "not build for compute capability 9.0, but for 7.5, 8.0"),
        ({"version_compatible": True}, "Set exclude_lean_runtime too"),
        ({"profiles": "wrong=1x4"}, "names .'wrong'., which is not an input"),
        ({"dims": "length=4"}, "dims names .'length'."),
    ],
)
def test_options_that_it_would_ignore_or_cannot_take(model, options, said):
    with pytest.raises(OptionsError, match=said):
        build(model, **options)


def test_options_that_it_takes(model):
    compatible = {"version_compatible": True, "exclude_lean_runtime": True}
    made = build(model, tf32=False, optimization_level=1, profiling="detailed", **compatible)
    assert read_header(made.content).nbytes == len(made.content)


@pytest.mark.skipif(gpu_is_here(), reason="with a GPU it is built")
def test_what_needs_a_gpu_after_all(tmp_path):
    path = saved(tmp_path, node("MatMul", "x w", "y"), weights=[("w", np.eye(4, dtype=np.float32))])
    with pytest.raises(DeviceUnavailableError, match="with refit or strip without a GPU"):
        build(path, strip=True)


class Gpu(HostDevice):
    """A host device that passes for a GPU."""

    name = "cuda:0"
    gpu = "NVIDIA H200"
    compute_capability = (9, 0)


def test_the_gpu_that_it_is_built_for(model, monkeypatch):
    device, options = Gpu(), BuildOptions()
    with pytest.raises(OptionsError, match=r"H200 has compute capability 9.0, and .* on 7.5, 8.0.*tensorrt"):
        build_plan(model.read_bytes(), model, RTX, options, device=device)
    monkeypatch.setattr(Gpu, "compute_capability", (8, 9))
    assert build_plan(model.read_bytes(), model, RTX, options, device=device).content
    with pytest.raises(OptionsError, match="Leave a quarter of it to the weights"):
        most = dataclasses.replace(options, workspace=device.memory().total_nbytes)
        build_plan(model.read_bytes(), model, RTX, most, device=device)
    device.close()


def test_a_package_that_only_runs_plans():
    lean = Flavour("tensorrt_lean", tensorrt_lean, is_real=True)
    with pytest.raises(OptionsError, match="runs plans, and cannot build them"):
        check_flavour(lean, BuildOptions())
    with pytest.raises(OptionsError, match="flavour must be 'tensorrt' or 'tensorrt_rtx'"):
        find_builder("tensorrt_lean")


class Recording:
    """Stands for a part of the library: notes what is set and called."""

    def __init__(self, **known):
        self.__dict__.update(known)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, *args)) or True


PUBLIC = {
    "IBuilderConfig": {
        "set_memory_pool_limit": ["pool", "pool_size"],
        "set_flag": ["flag"],
        "clear_flag": ["flag"],
        "add_optimization_profile": ["profile"],
        "create_timing_cache": ["serialized_timing_cache"],
        "set_timing_cache": ["cache", "ignore_mismatch"],
        "builder_optimization_level": None,
        "profiling_verbosity": None,
        "hardware_compatibility_level": None,
        "plugins_to_serialize": None,
        "progress_monitor": None,
        "set_preview_feature": ["feature", "enable"],
    },
    "Builder": {
        "create_network": ["flags"],
        "create_builder_config": [],
        "create_optimization_profile": [],
        "build_serialized_network": ["network", "config"],
    },
    "OnnxParser": {
        "parse": ["model", "path"],
        "get_error": ["index"],
        "num_errors": None,
        "set_flag": ["flag"],
        "get_used_vc_plugin_libraries": [],
    },
    "IOptimizationProfile": {"set_shape": ["input", "min", "opt", "max"]},
    "ITimingCache": {"serialize": []},
    "ParserError": {
        name: [] for name in ("code", "desc", "file", "func", "line", "node", "node_name", "node_operator")
    },
}
"""What the builder uses of the full library, as its public binding source has it (10.14 and 11): methods
with their arguments, and properties. No wheel of it can be had here; TensorRT for RTX shares that source."""

FLAGS = {
    *("FP16", "BF16", "INT8", "FP8", "INT4", "FP4"),
    *("VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME", "WEIGHT_STREAMING", "DISTRIBUTIVE_INDEPENDENCE"),
    *("REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL", "STRIP_PLAN", "TF32"),
}
"""Members of ``BuilderFlag`` in the public binding source of 10.14."""


@pytest.mark.parametrize("kind", PUBLIC)
def test_the_real_builder_has_the_public_names_and_arguments(kind):
    real = getattr(tensorrt_rtx, kind)
    for name, arguments in PUBLIC[kind].items():
        member = getattr(real, name)
        if arguments is None:
            assert isinstance(member, property), name
        else:
            said = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", member.__doc__, re.MULTILINE)
            found = [re.findall(r"(?:^|, )(\w+): ", one) for one in said]
            assert ["self", *arguments] in found, name


def test_the_builder_uses_nothing_but_the_public_names():
    """Every attribute of the library's objects that the module reads or sets is in the list above."""
    from pathlib import Path

    from asynctrt.backends.tensorrt import builder

    source = Path(builder.__file__).read_text()
    for kind, names in {
        "Builder": r"made\.builder\.(\w+)",
        "OnnxParser": r"made\.parser\.(\w+)",
        "IBuilderConfig": r"(?<!builder_)\b(?:made\.)?config\.(\w+)",
        "ITimingCache": r"\bcache\.(\w+)",
        "IOptimizationProfile": r"\bone\.(set_\w+)",
        "ParserError": r"(?<!made\.)\berror\.(\w+)\(",
    }.items():
        used = set(re.findall(names, source))
        assert used, kind
        allowed = {*PUBLIC[kind], "num_compute_capabilities", "set_compute_capability"}
        assert used <= allowed, kind


def full_library(**more):
    """Return a stand-in for the full library, with the flags of 10.14 or fewer."""
    flags = more.pop("flags", FLAGS)
    return Flavour(
        "tensorrt",
        Recording(
            __version__="10.14.1.48",
            BuilderFlag=type("BuilderFlag", (), {name: name for name in flags}),
            Builder=object,
            OnnxParser=object,
        ),
        is_real=False,
    )


def test_options_of_the_full_library():
    every = BuildOptions(
        precision=("fp16", "bf16", "int8", "fp8", "int4", "fp4"),
        version_compatible=True,
        exclude_lean_runtime=True,
        hardware_compatibility="same-compute-capability",
        refit="individual",
        strip=True,
    )
    check_flavour(full_library(), every)
    for refit in ("all", "identical"):
        check_flavour(full_library(), BuildOptions(refit=refit))
    typed = full_library(flags=FLAGS - {"FP16"})
    with pytest.raises(OptionsError, match="precision cannot be chosen"):
        check_flavour(typed, BuildOptions(precision="fp16"))
    with pytest.raises(OptionsError, match="builds for the GPU that it runs on"):
        check_flavour(full_library(), BuildOptions(compute_capabilities="8.9"))
    with pytest.raises(OptionsError, match="has no BuilderFlag.STRIP_PLAN"):
        check_flavour(full_library(flags=FLAGS - {"STRIP_PLAN"}), BuildOptions(strip=True))


def test_the_flags_of_version_11_are_a_part_of_them():
    for name in FLAGS - {"FP16", "BF16", "INT8", "FP8", "INT4", "FP4"}:
        assert hasattr(tensorrt_lean.BuilderFlag, name)
    assert {"AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"} <= set(
        tensorrt_lean.HardwareCompatibilityLevel.__members__
    )
    assert {"LAYER_NAMES_ONLY", "DETAILED", "NONE"} <= set(tensorrt_lean.ProfilingVerbosity.__members__)
    assert {"WORKSPACE", "TACTIC_DRAM"} <= set(tensorrt_lean.MemoryPoolType.__members__)


def test_a_monitor_that_is_told_of_a_phase_it_does_not_know():
    steps = []
    monitor = ProgressMonitor(steps.append)
    assert monitor.step_complete("unknown", 3)
    monitor.phase_finish("unknown")
    assert [step.parent for step in steps] == [None, None]


OF_8_6 = {
    "Builder": {*PUBLIC["Builder"], "max_batch_size"},
    "INetworkDefinition": {"num_inputs", "num_outputs", "get_input", "get_output", "error_recorder"},
    "OnnxParser": {*PUBLIC["OnnxParser"], "clear_errors"},
    "IBuilderConfig": {*PUBLIC["IBuilderConfig"], "max_workspace_size"} - {"progress_monitor"},
    "IOptimizationProfile": {"set_shape"},
    "ITimingCache": {"serialize"},
    "ParserError": {*PUBLIC["ParserError"]} - {"node_name", "node_operator"},
}
"""What objects of the bindings of 8.6.1 have, of the names that a builder might use."""

FLAGS_OF_8_6 = ("FP16", "INT8", "FP8", "REFIT", "TF32", "VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME")


class Part:
    """Stands for an object of the library that has the names of 8.6 and no others: notes each call."""

    def __init__(self, kind, **known):
        self.__dict__.update(known, kind=kind, calls=[])

    def __getattr__(self, name):
        if name not in OF_8_6[self.kind]:
            raise AttributeError(f"{self.kind} of 8.6 has no {name}")
        return lambda *args: self.calls.append((name, *args)) or True

    def __setattr__(self, name, value):
        if name not in OF_8_6[self.kind]:
            raise AttributeError(f"{self.kind} of 8.6 has no {name}")
        self.calls.append((name, value))


def enum(name, *members, start=0):
    return IntEnum(name, members, start=start)


class Library86:
    """The full library 8.6 in as far as a build uses it; its logger and all else are the double's."""

    def __init__(self, version, faults=()):
        self.double = StrictTensorRT(HostDevice(), version="8.6.1.6")
        self.__version__ = version
        tensor = SimpleNamespace(
            name="x", dtype=SimpleNamespace(name="FLOAT"), shape=(-1, 4), is_shape_tensor=False
        )
        tensor.get_dimension_name = lambda axis: ""
        one = {"num_inputs": 1, "num_outputs": 1}
        either = {name: lambda index: tensor for name in ("get_input", "get_output")}
        self.network = Part("INetworkDefinition", **one, **either)
        cache = Part("ITimingCache", serialize=lambda: b"times")
        self.config = Part("IBuilderConfig", create_timing_cache=lambda content: cache)
        self.config.__dict__["add_optimization_profile"] = lambda profile: 0
        self.builder = Part(
            "Builder",
            create_network=self.create_network,
            create_builder_config=lambda: self.config,
            create_optimization_profile=lambda: Part("IOptimizationProfile"),
            build_serialized_network=lambda network, config: b"a plan",
        )
        self.parser = Part(
            "OnnxParser",
            parse=lambda model, path: not faults,
            num_errors=len(faults),
            get_error=faults.__getitem__,
            get_used_vc_plugin_libraries=lambda: self.parser.calls.append("asked") or ["libvc.so"],
        )
        self.Builder = lambda log: self.builder
        self.OnnxParser = lambda network, log: self.parser
        self.NetworkDefinitionCreationFlag = enum("Creation", "EXPLICIT_BATCH", "EXPLICIT_PRECISION")
        self.PreviewFeature = enum("PreviewFeature", "FASTER", "DISABLE", "PROFILE_SHARING_0806")
        self.BuilderFlag = enum("BuilderFlag", *FLAGS_OF_8_6)
        self.MemoryPoolType = enum("MemoryPoolType", "WORKSPACE", "TACTIC_DRAM")
        self.OnnxParserFlag = enum("OnnxParserFlag", "NATIVE_INSTANCENORM")

    def __getattr__(self, name):
        return getattr(self.double, name)

    def create_network(self, flags):
        assert flags == 1, "EXPLICIT_BATCH: the parser of 8.6 refuses another network"
        return self.network

    def build(self, path, **options):
        flavour = Flavour("tensorrt", self, is_real=False)
        return build_plan(path.read_bytes(), path, flavour, BuildOptions(**options), [].append)


def test_a_plan_of_8_6(model, tmp_path):
    library, cache = Library86("8.6.0"), tmp_path / "timing"
    options = {"precision": "fp16", "refit": "all", "profiling": "detailed", "max_rows": 8}
    made = library.build(model, hardware_compatibility="ampere-plus", timing_cache=str(cache), **options)
    assert (made.content, made.version) == (b"a plan", "8.6.0")
    assert made.profiles == ({"x": ((1, 4), (8, 4), (8, 4))},)
    assert cache.read_bytes() == b"times"
    sharing = library.PreviewFeature.PROFILE_SHARING_0806
    assert ("set_preview_feature", sharing, True) in library.config.calls, "several contexts need it"


@pytest.mark.parametrize(("version", "is_asked"), [("8.6.0", False), ("8.6.0.12", False), ("8.6.1", True)])
def test_the_parser_of_8_6_0_is_not_asked_what_crashes_it(model, version, is_asked):
    library = Library86(version)
    made = library.build(model, version_compatible=True)
    assert (
        library.parser.calls == [("set_flag", library.OnnxParserFlag.NATIVE_INSTANCENORM), "asked"] * is_asked
    )
    assert made.plugins == ("libvc.so",) * is_asked


def test_an_error_of_the_parser_of_8_6_has_no_names(model):
    said = "No importer registered for op: Foo"
    told = {"code": 8, "desc": said, "file": "m.cpp", "func": "parse", "line": 7, "node": 3}
    fault = Part("ParserError", **{name: lambda value=value: value for name, value in told.items()})
    with pytest.raises(BuildError, match=r"by tensorrt 8.6.0: node 3: No importer .*m.cpp:7 parse"):
        Library86("8.6.0", (fault,)).build(model)


def test_what_8_6_lacks_is_refused(model):
    with pytest.raises(OptionsError, match=r"tensorrt 8.6.0 has no BuilderFlag.STRIP_PLAN"):
        Library86("8.6.0").build(model, strip=True)
