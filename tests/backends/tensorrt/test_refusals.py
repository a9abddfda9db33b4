"""Plans that a library refuses: the error names the cause, what was found, and the fix."""

import gc
import types

import pytest

from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.manifest import manifest_path
from asynctrt.backends.tensorrt.memory import MemoryRefusal
from asynctrt.backends.tensorrt.messages import TensorRTErrors
from asynctrt.backends.tensorrt.plan import read_plan
from asynctrt.backends.tensorrt.refusals import Refused
from asynctrt.devices.base import MemoryFigures
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError, DeviceMemoryError, DeviceUnavailableError, ModelError
from tests.backends.tensorrt.helpers import header
from tests.backends.tensorrt.test_manifest import manifest
from tests.doubles.tensorrt import EngineSpec, double_lean_runtime, double_plan


class Gpu(HostDevice):
    """A device that describes itself as a CUDA device does."""

    gpu = "NVIDIA H200"
    compute_capability = (9, 0)
    loss = None

    @property
    def lost(self):
        return self.loss


def explained(texts, *, plan=None, flavour="tensorrt", version="11.4.0.106", code="UNSPECIFIED_ERROR", **kw):
    module = types.ModuleType(flavour)
    module.__version__ = version
    for name in ("EngineInvalidityDiagnostics", "ComputeCapability"):
        if name in kw:
            setattr(module, name, kw.pop(name))
    errors = TensorRTErrors(tuple((code, text) for text in texts))
    device = kw.pop("device", None) or Gpu()
    memory, runtime = kw.pop("memory", ()), kw.pop("runtime", None)
    assert not kw
    found = Flavour(flavour, module, is_real=True)
    return Refused(read_plan(plan or header()), found, device, errors, memory, runtime).error()


OTHER_VERSION = (
    "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion stdVersionRead == "
    "kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 239, Serialized Engine "
    "Version: 240)"
)
OTHER_GPU = (
    "Error Code 6: Internal Error (The engine plan file is generated on an incompatible device, expecting "
    "compute 9.0 got compute 8.9, please rebuild.)"
)
NO_DRIVER = (
    "Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient for CUDA runtime version)"
)


@pytest.mark.parametrize(
    ("texts", "kind", "said"),
    [
        ((OTHER_VERSION,), ModelError, "built by version 11.4.0.106 of TensorRT"),
        ((OTHER_GPU,), ModelError, "NVIDIA H200 has compute capability 9.0"),
        ((NO_DRIVER,), DeviceUnavailableError, "nvidia-smi"),
        (("CUDA initialization failure with error: 100",), DeviceUnavailableError, "nvidia-smi"),
        (("Requested size was 10 bytes: out of memory",), DeviceMemoryError, "no room for its weights"),
        (("engineHostCodeAllowed is false",), ModelError, "allow_host_code=True"),
        (("the lean runtime is not in the plan",), ModelError, "lean_runtime=path"),
        (("getPluginCreator could not find plugin MyPlugin version 1",), ModelError, "plugin"),
        (
            ("cudaError 700: an illegal memory access was encountered",),
            DeviceLostError,
            "Restart the process",
        ),
        (
            ("TensorRT plan major version does not match runtime major version.",),
            ModelError,
            "built by version",
        ),
        (
            ("Platform specific tag mismatch detected. TensorRT plan files are only supported on the",),
            ModelError,
            "built on another platform",
        ),
        (
            ("The current device only supports 66 multiprocessors but the engine file requires 132",),
            ModelError,
            "more multiprocessors than this one has",
        ),
        (
            ("The current device is not compatible with this hardware-compatible engine.",),
            ModelError,
            "NVIDIA H200 has compute capability 9.0",
        ),
        (
            ("Cannot deserialize safety engine, use safety public APIs instead.",),
            ModelError,
            "for another runtime",
        ),
        (("Plan is corrupt",), ModelError, "damaged"),
        ((), ModelError, "damaged"),
    ],
)
def test_each_cause_has_its_error_and_its_fix(texts, kind, said):
    error = explained(texts)
    assert type(error) is kind
    assert said in str(error)
    for text in texts or ("TensorRT gave no reason",):
        assert text in str(error), "what the library said is never lost"
    assert "tensorrt 11.4.0.106 on host" in str(error)


def test_memory_that_was_refused_is_the_cause_whatever_the_library_says():
    refusal = MemoryRefusal(2000, 1000, 2500, "that is beyond the budget")
    error = explained(("some error",), memory=(refusal,))
    assert type(error) is DeviceMemoryError
    assert str(refusal) in str(error)


