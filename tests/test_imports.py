"""The import rules: which module may import which, and what importing asynctrt must not load."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asynctrt"
STANDARD = set(sys.stdlib_module_names)

OPTIONAL = {
    "onnxruntime": {"backends/onnxruntime_session.py"},  # Its neighbours take it from there.
    "google": {"kserve/protobuf.py"},
    "aiohttp": {"client/http.py", "loadtest/http_target.py", "loadtest/plain_target.py"},
    "grpc": {"serving/grpc_server.py", "loadtest/grpc_target.py"},  # The server's side and the client's.
    "jinja2": {"loadtest/page.py"},
    "psutil": set(),
    "ray": {"ray.py"},
    "scipy": set(),
    "yarl": {
        "client/http.py",
        "loadtest/http_target.py",
        "loadtest/plain_target.py",
    },  # aiohttp depends on it.
    "httptools": {"serving/http_reader.py"},
    "onnx": {"backends/onnxruntime_weights.py"},
    "opentelemetry": {"observe/opentelemetry.py"},
    "orjson": {"kserve/json_codec.py"},
    "prometheus_client": {"observe/prometheus.py"},
    "starlette": set(),  # Only applications import it: our endpoints are plain ASGI.
    "typer": {"cli/app.py"},
    "uvicorn": set(),
    "websockets": {"client/websocket.py", "serving/frames.py"},
    "rich": {"cli/build_terminal.py", "cli/app.py", "loadtest/terminal.py"},  # Two bring it.
    "threadpoolctl": {"cli/demo.py"},
    "magika": set(),  # The demo reads its files and never imports it.
    "cuda": {"devices/cuda/bindings.py"},
    "tensorrt": set(),  # The adapter imports the flavour that it chose by name.
    "tensorrt_lean": set(),
    "tensorrt_dispatch": set(),
    "tensorrt_rtx": set(),
    "trio": set(),
}


@cache
def statements(path):
    """Return what a file imports, wherever in it that stands."""
    tree = ast.parse(path.read_text())
    return [item for item in ast.walk(tree) if isinstance(item, ast.Import | ast.ImportFrom)]


@cache
def imports(path):
    """Return the dotted name of every module that a file imports."""
    return set(_imports(path))


def _imports(path):
    for item in statements(path):
        if isinstance(item, ast.Import):
            for alias in item.names:
                yield alias.name
        else:
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


LAYERS = (
    {"errors"},
    {"_util"},
    {"limits", "scheduling", "tensors"},
    {"devices", "kserve", "statistics"},
    {"backends"},
    {"options"},
    {"runtime"},
    {"core", "engine", "plans"},
    {"doctor", "opening", "workers"},
    {"batching", "client", "observe", "pipeline"},
    {"serving"},
    {"loadtest", "ray", "testing"},
    {"cli"},
    {"__init__", "__main__"},
)
"""From the lowest up. What a package or module imports stands in its own layer or below."""

ONLY = {
    "kserve": {"errors", "tensors"},
    "observe": {"_util", "core", "engine", "errors", "statistics", "tensors"},
    "scheduling": {"errors"},
    "serving": {
        *("_util", "backends", "core", "engine", "errors", "kserve", "observe", "options", "pipeline"),
        *("statistics", "tensors", "workers"),
    },
}
"""All that some import, besides themselves."""


def test_every_module_has_a_layer():
    assert {name.removesuffix(".py") for name in own_names()} == set().union(*LAYERS)


def own_names():
    return {
        path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }


@pytest.mark.parametrize("name", sorted(set().union(*LAYERS) - {"__init__", "__main__"}))
def test_a_layer_sees_those_below_it(name):
    number = next(number for number, layer in enumerate(LAYERS) if name in layer)
    allowed = ONLY.get(name, set().union(*LAYERS[: number + 1]))
    paths = files(name) or [PACKAGE / f"{name}.py"]
    seen = {other: path for path in paths for other in own(imports(path)) - {name}}
    assert {other: path for other, path in seen.items() if other not in allowed and other.islower()} == {}


def test_what_users_hold_knows_no_kind_of_engine():
    names = imports(PACKAGE / "engine.py")
    assert not {name for name in names if name.startswith("asynctrt.runtime")}
    assert {name for name in names if name.startswith("asynctrt.core")} == {"asynctrt.core.inputs"}


def test_scheduling_sees_the_standard_library_alone():
    names = {name for path in files("scheduling") for name in imports(path)}
    assert not foreign(names)
    assert not {name.split(".")[0] for name in names} & {"asyncio", "time", "threading", "random"}


def test_workers_see_the_engine_and_not_what_runs_it():
    """A front has requests and their keys as an engine has, but neither a scheduler nor a device."""
    modules = {"runtime.answers", "runtime.completion", "runtime.jobs", "runtime.shared"}
    modules |= {
        "runtime.results",
        "runtime.spans",
        "scheduling.batch",
        "scheduling.key",
        "scheduling.request",
    }
    names = {name.removeprefix("asynctrt.") for path in files("workers") for name in imports(path)}
    assert {name for name in names if name.split(".")[0] in ("devices", "runtime", "scheduling")} <= modules


@pytest.mark.parametrize("path", files("runtime"), ids=lambda path: path.name)
def test_runtime_sees_no_single_backend(path):
    assert not {name for name in imports(path) if name.startswith("asynctrt.backends.")} - {
        "asynctrt.backends.base"
    }


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_dependency_lives_in_one_file(name):
    for path in sorted(PACKAGE.rglob("*.py")):
        if name in {module.split(".")[0] for module in imports(path)}:
            user = str(path.relative_to(PACKAGE))
            assert any(
                user == home or (home.endswith("/") and user.startswith(home)) for home in OPTIONAL[name]
            )


def test_no_modules_import_one_another():
    """Imports for types count as well: two modules that need each other's types are one."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: {to for to in targets(path, modules) if to != name} for name, path in modules.items()}
    cyclic = {
        name.removeprefix("asynctrt."): sorted(graph[name]) for name in graph if name in seen(graph, name)
    }
    assert not cyclic


