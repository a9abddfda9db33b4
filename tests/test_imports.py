"""The import rule: who may see whom, and what importing asynctrt does not load."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asynctrt"
STANDARD = set(sys.stdlib_module_names)

OPTIONAL = {
    "onnxruntime": {"backends/onnxruntime.py"},
    "google": {"serving/messages.py"},
    "aiohttp": {"loadtest/http_target.py"},
    "grpc": {"serving/grpc_server.py", "loadtest/grpc_target.py"},  # A server's side, and a client's.
    "hdrh": {"loadtest/histogram.py"},
    "jinja2": {"loadtest/page.py"},
    "matplotlib": {"loadtest/plots.py"},
    "psutil": {"loadtest/machine.py"},
    "pynvml": {"loadtest/machine.py"},
    "scipy": {"loadtest/statistics.py"},
    "yarl": {"loadtest/http_target.py"},  # It comes with aiohttp.
    "httptools": {"serving/http.py"},
    "opentelemetry": {"serving/telemetry.py"},
    "orjson": {"serving/wire.py"},
    "prometheus_client": {"serving/metrics.py"},
    "starlette": set(),  # An application's own: the endpoints are plain ASGI.
    "typer": {"cli.py"},
    "uvicorn": set(),
    "websockets": {"serving/frames.py"},
    "rich": {"cli.py", "loadtest/terminal.py"},  # One for each extra.
    "magika": set(),  # The demo takes its data and never imports it.
    "cuda": {"devices/cuda.py", "devices/cuda_objects.py", "testing/tensorrt/cuda.py"},
    "tensorrt": set(),  # The adapter imports whichever flavour it chose, by name.
    "tensorrt_lean": set(),
    "tensorrt_dispatch": set(),
    "tensorrt_rtx": set(),
    "trio": set(),
}


def imports(path):
    """Every module that a file imports, as dotted names; those of the package without its own name."""
    for item in ast.walk(ast.parse(path.read_text())):
        if isinstance(item, ast.Import):
            for alias in item.names:
                yield alias.name
        elif isinstance(item, ast.ImportFrom):
            assert not item.level, f"{path}: relative imports hide what is imported"
            yield item.module
            if item.module == "asynctrt":
                for alias in item.names:
                    yield f"asynctrt.{alias.name}"


def files(folder):
    return sorted((PACKAGE / folder).rglob("*.py"))


def own(names):
    return {name.removeprefix("asynctrt.").split(".")[0] for name in names if name.startswith("asynctrt.")}


def foreign(names):
    return {name.split(".")[0] for name in names} - STANDARD - {"asynctrt"}


@pytest.mark.parametrize("path", files("scheduling"), ids=lambda path: path.name)
def test_scheduling_sees_the_standard_library_and_the_errors_alone(path):
    names = set(imports(path))
    assert own(names) <= {"errors", "scheduling"}
    assert not foreign(names)
    assert not {name.split(".")[0] for name in names} & {"asyncio", "time", "threading", "random"}


@pytest.mark.parametrize("path", files("devices") + files("backends"), ids=lambda path: path.name)
def test_devices_and_backends_never_see_scheduling_or_runtime(path):
    assert own(imports(path)) <= {"backends", "clock", "devices", "errors", "tensors"}


@pytest.mark.parametrize("path", files("devices"), ids=lambda path: path.name)
def test_devices_never_see_backends(path):
    assert "backends" not in own(imports(path))


@pytest.mark.parametrize("path", files("runtime"), ids=lambda path: path.name)
def test_runtime_never_sees_what_stands_above_it(path):
    seen = {"alarm", "backends", "clock", "devices", "errors", "runtime", "scheduling", "tensors"}
    assert own(imports(path)) <= seen


@pytest.mark.parametrize("path", files("serving"), ids=lambda path: path.name)
def test_serving_sees_the_engine_and_nothing_under_it(path):
    seen = {"clock", "engine", "errors", "loading", "options", "process", "serving", "statistics", "tensors"}
    assert own(imports(path)) - {"__version__"} <= seen | {"Opening"}


@pytest.mark.parametrize("path", files("loadtest"), ids=lambda path: path.name)
def test_loadtest_sees_the_engine_the_client_and_the_words_of_the_protocol(path):
    seen = {"alarm", "bench", "client", "clock", "demo", "engine", "errors", "loading", "loadtest", "options"}
    assert own(imports(path)) <= seen | {"process", "serving", "statistics", "tensors"}
    serving = {name for name in imports(path) if name.startswith("asynctrt.serving.")}
    assert serving <= {f"asynctrt.serving.{name}" for name in ("datatypes", "messages", "wire")}


@pytest.mark.parametrize("path", files("runtime"), ids=lambda path: path.name)
def test_runtime_sees_no_single_backend(path):
    assert not {name for name in imports(path) if name.startswith("asynctrt.backends.")} - {
        "asynctrt.backends.base"
    }


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_dependency_lives_in_one_file(name):
    users = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if name in {module.split(".")[0] for module in imports(path)}
    }
    assert users == OPTIONAL[name]


def loaded_by(code):
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_importing_asynctrt_loads_no_runtime_of_a_model():
    assert not loaded_by("import asynctrt") & {"cuda", "tensorrt", "onnxruntime", "magika", "typer", "rich"}


def test_importing_the_doubles_loads_none_either():
    assert not loaded_by("import asynctrt.testing") & {"cuda", "tensorrt", "onnxruntime"}


MISSING = [
    *[("serve", "model.onnx", name, "serve") for name in ("google", "grpc", "httptools", "orjson")],
    *[("serve", "model.onnx", name, "serve") for name in ("prometheus_client", "websockets")],
    *[("load", "model.onnx", name, "load") for name in ("hdrh", "jinja2", "matplotlib", "psutil", "pynvml")],
    ("load", "model.onnx", "scipy", "load"),
    *[("bench", __file__, name, "cli") for name in ("typer", "rich")],
    ("bench", __file__, "onnxruntime", "cpu"),
]
"""A command, what it is given, a package that is not installed, and the extra that would bring it."""


@pytest.mark.parametrize(("command", "target", "missing", "extra"), MISSING)
def test_a_missing_extra_is_named(command, target, missing, extra):
    program = f"import sys; sys.modules[{missing!r}] = None; from asynctrt.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, command, target],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert f"pip install 'asynctrt[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_other_commands_need_nothing_of_a_load_test():
    heavy = {"aiohttp", "hdrh", "jinja2", "matplotlib", "psutil", "pynvml", "scipy"}
    assert not loaded_by("import asynctrt.cli, asynctrt.loadtest") & heavy


def test_a_websocket_in_an_application_needs_no_server():
    """Who mounts the endpoint has a server: neither HTTP's parser nor gRPC nor metrics are loaded for it."""
    code = "from asynctrt.serving import websocket_endpoint; websocket_endpoint(lambda: None)"
    assert not loaded_by(code) & {"grpc", "google", "httptools", "prometheus_client", "websockets", "typer"}
