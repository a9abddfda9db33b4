"""The double against the real bindings: names, argument names, properties, enum members.

What the double leaves out is named here, each with the reason.
"""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorrt_lean
import tensorrt_rtx

from asynctrt.devices.host import HostDevice
from asynctrt.testing.tensorrt import StrictTensorRT
from asynctrt.testing.tensorrt.double import ONLY

ROOT = Path(__file__).parents[3]
REAL = {"tensorrt_lean": tensorrt_lean, "tensorrt_rtx": tensorrt_rtx}
TRT = StrictTensorRT(HostDevice())
DOUBLES = {flavour: StrictTensorRT(HostDevice(), flavour=flavour) for flavour in REAL}

CLASSES = [
    "Runtime",
    "ICudaEngine",
    "IExecutionContext",
    "IRuntimeConfig",
    "Refitter",
    "ILogger",
    "Logger",
    "IErrorRecorder",
    "IGpuAllocator",
    "IGpuAsyncAllocator",
    "IOutputAllocator",
]
NOT_IN_LEAN = ["EngineInspector", "IRuntimeCache", "OnnxParserRefitter", "ParserError"]
"""Classes of RTX that lean lacks. The full package, which cannot be had here, has the last two."""

COMPARED = [
    *((name, flavour) for flavour in REAL for name in CLASSES),
    *((name, "tensorrt_rtx") for name in NOT_IN_LEAN),
]

ENUMS = [
    "DataType",
    "TensorIOMode",
    "TensorLocation",
    "ExecutionContextAllocationStrategy",
    "ErrorCodeTRT",
    "HardwareCompatibilityLevel",
    "EngineStat",
    "EngineCapability",
    "ProfilingVerbosity",
    "TempfileControlFlag",
    "AllocatorFlag",
    "LayerInformationFormat",
    "APILanguage",
]

DLA = "there is no such accelerator on a server's GPU"
PLUGINS = "no engine of the double has plugins"
DEBUG = "debugging layers is not what an inference runtime does"
SERIALISE = "plans of the double are written by double_plan"
FORMATS = "lean and dispatch lack the type that it returns; every tensor is linear"
SYNCHRONOUS = "an inference runtime has no use for an enqueue that blocks"
SYNCHRONOUS_LOAD = "an engine is refitted before it runs anything"
PROFILER = "layers have no times of their own"
SHAPE_TENSORS = "an engine with shape tensors does not run here"
MULTI_GPU = "one GPU"
BY_NAME = "weights of the double have names, and the parser sets them"

LEFT_OUT = {
    "Runtime": {
        "DLA_core": DLA,
        "dla_workspace_allocation_strategy": DLA,
        "get_plugin_registry": PLUGINS,
        "engine_header_size": "a plan is read before its library is known",
        "get_engine_validity": "a refusal says what the double would answer",
    },
    "ICudaEngine": {
        "create_serialization_config": SERIALISE,
        "serialize": SERIALISE,
        "serialize_with_config": SERIALISE,
        "get_tensor_format": FORMATS,
        "get_tensor_format_desc": FORMATS,
        "is_debug_tensor": DEBUG,
        "get_tensor_profile_values": SHAPE_TENSORS,
        "create_weights_manager": "weights come from the plan",
        "load_weights_async": "a plan is in memory, not in a stream",
    },
    "IExecutionContext": {
        "execute_v2": SYNCHRONOUS,
        "get_debug_listener": DEBUG,
        "get_debug_state": DEBUG,
        "set_all_tensors_debug_state": DEBUG,
        "set_debug_listener": DEBUG,
        "set_tensor_debug_state": DEBUG,
        "unfused_tensors_debug_state": DEBUG,
        "get_runtime_config": "the strategy is all that it would say, and that is what was given",
        "report_to_profiler": PROFILER,
        "set_communicator": MULTI_GPU,
    },
    "Refitter": {
        "get_all": BY_NAME,
        "get_missing": BY_NAME,
        "get_named_weights": BY_NAME,
        "get_weights_location": BY_NAME,
        "get_weights_prototype": BY_NAME,
        "set_named_weights": BY_NAME,
        "set_weights": BY_NAME,
        "unset_named_weights": BY_NAME,
        "refit_cuda_engine_async": SYNCHRONOUS_LOAD,
    },
    "OnnxParserRefitter": dict.fromkeys(
        ["load_initializer", "load_model_proto", "refit_model_proto", "refit_from_bytes"],
        "weights come from a file",
    ),
    "ParserError": dict.fromkeys(
        [
            "code",
            "file",
            "func",
            "line",
            "local_function_stack",
            "local_function_stack_size",
            "node",
            "node_operator",
        ],
        "its description has it all",
    ),
    "IGpuAllocator": {"interface_info": "the version of an interface concerns the library alone"},
    "IGpuAsyncAllocator": {"interface_info": "the version of an interface concerns the library alone"},
}

NOT_IN_RTX = {name: {"allocate", "deallocate"} for name in ("IGpuAllocator", "IGpuAsyncAllocator")}
"""What TensorRT for RTX no longer has, unlike the others: the deprecated half of the allocators."""


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("name", "flavour"), COMPARED)
def test_the_double_has_what_the_real_class_has(name, flavour):
    missing = public(getattr(REAL[flavour], name)) - public(getattr(DOUBLES[flavour], name))
    assert missing <= set(LEFT_OUT.get(name, {}))


@pytest.mark.parametrize(("name", "flavour"), COMPARED)
def test_the_double_has_nothing_that_the_real_class_lacks(name, flavour):
    more = public(getattr(DOUBLES[flavour], name)) - public(getattr(REAL[flavour], name))
    assert more == (NOT_IN_RTX.get(name, set()) if flavour == "tensorrt_rtx" else set())


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_said_to_be_left_out_exists_and_is_left_out(name):
    real = set().union(*(public(getattr(module, name, None)) for module in REAL.values()))
    assert set(LEFT_OUT[name]) <= real - public(getattr(DOUBLES["tensorrt_rtx"], name))