def test_memory_that_the_library_reports_alone_has_the_devices_figures():
    error = explained(("no",), code="FAILED_ALLOCATION")
    assert type(error) is DeviceMemoryError
    assert "are free" in str(error)


def test_a_device_without_memory_is_the_cause_of_words_that_say_nothing():
    class FullGpu(Gpu):
        def memory(self):
            return MemoryFigures(free_nbytes=4 << 20, total_nbytes=80 << 30, held_nbytes=0)

    error = explained(("Cask (no further information)",), device=FullGpu())
    assert type(error) is DeviceMemoryError
    assert "4.0 MiB" in str(error)
    assert type(explained(("Cask (no further information)",))) is ModelError


def test_a_lost_device_is_the_cause():
    device = Gpu()
    device.loss = DeviceLostError("lost before")
    assert explained(("any",), device=device) is device.loss


@pytest.mark.parametrize(
    ("plan_version", "here", "said"),
    [
        ((12, 0, 0, 1), "11.4.0.106", "TensorRT does not run plans that a later version built"),
        ((10, 13, 2, 6), "11.4.0.106", "VERSION_COMPATIBLE"),
        ((10, 13, 2, 6), "11.4.0.106", "pip install 'tensorrt-lean==10.13.*'"),
        ((10, 13, 2, 6), "11.4.0.106.post1", "VERSION_COMPATIBLE"),
    ],
)
def test_another_version_says_which_one_would_fit(plan_version, here, said):
    plan = header(version=plan_version)
    for texts in ((OTHER_VERSION,), ("something that nobody has seen before",)):
        message = str(explained(texts, plan=plan, flavour="tensorrt_lean", version=here))
        assert ".".join(map(str, plan_version)) in message
        assert here in message
        assert said in message


def test_a_plan_of_tensorrt_for_rtx_for_other_gpus():
    plan = header(b"vtrt", version=(1, 7, 1, 116), gpus=0b1000)
    capabilities = types.SimpleNamespace(__members__={"NONE": 0, "CURRENT": 1, "SM80": 80, "SM89": 89})
    error = explained(
        ("any",), plan=plan, flavour="tensorrt_rtx", version="1.7.1.116", ComputeCapability=capabilities
    )
    assert type(error) is ModelError
    assert "other GPUs (8.9)" in str(error)
    assert "supports SM80, SM89" in str(error)
    assert "compute capability 9.0" in str(error)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("99.0.0.1", "TensorRT does not run plans that a later version built"),
        ("11.4.0.107", "TensorRT does not run plans that a later version built"),
        ("8.5.3.1", "plans of versions before 8.6 run on no other"),
    ],
)
def test_what_the_header_decides_is_decided_before_the_library_loads_it(bench, version, said, monkeypatch):
    made = bench(model=False)
    seen = []
    kind = made.trt.Runtime
    monkeypatch.setattr(kind, "deserialize_cuda_engine", lambda *args: seen.append(args))
    with pytest.raises(ModelError, match=f"{said}.*before the library loaded it") as caught:
        made.open(double_plan(EngineSpec(), version=version))
    assert version in str(caught.value)
    assert "asynctrt build MODEL.onnx -o PLAN" in str(caught.value)
    assert not seen


def test_the_command_that_builds_it_again_has_what_the_manifest_knows(tmp_path):
    path = tmp_path / "a plan.plan"
    content = header(version=(10, 13, 2, 6))
    path.write_bytes(content)
    kept = manifest(content, model="my; rm -rf model.onnx", profiles=("x=1x4:8x4:8x4",))
    manifest_path(path).write_text(kept.as_text())
    message = str(explained((OTHER_VERSION,), plan=path))
    assert (
        f"asynctrt build 'my; rm -rf model.onnx' -o '{path}' --flavour tensorrt --profiles x=1x4" in message
    )
    assert "--version-compatible" in message
    assert "lean_runtime= the libnvinfer_lean of version 10.13.2.6" in message


class Validity:
    """A runtime that diagnoses the header, like that of TensorRT for RTX."""

    engine_header_size = 64

    def __init__(self, bits):
        self._bits = bits

    def get_engine_validity(self, content):
        assert len(content) == 64
        if self._bits is None:
            raise RuntimeError("no opinion")
        return object(), self._bits


