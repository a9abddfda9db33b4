"""The surface of a TensorRT package, as data: names, members of classes and their arguments, enums.

:func:`surface_of` reads it from a module that is installed, or from the double. Packages that cannot be
installed beside each other have theirs in ``surfaces/``, recorded from the wheels of their bindings. To
record them again::

    python -m tests.doubles.surface

A new member of the double needs that too, because members that it lacks are left out. The command needs a
package index, a C compiler and ``readelf``, and downloads 6 MB: stubs take the place of the libraries that
the bindings name, since nothing is called.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "surfaces"

RECORDED = {
    "tensorrt-8.6.1.6": ("tensorrt-bindings==8.6.1", "tensorrt_bindings"),
    "tensorrt-10.0.1.6": ("tensorrt-cu12-bindings==10.0.1", "tensorrt_bindings"),
    "tensorrt-10.16.1.11": ("tensorrt-cu12-bindings==10.16.1.11", "tensorrt_bindings"),
    "tensorrt-11.4.0.106": ("tensorrt-cu13-bindings==11.4.0.106", "tensorrt_bindings"),
    "tensorrt_lean-10.16.1.11": ("tensorrt-lean-cu12-bindings==10.16.1.11", "tensorrt_lean_bindings"),
}
"""By the flavour and the library's version: the wheel of bindings, and the module in it."""

NOT_IN_LEAN = {"EngineInspector", "OnnxParserRefitter", "ParserError", "init_libnvinfer_plugins"}
"""What the full library has and its lean runtime does not; the surfaces of 10.16 differ in nothing else."""

CLASSES = (
    "Runtime",
    "ICudaEngine",
    "IExecutionContext",
    "IRuntimeConfig",
    "Refitter",
    "ILogger",
    "IErrorRecorder",
    "IGpuAllocator",
    "IGpuAsyncAllocator",
    "IOutputAllocator",
    "IHostMemory",
    "EngineInspector",
    "IRuntimeCache",
    "OnnxParserRefitter",
    "ParserError",
)

ENUMS = (
    "DataType",
    "TensorIOMode",
    "TensorLocation",
    "ExecutionContextAllocationStrategy",
    "ErrorCodeTRT",
    "HardwareCompatibilityLevel",
    "EngineStat",
    "EngineCapability",
    "ProfilingVerbosity",
    "LayerInformationFormat",
    "CudaGraphStrategy",
)

NAMES = (
    *CLASSES,
    *ENUMS,
    "Dims",
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "get_plugin_registry",
    "init_libnvinfer_plugins",
    "int32",
    "int64",
    "int8",
    "uint8",
)
"""The names of a module that are compared."""


def surface_of(module):
    """Return the surface of a module of TensorRT, or of its double, that JSON can hold."""
    return {
        "names": [name for name in NAMES if hasattr(module, name)],
        "classes": {name: members_of(getattr(module, name)) for name in CLASSES if hasattr(module, name)},
        "enums": {name: values_of(getattr(module, name)) for name in ENUMS if hasattr(module, name)},
        "severities": values_of(module.ILogger.Severity),
    }


def values_of(enum):
    return {key: int(member) for key, member in enum.__members__.items()}


def members_of(kind):
    """Return what is public in a class: ``read set`` of a property, overloads of a method, or ``value``."""
    found = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        # A member that this version of the double lacks is listed, and cannot be had.
        if name.startswith("_") or not (hasattr(kind, name) or is_property(value)):
            continue
        if is_property(value):
            can = [("read", getattr(value, "fget", True)), ("set", getattr(value, "fset", True))]
            found[name] = " ".join(word for word, function in can if function is not None)
        elif inspect.isfunction(value) or type(value).__name__ == "instancemethod":
            found[name] = overloads_of(getattr(kind, name))
        else:
            found[name] = "value"
    return found


def is_property(value):
    return hasattr(type(value), "__set__")


