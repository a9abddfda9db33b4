"""Libraries of plugins, with the real registry, in a process of its own: what is loaded stays."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PLUGINS = """
import sys

import tensorrt_rtx as module
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.messages import log_of
from asynctrt.backends.tensorrt.plugins import register_plugins

flavour, log = Flavour("tensorrt_rtx", module, is_real=True), log_of(module).subscribe(30)
runtime = module.Runtime(log_of(module))
register_plugins(flavour, (), log)
print("creators", len(module.get_plugin_registry().all_creators))
for _ in range(2):
    try:
        register_plugins(flavour, (sys.argv[1],), log)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_plugins_of_the_real_library():
    """Its own are registered, and what has none is refused, with the words of the library."""
    library = sys.modules["_ctypes"].__file__
    command = [sys.executable, "-c", PLUGINS, library]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50, cwd=ROOT)
    creators, *refusals = done.stdout.splitlines()
    assert creators > "creators 0"
    assert len(refusals) == 2
    for refusal in refusals:
        assert refusal.startswith("ModelError: tensorrt_rtx")
        assert f"cannot load the plugins of {library!r}" in refusal
        assert "getCreators could not be loaded" in refusal
