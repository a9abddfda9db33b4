"""The perceptron behind other ways to serve a model from Python, beside ours.

LitServe, BentoML, Ray Serve, FastAPI with a batcher by hand and with ours. Each is started by itself,
warmed up, and asked over HTTP by 64 connections, each again at once, and by one; then the next, and all of
that again. Client and server share the cores. Requests and answers are JSON, 512 numbers each way, which is
the usual way of each. ``--peers PYTHON`` names the interpreter of an environment that has LitServe and
BentoML (``pip install litserve bentoml onnxruntime``), whose dependencies do not go with others'; what is
not installed is left out.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil

from tests.benchmarks.common import arguments, in_turn, report, save
from tests.benchmarks.mlp import mlp_onnx
from tests.benchmarks.serving import ROOT, load, wait_for, wait_until_ready
from tests.helpers import free_port

SERVERS = Path(__file__).parent / "peer_servers.py"
ROW = np.random.default_rng(0).normal(size=512).round(6).tolist()
TENSOR = {"name": "input", "shape": [1, 512], "datatype": "FP32", "data": ROW}
BODIES = {
    "kserve": {"inputs": [TENSOR]},
    "row": {"row": ROW},
    "rows": {"row": [ROW]},
}
PEERS = {
    "asynctrt in FastAPI": ("fastapi-asynctrt", "row", ("fastapi", "uvicorn")),
    "a batcher by hand in FastAPI": ("fastapi-hand", "row", ("fastapi", "uvicorn")),
    "LitServe": ("litserve", "row", ("litserve",)),
    "BentoML": ("bentoml", "rows", ("bentoml",)),
    "Ray Serve": ("ray", "row", ("ray", "starlette")),
}
WARM_UP_S = 1.0


def version(python, module):
    """Return the version of a package in an environment; ``None`` if it is not there."""
    if python == sys.executable:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(module)
        return None
    code = f"from importlib.metadata import version; print(version({module!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or None


@contextmanager
def started(command, folder):
    server = psutil.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield server
    finally:
        alive = [*server.children(recursive=True), server]
        for one in alive:
            one.kill()
        server.wait()
        psutil.wait_procs(alive, timeout=10)


def cases(python, model):
    """Return for each framework its command up to the port, and the name of its body, by its label."""
    made = {"asynctrt serve": ([sys.executable, "-m", "asynctrt", "serve", f"mlp={model}"], "kserve")}
    for name, (kind, body, needs) in PEERS.items():
        for interpreter in dict.fromkeys((sys.executable, python)):
            found = [version(interpreter, need) for need in needs]
            if all(found):
                label = name if "FastAPI" in name else f"{name} {found[0]}"
                made[label] = ([interpreter, str(SERVERS), kind], body)
                break
    return made


def measure(command, body, model, seconds, folder):
    """Start a server, ask it, and stop it; return the figures of 64 connections and of one."""
    port = free_port()
    is_ours = body == "kserve"
    whole = [*command, f"--http-port={port}", "--no-grpc"] if is_ours else [*command, str(port), str(model)]
    with started(whole, ROOT if is_ours else folder) as server:
        url = f"http://127.0.0.1:{port}"
        if is_ours:
            wait_until_ready(url)
        else:
            wait_for(port)
            time.sleep(WARM_UP_S)  # Workers still load the model behind a port that is open.
        url += "/v2/models/mlp/infer" if is_ours else "/predict"
        text = json.dumps(BODIES[body]).encode().hex()
        load(server, url, min(seconds, WARM_UP_S), connections=16, body=text)
        return {
            connections: load(server, url, seconds, connections=connections, body=text)
            for connections in (64, 1)
        }


def main():
    options = arguments(__doc__, repeats=3, seconds=3.0, peers=sys.executable, only="")
    with tempfile.TemporaryDirectory() as folder:
        model = mlp_onnx(Path(folder) / "mlp.onnx")
        made = cases(options.peers, model)
        made = {name: case for name, case in made.items() if options.only in name}
        runs = {name: partial(measure, *case, model, options.seconds, folder) for name, case in made.items()}
        found = in_turn(runs, options.repeats, "frameworks")
    results = {
        name: {count: [run[count] for run in runs] for count in (64, 1)} for name, runs in found.items()
    }
    lines = {f"{name}, {count}": runs for name, both in results.items() for count, runs in both.items()}
    formats = {"requests_per_s": ",.0f", "server_cpu_us": ",.0f", "p50_us": ",.0f", "p99_us": ",.0f"}
    report("The perceptron over HTTP, JSON, 64 connections and one", lines, **formats)
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