@pytest.mark.parametrize("flavour", REAL)
def test_a_flavour_of_the_double_lacks_what_the_real_one_lacks(flavour):
    for name in (*ONLY, *NOT_IN_LEAN):
        assert hasattr(DOUBLES[flavour], name) == hasattr(REAL[flavour], name), name


def test_memory_of_the_library_is_a_buffer():
    real, own = tensorrt_rtx.IHostMemory, DOUBLES["tensorrt_rtx"].IHostMemory
    assert public(real) <= public(own)
    assert bytes(memoryview(own(b"abc"))) == b"abc"
    assert own(b"abc").nbytes == 3


def is_method(kind, name):
    value = inspect.getattr_static(kind, name)
    return type(value).__name__ == "instancemethod"


def is_property(value):
    return hasattr(type(value), "__set__")


def can_be_set(value):
    return is_property(value) and getattr(value, "fset", True) is not None


def can_be_read(value):
    return is_property(value) and getattr(value, "fget", True) is not None


def real_arguments(function):
    """The arguments of every overload, from the signatures that the bindings write into their docstrings."""
    name = function.__name__
    found = []
    for signature in re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", function.__doc__, re.MULTILINE):
        if signature == "*args, **kwargs":
            continue
        # Defaults and type parameters have commas of their own; an argument is a name before a colon.
        names = re.findall(r"(?:^|, )(\w+): ", signature)
        found.append([argument for argument in names if argument != "self"])
    return found


METHODS = [
    (name, method, flavour)
    for name, flavour in COMPARED
    for method in sorted(public(getattr(DOUBLES[flavour], name)) & public(getattr(REAL[flavour], name)))
    if is_method(getattr(REAL[flavour], name), method)
]


def test_there_are_methods_to_compare():
    assert len(METHODS) > 50


@pytest.mark.parametrize(("name", "method", "flavour"), METHODS)
def test_arguments_have_the_names_of_the_real_ones(name, method, flavour):
    overloads = real_arguments(getattr(getattr(REAL[flavour], name), method))
    assert overloads
    own = list(inspect.signature(getattr(getattr(DOUBLES[flavour], name), method)).parameters)
    own.remove("self")
    # An overload differs in a type, or in an argument more: the double has one method that takes all.
    assert set(own) <= set().union(*overloads) | {"strategy"}
    assert any(own[: len(overload)] == overload for overload in overloads)


@pytest.mark.parametrize(("name", "flavour"), COMPARED)
def test_properties_are_properties_and_can_be_read_and_set_where_the_real_ones_can(name, flavour):
    real, own = getattr(REAL[flavour], name), getattr(DOUBLES[flavour], name)
    for attribute in public(real) & public(own):
        ours, theirs = (inspect.getattr_static(kind, attribute) for kind in (own, real))
        assert is_property(ours) == is_property(theirs), attribute
        assert can_be_set(ours) == can_be_set(theirs), attribute
        assert can_be_read(ours) == can_be_read(theirs), attribute


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        *((name, flavour) for flavour in REAL for name in ENUMS),
        ("CudaGraphStrategy", "tensorrt_rtx"),
        ("DynamicShapesKernelSpecializationStrategy", "tensorrt_rtx"),
    ],
)
def test_enums_have_the_members_of_the_real_ones(name, flavour):
    real = {key: member.value for key, member in getattr(REAL[flavour], name).__members__.items()}
    assert {key: member.value for key, member in getattr(DOUBLES[flavour], name).__members__.items()} == real


@pytest.mark.parametrize("flavour", REAL)
def test_severities_are_those_of_the_real_logger_and_can_be_compared(flavour):
    real = REAL[flavour].ILogger
    assert {key: member.value for key, member in TRT.ILogger.Severity.__members__.items()} == {
        key: member.value for key, member in real.Severity.__members__.items()
    }
    assert (TRT.ILogger.ERROR < TRT.ILogger.INFO) is (real.ERROR < real.INFO) is True


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

    def test_sizes_of_types(self, module):
        sizes = {member.name: member.itemsize for member in module.DataType.__members__.values()}
        assert sizes == {
            "FLOAT": 4,
            "HALF": 2,
            "BF16": 2,
            "INT8": 1,
            "INT32": 4,
            "INT64": 8,
            "BOOL": 1,
            "UINT8": 1,
            "FP8": 1,
            "INT4": 0.5,
            "FP4": 0.5,
            "E8M0": None,
        }

    def test_types_of_numpy(self, module):
        import numpy as np

        assert module.nptype(module.DataType.HALF) is np.float16
        with pytest.raises(TypeError, match="equivalent numpy datatype"):
            module.nptype(module.DataType.BF16)
        assert (module.volume((2, 3)), module.volume(())) == (6, 1)

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
        assert module.Logger.VERBOSE == module.ILogger.Severity.VERBOSE


def test_the_names_of_the_module_are_there():
    used = {
        "nptype",
        "volume",
        "Dims",
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "int32",
        "int64",
        "uint8",
        "bool",
    }
    for module in REAL.values():
        assert used | set(CLASSES) | set(ENUMS) <= set(dir(module))
    assert used | set(CLASSES) | set(ENUMS) | {"__version__", "__name__"} <= set(dir(TRT))


def test_importing_the_double_loads_neither_cuda_nor_tensorrt():
    program = "import sys, asynctrt.testing.tensorrt; print({name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not {"cuda", "tensorrt", "tensorrt_lean", "tensorrt_rtx"} & ast.literal_eval(done.stdout)
