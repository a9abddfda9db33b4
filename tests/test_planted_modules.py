"""Files in the working directory that are named like modules are not run.

Whoever may write there, in a folder of downloads or of models, could otherwise run code as the user.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.helpers import WAIT_S
from tests.models import double_onnx

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(120)]
ROOT = Path(__file__).parent.parent

APPLICATION = """
    import asyncio, asynctrt
    async def main():
        async with asynctrt.open({model!r}, isolation="process") as engine:
            assert engine.state == "open"
    asyncio.run(main())
"""

OWN_MODEL = """
    import asynctrt
    x, y = (asynctrt.TensorSpec(name, "float32", (1,)) for name in "xy")
    model = asynctrt.FunctionModel(lambda inputs: 2 * inputs["x"], inputs=x, outputs=y)
"""

PORTS = ("--http-port=0", "--grpc-port=0")
SCRIPT = """
    from asynctrt.__main__ import main
    if __name__ == "__main__":
        main()
"""

COMMAND = (sys.executable, "SCRIPT")
# Python has looked in the working directory before our code runs: only what is imported later is safe.
MODULE = (sys.executable, "-m", "asynctrt")
LATE = ("onnxruntime", "grpc", "orjson", "google", "prometheus_client")

CASES = {
    "serve": (*COMMAND, "serve", "MODEL", "--check"),
    "serve-in-workers": (*COMMAND, "serve", "MODEL", "--check", "--isolation=process"),
    "serve-with-fronts": (*COMMAND, "serve", "MODEL", "--fronts=2", *PORTS),
    "load": (*COMMAND, "load", "MODEL", "--seconds=0.3", "--callers=1"),
    "load-in-workers": (*COMMAND, "load", "MODEL", "--seconds=0.3", "--callers=1", "--isolation=process"),
    "inspect": (*COMMAND, "inspect", "MODEL", "--open"),
    "doctor": (*COMMAND, "doctor"),
    "application": (sys.executable, "APPLICATION"),
    "python -m": (*MODULE, "serve", "MODEL", "--check", "--isolation=process"),
    "module:attribute": (*COMMAND, "serve", "mine:model", "--check"),
    "module:attribute-in-workers": (*COMMAND, "serve", "mine:model", "--check", "--isolation=process"),
    "module:attribute-with-fronts": (*COMMAND, "serve", "mine:model", "--fronts=2", *PORTS),
    "module:attribute-under-load": (*COMMAND, "load", "mine:model", "--seconds=0.3", "--callers=1"),
}


def run(command, folder):
    """Run a command; a server until it is ready."""
    path = os.pathsep.join([str(ROOT), *[path for path in sys.path if path.endswith("site-packages")]])
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = []
        if "--fronts=2" in command:
            for line in process.stdout:
                said.append(line)
                if line.startswith("metrics"):
                    break
            process.send_signal(signal.SIGTERM)
        said.append(process.communicate(timeout=3 * WAIT_S)[0])
        return process.returncode, "".join(said)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", CASES.values(), ids=CASES)
def test_nothing_in_the_working_directory_is_imported(tmp_path, command):
    own, folder, ran = tmp_path / "own", tmp_path / "folder", tmp_path / "ran"
    own.mkdir()
    folder.mkdir()
    model = own / "double.onnx"
    double_onnx(model)
    (own / "application.py").write_text(textwrap.dedent(APPLICATION.format(model=str(model))))
    (own / "script.py").write_text(textwrap.dedent(SCRIPT))
    names = LATE if command[:3] == MODULE else {*sys.stdlib_module_names, *packages_distributions()}
    if "mine:model" in command:
        # Modules that are not installed may be there then: other packages try to import some that are not.
        # And the parts of a namespace package, such as google, are looked for in every folder.
        specs = {name: PathFinder.find_spec(name) for name in names}
        names = {name for name, spec in specs.items() if spec is not None and spec.origin is not None}
    for name in names:
        if name.isidentifier() and name != "asynctrt":
            (folder / f"{name}.py").write_text(
                f"import sys\nopen({str(ran)!r}, 'a').write(f'{name} in {{sys.orig_argv}}\\n')\n"
                "raise ImportError('planted')\n"
            )
    (folder / "mine.py").write_text(textwrap.dedent(OWN_MODEL))
    places = {
        "MODEL": str(model),
        "APPLICATION": str(own / "application.py"),
        "SCRIPT": str(own / "script.py"),
    }
    status, said = run([places.get(part, part) for part in command], folder)
    assert not ran.exists(), ran.read_text()[:2000]
    assert status in ((0, 3) if "doctor" in command else (0,)), said


def test_a_path_of_any_bytes_reaches_a_child(tmp_path, monkeypatch):
    from asynctrt._util.process import child_command

    module = tmp_path / os.fsdecode(b"caf\xe9") / "for_a_child.py"
    module.parent.mkdir()
    module.write_text("import json, sys\ndef main():\n    print(json.dumps(sys.argv[1:]))\n")
    monkeypatch.syspath_prepend(str(module.parent))
    # Whatever else is there: the import system leaves it out as well.
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    said = subprocess.run(
        child_command("for_a_child", "one", ""), capture_output=True, check=True, timeout=WAIT_S
    )
    assert json.loads(said.stdout) == ["one", ""]


def test_modules_of_the_package_are_not_at_the_top_in_a_child():
    """Or a child without Ray would take ``asynctrt/ray.py`` for it."""
    from asynctrt._util.process import child_command

    path = json.loads(child_command("for_a_child")[4])
    assert str(ROOT / "asynctrt") not in path
    assert str(ROOT) in path
