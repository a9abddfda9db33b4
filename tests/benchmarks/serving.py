"""Serving over HTTP, websocket and gRPC, beside bare servers and a peer: one client, one run, A B C A B C.

The client and the server share the machine's cores. A no-op model (float32[16]) and a 512-2048-512 x 2 MLP.
Mosec is measured if it is installed (``pip install mosec``).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import psutil

from asynctrt.kserve.protobuf import message_classes
from tests.benchmarks.common import arguments, copying_model, in_turn, report, save
from tests.benchmarks.mlp import mlp_onnx
from tests.helpers import free_port

ROOT = Path(__file__).parent.parent.parent
INFER = "/v2/models/{}/infer"
SOCKET = "/v2/models/{}/ws"


def noop():
    """Return a model that returns its input."""
    return copying_model(name="noop")


@contextmanager
def process(*command):
    """Start a server process, and wait until it listens on the last port of its command line."""
    started = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield psutil.Process(started.pid)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def is_ready(url, context):
    try:
        with urlopen(f"{url}/v2/health/ready", context=context) as answer:
            return answer.status == 200
    except OSError:
        return False


def _wait(condition, failure):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError(failure)


def wait_for(port):
    """Wait until a bare server listens."""
    _wait(lambda: listens(port), f"nothing listens on port {port}")


def wait_until_ready(url, context=None):
    """Wait until asynctrt's server has its models: it listens before it loads them."""
    _wait(lambda: is_ready(url, context), f"{url} is not ready")


def cpu_s(server):
    return sum(
        sum(one.cpu_times()[:2]) for one in [server, *server.children(recursive=True)] if one.is_running()
    )


def load(server, url, seconds, **settings):
    """Run the client once; return its figures, and the server's CPU time per request."""
    given = [f"--{name}={value}" for name, value in settings.items() if value is not True]
    given += [f"--{name}" for name, value in settings.items() if value is True]
    command = [sys.executable, "-m", "tests.benchmarks.client", url, f"--seconds={seconds}", *given]
    client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "open\n"
    began = cpu_s(server)
    figures = json.loads(client.stdout.readline())
    figures["server_cpu_us"] = (cpu_s(server) - began) / max(figures["requests"], 1) * 1e6
    client.wait()
    assert not figures["errors"], figures
    return figures


def grpc_body():
    message = message_classes()["ModelInferRequest"](model_name="noop", raw_input_contents=[bytes(64)])
    message.inputs.add(name="input", datatype="FP32", shape=[1, 16])
    return message.SerializeToString().hex()


def cases(stack, folder, seconds, only):
    """Return the cases by name whose name has ``only`` in it: functions that measure once."""
    mlp = mlp_onnx(Path(folder) / "mlp.onnx")
    http, rpc = free_port(), free_port()
    ours = stack.enter_context(
        process(
            "asynctrt",
            "serve",
            "tests.benchmarks.serving:noop",
            f"mlp={mlp}",
            f"--http-port={http}",
            f"--grpc-port={rpc}",
        )
    )
    servers = {"uvicorn": free_port(), "websockets": free_port(), "grpc": free_port()}
    bare = {
        kind: stack.enter_context(process("tests.benchmarks.servers", kind, port))
        for kind, port in servers.items()
    }
    for port in (rpc, *servers.values()):
        wait_for(port)
    wait_until_ready(f"http://127.0.0.1:{http}")
    web, sockets = f"http://127.0.0.1:{http}", f"ws://127.0.0.1:{http}"
    method = "/inference.GRPCInferenceService/ModelInfer"
    body = grpc_body()

    def run(server, url, **settings):
        return lambda: load(server, url, seconds, **settings)

    made = {
        "HTTP no-op, 64": run(ours, web + INFER.format("noop")),
        "HTTP no-op, 256": run(ours, web + INFER.format("noop"), connections=256),
        "HTTP MLP, 64": run(ours, web + INFER.format("mlp"), dim=512),
        "HTTP MLP, 256": run(ours, web + INFER.format("mlp"), dim=512, connections=256),
        "uvicorn alone, 64": run(bare["uvicorn"], f"http://127.0.0.1:{servers['uvicorn']}/", raw=True),
        "websocket no-op, 64 x 1": run(ours, sockets + SOCKET.format("noop")),
        "websocket no-op, 256 x 1": run(ours, sockets + SOCKET.format("noop"), connections=256),
        "websocket no-op, 64 x 16": run(ours, sockets + SOCKET.format("noop"), depth=16),
        "websocket MLP, 64 x 4": run(ours, sockets + SOCKET.format("mlp"), depth=4, dim=512),
        "websockets alone, 64 x 1": run(bare["websockets"], f"ws://127.0.0.1:{servers['websockets']}/"),
        "websockets alone, 64 x 16": run(
            bare["websockets"], f"ws://127.0.0.1:{servers['websockets']}/", depth=16
        ),
        "gRPC no-op, 64": run(ours, f"grpc://127.0.0.1:{rpc}{method}", body=body),
        "grpc.aio alone, 64": run(bare["grpc"], f"grpc://127.0.0.1:{servers['grpc']}{method}", body=body),
    }
    if only in "Mosec no-op, 64" and find_spec("mosec") is not None:
        for name, model in (("no-op", ()), ("MLP", (mlp,))):
            port = free_port()
            peer = stack.enter_context(process("tests.benchmarks.mosec_server", port, *model))
            wait_for(port)
            url = f"http://127.0.0.1:{port}/inference"
            dim = 512 if model else 16
            for connections in (64, 256):
                made[f"Mosec {name}, {connections}"] = run(
                    peer, url, connections=connections, dim=dim, raw=True
                )
    return {name: run for name, run in made.items() if only in name}


def main():
    options = arguments(__doc__, repeats=3, seconds=3.0, only="")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = cases(stack, folder, options.seconds, options.only)
        results = in_turn(made, options.repeats, "serving")
    formats = {"requests_per_s": ",.0f", "server_cpu_us": ".1f", "p50_us": ",.0f", "p99_us": ",.0f"}
    report("Serving", results, f"runs of {options.seconds:g} s in turn;", **formats)
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