def overloads_of(function):
    """Return the arguments of each overload: ``(name, shape) | (name)``."""
    if inspect.isfunction(function):
        return f"({', '.join(name for name in inspect.signature(function).parameters if name != 'self')})"
    found = []
    # Bindings write their signatures into their docstrings.
    pattern = rf"^(?:\d+\. )?{function.__name__}\((.*)\) -> "
    for signature in re.findall(pattern, function.__doc__, re.MULTILINE):
        if signature == "*args, **kwargs":
            continue
        # Defaults and type parameters have commas of their own; an argument is a name before a colon.
        names = re.findall(r"(?:^|, )(\w+): ", signature)
        found.append(f"({', '.join(name for name in names if name != 'self')})")
    return " | ".join(found)


def arguments_of(overloads):
    """Return the names in each of such overloads, or ``None`` for what is not a method."""
    if not overloads.startswith("("):
        return None
    return [re.findall(r"\w+", one) for one in overloads.split(" | ")]


def recorded(name):
    """Return a recorded surface. That of a lean runtime is the full library's, less some names."""
    found = json.loads((FOLDER / f"{name.replace('_lean', '')}.json").read_text())
    if "_lean" in name:
        found["names"] = [one for one in found["names"] if one not in NOT_IN_LEAN]
        found["classes"] = {one: of for one, of in found["classes"].items() if one not in NOT_IN_LEAN}
    return found


def double_of(name):
    """Return the double of a package, which is named by its flavour and its version."""
    from asynctrt.devices.host import HostDevice
    from tests.doubles.tensorrt import StrictTensorRT

    flavour, version = name.split("-")
    return StrictTensorRT(HostDevice(), version=version, flavour=flavour)


def compared(found):
    """Return a surface without members that no version of the double has: nothing compares them."""
    doubles = [surface_of(double_of(name))["classes"] for name in RECORDED]
    classes = {
        kind: {name: said for name, said in of.items() if any(name in one.get(kind, ()) for one in doubles)}
        for kind, of in found["classes"].items()
    }
    return found | {"classes": classes}


def record(requirement, module, folder):
    """Return the surface of a wheel, which another process imports from an empty folder."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    run(*download, "-d", folder, requirement)
    for wheel in folder.glob("*.whl"):
        ZipFile(wheel).extractall(folder)
    make_stubs(folder / module)
    program = f"import sys; sys.path[:0] = {[str(folder), str(ROOT)]!r}"
    program += f"; from tests.doubles import surface; surface.tell({module!r})"
    # Without site-packages: bindings load libraries that they find there, of any version.
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder / module)}
    return json.loads(run(sys.executable, "-I", "-S", "-c", program, env=env))


def make_stubs(folder):
    """Put stubs of TensorRT's libraries beside the bindings, with the functions that these need."""
    (library,) = folder.glob("*.so")
    said = run("readelf", "--wide", "--dynamic", "--dyn-syms", library)
    needed = re.findall(r"\(NEEDED\).*\[(libnv\S+)\]", said)
    missing = re.findall(r"GLOBAL DEFAULT +UND (\w+)$", said, re.MULTILINE)
    functions = [name for name in missing if not name.startswith(("Py", "_Py"))]
    source = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in functions)
    for name in needed:
        run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, "-xc", "-", input=source)


def run(*command, **settings):
    """Return what a command prints, which has to succeed."""
    done = subprocess.run(
        command, check=True, timeout=300, stdout=subprocess.PIPE, text=True, encoding="utf-8", **settings
    )
    return done.stdout


def tell(module):
    """Print the surface of a module that can be imported."""
    print(json.dumps(surface_of(import_module(module))))


def main():
    FOLDER.mkdir(exist_ok=True)
    for name, (requirement, module) in RECORDED.items():
        if "_lean" in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = compared(record(requirement, module, Path(folder)))
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {len(found['classes'])} classes, {len(found['enums'])} enums", flush=True)


if __name__ == "__main__":
    main()
