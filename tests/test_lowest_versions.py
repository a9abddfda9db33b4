"""The lowest versions of dependencies that are allowed: installed, and tried with a part of the suite.

It takes a minute, most of it for the tests, and needs a package index.
"""

import os
import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path
from sys import executable

import pytest

from tests.helpers import needed

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(400)]
ROOT = Path(__file__).parent.parent
EXTRAS = "client,cpu,load,otel"
TOOLS = (
    "pytest",
    "pytest-timeout",
    "h11",
    "hypothesis",
    "ml-dtypes",
    "onnx",
    "opentelemetry-sdk",
    "starlette",
    "uvicorn",
)
TESTS = (
    "tests/backends/test_function.py",
    "tests/backends/test_onnx_links.py",
    "tests/loadtest/test_http_target.py",
    "tests/loadtest/test_local.py",
    "tests/serving/test_http_reader.py",
    "tests/serving/test_metrics.py",
    "tests/serving/test_websocket.py",
    "tests/test_options.py",
)


def run(*command, **settings):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=250, **settings
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the lowest versions, and with what tests need beside them."""
    needed(find_spec("uv"), "uv is missing: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("lowest")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [executable, "-m", "uv", "pip", "install", "-q", "--python", python]
    run(*install, "--resolution", "lowest-direct", f"{ROOT}[{EXTRAS}]")
    frozen = run(executable, "-m", "uv", "pip", "freeze", "-q", "--python", python).splitlines()
    pins = folder / "pins.txt"
    pins.write_text("\n".join(line for line in frozen if not line.startswith("asynctrt")))
    run(*install, "-c", pins, *TOOLS)
    return python


def test_a_part_of_the_suite_passes(python):
    said = run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *TESTS, cwd=ROOT
    )
    assert " passed" in said


def test_the_command_and_the_adapter_for_gpus_work(python, tmp_path):
    command = [python, "-m", "asynctrt"]
    elsewhere = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": "", "COLUMNS": "80"}}
    assert "--http-port" in run(*command, "serve", "--help", **elsewhere)
    run(python, "-c", "import asynctrt.devices.cuda, asynctrt.backends.tensorrt", **elsewhere)