def seen(graph, start):
    """Return everything that is imported from `start` on."""
    found, left = set(), [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def targets(path, modules):
    """Yield the modules of the package that a file imports."""
    for item in statements(path):
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names if alias.name in modules)
        else:
            for alias in item.names:
                inner = f"{item.module}.{alias.name}"
                if inner in modules or item.module in modules:
                    yield inner if inner in modules else item.module


def loaded_by(code):
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_importing_asynctrt_loads_no_runtime_of_a_model():
    assert not loaded_by("import asynctrt") & {"cuda", "tensorrt", "onnxruntime", "magika", "typer", "rich"}


def test_importing_the_doubles_loads_none_either():
    serving = {"grpc", "google", "httptools", "orjson", "prometheus_client", "websockets"}
    assert not loaded_by("import asynctrt.testing") & {"cuda", "tensorrt", "onnxruntime", *serving}


MISSING = [
    *[("serve", "model.onnx", name, "serve") for name in ("google", "grpc", "httptools", "orjson")],
    *[("serve", "model.onnx", name, "serve") for name in ("prometheus_client", "websockets")],
    ("load", ("/nowhere/model.onnx", "--report", "page.html"), "jinja2", "load"),
    *[("inspect", __file__, name, "cli") for name in ("typer", "rich")],
    ("serve", __file__, "onnxruntime", "cpu"),
]
"""A command, its argument, a package that is not installed, and the extra that would bring it."""


@pytest.mark.tier2
@pytest.mark.parametrize(("command", "target", "missing", "extra"), MISSING)
def test_a_missing_extra_is_named(command, target, missing, extra):
    program = f"import sys; sys.modules[{missing!r}] = None; from asynctrt.__main__ import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            program,
            command,
            *([target] if isinstance(target, str) else target),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert f"pip install 'asynctrt[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


LOAD = "import asyncio, asynctrt; asyncio.run(asynctrt.loadtest.run('{}://127.0.0.1:1/x'))"


@pytest.mark.tier2
@pytest.mark.parametrize(
    ("package", "extra", "program"),
    [
        ("ray", "ray", "import asynctrt.ray"),
        ("orjson", "client", "import asynctrt.client"),
        ("orjson", "load", "import asynctrt.loadtest.http_target"),
        ("aiohttp", "load", LOAD.format("http")),
        ("websockets", "client", "import asynctrt.loadtest.websocket_target"),
        ("grpc", "load", LOAD.format("grpc")),
    ],
)
def test_the_extra_of_a_module_is_named(package, extra, program):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['{package}'] = None; {program}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert "MissingExtraError" in done.stderr
    assert f"'asynctrt[{extra}]'" in done.stderr


def test_the_other_commands_need_nothing_of_a_load_test():
    heavy = {"aiohttp", "jinja2", "scipy"}
    assert not loaded_by("import asynctrt.cli.app, asynctrt.loadtest") & heavy


def test_a_client_needs_no_server():
    code = "import asynctrt.client, asynctrt.client.http"
    serving = {"grpc", "google", "httptools", "prometheus_client", "typer", "rich", "uvicorn"}
    assert not loaded_by(code) & serving
    assert "aiohttp" not in loaded_by("import asynctrt.client")


def test_kserve_in_an_application_needs_no_server():
    """An application has its own server: mounting the protocols loads no HTTP parser, gRPC or metrics."""
    code = "from asynctrt.serving import kserve_app; kserve_app(lambda: None)"
    assert not loaded_by(code) & {"grpc", "google", "httptools", "prometheus_client", "websockets", "typer"}
