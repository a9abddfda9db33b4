"""The double against the real bindings: names, argument names, properties, enum members.

Those that are installed are read here, and others as they were recorded. The double has what the adapter
uses, and anything else raises ``AttributeError``.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorrt_lean
import tensorrt_rtx

from asynctrt.devices.host import HostDevice
from tests.doubles.surface import RECORDED, arguments_of, compared, double_of, record, recorded, surface_of
from tests.doubles.tensorrt import StrictTensorRT
from tests.helpers import needed

ROOT = Path(__file__).parents[2]
REAL = {"tensorrt_lean": tensorrt_lean, "tensorrt_rtx": tensorrt_rtx}
TRT = StrictTensorRT(HostDevice())


SURFACES = {name: recorded(name) for name in RECORDED}
SURFACES |= {f"{name}-{module.__version__}": surface_of(module) for name, module in REAL.items()}
OWN = {name: surface_of(double_of(name)) for name in SURFACES}
COMPARED = [(name, kind) for name in SURFACES for kind in SURFACES[name]["classes"]]

ALIASES = {
    "EngineCapability": {"DEFAULT", "SAFE_GPU", "SAFE_DLA"},
    "ProfilingVerbosity": {"DEFAULT", "VERBOSE"},
}
"""Second names of members, which were removed with TensorRT 10."""

NEWER = {
    "DataType": {"BF16", "INT64", "INT4", "FP4", "E8M0"},
    "HardwareCompatibilityLevel": {"SAME_COMPUTE_CAPABILITY"},
}
"""Members that came after 8.6, and that an older double has all the same: no engine of its time has them."""

NOT_IN_RTX = {"IGpuAllocator", "IGpuAsyncAllocator"}
"""What TensorRT for RTX no longer has, unlike the others: the deprecated half of the allocators."""

COULD_BE_SET = {"active_optimization_profile"}
"""What could be set before TensorRT 10; ``set_optimization_profile_async`` took its place in 8.5."""


@pytest.mark.parametrize("name", SURFACES)
def test_the_double_has_the_names_that_the_module_has(name):
    assert OWN[name]["names"] == SURFACES[name]["names"]


@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_the_double_has_nothing_that_the_real_class_lacks(name, kind):
    real, own = SURFACES[name]["classes"][kind], OWN[name]["classes"][kind]
    more = set(dir(bytes)) if kind == "IHostMemory" else set()
    if name.startswith("tensorrt_rtx") and kind in NOT_IN_RTX:
        more = {"allocate", "deallocate"}
    assert own.keys() - real.keys() <= more


def methods_of(name, kind):
    """Return the methods that a real class and the double's have, with the arguments of both."""
    real, own = SURFACES[name]["classes"][kind], OWN[name]["classes"][kind]
    found = {member: arguments_of(real[member]) for member in real.keys() & own.keys()}
    return {
        member: (given, *arguments_of(own[member])) for member, given in found.items() if given is not None
    }


def test_there_are_methods_to_compare():
    assert sum(len(methods_of(*one)) for one in COMPARED) > 300


@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_arguments_have_the_names_of_the_real_ones(name, kind):
    for member, (overloads, own) in methods_of(name, kind).items():
        # An overload differs in a type, or in an argument more: the double has one method that takes all.
        assert set(own) <= set().union(*overloads) | {"strategy", "runtime_config"}, member
        assert any(own[: len(overload)] == overload for overload in overloads), member


@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_properties_are_properties_and_can_be_read_and_set_where_the_real_ones_can(name, kind):
    real, own = SURFACES[name]["classes"][kind], OWN[name]["classes"][kind]
    is_old = double_of(name).__version__.startswith("8.")
    for member in real.keys() & own.keys():
        if arguments_of(real[member]) is not None:
            assert arguments_of(own[member]) is not None, member
        elif not (is_old and member in COULD_BE_SET):
            assert own[member] == real[member], member