DIAGNOSES = types.SimpleNamespace(
    __members__={"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4, "MALFORMED_ENGINE": 32}
)


@pytest.mark.parametrize(
    ("bits", "kind", "said"),
    [
        (1, ModelError, "built by version"),
        (2, ModelError, "built for other GPUs"),
        (3, ModelError, "built for other GPUs"),
        (4, DeviceUnavailableError, "nvidia-smi"),
        (32, ModelError, "damaged"),
        (0, ModelError, "damaged"),
        (None, ModelError, "damaged"),
    ],
)
def test_a_runtime_that_can_be_asked_is_asked(bits, kind, said):
    plan = header(b"vtrt", version=(1, 7, 1, 116))
    error = explained(
        ("any",),
        plan=plan,
        flavour="tensorrt_rtx",
        version="1.7.1.116",
        EngineInvalidityDiagnostics=DIAGNOSES,
        runtime=Validity(bits),
    )
    assert type(error) is kind
    assert said in str(error)


def refused(bench, plan, **options):
    made = bench(model=False, plan=plan, **options)
    with pytest.raises(ModelError) as caught:
        made.open()
    return str(caught.value)


def test_the_double_refuses_another_gpu(bench):
    message = refused(bench, double_plan(EngineSpec(), compute_capability=(8, 6)))
    assert "expecting compute 9.0 got compute 8.6" in message
    assert "HardwareCompatibilityLevel.AMPERE_PLUS" in message


def test_a_compatible_plan_runs_where_it_was_not_built(bench):
    spec = EngineSpec(hardware_compatibility="AMPERE_PLUS")
    assert bench(spec, plan=double_plan(spec, compute_capability=(8, 6))).model.capabilities.rows_max == 64


def test_code_for_the_host_needs_trust(bench):
    spec = EngineSpec(version_compatible=True)
    plan = double_plan(spec, version="10.13.2.6")
    assert "allow_host_code=True" in refused(bench, plan)
    assert bench(spec, plan=plan, allow_host_code=True).model.capabilities.rows_max == 64


def test_a_plan_without_its_lean_runtime(bench, tmp_path):
    spec = EngineSpec(version_compatible=True, excludes_lean_runtime=True)
    plan = double_plan(spec, version="10.13.2.6")
    assert "lean_runtime=path" in refused(bench, plan)
    lean = tmp_path / "libnvinfer_lean.so.10"
    lean.write_bytes(double_lean_runtime("10.13.2.6"))
    made = bench(spec, plan=plan, lean_runtime=lean)
    binding, arena = made.ready()
    made.run(binding, 3, arena)


def test_a_lean_runtime_is_gone_before_the_one_that_loaded_it_also_after_a_refusal(bench, tmp_path):
    lean = tmp_path / "libnvinfer_lean.so.10"
    lean.write_bytes(double_lean_runtime("10.13.2.6"))
    made = bench(model=False, lean_runtime=lean)
    with pytest.raises(ModelError) as caught:
        made.open(double_plan(EngineSpec(), version="10.9.0.34"))
    del caught
    gc.collect()
    assert made.trt.violations() == ()


def test_a_lean_runtime_that_is_none(bench, tmp_path):
    lean = tmp_path / "libnvinfer_lean.so.10"
    lean.write_bytes(b"no library")
    message = refused(bench, None, lean_runtime=lean)
    assert "cannot be loaded" in message
    assert str(lean) in message
    assert "TensorRT said" in message


def test_the_double_has_no_room(bench):
    made = bench(model=False)
    made.trt.fail_next("deserialize-memory")
    with pytest.raises(DeviceMemoryError, match="OutOfMemory"):
        made.open()


def test_a_budget_that_the_weights_exceed(bench):
    made = bench(EngineSpec(weights_nbytes=100_000), model=False, memory_budget=50_000)
    with pytest.raises(DeviceMemoryError) as caught:
        made.open()
    assert "memory_budget" in str(caught.value)
    assert made.device.memory().held_nbytes == 0


@pytest.mark.parametrize(
    ("built_by", "is_refused"),
    [((8, 6, 0, 12), False), ((8, 6, 1, 6), True), ((8, 5, 3, 1), True), ((10, 0, 1, 6), True)],
)
def test_a_library_of_three_numbers(built_by, is_refused):
    """TensorRT 8 tells three, and the headers of its plans have four."""
    module = types.ModuleType("tensorrt")
    module.__version__ = "8.6.0"
    found = Flavour("tensorrt", module, is_real=True)
    plan = read_plan(header(version=built_by))
    refused = Refused(plan, found, Gpu(), TensorRTErrors(()), (), None)
    assert (refused.before_loading(has_lean_runtime=False) is not None) == is_refused