@pytest.mark.parametrize(
    ("name", "enum"), [(name, enum) for name in SURFACES for enum in SURFACES[name]["enums"]]
)
def test_enums_have_the_members_of_the_real_ones(name, enum):
    real, own = SURFACES[name]["enums"][enum], OWN[name]["enums"][enum]
    assert {key for key, _ in real.items() - own.items()} <= ALIASES.get(enum, set())
    newer = set() if double_of(name).__version__.startswith(("11.", "1.")) else NEWER.get(enum, set())
    assert {key for key, _ in own.items() - real.items()} <= newer


@pytest.mark.parametrize("name", SURFACES)
def test_severities_are_those_of_the_real_logger(name):
    assert OWN[name]["severities"] == SURFACES[name]["severities"]


@pytest.mark.parametrize("module", [*REAL.values(), TRT], ids=[*REAL, "double"])
def test_severities_can_be_compared(module):
    assert module.ILogger.ERROR < module.ILogger.INFO


@pytest.mark.tier2
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RECORDED)
def test_what_was_recorded_is_what_the_wheels_have(tmp_path, name):
    """Needs a package index."""
    if name == "tensorrt-8.6.1.6" and sys.version_info >= (3, 12):
        pytest.skip("the last bindings of 8.6 are for Python 3.11")
    needed(shutil.which("gcc") and shutil.which("readelf"), "gcc and readelf are missing: run .ci/packages")
    assert compared(record(*RECORDED[name], tmp_path)) == recorded(name)


def test_memory_of_the_library_is_a_buffer():
    memory = double_of("tensorrt_rtx-1.7.1.116").IHostMemory(b"abc")
    assert bytes(memoryview(memory)) == b"abc"
    assert memory.nbytes == 3


@pytest.mark.parametrize("module", [*REAL.values(), TRT], ids=[*REAL, "double"])
class TestHabits:
    """Common mistakes, tried on the real bindings and on the double alike."""

    def test_an_allocator_cannot_be_asked_for(self, module):
        assert module.Runtime.gpu_allocator.fget is None
        assert module.IExecutionContext.device_memory.fget is None

    def test_a_shape_is_no_tuple_and_does_not_compare_with_another(self, module):
        dims = module.Dims((2, 3))
        assert not isinstance(dims, tuple)
        assert (len(dims), list(dims), dims[1], dims[0:1], repr(dims)) == (2, [2, 3], 3, (2,), "(2, 3)")
        assert dims == (2, 3) == tuple(dims)
        assert dims == [2, 3]
        assert dims != (3, 2)
        with pytest.raises(TypeError):
            _ = dims == module.Dims((2, 3))
        with pytest.raises(TypeError):
            hash(dims)
        with pytest.raises(ValueError, match="Input length 9. Max expected length is 8"):
            module.Dims((1,) * 9)
        assert module.Dims.MAX_DIMS == 8
        assert module.Dims() == ()

    def test_a_member_is_no_number_and_gives_one(self, module):
        assert module.DataType.FLOAT != 0
        assert int(module.DataType.INT64) == 8
        assert module.DataType(3) == module.DataType.INT32 == module.int32
        assert {module.DataType.HALF: 1}[module.float16] == 1
        assert repr(module.DataType.FLOAT) == "<DataType.FLOAT: 0>"

    def test_a_base_class_that_was_not_initialised_is_refused(self, module):
        class Forgetful(module.ILogger):
            def __init__(self):
                pass

        if module is TRT:
            with pytest.raises(TypeError, match="__init__\\(\\) must be called when overriding __init__"):
                module.Runtime(Forgetful())
        else:
            with pytest.raises(TypeError, match="__init__\\(\\) must be called when overriding __init__"):
                Forgetful()

    def test_a_severity_is_an_attribute_of_the_logger_too(self, module):
        assert module.ILogger.WARNING is module.ILogger.Severity.WARNING


def test_importing_the_double_loads_neither_cuda_nor_tensorrt():
    program = "import sys, tests.doubles.tensorrt; print({name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not {"cuda", "tensorrt", "tensorrt_lean", "tensorrt_rtx"} & ast.literal_eval(done.stdout)
